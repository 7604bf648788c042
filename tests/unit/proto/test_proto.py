# SPDX-License-Identifier: Apache-2.0
"""proto: round trips, determinism, refusals, and bodies that the library never makes."""
import ctypes as c
import hashlib
import random
import time

import pytest
from hypothesis import given, settings, strategies as st

from protolib import (ACCEPT, COMMIT, EFORMAT, EVERSION, LAUNCH, NONE, SNAPSHOT, VERSION, Attribute, Blob, Info, Live,
                      Proto, ProtoRef, Replica, Sample, Timing, ViewHeader, commit, digest,
                      entry, field, going_on, id16, packs, parse, sample_announcement, sample_layout, sample_part,
                      sample_part_compared, sample_stats, samples, table,
                      unparse, varint)

NAMES = ["store", "entry", "layout", "part", "announcement", "manifest", "begin", "base", "heartbeat", "trash", "stats",
         "damage"]


@pytest.fixture(scope="module")
def proto(lib):
    return Proto(lib)


@pytest.fixture(scope="module")
def bodies(proto):
    return samples(proto)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(proto, bodies, name):
    for body in bodies[name]:
        assert isinstance(body, bytes) and body
        assert proto.again(name, body) == body


@pytest.mark.parametrize("name", NAMES)
def test_version_and_features(proto, bodies, name):
    for body in bodies[name]:
        fields = parse(body)
        assert fields[0] == (1, 0, VERSION)
        assert proto.again(name, unparse([(1, 0, VERSION + 1)] + fields[1:])) == EVERSION
        assert proto.again(name,
                           unparse([(1, 0, VERSION + 1)] + fields[1:] + [(4000, 2, b"of a later version")])) == EVERSION
        assert proto.again(name, unparse(fields[1:])) == EFORMAT
        assert proto.again(name, unparse([fields[0], (2, 2, b"shiny")] + fields[1:])) == EVERSION


@pytest.mark.parametrize("name", NAMES)
def test_unknown_optional_fields_do_no_harm(proto, bodies, name):
    for body in bodies[name]:
        for extra in (field(4000, 7), field(4001, b"x" * 300), varint(4002 << 3 | 1) + bytes(8),
                      varint(4003 << 3 | 5) + bytes(4)):
            assert proto.again(name, body + extra) == body


@pytest.mark.parametrize("name", NAMES)
def test_only_the_shortest_encoding(proto, bodies, name):
    for body in bodies[name]:
        fields = parse(body)
        assert proto.again(name, b"\x08\x82\x00" + body[2:]) == EFORMAT              # a padded varint
        # twice, unless it may repeat
        assert proto.again(name, body + unparse([fields[-1]])) in (EFORMAT, body + unparse([fields[-1]]))
        assert proto.again(name, b"\x08\x01" + body) == EFORMAT                       # version twice
        for i, (number, kind, value) in enumerate(fields):
            if kind == 2 and value and number != 2:
                with_nul = fields[:i] + [(number, kind, value[:1] + b"\0" + value[1:])] + fields[i + 1:]
                assert proto.again(name, unparse(with_nul)) != body
        assert proto.again(name, body + b"\xa3\x06\xa4\x06") == EFORMAT               # a group
        for cut in range(len(body)):
            assert proto.again(name, body[:cut]) != body


@pytest.mark.parametrize("name", NAMES)
def test_mutations(proto, bodies, name, scale):
    rng = random.Random(name)
    for _ in range(scale(1500, 10000)):
        body = bytearray(rng.choice(bodies[name]))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            body[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256), body[at] ^ 1 << rng.randrange(8)])
        out = proto.again(name, bytes(body))
        if isinstance(out, bytes):
            assert proto.again(name, out) == out and len(out) <= len(body)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_bodies_are_cheap(proto, name):
    """Two bytes a field: protobuf's own memory for each is some forty; the bound ends it."""
    assert isinstance(proto.again(name, b"\x08\x01" + b"\x12\x00" * 500_000), int)
    assert proto.again(name, b"\x08\x01" + b"\xf8\x07\x00" * 3_000_000) == EFORMAT


@pytest.mark.parametrize("attempt", ["", "0123456789abcdef", "0123456789abcdef-", "0123456789abcdef-01",
                                     "0123456789ABCDEF-1", "0123456789abcde-1",
                                     "0123456789abcdef-18446744073709551616", "0123456789abcdef-1x",
                                     "0123456789abcdef-1-0", "0123456789abcdef_1"])
def test_attempts(proto, attempt):
    assert proto.encode("entry", entry(COMMIT, commit=commit(attempt=attempt.encode()))) == EFORMAT
    live = [Live(2, commit(attempt=attempt.encode()))]
    assert proto.encode("entry", entry(SNAPSHOT, live=live)) == EFORMAT


