# SPDX-License-Identifier: Apache-2.0
"""What stays of a run while a job saves: Saver(keep=) and the run's policy (docs/prune.md, "In a job")."""
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import vckpt


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store/run"


def state(n):
    return {"model": {"w": np.full(100, n, "f4")}}


def save(path, steps, **options):
    with vckpt.Saver(path, pin="no", **options) as saver:
        for step in steps:
            saver.save(state(step), step=step, attributes={"loss": abs(step - 30)})


@pytest.fixture
def steps(vckpt_json, path):
    return lambda: [s["step"] for s in vckpt_json("ls", path.parent, "run")["steps"]]


@pytest.fixture
def vckpt_json(build):
    def run(*words):
        done = subprocess.run([build / "tools/vckpt/vckpt", *map(str, words), "--json"], capture_output=True, text=True,
                              check=True)
        return json.loads(done.stdout)
    return run


def test_rules_of_a_saver(path, steps):
    save(path, range(0, 100, 10), keep={"last": 2, "best": "1:loss", "step": [0, 10], "if": "loss == 20"})
    assert steps() == [0, 10, 30, 50, 80, 90]


def test_the_policy_of_a_run(path, steps, vckpt_json):
    save(path, [0])
    vckpt_json("policy", path.parent, "run", "set", "--keep-last", "2")
    save(path, range(10, 60, 10))
    assert steps() == [40, 50]
    save(path, range(60, 100, 10), keep={"every": 20})          # both together
    assert steps() == [40, 60, 80, 90]
    vckpt_json("policy", path.parent, "run", "clear")
    save(path, [100, 110])
    assert steps() == [40, 60, 80, 90, 100, 110]


def test_a_policy_that_is_set_meanwhile(path, steps, vckpt_json):
    with vckpt.Saver(path, pin="no") as saver:
        for step in range(3):
            saver.save(state(step), step=step)
        vckpt_json("policy", path.parent, "run", "set", "--keep-last", "1")
        for step in range(3, 5):
            saver.save(state(step), step=step)
    assert steps() == [4]


@pytest.mark.parametrize("bases", [True, False])
def test_a_failure_is_a_warning_once(path, steps, capfd, bases, vckpt_json):
    save(path, range(4), keep={"best": "1:score"}, use_bases=bases)
    assert steps() == [0, 1, 2, 3]
    said = capfd.readouterr().err
    assert said.count("old steps are not removed") == 1 and "no step has attribute 'score'" in said


def test_a_policy_of_a_newer_vckpt(path, steps, capfd, lib):
    from factslib import policy_put
    from storelib import Api
    save(path, [0])
    api = Api(lib, path.parent, init=False)
    with api.list("run") as l:
        policy_put(l, "keep-last=1", "keep-moon=full")
    api.close()
    save(path, [1, 2])
    assert steps() == [0, 1, 2]
    assert "the rule 'keep-moon=full' is none that this vckpt knows" in capfd.readouterr().err


def test_a_pinned_step_stays(path, steps, lib):
    from factslib import change
    from storelib import Api
    save(path, [0, 1])
    api = Api(lib, path.parent, init=False)
    with api.list("run") as l:
        assert change(l, 0, pin=1) == 0
    api.close()
    save(path, [2, 3], keep={"last": 1})
    assert steps() == [0, 3]


def test_a_job_that_went_back(path, steps):
    save(path, [10, 20, 30], keep={"last": 1})
    assert steps() == [30]
    save(path, [5], keep={"last": 1})                           # what it goes on from is the one that it saved last
    assert steps() == [5, 30]
    save(path, [6], keep={"last": 1})
    assert steps() == [6, 30]


def test_ranks(path, steps, threads):
    launch = "keep-ranks"

    def rank(number):
        with vckpt.Saver(path, pin="no", rank=number, world=2, launch_id=launch, keep={"last": 2}) as saver:
            for step in range(6):
                saver.save({"model": {"w": np.full(10, step, "f4")}}, step=step)
        return True
    vckpt.init(path.parent)
    assert threads({0: rank, 1: rank}) == {0: True, 1: True}
    assert steps() == [4, 5]


