# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped and started twice: another one commits, or all are told who was missing; nothing torn,
nothing revived."""
import errno
import os
import random
import shutil
import signal
import time

import pytest

from ranklib import PIECE, api, Launch, Meddler, Ranks, launch_name     # noqa: F401 (fixtures)
from storelib import ABORTED, COMMITTED, EABORTED, Failed, packs_of

WORLD = 4


def steps(api, run="r"):
    with api.list(run) as l:
        return sorted(l.steps())


def state(api, attempt, run="r"):
    with api.list(run, whole=True) as l:
        return l.attempt(attempt)[0]


def goes_on(api, id_="the next launch"):
    """A new launch saves, and a collection frees what the old one left."""
    with Ranks(api, WORLD, saves, id_, 2) as ranks:
        results = ranks.results()
    assert all(kind == "ok" for _, (kind, _) in results.values()), results
    api.gc()
    with api.list("r") as l:
        assert len(packs_of(api)) == 2 * WORLD * len(l.steps())


def saves(api, rank, id_, count, options={}):
    l = Launch(api, "r", id_, rank, WORLD, **options)
    out = [l.save() for _ in range(count)]
    l.close()
    return out


def one_save(api, rank, silent=(), options={}, again=0):
    """Says `announced`; a silent rank says `begun` and sleeps before it has announced anything."""
    l = Launch(api, "r", "job", rank, WORLD, **options)
    if again < 0:
        api.say("opened")
        api.hear()
    a = l.begin()
    a.write(random.randbytes(PIECE))
    if rank in silent:
        api.say("begun")
        time.sleep(0.5)  # until a signal comes, as a rule
        if not again:
            time.sleep(600)
    a.announce()
    api.say("announced")
    if rank == 0 and again < 0:
        time.sleep(600)
    try:
        out = a.wait()
    except Failed as e:
        out = (e.code, e.text)
    a.free()
    if again > 0:
        api.say("knows")
        api.hear()
    more = [l.save() for _ in range(max(again, 0))]
    l.close()
    return out, more


def all_open(ranks):
    """A rank opens only where it sees the rank 0 of its start."""
    ranks.said(range(WORLD), "opened")
    ranks.tell(range(WORLD), "go on")


def host(api):
    return api.lib.store_hostname().decode()


def test_rank_0_dies_between_its_announcement_and_the_commit(api):
    with Ranks(api, WORLD, one_save, (2,), {}, -1) as ranks:
        all_open(ranks)
        ranks.said((0, 1, 3), "announced")
        ranks.said((2,), "begun")
        ranks.kill(0)       # nobody can have committed
        ranks.processes[2].kill()
    assert steps(api) == []
    goes_on(api)


def test_another_commits_when_rank_0_is_dead(api):
    with Ranks(api, WORLD, one_save, (), {}, -1) as ranks:
        all_open(ranks)
        ranks.said((0,), "announced")
        killed = ranks.kill(0)
        ranks.said((1, 2, 3), "announced")
        results = ranks.results((1, 2, 3))
    assert steps(api) == [0] and len({v for _, (_, v) in [(t, (k, str(v))) for t, (k, v) in results.values()]}) == 1
    late = max(when for when, _ in results.values()) - killed
    print(f"committed {late:.2f} s after the kill")
    assert late < 15    # by its heartbeat it would be 20 s
    goes_on(api)


def test_another_commits_when_rank_0_sleeps(api):
    """Two seconds after its own announcement rank 1 does; rank 0 wakes up and finds it done."""
    with Ranks(api, WORLD, one_save, (3,), {}, 1) as ranks:
        ranks.said((0, 1, 2), "announced")
        stopped = ranks.signal(0, signal.SIGSTOP)
        ranks.said((3,), "begun")
        ranks.said((3,), "announced")
        while not steps(api) and time.monotonic() - stopped < 18:
            time.sleep(0.02)
        took = time.monotonic() - stopped
        ranks.signal(0, signal.SIGCONT)
        ranks.said(range(WORLD), "knows")
        ranks.tell(range(WORLD), "go on")
        results = ranks.results()
    print(f"committed after {took:.2f} s")
    assert 1 < took < 18 and steps(api) == [0, 1]
    assert all(kind == "ok" and isinstance(value[0], int) for _, (kind, value) in results.values()), results


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_killed_rank_is_named_at_once(api, rank):
    with Ranks(api, WORLD, one_save, (rank,)) as ranks:
        others = [r for r in range(WORLD) if r != rank]
        ranks.said(others, "announced")
        ranks.said((rank,), "begun")
        time.sleep(0.3)
        killed = ranks.kill(rank)
        results = ranks.results(others)
    for when, (kind, value) in results.values():
        assert (kind == "ok" and value[0][0] == EABORTED and
                f"rank {rank} on {host(api)}: its process is gone" in value[0][1]), value
        assert when - killed < 15   # by its heartbeat it would be 20 s
    assert steps(api) == [] and state(api, f"{launch_name('job')}-0") == ABORTED
    goes_on(api)


def test_a_rank_that_slept_too_long(api, vckpt):
    """Given up for its heartbeat, its packs removed and collected; it wakes up, announces, is told, and nothing comes
    back."""
    options = {"heartbeat_ms": 1200}
    with Ranks(api, WORLD, one_save, (2,), options, 1) as ranks:
        ranks.said((2,), "begun")
        ranks.signal(2, signal.SIGSTOP)
        ranks.said((0, 1, 3), "announced")
        deadline = time.monotonic() + 60
        while state(api, f"{launch_name('job')}-0") != ABORTED and time.monotonic() < deadline:
            time.sleep(0.05)
        assert state(api, f"{launch_name('job')}-0") == ABORTED
        vckpt("gc", api.path, check=False)
        for pack in [p for p in packs_of(api) if "-0-2-" in p]:
            next(api.path.glob(f"packs/*/{pack}.pack")).unlink()
        assert steps(api) == []
        ranks.said((0, 1, 3), "knows")
        ranks.signal(2, signal.SIGCONT)
        ranks.said((2,), "announced")
        ranks.said((2,), "knows")
        assert steps(api) == []
        ranks.tell(range(WORLD), "go on")
        results = ranks.results()
    for _, (kind, value) in results.values():
        assert (kind == "ok" and value[0][0] == EABORTED and f"rank 2 on {host(api)}: its heartbeat stood still "
                f"for 1.2 s" in value[0][1]), value
    assert len({tuple(value[1]) for _, (_, value) in results.values()}) == 1 and steps(api) == [1]  # the launch goes on
    goes_on(api)


def slow_eyes(api, rank):
    l = Launch(api, "r", "job", rank, 2, heartbeat_ms=400)
    a = l.begin()
    a.write(random.randbytes(PIECE))
    if rank == 1:
        api.say("begun")
        time.sleep(600)
    m = Meddler(api)
    m.answer["list"] = lambda args: time.sleep(0.03)
    a.announce()
    api.say("announced")
    try:
        return a.wait(), 0
    except Failed as e:
        return e.code, e.text
    finally:
        m.end()


def test_a_slow_listing_does_not_hide_a_stopped_rank(api):
    """Looks that are far between for their price must not pass for an observer that slept."""
    with Ranks(api, 2, slow_eyes) as ranks:
        ranks.said((1,), "begun")
        ranks.said((0,), "announced")
        stopped = ranks.signal(1, signal.SIGSTOP)
        when, (kind, value) = ranks.results((0,))[0]
    assert kind == "ok" and value[0] == EABORTED and "rank 1 on" in value[1] and "stood still" in value[1], value
    assert 0.3 < when - stopped < 18
    goes_on(api)


def test_all_die(api, vckpt):
    with Ranks(api, WORLD, one_save, range(WORLD)) as ranks:
        ranks.said(range(WORLD), "begun")
        ranks.end()
    assert steps(api) == []
    names = [a["name"] for a in vckpt.json("gc", api.path, "--dry-run")["actions"]]
    assert any(f"r/{launch_name('job')}-0" in n for n in names) and sum(n.endswith(".pack") for n in names) >= WORLD
    goes_on(api)


def test_two_launches_at_once(api):
    """The older one's ranks are told; the newer one saves all its steps; every step is of one launch."""
    with Ranks(api, WORLD, saves, "one", 200) as one:
        while len(steps(api)) < 3:
            time.sleep(0.02)
        with Ranks(api, WORLD, saves, "two", 5) as two:
            new, old = two.results(), one.results()
    assert all(kind == "ok" for _, (kind, _) in new.values()), new
    assert all(kind == "failed" and value[0] == EABORTED and "newer launch" in value[1]
               for _, (kind, value) in old.values()), old
    with api.list("r") as l:
        mine = [step for step, (_, attempt, _) in sorted(l.steps().items()) if attempt[:16] == launch_name("two")]
        assert mine == [step for step, _ in new[0][1][1]] and len(mine) == 5
    goes_on(api)


