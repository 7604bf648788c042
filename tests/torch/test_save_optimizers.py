# SPDX-License-Identifier: Apache-2.0
"""Optimizers: a save changes nothing of what is trained, whatever the optimizer has made of its state so far; and
optimizers over several modules, loose parameters and parts of a module are named, or refused by path."""
import random

import numpy as np
import pytest
import torch

import vckpt
from vckpt import state

PIN = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    yield tmp_path / "store/run"
    vckpt.close(tmp_path / "store/run")


def net(seed=0):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        # a step of nothing would touch these
        made[0].weight[0].copy_(torch.tensor([-0.0, 0.0, 1e-40, -1e-40, 3.0, -3.0]))
    return made


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


def words(value):
    """All of a state, comparable: bits of tensors, repr of the rest."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value).detach()
        return str(local.dtype), tuple(local.shape), local.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return [(str(key), words(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [words(item) for item in value]
    return repr(value)


def everything(model, optimizer):
    """Weights, gradients, the optimizer's state, generators."""
    return (words(dict(model.state_dict())), [None if p.grad is None else words(p.grad) for p in model.parameters()],
            words(optimizer.state_dict()), words(torch.get_rng_state()), repr(random.getstate()),
            repr(np.random.get_state()))


def one_step(model, optimizer, number):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_changes_nothing(run, kind):
    """At step 0, after it, and beside gradients: weights, state, gradients and generators are what they were, bit by
    bit; the training with saves gives the weights of the one without."""
    model, other = net(), net()
    optimizer, their = KINDS[kind](model.parameters()), KINDS[kind](other.parameters())
    for number in range(5):
        before, stepped = everything(model, optimizer), getattr(optimizer, "_step_count", None)
        vckpt.save(run, {"model": model, "optimizer": optimizer}, step=number, **PIN)
        assert everything(model, optimizer) == before
        assert getattr(optimizer, "_step_count", None) == stepped
        one_step(model, optimizer, number)
        one_step(other, their, number)
    assert everything(model, optimizer) == everything(other, their)
    with vckpt.Step(run / "0") as step:
        tree = step.values("optimizer")
        assert [group["params"] for group in tree["param_groups"]] == [["0.weight", "0.bias", "2.weight", "2.bias"]]
        assert set(tree["state"]) == ({"0.weight", "0.bias", "2.weight", "2.bias"} if kind == "adagrad" else set())


def test_what_steps_is_never_called(run):
    """Hooks and wrappers of step() (a scheduler counts by one) are not run by a save."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    vckpt.save(run, {"model": model, "optimizer": optimizer, "scheduler": scheduler}, **PIN)
    assert not called and not getattr(optimizer, "_opt_called", False)


def test_names_are_those_that_torch_gives(run):
    """Where torch's function may be asked it says the same, groups, names and all, compiled and wrapped modules
    included."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    for wrap in (lambda m: m, torch.compile, lambda m: torch.nn.ModuleDict({"inner": m})):
        model = net()
        optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-2},
                                       {"params": model[2].parameters()}], lr=1e-3)
        one_step(model, optimizer, 1)
        whole = wrap(model)
        found = state.collect({"model": whole, "optimizer": optimizer})
        kept = state.collect({"model": whole, "optimizer": dict(get_optimizer_state_dict(whole, optimizer))})
        assert sorted(found.blobs) == sorted(kept.blobs)


