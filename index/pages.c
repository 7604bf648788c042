/* SPDX-License-Identifier: Apache-2.0
 *
 * pages: walks the pages of an LMDB file without LMDB, so that what LMDB would believe is checked before it does (the
 * child of check.c runs this).
 *
 * LMDB 0.9 trusts every page: a node offset out of its page, a branch key in the wrong order, a free page that is in
 * use are an assertion, a SIGBUS, or a tree that the next writer destroys. Here each page is read into private memory
 * and believed in nothing: its number and kind, the bounds of every node, the order of keys inside and between pages,
 * depth and counts against the table's record, each page reached once, and none of them on the free list. Little-endian
 * machines with 64-bit page numbers only: elsewhere the answer is "damaged" and the index is not used.
 *
 *   page     u64 number | u16 pad | u16 flags | u16 lower, u16 upper (overflow: u32 pages) | u16 node offsets...
 *   node     u16 lo, u16 hi, u16 flags, u16 key length, key, then: leaf: data of hi<<16|lo bytes; branch: nothing,
 *            child = flags<<32|hi<<16|lo
 *   meta     page head | u32 magic, u32 version | u64 address | u64 map size | 2 tables (free list, main)
 *            | u64 last page | u64 txnid
 *   table    u32 pad (free list: page size) | u16 flags | u16 depth | u64 branch, leaf, overflow pages | u64 entries
 *            | u64 root */
#include "index/index_internal.h"

#include <stdio.h>
#include <sys/stat.h>

#define PAGE_HEAD 16u
#define NODE_HEAD 8u
#define TABLE_BYTES 48u
#define DEPTH_MAX 32u
#define PAGE_NONE UINT64_MAX
#define PAGES_MAX (UINT64_C(1) << 28)
enum { PAGE_BRANCH = 1, PAGE_LEAF = 2, PAGE_OVERFLOW = 4, PAGE_META = 8 };
enum { NODE_BIG = 1, NODE_SUB = 2 };
enum what { TABLE_FREE, TABLE_MAIN, TABLE_NAMED };

struct table { uint16_t flags, depth; uint64_t branch, leaf, overflow, entries, root; };

struct walk {
	int fd;
	uint64_t page_bytes, npages, file_bytes, txnid;
	uint8_t *used;              /* a bit for each page that a tree reaches */
	uint8_t *free;              /* a bit for each page on the free list */
	uint8_t *page[DEPTH_MAX];   /* one buffer a level, and one set for the main table's children */
};

struct key { const uint8_t *bytes; size_t len; };
/* One tree under way. `low` (inclusive) and `high` (exclusive) come from the branches above; bytes NULL: none. */
struct tree {
	struct walk *w;
	enum what what;
	struct table t;
	unsigned base;
	uint64_t branch, leaf, overflow, entries;
};

#define DAMAGED (-BASE_EDAMAGED)

static bool bit_set(uint8_t *bits, uint64_t n)
{
	bool was = bits[n / 8] & 1 << n % 8;
	bits[n / 8] |= 1 << n % 8;
	return was;
}

