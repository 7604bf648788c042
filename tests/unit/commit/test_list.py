# SPDX-License-Identifier: Apache-2.0
"""The run's list against an independent telling of its rules: random histories, several processes, damage."""
import ctypes
import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import time

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from protolib import field, parse
from storelib import (ABORT, ABORTED, COMMIT, COMMITTED, DAMAGED, LAUNCH, NONE, REMOVE, SNAPSHOT, UNDECIDED, Api, Buf,
                      Entry, Failed, Live, digest,
                      fresh, scratch)

LAUNCHES = [f"{i:016x}" for i in range(0xA0, 0xA8)]
ATTEMPTS = [f"{launch}-{n}" for launch in LAUNCHES for n in range(15)] + [f"{i:016x}-0" for i in range(1, 60)]


class Oracle:
    """The rules as sentences: what each entry does to who knows all entries before it."""

    def __init__(self):
        self.live, self.done, self.dead, self.launches, self.entries = {}, {}, {}, [], 0

    def state(self, attempt):
        if attempt in self.done:
            return COMMITTED
        launch = attempt[:16]
        if attempt in self.dead or (launch in self.launches and launch != self.launches[-1]):
            return ABORTED
        return UNDECIDED

    def valid(self, attempt, step, replaces):
        now = self.live[step][0] if step in self.live else NONE
        return self.state(attempt) == UNDECIDED and replaces == now

    def apply(self, kind, *what):
        n, self.entries = self.entries, self.entries + 1
        if kind == LAUNCH and what[0] not in self.launches:
            self.launches.append(what[0])
        elif kind == COMMIT:
            attempt, step, replaces, mark = what
            if self.valid(attempt, step, replaces):
                self.live[step] = (n, attempt, mark)
                self.done[attempt] = n
        elif kind == ABORT and what[0] not in self.done:
            self.dead.setdefault(what[0], n)
        elif kind == REMOVE:
            for step, (entry, *_) in list(self.live.items()):
                if entry == what[0]:
                    del self.live[step]


@pytest.fixture(scope="module")
def api(lib):
    with fresh(lib) as api:
        yield api


runs = iter(range(10**9))


def history(seed, least, most):
    """Operations; hypothesis gives the seed (shrinking a list of hundreds takes minutes and tells no more)."""
    r = random.Random(seed)
    return [(r.choice("ccccccclaarrx"), r.randrange(10**6), r.randrange(26), r.choice("nnnls"))
            for _ in range(r.randrange(least, most))]


def operation(oracle, kind, pick, step, way):
    """A random entry, likely or not: (kind, fields for the oracle)."""
    attempt = ATTEMPTS[pick % len(ATTEMPTS)]
    if kind == "l":
        return LAUNCH, LAUNCHES[pick % len(LAUNCHES)]
    if kind == "a":
        return ABORT, attempt
    if kind == "r" and oracle.live:
        return REMOVE, sorted(oracle.live.values())[pick % len(oracle.live)][0]
    if kind == "x":
        return REMOVE, pick % (oracle.entries + 3)
    replaces = NONE if way == "n" else oracle.live.get(step, (NONE,))[0] if way == "l" else pick % (oracle.entries + 1)
    return COMMIT, attempt, step, replaces, pick % 60000


def make(api, what):
    kind, *rest = what
    if kind == LAUNCH:
        return api.entry(LAUNCH, launch=rest[0].encode(), newest_step=NONE)
    if kind == ABORT:
        return api.entry(ABORT, attempt=rest[0].encode(), reason=b"why", rank=3)
    if kind == REMOVE:
        return api.entry(REMOVE, removes=rest[0])
    return api.commit_entry(*rest, attributes=[("loss", f"{rest[3]}")] if rest[3] % 3 == 0 else [])


def snapshot_of(api, oracle):
    rows = sorted((entry, step, attempt, mark) for step, (entry, attempt, mark) in oracle.live.items())
    live = (Live * len(rows))(*[Live(entry, api.commit_entry(attempt, step, NONE, mark).commit)
                                for entry, step, attempt, mark in rows])
    return Entry(kind=SNAPSHOT, time_ns=1, host=b"h", live=live, nlive=len(rows))