def test_state_of_some_parameters(run):
    """An expert that was never used has no state yet: what is there is kept."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(6)).sum().backward()
    optimizer.step()
    vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)
    with vckpt.Step(run) as step:
        assert set(step.values("optimizer")["state"]) == {"0.weight", "0.bias"}


class Scaled(torch.optim.SGD):
    """Has a scale of the loss, as optimizers for half precision do."""
    scale = None

    def state_dict(self):
        return {**super().state_dict(),
                **({} if self.scale is None else {"loss_scaler": {"scale": self.scale, "seen": torch.ones(2)}})}


class Wrapped(torch.optim.SGD):
    def state_dict(self):
        return {"inner": super().state_dict()}


@pytest.mark.parametrize("hook", [False, True])
def test_what_a_state_dict_has_beside_the_state(run, hook):
    """Kept, also where it comes after saves without it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=.9) if hook else Scaled(model.parameters(), momentum=.9)
    state = {"model": model, "optimizer": optimizer}
    one_step(model, optimizer, 0)
    for number in range(2):
        vckpt.save(run, state, step=number, **PIN)
    if hook:
        optimizer.register_state_dict_post_hook(
            lambda _, taken: {**taken, "loss_scaler": {"scale": 512.0, "seen": torch.ones(2)}})
    else:
        optimizer.scale = 512.0
    vckpt.save(run, state, step=2, **PIN)
    with vckpt.Step(run / "1") as step:
        assert list(step.values("optimizer")) == ["state", "param_groups"]
    with vckpt.Step(run / "2") as step:
        assert step.values("optimizer")["loss_scaler"]["scale"] == 512.0
        assert "optimizer/loss_scaler.seen" in {f"{info.component}/{info.name}" for info in step.tensors()}


def test_a_state_dict_without_a_state(run):
    model = net()
    optimizer = Wrapped(model.parameters(), momentum=.9)
    one_step(model, optimizer, 0)
    with pytest.raises(vckpt.Refused, match='state\\["optimizer"\\]: the state_dict\\(\\) of Wrapped has no "state"'):
        vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)
    vckpt.save(run, {"model": model, "optimizer": optimizer.state_dict()}, **PIN)


def test_over_two_modules_and_a_loose_parameter(run):
    """Named as if the state's keys were those of a ModuleDict."""
    actor, critic, temperature = net(1), net(2), torch.nn.Parameter(torch.tensor(0.3))
    optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters(), temperature], lr=0.1)
    (actor(torch.ones(6)).sum() + critic(torch.ones(6)).sum() * temperature).backward()
    optimizer.step()
    vckpt.save(run, {"actor": actor, "heads": {"critic": critic}, "temperature": temperature, "optimizer": optimizer},
               **PIN)
    with vckpt.Step(run) as step:
        tree = step.values("optimizer")
        names = tree["param_groups"][0]["params"]
        assert names == [*(f"actor.{n}" for n, _ in actor.named_parameters()),
                         *(f"heads.critic.{n}" for n, _ in critic.named_parameters()),
                         "temperature"]
        assert list(tree["state"]) == names
        assert torch.equal(tree["state"]["heads.critic.2.bias"]["exp_avg"], optimizer.state[critic[2].bias]["exp_avg"])
        assert torch.equal(tree["state"]["temperature"]["exp_avg"], optimizer.state[temperature]["exp_avg"])
    # and the remembered names are those of the next save
    one_step(actor, torch.optim.SGD(actor.parameters(), lr=1.0), 3)
    vckpt.save(run, {"actor": actor, "heads": {"critic": critic}, "temperature": temperature, "optimizer": optimizer},
               **PIN)
    with vckpt.Step(run) as step:
        assert step.values("optimizer")["param_groups"][0]["params"] == names


def test_a_parameter_that_has_no_name(run):
    model, loose = net(), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose]}], lr=0.1)
    with pytest.raises(TypeError, match=r'state\["optimizer"\]: its parameter 0 of group 1, of shape \[4\], is in no '
                       r'module of the state and is no tensor of it'):
        vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)


def test_two_parameters_of_one_name(run):
    inner, outer = torch.nn.Linear(2, 2), torch.nn.Module()
    outer.b = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*outer.parameters(), *inner.parameters()], lr=0.1, momentum=0.9)
    with pytest.raises(TypeError, match=r'state\["optimizer"\]: two of its parameters would be called "a.b.weight"'):
        vckpt.save(run, {"a": outer, "more": {"x": 1}, "optimizer": optimizer, "a.b": inner}, **PIN)


