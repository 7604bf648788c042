/* SPDX-License-Identifier: Apache-2.0
 *
 * alike: see alike.h.
 *
 * A rank's rows of both steps are walked side by side, several ranks at once, a chunk of each side in memory. What has
 * to be alike of a row is its key; the keys of a rank are numbered. Then one thread puts ranks together, in order: a
 * class is known by the class that the tensor had before the rank's row, the rank's line, and the number of the key.
 * Classes that no tensor is in any more are dropped from time to time, so that they do not grow with ranks. Keys are
 * compared byte for byte, so that no store can choose what is taken for alike. Memory: for each tensor of a layout its
 * class, and three classes at most, and of some ranks 12 bytes a row and the keys. */
#include "core/load/open/alike.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/table.h"
#include "core/load/open/step_internal.h"
#include "core/storage/spread.h"

#define ALIKE_LINES 64u                     /* ranks that are walked before they are put together */
#define ALIKE_ROOT 0u                       /* the class of a tensor without rows */
#define ALIKE_CLASSES 1024u                 /* further ones that may be empty */

struct alike_key { size_t at, len; uint64_t pieces; };
struct alike_row { uint32_t tensor, key; bool differs; }; /* key: its number, or LOAD_ALIKE_NONE */
struct alike_line {
	struct alike_row *rows; size_t n, room;
	struct alike_key *keys; uint32_t nkeys, keys_room;
	struct base_table table;
	struct base_buf bytes;           /* of keys */
};

struct alike_class { uint32_t parent, line, key; uint64_t pieces; };
struct alike_tensor { uint32_t class; bool differs; };

struct load_alike {
	struct load_step *step[2];       /* no references */
	const char *component;
	struct alike_tensor *tensors; size_t ntensors; /* those of layout l from first[l] on */
	size_t *first;
	struct alike_class *classes; uint32_t nclasses, classes_room, nkept; /* nkept: by the last classes_keep */
	struct base_table table;         /* of those since then: no other has a line that comes */
	struct alike_line lines[ALIKE_LINES]; uint32_t first_line; /* under way */
};

static void line_release(struct alike_line *l)
{
	free(l->rows);
	free(l->keys);
	base_table_release(&l->table);
	base_buf_release(&l->bytes);
	*l = (struct alike_line){0};
}

void load_alike_free(struct load_alike *k)
{
	if (!k)
		return;
	for (uint32_t i = 0; i < ALIKE_LINES; i++)
		line_release(&k->lines[i]);
	base_table_release(&k->table);
	free(k->classes);
	free(k->first);
	free(k->tensors);
	free(k);
}

BASE_CLEANUP_DEFINE(struct load_alike *, load_alike_free)

/* Then both number tensors alike. */
static bool steps_fit(const struct load_step *a, const struct load_step *b)
{
	const struct proto_manifest *m = &a->manifest, *n = &b->manifest;

	if (m->nranks < 2 || m->nranks != n->nranks || m->nlayouts != n->nlayouts)
		return false;
	for (uint32_t i = 0; i < m->nlayouts; i++)
		if (!base_digest_equal(&m->layouts[i].digest, &n->layouts[i].digest))
			return false;
	for (uint32_t i = 0; i < m->nranks; i++)
		if (m->ranks[i].rank != n->ranks[i].rank || m->ranks[i].layout != n->ranks[i].layout)
			return false;
	return true;
}

static const struct store_layout *line_layout(const struct load_alike *k, unsigned side, uint32_t line)
{
	return k->step[side]->layouts[k->step[side]->manifest.ranks[line].layout].layout;
}

/* ---- rows of a rank ---- */

/* The number of the key that ends the line's bytes: a new one, if there is no such key. */
static int key_find(struct alike_line *line, size_t key, uint64_t pieces, uint32_t *ret_key)
{
	size_t len = line->bytes.len - key, at = 0;
	uint32_t hash = base_table_hash(line->bytes.data + key, len), i;

	while ((i = base_table_next(&line->table, hash, &at)) != BASE_TABLE_NONE)
		if (line->keys[i].len == len &&
			memcmp(line->bytes.data + line->keys[i].at, line->bytes.data + key, len) == 0) {
			line->bytes.len = key;
			*ret_key = i;
			return 0;
		}
	if (base_array_room(line->keys, line->keys_room, (size_t)line->nkeys + 1) < 0 ||
		base_table_reserve(&line->table, 1) < 0)
		return -ENOMEM;
	line->keys[line->nkeys] = (struct alike_key){key, len, pieces};
	base_table_add(&line->table, hash, line->nkeys);
	*ret_key = line->nkeys++;
	return 0;
}

