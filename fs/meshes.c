/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of meshes: two hash tables with chains, by number and by (commit, name), and a list in the order of their
 * last use, without those whose names the kernel was asked to drop. */
#include "fs/meshes.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS 4096u

struct opened { struct view_mesh *view; uint64_t serial, used; };

struct fs_meshes {
	const struct view_layouts *layouts;
	pthread_mutex_t lock;           /* protects what follows, and members of fs_mesh */
	LIST_HEAD(bucket, fs_mesh) named[BUCKETS], numbered[BUCKETS];
	TAILQ_HEAD(fs_mesh_list, fs_mesh) list; /* last used first */
	uint32_t n, listed;
	uint64_t next_serial, looked_up, dropped;
	struct opened opened[FS_MESHES_OPEN];
	uint64_t clock;
};

struct fs_meshes *fs_meshes_new(const struct view_layouts *layouts)
{
	struct fs_meshes *all = calloc(1, sizeof *all);

	if (!all)
		return NULL;
	pthread_mutex_init(&all->lock, NULL);
	TAILQ_INIT(&all->list);
	all->layouts = layouts;
	all->next_serial = 1;
	return all;
}

void fs_meshes_free(struct fs_meshes *all)
{
	if (!all)
		return;
	for (uint32_t i = 0; i < BUCKETS; i++)
		for (struct fs_mesh *mesh; (mesh = LIST_FIRST(&all->numbered[i])) != NULL;) {
			LIST_REMOVE(mesh, by_number);
			free(mesh->name);
			free(mesh);
		}
	for (unsigned i = 0; i < FS_MESHES_OPEN; i++)
		view_mesh_unref(all->opened[i].view);
	pthread_mutex_destroy(&all->lock);
	free(all);
}

/* ---- all of these under the lock ---- */

static struct bucket *bucket_named(struct fs_meshes *all, const struct fs_commit *commit, const char *name)
{
	return &all->named[base_table_hash_in(commit->number, name, strlen(name)) % BUCKETS];
}

static struct bucket *bucket_numbered(struct fs_meshes *all, uint64_t serial)
{
	return &all->numbered[serial % BUCKETS];
}

static void list_unlink(struct fs_meshes *all, struct fs_mesh *mesh)
{
	if (mesh->dropped)
		return;
	TAILQ_REMOVE(&all->list, mesh, by_use);
	all->listed--;
}

static void list_push(struct fs_meshes *all, struct fs_mesh *mesh)
{
	mesh->dropped = false;
	TAILQ_INSERT_HEAD(&all->list, mesh, by_use);
	all->listed++;
}

static struct fs_mesh *use(struct fs_meshes *all, struct fs_mesh *mesh)
{
	list_unlink(all, mesh);
	list_push(all, mesh);
	mesh->refs++;
	return mesh;
}

static struct fs_mesh *find_named(struct fs_meshes *all, const struct fs_commit *commit, const char *name)
{
	struct fs_mesh *mesh;

	LIST_FOREACH(mesh, bucket_named(all, commit, name), by_name)
		if (mesh->commit == commit && strcmp(mesh->name, name) == 0)
			break;
	return mesh;
}

static struct fs_mesh *find_numbered(struct fs_meshes *all, uint64_t serial)
{
	struct fs_mesh *mesh;

	LIST_FOREACH(mesh, bucket_numbered(all, serial), by_number)
		if (mesh->serial == serial)
			break;
	return mesh;
}

/* Takes the entry out if it is no longer known or used. The caller frees it, without the lock. */
static struct fs_mesh *take_unused(struct fs_meshes *all, struct fs_mesh *mesh, struct view_mesh **ret_view)
{
	*ret_view = NULL;
	if (mesh->refs || mesh->known)
		return NULL;
	LIST_REMOVE(mesh, by_name);
	LIST_REMOVE(mesh, by_number);
	list_unlink(all, mesh);
	all->n--;
	for (unsigned i = 0; i < FS_MESHES_OPEN; i++)
		if (all->opened[i].serial == mesh->serial) {
			*ret_view = all->opened[i].view;
			all->opened[i] = (struct opened){0};
		}
	return mesh;
}

