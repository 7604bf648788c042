#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Planning: the boxes of one rank and its whole save plan, and torch DCP's planner on the same state.

    tests/bench/plan.py --build DIR [--quick]

rows(bench) adds the rows to a table of tests/bench/run. What is measured is written into each row's name and notes.
Sharding is checked anew each time; only the arrays that the C interface takes are made beforehand. torch's ranks are
simulated in one process: DTensors on the meta device over a fake process group, whose mesh is told another coordinate
for each rank.
"""
import argparse
import ctypes
import dataclasses
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/property"))
import tensorlib as tl  # noqa: E402

# Llama-3-70B over pp=8, HSDP 2x8, tp=8: 80 layers, 10 a stage. A stage's mesh is (replicate, shard, tp); FSDP cuts
# dimension 0, after tensor parallelism where that cuts it too (torch's _StridedShard, whose split is the size of tp).
HIDDEN, INNER, KV, VOCAB, LAYERS = 8192, 28672, 1024, 128256, 80
PP, REPLICATE, SHARD, TP = 8, 2, 8, 8
COLUMN, ROW, WHOLE = ("R", "SS(0,8)", "S(0)"), ("R", "S(0)", "S(1)"), ("R", "S(0)", "R")
LAYER = [("attention.wq", (HIDDEN, HIDDEN), COLUMN), ("attention.wk", (KV, HIDDEN), COLUMN),
         ("attention.wv", (KV, HIDDEN), COLUMN),
         ("attention.wo", (HIDDEN, HIDDEN), ROW), ("feed_forward.w1", (INNER, HIDDEN), COLUMN),
         ("feed_forward.w2", (HIDDEN, INNER), ROW),
         ("feed_forward.w3", (INNER, HIDDEN), COLUMN), ("attention_norm", (HIDDEN,), WHOLE),
         ("ffn_norm", (HIDDEN,), WHOLE)]
STATES = [("model", 2), ("optimizer.master", 4), ("optimizer.exp_avg", 4), ("optimizer.exp_avg_sq", 4)]


def stage(pp):
    """[(name, shape, placement words, item bytes)] of one pipeline stage, by name."""
    weights = [(f"layers.{layer:02d}.{name}", shape, words)
               for layer in range(LAYERS // PP * pp, LAYERS // PP * (pp + 1)) for name, shape, words in LAYER]
    if pp == 0:
        weights.append(("tok_embeddings", (VOCAB, HIDDEN), COLUMN))
    if pp == PP - 1:
        weights += [("norm", (HIDDEN,), WHOLE), ("output", (VOCAB, HIDDEN), COLUMN)]
    return sorted((f"{state}.{name}", shape, words, item) for state, item in STATES for name, shape, words in weights)


def stage_ranks(pp):
    size = REPLICATE * SHARD * TP
    return range(pp * size, (pp + 1) * size)


class Ours:
    def __init__(self, build):
        self.lib = tl.load(ctypes.CDLL(str(build / "tests/libvckpt_internal.so")))
        self.loop = ctypes.CDLL(str(build / "tests/libbench_plan.so"))
        self.loop.bench_own_boxes.restype = self.loop.bench_plan.restype = ctypes.c_int64
        self.keep = []

    def sharding(self, shape, mesh, words, item):
        self.keep.append(tl.OwnedSharding(self.lib, shape, mesh, ",".join(words), item))
        return self.keep[-1].c

    def own_boxes(self, repeat):
        """1,000 tensors of Llama's shapes, on all of a 1,024-rank mesh of four dimensions; every placement of the model
        in turn."""
        mesh = tl.OwnedMesh(self.lib, f"pp={PP},replicate={REPLICATE},shard={SHARD},tp={TP}")
        tensors = [(shape, ("R",) + words) for _, shape, words in LAYER]
        tensors += [(shape, ("S(0)", "R", "R", "S(1)" if len(shape) > 1 else "R")) for _, shape, _ in LAYER]
        array = (tl.Sharding * 1000)(*[self.sharding(*tensors[i % len(tensors)][:1], mesh, tensors[i % len(tensors)][1],
                                                     2) for i in range(1000)])
        boxes, worst = ctypes.c_uint64(), 0
        for rank in (0, 1, 511, 700, 1023):
            spent = []
            for _ in range(repeat):
                spent.append(self.loop.bench_own_boxes(array, ctypes.c_uint32(1000), ctypes.c_uint32(rank),
                                                       ctypes.byref(boxes)))
                assert spent[-1] >= 0, spent
            worst = max(worst, statistics.median(spent) / 1e6)
        return worst, boxes.value

    def tensors(self, pp):
        ranks = stage_ranks(pp)
        mesh = tl.OwnedMesh(self.lib, f"replicate={REPLICATE},shard={SHARD},tp={TP}", list(ranks))
        state = stage(pp)
        return (tl.SaveTensor * len(state))(*[tl.SaveTensor(sharding=self.sharding(shape, mesh, words, item))
                                              for _, shape, words, item in state])

    def plan(self, array, rank, repeat):
        """Median ms, pieces, bytes."""
        pieces, size, spent = ctypes.c_uint64(), ctypes.c_uint64(), []
        for _ in range(repeat):
            spent.append(self.loop.bench_plan(array, ctypes.c_uint32(len(array)),
                                              ctypes.byref(tl.GridParams(128 << 10, 1 << 20, 512)),
                                              ctypes.c_uint32(rank), ctypes.byref(pieces), ctypes.byref(size)))
            assert spent[-1] >= 0, spent
        return statistics.median(spent) / 1e6, pieces.value, size.value

    def plans(self, repeat):
        """The worst of a few ranks of every stage: ms, tensors, pieces, bytes, and the bytes of all replicas
        compared."""
        found = []
        for pp in range(PP):
            array, ranks = self.tensors(pp), stage_ranks(pp)
            found += [self.plan(array, ranks[k], repeat) + (len(array),) for k in (0, 1, 63, 64, 127)]
        return max(found)


class Torch:
    """DCP's DefaultSavePlanner, all ranks in this process."""

    def __init__(self):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        self.torch, self.version = torch, torch.__version__
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PP * REPLICATE * SHARD * TP)
        names = ("replicate", "shard", "tp")
        self.meshes = [DeviceMesh("cpu", torch.tensor(stage_ranks(pp)).reshape(REPLICATE, SHARD, TP),
                                  mesh_dim_names=names) for pp in range(PP)]
        self.words = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1),
                      "SS(0,8)": _StridedShard(0, split_factor=TP)}
        self.dtypes = {2: torch.bfloat16, 4: torch.float32}

    def state(self, rank):
        """The state dict of one rank: DTensors of its stage, the mesh told the rank's coordinate."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
        pp = rank // (REPLICATE * SHARD * TP)
        mesh = self.meshes[pp]
        mesh._coordinate_on_dim = tuple(int(i[0]) for i in (mesh.mesh == rank).nonzero(as_tuple=True))
        found, shapes = {}, {}
        for name, shape, words, item in stage(pp):
            placements = [self.words[w] for w in words]
            key = (shape, words)
            if key not in shapes:
                shapes[key] = compute_local_shape_and_global_offset(shape, mesh, placements)[0]
            local = self.torch.empty(shapes[key], dtype=self.dtypes[item], device="meta")
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            found[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=self.torch.Size(shape),
                                             stride=stride)
        return found

    def local_plan(self, state, rank):
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        planner = DefaultSavePlanner()
        start = time.perf_counter()
        planner.set_up_planner(state, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        return (time.perf_counter() - start) * 1000, plan

    def local_plans(self, ranks, repeat):
        """Median ms of a rank's plan, and the plans."""
        plans, spent = [], []
        for rank in ranks:
            state = self.state(rank)
            each = [self.local_plan(state, rank) for _ in range(repeat)]
            spent.append(statistics.median(ms for ms, _ in each))
            plans.append(each[-1][1])
        return max(spent), plans

    def all_plans(self):
        """Local plans of all 1,024 ranks. Computed: the first replica of the first, the second and the last stage (192
        ranks); the other replica plans the same items, and the stages between are the second with other layer
        numbers."""
        size, found = SHARD * TP, {pp: self.local_plans(stage_ranks(pp)[:SHARD * TP], 1)[1] for pp in (0, 1, PP - 1)}
        assert found[1][5].items == self.local_plans([stage_ranks(1)[size + 5]], 1)[1][0].items
        plans = []
        for pp in range(PP):
            plans += (found[pp] if pp in found
                      else [self.renamed(plan, stage(1), stage(pp)) for plan in found[1]]) * REPLICATE
        return plans

    @staticmethod
    def renamed(plan, before, after):
        names = {a[0]: b[0] for a, b in zip(before, after)}
        items = [dataclasses.replace(i, index=dataclasses.replace(i.index, fqn=names[i.index.fqn])) for i in plan.items]
        return dataclasses.replace(plan, items=items, planner_data={names[k]: (names[k],) for k in plan.planner_data})

    def global_plan(self, plans):
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        start = time.perf_counter()
        final, metadata = planner.create_global_plan(list(plans))
        spent = (time.perf_counter() - start) * 1000
        return spent, final, metadata


