# SPDX-License-Identifier: Apache-2.0
"""A row of a part read by ranges (core/step/part_excerpt): the same as the row read whole, in any order of pieces;
bytes that rotted and tables that lie never give another answer."""
import ctypes as c
import errno
import random
import struct

import pytest

from protolib import (ATTEMPT, EFORMAT, EVERSION, INLINE, Chunk, Digest, Error, Grid, Layout, P, P_, PackUse, Part,
                      Piece, ProtoRef, Ref, Refused, Row, Params,
                      chunk_bytes, ptr, read_row, structure, table, u32, u64)
from storelib import Api, Store
from test_layout_part import Written, lib, plain, put, random_layout, random_pieces, random_rows  # noqa: F401 (lib is a fixture)

DAMAGED = -errno.EBADMSG
Boxes = structure("Boxes", ndim=u32, n=c.c_size_t, room=c.c_size_t, pairs=P(u64))
Head = structure("Head", tensor=u32, rank=u32, whole=c.c_bool, grid=Grid, boxes=Boxes, first_piece=P(u64), npieces=u64,
                 digest=Digest)


class Excerpt:
    """written: has lib, api, layout, part, array, names."""

    def __init__(self, written, tensor):
        self.w, self.p, e = written, P(Head)(), Error()
        r = written.lib.store_part_excerpt_open(written.api.p, written.layout.p, c.byref(written.part), written.array,
                                               u32(len(written.names)), u32(tensor),
                                               c.byref(self.p), c.byref(e))
        if r < 0:
            raise Refused(r, e.text.decode())
        self.head = self.p.contents

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.w.lib.store_part_excerpt_close(self.p)

    def pieces(self, first, n):
        out, e = (Piece * max(n, 1))(), Error()
        r = self.w.lib.store_part_excerpt_pieces(self.p, u64(first), u64(n), out, c.byref(e))
        if r < 0:
            raise Refused(r, e.text.decode())
        found = []
        for p in out[:n]:
            place = (p.ref.pack, p.ref.offset,
                     p.ref.checks) if p.ref.pack != INLINE else c.string_at(p.inline_bytes, p.ref.raw_len)
            assert (p.ref.pack == INLINE) == bool(p.inline_bytes) and p.ref.kind == 1 and p.base == INLINE
            found.append((bytes(p.ref.digest.bytes), bytes(p.xxh), place, p.ref.raw_len, p.ref.stored_len, p.ref.codec))
        return found

    def boxes(self):
        b, pairs = self.head.boxes, []
        assert b.ndim == len(self.w.layout.tensors[self.head.tensor][3])
        for i in range(b.n):
            pairs.append([(b.pairs[(i * b.ndim + d) * 2], b.pairs[(i * b.ndim + d) * 2 + 1]) for d in range(b.ndim)])
        return pairs

    def all(self):
        """As read_row gives a row."""
        boxes = self.boxes()
        if self.head.whole:
            assert boxes == [[(0, n) for n in self.w.layout.tensors[self.head.tensor][3]]]
        return (self.head.tensor, None if self.head.whole else boxes, self.pieces(0, self.head.npieces),
                bytes(self.head.digest.bytes))


def excerpt(written, tensor):
    with Excerpt(written, tensor) as w:
        return w.all()


# ---- the same as whole rows ----

def test_rows_are_the_same(lib, tmp_path, scale):
    rng = random.Random(21)
    encoded = 0
    for n in range(scale(12, 60)):
        layout = Layout(lib, random_layout(rng, rng.randint(1, 12)))
        rows = random_rows(rng, layout, 3)
        w = Written(lib, tmp_path / str(n), layout, rows)
        encoded += sum(ch.ref.codec != 0 for ch in w.chunks)
        for r in rows:
            assert excerpt(w, r[0]) == w.row(r[0]) == plain(r)
        for t in set(range(len(layout.tensors))) - {r[0] for r in rows}:
            with pytest.raises(Refused, match="ENODATA"):
                excerpt(w, t)
        w.api.close()
        layout.close()
    assert encoded > 3


def first_pieces(layout, tensor, boxes):
    numbers = [0]
    for b in boxes or [None]:
        numbers.append(numbers[-1] + len(layout.piece_bytes(tensor, [b] if b else None)))
    return numbers


