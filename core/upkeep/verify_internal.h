/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_internal: what the files of verify share.
 *
 *   verify.c        the order of the passes; faults, and reports of what they touch
 *   verify_index.c  which faults touch these bytes
 *   verify_files.c  whole store: every file by itself (records, packs byte by byte, the reserve), in a pool
 *   verify_walk.c   walks everything that one step reaches: packs, layouts, view headers, parts, chunks, pieces, blobs
 *   verify_says.c   what the records of a step say of each other: sums, sizes, hosts, attributes
 *   verify_shards.c are the rows of a part within what its layout gives the rank
 *   verify_steps.c  walks each visible step and checks its boxes; hashes by reference the objects that no verified
 *                   footer lists; then opens the files of each step
 *   verify_note.c   leaves notes of damage for writers
 *   verify_paranoid.c  what is reported of a stranger's store only: unknown fields, unfinished files
 *
 * `lock` protects faults, packs, result and progress while the pool runs; the rest belongs to one thread. */
#ifndef CORE_UPKEEP_VERIFY_INTERNAL_H
#define CORE_UPKEEP_VERIFY_INTERNAL_H

#include <pthread.h>

#include "core/base/cleanup.h"
#include "core/base/pool.h"
#include "core/base/table.h"
#include "core/commit/incoming/incoming.h"
#include "core/commit/check/manifest_check.h"
#include "core/step/layout.h"
#include "core/step/part.h"
#include "core/upkeep/file_name.h"
#include "core/upkeep/verify.h"
#include "core/upkeep/verify_index.h"
#include "proto/unknown.h"

struct verify_step {
	const char *run;
	const struct commit_list_step *step;
	bool removed; /* since it was listed: its files may be gone */
};

/* One thing that is wrong with bytes of a file. */
struct verify_fault {
	const char *file, *what; /* owned, as `run`, by those in struct verify */
	bool newer;           /* nothing is wrong: a newer vckpt wrote it */
	bool pack;            /* the file is a pack: what the fault touches follows from references */
	bool by_xxh;          /* ... of pieces whose rows give this XXH3-128, and only these */
	struct base_xxh128 xxh;
	uint64_t offset, len; /* len 0: the whole file */
	const char *run;      /* of an entry or manifest; NULL */
	size_t step;          /* 1 + number of the visible step that has the fault itself; 0 */
	bool reported;        /* a callback named it */
	bool gone;            /* no damage: it was removed while verify ran */
	size_t whole_step, tensor_step; /* 1 + number of the step that was reported last, as a whole and by tensor */
	uint32_t tensor;
};

/* An object that was read whole: hash of its reference and digest, and of a sound piece its XXH3-128. */
struct verify_seen {
	uint64_t place; /* the key: it comes first */
	bool hashed;
	uint8_t kind;   /* as the footer says */
	struct base_xxh128 xxh;
};

/* Those of a pack, sorted. */
struct verify_pack {
	char *file;
	struct verify_seen *seen;
	size_t nseen;
};

struct verify_todo {
	char *pack;
	struct pack_object_ref ref;
	bool piece; /* then its bytes have to have this XXH3-128, too */
	struct base_xxh128 xxh;
};

/* Numbers, each once. verify_set_add: 1: it is new, 0, or -ENOMEM. */
struct verify_set { uint64_t *all; size_t room; struct base_table by_number; };
int verify_set_add(struct verify_set *s, uint64_t number);
void verify_set_release(struct verify_set *s);

struct verify {
	struct store *store;
	const struct upkeep_verify_options *o;
	struct base_pool *pool;
	pthread_mutex_t lock;
	struct commit_list **lists;
	size_t nlists;
	char **unread; /* runs that cannot be read */
	size_t nunread;
	bool unlisted; /* because of one of them not all files could be listed */
	struct verify_step *steps;
	size_t nsteps; /* those to verify */
	struct verify_fault *faults;
	size_t nfaults;
	struct verify_index places; /* of the faults of packs */
	struct verify_pack *packs;
	size_t npacks; /* sorted by file once the pool is idle */
	struct verify_todo *todo;
	size_t ntodo; /* to be hashed by reference */
	struct verify_set seen; /* hashes of todo */
	struct upkeep_verify_result result;
	uint64_t done_bytes, total_bytes;
	int error; /* out of memory; sticky */
};

/* Any thread; copies its strings. The same fault twice counts once. */
void verify_fault(struct verify *v, struct verify_fault f);
bool verify_known(struct verify *v, const char *file, const struct pack_object_ref *ref);
void verify_error(struct verify *v, int error);
void verify_progress(struct verify *v, uint64_t bytes);
/* A hash of an object's place and digest, and of `len` more bytes, that the store's writer could not foresee. pack may
 * be NULL. */
#define VERIFY_PLACE_MORE 16u
uint64_t verify_place(const char *pack, const struct pack_object_ref *ref, const void *more, size_t len);

