/* SPDX-License-Identifier: Apache-2.0
 *
 * dtype: one table; its order is that of the numbers on disk. */
#include "core/tensor/dtype.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct dtype_row {
	const char *name, *alias, *safetensors, *npy; /* alias: the word of numpy and torch */
	uint8_t bytes, word;
};

static const struct dtype_row dtype_table[TENSOR_DTYPE_END] = {
	[TENSOR_BOOL] = {"bool", "bool", "BOOL", "|b1", 1, 1},
	[TENSOR_U8] = {"u8", "uint8", "U8", "|u1", 1, 1},
	[TENSOR_U16] = {"u16", "uint16", "U16", "<u2", 2, 2},
	[TENSOR_U32] = {"u32", "uint32", "U32", "<u4", 4, 4},
	[TENSOR_U64] = {"u64", "uint64", "U64", "<u8", 8, 8},
	[TENSOR_I8] = {"i8", "int8", "I8", "|i1", 1, 1},
	[TENSOR_I16] = {"i16", "int16", "I16", "<i2", 2, 2},
	[TENSOR_I32] = {"i32", "int32", "I32", "<i4", 4, 4},
	[TENSOR_I64] = {"i64", "int64", "I64", "<i8", 8, 8},
	[TENSOR_F16] = {"f16", "float16", "F16", "<f2", 2, 2},
	[TENSOR_BF16] = {"bf16", "bfloat16", "BF16", "|V2", 2, 2},
	[TENSOR_F32] = {"f32", "float32", "F32", "<f4", 4, 4},
	[TENSOR_F64] = {"f64", "float64", "F64", "<f8", 8, 8},
	[TENSOR_C64] = {"c64", "complex64", "C64", "<c8", 8, 4},
	[TENSOR_C128] = {"c128", "complex128", NULL, "<c16", 16, 8},
	[TENSOR_F8_E4M3FN] = {"f8_e4m3fn", "float8_e4m3fn", "F8_E4M3", "|V1", 1, 1},
	[TENSOR_F8_E5M2] = {"f8_e5m2", "float8_e5m2", "F8_E5M2", "|V1", 1, 1},
	[TENSOR_F8_E4M3FNUZ] = {"f8_e4m3fnuz", "float8_e4m3fnuz", "F8_E4M3FNUZ", "|V1", 1, 1},
	[TENSOR_F8_E5M2FNUZ] = {"f8_e5m2fnuz", "float8_e5m2fnuz", "F8_E5M2FNUZ", "|V1", 1, 1},
	[TENSOR_F8_E8M0FNU] = {"f8_e8m0fnu", "float8_e8m0fnu", "F8_E8M0", "|V1", 1, 1},
	[TENSOR_F4_E2M1FN_X2] = {"f4_e2m1fn_x2", "float4_e2m1fn_x2", "F4", "|V1", 1, 1},
};

bool tensor_dtype_valid(unsigned dtype)
{
	return dtype >= TENSOR_BOOL && dtype < TENSOR_DTYPE_END;
}

unsigned tensor_dtype_bytes(enum tensor_dtype dtype)
{
	return tensor_dtype_valid(dtype) ? dtype_table[dtype].bytes : 0;
}

unsigned tensor_dtype_word_bytes(enum tensor_dtype dtype)
{
	return tensor_dtype_valid(dtype) ? dtype_table[dtype].word : 0;
}

bool tensor_dtype_is_integer(enum tensor_dtype dtype)
{
	return dtype >= TENSOR_BOOL && dtype <= TENSOR_I64;
}

const char *tensor_dtype_name(enum tensor_dtype dtype)
{
	return tensor_dtype_valid(dtype) ? dtype_table[dtype].name : "unknown";
}

const char *tensor_dtype_alias(enum tensor_dtype dtype)
{
	return tensor_dtype_valid(dtype) ? dtype_table[dtype].alias : "unknown";
}

int tensor_dtype_parse(const char *name, enum tensor_dtype *ret_dtype)
{
	if (strncmp(name, "torch.", 6) == 0)
		name += 6;
	for (unsigned i = TENSOR_BOOL; i < TENSOR_DTYPE_END; i++)
		if (strcmp(dtype_table[i].name, name) == 0 || strcmp(dtype_table[i].alias, name) == 0) {
			*ret_dtype = i;
			return 0;
		}
	return -EINVAL;
}

const char *tensor_dtype_safetensors(enum tensor_dtype dtype)
{
	return tensor_dtype_valid(dtype) ? dtype_table[dtype].safetensors : NULL;
}

int tensor_dtype_from_safetensors(const char *name, enum tensor_dtype *ret_dtype)
{
	for (unsigned i = TENSOR_BOOL; i < TENSOR_DTYPE_END; i++)
		if (dtype_table[i].safetensors && strcmp(dtype_table[i].safetensors, name) == 0) {
			*ret_dtype = i;
			return 0;
		}
	return -EINVAL;
}

const char *tensor_dtype_npy(enum tensor_dtype dtype)
{
	return tensor_dtype_valid(dtype) ? dtype_table[dtype].npy : NULL;
}

const char *tensor_dtype_ml_dtypes(enum tensor_dtype dtype)
{
	const char *npy = tensor_dtype_npy(dtype);

	return npy && npy[1] == 'V' && dtype != TENSOR_F4_E2M1FN_X2 ? dtype_table[dtype].alias : NULL;
}

bool tensor_dtype_numpy_says(enum tensor_dtype dtype, char text[static TENSOR_DTYPE_NUMPY_TEXT])
{
	const char *npy = tensor_dtype_npy(dtype);

	if (!npy || npy[1] != 'V')
		return false;
	if (dtype == TENSOR_F4_E2M1FN_X2)
		snprintf(text, TENSOR_DTYPE_NUMPY_TEXT, "numpy shows %s; numpy.load(f).view(\"u1\") gives bytes that "
			"hold two values each", npy);
	else
		snprintf(text, TENSOR_DTYPE_NUMPY_TEXT, "numpy shows %s; numpy.load(f).view(ml_dtypes.%s) "
			"(python3 -m pip install ml_dtypes)", npy, tensor_dtype_ml_dtypes(dtype));
	return true;
}

/* The byte order of a one-byte type means nothing: numpy writes '|', others '<', '>' or '='. Of larger types '='
 * is refused too, since a file with it does not say which order it has. */
int tensor_dtype_from_npy(const char *descr, enum tensor_dtype *ret_dtype)
{
	for (unsigned i = TENSOR_BOOL; i < TENSOR_DTYPE_END; i++) {
		const char *npy = dtype_table[i].npy;
		bool order = descr[0] == npy[0] || (npy[0] == '|' && descr[0] && strchr("<>=", descr[0]));

		if (npy[1] != 'V' && order && strcmp(npy + 1, descr + 1) == 0) {
			*ret_dtype = i;
			return 0;
		}
	}
	return -EINVAL;
}
