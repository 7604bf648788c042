/* SPDX-License-Identifier: Apache-2.0
 *
 * A tree is built in two stages. First come drafts: every file and directory in the order in which it is found, with a
 * hash table by (parent, name) for collisions. The tree's own files come first, then the directories of blobs, then the
 * blobs. So a blob never takes a path that the tree uses, and if one blob is a file where another needs a directory,
 * the file gives way. Which blob gives way depends on the set of names alone, not on their order. The second stage
 * numbers the nodes breadth first, with children sorted by their bytes.
 *
 * A blob that gives way is shown with its first character as %XX. Escaping never makes such a name (view_name_escape
 * escapes other characters), so it collides only in contrived cases, in which the blob is shown under a shortened name
 * with a hash of the whole.
 *
 * What a tree does not show is drafted like the rest and then left out of the numbering, so that the same blobs give
 * way, and have the same paths, whatever is shown.
 *
 * A blob's name has at most STORE_BLOB_PARTS_MAX parts, and the slashes in a part's names are bounded by the number of
 * names (proto/part.c). So the tree is not deep, and has few more directories than the records name files.
 *
 * All names are in one allocation. Drafts hold offsets into it, since it moves while it grows; nodes hold pointers. */
#include "core/view/tree.h"

#include <stdatomic.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/log.h"
#include "core/base/table.h"
#include "core/view/view_internal.h"

#define NO_ITEM UINT32_MAX

struct view_tree {
	struct load_step *step;
	struct view_node *nodes;
	uint32_t *files, nfiles;        /* nodes of .safetensors files, by component and file */
	char *names;
	size_t names_bytes;
	uint32_t n;
	unsigned show;
	uint32_t only;                  /* component; NO_ITEM: all */
	_Atomic uint64_t json_size;      /* of manifest.json, once it was computed */
	atomic_uint refs;
};

/* filled: something in the directory is shown */
struct draft { uint64_t size; size_t name; uint32_t parent, item; uint16_t file; uint8_t kind; bool hidden, filled; };

/* Of a component: its directory's draft, the paths of its own files, and whether it is shown as a .safetensors. */
struct component { uint32_t directory, npaths; struct base_buf paths; bool in_file; };

struct builder {
	struct load_step *step;
	struct base_error *err;
	struct component *components;
	uint32_t only;
	unsigned show;
	struct base_buf names, drafts;
	uint32_t n, warned, files_warned; /* warned: blobs and components that got a warning */
	struct base_table by_name;      /* drafts by (parent, name) */
};

int view_show_parse(const char *words)
{
	static const char *const known[] = {"npy", "safetensors"}; /* the bits of enum view_show, in order */
	int show = 0;
	for (const char *word = words;;) {
		size_t n = strcspn(word, ","), i = 0;
		while (i < BASE_COUNT(known) && (strlen(known[i]) != n || strncmp(known[i], word, n) != 0))
			i++;
		if (i == BASE_COUNT(known))
			return -EINVAL;
		show |= 1 << i;
		if (!word[n])
			return show;
		word += n + 1;
	}
}

/* ---- drafts ---- */

static struct draft *draft_at(const struct builder *b, uint32_t i)
{
	return (struct draft *)b->drafts.data + i;
}

static const char *draft_name(const struct builder *b, uint32_t i)
{
	return (const char *)b->names.data + draft_at(b, i)->name;
}

static uint32_t name_hash(uint32_t parent, const char *name)
{
	return base_table_hash_in(parent, name, strlen(name));
}

/* The number of the draft, or BASE_TABLE_NONE. */
static uint32_t draft_at_name(const struct builder *b, uint32_t parent, const char *name, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&b->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (draft_at(b, i)->parent == parent && strcmp(draft_name(b, i), name) == 0)
			break;
	return i;
}

static int64_t draft_find(const struct builder *b, uint32_t parent, const char *name)
{
	uint32_t i = draft_at_name(b, parent, name, name_hash(parent, name));

	return i == BASE_TABLE_NONE ? -ENOENT : (int64_t)i;
}