def test_commit_fields(proto):
    for c_ in (commit(step=2**63 - 1), commit(step=0), commit(replaces=0), commit(replaces=2**64 - 2), commit()):
        body = proto.encode("entry", entry(COMMIT, commit=c_))
        m = proto.decode("entry", body)
        assert (m.kind, m.commit.step, m.commit.replaces, m.commit.time_ns) == (COMMIT, c_.step, c_.replaces, -3)
        assert bytes(m.commit.manifest.bytes) == bytes(c_.manifest.bytes)
        proto.release("entry", m)
        assert not m.arena and not m.kind
    assert proto.encode("entry", entry(COMMIT, commit=commit(step=2**63))) == EFORMAT


def test_kind_decides_the_field(proto, bodies):
    for body in bodies["entry"]:
        fields = parse(body)
        for kind in range(0, ACCEPT + 1):
            changed = unparse([(n, k, kind if n == 3 else v) for n, k, v in fields])
            assert proto.again("entry", changed) == (body if changed == body else EFORMAT)
    launch, remove = parse(bodies["entry"][0]), parse(bodies["entry"][3])
    assert proto.again("entry", unparse(launch + [f for f in remove if f[0] == 9])) == EFORMAT


def test_an_entry_says_its_place(proto, bodies):
    """Run, number and the digest of the entry before: all of them since version 2, none of them before."""
    place = (11, 12, 13)
    for body in bodies["entry"]:
        fields = parse(body)
        assert [n for n, *_ in fields] == sorted(n for n, *_ in fields) and {n for n, *_ in fields} >= set(place)
        for lacks in (11, 13):
            assert proto.again("entry", unparse([f for f in fields if f[0] != lacks])) == EFORMAT
        assert proto.again("entry", unparse([(n, k, b"a/b" if n == 11 else v) for n, k, v in fields])) == EFORMAT
        assert proto.again("entry", unparse([(n, k, v[:31] if n == 13 else v) for n, k, v in fields])) == EFORMAT
        old = [(1, 0, 1)] + [f for f in fields[1:] if f[0] not in place]
        later = dict((n, v) for n, _, v in fields)[3] == ACCEPT or fields[1][0] == 2
        assert proto.again("entry", unparse(old)) == (EFORMAT if later else unparse(old))
        for added in place:
            assert proto.again("entry", unparse(old + [f for f in fields if f[0] == added])) == EFORMAT


def test_an_entry_of_an_unknown_kind(proto, bodies):
    """It is read, so that it counts in the chain; nothing is known of it."""
    head = [f for f in parse(bodies["entry"][0]) if f[0] not in (3, 6)]
    for kind in (9, 300):
        body = unparse(head[:1] + [(3, 0, kind)] + head[1:] + [(40, 2, b"of a later version")])
        m = proto.decode("entry", body)
        assert m.kind == kind and m.run == b"run-1" and bytes(m.self.bytes) == hashlib.sha256(body).digest()
        proto.release("entry", m)


def test_a_collected_record(proto, bodies):
    """It has a number and a digest, the word, and no field of any kind's."""
    head = [f for f in parse(bodies["entry"][0]) if f[0] not in (3, 6)]

    def body(*words, kind=7, more=()):
        return unparse(head[:1] + [(2, 2, w) for w in words] + [(3, 0, kind)] + head[1:] + [*more])
    good = body(b"list-3")
    m = proto.decode("entry", good)
    assert (m.kind, m.list_2) == (7, False) and m.number > 0
    proto.release("entry", m)
    assert proto.again("entry", good) == good
    for bad in (body(), body(b"list-2"), body(b"list-2", b"list-3"), body(b"list-3", kind=8), body(b"list-3", kind=5),
                body(b"list-3", more=[(8, 2, b"")])):
        assert proto.again("entry", bad) == EFORMAT
    zero = [(n, k, 0 if n == 12 else v) for n, k, v in parse(good)]
    assert proto.again("entry", unparse([f for f in zero if f[0] != 12])) == EFORMAT


def test_accept_rows(proto):
    def put(*numbers, number=11):
        return proto.encode("entry", entry(ACCEPT, numbers=numbers, number=number))
    assert isinstance(put(0), bytes) and isinstance(put(3, 10),
                                                    bytes) and isinstance(put(*range(65536), number=65536), bytes)
    assert put() == put(11) == put(3, 3) == put(4, 3) == put(*range(65537), number=70000) == EFORMAT
    fields = parse(put(0, 5))
    assert fields[-1] == (14, 2, field(1, bytes(8) + b"\5" + bytes(7)))
    assert proto.again("entry", unparse(fields[:-1] + [(14, 2, field(1, bytes(15)))])) == EFORMAT


