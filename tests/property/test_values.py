# SPDX-License-Identifier: Apache-2.0
"""Tagged JSON of plain Python values: what goes in comes back, the same value gives the same bytes, what cannot be kept
and what no writer wrote is refused by its path. docs/format/values.md."""
import argparse
import base64
import collections
import copy
import dataclasses
import datetime
import io
import json
import math
import os
import pathlib
import pickle
import random
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import valuelib as vl
from valuelib import Config, Frozen, Level, Parts, Phase, Point, Slotted, Span
from vckpt import values
from vckpt.records import Mesh, Record
from vckpt.values_read import TAGS

ROOT = pathlib.Path(__file__).resolve().parents[2]


def there_and_back(value, types=vl.TYPES):
    text = values.encode(value)
    again = values.decode(text, types=types)
    assert vl.same(again, value), text
    assert values.encode(again) == text
    without = values.decode(text)                       # records instead of classes: the same bytes
    assert values.encode(without) == text
    return text


def document(text):
    return b'{"$vckpt": 1, "value": %s}' % (text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)


def read(text, **more):
    return values.decode(document(text), **more)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
ZONES = st.one_of(st.none(), st.integers(-86399, 86399).map(lambda s: datetime.timezone(datetime.timedelta(seconds=s))))
NUMPY = st.one_of(
    st.sampled_from([np.bool_(True), np.str_("é"), np.bytes_(b"\0\xff"), np.datetime64("NaT"),
                     np.datetime64("2024-02-29"),
                     np.datetime64(-1, "ns"), np.timedelta64(5, "h"), np.timedelta64("NaT", "25s"), np.float32("nan"),
                     np.float16(-0.0),
                     np.uint64(2**64 - 1), np.complex64(complex(-0.0, math.inf))]),
    st.builds(lambda n: np.int8(n), st.integers(-128, 127)),
    st.builds(lambda n: np.uint32(n), st.integers(0, 2**32 - 1)),
    st.builds(np.float64, FLOATS), st.floats(width=32).map(np.float32), st.floats(width=16).map(np.float16),
    st.complex_numbers().map(np.complex128),
    st.sampled_from([np.dtype("f4"), np.dtype(">i2"), np.dtype("U7"), np.dtype("M8[us]"),
                     np.dtype("S3"), np.dtype("V5"), np.float32, np.int64, np.str_]))
MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(lambda shape: st.builds(
    lambda device, names: Mesh(device, np.arange(math.prod(shape)).reshape(shape).tolist(),
                               names and names[:len(shape)]),
    st.sampled_from(["cpu", "cuda"]), st.sampled_from([None, ["pp", "dp", "tp"]])))
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2**200, 2**200),
    st.sampled_from([2**53, 2**53 - 1, -2**53, 1 - 2**53]),
    FLOATS, st.complex_numbers(), TEXT, st.binary(max_size=20),
    st.sampled_from([*Phase, *Level, Parts.MODEL, Parts.DATA | Parts.MODEL]),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.builds(lambda moment, zone: moment.replace(tzinfo=zone, fold=0), st.datetimes(), ZONES), st.dates(),
    st.timedeltas(),
    st.builds(lambda moment, zone: moment.replace(tzinfo=zone, fold=0), st.times(), ZONES),
    TEXT.map(pathlib.PurePosixPath), TEXT.map(pathlib.PureWindowsPath), TEXT.map(pathlib.Path), NUMPY, MESHES)
FIELDS = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
FACTORIES = st.sampled_from([None, dict, list, float])


@st.composite
def keys(draw, depth=2):
    """What can be hashed."""
    kind = draw(st.integers(0, 9)) if depth else 0
    if kind < 5:
        return draw(ATOMS)
    inner = keys(depth - 1)
    if kind < 7:
        return tuple(draw(st.lists(inner, max_size=3)))
    return draw((st.frozensets(inner, max_size=3), st.builds(Point, inner, inner),
                 st.builds(Frozen, TEXT, inner))[kind - 7])


