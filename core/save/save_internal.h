/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/save share (docs/save.md).
 *
 *   writer.c    what the caller declares                     -> struct save_writer
 *   pipeline.c  workers, order, bounded memory               -> struct save_pipeline (private)
 *   band.c      read, cut, digest, look up, encode one band  -> struct save_band
 *   appender.c  duplicates, packs, rows, in order            -> struct save_appender
 *   dedup.c     what is known: this save's objects and bases -> struct save_dedup
 *   base.c      commits whose pieces are recognised by position -> struct save_bases
 *   blob.c      blobs        finish.c  meta pack, part, announcement, commit */
#ifndef CORE_SAVE_SAVE_INTERNAL_H
#define CORE_SAVE_SAVE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "core/base/buf.h"
#include "core/save/writer.h"
#include "core/store/codec.h"
#include "index/index.h"

#define SAVE_BASE_ATTEMPTS_MAX 16u               /* packs of at most that many other attempts are reused by one save */
#define SAVE_BASES_MAX 8u                        /* commits that recognise pieces by position */
#define SAVE_BELIEVE_BYTES 240u                  /* longer pieces are believed by their XXH3-128 */
#define SAVE_BELIEVE_CHECK 1024u                 /* one in that many is hashed all the same */
#define SAVE_BAND_BYTES (UINT64_C(9) << 20)      /* source bytes of a band, unless one piece has more */
/* What files are read into begins at a page: where it lies 16 bytes behind one, as malloc gives large memory, the
 * kernel's copy takes five times as long on some processors (rep movsb; measured on AMD's third generation of EPYC). */
#define SAVE_ALIGN 4096u

static inline uint64_t save_now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* ---- dedup: objects that this save may refer to, and the packs that they lie in ---- */

struct save_known {                 /* never moves; its `checks` is complete once its run has ended */
	struct store_object_ref ref;    /* `pack` is not used: see pack */
	uint32_t pack;                  /* number in the part's pack table */
};
struct save_pack { char name[STORE_PACK_NAME_MAX]; uint64_t size, live_bytes; bool own; };
struct save_dedup {
	struct save_known **chunks; uint32_t count;
	uint32_t *slots; uint32_t nslots; /* 1 + number of an object; 0: free. A power of two */
	struct save_pack *packs; uint32_t npacks, packs_room;
	/* does not change any more once it is full: then any thread may read it */
	char attempts[SAVE_BASE_ATTEMPTS_MAX][PROTO_ATTEMPT_MAX]; uint32_t nattempts;
	atomic_bool full;
	struct save_named { struct base_digest manifest; bool usable; } *bases; uint32_t nbases;
};
void save_dedup_release(struct save_dedup *d);
struct save_known *save_dedup_find(const struct save_dedup *d, const struct base_digest *digest,
	enum store_object_kind kind);
/* NULL: out of memory. The caller fills ref (its digest and kind are set) and pack. */
struct save_known *save_dedup_add(struct save_dedup *d, const struct base_digest *digest, enum store_object_kind kind);
int64_t save_dedup_pack(struct save_dedup *d, const char *name, bool own); /* number, or -ENOMEM */
/* May this place be used? Names its commit as a base. 0: *ret_known refers to it; -ENOENT: no, write it anew; other:
 * an error. */
/* Any thread: false if objects of that pack would be refused for sure, for too many attempts are in use. */
bool save_dedup_may(const struct save_dedup *d, const char *pack);
bool save_dedup_gone(const struct save_dedup *d, const struct base_digest *manifest); /* was named, and is not there */
int save_dedup_admit(struct save_dedup *d, struct store *s, struct store_attempt *a, const struct index_place *place,
	enum store_object_kind kind,
	uint64_t raw_len, struct save_known **ret_known, struct base_error *err);

/* ---- bases: pieces recognised by position ---- */

struct save_base;
struct save_base_row {              /* of one tensor; what it points to lives as long as its base */
	atomic_uint refs;
	struct save_base *base;
	uint32_t tensor;                /* in the layout that is being saved */
	bool good;                      /* false: the base has no such tensor */
	struct store_row row;
	const char *const *packs;
};
struct save_bases { struct save_base *all[SAVE_BASES_MAX]; atomic_uint n; };
static inline unsigned save_bases_count(const struct save_bases *all) { return atomic_load_explicit(&all->n, memory_order_acquire); }
/* Opens a commit and publishes it; one that cannot be read recognises nothing. One thread. 0 or -ENOMEM. */
int save_bases_add(struct save_bases *all, struct store *s, const char *run, uint64_t entry,
	const struct base_digest *manifest);
void save_bases_release(struct save_bases *all);
/* Any thread. NULL: nothing to be had. */
struct save_base_row *save_base_row_get(struct save_base *b, const struct store_layout *l, uint32_t tensor);
void save_base_row_put(struct save_base_row *row); /* NULL-safe */
/* Piece `piece` of the row (NULL: no row) if it has that length and may be referred to; else NULL. */
const struct store_piece *save_base_piece(const struct save_base_row *row, uint64_t piece, uint64_t len);
const char *save_base_pack(const struct save_base_row *row, const struct store_piece *p);
void save_base_place(const struct save_base_row *row, const struct store_piece *p, struct index_place *ret_place);
void save_base_gone(struct save_base *b);
const char *save_base_run(const struct save_base *b);
/* An object that a manifest itself refers to, into fresh memory, re-hashed. */
int save_manifest_object(struct store *s, const struct proto_manifest *m, const struct proto_ref *from, uint64_t max,
	void **ret_bytes, struct base_error *err);