def test_a_heartbeats_period_has_a_bound(proto, bodies):
    """An observer waits for as long as it says."""
    fields = parse(bodies["heartbeat"][1])
    assert fields[-1] == (11, 0, 600000)
    for period, allowed in ((0, True), (1, True), (600001, False), (2**32 - 1, False)):
        body = unparse(fields[:-1] + ([(11, 0, period)] if period else []))
        assert proto.again("heartbeat", body) == (body if allowed else EFORMAT)


@pytest.mark.parametrize("name, number", [("heartbeat", 10), ("launch", 3)])
def test_a_nonce_has_sixteen_bytes(proto, bodies, name, number):
    fields = parse(bodies["heartbeat" if name == "heartbeat" else "entry"][0])
    inner = fields if name == "heartbeat" else parse(dict((n, v) for n, _, v in fields)[6])
    assert inner[-1][0] == number

    def put(nonce):
        changed = unparse(inner[:-1] + ([(number, 2, nonce)] if nonce else []))
        body = changed if name == "heartbeat" else unparse([(n, k, changed if n == 6 else v) for n, k, v in fields])
        return proto.again("heartbeat" if name == "heartbeat" else "entry", body) == body
    assert put(bytes(range(16))) and put(b"") and not put(bytes(range(15))) and not put(bytes(range(17)))


def test_attributes(proto):
    def put(**values):
        return proto.encode("entry", entry(COMMIT, commit=commit(**values)))
    assert isinstance(put(**{"a.b-c_9": "", "b": "x" * 4096}), bytes)
    assert put(a="x" * 4097) == EFORMAT
    assert put(**{"9a": "x"}) == EFORMAT and put(**{"a" * 65: "x"}) == EFORMAT and put(**{"a b": ""}) == EFORMAT
    assert isinstance(put(**{f"k{i:04d}": "" for i in range(1024)}),
                      bytes) and put(**{f"k{i:04d}": "" for i in range(1025)}) == EFORMAT
    assert put(**{f"k{i:02d}": "x" * 4000 for i in range(17)}) == EFORMAT
    c_ = commit()
    c_.attributes, c_.nattributes = table(Attribute, [Attribute(b"b", b""), Attribute(b"a", b"")]), 2
    assert proto.encode("entry", entry(COMMIT, commit=c_)) == EFORMAT
    c_.attributes[1].key = b"b"
    assert proto.encode("entry", entry(COMMIT, commit=c_)) == EFORMAT
    c_.nattributes = 1
    c_.attributes[0].value = b"\xff"
    assert proto.encode("entry", entry(COMMIT, commit=c_)) == EFORMAT


def test_a_commit_of_a_later_version_keeps_its_fields_in_a_snapshot(proto, bodies):
    """What a later version added to a commit goes through this one: entry -> snapshot -> entry."""
    later = field(90, b"of a later version") + field(91, 5)
    fields = [(n, k, v + later if n == 7 else v) for n, k, v in parse(bodies["entry"][1])]
    m = proto.decode("entry", unparse(fields))
    assert not isinstance(m, int) and c.string_at(m.commit.extra, m.commit.extra_len) == later
    assert proto.encode("entry", m) == unparse(fields)
    snapshot = proto.encode("entry", entry(SNAPSHOT, live=[Live(2, commit(3)), Live(4, m.commit)]))
    assert later in snapshot
    s = proto.decode("entry", snapshot)
    assert s.nlive == 2 and s.live[0].commit.extra_len == 0
    kept = s.live[1].commit
    assert (c.string_at(kept.extra, kept.extra_len) == later and kept.attributes[0].key == b"loss" and
            kept.nattributes == 2)
    assert proto.encode("entry", entry(SNAPSHOT, live=[Live(2, commit(3)), Live(4, kept)])) == snapshot
    proto.release("entry", s)
    proto.release("entry", m)


def test_snapshot_rows(proto, bodies):
    body = bodies["entry"][4]
    fields = parse(body)
    at, (number, kind, inner) = next((i, f) for i, f in enumerate(fields) if f[0] == 10)
    rows = dict((n, v) for n, _, v in parse(inner))
    assert len(rows[1]) == 3 * 112

    def put(live, extra):
        return proto.again("entry",
                           unparse(fields[:at] + [(number, kind, field(1, live) + field(2, extra))] + fields[at + 1:]))
    assert put(rows[1], rows[2]) == body
    assert put(rows[1][:-1], rows[2]) == EFORMAT
    assert put(rows[1][112:] + rows[1][:112], rows[2]) == EFORMAT
    assert put(rows[1], rows[2] + b"\x48\x00") == EFORMAT
    assert put(rows[1], rows[2][:-1]) == EFORMAT
    for byte in (104, 108):
        for value in (b"\xff\xff\xff\xff", b"\x01\0\0\0"):
            assert put(rows[1][:byte] + value + rows[1][byte + 4:], rows[2]) == EFORMAT
    assert put(rows[1][:15] + b"\x80" + rows[1][16:], rows[2]) == EFORMAT  # step of 2^63


