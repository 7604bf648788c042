# SPDX-License-Identifier: Apache-2.0
"""Lists of boxes, their exact cover and the index, against boxes painted into an array of counters."""
import collections
import ctypes as c
import errno
import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import coverlib
import tensorlib
from coverlib import paint
from tensorlib import FOUND_FUNC, Box, Boxes, Cover, Shape

TOP = (1 << 64) - 1
BIG = 1 << 62
HANG = 60           # seconds; what is timed takes about one: more is an algorithm that compares all with all


@pytest.fixture(scope="module")
def box(lib):
    return Lib(tensorlib.load(lib))


class List:
    """tensor_boxes made of [((offset...), (size...)), ...] or of an int array (n, ndim, 2)."""

    def __init__(self, lib, ndim, boxes=()):
        self.lib, self.c = lib, Boxes(ndim, 0, 0, None)
        if isinstance(boxes, np.ndarray):   # many: borrowed, not copied
            self.array = np.ascontiguousarray(boxes, dtype=np.uint64)
            self.c.n = self.c.room = len(boxes)
            self.c.pairs = self.array.ctypes.data_as(c.POINTER(c.c_uint64))
        for b in [] if isinstance(boxes, np.ndarray) else boxes:
            assert lib.tensor_boxes_add(c.byref(self.c), c.byref(Box.of(*b))) == 0

    def get(self, i):
        b = Box()
        self.lib.tensor_boxes_get(c.byref(self.c), c.c_size_t(i), c.byref(b))
        return b.pair(self.c.ndim)

    def boxes(self):
        return [self.get(i) for i in range(self.c.n)]

    def __del__(self):
        if not hasattr(self, "array"):
            self.lib.tensor_boxes_release(c.byref(self.c))


class Lib:
    def __init__(self, lib):
        self.lib = lib
        lib.tensor_box_intersect.restype = lib.tensor_box_empty.restype = c.c_bool
        lib.tensor_box_index_free.argtypes = lib.tensor_boxes_release.argtypes = [c.c_void_p]

    def list(self, ndim, boxes=()):
        return List(self.lib, ndim, boxes)

    def cover(self, shape, boxes):
        """(name of the error or "", box, a, b)"""
        fault, boxes = Cover(), boxes if isinstance(boxes, List) else self.list(len(shape), boxes)
        r = self.lib.tensor_boxes_cover(c.byref(Shape.of(shape)), c.byref(boxes.c), c.byref(fault))
        return errno.errorcode[-r] if r else "", fault.box.pair(len(shape)), fault.a, fault.b

    def text(self, box, room=1000):
        text = c.create_string_buffer(b"#" * room, room + 1)
        self.lib.tensor_box_text(c.c_uint32(len(box[0])), c.byref(Box.of(*box)), text, c.c_size_t(room))
        return text.value.decode()


class Index:
    def __init__(self, lib, boxes):
        self.lib, self.boxes, self.pointer = lib, boxes, c.c_void_p()
        assert lib.tensor_box_index_new(c.byref(boxes.c), c.byref(self.pointer)) == 0

    def find(self, window, most=None):
        found = []

        def add(_, i):
            found.append(i)
            return 7 if len(found) == most else 0

        r = self.lib.tensor_box_index_find(self.pointer, c.byref(Box.of(*window)), FOUND_FUNC(add), None)
        assert r == (7 if len(found) == most else 0) and len(set(found)) == len(found)
        return sorted(found)

    def __del__(self):
        self.lib.tensor_box_index_free(self.pointer)


# ---- the oracle ----

def common(a, b):
    """In Python's own integers; None: nothing."""
    low = [max(x, y) for x, y in zip(a[0], b[0])]
    end = [min(x + m, y + n, TOP + 1) for x, m, y, n in zip(*a, *b)]
    return None if any(x >= y for x, y in zip(low, end)) else (tuple(low), tuple(y - x for x, y in zip(low, end)))


