# SPDX-License-Identifier: Apache-2.0
"""A load opens what it wants: parts of ranks whose boxes meet the wanted ones, and of these the chunks and rows that
may have something of them. What it reads is protected as a whole tensor is: gaps, overlaps and rows that disagree with
their layout are refused where they touch what is wanted."""
import ctypes as c
import errno
import threading

import numpy as np
import pytest

from protolib import EFORMAT, Params
from ranklib import Meddler
from saverlib import Tensor, numbers
from storelib import Store as StoreStruct
from test_api_step import Failed, Opened, call, v  # noqa: F401 (v is a fixture)
from test_load_boxes import ATTEMPT, DAMAGED, SMALL, Step, T, proto  # noqa: F401 (proto is a fixture)

WORLD = 12
STRIPS = [[[(5 * i, 5), (0, 50)]] for i in range(WORLD)]


def strips(name, seed=0, recorded=("dp=12", "S(0)")):
    """A tensor in as many strips as there are ranks."""
    return T(name, "f4", (60, 50), dict(enumerate(STRIPS)), seed, recorded)


def packs(path, ranks, kind):
    return [p for rank in ranks for p in path.glob(f"packs/*/{ATTEMPT.decode()}-{rank}-{kind}.pack")]


class Hidden:
    """Packs that are away meanwhile: whoever opens one of them fails."""

    def __init__(self, path, ranks, kinds=("meta", "model")):
        self.packs = [p for kind in kinds for p in packs(path, ranks, kind)]

    def __enter__(self):
        for p in self.packs:
            p.rename(p.with_suffix(".away"))

    def __exit__(self, *_):
        for p in self.packs:
            p.with_suffix(".away").rename(p)


def read(step, t, box):
    out = np.full([n for _, n in box], 77, t.kind)
    step.read(step.find(t.name), box, out)
    view = tuple(slice(a, a + n) for a, n in box)
    assert out.tobytes() == t.array[view].tobytes(), (t.name, box)


def refused(step, t, box, *words, code=EFORMAT):
    with pytest.raises(Failed) as e:
        read(step, t, box)
    assert e.value.code == code, e.value.text
    assert all(w in e.value.text for w in ("r/1: tensor model/" + t.name, *words)), e.value.text


# ---- whose parts are read ----

def test_only_parts_of_ranks_that_hold_it(v, proto, tmp_path):  # noqa: F811
    """Rank 0 keeps the layout: its meta pack is always read."""
    tensors = [strips("a"), strips("b", 1)]
    Step(proto, tmp_path / "s", tensors, WORLD)
    for rows, ranks in (((0, 5), {0}), ((5, 5), {1}), ((7, 1), {1}), ((4, 2), {0, 1}), ((33, 20), {6, 7, 8, 9, 10}),
                        ((0, 60), set(range(WORLD)))):
        away = set(range(WORLD)) - ranks
        with Hidden(tmp_path / "s", away - {0}), Hidden(tmp_path / "s", away & {0}, ["model"]):
            with Opened(v, tmp_path / "s") as step:
                for t in tensors:
                    read(step, t, [rows, (3, 20)])
        for rank in ranks - {0}:
            with Hidden(tmp_path / "s", [rank], ["meta"]), Opened(v, tmp_path / "s") as step:
                refused(step, tensors[0], [rows, (3, 20)], f"-{rank}-meta", code=-errno.ENOENT)


@pytest.mark.parametrize("world, mesh, placements", [
    (12, "dp=3,tp=4", "S(0),S(1)"), (12, "dp=3,tp=4", "S(1),S(1)"), (12, "r=2,dp=3,tp=2", "R,S(0),S(1)"),
    (6, "dp=3,tp=2", "IS(0,2),S(0)"), (6, "dp=3,tp=2", "SS(0,2),S(0)"), (5, "dp=5", "RS(0;1,2,0,4,5)")])
