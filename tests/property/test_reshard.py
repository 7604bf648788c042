# SPDX-License-Identifier: Apache-2.0
"""core/tensor/reshard: windows of pieces against a filtered walk of all of them, and the relation against numpy: a
tensor of numbered items is stored as the pieces of one random sharding's boxes, and the buffers of another are filled
from them by nothing but the lines."""
import ctypes
import errno
import math
import random
import time

import numpy as np
import pytest
import shard_oracle as oracle
import tensorlib as tl

TYPES = {2: np.int16, 4: np.int32, 8: np.int64}


@pytest.fixture(scope="module", autouse=True)
def types(lib):
    tl.load(lib)
    lib.tensor_piece_at.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]


def ref(x):
    return ctypes.byref(x)


def make_grid(lib, shape, item, params):
    g, s = tl.Grid(), tl.Shape.of(shape)
    assert lib.tensor_grid_init(ref(g), ref(s), ctypes.c_uint(item), tl.GridParams(*params)) == 0
    return g


def random_params(rng):
    m = rng.choice([1, 8, 16, 64, 256])
    return m, m * rng.choice([1, 2, 8]), rng.choice([1, 8, 32])


def random_box(rng, shape, empty=False):
    pairs = []
    for n in shape:
        size = rng.randint(0 if empty else 1, n)
        pairs.append((rng.randint(0, n - size), size))
    return tuple(o for o, _ in pairs), tuple(s for _, s in pairs)


def meet(a, b):
    """What two boxes, each (offset, size), have in common; None: nothing."""
    spans = [(max(ao, bo), min(ao + an, bo + bn)) for ao, an, bo, bn in zip(*a, *b)]
    return None if any(low >= high for low, high in spans) else (tuple(low for low, _ in spans),
                                                                 tuple(high - low for low, high in spans))


# ---- windows ----

def walk(lib, g, box):
    it, found, b = tl.PieceIter(), [], tl.Box.of(*box)
    lib.tensor_piece_first(ref(it), ref(g), ref(b))
    while not it.done:
        found.append((it.number, it.piece.pair(g.shape.ndim)))
        lib.tensor_piece_next(ref(it))
    return found


def windowed(lib, g, box, window, limit=10 ** 6):
    w, found, n = tl.PieceWindow(), [], g.shape.ndim
    b, v = tl.Box.of(*box), tl.Box.of(*window)
    lib.tensor_piece_window_first(ref(w), ref(g), ref(b), ref(v))
    while not w.done and len(found) < limit:
        found.append((w.number, w.piece.pair(n), w.part.pair(n)))
        lib.tensor_piece_window_next(ref(w))
    return found


def test_windows_are_a_filtered_walk(lib, scale):
    rng = random.Random(11)
    several = 0
    for _ in range(scale(300, 8000)):
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 13, 24, 40]) for _ in range(rng.randint(1, 4)))
        g = make_grid(lib, shape, rng.choice([1, 2, 4]), random_params(rng))
        box = random_box(rng, shape)
        pieces = walk(lib, g, box)
        for _ in range(4):
            window = random_box(rng, shape)
            expected = [(n, p, meet(p, window)) for n, p in pieces if meet(p, window)]
            assert windowed(lib, g, box, window) == expected, (shape, box, window)
            several += len(expected) > 3
        assert windowed(lib, g, box, ([0] * len(shape), shape)) == [(n, p, p) for n, p in pieces]
    assert several > scale(100, 2500)


def test_numbers_are_those_of_the_grid(lib):
    """Thin shards of a tensor of real size: widened pieces, and more of them than one wants to walk."""
    rng = random.Random(12)
    for shape in [(28672, 8192), (8, 14336, 4096), (50257, 768), (10 ** 9,), (33, 65537)]:
        g = make_grid(lib, shape, 2, (128 << 10, 1 << 20, 512))
        for _ in range(30):
            box, window = random_box(rng, shape), random_box(rng, shape)
            found = windowed(lib, g, box, window, 200)
            assert bool(found) == bool(meet(box, window))
            for n, piece, part in found:
                b, p = tl.Box.of(*box), tl.Box()
                assert lib.tensor_piece_at(ref(g), ref(b), n, ref(p)) == 0
                assert p.pair(len(shape)) == piece and meet(piece, window) == part


