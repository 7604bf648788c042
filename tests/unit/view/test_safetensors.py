# SPDX-License-Identifier: Apache-2.0
"""safetensors headers: what the safetensors package writes is read alike, and every header that lies is refused by a
sentence that names the tensor."""
import ctypes
import json
import random
import struct
import time

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

FORMAT = -71  # -EPROTO
BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
         "U16": 2, "I16": 2,
         "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}
CODE = {"BOOL": 1, "U8": 2, "U16": 3, "U32": 4, "U64": 5, "I8": 6, "I16": 7, "I32": 8, "I64": 9, "F16": 10, "BF16": 11,
        "F32": 12, "F64": 13,
        "C64": 14, "F8_E4M3": 16, "F8_E5M2": 17, "F8_E4M3FNUZ": 18, "F8_E5M2FNUZ": 19, "F8_E8M0": 20, "F4": 21}


class Shape(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_uint32), ("dim", ctypes.c_uint64 * 16)]


class Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("name_len", ctypes.c_uint32), ("dtype", ctypes.c_int), ("shape", Shape),
                ("begin", ctypes.c_uint64), ("end", ctypes.c_uint64)]


class Attribute(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("value", ctypes.c_char_p)]


class Header(ctypes.Structure):
    _fields_ = [("tensors", ctypes.POINTER(Tensor)), ("ntensors", ctypes.c_uint32),
                ("metadata", ctypes.POINTER(Attribute)),
                ("nmetadata", ctypes.c_uint32), ("data_offset", ctypes.c_uint64), ("data_bytes", ctypes.c_uint64),
                ("memory", ctypes.c_void_p)]


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1000)]


class Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_size_t), ("size", ctypes.c_size_t), ("error", ctypes.c_int)]


@pytest.fixture(scope="module")
def parse(lib):
    """The header as (tensors, metadata, data offset, data bytes), or the sentence of its refusal."""
    def call(raw, file_size=None):
        h, err = Header(), Error()
        code = lib.view_safetensors_parse(raw, ctypes.c_size_t(len(raw)),
                                          ctypes.c_uint64(len(raw) if file_size is None else file_size),
                                          ctypes.byref(h), ctypes.byref(err))
        if code < 0:
            assert code == FORMAT and err.text and b"\n" not in err.text
            return err.text.decode()
        tensors = [(ctypes.string_at(t.name, t.name_len).decode(), t.dtype, tuple(t.shape.dim[: t.shape.ndim]), t.begin,
                    t.end)
                   for t in h.tensors[: h.ntensors]]
        metadata = [(a.key.decode(), a.value.decode()) for a in h.metadata[: h.nmetadata]]
        result = tensors, metadata, h.data_offset, h.data_bytes
        lib.view_safetensors_release(ctypes.byref(h))
        return result
    return call


def raw_file(text, data=b"", length=None):
    if not isinstance(text, bytes):
        text = (text if isinstance(text, str) else json.dumps(text)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# ---- what is legal ----

names = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1,
                max_size=40).filter(lambda n: n != "__metadata__")


@settings(max_examples=150, deadline=None)
@given(tensors=st.dictionaries(names,
                               st.tuples(st.sampled_from(["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8",
                                                          "i8", "f8"]),
                                         st.lists(st.integers(0, 4), max_size=4)), max_size=8),
       metadata=st.none() |
       st.dictionaries(names, st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)),
                                      max_size=20), min_size=1, max_size=4))
def test_files_of_the_package(parse, tensors, metadata):
    arrays = {n: np.zeros(shape, dtype) for n, (dtype, shape) in tensors.items()}
    raw = safetensors.numpy.save(arrays, metadata)
    length = struct.unpack("<Q", raw[:8])[0]
    told = json.loads(raw[8: 8 + length])
    told_metadata = told.pop("__metadata__", {})
    got, got_metadata, offset, size = parse(raw[: 8 + length], len(raw))
    assert (offset, size) == (8 + length, len(raw) - 8 - length)
    assert sorted(got) == sorted((n, CODE[t["dtype"]], tuple(t["shape"]), *t["data_offsets"]) for n, t in told.items())
    assert [t[3:] for t in got] == sorted(t[3:] for t in got)
    assert dict(got_metadata) == told_metadata and [k for k, _ in got_metadata] == sorted(told_metadata, key=str.encode)


