# SPDX-License-Identifier: Apache-2.0
"""The files of a step: a step with awkward names is saved through the library, and every file of its tree is compared
with what was saved."""
import ctypes
import errno
import hashlib
import io
import json
import random
import struct
import threading
import time

import numpy as np
import pytest
import safetensors.numpy

C = ctypes
NONE = 2**64 - 1
DIRECTORY, NPY, SAFETENSORS, BLOB, JSON = range(5)
SHOW_NPY, SHOW_SAFETENSORS, SHOW_ALL = 1, 2, 3
ENOENT, ENOTDIR, EISDIR = -2, -20, -21
READ = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint64, C.c_void_p, C.c_size_t, C.c_void_p)
TELL = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_char_p, C.c_char_p)
SINK = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_size_t, C.c_void_p)
LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p)
BEGIN = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint64, C.c_uint64, C.c_void_p)
CODE = {"?": 1, "u1": 2, "u2": 3, "u4": 4, "u8": 5, "i1": 6, "i2": 7, "i4": 8, "i8": 9, "f2": 10, "f4": 12, "f8": 13,
        "c8": 14, "c16": 15}


class Shape(C.Structure):
    _fields_ = [("ndim", C.c_uint32), ("dim", C.c_uint64 * 16)]


class Error(C.Structure):
    _fields_ = [("code", C.c_int), ("text", C.c_char * 1000)]


class Source(C.Structure):
    _fields_ = [("read", READ), ("arg", C.c_void_p)]


class Attribute(C.Structure):
    _fields_ = [("key", C.c_char_p), ("value", C.c_char_p)]


class Options(C.Structure):
    _fields_ = [("run", C.c_char_p), ("step", C.c_uint64), ("replace", C.c_bool), ("attributes", C.POINTER(Attribute)),
                ("nattributes", C.c_size_t),
                ("threads", C.c_uint), ("no_index", C.c_bool), ("progress", C.c_void_p), ("progress_arg", C.c_void_p),
                ("cancelled", C.c_void_p), ("warn_free", C.c_uint64)]


class Buffer(C.Structure):
    _fields_ = [("data", C.c_void_p), ("len", C.c_size_t), ("size", C.c_size_t), ("error", C.c_int)]


class Node(C.Structure):
    _fields_ = [("name", C.c_char_p), ("parent", C.c_uint32), ("first_child", C.c_uint32), ("nchildren", C.c_uint32),
                ("item", C.c_uint32),
                ("kind", C.c_uint8), ("size", C.c_uint64)]


class Vector(C.Structure):
    _fields_ = [("base", C.c_void_p), ("len", C.c_size_t)]


class Slices(C.Structure):
    _fields_ = [("iov", C.POINTER(Vector)), ("niov", C.c_uint), ("pins", C.c_void_p), ("npins", C.c_uint),
                ("memory", C.c_void_p)]


class Filling(C.Structure):
    _fields_ = [("to", C.c_void_p), ("from", C.c_uint64), ("ready", C.POINTER(C.c_uint64)), ("begin", BEGIN),
                ("arg", C.c_void_p)]


def checked(code, err, what=""):
    assert code >= 0, f"{what}: {code} {err.text.decode()}"
    return code


class Saver:
    """One step saved by one writer, from bytes in memory."""

    def __init__(self, lib, store, run, step, attributes=()):
        self.lib, self.err, self.keep, self.w = lib, Error(), [], C.c_void_p()
        pairs = (Attribute * max(1, len(attributes)))(*[Attribute(k.encode(), v.encode()) for k, v in attributes])
        o = Options(run=run, step=step, attributes=pairs, nattributes=len(attributes), no_index=True)
        checked(lib.save_writer_open(store, C.byref(o), C.byref(self.w), C.byref(self.err)), self.err)

    def source(self, raw):
        def read(_, offset, out, n, err):
            assert offset + n <= len(raw)
            C.memmove(out, raw[offset: offset + n], n)
            return 0
        f = READ(read)
        self.keep.append(f)
        return Source(f, None)

    def tensor(self, component, name, code, dims, raw):
        shape = Shape(len(dims), (C.c_uint64 * 16)(*dims))
        n = name.encode()
        checked(self.lib.save_writer_tensor(self.w, component.encode(), n, C.c_size_t(len(n)), C.c_int(code),
                                            C.byref(shape), self.source(raw),
                                            C.byref(self.err)), self.err, name)

    def blob(self, name, raw, per_rank=False):
        checked(self.lib.save_writer_blob(self.w, name.encode(), C.c_bool(per_rank), C.c_uint64(len(raw)),
                                          self.source(raw), C.byref(self.err)),
                self.err, name)

    def commit(self, headers, more=()):
        """headers: components that get a made .safetensors header; more: (component, view, bytes, data_bytes)."""
        layout, made, size = C.c_void_p(), Buffer(), C.c_uint64()
        checked(self.lib.save_writer_plan(self.w, C.byref(layout), C.byref(self.err)), self.err)
        for number, component in headers:
            checked(self.lib.view_safetensors_make(layout, C.c_uint32(number), None, C.c_uint32(0), C.byref(made),
                                                   C.byref(size)), self.err)
            checked(self.lib.save_writer_header(self.w, component.encode(), b"safetensors", C.c_void_p(made.data),
                                                C.c_size_t(made.len), size,
                                                C.byref(self.err)), self.err)
            self.lib.base_buf_release(C.byref(made))
        for component, view, raw, data_bytes in more:
            checked(self.lib.save_writer_header(self.w, component, view, raw, C.c_size_t(len(raw)),
                                                C.c_uint64(data_bytes), C.byref(self.err)), self.err)
        checked(self.lib.save_writer_commit(self.w, C.create_string_buffer(4096), C.byref(self.err)), self.err)
        self.lib.save_writer_close(self.w)


