# SPDX-License-Identifier: Apache-2.0
"""core/save/plan/keep: which earlier attempts a save goes on referring to. The bound of docs/save.md, over histories of
training and of adversaries: what was written again by step t is at most 1.5 times what changed and 1 % of all bytes for
each of t + 16 steps, and no save refers to more than 16 earlier attempts."""
import ctypes as c
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

MAX, LARGE, DUST = 16, 8, 100       # keep.h
TOP = (1 << 64) - 1


class Keep(c.Structure):
    _fields_ = [("bytes", c.c_uint64), ("named", c.c_bool), ("kept", c.c_bool)]


@pytest.fixture(scope="module")
def choose(lib):
    def call(attempts, room=MAX):
        """[(bytes, named), ...] -> [kept, ...]"""
        all_ = (Keep * max(1, len(attempts)))(*[Keep(bytes_, named, i % 2) for i, (bytes_, named) in
                                                enumerate(attempts)])
        assert lib.save_keep_choose(all_, c.c_size_t(len(attempts)), c.c_size_t(room)) == 0
        return [k.kept for k in all_[:len(attempts)]]
    return call


# ---- the rule ----

def plain(*sizes):
    return [(s, False) for s in sizes]


def test_all_are_kept_while_there_is_room(choose):
    assert choose([]) == []
    assert choose(plain(*[0] * 8, *range(8))) == [True] * 16
    assert choose(plain(1, 2, 3), room=2) == [False, True, True]


def test_dust_is_merged_first(choose):
    assert choose(plain(*[100] * 15, 1, 1)) == [True] * 15 + [False] * 2
    assert choose(plain(*[99] * 16, 16)) == [True] * 16 + [False]       # 1 % is dust
    assert choose(plain(*[99] * 16, 17)) != [True] * 16 + [False]
    # one that is named anyway frees no place
    assert choose([*plain(*[100] * 14), (1, True), (1, False), (1, False)]) == [True] * 15 + [False] * 2


def test_else_the_largest_are_kept(choose):
    sizes = [10, 20] * 8 + [15]
    kept = choose(plain(*sizes))
    assert [s for s, k in zip(sizes, kept) if k] == [20] * 8
    assert choose(plain(*[7] * 17)) == [True] * 8 + [False] * 9         # of equal ones the first
    assert choose([*plain(*[100] * 16), (1, True)]) == [True] * 8 + [False] * 9
    assert choose(plain(*[5] * 9), room=3) == [True] * 3 + [False] * 6


@given(st.lists(st.tuples(st.integers(0, TOP), st.booleans()), max_size=60), st.integers(0, MAX))
def test_places(choose, attempts, room):
    named = 0
    attempts = [(bytes_, flag and (named := named + 1) <= min(8, room)) for bytes_, flag in attempts]
    kept = choose(attempts, room)
    assert sum(k or n for k, (_, n) in zip(kept, attempts)) <= room and (len(attempts) > room or all(kept))
    assert kept == choose(attempts, room)


# ---- histories ----

class History:
    """The bytes that live in each attempt, oldest first, and what saving cost. `layout`: a job of several ranks, which
    name the newest attempt for its layout."""

    def __init__(self, choose, layout, total):
        self.choose, self.layout, self.total = choose, layout, total
        self.live = {0: total}
        self.step = self.changed = self.again = self.most = self.allowed = 0

    def save(self, changes):
        """changes: {attempt: bytes of it that change}"""
        newest = self.step
        self.step += 1
        attempts = [a for a, n in self.live.items() if n or (a == newest and self.layout)]
        kept = self.choose([(self.live[a], a == newest and self.layout) for a in attempts])
        merged = {a for a, k in zip(attempts, kept) if not k}
        referred = len(attempts) - len(merged) + (newest in merged and self.layout)
        changed = sum(changes.values())
        for a, n in changes.items():
            assert 0 <= n <= self.live[a]
            self.live[a] -= n
        again = sum(self.live[a] for a in merged)
        self.live = {a: n for a, n in self.live.items() if n and a not in merged}
        self.live[self.step] = changed + again
        assert sum(self.live.values()) == self.total and referred <= MAX
        self.changed, self.again, self.most = self.changed + changed, self.again + again, max(self.most, referred)
        assert self.again <= 1.5 * self.changed + self.total * (self.step + 16) / 100 + self.allowed, self.step
        return merged

    def factor(self):
        """Bytes written by bytes changed, and the same without 1 % of the whole a step."""
        return (1 + self.again / self.changed, 1 + (self.again - self.step * self.total / 100) / self.changed)


