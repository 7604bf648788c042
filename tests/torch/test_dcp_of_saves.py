# SPDX-License-Identifier: Apache-2.0
"""dcp.load of what vckpt.save kept: model, optimizer with its groups, scheduler and plain values, into torch's state
dicts; and vckpt.load of what dcp.save kept."""
import json
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


import vckpt
from vckpt.dcp import StorageReader, StorageWriter

PIN = {"pin": "no"}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(tmp_path):
    yield str(tmp_path / "store/run")
    vckpt.close()


def trainer(seed, wrap, lr=0.1):
    torch.manual_seed(seed)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)))
    groups = [{"params": list(model[0].parameters()), "lr": lr},
              {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=2 * lr, betas=(0.8, 0.9))
    return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer,
                                                                   [torch.optim.lr_scheduler.ConstantLR(optimizer),
                                                                    torch.optim.lr_scheduler.ExponentialLR(optimizer,
            0.9)], [2])


def step(model, optimizer, scheduler, number):
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(2, 6) + number).square().mean().backward()
    optimizer.step()
    scheduler.step()


def repack(command, path):
    """By rank 0, while the others wait."""
    if torch.distributed.get_rank() == 0:
        store, run = path.rsplit("/", 1)
        done = subprocess.run([command, "repack", store, f"{run}/3", "--json"], capture_output=True, check=True)
        assert json.loads(done.stdout)["steps"][0]["repacked"]
    torch.distributed.barrier()


