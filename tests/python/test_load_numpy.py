# SPDX-License-Identifier: Apache-2.0
"""vckpt.load with numpy alone: what a save took is filled again, in place, by every rank its part; what does not fit is
one error that changes nothing."""
import argparse
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

import vckpt

ALONE = {"rank": 0, "world": 1}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "store/run"
    yield path
    vckpt.close()


class Counter:
    """An object with a state of plain values and an array."""

    def __init__(self, count, size=3):
        self.count, self.seen, self.loaded = count, np.full(size, count), 0

    def state_dict(self):
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state):
        self.count, self.seen, self.loaded = state["count"], state["seen"], self.loaded + 1


def test_all_kinds_of_values(run):
    w = np.arange(24.0).reshape(4, 6)
    saved = {"model": {"w": w, "deep": [{"b": np.arange(3, dtype="u1")}, np.array(7, "i8")]}, "count": Counter(5),
             "objects": {"a": Counter(6, 2)},
             "epoch": 3, "trainer": {"name": "x", "cache": {"q": np.ones(2), "n": (1, 2)}, "late": 1},
             "lone": np.ones(2)}
    vckpt.save(run, saved, attributes={"loss": 0.5}, blobs={"config.json": b"{}"}, **ALONE)
    model = {"w": np.zeros((4, 6)), "deep": [{"b": np.zeros(3, "u1")}, np.array(0, "i8")]}
    kept, count, inner, lone = dict(model), Counter(0), Counter(0, 9), np.zeros(2)
    seen = count.seen
    trainer = {"name": "", "cache": {}}
    found = vckpt.load(run, {"model": model, "count": count, "objects": {"a": inner}, "epoch": 0, "trainer": trainer,
                             "lone": lone}, **ALONE)
    assert (found.step, found.run, found.path, found.attributes, found.rng) == (0, "run", f"{run}/0", {"loss": "0.5"},
                                                                                False)
    assert found.missing == [] and found.unexpected == [] and found.blob("config.json") == b"{}"
    assert model["w"] is kept["w"] and np.array_equal(model["w"], w)
    assert model["deep"][0]["b"].tolist() == [0, 1, 2] and model["deep"][1] == 7 and lone.tolist() == [1, 1]
    assert ((count.count, count.loaded, inner.count, inner.loaded) == (5, 1, 6, 1) and count.seen is seen and
            seen.tolist() == [5, 5, 5])
    assert inner.seen.tolist() == [6, 6]                # another shape than it had
    assert set(found.values) == {"epoch", "trainer"} and found.values["epoch"] == 3
    read = found.values["trainer"]
    assert (read["name"] == "x" and read["late"] == 1 and read["cache"]["n"] == (1, 2) and
            read["cache"]["q"].tolist() == [1, 1] and trainer["name"] == "")


def test_every_memory(run):
    """Strided, transposed, turned and converted destinations, and the other byte order."""
    w = np.arange(24, dtype="f4").reshape(4, 6)
    vckpt.save(run, {"m": {"w": w, "none": np.zeros((0, 3))}}, **ALONE)
    for to in np.zeros((6, 4), "f4").T, np.zeros((8, 12), "f4")[::2,
                                                                ::2], np.zeros((4, 6), "f4")[::-1, ::-1], np.zeros(
        (4, 6), "f8"), np.zeros((4, 6), ">f4"):
        vckpt.load(run, {"m": {"w": to, "none": np.ones((0, 3))}}, **ALONE)
        assert np.array_equal(to, w), to.strides
    fixed = np.zeros((4, 6), "f4")
    fixed.flags.writeable = False
    with pytest.raises(vckpt.InvalidArgument, match="read-only"):
        vckpt.load(run, {"m": {"w": fixed}}, strict=False, **ALONE)


