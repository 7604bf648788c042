# SPDX-License-Identifier: Apache-2.0
"""The collector: what is reached stays, whatever is going on; what is not goes, in two runs a grace period apart."""
import ctypes
import errno
import os
import random
import shutil
import threading
import time

import pytest

from ranklib import Meddler
from storelib import (ABORTED, DAMAGED, EBUSY, LAUNCH, NONE, UNDECIDED, Api, Attempt, Failed, age_marks, fresh,
                      open_all, packs_of, put_heartbeat,
                      save, scratch)
from test_attempt import files, killed_writer, visible

HOUR = 3600


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def tree(api):
    return {str(p.relative_to(api.path)): p.read_bytes() for p in api.path.rglob("*") if p.is_file()}


def whats(reports, what):
    return {name for kind, name, _ in reports if kind == what}


def test_nothing_to_do(api):
    a = save(api, "r")
    before = tree(api)
    result, reports = api.gc(grace=HOUR)
    assert reports == [] and tree(api) == before and open_all(api, a)
    assert [getattr(result, f) for f, _ in result._fields_ if f != "reasons"] == [0] * 10


def test_two_runs_and_a_grace_period(api):
    a, b = save(api, "r"), save(api, "r")
    api.remove_step("r", 0)
    before = tree(api)
    gone = {f"packs/{p.parent.name}/{p.name}" for p in (api.path / "packs").glob("*/*") if p.name[:-5] in a.packs}
    manifests = {n for n in before if n.startswith("runs/r/manifests/")}
    dry, reports = api.gc(grace=HOUR, dry=True)
    assert tree(api) == before and gone < whats(reports, "mark") and dry.marked == 3
    first, reports = api.gc(grace=HOUR)
    assert (whats(reports, "mark") == whats(api.gc(grace=HOUR, dry=True)[1], "keep") and first.marked == 3 and
            first.deleted == 0)
    assert set(before) < set(tree(api))
    again, reports = api.gc(grace=HOUR)
    assert again.waiting == 3 and again.waiting_bytes > 0 and again.marked == 0
    age_marks(api)
    dry, reports = api.gc(grace=HOUR, dry=True)
    assert dry.deleted == 3 and set(before) < set(tree(api))
    last, reports = api.gc(grace=HOUR)
    assert last.deleted == 3 and gone < whats(reports, "delete") and last.deleted_bytes == dry.deleted_bytes
    assert packs_of(api) == b.packs and files(api, "trash") == [] and open_all(api, b)
    assert len(files(api, "runs/r/manifests")) == len(manifests) - 1


def test_progress(api):
    """Each manifest that is read and each file that is looked at, one after another up to all of them."""
    save(api, "r"), save(api, "r"), save(api, "s")
    api.gc(grace=HOUR)
    total = 3 + len(tree(api))
    assert api.gc_progress == [(n, total) for n in range(1, total + 1)]


def test_without_grace(api):
    a, b = save(api, "r"), save(api, "r")
    api.remove_step("r", 0)
    writer = Attempt(api, "other")
    with pytest.raises(Failed) as e:
        api.gc(grace=0)
    assert e.value.code == EBUSY and "other" in e.value.text and packs_of(api) == a.packs | b.packs
    writer.abort()
    writer.free()
    result, _ = api.gc(grace=0)
    assert result.deleted == 3 and result.marked == 0 and packs_of(api) == b.packs and files(api, "trash") == []


def test_shared_pack_outlives_its_step(api):
    a = save(api, "r")
    b = save(api, "other", base=a)
    api.remove_step("r", 0)
    api.gc(grace=0)
    assert open_all(api, b) and packs_of(api) == b.packs
    api.remove_step("other", 0)
    api.gc(grace=0)
    assert packs_of(api) == set() and files(api, "runs/r/manifests") == []


def test_live_attempt_keeps_its_packs_and_bases(api):
    old = save(api, "r")
    a = Attempt(api, "new", 5)
    a.base("r", old.entry, old.manifest)
    a.reuse(old)
    announcement = a.part()
    api.remove_step("r", 0)
    for _ in range(3):
        api.gc(grace=HOUR)
        age_marks(api)
    assert old.piece_pack[0].decode() in packs_of(api)
    a.commit(announcement)
    a.free()
    api.gc(grace=0)
    assert open_all(api, a) and packs_of(api) == a.packs


