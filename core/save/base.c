/* SPDX-License-Identifier: Apache-2.0
 *
 * base: a commit whose pieces may be recognised by position: a tensor of the same component, name, dtype, shape and
 * grid, so that piece n has the same box. Its part says each piece's digest and XXH3-128 (under the store's seed), and
 * is itself believed by its SHA-256 chain: commit entry -> manifest -> part -> chunk. A piece of more than
 * SAVE_BELIEVE_BYTES whose XXH3-128 is the one at its position is believed to be that piece; one in
 * SAVE_BELIEVE_CHECK is hashed all the same.
 *
 * Opened are manifest and layouts; parts when a tensor of their layout is first asked for, chunks of rows as they are
 * reached, few of them kept. Whatever cannot be read is as if it were not there: the piece is then hashed and looked
 * up.
 *
 * Threads: the appender opens bases and publishes them one after another (save_bases_add); workers see some first ones
 * of them and never one go. A row is reference-counted: bands hold those of their tensor. The last few rows are kept,
 * misses too. */
#include "core/save/save_internal.h"

#include <stdio.h>

#include "core/base/log.h"
#include "core/store/manifest.h"

#define BASE_LAYOUT_MAX (UINT64_C(2) << 30)
#define BASE_PART_MAX (UINT64_C(1) << 30)
#define BASE_CHUNKS_BYTES (UINT64_C(2) << 20)
#define BASE_ROWS 16u
#define BASE_LINES_MAX 64u               /* writers of a layout that are asked for a tensor */

struct base_line { bool tried, good; struct proto_part part; const char **packs; };

struct save_base {
	struct store *store;
	char run[PROTO_RUN_MAX + 1];
	uint64_t entry;
	struct base_digest manifest;
	atomic_bool gone;
	bool open;                              /* false: nothing is recognised by it */
	struct proto_manifest m;
	struct store_layout **layouts;
	pthread_mutex_t lock;                   /* protects all below */
	struct base_line *lines;                /* by rank line of the manifest */
	struct store_chunk_cache *chunks;
	struct save_base_row *rows[BASE_ROWS]; unsigned next;
};

struct base_row {
	struct save_base_row row;       /* first: what callers see */
	uint32_t tensor;                /* in the layout that is being saved */
	bool good;                      /* false: the base has no such tensor */
	struct tensor_grid grid;
	struct store_row of;
	const char *const *packs;
};

/* ---- opening ---- */

static int base_open_layout(struct save_base *b, uint32_t i, struct base_error *err)
{
	const struct proto_manifest_layout *from = &b->m.layouts[i];
	base_cleanup_free void *bytes = NULL;
	int rc = store_manifest_object(b->store, &b->m, &from->ref, BASE_LAYOUT_MAX, &bytes, err);

	if (rc == 0)
		rc = store_layout_decode(bytes, from->ref.raw_len, &b->layouts[i], err);
	if (rc == 0 && !base_digest_equal(&from->digest, &b->layouts[i]->digest))
		rc = base_error_set(err, -BASE_EFORMAT, "layout %u is not the one that the manifest means", i);
	return rc;
}

static int base_open(struct save_base *b, struct base_error *err)
{
	int rc = store_manifest_get(b->store, b->run, &b->manifest, &b->m, err);

	if (rc < 0)
		return rc;
	b->layouts = calloc(b->m.nlayouts + 1, sizeof *b->layouts);
	b->lines = calloc(b->m.nranks + 1, sizeof *b->lines);
	b->chunks = store_chunk_cache_new(BASE_CHUNKS_BYTES);
	if (!b->layouts || !b->lines || !b->chunks)
		return base_error_set(err, -ENOMEM, "out of memory");
	for (uint32_t i = 0; rc == 0 && i < b->m.nlayouts; i++)
		rc = base_open_layout(b, i, err);
	return rc;
}

static void base_free(struct save_base *b)
{
	for (unsigned i = 0; i < BASE_ROWS; i++)
		save_base_row_put(b->rows[i]);
	store_chunk_cache_free(b->chunks);
	for (uint32_t i = 0; b->lines && i < b->m.nranks; i++) {
		if (b->lines[i].good)
			proto_part_release(&b->lines[i].part);
		free(b->lines[i].packs);
	}
	for (uint32_t i = 0; b->layouts && i < b->m.nlayouts; i++)
		store_layout_free(b->layouts[i]);
	free(b->layouts);
	free(b->lines);
	proto_manifest_release(&b->m);
	pthread_mutex_destroy(&b->lock);
	free(b);
}

