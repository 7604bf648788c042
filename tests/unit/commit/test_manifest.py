# SPDX-License-Identifier: Apache-2.0
"""Manifests: made from announcements, the same bytes from every committer; the cover of tensors against an array of
counts."""
import ctypes as c
import itertools
import random
import struct
import time

import numpy as np
import pytest

import coverlib
from protolib import (ATTEMPT, EFORMAT, LAYOUT, P, P_, PART, Announcement, Blob, Buf, CoverBox, Error, Layout, Manifest,
                      PackUse, Part, Piece, Proto, ProtoRef, Ref,
                      Shape, attributes, digest, field, make_box, manifest_make, packs, parse, ptr, ref,
                      sample_announcement, table, u32, u64, unparse, with_blobs)
from storelib import Api, Store


@pytest.fixture(scope="module")
def proto(lib):
    return Proto(lib)


def test_tables(proto):
    code, body, d = manifest_make(proto.lib, [sample_announcement(0), sample_announcement(1, stores=False)])
    assert code == 0
    m = proto.decode("manifest", body)
    names = [m.packs[i].pack for i in range(m.npacks)]
    assert names == sorted({ATTEMPT + b"-%d-%s" % (r, k) for r in (0, 1) for k in (b"model", b"meta")} |
                           {b"ffffffffffffffff-0-0-model"})
    assert (m.run, m.attempt, m.step, m.world, m.nranks, m.nlayouts, m.nheaders,
            m.nhosts) == (b"run-1", ATTEMPT, 12, 2, 2, 1, 1, 1)
    assert (m.tensors, m.bytes, m.new_bytes) == (5, 2000, 20)
    for r in range(2):
        k = m.ranks[r]
        assert (names[k.part.pack] == ATTEMPT + b"-%d-meta" % r and
                bytes(k.part.digest.bytes) == bytes(digest(r + 100).bytes))
        own = sample_announcement(r)
        assert [names[m.map[k.first_map + i]] for i in range(k.npacks)] == [own.packs[i].pack
                                                                            for i in range(own.npacks)]
    shared = [m.packs[i] for i in range(m.npacks) if m.packs[i].pack.startswith(b"ffff")][0]
    assert shared.live_bytes == 2 * 4098
    assert names[m.layouts[0].ref.pack].endswith(b"-0-meta") and names[m.headers[0].ref.pack].endswith(b"-0-meta")
    assert proto.encode("manifest", m) == body
    proto.release("manifest", m)


def test_the_lowest_rank_counts(proto):
    """Layout and header stored by several ranks: one line each, whoever commits."""
    for low in (0, 2):  # "-10-meta" sorts before "-2-meta"
        one = manifest_make(proto.lib, [sample_announcement(r, 12, stores=r >= low) for r in range(12)])
        two = manifest_make(proto.lib, [sample_announcement(r, 12, stores=r == low) for r in range(12)])
        assert one == two and one[0] == 0


@pytest.mark.parametrize("change, word", [
    ({"step": 13}, "step 13"), ({"run": b"other"}, "other"), ({"attempt": b"0123456789abcdef-8"}, "abcdef-8"),
    ({"world": 3}, "world size 3"), ({"rank": 0}, "place"),
    ({"nattributes": 0}, "attributes"), ({"layout": digest(77)}, "layout of rank 1"),
])
def test_announcements_have_to_agree(proto, change, word):
    second = sample_announcement(1, stores=False)
    for k, v in change.items():
        setattr(second, k, v)
    code, sentence, _ = manifest_make(proto.lib, [sample_announcement(0), second])
    assert code == EFORMAT and word in sentence, sentence


def test_more_disagreement(proto):
    first, second = sample_announcement(0), sample_announcement(1)
    second.headers[0].ref.digest = digest(56)
    assert "different safetensors headers of model" in manifest_make(proto.lib, [first, second])[1]
    second = sample_announcement(1, stores=False)
    second.packs[2].size += 1
    assert "ffffffffffffffff-0-0-model" in manifest_make(proto.lib, [first, second])[1]
    assert manifest_make(proto.lib, [first])[0] == EFORMAT and manifest_make(proto.lib, [])[0] == EFORMAT
    second = sample_announcement(1, stores=False)
    second.attributes, second.nattributes = attributes(loss="2.32")
    assert "attributes" in manifest_make(proto.lib, [first, second])[1]


