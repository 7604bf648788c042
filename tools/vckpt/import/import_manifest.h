/* SPDX-License-Identifier: Apache-2.0
 *
 * import_manifest: the manifest.json of a step that was exported, or copied from a mount (docs/tree.md): which of its
 * files hold which tensors and blobs, under their true names. It comes from outside and may be wrong. This unit checks
 * the text by itself; import_exported.c checks it against the files. A path in it is never opened: files are found by
 * walking the directory, and then looked up here. One thread. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_MANIFEST_H
#define TOOLS_VCKPT_IMPORT_IMPORT_MANIFEST_H

#include <jansson.h>

#include "core/base/error.h"
#include "core/tensor/box.h"
#include "core/tensor/dtype.h"
#include "proto/message.h"

struct import_manifest_tensor {
	const char *component, *name;
	size_t name_len;
	enum tensor_dtype dtype;
	struct tensor_shape shape;
	bool found; /* in a file: the walk's mark */
};

struct import_manifest_blob {
	const char *name, *file; /* file: path from the directory */
	bool per_rank;
	uint32_t rank;
	uint64_t bytes;
	bool found;
};

struct import_manifest {
	char *path;
	struct import_manifest_tensor *tensors;
	size_t ntensors;
	struct import_manifest_blob *blobs;
	size_t nblobs;
	struct proto_attribute *attributes;
	size_t nattributes;
	json_t *root;                            /* owns the strings */
	json_t *components, *by_name, *by_file; /* look-ups */
	json_t *weights; /* component by the path of a .safetensors */
};

/* Does the text begin as manifest.json does? For files that are no JSON, or too large to be read as such. */
bool import_manifest_begins(const char *text, size_t len);
/* 0; 1: it is some other program's file; -BASE_EFORMAT with a sentence that names path and field. */
int import_manifest_parse(const char *path, const char *text, size_t len, struct import_manifest **ret_m,
	struct base_error *err);
void import_manifest_free(struct import_manifest *m); /* NULL-safe */

/* NULL: it names none. file: path from the directory; a tensor's is that of its .npy. */
struct import_manifest_tensor *import_manifest_tensor(const struct import_manifest *m, const char *component,
	const char *name, size_t name_len);
struct import_manifest_tensor *import_manifest_tensor_file(const struct import_manifest *m, const char *file);
const char *import_manifest_weights_file(const struct import_manifest *m, const char *file); /* its component */
struct import_manifest_blob *import_manifest_blob_file(const struct import_manifest *m, const char *file);
bool import_manifest_component(const struct import_manifest *m, const char *name, size_t len);

#endif
