/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes entries and places of the pickle's values. The classes below are all that torch writes there. An object of one
 * is written as the arguments of its call (args) and the fields that it gets (state). */
#include "core/foreign/dcp.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/base/table.h"
#include "core/foreign/tensor.h"
#include "proto/name.h"

#define METADATA "torch.distributed.checkpoint.metadata."
#define SHARDED "torch.distributed._shard.sharded_tensor.metadata."

/* builtins.getattr: Debian 12's Python 3.11.2 writes members of enumerations with it; later ones call the class. */
static const char *const classes[] = {
	METADATA "Metadata", METADATA "TensorStorageMetadata", METADATA "BytesStorageMetadata",
	METADATA "ChunkStorageMetadata", METADATA "TensorProperties", METADATA "MetadataIndex", METADATA "StorageMeta",
	METADATA "_MEM_FORMAT_ENCODING", SHARDED "TensorProperties", SHARDED "MEM_FORMAT_ENCODING",
	"torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout",
	"collections.OrderedDict", "pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath",
	"pathlib.WindowsPath", "pathlib._local.WindowsPath", "builtins.getattr", FOREIGN_DTYPE_CLASSES, NULL,
};
static const struct foreign_classes known = {classes, "DCP's metadata", false};

#define FIELDS_MAX 32u          /* of an object; Metadata, the longest, has 5 */
#define PATH_MAX_PARTS 64u

static int wrong(struct base_error *err, const char *what)
{
	return base_error_set(err, -BASE_EFORMAT, "not the metadata of a distributed checkpoint: %s", what);
}

static int wrong_key(struct base_error *err, const struct foreign_text *key, const char *what)
{
	return base_error_set(err, -BASE_EFORMAT, "%.*s: %s", (int)base_min(key->len, 300), key->bytes, what);
}

static bool is_utf8(const struct foreign_value *v)
{
	return v && v->kind == FOREIGN_TEXT && proto_utf8_valid(v->text.bytes, v->text.len);
}

/* The fields of an object whose class has this name, in any module. NULL: it is something else. */
static const struct foreign_items *fields_of(const struct foreign_value *v, const char *name)
{
	static const struct foreign_items none;

	if (!v || v->kind != FOREIGN_OBJECT || strcmp(strrchr(v->object->class, '.') + 1, name) != 0)
		return NULL;
	if (!v->object->state) /* an object without fields is written without a state */
		return &none;
	/* Many objects may share a state, and each searches it: so it must be short. */
	return v->object->state->kind == FOREIGN_DICT && v->object->state->items.n <= 2 * FIELDS_MAX ?
		&v->object->state->items : NULL;
}

/* A dict, or an OrderedDict; NULL: it is something else. */
static const struct foreign_items *pairs_of(const struct foreign_value *v)
{
	if (v && v->kind == FOREIGN_DICT)
		return &v->items;
	if (v && v->kind == FOREIGN_OBJECT && !strcmp(v->object->class, "collections.OrderedDict") &&
		(v->object->is_dict || !v->object->items.n))
		return &v->object->items;
	return NULL;
}

/* ---- places ---- */

struct place_row { struct foreign_text key; bool has_offset; uint64_t offset[TENSOR_MAX_DIMS]; uint32_t n;
	struct foreign_place place; };
struct places { struct place_row *rows; size_t n; struct base_table table; };

static uint32_t place_hash(const struct foreign_text *key, const uint64_t *offset, uint32_t n)
{
	return base_table_hash_in(base_table_hash(key->bytes, key->len), offset, n * sizeof *offset);
}

static int read_place(const struct foreign_value *v, const struct foreign_text *key, struct foreign_place *ret_p,
	struct base_error *err)
{
	const struct foreign_items *f = fields_of(v, "_StorageInfo");
	const struct foreign_value *path = f ? foreign_items_find(f, "relative_path") : NULL;
	const struct foreign_value *extensions = f ? foreign_items_find(f, "transform_descriptors") : NULL;
	const struct foreign_value *first;
	bool text;

