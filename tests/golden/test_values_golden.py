# SPDX-License-Identifier: Apache-2.0
"""Tagged JSON, one file of each kind: every later version reads it and writes the same bytes (docs/format/values.md).

`python tests/golden/test_values_golden.py` writes the files of kinds that are new; it never changes one."""
import argparse
import collections
import datetime
import math
import pathlib
import re
import types

import numpy as np
import pytest

import valuelib as vl
from valuelib import Config, Frozen, Level, Parts, Phase, Point, Slotted, Span
from vckpt import values
from vckpt.records import Mesh, Record
from vckpt.values_foreign import RESTORE
from vckpt.values_read import TAGS

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/golden/v1/values"
UTC = datetime.timezone.utc
KINDS = {
    "constants": [None, True, False],
    "int": [0, 1, -1, 2**53 - 1, 1 - 2**53, 2**53, -2**53, 2**64, -2**200],
    "float": [0.0, -0.0, 1.0, 0.1, -1.5, 1e16, 1e-7, 5e-324, 1.7976931348623157e308, math.pi, math.inf, -math.inf,
              math.nan],
    "complex": [1j, complex(-0.0, 2.5), complex(math.nan, -math.inf)],
    "str": ["", "plain", "größer 日本 🙂", "\"quoted\\\" \n\t\r\b\f\0\x1f\x7f/", "\u2028", "$tag", "x" * 150],
    "bytes": [b"", b"\0\xff", bytes(range(256))],
    "bytearray": bytearray(b"abc"),
    "list": [[], [1], [[2, [3]]], list(range(60)), ["word"] * 30, [["long"] * 20, ["lines"] * 20]],
    "tuple": [(), (1,), (1, (2, "x")), tuple(range(50))],
    "set": [set(), {3, 1, 2, -5}, {"b", "a", "é"}, {1, "a", None, (2, 3), b"x", 0.5}],
    "frozenset": [frozenset(), frozenset([20, 3]), frozenset([frozenset(), frozenset([1])])],
    "dict": {"": 1, "z": [1, 2], "a": {"nested": {}}, "long": {f"key{i}": i for i in range(20)}},
    "dict_keys": {0: "int", 1.5: "float", None: "none", (1, "x"): "tuple", b"k": "bytes", -0.5: [1] * 50,
                  False: {"x": "y" * 90}, Phase.DECAY: 1},     # noqa: F601 (0 and False are one key, of the second value)
    "dict_escaped": {"$int": "0x1", "$vckpt": 1, "value": {"$": {}}},
    "ordereddict": collections.OrderedDict([("b", 1), ("a", 2), (3, 4)]),
    "defaultdict": [collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None),
                    collections.defaultdict(dict, {1: {}})],
    "counter": collections.Counter("abca"),
    "deque": [collections.deque(), collections.deque([1, 2]), collections.deque([1.5], 100)],
    "range": [range(3), range(10, -10, -3)],
    "slice": [slice(3), slice(1, None, 2)],
    "datetime": [datetime.datetime(2024, 2, 29, 1, 2, 3), datetime.datetime(2024, 2, 29, 1, 2, 3, 4567, UTC),
                 datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, minutes=-30)))],
    "date": datetime.date(2024, 2, 29),
    "time": [datetime.time(23, 59, 59, 999999), datetime.time(1, tzinfo=UTC)],
    "timedelta": [datetime.timedelta(0), datetime.timedelta(days=-1, seconds=2, microseconds=3)],
    "path": [pathlib.Path("/a/b c"), pathlib.PurePosixPath("x/../y"), pathlib.PureWindowsPath(r"C:\a\b")],
    "record": [Config(0.1), Config(1e-4, (0.9, 0.999), Phase.DECAY, ["a"] * 40), Frozen("n", Slotted(1, 2)),
               Record("far.Away", {"x": 1, "keys": [2]})],
    "namedtuple": [Point(1, 2), Span(3)],
    "namespace": [types.SimpleNamespace(a=1, b=[2]), argparse.Namespace(lr=0.1, data_path="/d")],
    "enum": [Phase.WARMUP, Phase.DECAY, Level.HIGH, Parts.MODEL, Parts.MODEL | Parts.DATA, Parts(0)],
    "numpy": [np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.float16(0.1), np.float32(0.1), np.float64(0.1),
              np.float64("nan"),
              np.complex64(1 + 2j), np.str_("s"), np.bytes_(b"b"), np.datetime64("2024-02-29T12", "h"),
              np.datetime64("NaT", "ns"), np.timedelta64(-5, "ms")],
    "numpy_dtype": [np.dtype("float32"), np.dtype(">f4"), np.dtype("U3"), np.dtype("M8[ns]"), np.dtype("bool"),
                    np.float32, np.str_],
    "mesh": [Mesh("cuda", [[0, 1], [2, 3]], ["dp", "tp"]), Mesh("cpu", [5, 3, 1])],
    "tensor": {"w": Record("tensor", {"name": "model/w"}, "$tensor"),
               "b": Record("tensor", {"name": "model/b", "kind": "numpy", "shape": (1,)}, "$tensor")},
}


