/* SPDX-License-Identifier: Apache-2.0
 *
 * burst: stored blocks of objects of one pack, read with few requests (burst.h). */
#include <stdlib.h>
#include <sys/mman.h>

#include "core/load/fill/burst.h"
#include "core/pack/codec.h"

#define BURST_BYTES (1u << 20)
#define BURST_PAGE 4096u                 /* a shorter gap between runs, such as their alignment, is always read */
#define BURST_REQUEST_BYTES (64u << 10)  /* a request takes as long as reading about so many bytes */
#define BURST_CHECKS_BYTES (64u << 10)
#define BURST_PAST_BYTES (2u << 20)
#define BURST_PAST_LEAST (256u << 10)    /* less is not worth a request of its own past the page cache */
#define BURST_THROUGH 15u                /* bursts after one that the page cache had: it probably has those, too */
#define BURST_HUGE (2u << 20)            /* bytes of a huge page */
#define BURST_HASH_BLOCKS 64u            /* about so many are hashed together */

bool burst_begin(struct burst *s, struct fill_worker *w, uint32_t pack)
{
	if (pack == FILL_INLINE || fill_pack(w, pack) < 0)
		return false;
	s->w = w;
	s->n = s->niov = s->hashed = 0;
	s->bytes = 0;
	s->past = w->f->past_cache && !w->through;
	s->parts = s->encoded_parts = false;
	w->through -= w->through > 0;
	s->most = s->past ? BURST_PAST_BYTES : BURST_BYTES;
	return true;
}

static bool burst_hashes(const struct burst *s) { return s->w->f->flags & LOAD_FILL_REHASH; }

/* ---- adding ---- */

static bool run_is_whole(const struct burst_run *run) { return run->n == base_block_count(run->ref->raw_len); }

/* Stored bytes; an upper bound for some blocks of an encoded object. */
static uint64_t run_most(const struct burst_run *run)
{
	if (run_is_whole(run))
		return run->ref->stored_len;
	return base_min(run->ref->stored_len, run->n * BASE_BLOCK_BYTES);
}

/* Is it behind the last one, in the pack and among the checks? */
static bool run_follows(const struct burst *s, const struct burst_run *run)
{
	const struct burst_run *last = &s->run[s->n - 1];

	if (run->ref == last->ref) /* the checks of an encoded object are there already */
		return run->first >= last->first + last->n && run->checks + run->checks_len - s->checks_from
			<= BURST_CHECKS_BYTES;
	return run->ref->offset >= last->ref->offset + last->ref->stored_len && run->checks >= s->checks_to &&
		run->checks - s->checks_to < BURST_PAGE &&
		run->checks + run->checks_len - s->checks_from <= BURST_CHECKS_BYTES;
}

static bool run_fits_past(const struct burst *s, const struct burst_run *run)
{
	const struct pack_object_ref *last = s->n ? s->run[s->n - 1].ref : NULL;

	return run_is_whole(run) && (!last || run->ref->offset - last->offset - last->stored_len < BURST_PAGE)
		&& run->ref->offset + run->ref->stored_len - (last ? s->run[0].ref->offset : run->ref->offset)
		<= s->most;
}

static bool run_fits(const struct burst *s, const struct burst_run *run)
{
	if (s->n == BURST_RUNS || pack_object_ref_check(run->ref, pack_size(s->w->pack)
			- PACK_TAIL_BYTES) < 0)
		return false;
	if (s->n ? !run_follows(s, run) : run->checks_len > BURST_CHECKS_BYTES)
		return false;
	if (s->past)
		return run_fits_past(s, run);
	return !(s->parts && run_is_whole(run)) && s->bytes + run_most(run) <= s->most;
}

