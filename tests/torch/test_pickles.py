# SPDX-License-Identifier: Apache-2.0
"""Byte entries of a DCP state as vckpt reads them: every plain value comes back as what it was, out of an archive of
torch.save and out of a pickle of each protocol; and of hostile ones nothing runs, and nothing takes long."""
import collections
import io
import os
import pathlib
import pickle
import resource
import struct
import zipfile

import numpy as np
import pytest
import torch

from vckpt import pickles
from vckpt.pickles import Refused, decoded, reencoded


def saved(value, protocol=None):
    """As an archive of torch.save, or as a pickle."""
    if protocol is not None:
        return pickle.dumps(value, protocol)
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def opened(entry):
    return torch.load(io.BytesIO(entry), weights_only=False) if entry[:2] == b"PK" else pickle.loads(entry)


def same(a, b):
    """Also their types, the order of what has one, and the bits of numbers."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad, a.is_conj(), a.is_neg()) == (
            b.dtype, b.shape, b.stride(), b.requires_grad, b.is_conj(), b.is_neg())
        a, b = ([*one.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(
            -1).view(torch.uint8)] if one.numel() else [] for one in (a, b))
        return a == b
    if isinstance(a, np.ndarray):
        assert a.flags.f_contiguous == b.flags.f_contiguous and b.flags.writeable
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, dict):
        same(list(a.items()), list(b.items()))
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, io.BytesIO):
        assert (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    else:
        assert a == b
    return True


PLAIN = [None, True, False, 0, -1, 255, 256, 65535, 65536, -2**31, 2**63, -2**200, 1.5, -0.0, float("inf"),
         float("nan"), 3 - 4j, "", "ü\U0001f600", "\ud800", "x" * 300, b"", b"ab\xff", b"y" * 300, bytearray(),
         bytearray(b"\x00\xff"), (), (1,), (1, 2), (1, 2, 3), (1, (2, [3, ()]), 4), [], [1, [2, {"a": ()}]], {},
         {"a": 1, 2: None, (3, "x"): [4]}, set(), {1, "a", (2, 3)}, frozenset(), frozenset([1, (2,)]),
         range(3), range(9, 1, -2), slice(1, None, 2),
         collections.OrderedDict(b=1, a=[2]), collections.Counter({"a": 2, 3: 1}),
         collections.defaultdict(list, {1: [2]}), collections.defaultdict(collections.OrderedDict),
         collections.defaultdict(None, a=1), collections.deque([1, 2], 3), collections.deque([()]),
         pathlib.PosixPath("/a/b c"), pathlib.PurePosixPath("a"), io.BytesIO(b"abc")]
NUMPY = [np.float32(1.25), np.float64(float("nan")), np.int64(-3), np.uint8(200), np.bool_(True), np.complex64(1 - 2j),
         np.float16(2), np.str_("ü"), np.bytes_(b"x"), np.ones((2, 3)), np.asfortranarray(np.arange(6).reshape(2, 3)),
         np.array(5), np.zeros((0, 4), "f4"), np.array(["ab", "c"]), np.array([b"ab"]), np.array([True, False]),
         np.dtype("f4"), np.dtype(">i2"), {np.int64(3): 1, np.float32(1): 2},
         np.random.RandomState(3).get_state(), np.random.default_rng(3).bit_generator.state]
TORCH = [torch.float32, torch.bfloat16, torch.strided, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0]),
         {torch.float32: 1}]
TENSORS = [torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).t(), torch.arange(9)[2::3],
           torch.empty(0), torch.empty(3, 0), torch.tensor(2.5), torch.ones(1, 4).expand(3, 4),
           torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.tensor([1 + 2j]).conj(),
           torch.tensor([1 + 2j]).conj().imag, torch.ones(2, dtype=torch.bool), torch.get_rng_state(),
           *(torch.arange(4, dtype=torch.uint8).repeat(4).view(getattr(torch, name)) for name in (
               "int8", "int16", "int32", "float16", "bfloat16", "float64", "uint16", "uint32", "float8_e5m2") if
             hasattr(torch, name))]


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_plain_values(protocol):
    for value in [*PLAIN, *NUMPY, *TORCH, *(TENSORS if protocol is None else ())]:
        before = saved(value, protocol)
        assert same(value, decoded(before)) and same(value, opened(reencoded(before))), value
    whole = [[*PLAIN, *NUMPY, *TORCH, *(TENSORS if protocol is None else ())] for _ in range(2)]
    assert same(whole, opened(reencoded(saved(whole, protocol))))


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_defaultdicts_of_each_type(protocol):
    """Protocol 2 calls int long, and str unicode, as Python 2 did."""
    for kind in (dict, list, set, tuple, int, float, str, bool, bytes, complex, frozenset, bytearray,
                 collections.OrderedDict, collections.Counter, collections.deque):
        value = (collections.defaultdict(kind, a=kind()), 3)
        assert same(value, opened(reencoded(saved(value, protocol)))), kind
    for kind, name in (io.BytesIO, "_io.BytesIO"), (torch.Size, "torch.Size"), (range, "builtins.range"):
        with pytest.raises(Refused, match=f"a collections.defaultdict of {name} is not one of those"):
            decoded(saved(collections.defaultdict(kind), protocol))


@pytest.mark.parametrize(("value", "words"), [
    (np.datetime64("2020-01-01"), r"the numpy.dtype datetime64\[D\]"),
    (np.ones(2, "M8[25us]"), r"the numpy.dtype datetime64\[25us\]"),
    (np.dtype("m8"), r"the numpy.dtype timedelta64\[generic\]"), (np.array([None]), "the numpy.dtype object"),
    (np.zeros(2, "i4,f4"), r"a structured numpy.dtype \(fields f0, f1\)"),
    (np.zeros(2, "V3"), "the numpy.dtype void"), (np.dtype(("i4", (2,))), "a numpy.dtype of sub-arrays"),
    (np.dtype("f4", metadata={"a": 1}), "the numpy.dtype f4 with metadata"),
    (io.StringIO, "the class _io.StringIO")])
def test_what_is_refused_is_named(value, words):
    for protocol in (None, 2, 3, 4, 5):
        entry = saved([1, value], protocol)
        with pytest.raises(Refused, match=f"^{words} is not one of those that vckpt reads from a pickle$") as error:
            decoded(entry)
        assert pickles.refusal(memoryview(entry)) == str(error.value)


def test_dtypes_that_numpy_does_not_write():
    plain = (3, "<", None, None, None, -1, -1, 0)
    for state in [(), plain[:7], (*plain, None, 1), (*plain, 5), (*plain, (None, ("s", 1))), (*plain, (None, (b"s",))),
                  (*plain, (None, (b"\xff", 1))), (*plain[:3], 5, *plain[4:]), (*plain[:3], [5], *plain[4:])]:
        for text in ("M8", "V8", "f4", "", 8):
            with pytest.raises(Refused):
                decoded(saved(Built(np.dtype, (text, False, True), state), 2))


@pytest.mark.parametrize("order", "<>")
def test_texts_of_numpy_that_are_none(order):
    """numpy fails only where an item is taken, with a SystemError."""
    text = np.array(["ab", "\U0010ffff"], f"{order}U2")
    for good in (text, text[0]):
        data = saved(good, 4)
        assert np.array_equal(decoded(data), good)
        with pytest.raises(Refused):
            decoded(data.replace(good.tobytes()[:4], b"\x7f" * 4))


def test_a_look_says_what_reading_says():
    for value in [*PLAIN, *NUMPY, *TORCH, *TENSORS, Own(), [int], io.StringIO(), torch.ones(2).to_sparse(),
                  (Own(), torch.ones(1 << 16)), torch.nn.Linear(2, 2)]:
        for protocol in (None, 2, 5):
            entry, said = saved(value, protocol), None
            if protocol is None or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Linear, tuple):
                try:
                    decoded(entry)
                except Refused as error:
                    said = error.what
                assert pickles.refusal(memoryview(entry)) == said, value
    assert pickles.refusal(memoryview(b"{}")) == pickles.refusal(memoryview(b"")) == pickles.NO_ENTRY


def test_a_look_is_at_the_first_bytes(monkeypatch):
    """Names that the end of these bytes cuts are none that are refused."""
    numbers = list(range(20_000))
    for value, found in [(numbers, False), ([Own(), numbers], True), ([numbers, Own()], False),
                         (("x" * 10**6, Own()), False), (np.zeros(10**6, "M8[s]"), True)]:
        for protocol in (None, 2, 5):
            assert (pickles.refusal(memoryview(saved(value, protocol))) is not None) == found
    entry, whole = saved([PLAIN, NUMPY, TORCH, TENSORS]), saved([PLAIN, NUMPY, TORCH], 5)
    for size in range(0, 4000, 23):
        monkeypatch.setattr(pickles, "LOOK_BYTES", size)
        assert pickles.refusal(memoryview(entry)) is pickles.refusal(memoryview(whole)) is None


def test_what_is_one_object_stays_one():
    base, items = torch.arange(6.0), [1]
    entry = reencoded(saved({"a": base, "b": base[2:], "c": items, "d": (items, base)}))
    found = opened(entry)
    found["a"][3] = -1
    assert found["b"][1] == -1 and found["d"][1] is found["a"] and found["d"][0] is found["c"]
    loop = [1]
    loop.append(loop)
    again = opened(reencoded(saved(loop)))
    assert again[1] is again


@pytest.mark.parametrize("protocol", [None, 2, 5])
def test_arrays_of_another_byte_order(protocol):
    """numpy turns their items where it unpickles them by a state."""
    entry = saved(np.arange(5, dtype=">i4"), protocol)
    assert same(opened(entry), opened(reencoded(entry))) and decoded(entry).tolist() == [0, 1, 2, 3, 4]


def test_small_entries_are_read_once(monkeypatch):
    seen, one = [], saved([0.125])
    monkeypatch.setattr(pickles, "decoded", lambda data: seen.append(data) or decoded(data))
    assert reencoded(one) is reencoded(bytes(one)) and len(seen) <= 1


class Calls:
    """A pickle of it calls a function."""

    def __init__(self, function, *args):
        self.parts = function, args

    def __reduce__(self):
        return self.parts


class Own:
    pass


class Built:
    """As a pickle gives a state to an object of another class."""

    def __init__(self, function, args, state):
        self.parts = function, args, state

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_nothing_is_called(protocol, tmp_path):
    trap = tmp_path / "called"
    for value, name in [(Calls(os.system, f"touch {trap}"), "posix.system"), (Calls(eval, "1"), "builtins.eval"),
                        (Calls(getattr, {}, "clear"), "builtins.getattr"), (Own(), "test_pickles.Own"),
                        (Calls(torch.load, str(trap)), "torch.serialization.load"), (Own, "test_pickles.Own"),
                        (Calls(__import__, "this"), "builtins.__import__"), (Calls(np.load, str(trap)), "numpy"),
                        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear")]:
        with pytest.raises(Refused, match=name):
            decoded(saved([value], protocol))
        with pytest.raises(Refused, match=name):
            reencoded(saved({"a": (value,)}, protocol))
    assert not trap.exists()


def test_classes_of_the_list_take_only_what_python_gives_them():
    for value in [Calls(collections.OrderedDict, [(1, 2)]), Calls(collections.Counter, "aab"), Calls(set, {1: 2}),
                  Calls(frozenset, (1,)), Calls(complex, "1"), Calls(range, 1), Calls(range, 1, 2, 0),
                  Calls(slice, [], [], []), Calls(bytearray, 10**12), Calls(bytes, 10**12), Calls(np.dtype, "O"),
                  Calls(torch.device, "nowhere"), Calls(torch.device, "cpu", -1), Calls(torch.Size, [1]),
                  Calls(torch.Size, (-1,)), Calls(torch.Size, (2**70,)), Calls(pathlib.PosixPath, b"x"),
                  Calls(collections.deque, [1]), Calls(collections.deque, (), -1),
                  Calls(collections.defaultdict, 3), Calls(collections.defaultdict, torch.Size),
                  Calls(np.ndarray, (2,)), Calls(int, "3"), Calls(io.BytesIO, b"x"),
                  Built(collections.OrderedDict, (), {"update": 1}), Built(set, ([],), {"x": 1}),
                  Built(io.BytesIO, (), (b"x", -1, None)), Built(io.BytesIO, (), (b"x", 0, {"a": 1})),
                  np.array([None, 1], dtype=object), np.zeros(2, "i4,f4"), np.datetime64("2020-01-01"),
                  Built(torch.Size, ((1,),), {"x": 1}), [int], {"a": dict}, np.ndarray, torch.FloatStorage,
                  torch.ones(2).to_sparse(), torch.nn.Buffer(torch.ones(2)) if hasattr(torch.nn, "Buffer") else int]:
        for protocol in (2, 4):
            with pytest.raises(Refused):
                decoded(saved(value, protocol))


@pytest.mark.parametrize("body", [
    b"cos\nsystem\n(S'x'\ntR", b"(S'x'\nios\nsystem\n", b"(cos\nsystem\no", b"\x82\x01", b"\x83\x01\x00",
    b"\x84\x01\x00\x00\x00", b"\x97", b"\x98", b"\x92", b"Px\n", b"I1\n", b"L1L\n", b"F1\n", b"V1\n", b"S'1'\n", b"T",
    b"U\x01a", b"g0\n", b"p0\n", b"2", b"d", b"l", b"N(.", b"(", b"1", b"0", b"NN", b"(N", b"a", b"Na", b"]NNu",
    b"}(Nu", b"s", b"}s", b"\x85", b"(\x85", b"h\x00", b"q\x00", b"X\xff\xff\xff\xffa", b"\x8d" + b"\xff" * 8,
    b"\x8b\xff\xff\xff\x7fa", b"G\x00", b"\x95\x00", b"K\x01)R", b"K\x01K\x02b", b"}}b", b"K\x01Q", b"NQ",
    b"ctorch\nSize\n", b"ctorch\nSize\n\x85", b"ctorch\nSize\nNR", b"ctorch\nSize\n)R", b"cnumpy\ndtype\n)R",
    b"c_io\nBytesIO\n)R", b"c_io\nBytesIO\n)Rq\x00h\x00Nb", b"}]Ns", b"}(]Nu", b"\x8f(]\x90", b"(]\x91", b"}}Ns",
    b"]K\x01\x90", b"(K\x01\x90", b"}K\x01a", b"NN.", b"N.N", b"cx\n", b"c\xff\n\xff\n", b"K\x01K\x02\x93",
    b"X\x01\x00\x00\x00\xff", b"ccollections\nOrderedDict\n)R(Ku", b"ctorch\nfloat32\n)R", b"}\x80\x01"])
def test_broken_pickles(body):
    with pytest.raises(Refused):
        decoded(b"\x80\x02" + body + b".")


def test_what_is_no_entry():
    for data in (b"", b"PK", b"PK\3\4", b"PK\3\4" + b"\0" * 100, b"\x80", b"\x80\x02", b"N.", b"\x80\x06N.", b"{}"):
        with pytest.raises(Refused):
            decoded(data)


# ---- size ----

@pytest.fixture
def bounded():
    """Of memory and of processor time: a test that goes beyond dies."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if "asan" not in os.environ.get("VCKPT_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def twice(depth, opcode=b"\x86"):
    """A tuple of the tuple before, two times, and so on."""
    return b")" + b"".join(b"q\x00h\x00" + opcode for _ in range(depth))


