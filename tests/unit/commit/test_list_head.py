# SPDX-License-Identifier: Apache-2.0
"""Lists whose first entries were collected (docs/format/list.md, "Collected entries")."""
import ctypes as c
import errno
import hashlib
import itertools
import random
import shutil
import subprocess
import threading

import pytest

from crashlib import verify
from ranklib import PIECE, Launch, Meddler
from storelib import (ABORT, ABORTED, COLLECTED, COMMITTED, EABORTED, LAUNCH, NONE, REMOVE, SNAPSHOT, UNDECIDED, Api,
                      Attempt, Buf, Digest, Failed, fresh, save)
from test_list import accept, ruin
from test_list_snapshots import EVERY, Newest, all_agree, chain, commits, entry_of, lie

RUN = "r"


def aborts(l, until):
    while l.next < until:
        l.put(l.api.entry(ABORT, attempt=b"%016x-0" % l.next, reason=b"x"))


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def numbers(api, run=RUN):
    return sorted(int(p.name) for p in (api.path / "runs" / run).glob("[0-9]*"))


def entries(api, run=RUN):
    """Those that are entries still: a collected one is one of several names of a file."""
    return [n for n in numbers(api, run) if api.entry_path(run, n).stat().st_nlink == 1]


def files(api, run=RUN):
    return len({p.stat().st_ino for p in (api.path / "runs" / run).iterdir()})


def kind_of(api, n, run=RUN):
    e = entry_of(api, run, n)
    kind, number = e.kind, e.number
    api.lib.proto_entry_release(c.byref(e))
    return kind, number


def head_of(api, n, run=RUN):
    """The head that the collected record at n names; None: n is an entry."""
    kind, number = kind_of(api, n, run)
    return number if kind == COLLECTED else None


def live_of(api, run=RUN):
    with api.list(run) as l:
        return {step: entry for step, (entry, *_) in l.steps().items()}


def fake(l, steps, launch=None):
    """Commits and removes steps of which nothing is stored."""
    for step in steps:
        n = l.put(l.api.commit_entry(f"{launch or step + 1:016x}-{step if launch else 0}", step, NONE, step))
        l.put(l.api.entry(REMOVE, removes=n))


def head_most(api, run=RUN):
    with api.list(run, True) as l:
        return (l.next - 1) // EVERY * EVERY - 3 * EVERY


def goes(api, head, run=RUN):
    """What a collection to that head replaces, by the page alone: no snapshot of the head's chain, and no launch that
    the newest before the head goes on from."""
    launches = [n for n in entries(api, run) if n < head and kind_of(api, n, run)[0] == LAUNCH]
    count = len(launches)
    stays = {*chain(api, run, head)} | {launches[(count >> i << i) - 1] for i in range(count.bit_length())}
    return [n for n in entries(api, run) if n < head and n not in stays]


class Mark:
    """The steps of a collection, one by one."""

    def __init__(self, api, head, run=RUN):
        self.api, self.p = api, c.c_void_p()
        with api.list(run, True) as l:
            api.call(api.lib.commit_list_mark_make, l.p, c.c_uint64(head), c.byref(self.p))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.api.lib.commit_list_mark_free(self.p)

    def put(self):
        self.api.call(self.api.lib.commit_list_mark_put, self.p)

    def keeps(self, n):
        return self.api.lib.commit_list_mark_keeps(self.p, c.c_uint64(n))

    def collect(self, n):
        assert self.api.lib.commit_list_mark_collect(self.p, c.c_uint64(n)) == 0


def marks(api, run=RUN, what="head"):
    return sorted(int(p.name.removeprefix(f"{what}.")) for p in (api.path / "runs" / run).glob(f"{what}.*"))


def mark_path(api, head, run=RUN, what="head"):
    return api.path / "runs" / run / f"{what}.{head:012}"


def collect(api, run=RUN, head=None):
    head = head or head_most(api, run)
    with Mark(api, head, run) as k:
        k.put()
        for n in goes(api, head, run):
            k.collect(n)
        k.collect(0)
    return head


def sound(api, live, run=RUN):
    all_agree(api, run, live)
    assert lie(api, run) == 0
    with api.list(run, True) as l:
        assert l.damaged == 0
        return l.lib.commit_list_first(l.p)


def aged(api, saves=(3, 90, 200, 410), n=500):
    """A list of 2 n entries and more, with some steps that are there."""
    kept = []
    for i, step in enumerate(saves):
        with api.list(RUN) as l:
            fake(l, range(10_000 + (saves[i - 1] if i else 0), 10_000 + step))
        kept.append(save(api, RUN, step))
    with api.list(RUN) as l:
        fake(l, range(10_000 + saves[-1], 10_000 + n))
    return kept


def test_the_collector_moves_the_head(api):
    kept = aged(api)
    before, live, head = numbers(api), live_of(api), head_most(api)
    gone = goes(api, head)
    dry, _ = api.gc(dry=True)
    assert entries(api) == before and (dry.entries, dry.deleted) == (len(gone), 0)
    result, reports = api.gc()
    assert result.entries == len(gone) and result.entries_bytes == dry.entries_bytes >= 8192 * len(gone)
    assert numbers(api) == before and entries(api) == sorted(set(before) - set(gone))
    assert marks(api) == marks(api, what="collected") == [head] and {head_of(api, n) for n in gone} == {head}
    assert [(what, name) for what, name, text in reports if "of the list" in text] == [("collect", "runs/r")]
    assert sound(api, live) == head and set(live) == {k.step for k in kept}
    assert api.gc()[0].entries == 0
    with api.list(RUN) as l:    # and it goes on
        fake(l, range(20_000, 20_300))
    assert api.gc()[0].entries > 500
    assert marks(api) == marks(api, what="collected") == [sound(api, live)] == [head_of(api, 0)]


