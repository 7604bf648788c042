# SPDX-License-Identifier: Apache-2.0
"""What a save reads of the step before it: in a launch a rank knows what the last manifest says of it, and reads
nothing that grows with the number of ranks. Opens are counted, never timed."""
import os
import pathlib
import threading
import time

import numpy as np
import pytest

from saverlib import api, ranks, store  # noqa: F401 (fixtures)
from test_which_bases import opened

SIZE, ANNOUNCED = 4096, 4


def values(rank, n):
    """No two blocks of them are the same."""
    return list(np.random.default_rng(rank).random((n, SIZE), "f4"))


class Job:
    """Saves of one launch, of tensors that all ranks share. The ranks look at the step before one after another, so
    that no open hides another. A rank that puts the manifest of this step a second time, because the first was slow,
    does not count."""

    def __init__(self, api, store, world):  # noqa: F811
        self.api, self.store, self.world, self.mesh = api, store, world, api.mesh(f"tp={world}")
        self.turns, self.unchanged = [threading.Semaphore(0) for _ in range(world + 1)], {}
        self.folder = os.path.join(store, "runs/run/manifests")
        os.makedirs(self.folder, exist_ok=True)
        self.names, self.window, self.all_here = [], None, threading.Barrier(world, self.next_window, 120)

    def next_window(self):
        """Of one save: from when all ranks have ended the one before."""
        if self.window:
            context, names, there = self.window
            context.__exit__(None, None, None)
            self.names += [name for name in names if name in there]
        context, there = opened(self.folder), set(os.listdir(self.folder))
        self.window = context, context.__enter__(), there

    def tensors(self, rank, arrays):
        """{name: (array, fields)}: rows of tensors."""
        return {f"model/{i:02}": (a, {"shape": (self.world * SIZE,), "placements": "S(0)", "mesh": self.mesh})
                for i, a in enumerate(arrays)}

    def step(self, rank, saver, t, tensors, **options):
        self.all_here.wait()
        if rank:
            assert self.turns[rank].acquire(timeout=120)
        save = saver.save(tensors, step=t, **options)
        while rank + 1 < self.world and save.progress().state < ANNOUNCED:
            time.sleep(0.001)
        self.turns[rank + 1].release()
        try:
            save.committed()
            self.unchanged[rank, t] = save.timings().bytes_unchanged
        finally:
            save.free()

    def run(self, work, launch="a launch"):
        """The names of the manifests that were opened, one for each time."""
        assert ranks(self.api, self.store, "run", self.world, work, launch=launch, threads=1) == [None] * self.world
        self.next_window()
        return self.names


def counts(vckpt, store, names, steps):  # noqa: F811
    return [names.count(vckpt.json("info", store, f"run/{t}")["manifest"]) for t in range(steps)]


@pytest.mark.parametrize("world", [2, 5])
def test_no_rank_reads_a_manifest_save_by_save(api, store, vckpt, world):  # noqa: F811
    """What step 0 names is first seen in its manifest, because it has no base. Then all ranks look when the number of
    the base's entry passes a multiple of 16."""
    job, steps = Job(api, store, world), 18

    def work(rank, saver):
        arrays = values(rank, 2)
        for t in range(steps):
            arrays[0] += 1
            job.step(rank, saver, t, job.tensors(rank, arrays))
    names = job.run(work)
    assert counts(vckpt, store, names, steps) == [world if t in (0, 15) else 0 for t in range(steps)]
    assert {t: n for (_, t), n in job.unchanged.items()} == {t: 4 * SIZE if t else 0 for t in range(steps)}


def test_boxes_that_others_had(api, store, vckpt):  # noqa: F811
    """The layout does not say who holds declared boxes. Where a rank's own part lacks one, it reads the manifest."""
    job, whole = Job(api, store, 2), np.arange(2 * SIZE, dtype="f4").reshape(2, SIZE)

    def work(rank, saver):
        for t, held in enumerate((0, 0, 0, 1)):
            row = rank ^ held
            job.step(rank, saver, t, {"model/w": (whole[row:row + 1].copy(), {
                "shape": whole.shape, "boxes": [[(row, 1), (0, SIZE)]]})})
    names = job.run(work)
    assert counts(vckpt, store, names, 4) == [2, 0, 2, 0]
    assert all(n == (4 * SIZE if t else 0) for (_, t), n in job.unchanged.items())


