# SPDX-License-Identifier: Apache-2.0
"""Lists that no honest writer makes: what they cost goes by their files, not by the numbers that these have."""
import ctypes
import errno
import os
import random
import resource
import time

import pytest

from ranklib import Meddler
from storelib import (ABORTED, ACCEPT, DAMAGED, LAUNCH, NONE, REMOVE, SNAPSHOT, UNDECIDED, Api, Buf, Digest, Entry,
                      Failed, Live, alone, fresh)
from storelow import Ops, StorageHead
from test_list import accept, skipped

MISSING = "it is missing, though later entries exist"


@pytest.fixture
def one(lib):
    with fresh(lib) as api:
        yield api


class ListDamage(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("count", ctypes.c_uint64), ("damaged", ctypes.c_uint64),
                ("why", ctypes.c_char * 200)]


def stretches(l):
    """(first, count, how many of them are damaged) of each stretch of damaged entries."""
    l.lib.commit_list_damage_next.restype, at, d, out = ctypes.c_bool, ctypes.c_size_t(), ListDamage(), []
    while l.lib.commit_list_damage_next(l.p, ctypes.byref(at), ctypes.byref(d)):
        out.append((d.first, d.count, d.damaged))
    assert sum(damaged for *_, damaged in out) == l.damaged
    return out


def place(api, run, n, entry, before=bytes(32)):
    """Writes the file of an entry, with this `before`; returns what the next one has to have."""
    body, file, sha = Buf(), Buf(), Digest()
    entry.run, entry.number, entry.before = run.encode(), n, Digest((ctypes.c_uint8 * 32)(*before))
    alone(entry)
    assert api.lib.proto_entry_encode(ctypes.byref(entry), ctypes.byref(body)) == 0
    api.lib.base_sha256(ctypes.c_void_p(body.data), ctypes.c_size_t(body.len), ctypes.byref(sha))
    assert api.lib.store_record_encode(2, (ctypes.c_uint8 * 16)(*api.id), ctypes.c_void_p(body.data),
                                       ctypes.c_size_t(body.len), ctypes.byref(file)) == 0
    path = api.entry_path(run, n)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ctypes.string_at(file.data, file.len))
    for buf in (body, file):
        api.lib.base_buf_release(ctypes.byref(buf))
    return bytes(sha.bytes)


def imported(api, step):
    return api.commit_entry(f"{step + 1:016x}-0", step)


def snapshot(api, *steps):
    """Of steps whose commits have the steps' numbers."""
    live = (Live * len(steps))(*[Live(n, imported(api, n).commit) for n in steps])
    return Entry(kind=SNAPSHOT, time_ns=1, host=b"h", live=live, nlive=len(steps))


def chain(api, run, numbers, others={}):  # noqa: B006
    """Entry `others[n]` at each of these numbers, or a commit of step n."""
    before = bytes(32)
    for n in numbers:
        before = place(api, run, n, others.get(n) or imported(api, n), before)


# ---- gaps ----

@pytest.mark.parametrize("most", [61, 62])
def test_files_at_all_distances(vckpt, store, lib, most):
    """Doubling finds a file wherever it looks, and takes 2^60 for the length of the list."""
    api, end, half = Api(lib, store, init=False), 1 << most - 1, 1 << most - 2
    chain(api, "r", range(3))
    for k in range(2, most):
        api.entry_path("r", (1 << k) - 1).touch()
    for whole in (False, True):
        with api.list("r", whole) as l:
            assert sorted(l.steps()) == [0, 1, 2] and (l.next, l.damaged) == (end, end - 3)
            assert stretches(l)[-2:] == [(half, half - 1, half - 1), (end - 1, 1, 1)]
            with pytest.raises(Failed) as e:
                l.put(imported(api, 10))
            assert e.value.code == DAMAGED
    api.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if "asan" not in os.environ.get("VCKPT_PRELOAD", ""):      # which maps terabytes
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, hard))  # children have it, too
    try:
        assert vckpt("ls", store, "r").stdout.count("step-") == 3
        out = vckpt("verify", store, check=False)
        assert f"this entry and the {half - 2} after it are missing" in out.stdout + out.stderr
        out = vckpt("mend", store, check=False)
        assert "move it away and mend again" in out.stdout + out.stderr
        assert "damaged" in vckpt("gc", store, check=False).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_entries_far_away(one):
    """They count behind a gap of any length, and a snapshot is found before it and behind it."""
    far = 1 << 40
    numbers = [0, 1, *[(1 << k) - 1 for k in range(2, 41)], *range(far, far + 130)]
    chain(one, "behind", numbers, {far + 64: snapshot(one, far + 5)})
    numbers = [*range(71), *[(1 << k) - 1 for k in range(7, 41)]]
    chain(one, "before", numbers, {64: snapshot(one, 3, 60)})
    began = time.process_time()
    for whole in (False, True):
        with one.list("behind", whole) as l:
            assert l.next == far + 130 and sorted(l.steps()) == [far + 5, *range(far + 65, far + 130)]
        with one.list("before", whole) as l:
            assert l.next == far
            assert sorted(l.steps()) == [*([*range(64)] if whole else [3, 60]), *numbers[65:]]
    assert time.process_time() - began < 5


