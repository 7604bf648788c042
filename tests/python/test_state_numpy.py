# SPDX-License-Identifier: Apache-2.0
"""The package without torch: what a state becomes, and that nothing is ever described by what an earlier save found."""
import collections
import ctypes
import json
import pathlib
import random
import re
import subprocess
import sys

import numpy as np
import pytest

import vckpt
from vckpt import _lib, shard, state, values

ROOT = pathlib.Path(__file__).resolve().parents[2]


def described(collected):
    """What the library would be told, pointers followed."""
    out = []
    for row in state.rows_of(collected):
        tensor = _lib.Tensor.from_buffer_copy(row.tobytes())
        shape = (np.ctypeslib.as_array((ctypes.c_uint64 * tensor.ndim).from_address(tensor.shape)).tolist()
                 if tensor.ndim else [])
        strides = None
        if tensor.strides:
            strides = list((ctypes.c_int64 * tensor.local_ndim).from_address(tensor.strides))
        boxes = (list((ctypes.c_uint64 * (2 * tensor.ndim * tensor.nboxes)).from_address(tensor.boxes)) if tensor.boxes
                 else None)
        flat = list((ctypes.c_uint64 * 3).from_address(tensor.flat)) if tensor.flat else None
        out.append((tensor.component.decode(), tensor.name.decode(), shape, tensor.dtype, tensor.flags, strides, boxes,
                    flat, tensor.placements,
                    tensor.same_dims, tensor.mesh, tensor.data))
    return out


def held(row):
    """A description with the bytes that the library would read in place of addresses: what is equal is saved equal."""
    component, name, shape, dtype, flags, strides, boxes, flat, *more, mesh, data = row
    size = boxes[1::2] if boxes else shape
    item = _lib.ITEM_BYTES[dtype]
    if boxes:
        size = [sum(int(np.prod(boxes[i + 1:i + 2 * len(shape):2])) for i in range(0, len(boxes), 2 * len(shape)))]
    if flat:
        size = [flat[1] - flat[0]]
    if 0 in size:
        return str((component, name, shape, dtype, flags, boxes, flat, more, mesh))
    last = (sum((n - 1) * abs(step) for n, step in zip(size, strides)) + item if strides
            else int(np.prod(size, dtype=int)) * item)
    memory = np.frombuffer((ctypes.c_char * last).from_address(data), np.uint8)
    if strides:
        memory = np.lib.stride_tricks.as_strided(memory, (*size, item), (*strides, 1))
    return str((component, name, shape, dtype, flags, boxes, flat, more, mesh, memory.tobytes()))


# ---- the binding ----

def test_functions_and_constants_are_those_of_the_header():
    """Structs: tests/lint/test_mirrors.py."""
    header = (ROOT / "core/api/vckpt.h").read_text()
    package = "".join(path.read_text() for path in sorted((ROOT / "tools/python/vckpt").glob("*.py")))
    called = set(re.findall(r"\blib\(\)\.(vckpt_\w+)|_loaded\.(vckpt_\w+)|(?<!\n    )\"(vckpt_\w+)\"", package))
    assert {name for names in called for name in names if name} == set(_lib.FUNCTIONS)
    assert set(_lib.FUNCTIONS) <= set(re.findall(r"\b(vckpt_\w+)\(", header))
    names = re.findall(r"VCKPT_([A-Z0-9_]+)", re.search(r"enum vckpt_dtype \{(.*?)\};", header, re.S)[1])
    assert [name.lower() for name in names] == list(_lib.DTYPES[1:])
    states = re.search(r"enum vckpt_state \{(.*?)\}", header, re.S)[1]
    assert [name.lower() for name in re.findall(r"VCKPT_(\w+)", states)] == list(_lib.STATES)


def test_all_modules_are_installed():
    built = (ROOT / "tools/python/meson.build").read_text()
    assert set(re.findall(r"vckpt/(\w+\.py)", built)) == {p.name for p in (ROOT / "tools/python/vckpt").glob("*.py")}


def test_torch_is_not_imported():
    code = "import sys, vckpt; vckpt.rng_state(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True,
                   env={"PYTHONPATH": str(ROOT / "tools/python"), "PATH": "/usr/bin:/bin"})


