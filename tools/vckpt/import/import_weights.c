/* SPDX-License-Identifier: Apache-2.0
 *
 * The .safetensors files of a directory in sets. A set is what an index names (*.safetensors.index.json, with or
 * without a variant), or the parts NAME-0000N-of-0000M of one name, or one file. Sets become components:
 *
 *   at the top      the set that transformers would read, `model`, is the component that was asked for. Without one of
 *                   that name all sets are, but variants (NAME.fp16 beside NAME). Every other set is a component of its
 *                   own, by its name
 *   below           the only set of a folder is a component by the folder's path, with `.` for `/`; of several sets
 *                   `model` is, and each other one has its name behind that
 *   variants        have the component of what they are a variant of, with `.fp16` behind it
 *
 * Where a whole file and parts have one name, the file comes first, as in transformers; the parts are a component of
 * their own, and are named on standard error. A folder below with more than FOLDER_SETS_MAX sets holds data and not
 * models: its files stay files. */
#include "tools/vckpt/import/import_weights_internal.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/log.h"
#include "tools/vckpt/import/import_numbered.h"
#include "tools/vckpt/import/import_shards.h"

/* ---- names ---- */

/* "model.safetensors.index.json", and with a variant: "model.safetensors.index.fp16.json". */
static bool is_index(const char *rel)
{
	const char *end = strstr(import_base_of(rel), SUFFIX ".");

	return end && end != import_base_of(rel) && strstr(end, ".index.") && import_has_suffix(rel, ".json");
}

/* The name of an index's set: the file's name without the words of the format. */
static char *index_stem(const char *rel)
{
	const char *base = import_base_of(rel), *end = strstr(base, SUFFIX "."), *index = strstr(end, ".index.");
	int before = (int)(index - end - (ptrdiff_t)strlen(SUFFIX));
	int behind = (int)(strlen(index) - strlen(".index") - strlen(".json"));

	return tool_string("%.*s%.*s%.*s", (int)(end - base), base, before, end + strlen(SUFFIX),
		behind > 0 ? behind : 0, index + strlen(".index"));
}

static char *folder_of(const char *rel)
{
	return strndup(rel, import_base_of(rel) == rel ? 0 : (size_t)(import_base_of(rel) - rel - 1));
}

static char *within(const char *folder, const char *name)
{
	return tool_string("%s%s%s", folder, *folder ? "/" : "", name);
}

/* ---- sets ---- */

/* Takes `dir` and `stem` in any case. */
static int add_set(struct import_weights *w, enum set_kind kind, const struct import_found *f, char *dir, char *stem,
	struct base_error *err)
{
	struct set s = {.kind = kind, .dir = dir, .stem = stem, .first = f};

	if (!dir || !stem || base_array_more(w->sets, w->nsets) < 0) {
		free(dir);
		free(stem);
		return base_no_memory_for(err, "%s", f->path);
	}
	w->sets[w->nsets++] = s;
	return 0;
}

/* What the parts of one name have in common; NULL in *ret_key: the file is none. */
static int parts_key(const char *rel, char **ret_key, struct import_numbered *ret)
{
	const char *base = import_base_of(rel);

	*ret_key = NULL;
	if (!import_numbered_parse(base, ret))
		return 0;
	*ret_key = tool_string("%.*s-of-%" PRIu32 "%s", (int)(base - rel) + ret->name_len, rel, ret->total, ret->tail);
	return *ret_key ? 0 : -ENOMEM;
}

struct import_found *import_weights_find(const struct import_weights *w, const char *rel)
{
	const json_t *number = json_object_get(w->by_rel, rel);

	return number ? &w->found[json_integer_value(number)] : NULL;
}

static int read_weight_map(struct import_weights *w, const struct import_found *f, json_t **ret_map,
	struct base_error *err)
{
	base_cleanup_free char *text = NULL;
	struct import_file *file;
	json_error_t error;
	int r = import_file_open(w->plan, f->path, &file, err);
	json_auto_t *root = NULL;
	json_t *map;

