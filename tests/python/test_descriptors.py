# SPDX-License-Identifier: Apache-2.0
"""A process that is idle has no pack open: the disk space of what a collection deletes comes back at once."""
import subprocess
import time

import numpy as np
import pytest

from proclib import open_files

import vckpt

STATE = {"model": {"w": np.arange(50_000, dtype="f4"), "b": np.ones(7)}}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "store/run"
    for step in (1, 2):
        vckpt.save(path, STATE | {"step": step}, step=step, rank=0, world=1, pin="no")
    vckpt.close()
    return path


def packs(store):
    """What this process has open of the store's packs, deleted ones included."""
    return [path for path in open_files() if path.startswith(f"{store}/packs/")]


def none_open(store, seconds=120):
    end = time.monotonic() + seconds
    while packs(store) and time.monotonic() < end:
        time.sleep(0.02)
    return not packs(store)


def test_an_open_step(run, build):
    store = run.parent
    with vckpt.open(run, framework="numpy") as step:
        assert np.array_equal(step["model/w"].numpy(), STATE["model"]["w"])
        assert packs(store) and none_open(store), packs(store)
        assert np.array_equal(step["model/w"].numpy(), STATE["model"]["w"]) and packs(store)
        for words in (["rm", store, "run/1", "run/2"], ["gc", store, "--grace", "0"]):
            subprocess.run([build / "tools/vckpt/vckpt", *words], check=True, capture_output=True)
        assert none_open(store), packs(store)
        with pytest.raises(vckpt.Error, match="was removed or replaced while it was read"):
            step["model/w"].numpy()


def test_a_saver_between_saves(run):
    vckpt.save(run, STATE | {"step": 3}, step=3, rank=0, world=1, pin="no")
    assert none_open(run.parent), packs(run.parent)
    vckpt.save(run, STATE | {"step": 4}, step=4, rank=0, world=1, pin="no")
    vckpt.close()
    with vckpt.open(run, framework="numpy") as step:
        assert step.number == 4 and np.array_equal(step["model/w"].numpy(), STATE["model"]["w"])