/* Number of the new draft; -EEXIST. */
static int64_t draft_add(struct builder *b, uint32_t parent, const char *name, enum view_kind kind, uint32_t item,
	uint64_t size)
{
	uint32_t hash;
	struct draft d;

	if (b->n == UINT32_MAX - 1)
		return -BASE_ELIMIT;
	hash = name_hash(parent, name);
	if (draft_at_name(b, parent, name, hash) != BASE_TABLE_NONE)
		return -EEXIST;
	if (base_table_reserve(&b->by_name, 1) < 0)
		return -ENOMEM;
	d = (struct draft){.size = size, .name = b->names.len, .parent = parent, .item = item, .kind = (uint8_t)kind};
	base_buf_append(&b->names, name, strlen(name) + 1);
	base_buf_append(&b->drafts, &d, sizeof d);
	if (b->names.error || b->drafts.error)
		return -ENOMEM;
	if (b->n) /* the root is in no directory */
		base_table_add(&b->by_name, hash, b->n);
	return b->n++;
}

/* The directory of that name, made if it does not exist; -ENOTDIR: there is a file of that name. */
static int64_t draft_directory(struct builder *b, uint32_t parent, const char *name)
{
	int64_t i = draft_find(b, parent, name);
	if (i < 0)
		return draft_add(b, parent, name, VIEW_DIRECTORY, NO_ITEM, 0);
	return draft_at(b, (uint32_t)i)->kind == VIEW_DIRECTORY ? i : -ENOTDIR;
}

/* ---- the tree's own files ---- */

/* in_file: the component has a .safetensors, with all tensors that can be in one. */
static int add_tensors(struct builder *b, uint32_t directory, uint32_t first, uint32_t end, bool in_file)
{
	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;
		char file[VIEW_FILE_NAME_BYTES];
		int64_t r;

		load_step_tensor_info(b->step, i, &info);
		view_name_escape(info.name, info.name_len, ".npy", file);
		r = draft_add(b, directory, file, VIEW_TENSOR_NPY, i, VIEW_NPY_DATA_OFFSET + info.bytes);
		if (r < 0)
			return (int)r;
		draft_at(b, (uint32_t)r)->hidden = !(b->show & VIEW_SHOW_NPY) && in_file &&
			view_safetensors_can(info.dtype, &info.shape, info.name, info.name_len);
	}
	return 0;
}

/* Bytes of a component's .safetensors, by the stored header or by the one that will be made when the file is opened.
 * -EFBIG: the component has no such file. */
static int safetensors_size(const struct load_step *step, uint32_t component, unsigned file, uint64_t *ret_size)
{
	char view[VIEW_FILES_VIEW_BYTES];
	uint32_t first, end;
	const char *name = load_step_component(step, component, &first, &end);
	const struct proto_view_header *stored = load_step_header_find(step, name, view_files_view(file, view));
	uint64_t head = stored ? stored->ref.raw_len : 0, data = stored ? stored->data_bytes : 0;
	int r = stored || file ? 0 : view_safetensors_make_step(step, NULL, 0, component, NULL, &head, &data);
	if (file && !stored)
		return -BASE_EFORMAT;
	if (r == 0 && (base_add_overflows(head, data, ret_size) || *ret_size > INT64_MAX))
		return stored ? -BASE_EFORMAT : -EFBIG;
	return r;
}

static int64_t add_safetensors(struct builder *b, uint32_t directory, const char *name, uint32_t component,
	unsigned file)
{
	uint64_t size = 0;
	int r = safetensors_size(b->step, component, file, &size);
	int64_t node = r < 0 ? r : draft_add(b, directory, name, VIEW_SAFETENSORS, component, size);
	if (node < 0)
		return node;
	draft_at(b, (uint32_t)node)->file = (uint16_t)file;
	draft_at(b, (uint32_t)node)->hidden = !(b->show & VIEW_SHOW_SAFETENSORS);
	return node;
}