@pytest.mark.parametrize("keep, said", [
    ({"last": 0}, "keep-last=0: give a number from 1 on"), ({"lst": 3}, "there is no rule 'lst'"),
    ("last=3", "expected a mapping of rules"), ({}, "expected a mapping of rules"),
    ({"last": []}, "expected a mapping of rules"), ({"step": [1, "x"]}, "keep-step=1,x"),
    ({"warn-free": "10G"}, "there is no rule 'warn-free'"),
    ({"if": "loss <"}, "column 7"), ({"best": "loss"}, "K:ATTRIBUTE"), ({"last": [1, "x"]}, "keep-last=x")])
def test_wrong_rules(path, keep, said):
    with pytest.raises(ValueError, match="keep") as error:
        save(path, [0], keep=keep)
    assert said in str(error.value)


@pytest.mark.parametrize("several", [list(range(0, 200, 2)), range(0, 200, 2), {*range(0, 200, 2)}])
def test_more_steps_than_a_saver_may_have_rules(path, steps, several):
    save(path, [0, 1, 2, 3, 100, 101, 102], keep={"step": several})
    assert steps() == [0, 2, 100, 102]


def test_one_step_alone(path, steps, vckpt_json):
    save(path, [5], keep={"last": 3})
    for rule in ("--keep-last", "3"), ("--keep-every", "3"):
        assert vckpt_json("prune", path.parent, "run", *rule, "--yes")["removed"] == []
    assert steps() == [5]


def test_steps_in_any_order(path, steps):
    """The two highest stay, and the one that was saved last."""
    save(path, [10, 20, 5, 6], keep={"last": 2})
    assert steps() == [6, 10, 20]


def test_a_run_named_like_a_number(path, vckpt_json):
    store = path.parent
    save(path, [0])
    np.save(store.parent / "w.npy", np.zeros(9))
    vckpt_json("import", store, "7/1", store.parent / "w.npy")
    save(store / "7", range(2, 6), keep={"last": 2})
    assert vckpt.steps(store / "7") == [4, 5]
    vckpt_json("policy", store, "7", "set", "--keep-last", "1")
    assert [s["plan"] for s in vckpt_json("prune", store, "7", "--dry-run")["steps"]] == ["goes", "stays"]
    assert vckpt_json("du", store, "--freed", "7")["freed"]["steps"] == 2
    assert vckpt_json("du", store, "--freed", "7/5..")["freed"]["steps"] == 1
    save(store / "7", [6])
    assert vckpt.steps(store / "7") == [6] and vckpt.steps(path) == [0]


