/* SPDX-License-Identifier: Apache-2.0
 *
 * pressure: the thread that gives memory back when the machine or the mount's control group is short of it. It sleeps
 * until the kernel reports that (PSI). */
#ifndef FS_PRESSURE_H
#define FS_PRESSURE_H

#include "fs/mount.h"

/* Opens the kernel's files for it, before privileges are given up, and records the result as a feature. */
void fs_pressure_open(struct fs_mount *m);
void fs_pressure_start(struct fs_mount *m);
void fs_pressure_stop(struct fs_mount *m);  /* ends the thread if there is one, and closes the files */

#endif
