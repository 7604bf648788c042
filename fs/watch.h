/* SPDX-License-Identifier: Apache-2.0
 *
 * watch: the thread that keeps the lists of runs fresh and tells the kernel what to forget. Only this thread notifies
 * the kernel: a handler that did so could wait for itself. */
#ifndef FS_WATCH_H
#define FS_WATCH_H

#include "fs/mount.h"

struct fs_watch;
int fs_watch_start(struct fs_mount *m, struct fs_watch **ret_w); /* before requests are answered */
/* Asks it to end; true when it did within the time. Call again, with a longer one, after unmounting: it may be
 * waiting in the kernel. */
bool fs_watch_stop(struct fs_watch *w, unsigned timeout_ms);
void fs_watch_free(struct fs_watch *w);                          /* ended; NULL-safe */

#endif