class Tree:
    def __init__(self, lib, store, run, step):
        self.lib, self.err, self.step, self.t = lib, Error(), C.c_void_p(), C.c_void_p()
        lib.commit_list_find.restype = lib.view_tree_node.restype = C.c_void_p
        lib.view_tree_lookup.restype = lib.view_tree_walk.restype = C.c_int64
        lib.view_tree_memory.restype = C.c_size_t
        lib.view_file_size.restype = C.c_uint64
        lib.load_cache_new.restype = C.c_void_p
        listing = C.c_void_p()
        checked(lib.commit_list_open(store, run, C.c_bool(False), C.byref(listing), C.byref(self.err)), self.err)
        entry = lib.commit_list_find(listing, C.c_uint64(step))
        assert entry
        checked(lib.load_step_open(store, run, C.c_void_p(entry), C.byref(self.step), C.byref(self.err)), self.err)
        lib.commit_list_close(listing)
        self.build()
        self.cache = C.c_void_p(lib.load_cache_new(C.c_uint64(8 << 20)))

    def build(self, show=SHOW_ALL):
        checked(self.lib.view_tree_build(self.step, C.c_uint(show), C.byref(self.t), C.byref(self.err)), self.err)

    def close(self):
        self.lib.view_tree_unref(self.t)
        self.lib.load_cache_free(self.cache)
        self.lib.load_step_unref(self.step)

    def node(self, number):
        p, size = self.lib.view_tree_node(self.t, C.c_uint32(number)), C.c_uint64()
        if not p:
            return None
        n = Node.from_buffer_copy(C.string_at(p, C.sizeof(Node)))
        assert self.lib.view_tree_size(self.t, C.c_uint32(number), C.byref(size)) == 0
        assert n.size == size.value or n.name == b"manifest.json" and n.size == 2**64 - 1
        n.size = size.value
        return n

    def lookup(self, directory, name):
        return self.lib.view_tree_lookup(self.t, C.c_uint32(directory), name.encode())

    def walk(self, path):
        return self.lib.view_tree_walk(self.t, path.encode())

    def files(self):
        """path -> node number, by walking directories."""
        found = {}

        def visit(number, path):
            n = self.node(number)
            if n.kind != DIRECTORY:
                found[path] = number
                return
            names = []
            for i in range(n.first_child, n.first_child + n.nchildren):
                child = self.node(i)
                assert child.parent == number
                names.append(child.name)
                visit(i, (path + "/" if path else "") + child.name.decode())
                assert self.lib.view_tree_lookup(self.t, C.c_uint32(number), child.name) == i
            assert names == sorted(set(names))
        visit(0, "")
        return found

    def open(self, number):
        f = C.c_void_p()
        code = self.lib.view_file_open(self.t, C.c_uint32(number), C.byref(f), C.byref(self.err))
        return f if code == 0 else code

    def read(self, f, offset, n):
        err, got = Error(), b""

        def sink(_, data, count, err):
            nonlocal got
            got += C.string_at(data, count)
            return -errno.ECANCELED if len(got) >= n else 0
        code = self.lib.view_file_stream(f, self.cache, C.c_uint64(offset), C.c_uint(1), SINK(sink), None, C.byref(err))
        if code != -errno.ECANCELED:
            checked(code, err)
        return got[:n]

    def whole(self, path):
        f = self.open(self.files()[path])
        size = self.lib.view_file_size(f)
        raw = self.read(f, 0, size + 100)
        assert len(raw) == size == self.node(self.files()[path]).size
        self.lib.view_file_close(f)
        return raw

    def extents(self, f, offset, n):
        e, err, scratch = Slices(), Error(), C.create_string_buffer(n + 1)
        checked(self.lib.view_file_slices(f, self.cache, C.c_uint64(offset), C.c_size_t(n), scratch, C.byref(e),
                                          C.byref(err)), err)
        raw = b"".join(C.string_at(v.base, v.len) for v in e.iov[: e.niov])
        self.lib.load_slices_release(C.byref(e))
        return raw

    def stream(self, f, offset, threads, stop_after=None):
        parts = []

        def sink(_, data, n, err):
            parts.append(C.string_at(data, n))
            return -5 if stop_after is not None and len(parts) >= stop_after else 0
        code = self.lib.view_file_stream(f, self.cache, C.c_uint64(offset), C.c_uint(threads), SINK(sink), None,
                                         C.byref(self.err))
        return code, b"".join(parts)

    def attributes(self, number):
        told = {}

        def tell(_, key, value):
            told[key.decode()] = value.decode()
            return 0
        checked(self.lib.view_node_attributes(self.t, C.c_uint32(number), TELL(tell), None, C.byref(self.err)),
                self.err)
        return told


