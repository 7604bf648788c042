/* SPDX-License-Identifier: Apache-2.0
 *
 * backing: files that stand whole in memory, assembled and checked once, so that the kernel reads them by itself
 * (passthrough): a read or a mapped page of theirs never reaches the server, and lives on when it dies.
 *
 * The kernel decides at open: all descriptors of a file are passed through, or none is. So a file is read through the
 * server first. Who opens it again when half of it was read shows that it is worth its memory: a small one is assembled
 * at once, a large one by a thread once no one has it open any more, for those who open it after that. A loader of a
 * large .safetensors (fs/loader.h) has it assembled while it reads, out of what is there already. Any thread. */
#ifndef FS_BACKING_H
#define FS_BACKING_H

#include "fs/options.h"

struct fs_backing;
struct fs_backings;
struct fs_broker;
struct fs_commit;
struct fs_handle;
struct fs_mount;

/* Bytes of max_bytes at most. NULL: no memory. */
struct fs_backings *fs_backings_new(struct fs_mount *m, enum fs_tier tier, uint64_t max_bytes);
void fs_backings_free(struct fs_backings *all); /* no handle is left; NULL-safe */
/* Tries whether the kernel and the keeper make backing files, says so in the features, and starts the thread. Once the
 * kernel has the answer to INIT. broker: taken over; NULL: there is none. */
void fs_backings_start(struct fs_backings *all, struct fs_broker *broker);
/* Ends the thread. false: it is not done within 2 s, and uses what it uses. */
bool fs_backings_stop(struct fs_backings *all);

/* The open of a file, whose h->file is open: counts it until fs_backing_closed and sets h->backing. Returns the id of
 * the backing file to reply with, 0: the server serves it, or a negative errno. With FS_TIER_PASSTHROUGH it assembles
 * the file, or waits until that is done. */
int fs_backing_open(struct fs_backings *all, uint64_t node, struct fs_handle *h);
/* The kernel has released it. */
void fs_backing_release(struct fs_backings *all, struct fs_handle *h);
void fs_backing_closed(struct fs_backings *all, struct fs_handle *h);
/* Bytes [offset, offset + len), inside the file, to `to`, if it stands in memory so far: a descriptor that the server
 * serves may come while the file is assembled. false: they are not there, and anything may be in `to`. A long read
 * waits a moment for what is on its way. */
bool fs_backing_read(struct fs_backings *all, struct fs_handle *h, uint64_t offset, size_t len, void *to);
/* These bytes of it were read through the server. */
void fs_backing_served(struct fs_backings *all, struct fs_handle *h, uint64_t offset, uint64_t len);
bool fs_backing_ready(struct fs_backings *all, uint64_t node); /* the next open may be passed through */

/* Memory is short: drops all files that nobody has open, and assembles none for a while. */
void fs_backings_give_back(struct fs_backings *all);

/* The commit's step is gone: drops its files, each once no one has it open, and assembles none any more. */
void fs_backings_gone(struct fs_backings *all, const struct fs_commit *commit);

struct fs_backings_stats {
	uint64_t files, bytes, max_bytes;       /* that stand in memory now */
	uint64_t reserve_bytes;                 /* at hand for the next one */
	uint64_t assembled, assembled_bytes, assembled_ns, failed, refused, dropped;
	uint64_t early, given_up;               /* for a loader; and as it went before it had read half */
	uint64_t pages_dropped;                 /* files whose pages the kernel was asked to drop */
	uint64_t open_cached, open_passthrough; /* descriptors now */
	uint64_t opens_passthrough;
	uint64_t read_bytes;                    /* through the server, of files in memory */
};
void fs_backings_stat(struct fs_backings *all, struct fs_backings_stats *ret_s);

#endif
