/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_rank: one rank of a step: the rows of its part give the plan of what to store (its boxes, in order) and for each
 * piece its digest and where the source has it. Then a rank's writer takes it to the announcement. Memory: the rows of
 * one rank. */
#include "core/copy/copy_internal.h"

#include "core/base/array.h"
#include "core/base/table.h"
#include "core/base/le.h"

#define COPY_PACK_BYTES (UINT64_C(4) << 30)

struct rank_blob { struct copy *c; const char *pack; struct pack_object_ref ref; };

struct copy_rank {
	struct copy_work *k;
	const struct store_layout *layout;      /* borrowed, like part and packs */
	const struct proto_part *part;
	const char *const *packs;
	struct save_planned planned;            /* the layout is borrowed */
	struct save_plan_box *boxes; size_t nboxes, boxes_room;
	/* Of all boxes, one after another; the first of each box. Inline bytes are at ref.offset of `inlined`. */
	struct store_piece *pieces; size_t npieces, pieces_room;
	uint64_t *from; size_t from_room;
	struct base_buf inlined;
	struct store_piece **first;             /* by piece: an equal one before it */
	struct rank_blob *blobs;
};

void copy_rank_free(struct copy_rank *rk)
{
	if (!rk)
		return;
	rk->planned.layout = NULL;
	rk->planned.plan.boxes = NULL;
	save_planned_release(&rk->planned);
	free(rk->boxes);
	free(rk->pieces);
	free(rk->from);
	base_buf_release(&rk->inlined);
	free(rk->first);
	free(rk->blobs);
	free(rk);
}

/* ---- what the source has ---- */

static int rank_add_pieces(struct copy_rank *rk, const struct store_row *row)
{
	if (base_array_room(rk->pieces, rk->pieces_room, rk->npieces + row->npieces) < 0)
		return -ENOMEM;
	for (uint64_t i = 0; i < row->npieces; i++) {
		struct store_piece *p = &rk->pieces[rk->npieces++];

		*p = row->pieces[i];
		if (!p->inline_bytes)
			continue;
		p->ref.offset = rk->inlined.len;
		base_buf_append(&rk->inlined, p->inline_bytes, p->ref.raw_len);
	}
	return rk->inlined.error ? -ENOMEM : 0;
}

static int rank_add_row(struct copy_rank *rk, const struct store_layout *l, const struct store_row *row)
{
	uint64_t first = rk->npieces;
	struct tensor_grid grid;

	store_layout_grid(l, row->tensor, &grid);
	if (base_array_room(rk->boxes, rk->boxes_room, rk->nboxes + row->nboxes) < 0 ||
		base_array_room(rk->from, rk->from_room, rk->nboxes + row->nboxes) < 0)
		return -ENOMEM;
	for (uint32_t i = 0; i < row->nboxes; i++) {
		struct save_plan_box *box = &rk->boxes[rk->nboxes];

		*box = (struct save_plan_box){.tensor = row->tensor, .at.box = row->boxes[i],
			.pieces = tensor_piece_count(&grid, &row->boxes[i])};
		rk->from[rk->nboxes++] = first;
		first += box->pieces;
		rk->planned.plan.pieces += box->pieces;
		rk->planned.plan.bytes += tensor_box_items(&grid.shape, &row->boxes[i]) * grid.item_bytes;
	}
	return rank_add_pieces(rk, row);
}

/* Pieces that are equal to an earlier one, by digest; and inline bytes get their addresses. */
static int rank_find_first(struct copy_rank *rk)
{
	struct base_table table = {0};
	int r = 0;

	rk->first = calloc(rk->npieces + 1, sizeof *rk->first);
	if (!rk->first || rk->npieces >= UINT32_MAX || base_table_reserve(&table, rk->npieces) < 0)
		r = -ENOMEM;
	for (size_t i = 0; r == 0 && i < rk->npieces; i++) {
		struct store_piece *p = &rk->pieces[i];
		uint32_t hash = base_table_hash(p->ref.digest.bytes, sizeof p->ref.digest.bytes), at; /* a claim yet */
		size_t next = 0;

		if (p->inline_bytes) {
			p->inline_bytes = rk->inlined.data ? rk->inlined.data + p->ref.offset : (const uint8_t *)"";
			continue;
		}
		while (!rk->first[i] && (at = base_table_next(&table, hash, &next)) != BASE_TABLE_NONE)
			if (base_digest_equal(&rk->pieces[at].ref.digest, &p->ref.digest) &&
				rk->pieces[at].ref.raw_len == p->ref.raw_len)
				rk->first[i] = &rk->pieces[at];
		if (!rk->first[i])
			base_table_add(&table, hash, (uint32_t)i);
	}
	base_table_release(&table);
	return r;
}