@pytest.fixture(scope="module")
def long(lib, tmp_path_factory):
    """Rows of thousands of pieces in runs of three packs, a few hundred of them inline."""
    rng = random.Random(22)
    layout = Layout(lib, [("model", b"a", 11, (6000, 24)), ("model", b"b", 12, (64, 64)), ("model", b"c", 11, (5000,))],
                    Params(64, 128, 8))
    boxes = [[(i * 10, rng.randint(1, 10)), (rng.randint(0, 4), 20)] for i in range(600)]
    rows = [(0, boxes, random_pieces(rng, layout.piece_bytes(0, boxes), 3)),
            (1, None, random_pieces(rng, layout.piece_bytes(1, None), 3)),
            (2, None, random_pieces(rng, layout.piece_bytes(2, None), 3))]
    w = Written(lib, tmp_path_factory.mktemp("long") / "s", layout, rows)
    assert w.chunks[0].ref.raw_len > 3 * 16384 and w.chunks[0].ref.codec and w.chunks[0].nrows == 3
    yield w, rows
    w.api.close()
    layout.close()


def test_any_pieces_in_any_order(long, scale):
    w, rows = long
    rng, kinds = random.Random(23), set()
    for tensor, boxes, _ in rows:
        whole = w.row(tensor)[2]
        assert len(whole) > 30
        kinds |= {type(p[2]) for p in whole}
        with Excerpt(w, tensor) as open_:
            assert open_.head.npieces == len(whole)
            assert [open_.head.first_piece[i]
                    for i in range(open_.head.boxes.n + 1)] == first_pieces(w.layout, tensor, boxes)
            for _ in range(scale(300, 2000)):
                first = rng.randrange(len(whole) + 1)
                n = min(rng.choice([0, 1, 1, 2, 7, 100, 5000]), len(whole) - first)
                assert open_.pieces(first, n) == whole[first:first + n]
            at = 0
            while at < len(whole):
                n = min(rng.choice([1, 3]), len(whole) - at)
                assert open_.pieces(at, n) == whole[at:at + n]
                at += n + rng.choice([0, 0, 1, 20, 90])
            for first, n in [(len(whole), 1), (len(whole) + 1, 0), (0, len(whole) + 1), (2**64 - 1, 1), (1, 2**64 - 1)]:
                assert w.lib.store_part_excerpt_pieces(open_.p, u64(first), u64(n), None, None) == -errno.EINVAL
            assert open_.pieces(3, 2) == whole[3:5]
    assert kinds == {bytes, tuple}


