/* SPDX-License-Identifier: Apache-2.0
 *
 * Blobs of an import: whole files, texts that were made here, and parts of files one after another; and the files of a
 * directory that a description names. */
#include <string.h>

#include "core/base/array.h"
#include "tools/vckpt/import/import.h"

/* Takes what `b` has in any case. */
static int add(struct import_plan *p, struct import_file *file, const char *name, struct import_blob b,
	struct base_error *err)
{
	b.name = strdup(name);
	b.file = file;
	if (!b.name || base_array_more(p->blobs, p->nblobs) < 0) {
		free(b.name);
		free(b.text);
		free(b.ranges);
		return base_no_memory_for(err, "%s", file->path);
	}
	p->blobs[p->nblobs++] = b;
	return 0;
}

int import_add_blob(struct import_plan *p, const char *path, const char *name, bool per_rank, struct base_error *err)
{
	struct import_file *f;
	int r;

	if (!proto_utf8_valid(name, strlen(name)))
		return base_error_set(err, -EINVAL, "%s: its name is not UTF-8", path);
	r = import_file_open(p, path, &f, err);
	return r < 0 ? r : add(p, f, name,
		(struct import_blob){.per_rank = per_rank, .bytes = (uint64_t)f->stat.st_size}, err);
}

int import_add_text(struct import_plan *p, struct import_file *file, const char *name, char *text, size_t len,
	struct base_error *err)
{
	return add(p, file, name, (struct import_blob){.text = text, .bytes = len}, err);
}

int import_add_ranges(struct import_plan *p, struct import_file *file, const char *name, struct import_range *ranges,
	size_t nranges, struct base_error *err)
{
	struct import_blob b = {.ranges = ranges, .nranges = nranges};

	for (size_t i = 0; i < nranges; i++)
		b.bytes += ranges[i].bytes; /* each is in its file, so they are less than 2^64 together */
	return add(p, file, name, b, err);
}

static int read_ranges(const struct import_blob *b, uint64_t offset, char *bytes, size_t len, struct base_error *err)
{
	uint64_t at = 0;

	for (size_t i = 0; i < b->nranges && len; at += b->ranges[i++].bytes) {
		const struct import_range *range = &b->ranges[i];
		size_t n;
		int r;

		if (offset >= at + range->bytes)
			continue;
		n = base_min(len, at + range->bytes - offset);
		r = import_file_read(range->file, range->offset + (offset - at), bytes, n, err);
		if (r < 0)
			return r;
		offset += n;
		bytes += n;
		len -= n;
	}
	return 0;
}

int import_blob_read(const struct import_blob *b, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	if (b->text && len)
		memcpy(bytes, b->text + offset, len);
	if (b->text)
		return 0;
	return b->ranges ? read_ranges(b, offset, bytes, len, err) : import_file_read(b->file, offset, bytes, len, err);
}

/* Does the path itself lead out of the directory, without any link? */
static bool leads_out(const char *rel)
{
	const char *part = rel;

	do {
		size_t len = strcspn(part, "/");

		if (len == 2 && !strncmp(part, "..", 2))
			return true;
		part += len;
	} while (*part++);
	return *rel == '/';
}

int import_file_within(struct import_plan *p, const char *directory, const char *rel, struct import_file **ret_file,
	struct base_error *err)
{
	base_cleanup_free char *path = tool_string("%s/%s", directory, rel);
	struct stat st;
	int r;

	if (!*rel)
		return base_error_set(err, -BASE_EFORMAT, "%s: a file without a name is named there", directory);
	if (!path)
		return base_no_memory_for(err, "%s", directory);
	if (stat(path, &st) < 0)
		return base_error_set(err, -errno, "%s: %s", path, strerror(errno));
	if (leads_out(rel))
		return base_error_set(err, -BASE_EFORMAT,
			"%s: it leads out of the directory: nothing outside of %s is read for it", path, directory);
	r = import_file_open(p, path, ret_file, err);
	return r < 0 ? r : import_refuse_pointer(*ret_file, err);
}
