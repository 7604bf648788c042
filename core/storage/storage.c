/* SPDX-License-Identifier: Apache-2.0
 *
 * storage: the rule of names, for every implementation. */
#include <string.h>

#include "core/storage/storage_posix_internal.h"

static bool name_char_valid(unsigned char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
	       c == '_' || c == '.' || c == '=' || c == '-';
}

bool store_name_part_valid(const char *part, size_t len)
{
	if (len == 0 || len > 255)
		return false;
	if (part[0] == '.' && (len == 1 || (len == 2 && part[1] == '.')))
		return false;
	for (size_t i = 0; i < len; i++)
		if (!name_char_valid((unsigned char)part[i]))
			return false;
	return true;
}

bool store_name_valid(const char *name)
{
	if (!name)
		return false;
	if (strnlen(name, STORE_NAME_MAX) >= STORE_NAME_MAX)
		return false;
	for (;;) {
		size_t len = strcspn(name, "/");
		if (!store_name_part_valid(name, len))
			return false;
		if (name[len] == '\0')
			return true;
		name += len + 1;
	}
}

const char *store_not_a_file(int r)
{
	switch (r) {
	case -EISDIR: return "it is a directory, where a file should be";
	case -ELOOP: return "it is a link, where a file should be";
	case -ENXIO: return "it is no regular file";
	}
	return NULL;
}

bool store_name_temporary(const char *name)
{
	size_t len = strlen(name);
	if (len <= STORE_TEMP_SUFFIX_LEN)
		return false;
	const char *suffix = name + len - STORE_TEMP_SUFFIX_LEN;
	if (memcmp(suffix, ".tmp.", 5) != 0)
		return false;
	for (size_t i = 5; i < STORE_TEMP_SUFFIX_LEN; i++)
		if (!((suffix[i] >= '0' && suffix[i] <= '9') || (suffix[i] >= 'a' && suffix[i] <= 'f')))
			return false;
	return true;
}
