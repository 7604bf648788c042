/* SPDX-License-Identifier: Apache-2.0
 *
 * band: the unit of work of the pipeline. A band is a group of consecutive pieces along the last cut dimension in
 * one combination of tile rows: for a matrix the pieces of one row of tiles, whose source bytes are whole rows and
 * so lie one after another: one large read instead of thousands of row fragments. Rows so long that a row of tiles
 * has more than SAVE_BAND_BYTES are cut into several bands, each of some columns.
 *
 * A band has two buffers, kept for the whole save: the source bytes are read into one, the pieces cut into the
 * other, and then the first is free to take the encoded forms. Where a piece's bytes lie in the source as they are
 * stored (vectors; tiles that span whole rows) nothing is cut. */
#include "core/save/write/write_internal.h"

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/commit/notes/note.h"

void save_band_rows(struct save_band *b, struct save_writer *w)
{
	for (unsigned n = save_bases_count(&w->bases); b->nrows < n; b->nrows++)
		b->rows[b->nrows] = save_base_row_get(w->bases.all[b->nrows], w->planned->layout, b->tensor,
			&w->planned->plan.boxes[b->at].at.box);
}

void save_band_forget(struct save_band *b)
{
	while (b->nrows)
		save_base_row_put(b->rows[--b->nrows]);
}

void save_band_release(struct save_band *b)
{
	free(b->pieces);
	free(b->memory[0]);
	free(b->memory[1]);
	free(b->checks);
	free(b->lens);
	free(b->scratch);
	base_xxh128_state_free(b->hash);
	save_band_forget(b);
	*b = (struct save_band){0};
}

static bool band_same_rows(const struct tensor_grid *g, const struct tensor_box *a, const struct tensor_box *b)
{
	for (unsigned d = 0; d < g->shape.ndim; d++)
		if (d != g->k && (a->offset[d] != b->offset[d] || a->size[d] != b->size[d]))
			return false;
	return true;
}

static int band_add_piece(struct save_band *b, const struct tensor_piece_iter *it, uint64_t len)
{
	struct save_piece *p;

	if (base_array_room(b->pieces, b->pieces_room, (size_t)b->npieces + 1) < 0)
		return -ENOMEM;
	p = &b->pieces[b->npieces++];
	p->box = it->piece;
	p->offset = b->len;
	p->len = len;
	p->believed = NULL;
	p->compared = NULL;
	p->absent = p->repeats = false;
	p->checked = p->looked = p->found = p->encoded = p->place_compared = p->refuted = p->taken = false;
	b->len += len;
	return 0;
}

static int band_take(struct save_band *b, struct tensor_piece_iter *it)
{
	const struct tensor_grid *g = it->grid;

	b->grid = *g;
	b->first_piece = it->number;
	b->npieces = 0;
	b->len = 0;
	b->box = it->piece;
	do {
		uint64_t len = tensor_box_items(&g->shape, &it->piece) * g->item_bytes;

		if (b->npieces && (b->len + len > SAVE_BAND_BYTES || !band_same_rows(g, &b->box, &it->piece)))
			break;
		if (band_add_piece(b, it, len) < 0)
			return -ENOMEM;
		if (g->shape.ndim)
			b->box.size[g->k] = it->piece.offset[g->k] + it->piece.size[g->k] - b->box.offset[g->k];
		tensor_piece_next(it);
	} while (!it->done);
	return 0;
}

int save_cursor_take(struct save_cursor *c, const struct save_writer *w, struct save_band *b)
{
	int r;

	if (!c->inside) {
		if (c->at == w->planned->plan.nboxes)
			return 0;
		store_layout_grid(w->planned->layout, save_planned_tensor(w->planned, c->at), &c->grid);
		tensor_piece_first(&c->it, &c->grid, &w->planned->plan.boxes[c->at].at.box);
		c->inside = true;
	}
	c->it.grid = &c->grid; /* the cursor may be a copy */
	b->at = c->at;
	b->tensor = save_planned_tensor(w->planned, c->at);
	b->word_bytes = tensor_dtype_word_bytes(store_layout_dtype(w->planned->layout, b->tensor));
	b->believe = w->believes && !tensor_dtype_is_integer(store_layout_dtype(w->planned->layout, b->tensor));
	r = band_take(b, &c->it);
	if (c->it.done) {
		c->inside = false;
		c->at++;
	}
	return r < 0 ? r : 1;
}

