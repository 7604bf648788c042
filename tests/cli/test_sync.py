# SPDX-License-Identifier: Apache-2.0
"""vckpt sync: another store follows; and the facts of steps (pins, tags, attributes, policies) in both commands."""
import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from factslib import EMPTY, all_said, change, merged, policy, policy_put, tagged
from storelib import Api


@pytest.fixture
def pair(vckpt, lib, tmp_path):
    """Two stores, a and b; put(run, step, value) imports into a; lists(store, run)."""
    return Pair(vckpt, lib, tmp_path)


class Pair:
    def __init__(self, vckpt, lib, folder):
        self.vckpt, self.lib, self.folder, self.a, self.b = vckpt, lib, folder, folder / "a", folder / "b"
        for path in self.a, self.b:
            vckpt("init", path, "--no-reserve")

    def put(self, target, value, store=None, *words):
        save_file({"w": np.full(9000, value, "f4")}, self.folder / "w.safetensors")
        self.vckpt("import", store or self.a, target, self.folder / "w.safetensors", "-q", *words)

    def steps(self, store, run="r"):
        return [s["step"] for s in self.vckpt.json("ls", store, run)["steps"]]

    def value(self, store, target):
        data = self.vckpt("cat", store, f"{target}/model/w.npy", text=False).stdout
        return float(np.frombuffer(data[4096:], "f4")[0])

    def sync(self, *words, **more):
        return self.vckpt.json("sync", self.a, *words, "--to", self.b, **more)

    def list(self, store, run="r"):
        api = Api(self.lib, store, init=False)
        return api.list(run)


def outcomes(done):
    return [(s["step"], s["outcome"]) for s in done["steps"]]


def test_it_follows(pair):
    for step in range(3):
        pair.put(f"r/{step}", step)
    assert outcomes(pair.sync()) == [(0, "copied"), (1, "copied"), (2, "copied")]
    assert outcomes(pair.sync()) == []                          # nothing is compared anew
    pair.put("r/3", 3)
    pair.put("r/1", 10, None, "--replace")
    pair.put("other/7", 7)
    assert outcomes(pair.sync("r")) == [(1, "copied"), (3, "copied")]
    assert pair.value(pair.b, "r/1") == 10 and [r["run"] for r in pair.vckpt.json("ls", pair.b)["runs"]] == ["r"]
    assert outcomes(pair.sync()) == [(7, "copied")]
    pair.vckpt("verify", pair.b)


def test_steps_of_others_stay(pair):
    for step in range(2):
        pair.put(f"r/{step}", step)
    pair.put("r/0", 0, pair.b)
    pair.put("r/1", 5, pair.b)
    pair.put("r/9", 9, pair.b)
    done = pair.vckpt("sync", pair.a, "--to", pair.b, "--delete", check=False)
    assert done.returncode == 1 and "r/1: " in done.stderr and pair.value(pair.b, "r/1") == 5
    pair.vckpt("sync", pair.a, "--to", pair.b, "--replace", "--delete")
    assert pair.value(pair.b, "r/1") == 1 and pair.steps(pair.b) == [0, 1, 9]


def test_delete(pair):
    for step in range(4):
        pair.put(f"r/{step}", step)
    pair.sync()
    change(pair.list(pair.b), 1, pin=1, reason="mine")
    pair.put("r/8", 8, pair.b)
    pair.vckpt("rm", pair.a, "r/0", "r/1", "r/2")
    assert pair.sync()["removed"] == [] and pair.steps(pair.b) == [0, 1, 2, 3, 8]
    assert [r["step"] for r in pair.sync("--delete")["removed"]] == [0, 2]
    assert pair.steps(pair.b) == [1, 3, 8]                      # pinned there; there in both; another writer's
    pair.vckpt("rm", pair.a, "r/3")
    done = pair.vckpt("sync", pair.a, "--to", pair.b, "--delete", check=False)
    assert done.returncode == 1 and "run r has no step: nothing is removed" in done.stderr
    assert pair.steps(pair.b) == [1, 3, 8]
    pair.vckpt("verify", pair.b)


def test_a_step_that_was_repacked_there_goes_too(pair):
    for step in range(3):
        pair.put(f"r/{step}", step)
    pair.sync()
    pair.vckpt("repack", pair.b, "r/0", "r/1", "-q")
    pair.put("r/7", 7, pair.b)
    pair.vckpt("repack", pair.b, "r/7", "-q")                   # never a copy
    change(pair.list(pair.a), 1, tags=["best"])
    pair.vckpt("rm", pair.a, "r/0")
    done = pair.sync("--delete")
    assert outcomes(done) == [] and [r["step"] for r in done["removed"]] == [0]
    assert pair.steps(pair.b) == [1, 2, 7] and all_said(pair.list(pair.b)) == {1: (None, ("best",), {})}


