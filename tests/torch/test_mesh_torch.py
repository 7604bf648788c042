# SPDX-License-Identifier: Apache-2.0
"""What is asked of a vckpt.Mesh, against torch's DeviceMesh at every rank of one process (a fake process group).

Compared is what is right there: coordinates, sizes, the ranks of a dimension's group and of a slice. A process group
sorts its ranks, and get_local_rank counts in it, so in a mesh whose ranks do not ascend both are not those of the mesh:
the order of a group is compared with the slice. A slice of several dimensions is compared in the mesh's own order only;
torch refuses others or, in later versions, transposes."""
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import vckpt

MESHES = [((8,), range(8)), ((2, 4), range(8)), ((2, 2, 2), [7, 3, 5, 1, 0, 6, 4, 2]), ((2, 3), [6, 5, 4, 2, 1, 0])]
NAMES = ("pp", "dp", "tp")


@pytest.mark.parametrize("shape, ranks", MESHES, ids=lambda value: "-".join(map(str, value)))
def test_each_rank_sees_the_same(shape, ranks):
    names, array = NAMES[-len(shape):], torch.tensor(list(ranks)).reshape(shape)
    own = vckpt.Mesh("cpu", array.tolist(), names)
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            check(own, DeviceMesh("cpu", array, mesh_dim_names=names), names, rank)
        finally:
            dist.destroy_process_group()


def check(own, torchs, names, rank):
    assert own == torchs and own.size() == torchs.size()
    where = torchs.get_coordinate()
    if where is None:
        with pytest.raises(vckpt.NotFound):
            own.coordinate(rank)
        return
    assert own.coordinate(rank) == tuple(where) and own.rank(where) == rank
    for name in names:
        assert own.size(name) == torchs.size(names.index(name)) == len(own.group(name, rank))
        assert sorted(own.group(name, rank)) == sorted(dist.get_process_group_ranks(torchs.get_group(name)))
        assert own.sub(name, rank) == torchs[name]
    if len(names) == 3:
        assert own.sub("dp,tp", rank) == torchs["dp", "tp"]
