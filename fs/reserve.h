/* SPDX-License-Identifier: Apache-2.0
 *
 * reserve: memory that is at hand for the next file that is put together: to make huge pages takes longer than to fill
 * them. A file that goes cannot leave its own, since that is sealed. Any thread. */
#ifndef FS_RESERVE_H
#define FS_RESERVE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct fs_reserve { pthread_mutex_t lock; int fd; _Atomic uint64_t bytes; }; /* lock: of fd, and to change bytes */
void fs_reserve_init(struct fs_reserve *v);
void fs_reserve_release(struct fs_reserve *v);

/* A memfd of that size, with the reserve in it, which is empty then; or a negative errno. */
int fs_reserve_memfd(struct fs_reserve *v, uint64_t size);
/* Takes some memory, until there are `most` bytes. false: there are, or no memory is to be had. */
bool fs_reserve_grow(struct fs_reserve *v, uint64_t most);
void fs_reserve_drop(struct fs_reserve *v);

#endif
