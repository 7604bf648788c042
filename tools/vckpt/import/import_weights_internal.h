/* SPDX-License-Identifier: Apache-2.0
 *
 * What import_weights.c (which files belong together) and import_weights_names.c (which component each set is)
 * share. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_WEIGHTS_INTERNAL_H
#define TOOLS_VCKPT_IMPORT_IMPORT_WEIGHTS_INTERNAL_H

#include <jansson.h>

#include "tools/vckpt/import/import_weights.h"

#define SUFFIX ".safetensors"

enum set_kind { SET_FILE, SET_INDEX, SET_PARTS }; /* in the order in which readers prefer them */

struct set {
	enum set_kind kind;
	char *dir, *stem;   /* folder, from the root, and name without number and end */
	const struct import_found *first, *index;
	char component[PROTO_COMPONENT_MAX + 1];
};

/* The set of an index has the files that no index before it names; all that it names are compared with it. */
struct index {
	const struct import_found *file;
	char *dir, *stem;
	json_t *weights; /* its weight_map */
};

struct import_weights {
	struct import_plan *plan;
	const char *root, *component;
	struct import_found *found;
	size_t nfound;
	struct set *sets;
	uint32_t nsets;
	struct index *indices;
	uint32_t nindices;
	struct folder *folders;
	uint32_t nfolders;
	json_t *by_rel;     /* number of a found file */
	json_t *by_key;     /* number of a set + 1, by what its parts have in common */
	json_t *by_stem, *by_folder, *taken; /* number of a set, of a folder; names of components */
};

struct import_found *import_weights_find(const struct import_weights *w, const char *rel);
/* Each set gets its component; files of folders that hold data lose their set. */
int import_weights_name(struct import_weights *w, struct base_error *err);

#endif
