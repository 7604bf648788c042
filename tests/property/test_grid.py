# SPDX-License-Identifier: Apache-2.0
"""core/tensor's grid and pieces against an oracle in plain Python: the rule of docs/format/grid.md read line by line,
pieces made by walking every tile, stored order made by numpy."""
import ctypes
import errno
import itertools
import math
import pathlib
import random
import time

import numpy
import pytest

import tensorlib as tl

U64x16 = ctypes.c_uint64 * 16
DEFAULT = (128 << 10, 1 << 20, 256, 32 << 10)
OLDER = (128 << 10, 1 << 20, 512)     # without S: what stores have that were made before


class Shape(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_uint32), ("dim", U64x16)]


class Box(ctypes.Structure):
    _fields_ = [("offset", U64x16), ("size", U64x16)]

    def pair(self, n):
        return tuple(self.offset[:n]), tuple(self.size[:n])


class Params(ctypes.Structure):
    _fields_ = [("m", ctypes.c_uint64), ("t", ctypes.c_uint64), ("r", ctypes.c_uint64), ("s", ctypes.c_uint64)]


class Grid(ctypes.Structure):
    _fields_ = [("shape", Shape), ("item_bytes", ctypes.c_uint), ("params", Params), ("edge", U64x16),
                ("k", ctypes.c_uint), ("only_k", ctypes.c_bool)]


class Iter(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_void_p), ("box", Box), ("piece", Box), ("done", ctypes.c_bool),
                ("number", ctypes.c_uint64)]


class Fragment(ctypes.Structure):
    _fields_ = [("piece", ctypes.c_uint64), ("offset", ctypes.c_uint64), ("len", ctypes.c_uint64)]


@pytest.fixture(scope="module", autouse=True)
def types(lib):
    lib.tensor_piece_count.restype = lib.tensor_piece_find.restype = ctypes.c_uint64
    lib.tensor_piece_scatter_some.restype = ctypes.c_uint64
    lib.tensor_piece_at.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    lib.tensor_fragment_at.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    lib.tensor_fragment_in.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64,
                                       ctypes.c_void_p]


# ---- the oracle --------------------------------------------------------------------------------------------------