@pytest.fixture(scope="module")
def store(lib, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "store"
    err, s = Error(), C.c_void_p()
    checked(lib.store_init(str(path).encode(), C.c_uint64(0), C.byref(err)), err)
    checked(lib.store_open(str(path).encode(), C.c_uint(0), C.byref(s), C.byref(err)), err)
    yield s
    lib.store_close(s)


random_bytes = np.random.default_rng(7)
TENSORS = {  # (component, name): array
    ("model", "a.weight"): random_bytes.standard_normal((600, 700)).astype("<f4"),
    ("model", "b/../c"): np.arange(6, dtype="<i8").reshape(2, 3),
    ("model", ".hidden"): np.array(7.5, "<f8"),
    ("model", "empty"): np.zeros((0, 3), "<f2"),
    ("model", "x"): np.frombuffer(random_bytes.bytes(10_000_000), "u1").reshape(2500, 4000),
    ("model", "100%\x01\x7f"): np.array([True, False]),
    ("model", "long" * 100): np.arange(5, dtype="<u2"),
    ("model", "é" * 200): np.arange(9, dtype="<u4"),
    ("model", "complex"): np.arange(4, dtype="<c16"),
    ("optimizer", "a.weight.exp_avg"): np.ones((64, 64), "<f4"),
}
BLOBS = {"config.json": b"{}", "1_Pooling/config.json": b'{"a": 1}', "empty": b"",
         "big.bin": random_bytes.bytes(9_000_001),
         "model/readme.txt": b"beside the tensors", ".hidden/..": b"dots", "a//b": b"slashes", "100%": b"percent",
         ".dcp/.metadata": b"as it is", "..x": b"two dots", ".git/config": b"git", ".GIT": b"git", ".gitignore": b"",
         ".vckpt-x/.vckpt": b"vckpt's", ".": b"", "..": b"",
         "model": b"c1", "model/x.npy": b"c2", "model.safetensors": b"c3", "manifest.json": b"c4", "ranks": b"c5",
         "ranks/00000/rng": b"c6",
         "mesh/x": b"c7", "optimizer/a.weight.exp_avg.npy": b"c12", "model/x.npy/more": b"c8", "éa": b"c9",
         "éa/b": b"under", "x/a": b"c10", "x/a/b": b"c11", "x/a/b/c": b"deep"}
RANKED = {"rng": b"state", "loader/state": b"state 2", "model": b"no collision here"}
AWAY = {"model": "%6Dodel", "model.safetensors": "%6Dodel.safetensors", "manifest.json": "%6Danifest.json",
        "ranks": "%72anks", "mesh/x": "%6Desh/x",
        "optimizer/a.weight.exp_avg.npy": "%6Fptimizer/a.weight.exp_avg.npy", "éa": "%C3%A9a", "x/a": "%78/a",
        # and those that meet one of these
        "model/x.npy": "model%2Fx.npy%~", "ranks/00000/rng": "ranks%2F00000%2Frng%~",
        "model/x.npy/more": "model%2Fx.npy%2Fmore%~", "x/a/b": "x%2Fa%2Fb%~"}
PLAIN = {".hidden/..": ".hidden/%2E.", "a//b": "a%2F/b", "100%": "100%25", ".git/config": "%2Egit/config",
         ".GIT": "%2EGIT", ".vckpt-x/.vckpt": "%2Evckpt-x/%2Evckpt", ".": "%2E", "..": "%2E."}


@pytest.fixture(scope="module")
def tree(lib, store):
    saver = Saver(lib, store, b"run", 1200, [("loss", "2.31"), ("note", 'say "hi"\n')])
    for (component, name), array in TENSORS.items():
        saver.tensor(component, name, CODE[array.dtype.str.lstrip("<|").replace("b1", "?")], array.shape,
                     array.tobytes())
    for name, raw in BLOBS.items():
        saver.blob(name, raw)
    for name, raw in RANKED.items():
        saver.blob(name, raw, per_rank=True)
    saver.commit([(0, "model")])
    t = Tree(lib, store, b"run", 1200)
    yield t
    t.close()


@pytest.fixture(scope="module")
def told(tree):
    return json.loads(tree.whole("manifest.json"))


def test_manifest_json(tree, told):
    assert (told["run"], told["step"], told["attributes"]) == ("run", 1200, {"loss": "2.31", "note": 'say "hi"\n'})
    assert told["totals"]["tensors"] == len(TENSORS) and told["totals"]["blobs"] == len(BLOBS) + len(RANKED)
    assert (told["totals"]["bytes"] == sum(a.nbytes for a in TENSORS.values()) +
            sum(map(len, [*BLOBS.values(), *RANKED.values()])))
    assert told["time"][:2] == "20" and told["time"][-1] == "Z" and len(told["time"]) == 30
    model, optimizer = told["components"]
    assert model == {"name": "model", "tensors": 9,
                     "bytes": sum(a.nbytes for (c, _), a in TENSORS.items() if c == "model"),
                     "safetensors": "model.safetensors", "left_out": ["complex"]}
    assert optimizer == {"name": "optimizer", "tensors": 1, "bytes": 64 * 64 * 4,
                         "safetensors": "optimizer.safetensors", "left_out": []}
    assert {(t["component"], t["name"]): (tuple(t["shape"]), t["bytes"]) for t in told["tensors"]} == \
        {k: (a.shape, a.nbytes) for k, a in TENSORS.items()}
    assert {b["name"]: b["bytes"] for b in told["blobs"] if "rank" not in b} == {k: len(v) for k, v in BLOBS.items()}
    assert {b["name"]: (b["rank"], b["bytes"]) for b in told["blobs"]
            if "rank" in b} == {k: (0, len(v)) for k, v in RANKED.items()}
    nodes = tree.files()
    for one in told["tensors"] + told["blobs"]:
        assert len(one["digest"]) == 64 and tree.attributes(nodes[one["file"]])["digest"] == one["digest"]
    assert {f["file"] for f in told["tensors"] + told["blobs"]} | {"manifest.json", "model.safetensors",
                                                                   "optimizer.safetensors"} == set(tree.files())


def test_tensors(tree, told):
    for t in told["tensors"]:
        array = TENSORS[t["component"], t["name"]]
        raw = tree.whole(t["file"])
        read = np.load(io.BytesIO(raw))
        assert (len(raw) == 4096 + array.nbytes and read.dtype == array.dtype and read.shape == array.shape and
                read.tobytes() == array.tobytes())


def test_blobs(tree, told):
    seen = {}
    for b in told["blobs"]:
        raw = tree.whole(b["file"])
        assert raw == (RANKED if "rank" in b else BLOBS)[b["name"]]
        if "rank" in b:
            assert b["file"] == "ranks/00000/" + b["name"]
        else:
            seen[b["name"]] = b["file"]
    for name, file in seen.items():
        if AWAY.get(name, "").endswith("%~"):
            assert file == AWAY[name] + hashlib.sha256(name.encode()).hexdigest()[:32]
        else:
            assert file == AWAY.get(name, PLAIN.get(name, name))


@pytest.fixture
def shown(tree):
    """The same step with one form of its tensors."""
    def build(show):
        tree.lib.view_tree_unref(tree.t)
        tree.build(show)
        return tree
    yield build
    build(SHOW_ALL)


def test_one_form_of_the_tensors(tree, told, shown):
    everything = {path: (tree.node(n).kind, tree.node(n).size) for path, n in tree.files().items()}
    blobs = {path: v for path, v in everything.items() if v[0] == BLOB}
    npy = {path: v for path, v in everything.items() if v[0] == NPY}
    left_out = {t["file"]: everything[t["file"]] for t in told["tensors"]
                if t["name"] in told["components"][0]["left_out"]}
    assert left_out
    for show, wanted in ((SHOW_NPY, npy),
                         (SHOW_SAFETENSORS,
                          {**left_out, **{p: v for p, v in everything.items() if v[0] == SAFETENSORS}})):
        t = shown(show)
        files = t.files()
        manifest = t.node(files["manifest.json"])
        assert {path: (t.node(n).kind, t.node(n).size) for path, n in files.items()
                if path != "manifest.json"} == {**blobs, **wanted}
        text = t.whole("manifest.json")
        assert manifest.size == len(text)
        says = json.loads(text)
        assert {x["file"] for x in says["tensors"] + says["blobs"]} <= set(files)
        key = lambda x: (x["component"], x["name"])
        bare = [[{k: v for k, v in x.items() if k != "file"} for x in sorted(m["tensors"], key=key)]
                for m in (says, told)]
        assert bare[0] == bare[1] and says["blobs"] == told["blobs"]
        assert says["totals"] == told["totals"]
        for mine, other in zip(says["components"], told["components"]):
            if show == SHOW_SAFETENSORS:
                assert mine == other
            else:
                assert (mine["safetensors"], mine["reason"]) == (None, "only .npy files are shown here")
        for x in says["tensors"]:
            component, name = key(x)
            file = next(f["file"] for f in told["tensors"] if key(f) == key(x))
            assert x["file"] == (file if file in wanted else f"{component}.safetensors")
            assert (t.walk(file) >= 0) == (file in wanted)


def test_a_directory_that_is_empty_goes(lib, store):
    """Of a component whose tensors are all in its .safetensors; one that holds a blob stays."""
    saver = Saver(lib, store, b"gone", 1)
    for component in ("model", "other"):
        saver.tensor(component, "x", 2, (3,), b"abc")
    saver.blob("other/notes.txt", b"n")
    saver.commit([])
    t = Tree(lib, store, b"gone", 1)
    assert t.walk("model") > 0
    lib.view_tree_unref(t.t)
    t.build(SHOW_SAFETENSORS)
    assert t.walk("model") == ENOENT and t.node(t.walk("other")).nchildren == 1
    assert set(t.files()) == {"model.safetensors", "other.safetensors", "other/notes.txt", "manifest.json"}
    t.close()


def part(*names):
    """Header and length of a file with tensors of three bytes."""
    text = json.dumps({n: {"dtype": "U8", "shape": [3], "data_offsets": [3 * i, 3 * i + 3]}
                       for i, n in enumerate(names)}).encode()
    return struct.pack("<Q", len(text)) + text, 3 * len(names)


A, B, AB = part("a"), part("b"), part("a", "b")
OWN = ["model.safetensors", "other.safetensors"]


@pytest.mark.parametrize("paths, headers, files, fault", [
    (b"x/a.safetensors\0b.safetensors\0", [A, B], ["b.safetensors", "other.safetensors", "x/a.safetensors"], None),
    (b"x.safetensors\0", [], ["other.safetensors", "x.safetensors"], None),
    (b"other/x.safetensors\0", [], ["other.safetensors", "other/x.safetensors"], None),
    (b"a.safetensors\0b.safetensors\0", [AB, AB], ["a.safetensors", "b.safetensors", "other.safetensors"], None),
    # names that look like escapes are names
    (b"%2Fx.safetensors\0", [], ["%252Fx.safetensors", "other.safetensors"], None),
    (b"..%2F..%2Fx.safetensors\0", [], ["..%252F..%252Fx.safetensors", "other.safetensors"], None),
    (b"%2E%2E/.x.safetensors\0", [], ["%252E%252E/.x.safetensors", "other.safetensors"], None),
    (b".git/.vckpt.safetensors\0", [], ["%2Egit/%2Evckpt.safetensors", "other.safetensors"], None),
    (b"other%2Esafetensors/\nx.safetensors\0", [], ["other%252Esafetensors/%0Ax.safetensors", "other.safetensors"],
     None),
    (b"%6Fther.safetensors\0", [], ["%256Fther.safetensors", "other.safetensors"], None),
    # what cannot be believed, or has no room
    (b"x.safetensors", [], OWN, "names of the files"), (b"\0", [], OWN, "names of the files"),
    (b"x.txt\0", [], OWN, "names of the files"), (b"../x.safetensors\0", [], OWN, "names of the files"),
    (b"/x.safetensors\0", [], OWN, "names of the files"), (b"a//x.safetensors\0", [], OWN, "names of the files"),
    (b"ranks/x.safetensors\0", [], OWN, "names of the files"), (b"\xff.safetensors\0", [], OWN, "names of the files"),
    (b"other.safetensors\0", [], OWN, ""), (b"other.safetensors/x.safetensors\0", [], OWN, ""),
    (b"model.safetensors/x.safetensors\0", [], OWN, ""), (b"x.safetensors\0x.safetensors\0", [A, B], OWN, ""),
    (b"x.safetensors\0x.safetensors/y.safetensors\0", [A, B], OWN, ""),
    (b"a.safetensors\0b.safetensors\0", [A], OWN, ""),
    (b"x/a.safetensors\0other.safetensors\0", [A, B], OWN, ""),
    (b"a.safetensors\0b.safetensors\0", [A, A], ["a.safetensors", "b.safetensors", "other.safetensors"],
     "tensor 'b' is in none of the files of component model"),
    (b"a.safetensors\0b.safetensors\0", [A, part("c")], ["a.safetensors", "b.safetensors", "other.safetensors"],
     "names tensor 'c', which the layout does not have"),
])
def test_files_of_a_component(lib, vckpt, store, tmp_path, paths, headers, files, fault):
    """What a step says of them, and what is shown of that: the same whatever is shown, and never another's."""
    path, err, s = tmp_path / "s", Error(), C.c_void_p()
    checked(lib.store_init(str(path).encode(), C.c_uint64(0), C.byref(err)), err)
    checked(lib.store_open(str(path).encode(), C.c_uint(0), C.byref(s), C.byref(err)), err)
    saver = Saver(lib, s, b"r", 1)
    for component, name in (("model", "a"), ("model", "b"), ("other", "a")):
        saver.tensor(component, name, 2, (3,), (component[0] + name + "!").encode())
    saver.blob("b.safetensors", b"a blob")
    saver.blob("x/c.json", b"beside a file")
    saver.commit([(0, "model")], [(b"model", b"files", paths, 0),
                                  *((b"model", b"safetensors.%d" % i, *h) for i, h in enumerate(headers))])
    t = Tree(lib, s, b"r", 1)
    for show in (SHOW_ALL, SHOW_SAFETENSORS):
        lib.view_tree_unref(t.t)
        t.build(show)
        found = t.files()
        assert sorted(p for p, n in found.items() if t.node(n).kind == SAFETENSORS) == files
        assert sum(t.node(n).kind == BLOB for n in found.values()) == 2
        if not (fault and files != OWN):
            read = {p: safetensors.numpy.load(t.whole(p)) for p in files}
            of_model = [v for p, v in read.items() if p != "other.safetensors"]
            assert {k: x.tobytes() for v in of_model for k, x in v.items()} == {"a": b"ma!", "b": b"mb!"}
            told = json.loads(t.whole("manifest.json"))
            assert all(x["name"] in read[x["file"]] for x in told["tensors"] if x["file"] in read)
    t.close()
    lib.store_close(s)
    done = vckpt("verify", path, "--paranoid", check=False)
    assert done.returncode == (3 if fault else 0) and (fault or "") in done.stdout + done.stderr, done


def test_paths_of_many_components(lib, store):
    """They have 4 MiB together, whatever each says: what a tree needs does not grow with the number of components."""
    saver, number = Saver(lib, store, b"paths", 1), 70
    paths = [(f"{i:02}/" + "x" * 65000 + ".safetensors\0").encode() for i in range(number)]
    for i in range(number):
        saver.tensor(f"c{i:02}", "a", 2, (3,), b"abc")
    saver.commit([], [(f"c{i:02}".encode(), b"files", paths[i], 0) for i in range(number)])
    t = Tree(lib, store, b"paths", 1)
    own = sum("/" in path for path, n in t.files().items() if t.node(n).kind == SAFETENSORS)
    assert own == (4 << 20) // len(paths[0]) == 64
    assert sum(path.endswith(".safetensors") and "/" not in path for path in t.files()) == number - own
    t.close()


@pytest.mark.parametrize("paths, word", [(b"../x\0", "cannot be used"), (b"same.safetensors\0", "are in use")])
def test_the_log_does_not_grow_with_what_a_step_says(lib, store, capfd, paths, word):
    saver, number = Saver(lib, store, b"loud", len(paths)), 64
    for i in range(number):
        saver.tensor(f"c{i:02}", "a", 2, (3,), b"abc")
    saver.commit([], [(f"c{i:02}".encode(), b"files", paths, 0) for i in range(number)])
    capfd.readouterr()
    lib.base_log_set_level(1)   # other modules' tests may have made it quieter
    Tree(lib, store, b"loud", len(paths)).close()
    said = capfd.readouterr().err.splitlines()
    left = number - 20 - (paths[0] == ord("s"))             # one of those that want the same path has it
    assert len(said) == 21 and all(word in line for line in said[:20]) and f" {left} more components" in said[20]


def test_words_for_forms(lib):
    for words, show in (("npy", SHOW_NPY), ("safetensors", SHOW_SAFETENSORS), ("npy,safetensors", SHOW_ALL),
                        ("safetensors,npy", SHOW_ALL), ("npy,npy", SHOW_NPY)):
        assert lib.view_show_parse(words.encode()) == show
    for words in ("", ",", "npy,", ",npy", "np", "npyx", "NPY", "all", "npy safetensors"):
        assert lib.view_show_parse(words.encode()) == -22, words


def test_blobs_that_give_way_are_named(lib, tree):
    said = []
    f = LOG(lambda level, text: said.append((level, text.decode())))
    lib.base_log_set_sink(f)
    lib.base_log_set_level(1)
    try:
        tree.lib.view_tree_unref(tree.t)
        tree.build()
    finally:
        lib.base_log_set_sink(None)
    assert len(said) == len(AWAY) and all(level == 1 for level, _ in said)
    assert all(any(f"'{name}'" in text for _, text in said) for name in AWAY)


def test_many_blobs_that_give_way_are_counted(lib, store):
    saver = Saver(lib, store, b"away", 1)
    saver.tensor("model", "x", 2, (1,), b"x")
    for number in range(50):
        saver.blob(f"ranks/{number}", b"")
    saver.commit([])
    said = []
    sink = LOG(lambda level, text: said.append(text.decode()))
    lib.base_log_set_sink(sink)
    lib.base_log_set_level(1)
    try:
        Tree(lib, store, b"away", 1).close()
    finally:
        lib.base_log_set_sink(None)
    assert len(said) == 21 and said[-1].endswith("away/1: the same holds for 30 more blobs")


@pytest.mark.parametrize("names", [[".dcp"], [".dcp/"], [".dcp/", ".dcp//x"], [".dcp", ".dcp/x"]])
def test_names_with_a_dot(lib, store, names):
    """Slashes that separate nothing belong to the element, and a file gives way to a directory, as without the dot."""
    run = "dcp%d" % (len(names[0]) * 10 + len(names))
    saver = Saver(lib, store, run.encode(), 1)
    saver.tensor("model", "x", 2, (1,), b"x")
    for name in names:
        saver.blob(name, name.encode())
    saver.commit([])
    t = Tree(lib, store, run.encode(), 1)
    blobs = {b["name"]: b["file"] for b in json.loads(t.whole("manifest.json"))["blobs"]}
    assert set(blobs) == set(names) and all(t.whole(file) == name.encode() for name, file in blobs.items())
    files = {".dcp": ".dcp", ".dcp/": ".dcp%2F", ".dcp//x": ".dcp%2F/x", ".dcp/x": ".dcp/x"}
    if names[1:]:
        files[names[0]] = "%2E" + files[names[0]][1:]
    assert blobs == {name: files[name] for name in names}
    t.close()


def test_safetensors(tree):
    raw = tree.whole("model.safetensors")
    length = struct.unpack("<Q", raw[:8])[0]
    assert (8 + length) % 4096 == 0
    arrays = safetensors.numpy.load(raw)
    assert set(arrays) == {n for c, n in TENSORS if c == "model"} - {"complex"}
    for name, array in arrays.items():
        expected = TENSORS["model", name]
        assert array.dtype == expected.dtype and array.shape == expected.shape and array.tobytes() == expected.tobytes()


def test_any_range_of_any_file(tree, scale):
    rng = random.Random(3)
    files = tree.files()
    for path, number in files.items():
        raw = tree.whole(path)
        f = tree.open(number)
        n = scale(60, 5000) if len(raw) > 100_000 else 10
        edges = [0, 1, 4095, 4096, 4097, len(raw) - 1, len(raw), len(raw) + 1, 2**63]
        for _ in range(n):
            offset = rng.choice(edges) if rng.random() < 0.2 else rng.randrange(len(raw) + 1)
            offset = max(0, offset)
            size = (rng.choice([0, 1, 2, 511, 4096, 131072, 1 << 20, 3_000_001]) if rng.random() < 0.7
                    else rng.randrange(1, 20000))
            assert tree.read(f, offset, size) == raw[offset: offset + size], (path, offset, size)
            assert tree.extents(f, offset, size) == raw[offset: offset + size], (path, offset, size)
        tree.lib.view_file_close(f)


def test_stream(tree):
    for path in ["model/x.npy", "model.safetensors", "big.bin", "config.json", "empty", "manifest.json"]:
        raw = tree.whole(path)
        f = tree.open(tree.files()[path])
        for threads in (1, 2, 5, 0):
            for offset in (0, 1, 4096, len(raw) // 2, len(raw), len(raw) + 5):
                assert tree.stream(f, offset, threads) == (0, raw[offset:])
        assert tree.stream(f, 0, 3, stop_after=1)[0] == (-5 if raw else 0)
        tree.lib.view_file_close(f)


def test_a_file_is_filled_from_any_tensor_on(tree):
    """To its end, and then from its beginning to there: what was begun before is complete, and counted."""
    lib, err = tree.lib, Error()
    lib.view_file_from.restype = C.c_uint64
    for path in ["model.safetensors", "model/x.npy", "big.bin", "empty"]:
        raw, f = tree.whole(path), tree.open(tree.files()[path])
        n = 8 + struct.unpack("<Q", raw[:8])[0] if path == "model.safetensors" else 0
        ends = {tuple(at["data_offsets"]) for name, at in json.loads(raw[8:n]).items() if "dtype" in at} if n else ()
        begins = {0} | {n + begin for begin, end in ends if end > begin > 0}
        found = {lib.view_file_from(f, C.c_uint64(at)) for at in [0, *range(0, len(raw) + 1000, 500), *begins, 2**63]}
        assert found == begins and (len(found) > 3 or not n)
        for begin in found:
            room, ready, at = bytearray(len(raw) + 1), C.c_uint64(), begin

            def begins(_, where, end, err):
                """-EPROTO: it is not what should come next, or what came before is not there."""
                nonlocal at
                after, wrapped = begin + ready.value, max(0, begin + ready.value - len(raw))
                right = where == at and end <= len(raw) and room[begin:after - wrapped] == raw[begin:after] \
                    and room[:wrapped] == raw[:wrapped]
                at = end if end < len(raw) or not begin else 0
                return 0 if right else -errno.EPROTO
            to = (C.c_char * len(room)).from_buffer(room)
            filling = Filling(C.addressof(to), begin, C.pointer(ready), BEGIN(begins), None)
            checked(lib.view_file_fill(f, tree.cache, C.byref(filling), C.byref(err)), err, f"{path} from {begin}")
            assert ready.value == len(raw) and room[:-1] == raw and room[-1] == 0
        lib.view_file_close(f)


def test_readers_side_by_side(tree):
    raw = tree.whole("model.safetensors")
    f = tree.open(tree.files()["model.safetensors"])
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(40):
            offset, n = rng.randrange(len(raw)), rng.randrange(1, 300_000)
            if tree.extents(f, offset, n) != raw[offset: offset + n]:
                wrong.append((offset, n))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    tree.lib.view_file_close(f)
    assert not wrong


def test_lookups(tree):
    files = tree.files()
    for path, number in files.items():
        assert tree.walk(path) == tree.walk("/" + path + "/") == number
    assert tree.walk("") == tree.walk("/") == 0
    assert tree.walk("model/a.weight") == files["model/a.weight.npy"]
    assert tree.walk("model/b/../c") == files["model/b%2F..%2Fc.npy"]
    assert tree.node(tree.walk("model/" + "long" * 100)).kind == NPY
    assert tree.walk("model/none") == tree.walk("none") == tree.walk("model/a.weight.np") == ENOENT
    assert tree.walk("config.json/x") == ENOTDIR
    assert tree.lookup(0, "") == tree.lookup(0, "mode") == tree.lookup(0, "modelx") == tree.lookup(10**6, "x") == ENOENT
    assert tree.lookup(files["config.json"], "x") == ENOTDIR
    assert tree.open(0) == EISDIR and tree.open(10**6) == ENOENT
    assert tree.node(tree.lib.view_tree_count(tree.t)) is None


def test_attributes(tree):
    files = tree.files()
    step = tree.attributes(0)
    assert (step["run"], step["step"], step["attr.loss"], step["attr.note"]) == ("run", "1200", "2.31", 'say "hi"\n')
    assert len(step["manifest"]) == 64 and step["tensors"] == str(len(TENSORS))
    a = tree.attributes(files["model/a.weight.npy"])
    assert (a["name"], a["dtype"], a["shape"]) == ("a.weight", "f32", "[600, 700]")
    assert len(a["digest"]) == 64 and int(a["pieces"]) > 1 and int(a["stored_bytes"]) > 100_000 and a["codec"]
    assert tree.attributes(files["model/b%2F..%2Fc.npy"])["name"] == "b/../c"
    assert tree.attributes(files["model/%2Ehidden.npy"])["shape"] == "[]"
    assert tree.attributes(files["model/empty.npy"])["stored_bytes"] == "0"
    assert tree.attributes(files["model.safetensors"]) == {"tensors": "8"}
    blob = tree.attributes(files["1_Pooling/config.json"])
    assert (blob["name"], len(blob["digest"])) == ("1_Pooling/config.json", 64)
    assert tree.attributes(files["ranks/00000/rng"])["rank"] == "0"
    assert tree.attributes(files["manifest.json"]) == tree.attributes(tree.walk("model")) == {}
    assert "numpy" not in a


def test_how_numpy_reads_a_type_that_it_lacks(lib, store):
    types = {11: "ml_dtypes.bfloat16", 16: "ml_dtypes.float8_e4m3fn", 17: "ml_dtypes.float8_e5m2",
             18: "ml_dtypes.float8_e4m3fnuz",
             19: "ml_dtypes.float8_e5m2fnuz", 20: "ml_dtypes.float8_e8m0fnu", 21: "numpy.uint8"}
    saver = Saver(lib, store, b"void", 1)
    for code in range(1, 22):
        saver.tensor("model", str(code), code, (0,), b"")
    saver.commit([])
    t = Tree(lib, store, b"void", 1)
    said = {code: t.attributes(t.walk(f"model/{code}")).get("numpy") for code in range(1, 22)}
    assert said == {code: f"numpy.load(f).view({types[code]})" if code in types else None for code in range(1, 22)}
    t.close()


def test_same_numbers_every_time(tree):
    before = tree.files()
    tree.lib.view_tree_unref(tree.t)
    tree.build()
    assert tree.files() == before


def test_hundred_thousand_tensors(lib, store, scale):
    count = scale(20_000, 100_000)
    saver = Saver(lib, store, b"many", 0)
    source = saver.source(b"x" * 8)
    shape = Shape(1, (C.c_uint64 * 16)(8))
    for i in range(count):
        name = b"model.layers.%d.mlp.experts.%d.weight" % (i // 100, i)
        checked(lib.save_writer_tensor(saver.w, b"model", name, C.c_size_t(len(name)), C.c_int(2), C.byref(shape),
                                       source, C.byref(saver.err)), saver.err)
    saver.commit([(0, "model")])
    tree = Tree(lib, store, b"many", 0)
    lib.view_tree_unref(tree.t)
    start = time.process_time()
    tree.build()
    seconds = time.process_time() - start
    memory = lib.view_tree_memory(tree.t)
    print(f"{count} tensors: tree built in {seconds * 1000:.0f} ms, {memory / 1e6:.1f} MB")
    assert seconds < 3 and memory < 400 * count
    told = json.loads(tree.whole("manifest.json"))
    assert len(told["tensors"]) == count
    f = tree.open(tree.walk("model.safetensors"))
    size = lib.view_file_size(f)
    for at in (size - 8 * count, size - 4001):  # hundreds of tensors in one read, more than the file keeps open
        assert tree.read(f, at, 4001) == tree.extents(f, at, 4001) == b"x" * min(4001, size - at)
    lib.view_file_close(f)
    tree.close()
