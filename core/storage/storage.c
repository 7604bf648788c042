/* SPDX-License-Identifier: Apache-2.0
 *
 * storage: the rule of names, for every implementation. */
#include <string.h>

#include "core/base/le.h"
#include "core/storage/storage_posix_internal.h"

#define NAME_CHARS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.=-"

bool storage_name_part_valid(const char *part, size_t len)
{
	bool dots = part[0] == '.' && (len == 1 || (len == 2 && part[1] == '.'));

	return len > 0 && len <= 255 && !dots && strspn(part, NAME_CHARS) >= len;
}

bool storage_name_valid(const char *name)
{
	if (!name || strnlen(name, STORAGE_NAME_MAX) >= STORAGE_NAME_MAX)
		return false;
	for (;;) {
		size_t len = strcspn(name, "/");
		if (!storage_name_part_valid(name, len))
			return false;
		if (name[len] == '\0')
			return true;
		name += len + 1;
	}
}

const char *storage_not_a_file(int r)
{
	switch (r) {
	case -EISDIR: return "it is a directory, where a file should be";
	case -ELOOP: return "it is a link, where a file should be";
	case -ENXIO: return "it is no regular file";
	}
	return NULL;
}

bool storage_name_temporary(const char *name)
{
	size_t len = strlen(name);
	const char *suffix = name + len - base_min(len, STORAGE_TEMP_SUFFIX_LEN);

	return len > STORAGE_TEMP_SUFFIX_LEN && memcmp(suffix, ".tmp.", 5) == 0 &&
		strspn(suffix + 5, "0123456789abcdef") == STORAGE_TEMP_SUFFIX_LEN - 5;
}
