# SPDX-License-Identifier: Apache-2.0
"""Which steps rules keep (core/upkeep/retain.h, docs/prune.md), against a model in Python."""
import ctypes as c
import datetime
import errno
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storelib import Attribute, Error
from test_expressions import Step

ALWAYS = ["highest", "newest", "last", "pinned", "tagged"]
DAY = 86400 * 10**9
NOW = 20_700 * DAY + 12 * 3600 * 10**9


class Row(c.Structure):
    _fields_ = [("step", Step), ("entry", c.c_uint64), ("rewritten", c.c_bool), ("rules", c.c_uint64),
                ("always", c.c_uint)]


@pytest.fixture(scope="module")
def lib(build):
    lib = c.CDLL(os.path.join(build, "tests/libvckpt_internal.so"))
    lib.upkeep_retain_new.restype = c.c_void_p
    lib.upkeep_retain_free.argtypes = [c.c_void_p]
    lib.upkeep_retain_count.argtypes = [c.c_void_p]
    return lib


def apply(lib, rules, rows):
    """[(rules that keep it, what always keeps it)], or an error's (code, sentence)"""
    k, err = c.c_void_p(lib.upkeep_retain_new()), Error()
    try:
        for rule in rules:
            if lib.upkeep_retain_add(k, rule.encode(), c.byref(err)) < 0:
                return err.code, err.text.decode()
        array = (Row * (len(rows) + 1))()
        for at, row in zip(array, rows):
            attributes = sorted(row["attributes"].items())
            at.step = Step(b"r", row["step"], row["bytes"], row["time"], NOW, row["pinned"],
                           (c.c_char_p * (len(row["tags"]) + 1))(*(t.encode() for t in sorted(row["tags"]))),
                           len(row["tags"]),
                           (Attribute * (len(attributes) + 1))(*((a.encode(), v.encode()) for a, v in attributes)),
                           len(attributes))
            at.entry, at.rewritten = row["entry"], row.get("rewritten", False)
        if lib.upkeep_retain_apply(k, array, c.c_size_t(len(rows)), c.byref(err)) < 0:
            return err.code, err.text.decode()
        return [({i for i in range(64) if at.rules >> i & 1},
                 {name for i, name in enumerate(ALWAYS) if at.always >> i & 1}) for at in array[:len(rows)]]
    finally:
        lib.upkeep_retain_free(k)


# ---- the model ----

# Of keep-if: (the attribute that some step has to have, what it says of a step).
CONDITIONS = {
    "loss < 2": ("loss", lambda r: float(r["attributes"].get("loss", "nan")) < 2),
    "not loss < 2 and step >= 3": ("loss", lambda r: not float(r["attributes"].get("loss", "nan")) < 2 and
                                   r["step"] >= 3),
    "has score or pinned": ("score", lambda r: "score" in r["attributes"] or r["pinned"]),
    "tag == best or step == 1": (None, lambda r: "best" in r["tags"] or r["step"] == 1),
}


def when(row, now=NOW):
    return datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=min(row["time"], now) // 1000)


def kept(rule, rows, now=NOW):
    """The steps that the rule keeps; None: an error."""
    word, _, value = rule.partition("=")
    newest_first = sorted(rows, key=lambda r: (min(r["time"], now), r["step"]), reverse=True)
    if word == "keep-last":
        return {r["step"] for r in rows[-int(value):]}
    if word == "keep-every":
        return {r["step"] for r in rows if r["step"] % int(value) == 0}
    if word == "keep-within":
        return {r["step"] for r in rows if max(0, now - r["time"]) <= int(value[:-1]) * DAY}
    if word == "keep-step":
        return {r["step"] for r in rows if str(r["step"]) in value.split(",")}
    if word == "keep-if":
        needs, holds = CONDITIONS[value]
        if needs and not any(needs in r["attributes"] for r in rows):
            return None
        return {r["step"] for r in rows if holds(r)}
    if word == "keep-best":
        k, name, *order = value.split(":")
        have = [r for r in rows if name in r["attributes"]]
        if not have:
            return None
        sign = -1 if order == ["max"] else 1
        have = [(sign * float(r["attributes"][name]), -r["step"]) for r in have]
        return {-step for value, step in sorted(h for h in have if not math.isnan(h[0]))[:int(k)]}
    period = {"keep-daily": lambda r: when(r, now).date(),
              "keep-weekly": lambda r: when(r, now).isocalendar()[:2]}[word]
    seen = {}
    for r in newest_first:
        seen.setdefault(period(r), r["step"])
    return set(list(seen.values())[:int(value)])


def model(rules, rows, now=NOW):
    by = [kept(rule, rows, now) for rule in rules]
    if rows and None in by:
        return None
    saved = [r for r in rows if not r.get("rewritten")]
    always = {"highest": max(r["step"] for r in rows),
              "last": max(saved, key=lambda r: r["entry"])["step"] if saved else None,
              "newest": max(rows, key=lambda r: (r["time"], r["step"]))["step"]} if rows else {}
    return [({i for i, steps in enumerate(by) if r["step"] in steps},
             {name for name, step in always.items() if step == r["step"]} | ({"pinned"} if r["pinned"] else set())
             | ({"tagged"} if r["tags"] else set())) for r in rows]


