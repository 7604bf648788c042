/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_fetch: bytes of the source's packs, no faster than asked for. Stored bytes are taken as they are, so nothing is
 * encoded anew; they are decoded once, because the digest is that of the decoded bytes. */
#include <time.h>

#include "core/base/clock.h"
#include "core/copy/copy_internal.h"
#include "core/pack/codec.h"

#define FETCH_WAIT_NS UINT64_C(200000000) /* at most, until the next look whether it is cancelled */

/* Waits until so many bytes may be read. -EINTR */
static int fetch_pace(struct copy *c, uint64_t bytes, struct base_error *err)
{
	uint64_t now = base_monotonic_ns(), begin;

	atomic_fetch_add_explicit(&c->read_bytes, bytes, memory_order_relaxed);
	if (c->options->rate) {
		pthread_mutex_lock(&c->pace_lock);
		begin = c->pace_ns = base_max(c->pace_ns, now);
		c->pace_ns += (uint64_t)((double)bytes * 1e9 / (double)c->options->rate);
		pthread_mutex_unlock(&c->pace_lock);
	} else {
		begin = now;
	}
	for (;;) {
		uint64_t left = begin > now ? base_min(begin - now, FETCH_WAIT_NS) : 0;
		struct timespec t = {.tv_nsec = (long)left};

		if (c->options->cancelled && c->options->cancelled())
			return base_error_set(err, -EINTR, "interrupted");
		if (!left)
			return 0;
		nanosleep(&t, NULL);
		now = base_monotonic_ns();
	}
}

/* Pieces that are one after another in a pack, with their checks behind the last of the extent: two reads. */
struct run {
	struct pack *pack;
	const struct pack_object_ref *refs[SAVE_GIVEN_GROUP];
	struct save_piece *const *pieces;
	unsigned n;
	uint64_t stored, checks;        /* bytes, gaps included; of all checks */
};

static int run_add(struct run *run, const struct pack_object_ref *ref, const struct save_piece *p,
	struct base_error *err)
{
	int r = pack_object_ref_check(ref, pack_size(run->pack) - PACK_TAIL_BYTES);

	if (r < 0 || ref->raw_len != p->len)
		return base_error_set(err, r == -BASE_EVERSION ? r : -BASE_EDAMAGED,
			"pack %s: no such object at offset %llu", pack_name(run->pack),
			(unsigned long long)ref->offset);
	run->refs[run->n++] = ref;
	run->stored = ref->offset + ref->stored_len - run->refs[0]->offset;
	run->checks += pack_object_checks_bytes(ref->codec, ref->raw_len);
	return 0;
}

/* Does the object follow those of the run by the arithmetic of extents? */
static bool run_goes_on(const struct run *run, const struct pack_object_ref *ref)
{
	const struct pack_object_ref *last = run->refs[run->n - 1];

	return ref->offset == base_align(last->offset + last->stored_len,
		pack_object_align(ref->codec, ref->stored_len)) && ref->checks == run->refs[0]->checks + run->checks;
}

static uint8_t *run_stored(const struct run *run, unsigned i, const struct save_band *b)
{
	return (run->refs[i]->codec == PACK_CODEC_RAW ? b->raw : b->out) + run->pieces[i]->offset;
}

static int run_read(const struct run *run, struct save_band *b, uint8_t *checks)
{
	struct iovec iov[2 * SAVE_GIVEN_GROUP], all = {checks, run->checks};
	uint64_t at = run->refs[0]->offset;
	uint8_t gap[4096];
	unsigned n = 0;
	int r;

	for (unsigned i = 0; i < run->n; i++) {
		const struct pack_object_ref *ref = run->refs[i];

		if (ref->offset > at)
			iov[n++] = (struct iovec){gap, ref->offset - at};
		iov[n++] = (struct iovec){run_stored(run, i, b), ref->stored_len};
		at = ref->offset + ref->stored_len;
	}
	r = pack_readv(run->pack, run->refs[0]->checks, &all, 1, &b->err);
	return r < 0 ? r : pack_readv(run->pack, run->refs[0]->offset, iov, n, &b->err);
}

static int run_fetch(struct copy *c, const struct run *run, struct save_band *b)
{
	base_cleanup_free uint8_t *checks = malloc(run->checks + 1);
	int r = checks ? fetch_pace(c, run->stored + run->checks, &b->err) : base_no_memory(&b->err);

	if (r == 0)
		r = run_read(run, b, checks);
	for (unsigned i = 0, at = 0; r == 0 && i < run->n; i++) {
		const struct pack_object_ref *ref = run->refs[i];
		struct save_piece *p = run->pieces[i];

		r = pack_object_take_whole(run->pack, ref, run_stored(run, i, b), checks + at, b->raw + p->offset,
			b->checks + p->first_block, b->lens + p->first_block, &b->err);
		p->codec = ref->codec;
		p->stored_len = ref->stored_len;
		at += pack_object_checks_bytes(ref->codec, ref->raw_len);
	}
	return r;
}

/* The first few of the pieces, as many as one run has. */
static int fetch_some(struct copy *c, const char *const *packs, struct save_band *b, struct save_piece *const *pieces,
	unsigned n)
{
	const struct store_piece *given = b->given.pieces, *first = &given[pieces[0] - b->pieces];
	struct run run = {.pieces = pieces};
	int r = store_pack_get(c->from, packs[first->ref.pack], &run.pack, &b->err);

	if (r < 0)
		return r;
	for (unsigned i = 0; r == 0 && i < n; i++) {
		const struct pack_object_ref *ref = &given[pieces[i] - b->pieces].ref;

		if (i && (ref->pack != first->ref.pack || !run_goes_on(&run, ref)))
			break;
		r = run_add(&run, ref, pieces[i], &b->err);
	}
	if (r == 0)
		r = run_fetch(c, &run, b);
	store_pack_put(c->from, run.pack);
	return r < 0 ? r : (int)run.n;
}

int copy_fetch(struct copy *c, const char *const *packs, struct save_band *b, struct save_piece *const *pieces,
	unsigned n)
{
	int some = 0;

	for (unsigned i = 0; i < n && some >= 0; i += (unsigned)some)
		some = fetch_some(c, packs, b, pieces + i, n - i);
	return some < 0 ? some : 0;
}

int copy_read_blob(struct store *s, const char *name, const struct pack_object_ref *ref, uint64_t offset, void *bytes,
	size_t len, struct base_error *err)
{
	struct pack *pack;
	int r = store_pack_get(s, name, &pack, err);

	if (r < 0)
		return r;
	r = pack_object_read_blocks(pack, ref, offset / BASE_BLOCK_BYTES, base_block_count(len), bytes, err);
	store_pack_put(s, pack);
	return r;
}

int copy_fetch_blob(struct copy *c, const char *name, const struct pack_object_ref *ref, uint64_t offset, void *bytes,
	size_t len, struct base_error *err)
{
	int r = fetch_pace(c, len, err);

	return r < 0 ? r : copy_read_blob(c->from, name, ref, offset, bytes, len, err);
}
