# SPDX-License-Identifier: Apache-2.0
"""Tensors of the state that are filled from a step, all of them in one load of the library (loads.py). Which boxes of a
tensor this rank holds, and where they lie in its memory, follows from the entry that a save would make of it (shard.py,
torch_state.py): so loading and saving cannot differ in that.

Memory of the CPU and of CUDA devices that has the dtype of the step is read into as it is; any other by way of a copy,
which the library converts (docs/load.md has the rules)."""
from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from . import _lib, meshes
from .arrays import numpy_dtype
from .entries import make_entry
from .loads import Extents, described, read
from .shard import Refused, Shard
from .tensors import torch_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from .loads import Damage, Described, How
    from .meshes import SaveMesh
    from .step import Step
    from .values_text import KeyPath

Memory: TypeAlias = "NDArray[Any] | torch.Tensor"

STAGED_BYTES = 512 << 20        # of host memory that is read into before it is copied to where it belongs


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
        self.flattened = bool(self.row.flat or self.row.flags & _lib.BOXES)
        if not self.row.mesh and not self.whole:
            self.row.mesh = meshes.native(f"ranks={world}").pointer
        if hasattr(self.memory, "_local_tensor"):
            self.memory = torch_state().settled(self.memory._local_tensor)

    def _words(self, address: int | None, count: int) -> tuple[int, ...]:
        return tuple((ctypes.c_uint64 * count).from_address(address)) if address and count else ()

    def fits(self, dtype: int) -> bool:
        """Can the memory take items of that dtype?"""
        return convertible(dtype, self.row.dtype)

    def refusal(self) -> str | None:
        return refusal(self.memory)

    def described(self, name: str, dtype: int, address: int, strides: Sequence[int] | None,
                  device: bool = False) -> Described:
        """What a load is told: items of the tensor that the step calls `name`, and of its dtype, go to that address.
        strides: in bytes; None: contiguous. device: it is memory of a CUDA device."""
        row = _lib.Tensor.from_buffer_copy(self.row)
        row.name, row.dtype, row.data, row.strides = _lib.text(name, "tensor"), dtype, address, None
        row.flags = row.flags & _lib.BOXES | (_lib.DEVICE if device else 0)
        keep = None if strides is None else _lib.i64s(strides)
        if keep is not None:
            row.strides = ctypes.addressof(keep)
        return row, [self.entry, self.row, keep, self.memory]

    def direct(self, name: str, dtype: int) -> Described | None:
        """Of memory that can be read into as it is, or None."""
        device = cuda_device(self.memory) is not None
        if self.row.dtype != dtype or not (device or isinstance(self.memory, np.ndarray)
                                           or self.memory.device.type == "cpu"):
            return None
        found = _direct(self.memory, not self.flattened)
        return found and self.described(name, dtype, *found, device)

    def staged(self, name: str, dtype: int) -> tuple[NDArray[Any], Described]:
        """(an array of the step's dtype that is read into, and then assigned; what a load is told)"""
        array = np.zeros(tuple(self.memory.shape), numpy_dtype(dtype))
        return array, self.described(name, dtype, array.__array_interface__["data"][0], None)

    @property
    def items(self) -> int:
        return math.prod(self.memory.shape)

    def cut(self) -> object:
        """Which items of the logical tensor the memory has, in which order. A whole tensor's are all, in any shape."""
        row = self.row
        if self.whole:
            return None
        boxes = self._words(row.boxes, 2 * row.ndim * row.nboxes) if row.flags & _lib.BOXES else None
        return self.shape, row.mesh, row.placements, self._words(row.flat, 3), boxes

    def place(self) -> object:
        """Equal for memory whose items are the same ones in the same order."""
        memory = self.memory
        contiguous = memory.flags.c_contiguous if isinstance(memory, np.ndarray) else memory.is_contiguous()
        strides = memory.strides if isinstance(memory, np.ndarray) else memory.stride()
        return (*self.extent(), self.row.dtype, None if contiguous else (tuple(memory.shape), tuple(strides)))

    def extent(self) -> tuple[int, int]:
        """The addresses between which the memory lies."""
        if isinstance(self.memory, np.ndarray):
            begin, item = self.memory.__array_interface__["data"][0], self.memory.itemsize
            strides: Sequence[int] = self.memory.strides
        else:
            begin, item = self.memory.data_ptr(), self.memory.element_size()
            strides = [n * item for n in self.memory.stride()]
        return begin, begin + sum((n - 1) * step for n, step in zip(self.memory.shape, strides)) + item


class Made:
    """A whole tensor that a load makes: `array`, of the step's dtype."""

    def __init__(self, component: str, name: str, dtype: int, shape: tuple[int, ...]) -> None:
        self.array = np.zeros(shape, numpy_dtype(dtype))
        self.items = self.array.size
        self.row = described(component, name, dtype, shape, self.array.__array_interface__["data"][0])

    def direct(self, *_: object) -> Described | None:
        return self.row

    def extent(self) -> tuple[int, int]:
        begin: int = self.row[0].data
        return begin, begin + self.array.nbytes


class Fill(NamedTuple):
    """A tensor of the step and where it goes."""
    to: Destination | Made
    name: str                       # in the step
    dtype: int                      # of the step


