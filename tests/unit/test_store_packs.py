# SPDX-License-Identifier: Apache-2.0
"""The cache of open packs: which stay open, and for how long."""
import contextlib
import ctypes as c
import os
import resource
import shutil
import time

import pytest

from protolib import ptr, u64
from ranklib import Meddler
from storelib import Api, scratch

PACKS = 100


def name_of(i):
    return b"0123456789abcdef-1-%d-model" % i


class Packs:
    """An open store with empty packs, and a count of what is asked of its storage."""

    def __init__(self, lib):
        self.lib, self.path = lib, scratch().resolve() / "s"
        self.api = Api(lib, self.path)
        s = self.api.p.contents
        for i in range(PACKS):
            w, size = ptr(), u64()
            assert lib.store_pack_writer_open(ptr(s.storage), s.info.id, name_of(i), c.byref(w)) == 0
            assert lib.store_pack_seal(w, c.byref(size)) == 0
        self.meddler = Meddler(self.api)

    def use(self, *numbers):
        for i in numbers:
            p = ptr()
            self.api.call(self.lib.store_pack_get, self.api.p, name_of(i), c.byref(p))
            self.lib.store_pack_put(self.api.p, p)

    def counted(self, *numbers):
        """(opens, reads) that it takes to use them."""
        before = dict(self.meddler.count)
        self.use(*numbers)
        return tuple(self.meddler.count.get(name, 0) - before.get(name, 0) for name in ("file_open", "file_read"))

    def file(self, i):
        (file,) = self.path.glob(f"packs/*/{name_of(i).decode()}.pack")
        return file

    def open(self):
        """Numbers of those that this process has open, whether they have a name or not."""
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{fd}")
                if path.startswith(f"{self.path}/packs/"):
                    found.add(int(path.rpartition("/")[2].split("-")[2]))
        return found


@pytest.fixture
def packs(lib):
    made = Packs(lib)
    yield made
    made.meddler.end()
    made.api.close()
    shutil.rmtree(made.path.parent)


def in_time(scenario, tries=5):
    """Unused packs are closed after a second: where the machine took longer than that, it is done again."""
    for _ in range(tries - 1):
        began = time.monotonic()
        try:
            return scenario()
        except AssertionError:
            if time.monotonic() - began < 0.5:
                raise
    return scenario()


@pytest.fixture
def few_descriptors():
    """So many packs stay open: a quarter of the descriptors that the process may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, limits[1]))
    yield 40
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_is_unused_the_longest_is_closed_first(packs, few_descriptors):
    most = few_descriptors

    def scenario():
        packs.use(*range(most))
        assert packs.open() == set(range(most))
        packs.use(0)                                    # used again, it stays
        packs.use(*range(most, 2 * most - 1))
        assert packs.open() == {0, *range(most, 2 * most - 1)}
    in_time(scenario)


def test_a_pack_that_is_opened_again_is_not_read_again(packs, few_descriptors):
    everything = range(PACKS)
    assert packs.counted(*everything) == (PACKS, PACKS)
    assert packs.counted(*everything) == (PACKS, 0)
    short = packs.file(7)
    short.chmod(0o600)
    with open(short, "r+b") as f:
        f.truncate(4096)
    with pytest.raises(Exception, match="pack .*-7-model is cut short"):
        packs.use(7)


def test_packs_in_use_stay_open_beyond_the_limit(packs, few_descriptors):
    held = [ptr() for _ in range(60)]
    for i, p in enumerate(held):
        packs.api.call(packs.lib.store_pack_get, packs.api.p, name_of(i), c.byref(p))
    assert packs.open() == set(range(60))
    for p in held:
        packs.lib.store_pack_put(packs.api.p, p)
    packs.use(99)
    assert len(packs.open()) <= few_descriptors


def test_a_deleted_pack_is_closed_while_others_are_read(packs):
    """The disk has its space again, whatever else is read meanwhile; what is there stays open."""
    def scenario():
        packs.use(*(there := [i for i in range(10) if i not in gone]))
        gone.extend(there[3:5])
        for i in there[3:5]:
            packs.file(i).unlink()
        end = time.monotonic() + 10
        while packs.open() & set(gone) and time.monotonic() < end:
            packs.use(0)
            time.sleep(0.01)
        assert packs.open() == set(there) - set(gone)
    gone = []
    in_time(scenario, 2)


def test_all_are_closed_when_none_is_used(packs):
    packs.use(*range(PACKS))
    end = time.monotonic() + 10
    while packs.open() and time.monotonic() < end:
        time.sleep(0.02)
    assert not packs.open()
    assert packs.counted(5) == (1, 0)
