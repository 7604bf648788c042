/* SPDX-License-Identifier: Apache-2.0
 *
 * Nodes below a step's directory `mesh`. An id has bit 63 set, followed by
 *
 *   33 bits   the number of the mesh in the table (meshes.h), which is never reused
 *   17 bits   1 + the rank, or 0: in the mesh's own directory
 *    1 bit    a symbolic link: the rank's other name
 *   12 bits   0: the directory itself; in the mesh's own: 1 manifest.json; in a rank's: 1 + the component
 *
 * so that any number of ranks of a mesh can be looked up without a table of ranks or files. Reading a directory gives
 * names without nodes, and the kernel looks up what it needs, so only look-ups count for FORGET. */
#include <stdio.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "fs/mount.h"

#define ITEM_BITS 12
#define ALIAS_BIT (UINT64_C(1) << ITEM_BITS)
#define RANK_SHIFT (ITEM_BITS + 1)
#define RANK_BITS 17
#define SERIAL_SHIFT (RANK_SHIFT + RANK_BITS)
#define ITEMS_MAX ((UINT32_C(1) << ITEM_BITS) - 1)
#define MANIFEST "manifest.json"

_Static_assert(SERIAL_SHIFT + FS_MESHES_SERIAL_BITS == 63, "bits of a node id");
_Static_assert(VIEW_MESH_RANKS_MAX < 1 << RANK_BITS, "bits of a rank");

/* How many refused names are logged at once; after these, one in each REFUSAL_NS. */
#define REFUSALS 32
#define REFUSAL_NS INT64_C(10000000000)

uint64_t fs_mesh_serial(fuse_ino_t id)
{
	return (id & ~FS_NODE_MESH) >> SERIAL_SHIFT;
}

fuse_ino_t fs_mesh_id(const struct fs_node *n)
{
	uint64_t rank = n->rank == VIEW_MESH_ALL ? 0 : (uint64_t)n->rank + 1;

	return FS_NODE_MESH | n->mesh->serial << SERIAL_SHIFT | rank << RANK_SHIFT | (n->alias ? ALIAS_BIT : 0) |
		n->item;
}

int fs_mesh_decode(struct fs_mount *m, fuse_ino_t id, struct fs_node *ret_n)
{
	uint32_t rank = (uint32_t)(id >> RANK_SHIFT & ((UINT32_C(1) << RANK_BITS) - 1));
	struct fs_mesh *mesh = fs_meshes_at(m->meshes, fs_mesh_serial(id));

	if (!mesh)
		return -ESTALE;
	*ret_n = (struct fs_node){.kind = FS_MESH, .run = mesh->commit->run, .commit = mesh->commit, .mesh = mesh,
		.rank = rank ? rank - 1 : VIEW_MESH_ALL, .alias = id & ALIAS_BIT, .item = id & ITEMS_MAX};
	return 0;
}

bool fs_mesh_is_directory(const struct fs_node *n)
{
	return n->item == 0 && !n->alias;
}

/* ---- attributes ---- */

static uint64_t rank_ino(const struct fs_node *n)
{
	char name[VIEW_MESH_RANK_NAME];

	if (n->rank == VIEW_MESH_ALL)
		return n->mesh->ino;
	view_mesh_rank_name(n->rank, name);
	return fs_tree_ino(n->mesh->ino, name);
}

static int file_size(const struct fs_node *n, struct fs_step *step, uint64_t *ret_size)
{
	struct view_mesh *view;
	int r;

	if (!step)
		return -ESTALE;
	r = fs_mesh_view(n->mesh, step, &view);
	if (r < 0)
		return r;
	r = view_mesh_size(view, view_tree_step(step->tree), n->rank, n->item - 1, ret_size);
	view_mesh_unref(view);
	return r;
}

