/* SPDX-License-Identifier: Apache-2.0
 *
 * name: the rules of names (docs/format/names.md), and the grammar of attempts and packs as records hold them:
 *
 *   launch   16 of [0-9a-f]
 *   attempt  <launch>-<count>                count, rank: decimal, no leading zero; u64, u32
 *   pack     <attempt>-<rank>-<class>        class: [A-Za-z0-9_][A-Za-z0-9._-]*, at most 71 bytes */
#include "core/base/text.h"
#include "proto/proto_internal.h"

static bool name_is_alpha(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static bool name_is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* [A-Za-z0-9_] and then these and `more`, of at most `max` bytes. */
static bool name_plain(const char *s, size_t max, const char *more)
{
	size_t n = 0;

	if (!s || (!name_is_alpha(s[0]) && !name_is_digit(s[0])))
		return false;
	for (; s[n]; n++)
		if (n >= max || !(name_is_alpha(s[n]) || name_is_digit(s[n]) || strchr(more, s[n])))
			return false;
	return n <= max;
}

static bool name_ends_with(const char *s, const char *end)
{
	size_t n = strlen(s), m = strlen(end);

	return n >= m && strcmp(s + n - m, end) == 0;
}

bool proto_run_valid(const char *run)
{
	return name_plain(run, PROTO_RUN_MAX, ".-");
}

bool proto_component_valid(const char *component)
{
	static const char *const taken[] = {"ranks", "mesh", "blobs", "meta", "incoming", "latest", "manifest.json"};

	if (!name_plain(component, PROTO_COMPONENT_MAX, ".-"))
		return false;
	for (size_t i = 0; i < BASE_COUNT(taken); i++)
		if (strcmp(component, taken[i]) == 0)
			return false;
	return !name_ends_with(component, ".safetensors") && !name_ends_with(component, ".npy");
}

bool proto_attribute_key_valid(const char *key)
{
	return key && name_is_alpha(key[0]) && name_plain(key, 64, ".-");
}

bool proto_tag_valid(const char *tag)
{
	return name_plain(tag, PROTO_TAG_MAX, ".-") && strspn(tag, "0123456789") < strlen(tag) &&
		strncmp(tag, "step-", 5) != 0 && strcmp(tag, "latest") != 0;
}

bool proto_utf8_valid(const char *bytes, size_t len)
{
	size_t n, at = 0;

	/* eight at a time as long as they are ASCII: almost all names are */
	for (; len - at >= 8; at += 8) {
		uint64_t word = base_get64(bytes + at), low = UINT64_C(0x0101010101010101), high = low << 7;

		if (((word - low) | word) & high) /* a NUL or not ASCII; or a borrow: the loop below decides */
			break;
	}
	for (; at < len; at += n) {
		n = base_utf8_sequence(bytes + at, len - at);
		if (n == 0)
			return false;
	}
	return true;
}

bool proto_text_valid(const char *text, size_t min, size_t max)
{
	size_t n = text ? strnlen(text, max + 1) : 0;

	return text && n >= min && n <= max && proto_utf8_valid(text, n);
}

size_t proto_name_slashes(const char *name)
{
	size_t n = 0;

	for (; (name = strchr(name, '/')); name++)
		n++;
	return n;
}

bool proto_blob_slashes_valid(uint64_t slashes, uint64_t nblobs)
{
	return slashes <= STORE_BLOBS_SLASHES_MORE + STORE_BLOBS_SLASHES_EACH * nblobs;
}

bool proto_host_valid(const char *host)
{
	return proto_text_valid(host, 0, PROTO_HOST_MAX - 1);
}

bool proto_class_valid(const char *class)
{
	return name_plain(class, PROTO_CLASS_MAX, ".-");
}

bool proto_word_valid(const char *word)
{
	return word && name_is_alpha(word[0]) && name_plain(word, PROTO_WORD_MAX, "");
}

static int name_hex_digit(char c)
{
	return name_is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool name_launch_take(const char **at, uint8_t launch[8])
{
	for (unsigned i = 0; i < 8; i++) {
		int high = name_hex_digit((*at)[2 * i]), low = high < 0 ? -1 : name_hex_digit((*at)[2 * i + 1]);

		if (low < 0)
			return false;
		launch[i] = (uint8_t)(high << 4 | low);
	}
	*at += 16;
	return true;
}

static bool name_decimal_take(const char **at, uint64_t max, uint64_t *ret_value)
{
	const char *s = *at;
	uint64_t v = 0;

	if (!name_is_digit(*s) || (s[0] == '0' && name_is_digit(s[1])))
		return false;
	for (; name_is_digit(*s); s++) {
		uint64_t digit = (uint64_t)(*s - '0');

		if (v > (max - digit) / 10)
			return false;
		v = v * 10 + digit;
	}
	*at = s;
	*ret_value = v;
	return true;
}

static bool name_attempt_take(const char **at, struct proto_attempt_number *ret_a)
{
	return name_launch_take(at, ret_a->launch) && *(*at)++ == '-' &&
		name_decimal_take(at, UINT64_MAX, &ret_a->count);
}

bool proto_launch_parse(const char *launch, uint8_t ret_id[static PROTO_LAUNCH_ROW_BYTES])
{
	return launch && name_launch_take(&launch, ret_id) && *launch == 0;
}

bool proto_launch_valid(const char *launch)
{
	uint8_t bytes[PROTO_LAUNCH_ROW_BYTES];

	return proto_launch_parse(launch, bytes);
}

bool proto_attempt_parse(const char *attempt, struct proto_attempt_number *ret_a)
{
	return attempt && name_attempt_take(&attempt, ret_a) && *attempt == 0;
}

bool proto_attempt_valid(const char *attempt)
{
	struct proto_attempt_number a;

	return proto_attempt_parse(attempt, &a);
}

/* This and the next without snprintf: a snapshot has ten thousand of them. */
void proto_launch_format(const uint8_t id[static PROTO_LAUNCH_ROW_BYTES], char text[static 17])
{
	static const char digits[] = "0123456789abcdef";

	for (unsigned i = 0; i < PROTO_LAUNCH_ROW_BYTES; i++) {
		text[2 * i] = digits[id[i] >> 4];
		text[2 * i + 1] = digits[id[i] & 15];
	}
	text[16] = 0;
}

void proto_attempt_format(const struct proto_attempt_number *a, char text[static PROTO_ATTEMPT_MAX])
{
	char decimal[20];
	unsigned n = 0;
	uint64_t left = a->count;

	proto_launch_format(a->launch, text);
	do
		decimal[n++] = (char)('0' + left % 10);
	while (left /= 10);
	text[16] = '-';
	for (unsigned i = 0; i < n; i++)
		text[17 + i] = decimal[n - 1 - i];
	text[17 + n] = 0;
}

bool proto_pack_name_split(const char *pack, struct proto_attempt_number *ret_a, uint32_t *ret_rank,
	const char **ret_class)
{
	uint64_t rank;

	if (!pack || !name_attempt_take(&pack, ret_a) || *pack++ != '-' ||
		!name_decimal_take(&pack, UINT32_MAX, &rank) || *pack++ != '-')
		return false;
	*ret_rank = (uint32_t)rank;
	*ret_class = pack;
	return proto_class_valid(pack);
}

int proto_name_compare(const char *a, size_t a_len, const char *b, size_t b_len)
{
	int c = memcmp(a, b, a_len < b_len ? a_len : b_len);

	return c ? c : (a_len > b_len) - (a_len < b_len);
}
