/* SPDX-License-Identifier: Apache-2.0
 *
 * relation: what tests/bench/relation.py measures, without Python in between: parts whose row of one tensor has any
 * number of pieces (references to packs that nobody made: no piece is read), and, from these stored parts, which pieces
 * one rank needs and where they lie: by ranges of the row, or with the row read whole. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/base/cleanup.h"
#include "core/step/part_excerpt.h"
#include "core/step/store.h"
#include "core/tensor/reshard.h"

int relation_part_make(struct store *s, const struct store_layout *l, uint32_t rank, uint32_t world,
	const struct tensor_box *box, struct pack_object_ref *ret_part, struct base_error *err);
int relation_run(struct store *s, const struct store_layout *l, const struct pack_object_ref *parts,
	const uint32_t *ranks, uint32_t nranks, const struct tensor_shard *target, bool ranged, double ret_us[4],
	uint64_t ret_found[3], struct base_error *err);
int relation_holders(const struct tensor_sharding *from, const struct tensor_shard *target, uint8_t *ret_held);

enum { RUNS_A_PACK = 256 }; /* of 64 MiB */
#define PACK_BYTES (UINT64_C(32) << 30)

/* ---- making ---- */

/* Pieces one after another in runs of 64 MiB, as a writer of raw pieces lays them out. Returns how many packs. */
static uint32_t pieces_make(const struct tensor_grid *g, const struct tensor_box *box, uint64_t seed,
	struct store_piece *pieces)
{
	uint64_t at = PACK_HEAD_BYTES, checks = 0, first = 0, n = 0, end = 0;
	struct tensor_piece_iter it;
	uint32_t pack = 0, runs = 0;

	for (tensor_piece_first(&it, g, box);; tensor_piece_next(&it), n++) {
		uint64_t len = it.done ? 0 : tensor_box_items(&g->shape, &it.piece) * g->item_bytes;

		if (it.done || (n > first && end + len - pieces[first].ref.offset > STORE_EXTENT_MAX_BYTES)) {
			checks = base_align(end, 8);
			for (uint64_t i = first; i < n; i++) {
				pieces[i].ref.checks = checks;
				checks += pack_object_checks_bytes(0, pieces[i].ref.raw_len);
			}
			first = n;
			at = checks;
			if (++runs % RUNS_A_PACK == 0) {
				pack++;
				at = PACK_HEAD_BYTES;
			}
		}
		if (it.done)
			return pack + 1;
		at = base_align(at, pack_object_align(0, len));
		pieces[n] = (struct store_piece){.ref = {.offset = at, .raw_len = len, .stored_len = len,
			.kind = PACK_OBJECT_PIECE, .pack = pack}, .base = STORE_PIECE_NO_BASE};
		for (unsigned i = 0; i < 4; i++) {
			seed = seed * 6364136223846793005u + 1442695040888963407u;
			base_put64(pieces[n].ref.digest.bytes + 8 * i, seed ^ seed >> 29);
		}
		memcpy(pieces[n].xxh.bytes, pieces[n].ref.digest.bytes + 5, sizeof pieces[n].xxh.bytes);
		at = end = at + len;
	}
}

static int part_write(struct store *s, const struct store_layout *l, struct proto_part *part,
	const struct tensor_box *box, const struct store_piece *pieces, uint64_t n, struct pack_object_ref *ret_part,
	struct base_error *err)
{
	struct pack_writer *w;
	struct store_part_builder *b;
	int r = pack_writer_open(s->storage, s->info.id, part->packs[part->npacks - 1].pack, &w), sealed;

	if (r < 0)
		return base_error_set(err, r, "the pack cannot be written");
	b = store_part_builder_new(l, w, part->npacks - 1);
	r = b ? store_part_add_row(b, 0, box, 1, pieces, n, err) : -ENOMEM;
	if (r == 0)
		r = store_part_finish(b, part, ret_part, err);
	sealed = pack_seal(w, NULL);
	store_part_builder_free(b);
	return r < 0 ? r : sealed;
}

