# SPDX-License-Identifier: Apache-2.0
"""core/tensor's meshes against numpy: `ranks.reshape(sizes)` and its indexing, for every mesh of up to 4 dimensions and
64 ranks, in several rank orders; then bad input, each kind with the words that its sentence must hold, and large
meshes."""
import ctypes
import errno
import itertools
import math
import random
import re
import time

import numpy
import pytest

import tensorlib
from tensorlib import Buf, Error, Failed, Hosts, Mesh, OwnedMesh

NAMES = ("pp", "dp", "cp", "tp")
SEED = 20260
U32, I64, P = ctypes.c_uint32, ctypes.c_int64, ctypes.c_void_p
NONE = 0xFFFFFFFF


@pytest.fixture(scope="module")
def mesh(lib):
    """The library, with the types of its mesh functions; addresses are plain numbers."""
    tensorlib.load(lib)
    for name, types in {"coordinate": [P, U32, P], "rank": [P, P, P], "rank_at": [P, U32], "group_size": [P, U32],
                        "group": [P, U32, U32, P], "group_position": [P, U32, U32], "sub": [P, U32, U32, P, P],
                        "neighbour": [P, U32, U32, I64, ctypes.c_bool, P],
                        "print": [P, P], "dim": [P, ctypes.c_char_p], "dims": [P, ctypes.c_char_p, P, P]}.items():
        getattr(lib, f"tensor_mesh_{name}").argtypes = types
    lib.tensor_hosts_find.argtypes = [P, U32, P, P]
    return lib


def address(m):
    return ctypes.addressof(m.c)


def made(lib, function, *args):
    """A mesh that a function makes, or Failed."""
    pointer, err = ctypes.POINTER(Mesh)(), Error()
    tensorlib.check(function(*args, ctypes.byref(pointer), ctypes.byref(err)), err)
    return OwnedMesh.adopt(lib, pointer)


def printed(lib, m):
    b = Buf()
    lib.tensor_mesh_print(address(m), ctypes.byref(b))
    assert b.error == 0
    text = ctypes.string_at(b.data, b.len).decode()
    lib.base_buf_release(ctypes.byref(b))
    return text


class Out:
    """Room for what the library writes: a numpy array of u32 and its address."""

    def __init__(self, *shape):
        self.array = numpy.full(shape, NONE, numpy.uint32)
        self.at = self.array.ctypes.data


# ---- every small mesh --------------------------------------------------------------------------------------------