def test_ranks_of_any_placement(v, proto, tmp_path, rng, world, mesh, placements):  # noqa: F811
    """Which boxes a rank holds the library says, rank by rank; which of them meet a box is compared one by one."""
    shape = (24, 16)
    held = {rank: held_boxes(v, mesh, placements, shape, rank) for rank in range(world)}
    stores, seen = {}, set()
    for rank, boxes in held.items():         # of replicas the first one stores it
        stores[rank] = [b for b in boxes if str(b) not in seen]
        seen |= {str(b) for b in boxes}
    t = T("w", "u2", shape, {rank: boxes for rank, boxes in stores.items() if boxes}, 3, (mesh, placements))
    Step(proto, tmp_path / "s", [t], world, Params(64, 128, 16))
    for _ in range(12):
        box = [(a := rng.randrange(n), rng.randint(1, n - a)) for n in shape]
        near = {rank for rank, boxes in held.items() if any(meets(b, box) for b in boxes)}
        with Hidden(tmp_path / "s", set(range(1, world)) - near), Opened(v, tmp_path / "s") as step:
            read(step, t, box)


def meets(a, b):
    return all(x < y + m and y < x + n for (x, n), (y, m) in zip(a, b))


def held_boxes(v, mesh, placements, shape, rank):  # noqa: F811
    m, found, n = c.c_void_p(), c.POINTER(c.c_uint64)(), c.c_size_t()
    call(v.vckpt_mesh_new, mesh.encode(), None, 0, c.byref(m))
    shapes = numbers(c.c_uint64, list(shape))
    t = Tensor(b"model", b"w", shapes, m, placements.encode(), None, None, None, None, None, None, len(shape), 0, 3, 0,
               0, 0)
    v.vckpt_tensor_boxes.argtypes = None
    call(v.vckpt_tensor_boxes, c.byref(t), c.c_uint32(rank), c.byref(found), c.byref(n))
    each, out = 3 * len(shape) + 1, []
    for i in range(n.value):
        pairs = found[each * i:each * i + 2 * len(shape)]
        out.append(list(zip(pairs[::2], pairs[1::2])))
    c.CDLL(None).free(found)
    v.vckpt_mesh_free(m)
    return out


def test_without_a_record_all_parts_of_the_layout_are_asked(v, proto, tmp_path):  # noqa: F811
    """But no chunk that cannot have it: rank 7's rows are of another tensor."""
    halves = [[(0, 30), (0, 50)], [(30, 30), (0, 50)]]
    tensors = [T("a", "f4", (60, 50), {0: halves[:1], 3: halves[1:]}), T("b", "u1", (9,), {7: None})]
    Step(proto, tmp_path / "s", tensors, 8)
    [meta] = packs(tmp_path / "s", [7], "meta")
    spoil(meta, meta.read_bytes().index(b"VCKPTCHK") + 70)
    with Opened(v, tmp_path / "s") as step:
        read(step, tensors[0], [(0, 60), (0, 50)])
        refused(step, tensors[1], [(0, 9)], "part of rank 7", "-7-meta", code=DAMAGED)
    with Hidden(tmp_path / "s", [5], ["meta"]), Opened(v, tmp_path / "s") as step:
        refused(step, tensors[0], [(0, 1), (0, 1)], "part of rank 5", code=-errno.ENOENT)


def test_only_chunks_that_may_have_it_are_read(v, proto, tmp_path):  # noqa: F811
    """Some thousand small tensors fill several chunks of a rank: those of others may rot."""
    tensors = [T(f"t{i:04}", "u1", (600,), {0: [[(0, 300)]], 1: [[(300, 300)]]}, i, ("dp=2", "S(0)"))
               for i in range(1800)]
    Step(proto, tmp_path / "s", tensors, 2)
    for rank in (0, 1):
        [meta] = packs(tmp_path / "s", [rank], "meta")
        data = meta.read_bytes()
        chunks = [i for i in range(len(data)) if data.startswith(b"VCKPTCHK", i)]
        assert len(chunks) > 1
        spoil(meta, chunks[1] + 70)
    with Opened(v, tmp_path / "s") as step:
        read(step, tensors[0], [(290, 20)])
        refused(step, tensors[-1], [(290, 20)], "part of rank 0", code=DAMAGED)
        refused(step, tensors[-1], [(400, 20)], "part of rank 1", code=DAMAGED)