def test_launches_of_another_run_abort_nothing(api):
    """A job that saves to two runs under one launch id; a newer job begins in one of them."""
    old = save(api, "r")
    a = Attempt(api, "new", 5)
    a.base("r", old.entry, old.manifest)
    a.reuse(old)
    announcement = a.part()
    with api.list("other") as l:
        for launch in (a.name[:16], "00000000000000aa"):
            l.put(api.entry(LAUNCH, launch=launch.encode(), newest_step=NONE))
        assert l.attempt(a.name)[0] == ABORTED
    api.remove_step("r", 0)
    for _ in range(3):
        api.gc(grace=HOUR)
        age_marks(api)
    a.commit(announcement)
    a.free()
    assert open_all(api, a)


def test_dead_attempt(api, build):
    """A killed writer is aborted in the list before anything of it is deleted; its step can be taken again."""
    live = save(api, "r")
    name = killed_writer(api, build, "r")
    dry, reports = api.gc(grace=HOUR, dry=True)
    assert dry.aborted == 1 and whats(reports, "abort") == {f"r/{name}"}
    with api.list("r", whole=True) as l:
        assert l.attempt(name)[0] == UNDECIDED
    result, reports = api.gc(grace=HOUR)
    assert result.aborted == 1 and files(api, "incoming") == [] and files(api, "hosts") == []
    with api.list("r", whole=True) as l:
        assert l.attempt(name)[0] == ABORTED
    assert len(packs_of(api)) == 3
    age_marks(api)
    api.gc(grace=HOUR)
    assert packs_of(api) == live.packs and files(api, "trash") == []


def test_attempt_without_heartbeat_is_watched(api):
    a = Attempt(api, "r", 3)
    a.write(b"x" * 100)
    a.free()  # neither committed nor aborted
    start = time.monotonic()
    result, _ = api.gc(grace=HOUR, heartbeat=1)
    assert result.aborted == 1 and time.monotonic() - start >= 0.99  # it counts milliseconds
    assert api.gc(grace=0)[0].deleted >= 1 and packs_of(api) == set()


def test_heartbeat_of_another_host(api, lib):
    """It has to stand still for the time-out by our clock; while it moves, its attempt keeps everything."""
    a = Attempt(api, "r", 3)
    a.write(b"x" * 100)
    a.free()
    put_heartbeat(api, a.name[:16], "r", 0)
    stop, n = threading.Event(), [0]

    def beat():
        mine = Api(lib, api.path, init=False)
        while not stop.wait(0.4):
            n[0] += 1
            put_heartbeat(mine, a.name[:16], "r", n[0])
            (api.path / f"hosts/{a.name[:16]}.elsewhere.{n[0] - 1}").unlink()
        mine.close()

    thread = threading.Thread(target=beat)
    thread.start()
    result, reports = api.gc(grace=HOUR, heartbeat=5)
    assert (result.aborted, result.marked) == (0, 0), reports
    with pytest.raises(Failed) as e:
        api.gc(grace=0, heartbeat=5)
    assert e.value.code == EBUSY
    stop.set()
    thread.join()
    with pytest.raises(Failed) as e:
        Attempt(api, "r")  # it may be at work
    assert e.value.code == EBUSY
    start = time.monotonic()
    result, reports = api.gc(grace=HOUR, heartbeat=1)
    # the library counts whole milliseconds
    assert 0.99 < time.monotonic() - start < 30 and result.aborted == 1 and files(api, "hosts") == []
    Attempt(api, "r").free()


def test_a_cache_that_hides_the_newest_entries(api):
    """Looks that a cache of the file system answers do not find the last commit, whose files are there: no end was
    lost. It is waited for; if it does not come, the collection ends with an error and has deleted nothing."""
    save(api, "r")
    a = save(api, "r")
    last = max(p.name for p in (api.path / "runs/r").iterdir() if p.name.isdigit()).encode()
    m, until = Meddler(api), time.monotonic() + 0.5

    def hidden(args):
        return -errno.ENOENT if ctypes.string_at(args[1]) == b"runs/r/" + last and time.monotonic() < until else None
    try:
        m.answer.update(size=hidden, read_whole=hidden, file_open=hidden)
        assert api.gc(grace=HOUR)[1] == []
        until = time.monotonic() + 600
        before = tree(api)
        with pytest.raises(Failed, match="its directory lists entry .*, which cannot be opened: a cache of the file"):
            api.gc(grace=HOUR)
        assert tree(api) == before
    finally:
        m.end()
    assert open_all(api, a)


