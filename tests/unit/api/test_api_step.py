# SPDX-License-Identifier: Apache-2.0
"""The reading half of vckpt.h through libvckpt.so: any box of a tensor, however it was stored, into any strided memory;
and every wrong argument refused by a sentence that names tensor and step."""
import ctypes as c
import errno
import itertools
import os
import pathlib
import random
import re
import subprocess
import threading

import numpy as np
import pytest

import test_load_boxes as boxes
from storelib import ABORT, Api as StoreApi, save
from test_load_boxes import T, Step as Writer, Params, api, proto, shapes, whole  # noqa: F401 (fixtures)
from test_save_load import Store, Tensor
from vckpt._lib import Attribute, BlobInfo, Commit, ErrorText as Error, Tensor as Described

NONE = 2**64 - 1
EDAMAGED = -errno.EBADMSG
u32, u64, i64, ptr = c.c_uint32, c.c_uint64, c.c_int64, c.c_void_p


class TensorInfo(c.Structure):
    _fields_ = [("component", c.c_char_p), ("name", c.POINTER(c.c_char)), ("name_len", u32), ("dtype", u32),
                ("ndim", u32),
                ("shape", c.POINTER(u64)), ("bytes", u64)]


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


def call(function, *args):
    err = Error(code=-7, text=b"what stood here before")
    code = function(*args, c.byref(err))
    if code < 0:
        assert err.code == code and err.text and b"before" not in err.text
        assert function(*args, None) == code       # without a place for the sentence
        raise Failed(code, err.text.decode())
    return code


def refused(code, pattern, function, *args):
    with pytest.raises(Failed) as e:
        call(function, *args)
    assert e.value.code == code and re.search(pattern, e.value.text), str(e.value)


@pytest.fixture(scope="module")
def v(build):
    lib = c.CDLL(str(build / "core" / "api" / "libvckpt.so"))
    lib.vckpt_version.restype = c.c_char_p
    lib.vckpt_step_number.restype = u64
    lib.vckpt_step_find.restype = lib.vckpt_step_blob_count.restype = i64
    lib.vckpt_step_attributes.restype = c.c_size_t
    lib.vckpt_step_tensor_count.restype = u32
    lib.vckpt_step_open.argtypes = [c.c_char_p, c.c_char_p, u64, ptr, ptr]
    lib.vckpt_step_read.argtypes = [ptr, u32, ptr, ptr, ptr, ptr]
    lib.vckpt_step_blob_read.argtypes = [ptr, u32, ptr, ptr]
    lib.vckpt_step_tensor.argtypes = lib.vckpt_step_blob.argtypes = [ptr, u32, ptr]
    for name in ("number", "world", "tensor_count", "close"):
        getattr(lib, "vckpt_step_" + name).argtypes = [ptr]
    lib.vckpt_step_find.argtypes = [ptr, c.c_char_p, c.c_char_p]
    lib.vckpt_step_blob_count.argtypes = [ptr, ptr]
    lib.vckpt_step_attributes.argtypes = [ptr, ptr]
    lib.vckpt_step_open_commit.argtypes = [c.c_char_p, c.c_char_p, ptr, ptr, ptr]
    lib.vckpt_step_commit.argtypes = [ptr, ptr]
    lib.vckpt_run_steps.argtypes = [c.c_char_p, c.c_char_p, ptr, ptr, ptr]
    lib.vckpt_mesh_new.argtypes = [c.c_char_p, ptr, u32, ptr, ptr]
    lib.vckpt_mesh_free.argtypes = [ptr]
    return lib


class Opened:
    def __init__(self, v, store, run="r", step=NONE):
        self.v, self.p = v, ptr()
        call(v.vckpt_step_open, os.fsencode(store), run.encode(), step, c.byref(self.p))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.v.vckpt_step_close(self.p)

    def find(self, name, component="model"):
        return self.v.vckpt_step_find(self.p, component.encode(), name.encode())

    def info(self, i):
        info = TensorInfo()
        assert self.v.vckpt_step_tensor(self.p, i, c.byref(info)) == 0
        return info

    def read(self, i, box, array):
        """`box`: [(offset, size)] or None; `array`: where it goes, of any strides."""
        pairs = (u64 * (2 * len(box) + 1))(*itertools.chain(*box)) if box is not None else None
        strides = (i64 * (array.ndim + 1))(*array.strides)
        return call(self.v.vckpt_step_read, self.p, i, pairs, array.ctypes.data, strides)


