/* SPDX-License-Identifier: Apache-2.0
 *
 * base: a commit whose pieces may be recognised by position: a piece of the same box, of a tensor of the same
 * component, name, dtype, shape and grid, however many ranks saved that commit and under whatever layout. Its parts
 * give each piece's digest and XXH3-128 (under the store's seed), and are trusted because a chain of SHA-256 leads to
 * them: commit entry -> manifest -> part -> chunk, and because this process wrote that part, or the user's index says
 * that a process of the user's did (trust.h). A piece of more than SAVE_BELIEVE_BYTES whose XXH3-128 is the one at its
 * position is taken for that piece; one in SAVE_BELIEVE_CHECK is hashed all the same. In a part of another
 * user only the digest counts, and only once the stored bytes were compared. A piece that a note of damage names
 * counts as missing, so it is hashed and stored anew (core/commit/notes/note.h).
 *
 * Only the manifest is opened at once; of the step that the same saver saved last not even that, but what this rank
 * knows of it (struct save_last), until more is needed. Layouts, parts and chunks are opened when they are needed, and
 * their number depends on what changed, never on the number of ranks (base_row.c). What cannot be read counts as
 * missing: the piece is then hashed and looked up.
 *
 * Threads: the appender opens bases and publishes them one after another (save_bases_add); workers see the first few of
 * them, and no base goes away. A row is reference-counted and does not change once made; bands hold those of their box.
 * The last few rows are kept, also empty ones; a row serves every box inside its own. The lock of a base is held while
 * its files are read, because other threads would read the same. */
#include "core/save/write/base_internal.h"

#include <stdio.h>
#include <string.h>

#include "core/base/bisect.h"
#include "core/base/log.h"
#include "core/save/write/trust.h"
#include "core/step/manifest.h"

#define BASE_CHUNKS_BYTES (UINT64_C(16) << 20) /* whole from eight ranks: a chunk of each at a time */
#define BASE_LAYOUTS_MAX 64u             /* layouts and parts of one base that are read at all */
#define BASE_LINES_MAX 1024u

/* ---- opening ---- */

static int base_components(struct save_base *b)
{
	return b->excerpt ? save_layout_components(b->layouts[0].layout, &b->components, &b->ncomponents)
		: save_components(&b->m, &b->components, &b->ncomponents);
}

static int base_open(struct save_base *b, struct store_layout *layout, struct base_error *err)
{
	int r = 0;

	if (b->excerpt) {
		b->m = b->excerpt->m;
		b->m.arena = NULL;
	} else {
		r = store_manifest_get(b->store, b->run, &b->manifest, &b->m, err);
	}
	if (r < 0)
		return r;
	b->layouts = calloc(b->m.nlayouts + 1, sizeof *b->layouts);
	b->lines = calloc(b->m.nranks + 1, sizeof *b->lines);
	b->chunks = store_chunk_cache_new(BASE_CHUNKS_BYTES, base_min(b->m.nranks, BASE_LAYOUTS_MAX));
	if (!b->layouts || !b->lines || !b->chunks)
		return base_no_memory(err);
	if (b->excerpt) {
		b->layouts[0] = (struct base_layout){.tried = true, .layout = layout};
		store_part_kept_give(&b->excerpt->part, b->chunks, layout);
	}
	if (base_components(b) < 0)
		return base_no_memory(err);
	b->own_line = save_base_find_line(b, b->rank);
	b->near = b->own_line == BASE_NO_LINE ? 0 : b->own_line;
	return 0;
}

static void base_free_layout(const struct save_base *b, struct base_layout *l)
{
	for (uint32_t i = 0; l->meshes && i < l->layout->m.nmeshes; i++)
		tensor_mesh_free(l->meshes[i]);
	free(l->meshes);
	if (!b->excerpt)
		store_layout_free(l->layout);
}