WORD = b"list-2"


def message_of(fields):
    """Number and fields of the message of the entry's kind."""
    return next((n, parse(v)) for n, _, v in fields if n in (6, 7, 8, 9, 10, 14))


def with_message(fields, inner):
    return unparse([(n, k, unparse(inner) if n == message_of(fields)[0] else v) for n, k, v in fields])


def test_the_word_and_its_fields_come_together(proto, bodies):
    """With the word a launch entry and a snapshot are of another kind; no other entry has it."""
    for i, body in enumerate(bodies["entry"][:8]):
        fields = parse(body)
        has = fields[1] == (2, 2, WORD)
        assert has == (i > 5)
        other = fields[:1] + fields[2:] if has else fields[:1] + [(2, 2, WORD)] + fields[1:]
        alone = i == 4                  # a snapshot that goes on from none says nothing else with the word
        assert proto.again("entry", unparse(other)) == (unparse(other) if alone else EFORMAT)
        for words in ([WORD, WORD], [b"grid-2"], [WORD, b"grid-2"], [b""]):
            changed = unparse(fields[:1] + [(2, 2, w) for w in words] + [f for f in fields[1:] if f[0] != 2])
            assert proto.again("entry", changed) in (EFORMAT, EVERSION)


@pytest.mark.parametrize("kind", [LAUNCH, SNAPSHOT])
def test_each_field_needs_the_word(proto, kind):
    """And the word, most of them."""
    fields = parse(proto.encode("entry", going_on(kind)))
    _, inner = message_of(fields)
    added = [f for f in inner if f[0] > (3 if kind == LAUNCH else 2)]
    assert [n for n, *_ in added] == ([4, 5, 6] if kind == LAUNCH else [3, 4, 5, 6, 7])
    plain = fields[:1] + fields[2:]
    assert isinstance(proto.again("entry", with_message(plain, [f for f in inner if f not in added])), bytes)
    for f in added:
        old = [g for g in inner if g not in added or g == f]
        assert proto.again("entry", with_message(plain, old)) == EFORMAT
        may_lack = f[0] in ((5, 6, 7) if kind == SNAPSHOT else (6,))
        lacks = with_message(fields, [g for g in inner if g != f])
        assert proto.again("entry", lacks) == (lacks if may_lack else EFORMAT)


@pytest.mark.parametrize("change", [
    {"gone": (7, 2)}, {"gone": (2, 2)}, {"gone": (2, 128)}, {"gone": (2, 129)}, {"from_": 192}, {"from_": 193},
    {"from_": 2**64 - 1}, {"from_": 129}, {"from_": 0}, {"older": 2**63}, {"newest_launch": 192},
    {"from_": 0, "gone": ()}, {"from_": 0, "gone": (), "older": NONE}])
def test_snapshots_that_go_on_from_no_other(proto, change):
    assert proto.encode("entry", going_on(SNAPSHOT, **change)) == EFORMAT


def test_snapshots_that_go_on_from_another(proto):
    """All that the bounds let through comes back."""
    for change in ({"gone": ()}, {"gone": (0, 127)}, {"older": NONE}, {"older": 0}, {"older": 2**63 - 1},
                   {"newest_launch": NONE}, {"newest_launch": 0}, {"newest_launch": 191},
                   {"from_": 0, "gone": (), "older": NONE, "from_digest": None}):
        if change.get("from_digest", 1) is None:
            change = {**change, "from_digest": type(digest(1))()}
        e = going_on(SNAPSHOT, **change)
        body = proto.encode("entry", e)
        m = proto.decode("entry", body)
        assert (m.list_2, m.from_, m.older, m.newest_launch) == (True, e.from_, e.older, e.newest_launch)
        assert m.gone[:m.ngone] == e.gone[:e.ngone] and bytes(m.from_digest.bytes) == bytes(e.from_digest.bytes)
        assert proto.encode("entry", m) == body
        proto.release("entry", m)
    fields = parse(proto.encode("entry", going_on(SNAPSHOT)))
    _, inner = message_of(fields)
    for number, sizes in ((4, (31, 33, 1)), (5, (7, 9, 15))):
        for size in sizes:
            changed = [(n, k, (v * 3)[:size] if n == number else v) for n, k, v in inner]
            assert proto.again("entry", with_message(fields, changed)) == EFORMAT


@pytest.mark.parametrize("change", [
    {"nth": 0}, {"nth": 1}, {"from_": 11}, {"from_": NONE - 1}, {"from_": NONE}, {"nth": 6, "ids": [b"f" * 16] * 6},
    {"nth": 3, "from_": NONE, "ids": [b"f" * 16]}, {"ids": [b"F" * 16]}, {"ids": [b"f" * 15]}])
