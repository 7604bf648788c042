# SPDX-License-Identifier: Apache-2.0
"""Steps that ranks of a mesh saved, and what a rank of another mesh holds of them, by numpy and brute force."""
import json
import math
import threading

import numpy as np

import shard_oracle as oracle


class Tensor:
    """placements: tuples of shard_oracle, one for each of `mesh`, [(name, size), ...]; None: nothing is recorded."""

    def __init__(self, name, array, mesh=None, placements=None, first_rank=0):
        self.name, self.array, self.mesh, self.placements = name, array, mesh, placements
        self.first_rank = first_rank

    def held(self, rank):
        """(array, fields) that `rank` saves."""
        if self.placements is None:
            return self.array, {}
        fields = {"mesh": self.mesh, "placements": self.placements}
        shards = oracle.all_ranks(self.array.shape, sizes(self.mesh), self.placements)
        number = rank - self.first_rank
        if not 0 <= number < len(shards):
            return None
        return local(self.array, shards[number]), fields


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
    meshes = {id(t): api.mesh(text(t.mesh), range(t.first_rank, t.first_rank + math.prod(sizes(t.mesh))))
              for t in tensors if t.mesh}

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


def mapped(asked, saved, placements):
    """The placements of a tensor under the mesh `asked`: by names; None: its shards have no rectangular shape."""
    names = [name for name, _ in saved]

    def behind(mesh, placements, i, dim):
        return math.prod(n for (_, n), p in list(zip(mesh, placements))[i + 1:] if p[0] in ("S", "SS") and p[1] == dim)
    found = [placements[names.index(name)] if name in names else ("R",) for name, _ in asked]
    if any(p[0] == "RS" for p in found):
        return None
    out = []
    for i, ((name, _), p) in enumerate(zip(asked, found)):
        if p[0] == "SS" and p[2] == behind(saved, placements, names.index(name), p[1]):
            p = ("SS", p[1], behind(asked, found, i, p[1]))
        out.append(p)
    return tuple(out)


def expected(tensors, asked):
    """[{name: what each rank holds}], without those that are in no file; oracle.Refused: it is no mesh of theirs."""
    ranks = [{} for _ in range(math.prod(sizes(asked)))]
    for t in tensors:
        placements = mapped(asked, t.mesh, t.placements) if t.placements else (("R",),) * len(asked)
        if placements is None:
            continue
        for rank, held in enumerate(oracle.all_ranks(t.array.shape, sizes(asked), placements)):
            ranks[rank][t.name] = local(t.array, held)
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
