# SPDX-License-Identifier: Apache-2.0
"""What an old run costs against a young one: calls on files of the store and files of the disk, counted by what makes
the curves of docs/benchmarks.md (tests/bench/growth.py). tests/bench/aged.c makes the runs: 100 and 3,000 steps."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from faults import counting
from storelib import scratch

GROWTH = pathlib.Path(__file__).resolve().parents[1] / "bench/growth.py"
YOUNG, OLD = 100, 3_000
ENTRIES = 64                                    # are read one by one behind a snapshot, by about two calls each
ENTRY = 8192                                    # bytes of an entry's file


def disk_of(run):
    """Of its list: bytes of files, of several names of one once."""
    files = {each.stat().st_ino: each.stat() for each in run.iterdir() if each.is_file()}
    return sum(each.st_blocks * 512 for each in files.values())


@pytest.fixture(scope="module", params=[0, pytest.param(5, marks=pytest.mark.full)],
                ids=["all steps kept", "5 kept"])
def counted(request, build, vckpt, tmp_path_factory):
    """What growth.py counts, at both ages, and the calls of `vckpt ls STORE` and of `vckpt rm`."""
    def at(steps):
        store, calls = scratch().resolve(), tmp_path_factory.mktemp("age") / "calls"
        store.rmdir()
        calls.touch()

        def child(kind, calls, env):
            return json.loads(subprocess.run([sys.executable, GROWTH, kind, calls, store / "r"], env=env, check=True,
                                             stdout=subprocess.PIPE).stdout)
        child("begin", "", os.environ)
        subprocess.run([build / "tests/bench_aged", store, "r", str(steps), str(request.param)], check=True)
        child("make", "", os.environ)
        measured, before = child("age", calls, counting(build, store, calls)), len(calls.read_text().splitlines())
        vckpt("ls", store, env=counting(build, store, calls))
        measured["ls"] = {"calls": len(calls.read_text().splitlines()) - before}
        measured["steps"] = steps, len(vckpt("ls", store, "r", "-H").stdout.splitlines())
        for _ in range(2):                              # the first one leaves manifests of before it
            vckpt("gc", store, "--grace", "0")
        measured["disk"] = disk_of(store / "runs/r")
        before = len(calls.read_text().splitlines())
        removed = vckpt("rm", store, "r", "--keep-last", "1", "--yes", env=counting(build, store, calls)).stdout
        measured["rm"] = {"calls": len(calls.read_text().splitlines()) - before, "steps": removed.count(" removed,")}
        shutil.rmtree(store)
        return measured
    return at(YOUNG), at(OLD)


@pytest.mark.parametrize("what, most", [("latest", 100), ("load of the newest", 200), ("ls", 150)])
def test_calls_of_a_reader(counted, what, most):
    """The end of a list is found in a few looks; then a snapshot is read and the entries behind it, however old it is.
    A load reads the list twice."""
    reads = 2 if what.startswith("load") else 1
    for measured in counted:
        assert measured[what]["calls"] <= most + reads * 4 * ENTRIES, measured[what]


def test_an_opening_of_a_saver(counted):
    """It reads what the newest steps need: a snapshot, the entries behind it, and whether its launch id was used."""
    young, old = (measured["Saver open"] for measured in counted)
    assert old["calls"] <= young["calls"] + 4 * ENTRIES <= 10 * ENTRIES, (young, old)


@pytest.mark.parametrize("what, reads", [("latest", 1), ("load of the newest", 2), ("Saver open", 1),
                                         ("small save", 0.1)])
def test_bytes_that_are_read(counted, what, reads):
    """The newest snapshot, not those that it goes on from: these have a line for each visible step."""
    for measured in counted:
        assert measured[what]["bytes"] <= reads * (ENTRIES * ENTRY + 100_000), measured[what]


def test_calls_of_a_removal(counted):
    """Of many steps by one list, which is read once."""
    for measured in counted:
        assert measured["rm"]["steps"] > ENTRIES
        assert measured["rm"]["calls"] <= 20 * measured["rm"]["steps"] + 4 * ENTRIES, measured["rm"]


def test_calls_of_a_save(counted):
    """A Saver has read the list: it looks for what is new."""
    young, old = (measured["small save"] for measured in counted)
    assert old["calls"] <= 1.1 * young["calls"] <= 1.1 * 320, (young, old)
    assert old["syncs"] <= young["syncs"] + 0.5 <= 17, (young, old)


def test_disk_of_a_list(counted):
    """After a collection: the newest entries, two rows for each visible step, and nothing of the others."""
    for measured in counted:
        saved, visible = measured["steps"]
        assert measured["disk"] <= 4 * ENTRIES * ENTRY + 100_000 + 450 * visible, measured
    assert measured["disk"] <= 1024 * saved + 300 * visible, measured


def test_files_of_a_save(counted):
    """Two packs, the manifest, the entry, the measures; and now and then a snapshot."""
    for measured in counted:
        assert 5 <= measured["files"] <= 5 + 2 / ENTRIES + 0.02, measured["files"]