def test_files_grow_with_the_live_steps_and_the_logarithm(api):
    for step in range(15):
        with api.list(RUN) as l:
            fake(l, range(10_000 + 64 * step, 10_000 + 64 * step + 64))
        api.gc()
        # the newest, those that later ones go on from, a mark, and a collected record of each collection
        assert len(entries(api)) <= 4 * EVERY + EVERY + 2 * 14
        assert files(api) <= len(entries(api)) + 2 + step
        with Newest(api, RUN) as l:
            assert l.next == numbers(api)[-1] + 1


@pytest.mark.parametrize("seed", range(4))
def test_any_history_with_collections(api, seed):
    """Several launches, removals in any order, lists that stay open."""
    r, kept, step, names = random.Random(seed), {}, 0, []
    opened = [api.list(RUN), api.list(RUN, True), Newest(api, RUN)]
    for i in range(400):
        l = r.choice(opened)
        roll = r.random()
        if roll < 0.04:
            names.append(f"{2 * 10**6 + i:016x}")
            l.put(api.entry(LAUNCH, launch=names[-1].encode(), newest_step=NONE))
        elif roll < 0.06:
            kept[step] = save(api, RUN, step).entry
        elif roll < 0.08 and kept:
            gone = r.choice(sorted(kept))
            l.put(api.entry(REMOVE, removes=kept.pop(gone)))
        else:
            l.refresh()
            fake(l, range(10**6 + 10 * step, 10**6 + 10 * step + r.choice([1, 1, 5])))
        step += 1
        if r.random() < 0.04:
            api.gc()
            sound(api, kept)
        if r.random() < 0.02:
            at = r.randrange(3)
            opened[at].close()
            opened[at] = [api.list(RUN), api.list(RUN, True), Newest(api, RUN)][at]
    api.gc()
    first = sound(api, kept)
    with api.list(RUN, True) as whole:
        for name in names[:-1]:
            assert whole.attempt(f"{name}-7")[0] == ABORTED
        assert first == 0 or not names or whole.attempt(f"{names[-1]}-7")[0] == UNDECIDED
    for l in opened:
        l.close()


@pytest.mark.parametrize("order", ["as it comes", "any"])
def test_a_collector_that_is_stopped_anywhere(api, order, rng):
    """After each entry that it replaces a reader sees the same steps, and no damage. Only its files are durable before:
    after a loss of power any of the entries may have been replaced."""
    aged(api)
    live, head = live_of(api), head_most(api)
    gone = goes(api, head)
    with Mark(api, head) as k:
        sound(api, live)
        k.put()
        assert sound(api, live) == 0
        if order == "any":
            rng.shuffle(gone)
        for i, n in enumerate(gone):
            assert not k.keeps(n)
            k.collect(n)
            if i < 3 or i % 97 == 0 or n % EVERY == 0:
                assert sound(api, live) == head
        assert k.keeps(head) and k.keeps(chain(api, RUN, head)[-1])
    assert api.gc()[0].entries == 0
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_200))
    assert api.gc()[0].entries > 0
    sound(api, live)


@pytest.mark.parametrize("left", [1, 100, 700])
def test_the_next_collection_finishes_the_work(api, left):
    """Of one that was stopped, and where nothing came since."""
    aged(api)
    live, head = live_of(api), head_most(api)
    gone = goes(api, head)
    with Mark(api, head) as k:
        k.put()
        for n in gone[-left:]:
            k.collect(n)
    assert api.gc()[0].entries == len(gone) - left
    assert entries(api) == [n for n in numbers(api) if n not in gone] and head_of(api, 0) == head
    assert sound(api, live) == head


def test_a_second_collection_of_other_heads_at_once(api):
    """The slow one has a lower head: it goes on when the other is done, and entry 0 then names its head."""
    aged(api)
    live, low = live_of(api), EVERY * 5
    with Mark(api, low) as k:
        k.put()
        k.collect(3)
        assert api.gc()[0].entries
        high, = marks(api)
        for n in range(low):
            if not k.keeps(n):
                k.collect(n)
                if n % 50 == 0:
                    sound(api, live)
    assert high > low == head_of(api, 0) and marks(api) == [high] and sound(api, live) == high
    assert marks(api, what="collected") == [low, high]
    api.gc()
    assert marks(api, what="collected") == [high] and sound(api, live) == high


def test_a_list_that_stands_at_a_collected_number(api):
    """A mount that no one looked at, a trainer that saves once a day: it finds what is there now."""
    for n in (5, 70, 130, 200, 300):
        with api.list(RUN) as l:
            fake(l, range(10_000 + l.next, 10_000 + n // 2))
    opened = [api.list(RUN), api.list(RUN, True), Newest(api, RUN)]
    kept = save(api, RUN, 7)
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_400))
    assert api.gc()[0].entries
    for l in opened:
        assert l.refresh() > 0
        assert l.next == numbers(api)[-1] + 1
        if isinstance(l, Newest):
            l.know("all")
        assert {s: e for s, (e, *_) in l.steps().items()} == {7: kept.entry}
        l.close()


@pytest.mark.parametrize("whole", [False, True])
def test_a_put_at_a_collected_number(api, whole):
    """A writer stands still between its check and its put. Its number was used, and collected: it is asked again."""
    late = api.list(RUN, whole)
    fake(late, range(10_000, 10_010))
    at, asked = late.next, []

    def check(l):
        if not asked:
            with api.list(RUN) as other:
                fake(other, range(20_000, 20_400))
            assert api.gc()[0].entries
        asked.append(l.next)
        return 0
    n = late.put(api.commit_entry(f"{77:016x}-0", 5, NONE, 5), check)
    assert asked[0] == at and n == late.next - 1 == numbers(api)[-1] > 800 and head_of(api, at)
    sound(api, {5: n})
    late.close()