	if (r < 0 || (r = import_refuse_pointer(file, err)) < 0 || (r = import_file_text(file, &text, err)) < 0)
		return r;
	root = json_loadb(text, (size_t)file->stat.st_size, JSON_REJECT_DUPLICATES, &error);
	map = json_object_get(root, "weight_map");
	if (!root)
		return base_error_set(err, -BASE_EFORMAT, "%s: not JSON: %s", f->path, error.text);
	if (!json_is_object(map))
		return base_error_set(err, -BASE_EFORMAT, "%s: it has no object \"weight_map\"", f->path);
	*ret_map = json_incref(map);
	return 0;
}

/* The file's path from the index's folder; "./a" is "a". NULL: it leads out of there, or to no .safetensors. */
static const char *path_named(const json_t *value)
{
	const char *name = json_string_value(value);

	while (name && !strncmp(name, "./", 2))
		name += 2;
	if (!name || *name == '/' || !strncmp(name, "../", 3) || strstr(name, "/../") ||
		!import_has_suffix(name, SUFFIX))
		return NULL;
	return name;
}

/* A bad name is refused before it is looked up. */
static int check_named(const struct index *x, const char *tensor, const json_t *value, struct base_error *err)
{
	if (path_named(value))
		return 0;
	return base_error_set(err, -BASE_EFORMAT,
		"%s: tensor %s is not said to be in a .safetensors file of this directory", x->file->path, tensor);
}

/* The file that an index names for a tensor. *ret_f NULL: it is not there. */
static int named_file(const struct import_weights *w, const struct index *x, const json_t *value,
	struct import_found **ret_f, struct base_error *err)
{
	base_cleanup_free char *rel = within(x->dir, path_named(value));

	if (!rel)
		return base_no_memory_for(err, "%s", x->file->path);
	*ret_f = import_weights_find(w, rel);
	return 0;
}

/* Readers that find the whole file do not look at the index. */
static bool is_left_over(const struct import_weights *w, const struct index *x, size_t there)
{
	base_cleanup_free char *rel = tool_string("%s%s%s" SUFFIX, x->dir, *x->dir ? "/" : "", x->stem);

	return !there && rel && import_weights_find(w, rel);
}

/* Is all that it names there? */
static int check_files(const struct import_weights *w, const struct index *x, struct base_error *err)
{
	const char *tensor, *missing = NULL, *in = NULL;
	size_t there = 0;
	json_t *value;
	int r;

	json_object_foreach(x->weights, tensor, value) {
		struct import_found *f = NULL;

		if ((r = check_named(x, tensor, value, err)) < 0 || (r = named_file(w, x, value, &f, err)) < 0)
			return r;
		there += f != NULL;
		if (!f && !missing) {
			missing = tensor;
			in = json_string_value(value);
		}
	}
	if (missing && is_left_over(w, x, there)) {
		base_warning("%s: none of the files that it names is there; kept as it is, and %s" SUFFIX " is taken",
			x->file->path, x->stem);
		return 0;
	}
	if (missing)
		return base_error_set(err, -BASE_EFORMAT, "%s: tensor %s is in %s, which is not there: get the file, "
			"or remove the index if it is out of date", x->file->path, missing, in);
	if (json_object_size(x->weights) == 0 && !is_left_over(w, x, 0))
		return base_error_set(err, -BASE_EFORMAT,
			"%s: it names no tensor: get the index that belongs to the files, or remove it", x->file->path);
	return 0;
}

/* Files of it that are in no other index's set become a set. */
static int take_named(struct import_weights *w, const struct index *x, struct base_error *err)
{
	const struct import_found *first = NULL;
	struct import_numbered number;
	const char *tensor;
	json_t *value;
	int r;

	json_object_foreach(x->weights, tensor, value) {
		base_cleanup_free char *key = NULL;
		struct import_found *f = NULL;

		if ((r = named_file(w, x, value, &f, err)) < 0)
			return r;
		if (!f || f->set)
			continue;
		f->set = w->nsets + 1;
		first = first ? first : f;
		if (parts_key(f->rel, &key, &number) < 0 || (key && json_object_set_new(w->by_key, key,
				json_integer(f->set)) < 0))
			return base_no_memory_for(err, "%s", x->file->path);
	}
	if (!first)
		return 0;
	r = add_set(w, SET_INDEX, first, strdup(x->dir), strdup(x->stem), err);
	if (r == 0)
		w->sets[w->nsets - 1].index = x->file;
	return r;
}

