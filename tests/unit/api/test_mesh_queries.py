# SPDX-License-Identifier: Apache-2.0
"""What programs ask of a mesh, in C and in Python, against numpy: `ranks.reshape(sizes)` and its indexing. Torch's
answers are in tests/torch/test_mesh_torch.py; every small mesh is in tests/property/test_mesh.py, one layer below."""
import ctypes as c
import itertools

import numpy as np
import pytest

import vckpt
from saverlib import Failed, api  # noqa: F401 (a fixture)

ENOENT = -2
MESHES = [((4,), None), ((2, 4), None), ((3, 1, 2), None), ((2, 2, 2), [7, 3, 5, 1, 30, 9, 8, 2]),
          ((2, 3), [12, 11, 10, 9, 8, 7])]
NAMES = ("pp", "dp", "tp")


def u32s(n):
    return (c.c_uint32 * n)()


class Native:
    """A vckpt_mesh, asked as a C program does."""

    def __init__(self, api, words=None, ranks=None, pointer=None):  # noqa: F811
        self.api, self.lib = api, api.lib
        self.p = pointer or api.mesh(words, ranks)
        self.lib.vckpt_mesh_dim.restype = c.c_char_p

    def ask(self, name, *arguments, n=1):
        out = u32s(n)
        r = self.api.call(f"vckpt_mesh_{name}", self.p, *arguments, out)
        return r, list(out)

    def sizes(self):
        names = [self.lib.vckpt_mesh_dim(self.p, d).decode() for d in range(self.lib.vckpt_mesh_ndim(self.p))]
        return {name: self.ask("size", name.encode())[1][0] for name in names}

    def sub(self, dims, rank):
        pointer = c.c_void_p()
        self.api.call("vckpt_mesh_sub", self.p, dims, rank, c.byref(pointer))
        return Native(self.api, pointer=pointer)

    def free(self):
        self.lib.vckpt_mesh_free(self.p)


@pytest.mark.parametrize("sizes, ranks", MESHES)
def test_both_against_numpy(api, sizes, ranks):  # noqa: F811
    names, array = NAMES[-len(sizes):], np.array(ranks or range(int(np.prod(sizes)))).reshape(sizes)
    words = ",".join(f"{name}={size}" for name, size in zip(names, sizes))
    mesh, own = Native(api, words, ranks), vckpt.Mesh.from_words(words, ranks)
    assert mesh.sizes() == dict(zip(names, sizes)) and own.mesh_dim_names == names and own.shape == sizes
    assert mesh.ask("size", None)[1] == [array.size] == [own.size()]
    assert api.lib.vckpt_mesh_dim(mesh.p, len(sizes)) is None
    for at, rank in np.ndenumerate(array):
        assert mesh.ask("coordinate", int(rank), n=len(sizes)) == (0, list(at)) and own.coordinate(rank) == at
        assert mesh.ask("rank", (c.c_uint32 * len(at))(*at)) == (0, [rank]) and own.rank(at) == rank
        for n in range(1, len(sizes) + 1):
            for dims in itertools.combinations(range(len(sizes)), n):
                check_group(mesh, own, array, at, dims, [names[d] for d in dims])
        for d, name in enumerate(names):
            for distance in (-sizes[d], -1, 0, 1, 2, 2**62, -2**63):
                check_neighbour(mesh, own, array, at, d, name, distance)
    mesh.free()


def check_group(mesh, own, array, at, dims, names):
    want = array[tuple(slice(None) if d in dims else i for d, i in enumerate(at))]
    rank, words = int(array[at]), ",".join(reversed(names))             # in any order
    assert mesh.ask("size", words.encode())[1] == [want.size] == [own.size(words)] == [own.size(dims)]
    assert mesh.ask("group", words.encode(), rank, n=want.size) == (0, want.ravel().tolist())
    assert own.group(words, rank) == own.group(list(dims), rank) == tuple(want.ravel())
    sub, part = mesh.sub(words.encode(), rank), own.sub(names, rank)
    assert sub.sizes() == dict(zip(names, want.shape)) and part.mesh_dim_names == tuple(names)
    assert sub.ask("group", words.encode(), rank, n=want.size)[1] == want.ravel().tolist()
    assert np.array_equal(np.array(part.mesh), want)
    sub.free()


