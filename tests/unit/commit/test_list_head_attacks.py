# SPDX-License-Identifier: Apache-2.0
"""Lists with collected entries, as an enemy would have them."""
import ctypes as c
import errno
import os
import random
import shutil
import subprocess
import threading

import pytest

from crashlib import verify
from ranklib import PIECE, Launch, Meddler
from storelib import Attempt, Digest, LAUNCH, NONE, REMOVE, Api, Failed, fresh, save, scratch
from test_list import accept, ruin
from test_list_head import (RUN, aborts, aged, entries, fake, faults, finished, kind_of, live_of, mark_path, marks,
                            sound)
from test_list_snapshots import EVERY, chain, entry_of


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


@pytest.mark.parametrize("removal", ["stays", "is accepted", "comes after"])
def test_a_head_before_an_accepted_entry(api, removal):
    """What went away in a stretch with an accepted entry is not known: that is no lie of the snapshot before it."""
    head = 3 * EVERY
    with api.list(RUN) as l:
        aborts(l, head - 10)
        n = l.put(api.commit_entry(f"{77:016x}-0", 5, NONE, 5))
        aborts(l, head + 5)
        if removal != "comes after":
            removed = l.put(api.entry(REMOVE, removes=n))
        aborts(l, head + 20)
        bad = removed if removal == "is accepted" else l.next - 2
        if removal == "comes after":
            removed = l.put(api.entry(REMOVE, removes=n))
        aborts(l, head + 30)
    ruin(api, RUN, bad)
    with api.list(RUN, True) as l:
        accept(l, bad)
        aborts(l, head + 4 * EVERY - 20)        # so that the head may be there, and no further
        live = live_of(api)
    api.gc()
    sound(api, live)
    with api.list(RUN, True) as l:
        aborts(l, head + 6 * EVERY)
    assert api.gc()[0].entries
    sound(api, live)


def test_launches_of_which_none_may_go(api):
    """A list that no vckpt makes: each launch goes on from the one before, so all entries before the head stay."""
    for n in range(EVERY):
        e = api.entry(LAUNCH, launch=b"%016x" % (n + 1), newest_step=NONE, list_2=True, nth=n + 1,
                      from_=n - 1 if n else NONE)
        api.put_raw_as_it_is(RUN, n, e)
    with api.list(RUN) as l:
        assert l.damaged == 0
        aborts(l, 5 * EVERY - 10)
    assert api.gc()[0].entries == 0
    with api.list(RUN, True) as l:
        assert l.damaged == 0


def test_a_backup_of_hard_links_does_not_keep_entries(api, tmp_path):
    """`cp -al`, rsnapshot: each entry has a second name elsewhere."""
    aged(api)
    live = live_of(api)
    shutil.copytree(api.path, api.path.with_name(api.path.name + "-links"), copy_function=os.link)
    try:
        assert api.gc()[0].entries > 600
        sound(api, live)
    finally:
        shutil.rmtree(api.path.with_name(api.path.name + "-links"))


def test_a_file_that_has_a_number_but_no_entry_s_name(api):
    """A digit too many: it is no entry, and collections do not take it for one time and again."""
    aged(api)
    stray = api.path / "runs" / RUN / f"{5:013d}"
    stray.write_bytes(b"not a list's")
    assert api.gc()[0].entries > 600
    live = live_of(api)
    assert api.gc()[0].entries == 0
    assert stray.read_bytes() == b"not a list's"
    stray.unlink()
    sound(api, live)


class Copied:
    """A collected list with three launches before its head, which goes on from two of them; and copies of the store as
    it was before the collection and after it."""

    def __init__(self, lib, path):
        self.lib, self.dir = lib, path / "one"
        api = Api(lib, path / "after")
        with api.list(RUN) as l:
            for i in range(3):
                aborts(l, 40 * i + 20)
                l.put(api.entry(LAUNCH, launch=b"%016x" % (i + 1), newest_step=NONE))
        aged(api)
        shutil.copytree(api.path, path / "before")
        assert api.gc()[0].entries
        self.live, (self.head,) = live_of(api), marks(api)
        self.launches = [n for n in entries(api) if n < self.head and kind_of(api, n)[0] == LAUNCH]
        self.chain, self.api = chain(api, RUN, self.head), api
        self.good = self.bytes()
        assert len(self.launches) == 2 and len(self.chain) > 2
        api.close()

    def begin(self):
        shutil.rmtree(self.dir, ignore_errors=True)
        subprocess.run(["cp", "-a", self.dir.parent / "after", self.dir], check=True)       # with its hard links
        self.api = Api(self.lib, self.dir, init=False)

    def bytes(self):
        return {p.name: p.read_bytes() for p in (self.api.path / "runs" / RUN).iterdir() if p.is_file()}

    def mended(self, vckpt, copy="after"):
        vckpt("mend", self.dir, "--from", self.dir.with_name(copy), check=False)
        assert faults(vckpt, self.api) == {} and self.bytes() == self.good and sound(self.api, self.live) == self.head


