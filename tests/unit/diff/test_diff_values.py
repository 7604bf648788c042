# SPDX-License-Identifier: Apache-2.0
"""core/diff through ctypes: values of every processor's vectors are the same, and a box is cut whole."""
import ctypes as c
import itertools

import ml_dtypes
import numpy as np
import pytest

from tensorlib import Box, Grid, Shape


class Type(c.Structure):  # struct diff_type
    _fields_ = [("dtype", c.c_int), ("item_bytes", c.c_uint), ("values", c.c_uint), ("table", c.c_double * 256)]


class Measure(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("values", "changed", "finite", "nan_a", "nan_b", "inf_a", "inf_b")] + [
        (n, c.c_double) for n in ("max", "squares", "squares_a")]


class Cut(c.Structure):
    _fields_ = [("grid", c.POINTER(Grid)), ("all", Box), ("box", Box), ("d", c.c_uint), ("most", c.c_uint64),
                ("done", c.c_bool)]


def measure(lib, dtype, a, b, which):
    assert lib.diff_measure_select(which) in (0, which)
    kind, m = Type(), Measure()
    lib.diff_type_init(c.byref(kind), dtype)
    lib.diff_measure_add(c.byref(m), c.byref(kind), c.c_void_p(a.ctypes.data), c.c_void_p(b.ctypes.data),
                         c.c_size_t(a.size))
    lib.diff_measure_select(1)
    return m


@pytest.mark.parametrize("word,dtype", [("f4", 12), ("f8", 13), ("f2", 10), ("i8", 9), ("u2", 3), ("u1", 2),
                                        (ml_dtypes.bfloat16, 11)])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 511, 512, 513, 2000])
@pytest.mark.parametrize("finite", [False, True])
def test_vectors_agree(lib, word, dtype, n, finite):
    rng, item = np.random.default_rng(n), np.dtype(word).itemsize

    def some():                                         # not finite: NaN and infinities among floats
        return rng.standard_normal(n).astype(word) if finite else np.frombuffer(rng.bytes(n * item), word)
    a = some().copy()
    b = np.where(rng.random(n) < .5, some(), a)
    plain, wide = (measure(lib, dtype, a, b, which) for which in (0, 1))
    for name, _ in Measure._fields_:
        assert getattr(plain, name) == pytest.approx(getattr(wide, name), rel=1e-14, nan_ok=True), name
    assert plain.values == n and plain.changed == (a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")).sum()
    if a.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):
            a, b = a.astype("f8"), b.astype("f8")
        assert (plain.nan_a, plain.nan_b) == (np.isnan(a).sum(), np.isnan(b).sum())
        assert plain.finite == (np.isfinite(a) & np.isfinite(b)).sum()


@pytest.mark.parametrize("dims,item", [((), 8), ((1,), 1), ((3_000_001,), 1), ((700_000,), 4), ((3, 2_000_000), 1),
                                       ((5, 7, 300_000), 2), ((1025, 1024), 1), ((2, 3, 1024, 1025), 1),
                                       ((4, 0, 5), 4), ((1, 1, 1 << 20), 16)])
def test_cuts(lib, dims, item):
    """Boxes of at most 1 MiB that follow each other and are the whole together."""
    grid, cut, whole = Grid(Shape.of([n + 7 for n in dims]), item), Cut(), Box.of(range(1, len(dims) + 1), dims)
    lib.diff_cut_items.restype = c.c_uint64
    lib.diff_cut_first(c.byref(cut), c.byref(grid), c.byref(whole))
    at, total = 0, int(np.prod(dims, dtype=int))
    while not cut.done:
        items = lib.diff_cut_items(c.byref(cut))
        assert 0 < items * item <= 1 << 20
        offset = [cut.box.offset[d] - d - 1 for d in range(len(dims))]
        assert all(o + cut.box.size[d] <= dims[d] for d, o in enumerate(offset))
        assert at == (np.ravel_multi_index(offset, dims) if dims else 0)
        # its items follow each other in row-major order
        inner = list(itertools.dropwhile(lambda n: n == 1, (cut.box.size[d] for d in range(len(dims)))))
        assert not inner or tuple(inner[1:]) == dims[len(dims) - len(inner) + 1:]
        at += items
        lib.diff_cut_next(c.byref(cut))
    assert at == total
