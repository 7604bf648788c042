# SPDX-License-Identifier: Apache-2.0
"""Whatever layout a step was saved under, and whatever layout is loaded under: every byte of every destination is
right, and no other byte is touched. What is read for it is what is needed.

A pair is a set of tensors, saved by a random world, and another random world that loads it, rank after rank. Kinds of
tensors and holdings are those of test_saver_layouts.py, of both sides; shard_oracle.py says which items a rank has.
The destinations of a rank lie in one arena of canaries, strided at random, and all of the arena is compared.

Parts of ranks that hold nothing of what is wanted are away while it is read, if the step's layouts say who holds it.
bytes_read is held against placelib.Account: it finds by the pages of docs/format/ where the pieces lie, and by brute
force which blocks of them have an item that the rank wants."""
import collections
import contextlib
import ctypes
import math
import random

import numpy as np
import pytest

from loadlib import NOT_STRICT, REHASH, Opened, described
from placelib import HEAD_BYTES, Account, Step
from saverlib import Vckpt
from test_saver_layouts import BYTES, ITEM, LARGE, SHAPES, Job, Tensor

MIDDLE = [(9000,), (130, 257), (24, 36, 20), (90, 1, 301), (20, 3000)]  # a few blocks, one piece or a few
LOADS = 4                                # worlds that load a step
CANARY = np.frombuffer(random.Random(1).randbytes((64 << 10) + 3), "u1")


class Mesh(ctypes.c_void_p):
    def __repr__(self):
        return self.text


class Api(Vckpt):
    def mesh(self, text, ranks=None):
        """It says in a failure what it is."""
        mesh = Mesh(super().mesh(text, ranks).value)
        mesh.text = f"mesh({text}; {ranks})"
        return mesh


