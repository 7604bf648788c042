# SPDX-License-Identifier: Apache-2.0
"""What did not change since the last step is hashed where it is and not copied: counts of copied bytes. Of 1,024 pieces
one is copied all the same, by chance, so a count is the least of some saves."""
import ctypes
import threading

import numpy
import pytest

from saverlib import Vckpt, ranks, store  # noqa: F401

MIB = 1 << 20


@pytest.fixture
def api(build):
    """The library with all symbols; a save waits a minute for the answer whether its base is there."""
    api = Vckpt(build, "tests/libvckpt_internal.so")
    api.patience = (ctypes.c_uint64 * 2).in_dll(api.lib, "saver_same_patience")
    api.patience[:] = 60 * 10**9, 60 * 10**9
    yield api
    api.patience[:] = 0, 0


@pytest.fixture
def rng(seed):
    return numpy.random.default_rng(seed)


def saved(saver, tensors, **options):
    """Timings of a save, and the bytes that it copied."""
    save = saver.save(tensors, **options)
    save.staged()
    save.committed()
    t = save.timings()
    save.free()
    return t, next(p.bytes for p in t.phase if p.name == b"copy")


def fewest(saver, tensors):
    """Bytes copied of what does not change. One piece in 1,024 is copied by chance: of 480 pieces, at four saves of
    ten."""
    least = saved(saver, tensors)[1]
    for _ in range(24):
        least = least and min(least, saved(saver, tensors)[1])
    return least


def same(found, tensors):
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in tensors.items()}


def made(rng, shapes, dtype="f4"):
    return {f"model/{i}": rng.standard_normal(shape).astype(dtype) for i, shape in enumerate(shapes)}


def test_what_is_unchanged_is_not_copied_and_takes_no_room(api, store, rng):
    tensors = made(rng, [(1500, 1100), (3, 700, 900), (2_000_003,), (70000, 3)] + [(1000, 1000)] * 4)
    whole = sum(a.nbytes for a in tensors.values())
    saver = api.saver(store, "run", ring=16 * MIB)
    t, copied = saved(saver, tensors)
    assert copied == whole and t.ring_waits > 0
    least, waits = whole, 1
    for _ in range(5):
        t, copied = saved(saver, tensors)
        least, waits = min(least, copied), min(waits, t.ring_waits)
        assert copied < whole / 10 and t.pieces_new == 0
        assert t.bytes_staged == t.bytes_unchanged == whole
    saver.free()
    assert least == waits == 0
    same(api.read(store, "run"), tensors)


def test_only_what_changed_is_copied(api, store, rng):
    tensors = made(rng, [(300, 300)] * 40)
    saver = api.saver(store, "run")
    saved(saver, tensors)
    for n in (3, 17, 3, 39):
        assert fewest(saver, tensors) == 0
        for tries in range(25):     # by chance another piece is copied, too
            tensors[f"model/{n}"][5, 5] += 1
            t, copied = saved(saver, tensors)
            assert t.pieces_new == 1
            if copied <= tensors[f"model/{n}"].nbytes:
                break
        assert tries < 24 and copied > 0
        same(api.read(store, "run"), tensors)
    saver.free()


def test_what_is_far_apart_is_copied_and_what_is_an_integer(api, store, rng):
    apart = rng.standard_normal((400, 300, 2)).astype("f4")[..., 0]
    rows = rng.standard_normal((400, 2, 300)).astype("f4")[:, 0]
    tensors = {"model/apart": apart, "model/rows": rows, "model/n": rng.integers(0, 9, (400, 300), "i4"),
               "model/small": rng.standard_normal(60).astype("f4")}
    saver = api.saver(store, "run")
    # in one batch with one that is apart, none is compared
    assert fewest(saver, tensors) == sum(a.nbytes for a in tensors.values())
    del tensors["model/apart"]
    assert fewest(saver, tensors) == 400 * 300 * 4 + 240
    saver.free()
    same(api.read(store, "run"), {n: numpy.ascontiguousarray(a) for n, a in tensors.items()})


def test_a_tensor_without_items_among_what_is_unchanged(api, store, rng):
    tensors = made(rng, [(300, 300), (0, 3), (400, 300)])
    saver = api.saver(store, "run", threads=1)
    saved(saver, tensors)
    assert fewest(saver, tensors) == 0
    saver.free()
    same(api.read(store, "run"), tensors)