def test_launches_that_name_no_others(proto, change):
    assert proto.encode("entry", going_on(LAUNCH, **change)) == EFORMAT


def test_launches_that_name_others(proto):
    for change in ({"nth": 1, "from_": NONE, "ids": []}, {"nth": 2**64 - 1}, {"from_": 0}, {"from_": 10, "ids": []},
                   {"nth": 3, "from_": NONE, "ids": [b"0" * 16, b"0123456789abcdef"]}):
        e = going_on(LAUNCH, **change)
        body = proto.encode("entry", e)
        m = proto.decode("entry", body)
        assert (m.nth, m.from_, m.nids) == (e.nth, e.from_, e.nids)
        assert c.string_at(m.ids, 17 * m.nids) == c.string_at(e.ids, 17 * e.nids) if e.nids else True
        assert proto.encode("entry", m) == body
        proto.release("entry", m)
    fields = parse(proto.encode("entry", going_on(LAUNCH)))
    changed = [(n, k, v[:7] if n == 6 else v) for n, k, v in message_of(fields)[1]]
    assert proto.again("entry", with_message(fields, changed)) == EFORMAT


def test_large_snapshot(proto):
    live = [Live(i, commit(i, b"0123456789abcdef-%d" % i, loss="2.5")) for i in range(10_000)]
    body = proto.encode("entry", entry(SNAPSHOT, live=live))
    print(f"\nsnapshot of 10,000 steps with one attribute each: {len(body)} bytes")
    assert len(body) < 64 << 20 and proto.again("entry", body) == body


def test_store(proto):
    def put(**more):
        m = Info(version=VERSION, seed=1, min_bytes=131072, target_bytes=1 << 20, row_bytes=256, small_bytes=32 << 10)
        for k, v in more.items():
            setattr(m, k, v)
        return proto.encode("store", m)
    assert b"grid-2" in put() and b"grid-2" not in put(small_bytes=0)
    for grid, word in ((0, False), (0, True), (32 << 10, False), (32 << 10, True)):
        body = put(small_bytes=grid, list_2=word)
        assert [v for n, _, v in parse(body) if n == 2] == [b"grid-2"] * bool(grid) + [WORD] * word
        m = proto.decode("store", body)
        assert (m.list_2, m.small_bytes) == (word, grid)
        proto.release("store", m)
        if word:
            more = put(small_bytes=grid, list_2=True, list_3=True)
            assert [v for n, _, v in parse(more) if n == 2] == [b"grid-2"] * bool(grid) + [WORD, b"list-3"]
            m = proto.decode("store", more)
            assert (m.list_2, m.list_3, m.list_4) == (True, True, False)
            proto.release("store", m)
            most = put(small_bytes=grid, list_2=True, list_3=True, list_4=True)
            assert [v for n, _, v in parse(most) if n == 2][-3:] == [WORD, b"list-3", b"list-4"]
            m = proto.decode("store", most)
            assert (m.list_2, m.list_3, m.list_4) == (True, True, True)
            proto.release("store", m)
        for words in ([WORD, b"list-4"], [b"list-4"], [b"grid-2", b"list-3"], [b"list-3"], [b"list-3", WORD],
                      [WORD, b"grid-2"], [WORD, WORD], [b"grid-2", WORD, WORD], [b"grid-2", b"grid-2"]):
            changed = [(2, 2, w) for w in words]
            fields = [f for f in parse(body) if f[0] != 2]
            assert proto.again("store", unparse(fields[:1] + changed + fields[1:])) == EFORMAT
    assert put(list_3=True) == put(list_2=True, list_4=True) == EFORMAT
    assert isinstance(put(row_bytes=1 << 19), bytes) and isinstance(put(small_bytes=128 << 10), bytes)
    for bad in ({"min_bytes": 0}, {"row_bytes": 0}, {"min_bytes": 2 << 20}, {"target_bytes": 8 << 20},
                {"row_bytes": 2 << 20}, {"row_bytes": (1 << 19) + 1}, {"version": VERSION + 1}, {"version": 0},
                {"small_bytes": (128 << 10) + 1}):
        assert put(**bad) == EFORMAT


def test_ragged_placements_are_long(proto):
    """One number for each rank of a mesh dimension: 8,192 ranks have to fit."""
    word = b"RS(0;" + b",".join(b"%d" % (123456789 + i) for i in range(8192)) + b")"
    data = proto.encode("layout", layout_with(lambda m: m.placements.__setitem__(0, word)))
    m = proto.decode("layout", data)
    assert m.placements[0] == word
    proto.release("layout", m)
    assert proto.encode("layout", layout_with(lambda m: m.placements.__setitem__(0, b"R" * (1 << 20)))) != EFORMAT
    assert proto.encode("layout", layout_with(lambda m: m.placements.__setitem__(0, b"R" * ((1 << 20) + 1)))) == EFORMAT


