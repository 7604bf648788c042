# SPDX-License-Identifier: Apache-2.0
"""Saves by a writer alone: what stands when, what is left after each kind of end, and signs of life."""
import ctypes
import errno
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time

import pytest

from ranklib import IN_TIME, Meddler, commit_in_flight
from storelib import (ABORT, ABORTED, ALIVE, COMMITTED, DAMAGED, DEAD, EABORTED, EBUSY, NONE, UNDECIDED, Api, Attempt,
                      Failed, digest, fresh,
                      open_all, packs_of, save)


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def files(api, top):
    return sorted(str(p.relative_to(api.path)) for p in (api.path / top).rglob("*") if p.is_file())


def visible(api, run):
    with api.list(run) as l:
        return l.steps()


def test_order_of_a_save(api):
    a = Attempt(api, "r")
    assert a.step == 0 and len(a.name) == 18
    assert files(api, "incoming") == [f"incoming/r/{a.name}/begin"] and len(files(api, "hosts")) == 1
    assert [x[0] + "-0" for x in api.launches()] == [a.name] and api.launches()[0][3] == ALIVE
    a.write(b"x" * 100)
    announcement = a.part()
    assert visible(api, "r") == {}
    entry = a.commit(announcement)
    assert visible(api, "r") == {0: (entry, a.name, 100)} and files(api, "incoming") == [] and packs_of(api) == a.packs
    a.free()
    assert files(api, "hosts") == [] and open_all(api, a)
    assert save(api, "r").step == 1 and save(api, "r", step=7).step == 7 and save(api, "r").step == 8


def test_step_is_taken(api):
    old = save(api, "r", step=5)
    with pytest.raises(Failed) as e:
        Attempt(api, "r", step=5)
    assert e.value.code == -errno.EEXIST and "5" in e.value.text and files(api, "hosts") == []
    new = save(api, "r", step=5, replace=True)
    assert visible(api, "r")[5][:2] == (new.entry, new.name) and old.entry != new.entry


def test_step_taken_meanwhile(api):
    """Two writers for one step: one gets it; the other's commit fails, and its abort stands in the list and leaves
    nothing."""
    a, b = Attempt(api, "r", step=3), Attempt(api, "r", step=3)
    a.write(b"a" * 100)
    b.write(b"b" * 100)
    a.commit()
    with pytest.raises(Failed) as e:
        b.commit()
    assert e.value.code == -errno.EEXIST
    b.abort("step taken")
    with api.list("r", whole=True) as l:
        assert l.attempt(b.name)[0] == ABORTED and l.attempt(a.name)[0] == COMMITTED and l.steps()[3][1] == a.name
    assert packs_of(api) == a.packs and files(api, "incoming") == []
    a.free()
    b.free()


def test_replace_race(api):
    save(api, "r", step=1)
    a, b = Attempt(api, "r", 1, replace=True), Attempt(api, "r", 1, replace=True)
    for x in (a, b):
        x.write(random.randbytes(100))
    a.commit()
    with pytest.raises(Failed) as e:
        b.commit()
    assert e.value.code == -errno.EEXIST
    b.abort()
    c = Attempt(api, "r", 1, replace=True)
    c.write(random.randbytes(100))
    api.remove_step("r", 1)
    c.commit()  # what it was to replace is gone: the step is free
    assert visible(api, "r")[1][1] == c.name
    for x in (a, b, c):
        x.free()


def test_abort_before_announcement(api):
    a = Attempt(api, "r")
    a.write(b"x" * 100)
    assert packs_of(api)
    a.abort()
    assert not packs_of(api) and files(api, "incoming") == [] and files(api, "runs") == []
    a.free()
    assert files(api, "hosts") == []


def test_aborted_by_somebody(api):
    """A slow writer finds itself aborted: it fails by name, and nothing becomes visible, though a snapshot came
    between."""
    a = Attempt(api, "r", step=200)
    a.write(b"x" * 100)
    with api.list("r") as l:
        l.put(api.entry(ABORT, attempt=a.name.encode(), reason=b"too slow by far"))
        for i in range(100):
            l.put(api.commit_entry(f"{i + 1:016x}-0", i, NONE, i))
    with pytest.raises(Failed) as e:
        a.commit()
    assert e.value.code == EABORTED and "too slow by far" in e.value.text
    a.abort()
    assert 200 not in visible(api, "r") and not packs_of(api)
    a.free()


