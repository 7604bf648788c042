# SPDX-License-Identifier: Apache-2.0
"""vckpt.load of torch's objects on one rank, and of ranks that agree on the newest step. Layouts: test_save_layouts.py;
optimizers: test_save_optimizers.py; whole trainings, in the same layout and in others: test_examples.py."""
import copy
import shutil

import numpy as np
import pytest
import torch

from test_meeting import ranks

import vckpt

PIN = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


def test_rules_of_conversion(run):
    """docs/load.md's, where torch's own copy rounds twice, or says that anything may come out."""
    big, twice = torch.tensor([1e10, -1e10, float("nan")]), torch.tensor([0x01010001], dtype=torch.int32)
    vckpt.save(run, {"m": {"big": big, "twice": twice}}, step=1, pin="no")
    state = {"big": torch.full((3, 2), 7, dtype=torch.int8)[:, 1], "twice": torch.zeros(1, dtype=torch.bfloat16)}
    vckpt.load(run, {"m": state})
    assert state["big"].tolist() == [127, -128, 0] and state["twice"].tolist() == [0x01020000]


def test_other_types_and_memory(run):
    """Conversions as load_state_dict makes them, in both directions; strided and conjugated destinations."""
    w = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    vckpt.save(run, {"m": {"w": w, "half": w.bfloat16(), "c": torch.complex(w, w)}}, **PIN)
    to = {"w": torch.zeros(6, 4, dtype=torch.bfloat16), "half": torch.zeros(6, 4),
          "c": torch.zeros(6, 4, dtype=torch.complex64).conj()}
    vckpt.load(run, {"m": to})
    assert (torch.equal(to["w"], w.bfloat16()) and torch.equal(to["half"], w.bfloat16().float()) and
            torch.equal(to["c"].resolve_conj(), torch.complex(w, w)))
    to = {"w": torch.zeros(4, 6).t(), "half": torch.zeros(12, 8, dtype=torch.bfloat16)[::2, ::2],
          "c": torch.zeros(6, 4, dtype=torch.complex64)}
    vckpt.load(run, {"m": to})
    assert torch.equal(to["w"], w) and torch.equal(to["half"], w.bfloat16())
    with pytest.raises(vckpt.Refused, match=r'state\["m"\]\["w"\]: a tensor on the meta device has no memory to '
                       r'be filled'):
        vckpt.load(run, {"m": {**to, "w": torch.zeros(6, 4, device="meta")}})
    to["w"] = torch.zeros(6, 4)
    with pytest.raises(vckpt.InvalidArgument, match="m/half of the state has items that share memory"):
        vckpt.load(run, {"m": {**to, "half": torch.zeros(4).expand(6, 4)}})
    assert not to["w"].any()


class Extra(torch.nn.Linear):
    """A module with a state of its own beside its tensors, and one whose state dict has copies."""
    count = 0

    def get_extra_state(self):
        return {"count": self.count, "seen": torch.full((2,), self.count)}

    def set_extra_state(self, state):
        self.count, self.seen = state["count"], state["seen"]


class Copies(torch.nn.Linear):
    def state_dict(self, *arguments, **more):
        return {name: tensor.clone() for name, tensor in super().state_dict(*arguments, **more).items()}