@st.composite
def states(draw, depth=4):
    kind = draw(st.integers(0, 19)) if depth else 0
    if kind < 2:
        return draw(ATOMS if kind else keys())
    inner, size = states(depth - 1), draw(st.integers(0, 3))

    def many(strategy=inner):
        return [draw(strategy) for _ in range(size)]

    def pairs():
        return {draw(keys()): draw(inner) for _ in range(size)}
    return (lambda: many(), lambda: tuple(many()), lambda: dict(zip(many(TEXT), many())), pairs,
            lambda: set(many(keys())),
            lambda: dict(zip(many(st.sampled_from(["$int", "$vckpt", "value", "$"])), many())),
            lambda: collections.OrderedDict(pairs()),
            lambda: collections.defaultdict(draw(FACTORIES), pairs()),
            lambda: collections.deque(many(), draw(st.sampled_from([None, 3, 9]))),
            lambda: collections.Counter(draw(TEXT)), lambda: bytearray(draw(st.binary(max_size=80))),
            lambda: slice(draw(inner), draw(inner)),
            lambda: Config(draw(FLOATS), draw(inner), draw(st.sampled_from(Phase)), many()),
            lambda: Frozen(draw(TEXT), draw(inner)),
            lambda: Slotted(draw(inner), size), lambda: Span(size, draw(inner)),
            lambda: types.SimpleNamespace(**dict(zip(many(FIELDS), many()))),
            lambda: Record("far.Away", dict(zip(many(FIELDS), many()))))[kind - 2]()


def test_any_state_comes_back(scale):
    @settings(max_examples=scale(60, 1500), deadline=None, suppress_health_check=list(HealthCheck))
    @given(states())
    def run(state):
        there_and_back(state)
    run()


def test_numbers_come_back_bit_by_bit():
    rng = random.Random(5)
    numbers = [rng.getrandbits(64).to_bytes(8, "little") for _ in range(3000)]
    floats = [float(x) for x in np.frombuffer(b"".join(numbers), "f8")
              if x == x] + [5e-324, 1.7976931348623157e308, 0.1, 1e16, -0.0]
    again = values.decode(values.encode(floats))
    assert np.array(again).tobytes() == np.array(floats).tobytes()
    for power in (52, 53, 54, 63, 64, 65, 20000):
        there_and_back([sign * 2**power + delta for sign in (1, -1) for delta in (-1, 0, 1)])
    assert all(type(value) is float for value in values.decode(values.encode([1.0, 1e300, -0.0])))
    nan, = values.decode(values.encode([-math.nan]))
    assert nan != nan


def test_text_reads_well():
    text = values.encode({"lr": 0.1, "steps": list(range(100)), "note": "größer\n"}).decode()
    assert text.splitlines()[:3] == ['{"$vckpt": 1, "value": {', '  "lr": 0.1,', '  "steps": [']
    assert "größer\\n" in text and text.endswith("}}\n") and max(map(len, text.splitlines())) < 110
    assert json.loads(text)["value"]["steps"][99] == 99


def test_sets_do_not_depend_on_the_hash():
    program = ("import sys; from vckpt import values\n"
               "sys.stdout.buffer.write(values.encode({'s': {'a','bc','d'}, 'm': {1, 'a', None, (2, 'x'), b'q'}, 'f': "
               "frozenset([3,1,20])}))")
    found = {subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
                            capture_output=True, check=True).stdout for seed in "1 2 3 4".split()}
    assert len(found) == 1 and b'{"$frozenset": [1, 3, 20]}' in found.pop()


def test_nothing_is_imported():
    """Neither for encoding nor for decoding plain values."""
    program = ("import sys, types; package = sys.modules['vckpt'] = types.ModuleType('vckpt'); package.__path__ = "
               "[sys.argv[1] + '/vckpt']\n"
               "from vckpt import values\n"
               "values.decode(values.encode({'a': [1, 2.5, (3,), {4}], 'r': values.Record('os.system', {'x': 1})}))\n"
               "assert not {'torch', 'numpy', 'ctypes'} & set(sys.modules), sorted(sys.modules)")
    subprocess.run([sys.executable, "-c", program, str(ROOT / "tools/python")], check=True)


def test_shared_objects_come_back_as_equal_copies():
    inner = [1]
    first, second = values.decode(values.encode([inner, inner]))
    assert first == second == [1] and first is not second


# ---- what cannot be kept ----

def generator():
    yield 1


class Odd(str):
    pass


@dataclasses.dataclass
class Loose:
    a: int


class Plain:
    pass


@dataclasses.dataclass(eq=False)
class Handle:
    """Hashed by identity, whatever it holds."""
    parts: list


