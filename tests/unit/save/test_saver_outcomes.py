# SPDX-License-Identifier: Apache-2.0
"""What a saver tells where the store fails for a moment, and what it leaves behind: as the list says in the end."""
import ctypes
import errno
import pathlib
import time
import types

import numpy
import pytest
import storelib
from ranklib import Meddler
from saverlib import Failed, api, store  # noqa: F401 (fixtures)

ECANCELED = errno.ECANCELED                             # VCKPT_EABORTED


@pytest.fixture
def meddle(api, store):                                 # noqa: F811
    """A saver of one rank, and answers in the place of its storage's."""
    made = []

    def make(**options):
        saver = api.saver(store, "run", **options)
        meddler = Meddler(
            types.SimpleNamespace(p=ctypes.cast(saver.p, ctypes.POINTER(ctypes.POINTER(storelib.Store)))[0]))
        made.append((saver, meddler))
        return saver, meddler
    yield make
    for saver, meddler in made:
        meddler.end()
        saver.free()


def test_an_abort_that_is_written_late_is_told_as_one(meddle):
    """The announcement fails, and for a moment the abort cannot be written either: undecided, until it is."""
    saver, meddler = meddle(start_ms=20000, world=2, launch="a launch")    # a rank alone puts no announcement
    since = []

    def put(args):
        name = ctypes.string_at(args[1])
        if b"/part.0" in name:
            since.append(time.monotonic())
            return -errno.EIO
        return -errno.EIO if name.startswith(b"runs/run/0") and since and time.monotonic() - since[0] < 0.4 else None

    meddler.answer["put"] = meddler.answer["put_passing"] = put
    save = saver.save({"model/w": numpy.arange(1000.0)}, step=3)
    with pytest.raises(Failed) as e:
        save.committed()
    meddler.end()
    save.free()
    assert e.value.code == -ECANCELED and "aborted" in e.value.text and "part.0" in e.value.text, (
        (e.value.code, e.value.text))


def test_packs_that_nobody_was_told_of_go_at_once(meddle, store):        # noqa: F811
    """A pack cannot be sealed, and the list cannot be written: what was sealed before is deleted all the same."""
    saver, meddler = meddle(start_ms=600)
    seals = []
    rng = numpy.random.default_rng(1)

    def seal(args):
        seals.append(len(list((pathlib.Path(store) / "packs").rglob("*.pack"))))
        return -errno.EIO if len(seals) == 2 else None

    meddler.answer["writer_seal"] = seal
    meddler.answer["put"] = lambda args: -errno.EIO if ctypes.string_at(args[1]).startswith(b"runs/run/0") else None
    save = saver.save({"a/w": rng.standard_normal(100000), "b/w": rng.standard_normal(100000)}, step=3)
    with pytest.raises(Failed):
        save.committed()
    meddler.end()
    save.free()
    assert seals[1] == 1 and not list((pathlib.Path(store) / "packs").rglob("*.pack"))
    again = saver.save({"a/w": rng.standard_normal(1000)}, step=4)
    again.committed()
    again.free()


def test_a_rank_that_never_comes_is_waited_for_once(api, store):         # noqa: F811
    """Saves that are queued find out together; one that comes after all is waited for again."""
    saver = api.saver(store, "run", rank=0, world=2, launch="never", start_ms=2500, heartbeat_ms=4000)
    saves, begin, took = [saver.save({"m/w": numpy.arange(9.0)}) for _ in range(5)], time.monotonic(), []
    for save in saves:
        with pytest.raises(Failed, match="did not come within 2.5 s"):
            save.committed()
        took.append(time.monotonic() - begin)
        save.free()
    assert took[0] >= 2.4 and took[4] - took[0] < 7.5, took     # 10 s if each were to wait
    other = api.saver(store, "run", rank=1, world=2, launch="never", start_ms=2500, heartbeat_ms=4000)
    late = saver.save({"m/w": numpy.arange(9.0)}, step=9)
    time.sleep(0.3)
    second = other.save({"m/w": numpy.arange(9.0)}, step=9)
    assert late.committed() == second.committed() == 9
    for save in (late, second):
        save.free()
    other.free()
    saver.free()