def some_box(rng, shape):
    out = []
    for n in shape:
        a = rng.randint(0, n)
        out.append(rng.choice([(0, n), (a, rng.randint(0, n - a)), (min(a, max(n - 1, 0)), min(n, 1))]))
    return out


def some_memory(rng, kind, box):
    """An array of the box's shape, filled with a pattern, inside of a larger one: any order of dimensions, gaps
    anywhere."""
    sizes = [n for _, n in box]
    order = rng.sample(range(len(sizes)), len(sizes))
    steps, spare = [rng.choice([1, 1, 2, 3]) for _ in sizes], [rng.choice([0, 0, 3]) for _ in sizes]
    around = np.full([sizes[d] * steps[d] + spare[d] for d in order], 77, kind)
    inner = around[tuple(slice(0, sizes[d] * steps[d], steps[d]) for d in order)]
    return around, inner.transpose(np.argsort(order)) if sizes else around


def check(step, t, rng, times):
    i = step.find(t.name)
    for _ in range(times):
        box = some_box(rng, t.shape)
        around, array = some_memory(rng, t.kind, box)
        want, view = around.copy(), tuple(slice(a, a + n) for a, n in box)
        inside = np.zeros(around.shape, bool)
        mask = np.lib.stride_tricks.as_strided(inside, array.shape, [s // array.itemsize for s in array.strides])
        mask[...] = True
        step.read(i, box, array)
        assert array.tobytes() == t.array[view].tobytes(), (t.name, t.shape, box, t.held)
        assert (around[~inside] == want[~inside]).all()        # nothing beside it
    full = np.empty(t.shape, t.kind)
    call(step.v.vckpt_step_read, step.p, i, None, full.ctypes.data, None)
    assert full.tobytes() == t.bytes


@pytest.mark.parametrize("seed", range(4))
def test_any_box_of_any_sharding(v, proto, shapes, tmp_path, seed, scale):  # noqa: F811
    rng = random.Random(seed)
    mesh = [(2,), (2, 2), (3, 2), (5,)][seed]
    tensors = boxes.random_tensors(shapes, rng, scale(30, 800), mesh)
    Writer(proto, tmp_path / "s", tensors, int(np.prod(mesh)), rng.choice([boxes.SMALL, Params(64, 256, 16)]))
    with Opened(v, tmp_path / "s") as step:
        assert (v.vckpt_step_tensor_count(step.p) == len(tensors) and v.vckpt_step_number(step.p) == 1 and
                v.vckpt_step_world(step.p) == int(np.prod(mesh)))
        for t in tensors:
            info = step.info(step.find(t.name))
            assert (info.component, c.string_at(info.name, info.name_len)) == (b"model", t.name.encode())
            assert (info.dtype, tuple(info.shape[:info.ndim]), info.bytes) == (boxes.KINDS[t.kind][0], t.shape,
                                                                               t.array.nbytes)
            check(step, t, rng, 6)


@pytest.fixture
def one(v, proto, tmp_path):  # noqa: F811
    """A step with a tensor of (600, 400) in two writers' columns, and an empty one."""
    held = {0: [[(0, 600), (0, 200)]], 1: [[(0, 600), (200, 200)]]}
    tensors = [T("w", "f4", (600, 400), held), T("none", "u1", (3, 0), {0: None})]
    Writer(proto, tmp_path / "s", tensors, 2, boxes.SMALL)
    with Opened(v, tmp_path / "s") as step:
        step.array = tensors[0].array
        yield step


def test_only_what_meets_the_box_is_read(one, tmp_path):
    """The other writer's pack may be gone."""
    [pack] = tmp_path.glob("s/packs/*/*-1-model.pack")
    pack.rename(tmp_path / "away")
    left, i = np.empty((600, 200), "f4"), one.find("w")
    one.read(i, [(0, 600), (0, 200)], left)
    assert (left.view("u4") == one.array[:, :200].view("u4")).all()
    with pytest.raises(Failed) as e:
        one.read(i, [(5, 1), (199, 2)], np.empty((1, 2), "f4"))
    assert "r/1: tensor model/w" in e.value.text and "-1-model" in e.value.text


def test_damage_is_an_error_with_names(one, tmp_path):
    [pack] = tmp_path.glob("s/packs/*/*-0-model.pack")
    data = bytearray(pack.read_bytes())
    data[4096 + 77] ^= 1
    pack.write_bytes(data)
    refused(EDAMAGED, r"^r/1: tensor model/w: piece \d+ of box \[0:600, 0:200\]: pack \S+-0-model, object at offset "
            r"\d+, block \d+: the stored bytes do not match their check", one.v.vckpt_step_read, one.p, one.find("w"),
            None, np.empty((600, 400), "f4").ctypes.data, None)


def test_what_is_wrong_is_refused_by_name(one):
    read, i, room = one.v.vckpt_step_read, one.find("w"), np.empty((600, 400), "f4")
    at, named = room.ctypes.data, "^r/1: tensor model/w: "

    def box(*pairs):
        return (u64 * 4)(*pairs)

    def strides(a, b):
        return (i64 * 2)(a, b)
    refused(-errno.EINVAL, named + "the box has 2 items from 599 on in dimension 0, which has 600", read, one.p, i,
            box(599, 2, 0, 1), at, None)
    refused(-errno.EINVAL, named + "the box", read, one.p, i, box(2**64 - 1, 2, 0, 1), at, None)
    refused(-errno.EINVAL, named + "the box", read, one.p, i, box(0, 1, 2**63, 2**63), at, None)
    refused(-errno.EINVAL, named + "no memory", read, one.p, i, None, None, None)
    refused(-errno.EINVAL, named + "the stride in dimension 1 is negative", read, one.p, i, None, at, strides(1600, -4))
    refused(-errno.EINVAL, named + "with a stride of 2 bytes in dimension 1", read, one.p, i, None, at,
            strides(1600, 2))
    refused(-errno.EINVAL, named + "with a stride of 0 bytes in dimension 0", read, one.p, i, None, at, strides(0, 4))
    refused(-errno.EINVAL, named + "with a stride of 1596 bytes in dimension 0", read, one.p, i, None, at,
            strides(1596, 4))
    refused(-errno.EINVAL, named + "a stride of 9.* leads out of memory", read, one.p, i, None, at,
            strides(2**63 - 1, 4))
    refused(-errno.ENOENT, "^r/1: there is no tensor 2", read, one.p, 2, None, at, None)
    refused(-errno.EINVAL, "no step", read, None, 0, None, at, None)
    assert read(one.p, i, box(7, 0, 0, 1), None, None, None) == 0      # nothing of it
    assert read(one.p, one.find("none"), None, None, None, None) == 0
    assert read(one.p, i, box(599, 1, 399, 1), at, strides(0, 0),
                None) == 0 and room.flat[0].view("u4") == one.array[599, 399].view("u4")
    info = TensorInfo()
    assert one.v.vckpt_step_tensor(one.p, 2,
                                   c.byref(info)) == -errno.ENOENT == one.v.vckpt_step_find(one.p, b"model", b"x")
    one.v.vckpt_step_close(None)


def test_several_threads_read_at_once(one):
    i, wrong = one.find("w"), []

    def run(seed):
        rng = random.Random(seed)
        for _ in range(30):
            a = some_box(rng, (600, 400))
            got = np.empty([n for _, n in a], "f4")
            one.read(i, a, got)
            if got.tobytes() != one.array[a[0][0]:a[0][0] + a[0][1], a[1][0]:a[1][0] + a[1][1]].tobytes():
                wrong.append(a)
    threads = [threading.Thread(target=run, args=(s,)) for s in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_child_after_a_fork_is_refused(one):
    pid = os.fork()
    if pid == 0:
        err = Error()
        code = one.v.vckpt_step_read(one.p, one.find("w"), None, np.empty((600, 400), "f4").ctypes.data, None,
                                     c.byref(err))
        blob = one.v.vckpt_step_blob(one.p, 0, (c.c_char * 64)())
        one.v.vckpt_step_close(one.p)
        os._exit(0 if code == blob == -errno.ECHILD and b"fork" in err.text else 1)
    assert os.waitpid(pid, 0)[1] == 0
    one.read(one.find("w"), None, np.empty((600, 400), "f4"))


# ---- stores, runs, steps, blobs ----

@pytest.fixture
def steps(v, api, tmp_path):  # noqa: F811
    store, rng = Store(api, tmp_path / "s"), np.random.default_rng(1)
    blobs = {("config.json", False): b"{}", ("rng", True): bytes(range(200)), ("long", False): rng.bytes(3_000_000),
             ("empty", False): b""}
    for n in (3, 70, 9):
        store.save("r", {("model", "a.b/c"): Tensor("i64", (), n.to_bytes(8, "little"))}, blobs, n,
                   attributes=[("loss", "2.31"), ("tag", "x")])
    store.close()
    return tmp_path / "s", blobs


def test_runs_and_steps(v, steps, tmp_path):
    path = os.fsencode(steps[0])
    array, n = c.POINTER(u64)(), c.c_size_t()
    call(v.vckpt_run_steps, path, b"r", c.byref(array), c.byref(n))
    assert array[:n.value] == [3, 9, 70]
    c.CDLL(None).free(array)
    refused(-errno.ENOENT, "has no run q", v.vckpt_run_steps, path, b"q", c.byref(array), c.byref(n))
    refused(-errno.EINVAL, "the name of a run", v.vckpt_run_steps, path, b"../r", c.byref(array), c.byref(n))
    with Opened(v, steps[0]) as newest, Opened(v, steps[0], step=9) as nine:
        assert v.vckpt_step_number(newest.p) == 70 and v.vckpt_step_number(nine.p) == 9
        value = np.zeros((), "i8")
        nine.read(nine.find("a.b/c"), [], value)
        assert value == 9
        table = c.POINTER(Attribute)()
        assert [(a.key, a.value) for a in table[:v.vckpt_step_attributes(nine.p, c.byref(table))]] == [
            (b"loss", b"2.31"), (b"tag", b"x")]
    step = ptr()
    refused(-errno.ENOENT, "no step 4", v.vckpt_step_open, path, b"r", 4, c.byref(step))
    refused(-errno.ENOENT, "no run", v.vckpt_step_open, path, b"q", NONE, c.byref(step))
    refused(-errno.EINVAL, "no path", v.vckpt_step_open, None, b"r", 4, c.byref(step))
    refused(-errno.EINVAL, "name of a run", v.vckpt_step_open, path, None, 4, c.byref(step))


def test_a_commit_is_opened_whatever_came_after_it(v, api, steps):
    """Replaced and removed ones, too; and no other one than was asked for."""
    path, commit, step = os.fsencode(steps[0]), Commit(), ptr()
    with Opened(v, steps[0], step=9) as nine:
        v.vckpt_step_commit(nine.p, c.byref(commit))
    with Opened(v, steps[0], step=70) as other:
        seventy = Commit()
        v.vckpt_step_commit(other.p, c.byref(seventy))
    assert commit.step == 9 and bytes(commit.manifest) != bytes(seventy.manifest) and commit.entry != seventy.entry
    StoreApi(api, steps[0], init=False).remove_step("r", 9)
    refused(-errno.ENOENT, "no step 9", v.vckpt_step_open, path, b"r", 9, c.byref(step))
    call(v.vckpt_step_open_commit, path, b"r", c.byref(commit), c.byref(step))
    value = np.zeros((), "i8")
    found = v.vckpt_step_find(step, b"model", b"a.b/c")
    call(v.vckpt_step_read, step, found, None, value.ctypes.data, None)
    assert value == 9 and v.vckpt_step_number(step) == 9
    v.vckpt_step_close(step)
    for wrong, words in ((Commit(9, seventy.entry, commit.manifest), "another commit in entry"),
                         (Commit(70, commit.entry, commit.manifest), "another commit in entry"),
                         (Commit(9, 99, commit.manifest), "no commit entry 99"),
                         (Commit(9, NONE, commit.manifest), "no commit entry")):
        refused(-errno.ENOENT, words, v.vckpt_step_open_commit, path, b"r", c.byref(wrong), c.byref(step))
    refused(-errno.EINVAL, "no commit", v.vckpt_step_open_commit, path, b"r", None, c.byref(step))
    refused(-errno.EINVAL, "name of a run", v.vckpt_step_open_commit, path, b"../r", c.byref(commit), c.byref(step))
    refused(-errno.ENOENT, "run q", v.vckpt_step_open_commit, path, b"q", c.byref(commit), c.byref(step))


def test_a_commit_is_opened_whose_entry_was_collected(v, lib, tmp_path):
    """What is visible says the same; a commit that was removed since is opened no more."""
    api, step = StoreApi(lib, tmp_path / "store"), ptr()
    path = os.fsencode(tmp_path / "store")
    with api.list("r") as l:
        while l.next < 40:
            l.put(api.entry(ABORT, attempt=b"%016x-0" % l.next, reason=b"x"))
    for number in (1, 2, 3):
        save(api, "r", number)
    wanted = []
    for number in (1, 2, 3):
        with Opened(v, tmp_path / "store", step=number) as opened:
            wanted.append(Commit())
            v.vckpt_step_commit(opened.p, c.byref(wanted[-1]))
    api.remove_step("r", 2)
    with api.list("r") as l:
        while l.next < 500:
            l.put(api.entry(ABORT, attempt=b"%016x-0" % l.next, reason=b"x"))
    api.gc(grace=3600)      # the second step's manifest keeps the head back
    api.gc()
    api.gc()
    for number in (1, 3):
        call(v.vckpt_step_open_commit, path, b"r", c.byref(wanted[number - 1]), c.byref(step))
        assert v.vckpt_step_number(step) == number
        v.vckpt_step_close(step)
    assert api.entry_path("r", wanted[2].entry).stat().st_nlink > 100
    refused(-errno.ENOENT, "no commit entry", v.vckpt_step_open_commit, path, b"r", c.byref(wanted[1]), c.byref(step))
    wrong = Commit(1, wanted[2].entry, wanted[0].manifest)
    refused(-errno.ENOENT, "another commit in entry", v.vckpt_step_open_commit, path, b"r", c.byref(wrong),
            c.byref(step))
    api.close()


def test_blobs(v, steps):
    with Opened(v, steps[0], step=3) as step:
        found = {}
        for i in range(call(v.vckpt_step_blob_count, step.p)):
            info = BlobInfo()
            assert v.vckpt_step_blob(step.p, i, c.byref(info)) == 0
            data = c.create_string_buffer(info.bytes + 1)
            call(v.vckpt_step_blob_read, step.p, i, data if info.bytes else None)
            found[info.name.decode(), bool(info.per_rank)] = data.raw[:info.bytes]
        assert found == steps[1]
        assert v.vckpt_step_blob(step.p, 99, c.byref(BlobInfo())) == -errno.ENOENT
        refused(-errno.ENOENT, "no blob 99", v.vckpt_step_blob_read, step.p, 99, None)
        refused(-errno.EINVAL, "^r/3: blob config.json: no memory", v.vckpt_step_blob_read, step.p, 0, None)


def test_stores(v, tmp_path):
    path = os.fsencode(tmp_path / "new")
    refused(-errno.EMEDIUMTYPE, "not a vckpt store", v.vckpt_store_check, os.fsencode(tmp_path))
    refused(-errno.ENOENT, "new", v.vckpt_store_check, path)
    call(v.vckpt_store_init, path)
    assert call(v.vckpt_store_check, path) == 0
    refused(-errno.EEXIST, "already|store", v.vckpt_store_init, path)
    for inner in [path + b"/inner", os.fsencode(tmp_path / "none/../new/inner")]:
        refused(-errno.EINVAL, f"inner is in the store {tmp_path}/new;", v.vckpt_store_init, inner)
    assert not (tmp_path / "new/inner").exists()
    for function in v.vckpt_store_init, v.vckpt_store_check:
        refused(-errno.EINVAL, "s3://bucket/x: this is a URL", function, b"s3://bucket/x")
    refused(-errno.EINVAL, "no path", v.vckpt_store_init, None)
    refused(-errno.EINVAL, "no path", v.vckpt_store_check, b"")


def test_meshes(v):
    mesh, ranks = ptr(), (u32 * 4)(7, 3, 2, 9)
    for text, r, n in ((b"dp=2,tp=2", None, 0), (b"dp=2, tp=2", ranks, 4)):
        call(v.vckpt_mesh_new, text, r, n, c.byref(mesh))
        v.vckpt_mesh_free(mesh)
    v.vckpt_mesh_free(None)
    refused(-errno.EINVAL, "ranks", v.vckpt_mesh_new, b"dp=2,tp=3", ranks, 4, c.byref(mesh))
    refused(-errno.EINVAL, "announced", v.vckpt_mesh_new, b"dp=4", None, 4, c.byref(mesh))
    refused(-errno.EINVAL, "no text", v.vckpt_mesh_new, None, None, 0, c.byref(mesh))


def test_only_the_interface_is_shown(v, build):
    out = subprocess.run(["nm", "-D", "--defined-only", str(build / "core" / "api" / "libvckpt.so")],
                         capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in out.splitlines()} - {"VCKPT_0"}
    folder = pathlib.Path(__file__).resolve().parents[3] / "core" / "api"
    header = "".join(path.read_text() for path in sorted(folder.glob("vckpt*.h")))
    declared = set(re.findall(r"\b(vckpt_\w+)\(", header))
    assert names and names <= declared
    assert v.vckpt_version().decode().count(".") == 2


# ---- which boxes a rank holds ----

def held(v, mesh, rank, shape, placements, flat=None, dtype=12, flags=0):
    """[(offsets, sizes, place, strides)] of a rank."""
    v.vckpt_tensor_boxes.argtypes = [ptr, u32, ptr, ptr, ptr]
    dims, three = (u64 * len(shape))(*shape), (u64 * 3)(*(flat or (0, 0, 0)))
    t = Described(shape=c.addressof(dims), mesh=mesh, placements=placements.encode(), flat=c.addressof(three) if flat
                  else None, ndim=len(shape),
                  dtype=dtype, flags=flags)
    found, n, d = c.POINTER(u64)(), c.c_size_t(), len(shape)
    call(v.vckpt_tensor_boxes, c.byref(t), rank, c.byref(found), c.byref(n))
    rows = np.array(found[:n.value * (3 * d + 1)], dtype=int).reshape(n.value, 3 * d + 1).tolist()
    c.CDLL(None).free(found)
    return [(row[:2 * d:2], row[1:2 * d:2], row[2 * d], row[2 * d + 1:]) for row in rows]


def test_boxes_of_a_rank(v):
    mesh = ptr()
    call(v.vckpt_mesh_new, b"dp=2,tp=2", None, 0, c.byref(mesh))
    assert held(v, mesh, 3, (4, 6), "S(0),S(1)") == [([2, 3], [2, 3], 0, [3, 1])]
    assert held(v, mesh, 1, (3, 2), "R,S(0)") == [([2, 0], [1, 2], 0, [2, 1])]
    assert held(v, mesh, 3, (1, 2), "S(0),R") == [] and held(v, mesh, 4, (4, 2), "S(0),R") == []
    assert held(v, mesh, 2, (8,), "S(0),SS(0,2)") == [([4], [1], 0, [1]), ([6], [1], 1, [1])]
    assert held(v, mesh, 0, (4, 6), "R,S(1)", flat=(2, 7, 0)) == [([0, 2], [1, 1], 0, [3, 1]),
                                                                  ([1, 0], [1, 3], 1, [3, 1]),
                                                                  ([2, 0], [1, 1], 4, [3, 1])]
    assert held(v, mesh, 0, (), "R,R") == [([], [], 0, [])]
    for sentence, rest in [("dimension", ((4,), "S(1),R")), (r"S\(x\)", ((4,), "S(x),R")),
                           ("dtype 99 is not known: it is one of enum vckpt_dtype, 1 to 21", ((4,), "R,R", None, 99)),
                           ("which VCKPT_TENSOR_BOXES and", ((4,), "R,R", None, 12, 4))]:
        with pytest.raises(Failed, match=sentence):
            held(v, mesh, 0, *rest)
    with pytest.raises(Failed, match="no mesh is given"):
        held(v, None, 0, (4,), "R,R")
    v.vckpt_mesh_free(mesh)