def test_two_layouts(proto):
    code, body, _ = manifest_make(proto.lib,
                                  [sample_announcement(r, 4, stores=r in (0, 2), layout=9 if r < 2 else 4, nheaders=0)
                                   for r in range(4)])
    assert code == 0
    m = proto.decode("manifest", body)
    assert ([bytes(m.layouts[i].digest.bytes)[0] for i in range(m.nlayouts)] == [4, 9] and
            [m.ranks[i].layout for i in range(4)] == [1, 1, 0, 0])
    assert m.tensors == 10
    proto.release("manifest", m)


def test_each_layout_has_its_own_headers(proto):
    """Two stages of a pipeline: `model` has tensors in both, and each stores a header of those that it knows."""
    ranks = [sample_announcement(r, 4, stores=r in (0, 2), layout=9 if r < 2 else 4) for r in range(4)]
    ranks[2].headers[0].ref.digest = digest(56)
    code, body, _ = manifest_make(proto.lib, ranks)
    assert code == 0, body
    m = proto.decode("manifest", body)
    assert [(m.headers[i].layout, bytes(m.headers[i].ref.digest.bytes)[0])
            for i in range(m.nheaders)] == [(0, 56), (1, 55)]
    assert proto.encode("manifest", m) == body
    for bad in ([2, 3], [1, 1], [1, 0]):
        for i, number in enumerate(bad):
            m.headers[i].layout = number
        assert proto.encode("manifest", m) == EFORMAT
    proto.release("manifest", m)
    ranks[0].headers[0].layout = 1  # an announcement has one layout
    assert proto.encode("announcement", ranks[0]) == EFORMAT
    proto.release("manifest", m)