int copy_rank_row(void *arg, const struct store_layout *l, const struct store_row *row)
{
	struct copy_work *k = arg;

	if (k->c->options->cancelled && k->c->options->cancelled())
		return base_error_set(k->err, -EINTR, "interrupted");
	if (!k->rank && !(k->rank = calloc(1, sizeof *k->rank)))
		return -ENOMEM;
	k->rank->k = k;
	return rank_add_row(k->rank, l, row);
}

/* ---- what is written ---- */

static int rank_fetch(void *arg, struct save_band *b, struct save_piece *const *pieces, unsigned n)
{
	const struct copy_rank *rk = arg;

	return copy_fetch(rk->k->c, rk->packs, b, pieces, n);
}

static void rank_taken(void *arg, struct save_band *b)
{
	struct copy_rank *rk = arg;
	uint64_t at = rk->from[b->at] + b->first_piece;

	b->given = (struct save_given){.pieces = &rk->pieces[at], .first = &rk->first[at], .fetch = rank_fetch,
		.arg = rk, .cancelled = rk->k->c->options->cancelled};
}

static void rank_appended(void *arg, const struct save_band *b, const struct save_engine_appended *cost)
{
	struct copy *c = ((struct copy_rank *)arg)->k->c;

	(void)cost;
	c->done_bytes += b->len;
	if (c->options->progress)
		c->options->progress(c->options->arg, c->done_bytes, c->options->total_bytes);
}

static int rank_blob_read(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	const struct rank_blob *b = arg;

	return copy_fetch_blob(b->c, b->pack, &b->ref, offset, bytes, len, err);
}

static int rank_add_blobs(struct copy_rank *rk, struct save_writer *w, struct base_error *err)
{
	const struct proto_part *part = rk->part;
	int r = 0;

	rk->blobs = calloc(part->nblobs + 1, sizeof *rk->blobs);
	if (!rk->blobs)
		return base_no_memory(err);
	for (uint32_t i = 0; r == 0 && i < part->nblobs; i++) {
		const struct proto_blob *b = &part->blobs[i];
		struct pack_object_ref ref = pack_object_ref_from(&b->ref);

		rk->blobs[i] = (struct rank_blob){rk->k->c, b->len ? rk->packs[ref.pack] : NULL, ref};
		r = save_writer_blob_given(w, b->name, b->per_rank, b->len, &ref.digest,
			(struct save_source){rank_blob_read, &rk->blobs[i]}, err);
	}
	return r;
}

/* The first rank of a layout stores it, and the view headers that belong to it. */
static bool rank_is_first(const struct copy_work *k, uint32_t line)
{
	for (uint32_t i = 0; i < line; i++)
		if (k->m.ranks[i].layout == k->m.ranks[line].layout)
			return false;
	return true;
}

static int rank_add_header(struct copy_work *k, const struct proto_view_header *h, struct save_writer *w,
	struct base_error *err)
{
	struct pack_object_ref ref = pack_object_ref_from(&h->ref);
	base_cleanup_free void *bytes = NULL;
	int r = store_object_load(k->c->from, k->m.packs[h->ref.pack].pack, &ref, STORE_VIEW_HEADER_MAX_BYTES, &bytes,
		err);

	return r < 0 ? r : save_writer_header(w, h->component, h->view, bytes, ref.raw_len, h->data_bytes, err);
}

static int rank_add_layout(struct copy_rank *rk, uint32_t line, struct save_writer *w, struct base_error *err)
{
	struct copy_work *k = rk->k;
	uint32_t number = k->m.ranks[line].layout;
	struct pack_object_ref ref = pack_object_ref_from(&k->m.layouts[number].ref);
	base_cleanup_free void *bytes = NULL;
	int r;

	if (!rank_is_first(k, line)) {
		save_writer_layout_elsewhere(w);
		return 0;
	}
	rk->planned.stores_layout = k->m.world == 1;
	r = store_object_load(k->c->from, k->m.packs[ref.pack].pack, &ref, STORE_OBJECT_MAX_BYTES, &bytes, err);
	if (r < 0)
		return r;
	base_buf_append(&rk->planned.layout_object, bytes, ref.raw_len);
	if (rk->planned.layout_object.error)
		return base_no_memory(err);
	for (uint32_t i = 0; r == 0 && i < k->m.nheaders; i++)
		if (k->m.headers[i].layout == number)
			r = rank_add_header(k, &k->m.headers[i], w, err);
	return r;
}

