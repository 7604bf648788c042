# SPDX-License-Identifier: Apache-2.0
"""core/save/plan_cache: a plan comes back for what it was made of, and for nothing else."""
import ctypes
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

import tensorlib as tl

F32, BF16 = 12, 11
DEFAULT = (128 << 10, 1 << 20, 512)


class Key(ctypes.Structure):
    _fields_ = [("digest", ctypes.c_uint8 * 32), ("ntensors", ctypes.c_uint32), ("rank", ctypes.c_uint32)]

    @property
    def hex(self):
        return bytes(self.digest).hex()


class KeyMesh(ctypes.Structure):
    _fields_ = [("mesh", ctypes.c_void_p), ("number", ctypes.c_uint32)]


class Builder(ctypes.Structure):
    _fields_ = [("hasher", ctypes.c_void_p), ("bytes", tl.Buf), ("meshes", tl.Buf), ("table", ctypes.c_void_p), ("ntable", ctypes.c_uint32), ("mask", ctypes.c_uint32),
                ("nmeshes", ctypes.c_uint32), ("ntensors", ctypes.c_uint32), ("rank", ctypes.c_uint32), ("last", KeyMesh),
                ("params", tl.GridParams), ("error", ctypes.c_int)]


class KeyTensor(ctypes.Structure):
    _fields_ = [("component", ctypes.c_char_p), ("name", ctypes.c_char_p), ("dtype", ctypes.c_uint32), ("local_ndim", ctypes.c_uint32),
                ("local_shape", ctypes.POINTER(ctypes.c_uint64)), ("strides", ctypes.POINTER(ctypes.c_int64))]


class Stats(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_uint32), ("disk", ctypes.c_uint32), ("misses", ctypes.c_uint32)]

    def tuple(self):
        return self.memory, self.disk, self.misses


def ref(x):
    return ctypes.byref(x)


def prototypes(lib):
    tl.load(lib)
    p = ctypes.c_void_p
    lib.save_plan_cache_new.restype, lib.save_plan_cache_new.argtypes = p, [ctypes.c_char_p, ctypes.c_uint64]
    lib.save_plan_cache_put.restype, lib.save_plan_cache_put.argtypes = ctypes.POINTER(tl.Plan), [p, p, p, p]
    lib.save_plan_cache_get.argtypes = [p, p, p, p]
    lib.save_plan_cache_give.argtypes = [p, p]
    lib.save_plan_cache_free.argtypes = [p]
    lib.save_plan_cache_stats.argtypes = [p, p]
    return lib


@pytest.fixture(scope="module", autouse=True)
def loaded(lib):
    return prototypes(lib)


def tensor(name, shape, mesh="dp=2,tp=2", words="R,S(0)", **more):
    return dict({"component": "model", "name": name, "shape": shape, "mesh": mesh, "ranks": None, "words": words, "dtype": F32, "item": 4,
                 "params": DEFAULT, "buffer": False, "flat": None, "boxes": None, "same": 0, "local": None, "strides": None}, **more)


def sample():
    """A save of rank 1 of four, with something of everything."""
    return {"rank": 1, "world": 4, "mesh": ("dp=4", None), "extra": b"", "tensors": [
        tensor("a.weight", (4096, 512), strides=(4096, 4), local=(2048, 512)),
        tensor("b.weight", (1000, 64), words="R,IS(0,2)"),
        tensor("c.weight", (1000, 64), words="SS(0,2),S(0)"),
        tensor("d.ragged", (12, 64), mesh="x=4", words="RS(0;1,2,0,3)"),
        tensor("e.mean", (640,), words="R,R", buffer=True),
        tensor("f.adam", (64, 100), words="R,R", flat=(100, 3300, 0), same=1, component="optimizer"),
        tensor("g.boxes", (10, 10), words="R,R", boxes=[((0, 0), (5, 10)), ((5, 0), (5, 5))], same=2),
        tensor("h.alone", (70000,), mesh=None, words="")]}


