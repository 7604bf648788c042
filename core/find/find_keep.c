/* SPDX-License-Identifier: Apache-2.0
 *
 * keep: puts into the index what it lacked. A writer copies the file, so a few new steps are not worth it: they are
 * read again at the next question, which takes less than the copy. It drops the rows of steps that are gone on the way.
 * While another process has the index, nothing is written. */
#include "core/find/find_internal.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/log.h"
#include "core/save/write/catalog.h"

enum { KEEP_STEPS = 32, KEEP_DIGESTS = 8 }; /* rows that are worth a new file */

static int compare_pointers(const void *a, const void *b)
{
	return base_digest_compare(*(const struct base_digest *const *)a, *(const struct base_digest *const *)b);
}

static bool is_gone(void *arg, const struct base_digest *manifest)
{
	const struct find_known *k = arg;

	return !k->nvisible || !bsearch(&manifest, k->visible, k->nvisible, sizeof *k->visible, compare_pointers);
}

static bool is_unused_set(void *arg, const struct base_digest *id)
{
	const struct find_known *k = arg;

	return !find_known_set_of(k, id);
}

static bool is_unused_layout(void *arg, const struct base_digest *digest)
{
	const struct find_known *k = arg;

	return find_known_layout(k, digest) < 0;
}

/* After a failure nothing more is written; what was put stays if only the bound was met. */
static void file_failed(struct find_file *file, int r)
{
	file->refused = true;
	base_debug("the index cannot be written: %s", base_error_name(r));
	if (r != -ENOSPC)
		index_close(base_steal(file->writes));
}

static int file_open(struct find_known *k, struct find_file *file)
{
	int r = save_index_open_rows(k->store, file->flag | INDEX_AT_ONCE, &file->writes, NULL);

	if (r < 0)
		return r;
	if (k->nvisible)
		qsort(k->visible, k->nvisible, sizeof *k->visible, compare_pointers);
	return index_rows_drop(file->writes, INDEX_OF_STEP, is_gone, k);
}

/* Before the first row that names it. */
static int put_set(struct find_known *k, struct index *index, struct find_set *set)
{
	base_cleanup_free struct base_digest *digests = calloc(set->nlayouts + 1u, sizeof *digests);
	int r = digests ? 0 : -ENOMEM;

	for (uint32_t i = 0; r == 0 && i < set->nlayouts; i++) {
		struct find_layout *l = &k->layouts[set->layouts[i]];

		digests[i] = l->digest;
		if (!l->object)
			continue;
		r = index_row_put(index, INDEX_OF_LAYOUT, &l->digest, l->object, l->len);
		free(base_steal(l->object));
	}
	if (r == 0)
		r = index_row_put(index, INDEX_OF_SET, &set->id, digests, set->nlayouts * sizeof *digests);
	set->kept = r == 0;
	return r;
}

static int put_row(struct find_known *k, struct find_file *file, const struct find_row *row)
{
	struct find_set *set = &k->sets[row->set];
	int r = 0;

	if (row->digests)
		return index_row_put(file->writes, INDEX_OF_STEP, &row->manifest, row->digests, row->len);
	if (!set->kept)
		r = put_set(k, file->writes, set);
	return r < 0 ? r : index_row_put(file->writes, INDEX_OF_STEP, &row->manifest, &set->id, sizeof set->id);
}

static void file_flush(struct find_known *k, struct find_file *file)
{
	int r = file->writes || file->refused ? 0 : file_open(k, file);

	for (size_t i = 0; i < file->nrows; i++) {
		if (r == 0 && !file->refused)
			r = put_row(k, file, &file->rows[i]);
		free(file->rows[i].digests);
	}
	file->nrows = 0;
	free(base_steal(file->rows));
	if (r < 0)
		file_failed(file, r);
}

void find_keep_row(struct find_known *k, struct find_file *file, const struct find_row *row)
{
	struct find_row copy = *row;

	if (k->no_index || file->refused)
		return;
	if (row->digests) {
		copy.digests = malloc(row->len + 1);
		if (!copy.digests)
			return;
		memcpy(copy.digests, row->digests, row->len);
	}
	if (base_array_more(file->rows, file->nrows) < 0) {
		free(copy.digests);
		return;
	}
	file->rows[file->nrows++] = copy;
	if (file->nrows >= (file->flag == INDEX_STEPS ? KEEP_STEPS : KEEP_DIGESTS))
		file_flush(k, file);
}

static void file_end(struct find_known *k, struct find_file *file)
{
	int r = 0;

	if (!file->writes)
		return;
	file_flush(k, file);
	if (file->writes && k->all && file->flag == INDEX_STEPS) {
		r = index_rows_drop(file->writes, INDEX_OF_SET, is_unused_set, k);
		if (r == 0)
			r = index_rows_drop(file->writes, INDEX_OF_LAYOUT, is_unused_layout, k);
	}
	if (file->writes && r == 0)
		r = index_publish(file->writes);
	if (r < 0)
		file_failed(file, r);
	index_close(base_steal(file->writes));
}

void find_keep_end(struct find_known *k)
{
	file_end(k, &k->steps);
	file_end(k, &k->digests);
}
