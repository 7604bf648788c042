# SPDX-License-Identifier: Apache-2.0
"""vckpt.h through ctypes: savers whose ranks are threads of this process, and numpy arrays as their shards."""
import ctypes as c
import errno
import os
import threading

import numpy
import pytest

from vckpt._lib import (  # noqa: F401 (for tests)
    Attribute,
    Committed,
    ErrorText as Error,
    Phase,
    Progress,
    SaveOptions,
    SaverOptions,
    TensorInfo,
    Timings,
)

NONE = 2**64 - 1
DEVICE, BUFFER, BOXES, ALONE = 1, 2, 4, 8
DTYPES = {"bool": 1, "uint8": 2, "uint16": 3, "uint32": 4, "uint64": 5, "int8": 6, "int16": 7, "int32": 8, "int64": 9,
          "float16": 10,
          "float32": 12, "float64": 13, "complex64": 14, "complex128": 15}
PHASES = ["plan", "room", "copy", "digest", "encode", "write", "seal", "wait", "commit"]


class Tensor(c.Structure):
    _fields_ = [("component", c.c_char_p), ("name", c.c_char_p), ("shape", c.POINTER(c.c_uint64)), ("mesh", c.c_void_p),
                ("placements", c.c_char_p), ("flat", c.POINTER(c.c_uint64)), ("boxes", c.POINTER(c.c_uint64)),
                ("same_dims", c.c_char_p),
                ("data", c.c_void_p), ("strides", c.POINTER(c.c_int64)), ("local_shape", c.POINTER(c.c_uint64)),
                ("ndim", c.c_uint32),
                ("local_ndim", c.c_uint32), ("dtype", c.c_uint32), ("flags", c.c_uint32), ("nboxes", c.c_uint32),
                ("reserved", c.c_uint32)]


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(f"{errno.errorcode.get(-code, code)}: {text}")
        self.code, self.text = code, text


def numbers(kind, values):
    return (kind * max(1, len(values)))(*values) if values is not None else None


class Vckpt:
    """The library, with errors as exceptions."""

    def __init__(self, build, library="core/api/libvckpt.so"):
        self.lib = c.CDLL(os.path.join(build, library))
        self.lib.vckpt_step_find.restype = c.c_int64
        self.lib.vckpt_step_number.restype = c.c_uint64

    def call(self, name, *args):
        err = Error()
        r = getattr(self.lib, name)(*args, c.byref(err))
        if r < 0:
            assert err.text and err.code == r, (name, r, err.code, err.text)
            raise Failed(r, err.text.decode())
        return r

    def store(self, path):
        self.call("vckpt_store_init", str(path).encode())
        return str(path)

    def mesh(self, text, ranks=None):
        p = c.c_void_p()
        self.call("vckpt_mesh_new", text.encode(), numbers(c.c_uint32, ranks), len(ranks or ()), c.byref(p))
        return p

    def saver(self, store, run, **options):
        return Saver(self, store, run, **options)

    def read(self, store, run, step=NONE):
        """{component/name: array}, and the blobs' number."""
        p, out = c.c_void_p(), {}
        self.call("vckpt_step_open", str(store).encode(), run.encode(), c.c_uint64(step), c.byref(p))
        names = {v: k for k, v in DTYPES.items()}
        for i in range(self.lib.vckpt_step_tensor_count(p)):
            info = TensorInfo()
            assert self.lib.vckpt_step_tensor(p, i, c.byref(info)) == 0
            array = numpy.empty(info.shape[:info.ndim], names[info.dtype])
            self.call("vckpt_step_read", p, i, None, array.ctypes.data_as(c.c_void_p), None)
            out[f"{info.component.decode()}/{c.string_at(info.name, info.name_len).decode()}"] = array
        self.lib.vckpt_step_close(p)
        return out


# A ring that holds a band. The saver's own choice has 64 MiB at least, which takes longer to clear than a small save.
SMALL_RING = 12 << 20


class Saver:
    """ring: 0 for the saver's own choice."""

    def __init__(self, api, store, run, rank=0, world=1, launch=None, mesh=None, heartbeat_ms=0, start_ms=0,
                 ring=SMALL_RING, pin=0, check=0, threads=2, flags=0, deadline_ms=0):
        self.api, self.lib, self.p = api, api.lib, c.c_void_p()
        options = SaverOptions(c.sizeof(SaverOptions), str(store).encode(), run.encode(),
                               launch.encode() if launch else None, rank, world, mesh,
                               heartbeat_ms, start_ms, deadline_ms, ring, pin, check, threads, flags)
        self.world, self.next_step = world, 0 if world == 1 else self.after_the_newest(store, run)
        api.call("vckpt_saver_open", c.byref(options), c.byref(self.p))

    def after_the_newest(self, store, run):
        """Where a trainer of several ranks would go on: they all say which step they save."""
        steps, n = c.POINTER(c.c_uint64)(), c.c_size_t()
        self.lib.vckpt_run_steps(str(store).encode(), run.encode(), c.byref(steps), c.byref(n), None)
        return steps[n.value - 1] + 1 if n.value else 0

    def begin(self, step=None, replace=False, attributes=(), bases=(), stream=None):
        if step is None:
            step = NONE if self.world == 1 else self.next_step
        self.next_step = step + 1 if step < 1 << 44 else self.next_step + 1
        return Save(self, step, replace, dict(attributes), list(bases), stream)

    def save(self, tensors, blobs=(), commons=(), **options):
        """tensors: {component/name: array or (array, dict of fields)}"""
        save = self.begin(**options)
        try:
            for name, value in tensors.items():
                array, fields = value if isinstance(value, tuple) else (value, {})
                save.tensor(name, array, **fields)
            for name, per_rank, data in blobs:
                save.blob(name, per_rank, data)
            for group, name, data in commons:
                save.common(group, name, data)
            save.submit()
        except Failed:
            save.free()  # begun and never submitted it would hold all later ones back
            raise
        return save

    def close(self):
        self.api.call("vckpt_saver_close", self.p)

    def free(self):
        if self.p:
            self.lib.vckpt_saver_free(self.p)
        self.p = c.c_void_p()