class Save:
    """A description as structs: what a saver would hold. Meshes are made anew by each; `own`: even by each tensor."""

    def __init__(self, lib, about, own=False):
        self.lib, self.about, self.keep, meshes = lib, about, [], {}

        def mesh(text, ranks):
            key = (text, ranks, len(self.keep) if own else 0)
            if key not in meshes:
                meshes[key] = tl.OwnedMesh(lib, text, ranks)
            return meshes[key]
        self.n = len(about["tensors"])
        self.array, self.more = (tl.PlanTensor * max(self.n, 1))(), (KeyTensor * max(self.n, 1))()
        self.tensors = tl.PlanTensors.of(self.array, self.n)
        for c, k, t in zip(self.array, self.more, about["tensors"]):
            if t["mesh"]:
                sharding = tl.OwnedSharding(lib, t["shape"], mesh(t["mesh"], t["ranks"]), t["words"], t["item"])
                self.keep.append(sharding)
                c.sharding = sharding.c
            else:
                c.sharding.shape, c.sharding.item_bytes = tl.Shape.of(t["shape"]), t["item"]
            c.params, c.buffer, c.same_dims = tl.GridParams(*t["params"]), t["buffer"], t["same"]
            if t["flat"]:
                c.flat = ctypes.pointer(tl.Flat(*t["flat"]))
            if t["boxes"]:
                pairs = [x for offset, size in t["boxes"] for pair in zip(offset, size) for x in pair]
                pairs = (ctypes.c_uint64 * len(pairs))(*pairs)
                c.boxes = ctypes.pointer(tl.Boxes(len(t["shape"]), len(t["boxes"]), len(t["boxes"]), pairs))
            k.component, k.name, k.dtype = t["component"].encode(), t["name"].encode(), t["dtype"]
            if t["strides"]:
                k.local_ndim = len(t["strides"])
                k.strides = (ctypes.c_int64 * k.local_ndim)(*t["strides"])
                k.local_shape = (ctypes.c_uint64 * k.local_ndim)(*t["local"])
        self.mesh = mesh(*about["mesh"]) if about["mesh"] else None
        self.meshes = meshes

    def key(self):
        b, key = Builder(), Key()
        self.lib.save_plan_key_init(ref(b), self.about["rank"], self.about["world"], self.mesh.pointer if self.mesh else None)
        for i in range(self.n):
            self.lib.save_plan_key_tensor(ref(b), ref(self.array[i]), ref(self.more[i]))
        if self.about["extra"]:
            self.lib.save_plan_key_bytes(ref(b), self.about["extra"], ctypes.c_size_t(len(self.about["extra"])))
        assert self.lib.save_plan_key_final(ref(b), ref(key)) == 0
        assert (key.ntensors, key.rank) == (self.n, self.about["rank"])
        return key

    def plan(self):
        plan, err = tl.Plan(), tl.Error()
        tl.check(self.lib.save_plan_make(ref(self.tensors), ctypes.c_uint32(self.about["rank"]), ref(plan), ref(err)), err)
        return plan


def content(save, plan):
    """Everything in a plan that counts."""
    boxes = []
    for i in range(plan.nboxes):
        b = plan.boxes[i]
        n = len(save.about["tensors"][b.tensor]["shape"])
        boxes.append((b.tensor, b.at.box.pair(n), b.at.local_offset, tuple(b.at.local_stride[:n]), b.pieces))
    return boxes, plan.pieces, plan.bytes, plan.shared_bytes, plan.held_bytes


class Cache:
    def __init__(self, lib, path=None, max_bytes=0):
        self.lib = lib
        self.p = lib.save_plan_cache_new(os.fsencode(path) if path else None, max_bytes)
        assert self.p

    def get(self, save, key=None):
        """(how, content or None)"""
        found, key = ctypes.POINTER(tl.Plan)(), key or save.key()
        how = self.lib.save_plan_cache_get(self.p, ref(key), ref(save.tensors), ref(found))
        if how == 0:
            return 0, None
        got = content(save, found.contents)
        self.lib.save_plan_cache_give(self.p, found)
        return how, got

    def put(self, save, key=None):
        plan, key = save.plan(), key or save.key()
        expected = content(save, plan)
        kept = self.lib.save_plan_cache_put(self.p, ref(key), ref(save.tensors), ref(plan))
        assert kept and not plan.boxes and plan.nboxes == 0
        assert content(save, kept.contents) == expected
        self.lib.save_plan_cache_give(self.p, kept)
        return expected

    def stats(self):
        s = Stats()
        self.lib.save_plan_cache_stats(self.p, ref(s))
        return s.tuple()

    def close(self):
        self.lib.save_plan_cache_free(self.p)
        self.p = None

    __del__ = close