def test_what_does_not_fit_is_one_error(run):
    vckpt.save(run, {"model": {"a": np.ones(3), "b": np.ones(2), "old": np.ones(1)}, "other": {"x": np.ones(1)}},
               **ALONE)
    a, many = np.zeros(3), {f"n{i:02}": np.zeros(1) for i in range(13)}
    state = {"model": {"a": a, "b": np.zeros((2, 2)), **many}, "ema": {"w": np.zeros(1)}, "gone": Counter(0)}
    with pytest.raises(vckpt.InvalidArgument) as e:
        vckpt.load(run, state, **ALONE)
    listed = ", ".join(f"model/n{i:02}" for i in range(10))
    assert str(e.value) == (f"{run}/0 does not fit the state: the step lacks {listed} and 5 more; the state lacks "
                            f"model/old; "
                            "model/b has the shape [2] in the step and [2, 2] in the state (a tensor is filled in its "
                            "own shape only: "
                            "make it of the step's shape, or leave it out of the state and give strict=False)")
    assert not a.any()
    del state["model"]["b"]
    found = vckpt.load(run, state, strict=False, **ALONE)
    assert found.missing == [*(f"model/{name}" for name in many), "ema",
                             "gone"] and found.unexpected == ["model/b", "model/old"] and a.all()
    state["model"]["b"] = np.zeros((2, 2))
    with pytest.raises(vckpt.InvalidArgument, match=r"does not fit the state: model/b has the shape \[2\] in the step "
                       r"and \[2, 2\] in the state \(a tensor is filled"):
        vckpt.load(run, state, strict=False, **ALONE)
    # a component that only the step has is no matter
    assert vckpt.load(run, {"other": {"x": np.zeros(1)}}, **ALONE).unexpected == []


def test_where_there_is_no_step(run, tmp_path):
    with pytest.raises(vckpt.NotAStore):
        vckpt.load(run, {}, **ALONE)
    assert vckpt.load(run, {}, missing_ok=True, **ALONE) is None and not run.parent.exists()
    vckpt.init(run.parent)
    for path in run, run / "latest":
        with pytest.raises(vckpt.NotFound, match="run run of .*store has no step"):
            vckpt.load(path, {}, **ALONE)
        assert vckpt.load(path, {}, missing_ok=True, **ALONE) is None
    vckpt.save(run, {"m": {"w": np.ones(2)}}, step=4, **ALONE)
    vckpt.save(run, {"m": {"w": np.zeros(2)}}, step=7, **ALONE)
    w = np.full(2, 5.0)
    assert vckpt.load(run, {"m": {"w": w}}, **ALONE).step == 7 and not w.any()
    assert vckpt.load(run / "4", {"m": {"w": w}}, **ALONE).step == 4 and w.all()
    with pytest.raises(vckpt.NotFound):
        vckpt.load(run / "5", {}, missing_ok=True, **ALONE)


def test_a_run_that_has_the_name_of_a_step(run):
    """STORE/100/latest is of the run 100, and never the step 100 of the run `default`."""
    store, w = run.parent, np.zeros(2)
    vckpt.save(store / "default", {"m": {"w": np.ones(2)}}, step=100, **ALONE)
    with pytest.raises(vckpt.NotFound, match="run 100 of .*store has no step"):
        vckpt.load(store / "100/latest", {"m": {"w": w}}, **ALONE)
    assert vckpt.load(store / "100/latest", {"m": {"w": w}}, missing_ok=True, **ALONE) is None and not w.any()
    vckpt.save(store / "100/7", {"m": {"w": np.full(2, 7.0)}}, **ALONE)
    for path in store / "100", store / "100/latest":
        assert vckpt.load(path, {"m": {"w": w}}, **ALONE).step == 7 and w.tolist() == [7, 7]


def test_no_step_is_not_a_step_of_which_something_is_missing(run):
    """missing_ok: a training that begins anew after damage would lose all that it has."""
    vckpt.save(run, {"m": {"w": np.ones(2)}}, step=4, **ALONE)
    vckpt.close()
    for kind in "runs/run/manifests/*", "packs/*/*":
        for file in list(run.parent.glob(kind)):
            file.unlink()
        with pytest.raises(vckpt.Error):
            vckpt.load(run, {"m": {"w": np.zeros(2)}}, missing_ok=True, **ALONE)


def test_several_processes_without_a_group(run, monkeypatch):
    vckpt.save(run, {"m": {"w": np.ones(2)}}, **ALONE)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(vckpt.InvalidArgument, match=r"give rank= and world=; where this process loads by itself, give "
                       r"rank=0, world=1"):
        vckpt.load(run, {})
    with pytest.raises(vckpt.InvalidArgument, match="belong together"):
        vckpt.load(run, {}, rank=1)


def test_a_state_dict_by_itself(run):
    vckpt.save(run, {"a.w": np.ones(3), "a.b": np.arange(2)}, **ALONE)
    state = {"a.w": np.zeros(3), "a.b": np.zeros(2, int)}
    vckpt.load(run, state, **ALONE)
    assert state["a.w"].all() and state["a.b"].tolist() == [0, 1]


