# SPDX-License-Identifier: Apache-2.0
"""A job's ranks: launches, begin, announcements, who commits, who gives up, and what every rank is told."""
import ctypes as c
import errno
import os
import re
import threading
import time

import pytest

from ranklib import ETIMEDOUT, PIECE, api, Launch, Meddler, Ranks, incoming, launch_name
from storelib import (ABORTED, ALIVE, COMMITTED, DEAD, EABORTED, NONE, UNDECIDED, Attempt, Failed, packs_of, put_heartbeat, save)


def visible(api, run="r"):
    with api.list(run) as l:
        return l.steps()


def failure(code, function, *args, **named):
    with pytest.raises(Failed) as e:
        function(*args, **named)
    assert e.value.code == code, e.value
    return e.value.text


def together(*functions):
    """Calls in threads; their results or errors, in order."""
    out = [None] * len(functions)

    def run(i, f):
        try:
            out[i] = f()
        except Failed as e:
            out[i] = e
    threads = [threading.Thread(target=run, args=(i, f)) for i, f in enumerate(functions)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def job(api, world, id_="job", run="r", **options):
    """All ranks of a job in this process."""
    launches = together(*[lambda r=r: Launch(api, run, id_, r, world, **options) for r in range(world)])
    assert all(isinstance(l, Launch) for l in launches), launches
    return launches


def close(launches, *attempts):
    for a in attempts:
        a.free()
    for l in launches:
        l.close()


def begin_all(launches, **how):
    attempts = [l.begin(**how) for l in launches]
    for a in attempts:
        a.write(os.urandom(PIECE))
    return attempts


# ---- launches ----

def test_options(api):
    assert "launch id" in failure(-errno.EINVAL, Launch, api, "r", None, 0, 2) and "launch id" in failure(-errno.EINVAL, Launch, api, "r", "", 1, 2)
    for rank, world in ((0, 0), (1, 1), (7, 3)):
        assert f"rank {rank}" in failure(-errno.EINVAL, Launch, api, "r", "x", rank, world)
    failure(-errno.EINVAL, Launch, api, "a/b", "x", 0, 1)
    failure(-errno.EINVAL, Launch, api, "r", "x", 0, 1, heartbeat_ms=10)
    assert not list((api.path / "hosts").glob("*"))


def test_names(api):
    l = Launch(api, "r", "some id", 0, 1)
    assert l.name == launch_name("some id") and re.fullmatch(r"[0-9a-f]{16}", l.name)
    assert [p.name for p in (api.path / "hosts").iterdir()] == [f"{l.name}.{api.lib.store_hostname().decode()}.r0.0"]
    assert [x[:4] for x in api.launches()] == [(l.name, api.lib.store_hostname().decode() + ".r0", "r", ALIVE)]
    with api.list("r", whole=True) as known:
        assert known.next == 1
    a, b = l.begin(), l.begin()
    assert (a.name, a.step, b.name, b.step) == (f"{l.name}-0", 0, f"{l.name}-1", 1)
    close([l], a, b)
    assert not list((api.path / "hosts").glob("*"))
    anonymous = [Launch(api, "r", None, 0, 1) for _ in range(2)]
    assert len({x.name for x in anonymous}) == 2
    close(anonymous)


def test_a_used_id_is_refused(api):
    close(job(api, 2))
    assert "used before" in failure(-errno.EEXIST, Launch, api, "r", "job", 0, 2)
    with api.list("r") as l:  # far behind the newest snapshot
        for i in range(200):
            l.put(api.entry(1, launch=f"{i:016x}".encode(), newest_step=NONE))
    assert "used before" in failure(-errno.EEXIST, Launch, api, "r", "job", 0, 2)
    close(job(api, 2, run="other"))  # of another run: new there


def test_rank_0_is_awaited(api):
    text = failure(ETIMEDOUT, Launch, api, "r", "job", 1, 2, start_ms=300)
    assert "rank 0" in text and launch_name("job") in text
    late = together(lambda: Launch(api, "r", "job", 1, 2), lambda: (time.sleep(0.3), Launch(api, "r", "job", 0, 2))[1])
    close(late)


def test_a_rank_that_opens_late_finds_its_launch(api):
    """Also when a snapshot, or several, stand after the launch entry."""
    for behind in (70, 300):
        first = Launch(api, "r", f"job {behind}", 0, 2)
        with api.list("r") as l:
            for i in range(behind):
                l.put(api.entry(3, attempt=f"{i:016x}-{behind}".encode(), reason=b"x"))
        second = Launch(api, "r", f"job {behind}", 1, 2, start_ms=300)
        a = begin_all([first, second])
        for x in a:
            x.announce()
        assert len({x.step for x in a}) == 1 and a[0].wait() == a[1].wait()
        close([first, second], *a)


# ---- saves ----

def test_one_rank(api):
    l = Launch(api, "r", "x", 0, 1)
    assert [l.save()[0] for _ in range(3)] == [0, 1, 2] and sorted(visible(api)) == [0, 1, 2]
    assert not list((api.path / "incoming").rglob("begin"))
    close([l])


def test_steps_count_on_alike(api):
    """From what the launch entry saw: an import between two begins changes nothing."""
    save(api, "r", step=10)
    ls = job(api, 2)
    a = ls[0].begin()
    save(api, "r", step=40)
    b = ls[1].begin()
    assert a.step == b.step == 11
    more = [l.begin(step=30) for l in ls] + [l.begin() for l in ls] + [l.begin(step=20) for l in ls] + [l.begin() for l in ls]
    assert [x.step for x in more] == [30, 30, 31, 31, 20, 20, 32, 32]
    close(ls, a, b, *more)


def test_steps_count_on_alike_after_different_numbers(api):
    """A step that was named and came to nothing does not count; a number that was given out does."""
    ls = job(api, 2)
    assert [x[0] for x in together(*[lambda l=l: l.save(7) for l in ls])] == [7, 7]
    a = ls[0].begin(step=20)
    failure(-errno.EINVAL, ls[1].begin, step=30)
    b = [l.begin() for l in ls]
    assert [x.step for x in b] == [8, 8]
    b[1].abort("and this one, too")
    c = ls[0].begin(step=40)
    failure(-errno.EINVAL, ls[1].begin, step=1 << 63)
    assert [x[0] for x in together(*[l.save for l in ls])] == [9, 9]
    d = ls[1].begin(step=30)
    e = ls[0].begin()
    assert e.step == 30, "the first to come says which"
    f = ls[0].begin()
    e.abort("nothing of it is wanted")
    g = ls[1].begin()
    assert f.step == g.step == 31
    close(ls, a, *b, c, d, e, f, g)


def test_an_import_keeps_its_hands_off(api):
    ls = job(api, 2)
    failure(-errno.EBUSY, Attempt, api, "r")
    alone = Attempt(api, "r", step=7)
    alone.write(b"x" * 100)
    assert [r[0] for r in together(*[lambda l=l: l.save() for l in ls])] == [0, 0]
    alone.commit()
    alone.free()
    assert sorted(visible(api)) == [0, 7]
    close(ls)


def test_several_under_way(api):
    ls = job(api, 3)
    first, second = begin_all(ls), begin_all(ls)
    for a in second:
        a.announce()
    waiting = [threading.Thread(target=a.wait) for a in second]
    for t in waiting:
        t.start()
    for t in waiting:
        t.join()
    assert sorted(visible(api)) == [1]
    for a in first[:2]:
        a.announce()
    assert "undecided" in failure(ETIMEDOUT, first[1].wait, 50)
    assert "not announced: rank 2" in failure(ETIMEDOUT, first[0].wait, 50)
    first[2].announce()
    assert together(*[a.wait for a in first]) == [visible(api)[0][0]] * 3
    close(ls, *first, *second)


def test_a_step_that_exists(api):
    old = save(api, "r", step=3)
    ls = job(api, 2)
    answers = together(*[lambda l=l: l.save(3) for l in ls])
    assert {x.code for x in answers} <= {-errno.EEXIST, EABORTED} and all("has a step 3 already" in x.text for x in answers), answers
    assert visible(api)[3][0] == old.entry
    (step, entry), other = together(*[lambda l=l: l.save(3, replace=True) for l in ls])
    assert (step, entry) == other == (3, visible(api)[3][0]) and entry != old.entry
    close(ls)


def test_replaced_by_another_meanwhile(api):
    """What the first to come saw is what is replaced; whoever came between keeps it."""
    save(api, "r", step=3)
    ls = job(api, 2)
    a = ls[0].begin(step=3, replace=True)
    between = save(api, "r", step=3, replace=True)
    attempts = [a, ls[1].begin(step=3, replace=True)]
    for x in attempts:
        x.write(os.urandom(PIECE))
        x.announce()
    answers = together(*[x.wait for x in attempts])
    assert {x.code for x in answers} == {-errno.EEXIST, EABORTED} and all("step 3 already" in x.text for x in answers)
    assert visible(api)[3][0] == between.entry
    close(ls, *attempts)


@pytest.mark.parametrize("one,two,words", [
    ({"step": 5}, {"step": 6}, ("saves step 6", "rank 0 on", "step 5")),
    ({"mesh": 1}, {"mesh": 2}, ("mesh is not that of rank 0 on",)),
    ({"replace": True}, {}, ("does not replace", "rank 0 on", "would")),
])
def test_who_said_what(api, one, two, words):
    ls = job(api, 2)
    a = ls[0].begin(**one)
    a.write(os.urandom(PIECE))
    a.announce()
    text = failure(-errno.EINVAL, ls[1].begin, **two)
    host = api.lib.store_hostname().decode()
    assert text in failure(EABORTED, a.wait) or all(w in text for w in words)
    for said in (text, failure(EABORTED, a.wait)):
        assert f"rank 1 on {host}: " in said and all(w in said for w in words), said
    assert not packs_of(api) and visible(api) == {}
    close(ls, a)


def test_another_world(api):
    ls = job(api, 2)
    stranger = Launch(api, "r", "job", 2, 3)
    a = ls[0].begin()
    text = failure(-errno.EINVAL, stranger.begin)
    assert "world of 3" in text and "of 2" in text and "rank 2" in text
    a.free()
    close([*ls, stranger])


def test_a_rank_that_fails(api):
    ls = job(api, 4)
    attempts = begin_all(ls)
    for a in attempts[:3]:
        a.announce()
    started = time.monotonic()
    answers = together(*[a.wait for a in attempts[:3]], lambda: (time.sleep(0.2), attempts[3].abort("the GPU fell off the bus")))
    assert time.monotonic() - started < 5   # not a heartbeat of 20 s
    for e in answers[:3]:
        assert e.code == EABORTED and f"rank 3 on {api.lib.store_hostname().decode()}: the GPU fell off the bus" in e.text
    with api.list("r", whole=True) as l:
        assert l.attempt(attempts[0].name)[0] == ABORTED
    assert not packs_of(api)
    close(ls, *attempts)
    again = job(api, 4, "again")
    assert [x[0] for x in together(*[lambda l=l: l.save() for l in again])] == [0] * 4
    close(again)


def test_freed_without_an_announcement(api):
    ls = job(api, 2)
    a, b = begin_all(ls)
    a.announce()
    b.free()
    assert "rank 1" in failure(EABORTED, a.wait)
    a.free()
    close(ls)


def test_ranks_that_overlap(api):
    ls = job(api, 2)
    attempts = begin_all(ls)
    for a in attempts:
        a.announce(first=0)
    answers = together(*[a.wait for a in attempts])
    assert all('tensor "w"' in e.text and "rank" in e.text for e in answers) and visible(api) == {}
    close(ls, *attempts)


def test_bases_of_several_ranks(api):
    one, two = save(api, "old"), save(api, "old")
    ls = job(api, 3)
    attempts = [l.begin() for l in ls]
    for i, a in enumerate(attempts):
        for base in [(one, two), (two, one), (one, two)][i]:
            a.base("old", base.entry, base.manifest)
    assert sorted(p.name for p in attempts[0].folder().iterdir()) == ["base.0", "base.1", "begin"]
    api.remove_step("old", 1)
    late = ls[0].begin()
    failure(-errno.ESTALE, late.base, "old", two.entry, two.manifest)
    result, _ = api.gc(grace=3600, dry=True)
    assert result.aborted == 0
    close(ls, *attempts, late)


def test_a_newer_launch_ends_the_older(api):
    old = job(api, 2, "old")
    a = begin_all(old)
    a[0].announce()
    new = job(api, 2, "new")
    assert "newer launch" in failure(EABORTED, a[0].wait)
    a[1].announce()
    assert "newer launch" in failure(EABORTED, a[1].wait)
    assert "newer launch" in failure(EABORTED, old[0].begin)
    assert [x[0] for x in together(*[lambda l=l: l.save() for l in new])] == [0, 0]
    assert {v[1][:16] for v in visible(api).values()} == {new[0].name}
    close(old + new, *a)


# ---- those that do not come ----

def test_a_rank_that_never_comes(api):
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, start_ms=600) for r in range(2)])
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    started = time.monotonic()
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and "rank 2: it did not come within 0.6 s" in e.text
    assert 0.4 < time.monotonic() - started < 10
    close(ls, *attempts)