def files(path):
    return sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file())


# ---- keys ----

def changed(field, value, index=0):
    def change(about):
        about["tensors"][index][field] = value
    return change


def swapped(about):
    about["tensors"][1:3] = about["tensors"][2:0:-1]


def fewer(about):
    about["tensors"].pop()


def of_save(field, value):
    def change(about):
        about[field] = value
    return change


def joined(about):
    """The same letters, the border between component and name elsewhere."""
    about["tensors"][0].update(component="modela", name=".weight")


CHANGES = {
    "rank": of_save("rank", 3), "world": of_save("world", 5), "no mesh of the save": of_save("mesh", None), "extra": of_save("extra", b"x"),
    "mesh of the save": of_save("mesh", ("dp=2,tp=2", None)), "its order": of_save("mesh", ("dp=4", (0, 2, 1, 3))),
    "component": changed("component", "ema"), "name": changed("name", "a.weights"), "border of the name": joined,
    "dtype": changed("dtype", BF16), "item": changed("item", 8), "dim 0": changed("shape", (4098, 512)), "dim 1": changed("shape", (4096, 513)),
    "ndim": changed("shape", (4096, 512, 1)), "another tensor's name": changed("name", "h.alon", 7), "transposed": changed("shape", (512, 4096)),
    "smallest piece": changed("params", (64 << 10, 1 << 20, 512)), "largest piece": changed("params", (128 << 10, 2 << 20, 512)),
    "row": changed("params", (128 << 10, 1 << 20, 1024)), "params of the last": changed("params", (64 << 10, 1 << 20, 512), 7),
    "stride": changed("strides", (8192, 4)), "inner stride": changed("strides", (4096, 8)), "negative stride": changed("strides", (-4096, 4)),
    "no strides": changed("strides", None), "local shape": changed("local", (2047, 512)),
    "mesh name": changed("mesh", "dp=2,ep=2"), "mesh size": changed("mesh", "dp=2,tp=3"), "mesh order": changed("ranks", (0, 2, 1, 3)),
    "mesh ranks": changed("ranks", (0, 1, 2, 7)), "mesh dims swapped": changed("mesh", "tp=2,dp=2"), "no mesh": changed("mesh", None),
    "placement": changed("words", "R,S(1)"), "placement swapped": changed("words", "S(0),R"), "replicated": changed("words", "R,R"),
    "interleaved": changed("words", "R,IS(0,4)", 1), "interleaved as strided": changed("words", "R,SS(0,2)", 1),
    "split": changed("words", "SS(0,3),S(0)", 2), "units": changed("words", "RS(0;2,1,0,3)", 3), "unit of the last": changed("words", "RS(0;1,2,0,1)", 3),
    "leading dims": changed("words", "RS(0,1;1,2,0,3)", 3), "buffer": changed("buffer", True), "no buffer": changed("buffer", False, 4),
    "flat from": changed("flat", (101, 3300, 0), 5), "flat to": changed("flat", (100, 3301, 0), 5), "flat len": changed("flat", (100, 3300, 6400), 5),
    "no flat": changed("flat", None, 5), "same dims": changed("same", 3, 5), "no same dims": changed("same", 0, 5),
    "same dims of a list": changed("same", 3, 6), "same dims of a plain one": changed("same", 1),
    "box": changed("boxes", [((0, 0), (5, 10)), ((5, 1), (5, 5))], 6), "box size": changed("boxes", [((0, 0), (5, 10)), ((5, 0), (4, 5))], 6),
    "fewer boxes": changed("boxes", [((0, 0), (5, 10))], 6), "order of boxes": changed("boxes", [((5, 0), (5, 5)), ((0, 0), (5, 10))], 6),
    "no boxes": changed("boxes", None, 6), "a mesh for it": changed("mesh", "one=1", 7), "order of tensors": swapped, "fewer tensors": fewer,
}


