/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange: ranks that fill at the same time read each stored byte once, and pass it on (docs/load.md, "Exchange"). */
#ifndef CORE_LOAD_EXCHANGE_EXCHANGE_H
#define CORE_LOAD_EXCHANGE_EXCHANGE_H

#include "core/comm/comm.h"
#include "core/load/fill/fill.h"

enum load_exchange_mode { LOAD_EXCHANGE_AUTO, LOAD_EXCHANGE_NEVER, LOAD_EXCHANGE_ALWAYS };

/* In place of load_fill_run: the fill is one of those of all ranks of the communicator. Both are the caller's, and stay
 * until the exchange is freed. NULL: out of memory. */
struct load_exchange;
struct load_exchange *load_exchange_new(struct load_fill *f, struct comm *comm, enum load_exchange_mode mode);
void load_exchange_free(struct load_exchange *x); /* NULL-safe */
/* Fills, once. All ranks fill from the same step with the same flags and mode; else all fail. It returns success when
 * all ranks have succeeded; an error of one is the error of all. */
int load_exchange_run(struct load_exchange *x, struct base_error *err);

/* After run. Raw bytes. */
struct load_exchange_result {
	enum load_exchange_mode chosen;  /* NEVER or ALWAYS; AUTO: nothing was decided */
	uint32_t ranks;
	uint64_t sent, got;              /* buckets that this rank owned, and those that it wanted */
	uint64_t shared, wanted;         /* of all ranks: bytes that several want, once; as often as they are wanted */
	const char *why;                 /* a sentence; the exchange's */
};
void load_exchange_result(const struct load_exchange *x, struct load_exchange_result *ret_result);

/* The rule of "auto". Times and rates of any one unit: `distinct` bytes are wanted by several ranks, `wanted` bytes if
 * each is counted for every rank that wants it (r * S). The store gives `store` bytes a second to all readers together;
 * one of the `ranks` reads `reader` bytes a second; `link` are passed on; `setup` seconds go before.
 *
 * Shared is: wanted / store > GAIN * (setup + distinct / min(store, ranks * reader) + distinct / link).
 *
 * The first design took the larger of the last two, as if reading and passing on ran side by side. On few cores both
 * take the same processors: measured so, max() expected 0.22 s where 0.42 s was true. So they are added, which is never
 * too small. A probe is short, and a tie is no reason to make ranks wait for each other: so a quarter has to be gained.
 * Over a page cache ties were decided wrongly without it (0.158 s expected alone and 0.151 shared; true were 0.085 and
 * 0.27). */
#define LOAD_EXCHANGE_GAIN 1.25
struct load_exchange_measured { double distinct, wanted, store, reader, link, setup; uint32_t ranks; };
struct load_exchange_times { double alone, shared; }; /* seconds that are expected */
bool load_exchange_pays(const struct load_exchange_measured *m, struct load_exchange_times *ret_times);

#endif