@pytest.fixture(scope="module")
def collected(lib):
    path = scratch()
    yield Copied(lib, path)
    shutil.rmtree(path)


@pytest.fixture
def copied(collected):
    collected.begin()
    yield collected
    collected.api.close()


def wrong(api, n, how):
    """The entry is gone, or something else is there."""
    path = api.entry_path(RUN, n)
    if how == "another":
        other = entry_of(api, RUN, n)
        other.time_ns += 1
        path.unlink()
        api.put_raw_as_it_is(RUN, n, other)
    elif how == "collected":
        path.unlink()
        path.hardlink_to(api.entry_path(RUN, 5))
    else:
        path.unlink()
        how == "damaged" and path.write_bytes(b"x" * 8192)


@pytest.mark.parametrize("how", ["missing", "damaged", "another", "collected"])
@pytest.mark.parametrize("copy", ["before", "after"])
def test_mend_brings_the_chain_of_the_head_from_a_copy(copied, vckpt, copy, how):
    """The record of collected entries has the digest of the head, each snapshot that of the one it goes on from."""
    for n in copied.chain[how == "collected":]:
        wrong(copied.api, n, how)
    copied.mended(vckpt, copy)


def test_mend_brings_the_chain_although_the_mark_is_lost_too(copied, vckpt):
    """No reader knows then what was visible at the head, and all collected records are damage."""
    mark_path(copied.api, copied.head).unlink()
    for n in copied.chain:
        wrong(copied.api, n, "damaged")
    with copied.api.list(RUN, True) as l:
        assert l.damaged > 400
    copied.mended(vckpt)


@pytest.mark.parametrize("how", ["missing", "damaged", "collected"])
@pytest.mark.parametrize("copy", ["before", "after"])
def test_mend_brings_launches_before_the_head_from_a_copy(copied, vckpt, copy, how):
    """Entries of the copy lead from them to the head, or its record of collected entries does."""
    for n in copied.launches:
        wrong(copied.api, n, how)
    copied.mended(vckpt, copy)


@pytest.mark.parametrize("what", ["chain", "launches"])
def test_mend_takes_nothing_of_another_history(copied, vckpt, tmp_path, what):
    """The copy has other entries than those whose digests are known, or that lead there."""
    shutil.copytree(copied.dir.with_name("before"), tmp_path / "copy")
    other = Api(copied.lib, tmp_path / "copy", init=False)
    found = getattr(copied, what)
    for n in found:
        wrong(copied.api, n, "damaged")
        wrong(other, n, "another")
    vckpt("mend", copied.dir, "--from", other.path, check=False)
    for n in found:
        assert copied.api.entry_path(RUN, n).read_bytes() != other.entry_path(RUN, n).read_bytes()
    other.close()
    assert faults(vckpt, copied.api) == {}
    sound(copied.api, copied.live)


def test_mend_takes_no_snapshot_because_a_collected_record_is_after_it(copied, vckpt, tmp_path):
    """A collected record of the copy has the digest of the head, and none of the entries before it."""
    shutil.copytree(copied.dir.with_name("after"), tmp_path / "copy")
    other = Api(copied.lib, tmp_path / "copy", init=False)
    n = copied.chain[1]
    wrong(copied.api, n, "damaged")
    wrong(other, n, "another")
    seen = vckpt.json("mend", copied.dir, "--from", other.path)["lines"]
    assert [line["file"] for line in seen if line["what"] == "accept"] == [f"runs/{RUN}/{n:012}"]
    assert copied.api.entry_path(RUN, n).read_bytes() != other.entry_path(RUN, n).read_bytes()
    other.close()
    assert faults(vckpt, copied.api) == {}
    sound(copied.api, copied.live)


