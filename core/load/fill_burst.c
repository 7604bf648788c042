/* SPDX-License-Identifier: Apache-2.0
 *
 * fill_burst: pieces that follow each other in a pack, read at once.
 *
 * A disk gives more for one request of a megabyte than for eight of an eighth, and so does the page cache. So one read
 * (a burst) takes the stored bytes of neighbouring pieces that are wanted whole: those of raw pieces that lie at their
 * place as stored go straight there, all others into the thread's burst. Their checks, which follow each other at the
 * end of the extent, are a second read.
 *
 * A fill that reads past the page cache takes longer bursts, of one piece too, and all bytes go to the thread's burst
 * first: a disk writes only to aligned memory, and what was just checked is copied out of the processor's cache.
 *
 * A burst only makes things faster: whatever does not fit, and any piece that fails, is left to fill_piece, which reads
 * it by itself and finds the words. */
#include <stdlib.h>
#include <sys/mman.h>

#include "core/load/fill_internal.h"
#include "core/pack/codec.h"
#include "core/tensor/boxes.h"

#define BURST_CHECKS_BYTES (64u << 10)
#define BURST_PAST_BYTES (2u << 20)
#define BURST_PAST_LEAST (256u << 10)    /* less is not worth a request of its own */
#define BURST_HUGE (2u << 20)            /* bytes of a huge page */

struct burst_piece { size_t first, end; const struct store_object_ref *ref; uint8_t *place; };

struct burst {
	struct burst_piece piece[FILL_BURST_PIECES];
	unsigned n;
	uint64_t from, to;               /* bytes of the pack */
	uint64_t most;                   /* so long it may become */
	uint8_t *bytes;                  /* where byte `from` lies; raw pieces that have a place may be only there */
	bool past;                       /* all of it lies at `bytes` */
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
		return ref->stored_len <= s->most && checks_to - ref->checks <= BURST_CHECKS_BYTES;
	return ref->offset >= s->to && ref->offset - s->to < FILL_BURST_GAP &&
		ref->offset + ref->stored_len - s->from <= s->most && ref->checks == s->checks_to &&
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
static void burst_vector(struct burst *s)
{
	uint64_t at = s->from;

	for (unsigned i = 0; i < s->n; i++) {
		struct burst_piece *p = &s->piece[i];

		iov_add(s, s->bytes + (at - s->from), p->ref->offset - at);
		iov_add(s, p->place && p->ref->codec == STORE_CODEC_RAW ? p->place : s->bytes +
			(p->ref->offset - s->from), p->ref->stored_len);
		at = p->ref->offset + p->ref->stored_len;
	}
}

static void burst_places(const struct fill_worker *w, struct burst *s)
{
	for (unsigned i = 0; i < s->n; i++) {
		struct burst_piece *p = &s->piece[i];

		for (size_t k = p->first; k < p->end && !p->place; k++)
			p->place = fill_need_place(w->f, &w->f->needs[k]);
	}
}

static int burst_read_past(struct fill_worker *w, struct burst *s)
{
	const uint8_t *bytes;
	int r = store_pack_read_past(w->pack, s->from, s->to - s->from, w->burst, &bytes, NULL);

	if (r < 0)
		return r;
	s->bytes = w->burst + (bytes - w->burst);
	if (r == STORE_PAST_CACHE)
		fill_crew_grow(w->f);
	return 0;
}

static int burst_read(struct fill_worker *w, struct burst *s)
{
	struct iovec iov = {w->checks, s->checks_to - s->checks_from};
	int r;

	burst_places(w, s);
	if (s->past) {
		r = burst_read_past(w, s);
	} else {
		s->bytes = w->burst;
		burst_vector(s);
		r = store_pack_readv(w->pack, s->from, s->iov, s->niov, NULL);
	}
	return r < 0 ? r : store_pack_readv(w->pack, s->checks_from, &iov, 1, NULL);
}

/* Checks one piece, decodes it where it is encoded, and places it. */
static int burst_piece_place(struct fill_worker *w, const struct burst *s, const struct burst_piece *p)
{
	const uint8_t *checks = w->checks + (p->ref->checks - s->checks_from);
	uint8_t *stored = s->bytes + (p->ref->offset - s->from), *out = p->place;
	int r;

	if (p->ref->codec == STORE_CODEC_RAW) {
		out = out ? out : stored;
		stored = s->past ? stored : out;
	} else if (!out) {
		if (fill_room(w, p->ref->raw_len) < 0)
			return -ENOMEM;
		out = w->room;
	}
	r = store_object_take(w->pack, p->ref, stored, checks, out, NULL);
	if (r == 0)
		fill_place(w->f, p->first, p->end, out, p->place);
	return r;
}

/* Memory for bursts, in huge pages where these are to be had. */
static int burst_memory(struct fill_worker *w)
{
	if (w->burst)
		return 0;
	w->checks = malloc(BURST_CHECKS_BYTES);
	w->burst = w->f->past_cache ? aligned_alloc(BURST_HUGE, BURST_PAST_BYTES + BURST_HUGE)
		: malloc(FILL_BURST_BYTES);
	if (w->burst && w->checks) {
		if (w->f->past_cache) /* a hint */
			(void)madvise(w->burst, BURST_PAST_BYTES, MADV_HUGEPAGE);
		return 0;
	}
	free(base_steal(w->burst));
	free(base_steal(w->checks));
	return -ENOMEM;
}

/* Worth a read of its own? */
static bool burst_pays(const struct burst *s)
{
	return s->n > 1 || (s->n == 1 && s->past && s->to - s->from >= BURST_PAST_LEAST);
}

size_t fill_burst(struct fill_worker *w, size_t first, size_t end)
{
	struct burst s;

	if (w->f->needs[first].pack == FILL_INLINE || (w->f->flags & LOAD_FILL_REHASH) ||
		fill_pack(w, w->f->needs[first].pack) < 0)
		return first;
	s.n = s.niov = 0;
	s.past = w->f->past_cache;
	s.most = s.past ? BURST_PAST_BYTES : FILL_BURST_BYTES;
	burst_collect(w, &s, first, end);
	if (!burst_pays(&s) || burst_memory(w) < 0 || burst_read(w, &s) < 0)
		return first;
	for (unsigned i = 0; i < s.n; i++) {
		if (burst_piece_place(w, &s, &s.piece[i]) < 0)
			return s.piece[i].first;
		first = s.piece[i].end;
	}
	return first;
}