@pytest.mark.timeout(60)
def test_bombs(bounded):
    head, text = b"\x80\x02", b"X" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16) + b"q\x01"
    words = [b"}" + twice(80) + b"Ns",                                          # a key that takes 2^80 steps to hash
             b"(" + twice(80) + b"\x91", b"c__builtin__\nset\n]" + twice(80) + b"a\x85R",
             b"c_codecs\nencode\nq\x000" + text + b"0](" + b"h\x00h\x01X\x06\0\0\0latin1\x86R" * 3000 + b"e",
             b"c__builtin__\nfrozenset\nq\x000](" + b"K\x01" * 40_000 + b"eq\x010](" + b"h\x00h\x01\x85R" * 9000 + b"e",
             b"\x8b" + struct.pack("<I", 1 << 18) + b"\x01" * (1 << 18) + b"q\x010](" + b"h\x01" * 30_000 + b"e",
             b"}(" + b"".join(b"K\x01J" + struct.pack("<i", n) + b"\x86N" for n in range(5000)) + b"u"]
    for word in words:
        with pytest.raises(Refused, match="parts|more often|more than 4,096"):
            decoded(head + word + b".")
    shared = head + twice(80) + b"."                                            # small: it is written by its parts, too
    assert len(reencoded(shared)) < 1000
    with pytest.raises(Refused):
        pickles.tree(shared)
    for word in (b"]" * 20_000 + b"a" * 19_999, b")" + b"\x85" * 20_000):
        decoded(head + word + b".")
    with pytest.raises(Refused, match="too many values in one another"):
        reencoded(head + b"]" * 20_000 + b"a" * 19_999 + b".")


