# SPDX-License-Identifier: Apache-2.0
"""Whatever a job's ranks hold of their tensors, and however it lies in their memory, the step has it whole.

Random worlds of up to 8 ranks (threads), random tensors, and for each of them any kind of holding that vckpt.h knows:
placements of every kind over the world's mesh or one of some ranks only, flat ranges with padding, box lists in several
entries, buffers that differ, whole tensors of one rank. shard_oracle.py says which items a rank's buffer has; the
buffers are strided at random. Three saves: one layout, the same with some tensors changed, another layout; each is read
back, and `verify` looks at the store."""
import ctypes
import math
import random
import threading

import numpy as np
import shard_oracle as oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saverlib import ALONE, BUFFER, TensorInfo, Vckpt

BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 2, 12: 4, 13: 8, 14: 8, 15: 16, 16: 1, 17: 1,
         18: 1, 19: 1, 20: 1, 21: 1}
ITEM = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: np.dtype("V16")}
SHAPES = [(), (0,), (1,), (7,), (64,), (1000,), (3, 0), (5, 6), (16, 24), (33, 129), (8, 1, 4), (4, 6, 10),
          (2, 3, 4, 5), (0, 2, 3, 1), (3, 8, 2, 12)]
LARGE = [(300000,), (700, 650), (1100, 3, 130), (64, 48, 7, 9)]


class Mesh:
    def __init__(self, api, sizes, ranks):
        self.sizes, self.ranks = sizes, ranks
        self.names = ["dp", "tp", "cp"][:len(sizes)]
        self.p = api.mesh(",".join(f"{n}={s}" for n, s in zip(self.names, sizes)), ranks)


def random_sizes(rng, count):
    sizes = []
    while count > 1 and len(sizes) < 2 and rng.random() < .7:
        n = rng.choice([d for d in range(1, count + 1) if count % d == 0])
        sizes.append(n)
        count //= n
    return tuple(sizes + [count])


def random_mesh(api, rng, world):
    count = world if rng.random() < .6 else rng.randint(1, world)
    return Mesh(api, random_sizes(rng, count), rng.sample(range(world), count))


def random_placement(rng, shape, size):
    kind = rng.choice(("R", "R", "S", "S", "SS", "IS", "RS"))
    if kind == "R" or not shape and kind != "RS":
        return ("R",)
    if kind == "S":
        return ("S", rng.randrange(len(shape)))
    if kind == "RS":
        units = [rng.choice((0, 1, 1, 2)) for _ in range(size)]
        return ("RS", rng.randint(0, len(shape)), tuple(units) if sum(units) else (1,) * size)
    return (kind, rng.randrange(len(shape)), rng.randint(1, 3))


def random_placements(rng, shape, mesh):
    for _ in range(20):
        found = [random_placement(rng, shape, n) for n in mesh.sizes]
        try:
            return found, oracle.all_ranks(shape, mesh.sizes, found)
        except oracle.Refused:
            pass
    return [("R",)] * len(mesh.sizes), oracle.all_ranks(shape, mesh.sizes, [("R",)] * len(mesh.sizes))


def split(rng, box, n):
    """A box, (from, to) in each dimension, in n or fewer disjoint ones."""
    boxes = [box]
    for _ in range(n - 1):
        b = boxes.pop(rng.randrange(len(boxes)))
        wide = [d for d, (lo, hi) in enumerate(b) if hi - lo > 1]
        if not wide:
            boxes.append(b)
            continue
        d = rng.choice(wide)
        lo, hi = b[d]
        at = rng.randint(lo + 1, hi - 1)
        boxes += [b[:d] + [part] + b[d + 1:] for part in ((lo, at), (at, hi))]
    rng.shuffle(boxes)
    return boxes


def in_memory(rng, items):
    """The same items somewhere else, contiguous or not."""
    if not items.size or not items.ndim or rng.random() < .4:
        return items.copy()
    order = rng.sample(range(items.ndim), items.ndim)
    step = [rng.choice((1, 1, 2, -1, -2)) for _ in order]
    base = np.zeros([abs(step[d]) * items.shape[d] + 1 for d in order], items.dtype)
    view = base.transpose(np.argsort(order)) if order else base
    view = view[tuple(slice(None, None, s) for s in step)]
    view = view[tuple(slice(0, n) for n in items.shape)]
    view[...] = items
    return view


