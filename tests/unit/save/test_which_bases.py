# SPDX-License-Identifier: Apache-2.0
"""Which steps a save takes as bases, beside the step before it: where that has another layout, one of the save's own;
where it lacks a component, one that has it. What two layouts cut apart is stored once for each, however often a job
goes from one to the other. Looking for such a step costs nothing where none is missing, and else at most a few
manifests. (The launch's own last step: test_kept_attempts.py.)"""
import contextlib
import ctypes
import os
import struct

import numpy as np
import pytest

from saverlib import api, ranks, store  # noqa: F401 (fixtures)

LAST = 8                # PAST_NEAREST of core/save/write/past.c
IN_OPEN, IN_CLOSE_NOWRITE = 0x20, 0x10


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
    """Names of the files that are opened in a folder, filled when it is over. The kernel reports two equal events in
    a row once: so closes are asked for as well, and opens that overlap may count once."""
    libc, names = ctypes.CDLL(None, use_errno=True), []
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(folder), IN_OPEN | IN_CLOSE_NOWRITE) >= 0
    try:
        yield names
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 1 << 16):
                while data:
                    _, mask, _, length = struct.unpack_from("iIII", data)
                    if mask & IN_OPEN:
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


@pytest.fixture
def saves(api, store):  # noqa: F811
    """saves(tensors of each step by number, the first step) -> (raw bytes of new pieces, manifests that were read), by
    step, of one launch."""
    folder = os.path.join(store, "runs/run/manifests")

    def call(states, first=0):
        def work(rank, saver):
            out = []
            for step, state in enumerate(states, first):
                before = set(os.listdir(folder)) if step else set()
                with opened(folder) if step else contextlib.nullcontext([]) as names:
                    save = saver.save(state, step=step)
                    save.committed()
                    t = save.timings()
                    save.free()
                out.append((t.bytes_staged - t.bytes_unchanged, len(before.intersection(names))))
            return out
        out = ranks(api, store, "run", 1, work, launch=f"launch {first}")[0]
        assert isinstance(out, list), out
        return out
    return call


def test_a_layout_that_changes_with_each_save(saves):
    """A tensor that grows."""
    states = [{"model/a": np.arange(100, dtype="u4"), "model/w": np.zeros(100 + step, "u4")} for step in range(15)]
    new = [(4 * (100 + step), 1) for step in range(15)]
    assert saves(states[:12]) == [(800, 0), *new[1:12]]
    assert saves(states[12:], 12) == new[12:]


def test_components_that_few_saves_have(saves, rng):
    """However long ago the last one was, and by an earlier launch, too: the nearest step of each size is looked at.
    What has a component is remembered. Nothing is read of the launch's own last step, if that has the layout of the
    save; but a few entries of the list later the manifest is (test_save_reads.py)."""
    part = {c: {f"{c}/w": np.frombuffer(rng.randbytes(n), "u1")} for c, n in (("model", 400), ("ema", 500),
                                                                             ("optimizer", 600))}
    model, ema, all_ = part["model"], {**part["model"], **part["ema"]}, part["model"] | part["ema"] | part["optimizer"]
    assert saves([all_] + 9 * [model]) == [(1500, 0), (0, 1)] + 8 * [(0, 0)]
    # the newest step, as a base; those of the nearest eight that are not known yet; the first one
    assert saves(3 * [model] + [all_] + 9 * [model] + [ema, all_, all_], 10) == [
        (0, 1), (0, 0), (0, 0), (0, 6), (0, 1), (0, 1), *7 * [(0, 0)], (0, 2), (0, 2), (0, 1)]


def test_tensors_that_few_saves_have(saves, rng):
    """The same where the component is always there."""
    frozen, trained = ({f"model/{name}": np.frombuffer(rng.randbytes(400), "u1")} for name in ("a", "w"))
    assert saves([frozen | trained] + 11 * [trained] + [frozen | trained]) == [
        (800, 0), (0, 1), *10 * [(0, 0)], (0, 2)]


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
