# SPDX-License-Identifier: Apache-2.0
"""Values of torch in tagged JSON: plans, dtypes, devices, meshes; with torch, without it, and without a process group.
(This folder must never get an __init__.py: it is called torch.)"""
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import valuelib as vl
from vckpt import values
from vckpt.records import Mesh, Record

ROOT = pathlib.Path(__file__).resolve().parents[2]


def there_and_back(value):
    text = values.encode(value)
    again = values.decode(text)
    assert vl.same(again, value), text
    assert values.encode(again) == text
    return again


def mesh(device="cpu", ranks=((0, 1), (2, 3)), names=("dp", "tp")):
    return DeviceMesh(device, torch.tensor(ranks), mesh_dim_names=names, _init_backend=False, _rank=0)


def test_a_plan_comes_back_equal():
    plan = {"layer1.weight": [Replicate()], "layer2.weight": [Shard(0)],
            "layer3.weight": (_StridedShard(1, split_factor=4), Shard(1)),
            "norm": [Partial(), Partial("max"), Shard(-2)], ("a", 1): {Shard(0): Replicate()}}
    again = there_and_back(plan)
    assert again == plan and again["layer2.weight"] == [Shard(0)] != [Shard(1)]
    assert type(again["layer3.weight"][0]) is _StridedShard and again["layer3.weight"][0].split_factor == 4
    assert again["norm"][1].reduce_op == "max" and again["norm"][1] != Partial()


def kinds(kind):
    return [value for value in vars(torch).values() if isinstance(value, kind)]


def test_every_dtype_layout_and_memory_format():
    found = [*kinds(torch.dtype), *kinds(torch.layout), *kinds(torch.memory_format)]
    assert len(found) > 40 and torch.float8_e8m0fnu in found
    again = values.decode(values.encode(found))
    assert all(a is b for a, b in zip(again, found, strict=True))


def test_sizes_and_devices():
    there_and_back([torch.Size([]), torch.Size([2, 0, 2**62]), torch.device("cpu"), torch.device("cuda"),
                    torch.device("cuda", 7), torch.device("meta"),
                    {torch.device("cuda:1"): {torch.Size([1]): torch.bfloat16}}])
    assert type(values.decode(values.encode(torch.zeros(2, 3).shape))) is torch.Size


def test_a_mesh_is_a_description():
    """No process group is there, and none is made."""
    assert not torch.distributed.is_initialized()
    given = mesh()
    again = values.decode(values.encode({"mesh": given}))["mesh"]
    assert type(again) is Mesh and again == given and again == Mesh("cpu", [[0, 1], [2, 3]], ["dp", "tp"])
    assert (again != mesh("cuda") and again != mesh(ranks=((0, 2), (1, 3))) and again != mesh(names=("dp", "ep")) and
            again != mesh(names=None))
    assert values.encode(again) == values.encode(given)
    assert (again.mesh_dim_names, again.shape, again.device_type, again.size(0)) == (("dp", "tp"), (2, 2), "cpu", 2)
    assert not torch.distributed.is_initialized()
    there_and_back(Mesh.from_torch(mesh(ranks=(3, 1, 2), names=None)))


def test_a_mesh_becomes_torchs_when_asked(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "ranks"), 1), rank=0,
                                         world_size=1)
    try:
        given = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        described = values.decode(values.encode(given))
        assert described.to_torch() == given and described == given and described == Mesh.from_torch(given)
        assert values.encode(given["tp"]) == values.encode(Mesh("cpu", [0], ["tp"]))
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_are_the_callers():
    with pytest.raises(TypeError, match=r'state\["w"\]\[0\]: a Parameter \(torch.nn.parameter.Parameter\) '
                       r'cannot be kept'):
        values.encode({"w": [torch.nn.Parameter(torch.zeros(2))]})
    for value in (torch.zeros(()), torch.nn.Linear(1, 1), torch.float32.to_real, torch.Generator(), torch.nn.Linear,
                  torch.optim.SGD,
                  torch.finfo(torch.float32)):
        with pytest.raises(TypeError, match=r'^state\["x"\]: .* cannot be kept: (give|leave) '):
            values.encode({"x": value})
    text = values.encode({"w": torch.zeros(2), "n": 3, "s": torch.Size([2])},
                         tensor=lambda path, value: ("model/" + path[0], {"dtype": value.dtype}),
                         is_tensor=lambda value: isinstance(value, torch.Tensor))
    again = values.decode(text, tensor=lambda path, name, members: (name, members["dtype"]))
    assert again == {"w": ("model/w", torch.float32), "n": 3, "s": torch.Size([2])}


