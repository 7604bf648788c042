# SPDX-License-Identifier: Apache-2.0
"""Expressions about steps (docs/expressions.md) against a model in Python, and every text that is none."""
import ctypes as c
import datetime
import errno
import fnmatch
import math
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storelib import Attribute, Error

NAMES = [("step", 1), ("time", 4), ("age", 3), ("bytes", 2), ("run", 0), ("tag", 0), ("pinned", 5)]
NOW = 1_800_000_000 * 10**9
UNITS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9, "w": 7 * 86400 * 10**9}


class Name(c.Structure):
    _fields_ = [("name", c.c_char_p), ("kind", c.c_int), ("of_tensor", c.c_bool), ("take", c.c_void_p),
                ("expects", c.c_char_p)]


class Step(c.Structure):
    _fields_ = [("run", c.c_char_p), ("step", c.c_uint64), ("bytes", c.c_uint64), ("time_ns", c.c_int64),
                ("now_ns", c.c_int64), ("pinned", c.c_bool), ("tags", c.POINTER(c.c_char_p)), ("ntags", c.c_size_t),
                ("attributes", c.POINTER(Attribute)), ("nattributes", c.c_size_t)]


class Subject(c.Structure):
    _fields_ = [("value", c.c_void_p), ("arg", c.c_void_p), ("one", c.c_void_p)]


@pytest.fixture(scope="module")
def query(build):
    return Query(c.CDLL(os.path.join(build, "tests/libvckpt_internal.so")))


class Query:
    def __init__(self, lib):
        self.lib, self.names = lib, (Name * len(NAMES))(*((n.encode(), k) for n, k in NAMES))
        lib.query_expr_holds.restype = c.c_bool
        lib.query_expr_attribute.restype = c.c_char_p
        lib.query_expr_attribute.argtypes = [c.c_void_p, c.c_size_t]
        lib.query_expr_free.argtypes = [c.c_void_p]
        for kind in ("number", "duration", "date", "bytes"):
            getattr(lib, f"query_{kind}_parse").restype = c.c_bool

    def parse(self, text):
        """(expression, None) or (None, (code, sentence))"""
        e, err = c.c_void_p(), Error()
        r = self.lib.query_expr_parse(text.encode() if isinstance(text, str) else text, self.names,
                                      c.c_size_t(len(NAMES)), c.byref(e), c.byref(err))
        assert r == 0 or (r == err.code and err.text)
        return (e, None) if r == 0 else (None, (r, err.text.decode(errors="replace")))

    def holds(self, text, step):
        e, why = self.parse(text)
        assert e, why
        tags = sorted(step["tags"])
        attributes = sorted(step["attributes"].items())
        s = Step(step["run"].encode(), step["step"], step["bytes"], step["time"], NOW, step["pinned"],
                 (c.c_char_p * (len(tags) + 1))(*(t.encode() for t in tags)), len(tags),
                 (Attribute * (len(attributes) + 1))(*((k.encode(), v.encode()) for k, v in attributes)),
                 len(attributes))
        value = c.cast(self.lib.query_step_value, c.c_void_p)
        got = self.lib.query_expr_holds(e, c.byref(Subject(value, c.addressof(s))))
        self.lib.query_expr_free(e)
        return got


# ---- the model: what the page says ----

def number(text):
    if re.fullmatch(r"[+-]?\d+", text) and -2**63 <= int(text) < 2**63:
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|infinity|nan)", text, re.I | re.A):
        return float(text)
    return None


def compare(op, a, b):
    if float in (type(a), type(b)):
        a, b = float(a), float(b)
    return {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b}[op]


def model(tree, step):
    if tree[0] in ("and", "or"):
        a, b = model(tree[1], step), model(tree[2], step)
        return a and b if tree[0] == "and" else a or b
    if tree[0] == "not":
        return not model(tree[1], step)
    if tree[0] == "has":
        return bool(step["tags"]) if tree[1] == "tag" else tree[1] in step["attributes"]
    if tree[0] == "pinned":
        return step["pinned"]
    op, name, text = tree
    fixed = {"step": int, "bytes": int, "run": str, "tag": str,
             "age": lambda t: int(t[:-1]) * UNITS[t[-1]],
             "time": lambda t: int(datetime.datetime.fromisoformat(t + "T00:00:00+00:00").timestamp()) * 10**9}
    if name in fixed:
        want = fixed[name](text)
        values = {"tag": step["tags"], "age": [max(0, NOW - step["time"])]}.get(name) or (
            [] if name == "tag" else [step[name]])
        pairs = [(v, want) for v in values]
    else:
        values = [step["attributes"][name]] if name in step["attributes"] else []
        pairs = [(v.encode(), text.encode()) if number(v) is None or number(text) is None
                 else (number(v), number(text)) for v in values]
    if op == "~":
        return any(re.match(fnmatch.translate(text), v, re.S) is not None for v in values)
    if op == "!=":
        return bool(pairs) and not any(compare("==", a, b) for a, b in pairs)
    return any(compare(op, a, b) for a, b in pairs)


