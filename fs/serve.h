/* SPDX-License-Identifier: Apache-2.0
 *
 * serve: the process that opens the store and answers requests. It gives its privileges up before it looks at anything
 * of the store, and gets from the keeper (fs/daemon.c) what it may not open by itself: the connection to the kernel and
 * the mount's readahead. Both talk over a channel, a SOCK_SEQPACKET pair: reports to the keeper, one fs_handed from
 * it. What it asks for later goes over another pair (fs/broker.h). */
#ifndef FS_SERVE_H
#define FS_SERVE_H

#include "fs/options.h"

/* Two of status 0: the store is open; the mount has answered. FS_SERVE_UNMOUNT: the server is about to end, and the
 * mount is there still. Another status is the last report. */
#define FS_SERVE_UNMOUNT (-1)
struct fs_report { int32_t status; char text[1000]; };

/* With the descriptors of /dev/fuse and, where readahead_error is 0, of the readahead in /sys. */
struct fs_handed { int32_t readahead_error; };

/* Serves until SIGTERM, the end of the mount or of the keeper. The process has one thread and ends with what is
 * returned (enum FS_EXIT). */
int fs_serve(const struct fs_options *o, int channel, int broker);

#endif