def test_many_chunks(lib, tmp_path):
    """The chunk whose range holds the tensor; rows before it in the chunk count."""
    rng = random.Random(24)
    layout = Layout(lib, [("model", b"%04d" % i, 11, (1024, 1024)) for i in range(600)])
    rows = [(t, None, random_pieces(rng, layout.piece_bytes(t, None), 3)) for t in range(0, 600, 2)]
    w = Written(lib, tmp_path / "s", layout, rows)
    assert len(w.chunks) > 1 and w.chunks[0].nrows > 100
    for t in rng.sample(range(0, 600, 2), 60):
        assert excerpt(w, t) == plain(rows[t // 2])
    for t in (1, 599):
        with pytest.raises(Refused, match="ENODATA"):
            excerpt(w, t)
    w.part.layout.bytes[0] ^= 1
    with pytest.raises(Refused, match="another layout"):
        excerpt(w, 0)
    w.part.layout.bytes[0] ^= 1
    for field in ("nrows", "first_tensor", "last_tensor"):
        old = getattr(w.part.chunks[0], field)
        setattr(w.part.chunks[0], field, old + 1)
        with pytest.raises(Refused) as e:
            excerpt(w, 2)
        assert e.value.code == EFORMAT
        setattr(w.part.chunks[0], field, old)
    assert excerpt(w, 2) == plain(rows[1])
    w.api.close()
    layout.close()


# ---- rot ----

def chunk_file(w):
    return next((w.api.path / "packs").glob("*/*-meta.pack"))


def answers(w, tensor, pick):
    """Head, boxes and some pieces, or the errno."""
    try:
        with Excerpt(w, tensor) as open_:
            return [open_.head.whole, open_.boxes(), open_.head.npieces,
                    bytes(open_.head.digest.bytes)] + [open_.pieces(a, n) for a, n in pick]
    except Refused as e:
        assert e.code in (DAMAGED, EFORMAT), e
        assert "pack" in str(e) or "part" in str(e)
        return e.code


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_a_flipped_bit_never_gives_another_answer(long, scale, tensor):
    w, rows = long
    rng = random.Random(25 + tensor)
    path, ref = chunk_file(w), w.chunks[0].ref
    data = path.read_bytes()
    n = len(w.row(tensor)[2])
    pick = [(0, 3), (n // 2, 40), (n - 1, 1)]
    good = answers(w, tensor, pick)
    assert isinstance(good, list)
    checks = (ref.checks, -(-ref.raw_len // 16384) * (12 if ref.codec else 8))
    hits = 0
    with open(path, "r+b", buffering=0) as f:
        for i in range(scale(600, 6000)):
            at, length = checks if i % 8 == 0 else (ref.offset, ref.stored_len)
            at += rng.randrange(length)
            f.seek(at)
            f.write(bytes([data[at] ^ 1 << rng.randrange(8)]))
            found = answers(w, tensor, pick)
            hits += found != good
            assert found == good or isinstance(found, int)
            f.seek(at)
            f.write(data[at:at + 1])
        assert hits > 50
        for size in [ref.offset, ref.offset + 1000, ref.offset + ref.stored_len, ref.checks + 4, len(data) - 1]:
            f.truncate(size)
            found = answers(w, tensor, pick)
            assert found == good or isinstance(found, int)
            assert size >= ref.offset + ref.stored_len or isinstance(found, int)    # checks may be kept
            f.seek(0)
            f.write(data)
    assert answers(w, tensor, pick) == good


# ---- tables that lie, under a digest that is right ----

class Crafted:
    """A part whose one chunk is any bytes."""

    def __init__(self, lib, api, layout, data, nrows, last, number, npacks=3, encoded=False):
        self.lib, self.api, self.layout = lib, api, layout
        info = c.cast(api.p, P(Store)).contents.info
        name = ATTEMPT + b"-%d-meta" % number
        w, ref = ptr(), Ref()
        assert lib.pack_writer_open(ptr(c.cast(api.p, P(Store)).contents.storage), info.id, name, c.byref(w)) == 0
        append = lib.pack_append_encoded if encoded else lib.pack_append_raw
        assert append(w, c.c_int(5), data, u64(len(data)), c.byref(ref)) == 0
        assert lib.pack_seal(w, None) == 0
        self.names = [b"00000000000000aa-0-0-p%d" % i for i in range(npacks)] + [name]
        self.array = table(c.c_char_p, self.names)
        self.ref = ProtoRef(ref.digest, ref.offset, ref.checks, ref.raw_len, ref.stored_len, npacks, ref.codec,
                            ref.kind)
        self.part = Part(rank=number, world=1 << 20, host=b"h", layout=layout.p.contents.digest,
                         chunks=table(Chunk, [Chunk(0, last, nrows, self.ref)]), nchunks=1,
                         packs=table(PackUse, [PackUse(n, 2**46, 0) for n in self.names]), npacks=npacks + 1)

    def row(self, tensor):
        row, e = Row(), Error()
        r = self.lib.store_part_read_row_cached(None, self.api.p, self.layout.p, c.byref(self.part), self.array,
                                                u32(len(self.names)), u32(tensor), c.byref(row), c.byref(e))
        if r < 0:
            raise Refused(r, e.text.decode())
        out = read_row(self.layout, row)
        self.lib.store_row_release(c.byref(row))
        return out


@pytest.fixture(scope="module")
def crafting(lib, tmp_path_factory):
    layout = Layout(lib, [("model", b"a", 12, (600, 700)), ("model", b"b", 12, (4,)), ("model", b"c", 11, (40, 50)),
                          ("model", b"d", 2, ())])
    rng = random.Random(6)
    boxes = [[(0, 10), (0, 50)], [(20, 20), (5, 10)], [(12, 1), (3, 4)]]
    rows = [(0, None, random_pieces(rng, layout.piece_bytes(0, None), 3)), (1, None, [P_(16, b"0123456789abcdef", 5)]),
            (2, boxes, random_pieces(rng, layout.piece_bytes(2, boxes), 3)), (3, None, [P_(1, b"x", 6)])]
    api = Api(lib, tmp_path_factory.mktemp("crafted") / "s")
    yield layout, rows, api
    api.close()
    layout.close()


def tried(lib, crafting, data, number, nrows=4, last=3):
    """{tensor: (by range, whole)}, each a row or an error."""
    layout, _, api = crafting
    w, out = Crafted(lib, api, layout, data, nrows, last, number), {}
    for t in range(4):
        both = []
        for read in (excerpt, Crafted.row):
            try:
                both.append(read(w, t))
            except Refused as e:
                assert e.code in (EFORMAT, EVERSION, DAMAGED, -errno.ENODATA), e
                both.append(e.code)
        out[t] = both
    return out


def test_crafted_is_read(lib, crafting):
    layout, rows, api = crafting
    for number, encoded in ((1, False), (2, True)):
        w = Crafted(lib, api, layout, chunk_bytes(rows), 4, 3, number, encoded=encoded)
        for r in rows:
            assert excerpt(w, r[0]) == w.row(r[0]) == plain(r)


def test_fields_that_lie(lib, crafting, scale):
    """What the whole reader takes, the ranges give alike. What it refuses is refused, or the fault is in another row,
    in a digest (of the row or of pieces, which only the whole row proves), or in where inline bytes of a later row
    begin, which their digests prove."""
    layout, rows, _ = crafting
    data = chunk_bytes(rows)
    nrows, nruns, npieces = struct.unpack_from("<IIQ", data, 16)
    runs_at = 64 + nrows * 64
    pieces_at = runs_at + nruns * 24
    boxes_at = pieces_at + npieces * 64
    fields = [(i, "<I") for i in range(0, 64, 4)] + [(64 + r * 64 + i, "<I") for r in range(nrows)
                                                     for i in range(0, 64, 4)]
    fields += [(runs_at + r * 24 + i, f) for r in range(nruns)
               for i, f in ((0, "<I"), (4, "<I"), (8, "<Q"), (16, "<Q"))]
    fields += [(pieces_at + p * 64 + i, f) for p in range(npieces)
               for i, f in ((0, "<I"), (48, "<I"), (52, "<I"), (56, "<H"), (58, "<H"), (60, "<I"))]
    fields += ([(at, "<Q") for at in range(boxes_at, boxes_at + 6 * 16, 8)] +
               [(at, "<B") for at in range(boxes_at + 96, len(data))])
    rng, number, refused, more = random.Random(26), 10, 0, 0
    good = {r[0]: plain(r) for r in rows}
    for at, form in fields:
        size = struct.calcsize(form)
        old = struct.unpack_from(form, data, at)[0]
        values = {v % 2**(8 * size)
                  for v in (0, 1, old + 1, old - 1, old ^ 0x80, 2**(8 * size) - 1, 2**(8 * size - 1))} - {old}
        for value in sorted(values) if scale(0, 1) else [rng.choice(sorted(values))]:
            number += 1
            for t, (ranged, whole) in tried(lib, crafting, put(data, at, form, value), number).items():
                if not isinstance(whole, int):
                    assert ranged == whole, (at, form, value, t)
                elif isinstance(ranged, int):
                    refused += 1
                else:
                    more += 1
                    digest = (64 + t * 64 + 32 <= at < 64 + t * 64 + 64 or pieces_at <= at < boxes_at and
                              (at - pieces_at) % 64 < 32)
                    assert ranged == good[t] or digest, (at, form, value, t)
    assert refused > 100 and more > 10


def test_noise_never_crashes(lib, crafting, scale):
    layout, rows, _ = crafting
    data, rng = chunk_bytes(rows), random.Random(27)
    for i in range(scale(150, 1500)):
        wrong = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(wrong) if rng.random() < 0.5 else 600)
            wrong[at] = rng.choice([0, 1, 255, rng.randrange(256)])
        if rng.random() < 0.2:
            wrong = wrong[:rng.randrange(1, len(wrong))]
        for t, (ranged, whole) in tried(lib, crafting, bytes(wrong), 20000 + i).items():
            assert isinstance(whole, int) or ranged == whole


def test_counts_that_would_be_gigabytes(lib, crafting):
    layout, rows, _ = crafting
    data, number = chunk_bytes(rows), 40000
    for at, form in ((16, "<I"), (20, "<I"), (24, "<Q"), (40, "<Q"), (48, "<Q"), (72, "<I"), (76, "<I"), (80, "<Q")):
        for value in (2**31, 2**32 - 1) + ((2**63, 2**64 - 1, 2**58, 2**60) if form == "<Q" else ()):
            number += 1
            assert isinstance(tried(lib, crafting, put(data, at, form, value), number)[0][0], int)
