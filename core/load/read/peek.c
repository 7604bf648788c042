/* SPDX-License-Identifier: Apache-2.0
 *
 * peek: a few bytes of an object, past the cache, the first time that they are read. `head`, a header's checksum, a
 * page that a program touches at random: to decode all pieces that such a read meets would take a hundred times as
 * long, because a row of a tensor passes through many pieces. So only the blocks that have the bytes are read, and
 * nothing is kept but a mark that the segment was read from. The next read finds the mark, and the segment is read
 * whole into the cache.
 *
 * It is only a short cut: what does not fit, and every error, is left to the ordinary read. */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/load/read/read_internal.h"

#define PEEK_FRAGMENTS 128u
#define PEEK_BLOCKS 64u                  /* 1 MiB of memory */
#define PEEK_ENTRIES 512u                /* the same, once for each fragment in them */
#define PEEK_SEGMENT_BLOCKS (LOAD_SEGMENT_BYTES / BASE_BLOCK_BYTES)

struct peek_block { uint64_t piece, block; };
struct peek_part { struct peek_block first; uint64_t piece_offset, len; }; /* a fragment, from that block on */

struct peek {
	const struct load_object *o;
	struct peek_part parts[PEEK_FRAGMENTS]; unsigned nparts;
	struct peek_block blocks[PEEK_ENTRIES]; unsigned nblocks; /* sorted: PEEK_BLOCKS at most */
	struct load_want wants[PEEK_BLOCKS]; unsigned nwants;    /* the segments that these are in */
};

static int block_compare(const void *a, const void *b)
{
	const struct peek_block *x = a, *y = b;

	if (x->piece != y->piece)
		return x->piece < y->piece ? -1 : 1;
	return (x->block > y->block) - (x->block < y->block);
}

/* Where a block's bytes are in memory. -1: they are not, and the read is left to the ordinary one. */
static int64_t block_place(const struct peek *l, const struct peek_block *want)
{
	const struct peek_block *at = bsearch(want, l->blocks, l->nblocks, sizeof *want, block_compare);

	return at ? (at - l->blocks) * (int64_t)BASE_BLOCK_BYTES : -1;
}

static bool add_blocks(struct peek *l, const struct peek_part *p)
{
	uint64_t end = base_div_up(p->piece_offset + p->len, BASE_BLOCK_BYTES);

	for (uint64_t b = p->first.block; b < end; b++) {
		struct peek_block block = {p->first.piece, b};
		const struct peek_block *last = l->nblocks ? &l->blocks[l->nblocks - 1] : NULL;

		if (last && block_compare(last, &block) == 0)
			continue;
		if (l->nblocks == PEEK_ENTRIES)
			return false;
		l->blocks[l->nblocks++] = block;
	}
	return true;
}

static bool add_fragments(struct peek *l, uint64_t offset, uint64_t end)
{
	for (uint64_t at = offset; at < end;) {
		struct tensor_fragment f = {.piece_offset = at, .len = end - at};
		struct peek_part *p = &l->parts[l->nparts];

		if (l->nparts == PEEK_FRAGMENTS || (!l->o->blob && load_fragment_at(l->o, at, end, &f) < 0))
			return false;
		*p = (struct peek_part){{f.piece, f.piece_offset / BASE_BLOCK_BYTES}, f.piece_offset, f.len};
		l->nparts++;
		if (!l->o->pieces[f.piece].inline_bytes && !add_blocks(l, p))
			return false;
		at += f.len;
	}
	return true;
}