def spoil(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_of_a_long_row_only_ranges_are_read(v, proto, tmp_path):  # noqa: F811
    """A row that fills a chunk of more than 256 KiB: blocks of it without a wanted piece may rot."""
    held = {0: [[(0, 5000), (0, 256)]], 1: [[(5000, 5000), (0, 256)]]}
    t = T("w", "u1", (10000, 256), held, 5, ("dp=2", "S(0)"))
    Step(proto, tmp_path / "s", [t], 2, Params(256, 256, 16))
    [meta] = packs(tmp_path / "s", [1], "meta")
    data = meta.read_bytes()
    begin = data.index(b"VCKPTCHK")
    assert int.from_bytes(data[begin + 24:begin + 32], "little") * 64 > 256 << 10
    spoil(meta, begin + (200 << 10))         # of piece 3,200 or so
    with Opened(v, tmp_path / "s") as step:
        for box in ([(4990, 20), (0, 64)], [(5000, 1), (3, 1)], [(5400, 600), (7, 9)]):
            read(step, t, box)
        refused(step, t, [(0, 10000), (0, 256)], "part of rank 1", code=DAMAGED)


FILE_OPEN = c.CFUNCTYPE(c.c_int, *[c.c_void_p] * 4)


class Counted:
    """Which files a step opens meanwhile, and how many bytes it reads of packs of metadata."""

    def __init__(self, step):
        self.store = type("Api", (), {"p": c.cast(c.cast(step.p, c.POINTER(c.c_void_p))[0], c.POINTER(StoreStruct))})

    def __enter__(self):
        self.m, self.opened, self.bytes, self.lock = Meddler(self.store), {}, 0, threading.Lock()
        self.m.answer["file_open"] = self.open
        self.m.answer["file_read"] = self.read
        return self

    def open(self, args):
        r = c.cast(self.m.old.contents.file_open, FILE_OPEN)(*args)
        with self.lock:
            self.opened[c.cast(args[2], c.POINTER(c.c_void_p))[0]] = c.string_at(args[1]).decode().rsplit("/", 1)[1]
        return r

    def read(self, args):
        with self.lock:
            if self.opened.get(args[0], "meta").endswith("-meta.pack"):
                self.bytes += args[3]

    def __exit__(self, *_):
        self.m.end()


def test_bytes_that_are_read_are_bounded(v, proto, tmp_path):  # noqa: F811
    """Of 12 writers a load of strips reads one pack of pieces and one of metadata, and of that each byte once."""
    tensors = [strips(f"t{i:03}", i) for i in range(60)]
    Step(proto, tmp_path / "s", tensors, WORLD)
    [meta], [model] = (packs(tmp_path / "s", [5], kind) for kind in ("meta", "model"))
    with Opened(v, tmp_path / "s") as step:
        with Counted(step) as counted:
            read(step, tensors[0], [(26, 3), (0, 50)])
            assert set(counted.opened.values()) == {meta.name, model.name}
            assert meta.stat().st_size / 2 < counted.bytes <= meta.stat().st_size + 4096
            bytes_before = counted.bytes
            for t in tensors[1:]:
                read(step, t, [(26, 3), (0, 50)])
            assert counted.bytes == bytes_before and len(counted.opened) == 2


# ---- what does not add up ----

HALVES = [[(0, 30), (0, 50)], [(30, 30), (0, 50)]]


@pytest.mark.parametrize("held, bad, good, words", [
    ({0: HALVES[:1]}, [(29, 2), (3, 4)], [(0, 30), (0, 50)], ["no rank stored box [30:31, 3:7]"]),
    ({0: HALVES[:1]}, [(40, 2), (3, 4)], [(29, 1), (0, 50)], ["no rank stored box [40:42, 3:7]"]),
    ({0: HALVES[:1], 1: [[(31, 29), (0, 50)]]}, [(0, 60), (9, 1)], [(31, 29), (0, 50)],
     ["no rank stored box [30:31, 9:10]"]),
    ({0: HALVES[:1], 1: HALVES[1:], 2: [[(29, 2), (7, 1)]]}, [(29, 1), (0, 50)], [(0, 29), (0, 50)],
     ["overlap", "box [29:31, 7:8] of rank 2", "box [0:30, 0:50] of rank 0"]),
    ({0: HALVES[:1], 1: HALVES[1:], 2: [[(29, 2), (7, 1)]]}, [(30, 1), (7, 1)], [(29, 31), (8, 42)],
     ["overlap", "box [29:31, 7:8] of rank 2", "box [30:60, 0:50] of rank 1"]),
    ({0: HALVES[:1], 2: None}, [(5, 1), (5, 1)], [(30, 30), (0, 50)], ["overlap", "rank 0", "rank 2"]),
    ({}, [(0, 1), (0, 1)], None, ["no rank stored box [0:1, 0:1]"]),
])
def test_gaps_and_overlaps(v, proto, tmp_path, held, bad, good, words):  # noqa: F811
    """Those in a wanted box are refused by name; a box beside them is read."""
    t, other = T("w", "f4", (60, 50), held), T("x", "u1", (7,), {1: None})
    Step(proto, tmp_path / "s", [t, other], 3)
    with Opened(v, tmp_path / "s") as step:
        refused(step, t, bad, *words)
        read(step, other, [(0, 7)])
        if good:
            read(step, t, good)
        refused(step, t, bad, *words)


def test_equal_boxes_count_once(v, proto, tmp_path):  # noqa: F811
    """The lowest rank's: the packs of the others may be gone."""
    t = T("w", "f4", (60, 50), {0: HALVES[1:], 1: HALVES, 2: HALVES[:1]})
    Step(proto, tmp_path / "s", [t], 3)
    with Hidden(tmp_path / "s", [2], ["model"]), Opened(v, tmp_path / "s") as step:
        read(step, t, [(0, 60), (0, 50)])
        with Hidden(tmp_path / "s", [1], ["model"]):
            read(step, t, [(30, 30), (0, 50)])


@pytest.mark.parametrize("rank, boxes, touched", [
    (1, [[(4, 6), (0, 50)]], True),          # more than its strip
    (1, [[(10, 5), (0, 50)]], True),         # rank 2's
    (1, None, True),                         # all of it
    (7, [[(5, 5), (0, 50)]], False),         # a rank that is not asked for it
])
def test_a_row_outside_of_its_layout(v, proto, vckpt, tmp_path, rank, boxes, touched):  # noqa: F811
    """Refused where it is read, and never believed."""
    t = strips("w")
    t.held[rank] = boxes
    Step(proto, tmp_path / "s", [t], WORLD)
    with Opened(v, tmp_path / "s") as step:
        if touched:
            refused(step, t, [(5, 5), (0, 50)], "part of rank 1", "which is not what the layout gives this rank")
        else:
            read(step, t, [(5, 5), (0, 50)])
        other = 7 if rank != 7 else 1
        read(step, t, [(5 * other, 5), (0, 50)])
        refused(step, t, [(0, 60), (0, 50)], f"part of rank {rank}", "which is not what the layout gives this rank")
    done = vckpt("cat", tmp_path / "s", "r/1/model/w.npy", check=False)
    assert done.returncode and f"part of rank {rank}" in done.stderr, done.stderr


def test_a_row_of_a_rank_outside_the_mesh_is_not_asked_for(v, proto, tmp_path):  # noqa: F811
    t = T("w", "f4", (60, 50), {0: HALVES[:1], 1: HALVES[1:], 2: [[(29, 2), (7, 1)]]}, 0, ("dp=2", "S(0)"))
    Step(proto, tmp_path / "s", [t], 3)
    with Hidden(tmp_path / "s", [2]), Opened(v, tmp_path / "s") as step:
        read(step, t, [(0, 60), (0, 50)])


@pytest.mark.parametrize("recorded", [("dp=2", "S(5)"), ("dp=2", "IS(0,7)")])
def test_a_record_that_means_nothing_is_none(v, proto, tmp_path, recorded):  # noqa: F811
    """All parts are asked then."""
    mesh, words = recorded
    t = T("w", "f4", (60, 50), {0: HALVES[:1], 2: HALVES[1:]}, 0, (mesh, words))
    Step(proto, tmp_path / "s", [t], 3)
    with Opened(v, tmp_path / "s") as step:
        read(step, t, [(0, 60), (0, 50)])


def test_inline_pieces_and_scalars(v, proto, tmp_path, rng):  # noqa: F811
    """Pieces that stand in the part itself, of several boxes and ranks."""
    held = {0: [[(0, 2), (0, 3)], [(4, 2), (0, 3)]], 1: [[(2, 2), (0, 3)]]}
    tensors = [T("w", "u2", (6, 3), held, 1), T("s", "f4", (), {1: None}, 2),
               T("l", "u1", (300,), {0: [[(0, 70)]], 1: [[(70, 230)]]})]
    Step(proto, tmp_path / "s", tensors, 2, SMALL)
    with Opened(v, tmp_path / "s") as step:
        for t in tensors:
            for _ in range(20):
                read(step, t, [(a := rng.randrange(n), rng.randint(1, n - a)) for n in t.shape])
