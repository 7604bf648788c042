/* SPDX-License-Identifier: Apache-2.0
 *
 * text: what of a text that others chose may go to a terminal or into a log (text.h). */
#include "core/base/text.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

size_t base_utf8_sequence(const char *text, size_t left)
{
	const uint8_t *s = (const uint8_t *)text;
	uint8_t low = 0x80, high = 0xbf;
	size_t n;

	if (s[0] == 0)
		return 0;
	if (s[0] < 0x80)
		return 1;
	if (s[0] < 0xc2 || s[0] > 0xf4)
		return 0;
	n = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
	if (n > left)
		return 0;
	if (s[0] == 0xe0)
		low = 0xa0;
	if (s[0] == 0xed)
		high = 0x9f;
	if (s[0] == 0xf0)
		low = 0x90;
	if (s[0] == 0xf4)
		high = 0x8f;
	if (s[1] < low || s[1] > high)
		return 0;
	for (size_t i = 2; i < n; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	return n;
}

static bool text_obeyed(uint32_t c)
{
	return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x61c || c == 0x200e || c == 0x200f ||
		(c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

size_t base_text_unsafe(const char *text, size_t left, size_t *ret_len)
{
	const uint8_t *s = (const uint8_t *)text;
	size_t n = base_utf8_sequence(text, left);
	uint32_t c = n ? n == 1 ? s[0] : s[0] & (0x7fu >> n) : 0;

	for (size_t i = 1; i < n; i++)
		c = c << 6 | (s[i] & 0x3fu);
	*ret_len = n;
	if (n == 0)
		return 1;
	return text_obeyed(c) ? n : 0;
}

void base_text_clean(char *text)
{
	size_t left = strlen(text), bad, n;

	for (; left; text += n, left -= n) {
		bad = base_text_unsafe(text, left, &n);
		memset(text, '?', bad);
		n = bad ? bad : n;
	}
}

const char *base_decimal(const char *at, char end, uint64_t max, uint64_t *ret_n)
{
	uint64_t n = 0;

	if (*at < '0' || *at > '9' || (at[0] == '0' && at[1] != end))
		return NULL;
	for (; *at >= '0' && *at <= '9'; at++) {
		if (n > (max - (uint64_t)(*at - '0')) / 10)
			return NULL;
		n = n * 10 + (uint64_t)(*at - '0');
	}
	*ret_n = n;
	return *at == end ? at + 1 : NULL;
}
