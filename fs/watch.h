/* SPDX-License-Identifier: Apache-2.0
 *
 * watch: the thread that keeps the lists of runs fresh and notifies the kernel of what to forget. Only this thread
 * does: a handler that notified the kernel could wait for itself. */
#ifndef FS_WATCH_H
#define FS_WATCH_H

#include "fs/mount.h"

struct fs_watch;
int fs_watch_start(struct fs_mount *m, struct fs_watch **ret_w); /* before requests are answered */
/* Asks it to end; true: it did within the time. It may be waiting in the kernel: then call this again, with a longer
 * time, after unmounting. */
bool fs_watch_stop(struct fs_watch *w, unsigned timeout_ms);
void fs_watch_free(struct fs_watch *w);                          /* ended; NULL-safe */

#endif
