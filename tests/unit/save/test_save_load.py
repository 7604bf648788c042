# SPDX-License-Identifier: Apache-2.0
"""What is saved comes back: any dtype and shape, any number of threads, any range, through any cache; and damage is an
error."""
import ctypes as c
import errno
import hashlib
import itertools
import os
import pathlib
import random
import struct
import threading
import types

import numpy as np
import pytest

import storelib
from forgelib import CHUNK, Forge, Message
from protolib import Manifest
from ranklib import Meddler, commit_in_flight

NONE = 2**64 - 1
DTYPES = {"bool": (1, 1), "u8": (2, 1), "i32": (8, 4), "f8_e5m2": (17, 1), "u16": (3, 2), "i64": (9, 8), "f16": (10, 2),
          "bf16": (11, 2), "f32": (12, 4), "f64": (13, 8),
          "c64": (14, 8), "c128": (15, 16), "f8_e4m3fn": (16, 1), "f4_e2m1fn_x2": (21, 1)}


class Error(c.Structure):
    _fields_ = [("code", c.c_int), ("text", c.c_char * 1000)]


class Shape(c.Structure):
    _fields_ = [("ndim", c.c_uint32), ("dim", c.c_uint64 * 16)]


READ = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_void_p, c.c_size_t, c.POINTER(Error))


class Source(c.Structure):
    _fields_ = [("read", READ), ("arg", c.c_void_p)]


class Attribute(c.Structure):
    _fields_ = [("key", c.c_char_p), ("value", c.c_char_p)]


class Options(c.Structure):
    _fields_ = [("run", c.c_char_p), ("step", c.c_uint64), ("replace", c.c_bool), ("attributes", c.POINTER(Attribute)),
                ("nattributes", c.c_size_t), ("threads", c.c_uint), ("no_index", c.c_bool), ("progress", c.c_void_p),
                ("progress_arg", c.c_void_p),
                ("cancelled", c.c_void_p), ("warn_free", c.c_uint64)]


class Result(c.Structure):
    _fields_ = [("step", c.c_uint64), ("entry", c.c_uint64), ("attempt", c.c_char * 48), ("tensors", c.c_uint64),
                ("blobs", c.c_uint64),
                ("bytes", c.c_uint64), ("pieces", c.c_uint64), ("pieces_new", c.c_uint64),
                ("pieces_reused", c.c_uint64),
                ("pieces_duplicate", c.c_uint64), ("piece_bytes_new", c.c_uint64), ("raw_bytes_new", c.c_uint64),
                ("bytes_reused", c.c_uint64),
                ("bytes_duplicate", c.c_uint64), ("bytes_encoded", c.c_uint64), ("bytes_again", c.c_uint64),
                ("bytes_no_base", c.c_uint64), ("meta_bytes", c.c_uint64),
                ("bases", c.c_uint32), ("digest_ns", c.c_uint64), ("encode_ns", c.c_uint64), ("read_ns", c.c_uint64),
                ("write_ns", c.c_uint64),
                ("pieces_believed", c.c_uint64), ("pieces_checked", c.c_uint64), ("pieces_compared", c.c_uint64),
                ("pieces_refuted", c.c_uint64), ("part", c.c_uint8 * 32), ("index_behind", c.c_bool)]


class TensorInfo(c.Structure):
    _fields_ = [("component", c.c_char_p), ("name", c.c_void_p), ("name_len", c.c_uint32), ("dtype", c.c_int),
                ("shape", Shape), ("bytes", c.c_uint64)]


class BlobInfo(c.Structure):
    _fields_ = [("name", c.c_char_p), ("per_rank", c.c_bool), ("rank", c.c_uint32), ("bytes", c.c_uint64),
                ("digest", c.c_uint8 * 32)]


class Piece(c.Structure):
    _fields_ = [("digest", c.c_uint8 * 32), ("offset", c.c_uint64), ("checks", c.c_uint64), ("raw_len", c.c_uint64),
                ("stored_len", c.c_uint64),
                ("codec", c.c_uint16), ("kind", c.c_uint8), ("pack", c.c_uint32), ("xxh", c.c_uint8 * 16),
                ("inline_bytes", c.c_void_p), ("base", c.c_uint32)]


class CacheStats(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("hits", "misses", "waits", "bytes", "max_bytes", "evictions", "decoded_bytes",
                                          "stored_bytes")]


class IndexStats(c.Structure):
    _fields_ = [("commits", c.c_uint64), ("places", c.c_uint64), ("bytes", c.c_uint64)]


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(f"{os.strerror(-code)}: {text}")
        self.code, self.text = code, text


@pytest.fixture(scope="module")
def api(lib):
    pointers = "commit_list_find load_cache_new load_object_piece load_object_digest load_step_manifest load_step_info"
    for name in pointers.split():
        getattr(lib, name).restype = c.c_void_p
    lib.load_step_tensor_find.restype = c.c_int64
    lib.load_object_piece_count.restype = lib.load_object_bytes.restype = c.c_uint64
    lib.load_cache_new.argtypes = [c.c_uint64]
    lib.save_writer_tensor.argtypes = [c.c_void_p, c.c_char_p, c.c_char_p, c.c_size_t, c.c_int, c.POINTER(Shape),
                                       Source, c.POINTER(Error)]
    lib.save_writer_blob.argtypes = [c.c_void_p, c.c_char_p, c.c_bool, c.c_uint64, Source, c.POINTER(Error)]
    lib.save_writer_header.argtypes = [c.c_void_p, c.c_char_p, c.c_char_p, c.c_char_p, c.c_size_t, c.c_uint64,
                                       c.POINTER(Error)]
    lib.load_object_read.argtypes = [c.c_void_p, c.c_void_p, c.c_uint64, c.c_size_t, c.c_void_p, c.POINTER(Error)]
    lib.commit_list_find.argtypes = [c.c_void_p, c.c_uint64]
    lib.load_object_piece.argtypes = [c.c_void_p, c.c_uint64]
    lib.load_step_tensor_find.argtypes = [c.c_void_p, c.c_char_p, c.c_char_p, c.c_size_t]
    lib.base_log_set_level(0)  # damage is what some of these tests are about
    return lib


