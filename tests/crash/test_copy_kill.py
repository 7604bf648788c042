# SPDX-License-Identifier: Apache-2.0
"""A copy that is killed at any call, meets a failing call or a full disk, or is interrupted: what was copied stays, the
other store is sound, and the same command goes on; the source is never changed."""
import errno
import os
import shutil
import signal
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from faults import count_calls
from test_commands import Commands
from test_full_disk import make, small  # noqa: F401


class Copies(Commands):
    """A source with r/0 to r/2, of which the second and third share with the one before; and an empty store."""

    def __init__(self, vckpt, build, folder):
        self.vckpt, self.build, self.dir, self.base, self.from_ = vckpt, build, folder, folder / "base", folder / "from"
        vckpt("init", self.base, "--no-reserve")
        vckpt("init", self.from_, "--no-reserve")
        data = {"w": np.random.default_rng(4).standard_normal((300, 300)).astype("f4"), "s": np.arange(5)}
        for step in range(3):
            data["s"] = data["s"] + 1
            data[f"more{step}"] = data["w"][:100] * step
            save_file(data, folder / "model.safetensors")
            vckpt("import", self.from_, f"r/{step}", folder / "model.safetensors", "-q")
        self.files = self.tree(self.from_)
        self.want = self.content(self.from_, folder / "out")
        self.words_ = ["copy", self.from_, "--to", "STORE", "-q"]

    @staticmethod
    def tree(path):
        return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}

    def store(self, path):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.base, path)
        return [path if w == "STORE" else w for w in self.words_]

    def check(self, path, tmp):
        """What is there is whole and as in the source; the command goes on."""
        assert self.vckpt.json("verify", path, "--no-notes", check=False)["faults"] == 0
        now = self.content(path, tmp / "out")
        for name, files in now.items():
            mine, theirs = files.pop("manifest.json"), dict(self.want[name])
            theirs.pop("manifest.json")
            assert mine and files == theirs
        done = self.vckpt.json("copy", self.from_, "--to", path)
        assert [s["step"] for s in done["steps"] if s["outcome"] == "equal"] == [int(n[2:]) for n in sorted(now)]
        assert sorted(self.steps(path)) == ["r/0", "r/1", "r/2"]
        self.vckpt("gc", path, "--grace", "0", "-q")
        self.vckpt("verify", path)
        assert self.tree(self.from_) == self.files
        return len(now)


@pytest.fixture(scope="module")
def copies(vckpt, build, tmp_path_factory):
    return Copies(vckpt, build, tmp_path_factory.mktemp("copies"))


def calls(copies, path, reads=False):
    return count_calls(lambda words: copies.run(path, copies.store(path), words), path.parent / "calls", reads)


def test_killed_at_a_call(copies, tmp_path, scale, rng):
    path = tmp_path / "store"
    n, kept, ends = calls(copies, path), set(), set()
    for at in sorted(rng.sample(range(n // 3, n + 1), scale(4, n - n // 3))):
        ends.add(copies.run(path, copies.store(path), f"do=kill,at={at}").returncode)
        kept.add(copies.check(path, tmp_path))
    assert -9 in ends <= {-9, 0} and kept & {1, 2, 3}           # 0: it was the process of the index, or after the end


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_call_fails(copies, tmp_path, scale, rng, error):
    path = tmp_path / "store"
    n = calls(copies, path, reads=True)
    for at in rng.sample(range(1, n + 1), scale(4, 300)):
        done = copies.run(path, copies.store(path), f"reads=1,do=fail,errno={error},at={at}")
        assert done.returncode in (0, 1, 3, 5) and (not done.returncode or "vckpt copy: " in done.stderr), done
        copies.check(path, tmp_path)


def test_a_full_disk(vckpt, small, tmp_path):  # noqa: F811
    vckpt("init", tmp_path / "from", "--no-reserve")
    for step, mib in enumerate([8, 30, 8]):
        make(tmp_path / "m.safetensors", mib, step)
        vckpt("import", tmp_path / "from", f"r/{step}", tmp_path / "m.safetensors", "-q")
    vckpt("init", small / "store")
    done = vckpt("copy", tmp_path / "from", "--to", small / "store", check=False)
    assert done.returncode == 1 and "full; nothing of this step is kept" in done.stderr, done
    assert [s["step"] for s in vckpt.json("ls", small / "store", "r")["steps"]] == [0]
    vckpt("copy", tmp_path / "from", "r/2", "--to", small / "store")       # what was written is given back
    vckpt("verify", small / "store")


def test_a_store_that_cannot_be_written(vckpt, copies, small):  # noqa: F811
    vckpt("init", small / "store", "--no-reserve")
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    try:
        done = vckpt("copy", copies.from_, "--to", small / "store", check=False)
        assert done.returncode == 1 and "ead-only" in done.stderr and done.stderr.count("\n") == 1, done
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small], check=True)


def test_interrupted(copies, tmp_path):
    """Stopped in the second step: that is taken back, the first stays."""
    path = tmp_path / "store"
    words = copies.store(path)
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {copies.build}/tests/libinterpose.so".strip()
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={path},calls=linkat,path=packs/,do=stop,at=4", LD_PRELOAD=preload,
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    p = subprocess.Popen([copies.vckpt.path, *words], env=env, stderr=subprocess.PIPE, text=True,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert os.WIFSTOPPED(os.waitpid(p.pid, os.WUNTRACED)[1])
    p.send_signal(signal.SIGINT)
    p.send_signal(signal.SIGCONT)
    err = p.communicate(timeout=120)[1]
    assert p.returncode == -signal.SIGINT and "r step 1 was not copied" in err, err
    assert sorted(copies.steps(path)) == ["r/0"]
    assert copies.vckpt.json("ls", path, "--incoming")["incoming"] == []
    assert copies.check(path, tmp_path) == 1