W = np.arange(60, dtype="f4").reshape(10, 6)
LAYOUTS = {
    "rows": (4, lambda r, a: vckpt.Shard(a[-(-10 // 4) * r:-(-10 // 4) * (r + 1)], shape=(10, 6), mesh="dp=4",
                                         placements="S(0)")),
    "strided": (2, lambda r, a: vckpt.Shard(np.ascontiguousarray(a[[[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]][r]]),
                                            shape=(10, 6), mesh="dp=2", placements="SS(0,2)")),
    "columns": (3, lambda r, a: vckpt.Shard(np.ascontiguousarray(a[:, 2 * r:2 * r + 2]), shape=(10, 6),
                                            mesh=("tp=3", [2, 1, 0][::-1]), placements="S(1)")),
    "flat": (3, lambda r, a: vckpt.Shard(a.reshape(-1)[20 * r:20 * r + 20].copy(), shape=(10, 6),
                                         flat=(20 * r, 20 * r + 20))),
    "flat of columns": (2,
                        lambda r, a: vckpt.Shard(np.ascontiguousarray(a[:, 1:5]).reshape(-1)[20 * r:20 * r + 20].copy(),
                                                 shape=(10, 4), flat=(20 * r, 20 * r + 20))),
    "boxes": (2, lambda r, a: vckpt.Shard(np.concatenate([a[:3].reshape(-1), a[7:, 2:].reshape(-1)]) if r == 0 else
                                          np.concatenate([a[3:7].reshape(-1), a[7:, :2].reshape(-1)]), shape=(10, 6),
                                          boxes=[((0, 0), (3, 6)), ((7, 2), (3, 4))] if r == 0
                                          else [((3, 0), (4, 6)), ((7, 0), (3, 2))])),
    "mesh of the call": (2, lambda r, a: vckpt.Shard(a[5 * r:5 * r + 5], shape=(10, 6), placements="S(0)")),
}


@pytest.mark.parametrize("kept", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_layout(run, save, kept, dtype):
    """A step of one layout into a job of it; the memory that a rank does not hold stays as it was."""
    world, part = LAYOUTS[kept]
    more = {"mesh": "dp=2"} if kept == "mesh of the call" else {}
    save(1, world, lambda rank: {"m": {"w": part(rank, W.copy())}}, **more)

    def one(rank):
        shard, wanted = part(rank, np.zeros_like(W, dtype)), part(rank, W).tensor
        shard.tensor = np.zeros_like(shard.tensor, dtype)
        vckpt.load(run, {"m": {"w": shard}}, rank=rank, world=world, **more)
        return np.array_equal(shard.tensor, wanted)
    assert all(one(rank) for rank in range(world))


def test_from_one_layout_into_others(run, save):
    save(1, 4, lambda rank: {"m": {"w": LAYOUTS["rows"][1](rank, W.copy())}})
    for name in "rows", "strided", "columns", "flat", "boxes":
        world, part = LAYOUTS[name]
        for rank in range(world):
            shard = part(rank, W)
            wanted, shard.tensor = shard.tensor, np.zeros_like(shard.tensor)
            vckpt.load(run, {"m": {"w": shard}}, rank=rank, world=world)
            assert np.array_equal(shard.tensor, wanted), name
    whole = np.zeros((10, 6), "f4")
    vckpt.load(run, {"m": {"w": whole}}, **ALONE)
    assert np.array_equal(whole, W)


def test_a_load_needs_nothing_of_ranks_that_have_nothing_of_it(run, save):
    """The manifest says which rank has which document. So each rank of many reads its own part, and not those of all:
    here the other parts are gone. What only they have is missed by name."""
    whole = np.arange(60.0).reshape(6, 10)

    def state(rank):
        rows = vckpt.Shard(whole[2 * rank:2 * rank + 2].copy(), shape=whole.shape, mesh="dp=3", placements="S(0)")
        return {"m": {"w": rows, "n": 5}, "own": {"at": rank}}
    save(1, 3, state, per_rank="own")
    gone = list((run.parent / "packs").glob("*/*-2-*.pack"))
    assert len(gone) == 2 and [path.unlink() for path in gone]
    for rank in (0, 1):
        to = state(rank)
        to["m"]["w"].tensor[:] = to["m"]["n"] = to["own"]["at"] = 0
        found = vckpt.load(run, to, rank=rank, world=3)
        assert np.array_equal(to["m"]["w"].tensor, whole[2 * rank:2 * rank + 2])
        assert found.values["m"]["n"] == 5 and found.values["own"] == {"at": rank}
    with vckpt.open(run) as step:
        assert list(step._blob_ranks("own.json")) == [0, 1, 2] and step.values("own", rank=1) == {"at": 1}
        assert step.ranks("m") == step.ranks("\0") == []
        assert step._blob_bytes("own.json", -1) is step._blob_bytes("own.json", 1 << 40) is None
        assert step._blob_bytes("m.json", 1) is step._blob_bytes("own.json", None) is step._blob_bytes("\0", 1) is None
        for rank in (3, -1, None, "1", 1 << 32):
            with pytest.raises(vckpt.NotFound, match="has no blob own.json"):
                step.blob("own.json", rank)
        with pytest.raises(vckpt.Error, match="-2-meta"):
            step.blob("own.json", 2)


def test_a_document_that_is_lost_is_not_one_that_never_was(run, save):
    """Of more than 1 MiB it is in a pack of its own."""
    save(1, 2, lambda rank: {"m": {"text": "x" * (2 << 20)}, "n": 1})
    (pack,) = (run.parent / "packs").glob("*/*-blobs.pack")
    pack.unlink()
    for rank in (0, 1):
        for strict in (True, False):
            with pytest.raises(vckpt.Error, match=rf"{pack.name}: it is missing"):
                vckpt.load(run, {"m": {"text": ""}}, rank=rank, world=2, strict=strict)


def test_generators_and_what_is_per_rank(run, save, capfd):
    def state(rank):
        return {"rng": vckpt.rng_state(), "loader": {"at": rank * 10, "queue": np.full(2 + rank, rank), "names": ["x"]},
                "all": {"n": 1}}
    vckpt.save(run, state(0), step=1, per_rank="loader", **ALONE)
    wanted = np.random.random(3)
    np.random.seed(9)
    queue = np.zeros(2, int)
    found = vckpt.load(run, {"rng": vckpt.rng_state(), "loader": {"at": 0, "queue": queue, "names": []}}, **ALONE)
    assert found.rng and np.array_equal(np.random.random(3), wanted)
    assert found.values == {"loader": {"at": 0, "queue": queue, "names": ["x"]}} and queue.tolist() == [0, 0]
    assert not vckpt.load(run, {"rng": vckpt.rng_state()}, rank=0, world=2).rng
    assert capfd.readouterr().err.endswith("were left as they are: 1 rank saved them, this job has 2\n")
    save(2, 2, lambda rank: {"rng": vckpt.RngState({"rank": rank}),
                             "loader": {"at": rank * 10, "queue": np.full(2 + rank, rank)}, "all": {"n": 1}},
         per_rank="loader")
    queue = np.zeros(3, int)
    found = vckpt.load(run, {"loader": {"at": 0, "queue": queue}}, rank=1, world=2)
    assert found.values["loader"]["at"] == 10 and queue.tolist() == [1, 1, 1]
    with pytest.raises(vckpt.InvalidArgument,
                       match=r"loader/queue has the shape \[3\] in the step and \[4\] in the state"):
        vckpt.load(run, {"loader": {"queue": np.zeros(4, int)}}, rank=1, world=2)
    before = np.random.get_state()[1].tobytes()
    with pytest.raises(vckpt.InvalidArgument,
                       match=r"the step lacks loader/queue \(kept for each of 2 ranks, this job has 1\)"):
        vckpt.load(run, {"rng": vckpt.rng_state(), "loader": {"queue": queue}}, **ALONE)
    with pytest.raises(vckpt.InvalidArgument,
                       match=r"the step lacks loader \(kept for each of 2 ranks, this job has 1\)"):
        vckpt.load(run, {"loader": {"at": 0}}, **ALONE)
    capfd.readouterr()
    found = vckpt.load(run, {"rng": vckpt.rng_state(), "all": {"n": 0}}, **ALONE)
    assert not found.rng and found.values == {"all": {"n": 1}} and np.random.get_state()[1].tobytes() == before
    assert (capfd.readouterr().err == f"vckpt: {run}/2: the random number generators were left as they are: 2 ranks "
            f"saved them, this job has 1\n")


class Pair(NamedTuple):
    count: int
    w: Any


@dataclasses.dataclass(frozen=True)
class Kept:
    name: str
    w: Any


def test_tensors_in_objects_of_classes(run):
    """They are read wherever `values` has them: in records, in the classes of types=, in namespaces; a named tuple of
    the state is filled."""
    saved = {"c": Kept("x", np.arange(3.0)), "p": Pair(1, np.ones(2)), "n": argparse.Namespace(w=np.ones(4))}
    vckpt.save(run, {"all": saved}, **ALONE)
    plain = vckpt.load(run, {"all": None}, **ALONE).values["all"]
    assert plain["c"].w.tolist() == [0, 1, 2] and plain["p"].w.tolist() == [1, 1] and plain["n"].w.tolist() == [1] * 4
    found = vckpt.load(run, {"all": None}, types=[Kept, Pair], **ALONE).values["all"]
    assert type(found["c"]) is Kept and found["c"].name == "x" and found["c"].w.tolist() == [0, 1, 2]
    assert type(found["p"]) is Pair and found["p"].count == 1 and found["p"].w.tolist() == [1, 1]
    for types in [], [Pair]:
        mine = Pair(0, np.zeros(2))
        found = vckpt.load(run, {"all": {"c": None, "n": None, "p": mine}}, types=types, **ALONE).values["all"]
        assert mine.w.tolist() == [1, 1] and found["p"] == (1, mine.w) and found["p"].w is mine.w


def test_a_list_that_was_longer(run):
    vckpt.save(run, {"m": [np.ones(2), 1, 2, 3]}, **ALONE)
    w = np.zeros(2)
    assert vckpt.load(run, {"m": [w, 0]}, **ALONE).values["m"][1:] == [1, 2, 3] and w.tolist() == [1, 1]


def test_an_object_gets_the_type_that_was_saved(run):
    """A mean that was a count of 0 at the start is not cut down to whole numbers."""
    one, other = Counter(0), Counter(0)
    one.seen = np.full(3, 0.75)
    vckpt.save(run, {"count": one}, **ALONE)
    vckpt.load(run, {"count": other}, **ALONE)
    assert other.seen.tolist() == [0.75] * 3


def test_what_cannot_be_filled_is_found_first(run, save):
    save(1, 1, lambda rank: {"m": {"a": np.ones(2), "b": np.ones(3)}})
    save(2, 1, lambda rank: {"m": {"a": np.ones(2), "b": np.ones(3)}}, per_rank=["m.b"])
    fixed, a = np.zeros(3), np.zeros(2)
    fixed.flags.writeable = False
    for step, b, sentence in (1, fixed, "m/b of the state is read-only"), (2, fixed, "m/b of the state is read-only"), (
        2, np.zeros(4), "m/b has the shape"):
        with pytest.raises(vckpt.InvalidArgument, match=sentence):
            vckpt.load(run / str(step), {"m": {"a": a, "b": b}}, **ALONE)
        assert not a.any()


# Past 2^24 by one more than half of what bf16 keeps: rounded once it goes up, by way of float32 it goes down.
TWICE = np.array([0x01010001, -0x01010001, 1 << 30], np.int32)
BIG = np.array([1e10, -1e10, np.nan, -0.9, 127.6])
TABLE = [(BIG, "int8", [127, -128, 0, 0, 127]), (BIG, "uint8", [255, 0, 0, 0, 127]), (BIG, "bool", [1, 1, 1, 1, 1]),
         (BIG.astype("f4"), "int64", [10**10, -10**10, 0, 0, 127]), (np.array([300, -1]), "int8", [44, -1]),
         (np.array([1e300, 65519.0, 65520.0]), "float16", [np.inf, 65504, np.inf]),
         (np.array([True, False]), "float32", [1, 0]), (np.array([1 + 2j]), "complex64", [1 + 2j])]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "of the rank"])
def test_other_dtypes(run, own):
    """By the rules of docs/load.md, whatever numpy would do."""
    more = {"per_rank": "*"} if own else {}
    vckpt.save(run, {"m": {str(i): a for i, (a, *_) in enumerate(TABLE)} | {"twice": TWICE}}, step=1, **more)
    state = {str(i): np.zeros(a.shape, dtype) for i, (a, dtype, _) in enumerate(TABLE)}
    state |= {"0": np.full((5, 3), 7, "i1")[:, 1], "1": np.full(10, 7, "u1")[::-2]}     # in memory that is not plain
    vckpt.load(run, {"m": state}, strict=False)
    for i, (_, _, expected) in enumerate(TABLE):
        assert state[str(i)].tolist() == expected, TABLE[i]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    vckpt.load(run, {"m": (state := {"twice": np.zeros(3, ml_dtypes.bfloat16)})}, strict=False)
    assert state["twice"].astype(int).tolist() == [0x01020000, -0x01020000, 1 << 30]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "of the rank"])
def test_no_conversion(run, own):
    vckpt.save(run, {"m": {"w": np.ones(3)}}, step=1, **({"per_rank": "*"} if own else {}))
    state = {"m": {"w": np.zeros(3, "c16")}}
    with pytest.raises(ValueError, match="m/w is f64 in the step and c128 in the state, and the one cannot be conv"):
        vckpt.load(run, state)
    assert not state["m"]["w"].any()
