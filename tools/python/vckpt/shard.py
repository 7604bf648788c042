# SPDX-License-Identifier: Apache-2.0
"""What this rank holds of a logical tensor, as the library takes it: `Shard` for callers that know their own layout,
and `Entry`, the description of one tensor of the state: here of numpy's, in torch_state.py of torch's.

An entry holds a struct vckpt_tensor, filled except for the address of the data, everything that the struct points to,
and what it was made from. The next save of the same thing asks for `address`: the data's address if all that the entry
was made from is as it was, else None; then the entry is made anew. So no entry ever describes something that it does
not fit."""
from __future__ import annotations

import ctypes
import errno
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _lib, advice
from .signatures import Box
from .values_text import KeyPath, path_text

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from typing_extensions import Self

PlainBox = tuple[tuple[int, ...], tuple[int, ...]]
Said = tuple[Any, ...]
Where = str | KeyPath           # of an error: a path of keys, or what is to be said

STALE = None
# numpy's names (and ml_dtypes') to ours
NUMPY_DTYPES = {"bool": "bool", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "int8": "i8",
                "int16": "i16", "int32": "i32", "int64": "i64", "float16": "f16", "bfloat16": "bf16", "float32": "f32",
                "float64": "f64", "complex64": "c64", "complex128": "c128", "float8_e4m3fn": "f8_e4m3fn",
                "float8_e5m2": "f8_e5m2", "float8_e4m3fnuz": "f8_e4m3fnuz", "float8_e5m2fnuz": "f8_e5m2fnuz",
                "float8_e8m0fnu": "f8_e8m0fnu"}


@functools.cache
def numpy_number(dtype: np.dtype[Any]) -> int | None:
    """Our number of numpy's dtype, in whatever byte order; None: it is not kept."""
    word = None if dtype.fields or dtype.subdtype else NUMPY_DTYPES.get(dtype.name)
    return None if word is None else _lib.DTYPES.index(word)


def numpy_address(array: NDArray[Any]) -> int:
    """The address of the first item. __array_interface__ has it, too, and takes four times as long."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (BufferError, TypeError, ValueError):    # empty, read-only, with gaps, or of a dtype that no buffer has
        address: int = array.__array_interface__["data"][0]
        return address


class Refused(_lib.InvalidArgument, TypeError):
    """Something in the state that cannot be kept; the sentence begins with its path (a tuple of keys, or what is to be
    said)."""

    def __init__(self, path: Where, sentence: str) -> None:
        super().__init__(errno.EINVAL, f"{path if isinstance(path, str) else path_text(path)}: {sentence}")

    def __reduce__(self) -> Any:
        return _lib.remade, (Refused, self.errno, self.text)


_lib.KINDS.add(Refused)


class Shard:
    """This rank's part of a tensor whose layout torch does not know.

    tensor      what this rank holds: a torch tensor or a numpy array
    shape       of the logical, unsharded tensor (None: that of `tensor`)
    mesh        a DeviceMesh, "dp=2,tp=4", or ("dp=2,tp=4", ranks); None: the save's
    placements  a word for each dimension of the mesh, "R,S(0)", or torch's placements; None: replicated
    flat        (from, to) or (from, to, length): `tensor` is these items of the flattened local tensor (of a padded
                buffer of `length` items), as ZeRO and Megatron's distributed optimizer cut it
    boxes       [(offsets, sizes), ...]: `tensor` is these boxes one after another, each row-major
    same_dims   with flat or boxes: the mesh dimensions along which ranks hold the same, "dp" or ["dp"]
    alone       this rank alone holds it, whole
    buffer      it may differ between replicas: the first replica's counts"""

    __slots__ = ("tensor", "shape", "mesh", "placements", "flat", "boxes", "same_dims", "alone", "buffer")

    def __init__(self, tensor: Any, *, shape: Sequence[int] | None = None, mesh: Any = None, placements: Any = None,
                 flat: Sequence[int] | None = None, boxes: Sequence[Box] | None = None,
                 same_dims: str | Sequence[str] | None = None, alone: bool = False, buffer: bool = False) -> None:
        if isinstance(tensor, Shard):
            raise TypeError("Shard: tensor is a Shard itself: give its tensor")
        if flat is not None and boxes is not None:
            raise ValueError("Shard: give flat or boxes, not both")
        if boxes is not None and placements is not None:
            raise ValueError("Shard: boxes already say what is held: give no placements")
        if alone and not (mesh is None and placements is None and flat is None and boxes is None):
            raise ValueError("Shard: with alone=True give no mesh, placements, flat or boxes")
        if (flat is not None or boxes is not None) and shape is None:
            raise ValueError("Shard: flat and boxes need the shape of the logical tensor")
        self.tensor, self.mesh, self.placements, self.alone, self.buffer = tensor, mesh, placements, alone, buffer
        self.shape = None if shape is None else tuple(int(n) for n in shape)
        self.flat = None if flat is None else tuple(int(n) for n in flat)
        if self.flat is not None and len(self.flat) not in (2, 3):
            raise ValueError("Shard: flat is (from, to) or (from, to, length)")
        self.boxes = None if boxes is None else tuple(_box(box, self.shape or ()) for box in boxes)
        self.same_dims = same_dims if same_dims is None or isinstance(same_dims, str) else ",".join(same_dims)

    def _of(self, tensor: Any) -> Shard:
        """The same part of another tensor."""
        return Shard(tensor, **{name: getattr(self, name) for name in self.__slots__[1:]})

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__[1:]
                          if getattr(self, name) not in (None, False))
        return f"vckpt.Shard({tuple(self.tensor.shape)}{', ' if given else ''}{given})"