def test_lost_pack(api):
    """A pack of an attempt that no list, folder or heartbeat knows."""
    a = Attempt(api, "r", 3)
    a.write(b"x" * 100)
    a.free()
    shutil.rmtree(a.folder())
    result, reports = api.gc(grace=HOUR)
    assert result.marked == 1 and result.aborted == 0
    age_marks(api)
    assert api.gc(grace=HOUR)[0].deleted == 1 and packs_of(api) == set()


def test_unfinished_files(api):
    a = save(api, "r")
    b = Attempt(api, "r", 9)
    own = f"packs/00/{b.name}-0-model.pack.tmp.0123456789abcdef"
    path = ctypes.create_string_buffer(512)
    assert api.lib.pack_path(f"{b.name}-0-model".encode(), path) == 0
    own = path.value.decode() + ".tmp.0123456789abcdef"
    other = "runs/r/000000000009.tmp.0123456789abcdef"
    for name in (own, other):
        (api.path / name).parent.mkdir(parents=True, exist_ok=True)
        (api.path / name).write_bytes(b"unfinished")
    _, reports = api.gc(grace=HOUR)
    assert whats(reports, "mark") == {other}
    age_marks(api)
    result, reports = api.gc(grace=HOUR)
    assert whats(reports, "keep") == {other} and result.waiting == 1  # its maker may be the launch that is alive
    b.abort()
    b.free()
    assert (api.path / own).exists()    # the attempt itself has not made it
    api.gc(grace=HOUR)
    age_marks(api)
    api.gc(grace=HOUR)
    assert not (api.path / other).exists() and not (api.path / own).exists() and open_all(api, a)


def test_foreign_files_stay(api):
    save(api, "r")
    names = ["packs/00/readme", "packs/x", "runs/r/notes.txt", "runs/r/manifests/zz", "hosts/me", "incoming/r/x",
             "notes", "trash/whatever"]
    for name in names:
        (api.path / name).parent.mkdir(parents=True, exist_ok=True)
        (api.path / name).write_bytes(b"mine")
    os.symlink("/etc/passwd", api.path / "packs/00/link")
    for grace in (HOUR, 0):
        _, reports = api.gc(grace=grace)
        damage = whats(reports, "damage")
        assert set(names) - {"trash/whatever"} <= damage and "packs/00/link" in damage
    for name in set(names) - {"trash/whatever"}:
        assert (api.path / name).read_bytes() == b"mine"


def refused(api, name):
    before = tree(api)
    for grace in (0, HOUR):
        with pytest.raises(Failed) as e:
            api.gc(grace=grace)
        assert e.value.code == DAMAGED and name in e.value.text and whats(e.value.reports, "damage")
    assert tree(api) == before


def test_damage_stops_it(api):
    a, b = save(api, "r"), save(api, "q")
    save(api, "r")
    api.remove_step("r", 0)
    entry = api.path / "runs/q/000000000000"
    good = entry.read_bytes()
    entry.write_bytes(b"\1" * len(good))
    refused(api, "run q")
    entry.unlink()
    shutil.copy(api.path / "vckpt.store", entry)
    refused(api, "run q")
    entry.write_bytes(good)
    manifest = next((api.path / "runs/q/manifests").iterdir())
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-1])
    refused(api, manifest.name)
    manifest.unlink()
    refused(api, manifest.name)
    manifest.write_bytes(good)
    live = Attempt(api, "q", 7)
    begin = live.folder() / "begin"
    good = begin.read_bytes()
    begin.write_bytes(b"")
    with pytest.raises(Failed) as e:
        api.gc(grace=HOUR)
    assert e.value.code == DAMAGED and live.name in e.value.text
    begin.write_bytes(good)
    live.abort()
    live.free()
    assert api.gc(grace=0)[0].deleted == 3 and open_all(api, b) and not packs_of(api) & a.packs


