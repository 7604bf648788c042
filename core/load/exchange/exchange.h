/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange: ranks that fill at the same time read each stored byte once, and pass it on (docs/load.md, "Exchange"). */
#ifndef CORE_LOAD_EXCHANGE_EXCHANGE_H
#define CORE_LOAD_EXCHANGE_EXCHANGE_H

#include "core/comm/comm.h"
#include "core/load/fill/fill.h"

enum load_exchange_mode { LOAD_EXCHANGE_AUTO, LOAD_EXCHANGE_NEVER, LOAD_EXCHANGE_ALWAYS };

/* To be used in place of load_fill_run, by all ranks of the communicator, each with a fill. Both are the caller's, and
 * stay until the exchange is freed. NULL: out of memory. */
struct load_exchange;
struct load_exchange *load_exchange_new(struct load_fill *f, struct comm *comm, enum load_exchange_mode mode);
void load_exchange_free(struct load_exchange *x); /* NULL-safe */
/* Fills, once. All ranks fill from the same step with the same flags and mode; else all fail. Returns 0 when all ranks
 * have succeeded; an error of one is an error of all. */
int load_exchange_run(struct load_exchange *x, struct base_error *err);

/* After run. Raw bytes. */
struct load_exchange_result {
	enum load_exchange_mode chosen;  /* NEVER or ALWAYS; AUTO: nothing was decided */
	uint32_t ranks;
	uint64_t sent, got;              /* buckets that this rank owned, and those that it wanted */
	uint64_t shared, wanted;         /* of all ranks: bytes that several want, once; for each of them */
	const char *why;                 /* a sentence; the exchange's */
};
void load_exchange_result(const struct load_exchange *x, struct load_exchange_result *ret_result);

/* The rule of "auto". `distinct` bytes are wanted by several ranks; they are `wanted` bytes if each is counted for
 * every rank that wants it. The store gives `store` bytes a second to all readers together; one of the `ranks` reads
 * `reader` bytes a second; `link` bytes a second are passed on; `setup` seconds come before.
 *
 * Ranks share if wanted / store > GAIN * (setup + distinct / min(store, ranks * reader) + distinct / link).
 *
 * The first design took the larger of the last two, as if reading and passing on ran at the same time. On few cores
 * both need the same processors: the larger one was 0.22 s where the load took 0.42 s. So they are added, which is
 * never too small. A probe is short, and a tie is no reason to make ranks wait for each other, so a quarter has to be
 * gained. Without that, ties over a page cache were decided wrongly (expected were 0.158 s alone and 0.151 s shared,
 * measured 0.085 s and 0.27 s). */
#define LOAD_EXCHANGE_GAIN 1.25
struct load_exchange_measured { double distinct, wanted, store, reader, link, setup; uint32_t ranks; };
struct load_exchange_times { double alone, shared; }; /* seconds that are expected */
bool load_exchange_pays(const struct load_exchange_measured *m, struct load_exchange_times *ret_times);

#endif