def layout_with(change):
    m = sample_layout()
    change(m)
    return m


@pytest.mark.parametrize("change", [
    lambda m: setattr(m.tensors[1], "component", 1), lambda m: setattr(m.tensors[4], "component", 2),
    lambda m: setattr(m.tensors[0], "component", 1),
    lambda m: setattr(m.tensors[1], "name_offset", 7), lambda m: setattr(m.tensors[1], "name_len", 0),
    lambda m: setattr(m.tensors[4], "name_len", 5),
    lambda m: setattr(m.tensors[4], "name_len", 2**32 - 1), lambda m: setattr(m.tensors[1], "first_dim", 0),
    lambda m: setattr(m.tensors[0], "ndim", 17),
    lambda m: setattr(m.tensors[3], "ndim", 4), lambda m: setattr(m.tensors[0], "dtype", 0),
    lambda m: setattr(m.tensors[0], "dtype", 22),
    lambda m: setattr(m.tensors[0], "flags", 2), lambda m: setattr(m.tensors[0], "mesh", 2),
    lambda m: setattr(m.tensors[0], "placement", 2),
    lambda m: m.dims.__setitem__(0, 2**62), lambda m: setattr(m, "ncomponents", 1), lambda m: setattr(m, "ndims", 5),
    lambda m: setattr(m, "ntensors", 4),
    lambda m: setattr(m, "min_bytes", 0), lambda m: setattr(m, "target_bytes", 1 << 40),
    lambda m: setattr(m, "row_bytes", (1 << 19) + 1), lambda m: setattr(m, "small_bytes", (128 << 10) + 1),
    lambda m: m.components.__setitem__(0, b"ranks"),
    lambda m: m.components.__setitem__(0, b"zz"), lambda m: m.placements.__setitem__(0, b""),
    lambda m: setattr(m.meshes[0], "nranks", 3),
    lambda m: m.meshes[0].dim_names.__setitem__(0, b"tp"), lambda m: m.meshes[0].dim_sizes.__setitem__(0, 0),
    lambda m: setattr(m.meshes[0], "ndims", 0),
    lambda m: setattr(m, "names", c.cast(c.create_string_buffer(b"a.biasA.weightb/..\xc3\xbcstep"), c.c_void_p)),
    lambda m: setattr(m, "names", c.cast(c.create_string_buffer(b"a.biasa.weightb/..\xff\xbcstep"), c.c_void_p)),
])
def test_layouts_that_lie(proto, change):
    assert proto.encode("layout", layout_with(change)) == EFORMAT


def blobs_of(m, count, slashes):
    """Empty ones whose names have so many slashes."""
    names = [b"%06d" % i + b"/a" * slashes for i in range(count)]
    m.blobs, m.nblobs = table(Blob, [Blob(n, False, 0, ProtoRef(digest=digest(3))) for n in names]), count


def test_paths_of_blobs(proto):
    """63 slashes in one, and of 200 together at most 4,096 + 16 * 200 = 7,296."""
    for count, slashes in ((1, 63), (200, 36), (3, 0)):
        m = sample_part()
        blobs_of(m, count, slashes)
        body = proto.encode("part", m)
        assert isinstance(body, bytes) and proto.again("part", body) == body


@pytest.mark.parametrize("change", [
    lambda m: setattr(m, "rank", 2), lambda m: setattr(m, "world", 0), lambda m: setattr(m.chunks[0], "last_tensor", 4),
    lambda m: setattr(m.chunks[0], "nrows", 0),
    lambda m: setattr(m.chunks[0], "nrows", 5), lambda m: setattr(m.chunks[1], "first_tensor", 5),
    lambda m: setattr(m.chunks[1], "last_tensor", 1 << 24),
    lambda m: setattr(m.chunks[0].ref, "pack", 3), lambda m: setattr(m.chunks[0].ref, "kind", 4),
    lambda m: setattr(m.chunks[0].ref, "offset", 2**64 - 1),
    lambda m: setattr(m.chunks[0].ref, "raw_len", 2**46 + 1), lambda m: setattr(m.chunks[0].ref, "checks", 8192),
    lambda m: setattr(m.chunks[0].ref, "stored_len", 999),
    lambda m: setattr(m.blobs[0].ref, "offset", 1 << 20), lambda m: setattr(m.blobs[0], "len", 999),
    lambda m: setattr(m.blobs[0], "per_rank", True),
    lambda m: setattr(m.blobs[1], "name", b"a"), lambda m: setattr(m.blobs[1], "name", b""),
    lambda m: setattr(m.blobs[0], "name", b"\xc0\x80"), lambda m: setattr(m.blobs[0], "name", b"/" * 64),
    lambda m: blobs_of(m, 200, 37),
    lambda m: setattr(m.packs[0], "pack", b"x"), lambda m: setattr(m.packs[0], "pack", m.packs[2].pack),
    lambda m: setattr(m.packs[0], "live_bytes", 2 << 20),
    lambda m: setattr(m.packs[0], "size", 2**63), lambda m: setattr(m.timings[0], "phase", b""),
    lambda m: setattr(m.timings[0], "phase", b"x" * 65),
    lambda m: setattr(m, "host", b"x" * 256), lambda m: setattr(m, "npacks", 2),
])
def test_parts_that_lie(proto, change):
    m = sample_part()
    change(m)
    assert proto.encode("part", m) == EFORMAT


