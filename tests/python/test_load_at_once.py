# SPDX-License-Identifier: Apache-2.0
"""How vckpt.load reads: all tensors of a state by one load of the library, copies in batches, what is damaged, and
Ctrl-C meanwhile. What it fills: test_load_numpy.py and tests/torch."""
import os
import signal
import time

import numpy as np
import pytest

import vckpt
from vckpt import _lib, loading_tensors, loads

ALONE = {"rank": 0, "world": 1}


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


@pytest.fixture
def calls(monkeypatch):
    """The names of the tensors of each load of the library."""
    seen, real = [], loads._Load.run

    def counted(self, rows):
        seen.append([row.name.decode() for row in rows])
        real(self, rows)
    monkeypatch.setattr(loads._Load, "run", counted)
    return seen


class Kept:
    """An object with a state; `order` has what was there when it was loaded."""

    def __init__(self, value, model=None):
        self.value, self.model, self.seen = np.full(3, value), model, None

    def state_dict(self):
        return {"value": self.value, "more": {"x": self.value[:2] * 2}}

    def load_state_dict(self, state):
        self.seen = None if self.model is None else self.model["w"].copy()
        self.value, self.more = state["value"], state["more"]["x"]


def noise(shape, seed, dtype="u4"):
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=dtype)


def test_one_load_for_all(run, calls):
    """Whole tensors, shards, strided memory, objects' and values' tensors; objects are loaded when all has arrived."""
    w = np.arange(24.0).reshape(4, 6)
    state = {"a": Kept(5.0), "m": {"w": w, "half": w + 1, "flat": w + 2, "t": w + 3}, "plain": {"q": w, "n": 3}}
    vckpt.save(run, state, **ALONE)
    to = {"w": np.zeros((4, 6)), "half": vckpt.Shard(np.zeros((2, 6)), shape=(4, 6), mesh="dp=2", placements="S(0)"),
          "flat": vckpt.Shard(np.zeros(5), shape=(4, 6), flat=(3, 8)), "t": np.zeros((6, 4)).T}
    one = Kept(0.0, to)
    one.value = np.zeros(4)                 # another shape: it gets what was saved
    found = vckpt.load(run, {"a": one, "m": to, "plain": None}, rank=0, world=2)
    assert len(calls) == 1 and sorted(calls[0]) == ["flat", "half", "more.x", "q", "t", "value", "w"]
    assert np.array_equal(one.seen, w) and one.value.tolist() == [5.0] * 3 and one.more.tolist() == [10.0] * 2
    assert np.array_equal(to["half"].tensor, w[:2] + 1) and np.array_equal(to["t"], w + 3)
    assert to["flat"].tensor.tolist() == (w + 2).reshape(-1)[3:8].tolist()
    assert np.array_equal(found.values["plain"]["q"], w) and found.damaged == []


def test_copies_come_in_batches(run, calls, monkeypatch):
    monkeypatch.setattr(loading_tensors, "STAGED_BYTES", 2000)
    state = {f"w{i}": np.full(100, i, "f8") for i in range(5)} | {"big": np.ones(500), "same": np.full(7, 8.0)}
    vckpt.save(run, {"m": state}, **ALONE)
    to = {name: np.zeros(array.shape, "f4") for name, array in state.items() if name != "same"}
    to["same"] = np.zeros(7)
    vckpt.load(run, {"m": to}, **ALONE)
    assert calls == [["same"], ["w0", "w1"], ["w2", "w3"], ["w4"], ["big"]]
    assert all(np.array_equal(to[name], state[name]) for name in state)


def test_names_with_the_same_memory(run, calls):
    """Tied weights are read once. Of those that overlap in part the last one counts, and no two are read at once."""
    vckpt.save(run, {"m": {"a": np.full(1 << 16, 2.0), "b": np.full(1 << 16, 2.0), "c": np.full(4, 3.0),
                           "d": np.full(2, 4.0), "e": np.full(2, 5.0)}}, **ALONE)
    tied = np.zeros(1 << 16)
    vckpt.load(run, {"m": {"a": tied, "b": tied, "c": tied[4:8], "d": np.zeros(2), "e": tied[2:4]}}, strict=False,
               **ALONE)
    assert calls == [["a", "d"], ["c", "e"]] and tied[:10].tolist() == [2, 2, 5, 5, 3, 3, 3, 3, 2, 2]
    assert (tied[8:] == 2).all()


def test_options(run, calls):
    w = np.arange(6.0)
    vckpt.save(run, {"m": {"w": w}}, **ALONE)
    for threads in 0, 1, np.int64(3), 256:
        for verify in "checks", "full":
            to = np.zeros(6)
            found = vckpt.load(run, {"m": {"w": to}}, threads=threads, verify=verify, on_damage="skip", **ALONE)
            assert np.array_equal(to, w) and found.damaged == []
    for direct in "auto", "yes", "no":
        to = np.zeros(6)
        vckpt.load(run, {"m": {"w": to}}, direct=direct, **ALONE)
        assert np.array_equal(to, w)
    for more, sentence in (({"threads": -1}, "threads=-1: expected a whole number from 0 to 256"),
                           ({"threads": 257}, "threads=257"), ({"threads": True}, "threads=True"),
                           ({"verify": "no"}, "verify='no': expected one of checks, full"),
                           ({"direct": True}, "direct=True: expected one of auto, yes, no"),
                           ({"on_damage": "list"}, "on_damage='list': expected one of raise, skip")):
        with pytest.raises(vckpt.InvalidArgument, match=sentence):
            vckpt.load(run / "7", {}, **more, **ALONE)          # before anything is looked for


