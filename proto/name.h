/* SPDX-License-Identifier: Apache-2.0
 *
 * name: the rules of names, shared by all layers (docs/format/names.md). Pure functions, any thread. */
#ifndef PROTO_NAME_H
#define PROTO_NAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool proto_run_valid(const char *run);                 /* [A-Za-z0-9_][A-Za-z0-9._-]{0,127} */
bool proto_component_valid(const char *component);     /* [A-Za-z0-9_][A-Za-z0-9._-]{0,63}; not a name that the tree
							  uses (ranks, mesh, blobs, meta, incoming, latest,
							  manifest.json), nothing that ends in .safetensors or
							  .npy */
bool proto_tag_valid(const char *tag);                 /* [A-Za-z0-9_][A-Za-z0-9._-]{0,63}; not `latest`, no number, not
							  `step-...`: these name steps */
bool proto_text_valid(const char *text, size_t min, size_t max); /* UTF-8 of min .. max bytes; NULL is not */
bool proto_attribute_key_valid(const char *key);       /* [A-Za-z_][A-Za-z0-9_.-]{0,63} */
bool proto_utf8_valid(const char *bytes, size_t len);  /* well-formed (no surrogates, no overlong), no NUL */
size_t proto_name_slashes(const char *name);
/* May the names of so many blobs have so many slashes together? (proto/limits.h) */
bool proto_blob_slashes_valid(uint64_t slashes, uint64_t nblobs);

#endif
