/* SPDX-License-Identifier: Apache-2.0
 *
 * log: where the mount's log goes: a file (-o log=), standard error (foreground), syslog (daemon). */
#ifndef FS_LOG_H
#define FS_LOG_H

#include "fs/options.h"

int fs_log_open(const struct fs_options *o, struct base_error *err); /* opens the file; sets levels */
void fs_log_detach(const struct fs_options *o);                      /* in the daemon, after the fork */

#endif
