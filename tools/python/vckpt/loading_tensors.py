# SPDX-License-Identifier: Apache-2.0
"""Tensors of the state that are filled from a step, all of them in one load of the library (loads.py). The boxes of a
tensor that this rank holds, and their places in its memory, follow from the entry that a save would make of it
(shard.py, torch_state.py): so loading and saving cannot differ in that.

Memory of the CPU and of CUDA devices with the dtype of the step is read into as it is; any other through a copy, which
the library converts (docs/load.md has the rules)."""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from . import _lib, meshes
from .arrays import numpy_dtype
from .entries import make_entry
from .lazy import Stored
from .loads import Damage, Extents, How, read, rows
from .meshes import SaveMesh
from .shard import Refused, Shard, numpy_address, numpy_number
from .step import Step
from .tensors import dotted, torch_state
from .values_text import KeyPath

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Memory: TypeAlias = "NDArray[Any] | torch.Tensor"

STAGED_BYTES = 512 << 20        # of host memory that is read into before it is copied to where it belongs


class Destination:
    """A whole tensor, in memory that a load fills: of the state, or made by the load. `shape`: of the logical tensor;
    `absent`: this rank has nothing of it to be filled."""

    __slots__ = ("address", "contiguous", "device", "dtype", "items", "memory", "shape", "sound")
    absent, whole, flattened = False, True, False

    def __init__(self, memory: Memory, dtype: int, device: torch.device | None = None) -> None:
        """device: the CUDA device whose memory it is."""
        self.memory, self.dtype, self.shape, self.device = memory, dtype, memory.shape, device
        self.look()

    def look(self) -> None:
        memory = self.memory
        if isinstance(memory, np.ndarray):
            flags = memory.flags
            self.items, self.contiguous, self.sound = memory.size, flags.c_contiguous, flags.writeable
            self.address = numpy_address(memory)
        else:
            self.items, self.contiguous = memory.numel(), memory.is_contiguous()
            self.address, self.sound = memory.data_ptr(), self.contiguous

    def refusal(self) -> str | None:
        """Why nothing can be loaded into its memory, or None."""
        return None if self.sound else refusal(self.memory)

    def strides(self) -> Sequence[int]:
        """In bytes."""
        if isinstance(self.memory, np.ndarray):
            return self.memory.strides
        return [n * self.memory.element_size() for n in self.memory.stride()]

    def is_direct(self, dtype: int) -> bool:
        """Can items of that dtype be read into the memory as it is?"""
        memory = self.memory
        if self.dtype != dtype:
            return False
        if isinstance(memory, np.ndarray):
            return memory.dtype.isnative and (self.contiguous or (not self.flattened
                                                                  and all(n > 0 for n in memory.strides)))
        if (self.device is None and memory.device.type != "cpu") or memory.is_conj() or memory.is_neg():
            return False
        return self.contiguous or (not self.flattened and _overlap(memory) == 0)

    def row(self, row: _lib.Tensor, fill: Fill, memory: Destination) -> list[Any]:
        """Completes a row that describes a whole tensor in contiguous memory of the CPU, and gives what that points to.
        memory: what is read into, this or an array that is assigned to it."""
        row.flags |= _lib.DEVICE if memory.device else 0
        keep = [] if memory.contiguous else [_lib.i64s(memory.strides())]
        row.strides = ctypes.addressof(keep[0]) if keep else None
        return keep

    def staging(self, dtype: int) -> Destination:
        """Memory of that dtype that is read into, and then assigned."""
        return Destination(np.zeros(tuple(self.memory.shape), numpy_dtype(dtype)), dtype)

    def cut(self) -> object:
        """Which items of the logical tensor the memory has, in which order. None: all, whatever the shape."""
        return None

    def place(self) -> object:
        """Equal for memory whose items are the same ones in the same order."""
        if self.contiguous:
            return self.address, self.items, self.dtype
        return (*self.extent(), self.dtype, tuple(self.memory.shape), tuple(self.strides()))

    def extent(self) -> tuple[int, int]:
        """(first address, address after the last)."""
        item = _lib.ITEM_BYTES[self.dtype]
        if self.contiguous:
            return self.address, self.address + self.items * item
        spans = ((n - 1) * step for n, step in zip(self.memory.shape, self.strides()))
        return self.address, self.address + sum(spans) + item


