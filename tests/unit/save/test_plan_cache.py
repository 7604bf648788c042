# SPDX-License-Identifier: Apache-2.0
"""core/save: plan_key, plan_cache: a plan comes back for what it was made of, and for nothing else."""
import ctypes
import functools

import pytest

import tensorlib as tl

F32, BF16 = 12, 11
DEFAULT = (128 << 10, 1 << 20, 256, 32 << 10)


class Key(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 32)]

    @property
    def hex(self):
        return bytes(self.bytes).hex()


class Stats(ctypes.Structure):
    _fields_ = [("hits", ctypes.c_uint32), ("misses", ctypes.c_uint32)]

    def tuple(self):
        return self.hits, self.misses


class Planned(ctypes.Structure):
    _fields_ = [("plan", tl.Plan), ("layout", ctypes.c_void_p), ("layout_object", tl.Buf), ("numbers", ctypes.c_void_p),
                ("stores_layout", ctypes.c_bool)]


def ref(x):
    return ctypes.byref(x)


def prototypes(lib):
    tl.load(lib)
    p = ctypes.c_void_p
    lib.save_plan_cache_new.restype, lib.save_plan_cache_new.argtypes = p, []
    lib.save_plan_cache_put.restype, lib.save_plan_cache_put.argtypes = ctypes.POINTER(Planned), [p, p, p]
    lib.save_plan_cache_get.restype, lib.save_plan_cache_get.argtypes = ctypes.POINTER(Planned), [p, p]
    lib.save_plan_cache_give.argtypes = [p, p]
    lib.save_plan_cache_free.argtypes = [p]
    lib.save_plan_cache_stats.argtypes = [p, p]
    return lib


@pytest.fixture(scope="module", autouse=True)
def loaded(lib):
    return prototypes(lib)


def tensor(name, shape, mesh="dp=2,tp=2", words="R,S(0)", **more):
    return dict({"component": "model", "name": name, "shape": shape, "mesh": mesh, "ranks": None, "words": words,
                 "dtype": F32, "item": 4,
                 "buffer": False, "flat": None, "boxes": None, "same": 0, "local": None,
                 "strides": None}, **more)


def sample():
    """A save of rank 1 of four, with something of everything."""
    return {"rank": 1, "tensors": [
        tensor("a.weight", (4096, 512), strides=(4096, 4), local=(2048, 512)),
        tensor("b.weight", (1000, 64), words="R,IS(0,2)"),
        tensor("c.weight", (1000, 64), words="SS(0,2),S(0)"),
        tensor("d.ragged", (12, 64), mesh="x=4", words="RS(0;1,2,0,3)"),
        tensor("e.mean", (640,), words="R,R", buffer=True),
        tensor("f.adam", (64, 100), words="R,R", flat=(100, 3300, 0), same=1, component="optimizer"),
        tensor("g.boxes", (10, 10), words="R,R", boxes=[((0, 0), (5, 10)), ((5, 0), (5, 5))], same=2),
        tensor("h.alone", (70000,), mesh=None, words="")]}


@functools.cache
def mesh(lib, text, ranks):
    """One for all: the saver's."""
    return tl.OwnedMesh(lib, text, ranks)


