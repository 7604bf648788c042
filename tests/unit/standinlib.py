# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the CUDA driver (tests/standin/standin.h) as the program under test finds it: `standin(build)` puts
its path into VCKPT_LIBCUDA and gives an object whose methods are those of the header without their prefix."""
import ctypes
import os

FAULTS = ("premature", "reused", "touched", "context", "destroyed", "foreign", "captured")
NOW = ("streams", "events", "registrations", "allocations", "primaries")


class Standin:
    def __init__(self, path):
        os.environ["VCKPT_LIBCUDA"] = str(path)
        self.lib = lib = ctypes.CDLL(str(path))
        for name in ("standin_context_new", "standin_memory_new", "standin_memory_on"):
            getattr(lib, name).restype = ctypes.c_void_p
        for name in ("standin_count", "standin_faults"):
            getattr(lib, name).restype = ctypes.c_uint64

    def reset(self, delay_us=300, seed=1):
        self.lib.standin_reset()
        self.lib.standin_delay(delay_us, ctypes.c_uint64(seed))

    def context(self):
        """A new one, made current."""
        c = self.lib.standin_context_new()
        self.set(c)
        return c

    def set(self, context):
        self.lib.standin_context_set(ctypes.c_void_p(context))

    def depth(self):
        return self.lib.standin_context_depth()

    def memory(self, data):
        """The address of device memory that holds these bytes; or, of a number, so many zeros."""
        if isinstance(data, int):
            return self.lib.standin_memory_new(ctypes.c_size_t(data))
        p = self.lib.standin_memory_new(ctypes.c_size_t(len(data)))
        ctypes.memmove(p, data, len(data))
        return p

    def stream(self, nonblocking=False):
        """One of the program's own."""
        s = ctypes.c_void_p()
        assert self.lib.cuStreamCreate(ctypes.byref(s), int(nonblocking)) == 0
        return s.value

    def write(self, stream, to, data, delay_us=0):
        assert self.lib.standin_write(ctypes.c_void_p(stream), ctypes.c_void_p(to), data, ctypes.c_size_t(len(data)),
                                      delay_us) == 0

    def synchronize(self, stream):
        return self.lib.cuStreamSynchronize(ctypes.c_void_p(stream))

    def count(self, what):
        n = self.lib.standin_count(what.encode())
        assert n != (1 << 64) - 1, what
        return n

    def faults(self):
        return {what: n for what in FAULTS if (n := self.count(what))}

    def held(self):
        return {what: n for what in NOW if (n := self.count(what))}

    def busy(self, at, nbytes):
        return bool(self.lib.standin_busy(ctypes.c_void_p(at), ctypes.c_size_t(nbytes)))

    def fail(self, function, nth=1, code=2):
        self.lib.standin_fail(function.encode(), nth, code)

    def forget(self, function):
        self.lib.standin_forget(function.encode())

    def slow(self, function, us):
        self.lib.standin_slow(function.encode(), us)

    def devices(self, n):
        self.lib.standin_devices(n)


def standin(build):
    return Standin(build / "tests" / "standin" / "libcuda.so.1")
