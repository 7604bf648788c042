/* SPDX-License-Identifier: Apache-2.0
 *
 * same: pieces that are as the saver's last step has them, and are not copied (same.c). */
#ifndef CORE_SAVE_SAVER_SAME_INTERNAL_H
#define CORE_SAVE_SAVER_SAME_INTERNAL_H

#include "core/base/error.h"
#include "core/save/plan/plan_key.h"
#include "core/save/write/band.h"

struct save_flight;
struct saver_batch;
struct saver_worker;

/* What a save found in the pieces of its plan, by number; to compare the next one with, once it is committed (same.c).
 * Reference-counted. */
struct saver_pieces {
	unsigned refs;                  /* protected by the saver's lock */
	struct base_digest key;         /* of the plan */
	uint64_t entry;                 /* of its commit */
	uint64_t steady_bytes;          /* of pieces that do not move; protected by the saver's lock */
	struct base_xxh128 *xxh;
	bool *moves;                    /* it differed from the save before, or cannot be compared */
	bool *same;                     /* as the save before has it, and not copied */
	enum save_worth *worth;         /* of encoding them, by this save or before */
};
/* May pieces be left uncopied? ASKED: once the persister has named the base that has them. */
enum saver_same { SAME_NO, SAME_ASKED, SAME_YES };

/* How much longer than it is worth an answer may take, for a save to ask for it, and to wait. Tests change it. */
extern struct saver_patience { uint64_t asks_ns, waits_ns; } saver_same_patience;
/* The lock is held for these: */
void saver_pieces_give(struct saver_pieces *p); /* NULL-safe */
void saver_same_ask(struct save_flight *f); /* it is prepared: sets f->before and f->same */
bool saver_same_in(const struct save_flight *f, const struct saver_batch *b); /* in that batch? */
/* What a worker can do to a batch that has no slot yet; NULL: nothing. */
struct saver_batch *saver_same_next(const struct save_flight *f);
/* When the first batch is not ready, and there is nothing to compare: until when to wait for the answer, on
 * CLOCK_MONOTONIC. 0: no longer. */
uint64_t saver_same_wait(struct save_flight *f);
void saver_same_keep(struct save_flight *f); /* it is committed */
/* No lock: */
int saver_same_prepare(struct save_flight *f, const struct base_digest *key, struct base_error *err);
/* Compares a batch, if it is to be compared, and if the answer is there, settles what is copied. 1: it is ready. */
int saver_same_batch(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, bool compared,
	enum saver_same same, struct base_error *err);
int saver_same_answer(struct save_flight *f, struct base_error *err); /* by the persister: names the base */

#endif
