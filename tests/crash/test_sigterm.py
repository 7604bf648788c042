# SPDX-License-Identifier: Apache-2.0
"""SIGTERM at each call that a job makes on its store: while it opens its saver, loads, saves, waits and closes. The job
ends by itself after the step that it was in or the next, which is saved; the next job goes on from there."""
import os
import subprocess
import sys

from faults import Faults

JOBS = """
import random, sys
import numpy as np
import vckpt
from faults import Faults

store, seed, cases, faults = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Faults(sys.argv[4])


def job(run, last):
    weights = np.zeros(50000)
    with vckpt.on_sigterm() as stopping, vckpt.Saver(run, pin="no") as saver:
        found = vckpt.load(run, {"model": {"w": weights}}, missing_ok=True)
        step = found.step if found else 0
        assert (weights == step).all(), (run, step)
        while step < last:
            weights += 1
            step += 1
            stop = stopping(step)
            if stop or step % 2 == 0:
                saver.async_save({"model": {"w": weights}}, step=step).staged()
            if stop:
                break
    return step, stopping.signalled is not None


job(f"{store}/straight", 4)
calls = faults.calls()
for at in sorted(random.Random(seed).sample(range(1, calls + 1), min(cases, calls))):
    run = f"{store}/run-{at}"
    faults.at(at)
    ended, signalled = job(run, 4)
    faults.at(0)
    assert signalled or ended == 4, (at, ended)
    assert vckpt.latest(run) == ended, (at, ended, vckpt.steps(run))
    assert job(run, 6) == (6, False) and vckpt.latest(run) == 6
    print(at, ended, signalled, flush=True)
"""


def test_at_every_call(build, tmp_path, seed, scale):
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    store = tmp_path / "store"
    Faults(tmp_path / "memory").at(0)
    done = subprocess.run([sys.executable, "-c", JOBS, store, str(seed), str(scale(12, 200)), tmp_path / "memory"],
                          capture_output=True, text=True, timeout=900,
                          env={**os.environ, "LD_PRELOAD": preload, "XDG_CACHE_HOME": str(tmp_path), "VCKPT_INTERPOSE":
                               f"root={store},reads=1,do=term,memory={tmp_path / 'memory'}"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ended = [line.split() for line in done.stdout.splitlines()]
    assert len(ended) >= 12
    assert sum(signalled == "True" for _, _, signalled in ended) > len(ended) / 2
