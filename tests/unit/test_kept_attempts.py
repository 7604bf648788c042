# SPDX-License-Identifier: Apache-2.0
"""What saves write again although it did not change, because a step refers to at most 16 earlier attempts: counts of
bytes over real saves, with small tensors, and where a user finds them. tests/property/test_keep.py simulates the rule
over long histories."""
import numpy as np
import pytest

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
