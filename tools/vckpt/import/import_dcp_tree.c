/* SPDX-License-Identifier: Apache-2.0
 *
 * The documents of a step that a DCP checkpoint becomes:
 *
 *   .dcp/metadata.json   what vckpt.dcp.StorageReader gives DCP: a text for each key
 *   COMPONENT.json       what vckpt.load takes values from: the state as it was before DCP made it flat
 *
 * A tree in the making has nodes [kind, content]: a leaf's content is its value, a dict's and a list's an object of
 * nodes (of a list by their numbers, since they come in any order). */
#include "tools/vckpt/import/import_dcp.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/cleanup.h"

#define VALUES_MAX_BYTES ((size_t)64 << 20)
#define GAPS_MAX ((size_t)1 << 20)
#define DOCUMENT ".dcp/metadata.json"

enum node { LEAF, DICT, LIST };

/* ---- trees ---- */

static enum node node_kind(const json_t *node)
{
	return (enum node)json_integer_value(json_array_get(node, 0));
}

static json_t *node_content(const json_t *node)
{
	return json_array_get(node, 1);
}

static int clash(struct import_dcp *d, size_t entry)
{
	const struct foreign_text *key = &d->metadata.entries[entry].key;

	return base_error_set(d->err, -BASE_EFORMAT, "%s: the path of key %.*s and that of another key contradict each "
		"other", d->file->path, (int)base_min(key->len, 300), key->bytes);
}

/* The node of `object` under a key: it, or a new one of this kind. NULL: it has another kind. */
static json_t *node_under(json_t *object, const char *key, size_t len, enum node kind)
{
	json_t *node = json_object_getn(object, key, len);

	if (node)
		return kind != LEAF && node_kind(node) == kind ? node : NULL;
	node = json_pack("[i, o]", (int)kind, kind == LEAF ? json_null() : json_object());
	return json_object_setn_new(object, key, len, node) < 0 ? NULL : node;
}

static enum node kind_below(const struct foreign_items *path, size_t at)
{
	if (at >= path->n)
		return LEAF;
	return path->at[at]->kind == FOREIGN_TEXT ? DICT : LIST;
}

/* The new leaf at the end of a path; the first part names the component's root. NULL: another key has the leaf. */
static json_t *walk(struct import_dcp *d, const char *component, const struct foreign_items *path)
{
	json_t *node = node_under(d->trees, component, strlen(component), kind_below(path, 1));

	for (size_t i = 1; node && i < path->n; i++) {
		const struct foreign_value *v = path->at[i];
		char number[24];
		int len;

		if (v->kind == FOREIGN_TEXT) {
			node = node_under(node_content(node), v->text.bytes, v->text.len, kind_below(path, i + 1));
			continue;
		}
		if (v->number < 0 || (uint64_t)v->number >= d->metadata.nentries)
			return NULL;
		len = snprintf(number, sizeof number, "%" PRId64, v->number);
		node = node_under(node_content(node), number, (size_t)len, kind_below(path, i + 1));
	}
	return node;
}

void import_dcp_component(const struct import_dcp *d, size_t entry, char component[static PROTO_COMPONENT_MAX + 1])
{
	const struct import_place *p = &d->places[entry];
	bool alone = !p->nested && !d->metadata.entries[entry].is_tensor;

	/* a value by itself, such as an epoch, is a component by itself; one with a dot is part of a flat state, which
	 * is the component `model` */
	alone = alone && !strchr(p->name, '.') && strcmp(p->name, IMPORT_COMPONENT) != 0;
	alone = alone && proto_component_valid(p->name) && !json_object_get(d->trees, p->name);
	snprintf(component, PROTO_COMPONENT_MAX + 1, "%s", alone ? p->name : p->component);
}

int import_dcp_leaf(struct import_dcp *d, size_t entry, json_t *leaf)
{
	const struct foreign_dcp_entry *e = &d->metadata.entries[entry];
	const struct import_place *p = &d->places[entry];
	char component[PROTO_COMPONENT_MAX + 1];
	struct foreign_value key = {.kind = FOREIGN_TEXT, .text = e->key};
	struct foreign_value *parts[] = {&key, &key};
	struct foreign_items alone = {parts, 2, 2};
	json_t *node;

	import_dcp_component(d, entry, component);
	if (strcmp(component, p->component) != 0)
		alone.n = 1;
	if (!leaf)
		return base_no_memory(d->err);
	node = walk(d, component, p->nested ? e->path : &alone);
	if (node)
		return json_array_set_new(node, 1, leaf) < 0 ? base_no_memory(d->err) : 0;
	json_decref(leaf);
	return clash(d, entry);
}

/* As docs/format/values.md has it. As deep as paths are long (core/foreign/dcp.h). gaps: how many items of lists may
 * still be missing; 0 afterwards: more were. */
