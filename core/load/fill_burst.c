/* SPDX-License-Identifier: Apache-2.0
 *
 * fill_burst: pieces that follow each other in a pack, read at once.
 *
 * A disk gives more for one request of a megabyte than for eight of an eighth, and so does the page cache. So one read
 * (a burst) takes the stored bytes of neighbouring pieces that are wanted whole: those of raw pieces that lie at their
 * place as stored go straight there, all others into the thread's burst. Their checks, which follow each other at the
 * end of the extent, are a second read.
 *
 * A burst only makes things faster: whatever does not fit, and any piece that fails, is left to fill_piece, which reads
 * it by itself and finds the words. */
#include <stdlib.h>

#include "core/load/fill_internal.h"
#include "core/pack/codec.h"
#include "core/tensor/boxes.h"

#define BURST_CHECKS_BYTES (64u << 10)

struct burst_piece { size_t first, end; const struct store_object_ref *ref; uint8_t *place; };

struct burst {
	struct burst_piece piece[FILL_BURST_PIECES];
	unsigned n;
	uint64_t from, to;               /* bytes of the pack */
	uint64_t checks_from, checks_to;
	struct iovec iov[2 * FILL_BURST_PIECES];
	unsigned niov;
};

/* Some box wants all of the piece. */
static bool piece_is_whole(const struct load_fill *f, size_t first, size_t end)
{
	for (size_t i = first; i < end; i++) {
		const struct tensor_shape *s = &need_object(f, &f->needs[i])->grid.shape;
		struct tensor_box piece, part;

		fill_need_boxes(f, &f->needs[i], &piece, &part);
		if (tensor_box_items(s, &piece) == tensor_box_items(s, &part))
			return true;
	}
	return false;
}

static bool burst_fits(const struct burst *s, const struct store_object_ref *ref)
{
	uint64_t checks_to = ref->checks + store_object_checks_bytes(ref->codec, ref->raw_len);

	if (s->n == FILL_BURST_PIECES)
		return false;
	if (s->n == 0)
		return ref->stored_len <= FILL_BURST_BYTES && checks_to - ref->checks <= BURST_CHECKS_BYTES;
	return ref->offset >= s->to && ref->offset - s->to < FILL_BURST_GAP &&
		ref->offset + ref->stored_len - s->from <= FILL_BURST_BYTES && ref->checks == s->checks_to &&
		checks_to - s->checks_from <= BURST_CHECKS_BYTES;
}

static void burst_add(struct burst *s, size_t first, size_t end, const struct store_object_ref *ref)
{
	if (s->n == 0) {
		s->from = ref->offset;
		s->checks_from = ref->checks;
	}
	s->piece[s->n++] = (struct burst_piece){.first = first, .end = end, .ref = ref};
	s->to = ref->offset + ref->stored_len;
	s->checks_to = ref->checks + store_object_checks_bytes(ref->codec, ref->raw_len);
}

static void burst_collect(struct fill_worker *w, struct burst *s, size_t first, size_t end)
{
	const struct load_fill *f = w->f;
	uint64_t data_end = store_pack_size(w->pack) - STORE_PACK_TAIL_BYTES;

	for (size_t i = first, next; i < end && f->needs[i].pack == f->needs[first].pack; i = next) {
		const struct store_object_ref *ref = need_ref(f, &f->needs[i]);

		next = fill_group_end(f, i);
		if (store_object_ref_check(ref, data_end) < 0 || !burst_fits(s, ref) || !piece_is_whole(f, i, next))
			return;
		burst_add(s, i, next, ref);
	}
}

static void iov_add(struct burst *s, uint8_t *to, uint64_t len)
{
	struct iovec *last = s->niov ? &s->iov[s->niov - 1] : NULL;

	if (len == 0)
		return;
	if (last && (uint8_t *)last->iov_base + last->iov_len == to)
		last->iov_len += len;
	else
		s->iov[s->niov++] = (struct iovec){to, len};
}

/* Byte x of the pack goes to burst + (x - from), but for raw pieces that have a place. */
static void burst_vector(const struct fill_worker *w, struct burst *s)
{
	uint64_t at = s->from;

	for (unsigned i = 0; i < s->n; i++) {
		struct burst_piece *p = &s->piece[i];

		for (size_t k = p->first; k < p->end && !p->place; k++)
			p->place = fill_need_place(w->f, &w->f->needs[k]);
		iov_add(s, w->burst + (at - s->from), p->ref->offset - at);
		iov_add(s, p->place && p->ref->codec == STORE_CODEC_RAW ? p->place : w->burst +
			(p->ref->offset - s->from), p->ref->stored_len);
		at = p->ref->offset + p->ref->stored_len;
	}
}

static int burst_read(struct fill_worker *w, struct burst *s)
{
	uint8_t *checks = w->burst + FILL_BURST_BYTES;
	struct iovec iov = {checks, s->checks_to - s->checks_from};
	int r;

	burst_vector(w, s);
	r = store_pack_readv(w->pack, s->from, s->iov, s->niov, NULL);
	return r < 0 ? r : store_pack_readv(w->pack, s->checks_from, &iov, 1, NULL);
}

/* Checks one piece, decodes it where it is encoded, and places it. */
static int burst_piece_place(struct fill_worker *w, const struct burst *s, const struct burst_piece *p)
{
	const uint8_t *checks = w->burst + FILL_BURST_BYTES + (p->ref->checks - s->checks_from);
	uint8_t *stored = w->burst + (p->ref->offset - s->from), *out = p->place;
	int r;

	if (p->ref->codec == STORE_CODEC_RAW)
		stored = out = p->place ? p->place : stored;
	else if (!out) {
		if (fill_room(w, p->ref->raw_len) < 0)
			return -ENOMEM;
		out = w->room;
	}
	r = store_object_take(w->pack, p->ref, stored, checks, out, NULL);
	if (r == 0)
		fill_place(w->f, p->first, p->end, out, p->place);
	return r;
}

size_t fill_burst(struct fill_worker *w, size_t first, size_t end)
{
	struct burst s;

	if (w->f->needs[first].pack == FILL_INLINE || (w->f->flags & LOAD_FILL_REHASH) ||
		fill_pack(w, w->f->needs[first].pack) < 0)
		return first;
	s.n = s.niov = 0;
	burst_collect(w, &s, first, end);
	if (s.n < 2)
		return first;
	if (!w->burst)
		w->burst = malloc(FILL_BURST_BYTES + BURST_CHECKS_BYTES);
	if (!w->burst || burst_read(w, &s) < 0)
		return first;
	for (unsigned i = 0; i < s.n; i++) {
		if (burst_piece_place(w, &s, &s.piece[i]) < 0)
			return s.piece[i].first;
		first = s.piece[i].end;
	}
	return first;
}
