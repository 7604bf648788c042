# SPDX-License-Identifier: Apache-2.0
"""vckpt metrics: Prometheus text, and that the examples in docs/ name what is printed."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import numpy as np
import pytest

import vckpt as package
from ranklib import api  # noqa: F401
from storelib import save
from test_incoming import close, opened, write

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALERTS, BOARD = ROOT / "docs/examples/alerts.yml", ROOT / "docs/examples/grafana.json"
SAMPLE = re.compile(r'(vckpt_[a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')


def parse(text):
    """{(name, run or None): value}; each metric has HELP and TYPE first, and its samples together."""
    found, heads, at = {}, [], None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            at = line.split()[2]
            assert at not in heads and len(line.split()) > 3
            heads.append(at)
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {at} gauge"
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            labels = {k: v for k, v in re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', labels)}
            assert name == at and labels["store"]
            assert (name, labels.get("run")) not in found
            found[name, labels.get("run")] = float(value)
    return found


def metrics(vckpt, store, **more):
    return parse(vckpt("metrics", store, **more).stdout)


def test_numbers(vckpt, tmp_path):
    store, before = tmp_path / "store", time.time()
    with package.Saver(store / "a", pin="no") as saver:
        for step in (3, 9, 7):
            saver.save({"w": np.full(10000, step, "f4")}, step=step)
    np.save(tmp_path / "w.npy", np.arange(1000, dtype="f4"))
    vckpt("import", store, "b", tmp_path / "w.npy")
    found, ls = metrics(vckpt, store), {r["run"]: r for r in vckpt.json("ls", store)["runs"]}
    for run in "ab":
        assert found["vckpt_run_readable", run] == 1 and found["vckpt_run_failed_saves", run] == 0
        assert found["vckpt_run_steps", run] == ls[run]["steps"]
        assert found["vckpt_run_bytes", run] == ls[run]["bytes"]
        assert found["vckpt_run_added_bytes", run] == ls[run]["new_bytes"]
        assert before - 1 < found["vckpt_run_last_commit_timestamp_seconds", run] < time.time() + 1
    assert found["vckpt_run_newest_step", "a"] == 7
    step = vckpt.json("info", store, "a/7")
    assert found["vckpt_run_last_save_bytes", "a"] == step["logical_bytes"]
    assert found["vckpt_run_last_save_added_bytes", "a"] == step["new_bytes"]
    took, stall = (found[f"vckpt_run_last_save_{what}seconds", "a"] for what in ("", "stall_"))
    assert 0 < stall <= took < time.time() - before
    assert ("vckpt_run_last_save_seconds", "b") not in found and ("vckpt_run_last_failure_timestamp_seconds",
                                                                  "a") not in found
    packs = list((store / "packs").rglob("*.pack"))
    assert found["vckpt_store_packs", None] == len(packs)
    assert found["vckpt_store_pack_bytes", None] == sum(p.stat().st_size for p in packs)
    room = os.statvfs(store)
    assert 0 < found["vckpt_store_free_bytes", None] <= found["vckpt_store_size_bytes", None] == (room.f_blocks *
                                                                                                  room.f_frsize)
    assert found["vckpt_store_damaged_packs", None] == found["vckpt_store_saves_under_way", None] == 0


def test_failed_saves(api, vckpt):  # noqa: F811
    save(api, "r")
    launches = opened(api, "r", "one", 2)
    for count in (1, 2):
        attempts = [launch.begin() for launch in launches]
        write(attempts[0])
        assert metrics(vckpt, api.path)["vckpt_store_saves_under_way", None] == 1
        vckpt("abort", api.path, "r")
        found = metrics(vckpt, api.path)
        assert found["vckpt_run_failed_saves", "r"] == found["vckpt_run_failed_saves_since_commit", "r"] == count
        assert abs(found["vckpt_run_last_failure_timestamp_seconds", "r"] - time.time()) < 120
        close([], attempts)
    attempts = [launch.begin() for launch in launches]
    for attempt in attempts:
        write(attempt)
    attempts[0].wait()
    close(launches, attempts)
    found = metrics(vckpt, api.path)
    assert found["vckpt_run_failed_saves", "r"] == 2 and found["vckpt_run_failed_saves_since_commit", "r"] == 0


def test_damage(vckpt, two_steps, tmp_path):
    """A run that cannot be read hides no other, and the exit status says so."""
    store = shutil.copytree(two_steps / "store", tmp_path / "store")
    vckpt("import", store, "other", two_steps / "w.npy")
    os.truncate(store / "runs/run/000000000000", 10)
    done = vckpt("metrics", store, check=False)
    found = parse(done.stdout)
    assert done.returncode == 3 and "run run: " in done.stderr
    assert found["vckpt_run_readable", "run"] == 0 and found["vckpt_run_readable", "other"] == 1
    pack = max((store / "packs").rglob("*.pack"), key=lambda path: path.stat().st_size)
    with open(pack, "r+b") as file:
        file.seek(4200)
        file.write(b"\xff\xfe\xfd")
    assert vckpt("verify", store, check=False).returncode == 3
    assert parse(vckpt("metrics", store, check=False).stdout)["vckpt_store_damaged_packs", None] == 1


def test_no_json(vckpt, two_steps):
    done = vckpt("metrics", two_steps, "--json", check=False)
    assert (done.returncode, done.stdout) == (2, "") and "Prometheus and has no --json" in done.stderr, done


def test_output_is_put_in_one_moment(vckpt, two_steps, tmp_path):
    out = tmp_path / "vckpt.prom"
    out.write_text("old")
    inode = out.stat().st_ino
    assert vckpt("metrics", two_steps / "store", "--output", out).stdout == ""
    assert parse(out.read_text()) and out.stat().st_ino != inode and os.listdir(tmp_path) == ["vckpt.prom"]
    done = vckpt("metrics", two_steps / "store", "-o", tmp_path / "none/x.prom", check=False)
    assert done.returncode == 1 and "none/x.prom" in done.stderr


def test_names_are_escaped(vckpt, two_steps, tmp_path):
    store = shutil.copytree(two_steps / "store", tmp_path / 'a "b"\\c\nd')
    (line,) = [line for line in vckpt("metrics", store).stdout.splitlines() if line.startswith("vckpt_store_packs")]
    assert SAMPLE.fullmatch(line) and 'a \\"b\\"\\\\c\\nd"' in line
    odd = os.fsencode(tmp_path) + b"/\xff"
    shutil.copytree(os.fsencode(two_steps / "store"), odd)
    done = subprocess.run([vckpt.path.encode(), b"metrics", odd], capture_output=True, check=True)
    assert b'/?"}' in done.stdout and done.stdout.decode()


# ---- what docs/ names ----

def printed(vckpt, two_steps):
    mount = (ROOT / "fs/control.c").read_text()
    of_mount = {f"vckpt_{name}" for name in re.findall(r'\b(?:\w*metric|head)\(b, "(\w+)"', mount)}
    assert {"vckpt_cache_hits_total", "vckpt_requests_total"} <= of_mount
    heads = re.findall(r"^# TYPE (\w+)", vckpt("metrics", two_steps / "store").stdout, re.M)
    return of_mount | set(heads), set(heads)


def test_examples_name_what_is_printed(vckpt, two_steps):
    every, own = printed(vckpt, two_steps)
    rules = [dict(re.findall(r"^ +([a-z]+): (.+)$", "        alert: " + text, re.M)) for text in
             re.split(r"^      - alert: ", ALERTS.read_text(), flags=re.M)[1:]]
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "summary", "description"} and rule["summary"]
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"]) and rule["labels"] in ("{severity: page}", "{severity: ticket}")
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board["templating"]["list"]]
    for text in [rule["expr"] for rule in rules] + queries:
        named = set(re.findall(r"\bvckpt_\w+", text))
        assert named <= every, named - every
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
    assert len(rules) > 5 and len(queries) > 10
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    page = (ROOT / "docs/monitoring.md").read_text()
    assert {name for name in re.findall(r"`(vckpt_\w+)`", page)} == own


def test_promtool(vckpt, two_steps):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: prometheus)")
    text = vckpt("metrics", two_steps / "store").stdout
    subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=True)
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True)


def test_output_that_is_no_file(vckpt, two_steps, tmp_path):
    """A link stays one, and what no file can take the place of is written to."""
    (tmp_path / "link").symlink_to("true.prom")
    (tmp_path / "true.prom").write_text("old")
    vckpt("metrics", two_steps / "store", "-o", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and parse((tmp_path / "true.prom").read_text())
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as cat:
        vckpt("metrics", two_steps / "store", "-o", tmp_path / "pipe")
        assert parse(cat.communicate(timeout=120)[0])
    assert (tmp_path / "pipe").is_fifo() and len(os.listdir(tmp_path)) == 3
