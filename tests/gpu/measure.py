# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/run measures, a step each: `measure.py STEP` prints rows ("@row" and JSON), notes and reasons to skip.
The environment is run's. VCKPT_GPU_SMALL: a trial, with less of everything, on the CPU where torch has no device."""
import ctypes as c
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time

import numpy

from gatherlib import Gather
from gpulib import Gpu, Unavailable
from measure_nccl import nccl
from measure_torch import loads, loop
from measurelib import BUILD, GIB, MIB, SMALL, folder, median, noise, note, row, skip, timed
from saverlib import DEVICE, Vckpt

AUTO, NO, YES, ALLOCATE = range(4)
CORES = os.cpu_count()


# ---- saves, by the library alone ----

class Tensors:
    """So many bytes of random f32 tensors of 64 MiB in device memory."""
    SHAPE = (4096, MIB // 256)

    def __init__(self, gpu, nbytes):
        source, one = noise(2 * 64 * MIB), 64 * MIB
        self.arrays = []
        for i in range(max(1, nbytes // one)):
            address = gpu.alloc(one)
            gpu.upload(address, source[i * 4096:][:one])
            self.arrays.append(gpu.describe(address, "f4", self.SHAPE))
        self.nbytes = one * len(self.arrays)

    def to_host(self, gpu, stream, address):
        for i, array in enumerate(self.arrays):
            gpu.call("cuMemcpyDtoHAsync_v2", c.c_void_p(address + i * 64 * MIB), c.c_uint64(array.ctypes.data),
                     c.c_size_t(64 * MIB), stream)
        gpu.synchronize(stream)

    def to_host_at_once(self, gpu, address):
        for i, array in enumerate(self.arrays):
            gpu.call("cuMemcpyDtoH_v2", c.c_void_p(address + i * 64 * MIB), c.c_uint64(array.ctypes.data),
                     c.c_size_t(64 * MIB))


def save(saver, stream, tensors):
    """(seconds from submit to staged, until committed)"""
    made = saver.begin(stream=stream)
    for name, array in tensors.items():
        made.tensor(name, array, flags=DEVICE)
    begin = time.perf_counter()
    made.submit()
    made.staged(600000)
    staged = time.perf_counter() - begin
    made.committed(600000)
    whole = time.perf_counter() - begin
    made.free()
    return staged, whole


def faulted(nbytes):
    """An address of memory in huge pages, all of it there, and the seconds that took; CORES threads."""
    libc = c.CDLL(None, use_errno=True)
    libc.mmap.restype = c.c_void_p
    at = libc.mmap(None, c.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                   -1, c.c_long(0))
    libc.madvise(c.c_void_p(at), c.c_size_t(nbytes), 14)
    part = nbytes // CORES // 4096 * 4096

    def one(i):
        for step in range(0, part, 2 << 20):
            libc.madvise(c.c_void_p(at + i * part + step), c.c_size_t(min(2 << 20, part - step)), 23)
    threads = [threading.Thread(target=one, args=(i,)) for i in range(CORES)]
    begin = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return libc, at, time.perf_counter() - begin


def saves():
    gpu, api, where = Gpu(), Vckpt(BUILD), folder(memory=True)
    stream, t = gpu.stream(), Tensors(gpu, 4 * GIB)
    note(f"device {gpu.name}; {t.nbytes >> 20} MiB in tensors of {64 * MIB >> 20} MiB; store in memory")
    reference = references(gpu, t, stream)
    tensors = {f"model/{i}": array for i, array in enumerate(t.arrays)}
    store = api.store(where / "store")
    for ring, pin, threads in [(8, YES, 16), (8, YES, 4), (8, YES, 1), (8, ALLOCATE, 16)]:
        stalls(api, store, stream, tensors, (ring, pin, threads), reference)
    new_data(gpu, api, stream, where, reference)
    for size in (1, 8, 30):
        registering(gpu, t, stream, size, reference)
    for ring, pin, threads in [(1, YES, 16), (30, YES, 16), (8, ALLOCATE, 1)]:
        stalls(api, store, stream, tensors, (ring, pin, threads), reference)
    gpu.close()


def references(gpu, t, stream):
    """GB/s of plain copies; that of asynchronous ones into page-locked memory is what saves are compared with."""
    plain = numpy.ones(t.nbytes, "u1")
    pageable = t.nbytes / 1e9 / median(lambda: t.to_host_at_once(gpu, plain.ctypes.data), 2)
    gpu.call("cuMemHostRegister_v2", c.c_void_p(plain.ctypes.data), c.c_size_t(plain.nbytes), 1)
    reference = t.nbytes / 1e9 / median(lambda: t.to_host(gpu, stream, plain.ctypes.data), 5)
    at_once = t.nbytes / 1e9 / median(lambda: t.to_host_at_once(gpu, plain.ctypes.data), 2)
    gpu.unpin(plain)
    row("cuMemcpyDtoHAsync into registered memory", reference, "GB/s")
    row("cuMemcpyDtoH into registered memory", at_once, "GB/s")
    row("cuMemcpyDtoH into pageable memory", pageable, "GB/s")
    return reference


def stalls(api, store, stream, tensors, how, reference):
    ring, pin, threads = how
    saver = api.saver(store, "run", ring=ring * GIB, pin=pin, threads=threads)
    first, _ = save(saver, stream, tensors)
    found, wholes = zip(*[save(saver, stream, tensors) for _ in range(4)])
    saver.close()
    saver.free()
    nbytes = sum(array.nbytes for array in tensors.values())
    words = f"ring {ring} GiB, {threads} threads, {'allocated' if pin == ALLOCATE else 'registered'}"
    row(f"stall, {words}", nbytes / 1e9 / statistics.median(found), "GB/s", "DtoH", reference)
    row(f"  the first stall is longer by ({ring} GiB, {threads})", first - statistics.median(found), "s")
    row(f"  nothing changed, until committed ({ring} GiB, {threads})", nbytes / 1e9 / statistics.median(wholes), "GB/s")


def registering(gpu, t, stream, size, reference):
    nbytes, out = size * GIB, c.c_void_p()
    libc, at, fault = faulted(nbytes)
    longest, over = [], threading.Event()

    def launches():
        gpu.current()
        small = gpu.alloc(64)
        while not over.is_set():
            longest.append(timed(lambda: (gpu.call("cuMemcpyDtoDAsync_v2", c.c_uint64(small), c.c_uint64(
                small + 32), c.c_size_t(32), stream), gpu.synchronize(stream))))
    beside = threading.Thread(target=launches)
    beside.start()
    time.sleep(0.05)
    seconds = timed(gpu.call, "cuMemHostRegister_v2", c.c_void_p(at), c.c_size_t(nbytes), 1)
    over.set()
    beside.join()
    row(f"{size} GiB faulted in, {CORES} threads", fault, "s")
    row(f"{size} GiB registered (cuMemHostRegister)", seconds, "s")
    row(f"  the longest small launch beside it ({len(longest)})", max(longest) * 1e3, "ms")
    if size == 8:
        row("cuMemcpyDtoHAsync into registered memory, huge pages",
            t.nbytes / 1e9 / median(lambda: t.to_host(gpu, stream, at)), "GB/s", "DtoH", reference)
    row(f"{size} GiB unregistered", timed(gpu.call, "cuMemHostUnregister", c.c_void_p(at)), "s")
    libc.munmap(c.c_void_p(at), c.c_size_t(nbytes))
    row(f"{size} GiB allocated (cuMemHostAlloc)",
        timed(gpu.call, "cuMemHostAlloc", c.byref(out), c.c_size_t(nbytes), 1), "s")
    if size == 8:
        row("cuMemcpyDtoHAsync into memory of cuMemHostAlloc",
            t.nbytes / 1e9 / median(lambda: t.to_host(gpu, stream, out.value)), "GB/s", "DtoH", reference)
    row(f"{size} GiB freed (cuMemFreeHost)", timed(gpu.call, "cuMemFreeHost", out), "s")


def new_data(gpu, api, stream, where, reference):
    """Two sets that alternate, so that a save has only new data."""
    saver = api.saver(api.store(where / "new"), "run", ring=0, pin=YES, threads=CORES, flags=2)
    found = []
    for number in range(3):
        t = Tensors(gpu, 2 * GIB)
        for array in t.arrays:                      # other bytes in each piece
            gpu.upload(array.ctypes.data, noise(64 * MIB) ^ numpy.uint8(number + 1))
        found.append((t.nbytes, *save(saver, stream, {f"model/{i}": a for i, a in enumerate(t.arrays)})))
        for _ in t.arrays:
            gpu.call("cuMemFree_v2", gpu.memory.pop())
    saver.close()
    saver.free()
    row("new data, until committed, store in memory", found[-1][0] / 1e9 / found[-1][2], "GB/s", "DtoH", reference)


# ---- strides ----

class Copy2d(c.Structure):
    _fields_ = [(f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in (
        ("x_bytes", c.c_size_t), ("y", c.c_size_t), ("type", c.c_uint), ("host", c.c_void_p), ("device", c.c_uint64),
        ("array", c.c_void_p), ("pitch", c.c_size_t))] + [("width_bytes", c.c_size_t), ("height", c.c_size_t)]


def model_constants(gpu, bandwidth):
    """What a row and a call cost, in bytes of one long copy: FETCH_ROW_BYTES and FETCH_CALL_BYTES of
    core/device/fetch.c."""
    stream, pitch, rows, out = gpu.stream(), 16384, 1024 if SMALL else 16384, c.c_void_p()
    source = gpu.alloc(pitch * rows)
    gpu.call("cuMemHostAlloc", c.byref(out), c.c_size_t(pitch * rows), 1)

    def strided(width):
        copy = Copy2d(src_type=2, src_device=source, src_pitch=pitch, dst_type=1, dst_host=out.value, dst_pitch=width,
                      width_bytes=width, height=rows)
        for _ in range(4):
            gpu.call("cuMemcpy2DAsync_v2", c.byref(copy), stream)
        gpu.synchronize(stream)

    def calls(n):
        for i in range(n):
            gpu.call("cuMemcpyDtoHAsync_v2", c.c_void_p(out.value + i % 1000 * 64), c.c_uint64(source), c.c_size_t(64),
                     stream)
        gpu.synchronize(stream)
    for width in (4, 64, 256, 512, 1024, 4096):
        seconds = median(lambda: strided(width)) / 4 / rows
        row(f"a row of {width} bytes of a 2D copy costs as many bytes", seconds * bandwidth * 1e9, "bytes")
    row("a call of 64 bytes costs as many bytes (Python's own cost too)", median(lambda: calls(5000)) / 5000
        * bandwidth * 1e9, "bytes")
    gpu.call("cuMemFreeHost", out)


def model_says(lib, array):
    """(bytes of one long copy that it costs, is it reordered?), as core/device/fetch.c has it."""
    class Reorder(c.Structure):
        _fields_ = [("copy", Gather), ("reorder", Gather), ("bytes", c.c_uint64), ("cost", c.c_double)]
    g, reorder, strides, dims = Gather.of(array), Reorder(), (c.c_uint64 * 16)(), (c.c_uint32 * 2)()
    lib.device_gather_fold(c.byref(g))
    lib.device_fetch_reorders.restype, lib.device_fetch_dims.restype = c.c_bool, c.c_uint64
    lib.device_fetch_reorder(c.byref(g), c.byref(reorder))
    lib.device_gather_strides(c.byref(g), strides)
    rows = numpy.prod([float(n) for n in g.size[:g.ndim]])
    straight = rows * max(g.item_bytes, 128) + 65536.0 * lib.device_fetch_dims(c.byref(g), strides, dims)
    reordered = bool(lib.device_fetch_reorders(c.byref(g), c.c_uint64(2 << 20)))
    return (reorder.cost, True) if reordered else (straight, False)


VIEWS = {
    "contiguous": ((4096, 4096), "f4", lambda a: a),
    "transposed f32": ((4096, 4096), "f4", lambda a: a.T),
    "transposed bf16": ((8192, 4096), "u2", lambda a: a.T),
    "channels_last f32, 3 x 3": ((2048, 3, 3, 1024), "f4", lambda a: a.transpose(0, 3, 1, 2)),
    "permuted (2, 0, 3, 1)": ((64, 128, 32, 64), "f4", lambda a: a.transpose(2, 0, 3, 1)),
    "every second column": ((4096, 8192), "f4", lambda a: a[:, ::2]),
    "every second 64 bytes": ((4096, 128, 2, 16), "f4", lambda a: a[:, :, 0]),
    "columns, rows of 64 bytes": ((32768, 512), "f4", lambda a: a[:, :16]),
    "columns, rows of 1 KiB": ((32768, 512), "f4", lambda a: a[:, 128:384]),
    "columns, rows of 4 KiB": ((8192, 2048), "f4", lambda a: a[:, 512:1536]),
}


def strided():
    gpu, api, where = Gpu(), Vckpt(BUILD), folder(memory=True)
    lib = c.CDLL(str(BUILD / "tests/libvckpt_internal.so"))
    stream, store, copies, plain = gpu.stream(), api.store(where / "store"), 2 if SMALL else 8, {}
    for name, (shape, kind, view) in VIEWS.items():
        if SMALL:
            shape = (max(1, shape[0] // 32), *shape[1:])
        wholes = [gpu.array(noise(int(numpy.prod(shape)) * numpy.dtype(kind).itemsize // 8 * 8).view(kind)
                            .reshape(shape)) for _ in range(copies)]
        arrays = {f"model/{i}": view(one) for i, one in enumerate(wholes)}
        nbytes = sum(one.nbytes for one in arrays.values())
        cost, reordered = model_says(lib, next(iter(arrays.values())))
        for threads in (16, 1):
            saver = api.saver(store, f"run{len(name)}{name[0]}{threads}", ring=2 * GIB, pin=YES, threads=threads)
            stall = statistics.median([save(saver, stream, arrays)[0] for _ in range(4)][1:])
            saver.close()
            saver.free()
            rate = nbytes / 1e9 / stall
            plain.setdefault(threads, rate)
            row(f"{name}, {threads} threads", rate, "GB/s", "contiguous", plain[threads])
        row(f"  the model says ({'reordered' if reordered else 'straight'})", nbytes / copies / cost, "of contiguous")
        for _ in wholes:
            gpu.call("cuMemFree_v2", gpu.memory.pop())
    model_constants(gpu, plain[16])
    gpu.close()


# ---- under compute-sanitizer ----

def small():
    """A save and a load of a few tensors: what `sanitizer` watches."""
    from loadlib import Opened, described
    gpu, api, where = Gpu(), Vckpt(BUILD), folder(memory=True)
    store, data = api.store(where / "store"), numpy.random.default_rng(1).standard_normal((900, 700)).astype("f4")
    there, out, turned = gpu.array(data), gpu.array(numpy.zeros_like(data)), gpu.array(numpy.zeros_like(data))
    for pin in (YES, NO, ALLOCATE):
        saver = api.saver(store, "run", ring=0, pin=pin)
        save(saver, gpu.stream(), {"model/w": there, "model/t": there.T, "model/c": there[:, ::2]})
        saver.close()
        saver.free()
    with Opened(api, store) as step, step.load() as load:
        load.tensors(described("model/w", out, flags=DEVICE), described("model/t", turned.T, flags=DEVICE))
        load.run()
    host = gpu.pinned(data.nbytes)
    for array in (out, turned):
        gpu.to_host(None, host, array.ctypes.data, data.nbytes)
        gpu.synchronize()
        assert host.tobytes() == data.tobytes()
    gpu.unpin(host)
    gpu.close()
    print("well")


def sanitizer():
    tool = shutil.which("compute-sanitizer") or next(
        (str(path) for path in pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
    if not tool or "VCKPT_LIBCUDA" in os.environ:
        note("no compute-sanitizer for this device: the program alone")
        small()
        return
    done = subprocess.run([tool, "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "explicit",
                           sys.executable, __file__, "small"], capture_output=True, text=True, check=False)
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    print(done.stdout[-20000:], done.stderr[-5000:])
    note("; ".join(summary) or done.stdout[-300:])
    assert done.returncode == 0 and "well" in done.stdout and summary and "ERROR SUMMARY: 0 errors" in summary[-1]


def main():
    steps = {"saves": saves, "strided": strided, "loop": loop, "loads": loads, "small": small, "sanitizer": sanitizer,
             "nccl": nccl}
    try:
        steps[sys.argv[1]]()
    except Unavailable as e:
        skip(str(e))


if __name__ == "__main__":
    main()
