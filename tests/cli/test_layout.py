# SPDX-License-Identifier: Apache-2.0
"""vckpt layout against the brute-force oracle, its pictures, and the examples of the manual."""
import json
import math
import os
import pathlib
import random
import re
import shlex
import subprocess

import numpy
import pytest

import shard_oracle as oracle
from terminal import open_terminal, written

MANUAL = pathlib.Path(__file__).resolve().parents[2] / "docs/man/vckpt.1"


def placement(rng, shape, size):
    """Any word that may fit."""
    kind = rng.choice(["R", "S", "S", "SS", "IS", "RS"]) if shape else "R"
    dim = rng.randrange(len(shape)) if shape else 0
    if kind == "RS":
        return ("RS", rng.randint(1, len(shape)), tuple(rng.choice([0, 1, 1, 2]) for _ in range(size)))
    return {"R": ("R",), "S": ("S", dim), "SS": ("SS", dim, rng.randint(1, 4)),
            "IS": ("IS", dim, rng.choice([1, 2, 3]))}[kind]


def case(rng, most_dims=3, biggest=12):
    """shape, sizes of a mesh, placements that the rules allow, ranks."""
    while True:
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, biggest) for _ in range(rng.randint(0, most_dims)))
        sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        placements = [placement(rng, shape, n) for n in sizes]
        try:
            held = oracle.all_ranks(shape, sizes, placements)
        except oracle.Refused:
            continue
        n = math.prod(sizes)
        return shape, sizes, placements, rng.sample(range(2 * n), n) if rng.random() < 0.5 else list(range(n)), held


def words(shape, sizes, placements, ranks, side=""):
    mesh = ",".join(f"d{i}={n}" for i, n in enumerate(sizes))
    return [f"--{side}mesh", mesh, f"--{side}rank-order", ",".join(map(str, ranks)), f"--{side}place",
            oracle.words(placements)]


def tensor(shape, dtype="bf16"):
    return ["--shape", ",".join(map(str, shape)) or "scalar", "--dtype", dtype]


def buffer(shape, told):
    """The local buffer that the boxes of one rank describe: numbers of items, -1 where nothing lies."""
    found = numpy.full(math.prod(told["local_shape"]), -1)
    numbers = oracle.numbered(shape)
    for box in told["boxes"]:
        part = numbers[tuple(slice(o, o + n) for o, n in zip(box["offset"], box["size"]))]
        at = numpy.full(box["size"], box["local_offset"])
        for d, stride in enumerate(box["local_stride"]):
            at = at + stride * numpy.arange(box["size"][d]).reshape([-1 if e == d else 1 for e in range(len(shape))])
        assert (found[at] == -1).all() and part.size
        found[at] = part
    return found


def test_the_example(vckpt):
    got = vckpt.json("layout", "--shape", "4096,1024", "--dtype", "bf16", "--mesh", "dp=2,tp=4", "--place", "R,S(0)")
    assert got["mesh"] == {"dims": [["dp", 2], ["tp", 4]], "ranks": list(range(8))}
    assert list(got) == ["mesh", "shape", "dtype", "ranks"] and got["shape"] == [4096, 1024] and got["dtype"] == "bf16"
    assert got["ranks"] == [{"rank": r, "coordinate": [r // 4, r % 4], "local_shape": [1024, 1024], "boxes": [
        {"offset": [r % 4 * 1024, 0], "size": [1024, 1024], "local_offset": 0, "local_stride": [1024, 1]}]}
                            for r in range(8)]


def test_layouts_are_what_the_oracle_says(vckpt, scale):
    rng = random.Random(11)
    for _ in range(scale(80, 800)):
        shape, sizes, placements, ranks, held = case(rng)
        arguments = ["layout", *tensor(shape), *words(shape, sizes, placements, ranks)]
        got = vckpt.json(*arguments)
        assert [r["rank"] for r in got["ranks"]] == ranks == got["mesh"]["ranks"]
        for told, coordinate, truth in zip(got["ranks"], oracle.coordinates(sizes), held):
            assert told["coordinate"] == list(coordinate) and told["local_shape"] == list(truth.local_shape), arguments
            assert (buffer(shape, told) == truth.buffer()).all() and len(told["boxes"]) == truth.boxes(), arguments
        lines = vckpt(*arguments).stdout.splitlines()
        assert len(lines) == 3 + len(ranks)
        assert sum("  -" == line[-3:] for line in lines[3:]) == sum(truth.items.size == 0 for truth in held)


