# SPDX-License-Identifier: Apache-2.0
"""core/tensor/shard.h against the brute force of shard_oracle.py, item by item, for every rank.

One call of shard_dump.c gives what the library says of all ranks of a sharding; what the iterator must keep of itself
(order, no item twice, nothing outside, counts) is looked at there."""
import ctypes
import errno
import itertools
import math
import os
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shard_oracle as oracle
import tensorlib as tl
from shard_calls import dump    # noqa: F401 (a fixture)

MESHES = {n: [m for m in itertools.product(range(1, 9), repeat=n) if math.prod(m) <= 8] for n in (1, 2, 3)}
SHAPES = [s for n in range(4) for s in itertools.product(range(8), repeat=n)]
UNITS = [(1, 1, 1, 1, 1, 1, 1, 1), (1, 0, 0, 0, 0, 0, 0, 0), (0, 1, 2, 0, 1, 0, 0, 2), (3, 0, 1, 2, 0, 0, 0, 0),
         (2, 2, 0, 0, 2, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 3)]


def units_for(p):
    found = [u[:p] for u in UNITS] + [(0,) * (p - 1) + (1,), (2,) + (0,) * (p - 1)]
    return sorted({u for u in found if sum(u)})


def placements_for(ndim, p, ragged=True):
    """All placements of one mesh dimension of p ranks that are tried; some fit no shape, which is a test, too."""
    found = [("R",)]
    for d in range(ndim):
        found += [("S", d)] + [("SS", d, n) for n in (1, 2, 3, 4)] + [("IS", d, k) for k in (1, 2, 3, 4, 5, 6, 7)]
    if ragged:
        found += [("RS", t, u) for t in range(ndim + 1) for u in units_for(p)]
    return found


def flat_ranges(rng, wanted):
    """For every rank one that has both ends anywhere, padded or not."""
    for h in wanted:
        n = len(h.items)
        length = n + rng.choice((0, 0, 1, 5)) if rng.random() < .5 else 0
        a = rng.randint(0, length or n)
        yield a, rng.randint(a, length or n), length


def random_window(rng, shape):
    offset = [rng.randint(0, n) for n in shape]
    return offset, [rng.randint(0, n - o) for n, o in zip(shape, offset)]


def compare_window(dump, sharding, wanted, shape, window, flats=None):
    mask = oracle.inside(shape, *window)
    expected = np.concatenate([h.buffer(f) for h, f in zip(wanted, flats or [None] * len(wanted))])
    items, _, _ = dump.all_ranks(sharding, len(wanted), flats, window)
    assert np.array_equal(items, np.where(mask[expected], expected, -1)), f"window {window} of {flats}"


def compare_holders(dump, sharding, wanted, shape, window, ranks):
    """Those whose buffer meets the window; without replicas the first of those that hold the same."""
    mask = oracle.inside(shape, *window)
    order = ranks or range(len(wanted))
    meet = [i for i, h in enumerate(wanted) if mask[h.items].any()]
    first = {}
    for i in meet:
        first.setdefault(wanted[i].items.tobytes(), i)
    found = dump.holders(sharding, window, True)
    assert sorted(found) == sorted(order[i] for i in meet), f"holders of {window}"
    found = dump.holders(sharding, window, False)
    assert sorted(found) == sorted(order[i] for i in first.values()), f"first holders of {window}"