static int add_index(struct import_weights *w, const struct import_found *f, struct base_error *err)
{
	struct index *x;
	int r;

	if (base_array_more(w->indices, w->nindices) < 0)
		return base_no_memory_for(err, "%s", f->path);
	x = &w->indices[w->nindices++];
	*x = (struct index){f, folder_of(f->rel), index_stem(f->rel), NULL};
	if (!x->dir || !x->stem)
		return base_no_memory_for(err, "%s", f->path);
	r = read_weight_map(w, f, &x->weights, err);
	if (r == 0)
		r = check_files(w, x, err);
	return r == 0 ? take_named(w, x, err) : r;
}

static int add_part(struct import_weights *w, struct import_found *f, const char *key,
	const struct import_numbered *number, struct base_error *err)
{
	json_t *known = json_object_get(w->by_key, key);

	f->set = known ? (uint32_t)json_integer_value(known) : w->nsets + 1;
	if (known && w->sets[f->set - 1].kind == SET_INDEX)
		return base_error_set(err, -BASE_EFORMAT,
			"%s: it names other parts of the same name and not %s, which is there: get the index that "
			"belongs to the files, or remove it", w->sets[f->set - 1].index->path, import_base_of(f->rel));
	if (known)
		return 0;
	if (json_object_set_new(w->by_key, key, json_integer(f->set)) < 0)
		return base_no_memory_for(err, "%s", f->path);
	return add_set(w, SET_PARTS, f, folder_of(f->rel), tool_string("%.*s%.*s", number->name_len,
		import_base_of(f->rel), (int)(strlen(number->tail) - strlen(SUFFIX)), number->tail), err);
}

static int add_file(struct import_weights *w, struct import_found *f, struct base_error *err)
{
	base_cleanup_free char *key = NULL;
	struct import_numbered number;
	const char *base = import_base_of(f->rel);

	if (f->set || !import_has_suffix(base, SUFFIX) || strlen(base) == strlen(SUFFIX))
		return 0;
	if (parts_key(f->rel, &key, &number) < 0)
		return base_no_memory_for(err, "%s", f->path);
	if (key)
		return add_part(w, f, key, &number, err);
	f->set = w->nsets + 1;
	return add_set(w, SET_FILE, f, folder_of(f->rel), strndup(base, strlen(base) - strlen(SUFFIX)), err);
}

/* ---- the whole ---- */

/* torch leaves the shards beside the files that it puts together from them. */
bool import_weights_skips(const struct import_weights *w, const struct import_found *f)
{
	size_t n = strlen(IMPORT_SHARDED_FOLDER);

	return !strncmp(f->rel, IMPORT_SHARDED_FOLDER, n) && import_shards_is(f->rel + n) &&
		import_weights_find(w, IMPORT_INDEX_NAME);
}

static int find_sets(struct import_weights *w, struct base_error *err)
{
	int r = 0;

	for (size_t i = 0; i < w->nfound; i++) {
		const struct import_found *f = &w->found[i];

		if (!proto_utf8_valid(f->rel, strlen(f->rel)))
			return base_error_set(err, -EINVAL, "%s: its name is not UTF-8", f->path);
		if (json_object_set_new(w->by_rel, f->rel, json_integer((json_int_t)i)) < 0)
			return base_no_memory_for(err, "%s", w->root);
	}
	for (size_t i = 0; r == 0 && i < w->nfound; i++)
		if (is_index(w->found[i].rel))
			r = add_index(w, &w->found[i], err);
	for (size_t i = 0; r == 0 && i < w->nfound; i++)
		if (!import_weights_skips(w, &w->found[i]))
			r = add_file(w, &w->found[i], err);
	return r < 0 ? r : import_weights_name(w, err);
}