def test_an_attempt_under_way_keeps_what_it_has_not_read(api):
    """Its `begin` says how far it has read."""
    with api.list(RUN) as l:
        fake(l, range(10_000, 10_100))
    a = Attempt(api, RUN, 5)
    a.write(b"x" * 100)
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_400))
        position = 100 * 2 + 3
    api.gc(grace=3600)
    with api.list(RUN, True) as l:
        assert position - EVERY < l.lib.commit_list_first(l.p) <= position
    a.commit()
    a.free()
    assert api.gc()[0].entries
    sound(api, {5: a.entry})


def test_a_writer_that_was_overtaken_commits_nothing(api):
    """What it had not read was collected, so its attempt was decided there: it failed, or its step is gone again. Its
    abort makes that certain, and its manifest, which no entry may explain, goes."""
    with api.list(RUN) as l:
        fake(l, range(10_000, 10_100))
    a = Attempt(api, RUN, 5)
    a.write(b"x" * 100)
    announcement = a.part()
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_400))
    collect(api)
    with pytest.raises(Failed, match="collected entries of the list that it had not read") as e:
        a.commit(announcement)
    assert e.value.code == EABORTED
    a.free()
    sound(api, {})
    with api.list(RUN, True) as l:
        assert l.attempt(a.name)[0] == ABORTED
    api.gc()
    again = save(api, RUN, 5)
    api.gc()
    sound(api, {5: again.entry})


def test_a_manifest_that_comes_after_the_abort_goes(api):
    """A committer stands still before it puts its manifest; it is given up, its folder goes, and entries that say so
    are collected before a collection sees the manifest."""
    a = Attempt(api, RUN, 5)
    a.write(b"x" * 100)
    announcement, m, once = a.part(), Meddler(api), []

    def stand_still(args):
        if not once and b"manifests/" in c.string_at(args[1]):
            once.append(1)
            shutil.rmtree(a.folder())
            for beat in (api.path / "hosts").iterdir():
                beat.unlink()
            other = Api(api.lib, api.path, init=False)
            with other.list(RUN) as l:
                l.put(api.entry(ABORT, attempt=a.name.encode(), reason=b"given up"))
                fake(l, range(20_000, 20_400))
            once.append(other.gc(grace=3600)[0].entries)
            other.close()
    m.answer["put"] = stand_still
    try:
        with pytest.raises(Failed, match="given up|had not read"):
            a.commit(announcement)
    finally:
        m.end()
    a.free()
    assert once[1] and not list((api.path / "runs/r/manifests").iterdir())
    api.gc()
    sound(api, {})


def finished(attempts):
    """Each rank writes and announces; the entry that all of them report."""
    for a in attempts:
        a.write(random.randbytes(PIECE))
        a.announce()
    entries = {a.wait() for a in attempts}
    for a in attempts:
        a.free()
    assert len(entries) == 1
    return entries.pop()


@pytest.mark.parametrize("world", [1, 3])
def test_a_save_that_begins_after_a_collection(api, world):
    """Its saver has stood at a collected number since its last save; nothing of that matters to the next one."""
    ranks = [Launch(api, RUN, "job", rank, world) for rank in range(world)]

    def saved():
        return finished([l.begin() for l in ranks])
    saved()
    for i in range(2):
        with api.list(RUN) as l:
            fake(l, range(20_000 + 1000 * i, 20_400 + 1000 * i))
        api.gc(grace=3600)
        assert head_of(api, 5) or head_of(api, 6)
        saved()
    for l in ranks:
        l.close()
    with api.list(RUN, True) as l:
        assert len(l.steps()) == 3 and l.damaged == 0


def test_a_rank_that_comes_to_an_attempt_that_was_given_up(api):
    """Its launch lives: the abort is not collected, so the attempt does not begin again; unless all ranks have saved
    another step since."""
    ranks = [Launch(api, RUN, "job", rank, 2) for rank in range(2)]
    first = ranks[0].begin(5)
    name = first.name
    assert first.abort("given up")[0] == EABORTED
    first.free()
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_400))
    api.gc(grace=3600)
    with api.list(RUN, True) as l:
        assert l.attempt(name)[0] == ABORTED
    with pytest.raises(Failed, match="given up"):
        ranks[1].begin(5)
    attempts = [l.begin(6) for l in ranks]
    for a in attempts:
        a.write(random.randbytes(PIECE))
        a.announce()
    for a in attempts:
        a.wait()
        a.free()
    with api.list(RUN) as l:
        fake(l, range(30_000, 30_400))
    assert api.gc(grace=3600)[0].entries > 700
    for l in ranks:
        l.close()


def test_launches_of_before_the_head(api):
    ids = [f"{i + 1:016x}" for i in range(11)]
    with api.list(RUN) as l:
        for i, launch in enumerate(ids):
            l.put(api.entry(LAUNCH, launch=launch.encode(), newest_step=NONE))
            fake(l, range(10_000 + 40 * i, 10_040 + 40 * i), int(launch, 16))
    assert api.gc()[0].entries
    with api.list(RUN, True) as l:
        first = l.lib.commit_list_first(l.p)
        for launch in ids[:-1]:
            state, entry = l.attempt(f"{launch}-99")
            assert state == ABORTED and (entry < first or launch >= ids[-5])
        assert l.attempt(f"{ids[-1]}-99")[0] == UNDECIDED
        for launch in ids:
            assert l.lib.commit_list_launch_used(l.p, launch.encode()) or launch >= ids[-5]
        l.put(api.entry(LAUNCH, launch=b"%016x" % 99, newest_step=NONE))
        assert l.attempt(f"{ids[-1]}-99")[0] == ABORTED
    assert lie(api, RUN) == 0
    with Newest(api, RUN) as l:
        l.put(api.entry(LAUNCH, launch=b"%016x" % 98, newest_step=NONE))    # it has to know all of them
    assert lie(api, RUN) == 0