static void base_free(struct save_base *b)
{
	if (b->whole)
		base_free(b->whole);
	for (unsigned i = 0; i < BASE_ROWS; i++)
		save_base_row_put(b->rows[i]);
	store_chunk_cache_free(b->chunks);
	for (uint32_t i = 0; b->lines && i < b->m.nranks; i++)
		store_opened_part_release(&b->lines[i].opened);
	for (uint32_t i = 0; b->layouts && i < b->m.nlayouts; i++)
		base_free_layout(b, &b->layouts[i]);
	free(b->attempts.all);
	free(b->components);
	free(b->fits);
	free(b->layouts);
	free(b->lines);
	proto_manifest_release(&b->m);
	pthread_mutex_destroy(&b->lock);
	free(b);
}

static bool bases_have(const struct save_bases *all, const struct base_digest *manifest)
{
	bool has = false;

	for (unsigned i = 0; !has && i < save_bases_count(all); i++)
		has = base_digest_equal(&all->all[i]->manifest, manifest);
	return has;
}

struct save_base *save_bases_find(const struct save_bases *all, const char *run, uint64_t entry)
{
	for (unsigned i = 0; i < save_bases_count(all); i++) {
		struct save_base *b = all->all[i];

		if (b->open && b->entry == entry && strcmp(b->run, run) == 0)
			return b;
	}
	return NULL;
}

bool save_base_has_layout(const struct save_base *b, const struct base_digest *layout)
{
	bool has = false;

	for (uint32_t i = 0; b->open && !has && i < b->m.nlayouts; i++)
		has = base_digest_equal(&b->m.layouts[i].digest, layout);
	return has;
}

/* A base of the commit that `like` describes, not opened yet. NULL: out of memory. */
static struct save_base *base_new(const struct save_base *like)
{
	struct save_base *b = calloc(1, sizeof *b);

	if (!b)
		return NULL;
	pthread_mutex_init(&b->lock, NULL);
	b->store = like->store;
	memcpy(b->run, like->run, sizeof b->run);
	b->entry = like->entry;
	b->notes = like->notes;
	b->manifest = like->manifest;
	b->own = like->own;
	b->rank = like->rank;
	return b;
}

void save_base_unread(struct save_base *b, const struct base_error *why)
{
	base_debug("%s entry %llu: %s", b->run, (unsigned long long)b->entry, why->text);
	if (atomic_load_explicit(&b->unread, memory_order_relaxed))
		return;
	b->why = *why;
	atomic_store_explicit(&b->unread, true, memory_order_release);
}

static void base_try_open(struct save_base *b, struct store_layout *layout)
{
	struct base_error why = {0};

	b->open = base_open(b, layout, &why) == 0;
	if (!b->open)
		save_base_unread(b, &why);
}

struct save_base *save_base_whole(struct save_base *b)
{
	if (!b->excerpt)
		return b;
	if (!b->whole && (b->whole = base_new(b)) != NULL) {
		base_try_open(b->whole, NULL);
		if (!b->whole->open)
			save_base_unread(b, &b->whole->why);
	}
	return b->whole;
}

/* Is the step of that attempt the one that the last save left? With another layout the rank stores other boxes, so the
 * excerpt would not do. */
static bool bases_left(const struct save_bases *all, const char *attempt)
{
	const struct proto_manifest *m = all->last ? &all->last->m : NULL;

	return m && m->attempt && strcmp(m->attempt, attempt) == 0 &&
		base_digest_equal(&m->layouts[0].digest, &all->layout->digest);
}

static int bases_add(struct save_bases *all, struct store *s, const char *run, uint64_t entry,
	const struct base_digest *manifest, const char *attempt)
{
	unsigned n = save_bases_count(all);
	struct save_base like = {.store = s, .entry = entry, .notes = all->notes, .manifest = *manifest,
		.own = all->index && index_has_own(all->index, manifest), .rank = all->rank}, *b;

	if (n == SAVE_BASES_MAX || bases_have(all, manifest))
		return 0;
	snprintf(like.run, sizeof like.run, "%s", run);
	b = base_new(&like);
	if (!b)
		return -ENOMEM;
	b->excerpt = attempt && bases_left(all, attempt) ? all->last : NULL;
	base_try_open(b, all->layout);
	all->all[n] = b;
	if (all->decided && save_base_decide(all, b, &all->room) < 0) {
		base_free(b);
		return -ENOMEM;
	}
	atomic_store_explicit(&all->n, n + 1, memory_order_release);
	return 0;
}