def agree(l, oracle):
    assert (l.next, l.damaged) == (oracle.entries, 0)
    assert l.steps() == oracle.live


HYPOTHESIS = dict(deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=25, **HYPOTHESIS)
@given(st.integers(0, 2**32))
def test_any_history_from_the_start(api, seed):
    """Whatever stands in the list, commits that do not count included: a whole list shows what the rules say."""
    run, oracle = f"raw{next(runs)}", Oracle()
    with api.list(run) as follower:
        for o in history(seed, 70, 200):
            if oracle.entries and oracle.entries % 64 == 0:
                api.put_raw(run, oracle.entries, snapshot_of(api, oracle))
                oracle.apply(SNAPSHOT)
            what = operation(oracle, *o)
            api.put_raw(run, oracle.entries, make(api, what))
            oracle.apply(*what)
            if o[1] % 7 == 0:
                follower.refresh()
                agree(follower, oracle)
        with api.list(run, whole=True) as l:
            agree(l, oracle)
            for attempt in ATTEMPTS:
                assert l.attempt(attempt)[0] == oracle.state(attempt), attempt


@settings(max_examples=25, **HYPOTHESIS)
@given(st.integers(0, 2**32), st.integers(0, 150))
def test_writers_history_from_snapshot_and_start(api, seed, late):
    """What writers put after their check: from a snapshot, from the start and followed all along it looks the same."""
    run, oracle = f"w{next(runs)}", Oracle()
    with api.list(run) as writer, api.list(run) as other:
        for i, o in enumerate(history(seed, 70, 220)):
            what = operation(oracle, *o)
            l = other if o[1] % 5 == 0 and i < late else writer
            if what[0] == LAUNCH and what[1] in oracle.launches:
                continue  # a launch appends one entry
            if what[0] == COMMIT:
                def check(l):
                    now = l.steps().get(what[2], (NONE,))[0]
                    return 0 if l.attempt(what[1])[0] == UNDECIDED and now == what[3] else -errno.EEXIST
                ok = oracle.valid(*what[1:4])
                if not ok:
                    with pytest.raises(Failed) as e:
                        l.put(make(api, what), check)
                    assert e.value.code == -errno.EEXIST
                    continue
                n = l.put(make(api, what), check)
            else:
                n = l.put(make(api, what))
            if n > oracle.entries:
                assert n == oracle.entries + 1 and oracle.entries % 64 == 0
                oracle.apply(SNAPSHOT)
            oracle.apply(*what)
            if i == late:
                with api.list(run) as l:
                    agree(l, oracle)
        for whole in (False, True):
            with api.list(run, whole) as l:
                agree(l, oracle)
        other.refresh()
        agree(other, oracle)


def committed(api, run, count, first=0, removed=()):
    """A run with `count` commits of imports; returns {step: entry}."""
    with api.list(run) as l:
        for i in range(first, first + count):
            l.put(api.commit_entry(f"{i + 1:016x}-0", i, NONE, i))
            if i in removed:
                api.remove_step(run, i)
        return {step: entry for step, (entry, *_) in l.steps().items()}


def test_snapshots_stand_where_they_must(api):
    run = f"r{next(runs)}"
    committed(api, run, 200)
    for n in range(203):
        kind = SNAPSHOT if n and n % 64 == 0 else COMMIT
        size = api.entry_path(run, n).stat().st_size
        assert size >= 8192 and (size > 8192) == (kind == SNAPSHOT)
    with api.list(run) as l:
        assert l.next == 203 and len(l.steps()) == 200


def test_late_commit_of_aborted_attempt(api):
    """A writer that was stopped: its list knows everything since its begin, so it finds the abort, though a snapshot
    came after it."""
    run, attempt = f"r{next(runs)}", "00000000000000aa-0"
    with api.list(run) as writer:
        with api.list(run) as judge:
            judge.put(api.entry(ABORT, attempt=attempt.encode(), reason=b"too slow"))
        committed(api, run, 100)
        with pytest.raises(Failed) as e:
            writer.put(api.commit_entry(attempt, 1000),
                       lambda l: {ABORTED: -errno.ECANCELED}.get(l.attempt(attempt)[0], 0))
        assert e.value.code == -errno.ECANCELED
    # even if it stood there: who knows the abort does not show it
    api.put_raw(run, 102, api.commit_entry(attempt, 1000))
    with api.list(run, whole=True) as l:
        assert 1000 not in l.steps() and l.attempt(attempt)[0] == ABORTED