@pytest.mark.parametrize("dtype", BYTES)
def test_every_dtype(parse, dtype):
    size = 6 * BYTES[dtype]
    assert parse(raw_file({"a": entry(dtype, (2, 3), 0, size)},
                          b"\0" * size))[0] == [("a", CODE[dtype], (2, 3), 0, size)]
    item = BYTES[dtype]
    assert parse(raw_file({"a": entry(dtype, (), 0, item)}, b"\0" * item))[0] == [("a", CODE[dtype], (), 0, item)]


def test_f4_counts_elements_in_the_file_and_pairs_here(parse):
    assert parse(raw_file({"a": entry("F4", (3, 6), 0, 9)}, b"\0" * 9))[0] == [("a", 21, (3, 3), 0, 9)]
    assert "'a'" in parse(raw_file({"a": entry("F4", (3, 5), 0, 8)}, b"\0" * 8))
    assert "even" in parse(raw_file({"a": entry("F4", (), 0, 1)}, b"\0"))


def test_legal_oddities(parse):
    tensor = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    one = ([("a", 2, (1,), 0, 1)], [])
    for text in ["{%s}" % tensor, "{%s}     " % tensor, "{ %s\n, \"__metadata__\" :\t{} }" % tensor,
                 '{"__metadata__":{},%s}' % tensor,
                 '{"\\u0061":{"data_offsets":[0,1],"shape":[ 1 ],"dtype":"\\u0055\\u0038"}}']:
        assert parse(raw_file(text, b"x"))[:2] == one
    assert parse(raw_file("{}")) == ([], [], 10, 0)
    assert parse(raw_file('{"__metadata__":{"b":"2","a":"\\ud83d\\ude00"}}'))[1] == [("a", "😀"), ("b", "2")]
    long = "n" * 65535
    assert parse(raw_file({long: entry()}, b"\0" * 4))[0][0][0] == long


def test_legal_names(parse):
    for name in ["/", "..", "a/../b", "\x01\x1f\x7f", "x" * 300, "é😀", '"\\', "%2F", " ", "__metadata__ "]:
        assert parse(raw_file({name: entry()}, b"\0" * 4))[0][0][0] == name
        assert parse(raw_file(json.dumps({name: entry()}, ensure_ascii=False), b"\0" * 4))[0][0][0] == name


def test_zero_size_tensors_may_lie_anywhere_between(parse):
    header = {"z": entry("F32", (0,), 4, 4), "a": entry(), "y": entry("F32", (0, 3), 0, 0), "b": entry(begin=4, end=8)}
    assert [t[0] for t in parse(raw_file(header, b"\0" * 8))[0]] == ["y", "a", "z", "b"]