static int64_t walk_path(struct builder *b, uint32_t directory, const char *path, bool renamed,
	char file[static VIEW_FILE_NAME_BYTES]);

/* Would a file at that path collide with one of the tree's own? */
static bool path_is_the_trees(const struct builder *b, uint32_t component, const char *path)
{
	size_t n = strcspn(path, "/"), end = strlen(".safetensors");
	uint32_t first, last;
	if (n <= end || strncmp(path + n - end, ".safetensors", end) != 0)
		return false;
	for (uint32_t i = 0; i < load_step_component_count(b->step); i++) {
		const char *name = load_step_component(b->step, i, &first, &last);
		if (strlen(name) == n - end && memcmp(name, path, n - end) == 0)
			return i != component || path[n];
	}
	return false;
}

/* A component's files at their own paths. -EEXIST, -ENOTDIR, -BASE_EFORMAT: they cannot be there. */
static int add_own_files(struct builder *b, uint32_t component)
{
	const struct component *c = &b->components[component];
	const char *path = (const char *)c->paths.data;
	char file[VIEW_FILE_NAME_BYTES];
	int64_t r = 0;
	for (uint32_t i = 0; r >= 0 && i < c->npaths; i++, path += strlen(path) + 1) {
		r = path_is_the_trees(b, component, path) ? -EEXIST : walk_path(b, 0, path, false, file);
		if (r >= 0) /* if there is one file, its header has the view that all readers know */
			r = add_safetensors(b, (uint32_t)r, file, component, c->npaths > 1 ? i + 1 : 0);
	}
	return r < 0 ? (int)r : 0;
}

static int add_files(struct builder *b, uint32_t component)
{
	struct component *c = &b->components[component];
	char file[PROTO_COMPONENT_MAX + 16];
	uint32_t first, end, before = b->n;
	const char *name = load_step_component(b->step, component, &first, &end);
	int64_t r = c->npaths ? add_own_files(b, component) : -ENOENT;
	if (r == -ENOMEM || r == -BASE_ELIMIT)
		return (int)r;
	if (r < 0) {
		for (uint32_t i = before; i < b->n; i++)
			draft_at(b, i)->hidden = true;
		if (c->npaths && b->files_warned++ < VIEW_NAMED)
			base_warning("%s/%llu: component %s is shown as %s.safetensors: the paths of its files are in "
				"use, or its headers do not fit", load_step_info(b->step)->run,
				(unsigned long long)load_step_info(b->step)->step, name, name);
		snprintf(file, sizeof file, "%s.safetensors", name);
		r = add_safetensors(b, 0, file, component, 0);
	}
	c->in_file = r >= 0;
	return r < 0 && r != -EFBIG ? (int)r : 0;
}

/* Directories come first, then files with a component's name, so that files with names of their own cannot take these.
 */
static int add_components(struct builder *b)
{
	uint32_t n = load_step_component_count(b->step), first, end;
	uint64_t left = VIEW_FILES_MAX_BYTES;
	int r = 0;
	if (!(b->components = calloc(n + 1, sizeof *b->components)))
		return -ENOMEM;
	for (uint32_t i = 0; r == 0 && i < n; i++) {
		struct component *c = &b->components[i];
		const char *name = load_step_component(b->step, i, &first, &end);
		int64_t directory = draft_add(b, 0, name, VIEW_DIRECTORY, i, 0);
		if (directory < 0)
			return (int)directory;
		c->directory = (uint32_t)directory;
		r = view_files_read(b->step, name, &left, &b->files_warned, &c->paths, &c->npaths, b->err);
	}
	for (int own = 0; own < 2; own++)
		for (uint32_t i = 0; r == 0 && i < n; i++)
			if ((b->components[i].npaths > 0) == own)
				r = add_files(b, i);
	for (uint32_t i = 0; r == 0 && i < n; i++) {
		load_step_component(b->step, i, &first, &end);
		r = add_tensors(b, b->components[i].directory, first, end, b->components[i].in_file);
	}
	if (b->files_warned > VIEW_NAMED)
		base_warning("%s/%llu: the same holds for %u more components", load_step_info(b->step)->run,
			(unsigned long long)load_step_info(b->step)->step, b->files_warned - VIEW_NAMED);
	return r;
}