class Tensor:
    def __init__(self, rng, number, large):
        self.name, self.shape = (f"{rng.choice(('model', 'optimizer'))}/t{number}",
                                 rng.choice(LARGE if large else SHAPES))
        self.dtype = rng.randint(1, 21)
        self.change(rng)

    def change(self, rng):
        size = BYTES[self.dtype]
        self.items = np.frombuffer(rng.randbytes(size * math.prod(self.shape)), ITEM[size])

    def hold(self, api, rng, world):
        """Decides who holds what: self.parts[rank], a list of (what of the items, -1: padding; fields); None: not named
        there."""
        self.holding = rng.choice(("placements", "placements", "flat", "flat", "boxes", "boxes", "buffer", "alone",
                                   "plain"))
        self.parts = [[] for _ in range(world)]
        everything = np.arange(math.prod(self.shape)).reshape(self.shape)
        self.others = {}                 # buffers: ranks whose own copy differs
        if self.holding == "plain":
            self.parts = [[(everything, {})] for _ in range(world)]
        elif self.holding == "alone":
            self.parts[rng.randrange(world)] = [(everything, {"flags": ALONE})]
        elif self.holding == "boxes":
            self.hold_boxes(rng, world, everything)
        else:
            self.hold_placements(rng, random_mesh(api, rng, world))

    def hold_boxes(self, rng, world, everything):
        lists = [[] for _ in range(world)]
        boxes = split(rng, [(0, n) for n in self.shape], rng.randint(1, 9)) if everything.size else []
        for b in boxes:
            for rank in rng.sample(range(world), 1 if rng.random() < .8 else min(2, world)):
                lists[rank].append(b)
        for rank, mine in enumerate(lists):
            entries = 1 if not mine or rng.random() < .6 else 2
            for e in range(entries):
                some = mine[e::entries]
                buffer = [everything[tuple(slice(*p) for p in b)].reshape(-1) for b in some]
                self.parts[rank].append((np.concatenate(buffer) if buffer else np.zeros(0, "i8"), {
                    "boxes": [[[lo, hi - lo] for lo, hi in b] for b in some]}))

    def hold_placements(self, rng, mesh):
        placements, held = random_placements(rng, self.shape, mesh)
        same = [d for d, p in enumerate(placements) if p[0] == "R"]
        along = rng.sample(same, rng.randint(0, len(same))) if self.holding == "flat" else []
        # all ranks say the same of who holds the same
        rest = [mesh.names[d] for d in same if d not in along] if rng.random() < .7 else []
        cuts = {}
        for coordinate, h, rank in zip(oracle.coordinates(mesh.sizes), held, mesh.ranks):
            fields = {"mesh": mesh.p, "placements": oracle.words(placements)}
            if self.holding == "flat":
                n, group = len(h.items), math.prod(mesh.sizes[d] for d in along)
                at = 0
                for d in along:
                    at = at * mesh.sizes[d] + coordinate[d]
                # one way of cutting for all that share a shard, whatever stands along the other dimensions
                key = tuple(c for d, c in enumerate(coordinate) if d not in same)
                if key not in cuts:
                    room = n + (rng.randint(0, 9) if rng.random() < .6 else 0)
                    cuts[key] = room, [0] + sorted(rng.randint(0, room) for _ in range(group - 1)) + [room]
                room, points = cuts[key]
                flat = (points[at], points[at + 1], room if room > n or rng.random() < .5 else 0)
                fields["flat"] = flat
                if rest:
                    fields["same_dims"] = ",".join(rest)
                self.parts[rank] = [(h.buffer(flat), fields)]
            else:
                if self.holding == "buffer":
                    fields["flags"] = BUFFER
                    if any(coordinate[d] for d in same):
                        self.others[rank] = rng.randbytes(8)
                self.parts[rank] = [(h.items.reshape(h.local_shape), fields)]

    def local(self, rng, rank, indices):
        """A rank's buffer; padding, and a buffer that does not count, hold anything."""
        padded = np.append(self.items, np.frombuffer(b"\xa5" * self.items.dtype.itemsize, self.items.dtype))
        out = padded[indices]
        if rank in self.others and out.size:
            out = np.frombuffer(random.Random(self.others[rank]).randbytes(out.nbytes), out.dtype).reshape(out.shape)
        return in_memory(rng, np.asarray(out))


