# SPDX-License-Identifier: Apache-2.0
"""What a save of one rank makes durable, call by call, and what it leaves behind: each fsync waits for the disk, and
each file takes an inode, so each has a reason."""
import collections
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest

from storelib import scratch

SAVES = """
import pathlib, sys, numpy as np, vckpt
root = pathlib.Path(sys.argv[1]).parent
for step in range(4):
    print(*(p.relative_to(root) for p in root.rglob("*")))
    print(f"save {step}", file=open(sys.argv[2], "a"))
    state = {"model": {"w": np.arange(50000) * step}, "step": step}
    vckpt.save(sys.argv[1], state, step=step, rank=0, world=1, pin="no")
vckpt.close()
"""
# file, then the directory that has its name; packs are in directories of 256, whose names must be durable, too
NEEDED = {
    "incoming/r": 1, "incoming/r/ATTEMPT": 2,           # the folder; `begin`
    "packs/XX": 2 * 2,                                  # of the component, of metadata and blobs
    "runs/r/manifests": 2, "runs/r": 2,                 # the manifest, and the entry of the list
    "stats/r/N": 1,                                     # measures: for people
}
# Where other hosts may use the file system, their writers may outlive this one: what goes with ranks has a name, too.
SHARED = {**NEEDED, "stats/r/N": 2, "stats/r": 1}
# what a step leaves behind: an inode each
LEFT = ["packs/*-meta.pack", "packs/*-model.pack", "runs/r/N", "runs/r/manifests/*", "stats/r/N", "stats/r/N/0"]


def kind_of(name):
    name = re.sub(r"^packs/../.*-", "packs/*-", re.sub(r"/[0-9a-f]{64}$", "/*", name))
    return re.sub(r"^(stats/r|runs/r)/[0-9.]+(?=/|$)", r"\1/N", name)


def name_of(path):
    path = re.sub(r"^(packs)/[0-9a-f]{2}$", r"\1/XX", path)
    path = re.sub(r"^(incoming/r)/.*$", r"\1/ATTEMPT", path)
    return re.sub(r"^(stats/r)/.*$", r"\1/N", path)


@pytest.mark.parametrize("fs", ["", "6969", "6e6577"], ids=["this one", "NFS", "one that is not known"])
def test_syncs_of_a_save(build, tmp_path, fs):
    store, calls = scratch().resolve(), tmp_path / "calls"
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, LD_PRELOAD=preload,
               VCKPT_INTERPOSE=f"root={store},list={calls},calls=fsync+fdatasync+syncfs" + f",fs={fs}" * bool(fs),
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    store.rmdir()                                       # a save makes it
    done = subprocess.run([sys.executable, "-c", SAVES, store / "r", calls], check=True, env=env, timeout=120,
                          stdout=subprocess.PIPE, text=True)
    shutil.rmtree(store)
    names = [set(line.split()) for line in done.stdout.splitlines()]
    for before, after in itertools.pairwise(names[1:]):
        left = [name for name in after - before if not re.fullmatch("packs/[0-9a-f]{2}|hosts/.*", name)]
        assert sorted(map(kind_of, left)) == LEFT, sorted(left)
    saves = calls.read_text().split("save ")[1:]
    for text in saves[1:]:                              # the first one makes the run
        synced = collections.Counter(name_of(line.partition(" ")[2]) for line in text.splitlines()[1:])
        assert synced.pop("packs", 0) <= 3              # where a directory of packs is new to the process
        needed = SHARED if fs else NEEDED
        assert synced == needed, synced - collections.Counter(needed)
