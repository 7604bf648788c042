# SPDX-License-Identifier: Apache-2.0
"""core/tensor/share: positions in the pieces of a box, and who of a replica group stores what, against walking every
piece."""
import bisect
import ctypes
import itertools
import random

import pytest
import tensorlib as tl
from hypothesis import given, settings
from hypothesis import strategies as st

MIB = 1 << 20
ITEMS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module", autouse=True)
def loaded(lib):
    lib.tensor_share_span.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
    lib.tensor_share_span.restype = tl.Span
    lib.tensor_share_boxes.restype = ctypes.c_uint32
    return tl.load(lib)


def ref(x):
    return ctypes.byref(x)


def grid_of(lib, shape, item, params):
    g = tl.Grid()
    dims = tl.Shape.of(shape)
    assert lib.tensor_grid_init(ref(g), ref(dims), ctypes.c_uint(item), tl.GridParams(*params)) == 0
    return g


def walk(lib, g, box):
    """[(offset, size), ...] of every piece, in storage order."""
    it, n, found = tl.PieceIter(), g.shape.ndim, []
    lib.tensor_piece_first(ref(it), ref(g), ref(box))
    while not it.done:
        found.append(it.piece.pair(n))
        lib.tensor_piece_next(ref(it))
    return found


def product(numbers):
    total = 1
    for n in numbers:
        total *= n
    return total


class Cut:
    """A box and all its pieces, walked."""

    def __init__(self, lib, shape, item, params, offset, size):
        self.lib, self.item = lib, item
        self.g = grid_of(lib, shape, item, params)
        self.box = tl.Box.of(offset, size)
        self.pieces = walk(lib, self.g, self.box)
        self.begins = list(itertools.accumulate((product(s) * item for _, s in self.pieces), initial=0))
        self.bytes = self.begins[-1]

    def from_byte(self, at):
        return bisect.bisect_left(self.begins[:-1], at)

    def boxes(self, first, end):
        found = (tl.Box * (2 * tl.MAX_DIMS))()
        n = self.lib.tensor_share_boxes(ref(self.g), ref(self.box), ctypes.c_uint64(first), ctypes.c_uint64(end), found)
        return [found[i] for i in range(n)]


@st.composite
def cuts(draw):
    """Small parameters, so that small tensors have many pieces, and widened ones."""
    ndim = draw(st.integers(0, 5))
    shape = [draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, (64, 300, 40, 14, 8, 6)[ndim]))
             for _ in range(ndim)]
    offset = [draw(st.integers(0, n)) for n in shape]
    size = [draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else min(1, n - o), n - o))
            for n, o in zip(shape, offset)]
    if draw(st.booleans()):
        offset, size = [0] * ndim, list(shape)
    m = draw(st.sampled_from([1, 8, 32, 64, 500]))
    params = (m, m * draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 4, 16, 200])))
    return shape, draw(st.sampled_from(ITEMS)), params, offset, size


def from_byte(lib, g, box, at):
    """The first piece that begins at or after byte `at`, as the share of who has all bytes from there on."""
    first, end = ctypes.c_uint64(), ctypes.c_uint64()
    lib.tensor_share_pieces(ref(g), ref(box), ctypes.c_uint64(0), ctypes.c_uint64(0), ctypes.c_uint64(MIB),
                            tl.Span(at, 2**64 - 1), ref(first), ref(end))
    assert end.value in (0, lib.tensor_piece_count(ref(g), ref(box)))
    return first.value