def shapes(ndim, most):
    if ndim == 0:
        yield ()
        return
    for n in range(1, most + 1):
        for rest in shapes(ndim - 1, most // n):
            yield (n, *rest)


# How many there are, counted otherwise: tuples of d sizes >= 1 whose product is n, by dividing n again and again.
def ways(d, n):
    return 1 if d == 1 else sum(ways(d - 1, n // k) for k in range(1, n + 1) if n % k == 0)


MESHES = sum(ways(d, n) for d in range(1, 5) for n in range(1, 65))
ALL = [s for ndim in range(1, 5) for s in shapes(ndim, 64)]


def orders(n, rng):
    """None: 0 .. n-1; the same shuffled; a subset of more ranks, shuffled; neighbours that do not start at 0."""
    return {"plain": None, "permuted": rng.sample(range(n), n), "subset": rng.sample(range(3 * n + 5), n),
            "shifted": list(range(7, 7 + n))}


def subsets(ndim):
    return [dims for k in range(ndim + 1) for dims in itertools.combinations(range(ndim), k)]


def mask(dims):
    return sum(1 << d for d in dims)


def coordinates_of(shape):
    """By position, one after another in memory."""
    return numpy.array(list(numpy.ndindex(shape)), numpy.uint32)


def check_ranks(lib, m, a):
    """Coordinate of every rank, rank of every coordinate, and what is not in the mesh."""
    at, flat, shape = address(m), a.ravel().tolist(), a.shape
    where, out = coordinates_of(shape), Out(a.size, a.ndim)
    assert not any([lib.tensor_mesh_coordinate(at, rank, out.at + 4 * a.ndim * i) for i, rank in enumerate(flat)])
    assert numpy.array_equal(out.array, where)
    ranks, coordinates = Out(a.size), where.ctypes.data
    assert not any([lib.tensor_mesh_rank(at, coordinates + 4 * a.ndim * i, ranks.at + 4 * i) for i in range(a.size)])
    assert ranks.array.tolist() == flat == [lib.tensor_mesh_rank_at(at, i) for i in range(a.size)]
    assert lib.tensor_mesh_rank_at(at, a.size) == lib.tensor_mesh_rank_at(at, NONE) == NONE
    for d in range(a.ndim):
        beyond = where[0].copy()
        for beyond[d] in (shape[d], NONE):
            assert lib.tensor_mesh_rank(at, beyond.ctypes.data, ranks.at) == -errno.ERANGE
    for rank in {*range(max(flat) + 2), NONE} - set(flat):
        assert lib.tensor_mesh_coordinate(at, rank, out.at) == -errno.ENOENT
        assert lib.tensor_mesh_group(at, rank, 1,
                                     out.at) == lib.tensor_mesh_group_position(at, rank, 1) == -errno.ENOENT
        assert lib.tensor_mesh_neighbour(at, rank, 0, 1, True, out.at) == -errno.ENOENT


def check_groups(lib, m, a):
    """The group of every rank along every set of dimensions, and its place in it."""
    at, flat = address(m), a.ravel().tolist()
    for dims in subsets(a.ndim):
        bits, size = mask(dims), math.prod(a.shape[d] for d in dims)
        assert lib.tensor_mesh_group_size(at, bits) == size
        out = Out(a.size, size)
        assert not any([lib.tensor_mesh_group(at, rank, bits, out.at + 4 * size * i) for i, rank in enumerate(flat)])
        place = [lib.tensor_mesh_group_position(at, rank, bits) for rank in flat]
        turn = [d for d in range(a.ndim) if d not in dims] + list(dims)
        want = a.transpose(turn).reshape(-1, size)                                     # one row a group
        have = out.array.reshape(*a.shape, size).transpose(*turn, a.ndim).reshape(-1, size, size)
        assert (have == want[:, None, :]).all(), (a.shape, dims)
        places = numpy.array(place).reshape(a.shape).transpose(turn).reshape(-1, size)
        assert (places == numpy.arange(size)).all(), (a.shape, dims)


def check_subs(lib, m, a, names, rng, every):
    """The sub-mesh of every group (else of one along each set of dimensions), by plain indexing."""
    at = address(m)
    for dims in subsets(a.ndim)[1:]:
        others = [range(1) if d in dims else range(n) if every else [rng.randrange(n)] for d, n in enumerate(a.shape)]
        for c in itertools.product(*others):
            want = a[tuple(slice(None) if d in dims else c[d] for d in range(a.ndim))]
            sub = made(lib, lib.tensor_mesh_sub, at, int(want.flat[-1]), mask(dims))
            assert sub.dims == [(names[d], a.shape[d]) for d in dims]
            assert sub.ranks == want.ravel().tolist()


def check_neighbours(lib, m, a, steps):
    """Every rank's at each of the steps along each dimension; all steps of one dimension in one comparison."""
    at, flat, call = address(m), a.ravel().tolist(), lib.tensor_mesh_neighbour
    for d, wrap in itertools.product(range(a.ndim), (True, False)):
        out = Out(len(steps), a.size)
        codes = [call(at, rank, d, k, wrap, to)
                 for k, row in zip(steps, range(out.at, out.at + out.array.nbytes, 4 * a.size))
                 for rank, to in zip(flat, range(row, row + 4 * a.size, 4))]
        to = numpy.add.outer(steps, numpy.arange(a.shape[d]))                          # a row for each step
        want = numpy.moveaxis(a.take(to % a.shape[d], axis=d), d, 0)                   # that row first, then as a
        if not wrap:
            outside = (to < 0) | (to >= a.shape[d])
            want = want.copy()
            numpy.moveaxis(want, d + 1, 1)[outside] = NONE
        assert out.array.tolist() == want.reshape(len(steps), a.size).tolist(), (a.shape, d, wrap)
        assert codes == [-errno.ERANGE if w == NONE else 0 for w in want.ravel().tolist()], (a.shape, d, wrap)


def check_text(lib, m, a, names, ranks):
    text = printed(lib, m)
    assert text == ",".join(f"{n}={s}" for n, s in zip(names, a.shape))
    again = OwnedMesh(lib, text, ranks)
    assert again.dims == m.dims and again.ranks == m.ranks and bool(again.c.ranks) == bool(m.c.ranks)
    assert [lib.tensor_mesh_dim(address(m), n.encode()) for n in names] == list(range(a.ndim))
    assert lib.tensor_mesh_dim(address(m), b"ep") == lib.tensor_mesh_dim(address(m), b"") == -errno.ENOENT


@pytest.mark.parametrize("order", ["plain", "permuted", "subset", "shifted"])
def test_every_small_mesh(mesh, scale, order):
    rng = random.Random(SEED)
    assert len(ALL) == len(set(ALL)) == MESHES
    take = ALL if scale(False, True) else rng.sample(ALL, len(ALL) // 30) + [(64,), (1, 1, 1, 1), (2, 4, 2, 4),
                                                                             (4, 1, 2)]
    if order == "shifted":          # "subset" does not start at 0 either; here the ranks ascend, and need no sorting
        take = take[::3]
    for shape in take:
        ranks = orders(math.prod(shape), rng)[order]
        names = NAMES[:len(shape)]
        m = OwnedMesh(mesh, list(zip(names, shape)), ranks)
        plain = list(range(math.prod(shape)))
        a = numpy.array(plain if ranks is None else ranks, numpy.uint32).reshape(shape)
        assert m.dims == list(zip(names, shape)) and m.ranks == a.ravel().tolist() and m.c.count == a.size
        assert bool(m.c.ranks) == bool(m.c.order) == (m.ranks != plain)
        check_ranks(mesh, m, a)
        check_groups(mesh, m, a)
        if order == "permuted":                         # further steps for some meshes, one for each
            check_neighbours(mesh, m, a, range(-3, 4) if rng.random() < .25 else [-1, 1])
        else:
            check_neighbours(mesh, m, a, [rng.randrange(-3, 4)])
        check_subs(mesh, m, a, names, rng, order == "subset")
        check_text(mesh, m, a, names, ranks)


@pytest.mark.parametrize("shape", [(2,) * 16, (1,) * 15 + (3,), (3, 1, 2, 2, 1, 5, 2), (2, 3) * 5])
def test_many_dimensions(mesh, shape):
    rng = random.Random(SEED)
    names, n = [f"d{d}" for d in range(len(shape))], math.prod(shape)
    ranks = rng.sample(range(2 * n), n)
    m, a = OwnedMesh(mesh, list(zip(names, shape)), ranks), numpy.array(ranks, numpy.uint32).reshape(shape)
    for _ in range(60):
        c = tuple(rng.randrange(s) for s in shape)
        dims = sorted(rng.sample(range(len(shape)), rng.randrange(len(shape) + 1)))
        want = a[tuple(slice(None) if d in dims else c[d] for d in range(a.ndim))]
        out = Out(max(a.ndim, want.size))
        assert mesh.tensor_mesh_coordinate(address(m), int(a[c]), out.at) == 0 and tuple(out.array[:a.ndim]) == c
        assert mesh.tensor_mesh_group(address(m), int(a[c]), mask(dims), out.at) == 0
        assert out.array[:want.size].tolist() == want.ravel().tolist()
        place = mesh.tensor_mesh_group_position(address(m), int(a[c]), mask(dims))
        assert want.ravel()[place] == a[c] and mesh.tensor_mesh_group_size(address(m), mask(dims)) == want.size


# ---- worked examples ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dims,rank,along,want", [
    ("dp=2,tp=2", 0, "dp", [0, 2]), ("dp=2,tp=2", 0, "tp", [0, 1]), ("dp=2,tp=2", 2, "tp", [2, 3]),
    ("pp=2,dp=2,tp=2", 7, "dp", [5, 7]), ("pp=2,dp=2,tp=2", 7, "tp", [6, 7]),
    ("pp=2,dp=2,tp=2", 6, "pp", [2, 6]), ("pp=2,dp=2,tp=2", 6, "dp", [4, 6]),
    ("pp=2,dp=2,tp=2", 6, "pp,dp", [0, 2, 4, 6]),
    ("pp=2,dp=1,tp=4", 4, "tp", [4, 5, 6, 7]), ("pp=2,dp=1,tp=4", 4, "dp", [4]), ("pp=2,dp=1,tp=4", 4, "pp", [0, 4]),
    ("dp=4,tp=2", 4, "tp", [4, 5]), ("dp=4,tp=2", 4, "dp", [0, 2, 4, 6]), ("pp=4,dp=1,tp=2", 7, "dp,tp", [6, 7])])
def test_worked_examples(mesh, dims, rank, along, want):
    """The shapes on which other mesh libraries name the wrong group."""
    m = OwnedMesh(mesh, dims)
    bits = mask(mesh.tensor_mesh_dim(address(m), n.encode()) for n in along.split(","))
    assert made(mesh, mesh.tensor_mesh_sub, address(m), rank, bits).ranks == want


def test_hosts(mesh):
    host, device = Out(1), Out(1)

    def find(h, rank):
        r = mesh.tensor_hosts_find(ctypes.byref(h), rank, host.at, device.at)
        return r if r < 0 else (int(host.array[0]), int(device.array[0]))

    for devices in (1, 3, 4, 8, NONE):
        h = Hosts(devices, None, None, 0)
        for rank in (*range(64), (1 << 24) - 1, NONE):
            assert find(h, rank) == divmod(rank, devices)
    assert find(Hosts(0, None, None, 0), 0) == -errno.EINVAL
    hosts, devices = (U32 * 5)(2, 2, 0, 1, 9), (U32 * 5)(1, 0, 7, 3, 2)
    table = Hosts(8, hosts, devices, 5)
    assert [find(table, rank) for rank in range(5)] == [(2, 1), (2, 0), (0, 7), (1, 3), (9, 2)]
    assert find(table, 5) == find(table, NONE) == -errno.ENOENT
    assert find(Hosts(8, hosts, devices, 0), 0) == -errno.ENOENT
    assert find(Hosts(8, hosts, None, 5), 0) == find(Hosts(8, None, devices, 5), 0) == -errno.EINVAL


# ---- bad input ---------------------------------------------------------------------------------------------------

INVALID, LIMIT = -errno.EINVAL, -errno.E2BIG


@pytest.mark.parametrize("dims,ranks,code,sentence", [
    ([], None, INVALID, "mesh: no dimension is given"),
    ([("a", 1)] * 17, None, LIMIT, "mesh: more than 16 dimensions"),
    ([("dp", 2), ("tp", 2), ("dp", 2)], None, INVALID, 'mesh: dimension "dp" is given twice'),
    ([("dp", 2), ("tp", 0)], None, INVALID, 'mesh: dimension "tp" has size 0'),
    ([("dp", 4096), ("tp", 4097)], None, LIMIT, "mesh: the sizes multiply to more than 16777216 ranks"),
    ([(f"d{d}", NONE) for d in range(16)], None, LIMIT, "mesh: the sizes multiply to more than 16777216 ranks"),
    ([(f"d{d}", 1 << 16) for d in range(4)], None, LIMIT, "mesh: the sizes multiply to more than 16777216 ranks"),
    ([("dp", 2), ("tp", 4)], [0, 1, 2, 3, 4, 5], INVALID, "mesh: the sizes multiply to 8, but 6 ranks are given"),
    ([("dp", 2)], [], INVALID, "mesh: the sizes multiply to 2, but 0 ranks are given"),
    ([("dp", 2)], [0, 1, 2], INVALID, "mesh: the sizes multiply to 2, but 3 ranks are given"),
    ([("dp", 2), ("tp", 2)], [5, 0, 9, 5], INVALID, "mesh: rank 5 is given twice"),
    ([("dp", 2)], [0, 0], INVALID, "mesh: rank 0 is given twice"),
    ([("dp", 4)], [1, 2, 2, 3], INVALID, "mesh: rank 2 is given twice"),
    ([("dp", 2)], [0, 1 << 24], LIMIT, "mesh: rank 16777216 is beyond 16777215"),
    ([("dp", 2)], [NONE, 0], LIMIT, "mesh: rank 4294967295 is beyond 16777215"),
    ([("", 2)], None, INVALID, 'mesh: "" is not a name of a dimension'),
    ([("2d", 2)], None, INVALID, 'mesh: "2d" is not a name of a dimension'),
    ([("-d", 2)], None, INVALID, 'mesh: "-d" is not a name of a dimension'),
    ([("d-p", 2)], None, INVALID, 'mesh: "d-p" is not a name of a dimension'),
    ([("d p", 2)], None, INVALID, 'mesh: "d p" is not a name of a dimension'),
    ([("d\n\u00e9", 2)], None, INVALID, 'mesh: "d???" is not a name of a dimension'),
    ([("d" * 65, 2)], None, INVALID, 'mesh: the name "' + "d" * 65 + '" is longer than 64 bytes'),
    ([("d" * 5000, 2)], None, INVALID, 'mesh: the name "' + "d" * 76 + '..." is longer than 64 bytes'),
    ("", None, INVALID, "mesh: no dimension is given"),
    (" \t", None, INVALID, "mesh: no dimension is given"),
    ("dp=2,", None, INVALID, 'mesh: word 2 of "dp=2," is empty'),
    (",", None, INVALID, 'mesh: word 1 of "," is empty'),
    ("dp=2,,tp=2", None, INVALID, 'mesh: word 2 of "dp=2,,tp=2" is empty'),
    ("dp", None, INVALID, 'mesh: "dp" is not NAME=SIZE'),
    ("tp=2, dp= ", None, INVALID, 'mesh: "dp=" is not NAME=SIZE'),
    ("=2", None, INVALID, 'mesh: "=2" is not NAME=SIZE'),
    ("dp=2=2", None, INVALID, 'mesh: "dp=2=2" is not NAME=SIZE'),
    ("dp=+2", None, INVALID, 'mesh: "dp=+2" is not NAME=SIZE'),
    ("dp=-2", None, INVALID, 'mesh: "dp=-2" is not NAME=SIZE'),
    ("dp=0x2", None, INVALID, 'mesh: "dp=0x2" is not NAME=SIZE'),
    ("dp=2 2", None, INVALID, 'mesh: "dp=2 2" is not NAME=SIZE'),
    ("dp=2;tp=2", None, INVALID, 'mesh: "dp=2;tp=2" is not NAME=SIZE'),
    ("dp=0", None, INVALID, 'mesh: dimension "dp" has size 0'),
    ("dp=2,dp=3", None, INVALID, 'mesh: dimension "dp" is given twice'),
    ("d!=2", None, INVALID, 'mesh: "d!" is not a name of a dimension'),
    ("x" * 65 + "=2", None, INVALID, "is longer than 64 bytes"),
    ("dp=16777217", None, LIMIT, 'mesh: "dp=16777217" is more than 16777216 ranks'),
    ("dp=4294967298", None, LIMIT, 'mesh: "dp=4294967298" is more than 16777216 ranks'),
    ("dp=18446744073709551618", None, LIMIT, 'mesh: "dp=18446744073709551618" is more than 16777216 ranks'),
    ("dp=16777216,tp=16777216", None, LIMIT, "mesh: the sizes multiply to more than 16777216 ranks"),
    (",".join(f"d{d}=1" for d in range(17)), None, LIMIT, "mesh: more than 16 dimensions"),
    ("dp=2", [3, 3], INVALID, "mesh: rank 3 is given twice"),
    ("dp=2,tp=4", [0, 1], INVALID, "mesh: the sizes multiply to 8, but 2 ranks are given"),
])
def test_bad_meshes(mesh, dims, ranks, code, sentence):
    with pytest.raises(Failed) as e:
        OwnedMesh(mesh, dims, ranks)
    assert sentence in e.value.text and e.value.code == code, e.value
    assert "\n" not in e.value.text


def test_an_error_needs_no_place_to_go(mesh):
    pointer = ctypes.POINTER(Mesh)()
    assert mesh.tensor_mesh_parse(b"dp=", None, U32(0), ctypes.byref(pointer), None) == INVALID
    assert not pointer
    mesh.tensor_mesh_free(None)


@pytest.mark.parametrize("name,args,code,sentence", [
    ("sub", (0, 0), INVALID, "mesh: no dimension is given"),
    ("sub", (0, 0b1001), INVALID, "mesh: there is no dimension 3, only 3 dimensions"),
    ("sub", (0, 1 << 31), INVALID, "mesh: there is no dimension 31"),
    ("sub", (8, 1), -errno.ENOENT, "mesh: rank 8 is not in the mesh"),
    ("sub", (NONE, 7), -errno.ENOENT, "mesh: rank 4294967295 is not in the mesh"),
])
def test_bad_questions(mesh, name, args, code, sentence):
    m = OwnedMesh(mesh, "pp=2,dp=2,tp=2")
    with pytest.raises(Failed) as e:
        made(mesh, getattr(mesh, f"tensor_mesh_{name}"), address(m), *args)
    assert sentence in e.value.text and e.value.code == code, e.value


def test_bad_numbers(mesh):
    m, out = OwnedMesh(mesh, "pp=2,dp=2,tp=2"), Out(8)
    at = address(m)
    for dims in (0b1000, 0b1111, 1 << 31, NONE):
        assert mesh.tensor_mesh_group_size(at, dims) == 0
        assert mesh.tensor_mesh_group(at, 0, dims, out.at) == mesh.tensor_mesh_group_position(at, 0, dims) == INVALID
    for dim in (3, 16, 32, NONE):
        assert mesh.tensor_mesh_neighbour(at, 0, dim, 1, True, out.at) == INVALID


@pytest.mark.parametrize("names,want", [("dp", 2), ("tp,pp", 5), (" tp , dp,pp ", 7)])
def test_dimensions_by_name(mesh, names, want):
    m, dims, err = OwnedMesh(mesh, "pp=2,dp=2,tp=2"), ctypes.c_uint32(), Error()
    assert mesh.tensor_mesh_dims(address(m), names.encode(), ctypes.byref(dims), ctypes.byref(err)) == 0
    assert dims.value == want


@pytest.mark.parametrize("names,sentence", [("", '"": there is no such'), ("dp,ep", '"ep": there is no such'),
                                            ("dp,dp", '"dp": the dimension is given twice'),
                                            ("dp,", '"": there is no such'), ("d" * 70, "there is no such")])
def test_dimensions_that_are_not_there(mesh, names, sentence):
    m, dims, err = OwnedMesh(mesh, "pp=2,dp=2,tp=2"), ctypes.c_uint32(), Error()
    assert mesh.tensor_mesh_dims(address(m), names.encode(), ctypes.byref(dims), ctypes.byref(err)) == INVALID
    assert sentence in err.text.decode()


def test_the_longest_name(mesh):
    assert OwnedMesh(mesh, "x" * 64 + "=2").dims == [("x" * 64, 2)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 24])
