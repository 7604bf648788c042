# SPDX-License-Identifier: Apache-2.0
"""exchange= over NCCL, on the stand-ins for NCCL and for the driver. Their ranks are threads of one process, which has
one process group: so ranks meet at a board, and load by what vckpt.load calls after it. A real device is met in
tests/gpu."""
import contextlib
import ctypes
import os
import threading

import pytest
import torch
import torch.distributed as dist

import vckpt
from commlib import good, together
from standinlib import standin
from vckpt import _lib, exchange, exchange_group, loads

WORLD, SHAPE = 2, (1000, 900)


class Board:
    """What each rank said, once all have; and the store that they have in common."""

    def __init__(self):
        self.barrier, self.said, self.store, self.mine = threading.Barrier(WORLD), {}, dist.HashStore(), \
            threading.local()

    def held(self, path, timeout, said):
        return type("Held", (), {"store": self.store, "rank": self.mine.rank, "world": WORLD, "path": path,
                                 "launch": lambda _, token: self.launch(said), "all_said": lambda _: [
                                     self.said[rank] for rank in range(WORLD)]})()

    def launch(self, said):
        self.said[self.mine.rank] = said
        self.barrier.wait(60)
        return "token"


@pytest.fixture
def ranks(build, monkeypatch, tmp_path):
    """ranks(work): work(device tensor, shared) at each; gives what they gave."""
    monkeypatch.setenv("VCKPT_LIBNCCL", str(build / "tests/standin/libnccl.so.2"))
    cuda, nccl, board = standin(build), ctypes.CDLL(os.environ["VCKPT_LIBNCCL"]), Board()
    assert cuda.lib.cuInit(0) == 0
    nccl.standin_nccl_count.restype = ctypes.c_uint64
    nccl.standin_nccl_reset()
    cuda.reset()
    contexts = {}

    @contextlib.contextmanager
    def current(device):
        contexts[board.mine.rank] = cuda.context()
        yield
        cuda.set(None)
    links = {}
    monkeypatch.setattr(exchange, "_held", board.held)
    monkeypatch.setattr(exchange, "_has_nccl", lambda: True)
    monkeypatch.setattr(exchange, "_current", current)
    monkeypatch.setattr(exchange, "host", lambda: f"host{board.mine.rank}")
    monkeypatch.setattr(exchange_group, "known", dict)
    monkeypatch.setattr(exchange_group, "taken", lambda held, *_: links.setdefault(held.rank, exchange_group.Link(
        "token", held.store, held.rank, WORLD, 60000)))
    run = tmp_path / "store/run"
    want = torch.randn(SHAPE)
    vckpt.save(run, {"model": {"w": want}}, step=1, pin="no")
    vckpt.close()
    path = f"{run}/1"

    def rank(number, device):
        board.mine.rank = number
        with vckpt.Step(path) as step:
            shared = exchange.meet(step, "always", 1, 60, device)
            with shared:
                out = torch.zeros(SHAPE)
                watch = loads.Watch()
                row = loads.described("model", "w", _lib.DTYPES.index("f32"), SHAPE, out.data_ptr())
                loads.read(step, number, loads.rows([row]), loads.How(2, 0, WORLD, watch, shared))
        assert torch.equal(out, want)
        return shared.found, watch.read

    def run_all(devices=(torch.device("cuda:0"),) * WORLD):
        return together(WORLD, lambda number: rank(number, devices[number]))
    run_all.cuda, run_all.nccl = cuda, nccl
    yield run_all
    left = {word: n for word in ("early", "order", "memory", "context", "dead", "comms")
            if (n := nccl.standin_nccl_count(word.encode()))}
    assert (left, cuda.faults(), cuda.held()) == ({}, {}, {})
    cuda.reset()


def test_buckets_go_over_nccl(ranks):
    """Each stored byte is read by one rank."""
    one, two = good(ranks())
    assert one[0].over == two[0].over == "NCCL" and one[0].chosen == "always"
    size = 4 * SHAPE[0] * SHAPE[1]
    assert one[0].bytes_sent == two[0].bytes_got > 0 and one[0].bytes_sent + two[0].bytes_sent == size
    assert one[1] + two[1] < 1.1 * size


def test_a_rank_without_device_memory(ranks):
    one, two = good(ranks((torch.device("cuda:0"), None)))
    assert one[0].over == two[0].over == "gloo" and one[0].bytes_sent > 0


def test_nccl_that_cannot_be_had(ranks, capfd):
    """At one rank: all go on with gloo, and rank 0 says why."""
    ranks.cuda.fail("cuMemHostAlloc")
    one, two = good(ranks())
    assert one[0].over == two[0].over == "gloo" and one[0].bytes_sent > 0
    said = capfd.readouterr().err
    assert "exchange= goes over gloo, not NCCL: " in said and "pinned memory for NCCL" in said
