/* SPDX-License-Identifier: Apache-2.0
 *
 * Boxes of tensors in safetensors files: what HuggingFaceStorageWriter leaves where it does not put them together. */
#include "tools/vckpt/import/import_shards.h"

#include <fnmatch.h>
#include <string.h>

#include "core/base/array.h"
#include "tools/vckpt/import/import_chunks.h"

#define SHARDING_KEY "DCP_SHARDING_INFO"

int import_parts_read(struct import_file *f, uint64_t offset, struct import_parts *ret_p, struct base_error *err)
{
	struct import_parts p = {.offset = offset};
	size_t len = 0;
	int r = import_read_header(f, offset, &p.header, &len, err);

	if (r < 0)
		return r;
	r = view_safetensors_parse(p.header, len, (uint64_t)f->stat.st_size - offset, &p.s, err);
	if (r < 0) {
		free(p.header);
		return base_error_prefix(err, r, "%s", f->path);
	}
	for (uint32_t i = 0; i < p.s.nmetadata; i++)
		if (!strcmp(p.s.metadata[i].key, SHARDING_KEY)) {
			json_decref(p.sharding);
			p.sharding = json_loads(p.s.metadata[i].value, JSON_REJECT_DUPLICATES, NULL);
			if (!json_is_object(p.sharding)) /* else a part would be taken for the whole */
				r = -BASE_EFORMAT;
		}
	if (r < 0) {
		import_parts_release(&p);
		return base_error_set(err, r, "%s: its " SHARDING_KEY " is no JSON object", f->path);
	}
	p.numbers = json_object();
	for (uint32_t i = 0; r == 0 && i < p.s.ntensors; i++)
		r = json_object_setn_new(p.numbers, p.s.tensors[i].name, p.s.tensors[i].name_len, json_integer(i));
	if (r < 0) {
		import_parts_release(&p);
		return base_no_memory_for(err, "%s", f->path);
	}
	*ret_p = p;
	return 0;
}

int64_t import_parts_find(const struct import_parts *p, const char *name, size_t len)
{
	json_t *known = json_object_getn(p->numbers, name, len);

	return known ? json_integer_value(known) : -ENOENT;
}

int import_parts_box(const struct import_parts *p, uint32_t i, struct tensor_box *ret_box, struct base_error *err)
{
	const struct view_safetensors_tensor *t = &p->s.tensors[i];
	json_t *said = json_object_getn(p->sharding, t->name, t->name_len);
	json_t *offsets = json_object_get(said, "saved_offsets");

	tensor_box_whole(&t->shape, ret_box);
	if (!said)
		return 0;
	for (uint32_t d = 0; d < t->shape.ndim; d++) {
		json_int_t at = json_is_integer(json_array_get(offsets, d)) ?
			json_integer_value(json_array_get(offsets, d)) : -1;

		if (json_array_size(offsets) != t->shape.ndim || at < 0 || (uint64_t)at > INT64_MAX - t->shape.dim[d])
			return base_error_set(err, -BASE_EFORMAT, SHARDING_KEY
				" of tensor %.300s has no offset for each of its dimensions", t->name);
		ret_box->offset[d] = (uint64_t)at;
	}
	return 0;
}

void import_parts_release(struct import_parts *p)
{
	view_safetensors_release(&p->s);
	json_decref(p->sharding);
	json_decref(p->numbers);
	free(p->header);
}

/* ---- a directory ---- */

struct shard { size_t tensor; struct tensor_box box; struct import_file *file; uint64_t offset; };
struct shard_tensor { char *name; enum tensor_dtype dtype; struct tensor_shape shape; struct import_file *first;
	struct import_chunks *chunks; };

struct import_shards {
	struct import_plan *plan;
	const char *component;
	struct shard *shards; size_t n;
	struct shard_tensor *tensors; size_t ntensors;
	json_t *numbers;        /* {name: number in tensors} */
};

bool import_shards_is(const char *rel)
{
	return !strchr(rel, '/') && fnmatch("shard-*-model-*-of-*.safetensors", rel, 0) == 0;
}

int import_shards_new(struct import_plan *p, const char *component, struct import_shards **ret_s)
{
	struct import_shards *s = calloc(1, sizeof *s);

	if (!s || !(s->numbers = json_object())) {
		free(s);
		return -ENOMEM;
	}
	s->plan = p;
	s->component = component;
	*ret_s = s;
	return 0;
}