def large(proto, ranks):
    out = []
    for r in range(ranks):
        p, n = packs(ATTEMPT + b"-%d-model" % r, ATTEMPT + b"-%d-optimizer" % r, ATTEMPT + b"-%d-meta" % r,
                     b"0123456789abcdef-6-%d-model" % r)
        a, na = attributes(loss="2.31")
        m = Announcement(run=b"run", attempt=ATTEMPT, step=1, rank=r, world=ranks,
                         host=b"node-%05d.cluster.example" % (r // 8), layout=digest(r // 1024),
                         stores_layout=r % 1024 == 0, part=ref(PART, 2, 65536, mark=r), packs=p, npacks=n, tensors=1000,
                         bytes=1 << 33, new_bytes=1 << 32,
                         attributes=a, nattributes=na)
        if m.stores_layout:
            m.layout_ref = ref(LAYOUT, 2, mark=r // 1024)
        out.append(m)
    return out


def test_size_for_8192_ranks(proto):
    announcements = large(proto, 8192)
    start = time.time()
    code, body, d = manifest_make(proto.lib, announcements)
    made = time.time()
    assert code == 0, body
    m = proto.decode("manifest", body)
    print(f"\nmanifest of 8,192 ranks with 4 packs each: {len(body)} bytes, made in {made - start:.3f} s, read in "
          f"{time.time() - made:.3f} s")
    assert m.nranks == 8192 and m.npacks == 4 * 8192 and len(body) < 4 << 20
    proto.release("manifest", m)


def manifest_fields(proto):
    return parse(manifest_make(proto.lib, [sample_announcement(0), sample_announcement(1, stores=False)])[1])


def test_tables_that_lie(proto):
    fields = manifest_fields(proto)

    def again(number, change):
        return proto.again("manifest", unparse([(n, k, change(v) if n == number else v) for n, k, v in fields]))

    def word(at, value, form="<I"):
        return lambda v: v[:at] + struct.pack(form, value) + v[at + struct.calcsize(form):]
    assert isinstance(again(0, None), bytes)
    for at, bad in ((0, 1), (4, 1), (8, 1), (12, 1), (16, 4), (16, 2**32 - 1), (20, 1), (96, 0), (96, 2), (108, 2),
                    (24 + 64, 5), (24 + 64, 2**32 - 1)):
        assert again(11, word(at, bad)) == EFORMAT, at
    assert again(11, word(24 + 32, 2**64 - 1, "<Q")) == EFORMAT          # offset
    assert again(11, word(24 + 40, 2**64 - 1, "<Q")) == EFORMAT          # checks
    assert again(11, word(24 + 48, 2**46 + 1, "<Q")) == EFORMAT          # length
    assert again(11, word(24 + 70, 2, "<B")) == EFORMAT                  # kind
    assert again(11, word(24 + 71, 1, "<B")) == EFORMAT                  # reserved
    assert again(11, lambda v: v[:96]) == EFORMAT and again(11, lambda v: v[:-1]) == EFORMAT
    assert (again(12, word(0, 5)) == EFORMAT and again(12, lambda v: v[:-4]) == EFORMAT and
            again(12, lambda v: v + bytes(4)) == EFORMAT)
    assert again(8, lambda v: v + v) == EFORMAT and again(8, lambda v: b"") == EFORMAT
    assert proto.again("manifest", unparse([f for f in fields if f[0] != 10])) == EFORMAT
    at = [n for n, _, _ in fields].index(10)
    for hosts in ([b"host-0", b"host-1"], [b"a", b"host-0"]):  # unused; and the first now a stranger
        assert proto.again("manifest", unparse(fields[:at] + [(10, 2, h) for h in hosts] + fields[at + 1:])) == EFORMAT
    inner = dict((n, v) for n, _, v in parse(dict((n, v) for n, _, v in fields)[13]))
    rows = inner[3]
    assert len(rows) == 5 * 32

    def packs_with(attempts, classes, table_):
        return again(13, lambda v: field(1, attempts) + b"".join(field(2, x) for x in classes) + field(3, table_))
    classes = [b"meta", b"model"]
    assert isinstance(packs_with(inner[1], classes, rows), bytes)
    assert packs_with(inner[1], classes + [b"spare"], rows) == EFORMAT
    assert packs_with(inner[1] + bytes(16), classes, rows) == EFORMAT
    assert packs_with(inner[1][:16], classes, rows) == EFORMAT
    assert packs_with(inner[1], [b"model", b"meta"], rows) == EFORMAT
    assert packs_with(inner[1], [b".", b"model"], rows) == EFORMAT
    assert packs_with(inner[1], classes, rows[32:64] + rows[:32] + rows[64:]) == EFORMAT
    assert packs_with(inner[1], classes, rows + rows[-32:]) == EFORMAT
    for at, value in ((0, 1), (0, 2**32 - 1), (8, 1), (8, 2), (12, 1)):
        assert packs_with(inner[1], classes, rows[:at] + struct.pack("<I", value) + rows[at + 4:]) == EFORMAT, at
    assert packs_with(inner[1], classes, rows[:16] + struct.pack("<Q", 0) + rows[24:]) == EFORMAT       # size
    assert packs_with(inner[1], classes, rows[:24] + struct.pack("<Q", 2**40) + rows[32:]) == EFORMAT   # live bytes


# ---- cover ----

class Boxes:
    def __init__(self, shape, boxes):
        """boxes: [(pairs, rank, mark)]"""
        self.shape = Shape(len(shape), (u64 * 16)(*shape))
        self.keep = [(u64 * max(2 * len(shape), 1))(*itertools.chain(*pairs)) for pairs, _, _ in boxes]
        self.array = (CoverBox * max(len(boxes), 1))(*[CoverBox(k, rank, digest(mark))
                                                       for k, (_, rank, mark) in zip(self.keep, boxes)])
        self.n = len(boxes)

    def check(self, lib):
        e = Error()
        r = lib.check_cover_boxes(c.byref(self.shape), b"t", self.array, c.c_size_t(self.n), c.byref(e))
        return (r, e.text.decode())


def cut(rng, pairs, n):
    """Cuts a box into up to n at random lines: what nested placements draw."""
    boxes = [pairs]
    for _ in range(n):
        at = rng.randrange(len(boxes))
        d = rng.randrange(len(pairs))
        offset, size = boxes[at][d]
        if size > 1:
            k = rng.randint(1, size - 1)
            box = boxes.pop(at)
            boxes += [box[:d] + [(offset, k)] + box[d + 1:], box[:d] + [(offset + k, size - k)] + box[d + 1:]]
    return boxes


def expected(shape, boxes):
    """By counting: one entry for each item."""
    count = np.zeros(shape, np.int64)
    seen = {}
    for pairs, rank, mark in boxes:
        key = tuple(pairs)
        if key in seen:
            if seen[key] != mark:
                return "different bytes"
            continue
        seen[key] = mark
        count[tuple(slice(o, o + n) for o, n in pairs)] += 1
    if (count > 1).any():
        return "overlap"
    return "no rank" if (count == 0).any() or not boxes else ""


def test_cover_against_counting(proto, scale):
    rng = random.Random(7)
    told = dict.fromkeys(["", "overlap", "no rank", "different bytes"], 0)
    for _ in range(scale(3000, 20000)):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 3)))
        whole = [(0, n) for n in shape]
        pieces = cut(rng, whole, rng.randint(0, 12)) if shape else [whole]
        boxes = [(p, rng.randrange(5), i) for i, p in enumerate(pieces)]
        boxes += [(p, rng.randrange(5), m) for p, _, m in rng.sample(boxes, rng.randint(0, min(2, len(boxes))))]
        what = rng.random()
        if what < 0.25:
            boxes.pop(rng.randrange(len(boxes)))
        elif what < 0.5 and shape:
            pairs = [(lambda size, n: (rng.randint(0, n - size), size))(rng.randint(1, n), n) for n in shape]
            boxes.append((pairs, 9, rng.choice([100, 0])))
        elif what < 0.6:
            p, rank, mark = rng.choice(boxes)
            boxes.append((p, 7, 200))
        rng.shuffle(boxes)
        r, sentence = Boxes(shape, boxes).check(proto.lib)
        word = expected(shape, boxes)
        told[word] += 1
        assert (r == 0) == (word == "") and word in sentence, (shape, boxes, sentence)
        if word == "no rank":  # the box that is named is a gap, whole
            text = sentence[sentence.index("["):].strip("[]")
            gap = [tuple(map(int, x.split(":"))) for x in text.split(", ")] if text else []
            count = np.zeros(shape, bool)
            for pairs, _, _ in boxes:
                count[tuple(slice(o, o + n) for o, n in pairs)] = True
            assert not count[tuple(slice(a, b) for a, b in gap)].any() and all(a < b for a, b in gap)
    assert min(told.values()) > 50, told


