/* SPDX-License-Identifier: Apache-2.0
 *
 * daemon: the life of a mount, from the fork to the end. */
#ifndef FS_DAEMON_H
#define FS_DAEMON_H

#include "fs/options.h"

/* Mounts and serves. In the foreground it returns when the mount has ended. Otherwise it forks, and returns in the
 * parent when the mount answers or has failed, which it reports on standard error. Returns the exit status. */
int fs_daemon_run(const struct fs_options *o);

#endif
