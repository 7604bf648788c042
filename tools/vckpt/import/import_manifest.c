/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads manifest.json. See import_manifest.h.
 *
 * The path of a tensor's .npy follows from its component and name, so it is computed, and the manifest must agree.
 * A blob's path cannot be computed, since blobs give way to other files: the manifest's is used. If no file has it, the
 * walk does not meet it and the blob is reported as missing. */
#include "tools/vckpt/import/import_manifest.h"

#include <stdio.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/view/name.h"
#include "core/view/safetensors.h"
#include "proto/name.h"

/* An item of one of the lists, for sentences: PATH: LIST[NUMBER].FIELD. */
struct item {
	const struct import_manifest *m;
	const char *list;
	size_t number;
	const json_t *value;
	struct base_error *err;
};

static int bad(const struct item *at, const char *field, const char *what)
{
	return base_error_set(at->err, -BASE_EFORMAT, "%s: %s[%zu].%s %s", at->m->path, at->list, at->number, field,
		what);
}

static int bad_value(const struct item *at, const char *field, const char *what, const char *value)
{
	return base_error_set(at->err, -BASE_EFORMAT, "%s: %s[%zu].%s %s: '%.300s'", at->m->path, at->list, at->number,
		field, what, value);
}

static int no_memory(const struct item *at)
{
	return base_no_memory_for(at->err, "%s", at->m->path);
}

static int take_text(const struct item *at, const char *field, const char **ret_text)
{
	*ret_text = json_string_value(json_object_get(at->value, field));
	return *ret_text ? 0 : bad(at, field, "is missing or not a string");
}

static int take_number(const struct item *at, const char *field, const json_t *value, uint64_t max, uint64_t *ret)
{
	json_int_t v = json_is_integer(value) ? json_integer_value(value) : -1;

	if (v < 0 || (uint64_t)v > max)
		return bad(at, field, "is missing or not a possible number");
	*ret = (uint64_t)v;
	return 0;
}

static int take_name(const struct item *at, const char **ret_name, size_t *ret_len)
{
	int r = take_text(at, "name", ret_name);

	if (r < 0)
		return r;
	*ret_len = strlen(*ret_name);
	if (*ret_len == 0 || *ret_len > PROTO_NAME_MAX || !proto_utf8_valid(*ret_name, *ret_len))
		return bad(at, "name", "is not a name: 1 to 65535 bytes of UTF-8");
	return 0;
}

/* Puts a number under a key of a look-up; a key that is there already is an error of the field. */
static int put(const struct item *at, json_t *table, const char *key, json_int_t number, const char *field)
{
	if (json_object_get(table, key))
		return bad_value(at, field, "is given twice", key);
	return json_object_set_new(table, key, json_integer(number)) < 0 ? no_memory(at) : 0;
}

/* ---- components ---- */

static int put_weights(struct import_manifest *m, const struct item *at, const char *component, const char *field,
	const json_t *file)
{
	const char *path = json_string_value(file);

	if (!path || !view_files_path_valid(path))
		return bad(at, field, "is not the path of a .safetensors");
	if (json_object_get(m->weights, path))
		return bad_value(at, field, "is given twice", path);
	return json_object_set_new(m->weights, path, json_string(component)) < 0 ? no_memory(at) : 0;
}

/* The files that hold a component as .safetensors; if none is given, it is the one that has its name. */
static int take_weights(struct import_manifest *m, const struct item *at, const char *component)
{
	const json_t *one = json_object_get(at->value, "safetensors"), *several = json_object_get(at->value, "files");
	char own[PROTO_COMPONENT_MAX + 16];
	int r = 0;

	if (json_is_string(one))
		return put_weights(m, at, component, "safetensors", one);
	if (several && (!json_is_array(several) || json_array_size(several) == 0))
		return bad(at, "files", "is not a list of paths");
	for (size_t i = 0; r == 0 && i < json_array_size(several); i++)
		r = put_weights(m, at, component, "files", json_array_get(several, i));
	if (several)
		return r;
	snprintf(own, sizeof own, "%s.safetensors", component);
	if (json_object_get(m->weights, own)) /* another's file has the name */
		return 0;
	return json_object_set_new(m->weights, own, json_string(component)) < 0 ? no_memory(at) : 0;
}

static int take_component(struct import_manifest *m, const struct item *at)
{
	const char *name;
	int r = take_text(at, "name", &name);

	if (r < 0)
		return r;
	if (!proto_component_valid(name))
		return bad_value(at, "name", "cannot be the name of a component", name);
	if ((r = put(at, m->components, name, 1, "name")) < 0)
		return r;
	return take_weights(m, at, name);
}

/* ---- tensors ---- */

static char *key_of(const char *component, const char *name, size_t name_len)
{
	char *key;

	return asprintf(&key, "%s/%.*s", component, (int)name_len, name) < 0 ? NULL : key;
}

