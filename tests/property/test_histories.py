# SPDX-License-Identifier: Apache-2.0
"""Whatever a job did before, each visible step has the bytes that were saved as it.

Random histories of a run: launches of one to three ranks that go on from any step; tensors of every size, also of none,
whole, alone, replicated or sharded; saves of some components and some tensors, of steps that exist, several under way;
memory that changes as soon as it was copied; between saves, removals and the collector. In some of them hundreds of
entries pass by others, and the list's first entries are collected again and again, beside savers that live, imports
that are killed, aborts and mends."""
import ctypes
import os
import pathlib
import random
import shutil
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file

from saverlib import ALONE, Vckpt
from storelib import Api
from test_list import ruin
from test_list_head import fake, marks, numbers

SHAPES = [(3,), (100,), (1000, 7), (300, 300), (4, 4), (110, 3, 50), (0, 3), (65, 33)]
PATIENCE_NS = 60 * 10**9


@pytest.fixture
def api(build):
    """The library with all symbols; a save asks, and waits, whether what is unchanged has to be copied."""
    api = Vckpt(build, "tests/libvckpt_internal.so")
    patience = (ctypes.c_uint64 * 2).in_dll(api.lib, "saver_same_patience")
    patience[:] = PATIENCE_NS, PATIENCE_NS
    yield api
    patience[:] = 0, 0