def _box(box: Box, shape: Sequence[int]) -> PlainBox:
    """((offsets), (sizes)), also from a tuple of slices."""
    parts: tuple[Any, ...] = tuple(box)
    if all(isinstance(part, slice) for part in parts) and len(parts) == len(shape):
        ends = [part.indices(n) for part, n in zip(parts, shape)]
        if any(step != 1 for _, _, step in ends):
            raise ValueError("Shard: a slice of a box must have step 1")
        return tuple(a for a, _, _ in ends), tuple(max(b - a, 0) for a, b, _ in ends)
    if len(parts) != 2 or len(parts[0]) != len(shape) or len(parts[1]) != len(shape):
        raise ValueError(f"Shard: a box is (offsets, sizes), {len(shape)} of each, or a slice for each dimension")
    return tuple(int(n) for n in parts[0]), tuple(int(n) for n in parts[1])


@functools.lru_cache(4096)
def _held(shape: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_uint64], int]:
    """A shape as the library takes it, and its address. Many tensors have the same."""
    array = _lib.u64s(shape)
    return array, ctypes.addressof(array)


class Layout(NamedTuple):
    """Mesh, placements and so on of one tensor, for the library."""
    shape: Sequence[int]
    mesh: _lib.Mesh | None = None
    placements: str | None = None
    flat: Sequence[int] | None = None
    boxes: Sequence[PlainBox] | None = None
    same_dims: str | None = None


class Entry:
    """One tensor as the library takes it. `absent`: this rank is not in its mesh and holds nothing."""

    __slots__ = ("component", "name", "row", "keep", "absent", "device", "mesh")
    component: str
    name: str
    row: bytes
    keep: list[Any]
    absent: bool
    device: torch.device | None
    mesh: _lib.Mesh | None

    def address(self, tensor: Any, refs: list[object]) -> int | None:
        """The address of the data now, or STALE. Appends to refs what has to stay alive beside `tensor`."""
        raise NotImplementedError

    def fill(self, component: str, name: str, layout: Layout, dtype: int, local_shape: Sequence[int] | None,
             strides: Sequence[int] | None, flags: int = 0) -> Self:
        """local_shape None: not compared; strides in bytes, None: contiguous."""
        shape, at = _held(tuple(layout.shape))
        keep: list[Any] = [_lib.text(component, "component"), _lib.text(name, "tensor"), shape]
        row = _lib.Tensor(keep[0], keep[1], at, ndim=len(layout.shape), dtype=dtype, flags=flags)
        if layout.mesh is not None:
            row.mesh = layout.mesh.pointer
            keep.append(layout.mesh)
        if layout.placements is not None:
            keep.append(_lib.text(layout.placements, "placements"))
            row.placements = keep[-1]
        if layout.same_dims is not None:
            keep.append(_lib.text(layout.same_dims, "same_dims"))
            row.same_dims = keep[-1]
        if layout.flat is not None:
            keep.append(_lib.u64s((*layout.flat, 0)[:3]))
            row.flat = ctypes.addressof(keep[-1])
        if layout.boxes is not None:
            keep.append(_lib.u64s([n for offsets, sizes in layout.boxes for pair in zip(offsets, sizes) for n in pair]))
            row.boxes, row.nboxes = ctypes.addressof(keep[-1]), len(layout.boxes)
            row.flags |= _lib.BOXES
        if local_shape is not None:
            shape, row.local_shape = _held(tuple(local_shape))
            row.local_ndim = len(local_shape)
            keep.append(shape)
            if strides is not None:
                keep.append(_lib.i64s(strides))
                row.strides = ctypes.addressof(keep[-1])
        self.component, self.name, self.row, self.keep, self.mesh = component, name, bytes(row), keep, layout.mesh
        self.absent = False
        return self

    def at(self, rank: int) -> Self:
        """Marks it absent on a rank outside of the tensor's mesh."""
        self.absent = self.mesh is not None and rank not in self.mesh.members
        return self


