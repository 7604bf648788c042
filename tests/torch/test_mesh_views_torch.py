# SPDX-License-Identifier: Apache-2.0
"""What is shown under a mesh against what ranks of torch's jobs hold: FSDP2 over tensor parallelism, HSDP over it, and
strided placements, with sizes that divide and sizes that do not. Jobs of up to eight ranks are made in one process (see
test_placements.py), a smaller one runs."""
import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from vckpt import meshes, torch_state

import meshlib
import vckpt as package
from saverlib import Vckpt
from test_mesh_views import Views
from test_placements import Group, placements_of

ROWS = (3, 7, 8, 13, 27)
JOBS = [("dp=2,tp=2", "dp", "tp"), ("dp=3,tp=2", "dp", "tp"), ("dp=2,tp=3", "dp", "tp"), ("dp=4,tp=2", "dp", "tp"),
        ("dp=2,tp=4", "dp", "tp"), ("dp=1,tp=4", "dp", "tp"), ("rep=2,dp=2,tp=2", "rep dp", "tp"),
        ("dp=2,ep=2,tp=2", "dp", "ep tp"), ("dp=2,ep=1,tp=2", "dp", "ep tp")]


def dims_of(text):
    return [(name, int(n)) for name, n in (word.split("=") for word in text.split(","))]


def longer(text):
    return tuple((name, n) for name, n in dims_of(text) if n > 1)


def numbers(*shape):
    return torch.arange(float(math.prod(shape))).reshape(shape)


def module_over(mesh, data, model):
    """Weights cut by tensor parallelism along rows and along columns, and one that it does not cut, under
    fully_shard."""
    module, part = torch.nn.Module(), mesh[tuple(model.split())]
    for n in ROWS:
        cuts = [Shard(0)] * part.ndim
        for name, cut in (("rows", cuts), ("columns", [Shard(1), *cuts[1:]])):
            cut = distribute_tensor(numbers(n, 8), part, cut, src_data_rank=None)
            module.register_parameter(f"{name}{n}", torch.nn.Parameter(cut))
    module.register_parameter("norm", torch.nn.Parameter(numbers(7)))
    fully_shard(module, mesh=mesh[tuple(data.split())])
    return dict(module.named_parameters())


@functools.lru_cache
def job(lib, text, data, model):
    """(its tensors, each as it is saved, [{name: what the rank holds}]) of a job with that mesh."""
    tensors, held, mesh = {}, [], dims_of(text)
    whole = meshes.given(text)
    whole = *whole, meshes.named(*whole)        # torch's own slices may be another job's: it keeps them
    for rank in range(math.prod(meshlib.sizes(mesh))):
        with Group(rank, math.prod(meshlib.sizes(mesh))):
            made = module_over(init_device_mesh("cpu", meshlib.sizes(mesh), mesh_dim_names=[name for name, _ in mesh]),
                               data, model)
            held.append({f"model/{name}": t.to_local().detach().numpy().copy() for name, t in made.items()})
            for name, t in made.items():
                said = torch_state.layout_of(t._spec, tuple(t.shape), whole, (name,))
                tensors[name] = meshlib.Tensor(f"model/{name}", numbers(*t.shape).numpy(),
                                               list(zip(said.mesh.names, said.mesh.sizes)),
                                               placements_of(lib, said.placements), ranks=list(said.mesh.ranks))
    for t in tensors.values():
        for rank, shard in zip(t.ranks, t.shards()):
            assert np.array_equal(meshlib.local(t.array, shard), held[rank][t.name]), (t.name, t.mesh, t.placements)
    return list(tensors.values()), held


@pytest.fixture
def shown(build, lib, tmp_path):
    open_now = []

    def save(tensors, world):
        api = Vckpt(build)
        store = api.store(tmp_path / f"s{len(open_now)}")
        meshlib.save(api, store, tensors, world)
        open_now.append(Views(lib, store))
        return open_now[-1]
    yield save
    for v in open_now:
        v.close()


def check(v, text, held, components=("model",)):
    """What each rank shows; gives {tensor: (placements, order)} of manifest.json."""
    m = v.mesh(text)
    assert not isinstance(m, str), m
    for (rank, wanted), component in itertools.product(enumerate(held), components):
        raw, f = v.bytes(m, rank, v.component(component))
        v.lib.view_file_close(f)
        meshlib.same(meshlib.parse(raw), wanted, component)
    raw, f = v.bytes(m, 2**32 - 1)
    v.lib.view_file_close(f)
    v.lib.view_mesh_unref(m)
    return {t["name"]: (t["placements"], t.get("order")) for t in json.loads(raw)["tensors"]}