	if (!path || path->kind != FOREIGN_TEXT || !foreign_natural(foreign_items_find(f, "offset"), &ret_p->offset) ||
		!foreign_natural(foreign_items_find(f, "length"), &ret_p->bytes))
		return wrong_key(err, key, "its place is not written as FileSystemWriter writes it");
	ret_p->path = path->text;
	if (!extensions || extensions->kind == FOREIGN_NONE)
		return 0;
	if ((extensions->kind == FOREIGN_LIST || extensions->kind == FOREIGN_TUPLE) && !extensions->items.n)
		return 0;
	first = extensions->kind == FOREIGN_LIST ? extensions->items.at[0] : extensions;
	text = is_utf8(first);
	return base_error_set(err, -BASE_EFORMAT,
		"%.*s: it was written through the extension %.*s, which vckpt does not have: load the checkpoint with "
		"torch and save it without extensions", (int)base_min(key->len, 300), key->bytes,
		text ? (int)base_min(first->text.len, 80) : 1, text ? first->text.bytes : "?");
}

static int read_index(const struct foreign_value *v, struct place_row *ret_row, struct base_error *err)
{
	const struct foreign_items *f = fields_of(v, "MetadataIndex");
	const struct foreign_value *key = f ? foreign_items_find(f, "fqn") : NULL;
	const struct foreign_value *offset = f ? foreign_items_find(f, "offset") : NULL;

	if (!is_utf8(key))
		return wrong(err, "a key of storage_data is no MetadataIndex, or its name is not UTF-8");
	ret_row->key = key->text;
	ret_row->has_offset = offset && offset->kind != FOREIGN_NONE;
	if (ret_row->has_offset && foreign_sizes(offset, ret_row->offset, &ret_row->n) < 0)
		return wrong_key(err, &ret_row->key, "the offset in storage_data is no list of numbers");
	return 0;
}

/* offset NULL: the entry is no tensor */
static const struct foreign_place *find_place(const struct places *p, const struct foreign_text *key,
	const uint64_t *offset, uint32_t n)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&p->table, place_hash(key, offset, n), &at)) != BASE_TABLE_NONE) {
		const struct place_row *row = &p->rows[i];

		if (row->key.len == key->len && (!key->len || !memcmp(row->key.bytes, key->bytes, key->len)) &&
			row->has_offset == (offset != NULL) && row->n == n &&
			(!n || !memcmp(row->offset, offset, n * sizeof *offset)))
			return &row->place;
	}
	return NULL;
}

static int read_places(const struct foreign_value *v, struct places *ret_p, struct base_error *err)
{
	const struct foreign_items *items = pairs_of(v);

	if (!items)
		return wrong(err, "storage_data is no dict");
	ret_p->rows = calloc(items->n / 2 + 1, sizeof *ret_p->rows);
	if (!ret_p->rows || base_table_reserve(&ret_p->table, items->n / 2) < 0)
		return base_no_memory(err);
	for (size_t i = 0; i < items->n / 2; i++) {
		struct place_row *row = &ret_p->rows[ret_p->n];
		int r = read_index(items->at[2 * i], row, err);

		if (r < 0 || (r = read_place(items->at[2 * i + 1], &row->key, &row->place, err)) < 0)
			return r;
		if (find_place(ret_p, &row->key, row->has_offset ? row->offset : NULL, row->n))
			return wrong_key(err, &row->key, "storage_data has the same place twice");
		base_table_add(&ret_p->table, place_hash(&row->key, row->offset, row->n), (uint32_t)ret_p->n++);
	}
	return 0;
}

/* ---- tensors ---- */

static const struct foreign_value *only_argument(const struct foreign_value *v)
{
	return v->kind == FOREIGN_OBJECT && v->object->args->items.n == 1 ? v->object->args->items.at[0] : NULL;
}

