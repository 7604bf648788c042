/* SPDX-License-Identifier: Apache-2.0
 *
 * name: true names as file names, one rule for mount, export and import (docs/format/names.md).
 * `/`, `%`, bytes below 0x20, 0x7f and a leading `.` (but in a path) are written %XX (upper-case hex). If that plus the
 * suffix exceeds 255 bytes, it is shortened to its first 180 bytes (never cutting a character or a %XX), `%~`, and the
 * first 32 hex digits of SHA-256 of the true name. Pure functions, any thread. */
#ifndef CORE_VIEW_NAME_H
#define CORE_VIEW_NAME_H

#include <stdbool.h>
#include <stddef.h>

#define VIEW_FILE_NAME_BYTES 256 /* NUL included */
#define VIEW_NAME_OWN ".vckpt"   /* names that begin so are vckpt's own: no file of a step has one */

/* suffix: ".npy" or "". */
void view_name_escape(const char *name, size_t len, const char *suffix, char file[static VIEW_FILE_NAME_BYTES]);
/* A name that git uses: it would run what a stranger's step has there. */
#define VIEW_NAME_GIT ".git"
/* The same for an element of a path: it keeps a leading `.`, unless it is `.`, `..` or VIEW_NAME_GIT in any case, or
 * begins with VIEW_NAME_OWN. */
void view_name_escape_element(const char *name, size_t len, char file[static VIEW_FILE_NAME_BYTES]);
/* The true name of what either of the two made. -ENAMETOOLONG: it was shortened (`%~`: compare names to look it up);
 * -EINVAL: neither makes such a name. *ret_name: malloc'ed, with NUL. */
int view_name_unescape(const char *file, size_t len, char **ret_name, size_t *ret_len);

#endif