# ---- names and documents ----

def test_names_and_documents():
    Pair = collections.namedtuple("Pair", "a b")
    a = np.arange(6.0)
    found = state.collect({"model": {"w": a, "layers": [{"b": a}, {"b": a}]}, "ema": a,
                           "mixed": {"n": 1, "pair": Pair(a, 2), "deep": {"x": {"y": a}}},
                           "plan": [1, 2]})
    assert [(c, n) for c, n, *_ in described(found)] == [("model", "w"), ("model", "layers.0.b"),
                                                         ("model", "layers.1.b"), ("ema", "ema"),
                                                         ("mixed", "deep.x.y"), ("mixed", "pair.a")]
    blobs = {name: json.loads(data) for name, rank, data in found.blobs if not rank}
    assert set(blobs) == {"model.json", "ema.json", "mixed.json", "plan.json"}
    assert blobs["model.json"]["value"]["layers"][1]["b"] == {"$tensor": "layers.1.b"}
    assert blobs["ema.json"]["value"] == {"$tensor": "ema"} and blobs["plan.json"]["value"] == [1, 2]


@pytest.mark.parametrize("bad,said", [
    ({"a": {"x": {"y": np.ones(1)}, "x.y": np.ones(1)}},
     r'state\["a"\]\["x.y"\]: is called \'x.y\', as state\["a"\]\["x"\]\["y"\] is'),
    ({"a": {"b": np.array(["s"])}}, r'state\["a"\]\["b"\]: a numpy array of dtype'),
    ({"a": {"b": np.array([None])}}, r'state\["a"\]\["b"\]: a numpy array of dtype object'),
    ({"a": {"b": np.zeros(2, dtype=[("x", "i4")])}}, r'state\["a"\]\["b"\]: a numpy array of dtype'),
    ({"a": {"b": np.zeros(2, np.longdouble)}}, r'state\["a"\]\["b"\]: a numpy array of dtype'),
    ({"a": [0, lambda: 0]}, r'state\["a"\]\[1\]: a function cannot be kept'),
    ({"a": {"b": np.ma.masked_array([1, 2], [0, 1])}}, r'state\["a"\]\["b"\]: an array of the class MaskedArray'),
    ({1: 2}, "component must be a string"), ([1], "a state is a dict of components"),
    ({"a": {"b": vckpt.Shard(np.ones(3), shape=(2, 2), flat=(0, 2))}},
     r'state\["a"\]\["b"\]: the flat range has 2 items, the tensor that was given for them has 3'),
    ({"a": {"b": vckpt.Shard(np.ones(3), shape=(2, 2), boxes=[((0, 0), (1, 2))])}}, "the boxes have 2 items"),
])
def test_refusals_name_the_path(bad, said):
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=said):
            state.collect(bad, memory=state.Memory())


@pytest.mark.parametrize("arguments", [dict(flat=(0, 1), boxes=[]), dict(boxes=[((0,), (1,))], placements="R"),
                                       dict(alone=True, mesh="dp=2"),
                                       dict(flat=(0, 1)), dict(shape=(3,), flat=(1,)),
                                       dict(shape=(3,), boxes=[((0, 0), (1, 1))])])
def test_shards_that_contradict_themselves(arguments):
    with pytest.raises(ValueError):
        vckpt.Shard(np.ones(1), **arguments)


def test_what_numpy_arrays_become():
    base = np.arange(24, dtype="i4").reshape(4, 6)
    found = state.collect({"c": {"t": base.T, "cut": base[1:3, ::2], "back": base[::-1],
                                 "wide": np.broadcast_to(np.ones(3), (2, 3)),
                                 "big": base.astype(">i4"), "scalar": np.array(1.5), "none": np.zeros((0, 3))}})
    rows = {name: row for _, name, *row in described(found)}
    assert rows["t"][3] == [4, 24] and rows["cut"][3] == [24, 8] and rows["cut"][-1] == base[1:].ctypes.data
    assert rows["back"][3] is None and rows["wide"][3] is None and rows["big"][3] is None       # copies, contiguous
    assert rows["scalar"][0] == [] and rows["none"][0] == [0, 3]
    held = (ctypes.c_int32 * 6).from_address(rows["back"][-1])
    assert list(held) == base[3].tolist()
    assert np.frombuffer((ctypes.c_char * 96).from_address(rows["big"][-1]),
                         "<i4").tolist() == base.reshape(-1).tolist()