def test_a_heartbeat_elsewhere_that_stops(api):
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, heartbeat_ms=800) for r in range(2)])
    put_heartbeat(api, ls[0].name, "r", 5, "elsewhere.r2")
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and "rank 2 on elsewhere: its heartbeat stood still for 0.8 s" in e.text
    close(ls, *attempts)
    (api.path / "hosts" / f"{ls[0].name}.elsewhere.r2.5").unlink()


def test_what_is_under_way_is_listed(api):
    ls = job(api, 3)
    a = begin_all(ls)
    a[1].announce()
    begun, world, announced, missing, since, state = incoming(api)[a[0].name]
    assert (begun, world, announced, missing, state) == (True, 3, [1], [0, 2], ALIVE) and abs(since / 1e9 - time.time()) < 60
    alone = Attempt(api, "other", step=1)
    assert incoming(api)[alone.name] == (True, 1, [], [0], 0, ALIVE)
    alone.free()
    close(ls, *a)


# ---- a child ----

def test_a_child_is_refused(api):
    l = Launch(api, "r", "x", 0, 1)
    a = l.begin()
    a.write(os.urandom(PIECE))
    before = {p for p in api.path.rglob("*") if p.is_file()}
    pid = os.fork()
    if pid == 0:
        try:
            ok = "process" in failure(-errno.EPERM, l.begin) and failure(-errno.EPERM, a.base, "r", 0, a.piece.digest)
            failure(-errno.EPERM, a.announce)
            a.abort("child")
            a.free()
            l.close()
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    after = {p for p in api.path.rglob("*") if p.is_file()}
    assert before <= after
    for p in after - before:
        assert p.name.endswith("meta.pack"), p  # the announcement's pack, made before the refusal
        p.unlink()
    a.announce()
    a.wait()
    close([l], a)


