# SPDX-License-Identifier: Apache-2.0
"""What a rank of any mesh holds of a step, as files: every byte of them against brute force (shard_oracle.py)."""
import ctypes as C
import errno
import itertools
import json
import math
import random

import numpy as np
import pytest

import meshlib
import shard_oracle as oracle
from meshlib import Tensor
from saverlib import Vckpt
from test_tree import Error, Slices, Tree

KINDS = ("u1", "u2", "f4", "f8", "i8")
NAMES = ("dp", "tp", "pp", "ep")


class Views(Tree):
    def __init__(self, lib, path, run=b"run", step=0):
        self.store = C.c_void_p()
        err = Error()
        assert lib.store_open(str(path).encode(), 1, C.byref(self.store), C.byref(err)) == 0, err.text
        super().__init__(lib, self.store, run, step)
        lib.view_mesh_component.restype = C.c_int64

    def close(self):
        super().close()
        self.lib.store_close(self.store)

    def mesh(self, name, layouts=None):
        """A mesh, or the sentence that says why there is none."""
        m, err = C.c_void_p(), Error()
        code = self.lib.view_mesh_new(self.step, layouts, name.encode(), C.byref(m), C.byref(err))
        assert code in (0, -errno.ENOENT) and (code == 0) == (not err.text), (code, err.text)
        return err.text.decode() if code else m

    def names(self):
        b, n = (C.c_void_p * 4)(), C.c_uint32()
        assert self.lib.view_mesh_names(self.step, b, C.byref(n)) == 0
        found = C.string_at(b[0], b[1] or 0).decode().split("\0")[:-1] if b[0] else []
        self.lib.base_buf_release(b)
        assert len(found) == n.value
        return found

    def component(self, name):
        return self.lib.view_mesh_component(self.step, f"{name}.safetensors".encode())

    def file(self, mesh, rank, component=0):
        f, err = C.c_void_p(), Error()
        code = self.lib.view_mesh_open(mesh, self.t, C.c_uint32(rank), C.c_uint32(component), C.byref(f), C.byref(err))
        assert code == 0, err.text
        return f

    def bytes(self, mesh, rank, component=0):
        size = C.c_uint64()
        assert self.lib.view_mesh_size(mesh, self.step, C.c_uint32(rank), C.c_uint32(component), C.byref(size)) == 0
        f = self.file(mesh, rank, component)
        try:
            assert self.lib.view_file_size(f) == size.value
            raw = self.read(f, 0, size.value + 1)
            assert len(raw) == size.value
            return raw, f
        except BaseException:
            self.lib.view_file_close(f)
            raise

    def slices(self, f, offset, n):
        """As the mount reads."""
        scratch, e, err = C.create_string_buffer(max(1, n)), Slices(), Error()
        assert self.lib.view_file_slices(f, self.cache, C.c_uint64(offset), C.c_size_t(n), scratch, C.byref(e),
                                         C.byref(err)) == 0, err.text
        out = b"".join(C.string_at(e.iov[i].base, e.iov[i].len) for i in range(e.niov))
        self.lib.load_slices_release(C.byref(e))
        return out


@pytest.fixture
def views(lib):
    lib.load_cache_new.restype = C.c_void_p
    made = []

    def make(path, **more):
        made.append(Views(lib, path, **more))
        return made[-1]
    yield make
    for v in made:
        v.close()


def random_mesh(rng, most):
    while True:
        names = rng.sample(NAMES, rng.randint(1, 3))
        mesh = [(name, rng.choice([1, 2, 2, 3, 4])) for name in names]
        if math.prod(meshlib.sizes(mesh)) <= most:
            return mesh


def random_placements(rng, shape, mesh):
    """Some that the rules allow; strided ones as FSDP over tensor parallelism has them, or with a split of their
    own."""
    for _ in range(50):
        found = []
        for _, size in mesh:
            d = rng.randrange(max(1, len(shape)))
            even = [k for k in (1, 2, 3) if shape and shape[d] % (k * size) == 0]
            found.append(rng.choice([("R",)] + [("S", d), ("S", d), ("SS", d, rng.choice([1, 2, 3]))] * bool(shape) +
                                    [("IS", d, rng.choice(even or [1]))] * bool(even)))
        for i, p in enumerate(found):
            if p[0] == "SS" and rng.random() < .7:
                split = math.prod(n for (_, n), q in list(zip(mesh, found))[i + 1:]
                                  if q[0] in ("S", "SS") and q[1] == p[1])
                found[i] = ("SS", p[1], split)
        if shape and rng.random() < .08:
            i = rng.randrange(len(mesh))
            found[i] = ("RS", 1, (1,) * mesh[i][1])
        try:
            oracle.all_ranks(shape, meshlib.sizes(mesh), tuple(found))
            return tuple(found)
        except oracle.Refused:
            continue
    return (("R",),) * len(mesh)


