# SPDX-License-Identifier: Apache-2.0
"""Modules that take part in their own loading: hooks before and after, ways of their own, extra state, shapes that
follow from data. Each ends up as torch.save, torch.load and load_state_dict leave it; and what nothing hooks is filled
in place."""
import io

import pytest
import torch
from torch.ao import quantization

from test_bit_for_bit import differing

import vckpt

PIN = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).tolist()


class Hooked(torch.nn.Linear):
    """It notes what its hooks see, and when."""

    def __init__(self, kind):
        super().__init__(3, 2)
        self.seen = []
        if kind == "before":
            self.register_load_state_dict_pre_hook(self.before)
        elif kind == "private before":
            self._register_load_state_dict_pre_hook(lambda state, prefix, *_: self.before(self, state, prefix))
        else:
            self.register_load_state_dict_post_hook(self.after)

    def before(self, module, state, prefix, *_):
        self.seen.append((local(self.weight), local(state[f"{prefix}weight"])))

    def after(self, module, keys):
        self.seen.append(local(self.weight))


class First(torch.nn.Module):
    """Takes its first batch as statistics, unless some were loaded (an ActNorm)."""

    def __init__(self):
        super().__init__()
        self.scale, self.ready = torch.nn.Parameter(torch.zeros(3)), False
        self.register_load_state_dict_post_hook(lambda *_: setattr(self, "ready", True))

    def forward(self, x):
        if not self.ready:
            self.scale.data, self.ready = x.mean(0), True
        return x * self.scale


