/* SPDX-License-Identifier: Apache-2.0
 *
 * check: every file by itself, several at once. A tensor's bytes are read where the file has them, behind its head: a
 * tensor may be in a .npy and in a .safetensors, and both are read. manifest.json is made of what has been checked, so
 * only its length is compared. */
#include "core/view/check.h"

#include "core/load/read/prove.h"
#include "core/storage/spread.h"
#include "core/view/view_internal.h"

#define CHECK_CACHE_BYTES (UINT64_C(128) << 20)
#define CHECK_COUNT_BYTES (4u << 20)

struct check {
	struct load_step *step;
	struct view_tree *tree;
	struct load_cache *cache;               /* NULL: files are opened only */
	void (*read_bytes)(void *arg, uint64_t bytes);
	void *arg;
};

/* A tensor or a blob in an open file. */
struct check_reading {
	const struct check *k;
	struct view_file *file;
	uint64_t base;                          /* where its bytes begin */
	uint64_t uncounted;                     /* read since read_bytes was last called */
};

BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)
BASE_CLEANUP_DEFINE(struct view_file *, view_file_close)

static void check_count(struct check_reading *g, uint64_t more, uint64_t from)
{
	g->uncounted += more;
	if (g->uncounted < from)
		return;
	g->k->read_bytes(g->k->arg, g->uncounted);
	g->uncounted = 0;
}

static int check_read(void *arg, uint64_t offset, size_t len, void *out, struct base_error *err)
{
	struct check_reading *g = arg;
	int64_t n = view_file_read(g->file, g->k->cache, g->base + offset, len, out, err);

	check_count(g, len, CHECK_COUNT_BYTES);
	if (n >= 0 && (uint64_t)n != len)
		return base_error_set(err, -BASE_EFORMAT, "it ends too early");
	return n < 0 ? (int)n : 0;
}

static int check_object(const struct check *k, struct view_file *f, const struct load_object *o, uint64_t base,
	struct base_error *err)
{
	struct check_reading g = {.k = k, .file = f, .base = base};
	int r = load_object_prove(o, check_read, &g, err);

	check_count(&g, 0, 1);
	return r;
}

static int check_tensor(const struct check *k, struct view_file *f, uint32_t tensor, uint64_t base,
	struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	int r = load_tensor_open(k->step, tensor, &o, err);

	return r < 0 ? r : check_object(k, f, o, base, err);
}

static int check_tensors(const struct check *k, struct view_file *f, const char *component,
	const struct view_safetensors *s, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < s->ntensors; i++) {
		const struct view_safetensors_tensor *t = &s->tensors[i];
		int64_t tensor = load_step_tensor_find(k->step, component, t->name, t->name_len);

		if (tensor >= 0) /* or the file would not have been opened */
			r = check_tensor(k, f, (uint32_t)tensor, s->data_offset + t->begin, err);
		if (r < 0)
			base_error_prefix(err, r, "tensor '%.*s'", store_layout_shown(t->name, t->name_len), t->name);
	}
	return r;
}

/* The header is read from the file as well. */
static int check_safetensors(const struct check *k, struct view_file *f, uint32_t component, struct base_error *err)
{
	uint64_t size = view_file_size(f), len;
	uint8_t head[8];
	struct view_safetensors s;
	uint32_t first, end;
	base_cleanup_free uint8_t *bytes = NULL;
	int64_t n = view_file_read(f, k->cache, 0, sizeof head, head, err);
	int r;

	if (n < 0)
		return (int)n;
	if (n != sizeof head || (len = base_get64(head)) > size - sizeof head || len > VIEW_SAFETENSORS_MAX_HEADER)
		return base_error_set(err, -BASE_EFORMAT, "its header is too long");
	bytes = malloc(len + sizeof head);
	if (!bytes)
		return base_no_memory(err);
	n = view_file_read(f, k->cache, 0, len + sizeof head, bytes, err);
	r = n < 0 ? (int)n : view_safetensors_parse(bytes, len + sizeof head, size, &s, err);
	if (r < 0)
		return r;
	r = check_tensors(k, f, load_step_component(k->step, component, &first, &end), &s, err);
	view_safetensors_release(&s);
	return r;
}

static int check_blob(const struct check *k, struct view_file *f, uint32_t blob, struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	int r = load_blob_open(k->step, blob, &o, err);

	return r < 0 ? r : check_object(k, f, o, 0, err);
}

static int check_bytes(const struct check *k, const struct view_node *n, struct view_file *f, struct base_error *err)
{
	switch ((enum view_kind)n->kind) {
	case VIEW_TENSOR_NPY: return check_tensor(k, f, n->item, VIEW_NPY_DATA_OFFSET, err);
	case VIEW_SAFETENSORS: return check_safetensors(k, f, n->item, err);
	case VIEW_BLOB: return check_blob(k, f, n->item, err);
	case VIEW_MANIFEST_JSON:
	case VIEW_DIRECTORY: break;
	}
	return 0;
}

