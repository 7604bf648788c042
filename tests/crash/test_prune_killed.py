# SPDX-License-Identifier: Apache-2.0
"""vckpt prune that is killed, or whose storage fails, at any call: a step is there whole, or thinned, or (where no rule
keeps it) gone; what must stay reads back bit for bit, and a second prune ends the work."""
import errno
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from faults import count_calls
from test_commands import Commands

WORDS = ["--keep-last", "3", "--thin", "optimizer", "--older-than", "0s", "--yes", "-q"]
STAYS, THINNED, GOES = {4}, {2, 3}, {0, 1}


class Pruned(Commands):
    def __init__(self, vckpt, build, dir_):
        self.vckpt, self.build, self.dir, self.number = vckpt, build, dir_, 0
        self.base, source = dir_ / "base", dir_ / "source"
        source.mkdir()
        rng = np.random.default_rng(3)
        vckpt("init", self.base, "--no-reserve")
        for step in range(5):
            for component in ("model", "optimizer"):
                save_file({"w": rng.random((50, 60), dtype="f4"), "tiny": np.full(3, step, "f4")},
                          source / f"{component}.safetensors")
            (source / "config.json").write_text(f'{{"n": {step}}}')
            vckpt("import", self.base, f"a/{step}", source, "-q")
        self.want = self.exported(self.base)

    def exported(self, store):
        """{step: {file: bytes}} of what every step exports, but manifest.json."""
        return {int(name[2:]): {file: data for file, data in files.items() if file != "manifest.json"}
                for name, files in self.content(store, store.parent / f"{store.name}.out").items()}

    def prune(self, store, interpose):
        return self.run(store, ["prune", store, "a", *WORDS], interpose)

    def check(self, store, ended):
        steps = self.exported(store)
        assert STAYS | THINNED <= set(steps) <= set(range(5))
        assert not ended or set(steps) == STAYS | THINNED
        for step, files in steps.items():
            lost = set(self.want[step]) - set(files)
            assert lost in ([set(), {"optimizer.safetensors"}] if step in THINNED else [set()])
            assert not ended or bool(lost) == (step in THINNED)
            assert files == {name: data for name, data in self.want[step].items() if name not in lost}
        assert self.vckpt.json("verify", store, "--no-notes")["faults"] == 0

    def hurt(self, fault):
        self.number += 1
        store = self.dir / f"c{self.number}"
        shutil.copytree(self.base, store)
        done = self.prune(store, fault)
        assert done.returncode in (0, 1, 3, 5, -9), done
        self.check(store, done.returncode == 0)
        if done.returncode:
            self.vckpt("gc", store, "--grace", "0", "--heartbeat", "0", "-q")
            self.vckpt("prune", store, "a", *WORDS)
            self.check(store, True)
        for _ in range(2):
            self.vckpt("gc", store, "--grace", "0", "--heartbeat", "0", "-q")
        self.check(store, True)
        shutil.rmtree(store)
        return done.returncode


@pytest.fixture(scope="module")
def pruned(vckpt, build, tmp_path_factory):
    return Pruned(vckpt, build, tmp_path_factory.mktemp("prune"))


@pytest.fixture(scope="module")
def calls(pruned):
    """(all calls, those that change the store)"""
    counts = []
    for reads in True, False:
        store = shutil.copytree(pruned.base, pruned.dir / "count")
        counts.append(count_calls(lambda words, store=store: pruned.prune(store, words), pruned.dir / "calls", reads))
        shutil.rmtree(store)
    assert counts[0] > counts[1] > 30
    return counts


def test_killed_at_each_change(pruned, calls, scale, rng):
    some = rng.sample(range(1, calls[1] + 1), min(calls[1], scale(8, 10**6)))
    ended = [pruned.hurt(f"do=kill,at={n}") for n in some]
    assert set(ended) <= {0, -9} and -9 in ended, ended     # not every run makes the same number of calls


@pytest.mark.parametrize("last", ["", ",last=1000000"], ids=["once", "for good"])
def test_each_call_fails(pruned, calls, scale, rng, last):
    for n in rng.sample(range(1, calls[0] + 1), min(calls[0], scale(3, 200))):
        pruned.hurt(f"reads=1,do=fail,errno={errno.EIO},at={n}{last}")