/* ---- blobs ---- */

/* Length of the first element of a blob's path. A slash separates only elements that are not empty, so those of "a//b",
 * "/a" and "a/" are kept (as %2F). */
static size_t part_len(const char *path, size_t len)
{
	for (size_t i = 1; i + 1 < len; i++)
		if (path[i] == '/' && path[i + 1] != '/')
			return i;
	return len;
}

/* The file name of the first part of a path that gives way: its first character is written as %XX. false: too long. */
static bool renamed_part(const char *part, size_t len, char file[static VIEW_FILE_NAME_BYTES])
{
	base_cleanup_free char *rest = malloc(len + 1);
	char hex[16] = "", escaped[VIEW_FILE_NAME_BYTES];
	size_t n = 1;
	if (!rest)
		return false;
	while (n < len && n < 4 && ((unsigned char)part[n] & 0xc0) == 0x80)
		n++;
	for (size_t i = 0; i < n; i++)
		snprintf(hex + 3 * i, 4, "%%%02X", (unsigned char)part[i]);
	rest[0] = 'x'; /* a placeholder for the first character, so that a dot behind it is not a leading one */
	memcpy(rest + 1, part + n, len - n);
	view_name_escape(rest, len - n + 1, "", escaped);
	return (size_t)snprintf(file, VIEW_FILE_NAME_BYTES, "%s%.240s", hex, escaped + 1) ==
		3 * n + strlen(escaped + 1);
}

/* Walks a blob's path from `directory` on and makes directories. Returns the directory for its file, and the file's
 * name; -ENOTDIR: a file is in the way. */
static int64_t walk_path(struct builder *b, uint32_t directory, const char *path, bool renamed,
	char file[static VIEW_FILE_NAME_BYTES])
{
	size_t left = strlen(path);
	int64_t at = directory;
	for (bool first = true;; first = false) {
		size_t n = part_len(path, left);
		if (first && renamed && !renamed_part(path, n, file))
			return -ENOTDIR;
		if (!first || !renamed)
			view_name_escape_element(path, n, file);
		if (n == left)
			return at;
		if ((at = draft_directory(b, (uint32_t)at, file)) < 0)
			return at;
		path += n + 1;
		left -= n + 1;
	}
}

/* `ranks` and `mesh` are reserved, whether or not this step has them. */
static bool reserved_path(const struct load_blob_info *blob)
{
	size_t n = part_len(blob->name, strlen(blob->name));
	return !blob->per_rank &&
		((n == 5 && memcmp(blob->name, "ranks", n) == 0) || (n == 4 && memcmp(blob->name, "mesh", n) == 0));
}

static int64_t blob_base(struct builder *b, const struct load_blob_info *blob)
{
	char rank[16];
	int64_t ranks;

	if (!blob->per_rank)
		return 0;
	ranks = draft_directory(b, 0, "ranks");
	snprintf(rank, sizeof rank, "%05u", blob->rank);
	return ranks < 0 ? ranks : draft_directory(b, (uint32_t)ranks, rank);
}

static int64_t place_blob(struct builder *b, uint32_t item, const struct load_blob_info *blob, bool renamed)
{
	char file[VIEW_FILE_NAME_BYTES];
	int64_t base = blob_base(b, blob);
	int64_t at;

	if (base < 0)
		return base;
	at = walk_path(b, (uint32_t)base, blob->name, renamed, file);
	return at < 0 ? at : draft_add(b, (uint32_t)at, file, VIEW_BLOB, item, blob->bytes);
}

