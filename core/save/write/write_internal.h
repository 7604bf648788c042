/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/save/write share (docs/save.md).
 *
 *   writer.c    what one save of one rank consists of, and its course    -> struct save_writer
 *   engine.c    workers, order, bounded memory                           -> engine.h
 *   reader.c    an import's bands out of its sources
 *   given.c     a copy's bands: what the store lacks of pieces that are known by digest
 *   band.c      read, cut, digest, look up, encode one band              -> band.h
 *   appender.c  duplicates, packs, rows, in order                        -> struct save_appender
 *   dedup.c, base.c  what is known already                               -> known_internal.h
 *   past.c      which steps are bases
 *   blob.c      blobs        finish.c  meta pack, part, announcement, commit */
#ifndef CORE_SAVE_WRITE_WRITE_INTERNAL_H
#define CORE_SAVE_WRITE_WRITE_INTERNAL_H

#include <pthread.h>

#include "core/base/buf.h"
#include "core/pack/codec.h"
#include "core/save/write/known_internal.h"
#include "core/save/write/rank.h"
#include "index/index.h"

#define SAVE_BELIEVE_BYTES 240u                  /* longer pieces are believed by their XXH3-128 */
#define SAVE_BELIEVE_CHECK 1024u                 /* one in that many is hashed all the same */

/* ---- the writer ---- */

struct save_blob {
	char *name; bool per_rank; uint64_t len; struct save_source source;
	const struct save_known *known; struct base_digest digest;
	bool given;                     /* the digest is another store's; it is compared when the bytes are read */
};
struct save_header {
	char *component, *view; void *bytes; size_t len; uint64_t data_bytes; struct pack_object_ref ref;
};

struct save_writer {
	struct store *store;
	uint32_t rank, world;
	struct save_options options;    /* run and attributes are copies */
	struct proto_attribute *attributes;
	/* What is stored: boxes by tensor of the layout, each tensor's together, in the order of its row. NULL: not
	 * known yet. An import's is `whole`, a rank's is borrowed (save_writer_prepared). */
	const struct save_planned *planned;
	/* of an import: what it was declared to be, and made of; sources by tag, tags by tensor of the layout */
	struct store_layout_builder *builder;
	struct save_planned whole;
	struct save_source *sources; uint32_t ntensors, sources_room, *tags;
	struct save_blob *blobs; uint32_t nblobs, blobs_room;
	struct save_header *headers; uint32_t nheaders;
	uint64_t tensor_bytes, blob_bytes;
	uint64_t blob_slashes;          /* in the names of all blobs */
	struct index *index; bool index_lent; /* NULL: none */
	uint64_t pack_bytes;            /* a pack that is longer is followed by another one; 0: never */
	bool layout_elsewhere;          /* another rank of this process stores it */
	struct commit_notes notes;      /* of damage, as they were when the save began */
	struct save_bases bases;
	struct save_base *named;        /* by save_writer_name; or NULL */
	bool believes;                  /* false: the store's seed is a weak one, XXH3-128 proves nothing */
	uint64_t check_seed;            /* random: which recognised pieces are hashed in full */
	struct commit_attempt *attempt; /* borrowed from begin to end */
	struct save_appender *appender; /* from append to end */
	bool committed;
	struct save_dedup dedup;
	struct save_taken taken;
	struct save_last leaves;        /* a job's: for the next save, once it is announced */
	struct save_result result;
	struct base_error no_base;       /* why the first of result.bytes_no_base were written */
	uint64_t done_bytes, progress_ns;
};
void save_writer_progress(struct save_writer *w, uint64_t bytes, bool now);
bool save_writer_lookup(const struct save_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint64_t raw_len, struct index_place *ret_place);

/* ---- bands ---- */

/* Memory for an object of some length: its bytes, room for as many and for the codec, and for each block. */
struct save_encoding { uint8_t *raw, *out, *scratch; uint64_t *checks; uint32_t *lens; };
/* Encodes what is in `raw` to `out`, if that makes it shorter; word_bytes 0: it is not tried. Makes the checks of what
 * is to be stored. Returns the codec. */