def test_a_manifest_that_is_left_keeps_what_decided_it(api):
    """Else it would look as if the list had lost its end."""
    a = save(api, RUN, 5)
    with api.list(RUN) as l:
        fake(l, range(10_000, 10_100))
    api.remove_step(RUN, 5)
    with api.list(RUN) as l:
        removed = l.next - 1
        fake(l, range(20_000, 20_300))
    result, _ = api.gc(grace=3600)      # it marks the manifest
    assert result.marked and result.entries
    with api.list(RUN, True) as l:
        assert l.lib.commit_list_first(l.p) == removed // EVERY * EVERY
        assert l.attempt(a.name) == (COMMITTED, a.entry)
    assert api.gc(grace=3600)[0].waiting
    result, _ = api.gc()
    assert result.entries and not list((api.path / "runs/r/manifests").iterdir())
    assert api.gc()[0].deleted == 0
    sound(api, {})


def test_packs_of_a_launch_that_lives_go(api):
    """What decided their attempt was collected: they are not kept for as long as the launch lives."""
    a = save(api, RUN, 5)
    b = save(api, RUN, 6, base=a)
    api.remove_step(RUN, 5)
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_300))
    assert api.gc()[0].entries          # a's pack is b's
    with api.list(RUN, True) as l:
        assert l.attempt(a.name)[0] == UNDECIDED
    api.remove_step(RUN, 6)
    alive = Attempt(api, RUN, 9)
    beat = next((api.path / "hosts").iterdir())
    beat.rename(beat.with_name(a.name[:16] + beat.name[16:]))
    api.gc(grace=3600)
    assert {p.name for p in (api.path / "trash").iterdir()} >= {name for name in b.packs}
    alive.free()


def missing(api, n):
    with api.list(RUN, True) as l:
        at, why = c.c_uint64(0), c.c_char_p()
        l.lib.commit_list_damaged_next.restype = c.c_uint64
        return l.damaged and l.lib.commit_list_damaged_next(l.p, c.byref(at), c.byref(why)) == n


@pytest.mark.parametrize("distance", [1, 30, 63, 100])
def test_an_entry_at_or_above_the_head_is_missed(api, distance):
    aged(api)
    api.gc()
    with api.list(RUN, True) as l:
        head = l.lib.commit_list_first(l.p)
    api.entry_path(RUN, head + distance).unlink()
    assert missing(api, head + distance)
    with pytest.raises(Failed) as e:
        api.gc()
    assert e.value.code == -errno.EBADMSG
    with pytest.raises(Failed), api.list(RUN, True) as l:
        commits(l, [9999], 9999)


@pytest.mark.parametrize("n", [100, 4 * EVERY - 2, 5 * EVERY - 2])
def test_an_entry_of_a_list_that_is_whole_is_missed(api, n):
    """Whatever its number is: a loss is not taken for a collection."""
    aged(api)
    for lost in (n, n - 1, n - 2):
        api.entry_path(RUN, lost).unlink()
    assert missing(api, n - 2)
    with pytest.raises(Failed):
        api.gc()
    assert not marks(api)


def test_a_mark_that_is_lost_is_put_again(api):
    aged(api)
    live = live_of(api)
    assert api.gc()[0].entries
    head, = marks(api)
    for what in ("head", "collected"):
        mark_path(api, head, what=what).unlink()
        assert sound(api, live) == head
        api.gc()
        assert marks(api, what=what) == [head]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_collected_records_that_are_damaged_decide_nothing(api, how):
    """They are before the head: a later record leads there. What is wrong with them is for verify."""
    aged(api)
    live = live_of(api)
    api.gc()
    head, = marks(api)
    for n in (0, 1, 5):
        path = api.entry_path(RUN, n)
        path.unlink()
        if how == "damaged":
            path.write_bytes(b"x" * 8192)
    sound_but(api, live, head)
    for n in range(head):       # all of them: the list is damaged up to the head, and begins there
        path = api.entry_path(RUN, n)
        if path.exists() and path.stat().st_nlink > 1:
            path.unlink()
            path.write_bytes(b"x" * 8192)
    with api.list(RUN, True) as l:
        assert l.damaged > head / 2
    all_agree(api, RUN, live)


def sound_but(api, live, head):
    all_agree(api, RUN, live)
    with api.list(RUN, True) as l:
        assert l.damaged == 0 and l.lib.commit_list_first(l.p) == head


def forged(api, n, head, run=RUN, before=None):
    """A record that says it of the entries before `head`."""
    store = api.path / "runs" / run
    e = api.entry(COLLECTED, host=b"")
    api.entry_path(run, n).unlink(missing_ok=True)
    name, e.run, e.number = store / f"{n:012}", run.encode(), head
    e.before = digest_of(before or bytes(32))
    body = Buf()
    assert api.lib.proto_entry_encode(c.byref(e), c.byref(body)) == 0
    api.put_body(run, n, c.string_at(body.data, body.len))
    api.lib.base_buf_release(c.byref(body))
    return name


def digest_of(data):
    return Digest((c.c_uint8 * 32)(*data))


@pytest.mark.parametrize("at, head", [(100, 64), (64, 64), (100, 101), (100, 2**40 * 64), (100, 10**4 * 64)])
def test_a_collected_record_where_none_can_be(api, at, head):
    """Of a head at its own place or before it, of one that is no snapshot's number, of one behind the end."""
    aged(api)
    live = live_of(api)
    forged(api, at, head)
    assert missing(api, at)
    with api.list(RUN, True) as l:
        assert l.damaged == 1 and l.lib.commit_list_first(l.p) == 0
    all_agree(api, RUN, live)
    with pytest.raises(Failed):
        api.gc()