/* Places a blob that gives way. An empty directory that was made for its first place stays. */
static int give_way(struct builder *b, uint32_t item)
{
	const struct load_step_info *info = load_step_info(b->step);
	struct load_blob_info blob;
	char file[VIEW_FILE_NAME_BYTES];
	int64_t r;

	load_step_blob_info(b->step, item, &blob);
	r = place_blob(b, item, &blob, true);
	if (r == -ENOTDIR || r == -EEXIST) {
		int64_t base = blob_base(b, &blob);
		view_name_shorten(blob.name, strlen(blob.name), "", file);
		r = base < 0 ? base : draft_add(b, (uint32_t)base, file, VIEW_BLOB, item, blob.bytes);
	}
	if (r < 0)
		return (int)r;
	if (b->warned++ < VIEW_NAMED)
		base_warning("%s/%llu: the path of the blob '%s' is in use: its first part is shown escaped", info->run,
			(unsigned long long)info->step, blob.name);
	return 0;
}

static int add_blobs(struct builder *b)
{
	uint32_t n = load_step_blob_count(b->step);
	base_cleanup_free bool *away = calloc(n + 1, sizeof *away);
	struct load_blob_info blob;
	char file[VIEW_FILE_NAME_BYTES];
	if (!away)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) { /* directories first */
		int64_t at;

		load_step_blob_info(b->step, i, &blob);
		at = blob_base(b, &blob);
		away[i] = reserved_path(&blob);
		if (at >= 0 && !away[i])
			at = walk_path(b, (uint32_t)at, blob.name, false, file);
		if (at < 0 && at != -ENOTDIR)
			return (int)at;
		away[i] = away[i] || at < 0;
	}
	for (uint32_t i = 0; i < n; i++) {
		int64_t r;

		if (away[i])
			continue;
		load_step_blob_info(b->step, i, &blob);
		r = place_blob(b, i, &blob, false);
		if (r < 0 && r != -EEXIST)
			return (int)r;
		away[i] = r < 0;
	}
	for (uint32_t i = 0; i < n; i++) {
		int r = away[i] ? give_way(b, i) : 0;
		if (r < 0)
			return r;
	}
	if (b->warned > VIEW_NAMED)
		base_warning("%s/%llu: the same holds for %u more blobs", load_step_info(b->step)->run,
			(unsigned long long)load_step_info(b->step)->step, b->warned - VIEW_NAMED);
	return 0;
}

static int draft_all(struct builder *b)
{
	int64_t r = draft_add(b, 0, "", VIEW_DIRECTORY, NO_ITEM, 0);
	if (r >= 0)
		r = add_components(b);
	if (r >= 0)
		r = draft_add(b, 0, "manifest.json", VIEW_MANIFEST_JSON, NO_ITEM, VIEW_SIZE_UNKNOWN);
	return r < 0 ? (int)r : add_blobs(b);
}

/* ---- numbering ---- */

static bool is_index_of(const char *name, const char *file)
{
	const char *base = strrchr(file, '/') ? strrchr(file, '/') + 1 : file;
	size_t folder = (size_t)(base - file);
	const char *end;

	if (strncmp(name, file, folder) != 0 || strchr(name + folder, '/'))
		return false;
	end = strstr(name + folder, ".safetensors.");
	return end && strncmp(name + folder, base, (size_t)(end - name) - folder) == 0;
}

/* Does the blob belong to the one component that is shown? */
static bool blob_belongs(const struct builder *b, const struct load_blob_info *blob)
{
	const struct component *c = &b->components[b->only];
	uint32_t first, end;
	const char *component = load_step_component(b->step, b->only, &first, &end), *path = (char *)c->paths.data;
	size_t n = strlen(component);
	if (strncmp(blob->name, component, n) == 0 && (blob->name[n] == '/' || strcmp(blob->name + n, ".json") == 0))
		return true;
	for (uint32_t i = 0; i < c->npaths; i++, path += strlen(path) + 1) {
		const char *slash = strrchr(path, '/');
		if (!blob->per_rank && ((slash && strncmp(blob->name, path, (size_t)(slash - path) + 1) == 0) ||
			is_index_of(blob->name, path)))
			return true;
	}
	return false;
}

