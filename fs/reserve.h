/* SPDX-License-Identifier: Apache-2.0
 *
 * reserve: memory kept at hand for the next file that is assembled, since making huge pages takes longer than filling
 * them. The memory of a file that is dropped cannot be reused: it is sealed. Any thread. */
#ifndef FS_RESERVE_H
#define FS_RESERVE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct fs_reserve { pthread_mutex_t lock; int fd; _Atomic uint64_t bytes; }; /* lock: for fd, and to change bytes */
void fs_reserve_init(struct fs_reserve *v);
void fs_reserve_release(struct fs_reserve *v);

/* A memfd of that size, which has the reserve's memory: the reserve is then empty. Or a negative errno. */
int fs_reserve_memfd(struct fs_reserve *v, uint64_t size);
/* Takes some memory, up to `most` bytes in all. false: it has as much, or no more memory is available. */
bool fs_reserve_grow(struct fs_reserve *v, uint64_t most);
void fs_reserve_drop(struct fs_reserve *v);

#endif
