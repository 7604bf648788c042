# SPDX-License-Identifier: Apache-2.0
"""What every rank of a job stores, as the ranks of a replica group share it out: within 1 MiB of each other's equal
parts, for the layouts that training uses.

test_plan.py checks for small tensors that each item is stored once and by whom. Here are whole models, of which only
bytes are counted: per group, by each rank, against total / replicas computed from the shapes alone; and per rank, since
a rank may be in several groups."""
import collections
import random

import pytest

import tensorlib as tl
from test_plan import DEFAULT, ITEM, MIB, Rank, Tensor, bytes_of


@pytest.fixture(scope="module", autouse=True)
def loaded(lib):
    return tl.load(lib)


def transformer(layers, hidden, inner, vocabulary, words, mesh, ranks=None, prefix="", ends=True):
    """The parameters of a small transformer; words: placements of columns, rows, and of what is not cut by tensor
    parallelism."""
    column, row, plain = words
    tensors = [Tensor(f"{prefix}embedding", (vocabulary, hidden), mesh, row, ranks)] if ends else []
    for i in layers:
        name = f"{prefix}layers.{i:02d}."
        tensors += [Tensor(name + "down", (hidden, inner), mesh, row, ranks),
                    Tensor(name + "norm.1", (hidden,), mesh, plain, ranks),
                    Tensor(name + "norm.2", (hidden,), mesh, plain, ranks),
                    Tensor(name + "out", (hidden, hidden), mesh, row, ranks),
                    Tensor(name + "qkv", (3 * hidden, hidden), mesh, column, ranks),
                    Tensor(name + "up", (inner, hidden), mesh, column, ranks),
                    Tensor(name + "up.bias", (inner,), mesh, column.replace("S(1)", "S(0)"), ranks)]
    return tensors


def count(lib, world, params=DEFAULT):
    """({group: {rank: bytes stored}}, {group: total}, {rank: plan}); every byte is stored by somebody, once."""
    ranks = {r: Rank(lib, world, r, params, random.Random(r), strangers=False)
             for r in sorted({r for t in world for r in t.ranks})}
    taken, totals, stored = collections.defaultdict(collections.Counter), collections.Counter(), collections.Counter()
    for t in world:
        for r in t.ranks:
            mine = bytes_of([b.at.box.pair(len(t.shape)) for b in ranks[r].boxes.get(t, ())])
            group = t.group(r)
            stored[t] += mine
            if len(group) > 1 and not t.buffer:
                taken[group][r] += mine
                totals[group] += bytes_of(ranks[r].held(t)) if r == group[0] else 0
    for t in world:
        items = 1
        for n in t.shape:
            items *= n
        assert stored[t] == items * ITEM, t.name
    return taken, totals, ranks


def balanced(taken, totals):
    assert taken
    for group, by_rank in taken.items():
        assert sum(by_rank.values()) == totals[group]
        for r in group:
            assert abs(by_rank[r] - totals[group] / len(group)) <= MIB, (group, totals[group], by_rank)


def test_ddp_4(lib):
    world = transformer(range(4), 512, 2048, 5003, ("R", "R", "R"), "dp=4")
    world += [Tensor(f"batch_norm.{i}.{name}", (512,), "dp=4", "R", buffer=True) for i in range(4)
              for name in ("mean", "var")]
    taken, totals, ranks = count(lib, world)
    balanced(taken, totals)
    assert list(taken) == [(0, 1, 2, 3)]
    buffers = 8 * 512 * ITEM
    assert [r.plan.bytes - taken[(0, 1, 2, 3)][n] for n, r in ranks.items()] == [buffers, 0, 0, 0]
    # a quarter each of what all hold
    assert all(r.plan.held_bytes > 3.9 * taken[(0, 1, 2, 3)][n] for n, r in ranks.items())


def test_ddp_with_momentum(lib):
    """Parameters and both moments of an optimizer that every rank holds: one sequence, one balance."""
    world = [Tensor(f"{kind}.{t.name}", t.shape, t.mesh, t.words) for kind in ("exp_avg", "exp_avg_sq", "model")
             for t in transformer(range(3), 384, 1536, 3001, ("R", "R", "R"), "dp=4")]
    balanced(*count(lib, world)[:2])


def test_hsdp_2_by_4(lib):
    mesh = "replicate=2,shard=4"
    taken, totals, ranks = count(lib, transformer(range(6), 512, 2048, 5003, ("R,S(0)", "R,S(0)", "R,S(0)"), mesh))
    balanced(taken, totals)
    assert sorted(taken) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    total = sum(totals.values())
    assert all(abs(r.plan.bytes - total / 8) <= 2 * MIB for r in ranks.values())


@pytest.mark.parametrize("mesh, words",
                         [("dp=4,tp=2", ("R,S(0)", "R,S(1)", "R,R")), ("tp=2,dp=4", ("S(0),R", "S(1),R", "R,R"))])
