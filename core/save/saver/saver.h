/* SPDX-License-Identifier: Apache-2.0
 *
 * saver: saves of a training run by one of its ranks, in the background (docs/save.md). A saver has a launch, a ring of
 * staging memory and threads, for the whole run; a flight is one save under way: declared, submitted, staged,
 * announced, decided. Flights are decided in the order in which they were begun. core/api/save.c is the public face.
 *
 * Any thread; declaring and submitting one flight is one thread's at a time. begin, tensors, blob and submit do not
 * block on the store. After a fork all calls answer -BASE_EFORKED. */
#ifndef CORE_SAVE_SAVER_SAVER_H
#define CORE_SAVE_SAVER_SAVER_H

#include "core/device/ring.h"
#include "core/save/plan/replica.h"
#include "core/save/write/writer.h"
#include "core/tensor/description.h"
#include "proto/stats.h"

struct save_saver;
struct save_saver_options {             /* as struct vckpt_saver_options says */
	struct store *store;            /* outlives the saver */
	const char *run, *launch_id;
	uint32_t rank, world;
	const struct tensor_mesh *mesh; /* copied; NULL: all ranks */
	uint64_t heartbeat_ms, start_ms, deadline_ms, ring_bytes;
	enum device_pin pin;
	enum save_replicas_mode replicas;
	unsigned threads;
	bool low_priority, no_bases;
	uint64_t warn_free;             /* as in core/save/write/space.h; 0: first as the policy says */
	/* which steps stay, as in core/upkeep/retain.h; besides the run's policy */
	const char *const *keep; size_t nkeep;
};
int save_saver_open(const struct save_saver_options *o, struct save_saver **ret_s, struct base_error *err);
/* Waits until every flight is decided. Returns the error of the first failed flight whose error no caller has seen; a
 * second call does nothing. */
int save_saver_close(struct save_saver *s, struct base_error *err);
void save_saver_free(struct save_saver *s); /* closes; NULL-safe; flights were freed before */
bool save_saver_is_child(const struct save_saver *s); /* after a fork */

struct save_flight;
struct save_flight_options {
	uint64_t step; bool replace;
	const struct proto_attribute *attributes; size_t nattributes;
	const char *const *bases; size_t nbases; /* "RUN/STEP" */
	void *stream;
};
int save_flight_begin(struct save_saver *s, const struct save_flight_options *o, struct save_flight **ret_f,
	struct base_error *err);
/* All that it points to is copied, but not the data. */
int save_flight_tensor(struct save_flight *f, const struct tensor_description *t, struct base_error *err);
size_t save_flight_count(const struct save_flight *f);
void save_flight_truncate(struct save_flight *f, size_t count); /* forgets the tensors after the first `count` */
int save_flight_blob(struct save_flight *f, const char *name, bool per_rank, const void *bytes, size_t len,
	struct base_error *err);
int save_flight_common(struct save_flight *f, const char *group, const char *name, const void *bytes, size_t len,
	struct base_error *err);
int save_flight_submit(struct save_flight *f, struct base_error *err);
int save_flight_wait_staged(struct save_flight *f, int64_t timeout_ms, struct base_error *err);
int save_flight_wait_committed(struct save_flight *f, int64_t timeout_ms, uint64_t *ret_step, uint64_t *ret_entry,
	struct base_error *err);
/* For a flight that was not submitted, before it is freed: the reason that the other ranks get. */
void save_flight_give_up(struct save_flight *f, const char *reason);
void save_flight_free(struct save_flight *f); /* NULL-safe */

enum save_flight_state { SAVE_OPEN, SAVE_QUEUED, SAVE_STAGING, SAVE_STAGED, SAVE_ANNOUNCED, SAVE_COMMITTED,
	SAVE_FAILED };
enum save_phase { SAVE_PLAN, SAVE_ROOM, SAVE_COPY, SAVE_DIGEST, SAVE_ENCODE, SAVE_WRITE, SAVE_SEAL, SAVE_WAIT,
	SAVE_COMMIT, SAVE_PHASES };
struct save_phase_time { uint64_t start_ns, end_ns, busy_ns, bytes; }; /* CLOCK_REALTIME; busy: of all threads */
struct save_flight_info {
	enum save_flight_state state; int error;
	uint64_t bytes_total, bytes_done;
	struct proto_stats stats;       /* so far: times, bytes, pieces, plan_cached, ring_waits; the rest is not set */
	struct save_phase_time phase[SAVE_PHASES];
	uint64_t plan_ns, bytes_again, bytes_no_base;
	uint32_t plan_hits, plan_misses;
};
int save_flight_info(struct save_flight *f, struct save_flight_info *ret_info); /* -BASE_EFORKED after a fork */
const char *save_phase_name(enum save_phase phase);

#endif
