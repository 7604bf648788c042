# SPDX-License-Identifier: Apache-2.0
"""A disk that fills is reported early: after a save, when two more would not fit, and before one that cannot."""
import os
import pathlib
import subprocess

import numpy
import pytest

import vckpt as package
from test_full_disk import make, small  # noqa: F401

MIB = 1 << 20


def fill(folder, leave):
    """Takes what is free, but for so many bytes."""
    room = os.statvfs(folder)
    with open(folder / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - leave)


def tree(store):
    return {p: p.stat().st_size for p in store.rglob("*") if p.is_file()}


def warnings(text):
    return [line for line in text.splitlines() if " free, less than " in line]


def test_import_warns(vckpt, small, tmp_path):  # noqa: F811
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 4, 1)
    make(tmp_path / "b.safetensors", 6, 2)
    assert not vckpt("import", store, "run", tmp_path / "a.safetensors").stderr
    said = vckpt("import", store, "run", tmp_path / "b.safetensors").stderr         # 13 MiB are left
    assert not warnings(said), said
    make(tmp_path / "c.safetensors", 5, 3)
    (line,) = warnings(vckpt("import", store, "run", tmp_path / "c.safetensors").stderr)
    assert f"run run: the file system mounted on {small} has " in line and "than two more saves like this need" in line
    assert not vckpt("import", store, "run", tmp_path / "c.safetensors").stderr     # which added nothing


def test_import_that_may_not_fit(vckpt, small, tmp_path):  # noqa: F811
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 30)
    before = tree(store)
    done = vckpt("import", store, "run", tmp_path / "a.safetensors", check=False)
    assert done.returncode == 1 and "this save may not fit: the file system mounted on" in done.stderr
    assert f"is full: nothing of this save is kept; the file system mounted on {small} has " in done.stderr
    assert "the save needed up to 30 MiB" in done.stderr and tree(store).keys() >= before.keys()
    assert not list(store.rglob("*.pack"))


def test_no_byte_is_written_where_nothing_fits(vckpt, small, tmp_path):  # noqa: F811
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 1)
    vckpt("import", store, "run", tmp_path / "a.safetensors")
    fill(small, 32 << 10)
    before = tree(store)
    done = vckpt("import", store, "run/9", tmp_path / "a.safetensors", check=False)
    assert done.returncode == 1 and tree(store) == before
    assert f"the file system mounted on {small} has 32 KiB free, and the save needed at least 64 KiB" in done.stderr
    with package.Saver(store / "other", pin="no") as saver:
        before = tree(store)
        with pytest.raises(OSError, match="the file system mounted on .* free, and the save needed at least 64 KiB"):
            saver.save({"w": numpy.zeros(10)}, step=1)
        assert {p for p in tree(store) if p.suffix == ".pack"} == {p for p in before if p.suffix == ".pack"}
        (small / "filler").unlink()
        saver.save({"w": numpy.zeros(10)}, step=1)
    assert vckpt("verify", store).returncode == 0


SAVES = """
import sys
import numpy
import vckpt

store, warn_free = sys.argv[1], eval(sys.argv[2])
rng = numpy.random.default_rng(1)
with vckpt.Saver(store + "/run", pin="no", warn_free=warn_free) as saver:
    for step in range(4):
        print(step, file=sys.stderr, flush=True)
        saver.save({"w": rng.integers(0, 256, 4 << 20, "u1")}, step=step)
"""


@pytest.mark.parametrize("warn_free, steps", [
    (True, [2]),                            # 8 MiB for two more: 10 MiB are left after the third
    (False, []), (20 * MIB, [0]), (1 * MIB, [])])
def test_a_saver_warns_once(vckpt, small, warn_free, steps):  # noqa: F811
    vckpt("init", small / "store", "--no-reserve")
    fill(small, 19 * MIB)
    done = subprocess.run([os.sys.executable, "-c", SAVES, str(small / "store"), str(warn_free)], check=True,
                          capture_output=True, text=True, timeout=120)
    lines, found = done.stderr.splitlines(), []
    for number, line in enumerate(lines):
        if warnings(line):
            found.append(max(int(w) for w in lines[:number] if w.isdigit()))
    assert found == steps, done.stderr


@pytest.mark.parametrize("policy, warn_free, warns", [
    ("900T", True, True), ("900T", False, False), ("900T", 1 * MIB, False), ("1M", True, False)])
def test_the_limit_of_the_policy(vckpt, tmp_path, policy, warn_free, warns):
    store = tmp_path / "store"
    make(tmp_path / "a.safetensors", 1)
    vckpt("init", store)
    assert not warnings(vckpt("import", store, "run", tmp_path / "a.safetensors", "--step", 100).stderr)
    vckpt("policy", store, "run", "set", "--warn-free", policy)
    done = subprocess.run([os.sys.executable, "-c", SAVES, str(store), str(warn_free)], check=True,
                          capture_output=True, text=True, timeout=120)
    assert len(warnings(done.stderr)) == warns, done.stderr                         # once, of four saves
    said = vckpt("import", store, "run", tmp_path / "a.safetensors", "--step", 101).stderr
    assert len(warnings(said)) == (policy == "900T"), said
    done = vckpt("prune", store, "run", check=False)
    assert done.returncode == 2 and "no policy with a rule that keeps steps" in done.stderr


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "1G", 1 << 63])
def test_wrong_options(two_steps, tmp_path, wrong):
    with pytest.raises(ValueError, match="warn_free=.*: expected True, False or a number of bytes"):
        package.Saver(pathlib.Path(tmp_path) / "store/run", pin="no", warn_free=wrong)
