# SPDX-License-Identifier: Apache-2.0
"""core/save/plan: every rank of a job plans by itself, and over all of them each item is stored once.

A world is a list of tensors in the order that all ranks agree on. Each rank lists those that it holds and, to show that
these change nothing, some that it does not; its meshes are its own copies."""
import collections
import ctypes
import errno
import random
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import tensorlib as tl

MIB = 1 << 20
ITEM = 16
DEFAULT = (128 << 10, 1 << 20, 256, 32 << 10)
FINE = (4096, 16384, 64)        # many pieces in small tensors


class PieceIter(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_void_p), ("box", tl.Box), ("piece", tl.Box), ("done", ctypes.c_bool),
                ("number", ctypes.c_uint64)]


@pytest.fixture(scope="module", autouse=True)
def loaded(lib):
    return tl.load(lib)


def ref(x):
    return ctypes.byref(x)


class Tensor:
    def __init__(self, name, shape, mesh, words, ranks=None, buffer=False, flats=None, lists=None, same=()):
        """mesh: "dp=2,tp=2" over `ranks`; None: one rank alone, ranks[0], holds it. flats: {rank: (from, to[, len])};
        lists: {rank: [(offset, size), ...]}; same: numbers of the mesh dimensions along which these are the same."""
        self.lists, self.same = lists, same
        self.name, self.shape, self.mesh, self.words, self.buffer, self.flats = name, shape, mesh, words, buffer, flats
        self.sizes = [int(w.split("=")[1]) for w in mesh.split(",")] if mesh else [1]
        self.ranks = list(range(int(numpy.prod(self.sizes)))) if ranks is None else list(ranks)

    def group(self, rank):
        """Ranks of its replica group, from numpy."""
        if not self.mesh:
            return (rank,)
        at = numpy.array(self.ranks).reshape(self.sizes)
        where = numpy.argwhere(at == rank)[0]
        split = [w.strip() == "R" and (not (self.flats or self.lists) or m in self.same)
                 for m, w in enumerate(split_words(self.words))]
        return tuple(at[tuple(slice(None) if r else i for r, i in zip(split, where))].reshape(-1).tolist())


def split_words(words):
    depth, parts = 0, [""]
    for c in words:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


class Rank:
    """What one rank lists, and its plan."""

    def __init__(self, lib, world, rank, params, rng, strangers=True):
        self.lib, self.rank, self.params = lib, rank, params
        self.tensors = [t for t in world if rank in t.ranks or (strangers and t.mesh and rng.random() < 0.5)]
        meshes, self.keep, self.lists = {}, [], []
        self.array = (tl.SaveTensor * max(len(self.tensors), 1))()
        for c, t in zip(self.array, self.tensors):
            if t.mesh:
                key = (t.mesh, tuple(t.ranks))
                if key not in meshes or rng.random() < 0.3:
                    meshes[key] = tl.OwnedMesh(lib, t.mesh, t.ranks if t.ranks != list(range(len(t.ranks))) or
                                               rng.random() < 0.5 else None)
                sharding = tl.OwnedSharding(lib, t.shape, meshes[key], t.words, ITEM)
                self.keep += [sharding]
                c.sharding = sharding.c
            else:
                c.sharding.shape, c.sharding.item_bytes = tl.Shape.of(t.shape), ITEM
            c.component, c.name, c.buffer = b"model", t.name.encode(), t.buffer
            flat = t.flats and t.flats.get(rank)
            if flat:
                c.flat = ctypes.pointer(tl.Flat(flat[0], flat[1], flat[2] if len(flat) > 2 else 0))
            if t.lists and rank in t.lists:
                boxes = tl.Boxes(len(t.shape), 0, 0, None)
                for offset, size in t.lists[rank]:
                    assert lib.tensor_boxes_add(ref(boxes), ref(tl.Box.of(offset, size))) == 0
                self.lists.append(boxes)
                c.boxes = ctypes.pointer(boxes)
            c.same_dims = sum(1 << m for m in t.same)
        self.plan = tl.make_plan(lib, self.array, len(self.tensors), params, rank)
        self.boxes = collections.defaultdict(list)
        for i in range(self.plan.nboxes):
            self.boxes[self.tensors[self.plan.boxes[i].tensor]].append(self.plan.boxes[i])
        order = [self.plan.boxes[i].tensor for i in range(self.plan.nboxes)]
        assert order == sorted(order)

    def held(self, t):
        """Boxes of its shard: (offset, size, local offset, local strides)."""
        if not t.mesh:
            strides = tuple(int(numpy.prod(t.shape[d + 1:], dtype=int)) for d in range(len(t.shape)))
            return [((0,) * len(t.shape), t.shape, 0, strides)] if 0 not in t.shape else []
        if t.lists:
            found, at = [], 0
            for offset, size in t.lists.get(self.rank, ()):
                found.append((offset, size, at,
                              tuple(int(numpy.prod(size[d + 1:], dtype=int)) for d in range(len(size)))))
                at += int(numpy.prod(size, dtype=int))
            return [box for box in found if 0 not in box[1]]
        sharding = next(k for k, x in zip(self.keep, (x for x in self.tensors if x.mesh)) if x is t)
        return tl.shard_boxes(self.lib, sharding.shard(self.rank, t.flats and t.flats.get(self.rank)))

    def __del__(self):
        self.lib.save_plan_release(ref(self.plan))
        for boxes in self.lists:
            self.lib.tensor_boxes_release(ref(boxes))