def test_empty_blobs_have_only_a_digest(proto, bodies):
    m = sample_part()
    m.blobs[1].ref.offset = 77  # written as 0
    assert proto.encode("part", m) == bodies["part"][0]


def test_pack_tables(proto):
    """Any legal names come back, and rows out of order of first use are refused."""
    names = [b"%016x-%d-%d-%s" % (launch, count, rank, cls) for launch in (0, 2**64 - 1) for count in (0, 2**64 - 1)
             for rank in (0, 2**32 - 1)
             for cls in (b"model", b"meta", b"a-b-1", b"x" * 71)]
    random.Random(1).shuffle(names)
    m = sample_part()
    for name in names:
        m.packs, m.npacks = packs(b"00000000000000aa-1-1-a", name, b"00000000000000aa-1-1-b")
        assert isinstance(proto.encode("part", m), bytes), name
    m.packs, m.npacks = packs(*names)
    body = proto.encode("part", m)
    got = proto.decode("part", body)
    assert [got.packs[i].pack for i in range(got.npacks)] == names
    assert [got.packs[i].live_bytes for i in range(got.npacks)] == [4096 + i for i in range(len(names))]
    proto.release("part", got)
    for bad in (b"0000000000000000-0-4294967296-a", b"0000000000000000-0-0-", b"0000000000000000-0-0",
                b"0000000000000000-0-0-.a", b"0000000000000000-0-0-a/b",
                b"0000000000000000-0-00-a", b"0000000000000000-0-0-" + b"x" * 72):
        m.packs, m.npacks = packs(b"00000000000000aa-1-1-a", bad, b"00000000000000aa-1-1-b")
        assert proto.encode("part", m) == EFORMAT, bad


def test_many_packs_of_as_many_classes(proto):
    """30,000 packs: 450 million comparisons of names, if each were compared with all before."""
    m = sample_part()
    m.packs, m.npacks = packs(*(b"00000000000000aa-1-0-c%05d" % i for i in range(30_000)))
    began = time.process_time()
    data = proto.encode("part", m)
    took = time.process_time() - began
    assert isinstance(data, bytes) and took < 0.5, took


@pytest.mark.parametrize("change", [
    {"rank": 2}, {"world": 0}, {"run": b".x"}, {"run": b"x" * 129}, {"attempt": b"x"}, {"step": 2**63},
    {"layout": digest(8)}, {"npacks": 0}, {"nheaders": 2},
])
def test_announcements_that_lie(proto, change):
    m = sample_announcement(0)
    m.headers = table(ViewHeader, [m.headers[0]] * 2)
    for k, v in change.items():
        setattr(m, k, v)
    assert proto.encode("announcement", m) == EFORMAT


@pytest.mark.parametrize("change", [
    {"rank": 4}, {"world": 0}, {"world": 2**24 + 1}, {"run": b".x"}, {"attempt": b"x"}, {"step": 2**63},
    {"host": b"x" * 256}, {"host": b"\xff"},
    {"timings": table(Timing, [Timing(b"", 1, 1)]), "ntimings": 1},
    {"timings": table(Timing, [Timing(b"x" * 65, 1, 1)]), "ntimings": 1},
    {"timings": table(Timing, [Timing(b"p%d" % i, 1, 1) for i in range(257)]), "ntimings": 257},
])
def test_stats_that_lie(proto, change):
    assert proto.encode("stats", sample_stats(**change)) == EFORMAT


def test_stats_come_back(proto):
    body = proto.encode("stats", sample_stats())
    m = proto.decode("stats", body)
    for name, kind in m._fields_:
        if kind in (c.c_uint64, c.c_uint32, c.c_char_p):
            assert getattr(m, name) == getattr(sample_stats(), name), name
    t = m.timings[1]
    assert (t.phase, t.ns, t.bytes, t.end_ns - t.start_ns) == (b"copy", 2, 3, 5)
    proto.release("stats", m)
    assert not m.arena and not m.ntimings
    fields = parse(body)
    too_many = [f for f in fields if f[0] == 9][:1] * 257
    assert proto.again("stats", unparse(fields[:7] + too_many + fields[9:])) == EFORMAT