def dies_at(api, rank, call):
    """Rank 0 dies at its n-th call of the storage after its announcement."""
    l = Launch(api, "r", "job", rank, WORLD)
    api.say("opened")
    api.hear()
    a = l.begin()
    a.write(random.randbytes(PIECE))
    a.announce()
    if rank == 0:
        m = Meddler(api)
        left = [call]

        def answer(args):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        for name in ("put", "read_whole", "size", "list", "remove", "remove_dir", "sync_dir", "file_open", "file_read"):
            m.answer[name] = answer
        api.say("ready")
    out = a.wait()
    if rank == 0:
        m.end()
    a.free()
    l.close()
    return out


def test_the_committer_dies_at_every_call(api, scale):
    done, died = False, 0
    call = 1
    while not done:
        shutil.rmtree(api.path / "runs", ignore_errors=True)  # an empty run each time
        shutil.rmtree(api.path / "incoming", ignore_errors=True)
        shutil.rmtree(api.path / "packs", ignore_errors=True)
        shutil.rmtree(api.path / "hosts", ignore_errors=True)
        with Ranks(api, WORLD, dies_at, call) as ranks:
            all_open(ranks)
            results = ranks.results(range(1, WORLD))
            ranks.said((0,), "ready")
            ranks.processes[0].join(60)
            done = ranks.processes[0].exitcode == 0
        died += not done
        entries = {value for _, (kind, value) in results.values()}
        assert all(kind == "ok" for _, (kind, _) in results.values()) and len(entries) == 1, (call, results)
        assert steps(api) == [0] and state(api, f"{launch_name('job')}-0") == COMMITTED
        call += scale(9, 1)
    print(f"{died} deaths")
    assert died > 2
    goes_on(api)


