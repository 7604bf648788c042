/* SPDX-License-Identifier: Apache-2.0
 *
 * export: shared by writing a step and comparing it with the files that are there. One thread. */
#ifndef TOOLS_VCKPT_EXPORT_EXPORT_H
#define TOOLS_VCKPT_EXPORT_EXPORT_H

#include <sys/stat.h>

#include "core/view/tree.h"
#include "tools/vckpt/tool.h"

/* The file under way, at the top of the directory; it gets its own name when it is whole. */
#define EXPORT_TEMPORARY ".vckpt-export.incomplete"

struct export_others; /* files in the directory that are not the step's */

struct export {
	struct tool *t;
	unsigned show; /* of the step's tensors: enum view_show */
	bool replace;
	const char *component; /* NULL: all of the step */
	struct view_tree *tree;
	struct load_cache *cache;
	struct tool_progress progress;
	char *dir;       /* where files go: DEST.incomplete, or DEST where something is there */
	bool in_place;   /* it is DEST */
	bool made;       /* it was made by this export */
	bool replaces;   /* an empty DEST was there, which `was` describes; it is put back if the export fails */
	struct stat was;
	bool *kept;      /* by node: the file is there, whole */
	struct export_others *others;
	uint64_t done, total, files, nkept;
	struct base_error err;
};

/* Calls f for each file of the export, with its path under e->dir; ends at the first that is not 0. */
int export_each(struct export *e, int (*f)(struct export *e, uint32_t node, const char *path));
void export_advance(struct export *e, size_t len); /* of the progress bar */
void export_say(struct export *e, const char *what, const char *path); /* with -v */

/* Compares the files in e->dir with the step: sets `kept`, and removes the file under way. -EEXIST, with the sentence:
 * there are other files; with `replace` that is no error. */
int export_compare(struct export *e);

#endif
