#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of a model is stored once when the same weights are saved under several layouts, and how much more than it
needs a rank reads: computed by the library's own meshes, shards, grid and stored order, for the shapes of real models.
No weights, no store.

    tests/bench/shared_bytes.py [--build DIR] [--model NAME]... [--json FILE]

Prints the tables of docs/layouts.md, as they stand there, and every figure that is not what was expected for it.

A layout is (a, b): dimension 0 over a ranks, dimension 1 over b, by the ceil rule. Two pieces of one tensor are one
object if their offsets and sizes agree (docs/format/grid.md). 'Shared' is the part of a layout's bytes that lies in
pieces which the other layout has too; what is not shared is stored again. Tensors of equal shape have equal pieces:
each shape is computed once, and counted as often as the model has it.
"""
import argparse
import ctypes
import functools
import json
import math
import pathlib
import sys

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/property"))
import tensorlib  # noqa: E402

BLOCK = 16 << 10
DEFAULT = (128 << 10, 1 << 20, 256, 32 << 10)
WHOLE = (1, 1)

# ---- models: (what, shape, how many), from the config.json that stands beside the published weights of each
# -----------


def llama(hidden, intermediate, layers, kv_heads, vocab, head=128):
    """meta-llama/Meta-Llama-3-8B, -70B: num_attention_heads = hidden / 128, num_key_value_heads 8, embeddings not
    tied."""
    return [("embed_tokens, lm_head", (vocab, hidden), 2),
            ("q_proj", (hidden, hidden), layers), ("k_proj, v_proj", (kv_heads * head, hidden), 2 * layers),
            ("o_proj", (hidden, hidden), layers), ("gate_proj, up_proj", (intermediate, hidden), 2 * layers),
            ("down_proj", (hidden, intermediate), layers), ("norms", (hidden,), 2 * layers + 1)]


def mixtral():
    """mistralai/Mixtral-8x7B-v0.1: hidden_size 4096, intermediate_size 14336, 32 layers, 32 heads, 8 for keys and
    values, num_local_experts 8, vocab_size 32000; an expert's weights are tensors of their own."""
    h, f, n, e = 4096, 14336, 32, 8
    return [("embed_tokens, lm_head", (32000, h), 2), ("q_proj", (h, h), n), ("k_proj, v_proj", (1024, h), 2 * n),
            ("o_proj", (h, h), n),
            ("gate", (e, h), n), ("experts w1, w3", (f, h), 2 * e * n), ("experts w2", (h, f), e * n),
            ("norms", (h,), 2 * n + 1)]


def deepseek_v3():
    """deepseek-ai/DeepSeek-V3 without the layer for multi-token prediction: hidden_size 7168, 61 layers of which
    first_k_dense_replace 3 are dense (intermediate_size 18432), n_routed_experts 256 and n_shared_experts 1 of
    moe_intermediate_size 2048, 128 heads, q_lora_rank 1536, kv_lora_rank 512, qk_nope_head_dim 128, qk_rope_head_dim
    64, v_head_dim 128, vocab_size 129280. Published in f8 with scales; here in bf16."""
    h, n, dense, experts, m = 7168, 61, 3, 256, 2048
    moe = n - dense
    return [("embed_tokens, lm_head", (129280, h), 2),
            ("q_a_proj", (1536, h), n), ("q_a_layernorm", (1536,), n), ("q_b_proj", (128 * (128 + 64), 1536), n),
            ("kv_a_proj_with_mqa", (512 + 64, h), n), ("kv_a_layernorm", (512,), n),
            ("kv_b_proj", (128 * (128 + 128), 512), n),
            ("o_proj", (h, 128 * 128), n), ("norms", (h,), 2 * n + 1),
            ("dense gate_proj, up_proj", (18432, h), 2 * dense), ("dense down_proj", (h, 18432), dense),
            ("router", (experts, h), moe), ("router bias", (experts,), moe),
            ("experts gate_proj, up_proj", (m, h), 2 * moe * (experts + 1)),
            ("experts down_proj", (h, m), moe * (experts + 1))]


