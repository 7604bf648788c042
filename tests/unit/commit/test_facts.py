# SPDX-License-Identifier: Apache-2.0
"""The facts of steps after their commits, and the policy of a run (docs/format/list.md, "Facts")."""
import ctypes as c
import errno
import os
import random
import shutil
import subprocess
import time

import pytest

import reader
from factslib import (EMPTY, Model, all_said, change, facts_entry, fails, merged, policy, policy_put, row, said, state,
                      tagged)
from ranklib import Meddler
from storelib import ABORT, NONE, REMOVE, SNAPSHOT, Attempt, Failed, Live, fresh, save
from test_list import ruin
from test_list_head import collect
from test_list_snapshots import EVERY, Newest, entry_of, lie, reads

RUN, TAGS, KEYS = "r", ["best", "eval", "x.1", "sent"], ["loss", "note", "k"]


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def commit(l, step, replaces=NONE, state=None, attributes=()):
    """Of an attempt that was never there before; of a writer, which checks what it replaces."""
    e = l.api.commit_entry(f"{random.Random(f'{step} {l.next}').getrandbits(64):016x}-0", step, replaces, l.next,
                           attributes)
    if state:
        facts = row(NONE, *state)
        e.commit.facts = c.pointer(facts)
    return l.put(e)


def commits(l, steps):
    return [commit(l, s) for s in steps]


def passes(l, n):
    """So many entries that decide nothing."""
    for _ in range(n):
        l.put(l.api.entry(ABORT, attempt=b"%016x-9" % l.next, reason=b"x"))


def everyone_agrees(api, model, run=RUN):
    for l in (api.list(run, True), api.list(run), Newest(api, run)):
        if isinstance(l, Newest):
            model.agrees(l, False)
            l.know("all")
        model.agrees(l)
        l.close()


def pages_agree(api, tmp_path, run=RUN):
    """The reader that was written from the pages knows the same, and finds nothing wrong."""
    shutil.copytree(api.path, tmp_path / "copy", dirs_exist_ok=True)
    store = reader.Store(tmp_path / "copy")
    store.open()
    found = reader.List(store, run).read()
    assert store.faults == []
    with api.list(run, True) as l:
        want = all_said(l)
        rules = policy(l)
    states = {step: found.facts.states.get(entry) for step, (entry, _) in found.visible.items()}
    states = {step: (s["reason"] if s["pinned"] else None, tuple(s["tags"]), s["attributes"])
              for step, s in states.items() if s}
    assert {step: s for step, s in states.items() if s != EMPTY} == want
    assert (found.facts.policy or {}).get("rules") == rules


# ---- one change ----

def test_what_is_said_of_a_step(api):
    with api.list(RUN) as l, api.list(RUN) as other:
        one, two = commit(l, 1, attributes=[("a", "1"), ("loss", "2.5")]), commit(l, 2)
        assert said(l, one) == EMPTY
        assert change(l, 1, pin=1, reason="paper", tags=["best", "a"], set={"loss": "2", "z": ""}) == 0
        assert said(l, one) == ("paper", ("a", "best"), {"loss": "2", "z": ""})
        assert merged(l, 1) == [("a", "1"), ("loss", "2"), ("z", "")] and merged(l, 2) == []
        assert (tagged(l, "best"), tagged(l, "none")) == (1, None)
        assert change(l, 2, two, tags=["best"]) == 0
        assert (tagged(l, "best"), said(l, one)[1], said(l, two)) == (2, ("a",), (None, ("best",), {}))
        assert change(l, 1, pin=-1, untags=["a", "best"], set={"loss": None}) == 0
        assert said(l, one) == (None, (), {"z": ""}) and merged(l, 1) == [("a", "1"), ("loss", "2.5"), ("z", "")]
        other.refresh()
        assert all_said(other) == all_said(l) == {1: (None, (), {"z": ""}), 2: (None, ("best",), {})}