@pytest.mark.parametrize("text,data,model", JOBS, ids=[text for text, *_ in JOBS])
def test_fully_shard_over_tensor_parallel(lib, shown, text, data, model):
    """Under its own mesh what each rank held. Under another what a job with that one holds: torch cuts in the same
    order there."""
    tensors, held = job(lib, text, data, model)
    v = shown(tensors, len(held))
    assert {longer(name) for name in v.names()} == {longer(text)}     # one mesh, one order
    told = check(v, text, held)
    assert told["norm"][1] is None
    if text == "dp=2,tp=2":
        assert told["rows13"] == ("S(0),S(0)", ["tp", "dp"]) and told["rows8"] == ("SS(0,2),S(0)", None)
        assert told["columns13"] == ("S(0),S(1)", None)
    for other, *kinds in JOBS:
        if kinds == ["dp", model] and longer(other) != longer(text):
            _, theirs = job(lib, other, *kinds)
            told = check(v, other, theirs)
            if model == "tp" and (data, other) != ("rep dp", "dp=2,tp=2"):
                assert told["rows13"] == told["rows8"] == ("S(0),S(0)", ["tp", "dp"])


@pytest.mark.parametrize("text,place", [
    ("dp=2,tp=2", "SS(0,2),S(0)"), ("dp=4,tp=2", "SS(0,2),S(0)"), ("dp=2,tp=3", "SS(0,3),S(0)"),
    ("dp=3,tp=2", "S(0),SS(0,2)"), ("a=2,b=2,c=2", "SS(0,2),SS(0,2),S(0)"), ("a=2,b=2,c=2", "SS(0,4),SS(0,2),S(0)"),
    ("a=2,b=2,c=2", "SS(0,2),S(0),S(0)")])
def test_strided_placements(lib, shown, text, place):
    """Cut as they say, from left to right, by torch's own distribute_tensor."""
    words = placements_of(lib, place)
    theirs = [_StridedShard(p[1], split_factor=p[2]) if p[0] == "SS" else Shard(p[1]) for p in words]
    mesh, world, held = dims_of(text), math.prod(meshlib.sizes(dims_of(text))), []
    for rank in range(world):
        with Group(rank, world):
            real = init_device_mesh("cpu", meshlib.sizes(mesh), mesh_dim_names=[name for name, _ in mesh])
            held.append({f"model/n{n}": distribute_tensor(numbers(n, 2), real, theirs, src_data_rank=None)
                         .to_local().numpy() for n in ROWS})
    v = shown([meshlib.Tensor(f"model/n{n}", numbers(n, 2).numpy(), mesh, words) for n in ROWS], world)
    assert v.names() == [text] and set(check(v, text, held).values()) == {(place, None)}


def test_an_order_of_the_mesh_s_own(lib, shown):
    """A DeviceMesh whose ranks are not in order: the list shows one whose ranks are."""
    held = []
    for rank in range(6):
        with Group(rank, 6):
            mesh = torch.distributed.DeviceMesh("cpu", torch.tensor([[0, 2, 4], [1, 3, 5]]), mesh_dim_names=("a", "b"))
            whole = distribute_tensor(numbers(13, 2), mesh, [Shard(0), Shard(0)], src_data_rank=None)
            held.append({"model/t": whole.to_local().numpy()})
            said = torch_state.layout_of(whole._spec, (13, 2), None, ("t",))
    v = shown([meshlib.Tensor("model/t", numbers(13, 2).numpy(), list(zip(said.mesh.names, said.mesh.sizes)),
                              placements_of(lib, said.placements), ranks=list(said.mesh.ranks))], 6)
    assert v.names() == ["b=3,a=2"]
    assert check(v, "b=3,a=2", held) == {"t": ("S(0),S(0)", ["a", "b"])}


def _real(path, sizes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate()),
                                           "2": RowwiseParallel(input_layouts=Replicate())})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    package.save(path, {"model": model, "optimizer": optimizer, "extra": {"plain": torch.ones(3)}}, step=0, pin="no")
    package.close(path)
    names = {p: name for name, p in model.named_parameters()}
    held = {f"model/{name}": p for name, p in model.named_parameters()}
    held |= {f"optimizer/state.{names[p]}.{key}": t for p, state in optimizer.state.items() for key, t in state.items()}
    return {name: getattr(t, "_local_tensor", t).detach().numpy() for name, t in held.items()}


def test_a_job_that_runs(pool4, lib, tmp_path):
    """Every mesh that is listed shows what each rank held, also the one of tensors that are no DTensors."""
    path = tmp_path / "store/run"
    held = pool4(_real, str(path), (2, 2))
    v = Views(lib, path.parent)
    try:
        assert v.names() == ["dp=2,tp=2", "rank=4"]
        for mesh in v.names():
            told = check(v, mesh, held, ("model", "optimizer"))
            assert told["0.weight"] == ("S(0),S(0)", ["tp", "dp"])
    finally:
        v.close()
