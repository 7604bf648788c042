/* SPDX-License-Identifier: Apache-2.0
 *
 * Nodes: from ids to things, and from things to attributes. A node id says all that is needed (there is no table of
 * inodes, and forget costs nothing), except below a step's directory `mesh` (mesh_nodes.c). st_ino is a hash of run,
 * commit entry and path, the same after every remount. */
#include <string.h>

#include "fs/mount.h"

int fs_node_decode(struct fs_mount *m, fuse_ino_t id, struct fs_node *ret_n)
{
	uint32_t low = (uint32_t)id;

	*ret_n = (struct fs_node){0};
	if (id & FS_NODE_MESH)
		return fs_mesh_decode(m, id, ret_n);
	if (id >> 32) {
		ret_n->kind = low == FS_FILE_MESHES ? FS_MESHES : low == FS_FILE_TAG ? FS_TAG : FS_STEP;
		ret_n->commit = fs_runs_commit(m->runs, (uint32_t)(id >> 32));
		ret_n->file = ret_n->kind == FS_STEP ? low : 0;
		if (!ret_n->commit)
			return -ESTALE;
		ret_n->run = ret_n->commit->run;
		return 0;
	}
	if (low == FS_NODE_ROOT) {
		ret_n->kind = FS_ROOT;
	} else if (low == FS_NODE_CONTROL) {
		ret_n->kind = FS_CONTROL;
	} else if (low > FS_NODE_CONTROL && low - FS_NODE_CONTROL <= fs_control_count()) {
		ret_n->kind = FS_CONTROL_FILE;
		ret_n->control = low - (uint32_t)FS_NODE_CONTROL - 1;
	} else {
		ret_n->kind = low & FS_NODE_RUN ? FS_RUN : FS_LATEST;
		ret_n->run = low & (FS_NODE_RUN | FS_NODE_LATEST) ? fs_runs_at(m->runs, low & FS_RUNS_MAX) : NULL;
		if (!ret_n->run)
			return -ESTALE;
	}
	return 0;
}

void fs_node_release(struct fs_node *n)
{
	fs_mesh_unref(n->mesh);
	n->mesh = NULL;
}

bool fs_node_is_below_step(const struct fs_node *n)
{
	return (n->kind == FS_STEP && n->file) || (n->kind == FS_MESH && !fs_mesh_is_directory(n));
}

fuse_ino_t fs_node_id(const struct fs_node *n)
{
	switch (n->kind) {
	case FS_ROOT: return FS_NODE_ROOT;
	case FS_CONTROL: return FS_NODE_CONTROL;
	case FS_CONTROL_FILE: return FS_NODE_CONTROL + 1 + n->control;
	case FS_RUN: return FS_NODE_RUN + n->run->number;
	case FS_LATEST: return FS_NODE_LATEST + n->run->number;
	case FS_TAG: return (fuse_ino_t)n->commit->number << 32 | FS_FILE_TAG;
	case FS_MESHES: return (fuse_ino_t)n->commit->number << 32 | FS_FILE_MESHES;
	case FS_MESH: return fs_mesh_id(n);
	case FS_STEP: break;
	}
	return (fuse_ino_t)n->commit->number << 32 | n->file;
}

int fs_stat_fill(struct fs_mount *m, struct fs_run *run, struct stat *st, uint64_t ino, mode_t type, uint64_t size,
	int64_t time_ns)
{
	struct fs_owner owner = m->owner;
	int r = run ? fs_modes_run(m, run, &owner) : 0;
	mode_t may = S_ISLNK(type) ? 0777 : owner.mode & (S_ISDIR(type) ? 0755 : 0644);
	struct timespec t = {.tv_sec = time_ns / 1000000000, .tv_nsec = time_ns % 1000000000};

	if (t.tv_nsec < 0) {
		t.tv_sec--;
		t.tv_nsec += 1000000000;
	}
	/* Directories have 1 link, too, which means that their subdirectories are not counted: with 2, fts(3) and
	 * others that avoid a stat would conclude that there are none. */
	*st = (struct stat){.st_ino = ino, .st_mode = type | may, .st_nlink = 1,
		.st_uid = owner.uid, .st_gid = owner.gid, .st_size = (off_t)size, .st_blksize = 1 << 20,
		.st_blocks = (blkcnt_t)base_div_up(size, 512), .st_atim = t, .st_mtim = t, .st_ctim = t};
	return r;
}

uint64_t fs_node_ino(struct fs_commit *commit, struct view_tree *tree, uint32_t file)
{
	const struct view_node *v = file ? view_tree_node(tree, file) : NULL;

	return v ? fs_tree_ino(fs_node_ino(commit, tree, v->parent), v->name) : commit->ino;
}

