# SPDX-License-Identifier: Apache-2.0
"""Commands on a storage that fails: each call of an import, a removal, a collection, an export, one that looks or one
that changes, fails once, three times, or with all after it. Nothing that is committed is lost or torn, what was told is
so, the command says what is wrong, and run again it does its work."""
import errno
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from safetensors.numpy import save_file

from faults import count_calls

UNDECIDED = 5   # its exit status: the step may be there, or gone, for all that
LIMIT_S = 240   # a list that cannot be read is asked for again for 3 s, several times over


class Commands:
    """A store with steps in two runs, shared pieces, a removed step and a save that was killed; and commands on copies
    of it."""

    def __init__(self, vckpt, build, dir_):
        self.vckpt, self.build, self.dir, self.base, self.source = vckpt, build, dir_, dir_ / "base", dir_ / "source"
        self.number = 0
        self.lock = threading.Lock()
        self.source.mkdir()
        rng = numpy.random.default_rng(11)
        tensors = {"noise": rng.integers(0, 1 << 16, (300, 300), dtype="u2"), "tiny": numpy.arange(5.0)}
        (self.source / "config.json").write_text("{}" * 3000)
        vckpt("init", self.base, "--no-reserve")
        for step, run in enumerate(["a", "a", "a", "b", "b"]):
            save_file(tensors, self.source / "model.safetensors")
            vckpt("import", self.base, run, self.source, "-q")
            tensors["tiny"] = tensors["tiny"] + 1
            tensors["w"] = rng.standard_normal((100, 200 + step)).astype("f4")
        vckpt("rm", self.base, "a/1", "-q")
        done = self.run(self.base, ["import", self.base, "b", self.source, "-q"],
                        "calls=linkat,path=runs/b/0,do=kill,at=1")
        assert done.returncode == -9, done
        self.want = self.content(self.base, dir_ / "out")

    def copy(self):
        with self.lock:
            self.number += 1
            path = self.dir / f"c{self.number}"
        path.mkdir()
        return path

    def run(self, store, words, interpose):
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {self.build}/tests/libinterpose.so".strip()
        env = dict(os.environ, VCKPT_INTERPOSE=f"root={store},{interpose}", LD_PRELOAD=preload,
                   ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
        return subprocess.run([self.vckpt.path, *map(str, words)], capture_output=True, text=True, env=env,
                              timeout=LIMIT_S)

    def steps(self, store):
        """{run/step: entry}"""
        runs = [run["run"] for run in self.vckpt.json("ls", store)["runs"]]
        return {f"{run}/{s['step']}": s["entry"] for run in runs for s in self.vckpt.json("ls", store, run)["steps"]}

    def content(self, store, out):
        """What every step exports."""
        all_ = {}
        for step in self.steps(store):
            self.vckpt("export", store, step, out, "-q")
            all_[step] = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
            shutil.rmtree(out)
        return all_

    def calls(self, words):
        path = self.copy()
        shutil.copytree(self.base, path / "store")
        return count_calls(lambda more: self.run(path / "store", self.words(words, path), more), path / "calls",
                           reads=True)

    def words(self, words, path):
        return [{"STORE": path / "store", "OUT": path / "out", "SOURCE": self.source}.get(word, word) for word in words]


@pytest.fixture(scope="module")
def commands(vckpt, build, tmp_path_factory):
    return Commands(vckpt, build, tmp_path_factory.mktemp("commands"))


# what a command adds to the steps, and takes away from them
WORK = {"import": (["import", "STORE", "b", "SOURCE"], {"b/2"}, set()),
        "replace": (["import", "STORE", "b/1", "SOURCE", "--replace"], set(), set()),
        "rm": (["rm", "STORE", "a/2"], set(), {"a/2"}),
        "gc": (["gc", "STORE", "--grace", "0"], set(), set()),
        "export": (["export", "STORE", "a/2", "OUT"], set(), set()),
        "verify": (["verify", "STORE"], set(), set()),
        "abort": (["abort", "STORE", "b"], set(), set())}


def hurt(commands, name, fault):
    words, more, less = WORK[name]
    path = commands.copy()
    store, words = path / "store", commands.words(words, path)
    shutil.copytree(commands.base, store)
    before = set(commands.want)
    done = commands.run(store, words, f"reads=1,do=fail,errno={fault[0]},at={fault[1]}{fault[2]}")
    assert done.returncode in (0, 1, 3, UNDECIDED) and (done.returncode == 0 or done.stderr.strip() or
                                                        name == "verify"), done
    assert commands.vckpt.json("verify", store, "--no-notes", check=False)["faults"] == 0, done
    now = set(commands.steps(store))
    told = before - less | more if done.returncode == 0 else now
    assert before - less <= now <= before | more and now == told, (done, now)
    if done.returncode and now != before:
        assert done.returncode == UNDECIDED, done
    if name == "export" and done.returncode == 0:
        assert {str(p.relative_to(path / "out")): p.read_bytes() for p in (path / "out").rglob("*")
                if p.is_file()} == commands.want["a/2"]
    if name == "abort":
        left = [i for i in commands.vckpt.json("ls", store, "b", "--incoming")["incoming"] if not i["decided"]]
        assert done.returncode == UNDECIDED or (done.returncode == 0) == (not left), (done, left)
        done.returncode = done.returncode if left else 0
    if done.returncode and now == before:
        commands.vckpt(*words)
        assert set(commands.steps(store)) == before - less | more
    commands.vckpt("gc", store, "--grace", "0", "-q")
    assert commands.vckpt.json("verify", store)["faults"] == 0
    if name == "gc":
        assert commands.content(store, path / "out") == commands.want
    shutil.rmtree(path)
    return done.returncode == 0


@pytest.mark.parametrize("name", WORK)
def test_each_call_fails(commands, scale, name, rng):
    number = commands.calls(WORK[name][0])
    cases = [(error, n, last)
             for error, last, count in ((errno.EIO, "", scale(4, 10**6)), (errno.EIO, ",last={}", scale(1, 60)),
                                      (errno.EIO, ",last=1000000", scale(1, 25)), (errno.ESTALE, "", scale(1, 50)))
             for n in rng.sample(range(1, number + 1), min(count, number))]
    cases = [(error, n, last.format(n + 2)) for error, n, last in cases]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda case: (case, one(commands, name, case)), cases))
    wrong = [(case, why) for case, why in done if not isinstance(why, bool)]
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first: {wrong[0]}"
    print(f"{len(cases)} of {number} calls, {sum(ok for _, ok in done)} done all the same")


def one(commands, name, case):
    try:
        return hurt(commands, name, case)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
