# SPDX-License-Identifier: Apache-2.0
"""kill -9 of one rank, of the committer, of all ranks, at each call by which a save changes the store: old steps
verify, the new one is whole or absent, those that live are told alike and told who, the next save works, and a dry run
of the collector lists what is left."""
import pytest

from crashlib import DRIVERS, LIMIT_S, WORLD, Bench, after


@pytest.fixture(scope="module", params=DRIVERS)
def bench(lib, build, request):
    b = Bench(lib, build, request.param)
    yield b
    b.close()


def chosen(calls, rng, count, always=lambda call, path: False):
    """Numbers of calls, from 1: those that are always tried, and a random choice of the others."""
    always = [i for i, (call, path) in enumerate(calls, 1) if always(call, path)]
    others = [i for i in range(1, len(calls) + 1) if i not in always]
    return sorted(always + rng.sample(others, min(count, len(others))))


def protocol(call, path):
    """What the commit is made of: the announcement, the manifest, the entry. An unnamed file's path is its
    directory."""
    return call in ("linkat", "fsync") and (path.startswith("runs/r") or "/part." in path)


def killed(bench, path, rank, word):
    outcomes, took = bench.job(path, "killed", inject={rank: word}, timeout=LIMIT_S)
    assert took < LIMIT_S
    return outcomes


@pytest.mark.parametrize("rank", [2, 0], ids=["a rank", "the committer"])
def test_one_rank_dies(bench, scale, rank, rng):
    calls = bench.calls()[rank]
    cases = chosen(calls, rng, scale(8, len(calls)), protocol if rank == 0 else lambda *_: False)
    seen = {"died": 0, "committed": 0, "left": 0}

    def one(path, n):
        outcomes = killed(bench, path, rank, f"do=kill,at={n}")
        now, left = after(bench, path, outcomes, [rank])
        assert all(not o.killed for r, o in outcomes.items() if r != rank)
        seen["died"] += outcomes[rank].killed
        seen["committed"] += 1 in now
        seen["left"] += left
    bench.each(cases, one)
    print(seen, len(cases), "of", len(calls))
    assert seen["died"] > len(cases) / 2


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_die(bench, scale, rank, rng):
    """When one of them comes to a call, all go."""
    calls = bench.calls()[rank]
    cases = chosen(calls, rng, scale(6, len(calls)), lambda call, path: call == "linkat")
    seen = {"committed": 0, "left": 0}

    def one(path, n):
        outcomes = killed(bench, path, rank, f"do=killall,at={n},when=after")
        now, left = after(bench, path, outcomes, range(WORLD))
        seen["committed"] += 1 in now
        seen["left"] += left
    bench.each(cases, one)
    print(seen, len(cases), "of", len(calls))
    assert seen["left"]


@pytest.mark.full
@pytest.mark.parametrize("rank", range(WORLD))
def test_each_rank_dies_at_a_half_of_all_calls_reads_too(bench, rank, rng):
    calls = bench.calls(inject={rank: "reads=1"})[rank]

    def one(path, n):
        after(bench, path, killed(bench, path, rank, f"reads=1,do=kill,at={n}"), [rank])
    bench.each(sorted(rng.sample(range(1, len(calls) + 1), len(calls) // 2)), one)