bool burst_add(struct burst *s, const struct pack_object_ref *ref, uint64_t first, uint64_t n, uint8_t *place)
{
	struct burst_run run = {.ref = ref, .first = first, .n = n, .place = place};

	if (burst_hashes(s) && !run_is_whole(&run))
		return false;
	pack_object_checks_of(ref, first, n, &run.checks, &run.checks_len);
	if (s->n == 0 && s->past && !run_is_whole(&run)) {
		s->past = false;
		s->parts = true;
		s->most = BURST_BYTES;
	}
	if (!run_fits(s, &run))
		return false;
	if (s->n == 0)
		s->checks_from = run.checks;
	s->checks_to = run.checks + run.checks_len;
	s->encoded_parts |= ref->codec != PACK_CODEC_RAW && !run_is_whole(&run);
	s->bytes += run_most(&run);
	s->run[s->n++] = run;
	return true;
}

void burst_cut(struct burst *s, unsigned n)
{
	for (; s->n > n; s->n--)
		s->bytes -= run_most(&s->run[s->n - 1]);
	if (n)
		s->checks_to = s->run[n - 1].checks + s->run[n - 1].checks_len;
}

/* ---- reading ---- */

/* Memory for bursts, in huge pages if there are any. */
static int burst_memory(struct fill_worker *w)
{
	if (w->burst)
		return 0;
	w->checks = malloc(BURST_CHECKS_BYTES);
	w->burst = w->f->past_cache ? aligned_alloc(BURST_HUGE, BURST_PAST_BYTES + BURST_HUGE)
		: aligned_alloc(STORAGE_PAST_ALIGN, BURST_BYTES + BURST_REQUEST_BYTES);
	if (w->burst && w->checks) {
		if (w->f->past_cache) /* a hint */
			(void)madvise(w->burst, BURST_PAST_BYTES, MADV_HUGEPAGE);
		return 0;
	}
	free(base_steal(w->burst));
	free(base_steal(w->checks));
	return -ENOMEM;
}

static bool read_flush(struct burst *s)
{
	unsigned n = s->niov;

	s->niov = 0;
	return n == 0 || pack_readv(s->w->pack, s->iov_from, s->iov, n, NULL) == 0;
}

/* Is one request better than two? The bytes between cost time, and money where reads are paid for: in a whole burst
 * they are at most a quarter of what is wanted; in a load of more than one task, which has other requests under way
 * meanwhile, a 32nd. */
static bool read_joins(struct burst *s, uint64_t from)
{
	uint64_t gap = from - s->iov_to;

	if (s->niov == 0 || from < s->iov_to || (gap >= BURST_PAGE && gap > base_min(s->gaps, BURST_REQUEST_BYTES)))
		return false;
	s->gaps -= base_min(s->gaps, gap);
	return true;
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

/* Bytes of the pack that are wanted next. Those between go behind the runs, and are never used. */
static bool read_next(struct burst *s, uint64_t from, uint8_t *to, uint64_t len)
{
	if (len == 0)
		return true;
	if (read_joins(s, from)) {
		iov_add(s, s->w->burst + s->bytes, from - s->iov_to);
	} else {
		if (!read_flush(s))
			return false;
		s->iov_from = from;
	}
	iov_add(s, to, len);
	s->iov_to = from + len;
	return true;
}

static const uint8_t *run_checks(const struct burst *s, const struct burst_run *run)
{
	return s->w->checks + (run->checks - s->checks_from);
}

/* Where the stored bytes of each run are, and how much may be read besides. */
static bool runs_locate(struct burst *s)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < s->n; i++) {
		struct burst_run *run = &s->run[i];

		if (run_is_whole(run))
			run->len = run->ref->stored_len; /* from its first byte on */
		else if (pack_object_stored_of(run->ref, run->first, run->n, run_checks(s, run), &run->from,
				&run->len) < 0)
			return false;
		run->from += run->ref->offset;
		bytes += run->len;
	}
	s->gaps = s->w->f->wanted <= FILL_TASK_BYTES ? bytes / 4 : bytes / 32;
	return true;
}

