# SPDX-License-Identifier: Apache-2.0
"""Which entries of a run's list the commands of upkeep open, counted: what several steps cost that are named together,
and what the newest entries cost when they speak of older steps."""
import shutil
import subprocess

import numpy as np
import pytest

import vckpt as package
from faults import counting
from storelib import scratch

STEPS = 450                     # their snapshots: 448 goes on from 384, that from 256, and that from none


@pytest.fixture(scope="module")
def aged(build, vckpt):
    """A store with a run of so many steps, which can be copied."""
    store = scratch().resolve()
    np.save(store / "w.npy", np.arange(100, dtype="f4"))
    vckpt("init", store / "s")
    vckpt("import", store / "s", "r/0", store / "w.npy")
    subprocess.run([build / "tests/bench_aged", store / "s", "r", str(STEPS), "0"], check=True)
    yield store / "s"
    shutil.rmtree(store)


@pytest.fixture
def opened(build, vckpt, tmp_path):
    """opened(store, words): the numbers of the entries that a command opens, one for each time."""
    def opened(store, *words):
        calls = tmp_path / "calls"
        calls.write_text("")
        vckpt(*words, env=counting(build, store, calls, "reads=1,calls=open+openat+openat2,path=runs/r/0"))
        names = [line.rsplit("/", 1)[1] for line in calls.read_text().splitlines()]
        return [int(name) for name in names if name.isdigit()]
    return opened


@pytest.fixture
def copy(aged):
    yield shutil.copytree(aged, aged.parent / "copy")
    shutil.rmtree(aged.parent / "copy")


def named(first, n):
    return [f"r/{step}" for step in range(first, first + 2 * n, 2)]


@pytest.mark.parametrize("command, each", [(["pin"], 6), (["rm", "--yes"], 6), (["du", "--freed"], 0)],
                         ids=lambda value: value[0] if isinstance(value, list) else "")
def test_steps_named_together(copy, opened, command, each):
    """The list is read once; each change reads the numbers on from there."""
    name, *options = command

    def run(first, n):
        steps = [word for step in named(first, n) for word in (options if name == "du" else []) + [step]]
        return len(opened(copy, name, copy, *steps, *([] if name == "du" else options)))
    assert run(100, 9) <= run(10, 1) + 8 * each


def test_steps_repacked_together(copy, opened):
    """The list is opened for the newest steps, once for all attempts; each reads its own entry, and what is new."""
    one, nine = (len(opened(copy, "repack", copy, *named(first, n))) for first, n in ((10, 1), (100, 9)))
    assert nine <= one + 8 * 12, (one, nine)


def test_steps_copied_together(aged, opened, build, vckpt, tmp_path):
    """The list of the store that they are copied to, which is as old as the other one."""
    to = tmp_path / "to"
    vckpt("init", to)
    vckpt("import", to, "r/0", aged.parent / "w.npy")
    subprocess.run([build / "tests/bench_aged", to, "r", str(STEPS), "0"], check=True)
    vckpt("rm", to, *named(10, 9), "--yes")
    one, eight = (len(opened(to, "copy", aged, *named(first, n), "--to", to)) for first, n in ((26, 1), (10, 8)))
    assert eight <= one + 7 * 12, (one, eight)


def test_copies_named_together(aged, opened, vckpt, tmp_path):
    """Of the source; they are there already."""
    vckpt("init", tmp_path / "to")
    vckpt("copy", aged, *named(10, 9), "--to", tmp_path / "to")
    one, nine = (len(opened(aged, "copy", aged, *named(10, n), "--to", tmp_path / "to")) for n in (1, 9))
    assert nine <= one


def test_a_tag_of_an_older_step(copy, opened, vckpt):
    """Who reads the newest entries reads what names that step, and no further."""
    vckpt("tag", copy, "r/300", "best")
    found = opened(copy, "log", copy, "r", "-n", "1")
    assert 384 in found and 256 not in found
    assert 256 in opened(copy, "log", copy, "r")


def test_metrics_of_a_run_whose_newest_entries_are_facts(copy, opened):
    """They count among the newest 128, too: nothing older is read."""
    first = max(int(each.name) for each in (copy / "runs/r").iterdir() if each.name.isdigit()) + 1
    for i in range(160):
        package.set_attributes(f"{copy}/r/{STEPS}", {"loss": i})
    last = max(int(each.name) for each in (copy / "runs/r").iterdir() if each.name.isdigit())
    found = opened(copy, "metrics", copy)
    assert last in found and not set(found) & set(range(first, last - 128))
