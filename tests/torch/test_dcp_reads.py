# SPDX-License-Identifier: Apache-2.0
"""How a StorageReader reads: what it can by one load of the library, where a planner gives its memory once."""
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from vckpt import loads
from vckpt.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def calls(monkeypatch):
    """The names of the tensors of each load of the library."""
    seen, real = [], loads._Load.run

    def counted(self, rows):
        seen.append(sorted(row.name.decode() for row in rows))
        real(self, rows)
    monkeypatch.setattr(loads._Load, "run", counted)
    return seen


class Buffered(DefaultLoadPlanner):
    """Gives the same memory for every tensor, and copies from it when an item is committed."""

    def set_up_planner(self, *args, **more):
        self.buffer, self.order = torch.zeros(64), []
        super().set_up_planner(*args, **more)

    def resolve_tensor(self, item):
        target = super().resolve_tensor(item)
        return self.buffer[:target.numel()].view(target.shape)

    def commit_tensor(self, item, tensor):
        self.order.append(item.dest_index.fqn)
        super().resolve_tensor(item).copy_(tensor)


def test_dcp_reads_all_at_once(tmp_path, calls):
    w = torch.randn(4, 6)
    state = {"a": w, "b": w + 1, "scalar": torch.tensor(3.0), "wide": w + 2, "strided": w + 3, "n": 5}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6), "scalar": torch.tensor(0.0),
          "wide": torch.zeros(4, 6).double(), "strided": torch.zeros(6, 4).t(), "n": 0}
    dcp.load(to, storage_reader=StorageReader(f"{tmp_path}/s"))
    assert len(calls) == 1 and len(calls[0]) == 3, calls
    assert all(torch.equal(to[key], state[key].to(to[key].dtype)) for key in to if key != "n") and to["n"] == 5


def test_a_planner_that_gives_the_same_memory_again(tmp_path, calls):
    state = {name: torch.full((4, 3), float(number)) for number, name in enumerate("abc")}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to, planner = {name: torch.zeros(4, 3) for name in state}, Buffered()
    dcp.load(to, storage_reader=StorageReader(f"{tmp_path}/s"), planner=planner)
    assert len(calls) == 3 and sorted(planner.order) == ["a", "b", "c"]
    assert all(torch.equal(to[name], state[name]) for name in state)