LOOSE = Loose(1)
LOOSE.extra = 2
REFUSED = [
    (lambda: 0, TypeError, "a function"), (len, TypeError, "a built-in function"),
    (Plain(), TypeError, "a Plain (test_values.Plain)"),
    (Plain, TypeError, "the class test_values.Plain"), (generator(), TypeError, "a generator"),
    (threading.Lock(), TypeError, "lock"),
    (Odd("x"), TypeError, "a kind of str"), ("\ud800", ValueError, "surrogate"),
    ({"\udfff": 1}, ValueError, "surrogate"),
    (pathlib.Path(os.fsdecode(b"\xff")), ValueError, "surrogate"), (np.array([1]), TypeError, "a ndarray"),
    (np.longdouble(1), TypeError, "numpy"),
    (np.dtype([("a", "i4")]), TypeError, "dtype"), (np.dtype("O"), TypeError, "dtype"),
    (np.zeros(1, "V3")[0], TypeError, "numpy"),
    (collections.defaultdict(lambda: 0), TypeError, "defaultdict"), (LOOSE, ValueError, "is not a field"),
    (..., TypeError, "ellipsis"),
    (collections.ChainMap(), TypeError, "ChainMap"), (datetime.datetime(2024, 1, 1, fold=1), TypeError, "zone"),
    (object(), TypeError, "an object"),
    (types.SimpleNamespace(**{"$a": 1}), ValueError, "a field called"), (memoryview(b""), TypeError, "a memoryview"),
    (datetime.datetime(2024, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,),
                                               {"utcoffset": lambda *_: datetime.timedelta(0)})()), TypeError, "zone"),
]


@pytest.mark.parametrize("value,kind,words", REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_cannot_be_kept_is_refused_by_its_path(value, kind, words):
    with pytest.raises(kind) as error:
        values.encode({"optimizer": [0, {"hook": value}]})
    assert str(error.value).startswith('state["optimizer"][1]["hook"]') and words in str(error.value)


def test_paths():
    with pytest.raises(TypeError, match=r'^state\["a"\]\[0\]\.inner\[3\]\[None\]\[a tuple\]: a function cannot be '
                       r'kept: leave it out'):
        values.encode({"a": [Frozen("x", {3: {None: {(1,): print and (lambda: 0)}}})]})
    with pytest.raises(TypeError, match=r'^state\["model"\]\["x"\]: '):
        values.encode({"x": object()}, path=("model",))
    assert values.path_text(("\ud800", 1, values.Attr("lr"), b"\xff",
                             2**70)) == r"""state["\ud800"][1].lr[b'\xff'][0x400000000000000000]"""
    assert values.path_text(("x",), root="plan") == 'plan["x"]'


def test_cycles_are_refused():
    state = {"a": []}
    state["a"].append(state["a"])
    with pytest.raises(ValueError, match=r'state\["a"\]\[0\]: refers back to state\["a"\]'):
        values.encode(state)
    loop = types.SimpleNamespace()
    loop.itself = {"x": (loop,)}
    with pytest.raises(ValueError, match="cycle"):
        values.encode(loop)


def nested(depth, wrap):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap",
                         [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}, lambda x: Frozen("", x),
                          lambda x: frozenset([x]), lambda x: slice(x)],
                         ids="list tuple dict pairs record set slice".split())
def test_depth(wrap):
    there_and_back(nested(values.MAX_DEPTH, wrap))
    with pytest.raises(ValueError, match=f"nested more than {values.MAX_DEPTH} deep"):
        values.encode(nested(values.MAX_DEPTH + 1, wrap))
    with pytest.raises(ValueError, match="in one another|nested"):
        values.encode(nested(100000, lambda x: [x]))


def test_size(monkeypatch):
    laughs = nested(40, lambda x: [x, x])                       # 2^40 of them, were they written
    for module in ("vckpt.values", "vckpt.values_text"):
        monkeypatch.setattr(f"{module}.MAX_BYTES", 1 << 16)
    with pytest.raises(ValueError, match=r'state\["a"\]\[0\].*more than 65536 bytes'):
        values.encode({"a": laughs})
    with pytest.raises(ValueError, match="at most 65536"):
        values.decode(document(" " * 65536))
    with pytest.raises(ValueError, match="bytes of values"):
        values.encode([nested(90, lambda x: [x, "." * 80])] * 9)  # indentation counts