def gpt2():
    """openai-community/gpt2: n_embd 768, n_layer 12, n_positions 1024, vocab_size 50257; lm_head is tied to wte, Conv1D
    weights are (in, out). Without the causal masks (attn.bias), which some files carry."""
    h, n = 768, 12
    return [("wte", (50257, h), 1), ("wpe", (1024, h), 1), ("attn.c_attn", (h, 3 * h), n), ("attn.c_proj", (h, h), n),
            ("mlp.c_fc", (h, 4 * h), n),
            ("mlp.c_proj", (4 * h, h), n), ("c_attn bias", (3 * h,), n), ("c_fc bias", (4 * h,), n),
            ("other biases", (h,), 2 * n),
            ("norms", (h,), 2 * (2 * n + 1))]


class Model:
    def __init__(self, name, item, tensors, parameters):
        self.name, self.item, self.tensors = name, item, tensors
        self.parameters = sum(math.prod(shape) * count for _, shape, count in tensors)
        assert self.parameters == parameters, (name, self.parameters)

    @property
    def bytes(self):
        return self.parameters * self.item


MODELS = [Model("Llama-3 8B", 2, llama(4096, 14336, 32, 8, 128256), 8_030_261_248),
          Model("Llama-3 70B", 2, llama(8192, 28672, 80, 8, 128256), 70_553_706_496),
          Model("Mixtral 8x7B", 2, mixtral(), 46_702_792_704),
          Model("DeepSeek-V3", 2, deepseek_v3(), 671_026_419_200),
          Model("GPT-2", 4, gpt2(), 124_439_808)]

# ---- what the library says ---------------------------------------------------------------------------------------