@pytest.mark.timeout(60)
def test_what_a_tree_is():
    assert pickles.tree(saved({"a": [1, (2,)]})) == {"a": [1, (2,)]}
    with pytest.raises(Refused):
        pickles.tree(b"\x80\x02" + b"]" * 200 + b"a" * 199 + b".")
    items = b"](" + b"N" * 1000 + b"eq\x00"
    with pytest.raises(Refused):
        pickles.tree(b"\x80\x02" + items + b"](" + b"h\x00" * 1000 + b"e.")


# ---- archives ----

def archive(pickled, members, mode=zipfile.ZIP_STORED, **more):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", mode) as made:
        for name, data in {"data.pkl": pickled, **members, **more}.items():
            made.writestr(f"archive/{name}", data)
    return out.getvalue()


def tensor(offset=0, size=(2,), stride=(1,), kind=b"ctorch\nFloatStorage\n", key="0", grad=b"\x89", more=b""):
    """The pickle of a tensor, field by field."""
    def numbers(values):
        return b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in values) + b"t"

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()
    storage = b"(" + text("storage") + kind + text(key) + text("cpu") + b"K\x02tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    at = b"\x8a\x09" + offset.to_bytes(9, "little", signed=True)
    return (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + at + numbers(size) + numbers(stride) + grad +
            hooks + more + b"tR.")


