/* SPDX-License-Identifier: Apache-2.0
 *
 * npy: headers of NumPy's .npy format (numpy.lib.format, versions 1.0 to 3.0 read, 1.0 written). Pure functions. */
#ifndef CORE_VIEW_NPY_H
#define CORE_VIEW_NPY_H

#include "core/base/error.h"
#include "core/tensor/box.h"
#include "core/tensor/dtype.h"

#define VIEW_NPY_DATA_OFFSET 4096u
/* Writes exactly VIEW_NPY_DATA_OFFSET bytes. f4 pairs as |V1. */
void view_npy_header(enum tensor_dtype dtype, const struct tensor_shape *shape,
	char header[static VIEW_NPY_DATA_OFFSET]);
/* Parses the head of a file (at least min(file size, 64 KiB + 12) bytes of it). -BASE_EFORMAT with a sentence: bad
 * magic or version, no dict, unknown descr, Fortran order with more than one dimension > 1, shape overflow, file too
 * short or too long for the shape. void_dtype: the dtype of items of |V1 or |V2; if it is 0 and the file has such
 * items, -EINVAL with a sentence that lists their possible dtypes. It is ignored for files that give their dtype. */
int view_npy_parse(const void *head, size_t head_len, uint64_t file_size, enum tensor_dtype void_dtype,
	enum tensor_dtype *ret_dtype, struct tensor_shape *ret_shape, uint64_t *ret_data_offset,
	struct base_error *err);

#endif
