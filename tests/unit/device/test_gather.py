# SPDX-License-Identifier: Apache-2.0
"""A box of a strided array into contiguous memory: against what numpy says of the same array."""
import ctypes

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gatherlib import Gather

GUARD = 64


def gather(lib, array, misalign=0):
    """The bytes that the library makes of it; what lies around the destination stays."""
    want = np.ascontiguousarray(array).tobytes()
    out = np.full(len(want) + 2 * GUARD + misalign, 0xa5, np.uint8)
    lib.device_gather_host(ctypes.c_void_p(out.ctypes.data + GUARD + misalign), ctypes.byref(Gather.of(array)))
    got = out.tobytes()
    begin = GUARD + misalign
    assert got[:begin] == b"\xa5" * begin and got[begin + len(want):] == b"\xa5" * GUARD
    return got[begin:begin + len(want)], want


def items(nbytes, seed=1, misalign=0):
    raw = np.random.default_rng(seed).integers(0, 256, nbytes + misalign, np.uint8)
    return raw[misalign:]


@st.composite
def views(draw):
    """A view of random bytes: any item size, permuted, stepped, reversed, repeated, cut, of up to 5 dimensions."""
    item = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 40]))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7, 17, 33, 70]), max_size=5))
    while np.prod(shape, dtype=np.int64) > 1 << 16:
        shape[shape.index(max(shape))] = 2
    count = int(np.prod(shape, dtype=np.int64))
    a = items(count * item, draw(st.integers(0, 99)), draw(st.integers(0, 3))).view(f"V{item}").reshape(shape)
    a = a.transpose(draw(st.permutations(range(a.ndim))))
    cut = []
    for size in a.shape:
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        step = draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2]))
        cut.append(slice(start, stop, step) if step > 0 and draw(st.booleans()) else slice(None, None, step))
    a = a[(*cut, ...)]                                                          # never a scalar
    if draw(st.integers(0, 4)) == 0 and a.ndim < 5:
        at = draw(st.integers(0, a.ndim))
        shape = a.shape[:at] + (draw(st.integers(1, 40)),) + a.shape[at:]
        a = np.broadcast_to(np.expand_dims(a, at), shape)
    return a


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(views(), st.integers(0, 15))
def test_any_view_is_what_numpy_makes_of_it(lib, view, misalign):
    got, want = gather(lib, view, misalign)
    assert got == want


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(views())
def test_fold_keeps_bytes_and_order(lib, view):
    g = Gather.of(view)
    lib.device_gather_fold(ctypes.byref(g))
    assert g.ndim <= view.ndim
    if view.size == 0:
        assert (g.ndim, g.item_bytes) == (0, 0)
        return
    sizes, strides = g.size[:g.ndim], g.stride[:g.ndim]
    assert int(np.prod(sizes, dtype=np.uint64)) * g.item_bytes == view.size * view.itemsize
    assert all(size > 1 for size in sizes)
    assert all(strides[i] != sizes[i + 1] * strides[i + 1] for i in range(g.ndim - 1))
    assert not g.ndim or strides[-1] != g.item_bytes
    again = Gather.of(view)
    again.item_bytes, again.ndim, again.size, again.stride = g.item_bytes, g.ndim, g.size, g.stride
    out = np.zeros(view.size * view.itemsize, np.uint8)
    lib.device_gather_host(ctypes.c_void_p(out.ctypes.data), ctypes.byref(again))
    assert out.tobytes() == np.ascontiguousarray(view).tobytes()


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16, 3, 48])
@pytest.mark.parametrize("shape, order", [((300, 257), (1, 0)), ((9, 130, 65), (2, 1, 0)), ((9, 130, 65), (1, 2, 0)),
                                          ((4, 70, 3, 66), (3, 1, 0, 2)), ((3, 5, 7, 11, 13), (4, 3, 2, 1, 0))])
def test_transposed(lib, item, shape, order):
    a = items(int(np.prod(shape)) * item).view(f"V{item}").reshape(shape).transpose(order)
    for view in (a, a[::-1], a[..., ::-1], a[1:, 1:], a[:, ::2], a[::2, ::-3]):
        got, want = gather(lib, view)
        assert got == want


@pytest.mark.parametrize("view, ndim, item", [
    (np.zeros((4, 5, 6), np.float32), 0, 480), (np.zeros((4, 5, 6), np.float32)[1:3], 0, 240),
    (np.zeros((4, 5, 6), np.float32)[:, 1:3], 1, 48), (np.zeros((4, 5, 6), np.float32)[:, :, 1:3], 1, 8),
    (np.zeros((4, 5, 6), np.float32)[:, 1:3, 1:3], 2, 8), (np.zeros((4, 5), np.float32).T, 2, 4),
    (np.zeros((1, 5, 1), np.float32), 0, 20), (np.float32(1).reshape(()), 0, 4), (np.zeros((5,), np.int16)[::-1], 1, 2),
    (np.broadcast_to(np.int8(1), (5, 6, 7)), 1, 1), (np.zeros((0, 5)), 0, 0), (np.zeros((5, 0)), 0, 0)])
def test_runs_that_lie_together_are_one(lib, view, ndim, item):
    g = Gather.of(view)
    lib.device_gather_fold(ctypes.byref(g))
    assert (g.ndim, g.item_bytes) == (ndim, item)


def test_a_run_may_be_longer_than_32_bits(lib):
    g = Gather(1, 2, 2)
    g.size[:2], g.stride[:2] = [1 << 20, 1 << 13], [1 << 14, 2]
    lib.device_gather_fold(ctypes.byref(g))
    assert (g.ndim, g.item_bytes) == (0, 1 << 34)


def test_sizes_and_strides_at_the_edge_do_not_overflow(lib):
    g = Gather(1, 4, 2)
    g.size[:2], g.stride[:2] = [2, (1 << 64) - 1], [-4, 4]
    lib.device_gather_fold(ctypes.byref(g))
    assert g.ndim == 1 and g.size[0] == 2
    g = Gather(1, 4, 2)
    g.size[:2], g.stride[:2] = [2, 1 << 62], [0, 1 << 62]
    lib.device_gather_fold(ctypes.byref(g))
    assert g.ndim == 2
