/* SPDX-License-Identifier: Apache-2.0
 *
 * mountpoint: checks whether the store may be mounted on a directory, and unmounts (for vckpt umount, too). It looks at
 * directories and at /proc/self/mountinfo; all that a check may change is a mount that a dead vckpt daemon left behind,
 * which it detaches. For processes with one thread; may block on a dead network filesystem. */
#ifndef FS_MOUNTPOINT_H
#define FS_MOUNTPOINT_H

#include "fs/options.h"

/* Makes o->store and o->mountpoint absolute and free of links. Refuses, with a sentence, a store or mount point that is
 * not a directory, one inside the other (also through bind mounts), and a mount point on which something is mounted
 * already (other than autofs). If a dead vckpt daemon left its mount there, sets o->takes_over and checks nothing else.
 */
int fs_mountpoint_check(struct fs_options *o, struct base_error *err);
/* Detaches the dead daemon's mount, and then makes the checks that it prevented. Call it only once the store is open:
 * until then programs should not find the empty directory. */
int fs_mountpoint_take_over(const struct fs_options *o, struct base_error *err);

/* Unmounts the vckpt mount on `path`, as root by umount(2), else by fusermount3; refuses other mounts. lazy: it
 * vanishes at once, and ends after its last use. *ret_point: the mount point without links, malloc'ed, also if it could
 * not be unmounted (-EBUSY: in use; -EPERM: fusermount3 does not say why); else NULL. */
int fs_mountpoint_unmount(const char *path, bool lazy, char **ret_point, struct base_error *err);

/* The device ("MAJ:MIN") of what is mounted on `path`, which is absolute and without links. It sends no request to a
 * daemon. Returns 1, or 0: nothing is mounted there. */
int fs_mountpoint_device(const char *path, char ret_device[static 32], struct base_error *err);
/* Detaches the vckpt mount `device` from `path`, or from where it was moved: it vanishes at once, and ends after its
 * last use. Returns 0 also if it is nowhere. -EBUSY: another mount is on top of it. */
int fs_mountpoint_release(const char *path, const char *device, struct base_error *err);

/* A sentence that says why this user cannot unmount here and what to do, or NULL. fusermount3, which unmounts for all
 * users but root, needs /etc/mtab, and small containers have none. Static storage; blocks no longer than access(2). */
const char *fs_mountpoint_stuck(void);

#endif
