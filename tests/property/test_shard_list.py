# SPDX-License-Identifier: Apache-2.0
"""Shards given as raw box lists: refused where they cannot be, else walked in the order of the buffer."""
import ctypes
import random

import numpy
import pytest
from tensorlib import LINE_FUNC, Box, Boxes, Error, Failed, Grid, GridParams, Shape, ShardBox, check, load


class ShardList(ctypes.Structure):
    _fields_ = [("boxes", ctypes.c_void_p), ("done", ctypes.c_bool), ("at", ShardBox), ("i", ctypes.c_size_t), ("next", ctypes.c_uint64)]


@pytest.fixture(scope="module", autouse=True)
def types(lib):
    load(lib)


class List:
    def __init__(self, lib, ndim, boxes):
        self.lib, self.c = lib, Boxes(ndim, 0, 0, None)
        for offset, size in boxes:
            assert lib.tensor_boxes_add(ctypes.byref(self.c), ctypes.byref(Box.of(offset, size))) == 0

    def check(self, shape):
        err = Error()
        check(self.lib.tensor_shard_list_check(ctypes.byref(Shape.of(shape)), ctypes.byref(self.c), ctypes.byref(err)), err)

    def walk(self):
        it, found = ShardList(), []
        self.lib.tensor_shard_list_first(ctypes.byref(it), ctypes.byref(self.c))
        while not it.done:
            offset, size = it.at.box.pair(self.c.ndim)
            found.append((it.i, offset, size, it.at.local_offset, tuple(it.at.local_stride[:self.c.ndim])))
            self.lib.tensor_shard_list_next(ctypes.byref(it))
        self.lib.tensor_shard_list_next(ctypes.byref(it))
        assert it.done
        return found

    def __del__(self):
        self.lib.tensor_boxes_release(ctypes.byref(self.c))


def cells(rng, shape, whole=False):
    """Some random disjoint boxes of the tensor, some of them empty, in random order."""
    found = [((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randrange(6)):
        if not shape:
            break
        i, d = rng.randrange(len(found)), rng.randrange(len(shape))
        offset, size = found.pop(i)
        at = rng.randint(0, size[d])
        low, high = list(size), list(size)
        low[d], high[d] = at, size[d] - at
        moved = list(offset)
        moved[d] += at
        found += [(offset, tuple(low)), (tuple(moved), tuple(high))]
    rng.shuffle(found)
    return found if whole else found[:rng.randint(1, len(found))]


def test_boxes_lie_one_after_another(lib, scale):
    rng = random.Random(5)
    for _ in range(scale(200, 2000)):
        shape = tuple(rng.randint(0, 6) for _ in range(rng.randint(0, 4)))
        tensor = numpy.arange(int(numpy.prod(shape))).reshape(shape)
        boxes = cells(rng, shape)
        held = List(lib, len(shape), boxes)
        held.check(shape)
        parts = [tensor[tuple(slice(o, o + n) for o, n in zip(*box))].ravel() for box in boxes]
        buffer = numpy.concatenate(parts)
        got = numpy.full(buffer.size, -1)
        walked = held.walk()
        assert [w[0] for w in walked] == [i for i, part in enumerate(parts) if part.size]
        for _, offset, size, local, stride in walked:
            at = numpy.array(local)
            for n, s in zip(size, stride):
                at = at[..., None] + numpy.arange(n) * s
            got[at] = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size))]
        assert (got == buffer).all()


@pytest.mark.parametrize("shape,boxes,words", [
    ((4, 4), [((0, 0), (2, 2)), ((3, 3), (1, 2))], ["box 1", "[3:4, 3:5]", "not inside"]),
    ((4, 4), [((0, 0), (2, 2)), ((2, 0), (1, 1)), ((1, 1), (2, 2))], ["boxes 0 and 2", "overlap", "[1:2, 1:2]"]),
    ((4,), [((2**64 - 1,), (2,))], ["box 0", "not inside"]),
    ((), [((), ()), ((), ())], ["boxes 0 and 1", "overlap"]),
])
def test_a_list_that_cannot_be_is_refused(lib, shape, boxes, words):
    with pytest.raises(Failed) as failed:
        List(lib, len(shape), boxes).check(shape)
    assert all(word in failed.value.text for word in words), failed.value.text


def test_a_list_of_other_dimensions_is_refused(lib):
    with pytest.raises(Failed, match="boxes of 1 dimensions for a tensor of 2"):
        List(lib, 1, [((0,), (1,))]).check((4, 4))


def test_what_others_hold_may_be_missing(lib):
    List(lib, 2, [((1, 1), (1, 1))]).check((4, 4))


def test_a_list_is_filled_from_a_list(lib, scale):
    rng = random.Random(6)
    for _ in range(scale(50, 500)):
        shape = tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 3)))
        tensor = numpy.arange(int(numpy.prod(shape))).reshape(shape)
        sources, wanted = List(lib, len(shape), cells(rng, shape, True)), List(lib, len(shape), cells(rng, shape))
        index, grid, it = ctypes.c_void_p(), Grid(), ShardList()
        assert lib.tensor_box_index_new(ctypes.byref(sources.c), ctypes.byref(index)) == 0
        assert lib.tensor_grid_init(ctypes.byref(grid), ctypes.byref(Shape.of(shape)), 4, GridParams(16, 64, 4)) == 0
        buffer = numpy.full(sum(int(numpy.prod(size)) for _, _, size, _, _ in wanted.walk()), -1)

        def line(_, pointer):
            offset, size = pointer.contents.part.pair(len(shape))
            at = numpy.array(pointer.contents.local_offset)
            for d, n in enumerate(size):
                at = at[..., None] + numpy.arange(n) * pointer.contents.local_stride[d]
            assert (buffer[at] == -1).all()
            buffer[at] = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size))]
            return 0
        lib.tensor_shard_list_first(ctypes.byref(it), ctypes.byref(wanted.c))
        while not it.done:
            assert lib.tensor_reshard_box(ctypes.byref(grid), index, ctypes.byref(sources.c), ctypes.byref(it.at), LINE_FUNC(line), None) == 0
            lib.tensor_shard_list_next(ctypes.byref(it))
        lib.tensor_box_index_free(index)
        want = [tensor[tuple(slice(o, o + n) for o, n in zip(offset, size))].ravel() for _, offset, size, _, _ in wanted.walk()]
        assert (buffer == (numpy.concatenate(want) if want else [])).all()
