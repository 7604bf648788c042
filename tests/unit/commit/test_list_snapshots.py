# SPDX-License-Identifier: Apache-2.0
"""Snapshots that go on from earlier ones, and lists that are opened for their newest steps (docs/format/list.md)."""
import ctypes as c
import errno
import pathlib
import random
import shutil

import pytest

import reader
from storelib import ABORT, LAUNCH, NONE, REMOVE, SNAPSHOT, Entry, Failed, List, digest, fresh
from test_list import Oracle, accept, ruin

EVERY = 64
NONCE = (c.c_uint8 * 16)(*range(16))


class Newest(List):
    """A list that was opened for its newest steps."""

    def __init__(self, api, run):
        self.api, self.lib, self.run, self.p = api, api.lib, run, c.c_void_p()
        api.call(self.lib.commit_list_open_newest, api.p, run.encode(), c.byref(self.p))

    def know(self, what, *number):
        self.api.call(getattr(self.lib, f"commit_list_know_{what}"), self.p, *map(c.c_uint64, number))

    def latest(self):
        at = self.lib.commit_list_latest(self.p)
        return at.contents.step if at else None

    def find(self, step):
        self.know("step", step)
        at = self.lib.commit_list_find(self.p, c.c_uint64(step))
        return at.contents.entry if at else None

    def live(self, entry):
        self.know("entry", entry)
        return self.lib.commit_list_entry_live(self.p, c.c_uint64(entry))


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def entry_of(api, run, n):
    entry, body = Entry(), api.entry_body(run, n)
    assert api.lib.proto_entry_decode(body, c.c_size_t(len(body)), c.byref(entry)) == 0
    return entry


def chain(api, run, n):
    """Numbers of the snapshots that a reader of snapshot n reads, oldest last."""
    found = []
    while n:
        e = entry_of(api, run, n)
        assert e.kind == SNAPSHOT
        found.append(n)
        n = e.from_
        api.lib.proto_entry_release(c.byref(e))
    return found


def commits(l, steps, first=0):
    for i, step in enumerate(steps):
        l.put(l.api.commit_entry(f"{first + i + 1:016x}-0", step, NONE, step))


def lie(api, run):
    """The first snapshot or launch entry that does not say what the entries before it say."""
    p = c.c_void_p()
    api.call(api.lib.commit_list_open_compared, api.p, run.encode(), c.byref(p))
    n = api.lib.commit_list_lie(p)
    api.lib.commit_list_close(p)
    return n


def all_agree(api, run, live):
    """A reader from the start, one from the newest snapshot, one that begins with the newest steps."""
    for l in (api.list(run, True), api.list(run), Newest(api, run)):
        if isinstance(l, Newest):
            assert l.latest() == (max(live) if live else None)
            l.know("all")
        assert {step: entry for step, (entry, *_) in l.steps().items()} == live
        l.close()


def reads(f, who="thread-self"):
    def now():
        return dict(line.split(": ") for line in pathlib.Path(f"/proc/{who}/io").read_text().splitlines())
    before = now()
    f()
    after = now()
    return int(after["syscr"]) - int(before["syscr"]), int(after["rchar"]) - int(before["rchar"])


# ---- what a chain is ----

def test_each_goes_on_from_the_one_without_its_lowest_bit(api):
    with api.list("r") as l:
        commits(l, range(EVERY * 21))
    for i in range(1, 21):
        want, n = [], i
        while n:
            want.append(n * EVERY)
            n &= n - 1
        assert chain(api, "r", i * EVERY) == want
    assert lie(api, "r") == 0


