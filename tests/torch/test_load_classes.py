# SPDX-License-Identifier: Apache-2.0
"""Dataclasses, enums and named tuples in what a load hands to optimizers, objects and modules: they come back as
themselves, or nothing is filled and the sentence says what to give; a save says so once."""
import collections
import dataclasses
import enum

import pytest
import torch

import vckpt
from vckpt import advice

PIN = {"pin": "no"}


class Phase(enum.Enum):
    WARM = 1
    DECAY = 2


@dataclasses.dataclass
class Config:
    lr: float
    more: object = None


Pair = collections.namedtuple("Pair", "a b")
CLASSES = [Phase, Config, Pair]


class Object:
    def __init__(self, kept=None):
        self.kept = kept

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


class Extra(torch.nn.Linear):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


@pytest.fixture
def run(tmp_path):
    advice._named.clear()
    yield tmp_path / "store/run"
    vckpt.close()


def optimizer(model, phase, state=None):
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.param_groups[0]["phase"] = phase
    if state is not None:
        made.state[model.weight] = {"kept": state, "x": torch.ones(3)}
    return made


@pytest.mark.parametrize("where", ["object", "group", "state", "module"])
def test_classes_of_what_is_handed_to_code(run, where, capfd):
    def made(seed, config, pair):
        torch.manual_seed(seed)
        model = Extra(3, 2)
        phase = Phase.DECAY if seed == 0 else Phase.WARM
        if where == "object":
            return {"model": model, "deep": [Object({"phase": phase, "pairs": [config, pair]})]}
        if where == "module":
            model.extra = {"phase": phase, "pairs": [config, pair]}
            return {"model": model}
        given = (phase, None) if where == "group" else (None, {"phase": phase, "pairs": [config, pair]})
        return {"model": model, "optimizer": optimizer(model, *given)}

    def found(state):
        return {"object": lambda: state["deep"][0].kept, "module": lambda: state["model"].extra,
                "group": lambda: state["optimizer"].param_groups[0]["phase"],
                "state": lambda: state["optimizer"].state[state["model"].weight]["kept"]}[where]()
    saved = made(0, Config(0.5, {"x": (1, Phase.WARM)}), Pair(1, torch.ones(2)) if where != "module" else Pair(1, 2))
    for _ in range(3):
        vckpt.save(run, saved, **PIN)
    said = [line for line in capfd.readouterr().err.splitlines() if "types=[" in line]
    assert len(said) == (1 if where == "group" else 3)
    at = {"object": 'state["deep"][0]["kept"]["phase"]', "module": 'state["model"]["_extra_state"]["phase"]',
          "group": 'state["optimizer"]["param_groups"][0]["phase"]',
          "state": 'state["optimizer"]["state"]["weight"]["kept"]["phase"]'}[where]
    assert any(line.startswith(f"vckpt: {at} is a test_load_classes.Phase, which goes back to where it was only with "
                               "vckpt.load(..., types=[Phase])") for line in said), said
    fresh = made(1, None, None)
    before = fresh["model"].weight.tolist()
    for types in [], [Config, Pair]:
        for strict in True, False:
            with pytest.raises(vckpt.InvalidArgument, match="Phase.*: give types=.*Phase") as caught:
                vckpt.load(run, fresh, types=types, strict=strict)
            assert at in str(caught.value) and ("Pair" in str(caught.value)) == (not types and where != "group")
    assert fresh["model"].weight.tolist() == before
    for types in CLASSES, {f"test_load_classes.{one.__name__}": one for one in CLASSES}:
        fresh = made(1, None, None)
        vckpt.load(run, fresh, types=types)
        if where == "group":
            assert found(fresh) is Phase.DECAY
        else:
            kept = found(fresh)
            assert kept["phase"] is Phase.DECAY and type(kept["pairs"][1]) is Pair
            assert kept["pairs"][0] == Config(0.5, {"x": (1, Phase.WARM)})
    assert torch.equal(fresh["model"].weight, saved["model"].weight)


def test_values_need_no_classes(run, capfd):
    """What no code is handed comes back as a Record, and nothing is said; nor of namespaces and generators."""
    import types
    state = {"config": Config(0.5), "o": Object({"space": types.SimpleNamespace(a=1), "size": torch.Size([2])})}
    vckpt.save(run, state, **PIN)
    assert not capfd.readouterr().err
    fresh = Object()
    found = vckpt.load(run, {"config": None, "o": fresh})
    assert found.values["config"].lr == 0.5 and fresh.kept == state["o"].kept
