/* SPDX-License-Identifier: Apache-2.0
 *
 * runs: the top of the tree: which runs and steps are visible, their node numbers, and the opened steps
 * (docs/mount.md).
 *
 *   node id   1 the root; else commit's number << 32 | number of the file in the step's tree (0: the step's directory);
 *             with commit 0 a node of the mount itself; with bit 63 a node below a step's directory `mesh`
 *   commit    a commit entry that was looked up; their table only grows, so an id always means the same thing
 *
 * Work is done only when a request needs it: a run's list is read when the run is first named, and a step is opened
 * when something in it is looked up. Any thread, except fs_run_refresh and fs_run_gone: one thread. Lock order:
 * run->lock, then runs->lock; neither is held across a read of a step. */
#ifndef FS_RUNS_H
#define FS_RUNS_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/queue.h>

#include "core/base/table.h"
#include "core/commit/list/list_facts.h"
#include "core/view/tree.h"

#define FS_NODE_ROOT UINT64_C(1)
#define FS_NODE_CONTROL UINT64_C(2)            /* .vckpt; its files follow */
#define FS_NODE_RUN UINT64_C(0x80000000)       /* + number of the run */
#define FS_NODE_LATEST UINT64_C(0x40000000)    /* + number of the run */
#define FS_NODE_MESH (UINT64_C(1) << 63)       /* nodes in <step>/mesh/<mesh>: mesh_nodes.c */
#define FS_FILE_MESHES UINT32_MAX              /* in place of a file's number: the step's directory `mesh` */
#define FS_FILE_TAG (UINT32_MAX - 1)            /* the same: a link to the step. Its tags are names of one link */
#define FS_COMMITS_MAX UINT32_C(0x7fffffff)
#define FS_RUNS_MAX UINT32_C(0x3fffffff)

/* Owner and mode of a run's files, as the mount shows them. */
struct fs_owner { uid_t uid; gid_t gid; mode_t mode; uint64_t read_ns; /* 0: not read yet */ };

struct fs_run {
	char *name;
	uint32_t number;
	uint64_t ino;
	pthread_rwlock_t lock;          /* protects list, commits and failed; the list is written by the refresh only */
	struct commit_list *list;       /* NULL until the run is first named */
	_Atomic int failed;             /* 0, or negative errno of the last attempt to read the list */
	struct fs_commit **commits; size_t ncommits; struct base_table by_entry; /* found by entry */
	_Atomic bool logged;
	struct fs_owner owner;          /* protected by the mount's lock: modes.c */
};

struct fs_step;
struct fs_commit {                      /* what is above `opened` never changes */
	uint32_t number;
	struct fs_run *run;
	uint64_t entry, step, ino;
	int64_t time_ns;
	struct fs_step *opened;         /* these three: protected by runs->lock */
	bool opening, logged;
	_Atomic bool gone;              /* no longer visible, by fs_run_gone */
};

/* An opened step. */
struct fs_step {
	struct fs_commit *commit;
	struct view_tree *tree;
	size_t memory;
	unsigned refs;                  /* of users; protected by runs->lock, as is its place in the list */
	TAILQ_ENTRY(fs_step) by_use;
};
TAILQ_HEAD(fs_steps, fs_step);

struct fs_runs {
	struct store *store;
	uint64_t max_bytes;             /* of opened steps that are not in use */
	unsigned show;                  /* of their tensors: enum view_show */
	pthread_mutex_t lock;           /* protects the tables and members of the structs above */
	pthread_cond_t opened;
	struct fs_run **runs; uint32_t nruns, runs_size; /* in the order in which they were found; a run never leaves */
	struct base_table by_name;
	struct fs_commit **commits; uint32_t ncommits, commits_size; /* number 0 is not used */
	struct fs_steps steps;          /* last used first */
	size_t steps_bytes; uint32_t steps_open;
	_Atomic uint64_t steps_opened, steps_evicted;
	void (*wake)(void *arg); void *wake_arg; /* see fs_runs_wake; NULL: there is no watch */
	_Atomic uint64_t stale_ns;      /* the first request after this monotonic time has the lists read again */
};