def test_flat_ranges_are_what_the_oracle_says(vckpt, scale):
    rng = random.Random(12)
    for _ in range(scale(60, 600)):
        shape, sizes, placements, ranks, held = case(rng)
        i = rng.randrange(len(ranks))
        n = held[i].items.size
        length = rng.choice([0, n + rng.randint(1, 5)])
        a, b = sorted(rng.randint(0, length or n) for _ in range(2))
        arguments = ["layout", *tensor(shape), *words(shape, sizes, placements, ranks), "--flat",
                     f"{a}:{b}" + (f"/{length}" if length else "")]
        told = vckpt.json(*arguments, "--rank", ranks[i])["ranks"]
        assert len(told) == 1 and told[0]["local_shape"] == [b - a], arguments
        assert (buffer(shape, told[0]) == held[i].buffer((a, b, length))).all(), arguments
        assert len(told[0]["boxes"]) == held[i].boxes((a, b, length)), arguments


def test_a_rank_outside_the_mesh_holds_nothing(vckpt):
    arguments = ["layout", "--shape", "4,4", "--dtype", "u8", "--mesh", "tp=2", "--place", "S(0)"]
    for more in ([], ["--flat", "0:3"]):
        assert vckpt.json(*arguments, "--rank", 9,
                          *more)["ranks"] == [{"rank": 9, "coordinate": None, "local_shape": None, "boxes": []}]
        assert "rank 9 is not in the mesh: it holds nothing" in vckpt(*arguments, "--rank", 9, *more).stdout
    assert "holds nothing: rank 9" in vckpt(*arguments, "--rank", 9, "--draw").stdout


def test_one_rank_box_by_box(vckpt):
    lines = vckpt("layout", "--shape", "6,4", "--dtype", "f32", "--mesh", "tp=2", "--place", "IS(0,3)", "--rank",
                  1).stdout.splitlines()
    assert lines[2] == "rank 1 at tp = 1: local shape [3, 4], 48 B in 3 boxes"
    assert lines[4] == "  [3:4, 0:4] at item 4 of the buffer, strides [4, 1]" and len(lines) == 6


# ---- pictures ----

def expand(text):
    """Ranks of "0-3,8"."""
    found = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def picture(text):
    """What a picture says: (ranks seen or listed, ranks that hold nothing, row borders, whether all boxes are
    drawn)."""
    lines = text.splitlines()
    below = [line for line in lines if re.search(": ranks? ", line)]
    seen, none, spelled = set(), set(), {}
    for line in below:
        head, ranks = re.split(": ranks? ", line)
        if head in ("holds nothing", "hold nothing"):
            none = expand(ranks)
        else:
            seen |= expand(ranks)
            spelled[head] = expand(ranks)
    rows = [line for line in lines[1:] if line not in below]
    assert len({len(row) for row in rows}) == 1, text           # a rectangle
    borders = [int(m[0]) for row in rows if (m := re.match(r" *\d+(?= [+|])", row))]
    margin = rows[0].index("+")
    for row in rows:
        for label in re.findall(r"\d+(?:[,-]\d+)*(?:\+\d+(?: more)?)?", row[margin:]):
            if label in spelled:
                assert len(spelled[label]) > 1
            else:
                seen |= expand(label)
        assert re.fullmatch(r"[-+|.~ ]*", re.sub(r"\d+(?:[,-]\d+)*(?:\+\d+(?: more)?)?", "", row[margin:])), row
    return seen, none, borders, "~" not in text


def test_a_picture(vckpt):
    text = vckpt("layout", "--shape", "8,8", "--dtype", "bf16", "--mesh", "dp=2,fsdp=2,tp=2", "--place", "R,S(0),S(1)",
                 "--draw").stdout
    blank = "  |" + " " * 23 + "|" + " " * 23 + "|"
    border = "+" + "-" * 23 + "+" + "-" * 23 + "+"

    def labels(a, b):
        return "  |" + a.center(23) + "|" + b.center(23) + "|"
    assert text.splitlines() == ["  0                       4                       8", "0 " + border, *[blank] * 5,
                                 labels("0,4", "1,5"), *[blank] * 5,
                                 "4 " + border, *[blank] * 5, labels("2,6", "3,7"), *[blank] * 5, "8 " + border]


