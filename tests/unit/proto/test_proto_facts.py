# SPDX-License-Identifier: Apache-2.0
"""proto: facts of steps in entries, commits and snapshots (docs/format/list.md, "Facts"): back as they were put, and
what breaks their rules."""
import pytest

from protolib import (COMMIT, EFORMAT, FACTS, NONE, SNAPSHOT, Proto, entry, facts, facts_entries, field, going_on,
                      parse, step_facts, unparse)

WORD = b"list-2"


@pytest.fixture(scope="module")
def proto(lib):
    return Proto(lib)


def facts_body(proto, which=0):
    return proto.encode("entry", facts_entries()[which])


def test_facts_come_back(proto):
    m = proto.decode("entry", facts_body(proto))
    one, two = m.facts.steps[:2]
    assert (m.kind, m.facts.there, m.facts.nsteps, m.facts.policed) == (FACTS, True, 2, False)
    assert (one.entry, one.pinned, one.reason, one.pinned_ns, one.pinned_by) == (2, True, b"paper", 7, b"node-9")
    assert one.tags[:one.ntags] == [b"best", b"x.1"] and one.attributes[0].key == b"loss" and one.nattributes == 2
    assert (two.entry, two.pinned, two.ntags, two.nattributes) == (5, False, 0, 0)
    proto.release("entry", m)
    m = proto.decode("entry", facts_body(proto, 1))
    assert m.facts.policed and m.facts.policy.rules[:2] == [b"keep-last=3", b"keep-best=2:loss"]
    proto.release("entry", m)
    m = proto.decode("entry", facts_body(proto, 4))
    assert m.commit.facts.contents.entry == NONE and m.commit.facts.contents.tags[0] == b"best" and not m.facts.there
    proto.release("entry", m)
    m = proto.decode("entry", facts_body(proto, 5))
    assert m.list_2 and m.facts.steps[0].entry == 129 and m.facts.policy.rules[0] == b"x"
    proto.release("entry", m)


BAD_FACTS = {
    "none": facts(), "of its own entry": facts(step_facts(11)), "of a later one": facts(step_facts(12)),
    "not ascending": facts(step_facts(3), step_facts(2)), "twice": facts(step_facts(3), step_facts(3)),
    "of no entry": facts(step_facts(NONE)), "a reason without a pin": facts(step_facts(3, reason=b"x")),
    "a time without a pin": facts(step_facts(3, ns=1)), "a host without a pin": facts(step_facts(3, by=b"x")),
    "tags not ascending": facts(step_facts(3, [b"b", b"a"])), "a tag twice": facts(step_facts(3, [b"a", b"a"])),
    "too many tags": facts(step_facts(3, [b"t%02d" % i for i in range(65)])),
    "a tag that is a number": facts(step_facts(3, [b"12"])), "a tag like a step": facts(step_facts(3, [b"step-1"])),
    "a tag that is taken": facts(step_facts(3, [b"latest"])), "a long tag": facts(step_facts(3, [b"a" * 65])),
    "a path for a tag": facts(step_facts(3, [b"../x"])), "no text for a tag": facts(step_facts(3, [b"\xff"])),
    "a long reason": facts(step_facts(3, pinned=True, reason=b"x" * 1025)),
    "a long host": facts(step_facts(3, pinned=True, by=b"x" * 256)),
    "too much of attributes": facts(step_facts(3, **{f"k{i}": "x" * 4096 for i in range(16)})),
    "too many rules": facts(rules=[b"x"] * 65), "an empty rule": facts(rules=[b""]),
    "a long rule": facts(rules=[b"x" * 1025]), "a rule that is no text": facts(rules=[b"\xff"]),
}


@pytest.mark.parametrize("which", BAD_FACTS)
def test_facts_that_break_the_rules(proto, which):
    """They are not written; nor read, where someone else has written them."""
    assert proto.encode("entry", entry(FACTS, facts=BAD_FACTS[which])) == EFORMAT


def facts_fields(proto, which=0):
    fields = parse(facts_body(proto, which))
    return fields, next(v for n, _, v in fields if n == 15)


def with_facts(proto, changed):
    fields, _ = facts_fields(proto)
    return unparse([(n, k, changed if n == 15 else v) for n, k, v in fields])


def test_facts_that_others_have_written(proto):
    """As bytes: rows in another order, tags twice, a row of no entry, an empty message, fields that are not known."""
    fields, inner = facts_fields(proto)
    one, two = (v for n, _, v in parse(inner))
    good = with_facts(proto, inner)
    assert proto.again("entry", good) == good
    for bad in (field(1, two) + field(1, one), field(1, one) * 2, b"", field(1, one[2:]),
                field(1, one + field(5, b"best")), field(1, one.replace(b"best", b"zest")),
                field(1, one) + field(2, field(1, b"")), inner + field(2, b"") * 2, inner[:-1]):
        assert proto.again("entry", with_facts(proto, bad)) == EFORMAT, bad
    later = with_facts(proto, inner + field(77, b"of a later version"))
    m = proto.decode("entry", later)
    assert m.facts.nsteps == 2
    proto.release("entry", m)
    for words in ([], [WORD], [b"list-3"], [b"list-3", b"list-4"], [WORD, b"list-4"], [b"list-4", b"list-4"]):
        changed = fields[:1] + [(2, 2, w) for w in words] + [f for f in fields[1:] if f[0] != 2]
        assert proto.again("entry", unparse(changed)) == EFORMAT, words
    for which in (4, 5):                # a commit and a snapshot that lack the word, and a commit that names an entry
        fields = parse(facts_body(proto, which))
        assert proto.again("entry", unparse([f for f in fields if f != (2, 2, b"list-4")])) == EFORMAT
    named = unparse([(n, k, v if n != 7 else unparse([(i, j, field(1, 3) + w if i == 10 else w)
                                                      for i, j, w in parse(v)]))
                     for n, k, v in parse(facts_body(proto, 4))])
    assert proto.again("entry", named) == EFORMAT
    plain = parse(proto.encode("entry", entry(COMMIT)))
    assert proto.again("entry", unparse(plain[:1] + [(2, 2, b"list-4")] + plain[1:])) == EFORMAT


def test_many_facts_fit_a_snapshot(proto):
    """Of 30,000 steps a pin, a tag and an attribute each, and what it says of as many that have none any more."""
    for make in (lambda n: step_facts(n, [b"tag%d" % n], True, b"keep", 10**18, b"node", eval="0.123"),
                 lambda n: step_facts(n, note="x")):
        rows = [make(n) for n in range(129, 30129)]
        body = proto.encode("entry", going_on(SNAPSHOT, number=64 * 3 * 256, from_=128, facts=facts(*rows)))
        m = proto.decode("entry", body)
        assert not isinstance(m, int) and m.facts.nsteps == 30000
        proto.release("entry", m)
