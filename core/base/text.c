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

/* ---- patterns ---- */

/* Is the character in the set that begins behind `[`? *ret_end: behind its `]`; NULL: there is none. */
static bool glob_set_has(const char *s, char c, const char **ret_end)
{
	bool not = *s == '!' || *s == '^', found = false;
	const unsigned char *at = (const unsigned char *)s + not, *first = at;
	unsigned char u = (unsigned char)c;

	for (; *at && (*at != ']' || at == first); at++) {
		if (at[1] == '-' && at[2] && at[2] != ']') {
			found = found || (at[0] <= u && u <= at[2]);
			at += 2;
		} else {
			found = found || *at == u;
		}
	}
	*ret_end = *at ? (const char *)at + 1 : NULL;
	return found != not;
}

/* Does one element of the pattern fit the character? *ret_next: the element behind it. */
static bool glob_one_fits(const char *p, char c, const char **ret_next)
{
	const char *end;

	if (*p == '[') {
		bool has = glob_set_has(p + 1, c, &end);
		*ret_next = end;
		return has;
	}
	*ret_next = p + 1;
	return *p == '?' || *p == c;
}

bool base_glob_fits(const char *p, const char *name, size_t len)
{
	const char *star = NULL, *next;
	size_t at = 0, star_at = 0;

	while (at < len) {
		if (*p == '*') {
			star = ++p;
			star_at = at;
		} else if (*p && glob_one_fits(p, name[at], &next)) {
			p = next;
			at++;
		} else if (star) {
			p = star;
			at = ++star_at;
		} else {
			return false;
		}
	}
	return p[strspn(p, "*")] == 0;
}

bool base_glob_valid(const char *pattern)
{
	const char *end = pattern;

	while ((end = strchr(end, '[')) != NULL) {
		glob_set_has(end + 1, 0, &end);
		if (!end)
			return false;
	}
	return true;
}