/* The segments, and whether the blocks are less than half of them. */
static bool is_worth(struct peek *l)
{
	uint64_t whole = 0;

	for (unsigned i = 0; i < l->nblocks; i++) {
		struct load_want want = {.piece = l->blocks[i].piece,
			.segment = l->blocks[i].block / PEEK_SEGMENT_BLOCKS};
		const struct load_want *last = l->nwants ? &l->wants[l->nwants - 1] : NULL;
		uint64_t len = l->o->pieces[want.piece].ref.raw_len;

		if (last && last->piece == want.piece && last->segment == want.segment)
			continue;
		l->wants[l->nwants++] = want;
		whole += base_min(LOAD_SEGMENT_BYTES, len - want.segment * LOAD_SEGMENT_BYTES);
	}
	return 2 * l->nblocks * BASE_BLOCK_BYTES < whole;
}

/* Blocks of one piece that follow each other, to their place. Returns how many; 0: an error. */
static unsigned read_run(const struct peek *l, unsigned first, struct pack *pack, uint8_t *memory)
{
	const struct peek_block *b = &l->blocks[first];
	unsigned n = 1;

	while (first + n < l->nblocks && b[n].piece == b->piece && b[n].block == b->block + n)
		n++;
	return pack_object_read_blocks(pack, &l->o->pieces[b->piece].ref, b->block, n,
		memory + first * BASE_BLOCK_BYTES, NULL) < 0 ? 0 : n;
}

static bool read_blocks(const struct peek *l, uint8_t *memory)
{
	struct store *s = load_step_store(l->o->step);
	struct pack *pack = NULL;
	uint32_t number = 0;
	unsigned n = 1;

	for (unsigned i = 0; i < l->nblocks && n; i += n) {
		uint32_t want = l->o->pieces[l->blocks[i].piece].ref.pack;

		if (pack && number != want)
			store_pack_put(s, base_steal(pack));
		if (!pack && (want >= l->o->npacks || store_pack_get(s, l->o->packs[want], &pack, NULL) < 0))
			return false;
		number = want;
		n = read_run(l, i, pack, memory);
	}
	if (pack)
		store_pack_put(s, pack);
	return n > 0;
}

static bool copy_parts(const struct peek *l, const uint8_t *memory, uint8_t *out)
{
	for (unsigned i = 0; i < l->nparts; i++) {
		const struct peek_part *p = &l->parts[i];
		const uint8_t *here = l->o->pieces[p->first.piece].inline_bytes;
		uint64_t from = p->piece_offset;

		for (uint64_t done = 0, n; done < p->len; done += n, out += n, from += n) {
			struct peek_block block = {p->first.piece, from / BASE_BLOCK_BYTES};
			int64_t place = here ? 0 : block_place(l, &block);

			if (place < 0)
				return false;
			n = here ? p->len : base_min(p->len - done, BASE_BLOCK_BYTES - from % BASE_BLOCK_BYTES);
			memcpy(out, here ? here + from : memory + place + from % BASE_BLOCK_BYTES, n);
		}
	}
	return true;
}

/* Roughly: the blocks of an encoded piece have different lengths. */
static uint64_t stored_bytes(const struct peek *l)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < l->nblocks; i++) {
		const struct pack_object_ref *ref = &l->o->pieces[l->blocks[i].piece].ref;
		sum += ref->stored_len / base_block_count(ref->raw_len);
	}
	return sum;
}

bool load_object_peek(const struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out)
{
	base_cleanup_free struct peek *l = malloc(sizeof *l);
	base_cleanup_free uint8_t *memory = NULL;

	if (!l)
		return false;
	l->o = o;
	l->nparts = l->nblocks = l->nwants = 0;
	if (!add_fragments(l, offset, offset + len))
		return false;
	l->nblocks = (unsigned)base_array_unique(l->blocks, l->nblocks, sizeof *l->blocks, block_compare);
	if (l->nblocks > PEEK_BLOCKS || !is_worth(l) || load_cache_mark(c, o, l->wants, l->nwants))
		return false;
	memory = malloc(l->nblocks * BASE_BLOCK_BYTES);
	if (!memory || !read_blocks(l, memory) || !copy_parts(l, memory, out))
		return false;
	load_cache_count(c, l->nblocks * BASE_BLOCK_BYTES, stored_bytes(l));
	return true;
}