def test_removed_step_is_never_revived(api):
    run = f"r{next(runs)}"
    entries = committed(api, run, 3)
    api.remove_step(run, 1)
    with pytest.raises(Failed) as e:
        api.remove_step(run, 1)
    assert e.value.code == -errno.ENOENT
    with api.list(run, whole=True) as l:
        end = l.next
    api.put_raw(run, end, api.commit_entry(f"{2:016x}-0", 1, NONE, 9))       # the same attempt again
    api.put_raw(run, end + 1, api.commit_entry(f"{99:016x}-0", 1, entries[1], 9))  # replacing what is gone
    with api.list(run, whole=True) as l:
        assert sorted(l.steps()) == [0, 2]
    api.put_raw(run, end + 2, api.commit_entry(f"{100:016x}-0", 1, NONE, 9))
    with api.list(run, whole=True) as l:
        assert sorted(l.steps()) == [0, 1, 2]
    api.put_raw(run, end + 3, api.entry(REMOVE, removes=entries[1]))         # the old entry, not the step
    with api.list(run, whole=True) as l:
        assert sorted(l.steps()) == [0, 1, 2]


def test_every_commit_since_an_entry(api):
    """Removed and replaced ones, too: a save may have named them as its base while they were visible."""
    run = f"r{next(runs)}"
    entries = committed(api, run, 4)
    api.remove_step(run, 2)
    with api.list(run, whole=True) as l:
        end = l.next
    api.put_raw(run, end, api.commit_entry("00000000000000cc-0", 3, entries[3], 77))    # replaces
    api.put_raw(run, end + 1, api.commit_entry("00000000000000dd-0", 0, NONE, 78))      # does not count
    func = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    with api.list(run, whole=True) as l:
        def since(entry, stop=None):
            found = {}

            def one(_, at, manifest):
                found[at] = ctypes.string_at(manifest, 32)
                return -errno.ENOSPC if at == stop else 0
            r = api.lib.commit_list_each_commit(l.p, ctypes.c_uint64(entry), func(one), None, ctypes.byref(api.err))
            return r, found
        r, found = since(0)
        assert r == 0 and sorted(found) == sorted(entries.values() if isinstance(entries, dict) else entries) + [end]
        assert found[end] == bytes(digest(77))
        assert since(end)[1].keys() == {end} and since(end + 1) == (0, {})
        assert since(0, stop=end) == (-errno.ENOSPC, {end: found[end]})


def test_replace_is_never_silent(api):
    run = f"r{next(runs)}"
    entries = committed(api, run, 2)
    api.put_raw(run, 2, api.commit_entry("00000000000000bb-0", 1, NONE, 5))
    api.put_raw(run, 3, api.commit_entry("00000000000000cc-0", 1, entries[0], 6))
    api.put_raw(run, 4, api.commit_entry("00000000000000dd-0", 1, entries[1], 7))
    with api.list(run) as l:
        assert l.steps()[1] == (4, "00000000000000dd-0", 7)


def putter(build, path, run, base, count, out):
    api = Api(ctypes.CDLL(str(build / "tests" / "libvckpt_internal.so")), path, init=False)
    put = []
    with api.list(run) as l:
        for i in range(count):
            put.append((l.put(api.commit_entry(f"{base + i:016x}-0", base + i, NONE, base + i)), base + i))
    api.close()
    out.put(put)


def test_concurrent_putters(api, build, scale):
    """Several processes: numbers are dense, each entry stands once, everybody's answer is true."""
    run, workers, count = f"r{next(runs)}", 4, scale(60, 250)
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    processes = [spawn.Process(target=putter, args=(build, str(api.path), run, (k + 1) * 10000, count, out))
                 for k in range(workers)]
    for p in processes:
        p.start()
    told = dict(x for _ in processes for x in out.get(timeout=300))
    for p in processes:
        p.join()
        assert p.exitcode == 0
    assert len(told) == workers * count and sorted(told.values()) == sorted((k + 1) * 10000 + i for k in range(workers)
                                                                            for i in range(count))
    total = workers * count
    for whole in (False, True):
        with api.list(run, whole) as l:
            assert {entry: step for step, (entry, *_) in l.steps().items()} == told
            assert l.next == len(list((api.path / "runs" / run).iterdir())) == total + (l.next - 1) // 64