class Save:
    def __init__(self, saver, step, replace, attributes, bases, stream):
        self.api, self.lib, self.p, self.keep = saver.api, saver.lib, c.c_void_p(), []
        pairs = (Attribute * max(1, len(attributes)))(*[Attribute(k.encode(), v.encode())
                                                        for k, v in attributes.items()])
        names = (c.c_char_p * max(1, len(bases)))(*[b.encode() for b in bases])
        options = SaveOptions(c.sizeof(SaveOptions), step, pairs, len(attributes), names, len(bases), stream,
                              int(replace), 0)
        self.api.call("vckpt_save_begin", saver.p, c.byref(options), c.byref(self.p))

    def tensor(self, name, array, shape=None, placements=None, mesh=None, flat=None, boxes=None, same_dims=None,
               flags=0, dtype=None, check_local=True, strides=True):
        component, name = name.split("/", 1)
        shape = list(array.shape if shape is None else shape)
        plain = flat is None and boxes is None
        if boxes is not None:
            flags |= BOXES
        t = Tensor(component.encode(), name.encode(), numbers(c.c_uint64, shape), mesh,
                   placements.encode() if placements else None,
                   numbers(c.c_uint64, flat), numbers(c.c_uint64, [n for b in boxes or () for pair in b for n in pair])
                   if boxes is not None else None,
                   same_dims.encode() if same_dims else None, array.ctypes.data if array.size else None,
                   numbers(c.c_int64, array.strides)
                   if array.size and strides and (plain or not array.flags.c_contiguous) else None,
                   numbers(c.c_uint64, array.shape) if plain and check_local else None, len(shape), array.ndim,
                   dtype or DTYPES[array.dtype.name], flags, len(boxes or ()), 0)
        self.keep.append((array, t))
        self.api.call("vckpt_save_tensors", self.p, c.byref(t), c.c_size_t(1))

    def blob(self, name, per_rank, data):
        self.api.call("vckpt_save_blob", self.p, name.encode(), int(per_rank), data, c.c_size_t(len(data)))

    def common(self, group, name, data):
        self.api.call("vckpt_save_common", self.p, group.encode(), name.encode(), data, c.c_size_t(len(data)))

    def submit(self):
        self.api.call("vckpt_save_submit", self.p)

    def staged(self, timeout_ms=60000):
        self.api.call("vckpt_save_wait_staged", self.p, c.c_int64(timeout_ms))

    def committed(self, timeout_ms=60000):
        done = Committed()
        self.api.call("vckpt_save_wait_committed", self.p, c.c_int64(timeout_ms), c.byref(done))
        return done.step

    def timings(self):
        t = Timings(c.sizeof(Timings))
        assert self.lib.vckpt_save_timings(self.p, c.byref(t)) == 0
        return t

    def progress(self):
        p = Progress(c.sizeof(Progress))
        assert self.lib.vckpt_save_progress(self.p, c.byref(p)) == 0
        return p

    def free(self):
        self.lib.vckpt_save_free(self.p)
        self.p = c.c_void_p()

    def give_up(self, reason):
        self.lib.vckpt_save_give_up(self.p, reason.encode())
        self.p = c.c_void_p()


def bounded(seconds, work):
    """work() in a thread, which has to end."""
    out = []

    def one():
        try:
            out.append((work(),))
        except Failed as e:
            out.append((e,))
    thread = threading.Thread(target=one, daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"not over after {seconds} s"
    return out[0][0]


def ranks(api, store, run, world, work, launch="a launch", **options):
    """work(rank, saver) in a thread each; what it returns or raises, by rank. The savers are closed and freed."""
    out = [None] * world

    def one(rank):
        saver = None
        try:
            saver = api.saver(store, run, rank=rank, world=world, launch=launch, **options)
            out[rank] = work(rank, saver)
            saver.close()
        except Exception as e:  # noqa: BLE001 a test looks at it
            out[rank] = e
        finally:
            if saver:
                saver.free()

    threads = [threading.Thread(target=one, args=(r,)) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


# ---- fixtures, imported by the tests ----

@pytest.fixture
def api(build):
    return Vckpt(build)


@pytest.fixture
def store(api, tmp_path, vckpt):
    """An empty store; what a test leaves in it must verify."""
    path = api.store(tmp_path / "store")
    yield path
    done = vckpt("verify", path, check=False)
    assert done.returncode == 0, done.stdout
