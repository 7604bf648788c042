/* SPDX-License-Identifier: Apache-2.0
 *
 * A directory: which of its files hold the tensors of the component, which become blobs at their own path, and which
 * are pickles that stay outside. In one with a manifest.json of vckpt's, the manifest says so (import_exported.c); else
 * one with .metadata is a checkpoint of DCP's (import_dcp.c); else it is one in Hugging Face layout:
 *
 *   tensors   the files that model.safetensors.index.json names (the index itself is consumed), else
 *             model.safetensors, else shard-*-model-*.safetensors, which hold boxes of tensors (import_shards.c), else
 *             every top-level *.safetensors
 *   pickles   *.bin *.pt *.pth *.ckpt *.pkl *.pickle whose first bytes are a pickle's or a torch archive's: left out
 *             and listed, or kept as blobs
 *   skipped   names that begin with .git
 *   links     followed when they end in a regular file inside (import_links.c says what that is) or --follow is given;
 *             one to a regular file outside is an error, others are left out with a warning */
#include "tools/vckpt/import.h"

#include <dirent.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/buf.h"
#include "core/view/name.h"
#include "tools/vckpt/import_manifest.h"
#include "tools/vckpt/import_shards.h"

#define INDEX_NAME "model.safetensors.index.json"
#define METADATA_NAME ".metadata"
#define SHARDED_NAME "sharded/"
#define DEPTH_MAX 32

struct walk {
	struct import_plan *plan;
	const char *root;
	json_t *index;      /* file name -> true, of those that the index names; NULL: no index */
	json_t *weights;    /* the index's weight_map */
	struct import_manifest *manifest;
	struct import_shards *shards; /* its tensors are in files that hold boxes of them; NULL: they are not */
	bool dcp;           /* its .metadata says what the .distcp files hold */
	const char *single; /* "model.safetensors" when there is one and no index */
	const char *component;
	struct base_error *err;
};

static char *join(const char *a, const char *b)
{
	char *text;

	return asprintf(&text, "%s/%s", a, b) < 0 ? NULL : text;
}

/* Is the file (path from the root) one that holds the component's tensors? */
static bool holds_tensors(const struct walk *w, const char *rel)
{
	if (w->index)
		return json_object_get(w->index, rel) != NULL;
	if (w->single)
		return !strcmp(rel, w->single);
	return !strchr(rel, '/') && import_has_suffix(rel, ".safetensors");
}

/* Does DCP give its own files such names? */
static bool is_dcp_file(const char *rel)
{
	return !strncmp(rel, METADATA_NAME, strlen(METADATA_NAME)) ||
		(!strncmp(rel, "__", 2) && import_has_suffix(rel, ".distcp"));
}

static bool may_be_pickle(const char *rel)
{
	static const char *const suffixes[] = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"};

	for (size_t i = 0; i < BASE_COUNT(suffixes); i++)
		if (import_has_suffix(rel, suffixes[i]))
			return true;
	return false;
}

/* Leaves a pickle out: takes the blob just added back and lists its path. */
static int leave_out(struct import_plan *p, const char *path)
{
	if (base_array_more(p->pickles, p->npickles) < 0)
		return -ENOMEM;
	if (!(p->pickles[p->npickles] = strdup(path)))
		return -ENOMEM;
	p->npickles++;
	free(p->blobs[--p->nblobs].name);
	return 0;
}

/* The true name of a blob: each part of its path that the escape of file names could have made is taken back, so that
 * what was exported comes in under its old name. Parts that would change the path itself stay as they are. */
static char *true_name(const char *rel)
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

static int take_file(struct walk *w, const char *path, const char *rel)
{
	struct import_plan *p = w->plan;
	int r = w->manifest ? import_exported_file(p, w->manifest, path, rel, w->err) : 1;

	if (r <= 0)
		return r;
	if (w->index && !strcmp(rel, INDEX_NAME))
		return 0;
	if (w->dcp && is_dcp_file(rel))
		return 0;
	if (w->shards && import_shards_is(rel))
		return import_shards_add(w->shards, path, w->err);
	if (w->index && !strncmp(rel, SHARDED_NAME, strlen(SHARDED_NAME)) &&
		import_shards_is(rel + strlen(SHARDED_NAME)))
		return 0; /* what the files that the index names were put together from */
	if (!w->manifest && !w->dcp && holds_tensors(w, rel))
		return import_add_safetensors(p, path, w->component, w->err);
	base_cleanup_free char *name = true_name(rel);
	if (!name)
		return base_no_memory_for(w->err, "%s", path);
	r = import_add_blob(p, path, name, false, w->err);
	if (r < 0 || p->keep_pickles || !may_be_pickle(rel) || !import_is_pickle(p->blobs[p->nblobs - 1].file))
		return r;
	return leave_out(p, path) < 0 ? base_no_memory_for(w->err, "%s", path) : 0;
}