def test_every_ingredient_alone_changes_the_key(lib):
    base = Save(lib, sample()).key()
    cache = Cache(lib)
    cache.put(Save(lib, sample()))
    seen = {base.hex: "nothing"}
    for what, change in CHANGES.items():
        about = sample()
        change(about)
        assert about != sample(), what
        if what == "a mesh for it":
            about["tensors"][7]["words"] = "R"
        save = Save(lib, about)
        key = save.key()
        assert key.hex not in seen, (what, seen[key.hex])
        assert cache.get(save, key) == (0, None), what
        seen[key.hex] = what
    assert cache.get(Save(lib, sample()))[0] == 1
    assert cache.stats() == (1, 0, len(CHANGES))


def test_every_tensor_of_many_changes_the_key(lib):
    """A key is hashed in parts: what stands in any of them counts."""
    seen = {Save(lib, big()).key().hex}
    for i in range(0, 1000, 37):
        about = big()
        about["tensors"][i]["name"] += "x"
        seen.add(Save(lib, about).key().hex)
    assert len(seen) == 1 + len(range(0, 1000, 37))
    assert Save(lib, big()).key().hex in seen


def test_what_does_not_matter_does_not_change_the_key(lib):
    base = Save(lib, sample()).key().hex
    assert Save(lib, sample(), own=True).key().hex == base      # one mesh each, of equal content
    about = sample()
    about["tensors"][1].update(strides=(256, 4), local=(500, 64))   # row-major: as if nothing had been said
    assert Save(lib, about).key().hex == base
    one, other = sample(), sample()
    one["tensors"][0].update(shape=(1, 512), words="R,S(1)", strides=(7, 8), local=(1, 256))
    other["tensors"][0].update(shape=(1, 512), words="R,S(1)", strides=(9, 8), local=(1, 256))
    assert Save(lib, one).key().hex == Save(lib, other).key().hex
    empty = {"rank": 0, "world": 1, "mesh": None, "extra": b"", "tensors": []}
    assert Save(lib, empty).key().hex == Save(lib, empty).key().hex


def test_many_meshes(lib):
    """More than the table of pointers first has room for, and back."""
    about = sample()
    about["tensors"] = [tensor(f"t{i}", (8, 8), mesh=f"d{i % 50}=4", words="R") for i in range(500)]
    save, again = Save(lib, about, own=True), Save(lib, about)
    assert save.key().hex == again.key().hex
    about["tensors"][499]["mesh"] = "d0=4"
    assert Save(lib, about).key().hex != again.key().hex


# ---- memory ----

def numbered(i):
    about = sample()
    about["tensors"][0]["name"] = f"a.{i}"
    return about


def test_memory_keeps_what_was_used_last(lib):
    cache, saves = Cache(lib), [Save(lib, numbered(i)) for i in range(6)]
    expected = [cache.put(s) for s in saves[:4]]
    assert [cache.get(s) for s in saves[:4]] == [(1, e) for e in expected]
    assert cache.get(saves[0])[0] == 1
    cache.put(saves[4])     # in the place of number 1
    assert [cache.get(s)[0] for s in saves[:5]] == [1, 0, 1, 1, 1]
    cache.put(saves[4])     # a second time: nothing changes
    assert [cache.get(s)[0] for s in saves[:5]] == [1, 0, 1, 1, 1]


def test_a_plan_in_use_outlives_its_place(lib):
    cache, saves = Cache(lib), [Save(lib, numbered(i)) for i in range(9)]
    plan, key = saves[0].plan(), saves[0].key()
    expected = content(saves[0], plan)
    held = lib.save_plan_cache_put(cache.p, ref(key), ref(saves[0].tensors), ref(plan))
    for s in saves[1:]:
        cache.put(s)
    assert cache.get(saves[0])[0] == 0
    assert content(saves[0], held.contents) == expected
    lib.save_plan_cache_give(cache.p, held)
    lib.save_plan_cache_give(cache.p, None)


