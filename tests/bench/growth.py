# SPDX-License-Identifier: Apache-2.0
"""How costs grow: with the age of a run, with its tensors, with the writers of a step, with the runs of a store. Each
curve is a table n -> value and its exponent, the slope of log(value) over log(n): 0 is flat, 1 linear; and that
between the last two n, where a constant hides the growth less.

    tests/bench/run --only growth [--long] [--json FILE]

Times are CPU time of a process, calls and bytes are counted: what else runs on the machine matters little. aged.c
makes a run old. Calls are those on files of the store, as tests/crash/interpose.c sees them, in a run of their own,
because counting takes time. Bytes read are those that read calls returned to the process. All is in /dev/shm, unless
--dir names a place."""
import collections
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
AGES, OLD = (10, 100, 1_000, 10_000), 100_000       # OLD: with --long
KEPT = 5
MODEL, NEWEST = 0, 10**9                            # steps that are really saved; those of aged.c are between
SAVES = 64                                          # a mean over so many has one snapshot of the list in it
AGED = "Saver open", "early save", "small save", "latest", "load of the newest"
TENSORS = 10, 100, 1_000, 10_000, 100_000
WRITERS = (1, 1), (4, 1), (8, 4), (16, 16), (32, 32)
RUNS = 1, 10, 100
PACK_OPENS = "open .pack", "openat2 .pack"
PACK_READS = "pread .pack", "preadv .pack"
SYNCS = "fsync", "fsync .pack", "fdatasync", "syncfs"


# ---- in a process of its own: what is measured, and what it called ----

class Meter:
    """CPU, bytes and calls of what a child does. calls: the file that interpose.c writes, or None."""

    def __init__(self, calls):
        self.calls = open(calls) if calls else None
        self.measured = {}

    @staticmethod
    def bytes_read():
        return int(next(line for line in pathlib.Path("/proc/self/io").read_text().splitlines()
                        if line.startswith("rchar")).split()[1])

    def called(self):
        """By name, and whether on a pack."""
        return collections.Counter(line.split(" ")[0] + " .pack" * line.endswith(".pack\n")
                                   for line in self.calls or ())

    def measure(self, what, function, repeat=1, mean=1, after=lambda result: None):
        """The median of `repeat` measures, each of which calls the function `mean` times: of one call."""
        done = []
        for _ in range(repeat):
            self.called()
            read, begun = self.bytes_read(), time.process_time()
            for _ in range(mean):
                result = function()
            spent = time.process_time() - begun
            read, called = self.bytes_read() - read, self.called()
            after(result)
            done.append({"CPU": 1e3 * spent / mean, "bytes": read / mean, "calls": called.total() / mean,
                         **{key: sum(called[name] for name in names) / mean for key, names in
                            (("pack opens", PACK_OPENS), ("pack reads", PACK_READS), ("syncs", SYNCS))}})
        self.measured[what] = {key: statistics.median(each[key] for each in done) for key in done[0]}


def saved(vckpt, path):
    """The newest steps of a run: what is loaded, and what a save refers to."""
    state = {"m": {"w": numpy.arange(1000, dtype="f4")}, "n": 3}
    with vckpt.Saver(path, pin="no") as saver:
        for step in NEWEST, NEWEST + 1:
            state["m"]["w"][0] = step % 1000                        # a float32 has no 1,000,000,001
            saver.async_save(state, step=step).committed()
    return state


def child_begin(vckpt, meter, path):
    """A store, and a run whose one step is the model of those of aged.c."""
    vckpt.save(path, {"m": {"w": numpy.arange(1000, dtype="f4")}, "n": 3}, step=MODEL, rank=0, world=1, pin="no")


def child_make(vckpt, meter, path):
    """After those of aged.c, as a training makes them: a run whose newest step is an old entry reads all that is
    visible."""
    saved(vckpt, path)


def child_age(vckpt, meter, path):
    state, step = {"m": {"w": numpy.arange(1000, dtype="f4")}, "n": 3}, vckpt.latest(path) + 1
    meter.measure("latest", lambda: vckpt.latest(path), 9)
    meter.measure("load of the newest", lambda: vckpt.load(path, state), 5)
    meter.measure("Saver open", lambda: vckpt.Saver(path, pin="no"), 3, after=vckpt.Saver.close)

    def save():
        nonlocal step
        step += 1
        state["m"]["w"][0] = step % 1000
        saver.async_save(state, step=step).committed()
    with vckpt.Saver(path, pin="no") as saver:
        meter.measure("first save of a Saver", save)
        meter.measure("early save", save, mean=SAVES)               # with the first snapshot that the Saver makes
        before = files_of(pathlib.Path(path).parent)
        meter.measure("small save", save, mean=SAVES)
        after = files_of(pathlib.Path(path).parent)
    meter.measured["files"] = (after - before) / SAVES