def test_nothing_is_done_at_once(lib):
    g = make_grid(lib, (6, 4), 4, (8, 16, 1))
    for box, window in [(((0, 0), (0, 4)), ((0, 0), (6, 4))), (((0, 0), (6, 4)), ((2, 2), (0, 1))),
                        (((0, 0), (2, 2)), ((2, 0), (2, 2)))]:
        assert windowed(lib, g, box, window) == []
    scalar = make_grid(lib, (), 4, (8, 16, 1))
    assert windowed(lib, scalar, ((), ()), ((), ())) == [(0, ((), ()), ((), ()))]
    empty = make_grid(lib, (0, 4), 4, (8, 16, 1))
    assert windowed(lib, empty, ((0, 0), (0, 4)), ((0, 0), (0, 4))) == []


def test_a_window_costs_what_is_found(lib):
    """Of 2^41 pieces a few: an implementation that walks does not end."""
    shape = (2 ** 30, 2 ** 30)
    g = make_grid(lib, shape, 2, (128 << 10, 1 << 20, 512))
    begin = time.process_time()
    for i in range(300):
        found = windowed(lib, g, ((5, 7), (2 ** 30 - 6, 2 ** 30 - 9)), ((2 ** 29 + i, 2 ** 29), (20, 1000)))
        assert len(found) == 20 and found[0][0] > 2 ** 39
    assert time.process_time() - begin < 5


# ---- the relation ----

def random_placements(rng, shape, mesh):
    out = []
    for size in mesh:
        kind = rng.choice(["R", "S", "S", "SS", "IS", "RS"]) if shape else "R"
        if kind == "S":
            out.append(("S", rng.randrange(len(shape))))
        elif kind in ("SS", "IS"):
            out.append((kind, rng.randrange(len(shape)), rng.choice([1, 2, 3])))
        elif kind == "RS" and not any(p[0] == "RS" for p in out):
            out.append(("RS", rng.randint(1, len(shape)), tuple(rng.randint(0, 2) for _ in range(size))))
        else:
            out.append(("R",))
    return tuple(out)


def random_sharding(lib, rng, shape, item):
    """(what each rank holds by the oracle, the library's sharding), of up to 8 ranks."""
    while True:
        mesh = tuple(rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 2)))
        placements = random_placements(rng, shape, mesh)
        try:
            held = oracle.all_ranks(shape, mesh, placements)
        except oracle.Refused:
            continue
        owned = tl.OwnedMesh(lib, [(f"m{i}", n) for i, n in enumerate(mesh)])
        return held, tl.OwnedSharding(lib, shape, owned, oracle.words(placements), item), placements


def random_flat(rng, length):
    """Ranges that together are the whole local buffer, and one with padding; None: not flat."""
    if rng.random() < 0.6:
        return [None]
    at = rng.randint(0, length)
    return [(0, at, 0), (at, length + 3, length + 3)]


class Sources:
    """The boxes that a step holds, each once, in an index."""

    def __init__(self, lib, ndim, boxes):
        self.lib, self.list = lib, boxes
        self.c = tl.Boxes(ndim=ndim)
        for b in boxes:
            box = tl.Box.of(*b)
            assert lib.tensor_boxes_add(ref(self.c), ref(box)) == 0
        self.index = ctypes.c_void_p()
        assert lib.tensor_box_index_new(ref(self.c), ref(self.index)) == 0

    def close(self):
        self.lib.tensor_box_index_free(self.index)
        self.lib.tensor_boxes_release(ref(self.c))


def relation(lib, g, sources, shard, stop=None):
    """All lines of all boxes of a shard, as Python values."""
    lines, n = [], g.shape.ndim

    def add(_, line):
        at = line.contents
        lines.append((at.box, at.piece, at.piece_box.pair(n), at.part.pair(n), at.local_offset,
                      tuple(at.local_stride[:n])))
        return stop if stop and len(lines) == 2 else 0
    it, r, f = tl.ShardIter(), 0, tl.LINE_FUNC(add)
    lib.tensor_shard_first(ref(it), ref(shard), None)
    while r == 0 and not it.done:
        r = lib.tensor_reshard_box(ref(g), sources.index, ref(sources.c), ref(it.at), f, None)
        lib.tensor_shard_next(ref(it))
    return r, lines


def strides(array):
    return tl.U64x16(*[max(s, 0) for s in array.strides])


