# SPDX-License-Identifier: Apache-2.0
"""A saver shares pieces with the newest step of its run and, where that has another layout, with the newest of the last
steps that has the same: what two layouts cut apart is stored once for each, however often a job goes from one to the
other. Looking for it costs nothing where the newest step has the layout, and at most a few manifests where not."""
import contextlib
import ctypes
import os
import struct

import numpy as np
import pytest

from saverlib import api, ranks, store  # noqa: F401 (fixtures)

LAST = 8                # SAVE_ALIKE_STEPS of core/save/write/rank.h
IN_OPEN = 0x20


class Run:
    """Saves of one tensor that each layout cuts into other pieces, and whose bytes do not change."""

    def __init__(self, api, store, rng):  # noqa: F811
        self.api, self.store, self.step = api, store, 0
        self.array = np.frombuffer(rng.randbytes(61 * 257 * 4), "u4").reshape(61, 257)

    def save(self, world, array=None, **options):
        """Raw bytes of new pieces, over all ranks."""
        array, mesh = self.array if array is None else array, self.api.mesh(f"tp={world}")
        rows = -(-61 // world)

        def work(rank, saver):
            save = saver.save({"model/w": (array[rows * rank:rows * (rank + 1)],
                                           {"shape": (61, 257), "placements": "S(0)", "mesh": mesh})},
                              step=self.step, **options)
            save.committed()
            t = save.timings()
            save.free()
            return t.bytes_staged - t.bytes_unchanged
        new = ranks(self.api, self.store, "run", world, work, launch=f"launch {self.step}")
        for error in new:
            if isinstance(error, Exception):
                raise error
        self.step += 1
        return sum(new)


@pytest.fixture
def run(api, store, rng):  # noqa: F811
    return Run(api, store, rng)


@contextlib.contextmanager
def opened(folder):
    """Names of the files that are opened in a folder, filled when it is over."""
    libc, names = ctypes.CDLL(None, use_errno=True), []
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(folder), IN_OPEN) >= 0
    try:
        yield names
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 1 << 16):
                while data:
                    _, _, _, length = struct.unpack_from("iIII", data)
                    names.append(data[16:16 + length].rstrip(b"\0").decode())
                    data = data[16 + length:]
    finally:
        os.close(fd)


def test_from_layout_to_layout_and_back(run):
    size = run.array.nbytes
    assert [run.save(world) for world in (1, 3, 1, 3, 2, 1, 3, 2)] == [size, size, 0, 0, size, 0, 0, 0]


def test_the_newest_of_its_layout(run):
    other = run.array + 1
    run.save(1)
    run.save(1, other)
    run.save(2)
    assert run.save(1, other) == 0 and run.save(2) == 0
    assert run.save(1) == run.array.nbytes          # that of step 0 is not looked for


def test_only_among_the_last_steps(run):
    run.save(1)
    for _ in range(LAST - 1):
        run.save(2)
    assert run.save(1) == 0
    for _ in range(LAST):
        run.save(2)
    assert run.save(1) == run.array.nbytes


def test_a_step_that_was_removed(run, vckpt):
    run.save(1)
    run.save(2)
    vckpt("rm", run.store, "run/0")
    assert run.save(1) == run.array.nbytes


def test_a_layout_that_changes_with_each_save(api, store):  # noqa: F811
    """A tensor that grows: a saver knows the layouts of the last steps, and reads the manifest of the newest, as a
    base. A new one has to look at them once."""
    folder = os.path.join(store, "runs/run/manifests")

    def saves(first, last):
        def work(rank, saver):
            read = []
            for step in range(first, last):
                before = set(os.listdir(folder)) if step else set()
                with opened(folder) if step else contextlib.nullcontext([]) as names:
                    save = saver.save({"model/w": (np.zeros(100 + step, "u4"), {})}, step=step)
                    save.committed()
                    save.free()
                read.append(len(before.intersection(names)))
            return read
        return ranks(api, store, "run", 1, work, launch=f"launch {first}")[0]
    assert saves(0, 12) == [0] + 11 * [1]
    assert saves(12, 15) == [LAST, 1, 1]


def test_looking_for_it_is_bounded(run):
    """Manifests that the ranks read: where the newest step has their layout, where none of the last has, and where
    layouts take turns."""
    folder = os.path.join(run.store, "runs/run/manifests")
    for world in (1, 1, 1):
        run.save(world)

    def read(world):
        before = set(os.listdir(folder))
        with opened(folder) as names:
            run.save(world)
        return len(before.intersection(names))
    assert read(1) == 1                             # as a base, as ever
    assert read(2) == 4                             # the newest, and all before it
    for _ in range(LAST):
        run.save(2)
    assert read(2) == 1
    assert read(1) == LAST
    assert read(2) == 2
