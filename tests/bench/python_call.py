#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long `async_save` keeps its caller before it returns, and until the tensors are the caller's again: 1,000 small
DTensors on a mesh of one gloo rank, an AdamW state over them, and a module of as many parameters with its optimizer.
Medians and minima from the third save on; the bytes are few, so this is the work per tensor.

    VCKPT_BUILD=build/release PYTHONPATH=tools/python tests/bench/python_call.py [--dir DIR] [--saves N]
"""
import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools/python"))
import vckpt                                            # noqa: E402


def states(mesh):
    weights = {f"layers.{i}.weight": distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]) for i in range(1000)}
    moments = {"state": {name: {"step": torch.tensor(1.0), "exp_avg": w, "exp_avg_sq": w}
                         for name, w in weights.items()},
               "param_groups": [{"lr": 1e-3, "params": list(weights)}]}
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(500)])
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    return {"1,000 DTensors": {"model": weights}, "their AdamW state, 3,000 tensors": {"optimizer": moments},
            "module of 1,000 parameters, optimizer": {"model": net, "optimizer": optimizer}}


def measure(path, state, saves):
    """(first call, then of call, to staged, native planning: median and minimum), in ms."""
    rows = []
    with vckpt.Saver(path, pin="no") as saver:
        for _ in range(saves):
            begun = time.perf_counter()
            handle = saver.async_save(state)
            called = time.perf_counter()
            handle.staged()
            rows.append(((called - begun) * 1e3, (time.perf_counter() - begun) * 1e3, handle.timings["plan_ns"] / 1e6))
            handle.committed()
    return rows[0][0], [(statistics.median(row[i] for row in rows[2:]), min(row[i] for row in rows[2:]))
                        for i in range(3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where the store is made (default: a temporary directory)")
    parser.add_argument("--saves", type=int, default=22)
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29577"), RANK="0",
                      WORLD_SIZE="1")
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        store = pathlib.Path(directory) / "store"
        vckpt.init(store)
        print("ms: first call; call, to staged, plan: median (minimum)")
        for number, (name, state) in enumerate(states(init_device_mesh("cpu", (1,))).items()):
            first, rest = measure(store / f"run{number}", state, options.saves)
            print(f"{name}: {first:.0f}; " + ", ".join(f"{median:.2f} ({least:.2f})" for median, least in rest))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