int import_weights_new(struct import_plan *p, const char *root, const char *component, struct import_found *found,
	size_t nfound, struct import_weights **ret_w, struct base_error *err)
{
	struct import_weights *w = calloc(1, sizeof *w);
	int r;

	if (!w)
		return base_no_memory_for(err, "%s", root);
	*w = (struct import_weights){.plan = p, .root = root, .component = component, .found = found,
		.nfound = nfound, .by_rel = json_object(), .by_key = json_object(), .by_stem = json_object(),
		.by_folder = json_object(), .taken = json_object()};
	r = w->by_rel && w->by_key && w->by_stem && w->by_folder && w->taken ? find_sets(w, err)
		: base_no_memory_for(err, "%s", root);
	if (r < 0)
		import_weights_free(w);
	else
		*ret_w = w;
	return r;
}

int import_weights_take(struct import_weights *w, struct import_found *f, struct base_error *err)
{
	int r;

	f->first = w->plan->ntensors;
	r = import_add_safetensors(w->plan, f->path, f->rel, w->sets[f->set - 1].component, err);
	f->ntensors = w->plan->ntensors - f->first;
	return r;
}

/* Tensors that the index says are in the file go into `there`; the first that it does not name: *unnamed. */
static int compare_file(const struct import_weights *w, const struct index *x, const struct import_found *f,
	json_t *there, const struct import_tensor **unnamed, struct base_error *err)
{
	for (size_t i = f->first; i < f->first + f->ntensors; i++) {
		const struct import_tensor *t = &w->plan->tensors[i];
		const json_t *value = json_object_getn(x->weights, t->name, t->name_len);
		struct import_found *named = NULL;
		int r = value ? named_file(w, x, value, &named, err) : 0;

		if (r < 0)
			return r;
		if (!value && !*unnamed)
			*unnamed = t;
		if (named == f && json_object_setn_new(there, t->name, t->name_len, json_true()) < 0)
			return base_no_memory_for(err, "%s", x->file->path);
	}
	return 0;
}

/* Files that stay files, as those of a folder of data, are not looked into. */
static int compare_index(const struct import_weights *w, const struct index *x, json_t *there, struct base_error *err)
{
	uint32_t number = (uint32_t)(x - w->indices) + 1;
	const struct import_tensor *unnamed = NULL;
	struct import_found *f = NULL;
	const char *tensor;
	json_t *value;
	int r;

	json_object_foreach(x->weights, tensor, value) {
		if ((r = named_file(w, x, value, &f, err)) < 0)
			return r;
		if (!f || !f->set || f->compared == number)
			continue;
		f->compared = number;
		if ((r = compare_file(w, x, f, there, &unnamed, err)) < 0)
			return r;
	}
	json_object_foreach(x->weights, tensor, value) {
		if ((r = named_file(w, x, value, &f, err)) < 0)
			return r;
		if (f && f->set && !json_object_get(there, tensor))
			return base_error_set(err, -BASE_EFORMAT, "%s: tensor %s is not in %s", x->file->path, tensor,
				json_string_value(value));
	}
	if (!unnamed)
		return 0;
	return base_error_set(err, -BASE_EFORMAT, "%s: it does not name tensor %.300s, which is in %s: get the index "
		"that belongs to the files, or remove it", x->file->path, unnamed->name, unnamed->file->name);
}

int import_weights_check(struct import_weights *w, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < w->nindices; i++) {
		json_auto_t *there = json_object();

		r = there ? compare_index(w, &w->indices[i], there, err) : base_no_memory_for(err, "%s", w->root);
	}
	return r;
}

void import_weights_free(struct import_weights *w)
{
	if (!w)
		return;
	for (uint32_t i = 0; i < w->nsets; i++) {
		free(w->sets[i].dir);
		free(w->sets[i].stem);
	}
	for (uint32_t i = 0; i < w->nindices; i++) {
		free(w->indices[i].dir);
		free(w->indices[i].stem);
		json_decref(w->indices[i].weights);
	}
	free(w->sets);
	free(w->indices);
	free(w->folders);
	json_decref(w->by_rel);
	json_decref(w->by_key);
	json_decref(w->by_stem);
	json_decref(w->by_folder);
	json_decref(w->taken);
	free(w);
}
