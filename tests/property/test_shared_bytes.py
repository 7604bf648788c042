# SPDX-License-Identifier: Apache-2.0
"""tests/bench/shared_bytes.py: what it says of real models rests on counting that is right on small shapes, where every
item can be looked at one by one; and docs/layouts.md shows what it prints."""
import importlib.util
import itertools
import math
import pathlib
import random
import re
import shlex

import numpy
import pytest
import test_grid

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/bench/shared_bytes.py"
SMALL = (64, 256, 8, 16)    # M, T, R, S: shapes of a few hundred items have tiles, thin shards and wide pieces
LAYOUTS = [(a, b) for a in (1, 2, 3, 4, 8) for b in (1, 2, 5)]


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def grids():
    return load_script(ROOT / "tests/bench/grids.py")


@pytest.fixture(scope="module")
def cutter(lib, script):
    return script.Cutter(lib, SMALL)


def shapes(seed, count):
    r = random.Random(seed)
    for _ in range(count):
        yield tuple(r.choice([1, 3, 4, 7, 8, 12, 16, 24, 33, 40])
                    for _ in range(r.choice([1, 2, 2, 2, 3]))), r.choice([1, 2, 4])


def naive_pieces(shape, item, layout):
    """A number for each item of the tensor: items of equal (offset, size) of their piece have equal pieces. By the
    oracle of the grid."""
    def chunks(n, parts):
        step = -(-n // parts)
        return [(i * step, min(n, (i + 1) * step)) for i in range(parts) if i * step < n]

    e, k = test_grid.oracle_tile(shape, item, *SMALL)
    m = test_grid.oracle_least(shape, item, SMALL[0], SMALL[3])
    found = numpy.empty(shape, object)
    spans = [chunks(n, layout[d] if d < 2 else 1) for d, n in enumerate(shape)]
    for box in itertools.product(*spans):
        for offset, size in test_grid.oracle_pieces(shape, item, e, k, m, [a for a, _ in box], [b - a for a, b in box]):
            area = found[tuple(slice(o, o + s) for o, s in zip(offset, size))]
            for index in numpy.ndindex(area.shape):
                area[index] = (offset, size)
    return found


def test_bytes_added_are_those_of_the_items_in_other_pieces(script, cutter, scale):
    some, none = 0, 0
    for shape, item in shapes(1, scale(20, 200)):
        naive = {layout: naive_pieces(shape, item, layout) for layout in LAYOUTS}
        for before, after in [(script.WHOLE, x) for x in LAYOUTS] + random.Random(len(shape)).sample(
            list(itertools.permutations(LAYOUTS, 2)), 20):
            held = set(naive[before].ravel())
            expected = item * sum(piece not in held for piece in naive[after].ravel())
            assert cutter.added(shape, item, before, after) == expected, (shape, item, before, after)
            some, none = some + (expected > 0), none + (expected == 0)
    assert some > 50 and none > 50


def test_bytes_read_are_those_of_the_blocks_that_hold_the_items(script, cutter, scale, monkeypatch):
    """The stored order by the grid's oracle, items one after another; blocks of 48 bytes."""
    monkeypatch.setattr(script, "BLOCK", 48)
    more = 0
    for shape, item in shapes(2, scale(25, 120)):
        e, k = test_grid.oracle_tile(shape, item, *SMALL)
        m = test_grid.oracle_least(shape, item, SMALL[0], SMALL[3])
        for layout in [(1, 1), (4, 1), (1, 2), (3, 2), (1, 5)]:
            needed = blocks = pieces = 0
            for low, size in cutter.boxes(shape, layout):
                rank = numpy.zeros(shape, numpy.uint8)
                rank[tuple(slice(o, o + s) for o, s in zip(low, size))] = 1
                rank = numpy.repeat(rank[..., None], item, -1)          # its bytes
                needed += int(rank.sum())
                for offset, extent in test_grid.oracle_pieces(shape, item, e, k, m, [0] * len(shape), shape):
                    cells = test_grid.oracle_spans(offset[k], offset[k] + extent[k], e[k])
                    area = [slice(o, o + s) for o, s in zip(offset, extent)]
                    stored = numpy.concatenate([rank[tuple(area[:k] + [slice(*cell)] + area[k + 1:])].ravel()
                                                for cell in cells])
                    if stored.any():
                        pieces += stored.size
                        blocks += sum(stored[at:at + 48].size for at in range(0, stored.size, 48)
                                      if stored[at:at + 48].any())
            assert cutter.reads(shape, item, layout) == (needed, blocks, pieces), (shape, item, layout)
            more += needed < blocks < pieces
    assert more > 10


def test_large_tensors_add_nothing(script, lib, scale):
    """What docs/layouts.md promises: 16 MiB, rows of 4 KiB, multiples of 64 rows and 8 columns."""
    cutter, r, tried = script.Cutter(lib), random.Random(3), 0
    while tried < scale(25, 150):
        item = r.choice([1, 2, 4])
        shape = (64 * r.choice([1, 2, 3, 5, 7, 16, 64, r.randrange(1, 400)]), 8 * r.randrange(64, 2500))
        if not script.sure(shape, item) or item * math.prod(shape) > 512 << 20:
            continue
        tried += 1
        for layout in script.PLAIN + script.BOTH:
            assert cutter.added(shape, item, script.WHOLE, layout) == 0, (shape, item, layout)
        cutter.kept.clear()
    assert not script.sure((1024, 4096), 2) and cutter.added((1024, 4096), 2, script.WHOLE, (16, 1)) == 8 << 20


def test_a_figure_that_is_not_as_expected_is_told(script, lib):
    cutter = script.Cutter(lib)
    good = script.Model("Llama-3 70B", 2, [("w", (8192, 8192), 2)], 2 * 8192 * 8192)
    row, wrong = script.figures(cutter, good)
    assert row["TP 8, dim 0"] == row["TP 8, dim 1"] == row["FSDP 16"] == "100.00" and not wrong
    thin = script.Model("Llama-3 70B", 2, [("w", (8, 2048), 1)], 8 * 2048)
    row, wrong = script.figures(cutter, thin)
    assert row["TP 8, dim 0"] == "0.00" and "TP 8, dim 0: 0.00 %, expected 100 %" in wrong[0]


def test_the_page_shows_what_the_script_prints(script, lib):
    page, said = (ROOT / "docs/layouts.md").read_text().splitlines(), []
    script.report(script.Cutter(lib), [m for m in script.MODELS if m.name in ("Llama-3 8B", "GPT-2")], said.append)
    rows = [line for line in said if line.startswith("|")]
    assert len(rows) == 9
    assert not [line for line in rows if line not in page]


def test_other_grids(script, grids, lib):
    """Of the rule with S and of that without, tests/bench/grids.py says what the library says; and the page shows what
    it prints."""
    page, said = (ROOT / "docs/layouts.md").read_text().splitlines(), []
    models = [m for m in grids.MODELS if m.name == "MiniLM-L6"]
    for m, number, params in [(m, *rule) for m in models for rule in ((0, test_grid.OLDER), (2, test_grid.DEFAULT))]:
        now, cutter = grids.Rule(*grids.RULES[number]), script.Cutter(lib, params)
        for _, shape, _ in m.tensors:
            for dimension, layout in [(0, (8, 1)), (0, (3, 1)), (1, (1, 8))][:3 if len(shape) > 1 else 2]:
                added, needed, read = now.of_layout(shape, m.item, dimension, max(layout))
                assert added == cutter.added(shape, m.item, script.WHOLE, layout), (m.name, shape, layout)
                assert (needed, read) == cutter.reads(shape, m.item, layout)[:2], (m.name, shape, layout)
    grids.report(models, said.append)
    assert len(said) == 2 + 3 * len(models) and not [line for line in said[2:] if line not in page]


def test_the_page_shows_what_the_commands_print(vckpt):
    """What stands in a block after `$ vckpt ...`, up to the next command; columns may be wider."""
    blocks = re.findall(r"```\n(\$ vckpt .*?)\n```", (ROOT / "docs/layouts.md").read_text(), re.S)
    shown = [part.partition("\n") for block in blocks for part in re.split(r"^\$ vckpt ", block, flags=re.M)[1:]]
    assert len(shown) >= 8
    for command, _, text in shown:
        assert vckpt(*shlex.split(command)).stdout.split() == text.split(), command