def random_shape(rng):
    n = rng.randint(0, 4)
    most = [1, 5000, 120, 30, 12][n]
    return tuple(rng.choice([1, 2, 6, 12, 24, rng.randint(0, most), rng.randint(1, most)]) for _ in range(n))


def random_tensors(rng, mesh, n):
    """Of one job: each on `mesh`, or on its dimensions in another order (as a save says in which order torch cut), or
    on another mesh of the same ranks."""
    tensors, order = [], list(range(len(mesh)))
    ranks = np.arange(math.prod(meshlib.sizes(mesh))).reshape(meshlib.sizes(mesh))
    if rng.random() < .2:
        ranks = np.array(rng.sample(range(ranks.size), ranks.size)).reshape(ranks.shape)
    for i in range(n):
        shape = rng.choice([random_shape(rng), (300, 257), (24, 36, 20)]) if i else (512, 400)
        kind = np.dtype(rng.choice(KINDS))
        array = np.frombuffer(rng.randbytes(math.prod(shape) * kind.itemsize), kind).reshape(shape)
        name = f"{rng.choice(['model', 'model', 'optimizer'])}/t{i}" if i else "model/t0"
        rng.shuffle(order)
        own, its = [mesh[d] for d in order], ranks.transpose(order)
        if rng.random() < .2:
            own, its = [("all", ranks.size)], ranks
        tensors.append(Tensor(name, array, own, random_placements(rng, shape, own), ranks=its.reshape(-1).tolist()))
    return tensors


def check_mesh(v, tensors, asked, rng):
    """Every file of every rank of it, or that there is none. Returns whether there is."""
    m = v.mesh(meshlib.text(asked))
    try:
        wanted = meshlib.expected(tensors, asked)
    except oracle.Refused:
        assert isinstance(m, str) and ("/t" in m), m
        return False
    assert not isinstance(m, str), m
    try:
        for rank, component in itertools.product(range(len(wanted)), ("model", "optimizer")):
            number = v.component(component)
            if number < 0:
                continue
            raw, f = v.bytes(m, rank, number)
            try:
                meshlib.same(meshlib.parse(raw), wanted[rank], component)
                for _ in range(3):
                    at = rng.randrange(len(raw))
                    n = rng.choice([1, rng.randint(1, 5000), rng.randint(1, 1 << 20)])
                    assert v.slices(f, at, n) == raw[at:at + n]
            finally:
                v.lib.view_file_close(f)
    finally:
        v.lib.view_mesh_unref(m)
    return True


def test_any_mesh_of_any_step(build, views, tmp_path, scale):
    rng = random.Random(11)
    api = Vckpt(build)
    shown = refused = 0
    for case in range(scale(7, 150)):
        mesh = random_mesh(rng, 6)
        tensors = random_tensors(rng, mesh, rng.randint(1, 6))
        store = api.store(tmp_path / f"s{case}")
        meshlib.save(api, store, tensors, math.prod(meshlib.sizes(mesh)))
        v = views(store)
        assert v.names() == meshlib.listed(tensors)
        shown += check_mesh(v, tensors, mesh, rng)
        for asked in (random_mesh(rng, 8), random_mesh(rng, 8), [("all", math.prod(meshlib.sizes(mesh)))],
                      rng.sample(mesh, len(mesh))):
            there = check_mesh(v, tensors, asked, rng)
            shown, refused = shown + there, refused + (not there)
    assert shown > 9 and (refused or not scale(0, 1))


def test_stages_and_what_is_not_recorded(build, views, tmp_path):
    """Two stages have meshes of their own: under these each rank has both. Of a flat range nothing is recorded: the
    tensor is whole at every rank, and manifest.json says that of it. Ragged shards are left out, and named. Ranks 0 and
    1 have dp=2 as well as tp=2, so each shows what they held under the other."""
    api, rng = Vckpt(build), random.Random(3)
    array = lambda *shape: np.frombuffer(rng.randbytes(4 * math.prod(shape)), "f4").reshape(shape)
    one, two = [("tp", 2)], [("dp", 2)]
    tensors = [Tensor("model/first", array(10, 6), one, (("S", 0),)),
               Tensor("model/second", array(7, 4), one, (("S", 1),), first_rank=2),
               Tensor("model/flat", array(11, 3)), Tensor("model/ragged", array(12, 2), two, (("RS", 1, (1, 3)),)),
               Tensor("model/scalar", array(), two, (("R",),))]
    store = api.store(tmp_path / "s")
    meshlib.save(api, store, tensors, 4)
    v = views(store)
    assert v.names() == ["dp=2", "tp=2"]
    for asked in (one, two, [("tp", 3), ("dp", 1)], [("ep", 5)], [("tp", 16)]):
        assert check_mesh(v, tensors, asked, rng)
    m = v.mesh("dp=2")
    raw, f = v.bytes(m, 2**32 - 1)
    v.lib.view_file_close(f)
    v.lib.view_mesh_unref(m)
    told = json.loads(raw)
    assert told["mesh"] == [["dp", 2]] and told["ranks"] == 2
    assert told["left_out"] == [{"component": "model", "name": "ragged",
                                 "reason": "its shards have no rectangular shape (RS)"}]
    assert {t["name"]: (t["placements"], t.get("recorded", True), t.get("mesh")) for t in told["tensors"]} == {
        "first": ("S(0)", True, [["tp", 2]]), "second": ("R", True, None), "flat": ("R", False, None),
        "scalar": ("R", True, None)}