def check_neighbour(mesh, own, array, at, d, name, distance):
    rank, to = int(array[at]), at[d] + distance
    ring = int(np.take(array, to % array.shape[d], d)[tuple(i for k, i in enumerate(at) if k != d)])
    inside = 0 <= to < array.shape[d]
    for wrap in (0, 1):
        r, [found] = mesh.ask("neighbour", name.encode(), rank, c.c_int64(distance), wrap)
        assert r == (inside or wrap) and (not r or found == ring)
        assert own.neighbour(name, rank, distance, wrap=bool(wrap)) == (ring if r else None)


def test_a_rank_outside(api):  # noqa: F811
    mesh, own = Native(api, "dp=2,tp=2", [4, 5, 6, 7]), vckpt.Mesh.from_words("dp=2,tp=2", [4, 5, 6, 7])
    questions = {"coordinate": (), "group": (b"tp",), "sub": (b"tp",), "neighbour": (b"tp",)}
    for name, before in questions.items():
        after = (c.c_int64(1), 1) if name == "neighbour" else ()
        for rank in (0, 3, 8, 2**32 - 1):
            with pytest.raises(Failed, match=f"mesh: rank {rank} is not in the mesh") as failed:
                mesh.ask(name, *before, rank, *after, n=4)
            assert failed.value.code == ENOENT
            with pytest.raises(vckpt.NotFound, match=f"rank {rank} is not in the mesh"):
                getattr(own, name)(*(word.decode() for word in before), rank)
    mesh.free()


def test_names_that_only_torch_allows():
    """And none at all: then by number, the last ones from behind."""
    mesh = vckpt.Mesh("cuda", [[0, 1], [2, 3]], ["data parallel", "a,b"])
    assert mesh.group("a,b", 2) == mesh.group(-1, 2) == mesh.group(1, 2) == (2, 3)
    assert mesh.sub("data parallel", 1) == vckpt.Mesh("cuda", [1, 3], ["data parallel"])
    assert vckpt.Mesh("cpu", [[5, 3], [1, 0]]).sub(0, 3) == vckpt.Mesh("cpu", [3, 0])
    assert vckpt.Mesh("cpu", [[5, 3], [1, 0]]).rank([1, 0]) == 1


@pytest.mark.parametrize("ask, text", [
    (lambda mesh: mesh.size("pp"), "dimension 'pp' is not one of its own"),
    (lambda mesh: mesh.size(2), "dimension 2 is not one of its own"),
    (lambda mesh: mesh.size(-3), "dimension -3 is not one of its own"),
    (lambda mesh: mesh.group("tp,tp", 0), "dimension 1 is given twice"),
    (lambda mesh: mesh.group([], 0), "no such dimension"),
    (lambda mesh: mesh.neighbour(["dp", "tp"], 0), 'along one dimension, not along "d0,d1"'),
    (lambda mesh: mesh.neighbour("tp", 0, 2**64 + 1), "distance 18446744073709551617: expected a whole number"),
    (lambda mesh: mesh.neighbour("tp", 0, 1.5), "distance 1.5: expected a whole number"),
    (lambda mesh: mesh.rank([0]), "expected 2 numbers, one for each dimension"),
    (lambda mesh: mesh.rank([0, 4]), 'coordinate 4 in dimension "d1", whose size is 4'),
    (lambda mesh: mesh.rank([0, -1]), "coordinate -1: expected a whole number"),
    (lambda mesh: mesh.coordinate(2**32), "rank 4294967296: expected a whole number"),
    (lambda mesh: mesh.coordinate("0"), "rank '0': expected a whole number"),
    (lambda mesh: vckpt.Mesh.from_words("dp"), "expected names and sizes such as"),
    (lambda mesh: vckpt.Mesh.from_words("dp=2", [1]), "sizes multiply to 2, but 1 rank is given"),
])
def test_what_python_refuses(ask, text):
    with pytest.raises(vckpt.InvalidArgument) as failed:
        ask(vckpt.Mesh.from_words("dp=2,tp=4"))
    assert text in str(failed.value)