def call(function, *args):
    err = Error()
    code = function(*args, c.byref(err))
    if code < 0:
        raise Failed(code, err.text.decode())
    return code


def raw(array):
    return np.ascontiguousarray(array).tobytes()


class Tensor:
    """A tensor of a step: bytes, a dtype by name, a shape."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, tuple(shape), bytes(data)
        assert len(self.data) == DTYPES[dtype][1] * int(np.prod(shape, dtype=object))

    @classmethod
    def random(cls, rng, dtype, shape, kind="noise"):
        n = DTYPES[dtype][1] * int(np.prod(shape, dtype=object))
        if kind == "noise":
            return cls(dtype, shape, rng.bytes(n))
        if kind == "zeros":
            return cls(dtype, shape, bytes(n))
        words = (rng.standard_normal(n // 2 + 1) * 0.02).astype(np.float32).view(np.uint32) >> 16
        return cls(dtype, shape, words.astype(np.uint16).tobytes()[:n])


class Store:
    def __init__(self, api, path):
        self.api, self.path = api, pathlib.Path(path)
        if not (self.path / "vckpt.store").exists():
            call(api.store_init, os.fsencode(path), c.c_uint64(0))
        self.handle = c.c_void_p()
        call(api.store_open, os.fsencode(path), 0, c.byref(self.handle))

    def close(self):
        self.api.store_close(self.handle)
        self.handle = c.c_void_p()

    def save(self, run, tensors, blobs=(), step=NONE, threads=0, no_index=True, replace=False, attributes=(),
             headers=(), fail_at=None, at_first_read=None, again=False):
        """tensors: {(component, name): Tensor}; blobs: {(name, per_rank): bytes}. fail_at: a source that fails after
        that many reads; again: then the same writer is asked once more, and nothing fails."""
        api, keep, reads, first = self.api, [], itertools.count(1), threading.Lock()  # threads read

        def source(data):
            held = c.create_string_buffer(data, max(len(data), 1))

            def read(arg, offset, to, n, err):
                with first:     # at_first_read is over before any thread has anything
                    count = next(reads)
                    if at_first_read and count == 1:
                        at_first_read()
                if fail_at is not None and count > fail_at:
                    return -5
                assert offset + n <= len(data)
                c.memmove(to, c.addressof(held) + offset, n)
                return 0
            function = READ(read)
            keep.extend([held, function])
            return Source(function, None)

        table = (Attribute * max(len(attributes), 1))(*[Attribute(k.encode(), v.encode()) for k, v in attributes])
        options = Options(run.encode(), step, replace, table, len(attributes), threads, no_index, None, None, None)
        w = c.c_void_p()
        call(api.save_writer_open, self.handle, c.byref(options), c.byref(w))
        try:
            for (component, name), t in tensors.items():
                shape = Shape(len(t.shape), (c.c_uint64 * 16)(*t.shape))
                call(api.save_writer_tensor, w, component.encode(), name.encode(), len(name.encode()),
                     DTYPES[t.dtype][0], c.byref(shape), source(t.data))
            for (name, per_rank), data in dict(blobs).items():
                call(api.save_writer_blob, w, name.encode(), per_rank, len(data), source(data))
            for component, view, data, data_bytes in headers:
                call(api.save_writer_header, w, component.encode(), view.encode(), data, len(data), data_bytes)
            result = Result()
            if again:
                with pytest.raises(Failed):
                    call(api.save_writer_commit, w, c.byref(result))
                fail_at = None
            call(api.save_writer_commit, w, c.byref(result))
            return result
        finally:
            api.save_writer_close(w)

    def update_index(self, rebuild=False):
        stats = IndexStats()
        call(self.api.save_index_update, self.handle, c.c_uint(2 if rebuild else 0), c.byref(stats))
        return stats

    def open(self, run, step):
        return Step(self, run, step)

    def files(self, prefix=""):
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file() and
                      str(p.relative_to(self.path)).startswith(prefix))


class Step:
    def __init__(self, store, run, step):
        self.api, self.store, self.handle = store.api, store, c.c_void_p()
        entries = c.c_void_p()
        call(self.api.commit_list_open, store.handle, run.encode(), c.c_bool(False), c.byref(entries))
        try:
            entry = self.api.commit_list_find(entries, step)
            if not entry:
                raise KeyError(step)
            call(self.api.load_step_open, store.handle, run.encode(), c.c_void_p(entry), c.byref(self.handle))
        finally:
            self.api.commit_list_close(entries)

    def close(self):
        self.api.load_step_unref(self.handle)

    def tensors(self):
        found = {}
        for i in range(self.api.load_step_tensor_count(self.handle)):
            info = TensorInfo()
            self.api.load_step_tensor_info(self.handle, i, c.byref(info))
            name = c.string_at(info.name, info.name_len).decode()
            found[info.component.decode(), name] = (i, info.dtype, tuple(info.shape.dim[:info.shape.ndim]), info.bytes)
            assert self.api.load_step_tensor_find(self.handle, info.component, name.encode(), len(name.encode())) == i
        return found

    def blobs(self):
        found = {}
        call(self.api.load_step_blobs, self.handle)
        for i in range(self.api.load_step_blob_count(self.handle)):
            info = BlobInfo()
            self.api.load_step_blob_info(self.handle, i, c.byref(info))
            found[info.name.decode(), info.per_rank] = (i, info.bytes, bytes(info.digest))
        return found

    def open(self, function, number):
        return Object(self.api, function, self.handle, number)

    def tensor(self, component, name):
        return self.open(self.api.load_tensor_open, self.tensors()[component, name][0])

    def blob(self, name, per_rank=False):
        return self.open(self.api.load_blob_open, self.blobs()[name, per_rank][0])


class Object:
    def __init__(self, api, function, step, number):
        self.api, self.handle = api, c.c_void_p()
        call(function, step, number, c.byref(self.handle))
        self.bytes = api.load_object_bytes(self.handle)

    def close(self):
        self.api.load_object_unref(self.handle)

    def read(self, cache, offset=0, n=None):
        n = self.bytes - offset if n is None else n
        out = c.create_string_buffer(n + 1)
        call(self.api.load_object_read, self.handle, cache, offset, n, out)
        return out.raw[:n]

    def read_box(self, cache, box, out):
        """Items of the box, [(offset, size), ...], into `out`, an array of its shape with any strides."""
        numbers = (c.c_uint64 * 32)()
        for d, (offset, size) in enumerate(box):
            numbers[d], numbers[16 + d] = offset, size
        strides = (c.c_uint64 * 16)(*out.strides)
        call(self.api.load_object_read_box, self.handle, cache, numbers, c.c_void_p(out.ctypes.data), strides)

    def pieces(self):
        return [Piece.from_address(self.api.load_object_piece(self.handle, i))
                for i in range(self.api.load_object_piece_count(self.handle))]

    def digest(self):
        return c.string_at(self.api.load_object_digest(self.handle), 32)


@pytest.fixture
def cache(api):
    made = c.c_void_p(api.load_cache_new(256 << 20))
    yield made
    api.load_cache_free(made)


@pytest.fixture
def make(api, tmp_path):
    made = []

    def make_store(name="store"):
        made.append(Store(api, tmp_path / name))
        return made[-1]
    yield make_store
    for store in made:
        store.close()


def check_all(store, run, step, tensors, blobs, cache):
    opened = store.open(run, step)
    try:
        assert set(opened.tensors()) == set(tensors)
        assert set(opened.blobs()) == set(blobs)
        for (component, name), t in tensors.items():
            number, dtype, shape, size = opened.tensors()[component, name]
            assert (dtype, shape, size) == (DTYPES[t.dtype][0], t.shape, len(t.data))
            o = opened.open(opened.api.load_tensor_open, number)
            assert o.read(cache) == t.data, (component, name, t.shape)
            o.close()
        for (name, per_rank), data in blobs.items():
            o = opened.blob(name, per_rank)
            assert o.read(cache) == data, name
            o.close()
    finally:
        opened.close()


SHAPES = [(), (0,), (1,), (3, 0, 5), (7,), (63,), (65,), (1000,), (1 << 20,), ((1 << 20) + 13,), (128, 128), (333, 517),
          (1024, 768), (2048, 4096),
          (1, 300000), (300000, 1), (5, 1, 70001), (64, 64, 3, 3), (512, 257, 3, 3), (17, 1031, 33), (2,) * 16,
          (40000, 31), (3, 40, 50, 60)]


def model(seed=1, kinds=("noise", "normal", "zeros")):
    rng = np.random.default_rng(seed)
    tensors = {}
    for i, shape in enumerate(SHAPES):
        dtype = list(DTYPES)[i % len(DTYPES)]
        if int(np.prod(shape, dtype=object)) * DTYPES[dtype][1] > 24 << 20:
            dtype = "u8"
        component = ("model", "optimizer", "ema")[i % 3]
        tensors[component, f"layer.{i}.weight/é"] = Tensor.random(rng, dtype, shape, kinds[i % len(kinds)])
    for dtype in DTYPES:
        tensors["model", f"all.{dtype}"] = Tensor.random(rng, dtype, (37, 1111), kinds[len(dtype) % len(kinds)])
    blobs = {("config.json", False): b'{"a": 1}' * 1000, ("empty", False): b"", ("sub/dir/x", False): rng.bytes(100000),
             ("rng", True): rng.bytes(5000),
             ("one", True): b"1"}
    return tensors, blobs


def test_all_comes_back(make, cache):
    store = make()
    tensors, blobs = model()
    result = store.save("a", tensors, blobs, step=12)
    assert result.step == 12 and result.tensors == len(tensors) and result.blobs == len(blobs)
    assert result.bytes == sum(len(t.data) for t in tensors.values()) + sum(map(len, blobs.values()))
    assert result.pieces >= result.pieces_new + result.pieces_duplicate and result.pieces_reused == 0
    check_all(store, "a", 12, tensors, blobs, cache)
    assert store.save("a", tensors, blobs).step == 13
    with pytest.raises(Failed) as e:
        store.save("a", tensors, blobs, step=12)
    assert e.value.code == -17
    store.save("a", {}, {}, step=12, replace=True)
    check_all(store, "a", 12, {}, {}, cache)
    assert not store.files("incoming/") and not store.files("hosts/")


def test_a_long_blob(make, cache):
    store = make()
    data = np.random.default_rng(7).bytes((17 << 20) + 11)
    store.save("a", {}, {("long", False): data, ("twin", False): data}, step=0)
    check_all(store, "a", 0, {}, {("long", False): data, ("twin", False): data}, cache)
    assert sum(os.path.getsize(store.path / f) for f in store.files("packs/")) < len(data) * 1.01 + 100000


def test_the_same_in_two_stores_and_by_any_number_of_threads(make):
    tensors, blobs = model(3)
    seen, packs = [], []
    for threads in (1, 2, 5):
        store = make(f"store{threads}")
        store.save("a", tensors, blobs, step=1, threads=threads)
        step = store.open("a", 1)
        digests = {}
        for key, (number, *_) in step.tensors().items():
            o = step.open(step.api.load_tensor_open, number)
            digests[key] = (o.digest(),
                            [(bytes(p.digest), p.offset, p.checks, p.stored_len, p.codec) for p in o.pieces()])
            o.close()
        digests.update({k: v[2] for k, v in step.blobs().items()})
        step.close()
        seen.append(digests)
        images = {}
        for f in store.files("packs/"):
            name = f.split("/")[-1].split("-", 3)[-1]
            image = (store.path / f).read_bytes()[4096:]  # the head has store id and name
            if name != "meta.pack":                       # the part has timings
                images[name] = hashlib.sha256(image).hexdigest()
        packs.append(images)
    assert seen[0] == seen[1] == seen[2]
    assert packs[0] == packs[1] == packs[2] and set(packs[0]) == {"model.pack", "optimizer.pack", "ema.pack",
                                                                  "blobs.pack"}


def test_equal_content_is_stored_once(make, cache):
    store = make()
    tensors, blobs = model(4, kinds=("noise",))
    first = store.save("a", tensors, blobs, step=0, no_index=False)
    store.update_index()
    again = store.save("b", tensors, blobs, step=5, no_index=False)
    assert again.pieces_new == 0 and again.piece_bytes_new == 0 and again.bases == 1
    assert again.pieces_reused + again.pieces_duplicate == first.pieces_new + first.pieces_duplicate
    assert [f for f in store.files("packs/") if again.attempt.decode() in f] == [f for f in store.files("packs/")
                                                                                 if again.attempt.decode() +
                                                                                 "-0-meta" in f]
    check_all(store, "b", 5, tensors, blobs, cache)
    store.update_index(rebuild=True)
    changed = dict(tensors)
    key = next(k for k, t in tensors.items() if t.shape == (1024, 768))
    t = tensors[key]
    changed[key] = Tensor(t.dtype, t.shape, t.data[:-1] + bytes([t.data[-1] ^ 1]))
    third = store.save("c", changed, blobs, step=0, no_index=False)
    assert third.pieces_new == 1
    check_all(store, "c", 0, changed, blobs, cache)


def test_equal_tensors_of_one_save_are_stored_once(make, cache):
    store = make()
    rng = np.random.default_rng(5)
    t = Tensor.random(rng, "f32", (512, 1024))
    one = store.save("a", {("model", "x"): t}, step=0)
    two = store.save("b", {("model", "x"): t, ("model", "y"): t, ("optimizer", "z"): t}, step=0)
    assert two.pieces_new == one.pieces_new and two.pieces_duplicate == 2 * one.pieces_new
    check_all(store, "b", 0, {("model", "x"): t, ("model", "y"): t, ("optimizer", "z"): t}, {}, cache)


def test_a_base_that_is_gone_is_written_anew(make, cache):
    store = make()
    tensors = {("model", "x"): Tensor.random(np.random.default_rng(6), "bf16", (777, 1024))}
    store.save("a", tensors, step=0, no_index=False)
    store.update_index()
    call(store.api.commit_step_remove, store.handle, b"a", c.c_uint64(0), None)
    again = store.save("b", tensors, step=0, no_index=False)
    assert again.pieces_reused == 0 and again.pieces_new > 0
    check_all(store, "b", 0, tensors, {}, cache)


def test_the_index_follows_what_is_removed(make, cache):
    store = make()
    tensors = {("model", "x"): Tensor.random(np.random.default_rng(6), "bf16", (777, 1024))}
    store.save("a", tensors, step=0)
    store.update_index()
    store.save("b", tensors, step=0, no_index=False)
    assert store.update_index().commits == 2
    call(store.api.commit_step_remove, store.handle, b"b", c.c_uint64(0), None)
    assert store.update_index().commits == 1
    again = store.save("c", tensors, step=0, no_index=False)
    assert again.pieces_new == 0 and again.bases == 1
    check_all(store, "c", 0, tensors, {}, cache)


def test_at_most_16_attempts_are_reused(make, cache):
    store = make()
    rng = np.random.default_rng(8)
    tensors = {}
    for i in range(20):
        tensors["model", f"t{i:02}"] = Tensor.random(rng, "u8", (1000,))
        store.save("a", {("model", f"t{i:02}"): tensors["model", f"t{i:02}"]}, step=i)
    store.update_index()
    result = store.save("b", tensors, step=0, no_index=False)
    assert result.pieces_reused == 16 and result.pieces_new == 4 and result.bases == 16
    check_all(store, "b", 0, tensors, {}, cache)


@pytest.mark.parametrize("bound", [0, 300 << 10, 64 << 20])
def test_any_range(make, api, scale, bound):
    store = make()
    tensors, blobs = model(9)
    blobs["long", False] = np.random.default_rng(1).bytes((3 << 20) + 5)
    store.save("a", tensors, blobs, step=0)
    step = store.open("a", 0)
    cache = c.c_void_p(api.load_cache_new(bound))
    rng = random.Random(bound)
    objects = [(step.tensor(*k), t.data) for k, t in tensors.items()
               if t.data] + [(step.blob(*k), d) for k, d in blobs.items() if d]
    for _ in range(scale(1500, 6000)):
        o, data = rng.choice(objects)
        offset = rng.randrange(len(data))
        n = rng.choice([1, 3, 16, 511, 4096, 5000, 131072, 1 << 20, 3 << 20])
        n = min(rng.choice([n, rng.randrange(1, n + 1)]), len(data) - offset)
        assert o.read(cache, offset, n) == data[offset:offset + n], (offset, n)
    with pytest.raises(Failed):
        objects[0][0].read(cache, 0, objects[0][0].bytes + 1)
    stats = CacheStats()
    api.load_cache_stat(cache, c.byref(stats))
    assert stats.misses and stats.bytes <= max(bound, 0)
    for o, _ in objects:
        o.close()
    step.close()
    api.load_cache_free(cache)


def test_readers_side_by_side(make, api):
    from concurrent.futures import ThreadPoolExecutor
    store = make()
    t = Tensor.random(np.random.default_rng(11), "bf16", (1024, 4096), "normal")
    store.save("a", {("model", "x"): t}, step=0)
    step = store.open("a", 0)
    o = step.tensor("model", "x")
    for bound in (1 << 20, 64 << 20):
        cache = c.c_void_p(api.load_cache_new(bound))
        offsets = [i << 17 for i in range(len(t.data) >> 17)] * 4
        random.Random(2).shuffle(offsets)
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda at: o.read(cache, at, 1 << 17) == t.data[at:at + (1 << 17)], offsets))
        stats = CacheStats()
        api.load_cache_stat(cache, c.byref(stats))
        if bound == 64 << 20:
            assert stats.decoded_bytes == len(t.data)  # every piece was filled once
        api.load_cache_free(cache)
    o.close()
    step.close()


def test_a_flipped_bit_is_an_error_and_nothing_else(make, api, scale):
    store = make()
    rng = np.random.default_rng(12)
    tensors = {("model", "raw"): Tensor.random(rng, "bf16", (512, 512)),
               ("model", "encoded"): Tensor.random(rng, "bf16", (512, 512), "normal"),
               ("model", "small"): Tensor.random(rng, "f32", (100,)),
               ("model", "inline"): Tensor.random(rng, "f32", (3,))}
    blobs = {("b", False): rng.bytes(50000)}
    store.save("a", tensors, blobs, step=0)
    errors = 0
    for _ in range(scale(150, 600)):
        path = store.path / random.choice(store.files("packs/"))
        good = path.read_bytes()
        at = random.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << random.randrange(8))]) + good[at + 1:])
        again, cache = Store(api, store.path), c.c_void_p(api.load_cache_new(1 << 20))
        try:
            step = again.open("a", 0)
            for key, data in [*((k, t.data) for k, t in tensors.items()), *((k, d) for k, d in blobs.items())]:
                try:
                    o = step.blob(*key) if key in blobs else step.tensor(*key)
                    try:
                        assert o.read(cache) == data
                    finally:
                        o.close()
                except Failed as e:
                    errors += 1
                    assert e.text
            step.close()
        except Failed as e:
            errors += 1
            assert e.text
        api.load_cache_free(cache)
        again.close()
        path.write_bytes(good)
    assert errors > 20


def test_a_failing_source_leaves_nothing(make, cache):
    store = make()
    tensors, blobs = model(13)
    store.save("a", tensors, blobs, step=0)
    before = store.files()
    for fail_at in (0, 3, 30, len(tensors) + 3):
        with pytest.raises(Failed) as e:
            store.save("a", tensors, blobs, step=1, fail_at=fail_at)
        assert e.value.code == -5 and ("tensor" in e.value.text or "blob" in e.value.text), e.value.text
        assert [f for f in store.files() if not f.startswith("runs/")] == [f for f in before
                                                                           if not f.startswith("runs/")]
    check_all(store, "a", 0, tensors, blobs, cache)


def test_bad_names_and_attributes_are_refused(make):
    store = make()
    t = Tensor("u8", (1,), b"x")
    for run in ("", ".x", "a/b", "x" * 129):
        with pytest.raises(Failed):
            store.save(run, {("model", "x"): t})
    for attributes in ([("1", "x")], [("a", "x"), ("a", "y")], [("a", "x" * 4097)]):
        with pytest.raises(Failed):
            store.save("a", {("model", "x"): t}, attributes=attributes)
    with pytest.raises(Failed):
        store.save("a", {("ranks", "x"): t})
    assert not store.files("runs/") and not store.files("packs/")


@pytest.mark.parametrize("lands", [True, False])
def test_what_the_abort_finds_is_told(make, lands):
    """Nobody can write to the list, until the writer gives up: it finds its commit there, and tells success; or it has
    aborted, and tells that."""
    store, tensors = make(), {("model", "w"): Tensor("f32", (100,), bytes(400))}
    m = Meddler(types.SimpleNamespace(p=c.cast(store.handle, c.POINTER(storelib.Store))))
    commit_in_flight(m, "run", lands)
    try:
        told = store.save("run", tensors, step=3)
    except Failed as e:
        told = e
    m.end()
    if lands:
        assert not isinstance(told, Failed) and told.step == 3, told
    else:
        assert told.code == -errno.ECANCELED and "in time" in told.text
    assert bool(store.files("packs")) == lands and not store.files("incoming")
    if lands:
        store.open("run", 3).close()


def test_a_view_header_comes_back(make, api):
    store = make()
    store.save("a", {("model", "x"): Tensor("u8", (1,), b"x")}, step=0,
               headers=[("model", "safetensors", b"header" * 1000, 1)])
    step = store.open("a", 0)
    out, n, data = c.c_void_p(), c.c_size_t(), c.c_uint64()
    call(api.load_step_header, step.handle, b"model", b"safetensors", c.c_uint64(1 << 20), c.byref(out), c.byref(n),
         c.byref(data))
    assert c.string_at(out, n.value) == b"header" * 1000 and data.value == 1
    with pytest.raises(Failed) as e:
        call(api.load_step_header, step.handle, b"model", b"npy", c.c_uint64(1 << 20), c.byref(out), c.byref(n),
             c.byref(data))
    assert e.value.code == -2
    step.close()


def test_a_view_header_that_no_reader_takes_is_not_stored(make, api):
    store, most = make(), 100_000_008
    with pytest.raises(Failed, match=f"the safetensors header of model has {most + 1} bytes; at most {most} "
                       f"are allowed"):
        store.save("a", {("model", "x"): Tensor("u8", (1,), b"x")}, step=0,
                   headers=[("model", "safetensors", bytes(most + 1), 1)])
    assert not store.files("packs") and not store.files("incoming")


# ---- unchanged pieces, by position ----

def several(seed=21, kinds=("noise", "normal")):
    rng = np.random.default_rng(seed)
    shapes = [("bf16", (1024, 4096)), ("f32", (512, 257, 3, 3)), ("f8_e4m3fn", (1000,)), ("f8_e5m2", (241,)),
              ("f8_e4m3fn", (240,)), ("f8_e5m2", (100,)), ("f32", (3,)), ("f32", ()),
              ("u8", (0,)), ("bf16", (300000,)), ("f64", (128, 128)), ("i32", (2000,))]
    return {(("model", "optimizer")[i % 2], f"t{i}"): Tensor.random(rng, d, s, kinds[i % len(kinds)])
            for i, (d, s) in enumerate(shapes)}


def changed(tensors, *keys):
    out = dict(tensors)
    for key in keys:
        t = out[key]
        at = len(t.data) * 2 // 3
        out[key] = Tensor(t.dtype, t.shape, t.data[:at] + bytes([t.data[at] ^ 1]) + t.data[at + 1:])
    return out


def places(store, run, step):
    """Of every piece: digest, XXH3-128, and where it lies."""
    opened, found = store.open(run, step), {}
    manifest = Manifest.from_address(store.api.load_step_manifest(opened.handle))
    assert manifest.nranks == 1
    for key, (number, *_) in opened.tensors().items():
        o = opened.open(opened.api.load_tensor_open, number)
        found[key] = [(bytes(p.digest), bytes(p.xxh), p.inline_bytes is None and
                       manifest.packs[store.api.load_step_pack(opened.handle, 0, p.pack)].pack, p.offset, p.checks,
                       p.raw_len)
                      for p in o.pieces()]
        o.close()
    opened.close()
    return found


def test_unchanged_pieces_are_recognised_at_their_place(make, cache):
    store, tensors = make(), several()
    first = store.save("a", tensors, step=0)
    again = store.save("a", tensors, step=1, no_index=False)  # there is no index at all
    small = 3  # of 240 and of 100 bytes, and integers: hashed
    assert (again.pieces_new, again.pieces_reused, again.bases) == (0, first.pieces_new, 1)
    assert again.pieces_believed == first.pieces_new - small and again.pieces_checked <= again.pieces_believed
    assert again.index_behind  # there is none: it has to be made
    assert places(store, "a", 0) == places(store, "a", 1)
    check_all(store, "a", 1, tensors, {}, cache)
    other = changed(tensors, ("model", "t0"), ("optimizer", "t5"))
    third = store.save("a", other, step=2, no_index=False)
    assert (third.pieces_new, third.bases) == (2, 1) and third.pieces_believed == again.pieces_believed - 1
    check_all(store, "a", 2, other, {}, cache)
    # Another shape or dtype, or another name: nothing is recognised by position.
    t = tensors["model", "t0"]
    moved = {("model", "t0"): Tensor("bf16", (4096, 1024), t.data),
             ("model", "t1"): Tensor("f16", t.shape, t.data[::-1])}
    fourth = store.save("a", moved, step=3, no_index=False)
    assert fourth.pieces_believed == 0
    check_all(store, "a", 3, moved, {}, cache)


def test_a_replaced_step_is_a_base(make, cache):
    store, tensors = make(), several()
    store.save("a", tensors, step=0)
    store.save("a", several(22), step=7)
    other = changed(tensors, ("model", "t0"))
    result = store.save("a", other, step=0, replace=True, no_index=False)
    assert result.pieces_new == 1 and result.index_behind
    check_all(store, "a", 0, other, {}, cache)


def test_no_index_looks_nowhere(make, cache):
    store, tensors = make(), several()
    first = store.save("a", tensors, step=0)
    store.update_index()
    result = store.save("a", tensors, step=1)
    assert result.pieces_new == first.pieces_new and result.pieces_believed == result.pieces_reused == result.bases == 0
    check_all(store, "a", 1, tensors, {}, cache)


def test_the_index_finds_a_base_for_what_follows(make, cache):
    store, tensors = make(), {("model", f"t{i:03}"): t for i, t in enumerate(list(several().values()) * 1)}
    rng = np.random.default_rng(23)
    tensors.update({("model", f"x{i:03}"): Tensor.random(rng, "bf16", (512, 2048)) for i in range(24)})
    first = store.save("a", tensors, step=0, no_index=False)
    store.update_index()
    again = store.save("b", tensors, step=0, no_index=False)
    assert again.pieces_new == 0 and again.pieces_reused == first.pieces_new and again.bases == 1
    assert again.pieces_believed > first.pieces_new // 2 and not again.index_behind
    check_all(store, "b", 0, tensors, {}, cache)


def test_places_do_not_depend_on_threads(make):
    """What two commits hold in packs of their own, and the index under the name of one of them, is referred to in the
    same place by any number of threads."""
    store, rng = make(), np.random.default_rng(24)
    tensors = {("model", f"x{i:02}"): Tensor.random(rng, "bf16", (512, 1024)) for i in range(20)}
    keys = sorted(tensors)
    store.save("a", tensors, step=0)
    store.save("b", changed(tensors, *keys[::3]), step=0)
    store.save("c", changed(tensors, *keys[::2]), step=0)
    store.update_index()
    mixed = changed(tensors, *keys[:10])
    results = [store.save(f"d{threads}", mixed, step=0, threads=threads, no_index=False) for threads in (1, 2, 3, 8)]
    found = []
    for threads, result in zip((1, 2, 3, 8), results):
        own = result.attempt
        found.append({k: [(p[0], p[1], p[2].replace(own, b"own"), *p[3:]) for p in v]
                      for k, v in places(store, f"d{threads}", 0).items()})
    assert found[0] == found[1] == found[2] == found[3]
    assert len({(r.pieces_new, r.pieces_reused, r.bases) for r in results}) == 1


@pytest.mark.parametrize("what", ["meta", "manifest", "no manifest"])
def test_a_damaged_base_is_not_used(make, cache, what):
    store, tensors = make(), several()
    first = store.save("a", tensors, step=0)
    store.close()
    path = (next((store.path / "packs").rglob("*-meta.pack")) if what == "meta"
            else next((store.path / "runs/a/manifests").iterdir()))
    good = path.read_bytes()
    if what == "meta":  # layout, rows and part
        path.write_bytes(good[:4096] + bytes(len(good) - 4096))
    elif what == "manifest":
        path.write_bytes(good[:60] + bytes([good[60] ^ 1]) + good[61:])
    else:
        path.unlink()
    store = make()
    result = store.save("a", tensors, step=1, no_index=False)
    assert (result.pieces_new, result.pieces_reused, result.pieces_believed) == (first.pieces_new, 0, 0)
    check_all(store, "a", 1, tensors, {}, cache)


def test_rows_that_are_damaged_are_as_if_they_were_not_there(make, cache, scale):
    """A flipped bit here and there in the base's meta pack, where layout, rows and part lie: a save never fails, and
    never believes what is not so."""
    store, tensors = make(), several()
    store.save("a", tensors, step=0)
    path = store.path / next(f for f in store.files("packs/") if "-meta.pack" in f)
    good = path.read_bytes()
    outcomes = set()
    for at in range(4096, len(good), (len(good) - 4096) // scale(12, 60)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1:])
        again = Store(store.api, store.path)
        result = again.save("a", tensors, step=1, no_index=False)
        outcomes.add(result.pieces_believed)
        # three are inline
        assert result.pieces_new + result.pieces_reused == result.pieces - 3 - result.pieces_duplicate
        check_all(again, "a", 1, tensors, {}, cache)
        call(again.api.commit_step_remove, again.handle, b"a", c.c_uint64(1), None)
        again.close()
        path.write_bytes(good)
    assert 0 in outcomes
    check_all(store, "a", 0, tensors, {}, cache)


def test_a_base_that_goes_meanwhile_is_written_anew(make, cache):
    """Recognised already, and then the commit cannot be named any more: the pieces are hashed after all."""
    store, tensors = make(), several()
    first = store.save("a", tensors, step=0)
    result = store.save("a", tensors, step=1, no_index=False,
                        at_first_read=lambda: call(store.api.commit_step_remove, store.handle, b"a", c.c_uint64(0),
                                                   None))
    assert result.pieces_new == first.pieces_new and result.pieces_reused == 0 and result.pieces_believed > 0
    check_all(store, "a", 1, tensors, {}, cache)


def deceive(lib, store, run, pairs, scratch):
    """As if memory had been flipped between the two hashes of each piece: what the step says of the first bytes is said
    of the second. This process believes its own records, so it is told that this one is."""
    forge = Forge(lib, store.path, run)
    seed, out, hashes = int.from_bytes(Message(forge.record_body(store.path / "vckpt.store", 1, None)).get(4),
                                       "little"), c.create_string_buffer(16), {}
    for pair in pairs:
        said = []
        for data in pair:
            lib.base_xxh128_of(c.c_uint64(seed), data, c.c_size_t(len(data)), out)
            said.append(out.raw)
        hashes[said[0]] = said[1]
    for kind, data in forge.objects:
        if kind != CHUNK:
            continue
        rows, runs, pieces = struct.unpack_from("<IIQ", data, 16)
        for at in range(64 + 64 * rows + 24 * runs + 32, 64 + 64 * rows + 24 * runs + 64 * pieces, 64):
            data[at:at + 16] = hashes.pop(bytes(data[at:at + 16]), bytes(data[at:at + 16]))
    assert not hashes
    forge.done(scratch)
    lib.save_trust_add(bytes(forge.manifest.get(11)[24:56]))


def test_hashes_that_disagree_are_found_on_the_way(make, lib, tmp_path):
    """One piece in some is hashed all the same: where a base says what is not so the save fails by name, and the piece
    is noted: no later save believes it."""
    rng, store = np.random.default_rng(4), make()
    right = {("model", f"t{i:05}"): Tensor.random(rng, "f32", (75,)) for i in range(12000)}
    flipped = changed(right, *right)
    store.save("a", flipped, step=0)
    deceive(lib, store, "a", [(flipped[key].data, right[key].data) for key in right], tmp_path / "scratch")
    pack = next(store.path.rglob("*-0-0-model.pack")).stem
    again = Store(store.api, store.path)
    with pytest.raises(Failed, match="tensor model/t.*: piece 0 has the XXH3-128 that an earlier step recorded at its "
                       "place, but another SHA-256") as e:
        again.save("a", right, step=1, no_index=False)
    assert e.value.code == -errno.EBADMSG
    assert [p.name for p in (store.path / "damaged").iterdir()] == [pack]
    noted = (store.path / "damaged" / pack).read_bytes()
    with pytest.raises(Failed):
        again.save("a", right, step=1, no_index=False)
    assert len((store.path / "damaged" / pack).read_bytes()) > len(noted)    # another piece
    again.close()


def test_at_most_16_attempts_by_position(make, cache, vckpt):
    store, rng = make(), np.random.default_rng(25)
    tensors = {("model", f"t{i:02}"): Tensor.random(rng, "u8", (1000,)) for i in range(24)}
    store.save("a", tensors, step=0)
    most = 0
    for step in range(1, 24):
        tensors = changed(tensors, ("model", f"t{step:02}"))
        result = store.save("a", tensors, step=step, no_index=False)
        attempts = {p[2].decode().rsplit("-", 2)[0] for v in places(store, "a", step).values() for p in v}
        others = attempts - {result.attempt.decode()}
        assert len(others) <= 16 and result.bases == len(others) and result.pieces_new == 24 - result.pieces_reused
        assert result.pieces_new == (1 if step != 17 else 1 + 9) # the eight largest of 17 stay
        assert result.bytes_again == 1000 * (result.pieces_new - 1)
        most = max(most, len(others))
        if step == 16:                       # the 17 attempts of this step
            store.update_index()
            result = store.save("b", tensors, step=0, no_index=False)
            assert result.pieces_new + result.pieces_reused == 24 and result.bases <= 16
            assert 0 < result.pieces_new <= 9 and result.bytes_again == 1000 * result.pieces_new
    assert most == 16
    for command in ("info", "stalls"):
        lines = vckpt(command, store.path, "a/17").stdout.splitlines()
        assert "8.8 KiB" in [line for line in lines if "again" in line][0]
    assert vckpt.json("info", store.path, "a/17")["again_bytes"] == 9000
    check_all(store, "a", 23, tensors, {}, cache)


# ---- opening ----

def test_a_writer_that_failed_chooses_anew(make, cache):
    """What the first try decided about the attempts of its bases says nothing about those of the second."""
    s, rng = make(), np.random.default_rng(5)
    tensors = {("model", f"{n:02}"): Tensor.random(rng, "u8", (1000,)) for n in range(12)}
    for n in range(12):     # a step of 12 attempts
        tensors["model", f"{n:02}"] = Tensor.random(rng, "u8", (1000,))
        s.save("r", tensors, no_index=False)
    tensors["model", "new"] = Tensor.random(rng, "u8", (1000,))
    result = s.save("r", tensors, no_index=False, fail_at=5, again=True)
    assert (result.pieces_new, result.bytes_again) == (1, 0)


def test_many_small_tensors_cost_a_few_chunks(make, cache):
    import time
    store = make()
    tensors = {("model", f"layer.{i:05}"): Tensor("f32", (1 + i % 30,),
                                                  np.full(1 + i % 30, i, dtype=np.float32).tobytes())
               for i in range(10000)}
    store.save("a", tensors, step=0)
    step = store.open("a", 0)
    numbers = list(range(len(tensors)))
    for order in (numbers, random.Random(3).sample(numbers, len(numbers))):
        keys, start = sorted(tensors), time.process_time()
        for i in order:
            o = step.open(step.api.load_tensor_open, i)
            assert o.read(cache) == tensors[keys[i]].data
            o.close()
        spent = time.process_time() - start
        print(f"\n{len(order)} tensors opened and read in {spent:.2f} s")
        assert spent < 10  # a chunk for each would be 18 s and more
    step.close()


def test_damage_is_told_once_a_piece(make, api, cache):
    store, rng = make(), np.random.default_rng(26)
    tensors = {("model", "x"): Tensor.random(rng, "bf16", (256, 2048))}
    store.save("a", tensors, step=0)
    path = store.path / next(f for f in store.files("packs/") if "model" in f)
    image = bytearray(path.read_bytes())
    for at in (4096 + 100, 4096 + (1 << 19) + 100):
        image[at] ^= 1
    path.write_bytes(image)
    lines = []
    sink = c.CFUNCTYPE(None, c.c_int, c.c_char_p)(lambda level, text: lines.append(text.decode()))
    api.base_log_set_level(1)
    api.base_log_set_sink(sink)
    try:
        step = store.open("a", 0)
        o = step.tensor("model", "x")
        for _ in range(20):
            with pytest.raises(Failed):
                o.read(cache)
        o.close()
        step.close()
    finally:
        api.base_log_set_sink(None)
        api.base_log_set_level(0)
    assert len(lines) == len(set(lines)) == 2, lines