def test_keys_that_would_read_alike_are_refused():
    class Twin(Point):
        pass
    Twin.__module__, Twin.__qualname__ = Frozen.__module__, "Same"
    other = dataclasses.make_dataclass("Same", ["x", "y"], frozen=True)
    other.__module__ = Frozen.__module__
    for value in ({Twin(1, 2): 1, other(1, 2): 2}, {Twin(1, 2), other(1, 2)}):
        with pytest.raises(ValueError, match="two keys"):
            values.encode(value)
    there_and_back({float("nan"): 1, float("nan"): 2})
    keys = [Handle([1]), Handle([2])]
    assert [key.parts for key in values.decode(values.encode(dict.fromkeys(keys)))] == [[1], [2]]
    with pytest.raises(ValueError, match="two keys"):
        values.encode({Handle([1]), Handle([1])})
    assert len(values.decode(values.encode({float("nan"), float("nan")}))) == 2


# ---- tensors ----

class Tensor:
    def __init__(self, name):
        self.name = name


def keep(path, value):
    return f"{path[0]}/{'.'.join(map(str, path[1:]))}", {"kind": value.name, "size": (1, 2)}


def test_tensors_are_references():
    state = {"model": {"w": Tensor("p"), "layers": [Tensor("q")]}, "cfg": Frozen("a", Tensor("r"))}
    text = values.encode(state, tensor=keep, is_tensor=lambda value: isinstance(value, Tensor))
    assert b'"w": {"$tensor": "model/w", "kind": "p", "size": {"$tuple": [1, 2]}}' in text
    seen = []
    again = values.decode(text, types=[Frozen], tensor=lambda path, name, members: seen.append((path, members)) or name)
    assert again == {"model": {"w": "model/w", "layers": ["model/layers.0"]}, "cfg": Frozen("a", "cfg/inner")}
    assert [path for path, _ in seen] == [("model", "w"), ("model", "layers", 0), ("cfg", "inner")]
    assert type(seen[2][0][1]) is values.Attr and seen[0][1] == {"kind": "p", "size": (1, 2)}
    plain = values.decode(text)                                 # no hook: records, which give the same text
    assert plain["model"]["w"].name == "model/w" and plain["model"]["w"].size == (1, 2)
    assert values.encode(plain) == text
    for length in range(1, 130):                                # whatever fits a line
        lines = values.encode([[Tensor("x")] * 3], tensor=lambda path, value: "n" * length,
                              is_tensor=lambda value: isinstance(value, Tensor))
        assert values.encode(values.decode(lines)) == lines
    named = values.encode([Tensor("x")], tensor=lambda path, value: "a/b",
                          is_tensor=lambda value: isinstance(value, Tensor))
    assert b'[{"$tensor": "a/b"}]' in named


def test_tensor_hooks_are_checked():
    def is_tensor(value):
        return isinstance(value, Tensor)
    for value in ({Tensor("x"): 1}, {Tensor("x")}, {(1, Tensor("x")): 2}):
        with pytest.raises(TypeError, match="in a key or a set"):
            values.encode(value, tensor=keep, is_tensor=is_tensor)
    for wrong in (None, "", ("a", {"name": 1}), ("a", {"$int": 1}), 5):
        with pytest.raises(TypeError, match="tensor="):
            values.encode([Tensor("x")], tensor=lambda path, value: wrong, is_tensor=is_tensor)
    with pytest.raises(TypeError, match="belong together"):
        values.encode(1, tensor=keep)


# ---- classes ----

def test_classes_come_back_only_when_given():
    state = [Config(0.1), Phase.DECAY, Level.HIGH, Parts.MODEL | Parts.DATA, Point(1, 2), Span(3, 4)]
    text = there_and_back(state)
    records = values.decode(text)
    assert all(type(record) is Record for record in records)
    config, phase, level, parts, point, _ = records
    assert (config.lr == 0.1 == config["lr"] and config.type_name == "valuelib.Config" and
            list(config) == ["lr", "betas", "phase", "tags"])
    assert config.phase == Record("valuelib.Phase", {"name": "WARMUP", "value": "warmup"}, "$enum")
    assert (phase.name, phase.value, level.value, parts.value, dict(point)) == ("DECAY", 2, 10, 5, {"x": 1, "y": 2})
    some = values.decode(text, types=[Config])
    assert type(some[0]) is Config and type(some[0].phase) is Record


