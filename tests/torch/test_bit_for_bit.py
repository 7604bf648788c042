# SPDX-License-Identifier: Apache-2.0
"""What a load gives of torch's optimizers, beside what torch.save, torch.load and load_state_dict give: the same bits,
and the dtype that was saved also where torch's own load has another."""
import collections
import copy
import io

import pytest
import torch

import vckpt

PIN = {"pin": "no"}
# bf16 parameters: state that torch's load_state_dict casts to their dtype, and vckpt.load leaves as it was saved
CAST_BY_TORCH = {"ASGD": {"eta", "mu"}, "NAdam": {"mu_product"}}
OPTIMIZERS = sorted(name for name, kind in vars(torch.optim).items() if isinstance(kind, type)
                    and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer)


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


class Table(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.rows = torch.nn.Embedding(6, 4, sparse=sparse)
        self.w = torch.nn.Parameter(torch.randn(4, 3))

    def forward(self, at):
        return self.rows(at) @ self.w


def made(name, dtype, steps, seed=0):
    torch.manual_seed(seed)
    model = Table(name == "SparseAdam").to(dtype)
    parameters = model.rows.parameters() if name == "SparseAdam" else model.parameters()
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.tensor([0, 1, 3])).float().square().mean()
        loss.backward()
        return loss
    for _ in range(steps):
        optimizer.step(closure)
    return model, optimizer


def leaves(value, path=()):
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def alike(a, b):
    if isinstance(a, io.BytesIO) and isinstance(b, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    return (isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.device == b.device and a.shape == b.shape
            and torch.equal(a, b))


def differing(one, other):
    """Keys of what differs of two state dicts."""
    one, other = dict(leaves(one)), dict(leaves(other))
    assert one.keys() == other.keys()
    return {path[-1] if isinstance(path[-1], str) else path[-2] for path in one if not alike(one[path], other[path])}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(run, name):
    """Into one that has made no step, and one that has made some."""
    for at, dtype in enumerate([torch.float32, torch.bfloat16]):
        model, optimizer = made(name, dtype, 3)
        vckpt.save(run, {"model": model, "optimizer": optimizer}, step=at, **PIN)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        for steps in 0, 2:
            (_, theirs), (mine_model, mine) = (made(name, dtype, steps, 1) for _ in range(2))
            theirs.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
            vckpt.load(f"{run}/{at}", {"model": mine_model, "optimizer": mine})
            assert not differing(optimizer.state_dict(), mine.state_dict())
            assert not differing(model.state_dict(), mine_model.state_dict())
            cast = differing(theirs.state_dict(), mine.state_dict())
            assert cast == (CAST_BY_TORCH.get(name, set()) if dtype == torch.bfloat16 else set())


class Own(torch.optim.Optimizer):
    """State of all kinds under bf16 parameters: fp32 masters and moments, counters, masks, codes."""

    strange = {"text": "warm", "recent": collections.deque([1, 2], 3), "span": range(3), "raw": b"x",
               "counts": collections.Counter("aab")}        # torch makes them anew from their items, or cannot

    def __init__(self, parameters, lr=0.1, **more):
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(master=p.float() * 1.001, count=torch.tensor(1 << 40), step=torch.tensor(7),
                                 mask=p > 0, codes=(p.float() * 9).to(torch.uint8), moment=p.float() / 3,
                                 nested={"list": [torch.tensor(1 / 3), (p.double(),)]})
                    state.update(self.strange)
                state["master"] -= group["lr"] * p.grad.float()
                p.copy_(state["master"])


class Wraps(torch.optim.Optimizer):
    """One around another, to which it hands what it is given."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def owned(wrap=False, **more):
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = Own(model.parameters(), **more)
    optimizer.strange = {} if wrap else Own.strange
    return model, Wraps(optimizer) if wrap else optimizer


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("more", [{}, {"fused": True}, {"capturable": True}])
def test_an_optimizer_with_masters(run, more, wrap):
    """Nothing that it keeps is left out or cast, whatever it is called; nor by a hook's or a class's own load."""
    model, optimizer = owned(wrap, **more)
    model(torch.ones(4, 3).bfloat16()).sum().backward()
    optimizer.step()
    vckpt.save(run, {"model": model, "optimizer": optimizer}, **PIN)
    other, theirs = owned(wrap, **more)
    seen = []
    hooked = theirs.inner if wrap else theirs
    hooked.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["state"][0]["moment"].dtype))
    hooked.register_load_state_dict_post_hook(lambda one: seen.append(one.state[other.weight]["moment"].dtype))
    found = vckpt.load(run, {"model": other, "optimizer": theirs})
    assert not found.missing and not found.unexpected and seen == [torch.float32] * 2
    assert not differing(optimizer.state_dict(), theirs.state_dict())
    torch_s = copy.deepcopy(optimizer.state_dict())         # outside of a load torch's own rule holds
    for one in torch_s["state"].values():
        one.pop("span", None)
    hooked.load_state_dict(torch_s)
    assert hooked.state[other.weight]["moment"].dtype == torch.bfloat16
