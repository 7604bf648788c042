# SPDX-License-Identifier: Apache-2.0
"""docs/backup.md: its commands, run as they are on the page, while a job saves, removes and collects."""
import os
import shutil
import subprocess
import sys
import time

import numpy
import pytest

import readme
import vckpt as package

COPY, MEND = readme.ROOT.joinpath("docs/backup.md").read_text().split("```\n")[1::2]
WRITER = """
import numpy, os, pathlib, sys, vckpt
run, ready, tool = sys.argv[1:]
rng, step = numpy.random.default_rng(int(os.environ["VCKPT_SEED"])), 0
tensors = {f"l{i}": numpy.zeros(2000) for i in range(8)}
while not pathlib.Path(ready, "end").exists():
    step += 1
    tensors[f"l{rng.integers(8)}"] = numpy.full(2000, step)
    vckpt.save(run, {"model": tensors}, step=step)
    if step % 10 == 5:
        os.spawnl(os.P_WAIT, tool, tool, "rm", os.path.dirname(run), f"demo/{step - 2}", "--yes", "-q")
        os.spawnl(os.P_WAIT, tool, tool, "gc", os.path.dirname(run), "-q")
    pathlib.Path(ready, str(step)).touch()
"""


def run(script, folder):
    env = {**os.environ, "STORE": str(folder / "store"), "COPY": str(folder / "copy")}
    return subprocess.run(["bash", "-ec", script], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def job(tmp_path, vckpt, seed):
    """A process that saves until `end()`; `reach(n)` waits until it has saved step n."""
    ready = tmp_path / "ready"
    ready.mkdir()
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "store/demo", ready, vckpt.path],
                               env={**os.environ, "VCKPT_SEED": str(seed)})

    class Job:
        def reach(self, step):
            while not (ready / str(step)).exists():
                assert process.poll() is None
                time.sleep(0.01)

        def end(self):
            (ready / "end").touch()
            assert process.wait(120) == 0

    yield Job()
    process.kill()
    process.wait()


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_copies_beside_a_job(tmp_path, job, vckpt, monkeypatch):
    """Every step that a copy shows reads like the store's; the last copy has them all; one that was made while the job
    saved is a store after mend."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, copy, early = (tmp_path / name for name in ("store", "copy", "early"))
    for reached in 12, 30:
        job.reach(reached)
        done = run(COPY, tmp_path)
        assert done.returncode in (0, 24), done.stderr
        if done.returncode:
            assert run(COPY, tmp_path).returncode in (0, 24)
        steps = package.steps(copy / "demo")
        assert steps and max(steps) >= reached
        for step in steps[:2] + steps[-3:]:
            with package.open(copy / f"demo/{step}") as opened:
                values = [numpy.unique(tensor) for _, tensor in opened.items()]
                assert all(len(value) == 1 for value in values) and max(values) == step
    shutil.copytree(copy, early)
    job.end()
    assert run(COPY, tmp_path).returncode == 0
    assert package.steps(copy / "demo") == package.steps(store / "demo")
    vckpt("verify", copy)

    vckpt("mend", early)
    vckpt("verify", early)
    vckpt("gc", early)
    known = vckpt.json("ls", early, "demo")["steps"]
    package.save(early / "demo", {"model": {"l": numpy.arange(3)}}, step=max(s["step"] for s in known) + 1)
    assert MEND.strip() == 'vckpt mend "$COPY"'