uint16_t save_encode(const struct save_encoding *e, unsigned word_bytes, const struct base_digest *digest, uint64_t len,
	uint64_t *ret_stored_len);
void save_band_encode(struct save_band *b, struct save_piece *p);
/* The rows of its tensor in all bases that there are now. */
void save_band_rows(struct save_band *b, struct save_writer *w);
/* Does a base have it at its position? Then the appender will hardly need its encoded form. trusted: of bases whose
 * record is believed; else the stored bytes that a record names are compared with the piece or, of a given piece,
 * whose bytes are elsewhere, hashed: after that p->compared, or p->refuted, says how it went. A given piece gets its
 * xxh. */
bool save_band_at_position(const struct save_band *b, const struct save_writer *w, struct save_piece *p,
	bool trusted);
/* Hashes a piece that was believed. A mismatch: an error, in b->err. */
int save_band_confirm(struct save_band *b, const struct save_writer *w, const struct save_piece *p);
/* Cuts what is in b->in (which may be overwritten), digests, looks up, encodes. Fills b->err too. */
int save_band_process(struct save_band *b, struct save_writer *w);

/* given.c: the same of a band whose pieces are given; and one of its pieces whose bytes are needed after all. Both fill
 * b->err too. */
int save_given_process(struct save_band *b, struct save_writer *w);
int save_given_fetch(struct save_band *b, const struct save_writer *w, struct save_piece *p);

/* ---- appender: one thread ---- */

struct save_row;
/* Small objects that are to come last in the extent (held.c). */
struct save_held { struct base_buf bytes, pieces; };
struct save_appender {
	struct save_writer *w;
	/* the pack being written; NULL: none */
	struct pack_writer *pack; uint32_t pack_number; uint64_t extent_start;
	char pack_class[PROTO_COMPONENT_MAX + 1];
	struct pack_writer *meta; uint32_t meta_number;
	uint64_t meta_blob_bytes;       /* stored bytes of blobs in it: the part's table does not count them */
	struct save_held held;
	struct store_part_builder *part;
	struct save_row *first, *last;  /* rows that are not in the part yet, in order */
	struct pack_object_ref layout_ref; uint32_t layout_pack;
};
/* opens the meta pack; layout and headers go in. *ret_a is to be freed after an error, too */
int save_appender_open(struct save_writer *w, struct save_appender **ret_a, struct base_error *err);
void save_appender_free(struct save_appender *a); /* abandons what is not sealed; NULL-safe */
int save_appender_band(struct save_appender *a, struct save_band *b, struct base_error *err);
void save_appender_keep(struct save_appender *a); /* lent memory that waits for more bands (pack_keep) */
int save_appender_blobs(struct save_appender *a, struct base_error *err);
/* Makes `class` the pack that objects go to; the one before is sealed. NULL: none. */
int save_appender_class(struct save_appender *a, const char *class, struct base_error *err);
/* Opens the class's pack if need be, ends the extent if `bytes` more would be too many for it. */
int save_appender_room(struct save_appender *a, uint64_t bytes, struct base_error *err);
/* Is the piece, of a tensor that is one piece, small enough to be held? */
bool save_held_takes(const struct save_piece *p);
/* Copies it. 1: enough are held; 0; -ENOMEM. */
int save_held_add(struct save_held *h, const struct save_band *b, const struct save_piece *p, struct save_known *k);
uint64_t save_held_bytes(const struct save_held *h); /* that they will take in the pack, at most */
int save_held_append(struct save_appender *a);          /* to the pack that is open; then none is held */
void save_held_release(struct save_held *h);
int save_write_failed(const struct save_writer *w, const char *class, int r, struct base_error *err);
/* Counts an object that was just appended to that pack: the current one, or a blob to `meta`. */
void save_appender_count(struct save_appender *a, uint32_t pack, struct save_known *k);

/* The bands of a save to its appender, which the calling thread is. -ECANCELED: the source failed. */
int save_engine_append(struct save_engine *e, struct save_writer *w, const struct save_engine_source *source,
	struct base_error *err);

#endif
