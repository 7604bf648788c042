# SPDX-License-Identifier: Apache-2.0
"""Loading what a rank holds, through the Python package, against reading the same bytes.

    tests/bench/run --only load [--gib 2] [--repeat 5]

The state is bf16 tensors of 4096 x 4096, random (stored raw) and gaussian (stored encoded). Destinations are resident
before each load, for vckpt and for the reference. Both sides use one thread for each core."""
import ctypes
import os
import pathlib
import shutil
import sys
import threading
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
STEP = 4 * MIB
CORES = len(os.sched_getaffinity(0))


def clock(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def drop_caches():
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def resident(size):
    """From a page on, for O_DIRECT."""
    memory = numpy.ones(size + 4096, "u1")
    begin = -memory.ctypes.data % 4096
    return memory[begin:begin + size]


def packs(store):
    return sorted((p for p in (store / "packs").rglob("*.pack")), key=lambda p: -p.stat().st_size)


def read_all(files, room, flags=0):
    """Every byte of the files, a thread a core, STEP at a time, one after another into memory."""
    jobs, at = [], 0
    descriptors = [os.open(p, os.O_RDONLY | flags) for p in files]
    for fd in descriptors:
        size = os.fstat(fd).st_size
        jobs += [(fd, offset, at + offset) for offset in range(0, size, STEP)]
        at += (size + 4095) // 4096 * 4096
    lock, view, todo = threading.Lock(), memoryview(room), iter(jobs)

    def work():
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                return
            fd, offset, place = job
            os.preadv(fd, [view[place:place + STEP]], offset)
    threads = [threading.Thread(target=work) for _ in range(CORES)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for fd in descriptors:
        os.close(fd)


class Model:
    """A store with one step of one component, and memory to load it into."""

    def __init__(self, bench, source):
        torch, self.vckpt = sys.modules["torch"], sys.modules["vckpt"]
        self.store = bench.store("load")
        bench.vckpt("import", self.store, "run", source, "-q", "--no-index")
        with self.vckpt.Step(f"{self.store}/run/0", "numpy") as step:
            self.state = {t.name: torch.ones(t.shape, dtype=torch.bfloat16) for t in step.tensors()}
        self.size = sum(t.numel() * 2 for t in self.state.values())
        self.files = packs(self.store)
        self.room = resident(sum((p.stat().st_size + 4095) // 4096 * 4096 for p in self.files) + STEP)
        self.source = source

    def load(self):
        self.vckpt.load(f"{self.store}/run/0", {"model": self.state})


def warm(bench, name, model, bar):
    ours, reads = [], []
    read_all(model.files, model.room)
    model.load()
    for _ in range(bench.o.repeat):
        ours.append(model.size / clock(model.load) / 1e6)
        reads.append(model.size / clock(read_all, model.files, model.room) / 1e6)
    bench.row(f"load, {name}, page cache", "pread of the packs into resident memory, as many threads", ours, reads, bar)


def decode(bench, model):
    """A load of encoded pieces, in the page cache, against decoding as many bytes that are in memory."""
    library = bench.build / "tests/libbench_decode.so"
    if not library.exists():
        return bench.skip("load, decoding", "needs a build with the tests' programs (-Dtests=enabled)")
    lib = ctypes.CDLL(library)
    lib.bench_decode_new.restype = ctypes.c_void_p
    lib.bench_decode_run.restype = ctypes.c_int64
    raw = numpy.concatenate([t.view(sys.modules["torch"].uint8).numpy().reshape(-1) for t in model.state.values()])
    encoded = lib.bench_decode_new(raw.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(raw.size), 2)
    out = resident(raw.size)

    def alone(lz4):
        took = lib.bench_decode_run(ctypes.c_void_p(encoded), out.ctypes.data_as(ctypes.c_void_p), lz4, CORES)
        assert took > 0, took
        return raw.size / took * 1e3
    assert encoded
    alone(False)
    assert numpy.array_equal(out, raw)
    read_all(model.files, model.room)
    ours, lz4, codec = [], [], []
    for _ in range(bench.o.repeat):
        ours.append(model.size / clock(model.load) / 1e6)
        lz4.append(alone(True))
        codec.append(alone(False))
    lib.bench_decode_free(ctypes.c_void_p(encoded))
    what = "load, gaussian bf16, decoding"
    bench.row(what, "LZ4 alone over as many bytes in memory, as many threads", ours, lz4, 0.7)
    bench.row(what, "LZ4 and putting bits into words, in memory", ours, codec, None)


def cold(bench, name, model, bar):
    if os.geteuid() != 0:
        return bench.skip(f"load, {name}, cold", "dropping caches needs root")
    ours, reads = [], []
    for _ in range(bench.o.repeat):
        drop_caches()
        ours.append(model.size / clock(model.load) / 1e6)
        spent = []
        for flags in (0, os.O_DIRECT):
            drop_caches()
            spent.append(clock(read_all, model.files, model.room, flags))
        reads.append(model.size / min(spent) / 1e6)
    bench.row(f"load, {name}, cold", "the faster of buffered and O_DIRECT reads of the packs, as many threads", ours,
              reads, bar)


def peers(bench, model):
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    state, folder = model.state, bench.dir / "dcp"

    def safetensors():
        for name, tensor in load_file(model.source).items():
            state[name].copy_(tensor)
    read_all(model.files, model.room)           # a cold load leaves the packs out of the page cache
    model.load()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    times = {"safetensors.torch.load_file and copy_": (safetensors, 1, []),
             "dcp.load of the same state": (lambda: dcp.load(state, checkpoint_id=folder, no_dist=True), 0.5, [])}
    spent = []
    for _ in range(bench.o.repeat):
        spent.append(clock(model.load))
        for act, _, found in times.values():
            found.append(clock(act))
    for what, (_, bar, found) in times.items():
        bench.row(f"load into torch against {what.split()[0]}", what, spent, found, bar, unit="s", higher=False)
    shutil.rmtree(folder)


def rows(bench):
    sys.path.insert(0, str(ROOT / "tools/python"))
    os.environ["VCKPT_LIBRARY"] = str(bench.build / "core/api/libvckpt.so")
    try:
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        return bench.skip("load", f"needs torch and safetensors ({error.name} is missing)")
    import vckpt  # noqa: F401
    for name, source, warm_bar in [("random bf16", bench.random_model(), 0.8),
                                   ("gaussian bf16", bench.gaussian_model(), None)]:
        model = Model(bench, source)
        warm(bench, name, model, warm_bar)
        cold(bench, name, model, 0.9 if warm_bar else None)
        if warm_bar:
            peers(bench, model)
        else:
            decode(bench, model)
        shutil.rmtree(model.store)