def test_classes_change():
    text = values.encode(Config(0.5))
    newer = dataclasses.make_dataclass("Config", [("lr", float), ("betas", tuple), ("phase", object), ("tags", list),
                                                  ("decay", float, 0.1),
                                                  ("names", list, dataclasses.field(default_factory=list))])
    made = values.decode(text, types={"valuelib.Config": newer})
    assert (made.lr, made.decay, made.names) == (0.5, 0.1, [])
    older = dataclasses.make_dataclass("Config", [("lr", float)])
    with pytest.raises(ValueError, match=r"^state\.betas: valuelib.Config has no such field"):
        values.decode(text, types={"valuelib.Config": older})
    needy = dataclasses.make_dataclass("Config", [("lr", float), ("betas", tuple), ("phase", object), ("tags", list),
                                                  ("must", int)])
    with pytest.raises(ValueError, match=r"^state\.must: the field is missing"):
        values.decode(text, types={"valuelib.Config": needy})
    assert read('{"$record": "valuelib.Span", "fields": {"begin": 1}}', types=[Span]) == Span(1, 7)
    for tag, cls in (('{"$record": "x.Y", "fields": {}}', Phase),
                     ('{"$enum": "x.Y", "name": "a", "value": 1}', Config)):
        with pytest.raises(ValueError, match="x.Y was"):
            read(tag, types={"x.Y": cls})
    with pytest.raises(ValueError, match="valuelib.Phase has no member GONE"):
        read('{"$enum": "valuelib.Phase", "name": "GONE", "value": 1}', types=[Phase])
    assert read('{"$enum": "valuelib.Level", "name": "LOW", "value": 77}', types=[Level]) is Level.LOW      # renumbered
    for wrong in ([Plain], [Plain()], [dict], {"a": 1}, [torch_like := 5], Config, Phase, 5):
        with pytest.raises(TypeError, match="types="):
            values.decode(text, types=wrong)
    del torch_like
    with pytest.raises(ValueError, match="two classes"):
        values.decode(text,
                      types=[Config, type("Config", (Config,), {"__module__": "valuelib", "__qualname__": "Config"})])


def test_classes_are_filled_not_run():
    calls = []

    @dataclasses.dataclass
    class Doubling:
        x: int
        y: int = dataclasses.field(init=False, default=0)

        def __post_init__(self):
            calls.append(1)
            self.x *= 2
    made = Doubling(4)
    made.y = 3
    again = values.decode(values.encode(made), types=[Doubling])
    assert (again.x, again.y, len(calls)) == (8, 3, 1)


def test_namespaces_come_back():
    text = there_and_back(types.SimpleNamespace(a=1, b=[2]))
    again = values.decode(values.encode(argparse.Namespace(lr=0.1, steps=5)))
    assert (type(again) is argparse.Namespace and again == argparse.Namespace(lr=0.1, steps=5) and
            b"types.SimpleNamespace" in text)
    odd = read('{"$record": "argparse.Namespace", "fields": {"__class__": 1, "__dict__": 2}}')
    assert type(odd) is argparse.Namespace and vars(odd)["__dict__"] == 2


def test_a_stream_of_bytes_comes_back():
    made = io.BytesIO(b"abc\0")
    made.seek(9)
    again = values.decode(values.encode(made))
    assert type(again) is io.BytesIO and (again.getvalue(), again.tell()) == (b"abc\0", 9)
    for fields in ("{}", '{"data": "abc", "position": 0}', '{"data": {"$bytes": ""}, "position": -1}',
                   '{"data": {"$bytes": ""}, "position": true}', '{"data": {"$bytes": ""}, "position": 0, "x": 1}'):
        with pytest.raises(ValueError, match="a BytesIO has data and a position"):
            read('{"$record": "io.BytesIO", "fields": %s}' % fields)
    made.close()
    with pytest.raises(TypeError, match="give one that is open"):
        values.encode(made)


def test_placements_of_other_libraries():
    class RaggedShard:
        def __init__(self, dims, local_units):
            self.dims, self.local_units = dims, local_units
            self.cache = object()
    text = values.encode({"w": [RaggedShard((0,), (1, 0, 2))]})
    record, = values.decode(text)["w"]
    assert record.type_name.endswith("RaggedShard") and record.local_units == (1, 0, 2)
    made, = values.decode(text, types=[RaggedShard])["w"]
    assert (type(made), made.dims, made.local_units) == (RaggedShard, (0,), (1, 0, 2))


