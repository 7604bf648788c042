/* SPDX-License-Identifier: Apache-2.0
 *
 * burst: objects that follow each other in a pack, read at once (burst_internal.h). */
#include <stdlib.h>
#include <sys/mman.h>

#include "core/load/burst_internal.h"
#include "core/pack/codec.h"

#define BURST_BYTES (1u << 20)
#define BURST_GAP 4096u                  /* what lies between objects there is their alignment, no other object */
#define BURST_CHECKS_BYTES (64u << 10)
#define BURST_PAST_BYTES (2u << 20)
#define BURST_PAST_LEAST (256u << 10)    /* less is not worth a request of its own */
#define BURST_THROUGH 15u                /* bursts after one that the page cache had: it has those, too, most likely */
#define BURST_HUGE (2u << 20)            /* bytes of a huge page */

bool burst_begin(struct burst *s, struct fill_worker *w, uint32_t pack)
{
	if (pack == FILL_INLINE || (w->f->flags & LOAD_FILL_REHASH) || fill_pack(w, pack) < 0)
		return false;
	s->w = w;
	s->n = s->niov = 0;
	s->past = w->f->past_cache && !w->through;
	w->through -= w->through > 0;
	s->most = s->past ? BURST_PAST_BYTES : BURST_BYTES;
	return true;
}

bool burst_fits(const struct burst *s, const struct store_object_ref *ref)
{
	uint64_t checks_to = ref->checks + store_object_checks_bytes(ref->codec, ref->raw_len);

	if (s->n == BURST_PIECES ||
		store_object_ref_check(ref, store_pack_size(s->w->pack) - STORE_PACK_TAIL_BYTES) < 0)
		return false;
	if (s->n == 0)
		return ref->stored_len <= s->most && checks_to - ref->checks <= BURST_CHECKS_BYTES;
	return ref->offset >= s->to && ref->offset - s->to < BURST_GAP &&
		ref->offset + ref->stored_len - s->from <= s->most && ref->checks == s->checks_to &&
		checks_to - s->checks_from <= BURST_CHECKS_BYTES;
}

void burst_add(struct burst *s, const struct store_object_ref *ref, uint8_t *place)
{
	if (s->n == 0) {
		s->from = ref->offset;
		s->checks_from = ref->checks;
	}
	s->piece[s->n++] = (struct burst_piece){ref, place};
	s->to = ref->offset + ref->stored_len;
	s->checks_to = ref->checks + store_object_checks_bytes(ref->codec, ref->raw_len);
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

/* Byte x of the pack goes to burst + (x - from), but for raw objects that have a place. */
static void burst_vector(struct burst *s)
{
	uint64_t at = s->from;

	for (unsigned i = 0; i < s->n; i++) {
		const struct burst_piece *p = &s->piece[i];

		iov_add(s, s->bytes + (at - s->from), p->ref->offset - at);
		iov_add(s, p->place && p->ref->codec == STORE_CODEC_RAW ? p->place : s->bytes +
			(p->ref->offset - s->from), p->ref->stored_len);
		at = p->ref->offset + p->ref->stored_len;
	}
}

static int burst_read_past(struct burst *s)
{
	struct fill_worker *w = s->w;
	const uint8_t *bytes;
	int r = store_pack_read_past(w->pack, s->from, s->to - s->from, w->burst, &bytes, NULL);

	if (r < 0)
		return r;
	s->bytes = w->burst + (bytes - w->burst);
	if (r == STORE_PAST_CACHE)
		fill_crew_grow(w->f);
	else
		w->through = BURST_THROUGH;
	return 0;
}

/* Memory for bursts, in huge pages where these are to be had. */
static int burst_memory(struct fill_worker *w)
{
	if (w->burst)
		return 0;
	w->checks = malloc(BURST_CHECKS_BYTES);
	w->burst = w->f->past_cache ? aligned_alloc(BURST_HUGE, BURST_PAST_BYTES + BURST_HUGE)
		: malloc(BURST_BYTES);
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

bool burst_read(struct burst *s)
{
	struct fill_worker *w = s->w;
	struct iovec checks;
	int r;

	if (!burst_pays(s) || burst_memory(w) < 0)
		return false;
	checks = (struct iovec){w->checks, s->checks_to - s->checks_from};
	if (s->past) {
		r = burst_read_past(s);
	} else {
		s->bytes = w->burst;
		burst_vector(s);
		r = store_pack_readv(w->pack, s->from, s->iov, s->niov, NULL);
	}
	return r == 0 && store_pack_readv(w->pack, s->checks_from, &checks, 1, NULL) == 0;
}

const uint8_t *burst_take(struct burst *s, unsigned i)
{
	const struct burst_piece *p = &s->piece[i];
	struct fill_worker *w = s->w;
	const uint8_t *checks = w->checks + (p->ref->checks - s->checks_from);
	uint8_t *stored = s->bytes + (p->ref->offset - s->from), *out = p->place;

	if (p->ref->codec == STORE_CODEC_RAW) {
		out = out ? out : stored;
		stored = s->past ? stored : out;
	} else if (!out) {
		if (fill_room(w, p->ref->raw_len) < 0)
			return NULL;
		out = w->room;
	}
	return store_object_take(w->pack, p->ref, stored, checks, out, NULL) == 0 ? out : NULL;
}