def spoil(path, offset, length=1):
    data = bytearray(path.read_bytes())
    for i in range(offset, offset + length):
        data[i] ^= 0x40
    path.write_bytes(data)


def test_one_bad_copy_serves(api):
    run = f"r{next(runs)}"
    committed(api, run, 70)
    half = api.entry_path(run, 3).stat().st_size // 2
    for n, at in ((3, 60), (4, half + 60), (5, 3), (6, half + 9)):
        spoil(api.entry_path(run, n), at)
    spoil(api.entry_path(run, 64), 100)
    for whole in (False, True):
        with api.list(run, whole) as l:
            assert l.damaged == 0 and len(l.steps()) == 70
    committed(api, run, 1, first=500)


def test_both_copies_bad(api):
    """Readers skip the entry, the others stay; writers refuse the run by name; the next snapshot repairs what is
    shown."""
    run = f"r{next(runs)}"
    committed(api, run, 40)
    half = api.entry_path(run, 7).stat().st_size // 2
    spoil(api.entry_path(run, 7), 60)
    spoil(api.entry_path(run, 7), half + 60)
    with api.list(run) as l:
        assert l.damaged == 1 and sorted(l.steps()) == [i for i in range(40) if i != 7]
        with pytest.raises(Failed) as e:
            l.put(api.commit_entry("00000000000000aa-0", 7))
        assert e.value.code == DAMAGED and run in e.value.text
    with pytest.raises(Failed) as e:
        api.remove_step(run, 3)
    assert e.value.code == DAMAGED and run in e.value.text
    run = f"r{next(runs)}"
    committed(api, run, 130, removed=(2,))
    for n in (7, 3):  # a commit, and the removal of step 2
        api.entry_path(run, n).write_bytes(b"")
    with api.list(run) as l:
        assert l.damaged == 0 and len(l.steps()) == 129
    with api.list(run, whole=True) as l:
        assert l.damaged == 2 and sorted(l.steps()) == [i for i in range(130) if i != 2]


def test_damaged_snapshot_falls_back(api):
    run = f"r{next(runs)}"
    committed(api, run, 150, removed=(5, 70, 100))
    with api.list(run, whole=True) as l:
        good, end = l.steps(), l.next
    assert end > 128
    api.entry_path(run, 128).write_bytes(random.randbytes(8192))
    with api.list(run) as l:
        assert l.steps() == good and l.damaged == 1
    api.entry_path(run, 64).unlink()
    with api.list(run) as l:
        assert l.steps() == good and l.damaged == 2


def test_lost_entry_is_not_the_end(api):
    """A file that is gone must not be put again under its number."""
    for count, lost in ((10, 9 - 1), (10, 0), (40, 5), (100, 30), (100, 63), (100, 65)):
        run = f"r{next(runs)}"
        committed(api, run, count)
        api.entry_path(run, lost).unlink()
        with api.list(run, whole=True) as l:
            assert l.damaged == 1 and l.next > lost + 1
            with pytest.raises(Failed) as e:
                l.put(api.commit_entry("00000000000000aa-0", 10**6))
            assert e.value.code == DAMAGED


def test_entry_of_another_store_or_number(api, lib):
    path = scratch()
    shutil.rmtree(path)
    other = Api(lib, path)
    committed(other, "r", 3)
    run = f"r{next(runs)}"
    committed(api, run, 3)
    shutil.copy(other.entry_path("r", 1), api.entry_path(run, 1))
    with api.list(run) as l:
        assert l.damaged == 1 and sorted(l.steps()) == [0, 2]
    other.close()
    shutil.rmtree(path)


def test_bad_names(api):
    for run in ("", "a/b", "..", "-x", "x" * 129):
        with pytest.raises(Failed) as e:
            api.list(run)
        assert e.value.code == -errno.EINVAL


