# SPDX-License-Identifier: Apache-2.0
"""A rank without memory: each allocation of its save fails, once, and some in a row. It ends with an error or saves all
the same; no rank hangs, none is told what is not so, nothing committed is lost, and its next save works, and the next
launch."""
import os
import pathlib

import pytest

from crashlib import DRIVERS, LIMIT_S, UNDECIDED, Bench, Job, bench_first, goes_on, sound

pytestmark = pytest.mark.skipif("asan" in os.environ.get("VCKPT_PRELOAD", "") + os.environ.get("LD_PRELOAD", ""),
                                reason="the sanitizer has an allocator of its own")
WORLD, SAVES = 2, 3


@pytest.fixture(scope="module", params=DRIVERS)
def bench(lib, build, request):
    b = Bench(lib, build, request.param)
    yield b
    b.close()


def job(bench, path, rank, words):
    """Three saves; of one rank, allocations fail."""
    preload = {rank: dict(LD_PRELOAD=str(bench.build / "tests/liballocfail.so"), VCKPT_ALLOCFAIL=f"since=open,{words}")}
    j = Job(bench.build, path, "poor", saves=SAVES, step=10, pause_ms=50, world=WORLD, driver=bench.driver,
            start_ms=4000, heartbeat_ms=4000, env=preload)
    try:
        return j.wait(timeout=LIMIT_S)
    finally:
        j.close()


def allocations(bench, rank):
    path = bench.copy()
    out = job(bench, path, rank, f"count={path}.count")
    assert all(len(o.saved) == SAVES for o in out.values()), out
    return int(pathlib.Path(f"{path}.count").read_text())


def poor(bench, path, rank, at, last):
    out = job(bench, path, rank, f"at={at},last={last}")
    api = bench.open(path)
    try:
        now = sound(api, {0: bench_first(bench)})
    finally:
        api.close()
    for o in out.values():
        told = {step for step, _ in o.saved}
        assert o.code == 0 and len(told) + len(o.failed) in (SAVES, SAVES + 1), out
        assert told <= set(now) and len(now) - 1 - len(told) <= sum(code == UNDECIDED for code, _ in o.failed), (
            (now, out))
    assert last > at or len(now) >= SAVES, (now, out)     # one save fails, and the job's own next one works
    goes_on(bench, path, now)
    return len(now) == SAVES + 1


@pytest.mark.parametrize("rank", [1, 0], ids=["a rank", "the committer"])
def test_each_allocation_fails(bench, scale, rank, rng):
    number, seen = allocations(bench, rank), []
    cases = [(n, n + more) for more, count in ((0, scale(15, 10**6)), (3, scale(3, 100)))
             for n in rng.sample(range(1, number + 1), min(count, number))]
    bench.each(cases, lambda path, case: seen.append(poor(bench, path, rank, *case)))
    print(f"{len(cases)} of {number}: {sum(seen)} committed all the same")
