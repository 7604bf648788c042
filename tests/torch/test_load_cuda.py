# SPDX-License-Identifier: Apache-2.0
"""Loads into CUDA tensors, on the stand-in for the driver: the memory is the stand-in's, and torch's tensors over it
are taken for CUDA's. A real device is met in tests/gpu."""
import ctypes

import pytest
import torch

import vckpt
from standinlib import FAULTS, standin
from vckpt import loading, loading_tensors, torch_state


@pytest.fixture
def cuda(build, monkeypatch):
    driver = standin(build)
    assert driver.lib.cuInit(0) == 0
    driver.reset()
    driver.context()
    places = {}
    driver.streams = {}
    monkeypatch.setattr(loading_tensors, "cuda_device", lambda memory: places.get(
        memory.data_ptr()) if isinstance(memory, torch.Tensor) else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type(
        "Stream", (), {"cuda_stream": driver.streams.get(device, 0)}))

    monkeypatch.setattr(loading, "cuda_device", loading_tensors.cuda_device)

    def tensor(*shape, device="cuda:0", dtype=torch.float32):
        size = max(1, torch.Size(shape).numel()) * dtype.itemsize
        at = driver.memory(b"\7" * size)
        found = torch.frombuffer((ctypes.c_ubyte * size).from_address(at), dtype=dtype).reshape(shape)
        places[found.data_ptr()] = torch.device(device)
        return found
    driver.tensor = tensor
    yield driver
    assert {word: n for word in FAULTS if (n := driver.count(word))} == {}
    driver.reset()


def test_device_memory_is_read_into_at_once(cuda, tmp_path):
    run, w = tmp_path / "store/run", torch.randn(900, 1100)
    vckpt.save(run, {"model": {"w": w, "t": w.T, "half": w.half(), "cpu": w}}, step=1, pin="no")
    vckpt.close()
    own = cuda.stream(nonblocking=True)
    cuda.streams[torch.device("cuda:0")] = own
    to = {"w": cuda.tensor(900, 1100), "t": cuda.tensor(900, 1100).T, "half": cuda.tensor(900, 1100), "cpu":
          torch.zeros(900, 1100)}
    cuda.write(own, to["w"].data_ptr(), b"\5" * 3960000, 50000)         # comes first
    before = cuda.count("bytes")
    vckpt.load(run, {"model": to})
    assert all(torch.equal(to[name], want) for name, want in (("w", w), ("t", w.T), ("half", w.half().float()),
                                                              ("cpu", w)))
    assert cuda.count("bytes") - before == 2 * w.numel() * 4            # of those that need no conversion
    assert cuda.count("pageable") == 0


def test_an_optimizers_state_as_well(cuda, monkeypatch, tmp_path):
    """It is made in the memory of the device of its parameter, and not copied there afterwards."""
    run, made = tmp_path / "store/run", []
    monkeypatch.setattr(torch_state, "empty", lambda like, _: made.append(cuda.tensor(*like.shape)) or made[-1])
    p = torch.nn.Parameter(torch.randn(300, 200))
    optimizer = torch.optim.AdamW([p])
    p.square().sum().backward()
    optimizer.step()
    vckpt.save(run, {"model": {"p": p}, "optim": optimizer}, step=1, pin="no")
    vckpt.close()
    q = torch.nn.Parameter(cuda.tensor(300, 200))
    other = torch.optim.AdamW([q])
    vckpt.load(run, {"model": {"p": q}, "optim": other})
    found = other.state[q]
    assert torch.equal(q, p) and all(torch.equal(found[key], optimizer.state[p][key]) for key in found)
    assert [found["exp_avg"].data_ptr(), found["exp_avg_sq"].data_ptr()] == [t.data_ptr() for t in made]