@pytest.mark.parametrize("name,words", [
    ("tp", "tp"), ("tp=0", "size 0"), ("", "no"), ("tp=2,", ""), ("tp=2,tp=2", "twice"), ("=2", "not NAME=SIZE"),
    ("tp=02", "shown only as 'tp=2'"), (" tp=2", "shown only as"), ("tp=2 ,dp=1", "shown only as 'tp=2,dp=1'"),
    ("tp=-1", ""),
    ("a=256,b=257", "65792 ranks: at most 65536"), ("tp=4294967296", ""), ("tp=99999999999999999999999", ""),
    (",".join(f"d{i}=1" for i in range(17)), "16 dimensions"), ("x" * 65 + "=1", "longer than 64"),
    ("tp=5", "tensor model/merged")])
def test_names_that_are_none(build, views, tmp_path, name, words):
    api = Vckpt(build)
    array = np.arange(48, dtype="f4").reshape(12, 4)
    store = api.store(tmp_path / "s")
    meshlib.save(api, store, [Tensor("model/merged", array, [("tp", 1)], (("IS", 0, 3),))], 1)
    v = views(store)
    said = v.mesh(name)
    assert isinstance(said, str) and said and words in said, said
    for right in ("tp=4", "tp=1", "a=256,b=256"):
        m = v.mesh(right)
        assert not isinstance(m, str), m
        v.lib.view_mesh_unref(m)


def test_names_of_ranks(build, views, tmp_path):
    api = Vckpt(build)
    store = api.store(tmp_path / "s")
    meshlib.save(api, store, [Tensor("model/t", np.arange(4, dtype="f4"), [("tp", 1)], (("S", 0),))], 1)
    v = views(store)
    m, rank, alias = v.mesh("tp=12"), C.c_uint32(), C.c_bool()
    there = {"rank-00000": (0, False), "rank-0": (0, True), "rank-00011": (11, False), "rank-11": (11, True)}
    none = ["rank-012", "rank-12", "rank-00012", "rank-", "rank", "rank-000000", "rank-0 ", "rank--1", "rank-01",
            "Rank-1", "rank-4294967296", "rank-1x", ""]
    for name, wanted in [*there.items(), *((name, False) for name in none)]:
        code = v.lib.view_mesh_rank_parse(m, name.encode(), C.byref(rank), C.byref(alias))
        assert (code == 0 and (rank.value, alias.value)) == wanted, name
        assert code in (0, -errno.ENOENT)
    v.lib.view_mesh_unref(m)


def test_a_rank_outside_of_the_mesh_has_no_bytes(build, views, tmp_path):
    """A read of what it would hold is an error; the caller's memory is never said to be filled."""
    api, array = Vckpt(build), np.arange(12, dtype="f4").reshape(3, 4)
    store = api.store(tmp_path / "s")
    meshlib.save(api, store, [Tensor("model/t", array, [("tp", 1)], (("S", 1),))], 1)
    v = views(store)
    m, o, err = v.mesh("tp=2"), C.c_void_p(), Error()
    assert v.lib.load_tensor_open(v.step, C.c_uint32(0), C.byref(o), C.byref(err)) == 0, err.text
    for rank, offset, n, code in ((1, 0, 24, 0), (1, 8, 16, 0), (1, 0, 28, -errno.EINVAL), (2, 0, 24, -errno.EINVAL),
                                  (99, 4, 8, -errno.EINVAL)):
        out = C.create_string_buffer(b"\x5a" * n, n)
        assert v.lib.view_mesh_read(m, C.c_uint32(0), C.c_uint32(rank), o, v.cache, C.c_uint64(offset), C.c_size_t(n),
                                    out, C.byref(err)) == code, (rank, offset, n)
        assert out.raw == (array[:, 2:].tobytes()[offset:offset + n] if code == 0 else b"\x5a" * n)
    v.lib.load_object_unref(o)
    v.lib.view_mesh_unref(m)