/* The part of one rank that holds `box` of tensor 0. */
int relation_part_make(struct store *s, const struct store_layout *l, uint32_t rank, uint32_t world,
	const struct tensor_box *box, struct pack_object_ref *ret_part, struct base_error *err)
{
	base_cleanup_free struct store_piece *pieces = NULL;
	base_cleanup_free struct proto_pack_use *packs = NULL;
	base_cleanup_free char *names = NULL;
	struct tensor_grid g;
	uint32_t npacks;
	struct proto_part part;
	uint64_t n;

	store_layout_grid(l, 0, &g);
	n = tensor_piece_count(&g, box);
	pieces = malloc(n * sizeof *pieces);
	if (!pieces)
		return -ENOMEM;
	npacks = pieces_make(&g, box, rank + 1, pieces);
	packs = calloc(npacks + 1, sizeof *packs);
	names = calloc(npacks + 1, PACK_NAME_MAX);
	if (!packs || !names)
		return -ENOMEM;
	for (uint32_t i = 0; i <= npacks; i++) {
		char class[16] = "meta", *name = names + (size_t)i * PACK_NAME_MAX;

		if (i < npacks)
			snprintf(class, sizeof class, "p%u", i);
		pack_name_make("00000000000000aa-0", rank, class, name);
		packs[i] = (struct proto_pack_use){name, i < npacks ? PACK_BYTES : 0, 0};
	}
	part = (struct proto_part){.rank = rank, .world = world, .host = "h", .layout = l->digest, .packs = packs,
		.npacks = npacks + 1};
	return part_write(s, l, &part, box, pieces, n, ret_part, err);
}

/* ---- asking ---- */

struct need { uint64_t first, end; }; /* pieces of the row */
struct asking {
	const uint64_t *first_piece;
	struct need *needs;
	size_t n, room;
	uint64_t lines, bytes;
	const struct tensor_grid *grid;
};

