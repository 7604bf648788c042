# SPDX-License-Identifier: Apache-2.0
"""Pieces that a save knows already by their boxes, whoever stored them in the base and under whatever layout: against a
list of all pieces that were stored; and which files a rank reads to know."""
import contextlib
import ctypes as c
import random
import threading

import numpy as np
import pytest

import tensorlib as tl
from protolib import (Buf, Error, Layout, P, Params, Piece, PieceIter, Proto, Refused, Shape, StoreLayout, make_box,
                      ptr, tree, u32, u64)
from ranklib import Meddler
from storelib import Api, Digest, Store as StoreStruct
from test_layout_part import Held, Placements
from test_load_boxes import ATTEMPT, KINDS, SMALL, Step, T, random_shape, random_tensors, random_words, sharded, whole

INLINE = 64
closed = contextlib.closing


@pytest.fixture(scope="module")
def proto(lib):
    proto = Proto(lib)
    proto.lib.save_base_row_get.restype = proto.lib.tensor_share_boxes.restype = ptr
    proto.lib.tensor_share_boxes.restype = u32
    proto.lib.save_base_piece.restype = P(Piece)
    return proto


@pytest.fixture(scope="module")
def shapes(lib):
    return tl.load(c.CDLL(lib._name))


class HeldLayout(Layout):
    """Of T, with mesh and placements of those that have a `sharding`: (mesh text, words)."""

    def __init__(self, lib, tensors, params):
        self.lib, self.p, meshes, words, e, object_, tags = lib, P(StoreLayout)(), {}, [], Error(), Buf(), P(u32)()
        b = ptr(lib.store_layout_builder_new(params))
        for i, t in enumerate(tensors):
            s, held, name, sharding = Shape(len(t.shape),
                                            (u64 * 16)(*t.shape)), Held(), t.name.encode(), getattr(t, "sharding", None)
            if sharding:
                if sharding[0] not in meshes:
                    meshes[sharding[0]] = ptr()
                    assert lib.tensor_mesh_parse(sharding[0].encode(), None, u32(0), c.byref(meshes[sharding[0]]),
                                                 None) == 0
                words.append(P(Placements)())
                assert lib.tensor_placements_parse(sharding[1].encode(), c.byref(words[-1]), None) == 0
                held.mesh, held.placements, held.nplacements = meshes[sharding[0]], words[-1].contents.at, words[
                    -1].contents.n
            r = lib.store_layout_builder_add_held(b, b"model", name, c.c_size_t(len(name)), KINDS[t.kind][0],
                                                  c.byref(s), u32(i), c.byref(held), c.byref(e))
            if r < 0:
                raise Refused(r, e.text.decode())
        assert lib.store_layout_builder_finish(b, c.byref(self.p), c.byref(object_), c.byref(tags),
                                               c.byref(e)) == 0, e.text
        lib.store_layout_builder_free(b)
        self.object = c.string_at(object_.data, object_.len)
        lib.base_buf_release(c.byref(object_))
        self.order = [tags[i] for i in range(len(tensors))]
        for p in [tags, *words]:
            c.CDLL(None).free(p)
        for m in meshes.values():
            lib.tensor_mesh_free(m)


