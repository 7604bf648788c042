/* SPDX-License-Identifier: Apache-2.0
 *
 * machine: how much could be allocated now, and how many processors may be used. The machine's word is MemAvailable; a
 * control group may allow less, and so may each group above it. What a group uses counts its page cache; the inactive
 * part of that goes when memory is wanted, so it is taken as free here as the kernel does for the machine. Of
 * processors a group gives so much time in each period: the quotient, rounded up. Files that are not there set no
 * limit. */
#include "core/base/machine.h"

#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

#define MACHINE_FILE_BYTES 65536

/* false: no such file. At most `size` - 1 bytes, NUL-terminated. */
static bool machine_read(const char *path, char *text, size_t size)
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
static bool machine_number(const char *text, const char *key, uint64_t *ret_n)
{
	size_t len = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, key, len) == 0)
			return sscanf(line + len, "%" SCNu64, ret_n) == 1;
	}
	return false;
}

static bool machine_file_number(const char *dir, const char *name, const char *key, uint64_t *ret_n)
{
	base_cleanup_free char *text = malloc(MACHINE_FILE_BYTES), *path = NULL;

	return text && asprintf(&path, "%s/%s", dir, name) >= 0 && machine_read(path, text, MACHINE_FILE_BYTES) &&
		machine_number(text, key, ret_n);
}

/* ---- control groups ---- */

/* The limit that one group, a directory, sets; UINT64_MAX: it sets none ("max", or the group does not exist). */
typedef uint64_t (*machine_ask)(const char *dir, bool v1);
struct machine_question { machine_ask ask; const char *controller, *word; }; /* of version 1: its mount; ",NAME," */

/* The least of a group and all groups above it. Inside a container the path may be one of the host that is not visible;
 * then the files at the mount itself are the container's. */
static uint64_t machine_groups(const char *root, char *path, const struct machine_question *q, bool v1)
{
	uint64_t least = UINT64_MAX;

	for (;;) {
		base_cleanup_free char *dir = NULL;
		char *slash;

		if (asprintf(&dir, "%s/sys/fs/cgroup%s%s", root, v1 ? q->controller : "", path) < 0)
			return least;
		least = base_min(least, q->ask(dir, v1));
		slash = strrchr(path, '/');
		if (!slash)
			return least;
		*slash = 0;
	}
}

/* Lines of /proc/self/cgroup: "0::/path" (version 2), "4:memory:/path" (version 1). */
static uint64_t machine_line(const char *root, char *line, const struct machine_question *q)
{
	char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
	base_cleanup_free char *list = NULL;

	if (!path)
		return UINT64_MAX;
	*path++ = 0;
	if (names[1] == 0)
		return machine_groups(root, path, q, false);
	if (asprintf(&list, ",%s,", names + 1) < 0 || !strstr(list, q->word))
		return UINT64_MAX;
	return machine_groups(root, path, q, true);
}

static uint64_t machine_least(const char *root, const struct machine_question *q)
{
	base_cleanup_free char *text = malloc(MACHINE_FILE_BYTES), *path = NULL;
	uint64_t least = UINT64_MAX;
	char *save = NULL;

	if (!text || asprintf(&path, "%s/proc/self/cgroup", root) < 0 || !machine_read(path, text, MACHINE_FILE_BYTES))
		return least;
	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
		least = base_min(least, machine_line(root, line, q));
	return least;
}

/* ---- memory ---- */

static uint64_t memory_of_group(const char *dir, bool v1)
{
	uint64_t limit, usage, inactive;

	if (!machine_file_number(dir, v1 ? "memory.limit_in_bytes" : "memory.max", "", &limit)
		|| !machine_file_number(dir, v1 ? "memory.usage_in_bytes" : "memory.current", "", &usage))
		return UINT64_MAX;
	if (!machine_file_number(dir, "memory.stat", v1 ? "total_inactive_file " : "inactive_file ", &inactive)
		|| inactive > usage)
		inactive = 0;
	usage -= inactive;
	return usage < limit ? limit - usage : 0;
}

uint64_t base_machine_memory(const char *root)
{
	static const struct machine_question q = {memory_of_group, "/memory", ",memory,"};
	base_cleanup_free char *proc = NULL;
	uint64_t available;

	if (asprintf(&proc, "%s/proc", root) < 0 || !machine_file_number(proc, "meminfo", "MemAvailable:", &available))
		return 0;
	available = available > UINT64_MAX / 1024 ? UINT64_MAX : available * 1024;
	return base_min(available, machine_least(root, &q));
}

/* Version 1 says that there is none by a number that no machine has. */
static uint64_t memory_limit_of_group(const char *dir, bool v1)
{
	uint64_t limit;

	if (!machine_file_number(dir, v1 ? "memory.limit_in_bytes" : "memory.max", "", &limit) || limit > INT64_MAX / 2)
		return UINT64_MAX;
	return limit;
}

uint64_t base_machine_memory_limit(const char *root)
{
	static const struct machine_question q = {memory_limit_of_group, "/memory", ",memory,"};

	return machine_least(root, &q);
}

/* ---- processors ---- */

/* "QUOTA PERIOD", or "max PERIOD"; version 1 has a file each, and -1. */
static uint64_t cpus_of_group(const char *dir, bool v1)
{
	base_cleanup_free char *path = NULL;
	uint64_t quota, period = 0;
	char text[64], word[32];

	if (asprintf(&path, "%s/%s", dir, v1 ? "cpu.cfs_quota_us" : "cpu.max") < 0
		|| !machine_read(path, text, sizeof text) || text[0] < '0' || text[0] > '9')
		return UINT64_MAX;
	if (v1 && sscanf(text, "%31s", word) == 1 && machine_file_number(dir, "cpu.cfs_period_us", "", &period))
		snprintf(text, sizeof text, "%s %" PRIu64, word, period);
	if (sscanf(text, "%" SCNu64 " %" SCNu64, &quota, &period) != 2 || period == 0)
		return UINT64_MAX;
	return base_max(quota / period + (quota % period != 0), 1);
}

uint64_t base_machine_cpus(const char *root)
{
	static const struct machine_question q = {cpus_of_group, "/cpu", ",cpu,"};

	return machine_least(root, &q);
}

unsigned base_machine_node_ranks(uint32_t world)
{
	static const char *const names[] = {"LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE",
		"MPI_LOCALNRANKS"};

	if (world == 1)
		return 1;
	for (size_t i = 0; i < BASE_COUNT(names); i++) {
		const char *value = getenv(names[i]);
		char *end;
		unsigned long n = value && value[0] >= '0' && value[0] <= '9' ? strtoul(value, &end, 10) : 0;

		if (n > 0 && !*end)
			return (unsigned)base_min(n, world);
	}
	return 0;
}