int save_bases_add(struct save_bases *all, struct store *s, const char *run, uint64_t entry,
	const struct base_digest *manifest)
{
	return bases_add(all, s, run, entry, manifest, NULL);
}

int save_bases_add_step(struct save_bases *all, struct store *s, const char *run, const struct commit_list_step *step)
{
	return bases_add(all, s, run, step->entry, &step->commit.manifest, step->commit.attempt);
}

void save_bases_release(struct save_bases *all)
{
	for (unsigned i = 0; i < save_bases_count(all); i++)
		base_free(all->all[i]);
	free(all->attempts.all);
	*all = (struct save_bases){0};
}

/* ---- layouts and lines ---- */

const struct store_layout *save_base_open_layout(struct save_base *b, uint32_t layout)
{
	struct base_error why = {0};

	if (layout >= b->m.nlayouts)
		return NULL;
	if (!b->layouts[layout].tried) {
		if (b->nlayouts == BASE_LAYOUTS_MAX)
			return NULL;
		b->nlayouts++;
		b->layouts[layout].tried = true;
		if (store_open_layout(b->store, &b->m, layout, &b->layouts[layout].layout, &why) < 0)
			save_base_unread(b, &why);
	}
	return b->layouts[layout].layout;
}

const struct tensor_mesh *save_base_mesh(struct save_base *b, uint32_t layout, uint32_t tensor)
{
	struct base_layout *l = &b->layouts[layout];
	uint32_t number = l->layout->m.tensors[tensor].mesh;

	if (number == 0)
		return NULL;
	if (!l->meshes)
		l->meshes = calloc(l->layout->m.nmeshes, sizeof *l->meshes);
	if (l->meshes && !l->meshes[number - 1] &&
		store_layout_mesh(l->layout, tensor, &l->meshes[number - 1], NULL) < 0)
		return NULL;
	return l->meshes ? l->meshes[number - 1] : NULL;
}

static int base_open_part(struct save_base *b, uint32_t line, struct base_error *err)
{
	struct store_opened_part *p = &b->lines[line].opened;

	return b->excerpt && b->excerpt->part.part.arena
		? store_open_part_known(&b->m, line, &b->excerpt->part.part, p, err)
		: store_open_part(b->store, &b->m, line, p, err);
}

const struct store_opened_part *save_base_part(struct save_base *b, uint32_t line)
{
	struct base_error why = {0};

	if (!b->lines[line].tried) {
		if (b->nlines == BASE_LINES_MAX)
			return NULL;
		b->nlines++;
		b->lines[line].tried = true;
		b->lines[line].trusted = b->own || save_trust_has(&b->m.ranks[line].part.digest);
		b->lines[line].good = base_open_part(b, line, &why) == 0;
		if (!b->lines[line].good)
			save_base_unread(b, &why);
	}
	return b->lines[line].good ? &b->lines[line].opened : NULL;
}

uint32_t save_base_find_line(const struct save_base *b, uint32_t rank)
{
	uint32_t at;

	if (rank < b->m.nranks && b->m.ranks[rank].rank == rank) /* nearly always */
		return rank;
	at = base_bisect(i, 0, b->m.nranks, b->m.ranks[i].rank < rank);
	return at < b->m.nranks && b->m.ranks[at].rank == rank ? at : BASE_NO_LINE;
}

/* ---- rows ---- */