static void hide_others(struct builder *b)
{
	uint32_t first, end;
	load_step_component(b->step, b->only, &first, &end);
	for (uint32_t i = 1; i < b->n; i++) {
		struct draft *d = draft_at(b, i);
		struct load_blob_info blob;
		bool ours = true;
		if (d->kind == VIEW_TENSOR_NPY)
			ours = d->item >= first && d->item < end;
		else if (d->kind == VIEW_SAFETENSORS)
			ours = d->item == b->only;
		else if (d->kind == VIEW_BLOB) {
			load_step_blob_info(b->step, d->item, &blob);
			ours = blob_belongs(b, &blob);
		}
		d->hidden = d->hidden || !ours;
	}
}

/* Hides a component's directory if it has neither tensors nor blobs. A directory stays if anything in it is shown, even
 * if it was made for files that are shown elsewhere. Drafts in a directory come after the directory itself. */
static void hide_directories(struct builder *b)
{
	for (uint32_t i = b->n - 1; i > 0; i--) {
		struct draft *d = draft_at(b, i);
		bool may_go = b->only != NO_ITEM || (!(b->show & VIEW_SHOW_NPY) && d->item != NO_ITEM);
		if (d->kind == VIEW_DIRECTORY)
			d->hidden = !d->filled && (d->hidden || may_go);
		if (!d->hidden)
			draft_at(b, d->parent)->filled = true;
	}
}

static int by_draft_name(const void *pa, const void *pb, void *arg)
{
	const struct builder *b = arg;
	return strcmp(draft_name(b, *(const uint32_t *)pa), draft_name(b, *(const uint32_t *)pb));
}

static void fill_node(const struct builder *b, struct view_tree *t, uint32_t node, uint32_t draft, uint32_t parent)
{
	const struct draft *d = draft_at(b, draft);
	t->nodes[node] = (struct view_node){
		.name = t->names + d->name, .parent = parent, .item = d->item, .kind = d->kind, .file = d->file,
		.size = d->size};
}

static int by_file(const void *pa, const void *pb, void *arg)
{
	const struct view_tree *t = arg;
	const struct view_node *a = &t->nodes[*(const uint32_t *)pa], *b = &t->nodes[*(const uint32_t *)pb];
	return a->item != b->item ? (a->item < b->item ? -1 : 1) : (int)a->file - (int)b->file;
}

static int list_files(struct view_tree *t)
{
	for (uint32_t i = 0; i < t->n; i++) {
		if (t->nodes[i].kind != VIEW_SAFETENSORS)
			continue;
		if (base_array_more(t->files, t->nfiles) < 0)
			return -ENOMEM;
		t->files[t->nfiles++] = i;
	}
	if (t->nfiles)
		qsort_r(t->files, t->nfiles, sizeof *t->files, by_file, t);
	return 0;
}

/* children: drafts grouped by parent; first[d] .. first[d + 1]: those of draft d. */
static void group_children(const struct builder *b, uint32_t *first, uint32_t *children)
{
	for (uint32_t i = 1; i < b->n; i++)
		first[draft_at(b, i)->parent + 2] += !draft_at(b, i)->hidden;
	for (uint32_t i = 2; i <= b->n; i++)
		first[i] += first[i - 1];
	for (uint32_t i = 1; i < b->n; i++) /* moves each start one entry down, to where it belongs */
		if (!draft_at(b, i)->hidden)
			children[first[draft_at(b, i)->parent + 1]++] = i;
}

