/* SPDX-License-Identifier: Apache-2.0
 *
 * import_numbered: files that are numbered parts of one: NAME-00002-of-00006.safetensors. Any thread. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_NUMBERED_H
#define TOOLS_VCKPT_IMPORT_IMPORT_NUMBERED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

/* Of NAME-00002-of-00006TAIL. */
struct import_numbered { int name_len, digits; uint32_t number, total; const char *tail; };
bool import_numbered_parse(const char *name, struct import_numbered *ret);

/* If one part is among the paths, all are, or an error names the first that is missing. */
int import_numbered_check(const char *const *paths, size_t n, struct base_error *err);

const char *import_base_of(const char *path); /* what is behind its last slash */

#endif
