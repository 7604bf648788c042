# SPDX-License-Identifier: Apache-2.0
"""An fsync that fails, a write that is short, a full disk for one rank and for all, a store that turns read-only, ranks
that stop for longer than their heartbeat may and wake up after their files are gone, a job that was started twice, a
collector that runs all the while: the right error at every rank, no torn step, no hang."""
import errno
import os
import signal
import subprocess
import threading
import time

import pytest

from crashlib import (DRIVERS, LIMIT_S, START_MS, WORLD, UNDECIDED, Bench, Job, bench_first, goes_on, sound, steps,
                      verify)
from storelib import EABORTED, Failed, packs_of

UNDECIDED_S = START_MS / 1000  # how long a saver goes on asking when nothing can be written
FULL = [os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)]


@pytest.fixture(scope="module", params=DRIVERS)
def bench(lib, build, request):
    b = Bench(lib, build, request.param)
    yield b
    b.close()


def says(text, error):
    """A full disk has a sentence of its own."""
    return error in text or (error in FULL and "is full" in text)


def numbered(calls, *names, path=""):
    return [i for i, (call, where) in enumerate(calls, 1) if call in names and path in where]


def spoiled(bench, path, rank, word, error, who=True, **options):
    """One rank's call fails. All ranks say the same of the step, name the rank, and the step is whole or absent."""
    outcomes, took = bench.job(path, "spoiled", inject={rank: word}, timeout=LIMIT_S + UNDECIDED_S, **options)
    assert took < LIMIT_S + UNDECIDED_S
    api = bench.open(path)
    try:
        now = sound(api, {0: bench_first(bench)})
        assert set(now) <= {0, 1}
        for o in outcomes.values():
            assert not o.killed and (o.saved or o.failed), outcomes
            told = [text for _, text in o.failed]
            assert len(o.saved) + len(told) == 1, outcomes     # close tells no error twice
            if 1 in now:    # whoever had bad luck may not know it; nobody knows better
                assert (o.saved or any(code == UNDECIDED for code, _ in o.failed) or
                        not any("aborted" in t for t in told)), outcomes
            else:
                assert not o.saved, outcomes
                assert any(f"rank {rank}" in t or o.rank == rank and says(t, error) for t in told) or not who, outcomes
        if 1 not in now and who:
            assert any(says(text, error) for o in outcomes.values() for _, text in o.failed), outcomes
    finally:
        api.close()
    goes_on(bench, path, now)
    return 1 in now


FAULTS = [("fsync", errno.EIO), ("pwrite", errno.ENOSPC), ("linkat", errno.EIO), ("mkdirat", errno.ENOSPC),
          ("openat", errno.EDQUOT)]


@pytest.mark.parametrize("rank", [2, 0])
def test_a_call_fails_once(bench, scale, rank, rng):
    """Each by itself, from the heartbeat to the last."""
    calls, seen = bench.calls()[rank], []
    begun = min(numbered(calls, "linkat", path="/begin") + numbered(calls, "linkat", path="-model.pack"))
    all_ = [(n, number) for call, number in FAULTS for n in numbered(calls, call)]
    must = [(n, errno.EIO) for n in numbered(calls, "fsync", path="runs/r")] if rank == 0 else []

    def one(path, case):
        n, number = case
        # what is not the save's own (heartbeat, launch) is told in other words, and the entry may be in all the same
        own = n > begun and not calls[n - 1][1].startswith(("runs/r", "hosts"))
        seen.append(spoiled(bench, path, rank, f"do=fail,errno={number},at={n}", os.strerror(number), who=own,
                            start_ms=4000))
    if scale(rank > 0, False):  # a saver that cannot make sure of the entry asks for START_MS
        all_ = [(n, number) for n, number in all_ if calls[n - 1][1] != "runs/r"]
    cases = sorted(set(must + rng.sample(all_, min(scale(8, len(all_)), len(all_)))))
    bench.each(cases, one)
    print(f"{len(cases)} of {len(all_)}: {sum(seen)} committed all the same")


def test_naming_a_base_fails(bench):
    """Whoever comes first names it; the error is the disk's, not one of what follows from it."""
    path = bench.copy()
    if not any("/base." in where for _, where in sum(bench.calls().values(), [])):
        pytest.skip("this driver names no bases")
    outcomes, _ = bench.job(path, "base", inject={r: f"do=fail,errno={errno.EIO},at=1,calls=linkat,path=/base."
                                                  for r in range(WORLD)}, timeout=LIMIT_S)
    assert all(not o.saved and len(o.failed) == 1 and os.strerror(errno.EIO) in o.failed[0][1]
               for o in outcomes.values()), outcomes
    goes_on(bench, path, {0: bench_first(bench)})


