# SPDX-License-Identifier: Apache-2.0
"""vckpt.open: tensors that are read when they are asked for, and only the part that is asked for; against numpy's own
indexing."""
import copy
import pickle

import numpy as np
import pytest

import vckpt
from vckpt import step as steps

W = np.arange(4 * 5 * 6, dtype="f4").reshape(4, 5, 6)
STATE = {"model": {"w": W, "a/b": np.arange(7), "none": np.zeros((0, 3)), "one": np.array(2.5)}, "ema": {"w": W + 1},
         "lr": 0.1}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "store/run"
    vckpt.save(path, STATE, step=3, attributes={"loss": 2.5}, blobs={"config.json": b"{}"}, rank=0, world=1, pin="no")
    vckpt.close()
    return path


@pytest.fixture
def step(run):
    with vckpt.open(run, framework="numpy") as found:
        yield found


@pytest.fixture
def boxes(monkeypatch):
    """What is read of tensors: the numbers (offset, size) of each read."""
    seen, read = [], steps.Step._read

    def counted(self, number, pairs, address, strides):
        seen.append(list(pairs))
        read(self, number, pairs, address, strides)
    monkeypatch.setattr(steps.Step, "_read", counted)
    return seen


def test_what_is_known_of_a_tensor(step, boxes):
    w = step["model/w"]
    assert (w.component, w.name, w.dtype, w.shape, w.nbytes, w.ndim, len(w)) == ("model", "w", "f32", (4, 5, 6), 480,
                                                                               3, 4)
    assert repr(w) == "<vckpt.LazyTensor model/w: f32 [4, 5, 6]>" and bool(step["model", "none"]) is True
    assert step["a/b"].shape == (7,) and step["ema", "w"].component == "ema" and not boxes
    assert w.numpy().dtype == "f4" and np.array_equal(w, W) and np.array_equal(np.asarray(w, "f8"), W)
    assert [row.tolist() for row in w] == W.tolist()
    one = step["model/one"]
    assert one.numpy().shape == () and one.numpy() == 2.5 and one[...].shape == () and float(np.asarray(one)) == 2.5
    with pytest.raises(TypeError, match="model/one has no dimensions"):
        len(one)
    with pytest.raises(ValueError, match="leave out copy=False"):
        w.__array__(copy=False)


