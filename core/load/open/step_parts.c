/* SPDX-License-Identifier: Apache-2.0
 *
 * step_parts: the parts of a step and the blobs that they name, read when they are first needed. A part's head is an
 * object in a pack of its own rank: a load that wants one rank's share of a step of 8,192 writers opens a few. The
 * manifest says which parts have which blobs, so one blob needs one head. If it does not say (an older step, or one of
 * very many names), all heads are read, several at once. */
#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/load/open/step_internal.h"
#include "core/storage/spread.h"

static struct store_opened_part *part_at(const struct load_step *step, uint32_t line)
{
	return atomic_load_explicit(&step->parts[line], memory_order_acquire);
}

static void part_free(struct store_opened_part *part)
{
	if (part)
		store_opened_part_release(part);
	free(part);
}

int load_step_part(const struct load_step *step, uint32_t line, const struct store_opened_part **ret_part,
	struct base_error *err)
{
	struct store_opened_part *part = part_at(step, line), *mine;
	int r = 0;

	if (!part) {
		mine = calloc(1, sizeof *mine);
		if (!mine)
			return base_no_memory(err);
		r = store_open_part(step->store, &step->manifest, line, mine, err);
		if (r < 0)
			free(mine);
		else
			part = step_publish(&step->parts[line], mine, part_free);
	}
	*ret_part = part;
	return r;
}