def test_bytes_and_reads_grow_with_the_logarithm(api):
    """A list of 64 times the entries: snapshots name a commit a few times more, and reads stay what they were."""
    with api.list("r") as l:
        sizes, seen = {}, {}
        for n in (EVERY + 30, EVERY * 64 + 30):
            commits(l, range(len(l.steps()), n - n // EVERY))
            rows = sum(len(api.entry_body("r", i)) for i in range(EVERY, l.next, EVERY)) / 112
            sizes[n] = rows / n
            assert l.next % EVERY in (29, 30)
            seen[n] = reads(lambda: Newest(api, "r").close())
    few, many = sizes
    assert sizes[few] < 1 and sizes[many] < 1 + 64 .bit_length() / 2 + 1
    # one snapshot of 64 full powers is read in place of one of one
    assert seen[many][0] <= seen[few][0] + EVERY + 8, seen


@pytest.mark.parametrize("word, steps, attributes", [
    pytest.param(False, 5_100, (), id="no word list-2"),
    pytest.param(True, EVERY * 5, [(f"k{i}", 3800 * "x") for i in range(3)], id="large attributes")])
def test_large_snapshots(api, word, steps, attributes):
    """Where all snapshots are large, the newest is read all the same, and not the entries behind an old one."""
    api.p.contents.info.list_2 = word
    with api.list("r") as l:
        for step in range(steps):
            l.put(api.commit_entry(f"{step + 1:016x}-0", step, NONE, step, attributes))
        assert api.entry_path("r", (l.next - 1) // EVERY * EVERY).stat().st_size > 1 << 20
        assert reads(lambda: Newest(api, "r").close(), "self")[0] <= 2 * EVERY + 8    # by all threads
        all_agree(api, "r", {step: entry for step, (entry, *_) in l.steps().items()})
    api.p.contents.info.list_2 = True


@pytest.mark.parametrize("seed", range(6))
def test_any_history(api, seed):
    """What writers put, whole lists and ones opened for the newest steps, removals and replacements and all."""
    r, oracle, steps = random.Random(seed), Oracle(), []
    keep = r.choice([0, 5, 40, 10**6])
    whole, newest = api.list("r", True), Newest(api, "r")
    for i in range(r.choice([300, 700])):
        l = r.choice([whole, newest])
        roll = r.random()
        if roll < 0.02:
            newest.close()
            newest = l = Newest(api, "r")
        if roll < 0.03 and oracle.live:         # a step of long ago, or any
            step = r.choice([min(oracle.live), r.choice(sorted(oracle.live))])
            what = (api.commit_entry(f"{10**6 + i:016x}-0", step, oracle.live[step], i), step)
        elif roll < 0.5 and len(oracle.live) > keep or (roll < 0.06 and oracle.live):
            entry = oracle.live[r.choice([min(oracle.live), r.choice(sorted(oracle.live)), max(oracle.live)])]
            what = (api.entry(REMOVE, removes=entry), None)
        elif roll < 0.55:
            what = (api.entry(LAUNCH, launch=f"{2 * 10**6 + i:016x}".encode(), newest_step=NONE), None)
        else:
            step = r.choice([len(steps), len(steps), r.randrange(10**4)])
            if step in oracle.live:
                continue
            steps.append(step)
            what = (api.commit_entry(f"{10**6 + i:016x}-0", step, NONE, i), step)

        def check(list_):
            if what[1] is None:
                return 0
            now = list_.find(what[1]) if isinstance(list_, Newest) else list_.steps().get(what[1], (None,))[0]
            return 0 if (NONE if now is None else now) == what[0].commit.replaces else -errno.EEXIST
        n = l.put(what[0], check)
        if what[1] is not None:
            oracle.live[what[1]] = n
        elif what[0].kind == REMOVE:
            oracle.live = {s: e for s, e in oracle.live.items() if e != what[0].removes}
        if r.random() < 0.02:
            all_agree(api, "r", oracle.live)
    all_agree(api, "r", oracle.live)
    newest.refresh()
    assert newest.latest() == (max(oracle.live) if oracle.live else None)
    newest.know("all")
    assert {s: e for s, (e, *_) in newest.steps().items()} == oracle.live
    assert lie(api, "r") == 0
    whole.close()
    newest.close()


# ---- the newest steps only ----

def test_the_newest_steps_alone(api):
    with api.list("r") as l:
        commits(l, range(EVERY * 5))
        n = l.next
    with Newest(api, "r") as l:
        known = len(l.steps())
        assert known < 2 * EVERY and l.latest() == EVERY * 5 - 1 and l.next == n
        assert l.find(EVERY * 5 + 7) is None and len(l.steps()) == known   # above all: nothing was read for that
        assert l.find(3) == 3 and len(l.steps()) == EVERY * 5               # now it was
    with Newest(api, "r") as l:
        assert l.live(3) and not l.live(EVERY)
    with Newest(api, "r") as l:
        l.put(api.entry(REMOVE, removes=3))         # of the part that is not known
        assert len(l.steps()) == known and l.find(3) is None and l.find(4) == 4


def test_the_highest_step_is_an_old_one(api):
    """After a job went on from an earlier step, and after the newest steps were removed."""
    with api.list("r") as l:
        commits(l, [5000, *range(EVERY * 4)])
        first = l.steps()[EVERY * 4 - 1][0]
    with Newest(api, "r") as l:
        assert l.latest() == 5000
        l.put(api.entry(REMOVE, removes=0))
        l.refresh()
        assert l.latest() == EVERY * 4 - 1
    with api.list("r") as l:
        for step in range(EVERY * 4 - 1, EVERY + 9, -1):
            l.put(api.entry(REMOVE, removes=l.steps()[step][0]))
    with Newest(api, "r") as l:
        assert l.latest() == EVERY + 9 and not l.live(first)


def test_a_writer_that_knows_the_newest_steps_only(api):
    """Its snapshots say the same as those of one that has read everything."""
    live = {}
    for i in range(EVERY * 6):
        with Newest(api, "r") as l:
            live[i] = l.put(api.commit_entry(f"{i + 1:016x}-0", i, NONE, i))
            if i % 3 == 2:
                l.put(api.entry(REMOVE, removes=live.pop(i // 2) if i // 2 in live else 10**9))
    all_agree(api, "r", live)
    assert lie(api, "r") == 0


# ---- snapshots of a list that was opened for its newest steps ----

def lowest_bit(n):
    return n & -n


def fill(l, until):
    """Commits of steps that are their numbers."""
    l.refresh()
    while l.next < until:
        commits(l, [l.next], l.next)


def right(api, run="r"):
    """{step: entry}. Each snapshot says what the library makes of all entries before it, and tests/golden/reader.py,
    which is written from the pages."""
    store = reader.Store(api.path)
    store.open()
    found = reader.List(store, run).read()
    assert lie(api, run) == 0 and not store.faults, store.faults
    return {step: entry for step, (entry, _) in found.visible.items()}


def test_its_first_snapshot_reads_as_much_as_it_says(api):
    """However long the list is: nothing for every second one, half of the list for that of number 2^k."""
    with api.list("r") as whole:
        for i in range(1, 41):
            fill(whole, EVERY * i)
            with Newest(api, "r") as l:
                known = len(l.steps())
                calls, bytes_ = reads(lambda l=l, i=i: commits(l, [EVERY * i], EVERY * i))
                rows = EVERY * (lowest_bit(i) - 1)  # of before the newest snapshot, which it has read
                assert calls <= 8 * i.bit_length() and bytes_ <= 2 * 112 * rows + 8192 * i.bit_length(), i
                assert len(l.steps()) <= known + 1 + rows, i
            whole.refresh()
    right(api)


@pytest.mark.parametrize("keep, removals", [(10**6, 0.003), (10**6, 0.05), (400, 0.02), (40, 0.02)])
@pytest.mark.parametrize("seed", range(3))
def test_its_snapshots_say_the_same(api, seed, keep, removals):
    """After any history: of launches, of removals that change something or nothing, of steps that are replaced, of
    jobs that go back."""
    r, live, step, made = random.Random(seed), {}, 0, 0
    lists = [api.list("r", True), Newest(api, "r"), Newest(api, "r")]
    for i in range(EVERY * 22):
        at = r.choice([0, 1, 1, 1, 2, 2])
        l, roll = lists[at], r.random()
        l.refresh()
        if at and (roll < 0.01 or (l.next % EVERY > 61 and roll < 0.4)):
            l.close()
            lists[at] = l = Newest(api, "r")
        due, old = l.next % EVERY == 0, None
        if len(live) > keep:
            old = min(live)
        elif live and r.random() < removals:
            old = r.choice([max(live), r.choice(sorted(live)), min(live)])
        if old is not None and r.random() < 0.1:
            l.know("step", old) if at else None
            live[old] = l.put(api.commit_entry(f"{10**6 + i:016x}-0", old, live[old], i))
        elif old is not None:
            l.put(api.entry(REMOVE, removes=live.pop(old)))
        elif l.next and r.random() < removals / 2:
            gone = r.randrange(l.next)
            l.put(api.entry(REMOVE, removes=gone))
            live = {s: e for s, e in live.items() if e != gone}
        elif r.random() < 0.03:
            l.put(api.entry(LAUNCH, launch=f"{2 * 10**6 + i:016x}".encode(), newest_step=NONE, nonce=NONCE))
        else:
            step = max(0, step - 100) if r.random() < 0.003 else step + r.choice([1, 1, 1, 7])
            if at:
                l.know("step", step)
            live[step] = l.put(api.commit_entry(f"{10**6 + i:016x}-0", step, live.get(step, NONE), i))
        made += due and at > 0 and len(l.steps()) < len(live)
    for l in lists:
        l.close()
    assert made >= 3 or removals > 0.01     # by lists that did not know all
    assert right(api) == live
    all_agree(api, "r", live)


@pytest.mark.parametrize("n", [12, 13, 14, 16, 23, 24])
def test_one_that_was_opened_long_before(api, n):
    """At snapshot 11, which goes on from 10; others have put the snapshots since. 12 goes on from 8."""
    with api.list("r") as l:
        fill(l, EVERY * 11 + 5)
        with Newest(api, "r") as newest:
            fill(l, EVERY * n)
            fill(newest, EVERY * n + 1)
            assert newest.next == EVERY * n + 2 and (n == 16) == (len(newest.steps()) > len(l.steps()))
    right(api)


@pytest.mark.parametrize("why", ["removed", "not there", "highest"])
def test_what_went_away_of_the_rest(api, why):
    """A removal of an entry that the writer has not read: it has to know whether it was visible, and which step."""
    with api.list("r") as l:
        highest = EVERY * 12 - 1                # at 14 all known steps are behind 12, which it goes on from
        fill(l, highest)
        commits(l, [highest + EVERY] if why == "highest" else [highest], highest)
        if why == "not there":
            l.put(api.entry(REMOVE, removes=5))
        fill(l, EVERY * 14 - 2)
    with Newest(api, "r") as l:
        l.put(api.entry(REMOVE, removes=highest if why == "highest" else 5))
        fill(l, EVERY * 14)
        assert len(l.steps()) <= 2 * EVERY
        fill(l, EVERY * 14 + 2)
        assert len(l.steps()) < 14 * EVERY - 20 or why != "highest"
    right(api)


# ---- damage in a chain ----

def three(api):
    """Snapshots 64, 128 and 192; the last goes on from 128."""
    with api.list("r") as l:
        commits(l, range(EVERY * 3 + 10))
        for step in (3, 70):
            l.put(api.entry(REMOVE, removes=l.steps()[step][0]))
        return {s: e for s, (e, *_) in l.steps().items()}


def test_readers_do_without_a_damaged_one(api):
    live = three(api)
    ruin(api, "r", 2 * EVERY)
    all_agree(api, "r", live)
    with Newest(api, "r") as l:     # it has not looked at the chain
        assert l.damaged == 0 and l.latest() == max(live)
        l.know("step", 5)
        assert l.damaged == 1 and l.find(5) == 5
    with pytest.raises(Failed) as e, api.list("r", True) as l:
        commits(l, [9999], 9999)
    assert "damaged" in str(e.value)


def test_a_check_that_had_all_read_anew_is_asked_again(api):
    """What it says rests on entries that nobody has made durable."""
    three(api)
    ruin(api, "r", 2 * EVERY)
    with Newest(api, "r") as l:
        def check(_):
            l.know("step", 5)
            return -errno.ESTALE
        with pytest.raises(Failed) as e:
            l.put(api.entry(ABORT, attempt=b"%016x-0" % 9, reason=b"x"), check)
        assert "damaged" in str(e.value)


def test_no_snapshot_needs_one_that_is_accepted_as_damaged(api):
    live = three(api)
    ruin(api, "r", 2 * EVERY)
    with api.list("r", True) as l:
        accept(l, 2 * EVERY)
        commits(l, range(1000, 1000 + EVERY * 2), 5000)
        live = {s: e for s, (e, *_) in l.steps().items()}
    for n in (4 * EVERY, 5 * EVERY):
        assert 2 * EVERY not in chain(api, "r", n)
    all_agree(api, "r", live)


@pytest.mark.parametrize("late", [False, True])
def test_one_that_its_writer_has_not_read_is_accepted_as_damaged(api, late):
    """Snapshot 14 goes on from 12, and that from 8, which its writer does not look at."""
    with api.list("r") as l:
        fill(l, EVERY * 14)
    ruin(api, "r", 8 * EVERY)
    with Newest(api, "r") as newest:
        fill(newest, EVERY * 14 + 5)
        assert newest.damaged == 0 and entry_of(api, "r", 14 * EVERY).from_ == 12 * EVERY
        with api.list("r", True) as l:
            assert l.damaged == 1
            live = {s: e for s, (e, *_) in l.steps().items()}
            all_agree(api, "r", live)
            accept(l, 8 * EVERY)
        if late:
            fill(newest, EVERY * 15)
        for n in 15, 17:
            with Newest(api, "r") as l:
                fill(newest if n == 15 and late else l, EVERY * n + 2)
            assert chain(api, "r", n * EVERY) == [n * EVERY, *[16 * EVERY] * (n == 17)]
    with api.list("r", True) as l:
        all_agree(api, "r", {s: e for s, (e, *_) in l.steps().items()})


def test_one_that_can_be_read_is_accepted_as_damaged(api):
    """Another reader could not: who begins with the newest steps, or has read that snapshot, does without it, too."""
    live = three(api)
    body = api.entry_path("r", 2 * EVERY).read_bytes()
    with Newest(api, "r") as newest, api.list("r") as full:
        ruin(api, "r", 2 * EVERY)
        with api.list("r", True) as l:
            accept(l, 2 * EVERY)
        api.entry_path("r", 2 * EVERY).write_bytes(body)
        for l in (newest, full):
            l.refresh()
            assert l.lib.commit_list_skips(l.p)
            commits(l, [7000 + l.next], 7000 + l.next)
            live = {s: e for s, (e, *_) in full.steps().items()}
    with api.list("r") as l:
        live = {s: e for s, (e, *_) in l.steps().items()}
    all_agree(api, "r", live)
    assert len(live) == EVERY * 3 + 10


def test_another_snapshot_in_the_place_of_one(api, lib):
    """From a copy of the run that went on by itself: it is sound, and it is not the one that is meant."""
    live = three(api)
    with fresh(lib) as other:
        with other.list("r") as l:
            commits(l, range(500, 500 + EVERY * 3))
        body = other.entry_body("r", 2 * EVERY)
    api.entry_path("r", 2 * EVERY).unlink()
    api.put_body("r", 2 * EVERY, body)
    all_agree(api, "r", live)
    with api.list("r", True) as l:
        assert l.damaged


def test_a_writer_does_not_go_on_from_a_chain_that_does_not_fit(api):
    """Snapshot 384 says another digest of 256 than that has."""
    with api.list("r") as l:
        commits(l, range(EVERY * 6 - 4))
        assert l.next == 6 * EVERY + 2
    forged = entry_of(api, "r", 6 * EVERY)
    forged.from_digest = digest(1)
    for n in (6 * EVERY, 6 * EVERY + 1):
        api.entry_path("r", n).unlink()
    api.put_raw_as_it_is("r", 6 * EVERY, forged)
    with api.list("r", True) as l:
        commits(l, range(1000, 1000 + EVERY), 1000)
        live = {s: e for s, (e, *_) in l.steps().items()}
    assert chain(api, "r", 7 * EVERY) == [7 * EVERY, 4 * EVERY]
    all_agree(api, "r", live)


def test_many_damaged_entries_are_read_twice_each(api):
    """A run that was copied under another name."""
    with api.list("r") as l:
        commits(l, range(EVERY * 16))
    shutil.copytree(api.path / "runs/r", api.path / "runs/copy")
    assert reads(lambda: api.list("copy").close(), "self")[0] <= 2 * EVERY * 16 + 100


# ---- launches ----

def launch(api, l, name):
    known = api.lib.list_launches_know
    assert known(l.p, c.byref(api.err)) == 0
    l.lib.commit_list_launch_used.restype = c.c_bool
    return l.lib.commit_list_launch_used(l.p, name)


def test_launches_of_long_ago(api):
    names = [f"{i + 1:016x}".encode() for i in range(70)]
    for i, name in enumerate(names):
        with Newest(api, "r") as l:
            for k in range(i % 4 * 3):
                commits(l, [i * 100 + k], i * 100 + k)
            l.put(api.entry(LAUNCH, launch=name, newest_step=NONE))
    assert lie(api, "r") == 0
    with Newest(api, "r") as l:
        seen = [k for k in names if launch(api, l, k)]
        with api.list("r", True) as whole:
            assert len(seen) > 40 and whole.next > 5 * EVERY and lie(api, "r") == 0
        assert not launch(api, l, b"f" * 16)
    numbers = [n for n in range(l.lib.commit_list_next(api.list("r").p)) if entry_of(api, "r", n).kind == LAUNCH]
    for nth, n in enumerate(numbers, 1):
        e = entry_of(api, "r", n)
        before = nth & (nth - 1)
        assert (e.nth, e.nids, e.from_) == (nth, nth - 1 - before, numbers[before - 1] if before else NONE)


def test_a_damaged_launch_entry(api):
    with api.list("r") as l:
        for i in range(5):
            l.put(api.entry(LAUNCH, launch=f"{i + 1:016x}".encode(), newest_step=NONE))
        commits(l, range(EVERY * 2))
    ruin(api, "r", 3)       # number 4: the newest goes on from it
    with Newest(api, "r") as l:
        assert not launch(api, l, b"%016x" % 9) and l.damaged == 1
        with pytest.raises(Failed):
            l.put(api.entry(ABORT, attempt=b"%016x-0" % 9, reason=b"x"))


# ---- not this store's kind ----

def test_entries_with_and_without_the_word(api):
    with api.list("r") as l:
        commits(l, range(3))
    entry = api.entry(LAUNCH, launch=b"0" * 16, newest_step=NONE)
    entry.list_2, entry.nth, entry.from_ = True, 1, NONE
    for has in (True, False):
        store = api.p.contents.info
        store.list_2 = not has              # as a store of the other kind sees it
        api.entry_path("r", 3).unlink(missing_ok=True)
        entry.list_2, entry.nth = has, int(has)
        entry.from_ = NONE if has else 0
        api.put_raw_as_it_is("r", 3, entry)
        with api.list("r") as l:
            assert l.damaged == 1 and l.next == 4
        store.list_2 = has
        with api.list("r") as l:
            assert l.damaged == 0
    store.list_2 = True