def flip(run, array):
    """A byte of the last item of an array, in the pack that has it as it is."""
    wanted = array.tobytes()[-64:]
    for path in run.parent.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            os.chmod(path, 0o600)
            with open(path, "r+b") as file:
                file.seek(at + 63)
                file.write(bytes([wanted[63] ^ 1]))
            return
    raise AssertionError("no file has these bytes")


def test_damage(run):
    w, x = noise((3000, 1000), 1), noise((700,), 2)
    vckpt.save(run, {"m": {"w": w, "x": x}, "object": Kept(4.0)}, pin="no", **ALONE)
    vckpt.close()
    flip(run, w)

    def state(dtype):
        return {"m": {"w": np.zeros(w.shape, dtype), "x": np.zeros(x.shape, dtype)}, "object": Kept(0.0)}
    for dtype in "u4", "u8":
        to = state(dtype)
        with pytest.raises(vckpt.Damaged, match="m/w: .*pack "):
            vckpt.load(run, to, **ALONE)
        assert not hasattr(to["object"], "more")
        found = vckpt.load(run, to, on_damage="skip", **ALONE)
        [(name, (offsets, sizes), reason)] = found.damaged
        assert name == "m/w" and "pack " in reason and to["object"].more.tolist() == [8.0] * 2
        right = to["m"]["w"] == w
        part = tuple(slice(a, a + n) for a, n in zip(offsets, sizes))
        assert right[part].size < w.size and part[0].stop == 3000
        right[part] = True
        assert right.all() and np.array_equal(to["m"]["x"], x)
    values = vckpt.load(run, {"m": None}, on_damage="skip", **ALONE)
    assert values.damaged == found.damaged and np.array_equal(values.values["m"]["x"], x)


def test_whole_pieces_are_compared(run):
    """Where a rank needs a part of a piece, verify="full" reads all of it."""
    w = noise((12, 1000), 3)
    vckpt.save(run, {"m": {"w": w}}, pin="no", **ALONE)
    vckpt.close()
    flip(run, w)
    part = vckpt.Shard(np.zeros((2, 1000), "u4"), shape=w.shape, boxes=[((0, 0), (2, 1000))])
    vckpt.load(run, {"m": {"w": part}}, **ALONE)
    assert np.array_equal(part.tensor, w[:2])
    with pytest.raises(vckpt.Damaged):
        vckpt.load(run, {"m": {"w": part}}, verify="full", **ALONE)


@pytest.fixture
def control_c():
    """As in a terminal. Who was started in the background of a shell ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", ["direct", "copied"])
def test_interrupted(run, monkeypatch, kind, control_c):
    """Ctrl-C ends a load that is under way, and its threads, before the call returns: nothing is written afterwards."""
    w = noise((16 << 20,), 4)
    vckpt.save(run, {"m": {"w": w}, "object": Kept(1.0)}, pin="no", **ALONE)
    over, free, freed = loads._Load.over, _lib.lib().vckpt_load_free, []

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return over(self)
    monkeypatch.setattr(loads._Load, "over", interrupted)
    monkeypatch.setattr(_lib.lib(), "vckpt_load_free", lambda pointer: freed.append(free(pointer)))
    to, one = np.zeros(w.shape, "u4" if kind == "direct" else "u8"), Kept(0.0)
    with pytest.raises(KeyboardInterrupt):
        vckpt.load(run, {"m": {"w": to}, "object": one}, **ALONE)
    assert len(freed) == 1 and not hasattr(one, "more")
    before = to.copy()
    time.sleep(0.3)
    assert np.array_equal(to, before)
    monkeypatch.undo()
    vckpt.load(run, {"m": {"w": to}, "object": one}, **ALONE)
    assert np.array_equal(to, w)


def test_interrupted_while_it_waits(run, monkeypatch):
    """A signal's handler runs while the library reads; what it raises ends the load."""
    w = noise((16 << 20,), 5)
    vckpt.save(run, {"m": {"w": w}}, pin="no", **ALONE)
    monkeypatch.setattr(loads, "SLICE_MS", 1)

    class Told(Exception):
        pass

    def handler(*_):
        raise Told
    over = loads._Load.over
    monkeypatch.setattr(loads._Load, "over",
                        lambda self: (signal.setitimer(signal.ITIMER_REAL, 1e-4), over(self), over(self))[2])
    before = signal.signal(signal.SIGALRM, handler)
    to = np.zeros(w.shape, "u4")
    try:
        with pytest.raises(Told):
            vckpt.load(run, {"m": {"w": to}}, threads=1, **ALONE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
