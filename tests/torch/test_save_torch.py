# SPDX-License-Identifier: Apache-2.0
"""torch in one process, without a process group: tensors of every kind, modules and optimizers, what is refused, and
that the memory of the last save never describes a tensor that changed."""
import copy

import numpy as np
import pytest
import torch

import vckpt
from vckpt import _lib, state
from test_state_numpy import described, held

OPTIONS = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    yield tmp_path / "store/run"
    vckpt.close(tmp_path / "store/run")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().reshape(-1).view(torch.uint8),
                                                                     b.contiguous().reshape(-1).view(torch.uint8))


def kinds():
    rng = torch.Generator().manual_seed(0)
    found = {}
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
                 "bfloat16", "float32", "float64",
                 "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                 "float8_e8m0fnu", "float4_e2m1fn_x2"):
        dtype = getattr(torch, name)
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 4 * size), generator=rng, dtype=torch.uint8)
        found[f"kind.{name}"] = raw.view(dtype)
    base = torch.randn(50, 40, generator=rng)
    complex_ = torch.randn(6, 5, generator=rng, dtype=torch.complex64)
    found.update(t=base.t(), cut=base[3:30:4, ::7], expanded=base[0].expand(7, 40),
                 windows=base.reshape(-1).unfold(0, 8, 3), conj=complex_.conj(),
                 neg=complex_.conj().imag, scalar=torch.tensor(2.5), none=torch.zeros(3, 0, 2),
                 grad=base.clone().requires_grad_(),
                 parameter=torch.nn.Parameter(base[:3]), deep=torch.zeros([1] * 12 + [2, 3]),
                 large=torch.randn(700, 900, generator=rng))
    return found


def test_tensors_come_back(run):
    wanted = kinds()
    vckpt.save(run, {"model": wanted, "ema": wanted["large"]}, **OPTIONS)
    with vckpt.Step(run) as step:
        for name, tensor in wanted.items():
            assert same(step["model", name].torch(), tensor.detach().resolve_conj().resolve_neg()), name
        assert same(step["ema"].torch(), wanted["large"])
    with vckpt.Step(run, framework="numpy") as step:
        half = step.read("model", "kind.bfloat16")
        assert half.dtype.kind == "V" and half.itemsize == 2 and step.read("model", "kind.float32").dtype == "f4"


@pytest.mark.parametrize("net", [torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2),
                                 torch.nn.Sequential(torch.nn.Linear(3, 2))])
@pytest.mark.parametrize("more", [{}, {"epoch": 3}])
def test_a_state_dict_of_a_module_is_the_component_model(run, net, more):
    state = net.state_dict()
    state.update(more)
    vckpt.save(run, state, **OPTIONS)
    with vckpt.Step(run) as step:
        assert {(info.component, info.name) for info in step.tensors()} == {("model", name)
                                                                            for name in net.state_dict()}
        tree = step.values("model")
        net.load_state_dict({name: tree[name] for name in net.state_dict()})
        assert list(tree) == list(state) and {name: tree[name] for name in more} == more


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


