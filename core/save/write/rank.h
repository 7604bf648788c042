/* SPDX-License-Identifier: Apache-2.0
 *
 * rank: the writer of one rank's save, as a job's saver uses it; an import (writer.h) goes the same way inside. In this
 * order: new, blobs, prepared; begin, base ..., append, seal, finish, end; close. One thread at a time, but for bands,
 * which any number of threads process (engine.h). After an error go on with end. */
#ifndef CORE_SAVE_WRITE_RANK_H
#define CORE_SAVE_WRITE_RANK_H

#include "core/save/plan/planned.h"
#include "core/save/write/engine.h"
#include "core/save/write/writer.h"

/* What a rank's save leaves for the next one, which has that step as its base: then this rank need not read the
 * manifest, which grows with the number of ranks. {0}: nothing is known. */
struct save_last {
	struct proto_manifest m;        /* what the step's manifest says of this rank (store_manifest_excerpt) */
	struct store_part_kept part;
	uint64_t base;                  /* entry of the step's own base; 0: not known */
	size_t attempts;                /* that the step names, its own included: at most so many */
};

#define SAVE_PAST_STEPS 32u
#define SAVE_PAST_TRIED 8u
/* What a launch remembers of the run's steps, from save to save; {0}: nothing (past.c). */
struct save_past {
	struct save_past_step {         /* by its manifest */
		struct base_digest manifest; uint64_t step, entry;
		struct base_digest *layouts; uint32_t nlayouts;
		struct save_component *components; uint32_t ncomponents;
	} steps[SAVE_PAST_STEPS]; unsigned nsteps; /* in the order in which they were read */
	/* attempts of the launch, in a ring; how many there were */
	struct save_past_tried { uint64_t step; char attempt[PROTO_ATTEMPT_MAX]; } tried[SAVE_PAST_TRIED];
	uint64_t ntried;
	struct save_last last;
	struct commit_list *list;        /* of the run: read on from save to save. NULL: not opened yet */
};
void save_past_release(struct save_past *p);
void save_last_release(struct save_last *last);
/* This process has begun to load that step of the run: its next save there most likely goes on from it. Any thread. */
void save_past_loaded(const struct store *s, const char *run, uint64_t step, uint64_t entry);

/* Run and attributes are copied and checked. Free with save_writer_close. */
int save_writer_new(struct store *s, const char *run, const struct proto_attribute *attributes, size_t nattributes,
	uint32_t rank, uint32_t world, struct save_writer **ret_w, struct base_error *err);
/* save_writer_blob declares them. */
/* The same of a blob that another store says to have this digest: it is read only if the store lacks it. */
int save_writer_blob_given(struct save_writer *w, const char *name, bool per_rank, uint64_t len,
	const struct base_digest *digest, struct save_source source, struct base_error *err);
bool save_writer_has_blob(const struct save_writer *w, const char *name, bool per_rank);
uint64_t save_writer_blob_bytes(const struct save_writer *w);
/* Another rank of this save, by the same process, stores the layout. */
void save_writer_layout_elsewhere(struct save_writer *w);
/* A pack ends when it is so long, and another one follows. 0, the default: never. */
void save_writer_pack_bytes(struct save_writer *w, uint64_t bytes);
/* An index that is open for reading: borrowed until close. */
void save_writer_index(struct save_writer *w, struct index *index);
/* What is stored: borrowed until close. */
void save_writer_prepared(struct save_writer *w, const struct save_planned *planned);

/* Reads the notes of damage. The attempt is borrowed until end. */
int save_writer_begin(struct save_writer *w, struct commit_attempt *attempt, struct base_error *err);
/* Opens a commit whose pieces are recognised; one that cannot be read recognises nothing. */
int save_writer_base(struct save_writer *w, const char *run, uint64_t entry, const struct base_digest *manifest,
	struct base_error *err);
/* The steps of the run that this save is most likely to share pieces with (past.c), which remembers its attempt. `past`
 * is borrowed until end. */
int save_writer_bases(struct save_writer *w, struct save_past *past, bool replace, struct base_error *err);
/* After begin: what is in this pack, which the attempt has taken over, need not be written. One that cannot be read has
 * nothing. */
int save_writer_taken(struct save_writer *w, const char *pack, struct base_error *err);
/* Names the commit of that entry as a base, if it is among those that were opened; this decides which attempts are
 * kept. 1: it is named; 0: it is not there. */
int save_writer_name(struct save_writer *w, const char *run, uint64_t entry, struct base_error *err);
/* Any thread, after that: is the save sure to refer to a piece of that base for the band's piece with this XXH3-128? So
 * its bytes are not asked for. The band keeps the bases' rows (save_band_forget). */
bool save_writer_has(struct save_writer *w, struct save_band *b, struct save_piece *p);
/* The layout object, then all bands out of the source, in order. The planned layout has its object by now. */
int save_writer_append(struct save_writer *w, struct save_engine *e, const struct save_engine_source *source,
	struct base_error *err);
/* The same with so many threads (0: as there are processors) of its own, out of a source that has taken, read and
 * appended alone; NULL: out of those that an import has declared. */
int save_writer_append_all(struct save_writer *w, unsigned threads, const struct save_engine_source *source,
	struct base_error *err);
int save_writer_seal(struct save_writer *w, struct base_error *err);    /* blobs, the last packs */
/* What a part and an announcement say besides: borrowed. */
struct save_measured {
	const struct proto_timing *timings; uint32_t ntimings;
	const struct proto_sample *samples; uint32_t nsamples;
	const struct proto_replica *replicas; uint32_t nreplicas;
	const char *host;               /* NULL: this one */
};
/* The part, and the announcement. ret_entry NULL: others may have to announce as well, and the list decides; else it is
 * committed. */
int save_writer_finish(struct save_writer *w, const struct save_measured *m, uint64_t *ret_entry,
	struct base_error *err);
/* Warn if more was written again than changed, and at least 1 % of the save: because too many attempts were named, or
 * because bases could not be used. true: it did. */
bool save_writer_again_warn(const struct save_writer *w);
bool save_writer_no_base_warn(const struct save_writer *w);
void save_writer_end(struct save_writer *w);    /* closes packs and bases */
/* After end, of a step that is visible: past->last is what this save leaves. */
void save_writer_leave(struct save_writer *w, struct save_past *past);
const struct save_result *save_writer_result(const struct save_writer *w);

#endif
