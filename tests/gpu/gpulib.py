# SPDX-License-Identifier: Apache-2.0
"""A CUDA device through the driver's API alone: memory, streams, contexts, work that comes late. Needs libcuda.so.1 and
numpy.

Arrays of device memory are described by numpy's, whose addresses are the device's: shapes and strides are right,
reading one is fatal."""
import ctypes as c
import os
import time

import numpy


class Unavailable(Exception):
    pass


class Gpu:
    def __init__(self, ordinal=0):
        try:
            self.lib = c.CDLL(os.environ.get("VCKPT_LIBCUDA") or "libcuda.so.1")
        except OSError as e:
            raise Unavailable(f"no CUDA driver: {e}") from e
        rc, n = self.lib.cuInit(0), c.c_int()
        if rc or self.lib.cuDeviceGetCount(c.byref(n)) or n.value == 0:
            raise Unavailable(f"the CUDA driver finds no device (cuInit answers {rc})")
        self.device, self.context, name = c.c_int(), c.c_void_p(), c.create_string_buffer(200)
        self.call("cuDeviceGet", c.byref(self.device), ordinal)
        self.call("cuDeviceGetName", name, 200, self.device)
        self.call("cuDevicePrimaryCtxRetain", c.byref(self.context), self.device)
        self.name, self.memory, self.kept, self.streams = name.value.decode(), [], [], []
        self.current()

    def call(self, name, *args):
        rc = getattr(self.lib, name)(*args)
        if rc:
            word = c.c_char_p()
            self.lib.cuGetErrorName(rc, c.byref(word))
            raise RuntimeError(f"{name}: {(word.value or b'?').decode()} ({rc})")

    def current(self, context=None):
        """Of this thread."""
        self.call("cuCtxSetCurrent", context or self.context)

    def new_context(self):
        """Another one, current."""
        context = c.c_void_p()
        self.call("cuCtxCreate_v2", c.byref(context), 0, self.device)
        return context

    def alloc(self, nbytes):
        p = c.c_uint64()
        self.call("cuMemAlloc_v2", c.byref(p), c.c_size_t(max(1, nbytes)))
        self.memory.append(p)
        return p.value

    def describe(self, address, dtype, shape, strides=None):
        """Strides not negative."""
        dtype = numpy.dtype(dtype)
        if 0 in shape:
            return numpy.empty(shape, dtype)
        last = (sum((n - 1) * s for n, s in zip(shape, strides)) + dtype.itemsize if strides
                else int(numpy.prod(shape)) * dtype.itemsize)
        raw = numpy.frombuffer((c.c_ubyte * last).from_address(address), "u1")
        return numpy.ndarray(shape, dtype, raw, 0, strides)

    def array(self, data):
        """The same in device memory, row-major."""
        data = numpy.ascontiguousarray(data)
        address = self.alloc(data.nbytes)
        self.upload(address, data)
        return self.describe(address, data.dtype, data.shape)

    def upload(self, address, data):
        self.call("cuMemcpyHtoD_v2", c.c_uint64(address), c.c_void_p(data.ctypes.data), c.c_size_t(data.nbytes))

    def stream(self):
        s = c.c_void_p()
        self.call("cuStreamCreate", c.byref(s), 1)
        self.streams.append(s)
        return s

    def write_later(self, stream, array, data, seconds=0, wait=None):
        """On the stream: nothing for so long, or while `wait` has not returned, then `data` into the array
        (row-major)."""
        data = numpy.ascontiguousarray(data)
        assert data.nbytes == array.nbytes
        source = self.alloc(data.nbytes)
        self.upload(source, data)
        if seconds or wait:
            first = c.CFUNCTYPE(None, c.c_void_p)(lambda _: wait() if wait else time.sleep(seconds))
            self.kept.append(first)
            self.call("cuLaunchHostFunc", stream, first, None)
        self.call("cuMemcpyDtoDAsync_v2", c.c_uint64(array.ctypes.data), c.c_uint64(source), c.c_size_t(data.nbytes),
                  stream)

    def synchronize(self, stream=None):
        self.call("cuStreamSynchronize", stream)

    def pinned(self, nbytes):
        host = numpy.ones(nbytes, "u1")
        self.call("cuMemHostRegister_v2", c.c_void_p(host.ctypes.data), c.c_size_t(nbytes), 1)
        return host

    def unpin(self, host):
        self.call("cuMemHostUnregister", c.c_void_p(host.ctypes.data))

    def to_host(self, stream, host, address, nbytes):
        self.call("cuMemcpyDtoHAsync_v2", c.c_void_p(host.ctypes.data), c.c_uint64(address), c.c_size_t(nbytes), stream)

    def close(self):
        """Frees all memory and streams; the context stays for the next."""
        self.current()
        for s in self.streams:
            self.synchronize(s)
            self.call("cuStreamDestroy_v2", s)
        for p in self.memory:
            self.call("cuMemFree_v2", p)
        self.streams, self.memory, self.kept = [], [], []
