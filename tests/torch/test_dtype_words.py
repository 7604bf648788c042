# SPDX-License-Identifier: Apache-2.0
"""The words of torch's types are understood where a type is asked for."""
import ctypes

import torch


def test_words_of_torch(lib):
    lib.tensor_dtype_alias.restype = ctypes.c_char_p
    for dtype in [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64,
                  torch.float8_e4m3fn, torch.float8_e5m2]:
        got = ctypes.c_int()
        assert lib.tensor_dtype_parse(str(dtype).encode(), ctypes.byref(got)) == 0, dtype
        assert f"torch.{lib.tensor_dtype_alias(got.value).decode()}" == str(dtype)