/* A member of torch's enumeration of memory formats, by its number or its name. */
static bool memory_format(const struct foreign_value *v, uint64_t *ret_number)
{
	static const char *const names[] = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"};
	const struct foreign_value *only = only_argument(v);
	const struct foreign_items *args;

	if (only)
		return foreign_natural(only, ret_number) && *ret_number < BASE_COUNT(names);
	if (v->kind != FOREIGN_OBJECT || strcmp(v->object->class, "builtins.getattr") != 0)
		return false;
	args = &v->object->args->items;
	if (args->n != 2 || args->at[0]->kind != FOREIGN_CLASS || !strstr(args->at[0]->class, "MEM_FORMAT_ENCODING"))
		return false;
	for (*ret_number = 0; *ret_number < BASE_COUNT(names); ++*ret_number)
		if (foreign_text_is(args->at[1], names[*ret_number]))
			return true;
	return false;
}

static int read_properties(const struct foreign_value *v, struct foreign_dcp_entry *e, struct base_error *err)
{
	const struct foreign_value *state = v && v->kind == FOREIGN_OBJECT ? v->object->state : NULL, *layout;
	uint64_t number;
	struct foreign_value *const *p;

	if (!state || state->kind != FOREIGN_TUPLE || state->items.n != 5 ||
		strcmp(strrchr(v->object->class, '.') + 1, "TensorProperties") != 0)
		return wrong_key(err, &e->key, "its properties are not written as torch writes them");
	p = state->items.at;
	if (p[0]->kind != FOREIGN_CLASS || strncmp(p[0]->class, "torch.", 6) != 0 ||
		foreign_dtype(p[0]->class + 6, strlen(p[0]->class + 6), &e->dtype, &e->kept) < 0)
		return wrong_key(err, &e->key, "its dtype is no type of torch's");
	layout = only_argument(p[1]);
	if (!foreign_text_is(layout, "torch.strided"))
		return wrong_key(err, &e->key, "its layout is not torch.strided: only dense tensors can be kept");
	if (!memory_format(p[3], &number))
		return wrong_key(err, &e->key, "its memory format is unknown");
	e->memory_format = (unsigned)number;
	e->requires_grad = p[2]->kind == FOREIGN_BOOL && p[2]->truth;
	e->pin_memory = p[4]->kind == FOREIGN_BOOL && p[4]->truth;
	return 0;
}

static int read_chunk(const struct foreign_value *v, struct foreign_dcp_entry *e, const struct places *places,
	struct base_error *err)
{
	const struct foreign_items *f = fields_of(v, "ChunkStorageMetadata");
	struct tensor_box box = {0};
	uint32_t n = 0, k = 0;
	char text[200];
	const struct foreign_place *place;

	if (!f || foreign_sizes(foreign_items_find(f, "offsets"), box.offset, &n) < 0 ||
		foreign_sizes(foreign_items_find(f, "sizes"), box.size, &k) < 0 || n != k || n != e->shape.ndim)
		return wrong_key(err, &e->key, "a chunk is not written as torch writes it");
	if (tensor_boxes_add(&e->chunks, &box) < 0)
		return base_no_memory(err);
	if (tensor_box_empty(n, &box))
		return 0;
	place = find_place(places, &e->key, box.offset, n);
	if (place) {
		e->places[e->chunks.n - 1] = *place;
		return 0;
	}
	tensor_box_text(n, &box, text, sizeof text);
	return base_error_set(err, -BASE_EFORMAT, "%.*s: storage_data does not say where its chunk %s is",
		(int)base_min(e->key.len, 300), e->key.bytes, text);
}

