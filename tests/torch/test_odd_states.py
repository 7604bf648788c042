# SPDX-License-Identifier: Apache-2.0
"""What users put into a state: each value comes back as it was, or is refused by its path with what to do. One rank's
refusal ends the save at all ranks within seconds, with the reason, and the next save works."""
import array
import collections
import dataclasses
import decimal
import enum
import fractions
import functools
import io
import random
import sys
import threading
import time
import types
import uuid

import numpy as np
import pytest
import torch

import vckpt

PIN = {"pin": "no"}
SOON = 60       # seconds, on a loaded machine; what waits for good waits for minutes


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    yield tmp_path / "store/run"
    vckpt.close(tmp_path / "store/run")


def _rank():
    import torch.distributed as dist
    return dist.get_rank()


# ---- what is refused ----

class Phase(enum.Enum):
    WARM = 1


class Sub(dict):
    pass


class Holder:
    def __init__(self):
        self.x = 1


@dataclasses.dataclass
class OverDict(dict):
    a: int = 1


REFUSED = {
    "decimal": (lambda: decimal.Decimal("1.1"), "give its str()"),
    "uuid": (lambda: uuid.UUID(int=3), "give its str()"),
    "fraction": (lambda: fractions.Fraction(1, 3), "give its str()"),
    "function": (lambda: (lambda: 0), "leave it out"),
    "builtin": (lambda: len, "leave it out"),
    "method": (lambda: Holder().__init__, "leave it out"),
    "partial": (lambda: functools.partial(len), "leave it out"),
    "class": (lambda: Holder, "give its name"),
    "object": (Holder, "or a state_dict() that does"),
    "module": (lambda: types, "leave it out"),
    "lock": (threading.Lock, "as plain values"),
    "memoryview": (lambda: memoryview(b"abc"), "give bytes() of it"),
    "array": (lambda: array.array("i", [1]), "give list() of it"),
    "file": (lambda: type("F", (io.BytesIO,), {})(b"x"), "give one that is open, and no subclass of it"),
    "dict subclass": (lambda: Sub(a=1), "give dict() of it"),
    "list subclass": (lambda: type("L", (list,), {})([1]), "give list() of it"),
    "int subclass": (lambda: type("I", (int,), {})(3), "give int() of it"),
    "str subclass": (lambda: type("S", (str,), {})("x"), "give str() of it"),
    "dataclass over dict": (OverDict, "give dataclasses.asdict() of it"),
    "proxy": (lambda: types.MappingProxyType({"a": 1}), "give dict() of it"),
    "user dict": (lambda: collections.UserDict(a=torch.ones(2)), "give dict() of it"),
    "chain": (lambda: collections.ChainMap({"a": 1}), "give dict() of it"),
    "keys": (lambda: {"a": 1}.keys(), "give list() of it"),
    "generator": (lambda: (x for x in ()), "give how far it is"),
    "iterator": (lambda: iter([1]), "give how far it is"),
    "numpy generator": (lambda: np.random.default_rng(3), "give its bit_generator.state"),
    "numpy random": (lambda: np.random.RandomState(3), "give its get_state(legacy=False)"),
    "random": (lambda: random.Random(3), "give its getstate()"),
    "loader": (lambda: torch.utils.data.DataLoader([1, 2]), "StatefulDataLoader"),
    "long double": (lambda: np.longdouble(3), "give it as another dtype"),
    "objects": (lambda: np.array([{}], dtype=object), "give its tolist()"),
    "strings": (lambda: np.array(["abc"]), "give its tolist()"),
    "fields": (lambda: np.zeros(2, [("a", "f4")]), "give its fields"),
    "dates": (lambda: np.array(["2020-01-01"], dtype="M8[D]"), "view('int64')"),
    "long doubles": (lambda: np.zeros(2, np.longdouble), "give it as another dtype"),
    "matrix": (lambda: np.matrix([[1, 2]]), "give numpy.asarray() of it"),
    "masked": (lambda: np.ma.array([1, 2], mask=[0, 1]), "give its data and its mask"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "give its parts"),
    "meta": (lambda: torch.empty(3, device="meta"), "to_empty"),
    "half complex": (lambda: torch.zeros(3, dtype=torch.complex32), "give it as another dtype"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_path_with_what_to_do(run, kind):
    make, advice = REFUSED[kind]
    with pytest.raises((TypeError, ValueError)) as error:
        vckpt.save(run, {"model": {"w": torch.ones(2)}, "trainer": {"parts": [0, {"it": make()}]}}, step=1, **PIN)
    assert str(error.value).startswith('state["trainer"]["parts"][1]["it"]: ') and advice in str(error.value), (
        error.value)
    assert vckpt.save(run, {"model": {"w": torch.ones(2)}}, step=2) == 2 and vckpt.steps(run) == [2]


def _cycle():
    inner = {"x": [1]}
    inner["x"].append(inner)
    return {"a": torch.ones(2), "b": inner}


ODD_TREES = {
    "cycle": (_cycle, 'state["t"]["b"]["x"][1]: a part of itself'),
    "NUL": (lambda: {"a": {"b\0c": torch.ones(1)}},
            'state["t"]["a"]["b\\u0000c"]: the name of a tensor must not contain a NUL'),
    "one name": (lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, 'state["t"]["a"]["b"]: is called \'a.b\''),
    "number and text": (lambda: {1: torch.ones(1), "1": torch.ones(2)},
                        'state["t"]["1"]: is called \'1\', as state["t"][1] is'),
    "tensor in a set": (lambda: {"s": {torch.ones(1)}}, 'state["t"]["s"][a Tensor]: '),
    "surrogate": (lambda: {"a\ud800": torch.ones(1)}, 'state["t"]: the string'),
}


@pytest.mark.parametrize("kind", ODD_TREES)
def test_odd_trees(run, kind):
    make, said = ODD_TREES[kind]
    with pytest.raises((TypeError, ValueError)) as error:
        vckpt.save(run, {"t": make()}, step=1, **PIN)
    assert str(error.value).startswith(said), error.value
    assert vckpt.save(run, {"model": {"w": torch.ones(2)}}, step=2) == 2


# ---- one rank refuses ----

class Raises:
    def __init__(self, here):
        self.here = here

    def state_dict(self):
        if self.here:
            raise RuntimeError("the loader is closed")
        return {"a": 1}


def _net():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 3)


class One:
    """What one rank has otherwise."""

    @staticmethod
    def value(odd):
        return {"model": {"w": torch.ones(3)}, "t": {"x": object() if odd else 1}}

    @staticmethod
    def tensor(odd):
        return {"model": {"w": torch.eye(3).to_sparse() if odd else torch.eye(3)}}

    @staticmethod
    def error(odd):
        return {"model": {"w": torch.ones(3)}, "loader": Raises(odd)}

    @staticmethod
    def module(odd):
        net = _net()
        return {"model": {"x": 1} if odd else net, "optimizer": torch.optim.AdamW(net.parameters())}

    @staticmethod
    def state(odd):
        return [torch.ones(1)] if odd else {"model": {"w": torch.ones(3)}}

    @staticmethod
    def meta(odd):
        return {"model": torch.nn.Linear(3, 3, device="meta" if odd else "cpu")}

    @staticmethod
    def component(odd):
        return {(0 if odd else "model"): {"w": torch.ones(3)}}

    @staticmethod
    def dtype(odd):
        return {"model": {"w": torch.ones(3, dtype=torch.float64 if odd else torch.float32)}}

    @staticmethod
    def shape(odd):
        return {"model": {"w": torch.ones(3 + odd)}}

    @staticmethod
    def alone(odd):
        return {"model": {"w": vckpt.Shard(torch.ones(3), alone=True) if odd else torch.ones(3)}}

    @staticmethod
    def loss(odd):
        return {"model": {"w": torch.ones(3)}, "trainer": {"loss": torch.tensor(1.0 + odd)}}

    @staticmethod
    def optimizer(odd):
        net = _net()
        return {"model": net, "optimizer": (torch.optim.SGD if odd else torch.optim.AdamW)(net.parameters(), lr=0.1)}

    @staticmethod
    def state_of_some(odd):
        net = torch.nn.ModuleDict({"a": _net(), "b": _net()})
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
        net["b" if odd else "a"](torch.ones(3)).sum().backward()
        optimizer.step()
        return {"model": net, "optimizer": optimizer}

    @staticmethod
    def no_state_yet(odd):
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
        if not odd:
            net(torch.ones(3)).sum().backward()
            optimizer.step()
        return {"model": net, "optimizer": optimizer}

    @staticmethod
    def frozen(odd):
        net = _net()
        net.bias.requires_grad_(not odd)
        return {"model": net, "optimizer": torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])}

    @staticmethod
    def groups(odd):
        net = _net()
        return {"model": net, "optimizer": torch.optim.AdamW([{"params": [p]} for p in net.parameters()] if odd
                                                             else net.parameters())}