static void add(struct fs_meshes *all, struct fs_mesh *mesh)
{
	mesh->serial = all->next_serial++;
	LIST_INSERT_HEAD(bucket_named(all, mesh->commit, mesh->name), mesh, by_name);
	LIST_INSERT_HEAD(bucket_numbered(all, mesh->serial), mesh, by_number);
	list_push(all, mesh);
	all->n++;
}

/* Keeps a reference. The caller releases the view that is returned, which had the slot before. */
static struct view_mesh *keep_view(struct fs_meshes *all, uint64_t serial, struct view_mesh *view)
{
	struct opened *oldest = &all->opened[0];
	struct view_mesh *gone;

	for (unsigned i = 0; i < FS_MESHES_OPEN; i++) {
		if (all->opened[i].serial == serial)
			return NULL;  /* another thread made one at the same time */
		if (all->opened[i].used < oldest->used)
			oldest = &all->opened[i];
	}
	gone = oldest->view;
	*oldest = (struct opened){view_mesh_ref(view), serial, ++all->clock};
	return gone;
}

/* ---- entries ---- */

static void mesh_free(struct fs_mesh *mesh, struct view_mesh *view)
{
	view_mesh_unref(view);
	if (mesh)
		free(mesh->name);
	free(mesh);
}

static int mesh_new(struct fs_meshes *all, struct fs_commit *commit, const char *name, struct fs_mesh **ret_mesh)
{
	struct fs_mesh *mesh = calloc(1, sizeof *mesh);
	char *copy = strdup(name);

	if (!mesh || !copy) {
		free(mesh);
		free(copy);
		return -ENOMEM;
	}
	*mesh = (struct fs_mesh){.all = all, .commit = commit, .name = copy,
		.ino = fs_tree_ino(fs_tree_ino(commit->ino, VIEW_MESH_DIRECTORY), name)};
	*ret_mesh = mesh;
	return 0;
}

/* The entry, made if it does not exist. 1: more are listed than are kept. */
static int insert(struct fs_meshes *all, struct fs_commit *commit, const char *name, struct view_mesh *view,
	struct fs_mesh **ret_mesh, struct base_error *err)
{
	struct view_mesh *gone = NULL;
	struct fs_mesh *made = NULL, *mesh;
	int r = mesh_new(all, commit, name, &made);
	bool full;

	if (r < 0)
		return base_no_memory(err);
	pthread_mutex_lock(&all->lock);
	mesh = find_named(all, commit, name);
	if (!mesh && (all->n >= FS_MESHES_MAX || all->next_serial >> FS_MESHES_SERIAL_BITS)) {
		r = -ENFILE;
	} else if (!mesh) {
		add(all, mesh = made);
		made = NULL;
		gone = keep_view(all, mesh->serial, view);
	}
	if (mesh)
		*ret_mesh = use(all, mesh);
	all->looked_up++;
	full = all->listed > FS_MESHES_KEPT;
	pthread_mutex_unlock(&all->lock);
	mesh_free(made, gone);
	return r < 0 ? base_error_set(err, r, "%s: too many names of meshes are in use", name) : full;
}

int fs_meshes_find(struct fs_meshes *all, struct fs_commit *commit, struct fs_step *step, const char *name,
	struct fs_mesh **ret_mesh, struct base_error *err)
{
	struct view_mesh *view = NULL;
	struct fs_mesh *mesh;
	int r;

	pthread_mutex_lock(&all->lock);
	mesh = find_named(all, commit, name);
	if (mesh)
		*ret_mesh = use(all, mesh);
	pthread_mutex_unlock(&all->lock);
	if (mesh)
		return 0;
	r = view_mesh_new(view_tree_step(step->tree), all->layouts, name, &view, err);
	if (r == 0)
		r = insert(all, commit, name, view, ret_mesh, err);
	view_mesh_unref(view);
	return r;
}

