/* SPDX-License-Identifier: Apache-2.0
 *
 * description: a tensor as a caller describes it for a save or a load: what the tensor is, what of it one rank holds,
 * and where in the rank's memory. The strings and arrays are the caller's. */
#ifndef CORE_TENSOR_DESCRIPTION_H
#define CORE_TENSOR_DESCRIPTION_H

#include "core/tensor/dtype.h"
#include "core/tensor/shard.h"

struct tensor_description {             /* as struct vckpt_tensor says */
	const char *component, *name;
	enum tensor_dtype dtype;
	struct tensor_shape shape;
	const struct tensor_mesh *mesh; /* NULL: of a save the saver's; of a load the rank alone */
	const char *placements;
	const struct tensor_flat *flat;
	bool has_boxes; const uint64_t *boxes; uint32_t nboxes;
	const char *same_dims;
	const void *data;               /* a load writes it */
	const int64_t *strides;         /* bytes */
	const uint64_t *local_shape; uint32_t local_ndim;
	bool device, buffer, alone;
};

/* What `rank` of the mesh holds of it by its placements and flat range. Of one with boxes only shape and dtype are
 * checked, and *ret_shard is not set. Errors as of tensor_sharding_check and tensor_shard_of. */
int tensor_description_shard(const struct tensor_description *t, const struct tensor_mesh *mesh, uint32_t rank,
	struct tensor_shard *ret_shard, struct base_error *err);

#endif