class Work:
    """What is read, in which loads of the library: what can be read into as it is, in one or more where names share
    memory, then the others by way of host memory, in loads of STAGED_BYTES."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        self.rounds: list[_Round] = []
        devices: dict[torch.device, None] = {}
        rest: list[tuple[Fill, Destination]] = []
        for one in fills:
            found = one.to.direct(one.name, one.dtype) if one.to.items else None
            if found is not None:
                _add(self.rounds, found, one.to.extent())
                device = cuda_device(one.to.memory) if isinstance(one.to, Destination) else None
                if device is not None:
                    devices[device] = None
            elif isinstance(one.to, Destination) and one.to.items:
                rest.append((one, one.to))
        self.batches = list(_batches(rest))
        self.streams = _streams(devices)
        self.device = next(iter(devices)) if len(devices) == 1 else None    # of CUDA, whose memory is filled

    @property
    def loads(self) -> int:
        return len(self.rounds) + len(self.batches)

    def read(self, step: Step, rank: int, how: How) -> list[Damage]:
        """Gives what did not arrive, where that is no error. Ranks that read for each other take part in as many loads
        as the one of them that needs most."""
        damaged = [part for each in self.rounds
                   for part in read(step, rank, each.tensors, how._replace(streams=self.streams))]
        damaged += [part for batch in self.batches for part in _fill_staged(step, rank, batch, how)]
        if how.shared:
            for _ in range(self.loads, how.shared.loads):
                read(step, rank, [], how)
        return list(dict.fromkeys(damaged))


def _streams(devices: Iterable[torch.device]) -> tuple[int, ...]:
    """On which the caller works with memory of these devices; the default streams are known to the library."""
    cuda = sys.modules["torch"].cuda if devices else None
    return tuple(filter(None, (cuda.current_stream(device).cuda_stream for device in devices))) if cuda else ()


class _Round:
    """Tensors of one load, no two of which share memory."""

    def __init__(self) -> None:
        self.tensors: list[Described] = []
        self.extents = Extents()


def _add(rounds: list[_Round], found: Described, extent: tuple[int, int]) -> None:
    """Names that are tied have the same memory: the last of them is read by the last load, as if one were read after
    another."""
    after = max((number for number, one in enumerate(rounds) if one.extents.overlap(*extent)), default=-1)
    if after + 1 == len(rounds):
        rounds.append(_Round())
    rounds[after + 1].tensors.append(found)
    rounds[after + 1].extents.add(*extent)


def _batches(rest: list[tuple[Fill, Destination]]) -> Iterator[list[tuple[Fill, Destination]]]:
    batch: list[tuple[Fill, Destination]] = []
    size = 0
    for one, to in rest:
        needed = to.items * _lib.ITEM_BYTES[one.dtype]
        if batch and size + needed > STAGED_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((one, to))
        size += needed
    if batch:
        yield batch


def _fill_staged(step: Step, rank: int, batch: list[tuple[Fill, Destination]], how: How) -> list[Damage]:
    arrays = [to.staged(one.name, one.dtype) for one, to in batch]
    damaged = read(step, rank, [row for _, row in arrays], how)
    for (one, to), (array, _) in zip(batch, arrays):
        assign(to.memory, array, one.dtype, to.row.dtype)
    return damaged


def _direct(memory: Memory, strided: bool) -> tuple[int, Sequence[int] | None] | None:
    """(address, strides in bytes or None) of memory that can be read into, or None. strided: it need not be
    contiguous."""
    if isinstance(memory, np.ndarray):
        contiguous = memory.flags.c_contiguous
        right = memory.dtype.isnative and (contiguous or (strided and all(n > 0 for n in memory.strides)))
        return (memory.__array_interface__["data"][0], None if contiguous else memory.strides) if right else None
    if memory.is_conj() or memory.is_neg():
        return None
    if memory.is_contiguous():
        return memory.data_ptr(), None
    return (memory.data_ptr(), [n * memory.element_size() for n in memory.stride()]) if (
        strided and _apart(memory)) else None


def cuda_device(memory: object) -> torch.device | None:
    """The CUDA device whose memory a tensor is. torch calls ROCm's devices cuda, too."""
    device = getattr(memory, "device", None)
    if getattr(device, "type", None) != "cuda" or not sys.modules["torch"].version.cuda:
        return None
    found: torch.device = device
    return found


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


def convertible(dtype: int, to: int) -> bool:
    """Do the library's rules say what items of a dtype are in another one?"""
    return dtype == to or _lib.lib().vckpt_convert(dtype, to, None, None, 0, None) == 0


def assign(memory: Memory, array: NDArray[Any], dtype: int, to: int) -> None:
    """The items of an array of a dtype (its number) into a tensor or array of the same shape, whose dtype is `to`."""
    if dtype != to:
        source, array = np.ascontiguousarray(array), np.empty(array.shape, numpy_dtype(to))
        _lib.call("vckpt_convert", dtype, to, source.ctypes.data, array.ctypes.data, array.size)
    if isinstance(memory, np.ndarray):
        memory[...] = array
    else:
        memory.detach().copy_(torch_state().from_numpy(array, to))
