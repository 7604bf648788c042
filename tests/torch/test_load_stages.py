# SPDX-License-Identifier: Apache-2.0
"""A step that one process saved, into the stages of a pipeline: what another stage has is no gap, what none has is."""
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import vckpt
from vckpt import gaps
from vckpt.dcp import StorageWriter

PIN = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    yield tmp_path / "store/run"
    vckpt.close()


def _layers():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in range(4)})


def _stage(path, steps, kind):
    """Each rank has half of the layers, or one layer less."""
    import torch.distributed as dist
    rank = dist.get_rank()
    said = []
    for step in range(steps):
        torch.manual_seed(5 + rank)
        mine = {"even": [2 * rank, 2 * rank + 1], "gap": [2 * rank, 2 * rank + (0 if rank else 1)]}[kind]
        model = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in mine})
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        try:
            found = vckpt.load(f"{path}/{step}", {"model": model, "optimizer": optimizer, "trainer": {"n": None}},
                               meet_timeout=60.0)
            said.append(([key for key in model], len(optimizer.state), found.missing, found.unexpected,
                         float(model[str(mine[0])].weight.detach().flatten()[0]), found.values["trainer"]["n"]))
        except vckpt.InvalidArgument as error:
            said.append(str(error).partition("state: ")[2])
        try:
            if kind == "gap":
                found = vckpt.load(f"{path}/{step}", {"model": model, "optimizer": optimizer}, strict=False)
                said.append(found.unexpected)
        finally:
            dist.barrier()
    return said


@pytest.mark.parametrize("kind", ["even", "gap"])
def test_a_step_of_one_rank_into_stages(pool2, run, kind):
    """What another stage has is no gap; what no stage has is, at all of them, with strict=False too."""
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(layer(torch.ones(2, 3)).sum() for layer in model.values()).backward()
    optimizer.step()
    for step in range(2):
        vckpt.save(run, {"model": model, "optimizer": optimizer, "trainer": {"n": 3}}, step=step, **PIN)
    vckpt.close()
    for rank, said in enumerate(pool2(_stage, str(run), 2, kind)):
        if kind == "even":
            first = float(model[str(2 * rank)].weight.detach().flatten()[0])
            assert said == [([str(2 * rank), str(2 * rank + 1)], 4, [], [], first, 3)] * 2
        else:
            lacks = ["model/3.weight", "model/3.bias", "optimizer, its parameter 3.weight",
                     "optimizer, its parameter 3.bias"]
            assert sorted(said[1]) == sorted(said[3]) == sorted(lacks)
            assert all(one in said[0] for one in lacks) and "the state lacks model/3." in said[0]
            assert "2.weight" not in said[0]


def _stages_fail(path):
    """A rank that fails meanwhile, or does not come, is named by those that ask."""
    import torch.distributed as dist
    rank, said = dist.get_rank(), []
    model = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in range(2 * rank, 2 * rank + 2)})
    for state, timeout in (({"model": model, **({"bad name": 1} if rank else {})}, 60.0), ({"model": model}, 60.0)):
        try:
            said.append(vckpt.load(f"{path}/0", state, meet_timeout=timeout).unexpected)
        except vckpt.Error as error:
            said.append(str(error))
        dist.barrier()
    if rank == 0:
        try:
            vckpt.load(f"{path}/0", {"model": model}, meet_timeout=0.3)
        except vckpt.Error as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    if rank:
        vckpt.load(f"{path}/0", {"model": model}, strict=False, rank=rank, world=2)
    asked = gaps.Gaps.say
    if rank:
        gaps.Gaps.say = lambda self, *_: setattr(self, "said", True)            # as one that died
    try:
        vckpt.load(f"{path}/0", {"model": model}, meet_timeout=1.0)
    except vckpt.Error as error:
        said.append(f"{type(error).__name__}: {error}")
    gaps.Gaps.say = asked
    dist.barrier()
    return [*said, vckpt.load(f"{path}/0", {"model": model}, meet_timeout=60.0).unexpected]


def test_a_stage_that_fails(pool2, run):
    vckpt.save(run, {"model": _layers()}, step=0, **PIN)
    vckpt.close()
    first, second = pool2(_stages_fail, str(run))
    assert "rank 1: Refused" in first[0] and "cannot be the name of a component" in first[0]
    assert "rank 1 of 2 did not come within 0 s: " in first[2] and first[2].startswith("Timeout: ")
    assert "/0: rank 1 of 2 did not make the same load within 1 s: what other ranks" in first[3], first
    assert first[3].startswith("Timeout: ") and second[2].startswith("Timeout: ")
    assert first[1] == second[1] == first[4] == second[3] == [] and second[0].startswith('state["bad name"]')


def _flattened(path):
    import torch.distributed as dist
    rank = dist.get_rank()
    model = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in range(2 * rank, 2 * rank + 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    vckpt.load(f"{path}/0", {"model": model, "optimizer": optimizer}, meet_timeout=60.0)
    return [optimizer.state[parameter]["exp_avg"].tolist() for parameter in model.parameters()]


def test_a_flattened_optimizer_into_stages(pool2, run):
    """Its options are put into each stage's own groups: names of parameters mean the same at all ranks nevertheless."""
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(2, 3)).sum() * (number + 1) for number, layer in enumerate(model.values())).backward()
    optimizer.step()
    saved = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save(dict(zip(("model", "optimizer"), saved)), storage_writer=StorageWriter(f"{run}/0"), no_dist=True)
    vckpt.close()
    assert sum(pool2(_flattened, str(run)), []) == [optimizer.state[parameter]["exp_avg"].tolist()
                                                    for parameter in model.parameters()]