def compare(dump, shape, mesh, placements, rng, more=False, ranks=None):
    """Whether the sharding is allowed; if so, every item of every rank. more: flat ranges, windows and holders, too."""
    try:
        wanted = oracle.all_ranks(shape, mesh, placements)
    except oracle.Refused:
        wanted = None
    code, sharding = dump.sharding(shape, mesh, placements, ranks)
    assert (code == 0) == (wanted is not None), f"check says {code}"
    if wanted is None:
        return False
    items, shapes, boxes = dump.all_ranks(sharding, len(wanted))
    assert np.array_equal(items, np.concatenate([h.items for h in wanted])), "items"
    assert shapes == [h.local_shape for h in wanted]
    assert boxes == [h.boxes() for h in wanted], "number of boxes"
    times = np.bincount(items, minlength=math.prod(shape))
    assert (times == oracle.replicas(mesh, placements)).all(), "coverage"
    if not more:
        return True
    flats = list(flat_ranges(rng, wanted))
    items, shapes, boxes = dump.all_ranks(sharding, len(wanted), flats)
    assert np.array_equal(items, np.concatenate([h.buffer(f) for h, f in zip(wanted, flats)])), f"flat {flats}"
    assert shapes == [(b - a,) for a, b, _ in flats]
    assert boxes == [h.boxes(f) for h, f in zip(wanted, flats)], f"number of boxes of {flats}"
    window = random_window(rng, shape)
    compare_window(dump, sharding, wanted, shape, window)
    compare_window(dump, sharding, wanted, shape, window, flats)
    compare_holders(dump, sharding, wanted, shape, window, ranks)
    mask = sum(1 << i for i, (n, p) in enumerate(zip(mesh, placements)) if p == ("R",) and n > 1)
    assert dump.lib.tensor_sharding_replicated(ctypes.byref(sharding)) == mask
    return True


def try_all(dump, cases, rng, more):
    """Compares every case, the `more` part for one in so many; (allowed, refused)."""
    allowed = refused = 0
    for shape, mesh, placements, ranks in cases:
        try:
            if compare(dump, shape, mesh, placements, rng, more=(allowed + refused) % more == 0, ranks=ranks):
                allowed += 1
            else:
                refused += 1
        except AssertionError as e:
            raise AssertionError(f"{shape} on {mesh} {ranks or ''}: {oracle.words(placements)}: {e}") from e
    print(f"{allowed} shardings compared, {refused} refused by both")
    return allowed, refused


def some_ranks(rng, n):
    """Now and then another rank order: a permutation, a subset, ranks that do not start at 0."""
    if rng.random() < .8:
        return None
    return tuple(rng.sample(range(rng.choice((n, n + 3))), n)) if rng.random() < .7 else tuple(range(5, 5 + n))


def test_every_placement_of_one_mesh_dimension(dump, scale, rng):
    """Every shape, every number of ranks, every placement; by default one of 16 shapes."""
    step = scale(16, 1)
    shapes = SHAPES[rng.randrange(step)::step]
    cases = ((s, m, (p,), None) for m in MESHES[1] for s in shapes for p in placements_for(len(s), m[0]))
    allowed, refused = try_all(dump, cases, rng, more=5)
    assert allowed > 60000 // step and refused > 60000 // step


def test_blocks_of_several_rows_for_several_ranks(dump, scale, rng):
    """No size up to 7 has blocks in each of which every one of several ranks has several rows: 8 and 12 do, with every
    placement of one mesh dimension, and beside another one."""
    shapes = [(8,), (12,), (8, 3), (2, 12), (3, 8, 2), (2, 2, 12), (12, 8)]
    cases = [(s, m, (p,), None) for s in shapes for m in MESHES[1] for p in placements_for(len(s), m[0])]

    def rows(shape, mesh, placements):
        return [shape[p[1]] // p[2] // n for n, p in zip(mesh, placements) if p[0] == "IS" and p[2] > 1 and n > 1 and
                shape[p[1]] % (p[2] * n) == 0]
    assert sum(max(rows(*c[:3]), default=0) > 1 for c in cases) == 16
    for shape, mesh in itertools.product(shapes, ((2, 2), (2, 3), (3, 2), (1, 2), (2, 4))):
        found = [("R",)] + [q for d in range(len(shape))
                            for q in (("S", d), ("SS", d, 2), ("SS", d, 3), ("IS", d, 2), ("IS", d, 3))]
        pairs = [p for p in itertools.product(found, repeat=2) if max(rows(shape, mesh, p), default=0) > 1]
        cases += [(shape, mesh, p, None) for p in rng.sample(pairs, min(len(pairs), scale(20, 50)))]
    allowed, refused = try_all(dump, cases, rng, more=3)
    assert allowed > 1400 and refused > 900


