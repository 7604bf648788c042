#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opening a step and finding what a load wants: steps of 1,024 and 8,192 writers, one of 100,000 tensors.

    tests/bench/run --only opening
    tests/bench/opening.py --build BUILD --dir DIR [--repeat 5] [--json FILE]

opening.c in this folder makes the steps and says what they are; each figure is a process of its own. Cold: before each,
the caches of the machine are dropped (as root), and the program reads another store once, so that not its own pages are
measured. Warm figures are the fastest of several runs: they measure the processor. Use a directory on a disk. The steps
are made in memory and copied, because sealing 16,384 packs one by one takes minutes on a disk.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPEN = """
import json, sys, time
import vckpt
def first():
    begin = time.perf_counter()
    with vckpt.open(sys.argv[1], "numpy") as step:
        opened = time.perf_counter()
        step["model/layers.050000.weight"][:]
        return 1e3 * (opened - begin), 1e3 * (time.perf_counter() - begin)
first()
print(json.dumps([first() for _ in range(int(sys.argv[2]))]))
"""


class Opening:
    def __init__(self, bench):
        self.bench, self.program = bench, bench.build / "tests/bench_opening"
        self.memory = pathlib.Path(tempfile.mkdtemp(prefix="vckpt-opening-", dir="/dev/shm"))

    def run(self, *args):
        done = subprocess.run([self.program, *map(str, args)], check=True, capture_output=True, text=True)
        return json.loads(done.stdout) if done.stdout else None

    def make(self, name, dp, tp, tensors):
        path = self.memory / name
        subprocess.run([self.bench.build / "tools/vckpt/vckpt", "init", path, "-q"], check=True)
        self.run("make", path, dp, tp, tensors)
        return path

    def on_disk(self, store):
        to = self.bench.dir / store.name
        shutil.copytree(store, to)
        shutil.rmtree(store)
        os.sync()
        return to

    def cold(self, *args):
        subprocess.run("echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)
        self.run(args[0], self.small, *args[2:])
        return self.run(*args)

    def repeated(self, what, *args, fastest=False):
        """The figures of the run whose total is the median; or the fastest of four times as many, where the processor
        is measured and others use it too."""
        done = [what(*args) for _ in range(self.bench.o.repeat * (4 if fastest else 1))]
        done.sort(key=lambda f: f.get("all_ms", sum(f.values())))
        return done[0 if fastest else len(done) // 2]

    def planning(self):
        store = self.make("plan", 32, 32, 1000)
        for dp, tp, whose, bar in ((64, 8, "4 writers have what it wants", 50), (32, 32, "saved so", None),
                                   (8, 8, "16 writers have what it wants", None)):
            f = self.repeated(self.run, "load", store, dp, tp, dp * tp // 2, 1000, fastest=True)
            name = f"planning of one rank's load, 1,000 tensors x 1,024 writers; {whose}"
            self.bench.figure(name, f["rows_ms"] + f["plan_ms"], "ms", bar)
            self.bench.notes[name] = f
        shutil.rmtree(store)

    def writers(self, dp, tp, bar):
        self.small = self.make(f"small-{dp}", dp, tp, 1)
        store, world = self.on_disk(self.make(f"writers-{dp}", dp, tp, 16)), dp * tp
        if os.geteuid() != 0:
            return self.bench.skip(f"{world:,} writers, cold", "dropping caches needs root")
        name = f"{world:,} writers: open the step and read one tensor's share of a rank, cold"
        f = self.repeated(self.cold, "load", store, dp, tp, world // 2, 1)
        self.bench.figure(name, f["all_ms"], "ms", bar)
        self.bench.notes[name] = [f, self.repeated(self.cold, "parts", store, world // 2)]
        name = f"{world:,} writers: open the step and read one whole tensor, cold"
        f = self.repeated(self.cold, "load", store, 1, 1, 0, 1)
        self.bench.figure(name, f["all_ms"], "ms")
        self.bench.notes[name] = f
        shutil.rmtree(store)
        return shutil.rmtree(self.small)

    def first_tensor(self):
        store = self.make("many", 1, 1, 100_000)
        done = subprocess.run([sys.executable, "-c", OPEN, store / "r/0", str(4 * self.bench.o.repeat)],
                              capture_output=True, text=True, check=False, env={**os.environ,
                              "PYTHONPATH": str(ROOT / "tools/python"),
                              "VCKPT_LIBRARY": str(self.bench.build / "core/api/libvckpt.so.0")})
        name = "first tensor of a 100,000-tensor step through vckpt.open, warm"
        if done.returncode:
            return self.bench.skip(name, done.stderr.strip().splitlines()[-1])
        times = json.loads(done.stdout)
        opened, both = min(times, key=lambda each: each[1])
        self.bench.figure(name, both, "ms", 50)
        self.bench.notes[name] = {"open_ms": opened, "median_ms": statistics.median(both for _, both in times)}
        return shutil.rmtree(store)


def rows(bench):
    o = Opening(bench)
    try:
        o.planning()
        o.writers(32, 32, 50)
        o.writers(128, 64, 300)
        o.first_tensor()
    finally:
        shutil.rmtree(o.memory)


class Alone:
    """What rows() needs of tests/bench/run."""

    def __init__(self, options):
        self.o, self.build, self.notes, self.rows = options, pathlib.Path(options.build).resolve(), {}, []
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="vckpt-opening-", dir=options.dir))

    def figure(self, name, value, unit, bar=None):
        self.rows.append({"what": name, "value": value, "unit": unit, "bar": bar,
                          "met": bar is None or value <= bar})
        print(f"{name}: {value:.4g} {unit}" + (f", bar {bar}: {'met' if value <= bar else 'MISSED'}" if bar else ""),
              flush=True)

    def skip(self, name, why):
        print(f"{name}: skipped: {why}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", help="a release build")
    parser.add_argument("--dir", help="on a disk")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    bench = Alone(parser.parse_args())
    try:
        rows(bench)
    finally:
        shutil.rmtree(bench.dir)
    print(json.dumps(bench.notes, indent=1))
    if bench.o.json:
        bench.o.json.write_text(json.dumps({"rows": bench.rows, "notes": bench.notes}, indent=1))


if __name__ == "__main__":
    main()