# ---- memory of the last save ----

def _variants(rng):
    """Changes of a state, each of which must be seen."""
    def array(): return np.arange(rng.randrange(1, 5), dtype=rng.choice(["f4", "f8", "i4"]))

    def change(tree):
        keys = list(tree)
        key = rng.choice(keys) if keys else None
        kind = rng.randrange(12)
        if kind == 0 or key is None:
            tree[f"new{rng.randrange(5)}"] = array()
        elif kind == 1:
            del tree[key]
        elif kind == 2:
            tree[key] = array()
        elif kind == 3:
            tree[key] = {"a": array(), "b": array()}
        elif kind == 4:
            tree[key] = [array(), array()]
        elif kind == 5:
            tree[key] = rng.choice([1, 1.0, True, "x", None, -0.0, 0.0])
        elif kind == 6 and isinstance(tree[key], np.ndarray):
            tree[key] = tree[key][::-1] if rng.random() < 0.5 else tree[key].reshape(1, -1)
        elif kind == 7:
            tree[key] = tree.pop(key)
        elif kind == 8 and isinstance(tree[key], dict):
            change(tree[key])
        elif kind == 9:
            tree[key] = vckpt.Shard(array(), buffer=rng.random() < 0.5)
        elif kind == 10 and isinstance(tree[key], vckpt.Shard):
            size = tree[key].tensor.size
            tree[key] = vckpt.Shard(tree[key].tensor, shape=(size + 2,), boxes=[((rng.randrange(3),), (size,))])
        elif kind == 11 and isinstance(tree[key], list):
            tree[key] = tuple(tree[key])
    return change


def test_a_remembered_state_is_never_stale(scale, rng):
    """Random changes, one after another: with the memory of the last save as without."""
    change, memory, tree = _variants(rng), state.Memory(), {}
    for _ in range(scale(1500, 8000)):
        change(tree)
        per_rank = rng.choice([(), (), (), ("m.new1",)])
        whole = {"m": tree, "n": {"x": tree.get("new0"), "k": 1}}
        try:
            fresh = state.collect(whole, per_rank=per_rank)
        except vckpt.Refused as error:
            with pytest.raises(vckpt.Refused, match=re.escape(str(error))):     # of a Shard below new1
                state.collect(whole, memory=memory, per_rank=per_rank)
            continue
        found = state.collect(whole, memory=memory, per_rank=per_rank)
        assert sorted(map(held, described(found))) == sorted(map(held, described(fresh)))
        assert sorted(found.blobs) == sorted(fresh.blobs)
        again = state.collect(whole, memory=memory, per_rank=per_rank)
        assert [r[:-1] for r in described(again)] == [r[:-1] for r in described(found)]


def test_equal_structure_is_not_described_anew(monkeypatch):
    arrays = {f"layer{i}.w": np.full(3, i) for i in range(50)}
    memory = state.Memory()
    state.collect({"m": arrays, "o": {"state": dict(arrays), "lr": 0.1}}, memory=memory)
    made = []
    monkeypatch.setattr(state, "make_entry", lambda *a: made.append(a))
    moved = {name: array.copy() for name, array in arrays.items()}
    found = state.collect({"m": moved, "o": {"state": moved, "lr": 0.2}}, memory=memory)
    assert not made
    assert [row[-1] for row in described(found)[:50]] == [array.ctypes.data for array in moved.values()]
    assert b"0.2" in dict((n, d) for n, _, d in found.blobs)["o.json"]


# ---- per rank ----