SAID = {
    "value": 'state["t"]["x"]: an object cannot be kept', "tensor": 'state["model"]["w"]: a sparse_coo tensor',
    "error": "the loader is closed",
    "module": 'state["optimizer"]: its parameter 0 of group 0', "state": "a state is a dict of components, found list",
    "meta": 'state["model"]["weight"]: a tensor on the meta device', "component": "component must be a string",
    "dtype": 'tensor "model/w"',
    "shape": 'tensor "model/w"', "alone": "model", "loss": 'tensor "trainer/loss" differs',
    "optimizer": 'state["optimizer"]["param_groups"][0]',
    "state_of_some": "the tensors state.", "no_state_yet": "state",
    "frozen": 'state["optimizer"]["param_groups"][0]["params"]',
    "groups": 'state["optimizer"]["param_groups"][0]["params"]',
}


def _one_refuses(path, name, who):
    began, said = time.monotonic(), None
    try:
        vckpt.save(path, getattr(One, name)(_rank() == who), step=1, **PIN)
    except (vckpt.Error, TypeError, RuntimeError) as error:
        said = str(error)
    took = time.monotonic() - began
    number = vckpt.save(path, {"model": {"w": torch.ones(3)}}, step=2)
    vckpt.close(path)
    return said, took, number


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("name", SAID)
def test_one_rank_refuses(pool2, run, name, who):
    for rank, (said, took, number) in enumerate(pool2(_one_refuses, str(run), name, who)):
        assert said and SAID[name] in said and number == 2 and took < SOON, (rank, said)
        if name == "error" and sys.version_info >= (3, 11) and rank != who:
            assert 'while vckpt took state["loader"]' in said
    assert vckpt.steps(run) == [2]


