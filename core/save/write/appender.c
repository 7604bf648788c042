/* SPDX-License-Identifier: Apache-2.0
 *
 * appender: takes finished pieces in the order of the layout, settles each, and writes.
 *
 *   at most 64 bytes          is in its row
 *   in the table of objects   a duplicate: refers to the first (or to the other commit's)
 *   at its position in a base refers to the base's, once that commit is named
 *   found in the index        refers to the other commit's, likewise; that commit recognises later pieces by position
 *   both of these again       where what the commit says is not believed (trust.h), so that the bytes were compared
 *   else                      appended to the pack of its component
 *
 * References to new objects are complete only when their extent has ended, so rows wait in a queue until then: a row
 * goes into the part when all its pieces are settled and no extent is open. A queue holds at most the pieces of one
 * extent and those of the current tensor.
 *
 * The pack of a component is opened at its first new piece (an import of known data makes none but `meta`) and
 * sealed when the next one begins. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/save/write/write_internal.h"

struct save_row {
	struct save_row *next;
	uint32_t tensor;
	uint64_t at, nboxes;             /* of the plan */
	uint64_t npieces, settled;
	/* bytes of inline pieces; their ref.offset says where until the row is handed over */
	struct base_buf inlined;
	struct save_known **known;       /* by piece; NULL: inline */
	struct store_piece pieces[];
};

static void row_free(struct save_row *row)
{
	base_buf_release(&row->inlined);
	free(row->known);
	free(row);
}

int save_write_failed(const struct save_writer *w, const char *class, int r, struct base_error *err)
{
	if (store_denied(w->store, r, err))
		return r;
	return base_error_set(err, r, "the %s pack cannot be written to %s: %s", class, w->store->path,
		base_error_name(r));
}

/* ---- rows ---- */

/* Boxes as a row has them; none where it is the whole tensor. */
static int row_boxes(const struct save_appender *a, const struct save_row *row, struct tensor_box **ret_boxes)
{
	const struct save_plan_box *from = &a->w->planned->plan.boxes[row->at];
	struct tensor_shape shape;
	struct tensor_box whole, *boxes;

	*ret_boxes = NULL;
	store_layout_shape(a->w->planned->layout, row->tensor, &shape);
	tensor_box_whole(&shape, &whole);
	if (row->nboxes == 1 && memcmp(whole.size, from->at.box.size, shape.ndim * sizeof whole.size[0]) == 0)
		return 0;
	boxes = malloc(row->nboxes * sizeof *boxes);
	if (!boxes)
		return -ENOMEM;
	for (uint64_t i = 0; i < row->nboxes; i++)
		boxes[i] = from[i].at.box;
	*ret_boxes = boxes;
	return 0;
}

static int row_hand_over(struct save_appender *a, struct save_row *row, struct base_error *err)
{
	base_cleanup_free struct tensor_box *boxes = NULL;

	if (row_boxes(a, row, &boxes) < 0)
		return base_no_memory(err);
	for (uint64_t i = 0; i < row->npieces; i++) {
		struct store_piece *p = &row->pieces[i];

		if (row->known[i]) {
			p->ref = row->known[i]->ref;
			p->ref.pack = row->known[i]->pack;
		} else {
			p->inline_bytes = row->inlined.data ? row->inlined.data + p->ref.offset : (const uint8_t *)"";
			p->ref.offset = 0;
		}
	}
	return store_part_add_row(a->part, row->tensor, boxes, boxes ? (uint32_t)row->nboxes : 0, row->pieces,
		row->npieces, err);
}

static int appender_flush_rows(struct save_appender *a, struct base_error *err)
{
	int r = 0;

	while (r >= 0 && a->first && a->first->settled == a->first->npieces) {
		struct save_row *row = a->first;

		r = row_hand_over(a, row, err);
		a->first = row->next;
		if (!a->first)
			a->last = NULL;
		row_free(row);
	}
	return r;
}

/* Is it the first band of a tensor? */
static bool appender_begins_row(const struct save_appender *a, const struct save_band *b)
{
	return b->first_piece == 0 && (b->at == 0 || save_planned_tensor(a->w->planned, b->at - 1) != b->tensor);
}

