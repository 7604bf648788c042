# SPDX-License-Identifier: Apache-2.0
"""How a StorageReader reads: what it can by one load of the library, where a planner gives its memory once."""
import concurrent.futures
import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import vckpt
from vckpt import dcp_reads, loads
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
        self.buffer, self.order = torch.zeros(64, dtype=self.dtype), []
        super().set_up_planner(*args, **more)

    def resolve_tensor(self, item):
        target = super().resolve_tensor(item)
        return self.buffer[:target.numel()].view(target.shape)

    def commit_tensor(self, item, tensor):
        self.order.append(item.dest_index.fqn)
        super().resolve_tensor(item).copy_(tensor)


def test_dcp_reads_all_at_once(tmp_path, calls):
    """Other types, strided memory, parts of tensors and what has no items, too."""
    w = torch.randn(4, 6)
    state = {"a": w, "b": w + 1, "scalar": torch.tensor(3.0), "wide": w + 2, "strided": w + 3, "none": w[:0],
             "c": torch.complex(w, w), "n": 5}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6), "scalar": torch.tensor(0.0), "none": torch.zeros(0, 6),
          "wide": torch.zeros(4, 6).double(), "strided": torch.zeros(6, 4).t(),
          "c": torch.zeros(4, 6, dtype=torch.complex64).conj(), "n": 0}
    reader = StorageReader(f"{tmp_path}/s", threads=1, verify="full")
    dcp.load(to, storage_reader=reader)
    assert len(calls) == 1 and len(calls[0]) == 6, calls
    assert all(torch.equal(to[key], state[key].to(to[key].dtype)) for key in to if key != "n") and to["n"] == 5
    assert reader.bytes_read >= sum(to[key].numel() * state[key].element_size() for key in to if key != "n")
    with pytest.raises(vckpt.InvalidArgument, match="threads=-1: expected a whole number"):
        StorageReader(f"{tmp_path}/s", threads=-1)


class Parts(DefaultLoadPlanner):
    """Asks for the tensors column by column, into columns of what it fills."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            for column in range(item.lengths[1]):
                items.append(dataclasses.replace(item, lengths=torch.Size([item.lengths[0], 1]),
                                                 dest_offsets=torch.Size([0, column]),
                                                 storage_offsets=torch.Size([0, column])))
        return dataclasses.replace(plan, items=items)


def test_parts_into_strided_memory(tmp_path, calls):
    state = {name: torch.randn(5, 7) for name in "ab"}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to = {name: torch.zeros(5, 7) for name in state}
    dcp.load(to, storage_reader=StorageReader(f"{tmp_path}/s"), planner=Parts())
    assert len(calls) == 1 and len(calls[0]) == 14
    assert all(torch.equal(to[name], state[name]) for name in state)


def test_copies_come_in_batches(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(dcp_reads, "STAGED_BYTES", 100)
    state = {name: torch.randn(5, 4) for name in "abcd"}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to = {name: torch.zeros(5, 4).double() for name in state}
    dcp.load(to, storage_reader=StorageReader(f"{tmp_path}/s"))
    assert calls == [["a", "b"], ["c", "d"]]
    assert all(torch.equal(to[name], state[name].double()) for name in state)


def test_in_a_thread(tmp_path):
    """As a program does that loads in the background, without messages."""
    state = {"w": torch.randn(5, 4), "n": 5}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to = {"w": torch.zeros(5, 4), "n": 0}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(dcp.load, to, storage_reader=StorageReader(f"{tmp_path}/s"), no_dist=True).result()
    assert torch.equal(to["w"], state["w"]) and to["n"] == 5


@pytest.mark.parametrize("double", [False, True])
def test_a_planner_that_gives_the_same_memory_again(tmp_path, calls, double):
    state = {name: torch.full((4, 3), float(number)) for number, name in enumerate("abc")}
    dcp.save(state, storage_writer=StorageWriter(f"{tmp_path}/s"))
    to, planner = {name: torch.zeros(4, 3) for name in state}, Buffered()
    planner.dtype = torch.float64 if double else torch.float32
    dcp.load(to, storage_reader=StorageReader(f"{tmp_path}/s"), planner=planner)
    assert len(calls) == (1 if double else 3) and sorted(planner.order) == ["a", "b", "c"]
    assert all(torch.equal(to[name], state[name]) for name in state)