def test_hundred_thousand_tensors(parse, lib):
    order = list(range(100_000))
    random.Random(1).shuffle(order)
    text = "{%s}" % ",".join(
        '"model.layers.%d.mlp.experts.%d.weight":{"dtype":"BF16","shape":[1,2],"data_offsets":[%d,%d]}'
                             % (i // 100, i, 4 * i, 4 * i + 4) for i in order)
    raw = raw_file(text)
    h, err = Header(), Error()
    start = time.process_time()
    assert lib.view_safetensors_parse(raw, ctypes.c_size_t(len(raw)), ctypes.c_uint64(len(raw) + 400_000),
                                      ctypes.byref(h), ctypes.byref(err)) == 0
    seconds = time.process_time() - start
    assert h.ntensors == 100_000
    lib.view_safetensors_release(ctypes.byref(h))
    print(f"{seconds * 1000:.0f} ms")
    assert seconds < 3  # a bound against quadratic work; measured 0.1 s


# ---- what lies ----

def two(**more):
    return {"a": entry(), "b": {**entry(begin=4, end=8), **more}}


LIES = {
    "offsets that overlap": ({"a": entry("F32", (2,), 0, 8), "b": entry(begin=4, end=8)}, 8,
                             ["'b'", "overlaps", "'a'"]),
    "offsets that leave a gap": ({"a": entry(), "b": entry(begin=8, end=12)}, 12, ["'b'", "gap of 4"]),
    "a gap at the front": ({"a": entry(begin=4, end=8)}, 8, ["'a'", "gap"]),
    "offsets that run backwards": ({"a": entry(begin=4, end=0)}, 4, ["'a'", "backwards"]),
    "offsets past the end": ({"a": entry(), "b": entry(begin=4, end=8)}, 7, ["'b'", "ends at byte 8", "7"]),
    "data behind the last": ({"a": entry(), "b": entry(begin=4, end=8)}, 9, ["'b'", "1 byte follows"]),
    "data without tensors": ({}, 1, ["1 byte follows"]),
    "the same place twice": ({"a": entry(), "b": entry()}, 4, ["'b'", "overlaps"]),
    "too few bytes": ({"a": entry("F32", (2,), 0, 4)}, 4, ["'a'", "needs 8", "span 4"]),
    "too many bytes": ({"a": entry("F32", (1,), 0, 8)}, 8, ["'a'", "needs 4"]),
    "a product that overflows": ({"a": entry("F32", (2**32, 2**32, 2**32), 0, 4)}, 4, ["'a'", "overflows"]),
    "a product that wraps to the size": ({"a": entry("U8", (2**32, 2**32), 0, 0)}, 0, ["'a'", "overflows"]),
    "an overflow hidden by a zero": ({"a": entry("U8", (2**40, 2**40, 0), 0, 0)}, 0, ["'a'", "overflows"]),
    "a number over 64 bits": ({"a": entry("U8", (2**64,), 0, 0)}, 0, ["'a'", "overflows"]),
    "an offset over 64 bits": ({"a": entry("U8", (1,), 2**64, 2**64 + 1)}, 0, ["'a'", "overflows"]),
    "an unknown dtype": (two(dtype="F31"), 8, ["'b'", "'F31'"]),
    "F6 by name": (two(dtype="F6_E2M3"), 8, ["'b'", "'F6_E2M3'"]),
    "a lower-case dtype": (two(dtype="f32"), 8, ["'b'", "'f32'"]),
    "a dtype with NUL": (two(dtype="F32\0"), 8, ["'b'", "F32\\x00"]),
    "an unknown key": (two(stride=[1]), 8, ["'b'", "'stride'"]),
    "17 dimensions": (two(shape=[1] * 17), 8, ["'b'", "16 dimensions"]),
    "a shape that is no list": (two(shape=4), 8, ["'b'", "not a list"]),
    "a negative dimension": (two(shape=[-1]), 8, ["'b'", "natural number"]),
    "a fraction": (two(shape=[1.0]), 8, ["'b'", "natural number"]),
    "a string as dimension": (two(shape=["1"]), 8, ["'b'", "natural number"]),
    "true as dimension": (two(shape=[True]), 8, ["'b'", "natural number"]),
    "nested shape": (two(shape=[[1]]), 8, ["'b'", "natural number"]),
    "three offsets": (two(data_offsets=[4, 8, 12]), 8, ["'b'", "not two"]),
    "one offset": (two(data_offsets=[4]), 8, ["'b'", "not two"]),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, 4, ["'a'", "data_offsets is missing"]),
    "no dtype": ({"a": {"data_offsets": [0, 4], "shape": [1]}}, 4, ["'a'", "dtype is missing"]),
    "nothing": ({"a": {}}, 0, ["'a'", "missing"]),
    "a tensor that is a list": ({"a": []}, 0, ["'a'", "not an object"]),
    "a tensor that is null": ({"a": None}, 0, ["'a'", "not an object"]),
    "an empty name": ({"": entry()}, 4, ["name is empty"]),
    "NUL in a name": ({"a\0b": entry()}, 4, ["a\\x00b", "NUL"]),
    "a name of 65,536 bytes": ({"n" * 65536: entry()}, 4, ["nnn...", "65535"]),
    "half a surrogate pair": ('{"a\\ud800":{}}', 0, ["surrogate"]),
    "the wrong half": ('{"a\\udc00":{}}', 0, ["surrogate"]),
    "two high halves": ('{"a\\ud800\\ud800":{}}', 0, ["surrogate"]),
    "broken UTF-8 in a name": (b'{"a\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, ["a\\xff", "UTF-8"]),
    "an overlong character": (b'{"\xc0\xaf":{}}', 0, ["\\xc0\\xaf", "UTF-8"]),
    "a surrogate in UTF-8": (b'{"\xed\xa0\x80":{}}', 0, ["UTF-8"]),
    "a cut character": (b'{"\xe2\x82":{}}', 0, ["UTF-8"]),
    "a bare control character": (b'{"a\nb":{}}', 0, ["control"]),
    "an unknown escape": ('{"\\x41":{}}', 0, ["escape"]),
    "a short escape": ('{"\\u00', 0, ["escape"]),
    "a bad escape": ('{"\\u00g0":{}}', 0, ["hex"]),
    "a name twice": ('{"a":%s,"b":%s,"a":%s}' % (json.dumps(entry()), json.dumps(entry(begin=4, end=8)),
                                                 json.dumps(entry(begin=8, end=12))), 12,
                     ["'a'", "twice"]),
    "a name twice, once escaped": ('{"a":%s,"\\u0061":%s}' % (json.dumps(entry()), json.dumps(entry(begin=4, end=8))),
                                   8, ["'a'", "twice"]),
    "a key twice": ('{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0,
                    ["'a'", "dtype is given twice"]),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0, ["__metadata__", "twice"]),
    "metadata that is a list": ('{"__metadata__":[]}', 0, ["__metadata__", "not an object"]),
    "a metadata key twice": ('{"__metadata__":{"k":"1","k":"2"}}', 0, ["'k'", "twice"]),
    "metadata that is not a string": ('{"__metadata__":{"k":1}}', 0, ["'k'", "not a string"]),
    "NUL in metadata": ('{"__metadata__":{"k":"\\u0000"}}', 0, ["'k'", "NUL"]),
    "broken UTF-8 in metadata": (b'{"__metadata__":{"k":"\xff"}}', 0, ["'k'", "UTF-8"]),
    "no JSON": ("hello", 0, ["not a JSON object"]),
    "nothing at all": ("", 0, ["not a JSON object"]),
    "only zeros": (b"\0" * 64, 0, ["not a JSON object"]),
    "a list": ("[]", 0, ["not a JSON object"]),
    "a leading space": (" {}", 0, ["not a JSON object"]),
    "a cut object": ('{"a":{"dtype":"U8"', 0, ["'a'", "does not end"]),
    "a cut name": ('{"a', 0, ["does not end"]),
    "no comma": ('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"b":{}}', 0, ["comma"]),
    "a trailing comma": ('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},}', 0, ["name is missing"]),
    "a second object": ('{}{}', 0, ["follow"]),
    "newlines behind": ('{}\n', 0, ["follow"]),
    "NULs behind": (b'{}\0', 0, ["follow"]),
    "200,000 brackets": ("[" * 200_000, 0, ["not a JSON object"]),
    "200,000 nested objects": ('{"a":' * 200_000, 0, ["'a'"]),
    "brackets in a shape": ('{"a":{"shape":' + "[" * 200_000, 0, ["'a'"]),
    "brackets in an unknown key": ('{"a":{"x":' + "[" * 200_000, 0, ["'a'", "'x'"]),
    "leading zeros": ('{"a":{"shape":[01]}}', 0, ["'a'", "natural"]),
    "an exponent": ('{"a":{"shape":[1e3]}}', 0, ["'a'", "natural"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(parse, lie):
    text, size, words = LIES[lie]
    said = parse(raw_file(text, b"\0" * size))
    assert isinstance(said, str), f"accepted: {said}"
    assert all(w in said for w in words) and len(said) < 1000, said


def test_lies_about_lengths(parse):
    assert "shorter than 8" in parse(b"1234567")
    assert "shorter than 8" in parse(b"")
    assert "limit" in parse(raw_file("{}", length=100_000_001), 10**10)
    assert "limit" in parse(raw_file("{}", length=2**64 - 1))
    assert "file ends" in parse(raw_file("{}", length=3))
    assert "file ends" in parse(raw_file("{}", length=99_999_999))


def test_every_cut_of_a_good_file_is_refused(parse):
    good = raw_file({"__metadata__": {"k": "v"}, "a": entry(), "é": entry(begin=4, end=8)}, b"\0" * 8)
    assert not isinstance(parse(good), str)
    for n in range(len(good)):
        assert isinstance(parse(good[:n]), str)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flips_never_crash(parse, data):
    good = bytearray(raw_file({"__metadata__": {"k": "v"}, "a\u00e9": entry(), "b": entry("BF16", (1, 2), 4, 8)},
                              b"\0" * 8))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 9))] = data.draw(st.integers(0, 255))
    assert isinstance(parse(bytes(good)), (str, tuple))


# ---- headers made here ----

class Params(ctypes.Structure):
    _fields_ = [("min_bytes", ctypes.c_uint64), ("target_bytes", ctypes.c_uint64), ("row_bytes", ctypes.c_uint64),
                ("small_bytes", ctypes.c_uint64)]


@pytest.fixture(scope="module")
def make(lib):
    """The made header of component 0 and the bytes of its data; the code where it fails."""
    libc = ctypes.CDLL(None)
    lib.store_layout_builder_new.restype = ctypes.c_void_p

    def call(tensors, metadata=(), component=b"model", number=0):
        b, err = ctypes.c_void_p(lib.store_layout_builder_new(Params(128 << 10, 1 << 20, 256, 32 << 10))), Error()
        for at, (name, dtype, dims) in enumerate(tensors):
            raw = name.encode()
            shape = Shape(len(dims), (ctypes.c_uint64 * 16)(*dims))
            assert lib.store_layout_builder_add(b, component, raw, ctypes.c_size_t(len(raw)), ctypes.c_int(dtype),
                                                ctypes.byref(shape),
                                                ctypes.c_uint32(at), ctypes.byref(err)) == 0, err.text
        layout, made, tags = ctypes.c_void_p(), Buffer(), ctypes.c_void_p()
        assert lib.store_layout_builder_finish(b, ctypes.byref(layout), ctypes.byref(made), ctypes.byref(tags),
                                               ctypes.byref(err)) == 0, err.text
        lib.base_buf_release(ctypes.byref(made))
        libc.free(tags)
        pairs = (Attribute * max(1, len(metadata)))(*[Attribute(k.encode(), v.encode()) for k, v in metadata])
        size = ctypes.c_uint64()
        code = lib.view_safetensors_make(layout, ctypes.c_uint32(number), pairs, ctypes.c_uint32(len(metadata)),
                                         ctypes.byref(made), ctypes.byref(size))
        raw = ctypes.string_at(made.data, made.len) if code == 0 else code
        lib.base_buf_release(ctypes.byref(made))
        lib.store_layout_free(layout)
        lib.store_layout_builder_free(b)
        return raw, size.value
    return call


ITEM = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 2, 12: 4, 13: 8, 14: 8, 16: 1, 17: 1, 20: 1,
        21: 1}