REFUSED = {
    "meta": (lambda: torch.empty(3, device="meta"), "on the meta device has no data"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo tensor cannot be kept"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
                  "quantized tensor cannot be kept"),
    "dtype": (lambda: torch.zeros(3, dtype=torch.complex32), "dtype torch.complex32 cannot be kept"),
    "subclass": (lambda: torch.ones(3).as_subclass(Wrapped), "of the class Wrapped"),
    "storage": (lambda: torch.ones(3).untyped_storage(), "UntypedStorage"),
    "event": (lambda: torch.nn.Parameter, "the class torch.nn.parameter.Parameter"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_path(run, kind):
    make, said = REFUSED[kind]
    with pytest.raises((TypeError, ValueError)) as error:
        vckpt.save(run, {"model": {"good": torch.ones(2), "layers": [0, {"bad": make()}]}}, **OPTIONS)
    assert str(error.value).startswith('state["model"]["layers"][1]["bad"]: ') and said in str(error.value)
    assert vckpt.steps(run) == []


# ---- modules and optimizers ----

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight            # tied
        self.register_buffer("scale", torch.tensor(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embed(x))) * self.scale


def trained(steps=2, kind=torch.optim.AdamW):
    torch.manual_seed(0)
    net = Net()
    optimizer = kind([{"params": net.embed.parameters(), "lr": 1e-2}, {"params": net.norm.parameters(), "lr": 1e-3}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for i in range(steps):
        optimizer.zero_grad()
        net(torch.arange(6) + i).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def test_modules_and_optimizers(run):
    net, optimizer, scheduler = trained()
    plan = {"embed.weight": [torch.float32, torch.Size([20, 8]), torch.device("cpu")], "nan": float("nan"),
            "zero": -0.0, "big": 1 << 80}
    vckpt.save(run, {"plan": plan, "model": net, "optimizer": optimizer, "lr_scheduler": scheduler,
                     "rng": vckpt.rng_state()}, **OPTIONS)
    with vckpt.Step(run) as step:
        model, wanted = step.values("model"), net.state_dict()
        assert list(model) == list(wanted) and all(same(model[name], wanted[name]) for name in wanted)
        flags = {row[1]: row[4] for row in described(state.collect({"model": net}))}
        assert {name for name, flag in flags.items() if flag & _lib.BUFFER} == {"norm.running_mean", "norm.running_var",
                                                                                "norm.num_batches_tracked", "scale"}
        tree = step.values("optimizer")
        assert [group["params"] for group in tree["param_groups"]] == [["embed.weight"], ["norm.weight", "norm.bias"]]
        assert same(tree["state"]["embed.weight"]["exp_avg"], optimizer.state[net.embed.weight]["exp_avg"])
        assert step.values("lr_scheduler") == scheduler.state_dict()
        back = step.values("plan")
        assert back["embed.weight"] == plan["embed.weight"] and back["big"] == 1 << 80 and back["nan"] != back["nan"]
        assert str(back["zero"]) == "-0.0"
        # and all of it goes back through torch's own functions
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
        other, their, schedule = trained(1)
        set_model_state_dict(other, model)
        set_optimizer_state_dict(other, their, tree)
        schedule.load_state_dict(step.values("lr_scheduler"))
        for one, opt in ((net, optimizer), (other, their)):
            opt.zero_grad()
            one(torch.arange(6)).square().mean().backward()
            opt.step()
        assert all(same(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values()))


def test_modules_anywhere_in_the_state(run):
    net, optimizer, _ = trained()
    second = torch.nn.Linear(3, 3)
    vckpt.save(run,
               {"agents": [{"net": net, "opt": optimizer},
                           {"net": second, "opt": torch.optim.SGD(second.parameters(), lr=1.0)}]}, **OPTIONS)
    with vckpt.Step(run) as step:
        names = {t.name for t in step.tensors()}
        assert {"0.net.embed.weight", "0.opt.state.embed.weight.exp_avg", "1.net.weight"} <= names
        assert step.values("agents")[1]["opt"]["param_groups"][0]["lr"] == 1.0


def test_an_optimizer_without_its_module(run):
    net, optimizer, _ = trained()
    with pytest.raises(TypeError, match=r'state\["optimizer"\]: its parameter 0 of group 0, of shape \[20, 8\], is in '
                       r'no module of the state'):
        vckpt.save(run, {"optimizer": optimizer}, **OPTIONS)


# ---- the memory of the last save ----

def _change(rng, tree):
    name = rng.choice(list(tree))
    tensor = tree[name]
    kind = rng.randrange(10)
    if not isinstance(tensor, torch.Tensor) or kind == 0:
        tree[name] = torch.randn(rng.randrange(1, 4), rng.randrange(1, 4))
    elif kind == 1:
        tree[name] = tensor.clone()
    elif kind == 2:
        tree[name] = tensor.t() if tensor.dim() == 2 else tensor.reshape(-1)
    elif kind == 3:
        tree[name] = tensor.to(rng.choice([torch.float32, torch.bfloat16, torch.complex64]))
    elif kind == 4:
        tree[name] = tensor.resolve_conj().conj()
    elif kind == 5:
        tree[name] = torch.nn.Parameter(tensor.float()) if not tensor.is_complex() else tensor
    elif kind == 6:
        tree[name] = tensor[0].expand(3, *tensor.shape[1:])
    elif kind == 7 and not tensor.is_conj() and type(tensor) is torch.Tensor:
        with torch.no_grad():
            tensor.data = torch.zeros(rng.randrange(1, 5), 2, dtype=tensor.dtype)       # the same object, other memory
    elif kind == 8:
        tree[name] = (tensor.detach().resolve_conj().resolve_neg().to(torch.float32).numpy() if not tensor.is_complex()
                      else 1.5)
    else:
        tree[f"t{rng.randrange(8)}"] = torch.randn(2, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_remembered_tensor_is_never_stale(scale, rng):
    memory, tree = state.Memory(), {f"t{i}": torch.randn(2, 3) for i in range(4)}
    for _ in range(scale(800, 5000)):
        _change(rng, tree)
        found, fresh = state.collect({"m": tree}, memory=memory), state.collect({"m": tree})
        assert sorted(map(held, described(found))) == sorted(map(held, described(fresh)))
        for row in described(found):
            tensor = tree[row[1]]
            if (isinstance(tensor, torch.Tensor) and not tensor.is_conj() and not tensor.is_neg() and
                0 not in tensor.stride()):
                assert row[-1] == tensor.data_ptr()


def _change_module(rng, net, optimizer):
    kind = rng.randrange(14)
    part = rng.choice([m for m in net.modules() if isinstance(m, torch.nn.Linear)])
    if kind == 0:
        part.weight = torch.nn.Parameter(torch.randn(4, 4))
    elif kind == 1:
        part.bias = None if part.bias is not None else torch.nn.Parameter(torch.randn(4))
    elif kind == 2:
        part.weight = net[0].weight                                         # tied
    elif kind == 3:
        part.register_buffer(f"b{rng.randrange(3)}", torch.randn(2), persistent=rng.random() < 0.5)
    elif kind == 4:
        net.append(torch.nn.Linear(4, 4)) if len(net) < 5 else net.pop(len(net) - 1)
    elif kind == 5:
        net[rng.randrange(len(net))] = torch.nn.Linear(4, 4)
    elif kind == 6:
        part.weight.data = torch.randn(4, 4).t()                            # the same object, other memory
    elif kind == 7 and not part._state_dict_hooks:
        handle = part._register_state_dict_hook(
            lambda module, state, prefix, local: state.update({prefix + "weight": state[prefix + "weight"] * 2}))
        HOOKED.append(handle)
    elif kind == 8 and HOOKED:
        HOOKED.pop().remove()
    elif kind == 9:
        optimizer.param_groups[0]["lr"] = rng.random()
    elif kind == 10:
        optimizer.state[next(iter(optimizer.state))][f"k{rng.randrange(3)}"] = rng.choice([1, torch.ones(2), "x"])
    elif kind == 11:
        for state in optimizer.state.values():
            state["exp_avg"] = torch.randn(4, 4)
    elif kind == 12:
        optimizer.param_groups[0][f"o{rng.randrange(3)}"] = rng.choice([1, 1.0, True, (1, 2)])
    else:
        part.__class__ = Doubling if type(part) is torch.nn.Linear else torch.nn.Linear


HOOKED = []


class Doubling(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] * 2


class Quantized(torch.nn.Linear):
    """Has a scale once it has seen data, as layers of 8 bits do."""
    scale = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale is not None:
            destination[prefix + "scale"] = self.scale


def test_code_of_others_is_asked_at_each_save():
    """What it gives may be another thing than the last time, though nothing of the module was exchanged."""
    memory, net = state.Memory(), torch.nn.Sequential(Quantized(4, 4), torch.nn.BatchNorm1d(4))

    def names():
        return {row[1] for row in described(state.collect({"m": net}, memory=memory))}
    for _ in range(2):
        assert "0.scale" not in names()
    net[0].scale = torch.ones(4)
    assert "0.scale" in names()
    net[0] = torch.nn.Linear(4, 4)
    seen = []
    net.register_state_dict_pre_hook(lambda *_: seen.append(len(seen)))
    for count in 1, 2, 3:
        names()
        assert len(seen) == count
    net.state_dict = lambda *_, **__: {"other": torch.ones(1)}
    assert names() == {"other"}


def test_a_remembered_module_is_never_stale(scale, rng):
    """What torch's functions would give now, whatever was changed since the last save."""
    memory, quick = state.Memory(), 0
    for _ in range(scale(4, 40)):
        net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        fixed = torch.nn.Linear(4, 4, bias=False)                           # what the optimizer has stays in the module
        whole_net = torch.nn.ModuleDict({"net": net, "fixed": fixed})
        optimizer = torch.optim.AdamW(fixed.parameters())
        fixed(torch.ones(4)).sum().backward()
        optimizer.step()
        for _ in range(30):
            if rng.random() < 0.8:
                _change_module(rng, net, optimizer)
            whole = {"m": whole_net, "o": optimizer}
            found, fresh = state.collect(whole, memory=memory), state.collect(whole)
            assert sorted(map(held, described(found))) == sorted(map(held, described(fresh)))
            assert sorted(found.blobs) == sorted(fresh.blobs)
            quick += memory.views[whole_net].tensors is not None and optimizer in memory.views
        HOOKED.clear()
    assert quick > 0


def test_a_name_that_is_no_buffer_any_more():
    memory, net = state.Memory(), torch.nn.Linear(3, 3)
    net.register_buffer("scale", torch.ones(3))
    for model in (net, dict(net.state_dict()), net):
        flags = {row[1]: row[4] for row in described(state.collect({"m": model}, memory=memory))}
        assert bool(flags["scale"] & _lib.BUFFER) == (model is net) and not flags["weight"] & _lib.BUFFER


def test_training_goes_on(run):
    """Saves of a module that trains: each step has what the module had."""
    net, optimizer, _ = trained()
    wanted = []
    with vckpt.Saver(run, **OPTIONS) as saver:
        for i in range(4):
            handle = saver.async_save({"model": net, "optimizer": optimizer}, attributes={"i": i})
            wanted.append((copy.deepcopy(net.state_dict()),
                           copy.deepcopy(optimizer.state_dict()["state"][0]["exp_avg"])))
            handle.staged()
            optimizer.zero_grad()
            net(torch.arange(6)).square().mean().backward()
            optimizer.step()
    for i, (weights, moment) in enumerate(wanted):
        with vckpt.Step(run / str(i)) as step:
            assert all(same(step["model", name].torch(), weights[name]) for name in weights)
            assert same(step["optimizer", "state.embed.weight.exp_avg"].torch(), moment)


def test_numpy_and_torch_in_one_component(run):
    vckpt.save(run,
               {"m": {"a": np.ones(3), "b": torch.zeros(2),
                      "c": vckpt.Shard(torch.arange(6), shape=(2, 3), flat=(0, 6))}}, **OPTIONS)
    with vckpt.Step(run) as step:
        assert torch.equal(step["c"].torch(), torch.arange(6).reshape(2, 3))
        assert step.read("m", "a").dtype == torch.float64
        out = torch.zeros(3, 2, dtype=torch.int64).t()
        assert step.read("m", "c", out=out) is out and torch.equal(out, torch.arange(6).reshape(2, 3))
