# SPDX-License-Identifier: Apache-2.0
"""Shards given as raw box lists: refused where they cannot be, else walked in the order of the buffer."""
import ctypes
import errno
import random

import numpy
import pytest
from tensorlib import (LINE_FUNC, Box, Boxes, Error, Failed, Grid, GridParams, Shape, ShardList, check, load,
                       random_boxes)


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
        check(self.lib.tensor_shard_list_check(ctypes.byref(Shape.of(shape)), ctypes.byref(self.c), ctypes.byref(err)),
              err)

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


def test_boxes_lie_one_after_another(lib, scale):
    rng = random.Random(5)
    for _ in range(scale(200, 2000)):
        shape = tuple(rng.randint(0, 6) for _ in range(rng.randint(0, 4)))
        tensor = numpy.arange(int(numpy.prod(shape))).reshape(shape)
        boxes = random_boxes(rng, shape)
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
    ((4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 4))], ["box 1", "3:7", "not inside"]),
    ((4, 6), [((5, 0), (1, 1))], ["box 0", "not inside"]),
    ((4, 6), [((2**64 - 1, 0), (2, 1))], ["box 0", "not inside"]),
    ((4, 6), [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((1, 2), (2, 2))], ["2", "overlap", "2:3"]),
])
def test_a_list_that_cannot_be_is_refused(lib, shape, boxes, words):
    with pytest.raises(Failed) as failed:
        List(lib, len(shape), boxes).check(shape)
    assert failed.value.code == -errno.EINVAL
    assert all(word in failed.value.text for word in words), failed.value.text


def test_a_list_of_other_dimensions_is_refused(lib):
    with pytest.raises(Failed, match="boxes of 1 dimension for a tensor of 2"):
        List(lib, 1, [((0,), (1,))]).check((4, 4))


def test_what_others_hold_may_be_missing(lib):
    List(lib, 2, [((1, 1), (1, 1))]).check((4, 4))


def test_a_list_is_filled_from_a_list(lib, scale):
    rng = random.Random(6)
    for _ in range(scale(50, 500)):
        shape = tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 3)))
        tensor = numpy.arange(int(numpy.prod(shape))).reshape(shape)
        sources, wanted = List(lib, len(shape),
                               random_boxes(rng, shape, True)), List(lib, len(shape), random_boxes(rng, shape))
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
            assert lib.tensor_reshard_box(ctypes.byref(grid), index, ctypes.byref(sources.c), ctypes.byref(it.at),
                                          LINE_FUNC(line), None) == 0
            lib.tensor_shard_list_next(ctypes.byref(it))
        lib.tensor_box_index_free(index)
        want = [tensor[tuple(slice(o, o + n) for o, n in zip(offset, size))].ravel()
                for _, offset, size, _, _ in wanted.walk()]
        assert (buffer == (numpy.concatenate(want) if want else [])).all()
