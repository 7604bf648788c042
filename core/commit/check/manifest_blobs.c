/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest_blobs: which ranks' parts have which blobs, for the manifest. Without that, a reader that looks for a blob
 * has to read the head of every part: of N ranks that load, each would read N heads.
 *
 * Parts are added in any order, by several threads; what comes out depends on the parts alone. Where it would be long
 * (a name of its own for every rank's blob) the manifest does not say it. */
#include "core/commit/check/manifest_check.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"

#define BLOBS_TEXT_MAX (64u << 10)      /* bytes of all names */
#define BLOBS_ROWS_EACH 64u             /* blobs a rank that are looked at */

struct check_blob_row { size_t name; bool per_rank; uint32_t rank; }; /* name: where it begins in `text` */

void check_blob_names_init(struct check_blob_names *b)
{
	*b = (struct check_blob_names){0};
	pthread_mutex_init(&b->lock, NULL);
}

void check_blob_names_release(struct check_blob_names *b)
{
	base_buf_release(&b->text);
	free(b->rows);
	free(b->names);
	free(b->ranges);
	pthread_mutex_destroy(&b->lock);
}

int check_blob_names_add(struct check_blob_names *b, const struct proto_part *part)
{
	uint64_t most = PROTO_BLOB_NAMES_MAX + (uint64_t)part->world * BLOBS_ROWS_EACH;
	int r = 0;

	pthread_mutex_lock(&b->lock);
	b->many |= part->nblobs > most - base_min(b->nrows, most);
	if (!b->many)
		r = base_array_room(b->rows, b->room, b->nrows + part->nblobs);
	for (uint32_t i = 0; r == 0 && !b->many && i < part->nblobs; i++) {
		const struct proto_blob *from = &part->blobs[i];

		b->rows[b->nrows++] = (struct check_blob_row){b->text.len, from->per_rank, part->rank};
		base_buf_append(&b->text, from->name, strlen(from->name) + 1);
	}
	if (b->text.error)
		r = -ENOMEM;
	pthread_mutex_unlock(&b->lock);
	return r;
}

static const char *row_name(const struct check_blob_names *b, const struct check_blob_row *row)
{
	return (const char *)b->text.data + row->name;
}

/* By name; of one name by rank. */
static int row_order(const void *pa, const void *pb, void *arg)
{
	const struct check_blob_row *x = pa, *y = pb;
	int c = (int)x->per_rank - (int)y->per_rank;

	if (c == 0)
		c = strcmp(row_name(arg, x), row_name(arg, y));
	return c ? c : (x->rank > y->rank) - (x->rank < y->rank);
}

/* One row more, of the name that is last or of a new one. */
static void names_fold(struct check_blob_names *b, const struct check_blob_row *row)
{
	const char *name = row_name(b, row);
	struct proto_blob_name *last = b->nnames ? &b->names[b->nnames - 1] : NULL;
	struct proto_rank_range *range = b->nranges ? &b->ranges[b->nranges - 1] : NULL;

	if (!last || last->per_rank != row->per_rank || strcmp(last->name, name) != 0) {
		b->text_bytes += strlen(name);
		last = &b->names[b->nnames++];
		*last = (struct proto_blob_name){.name = name, .per_rank = row->per_rank,
			.ranges = &b->ranges[b->nranges]};
	} else if (!row->per_rank) {
		return; /* the lowest rank's counts */
	} else if (row->rank - range->first == range->n) {
		range->n++;
		return;
	}
	last->nranges++;
	b->ranges[b->nranges++] = (struct proto_rank_range){row->rank, 1};
}

int check_blob_names_set(struct check_blob_names *b, struct proto_manifest *m)
{
	m->names_blobs = false;
	m->blobs = NULL;
	m->nblobs = 0;
	if (b->many)
		return 0;
	if (!b->names) {
		b->names = calloc(b->nrows + 1, sizeof *b->names);
		b->ranges = calloc(b->nrows + 1, sizeof *b->ranges);
		if (!b->names || !b->ranges)
			return -ENOMEM;
		if (b->nrows)
			qsort_r(b->rows, b->nrows, sizeof *b->rows, row_order, b);
		for (size_t i = 0; i < b->nrows; i++)
			names_fold(b, &b->rows[i]);
	}
	if (b->nnames > PROTO_BLOB_NAMES_MAX || b->text_bytes > BLOBS_TEXT_MAX ||
		b->nranges > PROTO_BLOB_NAMES_MAX + (uint64_t)m->world)
		return 0;
	m->names_blobs = true;
	m->blobs = b->names;
	m->nblobs = b->nnames;
	return 0;
}

static bool names_same(const struct proto_blob_name *a, const struct proto_blob_name *b)
{
	return a->per_rank == b->per_rank && strcmp(a->name, b->name) == 0 && a->nranges == b->nranges &&
		memcmp(a->ranges, b->ranges, a->nranges * sizeof *a->ranges) == 0;
}

const char *check_blob_names_differ(const struct proto_manifest *a, const struct proto_manifest *b)
{
	for (uint32_t i = 0; i < a->nblobs || i < b->nblobs; i++)
		if (i >= a->nblobs || i >= b->nblobs || !names_same(&a->blobs[i], &b->blobs[i]))
			return i < a->nblobs ? a->blobs[i].name : b->blobs[i].name;
	return NULL;
}
