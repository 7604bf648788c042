/* SPDX-License-Identifier: Apache-2.0
 *
 * backing: whole files in memory, assembled and checked once, which the kernel then reads by itself (passthrough):
 * reads and page faults on such a file never reach the server, and go on working after it dies.
 *
 * The kernel decides at open: either all descriptors of a file are passed through, or none is. So a file is first read
 * through the server. When it is opened again after half of it was read, it is worth its memory: a small file is
 * assembled at once, a large one by a thread after its last close, for later opens. When a loader reads a large
 * .safetensors (fs/loader.h), the file is assembled while it reads, and reads are answered from what is there already.
 * Any thread. */
#ifndef FS_BACKING_H
#define FS_BACKING_H

#include "fs/options.h"

struct fs_backing;
struct fs_backings;
struct fs_broker;
struct fs_commit;
struct fs_handle;
struct fs_mount;

/* All files together have at most max_bytes. NULL: no memory. */
struct fs_backings *fs_backings_new(struct fs_mount *m, enum fs_tier tier, uint64_t max_bytes);
void fs_backings_free(struct fs_backings *all); /* no handle is left; NULL-safe */
/* Tries to make a backing file through the keeper, records the result as a feature, and starts the thread. Call it once
 * the kernel has the answer to INIT. broker: taken over; NULL: there is none. */
void fs_backings_start(struct fs_backings *all, struct fs_broker *broker);
/* Ends the thread. false: it did not end within 2 s; nothing that it uses may be freed. */
bool fs_backings_stop(struct fs_backings *all);

/* A file is opened; h->file is open. Counts the open until fs_backing_closed and sets h->backing. Returns the id of the
 * backing file for the reply; 0: the server serves it; or a negative errno. With FS_TIER_PASSTHROUGH it assembles the
 * file first, or waits for the thread that does. */
int fs_backing_open(struct fs_backings *all, uint64_t node, struct fs_handle *h);
/* The kernel has released it. */
void fs_backing_release(struct fs_backings *all, struct fs_handle *h);
void fs_backing_closed(struct fs_backings *all, struct fs_handle *h);
/* Bytes [offset, offset + len), which are inside the file, if the memory has them: the server also serves descriptors
 * of files that are being assembled. They stay until fs_backing_looked. NULL: it does not have them. A long read waits
 * briefly for bytes that are about to be there. */
const void *fs_backing_look(struct fs_backings *all, struct fs_handle *h, uint64_t offset, size_t len);
void fs_backing_looked(struct fs_backings *all, struct fs_handle *h, size_t len);
/* The server has answered a read of these bytes. */
void fs_backing_served(struct fs_backings *all, struct fs_handle *h, uint64_t offset, uint64_t len);
bool fs_backing_ready(struct fs_backings *all, uint64_t node); /* the next open may be passed through */

/* Memory is short: drops all files that are not open, and assembles none for a while. */
void fs_backings_give_back(struct fs_backings *all);

/* The commit's step is gone: drops each of its files after the last close, and assembles no more of them. */
void fs_backings_gone(struct fs_backings *all, const struct fs_commit *commit);

struct fs_backings_stats {
	uint64_t files, bytes, max_bytes;       /* in memory now */
	uint64_t reserve_bytes;                 /* at hand for the next file */
	uint64_t assembled, assembled_bytes, assembled_ns, failed, refused, dropped;
	uint64_t early, given_up;               /* begun for a loader; ended as it closed before half was read */
	uint64_t pages_dropped;                 /* files whose pages the kernel was asked to drop */
	uint64_t open_cached, open_passthrough; /* descriptors now */
	uint64_t opens_passthrough;
	uint64_t read_bytes;                    /* that the server has read from files in memory */
};
void fs_backings_stat(struct fs_backings *all, struct fs_backings_stats *ret_s);

#endif
