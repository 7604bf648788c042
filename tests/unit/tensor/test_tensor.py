# SPDX-License-Identifier: Apache-2.0
"""core/tensor: dtypes against numpy and safetensors, shapes and boxes at their limits."""
import ctypes
import errno

import numpy
import pytest

U64x16 = ctypes.c_uint64 * 16


class Shape(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_uint32), ("dim", U64x16)]


class Box(ctypes.Structure):
    _fields_ = [("offset", U64x16), ("size", U64x16)]


# number on disk: name, bytes, word, safetensors, npy
DTYPES = {
    1: ("bool", 1, 1, "BOOL", "|b1"), 2: ("u8", 1, 1, "U8", "|u1"), 3: ("u16", 2, 2, "U16", "<u2"),
    4: ("u32", 4, 4, "U32", "<u4"), 5: ("u64", 8, 8, "U64", "<u8"), 6: ("i8", 1, 1, "I8", "|i1"),
    7: ("i16", 2, 2, "I16", "<i2"), 8: ("i32", 4, 4, "I32", "<i4"), 9: ("i64", 8, 8, "I64", "<i8"),
    10: ("f16", 2, 2, "F16", "<f2"), 11: ("bf16", 2, 2, "BF16", "|V2"), 12: ("f32", 4, 4, "F32", "<f4"),
    13: ("f64", 8, 8, "F64", "<f8"), 14: ("c64", 8, 4, "C64", "<c8"), 15: ("c128", 16, 8, None, "<c16"),
    16: ("f8_e4m3fn", 1, 1, "F8_E4M3", "|V1"), 17: ("f8_e5m2", 1, 1, "F8_E5M2", "|V1"),
    18: ("f8_e4m3fnuz", 1, 1, "F8_E4M3FNUZ", "|V1"), 19: ("f8_e5m2fnuz", 1, 1, "F8_E5M2FNUZ", "|V1"),
    20: ("f8_e8m0fnu", 1, 1, "F8_E8M0", "|V1"), 21: ("f4_e2m1fn_x2", 1, 1, "F4", "|V1"),
}