def test_near_covers_against_counting(proto, scale):
    """As many items as the tensor has, replicas left out; some twice, others not at all."""
    rng, told = random.Random(9), dict.fromkeys(["", "overlap", "different bytes"], 0)
    for _ in range(scale(800, 20000)):
        shape = coverlib.some_shape(rng)
        near = coverlib.near(rng, shape, coverlib.cover(rng, shape, rng.randint(1, 8)))
        boxes = [(list(zip(*box)), rng.randrange(5), i) for i, box in enumerate(near)]
        boxes += [(p, rng.randrange(5), m) for p, _, m in rng.sample(boxes, rng.randint(0, min(2, len(boxes))))]
        rng.shuffle(boxes)
        r, sentence = Boxes(shape, boxes).check(proto.lib)
        word = expected(shape, boxes)
        told[word] += 1
        assert (r == 0) == (word == "") and (word or "") in sentence, (shape, boxes, sentence)
    assert min(told.values()) > 5, told


def test_pinwheel(proto):
    """Five boxes that no line parts."""
    boxes = [([(0, 2), (0, 1)], 0, 0), ([(0, 1), (1, 2)], 1, 1), ([(1, 2), (2, 1)], 2, 2), ([(2, 1), (0, 2)], 3, 3),
             ([(1, 1), (1, 1)], 4, 4)]
    assert Boxes((3, 3), boxes).check(proto.lib)[0] == 0
    assert Boxes((3, 3), boxes[:4]).check(proto.lib) == (EFORMAT, 'tensor "t": no rank stored box [1:2, 1:2]')
    assert "overlap" in Boxes((3, 3), boxes + [([(1, 2), (1, 2)], 5, 5)]).check(proto.lib)[1]


def test_empty_and_scalar(proto):
    assert Boxes((), [([], 0, 1), ([], 3, 1)]).check(proto.lib)[0] == 0
    assert "ranks 0 and 3" in Boxes((), [([], 3, 2), ([], 0, 1)]).check(proto.lib)[1]
    assert "no rank" in Boxes((), []).check(proto.lib)[1]
    assert Boxes((0, 4), [([(0, 0), (0, 4)], 0, 1)]).check(proto.lib)[0] == 0
    assert "no rank" in Boxes((0, 4), []).check(proto.lib)[1]


