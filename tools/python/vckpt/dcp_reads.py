# SPDX-License-Identifier: Apache-2.0
"""What a StorageReader reads straight into its planner's tensors, by one load of the library: contiguous memory of the
CPU. A planner may give the same memory for several items, and empty it as each is committed; so an item whose memory is
wanted already is read by a load after that one."""
from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from . import loads
from .torch_state import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import ReadItem

    from .dcp_state import Kept
    from .shard import PlainBox
    from .step import Step

    Commit: TypeAlias = "Callable[[ReadItem, torch.Tensor], None]"


def is_direct(target: torch.Tensor, kept: Kept) -> bool:
    """It has the items as the step has them."""
    return (target.device.type == "cpu" and target.dtype == kept.dtype and kept.dtype in DTYPES
            and target.layout == torch.strided and not target.is_conj() and not target.is_neg())


class Reads:
    """One rank's. commit: is called with each item and its tensor once that has arrived."""

    def __init__(self, step: Step, commit: Commit) -> None:
        self.step, self.commit = step, commit
        self.clear()

    def clear(self) -> None:
        self.items: list[tuple[ReadItem, torch.Tensor]] = []
        self.tensors: list[loads.Described] = []
        self.extents = loads.Extents()

    def add(self, item: ReadItem, target: torch.Tensor, kept: Kept, box: PlainBox) -> bool:
        """False: it is to be read by itself."""
        stored = self.step._find(kept.component, kept.name)
        if not target.numel() or not target.is_contiguous() or not is_direct(target, kept) or stored is None:
            return False
        begin = target.data_ptr()
        end = begin + target.numel() * target.element_size()
        if self.extents.overlap(begin, end):
            self.run()
        shape = stored[2]
        part = None if box == ((0,) * len(shape), shape) else box
        self.tensors.append(loads.described(kept.component, kept.name, DTYPES[kept.dtype], shape, begin, part))
        self.items.append((item, target))
        self.extents.add(begin, end)
        return True

    def _world(self) -> int:
        dist = torch.distributed
        return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1

    def run(self) -> None:
        items = self.items
        loads.read(self.step, 0, self.tensors, loads.DEFAULT._replace(world=self._world()))
        self.clear()
        for item, target in items:
            self.commit(item, target)
