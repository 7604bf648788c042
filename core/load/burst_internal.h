/* SPDX-License-Identifier: Apache-2.0
 *
 * burst: objects that follow each other in a pack, read at once.
 *
 *   begin -> add, add, ... -> read -> take, take, ...
 *
 * A disk gives more for one request of a megabyte than for eight of an eighth, and so does the page cache. So one read
 * takes the stored bytes of neighbouring objects: those of raw objects that have a place go straight there, all others
 * into the thread's memory. Their checks, which follow each other at the end of the extent, are a second read.
 *
 * A fill that reads past the page cache takes longer bursts, of one object too, and all bytes go to the thread's memory
 * first: a disk writes only to aligned memory, and what was just checked is copied out of the processor's cache.
 *
 * A burst only makes things faster: whatever does not fit, and any object that fails, is left to the caller, who reads
 * it by itself and finds the words. */
#ifndef CORE_LOAD_BURST_INTERNAL_H
#define CORE_LOAD_BURST_INTERNAL_H

#include <sys/uio.h>

#include "core/load/fill_internal.h"

#define BURST_PIECES 64u

struct burst_piece { const struct store_object_ref *ref; uint8_t *place; };
struct burst {
	struct fill_worker *w;
	struct burst_piece piece[BURST_PIECES];
	unsigned n;
	uint64_t from, to;               /* bytes of the pack */
	uint64_t most;                   /* so long it may become */
	uint8_t *bytes;                  /* where byte `from` lies; raw objects that have a place may be only there */
	bool past;                       /* all of it lies at `bytes` */
	uint64_t checks_from, checks_to;
	struct iovec iov[2 * BURST_PIECES];
	unsigned niov;
};

/* Opens the pack of that number as w->pack. False: the pack cannot be opened, or whole objects are to be hashed. */
bool burst_begin(struct burst *s, struct fill_worker *w, uint32_t pack);
/* May this whole object come next? */
bool burst_fits(const struct burst *s, const struct store_object_ref *ref);
/* One that fits; the reference is kept. place: where its raw bytes are to lie, or NULL: anywhere. */
void burst_add(struct burst *s, const struct store_object_ref *ref, uint8_t *place);
/* False: it is not worth while, or failed. */
bool burst_read(struct burst *s);
/* Checks object i, and decodes it where it is encoded. Returns its raw bytes: at its place, if it has one, else valid
 * until the worker's next read. NULL: it failed. */
const uint8_t *burst_take(struct burst *s, unsigned i);

#endif
