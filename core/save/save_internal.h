/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/save share (docs/save.md).
 *
 *   writer.c    what one save of one rank consists of        -> struct save_writer
 *   pipeline.c  an import's workers, order, bounded memory   -> struct save_pipeline (private)
 *   band.c      read, cut, digest, look up, encode one band  -> struct save_band
 *   appender.c  duplicates, packs, rows, in order            -> struct save_appender
 *   dedup.c, base.c  what is known already               -> known_internal.h
 *   blob.c      blobs        finish.c  meta pack, part, announcement, commit
 *   saver and what belongs to it: saver_internal.h */
#ifndef CORE_SAVE_SAVE_INTERNAL_H
#define CORE_SAVE_SAVE_INTERNAL_H

#include <pthread.h>

#include "core/base/buf.h"
#include "core/pack/codec.h"
#include "core/save/known_internal.h"
#include "core/save/plan.h"
#include "core/save/writer.h"
#include "index/index.h"

#define SAVE_BELIEVE_BYTES 240u                  /* longer pieces are believed by their XXH3-128 */
#define SAVE_BELIEVE_CHECK 1024u                 /* one in that many is hashed all the same */
#define SAVE_PART_BYTES 2048u                    /* of a piece that is cut, hashed, copied: in the nearest cache */
#define SAVE_BAND_BYTES (UINT64_C(9) << 20)      /* source bytes of a band, unless one piece has more */
/* What files are read into begins at a page: where it lies 16 bytes behind one, as malloc gives large memory, the
 * kernel's copy takes five times as long on some processors (rep movsb; measured on AMD's third generation of EPYC). */
#define SAVE_ALIGN 4096u

/* ---- the writer ---- */

struct save_blob {
	char *name; bool per_rank; uint64_t len; struct save_source source;
	const struct save_known *known; struct base_digest digest;
};
struct save_header {
	char *component, *view; void *bytes; size_t len; uint64_t data_bytes; struct store_object_ref ref;
};

struct save_writer {
	struct store *store;
	/* of a job: its attempt is announced, not committed; layout, plan and tensors are the flight's */
	bool job; uint32_t rank, world;
	const struct base_buf *layout_bytes;    /* the layout object: `layout_object`, or a job's */
	bool stores_layout;             /* false: the appender's `layout_ref` is another commit's copy, if any */
	const struct proto_timing *timings; uint32_t ntimings; /* a job's, for the part */
	const struct proto_sample *samples; uint32_t nsamples;
	const struct proto_replica *replicas; uint32_t nreplicas;
	struct save_options options;    /* run and attributes are copies */
	struct proto_attribute *attributes;
	struct store_layout_builder *builder;
	struct store_layout *layout; struct base_buf layout_object; uint32_t *tags;
	struct save_source *sources; uint32_t ntensors, sources_room;     /* by tag */
	/* What is stored: boxes by tensor of the layout, each tensor's together, in the order of its row. */
	const struct save_plan *plan;
	const uint32_t *plan_tensor;    /* of the layout, by the plan's; NULL: the same numbers */
	struct save_plan whole;         /* an import's plan: every tensor, whole */
	struct save_blob *blobs; uint32_t nblobs, blobs_room;
	struct save_header *headers; uint32_t nheaders;
	uint64_t tensor_bytes, blob_bytes;
	struct index *index;            /* NULL: none */
	/* steps of the run that this save is likely to resemble, seen when it was opened */
	struct save_candidate { uint64_t entry; struct base_digest manifest; } candidates[2]; unsigned ncandidates;
	struct store_notes notes;       /* of damage, as they were when the save began */
	struct save_bases bases;
	bool believes;                  /* false: the store's seed is a weak one, XXH3-128 proves nothing */
	uint64_t check_seed;            /* random: which recognised pieces are hashed in full */
	struct store_attempt *attempt;
	bool committed;
	struct save_dedup dedup;
	struct save_result result;
	uint64_t done_bytes, progress_ns;
};
/* A job's: run and attributes are copied and checked. Free with save_writer_close. */
int save_writer_new(struct store *s, const char *run, const struct proto_attribute *attributes, size_t nattributes,
	struct save_writer **ret_w, struct base_error *err);