/* Lines come piece after piece within a source box: neighbours are one need. */
static int line_add(void *arg, const struct tensor_reshard_line *line)
{
	struct asking *a = arg;
	uint64_t piece = a->first_piece[line->box] + line->piece;

	a->lines++;
	a->bytes += tensor_box_items(&a->grid->shape, &line->part) * a->grid->item_bytes;
	if (a->n > 0 && (a->needs[a->n - 1].end == piece || a->needs[a->n - 1].end == piece + 1)) {
		a->needs[a->n - 1].end = piece + 1;
		return 0;
	}
	if (a->n == a->room) {
		size_t room = a->room ? 2 * a->room : 64;
		struct need *more = realloc(a->needs, room * sizeof *more);

		if (!more)
			return -ENOMEM;
		a->needs = more;
		a->room = room;
	}
	a->needs[a->n++] = (struct need){piece, piece + 1};
	return 0;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

struct work {
	struct store *s;
	const struct store_layout *l;
	const struct proto_part *part;
	const char **packs;
	struct asking asking;
	uint64_t places, sum;           /* pieces placed; something that depends on every place */
	double *us;
	struct base_error *err;
};

static void places_sum(struct work *w, const struct store_piece *p, uint64_t n)
{
	w->places += n;
	for (uint64_t i = 0; i < n; i++)
		w->sum = (w->sum ^ p[i].ref.offset ^ p[i].ref.checks ^ p[i].ref.pack) * 0x9e3779b97f4a7c15u;
}

static int relation_of(struct work *w, const struct tensor_boxes *boxes, const struct tensor_shard *target)
{
	struct tensor_box_index *index;
	struct tensor_shard_iter it;
	int r = tensor_box_index_new(boxes, &index);

	w->asking.n = 0;
	if (r < 0)
		return r;
	for (tensor_shard_first(&it, target, NULL); r == 0 && !it.done; tensor_shard_next(&it))
		r = tensor_reshard_box(w->asking.grid, index, boxes, &it.at, line_add, &w->asking);
	tensor_box_index_free(index);
	return r;
}

static int ask_ranged(struct work *w, const struct tensor_shard *target)
{
	base_cleanup_free struct store_piece *pieces = NULL;
	struct store_part_excerpt *excerpt;
	double begin = now();
	int r = store_part_excerpt_open(w->s, w->l, w->part, w->packs, w->part->npacks, 0, &excerpt, w->err);
	uint64_t most = 0;

	if (r < 0)
		return r;
	w->us[1] += now() - begin;
	begin = now();
	w->asking.first_piece = excerpt->first_piece;
	r = relation_of(w, &excerpt->boxes, target);
	w->us[2] += now() - begin;
	begin = now();
	for (size_t i = 0; i < w->asking.n; i++)
		most = base_max(most, w->asking.needs[i].end - w->asking.needs[i].first);
	pieces = malloc((most + 1) * sizeof *pieces);
	if (!pieces)
		r = -ENOMEM;
	for (size_t i = 0; i < w->asking.n && r == 0; i++) {
		const struct need *need = &w->asking.needs[i];

		r = store_part_excerpt_pieces(excerpt, need->first, need->end - need->first, pieces, w->err);
		places_sum(w, pieces, need->end - need->first);
	}
	store_part_excerpt_close(excerpt);
	w->us[3] += now() - begin;
	return r;
}

static int ask_whole(struct work *w, const struct tensor_shard *target)
{
	base_cleanup_free uint64_t *first = NULL;
	struct tensor_boxes boxes = {.ndim = w->asking.grid->shape.ndim};
	double begin = now();
	struct store_row row;
	int r = store_part_read_row_cached(NULL, w->s, w->l, w->part, w->packs, w->part->npacks, 0, &row, w->err);

	if (r < 0)
		return r;
	w->us[1] += now() - begin;
	begin = now();
	first = calloc((size_t)row.nboxes + 1, sizeof *first);
	for (uint32_t i = 0; i < row.nboxes && r == 0; i++) {
		first[i + 1] = first[i] + tensor_piece_count(w->asking.grid, &row.boxes[i]);
		r = tensor_boxes_add(&boxes, &row.boxes[i]);
	}
	w->asking.first_piece = first;
	if (r == 0)
		r = relation_of(w, &boxes, target);
	w->us[2] += now() - begin;
	begin = now();
	for (size_t i = 0; i < w->asking.n && r == 0; i++)
		places_sum(w, row.pieces + w->asking.needs[i].first,
			w->asking.needs[i].end - w->asking.needs[i].first);
	tensor_boxes_release(&boxes);
	store_row_release(&row);
	w->us[3] += now() - begin;
	return r;
}

/* One part, from its object on. */
static int ask_part(struct work *w, const struct pack_object_ref *ref, uint32_t rank,
	const struct tensor_shard *target, bool ranged)
{
	base_cleanup_free void *bytes = NULL;
	char name[PACK_NAME_MAX];
	struct pack *pack;
	struct proto_part part;
	double begin = now();
	int r;

	pack_name_make("00000000000000aa-0", rank, "meta", name);
	r = store_pack_get(w->s, name, &pack, w->err);
	if (r < 0)
		return r;
	r = pack_object_load(pack, ref, 1 << 24, &bytes, w->err);
	store_pack_put(w->s, pack);
	if (r < 0 || (r = proto_part_decode(bytes, ref->raw_len, &part)) < 0)
		return r;
	w->part = &part;
	w->packs = calloc(part.npacks, sizeof *w->packs);
	for (uint32_t i = 0; i < part.npacks; i++)
		w->packs[i] = part.packs[i].pack;
	w->us[0] += now() - begin;
	r = ranged ? ask_ranged(w, target) : ask_whole(w, target);
	free(w->packs);
	proto_part_release(&part);
	return r;
}

/* Which pieces of the parts of `ranks` the target needs, and their places. ret_us: part heads, rows, relation, places.
 * ret_found: lines, bytes, a sum over the places. */
int relation_run(struct store *s, const struct store_layout *l, const struct pack_object_ref *parts,
	const uint32_t *ranks, uint32_t nranks, const struct tensor_shard *target, bool ranged, double ret_us[4],
	uint64_t ret_found[3], struct base_error *err)
{
	struct tensor_grid g;
	struct work w = {.s = s, .l = l, .us = ret_us, .err = err, .asking = {.grid = &g}};
	int r = 0;

	store_layout_grid(l, 0, &g);
	memset(ret_us, 0, 4 * sizeof *ret_us);
	for (uint32_t i = 0; i < nranks && r == 0; i++)
		r = ask_part(&w, &parts[ranks[i]], ranks[i], target, ranged);
	ret_found[0] = w.asking.lines;
	ret_found[1] = w.asking.bytes;
	ret_found[2] = w.sum;
	free(w.asking.needs);
	return r;
}

static int holder_mark(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	(void)coordinate;
	((uint8_t *)arg)[rank] = 1;
	return 0;
}

/* Marks the ranks of `from` that hold something of what the target wants. */
int relation_holders(const struct tensor_sharding *from, const struct tensor_shard *target, uint8_t *ret_held)
{
	struct tensor_shard_iter it;
	int r = 0;

	for (tensor_shard_first(&it, target, NULL); !it.done && r == 0; tensor_shard_next(&it))
		r = tensor_sharding_holders(from, &it.at.box, false, holder_mark, ret_held);
	return r;
}
