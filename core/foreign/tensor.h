/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor: where the items of a tensor are that torch.save wrote, and torch's types by name. */
#ifndef CORE_FOREIGN_TENSOR_H
#define CORE_FOREIGN_TENSOR_H

#include "core/foreign/archive.h"
#include "core/foreign/pickle.h"
#include "core/tensor/box.h"
#include "core/tensor/dtype.h"

struct foreign_tensor {
	const char *dtype;              /* torch's name: "float32"; static */
	struct tensor_shape shape;
	uint64_t stride[TENSOR_MAX_DIMS];       /* in items; checked: every item is in the data */
	uint64_t offset;                /* of the first item, in the file */
};

/* What a type of torch is kept as: the store's own, or unsigned integers of its size where the store has none. -EINVAL:
 * torch has no such type, or none that can be kept (quantized ones). */
int foreign_dtype(const char *name, size_t len, const char **ret_name, enum tensor_dtype *ret_dtype);

/* An archive that holds one tensor. -BASE_EFORMAT: it holds something else. */
int foreign_tensor_read(const struct foreign_range *range, struct foreign_tensor *ret_t, struct base_error *err);
/* The same for a value of a pickle from an archive. -BASE_EFORMAT: it is no tensor. */
int foreign_tensor_of(struct foreign_archive *a, const struct foreign_value *v, struct foreign_tensor *ret_t,
	struct base_error *err);
/* -BASE_EFORMAT: another kind of machine wrote the archive, whose data have another byte order. */
int foreign_archive_little(struct foreign_archive *a, struct base_error *err);
/* Numbers in a torch.Size, a tuple or a list. */
int foreign_sizes(const struct foreign_value *v, uint64_t ret_sizes[static TENSOR_MAX_DIMS], uint32_t *ret_n);

/* Names of classes in tensors' pickles, for lists of classes. */
#define FOREIGN_TENSOR_CLASSES \
	"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter", \
	"collections.OrderedDict", "torch.storage.UntypedStorage", "torch.FloatStorage", "torch.DoubleStorage", \
	"torch.HalfStorage", "torch.BFloat16Storage", "torch.LongStorage", "torch.IntStorage", "torch.ShortStorage", \
	"torch.CharStorage", "torch.ByteStorage", "torch.BoolStorage", "torch.ComplexFloatStorage", \
	"torch.ComplexDoubleStorage", FOREIGN_DTYPE_CLASSES
#define FOREIGN_DTYPE_CLASSES \
	"torch.float32", "torch.float64", "torch.float16", "torch.bfloat16", "torch.int64", "torch.int32", \
	"torch.int16", "torch.int8", "torch.uint8", "torch.bool", "torch.uint16", "torch.uint32", "torch.uint64", \
	"torch.complex64", "torch.complex128", "torch.complex32", "torch.float8_e4m3fn", "torch.float8_e5m2", \
	"torch.float8_e4m3fnuz", "torch.float8_e5m2fnuz", "torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2", \
	"torch.bits8", "torch.bits16", "torch.bits1x8", "torch.bits2x4", "torch.bits4x2", "torch.uint1", \
	"torch.uint2", "torch.uint3", "torch.uint4", "torch.uint5", "torch.uint6", "torch.uint7", "torch.int1", \
	"torch.int2", "torch.int3", "torch.int4", "torch.int5", "torch.int6", "torch.int7"

#endif