static bool band_room(struct save_band *b, unsigned buffer)
{
	size_t room = base_align(b->len + 1, 1 << 20);

	if (b->memory_room[buffer] > b->len)
		return true;
	free(b->memory[buffer]);
	b->memory[buffer] = aligned_alloc(SAVE_ALIGN, room);
	b->memory_room[buffer] = b->memory[buffer] ? room : 0;
	return b->memory[buffer] != NULL;
}

static bool band_blocks_room(struct save_band *b)
{
	uint32_t blocks = 0;

	for (uint32_t i = 0; i < b->npieces; i++) {
		b->pieces[i].first_block = blocks;
		blocks += base_block_count(b->pieces[i].len);
	}
	if (!b->scratch)
		b->scratch = malloc(PACK_CODEC_SCRATCH);
	if (!b->hash)
		b->hash = base_xxh128_state_new();
	if (blocks > b->blocks_room) {
		free(b->checks);
		free(b->lens);
		b->blocks_room = 2 * blocks;
		b->checks = malloc(b->blocks_room * sizeof *b->checks);
		b->lens = malloc(b->blocks_room * sizeof *b->lens);
	}
	if (b->scratch && b->hash && (b->blocks_room == 0 || (b->checks && b->lens)))
		return true;
	b->blocks_room = 0;
	return false;
}

/* Reads the band's box, row-major, from the source, with one read for each contiguous range. */
static int band_read_box(void *arg, struct save_band *b)
{
	const struct save_source *source = arg;
	const struct tensor_shape *s = &b->grid.shape;
	uint64_t stride[TENSOR_MAX_DIMS], at[TENSOR_MAX_DIMS] = {0};
	uint64_t together = b->grid.item_bytes, bytes = together, offset = 0;
	unsigned outer = 0; /* dimensions that are walked; those below lie together */
	bool whole = true;

	for (unsigned d = s->ndim; d-- > 0;) {
		stride[d] = bytes;
		bytes *= s->dim[d];
		offset += b->box.offset[d] * stride[d];
		if (whole) {
			together *= b->box.size[d];
			outer = d;
		}
		whole = whole && b->box.size[d] == s->dim[d];
	}
	for (uint64_t done = 0; done < b->len; done += together) {
		int r = source->read(source->arg, offset, b->in + done, together, &b->err);

		if (r < 0)
			return base_error_prefix(&b->err, r, "the source cannot be read");
		for (unsigned d = outer; d-- > 0;) {
			offset += stride[d];
			if (++at[d] < b->box.size[d])
				break;
			offset -= at[d] * stride[d];
			at[d] = 0;
		}
	}
	return 0;
}

/* Do the pieces lie in the source box one after another, each in its stored order? */
static bool band_is_direct(const struct save_band *b)
{
	const struct tensor_grid *g = &b->grid;
	uint64_t rows = 1, first, last;

	if (g->shape.ndim == 0 || b->len == 0)
		return true;
	for (unsigned d = 0; d < g->k; d++)
		rows *= b->box.size[d];
	if (rows == 1)
		return true;
	first = b->box.offset[g->k] / g->edge[g->k];
	last = (b->box.offset[g->k] + b->box.size[g->k] - 1) / g->edge[g->k];
	return b->npieces == 1 && first == last;
}

static void band_strides(const struct save_band *b, uint64_t stride[static TENSOR_MAX_DIMS])
{
	const struct tensor_grid *g = &b->grid;
	uint64_t bytes = g->item_bytes;

	for (unsigned d = g->shape.ndim; d-- > 0;) {
		stride[d] = bytes;
		bytes *= b->box.size[d];
	}
}

static void band_cut_piece(const struct save_band *b, const struct save_piece *p, uint8_t *to)
{
	uint64_t stride[TENSOR_MAX_DIMS];

	band_strides(b, stride);
	tensor_piece_gather(&b->grid, &p->box, NULL, to, b->in, b->box.offset, stride);
}

/* All pieces, for good: from here on the bytes that they were cut from may be overwritten. */
static void band_cut(struct save_band *b)
{
	for (uint32_t i = 0; !b->cut && i < b->npieces; i++)
		band_cut_piece(b, &b->pieces[i], b->raw + b->pieces[i].offset);
	b->cut = true;
}