numbers = st.sampled_from(["1", "2", "1.5", "-1", "nan", "inf", "-inf", "1e3", "2.0", "0"])
times = st.one_of(st.integers(NOW - 30 * DAY, NOW + DAY), st.integers(-2 * DAY, 2 * DAY),
                  st.sampled_from([NOW, NOW - DAY, NOW - 7 * DAY, NOW - NOW % DAY, NOW - NOW % DAY - 1]))


@st.composite
def runs(draw):
    steps = sorted(draw(st.sets(st.integers(0, 30) | st.sampled_from([1000, 2**63 - 1]), max_size=12)))
    entries = draw(st.permutations(range(len(steps))))
    return [{"step": s, "entry": e, "bytes": 1, "rewritten": draw(st.integers(0, 3)) == 0, "time": draw(times),
             "pinned": draw(st.integers(0, 5)) == 0,
             "tags": draw(st.sampled_from([[], [], [], ["best"]])),
             "attributes": draw(st.dictionaries(st.sampled_from(["loss", "score"]), numbers))}
            for s, e in zip(steps, entries)]


small = st.integers(1, 5).map(str)
rule = st.one_of(
    st.tuples(st.sampled_from(["keep-last", "keep-every", "keep-daily", "keep-weekly"]), small).map("=".join),
    st.integers(0, 20).map(lambda d: f"keep-within={d}d"),
    st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda s: "keep-step=" + ",".join(map(str, s))),
    st.sampled_from(sorted(CONDITIONS)).map(lambda text: f"keep-if={text}"),
    st.tuples(small, st.sampled_from(["loss", "score"]), st.sampled_from(["", ":min", ":max"])).map(
        lambda t: f"keep-best={t[0]}:{t[1]}{t[2]}"))


def test_model(lib, scale):
    @settings(max_examples=scale(400, 10000), deadline=None)
    @given(st.lists(rule, max_size=5), runs())
    def check(rules, rows):
        got, want = apply(lib, rules, rows), model(rules, rows)
        if want is None:
            assert got[0] == -errno.EINVAL and "no step has attribute" in got[1]
        else:
            assert got == want
    check()


def step(number, **more):
    return {"step": number, "entry": number, "bytes": 1, "time": NOW - DAY, "pinned": False, "tags": [],
            "attributes": {}, **more}


def test_what_is_saved_just_now_stays_whatever_the_clock_says(lib):
    """Of a job that went back with a clock that was set back: lowest number, oldest time, last entry."""
    rows = [step(5, time=NOW - 40 * DAY, entry=99), step(10, time=NOW), step(20, time=NOW + DAY)]
    got = apply(lib, ["keep-within=1d"], rows)
    assert [always for _, always in got] == [{"last"}, set(), {"highest", "newest"}]
    assert [bool(rules) for rules, _ in got] == [False, True, True]


def test_forged_attributes(lib):
    rows = [step(1, attributes={"loss": "1"}), step(2, attributes={"loss": "abc\x1b[2J" * 400})]
    code, text = apply(lib, ["keep-best=1:loss"], rows)
    assert code == -errno.EINVAL and "step 2 has loss 'abc" in text and "no number" in text
    got = apply(lib, ["keep-if=loss < 2"], rows)
    assert [bool(rules) for rules, _ in got] == [True, False]
    assert apply(lib, ["keep-if=lsos < 2"], rows) == (-errno.EINVAL, "keep-if=lsos < 2: no step has attribute 'lsos'")
    assert apply(lib, ["keep-if=lsos < 2"], []) == []


@pytest.mark.parametrize("rule, words", [
    ("keep-last", "a value after ="), ("keep-last=", "a number from 1 on"), ("keep-last=0", "a number from 1 on"),
    ("keep-last=-1", "a number"), ("keep-last=3x", "a number"), ("keep-last=99999999999999999999", "a number"),
    ("keep-every=0", "a number"), ("keep-within=7", "a duration"), ("keep-within=", "a duration"),
    ("keep-daily=1.5", "a number"), ("keep-best=loss", "K:ATTRIBUTE"), ("keep-best=0:loss", "K:ATTRIBUTE"),
    ("keep-best=1:", "the name of an attribute"), ("keep-best=1:a b", "the name of an attribute"),
    ("keep-best=1:loss:median", ":min or :max"), ("keep-best=1:loss:max:x", ":min or :max"),
    ("keep-step=", "numbers of steps"), ("keep-step=1,", "numbers of steps"), ("keep-step=1,,2", "numbers of steps"),
    ("keep-step=9223372036854775808", "numbers of steps"), ("keep-if=", "column 1"),
    ("keep-if=loss <", "column 7"), ("warn-free=0", "bytes"), ("warn-free=ten", "bytes")])
def test_wrong_rules(lib, rule, words):
    code, text = apply(lib, [rule], [])
    assert code == -errno.EINVAL and words in text and rule.split("=")[0] in text


def test_rules_of_a_newer_vckpt(lib):
    for word in ("keep-lst=3", "keep-monthly=1", "keep-las=1", "keep-last2=1", "", "=", "x"):
        code, text = apply(lib, [word], [])
        assert code == -errno.EPROTONOSUPPORT and f"'{word}'" in text and "update vckpt" in text
    assert apply(lib, ["keep-last=1"] * 64, []) == []
    assert apply(lib, ["keep-last=1"] * 65, [])[0] == -errno.E2BIG