static int check_cover(const struct foreign_dcp_entry *e, struct base_error *err)
{
	struct tensor_cover fault;
	struct tensor_box a, b;
	char first[200], second[200], text[200];
	int shown = (int)base_min(e->key.len, 200), r = tensor_boxes_cover(&e->shape, &e->chunks, &fault);

	if (r == 0 || r == -ENOMEM)
		return r == 0 ? 0 : base_no_memory(err);
	if (r != -ERANGE && r != -EEXIST && r != -ENOENT)
		return wrong_key(err, &e->key, "it is larger than a tensor can be");
	tensor_box_text(e->shape.ndim, &fault.box, text, sizeof text);
	if (r == -ENOENT)
		return base_error_set(err, -BASE_EFORMAT, "%.*s: no chunk has its part %s", shown, e->key.bytes, text);
	tensor_boxes_get(&e->chunks, fault.a, &a);
	tensor_box_text(e->shape.ndim, &a, first, sizeof first);
	if (r == -ERANGE)
		return base_error_set(err, -BASE_EFORMAT, "%.*s: its chunk %s is outside of it", shown, e->key.bytes,
			first);
	tensor_boxes_get(&e->chunks, fault.b, &b);
	tensor_box_text(e->shape.ndim, &b, second, sizeof second);
	return base_error_set(err, -BASE_EFORMAT, "%.*s: its chunks %s and %s overlap in %s", shown, e->key.bytes,
		first, second, text);
}

static int read_tensor(const struct foreign_items *f, struct foreign_dcp_entry *e, const struct places *places,
	size_t *left, struct base_error *err)
{
	const struct foreign_value *chunks = foreign_items_find(f, "chunks");
	uint64_t items;
	int r = read_properties(foreign_items_find(f, "properties"), e, err);

	if (r < 0)
		return r;
	if (foreign_sizes(foreign_items_find(f, "size"), e->shape.dim, &e->shape.ndim) < 0 || !chunks ||
		chunks->kind != FOREIGN_LIST)
		return wrong_key(err, &e->key, "its size or its chunks are not written as torch writes them");
	if (tensor_shape_items(&e->shape, tensor_dtype_bytes(e->kept), &items) < 0)
		return wrong_key(err, &e->key, "it is larger than a tensor can be");
	e->chunks.ndim = e->shape.ndim;
	if (chunks->items.n > *left)
		return wrong_key(err, &e->key, "it has more chunks than the file can describe");
	*left -= chunks->items.n;
	e->places = calloc(chunks->items.n + 1, sizeof *e->places);
	if (!e->places)
		return base_no_memory(err);
	for (size_t i = 0; r == 0 && i < chunks->items.n; i++)
		r = read_chunk(chunks->items.at[i], e, places, err);
	return r < 0 ? r : check_cover(e, err);
}

static int read_entry(const struct foreign_value *key, const struct foreign_value *v, struct foreign_dcp_entry *e,
	const struct places *places, size_t *left, struct base_error *err)
{
	const struct foreign_items *tensor = fields_of(v, "TensorStorageMetadata");
	const struct foreign_place *place;

	if (!is_utf8(key) || !key->text.len)
		return wrong(err, "a key of state_dict_metadata is no text, or not UTF-8, or has a NUL");
	e->key = key->text;
	e->is_tensor = tensor != NULL;
	if (tensor)
		return read_tensor(tensor, e, places, left, err);
	if (!fields_of(v, "BytesStorageMetadata"))
		return wrong_key(err, &e->key, "it is neither a tensor nor bytes");
	place = find_place(places, &e->key, NULL, 0);
	if (!place)
		return wrong_key(err, &e->key, "storage_data does not say where it is");
	e->place = *place;
	return 0;
}

/* ---- the whole ---- */

/* left: how many chunks there may be, all together. Many tensors may share a list of chunks, so that without a limit
 * there could be far more chunks than the file has bytes. */
static int read_entries(const struct foreign_value *v, const struct places *places, size_t left, struct foreign_dcp *d,
	struct base_error *err)
{
	const struct foreign_items *items = pairs_of(v);