# ---- disk ----

def test_disk(lib, tmp_path):
    path = tmp_path / "a" / "b" / "plans"
    cache, save = Cache(lib, path), Save(lib, sample())
    assert cache.get(save) == (0, None) and not path.exists()
    expected = cache.put(save)
    [file] = files(path)
    assert file.relative_to(path) == pathlib.Path(save.key().hex[:2]) / save.key().hex
    assert file.stat().st_mode & 0o777 == 0o600 and path.stat().st_mode & 0o777 == 0o700
    other = Cache(lib, path)
    assert other.get(save) == (2, expected)
    assert other.get(save) == (1, expected)     # from memory from now on
    assert cache.stats() == (0, 0, 1) and other.stats() == (1, 1, 0)
    assert Cache(lib, path).get(Save(lib, numbered(1)))[0] == 0


def test_an_empty_plan_and_one_of_empty_tensors(lib, tmp_path):
    for about in ({"rank": 0, "world": 1, "mesh": None, "extra": b"", "tensors": []},
                  {"rank": 0, "world": 4, "mesh": None, "extra": b"", "tensors": [tensor("none", (0, 5)), tensor("scalar", (), words="R,R")]}):
        save = Save(lib, about)
        expected = Cache(lib, tmp_path).put(save)
        assert Cache(lib, tmp_path).get(save) == (2, expected)


def test_every_byte_of_a_file(lib, tmp_path):
    save = Save(lib, sample())
    expected = Cache(lib, tmp_path).put(save)
    [file] = files(tmp_path)
    whole, key = file.read_bytes(), save.key()
    cache = Cache(lib, tmp_path)
    for i in range(len(whole)):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1:])
        assert cache.get(save, key) == (0, None), i
    for cut in (0, 1, 103, 104, 135, 136, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert cache.get(save, key) == (0, None), cut
    file.write_bytes(whole + b"\0")
    assert cache.get(save, key) == (0, None)
    file.write_bytes(whole)
    assert cache.get(save, key) == (2, expected)


def test_more_boxes_than_there_is_memory_taken_before(lib, tmp_path):
    """The first plan from a file uses memory that the cache took when it was made, the next one does not; flat ranges, lists and
    plain tensors of equal shapes lie between each other."""
    for n in (3, 1023, 1024, 1025, 2500):
        about = sample()
        about["tensors"] = [tensor(f"t{i:05d}", *[((64, 100), "dp=2,tp=2", "R,S(0)"), ((64, 100), "dp=2,tp=2", "R,R"), ((64, 100), "dp=4", "S(1)"),
                                                  ((100, 64), "dp=4", "S(0)")][i % 4]) for i in range(n)]
        for i in range(1, n, 100):
            about["tensors"][i].update(flat=(100, 3300, 0), same=1)
        for i in range(5, n, 100):
            about["tensors"][i].update(boxes=[((0, 0), (64, 50))], same=1)
        save, other = Save(lib, about), Save(lib, sample())
        expected, second = Cache(lib, tmp_path).put(save), Cache(lib, tmp_path).put(other)
        cache = Cache(lib, tmp_path)
        assert [cache.get(save), cache.get(other), cache.get(save)] == [(2, expected), (2, second), (1, expected)]
        cache = Cache(lib, tmp_path)
        assert cache.get(Save(lib, numbered(n)))[0] == 0        # a miss takes it, too
        assert [cache.get(other), cache.get(save)] == [(2, second), (2, expected)]


def sealed(body):
    return body + hashlib.sha256(body).digest()


def test_a_file_with_a_right_digest_and_wrong_contents(lib, tmp_path):
    """Written by somebody else: whatever it says, no box reaches out of its tensor or its buffer."""
    save = Save(lib, sample())
    expected = Cache(lib, tmp_path).put(save)
    [file] = files(tmp_path)
    whole, cache, key = file.read_bytes(), Cache(lib, tmp_path), save.key()
    body = whole[:-32]
    values = (0, 1, 4, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    wrong = same = 0
    local_items = [2048 * 512, 500 * 64, 500 * 64, 4 * 64, 640, 3200, 75, 70000]
    for at in range(8, len(body) - 3, 4):
        for size in (4, 8):
            for value in values:
                if value >= 256**size or at + size > len(body):
                    continue
                bad = body[:at] + value.to_bytes(size, "little") + body[at + size:]
                file.write_bytes(sealed(bad))
                how, got = Cache(lib, tmp_path).get(save, key)
                same += bad == body
                wrong += how == 0
                for t, (offset, sizes), local, strides, _ in got[0] if how else ():    # boxes may be moved, not out of their tensor
                    assert all(o + n <= d for o, n, d in zip(offset, sizes, save.about["tensors"][t]["shape"]))
                    assert local + sum((n - 1) * x for n, x in zip(sizes, strides)) < local_items[t], (at, value)
                assert how == 0 or sum(b[4] for b in got[0]) == got[1] == expected[1]
    assert wrong > 500 and same > 10
    file.write_bytes(whole)
    assert cache.get(save, key) == (2, expected)


def test_a_plan_of_another_key_under_this_name(lib, tmp_path):
    one, other = Save(lib, sample()), Save(lib, numbered(1))
    Cache(lib, tmp_path).put(one)
    [file] = files(tmp_path)
    name = other.key().hex
    (tmp_path / name[:2]).mkdir(exist_ok=True)
    shutil.copy(file, tmp_path / name[:2] / name)
    assert Cache(lib, tmp_path).get(other)[0] == 0


def test_failures_are_silent(lib, tmp_path):
    save = Save(lib, sample())
    (tmp_path / "file").write_text("no directory")
    for path in (tmp_path / "file" / "plans", "/proc/none/plans", "x" * 5000):
        cache = Cache(lib, path)
        expected = cache.put(save)
        assert cache.get(save) == (1, expected)
        assert Cache(lib, path).get(save)[0] == 0
    part = tmp_path / "plans" / save.key().hex[:2]
    part.mkdir(parents=True)
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)):
        name = part / save.key().hex
        make(name)
        assert Cache(lib, tmp_path / "plans").get(save)[0] == 0
        name.rmdir() if name.is_dir() and not name.is_symlink() else name.unlink()


