# SPDX-License-Identifier: Apache-2.0
"""A disk that fails while a pack is being written: the kernel tells the error once, to whoever waits for the pages first."""
import os
import subprocess

import numpy
import pytest

STARTED = 4     # windows of 16 MiB, before the first is waited for


@pytest.fixture
def source(tmp_path):
    numpy.save(tmp_path / "w.npy", numpy.random.default_rng(1).integers(0, 2**32, (24, 1 << 20), "u4"))
    return tmp_path / "w.npy"


def test_an_error_that_the_wait_takes_is_told(build, vckpt, tmp_path, source):
    """Each call by itself: what only starts the writing may fail, a wait may not."""
    outcomes, waits = [], 2
    while len(outcomes) <= waits + STARTED:
        store, calls = tmp_path / f"store{len(outcomes)}", tmp_path / "calls"
        vckpt("init", store)
        env = dict(os.environ, LD_PRELOAD=str(build / "tests/libinterpose.so"),
                   VCKPT_INTERPOSE=f"root={store.resolve()},calls=sync_file_range,list={calls},do=fail,errno=5,at={len(outcomes) + 1}")
        done = subprocess.run([build / "tools/vckpt/vckpt", "import", store, "run", source, "-q"], env=env, capture_output=True, text=True)
        outcomes.append(done.returncode)
        assert done.returncode == 0 or os.strerror(5) in done.stderr, done
        assert vckpt("verify", store, check=False).returncode == 0
    assert not any(outcomes[:STARTED - 1]) and any(outcomes), outcomes