def test_gaps_are_what_is_missing(one):
    """Short gaps are looked at number by number, long ones in the directory: both tell the same."""
    r = random.Random(5)
    one.lib.commit_list_skipped.restype = ctypes.c_bool
    for case in range(8):
        run, n, there = f"g{case}", 0, set()
        while n < 600:
            more = r.choice([1, 1, 2, 30, 200])
            there |= set(range(n, n + more))
            n += more + r.choice([1, 3, 15, 16, 17, 18, 40, 63, 64, 65, 300])
        chain(one, run, sorted(there))
        with one.list(run, whole=True) as l, one.list(run) as other:
            known = {m for m in there if m < l.next}
            assert sorted(l.steps()) == sorted(other.steps()) == sorted(known)
            gone = {m: MISSING for m in range(l.next) if m not in known}
            assert skipped(l) == skipped(other) == gone
            assert all(l.lib.commit_list_skipped(l.p, ctypes.c_uint64(m)) == (m in gone) for m in range(l.next + 3))


def test_a_gap_that_is_accepted(one):
    """Some of its numbers, then all: then writers go on."""
    chain(one, "r", [0, 1, 66, 67])
    with one.list("r", whole=True) as l:
        assert stretches(l) == [(2, 64, 64)]
        accept(l, 2, 33, 34, 65)
        assert stretches(l) == [(2, 64, 60)] and len(skipped(l)) == 60
        with pytest.raises(Failed, match="entry 34 is accepted as damaged already") as e:
            accept(l, 3, 34)
        assert e.value.code == -errno.EALREADY
        with pytest.raises(Failed, match="entry 66 is not damaged"):
            accept(l, 3, 66)
    with one.list("r", whole=True) as l:
        assert stretches(l) == [(2, 64, 60)] and len(skipped(l)) == 60
        accept(l, *skipped(l))
        assert (l.damaged, stretches(l), skipped(l)) == (0, [], {})
        assert l.put(imported(one, 500)) == 70
    for whole in (False, True):
        with one.list("r", whole) as l:
            assert l.damaged == 0 and sorted(l.steps()) == [0, 1, 66, 67, 500] and l.next == 71


@pytest.mark.parametrize("times", [10, 300])
def test_acceptances_that_uncover_others(one, times):
    """Each acceptance follows an entry that it does not name as the one before, until a later one accepts that entry:
    the list begins anew for each, as often as it has entries."""
    def accepts(n):
        return Entry(kind=ACCEPT, time_ns=1, host=b"h", accepts=(ctypes.c_uint64 * 1)(n), naccepts=1)
    place(one, "r", 0, imported(one, 0))
    place(one, "r", 1, imported(one, 1), bytes([1] * 32))
    for i in range(1, times):
        place(one, "r", 2 * i, imported(one, 2 * i))
        before = place(one, "r", 2 * i + 1, accepts(2 * i - 2), bytes([1] * 32))
    place(one, "r", 2 * times, accepts(2 * times - 2), before)
    if times > 16:
        with pytest.raises(Failed, match="run r: .* no vckpt wrote this list") as e:
            one.list("r", whole=True)
        assert e.value.code == DAMAGED
    else:
        with one.list("r", whole=True) as l:
            assert l.damaged == 0 and sorted(l.steps()) == [1]