def test_modules_of_others(run):
    def made(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(Extra(3, 2), torch.nn.BatchNorm1d(2),
                                   torch.nn.Linear(2, 2, bias=False)), Copies(2, 3)
    (one, copies), (other, their) = made(0), made(1)
    one[0].count = 4
    one(torch.randn(5, 3))
    vckpt.save(run, {"model": one, "copies": copies}, **PIN)
    found = vckpt.load(run, {"model": other, "copies": their})
    assert found.values == {} and other[0].count == 4 and other[0].seen.tolist() == [4, 4]
    for a, b in (one, other), (copies, their):
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert torch.equal(one[1].running_mean, other[1].running_mean) and other[1].num_batches_tracked == 1


def test_a_state_dict_and_generators(run, capfd):
    model, generator = torch.nn.Linear(3, 2), torch.Generator().manual_seed(5)
    torch.manual_seed(3)
    vckpt.save(run, {"model": model, "g": generator, "rng": vckpt.rng_state()}, **PIN)
    wanted = torch.rand(3), torch.rand(3, generator=generator), np.random.random(2)
    other, fresh = torch.nn.Linear(3, 2), torch.Generator()
    found = vckpt.load(run, {"model": other.state_dict(), "g": fresh, "rng": vckpt.rng_state()})
    assert found.rng and torch.equal(torch.rand(3), wanted[0]) and torch.equal(torch.rand(3, generator=fresh),
                                                                               wanted[1])
    assert np.array_equal(np.random.random(2), wanted[2]) and torch.equal(other.weight, model.weight)
    other = torch.nn.Linear(3, 2)
    vckpt.load(run, other.state_dict())                 # a state dict by itself: the component `model`
    assert torch.equal(other.weight, model.weight) and not capfd.readouterr().err


def test_an_optimizer_that_does_not_fit(run):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}])
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    vckpt.save(run, {"model": model, "optimizer": optimizer, "numbers": optimizer.state_dict()}, **PIN)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(vckpt.InvalidArgument,
                       match="optimizer: it has 2 groups of parameters in the step and 1 in the state"):
        vckpt.load(run, state)
    state["optimizer"] = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    with pytest.raises(vckpt.InvalidArgument, match="its groups have other parameters in the step"):
        vckpt.load(run, state)
    less = {"model": model,
            "optimizer": torch.optim.AdamW([{"params": model[0].weight}, {"params": model[1].parameters()}])}
    with pytest.raises(vckpt.InvalidArgument, match="the state lacks optimizer, its parameter 0.bias"):
        vckpt.load(run, less)
    assert not less["optimizer"].state
    assert vckpt.load(run, less, strict=False).unexpected == ["optimizer, its parameter 0.bias"]
    assert len(less["optimizer"].state) == 3 and less["optimizer"].param_groups[0]["lr"] == 0.5
    with pytest.raises(vckpt.InvalidArgument, match="numbers: its parameters have numbers in the step"):
        vckpt.load(run, {"model": model, "numbers": optimizer})
    other = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    other.load_state_dict(vckpt.load(run, {"numbers": other.state_dict()}).values["numbers"])
    assert (torch.equal(other.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]) and
            other.param_groups[0]["lr"] == 0.5)


def made_of(kind):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


class Gained(torch.optim.SGD):
    """A class of one's own that has a new option."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.defaults["gained"] = 3
        for group in self.param_groups:
            group["gained"] = 3


class Fills(Gained):
    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("gained", 4)


class Asks(Gained):
    def __setstate__(self, state):
        super().__setstate__(state)
        self.param_groups[0]["gained"] = self.never_set


@pytest.mark.parametrize("saved, given, lacks", [
    (torch.optim.Adam, torch.optim.SGD, "dampening, momentum"), (torch.optim.SGD, torch.optim.AdamW, "betas, eps"),
    (torch.optim.Adagrad, torch.optim.RMSprop, "alpha"), (torch.optim.SGD, Gained, "gained")])
def test_an_optimizer_of_another_kind(run, saved, given, lacks):
    vckpt.save(run, made_of(saved), **PIN)
    state = made_of(given)
    for strict in True, False:
        before = torch.cat([state["model"].weight.detach().flatten(),
                            torch.tensor([state["optimizer"].param_groups[0]["lr"]])])
        with pytest.raises(vckpt.InvalidArgument, match=f"optimizer: an optimizer of another kind was saved: its "
                           f"groups have no {lacks}; give one of the kind"):
            vckpt.load(run, state, strict=strict)
        assert (torch.equal(before[:-1], state["model"].weight.detach().flatten()) and
                state["optimizer"].param_groups[0]["lr"] == 0.1)
    assert vckpt.load(run, {"model": state["model"]}).missing == []


class Bare(torch.optim.Optimizer):
    """It does not know the option that torch adds to the defaults, and not to the groups, whenever a state is loaded or
    copied."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = torch.ones_like(p)


@pytest.mark.parametrize("kind", [Bare, torch.optim.Adafactor])
def test_a_second_load_into_one_optimizer(run, kind):
    vckpt.save(run, made_of(kind), **PIN)
    state = made_of(kind)
    for _ in range(2):
        vckpt.load(run, state)
    assert ("differentiable" in state["optimizer"].defaults and
            "differentiable" not in state["optimizer"].param_groups[0])
    vckpt.load(run, copy.deepcopy(state))


