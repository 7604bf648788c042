/* SPDX-License-Identifier: Apache-2.0
 *
 * harden: what each of the two processes of a mount gives up. The keeper, which reads nothing of the store, does what
 * takes a privilege after the start (unmounting); the server gives up everything before it opens the store. */
#ifndef FS_HARDEN_H
#define FS_HARDEN_H

#include "fs/mount.h"

/* For the server, while it has one thread: gives up core dumps, capabilities, new privileges, files outside the store,
 * the network, and system calls that a reader of files never makes. .vckpt/stats says what the kernel cannot take away.
 */
void fs_harden(struct fs_mount *m);
/* For the keeper, once it has mounted: root keeps only the capabilities that unmounting needs. */
void fs_harden_keeper(void);

#endif