def test_state_of_what_is_no_parameter(run):
    """A key of a program's own stays; a parameter that was taken out of its groups is named."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, optimizer, 0)
    optimizer.state["own"] = {"count": 3}
    vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)
    with vckpt.Step(run) as step:
        assert step.values("optimizer")["state"]["own"] == {"count": 3}
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(TypeError, match=r'state\["optimizer"\]: it has state of a parameter of shape \[3\] that is in '
                       r'none of its groups'):
        vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lbfgs"])
def test_restored(run, kind, steps):
    """A step at which the optimizer had no state, or had some, goes back, and training goes on alike."""
    model, other = net(), net(5)
    optimizer, their = KINDS[kind](model.parameters()), KINDS[kind](other.parameters())
    for number in range(steps):
        one_step(model, optimizer, number)
    vckpt.save(run, {"model": model, "optimizer": optimizer}, step=steps, **PIN)
    called = []
    their.register_step_pre_hook(lambda *_: called.append("pre"))
    assert vckpt.load(run, {"model": other, "optimizer": their}).step == steps
    assert not called and words(their.state_dict()) == words(optimizer.state_dict())
    for number in range(2):
        one_step(model, optimizer, number)
        one_step(other, their, number)
    assert words(dict(model.state_dict())) == words(dict(other.state_dict()))


# ---- ranks ----

def _wrapped(kind):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model = net()
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for part in model[0], model[2]:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _with_and_without(path, kind, chosen):
    model, other = _wrapped(kind), _wrapped(kind)
    optimizer, their = KINDS[chosen](model.parameters()), KINDS[chosen](other.parameters())
    for number in range(5):
        before = everything(model, optimizer)
        vckpt.save(path, {"model": model, "optimizer": optimizer}, step=number, **PIN)
        assert everything(model, optimizer) == before, number
        one_step(model, optimizer, number)
        one_step(other, their, number)
    vckpt.close(path)
    assert everything(model, optimizer) == everything(other, their)
    with vckpt.Step(f"{path}/0") as step:
        return step.values("optimizer")["param_groups"][0]["params"], words(dict(step.values("model")))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("chosen", ["sgd", "momentum", "adamw", "adagrad"])
def test_training_with_saves_is_training_without(pool2, run, kind, chosen):
    names, weights = pool2(_with_and_without, str(run), kind, chosen)[0]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert weights == words(dict(net().state_dict()))


def _flat(path, originals):
    """FSDP1 flattens parameters: before the first step, and after it, where torch's own function may be asked."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, other = (FullyShardedDataParallel(net(), use_orig_params=originals, device_mesh=mesh,
                                             device_id=torch.device("cpu")) for _ in range(2))
    optimizer, their = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    before = everything(model, optimizer)[2:]
    vckpt.save(path, {"model": model, "optimizer": optimizer}, step=0, **PIN)
    assert everything(model, optimizer)[2:] == before and not optimizer.state
    one_step(model, optimizer, 0)
    one_step(other, their, 0)
    vckpt.save(path, {"model": model, "optimizer": optimizer}, step=1, **PIN)
    vckpt.close(path)
    assert [words(p) for p in model.parameters()] == [words(p) for p in other.parameters()]
    fresh = FullyShardedDataParallel(net(5), use_orig_params=originals, device_mesh=mesh, device_id=torch.device("cpu"))
    new = torch.optim.AdamW(fresh.parameters(), lr=9.0)
    for number, (loaded, count) in enumerate([(0, 0), (1, len(optimizer.state))]):
        assert vckpt.load(f"{path}/{number}", {"model": fresh, "optimizer": new}).step == loaded
        assert len(new.state) == count and new.param_groups[0]["lr"] == 0.1
    kept, wanted = new.state_dict(), optimizer.state_dict()
    assert words(kept["param_groups"]) == words(wanted["param_groups"])
    assert all(dict(words(kept["state"][key])) == dict(words(state)) for key, state in wanted["state"].items())
    for number in (1, 2):
        one_step(fresh, new, number)
        one_step(other, their, number)
    assert [words(p) for p in fresh.parameters()] == [words(p) for p in other.parameters()]
    from vckpt import torch_optimizers
    found = torch_optimizers.optimizer_state(optimizer, {"model": model}, {}, ("optimizer",))
    assert words(found) == words(dict(get_optimizer_state_dict(model, optimizer)))
    with vckpt.Step(f"{path}/0") as first, vckpt.Step(f"{path}/1") as second:
        return [set(step.values("optimizer")["param_groups"][0]["params"])
                for step in (first, second)], set(second.values("optimizer")["state"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("originals", [True, False])
def test_flattened_parameters(pool2, run, originals):
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    for groups, keys in pool2(_flat, str(run), originals):
        assert groups == [names, names] and keys == names


class Mastered(torch.optim.AdamW):
    """It trains fp32 copies of bf16 weights."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    kept = self.state[p]
                    kept["master"] = kept.get("master", p.float() * 1.01) * 0.9
                    p.copy_(kept["master"])

    def state_dict(self):
        return {**super().state_dict(), "scale": 8.0}


def _flat_masters(path, originals):
    """A load puts them where they were, in their dtype, and not into the weights; through load_state_dict(). (Of
    original parameters FSDP1 itself gives state of one dtype only.)"""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    mesh, dtype = init_device_mesh("cpu", (dist.get_world_size(),)), torch.float32 if originals else torch.bfloat16
    model, fresh = (FullyShardedDataParallel(net(seed).to(dtype), use_orig_params=originals, device_mesh=mesh,
                                             device_id=torch.device("cpu")) for seed in (0, 5))
    optimizer, new = (Mastered(one.parameters(), lr=0.1) for one in (model, fresh))
    model(torch.ones(2, 6, dtype=dtype)).sum().backward()
    optimizer.step()
    vckpt.save(path, {"model": model, "optimizer": optimizer}, step=1, **PIN)
    vckpt.close(path)
    seen = []
    new.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["scale"]))
    for _ in range(2):                                  # without state, and with some of another dtype
        vckpt.load(path, {"model": fresh, "optimizer": new})
        kept, wanted = new.state_dict()["state"], optimizer.state_dict()["state"]
        good = [dict(words(kept[key])) == dict(words(one)) for key, one in wanted.items()]
        good.append([words(p) for p in model.parameters()] == [words(p) for p in fresh.parameters()])
        for one in new.state.values():
            one["master"] = one["master"].bfloat16()
    return good, seen, {str(one["master"].dtype) for one in wanted.values()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("originals", [True, False])
def test_flattened_parameters_with_masters(pool2, run, originals):
    for good, seen, dtypes in pool2(_flat_masters, str(run), originals):
        assert good and all(good) and seen == [8.0, 8.0] and dtypes == {"torch.float32"}


def _zero(path, kind, steps):
    """The state of each parameter at one rank; it goes back into the same, and trains on as if nothing had been."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def made(seed):
        model = torch.nn.parallel.DistributedDataParallel(net(seed))
        chosen = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD}[kind]
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=chosen, lr=0.1,
                                              **({"momentum": 0.9} if kind == "momentum" else {}))
    model, optimizer = made(0)
    for number in range(steps):
        one_step(model, optimizer, number)
    optimizer.param_groups[0]["lr"] = 0.05
    held = words({str(i): state for i, state in enumerate(optimizer.optim.state.values())})
    vckpt.save(path, {"model": model, "optimizer": optimizer}, step=1, **PIN)
    assert words({str(i): state for i, state in enumerate(optimizer.optim.state.values())}) == held
    vckpt.save(path, {"model": model, "optimizer": optimizer}, step=2)
    vckpt.close(path)
    other, their = made(5)
    with vckpt.Step(path) as step:
        own = step.values("optimizer", rank=dist.get_rank())
    vckpt.load(path, {"model": other, "optimizer": their})
    for number in range(2):
        one_step(model, optimizer, 10 + number)
        one_step(other, their, 10 + number)
    return (words(dict(model.state_dict())) == words(dict(other.state_dict())), their.param_groups[0]["lr"],
            sorted(own["state"]),
            len(optimizer.optim.state))


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("steps", [0, 2])
def test_zero_redundancy(pool2, run, kind, steps):
    found = pool2(_zero, str(run), kind, steps)
    names = [name for _, _, own, _ in found for name in own]
    assert all(same and lr == 0.05 for same, lr, _, _ in found)
    assert (sorted(names) == (["0.bias", "0.weight", "2.bias", "2.weight"] if steps else []) and
            (not steps or all(own for _, _, own, _ in found)))
    model = net(5)                                      # and in one process into the optimizer that it wraps
    optimizer = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD}[kind](model.parameters(), lr=0.1)
    vckpt.load(run, {"model": model, "optimizer": optimizer})
    assert len(optimizer.state) == (4 if steps else 0) and optimizer.param_groups[0]["lr"] == 0.05
    if steps:
        tensors = {info.name for info in vckpt.Step(run).tensors() if info.component == "optimizer"}
        assert {name.removeprefix("state.").rsplit(".", 1)[0]
                for name in tensors} == {"0.bias", "0.weight", "2.bias", "2.weight"}