/* As it is stored. */
static const uint8_t *band_bytes(const struct save_band *b, const struct save_piece *p)
{
	if (b->cut)
		return b->raw + p->offset;
	band_cut_piece(b, p, b->raw);
	return b->raw;
}

static void band_xxh_strip(void *arg, const void *bytes, size_t len) { base_xxh128_update(arg, bytes, len); }

/* As long as every piece of the band is recognised, each is cut bit by bit into the same small buffer, which stays in
 * the processor's nearest cache. So unchanged data is read once and written nowhere. */
static void band_xxh(const struct save_band *b, uint64_t seed, struct save_piece *p)
{
	uint64_t stride[TENSOR_MAX_DIMS];

	if (b->staged) {
		p->xxh = b->staged[p - b->pieces];
		return;
	}
	if (b->cut || p->len <= SAVE_STRIP_BYTES) {
		base_xxh128_of(seed, band_bytes(b, p), p->len, &p->xxh);
		return;
	}
	band_strides(b, stride);
	base_xxh128_begin(b->hash, seed);
	tensor_piece_stream(&b->grid, &p->box, b->in, b->box.offset, stride, b->raw, SAVE_STRIP_BYTES, true,
		band_xxh_strip, b->hash);
	base_xxh128_final(b->hash, &p->xxh);
}

uint16_t save_encode(const struct save_encoding *e, unsigned word_bytes, const struct base_digest *digest, uint64_t len,
	uint64_t *ret_stored_len)
{
	uint16_t codec = PACK_CODEC_RAW;
	const uint8_t *at = e->raw;
	uint64_t left = len;

	if (word_bytes)
		codec = pack_codec_encode(word_bytes, e->raw, len, e->out, e->lens, ret_stored_len, e->scratch);
	if (codec == PACK_CODEC_RAW)
		*ret_stored_len = len;
	else
		at = e->out;
	for (uint64_t i = 0; i < base_block_count(len); i++) {
		size_t n = codec == PACK_CODEC_RAW ? base_min(left, BASE_BLOCK_BYTES) : e->lens[i] & ~PACK_BLOCK_RAW;

		e->checks[i] = base_block_check(digest, i, at, n);
		at += n;
		left -= base_min(left, BASE_BLOCK_BYTES);
	}
	return codec;
}

void save_band_encode(struct save_band *b, struct save_piece *p)
{
	const struct save_encoding e = {b->raw + p->offset, b->out + p->offset, b->scratch, b->checks + p->first_block,
		b->lens + p->first_block};
	enum save_worth *worth = b->worth ? &b->worth[p - b->pieces] : NULL;

	band_cut(b);
	p->codec = save_encode(&e, worth && *worth == SAVE_WORTH_NOTHING ? 0 : b->word_bytes, &p->digest, p->len,
		&p->stored_len);
	if (worth)
		*worth = p->codec == PACK_CODEC_RAW ? SAVE_WORTH_NOTHING : SAVE_WORTH_IT;
	p->encoded = true;
}

/* The XXH3-128 was made before, of the bytes that these were copied from. If it differs now, one of the two copies
 * changed in memory, and it is not known which of them is right. */
static int band_xxh_check(struct save_band *b, const struct save_piece *p, const struct base_xxh128 *xxh)
{
	if (memcmp(xxh, &p->xxh, sizeof *xxh) == 0)
		return 0;
	return base_error_set(&b->err, -BASE_EDAMAGED,
		"piece %llu is not what was copied: its XXH3-128 differs from the one made while copying; this "
		"machine's memory is not to be trusted, nothing of this save is kept",
		(unsigned long long)(b->first_piece + (uint64_t)(p - b->pieces)));
}

/* A base's piece that is not what its row says is kept from later saves, until verify has looked. */
static void band_doubt(const struct save_band *b, const struct save_writer *w, const struct save_piece *p)
{
	for (unsigned i = 0; i < b->nrows; i++) {
		const char *pack;
		const struct store_piece *known = save_base_piece(b->rows[i], &p->box, p->len, &pack);
		struct proto_range range;

		if (!known || !base_digest_equal(&known->ref.digest, &p->digest))
			continue;
		range = (struct proto_range){known->ref.offset, base_max(known->ref.stored_len, 1)};
		commit_note_put(w->store, pack, &range, 1, false, NULL);
	}
}