def test_a_short_fault_of_the_directory(one):
    """It is tried again, like that of an entry."""
    chain(one, "r", [0, 1, 34])
    m, until = Meddler(one), time.monotonic() + 0.3
    m.answer["list_dirs"] = lambda args: -errno.EIO if time.monotonic() < until else None
    with one.list("r", whole=True) as l:
        assert sorted(l.steps()) == [0, 1, 34] and l.damaged == 32 and m.count["list_dirs"] > 1
    m.end()


# ---- steps and launches in any order ----

def taken(one, entries):
    """CPU seconds in which a list takes these entries, and the list."""
    l = one.list(f"t{random.getrandbits(60)}", whole=True)
    l.texts = entries  # of which the list has the addresses
    began = time.process_time()
    for e in entries:
        assert one.lib.list_take(l.p, ctypes.byref(e)) == 1
    one.lib.list_steps_settle(l.p)
    return time.process_time() - began, l


def test_steps_in_falling_order(one):
    n = 20000
    rising, a = taken(one, [imported(one, i) for i in range(n)])
    falling, b = taken(one, [imported(one, n - 1 - i) for i in range(n)])
    with a, b:
        assert sorted(a.steps()) == sorted(b.steps()) == list(range(n))
    assert falling < 5 * rising + 0.5


def test_steps_in_any_order(one):
    """Commits, replacements and removals, against a dict."""
    r, live, entries = random.Random(11), {}, []
    for i in range(6000):
        step = r.randrange(2500)
        if live and r.random() < 0.3:
            entries.append(one.entry(REMOVE, removes=live.pop(r.choice(list(live)))))
        else:
            entries.append(one.commit_entry(f"{i + 1:016x}-0", step, live.get(step, NONE)))
            live[step] = i
    _, l = taken(one, entries)
    with l:
        assert {step: entry for step, (entry, *_) in l.steps().items()} == live
        one.lib.commit_list_find.restype = ctypes.c_void_p
        assert all(bool(one.lib.commit_list_find(l.p, ctypes.c_uint64(s))) == (s in live) for s in range(2500))


def test_many_launches(one):
    few, a = taken(one, [one.entry(LAUNCH, launch=f"{i:016x}".encode(), newest_step=NONE) for i in range(1000)])
    many, b = taken(one, [one.entry(LAUNCH, launch=f"{i:016x}".encode(), newest_step=NONE) for i in range(40000)])
    with a, b:
        assert b.attempt(f"{39999:016x}-7")[0] == UNDECIDED
        assert b.attempt(f"{7:016x}-7") == (ABORTED, 8)
        assert b.attempt(f"{40000:016x}-7")[0] == UNDECIDED
    assert many < 40 * 3 * few + 0.5


# ---- a storage whose answers do not fit together ----

@pytest.mark.parametrize("entries", [0, 3])
@pytest.mark.parametrize("read", [errno.ENOENT, errno.ELOOP])
def test_a_storage_that_finds_every_name(one, entries, read):
    """A look at any name finds a file, which cannot be read: reading ends, whatever is said of the rest."""
    chain(one, "r", range(entries))
    storage = ctypes.cast(one.p.contents.storage, ctypes.POINTER(StorageHead)).contents
    real = ctypes.pointer(storage.ops.contents)         # storage.ops itself is what the field has at the time
    most = one.entry_path("r", entries).name.encode()
    ops = Ops.from_buffer_copy(real.contents)
    ops.size = type(ops.size)(lambda s, name, ret: 0)
    ops.read_whole = type(ops.read_whole)(
        lambda s, name, *to: -read if name[-12:] >= most else real.contents.read_whole(s, name, *to))
    with one.list("r") as before:
        storage.ops, began = ctypes.pointer(ops), time.process_time()
        try:
            for whole in (False, True):
                with one.list("r", whole) as l:
                    assert sorted(l.steps()) == [*range(entries)] and l.damaged > 1 << 60
            if read == errno.ELOOP:
                with pytest.raises(Failed, match="that the directory does not list"):
                    before.refresh()
            else:
                before.refresh()
        finally:
            storage.ops = real
    assert time.process_time() - began < 5
