# SPDX-License-Identifier: Apache-2.0
"""Low priority: what copies keeps the process's priority, what digests and writes has the lowest; and the saves are the
same."""
import os

import numpy
import pytest

from saverlib import Vckpt

LOW_PRIORITY = 1


def nice():
    """Of the threads of this process, how many have which."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat") as f:
            value = int(f.read().rpartition(")")[2].split()[16])
        found[value] = found.get(value, 0) + 1
    return found


@pytest.mark.parametrize("ring", [24 << 20, 0], ids=["back-pressure", "room"])
def test_low_priority(build, tmp_path, ring):
    api = Vckpt(build)
    store, rng = api.store(tmp_path / "store"), numpy.random.default_rng(3)
    before = nice()
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
        now = nice()
        # three that digest, the persister, and for a second the one that closes packs
        assert now.get(19, 0) - before.get(19, 0) in (3 + 1, 3 + 2), (before, now)
        assert now.get(os.nice(0)) - before.get(os.nice(0)) >= 3              # three that copy
    saver.free()
