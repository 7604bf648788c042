# SPDX-License-Identifier: Apache-2.0
"""vckpt reshard against brute force: every item of a target comes once, from the rank that the rule names."""
import math
import random

import numpy
import test_layout as layout


def sources(held_from, ranks_from, held_to, ranks_to, items):
    """[{source rank: items}, ...] of each target: itself where it holds an item, else the first in mesh order."""
    first = numpy.full(items, -1)
    for held, rank in reversed(list(zip(held_from, ranks_from))):
        first[held.items] = rank
    own = {rank: set(held.items.tolist()) for held, rank in zip(held_from, ranks_from)}
    result = []
    for held, rank in zip(held_to, ranks_to):
        need = {}
        for item in held.items.tolist():
            need.setdefault(rank if item in own.get(rank, ()) else int(first[item]), set()).add(item)
        result.append(need)
    return result


def test_every_item_comes_once_from_the_right_rank(vckpt, scale):
    rng = random.Random(21)
    for _ in range(scale(80, 800)):
        shape, sizes, placements, ranks, held = layout.case(rng, biggest=9)
        while True:     # another layout of the same tensor
            to_sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
            to_placements = [layout.placement(rng, shape, n) for n in to_sizes]
            try:
                to_held = layout.oracle.all_ranks(shape, to_sizes, to_placements)
                break
            except layout.oracle.Refused:
                continue
        n = math.prod(to_sizes)
        to_ranks = rng.sample(range(2 * n), n)
        arguments = ["reshard", *layout.tensor(shape), *layout.words(shape, sizes, placements, ranks, "from-"),
                     *layout.words(shape, to_sizes, to_placements, to_ranks, "to-")]
        got = vckpt.json(*arguments)
        numbers = layout.oracle.numbered(shape)
        assert [r["rank"] for r in got["ranks"]] == to_ranks
        for told, truth, needs in zip(got["ranks"], to_held, sources(held, ranks, to_held, to_ranks, numbers.size)):
            assert told["bytes"] == 2 * truth.items.size == sum(f["bytes"] for f in told["from"]), arguments
            assert [f["rank"] for f in told["from"]] == sorted(needs), arguments
            for f in told["from"]:
                parts = [numbers[tuple(slice(o, o + s) for o, s in zip(b["offset"], b["size"]))].ravel()
                         for b in f["boxes"]]
                items = numpy.concatenate(parts).tolist()
                assert len(items) == len(set(items)) == f["bytes"] // 2 and set(items) == needs[f["rank"]], arguments
        moved = sum(f["bytes"] for r in got["ranks"] for f in r["from"] if f["rank"] != r["rank"])
        assert got["bytes"] == sum(r["bytes"] for r in got["ranks"]) and got["moved_bytes"] == moved, arguments
        last = vckpt(*arguments).stdout.splitlines()[-1]
        readers = sum(any(f["rank"] != r["rank"] for f in r["from"]) for r in got["ranks"])
        assert last.startswith(f"{readers} of {n} {'rank reads' if n == 1 else 'ranks read'} from others; "), arguments
        one = vckpt.json(*arguments, "--rank", to_ranks[-1])
        assert one["ranks"] == got["ranks"][-1:] and one["bytes"] == got["ranks"][-1]["bytes"]


def test_same_layout_moves_nothing(vckpt):
    arguments = ["reshard", "--shape", "4096,1024", "--dtype", "bf16", "--from-mesh", "dp=2,tp=4", "--from-place",
                 "R,S(0)",
                 "--to-mesh", "dp=2,tp=4", "--to-place", "R,S(0)"]
    got = vckpt.json(*arguments)
    assert got["moved_bytes"] == 0 and got["bytes"] == 2 * 4096 * 1024 * 2
    assert vckpt(*arguments).stdout.splitlines()[-1] == "0 of 8 ranks read from others; 0 B of 16 MiB in all"


def test_table(vckpt):
    lines = vckpt("reshard", "--shape", "4096,1024", "--dtype", "bf16", "--from-mesh", "dp=2,tp=8", "--from-place",
                  "R,S(0)",
                  "--to-mesh", "tp=2", "--to-place", "S(1)").stdout.splitlines()
    assert lines[0] == "[4096, 1024] bf16, 8.0 MiB from dp=2,tp=8 as R,S(0) to tp=2 as S(1)"
    assert (lines[3].split("  ")[-1].endswith("5 (512 KiB) and 2 more") and
            lines[-1] == "2 of 2 ranks read from others; 7.0 MiB of 8.0 MiB in all")


def test_a_rank_outside_the_new_mesh_needs_nothing(vckpt):
    arguments = ["reshard", "--shape", "8", "--dtype", "u8", "--from-mesh", "a=2", "--from-place", "S(0)", "--to-mesh",
                 "b=2", "--to-place", "R"]
    assert vckpt.json(*arguments, "--rank", 7) == {"ranks": [{"rank": 7, "bytes": 0, "from": []}], "bytes": 0,
                                                   "moved_bytes": 0}