class Owns(torch.nn.Module):
    """Loads by itself: it keeps its queue, and halves its codes."""
    _version = 2

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.rand(4))
        self.register_buffer("codes", torch.rand(4))
        self.versions = []

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.versions.append(metadata.get("version"))
        state[f"{prefix}queue"] = self.queue.clone()
        state[f"{prefix}codes"] = state[f"{prefix}codes"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Root(torch.nn.Linear):
    """A load_state_dict() of its own, which knows nothing of `strict`."""

    def __init__(self):
        super().__init__(3, 2)

    def load_state_dict(self, state):
        super().load_state_dict({name: value * 2 for name, value in state.items()})


class Grows(torch.nn.Module):
    """Extra state that is empty before its first use."""

    def __init__(self, extra):
        super().__init__()
        self.w, self.extra = torch.nn.Parameter(torch.zeros(2)), extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


class Caches(torch.nn.Module):
    """set_extra_state alone: what follows from its tensors is made anew."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(3))
        self.sum = self.w.sum().item()

    def get_extra_state(self):
        return None

    def set_extra_state(self, extra):
        self.sum = self.w.sum().item()


def stream(used):
    """As TransformerEngine gives its extra state."""
    made = io.BytesIO(bytes(range(256)) * used)
    made.seek(3 * used)
    return made


def observed(kind, used):
    made = kind()
    if used:
        made(torch.arange(12.0).reshape(3, 4))
    return torch.nn.ModuleDict({"o": made, "l": torch.nn.Linear(2, 2)})


def lazy(used):
    made = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(3, 1))
    if used:
        made(torch.rand(4, 5))
    return made


def qat(used):
    made = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    made.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    made = quantization.prepare_qat(made.train())
    if used:
        made(torch.rand(5, 4))
    return made


def spectral(used):
    made = torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Linear(3, 2)))
    if used:
        made(torch.rand(4, 3))
    return made


# name: a module, used or not; which of its tensors stay in its memory
KINDS = {
    "after": (lambda used: torch.nn.Sequential(Hooked("after"), torch.nn.Linear(2, 2)), {"0", "1"}),
    "before": (lambda used: torch.nn.Sequential(Hooked("before"), torch.nn.Linear(2, 2)), {"1"}),
    "private before": (lambda used: torch.nn.Sequential(Hooked("private before"), torch.nn.Linear(2, 2)), {"1"}),
    "first": (lambda used: torch.nn.Sequential(First(), torch.nn.Linear(3, 2)), {"0", "1"}),
    "owns": (lambda used: torch.nn.Sequential(Owns(), torch.nn.Linear(3, 2)), {"1"}),
    "root": (lambda used: Root(), set()),
    "caches": (lambda used: torch.nn.Sequential(Caches()), {"0"}),
    "extra tensor": (lambda used: torch.nn.Sequential(Grows(torch.rand(3 * used))), {"0"}),
    "extra dict": (lambda used: torch.nn.Sequential(Grows({"amax": torch.rand(2 * used, 2), "n": used})), {"0"}),
    "extra none": (lambda used: torch.nn.Sequential(Grows({"amax": torch.rand(2)} if used else None)), {"0"}),
    "extra other": (lambda used: Grows(torch.rand(3) if used else torch.zeros(2, dtype=torch.int32)), {"w"}),
    "extra bytes": (lambda used: torch.nn.Sequential(Grows(stream(used))), {"0"}),
    "min max": (lambda used: observed(quantization.MinMaxObserver, used), {"l"}),
    "per channel": (lambda used: observed(quantization.PerChannelMinMaxObserver, used), {"l"}),
    "histogram": (lambda used: observed(quantization.HistogramObserver, used), {"l"}),
    "fake quantize": (lambda used: observed(quantization.FakeQuantize.with_args(
        observer=quantization.MovingAveragePerChannelMinMaxObserver), used), {"l"}),
    "qat": (qat, set()),
    "lazy": (lazy, {"2"}),
    "spectral norm": (spectral, set()),
    "weight norm": (lambda used: torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(3, 2)), torch.nn.Linear(2, 1)), {"1"}),
    "old weight norm": (lambda used: torch.nn.utils.weight_norm(torch.nn.Linear(3, 2)), None),
    "batch norm": (lambda used: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2),
                                                    torch.nn.InstanceNorm1d(2, track_running_stats=True)), None),
    "average": (lambda used: torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 2), use_buffers=True), None),
    "attention": (lambda used: torch.nn.TransformerEncoderLayer(4, 2, 8), None),
    "lstm": (lambda used: torch.nn.LSTM(3, 4, 2, bidirectional=True), None),
    "compiled": (lambda used: torch.compile(torch.nn.Sequential(Hooked("after"))), {"0"}),
}


def attributes(module):
    return [{name: vars(part).get(name) for name in ("seen", "ready", "versions", "sum", "ch_axis")}
            for part in module.modules()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind == "compiled"))
                                  for kind in KINDS])
def test_as_torch_loads_it(run, kind):
    make, stays = KINDS[kind]
    torch.manual_seed(0)
    saved = make(True)
    vckpt.save(run, {"model": saved, "other": {"x": 1}}, **PIN)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    torch.manual_seed(1)
    fresh = make(False)
    torch.manual_seed(1)
    theirs = make(False)
    theirs.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    memory = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()
              if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor)}
    found = vckpt.load(run, {"model": fresh})
    assert not differing(theirs.state_dict(), fresh.state_dict())
    assert attributes(theirs) == attributes(fresh)
    assert found.called == ([] if stays is None else ["model"]) and not found.missing and not found.unexpected
    for name, tensor in fresh.state_dict().items():
        if name in memory and (stays is None or name.split(".")[0] in stays) and "_extra" not in name:
            assert tensor.data_ptr() == memory[name], name
    assert found.values == {}


def test_what_a_hook_renames(run):
    """A step from before a class was changed: its hook gives the new names what the old ones had. What is missing then
    only load_state_dict() can say."""
    vckpt.save(run, {"model": torch.nn.Linear(3, 2), "deep": {"a": [torch.nn.Linear(3, 2)]}}, **PIN)

    class New(torch.nn.Module):
        def __init__(self, names=("weight", "bias")):
            super().__init__()
            self.w, self.b = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2))
            self.names = names
            self.register_load_state_dict_pre_hook(self.rename)

        def rename(self, module, state, prefix, *_):
            for old in self.names:
                state[f"{prefix}{old[0]}"] = state.pop(f"{prefix}{old}")
    new = New()
    found = vckpt.load(run, {"model": new})
    with vckpt.Step(run) as step:
        assert torch.equal(new.w, step["model", "weight"].torch()) and torch.equal(new.b, step["model", "bias"].torch())
    assert found.called == ["model"]
    wrapped = torch.nn.ModuleList([New(["weight"])])
    with pytest.raises(vckpt.InvalidArgument, match=r"the step lacks deep/a.0.b; the state lacks deep/a.0.bias \(found "
                       r"by its load_state_dict\(\), after the state was filled\)"):
        vckpt.load(run, {"deep": {"a": list(wrapped)}})
    found = vckpt.load(run, {"deep": {"a": list(wrapped)}}, strict=False)
    assert (found.missing, found.unexpected, found.called) == (["deep/a.0.b"], ["deep/a.0.bias"], ["deep/a.0"])
    with pytest.raises(vckpt.InvalidArgument, match=r"the step lacks none/w, none/b|the step lacks none"):
        vckpt.load(run, {"model": torch.nn.Linear(3, 2), "none": new})


def test_a_shape_that_nothing_makes_fit(run):
    """Where no code could take it, a shape that differs is said before anything is filled."""
    vckpt.save(run, {"model": torch.nn.Sequential(torch.nn.BatchNorm1d(3), Hooked("after"))}, **PIN)
    small = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Hooked("after"))
    before = small[1].weight.tolist()
    with pytest.raises(vckpt.InvalidArgument, match=r"model/0.running_mean has the shape \[3\] in the step and \[2\]"):
        vckpt.load(run, {"model": small}, strict=False)
    assert small[1].weight.tolist() == before and not small[1].seen


def test_an_error_names_its_component(run):
    class Fails(torch.nn.Linear):
        def _load_from_state_dict(self, *_):
            raise ValueError("no luck")

    class Object:
        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, state):
            raise ValueError("no luck")

    class Broken(torch.optim.SGD):
        def load_state_dict(self, state):
            raise ValueError("no luck")
    model = torch.nn.Linear(2, 2)
    vckpt.save(run, {"model": model, "deep": {"o": [Object()]}, "optimizer": torch.optim.SGD(model.parameters())},
               **PIN)
    for state, path in (({"model": Fails(2, 2)}, 'state["model"]'),
                        ({"deep": {"o": [Object()]}}, 'state["deep"]["o"][0]'),
                        ({"model": model, "optimizer": Broken(model.parameters())}, 'state["optimizer"]')):
        with pytest.raises(ValueError, match="no luck") as caught:
            vckpt.load(run, state)
        assert getattr(caught.value, "__notes__", [f"while vckpt filled {path}"]) == [f"while vckpt filled {path}"]


def _sharded(path, kind, seed=0):
    """FSDP2, DDP and FSDP1 around modules with hooks of all kinds, which see what torch would give them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(Hooked("after"), First(), Owns(), Doubles(), torch.nn.Linear(3, 5))
        if kind == "ddp":
            return model, torch.nn.parallel.DistributedDataParallel(model)
        if kind == "fsdp1":
            return model, FullyShardedDataParallel(model, use_orig_params=True, device_mesh=mesh,
                                                   device_id=torch.device("cpu"))
        fully_shard(model, mesh=mesh)
        return model, model
    (_, saved), (inner, model) = made(0), made(1)
    wanted = whole(saved)
    vckpt.save(path, {"model": saved}, step=1, **PIN)
    vckpt.close(path)
    queue = inner[2].queue.clone()
    found = vckpt.load(path, {"model": model})
    got = whole(model)
    differ = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    return (differ, torch.equal(inner[2].queue, queue), torch.equal(got["2.codes"], wanted["2.codes"] / 2),
            torch.equal(got["3.w"], wanted["3.w"] * 2), inner[1].ready, len(inner[0].seen), inner[2].versions,
            found.called)


class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(5, 3))
        self.register_load_state_dict_pre_hook(self.double)

    def double(self, module, state, prefix, *_):
        state[f"{prefix}w"] = state[f"{prefix}w"] * 2