def sampled(rng, n, count):
    for _ in range(count):
        mesh = rng.choice(MESHES[n])
        shape = rng.choice(SHAPES)
        ragged = rng.randrange(2 * n)                   # a mesh dimension, or none: only one can be ragged
        placements = []
        for i, p in enumerate(mesh):
            kinds = ("R", "S", "SS", "IS") if shape else ("R",)
            kind = rng.choice(kinds) if i != ragged else "RS"
            if kind == "RS":
                placements.append(("RS", rng.randint(0, len(shape)), rng.choice(units_for(p))))
            elif kind == "R":
                placements.append(("R",))
            else:
                d = rng.randrange(len(shape))
                k = rng.randint(1, 4) if kind == "SS" or rng.random() < .5 else shape[d] // p or 1
                placements.append((kind, d) if kind == "S" else (kind, d, k))
        yield shape, mesh, tuple(placements), some_ranks(rng, math.prod(mesh))


@pytest.mark.parametrize("n", (2, 3))
def test_placements_of_more_mesh_dimensions(dump, scale, rng, n):
    """A sample: all of them would be 14 million for two mesh dimensions, and a thousand times that for three."""
    count = scale(2500, 160000)
    allowed, refused = try_all(dump, sampled(rng, n, count), rng, more=4)
    assert allowed > count // 3 and refused > count // 50


def test_every_flat_range_and_window(dump, scale, rng):
    """Of a few shardings every range of the local tensor, padded by 2, and of these every window."""
    few = [((3, 4), (2,), (("S", 0),)), ((5, 3), (2,), (("SS", 0, 2),)), ((2, 6), (2,), (("IS", 1, 3),)),
           ((3, 2, 4), (2,), (("R",),)),
           ((2, 3, 2), (3,), (("RS", 2, (1, 0, 2)),)), ((4, 3, 4), (2, 2), (("SS", 2, 2), ("RS", 1, (1, 3)))),
           ((), (2,), (("R",),)),
           ((7,), (2, 2), (("SS", 0, 2), ("S", 0))), ((1, 5, 1), (2,), (("S", 1),)), ((3, 0, 2), (2,), (("S", 0),))]
    windows = 1 if scale(True, False) else 12
    for shape, mesh, placements in few:
        wanted = oracle.all_ranks(shape, mesh, placements)
        code, sharding = dump.sharding(shape, mesh, placements)
        assert code == 0
        longest = max(len(h.items) for h in wanted) + 2
        for a, b in itertools.combinations_with_replacement(range(longest + 1), 2):
            flats = [(a, b, longest)] * len(wanted)
            items, shapes, boxes = dump.all_ranks(sharding, len(wanted), flats)
            where = f"{shape} {mesh} {oracle.words(placements)} {a}:{b}/{longest}"
            assert np.array_equal(items, np.concatenate([h.buffer((a, b, longest)) for h in wanted])), where
            assert shapes == [(b - a,)] * len(wanted) and boxes == [h.boxes((a, b, longest)) for h in wanted], where
            for _ in range(windows):
                compare_window(dump, sharding, wanted, shape, random_window(rng, shape), flats)


def test_flat_range_of_one_box_is_few_boxes(dump):
    """At most 2d-1, and that many do occur."""
    for n in range(1, 5):
        _, sharding = dump.sharding((3,) * n, (1,), (("R",),))
        ranges = itertools.combinations_with_replacement(range(3**n + 1), 2)
        assert max(dump.all_ranks(sharding, 1, [(a, b, 0)])[2][0] for a, b in ranges) == 2 * n - 1