def read_back(api, store, step):
    p, out = ctypes.c_void_p(), {}
    api.call("vckpt_step_open", store.encode(), b"run", ctypes.c_uint64(step), ctypes.byref(p))
    for i in range(api.lib.vckpt_step_tensor_count(p)):
        info = TensorInfo()
        assert api.lib.vckpt_step_tensor(p, i, ctypes.byref(info)) == 0
        data = ctypes.create_string_buffer(max(1, info.bytes))
        api.call("vckpt_step_read", p, i, None, data, None)
        name = f"{info.component.decode()}/{ctypes.string_at(info.name, info.name_len).decode()}"
        out[name] = info.dtype, tuple(info.shape[:info.ndim]), data.raw[:info.bytes]
    api.lib.vckpt_step_close(p)
    return out


class Job:
    def __init__(self, api, store, rng):
        self.api, self.store, self.rng = api, store, rng
        self.world = rng.randint(1, 8)
        self.tensors = [Tensor(rng, i, i == 0 and rng.random() < .35) for i in range(rng.randint(1, 5))]
        self.savers, self.steps = [None] * self.world, 0

    def on_all(self, work):
        out = [None] * self.world

        def one(rank):
            try:
                out[rank] = work(rank)
            except Exception as e:  # noqa: BLE001 told below
                out[rank] = e
        threads = [threading.Thread(target=one, args=(r,)) for r in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        failed = [e for e in out if isinstance(e, Exception)]
        if failed:
            raise failed[0]
        return out

    def open(self):
        ring, threads, launch = self.rng.choice((0, 12 << 20, 20 << 20)), self.rng.randint(1, 3), f"{self.rng.random()}"

        def one(rank):
            self.savers[rank] = self.api.saver(self.store, "run", rank=rank, world=self.world, launch=launch, ring=ring,
                                               threads=threads)
        self.on_all(one)

    def close(self):
        for s in self.savers:
            if s:
                s.free()

    def save(self):
        """Of all ranks; new pieces of all of them."""
        wanted = []
        for rank in range(self.world):
            mine = [(t, t.local(self.rng, rank, indices), fields) for t in self.tensors
                    for indices, fields in t.parts[rank]]
            self.rng.shuffle(mine)
            wanted.append(mine)

        def one(rank):
            save = self.savers[rank].begin()
            try:
                for t, array, fields in wanted[rank]:
                    save.tensor(t.name, array, shape=t.shape, dtype=t.dtype, **fields)
                save.submit()
                save.staged()
                for _, array, _ in wanted[rank]:
                    array[...] = np.zeros(1, array.dtype)[0]  # the caller's again
                assert save.committed() == self.steps
                return save.timings().pieces_new
            finally:
                save.free()
        new = sum(self.on_all(one))
        found = read_back(self.api, self.store, self.steps)
        assert set(found) == {t.name for t in self.tensors}
        for t in self.tensors:
            dtype, shape, data = found[t.name]
            assert (dtype, shape) == (t.dtype, t.shape)
            assert data == t.items.tobytes(), f"{t.name} {t.shape} by {t.holding}: {t.parts}"
        self.steps += 1
        return new


def play(api, store, rng):
    job = Job(api, store, rng)
    try:
        job.open()
        for t in job.tensors:
            t.hold(api, rng, job.world)
        job.save()
        changed = [t for t in job.tensors if rng.random() < .3]
        for t in changed:
            t.change(rng)
        new = job.save()
        assert new == 0 or changed, f"{new} pieces anew of what has not changed"
        for t in job.tensors:
            t.hold(api, rng, job.world)
            if rng.random() < .3:
                t.change(rng)
        if rng.random() < .3:            # another launch
            job.close()
            job.open()
        job.save()
    finally:
        job.close()


def test_any_holding_comes_back(build, vckpt, tmp_path, scale):
    api, number = Vckpt(build), iter(range(10**6))

    @settings(max_examples=scale(12, 250), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64 - 1))
    def example(seed):  # hypothesis names the seed of an example that fails
        rng = random.Random(seed)
        store = api.store(tmp_path / f"store{next(number)}")
        play(api, store, rng)
        done = vckpt("verify", store, check=False)
        assert done.returncode == 0, done.stdout
    example()
