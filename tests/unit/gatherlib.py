# SPDX-License-Identifier: Apache-2.0
"""A box of a strided array, as core/device/gather.h describes it."""
import ctypes

DIMS = 16


class Gather(ctypes.Structure):
    _fields_ = [("from_", ctypes.c_void_p), ("item_bytes", ctypes.c_uint64), ("ndim", ctypes.c_uint32),
                ("size", ctypes.c_uint64 * DIMS), ("stride", ctypes.c_int64 * DIMS)]

    @classmethod
    def of(cls, array):
        g = cls(array.__array_interface__["data"][0], array.itemsize, array.ndim)
        g.size[:array.ndim] = array.shape
        g.stride[:array.ndim] = array.strides
        return g