class Base(Step):
    """A step of several ranks whose layouts record meshes. stages: [(ranks, tensors)]."""

    def __init__(self, proto, path, tensors, world, params=SMALL, stages=None):
        self.lib, self.proto, self.attempt, self.step = proto.lib, proto, ATTEMPT, 1
        self.world, self.forge = world, None
        self.api = Api(proto.lib, path)
        self.s, self.announcements, self.params, self.tensors = c.cast(self.api.p,
                                                                       P(StoreStruct)).contents, [], params, tensors
        self.stored = {}
        try:
            for ranks, some in stages or [(range(world), tensors)]:
                layout = HeldLayout(self.lib, some, params)
                for rank in ranks:
                    self.rank(rank, layout, [some[i] for i in layout.order], rank == min(ranks), False)
                layout.close()
            self.announcements.sort(key=lambda a: a.rank)
            self.commit(tensors)
        finally:
            self.api.close()

    def pieces(self, t):
        """{box: digest} of all that was stored of it, pieces in rows apart"""
        if t.name not in self.stored:
            self.stored[t.name] = self.list_pieces(t)
        return self.stored[t.name]

    def list_pieces(self, t):
        with closed(Layout(self.lib, [("model", b"x", KINDS[t.kind][0], t.shape)], self.params)) as layout:
            grid = layout.grid(0)
        return {box: tree(data) for boxes in t.held.values() for pairs in boxes or [whole(t.shape)]
                for box, data in cut(self, grid, t.array, pairs)
                if len(data) > INLINE}


def cut(base, grid, array, pairs):
    """[(box as pairs, bytes)] of the pieces of a box"""
    it, n, box, out = PieceIter(), array.ndim, make_box(pairs), []
    base.lib.tensor_piece_first(c.byref(it), c.byref(grid), c.byref(box))
    for data in base.cut(grid, array, pairs):
        out.append((tuple(zip(it.piece.offset[:n], it.piece.size[:n])), data))
        base.lib.tensor_piece_next(c.byref(it))
    return out


class Bases(c.Structure):
    _fields_ = [("all", ptr * 12), ("n", u32), ("rank", u32), ("world", u32), ("notes", ptr), ("index", ptr),
                ("layouts", c.c_bool), ("merges", c.c_bool), ("attempts", ptr * 2), ("unread", Error),
                ("decided", c.c_bool), ("room", c.c_size_t), ("taken", c.c_size_t), ("last", ptr), ("layout", ptr)]


class Saver:
    """A rank that is about to save, and asks what stands in the step."""

    def __init__(self, base, path, rank, tensors=None):
        self.base, self.lib, self.api = base, base.lib, Api(base.lib, path, init=False)
        self.tensors = tensors or base.tensors
        self.bases = Bases(rank=rank)
        with self.api.list("r") as entries:
            step = self.lib.commit_list_find(entries.p, u64(1)).contents
            entry, manifest = step.entry, Digest.from_buffer_copy(step.commit.manifest)
        self.layout = Layout(self.lib, [("model", t.name.encode(), KINDS[t.kind][0], t.shape) for t in self.tensors],
                             base.params)
        self.meddler = Meddler(self.api)
        self.opened = []
        for name in ("file_open", "read_whole"):
            self.meddler.answer[name] = lambda args: self.opened.append(c.string_at(args[1]).decode())
        assert self.lib.save_bases_add(c.byref(self.bases), self.api.p, b"r", u64(entry), c.byref(manifest)) == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.save_bases_release(c.byref(self.bases))
        self.meddler.end()
        self.layout.close()
        self.api.close()

    def row(self, t, pairs):
        number = [x[1] for x in self.layout.tensors].index(t.name.encode())
        return number, ptr(self.lib.save_base_row_get(ptr(self.bases.all[0]), self.layout.p, u32(number),
                                                      c.byref(make_box(pairs))))

    def known(self, t, pairs):
        """{box: digest} of the pieces of that box which stand in the base, by its word"""
        number, row = self.row(t, pairs)
        found = {}
        for box, data in cut(self.base, self.layout.grid(number), t.array, pairs):
            pack = c.c_char_p()
            p = self.lib.save_base_piece(row, c.byref(make_box(box)), u64(len(data)), c.byref(pack))
            if p:
                assert p.contents.ref.raw_len == len(data) and pack.value.endswith(b"-model"), box
                assert not self.lib.save_base_piece(row, c.byref(make_box(box)), u64(len(data) + 1), c.byref(pack))
                found[box] = bytes(p.contents.ref.digest.bytes)
        self.lib.save_base_row_put(row)
        return found

    def readers(self):
        """Ranks whose packs were opened so far"""
        return {int(name.rsplit("/", 1)[1].split("-")[2]) for name in self.opened if name.endswith(".pack")}


