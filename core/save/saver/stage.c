/* SPDX-License-Identifier: Apache-2.0
 *
 * stage: one batch of bands, or of samples, out of the caller's memory into a slot of the ring. Each band begins there
 * at a multiple of 64 bytes; large ones are a batch of their own. Samples are hashed here and their slot goes back at
 * once.
 *
 * Pieces that are the same as in the last step (same.c) stay where they are, and a band of such pieces takes no room.
 *
 * Host memory is copied by the thread, and cut and hashed on the way: 2 KiB of a piece at a time, which stay in the
 * nearest cache until they are in the slot. So the caller's memory is read once, and recognised pieces are never read
 * again. The hash is of the copied bytes, whatever another thread does to the source meanwhile, because a later save
 * would trust a hash that is recorded beside the digest of other bytes.
 *
 * The driver copies device memory, in as few calls as possible (bands that follow one another in one call), on this
 * thread's stream, after the flight's fence. The thread waits for its own copies, so staged bytes have arrived. Such
 * bands, and those whose items are far apart in the source, are boxes in the slot, row-major, and are cut and hashed
 * when they are processed. */
#include "core/base/past.h"
#include "core/save/saver/saver_internal.h"

#define STAGE_BAND_ALIGN 64u
#define STAGE_PAST_BYTES (UINT64_C(256) << 10)  /* bands from here on leave the caches to others */

bool saver_band_same(const struct save_flight *f, uint64_t first, uint32_t npieces)
{
	bool same = npieces > 0;

	for (uint64_t i = first; same && i < first + npieces; i++)
		same = f->pieces->same[i];
	return same;
}

uint64_t saver_band_room(uint64_t bytes) { return base_align(bytes, STAGE_BAND_ALIGN); }

/* Where the box's first item is, and how far apart neighbours are in each dimension of the tensor. */
static void stage_gather(const struct save_tensor *t, const struct tensor_shard_box *at, struct device_gather *g)
{
	const struct tensor_shape *shape = &t->sharding.shape;
	int64_t from;

	*g = (struct device_gather){.item_bytes = t->sharding.item_bytes, .ndim = shape->ndim};
	tensor_shard_memory(at, shape->ndim, &t->local, g->item_bytes, t->strides, &from, g->stride);
	g->from = t->data + from;
	memcpy(g->size, at->box.size, shape->ndim * sizeof *g->size);
}

/* The part of that which is `box`. */
static void stage_narrow(const struct tensor_box *of, const struct tensor_box *box, struct device_gather *g)
{
	const uint8_t *from = g->from;

	for (uint32_t d = 0; d < g->ndim; d++) {
		from += (int64_t)(box->offset[d] - of->offset[d]) * g->stride[d];
		g->size[d] = box->size[d];
	}
	g->from = from;
}

static int stage_copy(struct save_flight *f, struct saver_worker *w, const struct save_tensor *t,
	struct device_gather *g, void *to, struct base_error *err)
{
	int r = 0;

	device_gather_fold(g);
	if (t->device)
		r = saver_lane_gather(f, w, t->context, to, g, err);
	else
		device_gather_host(to, g);
	return r == 0 ? 0 : base_error_prefix(err, r, "tensor %s/%.*s", t->component,
		store_layout_shown(t->name, t->name_len), t->name);
}

/* ---- forming ---- */

/* The next samples, or NULL where there are none any more. */
static struct saver_batch *form_samples(struct save_flight *f, struct saver_batch *b)
{
	const struct save_replicas *replicas = &f->replicas;

	b->samples = true;
	b->first_entry = f->next_entry;
	for (; f->next_entry < replicas->nentries; f->next_entry++, b->nentries++) {
		uint64_t room = saver_band_room(replicas->entries[f->next_entry].bytes);

		if (b->nentries && b->bytes + room > SAVER_BATCH_BYTES)
			break;
		b->bytes += room;
		b->data_bytes += replicas->entries[f->next_entry].bytes;
	}
	if (b->nentries)
		return b;
	free(b);
	return NULL;
}

/* Are the box's rows contiguous in host memory, one after another forwards? */
static bool box_is_cut(const struct save_flight *f, const struct save_plan_box *box)
{
	const struct save_tensor *t = &f->tensors[box->tensor];
	struct device_gather g;
	uint32_t last;

	stage_gather(t, &box->at, &g);
	for (uint32_t d = 0; d < g.ndim; d++)
		if (g.size[d] == 0)
			return !t->device;
	for (last = g.ndim; last > 0 && g.size[last - 1] == 1;)
		last--;
	for (uint32_t d = 0; d < last; d++)
		if (g.size[d] > 1 && g.stride[d] < 0)
			return false;
	return !t->device && (last == 0 || g.stride[last - 1] == (int64_t)g.item_bytes);
}