static int number_nodes(struct builder *b, struct view_tree *t)
{
	base_cleanup_free uint32_t *first = calloc((size_t)b->n + 2, sizeof *first);
	base_cleanup_free uint32_t *children = malloc((size_t)b->n * sizeof *children + 1);
	base_cleanup_free uint32_t *drafts = malloc((size_t)b->n * sizeof *drafts); /* draft of a node */
	t->nodes = malloc((size_t)b->n * sizeof *t->nodes);
	if (!first || !children || !drafts || !t->nodes)
		return -ENOMEM;
	if (b->only != NO_ITEM)
		hide_others(b);
	hide_directories(b);
	group_children(b, first, children);
	fill_node(b, t, 0, drafts[0] = 0, 0);
	t->n = 1;
	for (uint32_t node = 0; node < t->n; node++) {
		uint32_t from = first[drafts[node]], n = first[drafts[node] + 1] - from;
		qsort_r(children + from, n, sizeof *children, by_draft_name, b);
		t->nodes[node].first_child = t->n;
		t->nodes[node].nchildren = n;
		for (uint32_t i = 0; i < n; i++, t->n++)
			fill_node(b, t, t->n, drafts[t->n] = children[from + i], node);
	}
	return 0;
}

static int finish(struct builder *b, struct view_tree *t)
{
	int r = draft_all(b);
	char *names;

	if (r < 0)
		return r;
	t->names_bytes = b->names.len;
	names = realloc(b->names.data, b->names.len);
	t->names = names ? names : (char *)b->names.data;
	b->names.data = (uint8_t *)t->names; /* still read by the numbering */
	r = number_nodes(b, t);
	b->names = (struct base_buf)BASE_BUF_INIT;
	return r < 0 ? r : list_files(t);
}

static int build(struct load_step *step, unsigned show, uint32_t only, struct view_tree **ret_t, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(step);
	struct base_error own = {0};
	struct builder b = {.step = step, .show = show, .only = only, .err = &own};
	int r = load_step_blobs(step, err);
	struct view_tree *t;

	if (r < 0)
		return r;
	t = calloc(1, sizeof *t);
	if (!t)
		return base_no_memory_for(err, "%s/%llu", info->run, (unsigned long long)info->step);
	t->refs = 1;
	t->show = show;
	t->only = only;
	t->json_size = VIEW_SIZE_UNKNOWN;
	t->step = load_step_ref(step);
	r = finish(&b, t);
	base_buf_release(&b.names);
	base_buf_release(&b.drafts);
	base_table_release(&b.by_name);
	for (uint32_t i = 0; b.components && i < load_step_component_count(step); i++)
		base_buf_release(&b.components[i].paths);
	free(b.components);
	if (r < 0) {
		view_tree_unref(t);
		if (own.code)
			return base_error_set(err, r, "%s", own.text);
		return base_error_set(err, r, "%s/%llu: its names cannot be shown as files: %s", info->run,
			(unsigned long long)info->step, base_error_name(r));
	}
	*ret_t = t;
	return 0;
}

int view_tree_build(struct load_step *step, unsigned show, struct view_tree **ret_t, struct base_error *err)
{
	return build(step, show, NO_ITEM, ret_t, err);
}

int view_tree_build_component(struct load_step *step, unsigned show, uint32_t component, struct view_tree **ret_t,
	struct base_error *err)
{
	return build(step, show, component, ret_t, err);
}

/* ---- reading ---- */

struct view_tree *view_tree_ref(struct view_tree *t)
{
	atomic_fetch_add(&t->refs, 1);
	return t;
}

void view_tree_unref(struct view_tree *t)
{
	if (!t || atomic_fetch_sub(&t->refs, 1) != 1)
		return;
	load_step_unref(t->step);
	free(t->nodes);
	free(t->files);
	free(t->names);
	free(t);
}

struct load_step *view_tree_step(const struct view_tree *t)
{
	return t->step;
}

unsigned view_tree_show(const struct view_tree *t)
{
	return t->show;
}

bool view_tree_has(const struct view_tree *t, uint32_t component)
{
	return t->only == NO_ITEM || t->only == component;
}

uint32_t view_tree_count(const struct view_tree *t)
{
	return t->n;
}

const struct view_node *view_tree_node(const struct view_tree *t, uint32_t node)
{
	return node < t->n ? &t->nodes[node] : NULL;
}