def test_a_tensor_lies_in_its_storage():
    data = struct.pack("<2f", 1, 2)
    assert torch.equal(decoded(archive(tensor(), {"data/0": data})), torch.tensor([1.0, 2]))
    for wrong in [{"size": (3,)}, {"offset": 1}, {"offset": -1}, {"stride": (2,)}, {"stride": (-1,)}, {"size": (-1,)},
                  {"size": (2**40,), "stride": (2**40,)}, {"size": (2**62, 4), "stride": (2**62, 1)},
                  {"size": (2**62, 4), "stride": (0, 0)}, {"size": (2, 1)}, {"key": "1"}, {"key": "../0"},
                  {"size": (0, 2**62, 4), "stride": (0, 0, 0)}, {"kind": b"ctorch\nLongStorage\n"},
                  {"kind": b"ctorch\nfloat32\n"}, {"kind": b"ctorch.storage\nUntypedStorage\n"},
                  {"grad": b"K\x01"}, {"more": b"K\x05"}, {"more": b"}X\x01\x00\x00\x00xNs"},
                  {"size": (1,) * 70, "stride": (1,) * 70}, {"size": (1 << 25,), "stride": (0,)}, {"offset": 2**63}]:
        with pytest.raises(Refused):
            decoded(archive(tensor(**wrong), {"data/0": data}))
    assert decoded(archive(tensor(offset=9, size=(0, 7), stride=(7, 1)), {"data/0": data})).shape == (0, 7)
    assert decoded(archive(tensor(size=(1000, 1000), stride=(0, 0)), {"data/0": data})).shape == (1000, 1000)