def whole(model):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "fsdp1"])
def test_hooks_under_wrappers(pool2, run, kind):
    for differ, queue, codes, doubled, ready, seen, versions, called in pool2(_sharded, str(run), kind):
        assert differ == ["2.queue", "2.codes", "3.w"] and queue and codes and doubled and ready
        assert seen == 1 and versions == [2] and called == ["model"]


# ---- names under wrappers ----

def wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    return {"compiled in a checkpoint": lambda m: checkpoint_wrapper(torch.compile(m)),
            "checkpoint in a compiled": lambda m: torch.compile(checkpoint_wrapper(m)),
            "both inside": lambda m: torch.nn.Sequential(checkpoint_wrapper(torch.compile(m)))}


@pytest.mark.parametrize("kind", ["compiled in a checkpoint", "checkpoint in a compiled", "both inside"])
def test_names_without_wrappers(run, kind, monkeypatch):
    """Of modules and of optimizers; and steps that earlier versions saved with these names are found."""
    from vckpt import torch_modules, torch_optimizers

    def made(seed):
        torch.manual_seed(seed)
        model = wrappers()[kind](torch.nn.Sequential(torch.nn.Linear(3, 2), Hooked("before")))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer
    model, optimizer = made(0)
    for step, compiled in enumerate(["_orig_mod.", "(none)"]):
        for module in torch_modules, torch_optimizers:
            monkeypatch.setattr(module, "COMPILED", "_orig_mod." if step else "(none)")
        vckpt.save(run, {"model": model, "optimizer": optimizer}, step=step, **PIN)
        vckpt.close()
        monkeypatch.undo()
        with vckpt.Step(f"{run}/{step}") as kept:
            assert not step or not any("_orig_mod" in name for name in kept.keys())
        other, theirs = made(1)
        vckpt.load(f"{run}/{step}", {"model": other, "optimizer": theirs})
        assert not differing(model.state_dict(), other.state_dict())
        assert not differing(optimizer.state_dict(), theirs.state_dict())
    plain = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(3, 2))
    plain = torch.nn.Sequential(plain) if kind == "both inside" else plain
    vckpt.load(run, {"model": plain})
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))
