# SPDX-License-Identifier: Apache-2.0
"""What lists say of steps (docs/format/list.md, "Facts") through ctypes, and a model of it in Python."""
import contextlib
import ctypes as c

from protolib import table
from storelib import NONE, Attribute, Failed, Facts, ListStep, Policy, StepFacts

FACTS = 8


class Change(c.Structure):
    _fields_ = [("step", c.c_uint64), ("entry", c.c_uint64), ("pin", c.c_int), ("reason", c.c_char_p),
                ("tags", c.POINTER(c.c_char_p)), ("ntags", c.c_size_t), ("untags", c.POINTER(c.c_char_p)),
                ("nuntags", c.c_size_t), ("set", c.POINTER(Attribute)), ("nset", c.c_size_t)]


def texts(names):
    return table(c.c_char_p, [n.encode() for n in names]), len(names)


def attributes(values):
    """None: without a value."""
    rows = [Attribute(k.encode(), None if v is None else v.encode()) for k, v in values]
    return table(Attribute, rows), len(rows)


def change(l, step, entry=NONE, pin=0, reason=None, tags=(), untags=(), set=()):
    """0: put; 1: nothing changes."""
    x = Change(step, entry, pin, None if reason is None else reason.encode(), *texts(tags), *texts(untags),
               *attributes(dict(set).items()))
    return l.api.call(l.lib.commit_list_facts_change, l.p, c.byref(x))


def policy_put(l, *rules):
    return l.api.call(l.lib.commit_list_policy_put, l.p, *(lambda t, n: (t, c.c_size_t(n)))(*texts(rules)))


def state(f):
    """Of a StepFacts: (reason or None, tags, attributes)."""
    return (((f.reason or b"").decode() if f.pinned else None), tuple(t.decode() for t in f.tags[:f.ntags]),
            {a.key.decode(): a.value.decode() for a in f.attributes[:f.nattributes]})


EMPTY = (None, (), {})


def said(l, entry):
    l.lib.commit_list_facts.restype = c.POINTER(StepFacts)
    f = l.lib.commit_list_facts(l.p, c.c_uint64(entry))
    return state(f.contents) if f else EMPTY


def all_said(l):
    """{step: state} of the visible steps that have any."""
    found = {step: said(l, entry) for step, (entry, *_) in l.steps().items()}
    return {step: s for step, s in found.items() if s != EMPTY}


def tagged(l, tag):
    l.lib.commit_list_tagged.restype = c.POINTER(ListStep)
    s = l.lib.commit_list_tagged(l.p, tag.encode())
    return s.contents.step if s else None


def policy(l):
    l.lib.commit_list_policy.restype = c.POINTER(Policy)
    p = l.lib.commit_list_policy(l.p)
    return [r.decode() for r in p.contents.rules[:p.contents.nrules]] if p else None


def merged(l, step):
    """The step's attributes, with those that were set later."""
    s, a, n = l.lib.commit_list_find(l.p, c.c_uint64(step)), c.POINTER(Attribute)(), c.c_size_t()
    assert l.lib.commit_list_attributes(l.p, s, c.byref(a), c.byref(n)) == 0
    found = [(x.key.decode(), x.value.decode()) for x in a[:n.value]]
    c.CDLL(None).free(a)
    return found


def row(entry=NONE, reason=None, tags=(), values=()):
    """A StepFacts as a state says it."""
    return StepFacts(entry, reason is not None, (reason or "").encode(), 7 if reason is not None else 0,
                     b"h" if reason is not None else None, *texts(sorted(tags)),
                     *attributes(sorted(dict(values).items())))


def facts_entry(api, *rows, rules=None):
    """An entry of kind 8 as it is, whatever it says."""
    e = api.entry(FACTS)
    e.facts = Facts(True, table(StepFacts, rows), len(rows), rules is not None,
                    Policy(*texts(rules), 3, b"h") if rules is not None else Policy())
    return e


class Model:
    """The visible steps and their facts."""

    def __init__(self):
        self.live, self.said, self.policy = {}, {}, None

    def tag(self, step, tag):
        for other, (reason, tags, values) in self.said.items():
            self.said[other] = (reason, tuple(t for t in tags if t != tag), values)
        reason, tags, values = self.said.get(step, EMPTY)
        self.said[step] = (reason, tuple(sorted({*tags, tag})), values)

    def change(self, step, pin=0, reason=None, tags=(), untags=(), set=()):
        was, had, values = self.said.get(step, EMPTY)
        if pin:
            was = (reason if reason is not None else was or "") if pin > 0 else None
        values = {k: v for k, v in {**values, **dict(set)}.items() if v is not None}
        self.said[step] = (was, tuple(t for t in had if t not in untags), values)
        for t in tags:
            self.tag(step, t)

    def begin(self, step, entry, state=None):
        self.live[step] = entry
        self.said.pop(step, None)
        if state:
            self.change(step, 1 if state[0] is not None else 0, state[0], state[1], set=state[2])

    def gone(self, step):
        del self.live[step]
        self.said.pop(step, None)

    def pinned(self, step):
        return self.said.get(step, EMPTY)[0] is not None

    def all_said(self):
        return {step: s for step, s in self.said.items() if s != EMPTY}

    def agrees(self, l, all=True):
        assert {step: entry for step, (entry, *_) in l.steps().items()} == self.live or not all
        found = all_said(l)
        assert found == {s: v for s, v in self.all_said().items() if all or s in l.steps()}
        assert policy(l) == self.policy
        for tag in {t for _, tags, _ in self.said.values() for t in tags} if all else ():
            assert tagged(l, tag) == next(s for s, (_, tags, _) in self.said.items() if tag in tags)


@contextlib.contextmanager
def fails(code):
    try:
        yield
    except Failed as e:
        assert e.code == -code, (e.code, str(e))
        return
    raise AssertionError("it did not fail")