int fs_mesh_entry(struct fs_mount *m, const struct fs_node *n, struct fs_step *step, struct fuse_entry_param *ret_e)
{
	uint64_t size = 0, ino;
	char name[VIEW_MESH_RANK_NAME];
	mode_t type = S_IFDIR;

	if (n->kind == FS_MESHES) {
		ino = fs_tree_ino(n->commit->ino, VIEW_MESH_DIRECTORY);
	} else if (n->alias) {
		view_mesh_rank_name(n->rank, name);
		ino = fs_tree_ino(n->mesh->ino, name) ^ 1;
		size = strlen(name);
		type = S_IFLNK;
	} else if (n->item) {
		int r = file_size(n, step, &size);
		if (r < 0)
			return r;
		ino = base_xxh64_of(rank_ino(n), &n->item, sizeof n->item) | 2;
		type = S_IFREG;
	} else {
		ino = rank_ino(n);
	}
	*ret_e = (struct fuse_entry_param){.ino = fs_node_id(n), .generation = m->generation,
		.attr_timeout = FS_FOREVER, .entry_timeout = FS_FOREVER};
	return fs_stat_fill(m, n->commit->run, &ret_e->attr, ino, type, size, n->commit->time_ns);
}

/* ---- look-ups ---- */

/* Any user may look up any number of wrong names, so the log of them is bounded. */
static void log_refusal(struct fs_mount *m, const struct fs_commit *commit, const char *name, const char *text)
{
	/* shifted, so that all may be logged also just after the machine has started */
	int64_t now = (int64_t)base_monotonic_ns() + REFUSALS * REFUSAL_NS;
	char step[FS_STEP_NAME];
	bool logged;

	atomic_fetch_add_explicit(&m->stats.mesh_refusals, 1, memory_order_relaxed);
	pthread_mutex_lock(&m->lock);
	if (m->refusal_credit_ns < now - REFUSALS * REFUSAL_NS)
		m->refusal_credit_ns = now - REFUSALS * REFUSAL_NS;
	logged = m->refusal_credit_ns <= now - REFUSAL_NS;
	if (logged)
		m->refusal_credit_ns += REFUSAL_NS;
	pthread_mutex_unlock(&m->lock);
	if (!logged)
		return;
	fs_step_name(commit->step, step);
	base_warning("%s/%s/" VIEW_MESH_DIRECTORY "/%.200s: %s", commit->run->name, step, name, text);
}

static int lookup_mesh_name(struct fs_mount *m, struct fs_step *step, const char *name, struct fs_node *n)
{
	struct base_error err = {0};
	struct fs_mesh *mesh;

	int r = fs_meshes_find(m->meshes, n->commit, step, name, &mesh, &err);
	if (r < 0) {
		log_refusal(m, n->commit, name, err.text[0] ? err.text : base_error_name(r));
		return r;
	}
	if (r > 0)
		fs_runs_wake(m->runs);
	*n = (struct fs_node){.kind = FS_MESH, .run = n->run, .commit = n->commit, .mesh = mesh,
		.rank = VIEW_MESH_ALL};
	return 0;
}

static int lookup_rank(struct fs_step *step, const char *name, struct fs_node *n)
{
	struct view_mesh *view;
	int r;

	if (strcmp(name, MANIFEST) == 0) {
		n->item = 1;
		return 0;
	}
	r = fs_mesh_view(n->mesh, step, &view);
	if (r < 0)
		return r;
	r = view_mesh_rank_parse(view, name, &n->rank, &n->alias);
	view_mesh_unref(view);
	return r;
}

static int lookup_file(struct fs_step *step, const char *name, struct fs_node *n)
{
	int64_t component = view_mesh_component(view_tree_step(step->tree), name);

	if (component < 0 || component >= ITEMS_MAX)
		return -ENOENT;
	n->item = (uint32_t)component + 1;
	return 0;
}

