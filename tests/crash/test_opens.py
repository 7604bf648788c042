# SPDX-License-Identifier: Apache-2.0
"""How often a run's list is asked to find its newest step, to load it, and to list the runs of a store:
calls, which do not depend on the machine."""
import collections
import os
import shutil
import subprocess
import sys

import pytest

from faults import counting
from storelib import scratch

SAVE = """
import sys, numpy as np, vckpt
vckpt.save(sys.argv[1], {"m": {"w": np.arange(9)}}, step=10**9, rank=0, world=1, pin="no")
vckpt.close()
"""
READS = """
import sys, numpy as np, vckpt
path, calls = sys.argv[1:]
state = {"m": {"w": np.arange(9)}}
for what, read in (("first", lambda: vckpt.latest(path)),           # what a process does once
                   ("latest", lambda: vckpt.latest(path)),
                   ("open", lambda: vckpt.open(path).close()),
                   ("load", lambda: vckpt.load(path, state)),
                   ("load, missing_ok", lambda: vckpt.load(path, state, missing_ok=True))):
    print("#", what, file=open(calls, "a"))
    read()
"""


@pytest.fixture(scope="module", params=[3, 130, 2000])
def aged(request, build, vckpt):
    """A store with a run of so many steps, and one that can be loaded; the number of the run's entries."""
    store = scratch().resolve()
    store.rmdir()
    vckpt("init", store)
    subprocess.run([build / "tests/bench_aged", store, "r", str(request.param), "0"], check=True)
    subprocess.run([sys.executable, "-c", SAVE, store / "r"], check=True)
    yield store, sum(name.isdigit() for name in os.listdir(store / "runs/r"))
    shutil.rmtree(store)


def asked(build, store, calls, *command):
    """Opens of what is in the run's directory, with its listings, by what the command said before."""
    env = counting(build, store, calls, "reads=1,calls=open+openat+openat2+getdents,path=runs/r")
    subprocess.run(command, check=True, env=env, timeout=120, stdout=subprocess.PIPE, text=True)
    counts, what = collections.Counter(), None
    for line in calls.read_text().splitlines():
        if line.startswith("#"):
            what = line[2:]
        elif "/manifests" not in line:
            counts[what] += 1
    return counts


def test_reads_of_the_newest(build, aged, tmp_path):
    store, _ = aged
    counts = asked(build, store, tmp_path / "calls", sys.executable, "-c", READS, store / "r", tmp_path / "calls")
    assert counts["open"] == counts["load"] == counts["load, missing_ok"] == counts["latest"]


def test_listing_of_runs(build, vckpt, aged, tmp_path):
    """Of a short list: a look whether it is one, its names, three looks behind the last one, and what is read."""
    store, entries = aged
    counts = asked(build, store, tmp_path / "calls", vckpt.path, "ls", store)
    read = (entries - 1) % 64 + 1                       # from the newest snapshot on
    chain, looks = (0, 3) if entries < 255 else (5, 49) # doubling, bisection, and 21 behind the end
    assert counts.total() <= read + chain + looks + 4