class Save:
    """A description as structs: what a saver would hold."""

    def __init__(self, lib, about):
        self.lib, self.about, self.keep = lib, about, []
        self.n = len(about["tensors"])
        self.array = (tl.SaveTensor * max(self.n, 1))()
        for c, t in zip(self.array, about["tensors"]):
            if t["mesh"]:
                sharding = tl.OwnedSharding(lib, t["shape"], mesh(lib, t["mesh"], t["ranks"]), t["words"], t["item"])
                self.keep.append(sharding)
                c.sharding = sharding.c
            else:
                c.sharding.shape, c.sharding.item_bytes = tl.Shape.of(t["shape"]), t["item"]
            c.buffer, c.same_dims = t["buffer"], t["same"]
            if t["flat"]:
                c.flat = ctypes.pointer(tl.Flat(*t["flat"]))
            if t["boxes"]:
                pairs = [x for offset, size in t["boxes"] for pair in zip(offset, size) for x in pair]
                pairs = (ctypes.c_uint64 * len(pairs))(*pairs)
                c.boxes = ctypes.pointer(tl.Boxes(len(t["shape"]), len(t["boxes"]), len(t["boxes"]), pairs))
            c.component, c.name, c.dtype = t["component"].encode(), t["name"].encode(), t["dtype"]
            if t["strides"]:
                c.strides, c.local = (ctypes.c_int64 * len(t["strides"]))(*t["strides"]), tl.Shape.of(t["local"])

    def key(self):
        key = Key()
        assert self.lib.save_plan_key(self.array, ctypes.c_uint32(self.n), ref(key)) == 0
        return key

    def plan(self):
        return tl.make_plan(self.lib, self.array, self.n, DEFAULT, self.about["rank"])


def content(save, plan):
    """Everything in a plan that counts."""
    boxes = []
    for i in range(plan.nboxes):
        b = plan.boxes[i]
        n = len(save.about["tensors"][b.tensor]["shape"])
        boxes.append((b.tensor, b.at.box.pair(n), b.at.local_offset, tuple(b.at.local_stride[:n]), b.pieces))
    return boxes, plan.pieces, plan.bytes, plan.shared_bytes, plan.held_bytes


class Cache:
    def __init__(self, lib):
        self.lib = lib
        self.p = lib.save_plan_cache_new()
        assert self.p

    def get(self, save, key=None):
        """(found, content or None)"""
        found = self.lib.save_plan_cache_get(self.p, ref(key or save.key()))
        if not found:
            return False, None
        got = content(save, found.contents.plan)
        self.lib.save_plan_cache_give(self.p, found)
        return True, got

    def put(self, save, key=None):
        made, key = Planned(plan=save.plan()), key or save.key()
        expected = content(save, made.plan)
        kept = self.lib.save_plan_cache_put(self.p, ref(key), ref(made))
        assert kept and not made.plan.boxes and made.plan.nboxes == 0
        assert content(save, kept.contents.plan) == expected
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


# ---- keys ----

def changed(field, value, index=0):
    def change(about):
        about["tensors"][index][field] = value
    return change


def swapped(about):
    about["tensors"][1:3] = about["tensors"][2:0:-1]


def fewer(about):
    about["tensors"].pop()


def joined(about):
    """The same letters, the border between component and name elsewhere."""
    about["tensors"][0].update(component="modela", name=".weight")