def test_tp_by_dp(lib, mesh, words):
    """What tensor parallelism cuts is shared along dp; norms are held by all, and shared by all."""
    taken, totals, ranks = count(lib, transformer(range(6), 512, 2048, 5002, words, mesh))
    balanced(taken, totals)
    assert len(taken) == 3 and {len(g) for g in taken} == {4, 8}
    assert all(abs(r.plan.bytes - sum(totals.values()) / 8) <= 2 * MIB for r in ranks.values())


def test_tp_by_fsdp_by_dp(lib):
    """Three dimensions: FSDP over TP (strided), replicated along the first."""
    words = ("R,SS(0,2),S(0)", "R,S(0),S(1)", "R,S(0),R")
    taken, totals, _ = count(lib, transformer(range(4), 512, 2048, 5000, words, "dp=2,fsdp=2,tp=2"))
    balanced(taken, totals)
    assert {len(g) for g in taken} == {2, 4}


def zero(world, replicas, padded=True):
    """Moments of each tensor as equal flat ranges over dp, of which only one replica holds each."""
    tensors = []
    for t in world:
        items = 1
        for n in t.shape:
            items *= n
        each = -(-items // replicas)
        flats = {r: (min(each * r, items), min(each * (r + 1), items), 0) for r in range(replicas)}
        if padded:
            flats = {r: (each * r, each * (r + 1), each * replicas) for r in range(replicas)}
        tensors += [Tensor(f"{kind}.{t.name}", t.shape, t.mesh, t.words, flats=flats)
                    for kind in ("exp_avg", "exp_avg_sq")]
    return tensors


@pytest.mark.parametrize("padded", [True, False])
def test_zero_optimizer(lib, padded):
    """Each rank stores its own range of the moments, whole, and its part of the weights."""
    weights = transformer(range(4), 512, 1024, 3001, ("R", "R", "R"), "dp=4")
    world = zero(weights, 4, padded) + weights
    taken, totals, ranks = count(lib, world)
    balanced(taken, totals)
    assert list(taken) == [(0, 1, 2, 3)]
    moments = {r: ranks[r].plan.bytes - taken[(0, 1, 2, 3)][r] for r in range(4)}
    total = 2 * totals[(0, 1, 2, 3)]
    assert sum(moments.values()) == total and all(abs(m - total / 4) <= len(world) * ITEM * 2 for m in moments.values())


def test_zero_within_replicas(lib):
    """Flat ranges over 4 ranks, twice: each pair of equal ranges is shared by its two holders."""
    tensors = []
    for t in transformer(range(5), 512, 2048, 3001, ("R,R", "R,R", "R,R"), "replicate=2,shard=4"):
        items = t.shape[0] * (t.shape[1] if len(t.shape) > 1 else 1)
        each = -(-items // 4)
        flats = {r: (each * (r % 4), each * (r % 4 + 1), 4 * each) for r in range(8)}
        tensors.append(Tensor(t.name, t.shape, t.mesh, t.words, flats=flats, same=(0,)))
    taken, totals, ranks = count(lib, tensors)
    balanced(taken, totals)
    assert sorted(taken) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert all(abs(r.plan.bytes - sum(totals.values()) / 8) <= 2 * MIB for r in ranks.values())


def test_pipeline_with_uneven_stages(lib):
    """Stages of 1, 5 and 3 layers over 4, 8 and 2 ranks, dp × tp each; the embedding is tied between the ends."""
    stages = [("dp=2,tp=2", [0, 1, 2, 3], [0]), ("dp=4,tp=2", [*range(4, 12)], [1, 2, 3, 4, 5]),
              ("dp=2,tp=1", [12, 13], [6, 7, 8])]
    world = []
    for mesh, ranks, layers in stages:
        world += transformer(layers, 512, 2048, 0, ("R,S(0)", "R,S(1)", "R,R"), mesh, ranks, ends=False)
    world.append(Tensor("tied", (5003, 512), "ends=2,dp=2", "R,R", [0, 2, 12, 13]))
    world.append(Tensor("zzz.config", (9,), "all=14", "R", [*range(13, -1, -1)]))
    taken, totals, ranks = count(lib, world)
    balanced(taken, totals)
    assert (0, 2, 12, 13) in taken
    for mesh, stage, _ in stages:       # within a stage: as equal as its groups are many
        own = [sum(taken[g][r] for g in taken if set(g) <= set(stage)) for r in stage]
        groups = max(sum(r in g for g in taken) for r in stage)
        assert max(own) - min(own) <= 2 * groups * MIB, (mesh, own)


def test_all_kinds_at_once(lib):
    """Experts on their own meshes between dense tensors, each group balanced by itself."""
    world = []
    for i in range(6):
        world += [Tensor(f"layers.{i}.dense", (700, 512), "dp=8", "R")]
        world += [Tensor(f"layers.{i}.expert.{e}", (640, 400), "edp=2", "R", [e, 4 + e]) for e in range(4)]
    taken, totals, _ = count(lib, sorted(world, key=lambda t: t.name))
    balanced(taken, totals)
    assert len(taken) == 5
