# SPDX-License-Identifier: Apache-2.0
"""Who holds what, against torch.distributed.tensor, in one process: a fake process group, and meshes in which this
process stands at the coordinate in question: one mesh of a shape is told where it is, or, slower and without telling it
anything, a mesh is made whose ranks are ordered so that rank 0 is there. Where torch differs from itself:
docs/torch.md, whose tables are read and tried here. (This folder must never get an __init__.py: it is called torch.)"""
import ast
import ctypes
import itertools
import math
import pathlib
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import (_compute_local_shape_and_global_offset,
                                             compute_local_shape_and_global_offset)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shard_oracle as oracle
import tensorlib as tl
from shard_calls import dump    # noqa: F401 (a fixture)

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Group:
    """A fake process group, and meshes in which this process has the coordinate that is asked for."""

    def __init__(self, rank=0, size=64):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        self.meshes, self.shapes = {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        dist.destroy_process_group()

    def standing_at(self, mesh, coordinate):
        """One mesh of a shape, told of another coordinate each time."""
        if mesh not in self.shapes:
            self.shapes[mesh] = DeviceMesh("cpu", torch.arange(math.prod(mesh)).reshape(mesh), _init_backend=False)
        self.shapes[mesh]._coordinate_on_dim = coordinate
        assert self.shapes[mesh].get_coordinate() == coordinate
        return self.shapes[mesh]

    def mesh(self, mesh, coordinate):
        """A mesh in which rank 0 is there."""
        key = mesh, coordinate
        if key not in self.meshes:
            ranks = torch.arange(math.prod(mesh)).reshape(mesh)
            ranks.reshape(-1)[0], ranks[coordinate] = int(ranks[coordinate]), 0
            self.meshes[key] = DeviceMesh("cpu", ranks, _init_backend=False)
        assert tuple(self.meshes[key].get_coordinate()) == coordinate
        return self.meshes[key]


def in_torch(placements):
    kinds = {"R": lambda: Replicate(), "S": Shard, "SS": lambda d, n: _StridedShard(d, split_factor=n)}
    return [kinds[p[0]](*p[1:]) for p in placements]


def random_case(rng):
    """Up to three mesh dimensions, often several of them on one tensor dimension."""
    ndim = rng.randint(1, 3)
    shape = tuple(rng.randint(rng.random() > .1, rng.choice((6, 12, 30))) for _ in range(ndim))
    mesh = tuple(rng.randint(1, rng.choice((2, 4, 5))) for _ in range(rng.randint(1, 3)))
    while math.prod(mesh) > 18:
        mesh = mesh[1:]
    dims = range(ndim) if rng.random() < .5 else [rng.randrange(ndim)]
    kinds = [("R",)] + [("S", d) for d in dims] + [("SS", d, rng.randint(1, 5)) for d in dims]
    return shape, mesh, tuple(rng.choice(kinds) for _ in mesh)


def box_of(shape, offset, size):
    """The items of a box, by number; those outside the tensor left out."""
    return oracle.numbered(shape)[tuple(slice(o, o + n) for o, n in zip(offset, size))].reshape(-1)


def distributed(full, mesh, placements):
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def compare(dump, shape, mesh, placements, torch_says, torch_leaves, found):
    """One case, every rank. torch_says(coordinate) gives (local shape, offset), torch_leaves(coordinate) the local
    tensor of one that numbers its items; counts by kind go to `found`."""
    code, sharding = dump.sharding(shape, mesh, placements)
    assert code == 0
    items, shapes, boxes = dump.all_ranks(sharding, math.prod(mesh))
    at = 0
    for coordinate, local_shape, nboxes in zip(oracle.coordinates(mesh), shapes, boxes):
        held = items[at:at + math.prod(local_shape)]
        at += len(held)
        torch_shape, offset = torch_says(coordinate)
        where = f"{oracle.words(placements)} {shape} on {mesh} at {coordinate}"
        assert torch_shape == local_shape, where
        # nothing: torch has an offset for it, the end in a dimension that is empty
        if not len(held):
            assert all(o == n for o, n, size in zip(offset, shape, local_shape) if size == 0), where
            found["empty"] += 1
            continue
        assert offset == tuple(map(int, np.unravel_index(held[0], shape))), where      # always that of the first item
        same = np.array_equal(box_of(shape, offset, local_shape), held)
        assert same == (nboxes == 1), where             # with several boxes, offset and shape tell of other items
        if not same:
            local = torch_leaves(coordinate)
            assert tuple(local.shape) == local_shape and np.array_equal(local.reshape(-1).numpy(), held), where
        found["one box" if same else "boxes"] += 1
    assert at == len(items)


def test_shapes_offsets_and_content(dump, rng, scale):
    """The public function, for every rank; where a rank holds several boxes, every item of what distribute_tensor
    leaves there."""
    found = dict.fromkeys(("one box", "boxes", "empty"), 0)
    count = scale(700, 30_000)
    with Group() as group:
        for _ in range(count):
            shape, mesh, placements = random_case(rng)
            theirs, full = in_torch(placements), torch.arange(math.prod(shape)).reshape(shape)
            compare(dump, shape, mesh, placements,
                    lambda c: compute_local_shape_and_global_offset(shape, group.standing_at(mesh, c), theirs),
                    lambda c: distributed(full, group.standing_at(mesh, c), theirs), found)
    print(f"{count} cases; ranks by kind: {found}")
    assert min(found.values()) > count // 10


def test_content_of_distributed_tensors(dump, rng, scale):
    """Every item of what distribute_tensor leaves, of any number of boxes, and shape and offset, two ranks a case."""
    strided = 0
    with Group() as group:
        for _ in range(scale(200, 1500)):
            shape, mesh, placements = random_case(rng)
            code, sharding = dump.sharding(shape, mesh, placements)
            items, shapes, boxes = dump.all_ranks(sharding, math.prod(mesh))
            starts = np.cumsum([0, *map(math.prod, shapes)])
            full = torch.arange(math.prod(shape)).reshape(shape)
            for i in rng.sample(range(len(shapes)), min(2, len(shapes))):
                coordinate = oracle.coordinates(mesh)[i]
                real, theirs = group.mesh(mesh, coordinate), in_torch(placements)
                local = distributed(full, real, theirs)
                where = f"{oracle.words(placements)} {shape} on {mesh} at {coordinate}"
                assert tuple(local.shape) == shapes[i], where
                assert np.array_equal(local.reshape(-1).numpy(), items[starts[i]:starts[i + 1]]), where
                said = compute_local_shape_and_global_offset(shape, real, theirs)
                assert said == compute_local_shape_and_global_offset(shape, group.standing_at(mesh, coordinate),
                                                                     theirs), where
                assert said == _compute_local_shape_and_global_offset(shape, mesh, coordinate, theirs), where
                strided += boxes[i] > 1
    assert strided > 10


def test_a_rank_outside_the_mesh(dump, lib):
    """torch says one empty dimension and no offset; here the rank is absent."""
    with Group():
        outside = DeviceMesh("cpu", torch.tensor([[4, 5], [6, 7]]), _init_backend=False)
        assert compute_local_shape_and_global_offset((6, 4), outside, [Shard(0), Shard(1)]) == ((0,), ())
        assert tuple(distribute_tensor(torch.ones(6, 4), outside, [Shard(0), Shard(1)],
                                       src_data_rank=None).to_local().shape) == (0,)
    mesh = tl.OwnedMesh(lib, "dp=2,tp=2", [4, 5, 6, 7])
    assert tl.OwnedSharding(lib, (6, 4), mesh, "S(0),S(1)").shard(0).absent


def test_the_offset_of_an_empty_strided_shard():
    """One function of torch says -1, the other the end of the dimension."""
    assert _StridedShard(0, split_factor=3).local_shard_size_and_offset(3, 2, 1) == (0, -1)
    assert _compute_local_shape_and_global_offset((3,), (2,), [1], [_StridedShard(0, split_factor=3)]) == ((0,), (3,))


def test_torch_lists_every_index(lib):
    """It has an integer for every row that a rank holds."""
    with pytest.raises(RuntimeError, match="overflow"):
        _compute_local_shape_and_global_offset((1 << 61,), (2,), [1], [Shard(0)])
    shard = tl.OwnedSharding(lib, (1 << 61,), tl.OwnedMesh(lib, "tp=2"), "S(0)", item_bytes=1).shard(1)
    assert tl.shard_boxes(lib, shard) == [((1 << 60,), (1 << 60,), 0, (1,))]


def fully_sharded(n, dp, tp):
    """What each rank really holds of n rows after fully_shard over tensor parallelism, and the placements that it
    claims."""
    held, claimed = {}, None
    for rank, coordinate in enumerate(itertools.product(range(dp), range(tp))):
        with Group(rank, dp * tp):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            module = torch.nn.Module()
            rows = torch.arange(float(n)).reshape(n, 1)
            module.weight = torch.nn.Parameter(distribute_tensor(rows, mesh["tp"], [Shard(0)], src_data_rank=None))
            fully_shard(module, mesh=mesh["dp"])
            held[coordinate] = tuple(map(int, module.weight.to_local().reshape(-1).tolist()))
            claimed = module.weight.placements
    return held, claimed


def ours(dump, shape, mesh, placements):
    """{coordinate: item numbers}"""
    code, sharding = dump.sharding(shape, mesh, placements)
    assert code == 0
    items, shapes, _ = dump.all_ranks(sharding, math.prod(mesh))
    ends = np.cumsum([math.prod(s) for s in shapes])
    return {c: tuple(part.tolist()) for c, part in zip(oracle.coordinates(mesh), np.split(items, ends[:-1]))}


def test_fully_shard_over_tensor_parallel(dump, scale):
    """Its placements tell the truth where tp divides the rows. Else S(0),S(0) on (tp, dp) does: the order it cut in."""
    wrong = 0
    for n, dp, tp in itertools.product(scale(range(5, 10), range(1, 14)), (2, 3), (2, 3)):
        held, claimed = fully_sharded(n, dp, tp)
        assert claimed == (_StridedShard(0, split_factor=tp), Shard(0))
        said = ours(dump, (n, 1), (dp, tp), (("SS", 0, tp), ("S", 0)))
        assert said == held or n % tp, (n, dp, tp)
        assert ours(dump, (n, 1), (tp, dp), (("S", 0), ("S", 0))) == {(t, d): h for (d, t), h in held.items()}
        wrong += said != held
    assert wrong


# ---- docs/torch.md ----

def rows_of(heading):
    """The cells of the table under a heading."""
    text = (ROOT / "docs/torch.md").read_text()
    section = re.split(r"^## ", text, flags=re.M)
    table = next(s for s in section if s.startswith(heading + "\n"))
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip()[1:-1].split("|")] for line in lines[1:]
            if not line.startswith("| ---")]