int save_bases_add(struct save_bases *all, struct store *s, const char *run, uint64_t entry,
	const struct base_digest *manifest)
{
	unsigned n = save_bases_count(all);
	struct base_error why = {0};
	struct save_base *b;

	for (unsigned i = 0; i < n; i++)
		if (base_digest_equal(&all->all[i]->manifest, manifest))
			return 0;
	if (n == SAVE_BASES_MAX)
		return 0;
	b = calloc(1, sizeof *b);
	if (!b)
		return -ENOMEM;
	pthread_mutex_init(&b->lock, NULL);
	b->store = s;
	snprintf(b->run, sizeof b->run, "%s", run);
	b->entry = entry;
	b->manifest = *manifest;
	b->open = base_open(b, &why) == 0;
	if (!b->open)
		base_debug("%s entry %llu recognises nothing: %s", run, (unsigned long long)entry, why.text);
	all->all[n] = b;
	atomic_store_explicit(&all->n, n + 1, memory_order_release);
	return 0;
}

void save_bases_release(struct save_bases *all)
{
	for (unsigned i = 0; i < save_bases_count(all); i++)
		base_free(all->all[i]);
	atomic_store(&all->n, 0);
}

/* ---- rows ---- */

static int base_open_line(struct save_base *b, uint32_t i)
{
	const struct proto_manifest_rank *from = &b->m.ranks[i];
	struct base_line *line = &b->lines[i];
	base_cleanup_free void *bytes = NULL;

	if (line->tried)
		return line->good ? 0 : -ENOENT;
	line->tried = true;
	if (from->first_map > b->m.nmap || from->npacks > b->m.nmap - from->first_map)
		return -ENOENT;
	line->packs = calloc(from->npacks + 1, sizeof *line->packs);
	if (!line->packs)
		return -ENOMEM;
	for (uint32_t k = 0; k < from->npacks; k++) {
		if (b->m.map[from->first_map + k] >= b->m.npacks)
			return -ENOENT;
		line->packs[k] = b->m.packs[b->m.map[from->first_map + k]].pack;
	}
	if (store_manifest_object(b->store, &b->m, &from->part, BASE_PART_MAX, &bytes, NULL) < 0
		|| proto_part_decode(bytes, from->part.raw_len, &line->part) < 0)
		return -ENOENT;
	line->good = line->part.npacks == from->npacks;
	if (!line->good)
		proto_part_release(&line->part);
	return line->good ? 0 : -ENOENT;
}

/* Number of the tensor in layout `i` of the base, if it is the same one: name, dtype, shape, grid. */
static int64_t base_find_tensor(const struct save_base *b, uint32_t i, const struct store_layout *l, uint32_t tensor)
{
	const struct store_layout *mine = b->layouts[i];
	struct tensor_shape x, y;
	uint32_t len;
	const char *name = store_layout_name(l, tensor, &len);
	int64_t n = store_layout_find(mine, store_layout_component(l, tensor), name, len);

	if (n < 0 || mine->m.min_bytes != l->m.min_bytes || mine->m.target_bytes != l->m.target_bytes
		|| mine->m.row_bytes != l->m.row_bytes)
		return -ENOENT;
	store_layout_shape(mine, (uint32_t)n, &x);
	store_layout_shape(l, tensor, &y);
	if (!tensor_shape_equal(&x, &y) || store_layout_dtype(mine, (uint32_t)n) != store_layout_dtype(l, tensor))
		return -ENOENT;
	return n;
}

static bool base_read_row(struct save_base *b, uint32_t layout, uint32_t tensor, struct base_row *row)
{
	unsigned asked = 0;

	for (uint32_t i = 0; i < b->m.nranks && asked < BASE_LINES_MAX; i++) {
		const struct base_line *line = &b->lines[i];

		if (b->m.ranks[i].layout != layout)
			continue;
		asked++;
		if (base_open_line(b, i) < 0 || store_part_read_row_cached(b->chunks, b->store, b->layouts[layout],
			&line->part, line->packs, b->m.ranks[i].npacks, tensor, &row->of, NULL) < 0)
			continue;
		row->good = row->of.whole;
		if (row->good) {
			row->packs = line->packs;
			return true;
		}
		store_row_release(&row->of); /* boxes of several writers: other pieces */
	}
	return false;
}