/* Raw blocks go to their place, all others behind each other. */
static bool read_runs(struct burst *s)
{
	uint8_t *to = s->w->burst;

	for (unsigned i = 0; i < s->n; i++) {
		struct burst_run *run = &s->run[i];
		bool there = run->place && run->ref->codec == PACK_CODEC_RAW;

		run->at = there ? run->place : to;
		to += there ? 0 : run->len;
		if (!read_next(s, run->from, run->at, run->len))
			return false;
	}
	return true;
}

static bool read_checks(struct burst *s)
{
	return read_next(s, s->checks_from, s->w->checks, s->checks_to - s->checks_from);
}

static bool read_past(struct burst *s)
{
	uint64_t from = s->run[0].ref->offset, to = s->run[s->n - 1].ref->offset + s->run[s->n - 1].ref->stored_len;
	struct fill_worker *w = s->w;
	const uint8_t *bytes;
	int r = pack_read_past(w->pack, from, to - from, w->burst, &bytes, NULL);

	if (r < 0)
		return false;
	for (unsigned i = 0; i < s->n; i++)
		s->run[i].at = w->burst + (bytes - w->burst) + (s->run[i].ref->offset - from);
	if (r == STORAGE_PAST_CACHE)
		fill_crew_grow(w->f);
	else
		w->through = BURST_THROUGH;
	return true;
}

bool burst_read(struct burst *s)
{
	bool first = s->encoded_parts;

	if (s->n == 0 || burst_memory(s->w) < 0)
		return false;
	s->gaps = 0;
	s->past = s->past && (s->n > 1 || s->bytes >= BURST_PAST_LEAST);
	if (s->past)
		return read_past(s) && read_checks(s) && read_flush(s);
	if (first && !(read_checks(s) && read_flush(s)))
		return false;
	return runs_locate(s) && read_runs(s) && (first || read_checks(s)) && read_flush(s);
}

/* ---- taking ---- */

static const uint8_t *run_take(struct burst *s, unsigned i, uint8_t *to)
{
	const struct burst_run *run = &s->run[i];
	struct fill_worker *w = s->w;
	uint64_t most = run->n * BASE_BLOCK_BYTES;

	to = to ? to : run->place;
	if (!to && run->ref->codec == PACK_CODEC_RAW)
		to = run->at;
	if (!to) {
		if (fill_room(w, base_min(most, run->ref->raw_len)) < 0)
			return NULL;
		to = w->room;
	}
	return pack_object_take(w->pack, run->ref, run->first, run->n, run->at, run_checks(s, run), to, NULL) == 0
		? to : NULL;
}

/* Takes runs from number i on, as long as their bytes stay where they are, and hashes them together
 * (core/base/digest.h). */
static void runs_hash(struct burst *s, unsigned i)
{
	struct base_object objects[BURST_HASH_BLOCKS];
	uint64_t blocks = 0;
	unsigned n = 0;

	for (bool more = true; more && i + n < s->n && n < BURST_HASH_BLOCKS; n++) {
		const uint8_t *bytes = run_take(s, i + n, NULL);

		s->good[i + n] = bytes;
		objects[n] = (struct base_object){.bytes = bytes, .len = bytes ? s->run[i + n].ref->raw_len : 0};
		blocks += s->run[i + n].n;
		more = bytes && bytes != s->w->room && blocks < BURST_HASH_BLOCKS;
	}
	s->hashed = i + n;
	base_digests_of(objects, n);
	while (n-- > 0)
		if (!base_digest_equal(&objects[n].digest, &s->run[i + n].ref->digest))
			s->good[i + n] = NULL;
}

const uint8_t *burst_take(struct burst *s, unsigned i, uint8_t *to)
{
	if (!burst_hashes(s))
		return run_take(s, i, to);
	if (i >= s->hashed)
		runs_hash(s, i);
	return s->good[i];
}
