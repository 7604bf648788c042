# SPDX-License-Identifier: Apache-2.0
"""vckpt prune and vckpt policy: what stays and why, what is asked, what is thinned, and writers beside it. The rules
themselves: tests/property/test_retain.py."""
import contextlib
import errno
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

import factslib
from storelib import Api
from terminal import open_terminal, written
from test_rm import on_terminal

STEPS = [0, 5, 10, 12, 20]
LOSS = {0: "3.5", 5: "2.5", 10: "nan", 12: "2.25", 20: "3"}


@pytest.fixture(scope="module")
def template(vckpt, tmp_path_factory):
    """Run a: each step with a model and an optimizer of its own, a blob, and a loss. Run b: two steps of one array."""
    folder = tmp_path_factory.mktemp("prune")
    source = folder / "source"
    source.mkdir()
    rng = np.random.default_rng(5)
    vckpt("init", folder / "store")
    for step in STEPS:
        save_file({"w": rng.random((40, 50), dtype="f4"), "tiny": np.full(2, step, "f4")}, source / "model.safetensors")
        save_file({"m": rng.random((40, 50), dtype="f4"), "v": rng.random((40, 50), dtype="f4"),
                   "n": np.full(2, step, "f4")}, source / "optimizer.safetensors")
        (source / "config.json").write_text(json.dumps({"step": step}))
        vckpt("import", folder / "store", f"a/{step}", source, "-q", "--set", f"loss={LOSS[step]}")
    np.save(folder / "w.npy", np.arange(1000, dtype="f4"))
    for step in (1, 2):
        vckpt("import", folder / "store", f"b/{step}", folder / "w.npy", "-q")
    return folder


@pytest.fixture
def store(template, tmp_path):
    shutil.copytree(template / "store", tmp_path / "store")
    return tmp_path / "store"


@contextlib.contextmanager
def listed(lib, store):
    with contextlib.closing(Api(lib, store, init=False)) as api, api.list("a") as l:
        yield l


@pytest.fixture
def facts(lib, store):
    """Changes facts of run a: facts(step, pin=1)."""
    def change(step, **what):
        with listed(lib, store) as l:
            assert factslib.change(l, step, **what) == 0
    return change


@pytest.mark.parametrize("words, rest", [
    (["--keep-last", "2"], [12, 20]), (["--keep-every", "10"], [0, 10, 20]),
    (["--keep-best", "1:loss"], [12, 20]), (["--keep-best", "2:loss:max"], [0, 20]),
    (["--keep-step", "5,10", "--keep-step", "12"], [5, 10, 12, 20]),
    (["--keep-if", "loss < 3"], [5, 12, 20]), (["--keep-if", "not loss < 3 and step > 0"], [10, 20]),
    (["--keep-within", "7d"], STEPS), (["--keep-daily", "1"], [20]), (["--keep-weekly", "3"], [20]),
    (["--keep-last", "1", "--keep-every", "5", "--keep-best", "1:loss:min"], STEPS)])
def test_what_stays(vckpt, store, left, words, rest):
    would = vckpt.json("prune", store, "a", *words, "-n")
    assert left() == STEPS and would["dry_run"] and not would["removed"]
    assert [s["step"] for s in would["steps"] if s["plan"] == "stays"] == rest
    assert all(bool(s["kept_by"]) == (s["plan"] == "stays") for s in would["steps"])
    assert would["steps"][-1]["kept_by"][:3] == ["highest", "newest", "last"]
    done = vckpt.json("prune", store, "a", *words, "--yes")
    assert left() == rest and left("b") == [1, 2] and not done["failed"] and not done["kept"]
    assert sorted(s["step"] for s in done["removed"]) == sorted(set(STEPS) - set(rest))
    assert done["freed_bytes"] == would["freed_bytes"]
    before = disk(store)
    for _ in range(2):
        vckpt("gc", store, "--grace", "0", "-q")
    assert before - disk(store) == (would["freed_bytes"] or 0)
    assert vckpt.json("verify", store)["faults"] == 0