def test_another_layout_in_the_same_launch(api, store, vckpt):  # noqa: F811
    """What this rank knows of the last step does not do; nor is it taken for all that the step has."""
    job = Job(api, store, 2)

    def work(rank, saver):
        arrays = values(rank, 3)
        for t, n in enumerate((2, 2, 3, 2, 3)):
            job.step(rank, saver, t, job.tensors(rank, arrays[:n]))
    names = job.run(work)
    # as the last step; that of 2 in step 4 once more, for its layout
    assert counts(vckpt, store, names, 5) == [2, 2, 2 + 2, 2, 0]
    assert {t: n for (_, t), n in job.unchanged.items()} == {
        t: 4 * SIZE * n for t, n in enumerate((0, 2, 2, 2, 3))}


def test_after_a_save_that_failed(api, store, vckpt):  # noqa: F811
    """The step before it is the base again."""
    job = Job(api, store, 2)

    def work(rank, saver):
        arrays = values(rank, 1)
        for t in range(3):
            job.step(rank, saver, t, job.tensors(rank, arrays))
        save = saver.begin(step=3)
        save.give_up("no")
        job.step(rank, saver, 4, job.tensors(rank, arrays))
    names = job.run(work)
    assert counts(vckpt, store, names, 3) == [2, 0, 0]
    assert job.unchanged[0, 4] == job.unchanged[1, 4] == 4 * SIZE


def test_a_step_of_another_writer(api, store, vckpt, tmp_path):  # noqa: F811
    """It is the newest, and so the base, of which nothing is known: each rank reads its manifest, and that of the step
    which has the layout."""
    job, both = Job(api, store, 2), threading.Barrier(2)

    def work(rank, saver):
        arrays = values(rank, 1)
        for t in range(2):
            job.step(rank, saver, t, job.tensors(rank, arrays))
        if both.wait() == 0:
            np.save(tmp_path / "other.npy", np.zeros(SIZE, "f4"))
            vckpt("import", store, "run", tmp_path / "other.npy", "--step", 2, "--no-index", "-q")
        both.wait()
        for t in (3, 4):
            job.step(rank, saver, t, job.tensors(rank, arrays))
    names = job.run(work)
    assert counts(vckpt, store, names, 5) == [2, 2, 2, 2, 0]
    assert {t: n for (_, t), n in job.unchanged.items()} == {0: 0, 1: 4 * SIZE, 3: 4 * SIZE, 4: 4 * SIZE}


def packs(store):  # noqa: F811
    return {p.name: p for p in pathlib.Path(store, "packs").glob("*/*")}


def saves_around(job, tensors, between):
    """Two saves of a launch of one rank, and what comes between them."""
    def work(rank, saver):
        job.step(rank, saver, 0, tensors)
        between()
        job.step(rank, saver, 1, tensors)
    job.run(work)
    return job.unchanged[0, 1]


def test_its_own_rows_are_not_read_again(api, store):  # noqa: F811
    """Nothing of the part that the same saver wrote is read, so it does not matter what has become of it."""
    job, whole = Job(api, store, 1), {}

    def damage():
        for path in packs(store).values():
            whole[path] = path.read_bytes()
            if path.name.endswith("-meta.pack"):
                path.write_bytes(bytes(len(whole[path])))
    arrays = values(0, 3)
    assert saves_around(job, job.tensors(0, arrays), damage) == 3 * 4 * SIZE and len(whole) == 2
    for path, data in whole.items():
        path.write_bytes(data)


@pytest.mark.full
def test_rows_beyond_what_is_kept_are_read(api, store, rng):  # noqa: F811
    """A saver keeps 4 MiB of rows, of 152 bytes each here."""
    job, arrays = Job(api, store, 1), np.random.default_rng(rng.randrange(1 << 30)).random((28_000, 20), "f4")
    tensors = {f"model/{i:05}": (a, {"check_local": False}) for i, a in enumerate(arrays)}
    assert saves_around(job, tensors, lambda: None) == arrays.nbytes


def test_a_layout_is_no_more_than_sixteen_entries_old(api, store, vckpt):  # noqa: F811
    """A rank that refers to another's layout object knows a newer one when it reads a manifest. So a launch does not
    keep the packs of its first step for ever."""
    job, steps = Job(api, store, 2), 19

    def work(rank, saver):
        arrays = values(rank, 1)
        for t in range(steps):
            arrays[0] += 1
            job.step(rank, saver, t, job.tensors(rank, arrays))
    job.run(work)
    packs_of = [vckpt.json("info", store, f"run/{t}")["packs"] for t in range(steps)]
    step_of = {name["pack"].rsplit("-", 2)[0]: t for t in reversed(range(steps)) for name in packs_of[t]}
    named = [{step_of[p["pack"].rsplit("-", 2)[0]] for p in packs} for packs in packs_of]
    assert named == [{0}, *({t, 0} for t in range(1, 16)), *({t, 15} for t in range(16, steps))]
