# SPDX-License-Identifier: Apache-2.0
"""How many writes of a pack are made at once (core/storage/storage_posix_pace.c), by a clock of the test's own."""
import ctypes as c

import pytest

MOST, MS = 16, 1_000_000


class Pace(c.Structure):
    _fields_ = [("width", c.c_uint), ("best", c.c_uint), ("best_ns", c.c_uint64), ("writes", c.c_uint),
                ("since_ns", c.c_uint64), ("settled", c.c_bool)]


class Disk:
    """One write takes `latency`; `at_once` of them go side by side, and more than that are `slower` for each."""

    def __init__(self, lib, width=1):
        self.lib, self.pace, self.now, self.count = lib, Pace(), 0, 0
        lib.posix_pace_note.restype = c.c_bool
        lib.posix_pace_init(c.byref(self.pace), c.c_uint(width))

    def write(self, ns, more=True):
        self.now += int(ns)
        self.count += 1
        return self.lib.posix_pace_note(c.byref(self.pace), c.c_bool(more), c.c_uint64(self.now))

    def settle(self, each, most=400):
        """each(width): from one write's end to the next one's. The widths that were tried, in order."""
        tried = [self.pace.width]
        while not self.pace.settled and self.count < most:
            self.write(each(self.pace.width))
            if self.pace.width != tried[-1]:
                tried.append(self.pace.width)
        return tried


@pytest.mark.parametrize("takes,tried", [(1, [1, 2, 1]), (2, [1, 2, 4, 2]), (4, [1, 2, 4, 8, 4]),
                                         (6, [1, 2, 4, 8, 16, 8]), (8, [1, 2, 4, 8, 16, 8]), (16, [1, 2, 4, 8, 16]),
                                         (100, [1, 2, 4, 8, 16])])
def test_as_many_as_the_disk_gains_from(lib, takes, tried):
    disk = Disk(lib)
    assert disk.settle(lambda width: 2 * MS / min(width, takes)) == tried
    assert disk.pace.settled and disk.pace.width == disk.pace.best == tried[-1]
    assert disk.count <= 100                        # 400 MB: the first writes of a save
    for _ in range(50):                             # nothing is tried again
        assert not disk.write(MS) and disk.pace.width == tried[-1]


def test_many_that_are_slower(lib):
    assert Disk(lib).settle(lambda width: 2 * MS * width) == [1, 2, 1]


def test_times_that_vary(lib, rng):
    """By a tenth each: it is told apart all the same."""
    for takes, widths in (1, {1}), (4, {4}), (16, {16}):
        for _ in range(100):
            disk = Disk(lib)
            disk.settle(lambda width, takes=takes: 2 * MS / min(width, takes) * rng.uniform(0.9, 1.1))
            assert disk.pace.width in widths


@pytest.mark.parametrize("never", [False, True], ids=["now and then", "always"])
def test_a_save_that_the_disk_waits_for(lib, never):
    """Writes after which nothing waits to be written say nothing about the disk."""
    disk = Disk(lib)
    for i in range(200):
        disk.write(2 * MS / disk.pace.width, more=not never and i % 4 > 0)
    assert (disk.pace.width, disk.pace.best, disk.pace.settled) == (1, 0, False)


def test_the_next_pack_measures_anew(lib):
    """It begins one doubling below what the last one found."""
    found, seen = 0, []
    for takes in (16, 16, 16, 2, 2, 2, 2, 16, 16, 16):
        disk = Disk(lib, found // 2)
        disk.settle(lambda width, takes=takes: 2 * MS / min(width, takes))
        found = disk.pace.best
        seen.append(found)
    assert seen == [16, 16, 16, 8, 4, 2, 2, 16, 16, 16]


def test_no_memory_for_more(lib):
    disk = Disk(lib)
    lib.posix_pace_bound(c.byref(disk.pace), c.c_uint(3))
    assert disk.settle(lambda width: MS) == [3]
    for width, begins in (0, 1), (1, 1), (9, 9), (40, MOST):
        assert Disk(lib, width).pace.width == begins