def test_a_child_of_a_fork(path, steps):
    """It cannot use the saver, also when it ends as a program does, and removes nothing; the parent goes on."""
    code = f"""
import os, sys
import numpy as np
import vckpt

saver = vckpt.Saver({str(path)!r}, pin="no", keep={{"last": 2}})
for step in range(6):
    if step == 3 and os.fork() == 0:
        try:
            saver.save({{"model": {{"w": np.ones(9)}}}}, step=9)
        except vckpt.Forked:
            sys.exit(0)
        os._exit(1)
    saver.save({{"model": {{"w": np.full(9, step)}}}}, step=step)
assert os.wait()[1] == 0
saver.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert steps() == [4, 5]


def test_a_copy_of_the_files(path, steps, vckpt_json):
    """`cp -r` of a store: what is pruned in one is there in the other, and the job goes on in either."""
    save(path, range(6))
    vckpt.pin(path / "1")
    copy = path.parents[1] / "copy"
    shutil.copytree(path.parent, copy)
    assert vckpt_json("prune", copy, "run", "--keep-last", "1", "--yes")["failed"] == []
    vckpt_json("gc", copy, "--grace", "0")
    save(copy / "run", [6, 7], keep={"last": 1})
    assert vckpt.steps(copy / "run") == [1, 7] and steps() == list(range(6))
    for store in copy, path.parent:
        assert vckpt_json("verify", store)["faults"] == 0
    with vckpt.Step(path / "0", framework="numpy") as step:
        assert step["model", "w"].numpy().tolist() == [0] * 100


def test_thinned(path, vckpt_json):
    with vckpt.Saver(path, pin="no") as saver:
        for step in range(2):
            saver.save({"model": {"w": np.full(9, step, "f4")}, "optimizer": {"m": np.ones(9), "lr": 0.5}}, step=step)
    done = vckpt_json("prune", path.parent, "run", "--thin", "optimizer", "--older-than", "0s", "--yes")
    assert [s["step"] for s in done["thinned"]] == [0]
    with vckpt.Step(path.parent / "run/0", framework="numpy") as step:
        assert step.thinned == ("optimizer",) and [t.component for t in step.tensors()] == ["model"]
        assert step["model", "w"].numpy().tolist() == [0] * 9
        with pytest.raises(vckpt.NotFound, match=r"component 'optimizer' of run/0 was thinned"):
            step.read("optimizer", "m")
    like = {"model": {"w": np.zeros(9, "f4")}, "optimizer": {"m": np.zeros(9), "lr": 0.0}}
    with pytest.raises(ValueError, match=r"the step lacks optimizer \(it was thinned"):
        vckpt.load(path.parent / "run/0", like)
    vckpt.load(path.parent / "run/0", like, strict=False)
    assert like["model"]["w"].tolist() == [0] * 9 and like["optimizer"]["m"].tolist() == [0] * 9
    with vckpt.Step(path.parent / "run/1") as step:
        assert step.thinned == ()


def test_thinned_of_several_ranks(path, vckpt_json, threads):
    """Each rank has a layout of its own, with a component that only it has; both have rows of one tensor."""
    vckpt.init(path.parent)

    def rank(number):
        with vckpt.Saver(path, pin="no", rank=number, world=2, launch_id="thin-ranks") as saver:
            for step in range(2):
                own = vckpt.Shard(np.full(3000, step + number, "f4"), alone=True)
                moment = vckpt.Shard(np.full(4000, step, "f4"), alone=True)
                saver.save({"model": {f"own{number}": own, "both": np.full(500, step)},
                            "optimizer": {f"m{number}": moment, "both": np.ones(700)}}, step=step)
        return True
    assert threads({0: rank, 1: rank}) == {0: True, 1: True}
    done = vckpt_json("prune", path.parent, "run", "--thin", "optimizer", "--older-than", "0s", "--yes")
    assert [s["step"] for s in done["thinned"]] == [0] and not done["failed"]
    for _ in range(2):
        vckpt_json("gc", path.parent, "--grace", "0")
    assert not any(vckpt_json("verify", path.parent, *how)["faults"] for how in ([], ["--paranoid"]))
    with vckpt.Step(path.parent / "run/0", framework="numpy") as step:
        assert step.world == 2 and step.thinned == ("optimizer",)
        assert sorted(t.name for t in step.tensors()) == ["both", "own0", "own1"]
        assert step["model", "own1"].numpy().tolist() == [1] * 3000


@pytest.mark.parametrize("options, said", [
    ({"keep": {"last": 0}}, "keep-last=0: give a number from 1 on"), ({"keep": {"if": "loss <"}}, "column 7"),
    ({"threads": 5000}, "at most 1024 are possible")])
def test_no_store_for_what_is_refused(path, options, said):
    for call in (vckpt.Saver, lambda *given, **options: vckpt.async_save(*given, state(1), **options)):
        with pytest.raises(vckpt.Error, match=said):
            call(path, **options)
        assert not path.parent.exists()
    save(path, [1])
    with pytest.raises(vckpt.Error, match=said):
        vckpt.Saver(path, **options)
