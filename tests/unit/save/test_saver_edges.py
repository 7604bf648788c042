# SPDX-License-Identifier: Apache-2.0
"""The saver where callers, threads and stores behave badly: who may touch memory when, which errors are told and how
often, what one failed save leaves for the next, and stores that fill up, turn read-only or vanish. No wait is without
an end."""
import ctypes
import errno
import mmap
import multiprocessing
import re
import threading
import time
import types

import numpy
import pytest

import saverlib
import storelib
from ranklib import Meddler, commit_in_flight
from saverlib import ALONE, Attribute, Failed, NONE, Progress, SaveOptions, SaverOptions, api, bounded, ranks, store  # noqa: F401

FAILED = 6  # enum vckpt_state
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def rng():
    return numpy.random.default_rng(11)


class Guarded:
    """An array in memory of its own, which can be taken away: whoever looks at it after that dies."""

    def __init__(self, rng, shape, dtype):
        self.bytes = int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize
        self.map = mmap.mmap(-1, self.bytes)
        self.array = numpy.frombuffer(self.map, dtype).reshape(shape)
        self.array.view("u1").reshape(-1)[:] = numpy.frombuffer(rng.bytes(self.bytes), "u1")

    def take_away(self):
        size = -(-self.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert LIBC.mprotect(ctypes.c_void_p(self.array.ctypes.data), ctypes.c_size_t(size), 0) == 0


# ---- memory ----

@pytest.mark.parametrize("ring", [0, 8 << 20])
def test_memory_may_vanish_once_it_is_staged(api, store, rng, ring):
    saver = api.saver(store, "run", ring=ring, threads=3)
    for step in range(3):
        data = [Guarded(rng, (700, 1000), "f4") for _ in range(6)]
        before = {f"model/{i}": g.array.copy() for i, g in enumerate(data)}
        save = saver.save({f"model/{i}": g.array for i, g in enumerate(data)})
        save.staged()
        for g in data:
            g.take_away()
        assert save.committed() == step
        save.free()
        found = api.read(store, "run", step)
        assert all(found[n].tobytes() == a.tobytes() for n, a in before.items())
    saver.free()


def test_memory_may_vanish_once_an_error_is_told(api, store, rng):
    """A step that exists: the save fails while its data is copied, in a moment that differs from round to round."""
    saver = api.saver(store, "run", threads=3)
    saver.save({"model/w": numpy.ones(3)}, step=5).committed()
    for _ in range(12):
        data = [Guarded(rng, (1000, 1000), "f4") for _ in range(8)]
        save = saver.save({f"model/{i}": g.array for i, g in enumerate(data)}, step=5)
        try:
            save.staged()
        except Failed as e:
            assert e.code == -errno.EEXIST
        for g in data:
            g.take_away()
        with pytest.raises(Failed, match="step 5"):
            save.committed()
        save.free()
    saver.free()


def locked_bytes():
    with open("/proc/self/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    return 1024 * int(fields["VmRSS"].split()[0])


def test_one_ring_though_the_save_that_makes_it_fails(api, store):
    """The first save fails at once, while its ring is made; the next one comes meanwhile."""
    saver = api.saver(store, "run", threads=2)
    saver.save({}, step=5).committed()
    saver.free()
    before = locked_bytes()
    size = 384 << 20
    saver = api.saver(store, "run", ring=size, threads=4)
    data = {"model/w": numpy.ones((1024, 1024))}
    failing = [saver.save(data, step=5) for _ in range(2)]
    good = saver.save(data, step=6)
    assert good.committed() == 6
    used = locked_bytes() - before
    for save in failing:
        with pytest.raises(Failed):
            save.committed()
        save.free()
    good.free()
    saver.free()
    assert used < size * 3 // 2, used
    assert locked_bytes() - before < size // 2


def test_progress_ends_where_it_said(api, store, rng):
    saver = api.saver(store, "run")
    save = saver.save({f"model/{i}": rng.standard_normal(7 + i) for i in range(50)}, blobs=[("x", True, b"1" * 1000)])
    save.committed()
    p = save.progress()
    assert p.bytes_total == p.bytes_staged == p.bytes_done == 1000 + sum(8 * (7 + i) for i in range(50))
    save.free()
    saver.free()


# ---- what is told ----

def failed_save(saver):
    return saver.save({"model/w": numpy.ones(3)}, step=1)


def test_an_error_told_by_staged_is_not_told_again_by_close(api, store):
    saver = api.saver(store, "run", ring=4096)
    save = saver.save({"model/w": numpy.zeros((2048, 2048))})
    with pytest.raises(Failed, match="too small"):
        save.staged()
    saver.close()
    save.free()
    saver.free()


def test_close_tells_the_first_error_that_nobody_was_told(api, store):
    saver = api.saver(store, "run")
    failed_save(saver).committed()
    first, second, third = failed_save(saver), saver.save({"model/w": numpy.ones(3)},
                                                          bases=["no/3"]), failed_save(saver)
    while third.progress().state != FAILED:
        time.sleep(0.01)
    with pytest.raises(Failed, match="step 1"):
        first.committed()
    third.free()
    with pytest.raises(Failed, match="base no/3"):  # the second's
        saver.close()
    saver.close()
    with pytest.raises(Failed, match="base no/3"):
        second.committed()
    first.free()
    second.free()
    saver.free()


def test_close_is_silent_where_all_were_told(api, store):
    saver = api.saver(store, "run")
    failed_save(saver).committed()
    saves = [failed_save(saver) for _ in range(4)]
    for save in reversed(saves):
        with pytest.raises(Failed):
            save.committed()
        save.free()
    saver.close()
    saver.free()


@pytest.mark.parametrize("lands", [True, False])
def test_what_the_abort_finds_is_told(api, store, vckpt, lands):
    """Nobody can write to the list, until the save is given up: then its commit is found there and is a success; or the
    abort stands, and that is told."""
    saver = api.saver(store, "run", start_ms=500)
    # the first member of struct vckpt_saver
    handle = ctypes.cast(saver.p, ctypes.POINTER(ctypes.POINTER(storelib.Store)))[0]
    m = Meddler(types.SimpleNamespace(p=handle))
    commit_in_flight(m, "run", lands)
    save = saver.save({"model/w": numpy.arange(1000.0)}, step=3)
    try:
        told = save.committed()
    except Failed as e:
        told = e
    m.end()
    save.free()
    if lands:
        assert told == 3
    else:
        assert told.code == -errno.ECANCELED and "in time" in told.text
    again = saver.save({"model/w": numpy.arange(1000.0)}, step=4)
    assert again.committed() == 4
    again.free()
    saver.close()
    saver.free()
    assert [s["step"] for s in vckpt.json("ls", store, "run")["steps"]] == ([3, 4] if lands else [4])


def test_submitting_after_close_is_refused(api, store):
    saver = api.saver(store, "run")
    save = saver.begin()
    save.tensor("model/w", numpy.ones(3))
    saver.close()
    with pytest.raises(Failed, match="closed"):
        save.submit()
    for wait in (save.staged, save.committed):
        with pytest.raises(Failed):
            wait(1000)
    save.free()
    saver.free()
    with pytest.raises(Failed):
        api.read(store, "run")


def test_saves_may_be_freed_after_their_saver(api, store):
    saver = api.saver(store, "run")
    good, bad, open_ = saver.save({"model/w": numpy.ones(3)}, step=1), failed_save(saver), saver.begin()
    saver.free()
    assert good.committed() == 1
    with pytest.raises(Failed, match="step 1"):
        bad.committed()
    with pytest.raises(Failed):
        open_.submit()
    for save in (bad, open_, good):
        save.free()


def test_closing_by_many_threads_while_others_begin(api, store):
    for _ in range(10):
        saver = api.saver(store, "run", threads=2)
        said = []

        def writer():
            try:
                while True:
                    save = saver.save({"model/w": numpy.arange(100.0)})
                    said.append(save.committed())
                    save.free()
            except Failed as e:
                said.append(e)
        threads = [threading.Thread(target=writer) for _ in range(2)]
        for t in threads:
            t.start()
        time.sleep(0.03)
        closers = [threading.Thread(target=saver.close) for _ in range(4)]
        for t in closers:
            t.start()
        for t in threads + closers:
            t.join(60)
            assert not t.is_alive()
        assert all(not isinstance(e, Failed) or "closed" in e.text for e in said), said
        saver.free()


# ---- declarations ----

def test_another_mesh_in_the_same_memory_is_another_mesh(api, store):
    whole = numpy.arange(48.0).reshape(8, 6)

    def work(rank, saver):
        save = saver.begin()
        for i in range(8):  # by turns along rows and along columns; what free gives back malloc gives out again
            mesh = api.mesh("rows=2,columns=1" if i % 2 else "rows=1,columns=2")
            part = whole[4 * rank:4 * rank + 4] if i % 2 else whole[:, 3 * rank:3 * rank + 3]
            save.tensor(f"model/{i}", part, shape=whole.shape, mesh=mesh, placements="S(0),S(1)")
            api.lib.vckpt_mesh_free(mesh)
        save.submit()
        step = save.committed()
        save.free()
        return step
    done = ranks(api, store, "run", 2, work)
    assert done == [0, 0], done
    assert all((a == whole).all() for a in api.read(store, "run").values())


def test_a_rank_outside_a_mesh_may_name_its_tensors(api, store):
    whole = numpy.arange(40.0).reshape(8, 5)

    def work(rank, saver):
        mesh = api.mesh("dp=2", [0, 1])
        mine = whole[4 * rank:4 * rank + 4]  # of rank 2: (0, 5)
        save = saver.save({"model/w": (mine, {"shape": whole.shape, "mesh": mesh, "placements": "S(0)"})})
        step = save.committed()
        save.free()
        return step
    assert ranks(api, store, "run", 3, work) == [0] * 3
    assert (api.read(store, "run")["model/w"] == whole).all()


def test_boxes_in_any_order_and_number(api, store, rng):
    whole = rng.integers(0, 255, (6, 400), "u1")
    saver = api.saver(store, "run")
    save = saver.begin()
    for rows in ([3, 0], [5], [4, 1], [], [2]):
        part = numpy.concatenate([whole[r] for r in rows]) if rows else whole[0, :0]
        save.tensor("model/w", part, shape=whole.shape, boxes=[[[r, 1], [0, 400]] for r in rows])
    for _ in range(2):
        save.tensor("model/empty", whole[:0, 0], shape=(0, 4), boxes=[])
    save.submit()
    assert save.committed() == 0
    save.free()
    saver.free()
    found = api.read(store, "run")
    assert (found["model/w"] == whole).all() and found["model/empty"].shape == (0, 4)


def test_boxes_that_overlap_over_several_entries(api, store):
    whole = numpy.zeros((6, 400))
    saver = api.saver(store, "run")
    for again in ([[0, 2], [0, 400]], [[1, 3], [0, 400]]):
        save = saver.begin()
        save.tensor("model/w", whole[:2].reshape(-1), shape=whole.shape, boxes=[[[0, 2], [0, 400]]])
        try:
            save.tensor("model/w", whole[:again[0][1]].reshape(-1), shape=whole.shape, boxes=[again])
            save.tensor("model/w", whole[2:].reshape(-1), shape=whole.shape, boxes=[[[2, 4], [0, 400]]])
            save.submit()
            save.committed()
            pytest.fail("it was taken")
        except Failed as e:
            assert "model/w" in e.text and ("overlap" in e.text or "twice" in e.text), e.text
        save.free()
    saver.free()


@pytest.mark.parametrize("fields,text", [
    (dict(flags=ALONE, boxes=[[[0, 8], [0, 8]]]), "alone"),
    (dict(flat=[0, 64, 0], boxes=[[[0, 8], [0, 8]]]), "flat"),
])
def test_what_excludes_each_other(api, store, fields, text):
    saver = api.saver(store, "run")
    save = saver.begin()
    with pytest.raises(Failed, match=text):
        save.tensor("model/w", numpy.ones(64), shape=(8, 8), **fields)
    save.free()
    saver.free()


def test_null_strings_are_refused(api, store):
    saver = api.saver(store, "run")
    for pairs, names, text in (([Attribute(None, b"x")], None, "attribute 0 of the 1 .*null pointer"),
                               ([Attribute(b"k", None)], None, "attribute 0 of the 1 .*null pointer"),
                               ([], [None], "base 0 of the 1 .*null pointer")):
        attributes = (Attribute * 1)(*pairs)
        bases = (ctypes.c_char_p * 1)(None)
        o = SaveOptions(ctypes.sizeof(SaveOptions), NONE, attributes, len(pairs), bases, 1 if names else 0, None, 0, 0)
        p = ctypes.c_void_p()
        with pytest.raises(Failed, match=text):
            api.call("vckpt_save_begin", saver.p, ctypes.byref(o), ctypes.byref(p))
    saver.free()


def test_each_fault_of_a_begin_has_its_sentence(api, store):
    saver, p = api.saver(store, "run"), ctypes.c_void_p()
    good = SaveOptions(ctypes.sizeof(SaveOptions), NONE, None, 0, None, 0, None, 0, 0)
    short = SaveOptions(ctypes.sizeof(SaveOptions) - 8, NONE, None, 0, None, 0, None, 0, 0)
    flags = SaveOptions(ctypes.sizeof(SaveOptions), NONE, None, 0, None, 0, None, 1 << 30, 0)
    for handle, options, text in ((None, good, "no saver is given"), (saver.p, None, "no options"),
                                  (saver.p, short, "struct vckpt_save_options has"),
                                  (saver.p, flags, "flags of the save")):
        with pytest.raises(Failed, match=text):
            api.call("vckpt_save_begin", handle, options and ctypes.byref(options), ctypes.byref(p))
    saver.free()


def test_a_base_of_a_run_that_cannot_be(api, store):
    api.saver(store, "a" * 128).free()
    saver = api.saver(store, "run")
    with pytest.raises(Failed, match="base"):
        save = saver.save({"model/w": numpy.ones(3)}, bases=["a" * 129 + "/0"])
        save.committed()
    saver.free()


def test_steps_at_the_ends(api, store):
    saver = api.saver(store, "run")
    for step in (0, 2**44 - 1):
        assert saver.save({"model/w": numpy.ones(3)}, step=step).committed() == step
    for step in (2**44, 2**63, 2**64 - 2):
        with pytest.raises(Failed):
            saver.begin(step=step)
    with pytest.raises(Failed):
        saver.save({"model/w": numpy.ones(3)}).committed()  # there is none after the last
    assert saver.save({"model/w": numpy.ones(3)}, step=7).committed() == 7
    saver.free()


def test_empty_things(api, store, vckpt):
    def work(rank, saver):
        out = []
        for tensors, blobs in (({}, []), ({}, [("b", True, b"")]), ({"model/e": numpy.zeros((3, 0))}, []),
                               ({"model/s": numpy.array(3.0)}, [])):
            save = saver.save(tensors, blobs=blobs if rank else [])
            save.staged()
            out.append(save.committed())
            save.free()
        return out
    for world in (1, 3):
        done = ranks(api, store, f"run{world}", world, work, launch=f"l{world}")
        assert done == [[0, 1, 2, 3]] * world, done


def test_attributes_as_many_and_as_large_as_can_be(api, store):
    saver = api.saver(store, "run")
    good = {f"k{i}": "x" * 100 for i in range(64)}
    try:
        save = saver.save({"model/w": numpy.ones(3)}, attributes=good)
        assert save.committed() == 0
    except Failed as e:
        assert "attributes" in e.text
    for bad in ({"k": "x" * (1 << 20)}, {f"k{i}": "v" for i in range(100000)}, {"a b": "c"}):
        with pytest.raises(Failed):
            saver.begin(attributes=bad)
    saver.free()


# ---- several saves, savers and runs ----

def test_an_open_save_holds_back_those_behind_it_until_it_is_freed(api, store):
    saver = api.saver(store, "run")
    open_ = saver.begin()
    behind = [saver.save({"model/w": numpy.full((500, 500), i)}) for i in range(3)]
    with pytest.raises(Failed) as e:
        behind[2].committed(200)
    assert e.value.code == -errno.ETIMEDOUT
    open_.free()
    for save in behind:
        save.staged(20000)
        save.committed(20000)
        save.free()
    saver.free()


def test_hundreds_in_the_queue(api, store, scale):
    saver = api.saver(store, "run", ring=1 << 20)
    data = numpy.arange(1000.0)
    n = scale(150, 1500)
    saves = [saver.save({"model/w": data}, step=i % 5, replace=True) for i in range(n)]
    for save in saves[::2]:
        save.free()
    for save in saves[1::2]:
        save.committed(120000)
        save.free()
    saver.close()
    saver.free()


def test_several_runs_at_once(api, store, rng):
    data = rng.standard_normal((600, 500))
    savers = [api.saver(store, f"run{i}") for i in range(6)]
    saves = [s.save({"model/w": data + i}) for _ in range(2) for i, s in enumerate(savers)]
    assert [s.committed() for s in saves] == [0] * 6 + [1] * 6
    for s in savers:
        s.close()
        s.free()
    for i in range(6):
        assert (api.read(store, f"run{i}", 1)["model/w"] == data + i).all()


def test_two_savers_of_one_run(api, store):
    first = api.saver(store, "run")
    second = api.saver(store, "run")  # another launch: it takes the run over
    assert second.save({"model/w": numpy.ones(3)}).committed() == 0
    with pytest.raises(Failed):
        first.save({"model/w": numpy.ones(3)}).committed()
    third = api.saver(store, "run", launch="x")
    with pytest.raises(Failed) as e:
        api.saver(store, "run", launch="x")  # that id is in use
    assert e.value.code == -errno.EEXIST
    for saver in (first, second, third):
        bounded(60, saver.free)


# ---- ranks that live and do not save ----

def outcome(save):
    try:
        return save.committed()
    except Failed as e:
        return e.code, e.text
    finally:
        save.free()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_lives_and_does_not_save_is_given_up(api, store, late):
    told, data = threading.Event(), {"model/w": numpy.ones(3)}

    def work(rank, saver):
        if rank == late:
            assert told.wait(60)
        first = outcome(saver.save(data))  # the late one's was decided before it began
        told.set()
        return first, outcome(saver.save(data)), outcome(saver.save(data))
    found = ranks(api, store, "run", 2, work, deadline_ms=500)
    for (code, text), *_ in found:
        assert code == -errno.ECANCELED and f"rank {late} on " in text, found
        assert f"it has not announced its part 0.5 s after rank {1 - late} on " in text and "lives" not in text
    assert found[0][1:] == found[1][1:] and isinstance(found[0][1], int), found


def test_a_rank_that_is_slow_within_the_deadline_is_waited_for(api, store):
    waited, data = threading.Event(), {"model/w": numpy.ones(3)}

    def work(rank, saver):
        if rank:
            assert waited.wait(60)
        save = saver.save(data)
        if not rank:
            with pytest.raises(Failed) as e:
                save.committed(1200)
            assert e.value.code == -errno.ETIMEDOUT
            waited.set()
        return outcome(save)
    assert ranks(api, store, "run", 2, work, deadline_ms=60000) == [0, 0]


def test_a_deadline_is_not_a_time_to_start(api, store):
    """A rank that has not come yet is waited for as a rank at the start is."""
    saver = api.saver(store, "run", rank=0, world=2, launch="two", deadline_ms=100, start_ms=60000)
    first = saver.save({"model/w": numpy.ones(3)})
    with pytest.raises(Failed) as e:
        first.committed(1000)
    assert e.value.code == -errno.ETIMEDOUT
    first.free()
    other = api.saver(store, "run", rank=1, world=2, launch="two")
    save = other.save({"model/w": numpy.ones(3)})
    save.free()
    for s in (other, saver):
        s.free()


def test_who_lives_and_does_not_save_is_told_once(api, store, capfd):
    """By one of those that wait: rank 1 would commit 2 s after rank 0."""
    told, data = threading.Event(), {"model/w": numpy.ones(3)}

    def work(rank, saver):
        if rank > 1:
            assert told.wait(60)
        save = saver.save(data)
        if rank <= 1:
            with pytest.raises(Failed):
                save.committed(3500)
            told.set()
        return outcome(save)
    assert ranks(api, store, "run", 8, work, start_ms=1000) == [0] * 8
    lines = [line for line in capfd.readouterr().err.splitlines() if "waiting" in line]
    moved = r" on \S+, whose heartbeat moved \d+ s ago; "
    assert len(lines) == 1 and re.match(
        "vckpt: run: step 0: waiting for 1 s for the part of " + "".join(f"rank {r}{moved}" for r in range(2, 7))
        + r"and 1 more\. Every rank of a job has to save; with a deadline", lines[0]), lines


def test_options_of_another_header(api, store):
    """A struct of measures, too: what is behind it is not the library's to write."""
    p, own = ctypes.c_void_p(), ctypes.sizeof(SaverOptions)
    options = SaverOptions(own, store.encode(), b"run", None, 0, 1)
    for size in (own - 8, own + 8, 0):
        options.size = size
        with pytest.raises(Failed, match=f"struct vckpt_saver_options has {own} bytes in this library.*{size} in the"):
            api.call("vckpt_saver_open", ctypes.byref(options), ctypes.byref(p))
    saver = api.saver(store, "run")
    save = saver.save({"model/w": numpy.ones(3)})
    for size in (0, ctypes.sizeof(Progress) - 8, ctypes.sizeof(Progress) + 8):
        assert api.lib.vckpt_save_progress(save.p, ctypes.byref(Progress(size))) == -errno.EINVAL
    save.committed()
    save.free()
    saver.free()


def test_failed_saves_leave_room_in_the_ring(api, store, rng):
    data = {f"model/{i}": rng.standard_normal((700, 700)) for i in range(6)}
    saver = api.saver(store, "run", ring=24 << 20, threads=3)
    saver.save({}, step=1).committed()
    for i in range(5):
        bad = saver.save(data, step=1)
        worse = saver.save(data, bases=["no/7"])
        good = saver.save(data, step=10 + i)
        assert good.committed(60000) == 10 + i
        for save in (bad, worse, good):
            save.free()
    with pytest.raises(Failed):
        saver.close()
    saver.free()


def child_of(save, queue):
    p, t = Progress(ctypes.sizeof(Progress)), saverlib.Timings(ctypes.sizeof(saverlib.Timings))
    queue.put([save.lib.vckpt_save_progress(save.p, ctypes.byref(p)),
               save.lib.vckpt_save_timings(save.p, ctypes.byref(t))])


def test_a_child_is_told_nothing_of_progress(api, store):
    saver = api.saver(store, "run")
    save = saver.save({"model/w": numpy.ones(3)})
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=child_of, args=(save, queue))
    child.start()
    assert queue.get(timeout=120) == [-errno.ECHILD] * 2
    child.join(120)
    assert save.committed() == 0
    save.free()
    saver.free()