int view_tree_size(struct view_tree *t, uint32_t node, uint64_t *ret_size)
{
	int r;

	*ret_size = t->nodes[node].size;
	if (*ret_size != VIEW_SIZE_UNKNOWN)
		return 0;
	*ret_size = t->json_size;
	if (*ret_size != VIEW_SIZE_UNKNOWN)
		return 0;
	r = view_manifest_json(t, NULL, ret_size, NULL);
	if (r == 0)
		t->json_size = *ret_size;
	return r;
}

int64_t view_tree_lookup(const struct view_tree *t, uint32_t directory, const char *name)
{
	const struct view_node *d;

	if (directory >= t->n)
		return -ENOENT;
	d = &t->nodes[directory];
	if (d->kind != VIEW_DIRECTORY)
		return -ENOTDIR;
	return base_search(i, d->first_child, d->first_child + d->nchildren, strcmp(t->nodes[i].name, name));
}

uint32_t view_tree_files(const struct view_tree *t, uint32_t component, const uint32_t **ret_nodes)
{
	uint32_t first = (uint32_t)base_bisect(i, 0, t->nfiles, t->nodes[t->files[i]].item < component), n = 0;
	while (first + n < t->nfiles && t->nodes[t->files[first + n]].item == component)
		n++;
	*ret_nodes = t->files + first;
	return n;
}

/* Finds also a tensor's name without its .npy, and an element of a blob's path that is not escaped. */
static int64_t lookup_lenient(const struct view_tree *t, uint32_t directory, const char *name)
{
	char file[VIEW_FILE_NAME_BYTES + 4];
	int64_t node = view_tree_lookup(t, directory, name);
	if (node != -ENOENT || strlen(name) >= VIEW_FILE_NAME_BYTES)
		return node;
	snprintf(file, sizeof file, "%s.npy", name);
	node = view_tree_lookup(t, directory, file);
	if (node != -ENOENT)
		return node;
	view_name_escape_element(name, strlen(name), file);
	return view_tree_lookup(t, directory, file);
}

/* Finds "model/<true name>" also if the name has a slash or is long, so that it is not a file name. */
static int64_t walk_true_name(const struct view_tree *t, const char *path)
{
	char file[VIEW_FILE_NAME_BYTES];
	size_t n = strcspn(path, "/");
	int64_t directory;

	if (n == 0 || n >= sizeof file || path[n] == 0 || path[n + 1] == 0)
		return -ENOENT;
	memcpy(file, path, n);
	file[n] = 0;
	directory = view_tree_lookup(t, 0, file);
	if (directory < 0)
		return directory;
	view_name_escape(path + n + 1, strlen(path + n + 1), ".npy", file);
	return view_tree_lookup(t, (uint32_t)directory, file);
}

int64_t view_tree_walk(const struct view_tree *t, const char *path)
{
	base_cleanup_free char *copy = strdup(path);
	char *state = NULL;
	int64_t node = 0, other;

	if (!copy)
		return -ENOMEM;
	for (char *part = strtok_r(copy, "/", &state); part && node >= 0; part = strtok_r(NULL, "/", &state))
		node = lookup_lenient(t, (uint32_t)node, part);
	if (node >= 0)
		return node;
	other = walk_true_name(t, path + strspn(path, "/"));
	return other >= 0 ? other : node;
}

size_t view_tree_memory(const struct view_tree *t)
{
	return sizeof *t + t->n * sizeof *t->nodes + t->nfiles * sizeof *t->files + t->names_bytes;
}

void view_tree_path(const struct view_tree *t, uint32_t node, struct base_buf *b)
{
	size_t len = 0, from = b->len;
	char *path, *end;

	for (uint32_t i = node; i; i = t->nodes[i].parent)
		len += strlen(t->nodes[i].name) + (t->nodes[i].parent != 0);
	path = base_buf_extend(b, len);
	end = path ? (char *)b->data + from + len : NULL;
	for (uint32_t i = node; i && path; i = t->nodes[i].parent) {
		size_t n = strlen(t->nodes[i].name);
		memcpy(end -= n, t->nodes[i].name, n);
		if (t->nodes[i].parent)
			*--end = '/';
	}
}