class Cutter:
    """Grids, shards and pieces of the library `lib`, cached by shape. Boxes and pieces are ((offset...), (size...))."""

    def __init__(self, lib, params=DEFAULT):
        self.lib, self.params, self.kept = tensorlib.load(lib), params, {}

    def once(self, function, *key):
        """function(*key), computed the first time only."""
        key = (function.__name__, *key)
        if key not in self.kept:
            self.kept[key] = function(*key[1:])
        return self.kept[key]

    def make_grid(self, shape, item):
        g, s = tensorlib.Grid(), tensorlib.Shape.of(shape)
        r = self.lib.tensor_grid_init(ctypes.byref(g), ctypes.byref(s), ctypes.c_uint(item),
                                      tensorlib.GridParams(*self.params))
        if r < 0:
            raise tensorlib.Failed(r, f"grid of {shape}")
        return g

    def grid(self, shape, item):
        return self.once(self.make_grid, shape, item)

    def make_mesh(self, layout):
        return tensorlib.OwnedMesh(self.lib, [("a", layout[0]), ("b", layout[1])])

    def make_boxes(self, shape, layout):
        """A set: what several ranks hold alike stands in it once. An empty shard has no box."""
        mesh = self.once(self.make_mesh, layout)
        words = ",".join(f"S({d})" if d < len(shape) else "R" for d in (0, 1))
        sharding = tensorlib.OwnedSharding(self.lib, shape, mesh, words)
        return {(offset, size) for rank in range(math.prod(layout))
                for offset, size, _, _ in tensorlib.shard_boxes(self.lib, sharding.shard(rank))}

    def boxes(self, shape, layout):
        return self.once(self.make_boxes, shape, layout)

    def walk(self, shape, item, box):
        g, it, b, found = self.grid(shape, item), tensorlib.PieceIter(), tensorlib.Box.of(*box), []
        self.lib.tensor_piece_first(ctypes.byref(it), ctypes.byref(g), ctypes.byref(b))
        while not it.done:
            found.append(it.piece.pair(len(shape)))
            self.lib.tensor_piece_next(ctypes.byref(it))
        return found

    def make_pieces(self, shape, item, layout):
        return {piece for box in self.boxes(shape, layout) for piece in self.walk(shape, item, box)}

    def pieces(self, shape, item, layout):
        return self.once(self.make_pieces, shape, item, layout)

    def make_added(self, shape, item, before, after):
        old, new = self.pieces(shape, item, before), self.pieces(shape, item, after)
        return item * sum(math.prod(size) for _, size in new - old)

    def added(self, shape, item, before, after):
        """Bytes of one tensor that are stored again when it is saved under `after` where `before` is stored."""
        return 0 if before == after else self.once(self.make_added, shape, item, before, after)

    def make_order(self, shape, item, piece):
        """Where in a piece's stored order each of its items lies: the library gathers an array that holds its own
        positions, 8 bits at a time."""
        (offset, size), g, count = piece, self.grid(shape, item), math.prod(piece[1])
        box, origin = tensorlib.Box.of(offset, size), tensorlib.U64x16(*offset)
        stride = tensorlib.U64x16(*[item * math.prod(size[d + 1:]) for d in range(len(size))])
        stored, array = numpy.zeros(count, numpy.int64), numpy.zeros((count, item), numpy.uint8)
        out = numpy.empty_like(array)
        for shift in range(0, count.bit_length(), 8):
            array[:, 0] = numpy.arange(count) >> shift & 0xff
            self.lib.tensor_piece_gather(ctypes.byref(g), ctypes.byref(box), None, ctypes.c_void_p(out.ctypes.data),
                                         ctypes.c_void_p(array.ctypes.data), origin, stride)
            stored |= out[:, 0].astype(numpy.int64) << shift
        order = numpy.empty(count, numpy.int64)
        order[stored] = numpy.arange(count)
        return order.reshape(size)

    def make_touched(self, shape, item, size, shift, low, extent):
        """Bytes of the blocks of a piece that the part `low`, `extent` of it lies in; the piece begins `shift` into a
        cell."""
        offset = tuple(shift if d == self.grid(shape, item).k else 0 for d in range(len(shape)))
        order = self.once(self.make_order, shape, item, (offset, size))
        part = order[tuple(slice(a, a + n) for a, n in zip(low, extent))].ravel() * item
        blocks = numpy.unique(numpy.concatenate([part // BLOCK, (part + item - 1) // BLOCK]))
        return int(numpy.minimum((blocks + 1) * BLOCK, math.prod(size) * item).sum() - blocks.sum() * BLOCK)

    def make_reads(self, shape, item, layout):
        """(needed, blocks, pieces): bytes over all ranks of what they hold, of the blocks and of the pieces that this
        touches in a whole save."""
        g = self.grid(shape, item)
        edge, k, needed, blocks, pieces = g.edge[g.k], g.k, 0, 0, 0
        for low, size in self.boxes(shape, layout):
            needed += item * math.prod(size)
            for offset, extent in self.pieces(shape, item, WHOLE):
                start = tuple(map(max, low, offset))
                part = tuple(min(a + n, o + e) - s for a, n, o, e, s in zip(low, size, offset, extent, start))
                if min(part) <= 0:
                    continue
                pieces += item * math.prod(extent)
                relative = tuple(s - o for s, o in zip(start, offset))
                blocks += self.once(self.make_touched, shape, item, extent, offset[k] % edge, relative, part)
        return needed, blocks, pieces

    def reads(self, shape, item, layout):
        return self.once(self.make_reads, shape, item, layout)

# ---- figures -----------------------------------------------------------------------------------------------------


def of_layout(shape, layout, tensor_parallel):
    """Under tensor parallelism a tensor of one dimension is replicated: every rank holds all of it."""
    return WHOLE if tensor_parallel and len(shape) < 2 else layout


def shared(cutter, model, layout, tensor_parallel, before=WHOLE):
    """Part of the model's bytes that is stored once when it is saved under `before` and under `layout`."""
    added = sum(count * cutter.added(shape, model.item, before, of_layout(shape, layout, tensor_parallel))
                for _, shape, count in model.tensors)
    return 1 - added / model.bytes


def read_ratio(cutter, model, layout):
    """Bytes read for every byte needed when a whole save is loaded under `layout`: in blocks, and in pieces. What is
    replicated is needed, and read, once: a cluster reads it once and passes it on."""
    sums = [0, 0, 0]
    for _, shape, count in model.tensors:
        for i, n in enumerate(cutter.reads(shape, model.item, of_layout(shape, layout, True))):
            sums[i] += count * n
    return sums[1] / sums[0], sums[2] / sums[0]


# Column, layout, tensor parallel, and what was expected: the models that the claim is for (None: all), its words, a
# test.
BIG = ("Llama-3 8B", "Llama-3 70B", "Mixtral 8x7B", "DeepSeek-V3")
SHARED = [("TP 8, dim 0", (8, 1), True, BIG, "100 %", lambda x: x >= 0.9995),
          ("TP 8, dim 1", (1, 8), True, None, ">= 99.5 %", lambda x: x >= 0.995),
          ("FSDP 16", (16, 1), False, None, ">= 97 %", lambda x: x >= 0.97),
          ("FSDP 64", (64, 1), False, ("Llama-3 8B",), "83 % (8B)", lambda x: round(100 * x) == 83),
          ("FSDP 256", (256, 1), False, ("Llama-3 8B",), "0 (8B)", lambda x: x < 0.0005)]
READS = [("read, dim 0", (8, 1), None, "1.00 to 1.01", lambda x: x < 1.015),
         ("read, dim 1", (1, 8), None, "1.00 to 1.01", lambda x: x < 1.015)]

# The claim of layouts that add at most 0.1 %: splits of dimension 0 by up to 16, tensor parallelism by up to 8 on
# either.
PLAIN = [WHOLE, (2, 1), (4, 1), (8, 1), (16, 1), (1, 2), (1, 4), (1, 8)]
BOTH = [(a, b) for a in (2, 4, 8, 16) for b in (2, 4, 8)]
MOST = 0.001


def percent(x):
    """Never rounded up to all of it."""
    return f"{math.floor(x * 10000 + 1e-9) / 100:.2f}"


def figures(cutter, model):
    """({column: text}, [what is not as expected])"""
    row, wrong = {}, []
    for column, layout, parallel, models, words, holds in SHARED:
        value = shared(cutter, model, layout, parallel)
        row[column] = percent(value)
        if (models is None or model.name in models) and not holds(value):
            wrong.append(f"{model.name}, {column}: {percent(value)} %, expected {words}")
    for column, layout, models, words, holds in READS:
        blocks, pieces = read_ratio(cutter, model, layout)
        row[column] = f"{blocks:.3f} ({pieces:.3f})"
        if not holds(blocks):
            wrong.append(f"{model.name}, {column}: {blocks:.3f}, expected {words}")
    return row, wrong


def even(shape, layout):
    return all(n == 1 or (d < len(shape) and shape[d] % n == 0) for d, n in enumerate(layout))


def even_layout(shape, layout):
    """What the claim is about: a tensor that the layout does not cut evenly is left whole, in both saves."""
    return layout if even(shape, layout) else WHOLE


def pairs(cutter, model, layouts):
    """For every two layouts, [(part of the model's bytes added, before, after)], largest first."""
    found = []
    for before in layouts:
        for after in layouts:
            added = sum(count * cutter.added(shape, model.item, even_layout(shape, before), even_layout(shape, after))
                        for _, shape, count in model.tensors)
            found.append((added / model.bytes, before, after))
    return sorted(found, key=lambda x: (-x[0], x[1:]))


def breakers(cutter, model, layouts):
    """Tensors with a layout of which not every piece is one of the whole tensor's: {(what, shape): [layout]}, without
    those too small to matter."""
    found = {}
    for what, shape, count in model.tensors:
        bad = [x for x in layouts if even(shape, x) and
               cutter.added(shape, model.item, WHOLE, x) * count > MOST / 10 * model.bytes]
        if bad:
            found[what, shape] = bad
    return found


def sure(shape, item):
    """A tensor whose pieces are the same under every even layout of the claim's: at 16 MiB its tiles are n/16 rows or
    fewer, and with rows of 4 KiB an eighth of a row is not shorter than R."""
    return (len(shape) == 2 and item * math.prod(shape) >= 16 << 20 and item * shape[1] >= 4 << 10 and
            shape[0] % 64 == 0 and shape[1] % 8 == 0)


def layout_text(layout):
    return "whole" if layout == WHOLE else " x ".join(f"{n} on dim {d}" for d, n in enumerate(layout) if n > 1)


def claim(cutter, model):
    """(row, breakers): how far re-saving under another even layout of the claim's adds bytes."""
    plain, both = pairs(cutter, model, PLAIN), pairs(cutter, model, PLAIN + BOTH)
    eight = pairs(cutter, model, [x for x in PLAIN if x[0] <= 8])
    holds = sum(x[0] <= MOST for x in plain) - len(PLAIN)
    large = sum(count * math.prod(shape) for _, shape, count in model.tensors
                if sure(shape, model.item)) / model.parameters
    row = {"worst": f"{100 * plain[0][0]:.3f}", "pair": f"{layout_text(plain[0][1])} -> {layout_text(plain[0][2])}",
           "pairs within 0.1 %": f"{holds} of {len(PLAIN) ** 2 - len(PLAIN)}",
           "worst, splits <= 8": f"{100 * eight[0][0]:.3f}",
           "worst, both at once": f"{100 * both[0][0]:.3f}", "in large tensors": f"{percent(large)}"}
    return row, breakers(cutter, model, PLAIN)

# ---- print -------------------------------------------------------------------------------------------------------


def table_rows(rows):
    """Markdown: [first column, {column: text}]"""
    columns = list(rows[0][1])
    lines = ["| " + " | ".join(["model", *columns]) + " |", "| --- |" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join([name, *(row[c] for c in columns)]) + " |" for name, row in rows]


def report(cutter, models, say=print):
    """Prints all; returns it as one value for JSON."""
    rows, wrong, claims, broken = [], [], [], {}
    for model in models:
        row, differs = figures(cutter, model)
        rows.append((model.name, row))
        wrong += differs
        row, found = claim(cutter, model)
        claims.append((model.name, row))
        broken[model.name] = found
    expected = {c[0]: c[-2] for c in (*SHARED, *READS)}
    say("Bytes stored once, in percent, when the same weights are saved whole and so; bytes read in blocks (in pieces) "
        "for each byte needed\n")
    for line in table_rows([*rows, ("expected", expected)]):
        say(line)
    say("\nPiece bytes added, in percent, when the same weights are saved again under another even layout\n")
    for line in table_rows(claims):
        say(line)
    say("\nEven splits of which not every piece is one of the whole tensor's (each over 0.01 % of the model's "
        "bytes):\n")
    for name, found in broken.items():
        for (what, shape), layouts in found.items():
            say(f"{name}: {what} {' x '.join(map(str, shape))}: {', '.join(map(layout_text, layouts))}")
    say("")
    for line in wrong or ["every figure is as expected"]:
        say("NOT AS EXPECTED: " + line if wrong else line)
    return {"figures": dict(rows), "expected": expected, "not_as_expected": wrong, "even": dict(claims),
            "breakers": {name: [{"tensor": what, "shape": shape, "layouts": layouts}
                                for (what, shape), layouts in found.items()]
                         for name, found in broken.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=pathlib.Path)
    parser.add_argument("--model", action="append", choices=[m.name for m in MODELS])
    parser.add_argument("--json", type=pathlib.Path)
    o = parser.parse_args()
    cutter = Cutter(ctypes.CDLL(str(o.build.resolve() / "tests/libvckpt_internal.so")))
    result = report(cutter, [m for m in MODELS if not o.model or m.name in o.model],
                    functools.partial(print, flush=True))
    if o.json:
        o.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