def test_records_are_values():
    record = Record("a.B", {"x": 1, "keys": [2]})
    assert record == Record("a.B", {"x": 1, "keys": [2]}) != Record("a.C", {"x": 1, "keys": [2]})
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
    assert record["keys"] == [2] and "keys=[2]" in repr(record) and "x" in record and len(record) == 2
    with pytest.raises(AttributeError, match="no field 'y'"):
        record.y
    with pytest.raises(AttributeError, match="cannot be changed"):
        record.x = 2
    with pytest.raises(AttributeError, match="cannot be changed"):
        del record.x
    assert (hash(Record("a.B", {"x": 1})) == hash(Record("a.B", {"x": 1})) and
            hash(record) == hash(copy.deepcopy(record)))
    assert hash(Record("a.B", {"x": 1})) != hash(Record("a.B", {"x": 2}))


def test_meshes_are_values():
    mesh = Mesh("cuda", [[0, 1], [2, 3]], ["dp", "tp"])
    assert (mesh.shape, mesh.ndim, mesh.ranks, mesh.size(), mesh.size(1)) == ((2, 2), 2, (0, 1, 2, 3), 4, 2)
    assert mesh == Mesh("cuda", ((0, 1), (2, 3)), ("dp", "tp")) != Mesh("cpu", [[0, 1], [2, 3]], ["dp", "tp"])
    assert pickle.loads(pickle.dumps(mesh)) == mesh and hash(copy.copy(mesh)) == hash(mesh) and mesh != 5
    with pytest.raises(AttributeError):
        mesh.shape = 1
    for wrong in ([[0, 1], [2]], [[0], 1], ["a"], [True], [-1], [2**40], nested(17, lambda x: [x])):
        with pytest.raises(ValueError):
            Mesh("cpu", wrong)
    for names in (["a"], ["a", 5]):
        with pytest.raises(ValueError):
            Mesh("cpu", [[0]], names)


# ---- hostile text ----

