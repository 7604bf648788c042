# SPDX-License-Identifier: Apache-2.0
"""The loop that a page shows is a whole program: it runs as it stands there, and started again, by itself or by
torchrun, it goes on from the newest step to the losses of a run that nobody ended."""
import os
import re
import subprocess
import sys

import pytest

from gloo_pool import programs

import vckpt
from readme import block

PAGE = "docs/training.md", "A loop that can be started again"
STEPS = list(range(10, 101, 10))
# Before it: killed where it prints a line that begins so.
KILLER = """
import builtins, os, signal
shown = builtins.print
def killing(*words, **more):
    if words and words[0] == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    shown(*words, **more)
builtins.print = killing
"""


class Program:
    def __init__(self, folder):
        self.folder, self.text = folder, block(PAGE[1], PAGE[0], "python")

    def __call__(self, run, processes, kill_at=None):
        """[(step, loss)] as they were printed."""
        text = ("" if kill_at is None else KILLER.format(step=kill_at)) + self.text
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache"),
                       "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if processes == 1:
            [(status, self.said, errors)] = programs(text, environment, arguments=[str(run)])
        else:
            status, self.said, errors = self.torchrun(text, environment, run, processes)
        assert (status == 0) == (kill_at is None), self.said + errors
        return [(int(step), loss) for step, loss in re.findall(r"^(\d+) (\S+)$", self.said, re.M)]

    def torchrun(self, text, environment, run, processes):
        script = self.folder / "train.py"
        script.write_text(text)
        if environment.get("VCKPT_PRELOAD"):
            environment["LD_PRELOAD"] = environment["VCKPT_PRELOAD"]
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                               str(processes), "--monitor-interval", "0.1", script, run], capture_output=True,
                              text=True, env=environment, timeout=300)
        return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_started_again(tmp_path, processes):
    """Killed at step 36, with saves of the steps 20 and 30 perhaps under way."""
    program, store = Program(tmp_path), tmp_path / "store"
    straight = program(store / "straight", processes)
    assert [step for step, _ in straight] == list(range(1, 101)) and vckpt.steps(store / "straight") == STEPS
    assert float(straight[-1][1]) < float(straight[0][1]) / 2
    killed = program(store / "run", processes, kill_at=36)
    assert killed == straight[:35]
    newest = vckpt.latest(store / "run")
    assert newest in (None, 10, 20, 30)
    after = program(store / "run", processes)
    assert after == straight[newest or 0:]
    assert vckpt.steps(store / "run") == STEPS
    assert program(store / "run", processes) == []
    assert program.said == f"{store}/run has its last step, 100: nothing is left to train\n"
    with vckpt.Step(store / "run") as one, vckpt.Step(store / "straight") as other:
        assert one.attributes == other.attributes == {"loss": straight[-1][1]}