KEYS = ["loss", "phase", "lr.max", "a-b", "_x"]
VALUES = ["1", "-1", "+1", "1.0", "1e0", "01", ".5", "5.", "2.31", "-0", "0", "nan", "NaN", "inf", "-Infinity", "1e400",
          "9223372036854775807", "9223372036854775806", "9223372036854775808", "-9223372036854775808", "0x10", "1_0",
          "", "warmup", "warm up", "eval-3", "é", "a(b)", "2,31", "1e", "e1", ".", "+", "1d"]
PATTERNS = ["*", "?", "eval-*", "*-3", "[a-z]*", "[!a-z]*", "warm?up", "", "*a*b*"]
texts = st.sampled_from(VALUES)
comparison = st.one_of(
    st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.sampled_from(KEYS), texts),
    st.tuples(st.just("~"), st.sampled_from([*KEYS, "run", "tag"]), st.sampled_from(PATTERNS)),
    st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.sampled_from(["step", "bytes"]),
              st.integers(0, 2**64 - 1).map(str) | st.sampled_from(["0", "10", "1000"])),
    st.tuples(st.sampled_from(["<", ">=", "==", "!="]), st.just("age"),
              st.sampled_from(["0s", "1h", "30m", "7d", "2w"])),
    st.tuples(st.sampled_from(["<", ">=", "=="]), st.just("time"),
              st.sampled_from(["1970-01-01", "2000-02-29", "2027-01-15", "2261-12-31"])),
    st.tuples(st.sampled_from(["<", "==", "!="]), st.sampled_from(["run", "tag"]), st.sampled_from(["a", "b", "best"])),
    st.tuples(st.just("has"), st.sampled_from([*KEYS, "tag"])), st.just(("pinned",)))
trees = st.recursive(comparison, lambda inner: st.one_of(
    st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)), max_leaves=12)
steps = st.fixed_dictionaries({
    "run": st.sampled_from(["a", "b", "run-1"]), "step": st.sampled_from([0, 10, 1000, 2**63 - 1]),
    "bytes": st.sampled_from([0, 10, 2**64 - 1]), "pinned": st.booleans(),
    "time": st.sampled_from([0, -1, NOW, NOW + 1, NOW - UNITS["h"], NOW - UNITS["d"] * 7, NOW - UNITS["w"] * 9,
                             -2**63, 2**63 - 1]),
    "tags": st.lists(st.sampled_from(["a", "b", "best", "eval-3"]), unique=True),
    "attributes": st.dictionaries(st.sampled_from(KEYS), texts)})


def quoted(text, quote):
    return quote + re.sub(rf"[\\{quote}]", lambda m: "\\" + m[0], text) + quote


@st.composite
def written(draw, tree, inner=False):
    """The tree as text: quotation marks, blanks and parentheses more or fewer."""
    blank = st.sampled_from(["", " ", "  ", "\t", "\n"])
    if tree[0] in ("and", "or"):
        text = f"({draw(written(tree[1]))}) {tree[0]} ({draw(written(tree[2]))})"
    elif tree[0] == "not":
        text = f"not({draw(written(tree[1]))})"
    elif tree[0] == "has":
        text = f"has {tree[1]}"
    elif tree[0] == "pinned":
        text = "pinned"
    else:
        op, name, value = tree
        bare = value and not re.search(r"[ \t\r\n()<>=!~'\"]", value)
        value = value if bare and draw(st.booleans()) else quoted(value, draw(st.sampled_from("'\"")))
        name = quoted(name, '"') if name in KEYS and draw(st.booleans()) else name
        text = f"{name}{draw(blank)}{op}{draw(blank)}{value}"
    return draw(blank) + (f"({text})" if draw(st.booleans()) else text) + draw(blank)


@pytest.mark.parametrize("_", [0])
def test_model(query, scale, _):
    @settings(max_examples=scale(400, 5000), deadline=None)
    @given(trees.flatmap(lambda t: st.tuples(st.just(t), written(t))), steps)
    def check(pair, step):
        assert query.holds(pair[1], step) == model(pair[0], step), pair[1]
    check()


def test_precedence(query):
    step = {"run": "r", "step": 5, "bytes": 1, "pinned": False, "time": 0, "tags": [], "attributes": {"a": "1"}}
    assert query.holds("a == 1 or a == 1 and a == 2", step)
    assert query.holds("not a == 2 and a == 1", step)
    assert query.holds("not not a == 1", step)
    assert not query.holds("not a == 1 or a == 2", step)
    assert query.holds("bytes < 1KiB and bytes<1K and step>=5", step)