def test_what_mend_says_of_a_chain_that_no_copy_has(copied, vckpt):
    for n in copied.chain[1:]:
        wrong(copied.api, n, "damaged")
    seen = vckpt.json("mend", copied.api.path, check=False)["lines"]
    accepted, = [line for line in seen if line["what"] == "accept"]
    assert "what was visible then: no step is lost" in accepted["text"]
    assert faults(vckpt, copied.api) == {}
    sound(copied.api, copied.live)
    before = copied.bytes()
    vckpt("mend", copied.dir, "--from", copied.dir.with_name("after"), check=False)
    assert copied.bytes() == before     # what is accepted decides nothing any more, whatever a copy has


def test_mend_brings_a_snapshot_that_a_later_one_goes_on_from(api, vckpt, tmp_path):
    """The entry after it is lost in the copy, too, so that only the later snapshot has its digest."""
    with api.list(RUN) as l:
        aborts(l, 3 * EVERY + 5)
    assert chain(api, RUN, 3 * EVERY) == [3 * EVERY, 2 * EVERY]
    good = api.entry_path(RUN, 2 * EVERY).read_bytes()
    shutil.copytree(api.path, tmp_path / "copy")
    ruin(api, RUN, 2 * EVERY)
    for path in (api.path, tmp_path / "copy"):
        (path / f"runs/{RUN}/{2 * EVERY + 1:012}").unlink()
    vckpt("mend", api.path, "--from", tmp_path / "copy", check=False)
    assert api.entry_path(RUN, 2 * EVERY).read_bytes() == good
    with api.list(RUN, True) as l:
        assert l.damaged == 0 and l.lib.commit_list_skipped(l.p, c.c_uint64(2 * EVERY + 1))
        assert not l.lib.commit_list_skipped(l.p, c.c_uint64(2 * EVERY))


def test_an_error_is_no_damage_of_a_head(api):
    """A list is open before entries that two collections took, and the record that names the second head cannot be
    read at that moment: the head that it knows is gone, but that is no damage."""
    aged(api)
    with api.list(RUN) as l:
        for first in (50_000, 60_000):
            with api.list(RUN) as other:
                fake(other, range(first, first + 300))
            assert api.gc()[0].entries
        live, m = live_of(api), Meddler(api)
        first = {f"runs/{RUN}/{n:012}".encode() for n in range(65)}
        m.answer = dict.fromkeys(["read_whole", "file_open"], lambda args: -errno.EIO if c.string_at(args[1]) in first
                                 else None)
        with pytest.raises(Failed) as e:
            l.refresh()
        assert e.value.code == -errno.EIO and l.damaged == 0
        m.end()
        l.refresh()
        assert l.damaged == 0 and {step: n for step, (n, *_) in l.steps().items()} == live


# ---- a collector that stops or fails at each of its calls ----

class AtCall(Meddler):
    """Does something, or answers with an error, at the k-th call of the storage. 0: counts."""

    def __init__(self, api, at, what):
        self.at, self.what, self.calls = at, what, []
        super().__init__(api)

    def called(self, name, inner, args):
        with self.lock:
            if name not in ("file_close", "writer_abandon", "stat"):
                self.calls.append(name)
                if len(self.calls) == self.at:
                    seen = self.what()
                    if seen is not None:
                        return seen
        return super().called(name, inner, args)


class Aged:
    """A store with a head already, and much to collect; copies of it."""

    def __init__(self, lib, path):
        self.lib, self.dir, self.old, self.n = lib, path, path / "old", 0
        api = Api(lib, self.old)
        aged(api, saves=(3, 40, 120, 190), n=200)
        api.gc()
        with api.list(RUN) as l:
            fake(l, range(20_000, 20_300))
        self.live = live_of(api)
        api.close()

    def copy(self):
        self.n += 1
        shutil.copytree(self.old, self.dir / str(self.n), copy_function=os.link)    # no file changes once it is there
        return Api(self.lib, self.dir / str(self.n), init=False)


@pytest.fixture(scope="module")
def old(lib):
    path = scratch()
    yield Aged(lib, path)
    shutil.rmtree(path)


