/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_internal: what the files of verify share.
 *
 *   verify.c        the order of the passes, faults, and telling whom they touch
 *   verify_files.c  whole store: every file by itself (records, packs byte by byte, the reserve), in a pool
 *   verify_walk.c   walks everything that one step reaches: packs, layouts, view headers, parts, chunks, pieces, blobs
 *   verify_steps.c  each visible step is walked and its boxes checked; what no pack's footer answered for is re-hashed
 *                   by reference
 *
 * `lock` protects faults, packs, result and progress while the pool runs; the rest belongs to one thread. */
#ifndef CORE_STORE_VERIFY_INTERNAL_H
#define CORE_STORE_VERIFY_INTERNAL_H

#include <pthread.h>

#include "core/base/cleanup.h"
#include "core/base/pool.h"
#include "core/store/attempt_internal.h"
#include "core/store/layout.h"
#include "core/store/part.h"
#include "core/store/verify.h"

struct verify_step {
	const char *run;
	const struct store_list_step *step;
};

/* One thing that is wrong with bytes of a file. */
struct verify_fault {
	char *file, *what;
	bool pack;            /* the file is a pack: whom it touches follows from references */
	uint64_t offset, len; /* len 0: the whole file */
	char *run;            /* of an entry or manifest; NULL */
	size_t step;          /* 1 + number of the visible step whose own fault it is; 0 */
	bool told;            /* a callback named it */
	size_t whole_step, tensor_step; /* 1 + number of the step that was told last, as a whole and by tensor */
	uint32_t tensor;
};

/* Objects of a pack whose every byte was looked at: sorted hashes of reference and digest. */
struct verify_pack {
	char *file;
	uint64_t *places;
	size_t nplaces;
};

struct verify_todo {
	char *pack;
	struct store_object_ref ref;
};

struct verify {
	struct store *store;
	const struct store_verify_options *o;
	struct base_pool *pool;
	pthread_mutex_t lock;
	struct store_list **lists;
	size_t nlists;
	struct verify_step *steps;
	size_t nsteps; /* those to verify */
	struct verify_fault *faults;
	size_t nfaults;
	struct verify_pack *packs;
	size_t npacks; /* sorted by file once the pool is idle */
	struct verify_todo *todo;
	size_t ntodo; /* to be re-hashed by reference */
	uint64_t *seen;
	size_t nseen, seen_size; /* open addressing: hashes of todo */
	struct store_verify_result result;
	uint64_t done_bytes, total_bytes;
	int error; /* out of memory; sticky */
};

/* Any thread; copies its strings. The same fault twice counts once. */
void verify_fault(struct verify *v, struct verify_fault f);
bool verify_known(struct verify *v, const char *file, const struct store_object_ref *ref);
void verify_error(struct verify *v, int error);
void verify_progress(struct verify *v, uint64_t bytes);
uint64_t verify_place(const char *pack, const struct store_object_ref *ref); /* hash; pack may be NULL */
int verify_compare_places(const void *a, const void *b);

int verify_files(struct verify *v, struct base_error *err);
/* One record file of a known kind by itself (single steps: their entries). */
void verify_record(struct verify *v, const char *name, enum store_record_kind kind, const char *run);

/* Walking. Items come in this order for each thing: before it is loaded, so that damage of it is seen by reference. */
enum verify_what { VERIFY_PACK, VERIFY_LAYOUT, VERIFY_HEADER, VERIFY_PART, VERIFY_CHUNK, VERIFY_PIECE, VERIFY_BLOB };
struct verify_item {
	enum verify_what what;
	const char *pack;
	uint32_t number;                    /* in the manifest's table */
	uint64_t size;                      /* PACK: what the manifest says */
	const struct store_object_ref *ref; /* not of PACK */
	const struct store_layout *layout;
	uint32_t tensor;       /* PIECE */
	const char *component; /* HEADER */
	const char *blob;      /* BLOB */
};
struct verify_walker {
	struct store *store;
	const struct verify_step *step;
	int (*item)(struct verify_walker *w, const struct verify_item *it);
	/* Something could not be loaded or believed: what lies in it is left out. pack, ref NULL: `file` is at
	 * fault. */
	void (*broken)(struct verify_walker *w, const char *file, const char *pack, const struct store_object_ref *ref,
		const char *text);
	void *arg;
	bool cover;      /* check the boxes, too, when nothing is broken */
	bool any_broken; /* set by the walk */
};
int verify_walk(struct verify_walker *w); /* 0, what item returned, or -ENOMEM */

int verify_steps(struct verify *v, struct base_error *err);

#endif