int fs_mesh_lookup(struct fs_mount *m, struct fs_step *step, const char *name, struct fs_node *n)
{
	bool top = n->kind == FS_MESHES;

	if (!top && !fs_mesh_is_directory(n))
		return -ENOTDIR;
	if (strcmp(name, ".") == 0)
		return 0;
	if (strcmp(name, "..") == 0) {
		if (!top && n->rank != VIEW_MESH_ALL) {
			n->rank = VIEW_MESH_ALL;
			return 0;
		}
		fs_node_release(n);
		n->kind = top ? FS_STEP : FS_MESHES;
		return 0;
	}
	if (top)
		return lookup_mesh_name(m, step, name, n);
	return n->rank == VIEW_MESH_ALL ? lookup_rank(step, name, n) : lookup_file(step, name, n);
}

int fs_mesh_open(struct fs_step *step, const struct fs_node *n, struct view_file **ret_f, struct base_error *err)
{
	struct view_mesh *view;

	int r = fs_mesh_view(n->mesh, step, &view);
	if (r < 0)
		return r;
	r = view_mesh_open(view, step->tree, n->rank, n->item - 1, ret_f, err);
	view_mesh_unref(view);
	return r;
}

/* ---- reading directories ---- */

/* h->n: how many meshes or ranks; h->text: the names of the meshes. */
int fs_mesh_opendir(struct fs_handle *h)
{
	struct view_mesh *view;
	struct base_buf names;
	uint32_t n;
	int r;

	if (h->node.kind == FS_MESHES) {
		r = view_mesh_names(view_tree_step(h->step->tree), &names, &n);
		if (r < 0)
			return r;
		h->text = (char *)names.data;
		h->text_len = names.len;
		h->n = n;
		return 0;
	}
	if (!fs_mesh_is_directory(&h->node))
		return -ENOTDIR;
	r = fs_mesh_view(h->node.mesh, h->step, &view);
	if (r < 0)
		return r;
	h->n = view_mesh_ranks(view);
	view_mesh_unref(view);
	return 0;
}

static int child_mesh(const struct fs_handle *h, uint64_t i, char *text, size_t room)
{
	const char *name = h->text;

	if (i >= h->n)
		return 0;
	for (; i; i--)  /* a step has few meshes */
		name += strlen(name) + 1;
	snprintf(text, room, "%s", name);
	return 1;
}

static int child_file(struct fs_handle *h, uint64_t i, char *text, size_t room)
{
	struct load_step *step = view_tree_step(h->step->tree);
	uint32_t first, end;

	if (i >= load_step_component_count(step) || i >= ITEMS_MAX)
		return 0;
	snprintf(text, room, "%s.safetensors", load_step_component(step, (uint32_t)i, &first, &end));
	return 1;
}

int fs_mesh_child(struct fs_handle *h, uint64_t i, char *text, size_t room, struct stat *ret_st)
{
	struct fs_node n = h->node;
	int r = 1;

	*ret_st = (struct stat){.st_mode = S_IFDIR};
	if (n.kind == FS_MESHES) {
		r = child_mesh(h, i, text, room);
		ret_st->st_ino = r ? fs_tree_ino(fs_tree_ino(n.commit->ino, VIEW_MESH_DIRECTORY), text) : 0;
	} else if (n.rank != VIEW_MESH_ALL) {
		n.item = (uint32_t)i + 1;
		r = child_file(h, i, text, room);
		ret_st->st_ino = base_xxh64_of(rank_ino(&n), &n.item, sizeof n.item) | 2;
		ret_st->st_mode = S_IFREG;
	} else if (i == 0) {
		n.item = 1;
		snprintf(text, room, MANIFEST);
		ret_st->st_ino = base_xxh64_of(rank_ino(&n), &n.item, sizeof n.item) | 2;
		ret_st->st_mode = S_IFREG;
	} else if (i <= h->n) {
		n.rank = (uint32_t)i - 1;
		view_mesh_rank_name(n.rank, text);
		ret_st->st_ino = rank_ino(&n);
	} else {
		r = 0;
	}
	return r;
}