CHANGES = {
    "component": changed("component", "ema"), "name": changed("name", "a.weights"), "border of the name": joined,
    "dtype": changed("dtype", BF16), "item": changed("item", 8), "dim 0": changed("shape", (4098, 512)),
    "dim 1": changed("shape", (4096, 513)),
    "ndim": changed("shape", (4096, 512, 1)), "another tensor's name": changed("name", "h.alon", 7),
    "transposed": changed("shape", (512, 4096)),
    "stride": changed("strides", (8192, 4)), "inner stride": changed("strides", (4096, 8)),
    "negative stride": changed("strides", (-4096, 4)),
    "no strides": changed("strides", None), "local shape": changed("local", (2047, 512)),
    "mesh name": changed("mesh", "dp=2,ep=2"), "mesh size": changed("mesh", "dp=2,tp=3"),
    "mesh order": changed("ranks", (0, 2, 1, 3)),
    "mesh ranks": changed("ranks", (0, 1, 2, 7)), "mesh dims swapped": changed("mesh", "tp=2,dp=2"),
    "no mesh": changed("mesh", None),
    "placement": changed("words", "R,S(1)"), "placement swapped": changed("words", "S(0),R"),
    "replicated": changed("words", "R,R"),
    "interleaved": changed("words", "R,IS(0,4)", 1), "interleaved as strided": changed("words", "R,SS(0,2)", 1),
    "split": changed("words", "SS(0,3),S(0)", 2), "units": changed("words", "RS(0;2,1,0,3)", 3),
    "unit of the last": changed("words", "RS(0;1,2,0,1)", 3),
    "leading dims": changed("words", "RS(0,1;1,2,0,3)", 3), "buffer": changed("buffer", True),
    "no buffer": changed("buffer", False, 4),
    "flat from": changed("flat", (101, 3300, 0), 5), "flat to": changed("flat", (100, 3301, 0), 5),
    "flat len": changed("flat", (100, 3300, 6400), 5),
    "no flat": changed("flat", None, 5), "same dims": changed("same", 3, 5), "no same dims": changed("same", 0, 5),
    "same dims of a list": changed("same", 3, 6), "same dims of a plain one": changed("same", 1),
    "box": changed("boxes", [((0, 0), (5, 10)), ((5, 1), (5, 5))], 6),
    "box size": changed("boxes", [((0, 0), (5, 10)), ((5, 0), (4, 5))], 6),
    "fewer boxes": changed("boxes", [((0, 0), (5, 10))], 6),
    "order of boxes": changed("boxes", [((5, 0), (5, 5)), ((0, 0), (5, 10))], 6),
    "no boxes": changed("boxes", None, 6), "a mesh for it": changed("mesh", "one=1", 7), "order of tensors": swapped,
    "fewer tensors": fewer,
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
        assert cache.get(save, key) == (False, None), what
        seen[key.hex] = what
    assert cache.get(Save(lib, sample()))[0] == 1
    assert cache.stats() == (1, len(CHANGES))


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
    assert Save(lib, sample()).key().hex == Save(lib, sample()).key().hex
    one, other = sample(), sample()
    one["tensors"][0].update(shape=(1, 512), words="R,S(1)", strides=(7, 8), local=(1, 256))
    other["tensors"][0].update(shape=(1, 512), words="R,S(1)", strides=(9, 8), local=(1, 256))
    assert Save(lib, one).key().hex == Save(lib, other).key().hex
    empty = {"rank": 0, "tensors": []}
    assert Save(lib, empty).key().hex == Save(lib, empty).key().hex


# ---- memory ----

def numbered(i):
    about = sample()
    about["tensors"][0]["name"] = f"a.{i}"
    return about


def test_memory_keeps_what_was_used_last(lib):
    cache, saves = Cache(lib), [Save(lib, numbered(i)) for i in range(6)]
    expected = [cache.put(s) for s in saves[:4]]
    assert [cache.get(s) for s in saves[:4]] == [(True, e) for e in expected]
    assert cache.get(saves[0])[0] == 1
    cache.put(saves[4])     # in the place of number 1
    assert [cache.get(s)[0] for s in saves[:5]] == [1, 0, 1, 1, 1]
    cache.put(saves[4])     # a second time: nothing changes
    assert [cache.get(s)[0] for s in saves[:5]] == [1, 0, 1, 1, 1]


def test_a_plan_in_use_outlives_its_place(lib):
    cache, saves = Cache(lib), [Save(lib, numbered(i)) for i in range(9)]
    made, key = Planned(plan=saves[0].plan()), saves[0].key()
    expected = content(saves[0], made.plan)
    held = lib.save_plan_cache_put(cache.p, ref(key), ref(made))
    for s in saves[1:]:
        cache.put(s)
    assert cache.get(saves[0])[0] == 0
    assert content(saves[0], held.contents.plan) == expected
    lib.save_plan_cache_give(cache.p, held)
    lib.save_plan_cache_give(cache.p, None)


def big(n=1000):
    about = sample()
    about["tensors"] = [tensor(f"layers.{i:04d}.weight", (1024, 640) if i % 3 else (640,),
                               words="R,S(0)" if i % 3 else "R,R",
                               component="model" if i % 2 else "optimizer") for i in range(n)]
    return about
