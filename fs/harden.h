/* SPDX-License-Identifier: Apache-2.0
 *
 * harden: what the threads that answer requests give up before the first one. The main thread, which only waits for
 * signals and unmounts at the end, keeps what it has: umount(2) is forbidden under Landlock, and fusermount3 is a
 * setuid program. */
#ifndef FS_HARDEN_H
#define FS_HARDEN_H

#include "fs/mount.h"

void fs_harden_process(struct fs_mount *m);  /* no core dumps; once, by the main thread */
/* the calling thread and all that it starts: privileges, capabilities, Landlock, seccomp */
void fs_harden_thread(struct fs_mount *m);

#endif
