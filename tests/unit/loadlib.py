# SPDX-License-Identifier: Apache-2.0
"""Loads through vckpt.h by ctypes: numpy arrays as what a rank holds."""
import ctypes as c
import random
import types

import numpy as np

from saverlib import BOXES, DTYPES, NONE, Tensor, numbers
from vckpt._lib import LoadExchange, LoadLost, LoadOptions, LoadProgress

REHASH, SKIP_DAMAGED, NOT_STRICT, DIRECT, CACHED = 1, 2, 4, 8, 16
CONVERT, RESIZE, ZERO = 1, 2, 4


class Target(c.Structure):
    _fields_ = [("size", c.c_size_t), ("to", c.POINTER(Tensor)), ("component", c.c_char_p), ("name", c.c_char_p),
                ("from_", c.POINTER(c.c_uint64)), ("at", c.POINTER(c.c_uint64)), ("from_ndim", c.c_uint32),
                ("flags", c.c_uint32)]


def target(to, stored=None, take=None, at=None, flags=0):
    """`to`: described. take: a (offset, size) for each dimension of the stored tensor."""
    component, name = stored.split("/", 1) if stored else (None, None)
    return Target(c.sizeof(Target), c.pointer(to), component and component.encode(), name and name.encode(),
                  numbers(c.c_uint64, [n for pair in take for n in pair]) if take is not None else None,
                  numbers(c.c_uint64, at), len(take or ()), flags)


class Rename(c.Structure):
    _fields_ = [("component", c.c_char_p), ("from_", c.c_char_p), ("to", c.c_char_p), ("flags", c.c_uint32)]


RENAMER = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_char_p, c.c_char_p, c.POINTER(c.c_char), c.c_size_t)


class Opened:
    """A step of a run."""

    def __init__(self, api, store, step=NONE, run="run"):
        self.api, self.p = api, c.c_void_p()
        api.call("vckpt_step_open", str(store).encode(), run.encode(), c.c_uint64(step), c.byref(self.p))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.api.lib.vckpt_step_close(self.p)

    def load(self, rank=0, threads=2, flags=0, world=0, comm=None, exchange=0):
        return Load(self, rank, threads, flags, world, comm, exchange)


def described(name, array, shape=None, placements=None, mesh=None, flat=None, boxes=None, flags=0, dtype=None,
              same_dims=None, strides=True, local_shape=None, data=True):
    """`array` is what the rank holds of it; it is written."""
    component, name = name.split("/", 1)
    shape = list(array.shape if shape is None else shape)
    flags |= BOXES if boxes is not None else 0
    pairs = [n for b in boxes or () for pair in b for n in pair]
    return Tensor(component.encode(), name.encode(), numbers(c.c_uint64, shape), mesh,
                  placements.encode() if placements else None, numbers(c.c_uint64, flat),
                  numbers(c.c_uint64, pairs) if boxes is not None else None, same_dims.encode() if same_dims else None,
                  array.ctypes.data if array.size and data else None,
                  numbers(c.c_int64, array.strides if strides is True else strides) if strides else None,
                  numbers(c.c_uint64, local_shape), len(shape), array.ndim, dtype or DTYPES[array.dtype.name], flags,
                  len(boxes or ()), 0)


