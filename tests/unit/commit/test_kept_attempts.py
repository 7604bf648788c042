# SPDX-License-Identifier: Apache-2.0
"""What saves write again although it did not change, because a step refers to at most 16 earlier attempts: counts of
bytes over real saves, with small tensors, and where a user finds them. tests/property/test_keep.py simulates the rule
over long histories."""
import itertools

import numpy as np
import pytest

from loadlib import Opened
from saverlib import api, ranks, store  # noqa: F401 (fixtures)

SIZE = 4096


def drawn(rng, n, count, seldom):
    return set(rng.choices(range(n), [1 / seldom(i) for i in range(n)], k=count))


PATTERNS = {        # name: (sizes, which change at a step, at most so many times what changed)
    "one of 100 in turn": lambda r: ([SIZE] * 100, lambda t: [t % 100], 2.3),
    "one of 100 at random": lambda r: ([SIZE] * 100, lambda t: [r.randrange(100)], 2.6),
    "five of 100 at random": lambda r: ([SIZE] * 100, lambda t: r.sample(range(100), 5), 1.8),
    "embeddings": lambda r: ([SIZE] * 400, lambda t: drawn(r, 400, 20, lambda i: i + 1), 2.2),
    "experts": lambda r: ([SIZE] * 64 + [2 * SIZE], lambda t: {64, *drawn(r, 64, 4, lambda i: 1 + i % 8)}, 1.6),
    "LoRA": lambda r: ([SIZE] * 80 + [128] * 20, lambda t: range(80, 100), 1),
    "frozen layers": lambda r: ([SIZE] * 100, lambda t: range(70, 100), 1),
    "sizes that differ by 1000": lambda r: ([100 << r.randrange(11) for _ in range(100)], lambda t: [r.randrange(100)],
                                            4),
}
SOME = ("one of 100 in turn", "one of 100 at random")


def written(timings):
    """Raw bytes of pieces that were stored."""
    return timings.bytes_staged - timings.bytes_unchanged - timings.bytes_deduplicated


def saved(saver, tensors, **options):
    save = saver.save(tensors, **options)
    save.committed()
    t = save.timings()
    save.free()
    return t


class Model:
    def __init__(self, rng, sizes):
        self.rng, self.arrays = np.random.default_rng(rng.randrange(1 << 30)), [np.zeros(n, "u1") for n in sizes]
        self.change(range(len(sizes)))

    def change(self, which):
        """Bytes that change."""
        for i in which:
            self.arrays[i][:] = self.rng.integers(0, 256, self.arrays[i].size, "u1")
        return sum(self.arrays[i].size for i in which)

    def tensors(self):
        return {f"model/{i:03}": a for i, a in enumerate(self.arrays)}


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in PATTERNS])
def test_a_save_costs_what_changed(api, store, rng, scale, name):  # noqa: F811
    sizes, which, most = PATTERNS[name](rng)
    model, changed, new, again = Model(rng, sizes), 0, 0, 0
    saver = api.saver(store, "run")
    saved(saver, model.tensors())
    for t in range(scale(60, 300)):
        now = model.change(which(t))
        timings = saved(saver, model.tensors())
        assert written(timings) == now + timings.bytes_again
        changed, new, again = changed + now, new + written(timings), again + timings.bytes_again
        assert again <= 1.5 * changed + sum(sizes) * (t + 17) / 100
    print(f"{name}: {new / changed:.2f} times what changed")
    assert new <= most * changed
    saver.free()


@pytest.mark.parametrize("newest", [False, True], ids=["named by the caller", "the newest step"])
def test_a_base_that_is_of_no_use(api, store, rng, newest):  # noqa: F811
    """It refers to as many attempts as a step can, all of them larger. None takes a place from those that are of use,
    at every save that names it, or that replaces an older step."""
    n, changed, again = 60, 0, 0
    useless, model, other = Model(rng, [SIZE] * n), Model(rng, [SIZE] * n), "run" if newest else "other"
    savers = {run: api.saver(store, run) for run in {"run", other}}
    for t in range(18):
        useless.change(rng.sample(range(n), 6))
        saved(savers[other], useless.tensors(), step=1, replace=t > 0)
    saved(savers["run"], model.tensors(), step=0)
    for t in range(24):
        now = model.change([t])
        timings = saved(savers["run"], model.tensors(), step=0, replace=True, bases=[] if newest else ["other/1"])
        assert written(timings) == now + timings.bytes_again
        changed, again = changed + now, again + timings.bytes_again
    assert 0 < again <= 0.6 * changed
    for saver in savers.values():
        saver.free()


def earlier(vckpt, store, step):  # noqa: F811
    """Attempts before its own that a step refers to."""
    info = vckpt.json("info", store, f"run/{step}")
    return {p["pack"].rsplit("-", 2)[0] for p in info["packs"]} - {info["attempt"]}, info