/* Reads the notes of damage; before the first base is added. */
int save_writer_notes(struct save_writer *w, struct base_error *err);
void save_writer_progress(struct save_writer *w, uint64_t bytes, bool now);
bool save_writer_lookup(const struct save_writer *w, const struct base_digest *digest, enum store_object_kind kind,
	uint64_t raw_len, struct index_place *ret_place);

/* ---- bands ---- */

struct save_piece {                 /* a piece on its way through the pipeline */
	struct tensor_box box;
	uint64_t offset, len;           /* in the band's raw bytes */
	struct base_digest digest; struct base_xxh128 xxh;
	bool checked;                   /* was believed and hashed all the same */
	/* `digest` is that of the piece with this XXH3-128 at this position of that base; or NULL */
	struct save_base *believed;
	bool looked, found;             /* the index was asked; `place` is where it says that it lies */
	bool encoded;                   /* the fields below are set */
	struct index_place place;
	uint16_t codec; uint64_t stored_len;
	uint32_t first_block;           /* in checks and lens */
};

struct save_band {                  /* belongs to one thread at a time: worker, then appender */
	struct save_band *next;         /* free ones */
	uint64_t sequence;
	uint64_t at; uint32_t tensor;   /* box of the plan; its tensor in the layout */
	struct tensor_grid grid; unsigned word_bytes;
	bool believe;                   /* its pieces may be recognised by their XXH3-128 alone */
	uint64_t first_piece; uint32_t npieces; /* in that box */
	struct save_piece *pieces; uint32_t pieces_room;
	struct tensor_box box;          /* of all its pieces */
	struct save_base_row *rows[SAVE_BASES_MAX]; unsigned nrows; /* of the tensor, in the first bases; NULL: none */
	uint64_t len;
	uint8_t *memory[2]; size_t memory_room[2];
	uint8_t *in;                    /* the box's bytes, row-major: memory[0], or a part of the ring's slot */
	uint8_t *raw, *out;             /* pieces one after another; encoded ones at the same offsets */
	/* The band was cut before it came: `in` has its pieces one after another, with these hashes. NULL: its box. */
	const struct base_xxh128 *staged;
	bool cut;                       /* all pieces stand in `raw`; else they lie in `in` only, which is as it was */
	uint64_t *checks; uint32_t *lens; uint32_t blocks_room;
	uint8_t *scratch;
	struct base_xxh128_state *hash;
	uint64_t read_ns, digest_ns, encode_ns;
	int rc; struct base_error err;
};
void save_band_release(struct save_band *b);
/* Walks the bands of a plan; the same walk gives the same bands. A copy goes on from where it was made. */
struct save_cursor {
	uint64_t at; bool inside; struct tensor_grid grid; struct tensor_piece_iter it;
};
/* 1: the next pieces are in the band; 0: there are no more; -ENOMEM. */
int save_cursor_take(struct save_cursor *c, const struct save_writer *w, struct save_band *b);
uint32_t save_writer_tensor_at(const struct save_writer *w, uint64_t at); /* in the layout, of a box of the plan */
/* Reads an import's band. Fills b->err too. */
int save_band_read(struct save_band *b, const struct save_source *source);
/* Cuts what lies in b->in (which may be overwritten), digests, looks up, encodes. Fills b->err too. */
int save_band_process(struct save_band *b, struct save_writer *w);
void save_band_encode(struct save_band *b, struct save_piece *p);
/* The rows of its tensor in all bases that there are now. */
void save_band_rows(struct save_band *b, struct save_writer *w);
void save_band_forget(struct save_band *b); /* lets them go */
/* Hashes a piece that was believed. A mismatch: an error, in b->err. */
int save_band_confirm(struct save_band *b, const struct save_writer *w, const struct save_piece *p);

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
	struct store_object_ref layout_ref; uint32_t layout_pack;
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