HOSTILE = [
    "{", "[1,]", "nul", '"\\ud800"', '{"\\ud800": 1}', "NaN", "Infinity", "1e999", "9007199254740992", "-" + "9" * 5000,
    "1" * 100000,
    '{"a": 1, "a": 2}', '{"$int": "0x1"}', '{"$int": "0X20000000000000"}', '{"$int": 5}', '{"$int": "12"}',
    '{"$int": "0x20000000000000", "x": 1}',
    '{"$float": "NaN"}', '{"$float": 1}', '{"$float": []}', '{"$complex": [1, 2]}', '{"$complex": [1.0]}',
    '{"$complex": "1j"}',
    '{"$bytes": "a"}', '{"$bytes": "YQ"}', '{"$bytes": "YR=="}', '{"$bytes": "é"}', '{"$bytes": [97]}',
    '{"$bytearray": null}',
    '{"$tuple": {"a": 1}}', '{"$tuple": "ab"}', '{"$tuple": 5}', '{"$set": [[1]]}', '{"$set": [1, 1.0]}',
    '{"$set": {}}', '{"$frozenset": [{"$set": []}]}',
    '{"$dict": {}}', '{"$dict": [1]}', '{"$dict": [[1]]}', '{"$dict": [[1, 2, 3]]}', '{"$dict": [[[], 1]]}',
    '{"$dict": [[1, 1], [true, 2]]}',
    '{"$dict": [[{"$slice": [1, 2, 3]}, 1]]}', '{"$ordereddict": [["a"]]}', '{"$counter": 1}', '{"$defaultdict": []}',
    '{"$defaultdict": [], "factory": "eval"}', '{"$defaultdict": [], "factory": ["list"]}',
    '{"$deque": [1, 2], "maxlen": 1}',
    '{"$deque": [], "maxlen": -1}', '{"$deque": [], "maxlen": 1.5}', '{"$deque": 1}', '{"$range": [0, 1, 0]}',
    '{"$range": [0, 1]}',
    '{"$range": [0, 1, 1.0]}', '{"$range": [true, 1, 1]}', '{"$slice": []}', '{"$datetime": "yesterday"}',
    '{"$datetime": 5}',
    '{"$datetime": "2024-01-01"}', '{"$date": "20240101"}', '{"$time": "25:00"}', '{"$timedelta": [1, 2]}',
    '{"$timedelta": [1e9, 2, 3]}',
    '{"$timedelta": [9999999999, 0, 0]}', '{"$path": 5}', '{"$path": "a", "pure": "mac"}', '{"$path": "\\udcff"}',
    '{"$path": "a", "pure": []}',
    '{"$record": "a.B"}', '{"$record": 5, "fields": {}}', '{"$record": "", "fields": {}}',
    '{"$record": "a.B", "fields": []}',
    '{"$record": "a.B", "fields": {"$int": "0x20000000000000"}}', '{"$record": "a.B", "fields": {"x": 1, "x": 2}}',
    '{"$record": "a\\nB", "fields": {}}', '{"$enum": "a.B", "name": 5, "value": 1}', '{"$enum": "a.B", "name": "x"}',
    '{"$enum": [], "name": "x", "value": 1}',
    '{"$enum": "valuelib.Parts", "name": null, "value": 64}',
    '{"$enum": "valuelib.Parts", "name": "__class__", "value": 1}',
    '{"$tensor": 5}', '{"$tensor": ""}', '{"$tensor": "a", "name": 1}', '{"$tensor": "\\ud800"}',
    '{"$tensor": "a", "b": {"$no": 1}}',
    '{"$numpy": 1}', '{"$numpy": 1, "dtype": "object"}', '{"$numpy": 300, "dtype": "int8"}',
    '{"$numpy": -1, "dtype": "uint8"}',
    '{"$numpy": 1, "dtype": "float32"}', '{"$numpy": 0.1, "dtype": "float32"}', '{"$numpy": 1e300, "dtype": "float32"}',
    '{"$numpy": 1, "dtype": []}',
    '{"$numpy": true, "dtype": "int8"}', '{"$numpy": "a", "dtype": "bytes"}', '{"$numpy": 1, "dtype": "datetime64[x]"}',
    '{"$numpy": 1.0, "dtype": "datetime64[s]"}',
    '{"$numpy": {"$int": "0x10000000000000000"}, "dtype": "datetime64[s]"}', '{"$numpy.dtype": "O"}',
    '{"$numpy.dtype": "i4,i4"}',
    '{"$numpy.dtype": ["a"]}', '{"$numpy.dtype": "|U99999999999"}', '{"$numpy.type": "object_"}', '{"$numpy.type": []}',
    '{"$torch.dtype": "os.system"}', '{"$torch.dtype": 5}', '{"$torch.Size": [1.0]}', '{"$torch.Size": 5}',
    '{"$torch.Size": [true]}',
    '{"$torch.Size": [{"$int": "0x8000000000000000"}]}', '{"$torch.device": "cpu; rm"}', '{"$torch.device": []}',
    '{"$torch.layout": "a b"}',
    '{"$placement": "Shard"}', '{"$placement": "Shard", "dim": "0"}', '{"$placement": "Shard", "dim": true}',
    '{"$placement": "Replicate", "dim": 0}',
    '{"$placement": "DTensor"}', '{"$placement": []}', '{"$placement": "Shard", "dim": {"$int": "0x20000000000000"}}',
    '{"$placement": "Shard", "x": 0}',
    '{"$mesh": [0]}', '{"$mesh": [[0], [1, 2]], "device": "cpu"}', '{"$mesh": 1.5, "device": "cpu"}',
    '{"$mesh": [0], "device": 5}',
    '{"$mesh": [0], "device": "cpu", "names": "d"}', '{"$mesh": [0], "device": "cpu", "names": [1]}',
    '{"$mesh": [[]], "device": "cpu", "names": {}}',
    '{"$set": [{"$numpy": 5, "dtype": "timedelta64"}]}', '{"$unknown": 1}', '{"$": 1}',
    '{"$int": "0x20000000000000", "$bytes": ""}',
    '{"$import": "os"}', '{"$vckpt": 1, "value": 1}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:40]))
def test_hostile_text_is_refused(text):
    with pytest.raises(ValueError) as error:
        read('{"a": [%s]}' % text, types=vl.TYPES)
    assert type(error.value) is ValueError
    assert str(error.value).startswith(('state["a"][0]', "values: not JSON")), error.value


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"\xef\xbb\xbf{}", b'{"$vckpt": 1}',
                                  b'{"$vckpt": 2, "value": 1}', b"5",
                                  b'{"$vckpt": "1", "value": 1}', b'{"$vckpt": 1.0, "value": 1}',
                                  b'{"$vckpt": true, "value": 1}',
                                  b'{"$vckpt": 1, "value": 1, "x": 1}', b'{"$vckpt": 1, "value": 1, "value": 2}',
                                  b'{"$vckpt": 1, "value": 1} x',
                                  b'{"$vckpt": 99999999999999999999, "value": 1}', b'{"value": 1}',
                                  "{\0}".encode("utf-16")], ids=repr)
def test_what_is_no_document_is_refused(data):
    with pytest.raises(ValueError, match="^values: ") as error:
        values.decode(data)
    assert type(error.value) is ValueError