void import_shards_free(struct import_shards *s)
{
	if (!s)
		return;
	for (size_t i = 0; i < s->ntensors; i++) {
		free(s->tensors[i].name);
		import_chunks_free(s->tensors[i].chunks);
	}
	free(s->tensors);
	free(s->shards);
	json_decref(s->numbers);
	free(s);
}

/* The number of the tensor that a part belongs to. */
static int find_tensor(struct import_shards *s, const struct view_safetensors_tensor *t, struct import_file *f,
	size_t *ret_number, struct base_error *err)
{
	json_t *known = json_object_getn(s->numbers, t->name, t->name_len);
	struct shard_tensor *made;

	if (known) {
		const struct shard_tensor *whole = &s->tensors[*ret_number = (size_t)json_integer_value(known)];

		if (whole->dtype == t->dtype && whole->shape.ndim == t->shape.ndim)
			return 0;
		return base_error_set(err, -BASE_EFORMAT,
			"tensor %.300s has another dtype or other dimensions in %s than in %s", t->name, f->path,
			whole->first->path);
	}
	*ret_number = s->ntensors;
	if (base_array_more(s->tensors, s->ntensors) < 0)
		return base_no_memory(err);
	made = &s->tensors[s->ntensors];
	*made = (struct shard_tensor){strdup(t->name), t->dtype, {.ndim = t->shape.ndim}, f, NULL};
	if (!made->name)
		return base_no_memory(err);
	if (json_object_setn_new(s->numbers, t->name, t->name_len, json_integer((json_int_t)s->ntensors++)) < 0)
		return base_no_memory(err);
	return 0;
}

static int add_part(struct import_shards *s, struct import_file *f, const struct import_parts *p, uint32_t i,
	struct base_error *err)
{
	const struct view_safetensors_tensor *t = &p->s.tensors[i];
	struct shard made = {.file = f, .offset = p->offset + p->s.data_offset + t->begin};
	int r = import_parts_box(p, i, &made.box, err);
	struct tensor_shape *shape;

	if (r < 0)
		return base_error_prefix(err, r, "%s", f->path);
	r = find_tensor(s, t, f, &made.tensor, err);
	if (r < 0)
		return r;
	if (base_array_more(s->shards, s->n) < 0)
		return base_no_memory_for(err, "%s", f->path);
	s->shards[s->n++] = made;
	shape = &s->tensors[made.tensor].shape;
	for (uint32_t d = 0; d < shape->ndim; d++)
		shape->dim[d] = base_max(shape->dim[d], made.box.offset[d] + made.box.size[d]);
	return 0;
}

int import_shards_add(struct import_shards *s, const char *path, struct base_error *err)
{
	struct import_parts parts;
	struct import_file *f;
	int r = import_file_open(s->plan, path, &f, err);

	if (r < 0 || (r = import_parts_read(f, 0, &parts, err)) < 0)
		return r;
	for (uint32_t i = 0; r == 0 && i < parts.s.ntensors; i++)
		r = add_part(s, f, &parts, i, err);
	import_parts_release(&parts);
	return r;
}

static int make_chunks(struct import_shards *s)
{
	for (size_t i = 0; i < s->ntensors; i++)
		if (import_chunks_new(&s->tensors[i].shape, tensor_dtype_bytes(s->tensors[i].dtype),
				&s->tensors[i].chunks) < 0)
			return -ENOMEM;
	for (size_t i = 0; i < s->n; i++) {
		const struct shard *shard = &s->shards[i];
		struct import_chunk chunk = {shard->file, shard->offset, NULL};

		if (import_chunks_add(s->tensors[shard->tensor].chunks, &shard->box, &chunk) < 0)
			return -ENOMEM;
	}
	return 0;
}

int import_shards_finish(struct import_shards *s, struct base_error *err)
{
	int r = make_chunks(s);

	if (r < 0)
		return base_no_memory(err);
	for (size_t i = 0; r == 0 && i < s->ntensors; i++) {
		struct shard_tensor *t = &s->tensors[i];
		uint64_t items;

		if (tensor_shape_items(&t->shape, tensor_dtype_bytes(t->dtype), &items) < 0)
			r = base_error_set(err, -BASE_EFORMAT, "it is larger than a tensor can be");
		else
			r = import_chunks_finish(t->chunks, err);
		if (r < 0)
			return base_error_prefix(err, r, "tensor %.300s (%s and other shards)", t->name,
				t->first->path);
		r = import_add_chunks(s->plan, s->component, t->name, t->dtype, &t->shape, t->first,
			base_steal(t->chunks), err);
	}
	return r;
}