static int walk_directory(struct walk *w, const char *path, const char *rel, int depth);

static int take_entry(struct walk *w, const char *path, const char *rel, unsigned char type, int depth)
{
	struct stat st;

	if (stat(path, &st) < 0) {
		if (type != DT_LNK)
			return base_error_set(w->err, -errno, "%s: %s", path, strerror(errno));
		base_warning("%s: a link that leads nowhere; left out", path);
		return 0;
	}
	if (S_ISREG(st.st_mode))
		return take_file(w, path, rel);
	if (S_ISDIR(st.st_mode) && type != DT_LNK)
		return walk_directory(w, path, rel, depth + 1);
	base_warning("%s: %s; left out", path, S_ISDIR(st.st_mode) ? "a link to a directory" : "not a regular file");
	return 0;
}

static int compare_names(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Names of a directory, each with its d_type in front, sorted: the same import everywhere. */
static int read_names(const char *path, char ***ret_names, size_t *ret_n)
{
	DIR *d = opendir(path);
	struct dirent *e;
	char **names = NULL;
	size_t n = 0;
	int r = 0;

	if (!d)
		return -errno;
	while (r == 0 && (errno = 0, e = readdir(d))) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !strncmp(e->d_name, ".git", 4))
			continue;
		if (base_array_more(names, n) < 0 ||
			asprintf(&names[n], "%s%c", e->d_name, e->d_type == DT_LNK ? 'l' : '-') < 0)
			r = -ENOMEM;
		else
			n++;
	}
	if (r == 0)
		r = -errno;
	closedir(d);
	if (n)
		qsort(names, n, sizeof *names, compare_names);
	*ret_names = names;
	*ret_n = n;
	return r;
}

static unsigned char type_of(const char *path, char mark)
{
	struct stat st;

	return mark == 'l' || (lstat(path, &st) == 0 && S_ISLNK(st.st_mode)) ? DT_LNK : DT_UNKNOWN;
}

static int walk_directory(struct walk *w, const char *path, const char *rel, int depth)
{
	char **names = NULL;
	size_t n = 0;
	int r = depth > DEPTH_MAX ? -ELOOP : read_names(path, &names, &n);

	if (r < 0)
		base_error_set(w->err, r, "%s: %s", path, r == -ELOOP ? "more than 32 directories deep" : strerror(-r));
	for (size_t i = 0; i < n; i++) {
		size_t len = strlen(names[i]);
		char mark = names[i][len - 1];

		names[i][len - 1] = 0;
		if (r == 0) {
			base_cleanup_free char *sub = join(path, names[i]);
			base_cleanup_free char *subrel = *rel ? join(rel, names[i]) : strdup(names[i]);

			if (sub && subrel)
				r = take_entry(w, sub, subrel, type_of(sub, mark), depth);
			else
				r = base_no_memory_for(w->err, "%s", path);
		}
		free(names[i]);
	}
	free(names);
	return r;
}

/* The files that the index names. Names that leave the directory are refused. */
static int load_index(struct walk *w, const char *path)
{
	base_cleanup_free char *text = NULL;
	struct import_file *f;
	json_error_t error;
	const char *name;
	json_t *file;
	int r = import_file_open(w->plan, path, &f, w->err);

	if (r < 0 || (r = import_file_text(f, &text, w->err)) < 0)
		return r;
	json_t *root = json_loadb(text, (size_t)f->stat.st_size, JSON_REJECT_DUPLICATES, &error);
	if (!root)
		return base_error_set(w->err, -BASE_EFORMAT, "%s: not JSON: %s", path, error.text);
	w->weights = json_incref(json_object_get(root, "weight_map"));
	json_decref(root);
	w->index = json_object();
	if (!json_is_object(w->weights))
		return base_error_set(w->err, -BASE_EFORMAT, "%s: it has no object \"weight_map\"", path);
	json_object_foreach(w->weights, name, file) {
		const char *value = json_string_value(file);

		if (!value || !*value || *value == '/' || strstr(value, "..") ||
			!import_has_suffix(value, ".safetensors"))
			return base_error_set(w->err, -BASE_EFORMAT,
				"%s: tensor %s is not said to be in a .safetensors file of this directory", path, name);
		json_object_set_new(w->index, value, json_true());
	}
	return 0;
}

