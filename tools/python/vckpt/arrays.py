# SPDX-License-Identifier: Apache-2.0
"""Arrays and tensors as memory of what the library reads: numpy's dtype for each of ours, torch's tensor over an array,
and the memory of a caller's array or tensor."""
from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _lib
from .shard import NUMPY_DTYPES, numpy_address
from .tensors import torch_module, torch_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMPY = {_lib.DTYPES.index(word): name for name, word in NUMPY_DTYPES.items()}


@functools.cache
def numpy_dtype(number: int) -> np.dtype[Any]:
    """numpy's dtype for one of ours, or that of ml_dtypes; |V1 or |V2 where neither has one."""
    name = NUMPY.get(number)
    if hasattr(np, name or "") or name == "bool":
        return np.dtype(name)
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name or ""))
        return dtype
    except (ImportError, AttributeError):
        return np.dtype(f"V{_lib.ITEM_BYTES[number]}")


@contextlib.contextmanager
def memory_for(what: str, size: int) -> Iterator[None]:
    """Around an allocation of `size` bytes: where it fails, the error says for what it was."""
    try:
        yield
    except MemoryError:
        raise _lib.Error(errno.ENOMEM, f"{what}: it has {size} bytes, and there is no memory for them: read it in "
                                       "parts, or through a mount") from None


def empty(shape: Sequence[int], number: int, what: str) -> NDArray[Any]:
    """Memory for a tensor, or a part of one, of the dtype with that number."""
    dtype = numpy_dtype(number)
    size = math.prod(shape) * dtype.itemsize
    with memory_for(what, size):
        if size > sys.maxsize:
            raise MemoryError
        return np.empty(tuple(shape), dtype)


def is_raw(dtype: np.dtype[Any]) -> bool:
    """Bytes without a meaning to numpy. (ml_dtypes' dtypes have the same kind.)"""
    return dtype.type is np.void


@functools.cache
def installed() -> Literal["numpy", "torch"]:
    """The framework whose tensors are read where none is named: torch where it can be imported."""
    if "torch" in sys.modules:
        return "torch" if sys.modules["torch"] is not None else "numpy"
    found = importlib.util.find_spec("torch")
    return "numpy" if found is None or found.origin is None else "torch"      # a folder of that name is none


def torch_tensor(array: NDArray[Any], dtype: int) -> Any:
    """A tensor over the array's memory."""
    return torch_state().from_numpy(array, dtype)


def destination(out: Any, shape: Sequence[int], dtype: int) -> tuple[int, Sequence[int]]:
    """(address, strides in bytes) of an array or a tensor that is to be filled."""
    if isinstance(out, np.ndarray):
        found, item = out.shape, out.dtype.itemsize
        right = (NUMPY_DTYPES.get(out.dtype.name) == _lib.DTYPES[dtype]
                 or (is_raw(out.dtype) and item == _lib.ITEM_BYTES[dtype]))
        strides: Sequence[int] = out.strides
        address = numpy_address(out)
        if not out.flags.writeable or not out.dtype.isnative:
            raise _lib.invalid("out: the array is read-only or not in native byte order: give one that can be written")
    else:
        torch = torch_state() if torch_module() is not None else None
        if torch is None or not torch.is_tensor(out) or out.device.type != "cpu":
            raise _lib.invalid(f"out: expected a numpy array or a CPU tensor, not {type(out).__name__}")
        torch.check_plain(out, "out")
        found, right = tuple(out.shape), torch.DTYPES[out.dtype] == dtype
        address, strides = out.data_ptr(), [n * out.element_size() for n in out.stride()]
    if tuple(found) != tuple(shape) or not right:
        raise _lib.invalid(f"out: expected {_lib.DTYPES[dtype]} of shape {list(shape)}, not {out.dtype} of shape "
                           f"{list(found)}")
    return address, strides