def child_tensors(vckpt, meter, path, count):
    state = {"m": {f"layers.{i // 10}.block.{i % 10}.weight": numpy.full((4, 4), i, "f4") for i in range(int(count))}}
    repeat = 3 if int(count) < 100_000 else 1
    with vckpt.Saver(path, pin="no") as saver:
        meter.measure("first save", lambda: saver.async_save(state).committed())
        meter.measure("later save", lambda: saver.async_save(state).committed(), repeat)
    meter.measure("load", lambda: vckpt.load(path, state), repeat)


def child_each(vckpt, meter, path):
    """Tensor by tensor, as a program reads that wants some."""
    def each():
        with vckpt.open(path, framework="numpy") as step:
            for name in step:
                step[name][...]
    meter.measure("each tensor", each)


def child():
    kind, calls, *arguments = sys.argv[1:]
    import vckpt
    meter = Meter(calls or None)
    globals()["child_" + kind](vckpt, meter, *arguments)
    vckpt.close()
    print(json.dumps(meter.measured))


# ---- curves ----

def files_of(path):
    return sum(len(files) for _, _, files in os.walk(path))


def disk_of(path):
    """Bytes of its files, as the disk gives them away: of several names of a file once, and of the directory."""
    files = {each.stat().st_ino: each.stat() for each in [path, *path.iterdir()] if each.is_file() or each == path}
    return sum(each.st_blocks * 512 for each in files.values())


def exponent(curve):
    """Of value over n; None where there is none."""
    pairs = [(math.log(n), math.log(value)) for n, value in curve.items() if value > 0]
    if len(pairs) < 2:
        return None
    x, y = zip(*pairs)
    return statistics.linear_regression(x, y).slope