static int appender_begin_row(struct save_appender *a, const struct save_band *b, struct base_error *err)
{
	const struct save_plan *plan = &a->w->planned->plan;
	uint64_t n = 0, end = b->at, bytes;
	struct save_row *row;

	for (; end < plan->nboxes && save_planned_tensor(a->w->planned, end) == b->tensor; end++)
		if (base_add_overflows(n, plan->boxes[end].pieces, &n))
			n = UINT64_MAX;
	if (base_mul_overflows(n, sizeof row->pieces[0], &bytes) || bytes > SIZE_MAX / 2 || end - b->at > UINT32_MAX)
		return base_error_set(err, -BASE_ELIMIT, "a tensor has too many pieces");
	row = calloc(1, sizeof *row + bytes);
	if (row)
		row->known = calloc(n, sizeof *row->known);
	if (!row || !row->known) {
		free(row);
		return base_no_memory(err);
	}
	row->tensor = b->tensor;
	row->at = b->at;
	row->nboxes = end - b->at;
	row->npieces = n;
	*(a->last ? &a->last->next : &a->first) = row;
	a->last = row;
	return 0;
}

/* ---- packs and extents ---- */

static bool appender_extent_is_open(const struct save_appender *a)
{
	return a->pack && (a->held.pieces.len || pack_writer_size(a->pack) != a->extent_start);
}

static int appender_end_extent(struct save_appender *a, struct base_error *err)
{
	uint64_t begin = base_monotonic_ns();
	int r;

	if (!appender_extent_is_open(a))
		return 0;
	r = save_held_append(a);
	if (r == 0)
		r = pack_extent_end(a->pack);
	a->w->result.write_ns += base_monotonic_ns() - begin;
	if (r < 0)
		return save_write_failed(a->w, a->pack_class, r, err);
	a->extent_start = pack_writer_size(a->pack);
	return appender_flush_rows(a, err);
}

static int appender_open_pack(struct save_appender *a, const char *class, struct pack_writer **ret_pack,
	uint32_t *ret_number, struct base_error *err)
{
	struct save_writer *w = a->w;
	char name[PACK_NAME_MAX];
	int64_t number;
	int r = commit_attempt_pack_open(w->attempt, class, name, ret_pack);

	if (r < 0)
		return save_write_failed(w, class, r, err);
	number = save_dedup_pack(&w->dedup, name, true);
	if (number < 0)
		return base_no_memory(err);
	*ret_number = (uint32_t)number;
	return 0;
}

/* The pack of the class is long enough: the next object goes into a further one. */
static int appender_turn(struct save_appender *a, struct base_error *err)
{
	char class[sizeof a->pack_class];
	int r;

	memcpy(class, a->pack_class, sizeof class);
	r = save_appender_class(a, NULL, err);
	memcpy(a->pack_class, class, sizeof class);
	return r;
}

int save_appender_room(struct save_appender *a, uint64_t bytes, struct base_error *err)
{
	int r = 0;

	if (a->pack && a->w->pack_bytes && pack_writer_size(a->pack) >= a->w->pack_bytes)
		r = appender_turn(a, err);
	else if (appender_extent_is_open(a) &&
		pack_writer_size(a->pack) - a->extent_start + save_held_bytes(&a->held) + 2 * 4096 + bytes
		> STORE_EXTENT_MAX_BYTES)
		r = appender_end_extent(a, err);
	if (r == 0 && !a->pack) {
		r = appender_open_pack(a, a->pack_class, &a->pack, &a->pack_number, err);
		if (r == 0)
			a->extent_start = pack_writer_size(a->pack);
	}
	return r;
}

int save_appender_class(struct save_appender *a, const char *class, struct base_error *err)
{
	uint64_t begin;
	int r = 0;

	if (class && strcmp(a->pack_class, class) == 0)
		return 0;
	if (a->pack) {
		r = appender_end_extent(a, err);
		begin = base_monotonic_ns();
		if (r == 0) {
			r = commit_attempt_pack_seal(a->w->attempt, base_steal(a->pack),
				&a->w->dedup.packs[a->pack_number].size);
			if (r < 0)
				save_write_failed(a->w, a->pack_class, r, err);
			a->w->result.write_ns += base_monotonic_ns() - begin;
		}
	}
	a->pack_class[0] = 0;
	if (class)
		snprintf(a->pack_class, sizeof a->pack_class, "%s", class);
	return r;
}

void save_appender_count(struct save_appender *a, uint32_t pack, struct save_known *k)
{
	struct save_result *result = &a->w->result;

	k->pack = pack;
	*(pack == a->meta_number ? &a->meta_blob_bytes : &a->w->dedup.packs[pack].live_bytes) += k->ref.stored_len;
	result->piece_bytes_new += k->ref.stored_len;
	result->raw_bytes_new += k->ref.raw_len;
}

