/* SPDX-License-Identifier: Apache-2.0
 *
 * scratch: buffers in which reads gather their bytes. What was used last is taken first, whichever thread asks: the
 * kernel wakes the threads in turn, and a buffer for each of them would be a cold one every time. They begin at a page,
 * so that the kernel fills a page of its own from one page. Any thread. */
#ifndef FS_SCRATCH_H
#define FS_SCRATCH_H

#include <pthread.h>
#include <stddef.h>

struct fs_scratch { pthread_mutex_t lock; void *idle; };
void fs_scratch_init(struct fs_scratch *s);
void fs_scratch_release(struct fs_scratch *s); /* once all are back */
/* Room for len bytes; what is in it is anything. NULL: no memory. */
void *fs_scratch_take(struct fs_scratch *s, size_t len);
void fs_scratch_give(struct fs_scratch *s, void *bytes, size_t len); /* len as it was taken; NULL-safe */
void fs_scratch_shrink(struct fs_scratch *s); /* frees those that nobody has */

#endif