@st.composite
def shardings(draw):
    """Larger ones: up to 6 dimensions, up to 5 mesh dimensions, any order of ranks."""
    shape = tuple(draw(st.lists(st.integers(0, 40) | st.integers(1, 4), max_size=6)))
    while math.prod(shape) > 4000:
        shape = tuple(n // 2 for n in shape)
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    while math.prod(mesh) > 48:
        mesh = mesh[1:]
    dims = st.integers(0, max(len(shape) - 1, 0))
    kinds = [st.just(("R",))]
    if shape:
        kinds += [st.tuples(st.just("S"), dims), st.tuples(st.just("SS"), dims, st.integers(1, 50)),
                  dims.flatmap(lambda d: st.tuples(st.just("IS"), st.just(d),
                                                   st.sampled_from([k for k in range(1, 41) if shape[d] % k == 0])))]
    placements = [draw(st.one_of(kinds)) for _ in mesh]
    if draw(st.booleans()):
        m = draw(st.integers(0, len(mesh) - 1))
        units = draw(st.lists(st.integers(0, 4), min_size=mesh[m], max_size=mesh[m]))
        placements[m] = ("RS", draw(st.integers(0, len(shape))), tuple(units))
    count = math.prod(mesh)
    ranks = draw(st.none() | st.permutations(range(count)) |
                 st.permutations(range(count)).map(lambda r: [3 * x + 7 for x in r]))
    return shape, mesh, tuple(placements), None if ranks is None else tuple(ranks)


def test_larger_ones(dump, scale):
    compared = []

    @settings(max_examples=scale(200, 3500), deadline=None, database=None, suppress_health_check=list(HealthCheck),
              print_blob=True)
    @given(shardings(), st.integers(0, 2**32))
    def run(case, seed):
        shape, mesh, placements, ranks = case
        compared.append(compare(dump, shape, mesh, placements, random.Random(seed), more=True, ranks=ranks))

    run()
    print(f"{sum(compared)} of {len(compared)} allowed")
    assert sum(compared) > len(compared) // 4


def test_ranks_outside_the_mesh_hold_nothing(dump, lib):
    mesh = tl.OwnedMesh(lib, [("dp", 2), ("tp", 2)], [3, 9, 4, 6])
    s = tl.OwnedSharding(lib, (4, 6), mesh, "R,S(0)")
    for rank in (0, 1, 2, 5, 7, 8, 10, 1 << 24, 2**32 - 1):
        for flat in (None, (0, 3), (5, 1)):
            shard = s.shard(rank, flat)
            assert shard.absent and tl.shard_boxes(lib, shard) == []
            assert lib.tensor_shard_box_count(ctypes.byref(shard)) == lib.tensor_shard_items(ctypes.byref(shard)) == 0
    assert not s.shard(9).absent and s.shard(9).local_shape.tuple() == (2, 6)


def test_windows_past_the_end_are_cut(dump, lib):
    s = tl.OwnedSharding(lib, (4, 6), tl.OwnedMesh(lib, "tp=2"), "S(1)")
    far = 2**64 - 1
    assert tl.shard_boxes(lib, s.shard(1), ([1, 4], [far, far])) == [((1, 4), (3, 2), 4, (3, 1))]
    assert tl.shard_boxes(lib, s.shard(1), ([far, far], [far, far])) == []
    assert dump.holders(s.c, ([1, 4], [far, far]), True) == [1]
    assert dump.holders(s.c, ([far, 0], [far, far]), True) == []


# ---- bad input: an error that names the argument ----

def refused(lib, shape, mesh, placement, code, *says):
    with pytest.raises(tl.Failed) as e:
        tl.OwnedSharding(lib, shape, tl.OwnedMesh(lib, mesh), placement)
    assert e.value.code == -code, e.value
    for text in says:
        assert text in e.value.text, e.value.text


def test_placements_that_fit_no_shape_or_mesh(dump, lib):
    E = errno
    refused(lib, (4, 4), "dp=2,tp=2", "R,S(2)", E.EINVAL, "tp", "no dimension 2", "2 dimensions")
    refused(lib, (), "tp=2", "S(0)", E.EINVAL, "tp", "dimension 0")
    refused(lib, (4,), "tp=2", "SS(1,2)", E.EINVAL, "tp", "dimension 1")
    refused(lib, (4,), "tp=2", "IS(15,2)", E.EINVAL, "tp", "dimension 15")
    refused(lib, (9, 4), "tp=2", "IS(0,2)", E.EINVAL, "IS(0,2)", "tp", "divide")
    refused(lib, (6, 4), "tp=2", "IS(0,2)", E.EINVAL, "IS(0,2)", "tp", "divide")
    refused(lib, (4, 4), "tp=2", "RS(0;1,1,2)", E.EINVAL, "RS(0;1,1,2)", "tp", "units")
    refused(lib, (4, 4), "tp=2", "RS(0;0,0)", E.EINVAL, "RS(0;0,0)", "tp", "units", "0")
    refused(lib, (4, 4), "tp=2", "RS(0;1,2)", E.EINVAL, "RS(0;1,2)", "tp", "units", "divide")
    refused(lib, (4, 4), "tp=2", f"RS(0;{2**63},{2**63})", E.EOVERFLOW, "RS(0;", "units")
    refused(lib, (4, 4), "tp=2", "RS(0,1,2;1,1)", E.EINVAL, "tp", "dimensions")
    refused(lib, (4, 4), "dp=2,tp=2", "RS(0;1,1),RS(0;1,1)", E.EINVAL, "ragged")
    refused(lib, (4, 4), "dp=2,tp=2", "R,P", tl.EOPNOTSUPP, "tp", "reduce")
    refused(lib, (4, 4), "dp=2,tp=2", "R", E.EINVAL, "placement", "1", "2 dimensions")
    refused(lib, (4, 4), "tp=2", "R,R", E.EINVAL, "placement", "2", "1 dimension")
    refused(lib, (4, 4), "tp=2", "RS(1;1,1)", E.EINVAL, "RS(1;1,1)", "leading")
    refused(lib, (4, 4), "tp=2", "RS(0,2;1,1)", E.EINVAL, "RS(0,2;1,1)", "leading")
    refused(lib, (4, 4), "tp=2", "SS(0,0)", E.EINVAL, "SS(0,0)")
    refused(lib, (4, 4), "tp=2", "IS(0,0)", E.EINVAL, "IS(0,0)")
    # 3 rows for one, 2 for the other
    refused(lib, (5, 4), "dp=2,tp=2", "S(0),IS(0,3)", E.EINVAL, "IS(0,3)", "tp")
    refused(lib, (5, 4), "dp=2,tp=2", "S(0),RS(0;1,2)", E.EINVAL, "RS(0;1,2)", "tp")
    tl.OwnedSharding(lib, (6, 4), tl.OwnedMesh(lib, "dp=2,tp=2"), "S(0),RS(0;1,2)")
    refused(lib, (985, 4), "dp=9,tp=1", "SS(0,24),IS(0,2)", E.EINVAL, "IS(0,2)", "tp")  # 118 six times, 116, 115, 46


def test_splits_of_zero_that_no_word_can_say(dump, lib):
    for kind in (2, 3):
        array = (tl.Placement * 1)()
        array[0].kind = kind
        mesh, err = tl.OwnedMesh(lib, "tp=2"), tl.Error()
        s = tl.Sharding(tl.Shape.of((4,)), 4, mesh.pointer, array)
        assert lib.tensor_sharding_check(ctypes.byref(s), 1, ctypes.byref(err)) == -errno.EINVAL
        assert b"tp" in err.text and b"split of 0" in err.text


def test_shapes_that_are_too_large(dump, lib):
    E = errno
    refused(lib, (2,) * 17, "tp=2", "R", tl.ELIMIT, "shape", "17")
    refused(lib, (1 << 31, 1 << 30), "tp=2", "S(0)", E.EOVERFLOW, "shape")              # times 4 bytes
    refused(lib, (1 << 63, 2), "tp=2", "S(0)", E.EOVERFLOW, "shape")
    refused(lib, (2**64 - 1,) * 3, "tp=2", "S(0)", E.EOVERFLOW, "shape")
    refused(lib, (1 << 40, 0, 1 << 40), "tp=2", "S(0)", E.EOVERFLOW, "shape")
    refused(lib, (1,) * 16, "tp=2", "RS(;1,0)", tl.ELIMIT, "RS(;1,0)", "17 dimensions")
    s = tl.OwnedSharding(lib, (1 << 30, 1 << 30), tl.OwnedMesh(lib, "tp=2"), "S(0)")    # 2^62 bytes
    assert s.shard(1).local_shape.tuple() == (1 << 29, 1 << 30)


def flat_refused(lib, s, rank, flat, *says):
    with pytest.raises(tl.Failed) as e:
        s.shard(rank, flat)
    assert e.value.code == -errno.EINVAL
    for text in ("flat", *says):
        assert text in e.value.text, e.value.text


def test_flat_ranges_that_do_not_fit(dump, lib):
    s = tl.OwnedSharding(lib, (5, 4), tl.OwnedMesh(lib, "tp=2"), "S(0)")                # 12 items, then 8
    flat_refused(lib, s, 0, (3, 2), "3:2")
    flat_refused(lib, s, 0, (0, 13), "0:13", "12")
    flat_refused(lib, s, 1, (0, 9), "0:9", "8")
    flat_refused(lib, s, 0, (0, 5, 11), "11", "12")
    flat_refused(lib, s, 1, (4, 13, 12), "4:13", "12")
    flat_refused(lib, s, 1, (2**64 - 1, 2**64 - 1), "8")
    flat_refused(lib, s, 1, (0, 2**64 - 1), "8")
    assert s.shard(1, (10, 12, 12)).local_shape.tuple() == (2,) and tl.shard_boxes(lib, s.shard(1, (10, 12, 12))) == []
    assert tl.shard_boxes(lib, s.shard(1, (6, 12, 12))) == [((4, 2), (1, 2), 0, (4, 1))]
    assert s.shard(1, (8, 8)).local_shape.tuple() == (0,)
    # a bucket may be padded to anything
    top = 2**64 - 1
    assert tl.shard_boxes(lib, s.shard(1, (6, top, top))) == [((4, 2), (1, 2), 0, (4, 1))]


# ---- large ones: right, and quick ----

def timed(limit, f):
    started = time.process_time()
    result = f()
    took = time.process_time() - started
    assert took < limit * (20 if os.environ.get("VCKPT_PRELOAD") else 1), f"{took} s"
    return result


def test_a_tensor_of_2_to_the_40(dump, lib):
    mesh = tl.OwnedMesh(lib, "dp=3,tp=5")
    n = 1 << 20

    def boxes(place, rank, flat=None):
        return tl.shard_boxes(lib, tl.OwnedSharding(lib, (n, n), mesh, place).shard(rank, flat))

    c = -(-n // 3)
    d = -(-n // 5)
    assert timed(.1, lambda: boxes("S(0),S(1)", 14)) == [((2 * c, 4 * d), (n - 2 * c, n - 4 * d), 0, (n - 4 * d, 1))]
    row = c + -(-c // 5)
    assert timed(.1, lambda: boxes("S(0),S(0)", 6)) == [((row, 0), (-(-c // 5), n), 0, (n, 1))]
    whole = [((5, 3), (1, n - 3), 0, (n, 1)), ((6, 0), (n - 7, n), n - 3, (n, 1)),
             ((n - 1, 0), (1, 9), (n - 6) * n - 3, (n, 1))]
    assert timed(.1, lambda: boxes("R,R", 0, (5 * n + 3, (n - 1) * n + 9))) == whole
    timed(.2, lambda: len(boxes("SS(0,1000),R", 3)) == 1000 or pytest.fail("runs"))
    s = tl.OwnedSharding(lib, (n, n), mesh, "R,SS(0,1000)")
    shard, c = s.shard(1), -(-n // 1000)
    # a window is answered without walking
    a = 700 * c + -(-c // 5)
    assert timed(.05, lambda: tl.shard_boxes(lib, shard, ([a, 77], [3, 8]))) == [((a, 77), (3, 8),
                                                                                  700 * -(-c // 5) * n + 77, (n, 1))]
    one = tl.OwnedSharding(lib, (1 << 40,), tl.OwnedMesh(lib, "tp=3"), "S(0)").shard(2)
    c = -(-(1 << 40) // 3)
    assert tl.shard_boxes(lib, one) == [((2 * c,), ((1 << 40) - 2 * c,), 0, (1,))]
    ragged = tl.OwnedSharding(lib, (1 << 20, 1 << 20), tl.OwnedMesh(lib, "tp=3"), f"RS(0,1;1,0,{2**40 - 1})").shard(2)
    assert tl.shard_boxes(lib, ragged) == [((0, 1), (1, n - 1), 0, (n, 1)), ((1, 0), (n - 1, n), n - 1, (n, 1))]


def test_too_many_runs_are_refused_not_walked(dump, lib):
    refused(lib, (1 << 40,), "tp=2", f"SS(0,{1 << 25})", tl.ELIMIT, "tp", "stretches")
    refused(lib, (1 << 40,), "tp=2", f"IS(0,{1 << 25})", tl.ELIMIT, "tp", "stretches")
    mesh = tl.OwnedMesh(lib, "tp=2")
    s = tl.OwnedSharding(lib, (1 << 40,), mesh, f"SS(0,{1 << 20})")
    shard = s.shard(1)
    assert timed(2, lambda: lib.tensor_shard_box_count(ctypes.byref(shard))) == 1 << 20
    huge = tl.OwnedSharding(lib, (9, 4), mesh, f"SS(0,{2**64 - 1})")                    # chunks of 1: all to the first
    assert (tl.shard_boxes(lib, huge.shard(0)) == [((0, 0), (9, 4), 0, (4, 1))] and
            tl.shard_boxes(lib, huge.shard(1)) == [])


def test_a_million_ranks(dump, lib):
    mesh = tl.OwnedMesh(lib, "dp=1000,tp=1000")
    s = timed(.1, lambda: tl.OwnedSharding(lib, (1 << 20, 3000), mesh, "S(0),S(1)"))
    c = -(-(1 << 20) // 1000)

    def corner():
        return tl.shard_boxes(lib, s.shard(998 * 1000 + 999)), tl.shard_boxes(lib, s.shard(999 * 1000))
    last = (1 << 20) - 999 * c
    assert timed(.1, corner) == ([((998 * c, 2997), (c, 3), 0, (3, 1))], [((999 * c, 0), (last, 3), 0, (3, 1))]
                                 if last > 0 else [])
    assert timed(.1, lambda: dump.holders(s.c, ([5 * c - 1, 8], [2, 2]), True)) == [4002, 4003, 5002, 5003]
    words = "RS(0,1;" + ",".join(["1", "0"] * 30000) + ")"     # every other rank has one item
    s = tl.OwnedSharding(lib, (100, 300), tl.OwnedMesh(lib, "dp=60000"), words)
    assert timed(.1, lambda: dump.holders(s.c, ([0, 7], [100, 1]), True)) == [2 * (300 * i + 7) for i in range(100)]
    assert timed(.1, lambda: dump.holders(s.c, ([98, 299], [9, 9]), True)) == [2 * (300 * i + 299) for i in (98, 99)]
    s = tl.OwnedSharding(lib, (1 << 20, 3000), mesh, "R,S(1)")
    assert timed(.1, lambda: dump.holders(s.c, ([7, 8], [1, 1]), False)) == [2]
    assert timed(1, lambda: dump.holders(s.c, ([7, 8], [1, 1]), True)) == [1000 * i + 2 for i in range(1000)]
    ranks = list(range(1_000_000))
    ranks.reverse()
    mesh = timed(5, lambda: tl.OwnedMesh(lib, "dp=1000,tp=1000", ranks))
    s = tl.OwnedSharding(lib, (1 << 20, 3000), mesh, "S(0),S(1)")
    assert timed(.1, lambda: tl.shard_boxes(lib, s.shard(999_999))) == [((0, 0), (c, 3), 0, (3, 1))]
    assert s.shard(1_000_000).absent
    units = ",".join(["1"] * 1_000_000)
    mesh = tl.OwnedMesh(lib, "tp=1000000")
    s = timed(1, lambda: tl.OwnedSharding(lib, (1 << 10, 15625, 2), mesh, f"RS(0,1;{units})"))
    assert timed(.1,
                 lambda: tl.shard_boxes(lib, s.shard(999_999))) == [((1023, 15609, 0), (1, 16, 2), 0, (31250, 2, 1))]


def test_sixteen_dimensions(dump, lib, rng):
    for _ in range(30):
        shape = tuple(rng.choice((1, 1, 2)) for _ in range(16))
        mesh = tuple(rng.choice((1, 1, 1, 2)) for _ in range(16))
        places = tuple(("R",) if rng.random() < .3 else ("S", rng.randrange(16)) for _ in range(16))
        assert compare(dump, shape, mesh, places, rng, more=True)
