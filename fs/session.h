/* SPDX-License-Identifier: Apache-2.0
 *
 * session: the connection to the kernel: mounting, INIT, the first stat, readahead. */
#ifndef FS_SESSION_H
#define FS_SESSION_H

#include "fs/mount.h"

/* ---- of the keeper, before it has threads ---- */

/* Mounts. *ret_fd: the connection to the kernel; when its last copy is closed, a dead mount is left behind. */
int fs_session_mount(const struct fs_options *o, int *ret_fd, struct base_error *err);
/* Opens the file by which root raises the readahead of a mount, device "MAJ:MIN". A descriptor, or a negative errno. */
int fs_session_open_readahead(const char *device);

/* ---- of the server ---- */

int fs_session_open(struct fs_mount *m, int fd, struct base_error *err); /* takes fd over; m->session is set */
void fs_session_close(struct fs_mount *m); /* the loop has ended */
/* answers requests until it is unmounted or asked to exit */
int fs_session_loop(struct fs_mount *m);
/* Stats the mount point as any program would, and so waits until the kernel has the answer to INIT. Never call it in a
 * handler's thread. */
int fs_session_prove(struct fs_mount *m, struct base_error *err);
/* After fs_session_prove, because the answer to INIT lowers the readahead. fd: from fs_session_open_readahead, or -1
 * and the error. */
void fs_session_raise_readahead(struct fs_mount *m, int fd, int error);

#endif
