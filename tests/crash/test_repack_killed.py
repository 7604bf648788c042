# SPDX-License-Identifier: Apache-2.0
"""vckpt gc --repack-below, and vckpt repack of a step of four ranks, that is killed, or whose storage fails, at any
call, and repack on a full disk: each step is there, old or new, and reads back bit for bit."""
import errno
import os
import random
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from faults import count_calls
from saverlib import Vckpt, ranks
from test_commands import Commands
from test_copy import fill, job
from test_copy_resume import ended, stopped
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

    def words(self, path):
        return ["gc", path, *WORDS, "-q"]

    def hurt(self, path, fault):
        shutil.copytree(self.base, path)
        done = self.run(path, self.words(path), fault)
        assert done.returncode in (0, 1, 3, 5, -9), done
        self.check(path)
        self.again(path)
        self.check(path)
        shutil.rmtree(path)
        return done.returncode

    def again(self, path):
        for _ in range(3):
            again = self.vckpt.json("gc", path, *WORDS)["repack"]
        assert again["steps"] == [] and again["failed"] == []
        # t1 is there twice, if r/1 was written anew before the fault and r/2 after it
        assert sum(p.stat().st_size for p in path.glob("packs/*/*.pack")) < 4 * 120000 + 9 * 6000


class Cuts(Repacks):
    """run/0 is of four ranks, with layouts, blobs and meshes of their own; it is cut anew, whole."""

    def __init__(self, vckpt, build, folder):
        self.vckpt, self.build, self.dir, self.base = vckpt, build, folder, folder / "base"
        vckpt("init", self.base, "--no-reserve")
        data = fill(random.Random(5))
        data["m.layer"] = data["m.layer"][:120, :90]
        job(Vckpt(build), self.base, data)
        self.want = self.files(self.base)

    def words(self, path):
        return ["repack", path, "run/0", "-q"]

    def again(self, path):
        (step,) = self.vckpt.json("repack", path, "run/0")["steps"]
        for _ in range(2):
            self.vckpt("gc", path, "--grace", "0", "--heartbeat", "0", "-q")
        assert {p.name.split("-")[1] for p in path.glob("packs/*/*.pack")} == {str(1 << 63)}, step


@pytest.fixture(scope="module", params=[Repacks, Cuts], ids=["below", "whole"])
def repacks(vckpt, build, tmp_path_factory, request):
    return request.param(vckpt, build, tmp_path_factory.mktemp("repacks"))


@pytest.fixture(scope="module")
def calls(repacks):
    """(all calls, those that change the store)"""
    counts, path = [], repacks.dir / "count"
    for reads in True, False:
        shutil.copytree(repacks.base, path)
        counts.append(count_calls(lambda words: repacks.run(path, repacks.words(path), words),
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


def save_halves(api, path):
    """14 MB of noise, of which two ranks have a half each."""
    data = np.frombuffer(random.Random(2).randbytes(7000 * 2002), "u2").reshape(-1, 2002 // 2)

    def one(rank, saver):
        half = np.array_split(data, 2, 1)[rank]
        save = saver.save({"model/t": (np.ascontiguousarray(half), {
            "shape": data.shape, "mesh": api.mesh("tp=2"), "placements": "S(1)"})}, step=0)
        save.committed()
        save.free()
    assert ranks(api, path, "r", 2, one) == [None] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk(vckpt, build, small, tmp_path, count):  # noqa: F811
    store, file = small / "store", "r/0/model.safetensors" if count > 1 else "r/0/a.safetensors"
    vckpt("init", store)
    if count > 1:
        save_halves(Vckpt(build), store)
    else:
        make(tmp_path / "a.safetensors", 14, 1)
        vckpt("import", store, "r/0", tmp_path / "a.safetensors", "-q")
    before = vckpt("cat", store, file, text=False).stdout
    done = vckpt("repack", store, "r/0", check=False)
    assert done.returncode == 1 and "is full: r/0 stays as it was" in done.stderr, done
    assert vckpt("cat", store, file, text=False).stdout == before
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


@pytest.mark.parametrize("repacks", [Repacks], indirect=True, ids=["below"])
def test_another_was_faster(repacks, tmp_path):
    """The first one stands still before its commit entry, and then finds the step replaced."""
    path = tmp_path / "s"
    shutil.copytree(repacks.base, path)
    first = stopped(repacks, path, ["repack", path, "r/1"], "calls=linkat,path=runs/r/,at=1")
    repacks.vckpt("repack", path, "r/1")
    code, said = ended(first)
    assert code == 1 and "step 1 was removed or replaced by another writer just now" in said, said
    repacks.check(path)
