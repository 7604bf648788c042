/* SPDX-License-Identifier: Apache-2.0
 *
 * broker: what the keeper does for the server, which lacks the privilege, while the mount is served. Given a sealed
 * memfd, and nothing else, the keeper makes a backing file of it, which the kernel then reads instead of asking the
 * server. It never looks at the bytes. They talk over a SOCK_SEQPACKET pair, one request and its answer at a time. */
#ifndef FS_BROKER_H
#define FS_BROKER_H

#include <stdbool.h>
#include <stdint.h>

/* ---- of the keeper ---- */

/* Answers one waiting request. false: close the channel, because the server closed its end or asked for something that
 * ours never asks for. */
bool fs_broker_serve(int channel);

/* ---- of the server, any thread ---- */

struct fs_broker;
struct fs_broker *fs_broker_new(int channel); /* takes it over; NULL: no memory, the channel stays open */
void fs_broker_free(struct fs_broker *b);     /* NULL-safe */
/* Makes a backing file for the connection `fuse_fd`. Returns its id, above 0, or a negative errno (-EPERM: the keeper
 * has no privileges, or the kernel did not agree to passthrough). The memfd may be closed afterwards. */
int fs_broker_open(struct fs_broker *b, int fuse_fd, int memfd);
/* Does not wait. After 0 the id is invalid; its memory is freed with its last reader. */
int fs_broker_close(struct fs_broker *b, int fuse_fd, int id);
bool fs_broker_works(const struct fs_broker *b); /* false: an answer did not come; the keeper is not asked again */
uint64_t fs_broker_memory(struct fs_broker *b); /* bytes that could be allocated now; 0: unknown */

#endif