def test_times_of_day_are_optional(proto, bodies):
    """A part of before these fields has none; one with them loses nothing else where they are not known."""
    old, new = bodies["part"]
    m = proto.decode("part", old)
    assert (m.timings[0].ns, m.timings[0].start_ns, m.timings[0].end_ns, m.nsamples) == (5, 0, 0, 0)
    proto.release("part", m)
    m = proto.decode("part", new)
    assert (m.timings[0].start_ns, m.timings[0].end_ns) == (1_700_000_000_000_000_000, 1_700_000_000_000_000_009)
    assert [(s.tensor, s.group[0], s.hash[0]) for s in m.samples[:m.nsamples]] == [(0, 1, 9), (0, 2, 9), (3, 1, 8)]
    proto.release("part", m)


@pytest.mark.parametrize("rows", [
    [Sample(3, id16(1)), Sample(0, id16(1))], [Sample(0, id16(2)), Sample(0, id16(1))],
    [Sample(0, id16(1)), Sample(0, id16(1))], [Sample(1 << 24, id16(1))],
])
def test_samples_that_lie(proto, bodies, rows):
    m = sample_part_compared()
    m.samples, m.nsamples = table(Sample, rows), len(rows)
    assert proto.encode("part", m) == EFORMAT
    fields = parse(bodies["part"][1])
    assert fields[-1][0] == 11
    raw = b"".join(bytes(r) for r in rows)
    assert proto.again("part", unparse(fields[:-1] + [(11, 2, raw)])) == EFORMAT
    assert proto.again("part", unparse(fields[:-1] + [(11, 2, fields[-1][2][:-1])])) == EFORMAT


def test_replicas(proto, bodies):
    body = bodies["announcement"][2]
    fields = parse(body)
    number, kind, rows = fields[-1]
    assert number == 18 and len(rows) == 64
    m = proto.decode("announcement", body)
    assert [(bytes(r.group), bytes(r.digest))
            for r in m.replicas[:m.nreplicas]] == [(bytes(id16(1)), bytes(id16(3))), (bytes(id16(2)), bytes(id16(3)))]
    proto.release("announcement", m)
    for bad in (rows[:-1], rows[32:] + rows[:32], rows[:32] * 2):
        assert proto.again("announcement", unparse(fields[:-1] + [(number, kind, bad)])) == EFORMAT
    many = [Replica((c.c_uint8 * 16)(*i.to_bytes(16, "big")), id16(0)) for i in range((1 << 16) + 1)]
    m = sample_announcement(0, replicas=table(Replica, many), nreplicas=len(many))
    assert proto.encode("announcement", m) == EFORMAT
    m.nreplicas -= 1
    assert len(proto.encode("announcement", m)) > 32 << 16


def test_digests_have_32_bytes(proto, bodies):
    for name, number in (("entry", 7), ("announcement", 9), ("announcement", 12), ("part", 6), ("begin", 9)):
        body = bodies[name][1 if name == "entry" else 0]
        for n in (0, 31, 33):
            if name == "entry":
                changed = [(k, t, unparse([(a, b, (v * 2)[:n] if a == 5 else v) for a, b, v in parse(w)]) if k == 7
                            else w) for k, t, w in parse(body)]
            else:
                changed = [(k, t, (w * 2)[:n] if k == number else w) for k, t, w in parse(body)]
            if (name, n) != ("begin", 0):  # there an empty one means that there is no mesh, written as no field
                assert proto.again(name, unparse([f for f in changed if f[1] != 2 or f[2]])) == EFORMAT, (
                    (name, number, n))


def test_rules_of_names(proto):
    lib = proto.lib
    for good in ("a", "_", "0", "run.1-x_Y", "a" * 128):
        assert lib.proto_run_valid(good.encode()), good
    for bad in ("", ".a", "-a", "a/b", "a b", "\u00e4", "a" * 129):
        assert not lib.proto_run_valid(bad.encode()), bad
    for bad in ("ranks", "mesh", "blobs", "meta", "incoming", "latest", "manifest.json", "a.npy", "a.safetensors",
                "a" * 65, ".npy", ""):
        assert not lib.proto_component_valid(bad.encode()), bad
    for good in ("model", "optimizer", "a" * 64, "npy", "mesh2"):
        assert lib.proto_component_valid(good.encode()), good


@settings(max_examples=300, deadline=None)
@given(data=st.one_of(st.binary(max_size=12), st.text(max_size=6).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_utf8_against_python(lib, data):
    lib.proto_utf8_valid.restype = c.c_bool
    try:
        good = b"\0" not in data and data.decode("utf-8") is not None
    except UnicodeDecodeError:
        good = False
    assert lib.proto_utf8_valid(data, c.c_size_t(len(data))) == good


def test_text_of_every_record_is_utf8_without_nul(proto):
    m = sample_announcement(0, host=b"\xed\xa0\x80")
    assert proto.encode("announcement", m) == EFORMAT
