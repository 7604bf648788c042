# SPDX-License-Identifier: Apache-2.0
"""The plan of an exchange: from the lists of all ranks, each block that several want has one owner among them, owners
read alike many bytes, and all ranks make the same plan. Lists are encoded here, from the words of exchange_list.c. And
the rule of "auto", a pure function."""
import collections
import ctypes as c
import math

import pytest

from commlib import Error, internal

u8, u32, u64, f64 = c.c_uint8, c.c_uint32, c.c_uint64, c.c_double
BLOCK, MIB, NONE, EPROTO = 16384, 1 << 20, 2**32 - 1, 71


class ExchangeKey(c.Structure):
    _fields_ = [("offset", u64), ("raw_len", u64), ("hash", u64), ("pack", u32)]


class ExchangeObject(c.Structure):
    _fields_ = [("key", ExchangeKey), ("mine", u32)]


class ExchangeSegment(c.Structure):
    _fields_ = [(name, u32) for name in ("object", "first", "n", "group", "owner")]


class ExchangeGroup(c.Structure):
    _fields_ = [("ranks", c.POINTER(u32)), ("n", u32), ("bytes", u64), ("objects", u64)]


class ExchangeBucket(c.Structure):
    _fields_ = [(name, u32) for name in ("owner", "group", "own", "nsegments")] + [("first", u64), ("bytes", u64)]


class ExchangeAlone(c.Structure):
    _fields_ = [(name, u32) for name in ("mine", "first", "n")]


class ExchangePlan(c.Structure):
    _fields_ = [("objects", c.POINTER(ExchangeObject)), ("nobjects", c.c_size_t), ("objects_room", c.c_size_t),
                ("segments", c.POINTER(ExchangeSegment)), ("nsegments", c.c_size_t), ("segments_room", c.c_size_t),
                ("groups", c.POINTER(ExchangeGroup)), ("ngroups", u32), ("groups_room", u32),
                ("buckets", c.POINTER(ExchangeBucket)), ("nbuckets", c.c_size_t), ("buckets_room", c.c_size_t),
                ("alone", c.POINTER(ExchangeAlone)), ("nalone", c.c_size_t), ("alone_room", c.c_size_t),
                ("distinct", u64), ("wanted", u64), ("sum", u64), ("reads", c.POINTER(u64))]


class ExchangeList(c.Structure):
    _fields_ = [("bytes", c.c_char_p), ("len", u64), ("ranks", c.POINTER(u32)), ("nranks", u32)]


class ExchangeTerms(c.Structure):
    _fields_ = [("rank", u32), ("size", u32), ("npacks", u32), ("whole", c.c_bool), ("small", c.c_bool)]


class LoadExchangeMeasured(c.Structure):
    _fields_ = [(name, f64) for name in ("distinct", "wanted", "store", "reader", "link", "setup")] + [("ranks", u32)]


class LoadExchangeTimes(c.Structure):
    _fields_ = [("alone", f64), ("shared", f64)]


@pytest.fixture(scope="module")
def lib(build):
    lib = internal(build)
    lib.exchange_plan_release.restype = None
    lib.load_exchange_pays.restype = c.c_bool
    return lib


def number(v):
    out = b""
    while v > 127:
        out, v = out + bytes([v & 127 | 128]), v >> 7
    return out + bytes([v])