/* y NULL: only one side has the row. */
static int row_add(struct alike_line *line, const struct store_layout *l, const struct store_row_face *x,
	const struct store_row_face *y)
{
	const struct proto_layout_tensor *tensor = &l->m.tensors[x->tensor];
	const uint32_t words[] = {tensor->mesh, tensor->placement, tensor->dtype, tensor->ndim, x->whole};
	size_t key = line->bytes.len;
	struct alike_row *row;

	if (base_array_room(line->rows, line->room, line->n + 1) < 0)
		return -ENOMEM;
	row = &line->rows[line->n++];
	*row = (struct alike_row){x->tensor, LOAD_ALIKE_NONE, true};
	if (!y || x->whole != y->whole || x->boxes_len != y->boxes_len ||
		memcmp(x->boxes, y->boxes, x->boxes_len) != 0)
		return 0;
	row->differs = !base_digest_equal(&x->digest, &y->digest);
	base_buf_append(&line->bytes, words, sizeof words);
	if (tensor->ndim)
		base_buf_append(&line->bytes, l->m.dims + tensor->first_dim, tensor->ndim * sizeof *l->m.dims);
	base_buf_append(&line->bytes, x->boxes, x->boxes_len);
	return line->bytes.error ? -ENOMEM : key_find(line, key, x->npieces, &row->key);
}

/* The rows of one side. */
struct alike_walk {
	const struct load_alike *k;
	unsigned side; uint32_t line;
	const struct store_opened_part *part;
	uint32_t next;                   /* chunk */
	struct store_chunk *chunk; uint32_t row; /* the next; chunk NULL: none is under way */
	struct store_row_face face;
};

/* The first chunk goes into the step's cache: mostly it has the first tensors of classes, which are opened next. */
static void walk_release(struct alike_walk *w)
{
	if (w->chunk && w->next == 1)
		store_part_chunk_give(w->k->step[w->side]->chunks, line_layout(w->k, w->side, w->line), &w->part->part,
			w->part->npacks, 0, w->chunk);
	else
		store_chunk_free(w->chunk);
	w->chunk = NULL;
}

static bool chunk_wanted(const struct load_alike *k, const struct store_layout *l, const struct proto_chunk *c)
{
	return !k->component || c->last_tensor >= l->m.ntensors ||
		(strcmp(store_layout_component(l, c->first_tensor), k->component) <= 0 &&
			strcmp(store_layout_component(l, c->last_tensor), k->component) >= 0);
}

/* 1: w->face is the next row; 0: there is none. */
static int walk_next(struct alike_walk *w, struct base_error *err)
{
	const struct store_layout *l = line_layout(w->k, w->side, w->line);
	int r = 0;

	while (!w->chunk || w->row == store_chunk_rows(w->chunk)) {
		walk_release(w);
		w->row = 0;
		while (w->next < w->part->part.nchunks && !chunk_wanted(w->k, l, &w->part->part.chunks[w->next]))
			w->next++;
		if (w->next == w->part->part.nchunks)
			return 0;
		r = store_part_chunk(w->k->step[w->side]->store, l, &w->part->part, w->part->packs, w->part->npacks,
			w->next++, &w->chunk, err);
		if (r < 0)
			return r;
	}
	store_chunk_face(w->chunk, w->row++, &w->face);
	return 1;
}

static int line_walk(void *arg, uint32_t number, struct base_error *err)
{
	struct load_alike *k = arg;
	struct alike_line *line = &k->lines[number];
	base_cleanup(walk_release) struct alike_walk x = {.k = k, .line = k->first_line + number};
	base_cleanup(walk_release) struct alike_walk y = {.k = k, .line = k->first_line + number, .side = 1};
	int r = load_step_part(k->step[0], x.line, &x.part, err), more_x = 0, more_y = 0;

	if (r == 0)
		r = load_step_part(k->step[1], y.line, &y.part, err);
	if (r == 0)
		r = more_x = walk_next(&x, err);
	if (r >= 0)
		r = more_y = walk_next(&y, err);
	if (r < 0)
		return r;
	r = 0;
	while (r == 0 && (more_x || more_y)) {
		bool at_x = more_x && (!more_y || x.face.tensor <= y.face.tensor);
		bool at_y = more_y && (!more_x || y.face.tensor <= x.face.tensor);

		r = row_add(line, line_layout(k, 0, x.line), at_x ? &x.face : &y.face, at_x && at_y ? &y.face : NULL);
		if (at_x && (more_x = walk_next(&x, err)) < 0)
			return more_x;
		if (at_y && (more_y = walk_next(&y, err)) < 0)
			return more_y;
	}
	return r;
}

/* ---- classes ---- */

