# SPDX-License-Identifier: Apache-2.0
"""Whatever a job did before, each visible step has the bytes that were saved as it.

Random histories of a run: launches of one to three ranks that go on from any step; tensors of every size, also of none,
whole, alone, replicated or sharded; saves of some components and some tensors, of steps that exist, several under way;
memory that changes as soon as it was copied; between saves, removals and the collector."""
import ctypes
import random

import numpy
import pytest

from saverlib import ALONE, Vckpt

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
        self.vckpt("gc", self.store, "--grace", "0", check=False)   # refused while a saver lives: then it only marks

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
