# SPDX-License-Identifier: Apache-2.0
"""A component that ranks of one or several layouts saved is one .safetensors file, whether they stored a header or
not."""
import ctypes as c
import json
import pathlib

import pytest
import safetensors

from protolib import Params, Proto
from test_load_boxes import Step, T
from test_tree import CODE, SAFETENSORS, Buffer, Error, Saver, Shape, Tree, checked


@pytest.fixture
def proto(lib):
    return Proto(lib)


@pytest.fixture
def opened(lib):
    """The tree of a step in a store."""
    made = []

    def open_tree(path, run=b"r", step=1):
        s, err = c.c_void_p(), Error()
        checked(lib.store_open(str(path).encode(), c.c_uint(0), c.byref(s), c.byref(err)), err)
        t = Tree(lib, s, run, step)
        made.append((t, s))
        return t
    yield open_tree
    for t, s in made:
        t.close()
        lib.store_close(s)


def tensors():
    """Sizes that are multiples of 4096 and others, of falling item size, in no order; one in halves, one on every
    rank."""
    rows = {0: [[(0, 24), (0, 64)]], 1: [[(24, 24), (0, 64)]]}
    return [T("a.odd", "u1", (37,), {0: None}, 1), T("b.aligned", "u2", (64, 64), {0: None, 1: None}, 2),
            T("c.rows", "f4", (48, 64), rows, 3),
            T("d.wide", "i8", (5, 3), {1: None}, 4), T('e "quoted"\\\n', "f4", (), {0: None}, 5),
            T("f.empty", "f4", (0, 3), {}, 6)]


def cat(vckpt, path, file):
    return vckpt("cat", path, f"r/1/{file}", text=False).stdout


def check(vckpt, opened, tmp_path, path, wanted):
    """What the command gives, safe_open and the tree's sizes agree with the tensors. Returns the header."""
    raw = cat(vckpt, path, "model.safetensors")
    (tmp_path / "x.safetensors").write_bytes(raw)
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as f:
        assert set(f.keys()) == {t.name for t in wanted}
        for t in wanted:
            got = f.get_tensor(t.name)
            assert got.dtype == t.array.dtype and got.shape == t.array.shape and got.tobytes() == t.bytes, t.name
    tree = opened(path)
    node = tree.node(tree.files()["model.safetensors"])
    assert node.kind == SAFETENSORS and node.size == len(raw)
    told = json.loads(cat(vckpt, path, "manifest.json"))
    assert told["components"] == [{"name": "model", "tensors": len(wanted),
                                   "bytes": sum(t.array.nbytes for t in wanted),
                                   "safetensors": "model.safetensors", "left_out": []}]
    length = 8 + int.from_bytes(raw[:8], "little")
    return raw[:length]


def made_of_layout(lib, layout):
    """The header that an import would store."""
    made, size = Buffer(), c.c_uint64()
    assert lib.view_safetensors_make(layout, c.c_uint32(0), None, c.c_uint32(0), c.byref(made), c.byref(size)) == 0
    raw = c.string_at(made.data, made.len)
    lib.base_buf_release(c.byref(made))
    return raw


def layout_of(lib, some):
    lib.store_layout_builder_new.restype = c.c_void_p
    b, l, object_, tags, err = c.c_void_p(
        lib.store_layout_builder_new(Params(256, 1024, 64))), c.c_void_p(), Buffer(), c.c_void_p(), Error()
    for t in some:
        shape = Shape(len(t.shape), (c.c_uint64 * 16)(*t.shape))
        raw = t.name.encode()
        checked(lib.store_layout_builder_add(b, b"model", raw, c.c_size_t(len(raw)), c.c_int(CODE[t.kind]),
                                             c.byref(shape), c.c_uint32(0), c.byref(err)), err)
    checked(lib.store_layout_builder_finish(b, c.byref(l), c.byref(object_), c.byref(tags), c.byref(err)), err)
    return l


@pytest.fixture
def same_header(lib):
    """The header of a step is that of one layout of all its tensors."""
    def compare(head, wanted):
        l = layout_of(lib, wanted)
        assert head == made_of_layout(lib, l)
        lib.store_layout_free(l)
    return compare


@pytest.mark.parametrize("header", [False, True])
def test_one_layout(proto, vckpt, opened, same_header, tmp_path, header):
    some = tensors()
    Step(proto, tmp_path / "s", some, 2, header=header)
    head = check(vckpt, opened, tmp_path, tmp_path / "s", some)
    if not header:
        same_header(head, some)
        assert len(head) % 4096 == 0 and json.loads(head[8:])["__metadata__"] == {"format": "pt"}
    else:
        assert "__metadata__" not in json.loads(head[8:])  # the stored one


@pytest.mark.parametrize("header", [False, True])
def test_two_layouts(proto, vckpt, opened, same_header, tmp_path, header):
    """Pipeline stages: no stored header speaks for all, so that of the step is made."""
    some = tensors()
    for t, rank in zip(some, [0, 1, 0, 1, 0, 0]):
        t.held = {rank: None} if t.array.size else {}
    stages = [([0], [some[0], some[2], some[4], some[5]]), ([1], [some[1], some[3]])]
    Step(proto, tmp_path / "s", some, 2, stages=stages, header=header)
    same_header(check(vckpt, opened, tmp_path, tmp_path / "s", some), some)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tensor_in_both_layouts(proto, vckpt, opened, same_header, tmp_path, tied):
    """A tied embedding; and where one layout has all tensors of the component, its header is the component's."""
    tie, only = T("embedding", "f4", (40, 30), {0: None, 1: None}, 7), T("head", "u2", (9,), {0: None}, 8)
    stages = [([0], [tie, only]), ([1], [tie] if tied else [tie, T("more", "u1", (5,), {1: None}, 9)])]
    some = [tie, only] + stages[1][1][1:]
    Step(proto, tmp_path / "s", some, 2, stages=stages, header=True)
    head = check(vckpt, opened, tmp_path, tmp_path / "s", some)
    if tied:
        assert "__metadata__" not in json.loads(head[8:])
    else:
        same_header(head, some)