def slices(offset, size):
    return tuple(slice(o, o + n) for o, n in zip(offset, size))


def pieces(lib, t, params, offset, size):
    grid, shape, it, box = tl.Grid(), tl.Shape.of(t.shape), PieceIter(), tl.Box.of(offset, size)
    assert lib.tensor_grid_init(ref(grid), ref(shape), ITEM, tl.GridParams(*params)) == 0
    found = []
    lib.tensor_piece_first(ref(it), ref(grid), ref(box))
    while not it.done:
        found.append(it.piece.pair(len(t.shape)))
        lib.tensor_piece_next(ref(it))
    return found


def bytes_of(boxes):
    return sum(int(numpy.prod(size, dtype=int)) for _, size, *_ in boxes) * ITEM


def check_tensor(lib, rank, t, numbers, counts):
    """One rank's boxes of one tensor: counted, where they lie locally, and that they are cut as the held box is."""
    held, n = rank.held(t), len(t.shape)
    whole = [p for o, s, *_ in held for p in pieces(lib, t, rank.params, o, s)]
    stored, sizes = [], []
    local = {}
    for offset, size, at, stride in held:
        view = numbers[slices(offset, size)]
        for i, number in enumerate(view.reshape(-1)) if view.size < 400 else ():
            where = numpy.unravel_index(i, size) if n else ()
            local[at + int(sum(x * s for x, s in zip(where, stride)))] = int(number)
    length = max((at + sum((m - 1) * s for m, s in zip(size, stride)) + 1 for _, size, at, stride in held), default=0)
    buffer = numpy.full(length, -1, dtype=numpy.int64)
    for offset, size, at, stride in held:
        as_strided(buffer[at:], size, [8 * s for s in stride])[...] = numbers[slices(offset, size)]
    assert all(buffer[k] == v for k, v in local.items())
    if 0 in t.shape:    # the first rank of its mesh has the row, and nobody else has
        assert [b.at.box.pair(n)
                for b in rank.boxes.get(t, ())] == [((0,) * n, tuple(t.shape))] * (rank.rank == t.ranks[0])
        return 0, 0, sum(b.pieces for b in rank.boxes.get(t, ()))
    for b in rank.boxes.get(t, ()):
        offset, size = b.at.box.pair(n)
        assert all(s > 0 for s in size)
        counts[slices(offset, size)] += 1
        reach = (b.at.local_offset + sum((m - 1) * s for m, s in zip(size, b.at.local_stride)) if n
                 else b.at.local_offset)
        assert reach < length
        got = as_strided(buffer[b.at.local_offset:], size, [8 * s for s in b.at.local_stride[:n]])
        assert (got == numbers[slices(offset, size)]).all(), (t.name, rank.rank)
        cut = pieces(lib, t, rank.params, offset, size)
        assert b.pieces == len(cut)
        stored += cut
        sizes.append((offset, size))
    if stored:  # a run of the held pieces, in their order
        first = whole.index(stored[0])
        assert whole[first:first + len(stored)] == stored, (t.name, rank.rank)
    return bytes_of(sizes), bytes_of(held), len(stored)


