/* SPDX-License-Identifier: Apache-2.0
 *
 * Escaping is injective: `%` is itself escaped, so `%XX` in a file name always means one byte, and `%~`, which no
 * escape makes, marks a shortened name. Unescaping is strict (upper-case digits, only bytes that are escaped), so that
 * each true name has one file name, and importing exported files gives back what was exported. */
#include "core/view/name.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/digest.h"
#include "core/view/view_internal.h"

#define KEPT_BYTES 180u /* of a shortened name */
#define HASH_DIGITS 32u

static const char hex_digits[] = "0123456789ABCDEF";

static bool escaped_byte(unsigned char c)
{
	return c == '/' || c == '%' || c < 0x20 || c == 0x7f;
}

static bool keeps_dot(const char *name, size_t len)
{
	size_t own = strlen(VIEW_NAME_OWN), git = strlen(VIEW_NAME_GIT);
	if (len < 2 || (len == 2 && name[1] == '.'))
		return false;
	return !(len >= own && memcmp(name, VIEW_NAME_OWN, own) == 0) &&
		!(len == git && strncasecmp(name, VIEW_NAME_GIT, git) == 0);
}

/* Bytes of the character that begins at s[0]; a stray continuation byte counts as one. */
static size_t character_bytes(const char *s, size_t left)
{
	unsigned char c = (unsigned char)s[0];
	size_t want = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4, n = 1;
	while (n < want && n < left && ((unsigned char)s[n] & 0xc0) == 0x80)
		n++;
	return n;
}

/* Escapes the longest prefix of whole characters that fits into `room` bytes. Returns the bytes written; *ret_all:
 * nothing was left out. dot: a leading `.` is kept. */
static size_t escape_prefix(const char *name, size_t len, bool dot, size_t room, char *out, bool *ret_all)
{
	size_t used = 0;
	for (size_t i = 0; i < len;) {
		unsigned char c = (unsigned char)name[i];
		bool escape = escaped_byte(c) || (c == '.' && i == 0 && !dot);
		size_t n = escape ? 1 : character_bytes(name + i, len - i), need = escape ? 3 : n;
		if (need > room - used) {
			*ret_all = false;
			return used;
		}
		if (escape) {
			out[used] = '%';
			out[used + 1] = hex_digits[c >> 4];
			out[used + 2] = hex_digits[c & 15];
		} else {
			memcpy(out + used, name + i, n);
		}
		used += need;
		i += n;
	}
	*ret_all = true;
	return used;
}

void view_name_shorten(const char *name, size_t len, const char *suffix, char file[static VIEW_FILE_NAME_BYTES])
{
	struct base_digest d;
	char hex[BASE_DIGEST_HEX];
	bool all;
	size_t used = escape_prefix(name, len, false, KEPT_BYTES, file, &all);
	base_sha256(name, len, &d);
	base_digest_hex(&d, hex);
	memcpy(file + used, "%~", 2);
	memcpy(file + used + 2, hex, HASH_DIGITS);
	strcpy(file + used + 2 + HASH_DIGITS, suffix);
}

static void escape(const char *name, size_t len, bool dot, const char *suffix, char file[static VIEW_FILE_NAME_BYTES])
{
	size_t suffix_len = strlen(suffix);
	bool all;
	size_t used = escape_prefix(name, len, dot, VIEW_FILE_NAME_BYTES - 1 - suffix_len, file, &all);
	if (all)
		memcpy(file + used, suffix, suffix_len + 1);
	else
		view_name_shorten(name, len, suffix, file);
}

void view_name_escape(const char *name, size_t len, const char *suffix, char file[static VIEW_FILE_NAME_BYTES])
{
	escape(name, len, false, suffix, file);
}

void view_name_escape_element(const char *name, size_t len, char file[static VIEW_FILE_NAME_BYTES])
{
	escape(name, len, keeps_dot(name, len), "", file);
}

static int digit_value(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int view_name_unescape(const char *file, size_t len, char **ret_name, size_t *ret_len)
{
	base_cleanup_free char *name = NULL;
	size_t used = 0;
	if (len == 0 || len >= VIEW_FILE_NAME_BYTES)
		return -EINVAL;
	if (!(name = malloc(len + 1)))
		return -ENOMEM;
	for (size_t i = 0; i < len; used++) {
		unsigned char c = (unsigned char)file[i], byte;
		int high, low;

		if (c != '%') {
			if (escaped_byte(c) || (c == '.' && i == 0 && !keeps_dot(file, len)))
				return -EINVAL;
			name[used] = (char)c;
			i++;
			continue;
		}
		if (len - i == 2 + HASH_DIGITS && file[i + 1] == '~')
			return -ENAMETOOLONG;
		high = len - i >= 3 ? digit_value(file[i + 1]) : -1;
		low = high < 0 ? -1 : digit_value(file[i + 2]);
		byte = low < 0 ? 0 : (unsigned char)(high << 4 | low);
		if (byte == 0 || !(escaped_byte(byte) || (byte == '.' && used == 0)))
			return -EINVAL;
		name[used] = (char)byte;
		i += 3;
	}
	name[used] = 0;
	*ret_name = base_steal(name);
	*ret_len = used;
	return 0;
}
