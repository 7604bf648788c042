/* SPDX-License-Identifier: Apache-2.0
 *
 * mountpoint: may the store be mounted there? Looks at directories and at /proc/self/mountinfo; changes nothing but
 * a mount that a dead vckpt daemon left behind, which it detaches. And the end of a mount, for vckpt umount. Before
 * threads; may block on a dead network filesystem. */
#ifndef FS_MOUNTPOINT_H
#define FS_MOUNTPOINT_H

#include "fs/options.h"

/* Makes o->store and o->mountpoint absolute and free of links, and refuses (with a sentence): a store or mount
 * point that is no directory, one inside the other (also through bind mounts), a mount point on which something is
 * mounted already (autofs does not count). Where a dead vckpt daemon left its mount, o->takes_over says so, and nothing
 * else is looked at there. */
int fs_mountpoint_check(struct fs_options *o, struct base_error *err);
/* Detaches what the dead daemon left, and then looks at what could not be seen below it. Only once the store is open:
 * until then nobody is to find the empty directory. */
int fs_mountpoint_take_over(const struct fs_options *o, struct base_error *err);

/* Ends the vckpt mount on `path`, as root by umount(2), else by fusermount3; refuses what is not one. lazy: it vanishes
 * at once, and ends when nobody uses it any more. *ret_point: the mount point without links, malloc'ed, also where it
 * could not be unmounted (-EBUSY: in use; -EPERM: fusermount3 does not say why); else NULL. */
int fs_mountpoint_unmount(const char *path, bool lazy, char **ret_point, struct base_error *err);

/* The device ("MAJ:MIN") of what is mounted on `path`, absolute and without links; it sends no request to a daemon. 1
 * found, 0 nothing is mounted there. */
int fs_mountpoint_device(const char *path, char ret_device[static 32], struct base_error *err);
/* Detaches the vckpt mount `device` from `path`, or from where it was moved: it vanishes at once, and ends when nobody
 * uses it any more. 0, too, if it is nowhere. -EBUSY: another mount lies above it. */
int fs_mountpoint_release(const char *path, const char *device, struct base_error *err);

/* A sentence that says why this user cannot unmount here and what to do, or NULL: fusermount3, which does it for all
 * but root, needs /etc/mtab, and small containers have none. Static storage; blocks no longer than access(2). */
const char *fs_mountpoint_stuck(void);

#endif
