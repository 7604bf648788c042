# SPDX-License-Identifier: Apache-2.0
"""A list whose reading fails for a while, or whose memory: no error of reading is damage, nothing is half applied, no
listing is cut short, and a list of many entries is read several at once."""
import ctypes as c
import errno
import os
import shutil
import subprocess
import threading
import time

import pytest

from ranklib import Meddler
from storelib import ABORT, LAUNCH, REMOVE, SNAPSHOT, Api, Commit, Failed, Live, digest, fresh, save

READ_ONLY = 1


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def fill(api, steps, run="r"):
    for n in range(steps):
        api.put_raw(run, n, api.commit_entry(f"{n:016x}-0", n, mark=n))


def is_entry(args, n, run="r"):
    return c.string_at(args[1]) == f"runs/{run}/{n:012d}".encode()


def eio(m, n, times=None):
    """Reading entry n fails so often, or always. How often it did."""
    failed, lock = [0], threading.Lock()

    def answer(args):
        with lock:
            if not is_entry(args, n) or failed[0] == times:
                return None
            failed[0] += 1
            return -errno.EIO
    m.answer["read_whole"] = m.answer["file_open"] = answer
    return failed


def test_each_allocation_fails_in_turn(api, build):
    if "asan" in os.environ.get("VCKPT_PRELOAD", ""):
        pytest.skip("the sanitizer has an allocator of its own")
    n = 0

    def put(entry):
        nonlocal n
        api.put_raw("r", n, entry)
        n += 1
    put(api.entry(LAUNCH, launch=b"0" * 16, newest_step=0))
    for step in range(40):      # arrays and hash grow on the way
        put(api.commit_entry(f"{'0' * 16}-{step}", step, mark=step))
    put(api.entry(ABORT, attempt=b"0" * 16 + b"-40", reason=b"no reason"))
    put(api.commit_entry("1" * 16 + "-0", 3, replaces=4, mark=99))
    put(api.entry(REMOVE, removes=6))
    put(api.entry(LAUNCH, launch=b"2" * 16, newest_step=0))
    with api.list("r", whole=True) as l:
        steps = {s: (e, a.encode(), b) for s, (e, a, b) in l.steps().items()}
    live = [Live(e, Commit(step=s, attempt=a, replaces=2**64 - 1, manifest=digest(b), tensors=1, bytes=b))
            for s, (e, a, b) in steps.items()]
    live.sort(key=lambda x: x.entry)
    snapshot = api.entry(SNAPSHOT)
    snapshot.live, snapshot.nlive = (Live * len(live))(*live), len(live)
    put(snapshot)
    done = subprocess.run([build / "tests/alloc_fails", api.path, "r"], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 2 * n


def test_each_allocation_fails_when_the_rest_is_read(api, build):
    if "asan" in os.environ.get("VCKPT_PRELOAD", ""):
        pytest.skip("the sanitizer has an allocator of its own")
    with api.list("r") as l:
        for step in range(170):
            l.put(api.commit_entry(f"{step:016x}-0", step, mark=step))
            if step % 3 == 2:
                l.put(api.entry(REMOVE, removes=l.steps()[step // 2][0]))
    done = subprocess.run([build / "tests/alloc_fails", api.path, "r", "rest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 10


def test_an_entry_that_cannot_be_read_for_a_moment(api):
    """Neither damage nor an error: it is asked for again."""
    fill(api, 5)
    m = Meddler(api)
    failed = eio(m, 3, 5)
    try:
        with api.list("r") as l:
            assert l.damaged == 0 and sorted(l.steps()) == list(range(5))
        assert failed == [5]
    finally:
        m.end()


def test_a_writer_stays_before_it(api):
    """The call fails, with the storage's error; the next one goes on where it can be read again."""
    fill(api, 3)
    with api.list("r") as l:
        api.put_raw("r", 3, api.commit_entry(f"{3:016x}-0", 3))
        m = Meddler(api)
        try:
            failed = eio(m, 3)
            begin = time.monotonic()
            with pytest.raises(Failed) as e:
                l.put(api.commit_entry("f" * 16 + "-0", 9))
            took = time.monotonic() - begin
            assert e.value.code == -errno.EIO and "000000000003" in e.value.text and 2.5 < took < 60, (e.value, took)
            before = failed[0]
            with pytest.raises(Failed):     # its patience is over: one try
                l.refresh()
            assert failed[0] - before <= 4 and l.next == 3 and l.damaged == 0
            m.answer.clear()              # it can be read again
            assert l.put(api.commit_entry("f" * 16 + "-0", 9)) == 4 and l.damaged == 0
        finally:
            m.end()
        assert sorted(l.steps()) == [0, 1, 2, 3, 9]


def test_a_reader_goes_on_without_it(api):
    """And has it when it can be read again, in its place: a commit that was left out may have been removed since."""
    fill(api, 4)
    api.put_raw("r", 4, api.entry(REMOVE, removes=2))
    api.put_raw("r", 5, api.commit_entry("e" * 16 + "-0", 2, mark=50))
    reader = Api(api.lib, api.path, init=False, flags=READ_ONLY)
    m = Meddler(reader)
    try:
        eio(m, 4)
        begin = time.monotonic()
        with reader.list("r") as l:
            assert 2.5 < time.monotonic() - begin < 60
            # the newer commit of step 2 does not count without the removal
            assert l.damaged == 1 and l.steps()[2][0] == 2
            assert l.refresh() == 0
            m.answer.clear()              # it can be read again
            assert l.refresh() > 0 and l.damaged == 0 and l.steps()[2][0] == 5
            assert l.refresh() == 0
    finally:
        m.end()
        reader.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_reader_goes_on_without_a_snapshot(api, error):
    """It starts from the one before, whatever the error is called."""
    with api.list("r") as l:
        for n in range(70):
            l.put(api.commit_entry(f"{n:016x}-0", n, mark=n))
    reader = Api(api.lib, api.path, init=False, flags=READ_ONLY)
    m = Meddler(reader)
    try:
        for call in ("read_whole", "file_open"):
            m.answer[call] = lambda args: -error if is_entry(args, 64) else None
        with reader.list("r") as l:
            assert sorted(l.steps()) == list(range(70)) and l.damaged == 1
        m.answer.clear()
        with reader.list("r") as l:
            assert sorted(l.steps()) == list(range(70)) and l.damaged == 0
    finally:
        m.end()
        reader.close()


def test_one_copy_that_cannot_be_read(api):
    """A bad sector in one of the two copies: the other one will do."""
    fill(api, 3)
    m = Meddler(api)
    try:
        for copy in (0, 4096):
            bad = set()
            m.answer["read_whole"] = lambda args: -errno.EIO if is_entry(args, 1) else None
            m.answer["file_read"] = lambda args: bad.add(args[1]) or -errno.EIO if (args[1] or 0) == copy else None
            with api.list("r") as l:
                assert l.damaged == 0 and sorted(l.steps()) == [0, 1, 2] and bad
    finally:
        m.end()


def test_many_entries_are_read_several_at_once(api):
    """Of requests that take 2 ms each, 3,000 take less than half of what they take one after another; and the view is
    the same."""
    fill(api, 3000)
    with api.list("r", whole=True) as l:
        want = l.steps()
    m = Meddler(api)
    inner = m.old.contents.read_whole
    at_once, most, lock = 0, 0, threading.Lock()

    def slow(args):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.002)
        with lock:
            at_once -= 1
    m.answer["read_whole"] = slow
    try:
        begin = time.monotonic()
        with api.list("r", whole=True) as l:
            took = time.monotonic() - begin
            assert l.steps() == want and l.damaged == 0
    finally:
        m.end()
    print(f"{took:.2f} s, up to {most} at once", inner)
    assert most > 4


def unseen(m, n, seconds):
    """A cache that is older than entry n answers looks for it until so long from now. Listings are up to date."""
    end = time.monotonic() + seconds
    for call in ("read_whole", "file_open", "size"):
        m.answer[call] = lambda args: -errno.ENOENT if is_entry(args, n) and time.monotonic() < end else None


def test_a_cache_that_is_behind(api):
    """As clients of NFS have: looks find later entries, and not that one. It is no damage, and counts when it is
    seen."""
    fill(api, 6)
    reader = Api(api.lib, api.path, init=False, flags=READ_ONLY)
    m = Meddler(reader)
    try:
        unseen(m, 3, 0.5)
        with reader.list("r") as l:
            assert l.damaged == 0 and sorted(l.steps()) == list(range(6))
        unseen(m, 3, 600.0)
        with reader.list("r") as l:
            assert sorted(l.steps()) == [0, 1, 2, 4, 5]         # a reader goes on
            m.answer.clear()
            assert l.refresh() > 0 and l.damaged == 0 and sorted(l.steps()) == list(range(6))
    finally:
        m.end()
        reader.close()
    m = Meddler(api)
    try:
        unseen(m, 3, 600.0)
        with pytest.raises(Failed, match="its directory lists entry 3, which cannot be opened: a cache of the file"):
            api.list("r").__enter__()
    finally:
        m.end()


def test_an_entry_that_is_lost_is_looked_for_once(api):
    """The directory does not list it: nothing to wait for."""
    fill(api, 40)
    for n in range(5, 35, 3):
        api.entry_path("r", n).unlink()
    m = Meddler(api)
    try:
        with api.list("r", whole=True) as l:
            assert l.damaged == 10 and m.count["list_dirs"] == 1
        assert m.count["size"] <= 2 * 40 and m.count["read_whole"] <= 2 * 40, m.count
    finally:
        m.end()


@pytest.mark.parametrize("lost", [None, 30])
@pytest.mark.parametrize("answer", [lambda args: None, lambda args: 0], ids=["as it is", "older than all entries"])
def test_a_short_list_whose_directory_is_read(api, lost, answer):
    """A listing may lack what looks find."""
    fill(api, 40)
    if lost:
        api.entry_path("r", lost).unlink()
    m = Meddler(api)
    m.answer["list_dirs"] = answer
    try:
        with api.list("r", whole=True) as l:
            assert l.next == 40 and l.damaged == bool(lost)
    finally:
        m.end()


def test_a_directory_that_may_be_searched_and_not_listed(api):
    fill(api, 40)
    m = Meddler(api)
    m.answer["list_dirs"] = lambda args: -errno.EACCES
    try:
        with api.list("r", whole=True) as l:
            assert l.next == 40 and l.damaged == 0
    finally:
        m.end()


@pytest.mark.parametrize("behind", [1, 3])
def test_a_lost_entry_that_the_listing_is_too_old_for(api, behind):
    """The one lost and those behind it came after the listing: its number is not free."""
    fill(api, 40)
    lost, newer = 40 - behind - 1, [api.entry_path("r", n) for n in range(40 - behind, 40)]
    aside = [path.with_name(f".{path.name}") for path in newer]
    m = Meddler(api)

    def listed(_):
        for path, to in zip(newer, aside, strict=True):
            path.rename(to)

    def looked_at(_):
        for path, to in zip(newer, aside, strict=True):
            if to.exists():
                to.rename(path)

    api.entry_path("r", lost).unlink()
    m.answer |= {"list_dirs": listed, "size": looked_at}
    try:
        with api.list("r", whole=True) as l:
            assert l.next == 40 and l.damaged == 1
    finally:
        m.end()


def test_damage_and_errors_among_many(api):
    """What is wrong with one of many that are read at once is told of that one, in order."""
    fill(api, 300)
    path = api.entry_path("r", 100)
    path.chmod(0o600)
    path.write_bytes(bytes(8192))
    m = Meddler(api)
    try:
        eio(m, 200, 3)
        with api.list("r", whole=True) as l:
            assert l.damaged == 1 and sorted(l.steps()) == [s for s in range(300) if s != 100]
    finally:
        m.end()


def gc(build, path, words):
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={path},reads=1,{words}",
               LD_PRELOAD=str(build / "tests/libinterpose.so"))
    return subprocess.run([build / "tools/vckpt/vckpt", "gc", path, "--grace", "0"], capture_output=True, text=True,
                          env=env)


def test_a_listing_that_ends_early_frees_nothing(api, build, tmp_path):
    """getdents answers -ENOENT, which readdir takes for the end: in each listing of a collection in turn, and in all of
    the runs'."""
    for run in ("a", "b"):
        save(api, run)
        save(api, run)
    packs = sorted(p.name for p in api.path.glob("packs/*/*"))
    copy = tmp_path / "copy"
    shutil.copytree(api.path, copy)
    assert gc(build, copy, f"calls=getdents,list={tmp_path}/calls").returncode == 0
    listings = len((tmp_path / "calls").read_text().splitlines())
    fail = f"do=fail,errno={errno.ENOENT},calls=getdents"
    for words in [f"{fail},at={n}" for n in range(1, listings + 1)] + [f"{fail},path=runs,at=1,last=100000"]:
        done = gc(build, api.path, words)
        assert sorted(p.name for p in api.path.glob("packs/*/*")) == packs, (words, done.stderr)
        assert done.returncode == 0 or "Input/output error" in done.stderr, (words, done)
    assert listings > 10 and done.returncode != 0
