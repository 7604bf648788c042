/* SPDX-License-Identifier: Apache-2.0
 *
 * layout: names, dtypes and shapes of a set of tensors, sorted, and which rank holds what of them; and the object with
 * all this (docs/format/layout.md).
 * Build once, then read-only and safe from any thread. */
#ifndef CORE_STEP_LAYOUT_H
#define CORE_STEP_LAYOUT_H

#include "core/tensor/grid.h"
#include "core/tensor/mesh.h"
#include "core/tensor/placement.h"
#include "proto/message.h"

struct store_layout {
	struct proto_layout m;          /* tables; read-only */
	struct base_digest digest;      /* of the encoded object */
	struct layout_made *made;       /* owns the tables of one that was built; NULL: it was decoded */
};

/* Building: add in any order, then finish (sorts, encodes). -EEXIST names a tensor given twice; -EINVAL a bad
 * component, name, dtype or shape. */
struct store_layout_builder;
struct store_layout_builder *store_layout_builder_new(struct tensor_grid_params params);
void store_layout_builder_free(struct store_layout_builder *b);
int store_layout_builder_add(struct store_layout_builder *b, const char *component, const char *name, size_t name_len,
	enum tensor_dtype dtype, const struct tensor_shape *shape, uint32_t tag, struct base_error *err);
/* The same with its mesh and placements. held NULL, or its mesh NULL: none are recorded. Placements are copied; meshes
 * must live until the layout is finished (then they may be freed), and are fast to add if the same pointer comes again.
 * Equal meshes are in the layout once, whatever their pointers. Also -EINVAL: not as many placements as the mesh has
 * dimensions, or a partial one; -BASE_ELIMIT: more than 4,096 meshes or 65,536 combinations of placements. */
struct store_layout_held {
	bool buffer;                    /* may differ between replicas */
	const struct tensor_mesh *mesh;
	const struct tensor_placement *placements; uint32_t nplacements;
};
int store_layout_builder_add_held(struct store_layout_builder *b, const char *component, const char *name,
	size_t name_len, enum tensor_dtype dtype, const struct tensor_shape *shape, uint32_t tag,
	const struct store_layout_held *held, struct base_error *err);
/* Takes memory at once for what will be added; more may come. -ENOMEM. */
int store_layout_builder_reserve(struct store_layout_builder *b, uint32_t ntensors, size_t name_bytes);
/* ret_object: the object's bytes. ret_tags[i] (malloc'ed, ntensors entries): the tag of sorted tensor i. The builder
 * can only be freed then. In two steps: the tables alone (digest: zeros) suffice for all functions below; encode,
 * called once by one thread, makes the object and sets the digest, while other threads may use the tables. */
int store_layout_builder_finish(struct store_layout_builder *b, struct store_layout **ret_l,
	struct base_buf *ret_object, uint32_t **ret_tags, struct base_error *err);
int store_layout_builder_tables(struct store_layout_builder *b, struct store_layout **ret_l, uint32_t **ret_tags,
	struct base_error *err);
int store_layout_encode(struct store_layout *l, struct base_buf *ret_object, struct base_error *err);

int store_layout_decode(const void *object, size_t len, struct store_layout **ret_l, struct base_error *err);
/* The same where the digest of the bytes is known, and right. */
int store_layout_decode_known(const void *object, size_t len, const struct base_digest *digest,
	struct store_layout **ret_l, struct base_error *err);
void store_layout_free(struct store_layout *l); /* NULL-safe */

/* Index of a tensor, or -ENOENT. Binary search. */
int64_t store_layout_find(const struct store_layout *l, const char *component, const char *name, size_t name_len);
const char *store_layout_component(const struct store_layout *l, uint32_t tensor);
/* not NUL-terminated */
const char *store_layout_name(const struct store_layout *l, uint32_t tensor, uint32_t *ret_len);
enum tensor_dtype store_layout_dtype(const struct store_layout *l, uint32_t tensor);
void store_layout_shape(const struct store_layout *l, uint32_t tensor, struct tensor_shape *ret_shape);
uint64_t store_layout_bytes(const struct store_layout *l, uint32_t tensor);
void store_layout_grid(const struct store_layout *l, uint32_t tensor, struct tensor_grid *ret_grid);
/* The tensor's mesh and placements, made anew at each call: free with tensor_mesh_free and free. Tensors whose
 * m.tensors[tensor].mesh or .placement are equal have the same ones. -ENOENT: not recorded; -EINVAL, -BASE_ELIMIT,
 * -EOVERFLOW: the stored mesh or the stored placements are not valid; -ENOMEM. They are not checked against each other,
 * nor against the shape (tensor_sharding_check). */
int store_layout_mesh(const struct store_layout *l, uint32_t tensor, struct tensor_mesh **ret_mesh,
	struct base_error *err);
int store_layout_placements(const struct store_layout *l, uint32_t tensor, struct tensor_placements **ret_p,
	struct base_error *err);
/* How many bytes of a name a message shows: whole characters, 200 bytes at most (for %.*s). */
int store_layout_shown(const char *name, size_t name_len);
/* First and one past the last tensor of a component (index into m.components). */
void store_layout_component_range(const struct store_layout *l, uint32_t component, uint32_t *ret_first,
	uint32_t *ret_end);

#endif
