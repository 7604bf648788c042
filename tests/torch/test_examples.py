# SPDX-License-Identifier: Apache-2.0
"""docs/examples/train.py: what a job that was ended and started again computes is what one that was not would have
computed, bit by bit, under each parallelisation; under another one it is close. The straight runs and the restarts go
through the pool of ranks; with --full a rank that is killed in the middle is a job of its own, under torchrun, too."""
import os
import re
import subprocess
import sys

import pytest
import torch

from gloo_pool import ROOT

import vckpt

TINY = ["--width", "32", "--depth", "2", "--length", "32", "--batch", "8", "--text", str(ROOT / "LICENSE")]
# Restarted ranks that share the agent's store find the addresses of those before (pytorch#135712).
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _job(store, arguments, cache):
    """On a rank of the pool."""
    os.environ.update(XDG_CACHE_HOME=cache)
    import train
    return train.main(train.options(["--store", store, *arguments, *TINY]))


def words(losses):
    return {step: loss.hex() for step, loss in losses.items()}


def alike(pool, store, *arguments):
    """The losses, which all ranks must agree on."""
    found = pool(_job, str(store), list(arguments), str(store.parent / "cache"))
    assert all(words(one) == words(found[0]) for one in found)
    return found[0]


def steps_equal(one, other, plan=True):
    """Every tensor of two steps, byte for byte. plan: the layout was the same."""
    with vckpt.Step(one) as a, vckpt.Step(other) as b:
        names = {(t.component, t.name): (t.dtype, t.shape) for t in a.tensors()}
        assert names and names == {(t.component, t.name): (t.dtype, t.shape) for t in b.tensors()}
        for component, name in names:
            found, wanted = (s[component, name].torch().reshape(-1).view(torch.uint8) for s in (a, b))
            assert torch.equal(found, wanted), f"{component}/{name}"
        for component in ["plan"] * plan + ["optimizer", "lr_scheduler", "loader"]:
            assert a.values(component, tensors=False) == b.values(component, tensors=False), component


def sound(vckpt_command, store, run, steps):
    assert vckpt.steps(store / run) == steps
    vckpt_command("verify", store)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.full),
                                      pytest.param("fsdp", marks=pytest.mark.full), "tp-fsdp"])
def test_restart(pool4, vckpt, tmp_path, parallel):
    store = tmp_path / "store"
    straight = alike(pool4, store, "--parallel", parallel, "--steps", "6", "--every", "3")
    before = alike(pool4, store, "--parallel", parallel, "--steps", "3", "--every", "2", "--name", "again")
    after = alike(pool4, store, "--parallel", parallel, "--steps", "6", "--every", "1", "--name", "again")
    assert set(before) == {1, 2, 3} and set(after) == {4, 5, 6}
    assert words({**before, **after}) == words(straight)
    assert len(set(words(straight).values())) == 6
    steps_equal(store / "lm/6", store / "again/6")
    sound(vckpt, store, "lm", [3, 6])
    sound(vckpt, store, "again", [2, 3, 4, 5, 6])


@pytest.mark.full
def test_another_layout(pool4, tmp_path, monkeypatch):
    """A step of four ranks goes on under tensor parallelism and on one rank. The sums are the same in another order: no
    bit by bit, but nothing that a lost moment or a wrong box would not show."""
    store, plain = tmp_path / "store", ["--dropout", "0", "--every", "3"]
    straight = alike(pool4, store, *plain, "--parallel", "fsdp", "--steps", "6")
    more = [*plain, "--resume", "lm/3", "--steps", "6"]
    cut = alike(pool4, store, *more, "--parallel", "tp-fsdp", "--name", "cut")
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "docs/examples"))
    import train
    alone = train.main(train.options(["--store", str(store), *more, "--name", "alone", *TINY]))
    for losses in cut, alone:
        assert losses == pytest.approx({step: straight[step] for step in (4, 5, 6)}, rel=2e-5)
        assert words(losses) != {step: word for step, word in words(straight).items() if step > 3}
    assert vckpt.steps(store / "cut") == vckpt.steps(store / "alone") == [6]


def _continued(store, arguments, cache):
    """Restored under another layout, saved under that at once, and then trained on."""
    os.environ.update(XDG_CACHE_HOME=cache)
    import train
    args = train.options(["--store", store, *arguments, *TINY])
    job = train.Job(args)
    assert job.restore(f"{store}/lm/3") == (True, False)
    vckpt.save(f"{store}/{args.name}", job.state(), step=3, pin="no")
    vckpt.close()
    return train.main(args)


