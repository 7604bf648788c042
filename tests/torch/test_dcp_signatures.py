# SPDX-License-Identifier: Apache-2.0
"""vckpt.dcp under classes with torch 2.4's signatures (dcp_2_4.py): two ranks save, one reads."""
import importlib
import inspect
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import dcp_2_4 as old

import vckpt
import vckpt.dcp  # noqa: F401  (whose parts the fixture takes away and puts back)


@pytest.fixture
def plug(build, monkeypatch):
    """vckpt.dcp, imported anew where torch.distributed.checkpoint is that of 2.4."""
    monkeypatch.setenv("VCKPT_BUILD", str(build))
    for name, module in old.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
        package, _, last = name.rpartition(".")
        monkeypatch.setattr(sys.modules[package], last, module, raising=False)
    for name in ("vckpt.dcp", "vckpt.dcp_state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(vckpt, name.split(".")[1], raising=False)
    yield importlib.import_module("vckpt.dcp")
    vckpt.close()
    for name in ("vckpt.dcp", "vckpt.dcp_state"):
        sys.modules.pop(name)


def test_every_method_takes_what_2_4_gives(plug):
    for ours, theirs in ((plug.StorageWriter, old.StorageWriter), (plug.StorageReader, old.StorageReader)):
        assert issubclass(ours, theirs) and not inspect.isabstract(ours)
        for name in theirs.__abstractmethods__:
            parameters = inspect.signature(getattr(theirs, name)).parameters
            given = [parameter for parameter in parameters if parameter != "self"]
            self = [None] if "self" in parameters else []
            inspect.signature(getattr(ours, name)).bind(*self, *given)
            inspect.signature(getattr(ours, name)).bind(*self, **dict.fromkeys(given))


def test_two_ranks_save_and_one_reads(plug, tmp_path):
    state = {"model.w": torch.randn(9, 12), "model.b": torch.randn(1, 4).bfloat16(), "opt.m": torch.randn(8, 3),
             "epoch": {"n": 3}}
    group, wrong = old.Group(2), []
    writers = [plug.StorageWriter(tmp_path / "ckpt" / "step-0") for _ in range(2)]

    def run(rank):
        try:
            for step in range(3):
                if step:
                    writers[rank].reset(tmp_path / "ckpt" / f"step-{step}")
                here = {key: value + step if isinstance(value, torch.Tensor) else value for key, value in state.items()}
                metadata = old.save(here, writers[rank], group, rank)
                assert (metadata is None) == (rank != 0)
        except BaseException as error:
            wrong.append(error)
            group.barrier.abort()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong, wrong
    for step in range(3):
        found = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
                 for key, value in state.items()}
        metadata = old.load(found, plug.StorageReader(tmp_path / "ckpt" / f"step-{step}"))
        assert metadata.planner_data == {key: tuple(key.split(".")) for key in state}
        assert (metadata.storage_meta.load_id and metadata.state_dict_metadata["model.b"].properties.dtype ==
                torch.bfloat16)
        for key, value in state.items():
            assert torch.equal(found[key], value + step) if isinstance(value, torch.Tensor) else found[key] == value
