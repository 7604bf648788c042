# SPDX-License-Identifier: Apache-2.0
"""Low priority: what copies keeps the process's priority, what digests and writes has the lowest; and the saves are the
same."""
import collections
import contextlib
import os

import numpy
import pytest

from proclib import tasks
from saverlib import Vckpt

LOW_PRIORITY = 1


def nice(threads):
    """How many of them have which priority."""
    found = collections.Counter()
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            found[os.getpriority(os.PRIO_PROCESS, thread)] += 1
    return found


@pytest.mark.parametrize("ring", [24 << 20, 0], ids=["back-pressure", "room"])
def test_low_priority(build, tmp_path, ring):
    api = Vckpt(build)
    store, rng = api.store(tmp_path / "store"), numpy.random.default_rng(3)
    before = tasks()
    saver = api.saver(store, "run", threads=3, flags=LOW_PRIORITY, ring=ring)
    states = [{f"model/{i}": rng.integers(0, 2**32, (2000, 1024), "u4") for i in range(6)} for _ in range(4)]
    saves = [saver.save(state) for state in states]
    for step, (save, state) in enumerate(zip(saves, states)):
        save.staged()
        assert save.committed() == step
        if ring:
            assert save.timings().ring_waits > 0
        save.free()
        found = api.read(store, "run", step)
        assert all((found[name] == array).all() for name, array in state.items())
    if os.nice(0) < 19:
        new = nice(tasks() - before)
        # three that digest, the persister, and for a second the one that closes packs
        assert new[19] in (3 + 1, 3 + 2) and new[os.nice(0)] >= 3, new         # and three that copy
    saver.free()
