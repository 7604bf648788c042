# SPDX-License-Identifier: Apache-2.0
"""What it costs to keep a store for years: copies, differences, packing anew, and questions about 10,000 steps.

    tests/bench/run --only upkeep [--gib 2] [--steps 10000] [--repeat 5]

Copies are compared with `cp -r` of the same store and a sync of what it wrote. What a copy reads of its source is
counted by strace: every byte that calls returned from files below it, records included. The steps of the questions are
made by aged.c: each has a manifest, and the 100 tensors of the first. restic has a snapshot of small files for every
tenth of them; each of its commands takes the time to derive a key."""
import importlib
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
TENSORS = 100
RANKS = 64
LOAD = """import sys, time, numpy, struct, json, vckpt
with open(sys.argv[2], "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
state = {name: numpy.ones(row["shape"], "u2") for name, row in header.items()}
begin = time.perf_counter()
vckpt.load(sys.argv[1], {"model": state})
print(time.perf_counter() - begin)"""
PACKAGE = str(pathlib.Path(__file__).resolve().parents[2] / "tools/python")
LARGE = 10_000                  # tensors of a step whose digests are compared
SAVES = 20                      # of a Saver, of which the mean is taken
READS = "pread64", "preadv", "preadv2", "read", "readv", "copy_file_range", "sendfile"
# (the file, how many bytes); sendfile names where to first
CALL = re.compile(rf"^(?:{'|'.join(READS)})\((?:\d+<[^>]*>, )?\d+<([^>]*)>.* = (\d+)$")


def timed(*words, ok=(0,), env=None):
    begin = time.perf_counter()
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env)
    spent = time.perf_counter() - begin
    if done.returncode not in ok:
        raise SystemExit(f"{words}: {done.stderr}")
    return spent