static int class_find(struct load_alike *k, uint32_t parent, uint32_t line, uint32_t key, uint64_t pieces,
	uint32_t *ret_class)
{
	uint32_t hash = base_table_hash_in((uint64_t)parent << 32 | line, &key, sizeof key), i;
	size_t at = 0;

	while ((i = base_table_next(&k->table, hash, &at)) != BASE_TABLE_NONE)
		if (k->classes[i].parent == parent && k->classes[i].line == line && k->classes[i].key == key) {
			*ret_class = i;
			return 0;
		}
	if (base_array_room(k->classes, k->classes_room, (size_t)k->nclasses + 1) < 0 ||
		base_table_reserve(&k->table, 1) < 0)
		return -ENOMEM;
	k->classes[k->nclasses] = (struct alike_class){parent, line, key, k->classes[parent].pieces + pieces};
	base_table_add(&k->table, hash, k->nclasses);
	*ret_class = k->nclasses++;
	return 0;
}

static int line_take(struct load_alike *k, uint32_t number, struct alike_line *line)
{
	struct alike_tensor *tensors = k->tensors + k->first[k->step[0]->manifest.ranks[number].layout];
	int r = 0;

	for (size_t i = 0; r == 0 && i < line->n; i++) {
		const struct alike_row *row = &line->rows[i];
		struct alike_tensor *t = &tensors[row->tensor];

		t->differs |= row->differs;
		if (row->key == LOAD_ALIKE_NONE || t->class == LOAD_ALIKE_NONE)
			t->class = LOAD_ALIKE_NONE;
		else
			r = class_find(k, t->class, number, row->key, line->keys[row->key].pieces, &t->class);
	}
	line_release(line);
	return r;
}

/* Keeps the classes that have tensors, under new numbers. */
static int classes_keep(struct load_alike *k)
{
	base_cleanup_free uint32_t *to = calloc(k->nclasses, sizeof *to);
	uint32_t n = ALIKE_ROOT + 1;

	if (!to)
		return -ENOMEM;
	for (size_t i = 0; i < k->ntensors; i++)
		if (k->tensors[i].class != LOAD_ALIKE_NONE)
			to[k->tensors[i].class] = 1;
	to[ALIKE_ROOT] = ALIKE_ROOT;
	for (uint32_t i = ALIKE_ROOT + 1; i < k->nclasses; i++)
		if (to[i]) {
			k->classes[n] = k->classes[i];
			to[i] = n++;
		}
	for (size_t i = 0; i < k->ntensors; i++)
		if (k->tensors[i].class != LOAD_ALIKE_NONE)
			k->tensors[i].class = to[k->tensors[i].class];
	k->nclasses = k->nkept = n;
	base_table_clear(&k->table);
	return 0;
}

static int alike_make(struct load_alike *k)
{
	const struct proto_manifest *m = &k->step[0]->manifest;
	int r = 0;

	k->first = calloc((size_t)m->nlayouts + 1, sizeof *k->first);
	for (uint32_t i = 0; k->first && i < m->nlayouts; k->ntensors += k->step[0]->layouts[i++].layout->m.ntensors)
		k->first[i] = k->ntensors;
	k->tensors = calloc(k->ntensors + 1, sizeof *k->tensors);
	if (!k->first || !k->tensors || base_array_room(k->classes, k->classes_room, 1) < 0)
		return -ENOMEM;
	k->classes[k->nclasses++] = (struct alike_class){.parent = LOAD_ALIKE_NONE};
	for (; r == 0 && k->first_line < m->nranks; k->first_line += ALIKE_LINES) {
		uint32_t lines = base_min(m->nranks - k->first_line, ALIKE_LINES);

		r = storage_spread_long(lines, line_walk, k, NULL);
		for (uint32_t i = 0; r == 0 && i < lines; i++) {
			r = line_take(k, k->first_line + i, &k->lines[i]);
			if (r == 0 && k->nclasses / 2 > k->nkept + ALIKE_CLASSES / 2)
				r = classes_keep(k);
		}
	}
	return r;
}

int load_alike_new(struct load_step *a, struct load_step *b, const char *component, struct load_alike **ret_a)
{
	base_cleanup(load_alike_free_p) struct load_alike *k = NULL;
	int r;

	*ret_a = NULL;
	if (!steps_fit(a, b))
		return 0;
	k = calloc(1, sizeof *k);
	if (!k)
		return -ENOMEM;
	*k = (struct load_alike){.step = {a, b}, .component = component};
	r = alike_make(k);
	if (r == 0)
		*ret_a = base_steal(k);
	return r == -ENOMEM ? r : 0;
}

uint32_t load_alike_class(const struct load_alike *k, uint32_t tensor, bool *ret_equal, uint64_t *ret_pieces)
{
	const struct load_tensor_place *p = &k->step[0]->tensors[tensor];
	const struct alike_tensor *t = &k->tensors[k->first[p->layout] + p->tensor];
	uint32_t other;

	if (t->class == LOAD_ALIKE_NONE || t->class == ALIKE_ROOT ||
		load_step_layout_more(k->step[0], tensor, &other))
		return LOAD_ALIKE_NONE;
	*ret_equal = !t->differs;
	*ret_pieces = k->classes[t->class].pieces;
	return t->class;
}

uint32_t load_alike_classes(const struct load_alike *k) { return k->nclasses; }