# ---- storage that fails, storage calls counted ----

@pytest.mark.parametrize("alone", [True, False])
def test_eio_of_the_lists_directory_is_undecided(api, alone):
    """Never `failed`: what stands in the list may be lost, or may be what happened. And nothing is deleted."""
    other = Launch(api, "r", "x", 0, 1)
    a = Attempt(api, "r", step=1) if alone else other.begin(step=1)
    a.write(os.urandom(PIECE))
    announcement = a.part()
    if not alone:
        api.call(api.lib.store_attempt_announce, a.p, c.byref(announcement))
    with api.list("r") as l:
        l.put(api.entry(3, attempt=b"0123456789abcdef-0", reason=b"x"))  # something new to make durable
    times = []
    m = Meddler(api)
    m.answer["sync_dir"] = lambda args: -errno.EIO if c.string_at(args[1]) == b"runs/r" and not times.append(1) and len(times) == 1 else None
    with pytest.raises(Failed) as e:
        a.commit(announcement) if alone else a.wait()
    assert e.value.code == -errno.EIO and "undecided" in e.value.text and times
    a.abort("gives up")
    assert len(packs_of(api)) == 2
    m.end()
    with api.list("r", whole=True) as l:
        assert l.attempt(a.name)[0] == UNDECIDED
    a.free()
    other.close()