static bool boxes_are_cut(const struct save_flight *f, uint64_t first, uint64_t last)
{
	for (uint64_t at = first; at <= last; at++)
		if (!box_is_cut(f, &f->plan->boxes[at]))
			return false;
	return true;
}

/* Bands are walked without knowing their contents: only the one that forms walks, so no lock is needed. */
int saver_batch_form(struct save_flight *f, struct saver_worker *w, struct saver_batch **ret_b, struct base_error *err)
{
	struct saver_batch *b = calloc(1, sizeof *b);
	struct save_cursor ahead = f->former;
	uint64_t last_box = 0;
	int r;

	if (!b)
		return base_no_memory(err);
	b->s = f->s;
	b->lent = (struct storage_lent){.users = 1, .back = saver_batch_back};
	b->from = f->former;
	b->first_piece = b->next_piece = f->former_piece;
	b->state = BATCH_READY;
	b->differs = true;
	while ((r = save_cursor_take(&ahead, f->w, &w->walker)) == 1) {
		uint64_t room = saver_band_room(w->walker.len);

		if (b->nbands && b->bytes + room > SAVER_BATCH_BYTES)
			break;
		b->bytes += room;
		b->data_bytes += w->walker.len;
		b->nbands++;
		b->npieces += w->walker.npieces;
		last_box = w->walker.at;
		f->former = ahead;
	}
	if (r < 0) {
		free(b);
		return base_no_memory(err);
	}
	f->former_piece += b->npieces;
	b->whole_bytes = b->data_bytes;
	b->left = b->nbands;
	b->cut = b->nbands && boxes_are_cut(f, b->from.at, last_box);
	r = b->nbands || f->sample_hashes ? 0 : saver_prepare_samples(f, err);
	if (r < 0)
		free(b);
	else
		*ret_b = b->nbands ? b : form_samples(f, b);
	return r;
}

/* ---- copying ---- */

/* Where a piece's bytes go, and what hashes them. */
struct copy_cut { uint8_t *to; struct base_xxh128_state *hash; bool past; };

static void copy_cut_strip(void *arg, const void *bytes, size_t len)
{
	struct copy_cut *c = arg;

	base_xxh128_update(c->hash, bytes, len);
	if (c->past)
		base_copy_past(c->to, bytes, len);
	else
		memcpy(c->to, bytes, len);
	c->to += len;
}

void saver_band_gather(const struct save_flight *f, const struct saver_worker *w, struct device_gather *ret_g,
	uint64_t stride[static TENSOR_MAX_DIMS])
{
	const struct save_plan_box *box = &f->plan->boxes[w->walker.at];

	stage_gather(&f->tensors[box->tensor], &box->at, ret_g);
	stage_narrow(&box->at.box, &w->walker.box, ret_g);
	for (uint32_t d = 0; d < ret_g->ndim; d++)
		stride[d] = (uint64_t)ret_g->stride[d];
}

/* The walker's band, whose first piece has that number: those of its pieces that are not the same. */
static void copy_band_cut(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, uint8_t *to,
	uint64_t piece)
{
	struct copy_cut c = {.hash = w->hash, .past = w->walker.len >= STAGE_PAST_BYTES};
	struct saver_pieces *found = f->pieces;
	uint64_t stride[TENSOR_MAX_DIMS];
	struct device_gather g;

	saver_band_gather(f, w, &g, stride);
	for (uint32_t i = 0; i < w->walker.npieces; i++, piece++) {
		const struct save_piece *p = &w->walker.pieces[i];

		if (found->same[piece])
			continue;
		c.to = to + p->offset;
		base_xxh128_begin(w->hash, f->s->store->info.seed);
		tensor_piece_stream(&w->walker.grid, &p->box, g.from, w->walker.box.offset, stride, w->room,
			SAVE_STRIP_BYTES, false, copy_cut_strip, &c);
		base_xxh128_final(w->hash, &found->xxh[piece]);
		found->moves[piece] = !save_band_may_believe(&w->walker, p) || (f->before
			&& memcmp(&f->before->xxh[piece], &found->xxh[piece], sizeof *found->xxh) != 0);
		b->steady_bytes += found->moves[piece] ? 0 : p->len;
	}
	if (c.past)
		base_copy_past_end();
}

bool saver_worker_room(struct saver_worker *w)
{
	if (!w->hash)
		w->hash = base_xxh128_state_new();
	if (!w->room)
		w->room = aligned_alloc(SAVE_ALIGN, base_align(SAVE_STRIP_BYTES, SAVE_ALIGN));
	return w->hash && w->room;
}