static int take_shape(const struct item *at, struct import_manifest_tensor *t)
{
	const json_t *shape = json_object_get(at->value, "shape");
	uint64_t items;

	if (!json_is_array(shape) || json_array_size(shape) > TENSOR_MAX_DIMS)
		return bad(at, "shape", "is not a list of at most 16 numbers");
	for (; t->shape.ndim < json_array_size(shape); t->shape.ndim++) {
		int r = take_number(at, "shape", json_array_get(shape, t->shape.ndim), INT64_MAX,
			&t->shape.dim[t->shape.ndim]);

		if (r < 0)
			return r;
	}
	if (tensor_shape_items(&t->shape, tensor_dtype_bytes(t->dtype), &items) < 0)
		return bad(at, "shape", "overflows");
	return 0;
}

/* The file that it names must be its .npy, or a .safetensors of its component. */
static int take_file(struct import_manifest *m, const struct item *at, const struct import_manifest_tensor *t)
{
	char name[VIEW_FILE_NAME_BYTES];
	base_cleanup_free char *npy = NULL;
	const char *file, *component;
	int r = take_text(at, "file", &file);

	if (r < 0)
		return r;
	view_name_escape(t->name, t->name_len, ".npy", name);
	npy = key_of(t->component, name, strlen(name));
	if (!npy)
		return no_memory(at);
	component = import_manifest_weights_file(m, file);
	if (strcmp(file, npy) != 0 && !(component && !strcmp(component, t->component)))
		return bad_value(at, "file", "is not where this tensor belongs", file);
	return put(at, m->by_file, npy, (json_int_t)at->number, "file");
}

static int take_tensor(struct import_manifest *m, const struct item *at)
{
	struct import_manifest_tensor *t = &m->tensors[at->number];
	const char *dtype;
	int r = take_text(at, "component", &t->component);
	base_cleanup_free char *key = NULL;

	if (r < 0)
		return r;
	if (!json_object_get(m->components, t->component))
		return bad_value(at, "component", "is not one of the components", t->component);
	if ((r = take_name(at, &t->name, &t->name_len)) < 0 || (r = take_text(at, "dtype", &dtype)) < 0)
		return r;
	if (tensor_dtype_parse(dtype, &t->dtype) < 0)
		return bad_value(at, "dtype", "is not a dtype", dtype);
	if ((r = take_shape(at, t)) < 0 || (r = take_file(m, at, t)) < 0)
		return r;
	key = key_of(t->component, t->name, t->name_len);
	return key ? put(at, m->by_name, key, (json_int_t)at->number, "name") : no_memory(at);
}

/* ---- blobs ---- */

static int take_blob(struct import_manifest *m, const struct item *at)
{
	struct import_manifest_blob *b = &m->blobs[at->number];
	const json_t *rank = json_object_get(at->value, "rank");
	uint64_t number = 0;
	size_t len;
	int r = take_name(at, &b->name, &len);

	if (r < 0 || (r = take_text(at, "file", &b->file)) < 0)
		return r;
	if ((r = take_number(at, "bytes", json_object_get(at->value, "bytes"), INT64_MAX, &b->bytes)) < 0)
		return r;
	b->per_rank = rank != NULL;
	if (rank && (r = take_number(at, "rank", rank, UINT32_MAX, &number)) < 0)
		return r;
	b->rank = (uint32_t)number;
	if (import_manifest_weights_file(m, b->file))
		return bad_value(at, "file", "is given twice", b->file);
	return put(at, m->by_file, b->file, -1 - (json_int_t)at->number, "file");
}

/* ---- the whole ---- */

static int take_attributes(struct import_manifest *m, struct base_error *err)
{
	json_t *all = json_object_get(m->root, "attributes"), *value;
	const char *key;

	if (!json_is_object(all))
		return base_error_set(err, -BASE_EFORMAT, "%s: attributes is missing or not an object", m->path);
	if (json_object_size(all) > PROTO_ATTRIBUTES_MAX)
		return base_error_set(err, -BASE_EFORMAT, "%s: %zu attributes, and a step has at most %d", m->path,
			json_object_size(all), PROTO_ATTRIBUTES_MAX);
	m->attributes = calloc(json_object_size(all) + 1, sizeof *m->attributes);
	if (!m->attributes)
		return base_no_memory_for(err, "%s", m->path);
	json_object_foreach(all, key, value) {
		if (!proto_attribute_key_valid(key) || !json_is_string(value))
			return base_error_set(err, -BASE_EFORMAT,
				"%s: attributes: '%.100s' is no key of an attribute, or its value is not a string",
				m->path, key);
		m->attributes[m->nattributes++] = (struct proto_attribute){key, json_string_value(value)};
	}
	return 0;
}