@pytest.mark.full
def test_full_disk_leaves_a_snapshot_out(lib, tmp_path):
    """A removal has to be possible on a full disk, also where the next number is a snapshot's that has more bytes than
    the reserve."""
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)],
                                          capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        api = Api(lib, tmp_path / "store")
        with api.list("r") as l:
            for i in range(64):
                l.put(api.commit_entry(f"{i + 1:016x}-0", i, NONE, i, [(f"k{n}", f"{i}" * 2000) for n in range(8)]))
        rest = os.statvfs(tmp_path)
        (tmp_path / "rest").write_bytes(bytes((rest.f_bavail - 8) * rest.f_bsize))
        api.remove_step("r", 5)
        with api.list("r") as l:
            assert l.next == 65 and sorted(l.steps()) == [i for i in range(64) if i != 5]
        (tmp_path / "rest").unlink()
        committed(api, "r", 64, first=64)
        assert api.entry_path("r", 128).stat().st_size > 1 << 20  # the next one stands where it must
        with api.list("r") as l, api.list("r", whole=True) as whole:
            assert l.steps() == whole.steps() and len(l.steps()) == 127
        api.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_ten_thousand_steps_open_fast(api):
    """A bound with much room: a linear reader would take a hundred times as long."""
    run = f"r{next(runs)}"
    oracle = Oracle()
    for i in range(10000):
        if oracle.entries and oracle.entries % 64 == 0:
            if oracle.entries > 10000 or oracle.entries % 1024 == 0:
                api.put_raw(run, oracle.entries, snapshot_of(api, oracle))
            else:
                api.put_raw(run, oracle.entries, api.entry(ABORT, attempt=b"00000000000000aa-0", reason=b""))
            oracle.apply(SNAPSHOT)
        what = (COMMIT, f"{i + 1:016x}-0", i, NONE, i)
        api.put_raw(run, oracle.entries, make(api, what))
        oracle.apply(*what)
    best = min(timed(api, run) for _ in range(5))
    print(f"open: {best * 1e3:.1f} ms")
    assert best < 0.25
    with api.list(run) as l:
        assert l.steps() == oracle.live
        start = time.process_time()
        for _ in range(1000):
            assert l.refresh() == 0
        took = time.process_time() - start
        print(f"refresh: {took * 1e3:.1f} us")
        assert took < 2
    shutil.rmtree(api.path / "runs" / run)


def timed(api, run):
    start = time.process_time()
    api.list(run).close()
    return time.process_time() - start


# ---- where an entry belongs ----

def skipped(l):
    """{number: what is wrong with it} of the entries that the list does without."""
    l.lib.commit_list_damaged_next.restype, found, why, at = ctypes.c_uint64, {}, ctypes.c_char_p(), ctypes.c_uint64()
    while (n := l.lib.commit_list_damaged_next(l.p, ctypes.byref(at), ctypes.byref(why))) != NONE:
        found[n] = why.value.decode()
    assert len(found) == l.damaged
    return found


def refused(api, run, count):
    """Writers and the collector refuse the list by its run."""
    with api.list(run) as l:
        with pytest.raises(Failed) as e:
            l.put(api.commit_entry("00000000000000aa-0", 10**6))
        assert e.value.code == DAMAGED and f"run {run}: {count} entr" in e.value.text, e.value.text
    with pytest.raises(Failed) as e:
        api.gc()
    assert f"run {run}: {count} entr" in e.value.text, e.value.text


def collects(api):
    """The collector takes the lists as they are: here it comes as far as the manifests, which these runs do not
    have."""
    with pytest.raises(Failed, match="manifests/.* is needed and cannot be read"):
        api.gc()


@pytest.fixture
def one(lib):
    """A store of its own."""
    with fresh(lib) as api:
        yield api


def swap(a, b):
    (a_bytes, b_bytes) = (a.read_bytes(), b.read_bytes())
    a.write_bytes(b_bytes)
    b.write_bytes(a_bytes)


def test_two_entries_swapped(one):
    committed(one, "r", 12)
    swap(one.entry_path("r", 4), one.entry_path("r", 9))
    with one.list("r") as l:
        assert skipped(l) == {4: "it is entry 9",
                              9: "it is entry 4"} and sorted(l.steps()) == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]
    refused(one, "r", 2)