def want(base, grid, t, pairs):
    """What has to be found: the pieces that were stored with exactly that box, and nothing else."""
    stored = base.pieces(t)
    return {box: tree(data) for box, data in cut(base, grid, t.array, pairs) if len(data) > INLINE and box in stored}


def check(saver, t, pairs):
    number = [x[1] for x in saver.layout.tensors].index(t.name.encode())
    found, wanted = saver.known(t, pairs), want(saver.base, saver.layout.grid(number), t, pairs)
    assert found == wanted, (t.name, t.shape, t.held, pairs)
    return len(found), len(list(cut(saver.base, saver.layout.grid(number), t.array, pairs)))


def held_by(lib, shape, mesh, words):
    """{rank: boxes}, by the library's rules; of replicas the first"""
    m = tl.OwnedMesh(lib, mesh)
    s, out, seen = tl.OwnedSharding(lib, shape, m, words), {}, set()
    for rank in m.ranks:
        boxes = [tuple(zip(o, n)) for o, n, *_ in tl.shard_boxes(lib, s.shard(rank))]
        if boxes and tuple(boxes) not in seen:
            seen.add(tuple(boxes))
            out[rank] = None if boxes == [tuple(whole(shape))] else boxes
    return out


def make(lib, name, shape, mesh, words, kind="u2", seed=1):
    t = T(name, kind, shape, held_by(lib, shape, mesh, words), seed)
    t.sharding = (mesh, words)
    return t


def count(mesh):
    return int(np.prod([int(w.split("=")[1]) for w in mesh.split(",")]))


# ---- any layout ----

@pytest.mark.parametrize("seed", range(4))
def test_what_is_there_is_found_and_nothing_else(proto, shapes, tmp_path, seed, scale):
    """Any sharding asked under any other, or for any box."""
    rng = random.Random(seed)
    mesh = [(2, 2), (3, 2), (5,), (4, 2)][seed]
    params = rng.choice([SMALL, Params(64, 256, 16), Params(512, 4096, 128)])
    tensors = random_tensors(shapes, rng, scale(10, 300), mesh)
    text = ",".join(f"d{i}={n}" for i, n in enumerate(mesh))
    for i in range(scale(10, 300)):  # and some whose mesh is recorded
        shape = random_shape(rng)
        try:
            tensors.append(make(shapes, f"m{i}", shape, text, random_words(rng, shape, mesh), rng.choice(list(KINDS)),
                                i))
        except tl.Failed:
            pass
    for t in tensors:
        if not t.held:
            t.held = {0: None}
    base, found, asked = Base(proto, tmp_path / "s", tensors, count(text), params), 0, 0
    for rank in (0, count(text) - 1, 77):
        with Saver(base, tmp_path / "s", rank) as saver:
            for t in tensors:
                others = [b for boxes in sharded(shapes, rng, t.shape, rng.choice([(2,), (3,), (2, 2)])).values()
                          for b in boxes or [whole(t.shape)]]
                own = [b for b in (t.held.get(rank) or [whole(t.shape)])]
                some = [(o, rng.randint(1, n - o)) for n in t.shape
                        for o in [rng.randrange(n)]] if 0 not in t.shape else whole(t.shape)
                for pairs in own + rng.sample(others, min(len(others), 3)) + [whole(t.shape), some]:
                    n, of = check(saver, t, pairs)
                    found, asked = found + n, asked + of
    assert asked // 4 < found < asked


LAYOUTS = {"tp8": ("tp=8", "S(0)"), "tp8 columns": ("tp=8", "S(1)"), "tp2 fsdp4": ("fsdp=4,tp=2", "SS(0,2),S(0)"),
           "fsdp2 tp2": ("fsdp=2,tp=2", "S(0),S(1)"),
           "whole": ("dp=1", "R"), "fsdp3": ("fsdp=3", "S(0)"), "thin": ("fsdp=48", "S(0)"),
           "ragged": ("r=3", "RS(0;1,4,1)"), "interleaved": ("tp=4", "IS(0,2)")}


