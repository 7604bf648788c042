/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_packs: the store in memory of fuzz_memory.h with packs in it: they are written, opened and read as in a
 * directory. */
#ifndef FUZZ_PACKS_H
#define FUZZ_PACKS_H

#include "tests/fuzz/fuzz_memory.h"

struct storage_writer { struct memory *m; char name[256]; struct base_buf bytes; };

static int memory_writer_open(struct storage *s, const char *name, struct storage_writer **ret_w)
{
	struct storage_writer *w = calloc(1, sizeof *w);

	must(w != NULL && strlen(name) < sizeof w->name);
	w->m = (struct memory *)s;
	memcpy(w->name, name, strlen(name) + 1);
	*ret_w = w;
	return 0;
}

static int memory_writer_append(struct storage_writer *w, const void *bytes, size_t len)
{
	base_buf_append(&w->bytes, bytes, len);
	return w->bytes.error;
}

static void memory_writer_abandon(struct storage_writer *w)
{
	base_buf_release(&w->bytes);
	free(w);
}

static int memory_writer_seal(struct storage_writer *w)
{
	int r = memory_replace(&w->m->base, w->name, w->bytes.data, w->bytes.len);

	memory_writer_abandon(w);
	return r;
}

static int memory_file_open(struct storage *s, const char *name, struct storage_file **ret_file,
	uint64_t *ret_size)
{
	struct memory_file *file = memory_find((struct memory *)s, name);

	if (!file)
		return -ENOENT;
	*ret_file = (struct storage_file *)file;
	*ret_size = file->len;
	return 0;
}

static int memory_file_read(struct storage_file *f, uint64_t offset, void *bytes, size_t len)
{
	const struct memory_file *file = (const struct memory_file *)f;

	if (offset > file->len || len > file->len - offset)
		return -ENODATA;
	memcpy(bytes, file->bytes + offset, len);
	return 0;
}

static void memory_file_close(struct storage_file *f) { (void)f; }
static void memory_close(struct storage *s) { (void)s; }

static const struct storage_ops memory_pack_ops = {.list = memory_list, .list_dirs = memory_list,
	.read_whole = memory_read,
	.replace = memory_replace, .remove = memory_remove, .size = memory_size, .file_open = memory_file_open,
	.file_read = memory_file_read, .file_close = memory_file_close, .writer_open = memory_writer_open,
	.writer_append = memory_writer_append, .writer_seal = memory_writer_seal,
	.writer_abandon = memory_writer_abandon, .close = memory_close};

#endif