def test_per_rank_documents():
    tree = {"a": {"n": 1, "own": {"q": np.ones((2, 2), ">f8"), "k": 7}}, "b": [np.zeros(1), 3],
            "rng": vckpt.rng_state()}
    found = state.collect(tree, rank=2, per_rank=("a.own", "b.1"))
    blobs = {(name, rank): data for name, rank, data in found.blobs}
    # rank 2 gives no common document
    assert set(blobs) == {("a.json", True), ("a/own.q.npy", True), ("b.json", True), ("rng.json", True)}
    own = json.loads(blobs["a.json", True])["value"]["own"]
    assert own == {"q": {"$tensor": "own.q", "blob": "a/own.q.npy", "dtype": "f64"}, "k": 7}
    common = {name: json.loads(data)["value"]
              for name, rank, data in state.collect(tree, rank=0, per_rank=("a.own", "b.1")).blobs if not rank}
    assert common == {"a.json": {"n": 1, "own": {"$record": "vckpt.PerRank", "fields": {}}},
                      "b.json": [{"$tensor": "0"}, {"$record": "vckpt.PerRank", "fields": {}}]}


@pytest.mark.parametrize("name", ["a/b", "a%b", ".hidden", "x" * 300, "é" * 200, "tab\t", "plain.name"])
def test_file_names_stay_in_their_directory(name):
    file = state.file_name(name)
    assert len(file.encode()) <= 250 and "/" not in file and not file.startswith(".") and "\t" not in file
    assert (file == name) == (name == "plain.name")


def test_two_names_that_are_cut_differ():
    assert state.file_name("x" * 300) != state.file_name("x" * 301)


def test_random_numbers_come_back():
    random.seed(5), np.random.seed(5)
    np.random.randn()                                   # leaves half of a pair
    kept = vckpt.rng_state()
    drawn = random.random(), np.random.randn(3).tolist(), random.gauss(0, 1)
    vckpt.set_rng_state(kept)
    assert (random.random(), np.random.randn(3).tolist(), random.gauss(0, 1)) == drawn
    data = next(data for name, rank, data in state.collect({"rng": kept}).blobs if name == "rng.json" and rank)
    vckpt.set_rng_state(values.decode(data))
    assert (random.random(), np.random.randn(3).tolist(), random.gauss(0, 1)) == drawn


def test_meshes_in_meshes():
    """A group of a mesh, repeated over the rest of it: brute force over all sub-meshes of a small one."""
    import itertools
    from vckpt import meshes
    ranks = np.random.default_rng(0).permutation(24).reshape(2, 3, 4)
    names = ["a", "b", "c"]
    for dims in [d for n in (1, 2, 3) for d in itertools.permutations(range(3), n)]:
        rest = [d for d in range(3) if d not in dims]
        for at in itertools.product(*(range(ranks.shape[d]) for d in rest)):
            index = [slice(None)] * 3
            for d, i in zip(rest, at):
                index[d] = i
            part = ranks[tuple(index)]
            part = part.transpose([sorted(dims).index(d) for d in dims])
            found = meshes.within((names, ranks), ([names[d] for d in dims], part))
            assert found is not None
            words, full, before = found
            assert words == [names[d] for d in rest + list(dims)] and before == len(rest)
            assert (full == ranks.transpose(rest + list(dims))).all()
            flat = meshes.within((names, ranks), (["f"], part.reshape(-1)))
            assert (flat[1] == ranks.transpose(rest + list(dims)).reshape([ranks.shape[d] for d in rest] + [-1])).all()
    assert meshes.within((names, ranks), (["x"], ranks.reshape(-1)[:5])) is None
    assert meshes.within((names, ranks), (["x"], np.array([0, 99]))) is None


def test_what_may_be_a_mesh(build):
    from vckpt import meshes
    words, ranks = meshes.given(("dp=2,tp=2", [4, 5, 6, 7]))
    assert words == ["dp", "tp"] and ranks.tolist() == [[4, 5], [6, 7]]
    assert meshes.given("dp=3")[1].tolist() == [0, 1, 2]
    for bad in (5, "dp", "dp=x", ("dp=2", [0, 0])):
        with pytest.raises(ValueError):
            meshes.given(bad)
    assert meshes.dimension_names(("dp/cp", "2x", "dp_cp"), 3) == ["dp_cp", "d2x", "dp_cp_2"]


def test_one_layout_for_a_shard():
    layout = shard.Layout((2, 2), boxes=(((0, 0), (1, 2)), ((1, 0), (1, 1))))
    shard.check_items(layout, 3, "x")
    with pytest.raises(shard.Refused, match="the boxes have 3 items, the tensor that was given for them has 4"):
        shard.check_items(layout, 4, "x")