def _two_sharded(path):
    """One optimizer over two sharded modules and a parameter by itself, before its first step, after it, and back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def made(seed):
        both = torch.nn.ModuleDict({"actor": net(seed), "critic": net(seed + 1)})
        for part in both.values():
            fully_shard(part, mesh=mesh)
        loose = torch.nn.Parameter(torch.tensor(0.3 * (seed + 1)))
        return both, loose, torch.optim.AdamW([*both.parameters(), loose], lr=0.1)

    def train(both, loose, optimizer):
        optimizer.zero_grad()
        (both["actor"](torch.ones(2, 6)).sum() + both["critic"](torch.ones(2, 6)).square().sum() * loose).backward()
        optimizer.step()
    both, loose, optimizer = made(0)
    for number in (0, 1):
        state = {"actor": both["actor"], "critic": both["critic"], "temperature": loose, "optimizer": optimizer}
        vckpt.save(path, state, step=number)
        train(both, loose, optimizer)
    vckpt.save(path, state, step=2)
    vckpt.close(path)
    other, their_loose, their = made(7)
    vckpt.load(path,
               {"actor": other["actor"], "critic": other["critic"], "temperature": their_loose, "optimizer": their})
    for one in ((both, loose, optimizer), (other, their_loose, their)):
        train(*one)
    return words(dict(both.state_dict())) == words(dict(other.state_dict())) and torch.equal(loose, their_loose)


def test_over_two_sharded_modules(pool2, run):
    assert pool2(_two_sharded, str(run)) == [True, True]


def _without_items(path):
    """Ranks 2 and 3 hold nothing of two parameters, of whose shapes all but the first dimension is the same."""
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Linear(1, 8), torch.nn.Linear(8, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        vckpt.save(path, {"model": model, "optimizer": optimizer}, step=number)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        return all([torch.equal(step["model", name].torch(), tensor.full_tensor())
                    for name, tensor in model.state_dict().items()])


def test_parameters_of_which_a_rank_has_nothing(pool4, run):
    assert pool4(_without_items, str(run)) == [True] * 4


# ---- parameters that are given as tensors ----

def _named_by(path, kind):
    """The state dict of the module in its place: tensors over the parameters' memory, those of one rank without items
    among them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1), torch.nn.Linear(1, 1))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(made, mesh=mesh)
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(0.5)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    wrapped = torch.compile(made, backend="eager") if kind == "compiled" else made
    vckpt.save(path, {"model": wrapped.state_dict(), "optimizer": optimizer}, step=1, **PIN)
    vckpt.save(path, {"model": wrapped, "optimizer": optimizer}, step=2)
    vckpt.close(path)
    with vckpt.Step(f"{path}/1") as first, vckpt.Step(f"{path}/2") as second:
        one, two = first.values("optimizer"), second.values("optimizer")
        names = list(first.values("model"))
    return words(one["state"]) == [(("_orig_mod." if kind == "compiled" else "") + key, value)
                                   for key, value in words(two["state"])], \
        one["param_groups"][0]["params"] == [name for name in names], len(one["state"])


