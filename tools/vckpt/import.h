/* SPDX-License-Identifier: Apache-2.0
 *
 * import: what an import found, before a byte of data is read: files, tensors in them, blobs, pickles left out.
 * One thread builds it; afterwards its files are read from many (pread only; never mapped: a mapped file can be cut
 * short under us). */
#ifndef TOOLS_VCKPT_IMPORT_H
#define TOOLS_VCKPT_IMPORT_H

#include <sys/stat.h>

#include "core/save/writer.h"
#include "core/view/safetensors.h"
#include "tools/vckpt/tool.h"

struct import_file {
	char *path; /* as the user may find it */
	int fd; /* -1: opened for each read */
	struct stat stat; /* when it was opened: a file that changes while it is read fails the import */
};

struct import_tensor {
	char component[PROTO_COMPONENT_MAX + 1];
	char *name;
	uint32_t name_len;
	enum tensor_dtype dtype;
	struct tensor_shape shape;
	uint64_t offset, bytes; /* in the file */
	struct import_file *file;
};

struct import_blob {
	char *name;
	struct import_file *file;
};

struct import_component {
	char name[PROTO_COMPONENT_MAX + 1];
	uint32_t nfiles; /* files that gave tensors */
	void *header;
	size_t header_len;
	uint64_t data_bytes; /* of the single .safetensors it came from, else NULL */
	struct proto_attribute *metadata;
	uint32_t nmetadata; /* of all its safetensors, merged */
};

struct import_plan {
	struct import_file **files;
	size_t nfiles;
	struct import_tensor *tensors;
	size_t ntensors;
	struct import_blob *blobs;
	size_t nblobs;
	struct import_component *components;
	size_t ncomponents;
	char **pickles;
	size_t npickles; /* paths of pickled files that were left out */
	bool keep_pickles;
};

void import_plan_release(struct import_plan *p);
/* Adds one SOURCE: a directory in Hugging Face layout, a .safetensors or a .npy, its tensors under `component`. */
int import_add_source(struct import_plan *p, const char *path, const char *component, struct base_error *err);
/* After the last: tensors that stand in two files are compared byte for byte and kept once; nothing but pickles is
 * refused. */
int import_plan_check(struct import_plan *p, struct base_error *err);

/* ---- within the import ---- */
int import_file_open(struct import_plan *p, const char *path, struct import_file **ret_file, struct base_error *err);
/* exactly len */
int import_file_read(struct import_file *f, uint64_t offset, void *bytes, size_t len, struct base_error *err);
int import_add_safetensors(struct import_plan *p, const char *path, const char *component, struct base_error *err);
int import_add_directory(struct import_plan *p, const char *path, const char *component, struct base_error *err);
int import_add_blob(struct import_plan *p, const char *path, const char *name, struct base_error *err);
/* by its first bytes: a pickle, or a zip archive as torch.save writes it */
bool import_is_pickle(struct import_file *f);
bool import_has_suffix(const char *text, const char *suffix);

#endif