/* ---- the writer ---- */

struct save_blob { char *name; bool per_rank; uint64_t len; struct save_source source; const struct save_known *known; struct base_digest digest; };
struct save_header { char *component, *view; void *bytes; size_t len; uint64_t data_bytes; struct store_object_ref ref; };

struct save_writer {
	struct store *store;
	struct save_options options;    /* run and attributes are copies */
	struct proto_attribute *attributes;
	struct store_layout_builder *builder;
	struct store_layout *layout; struct base_buf layout_object; uint32_t *tags;
	struct save_source *sources; uint32_t ntensors, sources_room;     /* by tag */
	struct save_blob *blobs; uint32_t nblobs, blobs_room;
	struct save_header *headers; uint32_t nheaders;
	uint64_t tensor_bytes, blob_bytes;
	struct index *index;            /* NULL: none */
	/* steps of the run that this save is likely to resemble, seen when it was opened */
	struct save_candidate { uint64_t entry; struct base_digest manifest; } candidates[2]; unsigned ncandidates;
	struct save_bases bases;
	uint64_t check_seed;            /* random: which recognised pieces are hashed in full */
	struct store_attempt *attempt;
	bool committed;
	struct save_dedup dedup;
	struct save_result result;
	uint64_t done_bytes, progress_ns;
};
void save_writer_progress(struct save_writer *w, uint64_t bytes, bool now);
bool save_writer_lookup(const struct save_writer *w, const struct base_digest *digest, enum store_object_kind kind,
	uint64_t raw_len, struct index_place *ret_place);

/* ---- bands ---- */

struct save_piece {                 /* a piece on its way through the pipeline */
	struct tensor_box box;
	uint64_t offset, len;           /* in the band's raw bytes */
	struct base_digest digest; struct base_xxh128 xxh;
	bool checked;                   /* was believed and hashed all the same */
	bool believed;                  /* `digest` is that of the piece with this XXH3-128 at this position of a base */
	bool looked, found;             /* the index was asked; `place` is where it says that it lies */
	bool encoded;                   /* the fields below are set */
	struct index_place place;
	uint16_t codec; uint64_t stored_len;
	uint32_t first_block;           /* in checks and lens */
};

struct save_band {                  /* belongs to one thread at a time: worker, then appender */
	struct save_band *next;         /* free ones */
	uint64_t sequence;
	uint32_t tensor; struct tensor_grid grid; unsigned word_bytes;
	uint64_t first_piece; uint32_t npieces;
	struct save_piece *pieces; uint32_t pieces_room;
	struct tensor_box box;          /* of all its pieces */
	struct save_base_row *rows[SAVE_BASES_MAX]; unsigned nrows; /* of the tensor, in the first bases; NULL: none */
	uint64_t len;
	uint8_t *memory[2]; size_t memory_room[2];
	uint8_t *raw, *out;             /* pieces one after another; encoded ones at the same offsets */
	uint64_t *checks; uint32_t *lens; uint32_t blocks_room;
	uint8_t *scratch;
	uint64_t read_ns, digest_ns, encode_ns;
	int rc; struct base_error err;
};
void save_band_release(struct save_band *b);
/* Takes the next pieces from `it` (of the whole tensor) into the band. -ENOMEM. */
int save_band_take(struct save_band *b, struct tensor_piece_iter *it);
/* fills b->err too */
int save_band_process(struct save_band *b, struct save_writer *w, const struct save_source *source);
void save_band_encode(struct save_band *b, struct save_piece *p);
/* The rows of its tensor in all bases that there are now. */
void save_band_rows(struct save_band *b, struct save_writer *w);
void save_band_forget(struct save_band *b); /* lets them go */
/* Hashes a piece that was believed. A mismatch: an error, in b->err. */
int save_band_confirm(struct save_band *b, const struct save_piece *p);

/* ---- appender: one thread ---- */

struct save_row;
struct save_appender {
	struct save_writer *w;
	/* the pack being written; NULL: none */
	struct store_pack_writer *pack; uint32_t pack_number; uint64_t run_start;
	char pack_class[PROTO_COMPONENT_MAX + 1];
	struct store_pack_writer *meta; uint32_t meta_number;
	struct store_part_builder *part;
	struct save_row *first, *last;  /* rows that are not in the part yet, in order */
	struct store_object_ref layout_ref;
};
/* opens the meta pack; layout and headers go in */
int save_appender_open(struct save_appender *a, struct save_writer *w, struct base_error *err);
void save_appender_release(struct save_appender *a); /* abandons what is not sealed */
int save_appender_band(struct save_appender *a, struct save_band *b, struct base_error *err);
int save_appender_blobs(struct save_appender *a, struct base_error *err);
/* Makes `class` the pack that objects go to; the one before is sealed. NULL: none. */
int save_appender_class(struct save_appender *a, const char *class, struct base_error *err);
/* Opens the class's pack if need be, ends the run if `bytes` more would be too many for it. */
int save_appender_room(struct save_appender *a, uint64_t bytes, struct base_error *err);
int save_write_failed(const struct save_writer *w, const char *class, int rc, struct base_error *err);
/* Counts an object that was just appended to the current pack. */
void save_appender_count(struct save_appender *a, struct save_known *k);

int save_pipeline_run(struct save_appender *a, struct base_error *err);
int save_finish(struct save_appender *a, struct base_error *err);

#endif
