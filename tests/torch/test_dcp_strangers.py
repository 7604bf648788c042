# SPDX-License-Identifier: Apache-2.0
"""dcp.load and vckpt.load of a store from a stranger: its pickles run nothing unless they are allowed to, and what
torch usually keeps comes back without a word."""
import collections
import copy
import datetime
import io
import os
import pathlib
import pickle
import random
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import vckpt
from test_dcp_documents import load, save
from vckpt import pickles
from vckpt.dcp import StorageReader

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def path(tmp_path):
    yield str(tmp_path / "ckpt")
    vckpt.close()


class Trap:
    """A pickle of it runs a command."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"echo x > {self.file}",)


class Raw(DefaultSavePlanner):
    """Puts bytes of a stranger's choice where values were."""

    def resolve_data(self, item):
        if item.type == WriteItemType.BYTE_IO and isinstance(self.state_dict[item.index.fqn], bytes):
            return io.BytesIO(self.state_dict[item.index.fqn])
        return super().resolve_data(item)


class Custom(DefaultLoadPlanner):
    """Unpickles by itself."""

    def load_bytes(self, item, value):
        self.state_dict[item.dest_index.fqn] = pickle.load(value)


def archive(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


# ---- pickles ----

@pytest.mark.parametrize("inner", [lambda trap: trap, lambda trap: [1, (trap,)], lambda trap: {"a": {"b": trap}}])
def test_a_stranger_s_pickle_runs_nothing(path, tmp_path, inner):
    trap = tmp_path / "touched"
    save({"w": torch.ones(2), "n": 5, "state.odd": archive(inner(Trap(trap)))}, path, planner=Raw())
    asked = {"w": torch.zeros(2), "n": 0, "state.odd": None}
    with pytest.raises(CheckpointException) as error:
        load(dict(asked), path)
    for word in ("default/0: entry 'state.odd'", "the class posix.system", "allow_pickle=True"):
        assert word in str(error.value)
    assert not trap.exists()
    assert load({"w": torch.zeros(2), "n": 0}, path)["n"] == 5
    found = vckpt.load(f"{path}/default/0", {"model": {"w": torch.zeros(2)}, "state.odd": 0, "n": 0})
    assert found.values["state.odd"] == vckpt.Record("vckpt.Pickled", {"key": "state.odd"})
    assert not trap.exists()
    load(dict(asked), path, allow_pickle=True)
    assert trap.exists()


def test_pickles_that_a_planner_reads_by_itself(path, tmp_path):
    trap = tmp_path / "touched"
    for protocol in (2, 4, 5):
        save({"good": pickle.dumps({"a": (1, {2})}, protocol), "bad": pickle.dumps([Trap(trap)], protocol)}, path,
             planner=Raw(flatten_state_dict=False))
        planner = Custom(flatten_state_dict=False, flatten_sharded_tensors=False)
        assert load({"good": None}, path, planner)["good"] == {"a": (1, {2})}
        with pytest.raises(CheckpointException, match="entry 'bad': the class posix.system"):
            load({"bad": None}, path, Custom(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert not trap.exists()
    save({"other": b"no pickle at all"}, path, planner=Raw())
    with pytest.raises(CheckpointException, match="neither an archive of torch.save nor a pickle.*allow_pickle=True"):
        load({"other": None}, path)


def test_what_came_from_dcp_by_import(path, tmp_path, vckpt):
    """vckpt import keeps such entries as they are."""
    trap = tmp_path / "touched"
    os.mkdir(tmp_path / "old")
    dcp.save({"n": 5, "odd": archive(Trap(trap))}, storage_writer=dcp.FileSystemWriter(tmp_path / "old"), no_dist=True,
             planner=Raw())
    vckpt("init", path)
    assert "odd" in vckpt("import", path, "run", tmp_path / "old").stderr
    assert load({"n": 0}, f"{path}/run")["n"] == 5
    with pytest.raises(CheckpointException, match="the class posix.system"):
        load({"odd": None}, f"{path}/run")
    assert not trap.exists()


def test_the_error_is_vckpt_s_own(path):
    save({"odd": archive(Trap("/nowhere/at/all"))}, path, planner=Raw())
    reader = StorageReader(path)
    reader.read_metadata()
    with pytest.raises(vckpt.InvalidArgument, match="entry 'odd': the class posix.system is not one of those"):
        reader.entry("odd")
    assert pickle.loads(pickle.dumps(reader)).allow_pickle is False
    assert StorageReader(path, allow_pickle=True).allow_pickle is True


def test_nothing_in_the_package_unpickles():
    """Of all ways by which Python, torch and numpy do."""
    for path in sorted(pathlib.Path(vckpt.__file__).parent.glob("*.py")):
        text = path.read_text()
        for word in ("pickle.load", "Unpickler", "torch.load(io", "weights_only=", "marshal", "shelve", "joblib",
                     "cloudpickle", "eval(", "exec(", "np.load", "numpy.load", "read_pickle"):
            at = [line for line in text.splitlines() if word in line and "torch.load(weights_only=True)" not in line]
            assert not at, (path.name, at)
        assert "allow_pickle=True" not in text.replace("StorageReader(..., allow_pickle=True)", "").replace(
            '"allow_pickle=True)"', ""), path.name


# ---- a save says what a load will refuse ----

@pytest.fixture
def told(monkeypatch):
    """As in a process that has said nothing yet. Gives the warnings of a save."""
    monkeypatch.setattr(pickles, "_warned", set())

    def warned(*args, **options):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            save(*args, **options)
        return [str(one.message) for one in seen if "vckpt" in str(one.message)]
    return warned


def test_a_save_warns_of_each_class_once(path, told):
    state = {"m": torch.ones(4), "x": {"at": datetime.datetime(2020, 1, 1), "end": [datetime.datetime(2021, 1, 1)]},
             "days": np.array(["2020-01-01"], "M8[D]"), "n": 5}
    found = told(state, path)
    assert len(found) == 2 and all("StorageReader(..., allow_pickle=True)" in one for one in found)
    assert "entry 'x.at': the class datetime.datetime is not one of those" in found[0]
    assert "entry 'days': the numpy.dtype datetime64[D] is not one of those" in found[1]
    assert told(state, path) == []
    assert "the class datetime.date is" in told({"day": datetime.date(2020, 1, 1)}, path)[0]
    with pytest.raises(CheckpointException, match="entry 'x.at': the class datetime.datetime"):
        load({"m": torch.zeros(4), "x": {"at": None}}, f"{path}/default/0")
    loaded = load({"m": torch.zeros(4), "x": {"at": None}}, f"{path}/default/0", allow_pickle=True)
    assert loaded["x"]["at"] == datetime.datetime(2020, 1, 1)


def test_a_save_of_plain_values_warns_of_nothing(path, told):
    states = {str(at): one.state_dict() for at, one in enumerate(training())}
    states["x"] = collections.defaultdict(int, a=1), 3, torch.ones(2), frozenset("ab"), random.getstate()
    assert told(states, path) == told(states, path, planner=DefaultSavePlanner(False, False)) == []
    blank = {"x": None}
    assert load(blank, f"{path}/default/0")["x"][0].default_factory is int


def test_a_save_that_is_stopped_by_its_warning(path, told):
    """By python -W error: the next one works."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "vckpt")
        with pytest.raises(CheckpointException, match="the class datetime.date is"):
            save({"day": datetime.date(2020, 1, 1)}, path)
    assert told({"day": datetime.date(2020, 1, 1)}, path) == []


def test_a_save_looks_for_a_limited_time(monkeypatch):
    seen = []
    monkeypatch.setattr(pickles, "refusal", seen.append)
    monkeypatch.setattr(time, "thread_time", lambda: 0.02 * len(seen))
    looks = pickles.Looks()
    for key in "abcdef":
        looks.look(key, memoryview(b""))
    assert len(seen) == 3


# ---- what torch usually keeps ----

def training():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    for make in (torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
                 torch.optim.LBFGS, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD):
        optimizer = make(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
        yield optimizer
    names = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for make in (lambda o: names.MultiStepLR(o, [2, 2, 5]), lambda o: names.OneCycleLR(o, 0.1, 10),
                 lambda o: names.CosineAnnealingWarmRestarts(o, 5), lambda o: names.LambdaLR(o, lambda n: 0.5),
                 lambda o: names.CyclicLR(o, 0.01, 0.1), names.ReduceLROnPlateau,
                 lambda o: names.ChainedScheduler([names.ConstantLR(o), names.ExponentialLR(o, 0.9)]),
                 lambda o: names.PolynomialLR(o)):
        yield make(optimizer)
    yield torch.amp.GradScaler("cpu", enabled=True)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_states_of_torch_come_back(path):
    """As DCP takes them apart, but for what it gives in another form itself; and as whole entries."""
    states = {str(at): one.state_dict() for at, one in enumerate(training())}
    states["rng"] = (random.getstate(), np.random.get_state(), torch.get_rng_state(),
                     np.random.default_rng(1).bit_generator.state)
    states["loader"] = {"epoch": 3, "seen": {1, 2}, "order": np.arange(5), "best": np.float64(0.5), "scale": 1 + 2j,
                        "sampler": collections.OrderedDict(at=(3, [4])), "shape": torch.Size([2, 3]),
                        "kind": torch.bfloat16, "on": torch.device("cpu"), "queue": collections.deque([1], 4),
                        "extra": io.BytesIO(b"state of a layer").getvalue(), "none": None, "window": frozenset("ab")}
    save(states, f"{path}/1")
    blank = {key: copy.deepcopy(value) for key, value in states.items()}
    blank["rng"], blank["loader"]["order"] = (), None
    blank["loader"].update({key: None for key in ("epoch", "seen", "best", "scale", "shape", "kind", "queue", "extra")})
    load(blank, f"{path}/1")
    for key in states.keys() - {"3", "7"}:              # LBFGS has lists of None; a Counter becomes a dict
        assert same(states[key], blank[key]), key
    whole = DefaultSavePlanner(False, False)
    save(states, f"{path}/2", planner=whole)
    found = load(dict.fromkeys(states), f"{path}/2", DefaultLoadPlanner(False, False))
    for key in states:
        assert same(states[key], found[key]), key