def test_nothing_to_change_puts_nothing(api):
    with api.list(RUN) as l:
        commit(l, 1, attributes=[("a", "1")])
        change(l, 1, pin=1, reason="x", tags=["best"], set={"k": "v"})
        n = l.next
        for same in ({}, {"pin": 1}, {"pin": 1, "reason": "x"}, {"tags": ["best", "best"]}, {"untags": ["no"]},
                     {"set": {"k": "v", "a": "1"}}):
            assert change(l, 1, **same) == 1 and l.next == n
        assert policy_put(l) == 1
        assert policy_put(l, "keep-last=3") == 0 and policy_put(l, "keep-last=3") == 1 and policy(l) == ["keep-last=3"]
        assert policy_put(l, "keep-last=3", "x") == 0 and policy_put(l) == 0 and policy(l) is None


@pytest.mark.parametrize("tag", ["", "latest", "12", "0", "step-00000001", "step-x", ".a", "-a", "a/b", "a b", "a" * 65,
                                 "\u00fc", "a\n"])
def test_what_is_no_tag(api, tag):
    with api.list(RUN) as l:
        commit(l, 1)
        with pytest.raises(Failed, match="cannot be a tag") as e:
            change(l, 1, tags=[tag])
        assert e.value.code == -errno.EINVAL
        for good in ("a" * 64, "0x", "_", "Latest", "1.5", "steps"):
            assert change(l, 1, tags=[good]) == 0


def test_what_cannot_be_changed(api):
    with api.list(RUN) as l:
        n = commit(l, 1, attributes=[("a", "1")])
        for code, what in [(errno.ENOENT, dict(step=2, pin=1)), (errno.ESTALE, dict(step=1, entry=n + 1, pin=1)),
                           (errno.ESTALE, dict(step=2, entry=n, pin=1)), (errno.ENOENT, dict(step=1, set={"a": None})),
                           (errno.EINVAL, dict(step=1, set={"9": "x"})), (errno.EINVAL, dict(step=1, pin=1,
                                                                                             reason="x" * 1025)),
                           (errno.EINVAL, dict(step=1, set={"k": "x" * 4097})),
                           (errno.EINVAL, dict(step=1, set={f"k{i}": "x" * 4096 for i in range(16)})),
                           (errno.EINVAL, dict(step=1, set={f"k{i}": "" for i in range(1025)})),
                           (errno.EINVAL, dict(step=1, tags=[f"t{i}" for i in range(65)]))]:
            with fails(code):
                change(l, **what)
        assert l.next == n + 1
        assert change(l, 1, tags=[f"t{i}" for i in range(64)], set={f"k{i}": "" for i in range(1024)}) == 0
        for rules in (["x"] * 65, [""], ["x" * 1025]):
            with fails(errno.EINVAL):
                policy_put(l, *rules)


def test_a_store_of_an_earlier_vckpt(api):
    """It lacks the word: nothing is put in it that its readers would refuse."""
    api.p.contents.info.list_4 = False
    try:
        with api.list(RUN) as l:
            n = commit(l, 1)
            for f in (lambda: change(l, 1, pin=1), lambda: policy_put(l, "x")):
                with pytest.raises(Failed, match="the word list-4") as e:
                    f()
                assert e.value.code == -errno.ENOTSUP and l.next == n + 1
    finally:
        api.p.contents.info.list_4 = True


def test_two_writers_at_once(api):
    """The second changes what the first has said, whenever it last read the list."""
    with api.list(RUN) as a, api.list(RUN) as b:
        n = commit(a, 1)
        b.refresh()
        for i in range(10):
            change(a, 1, set={f"a{i}": "1"})
            change(b, 1, set={f"b{i}": "2"}, tags=[f"t{i}"])
        a.refresh()
        assert said(a, n) == said(b, n) == (None, tuple(f"t{i}" for i in range(10)), {
            **{f"a{i}": "1" for i in range(10)}, **{f"b{i}": "2" for i in range(10)}})


# ---- pins ----