class Load:
    def __init__(self, step, rank=0, threads=2, flags=0, world=0, comm=None, exchange=0):
        self.api, self.lib, self.p, self.keep = step.api, step.api.lib, c.c_void_p(), []
        options = LoadOptions(c.sizeof(LoadOptions), rank, threads, flags, world, comm, exchange, 0)
        self.lib.vckpt_load_missing.restype = self.lib.vckpt_load_unexpected.restype = c.c_size_t
        self.lib.vckpt_load_lost_count.restype = c.c_size_t
        self.api.call("vckpt_load_begin", step.p, c.byref(options), c.byref(self.p))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.vckpt_load_free(self.p)
        self.p = c.c_void_p()

    def tensors(self, *tensors):
        table = (Tensor * max(1, len(tensors)))(*tensors)
        self.keep.append(tensors)
        self.api.call("vckpt_load_tensors", self.p, table, c.c_size_t(len(tensors)))

    def tensor(self, name, array, **fields):
        self.keep.append(array)
        self.tensors(described(name, array, **fields))

    def targets(self, *targets):
        table = (Target * max(1, len(targets)))(*targets)
        self.keep.append(targets)
        self.api.call("vckpt_load_targets", self.p, table, c.c_size_t(len(targets)))

    def stream(self, stream):
        self.api.call("vckpt_load_stream", self.p, c.c_void_p(stream))

    def rename(self, *rules):
        """(component or None, from, to[, flags])"""
        table = (Rename * max(1, len(rules)))(*[Rename(*[w.encode() if isinstance(w, str) else w for w in rule])
                                                for rule in rules])
        self.api.call("vckpt_load_rename", self.p, table, c.c_size_t(len(rules)))

    def rename_by(self, f):
        """f(component, name): the step's name, None, or a negative number."""
        def work(_, component, name, out, room):
            found = f(component.decode(), name.decode())
            if isinstance(found, str):
                c.memmove(out, found.encode() + b"\0", len(found.encode()) + 1)
                return 1
            return found or 0
        self.keep.append(RENAMER(work))
        self.api.call("vckpt_load_rename_by", self.p, self.keep[-1], None)

    def expect(self, component):
        self.api.call("vckpt_load_expect", self.p, component.encode())

    def start(self):
        self.api.call("vckpt_load_start", self.p)

    def wait(self, timeout_ms=60000):
        self.api.call("vckpt_load_wait", self.p, c.c_int64(timeout_ms))

    def run(self):
        self.start()
        self.wait()

    def stop(self):
        self.lib.vckpt_load_stop(self.p)

    def progress(self):
        p = LoadProgress(c.sizeof(LoadProgress))
        assert self.lib.vckpt_load_progress(self.p, c.byref(p)) == 0
        return p

    def exchanged(self):
        x = LoadExchange(c.sizeof(LoadExchange))
        assert self.lib.vckpt_load_exchanged(self.p, c.byref(x)) == 0
        return types.SimpleNamespace(**{name: getattr(x, name) for name, _ in x._fields_})  # outlives the load

    def names(self, which):
        table = c.POINTER(c.c_char_p)()
        n = getattr(self.lib, f"vckpt_load_{which}")(self.p, c.byref(table))
        return [table[i].decode() for i in range(n)]

    def lost(self):
        """[(name, [(offset, size), ...], code, why)]"""
        out = []
        for i in range(self.lib.vckpt_load_lost_count(self.p)):
            one = LoadLost()
            assert self.lib.vckpt_load_lost(self.p, c.c_size_t(i), c.byref(one)) == 0
            box = one.box[:2 * one.ndim]
            out.append((f"{one.component.decode()}/{one.name.decode()}", list(zip(box[::2], box[1::2])), one.code,
                        one.why.decode()))
        assert self.lib.vckpt_load_lost(self.p, c.c_size_t(len(out)), c.byref(LoadLost())) == -2
        return out


def strided(rng: random.Random, shape, dtype):
    """(all of the memory, filled with a pattern; an array of that shape in it, of some order and steps, none
    backwards)"""
    order = rng.sample(range(len(shape)), len(shape))
    step, spare = [rng.choice((1, 1, 2, 3)) for _ in shape], [rng.choice((0, 0, 3)) for _ in shape]
    room = [shape[d] * step[d] + spare[d] + 2 for d in order]
    base = np.frombuffer(b"\xa5" * (np.dtype(dtype).itemsize * int(np.prod(room, dtype=int))), dtype)
    base = base.reshape(room).copy()
    inner = base[tuple(slice(1, 1 + shape[d] * step[d], step[d]) for d in order)]
    return base, inner.transpose(np.argsort(order)) if shape else base