@pytest.mark.parametrize("text, column, words", [
    ("", 1, "a name is expected at the end"), ("   ", 4, "at the end"), ("loss", 5, "one of < <="),
    ("loss <", 7, "a value is expected at the end"), ("loss < < 3", 8, "a value is expected, not <"),
    ("loss = 3", 6, "equal is =="), ("loss ! 3", 6, "no operator !"), ("2.3 > loss", 1, "comes first"),
    ("loss < 3 loss < 4", 10, "and, or, or the end is expected, not loss"), ("(loss < 3", 10, "and, or, or )"),
    ("loss < 3)", 9, "not )"), ("loss < 'x", 8, "no second one"), ("and loss < 3", 1, "not and"),
    ("has", 4, "a name"), ("has and", 5, "not and"), ("step < 1e3", 8, "a number is expected, not 1e3"),
    ("step < -1", 8, "a number"), ("age > 7", 7, "a duration"), ("age > 7y", 7, "a duration"),
    ("time > yesterday", 8, "a date"), ("time > 2026-02-29", 8, "a date"), ("time > 2026-13-01", 8, "a date"),
    ("bytes > 3X", 9, "number of bytes"), ("step ~ 3*", 8, "compares text"), ("loss ~ [a", 8, "without its ]"),
    ("pinned == 1", 8, "and, or, or the end"), ("has 'a b'", 5, "comes first"), ("x < 3 or", 9, "at the end"),
    ("not", 4, "a name"), ("()", 2, "a name"), ("x < 3 or and", 10, "not and"),
])
def test_wrong(query, text, column, words):
    e, (code, sentence) = query.parse(text)
    assert not e and code == -errno.EINVAL
    assert sentence.startswith(f"column {column} of '") and words in sentence, sentence


def test_bounds(query):
    assert query.parse("(" * 64 + "a<1" + ")" * 64)[0]
    assert "within each other" in query.parse("(" * 65 + "a<1" + ")" * 65)[1][1]
    assert "within each other" in query.parse("not " * 65 + "a<1")[1][1]
    long = " or ".join(["a<1"] * 585)
    assert query.parse(long + " " * (4096 - len(long)))[0]
    assert query.parse("a<1" + " " * 4094)[1][0] == -errno.E2BIG
    step = {"run": "r", "step": 5, "bytes": 1, "pinned": True, "time": 0, "tags": [], "attributes": {"a": "0"}}
    assert query.holds(long, step)
    deep = "(pinned or " * 60 + "pinned" + ")" * 60
    assert query.holds(deep, step)


@pytest.mark.parametrize("_", [0])
def test_any_text(query, scale, _):
    """Whatever the text is, it is parsed or refused with a column inside it."""
    words = st.sampled_from(["and", "or", "not", "has", "(", ")", "<", "<=", "==", "!", "~", "'", '"', "\\", "step",
                             "tag", "pinned", "7d", "x", " ", "é", "\x1b", "[", "]"])
    noise = st.lists(words | st.text(max_size=3), max_size=30).map("".join)

    @settings(max_examples=scale(500, 20000), deadline=None)
    @given(noise.map(str.encode) | st.binary(max_size=60))
    def check(text):
        text = text.replace(b"\0", b"")
        e, why = query.parse(text)
        if e:
            query.lib.query_expr_free(e)
        else:
            assert 1 <= int(re.match(r"column (\d+) of ", why[1])[1]) <= len(text) + 1
    check()


def test_attributes(query):
    e, _ = query.parse("loss < 3 and (has 'step' or not tag == x) and step > 3 and loss > 1")
    assert [query.lib.query_expr_attribute(e, i) for i in range(4)] == [b"loss", b"step", b"loss", None]
    query.lib.query_expr_free(e)


def test_values(query):
    def value(kind, text, to=c.c_uint64):
        out = to()
        return out.value if getattr(query.lib, f"query_{kind}_parse")(text.encode(), c.byref(out)) else None
    assert value("duration", "1d12h") == 36 * UNITS["h"] and value("duration", "0s") == 0
    assert [value("duration", t) for t in ("", "7", "d", "-1d", "1 d", "1d ", "999999999999w", "1.5d")] == [None] * 8
    assert value("bytes", "3GiB") == 3 << 30 and value("bytes", "3") == 3
    assert [value("bytes", t) for t in ("", "K", "3GB", "3k", "-3", "99999999999999T")] == [None] * 6
    at = datetime.datetime(2026, 11, 21, 3, 34, 56, tzinfo=datetime.timezone.utc)
    for text, when in (("2026-11-21T03:34:56Z", at), ("2026-11-21T03:34:56", at), ("2026-11-21T03:34",
                       at.replace(second=0)), ("2026-11-21", at.replace(hour=0, minute=0, second=0))):
        assert value("date", text, c.c_int64) == int(when.timestamp()) * 10**9
    assert [value("date", t) for t in ("", "2026", "2026-11-21T", "2026-11-21T24:00", "2026-11-21 03:34", "1969-12-31",
                                       "2262-01-01", "2026-11-21Z", "２026-11-21")] == [None] * 9
    day = datetime.date(1970, 1, 1)
    for days in range(0, 100_000, 97):
        assert value("date", str(day + datetime.timedelta(days)), c.c_int64) == days * UNITS["d"]
    assert math.isnan(number("nan"))
