# SPDX-License-Identifier: Apache-2.0
"""A storage that fails for a moment: each call of a save, also those that only look, fails once, three times, or for 5
s with all that follow, on one rank and on two. No rank hangs, none is told what is not so, and the next save of the
same job works. And one that fails one rank for long: the others do not wait for it."""
import errno
import shutil

import pytest

from crashlib import DRIVERS, UNDECIDED, Bench, bench_first, goes_on, sound

COUNTED = "reads=1,since=open"
FULL = (errno.ENOSPC, errno.EDQUOT)     # are no answer to a look
FAULT_MS = 5000
START_MS = 8000     # longer than the fault: what fails is waited out
BEAT_MS = 2000      # of heartbeats, at which an abort is tried again: a quarter of the time-out
LIMIT_S = 240       # ends a hang: what is waited for is shorter by far


@pytest.fixture(scope="module", params=DRIVERS)
def bench(lib, build, request):
    b = Bench(lib, build, request.param)
    yield b
    b.close()


def counted(error):
    return "since=open" if error in FULL else COUNTED


def case_words(n, how, error):
    fail = f"{counted(error)},do=fail,errno={error},at={n}"
    return {"once": fail, "three times": f"{fail},last={n + 2}", "5 s": f"{fail},for={FAULT_MS}"}[how]


def hurt(bench, path, ranks, n, how, error=errno.EIO, more=0):
    """Some saves, of which each rank's fault comes upon one, or upon two where it lasts; returns whether all were
    committed for all that."""
    saves, pause = (2 + more, FAULT_MS + 2000) if how == "5 s" else (2 + len(ranks) * (1 + (how != "once")), 200)
    outcomes, _ = bench.job(path, "hurt", saves=saves, step=10, pause_ms=pause,
                            inject={r: case_words(n, how, error) for r in ranks}, start_ms=START_MS,
                            heartbeat_ms=4 * BEAT_MS, timeout=LIMIT_S + pause / 1000)
    api = bench.open(path)
    try:
        now = sound(api, {0: bench_first(bench)})
    finally:
        api.close()
    # a rank made its call n only in the last save: its number in a save varies with the waits
    if how == "5 s" and not more and sorted(now) == [0, 10]:
        return hurt_late(bench, ranks, n, how, error)
    for o in outcomes.values():
        told = [step for step, _ in o.saved]
        assert not o.killed and len(told) + len(o.failed) == saves, outcomes
        assert told and told[-1] == 9 + saves, outcomes                     # the next one works
        assert set(told) <= set(now), outcomes
        assert len(told) == len(now) - 1 or any(code == UNDECIDED for code, _ in o.failed), outcomes
    # no save fails that no fault came upon
    assert len(now) >= saves + 1 - len(ranks) * (1 + (how != "once")), outcomes
    goes_on(bench, path, now)
    return len(now) == saves + 1


def hurt_late(bench, ranks, n, how, error):
    path = bench.copy()
    committed = hurt(bench, path, ranks, n, how, error, more=1)
    shutil.rmtree(path)
    return committed


RANKS = [(2,), (0,), (1, 2)]    # a rank, the committer, two
COUNTS = {"once": (4, 10**6), "three times": (2, 60), "5 s": (1, 12)}    # of the calls: by default, with --full


@pytest.mark.parametrize("how", COUNTS)
def test_the_next_save_works(bench, scale, how, rng):
    cases, seen, count = [], [], scale(*COUNTS[how])
    for ranks in RANKS:
        numbers = range(1, len(bench.calls(inject={r: COUNTED for r in ranks})[ranks[0]]) + 1)
        cases += [(ranks, n) for n in rng.sample(numbers, min(count, len(numbers)))]
    bench.each(cases, lambda path, case: seen.append(hurt(bench, path, *case, how)))
    print(f"{len(cases)}: {sum(seen)} committed all the same")


def test_other_errors(bench, scale, rng):
    """A full disk, that of a quota, and what a network file system says."""
    cases = []
    for error in (*FULL, errno.ESTALE, errno.ETIMEDOUT):
        numbers = range(1, len(bench.calls(inject={2: counted(error)})[2]) + 1)
        for how, count in (("once", scale(2, 50)), ("three times", scale(1, 25)), ("5 s", scale(1, 4))):
            cases += [((2,), n, how, error) for n in rng.sample(numbers, min(count, len(numbers)))]
    bench.each(cases, lambda path, case: hurt(bench, path, *case))


def test_a_list_that_stays_unreadable(bench):
    """Of one rank, for 6.5 s: it can do nothing for the others, so its heartbeat stands still, though it lives, and
    they go on without it. When the list can be read again the heartbeat goes on, and all save."""
    path, blind, heartbeat_ms, start_ms = bench.copy(), 1, 1600, 1500
    words = f"reads=1,since=saved,path=runs/r,do=fail,errno={errno.EIO},at=1,for=6500"
    out, took = bench.job(path, "blind", saves=3, step=10, pause_ms=8000, inject={blind: words}, start_ms=start_ms,
                          heartbeat_ms=heartbeat_ms, timeout=LIMIT_S)
    for o in out.values():
        assert [step for step, _ in o.saved] == [10, 12] and len(o.failed) == 1, out
    for rank in set(out) - {blind}:
        assert f"rank {blind}" in out[rank].failed[0][1] and "heartbeat stood still" in out[rank].failed[0][1], out
    assert ("its heartbeat stops, so that no one waits for it" in out[blind].text and
            "its heartbeat goes on" in out[blind].text), out
    api = bench.open(path)
    try:
        now = sound(api, {0: bench_first(bench)})
    finally:
        api.close()
    assert sorted(now) == [0, 10, 12]
    goes_on(bench, path, now)
