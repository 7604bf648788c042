# SPDX-License-Identifier: Apache-2.0
"""What Python does for each tensor of a save and of a load, in counts: calls of Python's functions, calls of the
library, and the modules that are imported. None may grow faster than the state."""
import collections
import gc
import subprocess
import sys

import numpy as np
import pytest
import torch

import vckpt
from vckpt import _lib, handle, loads

PIN = {"pin": "no"}
OF_A_SAVE = 40          # calls by which two saves may differ: one that is done already needs no thread to wait for it
WAITS = ("vckpt_load_wait", "vckpt_load_progress", "vckpt_save_wait_staged", "vckpt_save_wait_committed",
         "vckpt_save_progress",
         "vckpt_save_free")         # when the last thread lets it go


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


def arrays(count):
    return {"m": {f"layers.{i}.weight": np.full((4, 2), i, "f4") for i in range(count)}}


def module(count):
    return {"m": torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(count // 2)))}


def trained(count):
    """As many tensors; three of four are the optimizer's."""
    state = module(count // 4)
    state["o"] = torch.optim.AdamW(state["m"].parameters())
    for parameter in state["m"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["o"].step()
    return state


def groups(count):
    """A group for each parameter."""
    state = module(count // 4)
    state["o"] = torch.optim.AdamW([{"params": [one]} for one in state["m"].parameters()])
    for parameter in state["m"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["o"].step()
    return state


def listed(count):
    return {"m": {"layers": [{"w": torch.ones(2), "b": torch.ones(1)} for _ in range(count // 2)]}}


def counted(function, *arguments, **options):
    """How many functions it calls in this thread, Python's and C's."""
    seen = 0

    def profile(frame, event, _):
        nonlocal seen
        seen += event in ("call", "c_call")
    sys.setprofile(profile)
    try:
        function(*arguments, **options)
    finally:
        sys.setprofile(None)
    return seen


@pytest.fixture(autouse=True)
def nothing_is_collected():
    """Neither what earlier tests left nor what this one leaves. Once a test: a process of many tests takes a third of a
    second for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def one_wait(monkeypatch):
    """A wait is one call, however long it takes."""
    for module in (handle, loads):
        monkeypatch.setattr(module, "SLICE_MS", 600_000)


def save_and_load(run, state):
    with vckpt.Saver(run, **PIN) as saver:
        first = counted(lambda: saver.async_save(state).staged())
        again = counted(lambda: saver.async_save(state).staged())
        saver.async_save(state).committed()
    return np.array([first, again, counted(vckpt.load, run, state)])


@pytest.mark.parametrize("make, most", [
    (arrays, (90, 6, 42)), (module, (150, 22, 102)), (listed, (130, 12, 85)), (trained, (190, 24, 135)),
    (groups, (400, 200, 300))], ids=lambda one: getattr(one, "__name__", None))
def test_calls_of_functions(run, make, most):
    """For each tensor of the first save, of the next one, and of a load: no more when there are more tensors."""
    few, some, many = (save_and_load(run.with_name(f"run{size}"), make(size)) for size in (200, 400, 800))
    each = (many - some - OF_A_SAVE) / 400
    assert (each <= most).all() and (each <= (some - few) / 200 * 1.1 + 1).all(), (each, (some - few) / 200)


def test_calls_of_the_library(run, monkeypatch):
    """As many for 400 tensors as for 100, to save them, to load them, and to list them."""
    real, seen = _lib.lib(), collections.Counter()

    class Counting:
        def __getattr__(self, name):
            seen[name] += 1
            return getattr(real, name)
    monkeypatch.setattr(_lib, "_loaded", Counting())

    def calls(size):
        gc.collect()
        seen.clear()
        path, state = run.parent.with_name(f"store{size}") / "run", arrays(size)
        vckpt.save(path, state, step=0, **PIN)
        vckpt.load(path, state)
        with vckpt.Step(path) as step:
            assert len(step.tensors()) == len(step.keys()) == size and step.components() == ["m"]
        return {name: count for name, count in seen.items() if name not in WAITS}
    assert calls(100) == calls(400)


def test_modules_that_are_imported():
    """A save and a load bring none of torch's that the program has not imported, whatever code makes the state dict of
    a module: none besides torch's, the module's own, a hook's, or none because there is nothing in it."""
    program = """if True:
        import sys, tempfile, torch

        class Own(torch.nn.Linear):
            def get_extra_state(self):
                return {"seen": 3}

            def set_extra_state(self, state):
                assert state == {"seen": 3}

        class Wrapper(torch.nn.Module):     # whose name for a part looks like that of torch's wrappers
            def __init__(self):
                super().__init__()
                self.module = torch.nn.Linear(2, 2)
                self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(more=torch.ones(1)))
                self.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("more"))

        def made():
            return {"plain": torch.nn.Linear(2, 2), "own": Own(2, 2), "wrapper": Wrapper(),
                    "nothing": torch.nn.CrossEntropyLoss()}
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        state, other = made(), made()
        before = set(sys.modules)
        import vckpt
        with tempfile.TemporaryDirectory() as path:
            vckpt.save(f"{path}/run", state, pin="no")
            vckpt.load(f"{path}/run", other)
            vckpt.close()
        assert all(torch.equal(a, b) for name in state
                   for a, b in zip(state[name].parameters(), other[name].parameters()))
        new = {name for name in set(sys.modules) - before if not name.startswith("vckpt")}
        print(len(new), sorted(name for name in new if name.startswith("torch")))
        """
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    count, torchs = found.split(None, 1)
    assert int(count) <= 30 and torchs.strip() == "[]", found