/* A kept row that covers the box. */
static struct save_base_row *base_find_row(const struct save_base *b, uint32_t tensor, const struct tensor_box *box)
{
	for (unsigned i = 0; i < BASE_ROWS; i++) {
		const struct base_row *row = (const struct base_row *)b->rows[i];

		if (row && row->tensor == tensor && save_base_row_covers(row, box))
			return b->rows[i];
	}
	return NULL;
}

struct save_base_row *save_base_row_get(struct save_base *b, const struct store_layout *l, uint32_t tensor,
	const struct tensor_box *box)
{
	struct save_base_row *row = NULL;
	struct save_base *whole = NULL;

	if (!b->open || store_layout_bytes(l, tensor) <= STORE_INLINE_MAX_BYTES)
		return NULL;
	pthread_mutex_lock(&b->lock);
	row = base_find_row(b, tensor, box);
	if (!row) {
		row = (struct save_base_row *)save_base_gather(b, l, tensor, box);
		if (row && b->excerpt && !save_base_row_full((struct base_row *)row)) {
			save_base_row_put(row);
			row = NULL;
			whole = save_base_whole(b);
		}
		if (row) {
			save_base_row_put(b->rows[b->next % BASE_ROWS]);
			b->rows[b->next++ % BASE_ROWS] = row;
		}
	}
	if (row)
		atomic_fetch_add_explicit(&row->refs, 1, memory_order_relaxed);
	pthread_mutex_unlock(&b->lock);
	return whole ? save_base_row_get(whole, l, tensor, box) : row;
}

void save_base_row_put(struct save_base_row *row)
{
	if (row && atomic_fetch_sub_explicit(&row->refs, 1, memory_order_acq_rel) == 1)
		save_base_row_free((struct base_row *)row);
}

/* The base's piece at that position, whether it may be referred to or not. */
static const struct store_piece *base_piece_at(const struct save_base_row *of, const struct tensor_box *piece,
	uint64_t len, const char **ret_pack)
{
	const struct base_row *row = (const struct base_row *)of;
	const struct base_part *part;
	const struct store_piece *p;
	uint64_t number;
	size_t box;

	if (!of || !save_base_row_find(row, piece, &box, &number))
		return NULL;
	part = &row->parts[row->from[box].part];
	p = &part->row.pieces[row->from[box].first + number];
	if (p->inline_bytes || p->ref.raw_len != len)
		return NULL;
	*ret_pack = part->packs[p->ref.pack]; /* in range: the chunk was decoded with the table's size */
	return p;
}

static bool base_gone(const struct save_base_row *row)
{
	return atomic_load_explicit(&row->base->gone, memory_order_relaxed);
}

const struct store_piece *save_base_piece(const struct save_base_row *row, const struct tensor_box *piece, uint64_t len,
	const char **ret_pack)
{
	const struct store_piece *p = row && !base_gone(row) ? base_piece_at(row, piece, len, ret_pack) : NULL;

	return p && !commit_notes_name(row->base->notes, *ret_pack, &p->ref) ? p : NULL;
}

/* Why this save does not refer to a piece of the base. */
static void base_lost_piece(const struct save_base_row *row, const struct store_piece *p, const char *pack,
	struct base_error *err)
{
	const struct save_base *b = row->base;

	if (base_gone(row))
		base_error_set(err, -ENOENT, "run %s entry %llu was removed meanwhile", b->run,
			(unsigned long long)b->entry);
	else if (commit_notes_name(b->notes, pack, &p->ref))
		base_error_set(err, -BASE_EDAMAGED, "vckpt verify found data of pack %s damaged", pack);
	else
		base_error_set(err, -EIO, "data of pack %s cannot be used", pack);
}

