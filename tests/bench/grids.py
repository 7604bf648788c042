#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the grid gives, beside two others: for the shapes of real models, large and small, how much is stored again when
a model that was saved whole is saved under tensor parallelism and FSDP, how much more than it needs a rank reads, and
how many objects there are. By the rule of docs/format/grid.md in Python (tests/property/test_grid.py); no weights, no
store.

    tests/bench/grids.py [--model NAME]...

Prints the table of docs/layouts.md. Under tensor parallelism `o`, `down` and what follows them are cut by columns, all
else of two dimensions by rows, and vectors are replicated; FSDP cuts dimension 0 of all.
"""
import argparse
import functools
import math
import pathlib
import sys

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/bench"), str(ROOT / "tests/property")]
import shared_bytes  # noqa: E402
import test_grid  # noqa: E402

BLOCK = 16 << 10
OBJECT_BYTES = 80 + 64      # of an object's entry in the footer, and of a piece in a row
COLUMNS = ("o_proj", "down_proj", "experts w2", "experts down_proj", "dense down_proj", "attn.c_proj", "mlp.c_proj")
# name; M of tensors of less than 64 times the last number, and R; M of others; halves of odd sizes rounded up
RULES = [("without S", 128 << 10, 512, 128 << 10, False), ("M 32 KiB", 32 << 10, 256, 32 << 10, False),
         ("with S", 32 << 10, 256, 128 << 10, True)]
LAYOUTS = [("TP 2", 2, True), ("TP 3", 3, True), ("TP 4", 4, True), ("TP 8", 8, True), ("FSDP 8", 8, False)]


def encoder(hidden, layers, vocabulary, positions, types=2):
    """BERT and its kin."""
    return [("embeddings", (vocabulary, hidden), 1), ("positions", (positions, hidden), 1),
            ("types", (types, hidden), 1), ("q, k, v, pooler", (hidden, hidden), 3 * layers + 1),
            ("o_proj", (hidden, hidden), layers), ("up_proj", (4 * hidden, hidden), layers),
            ("down_proj", (hidden, 4 * hidden), layers), ("up bias", (4 * hidden,), layers),
            ("vectors", (hidden,), 9 * layers + 3)]


def small(hidden, intermediate, layers, kv, vocabulary, tied=True):
    """Llama's shapes with other sizes."""
    return [("embed_tokens", (vocabulary, hidden), 1 if tied else 2), ("q_proj", (hidden, hidden), layers),
            ("k_proj, v_proj", (kv, hidden), 2 * layers), ("o_proj", (hidden, hidden), layers),
            ("gate_proj, up_proj", (intermediate, hidden), 2 * layers),
            ("down_proj", (hidden, intermediate), layers), ("norms", (hidden,), 2 * layers + 1)]


def model(name, item, tensors):
    return shared_bytes.Model(name, item, tensors, sum(math.prod(shape) * count for _, shape, count in tensors))


MODELS = [*shared_bytes.MODELS,
          model("MiniLM-L6", 4, encoder(384, 6, 30522, 512)), model("BERT base", 4, encoder(768, 12, 30522, 512)),
          model("ViT-B/16", 4, [("patches", (768, 3, 16, 16), 1), *encoder(768, 12, 1000, 197)[:2],
                                *encoder(768, 12, 1000, 197)[3:]]),
          model("SmolLM 135M", 2, small(576, 1536, 30, 192, 49152)),
          model("Qwen2.5 0.5B", 2, small(896, 4864, 24, 128, 151936)),
          model("32001 x 896", 4, small(896, 4864, 24, 128, 32001)),
          model("TinyLlama 1.1B", 2, small(2048, 5632, 22, 256, 32000, tied=False))]


