# SPDX-License-Identifier: Apache-2.0
"""Values that ranks declare to hold alike: what differs is refused by name on all ranks, mostly before anything is
written."""
import errno
import pathlib

import numpy
import pytest

from saverlib import Failed, api, ranks, store  # noqa: F401
from test_saver_jobs import saved

WORDS = numpy.arange(300.0)


def declare(api, store, values, world=2, **options):
    """values(rank): [(group, name, bytes)]; the saves' outcomes by rank."""
    def work(rank, saver):
        fields = {"shape": (world * 300,), "mesh": api.mesh(f"dp={world}"), "placements": "S(0)"}
        return saved(saver.save({"model/w": (WORDS, fields)}, commons=values(rank), step=7))
    return ranks(api, store, "run", world, work, **options)


def refused(done, *words):
    assert all(isinstance(e, Failed) and all(w in e.text for w in (*words, "per_rank=")) for e in done), done


def packs(store):
    return [p for p in (pathlib.Path(store) / "packs").rglob("*") if p.is_file()]


def test_alike(api, store):
    rows = [("state", "lr", b"\x01\x02"), ("state", "empty", b""), ("names", "layer.0/é", b"x" * 100000)]
    assert declare(api, store, lambda rank: rows[::-1] if rank else rows) == [7, 7]


def test_who_declares_nothing_is_not_asked(api, store):
    """Groups of some ranks (a pipeline's stages), and a rank without any."""
    assert declare(api, store, lambda rank: [("stage %d" % (rank // 2), "names", b"%d" % (rank // 2))] * (rank < 3),
                   world=4) == [7] * 4


@pytest.mark.parametrize("what,one,two", [
    ('"lr" of the group "state" has another value', [("state", "lr", b"1")], [("state", "lr", b"2")]),
    ('"seed" of the group "state" is declared by', [("state", "lr", b"1")],
     [("state", "lr", b"1"), ("state", "seed", b"")]),
    ('"a" of the group "state" is declared by', [("state", "a", b"1"), ("state", "b", b"1")], [("state", "b", b"2")]),
    ('"x" of the group "b" has another value', [("a", "x", b"1"), ("b", "x", b"1")],
     [("b", "x", b"2"), ("c", "x", b"1")]),
])
def test_what_differs_is_named(api, store, what, one, two):
    done = declare(api, store, lambda rank: two if rank else one)
    refused(done, what, "rank 0 on ", "rank 1 on ")
    assert not packs(store)


def test_too_many_to_name(api, store):
    """Beyond its bound `begin` has one digest for a group."""
    done = declare(api, store, lambda rank: [("state", f"value {i}", b"%d" % (i + rank * (i == 5000)))
                                             for i in range(9000)] + [("z", "x", b"")])
    refused(done, 'a value of the group "state" is not the same', "rank 0 on ", "rank 1 on ")
    assert not packs(store)


def test_ranks_that_nobody_compares_at_the_beginning(api, store):
    """Who puts `begin` has nothing of the group: then who commits compares."""
    def values(rank):
        return [[], [("half", "x", b"1")], [("half", "x", b"2")]][rank]
    done = declare_in_order(api, store, values, 3)
    refused(done, 'a value of the group "half" is not the same on rank 1 on ', "on rank 2 on ")


def declare_in_order(api, store, values, world):
    """Rank 0 has put `begin` before the others begin."""
    import threading
    import time
    there = threading.Event()

    def work(rank, saver):
        if rank:
            there.wait(60)
        fields = {"shape": (world * 300,), "mesh": api.mesh(f"dp={world}"), "placements": "S(0)"}
        save = saver.save({"model/w": (WORDS, fields)}, commons=values(rank), step=7)
        while not rank and not list((pathlib.Path(store) / "incoming").rglob("begin")):
            time.sleep(0.01)
        there.set()
        return saved(save)
    return ranks(api, store, "run", world, work)


def test_a_rank_alone(api, store):
    saver = api.saver(store, "run")
    assert saved(saver.save({"model/w": WORDS}, commons=[("g", "n", b"v")])) == 0
    saver.free()


def test_names(api, store):
    saver = api.saver(store, "run")
    save = saver.begin()
    for group, name in (("", "x"), ("x", ""), ("g" * 256, "x"), ("x", "n" * 65536)):
        with pytest.raises(Failed) as e:
            save.common(group, name, b"")
        assert e.value.code == -errno.EINVAL and "group" in e.value.text
    save.common("g", "n", b"1")
    save.common("g", "n", b"1")
    with pytest.raises(Failed) as e:
        save.submit()
    assert e.value.code == -errno.EEXIST and '"n" is declared twice in the group "g"' in e.value.text
    save.free()
    saver.free()