def check_world(lib, world, params=DEFAULT, seed=0, strangers=True):
    rng = random.Random(seed)
    ranks = {r: Rank(lib, world, r, params, rng, strangers) for r in sorted({r for t in world for r in t.ranks})}
    stored_by, held_by, piece_count = (collections.defaultdict(int) for _ in range(3))
    groups = collections.defaultdict(lambda: [0, collections.Counter()])   # ranks -> total, {rank: stored}
    for t in world:
        numbers = numpy.arange(int(numpy.prod(t.shape, dtype=int)), dtype=numpy.int64).reshape(t.shape)
        counts = numpy.zeros(t.shape, dtype=numpy.int32)
        for r in t.ranks:
            stored, held, n = check_tensor(lib, ranks[r], t, numbers, counts)
            stored_by[r], held_by[r], piece_count[r] = stored_by[r] + stored, held_by[r] + held, piece_count[r] + n
            group = t.group(r)
            if len(group) == 1:
                assert stored == held, (t.name, r)
            elif t.buffer:
                assert stored == (held if r == group[0] else 0), (t.name, r)
            else:
                if held < MIB:
                    assert stored in (0, held), (t.name, r)
                groups[group][0] += held if r == group[0] else 0
                groups[group][1][r] += stored
        assert (counts == 1).all(), (t.name, counts.min(), counts.max())
    shared = collections.Counter()
    for group, (total, taken) in groups.items():
        assert sum(taken.values()) == total
        for r in group:
            assert abs(taken[r] - total / len(group)) <= MIB, (group, total, taken)
            shared[r] += taken[r]
    for r, rank in ranks.items():
        p = rank.plan
        assert (p.bytes, p.held_bytes, p.shared_bytes, p.pieces) == (stored_by[r], held_by[r], shared[r],
                                                                     piece_count[r])
    return ranks


BIG = [(300, 700), (1024, 257), (200000,), (50, 40, 60), (90, 70, 5, 5)]
SMALL = [(64, 64), (700,), (), (3, 5, 7), (0, 8), (65535,)]


@pytest.mark.parametrize("params", [DEFAULT, FINE])
def test_ddp(lib, params):
    world = [Tensor(f"t{i}", s, "dp=4", "R") for i, s in enumerate(BIG + SMALL + BIG)]
    world += [Tensor(f"statistics.{i}", s, "dp=4", "R", buffer=True) for i, s in enumerate([(64,), (300, 700)])]
    ranks = check_world(lib, world, params)
    assert min(r.plan.shared_bytes for r in ranks.values()) > 6 * MIB


def test_hsdp(lib):
    world = [Tensor(f"t{i}", s, "replicate=2,shard=4", "R,S(0)") for i, s in enumerate(BIG * 2 + [(512, 512), (9, 9)])]
    world += [Tensor("norm", (300,), "replicate=2,shard=4", "R,R"),
              Tensor("running", (640, 640), "replicate=2,shard=4", "R,S(1)", buffer=True)]
    check_world(lib, world)


def test_tp_and_dp(lib):
    world = []
    for layer in range(5):
        world += [Tensor(f"{layer}.up", (640, 512), "dp=3,tp=2", "R,S(0)"),
                  Tensor(f"{layer}.norm", (512,), "dp=3,tp=2", "R,R"),
                  Tensor(f"{layer}.down", (512, 640), "dp=3,tp=2", "R,S(1)"),
                  Tensor(f"{layer}.embedding", (900, 256), "dp=3,tp=2", "R,R"),
                  Tensor(f"{layer}.qkv", (768, 256), "dp=3,tp=2", "R,IS(0,3)"),
                  Tensor(f"{layer}.strided", (600, 300), "dp=3,tp=2", "SS(0,2),S(0)")]
    check_world(lib, world, FINE)
    check_world(lib, world)


