# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job as processes of tests/crash/rank_main.c, under the preloaded library of interpose.c, and what must
hold of a store when they are gone."""
import ctypes as c
import errno
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from storelib import Api, packs_of, scratch

NONE = 2**64 - 1
WORLD = 4
START_MS, HEARTBEAT_MS = 5000, 120000
LIMIT_S = 100   # for a job: less than a heartbeat that is waited for, and enough where other tests have the processors
DRIVERS = [pytest.param("rank_protocol", marks=pytest.mark.full), "rank_saver"]
DAMAGE = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)
UNDECIDED = -errno.EINPROGRESS    # what VCKPT_EUNDECIDED says: the step may still become visible
MESSAGES = re.compile(r"^(\d+) (open|closed|saved (\d+) (\d+)|failed (-\d+) (.*))$")


class Damage(c.Structure):
    _fields_ = [("fault", c.c_size_t), ("file", c.c_char_p), ("offset", c.c_uint64), ("len", c.c_uint64),
                ("newer", c.c_bool), ("what", c.c_char_p), ("run", c.c_char_p), ("step", c.c_uint64),
                ("component", c.c_char_p), ("tensor", c.c_char_p)]


class VerifyOptions(c.Structure):
    _fields_ = [("run", c.c_char_p), ("step", c.c_uint64), ("threads", c.c_uint), ("note", c.c_bool),
                ("damage", DAMAGE), ("progress", c.c_void_p), ("pack", c.c_void_p), ("unread", c.c_void_p),
                ("begins", c.c_void_p), ("arg", c.c_void_p), ("header", c.c_void_p), ("files", c.c_void_p),
                ("paranoid", c.c_bool)]


class VerifyResult(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("files", "objects", "bytes", "steps", "faults", "newer", "unread")]


def verify(api):
    """Every fault, as (file, what, step)."""
    seen = []

    def damage(_, p):
        d = Damage.from_address(p)
        seen.append((d.file.decode(), d.what.decode(), d.step if d.run else None))
    f = DAMAGE(damage)
    o, result = VerifyOptions(run=None, step=NONE, threads=1, damage=f), VerifyResult()
    api.call(api.lib.upkeep_verify, api.p, c.byref(o), c.byref(result))
    return seen


def steps(api, run="r"):
    with api.list(run) as l:
        assert l.damaged == 0
        return {step: attempt for step, (_, attempt, _) in l.steps().items()}


class Outcome:
    """What one rank said, and how it ended."""

    def __init__(self, rank, text, code):
        self.rank, self.code, self.text = rank, code, text
        self.killed = code == -signal.SIGKILL
        found = [m for m in map(MESSAGES.match, text.splitlines()) if m]
        self.saved = [(int(m[3]), int(m[4])) for m in found if m[3]]
        self.failed = [(int(m[5]), m[6]) for m in found if m[5]]
        self.said = [m[2].split()[0] for m in found]

    def __repr__(self):
        return f"rank {self.rank} ({self.code}): {self.text.strip()}"


def next_step(build, path, run="r"):
    """Where a trainer would go on: ranks of a job say which step they save."""
    api = Api(c.CDLL(str(build / "tests" / "libvckpt_internal.so")), path, init=False)
    try:
        with api.list(run) as l:
            return max(l.steps(), default=-1) + 1
    finally:
        api.close()


class Job:
    """The ranks of one launch. inject: {rank: words for the preloaded library}. env: {rank: more variables}."""

    def __init__(self, build, path, id_, saves=1, world=WORLD, inject=None, driver="rank_protocol", run="r", log=None,
                 list_=None, stdin=None, env=None, **options):
        options = {"heartbeat_ms": HEARTBEAT_MS, "start_ms": START_MS, "step": next_step(build, path, run), **options}
        self.path, self.began, self.processes, self.files = pathlib.Path(path), time.monotonic(), {}, {}
        self.here = self.path.with_name(f"{self.path.name}.{id_}.here")     # where ranks say that they have come
        # a group that kill(0) ends, this process not in it
        self.leader = subprocess.Popen(["sleep", "600"], process_group=0)
        for rank in range(world):
            words = (inject or {}).get(rank, "")
            own = dict(os.environ, VCKPT_INTERPOSE=f"root={self.path}" + f",{words}" * bool(words) +
                       f",log={log}" * bool(log)
                       + f",list={list_}.{rank}" * bool(list_), LD_PRELOAD=str(build / "tests/libinterpose.so"),
                       ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
            if not (words or log or list_):
                del own["LD_PRELOAD"]
            own.update((env or {}).get(rank, {}))
            self.files[rank] = tempfile.TemporaryFile("w+")
            self.processes[rank] = subprocess.Popen(
                [build / "tests" / driver, path, run, id_, str(rank), str(world), str(saves),
                 *[f"{k}={v}" for k, v in options.items()]],
                env=own, stdout=self.files[rank], stderr=self.files[rank], stdin=stdin or subprocess.DEVNULL,
                process_group=self.leader.pid)
        if self.leader.poll() is not None:
            self.kill()    # some were started after the group was ended

    def text(self, rank):
        self.files[rank].seek(0)
        return self.files[rank].read()

    def wait(self, ranks=None, timeout=LIMIT_S):
        """{rank: Outcome}; fails when one hangs."""
        out, end = {}, time.monotonic() + timeout
        for rank in self.processes if ranks is None else ranks:
            try:
                code = self.processes[rank].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = {r: self.text(r) for r in self.processes}
                self.kill()
                raise AssertionError(f"rank {rank} hangs: {said}") from None
            out[rank] = Outcome(rank, self.text(rank), code)
        self.took = time.monotonic() - self.began
        return out

    def signal(self, rank, number):
        self.processes[rank].send_signal(number)

    def state(self, rank):
        """As /proc says: T when it is stopped."""
        try:
            return pathlib.Path(f"/proc/{self.processes[rank].pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return "X"

    def kill(self):
        for p in self.processes.values():
            p.kill()
            p.wait()

    def close(self):
        self.kill()
        self.leader.kill()
        self.leader.wait()
        for f in self.files.values():
            f.close()
        shutil.rmtree(self.here, ignore_errors=True)


def run_job(*args, timeout=LIMIT_S, **options):
    job = Job(*args, **options)
    try:
        return job.wait(timeout=timeout), job.took
    finally:
        job.close()


class Bench:
    """Copies of one store that holds step 0, and runs of cases on them side by side."""

    def __init__(self, lib, build, driver, spare=6):
        self.lib, self.build, self.driver, self.spare = lib, build, driver, spare
        self.dir = scratch()
        self.base, self.number, self.lock = self.dir / "base", 0, threading.Lock()
        Api(lib, self.base).close()
        out, _ = self.job(self.base, "first")
        assert all(o.saved == [(0, 1)] for o in out.values()), out

    def close(self):
        shutil.rmtree(self.dir)

    def job(self, path, id_, **options):
        return run_job(self.build, path, id_, driver=self.driver, **options)

    def copy(self):
        with self.lock:
            self.number += 1
            path = self.dir / f"s{self.number}"
        shutil.copytree(self.base, path)
        return path

    def calls(self, rank=None, **options):
        """{rank: [(call, path)]} of one undisturbed save."""
        path = self.copy()
        out, _ = self.job(path, "counted", list_=f"{path}.list", **options)
        assert all(o.saved for o in out.values()), out
        lists = {r: [tuple(line.split(" ", 1)) for line in pathlib.Path(f"{path}.list.{r}").read_text().splitlines()]
                 for r in out}
        shutil.rmtree(path)
        return lists

    def each(self, cases, function):
        """function(path, case) for all, several at a time; the first failure is raised with its case."""
        def one(case):
            path = self.copy()
            try:
                function(path, case)
            except BaseException as e:
                e.add_note(f"case {case}, store kept in {path}")
                raise
            shutil.rmtree(path)
        with ThreadPoolExecutor(self.spare) as pool:
            for f in [pool.submit(one, case) for case in cases]:
                f.result()

    def open(self, path):
        return Api(self.lib, path, init=False)


def sound(api, old):
    """Old steps are there and verify, and so does whatever else is shown."""
    now = steps(api)
    assert {s: a for s, a in now.items() if s in old} == old, (old, now)
    assert verify(api) == []
    return now


def agree(outcomes, now, step, names):
    """The ranks that lived say one thing, and it is what the list says. names: ranks one of which a failure must
    name."""
    lived = [o for o in outcomes.values() if not o.killed]
    for o in lived:
        assert o.saved or o.failed, (o, outcomes)
        if step in now:
            assert o.saved and not [f for f in o.failed if f[0] != UNDECIDED], outcomes
        else:
            assert not o.saved, outcomes
            code, text = o.failed[0]
            assert any(f"rank {n}" in text for n in names), outcomes
    assert len({tuple(o.saved) for o in lived}) <= 1, outcomes


def leftovers(api, now):
    """Packs and announcements of dead attempts, all listed by a dry run. Returns how many."""
    dead = [p for p in packs_of(api) if not any(p.startswith(a + "-") for a in now.values())]
    folders = [str(f.relative_to(api.path / "incoming")) for f in (api.path / "incoming").glob("*/*")
               if f.name not in now.values()]
    _, reports = api.gc(grace=86400, dry=True, heartbeat=1)
    told = {name for _, name, _ in reports}
    for want in dead + folders:
        assert any(want in name for name in told), (want, reports)
    return len(dead) + len(folders)


def goes_on(bench, path, old, id_="the next launch"):
    """A new launch saves the next step; a collection leaves exactly what the steps need."""
    out, _ = bench.job(path, id_)
    assert all(len(o.saved) == 1 and not o.failed for o in out.values()), out
    api = bench.open(path)
    try:
        now = sound(api, old)
        assert len(now) == len(old) + 1
        api.gc(grace=0, heartbeat=1)
        assert sound(api, now) == now
        kept = packs_of(api)
        assert all(any(p.startswith(a + "-") for a in now.values()) for p in kept), (now, kept)
        assert not list((api.path / "incoming").glob("*/*")) and not list((api.path / "hosts").glob("*"))
    finally:
        api.close()


def after(bench, path, outcomes, names):
    """What must hold when the ranks of a save of step 1 are gone."""
    api = bench.open(path)
    try:
        now = sound(api, {0: bench_first(bench)})
        assert set(now) <= {0, 1}
        agree(outcomes, now, 1, names)
        left = leftovers(api, now)
    finally:
        api.close()
    goes_on(bench, path, now)
    return now, left


def bench_first(bench):
    if not hasattr(bench, "first"):
        api = bench.open(bench.base)
        bench.first = steps(api)[0]
        api.close()
    return bench.first
