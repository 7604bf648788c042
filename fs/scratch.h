/* SPDX-License-Identifier: Apache-2.0
 *
 * scratch: buffers in which reads gather their bytes. The buffer that was used last is taken first, by any thread: the
 * kernel wakes threads in turn, and a buffer of each thread's own would be cold every time. Buffers are aligned to
 * pages, so that the kernel fills each of its pages from one page. Any thread. */
#ifndef FS_SCRATCH_H
#define FS_SCRATCH_H

#include <pthread.h>
#include <stddef.h>

struct fs_scratch { pthread_mutex_t lock; void *idle; };
void fs_scratch_init(struct fs_scratch *s);
void fs_scratch_release(struct fs_scratch *s); /* all buffers were given back */
/* A buffer for len bytes, not initialised. NULL: no memory. */
void *fs_scratch_take(struct fs_scratch *s, size_t len);
void fs_scratch_give(struct fs_scratch *s, void *bytes, size_t len); /* len as in fs_scratch_take; NULL-safe */
void fs_scratch_shrink(struct fs_scratch *s); /* frees idle buffers */

#endif
