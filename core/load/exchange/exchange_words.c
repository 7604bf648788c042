/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_words: what the ranks of an exchange send each other beside buckets: greetings and votes.
 *
 *   greeting   "VXG1" | code, flags, mode: 4 bytes each | store: 16 | manifest: 32 | digest of the list: 32 |
 *              its length: 8 | length of the step's name: 4 | the name | the sentence of the code
 *   vote       code: 4 | four numbers of 8 | the sentence of the code
 *
 * A code is 0 or a negative errno. All that comes from a peer is checked here: a greeting or vote that breaks its form
 * is an error at all ranks, which names the rank that sent it. */
#include <stdio.h>
#include <string.h>

#include "core/base/text.h"
#include "core/load/exchange/exchange_words.h"

#define GREETING_MAGIC "VXG1"
#define GREETING_FIXED (4 + 12 + 16 + 32 + 32 + 8 + 4)
#define VOTE_FIXED (4 + 8 * EXCHANGE_VOTE_NUMBERS)
#define CODE_LEAST (-4095)

/* A text that a peer sent, without control characters. */
static void text_take(char *to, size_t room, const uint8_t *from, size_t len)
{
	size_t n = base_min(len, room - 1);

	memcpy(to, from, n);
	to[n] = 0;
	base_text_clean(to);
}

static bool code_take(const uint8_t *at, int *ret_code)
{
	*ret_code = (int)base_get32(at);
	return *ret_code <= 0 && *ret_code >= CODE_LEAST;
}

void exchange_greeting_put(struct base_buf *b, const struct exchange_greeting *g)
{
	base_buf_append(b, GREETING_MAGIC, 4);
	base_buf_put32(b, (uint32_t)g->error.code);
	base_buf_put32(b, g->flags);
	base_buf_put32(b, g->mode);
	base_buf_append(b, g->store, sizeof g->store);
	base_buf_append(b, g->manifest.bytes, sizeof g->manifest.bytes);
	base_buf_append(b, g->list.bytes, sizeof g->list.bytes);
	base_buf_put64(b, g->list_len);
	base_buf_put32(b, (uint32_t)strlen(g->step));
	base_buf_append_text(b, g->step);
	if (g->error.code)
		base_buf_append_text(b, g->error.text);
}

int exchange_greeting_take(const uint8_t *bytes, uint64_t len, struct exchange_greeting *ret_g)
{
	uint32_t name;

	if (len < GREETING_FIXED || memcmp(bytes, GREETING_MAGIC, 4) != 0 || !code_take(bytes + 4, &ret_g->error.code))
		return -BASE_EFORMAT;
	ret_g->flags = base_get32(bytes + 8);
	ret_g->mode = base_get32(bytes + 12);
	memcpy(ret_g->store, bytes + 16, sizeof ret_g->store);
	memcpy(ret_g->manifest.bytes, bytes + 32, sizeof ret_g->manifest.bytes);
	memcpy(ret_g->list.bytes, bytes + 64, sizeof ret_g->list.bytes);
	ret_g->list_len = base_get64(bytes + 96);
	name = base_get32(bytes + 104);
	if (name > len - GREETING_FIXED)
		return -BASE_EFORMAT;
	text_take(ret_g->step, sizeof ret_g->step, bytes + GREETING_FIXED, name);
	text_take(ret_g->error.text, sizeof ret_g->error.text, bytes + GREETING_FIXED + name,
		len - GREETING_FIXED - name);
	return 0;
}

static const char *mode_name(uint32_t mode)
{
	static const char *const names[] = {"auto", "never", "always"};

	return mode < BASE_COUNT(names) ? names[mode] : "another one";
}

static const char *flags_name(uint32_t flags)
{
	static const char *const names[] = {
		"no check of SHA-256, damage is an error", "a check of SHA-256, damage is an error",
		"no check of SHA-256, damage is skipped", "a check of SHA-256, damage is skipped",
	};

	return names[flags & 3];
}

int exchange_greetings_compare(const struct exchange_greeting *first, const struct exchange_greeting *other,
	uint32_t rank, struct base_error *err)
{
	if (memcmp(first->store, other->store, sizeof first->store) != 0)
		return base_error_set(err, -EINVAL, "rank %u loads from another store than rank 0 does", rank);
	if (!base_digest_equal(&first->manifest, &other->manifest))
		return base_error_set(err, -EINVAL, "rank %u loads step %.200s, rank 0 %s%.200s: all ranks of a load "
			"have to open the same step", rank, other->step, strcmp(first->step, other->step) == 0 ?
			"another commit of " : "step ", first->step);
	if (first->mode != other->mode)
		return base_error_set(err, -EINVAL, "the exchange of rank %u is \"%s\", that of rank 0 \"%s\": all "
			"ranks of a load need the same", rank,
			mode_name(other->mode), mode_name(first->mode));
	if (first->flags != other->flags)
		return base_error_set(err, -EINVAL, "the flags of rank %u say: %s; those of rank 0: %s: all ranks of a "
			"load need the same", rank, flags_name(other->flags),
			flags_name(first->flags));
	return 0;
}

void exchange_vote_put(struct base_buf *b, const struct exchange_vote *v)
{
	base_buf_put32(b, (uint32_t)v->error.code);
	for (unsigned i = 0; i < EXCHANGE_VOTE_NUMBERS; i++)
		base_buf_put64(b, v->number[i]);
	if (v->error.code)
		base_buf_append_text(b, v->error.text);
}

int exchange_vote_take(const uint8_t *bytes, uint64_t len, struct exchange_vote *ret_v)
{
	if (len < VOTE_FIXED || !code_take(bytes, &ret_v->error.code))
		return -BASE_EFORMAT;
	for (unsigned i = 0; i < EXCHANGE_VOTE_NUMBERS; i++)
		ret_v->number[i] = base_get64(bytes + 4 + 8 * i);
	text_take(ret_v->error.text, sizeof ret_v->error.text, bytes + VOTE_FIXED, len - VOTE_FIXED);
	return 0;
}