PARTS = [0, -1, 3, slice(None), slice(1, 3), slice(3, 1), slice(-2, None), slice(0, 4, 2), slice(1, None, 3),
         slice(None, None, -1), slice(4, 1, -2), slice(-1, -9, -2), ..., (), (1, 2, 3), (..., 2), (1, ..., slice(2, 4)),
         (slice(None), -1), (slice(2, 5), slice(None, None, 2)), (slice(None, None, -3), ..., slice(5, None, -4)),
         (np.int64(2), slice(0, 0)), (0, 1, slice(1, 6, 4), ...)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_part(step, part):
    found = step["model/w"][part]
    assert type(found) is type(W[part]) and found.shape == W[part].shape and np.array_equal(found, W[part])


def test_random_parts(step, rng, scale):
    w = step["model/w"]

    def one(n):
        if rng.random() < 0.3:
            return rng.randrange(-n, n)
        return slice(*(rng.choice([None, *range(-n - 2, n + 3)]) for _ in range(2)), rng.choice([None, -3, -2, -1, 1,
                                                                                                 2, 3]))
    for _ in range(scale(100, 5000)):
        part = tuple(one(n) for n in W.shape[:rng.randrange(4)])
        assert np.array_equal(w[part], W[part]) and np.shape(w[part]) == W[part].shape, part


def test_only_what_is_asked_for_is_read(step, boxes):
    w = step["model/w"]
    w[1:3, ::2, -1]
    assert boxes.pop() == [1, 2, 0, 5, 5, 1]            # of a slice with a step the box that it lies in
    w[1:3, 3:0:-2]
    assert boxes.pop() == [1, 2, 1, 3, 0, 6]
    assert w[::3].base is None and boxes.pop() == [0, 4, 0, 5, 0, 6]
    assert w[2:2].shape == (0, 5, 6) and step["model/none"].numpy().shape == (0, 3) and not boxes
    for wrong, sentence in ((4, "model/w, dimension 0: 4 is out of range for a size of 4"), ((0, 0, 0, 0), "3 dimen"),
                            (None, "expected a whole number"), (True, "expected a whole number"),
                            ((..., 0, ...), "one ellipsis"), ([0, 1], "read the part and index the array"),
                            (1.0, "whole number")):
        with pytest.raises(IndexError, match=sentence):
            w[wrong]
    assert not boxes


def test_a_step_that_is_open(step):
    assert len(step) == 4 + 1 and "model/w" in step and "w" in step and "x" not in step and ("model", "none") in step
    assert sorted(step) == sorted(step.keys()) == ["ema/w", "model/a/b", "model/none", "model/one", "model/w"]
    assert {name: tensor.shape for name, tensor in step.items()} == {name: step[name].shape for name in step}
    assert np.array_equal(dict(step)["ema/w"].numpy(), W + 1)
    assert step.attributes == {"loss": "2.5"} and step.blob("config.json") == b"{}" and step.values("lr") == 0.1
    assert np.array_equal(step.values("model")["w"], W) and type(step) is vckpt.Step
    assert step.get("model/w").shape == W.shape and step.get("x") is None and step.get(("model", "x"), 3) == 3
    for wrong in ("x", 3, ("model", "x"), ("model",), ("model", "w\0"), ("model", "\ud800"), ("model", None)):
        assert wrong not in step
        with pytest.raises(KeyError):
            step[wrong]
    with pytest.raises(KeyError, match=r"w is in .* and .*: give step\[COMPONENT, NAME\]"):
        step["w"]
    w = step["model/w"]
    step.close()
    for read in w.numpy, lambda: w[0], lambda: step["model/w"], lambda: len(step):
        with pytest.raises(vckpt.Error, match="run/3 is closed"):
            read()


def test_a_tensor_is_found_without_the_others(run, monkeypatch):
    """Of a step with many tensors nothing is described but what is asked for."""
    asked, stored = [], steps.Step._stored
    monkeypatch.setattr(steps.Step, "_stored", lambda self, number: asked.append(number) or stored(self, number))
    with vckpt.open(run, framework="numpy") as step:
        assert step["model/w"].shape == W.shape and "ema/w" in step and len(step) == 5 and len(asked) <= 3
        assert next(iter(step)) and next(step.items()) and len(asked) <= 5
        assert len(list(step)) == 5 and len(asked) >= 5


def test_numpy_takes_a_tensor_for_an_array(step):
    w = step["model/w"]
    np.testing.assert_array_equal(w, W)
    assert np.allclose(W, w) and np.stack([w, w]).shape == (2, *W.shape)
    assert np.array_equal(W - w, np.zeros(W.shape)) and (W == w).all()


def test_a_tensor_is_not_compared_by_what_object_it_is(step):
    w = step["model/w"]
    for compare in (lambda: w == W, lambda: w != W, lambda: w == step["ema/w"], lambda: w in [step["model/w"]],
                    lambda: dict(step) == dict(step)):
        with pytest.raises(TypeError, match=r"is not read to be compared: compare t.numpy\(\) or t.torch\(\), or"):
            compare()
    with pytest.raises(TypeError, match="unhashable"):
        {w}  # noqa: B018


def test_a_pickle_opens_the_step_again(run):
    """Each of the two closes what it opened, and no other."""
    step = vckpt.open(run, framework="numpy")
    held = pickle.loads(pickle.dumps([step, step["model/w"]]))
    twin = copy.copy(step)
    step.close()
    assert (held[0].number, held[0].framework) == (3, "numpy") and np.array_equal(held[1], W)
    twin.close()
    assert np.array_equal(copy.deepcopy(held[1])[1], W[1])
    with pytest.raises(vckpt.Error, match="run/3 is closed"):
        pickle.dumps(step)


def test_a_save_says_what_to_give_for_a_tensor_of_a_step(run):
    with vckpt.open(run) as step, pytest.raises(TypeError, match=r'state\["copy"\]\["w"\]: a LazyTensor .* cannot be '
                                                r"kept: give its numpy\(\) or its torch\(\)"):
        vckpt.save(run, {"copy": {"w": step["model/w"], "n": 1}}, rank=0, world=1, pin="no")


def test_digests_tell_what_a_later_step_changed(run, boxes):
    changed = {**STATE["model"], "w": W + 2, "twin": W, "as bytes": W.view("u4"), "flat": W.reshape(-1)}
    vckpt.save(run, {**STATE, "model": changed}, step=4, rank=0, world=1, pin="no")
    vckpt.close()
    with vckpt.open(f"{run}/3") as before, vckpt.open(f"{run}/4") as after:
        digests = {name: (before[name].digest() if name in before else None, tensor.digest())
                   for name, tensor in after.items()}
        held = before["model/w"]
        w = held.digest()
    assert not boxes and len(w) == 64
    assert {name for name, (old, new) in digests.items() if old == new} == {"model/a/b", "model/none", "model/one",
                                                                            "ema/w"}
    assert digests["model/twin"][1] == w and w not in (digests["model/as bytes"][1], digests["model/flat"][1])
    with pytest.raises(vckpt.Error, match="closed"):
        held.digest()


def test_components(tmp_path):
    """With tensors, with values alone, and of some rank alone; a file of the step is none."""
    run = tmp_path / "store/r"
    vckpt.save(run, {"model": {"w": np.zeros(3)}, "opt": {"lr": 0.1, "m": np.zeros(2)}, "epoch": {"n": 3}}, step=1,
               blobs={"config.json": b'{"x": 1}'}, pin="no")
    vckpt.close()
    with vckpt.open(run / "1") as step:
        assert step.components() == ["model", "opt", "epoch"]
        assert all(step.values(name) is not None for name in step.components())