def pieces(choose, layout, sizes, steps, changes):
    """A history of pieces: changes(t) are the numbers of those that change."""
    sizes = np.asarray(sizes, np.int64)
    owner = np.zeros(len(sizes), np.int64)
    h = History(choose, layout, int(sizes.sum()))
    for t in range(steps):
        now = np.unique(np.fromiter(changes(t), np.int64))
        bytes_ = {}
        for a, n in zip(owner[now].tolist(), sizes[now].tolist()):
            bytes_[a] = bytes_.get(a, 0) + n
        merged = h.save(bytes_)
        if merged:
            owner[np.isin(owner, list(merged))] = h.step
        owner[now] = h.step
    return h


def ranked(rng, n, count, power=1.0):
    """Draws of `count` out of n, the first more often than the last (Zipf)."""
    total = list(itertools.accumulate(1 / (i + 1)**power for i in range(n)))
    return lambda t: rng.choices(range(n), cum_weights=total, k=count)


# name: (sizes, which change, at most so many times what changed, without the 1 %)
PATTERNS = {
    "one of 100 in turn": lambda r: ([1000] * 100, lambda t: [t % 100], 2.3),
    "one of 100 at random": lambda r: ([1000] * 100, lambda t: [r.randrange(100)], 2.6),
    "five of 100 at random": lambda r: ([1000] * 100, lambda t: r.sample(range(100), 5), 1.8),
    "one of 1000 in turn": lambda r: ([1000] * 1000, lambda t: [t % 1000], 6),
    "rows of embeddings": lambda r: ([1000] * 500, ranked(r, 500, 20), 2.2),
    "experts": lambda r: ([3000] + [1000] * 64, lambda t: [0, *r.sample(range(1, 65), 6)], 1.6),
    "experts that are rarely chosen": lambda r: ([3000] + [1000] * 64, lambda t: [0, *(
        1 + e for e in ranked(r, 64, 4, 2)(t))], 1.6),
    "LoRA": lambda r: ([10**6] * 100 + [1000] * 40, lambda t: range(100, 140), 1),
    "LoRA of two layers a step": lambda r: ([10**6] * 100 + [1000] * 40, lambda t: [100 + t % 40, 100 + 7 * t % 40], 9),
    "frozen layers": lambda r: ([1000] * 100, lambda t: range(70, 100), 1),
    "layers that thaw": lambda r: ([1000] * 100, lambda t: range(max(0, 99 - t // 50), 100), 1.2),
    "sizes that differ by 1000": lambda r: ([10**(i % 4) for i in range(400)], lambda t: [r.randrange(400)], 6),
    "all": lambda r: ([1000] * 20, lambda t: range(20), 1),
    "nothing, then one": lambda r: ([1000] * 100, lambda t: [t // 3 % 100] if t % 3 == 0 else [], 2.6),
}


@pytest.mark.parametrize("layout", [False, True], ids=["one rank", "ranks"])
@pytest.mark.parametrize("name", PATTERNS)
def test_training(choose, rng, scale, name, layout):
    sizes, changes, most = PATTERNS[name](rng)
    h = pieces(choose, layout, sizes, scale(600, 10_000), changes)
    assert h.factor()[0] <= most and h.factor()[1] <= 2, h.factor()


@pytest.mark.parametrize("layout", [False, True], ids=["one rank", "ranks"])
def test_jobs_that_go_back(choose, rng, scale, layout):
    """To what an earlier step had: each time one merge may be made again, no more."""
    for share in (0.003, 0.0101, 0.03):
        h, kept, backs = History(choose, layout, 10**9), [], 0
        for _ in range(scale(300, 10_000)):
            h.allowed = backs * 9 * h.total // 17
            h.save(evenly(h, rng.sample(list(h.live), min(3, len(h.live))), int(share * h.total)))
            kept.append(dict(h.live))
            if rng.random() < 0.05:
                h.live, backs = dict(rng.choice(kept[-20:])), backs + 1
                newest = max(h.live)
                # attempts are numbered on; what the step itself wrote is the newest
                h.live[h.step] = h.live.pop(newest)
        assert h.again <= 1.5 * h.changed + h.total * (h.step + 16) / 100 + backs * h.total / 4


@pytest.mark.parametrize("every", [2, 3, 5, 20, 50])
def test_components_that_only_some_saves_have(choose, rng, scale, every):
    """Weights at each step, the optimizer at every n-th: each component's attempts are those of the last step that has
    it, and all that a save has are decided on together."""
    for sizes, changes in itertools.product(((100, 200), (300, 100), (20, 1000)), ((1, 1), (1, 0), (2, 10), (11, 25))):
        owner = [np.zeros(n, np.int64) for n in sizes]
        changed, again, allowed = 0, 0, 16 * sum(sizes) / 100
        for t in range(1, scale(200, 2_000)):
            parts = owner if t % every == 0 else owner[:1]
            live = np.bincount(np.concatenate(parts), minlength=t)
            attempts = np.flatnonzero(live)
            kept = choose([(int(live[a]), False) for a in attempts])
            merged, referred = attempts[[not k for k in kept]], set()
            for part, n in zip(parts, changes):
                new = rng.sample(range(len(part)), min(n, len(part)))
                part[new] = t
                moved = np.isin(part, merged)
                part[moved] = t
                referred |= set(part.tolist()) - {t}
                changed, again = changed + len(new), again + int(moved.sum())
            allowed += sum(map(len, parts)) / 100
            assert again <= 1.5 * changed + allowed and len(referred) <= MAX
        assert again <= 2.2 * changed


def least(h, k):
    return sorted(h.live, key=h.live.get)[:k]


def take(h, attempts, bytes_):
    """So many bytes out of these attempts, in this order."""
    out = {}
    for a in attempts:
        n = min(bytes_, h.live[a])
        if n:
            out[a], bytes_ = n, bytes_ - n
    return out


def evenly(h, attempts, bytes_):
    """Of the largest of them, so that what is left is as equal as can be."""
    left, out = {a: h.live[a] for a in attempts}, {}
    for _ in range(8):
        a = max(left, key=left.get)
        n = min(left[a], -(-bytes_ // 8))
        left[a] -= n
        out[a] = out.get(a, 0) + n
    return out


def largest(h, n):
    return take(h, least(h, 99)[::-1], n)


ADVERSARIES = {
    "largest": largest,
    "largest, evenly": lambda h, n: evenly(h, least(h, 99)[-9:], n),
    "all, evenly": lambda h, n: evenly(h, list(h.live), n),
    "oldest": lambda h, n: take(h, sorted(h.live), n),
    "newest": lambda h, n: take(h, sorted(h.live)[::-1], n),
    "smallest": lambda h, n: take(h, least(h, 99), n),
    "second largest": lambda h, n: take(h, [*least(h, 99)[-2::-1], *least(h, 99)[-1:]], n),
}


@pytest.mark.parametrize("layout", [False, True], ids=["one rank", "ranks"])
@pytest.mark.parametrize("who", ADVERSARIES)
def test_adversaries(choose, rng, scale, who, layout):
    """What changes is chosen with all that is known of the rule, in steps of every size."""
    for share in (0.0001, 0.001, 0.0034, 0.005, 0.0101, 0.02, 0.033, 0.06, 0.2):
        h = History(choose, layout, 10**9)
        for _ in range(scale(300, 10_000)):
            h.save(ADVERSARIES[who](h, int(share * h.total)))
        assert h.factor()[1] <= 2.5


@pytest.mark.parametrize("layout", [False, True], ids=["one rank", "ranks"])
def test_mixed_adversaries(choose, rng, scale, layout):
    """Phases of dust, of what is just no dust, and of much, from everywhere."""
    shares = (0, 0.00001, 0.001, 0.0099, 0.0101, 0.0101, 0.02, 0.05, 0.3)
    for _ in range(scale(6, 40)):
        h = History(choose, layout, 10**9)
        for _ in range(scale(100, 1000)):
            who, share = rng.choice(list(ADVERSARIES.values())), rng.choice(shares)
            for _ in range(rng.randrange(1, 20)):
                h.save(who(h, int(share * h.total)))


@settings(max_examples=50)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(list(ADVERSARIES)), st.sampled_from(
    (1, 10**5, 3 * 10**6, 10**7, 10**7 + 1, 2 * 10**7, 10**8)), st.integers(1, 17)), max_size=40))
def test_any_history(choose, layout, phases):
    h = History(choose, layout, 10**9)
    for who, bytes_, times in phases:
        for _ in range(times):
            h.save(ADVERSARIES[who](h, bytes_))


def test_the_first_come_rule_has_no_such_bound(choose, rng):
    """The bound can fail: rules that keep the first 16 that they meet, or the 16 largest, break it."""
    for rule in (lambda attempts: [i < MAX for i in range(len(attempts))],
                 lambda attempts: [i in sorted(range(len(attempts)), key=lambda i: -attempts[i][0])[:MAX]
                                   for i in range(len(attempts))]):
        with pytest.raises(AssertionError):
            pieces(rule, False, [1000] * 1000, 400, lambda t: [t % 1000])
