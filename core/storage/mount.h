/* SPDX-License-Identifier: Apache-2.0
 *
 * mount: where a file system is mounted, for messages. Pure look-ups; any thread; blocks. */
#ifndef CORE_STORAGE_MOUNT_H
#define CORE_STORAGE_MOUNT_H

#include <stddef.h>

/* Of a full path without links: the directory that its file system is mounted on. -errno: it cannot be looked at;
 * -ENAMETOOLONG: it does not fit. */
int storage_posix_mount(const char *path, char *ret_mount, size_t size);

#endif