def torch_rows(bench, ours_ms, quick):
    try:
        torch = Torch()
    except ImportError as missing:
        return bench.skip("torch DCP: save plan of the same state", str(missing))
    try:
        torch_measured(bench, torch, ours_ms, quick)
    finally:
        torch.torch.distributed.destroy_process_group()
    return None


def torch_measured(bench, torch, ours_ms, quick):
    some = [0, 1, 63, 64, 127, 896, 1023]
    spent, _ = torch.local_plans(some, 5)
    bench.figure("torch DCP: local plan of one rank, the worst of 7", spent, "ms")
    plans = torch.all_plans() if not quick else torch.local_plans(stage_ranks(0)[:SHARD * TP], 1)[1] * REPLICATE
    stage_spent = [torch.global_plan(plans[:len(stage_ranks(0))])[0] for _ in range(5)]
    bench.figure("torch DCP: global plan of the 128 ranks of one stage, one process", statistics.median(stage_spent),
                 "ms")
    bench.notes["torch version of the planner"] = torch.version
    if quick:
        return
    whole = [torch.global_plan(plans)[0] for _ in range(5)]
    bench.figure("torch DCP: global plan of all 1,024 ranks, one process", statistics.median(whole), "ms")
    bench.notes["items in all local plans of torch DCP"] = sum(len(p.items) for p in plans)
    bench.figure("torch DCP's local and global plan, divided by vckpt's plan",
                 (spent + statistics.median(whole)) / ours_ms, "x")


