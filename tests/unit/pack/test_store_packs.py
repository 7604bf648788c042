# SPDX-License-Identifier: Apache-2.0
"""The cache of open packs: which stay open, and for how long."""
import contextlib
import ctypes as c
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import pytest

import proclib
from protolib import ptr, u64
from ranklib import Meddler
from storelib import Api, scratch

PACKS = 300


def name_of(i):
    return b"0123456789abcdef-1-%d-model" % i


class Packs:
    """An open store with empty packs, and a count of what is asked of its storage."""

    def __init__(self, lib):
        self.lib, self.path = lib, scratch().resolve() / "s"
        self.api = Api(lib, self.path)
        for i in range(PACKS):
            self.make(i)
        self.meddler = Meddler(self.api)

    def make(self, i):
        s, w, size = self.api.p.contents, ptr(), u64()
        assert self.lib.pack_writer_open(ptr(s.storage), s.info.id, name_of(i), c.byref(w)) == 0
        assert self.lib.pack_seal(w, c.byref(size)) == 0

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

    def deleted(self):
        """Files that this process has open though they have no name."""
        return [path for path in self.links() if path.endswith(" (deleted)")]

    def links(self):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{fd}")
                if path.startswith(f"{self.path}/"):
                    yield path

    def open(self):
        """Numbers of those that this process has open, whether they have a name or not."""
        return {int(path.rpartition("/")[2].split("-")[2]) for path in self.links() if "/packs/" in path}


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
    """So many packs stay open: a quarter of the descriptors that the process may have, less those that other tests hold
    in this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = time.monotonic() + 1.5
    while (others := sum(path.endswith(".pack") for path in proclib.open_files())) and time.monotonic() < end:
        time.sleep(0.05)                                # what is unused is closed
    most = max(40, (len(os.listdir("/proc/self/fd")) + 150) // 4) + others
    assert most - others <= PACKS // 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * most, limits[1]))
    yield most - others
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


def very_few_descriptors(build):
    packs = Packs(c.CDLL(f"{build}/tests/libvckpt_internal.so"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (56, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def scenario():
        packs.use(*range(30))
        assert packs.open() == set(range(16, 30))
    in_time(scenario)
    packs.meddler.end()
    packs.api.close()
    shutil.rmtree(packs.path.parent)


def test_it_leaves_most_of_very_few_descriptors(build):
    """In a process that has no others."""
    subprocess.run([sys.executable, "-c", f"import test_store_packs as t; t.very_few_descriptors({str(build)!r})"],
                   cwd=pathlib.Path(__file__).parent, check=True, timeout=120,
                   env={**os.environ, "LD_PRELOAD": os.environ.get("VCKPT_PRELOAD", ""),
                        "PYTHONPATH": os.pathsep.join(sys.path)})


def test_packs_in_use_stay_open_beyond_the_limit(packs, few_descriptors):
    number = few_descriptors + 20
    held = [ptr() for _ in range(number)]
    for i, p in enumerate(held):
        packs.api.call(packs.lib.store_pack_get, packs.api.p, name_of(i), c.byref(p))
    assert packs.open() == set(range(number))
    for p in held:
        packs.lib.store_pack_put(packs.api.p, p)
    packs.use(number)
    assert len(packs.open()) <= few_descriptors


def test_a_deleted_pack_is_closed_while_others_are_read(packs):
    """The disk has its space again, whatever else is read meanwhile; what is there stays open."""
    def scenario():
        packs.use(*(there := [i for i in range(10) if i not in gone]))
        gone.extend(there[3:5])
        for i in there[3:5]:
            packs.file(i).unlink()
        end = time.monotonic() + 120
        while packs.open() & set(gone) and time.monotonic() < end:
            packs.use(0)
            time.sleep(0.01)
        assert packs.open() == set(there) - set(gone)
    gone = []
    in_time(scenario)


def in_one_bucket(lib, n):
    """Numbers of packs whose names the cache keeps in one bucket of its hash."""
    lib.base_table_hash.restype, lib.base_table_hash.argtypes = c.c_uint32, [c.c_char_p, c.c_size_t]
    buckets, i = {}, PACKS
    while True:
        numbers = buckets.setdefault(lib.base_table_hash(name_of(i), len(name_of(i))) % 2048, [])
        numbers.append(i)
        if len(numbers) == n:
            return numbers
        i += 1


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_every_deleted_pack_is_closed(packs, used):
    """Also the last of many that the cache looks at, and one that is used again and again: whoever mends a pack puts
    another file in its place."""
    numbers = in_one_bucket(packs.lib, 70)
    for i in numbers:
        packs.make(i)
    gone = numbers[0]
    packs.use(*numbers)
    packs.file(gone).rename(packs.path / "old")
    packs.make(gone)
    (packs.path / "old").unlink()
    end = time.monotonic() + 120
    while packs.deleted() and time.monotonic() < end:
        packs.use(numbers[1], *([gone] if used else []))
        time.sleep(0.01)
    assert not packs.deleted()


def test_all_are_closed_when_none_is_used(packs):
    packs.use(*range(PACKS))
    end = time.monotonic() + 120
    while packs.open() and time.monotonic() < end:
        time.sleep(0.02)
    assert not packs.open()
    assert packs.counted(5) == (1, 0)
