/* SPDX-License-Identifier: Apache-2.0
 *
 * The component that each set of weights is: the rules that import_weights.c opens with. */
#include "tools/vckpt/import/import_weights_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/log.h"

#define MAIN_NAME "model"
#define FOLDER_SETS_MAX 64u

struct folder { uint32_t nsets, nplain; bool has_main; }; /* plain: no variant, no parts beside a whole */

/* NULL: no memory */
static char *stem_key(const struct set *s, size_t len) { return tool_string("%s/%.*s", s->dir, (int)len, s->stem); }

static struct set *set_of_stem(const struct import_weights *w, const struct set *s, size_t len)
{
	base_cleanup_free char *key = stem_key(s, len);
	const json_t *number = key ? json_object_get(w->by_stem, key) : NULL;

	return number ? &w->sets[json_integer_value(number)] : NULL;
}

static struct folder *folder_at(const struct import_weights *w, const struct set *s)
{
	return &w->folders[json_integer_value(json_object_get(w->by_folder, s->dir))];
}

/* If a folder has several sets of one name, by_stem has the one that readers prefer. */
static int list_set(struct import_weights *w, uint32_t number)
{
	struct set *s = &w->sets[number], *known = set_of_stem(w, s, strlen(s->stem));
	base_cleanup_free char *key = stem_key(s, strlen(s->stem));

	if (!key || ((!known || s->kind < known->kind) &&
		json_object_set_new(w->by_stem, key, json_integer(number)) < 0))
		return -ENOMEM;
	if (!json_object_get(w->by_folder, s->dir) && (base_array_more(w->folders, w->nfolders) < 0 ||
		json_object_set_new(w->by_folder, s->dir, json_integer(w->nfolders)) < 0))
		return -ENOMEM;
	if (json_object_size(w->by_folder) > w->nfolders)
		w->folders[w->nfolders++] = (struct folder){0};
	folder_at(w, s)->nsets++;
	folder_at(w, s)->has_main |= !strcmp(s->stem, MAIN_NAME);
	return 0;
}

/* Of NAME.fp16 beside NAME: NAME's set, and in *ret_variant ".fp16". NULL: it is none. */
static const struct set *variant_of(const struct import_weights *w, const struct set *s, const char **ret_variant)
{
	const struct set *of = NULL;

	for (const char *dot = s->stem; !of && (dot = strchr(dot, '.')); dot++) {
		of = set_of_stem(w, s, (size_t)(dot - s->stem));
		*ret_variant = dot;
	}
	return of;
}

static bool is_variant(const struct import_weights *w, const struct set *s)
{
	const char *variant;

	return variant_of(w, s, &variant);
}

/* The set of the same name and folder that readers prefer; NULL: this one. */
static const struct set *preferred(const struct import_weights *w, const struct set *s)
{
	const struct set *best = set_of_stem(w, s, strlen(s->stem));

	return best == s ? NULL : best;
}

/* Does a set have the name of its folder? At the top several may: they are one component. */
static bool is_main(const struct import_weights *w, const struct set *s)
{
	const struct folder *folder = folder_at(w, s);

	if (preferred(w, s) || is_variant(w, s))
		return false;
	if (folder->has_main)
		return !strcmp(s->stem, MAIN_NAME);
	return folder->nplain == 1 || !*s->dir;
}

static bool is_left(const struct import_weights *w, const struct set *s)
{
	return *s->dir && folder_at(w, s)->nsets > FOLDER_SETS_MAX;
}

/* Can a component of the set have that name? It must not be the name of another component, nor that of another's file
 * COMPONENT.safetensors. */
static bool is_free(const struct import_weights *w, const struct set *s, const char *name)
{
	char file[PROTO_COMPONENT_MAX + sizeof SUFFIX];
	const struct import_found *f;

	snprintf(file, sizeof file, "%s" SUFFIX, name);
	f = import_weights_find(w, file);
	return proto_component_valid(name) && !json_object_get(w->taken, name) &&
		!(f && f->set && &w->sets[f->set - 1] != s);
}

