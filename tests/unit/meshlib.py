# SPDX-License-Identifier: Apache-2.0
"""Steps that ranks of a mesh saved, and what a rank of another mesh holds of them, by numpy and brute force."""
import itertools
import json
import math
import threading

import numpy as np

import shard_oracle as oracle


class Tensor:
    """placements: tuples of shard_oracle, one for each of `mesh`, [(name, size), ...]; None: nothing is recorded.
    ranks: of the mesh, row-major; None: first_rank and those after it."""

    def __init__(self, name, array, mesh=None, placements=None, first_rank=0, ranks=None):
        self.name, self.array, self.mesh, self.placements = name, array, mesh, placements
        self.ranks = ranks or [first_rank + i for i in range(math.prod(sizes(mesh or ())))]

    def shards(self):
        return oracle.all_ranks(self.array.shape, sizes(self.mesh), self.placements)

    def held(self, rank):
        """(array, fields) that `rank` saves."""
        if self.placements is None:
            return self.array, {}
        if rank not in self.ranks:
            return None
        return (local(self.array, self.shards()[self.ranks.index(rank)]),
                {"mesh": self.mesh, "placements": self.placements})


def sizes(mesh):
    return tuple(n for _, n in mesh)


def text(mesh):
    return ",".join(f"{name}={n}" for name, n in mesh)


def local(array, held):
    return array.reshape(-1)[held.items].reshape(held.local_shape)


def save(api, store, tensors, world, run="run", step=0):
    """Of all ranks at once, each in a thread. A tensor without placements is a replica at each of them."""
    errors = []
    whole = api.mesh(f"all={world}")
    meshes = {id(t): api.mesh(text(t.mesh), t.ranks) for t in tensors if t.mesh}

    def one(rank):
        saver = None
        try:
            saver = api.saver(store, run, rank=rank, world=world, launch=f"{run}{step}", threads=1)
            part = {}
            for t in tensors:
                held = t.held(rank)
                if held is None:
                    continue
                array, fields = held
                if t.placements is None:
                    items = array.size
                    if world > 1:   # a flat range of each rank, of which nothing is recorded
                        cut = [items * r // world for r in range(world + 1)]
                        fields = {"shape": array.shape, "mesh": whole, "placements": "R",
                                  "flat": (cut[rank], cut[rank + 1], 0)}
                        array = array.reshape(-1)[cut[rank]:cut[rank + 1]].copy()
                else:
                    fields = {"shape": t.array.shape, "mesh": meshes[id(t)],
                              "placements": oracle.words(t.placements)}
                part[t.name] = (np.ascontiguousarray(array).reshape(array.shape), fields)
            made = saver.save(part, step=step)
            try:
                made.committed()
            finally:
                made.free()
        except Exception as error:  # noqa: BLE001 raised below
            errors.append(error)
        finally:
            if saver:
                saver.free()
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def rank_ordered(mesh, ranks):
    """The mesh with its dimensions in the order in which its ranks ascend, those of one rank where they are; None:
    there is no such order."""
    longer = [d for d, (_, n) in enumerate(mesh) if n > 1]
    array = np.array(ranks).reshape(sizes(mesh))
    for order in itertools.permutations(longer):
        whole = list(range(len(mesh)))
        for at, d in zip(longer, order):
            whole[at] = d
        if (np.diff(array.transpose(whole).reshape(-1)) > 0).all():
            return [mesh[d] for d in whole]
    return None


def listed(tensors):
    return sorted({text(rank_ordered(t.mesh, t.ranks) or t.mesh) for t in tensors if t.placements})


def cutting(mesh, placements, dim):
    """The dimensions of `mesh` that cut dimension `dim`, in the order that the splits of strided placements mean; None:
    no order has these splits. What is strided goes behind all that it may, what is not before all others."""
    order = []
    for d in reversed([d for d, p in enumerate(placements) if p[0] in ("S", "SS", "IS") and p[1] == dim]):
        split = placements[d][2] if placements[d][0] == "SS" else None
        places = [0] if split is None else [at for at in range(len(order) + 1)
                                            if math.prod(mesh[e][1] for e in order[:at]) == split]
        if not places:
            return None
        order.insert(places[-1], d)
    return order


def by_name(t, asked):
    """[(dimension of `asked`, placement), ...] of a tensor, in the order in which they cut; without those that do
    not."""
    there = dict(asked)
    cuts = [(name, p) for (name, _), p in zip(t.mesh, t.placements) if p[0] not in ("R", "RS")]
    if all(there.get(name) == n for (name, n), p in zip(t.mesh, t.placements) if p[0] != "R"):
        return cuts                     # as it was saved
    result = []
    for dim in sorted({p[1] for _, p in cuts}):
        order = cutting(t.mesh, t.placements, dim)
        if order is None:
            result += [(name, p) for name, p in cuts if p[1] == dim]
        else:
            result += [(t.mesh[d][0], ("S", dim) if t.placements[d][0] == "SS" else t.placements[d]) for d in order]
    return [(name, p) for name, p in result if name in there]


def view(t, asked, tensors):
    """[Held of each rank of `asked`], or None: its shards have no rectangular shape."""
    if t.placements is None:
        return oracle.all_ranks(t.array.shape, sizes(asked), (("R",),) * len(asked))
    ascending = sorted(t.ranks)
    homes = [sorted(o.ranks) for o in tensors if o.placements and rank_ordered(o.mesh, o.ranks) == asked]
    if rank_ordered(t.mesh, t.ranks) and ascending in homes:
        shards = None if any(p[0] == "RS" for p in t.placements) else t.shards()
        return shards and [shards[t.ranks.index(rank)] for rank in ascending]
    if any(p[0] == "RS" and name in dict(asked) for (name, _), p in zip(t.mesh, t.placements)):
        return None
    cuts = by_name(t, asked)
    names = [name for name, _ in asked]
    held = []
    for coordinate in oracle.coordinates(sizes(asked)):
        place = dict(zip(names, coordinate))
        held.append(oracle.one(t.array.shape, [dict(asked)[name] for name, _ in cuts], [p for _, p in cuts],
                               [place[name] for name, _ in cuts], oracle.numbered(t.array.shape)))
    return held


def expected(tensors, asked):
    """[{name: what each rank holds}], without those that are in no file; oracle.Refused: it is no mesh of theirs."""
    ranks = [{} for _ in range(math.prod(sizes(asked)))]
    for t in tensors:
        for rank, held in zip(ranks, view(t, asked, tensors) or ()):
            rank[t.name] = local(t.array, held)
    return ranks


NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1",
         "U16": "u2", "U32": "u4", "U64": "u8", "BOOL": "?"}


def parse(raw):
    """{name: array} of a .safetensors file's bytes."""
    n = int.from_bytes(raw[:8], "little")
    assert (8 + n) % 4096 == 0
    header = json.loads(raw[8:8 + n])
    assert header.pop("__metadata__") == {"format": "pt"}
    data, out, end = raw[8 + n:], {}, 0
    for name, t in header.items():
        a, b = t["data_offsets"]
        assert a == end, "no gaps, in the order of the header"
        end = b
        out[name] = np.frombuffer(data[a:b], NUMPY[t["dtype"]]).reshape(t["shape"])
    assert end == len(data)
    return out


def same(got, wanted, component):
    names = {name.split("/", 1)[1]: a for name, a in wanted.items() if name.startswith(component + "/")}
    assert set(got) == set(names)
    for name, array in names.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, (name, got[name].shape, array.shape)
        assert got[name].tobytes() == array.tobytes(), name
