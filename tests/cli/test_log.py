# SPDX-License-Identifier: Apache-2.0
"""vckpt log: what happened to a run, newest first, against a record of what was done to it."""
import ctypes
import json
import os
import shutil
import socket

import numpy as np
import pytest

from factslib import change
from ranklib import api  # noqa: F401
from storelib import save
from test_incoming import close, opened, write
from test_schema import check, manual

HOST = socket.gethostname().split(".")[0]


def log(vckpt, store, run, *words):
    out = vckpt.json("log", store, run, *words)
    check(out, manual()["log"])
    return out


def short(row):
    """(what, step, what became of it)"""
    return row["what"], row.get("step"), next((how for how in ("removed", "replaced") if f"{how}_by" in row), "")


class History:
    """A run, and what `log` has to say of it, newest first."""

    def __init__(self, vckpt, store, rng):
        self.vckpt, self.store, self.rng, self.events, self.visible = vckpt, store, rng, [], {}
        vckpt("init", store)
        self.file = store.with_name("w.npy")
        self.count = 0

    def gone(self, step, how):
        event = self.visible.pop(step)
        event[2] = how

    def act(self):
        if self.visible and self.rng.random() < 0.3:
            step = self.rng.choice(sorted(self.visible))
            self.vckpt("rm", self.store, f"r/{step}", "-q")
            self.gone(step, "removed")
            self.events.insert(0, ["removed", step, ""])
            return
        step, self.count = self.rng.randrange(6), self.count + 1
        np.save(self.file, np.full(1000, self.count, "f4"))
        self.vckpt("import", self.store, f"r/{step}", self.file, "--replace", "-q", "--no-index", "--set",
                   f"n={self.count}")
        if step in self.visible:
            self.gone(step, "replaced")
        self.events.insert(0, ["saved", step, ""])
        self.visible[step] = self.events[0]


@pytest.fixture
def history(vckpt, tmp_path, rng):
    return History(vckpt, tmp_path / "store", rng)


def test_log_is_what_was_done(vckpt, history, rng):
    for _ in range(30):
        history.act()
    out = log(vckpt, history.store, "r")
    assert [list(short(row)) for row in out["log"]] == history.events and out["collected_before"] is None
    assert [row["entry"] for row in out["log"]] == sorted((row["entry"] for row in out["log"]), reverse=True)
    for n in (1, 2, rng.randint(3, 29), 1000):
        assert log(vckpt, history.store, "r", "-n", n)["log"] == out["log"][:n]
    steps = {step["step"]: step for step in vckpt.json("ls", history.store, "r")["steps"]}
    shown = {row["step"]: row for row in out["log"] if row["what"] == "saved" and row["visible"]}
    assert shown.keys() == steps.keys()
    for number, step in steps.items():
        row = shown[number]
        assert all(row[key] == step[key] for key in ("bytes", "new_bytes", "attributes", "entry", "attempt"))
        assert row["host"].startswith(HOST[:8]) and row["attempt"].startswith(row["launch"] + "-")
    by = {row["entry"]: row for row in out["log"]}
    for row in out["log"]:
        if row["what"] == "removed":
            assert any(by[e]["step"] == row["step"] and by[e].get("removed_by") == row["entry"] for e in by)


def test_what_was_collected(api, vckpt, rng):  # noqa: F811
    """Steps that are still there are shown; that nothing else is known of what was before is said."""
    for step in range(330):
        save(api, "r", step)
        if rng.random() < 0.3:
            api.remove_step("r", step)
    before = log(vckpt, api.path, "r")
    vckpt("gc", api.path, "--grace", "0")
    after = log(vckpt, api.path, "r")
    head = after["collected_before"]
    assert head >= 64 and before["collected_before"] is None

    def newer(out):     # a removal may be of a commit whose entry was collected
        return [(row["entry"], row["what"], row["host"], row.get("visible")) for row in out["log"] if
                row["entry"] >= head]
    assert newer(after) == newer(before)
    assert [(row["entry"], row["step"], row["host"]) for row in after["log"] if row["entry"] < head] == [
        (row["entry"], row["step"], None) for row in before["log"] if row["entry"] < head and row.get("visible")]
    assert log(vckpt, api.path, "r", "-n", "3")["log"] == after["log"][:3]
    assert f"entries before {head} were collected" in vckpt("log", api.path, "r").stdout
    assert "collected" not in vckpt("log", api.path, "r", "-q").stdout


