# SPDX-License-Identifier: Apache-2.0
"""Jobs that are told to end. With vckpt.on_sigterm: all ranks end after the same step, and that step is saved,
whichever ranks the signal came to, when, and how often. Without it: nothing that was saved is touched."""
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from test_examples import SETTINGS, TINY, alike, steps_equal
from test_meeting import ranks

import vckpt

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def vckpt_command(vckpt):               # noqa: F811
    return vckpt


def start(tmp_path, script, *arguments, count=2):
    """torchrun, that is, its agent."""
    environment = {**os.environ, **SETTINGS, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    if os.environ.get("VCKPT_PRELOAD"):
        environment["LD_PRELOAD"] = os.environ["VCKPT_PRELOAD"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
               "--monitor-interval", "0.1"]
    return subprocess.Popen([*command, str(script), *map(str, arguments)], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def until(process, line):
    """What it said until a line of that form."""
    said = []
    for text in process.stdout:
        said.append(text)
        if re.match(line, text):
            return said
    raise AssertionError("".join(said))


def end(process):
    """The rest of what it says: what `until` has read ahead, too, which communicate() would lose."""
    rest = []
    reader = threading.Thread(target=lambda: rest.append(process.stdout.read()), daemon=True)
    reader.start()
    reader.join(120)
    if not rest:
        process.kill()
        raise AssertionError("it has not ended after 120 s")
    process.wait(120)
    return rest[0]


@pytest.mark.full
def test_the_example_under_torchrun(pool2, vckpt_command, tmp_path):
    """The agent gets SIGTERM, and has 30 s until it kills; steps go on for some moments, and the last one is saved. The
    next start goes on from there to what an undisturbed job computes."""
    store, options = tmp_path / "store", ["--parallel", "ddp", "--every", "1000"]
    first = start(tmp_path, ROOT / "docs/examples/train.py", "--store", store, *options, *TINY, "--steps", "100000",
                  "--name", "ended")
    said = until(first, "step 3 ")
    first.send_signal(signal.SIGTERM)
    said = "".join(said) + end(first)
    told = [int(step) for step in re.findall(r"^step (\d+) loss", said, re.M)]
    assert told == list(range(1, told[-1] + 1)) and said.count("SIGTERM: the job ends after a step that all ranks "
                                                               "agree on") == 2, said
    assert vckpt.steps(store / "ended") == [told[-1]]
    for name, begin in ("ended", told[-1] + 1), ("straight", 1):
        losses = alike(pool2, store, *options, "--steps", str(told[-1] + 2), "--name", name)
        assert list(losses) == list(range(begin, told[-1] + 3))
    steps_equal(store / "ended" / str(told[-1] + 2), store / "straight" / str(told[-1] + 2))
    vckpt_command("verify", store)


LOOP = """
import random, signal, threading, torch
torch.set_num_threads(1)

def job(seed, told):
    pick, run = random.Random(seed * 10 + rank), f"{os.environ['RUNS']}{seed}"
    weights, step, signals = torch.zeros(1000), 0, []
    with vckpt.on_sigterm() as stopping, vckpt.Saver(run, pin="no") as saver:
        stop = False
        while not stop:
            time.sleep(pick.random() / 50)
            shared = torch.ones(1000)
            dist.all_reduce(shared)
            weights += shared
            step += 1
            for _ in range(2 if step == 4 and rank in told else 0):
                signals.append(threading.Timer(0.3 + pick.random() / 2, os.kill, [os.getpid(), signal.SIGTERM]))
                signals[-1].start()
            stop = stopping(step)
            if stop or step % 5 == 0:
                saver.async_save({"m": {"w": weights}}, step=step).staged()
        assert stopping(step + 1)
    for one in signals:                         # a rank's own may come when all is over
        one.join()
    print(step, vckpt.steps(run)[-1], (stopping.signalled is not None) == (rank in told))
    dist.barrier()

job(0, {0, 1, 2})
job(1, {2})
"""


def test_ranks_that_are_signalled_at_different_times(tmp_path, monkeypatch):
    """Each twice, as under torchrun in a Slurm job; then one rank alone, whose node is taken away."""
    monkeypatch.setenv("RUNS", str(tmp_path / "store/run"))
    found = ranks(3, tmp_path, LOOP)
    for seed in 0, 1:
        said = {out[seed] for out, _ in found}
        step = int(found[0][0][seed].split()[0])
        assert said == {f"{step} {step} True"} and step > 3, found
        with vckpt.Step(tmp_path / f"store/run{seed}") as newest:
            assert newest.number == step and (newest["w"].numpy() == 3 * step).all()


def test_ranks_that_ask_after_different_steps(tmp_path):
    found = ranks(2, tmp_path, """
with vckpt.on_sigterm() as stopping:
    said(stopping, 1)
    said(stopping, 2 + rank)
    said(stopping, 4)
""")
    for rank, (lines, _) in enumerate(found):
        assert [line.split(" ", 1)[1] for line in lines[:2]] == ["False", "False"]
        assert (f"InvalidArgument: vckpt.on_sigterm: this rank called stopping({2 + rank}), the ranks together called "
                "it for steps 2 to 3") in lines[2], lines


@pytest.mark.parametrize("more", ["", "before = {os.getpid()}; dist.destroy_process_group()"])
def test_its_threads_end(tmp_path, more):
    """Before the interpreter does: one of gloo's that still had a tensor of the last round aborted such a job when all
    was done."""
    found = ranks(2, tmp_path, """
from proclib import tasks
def more():
    limit = time.monotonic() + 60
    while tasks() - before and time.monotonic() < limit:
        time.sleep(0.01)
    return len(tasks() - before)
before = tasks()
atexit.register(lambda: print(more(), flush=True))      # comes after what vckpt registers with its first group
with vckpt.on_sigterm() as stopping:
    stopping(1)
    print(len(tasks() - before) > 0)
print(more())
dist.barrier()
try:
    with vckpt.on_sigterm() as stopping:
        stopping(1)
        sys.exit(0)
except SystemExit:
    print(more())
dist.barrier()
stopping = vckpt.on_sigterm()                   # never closed
stopping(1)
""" + more)
    assert [out for out, _ in found] == [["True", "0", "0", "0"]] * 2, found


# ---- without it ----

ENDLESS = """
import os, signal, sys
import numpy as np, torch, torch.distributed as dist, vckpt
dist.init_process_group("gloo")
state = {"m": {"w": vckpt.Shard(np.random.default_rng(dist.get_rank()).random((4 << 20)), shape=(8 << 20,),
                                flat=(dist.get_rank() * (4 << 20), (dist.get_rank() + 1) * (4 << 20)))}}
with vckpt.Saver(sys.argv[1], pin="no") as saver:
    step = max(vckpt.steps(sys.argv[1]), default=0)
    for step in range(step + 1, step + 1 + int(sys.argv[2])):
        saver.async_save(state, step=step).committed()
        state["m"]["w"].tensor[step % 1000::1000] += 1
        if dist.get_rank() == 0:
            print("step", step, flush=True)
"""


@pytest.mark.full       # a signal that kills is every call's in tests/crash
def test_a_job_that_does_not_heed_it(vckpt_command, tmp_path):
    """Killed by SIGTERM in the middle of a save: what was saved stays, nothing half is seen, and the next start goes
    on."""
    script, run = tmp_path / "endless.py", tmp_path / "store/run"
    script.write_text(ENDLESS)
    first = start(tmp_path, script, run, 1000)
    said = until(first, "step 2$")
    time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said = "".join(said) + end(first)
    told = [int(step) for step in re.findall(r"^step (\d+)$", said, re.M)]
    steps = vckpt.steps(run)
    assert first.returncode != 0 and steps[:len(told)] == told and len(steps) <= len(told) + 1, (steps, said)
    vckpt_command("verify", tmp_path / "store")
    again = start(tmp_path, script, run, 1)
    said = end(again)
    assert again.returncode == 0 and vckpt.steps(run) == [*steps, steps[-1] + 1], said
    vckpt_command("verify", tmp_path / "store")


# ---- by itself ----

@pytest.fixture
def handlers():
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def test_one_process(handlers):
    def before(*_):
        raise AssertionError
    signal.signal(signal.SIGTERM, before)
    with vckpt.on_sigterm() as stopping:
        assert not stopping(1) and stopping.signalled is None and signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) is before
    stopping.close()
    with vckpt.on_sigterm((signal.SIGTERM, signal.SIGUSR1)) as stopping:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping(2) and stopping(3) and 0 <= stopping.signalled < 60
    os.kill(os.getpid(), signal.SIGTERM)                # once more, while the last save is written
    assert stopping.signalled is not None


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("before, status", [(signal.SIG_DFL, -signal.SIGTERM), (lambda *_: os._exit(7), 7)])
def test_children_can_be_ended(handlers, before, status, ended):
    """multiprocessing ends its daemons so when the program ends, and waits for them."""
    signal.signal(signal.SIGTERM, before)
    stopping = vckpt.on_sigterm()
    if ended:
        os.kill(os.getpid(), signal.SIGTERM)
        stopping.close()                                # which leaves the handler, for the signal that comes again
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()

    def idle():
        begun.set()
        for _ in range(600):                            # a signal just before a sleep is looked at after it
            time.sleep(0.1)
    child = fork.Process(target=idle, daemon=True)
    child.start()
    assert begun.wait(60)
    child.terminate()
    child.join(60)
    found = child.exitcode
    child.kill()
    child.join()
    assert found == status and (stopping.signalled is not None) == ended


def test_ranks_without_a_process_group(handlers, monkeypatch):
    asked = []
    with vckpt.on_sigterm(agree=lambda mine: asked.append(mine) or len(asked) == 2) as stopping:
        assert not stopping(1) and stopping(2) and stopping(3) and asked == [False, False]
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(vckpt.InvalidArgument, match="WORLD_SIZE=2 in the environment says that there are other ranks.* "
                       "give agree="):
        vckpt.on_sigterm()
    assert signal.getsignal(signal.SIGTERM) == before