class Part(Destination):
    """What this rank has of a tensor, as the entry says that a save makes of it."""

    def __init__(self, path: KeyPath, tensor: Any, mesh: SaveMesh | None, rank: int, world: int) -> None:
        self.memory = tensor.tensor if type(tensor) is Shard else tensor
        if getattr(getattr(self.memory, "device", None), "type", None) == "meta":
            raise Refused(path, "a tensor on the meta device has no memory to be filled: load after it was made "
                                "(to_empty)")
        self.entry = make_entry(path[0], dotted(path), path, tensor, mesh if type(tensor) is Shard else None, rank)
        self.said, self.absent = _lib.Tensor.from_buffer_copy(self.entry.row), self.entry.absent
        self.dtype, self.shape = self.said.dtype, self._words(self.said.shape, self.said.ndim)
        boxes = self.said.flags & _lib.BOXES
        self.whole = not (self.said.mesh or self.said.placements or self.said.flat or boxes)
        self.flattened = bool(self.said.flat or boxes)
        if not self.said.mesh and not self.whole:
            self.said.mesh = meshes.native(f"ranks={world}").pointer
        if hasattr(self.memory, "_local_tensor"):
            self.memory = torch_state().settled(self.memory._local_tensor)
        self.device = cuda_device(self.memory)
        self.look()

    def _words(self, address: int | None, count: int) -> tuple[int, ...]:
        return tuple((ctypes.c_uint64 * count).from_address(address)) if address and count else ()

    def row(self, row: _lib.Tensor, fill: Fill, memory: Destination) -> list[Any]:
        name, dtype, address = _lib.text(fill.name, "tensor"), row.dtype, row.data
        ctypes.pointer(row)[0] = self.said
        row.name, row.dtype, row.data, row.strides, row.flags = name, dtype, address, None, row.flags & _lib.BOXES
        return [name, *super().row(row, fill, memory)]

    def cut(self) -> object:
        said = self.said
        if self.whole:
            return None
        boxes = self._words(said.boxes, 2 * said.ndim * said.nboxes) if said.flags & _lib.BOXES else None
        return self.shape, said.mesh, said.placements, self._words(said.flat, 3), boxes


def destination(path: KeyPath, tensor: Any, mesh: SaveMesh | None, rank: int, world: int) -> Destination:
    """mesh: of the load, for Shards that have none; (names, ranks, native) or None."""
    if type(tensor) is np.ndarray:
        number = numpy_number(tensor.dtype)
        if number is not None:
            return Destination(tensor, number)
    elif type(tensor) is not Shard and torch_state().is_memory(tensor):
        device = cuda_device(tensor)
        if device is not None or tensor.device.type == "cpu":
            return Destination(tensor, torch_state().DTYPES[tensor.dtype], device)
    return Part(path, tensor, mesh, rank, world)


class Fill(NamedTuple):
    """A tensor of the step and where it goes."""
    to: Destination
    name: str                       # in the step
    stored: Stored