void load_step_parts_free(struct load_step *step)
{
	for (uint32_t i = 0; step->parts && i < step->manifest.nranks; i++)
		part_free(part_at(step, i));
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

static int part_opened(void *arg, uint32_t line, struct base_error *err)
{
	const struct store_opened_part *part;

	return load_step_part(arg, line, &part, err);
}

static uint64_t heads_bytes(const struct load_step *step, const char *name)
{
	uint64_t bytes = 0;

	for (uint32_t line = 0; line < step->manifest.nranks; line++) {
		const struct store_opened_part *p = part_at(step, line);

		for (uint32_t i = 0; p && i < p->part.ntimings; i++)
			if (strcmp(p->part.timings[i].phase, name) == 0)
				base_add_overflows(bytes, p->part.timings[i].bytes, &bytes);
	}
	return bytes;
}

int load_step_again(struct load_step *step, uint64_t *ret_bytes, uint64_t *ret_no_base, struct base_error *err)
{
	int r = storage_spread(step->manifest.nranks, part_opened, step, err);

	if (r < 0)
		return load_step_failed(step, r, NULL, err);
	*ret_bytes = heads_bytes(step, PROTO_TIMING_AGAIN);
	*ret_no_base = base_min(heads_bytes(step, PROTO_TIMING_NO_BASE), *ret_bytes);
	return 0;
}

/* Blobs of the parts that were read: global ones by name (the lowest rank's, if several have one), then ranks' own. */
static struct step_blobs *blobs_make(struct load_step *step)
{
	struct step_blobs *blobs;
	uint64_t total = 0;
	uint32_t n = 0, kept = 0;

	for (uint32_t i = 0; i < step->manifest.nranks; i++)
		total += part_at(step, i) ? part_at(step, i)->part.nblobs : 0;
	blobs = total <= UINT32_MAX ? malloc(sizeof *blobs + total * sizeof *blobs->all) : NULL;
	if (!blobs)
		return NULL;
	for (uint32_t i = 0; i < step->manifest.nranks; i++)
		for (uint32_t b = 0; part_at(step, i) && b < part_at(step, i)->part.nblobs; b++)
			blobs->all[n++] = (struct step_blob){i, b};
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

static const struct step_blobs *blobs_of(const struct load_step *step)
{
	return atomic_load_explicit(&step->blobs, memory_order_acquire);
}

struct blobs_lines { struct load_step *step; uint32_t *lines; uint32_t n; };

static int blobs_part(void *arg, uint32_t i, struct base_error *err)
{
	const struct blobs_lines *l = arg;

	return part_opened(l->step, l->lines[i], err);
}

/* The heads of the parts that have blobs, as the manifest says. */
static int blobs_named(struct load_step *step, struct base_error *err)
{
	const struct proto_manifest *m = &step->manifest;
	base_cleanup_free bool *has = calloc((size_t)m->nranks + 1, sizeof *has);
	base_cleanup_free uint32_t *lines = malloc(((size_t)m->nranks + 1) * sizeof *lines);
	struct blobs_lines l = {step, lines, 0};

	if (!has || !lines)
		return base_no_memory(err);
	for (uint32_t i = 0; i < m->nblobs; i++)
		for (uint32_t k = 0; k < m->blobs[i].nranges; k++)
			memset(has + m->blobs[i].ranges[k].first, true, m->blobs[i].ranges[k].n);
	for (uint32_t i = 0; i < m->nranks; i++)
		if (has[i])
			lines[l.n++] = i;
	return storage_spread(l.n, blobs_part, &l, err);
}

int load_step_blobs(struct load_step *step, struct base_error *err)
{
	struct step_blobs *mine;
	int r;

	if (blobs_of(step))
		return 0;
	r = step->manifest.names_blobs ? blobs_named(step, err)
		: storage_spread(step->manifest.nranks, part_opened, step, err);
	if (r < 0)
		return load_step_failed(step, r, NULL, err);
	mine = blobs_make(step);
	if (!mine)
		return base_no_memory(err);
	step_publish(&step->blobs, mine, free);
	return 0;
}

uint32_t load_step_blob_count(const struct load_step *step)
{
	const struct step_blobs *blobs = blobs_of(step);

	return blobs ? blobs->n : 0;
}

const struct step_blob *load_step_blob_at(const struct load_step *step, uint32_t blob)
{
	return &blobs_of(step)->all[blob];
}

void load_step_blob_look(const struct load_step *step, const struct step_blob *b, struct load_blob_info *ret_info)
{
	const struct proto_blob *p = blob_at(step, b);

	*ret_info = (struct load_blob_info){.name = p->name, .per_rank = p->per_rank,
		.rank = step->manifest.ranks[b->line].rank,
		.bytes = p->len, .digest = p->ref.digest};
}

void load_step_blob_info(const struct load_step *step, uint32_t blob, struct load_blob_info *ret_info)
{
	load_step_blob_look(step, load_step_blob_at(step, blob), ret_info);
}

/* ---- one of them, by its name ---- */

static const struct proto_blob_name *names_find(const struct proto_manifest *m, const char *name, bool per_rank)
{
	uint32_t i = base_bisect(k, 0, m->nblobs, (int)m->blobs[k].per_rank != (int)per_rank
			? m->blobs[k].per_rank < per_rank : strcmp(m->blobs[k].name, name) < 0);
	const struct proto_blob_name *b = i < m->nblobs ? &m->blobs[i] : NULL;

	return b && b->per_rank == per_rank && strcmp(b->name, name) == 0 ? b : NULL;
}

/* The first rank from `from` on that has it, or -1. */
static int64_t names_rank(const struct proto_blob_name *b, uint32_t from)
{
	uint32_t i = b ? base_bisect(k, 0, b->nranges, b->ranges[k].first + b->ranges[k].n <= from) : 0;

	return b && i < b->nranges ? base_max(b->ranges[i].first, from) : -1;
}

/* In the part of a line. */
static int64_t part_find(const struct load_step *step, uint32_t line, const char *name, bool per_rank)
{
	const struct proto_part *p = &part_at(step, line)->part;

	for (uint32_t i = 0; i < p->nblobs; i++)
		if (p->blobs[i].per_rank == per_rank && strcmp(p->blobs[i].name, name) == 0)
			return i;
	return -ENOENT;
}

static int blob_find_named(struct load_step *step, const char *name, int64_t rank, struct step_blob *ret_b,
	struct base_error *err)
{
	const struct proto_blob_name *b = names_find(&step->manifest, name, rank >= 0);
	int64_t line = rank > UINT32_MAX ? -1 : names_rank(b, rank >= 0 ? (uint32_t)rank : 0), at;
	const struct store_opened_part *part;
	int r;

	if (line < 0 || (rank >= 0 && line != rank))
		return 0;
	r = load_step_part(step, (uint32_t)line, &part, err); /* there is a line for each rank */
	if (r < 0)
		return load_step_failed(step, r, NULL, err);
	at = part_find(step, (uint32_t)line, name, rank >= 0);
	if (at < 0)
		return load_step_failed(step, base_error_set(err, -BASE_EFORMAT,
			"the manifest lists blob %.400s for rank %u, whose part has no blob of that name",
			name, (uint32_t)line), NULL, err);
	*ret_b = (struct step_blob){(uint32_t)line, (uint32_t)at};
	return 1;
}

int load_step_blob_find(struct load_step *step, const char *name, int64_t rank, struct step_blob *ret_b,
	struct base_error *err)
{
	int r;

	if (step->manifest.names_blobs)
		return blob_find_named(step, name, rank, ret_b, err);
	r = load_step_blobs(step, err);
	for (uint32_t i = 0; r == 0 && i < blobs_of(step)->n; i++) {
		const struct step_blob *b = load_step_blob_at(step, i);
		const struct proto_blob *p = blob_at(step, b);

		if (strcmp(p->name, name) == 0 && p->per_rank == (rank >= 0) &&
			(rank < 0 || step->manifest.ranks[b->line].rank == rank)) {
			*ret_b = *b;
			return 1;
		}
	}
	return r;
}

/* Does it come before the blobs of `rank`: as no rank's own, or that of a lower rank? */
static bool blob_before(const struct load_step *step, uint32_t blob, uint32_t rank)
{
	const struct step_blob *b = load_step_blob_at(step, blob);

	return !blob_at(step, b)->per_rank || step->manifest.ranks[b->line].rank < rank;
}

int load_step_blob_rank(struct load_step *step, const char *name, uint32_t from, uint32_t *ret_rank,
	struct base_error *err)
{
	int64_t found;
	int r;

	if (step->manifest.names_blobs) {
		found = names_rank(names_find(&step->manifest, name, true), from);
		*ret_rank = (uint32_t)found;
		return found >= 0;
	}
	r = load_step_blobs(step, err);
	if (r < 0)
		return r;
	for (uint32_t n = blobs_of(step)->n, i = base_bisect(k, 0, n, blob_before(step, k, from)); i < n; i++)
		if (strcmp(blob_at(step, load_step_blob_at(step, i))->name, name) == 0) {
			*ret_rank = step->manifest.ranks[load_step_blob_at(step, i)->line].rank;
			return 1;
		}
	return 0;
}

int load_step_blob_ref(const struct load_step *step, const struct step_blob *b, struct pack_object_ref *ret_ref,
	const char *const **ret_packs, uint32_t *ret_npacks, struct base_error *err)
{
	const struct store_opened_part *part = part_at(step, b->line);
	const struct proto_blob *p = blob_at(step, b);

	*ret_ref = pack_object_ref_from(&p->ref);
	*ret_packs = part->packs;
	*ret_npacks = part->npacks;
	if (p->len && (p->ref.pack >= part->npacks || p->ref.raw_len != p->len))
		return base_error_set(err, -BASE_EFORMAT, "the reference to it in the part is wrong");
	return 0;
}
