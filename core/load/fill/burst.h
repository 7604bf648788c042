/* SPDX-License-Identifier: Apache-2.0
 *
 * burst: stored blocks of objects of one pack, read with few requests.
 *
 *   begin -> add, add, ... -> read -> take, take, ...
 *
 * A run, which is what is added, is neighbouring blocks of an object: all of them, or some. Runs are added in the order
 * of the pack. The checks of all runs are one request, since those of an extent follow each other at its end. Runs with
 * a small gap between them are one request as well, and the checks with them if the stored lengths of encoded blocks
 * need not be known first. A gap is small if it costs less than a request (read_joins). Stored bytes of raw blocks that
 * have a place go straight there, all others into the thread's memory.
 *
 * A fill that reads past the page cache takes longer bursts of whole objects that follow each other, and all bytes go
 * to the thread's memory first: a disk writes only to aligned memory, and what was just checked is copied out of the
 * processor's cache.
 *
 * A burst only makes things faster: the caller reads by itself whatever does not fit, and any run that fails, and words
 * the error. */
#ifndef CORE_LOAD_FILL_BURST_H
#define CORE_LOAD_FILL_BURST_H

#include <sys/uio.h>

#include "core/load/fill/fill_work.h"

#define BURST_RUNS 256u

struct burst_run {
	const struct pack_object_ref *ref;
	uint64_t first, n;               /* blocks */
	uint8_t *place;                  /* where their raw bytes are to be, or NULL */
	uint64_t checks, checks_len;     /* offset in the pack */
	uint64_t from, len;              /* stored bytes, in the pack; of encoded blocks the checks say where */
	uint8_t *at;                     /* where these are, after read */
};
struct burst {
	struct fill_worker *w;
	struct burst_run run[BURST_RUNS];
	unsigned n;
	uint64_t bytes, most;            /* stored bytes of the runs, at most; so many there may be */
	bool past;                       /* whole objects that follow each other, past the page cache */
	bool parts;                      /* a whole object begins another burst, which may go past the page cache */
	bool encoded_parts;              /* the checks are read first */
	uint64_t checks_from, checks_to;
	uint64_t gaps;                   /* bytes that are not wanted and may still be read */
	struct iovec iov[2 * BURST_RUNS + 2];
	unsigned niov;
	uint64_t iov_from, iov_to;       /* bytes of the pack */
	unsigned hashed;                 /* with LOAD_FILL_REHASH: so many runs are taken and hashed */
	const uint8_t *good[BURST_RUNS]; /* where their bytes are; NULL: it failed */
};

/* Opens the pack of that number as w->pack. False: it cannot be opened. */
bool burst_begin(struct burst *s, struct fill_worker *w, uint32_t pack);
/* Adds blocks [first, first + n) of the object, if they may come next; with LOAD_FILL_REHASH only all of them. The
 * reference is kept. place: where their raw bytes are to be, or NULL: anywhere. */
bool burst_add(struct burst *s, const struct pack_object_ref *ref, uint64_t first, uint64_t n, uint8_t *place);
/* Takes away the runs from number n on, all of an object. */
void burst_cut(struct burst *s, unsigned n);
/* False: it failed, or there is nothing to read. */
bool burst_read(struct burst *s);
/* Checks run i, and decodes it where it is encoded; with LOAD_FILL_REHASH compares its SHA-256, too. Runs are taken in
 * order. to: where its raw bytes are to be (not with LOAD_FILL_REHASH), or NULL: at its place, if it has one, else
 * anywhere, valid until the next run is taken. Returns where they are; NULL: it failed. */
const uint8_t *burst_take(struct burst *s, unsigned i, uint8_t *to);

#endif
