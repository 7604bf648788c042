/* SPDX-License-Identifier: Apache-2.0
 *
 * session: the connection to the kernel: mounting, INIT, the first look, readahead. */
#ifndef FS_SESSION_H
#define FS_SESSION_H

#include "fs/mount.h"

int fs_session_open(struct fs_mount *m, struct base_error *err); /* mounts; m->session is set */
/* unmounts (lazily if busy) and frees; the loop has ended */
void fs_session_close(struct fs_mount *m);
/* answers requests until it is unmounted or asked to exit */
int fs_session_loop(struct fs_mount *m);
/* Looks at the mount point as any program does, and so waits until the kernel has the answer to INIT; then raises the
 * readahead. Do not call it from a handler's thread. */
int fs_session_prove(struct fs_mount *m, struct base_error *err);

#endif