/* The nearest name that is free. */
static int set_name(struct import_weights *w, struct set *s, const char *wanted, struct base_error *err)
{
	enum { ROOM = 4, TRIES = 1000 };
	char name[PROTO_COMPONENT_MAX + 1];
	size_t n;

	snprintf(name, sizeof name - ROOM, "%s", wanted);
	for (char *c = name; *c; c++)
		if (!(*c >= '0' && *c <= '9') && !(*c >= 'a' && *c <= 'z') && !(*c >= 'A' && *c <= 'Z') && *c != '_' &&
			(c == name || !strchr(".-", *c)))
			*c = '_';
	n = strlen(name);
	for (unsigned i = 2; i < TRIES && !is_free(w, s, name); i++)
		snprintf(name + n, sizeof name - n, "_%u", i);
	if (!is_free(w, s, name))
		return base_error_set(err, -EINVAL, "%s: no name is left for a component of its tensors",
			s->first->path);
	snprintf(s->component, sizeof s->component, "%s", name);
	if (json_object_set_new(w->taken, name, json_true()) < 0)
		return base_no_memory(err);
	if (json_object_size(w->taken) <= PROTO_COMPONENTS_MAX)
		return 0;
	return base_error_set(err, -BASE_ELIMIT, "%s: it has more models than the %u components that a step can have: "
		"import its folders as steps of their own", w->root, PROTO_COMPONENTS_MAX);
}

/* The name that a set should have; if a component was asked for, it comes first in all names but its own. */
static char *wanted_name(const struct import_weights *w, const struct set *s)
{
	const struct set *better = preferred(w, s);
	const char *variant = "-parts", *asked = strcmp(w->component, IMPORT_COMPONENT) ? w->component : "";
	bool main = is_main(w, s);
	char *name;

	better = better ? better : variant_of(w, s, &variant);
	name = better ? tool_string("%s%s", better->component, variant)
		: tool_string("%s%s%s%s%s", asked, *asked ? "." : "", s->dir, *s->dir && !main ? "." : "",
			main ? "" : s->stem);
	for (char *c = name; c && *c; c++)
		*c = *c == '/' ? '.' : *c;
	return name;
}

static int name_set(struct import_weights *w, struct set *s, struct base_error *err)
{
	const struct set *better = preferred(w, s);
	base_cleanup_free char *name = NULL;
	int r;

	if (!*s->dir && is_main(w, s)) {
		snprintf(s->component, sizeof s->component, "%s", w->component);
		return 0;
	}
	name = wanted_name(w, s);
	if (!name)
		return base_no_memory_for(err, "%s", s->first->path);
	r = set_name(w, s, name, err);
	if (r == 0 && better)
		base_warning("%s/%s: readers take %s beside it and not this one, which is kept as component %s",
			w->root, s->index ? s->index->rel : s->first->rel, better->first->rel, s->component);
	return r;
}

/* When a set is named: names of variants and parts are made of others' names. */
static unsigned turn(const struct import_weights *w, const struct set *s)
{
	return preferred(w, s) ? 2 : is_variant(w, s);
}

int import_weights_name(struct import_weights *w, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; i < w->nsets; i++)
		if (list_set(w, i) < 0)
			return base_no_memory_for(err, "%s", w->root);
	for (uint32_t i = 0; i < w->nsets; i++)
		folder_at(w, &w->sets[i])->nplain += turn(w, &w->sets[i]) == 0;
	for (size_t i = 0; i < w->nfound; i++)
		if (w->found[i].set && is_left(w, &w->sets[w->found[i].set - 1]))
			w->found[i].set = 0;
	if (json_object_set_new(w->taken, w->component, json_true()) < 0)
		return base_no_memory_for(err, "%s", w->root);
	for (unsigned n = 0; n < 3; n++)
		for (uint32_t i = 0; r == 0 && i < w->nsets; i++)
			if (turn(w, &w->sets[i]) == n && !is_left(w, &w->sets[i]))
				r = name_set(w, &w->sets[i], err);
	return r;
}
