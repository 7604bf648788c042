/* SPDX-License-Identifier: Apache-2.0
 *
 * mount: everything that one mounted store consists of, and what its request handlers share. Made by fs_serve and
 * read-only afterwards, except for members that say otherwise. Handlers run on libfuse's threads, many at a time; none
 * of them waits for another request or notifies the kernel. */
#ifndef FS_MOUNT_H
#define FS_MOUNT_H

#ifndef FUSE_USE_VERSION
#define FUSE_USE_VERSION 314
#endif
#include <fuse_lowlevel.h>

#include "fs/backing.h"
#include "fs/meshes.h"
#include "fs/options.h"
#include "fs/runs.h"
#include "fs/scratch.h"

#define FS_FOREVER 1e9                          /* seconds: below a step's directory nothing ever changes */
#define FS_SLOW_NS INT64_C(250000000)           /* a read that took longer is noted */
#define FS_SLOW_LINES 256u

enum fs_op { FS_OP_LOOKUP, FS_OP_GETATTR, FS_OP_READLINK, FS_OP_OPENDIR, FS_OP_READDIR, FS_OP_READDIRPLUS, FS_OP_OPEN,
	FS_OP_READ, FS_OP_RELEASE, FS_OP_STATFS, FS_OP_GETXATTR, FS_OP_LISTXATTR, FS_OP_COUNT };

struct fs_stats {                               /* relaxed counters */
	_Atomic uint64_t requests[FS_OP_COUNT], errors[FS_OP_COUNT], ns[FS_OP_COUNT];
	_Atomic uint64_t mesh_refusals;
	_Atomic uint64_t interrupted, gave_back;
	_Atomic uint64_t read_bytes, slow_reads, damaged_reads, refreshes, refresh_errors, new_entries, invalidations,
		gathered_replies;
};

struct fs_mount;
struct fs_request;
struct fs_interrupts {                          /* request.c; the lock protects all but the thread and running */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	TAILQ_HEAD(fs_requests, fs_request) interrupted; /* the first one first */
	bool ending;
	pthread_t thread;
	bool running;                           /* changes only before and after all requests */
};
void fs_interrupts_init(struct fs_interrupts *all);
void fs_interrupts_release(struct fs_interrupts *all); /* once stopped */
void fs_interrupts_start(struct fs_mount *m);   /* before the first request */
void fs_interrupts_stop(struct fs_mount *m);    /* after the last one has ended */

/* pressure.c; a negative descriptor: there is none */
struct fs_pressure { int fds[2], wake_fd, meminfo_fd; uint64_t floor_bytes; pthread_t thread; bool running; };

struct fs_feature { char name[32]; bool on; char why[200]; }; /* why it is off, or its value */

struct fs_mount {
	const struct fs_options *options;
	struct store *store;
	struct fs_runs *runs;
	struct fs_meshes *meshes;
	struct load_cache *cache;
	struct fs_backings *backings;
	struct fuse_session *session;
	struct fs_owner owner;                  /* of the root and of .vckpt */
	int64_t start_ns;
	/* of node ids: random per mount, so that a file handle of another mount is never taken for one of this */
	uint64_t generation;
	double refresh_s;
	int statm_fd;                           /* /proc/self/statm, opened before the sandbox closes */
	struct fs_scratch scratch;

	struct fs_interrupts interrupts;
	struct fs_pressure pressure;
	struct fs_stats stats;
	pthread_mutex_t lock;                   /* protects what follows */
	struct fs_feature features[24]; unsigned nfeatures;
	uint64_t logged[1024]; unsigned nlogged; /* hashes of errors that were logged */
	char *slow[FS_SLOW_LINES]; uint64_t nslow;
	int64_t refusal_credit_ns;              /* limits the log of refused mesh names: mesh_nodes.c */
	LIST_HEAD(fs_handles, fs_handle) handles;
};

/* Makes what does not need the store. Release it whatever is returned. */
int fs_mount_init(struct fs_mount *m, const struct fs_options *options, struct base_error *err);
int fs_mount_open(struct fs_mount *m, struct base_error *err); /* opens the store, once privileges are given up */
void fs_mount_release(struct fs_mount *m);
/* Records for .vckpt/stats that a feature is on (why: its value) or off (why: the reason). */
void fs_mount_feature(struct fs_mount *m, const char *name, bool on, const char *why, ...)
	__attribute__((format(printf, 4, 5)));
/* Logs the sentence unless it was logged before. */
void fs_mount_log_once(struct fs_mount *m, const char *text);
void fs_mount_log_slow(struct fs_mount *m, const char *what, uint64_t offset, size_t len, int64_t ns);

/* ---- nodes (node.c) ---- */
enum fs_kind { FS_ROOT, FS_CONTROL, FS_CONTROL_FILE, FS_RUN, FS_LATEST, FS_TAG, FS_STEP, FS_MESHES, FS_MESH };
struct fs_node {
	enum fs_kind kind;
	unsigned control;               /* CONTROL_FILE: its number */
	struct fs_run *run;             /* RUN, LATEST, TAG, STEP */
	struct fs_commit *commit;       /* TAG, STEP, MESHES, MESH */
	uint32_t file;                  /* STEP: number in the tree; 0: the step's directory */
	struct fs_mesh *mesh;           /* MESH: a reference. rank, item, alias: mesh_nodes.c */
	uint32_t rank, item;
	bool alias;
};
/* -ESTALE: there is no such node. Release *ret_n, also after an error. */
int fs_node_decode(struct fs_mount *m, fuse_ino_t id, struct fs_node *ret_n);
void fs_node_release(struct fs_node *n);
bool fs_node_is_below_step(const struct fs_node *n);  /* its attributes need the opened step */
fuse_ino_t fs_node_id(const struct fs_node *n);
/* Attributes of any node. step: the opened step, for nodes whose attributes need it. If the storage fails, st_ino and
 * the type are set all the same. */