def rows(bench, quick=False):
    ours = Ours(bench.build)
    spent, boxes = ours.own_boxes(9)
    bench.figure("own boxes of 1,000 tensors, one rank of a 1,024-rank 4-dimensional mesh", spent, "ms", 5)
    bench.notes["boxes of the last rank of 1,000 tensors"] = boxes
    spent, pieces, size, tensors = ours.plans(9)
    bench.figure("save plan of one rank with its pieces, Llama-3-70B with optimizer, pp=8, HSDP 2x8, tp=8", spent, "ms",
                 50)
    bench.notes["that plan: tensors, pieces, bytes stored"] = [tensors, pieces, size]
    torch_rows(bench, spent, quick)


class Alone:
    """What rows() needs of tests/bench/run, printed only."""

    def __init__(self, build):
        self.build, self.notes, self.missed = pathlib.Path(build).resolve(), {}, False

    def figure(self, name, value, unit, bar=None, higher=False):
        good = bar is None or (value >= bar if higher else value <= bar)
        self.missed |= not good
        print(f"{name}: {value:.4g} {unit}" + (f", bar {bar}: {'met' if good else 'MISSED'}" if bar is not None
                                               else ""), flush=True)

    def skip(self, name, why):
        print(f"{name}: skipped: {why}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", help="a release build")
    parser.add_argument("--quick", action="store_true", help="of torch's global plans only that of one stage")
    options = parser.parse_args()
    bench = Alone(options.build)
    rows(bench, options.quick)
    print(json.dumps(bench.notes))
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