/* Calls take for each object of a list. */
static int take_list(struct import_manifest *m, const char *list,
	int (*take)(struct import_manifest *m, const struct item *at), struct base_error *err)
{
	const json_t *all = json_object_get(m->root, list);
	int r = 0;

	if (!json_is_array(all))
		return base_error_set(err, -BASE_EFORMAT, "%s: %s is missing or not a list", m->path, list);
	for (size_t i = 0; r == 0 && i < json_array_size(all); i++) {
		struct item at = {m, list, i, json_array_get(all, i), err};

		r = json_is_object(at.value) ? take(m, &at)
					     : base_error_set(err, -BASE_EFORMAT, "%s: %s[%zu] is not an object",
						       m->path, list, i);
	}
	return r;
}

static int take_all(struct import_manifest *m, struct base_error *err)
{
	int r;

	m->ntensors = json_array_size(json_object_get(m->root, "tensors"));
	m->nblobs = json_array_size(json_object_get(m->root, "blobs"));
	m->tensors = calloc(m->ntensors + 1, sizeof *m->tensors);
	m->blobs = calloc(m->nblobs + 1, sizeof *m->blobs);
	m->components = json_object();
	m->by_name = json_object();
	m->by_file = json_object();
	m->weights = json_object();
	if (!m->tensors || !m->blobs || !m->components || !m->by_name || !m->by_file || !m->weights)
		return base_no_memory_for(err, "%s", m->path);
	r = take_attributes(m, err);
	if (r == 0)
		r = take_list(m, "components", take_component, err);
	if (r == 0)
		r = take_list(m, "tensors", take_tensor, err);
	return r == 0 ? take_list(m, "blobs", take_blob, err) : r;
}

bool import_manifest_begins(const char *text, size_t len)
{
	static const char *const tokens[] = {"{", "\"run\""};
	size_t at = 0;

	for (size_t i = 0; i < BASE_COUNT(tokens); i++) {
		size_t n = strlen(tokens[i]);

		while (at < len && strchr(" \t\r\n", text[at]) && text[at])
			at++;
		if (len - at < n || memcmp(text + at, tokens[i], n) != 0)
			return false;
		at += n;
	}
	return true;
}

int import_manifest_parse(const char *path, const char *text, size_t len, struct import_manifest **ret_m,
	struct base_error *err)
{
	json_error_t fault;
	json_auto_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &fault);
	int r;
	struct import_manifest *m;

	if (!root && import_manifest_begins(text, len))
		return base_error_set(err, -BASE_EFORMAT, "%s: line %d: not JSON: %s", path, fault.line, fault.text);
	if (!json_object_get(root, "run") || !json_object_get(root, "components"))
		return 1;
	m = calloc(1, sizeof *m);
	if (!m)
		return base_no_memory_for(err, "%s", path);
	m->root = base_steal(root);
	m->path = strdup(path);
	r = m->path ? take_all(m, err) : base_no_memory_for(err, "%s", path);
	if (r < 0)
		import_manifest_free(m);
	else
		*ret_m = m;
	return r;
}

void import_manifest_free(struct import_manifest *m)
{
	if (!m)
		return;
	json_decref(m->root);
	json_decref(m->components);
	json_decref(m->by_name);
	json_decref(m->by_file);
	json_decref(m->weights);
	free(m->tensors);
	free(m->blobs);
	free(m->attributes);
	free(m->path);
	free(m);
}

/* ---- look-ups ---- */

struct import_manifest_tensor *import_manifest_tensor(const struct import_manifest *m, const char *component,
	const char *name, size_t name_len)
{
	base_cleanup_free char *key = key_of(component, name, name_len);
	const json_t *number = key ? json_object_get(m->by_name, key) : NULL;

	return number ? &m->tensors[json_integer_value(number)] : NULL;
}

struct import_manifest_tensor *import_manifest_tensor_file(const struct import_manifest *m, const char *file)
{
	const json_t *number = json_object_get(m->by_file, file);

	return number && json_integer_value(number) >= 0 ? &m->tensors[json_integer_value(number)] : NULL;
}

const char *import_manifest_weights_file(const struct import_manifest *m, const char *file)
{
	return json_string_value(json_object_get(m->weights, file));
}

struct import_manifest_blob *import_manifest_blob_file(const struct import_manifest *m, const char *file)
{
	const json_t *number = json_object_get(m->by_file, file);

	return number && json_integer_value(number) < 0 ? &m->blobs[-1 - json_integer_value(number)] : NULL;
}

bool import_manifest_component(const struct import_manifest *m, const char *name, size_t len)
{
	char text[PROTO_COMPONENT_MAX + 1];

	return len < sizeof text && snprintf(text, sizeof text, "%.*s", (int)len, name) > 0 &&
		json_object_get(m->components, text) != NULL;
}
