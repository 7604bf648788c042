/* SPDX-License-Identifier: Apache-2.0
 *
 * look: a few bytes of an object that nobody has read there before. `head`, a header's checksum, a page that a program
 * touches at random: decoding all pieces that such a read meets would be work a hundred times as large, because a row
 * of a tensor passes through many pieces. So of a piece that was not met before only the blocks are read that the
 * bytes lie in, and nothing is kept but the mark that it was met; whoever comes again finds the mark, and the piece is
 * read whole into the cache.
 *
 * It is a short cut only: whatever does not fit, and every error, goes the way of all other reads. */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/load/read/read_internal.h"

#define LOOK_FRAGMENTS 128u
#define LOOK_BLOCKS 64u                  /* 1 MiB of memory */
#define LOOK_ENTRIES 512u                /* the same, as often as fragments lie in them */
#define LOOK_SEGMENT_BLOCKS (LOAD_SEGMENT_BYTES / BASE_BLOCK_BYTES)

struct look_block { uint64_t piece, block; };
struct look_part { struct look_block first; uint64_t piece_offset, len; }; /* a fragment; the block that it begins in */

struct look {
	const struct load_object *o;
	struct look_part parts[LOOK_FRAGMENTS]; unsigned nparts;
	struct look_block blocks[LOOK_ENTRIES]; unsigned nblocks; /* sorted: LOOK_BLOCKS at most */
	struct load_want wants[LOOK_BLOCKS]; unsigned nwants;    /* the segments that these are in */
};

static int block_compare(const void *a, const void *b)
{
	const struct look_block *x = a, *y = b;

	if (x->piece != y->piece)
		return x->piece < y->piece ? -1 : 1;
	return (x->block > y->block) - (x->block < y->block);
}

/* Where a block's bytes are in memory; what is not there is a fault, and the read goes the other way. */
static int64_t block_place(const struct look *l, const struct look_block *want)
{
	const struct look_block *at = bsearch(want, l->blocks, l->nblocks, sizeof *want, block_compare);

	return at ? (at - l->blocks) * (int64_t)BASE_BLOCK_BYTES : -1;
}

static bool add_blocks(struct look *l, const struct look_part *p)
{
	uint64_t end = base_div_up(p->piece_offset + p->len, BASE_BLOCK_BYTES);

	for (uint64_t b = p->first.block; b < end; b++) {
		struct look_block block = {p->first.piece, b};
		const struct look_block *last = l->nblocks ? &l->blocks[l->nblocks - 1] : NULL;

		if (last && block_compare(last, &block) == 0)
			continue;
		if (l->nblocks == LOOK_ENTRIES)
			return false;
		l->blocks[l->nblocks++] = block;
	}
	return true;
}

static bool add_fragments(struct look *l, uint64_t offset, uint64_t end)
{
	for (uint64_t at = offset; at < end;) {
		struct tensor_fragment f = {.piece_offset = at, .len = end - at};
		struct look_part *p = &l->parts[l->nparts];

		if (l->nparts == LOOK_FRAGMENTS || (!l->o->blob && load_fragment_at(l->o, at, end, &f) < 0))
			return false;
		*p = (struct look_part){{f.piece, f.piece_offset / BASE_BLOCK_BYTES}, f.piece_offset, f.len};
		l->nparts++;
		if (!l->o->pieces[f.piece].inline_bytes && !add_blocks(l, p))
			return false;
		at += f.len;
	}
	return true;
}

/* The segments, and whether the blocks are less than half of them. */
static bool is_worth(struct look *l)
{
	uint64_t whole = 0;

	for (unsigned i = 0; i < l->nblocks; i++) {
		struct load_want want = {.piece = l->blocks[i].piece,
			.segment = l->blocks[i].block / LOOK_SEGMENT_BLOCKS};
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
static unsigned read_run(const struct look *l, unsigned first, struct store_pack *pack, uint8_t *memory)
{
	const struct look_block *b = &l->blocks[first];
	unsigned n = 1;

	while (first + n < l->nblocks && b[n].piece == b->piece && b[n].block == b->block + n)
		n++;
	return store_object_read_blocks(pack, &l->o->pieces[b->piece].ref, b->block, n,
		memory + first * BASE_BLOCK_BYTES, NULL) < 0 ? 0 : n;
}

static bool read_blocks(const struct look *l, uint8_t *memory)
{
	struct store *s = load_step_store(l->o->step);
	struct store_pack *pack = NULL;
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

static bool copy_parts(const struct look *l, const uint8_t *memory, uint8_t *out)
{
	for (unsigned i = 0; i < l->nparts; i++) {
		const struct look_part *p = &l->parts[i];
		const uint8_t *here = l->o->pieces[p->first.piece].inline_bytes;
		uint64_t from = p->piece_offset;

		for (uint64_t done = 0, n; done < p->len; done += n, out += n, from += n) {
			struct look_block block = {p->first.piece, from / BASE_BLOCK_BYTES};
			int64_t place = here ? 0 : block_place(l, &block);

			if (place < 0)
				return false;
			n = here ? p->len : base_min(p->len - done, BASE_BLOCK_BYTES - from % BASE_BLOCK_BYTES);
			memcpy(out, here ? here + from : memory + place + from % BASE_BLOCK_BYTES, n);
		}
	}
	return true;
}

/* About: blocks of a piece have different lengths where it is encoded. */
static uint64_t stored_bytes(const struct look *l)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < l->nblocks; i++) {
		const struct store_object_ref *ref = &l->o->pieces[l->blocks[i].piece].ref;
		sum += ref->stored_len / base_block_count(ref->raw_len);
	}
	return sum;
}

bool load_object_look(const struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out)
{
	base_cleanup_free struct look *l = malloc(sizeof *l);
	base_cleanup_free uint8_t *memory = NULL;

	if (!l)
		return false;
	l->o = o;
	l->nparts = l->nblocks = l->nwants = 0;
	if (!add_fragments(l, offset, offset + len))
		return false;
	l->nblocks = (unsigned)base_array_unique(l->blocks, l->nblocks, sizeof *l->blocks, block_compare);
	if (l->nblocks > LOOK_BLOCKS || !is_worth(l) || load_cache_met(c, o, l->wants, l->nwants))
		return false;
	memory = malloc(l->nblocks * BASE_BLOCK_BYTES);
	if (!memory || !read_blocks(l, memory) || !copy_parts(l, memory, out))
		return false;
	load_cache_count(c, l->nblocks * BASE_BLOCK_BYTES, stored_bytes(l));
	return true;
}