/* Bands of one box that make a longer box together, on their way into the slot: one gather for all of them. */
struct copy_join {
	const struct save_tensor *tensor; /* NULL: none */
	uint64_t at;                    /* of the plan */
	struct tensor_box box;
	struct device_gather whole;     /* the plan's box */
	uint64_t offset, len;           /* in the slot */
};

/* Do `box` and `more`, row-major one behind the other, make one box? Then it is in `box`. */
static bool box_grows(struct tensor_box *box, const struct tensor_box *more, uint32_t ndim)
{
	uint32_t d = 0;

	while (d < ndim && box->size[d] == 1 && more->size[d] == 1 && box->offset[d] == more->offset[d])
		d++;
	if (d == ndim || box->offset[d] + box->size[d] != more->offset[d])
		return false;
	for (uint32_t i = d + 1; i < ndim; i++)
		if (box->offset[i] != more->offset[i] || box->size[i] != more->size[i])
			return false;
	box->size[d] += more->size[d];
	return true;
}

static int copy_join_end(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, struct copy_join *join,
	struct base_error *err)
{
	const struct save_tensor *t = base_steal(join->tensor);
	struct device_gather g = join->whole;

	if (!t || !join->len)
		return 0;
	stage_narrow(&f->plan->boxes[join->at].at.box, &join->box, &g);
	return stage_copy(f, w, t, &g, b->slot + join->offset, err);
}

/* The walker's band, which goes to `offset`. */
static int copy_join_add(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, struct copy_join *join,
	uint64_t offset, struct base_error *err)
{
	const struct save_plan_box *box = &f->plan->boxes[w->walker.at];
	int r;

	if (join->tensor && join->at == w->walker.at && join->offset + join->len == offset
		&& box_grows(&join->box, &w->walker.box, join->whole.ndim)) {
		join->len += w->walker.len;
		return 0;
	}
	r = copy_join_end(f, w, b, join, err);
	if (join->at != w->walker.at)
		stage_gather(&f->tensors[box->tensor], &box->at, &join->whole);
	join->tensor = &f->tensors[box->tensor];
	join->at = w->walker.at;
	join->box = w->walker.box;
	join->offset = offset;
	join->len = w->walker.len;
	return r;
}

static int copy_bands(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, struct base_error *err)
{
	struct save_cursor c = b->from;
	struct copy_join join = {.at = UINT64_MAX};
	uint64_t offset = 0, piece = b->first_piece;
	int r = b->cut && !saver_worker_room(w) ? base_no_memory(err) : 0;

	for (uint64_t i = 0; r == 0 && i < b->nbands; i++, piece += w->walker.npieces) {
		if (save_cursor_take(&c, f->w, &w->walker) != 1) /* the band is there, so its pieces found no memory */
			return base_no_memory(err);
		if (saver_band_same(f, piece, w->walker.npieces))
			continue;
		if (b->cut)
			copy_band_cut(f, w, b, b->slot + offset, piece);
		else
			r = copy_join_add(f, w, b, &join, offset, err);
		offset += saver_band_room(w->walker.len);
	}
	if (r == 0)
		r = copy_join_end(f, w, b, &join, err);
	return r == 0 ? saver_lanes_arrive(w, err) : r;
}

static int copy_samples(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, struct base_error *err)
{
	const struct save_replica_entry *entries = f->replicas.entries + b->first_entry;
	uint64_t offset = 0;
	int r = 0;

	for (uint64_t i = 0; r == 0 && i < b->nentries; i++) {
		const struct save_tensor *t = &f->tensors[entries[i].tensor];
		struct device_gather g;

		stage_gather(t, &entries[i].at, &g);
		if (entries[i].bytes)
			r = stage_copy(f, w, t, &g, b->slot + offset, err);
		offset += saver_band_room(entries[i].bytes);
	}
	if (r == 0)
		r = saver_lanes_arrive(w, err);
	offset = 0;
	for (uint64_t i = 0; r == 0 && i < b->nentries; i++) {
		base_xxh128_of(f->s->store->info.seed, b->slot + offset, entries[i].bytes,
			&f->sample_hashes[b->first_entry + i]);
		offset += saver_band_room(entries[i].bytes);
	}
	return r;
}

int saver_batch_copy(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, struct base_error *err)
{
	int r = b->samples ? copy_samples(f, w, b, err) : copy_bands(f, w, b, err);

	if (r < 0) /* the slot is about to be used again, the memory to be the caller's */
		saver_lanes_drop(w);
	return r < 0 ? base_error_prefix(err, r, "the data cannot be copied") : 0;
}