def test_the_directory_is_bounded(lib, tmp_path):
    """A 256th of the bound for each part: the oldest files go, what is used stays, strangers are left alone."""
    save = Save(lib, sample())
    Cache(lib, tmp_path).put(save)
    [file] = files(tmp_path)
    size, part = file.stat().st_size, file.parent
    names = []
    for i in range(9):
        names.append(part / (part.name + f"{i:062x}"))
        names[-1].write_bytes(bytes(size))
        os.utime(names[-1], (1000 + i, 1000 + i))
    stranger, left, fresh = part / "notes", part / f".{names[0].name}.0123456789abcdef", part / f".{names[0].name}.1123456789abcdef"
    for path in (stranger, left, fresh):
        path.write_bytes(b"x")
    os.utime(left, (1000, 1000))
    os.utime(file, (999, 999))
    assert Cache(lib, tmp_path).get(save)[0] == 2   # used: now it is the youngest
    file.unlink()
    Cache(lib, tmp_path, 256 * 5 * size).put(save)
    assert files(tmp_path) == sorted([file, *names[5:], stranger, fresh])
    Cache(lib, tmp_path, 256 * (size - 1)).put(save)    # too long: not written
    file.unlink()
    Cache(lib, tmp_path, 256 * (size - 1)).put(save)
    assert not file.exists()


def test_a_hit_makes_a_file_young(lib, tmp_path):
    save = Save(lib, sample())
    Cache(lib, tmp_path).put(save)
    [file] = files(tmp_path)
    os.utime(file, (1000, 1000))
    assert Cache(lib, tmp_path).get(save)[0] == 2
    assert time.time() - file.stat().st_mtime < 100