def test_a_pinned_step_stays(api):
    with api.list(RUN) as l, api.list(RUN) as late:
        n = commit(l, 7)
        late.refresh()
        change(l, 7, pin=1, reason="sent to\nreview")
        for f in (lambda: api.remove_step(RUN, 7),
                  lambda: api.call(api.lib.commit_list_remove, late.p, c.c_uint64(7), c.c_uint64(n), None)):
            with pytest.raises(Failed, match=r"r/7 is pinned \(sent to\?review\), so it is not removed \(vckpt unpin "
                               r"r/7\)") as e:
                f()
            assert e.value.code == -errno.EADV
        l.refresh()
        assert l.steps().keys() == {7}
        change(l, 7, pin=-1)
        api.call(api.lib.commit_list_remove, late.p, c.c_uint64(7), c.c_uint64(n), b"keep-last=3")
        l.refresh()
        assert l.steps() == {} and said(l, n) == EMPTY
        e = entry_of(api, RUN, l.next - 1)
        assert (e.kind, e.reason) == (REMOVE, b"keep-last=3")
        api.lib.proto_entry_release(c.byref(e))


# ---- what snapshots say ----

def small(api, n, run=RUN):
    """{entry: state} and the policy of a snapshot."""
    e = entry_of(api, run, n)
    found = {f.entry: state(f) for f in e.facts.steps[:e.facts.nsteps]}
    rules = [r.decode() for r in e.facts.policy.rules[:e.facts.policy.nrules]] if e.facts.policed else None
    assert e.kind == SNAPSHOT and e.facts.there == bool(found or rules)
    api.lib.proto_entry_release(c.byref(e))
    return found, rules


def test_a_snapshot_says_what_has_changed(api, tmp_path):
    """Of a removed step nothing, of one that is unpinned that it has no facts; each the policy."""
    with api.list(RUN) as l:
        a, b, *_ = commits(l, range(4))
        change(l, 0, pin=1)
        change(l, 1, tags=["best"])
        passes(l, EVERY - l.next + 1)
        assert small(api, EVERY) == ({a: ("", (), {}), b: (None, ("best",), {})}, None)
        policy_put(l, "keep-last=2")
        passes(l, 2 * EVERY - l.next + 1)
        assert small(api, 2 * EVERY) == ({a: ("", (), {}), b: (None, ("best",), {})}, ["keep-last=2"])
        d = commit(l, 9)
        change(l, 9, tags=["best"])
        change(l, 0, pin=-1)
        api.remove_step(RUN, 9)
        l.refresh()
        passes(l, 3 * EVERY - l.next + 1)
        assert small(api, 3 * EVERY) == ({a: EMPTY, b: EMPTY}, ["keep-last=2"]) and d not in small(api, 3 * EVERY)[0]
        policy_put(l)
        passes(l, 4 * EVERY - l.next + 1)
        assert small(api, 4 * EVERY) == ({}, None)
    model = Model()
    model.live = dict(enumerate((a, b, b + 1, b + 2)))
    everyone_agrees(api, model)
    assert lie(api, RUN) == 0
    pages_agree(api, tmp_path)


def test_a_tag_that_one_of_the_rest_had(api, tmp_path):
    """A writer that knows the newest steps only takes a tag from a step that it has not read; and the step that has it
    now goes. No one has the tag then, whatever old snapshots say."""
    with api.list(RUN) as l:
        commits(l, range(EVERY * 4))
        change(l, 3, tags=["best"], pin=1, reason="old")
        passes(l, EVERY * 6 + 8 - l.next)
    with Newest(api, RUN) as l:
        assert not l.lib.commit_list_find(l.p, c.c_uint64(3))       # it is in the rest
        n = commit(l, 1000, state=(None, ["best"], {}))
        l.put(api.entry(REMOVE, removes=n))
        passes(l, EVERY * 7 + 5 - l.next)
        assert list(small(api, EVERY * 7)[0].values()) == [("old", (), {})]
        l.know("all")
        assert tagged(l, "best") is None
    assert lie(api, RUN) == 0
    with api.list(RUN) as l:
        assert tagged(l, "best") is None and all_said(l) == {3: ("old", (), {})}
    pages_agree(api, tmp_path)


