/* SPDX-License-Identifier: Apache-2.0
 *
 * fill_burst: pieces of a pack, as far as they are wanted, read with few requests (burst.h). */
#include "core/load/fill/burst.h"

struct fill_burst {
	struct burst burst;
	struct fill_worker *w;
	struct fill_burst_piece { size_t end; unsigned run; } piece[BURST_RUNS]; /* of its needs; its first run */
	unsigned n;
};

struct piece_run { struct burst *burst; const struct pack_object_ref *ref; };

static int piece_run(void *arg, uint64_t first, uint64_t n)
{
	const struct piece_run *run = arg;

	return burst_add(run->burst, run->ref, first, n, NULL) ? 0 : -ENOBUFS;
}

/* Adds what is wanted of the piece, or nothing. */
static bool piece_add(struct fill_burst *b, size_t first, size_t end)
{
	const struct pack_object_ref *ref = need_ref(b->w->f, &b->w->f->needs[first]);
	unsigned had = b->burst.n;

	if (b->w->f->flags & LOAD_FILL_REHASH || fill_group_is_whole(b->w->f, first, end))
		return burst_add(&b->burst, ref, 0, base_block_count(ref->raw_len),
			fill_group_place(b->w->f, first, end));
	if (fill_wanted_runs(b->w, first, end, piece_run, &(struct piece_run){&b->burst, ref}) == 0)
		return true;
	burst_cut(&b->burst, had);
	return false;
}

static void burst_collect(struct fill_burst *b, size_t first, size_t end)
{
	const struct load_fill *f = b->w->f;
	uint32_t pack = f->needs[first].pack;

	for (size_t i = first, next; i < end && f->needs[i].pack == pack && b->burst.n < BURST_RUNS; i = next) {
		unsigned run = b->burst.n;

		next = fill_group_end(f, i);
		if (!piece_add(b, i, next))
			return;
		b->piece[b->n++] = (struct fill_burst_piece){next, run};
	}
}

/* The wanted bytes of a piece, which are runs [from, to), each at its place in the piece. NULL: a check failed. */
static const uint8_t *piece_take(struct fill_burst *b, unsigned from, unsigned to)
{
	const struct burst_run *run = &b->burst.run[from];
	const uint8_t *bytes;

	if (to - from == 1) {
		bytes = burst_take(&b->burst, from, NULL);
		return bytes ? (const uint8_t *)((uintptr_t)bytes - run->first * BASE_BLOCK_BYTES) : NULL;
	}
	if (fill_room(b->w, run->ref->raw_len) < 0)
		return NULL;
	for (unsigned i = from; i < to; i++)
		if (!burst_take(&b->burst, i, b->w->room + b->burst.run[i].first * BASE_BLOCK_BYTES))
			return NULL;
	return b->w->room;
}

size_t fill_burst(struct fill_worker *w, size_t first, size_t end)
{
	struct fill_burst b; /* large, so only what is read is set */

	b.w = w;
	b.n = 0;
	if (!burst_begin(&b.burst, w, w->f->needs[first].pack))
		return first;
	burst_collect(&b, first, end);
	if (!burst_read(&b.burst))
		return first;
	for (unsigned i = 0; i < b.n; i++) {
		unsigned run = b.piece[i].run;
		const uint8_t *bytes = piece_take(&b, run, i + 1 < b.n ? b.piece[i + 1].run : b.burst.n);

		if (!bytes)
			return first;
		fill_place(w->f, first, b.piece[i].end, bytes, b.burst.run[run].place);
		first = b.piece[i].end;
	}
	return first;
}