/* ---- pieces ---- */

static int appender_write(struct save_appender *a, struct save_band *b, struct save_piece *p,
	struct save_known **ret_known, struct base_error *err)
{
	struct save_known *k = save_dedup_add(&a->w->dedup, &p->digest, PACK_OBJECT_PIECE);
	uint64_t begin = base_monotonic_ns();
	bool raw = p->codec == PACK_CODEC_RAW;
	int r;

	if (!k)
		return base_no_memory(err);
	r = save_appender_room(a, p->stored_len, err);
	if (r < 0)
		return r;
	if (a->last->npieces == 1 && save_held_takes(p)) {
		r = save_held_add(&a->held, b, p, k);
		if (r > 0)
			r = save_held_append(a);
	} else {
		r = pack_append_lent(a->pack, &p->digest, PACK_OBJECT_PIECE, p->codec,
			(raw ? b->raw : b->out) + p->offset, p->stored_len, p->len, b->checks + p->first_block,
			raw ? NULL : b->lens + p->first_block, raw && b->raw == b->in ? b->lent : NULL, &k->ref);
		if (r == 0)
			save_appender_count(a, a->pack_number, k);
	}
	a->w->result.write_ns += base_monotonic_ns() - begin;
	if (r < 0)
		return save_write_failed(a->w, a->pack_class, r, err);
	a->w->result.pieces_new++;
	if (!raw)
		a->w->result.bytes_encoded += p->len;
	*ret_known = k;
	return 0;
}

/* A worker compares what it knows of; a base that came later is left to this thread. */
static bool appender_compare(const struct save_appender *a, const struct save_band *b, const struct save_piece *p,
	const struct index_place *place)
{
	base_cleanup_free void *room = b->given.pieces ? NULL : malloc(p->len);

	if (b->given.pieces)
		return save_trust_rehash(a->w->store, place, NULL);
	return room && save_trust_compare(a->w->store, place, b->raw + p->offset, room);
}

/* Is the piece at its position in a base, in a record that is believed, or in one that is not? This is asked by digest,
 * in the order of the bases, however the digest became known, so the reference does not depend on which bases a worker
 * saw. */
static int appender_by_position(struct save_appender *a, struct save_band *b, const struct save_piece *p, bool trusted,
	struct save_known **ret_known, struct base_error *err)
{
	struct save_writer *w = a->w;
	struct index_place place;

	save_band_rows(b, w);
	for (unsigned i = 0; i < b->nrows; i++) {
		const char *pack;
		const struct store_piece *known = save_base_piece(b->rows[i], &p->box, p->len, &pack);
		int r;

		if (!known || !base_digest_equal(&known->ref.digest, &p->digest) ||
			save_base_trusts(b->rows[i], known) != trusted)
			continue;
		if (!save_dedup_may(&w->dedup, pack)) {
			w->dedup.refused = true;
			continue;
		}
		save_base_place(b->rows[i], known, pack, &place);
		if (!trusted && known != p->compared && !appender_compare(a, b, p, &place))
			continue;
		r = save_base_name(b->rows[i]->base, &w->dedup, w->attempt, err);
		if (r == 0)
			r = save_dedup_admit(&w->dedup, w->store, w->attempt, &place, PACK_OBJECT_PIECE, p->len,
				ret_known, err);
		if (r != -ENOENT)
			return r;
	}
	return -ENOENT;
}

/* Before any of its data is used, for that decides which of its attempts are kept. */
static int appender_add_base(struct save_appender *a, const struct index_place *place, struct base_error *err)
{
	struct save_writer *w = a->w;
	int r = save_dedup_name(&w->dedup, w->attempt, place->run, place->entry, &place->manifest, err);

	if (r < 0)
		return r;
	w->bases.room = SAVE_KEEP_MAX - w->dedup.nattempts;
	if (save_bases_add(&w->bases, w->store, place->run, place->entry, &place->manifest) < 0)
		return base_no_memory(err);
	return 0;
}

/* By the index; the commit that it names recognises later pieces by position, if what it says is believed. */
static int appender_by_index(struct save_appender *a, const struct save_band *b, struct save_piece *p, bool trusted,
	struct save_known **ret_known, struct base_error *err)
{
	struct save_writer *w = a->w;
	int r;