def encoded(wants):
    """{(pack, offset, raw bytes, hash): set of blocks}"""
    out, pack, offset = b"", 0, 0
    for (p, o, raw, code), blocks in sorted(wants.items()):
        out += number(p - pack) + number(o - offset if p == pack else o) + number(raw) + code.to_bytes(8, "little")
        runs, at = [], 0
        for b in sorted(blocks):
            if runs and sum(runs[-1]) == b:
                runs[-1][1] += 1
            else:
                runs.append([b, 1])
        if len(blocks) == -(-raw // BLOCK):
            runs = []
        out += number(len(runs))
        for first, n in runs:
            out += number(first - at) + number(n - 1)
            at = first + n
        pack, offset = p, o
    return out


def block_bytes(key, b):
    return min(BLOCK, key[2] - b * BLOCK)


class Made:
    def __init__(self, lib, lists, rank, size, npacks=4, whole=False, small=False):
        """lists: [(bytes, ranks)]"""
        keep = [(u32 * len(ranks))(*ranks) for _, ranks in lists]
        table = (ExchangeList * max(1, len(lists)))(*[
            ExchangeList(data, len(data), k, len(k)) for (data, _), k in zip(lists, keep, strict=True)])
        terms, plan, err = ExchangeTerms(rank, size, npacks, whole, small), ExchangePlan(), Error()
        self.r = lib.exchange_plan_make(table, len(lists), c.byref(terms), c.byref(plan), c.byref(err))
        self.text = err.text.decode()
        if self.r == 0:
            self.sum, self.distinct, self.wanted = plan.sum, plan.distinct, plan.wanted
            self.reads = plan.reads[:size]
            self.groups = [g.ranks[:g.n] for g in plan.groups[:plan.ngroups]]
            self.objects = [((o.key.pack, o.key.offset, o.key.raw_len, o.key.hash), o.mine)
                            for o in plan.objects[:plan.nobjects]]
            self.segments = [(s.object, s.first, s.n, s.group, s.owner) for s in plan.segments[:plan.nsegments]]
            self.buckets = [(b.owner, b.group, b.own, b.first, b.nsegments, b.bytes)
                            for b in plan.buckets[:plan.nbuckets]]
            self.alone = [(a.mine, a.first, a.n) for a in plan.alone[:plan.nalone]]
        lib.exchange_plan_release(c.byref(plan))


def random_wants(rng, size):
    """What each rank wants; some want the same."""
    objects, offset = [], 4096
    for _ in range(rng.choice((1, 5, 40))):
        raw = rng.choice((100, BLOCK, 5 * BLOCK + 7, 64 * BLOCK, 64 * BLOCK - 1, 200 * BLOCK))
        objects.append((rng.randrange(4), offset, raw, rng.getrandbits(64)))
        offset += raw
    out = []
    for _ in range(size):
        if out and rng.random() < .3:
            out.append(rng.choice(out))
            continue
        wants = {}
        for key in objects:
            n = -(-key[2] // BLOCK)
            kind = rng.random()
            blocks = (range(n) if kind < .6 else range(*sorted(rng.sample(range(n + 1), 2))) if kind < .8
                      else [b for b in range(n) if rng.random() < .5])
            if len(blocks) and rng.random() < .9:
                wants[key] = set(blocks)
        out.append(wants)
    return out


def check(lib, wants, whole, small):
    size, by_list = len(wants), collections.defaultdict(list)
    for rank, w in enumerate(wants):
        by_list[encoded(w)].append(rank)
    plans = [Made(lib, list(by_list.items()), rank, size, 4, whole, small) for rank in range(size)]
    p = plans[0]
    assert [one.r for one in plans] == [0] * size
    holders = collections.defaultdict(set)
    for rank, w in enumerate(wants):
        for key, blocks in w.items():
            for b in blocks:
                holders[key, b].add(rank)
    shared = {block: ranks for block, ranks in holders.items() if len(ranks) > 1}
    owned, owners = {}, collections.Counter()
    for o, first, n, group, owner in p.segments:
        for b in range(first, first + n):
            assert (p.objects[o][0], b) not in owned
            owned[p.objects[o][0], b] = set(p.groups[group])
            assert owner in p.groups[group]
            owners[owner] += block_bytes(p.objects[o][0], b)
    assert owned == shared
    assert p.distinct == sum(block_bytes(*block) for block in shared)
    assert p.wanted == sum(block_bytes(*block) * len(ranks) for block, ranks in shared.items())
    check_buckets(p, whole, small)
    for rank, one in enumerate(plans):
        assert (one.sum, one.segments, one.buckets, one.groups, one.reads) == (p.sum, p.segments, p.buckets, p.groups,
                                                                               p.reads)
        mine = sorted(wants[rank])
        assert all(m == (mine.index(key) if key in wants[rank] else NONE) for key, m in one.objects)
        alone = {(mine[m], b) for m, first, n in one.alone for b in range(first, first + n)}
        some = {key for (key, _), _ in shared.items()}
        assert alone == {(key, b) for (key, b), ranks in holders.items() if ranks == {rank} and key in some}
        assert one.reads[rank] == owners[rank] + sum(block_bytes(*block) for block, ranks in holders.items()
                                                     if ranks == {rank})
    return p


def check_buckets(p, whole, small):
    seen, turn = [], collections.Counter()
    for owner, group, own, first, n, size in p.buckets:
        assert own == turn[owner] and 1 <= n <= 256 and 0 < size <= 2 * MIB
        turn[owner] += 1
        inside = p.segments[first:first + n]
        seen += range(first, first + n)
        assert all(s[3:] == (group, owner) for s in inside)
        assert size == sum(block_bytes(p.objects[o][0], b) for o, a, k, _, _ in inside for b in range(a, a + k))
        if whole:
            assert all(k == -(-p.objects[o][0][2] // BLOCK) for o, _, k, _, _ in inside)
    assert sorted(seen) == list(range(len(p.segments)))
    assert [b[2] for b in p.buckets] == sorted(b[2] for b in p.buckets)     # by turns


def test_random_lists(lib, rng, scale):
    for i in range(scale(60, 3000)):
        whole = i % 4 == 3
        wants = random_wants(rng, rng.choice((1, 2, 3, 5, 9)))
        if whole:
            wants = [{key: set(range(-(-key[2] // BLOCK))) for key in w if key[2] <= 2 * MIB} for w in wants]
        check(lib, wants, whole, i % 3 == 1)


@pytest.mark.parametrize("small", [False, True])
def test_spans_are_equal(lib, small):
    """Replicas, and two groups that overlap."""
    pieces = {(0, 4096 + i * MIB, MIB, i): set(range(64)) for i in range(50)}
    for size in (2, 5):
        p = check(lib, [pieces] * size, False, small)
        assert max(p.reads) - min(p.reads) <= 128 << 10 and p.distinct == 50 * MIB
        if small:       # a tenth of what each owns is one bucket at least
            for rank in range(size):
                sizes = [b[5] for b in p.buckets if b[0] == rank]
                assert sizes[0] <= sum(sizes) / 10
        else:
            assert len(p.buckets) <= 50 * MIB / (2 * MIB) + 3 * size
    tiny = {(1, 4096 + i * 128, 100, i): {0} for i in range(3000)}
    p = check(lib, [tiny] * 4, False, False)
    assert len(p.buckets) <= 3000 / 256 + 4 and p.distinct == 300_000


def test_lists_that_break_their_form(lib):
    first = {(0, 4096, 3 * BLOCK, 1): {0, 2}}
    good = encoded({**first, (1, 0, 5, 2): {0}})
    assert Made(lib, [(good, [0]), (good, [1])], 0, 2).r == 0
    object_ = number(0) + number(4096) + number(3 * BLOCK) + bytes(8)
    bad = [good[:n] for n in range(1, len(good)) if n != len(encoded(first))]
    bad += [number(4) + number(0) + number(1) + bytes(8) + number(0),       # no such pack
            number(2**32) + number(0) + number(1) + bytes(8) + number(0), b"\xff" * 9 + b"\x7f" + good, b"\xff" * 30,
            number(0) + number(0) + number(0) + bytes(8) + number(0),       # no bytes
            number(0) + number(0) + number(2**45 + 1) + bytes(8) + number(0),
            object_ + number(1) + number(3) + number(0), object_ + number(1) + number(0) + number(3),
            object_ + number(2) + number(0) + number(0) + number(0) + number(0),    # they touch
            object_ + number(2**40), object_ + number(0) + number(0) + number(0) + number(3 * BLOCK) + bytes(9),
            number(0) + number(2**64 - 1) + number(1) + bytes(8) + number(0) + number(0) + number(1) + number(1) +
            bytes(9)]
    told = [Made(lib, [(good, [0]), (data, [1])], 0, 2) for data in bad]
    assert [(one.r, one.text) for one in told] == [
        (-EPROTO, "rank 1 sent a list of what it wants that breaks its format")] * len(bad)
    full = b"".join(number(0) + number(1) + number(2**45) + bytes(8) + number(0) for _ in range(4))
    assert Made(lib, [(full, [0, 1])], 0, 2).text == "several ranks want more than 64 TiB"


# ---- the rule ----

GIB = 2.0**30


@pytest.mark.parametrize("fields,alone,shared", [
    # two ranks, a store of 1 GiB/s, a link of 8: 2 s alone, and 1 + 1/8 shared
    (dict(distinct=GIB, wanted=2 * GIB, store=GIB, reader=GIB, link=8 * GIB, ranks=2), 2, 1.125),
    # less than a quarter is gained: not worth it
    (dict(distinct=GIB, wanted=2 * GIB, store=GIB, reader=GIB, link=1.6 * GIB, ranks=2), 2, 1.625),
    (dict(distinct=GIB, wanted=2 * GIB, store=GIB, reader=GIB, link=1.7 * GIB, ranks=2), 2, 1.588),
    # a link as slow as the store: no gain, and the time to set it up decides
    (dict(distinct=GIB, wanted=2 * GIB, store=GIB, reader=GIB, link=GIB, ranks=2), 2, 2),
    (dict(distinct=GIB, wanted=2 * GIB, store=GIB, reader=GIB, link=1.01 * GIB, setup=.5, ranks=2), 2, 2.490),
    # readers that are slower than the store, even together
    (dict(distinct=GIB, wanted=2 * GIB, store=16 * GIB, reader=GIB, link=16 * GIB, ranks=2), .125, .5625),
    # the sum, and not the longer of the two: this would pay with max()
    (dict(distinct=GIB, wanted=3 * GIB, store=5 * GIB, reader=5 * GIB, link=2 * GIB, ranks=3), .6, .7),
    (dict(distinct=0, wanted=0, store=GIB, reader=GIB, link=GIB, ranks=4), 0, 0),
    # what could not be measured costs nothing
    (dict(distinct=GIB, wanted=4 * GIB, store=GIB, reader=GIB, link=0, ranks=4), 4, 1)])
def test_the_rule(lib, fields, alone, shared):
    m, t = LoadExchangeMeasured(**fields), LoadExchangeTimes()
    pays = lib.load_exchange_pays(c.byref(m), c.byref(t))
    assert math.isclose(t.alone, alone, rel_tol=1e-3) and math.isclose(t.shared, shared, rel_tol=1e-3)
    assert pays == (t.alone > 1.25 * t.shared)
