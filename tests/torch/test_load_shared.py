# SPDX-License-Identifier: Apache-2.0
"""States in which two names are one tensor, and steps in which they are equal, or are not."""
import numpy as np
import pytest
import torch

import vckpt

PIN = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


class Best:
    """`best` is `current` until the first comparison. how: what it does with what it is given."""

    def __init__(self, tensor, how="keeps"):
        self.current = self.best = tensor
        self.how = how

    def state_dict(self):
        return {"best": self.best, "list": [self.current]}

    def load_state_dict(self, state):
        if self.how == "keeps":
            self.best, self.current = state["best"], state["list"][0]
        else:
            self.current.copy_(state["list"][0])
            self.best = state["best"].clone()


@pytest.mark.parametrize("how, kind", [("keeps", "torch"), ("keeps", "numpy"), ("keeps", "other dtype"),
                                       ("keeps", "numpy, other shape"), ("copies", "torch"), ("copies", "other dtype")])
def test_an_object_with_one_tensor_twice(run, how, kind):
    def made(value):
        return np.full(4, value, "f4") if "numpy" in kind else torch.full((4,), value, dtype=torch.float32)
    saved = Best(made(1.0))
    saved.best = made(2.0)
    vckpt.save(run, {"o": saved}, **PIN)
    now = made(0.0).double() if kind == "other dtype" else made(0.0)[:1] if "shape" in kind else made(0.0)
    fresh = Best(now, how)
    found = vckpt.load(run, {"o": fresh})
    assert type(fresh.best) is type(fresh.current) is type(now)
    assert fresh.best.tolist() == [2.0] * 4 and fresh.current.tolist() == [1.0] * 4 and not found.shared


def test_an_object_that_shares_a_parameter(run):
    """Best weights that are the model's own at the start: each gets its own, also where they are equal in the step."""
    model = torch.nn.Linear(2, 2)
    for step, factor in enumerate((1, 2)):
        saved = Best(model.weight.detach() * factor)
        vckpt.save(run, {"model": model, "early": saved}, step=step, **PIN)
        for order in "model", "early":
            fresh = torch.nn.Linear(2, 2)
            early = Best(fresh.weight.detach())
            state = {"model": fresh, "early": early}
            vckpt.load(f"{run}/{step}", {order: state.pop(order), **state})
            assert torch.equal(fresh.weight, model.weight) and torch.equal(early.best, model.weight * factor)
            with torch.no_grad():
                fresh.weight.zero_()
            assert early.best.any()


class Tied(torch.nn.Module):
    def __init__(self, tied, hooked=False):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if hooked:
            self.register_load_state_dict_pre_hook(lambda *_: None)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_model_that_ties_what_the_step_has_apart(run, hooked, capfd):
    apart, tied = Tied(False), Tied(True)
    vckpt.save(run, {"model": apart}, step=0, **PIN)
    vckpt.save(run, {"model": tied}, step=1, **PIN)
    fresh = Tied(True, hooked)
    before = fresh.embed.weight.tolist()
    with pytest.raises(vckpt.InvalidArgument, match=r"model/embed.weight and model/head.weight are one tensor in the "
                       r"state, and differ in the step: give each a tensor of its own \(strict=False lets the last"):
        vckpt.load(f"{run}/0", {"model": fresh})
    assert fresh.embed.weight.tolist() == before and not capfd.readouterr().err
    found = vckpt.load(f"{run}/0", {"model": fresh}, strict=False)
    assert found.shared == [("model/embed.weight", "model/head.weight")]
    assert "are one tensor in the state, and differ in the step: the last one counts" in capfd.readouterr().err
    assert torch.equal(fresh.embed.weight, apart.head.weight)
    found = vckpt.load(f"{run}/1", {"model": fresh})
    assert torch.equal(fresh.embed.weight, tied.embed.weight) and not found.shared
    found = vckpt.load(f"{run}/1", {"model": Tied(False)})          # and apart again
    assert not found.shared


