/* SPDX-License-Identifier: Apache-2.0
 *
 * import_dcp: what import_dcp.c (the checkpoint), import_dcp_names.c (components and names of its keys) and
 * import_dcp_tree.c (the documents of the step) share. Names and documents are those of the Python package
 * (tools/python/vckpt/dcp_state.py, docs/format/values.md), so that vckpt.load and vckpt.dcp.StorageReader read the
 * step. One thread. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_DCP_H
#define TOOLS_VCKPT_IMPORT_IMPORT_DCP_H

#include "core/base/buf.h"
#include "core/foreign/dcp.h"
#include "core/foreign/tensor.h"
#include "tools/vckpt/import/import_shards.h"

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
	uint64_t file_bytes, item_bytes;        /* of the files; of the items in them, which do not overlap */
	uint64_t grown;                 /* bytes of tensors beyond those stored */
	unsigned values_left;           /* that may still be taken out of byte entries */
	size_t text_left;               /* bytes that they may still take in the documents */
	json_t *files;                  /* {relative path: number in the plan} */
	struct import_parts *parts; size_t nparts;      /* of files whose items are in safetensors */
	json_t *parts_at;               /* {"file@offset": number in parts} */
	json_t *taken;                  /* {"component/name": null} of tensors */
	json_t *trees;                  /* {component: tree} */
	struct base_error *err;
};

int import_dcp_names(struct import_dcp *d);

/* May an item of `stored` bytes become tensors of `bytes`? Strides of 0 repeat what is stored, and views share a
 * storage: a little of that is ordinary, much of it would make a step far larger than the files. */
bool import_dcp_grow(struct import_dcp *d, uint64_t bytes, uint64_t stored);

/* The component whose tree has a key's leaf. */
void import_dcp_component(const struct import_dcp *d, size_t entry, char component[static PROTO_COMPONENT_MAX + 1]);
/* A value as docs/format/values.md has it, with its tensors added to the plan. 1: it has no such form; the reason is
 * in `why`. */
int import_dcp_value(struct import_dcp *d, size_t entry, const struct import_range *range, json_t **ret_value,
	struct base_error *why);
/* A row-major tensor, or a strided one, that is a box of the tensor. */
int import_dcp_chunk(struct import_chunks *c, const struct tensor_box *box, struct import_file *file,
	const struct foreign_tensor *t, struct base_error *err);
int import_dcp_read(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err); /* of import_file */
/* Writes a document, with numbers as short as they can be. -ENOMEM; -EFBIG: its text is longer than `most` bytes. */
int import_dcp_write(const json_t *value, size_t most, struct base_buf *b);

/* A key's leaf of its component's tree; takes `leaf` in any case. */
int import_dcp_leaf(struct import_dcp *d, size_t entry, json_t *leaf);
/* .dcp/metadata.json, and a document for each component's tree. */
int import_dcp_documents(struct import_dcp *d);

#endif
