# SPDX-License-Identifier: Apache-2.0
"""Covers of a tensor by boxes, ((offset, ...), (size, ...)) each, and lists that only look like one: all boxes lie
inside, and their items add up to the tensor's."""
import itertools
import math

import numpy as np


def items(boxes):
    return sum(math.prod(size) for _, size in boxes)


def paint(shape, boxes):
    """How many boxes have each item."""
    counts = np.zeros(shape, np.int64)
    for offset, size in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(offset, size))] += 1
    return counts


def part(box, spans):
    """The part of a box that has [low, end) of some dimensions, {d: (low, end)}, counted from the box's offset."""
    offset, size = list(box[0]), list(box[1])
    for d, (low, end) in spans.items():
        offset[d], size[d] = box[0][d] + low, end - low
    return tuple(offset), tuple(size)


# ---- covers ----

def halves(rng, box, dims):
    [d] = dims
    at = rng.randint(1, box[1][d] - 1)
    return [part(box, {d: (0, at)}), part(box, {d: (at, box[1][d])})]


def pinwheel(rng, box, dims):
    """Four boxes around a fifth: no line parts them."""
    (a, n), (b, m) = ((d, box[1][d]) for d in dims)
    r, s = sorted(rng.sample(range(1, n), 2))
    u, v = sorted(rng.sample(range(1, m), 2))
    spans = [((0, r), (0, v)), ((0, s), (v, m)), ((s, n), (u, m)), ((r, n), (0, u)), ((r, s), (u, v))]
    return [part(box, {a: x, b: y}) for x, y in spans]


def rods(rng, box, dims):
    """Three rods, one along each dimension, that interlock, and the two corners between them."""
    (x, n), (y, m), (z, o) = ((d, box[1][d]) for d in dims)
    i, j, k = rng.randint(1, n - 1), rng.randint(1, m - 1), rng.randint(1, o - 1)
    spans = [((0, n), (0, j), (k, o)), ((i, n), (0, m), (0, k)), ((0, i), (j, m), (0, o)),
             ((0, i), (0, j), (0, k)), ((i, n), (j, m), (k, o))]
    return [part(box, {x: p, y: q, z: r}) for p, q, r in spans]


WAYS = [(halves, 1, 2), (pinwheel, 2, 3), (rods, 3, 2)]     # dimensions that it cuts, and the least size of each


def cover(rng, shape, cuts):
    """Cuts the tensor, and what that gives, again and again, in every way that there is. In random order."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        way, ndims, least = rng.choice(WAYS)
        dims = [d for d, n in enumerate(box[1]) if n >= least]
        boxes += way(rng, box, rng.sample(dims, ndims)) if len(dims) >= ndims else [box]
    rng.shuffle(boxes)
    return boxes


# ---- what only looks like one ----

def shift(rng, shape, boxes, i):
    offset, size = boxes[i]
    d = rng.randrange(len(shape))
    room = [x for x in (-2, -1, 1, 2) if 0 <= offset[d] + x <= shape[d] - size[d]]
    return [(offset[:d] + (offset[d] + rng.choice(room),) + offset[d + 1:], size)] if room else None


def turn(rng, shape, boxes, i):
    """Other axes, the same sizes."""
    offset, size = boxes[i]
    size = tuple(rng.sample(size, len(size)))
    fits = all(n <= m for n, m in zip(size, shape))
    return [(tuple(min(o, m - n) for o, n, m in zip(offset, size, shape)), size)] if fits else None


def mirror(rng, shape, boxes, i):
    offset, size = boxes[i]
    d = rng.randrange(len(shape))
    return [(offset[:d] + (shape[d] - size[d] - offset[d],) + offset[d + 1:], size)]


def double(rng, shape, boxes, i):
    """In place of one another one once more, or as much of it."""
    size = boxes[i][1]
    for k in rng.sample(range(len(boxes)), len(boxes)):
        if k != i and all(n <= m for n, m in zip(size, boxes[k][1])):
            return [(tuple(o + rng.randint(0, m - n) for o, m, n in zip(*boxes[k], size)), size)]
        if k != i and math.prod(size) == math.prod(boxes[k][1]):
            return [boxes[k]]
    return None


def reshape(rng, shape, boxes, i):
    """As many items in another form at the same corner."""
    offset, size = boxes[i]
    room = [m - o for o, m in zip(offset, shape)]
    others = [s for s in itertools.product(*(range(1, n + 1) for n in room)) if math.prod(s) == math.prod(size)]
    return [(offset, rng.choice(others))]


def trade(rng, shape, boxes, i):
    """One grows, and another one shrinks by as much. Returns both."""
    (offset, size), d = boxes[i], rng.randrange(len(shape))
    grown = math.prod(size) // size[d]
    if offset[d] + size[d] == shape[d]:
        return None
    for k in rng.sample(range(len(boxes)), len(boxes)):
        for e in rng.sample(range(len(shape)), len(shape)):
            slab = items(boxes[k:k + 1]) // boxes[k][1][e]
            if k != i and grown % slab == 0 and grown // slab < boxes[k][1][e]:
                n = boxes[k][1][e] - grown // slab
                smaller = part(boxes[k], {e: rng.choice([(0, n), (grown // slab, boxes[k][1][e])])})
                return [part(boxes[i], {d: (0, size[d] + 1)}), (k, smaller)]
    return None


CHANGES = [shift, turn, mirror, double, reshape, trade]


def near(rng, shape, boxes):
    """One or two changes that keep the number of items; the result may be a cover all the same."""
    boxes = list(boxes)
    for _ in range(rng.choice([1, 1, 1, 2])):
        i = rng.randrange(len(boxes))
        changed = rng.choice(CHANGES)(rng, shape, boxes, i) if shape else None
        if changed and len(changed) == 2:
            k, boxes[k] = changed[1]
        if changed:
            boxes[i] = changed[0]
    return boxes


def some_shape(rng, ndims=(1, 2, 2, 3, 3, 3, 4)):
    ndim = rng.choice(ndims)
    return tuple(rng.randint(1, (24, 9, 5, 4)[ndim - 1]) for _ in range(ndim))


def stretched(rng, shape, boxes, most=1 << 62):
    """The same with other coordinates: each line between indices moves, and the order of lines stays. Returns (shape,
    boxes)."""
    lines = []
    for n in shape:
        room = int(most ** (1 / len(shape)))
        lines.append([0, *sorted(rng.sample(range(1, room), n))])
    return tuple(line[-1] for line in lines), [
        (tuple(line[o] for line, o in zip(lines, offset)),
         tuple(line[o + n] - line[o] for line, o, n in zip(lines, offset, size))) for offset, size in boxes]