def disk(store):
    """Of packs, manifests and measures: what a collection gives back."""
    return sum(p.stat().st_size for pattern in ("packs/*/*", "runs/*/manifests/*", "stats/**/*")
               for p in store.glob(pattern) if p.is_file())


def test_what_is_said(vckpt, store):
    said = vckpt("prune", store, "a", "--keep-last", "2", "--keep-best", "1:loss:max", "-n").stdout.splitlines()
    assert said[0].split() == ["RUN", "STEP", "AGE", "SIZE", "PLAN", "KEPT", "BY"]
    assert said[1].endswith("stays  keep-best=1:loss:max") and said[2].split()[-2:] == ["goes", "-"]
    assert said[5].endswith("stays  highest, newest, last, keep-last=2")
    assert said[6] == "run a: keep-last=2 keeps 2; keep-best=1:loss:max keeps 1"
    assert said[7].startswith("2 of 5 steps go; vckpt gc could then give ") and said[8] == "nothing was changed"


def test_one_step_is_one(vckpt, store, left):
    vckpt("rm", store, "b/1", "-q")
    for run, said in ("b", "0 of 1 step goes"), ("a", "4 of 5 steps go; vckpt gc could then give "):
        plan = vckpt("prune", store, run, "--keep-last", "1", "-n").stdout.splitlines()
        assert plan[-2].startswith(said), plan


def test_each_run_by_itself(vckpt, store, left):
    done = vckpt.json("prune", store, "--keep-last", "1", "-y")
    assert left() == [20] and left("b") == [2] and len(done["removed"]) == 5 and len(done["runs"]) == 2


@pytest.mark.parametrize("words, code, said", [
    (["a"], 2, "give rules, such as --keep-last 3: the run has no policy"),
    ([], 2, "no run has a policy"), (["nothing", "--keep-last", "1", "-y"], 1, "there is no run nothing"),
    (["a/5", "--keep-last", "1"], 2, "rules are for a whole RUN"),
    (["9", "--keep-last", "1", "-y"], 1, "there is no run 9"),
    (["a", "--keep-last", "0"], 2, "--keep-last=0: give a number from 1 on"),
    (["a", "--keep-if", "loss <"], 2, "column 7"), (["a", "--keep-best", "loss"], 2, "K:ATTRIBUTE"),
    (["a", "--keep-if", "lsos < 3", "-y"], 1, "no step has attribute 'lsos'"),
    (["--keep-best", "1:loss", "-y"], 1, "run b: keep-best=1:loss: no step has attribute 'loss'"),
    (["a", "--thin", "optimizer"], 2, "go together"), (["a", "--older-than", "7d"], 2, "go together"),
    (["a", "--thin", "optimizer", "--older-than", "7"], 2, "give a duration"),
    (["a", "--thin", "a/b", "--older-than", "7d"], 2, "not the name of a component"),
    (["a", "--thin", "optimiser", "--older-than", "0s", "-y"], 1, "no step has a component of that name"),
    (["a", "--keep-if", "tensor ~ x", "-y"], 1, "no step has attribute 'tensor', and only vckpt find asks for tensors"),
    (["a", "--keep-step", "7777", "-y"], 1, "a has no step 7777: nothing is removed"),
    (["a", "--keep-last", "1", "--keep-step", "5,7777,8888", "-y"], 1, "a has no step 7777: nothing is removed"),
    (["--keep-step", "5", "-y"], 1, "b has no step 5: nothing is removed")])