def some_box(rng, shape, empty=0.1):
    size = [rng.randint(0 if rng.random() < empty else min(1, n), n) for n in shape]
    return tuple(rng.randint(0, n - m) for n, m in zip(shape, size)), tuple(size)


def some_list(rng, shape, n):
    """Boxes at random, twice the same, tilings: a list may overlap itself."""
    boxes = [some_box(rng, shape) for _ in range(rng.randint(0, n))]
    if rng.random() < 0.3 and all(shape):
        boxes += tiling(rng, shape, rng.randint(0, n))
    boxes += rng.choices(boxes, k=rng.randint(0, 2)) if boxes else []
    rng.shuffle(boxes)
    return boxes


def tiling(rng, shape, cuts):
    """Cuts the tensor at random lines; its boxes in random order."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(cuts if shape else 0):
        at, d = rng.randrange(len(boxes)), rng.randrange(len(shape))
        offset, size = boxes[at]
        if size[d] > 1:
            k = rng.randint(1, size[d] - 1)
            boxes[at] = offset, size[:d] + (k,) + size[d + 1:]
            boxes.append((offset[:d] + (offset[d] + k,) + offset[d + 1:], size[:d] + (size[d] - k,) + size[d + 1:]))
    rng.shuffle(boxes)
    return boxes


# ---- boxes ----

def test_scalars_are_all_or_nothing(box):
    everything = ((), ())
    assert box.cover((), [])[0] == "ENOENT" and box.cover((), [everything])[0] == ""
    assert box.cover((), [everything] * 3) == ("EEXIST", everything, 0, 1)
    assert Index(box.lib, box.list(0, [everything] * 20)).find(everything) == list(range(20))


def test_long_boxes_do_not_wrap(box):
    """Coordinates end at 2^64 - 1; what a box says beyond counts for nothing."""
    beyond, low, end = ((TOP - 3, 0), (TOP, 2)), ((0, 0), (4, 2)), ((TOP - 1, 1), (2, 1))
    boxes = box.list(2, [beyond, low, end])
    index = Index(box.lib, boxes)
    assert index.find(((0, 0), (TOP, TOP))) == [0, 1, 2] and index.find(((2, 0), (1, 1))) == [1]
    assert index.find(((TOP, 1), (TOP, TOP))) == [0, 2]
    assert box.text(beyond) == f"[{TOP - 3}:+{TOP}, 0:2]"
    for d in (1, BIG, TOP):
        assert box.cover((8,), [((8 - min(d, 1),), (TOP,))]) == ("ERANGE", ((7,), (TOP,)), 0, 0)
    got = Box()
    for a, b in itertools.product([(0, 4), (3, 4), (TOP, 1), (TOP, TOP), (BIG, BIG), (5, 0), (0, TOP)], repeat=2):
        x, y = ((a[0],), (a[1],)), ((b[0],), (b[1],))
        met = box.lib.tensor_box_intersect(c.c_uint32(1), c.byref(Box.of(*x)), c.byref(Box.of(*y)), c.byref(got))
        assert (got.pair(1) if met else None) == common(x, y)


def test_bad_lists_are_refused(box):
    two, three, deep = box.list(2, [((0, 0), (1, 1))]), box.list(3), Boxes(17, 0, 0, None)
    many, pointer = Boxes(0, 1 << 32, 0, None), c.c_void_p()
    assert box.lib.tensor_box_index_new(c.byref(many), c.byref(pointer)) == -errno.E2BIG
    assert box.lib.tensor_box_index_new(c.byref(deep), c.byref(pointer)) == -errno.EINVAL
    assert box.lib.tensor_boxes_add(c.byref(deep), c.byref(Box())) == -errno.EINVAL and deep.n == 0
    assert box.cover((2, 2), two)[0] == "ENOENT" and box.cover((2,), two)[0] == "EINVAL"
    assert box.cover((1 << 40, 1 << 40), two)[0] == "EOVERFLOW"
    assert box.cover((0, 1 << 40, 1 << 40), three)[0] == "EOVERFLOW"


def test_text(box):
    assert box.text(((0, 8), (4, 8))) == "[0:4, 8:16]" and box.text(((), ())) == "[]"
    full = box.text(((BIG,) * 16, (1,) * 16))
    assert full == "[" + ", ".join([f"{BIG}:{BIG + 1}"] * 16) + "]"
    for room in range(1, len(full)):
        assert box.text(((BIG,) * 16, (1,) * 16), room) == full[:room - 1]


# ---- index ----

def test_index_finds_what_a_scan_finds(box, scale):
    rng = random.Random(22)
    for _ in range(scale(60, 600)):
        ndim, n, edge = rng.randint(0, 4), rng.choice([0, 1, 7, 8, 9, 63, 300]), rng.choice([4, 40, 10 ** 6, BIG])
        boxes = [some_box(rng, (edge,) * ndim) for _ in range(n)]
        if rng.random() < 0.5:  # small ones, many with the same centre
            boxes = [(o, tuple(min(m, 1 + edge // 16) for m in size)) for o, size in boxes]
        index = Index(box.lib, box.list(ndim, boxes))
        for _ in range(12):
            window = some_box(rng, (edge,) * ndim, 0.05)
            want = [i for i, b in enumerate(boxes) if common(b, window)]
            assert index.find(window) == want
            for most in {1, len(want)} - {0}:
                assert len(index.find(window, most) if want else [None] * most) == most


def grid(shape, tiles):
    """A tensor's tiles, numbered row-major, as an array of pairs."""
    edges = [np.arange(k, dtype=np.uint64) * (n // k) for n, k in zip(shape, tiles)]
    offsets = np.stack([x.ravel() for x in np.meshgrid(*edges, indexing="ij")], axis=1)
    sizes = np.broadcast_to(np.array([n // k for n, k in zip(shape, tiles)], np.uint64), offsets.shape)
    return np.stack([offsets, sizes], axis=2)


def test_index_of_many(box, scale):
    """Tiles in random order: a window of 3 x 3 tiles finds these nine, whatever their number."""
    side = scale(256, 1000)
    tiles = grid((side * 16, side * 16), (side, side))
    order = np.random.default_rng(23).permutation(len(tiles))
    boxes = box.list(2, tiles[order])
    start = time.time()
    index = Index(box.lib, boxes)
    built = time.time() - start
    where = np.argsort(order).reshape(side, side)
    rng, start = random.Random(24), time.time()
    for _ in range(2000):
        x, y = rng.randrange(side - 2), rng.randrange(side - 2)
        assert index.find(((16 * x + 1, 16 * y + 1), (46, 46))) == sorted(where[x:x + 3, y:y + 3].ravel())
    asked = time.time() - start
    print(f"\nindex of {len(tiles)} boxes: {built:.2f} s; a question, with Python around it: "
          f"{asked / 2000 * 1e6:.0f} us")
    assert built < HANG and asked < HANG


# ---- cover ----

def told_truly(box, shape, boxes):
    """Asks, and checks the answer by painting. Returns it."""
    word, where, a, b = box.cover(shape, boxes)
    inside = [x for x in boxes if 0 not in x[1]]
    outside = [i for i, x in enumerate(boxes) if 0 not in x[1] and any(o + n > m for o, n, m in zip(*x, shape))]
    if outside:
        assert (word, a) == ("ERANGE", outside[0]) and where == boxes[a]
        return word
    counts = paint(shape, inside)
    assert (word == "") == bool((counts == 1).all()), (shape, boxes, word, where)
    if word == "EEXIST":
        assert a < b and where == common(boxes[a], boxes[b]) and 0 not in where[1]
    elif word == "ENOENT":
        held = paint(shape, [where])
        assert (counts <= 1).all() and held.any() and not (counts * held).any()
        for d, n in enumerate(shape):   # no wider gap
            for o, end in ((where[0][d] - 1, where[0][d]), (where[0][d] + where[1][d],) * 2):
                o = o if o < where[0][d] else end
                if 0 <= o < n:
                    wider = (where[0][:d] + (o,) + where[0][d + 1:], where[1][:d] + (1,) + where[1][d + 1:])
                    assert (counts * paint(shape, [wider])).any(), (shape, boxes, where)
    else:
        assert word == "", word
    return word


def disturb(rng, shape, boxes):
    """One fault or none: removed, moved, doubled, grown, shrunk, outside, empty ones put in."""
    boxes, at = list(boxes), rng.randrange(len(boxes))
    offset, size = boxes[at]
    d = rng.randrange(len(shape)) if shape else None
    what = rng.choice(["", "empty", "remove", "double"] +
                      (["move", "grow", "shrink", "outside", "replace"] if shape else []))
    by = rng.choice([-1, 1])
    if what == "remove":
        boxes.pop(at)
    elif what == "double":
        boxes.insert(rng.randrange(len(boxes) + 1), boxes[at])
    elif what == "empty" and shape:
        boxes.insert(at, (offset, size[:d] + (0,) + size[d + 1:]))
    elif what == "move":
        boxes[at] = offset[:d] + (max(offset[d] + by, 0),) + offset[d + 1:], size
    elif what in ("grow", "shrink"):
        boxes[at] = offset, size[:d] + (max(size[d] + (1 if what == "grow" else -1), 0),) + size[d + 1:]
    elif what == "outside":
        boxes[at] = offset[:d] + (rng.choice([shape[d], shape[d] + 9]),) + offset[d + 1:], size
    elif what == "replace":
        boxes[at] = some_box(rng, shape)
    return boxes


def test_cover_at_random(box, scale):
    rng, told = random.Random(25), dict.fromkeys(["", "ERANGE", "EEXIST", "ENOENT"], 0)
    for _ in range(scale(4000, 40000)):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))
        boxes = tiling(rng, shape, rng.randint(0, 14))
        assert box.cover(shape, boxes)[0] == "", (shape, boxes)
        for _ in range(rng.randint(1, 2)):
            boxes = disturb(rng, shape, boxes) if boxes else boxes
        told[told_truly(box, shape, boxes)] += 1
    assert min(told.values()) > 100, told


def test_near_covers(box, scale):
    """As many items as the tensor has, but here twice and there not at all: rods that interlock, pinwheels, turned and
    doubled boxes. And the same with coordinates up to 2^62."""
    rng, told = random.Random(31), collections.Counter()
    for _ in range(scale(1200, 60000)):
        shape = coverlib.some_shape(rng)
        whole = coverlib.cover(rng, shape, rng.randint(1, 9))
        assert box.cover(shape, whole)[0] == "", (shape, whole)
        near = coverlib.near(rng, shape, whole)
        if rng.random() < .2:
            offset, size = some_box(rng, shape)
            near.insert(rng.randrange(len(near) + 1), (offset, (0,) + size[1:]))
        assert coverlib.items(near) == np.prod(shape)
        word = told_truly(box, shape, near)
        told[word] += 1
        large, far = coverlib.stretched(rng, shape, near)
        found, where, a, b = box.cover(large, far)
        assert found == word and (not word or where == common(far[a], far[b])), (large, far)
    assert told["EEXIST"] > scale(300, 20000) and told[""] > scale(200, 10000) and not told["ENOENT"], told


@st.composite
def any_list(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    one = st.tuples(*[st.integers(0, n).flatmap(lambda m, n=n: st.tuples(st.integers(0, n - m), st.just(m)))
                      for n in shape])
    return shape, [(tuple(o for o, _ in b), tuple(m for _, m in b)) for b in draw(st.lists(one, max_size=8))]


@settings(max_examples=200, deadline=None)
@given(any_list())
def test_cover_of_any_list(box, given):
    told_truly(box, *given)


def test_tensors_without_items(box):
    for shape in ((0,), (0, 4), (4, 0, 2)):
        assert box.cover(shape, [])[0] == "" and box.cover(shape, [((0,) * len(shape), shape)] * 3)[0] == ""
        assert box.cover(shape, [((0,) * len(shape), (1,) * len(shape))])[0] == "ERANGE"
    assert box.cover((4, 2), [((0, 0), (4, 0))]) == ("ENOENT", ((0, 0), (4, 2)), 0, 0)


def test_cover_of_the_longest(box):
    """2^62 items: ends fit, sums fit."""
    for shape in ((BIG,), (1 << 31, 1 << 31), (2, 1 << 30, 1 << 31), (1,) * 15 + (BIG,)):
        rng = random.Random(26)
        boxes = tiling(rng, shape, 400)
        assert box.cover(shape, boxes)[0] == ""
        gone = boxes.pop()
        word, where, _, _ = box.cover(shape, boxes)
        assert word == "ENOENT" and where == gone    # its neighbours stand around it
        assert box.cover(shape, boxes + [gone, boxes[7]]) == ("EEXIST", boxes[7], 7, len(boxes) + 1)


def herringbone(n):
    """Dominoes, lying where (column - row) % 4 is 0 and 1, standing where it is 3 and 2, cut at the edges: every line
    of an n x n tensor crosses some."""
    row, column = (x.ravel() for x in np.meshgrid(np.arange(-1, n), np.arange(-1, n), indexing="ij"))
    d = (column - row) % 4
    low = np.stack([row, column], axis=1)[(d == 0) | (d == 3)]
    end = np.minimum(low + np.where((d == 0)[:, None], (1, 2), (2, 1))[(d == 0) | (d == 3)], n)
    low = np.maximum(low, 0)
    return np.stack([low, end - low], axis=2)[(end > low).all(axis=1)].astype(np.uint64)


def spiral(turns):
    """One pinwheel in the middle of another, and so on: no line parts any of 4 * turns + 1 boxes."""
    boxes, edge = [], 2 * turns + 1
    for i in range(turns):
        n = edge - 2 * i
        boxes += [((i, i), (n - 1, 1)), ((i, i + 1), (1, n - 1)), ((i + 1, i + n - 1), (n - 1, 1)),
                  ((i + n - 1, i), (1, n - 1))]
    return edge, boxes + [((turns, turns), (1, 1))]


def test_small_pinwheels(box):
    rng = random.Random(27)
    for turns in (1, 2, 3, 5):
        edge, boxes = spiral(turns)
        for shape, boxes in (((edge, edge), boxes),
                             ((edge, 2, edge), [((o[0], k, o[1]), (s[0], 1, s[1])) for o, s in boxes for k in (0, 1)])):
            assert told_truly(box, shape, boxes) == ""
            for _ in range(40):
                told_truly(box, shape, disturb(rng, shape, rng.sample(boxes, len(boxes))))


def timed(f):
    start = time.time()
    result = f()
    taken = time.time() - start
    assert taken < HANG, taken
    return result, taken


@pytest.mark.parametrize("kind", ["spiral", "herringbone"])
def test_large_pinwheels(box, kind):
    """A hundred thousand boxes that no line parts."""
    if kind == "spiral":
        edge, boxes = spiral(25000)
        boxes = np.array(boxes, np.uint64).transpose(0, 2, 1)
    else:
        edge, boxes = 448, herringbone(448)
    boxes = boxes[np.random.default_rng(28).permutation(len(boxes))]
    shape = (edge, edge)
    (word, *_), exact = timed(lambda: box.cover(shape, box.list(2, boxes)))
    assert word == ""
    gone = len(boxes) // 3
    (word, where, _, _), gap = timed(lambda: box.cover(shape, box.list(2, np.delete(boxes, gone, axis=0))))
    assert word == "ENOENT" and where == tuple(map(tuple, boxes[gone].T.tolist()))
    grown = boxes.copy()
    at = next(i for i in range(gone, len(boxes)) if int(boxes[i][0].sum()) < edge)
    grown[at][0][1] += 1
    (word, where, a, b), overlap = timed(lambda: box.cover(shape, box.list(2, grown)))
    x, y = (tuple(map(tuple, grown[i].T.tolist())) for i in (a, b))
    assert word == "EEXIST" and at in (a, b) and where == common(x, y)
    print(f"\n{kind} of {len(boxes)}: exact {exact:.2f} s, gap {gap:.2f} s, overlap {overlap:.2f} s")


@pytest.mark.parametrize("shape, tiles", [((1 << 40,), (100000,)), ((1 << 20, 1 << 20), (316, 316)),
                                          ((4096, 1 << 20), (1, 100000)), ((64, 4096, 4096), (32, 64, 50))])
def test_a_hundred_thousand(box, shape, tiles):
    ndim = len(shape)
    shape = tuple(n // k * k for n, k in zip(shape, tiles))
    boxes = grid(shape, tiles)
    boxes = boxes[np.random.default_rng(29).permutation(len(boxes))]
    (word, *_), cover = timed(lambda: box.cover(shape, box.list(ndim, boxes)))
    assert word == ""
    gone = np.delete(boxes, 12345, axis=0)
    (word, where, _, _), gap = timed(lambda: box.cover(shape, box.list(ndim, gone)))
    assert word == "ENOENT" and where == tuple(map(tuple, boxes[12345].T.tolist()))
    twice = np.concatenate([boxes, boxes[777:778]])
    (word, where, a, b), double = timed(lambda: box.cover(shape, box.list(ndim, twice)))
    assert word == "EEXIST" and (a, b) == (777, len(boxes))
    print(f"\n{len(boxes)} boxes in {ndim} dimensions: cover {cover:.2f} s, gap {gap:.2f}, overlap {double:.2f}")


@pytest.mark.parametrize("kind", ["nested", "sliding", "the same"])
def test_many_that_all_overlap(box, kind):
    """Intervals that all meet each other: nothing is compared with everything."""
    n = 100000
    low = {"nested": range(n), "sliding": range(n), "the same": [5] * n}[kind]
    end = {"nested": range(2 * n, n, -1), "sliding": range(n, 2 * n), "the same": [9] * n}[kind]
    boxes = np.array([[[a, b - a]] for a, b in zip(low, end)], np.uint64)
    boxes = boxes[np.random.default_rng(30).permutation(n)]
    total = max(end) - min(low)
    (word, where, a, b), taken = timed(lambda: box.cover((max(end),), box.list(1, boxes)))
    x, y = (tuple(map(tuple, boxes[i].T.tolist())) for i in (a, b))
    assert word == "EEXIST" and a < b and where == common(x, y) and where[1][0] <= total
    print(f"\n{n} intervals, {kind}: overlap {taken:.2f} s")


# ---- a range of flattened items ----

@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_the_longest_box_that_begins_at_an_item(box, dims, data):
    """Its items are the next ones of the range, and no longer box has that."""
    lib, items = box.lib, np.arange(int(np.prod(dims, dtype=int))).reshape(dims)
    lib.tensor_box_run.restype = c.c_uint64
    at = data.draw(st.integers(0, items.size - 1))
    end = data.draw(st.integers(at + 1, items.size))
    b = Box()
    n = lib.tensor_box_run(c.byref(Shape.of(dims)), c.c_uint64(at), c.c_uint64(end), c.byref(b))
    offset, size = b.pair(len(dims))
    held = items[tuple(slice(o, o + k) for o, k in zip(offset, size))]
    assert held.ravel().tolist() == list(range(at, at + n)) and at + n <= end

    def is_box(m):
        """Are items [at, at + m) a box?"""
        where = np.argwhere((items >= at) & (items < at + m))
        return m == np.prod(where.max(0) - where.min(0) + 1, dtype=int)
    assert not any(is_box(m) for m in range(n + 1, end - at + 1))