static int band_confirm(struct save_band *b, const struct save_writer *w, const struct save_piece *p,
	const uint8_t *bytes)
{
	struct base_xxh128 xxh;
	struct base_digest digest;
	int r;

	base_xxh128_of(w->store->info.seed, bytes, p->len, &xxh);
	r = band_xxh_check(b, p, &xxh);
	if (r < 0)
		return r;
	base_digest_of(bytes, p->len, &digest);
	if (base_digest_equal(&digest, &p->digest))
		return 0;
	band_doubt(b, w, p);
	return base_error_set(&b->err, -BASE_EDAMAGED,
		"piece %llu has the XXH3-128 that an earlier step recorded at its place, but another SHA-256: either "
		"that record, or this machine's memory, is wrong (later saves do not use that record; "
		"vckpt verify finds all such; a save without bases, --no-index, recognises no pieces)",
		(unsigned long long)(b->first_piece + (uint64_t)(p - b->pieces)));
}

/* The piece was found before it was left out. So the storage has failed since, or the store was changed against its
 * rules. */
static int band_is_absent(struct save_band *b, const struct save_writer *w, const struct save_piece *p)
{
	static const struct base_digest none;
	struct base_error why = {0};

	save_bases_lost(&w->bases, b->rows, b->nrows, &p->box, p->len, &none, &why);
	return base_error_set(&b->err, -BASE_EABORTED,
		"piece %llu was not copied because the last step has an equal one, which cannot be used any more (%s): "
		"this save is aborted, and the next one copies the piece; check the store with vckpt verify",
		(unsigned long long)(b->first_piece + (uint64_t)(p - b->pieces)),
		why.text[0] ? why.text : "its record is missing");
}

int save_band_confirm(struct save_band *b, const struct save_writer *w, const struct save_piece *p)
{
	if (p->absent)
		return band_is_absent(b, w, p);
	band_cut(b);
	return band_confirm(b, w, p, b->raw + p->offset);
}

/* Does one of the bases have records for the band that are believed? */
static bool band_trusts(const struct save_band *b)
{
	for (unsigned i = 0; i < b->nrows; i++)
		if (b->rows[i] && b->rows[i]->trusted)
			return true;
	return false;
}

bool save_band_may_believe(const struct save_band *b, const struct save_piece *p)
{
	return b->believe && p->len > SAVE_BELIEVE_BYTES;
}

/* May its XXH3-128 alone say that it is what a base has at its position? */
static bool band_may_believe(const struct save_band *b, const struct save_piece *p)
{
	return save_band_may_believe(b, p) && band_trusts(b);
}

/* Is it the piece at its position in one of the bases? */
static bool band_recognise(const struct save_band *b, const struct save_writer *w, struct save_piece *p)
{
	for (unsigned i = 0; i < b->nrows; i++) {
		const char *pack;
		const struct store_piece *known = save_base_piece(b->rows[i], &p->box, p->len, &pack);

		if (!known || memcmp(&known->xxh, &p->xxh, sizeof p->xxh) != 0 || !save_dedup_may(&w->dedup, pack) ||
			!save_base_trusts(b->rows[i], known))
			continue;
		p->digest = known->ref.digest;
		p->believed = b->rows[i]->base;
		return true;
	}
	return false;
}

/* The choice depends on the piece alone (and a random number of this save), so not on threads. */
bool save_band_is_checked(const struct save_band *b, const struct save_writer *w, const struct save_piece *p)
{
	uint64_t which[2] = {b->at, b->first_piece + (uint64_t)(p - b->pieces)};

	return base_xxh64_of(w->check_seed, which, sizeof which) % SAVE_BELIEVE_CHECK == 0;
}

bool save_band_at_position(const struct save_band *b, const struct save_writer *w, struct save_piece *p, bool trusted)
{
	for (unsigned i = 0; i < b->nrows && !p->refuted; i++) {
		const char *pack;
		const struct store_piece *known = save_base_piece(b->rows[i], &p->box, p->len, &pack);
		struct index_place place;

		if (!known || !base_digest_equal(&known->ref.digest, &p->digest) || !save_dedup_may(&w->dedup, pack) ||
			save_base_trusts(b->rows[i], known) != trusted)
			continue;
		if (!b->in)
			p->xxh = known->xxh;
		if (trusted)
			return true;
		save_base_place(b->rows[i], known, pack, &place);
		if (b->in ? save_trust_compare(w->store, &place, b->raw + p->offset, b->out + p->offset)
			: save_trust_rehash(w->store, &place, &p->xxh))
			p->compared = known;
		p->refuted = !p->compared;
		return p->compared;
	}
	return false;
}