int verify_files(struct verify *v, struct base_error *err);
/* One record file by itself (single steps: their entries). */
void verify_record(struct verify *v, const char *name, const struct file_name *n);

/* Walking. An item is reported before it is loaded, so that its damage is seen by reference. */
enum verify_what { VERIFY_PACK, VERIFY_LAYOUT, VERIFY_HEADER, VERIFY_PART, VERIFY_CHUNK, VERIFY_PIECE, VERIFY_BLOB };
struct verify_item {
	enum verify_what what;
	const char *pack;
	uint32_t number;                    /* in the manifest's table */
	uint64_t size;                      /* PACK: what the manifest says */
	const struct pack_object_ref *ref;  /* not of PACK */
	const struct base_xxh128 *xxh;      /* PIECE */
	const struct store_layout *layout;
	uint32_t tensor;       /* PIECE */
	const char *component; /* HEADER */
	const char *blob;      /* BLOB */
};
struct verify_walker {
	struct store *store;
	const struct verify_step *step;
	int (*item)(struct verify_walker *w, const struct verify_item *it);
	/* Something could not be loaded or believed, and what is in it is left out: `file`, or an object of a pack.
	 * newer: nothing is wrong with it but that a newer vckpt wrote it. May be NULL. */
	void (*broken)(struct verify_walker *w, const char *file, const char *pack, const struct pack_object_ref *ref,
		bool newer, const char *text);
	void *arg;
	bool cover;      /* check the boxes, too, when nothing is broken, and what records say of each other */
	bool paranoid;   /* with `cover`: unknown fields are reported as a newer vckpt's */
	upkeep_verify_header_func header; /* NULL: view headers are not looked into */
	const struct upkeep_records *records; /* not NULL: they are for a reader, who checks the cover himself */
	bool any_broken; /* set by the walk */
};
int verify_walk(struct verify_walker *w); /* 0, what item returned, or -ENOMEM */

/* What the records of one step say of each other. A part is walked between _rank and _part. */
#define VERIFY_SAYS_MAX 400
struct verify_says;
struct verify_says *verify_says_new(const struct proto_manifest *m);
void verify_says_free(struct verify_says *s); /* NULL-safe */
void verify_says_rank(struct verify_says *s);
/* number: of its pack, in the manifest's table */
int verify_says_object(struct verify_says *s, uint32_t number, const struct pack_object_ref *ref);
void verify_says_bytes(struct verify_says *s, uint64_t bytes);
void verify_says_leave_out(struct verify_says *s); /* something cannot be read: sums are not compared */
int verify_says_part(struct verify_says *s, const struct proto_manifest_rank *line, const struct proto_part *part);
int verify_says_blobs(struct verify_says *s); /* once all parts were walked; both: 0 or -ENOMEM */
void verify_says_tensors(struct verify_says *s, uint64_t tensors); /* of all layouts, each once */
void verify_says_packs(struct verify_says *s);
const char *verify_says_wrong(const struct verify_says *s); /* the first disagreement; NULL: none */
/* The entry and the manifest. false: `text` says what differs. */
bool verify_says_entry(const struct verify_step *step, const struct proto_manifest *m,
	char text[static VERIFY_SAYS_MAX]);

/* Rows against the shards that a layout gives; belongs to one thread, and the layout outlives it. */
struct verify_shards;
struct verify_shards *verify_shards_new(const struct store_layout *l); /* NULL: out of memory */
void verify_shards_free(struct verify_shards *k);                      /* NULL-safe */
/* 0; 1: `text` says what is wrong; -ENOMEM. */
int verify_shards_row(struct verify_shards *k, uint32_t rank, const struct store_row *row,
	char text[static VERIFY_SAYS_MAX]);

int verify_steps(struct verify *v);
/* Reads all of an object by steps into `room`, and hashes it. checked: checks and decodes its blocks; else it is raw,
 * and its checks are not looked at. ret_xxh may be NULL. */
enum { VERIFY_HASH_BYTES = 1 << 20 };
int verify_object_hash(struct pack *p, const struct pack_object_ref *ref, bool checked, uint64_t seed,
	void *room, struct base_digest *ret_digest, struct base_xxh128 *ret_xxh, struct base_error *err);

/* ---- a stranger's store (verify_paranoid.c) ---- */
/* Does a body have fields that this vckpt does not know? Then `text` says which, as the end of a sentence. */
bool verify_unknown(enum proto_body kind, const void *body, size_t len, char text[static VERIFY_SAYS_MAX]);
/* Of a record that is whole. */
void verify_paranoid_record(struct verify *v, const char *name, enum store_record_kind kind, const char *run,
	const struct store_record *rec);
/* May a pack of this class hold an object of this kind? */
bool verify_class_holds(const char *class, uint8_t kind);
/* What is wrong with a file, by its name alone; NULL: nothing. */
const char *verify_paranoid_file(const struct commit_file *file);

int verify_note(struct verify *v); /* 0 or -ENOMEM */

#endif
