/* SPDX-License-Identifier: Apache-2.0
 *
 * allocfail: a library for LD_PRELOAD that lets allocations of a process fail, by their number. Not with sanitizers,
 * which have an allocator of their own.
 *
 * VCKPT_ALLOCFAIL holds words `key=value`, separated by commas:
 *
 *   since=TEXT    allocations count from when the process said something that contains it (rank_main: "open"); by
 *                 default from its start
 *   at=N          the one that fails, from 1; 0: none
 *   last=M        up to the M-th (by default N)
 *   count=FILE    is told at the end how many there were */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interpose.h"

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

static char since[64], file[4096];
static unsigned long at, last;
static atomic_ulong count;
static atomic_bool counting;

static void word_read(const char *key, const char *value)
{
	if (!strcmp(key, "since"))
		snprintf(since, sizeof since, "%s", value);
	else if (!strcmp(key, "count"))
		snprintf(file, sizeof file, "%s", value);
	else if (!strcmp(key, "at"))
		at = strtoul(value, NULL, 10);
	else if (!strcmp(key, "last"))
		last = strtoul(value, NULL, 10);
}

__attribute__((constructor)) static void words_read(void)
{
	const char *text = getenv("VCKPT_ALLOCFAIL");
	char copy[4352], *state = NULL;

	snprintf(copy, sizeof copy, "%s", text ? text : "");
	for (char *word = strtok_r(copy, ",", &state); word; word = strtok_r(NULL, ",", &state)) {
		char *value = strchr(word, '=');

		if (!value)
			continue;
		*value++ = 0;
		word_read(word, value);
	}
	if (last < at)
		last = at;
	atomic_store(&counting, text && !since[0]);
}

__attribute__((destructor)) static void count_write(void)
{
	FILE *f;

	atomic_store(&counting, false);
	f = file[0] ? fopen(file, "w") : NULL;
	if (f) {
		fprintf(f, "%lu\n", atomic_load(&count));
		fclose(f);
	}
}

/* What a test program says about itself; looked up as a weak symbol. */
void interpose_mark(const char *text)
{
	if (since[0] && strstr(text, since))
		atomic_store(&counting, true);
}

static bool fails(void)
{
	unsigned long n;

	if (!atomic_load_explicit(&counting, memory_order_relaxed))
		return false;
	n = atomic_fetch_add(&count, 1) + 1;
	if (n < at || n > last || at == 0)
		return false;
	errno = ENOMEM;
	return true;
}

void *malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t align, size_t n) { return fails() ? NULL : __libc_memalign(align, n); }

void *reallocarray(void *p, size_t n, size_t size)
{
	return (size && n > SIZE_MAX / size) || fails() ? NULL : __libc_realloc(p, n * size);
}

int posix_memalign(void **ret_p, size_t align, size_t n)
{
	void *p = fails() ? NULL : __libc_memalign(align, n);

	if (!p)
		return ENOMEM;
	*ret_p = p;
	return 0;
}