LAYOUTS = ["tp", pytest.param("fsdp", marks=pytest.mark.full), pytest.param("none", marks=pytest.mark.full)]


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_continued_under_another_layout(request, pool2, tmp_path, monkeypatch, parallel):
    """What two replicas trained goes on under tensor parallelism of two, FSDP2 over four, and on one process: weights
    and moments are the same, bit by bit, and the losses as close as another order of sums allows."""
    store, plain = tmp_path / "store", ["--dropout", "0", "--every", "3", "--steps", "5"]
    straight = alike(pool2, store, *plain, "--parallel", "ddp")
    more = [*plain, "--parallel", parallel, "--name", "other"]
    if parallel == "none":
        monkeypatch.syspath_prepend(str(ROOT / "docs/examples"))
        losses = _continued(str(store), more, str(tmp_path / "cache"))
    else:
        pool = pool2 if parallel == "tp" else request.getfixturevalue("pool4")
        losses = pool(_continued, str(store), more, str(tmp_path / "cache"))[0]
    steps_equal(store / "lm/3", store / "other/3", plan=False)
    assert losses == pytest.approx({step: straight[step] for step in (4, 5)}, rel=2e-5)
    assert vckpt.steps(store / "other") == [3, 5]


def torchrun(store, ranks, *arguments):
    """{step: loss in hex} as it was printed, a step twice where it was computed twice; and the whole output."""
    environment = {**os.environ, **SETTINGS, "XDG_CACHE_HOME": str(store.parent / "cache")}
    if os.environ.get("VCKPT_PRELOAD"):
        environment["LD_PRELOAD"] = os.environ["VCKPT_PRELOAD"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               "--max-restarts", "1",
               "--monitor-interval", "0.1"]
    done = subprocess.run([*command, str(ROOT / "docs/examples/train.py"), "--store", str(store), *arguments, *TINY],
                          capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^step (\d+) loss \S+ (\S+)$", done.stdout, re.M), done.stdout


def killed(pool, ranks, command, tmp_path, parallel):
    """A rank is killed in step 5, with the save of step 4 under way: the job goes on from step 3 or 4, whichever is the
    newest that is whole."""
    store = tmp_path / "store"
    arguments = ["--parallel", parallel, "--steps", "6", "--every", "1"]
    straight = words(alike(pool, store, *arguments))
    told, output = torchrun(store, ranks, *arguments, "--name", "killed", "--crash-at", "5")
    begin = re.findall(r"^from step (\d), as if nothing", output, re.M)
    assert begin in (["3"], ["4"]), output
    assert [int(step) for step, _ in told] == [1, 2, 3, 4, *range(int(begin[0]) + 1, 7)]
    assert all(loss == straight[int(step)] for step, loss in told), (told, straight)
    steps_equal(store / "lm/6", store / "killed/6")
    sound(command, store, "killed", [1, 2, 3, 4, 5, 6])


def test_killed_and_started_again(pool2, vckpt, tmp_path):
    """The same without an agent that restarts it: the other rank's error ends the job."""
    store, arguments = tmp_path / "store", ["--parallel", "ddp", "--steps", "6", "--every", "1"]
    straight = words(alike(pool2, store, *arguments))
    answers = pool2.ask(_job, str(store), [*arguments, "--name", "killed", "--crash-at", "5"], str(tmp_path / "cache"))
    assert [good for good, _ in answers] == [False, False] and answers[1][1][0] == "died", answers
    after = words(alike(pool2, store, *arguments, "--name", "killed"))
    begin = min(after) - 1
    assert begin in (3, 4) and after == {step: straight[step] for step in range(begin + 1, 7)}
    steps_equal(store / "lm/6", store / "killed/6")
    sound(vckpt, store, "killed", [1, 2, 3, 4, 5, 6])


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_killed(pool2, vckpt, tmp_path, parallel):
    killed(pool2, 2, vckpt, tmp_path, parallel)


@pytest.mark.full
def test_killed_tp_fsdp(pool4, vckpt, tmp_path):
    killed(pool4, 4, vckpt, tmp_path, "tp-fsdp")


def test_an_evaluation_that_follows(tmp_path, monkeypatch):
    """It takes the newest step, then each as it comes, and reads what changed: here the head alone, then nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "docs/examples"))
    import evaluate
    import train
    sizes, run = ["--width", "32", "--depth", "2", "--length", "32"], tmp_path / "store/lm"
    job = train.Job(train.options(["--store", str(tmp_path / "store"), *TINY]))
    names = set(job.model.state_dict())

    def save(step):
        vckpt.save(run, job.state(), step=step, pin="no")
    save(1)
    save(2)
    wait, waited = vckpt.wait, []

    def waiting(path, after, timeout):
        """Between two steps the run goes on: with another head, then as it was."""
        if after is not None:
            with torch.no_grad():
                job.model.head.weight.mul_(1.5 if after == 2 else 1)
            save(after + 1)
        waited.append(after)
        return wait(path, after, timeout)
    monkeypatch.setattr(vckpt, "wait", waiting)
    told = evaluate.main(evaluate.options(["--store", str(tmp_path / "store"), "--until", "4", "--patience", "60",
                                           "--text", str(ROOT / "LICENSE"), *sizes]))
    assert waited == [None, 2, 3] and [step for step, *_ in told] == [2, 3, 4]
    assert [set(new) for *_, new in told] == [names, {"head.weight"}, set()]
    text = (ROOT / "LICENSE").read_bytes()
    job.model.eval()
    losses = [loss for _, loss, _ in told]
    assert losses[1] == losses[2] == evaluate.loss_of(job.model, text, 32) != losses[0]
    vckpt.close()