def test_reads_in_the_middle(proto, lib, opened, tmp_path):
    some = tensors()
    Step(proto, tmp_path / "s", some, 2)
    tree = opened(tmp_path / "s")
    raw = tree.whole("model.safetensors")
    f = tree.open(tree.files()["model.safetensors"])
    for at in range(0, len(raw), 997):
        assert tree.read(f, at, 1500) == tree.extents(f, at, 1500) == raw[at:at + 1500]
    lib.view_file_close(f)


def export(vckpt, path, to, *more):
    vckpt("export", path, "r/1", to, *more)
    return {str(f.relative_to(to)): f.read_bytes() for f in pathlib.Path(to).rglob("*") if f.is_file()}


def test_export_and_back(proto, vckpt, tmp_path):
    some = tensors()
    Step(proto, tmp_path / "s", some, 2)
    files = export(vckpt, tmp_path / "s", tmp_path / "d")
    assert set(files) == {"model.safetensors", "manifest.json"}
    vckpt("import", tmp_path / "s", "back/1", tmp_path / "d")
    assert vckpt("cat", tmp_path / "s", "back/1/model.safetensors", text=False).stdout == files["model.safetensors"]


def one_step(lib, path, names, blobs=()):
    err, s = Error(), c.c_void_p()
    checked(lib.store_init(str(path).encode(), c.c_uint64(0), c.byref(err)), err)
    checked(lib.store_open(str(path).encode(), c.c_uint(0), c.byref(s), c.byref(err)), err)
    saver = Saver(lib, s, b"r", 1)
    for name, code, shape, raw in names:
        saver.tensor("model", name, code, shape, raw)
    for name, raw in blobs:
        saver.blob(name, raw)
    saver.commit([])
    lib.store_close(s)


def test_what_the_format_lacks_is_named(lib, vckpt, tmp_path):
    names = [("c", 15, (1,), bytes(16)), ("__metadata__", 2, (1,), b"m"), ("x", 2, (3,), b"abc")]
    one_step(lib, tmp_path / "s", names)
    assert json.loads(cat(vckpt, tmp_path / "s", "manifest.json"))["components"][0]["left_out"] == ["__metadata__", "c"]
    assert set(json.loads(cat(vckpt, tmp_path / "s", "model.safetensors")[8:4096])) == {"__metadata__", "x"}
    assert set(export(vckpt, tmp_path / "s", tmp_path / "d")) == {"model.safetensors", "model/c.npy",
                                                                  "model/__metadata__.npy", "manifest.json"}


@pytest.mark.parametrize("extra", [pytest.param(0, marks=pytest.mark.full), 10])
def test_a_header_over_the_limit(lib, opened, tmp_path, extra):
    """Long names: a few tensors more, and there is no such file, and manifest.json says why."""
    long = "n" * 65_000
    most = 90_000_000 // 65_100
    one_step(lib, tmp_path / "s", [(f"{long}{i:05d}", 2, (1,), b"x") for i in range(most + extra)])
    tree = opened(tmp_path / "s")
    component = json.loads(tree.whole("manifest.json"))["components"][0]
    if extra:
        assert (component["safetensors"] is None and component["reason"] == "its header would be longer than "
                "90000000 bytes")
        assert "model.safetensors" not in tree.files()
        return
    assert component["safetensors"] == "model.safetensors"
    number = tree.files()["model.safetensors"]
    f = tree.open(number)
    size = lib.view_file_size(f)
    assert (tree.node(number).size == size and 89_000_000 < size < 90_100_000 and
            tree.read(f, size - most, most) == b"x" * most)
    lib.view_file_close(f)


DCP = [(".dcp/.metadata", b"meta"), (".dcp/__0_0.distcp", b"bytes"), (".dcp/a/b", b"deep")]


@pytest.mark.parametrize("shape", ["safetensors", "npy"])
def test_dcp_directory_there_and_back(lib, vckpt, tmp_path, shape):
    one_step(lib, tmp_path / "s", [("x", 2, (3,), b"abc")], DCP)
    assert cat(vckpt, tmp_path / "s", ".dcp/__0_0.distcp") == b"bytes"
    files = export(vckpt, tmp_path / "s", tmp_path / "d", "--format", shape)
    assert {n: raw for n, raw in files.items() if n.startswith(".dcp")} == {
        ".dcp/.metadata": b"meta", ".dcp/__0_0.distcp": b"bytes", ".dcp/a/b": b"deep"}
    vckpt("import", tmp_path / "s", "back/1", tmp_path / "d")
    told = json.loads(vckpt("cat", tmp_path / "s", "back/1/manifest.json").stdout)
    assert {b["name"]: b["file"] for b in told["blobs"] if b["name"].startswith(".dcp")} == {
        name: name for name, _ in DCP}
