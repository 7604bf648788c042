/* SPDX-License-Identifier: Apache-2.0
 *
 * broker: what the server may not do by itself and the keeper does for it while the mount is served. The keeper looks
 * at no bytes that it is handed: it makes a backing file, which the kernel then reads instead of asking the server, of
 * a memfd that is sealed, and of nothing else. They talk over a SOCK_SEQPACKET pair: a request, its answer. */
#ifndef FS_BROKER_H
#define FS_BROKER_H

#include <stdbool.h>
#include <stdint.h>

/* ---- of the keeper ---- */

/* Answers one request that waits there. false: the server's end is closed, or it asked for what no server of ours asks
 * for: close the channel. */
bool fs_broker_serve(int channel);

/* ---- of the server, any thread ---- */

struct fs_broker;
struct fs_broker *fs_broker_new(int channel); /* takes it over; NULL: no memory, the channel stays open */
void fs_broker_free(struct fs_broker *b);     /* NULL-safe */
/* A backing file of the connection `fuse_fd`: its id, above 0, or a negative errno (-EPERM: the keeper has no
 * privileges, or the kernel did not agree to passthrough). The memfd may be closed then. */
int fs_broker_open(struct fs_broker *b, int fuse_fd, int memfd);
/* Waits for nothing. After 0 the id is no more; its memory goes with its last reader. */
int fs_broker_close(struct fs_broker *b, int fuse_fd, int id);
bool fs_broker_works(const struct fs_broker *b); /* false: an answer did not come; nothing more will be asked */
uint64_t fs_broker_memory(struct fs_broker *b); /* bytes that could be allocated now; 0: it is not known */

#endif
