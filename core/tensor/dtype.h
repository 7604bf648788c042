/* SPDX-License-Identifier: Apache-2.0
 *
 * dtype: the element types of docs/format/layout.md. The numbers are stored: never reuse one. Pure functions, any
 * thread. */
#ifndef CORE_TENSOR_DTYPE_H
#define CORE_TENSOR_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tensor_dtype {
	TENSOR_BOOL = 1, TENSOR_U8 = 2, TENSOR_U16 = 3, TENSOR_U32 = 4, TENSOR_U64 = 5,
	TENSOR_I8 = 6, TENSOR_I16 = 7, TENSOR_I32 = 8, TENSOR_I64 = 9,
	TENSOR_F16 = 10, TENSOR_BF16 = 11, TENSOR_F32 = 12, TENSOR_F64 = 13,
	TENSOR_C64 = 14, TENSOR_C128 = 15,
	TENSOR_F8_E4M3FN = 16, TENSOR_F8_E5M2 = 17, TENSOR_F8_E4M3FNUZ = 18, TENSOR_F8_E5M2FNUZ = 19,
	TENSOR_F8_E8M0FNU = 20,
	TENSOR_F4_E2M1FN_X2 = 21, /* one byte holds two elements; shapes count bytes (pairs) in the last dimension */
	TENSOR_DTYPE_END
};

bool tensor_dtype_valid(unsigned dtype);
unsigned tensor_dtype_bytes(enum tensor_dtype dtype);          /* bytes of one item: 1, 2, 4, 8 or 16 */
/* Width in bytes of the number that repeats inside an item (complex: of one part): what a codec transposes. */
unsigned tensor_dtype_word_bytes(enum tensor_dtype dtype);
/* bool and integers: in such data single bits change */
bool tensor_dtype_is_integer(enum tensor_dtype dtype);
const char *tensor_dtype_name(enum tensor_dtype dtype);        /* "bf16", "f8_e4m3fn", ...; static */
const char *tensor_dtype_alias(enum tensor_dtype dtype);       /* numpy's and torch's: "bfloat16", ...; static */
/* Either word, the alias also as "torch.bfloat16". 0 or -EINVAL */
int tensor_dtype_parse(const char *name, enum tensor_dtype *ret_dtype);
const char *tensor_dtype_safetensors(enum tensor_dtype dtype); /* "BF16", "F8_E4M3", "F4", ...; NULL: has none (c128) */
int tensor_dtype_from_safetensors(const char *name, enum tensor_dtype *ret_dtype); /* 0 or -EINVAL (F6_* too) */
/* numpy descr, little-endian: "<f4", "|b1", ...; |V1 or |V2 for what numpy lacks (bf16, f8, f4). */
const char *tensor_dtype_npy(enum tensor_dtype dtype);
/* What the Python package ml_dtypes calls a type that numpy lacks: "bfloat16", "float8_e4m3fn", ...; NULL for those
 * that numpy has, and for f4 in pairs, which is in no package. */
const char *tensor_dtype_ml_dtypes(enum tensor_dtype dtype);
#define TENSOR_DTYPE_NUMPY_TEXT 160
/* For a type that numpy lacks: what numpy shows instead, and what to do. false: numpy has the type. */
bool tensor_dtype_numpy_says(enum tensor_dtype dtype, char text[static TENSOR_DTYPE_NUMPY_TEXT]);
/* -EINVAL for unknown, big-endian (of multi-byte types), void and object types. */
int tensor_dtype_from_npy(const char *descr, enum tensor_dtype *ret_dtype);

#endif