def check_positions(lib, cut):
    near = {at + d for at in cut.begins for d in (-1, 0, 1)} | {cut.bytes // 3, cut.bytes * 2 // 3, cut.bytes + 99}
    for at in near:
        if at >= 0:
            # nothing to share
            assert from_byte(lib, cut.g, cut.box, at) == (cut.from_byte(at) if cut.bytes else 0), at


def check_boxes(lib, cut, first, end):
    boxes, n = cut.boxes(first, end), cut.g.shape.ndim
    assert len(boxes) <= max(1, 2 * n - 1)
    assert [p for b in boxes for p in walk(lib, cut.g, b)] == cut.pieces[first:end]


@given(cuts(), st.randoms(use_true_random=False))
def check_cut(lib, example, rng):
    cut = Cut(lib, *example)
    check_positions(lib, cut)
    count = len(cut.pieces)
    pairs = list(itertools.combinations_with_replacement(range(count + 1), 2)) if count < 12 else \
        [sorted((rng.randrange(count + 1), rng.randrange(count + 1))) for _ in range(40)] + [(0, count), (0, count + 9)]
    for first, end in pairs:
        check_boxes(lib, cut, first, end)


def test_positions_and_boxes_against_walking(lib, scale):
    settings(max_examples=scale(120, 8000), deadline=None)(check_cut)(lib)


@pytest.mark.parametrize("shape, item, offset, size", [
    ((4096, 4096), 2, (0, 0), (4096, 4096)), ((4096, 4096), 2, (512, 0), (64, 4096)),
    ((14336, 4096), 2, (100, 3), (2000, 1000)),
    ((50257, 768), 4, (0, 0), (50257, 768)), ((512, 512, 3, 3), 4, (64, 0, 0, 0), (64, 512, 3, 3)),
    ((8, 4096, 1024), 2, (1, 0, 0), (6, 4096, 1024)),
    ((3000000,), 4, (5, ), (2999000,)), ((), 4, (), ()), ((7, 0, 3), 4, (0, 0, 0), (7, 0, 3))])
def test_real_shapes(lib, shape, item, offset, size):
    cut = Cut(lib, shape, item, (128 << 10, 1 << 20, 512), offset, size)
    check_positions(lib, cut)
    rng = random.Random(5)
    for _ in range(30):
        check_boxes(lib, cut, *sorted((rng.randrange(len(cut.pieces) + 1), rng.randrange(len(cut.pieces) + 1))))


def test_a_huge_box_is_answered_at_once(lib):
    """2^42 bytes in 2^22 pieces or more: by arithmetic."""
    g = grid_of(lib, (1 << 20, 1 << 20), 4, (128 << 10, 1 << 20, 512))
    box = tl.Box.of((3, 5), ((1 << 20) - 7, (1 << 20) - 9))
    count = lib.tensor_piece_count(ref(g), ref(box))
    assert count > 1 << 21
    piece, all_bytes = tl.Box(), 4 * ((1 << 20) - 7) * ((1 << 20) - 9)
    for n in (0, 1, count // 3, count - 1):
        low, high = 0, all_bytes                             # the last byte that no piece before n begins at or after
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if from_byte(lib, g, box, middle) <= n else (low, middle - 1)
        at = low                                             # where piece n begins
        assert from_byte(lib, g, box, at) == n
        assert lib.tensor_piece_at(ref(g), ref(box), ctypes.c_uint64(n), ref(piece)) == 0
        size = 4 * product(piece.pair(2)[1])
        assert from_byte(lib, g, box, at + 1) == from_byte(lib, g, box, at + size) == n + 1
        assert n + 1 == count or from_byte(lib, g, box, at + size + 1) == n + 2
    assert at + size == all_bytes


@given(st.integers(0, (1 << 64) - 1), st.integers(1, (1 << 32) - 1), st.data())
@settings(max_examples=300, deadline=None)
def check_span(lib, total, replicas, data):
    i = data.draw(st.integers(0, replicas - 1))
    s = lib.tensor_share_span(total, i, replicas)
    assert (s.from_, s.to) == (total * i // replicas, total * (i + 1) // replicas)


def test_spans_are_exact_and_partition(lib):
    check_span(lib)
    for total, replicas in [(0, 3), (1, 4), (10, 3), ((1 << 64) - 1, 7)]:
        spans = [lib.tensor_share_span(total, i, replicas) for i in range(replicas)]
        assert spans[0].from_ == 0 and spans[-1].to == total
        assert all(a.to == b.from_ for a, b in zip(spans, spans[1:]))


def pieces_in_span(lib, cut, at, start, size, span):
    first, end = ctypes.c_uint64(77), ctypes.c_uint64(77)
    u64 = ctypes.c_uint64
    lib.tensor_share_pieces(ref(cut.g), ref(cut.box), u64(at), u64(start), u64(size), span, ref(first), ref(end))
    return first.value, end.value


def test_what_begins_on_the_border_of_two_spans_belongs_to_the_second(lib):
    """A piece, and a small tensor as a whole: to one replica, and only to that one."""
    cut = Cut(lib, (64, 64), 4, (128 << 10, 1 << 20, 512), (0, 0), (64, 64))
    count, size = len(cut.pieces), cut.bytes
    for at in (0, size, 5 * size, 1 << 40):
        for span, takes in [((at, at + size), True), ((at, at + 1), True), ((at - size, at), False), ((0, at), False),
                            ((at, at), False),
                            ((at + 1, at + size), False), ((at - 1, at + 1), True)]:
            if 0 <= span[0] <= span[1]:
                first, end = pieces_in_span(lib, cut, at, at, size, tl.Span(*span))
                assert (end - first == count and first == 0) if takes else first == end, (at, span)
    replicas = 4                                # of one size: each span is exactly one of them
    for i in range(replicas):
        taken = [pieces_in_span(lib, cut, n * size, n * size, size,
                                lib.tensor_share_span(replicas * size, i, replicas)) for n in range(replicas)]
        assert [end - first for first, end in taken] == [count if n == i else 0 for n in range(replicas)]
    # a box of it that begins later goes with the whole
    second = Cut(lib, (64, 64), 4, (128 << 10, 1 << 20, 512), (32, 0), (32, 64))
    for span, takes in [((7, 9), True), ((0, 8), False), ((8, 9), True), ((8 + size // 2, 8 + size), False)]:
        first, end = pieces_in_span(lib, second, 8 + size // 2, 8, size, tl.Span(*span))
        assert end - first == (len(second.pieces) if takes else 0), span
    large = Cut(lib, (1024, 1024), 4, (128 << 10, 1 << 20, 512), (0, 0), (1024, 1024))
    for n, begin in enumerate(large.begins[:-1]):
        for to, begins in ((begin, n), (begin + 1, n + 1)):
            assert pieces_in_span(lib, large, 3, 3, large.bytes, tl.Span(0, 3 + to)) == (0, begins)
            assert pieces_in_span(lib, large, 3, 3, large.bytes,
                                  tl.Span(3 + to, 3 + large.bytes)) == (begins, len(large.pieces))


def test_a_sequence_is_shared_out(lib, scale):
    """Tensors of one or several boxes, big and small, over 1 to 9 replicas: each piece to the replica in whose span it
    (or its small tensor) begins, all of them once, and no replica more than 1 MiB from its span."""
    shapes = [(1024, 1024), (3, 700, 513), (2000000,), (300,), (64, 64), (5000, 100), (511, 513), (), (0, 4), (262144,),
              (262143,), (1 << 23,)]
    for seed in range(scale(12, 60)):
        rng = random.Random(seed)
        tensors = []
        for _ in range(rng.randrange(1, 12)):
            shape, boxes = rng.choice(shapes), []
            if shape and rng.random() < 0.4 and shape[0] > 3:
                low = sorted(rng.sample(range(shape[0] + 1), 4))
                spans = [(low[0], low[1]), (low[2], low[3])]
            else:
                spans = [(0, shape[0])] if shape else [None]
            for s in spans:
                offset = () if s is None else (s[0],) + (0,) * (len(shape) - 1)
                size = () if s is None else (s[1] - s[0],) + shape[1:]
                boxes.append(Cut(lib, shape, 4, (128 << 10, 1 << 20, 512), offset, size))
            tensors.append(boxes)
        total, replicas = sum(c.bytes for t in tensors for c in t), rng.randrange(1, 10)
        taken = [0] * replicas
        spans = [lib.tensor_share_span(total, i, replicas) for i in range(replicas)]
        at = 0
        for boxes in tensors:
            start, size = at, sum(c.bytes for c in boxes)
            for cut in boxes:
                begins = [start if size < MIB else at + b for b in cut.begins[:-1]]
                if cut.bytes == 0:
                    begins = []
                expected = [[n for n, b in enumerate(begins) if s.from_ <= b < s.to] for s in spans]
                for i, s in enumerate(spans):
                    first, end = pieces_in_span(lib, cut, at, start, size, s)
                    assert list(range(first, end)) == expected[i], (seed, i)
                    taken[i] += sum(cut.begins[n + 1] - cut.begins[n] for n in expected[i])
                assert sum(map(len, expected)) == len(begins)
                at += cut.bytes
        assert sum(taken) == total
        assert all(abs(n - (s.to - s.from_)) < MIB for n, s in zip(taken, spans)), (seed, taken)