def test_an_optimizer_that_fills_in_options(run):
    """As torch's own do for those that newer versions have."""
    one = made_of(torch.optim.SGD)
    vckpt.save(run, one, **PIN)
    state = made_of(Fills)
    vckpt.load(run, state)
    assert state["optimizer"].param_groups[0]["gained"] == 4
    with pytest.raises(AttributeError, match="never_set"):      # what it needs beside its state is its own to say
        vckpt.load(run, made_of(Asks))
    del one["optimizer"].param_groups[0]["fused"], one["optimizer"].param_groups[0]["maximize"]
    vckpt.save(run, one, **PIN)
    state = made_of(torch.optim.SGD)
    vckpt.load(run, state)
    assert state["optimizer"].param_groups[0]["maximize"] is False
    # both have the same options, which come from the step as all do
    one = made_of(torch.optim.Adam)
    vckpt.save(run, one, **PIN)
    state = made_of(torch.optim.AdamW)
    vckpt.load(run, state)
    assert torch.equal(state["optimizer"].state[state["model"].weight]["exp_avg"],
                       one["optimizer"].state[one["model"].weight]["exp_avg"])


def test_none_was_saved_there(run, capfd):
    """A run that had no optimizer yet: the step lacks it, which strict=False allows. Nothing is filled before that is
    said."""
    model = torch.nn.Linear(3, 2)
    vckpt.save(run, {"model": model, "optimizer": None, "schedule": None, "g": None, "rng": None, "other": {"lr": 0.1}},
               **PIN)
    state = made_of(torch.optim.SGD)
    weight = state["model"].weight.detach().clone()
    state |= {"schedule": torch.optim.lr_scheduler.StepLR(state["optimizer"], 3), "g": torch.Generator(),
              "rng": vckpt.rng_state()}
    with pytest.raises(vckpt.InvalidArgument, match=r"the step lacks optimizer, schedule, g \(strict=False takes what "
                       r"both have\)$"):
        vckpt.load(run, state)
    assert torch.equal(weight, state["model"].weight)
    found = vckpt.load(run, state, strict=False)
    assert (found.missing == ["optimizer", "schedule", "g"] and torch.equal(model.weight, state["model"].weight) and
            not found.rng)
    assert "generators were left as they are: the step does not have them" in capfd.readouterr().err
    with pytest.raises(vckpt.Refused, match=r'state\["other"\]: what the step has there is no optimizer.*: leave it '
                       r'out of the state to load the rest'):
        vckpt.load(run, {"model": state["model"], "other": state["optimizer"]})


@pytest.mark.parametrize("tree", [
    {"state": {}, "param_groups": [{"lr": 0.1}]}, {"state": {}, "param_groups": [0.1]},
    {"state": {}, "param_groups": [{"params": 3}]}, {"state": {}, "param_groups": [{"params": [["weight"]]}]},
    {"state": {}, "param_groups": {"weight": 3}}, {"state": [], "param_groups": []}, {"state.weight.step": 1, "x": 2}])
def test_what_is_nearly_an_optimizer(run, tree):
    vckpt.save(run, {"other": tree}, **PIN)
    state = made_of(torch.optim.SGD)
    with pytest.raises(vckpt.Refused, match=r'state\["other"\]: what the step has there is no optimizer'):
        vckpt.load(run, {"other": state["optimizer"], "model": state["model"]}, strict=False)


def test_an_optimizer_of_a_model_that_has_grown(run):
    """Groups in another order give nobody the other group's learning rate, also where not all parameters are in both;
    what the step lacks keeps its state."""
    def made(layers, order):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in layers})
        groups = {"weight": {"lr": 0.5}, "bias": {"lr": 0.1}}
        optimizer = torch.optim.Adam([{"params": [getattr(part, kind) for part in model.values()], **groups[kind]}
                                      for kind in order])
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}
    small = made("ab", ["weight", "bias"])
    vckpt.save(run, small, **PIN)
    turned = made("abc", ["bias", "weight"])
    with pytest.raises(vckpt.InvalidArgument, match="its groups have other parameters in the step than in the state"):
        vckpt.load(run, turned, strict=False)
    assert [group["lr"] for group in turned["optimizer"].param_groups] == [0.1, 0.5]
    grown = made("abc", ["weight", "bias"])
    kept = grown["optimizer"].state[grown["model"]["c"].weight]["exp_avg"].clone()
    vckpt.load(run, grown, strict=False)
    state = grown["optimizer"].state
    assert torch.equal(state[grown["model"]["c"].weight]["exp_avg"], kept)
    assert torch.equal(state[grown["model"]["b"].weight]["exp_avg"],
                       small["optimizer"].state[small["model"]["b"].weight]["exp_avg"])