def half(x, s):
    if s or x % 2 == 0:
        return -(-x // 2)
    power = 1
    while power * 2 < x:
        power *= 2
    return power


def oracle_least(shape, item, m, s):
    """The M that counts for a tensor."""
    return s if s and 0 not in shape and item * math.prod(shape) < 64 * m else m


def oracle_tile(shape, item, m, t, r, s=0):
    """(edges, k) by the rule."""
    m = oracle_least(shape, item, m, s)
    if not shape or 0 in shape:
        return [max(n, 1) for n in shape], max(len(shape) - 1, 0)
    e = list(shape)
    k = len(shape) - 1
    while k > 0 and item * math.prod(shape[k:]) < 2 * r:
        k -= 1
    o = next((d for d in range(k + 1) if shape[d] > 1), k)

    def rowok(d):
        return d != k or o == k or item * e[k] * math.prod(shape[k + 1:]) >= 2 * r

    def cut(d, most):
        while e[d] > 1 and item * math.prod(e) >= 2 * m and rowok(d) and -(-shape[d] // half(e[d], s)) <= most:
            e[d] = half(e[d], s)

    if o == k:
        cut(k, 64)
    else:
        cut(o, 8)
        cut(k, 8)
        cut(o, 64)
    while item * math.prod(e) > t:
        some = [d for d in range(k + 1) if e[d] % 2 == 0 and rowok(d)] or [d for d in range(len(e)) if e[d] > 1]
        if not some:
            break
        e[some[0]] = half(e[some[0]], s)
    return e, k


def oracle_spans(low, high, edge):
    """[low, high) cut at multiples of edge."""
    marks = sorted({low, high, *range(-(-low // edge) * edge, high, edge)} if low < high else {low})
    return list(zip(marks, marks[1:]))


def oracle_width(shape, item, e, k, m, extents):
    w = e[k]
    if all(e[d] >= shape[d] for d in range(len(shape)) if d != k):
        return w
    r = item * math.prod(extents)
    while not (r * w >= m or w >= shape[k]):
        w *= 2
    return w


def oracle_pieces(shape, item, e, k, m, offset, size):
    """Every piece of a box as (offset, size), in order."""
    if not shape or 0 in size:
        return [(tuple(offset), tuple(size))]
    rows = [oracle_spans(offset[d], offset[d] + size[d], e[d]) if d != k else [None] for d in range(len(shape))]
    out = []
    for row in itertools.product(*rows):
        w = oracle_width(shape, item, e, k, m, [s[1] - s[0] for d, s in enumerate(row) if d != k])
        for span in oracle_spans(offset[k], offset[k] + size[k], w):
            spans = [span if d == k else s for d, s in enumerate(row)]
            out.append((tuple(s[0] for s in spans), tuple(s[1] - s[0] for s in spans)))
    return out


def oracle_count(shape, item, e, k, m):
    """Pieces of a whole tensor, by combinations of extents (for tensors with too many to list)."""
    if not shape or 0 in shape:
        return 1
    kinds = []
    for d in range(len(shape)):
        if d != k:
            full, rest = divmod(shape[d], e[d])
            kinds.append([(e[d], full)] + ([(rest, 1)] if rest else []))
    total = 0
    for combination in itertools.product(*kinds):
        width = oracle_width(shape, item, e, k, m, [x for x, _ in combination])
        total += math.prod(n for _, n in combination) * -(-shape[k] // width)
    return total


def oracle_stored(array, e, k, offset, size):
    """The bytes of a piece (of an array of the whole tensor) in stored order."""
    if array.ndim == 0:
        return array.tobytes()
    cells = oracle_spans(offset[k], offset[k] + size[k], e[k])
    area = [slice(o, o + s) for o, s in zip(offset, size)]
    return b"".join(array[tuple(area[:k] + [slice(*cell)] + area[k + 1:])].tobytes() for cell in cells)


# ---- the library -------------------------------------------------------------------------------------------------

def make_grid(lib, shape, item, params=DEFAULT):
    g, s = Grid(), Shape(len(shape), U64x16(*shape))
    assert lib.tensor_grid_init(ctypes.byref(g), ctypes.byref(s), ctypes.c_uint(item),
                                Params(*params)) == 0, (shape, item, params)
    return g


def make_box(offset, size):
    return Box(U64x16(*offset), U64x16(*size))


def walk(lib, g, box, limit=10 ** 7):
    it, n = Iter(), g.shape.ndim
    lib.tensor_piece_first(ctypes.byref(it), ctypes.byref(g), ctypes.byref(box))
    out = []
    while not it.done:
        assert it.number == len(out) < limit
        out.append(it.piece.pair(n))
        lib.tensor_piece_next(ctypes.byref(it))
    return out


def count(lib, g, box):
    return lib.tensor_piece_count(ctypes.byref(g), ctypes.byref(box))


def at(lib, g, box, number):
    piece = Box()
    r = lib.tensor_piece_at(ctypes.byref(g), ctypes.byref(box), number, ctypes.byref(piece))
    return piece.pair(g.shape.ndim) if r == 0 else r


def find(lib, g, coordinate):
    return lib.tensor_piece_find(ctypes.byref(g), ctypes.byref(U64x16(*coordinate)))


def row_major(shape, item):
    return [item * math.prod(shape[d + 1:]) for d in range(len(shape))]


def copy(lib, g, piece, window, stored, array, origin, strides, gather):
    box, win = make_box(*piece), window and make_box(*window)
    tail = (U64x16(*origin), U64x16(*strides))
    function = lib.tensor_piece_gather if gather else lib.tensor_piece_scatter
    function(ctypes.byref(g), ctypes.byref(box), ctypes.byref(win) if win else None,
             ctypes.c_void_p(stored.ctypes.data),
             ctypes.c_void_p(array.ctypes.data), *tail)


PART = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def stream(lib, g, piece, array, room):
    """The parts of a piece, each at most `room` bytes, copied out before the next comes; the same where they are."""
    memory, ways = ctypes.create_string_buffer(room), ([], [])
    for there, parts in enumerate(ways):
        part = PART(lambda _, bytes_, n, parts=parts: parts.append(ctypes.string_at(bytes_, n)))
        lib.tensor_piece_stream(ctypes.byref(g), ctypes.byref(make_box(*piece)), ctypes.c_void_p(array.ctypes.data),
                                U64x16(*[0] * 16), U64x16(*array.strides), memory, ctypes.c_size_t(room),
                                bool(there), part, None)
    assert ways[0] == ways[1]
    return ways[0]


def check_cover(shape, pieces, offset, size):
    seen = numpy.zeros(shape, numpy.uint8)
    for o, s in pieces:
        seen[tuple(slice(a, a + b) for a, b in zip(o, s))] += 1
    want = numpy.zeros(shape, numpy.uint8)
    want[tuple(slice(a, a + b) for a, b in zip(offset, size))] = 1
    assert (seen == want).all()


def check_grid(lib, shape, item, params):
    g = make_grid(lib, shape, item, params)
    e, k = oracle_tile(shape, item, *params)
    assert (list(g.edge[:len(shape)]), g.k) == (e, k), (shape, item, params)
    assert not shape or g.params.m == oracle_least(shape, item, params[0], *params[3:] or [0])
    cuttable = any(x > 1 for x in e)
    assert item * math.prod(e) <= params[1] or not cuttable or 0 in shape, (shape, item, params)
    return g, e, k


def check_box(lib, g, e, k, offset, size):
    """All of a box's pieces, in order, by every function."""
    shape, item, m = tuple(g.shape.dim[:g.shape.ndim]), g.item_bytes, g.params.m
    box = make_box(offset, size)
    want = oracle_pieces(shape, item, e, k, m, offset, size)
    assert walk(lib, g, box) == want
    assert count(lib, g, box) == len(want)
    assert [at(lib, g, box, i) for i in range(len(want))] == want
    assert at(lib, g, box, len(want)) == at(lib, g, box,
                                            len(want) + 12345) == at(lib, g, box, 2 ** 64 - 1) == -errno.ERANGE
    return want


def check_copies(lib, g, e, k, pieces, rng):
    """Stored order, windows and strides, against numpy."""
    shape, item = tuple(g.shape.dim[:g.shape.ndim]), g.item_bytes
    whole = numpy.frombuffer(rng.randbytes(max(item * math.prod(shape), 1))[:item * math.prod(shape)],
                             f"V{item}").reshape(shape)
    back = numpy.zeros(shape, f"V{item}")
    for piece in pieces:
        stored = numpy.frombuffer(oracle_stored(whole, e, k, *piece), numpy.uint8)
        mine = numpy.full(stored.size + 8, 0xA5, numpy.uint8)
        copy(lib, g, piece, None, mine, whole, [0] * 16, whole.strides, True)
        assert mine[:stored.size].tobytes() == stored.tobytes() and (mine[stored.size:] == 0xA5).all()
        room = rng.choice([item, 3 * item + 1, 64 + item, 2048])
        parts = stream(lib, g, piece, whole, room)
        assert b"".join(parts) == stored.tobytes() and all(0 < len(p) <= room
                                                           for p in parts), (shape, item, piece, room)
        copy(lib, g, piece, None, mine, back, [0] * 16, back.strides, False)
        check_window(lib, g, piece, stored, whole, rng)
    return whole, back


def check_window(lib, g, piece, stored, whole, rng):
    """Scatters a random window into a strided buffer of its own, and gathers it back."""
    n, item = whole.ndim, g.item_bytes
    offset = [rng.randint(0, d) for d in whole.shape]
    size = [rng.randint(0, d - o) for d, o in zip(whole.shape, offset)]
    hit = [(max(o, po), min(o + s, po + ps)) for o, s, po, ps in zip(offset, size, *piece)]
    hit = None if any(a >= b for a, b in hit) else tuple(slice(a, b) for a, b in hit)
    pads = [rng.randint(0, 2) for _ in range(n)]
    order = rng.sample(range(n), n) if rng.random() < 0.3 else list(range(n))
    room = numpy.zeros([size[d] + pads[d] for d in order], f"V{item}")
    view = room.transpose([order.index(d) for d in range(n)])
    copy(lib, g, piece, (offset, size), stored, room, offset, view.strides, False)
    want = numpy.zeros(view.shape, view.dtype)
    inner = hit and tuple(slice(h.start - o, h.stop - o) for h, o in zip(hit, offset))
    if n == 0 or hit:
        want[inner or ()] = whole[hit or ()]
    assert want.tobytes() == view.tobytes()
    if rng.random() < .3:
        check_some(lib, g, piece, (offset, size), stored, room, view, want, rng)
    mine = numpy.zeros(stored.size, numpy.uint8)
    copy(lib, g, piece, (offset, size), mine, room, offset, view.strides, True)
    mask = numpy.zeros(whole.shape, f"V{item}")
    if n == 0 or hit:
        mask[hit or ()] = whole[hit or ()]
    e, k = list(g.edge[:n]), g.k
    assert mine.tobytes() == oracle_stored(mask, e, k, *piece)


def check_some(lib, g, piece, window, stored, room, view, want, rng):
    """The same from a few ranges of the stored order, each in memory of its own."""
    item, n = g.item_bytes, stored.size // g.item_bytes
    cuts = sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 4)))})
    parts = list(zip(cuts, cuts[1:]))
    rng.shuffle(parts)
    room[...] = numpy.zeros((), room.dtype)
    items = 0
    for a, b in parts:
        own = stored[a * item:b * item].copy()
        items += lib.tensor_piece_scatter_some(
            ctypes.byref(g), ctypes.byref(make_box(*piece)), ctypes.byref(make_box(*window)),
            ctypes.c_void_p(own.ctypes.data), ctypes.c_uint64(a * item), ctypes.c_uint64(own.size),
            ctypes.c_void_p(room.ctypes.data), U64x16(*window[0]), U64x16(*view.strides))
    assert want.tobytes() == view.tobytes(), (parts, piece, window)
    size = [min(o + s, po + ps) - max(o, po) for o, s, po, ps in zip(*window, *piece)]
    assert items == (0 if min(size, default=1) <= 0 else math.prod(size)), (parts, piece, window)


def check_fragments(lib, g, e, k, pieces, rng, box=None):
    """Every fragment from byte 0 to the end, and some ranges, against a map of every byte; of a box: those from some
    bytes in it."""
    shape, item = tuple(g.shape.dim[:g.shape.ndim]), g.item_bytes
    total = item * math.prod(shape)
    if total == 0:
        return
    numbers = numpy.arange(total, dtype=numpy.int64).view(f"V{8 * item}").reshape(shape)
    where = numpy.full((total, 2), -1)
    for i, piece in enumerate(pieces):
        ids = numpy.frombuffer(oracle_stored(numbers, e, k, *piece), numpy.int64)
        where[ids, 0] = i
        where[ids, 1] = numpy.arange(ids.size)
    breaks = (where[1:, 0] != where[:-1, 0]) | (where[1:, 1] != where[:-1, 1] + 1)
    ends = numpy.append(numpy.flatnonzero(breaks) + 1, total)
    ranges = [(0, total)] + [tuple(sorted(rng.sample(range(total + 1), 2))) for _ in range(3 if total > 1 else 0)]
    f = Fragment()
    if box is not None:
        inside = numpy.flatnonzero(where[:, 0] >= 0)
        starts = [int(inside[rng.randrange(inside.size)]) for _ in range(4 if inside.size else 0)]
        c_box = make_box(*box)
        for begin, end in [(a, total) for a in starts] + [(a, rng.randint(a + 1, total)) for a in starts]:
            lib.tensor_fragment_in(ctypes.byref(g), ctypes.byref(c_box), begin, end, ctypes.byref(f))
            stop = min(end, int(ends[numpy.searchsorted(ends, begin, "right")]))
            assert (f.piece, f.offset, f.len) == (*where[begin], stop - begin), (shape, item, box, begin, end)
        return
    for begin, end in ranges:
        while begin < end:
            lib.tensor_fragment_at(ctypes.byref(g), begin, end, ctypes.byref(f))
            stop = min(end, int(ends[numpy.searchsorted(ends, begin, "right")]))
            assert (f.piece, f.offset, f.len) == (*where[begin], stop - begin), (shape, item, begin, end)
            begin += f.len


def random_box(rng, shape):
    offset = [rng.randint(0, n) if rng.random() < 0.1 else rng.randrange(max(n, 1)) for n in shape]
    return offset, [rng.randint(0 if rng.random() < 0.1 else min(1, n - o), n - o) for n, o in zip(shape, offset)]


def check_everything(lib, shape, item, params, rng, boxes=2):
    g, e, k = check_grid(lib, shape, item, params)
    zero = (0,) * len(shape)
    pieces = check_box(lib, g, e, k, zero, shape)
    check_cover(shape, pieces, zero, shape)
    for i, (offset, size) in enumerate(pieces):
        if 0 not in size:
            assert find(lib, g, offset) == find(lib, g, [o + s - 1 for o, s in zip(offset, size)]) == i
    whole, back = check_copies(lib, g, e, k, pieces, rng)
    assert whole.tobytes() == back.tobytes()
    check_fragments(lib, g, e, k, pieces, rng)
    for i in range(boxes):
        offset, size = random_box(rng, shape)
        pieces = check_box(lib, g, e, k, offset, size)
        check_cover(shape, pieces, offset, size)
        check_copies(lib, g, e, k, rng.sample(pieces, min(4, len(pieces))), rng)
        if i == 0:
            check_fragments(lib, g, e, k, pieces, rng, (offset, size))


# ---- the tests ---------------------------------------------------------------------------------------------------

EXAMPLES = [
    ((4096, 4096), 2, (128, 512)), ((14336, 4096), 2, (224, 512)), ((50257, 768), 4, (786, 96)),
    ((512, 512, 3, 3), 4, (64, 64, 3, 3)), ((4096,), 2, (4096,)), ((), 4, ()), ((0, 7), 4, (1, 7)), ((1, 1), 8, (1, 1)),
]


@pytest.mark.parametrize("shape,item,tile", EXAMPLES)
def test_examples(lib, shape, item, tile):
    g = make_grid(lib, shape, item)
    assert tuple(g.edge[:len(shape)]) == tile
    assert oracle_tile(shape, item, *DEFAULT)[0] == list(tile)


def test_the_page_tells_the_truth(lib):
    """Each row of the table in docs/format/grid.md."""
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "format" / "grid.md"
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in page.read_text().splitlines()
            if line.startswith("| ")]
    rows = [row for row in rows if len(row) == 7 and row[1].isdigit()]
    assert len(rows) >= 20

    def numbers(text):
        return tuple(int(n) for n in text.split(" × ")) if text[0] != "(" else ()
    for row in rows:
        shape, older = numbers(row[0]), [row[2], row[4]] if row[5] == "the same" else [row[5].split(",")[0], row[6]]
        for params, (tile, pieces) in ((DEFAULT, (row[2], row[4])), (OLDER, older)):
            g = make_grid(lib, shape, int(row[1]), params)
            assert tuple(g.edge[:len(shape)]) == numbers(tile.replace("the same", row[2])), row
            assert count(lib, g, make_box([0] * len(shape), shape)) == int(pieces), row
            assert not shape or params is OLDER or g.k == int(row[3]), row


def test_all_small_shapes_are_covered(lib, scale):
    """Up to 3 dimensions of 0 to 7, with parameters so small that they are really cut."""
    rng = random.Random(1)
    cut = cases = 0
    shapes = [s for n in range(4) for s in itertools.product(range(8), repeat=n)]
    settings = [(1, 1, 1), (4, 8, 2), (8, 16, 1), (16, 32, 8), (6, 50, 3), (64, 128, 4), (8, 16, 1, 2), (6, 50, 3, 6)]
    for shape in shapes:
        for params in settings if scale(0, 1) else rng.sample(settings, 1):
            item = rng.choice([1, 2, 4, 8, 16])
            check_everything(lib, shape, item, params, rng, boxes=1)
            cases += 1
            cut += any(e < n for e, n in zip(oracle_tile(shape, item, *params)[0], shape))
    assert cut > cases // 2


def test_random_small_tensors(lib, scale):
    """Up to 5 dimensions and a few thousand items, every function, byte for byte."""
    rng = random.Random(2)
    for _ in range(scale(125, 2500)):
        shape, room = [], rng.choice([30, 300, 3000])
        for _ in range(rng.randint(0, 5)):
            shape.append(rng.randint(1, max(1, min(room, rng.choice([3, 10, 100, 3000])))))
            room //= shape[-1]
        rng.shuffle(shape)
        m = rng.choice([1, 16, 64, 200, 1024])
        check_everything(lib, tuple(shape), rng.choice([1, 2, 4, 8, 16]),
                         (m, m * rng.choice([1, 2, 8]), rng.choice([1, 8, 32, 100]), rng.choice([0, 1, m])), rng)


def random_shape(rng):
    """Like the shapes of models, and unlike: up to 16 dimensions, up to 2^40 items."""
    kind = rng.random()
    if kind < 0.4:
        return tuple(rng.choice([64, 96, 128]) * rng.randint(1, 400) for _ in range(rng.randint(1, 2)))
    if kind < 0.6:
        return (rng.randint(1, 2048), rng.randint(1, 2048),
                *rng.choice([(1, 1), (3, 3), (7, 7), (1,), (5,), (4, 4, 4)]))
    ndim, bits = rng.randint(0, 16), rng.randint(0, 40)
    parts = sorted(rng.randint(0, bits) for _ in range(max(ndim - 1, 0)))
    powers = [b - a for a, b in zip([0] + parts, parts + [bits])][:ndim]
    return tuple(max(0 if rng.random() < 0.01 else 1, rng.randint(2 ** p // 2, 2 ** p)) for p in powers)


def test_tiles_of_random_shapes(lib, scale):
    """The rule; count, at and find agree on samples of pieces, wherever they are too many to list."""
    rng = random.Random(3)
    for _ in range(scale(10000, 20000)):
        shape, item = random_shape(rng), rng.choice([1, 2, 4, 8, 16])
        some = (2 ** rng.randint(10, 18), 2 ** rng.randint(18, 22), 2 ** rng.randint(0, 12))
        params = rng.choice([DEFAULT, DEFAULT, OLDER, some, (*some, rng.randint(1, some[0]))])
        g, e, k = check_grid(lib, shape, item, params)
        assert bytes(make_grid(lib, shape, item, params)) == bytes(g)
        whole = make_box([0] * len(shape), shape)
        total = count(lib, g, whole)
        assert total == oracle_count(shape, item, e, k, g.params.m)
        assert at(lib, g, whole, total) == -errno.ERANGE
        if not shape or 0 in shape:
            continue
        for number in {0, total - 1, rng.randrange(total), rng.randrange(total)}:
            offset, size = at(lib, g, whole, number)
            inside = [o + rng.randrange(s) for o, s in zip(offset, size)]
            assert find(lib, g, inside) == number
            w = oracle_width(shape, item, e, k, g.params.m, [s for d, s in enumerate(size) if d != k])
            want = [(c // n * n, min(c // n * n + n, s) - c // n * n) for c, n, s in
                    zip(inside, [w if d == k else x for d, x in enumerate(e)], shape)]
            assert list(zip(offset, size)) == want


def check_widths(g, pieces, offset, size):
    """None is under M unless the box or the tensor cut it short along k, or k alone is cut."""
    k = g.k
    for o, s in pieces:
        short = o[k] == offset[k] or o[k] + s[k] == offset[k] + size[k] or s[k] >= g.shape.dim[k]
        assert short or g.only_k or 2 * math.prod(s) >= g.params.m


def test_boxes_of_large_tensors(lib, scale):
    """Shards as jobs hold them: even and odd splits of either dimension, thin ones too."""
    rng = random.Random(4)
    for _ in range(scale(150, 1500)):
        shape = tuple(rng.choice([128, 100, 257]) * rng.randint(1, 60) for _ in range(rng.randint(1, 3)))
        if math.prod(shape) > 2 ** 28:
            continue
        g, e, k = check_grid(lib, shape, 2, rng.choice([DEFAULT, OLDER]))
        parts = [rng.choice([1, 2, 3, 8, 16, 64, 1000]) for _ in shape]
        size = [min(-(-n // p), n) for n, p in zip(shape, parts)]
        offset = [rng.randrange(-(-n // s)) * s for n, s in zip(shape, size)]
        size = [min(s, n - o) for s, n, o in zip(size, shape, offset)]
        pieces = check_box(lib, g, e, k, offset, size)
        check_widths(g, pieces, offset, size)
        assert sum(math.prod(s) for _, s in pieces) == math.prod(size)


def test_even_splits_share_pieces(lib):
    """What the grid is for: the pieces of TP and FSDP shards are pieces of the whole tensor."""
    for shape, dim, parts in [((4096, 4096), 0, 16), ((4096, 4096), 1, 8), ((14336, 4096), 0, 8), ((14336, 4096), 1, 8),
                              ((4096, 14336), 1, 8), ((128256, 4096), 0, 8), ((28672, 8192), 0, 16),
                              ((384, 384), 0, 8), ((1536, 384), 0, 8), ((384, 1536), 1, 8), ((30522, 384), 0, 8)]:
        g = make_grid(lib, shape, 4 if min(shape) < 512 else 2)
        whole = set(walk(lib, g, make_box([0, 0], shape)))
        shards = []
        for i in range(parts):
            most = -(-shape[dim] // parts)
            size = [min(most, n - most * i) if d == dim else n for d, n in enumerate(shape)]
            shards += walk(lib, g, make_box([most * i if d == dim else 0 for d in range(2)], size))
        shared = sum(math.prod(s) for o, s in shards if (o, s) in whole)
        assert len(set(shards)) == len(shards) and shared >= 0.999 * math.prod(shape), (shape, dim, parts)


def test_thin_shards_get_wide_pieces(lib):
    g = make_grid(lib, (4096, 4096), 2)
    assert walk(lib, g, make_box([16, 0], [16, 4096])) == [((16, 0), (16, 4096))]
    assert walk(lib, g, make_box([0, 0], [32, 4096])) == [((0, 2048 * i), (32, 2048)) for i in range(2)]
    assert walk(lib, g, make_box([0, 100], [32, 3000])) == [((0, 100), (32, 1948)), ((0, 2048), (32, 1052))]


def test_empty_boxes_have_one_empty_piece(lib):
    for shape, offset, size in [((0,), (0,), (0,)), ((5, 0, 3), (0, 0, 0), (5, 0, 3)), ((8, 8), (8, 2), (0, 3)),
                                ((8, 8), (3, 3), (1, 0))]:
        g = make_grid(lib, shape, 4)
        box = make_box(offset, size)
        assert walk(lib, g, box) == [(offset, size)] and count(lib, g, box) == 1
        assert at(lib, g, box, 0) == (offset, size) and at(lib, g, box, 1) == -errno.ERANGE


def test_a_scalar_is_one_piece(lib):
    g = make_grid(lib, (), 8)
    assert walk(lib, g, make_box([], [])) == [((), ())]
    f = Fragment()
    lib.tensor_fragment_at(ctypes.byref(g), 3, 7, ctypes.byref(f))
    assert (f.piece, f.offset, f.len) == (0, 3, 4)


def test_bad_grids_are_refused(lib):
    g, ok = Grid(), Shape(1, U64x16(5))
    def init(shape, item, *params):
        return lib.tensor_grid_init(ctypes.byref(g), ctypes.byref(shape), ctypes.c_uint(item), Params(*params))
    assert init(ok, 4, *DEFAULT) == 0
    for params in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 1, 1), (1, 2 ** 63, 1), (1, 1, 2 ** 63),
                   (2 ** 64 - 1, 2 ** 64 - 1, 1)]:
        assert init(ok, 4, *params) == -errno.EINVAL, params
    assert init(ok, 0, *DEFAULT) == -errno.EINVAL
    assert init(Shape(17), 4, *DEFAULT) == -errno.EINVAL
    assert init(Shape(2, U64x16(2 ** 40, 2 ** 40)), 4, *DEFAULT) == -errno.EOVERFLOW
    assert init(Shape(2, U64x16(2 ** 63, 0)), 4, *DEFAULT) == -errno.EOVERFLOW
    assert init(ok, 4, 2 ** 62, 2 ** 62, 2 ** 62) == 0


def test_the_largest_tensors(lib):
    """2^62 bytes: nothing overflows, nothing walks."""
    rng = random.Random(5)
    for shape, item in [((2 ** 62,), 1), ((2 ** 58,), 16), ((2 ** 31, 2 ** 31), 1), ((2, 2 ** 61 - 1), 1),
                        ((2 ** 61 - 1, 2), 1),
                        ((13,) * 16, 4), ((3,) * 16, 16), ((1,) * 15 + (2 ** 60,), 4), ((2 ** 60,) + (1,) * 15, 4)]:
        g, e, k = check_grid(lib, shape, item, DEFAULT)
        whole, total = make_box([0] * len(shape), shape), 0
        total = count(lib, g, whole)
        assert total == oracle_count(shape, item, e, k, DEFAULT[0])
        for number in [0, total - 1, rng.randrange(total)]:
            assert find(lib, g, at(lib, g, whole, number)[0]) == number
        f, end = Fragment(), item * math.prod(shape)
        lib.tensor_fragment_at(ctypes.byref(g), end - 1, end, ctypes.byref(f))
        assert (f.piece, f.len) == (total - 1, 1)
        assert f.offset == item * math.prod(at(lib, g, whole, total - 1)[1]) - 1


# ---- two ways to the same byte -----------------------------------------------------------------------------------

RANGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


def accepted(rng):
    """(M, T, R) that a store or a layout may have (docs/format/grid.md), their limits above all."""
    t = rng.choice([2, 3, 64, 4096, 1 << 20, 4 << 20, rng.randint(2, 4 << 20)])
    return (rng.choice([1, t, rng.randint(1, t)]), t, rng.choice([1, t // 2, t // 2, rng.randint(1, t // 2)]))


def long_shape(rng, item):
    """Up to 2^62 bytes, in dimensions of any length; a few of one item, or two, behind them."""
    bits = rng.choice([62, 62, 61, rng.randint(6, 62)]) - item.bit_length() + 1
    parts = sorted(rng.randint(0, bits) for _ in range(rng.randint(0, 5)))
    shape = [rng.choice([1 << n, (1 << n) - 1 or 1, rng.randint((1 << n) // 2 or 1, 1 << n)])
             for n in (b - a for a, b in zip([0, *parts], [*parts, bits]))]
    rng.shuffle(shape)
    for _ in range(rng.randint(0, 4)):
        if 2 * item * math.prod(shape) <= 1 << 62 and len(shape) < 16:
            shape.insert(rng.choice([0, len(shape)]), rng.choice([1, 2]))
    return tuple(shape)


def place(lib, g, box, coordinate):
    """(number of its piece among the box's, the piece, byte in it) of an item, by the pieces that meet a window and the
    ranges that the window has of one."""
    n, w, window, found = g.shape.ndim, tl.PieceWindow(), make_box(coordinate, [1] * g.shape.ndim), []
    lib.tensor_piece_window_first(ctypes.byref(w), ctypes.byref(g), ctypes.byref(box), ctypes.byref(window))
    assert not w.done and w.part.pair(n) == (tuple(coordinate), (1,) * n)
    lib.tensor_piece_ranges(ctypes.byref(g), ctypes.byref(w.piece), ctypes.byref(window),
                            RANGE(lambda _, offset, size: found.append((offset, size)) or 0), None)
    [(offset, size)] = found
    assert size == g.item_bytes
    return w.number, w.piece.pair(n), offset


def item_number(shape, coordinate):
    number = 0
    for n, at_ in zip(shape, coordinate):
        number = number * n + at_
    return number


def coordinate_of(shape, number):
    out = []
    for n in reversed(shape):
        number, at_ = divmod(number, n)
        out.insert(0, at_)
    return out


def check_two_ways(lib, g, box, coordinate):
    """From the window and from the fragment: for an item, and for the last one of its fragment."""
    shape, item, f = tuple(g.shape.dim[:g.shape.ndim]), g.item_bytes, Fragment()
    begin, end = item * item_number(shape, coordinate), item * math.prod(shape)
    number, piece, offset = place(lib, g, box, coordinate)
    lib.tensor_fragment_in(ctypes.byref(g), ctypes.byref(box), begin, end, ctypes.byref(f))
    assert (f.piece, f.offset) == (number, offset) and at(lib, g, box, number) == piece, (shape, item, coordinate)
    assert 0 < f.len <= end - begin and f.len % item == 0 and offset + f.len <= item * math.prod(piece[1])
    last = coordinate_of(shape, (begin + f.len) // item - 1)
    assert place(lib, g, box, last) == (number, piece, offset + f.len - item), (shape, item, coordinate)
    return piece


def test_two_ways_to_every_byte(lib, scale):
    """Reads go by fragments or by windows: with all parameters that are accepted, and up to 2^62 bytes, both come to
    the same piece and the same byte of it, in a whole tensor and in a box of it."""
    rng = random.Random(6)
    for _ in range(scale(400, 40000)):
        item = rng.choice([1, 2, 4, 8, 16])
        shape, params = long_shape(rng, item), accepted(rng)
        g, e, k = check_grid(lib, shape, item, params)
        assert all(e[d] == shape[d] for d in range(k + 1, len(shape))), (shape, item, params)
        whole = make_box([0] * len(shape), shape)
        for corner in (0, 1, rng.random(), rng.random()):
            here = [min(n - 1, int(n * corner)) if corner < 1 else n - 1 for n in shape]
            piece = check_two_ways(lib, g, whole, here)
            assert at(lib, g, whole, find(lib, g, here)) == piece
            low = [rng.choice([0, c, rng.randint(0, c)]) for c in here]
            size = [rng.choice([c + 1, n, rng.randint(c + 1, n)]) - a for a, c, n in zip(low, here, shape)]
            check_two_ways(lib, g, make_box(low, size), here)


def test_a_million_pieces_cost_no_more_than_one(lib):
    """Coarse: an implementation that walks would take seconds for each call."""
    g = make_grid(lib, (2 ** 19, 2 ** 19), 2)
    whole, f = make_box([0, 0], [2 ** 19] * 2), Fragment()
    begin = time.process_time()
    for i in range(2000):
        number = i * 262 % count(lib, g, whole)
        assert find(lib, g, at(lib, g, whole, number)[0]) == number
        lib.tensor_fragment_at(ctypes.byref(g), i * 2 ** 27, 2 ** 39, ctypes.byref(f))
    assert count(lib, g, whole) > 2 ** 18 and time.process_time() - begin < 5
