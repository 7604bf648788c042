# SPDX-License-Identifier: Apache-2.0
"""Step.diff, and steps whose ranks cut equal tensors differently."""
import math

import numpy as np
import pytest

import vckpt

ALONE = {"rank": 0, "world": 1}
W = np.random.default_rng(3).standard_normal((600, 500)).astype("f4")


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


def rows(rank, w):
    return vckpt.Shard(w[200 * rank:200 * rank + 200].copy(), shape=w.shape, mesh="dp=3", placements="S(0)")


def odd(rank, w):
    cut = 271                                               # on no line of the grid
    part = w[:cut] if rank == 0 else w[cut:]
    return vckpt.Shard(part.reshape(-1).copy(), shape=w.shape, boxes=[((cut * rank, 0), part.shape)])


def flat(rank, w):
    at = [0, 70_001, w.size]
    return vckpt.Shard(w.reshape(-1)[at[rank]:at[rank + 1]].copy(), shape=w.shape, flat=(at[rank], at[rank + 1]))


WAYS = {"rows": (3, rows), "boxes": (2, odd), "flat": (2, flat)}


@pytest.mark.parametrize("a", ["alone", *WAYS])
@pytest.mark.parametrize("b", WAYS)
def test_other_cuts(run, save, a, b):
    """Equal bytes are equal however ranks cut them, and one other value is found. Unchanged tensors that are cut alike
    are not read again for this."""
    other = W.copy()
    other[450, 17] += 2
    for step, (way, w) in enumerate([(a, W), (b, W), (b, other)]):
        world, part = WAYS.get(way, (1, lambda rank, w: w))
        save(step, world, lambda rank, part=part, w=w: {"m": {"w": part(rank, w), "same": np.arange(9)}})
    with vckpt.open(f"{run}/0") as first:
        assert [d for d in first.diff(f"{run}/1", component="m") if d.component] == []
        found, = [d for d in first.diff(f"{run}/2", values=True) if d.component]
        assert (found.change, found.component, found.name) == ("changed", "m", "w")
        assert found.a == vckpt.step.TensorInfo("m", "w", "f32", W.shape, W.nbytes) == found.b
        assert found.values.changed == 1 and found.values.max == np.float64(other[450, 17]) - W[450, 17]
        assert found.values.rms == pytest.approx(found.values.max / math.sqrt(W.size), rel=1e-12)
        assert [d.name for d in first.diff(f"{run}/2") if d.component] == ["w"]
        # all of a tensor that is cut differently is compared
        if a != b:
            norm = np.linalg.norm(W.astype("f8"))
            assert found.values.relative == pytest.approx(found.values.max / norm, rel=1e-9)


def test_what_it_gives(run):
    state = {"m": {"w": np.ones(4), "x": np.zeros(3)}, "lr": 0.1}
    vckpt.save(run, state, step=1, blobs={"config.json": b"{}"}, **ALONE)
    state["m"]["w"][:2] = 3, np.nan
    state["m"]["y"] = state["m"].pop("x")
    vckpt.save(run, state, step=2, blobs={"config.json": b"{} "}, **ALONE)
    with vckpt.open(f"{run}/1") as a, vckpt.open(run) as b:
        assert a.diff(a) == [] and a.diff(a, values=True) == []
        found = a.diff(b, values=True)
        by_name = {d.name: d for d in found}
        assert set(by_name) >= {"w", "x", "y", "config.json"}
        assert isinstance(found[0], vckpt.Difference)
        w = by_name["w"].values
        assert (w.changed, w.max, w.nan, w.inf) == (2, 2.0, (0, 1), (0, 0))
        assert w.rms == pytest.approx(math.sqrt(4 / 3)) == w.relative
        assert by_name["x"].change == "removed" and by_name["x"].b is None and by_name["x"].a.shape == (3,)
        assert by_name["y"].change == "added" and by_name["y"].a is None and by_name["y"].values is None
        config = by_name["config.json"]
        assert config.component is None and (config.a.bytes, config.b.bytes) == (2, 3) and config.change == "changed"
        assert all(d.values is None for d in a.diff(b))
        assert {d.name for d in a.diff(b, component="m") if d.component} == {"w", "x", "y"}
        with pytest.raises(vckpt.NotFound, match="neither side has a component nix"):
            a.diff(b, component="nix")
        with pytest.raises(vckpt.NotFound):
            a.diff(f"{run}/9")
        b.close()
        with pytest.raises(vckpt.Error, match="closed"):
            a.diff(b)


def test_files_of_ranks(run, save):
    """What a rank keeps for itself is compared with that rank's."""
    for step in 1, 2:
        save(step, 2, lambda rank, step=step: {"m": {"w": np.ones(3)}, "loader": {"at": rank * step}},
             per_rank=("loader",))
    with vckpt.open(f"{run}/1") as step:
        found = step.diff(f"{run}/2")
        assert [(d.change, d.component, d.a.rank, d.b.rank) for d in found if d.name == "loader.json"] == [
            ("changed", None, 1, 1)]