/* Does the store have it anywhere? In this order: what costs nothing, the index, what has to be compared. */
static bool band_is_stored(const struct save_band *b, const struct save_writer *w, struct save_piece *p)
{
	if (save_band_at_position(b, w, p, true))
		return true;
	p->found = save_writer_lookup(w, &p->digest, PACK_OBJECT_PIECE, p->len, &p->place);
	p->looked = true;
	if (p->found && !save_dedup_may(&w->dedup, p->place.pack))
		return save_band_at_position(b, w, p, false);
	if ((p->found && p->place.own) || save_band_at_position(b, w, p, false))
		return true;
	if (!p->found || p->refuted)
		return false;
	p->place_compared = save_trust_compare(w->store, &p->place, b->raw + p->offset, b->out + p->offset);
	p->refuted = !p->place_compared;
	return p->place_compared;
}

bool save_writer_has(struct save_writer *w, struct save_band *b, struct save_piece *p)
{
	const struct store_piece *known;
	struct index_place place;
	const char *pack;
	unsigned i = 0;

	save_band_rows(b, w);
	if (!band_may_believe(b, p) || !band_recognise(b, w, p) || p->believed != w->named)
		return false;
	while (w->bases.all[i] != w->named)
		i++;
	known = save_base_piece(b->rows[i], &p->box, p->len, &pack);
	save_base_place(b->rows[i], known, pack, &place);
	return save_dedup_fits(&w->dedup, w->store, &place, p->len);
}

/* 1: recognised, and hashed in full if chance wants it. */
static int band_believe(struct save_band *b, const struct save_writer *w, struct save_piece *p)
{
	int r = 0;

	band_xxh(b, w->store->info.seed, p);
	if (!band_recognise(b, w, p))
		return 0;
	p->checked = save_band_is_checked(b, w, p);
	if (p->checked)
		r = band_confirm(b, w, p, band_bytes(b, p));
	return r < 0 ? r : 1;
}

/* Pieces that are hashed in full, together (core/base/digest.h), and encoded while a near cache has them. */
enum { BAND_GROUP = 16, BAND_GROUP_BYTES = 512 << 10 };
struct band_group {
	struct save_piece *pieces[BAND_GROUP]; unsigned n;
	uint64_t len;
};

/* Zeros (optimizers that have not begun, masks) come in many equal pieces, and to compare costs a tenth of hashing. The
 * bytes are compared with themselves, and so with those that were hashed. NULL: they do not repeat. */
static const struct save_repeat *band_repeat(struct save_band *b, uint64_t seed, struct save_piece *p)
{
	const uint8_t *bytes = b->raw + p->offset;
	struct save_repeat *k;
	uint64_t word;

	if (p->len < BASE_BLOCK_BYTES || memcmp(bytes, bytes + sizeof word, p->len - sizeof word) != 0)
		return NULL;
	word = base_get64(bytes);
	for (unsigned i = 0; i < base_min(b->nrepeats, SAVE_REPEATS); i++) {
		k = &b->repeats[i];
		p->repeats = k->word == word && k->len == p->len;
		if (p->repeats)
			return k;
	}
	k = &b->repeats[b->nrepeats++ % SAVE_REPEATS];
	*k = (struct save_repeat){.word = word, .len = p->len};
	base_digest_of(bytes, p->len, &k->digest);
	base_xxh128_of(seed, bytes, p->len, &k->xxh);
	return k;
}

/* Sets the XXH3-128 of what is stored, or compares it with the one that was made before. */
static int band_group_xxh(struct save_band *b, uint64_t seed, const struct save_repeat *k, struct save_piece *p)
{
	struct base_xxh128 xxh;

	if (k)
		xxh = k->xxh;
	else
		base_xxh128_of(seed, b->raw + p->offset, p->len, &xxh);
	if (b->staged)
		p->xxh = b->staged[p - b->pieces];
	if (b->staged || band_may_believe(b, p))
		return band_xxh_check(b, p, &xxh);
	p->xxh = xxh;
	return 0;
}

/* Both hashes of each piece. SHA-256 comes first: it takes so long that fetching the bytes from memory costs little
 * beside it, and the other then finds them in a near cache. */
