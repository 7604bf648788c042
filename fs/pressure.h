/* SPDX-License-Identifier: Apache-2.0
 *
 * pressure: the thread that gives memory back when the machine, or the control group of the mount, lacks it. The kernel
 * says so (PSI): until then the thread sleeps. */
#ifndef FS_PRESSURE_H
#define FS_PRESSURE_H

#include "fs/mount.h"

/* Opens what tells it, before privileges are given up; a feature says what there is. */
void fs_pressure_open(struct fs_mount *m);
void fs_pressure_start(struct fs_mount *m);
void fs_pressure_stop(struct fs_mount *m);  /* and closes; whatever was done before */

#endif
