# SPDX-License-Identifier: Apache-2.0
import pytest

import vckpt


@pytest.fixture
def save(run, threads):
    """save(step, world, state, ...): state(rank) of every rank, which is a thread, to the module's `run`."""
    def one(step, world, state, **more):
        vckpt.close()
        call = {rank: lambda rank: vckpt.save(run, state(rank), step=step, rank=rank, world=world,
                                              launch_id=f"save {step}", **more) for rank in range(world)}
        assert threads(call) == {rank: step for rank in range(world)}
        vckpt.close()
    return one