static int read_at(const struct walk *w, uint64_t offset, void *out, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = pread(w->fd, (uint8_t *)out + done, len - done, (off_t)(offset + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return DAMAGED;
		done += (size_t)n;
	}
	return 0;
}

static void table_get(const uint8_t *p, struct table *t)
{
	*t = (struct table){base_get16(p + 4), base_get16(p + 6), base_get64(p + 8), base_get64(p + 16),
		base_get64(p + 24), base_get64(p + 32), base_get64(p + 40)};
}

static int key_compare(enum what what, struct key a, struct key b)
{
	if (what == TABLE_FREE) { /* native 64-bit numbers */
		uint64_t x = base_get64(a.bytes), y = base_get64(b.bytes);
		return x < y ? -1 : x > y;
	}
	int c = memcmp(a.bytes, b.bytes, a.len < b.len ? a.len : b.len);
	return c ? c : a.len < b.len ? -1 : a.len > b.len;
}

static int node_get(const struct walk *w, const uint8_t *page, unsigned n, const uint8_t **ret_node,
	struct key *ret_key)
{
	uint32_t lower = base_get16(page + 12), upper = base_get16(page + 14),
		 at = base_get16(page + PAGE_HEAD + 2 * n);
	if (at < upper || at < lower || at + NODE_HEAD > w->page_bytes)
		return DAMAGED;
	*ret_node = page + at;
	*ret_key = (struct key){page + at + NODE_HEAD, base_get16(page + at + 6)};
	return at + NODE_HEAD + ret_key->len > w->page_bytes ? DAMAGED : 0;
}

static int page_get(struct tree *t, uint64_t number, unsigned depth, uint8_t **ret_page, unsigned *ret_nkeys)
{
	struct walk *w = t->w;
	unsigned level = t->base + depth;
	if (number < 2 || number >= w->npages || depth >= t->t.depth || level >= DEPTH_MAX || bit_set(w->used, number))
		return DAMAGED;
	if (!w->page[level] && !(w->page[level] = malloc(w->page_bytes)))
		return -ENOMEM;
	uint8_t *p = *ret_page = w->page[level];
	if (read_at(w, number * w->page_bytes, p, w->page_bytes) < 0 || base_get64(p) != number)
		return DAMAGED;
	uint32_t lower = base_get16(p + 12), upper = base_get16(p + 14);
	if (base_get16(p + 10) != (depth + 1 == t->t.depth ? PAGE_LEAF : PAGE_BRANCH))
		return DAMAGED;
	if (lower < PAGE_HEAD + 2 || lower % 2 != 0 || lower > upper || upper > w->page_bytes)
		return DAMAGED;
	*ret_nkeys = (lower - PAGE_HEAD) / 2;
	return 0;
}

/* A value of the free list: a count and that many page numbers, falling. */
static int free_list(struct walk *w, const uint8_t *list, uint64_t len)
{
	if (len < 8 || len % 8 != 0 || base_get64(list) != len / 8 - 1)
		return DAMAGED;
	for (uint64_t n = 1, before = UINT64_MAX; n < len / 8; n++) {
		uint64_t page = base_get64(list + 8 * n);
		if (page < 2 || page >= w->npages || page >= before || bit_set(w->free, page))
			return DAMAGED;
		before = page;
	}
	return 0;
}

static int overflow(struct tree *t, uint64_t number, uint64_t len)
{
	struct walk *w = t->w;
	uint64_t pages = base_div_up(PAGE_HEAD + len, w->page_bytes);
	if (number < 2 || number >= w->npages || pages > w->npages - number)
		return DAMAGED;
	for (uint64_t n = 0; n < pages; n++)
		if (bit_set(w->used, number + n))
			return DAMAGED;
	base_cleanup_free uint8_t *bytes = malloc(pages * w->page_bytes);
	if (!bytes)
		return -ENOMEM;
	if (read_at(w, number * w->page_bytes, bytes, PAGE_HEAD + len) < 0)
		return DAMAGED;
	if (base_get64(bytes) != number || base_get16(bytes + 10) != PAGE_OVERFLOW || base_get32(bytes + 12) != pages)
		return DAMAGED;
	t->overflow += pages;
	return t->what == TABLE_FREE ? free_list(w, bytes + PAGE_HEAD, len) : DAMAGED; /* our own values are short */
}

static int tree_walk(struct walk *w, enum what what, const struct table *table, unsigned base);

static int leaf_node(struct tree *t, const uint8_t *page, const uint8_t *node, struct key key)
{
	uint64_t len = (uint32_t)base_get16(node) | (uint32_t)base_get16(node + 2) << 16;
	unsigned flags = base_get16(node + 4);
	const uint8_t *data = key.bytes + key.len;
	uint64_t room = t->w->page_bytes - (uint64_t)(data - page);
	if (key.len == 0 || key.len > 511 || (t->what == TABLE_FREE && key.len != 8))
		return DAMAGED;
	if (t->what == TABLE_FREE && (base_get64(key.bytes) == 0 || base_get64(key.bytes) > t->w->txnid))
		return DAMAGED;
	if (flags == NODE_BIG)
		return room < 8 || len > UINT32_MAX / 2 ? DAMAGED : overflow(t, base_get64(data), len);
	if (len > room)
		return DAMAGED;
	if (t->what == TABLE_MAIN) {
		struct table sub;
		if (flags != NODE_SUB || len != TABLE_BYTES)
			return DAMAGED;
		table_get(data, &sub);
		return tree_walk(t->w, TABLE_NAMED, &sub, t->t.depth);
	}
	if (flags != 0)
		return DAMAGED;
	return t->what == TABLE_FREE ? free_list(t->w, data, len) : 0;
}

static int page_walk(struct tree *t, uint64_t number, unsigned depth, struct key low, struct key high)
{
	uint8_t *page;
	unsigned nkeys;
	int rc = page_get(t, number, depth, &page, &nkeys);
	if (rc < 0)
		return rc;
	bool leaf = depth + 1 == t->t.depth;
	*(leaf ? &t->leaf : &t->branch) += 1;
	if (!leaf && nkeys < 2)
		return DAMAGED;
	struct key before = low;
	for (unsigned n = 0; n < nkeys; n++) {
		const uint8_t *node, *next_node;
		struct key key, next = high;
		if (node_get(t->w, page, n, &node, &key) < 0 ||
			(n + 1 < nkeys && node_get(t->w, page, n + 1, &next_node, &next) < 0))
			return DAMAGED;
		if (t->what == TABLE_FREE && key.len != 8 && (leaf || n > 0))
			return DAMAGED;
		if (leaf || n > 0) { /* the first key of a branch means nothing */
			if (before.bytes) {
				int c = key_compare(t->what, before, key);
				if (n == 0 ? c > 0 : leaf || n > 1 ? c >= 0 : c > 0)
					return DAMAGED;
			}
			if (high.bytes && key_compare(t->what, key, high) >= 0)
				return DAMAGED;
			before = key;
		}
		if (leaf) {
			t->entries++;
			rc = leaf_node(t, page, node, key);
		} else {
			uint64_t child = (uint64_t)base_get16(node) | (uint64_t)base_get16(node + 2) << 16 |
				(uint64_t)base_get16(node + 4) << 32;
			if (t->what == TABLE_FREE && n + 1 < nkeys && next.len != 8)
				return DAMAGED;
			rc = page_walk(t, child, depth + 1, n == 0 ? low : key, next);
		}
		if (rc < 0)
			return rc;
	}
	return 0;
}

static int tree_walk(struct walk *w, enum what what, const struct table *table, unsigned base)
{
	struct tree t = {.w = w, .what = what, .t = *table, .base = base};
	/* The free list's flags are LMDB's own: MDB_INTEGERKEY and nothing that we set. */
	if ((what == TABLE_FREE ? table->flags & ~MDB_INTEGERKEY : table->flags) != 0)
		return DAMAGED;
	if (table->root == PAGE_NONE)
		return table->depth == 0 && table->entries == 0 && table->branch == 0 && table->leaf == 0 &&
				table->overflow == 0
			? 0
			: DAMAGED;
	if (table->depth == 0 || table->depth > DEPTH_MAX)
		return DAMAGED;
	int rc = page_walk(&t, table->root, 0, (struct key){NULL, 0}, (struct key){NULL, 0});
	if (rc < 0)
		return rc;
	return t.branch == table->branch && t.leaf == table->leaf && t.overflow == table->overflow &&
			t.entries == table->entries
		? 0
		: DAMAGED;
}

/* Finds the meta page of the snapshot and fills in what the walk needs to know. Meta pages alternate: txnid n stands
 * on page n & 1. */
static int meta_get(struct walk *w, struct table *free_table, struct table *main_table)
{
	uint8_t m[PAGE_HEAD + 24 + 2 * TABLE_BYTES + 16];
	struct stat st;
	if (fstat(w->fd, &st) < 0 || read_at(w, 0, m, sizeof m) < 0)
		return DAMAGED;
	w->file_bytes = (uint64_t)st.st_size;
	w->page_bytes = base_get32(m + PAGE_HEAD + 24);
	if (w->page_bytes < 512 || w->page_bytes > 32768 || (w->page_bytes & (w->page_bytes - 1)) != 0)
		return DAMAGED;
	uint64_t number = w->txnid & 1;
	if (read_at(w, number * w->page_bytes, m, sizeof m) < 0)
		return DAMAGED;
	if (base_get64(m) != number || base_get16(m + 10) != PAGE_META || base_get32(m + PAGE_HEAD) != 0xBEEFC0DE ||
		base_get32(m + PAGE_HEAD + 4) != 1)
		return DAMAGED;
	if (base_get32(m + PAGE_HEAD + 24) != w->page_bytes)
		return DAMAGED;
	table_get(m + PAGE_HEAD + 24, free_table);
	table_get(m + PAGE_HEAD + 24 + TABLE_BYTES, main_table);
	w->npages = base_get64(m + PAGE_HEAD + 24 + 2 * TABLE_BYTES) + 1;
	if (base_get64(m + PAGE_HEAD + 24 + 2 * TABLE_BYTES + 8) != w->txnid)
		return DAMAGED;
	return w->npages < 2 || w->npages > PAGES_MAX ? DAMAGED : 0;
}

int index_pages_check(int fd, uint64_t txnid)
{
	struct walk w = {.fd = fd, .txnid = txnid};
	struct table free_table, main_table;
	int rc = meta_get(&w, &free_table, &main_table);
	if (rc < 0)
		return rc;
	w.used = calloc(1, w.npages / 8 + 1);
	w.free = calloc(1, w.npages / 8 + 1);
	rc = w.used && w.free ? 0 : -ENOMEM;
	if (rc == 0)
		rc = tree_walk(&w, TABLE_FREE, &free_table, 0);
	if (rc == 0)
		rc = tree_walk(&w, TABLE_MAIN, &main_table, 0);
	for (uint64_t n = 0; rc == 0 && n < w.npages / 8 + 1; n++)
		if (w.used[n] & w.free[n])
			rc = DAMAGED;
	free(w.used);
	free(w.free);
	for (unsigned n = 0; n < DEPTH_MAX; n++)
		free(w.page[n]);
	return rc;
}