def test_steps_of_any_width(mesh, size):
    m, out = OwnedMesh(mesh, [("dp", size)]), Out(1)
    edge = 1 << 63
    for k in {-edge, -edge + 1, edge - 1, edge - 2, -(1 << 32), 1 << 32, -size, size, size - 1, 1 - size, 0}:
        for rank in {0, size // 2, size - 1}:
            assert mesh.tensor_mesh_neighbour(address(m), rank, 0, k, True, out.at) == 0
            assert out.array[0] == (rank + k) % size, (k, rank)
            inside = 0 <= rank + k < size
            assert mesh.tensor_mesh_neighbour(address(m), rank, 0, k, False, out.at) == (0 if inside else -errno.ERANGE)
            assert not inside or out.array[0] == rank + k


def meant(text):
    """What a text means, by a regular expression: [(name, size)], or None."""
    dims = []
    for word in text.split(","):
        found = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*([0-9]+)", word.strip(" \t"))
        if not found or len(found[1]) > 64:
            return None
        dims.append((found[1], int(found[2])))
    product = math.prod(n for _, n in dims)
    good = len(dims) <= 16 and len({n for n, _ in dims}) == len(dims) and 0 < product <= 1 << 24
    return dims if good else None


def test_texts(mesh, scale):
    rng, good = random.Random(SEED), 0
    bits = ["dp", "tp", "pp", "a-b", "_x", "=", "=", "2", "3", "0", "16777216", "99999999999999999999", ",", ",", " ",
            "\t", "+", "-", "é",
            "\n", "dp=2", "tp = 4", ",ep=8", "cp=1 ,"]
    for _ in range(scale(5000, 40000)):
        text = "".join(rng.choices(bits, k=rng.randrange(9)))
        want = meant(text)
        good += want is not None
        if want is None:
            with pytest.raises(Failed, match="^E.*: mesh: "):
                OwnedMesh(mesh, text)
        else:
            m = OwnedMesh(mesh, text)
            assert m.dims == want and OwnedMesh(mesh, printed(mesh, m)).dims == want, text
    assert good > 50


# ---- large meshes ------------------------------------------------------------------------------------------------

def new(lib, shape, ranks):
    """As OwnedMesh, of a numpy list of ranks; and the seconds that it took."""
    names = (ctypes.c_char_p * len(shape))(*[n.encode() for n in NAMES[:len(shape)]])
    pointer, err = ctypes.POINTER(Mesh)(), Error()
    start = time.process_time()
    r = lib.tensor_mesh_new(U32(len(shape)), names, (U32 * len(shape))(*shape), P(ranks.ctypes.data), U32(ranks.size),
                            ctypes.byref(pointer), ctypes.byref(err))
    seconds = time.process_time() - start
    tensorlib.check(r, err)
    return OwnedMesh.adopt(lib, pointer), seconds


def test_a_million_ranks(mesh):
    shape, rng = (10, 100, 10, 100), numpy.random.default_rng(SEED)
    ranks = (rng.permutation(1 << 24)[:1_000_000]).astype(numpy.uint32)
    a = ranks.reshape(shape)
    m, seconds = new(mesh, shape, ranks)
    print(f"a mesh of 1,000,000 permuted ranks: {1000 * seconds:.1f} ms")
    assert seconds < 2
    order = numpy.ctypeslib.as_array(m.c.order, (ranks.size,))
    assert numpy.array_equal(ranks[order], numpy.sort(ranks))
    out, start = Out(20_000, 4), time.process_time()
    asked = rng.choice(ranks, 20_000, replace=False)
    assert not any([mesh.tensor_mesh_coordinate(address(m), rank, out.at + 16 * i)
                    for i, rank in enumerate(asked.tolist())])
    assert time.process_time() - start < 2
    assert numpy.array_equal(a[tuple(out.array.T)], asked)
    group = Out(ranks.size)
    assert mesh.tensor_mesh_group(address(m), int(ranks[77]), 0b1111, group.at) == 0
    assert numpy.array_equal(group.array, ranks)
    assert mesh.tensor_mesh_group(address(m), int(a[3, 4, 5, 6]), 0b1010, group.at) == 0
    assert numpy.array_equal(group.array[:10_000], a[3, :, 5, :].ravel())
    twice = ranks.copy()
    twice[123_456] = twice[987_654]
    with pytest.raises(Failed, match=f"mesh: rank {twice[987_654]} is given twice"):
        new(mesh, shape, twice)


def test_usual_order_stores_nothing(mesh):
    m, seconds = new(mesh, (1 << 12, 1 << 12), numpy.arange(1 << 24, dtype=numpy.uint32))
    assert not m.c.ranks and not m.c.order and seconds < 2
    out = Out(2)
    assert mesh.tensor_mesh_coordinate(address(m), (1 << 24) - 1, out.at) == 0 and out.array.tolist() == [4095, 4095]
    assert OwnedMesh(mesh, "dp=16777216").c.count == 1 << 24