@pytest.mark.parametrize("kind", ["plain", "fsdp", "compiled"])
def test_named_by_a_state_dict(pool2, run, kind):
    assert pool2(_named_by, str(run), kind) == [(True, True, 6)] * 2


def test_a_copy_gives_no_names(run):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, optimizer, 0)
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TypeError, match=r'state\["optimizer"\]: its parameter 0 of group 0, of shape \[8, 6\], is in '
                       r'no module of the state and is no tensor'):
        vckpt.save(run, {"model": copied, "optimizer": optimizer}, step=1, **PIN)
    assert vckpt.save(run, {"model": model.state_dict(), "optimizer": optimizer}, step=2) == 2


def _experts(path, unused):
    """Each rank has an expert of its own; that of rank 1 may have been unused so far."""
    import torch.distributed as dist
    rank = dist.get_rank()
    shared, expert = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.AdamW([*shared.parameters(), *expert.parameters()], lr=0.1)
    loss = shared(torch.ones(2)).sum()
    (loss if unused and rank else loss + expert(torch.ones(2)).sum()).backward()
    optimizer.step()
    own = {f"{rank}.{name}": vckpt.Shard(parameter, alone=True) for name, parameter in expert.named_parameters()}
    for number in (1, 2):
        vckpt.save(path, {"shared": shared, "experts": own, "optimizer": optimizer}, step=number, **PIN)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        tree = step.values("optimizer", rank=rank)
        weights = step.values("experts", rank=rank)
        there = {info.name for info in step.tensors() if info.component == "optimizer"}
    assert all(words(tree["state"][f"experts.{rank}.{name}"]) == words(optimizer.state[parameter])
               for name, parameter in expert.named_parameters() if parameter in optimizer.state)
    assert all(torch.equal(weights[f"{rank}.{name}"], parameter) for name, parameter in expert.named_parameters())
    return sorted(tree["state"]), f"state.experts.{rank}.weight.exp_avg" in there