def test_a_small_save_costs_what_it_did(api):
    """Lists with facts: a writer of the newest steps reads no chain for facts of these."""
    with api.list(RUN) as l:
        seen = {}
        for n in (EVERY * 5, EVERY * 21):
            while l.next < n + 20:
                step = len(l.steps())
                commit(l, step)
                if step % 3 == 0:
                    change(l, step, tags=["best"], set={"loss": str(step)})
            seen[n] = reads(lambda: Newest(api, RUN).close())
        few, many = seen.values()
        assert many[0] <= few[0] + 8, seen


@pytest.mark.parametrize("seed", range(6))
def test_any_history(api, seed, tmp_path, scale):
    """Writers that know all and ones that know the newest steps, tags that move, steps that go, collections."""
    r, model, next_step = random.Random(seed), Model(), 0
    whole, newest = api.list(RUN, True), Newest(api, RUN)
    bias = r.choice([0.03, 0.2, 0.6])
    for i in range(r.choice(scale([350, 700], [350, 700, 2500]))):
        l = r.choice([whole, newest, newest])
        l.refresh()
        roll = r.random()
        if roll < 0.03:
            newest.close()
            newest = l = Newest(api, RUN)
        step = r.choice([min(model.live), max(model.live), r.choice(sorted(model.live))]) if model.live else None
        if roll < bias and step is not None:
            what = {"pin": r.choice([0, 0, 1, -1]), "reason": r.choice([None, "why", "x"]),
                    "tags": r.sample(TAGS, r.choice([0, 0, 1, 2])), "untags": r.sample(TAGS, r.choice([0, 0, 1])),
                    "set": {k: str(i) for k in r.sample(KEYS, r.choice([0, 1, 2]))}}
            what["untags"] = [t for t in what["untags"] if t not in what["tags"]]
            if model.said.get(step, EMPTY)[2] and r.random() < 0.3:
                what["set"] = {min(model.said[step][2]): None}
            change(l, step, model.live[step], **what)
            model.change(step, **what)
        elif roll < bias + 0.15 and step is not None:
            if model.pinned(step):
                with fails(errno.EADV):
                    api.call(api.lib.commit_list_remove, l.p, c.c_uint64(step), c.c_uint64(model.live[step]), None)
            else:
                api.call(api.lib.commit_list_remove, l.p, c.c_uint64(step), c.c_uint64(model.live[step]), None)
                model.gone(step)
        elif roll < bias + 0.2 and step is not None:       # replaced, with facts or without
            state = r.choice([None, ("kept", r.sample(TAGS, 1), {"k": "v"})])
            model.begin(step, commit(l, step, model.live[step], state), state)
        elif roll < bias + 0.23:
            rules = r.choice([["keep-last=3"], [], ["a", "b"]])
            policy_put(l, *rules)
            model.policy = rules or None
        else:
            next_step += 1
            state = r.choice([None] * 8 + [(None, r.sample(TAGS, 1), {})])
            model.begin(next_step, commit(l, next_step, NONE, state), state)
        if r.random() < 0.02:
            everyone_agrees(api, model)
        if i == 300 and whole.next > 5 * EVERY:
            collect(api, RUN, (whole.next - 1) // EVERY * EVERY - EVERY)
            everyone_agrees(api, model)
    everyone_agrees(api, model)
    newest.refresh()
    newest.know("all")
    whole.refresh()
    model.agrees(newest)
    model.agrees(whole)
    assert lie(api, RUN) == 0
    pages_agree(api, tmp_path)
    whole.close()
    newest.close()


# ---- lists of strangers ----

def test_what_says_nothing(api, tmp_path):
    """Rows of what is no visible commit: of one removed, of no commit, of one that does not count."""
    with api.list(RUN) as l:
        a, b = commits(l, (1, 2))
        l.put(api.entry(REMOVE, removes=a))
        void = l.put(api.commit_entry(f"{99:016x}-0", 2, NONE, 5))
        change(l, 2, tags=["best"])
        l.put(facts_entry(api, row(a, "x", ["best"]), row(void, "x", ["best"]), row(void + 1, "y", ["best"])))
        assert all_said(l) == {2: (None, ("best",), {})}
        l.put(facts_entry(api, row(b, None, ["best", "two"], {"k": "v"}), rules=["of a stranger: \x1b[2J"]))
        assert said(l, b) == (None, ("best", "two"), {"k": "v"}) and policy(l) == ["of a stranger: \x1b[2J"]
        passes(l, EVERY + 3 - l.next)
    assert lie(api, RUN) == 0
    pages_agree(api, tmp_path)


def test_two_steps_of_one_entry_that_claim_a_tag(api, tmp_path):
    with api.list(RUN) as l:
        a, b = commits(l, (1, 2))
        l.put(facts_entry(api, row(a, None, ["best", "x.1"]), row(b, None, ["best"])))
        assert (tagged(l, "best"), all_said(l)) == (2, {1: (None, ("x.1",), {}), 2: (None, ("best",), {})})
        passes(l, EVERY + 3 - l.next)
        assert lie(api, RUN) == 0
    pages_agree(api, tmp_path)


def bad_rows(api, n):
    return {"its own number": [row(n, "x")], "a later one": [row(n + 5, "x")], "twice": [row(0, "x"), row(0, "y")],
            "not ascending": [row(1), row(0)], "none": []}


@pytest.mark.parametrize("which", bad_rows(None, 0))
def test_what_cannot_be_put(api, which):
    with api.list(RUN) as l:
        commits(l, (1, 2))
        with pytest.raises(Failed, match="cannot be written"):
            l.put(facts_entry(api, *bad_rows(api, l.next)[which]))


def test_a_list_of_another_store(api):
    """Entries with facts, in a store without the word: damage, which says why."""
    with api.list(RUN) as l:
        commit(l, 1)
        change(l, 1, pin=1)
        commit(l, 2, state=("x", [], {}))
    api.p.contents.info.list_4 = False
    try:
        with api.list(RUN) as l:
            assert l.damaged == 2 and l.steps().keys() == {1} and all_said(l) == {}
            number, why = c.c_uint64(), c.c_char_p()
            api.lib.commit_list_damaged_next.restype = c.c_uint64
            assert api.lib.commit_list_damaged_next(l.p, c.byref(number), c.byref(why)) == 1
            assert why.value == b"it has facts of steps, and the store lacks the word list-4"
    finally:
        api.p.contents.info.list_4 = True


def test_a_snapshot_that_is_wrong(api):
    """Of facts alone: a reader of the whole list finds it."""
    with api.list(RUN) as l:
        n = commit(l, 1)
        change(l, 1, tags=["best"], pin=1, reason="x")
        passes(l, EVERY - 1 - l.next)
        l.put(api.entry(ABORT, attempt=b"%016x-9" % 1, reason=b"x"))
    for rows, rules, wrong in (([row(n, "x", ["best"])], None, False), ([], None, True),
                              ([row(n, "y", ["best"])], None, True), ([row(n, "x", [])], None, True),
                              ([row(n, "x", ["best"])], ["z"], True)):
        one = api.entry(SNAPSHOT, from_=0)
        with api.list(RUN) as l:
            live = l.lib.commit_list_find(l.p, c.c_uint64(1)).contents
            rows_ = (Live * 1)(Live(n, live.commit))
            one.live, one.nlive = rows_, 1
            was = l.lib.commit_list_facts(l.p, c.c_uint64(n)).contents
            for r in rows:
                r.pinned_ns, r.pinned_by = was.pinned_ns, was.pinned_by
            one.facts = facts_entry(api, *rows, rules=rules).facts if rows or rules else one.facts
            api.put_raw(RUN, EVERY, one)
        assert (lie(api, RUN) == EVERY) == wrong
        api.entry_path(RUN, EVERY).unlink()


def test_verify_compares_the_newest_snapshot(api, vckpt):
    """With what the entries before it say, without --paranoid."""
    save(api, RUN, 1)
    with api.list(RUN) as l:
        change(l, 1, pin=1)
        passes(l, EVERY + 3 - l.next)
    assert vckpt.json("verify", api.path)["faults"] == 0
    for path in (api.path / "runs" / RUN).iterdir():
        if path.name.isdigit() and int(path.name) >= EVERY:
            path.unlink()
    with api.list(RUN) as l:
        live = l.lib.commit_list_find(l.p, c.c_uint64(1)).contents
        one = api.entry(SNAPSHOT, from_=0)
        rows = (Live * 1)(Live(live.entry, live.commit))
        one.live, one.nlive = rows, 1
        api.put_raw(RUN, EVERY, one)
    with api.list(RUN, True) as l:
        passes(l, 2)
    done = vckpt("verify", api.path, check=False)
    assert done.returncode == 3 and "or other facts of them" in done.stdout + done.stderr, done


def test_work_goes_by_bytes(api, lib):
    """Many rows in many entries: each costs what it has in bytes, whether its commit is there or not."""
    with api.list(RUN) as l:
        commits(l, range(1000))
        live = [e for e, *_ in l.steps().values()]
        for i in range(60):
            l.put(facts_entry(api, *[row(e, None, [f"t{i}x{k % 500}"], {"k": str(i)}) for k, e in enumerate(live)]))
    began = time.process_time()
    for whole in (True, False):
        with api.list(RUN, whole) as l:
            assert sum(len(said(l, e)[1]) for e in live) == 500
    assert time.process_time() - began < 20


def test_a_damaged_entry_of_facts(api):
    """It says nothing; the next snapshot has what it said. Writers stop until it is accepted."""
    with api.list(RUN) as l:
        n = commit(l, 1)
        change(l, 1, pin=1)
        change(l, 1, tags=["best"])
    ruin(api, RUN, 2)
    with api.list(RUN) as l:
        assert said(l, n) == (None, ("best",), {}) or l.damaged
        with fails(errno.EBADMSG):
            change(l, 1, pin=-1)
        l.lib.commit_list_accept.restype = c.c_int64
        api.call(l.lib.commit_list_accept, l.p, (c.c_uint64 * 1)(2), c.c_size_t(1))
        assert said(l, n) == ("", (), {})
        assert change(l, 1, pin=-1) == 0 and all_said(l) == {}



# ---- puts that fail, memory that fails ----

@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lands", [True, False])
def test_what_the_list_says_of_a_put_that_failed(api, lands, shared):
    """As of a removal: it is asked whether the entry has landed."""
    with api.list(RUN) as l:
        n = commit(l, 1)
    m = Meddler(api)
    m.fail_puts(lands)
    m.share(shared)
    with api.list(RUN) as l:
        for call in lambda: change(l, 1, pin=1), lambda: policy_put(l, "x"):
            if lands:
                assert call() == 0
                continue
            with pytest.raises(Failed) as e:
                call()
            assert e.value.code == -(errno.EINPROGRESS if shared else errno.EIO), e.value.text
            assert ("undecided whether" in e.value.text) == shared
    m.end()
    with api.list(RUN) as l:
        assert (said(l, n), policy(l)) == ((("", (), {}), ["x"]) if lands else (EMPTY, None))


def test_a_full_disk(api):
    """Only what makes room is met with the reserve: the others fail, and leave it to removals."""
    with api.list(RUN) as l:
        n = commit(l, 1)
        change(l, 1, pin=1)
        m, reserve = Meddler(api), api.path / "reserve"
        m.answer["put"] = lambda args: -errno.ENOSPC if reserve.exists() else None
        for f in (lambda: change(l, 1, set={"k": "v"}), lambda: policy_put(l, "keep-last=1")):
            with fails(errno.ENOSPC):
                f()
            assert reserve.exists()
        assert change(l, 1, pin=-1) == 0 and said(l, n) == EMPTY
        m.end()
    assert reserve.exists()         # it is made again as soon as there is room


def test_each_allocation_fails_in_turn(api, build):
    if "asan" in os.environ.get("VCKPT_PRELOAD", ""):
        pytest.skip("the sanitizer has an allocator of its own")
    with api.list(RUN) as l:
        for step in range(12):
            commit(l, step, state=("x", ["best"], {"k": "v"}) if step % 4 == 0 else None)
            change(l, step, tags=[f"t{step % 5}", "best"], pin=step % 2, set={"a": str(step)})
        api.call(api.lib.commit_list_remove, l.p, c.c_uint64(2), c.c_uint64(l.steps()[2][0]), None)
        policy_put(l, "keep-last=3")
        change(l, 1, pin=-1)
        for both in ((0, 3), (4, 5)):
            l.put(facts_entry(api, *[row(l.steps()[s][0], "y", ["best"] if s == 3 else [], {"k": "w"}) for s in both]))
        passes(l, EVERY + 1 - l.next)
    for path in (api.path / "runs" / RUN).iterdir():       # the last one is a snapshot
        if path.name.isdigit() and int(path.name) > EVERY:
            path.unlink()
    done = subprocess.run([build / "tests/alloc_fails", api.path, RUN], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with api.list(RUN) as l:
        passes(l, 3 * EVERY + 8 - l.next)
        change(l, 6, pin=1)                                     # of the rest, without tags
        commit(l, 99, state=(None, ["best", "t4"], {}))         # which take these from steps of the rest
    done = subprocess.run([build / "tests/alloc_fails", api.path, RUN, "rest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- saves that replace a step ----

def test_a_pinned_step_is_not_replaced(api):
    """Neither by a save that begins after the pin, nor by one that was under way."""
    one = save(api, RUN, 4)
    late = Attempt(api, RUN, 4, replace=True)
    with api.list(RUN) as l:
        change(l, 4, pin=1, reason="paper")
    late.write(b"x" * 100)
    with pytest.raises(Failed, match=r"r/4 is pinned \(paper\), so it is not replaced \(vckpt unpin r/4\)"):
        late.commit()
    late.free()
    with pytest.raises(Failed, match="r/4 is pinned") as e:
        Attempt(api, RUN, 4, replace=True)
    assert e.value.code == -errno.EADV
    with api.list(RUN) as l:
        assert l.steps()[4][0] == one.entry and said(l, one.entry) == ("paper", (), {})


def test_an_equal_step_keeps_what_was_said(api):
    """What is said while it is made, too. And one that begins with facts of its own."""
    save(api, RUN, 4)
    with api.list(RUN) as l:
        change(l, 4, pin=1, reason="paper")
        again = Attempt(api, RUN, 4, replace=True, keep_facts=True)
        change(l, 4, tags=["best"], set={"loss": "1"})
        again.write(b"x" * 100)
        again.commit()
        again.free()
        l.refresh()
        assert l.steps()[4][0] == again.entry and said(l, again.entry) == ("paper", ("best",), {"loss": "1"})
        own = row(NONE, "other", ["x.1"])
        with pytest.raises(Failed, match="r/4 is pinned"):      # pinned facts of its own are those of other bytes
            Attempt(api, RUN, 4, replace=True, facts=c.pointer(own))
        change(l, 4, pin=-1)
        third = Attempt(api, RUN, 4, replace=True, facts=c.pointer(own))
        third.write(b"y" * 100)
        third.commit()
        third.free()
        l.refresh()
        assert all_said(l) == {4: ("other", ("x.1",), {})} and tagged(l, "best") is None
        fifth = Attempt(api, RUN, 5, keep_facts=True)       # there is nothing to keep
        fifth.write(b"z" * 100)
        fifth.commit()
        fifth.free()
    api.p.contents.info.list_4 = False
    try:
        with pytest.raises(Failed, match="the word list-4"):
            Attempt(api, "other", 6, facts=c.pointer(own))
    finally:
        api.p.contents.info.list_4 = True
