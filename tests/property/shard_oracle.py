# SPDX-License-Identifier: Apache-2.0
"""Who holds which items, by brute force: number every item of the logical tensor, cut it as the placements say.

Written from the rules of core/tensor/shard.h, not from its code. A placement is a tuple:
("R",)  ("S", dim)  ("SS", dim, split)  ("IS", dim, k)  ("RS", leading dimensions, (units...))  ("P",)
Coordinates, and so results for all ranks, are in mesh order. A buffer is an array of item numbers, -1 for padding."""
import functools
import itertools
import math

import numpy as np


class Refused(Exception):
    """The rules do not allow this sharding."""


def word(p):
    if p[0] == "RS":
        return f"RS({','.join(map(str, range(p[1])))};{','.join(map(str, p[2]))})"
    return p[0] + (f"({','.join(map(str, p[1:]))})" if len(p) > 1 else "")


def words(placements):
    return ",".join(map(word, placements))


def chunk(indices, n, i):
    """The i-th of n chunks as torch.chunk makes them, those that it leaves out being empty."""
    c = -(-len(indices) // n)
    return indices[c * i:c * (i + 1)]


def cut(indices, step):
    """What one placement leaves of the indices; step: (kind, split, size of the mesh dimension, coordinate on it)."""
    kind, split, p, i = step
    if kind == "S":
        return chunk(indices, p, i)
    if kind == "SS":
        return sum((chunk(chunk(indices, split, j), p, i) for j in range(split)), ())
    if len(indices) % split or len(indices) // split % p:
        raise Refused("interleaved")
    part = len(indices) // split
    return sum((chunk(indices[j * part:(j + 1) * part], p, i) for j in range(split)), ())


@functools.lru_cache(maxsize=1 << 18)
def held(n, steps):
    """Indices of a dimension of n that are left after all steps."""
    indices = tuple(range(n))
    for step in steps:
        indices = cut(indices, step)
    return indices


@functools.lru_cache(maxsize=1 << 18)
def runs(indices):
    """Runs of neighbouring indices."""
    return sum(1 for k, i in enumerate(indices) if k == 0 or indices[k - 1] != i - 1)


def slabs(shape, a, b):
    """Items [a, b) of a tensor flattened as boxes of it, each the largest that begins where the one before it ends:
    [((from, to) in each dimension), ...]."""
    result = []
    while a < b:
        for d in range(len(shape)):
            row = math.prod(shape[d + 1:])
            at = a // row % shape[d]
            n = min((b - a) // row, shape[d] - at)
            if a % row == 0 and n > 0:
                break
        else:                           # a scalar
            return [()]
        fixed = [a // math.prod(shape[e + 1:]) % shape[e] for e in range(d)]
        result.append(tuple((f, f + 1) for f in fixed) + ((at, at + n),) + tuple((0, e) for e in shape[d + 1:]))
        a += n * row
    return result


class Held:
    """What the rank at one coordinate holds, without a flat range."""

    def __init__(self, shape, local_shape, indices, inner_range, items):
        self.shape, self.local_shape, self.indices, self.range, self.items = (
            shape, local_shape, indices, inner_range, items)

    def buffer(self, flat=None):
        """flat: (from, to, length of the bucket or 0)."""
        if flat is None:
            return self.items
        a, b, length = flat
        if length and length < len(self.items) or a > b or b > (length or len(self.items)):
            raise Refused("flat range")
        return np.concatenate([self.items[a:b], np.full(b - max(a, min(b, len(self.items))), -1, np.int64)])

    def boxes(self, flat=None):
        """How many boxes: of each slab of the range, the runs in each dimension multiplied."""
        inner = tuple(map(len, self.indices))
        a, b = self.range
        if flat is not None:
            a, b = min(a + flat[0], b), min(a + flat[1], b)
        if 0 in inner or a >= b:
            return 0
        if (a, b) == (0, math.prod(inner)):
            return math.prod(map(runs, self.indices))
        return sum(math.prod(runs(i[lo:hi]) for i, (lo, hi) in zip(self.indices, slab)) for slab in slabs(inner, a, b))


def one(shape, mesh, placements, coordinate, numbers):
    """Held of the rank at a coordinate. numbers: the tensor with its items numbered."""
    steps, ragged = [()] * len(shape), None
    for p, size, i in zip(placements, mesh, coordinate):
        if p[0] == "P":
            raise Refused("partial")
        if p[0] == "RS":
            if ragged or p[1] > len(shape) or len(p[2]) != size or sum(p[2]) == 0:
                raise Refused("ragged")
            ragged = p, i
        elif p[0] != "R":
            if p[1] >= len(shape) or p[0] != "S" and p[2] < 1:
                raise Refused("dimension")
            steps[p[1]] += ((p[0], p[2] if len(p) > 2 else 1, size, i),)
    indices = tuple(held(n, s) for n, s in zip(shape, steps))
    left = numbers
    for d, (n, index) in enumerate(zip(shape, indices)):
        if len(index) != n:
            left = left.take(index, axis=d)
    if not ragged:
        return Held(shape, left.shape, indices, (0, left.size), left.reshape(-1))
    (_, leading, units), i = ragged
    rows, rest = math.prod(left.shape[:leading]), left.shape[leading:]
    if rows % sum(units):
        raise Refused("units")
    unit = rows // sum(units)
    a, b = unit * sum(units[:i]), unit * sum(units[:i + 1])
    width = math.prod(rest)
    return Held(shape, (b - a, *rest), indices, (a * width, b * width), left.reshape(rows, *rest)[a:b].reshape(-1))


@functools.lru_cache(maxsize=1 << 12)
def numbered(shape):
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


@functools.lru_cache(maxsize=1 << 10)
def coordinates(mesh):
    return list(itertools.product(*map(range, mesh)))


def all_ranks(shape, mesh, placements):
    """[Held of each rank], in mesh order; Refused if the rules forbid it for any of them."""
    if len(placements) != len(mesh):
        raise Refused("number of placements")
    numbers = numbered(shape)
    return [one(shape, mesh, placements, c, numbers) for c in coordinates(mesh)]


def replicas(mesh, placements):
    return math.prod(n for n, p in zip(mesh, placements) if p[0] == "R")


def inside(shape, offset, size):
    """For each item, by number, whether it lies in a window. The last entry stands for padding, item -1: no."""
    if not shape:
        return np.array([True, False])
    mask = np.zeros(shape, bool)
    mask[tuple(slice(o, o + n) for o, n in zip(offset, size))] = True
    return np.append(mask.reshape(-1), False)