def test_names_box_and_ranks(proto):
    halves = [([(0, 4), (0, 8)], 0, 1), ([(4, 4), (0, 8)], 1, 2)]
    assert Boxes((8, 8),
                 halves + [([(4, 4), (0, 8)], 6, 3)]).check(proto.lib)[
        1] == 'tensor "t": ranks 1 and 6 stored different bytes for box [4:8, 0:8]'
    assert Boxes((8, 8), halves + [([(3, 2), (7, 1)], 6, 3)]).check(proto.lib)[1].endswith("overlap")
    assert Boxes((8, 8), halves[:1]).check(proto.lib)[1] == 'tensor "t": no rank stored box [4:8, 0:8]'


@pytest.mark.parametrize("shape, split", [((1 << 40,), (4096,)), ((1 << 20, 1 << 20), (64, 64)),
                                          ((4096, 64, 1 << 20), (16, 4, 64)), ((7, 1 << 20), (1, 4096))])
def test_many_boxes_are_quick(proto, shape, split):
    """4,096 boxes and as many replicas; then one missing (recorded: a quadratic way takes some hundred times as
    long)."""
    grids = [[(i * (n // k), n // k) for i in range(k)] for n, k in zip(shape, split)]
    boxes = [(list(p), r, r) for r, p in enumerate(itertools.product(*grids))]
    shuffled = boxes + boxes
    random.Random(8).shuffle(shuffled)
    b = Boxes(shape, shuffled)
    start = time.time()
    assert b.check(proto.lib)[0] == 0
    missing = boxes[:2500] + boxes[2501:]
    b = Boxes(shape, missing)
    assert "no rank stored box [" + ", ".join(f"{o}:{o + n}" for o, n in boxes[2500][0]) + "]" in b.check(proto.lib)[1]
    print(f"\ncover of {len(shuffled)} boxes in {len(shape)} dimensions: {time.time() - start:.2f} s")


# ---- through a store ----

class World:
    """Ranks that write rows of one layout into a store: announcements, manifest, checks."""

    def __init__(self, lib, path, tensors, rows_of_rank, seed=1):
        self.lib, self.api = lib, Api(lib, path)
        s = c.cast(self.api.p, P(Store)).contents
        self.layout, self.announcements, self.keep = Layout(lib, tensors), [], []
        for rank, rows in enumerate(rows_of_rank):
            name, w, size = ATTEMPT + b"-%d-meta" % rank, ptr(), u64()
            assert lib.pack_writer_open(ptr(s.storage), s.info.id, name, c.byref(w)) == 0
            layout_ref, part_ref, e = Ref(), Ref(), Error()
            if rank == 0:
                assert lib.pack_append_raw(w, LAYOUT, self.layout.object, u64(len(self.layout.object)),
                                                 c.byref(layout_ref)) == 0
            b = ptr(lib.store_part_builder_new(self.layout.p, w, u32(1)))
            for tensor, boxes, mark in rows:
                pieces = [P_(n, random.Random(f"{mark}{i}").randbytes(n), 1) if n <= 64
                          else P_(n, (0, 4096 * (1 + 1000 * i), 1 << 40), mark * 1000 + i)
                          for i, n in enumerate(self.layout.piece_bytes(tensor, boxes))]
                array = (Piece * len(pieces))(*[p.struct() for p in pieces])
                box_array = table(type(make_box([])), [make_box(x) for x in boxes]) if boxes else None
                assert lib.store_part_add_row(b, u32(tensor), box_array, u32(len(boxes or [])), array, u64(len(pieces)),
                                              c.byref(e)) == 0, e.text
            names = [ATTEMPT + b"-%d-model" % rank, name]
            part = Part(rank=rank, world=len(rows_of_rank), host=b"h", layout=self.layout.p.contents.digest,
                        packs=table(PackUse, [PackUse(names[0], 1 << 46, 0), PackUse(name, 0, 0)]), npacks=2)
            assert lib.store_part_finish(b, c.byref(part), c.byref(part_ref), c.byref(e)) == 0, e.text
            assert lib.pack_seal(w, c.byref(size)) == 0
            lib.store_part_builder_free(b)
            a = Announcement(run=b"r", attempt=ATTEMPT, step=0, rank=rank, world=len(rows_of_rank), host=b"h",
                             layout=part.layout, stores_layout=rank == 0,
                             part=own(part_ref),
                             packs=table(PackUse, [PackUse(names[0], 1 << 46, 0), PackUse(name, size, 0)]), npacks=2,
                             tensors=len(tensors))
            if rank == 0:
                a.layout_ref = own(layout_ref)
            self.announcements.append(a)
        code, self.body, self.digest = manifest_make(lib, self.announcements)
        assert code == 0, self.body

    def call(self, name, *args):
        e = Error()
        r = getattr(self.lib, name)(self.api.p, *args, c.byref(e))
        return r, e.text.decode()

    def put(self):
        b = Buf(c.cast(c.create_string_buffer(self.body, len(self.body)), ptr), len(self.body), len(self.body), 0)
        return self.call("store_manifest_put", b"r", c.byref(b), self.digest)

    def checked(self):
        m = Manifest()
        r = self.call("store_manifest_get", b"r", self.digest, c.byref(m))
        if r[0] < 0:
            return r
        r = self.call("check_manifest_cover", c.byref(m), None)
        self.packs = self.call("store_manifest_check_packs", c.byref(m))
        Proto(self.lib).release("manifest", m)
        return r

    def close(self):
        self.layout.close()
        self.api.close()


def own(r):
    return ProtoRef(digest=r.digest, offset=r.offset, checks=r.checks, raw_len=r.raw_len, stored_len=r.stored_len,
                    pack=1, codec=r.codec, kind=r.kind)


TENSORS = [("model", b"embed", 11, (1000, 64)), ("model", b"norm", 12, (8,)), ("optimizer", b"step", 9, ())]
TOP, BOTTOM, MIDDLE = [[(0, 500), (0, 64)]], [[(500, 500), (0, 64)]], [[(499, 2), (0, 64)]]


@pytest.mark.parametrize("ranks, sentence", [
    ([[(0, None, 1), (1, None, 2), (2, None, 3)]], ""),
    ([[(0, TOP, 1), (1, None, 2)], [(0, BOTTOM, 2), (1, None, 2), (2, None, 3)]], ""),
    ([[(0, TOP + BOTTOM, 1), (1, None, 2), (2, None, 3)]], ""),
    ([[(0, None, 1), (1, None, 2), (2, None, 3)], []], ""),
    ([[(0, None, 1), (1, None, 2)]], 'tensor "step": no rank stored box []'),
    ([[(0, TOP, 1), (1, None, 2), (2, None, 3)]], 'tensor "embed": no rank stored box [500:1000, 0:64]'),
    ([[(0, TOP, 1), (1, None, 2)], [(0, BOTTOM, 2), (1, None, 4), (2, None, 3)]],
     'tensor "norm": ranks 0 and 1 stored different bytes for all of it'),
    ([[(0, TOP, 1), (1, None, 2)], [(0, BOTTOM, 2), (2, None, 3)], [(0, MIDDLE, 2)]], 'rank 2'),
    ([[(0, TOP, 1), (1, None, 2)], [(0, BOTTOM, 2), (2, None, 3)], [(0, BOTTOM, 3)]],
     'tensor "embed": ranks 1 and 2 stored different bytes for box [500:1000, 0:64]'),
    ([[(0, TOP, 1), (1, None, 2)], [(0, None, 2), (2, None, 3)]], 'overlap'),
])
def test_cover_of_a_step(proto, tmp_path, ranks, sentence):
    w = World(proto.lib, tmp_path / "s", TENSORS, ranks)
    assert w.put() == (0, "") and w.put() == (0, "")
    r, text = w.checked()
    assert (r == 0) == (sentence == "") and sentence in text, text
    assert w.packs[0] < 0 and "-model is gone" in w.packs[1]
    w.close()


def test_manifests_in_a_store(proto, tmp_path):
    w = World(proto.lib, tmp_path / "s", TENSORS, [[(0, None, 1), (1, None, 2), (2, None, 3)]])
    assert w.checked()[0] < 0
    assert w.put() == (0, "")
    path = tmp_path / "s" / "runs" / "r" / "manifests" / w.digest.hex()
    data = bytearray(path.read_bytes())
    for at in (0, 8, 20, len(data) - 1):
        path.chmod(0o644)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
        assert w.checked()[0] < 0 and w.put()[0] < 0
    path.write_bytes(data)
    assert w.checked() == (0, "")
    other = path.with_name("00" * 32)
    other.write_bytes(data)
    w.digest = bytes(32)
    assert "digest" in w.checked()[1]
    w.close()


# ---- which ranks have which blobs ----

@pytest.mark.parametrize("names", [
    [(b"", False, (0, 1))], [(b"\xff", False, (0, 1))], [(b"b", False, (0, 1)), (b"a", False, (0, 1))],
    [(b"a", True, (0, 1)), (b"a", False, (0, 1))], [(b"a", True, (0, 1)), (b"a", True, (1, 1))], [(b"a", True)],
    [(b"a", False, (0, 2))], [(b"a", False, (0, 1), (1, 1))], [(b"a", True, (0, 0))], [(b"a", True, (2, 1))],
    [(b"a", True, (0, 3))], [(b"a", True, (1, 2**32 - 1))], [(b"a", True, (0, 1), (1, 1))],
    [(b"a", True, (1, 1), (0, 1))], [(b"%04d" % i, True, (0, 2)) for i in range(1025)]])
def test_names_of_blobs_that_are_none(proto, names):
    body = manifest_make(proto.lib, [sample_announcement(0), sample_announcement(1, stores=False)])[1]
    assert with_blobs(proto, body, *names) == EFORMAT
    assert proto.again("manifest", with_blobs(proto, body, (b"a", False, (1, 1)), (b"a", True, (0, 2)))) != body


def told_blobs(lib, parts, world):
    """[(name, own, [(first, how many)])] of parts, [(rank, {(own, name)})]; None: not said."""
    names, m = c.create_string_buffer(4096), Manifest(world=world, names_blobs=True, nblobs=3)
    lib.check_blob_names_init(names)
    for rank, blobs in parts:
        blobs = [Blob(name=name, per_rank=own) for own, name in sorted(blobs)]
        part = Part(rank=rank, world=world, blobs=table(Blob, blobs) if blobs else None, nblobs=len(blobs))
        assert lib.check_blob_names_add(names, c.byref(part)) == 0
    assert lib.check_blob_names_set(names, c.byref(m)) == 0
    said = [(b.name, b.per_rank, [(r.first, r.n) for r in b.ranges[:b.nranges]]) for b in m.blobs[:m.nblobs]]
    lib.check_blob_names_release(names)
    assert m.names_blobs or not said
    return said if m.names_blobs else None


def test_which_ranks_have_which_blobs(proto, rng):
    """Whatever the order in which parts are read."""
    for _ in range(200):
        world = rng.randint(1, 12)
        have = {rank: {(rng.random() < 0.5, rng.choice([b"a", b"b", b"b.json", b"c/d"]))
                       for _ in range(rng.randint(0, 4))} for rank in range(world)}
        want = []
        for own, name in sorted(set().union(*have.values())):
            ranks = [rank for rank in range(world) if (own, name) in have[rank]]
            starts = [rank for rank in ranks if rank - 1 not in ranks] if own else ranks[:1]
            want.append((name, own, [(first, next(n for n in itertools.count(1) if not own or first + n not in ranks))
                                     for first in starts]))
        parts = list(have.items())
        rng.shuffle(parts)
        assert told_blobs(proto.lib, parts, world) == want


@pytest.mark.parametrize("length, count, own, ranks, said", [
    pytest.param(4, 1024, True, [0], True, id="names"),
    pytest.param(4, 1025, False, [0], False, id="more names"),
    pytest.param(64, 1024, False, [1], True, id="bytes of names"),
    pytest.param(65, 1024, False, [1], False, id="more bytes of names"),
    pytest.param(4, 600, True, [0, 1], True, id="one range"),
    pytest.param(4, 600, True, [0, 2], False, id="two ranges"),
    pytest.param(4, 640, True, [0, 1], True, id="blobs"),
    pytest.param(4, 641, True, [0, 1], False, id="more blobs")])
def test_what_is_too_long_is_not_said(proto, length, count, own, ranks, said):
    parts = [(rank, {(own, b"%0*d" % (length, i)) for i in range(count if rank in ranks else 0)}) for rank in range(4)]
    assert (told_blobs(proto.lib, parts, 4) is not None) == said
