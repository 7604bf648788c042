/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_memory: a store of a few small files in memory, for targets that read what others left in one. Records are put
 * with envelopes whose digests are good, so that what is behind them is reached. */
#ifndef FUZZ_MEMORY_H
#define FUZZ_MEMORY_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/step/store.h"

#ifndef MEMORY_FILES
#define MEMORY_FILES 160u
#endif
#define MEMORY_PLAIN "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.=-/"

struct memory_file { char name[256]; uint8_t *bytes; size_t len; };
struct memory { struct storage base; struct memory_file files[MEMORY_FILES]; size_t n, next; };

/* What a target holds to be true; a failure says what. */
#define must(good) ((good) ? (void)0 : must_fail(__FILE__, __LINE__, #good))

static inline void must_fail(const char *file, int line, const char *what)
{
	fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
	abort();
}

/* Begins behind the file that was found last: files are asked for in a row. */
static struct memory_file *memory_find(struct memory *m, const char *name)
{
	for (size_t i = 0; i < m->n; i++) {
		size_t at = (m->next + i) % m->n;

		if (strcmp(m->files[at].name, name) == 0) {
			m->next = at + 1;
			return &m->files[at];
		}
	}
	return NULL;
}

static int memory_list(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	struct memory *m = (struct memory *)s;
	int r = 0;

	for (size_t i = 0; r == 0 && i < m->n; i++) {
		const struct memory_file *file = &m->files[i];
		bool foreign = file->name[strspn(file->name, MEMORY_PLAIN)] != 0;

		if (strncmp(file->name, dir, strlen(dir)) == 0 && file->name[strlen(dir)] == '/')
			r = f(arg, &(struct storage_entry){file->name, file->len, false, foreign});
	}
	return r;
}

static int memory_read(struct storage *s, const char *name, size_t max, void **ret_bytes, size_t *ret_len)
{
	const struct memory_file *file = memory_find((struct memory *)s, name);

	if (!file || file->len > max)
		return file ? -EFBIG : -ENOENT;
	*ret_bytes = malloc(file->len ? file->len : 1);
	*ret_len = file->len;
	must(*ret_bytes != NULL);
	if (file->len)
		memcpy(*ret_bytes, file->bytes, file->len);
	return 0;
}

static int memory_replace(struct storage *s, const char *name, const void *bytes, size_t len)
{
	struct memory *m = (struct memory *)s;
	struct memory_file *file = memory_find(m, name);

	if (!file && (m->n == MEMORY_FILES || strlen(name) >= sizeof file->name))
		return -ENOSPC;
	if (!file) {
		file = &m->files[m->n++];
		*file = (struct memory_file){0};
		memcpy(file->name, name, strlen(name) + 1);
	}
	free(file->bytes);
	file->bytes = malloc(len ? len : 1);
	file->len = len;
	must(file->bytes != NULL);
	if (len)
		memcpy(file->bytes, bytes, len);
	return 0;
}

static int memory_put_absent(struct storage *s, const char *name, const void *bytes, size_t len)
{
	const struct memory_file *file = memory_find((struct memory *)s, name);
	int r;

	if (file)
		return file->len == len && memcmp(file->bytes, bytes, len) == 0 ? STORAGE_PUT_MINE : STORAGE_PUT_OTHER;
	r = memory_replace(s, name, bytes, len);
	return r < 0 ? r : STORAGE_PUT_MINE;
}

static int memory_sync_dir(struct storage *s, const char *dir)
{
	(void)s;
	(void)dir;
	return 0;
}

static int memory_remove(struct storage *s, const char *name)
{
	struct memory *m = (struct memory *)s;
	struct memory_file *file = memory_find(m, name);

	if (!file)
		return -ENOENT;
	free(file->bytes);
	*file = m->files[--m->n];
	return 0;
}

static int memory_size(struct storage *s, const char *name, uint64_t *ret_size)
{
	const struct memory_file *file = memory_find((struct memory *)s, name);

	*ret_size = file ? file->len : 0;
	return file ? 0 : -ENOENT;
}

static const struct storage_ops memory_ops = {.put = memory_put_absent, .list = memory_list,
	.list_dirs = memory_list,
	.read_whole = memory_read, .replace = memory_replace, .remove = memory_remove, .size = memory_size,
	.sync_dir = memory_sync_dir};

static inline struct store memory_store(struct memory *m)
{
	struct store s = {.storage = &m->base, .path = "memory", .read_only = true};

	s.info.version = PROTO_VERSION;
	for (unsigned i = 0; i < sizeof s.info.id; i++)
		s.info.id[i] = (uint8_t)i;
	return s;
}

/* A record; nothing, if its body is longer than the kind allows. */
static inline void memory_put(struct memory *m, const char *name, enum store_record_kind kind, const void *body,
	size_t len)
{
	struct store s = memory_store(m);
	struct base_buf file = BASE_BUF_INIT;

	if (store_record_encode(kind, s.info.id, body, len, &file) == 0)
		must(memory_replace(&m->base, name, file.data, file.len) == 0);
	base_buf_release(&file);
}

static inline void memory_release(struct memory *m)
{
	for (size_t i = 0; i < m->n; i++)
		free(m->files[i].bytes);
}

#endif
