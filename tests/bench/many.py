# SPDX-License-Identifier: Apache-2.0
"""What a save and a load cost for each tensor of a state of many small ones: CPU time of the calling thread, which is
Python's part and what the library does in its calls, and of the whole process.

    tests/bench/run --only many [--repeat 5]

States: a dict of numpy arrays, a module of linear layers, and a module with AdamW, where three tensors of four are the
optimizer's. All are 4 x 4 or smaller, in memory, so that the bytes cost nothing."""
import importlib.util
import os
import pathlib
import statistics
import sys
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = 1_000, 10_000, 100_000


def arrays(count):
    return {"model": {f"layers.{i // 10}.block.{i % 10}.weight": numpy.full((4, 4), i, "f4") for i in range(count)}}


def module(count):
    from torch import nn
    return {"model": nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))) for _ in range(count // 10)))}


def trained(count):
    import torch
    state = module(count // 4)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    state["optimizer"].step()
    return state


def spent(count, function):
    """Microseconds a tensor: (of this thread, of the process)."""
    thread, process = time.thread_time(), time.process_time()
    function()
    return (time.thread_time() - thread) * 1e6 / count, (time.process_time() - process) * 1e6 / count


def measure(bench, vckpt, what, state, count):
    path = bench.dir / "many" / f"{what.replace(' ', '-')}-{count}"
    first, later, loads = [], [], []
    for _ in range(bench.o.repeat):
        with vckpt.Saver(path, pin="no") as saver:              # which remembers nothing of the one before
            first.append(spent(count, lambda: saver.async_save(state).committed()))     # noqa: B023
            later.append(spent(count, lambda: saver.async_save(state).committed()))     # noqa: B023
    for _ in range(bench.o.repeat):
        loads.append(spent(count, lambda: vckpt.load(path, state)))
    for name, rows in ("load", loads), ("first save", first), ("later save", later):
        thread, process = (statistics.median(column) for column in zip(*rows))
        bench.figure(f"{name}, {what}, {count:,} tensors: the calling thread", thread, "us a tensor",
                     15 if name == "load" and what != "module and AdamW" else None)
        bench.figure(f"{name}, {what}, {count:,} tensors: the process", process, "us a tensor")


def rows(bench):
    os.environ.setdefault("VCKPT_BUILD", str(bench.build))
    sys.path.insert(0, str(ROOT / "tools/python"))
    vckpt = importlib.import_module("vckpt")
    vckpt.init(bench.dir / "many")
    kinds = {"dict of arrays": arrays}
    if importlib.util.find_spec("torch"):
        kinds |= {"module": module, "module and AdamW": trained}
    for what, make in kinds.items():
        for count in SIZES:
            measure(bench, vckpt, what, make(count), count)