class Rule:
    """A rule for tiles; what it gives for a shape is computed once."""

    def __init__(self, name, least, row, many, up):
        self.name, self.least, self.row, self.many, self.up = name, least, row, many, up
        self.tile = functools.cache(self.make_tile)
        self.pieces = functools.cache(self.make_pieces)
        self.touched = functools.cache(self.make_touched)
        self.of_layout = functools.cache(self.make_of_layout)

    def least_of(self, shape, item):
        return self.least if item * math.prod(shape) < 64 * self.many else self.many

    def make_tile(self, shape, item):
        least = self.least_of(shape, item)
        return test_grid.oracle_tile(shape, item, least, 1 << 20, self.row, least if self.up else 0)

    def make_pieces(self, shape, item, offset, size):
        e, k = self.tile(shape, item)
        return frozenset(test_grid.oracle_pieces(shape, item, e, k, self.least_of(shape, item), offset, size))

    def make_touched(self, size, item, k, edge, shift, low, extent):
        """Bytes of the blocks of a piece that the part `low`, `extent` of it meets; cells of `edge` along k, the first
        one of which is cut `shift` short."""
        order, at = numpy.empty(size, numpy.int64), 0
        for a, b in test_grid.oracle_spans(shift, shift + size[k], edge):
            cell = tuple(slice(a - shift, b - shift) if d == k else slice(None) for d in range(len(size)))
            order[cell] = numpy.arange(at, at + order[cell].size).reshape(order[cell].shape)
            at += order[cell].size
        part = order[tuple(slice(a, a + n) for a, n in zip(low, extent))].ravel() * item
        blocks = numpy.unique(numpy.concatenate([part // BLOCK, (part + item - 1) // BLOCK]))
        return int(numpy.minimum((blocks + 1) * BLOCK, math.prod(size) * item).sum() - blocks.sum() * BLOCK)

    def make_of_layout(self, shape, item, dimension, ranks):
        """(bytes that a save so adds to a whole one, bytes needed, bytes read of the whole one), over all ranks."""
        e, k = self.tile(shape, item)
        whole, zero = self.pieces(shape, item, (0,) * len(shape), shape), (0,) * len(shape)
        step, added, needed, read = -(-shape[dimension] // ranks), 0, 0, 0
        for low in range(0, shape[dimension], step):
            offset = tuple(low if d == dimension else 0 for d in range(len(shape)))
            size = tuple(min(step, n - low) if d == dimension else n for d, n in enumerate(shape))
            added += sum(math.prod(s) for o, s in self.pieces(shape, item, offset, size) if (o, s) not in whole)
            needed += math.prod(size)
            for at, extent in whole:
                first = tuple(map(max, at, offset))
                part = tuple(min(a + n, o + s) - f for a, n, o, s, f in zip(at, extent, offset, size, first))
                if min(part) > 0:
                    read += self.touched(extent, item, k, e[k], at[k] % e[k],
                                         tuple(f - a for f, a in zip(first, at)) if part != extent else zero, part)
        return item * added, item * needed, read


def figures(rule, m):
    """{column: text}: objects of the whole, bytes of their entries in percent; percent added, ratio read by layout."""
    objects = sum(count * len(rule.pieces(shape, m.item, (0,) * len(shape), shape)) for _, shape, count in m.tensors)
    found = {"objects": f"{objects:,}", "entries, %": f"{100 * objects * OBJECT_BYTES / m.bytes:.2f}"}
    for name, ranks, tensor_parallel in LAYOUTS:
        added = needed = read = 0
        for what, shape, count in m.tensors:
            if tensor_parallel and len(shape) == 1:
                continue
            dimension = 1 if tensor_parallel and what in COLUMNS else 0
            a, n, r = rule.of_layout(shape, m.item, dimension, ranks)
            added, needed, read = added + count * a, needed + count * n, read + count * r
        found[name] = f"{100 * added / m.bytes:.1f}, {read / needed:.2f}"
    return found


def report(models, say=functools.partial(print, flush=True)):
    columns = ["objects", "entries, %", *(name for name, _, _ in LAYOUTS)]
    say("| " + " | ".join(["model", "grid", *columns]) + " |")
    say("|" + " --- |" * (2 + len(columns)))
    for m in models:
        for rule in (Rule(*r) for r in RULES):
            found = figures(rule, m)
            say("| " + " | ".join([m.name, rule.name, *(found[c] for c in columns)]) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[m.name for m in MODELS])
    o = parser.parse_args()
    report([m for m in MODELS if not o.model or m.name in o.model])


if __name__ == "__main__":
    main()