static json_t *finish_node(const json_t *node, size_t *gaps)
{
	json_t *content = node_content(node), *child, *made;
	bool plain = true;
	const char *key;
	size_t n = 0;

	if (node_kind(node) == LEAF)
		return json_incref(content);
	json_object_foreach(content, key, child) {
		plain = plain && *key != '$';
		if (node_kind(node) == LIST)
			n = base_max(n, strtoull(key, NULL, 10) + 1);
	}
	made = node_kind(node) == LIST || !plain ? json_array() : json_object();
	for (size_t i = 0; i < n && *gaps; i++) {
		char number[24];

		snprintf(number, sizeof number, "%zu", i);
		child = json_object_get(content, number);
		*gaps -= !child;
		json_array_append_new(made, child ? finish_node(child, gaps) : json_null());
	}
	if (node_kind(node) == LIST)
		return made;
	json_object_foreach(content, key, child) {
		if (plain)
			json_object_set_new(made, key, finish_node(child, gaps));
		else
			json_array_append_new(made, json_pack("[s, o]", key, finish_node(child, gaps)));
	}
	return plain ? made : json_pack("{s:o}", "$dict", made);
}

static int add_document(struct import_dcp *d, const char *name, json_t *root, size_t most)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	int r = root ? import_dcp_write(root, most, &b) : -ENOMEM;
	size_t len;
	char *text;

	json_decref(root);
	if (r == -EFBIG)
		return base_error_set(d->err, -BASE_ELIMIT, "%s: %s would have more than %zu MiB", d->file->path, name,
			most >> 20);
	if (r < 0)
		return base_no_memory_for(d->err, "%s", d->file->path);
	len = b.len;
	text = base_buf_steal_text(&b);
	if (!text)
		return base_no_memory_for(d->err, "%s", d->file->path);
	return import_add_text(d->plan, d->file, name, text, len, d->err);
}

static int add_trees(struct import_dcp *d)
{
	const char *component;
	size_t gaps = GAPS_MAX;
	json_t *node;
	int r = 0;

	json_object_foreach(d->trees, component, node) {
		char name[PROTO_COMPONENT_MAX + 8];
		json_auto_t *value = NULL;

		snprintf(name, sizeof name, "%s.json", component);
		value = finish_node(node, &gaps);
		if (gaps == 0)
			return base_error_set(d->err, -BASE_ELIMIT, "%s: the lists of %s lack more than %zu items",
				d->file->path, component, GAPS_MAX);
		r = add_document(d, name, json_pack("{s:i, s:O}", "$vckpt", 1, "value", value),
			VALUES_MAX_BYTES);
		if (r < 0)
			break;
	}
	return r;
}

/* ---- .dcp/metadata.json ---- */

static json_t *tensor_json(const struct foreign_dcp_entry *e, const struct import_place *p)
{
	static const char *const formats[] = {"contiguous", "channels_last", "preserve"};
	json_t *made = json_pack("{s:s, s:s, s:s, s:o}", "component", p->component, "name", p->name, "dtype", e->dtype,
		"shape", tool_json_shape(&e->shape));

	if (e->requires_grad)
		json_object_set_new(made, "requires_grad", json_true());
	if (e->pin_memory)
		json_object_set_new(made, "pin_memory", json_true());
	if (e->memory_format)
		json_object_set_new(made, "memory_format", json_string(formats[e->memory_format]));
	return made;
}

static json_t *path_json(const struct foreign_items *path)
{
	json_t *made = json_array();

	for (size_t i = 0; i < path->n; i++) {
		const struct foreign_value *v = path->at[i];

		json_array_append_new(made, v->kind == FOREIGN_TEXT ? json_stringn(v->text.bytes, v->text.len) :
			json_integer(v->number));
	}
	return made;
}

static int add_metadata(struct import_dcp *d)
{
	json_auto_t *keys = json_object();

	for (size_t i = 0; i < d->metadata.nentries; i++) {
		const struct foreign_dcp_entry *e = &d->metadata.entries[i];
		json_t *made = e->is_tensor ? tensor_json(e, &d->places[i]) : json_pack("{s:b}", "bytes", 1);

		if (d->metadata.paths && e->path)
			json_object_set_new(made, "path", path_json(e->path));
		if (json_object_setn_new(keys, e->key.bytes, e->key.len, made) < 0)
			return base_no_memory_for(d->err, "%s", d->file->path);
	}
	return add_document(d, DOCUMENT, json_pack("{s:i, s:b, s:O}", "vckpt.dcp", 1, "paths", d->metadata.paths,
		"keys", keys), SIZE_MAX);
}

int import_dcp_documents(struct import_dcp *d)
{
	int r = add_metadata(d);

	return r < 0 ? r : add_trees(d);
}