int fs_runs_open(struct store *store, uint64_t max_bytes, unsigned show, struct fs_runs **ret_r,
	struct base_error *err);
void fs_runs_close(struct fs_runs *runs); /* NULL-safe; all steps were put */

/* Looks for new runs. Returns how many were found. */
int fs_runs_scan(struct fs_runs *runs, struct base_error *err);
uint32_t fs_runs_count(struct fs_runs *runs);
struct fs_run *fs_runs_at(struct fs_runs *runs, uint32_t number); /* NULL: none */
/* A run by name, its list read. -ENOENT: no such run, or no visible step in it. */
int fs_runs_find(struct fs_runs *runs, const char *name, struct fs_run **ret_run);

/* Reads a run's list if that was not done yet. */
int fs_run_ready(struct fs_runs *runs, struct fs_run *run);
/* Reads new entries of the list. Returns their number; 0 also for a run that has not been named yet. */
int fs_run_refresh(struct fs_run *run);
/* A request asks for something that may change: the root or a run. Wakes the watch, which sleeps between requests, if
 * the lists were last read long ago (stale_ns). */
void fs_runs_asked(struct fs_runs *runs);
/* Gives the watch something to do: a run was opened, which it should watch, too; or too many meshes are known. */
static inline void fs_runs_wake(struct fs_runs *runs)
{
	if (runs->wake)
		runs->wake(runs->wake_arg);
}
size_t fs_run_steps(struct fs_run *run);                       /* visible */
bool fs_run_latest(struct fs_run *run, uint64_t *ret_step, int64_t *ret_time_ns);
/* -ENOENT: not visible */
int fs_run_commit(struct fs_runs *runs, struct fs_run *run, uint64_t step, struct fs_commit **ret_commit);
/* The step that has the tag. -ENOENT: none. Asks the list in memory, whatever the name is. */
int fs_run_tagged(struct fs_runs *runs, struct fs_run *run, const char *tag, struct fs_commit **ret_commit);
/* A copy of the numbers of the visible steps, ascending, and of the tags, sorted, for a directory that is read. */
struct fs_tag { char name[PROTO_TAG_MAX + 1]; };
int fs_run_snapshot(struct fs_run *run, uint64_t **ret_steps, size_t *ret_n, struct fs_tag **ret_tags,
	size_t *ret_ntags);
/* Returns f(arg, the facts of the commit now, or NULL), under the run's lock. */
int fs_commit_said(struct fs_commit *commit, int (*f)(void *arg, const struct proto_step_facts *facts), void *arg);

struct fs_commit *fs_runs_commit(struct fs_runs *runs, uint32_t number); /* NULL: none */
bool fs_commit_live(struct fs_commit *commit);                   /* is its entry still the visible one? */
/* Calls f once for each commit that is no longer visible. */
void fs_run_gone(struct fs_run *run, void (*f)(void *arg, struct fs_commit *commit), void *arg);

/* Opens the step or finds it open. -ESTALE: removed or replaced meanwhile. Any other error is logged once for each
 * commit. */
int fs_step_get(struct fs_runs *runs, struct fs_commit *commit, struct fs_step **ret_step);
void fs_step_put(struct fs_runs *runs, struct fs_step *step); /* NULL-safe */
void fs_steps_free(struct fs_steps *steps);

static inline uint64_t fs_tree_ino(uint64_t directory_ino, const char *name)
{
	return base_xxh64_of(directory_ino, name, strlen(name)) | 2;  /* never 0 or 1 */
}

#define FS_STEP_NAME 32
void fs_step_name(uint64_t step, char name[static FS_STEP_NAME]);       /* step-%08u */
bool fs_step_parse(const char *name, uint64_t *ret_step);               /* only what fs_step_name writes */

#endif