def test_archives(rng):
    data, good = struct.pack("<2f", 1, 2), saved({"a": torch.ones(5)})
    for wrong in [archive(tensor(), {"data/0": data}, zipfile.ZIP_DEFLATED), archive(tensor(), {}),
                  archive(tensor(), {"data/0": data, "byteorder": b"big"}),
                  archive(tensor(), {"data/0": data}) + b"x" * 70_000,
                  archive(tensor(), {"data/0": data}).replace(b"archive/data.pkl", b"archive/data.plk"),
                  good.replace(b"little", b"bigbig")]:
        with pytest.raises(Refused):
            decoded(wrong)
    for end in range(0, len(good), 11):
        with pytest.raises(Refused):
            decoded(good[:end])


def test_members_that_lie_upon_each_other():
    """Many tensors, each in a member of its own, and all of them at the same bytes."""
    parts = [tensor(key=str(i), size=(1 << 14,))[2:-1] for i in range(64)]
    one = archive(b"\x80\x02](" + parts[0] + b"e.", {"data/0": bytes(1 << 16)})
    assert decoded(one)[0].shape == (1 << 14,)
    big = archive(b"\x80\x02](" + b"".join(parts) + b"e.", {"data/0": bytes(1 << 16)})
    with zipfile.ZipFile(io.BytesIO(big)) as found:
        at = found.getinfo("archive/data/0")
        start, size, count = found.start_dir, at.file_size, len(found.infolist())
    names = [f"archive/data/{i}".encode() for i in range(1, 64)]
    rows = b"".join(struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, at.CRC, size, size, len(name), 0, 0, 0, 0,
                                0, at.header_offset) + name for name in names)
    listed = big[start:-22] + rows
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count + 63, count + 63, len(listed), start, 0)
    with pytest.raises(Refused, match="is not within it"):
        decoded(big[:start] + listed + end)