@pytest.mark.parametrize("text", ["[" * 10**6, "[" * 5000 + "]" * 5000, '{"a":' * 10**5, '{"$tuple": [' * 10**5,
                                  '\\"' * 10**6, '["' + "[" * 10**6,
                                  "[" * 150 + "]" * 150, '{"$dict": [[1, ' * 130 + "0" + "]]}" * 130,
                                  '{"$tuple": [' * 101 + "]}" * 101,
                                  '{"$torch.Size": ' * 120 + "0" + "}" * 120,
                                  '{"$slice": [0, 0, ' * 120 + "0" + "]}" * 120,
                                  '{"$enum": "a", "name": "b", "value": ' * 120 + "0" + "}" * 120,
                                  '{"$mesh": ' + "[" * 200 + "]" * 200 + ', "device": "x"}'],
                         ids=lambda text: ascii(text[:20]))
def test_deep_text_is_refused(text):
    limit = sys.getrecursionlimit()
    with pytest.raises(ValueError):
        read(text)
    try:
        sys.setrecursionlimit(10**6)                    # the bound does not lean on the interpreter's
        with pytest.raises(ValueError):
            read(text)
    finally:
        sys.setrecursionlimit(limit)


def test_a_nearly_full_stack_is_an_error_of_its_own():
    text = values.encode(nested(99, lambda x: [x]))

    def down(n):
        return down(n - 1) if n else (values.decode(text), values.encode([nested(90, lambda x: [x])]))
    frame, used = sys._getframe(), 0
    while frame:
        frame, used = frame.f_back, used + 1
    with pytest.raises(ValueError, match="stack"):
        down(sys.getrecursionlimit() - used - 80)


def test_brackets_in_strings_do_not_count():
    there_and_back(["[{" * 1000, '"\\' * 1000] + [[]] * 1000)


def test_mutated_documents_never_do_worse(scale):
    """Damaged text is read or refused with a ValueError, nothing else."""
    seeds = [values.encode(value) for value in (
        {"a": [1, 2.5, (3, b"x"), {4, 5}], 1: np.float32(2)},
        [Config(0.5), Phase.DECAY, Parts.DATA | Parts.MODEL, Point(1, 2)],
        [collections.deque([1], 2), collections.Counter("aab"), slice(1), range(3), pathlib.Path("x"),
         datetime.timedelta(1)],
        [Mesh("cpu", [[0, 1]], ["a", "b"]), np.datetime64(1, "s"), np.dtype("f4"), 2**80, math.inf, 1j])]
    rng = random.Random(11)
    kept = 0
    tags = [tag.encode() for tag in TAGS] + [b"$numpy", b"$mesh", b"$tensor", b"value", b"dtype", b"[", b"{", b"null",
                                             b"1e5", b'"x"', b"\xff"]
    for _ in range(scale(4000, 60000)):
        text = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            at, end = rng.randrange(len(text)), rng.randrange(9)
            text[at:at + end] = rng.choice((b"", bytes([rng.randrange(256)]), rng.choice(tags),
                                            text[at + end:at + 2 * end]))
        try:
            values.decode(bytes(text), types=vl.TYPES)
            kept += 1
        except ValueError as error:
            assert type(error) is ValueError
    assert kept > 0


def test_nothing_that_is_named_is_run(tmp_path):
    mark = tmp_path / "ran"
    for name in ("os.system", "builtins.exec", "subprocess.Popen", "pathlib.Path.touch", "valuelib.Config"):
        for text in ('{"$record": "%s", "fields": {"command": "touch %s"}}',
                     '{"$enum": "%s", "name": "touch %s", "value": 1}'):
            made = read(text % (name, mark))
            assert type(made) is Record and made.type_name == name
    assert not mark.exists()


def test_any_spelling_of_json_is_read():
    """Another writer's blanks and escapes are as good."""
    assert values.decode(b'\n{ "value" :{"b":[1 ,2e0,"\\u00e9"]},"$vckpt":1}\t') == {"b": [1, 2.0, "é"]}
    assert values.decode(json.dumps(json.loads(values.encode({"x": (1, b"y")}))).encode()) == {"x": (1, b"y")}
    assert read('{"$bytes": "%s"}' % base64.b64encode(b"q").decode()) == b"q"
    assert values.decode(bytearray(values.encode(5))) == values.decode(memoryview(values.encode(5))) == 5