def test_a_removal_copied_over_a_commit(one):
    committed(one, "r", 6, removed=(2,))      # entry 3 removes step 2, entry 4 commits step 3
    shutil.copy(one.entry_path("r", 3), one.entry_path("r", 4))
    with one.list("r") as l:
        assert skipped(l) == {4: "it is entry 3"} and sorted(l.steps()) == [0, 1, 4, 5]
    refused(one, "r", 1)


def test_an_entry_of_another_run(one):
    committed(one, "r", 6)
    committed(one, "other", 6)
    shutil.copy(one.entry_path("other", 3), one.entry_path("r", 3))
    with one.list("r") as l:
        assert skipped(l) == {3: "it is an entry of run other"} and sorted(l.steps()) == [0, 1, 2, 4, 5]
    shutil.copy(one.entry_path("other", 5), one.entry_path("r", 5))
    with one.list("r") as l:
        assert sorted(skipped(l)) == [3, 5]
    refused(one, "r", 2)


def test_an_entry_of_another_past(one):
    """Run and number are its place's: only the entry before says that it does not belong there."""
    committed(one, "r", 3)
    other, kept, present = one.path / "kept", one.path / "runs/r", one.path / "present"
    shutil.copytree(kept, other)
    committed(one, "r", 3, first=3)
    shutil.move(kept, present)
    shutil.move(other, kept)                  # as a backup would bring it back
    committed(one, "r", 3, first=10)          # and the run goes on from there
    for n, at in ((5, 5), (4, 4)):
        shutil.copy(present / f"{n:012d}", one.entry_path("r", at))
        with one.list("r") as l:
            assert skipped(l) == {at: f"it does not follow entry {at - 1} as that entry is here: one of the two "
                                  f"does not belong to this list"}
        refused(one, "r", 1)


def test_a_lost_end_and_a_lost_beginning(one):
    """The entry after a lost one shows it; of a lost end the list itself says nothing."""
    committed(one, "r", 6)
    one.entry_path("r", 5).unlink()
    with one.list("r", whole=True) as l:
        assert skipped(l) == {} and l.next == 5 and sorted(l.steps()) == [0, 1, 2, 3, 4]
        l.put(one.commit_entry("00000000000000aa-0", 50))
    one.entry_path("r", 0).unlink()
    with one.list("r", whole=True) as l:
        assert skipped(l) == {0: "it is missing, though later entries exist"} and sorted(l.steps()) == [1, 2, 3, 4, 50]
    refused(one, "r", 1)


def test_a_first_entry_that_was_another(one):
    committed(one, "r", 3)
    swap(one.entry_path("r", 0), one.entry_path("r", 1))
    with one.list("r") as l:
        assert skipped(l) == {0: "it is entry 1", 1: "it is entry 0"}
    one.entry_path("q", 0).parent.mkdir()
    one.put_raw("q", 0, one.commit_entry("00000000000000aa-0", 1), before=bytes(range(32)))
    with one.list("q") as l:
        assert skipped(l) == {0: "it names an entry before it, but it is the first one"}


def test_snapshots_swapped(one):
    committed(one, "r", 140, removed=(3, 70))
    with one.list("r", whole=True) as l:
        good, end = l.steps(), l.next
    assert end > 129
    swap(one.entry_path("r", 64), one.entry_path("r", 128))
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert skipped(l) == {64: "it is entry 128", 128: "it is entry 64"} and l.steps() == good
    refused(one, "r", 2)


def adopted(one, steps):
    """CPU seconds in which a list takes over a snapshot with rows of these steps, and what it shows then."""
    attempts = [b"00000000000000aa-%d" % i for i in range(len(steps))]
    live = (Live * len(steps))()
    for i, step in enumerate(steps):
        live[i].entry = i
        live[i].commit.step, live[i].commit.attempt, live[i].commit.replaces = step, attempts[i], NONE
    e = Entry(kind=SNAPSHOT, time_ns=1, host=b"h", live=live, nlive=len(steps))
    with one.list(f"adopted{next(runs)}", whole=True) as l:
        began = time.process_time()
        assert one.lib.list_start(l.p, ctypes.c_uint64(0), ctypes.byref(e), None) == 0
        took = time.process_time() - began
        one.lib.commit_list_at.restype = ctypes.POINTER(ctypes.c_uint64)
        shown = [one.lib.commit_list_at(l.p, ctypes.c_size_t(i))[0:2] for i in range(one.lib.commit_list_count(l.p))]
        assert all(one.lib.commit_list_entry_live(l.p, ctypes.c_uint64(entry)) for _, entry in shown)
    return took, shown


