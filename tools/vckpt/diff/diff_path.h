/* SPDX-License-Identifier: Apache-2.0
 *
 * diff_path: a file or directory, as vckpt import would take it in, as a side of a difference. One thread; its reads
 * come from several. */
#ifndef TOOLS_VCKPT_DIFF_DIFF_PATH_H
#define TOOLS_VCKPT_DIFF_DIFF_PATH_H

#include "core/diff/diff.h"

struct diff_path;
/* component: of tensors for which the path names none; NULL: import's choice. Reads headers, and blobs. */
int diff_path_open(const char *path, const char *component, struct diff_path **ret_p, struct base_error *err);
void diff_path_close(struct diff_path *p); /* NULL-safe */
const struct diff_other *diff_path_side(const struct diff_path *p);

#endif
