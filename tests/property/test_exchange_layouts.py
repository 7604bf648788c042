# SPDX-License-Identifier: Apache-2.0
"""Whatever layout a step was saved under, and whatever layout it is loaded under by ranks that share what they read:
every byte of every destination at every rank is right, and no other byte is touched. Kinds of tensors, holdings,
destinations and the oracle are those of test_load_layouts.py."""
import collections
import random

import pytest

from exchangelib import ALWAYS, AUTO, NEVER, Ranks
from loadlib import NOT_STRICT, REHASH
from test_load_layouts import Api, Rank, Saved

WORLDS = 2                               # that load a step


class Together:
    """All ranks of one random world load the step at the same time, a few times over one communicator."""

    def __init__(self, job, counts):
        self.job, self.counts, rng = job, counts, job.rng
        self.world = rng.randint(2, 8) if rng.random() < .9 else rng.randint(9, 12)
        self.kind = rng.choice(("shared", "functions"))
        job.wanted = [t for t in job.tensors if rng.random() < .9] or job.tensors
        for t in job.wanted:
            t.hold(job.api, rng, self.world)

    def told(self):
        return [f"loaded by {self.world} ranks, {self.kind}:", *(t.told() for t in self.job.wanted)]

    def load(self):
        with Ranks(self.job.api, self.world, self.kind, 120000) as ranks:
            for exchange in self.job.rng.sample((ALWAYS, ALWAYS, AUTO, NEVER), 2):
                self.once(ranks, exchange)

    def once(self, ranks, exchange):
        rng = self.job.rng
        found = [Rank(self.job, None, None, rank, self.counts) for rank in range(self.world)]
        described = [[d.describe(rng, one.arena) for d in one.destinations] for one in found]
        flags = NOT_STRICT | (REHASH if rng.random() < .2 else 0)
        out = ranks.run(self.job.store, lambda rank, load: load.tensors(*described[rank]), exchange, flags,
                        rng.randint(1, 2), lambda rank, load: (load.progress(), load.exchanged()))
        for one, result in zip(found, out, strict=True):
            if isinstance(result, Exception):
                raise AssertionError(f"rank {one.rank}: {result}") from result
            one.compare()
            progress, x = result
            assert progress.bytes_placed == progress.bytes_wanted and progress.over
            assert x.ranks == self.world and x.why and (exchange != NEVER or x.bytes_got == 0)
            self.counts["got"] += x.bytes_got > 0
            self.counts["sent"] += x.bytes_sent > 0
        chosen = {x.chosen for _, x in out}
        assert len(chosen) == 1 and chosen <= {ALWAYS, NEVER}
        shared = [x.bytes_shared for _, x in out]
        assert len(set(shared)) == 1
        if chosen == {ALWAYS}:
            assert sum(x.bytes_sent for _, x in out) == shared[0]
            assert sum(x.bytes_sent + x.bytes_got for _, x in out) == out[0][1].bytes_wanted
        self.counts["loads"] += 1


def play(api, path, seed, counts):
    rng = random.Random(seed)
    job, told = Saved(api, api.store(path), rng), []
    try:
        job.make()
        for _ in range(WORLDS):
            world = Together(job, counts)
            told = world.told()
            world.load()
    except Exception as e:
        lines = [line for layout in job.layout + [told] for line in layout]
        raise AssertionError("\n".join([f"play(api, path, {seed}, Counter()) repeats it.", *lines, f"{e}"])) from e


@pytest.mark.parametrize("part", range(2))
def test_any_layout_is_shared_under_any_other(build, tmp_path, scale, rng, part):
    api, counts = Api(build), collections.Counter()
    for n in range(scale(2, 100)):
        play(api, tmp_path / f"store{n}", rng.getrandbits(64), counts)
    print(dict(counts))
    assert counts["loads"] == scale(2, 100) * WORLDS * 2
    assert scale(True, counts["got"] and counts["sent"]), counts        # a few random worlds may share nothing