def test_a_snapshot_in_any_order_of_steps(one):
    """Rows stand by entry; their steps may fall, and hundreds of thousands fit: taking them over must not move all for
    each."""
    r = random.Random(7)
    for steps in ([], [5], [3, 2, 1], r.sample(range(10**6), 500), [r.randrange(300) for _ in range(500)]):
        last = {step: i for i, step in enumerate(steps)}  # of two rows of one step the later one
        assert adopted(one, steps)[1] == [[step, last[step]] for step in sorted(last)]
    n = 60000
    rising, falling = adopted(one, range(n)), adopted(one, range(n, 0, -1))
    assert [step for step, _ in falling[1]] == list(range(1, n + 1))
    assert falling[0] < 10 * rising[0] + 1


@pytest.mark.parametrize("at", [64, 65])
def test_the_chain_goes_across_a_snapshot(one, at):
    """Who starts at a snapshot checks from there on; who starts at the beginning checks it, too."""
    committed(one, "r", 70)
    body = bytearray(one.entry_body("r", at))
    entry = one.commit_entry("00000000000000aa-0", 1000) if at == 65 else Entry(kind=SNAPSHOT, time_ns=1, host=b"h",
                                                                                live=None, nlive=0)
    one.entry_path("r", at).unlink()
    # in its place, after the entry before, but not what the next one was written after
    one.put_raw("r", at, entry)
    assert one.entry_body("r", at) != body
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert list(skipped(l)) == [at + 1] and f"entry {at} as that entry is here" in skipped(l)[at + 1]
    refused(one, "r", 1)
    one.entry_path("r", at).unlink()
    entry.before.bytes[0] ^= 1
    one.put_raw("r", at, entry, before=bytes(range(32)))
    with one.list("r", whole=True) as l:
        assert list(skipped(l)) == [at]
    with one.list("r") as l:
        assert list(skipped(l)) == ([65] if at == 65 else [65])


def test_entries_of_the_other_format(one):
    """A body of version 1 says no place: in a store of version 2 it is damage."""
    committed(one, "r", 3)
    entry = one.commit_entry("00000000000000aa-0", 1)
    one.entry_path("r", 1).unlink()
    body = Buf()
    entry.version = 1
    assert one.lib.proto_entry_encode(ctypes.byref(entry), ctypes.byref(body)) == 0
    one.put_body("r", 1, ctypes.string_at(body.data, body.len))
    one.lib.base_buf_release(ctypes.byref(body))
    with one.list("r") as l:
        assert skipped(l) == {1: "it has format 1, but the store has format 2"} and sorted(l.steps()) == [0, 2]


# ---- entries accepted as damaged ----

def accept(l, *numbers):
    l.lib.commit_list_accept.restype = ctypes.c_int64
    return l.api.call(l.lib.commit_list_accept, l.p, (ctypes.c_uint64 * len(numbers))(*numbers),
                      ctypes.c_size_t(len(numbers)))


def ruin(api, run, n):
    api.entry_path(run, n).write_bytes(b"")


def test_accepted_entries_stop_nobody(one):
    committed(one, "r", 12, removed=(3,))     # entry 4 removes step 3
    for n in (2, 4, 7):
        ruin(one, "r", n)
    with one.list("r") as l, one.list("r") as late:
        assert sorted(skipped(l)) == [2, 4, 7]
        assert accept(l, 2, 4) == 13
        assert l.damaged == 1
        with pytest.raises(Failed, match="entry 2 is accepted as damaged already") as e:
            accept(l, 2, 7)
        assert e.value.code == -errno.EALREADY
        with pytest.raises(Failed, match="entry 8 is not damaged") as e:
            accept(l, 7, 8)
        assert e.value.code == -errno.EINVAL
        refused(one, "r", 1)
        assert late.refresh() == 1 and late.damaged == 1
        assert accept(late, 7) == 14
        l.refresh()
        assert l.put(one.commit_entry("00000000000000aa-0", 100)) == 15
        for other in (l, late):
            other.refresh()
            assert other.damaged == 0 and sorted(other.steps()) == [0, 1, 3, 4, 5, 7, 8, 9, 10, 11, 100]
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and sorted(l.steps()) == [0, 1, 3, 4, 5, 7, 8, 9, 10, 11, 100]
    committed(one, "r", 60, first=200)        # a snapshot of it
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and len(l.steps()) == 71
    collects(one)


