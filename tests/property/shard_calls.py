# SPDX-License-Identifier: Apache-2.0
"""What the library says of all ranks of a sharding: shard_dump.c, called from Python."""
import ctypes
import errno
import itertools

import numpy as np
import pytest

import tensorlib as tl

FAULTS = {-10001: "boxes out of order", -10002: "an empty box, or one outside the tensor", -10003: "outside the buffer",
          -10004: "an item of the buffer twice", -10005: "box_count or items differ from what is walked"}


class Dump:
    """The library's answers; keeps meshes, shapes and placements between calls."""

    def __init__(self, lib, build):
        self.lib, self.dump = lib, ctypes.CDLL(str(build / "tests" / "libshard_dump.so"))
        self.dump.shard_dump.restype = self.dump.shard_holders.restype = ctypes.c_int64
        self.dump.shard_dump.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_uint64] + [ctypes.c_void_p] * 2
        self.dump.shard_holders.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint32]
        lib.tensor_sharding_check.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p]
        lib.tensor_sharding_replicated.argtypes = [ctypes.c_void_p]
        self.meshes, self.shapes, self.placements = {}, {}, {}
        self.items = np.empty(1 << 20, np.int64)
        self.local, self.boxes = np.empty((1 << 16, 17), np.uint64), np.empty(1 << 16, np.uint64)
        self.ranks = np.empty(1 << 16, np.uint32)

    def mesh(self, mesh, ranks=None):
        key = mesh, ranks
        if key not in self.meshes:
            self.meshes[key] = tl.OwnedMesh(self.lib, [(f"m{i}", n) for i, n in enumerate(mesh)], ranks)
        return self.meshes[key]

    def placement_array(self, placements):
        if placements not in self.placements:
            array, keep = (tl.Placement * len(placements))(), []
            for c, p in zip(array, placements):
                c.kind = ("R", "S", "SS", "IS", "RS", "P").index(p[0])
                c.dim = p[1] if len(p) > 1 else 0
                if p[0] == "RS":
                    keep.append((ctypes.c_uint64 * len(p[2]))(*itertools.accumulate(p[2])))
                    c.ends, c.nends = keep[-1], len(p[2])
                elif len(p) > 2:
                    c.split = p[2]
            self.placements[placements] = array, keep
        return self.placements[placements][0]

    def sharding(self, shape, mesh, placements, ranks=None):
        """(code of tensor_sharding_check, sharding)"""
        if shape not in self.shapes:
            self.shapes[shape] = tl.Shape.of(shape)
        s = tl.Sharding(self.shapes[shape], 1, self.mesh(mesh, ranks).pointer, self.placement_array(placements))
        return self.lib.tensor_sharding_check(ctypes.byref(s), len(placements), None), s

    def all_ranks(self, sharding, count, flats=None, window=None):
        """(items, local shapes, box counts), each of all ranks in mesh order."""
        if flats is not None:
            flats = (tl.Flat * count)(*[tl.Flat(*f) for f in flats])
        if window is not None:
            window = ctypes.byref(tl.Box.of(*window))
        n = self.dump.shard_dump(ctypes.byref(sharding), flats, window, self.items.ctypes.data, self.items.size,
                                 self.local.ctypes.data, self.boxes.ctypes.data)
        assert n >= 0, FAULTS.get(n, errno.errorcode.get(-n, n))
        shapes = [tuple(row[1:1 + row[0]]) for row in self.local[:count].tolist()]
        return self.items[:n], shapes, self.boxes[:count].tolist()

    def holders(self, sharding, window, replicas):
        n = self.dump.shard_holders(ctypes.byref(sharding), ctypes.byref(tl.Box.of(*window)), replicas,
                                    self.ranks.ctypes.data, self.ranks.size)
        assert n >= 0
        return self.ranks[:n].tolist()


@pytest.fixture(scope="module")
def dump(lib, build):
    return Dump(tl.load(lib), build)
