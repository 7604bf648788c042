/* SPDX-License-Identifier: Apache-2.0
 *
 * import_dcp: what import_dcp.c (the checkpoint), import_dcp_names.c (components and names of its keys) and
 * import_dcp_tree.c (the documents of the step) share. Names and documents are those of the Python package
 * (tools/python/vckpt/dcp_state.py, docs/format/values.md), so that vckpt.load and vckpt.dcp.StorageReader read the
 * step. One thread. */
#ifndef TOOLS_VCKPT_IMPORT_DCP_H
#define TOOLS_VCKPT_IMPORT_DCP_H

#include "core/foreign/dcp.h"
#include "tools/vckpt/import.h"

struct import_place {
	char component[PROTO_COMPONENT_MAX + 1];
	char *name;
	bool nested; /* the component is the first part of the key's path, the name the other parts */
};

struct import_dcp {
	struct import_plan *plan;
	const char *directory;
	struct import_file *file;       /* .metadata */
	struct foreign_dcp metadata;
	struct import_place *places;    /* of each entry */
	json_t *files;                  /* {relative path: number in the plan} */
	json_t *trees;                  /* {component: tree} */
	struct base_error *err;
};

int import_dcp_names(struct import_dcp *d);

/* A key's leaf of its component's tree; takes `leaf` in any case. */
int import_dcp_leaf(struct import_dcp *d, size_t entry, json_t *leaf);
/* .dcp/metadata.json, and a document for each component's tree. */
int import_dcp_documents(struct import_dcp *d);

#endif
