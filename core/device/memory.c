/* SPDX-License-Identifier: Apache-2.0
 *
 * memory: how much could be allocated now. The machine's word is MemAvailable; a control group may allow less, and so
 * may each group above it. What a group uses counts its page cache; the inactive part of that goes when memory is
 * wanted, so it is taken as free here as the kernel does for the machine. Files that are not there set no limit. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/device/memory_internal.h"
#include "core/device/ring.h"

#define MEMORY_FILE_BYTES 65536

struct memory_names {
	const char *mount, *limit, *usage, *inactive; /* below the root; file names; a key of memory.stat */
};
static const struct memory_names memory_v2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};
static const struct memory_names memory_v1 = {
	"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "};

/* false: no such file. At most `size` - 1 bytes, NUL-terminated. */
static bool memory_read(const char *path, char *text, size_t size)
{
	FILE *file = fopen(path, "re");
	size_t n;

	if (!file)
		return false;
	n = fread(text, 1, size - 1, file);
	text[n] = 0;
	fclose(file);
	return n > 0;
}

/* The number behind `key` at the start of a line. */
static bool memory_number(const char *text, const char *key, uint64_t *ret_n)
{
	size_t len = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, key, len) == 0)
			return sscanf(line + len, "%" SCNu64, ret_n) == 1;
	}
	return false;
}

static bool memory_file_number(const char *dir, const char *name, const char *key, uint64_t *ret_n)
{
	base_cleanup_free char *text = malloc(MEMORY_FILE_BYTES), *path = NULL;

	return text && asprintf(&path, "%s/%s", dir, name) >= 0 && memory_read(path, text, MEMORY_FILE_BYTES) &&
		memory_number(text, key, ret_n);
}

/* What one group leaves; UINT64_MAX: no limit ("max", or no such group here). */
static uint64_t memory_group_free(const char *dir, const struct memory_names *names)
{
	uint64_t limit, usage, inactive;

	if (!memory_file_number(dir, names->limit, "", &limit) || !memory_file_number(dir, names->usage, "", &usage))
		return UINT64_MAX;
	if (!memory_file_number(dir, "memory.stat", names->inactive, &inactive) || inactive > usage)
		inactive = 0;
	usage -= inactive;
	return usage < limit ? limit - usage : 0;
}

/* A group and all above it. Inside a container the path may be one of the host that is not to be seen: the mount's own
 * files are the container's then. */
static uint64_t memory_groups_free(const char *root, char *path, const struct memory_names *names)
{
	uint64_t least = UINT64_MAX;

	for (;;) {
		base_cleanup_free char *dir = NULL;
		uint64_t here;
		char *slash;

		if (asprintf(&dir, "%s%s%s", root, names->mount, path) < 0)
			return least;
		here = memory_group_free(dir, names);
		least = here < least ? here : least;
		slash = strrchr(path, '/');
		if (!slash)
			return least;
		*slash = 0;
	}
}

/* Lines of /proc/self/cgroup: "0::/path" (version 2), "4:memory:/path" (version 1). */
static uint64_t memory_line_free(const char *root, char *line)
{
	char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
	base_cleanup_free char *list = NULL;

	if (!path)
		return UINT64_MAX;
	*path++ = 0;
	if (names[1] == 0)
		return memory_groups_free(root, path, &memory_v2);
	if (asprintf(&list, ",%s,", names + 1) < 0 || !strstr(list, ",memory,"))
		return UINT64_MAX;
	return memory_groups_free(root, path, &memory_v1);
}

uint64_t device_free_memory_under(const char *root)
{
	base_cleanup_free char *text = malloc(MEMORY_FILE_BYTES), *path = NULL, *proc = NULL;
	uint64_t least, here;
	char *save = NULL;

	if (!text || asprintf(&proc, "%s/proc", root) < 0 || asprintf(&path, "%s/self/cgroup", proc) < 0)
		return 0;
	if (!memory_file_number(proc, "meminfo", "MemAvailable:", &least))
		return 0;
	least = least > UINT64_MAX / 1024 ? UINT64_MAX : least * 1024;
	if (!memory_read(path, text, MEMORY_FILE_BYTES))
		return least;
	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
		here = memory_line_free(root, line);
		least = here < least ? here : least;
	}
	return least;
}

uint64_t device_free_memory(void)
{
	return device_free_memory_under("");
}