int fs_tree_entry(struct fs_mount *m, struct fs_commit *commit, uint32_t file, const struct view_node *v, uint64_t ino,
	uint64_t size, struct fuse_entry_param *ret_e)
{
	*ret_e = (struct fuse_entry_param){.ino = (fuse_ino_t)commit->number << 32 | file, .generation = m->generation,
		.attr_timeout = FS_FOREVER, .entry_timeout = FS_FOREVER};
	return fs_stat_fill(m, commit->run, &ret_e->attr, ino, v->kind == VIEW_DIRECTORY ? S_IFDIR : S_IFREG, size,
		commit->time_ns);
}

int fs_node_entry(struct fs_mount *m, const struct fs_node *n, struct fs_step *step, struct fuse_entry_param *ret_e)
{
	struct fuse_entry_param e = {.ino = fs_node_id(n), .generation = m->generation, .attr_timeout = m->refresh_s,
		.entry_timeout = m->refresh_s};
	uint64_t latest = 0;
	int64_t time_ns = m->start_ns;
	char name[FS_STEP_NAME];
	int r = 0;

	switch (n->kind) {
	case FS_ROOT:
	case FS_CONTROL:
		r = fs_stat_fill(m, NULL, &e.attr, n->kind == FS_ROOT ? FUSE_ROOT_ID : FS_NODE_CONTROL, S_IFDIR, 0,
			time_ns);
		break;
	case FS_CONTROL_FILE:
		r = fs_stat_fill(m, NULL, &e.attr, e.ino, S_IFREG, 0, time_ns);
		break;
	case FS_RUN:
		fs_run_latest(n->run, &latest, &time_ns);
		r = fs_stat_fill(m, n->run, &e.attr, n->run->ino, S_IFDIR, 0, time_ns);
		break;
	case FS_LATEST:
		if (!fs_run_latest(n->run, &latest, &time_ns))
			return -ENOENT;
		fs_step_name(latest, name);
		e.entry_timeout = e.attr_timeout = 0;
		r = fs_stat_fill(m, n->run, &e.attr, fs_tree_ino(n->run->ino, "latest"), S_IFLNK, strlen(name),
			time_ns);
		break;
	case FS_TAG: /* another step's is another node: what a node links to never changes */
		fs_step_name(n->commit->step, name);
		e.entry_timeout = 0;
		r = fs_stat_fill(m, n->run, &e.attr, fs_tree_ino(n->commit->ino, "."), S_IFLNK, strlen(name),
			n->commit->time_ns);
		break;
	case FS_MESHES:
	case FS_MESH:
		return fs_mesh_entry(m, n, step, ret_e);
	case FS_STEP:
		if (n->file) {
			const struct view_node *v = step ? view_tree_node(step->tree, n->file) : NULL;
			uint64_t size;
			if (!v)
				return -ESTALE;
			r = view_tree_size(step->tree, n->file, &size);
			if (r < 0)
				return r;
			return fs_tree_entry(m, n->commit, n->file, v, fs_node_ino(n->commit, step->tree, n->file),
				size, ret_e);
		}
		e.attr_timeout = FS_FOREVER;
		r = fs_stat_fill(m, n->run, &e.attr, n->commit->ino, S_IFDIR, 0, n->commit->time_ns);
		break;
	}
	*ret_e = e;
	return r;
}

struct fs_handle *fs_handle_new(struct fs_mount *m, const struct fs_node *n)
{
	struct fs_handle *h = calloc(1, sizeof *h);

	if (!h)
		return NULL;
	h->refs = 1;
	h->node = *n;
	if (n->mesh)
		fs_mesh_ref(n->mesh);
	pthread_mutex_init(&h->lock, NULL);
	pthread_mutex_lock(&m->lock);
	LIST_INSERT_HEAD(&m->handles, h, all);
	pthread_mutex_unlock(&m->lock);
	return h;
}

void fs_handle_unref(struct fs_mount *m, struct fs_handle *h)
{
	if (!h || atomic_fetch_sub(&h->refs, 1) > 1)
		return;
	pthread_mutex_lock(&m->lock);
	LIST_REMOVE(h, all);
	pthread_mutex_unlock(&m->lock);
	fs_backing_closed(m->backings, h);
	if (h->file)
		view_file_close(h->file);
	fs_step_put(m->runs, h->step);
	fs_node_release(&h->node);
	free(h->text);
	free(h->steps);
	free(h->tags);
	free(h->runs);
	pthread_mutex_destroy(&h->lock);
	free(h);
}