@pytest.mark.timeout(400)
def test_damaged_entries(rng, scale, bounded):
    """They come back as some value, or are refused; no other exception."""
    seeds = [saved([PLAIN[:40], TORCH, NUMPY]), saved(TENSORS), saved([PLAIN, NUMPY], 2), saved([PLAIN, NUMPY], 4),
             saved({"lr": 0.1, "betas": (0.9, 0.999), "step": torch.tensor(3.0)})]
    kept = 0
    for case in range(scale(400, 50_000)):
        data = bytearray(seeds[case % len(seeds)])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at:at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            elif kind == 2:
                other = rng.choice(seeds)
                cut = rng.randrange(len(other))
                data[at:at + rng.randrange(60)] = other[cut:cut + rng.randrange(60)]
            else:
                data[at] ^= 1 << rng.randrange(8)
        pickles.refusal(memoryview(data))
        try:
            reencoded(bytes(data))
            kept += 1
        except Refused:
            pass
    assert kept


def test_random_values(rng, scale):
    def value(depth):
        kind = rng.randrange(9 if depth else 6)
        if kind < 6:
            return rng.choice([*PLAIN[:20], *TORCH, rng.random(), rng.getrandbits(rng.randrange(1, 90))])
        items = [value(depth - 1) for _ in range(rng.randrange(4))]
        return [items, tuple(items), {str(i): item for i, item in enumerate(items)}][kind - 6]
    for case in range(scale(60, 5000)):
        one = value(4)
        assert same(one, opened(reencoded(saved(one, rng.choice([None, 2, 3, 4, 5])))))
