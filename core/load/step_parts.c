/* SPDX-License-Identifier: Apache-2.0
 *
 * step_parts: the parts of a step and the blobs that they name, read when they are first asked for. A part's head is an
 * object in a pack of its own rank: of a step of 8,192 writers a load that wants one rank's share opens a few. Only who
 * asks for the blobs needs all heads, which are then read several at once. */
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/load/step_internal.h"
#include "core/storage/spread.h"

static struct store_opened_part *part_at(const struct load_step *step, uint32_t line)
{
	return atomic_load_explicit(&step->parts[line], memory_order_acquire);
}

int load_step_part(const struct load_step *step, uint32_t line, const struct store_opened_part **ret_part,
	struct base_error *err)
{
	struct store_opened_part *part = part_at(step, line), *mine;
	int r;

	if (part) {
		*ret_part = part;
		return 0;
	}
	mine = calloc(1, sizeof *mine);
	if (!mine)
		return base_no_memory(err);
	r = store_open_part(step->store, &step->manifest, line, mine, err);
	if (r == 0 && atomic_compare_exchange_strong_explicit(&step->parts[line], &part, mine, memory_order_acq_rel,
		memory_order_acquire)) {
		*ret_part = mine;
		return 0;
	}
	if (r == 0) { /* another thread was faster */
		store_opened_part_release(mine);
		*ret_part = part;
	}
	free(mine);
	return r;
}

void load_step_parts_free(struct load_step *step)
{
	for (uint32_t i = 0; step->parts && i < step->manifest.nranks; i++) {
		struct store_opened_part *part = part_at(step, i);

		if (part)
			store_opened_part_release(part);
		free(part);
	}
	free(step->parts);
	free(atomic_load_explicit(&step->blobs, memory_order_relaxed));
}

/* ---- blobs ---- */

static const struct proto_blob *blob_at(const struct load_step *step, const struct step_blob *b)
{
	return &part_at(step, b->line)->part.blobs[b->blob];
}

static int blob_compare(const void *a, const void *b, void *arg)
{
	const struct step_blob *x = a, *y = b;
	const struct proto_blob *p = blob_at(arg, x), *q = blob_at(arg, y);
	int d = (int)p->per_rank - (int)q->per_rank;

	if (d == 0 && p->per_rank)
		d = (x->line > y->line) - (x->line < y->line);
	if (d == 0)
		d = strcmp(p->name, q->name);
	return d ? d : (x->line > y->line) - (x->line < y->line);
}

static uint64_t part_again(const struct proto_part *p)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < p->ntimings; i++)
		if (strcmp(p->timings[i].phase, PROTO_TIMING_AGAIN) == 0)
			base_add_overflows(bytes, p->timings[i].bytes, &bytes);
	return bytes;
}

/* Global blobs by name (the lowest rank's, where several have it), then each rank's own. All parts are there. */
static struct step_blobs *blobs_make(struct load_step *step)
{
	struct step_blobs *blobs;
	uint64_t total = 0;
	uint32_t n = 0, kept = 0;

	for (uint32_t i = 0; i < step->manifest.nranks; i++)
		total += part_at(step, i)->part.nblobs;
	blobs = total <= UINT32_MAX ? malloc(sizeof *blobs + total * sizeof *blobs->all) : NULL;
	if (!blobs)
		return NULL;
	blobs->again = 0;
	for (uint32_t i = 0; i < step->manifest.nranks; i++) {
		base_add_overflows(blobs->again, part_again(&part_at(step, i)->part), &blobs->again);
		for (uint32_t b = 0; b < part_at(step, i)->part.nblobs; b++)
			blobs->all[n++] = (struct step_blob){i, b};
	}
	qsort_r(blobs->all, n, sizeof *blobs->all, blob_compare, step);
	for (uint32_t i = 0; i < n; i++) {
		const struct proto_blob *p = blob_at(step, &blobs->all[i]);
		const struct proto_blob *q = kept ? blob_at(step, &blobs->all[kept - 1]) : NULL;

		if (!q || p->per_rank || q->per_rank || strcmp(p->name, q->name) != 0)
			blobs->all[kept++] = blobs->all[i];
	}
	blobs->n = kept;
	return blobs;
}

static int blobs_part(void *arg, uint32_t line, struct base_error *err)
{
	const struct store_opened_part *part;

	return load_step_part(arg, line, &part, err);
}

static const struct step_blobs *blobs_of(const struct load_step *step)
{
	return atomic_load_explicit(&step->blobs, memory_order_acquire);
}

int load_step_blobs(struct load_step *step, struct base_error *err)
{
	struct step_blobs *none = NULL, *mine;
	int r;

	if (blobs_of(step))
		return 0;
	r = store_spread(step->manifest.nranks, blobs_part, step, err);
	if (r < 0)
		return load_step_failed(step, r, NULL, err);
	mine = blobs_make(step);
	if (!mine)
		return base_no_memory(err);
	if (!atomic_compare_exchange_strong_explicit(&step->blobs, &none, mine, memory_order_acq_rel,
		memory_order_acquire))
		free(mine); /* another thread was faster */
	return 0;
}

uint64_t load_step_again(const struct load_step *step)
{
	const struct step_blobs *blobs = blobs_of(step);

	return blobs ? blobs->again : 0;
}

uint32_t load_step_blob_count(const struct load_step *step)
{
	const struct step_blobs *blobs = blobs_of(step);

	return blobs ? blobs->n : 0;
}

void load_step_blob_info(const struct load_step *step, uint32_t blob, struct load_blob_info *ret_info)
{
	const struct step_blob *b = &blobs_of(step)->all[blob];
	const struct proto_blob *p = blob_at(step, b);

	*ret_info = (struct load_blob_info){.name = p->name, .per_rank = p->per_rank,
		.rank = step->manifest.ranks[b->line].rank,
		.bytes = p->len, .digest = p->ref.digest};
}

int load_step_blob_ref(const struct load_step *step, uint32_t blob, struct store_object_ref *ret_ref,
	const char *const **ret_packs, uint32_t *ret_npacks,
	struct base_error *err)
{
	const struct step_blob *b = &blobs_of(step)->all[blob];
	const struct store_opened_part *part = part_at(step, b->line);
	const struct proto_blob *p = blob_at(step, b);

	*ret_ref = store_object_ref_from(&p->ref);
	*ret_packs = part->packs;
	*ret_npacks = part->npacks;
	if (p->len && (p->ref.pack >= part->npacks || p->ref.raw_len != p->len))
		return base_error_set(err, -BASE_EFORMAT, "the reference to it in the part is wrong");
	return 0;
}