def test_a_collected_record_of_another_snapshot_or_run(api):
    aged(api)
    live = live_of(api)
    for before in (bytes(32), b"x" * 32):
        forged(api, 100, EVERY * 4, before=before)
        with api.list(RUN, True) as l:
            assert l.damaged == 1 and l.lib.commit_list_first(l.p) == 0
        all_agree(api, RUN, live)
    path = api.entry_path(RUN, 100)
    shutil.copy(path, path.with_name("other"))
    with api.list("s") as l:
        fake(l, range(10_000, 10_400))
    collect(api, "s")
    shutil.copy(api.entry_path("s", 5), path)
    assert missing(api, 100)


def test_a_copy_of_the_store_without_hard_links(api, lib, tmp_path):
    """Each name has a file of its own there: it is right, and the next collection joins them."""
    aged(api)
    live = live_of(api)
    api.gc()
    for path in (api.path / "runs" / RUN).iterdir():
        if path.is_file():
            bytes_ = path.read_bytes()
            path.unlink()
            path.write_bytes(bytes_)
    head, = marks(api)
    assert len(entries(api)) == len(numbers(api)) and sound(api, live) == head
    assert api.gc()[0].entries > 600 and files(api) < 400 and sound(api, live) == head


@pytest.mark.parametrize("error, what", [(errno.EOPNOTSUPP, "keep"), (errno.EPERM, "keep"), (errno.EMLINK, "keep"),
                                         (errno.EIO, None)])
def test_a_file_system_without_hard_links(api, error, what):
    aged(api)
    live, before = live_of(api), entries(api)
    m = Meddler(api)
    m.answer["replace_by_name"] = lambda args: -error
    try:
        if what:
            result, reports = api.gc()
            assert result.entries == 0 and [name for said, name, _ in reports if said == what] == ["runs/r"]
        else:
            with pytest.raises(Failed, match="no entry|collected"):
                api.gc()
    finally:
        m.end()
    assert entries(api) == before and sound(api, live) == 0


def test_a_file_that_has_all_the_names_it_can_have(api):
    """Another of the same bytes goes on."""
    aged(api)
    live, m, seen = live_of(api), Meddler(api), []

    def full(args):
        seen.append(args)
        return -errno.EMLINK if len(seen) % 100 == 99 else None
    m.answer["replace_by_name"] = full
    try:
        assert api.gc()[0].entries > 600
    finally:
        m.end()
    head, = marks(api)
    records = {p.stat().st_ino for n, p in ((n, api.entry_path(RUN, n)) for n in range(head)) if head_of(api, n)}
    assert 5 < len(records) < 12 and sound(api, live) == head


def head_chain(api):
    """A collected list, its head, and the snapshots that stand for it."""
    aged(api)
    live = live_of(api)
    assert api.gc()[0].entries
    head, = marks(api)
    found = chain(api, RUN, head)
    assert len(found) > 1 and not {entry for entry in live.values() if entry < head} & set(entries(api))
    return live, head, found


@pytest.mark.parametrize("how", ["missing", "damaged", "another"])
def test_the_mark_stands_in_for_the_chain_of_the_head(api, how):
    """Any snapshot of it. The damage is reported, and keeps writers away until it is accepted."""
    live, head, found = head_chain(api)
    for n in found:
        path = api.entry_path(RUN, n)
        copy = path.read_bytes()
        if how == "another":        # whole, but not the one that the next snapshot names
            other = entry_of(api, RUN, n)
            other.time_ns += 1
            path.unlink()
            api.put_raw_as_it_is(RUN, n, other)
        elif how == "damaged":
            ruin(api, RUN, n)
        else:
            path.unlink()
        with api.list(RUN, True) as l:
            at, why = c.c_uint64(0), c.c_char_p()
            damaged = l.lib.commit_list_damaged_next(l.p, c.byref(at), c.byref(why))
            assert (l.damaged, damaged) == (1, n)
            assert l.lib.commit_list_first(l.p) == head
        all_agree(api, RUN, live)
        with pytest.raises(Failed), api.list(RUN, True) as l:
            commits(l, [9999], 9999)
        with pytest.raises(Failed):
            api.gc()
        path.write_bytes(copy)
        assert sound(api, live) == head


def test_an_entry_that_does_not_follow_the_head_where_the_mark_stands_in(api):
    live, head, found = head_chain(api)
    path = api.entry_path(RUN, head + 1)
    other = entry_of(api, RUN, head + 1)
    other.time_ns += 1
    path.unlink()
    api.put_raw_as_it_is(RUN, head + 1, other, bytes(32))
    ruin(api, RUN, found[-1])
    with api.list(RUN, True) as l:
        assert l.damaged >= 2 and l.lib.commit_list_skipped(l.p, c.c_uint64(head + 1))


def test_a_damaged_chain_is_accepted_and_the_list_goes_on(api):
    """Snapshots after that need none of it, and the next collection leaves a head with a chain."""
    live, head, found = head_chain(api)
    for n in found[::-1]:
        ruin(api, RUN, n)
        with api.list(RUN, True) as l:
            accept(l, n)
            assert l.damaged == 0
        all_agree(api, RUN, live)
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_300))
    with api.list(RUN, True) as l:
        assert l.damaged == 0 and l.lib.commit_list_first(l.p) == head
    assert api.gc()[0].entries
    assert marks(api)[0] > head and sound(api, live) == marks(api)[0]


def test_neither_the_chain_nor_the_mark_can_be_used(api):
    """Then what was collected is damage, and a snapshot behind shows what is visible."""
    live, head, found = head_chain(api)
    ruin(api, RUN, head)
    mark_path(api, head).write_bytes(b"")
    with api.list(RUN, True) as l:
        assert l.lib.commit_list_head(l.p) == 0 and l.damaged > head / 2
        why, at = c.c_char_p(), c.c_uint64(0)
        l.lib.commit_list_damaged_next(l.p, c.byref(at), c.byref(why))
        assert f"entry {head} cannot be read" in why.value.decode()
    all_agree(api, RUN, live)