def test_where_it_is_said(api, store, rng, vckpt, capfd):  # noqa: F811
    model, said = Model(rng, [SIZE] * 24), {}
    saver = api.saver(store, "run")
    for t in range(19):
        model.change([t])
        said[t] = saved(saver, model.tensors()).bytes_again
    saver.free()
    # steps 0 to 16 are 17 attempts; of those with one tensor each nine are merged
    assert said == {t: 9 * SIZE if t == 17 else 0 for t in range(19)}
    warned = [line for line in capfd.readouterr().err.splitlines() if "unchanged data again" in line]
    assert len(warned) == 1
    assert "run run step 17: wrote 36 KiB of unchanged data again, and 4 KiB of changed data" in warned[0]
    assert len(earlier(vckpt, store, 16)[0]) == 16 and len(earlier(vckpt, store, 17)[0]) == 8
    for step, again in ((16, 0), (17, 9 * SIZE)):
        at = f"run/{step}"
        assert vckpt.json("info", store, at)["again_bytes"] == vckpt.json("ls", store, at)["again_bytes"] == again
        stalls = vckpt.json("stalls", store, at)
        assert stalls["bytes"]["again"] == stalls["ranks"][0]["bytes"]["again"] == again
        assert "again" not in [p["name"] for p in stalls["phases"]]
        for command in ("info", "ls"):
            assert ("36 KiB of unchanged data was written again" in vckpt(command, store, at).stdout) == bool(again)
    assert ["again", "36", "KiB"] in [line.split() for line in vckpt("stalls", store, "run/17").stdout.splitlines()]


def test_ranks_choose_alike(api, store, rng, vckpt):  # noqa: F811
    """What changes differs from rank to rank; together they refer to 16 earlier attempts, and none says a word to the
    other."""
    world, steps, n = 2, 20, 24
    mesh, models = api.mesh(f"tp={world}"), [Model(rng, [SIZE] * n) for _ in range(world)]

    def work(rank, saver):
        for t in range(steps):
            models[rank].change([(5 * t if rank else t) % n])
            saved(saver, {f"model/{i:03}": (a, {"shape": (world * SIZE,), "placements": "S(0)", "mesh": mesh})
                          for i, a in enumerate(models[rank].arrays)}, step=t)
    assert ranks(api, store, "run", world, work) == [None] * world
    most = 0
    for t in range(steps):
        attempts, info = earlier(vckpt, store, t)
        most = max(most, len(attempts))
        assert len(attempts) <= 16 and (info["again_bytes"] > 0) == (t == 17)
    assert most == 16
    found = api.read(store, "run")
    for i in range(n):
        assert (found[f"model/{i:03}"] == np.concatenate([m.arrays[i] for m in models])).all()


# ---- histories in which a save does not go on from the newest step ----

class Line:
    """A line of training: what its saves had to write, and what they wrote. The first tensors are the model's, the
    others the optimizer's. With a mesh it is a rank's shards."""

    def __init__(self, rng, sizes, weights=None, mesh=None, world=1):
        self.model, self.sizes, self.weights = Model(rng, sizes), sizes, weights or len(sizes)
        self.mesh, self.world = mesh, world
        self.dirty = set(range(len(sizes)))             # tensors of which no step of the line has the bytes
        self.changed = self.again = self.allowed = 0

    def change(self, which):
        self.model.change(which)
        self.dirty |= set(which)

    def tensors(self, n):
        return {f"{'model' if i < self.weights else 'optimizer'}/{i:03}": a if self.mesh is None else
                (a, {"shape": (self.world * a.size,), "placements": "S(0)", "mesh": self.mesh})
                for i, a in enumerate(self.model.arrays[:n])}

    def save(self, saver, full=True, **options):
        n = len(self.sizes) if full else self.weights
        now = sum(self.sizes[i] for i in self.dirty if i < n)
        timings = saved(saver, self.tensors(n), **options)
        self.dirty -= set(range(n))
        assert written(timings) == now + timings.bytes_again    # what is written again is counted
        self.changed, self.again = self.changed + now, self.again + timings.bytes_again
        self.allowed += sum(self.sizes[:n]) / 100
        assert self.again <= 1.5 * self.changed + self.allowed + sum(self.sizes) * 16 / 100
        return timings.bytes_again

    def kept(self):
        return [a.copy() for a in self.model.arrays]

    def go_back(self, kept):
        self.model.arrays, self.dirty = [a.copy() for a in kept], set()
        self.changed = self.again = self.allowed = 0


def load(api, store, step):  # noqa: F811
    with Opened(api, store, step) as opened, opened.load() as one:
        one.tensor("model/000", np.empty(SIZE, "u1"))
        one.run()