/* What the source's rank measured comes along, but for what it wrote again. */
static int rank_finish(struct copy_rank *rk, struct save_writer *w, struct base_error *err)
{
	const struct save_result *result = save_writer_result(w);
	const struct proto_part *part = rk->part;
	struct proto_timing timings[PROTO_TIMINGS_MAX];
	struct save_measured m = {.timings = timings};

	for (uint32_t i = 0; i < part->ntimings && m.ntimings + 2 < PROTO_TIMINGS_MAX; i++)
		if (strcmp(part->timings[i].phase, PROTO_TIMING_AGAIN) != 0 &&
			strcmp(part->timings[i].phase, PROTO_TIMING_NO_BASE) != 0)
			timings[m.ntimings++] = part->timings[i];
	if (result->bytes_again)
		timings[m.ntimings++] = (struct proto_timing){.phase = PROTO_TIMING_AGAIN,
			.bytes = result->bytes_again};
	if (result->bytes_no_base)
		timings[m.ntimings++] = (struct proto_timing){.phase = PROTO_TIMING_NO_BASE,
			.bytes = result->bytes_no_base};
	return save_writer_finish(w, &m, NULL, err);
}

static void rank_count(struct copy_work *k, uint32_t line, const struct save_result *from)
{
	struct copy_result *to = k->result;

	to->pieces_new += from->pieces_new;
	to->pieces_reused += from->pieces_reused;
	to->pieces_duplicate += from->pieces_duplicate;
	to->pieces_compared += from->pieces_compared;
	to->stored_bytes += from->piece_bytes_new;
	k->c->parts[line] = from->part;
	to->nparts = line + 1;
}

static int rank_write(struct copy_rank *rk, uint32_t line, struct save_writer *w, struct base_error *err)
{
	const struct save_engine_source source = {.taken = rank_taken, .appended = rank_appended, .arg = rk};
	struct copy_work *k = rk->k;
	int r = rank_add_blobs(rk, w, err);

	if (r == 0)
		r = rank_add_layout(rk, line, w, err);
	if (r < 0)
		return r;
	save_writer_prepared(w, &rk->planned);
	save_writer_index(w, k->c->index);
	save_writer_pack_bytes(w, k->c->options->pack_bytes ? k->c->options->pack_bytes : COPY_PACK_BYTES);
	commit_attempt_rank(k->attempt, line);
	r = save_writer_begin(w, k->attempt, err);
	for (size_t i = 0; r == 0 && i < k->ntaken; i++)
		if (k->taken[i].line == line)
			r = save_writer_taken(w, k->taken[i].pack, err);
	if (r == 0)
		r = save_writer_bases(w, &k->c->past, true, err);
	if (r == 0)
		r = save_writer_append_all(w, k->c->options->threads, &source, err);
	if (r == 0)
		r = save_writer_seal(w, err);
	if (r == 0)
		r = rank_finish(rk, w, err);
	k->c->done_bytes += save_writer_blob_bytes(w);
	if (r == 0)
		rank_count(k, line, save_writer_result(w));
	save_writer_end(w);
	return r;
}

int copy_rank(void *arg, uint32_t line, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs)
{
	struct copy_work *k = arg;
	struct copy_rank *rk = k->rank ? k->rank : calloc(1, sizeof *rk);
	struct save_writer *w;
	int r;

	k->rank = rk; /* it may have no row */
	if (!rk)
		return -ENOMEM;
	rk->k = k;
	rk->layout = l;
	rk->part = part;
	rk->packs = packs;
	rk->planned.layout = (struct store_layout *)l;
	rk->planned.plan.boxes = rk->boxes;
	rk->planned.plan.nboxes = rk->nboxes;
	rk->planned.plan.held_bytes = rk->planned.plan.bytes;
	if (rank_find_first(rk) < 0)
		return -ENOMEM;
	r = save_writer_new(k->c->to, k->c->run, k->step->commit.attributes, k->step->commit.nattributes, line,
		k->m.world, &w, k->err);
	if (r < 0)
		return r;
	r = rank_write(rk, line, w, k->err);
	save_writer_close(w);
	copy_rank_free(base_steal(k->rank));
	return r;
}