def test_an_announcement_that_lands_and_fails(api):
    """Nobody is told `failed` for a save that is then committed: the list decides first."""
    ls = job(api, 2)
    a, b = begin_all(ls)
    a.announce()
    announcement, m = b.part(), Meddler(api)

    def land_and_fail(args):
        if c.string_at(args[1]).endswith(b"/part.1"):
            m.old.contents.put(args[0], c.string_at(args[1]), c.string_at(args[2], args[3]), args[3])
            return -errno.EIO
    m.answer["put"] = land_and_fail
    with pytest.raises(Failed) as e:
        api.call(api.lib.store_attempt_announce, b.p, c.byref(announcement))
    m.end()
    assert e.value.code == -errno.EIO and "rank 1" in e.value.text and "undecided" not in e.value.text
    for x in (a, b):
        assert "rank 1" in failure(EABORTED, x.wait)
    assert visible(api) == {} and not packs_of(api)
    close(ls, a, b)


@pytest.mark.parametrize("world", [8, 64])
def test_requests_do_not_grow_with_the_square(api, world):
    ls = job(api, world)
    m = Meddler(api)
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    prepared = sum(m.count.values())
    m.count.clear()
    started = time.monotonic()
    assert len(set(together(*[a.wait for a in attempts]))) == 1
    took = time.monotonic() - started
    m.end()
    waited = {k: v / world for k, v in m.count.items() if v}
    print(f"\n{world} ranks: {prepared / world:.1f} calls a rank before the wait, {sum(waited.values()):.1f} in it ({took:.2f} s): {waited}")
    assert prepared / world < 45
    assert sum(waited.values()) < 30 + 12 * took  # a poll is 100 ms in the end
    close(ls, *attempts)


# ---- the order of processes ----

def saves(api, rank, world, steps):
    l = Launch(api, "r", "job", rank, world)
    out = [l.save() for _ in range(steps)]
    l.close()
    return out


def test_four_processes_save_ten_steps(api):
    ranks = Ranks(api, 4, saves, 4, 10)
    results = ranks.results()
    ranks.end()
    with api.list("r") as l:
        want = [(s, e[0]) for s, e in sorted(l.steps().items())]
    assert len(want) == 10 and all(result == ("ok", want) for _, result in results.values())
    assert not list((api.path / "hosts").glob("*")) and not list((api.path / "incoming").rglob("part.*"))
    result, _ = api.gc()
    assert result.deleted == 0 and len(packs_of(api)) == 10 * 4 * 2