def _collective(path, who, where):
    """A state dict that all ranks gather together, behind a value that one of them refuses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (2,))
    model = FullyShardedDataParallel(_net(), use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    odd = {"value": object(), "object": Raises(True)}[where] if _rank() == who else 1
    state = {"trainer": {"x": odd}, "agents": [{"y": odd}, {"model": model}], "model": model}
    said = None
    try:
        vckpt.save(path, state, step=1, **PIN)
    except (vckpt.Error, TypeError, RuntimeError) as error:
        said = str(error)
    number = vckpt.save(path, {"model": model}, step=2)
    vckpt.close(path)
    return said, number


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["value", "object"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_refusal_before_a_collective(pool2, run, who, where):
    for said, number in pool2(_collective, str(run), who, where):
        assert ("an object cannot be kept" if where == "value" else "the loader is closed") in said and number == 2


# ---- what is kept ----

class Flags(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    inner: object = None


Pair = collections.namedtuple("Pair", "a b")
PLAIN = {
    "none": None, "enum": Phase.WARM, "flags": Flags.A | Flags.B, "big": 1 << 200, "least": -(1 << 63), "edge": 1 << 53,
    "zero": -0.0, "tiny": 5e-324,
    "infinite": float("-inf"), "set": {3, 1, 2}, "frozen": frozenset({"a"}), "mixed": {1, "a", (1, 2), None},
    "bytes": b"x\0", "array": bytearray(b"q"),
    "complex": 1 - 2j, "range": range(3, 9, 2), "slice": slice(1, None), "config": Config(0.2, {"x": (1, [2])}),
    "pair": Pair(1, [2]),
    "ordered": collections.OrderedDict(b=1, a=2), "default": collections.defaultdict(list, {1: [2]}),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1, 2], 5), "numbers": {0: 1, 1: {2: 3}},
    "tuples": {(1, 2): 3, None: 4, True: 5, 0.5: 6, b"k": 7}, "text": "ü\n\"$\\", "tag": {"$int": "0x1"},
    "empty": [{}, [], (), "", set()],
    "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("s"), np.dtype("float32")],
    "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([1, 2])], "python": random.Random(3).getstate(),
    "generator": np.random.default_rng(3).bit_generator.state, "namespace": types.SimpleNamespace(a=1),
}


def _plain(path):
    weights = torch.arange(6.0)
    tensors = {"list": [torch.ones(2), (torch.zeros(3, dtype=torch.bfloat16), [torch.ones(1)], ())],
               "tied": {"a": weights, "b": weights, "c": weights[2:4]},
               "numbers": {0: torch.ones(1), 1: {2: torch.ones(2)}}, "scalar": torch.tensor(3),
               "none": [None, torch.ones(1), None], "empty": torch.zeros(0, 3),
               "grown": (torch.ones(2, requires_grad=True) * 2), "numpy": np.arange(3, dtype=">i4"),
               "turned": torch.arange(6).reshape(2, 3).t()}
    for step in (1, 2):
        vckpt.save(path, {"plain": PLAIN, "tensors": tensors}, step=step, **PIN)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        plain = step.values("plain", rank=_rank(), types=[Phase, Flags, Config, Pair])
        found = step.values("tensors", rank=_rank())
    assert str(plain["zero"]) == "-0.0" and list(plain["ordered"]) == ["b", "a"] and plain["deque"].maxlen == 5
    assert (plain["default"].default_factory is list and [type(one) for one in plain["numpy"]] ==
            [type(one) for one in PLAIN["numpy"]])
    same = [type(plain[key]) is type(value) and plain[key] == value for key, value in PLAIN.items()]
    assert all(same), [key for key, good in zip(PLAIN, same) if not good]
    flat = [(str(path), tensor) for path, tensor in _leaves(found)]
    wanted = [(str(path), tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor.astype("<i4")))
              for path, tensor in _leaves(tensors)]
    assert [path for path, _ in flat] == [path for path, _ in wanted]
    return all(a.dtype == b.dtype and torch.equal(a, b)
               for (_, a), (_, b) in zip(flat, wanted)), type(found["list"][1]) is tuple, found["none"][0] is None


def _leaves(tree, path=()):
    if isinstance(tree, (dict, list, tuple)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(item, (*path, type(tree).__name__, key))
    elif tree is not None:
        yield path, tree


def test_plain_values_and_tensors_come_back(pool2, run):
    assert pool2(_plain, str(run)) == [(True, True, True)] * 2


def _trainer(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}],
                                  lr=0.2, foreach=True)
    schedules = torch.optim.lr_scheduler
    scheduler = {"sequence": schedules.SequentialLR(optimizer,
                                                    [schedules.ConstantLR(optimizer),
                                                     schedules.ExponentialLR(optimizer, 0.9)], [2]),
                 "plateau": schedules.ReduceLROnPlateau(optimizer),
                 "cosine": schedules.CosineAnnealingWarmRestarts(optimizer, 3)}
    average = torch.optim.swa_utils.AveragedModel(model)
    return model, optimizer, scheduler, average, torch.amp.GradScaler("cpu", init_scale=8.0)


def _step(model, optimizer, scheduler, average, scaler, number):
    optimizer.zero_grad()
    scaler.scale(model(torch.arange(12.0).reshape(2, 6) + number).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler["cosine"].step()
    scheduler["plateau"].step(1.0 / (number + 1))
    average.update_parameters(model)


def _whole(path):
    """All that a trainer has, back into fresh objects: the next step is the same."""
    parts, others = _trainer(0), _trainer(1)
    for number in range(3):
        _step(*parts, number)
    model, optimizer, scheduler, average, scaler = parts
    state = {"model": model, "optimizer": optimizer, "schedulers": scheduler, "average": average, "scaler": scaler}
    vckpt.save(path, state, step=3, **PIN)
    vckpt.close(path)
    found = vckpt.load(path, dict(zip(("model", "optimizer", "schedulers", "average", "scaler"), others)))
    assert not found.values and not found.missing and found.step == 3
    for number in (3, 4):
        _step(*parts, number)
        _step(*others, number)
    return all(torch.equal(a, b) for one, other in ((model, others[0]), (average, others[3]))
               for a, b in zip(one.state_dict().values(), other.state_dict().values())), \
        [group["lr"] for group in optimizer.param_groups] == [group["lr"]
                                                              for group in others[
        1].param_groups], scaler.state_dict() == others[4].state_dict()


@pytest.mark.filterwarnings("ignore")
def test_a_whole_trainer_comes_back(pool2, run):
    assert pool2(_whole, str(run)) == [(True, True, True)] * 2


# ---- tensors that differ in a few items ----

def _mask(path, dtype):
    """A loader's mask of what it has seen: of a million items one is another at each rank."""
    seen = torch.zeros(1 << 20, dtype=getattr(torch, dtype))
    seen[(1 << 19) + _rank()] = 1
    said = None
    try:
        vckpt.save(path, {"model": {"w": torch.ones(3)}, "loader": {"seen": seen}}, step=1, **PIN)
    except vckpt.Error as error:
        said = str(error)
    vckpt.save(path, {"model": {"w": torch.ones(3)}, "loader": {"seen": seen}}, step=2, per_rank="loader")
    vckpt.close(path)
    with vckpt.Step(path) as step:
        return said, int(step.values("loader", rank=_rank())["seen"].nonzero()) - (1 << 19)


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_a_mask_that_differs_in_one_item(pool2, run, dtype):
    for rank, (said, own) in enumerate(pool2(_mask, str(run), dtype)):
        assert 'tensor "loader/seen" differs between rank' in said and "per_rank=" in said and own == rank
    assert vckpt.steps(run) == [2]


