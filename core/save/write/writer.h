/* SPDX-License-Identifier: Apache-2.0
 *
 * writer: one save by a writer alone, an import: begin, packs, part, commit (docs/save.md). A job's rank uses the same
 * writer by rank.h, with bands out of memory.
 *
 * Workers (all cores) read bands of a source, cut them into pieces, digest, look for known content, encode and check;
 * one appender takes finished pieces in their order, settles duplicates, and writes packs. Bytes in flight are bounded.
 * The same input gives the same pieces, blobs and layout objects with the same digests in the same order, whatever the
 * number of threads. One thread calls these functions; sources are read from many. */
#ifndef CORE_SAVE_WRITE_WRITER_H
#define CORE_SAVE_WRITE_WRITER_H

#include "core/commit/attempt/attempt.h"
#include "core/step/part.h"

/* Reads exactly len row-major bytes at offset, from any thread, several at once. 0 or a negative errno with a
 * sentence. */
typedef int (*save_read_func)(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err);
struct save_source { save_read_func read; void *arg; };

struct save_options {
	const char *run;
	uint64_t step;                  /* or PROTO_NONE */
	bool replace;
	const struct proto_attribute *attributes; size_t nattributes;   /* any order; keys checked */
	unsigned threads;               /* 0: all cores */
	/* do not look for equal content of other commits, neither by index nor by position */
	bool no_index;
	/* may be NULL; called from one thread, not often */
	void (*progress)(void *arg, uint64_t done_bytes, uint64_t total_bytes);
	void *progress_arg;
	/* May be NULL: asked by the committing thread when all is written; true: nothing is committed (-EINTR). */
	bool (*cancelled)(void);
	uint64_t warn_free;             /* as in space.h; 0: as the run's policy says, if it does */
};

struct save_result {
	uint64_t step, entry;
	char attempt[PROTO_ATTEMPT_MAX];
	uint64_t tensors, blobs, bytes;                 /* logical */
	/* reused: known from a base; duplicate: twice in this save */
	uint64_t pieces, pieces_new, pieces_reused, pieces_duplicate;
	uint64_t piece_bytes_new;                       /* stored bytes of new pieces and blobs */
	uint64_t raw_bytes_new;                         /* their raw bytes */
	/* raw bytes of pieces known from a base, and of those that are twice in this save; of new ones, encoded */
	uint64_t bytes_reused, bytes_duplicate, bytes_encoded;
	/* raw bytes of new pieces and blobs that earlier steps had, as far as is known. no_base: those of them that a
	 * base has or may have, but that could not be read or used; of the others the save does not keep the attempts
	 * (keep.h) */
	uint64_t bytes_again, bytes_no_base;
	uint64_t meta_bytes;                            /* layouts, view headers, parts, manifests */
	uint32_t bases;
	uint64_t digest_ns, encode_ns, read_ns, write_ns; /* summed over threads */
	/* of the pieces: believed by XXH3-128 to be those of a base; of these, hashed all the same */
	uint64_t pieces_believed, pieces_checked;
	/* those of a base, or that the index found, whose bytes were compared; pieces that another's record said
	 * to be stored and that are not, so that they were stored now */
	uint64_t pieces_compared, pieces_refuted;
	struct base_digest part;        /* digest of the part that was written */
	/* the step has objects, or refers to commits, that the index does not know */
	bool index_behind;
};

struct save_writer;
/* Checks the run's name, attributes, and (cheaply) that the step can be taken. Nothing is written yet. */
int save_writer_open(struct store *s, const struct save_options *o, struct save_writer **ret_w, struct base_error *err);
/* Declares; names and shapes are checked now, bytes are read in commit. Names are copied, the source must live until
 * close. */
int save_writer_tensor(struct save_writer *w, const char *component, const char *name, size_t name_len,
	enum tensor_dtype dtype,
	const struct tensor_shape *shape, struct save_source source, struct base_error *err);
int save_writer_blob(struct save_writer *w, const char *name, bool per_rank, uint64_t len, struct save_source source,
	struct base_error *err);
/* After the last tensor: the sorted layout, owned by w. */
int save_writer_plan(struct save_writer *w, const struct store_layout **ret_layout, struct base_error *err);
/* Bytes of a view header of a component ("safetensors"), copied. */
int save_writer_header(struct save_writer *w, const char *component, const char *view, const void *bytes, size_t len,
	uint64_t data_bytes, struct base_error *err);
/* All or nothing. On an error everything that was written is given back as far as possible and old steps are as they
 * were. */
int save_writer_commit(struct save_writer *w, struct save_result *ret_r, struct base_error *err);
void save_writer_close(struct save_writer *w); /* aborts what is not committed; NULL-safe */

#endif