@pytest.mark.parametrize("removed", [[5], range(6)])
def test_the_step_that_has_it_was_removed(api, store, vckpt, rng, removed):
    """Without a look at the store the saver cannot know; it learns it before it lets go of the caller's memory."""
    tensors = made(rng, [(500, 500)] * 3)
    whole = sum(a.nbytes for a in tensors.values())
    saver = api.saver(store, "run")
    saved(saver, tensors)
    assert min(saved(saver, tensors)[1] for _ in range(5)) == 0
    for step in removed:
        vckpt("rm", store, f"run/{step}")
    assert saved(saver, tensors)[1] == whole
    same(api.read(store, "run"), tensors)
    assert fewest(saver, tensors) == 0
    saver.free()


def test_a_late_answer_holds_no_one_back(api, store, rng):
    """Without any patience a save copies what it has not got the answer for, and later ones do not ask for a while."""
    tensors = made(rng, [(50, 50)] * 4)
    saver = api.saver(store, "run", threads=1)
    saved(saver, tensors)
    assert fewest(saver, tensors) == 0
    api.patience[1] = 0
    small = {n: a for n, a in tensors.items() if n == "model/0"}
    saved(saver, small), saved(saver, small)
    for _ in range(50):
        if saved(saver, small)[1]:
            break
    api.patience[1] = 60 * 10**9
    assert all(saved(saver, small)[1] == 10000 for _ in range(15))
    saved(saver, small)
    assert fewest(saver, small) == 0
    saver.free()
    same(api.read(store, "run"), small)


def test_little_is_not_worth_asking_for(api, store, rng):
    """It is copied in less time than a store needs for any answer."""
    tensors = made(rng, [(10, 10)])
    api.patience[:] = 0, 0
    saver = api.saver(store, "run")
    assert [saved(saver, tensors)[1] for _ in range(20)] == [400] * 20
    saver.free()


def test_saves_behind_another_are_copied(api, store, rng):
    tensors = made(rng, [(500, 500)] * 3)
    saver = api.saver(store, "run")
    saved(saver, tensors)
    for _ in range(3):
        saves = []
        for i in range(3):
            tensors[f"model/{i}"] = tensors[f"model/{i}"] + 1
            saves.append((saver.save(tensors), dict(tensors)))
        for save, want in saves:
            step = save.committed()
            save.free()
            same(api.read(store, "run", step), want)
    saver.free()


def test_attempts_that_are_not_kept(api, store, rng):
    """After 17 saves that each changed something, what is left of some of them is written again, and copied for it."""
    tensors = made(rng, [(60, 60)] * 40)
    saver, again = api.saver(store, "run"), 0
    for n in range(60):
        tensors[f"model/{n * 7 % 40}"] += 1
        t, copied = saved(saver, tensors)
        assert copied >= t.bytes_again
        again += t.bytes_again
        if n % 10 == 9:
            same(api.read(store, "run"), tensors)
    saver.free()
    assert again > 0


def test_memory_that_changes_meanwhile_does_no_harm_later(api, store, rng):
    """The rule says not to; who does it gets torn tensors in that step, but a step that verifies, and later ones are
    right."""
    tensors = made(rng, [(700, 700)] * 4)
    saver, stop = api.saver(store, "run"), False

    def change():
        while not stop:
            for a in tensors.values():
                a[::50, ::7] += 1
                a[::50, ::7] -= 1
    saved(saver, tensors)
    thread = threading.Thread(target=change)
    thread.start()
    for _ in range(8):
        saved(saver, tensors)
    stop = True
    thread.join()
    saved(saver, tensors)
    same(api.read(store, "run"), tensors)
    assert fewest(saver, tensors) == 0
    same(api.read(store, "run"), tensors)
    saver.free()


def test_ranks_and_their_shards(api, store, rng):
    """Each rank compares its own. What is compared among replicas is copied."""
    whole = rng.standard_normal((600, 400)).astype("f4")
    copied = {}

    def work(rank, saver):
        rows = numpy.ascontiguousarray(whole[rank * 300:(rank + 1) * 300])
        for step in range(6):
            fields = {"shape": whole.shape, "placements": "S(0)"}
            save = saver.save({"model/w": (rows, fields), "model/all": (whole, {"placements": "R"})}, step=step)
            save.committed()
            copied.setdefault(rank, []).append(next(p.bytes for p in save.timings().phase if p.name == b"copy"))
            save.free()
    assert ranks(api, store, "run", 2, work) == [None, None]
    for rank in (0, 1):
        assert copied[rank][0] > 400_000 and min(copied[rank][1:]) <= 16384, copied
    same(api.read(store, "run"), {"model/w": whole, "model/all": whole})