SPELLED = {v: k for k, v in CODE.items()}


@settings(max_examples=100, deadline=None)
@given(tensors=st.dictionaries(names, st.tuples(st.sampled_from(sorted(ITEM)),
                                                st.lists(st.sampled_from([0, 1, 2, 3, 64, 100]), max_size=3)),
                               min_size=1, max_size=12),
       metadata=st.dictionaries(names, names, max_size=3))
def test_made_headers(parse, make, tensors, metadata):
    given_tensors = [(n, dtype, dims) for n, (dtype, dims) in tensors.items() if dtype != 21 or dims]
    if not given_tensors:
        return
    head, size = make(given_tensors, sorted(metadata.items(), key=lambda p: p[0].encode()))
    assert (head, size) == make(given_tensors[::-1], sorted(metadata.items(), key=lambda p: p[0].encode()))
    assert len(head) % 4096 == 0 and struct.unpack("<Q", head[:8])[0] == len(head) - 8
    got, got_metadata, offset, data = parse(head, len(head) + size)
    assert (offset, data) == (len(head), size) and dict(got_metadata) == {"format": "pt", **metadata}
    assert {(n, t, d) for n, t, d, *_ in got} == {(n, t, tuple(d)) for n, t, d in given_tensors}

    def key(t):
        return ((t[4] - t[3]) % 4096 != 0, -ITEM[t[1]], t[0].encode())
    by_place = sorted(got, key=key)
    at = 0
    for n, t, d, begin, end in by_place:  # the rule's order, each aligned to its item
        assert begin == at and begin % ITEM[t] == 0 and ((end - begin) % 4096 or begin % 4096 == 0)
        at = end
    told = json.loads(head[8:])
    for n, t, d in given_tensors:
        assert told[n]["dtype"] == SPELLED[t] and told[n]["shape"] == ([*d[:-1], d[-1] * 2] if t == 21 else list(d))