@pytest.mark.parametrize("world", [1, 2], ids=["the same launch", "another launch, of two ranks"])
def test_after_a_rollback(api, store, rng, vckpt, world):  # noqa: F811
    """A job goes back to an earlier step, and replaces those after it; the newest ones stay what they were."""
    n, last, back, kept = 30, 24, 6, {}
    mesh = api.mesh(f"tp={world}") if world > 1 else None
    lines = [Line(rng, [SIZE] * n, mesh=mesh, world=world) for _ in range(world)]
    changes = {t: [rng.sample(range(n), 3) for _ in range(world)] for t in range(2 * last)}

    def before(rank, saver):
        for t in range(last):
            lines[rank].change(changes[t][rank])
            lines[rank].save(saver, step=t)
            kept[t, rank] = lines[rank].kept()

    def after(rank, saver):
        lines[rank].go_back(kept[back, rank])
        if world == 1:
            load(api, store, back)                      # else the step before is what it was started from
        for t in range(back + 1, last - 1):
            lines[rank].change(changes[last + t][rank])
            lines[rank].save(saver, step=t, replace=True)

    def both(rank, saver):
        before(rank, saver)
        after(rank, saver)
    for i, work in enumerate([before, after] if world > 1 else [both]):
        assert ranks(api, store, "run", world, work, launch=f"launch {i}") == [None] * world
    for line in lines:
        assert line.again <= 0.9 * line.changed
    for t in range(last):
        assert len(earlier(vckpt, store, t)[0]) <= 16


@pytest.mark.parametrize("restart", [False, True], ids=["the same launch", "another launch"])
def test_after_a_load(api, store, rng, restart):  # noqa: F811
    """A job goes on from the step that it loads, under numbers that are free."""
    line, kept, saver = Line(rng, [SIZE] * 12), {}, api.saver(store, "run")
    for t in range(8):
        line.change([t, 8 + t % 4])
        line.save(saver, step=10 * t)
        kept[t] = line.kept()
    for back, step in ((3, 35), (1, 15), (5, 16)):
        if restart:
            saver.free()
            saver = api.saver(store, "run")
        line.go_back(kept[back])
        load(api, store, 10 * back)
        assert line.save(saver, step=step) == 0         # shares all with what was loaded
        line.change([0])
        assert line.save(saver, step=step + 3) == 0
    saver.free()


def test_lower_numbers_than_the_newest(api, store, rng):  # noqa: F811
    """A launch counts from 0, and the run has higher steps, of another state."""
    n, other, line = 30, Line(rng, [SIZE] * 30), Line(rng, [SIZE] * 30)
    for line_, first in ((other, 1000), (line, 0)):
        saver = api.saver(store, "run")
        for t in range(17 if line_ is other else 24):
            line_.change(rng.sample(range(n), 3))
            line_.save(saver, step=first + t)
        saver.free()
    assert line.again <= 0.9 * line.changed


def test_another_writer_has_the_newest_step(api, store, rng, vckpt, tmp_path):  # noqa: F811
    """Imports into the run of a job, between its saves."""
    line, saver = Line(rng, [SIZE] * 10), api.saver(store, "run")
    np.save(tmp_path / "a.npy", np.frombuffer(rng.randbytes(SIZE), "u1"))
    for t in range(11):
        line.change([t % 10])
        assert line.save(saver, step=10 * t) == 0
        vckpt("import", store, f"run/{10 * t + 5 if t == 4 else 10**6 + t}", tmp_path / "a.npy")
    saver.free()


def test_a_base_that_was_removed(api, store, rng, vckpt):  # noqa: F811
    """What only the removed step had is written anew; all else is shared with the one before."""
    line, saver = Line(rng, [SIZE] * 10), api.saver(store, "run")
    for t in range(4):
        line.change([t])
        assert line.save(saver, step=t) == 0
        if t % 2:
            vckpt("rm", store, f"run/{t}")
            line.dirty |= {t}
    saver.free()


@pytest.mark.parametrize("every, world", [(3, 2), (20, 1)])
def test_weights_between_full_saves(api, store, rng, vckpt, scale, every, world):  # noqa: F811
    """The optimizer is saved now and then. The launch ends before a full save, or after one."""
    n, mesh = 45, api.mesh(f"tp={world}") if world > 1 else None
    lines = [Line(rng, [SIZE] * n, 15, mesh, world) for _ in range(world)]
    steps = scale(45, 200)
    changes = {t: [[rng.randrange(15), *([rng.randrange(15, n)] if t % every == 0 else [])] for _ in range(world)]
               for t in range(steps)}

    def work(first, end):
        def of_rank(rank, saver):
            for t in range(first, end):
                lines[rank].change(changes[t][rank])
                lines[rank].save(saver, t % every == 0, step=t)
        return of_rank
    ends = [0, every, 2 * every + 1, steps]
    for first, end in itertools.pairwise(ends):
        assert ranks(api, store, "run", world, work(first, end), launch=f"launch {first}") == [None] * world
    for line in lines:
        assert line.again <= 1.6 * line.changed
    assert all(len(earlier(vckpt, store, t)[0]) <= 16 for t in range(every, steps, every))