@pytest.mark.parametrize("rank", [None, 0])
def test_every_picture_shows_every_rank(vckpt, scale, rank):
    rng = random.Random(13)
    for _ in range(scale(60, 500)):
        while True:
            shape, sizes, placements, ranks, held = case(rng, most_dims=2, biggest=40)
            if len(shape) == 2 and 0 not in shape:
                break
        more = [] if rank is None else ["--rank", ranks[0]]
        told = [0] if more else range(len(ranks))
        if rng.random() < 0.3 and (least := min(t.items.size for t in held)) > 0:
            more += ["--flat", f"{rng.randint(0, least // 2)}:{least}"]
        arguments = ["layout", *tensor(shape), *words(shape, sizes, placements, ranks), *more]
        text = vckpt(*arguments, "--draw").stdout
        seen, none, borders, whole = picture(text)
        holds = {ranks[i] for i in told if held[i].items.size}
        assert seen == holds and none == {ranks[i] for i in told} - holds, (arguments, text)
        assert borders[0] == 0 and borders[-1] == shape[0] and borders == sorted(set(borders)), text
        if whole:
            edges = {e for r in vckpt.json(*arguments)["ranks"] for b in r["boxes"]
                     for e in (b["offset"][0], b["offset"][0] + b["size"][0])}
            assert set(borders) == edges | {0, shape[0]}, text


@pytest.mark.parametrize("mesh,place", [("dp=16,tp=16", "R,S(1)"), ("dp=128", "S(0)"), ("a=100,b=100", "S(0),S(1)"),
                                        ("a=1000", "R"), ("a=200,b=200", "R,S(1)"),
                                        ("a=4,b=50", "SS(0,20),S(1)"), ("a=2,b=3,c=40", "R,IS(0,16),S(1)"),
                                        ("a=60000", "S(1)")])
def test_large_pictures_stay_small_and_lose_nobody(vckpt, mesh, place):
    text = vckpt("layout", "--shape", "4800,120000", "--dtype", "bf16", "--mesh", mesh, "--place", place,
                 "--draw").stdout
    seen, none, _, _ = picture(text)
    assert seen | none == set(range(math.prod(int(s.split("=")[1]) for s in mesh.split(","))))
    # 38 rows each: 127 ranks have them all
    assert not seen & none and none == ({127} if mesh == "dp=128" else set())
    rows = [line for line in text.splitlines() if ": ranks " not in line]
    assert len(rows) <= 60 and max(map(len, rows)) <= 125


def test_unheld_parts_are_dotted(vckpt):
    text = vckpt("layout", "--shape", "4,4", "--dtype", "u8", "--mesh", "a=2", "--place", "RS(0;1,1)", "--flat", "2:8",
                 "--rank", 1, "--draw").stdout
    assert "." in text and picture(text)[0] == {1}
    assert "no items" in vckpt("layout", "--shape", "4,0", "--dtype", "u8", "--mesh", "a=2", "--place", "R",
                               "--draw").stdout


@pytest.mark.parametrize("locale,corner", [("C.UTF-8", "┌"), ("C", "+")])
def test_box_characters_where_a_terminal_takes_them(vckpt, locale, corner):
    master, slave = open_terminal()
    subprocess.run([vckpt.path, "layout", "--shape", "4,4", "--dtype", "u8", "--mesh", "a=2", "--place", "S(0)",
                    "--draw"], stdout=slave, check=True,
                   env={**os.environ, "LC_ALL": locale})
    os.close(slave)
    assert corner in written(master)
    os.close(master)


def test_the_examples_of_the_manual_are_what_is_printed(vckpt):
    section = MANUAL.read_text().split(".Sh MESHES AND PLACEMENTS")[1].split(".Sh ")[0]
    blocks = "".join(re.findall(r"^\.Bd -literal\n(.*?)^\.Ed", section, re.M | re.S)).replace("\\e\n", "")
    examples = re.findall(r"^\$ vckpt (.*)\n((?:(?!\$ ).*\n)*)", blocks, re.M)
    assert len(examples) == 3
    for command, output in examples:
        assert vckpt(*shlex.split(command)).stdout == output
    assert json.loads(vckpt(*shlex.split(examples[1][0]), "--json").stdout)["shape"] == [4096, 1024]


def test_words_of_numpy_and_torch(vckpt):
    arguments = ["--shape", "4,4", "--mesh", "tp=2", "--place", "S(0)"]
    for word, same in [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("float8_e4m3fn", "f8_e4m3fn"),
                       ("int64", "i64")]:
        assert vckpt("layout", *arguments, "--dtype", word).stdout == vckpt("layout", *arguments, "--dtype",
                                                                            same).stdout
    done = vckpt("layout", *arguments, "--dtype", "half", check=False)
    assert done.returncode == 2 and "--dtype half: there is no such type; there are bool, u8 (uint8)," in done.stderr, (
        done)
    assert "bf16 (bfloat16)" in done.stderr and "f4_e2m1fn_x2 (float4_e2m1fn_x2)" in done.stderr
