# SPDX-License-Identifier: Apache-2.0
"""vckpt gc --repack-below that is killed, or whose storage fails, at any call, and repack on a full disk: each step is
there, old or new, and reads back bit for bit."""
import errno
import os
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from faults import count_calls
from test_commands import Commands
from test_full_disk import make, small  # noqa: F401

WORDS = ["--repack-below", "100%", "--grace", "0", "--heartbeat", "0"]


class Repacks(Commands):
    """r/1 to r/3 need some of the pack of r/0, which is gone."""

    def __init__(self, vckpt, build, folder):
        self.vckpt, self.build, self.dir, self.base = vckpt, build, folder, folder / "base"
        (folder / "src").mkdir()
        vckpt("init", self.base, "--no-reserve")
        t = np.random.default_rng(4).integers(0, 1 << 32, (4, 30000), dtype="u4")
        for step, names in enumerate([[0, 1, 2, 3], [0, 1], [1], [2]]):
            save_file({f"t{n}": t[n] for n in names}, folder / "src/model.safetensors")
            (folder / "src/note").write_text(str(step))
            vckpt("import", self.base, f"r/{step}", folder / "src", "-q")
        vckpt("rm", self.base, "r/0", "-q")
        self.want = self.files(self.base)

    def files(self, path):
        now = self.content(path, self.dir / "out")
        for files in now.values():
            files.pop("manifest.json")
        return now

    def check(self, path):
        assert self.files(path) == self.want
        assert self.vckpt.json("verify", path, "--no-notes", check=False)["faults"] == 0

    def hurt(self, path, fault):
        shutil.copytree(self.base, path)
        done = self.run(path, ["gc", path, *WORDS, "-q"], fault)
        assert done.returncode in (0, 1, 3, 5, -9), done
        self.check(path)
        for _ in range(3):
            again = self.vckpt.json("gc", path, *WORDS)["repack"]
        assert again["steps"] == [] and again["failed"] == []
        self.check(path)
        # t1 is there twice, if r/1 was written anew before the fault and r/2 after it
        assert sum(p.stat().st_size for p in path.glob("packs/*/*.pack")) < 4 * 120000 + 9 * 6000
        shutil.rmtree(path)
        return done.returncode


@pytest.fixture(scope="module")
def repacks(vckpt, build, tmp_path_factory):
    return Repacks(vckpt, build, tmp_path_factory.mktemp("repacks"))


@pytest.fixture(scope="module")
def calls(repacks):
    """(all calls, those that change the store)"""
    counts, path = [], repacks.dir / "count"
    for reads in True, False:
        shutil.copytree(repacks.base, path)
        counts.append(count_calls(lambda words: repacks.run(path, ["gc", path, *WORDS, "-q"], words),
                                  repacks.dir / "calls", reads))
        shutil.rmtree(path)
    assert counts[0] > counts[1] > 40
    return counts


def test_killed_at_a_change(repacks, calls, tmp_path, scale, rng):
    some = rng.sample(range(1, calls[1] + 1), min(calls[1], scale(6, 10**6)))
    ended = [repacks.hurt(tmp_path / "store", f"do=kill,at={n}") for n in some]
    assert set(ended) <= {0, -9} and -9 in ended, ended


@pytest.mark.parametrize("error, last", [(errno.EIO, ""), (errno.ENOSPC, ",last=1000000")], ids=["once", "for good"])
def test_a_call_fails(repacks, calls, tmp_path, scale, rng, error, last):
    reads = "reads=1," if error == errno.EIO else ""
    n = calls[0 if reads else 1]
    for at in rng.sample(range(1, n + 1), min(n, scale(3, 200))):
        repacks.hurt(tmp_path / "store", f"{reads}do=fail,errno={error},at={at}{last}")


def test_a_full_disk(vckpt, small, tmp_path):  # noqa: F811
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 14, 1)
    vckpt("import", store, "r/0", tmp_path / "a.safetensors", "-q")
    before = vckpt("cat", store, "r/0/a.safetensors", text=False).stdout
    done = vckpt("repack", store, "r/0", check=False)
    assert done.returncode == 1 and "is full: r/0 stays as it was" in done.stderr, done
    assert vckpt("cat", store, "r/0/a.safetensors", text=False).stdout == before
    assert vckpt.json("verify", store)["faults"] == 0
    assert os.statvfs(small).f_bavail * os.statvfs(small).f_frsize > 6 << 20    # what was written is given back
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    try:
        for words in ["repack", store, "r/0"], ["gc", store, "--repack-below", "50%"]:
            done = vckpt(*words, check=False)
            assert done.returncode == 1 and "ead-only" in done.stderr and done.stderr.count("\n") == 1, done
        assert vckpt.json("gc", store, "-n", "--repack-below", "50%")["repack"]["steps"] == []
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small], check=True)