bool save_bases_lost(const struct save_bases *all, struct save_base_row *const *rows, unsigned n,
	const struct tensor_box *piece, uint64_t len, const struct base_digest *digest, struct base_error *err)
{
	for (unsigned i = 0; i < n; i++) {
		const struct save_base *b = rows[i] ? rows[i]->base : all->all[i];
		const char *pack;
		const struct store_piece *p = base_piece_at(rows[i], piece, len, &pack);
		bool unread = !p && atomic_load_explicit(&b->unread, memory_order_acquire);

		if (p && !base_digest_equal(&p->ref.digest, digest))
			return false;
		if (p)
			base_lost_piece(rows[i], p, pack, err);
		else if (unread)
			*err = b->why;
		if (p || unread)
			return true;
	}
	*err = all->unread;
	return all->unread.code != 0;
}

bool save_base_trusts(const struct save_base_row *of, const struct store_piece *p)
{
	const struct base_row *row = (const struct base_row *)of;

	for (uint32_t i = 0; of->trusted && i < row->nparts; i++)
		if (p >= row->parts[i].row.pieces && p < row->parts[i].row.pieces + row->parts[i].row.npieces)
			return row->parts[i].trusted;
	return false;
}

static void base_place(const struct save_base *b, const struct pack_object_ref *ref, const char *pack,
	struct index_place *ret_place)
{
	save_place_of(ref, pack, ret_place);
	memcpy(ret_place->run, b->run, sizeof b->run);
	ret_place->entry = b->entry;
	ret_place->manifest = b->manifest;
}

void save_base_place(const struct save_base_row *row, const struct store_piece *p, const char *pack,
	struct index_place *ret_place)
{
	base_place(row->base, &p->ref, pack, ret_place);
}

/* A layout is hashed when it is opened. */
static bool base_has_layout(struct save_base *b, uint32_t layout)
{
	bool has;

	pthread_mutex_lock(&b->lock);
	has = save_base_open_layout(b, layout) != NULL;
	pthread_mutex_unlock(&b->lock);
	return has;
}

/* An excerpt names the copy that this rank referred to the last time. The manifest names that of the step, so an older
 * one is not kept for ever. */
static struct save_base *base_newer(struct save_base *b)
{
	struct save_base *whole;

	pthread_mutex_lock(&b->lock);
	whole = b->whole;
	pthread_mutex_unlock(&b->lock);
	return whole && whole->open ? whole : b;
}

int save_base_layout_place(struct save_base *b, const struct base_digest *layout, struct index_place *ret_place)
{
	b = base_newer(b);
	for (uint32_t i = 0; b->open && i < b->m.nlayouts; i++) {
		struct pack_object_ref ref = pack_object_ref_from(&b->m.layouts[i].ref);

		if (!base_digest_equal(&b->m.layouts[i].digest, layout) || ref.pack >= b->m.npacks ||
			!base_has_layout(b, i))
			continue;
		base_place(b, &ref, b->m.packs[ref.pack].pack, ret_place);
		return 0;
	}
	return -ENOENT;
}

bool save_base_blob(struct save_base *b, const struct base_digest *digest, uint64_t len,
	struct index_place *ret_place, bool *ret_trusted)
{
	struct save_base *whole = save_base_whole(b);
	const struct store_opened_part *part = NULL;

	if (whole && whole->open && whole->own_line != BASE_NO_LINE)
		part = save_base_part(whole, whole->own_line);
	for (uint32_t i = 0; part && i < part->part.nblobs; i++) {
		const struct proto_blob *blob = &part->part.blobs[i];
		struct pack_object_ref ref = pack_object_ref_from(&blob->ref);

		if (blob->len != len || !base_digest_equal(&ref.digest, digest) || ref.pack >= part->npacks)
			continue;
		base_place(b, &ref, part->packs[ref.pack], ret_place);
		*ret_trusted = whole->lines[whole->own_line].trusted;
		return true;
	}
	return false;
}

int save_base_name(struct save_base *b, struct save_dedup *d, struct commit_attempt *a, struct base_error *err)
{
	int r = save_dedup_name(d, a, b->run, b->entry, &b->manifest, err);

	if (r == -ENOENT)
		atomic_store_explicit(&b->gone, true, memory_order_relaxed);
	return r;
}