	if (!items)
		return wrong(err, "state_dict_metadata is no dict");
	d->entries = calloc(items->n / 2 + 1, sizeof *d->entries);
	if (!d->entries)
		return base_no_memory(err);
	for (size_t i = 0; i < items->n / 2; i++) {
		int r = read_entry(items->at[2 * i], items->at[2 * i + 1], &d->entries[d->nentries++], places, &left,
			err);

		if (r < 0)
			return r;
	}
	return 0;
}

static bool is_path(const struct foreign_value *v)
{
	if (v->kind != FOREIGN_TUPLE || !v->items.n || v->items.n > PATH_MAX_PARTS)
		return false;
	for (size_t i = 0; i < v->items.n; i++)
		if (v->items.at[i]->kind != FOREIGN_TEXT && v->items.at[i]->kind != FOREIGN_INT)
			return false;
	return true;
}

/* The default planner's planner_data: {key: path}. Also checks that no key is in the metadata twice. */
static int read_paths(const struct foreign_value *v, struct foreign_dcp *d, struct base_error *err)
{
	const struct foreign_items *items = pairs_of(v);
	struct base_table table = {0};
	int r = 0;

	d->paths = items != NULL;
	d->other_data = !items && v && v->kind != FOREIGN_NONE;
	for (size_t i = 0; items && i < items->n / 2; i++)
		if (items->at[2 * i]->kind != FOREIGN_TEXT || !is_path(items->at[2 * i + 1])) {
			d->paths = false;
			d->other_data = true;
		}
	if (base_table_reserve(&table, d->nentries) < 0)
		return base_no_memory(err);
	for (size_t i = 0; r == 0 && i < d->nentries + (d->paths ? items->n / 2 : 0); i++) {
		const struct foreign_value *key = i < d->nentries ? NULL : items->at[2 * (i - d->nentries)];
		const char *bytes = key ? key->text.bytes : d->entries[i].key.bytes;
		size_t len = key ? key->text.len : d->entries[i].key.len, at = 0;
		uint32_t hash = base_table_hash(bytes, len), found;

		while ((found = base_table_next(&table, hash, &at)) != BASE_TABLE_NONE)
			if (d->entries[found].key.len == len && !memcmp(d->entries[found].key.bytes, bytes, len))
				break;
		if (key && found != BASE_TABLE_NONE)
			d->entries[found].path = &items->at[2 * (i - d->nentries) + 1]->items;
		else if (!key && found != BASE_TABLE_NONE)
			r = wrong_key(err, &d->entries[i].key, "the metadata has the key twice");
		else if (!key)
			base_table_add(&table, hash, (uint32_t)i);
	}
	base_table_release(&table);
	return r;
}

int foreign_dcp_read(const void *bytes, size_t len, struct foreign_dcp *ret_d, struct base_error *err)
{
	struct foreign_pickle *p = NULL;
	struct foreign_dcp d = {0};
	struct places places = {0};
	const struct foreign_items *f;
	int r = foreign_pickle_read(bytes, len, &known, &p, err);

	if (r < 0)
		return r;
	d.pickle = p;
	f = fields_of(foreign_pickle_root(p), "Metadata");
	if (!f)
		r = wrong(err, "it holds something else");
	if (r == 0)
		r = read_places(foreign_items_find(f, "storage_data"), &places, err);
	if (r == 0)
		r = read_entries(foreign_items_find(f, "state_dict_metadata"), &places, len, &d, err);
	if (r == 0)
		r = read_paths(foreign_items_find(f, "planner_data"), &d, err);
	free(places.rows);
	base_table_release(&places.table);
	if (r < 0)
		foreign_dcp_release(&d);
	else
		*ret_d = d;
	return r;
}

void foreign_dcp_release(struct foreign_dcp *d)
{
	for (size_t i = 0; i < d->nentries; i++) {
		tensor_boxes_release(&d->entries[i].chunks);
		free(d->entries[i].places);
	}
	free(d->entries);
	foreign_pickle_free(d->pickle);
	*d = (struct foreign_dcp){0};
}