class InterleavedShard(Placement):
    def __init__(self, dim, interleaved_size):
        self.dim, self.interleaved_size = dim, interleaved_size

    def __eq__(self, other):
        return type(other) is InterleavedShard and vars(self) == vars(other)


def test_placements_of_other_libraries_are_records():
    plan = {"qkv.weight": [InterleavedShard(0, 3)]}
    record, = values.decode(values.encode(plan))["qkv.weight"]
    assert (record.type_name, record.dim, record.interleaved_size) == ("test_values_torch.InterleavedShard", 0, 3)
    assert values.decode(values.encode(plan), types=[InterleavedShard]) == plan


def test_optimizer_and_scheduler_states():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    state = {"groups": optimizer.state_dict()["param_groups"],
             "scheduler": {k: v for k, v in scheduler.state_dict().items() if not callable(v)}}
    there_and_back(state)
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
    chained = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [5])
    there_and_back(chained.state_dict())


HOSTILE = ['{"$torch.dtype": "load"}', '{"$torch.dtype": "nn"}', '{"$torch.layout": "float32"}',
           '{"$torch.dtype": "float3_of_later"}',
           '{"$torch.device": "warp:1"}', '{"$torch.device": "cuda:00"}', '{"$torch.memory_format": "hub"}']


@pytest.mark.parametrize("text", HOSTILE)
def test_what_this_torch_lacks_is_a_record(text):
    """A dtype of a later version, a device of another build; never an attribute of torch that is something else."""
    document = b'{"$vckpt": 1, "value": %s}\n' % text.encode()
    record = values.decode(document)
    assert type(record) is Record and record.tag in text and values.encode(record) == document
    assert record.value in text


def run(program, *args):
    begin = ("import sys, types; package = sys.modules['vckpt'] = types.ModuleType('vckpt'); package.__path__ = "
             "[sys.argv[1] + '/vckpt']\n"
             "from vckpt import values\n")
    return subprocess.run([sys.executable, "-c", begin + program, str(ROOT / "tools/python"), *args], check=True,
                          capture_output=True).stdout


def test_without_torch_and_numpy_records_stand_there(tmp_path):
    """And give the same bytes again; torch is imported only where one of its tags is met."""
    state = {"plan": {"w": [Shard(0), _StridedShard(0, split_factor=2)]}, "dtype": torch.bfloat16,
             "size": torch.Size([2]), "device": torch.device("cuda:1"),
             "mesh": mesh(), "layout": torch.strided, "format": torch.channels_last,
             "numpy": [np.float32(0.5), np.dtype(">i2"), np.int8, np.datetime64(1, "s")]}
    path = tmp_path / "state.json"
    path.write_bytes(values.encode(state))
    out = run("sys.modules['torch'] = sys.modules['numpy'] = None\n"
              "state = values.decode(open(sys.argv[2], 'rb').read())\n"
              "assert state['dtype'].value == 'bfloat16' and state['plan']['w'][1].split_factor == 2, state\n"
              "assert type(state['mesh']) is values.Mesh and state['size'].value == [2]\n"
              "assert (state['numpy'][0].value, state['numpy'][0].dtype) == (0.5, 'float32')\n"
              "sys.stdout.buffer.write(values.encode(state))", str(path))
    assert out == path.read_bytes()
    path.write_bytes(values.encode([mesh(), 1]))
    run("values.encode(values.decode(open(sys.argv[2], 'rb').read())); assert 'torch' not in sys.modules", str(path))
    path.write_bytes(values.encode(torch.float16))
    run("values.decode(open(sys.argv[2], 'rb').read()); assert 'torch' in sys.modules", str(path))