def check_items(layout: Layout, items: int, path: Where) -> None:
    """Refuses a buffer with more or fewer items than its flat range or boxes have."""
    if layout.boxes is not None:
        what, expected = "boxes have", sum(math.prod(sizes) for _, sizes in layout.boxes)
    elif layout.flat is not None:
        first, last = layout.flat[:2]
        if not 0 <= first <= last:
            raise Refused(path, f"flat is {layout.flat}: expected (from, to) with 0 <= from <= to")
        what, expected = "flat range has", last - first
    else:
        return
    if items != expected:
        raise Refused(path, f"the {what} {expected} items, the tensor that was given for them has {items}")


class NumpyEntry(Entry):
    __slots__ = ("dtype", "shape", "strides", "copy")

    def __init__(self, component: str, name: str, path: KeyPath, array: NDArray[Any], layout: Layout,
                 flags: int) -> None:
        self.dtype, self.shape, self.strides, self.device = array.dtype, array.shape, array.strides, None
        number = numpy_number(array.dtype)
        if number is None:
            raise Refused(path, f"a numpy array of dtype {array.dtype} cannot be kept: {advice.of_array(array)}")
        overlap = any(stride <= 0 and n > 1 for stride, n in zip(array.strides, array.shape)) and array.size
        flattened = layout.flat is not None or layout.boxes is not None
        self.copy = bool(not array.dtype.isnative or overlap or (flattened and not array.flags.c_contiguous))
        check_items(layout, array.size, path)
        strides = None if self.copy or array.flags.c_contiguous else array.strides
        self.fill(component, name, layout, number, None if flattened else array.shape, strides, flags)

    def address(self, array: Any, refs: list[object]) -> int | None:
        if (type(array) is not np.ndarray or array.dtype != self.dtype or array.shape != self.shape
                or array.strides != self.strides):
            return STALE
        if self.copy:
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(self.shape)
            refs.append(array)
        return numpy_address(array)


class ShardEntry(Entry):
    """Wraps the entry of the Shard's tensor; stale once anything that the Shard says has changed."""

    __slots__ = ("said", "inner")

    def __init__(self, said: Said, inner: Entry) -> None:
        self.said, self.inner = said, inner
        self.component, self.name, self.row, self.keep = inner.component, inner.name, inner.row, inner.keep
        self.absent, self.device, self.mesh = inner.absent, inner.device, inner.mesh

    def address(self, shard: Any, refs: list[object]) -> int | None:
        if type(shard) is not Shard or said(shard) != self.said:
            return STALE
        return self.inner.address(shard.tensor, refs)


def said(shard: Shard) -> Said:
    placements = (shard.placements if shard.placements is None or isinstance(shard.placements, str)
                  else tuple(shard.placements))
    mesh = shard.mesh if not isinstance(shard.mesh, (tuple, list)) else (shard.mesh[0], tuple(shard.mesh[1]))
    return shard.shape, mesh, placements, shard.flat, shard.boxes, shard.same_dims, shard.alone, shard.buffer