static struct save_base_row *base_make_row(struct save_base *b, const struct store_layout *l, uint32_t tensor)
{
	struct base_row *row = calloc(1, sizeof *row);

	if (!row)
		return NULL;
	atomic_init(&row->row.refs, 1);
	row->row.base = b;
	row->tensor = tensor;
	store_layout_grid(l, tensor, &row->grid);
	for (uint32_t i = 0; i < b->m.nlayouts; i++) {
		int64_t n = base_find_tensor(b, i, l, tensor);

		if (n >= 0 && base_read_row(b, i, (uint32_t)n, row))
			break;
	}
	return &row->row;
}

struct save_base_row *save_base_row_get(struct save_base *b, const struct store_layout *l, uint32_t tensor,
	const struct tensor_box *box)
{
	struct save_base_row *row = NULL;

	(void)box;
	if (!b->open)
		return NULL;
	pthread_mutex_lock(&b->lock);
	for (unsigned i = 0; !row && i < BASE_ROWS; i++)
		if (b->rows[i] && ((struct base_row *)b->rows[i])->tensor == tensor)
			row = b->rows[i];
	if (!row) {
		row = base_make_row(b, l, tensor);
		if (row) {
			save_base_row_put(b->rows[b->next % BASE_ROWS]);
			b->rows[b->next++ % BASE_ROWS] = row;
		}
	}
	if (row)
		atomic_fetch_add_explicit(&row->refs, 1, memory_order_relaxed);
	pthread_mutex_unlock(&b->lock);
	return row;
}

void save_base_row_put(struct save_base_row *row)
{
	if (!row || atomic_fetch_sub_explicit(&row->refs, 1, memory_order_acq_rel) != 1)
		return;
	store_row_release(&((struct base_row *)row)->of);
	free(row);
}

const struct store_piece *save_base_piece(const struct save_base_row *row, const struct tensor_box *piece, uint64_t len,
	const char **ret_pack)
{
	const struct base_row *r = (const struct base_row *)row;
	const struct store_piece *p;
	struct tensor_box whole, there;
	size_t bytes;
	uint64_t n;

	if (!row || !r->good || atomic_load_explicit(&row->base->gone, memory_order_relaxed))
		return NULL;
	bytes = r->grid.shape.ndim * sizeof piece->offset[0];
	n = tensor_piece_find(&r->grid, piece->offset);
	tensor_box_whole(&r->grid.shape, &whole);
	if (n >= r->of.npieces || tensor_piece_at(&r->grid, &whole, n, &there) < 0
		|| memcmp(there.offset, piece->offset, bytes) != 0 || memcmp(there.size, piece->size, bytes) != 0)
		return NULL;
	p = &r->of.pieces[n];
	if (p->inline_bytes || p->ref.raw_len != len)
		return NULL;
	*ret_pack = r->packs[p->ref.pack]; /* in range: the chunk was decoded with the table's size */
	return p;
}

void save_base_place(const struct save_base_row *row, const struct store_piece *p, const char *pack,
	struct index_place *ret_place)
{
	const struct save_base *b = row->base;

	memset(ret_place, 0, sizeof *ret_place);
	ret_place->digest = p->ref.digest;
	ret_place->offset = p->ref.offset;
	ret_place->checks = p->ref.checks;
	ret_place->raw_len = p->ref.raw_len;
	ret_place->stored_len = p->ref.stored_len;
	ret_place->codec = p->ref.codec;
	ret_place->kind = p->ref.kind;
	memccpy(ret_place->pack, pack, 0, sizeof ret_place->pack - 1);
	memcpy(ret_place->run, b->run, sizeof b->run);
	ret_place->entry = b->entry;
	ret_place->manifest = b->manifest;
}

int save_base_name(struct save_base *b, struct save_dedup *d, struct store_attempt *a, struct base_error *err)
{
	int rc = save_dedup_name(d, a, b->run, b->entry, &b->manifest, err);

	if (rc == -ENOENT)
		atomic_store_explicit(&b->gone, true, memory_order_relaxed);
	return rc;
}