int fs_node_entry(struct fs_mount *m, const struct fs_node *n, struct fs_step *step, struct fuse_entry_param *ret_e);
uint64_t fs_node_ino(struct fs_commit *commit, struct view_tree *tree, uint32_t file);
/* As fs_node_entry for a file of a tree whose directory's st_ino is known, and its own size. */
int fs_tree_entry(struct fs_mount *m, struct fs_commit *commit, uint32_t file, const struct view_node *v, uint64_t ino,
	uint64_t size, struct fuse_entry_param *ret_e);
/* run: the run that the node is in, NULL: none; type: S_IFREG, S_IFDIR or S_IFLNK. */
int fs_stat_fill(struct fs_mount *m, struct fs_run *run, struct stat *st, uint64_t ino, mode_t type, uint64_t size,
	int64_t time_ns);

/* ---- owners and modes (modes.c) ---- */
int fs_modes_mount(struct fs_mount *m, struct base_error *err);              /* sets m->owner */
int fs_modes_run(struct fs_mount *m, struct fs_run *run, struct fs_owner *ret_owner);

/* ---- <step>/mesh and what is below (mesh_nodes.c) ---- */
uint64_t fs_mesh_serial(fuse_ino_t id);
int fs_mesh_decode(struct fs_mount *m, fuse_ino_t id, struct fs_node *ret_n);
fuse_ino_t fs_mesh_id(const struct fs_node *n);
bool fs_mesh_is_directory(const struct fs_node *n);
int fs_mesh_entry(struct fs_mount *m, const struct fs_node *n, struct fs_step *step, struct fuse_entry_param *ret_e);
/* Looks up a name. n: the parent on entry (MESHES, MESH). -ENOENT; what is wrong with the name of a mesh is logged. */
int fs_mesh_lookup(struct fs_mount *m, struct fs_step *step, const char *name, struct fs_node *n);
int fs_mesh_open(struct fs_step *step, const struct fs_node *n, struct view_file **ret_f, struct base_error *err);

/* ---- handles: what fi->fh points to ---- */
struct fs_handle {
	/* the kernel has one, and each read: for the kernel a read ends with the reply, so it may release the file
	 * before the handler is done */
	_Atomic unsigned refs;
	/* protected by m->lock; a list of all handles, so that those that the kernel never released are freed, too */
	LIST_ENTRY(fs_handle) all;
	struct fs_node node;
	struct fs_step *step;           /* a reference */
	struct view_file *file;
	struct fs_backing *backing; bool passthrough, released; /* how it was opened: backing.c */
	char *text; size_t text_len;    /* control files: the content when it was opened; MESHES: names */
	/* directories: what was visible when the handle was last read from its start */
	uint64_t *steps; struct fs_run **runs; size_t n;
	struct fs_tag *tags; size_t ntags;
	pthread_mutex_t lock;           /* protects these five: one handle may be read by several threads */
};
struct fs_handle *fs_handle_new(struct fs_mount *m, const struct fs_node *n);
static inline struct fs_handle *fs_handle_of(const struct fuse_file_info *fi)
{
	return (struct fs_handle *)(uintptr_t)fi->fh;
}
static inline void fs_handle_ref(struct fs_handle *h) { atomic_fetch_add(&h->refs, 1); }
void fs_handle_unref(struct fs_mount *m, struct fs_handle *h); /* NULL-safe */

/* ---- control files ---- */
unsigned fs_control_count(void);
const char *fs_control_name(unsigned i);
int fs_control_text(struct fs_mount *m, unsigned i, char **ret_text, size_t *ret_len);

/* Entry i of a directory under `mesh`, without a node: name, st_ino and type. 1: it is set; 0: past the end. */
int fs_mesh_opendir(struct fs_handle *h);
int fs_mesh_child(struct fs_handle *h, uint64_t i, char *text, size_t room, struct stat *ret_st);

/* ---- requests (request.c): each is answered once, by its handler or by the thread for interrupted ones ---- */
struct fs_request {
	struct fs_mount *m;
	fuse_req_t req;
	enum fs_op op;
	int64_t start_ns;
	_Atomic unsigned state;
	TAILQ_ENTRY(fs_request) by_due; uint64_t due_ms; bool listed; /* protected by the lock of interrupts */
};
/* q must stay at its address until fs_request_end. */
void fs_request_begin(struct fs_request *q, fuse_req_t req, enum fs_op op);
/* The same for a request that cannot be interrupted: it needs no claim. */
void fs_request_begin_short(struct fs_request *q, fuse_req_t req, enum fs_op op);
/* Call it immediately before a reply. false: the request was interrupted and is answered already: q->req is gone, and
 * the kernel does not have what the reply would have given it. */
bool fs_request_claim(struct fs_request *q);
/* Counts it. r: 0: it was replied to; or a negative errno, with which this claims it and replies. */
void fs_request_end(struct fs_request *q, int r);
/* The request that this thread works for was answered as interrupted: there is no point in waiting any longer. */
bool fs_request_abandoned(void);

/* ---- handlers (ops.c, directory.c, xattr.c) ---- */
extern const struct fuse_lowlevel_ops fs_ops;
void fs_op_opendir(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi);
void fs_op_readdir(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi);
void fs_op_readdirplus(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi);
void fs_op_getxattr(fuse_req_t req, fuse_ino_t id, const char *name, size_t size);
void fs_op_listxattr(fuse_req_t req, fuse_ino_t id, size_t size);

#endif