def test_failed_saves_have_their_reason(api, vckpt):  # noqa: F811
    save(api, "r")
    launches = opened(api, "r", "one", 2)
    attempts = [launch.begin() for launch in launches]
    write(attempts[0])
    vckpt("abort", api.path, "r", "--reason", "the node\x1b is to be repaired")
    close(launches, attempts)
    out = log(vckpt, api.path, "r")["log"]
    assert [row["what"] for row in out] == ["failed", "saved"]
    assert out[0]["reason"].startswith("the node") and out[0]["attempt"] == attempts[0].name and "host" in out[0]
    said = vckpt("log", api.path, "r").stdout
    assert "failed" in said and "is to be repaired" in said and "\x1b" not in said


def test_facts_and_reasons(api, vckpt):  # noqa: F811
    """What was said of steps later, and why others were removed."""
    for step in range(4):
        save(api, "r", step)
    with api.list("r") as l:
        change(l, 1, 1, reason="the paper's", tags=("best", "sent"), set={"loss": "0.5"})
        change(l, 2, 2, pin=1)
    api.call(api.lib.commit_step_remove, api.p, b"r", ctypes.c_uint64(3), b"diverged")
    vckpt("rm", api.path, "r/0", "--reason", "too\nearly")
    assert log(vckpt, api.path, "r", "-n", "1")["log"][0]["reason"] == "too\nearly"
    assert vckpt("log", api.path, "r", "-n", "1", "-H").stdout.count("\n") == 1
    assert "at most 1024 bytes" in vckpt("rm", api.path, "r/1", "--reason", "x" * 1025, check=False).stderr
    rows = {row["step"]: row for row in log(vckpt, api.path, "r")["log"] if row.get("visible")}
    removed = log(vckpt, api.path, "r", "-n", "2")["log"][1]
    assert (removed["what"], removed["step"], removed["reason"]) == ("removed", 3, "diverged")
    assert rows[1]["tags"] == ["best", "sent"] and rows[1]["attributes"] == {"loss": "0.5"}
    assert "pinned" not in rows[1] and rows[2]["pinned"]["reason"] == "" and 0 not in rows
    with api.list("r") as l:
        change(l, 1, 1, pin=1, reason="the paper's")
    said = vckpt("log", api.path, "r").stdout
    assert "best, sent; pinned: the paper's" in said and "diverged" in said and "loss=0.5" in said


def test_damage_is_shown(vckpt, history):
    for _ in range(6):
        history.act()
    rows = log(vckpt, history.store, "r")["log"]
    entry = next(row["entry"] for row in rows[1:] if row["what"] == "saved")
    os.truncate(history.store / f"runs/r/{entry:012}", 10)
    bad = [row for row in log(vckpt, history.store, "r")["log"] if row["what"] == "unreadable"]
    assert [row["entry"] for row in bad] == [entry] and bad[0]["reason"]


def test_a_file_far_away_is_no_hang(vckpt, two_steps, tmp_path):
    store = shutil.copytree(two_steps / "store", tmp_path / "store")
    (store / "runs/run/1152921504606846976").write_bytes(b"x")
    done = vckpt("log", store, "run", "--json", check=False, timeout=120)
    rows = json.loads(done.stdout)["log"]
    assert [row.get("step") for row in rows if row["what"] == "saved"] == [2, 1]


def test_what_people_see(vckpt, two_steps):
    lines = vckpt("log", two_steps / "store", "run").stdout.splitlines()
    assert lines[0].split() == ["STEP", "AGE", "WHAT", "SIZE", "ADDED", "BY", "ATTRIBUTES", "NOTE"]
    assert [line.split()[0] for line in lines[1:]] == ["step-00000002", "step-00000001"]
    bare = vckpt("log", two_steps / "store", "run", "-H", "--bytes", "--time", "-n", "1").stdout
    assert len(bare.splitlines()) == 1 and bare.split("\t")[3].isdigit() and "T" in bare.split("\t")[1]


@pytest.mark.parametrize("words, code, sentence", [
    (["none"], 1, "there is no run none"), (["9"], 1, "there is no run 9"), (["run/1"], 2, "give a RUN without a step"),
    (["run", "-n", "0"], 2, "--number 0: give a number from 1 on"), ([], 2, "RUN is missing"),
])
def test_what_is_refused(vckpt, two_steps, words, code, sentence):
    done = vckpt("log", two_steps / "store", *words, check=False)
    assert done.returncode == code and sentence in done.stderr, done.stderr