def test_missing_pack_stops_the_commit(api):
    old = save(api, "r")
    a = Attempt(api, "r")
    a.base("r", old.entry, old.manifest)
    a.reuse(old)
    announcement = a.part()
    name = old.piece_pack[0].decode()
    pack = next((api.path / "packs").glob(f"*/{name}.pack"))
    data = pack.read_bytes()
    pack.write_bytes(data[:-1])
    with pytest.raises(Failed) as e:
        a.commit(announcement)
    assert name in e.value.text and sorted(visible(api, "r")) == [0]
    a.abort()
    a.free()
    pack.write_bytes(data)
    assert packs_of(api) == old.packs


def test_bases(api):
    one, two = save(api, "r"), save(api, "r")
    a = Attempt(api, "other")
    assert a.base("r", one.entry, one.manifest) == 0 and a.base("r", one.entry, one.manifest) == 0
    assert files(api, "incoming") == [f"incoming/other/{a.name}/base.0", f"incoming/other/{a.name}/begin"]
    api.remove_step("r", 1)
    for entry, manifest in ((two.entry, two.manifest), (one.entry, digest(9)), (77, one.manifest)):
        for _ in range(2):
            with pytest.raises(Failed) as e:
                a.base("r", entry, manifest)
            assert e.value.code == -errno.ESTALE
    results = []
    threads = [threading.Thread(target=lambda: results.append(a.base("r", one.entry, one.manifest))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [0] * 8 and len(files(api, "incoming")) == 5
    a.reuse(one)
    a.commit()
    a.free()
    assert open_all(api, a) and a.packs & one.packs


def test_no_step_number_while_another_writes(api):
    a = Attempt(api, "r")
    with pytest.raises(Failed) as e:
        Attempt(api, "r")
    assert e.value.code == EBUSY
    Attempt(api, "elsewhere").free()
    Attempt(api, "r", step=9).free()
    a.free()
    Attempt(api, "r").free()


def test_damaged_list_is_refused(api):
    save(api, "r")
    (api.path / "runs/r/000000000000").write_bytes(b"\0" * 8192)
    with pytest.raises(Failed) as e:
        Attempt(api, "r")
    assert e.value.code == DAMAGED and "run r" in e.value.text and files(api, "hosts") == []


def test_bad_arguments(api):
    for run, step in (("a/b", 1), ("", 1), ("r", 2**63)):
        with pytest.raises(Failed) as e:
            Attempt(api, run, step)
        assert e.value.code == -errno.EINVAL
    save(api, "r", step=2**63 - 1)
    with pytest.raises(Failed) as e:
        Attempt(api, "r")
    assert e.value.code == -errno.EOVERFLOW


def hold(build, path, run, out):
    api = Api(ctypes.CDLL(str(build / "tests" / "libvckpt_internal.so")), path, init=False)
    a = Attempt(api, run, step=4)
    a.write(b"q" * 100)
    out.put(a.name)
    time.sleep(600)


def killed_writer(api, build, run):
    """A writer that is killed after its first pack; returns its attempt's name. Reaped."""
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    p = spawn.Process(target=hold, args=(build, str(api.path), run, out))
    p.start()
    name = out.get(timeout=120)
    states = [x[3] for x in api.launches() if x[0] == name[:16]]
    os.kill(p.pid, signal.SIGKILL)
    p.join()
    assert states == [ALIVE]
    return name


def test_death_is_known_at_once(api, build):
    name = killed_writer(api, build, "r")
    assert [x[3] for x in api.launches()] == [DEAD]
    assert save(api, "r").step == 0  # nobody is at work any more
    with api.list("r", whole=True) as l:
        assert l.attempt(name)[0] == UNDECIDED


@pytest.mark.full
def test_heartbeat_goes_on(api):
    a = Attempt(api, "r")
    first = api.launches()[0]
    deadline = time.monotonic() + 9
    while api.launches()[0][4] == first[4] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert api.launches()[0][4] == first[4] + 1
    time.sleep(0.2)
    assert len(files(api, "hosts")) == 1
    a.free()
    assert files(api, "hosts") == []


def test_entry_cannot_be_written(api):
    """The outcome of a commit whose entry cannot be written is settled before `failed` is told."""
    a = Attempt(api, "r", step=1)
    a.write(b"x" * 100)
    announcement = a.part()
    folder = api.path / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_bytes(b"in the way")
    with pytest.raises(Failed):
        a.commit(announcement)
    folder.unlink()
    a.abort("cannot write")
    with api.list("r", whole=True) as l:
        assert l.attempt(a.name)[0] == ABORTED and l.steps() == {}
    assert not packs_of(api) and files(api, "incoming") == []
    a.free()


@pytest.mark.parametrize("lands", [True, False])
def test_abort_tells_what_became_of_it(api, lands):
    """Undecided while nothing can be written; then what the list says: a commit that was in flight, or the abort."""
    a = Attempt(api, "r", step=1)
    a.write(b"x" * 100)
    announcement = a.part()
    m = Meddler(api)
    commit_in_flight(m, "r", lands)
    with pytest.raises(Failed) as e:
        a.commit(announcement)
    assert e.value.code == -errno.EINPROGRESS
    m.answer["put"], in_flight = lambda args: -errno.EIO, m.answer["put"]
    assert a.abort("no")[0] == -errno.EINPROGRESS and len(packs_of(api)) == 2
    m.answer["put"] = in_flight
    code, text, entry = a.abort(IN_TIME)
    m.end()
    assert (code, entry) == ((0, visible(api, "r")[1][0]) if lands else (EABORTED, NONE))
    assert lands or "in time" in text
    assert len(packs_of(api)) == (2 if lands else 0) and sorted(visible(api, "r")) == ([1] if lands else [])
    assert a.abort("once more")[0] == code
    a.free()


def test_abort_of_what_was_not_announced(api):
    """Nobody can have committed it: that it failed is certain, whatever can be written."""
    a = Attempt(api, "r", step=1)
    a.write(b"x" * 100)
    m = Meddler(api)
    m.answer["put"] = lambda args: -errno.EIO
    assert [a.abort("no")[:2] for _ in range(2)] == [(EABORTED, "r: step 1: no")] * 2
    m.end()
    assert not packs_of(api) and files(api, "incoming") == [] and files(api, "runs") == []
    a.free()


def test_a_short_fault_does_not_fail_a_save(api):
    """The list cannot be written for a moment: the commit is tried again."""
    a = Attempt(api, "r", step=1)
    a.write(b"x" * 100)
    announcement, m = a.part(), Meddler(api)
    until = time.monotonic() + 0.5
    m.answer["put"] = (lambda args: -errno.EIO if b"runs/r/0" in ctypes.string_at(args[1]) and time.monotonic() < until
                       else None)
    a.commit(announcement)
    m.end()
    assert sorted(visible(api, "r")) == [1] and files(api, "incoming") == []
    a.free()


def test_the_announcement_of_a_writer_alone_is_no_file(api):
    """No other rank reads it: what is in the folder can be taken away, and the step is committed all the same."""
    a = Attempt(api, "r", 1)
    a.write(b"x" * 100)
    announcement = a.part()
    api.call(api.lib.commit_attempt_announce, a.p, ctypes.byref(announcement))
    assert [f.name for f in a.folder().iterdir()] == ["begin"]
    (a.folder() / "begin").unlink()
    api.call(api.lib.commit_attempt_wait, a.p, ctypes.c_int64(20000), ctypes.byref(ctypes.c_uint64()))
    a.free()
    assert sorted(visible(api, "r")) == [1] and files(api, "incoming") == []


@pytest.mark.parametrize("lands", [True, False])
def test_a_removal_that_the_storage_leaves_open(api, lands):
    """The list tells, where it can be read: done, or failed. Else, and where what was sent may land yet, it is
    undecided."""
    save(api, "r", step=1)
    m = Meddler(api)
    m.answer = dict.fromkeys(["size", "file_open", "read_whole"], lambda args: -errno.EIO if m.count.get("put")
                             else None)
    m.fail_puts(lands)
    with pytest.raises(Failed) as e:
        api.remove_step("r", 1)
    assert e.value.code == -errno.EINPROGRESS and "step 1" in e.value.text
    m.answer = {"sync_dir": lambda args: -errno.EIO}
    if not lands:
        with pytest.raises(Failed) as e:                # nothing was put
            api.remove_step("r", 1)
        assert e.value.code == -errno.EIO
    m.end()
    assert sorted(visible(api, "r")) == ([] if lands else [1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lands", [True, False])
def test_what_the_list_tells_of_a_put_that_failed(api, lands, shared):
    """A removal, and an abort by hand."""
    save(api, "r", step=1)
    left = Attempt(api, "r", 2)
    m = Meddler(api)
    m.fail_puts(lands)
    m.share(shared)
    with api.list("r", whole=True) as l:
        stop = (api.lib.commit_attempt_stop, api.p, l.p, left.name.encode(), b"by hand",
                ctypes.byref(ctypes.c_uint64()))
        for call in lambda: api.remove_step("r", 1), lambda: api.call(*stop):
            if lands:
                call()
                continue
            with pytest.raises(Failed) as e:
                call()
            assert e.value.code == -(errno.EINPROGRESS if shared else errno.EIO), e.value.text
            assert ("undecided whether" in e.value.text) == shared
    m.end()
    left.free()
    with api.list("r") as l:
        assert (sorted(l.steps()) == ([] if lands else [1]) and
                l.attempt(left.name)[0] == (ABORTED if lands else UNDECIDED))
