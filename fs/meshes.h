/* SPDX-License-Identifier: Apache-2.0
 *
 * meshes: the mesh names that were looked up in steps, <step>/mesh/<mesh> (docs/mount.md).
 *
 * Any mesh name may be looked up, so their number has no natural bound. An entry lives while the kernel holds a node of
 * it (each look-up adds one, FORGET takes them away) or a request or an open file uses it; then it is freed. Its number
 * is never reused, so a node id always means the same thing. Beyond FS_MESHES_KEPT entries the kernel is asked to drop
 * the names that were unused for longest (by the thread that follows the store, since handlers may not notify the
 * kernel), and it forgets those that are not in use. Beyond FS_MESHES_MAX a look-up fails.
 *
 * The cuts of a step's tensors under a mesh (struct view_mesh) are kept for the last FS_MESHES_OPEN meshes only, and
 * made again when needed. Any thread. The lock is held only for look-ups in the table. */
#ifndef FS_MESHES_H
#define FS_MESHES_H

#include "core/view/mesh.h"
#include "fs/runs.h"

#define FS_MESHES_KEPT 1024u
#define FS_MESHES_MAX 65536u
#define FS_MESHES_OPEN 8u
#define FS_MESHES_SERIAL_BITS 33

struct fs_meshes;
struct fs_mesh {
	struct fs_meshes *all;
	uint64_t serial;                /* at least 1 */
	struct fs_commit *commit;
	char *name;
	uint64_t ino;
	uint64_t known;                 /* these: protected by the table's lock */
	unsigned refs;
	bool dropped;                   /* the kernel is to drop the name; the entry is not in the list */
	LIST_ENTRY(fs_mesh) by_name, by_number;
	TAILQ_ENTRY(fs_mesh) by_use;
};

/* layouts: NULL, or the layout file of all meshes; it is kept by the caller. */
struct fs_meshes *fs_meshes_new(const struct view_layouts *layouts);
void fs_meshes_free(struct fs_meshes *all); /* NULL-safe; also entries that the kernel still knows */
/* A reference to the entry of a mesh of the step. 1: there is something to drop now (fs_meshes_drop); -ENOENT: the step
 * has no such mesh, and err says why; -ENFILE: too many are known. */
int fs_meshes_find(struct fs_meshes *all, struct fs_commit *commit, struct fs_step *step, const char *name,
	struct fs_mesh **ret_mesh, struct base_error *err);
struct fs_mesh *fs_meshes_at(struct fs_meshes *all, uint64_t serial); /* a reference; NULL: none */
struct fs_mesh *fs_mesh_ref(struct fs_mesh *mesh);
void fs_mesh_unref(struct fs_mesh *mesh); /* NULL-safe */
/* The mesh over its step, which is open as `step`; view_mesh_unref it. */
int fs_mesh_view(struct fs_mesh *mesh, struct fs_step *step, struct view_mesh **ret_view);

/* The kernel is about to learn of a node of it; the kernel has forgotten n of them. */
void fs_mesh_learnt(struct fs_mesh *mesh);
void fs_meshes_forget(struct fs_meshes *all, uint64_t serial, uint64_t n);
/* Calls f for the longest unused beyond FS_MESHES_KEPT, each once, without the lock. One thread. */
void fs_meshes_drop(struct fs_meshes *all, void (*f)(void *arg, const struct fs_mesh *mesh), void *arg);

struct fs_meshes_stats { uint64_t known, looked_up, dropped; };
void fs_meshes_stat(struct fs_meshes *all, struct fs_meshes_stats *ret_s);

#endif