def test_names_in_groups_stay_with_their_parameters(run):
    try:
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.named_parameters())
    except TypeError:
        pytest.skip("this torch's optimizers take no names")
    vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)
    turned = torch.optim.SGD(reversed(list(model.named_parameters())), lr=0.5)
    vckpt.load(run, {"model": model, "optimizer": turned})
    assert turned.param_groups[0]["param_names"] == ["bias", "weight"] and turned.param_groups[0]["lr"] == 1e-3


# ---- ranks ----

def test_ranks_agree_on_the_newest_step(tmp_path):
    """Rank 1 sees a copy of the store, which has a newer step, or none: what counts is what rank 0 sees, and a rank
    that cannot see that fails for all."""
    for step in 1, 2:
        vckpt.save(tmp_path / "store/run", {"m": {"w": np.full(6, step)}}, step=step, **PIN)
    vckpt.close()
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    vckpt.save(tmp_path / "other/run", {"m": {"w": np.full(6, 3)}}, step=3, **PIN)
    vckpt.close()
    first, second = ranks(2, tmp_path, """
here = run if rank == 0 else run.replace("store", "other")
w = np.zeros(6, int)
state = {"m": {"w": w}}
print(vckpt.load(here, state, meet_timeout=60.0).step, w.tolist() == [2] * 6)
print(vckpt.load(run + "/latest", state).step)
if rank == 0:
    said(vckpt.load, run + "x", state)
else:
    said(vckpt.load, run + "x", state)
print(vckpt.load(run + "x", state, missing_ok=True))
absent = run if rank == 0 else run.replace("store", "none")
said(lambda: vckpt.load(absent, state, missing_ok=True).step)
absent = run if rank == 1 else run.replace("store", "none")
said(vckpt.load, absent, state)
print(vckpt.load(run, state).step)
if rank == 1:
    said(vckpt.load, run, state, meet_timeout=0.5)
dist.barrier()
print(vckpt.load(run + "/1", state).step, w[0])
""")
    one, two = ([line.split(" ", 1)[1] if line[0].isdigit() and "." in line.split()[0] else line for line in lines]
                for lines, _ in (first, second))
    assert one[:2] == two[:2] == ["2 True", "2"], (one, two)
    assert all("NotFound" in said and "has no step" in said for said in (one[2], two[2]))
    assert one[3] == two[3] == "None" and "rank 1: NotAStore" in one[4] and "NotAStore" in two[4]
    assert "NotAStore" in one[5] and "NotAStore" in two[5] and "rank 0: NotAStore" in two[5]
    assert one[6] == two[6] == "2" and one[7] == two[8] == "1 1"
    assert ("Timeout" in two[7] and "rank 0 of 2 did not come" in two[7] and
            "vckpt.load without rank= and world= is a call of all ranks" in two[7])


def _another_number(path):
    import torch.distributed as dist
    if dist.get_rank() == 0:
        torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    found = vckpt.load(path, {"model": model, "rng": vckpt.rng_state(),
                              "scheduler": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))})
    return found.rng, found.step, model.weight.tolist()


def test_more_ranks_than_saved(pool2, run):
    model = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
    vckpt.save(run, {"model": model, "rng": vckpt.rng_state(), "scheduler": scheduler}, step=5, **PIN)
    vckpt.close()
    assert pool2(_another_number, str(run)) == [(False, 5, model.weight.tolist())] * 2


def _in_a_child(path):
    """A child of a rank has the rank's group, but not its place in it: it must not speak for its parent."""
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    model = torch.nn.Linear(2, 2)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_child, args=(path, there))
    child.start()
    said = here.recv() if here.poll(120) else None
    child.join()
    dist.barrier()
    return said, vckpt.load(path, {"model": model}, meet_timeout=120.0).step


def _child(path, pipe):
    model, said = torch.nn.Linear(2, 2), []
    for arguments in {}, {"rank": 0, "world": 1}:
        try:
            said.append(vckpt.load(path, {"model": model}, **arguments).step)
        except vckpt.Forked as error:
            said.append(str(error))
    pipe.send(said)


def test_a_child_of_a_rank(pool2, run):
    vckpt.save(run, {"model": torch.nn.Linear(2, 2)}, step=5, **PIN)
    vckpt.close()
    for said, step in pool2(_in_a_child, str(run)):
        assert step == 5 and said[1] == 5
        assert "the process group belongs to the process that forked this one" in said[0]