def test_zero(lib):
    """Each replica keeps a range of the flattened tensor; the last of them padded."""
    world = []
    for i, shape in enumerate([(300, 700), (129, 33), (7,), (64, 64, 9)]):
        n = int(numpy.prod(shape))
        c = -(-n // 4)
        world += [Tensor(f"adam.{i}", shape, "dp=4", "R", flats={r: (c * r, c * (r + 1), 4 * c) for r in range(4)}),
                  Tensor(f"weight.{i}", shape, "dp=4", "R")]
    ranks = check_world(lib, world)
    assert all(r.plan.bytes > r.plan.shared_bytes > 0 for r in ranks.values())


def test_zero_within_replicas(lib):
    """Flat ranges over one dimension of the mesh, the same ones along the other: shared along that."""
    world = []
    for i, shape in enumerate([(900, 700), (129, 33), (64, 64, 90)]):
        c = -(-int(numpy.prod(shape)) // 4)
        flats = {r: (c * (r % 4), c * (r % 4 + 1), 4 * c) for r in range(8)}
        world += [Tensor(f"adam.{i}", shape, "replicate=2,shard=4", "R,R", flats=flats, same=(0,)),
                  Tensor(f"mean.{i}", shape, "replicate=2,shard=4", "R,R", flats=flats, same=(0,), buffer=True),
                  Tensor(f"weight.{i}", shape, "replicate=2,shard=4", "R,S(0)")]
    ranks = check_world(lib, world)
    assert all(r.plan.bytes > 0 and r.plan.shared_bytes > 0 for r in ranks.values())


def test_empty_tensors(lib):
    """Somebody stores their rows: exactly one rank of each one's mesh."""
    world = [Tensor("none", (0, 5), "dp=4", "R"), Tensor("cut", (0, 5), "dp=4", "S(0)"),
             Tensor("other", (7, 0), "dp=2,tp=2", "S(0),R"),
             Tensor("alone", (0,), None, None, ranks=[2]),
             Tensor("late", (3, 0, 2), "tp=2", "R", ranks=[3, 1], buffer=True),
             Tensor("ragged", (0, 3), "dp=4", "RS(0;1,0,2,1)"),
             Tensor("listed", (0, 3), "dp=2", "R", lists={0: [((0, 0), (0, 3))], 1: []})]
    ranks = check_world(lib, world)
    assert sum(len(r.boxes) for r in ranks.values()) == len(world)


def test_raw_box_lists(lib):
    """A checkerboard by hand: each rank has cells of its own, or shares them with another one."""
    cells = [((a, b), (300, 250)) for a in (0, 300, 600) for b in (0, 250, 500, 750)] + [((900, 0), (0, 1000))]
    world = [Tensor("own", (900, 1000), "x=3", "R", lists={r: cells[r::3] for r in range(3)}),
             Tensor("shared", (900, 1000), "replicate=2,x=3", "R,R", lists={r: cells[r % 3::3] for r in range(6)},
                    same=(0,)),
             Tensor("all", (900, 1000), "replicate=2,x=3", "R,R", lists={r: cells for r in range(6)}, same=(0, 1))]
    check_world(lib, world)
    check_world(lib, world, FINE)


def test_pipeline_with_uneven_stages(lib):
    """Three stages of 4, 4 and 2 ranks with 1, 3 and 2 layers; the embedding is tied between first and last."""
    stages = [("dp=2,tp=2", [0, 1, 2, 3], [0]), ("dp=2,tp=2", [4, 5, 6, 7], [1, 2, 3]), ("dp=2,tp=1", [8, 9], [4, 5])]
    world = []
    for mesh, ranks, layers in stages:
        for layer in layers:
            world += [Tensor(f"{layer}.up", (800, 300), mesh, "R,S(0)", ranks),
                      Tensor(f"{layer}.norm", (800,), mesh, "R,R", ranks),
                      Tensor(f"{layer}.down", (300, 800), mesh, "R,S(1)", ranks)]
    world.append(Tensor("tied", (4000, 96), "ends=2,dp=2", "R,R", [0, 2, 8, 9]))
    world.append(Tensor("global", (1000, 200), "all=10", "R", [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]))
    world.append(Tensor("stage1.rng", (5,), None, None, [4]))
    for seed in range(4):
        check_world(lib, world, seed=seed)
    only = check_world(lib, world, strangers=False)
    with_others = check_world(lib, world, seed=9)
    for r in only:
        assert (only[r].plan.bytes, only[r].plan.nboxes) == (with_others[r].plan.bytes, with_others[r].plan.nboxes)


def test_one_sequence_for_a_group_over_different_meshes(lib):
    """Two meshes whose groups are the same ranks in the same order: the small tensors of both are balanced together; in
    another order, they are two sequences."""
    same = [Tensor("a", (600, 200), "dp=2", "R", [5, 3]), Tensor("b", (600, 200), "x=2,one=1", "R,S(0)", [5, 3])]
    ranks = check_world(lib, same)
    assert [ranks[r].plan.nboxes for r in (5, 3)] == [1, 1]    # as two sequences each would be cut
    other = [Tensor("a", (600, 200), "dp=2", "R", [5, 3]), Tensor("b", (600, 200), "dp=2", "R", [3, 5])]
    ranks = check_world(lib, other)
    assert [ranks[r].plan.nboxes for r in (5, 3)] == [2, 2]


def test_replicas_need_an_order_but_nothing_else(lib):
    """Experts: dense tensors between those of a rank's own experts."""
    world = []
    for i in range(12):
        world.append(Tensor(f"expert.{i}", (400, 300), "edp=2", "R", [i % 4, 4 + i % 4]))
        world.append(Tensor(f"dense.{i}", (500, 90 * (1 + i % 3)), "dp=8", "R"))
    for seed in range(3):
        check_world(lib, world, seed=seed)


def some_factors(rng, n):
    sizes = []
    while n > 1 and len(sizes) < 3:
        f = rng.choice([d for d in range(2, n + 1) if n % d == 0])
        sizes.append(f)
        n //= f
    if n > 1:
        sizes[-1] *= n
    return sizes or [1]


def random_world(seed):
    rng = random.Random(seed)
    everyone = rng.sample(range(40), rng.randrange(1, 13))
    meshes = []
    for _ in range(rng.randrange(1, 4)):
        ranks = rng.sample(everyone, rng.randrange(1, len(everyone) + 1))
        meshes.append((some_factors(rng, len(ranks)), ranks))
    world = []
    for i in range(rng.randrange(1, 12)):
        sizes, ranks = rng.choice(meshes)
        shape = rng.choice([rng.choice(BIG), rng.choice(SMALL),
                            tuple(rng.randrange(1, (150000, 400, 60)[d]) for _ in range(d + 1))
                            if (d := rng.randrange(3)) is not None else ()])
        words = []
        for _ in sizes:
            kind = rng.choice(["R", "R", "S", "SS"]) if shape else "R"
            d = rng.randrange(max(len(shape), 1))
            words.append({"R": "R", "S": f"S({d})", "SS": f"SS({d},{rng.randrange(1, 4)})"}[kind])
        mesh = ",".join(f"d{j}={n}" for j, n in enumerate(sizes))
        world.append(Tensor(f"t{i}", shape, mesh, ",".join(words), ranks, buffer=rng.random() < 0.15))
    return world, rng.choice([DEFAULT, FINE])


def test_random_worlds(lib, scale):
    @given(st.integers(0, 1 << 32))
    @settings(max_examples=scale(40, 2000), deadline=None)
    def run(seed):
        world, params = random_world(seed)
        check_world(lib, world, params, seed)
    run()


def make(lib, tensors, rank=0, params=DEFAULT):
    return tl.make_plan(lib, (tl.SaveTensor * max(len(tensors), 1))(*tensors), len(tensors), params, rank)


def plan_tensor(lib, shape, mesh, words, flat=None):
    sharding = tl.OwnedSharding(lib, shape, mesh, words, ITEM)
    t = tl.SaveTensor(sharding=sharding.c)
    if flat:
        t.flat = ctypes.pointer(tl.Flat(*flat))
    return t, sharding


def test_nothing_is_planned_as_nothing(lib):
    assert make(lib, []).nboxes == 0
    mesh = tl.OwnedMesh(lib, "dp=2")
    t, _keep = plan_tensor(lib, (3, 4), mesh, "R")
    plan = make(lib, [t], rank=7)
    assert (plan.nboxes, plan.bytes, plan.held_bytes) == (0, 0, 0)
    lib.save_plan_release(None)


def test_a_million_ranks(lib):
    """A group is hashed once for each mesh, whatever the number of tensors."""
    n = 1_000_000
    meshes = [tl.OwnedMesh(lib, f"dp={n}"), tl.OwnedMesh(lib, f"dp={n // 10},tp=10"), tl.OwnedMesh(lib, f"x={n}")]
    words = ["R", "R,R", "R"]
    kept = [plan_tensor(lib, (1 << 20, 1 << 14), meshes[i % 3], words[i % 3]) for i in range(300)]
    total = 300 * (1 << 34) * ITEM
    start = time.process_time()
    for rank in (0, 7, n - 1):
        plan = make(lib, [t for t, _ in kept], rank)
        assert plan.held_bytes == total and abs(plan.bytes - total // n) <= MIB
        lib.save_plan_release(ref(plan))
    assert time.process_time() - start < 10


def test_errors_name_the_tensor(lib):
    mesh = tl.OwnedMesh(lib, "dp=2")
    good, _keep1 = plan_tensor(lib, (3, 4), mesh, "R")
    bad, _keep0 = plan_tensor(lib, (3, 4), mesh, "R", flat=(0, 99, 0))
    for params, number in (DEFAULT, 1), ((0, 1, 1), 0):
        with pytest.raises(tl.Failed) as failed:
            make(lib, [good, bad] if number else [good], params=params)
        assert failed.value.code == -errno.EINVAL and f"tensor {number}" in failed.value.text
    listed, _keep2 = plan_tensor(lib, (3, 4), mesh, "R")
    boxes = tl.Boxes(2, 0, 0, None)
    assert lib.tensor_boxes_add(ref(boxes), ref(tl.Box.of((2, 0), (2, 1)))) == 0
    listed.boxes = ctypes.pointer(boxes)
    with pytest.raises(tl.Failed, match=r"tensor 1: box 0, \[2:4, 0:1\], is not inside"):
        make(lib, [good, listed])
    lib.tensor_boxes_release(ref(boxes))
    listed.flat = ctypes.pointer(tl.Flat(0, 1, 0))
    with pytest.raises(tl.Failed, match="tensor 1: with a list of boxes there is no flat range"):
        make(lib, [good, listed])
    cut, _keep3 = plan_tensor(lib, (3, 4), mesh, "S(0)")
    cut.boxes = ctypes.pointer(boxes)
    with pytest.raises(tl.Failed, match="tensor 1: .* all placements are R"):
        make(lib, [good, cut])
    alone = tl.SaveTensor()
    alone.sharding.shape, alone.sharding.item_bytes = tl.Shape.of((1 << 40, 1 << 40)), 4
    with pytest.raises(tl.Failed) as failed:
        make(lib, [good, alone])
    assert failed.value.code == -errno.EOVERFLOW and "tensor 1" in failed.value.text


def test_sums_of_huge_tensors_are_checked(lib):
    mesh = tl.OwnedMesh(lib, "dp=2")
    kept = [plan_tensor(lib, (1 << 29, 1 << 28), mesh, "R") for _ in range(9)]
    plan = make(lib, [t for t, _ in kept[:7]])
    assert plan.held_bytes == 7 << 61 and abs(plan.bytes - plan.held_bytes // 2) <= MIB
    lib.save_plan_release(ref(plan))
    with pytest.raises(tl.Failed) as failed:
        make(lib, [t for t, _ in kept])
    assert failed.value.code == -errno.EOVERFLOW and "tensor 7" in failed.value.text
