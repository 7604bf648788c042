# SPDX-License-Identifier: Apache-2.0
"""A tensor of an open step (step.py), which is read when it is asked for, and only the part that is."""
from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import _lib
from .arrays import empty, torch_tensor
from .shard import numpy_address

Stored = tuple[int, int, tuple[int, ...], int]      # number, dtype, shape, bytes
Part: TypeAlias = SupportsIndex | slice | EllipsisType
Cut = tuple[int, int, Any]      # of a dimension: offset and size of what is read, and how that is indexed


class OpenStep(Protocol):
    """What a tensor needs of its step."""

    def _at(self) -> int:
        ...

    def _read(self, number: int, pairs: ctypes.Array[ctypes.c_uint64] | None, address: int,
              strides: Sequence[int]) -> None:
        ...


class LazyTensor:
    """A tensor of an open step: what is known of it, and reads of it or of a part. Every read goes to the store.

    t[2:5, ::2] is a numpy array of that part, as numpy's own indexing gives it: whole numbers, slices and an ellipsis.
    A slice with a step, also a negative one, reads the box around it, and takes its items from that. t.torch() and
    t.torch(slice(2, 5)) are torch's tensors, t.numpy() and np.asarray(t) the whole as an array. All this does not
    depend on the step's framework. Where numpy lacks the dtype: as docs/python.md says.

    numpy's functions take it for an array: np.array_equal(t, x), np.testing. t == x raises TypeError, and there is no
    hash: h5py and zarr compare which dataset is meant, which is False for equal numbers and is taken for an answer
    about them; elementwise, as numpy compares, every `t in list` would read whole tensors."""

    __slots__ = ("_step", "_stored", "component", "name", "dtype", "shape", "nbytes")

    def __init__(self, step: OpenStep, component: str, name: str, stored: Stored) -> None:
        self._step, self._stored, self.component, self.name = step, stored, component, name
        self.dtype: str = _lib.DTYPES[stored[1]] or ""          # "f32"
        self.shape: tuple[int, ...] = stored[2]
        self.nbytes: int = stored[3]

    def __repr__(self) -> str:
        return f"<vckpt.LazyTensor {self.component}/{self.name}: {self.dtype} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.component}/{self.name} has no dimensions, and so no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self.component}/{self.name} is not read to be compared: compare t.numpy() or t.torch(), or "
                        "the t.digest() of two tensors")

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._step, (self.component, self.name))

    def __getitem__(self, key: Part | tuple[Part, ...]) -> Any:
        cuts = [_cut(part, n, d, self) for d, (part, n) in enumerate(zip(self._parts(key), self.shape))]
        sizes = tuple(size for _, size, _ in cuts)
        array = empty(sizes, self._stored[1], f"{self.component}/{self.name}")
        if array.size:
            pairs = _lib.u64s([number for offset, size, _ in cuts for number in (offset, size)])
            self._step._read(self._stored[0], pairs, numpy_address(array), array.strides)
        found = array[tuple(how for *_, how in cuts)] if cuts else array
        # what a step leaves out is let go
        return found.copy() if isinstance(found, np.ndarray) and found.size < array.size else found

    def digest(self) -> str:
        """64 hexadecimal digits. Tensors of one store with equal digests have equal dtypes, shapes and bytes, whatever
        their names and steps. With equal bytes they may have different digests if ranks cut them differently. Nothing
        of the tensor itself is read."""
        found = (ctypes.c_uint8 * 32)()
        _lib.call("vckpt_step_digest", self._step._at(), self._stored[0], found)
        return bytes(found).hex()

    def _parts(self, key: Part | tuple[Part, ...]) -> list[SupportsIndex | slice]:
        """The part of each dimension."""
        parts = list(key) if isinstance(key, tuple) else [key]
        places = [at for at, part in enumerate(parts) if part is Ellipsis] or [len(parts)]
        given = [part for part in parts if part is not Ellipsis]
        if len(parts) - len(given) > 1 or len(given) > self.ndim:
            raise IndexError(f"{self.component}/{self.name} has {self.ndim} dimensions: give a number or a slice for "
                             f"each at most, and one ellipsis, not {key!r}")
        given[places[0]:places[0]] = [slice(None)] * (self.ndim - len(given))
        return given

    def numpy(self) -> NDArray[Any]:
        """All of it."""
        found: NDArray[Any] = self[...]
        return found

    def torch(self, key: Part | tuple[Part, ...] = ...) -> Any:
        """All of it, or the part that t[key] is, as a torch tensor, which imports torch."""
        return torch_tensor(np.ascontiguousarray(self[key]).reshape(np.shape(self[key])), self._stored[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.component}/{self.name} is read from the store, so there is nothing to share: "
                             "leave out copy=False")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)


def _cut(part: SupportsIndex | slice, n: int, d: int, tensor: LazyTensor) -> Cut:
    if isinstance(part, slice):
        chosen = range(*part.indices(n))
        if not chosen:
            return 0, 0, slice(None)
        return min(chosen[0], chosen[-1]), abs(chosen[-1] - chosen[0]) + 1, slice(None, None, chosen.step)
    where = f"{tensor.component}/{tensor.name}, dimension {d}"
    if isinstance(part, (bool, np.bool_)) or not hasattr(part, "__index__"):
        raise IndexError(f"{where}: expected a whole number, a slice or an ellipsis, not {part!r}: read the part and "
                         "index the array")
    index = operator.index(part)
    if not -n <= index < n:
        raise IndexError(f"{where}: {index} is out of range for a size of {n}")
    return index % n, 1, 0