def test_accepted_is_nothing_for_who_can_read_it(one):
    """All readers see the same, whatever each of them can read: who had taken it begins again."""
    committed(one, "r", 8)
    copy = one.entry_path("r", 5).read_bytes()
    with one.list("r") as sees:
        ruin(one, "r", 5)
        with one.list("r") as l:
            accept(l, 5)
        one.entry_path("r", 5).write_bytes(copy)
        assert 5 in sees.steps()
        sees.refresh()
        assert sorted(sees.steps()) == [0, 1, 2, 3, 4, 6, 7] and sees.damaged == 0
        assert sees.put(one.commit_entry("00000000000000aa-0", 5)) == 9
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert sorted(l.steps()) == list(range(8)) and l.steps()[5][0] == 9


def test_accept_at_a_snapshots_number(one):
    """A list that lacks an entry makes no snapshot; the snapshot before an accepted entry keeps what it says."""
    committed(one, "r", 63)
    with one.list("r") as l:
        assert l.put(one.commit_entry("00000000000000aa-0", 900)) == 63
    ruin(one, "r", 40)
    with one.list("r") as l:
        assert accept(l, 40) == 64 and l.next == 65
    committed(one, "r", 70, first=1000)
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and len(l.steps()) == 133 and 40 not in l.steps()
    ruin(one, "r", 10)                        # long ago: a snapshot that knew it stands at 128
    with one.list("r", whole=True) as l:
        accept(l, 10)
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and len(l.steps()) == 133 and 10 in l.steps()


def test_accepting_a_snapshot(one):
    committed(one, "r", 140)
    ruin(one, "r", 128)
    with one.list("r") as l:
        assert list(skipped(l)) == [128]
        accept(l, 128)
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and len(l.steps()) == 140
    committed(one, "r", 1, first=500)


def test_the_chain_begins_anew_after_an_accepted_entry(one):
    """The entry after an entry that cannot be read says zeros, or what the lost one was: neither can be checked."""
    committed(one, "r", 4)
    ruin(one, "r", 3)
    with one.list("r", whole=True) as l:
        l.lib.commit_list_accept.restype = ctypes.c_int64
        assert accept(l, 3) == 4
    assert parse_before(one.entry_body("r", 4)) == bytes(32)
    committed(one, "r", 2, first=10)
    swap(one.entry_path("r", 5), one.entry_path("r", 6))
    with one.list("r", whole=True) as l:
        assert sorted(skipped(l)) == [5, 6]


def parse_before(body):
    return next(v for n, _, v in parse(body) if n == 13)


def test_entries_of_unknown_kinds_decide_nothing(one):
    """They count in the chain. Readers pass over them; writers and the collector are refused by name
    (docs/format/versions.md)."""
    committed(one, "r", 3)
    head = field(1, 2) + field(3, 9) + field(5, b"h") + field(11, b"r") + field(12, 3)
    one.put_body("r", 3, head + field(13, hashlib.sha256(one.entry_body("r", 2)).digest()) +
                 field(50, b"of a later version"))
    with one.list("r") as l:
        assert l.damaged == 0 and l.next == 4 and sorted(l.steps()) == [0, 1, 2]
        for refused in (lambda: l.put(one.commit_entry("00000000000000aa-0", 3)), one.gc,
                        lambda: one.remove_step("r", 1)):
            with pytest.raises(Failed, match=r"newer vckpt wrote entry 3 of its list, which is of a kind \(9\)") as e:
                refused()
            assert e.value.code == -errno.EPROTONOSUPPORT
    one.put_raw("r", 4, one.commit_entry("00000000000000aa-0", 3))
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and sorted(l.steps()) == [0, 1, 2, 3]
    swap(one.entry_path("r", 3), one.entry_path("r", 4))
    with one.list("r") as l:
        assert skipped(l) == {3: "it is entry 4", 4: "it is entry 3"}