def test_the_default_directory(lib):
    room, saved = ctypes.create_string_buffer(4096), {k: os.environ.pop(k, None) for k in ("XDG_CACHE_HOME", "HOME")}
    try:
        for env, expected in (({}, None), ({"HOME": "/h"}, b"/h/.cache/vckpt/plans"), ({"HOME": "h"}, None),
                              ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, b"/x/vckpt/plans"), ({"HOME": "/h", "XDG_CACHE_HOME": "x"}, b"/h/.cache/vckpt/plans")):
            os.environ.update(env)
            r = lib.save_plan_cache_dir(room, ctypes.c_size_t(4096))
            assert (r, room.value) == (0, expected) if expected else r < 0, env
            for k in env:
                del os.environ[k]
        os.environ["HOME"] = "/" + "h" * 100
        assert lib.save_plan_cache_dir(room, ctypes.c_size_t(100)) < 0
    finally:
        os.environ.pop("HOME", None)
        os.environ.update({k: v for k, v in saved.items() if v is not None})


# ---- a restarted job ----

def big(n=1000):
    about = sample()
    about["tensors"] = [tensor(f"layers.{i:04d}.weight", (1024, 640) if i % 3 else (640,), words="R,S(0)" if i % 3 else "R,R",
                               component="model" if i % 2 else "optimizer") for i in range(n)]
    return about


CHILD = """
import ctypes, json, sys, time
import test_plan_cache as t
lib = t.prototypes(ctypes.CDLL({lib!r}))
save = t.Save(lib, t.big())
cache = t.Cache(lib, {path!r})
b, key, found = t.Builder(), t.Key(), ctypes.POINTER(t.tl.Plan)()
args = [(t.ref(save.array[i]), t.ref(save.more[i])) for i in range(save.n)]
start = time.perf_counter_ns()
lib.save_plan_key_init(t.ref(b), 1, 4, save.mesh.pointer)
tensor, at = lib.save_plan_key_tensor, t.ref(b)
for one, more in args:
    tensor(at, one, more)
assert lib.save_plan_key_final(t.ref(b), t.ref(key)) == 0
made = time.perf_counter_ns()
how = lib.save_plan_cache_get(cache.p, t.ref(key), t.ref(save.tensors), t.ref(found))
got = time.perf_counter_ns()
lib.save_plan_cache_give(cache.p, found)
again = lib.save_plan_cache_get(cache.p, t.ref(key), t.ref(save.tensors), t.ref(found))
kept = time.perf_counter_ns()
print(json.dumps([how, again, t.hashlib.sha256(repr(t.content(save, found.contents)).encode()).hexdigest(), made - start, got - made, kept - got]))
lib.save_plan_cache_give(cache.p, found)
"""


def test_a_new_process_plans_from_disk(lib, tmp_path, record_property):
    save = Save(lib, big())
    expected = Cache(lib, tmp_path).put(save)
    code = CHILD.format(lib=lib._name, path=str(tmp_path))
    preload = {"LD_PRELOAD": os.environ["VCKPT_PRELOAD"]} if "VCKPT_PRELOAD" in os.environ else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **preload})
    assert done.returncode == 0, done.stderr
    how, again, digest, key_ns, disk_ns, memory_ns = json.loads(done.stdout)
    assert (how, again) == (2, 1)
    assert digest == hashlib.sha256(repr(expected).encode()).hexdigest()
    for name, value in (("key_ns", key_ns), ("disk_ns", disk_ns), ("memory_ns", memory_ns), ("boxes", len(expected[0]))):
        record_property(name, value)
    print(f"\n1,000 tensors, {len(expected[0])} boxes: key {key_ns / 1e6:.3f} ms (through ctypes), from disk {disk_ns / 1e6:.3f} ms, "
          f"from memory {memory_ns / 1e6:.3f} ms")


def test_two_processes_share_a_directory(lib, tmp_path):
    """One after another they find what the other made."""
    save = Save(lib, big(50))
    one, two = Cache(lib, tmp_path), Cache(lib, tmp_path)
    expected = one.put(save)
    assert two.put(save) == expected    # over the other's file
    assert Cache(lib, tmp_path).get(save) == (2, expected)
    assert len(files(tmp_path)) == 1