def tuples(text):
    return tuple(ast.literal_eval(f"[{text}]"))


def placements_of(lib, text):
    found = ctypes.POINTER(tl.Placements)()
    assert lib.tensor_placements_parse(text.encode(), ctypes.byref(found), None) == 0
    kinds = [("R", "S", "SS")[p.kind] for p in found.contents.at[:found.contents.n]]
    result = tuple({"R": ("R",), "S": ("S", p.dim)}.get(k, (k, p.dim, p.split))
                   for k, p in zip(kinds, found.contents.at))
    lib.free(found)
    return result


def test_table_of_several_boxes(dump, lib):
    rows = rows_of("One offset for several boxes")
    assert len(rows) >= 4
    for words, shape, mesh, coordinate, said_shape, said_offset, items in rows:
        shape, mesh, coordinate, placements = tuples(shape), tuples(mesh), tuples(coordinate), placements_of(lib, words)
        said = _compute_local_shape_and_global_offset(shape, mesh, coordinate, in_torch(placements))
        assert said == (tuples(said_shape), tuples(said_offset)), words
        with Group() as group:
            full = torch.arange(math.prod(shape)).reshape(shape)
            data = distributed(full, group.mesh(mesh, coordinate), in_torch(placements))
        assert tuple(data.reshape(-1).tolist()) == ours(dump, shape, mesh, placements)[coordinate] == tuples(items), (
            words)
        assert tuple(box_of(shape, said[1], said[0]).tolist()) != tuples(items), words


def test_table_of_fully_shard(dump, lib):
    rows = rows_of("fully_shard over tensor parallelism, uneven")
    assert len(rows) >= 3
    for n, mesh, coordinate, claim, truth in rows:
        (dp, tp), n, coordinate = tuples(mesh), int(n), tuples(coordinate)
        held, claimed = fully_sharded(n, dp, tp)
        with Group() as group:
            said = distributed(torch.arange(n).reshape(n, 1), group.mesh((dp, tp), coordinate), claimed)
        assert tuple(said.reshape(-1).tolist()) == tuples(claim) == ours(dump, (n, 1), (dp, tp),
                                                                         (("SS", 0, tp), ("S", 0)))[coordinate]
        assert held[coordinate] == tuples(truth) == ours(dump, (n, 1), (tp, dp), (("S", 0), ("S", 0)))[coordinate[::-1]]
        assert held[coordinate] != tuples(claim)