class Work:
    """What is read, in which loads of the library: first what can be read into as it is, in several loads where names
    share memory, then the rest through host memory, in loads of STAGED_BYTES."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        some = [one for one in fills if one.to.items]
        direct = [one.to.is_direct(one.stored[1]) for one in some]
        self.rounds = _rounds([one for one, way in zip(some, direct) if way])
        self.batches = list(_batches(one for one, way in zip(some, direct) if not way))
        devices = dict.fromkeys(one.to.device for each in self.rounds for one in each)
        devices.pop(None, None)
        self.streams = _streams(devices)
        self.device = next(iter(devices)) if len(devices) == 1 else None    # of CUDA, whose memory is filled

    @property
    def loads(self) -> int:
        return len(self.rounds) + len(self.batches)

    def read(self, step: Step, rank: int, how: How) -> list[Damage]:
        """Gives what did not arrive, where that is no error. Ranks that read for each other all take part in as many
        loads as the one that needs most."""
        damaged = [part for fills in self.rounds
                   for part in _read(step, rank, fills, [one.to for one in fills], how._replace(streams=self.streams))]
        damaged += [part for batch in self.batches for part in _fill_staged(step, rank, batch, how)]
        if how.shared:
            for _ in range(self.loads, how.shared.loads):
                read(step, rank, rows([]), how)
        return list(dict.fromkeys(damaged))


def _read(step: Step, rank: int, fills: Sequence[Fill], memory: Sequence[Destination], how: How) -> list[Damage]:
    """Reads the fills into that memory. Most are whole and contiguous: their rows are made all together."""
    table = step._rows([one.stored[0] for one in fills])
    table[:, _lib.DATA_WORD] = [to.address for to in memory]
    into = rows(table)
    keep = [one.to.row(into[number], one, to) for number, (one, to) in enumerate(zip(fills, memory))
            if type(one.to) is Part or not to.contiguous or to.device]
    found = read(step, rank, into, how)
    del keep                                # what the rows point to
    return found


def _streams(devices: Iterable[torch.device]) -> tuple[int, ...]:
    """The streams on which the caller works with memory of these devices, without the default ones."""
    cuda = sys.modules["torch"].cuda if devices else None
    return tuple(filter(None, (cuda.current_stream(device).cuda_stream for device in devices))) if cuda else ()


def _rounds(fills: list[Fill]) -> list[list[Fill]]:
    """Loads in which no two tensors share memory. Names that are tied have the same memory: the last of them is read by
    the last load, as if one were read after another."""
    extents = [one.to.extent() for one in fills]
    if apart(extents):
        return [fills] if fills else []
    number = [0] * len(fills)
    for same in touching(extents):
        rounds: list[Extents] = []
        for one in sorted(same) if len(same) > 1 else ():
            after = max((at for at, taken in enumerate(rounds) if taken.overlap(*extents[one])), default=-1) + 1
            if after == len(rounds):
                rounds.append(Extents())
            rounds[after].add(*extents[one])
            number[one] = after
    result: list[list[Fill]] = [[] for _ in range(max(number, default=-1) + 1)]
    for fill, at in zip(fills, number):
        result[at].append(fill)
    return result


def apart(extents: list[tuple[int, int]]) -> bool:
    """Do no two of them overlap? Mostly so."""
    table = np.array(extents, np.uint64).reshape(-1, 2)
    begins, ends = table[table[:, 0].argsort()].T
    return bool((begins[1:] >= ends[:-1]).all())


def touching(extents: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Groups of extents that overlap, if only by way of others."""
    same: list[int] = []
    last = 0
    for one in sorted(range(len(extents)), key=extents.__getitem__):
        if same and extents[one][0] >= last:
            yield same
            same = []
        same.append(one)
        last = max(last, extents[one][1])
    if same:
        yield same


def _batches(rest: Iterable[Fill]) -> Iterator[list[Fill]]:
    batch: list[Fill] = []
    size = 0
    for one in rest:
        needed = one.to.items * _lib.ITEM_BYTES[one.stored[1]]
        if batch and size + needed > STAGED_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += needed
    if batch:
        yield batch


def _fill_staged(step: Step, rank: int, batch: list[Fill], how: How) -> list[Damage]:
    staged = [one.to.staging(one.stored[1]) for one in batch]
    damaged = _read(step, rank, batch, staged, how)
    for one, from_ in zip(batch, staged):
        assign(one.to.memory, from_.memory, one.stored[1], one.to.dtype)
    return damaged


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
    if _overlap(memory) != 1:
        return None
    return "has items that share memory, as expand() makes them: nothing can be loaded into it (clone() it)"


def _overlap(memory: torch.Tensor) -> int:
    """0: no two items of a tensor share memory; 1: some do; 2: torch does not know."""
    import torch
    return int(torch._debug_has_internal_overlap(memory))


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