@pytest.fixture(scope="module", autouse=True)
def types(lib):
    for name in ("tensor_dtype_name", "tensor_dtype_alias", "tensor_dtype_safetensors", "tensor_dtype_npy"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.tensor_dtype_valid.restype = lib.tensor_dtype_numpy_says.restype = ctypes.c_bool
    lib.tensor_box_inside.restype = lib.tensor_shape_equal.restype = ctypes.c_bool
    lib.tensor_box_items.restype = ctypes.c_uint64


@pytest.mark.parametrize("number", DTYPES)
def test_dtype_table(lib, number):
    name, size, word, safetensors, npy = DTYPES[number]
    got = ctypes.c_int()
    assert lib.tensor_dtype_valid(number)
    assert lib.tensor_dtype_name(number) == name.encode()
    assert (lib.tensor_dtype_bytes(number), lib.tensor_dtype_word_bytes(number)) == (size, word)
    assert lib.tensor_dtype_parse(name.encode(), ctypes.byref(got)) == 0 and got.value == number
    assert lib.tensor_dtype_safetensors(number) == (safetensors and safetensors.encode())
    if safetensors:
        assert lib.tensor_dtype_from_safetensors(safetensors.encode(), ctypes.byref(got)) == 0 and got.value == number
    assert lib.tensor_dtype_npy(number) == npy.encode()
    assert numpy.dtype(npy).itemsize == size
    if "V" not in npy:
        assert numpy.lib.format.dtype_to_descr(numpy.dtype(npy)) == npy
        assert lib.tensor_dtype_from_npy(npy.encode(), ctypes.byref(got)) == 0 and got.value == number


@pytest.mark.parametrize("number", DTYPES)
def test_words_of_numpy_and_torch(lib, number):
    name, npy = DTYPES[number][0], DTYPES[number][4]
    alias = lib.tensor_dtype_alias(number).decode()
    got = ctypes.c_int()
    for word in (alias, f"torch.{alias}", f"torch.{name}"):
        assert lib.tensor_dtype_parse(word.encode(), ctypes.byref(got)) == 0 and got.value == number, word
    if "V" not in npy:
        assert numpy.dtype(npy).name == alias
    else:
        assert alias == name.replace("bf", "bfloat").replace("f8", "float8").replace("f4", "float4")


@pytest.mark.parametrize("number", DTYPES)
def test_what_numpy_shows(lib, number):
    """Types that numpy lacks come with a sentence."""
    text = ctypes.create_string_buffer(160)
    npy = DTYPES[number][4]
    if "V" not in npy:
        assert not lib.tensor_dtype_numpy_says(number, text)
        return
    assert (lib.tensor_dtype_numpy_says(number, text) and
            text.value.decode().startswith(f"numpy shows {npy}; numpy.load(f).view("))
    if number != 21:        # two values a byte: no type of ml_dtypes
        assert text.value.decode().endswith(f".view(ml_dtypes.{lib.tensor_dtype_alias(number).decode()}) (python3 -m "
                                            f"pip install ml_dtypes)")


def test_unknown_dtypes_are_refused(lib):
    got = ctypes.c_int(77)
    assert not lib.tensor_dtype_valid(0) and not lib.tensor_dtype_valid(22) and not lib.tensor_dtype_valid(2 ** 32 - 1)
    for name in ["", "F32", "f33", "f3", "f32 ", "BF16", "float", "torch.", "torch.torch.int8", "Torch.int8",
                 "torch.int8 ", "numpy.int8"]:
        assert lib.tensor_dtype_parse(name.encode(), ctypes.byref(got)) == -errno.EINVAL
    for name in ["", "f32", "F6_E2M3", "F6_E3M2", "F128", "C128", "BF16 "]:
        assert lib.tensor_dtype_from_safetensors(name.encode(), ctypes.byref(got)) == -errno.EINVAL
    for descr in ["", "<", ">f4", "=f4", "|f4", "f4", "|V1", "|V2", "|O", "<U4", "|S3", "<M8[ns]", "<f16", "<f", "<f44",
                  "!u1", "u1"]:
        assert lib.tensor_dtype_from_npy(descr.encode(), ctypes.byref(got)) == -errno.EINVAL, descr
    assert got.value == 77


def test_byte_order_of_single_bytes_is_ignored(lib):
    got = ctypes.c_int()
    for order in "|<>=":
        assert lib.tensor_dtype_from_npy(f"{order}i1".encode(), ctypes.byref(got)) == 0 and got.value == 6


def items(lib, dims, item, ndim=None):
    out = ctypes.c_uint64()
    s = Shape(len(dims) if ndim is None else ndim, U64x16(*dims))
    return lib.tensor_shape_items(ctypes.byref(s), item, ctypes.byref(out)), out.value


def test_shape_products_are_bounded(lib):
    assert items(lib, [], 4) == (0, 1)
    assert items(lib, [3, 0, 5], 4) == (0, 0)
    assert items(lib, [2 ** 40], 16) == (0, 2 ** 40)
    assert items(lib, [2 ** 60], 4) == (0, 2 ** 60)
    assert items(lib, [2 ** 60 + 1], 4)[0] == -errno.EOVERFLOW
    assert items(lib, [2 ** 31, 2 ** 31, 2], 1)[0] == -errno.EOVERFLOW
    assert items(lib, [2 ** 63, 2 ** 63, 4], 1)[0] == -errno.EOVERFLOW
    assert items(lib, [0, 2 ** 63], 1)[0] == -errno.EOVERFLOW
    assert items(lib, [2 ** 64 - 1] * 16, 16)[0] == -errno.EOVERFLOW
    assert items(lib, [15] * 15, 1) == (0, 15 ** 15)
    assert items(lib, [1] * 16, 1) == (0, 1)
    assert items(lib, [1], 1, ndim=17)[0] == -errno.EINVAL
    assert items(lib, [1], 0)[0] == -errno.EINVAL


def test_boxes(lib):
    s = Shape(2, U64x16(10, 2 ** 61))
    def inside(offset, size):
        return lib.tensor_box_inside(ctypes.byref(s), ctypes.byref(Box(U64x16(*offset), U64x16(*size))))
    assert inside([0, 0], [10, 2 ** 61]) and inside([10, 5], [0, 0]) and inside([9, 1], [1, 2 ** 61 - 1])
    assert not inside([9, 0], [2, 1]) and not inside([11, 0], [0, 1])
    assert not inside([0, 2 ** 64 - 1], [1, 2]) and not inside([0, 1], [1, 2 ** 64 - 1])
    whole = Box(U64x16(*[7] * 16), U64x16(*[7] * 16))
    lib.tensor_box_whole(ctypes.byref(s), ctypes.byref(whole))
    assert list(whole.offset) == [0] * 16 and list(whole.size) == [10, 2 ** 61] + [0] * 14
    small = Shape(2, U64x16(4, 5))
    assert lib.tensor_box_items(ctypes.byref(small), ctypes.byref(Box(U64x16(1, 1), U64x16(3, 4)))) == 12
    assert lib.tensor_box_items(ctypes.byref(Shape(0)), ctypes.byref(Box())) == 1


def test_shapes_compare_by_their_dimensions(lib):
    a, b = Shape(2, U64x16(3, 4)), Shape(2, U64x16(3, 4, 9))
    assert lib.tensor_shape_equal(ctypes.byref(a), ctypes.byref(b))
    b.ndim = 3
    assert not lib.tensor_shape_equal(ctypes.byref(a), ctypes.byref(b))
    assert not lib.tensor_shape_equal(ctypes.byref(a), ctypes.byref(Shape(2, U64x16(4, 3))))