@pytest.mark.parametrize("rank", [0, 3])
def test_short_writes(bench, rank):
    """Every write is done in halves: nobody notices."""
    outcomes, _ = bench.job(bench.copy(), "short", inject={rank: "do=short,at=1,last=1000000,calls=pwrite"})
    assert all(o.saved == [(1, 3)] and not o.failed for o in outcomes.values()), outcomes


def test_no_space_for_one_rank(bench):
    """From its first pack on, for good: it cannot even say so, and is given up for its heartbeat."""
    n = numbered(bench.calls()[2], "pwrite", path="packs")[0]
    for errno_ in (errno.ENOSPC, errno.EIO):
        assert not spoiled(bench, bench.copy(), 2, f"do=fail,errno={errno_},at={n},last=1000000", os.strerror(errno_),
                           heartbeat_ms=2000)


@pytest.fixture
def small(bench):
    """A tmpfs of 3 MiB with a copy of the store."""
    at = bench.dir / "small"
    at.mkdir(exist_ok=True)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", at],
                                           capture_output=True).returncode:
        pytest.skip("needs root and a tmpfs mount")
    path = at / "store"
    subprocess.run(["cp", "-a", bench.base, path], check=True)
    yield path
    subprocess.run(["umount", "-l", at], check=True)


def test_full_disk(bench, small):
    """A real one. The ranks' share does not fit; the error says so; when there is room again it is saved."""
    outcomes, _ = bench.job(small, "too much", bytes=32000, saves=1)
    assert all(o.saved for o in outcomes.values()), outcomes     # so much does fit
    with open(small.parent / "filler", "wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError:
            pass
    outcomes, _ = bench.job(small, "full", bytes=32000, timeout=LIMIT_S)
    assert all(o.failed and not o.saved for o in outcomes.values()), outcomes
    assert any(os.strerror(errno.ENOSPC) in t or "full" in t for o in outcomes.values() for _, t in o.failed), outcomes
    os.unlink(small.parent / "filler")
    api = bench.open(small)
    now = sound(api, {0: bench_first(bench)})
    api.close()
    goes_on(bench, small, now)


def test_read_only(bench, scale, rng):
    """From some call on nothing can be changed any more, by any rank. Nobody waits longer than a saver insists on a
    decision; what is told is so when the store can be written again."""
    calls = bench.calls()
    cases = sorted(rng.sample(range(1, len(calls[0])), scale(4, 25)))
    if scale(True, False):  # those after an announcement take START_MS with a saver
        cases = [n for n in cases if n < len(calls[2]) * 2 // 3]

    def one(path, n):
        words = {r: f"do=fail,errno={errno.EROFS},at={n},last=1000000" for r in range(WORLD)}
        job = Job(bench.build, path, "read-only", driver=bench.driver, inject=words, start_ms=2000, heartbeat_ms=2000)
        try:
            outcomes = job.wait(timeout=UNDECIDED_S + LIMIT_S)
        finally:
            job.close()
        api = bench.open(path)
        now = sound(api, {0: bench_first(bench)})
        api.close()
        for o in outcomes.values():
            assert not o.killed and (o.saved or o.failed) and not (o.saved and 1 not in now), outcomes
            assert not any("aborted" in t and code != UNDECIDED for code, t in o.failed) or 1 not in now, outcomes
            assert all(os.strerror(errno.EROFS) in t or "rank" in t for _, t in o.failed), outcomes
        goes_on(bench, path, now)
    bench.each(cases, one)


def stopped(job, rank, seconds=LIMIT_S):
    """Waits until the rank has stopped itself, or is through."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = job.state(rank)
        if state in "TtXZ":
            return state in "Tt"
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} neither stops nor ends: {state}")


@pytest.mark.parametrize("rank", [2, 0])
def test_a_rank_sleeps_too_long(bench, scale, rank, rng):
    """It stops at a call for longer than its heartbeat may stand still; what it wrote is removed and collected; it
    wakes up."""
    calls = bench.calls()[rank]
    first = numbered(calls, "linkat", path="hosts")[0]
    cases = sorted(rng.sample(range(first + 1, len(calls) + 1), scale(5, len(calls) - first)))
    seen = {"slept": 0, "committed": 0}

    def one(path, n):
        job = Job(bench.build, path, "sleeps", driver=bench.driver, inject={rank: f"do=stop,at={n}"}, start_ms=2500,
                  heartbeat_ms=1500)
        api = bench.open(path)
        try:
            slept = stopped(job, rank)
            others = job.wait([r for r in range(WORLD) if r != rank], timeout=LIMIT_S)
            now = sound(api, {0: bench_first(bench)})
            if slept:
                try:
                    # the heartbeat of a process that lives on this host is that of a writer
                    api.gc(grace=0, heartbeat=1)
                except Failed as e:
                    assert "alive" in str(e) or e.code == -errno.EBUSY, e
                for pack in packs_of(api):           # so what it wrote is taken away by hand
                    if not any(pack.startswith(a + "-") for a in now.values()):
                        next(api.path.glob(f"packs/*/{pack}.pack")).unlink()
                job.signal(rank, signal.SIGCONT)
            outcomes = {**others, **job.wait([rank], timeout=LIMIT_S)}
            assert sound(api, now) == now, (now, outcomes)       # nothing comes back, nothing is torn
            for o in outcomes.values():
                assert ((bool(o.saved) == (1 in now)) or any(code == UNDECIDED for code, _ in o.failed) or
                        o.rank == rank and 1 in now), outcomes
                assert not (o.saved and 1 not in now), outcomes
            if 1 not in now and slept:
                assert all(any(f"rank {rank}" in t for _, t in o.failed) for o in others.values()), outcomes
            seen["slept"] += slept
            seen["committed"] += 1 in now
        finally:
            api.close()
            job.close()
        goes_on(bench, path, now)
    bench.each(cases, one)
    print(seen, len(cases))
    assert seen["slept"]


def test_started_twice(bench, scale):
    """Two launches of one job at once: the newer one's steps are all saved; no step is of both; each rank of the older
    one is told."""
    def one(path, i):
        old = Job(bench.build, path, "one", driver=bench.driver, saves=400)
        try:
            api = bench.open(path)
            end = time.monotonic() + LIMIT_S
            while len(steps(api)) < 3 and time.monotonic() < end:
                time.sleep(0.01)
            new, _ = bench.job(path, "two", saves=4, step=1000)
            first = old.wait(timeout=LIMIT_S)
            now = sound(api, {0: bench_first(bench)})
            api.close()
        finally:
            old.close()
        assert all(len(o.saved) == 4 and not o.failed for o in new.values()), new
        for o in first.values():
            assert o.failed and all(code == EABORTED and "newer launch" in text for code, text in o.failed[:1]), first
            assert all(step in now for step, _ in o.saved), (first, now)
        mine = {step for step, _ in new[0].saved}
        assert len({now[s].split("-")[0] for s in mine}) == 1 and not mine & {s for s, _ in first[0].saved}
        goes_on(bench, path, now)
    bench.each(range(scale(1, 20)), one)


def test_a_collector_runs_all_the_while(bench, scale):
    """Every step is whole, no save fails for it, and in the end nothing is left over."""
    path, stop, errors, runs = bench.copy(), threading.Event(), [], []

    def collect():
        api, n = bench.open(path), 0
        while not stop.is_set():
            n += 1
            try:
                api.gc(grace=n % 2, heartbeat=1)
            except Failed as e:
                if e.code != -errno.EBUSY:
                    errors.append(e)
        api.close()
        runs.append(n)
    collectors = [threading.Thread(target=collect) for _ in range(2)]
    [t.start() for t in collectors]
    try:
        for i in range(scale(2, 6)):
            outcomes, _ = bench.job(path, f"launch {i}", saves=scale(5, 20))
            assert all(not o.failed and len(o.saved) == scale(5, 20) for o in outcomes.values()), outcomes
            job = Job(bench.build, path, f"killed {i}", driver=bench.driver, saves=50)
            time.sleep(0.15)
            job.kill()
            job.close()
    finally:
        stop.set()
        [t.join() for t in collectors]
    print("collections", runs)
    assert not errors, errors
    api = bench.open(path)
    now = steps(api)
    assert verify(api) == []
    api.close()
    goes_on(bench, path, now)
