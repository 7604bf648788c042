/* SPDX-License-Identifier: Apache-2.0
 *
 * harden: what each of the two processes of a mount gives up. What needs a privilege after the start (unmounting) is
 * the keeper's, which reads nothing of the store; the process that serves gives up everything before it opens the
 * store. */
#ifndef FS_HARDEN_H
#define FS_HARDEN_H

#include "fs/mount.h"

/* The process that serves, while it has one thread: core dumps, capabilities, new privileges, files outside the store,
 * the network, and system calls that no reader of files makes. What the kernel does not allow to give up is kept, and
 * stands in .vckpt/stats. */
void fs_harden(struct fs_mount *m);
/* The keeper, once it has mounted: of root's capabilities those that unmounting needs stay. */
void fs_harden_keeper(void);

#endif