class Upkeep:
    def __init__(self, bench):
        self.bench, self.vckpt, self.repeat = bench, bench.vckpt_path, bench.o.repeat
        self.path = bench.dir / "upkeep"
        self.path.mkdir()

    def store(self, name="to"):
        shutil.rmtree(self.path / name, ignore_errors=True)
        self.bench.vckpt("init", self.path / name, "-q", "--no-reserve")
        return self.path / name

    def file(self, name, dtype, changed, tensors=TENSORS, items=None):
        """A model of random values, of which some tensors are not those that each file has. Returns its path."""
        word, item = {"BF16": ("BF16", 2), "F32": ("F32", 4)}[dtype]
        items = items or max(1, int(self.bench.o.gib * (1 << 30) / tensors / item) // 1024)

        def make(i, n):
            if i >= changed:
                seed = numpy.random.default_rng(i)
            else:
                seed = numpy.random.default_rng([i, 1])
            return seed.bytes(2 * n) if item == 2 else seed.standard_normal(n, dtype="f4").tobytes()
        return self.bench.safetensors(self.path / name, make, word, item, tensors, (1024 if items > 1 else 1, items))

    # ---- copies ----

    def copies(self):
        store, size = self.store("from"), 0
        for step, changed in enumerate([0, 1]):
            file = self.file("model.safetensors", "BF16", changed)
            size = file.stat().st_size
            self.bench.vckpt("import", store, f"r/{step}", file, "-q")
        os.sync()
        self.empty(store, size)
        self.but_a_hundredth(store, size)
        shutil.rmtree(store)

    def empty(self, store, size):
        ours, plain, one = [], [], self.store("one")
        self.bench.vckpt("copy", store, "r/0", "--to", one, "-q")       # with no second step in it
        for _ in range(self.repeat):
            to = self.store()
            os.sync()
            ours.append(size / timed(self.vckpt, "copy", one, "r/0", "--to", to, "-q") / 1e6)
            shutil.rmtree(to)
            os.sync()
            plain.append(size / timed("sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "sh", one, to) / 1e6)
        self.bench.row("copy of a step to an empty store", "cp -r of its store, and sync", ours, plain, 0.8)
        shutil.rmtree(one)
        shutil.rmtree(to)

    def but_a_hundredth(self, store, size):
        name = "copy of a step of which the other store has all but 1 %: bytes read of the source"
        if not shutil.which("strace"):
            return self.bench.skip(name, "strace is not installed, which counts them")
        to, traces = self.store(), self.path / "traces"                 # a file for each thread
        traces.mkdir()
        self.bench.vckpt("copy", store, "r/0", "--to", to, "-q")
        timed("strace", "-ff", "-y", "-o", traces / "t", "-e", f"trace={','.join(READS)}",
              self.vckpt, "copy", store, "r/1", "--to", to, "-q")
        lines = [line for file in traces.iterdir() for line in file.read_text().splitlines()]
        found = [m for m in map(CALL.match, lines) if m and m[1].startswith(f"{store.resolve()}/")]
        assert found, "no call on the source was seen"
        shutil.rmtree(traces)
        return self.bench.figure(name, sum(int(m[2]) for m in found) / size, "of the step", 0.015)

    # ---- differences ----

    def values(self):
        """Of two steps of float32, in which each value is another."""
        store, files = self.store("from"), []
        for step, changed in enumerate([0, TENSORS]):
            files.append(self.file(f"{step}.safetensors", "F32", changed))
            self.bench.vckpt("import", store, f"r/{step}", files[-1], "-q")
        size, ours, plain, measured = 2 * files[0].stat().st_size, [], [], []
        for _ in range(self.repeat):
            ours.append(size / timed(self.vckpt, "diff", store, "r/0", "r/1", "--values", ok=(1,)) / 1e6)
            plain.append(size / self.through_numpy(files, self.subtract) / 1e6)
            measured.append(size / self.through_numpy(files, self.measure) / 1e6)
        self.bench.row("diff --values of two steps, all changed", "reading both through numpy and subtracting", ours,
                       plain, 1.5)
        self.bench.row("diff --values of two steps, all changed: its numbers", "the same numbers by numpy", ours,
                       measured, None)
        self.repack(store, files[0])
        shutil.rmtree(store)
        for file in files:
            file.unlink()

    @staticmethod
    def through_numpy(files, function):
        begin = time.perf_counter()
        with open(files[0], "rb") as a, open(files[1], "rb") as b:
            header = json.loads(a.read(int.from_bytes(a.read(8), "little")))
            b.seek(a.tell())
            for row in header.values():
                count = (row["data_offsets"][1] - row["data_offsets"][0]) // 4
                function(numpy.fromfile(a, "f4", count), numpy.fromfile(b, "f4", count))
        return time.perf_counter() - begin

    @staticmethod
    def subtract(x, y):
        numpy.subtract(y, x, out=y)

    @staticmethod
    def measure(x, y):
        """What diff --values prints, of finite values; sums in doubles, as there."""
        d = numpy.subtract(y, x, dtype="f8")
        assert numpy.isfinite(d).all()          # else those that are not would be left out of the next three
        norm = math.sqrt(numpy.square(d).sum())
        return {"changed": numpy.count_nonzero(x.view("u4") != y.view("u4")), "max": numpy.abs(d).max(),
                "rms": norm / math.sqrt(d.size), "relative": norm / math.sqrt(numpy.square(x, dtype="f8").sum()),
                "nan": [numpy.isnan(v).sum() for v in (x, y)], "inf": [numpy.isinf(v).sum() for v in (x, y)]}

    def repack(self, store, file):
        name, size = "repack of a step", file.stat().st_size
        if subprocess.run([self.vckpt, "help", "repack"], capture_output=True).returncode:
            return self.bench.skip(name, "this vckpt has no command repack")
        ours, plain = [], []
        for n in range(self.repeat):
            step = f"r/{10 + n}"            # refers to all of r/0: nothing of it is whole yet
            self.bench.vckpt("import", store, step, file, "-q")
            os.sync()
            ours.append(size / timed(self.vckpt, "repack", store, step, "-q") / 1e6)
            to = self.store()
            os.sync()
            plain.append(size / timed(self.vckpt, "import", to, "r/0", file, "-q") / 1e6)
        return self.bench.row(name, "import of the same bytes", ours, plain, 0.8)

    # ---- a step of many ranks, cut anew ----

    def ranks(self):
        name, size = f"repack of a step of {RANKS} ranks", 0
        if not (self.bench.build / "tests/libvckpt_internal.so").exists():
            return self.bench.skip(name, "needs a build with the tests' programs (-Dtests=enabled)")
        file, ours, plain, reads = self.file("ranks.safetensors", "BF16", 0), [], [], []
        size = file.stat().st_size
        for _ in range(self.repeat):
            store, to = self.store("from"), self.store()
            self.save(store, file)
            reads.append(self.read(store, file))
            os.sync()
            ours.append(size / timed(self.vckpt, "repack", store, "r/0", "-q") / 1e6)
            reads.append(self.read(store, file))
            os.sync()
            plain.append(size / timed(self.vckpt, "import", to, "r/0", file, "-q") / 1e6)
        self.bench.row(name, "import of the same bytes", ours, plain, 0.8)
        for n, what in enumerate(["time", "packs that are opened", "calls that read packs"]):
            if reads[0][n]:
                self.bench.row(f"loading it afterwards: {what}", "before", [r[n] for r in reads[1::2]],
                               [r[n] for r in reads[::2]], 1 if n else None, unit="calls" if n else "s", higher=False)
        shutil.rmtree(store)
        return shutil.rmtree(to)

    def save(self, store, file):
        """Each rank has some rows of each tensor."""
        sys.path[:0] = [str(ROOT / "tools/python"), str(ROOT / "tests/unit")]
        saverlib = importlib.import_module("saverlib")
        api, data = saverlib.Vckpt(str(self.bench.build)), numpy.memmap(file, "u1", "r")
        header = json.loads(data[8:8 + int(data[:8].view("<u8")[0])].tobytes())
        base = 8 + int(data[:8].view("<u8")[0])

        def one(rank, saver):
            save, mesh = saver.begin(), api.mesh(f"dp={RANKS}")
            for tensor, row in header.items():
                first, end = row["data_offsets"]
                whole = data[base + first:base + end].view("u2").reshape(row["shape"])
                step = -(-len(whole) // RANKS)
                save.tensor(f"model/{tensor}", numpy.ascontiguousarray(whole[rank * step:(rank + 1) * step]),
                            shape=whole.shape, mesh=mesh, placements="S(0)")
            save.submit()
            save.committed(600_000)
            save.free()
        wrong = [e for e in saverlib.ranks(api, store, "r", RANKS, one, threads=1, ring=16 << 20) if e is not None]
        if wrong:
            raise wrong[0]

    def read(self, store, file):
        """(seconds, packs that are opened, calls that read packs) of a load of all of it by one process, from the
        disk."""
        os.sync()
        for path in store.glob("packs/*/*.pack"):
            with open(path, "rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        trace, calls, library = self.path / "calls", [0, 0], self.bench.build / "core/api/libvckpt.so"
        env = {**os.environ, "PYTHONPATH": str(ROOT / "tools/python"), "VCKPT_LIBRARY": str(library)}
        words = sys.executable, "-c", LOAD, store / "r/0", file
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env, check=True)
        if shutil.which("strace"):
            timed("strace", "-f", "-y", "-o", trace, "-e", f"trace=openat,openat2,{','.join(READS)}", *words, env=env)
            lines = [line for line in trace.read_text().splitlines() if ".pack" in line]
            calls = [sum(" openat" in line for line in lines), sum(" openat" not in line for line in lines)]
        return float(done.stdout), *calls

    def digests(self):
        """Of two steps with many tensors, of which one is changed: no piece is read."""
        store = self.store("from")
        for step in range(2):
            self.bench.vckpt("import", store, f"r/{step}", self.file("many.safetensors", "F32", step, LARGE, 1), "-q")
        times = [1e3 * timed(self.vckpt, "diff", store, "r/0", "r/1", ok=(1,)) for _ in range(self.repeat)]
        self.bench.figure(f"diff of two steps of {LARGE:,} tensors", statistics.median(times), "ms", 50)
        shutil.rmtree(store)

    # ---- questions ----

    def questions(self):
        if not (self.bench.build / "tests/bench_aged").exists():
            return self.bench.skip("questions about many steps", "this build has no tests/bench_aged (-Dtests=enabled)")
        steps, store = self.bench.o.steps, self.aged()
        reference = self.restic(max(2, steps // 10))
        for name, words, ok, bar in [
                ("diff", ["diff", store, "r/0", "r/latest"], (1,), None), ("log", ["log", store, "r"], (0,), 1000),
                ("find, no step has it", ["find", store, "tensor == layers.0001.weight and dtype == bf16"], (0,), 100),
                ("find, each step has it", ["find", store, "tensor == layers.0001.weight and dtype == f32"], (0,), 100),
                ("ls", ["ls", store, "r"], (0,), 1000), ("du", ["du", store, "r"], (0,), 3000),
                ("prune -n", ["prune", store, "r", "--keep-last", "100", "--keep-every", "50", "-n"], (0,), 1000)]:
            what = f"{name}, {steps:,} steps of {TENSORS} tensors"
            timed(self.vckpt, *words, ok=ok)                            # the index is brought up to date
            times = [1e3 * timed(self.vckpt, *words, ok=ok) for _ in range(self.repeat)]
            self.bench.figure(what, statistics.median(times), "ms", bar)
            command, theirs = reference.get(name, ("", []))
            if theirs:
                self.bench.row(f"{what}, against restic", command, times, theirs, None, unit="ms", higher=False)
            elif name in ("diff", "log", "prune -n"):
                self.bench.skip(f"{what}, against restic", "restic is not installed")
        self.keeping(store, steps)
        shutil.rmtree(store)

    def aged(self):
        steps, store = self.bench.o.steps, self.store("from")
        for step in 0, 10**9:
            file = self.file("small.safetensors", "F32", step and TENSORS, TENSORS, 1)
            self.bench.vckpt("import", store, f"r/{step}", file, "-q", "--set", "loss=1")
            if step == 0:
                self.bench.progress(f"{steps:,} steps are made")
                subprocess.run([self.bench.build / "tests/bench_aged", store, "r", str(steps), "0"], check=True)
        return store

    def keeping(self, store, steps):
        """Saves of a job that removes its oldest step after each, and of one that removes none."""
        kept, plain, step = [], [], 10**9
        env = {**os.environ, "VCKPT_BUILD": str(self.bench.build), "PYTHONPATH": PACKAGE}
        for n in range(2 * self.repeat):
            last = steps + 2 + (n // 2 + 1) * SAVES if n % 2 else 0     # what is visible before these saves
            self.bench.progress("saves with keep= and without", n, 2 * self.repeat)
            timed_ms = subprocess.run([sys.executable, __file__, f"{store}/r", str(step + 1), str(last)], env=env,
                                      check=True, stdout=subprocess.PIPE, text=True).stdout
            (kept if last else plain).append(float(timed_ms))
            step += SAVES
        self.bench.row(f"a save with keep=, {steps:,} steps kept", "without", kept, plain, None, unit="ms",
                       higher=False)

    def restic(self, snapshots):
        """{what: (command, [ms])}"""
        if not shutil.which("restic"):
            return {}
        repo, tree = self.path / "restic", self.path / "tree"
        env = {**os.environ, "RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(self.path / "cache")}
        timed("restic", "-q", "-r", repo, "init", env=env)
        tree.mkdir()
        for i in range(snapshots):
            (tree / str(i % TENSORS)).write_text(str(i))
            self.bench.progress("restic's snapshots are made", i, snapshots)
            timed("restic", "-q", "-r", repo, "backup", tree, env=env)
        listed = subprocess.run(["restic", "-r", repo, "snapshots", "--json"], capture_output=True, env=env, check=True)
        first, *_, last = (s["id"] for s in json.loads(listed.stdout))
        commands = {"diff": ["diff", first, last], "log": ["snapshots"],
                    "prune -n": ["forget", "--dry-run", "--keep-last", "100"]}
        return {what: (f"restic {words[0]}, {snapshots:,} snapshots",
                       [1e3 * timed("restic", "-r", repo, *words, env=env) for _ in range(self.repeat)])
                for what, words in commands.items()}


def saves(path, first, last):
    """In a process of its own: how many ms one of SAVES saves takes, with the removals after it."""
    import vckpt
    state = {"m": {"w": numpy.arange(1000, dtype="f4")}}
    with vckpt.Saver(path, pin="no", keep={"last": last} if last else None) as saver:
        begin = time.perf_counter()
        for step in range(first, first + SAVES):
            state["m"]["w"][0] = step % 1000
            saver.async_save(state, step=step).committed()
    print(1e3 * (time.perf_counter() - begin) / SAVES)                  # a Saver that is closed has removed them
    vckpt.close()


def rows(bench):
    upkeep = Upkeep(bench)
    try:
        upkeep.copies()
        upkeep.values()
        upkeep.ranks()
        upkeep.digests()
        upkeep.questions()
    finally:
        shutil.rmtree(upkeep.path, ignore_errors=True)


if __name__ == "__main__":
    saves(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