class History:
    def __init__(self, api, store, vckpt, rng):
        self.api, self.store, self.vckpt, self.rng = api, store, vckpt, rng
        self.items = numpy.random.default_rng(rng.getrandbits(64))
        self.tensors = {f"{rng.choice('abc')}/{i}": self.fresh(rng.choice(SHAPES)) for i in range(rng.randint(3, 12))}
        self.ways = {name: rng.choice(["whole", "alone", "R", "S(0)"]) for name in self.tensors}
        self.saved, self.last = {}, None     # by step; the one that was saved last

    def fresh(self, shape):
        made = self.items.standard_normal(shape).astype(self.rng.choice(["f4", "f2", "f8"]))
        return made if self.rng.random() < .8 else numpy.zeros_like(made)

    def change(self):
        share = self.rng.choice([0, 0, .2, 1])
        for a in self.tensors.values():
            if a.size and self.rng.random() < share:
                a.flat[self.rng.randrange(a.size)] += 1
            elif self.rng.random() < share / 4:
                a[...] = self.fresh(a.shape)

    def some(self):
        components = self.rng.sample("abc", self.rng.choice([1, 2, 3, 3, 3]))
        chosen = [n for n in self.tensors if n[0] in components and self.rng.random() < .95]
        return chosen or list(self.tensors)

    def holds(self, name, rank, world, mesh):
        a, way = self.tensors[name], self.ways[name]
        if world == 1 or way == "whole":
            return a
        if way == "alone":
            return (a, {"flags": ALONE}) if rank == int(name[2:]) % world else None
        each = -(-a.shape[0] // world)
        part = a if way == "R" else a[min(rank * each, len(a)):(rank + 1) * each]
        return part, {"shape": a.shape, "mesh": mesh, "placements": way}

    def save(self, savers, mesh, step, names):
        world, saves = len(savers), []
        for rank, saver in enumerate(savers):
            held = {n: self.holds(n, rank, world, mesh) for n in names}
            saves.append(saver.save({n: h for n, h in held.items() if h is not None}, step=step, replace=True))
        self.saved[step], self.last = {n: self.tensors[n].tobytes() for n in names}, step
        for save in saves:
            save.staged()
        for n in names:         # it is the caller's again
            now = self.tensors[n].copy()
            self.tensors[n][...] = 77
            self.tensors[n][...] = now
        return saves

    def launch(self, number, threads):
        world = self.rng.choice([1, 1, 2, 3])
        mesh = self.api.mesh(f"r={world}") if world > 1 else None
        opened = threads({rank: lambda rank: self.api.saver(self.store, "run", rank=rank, world=world,
                                                            launch=f"launch {number}") for rank in range(world)})
        savers, under_way = [opened[rank] for rank in range(world)], []
        step = self.rng.choice([0, max(self.saved, default=-1) + 1])
        for _ in range(self.rng.randint(1, 12)):
            self.change()
            under_way += self.save(savers, mesh, step, self.some())
            step = max(0, step - self.rng.randint(0, 3)) if self.rng.random() < .2 else step + 1
            if self.rng.random() < .6:
                self.wait(under_way)
            if not under_way and self.rng.random() < .1:
                self.remove()
            self.others(bool(under_way))
        self.wait(under_way)
        for saver in savers:
            saver.free()

    @staticmethod
    def wait(saves):
        while saves:
            save = saves.pop(0)
            save.committed()
            save.free()

    def remove(self):
        last = self.rng.randint(1, 4)
        self.vckpt("rm", self.store, "run", "--keep-last", last, "-y")
        for step in sorted(self.saved)[:-last]:
            if step != self.last:           # which a rollback may have left behind others
                del self.saved[step]
        self.collect()

    def collect(self):
        self.vckpt("gc", self.store, "--grace", "0", check=False)   # refused while a saver lives: then it only marks

    def others(self, under_way):
        """What else happens in the run while a launch lives."""

    def check(self):
        for step, want in self.saved.items():
            found = self.api.read(self.store, "run", step)
            assert {n: a.tobytes() for n, a in found.items()} == want, step


def test_each_step_has_what_was_saved(api, tmp_path, vckpt, rng, scale, threads):
    for number in range(scale(4, 100)):
        history = History(api, api.store(tmp_path / f"store{number}"), vckpt, random.Random(rng.getrandbits(64)))
        for launch in range(history.rng.randint(1, 5)):
            history.launch(launch, threads)
            history.check()
            if history.rng.random() < .4:
                history.remove()
        history.check()
        vckpt("verify", history.store)


class Passing(History):
    """Of a run in which much else happens, so that lists are collected."""

    def __init__(self, *args):
        super().__init__(*args)
        self.api_of_lists, self.passed, self.heads = Api(self.api.lib, self.store, init=False), 10**9, set()
        self.folder, self.build = os.path.dirname(self.store), pathlib.Path(self.vckpt.path).parents[2]

    def others(self, under_way):
        roll = self.rng.random()
        if roll < .5:
            self.entries(self.rng.choice([30, 70, 150, 400]))
        if roll < .3 or roll > .9:
            self.collect()
        if under_way:
            return
        if .5 < roll < .6:
            self.takes_in(False)
        if .6 < roll < .65:
            self.takes_in(True)
        if .65 < roll < .7 and len(self.saved) > 1:
            self.remove_one()

    def entries(self, count):
        with self.api_of_lists.list("run") as l:
            fake(l, range(self.passed, self.passed + count // 2))
        self.passed += count

    def collect(self):
        """Twice: one that deletes packs is refused while a saver lives."""
        for grace in self.rng.choice([["0", "1h"], ["1h"], ["1h", "0"]]):
            self.vckpt("gc", self.store, "--grace", grace, check=False)
        self.heads.update(marks(self.api_of_lists, "run"))

    def remove(self):
        """What is resumed from stays, too."""
        last = self.rng.randint(1, 4)
        self.vckpt("rm", self.store, "run", "--keep-last", last, "-y")
        shown = self.shown()
        assert set(sorted(self.saved)[-last:]) <= set(shown) <= set(self.saved)
        self.saved = {step: self.saved[step] for step in shown}
        self.collect()

    def shown(self):
        return [s["step"] for s in self.vckpt.json("ls", self.store, "run")["steps"]]

    def remove_one(self):
        step = self.rng.choice(sorted(self.saved))
        self.vckpt("rm", self.store, f"run/{step}", "-y")
        del self.saved[step]

    def takes_in(self, killed):
        """An import, of a new step or in the place of one, whole or killed at some call."""
        step = self.rng.choice([*self.saved, max(self.saved, default=-1) + 1])
        array = self.items.standard_normal((40, 50)).astype("f4")
        file = os.path.join(self.folder, "in.safetensors")
        save_file({"w": array}, file)
        words = [self.vckpt.path, "import", self.store, f"run/{step}", file, "-q", "--replace"]
        env = dict(os.environ)
        if killed:
            env.update(VCKPT_INTERPOSE=f"root={self.store},do=kill,at={self.rng.randint(1, 60)}",
                       LD_PRELOAD=f"{os.environ.get('VCKPT_PRELOAD', '')} {self.build}/tests/libinterpose.so",
                       ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
        before = self.entry_of(step)
        done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True)
        if self.entry_of(step) != before:
            self.saved[step] = {"model/w": array.tobytes()}
        assert killed or done.returncode == 0, done

    def entry_of(self, step):
        with self.api_of_lists.list("run") as l:
            return l.steps().get(step, (None,))[0]

    def aborts(self):
        """A save whose writer was killed."""
        for i in self.vckpt.json("ls", self.store, "run", "--incoming")["incoming"]:
            if not i["decided"]:
                self.vckpt("abort", self.store, "run", i["attempt"], "-q", check=False)

    def mends(self):
        """An entry from the head on is ruined; a copy has it."""
        copy = os.path.join(self.folder, "copy")
        shutil.copytree(self.store, copy)
        first = max(marks(self.api_of_lists, "run"), default=0)
        there = [n for n in numbers(self.api_of_lists, "run") if n >= first]
        for n in self.rng.sample(there, min(len(there), self.rng.choice([1, 1, 3]))):
            ruin(self.api_of_lists, "run", n)
        self.vckpt("mend", self.store, "--from", copy)
        shutil.rmtree(copy)

    def close(self):
        self.api_of_lists.close()


def test_the_same_where_lists_are_collected(api, tmp_path, vckpt, rng, scale, threads):
    collected = 0
    for number in range(scale(1, 60)):
        folder = tmp_path / str(number)
        folder.mkdir()
        history = Passing(api, api.store(folder / "store"), vckpt, random.Random(rng.getrandbits(64)))
        for launch in range(history.rng.randint(2, 5)):
            history.launch(launch, threads)
            history.check()
            for what in (history.aborts, history.mends, history.remove, lambda: history.takes_in(True),
                         lambda: history.entries(300), history.collect):
                if history.rng.random() < .4:
                    what()
                    history.check()
        history.entries(300)
        assert sorted(history.shown()) == sorted(history.saved)
        vckpt("gc", history.store, "--grace", "0")
        history.collect()
        history.check()
        vckpt("verify", history.store, "--paranoid")
        collected += len(history.heads)
        history.close()
    print("heads", collected)
    assert collected