def gather(lib, g, piece, whole):
    """The stored bytes of a piece of the whole tensor."""
    out = np.zeros(math.prod(piece[1]), whole.dtype)
    p, origin = tl.Box.of(*piece), tl.U64x16()
    lib.tensor_piece_gather(ref(g), ref(p), None, out.ctypes.data_as(ctypes.c_void_p),
                            whole.ctypes.data_as(ctypes.c_void_p),
                            origin, strides(whole))
    return out


def scatter(lib, g, line, stored, buffer, count):
    _, _, piece, part, offset, stride = line
    p, w = tl.Box.of(*piece), tl.Box.of(*part)
    positions = np.array(offset)
    for d, (size, step) in enumerate(zip(part[1], stride)):
        positions = positions[..., None] + np.arange(size) * step
    assert positions.max() < len(buffer)
    count[positions.ravel()] += 1
    base = ctypes.c_void_p(buffer.ctypes.data + offset * buffer.itemsize)
    lib.tensor_piece_scatter(ref(g), ref(p), ref(w), stored.ctypes.data_as(ctypes.c_void_p), base, tl.U64x16(*part[0]),
                             tl.U64x16(*[s * buffer.itemsize for s in stride]))


def fill(lib, g, whole, sources, target, want):
    """Fills a buffer from the pieces and compares it."""
    r, lines = relation(lib, g, sources, target)
    assert r == 0
    buffer, count = np.full(len(want), -1, whole.dtype), np.zeros(len(want), int)
    for line in lines:
        box, number, piece, part, *_ = line
        at, b = tl.Box(), tl.Box.of(*sources.list[box])
        assert lib.tensor_piece_at(ref(g), ref(b), number, ref(at)) == 0 and at.pair(g.shape.ndim) == piece
        assert not whole.shape or meet(piece, part) == part
        scatter(lib, g, line, gather(lib, g, piece, whole), buffer, count)
    assert (count == (want >= 0)).all()
    assert (buffer == want).all()
    return len(lines)


def source_boxes(lib, rng, held, sharding):
    """Boxes of all ranks, replicas once; some ranks hold theirs as flat ranges."""
    boxes = {}
    for rank, h in enumerate(held):
        key = h.items.tobytes()
        if key in boxes or len(h.items) == 0:
            continue
        boxes[key] = [b[:2] for flat in random_flat(rng, len(h.items))
                      for b in tl.shard_boxes(lib, sharding.shard(rank, flat))]
    out = [b for some in boxes.values() for b in some]
    rng.shuffle(out)
    return out


def test_buffers_are_filled_exactly(lib, scale):
    rng = random.Random(13)
    lines, kinds = 0, set()
    for _ in range(scale(150, 2000)):
        item = rng.choice(list(TYPES))
        shape = tuple(rng.choice([1, 2, 4, 6, 7, 12, 18]) for _ in range(rng.choice([0, 1, 2, 2, 3, 3])))
        whole = oracle.numbered(shape).astype(TYPES[item])
        g = make_grid(lib, shape, item, random_params(rng))
        held, sharding, placements = random_sharding(lib, rng, shape, item)
        sources = Sources(lib, len(shape), source_boxes(lib, rng, held, sharding))
        kinds |= {p[0] for p in placements}
        held, sharding, placements = random_sharding(lib, rng, shape, item)
        for rank, h in enumerate(held):
            for flat in random_flat(rng, len(h.items)):
                lines += fill(lib, g, whole, sources, sharding.shard(rank, flat), h.buffer(flat))
        assert relation(lib, g, sources, sharding.shard(len(held)))[1] == []    # a rank outside the mesh holds nothing
        sources.close()
    print(f"\n{lines} lines")
    assert lines > scale(6000, 80000) and kinds == {"R", "S", "SS", "IS", "RS"}


def test_what_the_callback_returns_ends_it(lib):
    shape = (16, 16)
    g = make_grid(lib, shape, 4, (8, 16, 1))
    sources = Sources(lib, 2, [((0, 0), (16, 8)), ((0, 8), (16, 8))])
    mesh = tl.OwnedMesh(lib, "dp=1")
    sharding = tl.OwnedSharding(lib, shape, mesh, "R", 4)
    for stop in (7, -errno.EIO):
        r, lines = relation(lib, g, sources, sharding.shard(0), stop)
        assert r == stop and len(lines) == 2
    sources.close()
    sources = Sources(lib, 1, [((0,), (16,))])
    assert relation(lib, g, sources, sharding.shard(0)) == (-errno.EINVAL, [])
    sources.close()
