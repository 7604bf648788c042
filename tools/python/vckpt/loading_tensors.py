# SPDX-License-Identifier: Apache-2.0
"""A tensor of the state that is filled from a step. Which boxes of it this rank holds, and where they lie in its
memory, follows from the entry that a save would make of it (shard.py, torch_state.py): so loading and saving cannot
differ in that.

Memory of the CPU that has the dtype of the step is read into as it is; any other by way of a copy, which converts as
torch's and numpy's own assignments do."""
from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import _lib, meshes
from .entries import make_entry
from .shard import Refused, Shard
from .step import is_raw, numpy_dtype
from .tensors import torch_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from .meshes import SaveMesh
    from .step import Step
    from .values_text import KeyPath

# offset and size of each dimension; place; strides
LocalBox: TypeAlias = "tuple[Sequence[int], int, Sequence[int]]"
Memory: TypeAlias = "NDArray[Any] | torch.Tensor"


class Destination:
    """`shape`: of the logical tensor. `absent`: this rank is not in its mesh, and has nothing to be filled."""

    def __init__(self, component: str, name: str, path: KeyPath, tensor: Any, mesh: SaveMesh | None, rank: int,
                 world: int) -> None:
        """mesh: of the load, for Shards that have none; (names, ranks, native) or None."""
        self.memory = tensor.tensor if type(tensor) is Shard else tensor
        if getattr(getattr(self.memory, "device", None), "type", None) == "meta":
            raise Refused(path, "a tensor on the meta device has no memory to be filled: load after it was made "
                                "(to_empty)")
        self.entry = make_entry(component, name, path, tensor, mesh if type(tensor) is Shard else None, rank)
        self.row, self.absent, self.rank = _lib.Tensor.from_buffer_copy(self.entry.row), self.entry.absent, rank
        self.shape = self._words(self.row.shape, self.row.ndim)
        self.whole = not (self.row.mesh or self.row.placements or self.row.flat or self.row.flags & _lib.BOXES)
        if not self.row.mesh:
            self.row.mesh = meshes.native(f"ranks={world}").pointer
        if hasattr(self.memory, "_local_tensor"):
            self.memory = torch_state().settled(self.memory._local_tensor)

    def _words(self, address: int | None, count: int) -> tuple[int, ...]:
        return tuple((ctypes.c_uint64 * count).from_address(address)) if address and count else ()

    def fits(self, dtype: int) -> bool:
        """Can the memory take items of that dtype? Without ml_dtypes numpy knows no values of bf16."""
        return self.row.dtype == dtype or not (isinstance(self.memory, np.ndarray) and is_raw(numpy_dtype(dtype)))

    def refusal(self) -> str | None:
        return refusal(self.memory)

    def boxes(self) -> list[LocalBox]:
        """[(pairs of offset and size, place of the first item, strides)] of the boxes in the local tensor, in items,
        row-major."""
        ndim, row = self.row.ndim, self.row
        if row.flags & _lib.BOXES:
            return list(self._one_after_another(self._words(row.boxes, 2 * ndim * row.nboxes), ndim))
        words = _lib.numbers("vckpt_tensor_boxes", ctypes.byref(row), self.rank, each=3 * ndim + 1)
        return [(words[at:at + 2 * ndim], words[at + 2 * ndim], words[at + 2 * ndim + 1:at + 3 * ndim + 1])
                for at in range(0, len(words), 3 * ndim + 1)]

    def _one_after_another(self, words: tuple[int, ...], ndim: int) -> Iterator[LocalBox]:
        place = 0
        for at in range(0, len(words), 2 * ndim):
            pairs = words[at:at + 2 * ndim]
            sizes = pairs[1::2]
            items = int(np.prod(sizes, dtype=np.int64))
            if items:
                yield pairs, place, _row_major(sizes)
            place += items

    def fill(self, step: Step, component: str, name: str) -> None:
        number, dtype, _, _ = step._tensors[component, name]
        found = _direct(self.memory, self.whole) if self.row.dtype == dtype else None
        if found is None:
            staged = np.zeros(tuple(self.memory.shape), numpy_dtype(dtype))
            self._read(step, number, staged.__array_interface__["data"][0], staged.strides, staged.itemsize)
            assign(self.memory, staged, dtype)
        else:
            self._read(step, number, *found, _lib.ITEM_BYTES[dtype])

    def _read(self, step: Step, number: int, address: int, strides: Sequence[int], item: int) -> None:
        if self.whole:
            return step._read(number, None, address, strides)
        for pairs, place, steps in self.boxes():
            step._read(number, _lib.u64s(pairs), address + place * item, [n * item for n in steps])


def _row_major(sizes: Sequence[int]) -> list[int]:
    steps = [1] * len(sizes)
    for d in reversed(range(len(sizes) - 1)):
        steps[d] = steps[d + 1] * sizes[d + 1]
    return steps


def _direct(memory: Memory, whole: bool) -> tuple[int, Sequence[int]] | None:
    """(address, strides in bytes) of memory that can be read into, or None. whole: any strides will do, for it is one
    box."""
    if isinstance(memory, np.ndarray):
        right = memory.dtype.isnative and (memory.flags.c_contiguous or (whole and all(n > 0 for n in memory.strides)))
        return (memory.__array_interface__["data"][0], memory.strides) if right else None
    if memory.device.type != "cpu" or memory.is_conj() or memory.is_neg():
        return None
    if not (memory.is_contiguous() or (whole and _apart(memory))):
        return None
    return memory.data_ptr(), [n * memory.element_size() for n in memory.stride()]


def refusal(memory: Memory) -> str | None:
    """Why nothing can be loaded into it, as the end of a sentence, or None."""
    if isinstance(memory, np.ndarray):
        return None if memory.flags.writeable else "is read-only: nothing can be loaded into it"
    if not _expanded(memory):
        return None
    return "has items that share memory, as expand() makes them: nothing can be loaded into it (clone() it)"


def _expanded(memory: torch.Tensor) -> bool:
    import torch
    return bool(torch._debug_has_internal_overlap(memory) == 1)


def _apart(memory: torch.Tensor) -> bool:
    """No two items of a tensor share memory."""
    import torch
    return bool(torch._debug_has_internal_overlap(memory) == 0)


def assign(memory: Memory, array: NDArray[Any], dtype: int) -> None:
    """The items of an array of a dtype (its number) into a tensor or array of the same shape."""
    if isinstance(memory, np.ndarray):
        memory[...] = array
    else:
        memory.detach().copy_(torch_state().from_numpy(array, dtype))