def test_a_mark_is_not_believed_against_the_chain(api):
    live, head, found = head_chain(api)
    mark_path(api, head).write_bytes(b"")
    assert sound(api, live) == head
    with api.list(RUN, True) as l:
        with pytest.raises(Failed) as e:
            api.call(l.lib.commit_list_mark_check, l.p)
        assert e.value.code == -errno.EBADMSG


def test_a_collector_puts_right_what_has_the_names_of_its_files(api):
    """All that they say is known from the entries."""
    aged(api)
    live, head = live_of(api), head_most(api)
    for what in ("head", "collected"):
        mark_path(api, head, what=what).write_bytes(b"x" * 8192)
    assert api.gc()[0].entries and sound(api, live) == head
    with api.list(RUN, True) as l:
        api.call(l.lib.commit_list_mark_check, l.p)


def test_a_snapshot_that_lies_is_no_head(api):
    aged(api)
    with api.list(RUN) as l:
        n = l.next + EVERY - l.next % EVERY
        while l.next < n:
            l.put(api.entry(ABORT, attempt=b"%016x-0" % l.next, reason=b"x"))
    other = api.entry(SNAPSHOT, list_2=True, newest_launch=NONE, older=NONE)
    api.put_raw_as_it_is(RUN, n, other)     # nothing is visible any more, it says
    with api.list(RUN, True) as l:
        while l.next < n + 4 * EVERY:
            l.put(api.entry(ABORT, attempt=b"%016x-0" % l.next, reason=b"x"))
    before = numbers(api)
    with pytest.raises(Failed, match=f"snapshot {n} of its list says something else.*no entry"):
        api.gc()
    assert numbers(api) == before and not marks(api)