def each_call(old, count, rng, what, after):
    """what(api) is done at calls of a collection: at `count` of those that are the first or the last of a kind, and at
    as many others."""
    calls = None
    wrong = []

    def one(at):
        api = old.copy()
        box = {}
        m = AtCall(api, at, lambda: what(api, box))
        try:
            try:
                api.gc(grace=box.get("grace", 0))
            except Failed as e:
                box["failed"] = e
            finally:
                m.end()
            after(api, box)
        finally:
            api.close()
            shutil.rmtree(api.path)
        return m.calls
    calls = one(0)
    first = {name: i for i, name in reversed([*enumerate(calls, 1)])}
    last = {name: i for i, name in enumerate(calls, 1)}
    all_ = [*range(1, len(calls) + 1)]
    ends = sorted({*first.values(), *last.values()})
    for at in sorted({*rng.sample(ends, min(len(ends), count)), *rng.sample(all_, min(len(all_), count))}):
        try:
            one(at)
        except (AssertionError, Failed) as e:
            wrong.append(f"call {at} of {len(calls)}, {calls[at - 1] if at <= len(calls) else '?'}: "
                         f"{type(e).__name__}: {str(e)[:400]}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


def quiet(api, live):
    sound(api, live)
    assert verify(api) == []
    api.gc()
    sound(api, live)
    assert verify(api) == []
    with api.list(RUN) as l:
        fake(l, range(90_000, 90_200))
    assert api.gc()[0].entries
    first = sound(api, live)
    assert marks(api) == marks(api, what="collected") == [first]
    assert verify(api) == []


def test_others_collect_while_a_collector_stands_still(old, scale, rng):
    def what(api, box):
        other = Api(api.lib, api.path, init=False)
        live = dict(old.live)
        for i in range(rng.randrange(1, 4)):
            with other.list(RUN) as l:
                fake(l, range(30_000 + 1000 * i, 30_000 + 1000 * i + rng.choice([20, 100, 400])))
            live[500 + i] = save(other, RUN, 500 + i).entry
            gone = rng.choice([s for s in live])
            other.remove_step(RUN, gone)
            del live[gone]
            if rng.random() < .8:
                other.gc(grace=rng.choice([0, 3600]))
        box["live"] = live
        other.close()

    def after(api, box):
        if "failed" in box:
            assert "run vckpt gc again" in box["failed"].text or "try again" in box["failed"].text, box["failed"]
        quiet(api, box.get("live", old.live))
    each_call(old, scale(4, 150), rng, what, after)


def test_a_collector_is_refused_at_any_call(old, scale, rng):
    for error in (errno.EIO, errno.ENOSPC, errno.EMLINK, errno.EPERM):
        each_call(old, scale(2, 40), rng, lambda api, box, error=error: -error, lambda api, box: quiet(api, old.live))


def test_a_commit_since_the_first_reading_that_was_collected_is_not_passed_over(api):
    """Rule SINCE: the collector reaches commits since its first reading, removed or not. If another collection has
    taken the entry meanwhile it has to say so."""
    with api.list(RUN) as l:
        aborts(l, 70)
    with api.list(RUN, True) as early:
        a = save(api, RUN, 5)
        api.remove_step(RUN, 5)
        early.refresh()
        with api.list(RUN) as l:
            aborts(l, 400)
        assert api.gc()[0].entries
        found = []
        f = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_void_p)(lambda _, n, d: found.append(n) or 0)
        try:
            api.call(api.lib.commit_list_each_commit, early.p, c.c_uint64(70), f, None)
        except Failed:
            return
        assert found == [a.entry]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("begun", ["before", "inside", "one inside"])
def test_ranks_save_beside_a_collector_that_stands_still(old, scale, rng, world, begun):
    """Their attempt has a folder while the entries pass."""
    def one(at, count=False):
        api = old.copy()
        mine = Api(api.lib, api.path, init=False)
        ranks = [Launch(mine, RUN, "job", rank, world) for rank in range(world)]
        live = dict(old.live)
        step = 700
        attempts = [l.begin(step) for l in (ranks if begun == "before" else ranks[:1] if begun == "one inside" else [])]

        def what():
            attempts.extend(l.begin(step) for l in ranks[len(attempts):])
            with mine.list(RUN) as l:
                fake(l, range(40_000, 40_000 + rng.choice([20, 300])))
            if rng.random() < .7:
                mine.gc(grace=3600)
            if rng.random() < .5:
                live[step] = finished(attempts)
                attempts.clear()
        m = AtCall(api, at, what)
        try:
            try:
                api.gc(grace=3600)
            except Failed as e:
                assert "run vckpt gc again" in e.text or "No such file" in e.text, e
            finally:
                m.end()
            if attempts:
                attempts.extend(l.begin(step) for l in ranks[len(attempts):])
                live[step] = finished(attempts)
            with mine.list(RUN) as l:
                fake(l, range(50_000, 50_400))
            mine.gc(grace=3600)
            live[800] = finished([l.begin(800) for l in ranks])
            sound(mine, live)
            assert verify(mine) == []
        finally:
            for l in ranks:
                l.close()
            mine.close()
            api.close()
            shutil.rmtree(api.path)
        return m.calls
    n = len(one(0))
    for at in sorted(rng.sample(range(1, n + 1), scale(2, 60))):
        one(at)