# ---- devices ----

def test_which_tensors_are_copied_at_the_call(monkeypatch, capsys):
    """One process, several CUDA devices: those of the current one in the background, of others at the call."""
    from vckpt import state, torch_state
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert (torch_state.background(torch.device("cpu")) and torch_state.background(torch.device("cuda", 1)) and
            torch_state.background(torch.device("cuda")))
    assert not torch_state.background(torch.device("cuda", 0)) and not torch_state.background(torch.device("xla", 1))
    torch_state.warn(torch.device("cuda", 7))
    torch_state.warn(torch.device("cuda", 7))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "tensors on cuda:7 are copied at the call" in said and "set_device(7)" in said
    memory, tensor = state.Memory(), torch.ones(3)
    monkeypatch.setattr(state, "current_device", lambda: 1)
    state.collect({"m": {"w": tensor}}, memory=memory)
    first = memory.memos["m"].entries[0]
    state.collect({"m": {"w": tensor}}, memory=memory)
    assert memory.memos["m"].entries[0] is first and not first.copy
    monkeypatch.setattr(state, "current_device", lambda: 0)             # another one: all is looked at again
    monkeypatch.setattr(torch_state, "background", lambda device: False)
    found = state.collect({"m": {"w": tensor}}, memory=memory)
    assert memory.memos["m"].entries[0] is not first and memory.memos["m"].entries[0].copy and found.device is None