@pytest.mark.parametrize("many", [300, 900])
def test_a_head_beyond_the_end_that_a_reader_found(api, many):
    """It stands still in the middle of reading; meanwhile the list grows, and is collected up to a head behind the end
    that it knows."""
    with api.list(RUN) as l:
        fake(l, range(10_000, 10_000 + many // 2))
    live = {5: save(api, RUN, 5).entry}
    path, m, once = api.entry_path(RUN, many - 70), Meddler(api), []

    def grow(args):
        if not once and c.string_at(args[1]).decode().endswith(path.name):
            once.append(1)
            other = Api(api.lib, api.path, init=False)
            with other.list(RUN) as l:
                fake(l, range(20_000, 20_500))
            once.append(other.gc()[0].entries)
            other.close()
    m.answer["file_open"] = m.answer["read_whole"] = grow
    try:
        with api.list(RUN, True) as l:
            assert l.damaged == 0 and l.next > 1000
            l.refresh()
            assert l.damaged == 0 and {s: e for s, (e, *_) in l.steps().items()} == live
    finally:
        m.end()
    assert once[1] and sound(api, live) == marks(api)[0]


def test_a_reader_beside_collections_finds_no_damage(api, lib):
    """It may have found the head that was, whose chain goes meanwhile."""
    live, stop, wrong = {5: save(api, RUN, 5).entry}, threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                with api.list(RUN, True) as l:
                    if l.damaged or min(l.steps()) != 5:
                        wrong.append(l.damaged)
            except Failed as e:
                wrong.append(e)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(12):
            with api.list(RUN) as l:
                fake(l, range(10_000 + 200 * i, 10_000 + 200 * i + 150))
            api.gc()
    finally:
        stop.set()
        reader.join()
    assert not wrong and sound(api, live)


def test_a_launch_that_later_ones_go_on_from_is_damaged(api):
    with api.list(RUN) as l:
        for i in range(5):
            l.put(api.entry(LAUNCH, launch=b"%016x" % (i + 1), newest_step=NONE))
        fake(l, range(10_000, 10_300))
    assert api.gc()[0].entries and {3, 4} <= set(numbers(api))      # launches 4 and 5
    ruin(api, RUN, 4)
    assert missing(api, 4)
    with Newest(api, RUN) as l, pytest.raises(Failed, match="damaged"):
        l.put(api.entry(LAUNCH, launch=b"%016x" % 99, newest_step=NONE))
    with api.list(RUN, True) as l:
        accept(l, 4)
        l.put(api.entry(LAUNCH, launch=b"%016x" % 99, newest_step=NONE))
        assert l.damaged == 0
    with Newest(api, RUN) as l:
        l.put(api.entry(LAUNCH, launch=b"%016x" % 98, newest_step=NONE))
    with api.list(RUN, True) as l:
        assert l.damaged == 0


def test_an_acceptance_makes_a_list_begin_again_at_its_head(api):
    kept = aged(api)
    api.gc()
    with api.list(RUN, True) as l:
        head = l.lib.commit_list_first(l.p)
        with api.list(RUN) as newest, api.list(RUN, True) as whole:
            copy = api.entry_path(RUN, head + 70).read_bytes()
            ruin(api, RUN, head + 70)
            with api.list(RUN, True) as other:
                accept(other, head + 70)
            api.entry_path(RUN, head + 70).write_bytes(copy)
            for reader in (newest, whole):
                reader.refresh()
                assert reader.damaged == 0 and {k.step for k in kept} <= set(reader.steps())
    sound(api, live_of(api))


def test_a_store_without_the_word_keeps_all(api):
    api.p.contents.info.list_3 = False
    with api.list(RUN) as l:
        fake(l, range(10_000, 10_200))
    assert api.gc()[0].entries == 0 and entries(api) == numbers(api)
    api.p.contents.info.list_3 = True
    assert api.gc()[0].entries and missing_without_the_word(api)


def missing_without_the_word(api):
    api.p.contents.info.list_3 = False
    with api.list(RUN, True) as l:
        damaged = l.damaged
    api.p.contents.info.list_3 = True
    return damaged > 100


def test_an_abort_keeps_no_one(api):
    """Of an attempt of which nothing is left."""
    with api.list(RUN) as l:
        l.put(api.entry(ABORT, attempt=b"%016x-0" % 9, reason=b"x"))
        fake(l, range(10_000, 10_300))
    assert api.gc()[0].entries > 100
    sound(api, {})


def test_bytes_of_a_list_of_which_all_steps_are_there(api, scale):
    """A row of 112 bytes in a chain and one in the mark, each in two copies; and what any list has."""
    n = scale(1500, 10_000)
    with api.list(RUN) as l:
        commits(l, range(n))
    live = live_of(api)
    head = collect(api)
    left = {p.stat().st_ino: p.stat().st_size for p in (api.path / "runs" / RUN).iterdir()}
    assert len(left) <= 4 * EVERY + EVERY + 14 + 2
    assert sum(left.values()) <= (4 * EVERY + EVERY + 14 + 2) * 8192 + n * 112 * 4
    assert sound(api, live) == head


@pytest.mark.parametrize("what", ["whole", "newest", "refresh", "remove", "put", "gc"])
def test_a_collection_at_a_call_of_another(api, lib, what, scale, rng):
    """A reader, a writer, a collector stands still at one of its calls; meanwhile the list grows and is collected, up
    to a head behind all that it knows."""
    with api.list(RUN) as l:
        fake(l, range(10_000, 10_200))
    live = {5: save(api, RUN, 5).entry}
    api.gc()
    old, m, calls, at, collections, names = api.list(RUN), Meddler(api), [0], [None], [], itertools.count(10**9)

    def step(args):
        calls[0] += 1
        if calls[0] == at[0]:
            other = Api(lib, api.path, init=False)
            with other.list(RUN) as l:
                fake(l, range(10**6 + l.next, 10**6 + l.next + 200))
            collections.append(other.gc(grace=3600)[0].entries)
            other.close()
    m.answer.update(dict.fromkeys(("read_whole", "size", "list_dirs", "list", "put", "sync_dir", "remove"), step))

    def act():
        nonlocal live
        if what == "gc":
            try:
                api.gc()
            except Failed as e:
                assert "run vckpt gc again" in e.text
        elif what == "remove":
            api.remove_step(RUN, 5)
            live = {5: save(api, RUN, 5).entry}
        elif what == "put":
            name = f"{next(names):016x}-0"
            n = old.put(api.entry(ABORT, attempt=name.encode(), reason=b"x"))
            at[0] = None
            with api.list(RUN, True) as l:
                assert l.attempt(name) == (ABORTED, n) and n + 1 == l.next
        elif what == "refresh":
            old.refresh()
        else:
            (Newest(api, RUN) if what == "newest" else api.list(RUN, True)).close()
    try:
        act()
        for n in sorted(rng.sample(range(1, calls[0] + 1), min(scale(5, 100), calls[0]))):
            calls[0], at[0] = 0, n
            act()
            at[0] = None
            with api.list(RUN, True) as l:
                assert l.damaged == 0 and {s: e for s, (e, *_) in l.steps().items()} == live
            old.refresh()
            assert old.damaged == 0
    finally:
        m.end()
        old.close()
    assert (collections or what == "put") and (what in ("remove", "gc") or all(collections))


def test_what_is_left_of_an_old_run(build, vckpt, tmp_path, scale):
    """After 600 saves (3,000 with --full), of which none is kept, by the program of docs/benchmarks.md."""
    vckpt("init", tmp_path / "store")
    subprocess.run([build / "tests/bench_aged", tmp_path / "store", RUN, str(scale(600, 3000)), "5"], check=True)
    vckpt("gc", tmp_path / "store")
    left = {p.stat().st_ino: p.stat() for p in (tmp_path / "store/runs" / RUN).iterdir()}
    assert len(left) <= 4 * EVERY + 4 * 14
    assert sum(st.st_size for st in left.values()) <= 1024 * 3000
    assert sum(st.st_blocks for st in left.values()) <= 2 * 3000
    assert "sound" in vckpt("verify", tmp_path / "store", "--paranoid").stdout


def faults(vckpt, api):
    """Those of the list."""
    seen = vckpt.json("verify", api.path, check=False)
    return {d["file"].removeprefix(f"runs/{RUN}/"): d["what"] for d in seen["damage"]
            if d["file"].startswith(f"runs/{RUN}/") and "manifests" not in d["file"]}


def test_what_verify_says_of_a_collected_list(api, vckpt):
    aged(api)
    assert vckpt.json("verify", api.path, check=False)["begins"] == []
    api.gc()
    head, = marks(api)
    assert vckpt.json("verify", api.path, check=False)["begins"] == [{"run": RUN, "entry": head}]
    assert f"run {RUN}: its list begins at entry {head}: " in vckpt("verify", api.path, check=False).stdout
    assert faults(vckpt, api) == {}


@pytest.mark.parametrize("what", ["mark", "no mark", "record", "no record", "number", "no number", "a number's link"])
def test_what_is_wrong_before_the_head_is_reported_and_mended(api, vckpt, what):
    live, head, found = head_chain(api)
    path = {"mark": mark_path(api, head), "record": mark_path(api, head, what="collected")}.get(
        what.removeprefix("no "), api.entry_path(RUN, 5))
    if what == "a number's link":       # of all names at once
        path.write_bytes(b"x" * 8192)
    else:
        path.unlink()
        if not what.startswith("no "):
            path.write_bytes(b"x" * 8192)
    seen = faults(vckpt, api)
    if what == "no record":             # a collection makes it when it needs one
        assert seen == {}
        return
    assert path.name in seen
    if what == "a number's link":
        assert len(seen) > 300
    vckpt("mend", api.path, check=False)
    if what == "a number's link":       # that there is a head is not known any more: what is damaged is accepted
        assert set(faults(vckpt, api)) == {f"collected.{head:012}"} and sound(api, live) == 0
        with api.list(RUN) as l:
            fake(l, range(20_000, 20_200))
        api.gc()
        head, = marks(api)
        vckpt("mend", api.path, check=False)
    assert faults(vckpt, api) == {} and sound(api, live) == head
    assert api.entry_path(RUN, 5).exists() and mark_path(api, head).exists()


@pytest.mark.parametrize("head", [EVERY * 3, 2**40 * EVERY])
def test_a_forged_record_before_the_head_is_reported(api, vckpt, head):
    """No reader comes to it; one that did would not believe it."""
    live, real, found = head_chain(api)
    forged(api, 100, head if head > real else real, before=b"x" * 32)
    assert list(faults(vckpt, api)) == ["000000000100"] and sound(api, live) == real
    vckpt("mend", api.path, check=False)
    assert faults(vckpt, api) == {}


def calls_of_verify(api):
    m = Meddler(api)
    try:
        assert verify(api) == []
    finally:
        m.end()
    return sum(n for name, n in m.count.items() if name not in ("list", "file_close"))


def test_verify_reads_a_collected_record_once(api):
    """Whatever names it has: what verify calls goes by the entries that are left."""
    for n in (300, 900):
        with api.list(RUN) as l:
            fake(l, range(10_000, 10_000 + n))
        api.gc()
        assert len(numbers(api)) > 2 * n > 2 * len(entries(api)) and calls_of_verify(api) < 5 * len(entries(api)) + 60


def test_verify_reads_each_copy_of_a_collected_record(api, vckpt, tmp_path):
    """As `cp -r` leaves them: one of them may be damaged alone."""
    live, head, found = head_chain(api)
    shutil.copytree(api.path, tmp_path / "copy")
    assert (tmp_path / "copy/runs" / RUN / f"{5:012}").stat().st_nlink == 1
    assert "sound" in vckpt("verify", tmp_path / "copy").stdout
    (tmp_path / "copy/runs" / RUN / f"{100:012}").write_bytes(b"x" * 8192)
    seen = vckpt.json("verify", tmp_path / "copy", check=False)["damage"]
    assert [d["file"] for d in seen] == [f"runs/{RUN}/{100:012}"]


@pytest.mark.parametrize("paranoid", [False, True])
@pytest.mark.parametrize("what", ["the mark", "an entry", "a manifest", "another run's", "behind the end"])
def test_a_forged_name_of_a_file_that_has_others(api, vckpt, what, paranoid):
    """Each name of one file is judged by itself."""
    live, head, found = head_chain(api)
    path, of = api.entry_path(RUN, 100), api.entry_path(RUN, 5)
    if what == "another run's":
        with api.list("s") as l:
            aborts(l, 3)
        path = api.entry_path("s", 1)
    elif what == "behind the end":
        path = api.entry_path(RUN, numbers(api)[-1] + 2)
    else:
        of = {"the mark": mark_path(api, head), "an entry": api.entry_path(RUN, head + 5),
              "a manifest": next((api.path / "runs" / RUN / "manifests").iterdir())}[what]
    path.unlink(missing_ok=True)
    path.hardlink_to(of)
    seen = {d["file"] for d in vckpt.json("verify", api.path, *["--paranoid"] * paranoid, check=False)["damage"]}
    assert str(path.relative_to(api.path)) in seen and len(seen) == 1 + (what == "behind the end")


def test_a_head_that_is_farther_than_any_list(api, vckpt):
    """A gap costs what the files cost, and is reported as one."""
    head = 2**40 * EVERY
    with api.list(RUN) as l:
        aborts(l, 3)
    api.put_raw_as_it_is(RUN, head, api.entry(SNAPSHOT, list_2=True, newest_launch=NONE, older=NONE), b"y" * 32)
    api.put_raw_as_it_is(RUN, head + 1, api.entry(ABORT, attempt=b"%016x-0" % 9, reason=b"x"))
    forged(api, 0, head, before=hashlib.sha256(api.entry_body(RUN, head)).digest())
    with api.list(RUN, True) as l:
        assert l.lib.commit_list_head(l.p) == head
    seen = faults(vckpt, api)
    assert "entries" not in seen[f"{3:012}"] and len(seen) < 4200
    assert f"{head - 4099} entries from this one on are missing" in seen[f"{4099:012}"]


def test_many_gaps_before_a_head(api, vckpt):
    """Of all gaps together no more numbers are named than of one: each file could make a gap as long as that."""
    head, step = 2**30 * EVERY, 5001
    with api.list(RUN) as l:
        aborts(l, 3)
    api.put_raw_as_it_is(RUN, head, api.entry(SNAPSHOT, list_2=True, newest_launch=NONE, older=NONE), b"y" * 32)
    api.put_raw_as_it_is(RUN, head + 1, api.entry(ABORT, attempt=b"%016x-0" % 9, reason=b"x"))
    before = hashlib.sha256(api.entry_body(RUN, head)).digest()
    forged(api, 0, head, before=before)
    for n in range(2, 12):
        forged(api, step * n, head, before=before)
    seen = faults(vckpt, api)
    assert len(seen) < 4200
    for n in range(2, 11):
        assert f"{step - 1} entries from this one on are missing" in seen[f"{step * n + 1:012}"]
    assert f"{step * 2 - 3 - 4096} entries from this one on" in seen[f"{3 + 4096:012}"]
