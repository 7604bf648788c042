/* SPDX-License-Identifier: Apache-2.0
 *
 * engine: the bands of a save through workers to the appender, in order, in bounded memory (docs/save.md). It has
 * no threads and no lock of its own: workers call save_engine_step as long as it finds something to do, one thread
 * runs save_engine_append. Where a band's bytes come from is the source's: an import reads files, a saver has them
 * staged. */
#ifndef CORE_SAVE_WRITE_ENGINE_H
#define CORE_SAVE_WRITE_ENGINE_H

#include <pthread.h>

#include "core/save/write/band.h"

/* What a band that was appended cost. `starved`: no other band was free, so workers may wait for this one. */
struct save_engine_appended { uint64_t begin_ns, write_ns, stored_bytes; bool starved; };

/* All but read are called with the lock held, and do not block; those that say so may be NULL. */
struct save_engine_source {
	bool (*ready)(void *arg);       /* may the next band be taken now? NULL: always */
	/* It was taken, and its pieces are known: says where its bytes are (in, staged). NULL: read does */
	void (*taken)(void *arg, struct save_band *b);
	int (*read)(void *arg, struct save_band *b);    /* fills b->err too; any thread, no lock. NULL: nothing to do */
	/* Wakes the workers that wait for a free band. */
	void (*appended)(void *arg, const struct save_band *b, const struct save_engine_appended *cost);
	/* 1: appending may end with the last band, 0: not yet (`ready` is signalled), negative: the save failed for
	 * another reason, and appending ends now. NULL: 1 */
	int (*end)(void *arg);
	bool (*short_of_memory)(void *arg); /* is lent memory waited for? `ready` was signalled then. NULL: no */
	void *arg;
};
struct save_engine {
	/* the owner's: protects all below; signalled when the next band may be appended, broadcast to workers */
	pthread_mutex_t *lock; pthread_cond_t *ready, *work;
	struct save_band *bands, *free, **order; unsigned nbands;
	/* of the save that is being appended; NULL: none */
	struct save_writer *w; const struct save_engine_source *source;
	struct save_cursor cursor;
	uint64_t taken, appended;       /* sequence numbers: given out; handed to the appender */
	unsigned processing;
	bool over, no_memory;           /* no more bands are taken; because one found no memory */
};
/* For so many workers. -ENOMEM; save_engine_release in any case. */
int save_engine_init(struct save_engine *e, unsigned threads, pthread_mutex_t *lock, pthread_cond_t *ready,
	pthread_cond_t *work);
void save_engine_release(struct save_engine *e);
/* The lock is held, and let go meanwhile. true: a band was processed. */
bool save_engine_step(struct save_engine *e);

#endif
