/* SPDX-License-Identifier: Apache-2.0
 *
 * Components and names of a checkpoint's keys. A key whose path has several parts is NAME in the component that the
 * first part names; every other key is kept as it is, in the component `model`. Where two keys would get the same
 * place, those that no path puts there are kept by their whole keys in a component of their own, `keys`. */
#include "tools/vckpt/import/import_dcp.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/buf.h"

#define PATH_MORE 1024u         /* bytes by which a path may be longer than its key, which DCP made of it */

static bool is_text(const struct foreign_value *v)
{
	return v->kind == FOREIGN_TEXT;
}

/* The other parts of a path with dots between them. NULL: no memory. */
static char *join_path(const struct foreign_items *path)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	for (size_t i = 1; i < path->n; i++) {
		const struct foreign_value *v = path->at[i];

		if (i > 1)
			base_buf_append(&b, ".", 1);
		if (is_text(v))
			base_buf_append(&b, v->text.bytes, v->text.len);
		else
			base_buf_printf(&b, "%" PRId64, v->number);
	}
	return base_buf_steal_text(&b);
}

static bool component_of(const struct foreign_value *v, char component[static PROTO_COMPONENT_MAX + 1])
{
	if (!is_text(v) || !v->text.len || v->text.len > PROTO_COMPONENT_MAX || memchr(v->text.bytes, 0, v->text.len))
		return false;
	memcpy(component, v->text.bytes, v->text.len);
	component[v->text.len] = 0;
	return proto_component_valid(component);
}

static int place_of(struct import_dcp *d, const struct foreign_dcp_entry *e, struct import_place *ret_p)
{
	const struct foreign_items *path = d->metadata.paths ? e->path : NULL;

	if (path && path->n > 1 && component_of(path->at[0], ret_p->component)) {
		ret_p->name = join_path(path);
		if (!ret_p->name)
			return base_no_memory(d->err);
		ret_p->nested = *ret_p->name != 0;
		if (ret_p->nested)
			return 0;
		free(ret_p->name);
	}
	snprintf(ret_p->component, sizeof ret_p->component, IMPORT_COMPONENT);
	ret_p->name = strndup(e->key.bytes, e->key.len);
	return ret_p->name ? 0 : base_no_memory(d->err);
}

static int check_path(struct import_dcp *d, const struct foreign_dcp_entry *e)
{
	uint64_t len = 0;
	bool good = true;

	for (size_t i = 0; good && e->path && i < e->path->n; i++) {
		const struct foreign_value *v = e->path->at[i];

		len += is_text(v) ? v->text.len : 0;
		good = len > e->key.len + PATH_MORE || !is_text(v) || proto_utf8_valid(v->text.bytes, v->text.len);
	}
	if (len > e->key.len + PATH_MORE) /* keys may share one long part, and all paths together would be huge */
		return base_error_set(d->err, -BASE_EFORMAT, "%s: the path of key %.*s is far longer than the key",
			d->file->path, (int)base_min(e->key.len, 300), e->key.bytes);
	if (good)
		return 0;
	return base_error_set(d->err, -BASE_EFORMAT,
		"%s: the path of key %.*s is not UTF-8, or has a NUL", d->file->path,
		(int)base_min(e->key.len, 300), e->key.bytes);
}

/* How many keys have a place: {"component/name": number}. */
static int count(const struct import_dcp *d, json_t *holders, size_t i, json_int_t *ret_n)
{
	base_cleanup_free char *place = tool_string("%s/%s", d->places[i].component, d->places[i].name);

	*ret_n = place ? json_integer_value(json_object_get(holders, place)) + 1 : 0;
	return place && json_object_set_new(holders, place, json_integer(*ret_n)) == 0 ? 0 : base_no_memory(d->err);
}

/* A component that no key has. */
static void spare_component(const struct import_dcp *d, char spare[static PROTO_COMPONENT_MAX + 1])
{
	size_t len = (size_t)snprintf(spare, PROTO_COMPONENT_MAX + 1, "keys");

	for (size_t i = 0; i < d->metadata.nentries; i++) {
		if (strcmp(d->places[i].component, spare) != 0 || len >= PROTO_COMPONENT_MAX)
			continue;
		spare[len++] = '_';
		spare[len] = 0;
		i = (size_t)-1;
	}
}

static int move_apart(struct import_dcp *d, json_t *holders)
{
	char spare[PROTO_COMPONENT_MAX + 1];

	spare_component(d, spare);
	for (size_t i = 0; i < d->metadata.nentries; i++) {
		struct import_place *p = &d->places[i];
		base_cleanup_free char *place = tool_string("%s/%s", p->component, p->name);

		if (!place)
			return base_no_memory(d->err);
		if (!p->nested && json_integer_value(json_object_get(holders, place)) > 1)
			snprintf(p->component, sizeof p->component, "%s", spare);
	}
	return 0;
}

static int check_apart(struct import_dcp *d)
{
	json_auto_t *holders = json_object();
	json_int_t n = 0;
	int r = 0;

	for (size_t i = 0; r == 0 && i < d->metadata.nentries; i++) {
		r = count(d, holders, i, &n);
		if (r == 0 && n > 1)
			r = base_error_set(d->err, -EEXIST, "%s: key %.*s and another key both have the place %s/%s",
				d->file->path, (int)base_min(d->metadata.entries[i].key.len, 300),
				d->metadata.entries[i].key.bytes, d->places[i].component, d->places[i].name);
	}
	return r;
}

int import_dcp_names(struct import_dcp *d)
{
	json_auto_t *holders = json_object();
	json_int_t n, most = 0;
	int r = 0;

	d->places = calloc(d->metadata.nentries + 1, sizeof *d->places);
	if (!d->places || !holders)
		r = base_no_memory(d->err);
	for (size_t i = 0; r == 0 && i < d->metadata.nentries; i++) {
		r = check_path(d, &d->metadata.entries[i]);
		if (r == 0)
			r = place_of(d, &d->metadata.entries[i], &d->places[i]);
		if (r == 0)
			r = count(d, holders, i, &n);
		most = r == 0 && n > most ? n : most;
	}
	if (r == 0 && most > 1)
		r = move_apart(d, holders);
	return r == 0 && most > 1 ? check_apart(d) : r;
}