class Growth:
    def __init__(self, bench):
        self.bench, self.curves = bench, {}
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="vckpt-growth-", dir=bench.o.dir or "/dev/shm")).resolve()

    def store(self, name="s"):
        shutil.rmtree(self.path / name, ignore_errors=True)
        self.bench.vckpt("init", self.path / name, "-q")
        return self.path / name

    def environment(self, calls, store):
        env = {**os.environ, "VCKPT_BUILD": str(self.bench.build), "PYTHONPATH": str(ROOT / "tools/python")}
        if calls:
            calls.write_text("")
            env |= {"LD_PRELOAD": str(self.bench.build / "tests/libinterpose.so"),
                    "VCKPT_INTERPOSE": f"root={store},reads=1,list={calls}"}
        return env

    def child(self, kind, store, *arguments, count=False):
        calls = self.path / "calls" if count else None
        done = subprocess.run([sys.executable, __file__, kind, str(calls or ""), *map(str, arguments)], check=True,
                              stdout=subprocess.PIPE, text=True, env=self.environment(calls, store))
        return json.loads(done.stdout)

    def commanded(self, store, *arguments):
        """How many calls a command makes."""
        calls = self.path / "calls"
        subprocess.run([self.bench.vckpt_path, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL,
                       env=self.environment(calls, store))
        return len(calls.read_text().splitlines())

    def put(self, what, unit, n, value):
        self.curves.setdefault((what, unit), {})[n] = value

    def age(self, steps, keep):
        """A run of so many steps, of which 0 (all) or `keep` were kept at a time, before and after a collection."""
        store, kind = self.store(), "" if not keep else f"{keep} steps kept: "
        self.child("begin", store, store / "r")
        subprocess.run([self.bench.build / "tests/bench_aged", store, "r", str(steps), str(keep)], check=True)
        self.child("make", store, store / "r")
        self.aged(kind, store, steps)
        for _ in range(2):                                          # the first one leaves manifests of before it
            self.bench.vckpt("gc", store, "--grace", "0", "-q")
        self.aged(f"{kind}after gc: ", store, steps)

    def aged(self, kind, store, steps):
        disk, entries = disk_of(store / "runs/r"), files_of(store / "runs/r")
        timed = self.child("age", store, store / "r")
        counted = self.child("age", store, store / "r", count=True)
        for what in AGED:
            self.put(f"{kind}{what}, CPU", "ms", steps, timed[what]["CPU"])
            self.put(f"{kind}{what}, bytes read", "KiB", steps, timed[what]["bytes"] / 1024)
            self.put(f"{kind}{what}, calls", "", steps, counted[what]["calls"])
        self.put(f"{kind}small save, fsyncs", "", steps, counted["small save"]["syncs"])
        self.put(f"{kind}small save, files added", "", steps, counted["files"])
        self.put(f"{kind}list on disk", "bytes a step", steps, disk / steps)
        self.put(f"{kind}list, files", "a step", steps, entries / steps)

    def tensors(self, count):
        store = self.store()
        for what, cost in self.child("tensors", store, store / "r", count).items():
            self.put(f"{what}, CPU", "ms", count, cost["CPU"])

    def writers(self, dp, tp):
        store, world, tensors = self.store(), dp * tp, 16
        subprocess.run([self.bench.build / "tests/bench_opening", "make", store, str(dp), str(tp), str(tensors)],
                       check=True)
        timed = self.child("each", store, store / "r/0")["each tensor"]
        counted = self.child("each", store, store / "r/0", count=True)["each tensor"]
        self.put("read tensor by tensor, CPU", "us a piece", world, 1e3 * timed["CPU"] / world / tensors)
        self.put("read tensor by tensor, opens", "a pack", world, counted["pack opens"] / (2 * world))
        self.put("read tensor by tensor, preads", "a piece", world, counted["pack reads"] / world / tensors)

    def runs(self, count):
        store = self.store()
        for run in range(count):
            subprocess.run([self.bench.build / "tests/bench_aged", store, f"r{run}", "3", "0"], check=True)
        self.put("vckpt ls STORE, calls", "a run", count, self.commanded(store, "ls", store) / count)

    def table(self, n_is, curves):
        columns = sorted({n for curve in curves.values() for n in curve})
        print(f"\n| {n_is} | {' | '.join(f'{n:,}' for n in columns)} | exponent | at the end |\n"
              f"|{' --- |' * (len(columns) + 3)}", flush=True)
        for (what, unit), curve in curves.items():
            slopes = exponent(curve), exponent(dict(sorted(curve.items())[-2:]))
            self.bench.notes.setdefault("growth", []).append(
                {"what": what, "unit": unit, "n": n_is, "curve": curve, "exponent": slopes[0],
                 "exponent_at_the_end": slopes[1]})
            print(f"| {what}{', ' * bool(unit)}{unit} | "
                  f"{' | '.join(f'{curve[n]:,.4g}' if n in curve else '—' for n in columns)} | "
                  f"{' | '.join('—' if s is None else f'{s:.2f}' for s in slopes)} |", flush=True)

    def section(self, n_is, each, sizes):
        self.curves = {}
        for size in sizes:
            each(*size) if isinstance(size, tuple) else each(size)
        self.table(n_is, self.curves)
        return self.curves

    def goals(self, curves, kind, live, ages):
        """What an old run may cost, before a collection and after; the list's disk after one."""
        figure = self.bench.figure
        for steps in (steps for steps in ages if steps >= 10_000):
            for when in (kind, f"{kind}after gc: "):
                figure(f"{steps:,} steps: {when}Saver open", curves[f"{when}Saver open, CPU", "ms"][steps], "ms", 5)
                figure(f"{steps:,} steps: {when}latest", curves[f"{when}latest, CPU", "ms"][steps], "ms", 1)
                for what in "early save", "small save":
                    save = curves[f"{when}{what}, CPU", "ms"]
                    figure(f"{steps:,} steps: {when}{what}, of that at 10 steps", save[steps] / save[10], "x", 1.2)
            figure(f"{steps:,} steps: {when}list on disk", curves[f"{when}list on disk", "bytes a step"][steps],
                   "bytes a step", 1024 + 300 * live)


def rows(bench):
    growth, ages = Growth(bench), AGES + (OLD,) * bench.o.long
    try:
        curves = growth.section("steps", lambda steps: growth.age(steps, 0), ages)
        kept = growth.section("steps", lambda steps: growth.age(steps, KEPT), ages)
        growth.section("tensors", growth.tensors, TENSORS)
        growth.section("writers", growth.writers, WRITERS)
        growth.section("runs", growth.runs, RUNS)
        growth.goals(curves, "", 1, ages)
        growth.goals(kept, f"{KEPT} steps kept: ", 0, ages)
    finally:
        shutil.rmtree(growth.path, ignore_errors=True)


if __name__ == "__main__":
    child()