def torch_kinds():
    import torch
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    return {
        "torch": [torch.bfloat16, torch.float8_e4m3fn, torch.Size([]), torch.Size([2, 3]), torch.device("cpu"),
                  torch.device("cuda:1"),
                  torch.device("meta"), torch.strided, torch.sparse_coo, torch.channels_last],
        "placement": {"layer1.weight": [Replicate(), Shard(0)], "layer2.weight": [Shard(0)],
                      "layer3.weight": [_StridedShard(1, split_factor=2), Shard(1)],
                      "norm.weight": (Partial(), Partial("avg"), Shard(-1))},
        # What users keep, in one: the text that they will look at.
        "state": {"step": 1000, "scheduler": {"base_lrs": [3e-4], "last_epoch": 1000,
                                              "_last_lr": [0.00029999999999999997]}, "loss": math.nan,
                  "plan": {"layer2.weight": [Shard(0)]}, "mesh": Mesh("cuda", [[0, 1], [2, 3]], ["dp", "tp"]),
                  "dtype": torch.bfloat16,
                  "python_rng": (3, tuple(range(0, 2**32, 2**26 + 1)), None), "config": Config(3e-4), "seen": {17, 4},
                  "optimizer": {0: {"step": 1}}},
    }


def check(name, value):
    stored = (FOLDER / f"{name}.json").read_bytes()
    again = values.decode(stored, types=vl.TYPES)
    assert vl.same(again, value), again
    assert values.encode(again) == stored and values.encode(value) == stored
    assert values.encode(values.decode(stored)) == stored


@pytest.mark.parametrize("name", KINDS)
def test_kind(name):
    check(name, KINDS[name])


@pytest.mark.parametrize("name", ["torch", "placement", "state"])
def test_kind_of_torch(name):
    pytest.importorskip("torch", reason="torch is not installed")
    check(name, torch_kinds()[name])


def test_every_tag_has_a_file_and_stands_on_the_page():
    """A tag in the code, in a golden file and in the table of docs/format/values.md: all or none."""
    files = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert files.keys() == {f"{name}.json" for name in [*KINDS, "torch", "placement", "state"]}
    written = set(re.findall(r'\{"(\$[\w.]+)":', "".join(files.values())))
    known = {*TAGS, *RESTORE, "$tensor"}
    assert known <= written, known - written
    page = (ROOT / "docs/format/values.md").read_text()
    assert set(re.findall(r"^\| `(\$[\w.]+)` \|", page, re.M)) == known
    shown = re.findall(r"^\| `\$[\w.]+` \|.*?\| `(\{.*\})` \|", page, re.M)
    assert len(shown) == len(known)
    for example in shown:                               # each example of the page is read, and written so
        text = b'{"$vckpt": 1, "value": %s}\n' % example.encode()
        assert values.encode(values.decode(text)) == text, example


def write():
    for name, value in {**KINDS, **torch_kinds()}.items():
        path = FOLDER / f"{name}.json"
        if not path.exists():
            path.write_bytes(values.encode(value))
            print(path)


if __name__ == "__main__":
    write()
