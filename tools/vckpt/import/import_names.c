/* SPDX-License-Identifier: Apache-2.0
 *
 * The names under which a step shows the files of its tensors: those that came in, if the files hold all of a
 * component (docs/format/header.md, "Names of files"). A component whose only file is COMPONENT.safetensors needs no
 * note of that. A component that cannot be shown under its files' names is shown as COMPONENT.safetensors. */
#include "tools/vckpt/import/import.h"

#include <jansson.h>
#include <string.h>

#include "core/base/buf.h"
#include "core/base/log.h"
#include "core/view/name.h"

#define HEADERS_MAX 4096u /* of a step (docs/format/manifest.md) */

/* Do its files hold all of its tensors that a .safetensors can hold? */
static bool holds_all(const struct import_plan *p, const struct import_component *c)
{
	for (size_t i = 0; i < p->ntensors; i++) {
		const struct import_tensor *t = &p->tensors[i];

		if (!t->in_header && !strcmp(t->component, c->name) &&
			view_safetensors_can(t->dtype, &t->shape, t->name, t->name_len))
			return false;
	}
	return true;
}

static void drop_headers(struct import_component *c)
{
	for (uint32_t i = 0; i < c->nheaders; i++)
		free(c->headers[i].bytes);
	c->nheaders = 0;
}

/* Parts that would change the path itself stay as they are. */
char *import_true_name(const char *rel)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	for (const char *part = rel; *part;) {
		const char *end = strchrnul(part, '/');
		base_cleanup_free char *name = NULL;
		size_t len = 0;

		if (part != rel)
			base_buf_append(&b, "/", 1);
		if (view_name_unescape(part, (size_t)(end - part), &name, &len) == 0 && len &&
			!memchr(name, '/', len) && !memchr(name, 0, len))
			base_buf_append(&b, name, len);
		else
			base_buf_append(&b, part, (size_t)(end - part));
		part = *end ? end + 1 : end;
	}
	return base_buf_steal_text(&b);
}

static bool is_component_file(const char *path, const char *component)
{
	size_t n = strlen(component);

	return !strncmp(path, component, n) && !strcmp(path + n, ".safetensors");
}

/* Is a path the file COMPONENT.safetensors of another component, or below one? */
static bool is_anothers(const struct import_plan *p, const struct import_component *c, const char *path)
{
	base_cleanup_free char *first = strndup(path, strcspn(path, "/"));

	for (size_t i = 0; first && i < p->ncomponents; i++)
		if (is_component_file(first, p->components[i].name) && (&p->components[i] != c || strcmp(first, path)))
			return true;
	return !first;
}

/* May the step show the component's files under their names? seen: how often each name occurs. */
static bool can_be_named(const struct import_plan *p, const struct import_component *c, json_t *seen)
{
	for (uint32_t i = 0; i < c->nheaders; i++) {
		const char *name = c->headers[i].file->name;

		if (!name)
			return false;
		if (view_files_path_valid(name) && json_integer_value(json_object_get(seen, name)) == 1 &&
			!is_anothers(p, c, name))
			continue;
		base_warning("%s: the step has another place for a file of this name; component %s will be shown as "
			"%s.safetensors", c->headers[i].file->path, c->name, c->name);
		return false;
	}
	return true;
}

static int count_names(const struct import_plan *p, json_t *seen)
{
	for (size_t i = 0; i < p->ncomponents; i++)
		for (uint32_t k = 0; k < p->components[i].nheaders; k++) {
			const char *name = p->components[i].headers[k].file->name;
			json_int_t n = name ? json_integer_value(json_object_get(seen, name)) : 0;

			if (name && json_object_set_new(seen, name, json_integer(n + 1)) < 0)
				return -ENOMEM;
		}
	return 0;
}

static size_t names_bytes(const struct import_component *c)
{
	size_t n = 0;

	for (uint32_t i = 0; i < c->nheaders; i++)
		n += c->headers[i].file->name ? strlen(c->headers[i].file->name) + 1 : 0;
	return n;
}

int import_names_settle(struct import_plan *p, struct base_error *err)
{
	json_auto_t *seen = json_object();
	size_t more = p->ncomponents, bytes = 0, own;

	if (!seen || count_names(p, seen) < 0)
		return base_no_memory(err);
	for (size_t i = 0; i < p->ncomponents; i++) {
		struct import_component *c = &p->components[i];
		bool fits;

		if (!holds_all(p, c))
			drop_headers(c);
		if (c->nheaders == 0 || (c->nheaders == 1 && c->headers[0].file->name &&
			is_component_file(c->headers[0].file->name, c->name)))
			continue;
		own = names_bytes(c);
		fits = more + c->nheaders + 1 <= HEADERS_MAX && bytes + own <= VIEW_FILES_MAX_BYTES;
		c->named = fits && can_be_named(p, c, seen);
		if (c->named) {
			more += c->nheaders + 1;
			bytes += own;
		} else if (!fits)
			base_warning("component %s has %u files, too many to be shown under their names: it will be "
				"shown as %s.safetensors", c->name, c->nheaders, c->name);
	}
	return 0;
}

int import_names_add(const struct import_component *c, struct save_writer *w, struct base_error *err)
{
	base_cleanup_buf struct base_buf names = BASE_BUF_INIT;
	int r = 0;

	for (uint32_t i = 0; i < c->nheaders; i++) {
		const char *name = c->headers[i].file->name;

		base_buf_append(&names, name, strlen(name) + 1);
	}
	if (names.error)
		return base_no_memory(err);
	r = save_writer_header(w, c->name, VIEW_FILES_VIEW, names.data, names.len, 0, err);
	for (uint32_t i = 0; r == 0 && c->nheaders > 1 && i < c->nheaders; i++) {
		char view[VIEW_FILES_VIEW_BYTES];

		snprintf(view, sizeof view, VIEW_FILE_VIEW, i);
		r = save_writer_header(w, c->name, view, c->headers[i].bytes, c->headers[i].len,
			c->headers[i].data_bytes, err);
	}
	return r;
}