@pytest.mark.parametrize("one", LAYOUTS)
def test_saved_under_one_layout_asked_under_another(proto, shapes, tmp_path, one):
    """Layouts whose shards are no thinner than tiles share every piece; of the others what the list of pieces says."""
    shape, (mesh, words) = (96, 512), LAYOUTS[one]
    tensors = [make(shapes, "w", shape, mesh, words), make(shapes, "v", (96,), mesh, words.replace("S(1)", "R"), "i8")]
    base = Base(proto, tmp_path / "s", tensors, count(mesh), Params(1024, 4096, 64))
    for other, (mesh2, words2) in LAYOUTS.items():
        found = asked = 0
        for rank, boxes in held_by(shapes, shape, mesh2, words2).items():
            with Saver(base, tmp_path / "s", rank) as saver:
                for pairs in boxes or [whole(shape)]:
                    n, of = check(saver, tensors[0], pairs)
                    found, asked = found + n, asked + of
                check(saver, tensors[1], whole((96,)))
        even = {"tp8", "tp8 columns", "tp2 fsdp4", "fsdp2 tp2", "whole"}
        assert found == asked or one != other
        assert found == asked or not {one, other} <= even, (one, other, found, asked)


def spans(proto, shape, kind, replicas, params):
    """{rank: boxes}: each replica the pieces of its equal span of the whole tensor"""
    with closed(Layout(proto.lib, [("model", b"x", KINDS[kind][0], shape)], params)) as layout:
        grid = layout.grid(0)
    n, out, box = proto.lib.tensor_piece_count(c.byref(grid),
                                               c.byref(make_box(whole(shape)))), {}, type(make_box([])) * 32
    for r in range(replicas):
        boxes = box()
        got = proto.lib.tensor_share_boxes(c.byref(grid), c.byref(make_box(whole(shape))), u64(n * r // replicas),
                                           u64(n * (r + 1) // replicas), boxes)
        out[r] = [list(zip(b.offset[:len(shape)], b.size[:len(shape)])) for b in boxes[:got]]
    return {r: boxes for r, boxes in out.items() if boxes}


def test_spans_of_replicas(proto, tmp_path):
    """Each of seven replicas stored a span; one that changed its number, or is alone now, finds the others'."""
    t = T("w", "f4", (100, 1300), spans(proto, (100, 1300), "f4", 7, SMALL))
    t.sharding = ("dp=7", "R")
    base = Base(proto, tmp_path / "s", [t], 7)
    assert sum(len(b) for b in t.held.values()) > 7  # spans end within rows of tiles
    with Saver(base, tmp_path / "s", 2) as saver:
        for pairs in t.held[2]:
            assert check(saver, t, pairs)[0] > 0
        assert saver.readers() == {0, 2}  # rank 0 stored the layout
        n, of = check(saver, t, whole(t.shape))
        assert n == of and saver.readers() == set(range(7))
    with Saver(base, tmp_path / "s", 9) as saver:
        assert all(check(saver, t, pairs)[0] > 0 for boxes in spans(proto, t.shape, "f4", 3, SMALL).values()
                   for pairs in boxes)


# ---- what is read ----

def fsdp(proto, shapes, path, world, tensors=6):
    return Base(proto, path, [make(shapes, f"w{i}", (world * 4, 512), f"fsdp={world}", "S(0)", seed=i)
                              for i in range(tensors)], world)


def test_an_unchanged_layout_reads_its_own_line(proto, shapes, tmp_path):
    """As many files, and as many reads, of 64 ranks as of 4."""
    reads = {}
    for world in (4, 64):
        base = fsdp(proto, shapes, tmp_path / str(world), world)
        with Saver(base, tmp_path / str(world), world - 2) as saver:
            for t in base.tensors:
                n, of = check(saver, t, t.held[world - 2][0])
                assert n == of > 1
            assert saver.readers() == {0, world - 2}
            reads[world] = saver.meddler.count["file_read"], len(saver.opened)
    assert reads[64] == reads[4]


def test_only_lines_that_can_hold_the_box_are_read(proto, shapes, tmp_path):
    base = fsdp(proto, shapes, tmp_path / "s", 16)
    t = base.tensors[0]
    for rank, pairs, holders in [(3, [(20, 12), (0, 512)], {3, 5, 6, 7}), (40, [(60, 4), (0, 512)], {15}),
                                 (3, [(12, 4), (100, 50)], {3})]:
        with Saver(base, tmp_path / "s", rank) as saver:
            check(saver, t, pairs)
            assert saver.readers() - {0} == holders
    for t in base.tensors:
        t.sharding = None
    # nothing recorded: outwards from its own number, until the box is covered
    base = Base(proto, tmp_path / "unknown", base.tensors, 16)
    with Saver(base, tmp_path / "unknown", 6) as saver:
        n, of = check(saver, base.tensors[0], [(16, 4), (0, 512)])
        assert n == of and saver.readers() - {0} == {4, 5, 6, 7, 8} - ({8} if 8 not in saver.readers() else set())
        check(saver, base.tensors[1], [(16, 4), (0, 512)])
        assert len(saver.readers() - {0}) <= 5  # the one that had something is asked before its neighbours


def test_rows_are_kept(proto, shapes, tmp_path):
    """Another box of a row that is known, and a miss, cost nothing."""
    base = fsdp(proto, shapes, tmp_path / "s", 4)
    other = T("none", "u2", (16, 512), {0: None})
    with Saver(base, tmp_path / "s", 1, base.tensors + [other]) as saver:
        check(saver, base.tensors[0], [(0, 16), (0, 512)])
        assert saver.known(other, whole(other.shape)) == {}
        before = saver.meddler.count["file_read"]
        for pairs in ([(0, 16), (0, 512)], [(4, 4), (0, 512)], [(15, 1), (17, 80)]):
            check(saver, base.tensors[0], pairs)
            assert saver.known(other, whole(other.shape)) == {}
        assert saver.meddler.count["file_read"] == before


def test_many_lines_in_vain(proto, tmp_path):
    """Nothing recorded, and nobody near has any of it: the search ends. Who does have it, is found from nearer."""
    t = T("w", "u2", (4, 512), {0: None})
    rest = T("x", "u2", (512, 8), {r: [[(r * 4, 4), (0, 8)]] for r in range(128)})
    base = Base(proto, tmp_path / "s", [t, rest], 128)
    with Saver(base, tmp_path / "s", 127) as saver:
        assert saver.known(t, whole(t.shape)) == {}
        assert len(saver.readers() - {0}) == 64
    with Saver(base, tmp_path / "s", 20) as saver:
        n, of = check(saver, t, whole(t.shape))
        assert n == of


def test_stages_have_layouts_of_their_own(proto, shapes, tmp_path):
    """A tensor that moved to another stage is found there; a rank whose stage did not change reads no other's
    layout."""
    stages = [[make(shapes, f"layers.{s}.{i}", (16, 512), "tp=2", "S(0)", seed=10 * s + i) for i in range(3)]
              for s in range(3)]
    for s, tensors in enumerate(stages):
        for t in tensors:
            t.held = {r + 2 * s: boxes for r, boxes in t.held.items()}
            t.sharding = None
    everything = [t for tensors in stages for t in tensors]
    base = Base(proto, tmp_path / "s", everything, 6,
                stages=[((2 * s, 2 * s + 1), tensors) for s, tensors in enumerate(stages)])
    with Saver(base, tmp_path / "s", 3) as saver:
        for t in stages[1]:
            n, of = check(saver, t, t.held[3][0])
            assert n == of
        assert saver.readers() == {2, 3}
        n, of = check(saver, stages[2][0], whole((16, 512)))
        assert n == of and saver.readers() >= {2, 3, 4, 5}
        check(saver, stages[0][0], whole((16, 512)))


# ---- what differs, what is broken ----

def test_another_tensor_is_not_the_same(proto, shapes, tmp_path):
    base = Base(proto, tmp_path / "s", [make(shapes, "w", (16, 512), "tp=2", "S(0)")], 2)
    for t in (T("w", "u2", (512, 16), {}), T("w", "u2", (16, 256), {}), T("w", "f4", (16, 512), {}),
              T("v", "u2", (16, 512), {})):
        with Saver(base, tmp_path / "s", 0, [t]) as saver:
            assert saver.known(t, whole(t.shape)) == {}
    same = base.tensors[0]
    with Saver(base, tmp_path / "s", 0, [same]) as saver:
        n, of = check(saver, same, whole(same.shape))
        assert n == of > 1
    base.params = Params(512, 1024, 64)
    with Saver(base, tmp_path / "s", 0, [same]) as saver:
        assert saver.known(same, whole(same.shape)) == {}


def damage(path, rank, whole_pack=False):
    [pack] = [p for p in path.glob("packs/*/*.pack") if p.name.endswith(f"-{rank}-meta.pack")]
    pack.chmod(0o600)
    data = bytearray(pack.read_bytes())
    for i in range(4096 if not whole_pack else 0, len(data), 64):
        data[i] ^= 0x10
    pack.write_bytes(data)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_damaged_part_recognises_nothing_and_breaks_nothing(proto, shapes, tmp_path, broken):
    base = Base(proto, tmp_path / "s", [make(shapes, "w", (64, 512), "tp=4", "S(0)")], 4)
    damage(tmp_path / "s", broken)
    t = base.tensors[0]
    with Saver(base, tmp_path / "s", 1) as saver:
        found = saver.known(t, whole(t.shape))
        lost = {box for box in want(base, saver.layout.grid(0), t, whole(t.shape))
                if broken * 16 <= box[0][0] < (broken + 1) * 16}
        assert lost and found == {box: d for box, d in want(base, saver.layout.grid(0), t, whole(t.shape)).items()
                                  if box not in lost}
        assert set(saver.known(t, t.held[3][0])) == {box for box in found if box[0][0] >= 48}


@pytest.mark.parametrize("gone", ["layout", "manifest", "pack"])
def test_what_is_not_there_recognises_nothing(proto, shapes, tmp_path, gone):
    base = Base(proto, tmp_path / "s", [make(shapes, "w", (64, 512), "tp=4", "S(0)")], 4)
    t = base.tensors[0]
    if gone == "layout":
        damage(tmp_path / "s", 0, True)
    if gone == "pack":
        for p in (tmp_path / "s").glob("packs/*/*-meta.pack"):
            p.unlink()
    manifest = next((tmp_path / "s" / "runs" / "r" / "manifests").iterdir())
    if gone == "manifest":
        manifest.unlink()
    with Saver(base, tmp_path / "s", 1) as saver:
        assert saver.known(t, whole(t.shape)) == {}


def test_any_thread(proto, shapes, tmp_path):
    """Rows come and go under eight threads, more tensors than rows are kept."""
    base, wrong = fsdp(proto, shapes, tmp_path / "s", 4, tensors=24), []
    with Saver(base, tmp_path / "s", 1) as saver:
        grid = saver.layout.grid(0)
        wanted = {(t.name, i): want(base, grid, t, pairs) for t in base.tensors
                  for i, pairs in enumerate([t.held[1][0], whole(t.shape)])}

        def work(seed):
            rng = random.Random(seed)
            for _ in range(40):
                t, i = rng.choice(base.tensors), rng.randrange(2)
                if saver.known(t, [t.held[1][0], whole(t.shape)][i]) != wanted[t.name, i]:
                    wrong.append((t.name, i))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert not wrong