	if (!p->looked)
		p->found = save_writer_lookup(w, &p->digest, PACK_OBJECT_PIECE, p->len, &p->place);
	p->looked = true;
	if (!p->found || p->place.own != trusted)
		return -ENOENT;
	if (trusted && (r = appender_add_base(a, &p->place, err)) < 0)
		return r;
	if (!save_dedup_may(&w->dedup, p->place.pack)) {
		w->dedup.refused = true;
		return -ENOENT;
	}
	if (!trusted && !p->place_compared && !appender_compare(a, b, p, &p->place))
		return -ENOENT;
	return save_dedup_admit(&w->dedup, w->store, w->attempt, &p->place, PACK_OBJECT_PIECE, p->len, ret_known, err);
}

/* What a base says is used only once that base is named; if the base is gone, the piece is hashed after all. */
static int appender_believe(struct save_appender *a, struct save_band *b, struct save_piece *p, struct base_error *err)
{
	int r = save_base_name(p->believed, &a->w->dedup, a->w->attempt, err);

	if (r != -ENOENT)
		return r;
	r = save_band_confirm(b, a->w, p);
	if (r < 0 && err)
		*err = b->err;
	p->believed = NULL;
	return r;
}

/* Known, but not to be used: rare, so what a worker left undone is done here. */
static int appender_encode(struct save_appender *a, struct save_band *b, struct save_piece *p, struct base_error *err)
{
	uint64_t begin = base_monotonic_ns();
	int r = b->given.pieces ? save_given_fetch(b, a->w, p) : p->believed ? save_band_confirm(b, a->w, p) : 0;

	if (r == 0 && !b->given.pieces)
		save_band_encode(b, p);
	if (r < 0 && err)
		*err = b->err;
	a->w->result.encode_ns += base_monotonic_ns() - begin;
	return r;
}

/* Where the store has the piece already. */
static int appender_find(struct save_appender *a, struct save_band *b, struct save_piece *p,
	struct save_known **ret_known, struct base_error *err)
{
	int r = appender_by_position(a, b, p, true, ret_known, err);

	if (r == -ENOENT)
		r = appender_by_index(a, b, p, true, ret_known, err);
	/* It is not cut; or a record said that it is here, and it is not, so that the others are doubtful, too. */
	if (r != -ENOENT || p->believed || p->refuted)
		return r;
	r = appender_by_position(a, b, p, false, ret_known, err);
	if (r == -ENOENT)
		r = appender_by_index(a, b, p, false, ret_known, err);
	a->w->result.pieces_compared += r == 0;
	return r;
}

/* A piece is written: did an earlier step have it? */
static void appender_again(const struct save_appender *a, struct save_band *b, const struct save_piece *p)
{
	struct save_writer *w = a->w;
	struct base_error why = {0};
	bool lost = false;

	if (!w->dedup.refused) {
		save_band_rows(b, w);
		lost = save_bases_lost(&w->bases, b->rows, b->nrows, &p->box, p->len, &p->digest, &why);
	}
	if (lost && !w->result.bytes_no_base)
		w->no_base = why;
	w->result.bytes_no_base += lost ? p->len : 0;
	w->result.bytes_again += lost || w->dedup.refused ? p->len : 0;
}

static int appender_settle(struct save_appender *a, struct save_band *b, struct save_piece *p,
	struct save_known **ret_known, struct base_error *err)
{
	struct save_writer *w = a->w;
	int r = p->believed ? appender_believe(a, b, p, err) : 0;

	if (r < 0)
		return r;
	*ret_known = save_dedup_find(&w->dedup, &p->digest, PACK_OBJECT_PIECE);
	if (*ret_known) {
		w->result.pieces_duplicate++;
		w->result.bytes_duplicate += p->len;
		return 0;
	}
	w->dedup.refused = false;
	r = p->taken ? save_taken_admit(w, &p->place, ret_known, err) : appender_find(a, b, p, ret_known, err);
	if (r == 0) {
		w->result.pieces_reused++;
		w->result.bytes_reused += p->len;
	}
	if (r != -ENOENT)
		return r;
	appender_again(a, b, p);
	r = p->encoded ? 0 : appender_encode(a, b, p, err);
	return r < 0 ? r : appender_write(a, b, p, ret_known, err);
}

static int appender_piece(struct save_appender *a, struct save_row *row, struct save_band *b, struct save_piece *p,
	struct base_error *err)
{
	struct store_piece *piece = &row->pieces[row->settled];
	int r = 0;