def round_trip(path, flatten, wrap, repacks=None):
    """The next steps are the same."""
    one, other = trainer(0, wrap), trainer(1, wrap, lr=0.5)
    for number in range(3):
        step(*one, number)
    model, optimizer, scheduler = one
    vckpt.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler,
                      "plan": {"tp": 1, "names": ["a"], "pair": (1, 2)}}, step=3, **PIN)
    vckpt.close(path)
    if repacks:
        repack(repacks, path)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, moments = get_state_dict(other[0], other[1], options=options)
    state = {"model": weights, "optimizer": moments, "scheduler": other[2], "plan": {"tp": 0, "names": [], "pair": ()}}
    dcp.load(state, storage_reader=StorageReader(f"{path}/3"))
    set_state_dict(other[0], other[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                   options=options)
    assert state["plan"] == {"tp": 1, "names": ["a"], "pair": (1, 2)}
    assert [{**group, "params": 0} for group in other[1].param_groups] == [{**group, "params": 0}
                                                                           for group in optimizer.param_groups]
    assert other[2].state_dict()["last_epoch"] == 3
    for number in (3, 4):
        step(*one, number)
        step(*other, number)
    found, wanted = (get_state_dict(*pair[:2], options=StateDictOptions(flatten_optimizer_state_dict=True))
                     for pair in (other, one))
    for a, b in zip(found, wanted):
        assert a.keys() == b.keys()
        for key in a:
            same = (torch.equal(getattr(a[key], "_local_tensor", a[key]), getattr(b[key], "_local_tensor", b[key]))
                    if torch.is_tensor(a[key]) else a[key] == b[key])
            assert same, key
    return True


@pytest.mark.parametrize("text", [b"{}", b'{"hidden_size": 8}', b"[1]", b"a line, {}\n", b"\xff"])
def test_files_beside_a_step(run, text):
    """They are no values, whatever they are named."""
    vckpt.save(run, {"model": {"w": torch.arange(3.)}, "epoch": 3}, step=1, blobs={"config.json": text}, **PIN)
    state = {"model": {"w": torch.zeros(3)}, "epoch": 0}
    dcp.load(state, storage_reader=StorageReader(f"{run}/1"), no_dist=True)
    assert torch.equal(state["model"]["w"], torch.arange(3.)) and state["epoch"] == 3
    assert "config" not in StorageReader(f"{run}/1").read_metadata().state_dict_metadata


def reverse(path, flatten, wrap):
    """Saved by DCP, and loaded as a step of vckpt is: no optimizer makes a step for it, and nothing is unpickled."""
    one, other = trainer(0, wrap), trainer(1, wrap, lr=0.5)
    vckpt.init(path.rpartition("/")[0], exist_ok=True)
    for number in range(3):
        step(*one, number)
    weights, moments = get_state_dict(one[0], one[1], options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    dcp.save({"model": weights, "optimizer": moments, "scheduler": one[2], "n": 5,
              "plan": {"tp": 1, "nested": [torch.ones(2), {"x": (1, 2)}], "odd": Odd(3)}},
             storage_writer=StorageWriter(f"{path}/3"))
    found = vckpt.load(f"{path}/3", {"model": other[0], "optimizer": other[1], "scheduler": other[2], "plan": {},
                                     "n": 0})
    assert found.values["n"] == 5 and found.values["plan"]["nested"][1] == {"x": (1, 2)}
    assert torch.equal(found.values["plan"]["nested"][0], torch.ones(2)) and found.values["plan"]["tp"] == 1
    assert found.values["plan"]["odd"] == vckpt.Record("vckpt.Pickled", {"key": "plan.odd"}) and not Odd.made
    assert [{**group, "params": 0} for group in other[1].param_groups] == [{**group, "params": 0}
                                                                           for group in one[1].param_groups]
    for number in (3, 4):
        step(*one, number)
        step(*other, number)
    for mine, theirs in zip(one[0].parameters(), other[0].parameters()):
        assert torch.equal(getattr(mine, "_local_tensor", mine), getattr(theirs, "_local_tensor", theirs))
    return True


class Odd:
    made = []

    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        Odd.made.append(state)


def bare(model):
    return model


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("flatten", [False, True])
def test_one_rank(run, flatten):
    assert round_trip(run, flatten, bare)


@pytest.mark.parametrize("flatten", [False, True])
def test_two_ranks(pool2, run, flatten):
    assert pool2(round_trip, run, flatten, sharded) == [True, True]


def test_two_ranks_whose_step_was_cut_anew(pool2, build, run):
    assert pool2(round_trip, run, False, sharded, str(build / "tools/vckpt/vckpt")) == [True, True]


@pytest.mark.parametrize("flatten", [False, True])
def test_the_reverse(run, flatten):
    assert reverse(run, flatten, bare)


@pytest.mark.full
@pytest.mark.parametrize("flatten", [False, True])
def test_the_reverse_on_two_ranks(pool2, run, flatten):
    assert pool2(reverse, run, flatten, sharded) == [True, True]


def test_groups_that_dcp_took_apart(run):
    """Parameters of one group here that had other options there."""
    model, optimizer, _ = trainer(0, bare)
    step(model, optimizer, _, 0)
    vckpt.init(run.rpartition("/")[0])
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=StorageWriter(f"{run}/1"))
    with pytest.raises(vckpt.InvalidArgument, match="it has 2 groups of parameters in the step and 1 in the state"):
        vckpt.load(f"{run}/1", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    less = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(vckpt.InvalidArgument, match="the state lacks optimizer, its parameter 1.bias"):
        vckpt.load(f"{run}/1", {"model": model, "optimizer": less})
    assert vckpt.load(f"{run}/1", {"model": model, "optimizer": less}, strict=False)
    assert less.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_what_has_no_key(run):
    vckpt.save(run, {"a": {"pair": (torch.ones(2), 1), "list": [torch.ones(1), [{"x": 1}], [2]], "loader": {"at": 4}},
                     "rng": vckpt.rng_state()},
               per_rank="a.loader", **PIN)
    state = {"a": {"list": [torch.zeros(1), [{"x": 0}], [0]]}}
    dcp.load(state, storage_reader=StorageReader(run))
    assert state == {"a": {"list": [torch.ones(1), [{"x": 1}], [2]]}}
    for asked, sentence in [({"a": {"pair": ()}}, r"a\.pair: the value has tensors in a tuple"),
                            ({"a": {"loader": {"at": 0}}}, r"Missing key.*a\.loader\.at"),
                            ({"a": {"none": 0}}, r"Missing key.*a\.none"),
                            ({"rng": {"python": 0}}, r"Missing key.*rng\.python")]:
        with pytest.raises(dcp.api.CheckpointException, match=sentence):
            dcp.load(asked, storage_reader=StorageReader(run))


def test_two_tensors_of_one_key(run):
    vckpt.save(run, {"model": {"x.w": torch.ones(2)}, "model.x": {"w": torch.zeros(2)}}, **PIN)
    with pytest.raises(dcp.api.CheckpointException,
                       match=r"model/x\.w and model\.x/w have the same key here, model\.x\.w"):
        dcp.load({"model": {"x": {"w": torch.ones(2)}}}, storage_reader=StorageReader(run))


def test_two_values_of_one_key(run):
    vckpt.save(run, {"c": {"a.b": 1, "a": {"b": 2, "c": 3}}}, **PIN)
    state = {"c": {"a": {"c": 0}}}
    dcp.load(state, storage_reader=StorageReader(run))
    assert state == {"c": {"a": {"c": 3}}}
    with pytest.raises(dcp.api.CheckpointException, match=r"c\.a\.b: two values of the step have this key, because"):
        dcp.load({"c": {"a": {"b": 0}}}, storage_reader=StorageReader(run))