def test_made_headers_open_with_the_package(make, tmp_path):
    dims = {n: (3, i + 2) for i, n in enumerate(["a", "é/..", "b\n\"\\", "c"])}
    head, size = make([(n, 12, d) for n, d in dims.items()], [("k", "v\n"), ("zz", "1")])
    data = np.random.default_rng(1).bytes(size)
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + data)
    told = json.loads(head[8:])
    with safetensors.safe_open(path, "np") as f:
        assert f.metadata() == {"format": "pt", "k": "v\n", "zz": "1"} and sorted(f.keys()) == sorted(dims)
        for n, d in dims.items():
            begin, end = told[n]["data_offsets"]
            assert f.get_tensor(n).shape == d and f.get_tensor(n).tobytes() == data[begin:end]


def test_made_headers_leave_out_what_the_format_lacks(parse, make):
    head, size = make([("a", 15, (2,)), ("__metadata__", 12, (1,)), ("f4", 21, ()), ("b", 12, (1,))])
    assert [t[0] for t in parse(head, len(head) + size)[0]] == ["b"] and size == 4
    head, size = make([("a", 15, (2,))])
    assert parse(head, len(head)) == ([], [("format", "pt")], 4096, 0)


def test_metadata_may_name_its_own_format(make):
    for pairs in [[("format", "np")], [("a", "1"), ("format", "np"), ("z", "2")]]:
        head, _ = make([("a", 12, (1,))], pairs)
        assert json.loads(head[8:])["__metadata__"] == dict(pairs)


def test_no_header_over_the_limit(make):
    assert make([("%s%06d" % ("n" * 65000, i), 2, (0,)) for i in range(1400)])[0] == -27  # -EFBIG


def test_many_names_and_keys(parse):
    """Names and keys are sorted to find one that is given twice."""
    n = 60_000
    names = [json.dumps(f"t{i * 7919 % n}") for i in range(n)]
    tensor = ':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    keys = ",".join(f'"k{i * 7919 % n}":""' for i in range(n))
    began = time.process_time()
    for extra_key, extra_name, sentence in (("", "", None), (',"k77":"x"', "", "the key 'k77' is given twice"),
                                            ("", f',"t77"{tensor}', "tensor 't77': its name is given twice")):
        header = f'{{"__metadata__":{{{keys}{extra_key}}},{",".join(name + tensor for name in names)}{extra_name}}}'
        raw = struct.pack("<Q", len(header)) + header.encode()
        out = parse(raw)
        assert (sentence in out) if sentence else (len(out[0]), len(out[1])) == (n, n)
    assert time.process_time() - began < 20