	a->w->result.pieces++;
	a->w->result.pieces_believed += p->believed != NULL;
	a->w->result.pieces_checked += p->checked;
	a->w->result.pieces_refuted += p->refuted;
	if (b->given.pieces && p->repeats)
		p->xxh = b->given.first[p - b->pieces]->xxh; /* that one was settled before */
	piece->base = STORE_PIECE_NO_BASE;
	if (p->len > STORE_INLINE_MAX_BYTES) {
		r = appender_settle(a, b, p, &row->known[row->settled], err);
		piece->xxh = p->xxh;
		row->settled++; /* only now: settling may end an extent, which hands settled rows over */
		return r;
	}
	piece->xxh = p->xxh;
	piece->ref = (struct pack_object_ref){.digest = p->digest, .offset = row->inlined.len, .raw_len = p->len,
		.stored_len = p->len,
		.codec = PACK_CODEC_RAW, .kind = PACK_OBJECT_PIECE, .pack = UINT32_MAX};
	base_buf_append(&row->inlined, b->raw + p->offset, p->len);
	row->settled++;
	return row->inlined.error ? base_no_memory(err) : 0;
}

int save_appender_band(struct save_appender *a, struct save_band *b, struct base_error *err)
{
	int r = 0;

	if (appender_begins_row(a, b)) {
		r = save_appender_class(a, store_layout_component(a->w->planned->layout, b->tensor), err);
		if (r == 0)
			r = appender_begin_row(a, b, err);
	}
	for (uint32_t i = 0; r == 0 && i < b->npieces; i++)
		r = appender_piece(a, a->last, b, &b->pieces[i], err);
	if (r == 0 && !appender_extent_is_open(a))
		r = appender_flush_rows(a, err);
	save_band_forget(b);
	return r;
}

void save_appender_keep(struct save_appender *a)
{
	if (a->pack)
		pack_keep(a->pack);
}

/* ---- the meta pack ---- */

/* Another commit's copy of the layout object, for a rank that need not store it; 0: there is none. */
static int appender_refer_layout(struct save_appender *a, struct base_error *err)
{
	struct save_writer *w = a->w;
	struct index_place place;
	struct save_known *known;
	int r = -ENOENT;

	for (unsigned i = 0; r == -ENOENT && i < save_bases_count(&w->bases); i++)
		if (save_base_layout_place(w->bases.all[i], &w->planned->layout->digest, &place) == 0)
			r = save_dedup_admit(&w->dedup, w->store, w->attempt, &place, PACK_OBJECT_LAYOUT,
				w->planned->layout_object.len, &known, err);
	if (r == 0) {
		a->layout_ref = known->ref;
		a->layout_pack = known->pack;
	}
	return r == -ENOENT ? 0 : r < 0 ? r : 1;
}

static int appender_append_layout(struct save_appender *a, struct base_error *err)
{
	struct save_writer *w = a->w;
	int r = w->planned->stores_layout || w->layout_elsewhere ? 0 : appender_refer_layout(a, err);

	if (w->layout_elsewhere)
		a->layout_pack = UINT32_MAX;
	if (r == 0 && !w->layout_elsewhere) {
		a->layout_pack = a->meta_number;
		r = pack_append_encoded(a->meta, PACK_OBJECT_LAYOUT, w->planned->layout_object.data,
			w->planned->layout_object.len, &a->layout_ref);
	}
	for (uint32_t i = 0; r >= 0 && i < w->nheaders; i++)
		r = pack_append_encoded(a->meta, PACK_OBJECT_VIEW_HEADER, w->headers[i].bytes,
			w->headers[i].len, &w->headers[i].ref);
	return r < 0 ? save_write_failed(w, "meta", r, err) : 0;
}

int save_appender_open(struct save_writer *w, struct save_appender **ret_a, struct base_error *err)
{
	struct save_appender *a = calloc(1, sizeof *a);
	int r;

	if (!a)
		return base_no_memory(err);
	*ret_a = a;
	a->w = w;
	r = appender_open_pack(a, "meta", &a->meta, &a->meta_number, err);
	if (r == 0)
		r = appender_append_layout(a, err);
	if (r < 0)
		return r;
	a->part = store_part_builder_new(w->planned->layout, a->meta, a->meta_number);
	if (!a->part)
		return base_no_memory(err);
	if (!w->builder) /* an import leaves nothing for a next save */
		store_part_builder_keep(a->part, &w->leaves.part);
	return 0;
}

void save_appender_free(struct save_appender *a)
{
	if (!a)
		return;
	while (a->first) {
		struct save_row *row = a->first;

		a->first = row->next;
		row_free(row);
	}
	save_held_release(&a->held);
	store_part_builder_free(a->part);
	pack_abandon(a->pack);
	pack_abandon(a->meta);
	free(a);
}
