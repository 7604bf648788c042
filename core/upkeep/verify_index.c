/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_index: which faults touch these bytes of a file? Asked for every object of every step, while faults are still
 * being found.
 *
 * The places are kept in sorted batches, one after another, whose sizes are the powers of two that add up to their
 * number. A new place makes a batch of one; then the last batches are joined and sorted as long as two have the same
 * size. So each place is sorted log n times, and a question is a bisection in each of log n batches. Within a batch the
 * places of a file are sorted by where they begin, and each knows how far it or any before it reaches: a question goes
 * back from the last place that begins before the end of its range, until nothing reaches into the range any more.
 * Places of whole files are kept apart, since they reach everywhere. */
#include "core/upkeep/verify_index.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/digest.h"
#include "core/base/le.h"

struct verify_place { uint64_t file, begin, end, reach; size_t fault; };

static uint64_t file_key(const char *file, bool whole)
{
	return base_xxh64_of(0, file, strlen(file)) << 1 | whole;
}

static int place_order(const void *pa, const void *pb)
{
	const struct verify_place *a = pa, *b = pb;

	if (a->file != b->file)
		return a->file < b->file ? -1 : 1;
	if (a->begin != b->begin)
		return a->begin < b->begin ? -1 : 1;
	return (a->fault > b->fault) - (a->fault < b->fault);
}

static void run_sort(struct verify_place *batch, size_t n)
{
	qsort(batch, n, sizeof *batch, place_order);
	for (size_t i = 0; i < n; i++) {
		batch[i].reach = batch[i].end;
		if (i && batch[i - 1].file == batch[i].file)
			batch[i].reach = base_max(batch[i].end, batch[i - 1].reach);
	}
}

int verify_index_add(struct verify_index *x, const char *file, uint64_t offset, uint64_t len, size_t fault)
{
	size_t last;

	if (base_array_more(x->places, x->n) < 0)
		return -ENOMEM;
	x->places[x->n++] = (struct verify_place){.file = file_key(file, len == 0), .begin = len ? offset : 0,
		.end = len ? offset + len : 1, .fault = fault};
	last = x->n & -x->n;
	run_sort(&x->places[x->n - last], last);
	return 0;
}

/* The first place in the batch that is of a later file, or begins at `end` or later. */
static size_t run_bound(struct verify_index *x, const struct verify_place *batch, size_t n, uint64_t file, uint64_t end)
{
	return base_bisect(i, 0, n, (x->looked++,
		batch[i].file < file || (batch[i].file == file && batch[i].begin < end)));
}

static int index_find(struct verify_index *x, uint64_t file, uint64_t begin, uint64_t end, verify_index_func f,
	void *arg)
{
	size_t first = 0, left = x->n;

	while (left) {
		const struct verify_place *batch = &x->places[first];
		size_t size = (size_t)1 << (63 - __builtin_clzll(left));

		for (size_t i = run_bound(x, batch, size, file, end); i-- > 0;) {
			int r;

			x->looked++;
			if (batch[i].file != file || batch[i].reach <= begin)
				break;
			r = batch[i].end > begin ? f(arg, batch[i].fault) : 0;
			if (r)
				return r;
		}
		first += size;
		left -= size;
	}
	return 0;
}

int verify_index_whole(struct verify_index *x, const char *file, verify_index_func f, void *arg)
{
	return index_find(x, file_key(file, true), 0, 1, f, arg);
}

int verify_index_range(struct verify_index *x, const char *file, uint64_t begin, uint64_t end, verify_index_func f,
	void *arg)
{
	return index_find(x, file_key(file, false), begin, end, f, arg);
}

void verify_index_release(struct verify_index *x)
{
	free(x->places);
	*x = (struct verify_index){0};
}