def test_generators_of_several_devices(monkeypatch):
    """The current device's, and all by their numbers, which go back only where as many are seen and the same one is
    current."""
    kept = {number: torch.full((16,), number, dtype=torch.uint8) for number in range(3)}
    current = [1]
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(kept))
    monkeypatch.setattr(cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(cuda, "get_rng_state", lambda: kept[current[0]])
    monkeypatch.setattr(cuda, "get_rng_state_all", lambda: list(kept.values()))
    monkeypatch.setattr(cuda, "set_rng_state", lambda state: kept.__setitem__(current[0], state))
    monkeypatch.setattr(cuda, "set_rng_state_all", lambda states: kept.update(enumerate(states)))
    states = vckpt.rng_state()
    before = {number: state.clone() for number, state in kept.items()}
    kept.update({number: torch.zeros(16, dtype=torch.uint8) for number in kept})
    vckpt.set_rng_state(states)
    assert all(torch.equal(kept[number], before[number]) for number in kept)
    # another device is this process's now: its generator goes on, others are left alone
    current[0] = 2
    kept.update({number: torch.zeros(16, dtype=torch.uint8) for number in kept})
    vckpt.set_rng_state(states)
    assert torch.equal(kept[2], before[1]) and not kept[0].any() and not kept[1].any()