class Weights(Tensor):
    """A tensor of the model, in more sizes, whose bytes may be such that encoding gains."""

    def __init__(self, rng, number, large):
        self.name = f"{rng.choice(('model', 'optimizer'))}/t{number}"
        self.shape = rng.choice(LARGE if large else rng.choice((SHAPES, MIDDLE)))
        self.dtype, self.like = rng.randint(1, 21), rng.choice(("noise", "weights", "weights"))
        self.change(rng)

    def change(self, rng):
        size, count = BYTES[self.dtype], math.prod(self.shape)
        if self.like == "noise":
            return super().change(rng)
        generator = np.random.default_rng(rng.getrandbits(64))
        words = (.02 * generator.standard_normal(-(-size * count // 2), "f4")).view("u4") >> 16    # bf16
        if size > 2:
            words[generator.random(len(words)) < .6] = 0
        self.items = np.frombuffer(words.astype("u2").tobytes()[:size * count], ITEM[size])
        return None

    def told(self):
        return f"{self.name} {self.shape} dtype {self.dtype} {self.like}, {self.holding}: {entries(self.parts)}"


def entries(parts):
    return {rank: [fields for _, fields in held] for rank, held in enumerate(parts) if held}


def recorded(t):
    """Of each rank which items it holds, if the layout says that: tensors that were declared by placements alone."""
    if not all("mesh" in fields and "flat" not in fields for held in t.parts for _, fields in held):
        return None
    found = np.zeros((len(t.parts), max(1, len(t.items))), bool)
    for rank, held in enumerate(t.parts):
        for indices, _ in held:
            indices = np.asarray(indices)
            found[rank, indices[indices >= 0]] = True
    return found


def random_world(rng):
    return rng.randint(9, 16) if rng.random() < .15 else rng.randint(1, 8)


class Saved(Job):
    """A step that is saved: of several, the last one; so pieces may lie in packs of the steps before."""

    def __init__(self, api, store, rng):
        self.api, self.store, self.rng = api, store, rng
        self.world, self.steps = random_world(rng), 0
        self.tensors = [Weights(rng, i, i == 0 and rng.random() < .3) for i in range(rng.randint(1, 6))]
        self.savers, self.layout = [None] * self.world, []

    def make(self):
        try:
            self.open()
            for n in range(self.rng.choice((1, 1, 2))):
                for t in self.tensors:
                    if n and self.rng.random() < .3:
                        t.change(self.rng)
                    t.hold(self.api, self.rng, self.world)
                self.layout.append([f"saved by {self.world} ranks:", *(t.told() for t in self.tensors)])
                self.save()
                self.held = {t.name: recorded(t) for t in self.tensors}
        finally:
            self.close()


class Destination:
    """Where a rank wants items of a tensor: in an arena, from byte `at` on. indices: of the items, -1: padding."""

    def __init__(self, rng, tensor, indices, fields, at):
        self.tensor, self.indices, self.fields = tensor, np.asarray(indices), fields
        self.strides, size = self.in_memory(rng, tensor.items.dtype.itemsize)
        self.at = at + rng.choice((0, 0, 1, 3, 64, rng.randrange(5000)))
        self.end = self.at + size

    def in_memory(self, rng, item):
        """Bytes between neighbours in each dimension, and bytes in all. No two items share a byte."""
        shape, large = self.indices.shape, self.indices.size * item > 1 << 20
        order, step, gaps = range(len(shape))[::-1], item, (0,)
        if rng.random() < .6:
            order = rng.sample(range(len(shape)), len(shape))
            step = item * rng.choice((1, 1, 2) if large else (1, 1, 2, 3)) + rng.choice((0, 0, 0, 1, 5))
            gaps = (0, 0, 0, item) if large else (0, 0, item, 3, 100)
        strides = [0] * len(shape)
        for d in order:
            strides[d] = step
            step = step * max(1, shape[d]) + rng.choice(gaps)
        return strides, step if self.indices.size else 0

    def array(self, arena):
        return np.ndarray(self.indices.shape, self.tensor.items.dtype, arena, self.at if self.indices.size else 0,
                          self.strides)

    def describe(self, rng, arena):
        array = self.array(arena)
        shape = array.shape if array.size and not {"flat", "boxes"} & self.fields.keys() and rng.random() < .5 else None
        return described(self.tensor.name, array, shape=self.tensor.shape, dtype=self.tensor.dtype, local_shape=shape,
                         strides=not array.flags.c_contiguous or rng.random() < .5, **self.fields)

    def fill(self, arena):
        """What the load has to do."""
        held = self.indices >= 0
        if self.indices.size:
            self.array(arena)[held] = self.tensor.items[self.indices[held]]

    def __str__(self):
        return f"{self.tensor.name} {self.indices.shape} at {self.at}, strides {self.strides}: {self.fields}"


class Rank:
    """One rank's load of a step."""

    def __init__(self, job, places, step, rank, counts):
        self.job, self.rng, self.places, self.step, self.rank, self.counts = (
            job, job.rng, places, step, rank, counts)
        self.destinations, at = [], 0
        for t, indices, fields in self.held():
            self.destinations.append(Destination(self.rng, t, indices, fields, at))
            at = self.destinations[-1].end
        self.arena = np.resize(CANARY, at + 100)
        self.expected = self.arena.copy()
        for d in self.destinations:
            d.fill(self.expected)

    def held(self):
        """(tensor, indices, fields). A rank need not name what it has nothing of, and may."""
        found = [(t, *part) for t in self.job.wanted for part in t.parts[self.rank]]
        for t in self.job.wanted:
            named = [fields for held in t.parts for _, fields in held if "mesh" in fields]
            if named and not t.parts[self.rank] and self.rng.random() < .3:
                found.append((t, np.zeros(0, int), {"mesh": named[0]["mesh"], "placements": named[0]["placements"]}))
        self.rng.shuffle(found)
        return found

    def load(self):
        strict = self.rng.random() < .6
        flags = (0 if strict else NOT_STRICT) | (REHASH if self.rng.random() < .1 else 0)
        with self.step.load(self.rank, self.rng.randint(1, 3), flags) as load:
            tensors = [d.describe(self.rng, self.arena) for d in self.destinations]
            some = self.rng.randint(0, len(tensors))
            load.tensors(*tensors[:some])
            load.tensors(*tensors[some:])
            missing, unexpected = self.names(load, strict)
            with self.alone():
                load.run()
            assert (load.names("missing"), load.names("unexpected")) == (missing, unexpected)
            self.compare()
            self.account(load.progress(), flags)

    @contextlib.contextmanager
    def alone(self):
        """Metadata of ranks that cannot have anything wanted are away meanwhile: whoever looks for it fails."""
        near = {rank for name, mask in self.wanted().items() if mask.any()
                for rank, held in enumerate(self.job.held[name] if self.job.held[name] is not None
                                            else [mask] * self.job.world) if (held & mask).any()}
        away = self.places.metadata(set(range(self.job.world)) - near)
        files = [p for name in away for p in self.places.store.path.glob(f"packs/*/{name}.pack")]
        assert len(files) == len(away)
        self.counts.update(away=len(files))
        for p in files:
            p.rename(p.with_suffix(".away"))
        try:
            yield
        finally:
            for p in files:
                p.with_suffix(".away").rename(p)

    def names(self, load, strict):
        """Says what the caller has and the step lacks, and the other way round."""
        declared, missing, unexpected = {d.tensor.name for d in self.destinations}, [], []
        if not strict and self.rng.random() < .5:
            load.tensor("model/none", self.arena[-100:], dtype=2)
            missing = ["model/none"]
        for component in ("model", "optimizer"):
            of = sorted(t.name for t in self.job.tensors if t.name.startswith(component))
            if of and self.rng.random() < .5 and (declared.issuperset(of) or not strict):
                load.expect(component)
                unexpected += [name for name in of if name not in declared]
        return missing, unexpected

    def compare(self):
        wrong = np.flatnonzero(self.arena != self.expected)
        if len(wrong):
            first = int(wrong[0])
            near = [str(d) for d in self.destinations if d.at - 5000 <= first < d.end + 100]
            raise AssertionError(f"{len(wrong)} bytes of {len(self.arena)} are wrong, the first at {first}: "
                                 f"{self.arena[first]}, not {self.expected[first]}; there lie {near}")

    def wanted(self):
        """{tensor: which of its items}"""
        wanted = {}
        for d in self.destinations:
            mask = wanted.setdefault(d.tensor.name, np.zeros(max(1, len(d.tensor.items)), bool))
            mask[d.indices[d.indices >= 0]] = True
        return wanted

    def account(self, progress, flags):
        wanted, items = self.wanted(), 0
        for d in self.destinations:
            items += (d.indices >= 0).sum() * d.tensor.items.dtype.itemsize
        assert progress.over == 1 and progress.bytes_wanted == progress.bytes_placed == items
        masks = {t.name: wanted[t.name][:len(t.items)].reshape(t.shape) for t in self.job.tensors if t.name in wanted}
        a = Account(self.places, masks, flags & REHASH)
        heads = a.packs * HEAD_BYTES * max(1, progress.threads)     # at worst each thread opens each pack
        assert a.stored <= progress.bytes_read <= a.bound + heads, (
            f"{progress.bytes_read} bytes read; needed {a.stored} and {a.checks} of checks; at most {a.bound}, and "
            f"heads of {a.packs} packs")
        self.counts.update(loads=1, read=progress.bytes_read, needed=a.stored + a.checks, bound=a.bound,
                           objects=a.objects,
                           encoded=a.encoded, partial=a.partial, whole=a.objects - a.partial,
                           several=len(self.destinations) > 1, nothing=not self.destinations)


class Loads:
    """All ranks of one random world load the step."""

    def __init__(self, job, places, counts):
        self.job, self.places, self.counts, rng = job, places, counts, job.rng
        self.world, self.rank = random_world(rng), None
        tensors = [t for t in job.tensors if rng.random() < .9] or job.tensors
        for t in tensors:
            t.hold(job.api, rng, self.world)
        for t in tensors:                # some are wanted twice, in two ways
            if rng.random() < .15:
                first = t.parts
                t.hold(job.api, rng, self.world)
                t.holding, t.parts = "twice", [a + b for a, b in zip(first, t.parts, strict=True)]
        job.wanted = tensors

    def told(self):
        return [f"loaded by {self.world} ranks:", *(t.told() for t in self.job.wanted), f"rank {self.rank} of them:"]

    def load(self):
        with contextlib.ExitStack() as opened:
            step = None
            for self.rank in range(self.world):
                if not step or self.job.rng.random() < .5:      # the next rank is another process, or not
                    opened.close()
                    step = opened.enter_context(Opened(self.job.api, self.job.store, self.job.steps - 1))
                Rank(self.job, self.places, step, self.rank, self.counts).load()
        self.counts["pairs"] += 1


def play(api, path, seed, counts):
    """One set of tensors, and LOADS pairs."""
    rng = random.Random(seed)
    job, told = Saved(api, api.store(path), rng), []
    try:
        job.make()
        places = Step(path, "run", job.steps - 1)
        for _ in range(LOADS):
            loads = Loads(job, places, counts)
            told = [loads]
            loads.load()
    except Exception as e:
        lines = [line for layout in job.layout + [loads.told() for loads in told] for line in layout]
        raise AssertionError("\n".join([f"play(api, path, {seed}, Counter()) repeats it.", *lines, f"{e}"])) from e


@pytest.mark.parametrize("part", range(4))
def test_any_layout_loads_under_any_other(build, tmp_path, scale, rng, part):
    api, counts = Api(build), collections.Counter()
    for n in range(scale(3, 130)):
        play(api, tmp_path / f"store{n}", rng.getrandbits(64), counts)
    print(f"bytes read / bytes needed: {counts['read'] / counts['needed']:.3f} (at most "
          f"{counts['bound'] / counts['needed']:.3f} and the heads of packs); {dict(counts)}")
    assert counts["pairs"] == scale(3, 130) * LOADS
    seen = ("encoded", "partial", "whole", "several", "nothing", "away")
    assert scale(True, all(counts[kind] for kind in seen) and counts["encoded"] < counts["objects"]), counts
