/* SPDX-License-Identifier: Apache-2.0
 *
 * serve: the server, the process that opens the store and answers requests. It gives up its privileges before it reads
 * anything of the store, and gets from the keeper (fs/daemon.c) what it may not open by itself: the connection to the
 * kernel and the mount's readahead. They talk over a channel, a SOCK_SEQPACKET pair: reports go to the keeper, and one
 * fs_handed comes from it. Later requests to the keeper go over another pair (fs/broker.h). */
#ifndef FS_SERVE_H
#define FS_SERVE_H

#include "fs/options.h"

/* There are two reports of status 0: the store is open; the mount has answered. FS_SERVE_UNMOUNT: the server is about
 * to end while it is still mounted. A report with another status is the last one. */
#define FS_SERVE_UNMOUNT (-1)
struct fs_report { int32_t status; char text[1000]; };

/* Comes with the descriptors of /dev/fuse and, if readahead_error is 0, of the readahead in /sys. */
struct fs_handed { int32_t readahead_error; };

/* Serves until SIGTERM, or the end of the mount or of the keeper. Called with one thread; returns the exit status of
 * the process (FS_EXIT_*). */
int fs_serve(const struct fs_options *o, int channel, int broker);

#endif