/* Opening a .npy or manifest.json reads rows of parts, which verify has walked. */
static bool check_wanted(const struct check *k, const struct view_node *n)
{
	return n->kind == VIEW_SAFETENSORS || n->kind == VIEW_BLOB || (k->cache && n->kind != VIEW_DIRECTORY);
}

static int check_node(void *arg, uint32_t node, struct base_error *err)
{
	const struct check *k = arg;
	const struct view_node *n = view_tree_node(k->tree, node);
	base_cleanup(view_file_close_p) struct view_file *f = NULL;
	struct base_buf path = BASE_BUF_INIT;
	uint64_t size;
	int r;

	if (!check_wanted(k, n))
		return 0;
	r = view_file_open(k->tree, node, &f, err);
	if (r == 0 && (r = view_tree_size(k->tree, node, &size)) < 0)
		r = base_error_set(err, r, "%s", base_error_name(r));
	if (r == 0 && view_file_size(f) != size)
		r = base_error_set(err, -BASE_EFORMAT, "it has another length than its directory says");
	if (r == 0 && k->cache)
		r = check_bytes(k, n, f, err);
	if (r == 0 || r == -ENOMEM)
		return r;
	view_tree_path(k->tree, node, &path);
	r = base_error_prefix(err, r, "its file %.*s cannot be read", (int)base_min(path.len, 300),
		path.len ? (const char *)path.data : "");
	base_buf_release(&path);
	return r;
}

/* If a component is in several files, each of its tensors has to be in one of them. */
static int check_files(const struct check *k, uint32_t component, struct base_error *err)
{
	const uint32_t *nodes;
	uint32_t n = view_tree_files(k->tree, component, &nodes), first, end;
	const char *name = load_step_component(k->step, component, &first, &end);
	base_cleanup_free uint32_t *map = calloc(end - first + 1, sizeof *map);
	struct load_tensor_info t;
	int r = map ? 0 : base_no_memory(err);

	if (r == 0 && n > 1)
		r = view_files_map(k->tree, nodes, n, first, end, map, err);
	for (uint32_t i = first; r == 0 && n > 1 && i < end; i++) {
		load_step_tensor_info(k->step, i, &t);
		if (!map[i - first] && view_safetensors_can(t.dtype, &t.shape, t.name, t.name_len))
			r = base_error_set(err, -BASE_EFORMAT, "tensor '%.*s' is in none of the files of component %s",
				store_layout_shown(t.name, t.name_len), t.name, name);
	}
	return r;
}

/* Headers of views that this vckpt does not show: verify has hashed their bytes. */
static int check_views(const struct load_step *step, struct base_error *err)
{
	const struct proto_manifest *m = load_step_manifest(step);

	for (uint32_t i = 0; i < m->nheaders; i++)
		if (!view_header_known(m->headers[i].view))
			return base_error_newer(err,
				"it has a header of %s for the view '%s', which this vckpt does not know",
				m->headers[i].component, m->headers[i].view);
	return 0;
}

static int check_all(struct check *k, struct store *s, const char *run, const struct commit_list_step *entry,
	struct base_error *err)
{
	int r = load_step_open(s, run, entry, &k->step, err);

	if (r == 0)
		r = view_tree_build(k->step, VIEW_SHOW_ALL, &k->tree, err);
	if (r == 0)
		r = storage_spread(view_tree_count(k->tree), check_node, k, err);
	for (uint32_t i = 0; r == 0 && k->cache && i < load_step_component_count(k->step); i++)
		r = check_files(k, i, err);
	return r < 0 || !k->cache ? r : check_views(k->step, err);
}

int view_step_check(struct store *s, const char *run, const struct commit_list_step *entry, bool read,
	void (*wrong)(void *arg, int r, const char *text), void (*read_bytes)(void *arg, uint64_t bytes), void *arg)
{
	struct check k = {.read_bytes = read_bytes, .arg = arg};
	struct base_error err = {0};
	int r = 0;

	if (read) {
		k.cache = load_cache_new(CHECK_CACHE_BYTES);
		if (!k.cache)
			return -ENOMEM;
		load_cache_quiet(k.cache);
	}
	r = check_all(&k, s, run, entry, &err);
	load_cache_free(k.cache);
	view_tree_unref(k.tree);
	load_step_unref(k.step);
	if (r == -ENOMEM)
		return r;
	if (r < 0)
		wrong(arg, r, err.code ? err.text : base_error_name(r));
	return 0;
}