struct fs_mesh *fs_meshes_at(struct fs_meshes *all, uint64_t serial)
{
	struct fs_mesh *mesh;

	pthread_mutex_lock(&all->lock);
	mesh = find_numbered(all, serial);
	if (mesh && mesh->dropped)
		mesh->refs++;  /* the kernel drops the name: it stays dropped until it is looked up again */
	else if (mesh)
		use(all, mesh);
	pthread_mutex_unlock(&all->lock);
	return mesh;
}

struct fs_mesh *fs_mesh_ref(struct fs_mesh *mesh)
{
	pthread_mutex_lock(&mesh->all->lock);
	mesh->refs++;
	pthread_mutex_unlock(&mesh->all->lock);
	return mesh;
}

void fs_mesh_unref(struct fs_mesh *mesh)
{
	struct view_mesh *view;
	struct fs_meshes *all;
	struct fs_mesh *gone;

	if (!mesh)
		return;
	all = mesh->all;
	pthread_mutex_lock(&all->lock);
	mesh->refs--;
	gone = take_unused(all, mesh, &view);
	pthread_mutex_unlock(&all->lock);
	mesh_free(gone, view);
}

int fs_mesh_view(struct fs_mesh *mesh, struct fs_step *step, struct view_mesh **ret_view)
{
	struct fs_meshes *all = mesh->all;
	struct view_mesh *view = NULL, *gone;
	int r;

	pthread_mutex_lock(&all->lock);
	for (unsigned i = 0; i < FS_MESHES_OPEN && !view; i++)
		if (all->opened[i].serial == mesh->serial) {
			all->opened[i].used = ++all->clock;
			view = view_mesh_ref(all->opened[i].view);
		}
	pthread_mutex_unlock(&all->lock);
	if (view) {
		*ret_view = view;
		return 0;
	}
	r = view_mesh_new(view_tree_step(step->tree), all->layouts, mesh->name, &view, NULL);
	if (r < 0)
		return r;
	pthread_mutex_lock(&all->lock);
	gone = keep_view(all, mesh->serial, view);
	pthread_mutex_unlock(&all->lock);
	view_mesh_unref(gone);
	*ret_view = view;
	return 0;
}

/* ---- what the kernel knows ---- */

void fs_mesh_learnt(struct fs_mesh *mesh)
{
	pthread_mutex_lock(&mesh->all->lock);
	mesh->known++;
	pthread_mutex_unlock(&mesh->all->lock);
}

void fs_meshes_forget(struct fs_meshes *all, uint64_t serial, uint64_t n)
{
	struct view_mesh *view = NULL;
	struct fs_mesh *gone = NULL, *mesh;

	pthread_mutex_lock(&all->lock);
	mesh = find_numbered(all, serial);
	if (mesh) {
		mesh->known -= base_min(n, mesh->known);
		gone = take_unused(all, mesh, &view);
	}
	pthread_mutex_unlock(&all->lock);
	mesh_free(gone, view);
}

void fs_meshes_drop(struct fs_meshes *all, void (*f)(void *arg, const struct fs_mesh *mesh), void *arg)
{
	for (;;) {
		struct fs_mesh *mesh = NULL;

		pthread_mutex_lock(&all->lock);
		if (all->listed > FS_MESHES_KEPT) {
			mesh = TAILQ_LAST(&all->list, fs_mesh_list);
			list_unlink(all, mesh);
			mesh->dropped = true;
			mesh->refs++;
			all->dropped++;
		}
		pthread_mutex_unlock(&all->lock);
		if (!mesh)
			return;
		f(arg, mesh);
		fs_mesh_unref(mesh);
	}
}

void fs_meshes_stat(struct fs_meshes *all, struct fs_meshes_stats *ret_s)
{
	pthread_mutex_lock(&all->lock);
	*ret_s = (struct fs_meshes_stats){all->n, all->looked_up, all->dropped};
	pthread_mutex_unlock(&all->lock);
}