def test_refused(vckpt, store, left, words, code, said):
    done = vckpt("prune", store, *words, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done
    assert left() == STEPS and left("b") == [1, 2]


def test_the_plan_of_several_runs(vckpt, store, template):
    """Whatever a run before it loses: nothing, or steps of a higher number."""
    for run in "abc":
        vckpt("import", store, f"{run}/30", template / "w.npy", "-q")
    for rules, goes in ((["--keep-last", "2"], {("a", n) for n in STEPS[:-1]} | {("b", 1)}),
                        (["--keep-if", "run == a"], {("b", 1), ("b", 2)}),
                        (["--keep-if", "run == b or step == 20"], {("a", n) for n in STEPS[:-1]})):
        plan = vckpt.json("prune", store, *rules, "-n")
        assert {(s["run"], s["step"]) for s in plan["steps"] if s["plan"] == "goes"} == goes, rules
        said = vckpt("prune", store, *rules, "-n").stdout.splitlines()
        assert sum(line.split()[-2:] == ["goes", "-"] for line in said) == len(goes)


def test_an_attribute_that_is_no_number(vckpt, store, left, facts):
    facts(5, set={"loss": "much\x1b[2J"})
    done = vckpt("prune", store, "a", "--keep-best", "1:loss", "-y", check=False)
    assert done.returncode == 1 and "step 5 has loss 'much?[2J', which is no number" in done.stderr, done.stderr
    assert left() == STEPS
    facts(5, set={"loss": "1"})
    assert vckpt("prune", store, "a", "--keep-best", "1:loss", "-y").returncode == 0 and left() == [5, 20]


def test_asks(vckpt, store, left):
    words = ["prune", store, "a", "--keep-last", "4"]
    done = vckpt(*words, check=False)
    assert done.returncode == 2 and "give --yes" in done.stderr and "goes" in done.stdout and left() == STEPS
    assert vckpt.json("prune", store, "a", "--keep-last", "5")["removed"] == []     # nothing to ask about
    code, out, said = on_terminal(vckpt, b"n\n", *words)
    assert code == 1 and "Remove them? [y/N]" in said and "nothing was changed" in said and left() == STEPS
    code, out, said = on_terminal(vckpt, b"y\n", *words)
    assert code == 0 and "a/step-00000000 removed" in out and left() == STEPS[1:]


def test_pinned_and_tagged_stay(vckpt, store, left, facts):
    facts(0, pin=1, reason="sent")
    facts(5, tags=["best"])
    would = vckpt.json("prune", store, "a", "--keep-last", "1", "-n")
    assert [s["kept_by"] for s in would["steps"]][:3] == [["pinned"], ["tagged"], []]
    vckpt("prune", store, "a", "--keep-if", "tag == best or pinned", "-y", "-q")
    assert left() == [0, 5, 20]


@pytest.mark.parametrize("what", ["pin", "tag", "remove", "replace", "attribute"])
def test_another_writer_between_plan_and_put(vckpt, store, left, facts, template, what):
    """The question is on the terminal: the plan is made, and nothing is removed yet."""
    def change():
        if what == "pin":
            facts(5, pin=1)
        elif what == "tag":
            facts(5, tags=["best"])
        elif what == "attribute":
            facts(5, set={"loss": "0.5"})
        elif what == "remove":
            vckpt("rm", store, "a/5")
        else:
            vckpt("import", store, "a/5", template / "w.npy", "--replace")
    rules = ["--keep-best", "1:loss"]
    code, out, said = asked(vckpt, change, "prune", store, "a", *rules)
    assert code == 0, said
    assert left() == ([12, 20] if what == "remove" else [5, 12, 20]), (out, said)
    assert ("step 5 " in out or "\na/5 " in out) and "step-00000005 removed" not in out


def asked(vckpt, change, *words):
    """The command on a terminal; `change` is called when it asks, then it is answered yes."""
    ours, theirs = open_terminal()
    process = subprocess.Popen([vckpt.path, *map(str, words)], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs)
    said = b""
    while b"[y/N]" not in said:
        said += os.read(ours, 1000)
    change()
    os.write(ours, b"y\n")
    out = process.communicate(timeout=60)[0].decode()
    os.close(theirs)
    said = said.decode() + written(ours)
    os.close(ours)
    return process.returncode, out, said


# ---- thinning ----

THIN = ["--thin", "optimizer", "--older-than", "0s"]


def exported(vckpt, store, step):
    out = store.parent / "out"
    vckpt("export", store, f"a/{step}", out, "-q")
    files = {p.name: p.read_bytes() for p in out.iterdir() if p.name != "manifest.json"}
    shutil.rmtree(out)
    return files


def test_thin(vckpt, store, left, facts):
    before = {step: exported(vckpt, store, step) for step in STEPS}
    rows = {s["step"]: s for s in vckpt.json("ls", store, "a")["steps"]}
    facts(5, tags=["best"], set={"score": "7"})
    would = vckpt.json("prune", store, "a", *THIN, "-n")
    assert [s["plan"] for s in would["steps"]] == ["thinned"] * 4 + ["stays"] and disk(store)
    done = vckpt.json("prune", store, "a", *THIN, "-y")
    assert [s["step"] for s in done["thinned"]] == [0, 5, 10, 12] and done["freed_bytes"] == would["freed_bytes"]
    assert all(s["bytes"] == 2 * 8000 + 8 for s in done["thinned"]) and left() == STEPS
    now = {s["step"]: s for s in vckpt.json("ls", store, "a")["steps"]}
    for step in STEPS[:4]:
        assert now[step]["time"] == rows[step]["time"] and now[step]["attributes"]["loss"] == LOSS[step]
        assert now[step]["bytes"] == rows[step]["bytes"] - (2 * 8000 + 8) and now[step]["entry"] > rows[20]["entry"]
        assert exported(vckpt, store, step) == {n: b for n, b in before[step].items() if not n.startswith("opt")}
    assert exported(vckpt, store, 20) == before[20]
    new = disk(store)
    for _ in range(2):
        vckpt("gc", store, "--grace", "0", "-q")
    assert new - disk(store) == done["freed_bytes"]
    assert vckpt.json("verify", store)["faults"] == 0 and vckpt.json("verify", store, "--paranoid")["faults"] == 0
    again = vckpt.json("prune", store, "a", *THIN, "-y")
    assert not again["thinned"] and not again["removed"] and again["freed_bytes"] is None
    # its facts stay, and the one that was saved last is still that
    plan = vckpt.json("prune", store, "a", "--keep-if", "score == 7", "-n")["steps"]
    assert [s["kept_by"] for s in plan] == [[], ["tagged", "keep-if=score == 7"], [], [], ["highest", "newest", "last"]]


def test_rm_knows_what_was_saved_last(vckpt, store, left):
    vckpt("prune", store, "a", *THIN, "-y", "-q")
    done = vckpt("rm", store, "a", "--keep-last", "1", "-y")
    assert left() == [20] and "was saved last" not in done.stderr, done.stderr


def test_a_thinned_component_is_named(vckpt, store):
    vckpt("prune", store, "a", *THIN, "-y", "-q")
    for words in (["cat", store, "a/5/optimizer/m"], ["ls", store, "a/5/optimizer"]):
        done = vckpt(*words, check=False)
        assert done.returncode == 1 and "component 'optimizer' of a/5 was thinned" in done.stderr, done.stderr
    done = vckpt("cat", store, "a/5/optimiser/m", check=False)
    assert "a/5 has no file optimiser/m" in done.stderr


def test_a_pinned_step_is_not_thinned(vckpt, store, facts, left):
    facts(5, pin=1)
    assert [s["step"] for s in vckpt.json("prune", store, "a", *THIN, "-n")["steps"] if s["plan"] == "thinned"] == [
        0, 10, 12]
    code, out, said = asked(vckpt, lambda: facts(10, pin=1), "prune", store, "a", *THIN)
    assert code == 0 and "a/10 is pinned, so it is not thinned" in out, (out, said)
    names = {step: set(exported(vckpt, store, step)) for step in STEPS}
    assert [step for step in STEPS if "optimizer.safetensors" in names[step]] == [5, 10, 20]


def test_a_component_that_only_steps_have_which_are_not_thinned(vckpt, store, facts, template):
    """It is no mistake in the name."""
    facts(5, pin=1)
    for step in (0, 10, 12, 20, 30):
        vckpt("import", store, f"a/{step}", template / "w.npy", "--replace", "-q")
    done = vckpt.json("prune", store, "a", *THIN, "-y")
    assert not done["thinned"] and {s["plan"] for s in done["steps"]} == {"stays"}


def test_a_step_of_that_component_alone_is_left(vckpt, store, left, template):
    """And the others are thinned."""
    thin = ["--thin", "model", "--older-than", "0s"]
    vckpt("import", store, "a/10", template / "w.npy", "--replace", "-q")
    vckpt("import", store, "a/20", template / "source", "--replace", "-q")
    why = "a/10 has no tensors but those of 'model', so it stays as it is (vckpt rm removes it)"
    said = vckpt("prune", store, "a", *thin, "-n")
    assert why in said.stdout.splitlines() and "3 lose model" in said.stdout, said
    done = vckpt.json("prune", store, "a", *thin, "-y")
    assert [s["step"] for s in done["thinned"]] == [0, 5, 12] and left() == STEPS
    assert [(s["step"], s["why"]) for s in done["kept"]] == [(10, why)] and not done["failed"]
    assert {s["step"]: s["plan"] for s in done["steps"]}[10] == "stays"
    assert vckpt("prune", store, "b", *thin, "-y").returncode == 0


@pytest.mark.parametrize("command", ["prune", "thin", "sync", "rm"])
def test_a_storage_that_does_not_permit(vckpt, build, store, left, tmp_path, command):
    """EPERM of the storage is no pin: the command fails."""
    words = ["prune", store, "a", "--keep-last", "2", "-y"]
    if command == "thin":
        words = ["prune", store, "a", *THIN, "-y"]
    elif command == "sync":
        shutil.move(store, tmp_path / "from")
        vckpt("init", store)
        vckpt("copy", tmp_path / "from", "a", "--to", store)
        vckpt("rm", tmp_path / "from", "a/0..5")
        words = ["sync", tmp_path / "from", "--to", store, "--delete"]
    elif command == "rm":
        words = ["rm", store, "a/0"]
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    faults = f"root={store},calls=linkat,path=runs/a/,at=1,last=1000000,do=fail,errno={errno.EPERM}"
    done = subprocess.run([vckpt.path, *map(str, words)], env=dict(os.environ, LD_PRELOAD=preload,
                          VCKPT_INTERPOSE=faults), capture_output=True, text=True)
    # a thinning that cannot be aborted either is undecided
    assert done.returncode == (5 if command == "thin" else 1), done
    assert "Operation not permitted" in done.stderr and left() == STEPS, done


@pytest.mark.parametrize("what", ["remove", "replace"])
def test_thinned_never_when_gone(vckpt, store, left, template, what):
    def change():
        if what == "remove":
            vckpt("rm", store, "a/10")
        else:
            vckpt("import", store, "a/10", template / "w.npy", "--replace")
    code, out, said = asked(vckpt, change, "prune", store, "a", *THIN)
    assert code == 0 and "step 10 was removed or replaced by another writer" in out, (out, said)
    assert (10 in left()) == (what == "replace")
    assert vckpt.json("verify", store)["faults"] == 0


def test_removed_and_thinned_at_once(vckpt, store, left):
    before = disk(store)
    done = vckpt.json("prune", store, "a", "--keep-last", "3", *THIN, "-y")
    assert left() == [10, 12, 20] and [s["step"] for s in done["thinned"]] == [10, 12]
    added = disk(store) - before
    for _ in range(2):
        vckpt("gc", store, "--grace", "0", "-q")
    assert before + added - disk(store) == done["freed_bytes"] and vckpt.json("verify", store)["faults"] == 0


def test_a_thinned_step_is_a_base(vckpt, store, template):
    vckpt("prune", store, "a", "--keep-step", "12", *THIN, "-y", "-q")
    out = store.parent / "out"
    vckpt("export", store, "a/12", out, "-q")
    vckpt("import", store, "a/30", out, "-q")
    row = vckpt.json("ls", store, "a")["steps"][-1]
    assert row["step"] == 30 and row["new_bytes"] < 8000
    assert vckpt.json("verify", store)["faults"] == 0


# ---- policies ----

def test_policy(vckpt, store, left):
    assert vckpt.json("policy", store, "a") == {"run": "a", "rules": [], "time": None, "host": None}
    assert "has no policy" in vckpt("policy", store, "a", "show").stdout
    shown = vckpt.json("policy", store, "a", "set", "--keep-last", "2", "--keep-best", "1:loss", "--warn-free", "10G")
    assert shown["rules"] == ["keep-last=2", "keep-best=1:loss", "warn-free=10G"]
    assert vckpt("policy", store, "a").stdout.splitlines()[:3] == shown["rules"]
    plan = vckpt.json("prune", store, "-n")
    assert plan["runs"][0]["policy"] and not plan["runs"][1]["policy"]
    vckpt("prune", store, "-y", "-q")
    assert left() == [12, 20] and left("b") == [1, 2]
    vckpt("policy", store, "a", "clear")
    assert vckpt.json("policy", store, "a")["rules"] == []
    assert vckpt("prune", store, "a", "-y", check=False).returncode == 2


@pytest.mark.parametrize("words, said", [
    (["a", "set"], "give rules"), (["a", "--keep-last", "2"], "rules are given with set"),
    (["a", "clear", "--keep-last", "2"], "rules are given with set"), (["a", "list"], "give show, set or clear"),
    (["a/5", "show"], "a policy is that of a RUN"), (["a", "set", "--keep-last", "x"], "a number from 1 on"),
    (["c", "set", "--keep-last", "1"], "there is no run c"),
    (["9", "set", "--keep-last", "1"], "there is no run 9"), (["latest"], "there is no run latest")])
def test_policy_refused(vckpt, store, words, said):
    done = vckpt("policy", store, *words, check=False)
    assert done.returncode in (1, 2) and said in done.stderr, done.stderr


def test_a_policy_keeps_a_step_that_is_gone(vckpt, store, left):
    """It may have been removed by hand: the rule keeps nothing then."""
    vckpt("policy", store, "a", "set", "--keep-step", "5,12", "--keep-step", "0")
    vckpt("rm", store, "a/5", "a/0")
    assert vckpt("prune", store, "a", "-y").returncode == 0 and left() == [12, 20]


def test_a_policy_of_a_newer_vckpt(vckpt, lib, store, left):
    with listed(lib, store) as l:
        assert factslib.policy_put(l, "keep-last=1", "keep-monthly=3") == 0
    done = vckpt("prune", store, "a", "-y", check=False)
    assert done.returncode == 1 and left() == STEPS
    assert "the policy of run a: the rule 'keep-monthly=3'" in done.stderr and "update vckpt" in done.stderr
    assert vckpt("policy", store, "a").stdout.splitlines()[1] == "keep-monthly=3"
    assert vckpt("prune", store, "a", "--keep-last", "4", "-y").returncode == 0 and left() == STEPS[1:]


def test_many_steps(vckpt, build, tmp_path, scale):
    many = scale(300, 10000)
    store = tmp_path / "store"
    vckpt("init", store)
    np.save(tmp_path / "w.npy", np.arange(10, dtype="f4"))
    vckpt("import", store, "r/0", tmp_path / "w.npy", "-q")
    subprocess.run([build / "tests/bench_aged", store, "r", str(many), "0"], check=True)
    plan = vckpt.json("prune", store, "r", "--keep-last", "100", "--keep-every", "1000", "--keep-if", "step < 5", "-n")
    assert len(plan["steps"]) == many + 1
    kept = [s["step"] for s in plan["steps"] if s["plan"] == "stays"]
    assert kept == [n for n in range(many + 1) if n < 5 or n % 1000 == 0 or n > many - 100]