def test_equal_tensors_are_read_once(run):
    w = torch.rand(1 << 18)
    vckpt.save(run, {"m": {"a": w, "b": w.clone(), "c": w.view(512, 512)}}, step=0, **PIN)
    vckpt.save(run, {"m": {"a": w, "b": w + 1, "c": w.view(512, 512)}}, step=1, **PIN)
    to = torch.zeros(1 << 18)
    found = vckpt.load(f"{run}/0", {"m": {"a": to, "b": to, "c": to.view(512, 512)}})
    assert torch.equal(to, w) and found.bytes_read < 1.2 * w.nbytes and not found.shared
    with pytest.raises(vckpt.InvalidArgument, match="m/b and m/a are one tensor in the state"):
        vckpt.load(f"{run}/1", {"m": {"a": to, "b": to, "c": to.view(512, 512)}})
    halves = torch.zeros(1 << 18)           # neighbours, and columns of one matrix, are not the same
    even = halves.view(-1, 2)
    vckpt.save(run, {"m": {"x": w[:1 << 17], "y": w[1 << 17:]}, "n": {"x": w[::2], "y": w[1::2]}}, step=2, **PIN)
    vckpt.load(f"{run}/2", {"m": {"x": halves[:1 << 17], "y": halves[1 << 17:]}})
    assert torch.equal(halves, w)
    vckpt.load(f"{run}/2", {"n": {"x": even[:, 0], "y": even[:, 1]}})
    assert torch.equal(halves, w)


@pytest.mark.parametrize("kind", ["torch", "numpy", "bf16"])
def test_tensors_that_overlap_in_part(run, kind, capfd):
    """A flat tensor and a view of its rows: equal where they overlap, or refused by both names."""
    def of(tensor):
        return tensor.numpy() if kind == "numpy" else tensor.bfloat16() if kind == "bf16" else tensor
    flat = torch.arange(10_000.0) % 200
    for step, more in enumerate((0, 1)):
        rows = flat[900:9900].clone().view(30, 300)
        rows[29, 299] += more
        vckpt.save(run, {"m": {"flat": of(flat), "rows": of(rows)}, "o": Best(of(rows))}, step=step, **PIN)

    vckpt.save(run, {"m": {"flat": of(flat), "rows": torch.arange(10_000, dtype=torch.int32)}}, step=3, **PIN)

    def fresh():
        to = of(torch.zeros(10_000))
        return to, {"m": {"rows": to[900:9900].reshape(30, 300), "flat": to}}
    to, state = fresh()
    assert not vckpt.load(f"{run}/0", state, strict=False).shared and to.tolist() == flat.tolist()
    to, state = fresh()
    with pytest.raises(vckpt.InvalidArgument, match="m/rows and m/flat share memory in the state, and differ in the s"):
        vckpt.load(f"{run}/1", state)
    assert not any(to.tolist())
    found = vckpt.load(f"{run}/1", state, strict=False)
    assert found.shared == [("m/rows", "m/flat")] and to.tolist() == flat.tolist()
    assert "m/rows and m/flat share memory in the state, and differ in the step: the last one counts" in (
        capfd.readouterr().err)
    if kind == "torch":                         # other items of the same memory
        both = torch.zeros(10_000)
        with pytest.raises(vckpt.InvalidArgument, match="m/flat and m/rows share memory"):
            vckpt.load(f"{run}/3", {"m": {"flat": both, "rows": both.view(torch.int32)}})
    to, state = fresh()
    early = Best(state["m"].pop("rows"))        # an object's gets memory of its own
    found = vckpt.load(f"{run}/1", {**state, "o": early}, strict=False)
    assert not found.shared and to.tolist() == flat.tolist() and early.best.tolist() == of(rows).tolist()


@pytest.mark.filterwarnings("ignore")
def test_schedulers_whose_lr_is_a_tensor(run):
    """A chain of them, as torch's load_state_dict leaves it."""
    def made():
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False)
        kinds = torch.optim.lr_scheduler
        return model, optimizer, kinds.ChainedScheduler([kinds.ConstantLR(optimizer, 0.5, 4),
                                                         kinds.ExponentialLR(optimizer, 0.9)], optimizer)
    model, optimizer, chain = made()
    for _ in range(3):
        optimizer.step()
        chain.step()
    vckpt.save(run, {"model": model, "optimizer": optimizer, "chain": chain}, **PIN)
    (new_model, new, again), (_, theirs, their_chain) = made(), made()
    theirs.load_state_dict(optimizer.state_dict())
    their_chain.load_state_dict(chain.state_dict())
    vckpt.load(run, {"model": new_model, "optimizer": new, "chain": again})
    for _ in range(3):
        for one, schedule in ((new, again), (theirs, their_chain), (optimizer, chain)):
            one.step()
            schedule.step()
    assert float(new.param_groups[0]["lr"]) == float(theirs.param_groups[0]["lr"]) == float(
        optimizer.param_groups[0]["lr"])
    assert again.get_last_lr() == chain.get_last_lr()
