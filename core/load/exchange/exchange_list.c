/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_list: what a rank wants, as it sends it to the others.
 *
 *   object := pack (less the one before) | offset (less the one before, in the same pack) | raw length | hash (8 bytes)
 *             | number of runs | runs; no run: all blocks
 *   run    := blocks that are skipped before it | blocks - 1
 *
 * Numbers have 7 bits a byte, low ones first. So a whole piece takes about 16 bytes, however many blocks it has. */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/load/exchange/exchange_internal.h"

#define LIST_RAW_MAX (UINT64_C(1) << 45) /* so that numbers of blocks have 32 bits */

static void number_add(struct base_buf *b, uint64_t v)
{
	uint8_t bytes[10];
	size_t n = 0;

	for (; v >= 0x80; v >>= 7)
		bytes[n++] = (uint8_t)(v | 0x80);
	bytes[n++] = (uint8_t)v;
	base_buf_append(b, bytes, n);
}

void exchange_list_add(struct base_buf *list, struct exchange_key *last, const struct exchange_key *key,
	const struct exchange_run *runs, uint32_t nruns)
{
	bool whole = nruns == 1 && runs[0].first == 0 && runs[0].n == base_block_count(key->raw_len);
	uint64_t at = 0;

	number_add(list, key->pack - last->pack);
	number_add(list, key->pack == last->pack ? key->offset - last->offset : key->offset);
	number_add(list, key->raw_len);
	base_buf_put64(list, key->hash);
	number_add(list, whole ? 0 : nruns);
	for (uint32_t i = 0; !whole && i < nruns; i++) {
		number_add(list, runs[i].first - at);
		number_add(list, runs[i].n - 1);
		at = (uint64_t)runs[i].first + runs[i].n;
	}
	*last = *key;
}

void exchange_cursor_init(struct exchange_cursor *c, const uint8_t *list, uint64_t len, uint32_t npacks)
{
	*c = (struct exchange_cursor){.at = list, .end = len ? list + len : list, .npacks = npacks};
}

void exchange_cursor_release(struct exchange_cursor *c)
{
	free(c->runs);
}

static bool number_take(struct exchange_cursor *c, uint64_t *ret_v)
{
	uint64_t v = 0;

	for (unsigned shift = 0; c->at < c->end; shift += 7) {
		uint8_t byte = *c->at++;

		if (shift == 63 && byte > 1)
			return false;
		v |= (uint64_t)(byte & 0x7f) << shift;
		if (byte < 0x80) {
			*ret_v = v;
			return true;
		}
	}
	return false;
}

static int runs_take(struct exchange_cursor *c, uint64_t nruns)
{
	uint64_t blocks = base_block_count(c->key.raw_len), at = 0;

	if (nruns > (uint64_t)(c->end - c->at) / 2 || nruns > blocks)
		return -BASE_EFORMAT;
	if (base_array_room(c->runs, c->runs_room, base_max(nruns, 1)) < 0)
		return -ENOMEM;
	c->nruns = (uint32_t)base_max(nruns, 1);
	c->runs[0] = (struct exchange_run){0, (uint32_t)blocks};
	for (uint64_t i = 0; i < nruns; i++) {
		uint64_t gap, more;

		if (!number_take(c, &gap) || !number_take(c, &more) || (i && gap == 0) || gap > blocks - at ||
			more >= blocks - at - gap)
			return -BASE_EFORMAT;
		c->runs[i] = (struct exchange_run){(uint32_t)(at + gap), (uint32_t)(more + 1)};
		at += gap + more + 1;
	}
	return 0;
}

int exchange_cursor_next(struct exchange_cursor *c)
{
	struct exchange_key key;
	uint64_t pack, offset, nruns;
	int r;

	if (c->at == c->end)
		return 0;
	if (!number_take(c, &pack) || !number_take(c, &offset) || !number_take(c, &key.raw_len) ||
		c->end - c->at < 8)
		return -BASE_EFORMAT;
	key.hash = base_get64(c->at);
	c->at += 8;
	if (!number_take(c, &nruns) || pack >= c->npacks - c->key.pack || key.raw_len == 0 ||
		key.raw_len > LIST_RAW_MAX || (pack == 0 && base_add_overflows(offset, c->key.offset, &offset)))
		return -BASE_EFORMAT;
	key.pack = c->key.pack + (uint32_t)pack;
	key.offset = offset;
	if (c->begun && exchange_key_compare(&c->key, &key) >= 0)
		return -BASE_EFORMAT;
	c->begun = true;
	c->key = key;
	r = runs_take(c, nruns);
	return r < 0 ? r : 1;
}