static int band_group_digest(struct save_band *b, const struct save_writer *w, struct band_group *g)
{
	struct base_object objects[BAND_GROUP];
	struct save_piece *hashed[BAND_GROUP];
	uint64_t seed = w->store->info.seed;
	unsigned n = 0;
	int r = 0;

	band_cut(b);
	for (unsigned i = 0; r == 0 && i < g->n; i++) {
		struct save_piece *p = g->pieces[i];
		const struct save_repeat *k = band_repeat(b, seed, p);

		if (k) {
			p->digest = k->digest;
			r = band_group_xxh(b, seed, k, p);
			continue;
		}
		objects[n] = (struct base_object){.bytes = b->raw + p->offset, .len = p->len};
		hashed[n++] = p;
	}
	base_digests_of(objects, r == 0 ? n : 0);
	for (unsigned i = 0; r == 0 && i < n; i++) {
		hashed[i]->digest = objects[i].digest;
		r = band_group_xxh(b, seed, NULL, hashed[i]);
	}
	return r;
}

/* A piece that repeats is left to the appender, which has most likely seen it in this save. */
static bool band_encodes(struct save_band *b, const struct save_writer *w, struct save_piece *p)
{
	return p->len > STORE_INLINE_MAX_BYTES && !p->repeats && !band_is_stored(b, w, p);
}

static int band_group_end(struct save_band *b, const struct save_writer *w, struct band_group *g)
{
	uint64_t begin = base_monotonic_ns(), middle;
	int r = band_group_digest(b, w, g);

	middle = base_monotonic_ns();
	b->digest_ns += middle - begin;
	for (unsigned i = 0; r == 0 && i < g->n; i++)
		if (band_encodes(b, w, g->pieces[i]))
			save_band_encode(b, g->pieces[i]);
	b->encode_ns += base_monotonic_ns() - middle;
	g->n = 0;
	g->len = 0;
	return r;
}

/* 1: it need not be hashed in full. */
static int band_recognised(struct save_band *b, const struct save_writer *w, struct save_piece *p)
{
	uint64_t begin = base_monotonic_ns();
	int r = band_may_believe(b, p) ? band_believe(b, w, p) : 0;

	b->digest_ns += base_monotonic_ns() - begin;
	return r;
}

int save_band_read_by(struct save_band *b, int (*read)(void *arg, struct save_band *b), void *arg)
{
	uint64_t begin = base_monotonic_ns();
	int r;

	b->err = (struct base_error){0};
	if (!band_room(b, 0))
		return base_no_memory(&b->err);
	b->in = b->memory[0];
	r = b->len ? read(arg, b) : 0;
	b->read_ns = base_monotonic_ns() - begin;
	return r;
}

int save_band_read(struct save_band *b, const struct save_source *source)
{
	struct save_source from = *source;

	return save_band_read_by(b, band_read_box, &from);
}

int save_band_process(struct save_band *b, struct save_writer *w)
{
	struct band_group g = {0};
	int r = 0;

	b->digest_ns = b->encode_ns = 0;
	b->err = (struct base_error){0};
	if (!band_room(b, 1) || !band_blocks_room(b) || (b->given.pieces && !band_room(b, 0)))
		return base_no_memory(&b->err);
	if (b->given.pieces)
		return save_given_process(b, w);
	b->cut = b->staged || band_is_direct(b);
	b->raw = b->cut ? b->in : b->memory[1];
	b->out = b->cut ? b->memory[1] : b->in;
	save_band_rows(b, w);
	if (b->nrows == 0 || !b->believe) /* nothing to recognise anything by before it is cut */
		band_cut(b);
	for (uint32_t i = 0; r >= 0 && i < b->npieces; i++) {
		struct save_piece *p = &b->pieces[i];

		p->absent = b->absent && b->absent[i];
		r = band_recognised(b, w, p);
		if (r == 0 && p->absent)
			return band_is_absent(b, w, p);
		if (r == 0) {
			g.pieces[g.n++] = p;
			g.len += p->len;
		}
		if (r >= 0 && (g.n == BAND_GROUP || g.len >= BAND_GROUP_BYTES))
			r = band_group_end(b, w, &g);
	}
	if (r >= 0 && g.n)
		r = band_group_end(b, w, &g);
	return r < 0 ? r : 0;
}