class World:
    """What a person knows who made all saves: which steps are visible and what they and undecided attempts need."""

    def __init__(self, api, seed, runs=("a", "b")):
        self.api, self.random, self.runs = api, random.Random(seed), runs
        self.live, self.under_way, self.counter = [], [], 0

    def needed(self):
        need = set()
        for s in self.live:
            need |= s.packs
        for a in self.under_way:
            need |= {name.decode() for name, _ in a.own}
            for b in a.bases:
                need |= b.packs
        return need

    def begin(self):
        self.counter += 1
        a = Attempt(self.api, self.random.choice(self.runs), self.counter)
        a.bases, a.announcement = [], None
        self.under_way.append(a)

    def base(self, a):
        known = self.live + getattr(self, "removed", [])
        if known:
            b = self.random.choice(known)
            try:
                a.base(b.run, b.entry, b.manifest)
                # one that was named while it was live stays good: the collector keeps what it reaches
                assert b in self.live or b in a.bases, "a base that is gone was given out"
                a.bases.append(b)
            except Failed as e:
                assert b not in self.live, e

    def fill(self, a):
        if a.piece is None:
            if a.bases and self.random.random() < 0.7:
                a.reuse(self.random.choice(a.bases))
            else:
                a.write(self.random.randbytes(100))
        elif a.announcement is None:
            a.announcement = a.part()
        else:
            self.end(a)

    def end(self, a, how=None):
        how = how or self.random.choice("cccab")
        self.under_way.remove(a)
        if how == "c":
            a.commit(a.announcement)
            self.live.append(a)
        elif how == "a":
            a.abort()
        a.free()  # "b": left as it is, as if its process had died

    def remove(self):
        if self.live:
            s = self.live.pop(self.random.randrange(len(self.live)))
            self.api.remove_step(s.run, s.step)
            self.removed = (getattr(self, "removed", []) + [s])[-5:]

    def step(self):
        x = self.random.random()
        if x < 0.2 and len(self.under_way) < 4:
            self.begin()
        elif x < 0.35:
            self.remove()
        elif self.under_way:
            a = self.random.choice(self.under_way)
            self.base(a) if x < 0.5 and a.piece is None else self.fill(a)

    def check(self):
        assert self.needed() <= packs_of(self.api)
        for s in self.live:
            assert open_all(self.api, s)
        for run in self.runs:
            assert {(s.step, s.entry, s.name) for s in self.live if s.run == run} == {
                (step, entry, name) for step, (entry, name, _) in visible(self.api, run).items()}

    def finish(self):
        for a in list(self.under_way):
            self.end(a, "a")
        for _ in range(3):
            self.api.gc(grace=HOUR)
            age_marks(self.api)
        self.check()
        assert packs_of(self.api) == self.needed()
        assert [files(self.api, d) for d in ("incoming", "hosts", "trash")] == [[], [], []]
        assert len([p for r in self.runs for p in files(self.api, f"runs/{r}/manifests")]) >= len(self.live)
        kept = {n for r in self.runs for n in files(self.api, f"runs/{r}/manifests")}
        wanted = {f"runs/{s.run}/manifests/{bytes(s.manifest.bytes).hex()}" for s in self.live}
        assert kept == wanted


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings(lib, seed, scale):
    path = scratch()
    shutil.rmtree(path)
    api = Api(lib, path)
    try:
        world = World(api, seed)
        for i in range(scale(120, 2000)):
            if world.random.random() < 0.2:
                if world.random.random() < 0.6:
                    age_marks(api)
                api.gc(grace=HOUR)
                world.check()
            else:
                world.step()
        world.finish()
    finally:
        api.close()
        shutil.rmtree(path)


@pytest.mark.parametrize("seed", range(2))
def test_collector_beside_writers(lib, seed, scale):
    """Collections one after another in a thread, every mark taken for old, while saves begin, end and die."""
    path = scratch()
    shutil.rmtree(path)
    api, other = Api(lib, path), Api(lib, path, init=False)
    stop, failures, count = threading.Event(), [], [0]

    def collect():
        while not stop.is_set():
            try:
                age_marks(other)
                other.gc(grace=HOUR, heartbeat=20)
                count[0] += 1
            except Exception as e:  # noqa: BLE001
                failures.append(e)
                return

    class Beside(World):
        def end(self, a, how=None):
            # a death would make the collector watch for its time-out
            super().end(a, how or self.random.choice("cccca"))

    thread = threading.Thread(target=collect)
    try:
        world = Beside(api, 100 + seed)
        thread.start()
        for i in range(scale(300, 10000)):
            world.step()
            if i % 50 == 0:
                world.check()
        stop.set()
        thread.join()
        assert not failures, failures
        assert count[0] > 3
        world.check()
        world.finish()
    finally:
        stop.set()
        thread.join()
        api.close()
        other.close()
        shutil.rmtree(path)