/* Every tensor that the index names must have come out of the file that it names. */
static int check_index(struct walk *w, size_t first)
{
	const char *name;
	json_t *file;
	json_t *found = json_object();
	int r = 0;

	for (size_t i = first; i < w->plan->ntensors; i++) {
		const struct import_tensor *t = &w->plan->tensors[i];

		json_object_setn_new(found, t->name, t->name_len, json_true());
	}
	json_object_foreach(w->weights, name, file) {
		if (json_object_get(found, name))
			continue;
		r = base_error_set(w->err, -BASE_EFORMAT, "%s/" INDEX_NAME ": tensor %s is not in %s", w->root, name,
			json_string_value(file));
		break;
	}
	json_decref(found);
	return r;
}

static int add_exported(struct walk *w, size_t first)
{
	int r;

	if (strcmp(w->component, IMPORT_COMPONENT))
		return base_error_set(w->err, -EINVAL,
			"%s: its manifest.json says which components its tensors belong to; leave out --component %s",
			w->root, w->component);
	r = walk_directory(w, w->root, "", 0);
	return r == 0 ? import_exported_check(w->plan, w->manifest, first, w->err) : r;
}

/* Is there a file of a kind at the top? */
static bool has_file(const char *path, bool (*is)(const char *rel))
{
	char **names = NULL;
	size_t n = 0;
	bool found = false;

	(void)read_names(path, &names, &n); /* the walk says what is wrong */
	for (size_t i = 0; i < n; i++) {
		names[i][strlen(names[i]) - 1] = 0;
		found = found || is(names[i]);
		free(names[i]);
	}
	free(names);
	return found;
}

static int add_shards(struct walk *w)
{
	int r = import_shards_new(w->plan, w->component, &w->shards);

	if (r < 0)
		return base_no_memory_for(w->err, "%s", w->root);
	r = walk_directory(w, w->root, "", 0);
	if (r == 0)
		r = import_shards_finish(w->shards, w->err);
	import_shards_free(w->shards);
	return r;
}

static int add_dcp(struct walk *w)
{
	int r;

	if (strcmp(w->component, IMPORT_COMPONENT))
		return base_error_set(w->err, -EINVAL,
			"%s: the keys of its tensors say which components they belong to; leave out --component %s",
			w->root, w->component);
	w->dcp = true;
	r = import_add_dcp(w->plan, w->root, w->err);
	return r == 0 ? walk_directory(w, w->root, "", 0) : r;
}

/* What a save leaves that was broken off, or that each rank made for itself. */
static int refuse_parts(const struct walk *w)
{
	base_cleanup_free char *own = join(w->root, "__0" METADATA_NAME), *data = join(w->root, "__0_0.distcp");
	struct stat st;

	if (!own || !data)
		return base_no_memory_for(w->err, "%s", w->root);
	if (stat(own, &st) == 0)
		return base_error_set(w->err, -EINVAL,
			"%s: each rank saved for itself here (use_collectives=False), so that no file describes the "
			"whole: save it with collectives, or load it with torch and use vckpt.dcp.StorageWriter",
			w->root);
	if (stat(data, &st) == 0)
		return base_error_set(w->err, -BASE_EFORMAT,
			"%s: it has .distcp files and no " METADATA_NAME ", as if the save had not come to its end",
			w->root);
	return 0;
}

int import_add_directory(struct import_plan *p, const char *path, const char *component, struct base_error *err)
{
	struct walk w = {.plan = p, .root = path, .component = component, .err = err};
	base_cleanup_free char *index = join(path, INDEX_NAME), *single = join(path, "model.safetensors");
	base_cleanup_free char *metadata = join(path, METADATA_NAME);
	size_t first = p->ntensors;
	struct stat st;
	int r = 0;

	if (!index || !single || !metadata)
		return base_no_memory_for(err, "%s", path);
	if ((r = import_exported_open(p, path, &w.manifest, err)) < 0)
		return r;
	if (w.manifest) {
		r = add_exported(&w, first);
		import_manifest_free(w.manifest);
		return r;
	}
	if (stat(metadata, &st) == 0 && S_ISREG(st.st_mode))
		return add_dcp(&w);
	if ((r = refuse_parts(&w)) < 0)
		return r;
	if (stat(index, &st) == 0 && S_ISREG(st.st_mode))
		r = load_index(&w, index);
	else if (stat(single, &st) == 0 && S_ISREG(st.st_mode))
		w.single = "model.safetensors";
	else if (has_file(path, import_shards_is))
		return add_shards(&w);
	if (r == 0)
		r = walk_directory(&w, path, "", 0);
	if (r == 0 && w.index)
		r = check_index(&w, first);
	json_decref(w.index);
	json_decref(w.weights);
	return r;
}