def test_a_damaged_list_removes_nothing(pair):
    for step in range(3):
        pair.put(f"r/{step}", step)
    pair.sync()
    pair.vckpt("rm", pair.a, "r/0")
    entry = sorted((pair.a / "runs/r").glob("0*"))[1]
    entry.write_bytes(b"x" * entry.stat().st_size)
    done = pair.vckpt("sync", pair.a, "--to", pair.b, "--delete", check=False)
    assert done.returncode == 1 and "has damaged entries" in done.stderr and pair.steps(pair.b) == [0, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_following_until_a_signal(pair, number):
    pair.put("r/0", 0)
    p = subprocess.Popen([pair.vckpt.path, "sync", pair.a, "--to", pair.b, "--follow"], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert "r/step-00000000: " in p.stdout.readline()
    pair.put("r/1", 1)
    assert "r/step-00000001: " in p.stdout.readline()
    pair.put("new/5", 5)                                        # a run that was not there
    assert "new/step-00000005: " in p.stdout.readline()
    change(pair.list(pair.a), 1, tags=["best"])
    wait_until(lambda: all_said(pair.list(pair.b)) == {1: (None, ("best",), {})})
    p.send_signal(number)
    out, err = p.communicate(timeout=120)
    assert (p.returncode, err) == (0, "") and "3 steps copied" in out
    assert pair.vckpt.json("ls", pair.b, "--incoming")["incoming"] == []


def wait_until(ready):
    for _ in range(1200):
        if ready():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")


# ---- the facts of steps ----

def test_what_is_said_comes_along(pair):
    for step in range(3):
        pair.put(f"r/{step}", step, None, "--set", "loss=1")
    a = pair.list(pair.a)
    change(a, 0, pin=1, reason="a \u202etext")
    change(a, 1, tags=["best", "sent"], set={"loss": "0.5", "eval": "7"})
    policy_put(a, "keep-last=3")
    pair.vckpt("copy", pair.a, "r", "--to", pair.b)
    b = pair.list(pair.b)
    assert all_said(b) == all_said(a) and policy(b) == ["keep-last=3"] and tagged(b, "best") == 1
    assert merged(b, 1) == [("eval", "7"), ("loss", "0.5")] and merged(b, 2) == [("loss", "1")]
    assert pair.vckpt("rm", pair.b, "r/0", check=False).returncode == 1                     # the pin counts
    entries = len(list((pair.b / "runs/r").glob("0*")))
    pair.vckpt("copy", pair.a, "r", "--to", pair.b)
    assert len(list((pair.b / "runs/r").glob("0*"))) == entries                             # nothing to say
    pair.vckpt("verify", pair.b)


def test_what_is_said_later_follows(pair):
    for step in range(3):
        pair.put(f"r/{step}", step)
    pair.sync()
    a, b = pair.list(pair.a), pair.list(pair.b)
    change(b, 2, pin=1, reason="mine", tags=["own"])
    change(a, 0, tags=["best"], set={"k": "1", "l": "2"}, pin=1, reason="why")
    assert pair.sync()["facts"] == 2
    assert all_said(pair.list(pair.b)) == {0: ("why", ("best",), {"k": "1", "l": "2"}), 2: ("mine", (), {})}
    change(a, 0, pin=-1, set={"k": None, "l": "3"})
    change(a, 1, tags=["best"])
    pair.sync()
    assert all_said(pair.list(pair.b)) == {0: ("why", (), {"l": "3"}), 1: (None, ("best",), {}), 2: ("mine", (), {})}
    assert pair.sync()["facts"] == 0
    pair.vckpt("copy", pair.a, "r/0", "--to", pair.b)           # adds, and takes nothing away
    change(b := pair.list(pair.b), 0, tags=["kept"])
    pair.vckpt("copy", pair.a, "r/0", "--to", pair.b)
    assert all_said(pair.list(pair.b))[0] == ("why", ("kept",), {"l": "3"})


def test_a_pinned_step_is_not_replaced(pair):
    """Also where the step that is to take its place is pinned, too."""
    pair.put("r/0", 0)
    pair.put("r/1", 1)
    pair.sync()
    change(pair.list(pair.b), 0, pin=1, reason="mine")
    pair.put("r/0", 5, None, "--replace")
    change(pair.list(pair.a), 0, pin=1, reason="theirs")
    for words in ["sync"], ["copy", "--replace"]:
        done = pair.vckpt(words[0], pair.a, "--to", pair.b, *words[1:], check=False)
        assert done.returncode == 1 and "mine" in done.stderr and pair.value(pair.b, "r/0") == 0, done
    change(pair.list(pair.b), 0, pin=-1)
    pair.sync()
    assert pair.value(pair.b, "r/0") == 5 and all_said(pair.list(pair.b)) == {0: ("theirs", (), {})}


def test_steps_that_are_thinned(pair):
    """Here: the copy is replaced, and says what it lost. There: it is left alone."""
    save_file({"w": np.arange(5000, dtype="f4")}, pair.folder / "model.safetensors")
    save_file({"m": np.arange(9000, dtype="f4")}, pair.folder / "optimizer.safetensors")
    for step in range(4):
        pair.vckpt("import", pair.a, f"r/{step}", pair.folder / "model.safetensors", "--component", "optimizer",
                   pair.folder / "optimizer.safetensors", "-q")
    pair.sync()
    thin = ["r", "--keep-last", "9", "--thin", "optimizer", "--older-than", "0s", "--yes", "-q"]
    pair.vckpt("prune", pair.b, *thin)
    assert len(components(pair, pair.b, 0)) == 1 and outcomes(pair.sync()) == []
    entry = pair.vckpt.json("info", pair.b, "r/0")["entry"]
    pair.vckpt("rm", pair.b, "r", "--yes")
    pair.sync()
    pair.vckpt("prune", pair.a, *thin)
    done = outcomes(pair.sync())
    assert (0, "copied") in done and pair.vckpt.json("info", pair.b, "r/0")["entry"] != entry
    assert components(pair, pair.b, 0) == components(pair, pair.a, 0) == ["model"]
    said = [pair.vckpt("cat", store, "r/0/optimizer/m.npy", check=False).stderr for store in (pair.a, pair.b)]
    assert said[0] == said[1] and "was thinned" in said[0]
    pair.vckpt("verify", pair.b)


def components(pair, store, step):
    return [c["component"] for c in pair.vckpt.json("ls", store, f"r/{step}")["components"]]


def test_a_policy_is_for_copies_alone(pair):
    """A stranger's rule never applies to steps of one's own; a newer one there stays."""
    pair.put("r/0", 0)
    pair.put("s/0", 0)
    policy_put(pair.list(pair.a), "keep-last=1")
    policy_put(pair.list(pair.a, "s"), "keep-last=1")
    pair.put("r/5", 5, pair.b)
    pair.sync()
    assert policy(pair.list(pair.b)) is None and policy(pair.list(pair.b, "s")) == ["keep-last=1"]
    policy_put(pair.list(pair.b, "s"), "keep-last=9")
    pair.sync()
    assert policy(pair.list(pair.b, "s")) == ["keep-last=9"]
    policy_put(pair.list(pair.a, "s"), "keep-last=2")
    pair.sync()
    assert policy(pair.list(pair.b, "s")) == ["keep-last=2"]


def test_a_store_without_the_word(pair, tmp_path):
    """What is said stays behind, with one warning; the steps come."""
    shutil.unpack_archive(os.path.join(os.path.dirname(__file__), "../golden/v2-list-3/store.tar.xz"), tmp_path)
    for step in range(2):
        pair.put(f"new/{step}", step)
        change(pair.list(pair.a, "new"), step, tags=[f"t{step}"])
    done = pair.vckpt("copy", pair.a, "new", "--to", tmp_path / "store")
    assert done.stderr.count("list-4") == 1 and pair.steps(tmp_path / "store", "new") == [0, 1]
    assert all_said(pair.list(tmp_path / "store", "new")) == {} and EMPTY


def test_wrong_words(pair):
    for words, text in [(["r/1"], "whole runs"), (["none"], "there is no run none"), (["a b"], "run's name")]:
        done = pair.vckpt("sync", pair.a, *words, "--to", pair.b, check=False)
        assert done.returncode in (1, 2) and text in done.stderr, done
    assert "--to STORE2 is missing" in pair.vckpt("sync", pair.a, check=False).stderr


def test_delete_beside_another_copy(pair, build, tmp_path):
    """What another process copies behind the back of a pass, from a step that this pass has not seen, stays."""
    pair.put("r/1", 1)
    pair.put("r/2", 2)
    pair.sync()
    pair.vckpt("rm", pair.a, "r/1", "-y", "-q")
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={pair.b},reads=1,path=runs/r,do=stop,at=1", LD_PRELOAD=preload,
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    p = subprocess.Popen([pair.vckpt.path, "sync", pair.a, "--to", pair.b, "--delete"], env=env, stderr=subprocess.PIPE,
                         text=True)
    assert os.WIFSTOPPED(os.waitpid(p.pid, os.WUNTRACED)[1])            # it has read the source's list
    pair.put("r/3", 3)
    pair.vckpt("copy", pair.a, "r/3", "--to", pair.b)
    p.send_signal(signal.SIGCONT)
    assert p.communicate(timeout=120)[1] == "" and p.returncode == 0
    assert pair.steps(pair.b) == [2, 3]


def test_a_step_that_is_removed_while_it_is_copied(pair, build):
    """The copy that it was to replace stays as it is, and nothing of the attempt is left."""
    pair.put("r/1", 1)
    pair.sync()
    pair.put("r/1", 2, None, "--replace")
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={pair.b},path=incoming/,do=stop,at=1", LD_PRELOAD=preload,
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    p = subprocess.Popen([pair.vckpt.path, "sync", pair.a, "--to", pair.b], env=env, stderr=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(p.pid, os.WUNTRACED)[1])
    pair.vckpt("rm", pair.a, "r/1", "-y", "-q")
    p.send_signal(signal.SIGCONT)
    p.communicate(timeout=120)
    assert pair.steps(pair.b) == [1] and pair.vckpt.json("ls", pair.b, "--incoming")["incoming"] == []