@pytest.mark.parametrize("collected", [False, True])
def test_a_rank_that_comes_back_to_a_step_that_it_left_out(lib, collected):
    """The others have given it up once; the abort was collected, as all have saved another step since. Then all go back
    to that step. Rank 1, which does not commit, must not wait for ever."""
    path = scratch()
    shutil.rmtree(path)
    api = Api(lib, path)
    world = 16
    ranks = [Launch(api, RUN, "job", rank, world) for rank in range(world)]
    ranks[0].begin(5).abort("given up")
    for l in ranks[2:]:
        with pytest.raises(Failed, match="given up"):
            l.begin(5)
    finished([l.begin(6) for l in ranks])
    with api.list(RUN) as l:
        fake(l, range(20_000, 20_400))
    if collected:
        assert api.gc(grace=3600)[0].entries > 500
    ended, attempts = {}, {}
    for l in ranks:
        try:
            attempts[l.rank] = l.begin(5)
        except Failed as e:
            ended[l.rank] = e
    for a in attempts.values():
        a.write(random.randbytes(PIECE))
        a.announce()

    def wait(rank):
        try:
            ended[rank] = attempts[rank].wait(8000)
        except Failed as e:
            if e.code != -errno.ETIMEDOUT:
                ended[rank] = e
    threads = [threading.Thread(target=wait, args=[rank]) for rank in attempts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    names = {rank: a.name for rank, a in attempts.items()}
    for a in attempts.values():
        a.free()
    for l in ranks:
        l.close()
    api.close()
    shutil.rmtree(path)
    assert 1 in ended, f"rank 1 waits in {names[1]}, the others in {names[0]}; ended: {ended}"


def test_a_manifest_that_a_visible_step_has_stays(api):
    """A committer stands still before its entry; meanwhile that of another one, of this attempt, was lost, and mend
    has committed the manifest anew."""
    a = Attempt(api, RUN, 5)
    a.write(b"x" * 100)
    announcement, m, once = a.part(), Meddler(api), []

    def stand_still(args):
        name = c.string_at(args[1]).decode()
        if not once and name.startswith(f"runs/{RUN}/0"):
            once.append(1)
            manifest, = (api.path / "runs/r/manifests").iterdir()
            other = Api(api.lib, api.path, init=False)
            e = api.commit_entry(f"{99:016x}-0", 5, NONE, 1)
            e.commit.manifest = Digest((c.c_uint8 * 32)(*bytes.fromhex(manifest.name)))
            with other.list(RUN) as l:
                l.put(e)
            other.close()
    m.answer["put"] = stand_still
    try:
        with pytest.raises(Failed):
            a.commit(announcement)
    finally:
        m.end()
    a.free()
    assert once and live_of(api) and list((api.path / "runs/r/manifests").iterdir())


@pytest.mark.parametrize("newer", [False, True])
def test_a_rank_that_is_late_leaves_packs_that_others_use(api, newer):
    """It stands still between its part and the outcome. Its attempt commits, a later step has its pack, its own step is
    removed, and all of that is collected."""
    ranks = [Launch(api, RUN, "job", rank, 2) for rank in range(2)]
    attempts = [l.begin(5) for l in ranks]
    for a in attempts:
        a.write(random.randbytes(PIECE))
        a.announce()
    late = attempts[1]
    late.entry = attempts[0].wait()
    name = late.pack_name("model")
    late.piece_pack = (name, dict(late.own)[name])
    manifest, = (api.path / "runs/r/manifests").iterdir()
    late.manifest = Digest((c.c_uint8 * 32)(*bytes.fromhex(manifest.name)))
    after = save(api, RUN, 6, base=late)
    api.remove_step(RUN, 5)
    manifest.unlink()       # as a collection does after the grace period
    with api.list(RUN) as l:
        if newer:
            l.put(api.entry(LAUNCH, launch=b"%016x" % 99, newest_step=NONE))
        fake(l, range(20_000, 20_400))
    assert api.gc(grace=3600)[0].entries > 500
    with pytest.raises(Failed, match="if its step was committed, it was removed since"):
        late.wait()
    for a in attempts:
        a.free()
    for l in ranks:
        l.close()
    assert verify(api) == []
    sound(api, {6: after.entry})
