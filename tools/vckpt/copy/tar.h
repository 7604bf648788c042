/* SPDX-License-Identifier: Apache-2.0
 *
 * tar: a store's files as one stream, a POSIX tar, and back. What comes in is a
 * stranger's: regular files alone, under names that a store's files can have, each once. One thread. */
#ifndef TOOLS_VCKPT_COPY_TAR_H
#define TOOLS_VCKPT_COPY_TAR_H

#include "core/base/error.h"

/* Writes all regular files below `root`, vckpt.store first, then by name. `name`: of the stream, for sentences. */
int tar_write(const char *root, int fd, const char *name, struct base_error *err);
/* Makes these files below the empty directory `root`, which no one else can enter. Both: -EINTR (tool_interrupted). */
int tar_read(int fd, const char *name, const char *root, struct base_error *err);

/* A directory of this user alone below `parent` (NULL: $TMPDIR, else /var/tmp), to be freed; and its end. */
int tar_room(const char *parent, char **ret_path, struct base_error *err);
void tar_room_remove(char *path); /* NULL-safe; frees it */

#endif
