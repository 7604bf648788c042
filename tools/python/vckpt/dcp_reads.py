# SPDX-License-Identifier: Apache-2.0
"""What a StorageReader reads into its planner's tensors, all of a rank's items by one load of the library. Memory of
the CPU that has the items as the step has them is read into as it is, if it is contiguous or for the whole of a tensor;
any other by way of host memory, 512 MiB at a time. A planner may give the same memory for several items, and empty it
as each is committed; so an item whose memory is wanted already is read by a load after that one."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from . import dcp_state, exchange, loads
from .dcp_state import Kept
from .loading_tensors import STAGED_BYTES
from .shard import PlainBox
from .step import Step
from .tensors import process_group
from .torch_state import DTYPES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

    Commit: TypeAlias = "Callable[[ReadItem, torch.Tensor], None]"


TIMEOUT_S = 600.0               # for ranks that do not come, with exchange=


def is_direct(target: torch.Tensor, kept: Kept) -> bool:
    """Can it be read into as it is? It has items of the step's dtype, and no two of them share memory."""
    return (target.device.type == "cpu" and target.dtype == kept.dtype and kept.dtype in DTYPES
            and target.layout == torch.strided and not target.is_conj() and not target.is_neg()
            and (target.is_contiguous() or torch._debug_has_internal_overlap(target) == 0))


class Reads:
    """One rank's. commit: is called with each item and its tensor once that has arrived."""

    def __init__(self, step: Step, commit: Commit, how: loads.How = loads.DEFAULT,
                 mode: exchange.Mode = "never") -> None:
        """mode: of the exchange with other ranks. Only the first load exchanges: how many more loads the others need is
        not known."""
        self.step, self.commit, self.watch = step, commit, loads.Watch()
        self.mode: exchange.Mode = mode if exchange.together(mode) else "never"
        self.path = f"{step.store}/{step.run}/{step.number}"
        self.found: exchange.Exchanged | None = None
        dist = process_group()
        self.how = how._replace(world=dist.get_world_size() if dist else 1, watch=self.watch)
        self.clear()

    def clear(self) -> None:
        # (item, its tensor, what is read into where that is another)
        self.items: list[tuple[ReadItem, torch.Tensor, torch.Tensor | None]] = []
        self.tensors: list[loads.Described] = []
        self.extents, self.staged_bytes = loads.Extents(), 0

    def add(self, item: ReadItem, target: torch.Tensor, kept: Kept, box: PlainBox) -> None:
        """Adds an item of a tensor that the step has."""
        stored = self.step._find(kept.component, kept.name)
        assert stored is not None
        shape, memory = stored[2], target
        part = None if box == ((0,) * len(shape), shape) else box
        if not is_direct(target, kept) or (part is not None and not target.is_contiguous()):
            memory = torch.empty(target.shape, dtype=dcp_state.kept_dtype(kept.dtype))
            self.staged_bytes += memory.numel() * memory.element_size()
        if target.numel():
            begin, end = extent(memory)
            if self.extents.overlap(begin, end):
                self.run()
            strides = None if memory.is_contiguous() else [n * memory.element_size() for n in memory.stride()]
            self.tensors.append(loads.described(kept.component, kept.name, DTYPES[memory.dtype], shape, begin, part,
                                                strides))
            self.extents.add(begin, end)
        self.items.append((item, target, None if memory is target else memory.view(kept.dtype)))
        if self.staged_bytes >= STAGED_BYTES:
            self.run()

    def run(self) -> None:
        """Reads, and gives each item to the planner: those that were copied after the others, since planners may give
        one memory for all."""
        items = self.items
        self.read()
        self.clear()
        for item, target, memory in sorted(items, key=lambda one: one[2] is not None):
            if memory is not None:
                target.copy_(memory)
            self.commit(item, target)

    def read(self) -> None:
        if self.mode == "never":
            loads.read(self.step, 0, loads.rows(self.tensors), self.how)
            return
        mode, self.mode = self.mode, "never"
        with exchange.meet(self.step, mode, 1, TIMEOUT_S) as shared:
            loads.read(self.step, 0, loads.rows(self.tensors), self.how._replace(shared=shared))
            self.found = shared.found

    def refuse(self, error: BaseException) -> None:
        """Reports an error to the other ranks before the first load."""
        if self.mode != "never":
            self.mode = "never"
            exchange.refuse(self.path, error)


def extent(memory: torch.Tensor) -> tuple[int, int]:
    """(first address, address after the last) of the memory."""
    begin, item = memory.data_ptr(), memory.element_size()
    return begin, begin + sum((n - 1) * step for n, step in zip(memory.shape, memory.stride())) * item + item