@pytest.mark.parametrize("unused", [False, True])
def test_experts_of_one_rank(pool2, run, unused):
    for rank, (names, there) in enumerate(pool2(_experts, str(run), unused)):
        own = [] if unused and rank else [f"experts.{rank}.bias", f"experts.{rank}.weight"]
        assert names == [*own, "shared.bias", "shared.weight"] and there == bool(own)


def _flat_part(path):
    """A flat part of a parameter at each rank, as distributed optimizers cut it: the state is cut alike."""
    import torch.distributed as dist
    rank = dist.get_rank()
    part = torch.nn.Parameter(torch.arange(3.0) + 3 * rank)
    optimizer = torch.optim.AdamW([part], lr=0.1)
    part.grad = torch.arange(3.0) + 10 * rank + 1
    optimizer.step()
    vckpt.save(path, {"weights": {"w": vckpt.Shard(part, shape=(2, 3), flat=(3 * rank, 3 * rank + 3))},
                      "optimizer": optimizer}, step=1, **PIN)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        whole = step["optimizer", "state.w.exp_avg"].torch()
        return tuple(whole.shape), torch.equal(whole.reshape(-1)[3 * rank:3 * rank + 3],
                                               optimizer.state[part]["exp_avg"]), float(step["state.w.step"].torch())


def test_a_flat_part_of_a_parameter(pool2, run):
    assert pool2(_flat_part, str(run)) == [((2, 3), True, 1.0)] * 2