def reuses(api, rank, killed):
    """Announces its part of step 0, but for rank 0, and is killed; the next start under its id does the same without
    being killed."""
    try:
        l = Launch(api, "r", "job", rank, WORLD)
    except Failed as e:
        return e.code, e.text
    a = l.begin(step=0)
    a.write(random.randbytes(PIECE))
    if killed and rank == 0:
        api.say("begun")
        time.sleep(600)
    a.announce()
    api.say("announced" if killed else "follows")
    return a.wait()


def test_a_used_id_after_a_crash_takes_over_nothing(api, vckpt):
    """All processes are killed within a save, then the job is started again under its old id: no rank goes on with the
    old save."""
    with Ranks(api, WORLD, reuses, True) as old:
        old.said((0,), "begun")
        old.said(range(1, WORLD), "announced")
        for rank in (*range(1, WORLD), 0):      # who is left must not see that rank 0 is gone
            old.kill(rank)
    left = {p: p.read_bytes() for p in (api.path / "incoming").rglob("*") if p.is_file()}
    assert sum(p.name.startswith("part.") for p in left) == WORLD - 1
    for ranks in (range(WORLD), range(1, WORLD)):       # with a rank 0 that refuses, and without any
        started = time.monotonic()
        with Ranks(api, ranks, reuses, False) as new:
            results = new.results()
        assert all(kind == "ok" and value[0] == -errno.EEXIST and "used before" in value[1]
                   for _, (kind, value) in results.values()), results
        assert max(when for when, _ in results.values()) - started < 15     # not the 60 s for which a rank is awaited
        assert steps(api) == [] and left == {p: p.read_bytes() for p in (api.path / "incoming").rglob("*")
                                             if p.is_file()}
    goes_on(api)
    assert vckpt("verify", api.path, check=False).returncode == 0


def test_killed_at_random(api, scale, rng):
    before = []
    for i in range(scale(3, 25)):
        with Ranks(api, WORLD, saves, f"job {i}", 200) as ranks:
            while len(steps(api)) == len(before):
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.3))
            rank = rng.randrange(WORLD)
            killed = ranks.kill(rank)
            results = ranks.results([r for r in range(WORLD) if r != rank])
        for when, (kind, value) in results.values():
            assert kind == "failed" and value[0] == EABORTED and f"rank {rank} on {host(api)}" in value[1], (
                (rank, value))
            # by its process: by its heartbeat it would be 20 s, by its absence 60
            assert when - killed < 15, when - killed
        now = steps(api)
        assert now[:len(before)] == before and now == list(range(len(now)))
        before = now
    goes_on(api)
