# SPDX-License-Identifier: Apache-2.0
"""Layouts and parts: against docs/format written once more in Python, through the builder and the packs, and with
tables that lie."""
import ctypes as c
import errno
import hashlib
import random
import struct
import time

import numpy as np
import pytest

from protolib import (ATTEMPT, DEFAULT, DTYPES, EFORMAT, EVERSION, Buf, Chunk, Error, Layout, P, P_, PackUse, Part,
                      Piece, Proto, Ref, Refused, Row, Shape,
                      StoreLayout, align, blocks, chunk_bytes, chunk_decode, make_box, ptr, read_row, row_digest,
                      structure, table, u32, u64)
from storelib import Api, Store

ENCODED = 0x0201  # lz4 over bit planes of 16-bit words


@pytest.fixture(scope="module")
def lib(build):
    lib = Proto(c.CDLL(str(build / "tests" / "libvckpt_internal.so"))).lib
    lib.store_layout_component.restype = c.c_char_p
    lib.store_layout_name.restype = ptr
    lib.store_layout_bytes.restype = u64
    return lib


def random_layout(rng, n):
    names = {(rng.choice(["model", "optimizer", "a"]),
              "".join(rng.choice("ab./\u00fc") for _ in range(rng.randint(1, 5))).encode()) for _ in range(n)}
    out = []
    for component, name in names:
        shape = rng.choice([(), (0,), (3, 0), (7,), (64, 33), (600, 700), (3, 5, 2), (40000,), (2, 512, 300)])
        out.append((component, name, rng.choice(list(DTYPES)), shape))
    rng.shuffle(out)
    return out


def test_layout_is_a_function_of_the_set(lib):
    rng = random.Random(1)
    for _ in range(30):
        tensors = random_layout(rng, rng.randint(0, 12))
        one = Layout(lib, tensors)
        rng.shuffle(tensors)
        two = Layout(lib, tensors)
        assert one.object == two.object and one.digest == two.digest
        assert [t[:2] for t in one.tensors] == sorted(t[:2] for t in tensors)
        for i, (component, name, dtype, shape) in enumerate(two.tensors):
            assert lib.store_layout_find(two.p, component.encode(), name, c.c_size_t(len(name))) == i
            n = u32()
            assert c.string_at(lib.store_layout_name(two.p, u32(i), c.byref(n)), n.value) == name
            assert (lib.store_layout_component(two.p, u32(i)).decode() == component and
                    lib.store_layout_dtype(two.p, u32(i)) == dtype)
            assert lib.store_layout_bytes(two.p, u32(i)) == DTYPES[dtype] * int(np.prod(shape, dtype=object))
            g = two.grid(i)
            assert tuple(g.shape.dim[:g.shape.ndim]) == shape and g.item_bytes == DTYPES[dtype]
        assert lib.store_layout_find(two.p, b"model", b"zzz", c.c_size_t(3)) == -errno.ENOENT
        assert lib.store_layout_find(two.p, b"none", b"a", c.c_size_t(1)) == -errno.ENOENT
        for number, component in enumerate(sorted({t[0] for t in tensors})):
            first, end = u32(), u32()
            lib.store_layout_component_range(two.p, u32(number), c.byref(first), c.byref(end))
            assert ({t[0] for t in two.tensors[first.value:end.value]} == {component} and
                    sum(t[0] == component for t in tensors) == end.value - first.value)
        one.close()
        two.close()


def test_layout_refuses(lib):
    good = ("model", b"a", 12, (2, 3))
    for bad, code, word in [
        (("model", b"a", 12, (2, 3)), errno.EEXIST, "twice"), (("ranks", b"b", 12, ()), errno.EINVAL, "ranks"),
        (("model", b"", 12, ()), errno.EINVAL, "name"),
        (("model", b"a\0b", 12, ()), errno.EINVAL, "UTF-8"), (("model", b"\xff", 12, ()), errno.EINVAL, "UTF-8"),
        (("model", b"x" * 65536, 12, ()), errno.EINVAL, "65535"),
        (("model", b"b", 0, ()), errno.EINVAL, "dtype"), (("model", b"b", 22, ()), errno.EINVAL, "dtype"),
        (("model", b"b", 12, (2**62,)), errno.EINVAL, "shape"),
        (("model", b"b", 12, (2**40, 2**40, 0)), errno.EINVAL, "shape"),
    ]:
        with pytest.raises(Refused, match=word) as e:
            Layout(lib, [good, bad])
        assert e.value.code == -code


def test_many_names(lib):
    names = [f"layer.{i}.weight".encode() for i in range(100_000)]
    random.Random(2).shuffle(names)
    start = time.time()
    l = Layout(lib, [("model", n, 11, (64, 64)) for n in names])
    print(f"\nlayout of 100,000 tensors: {len(l.object)} bytes, {time.time() - start:.2f} s")
    assert [t[1] for t in l.tensors] == sorted(names)
    l.close()


# ---- who holds what ----

Placement = structure("Placement", kind=c.c_int, dim=u32, split=u64, ends=P(u64), nends=u32)
Placements = structure("Placements", n=u32, at=Placement * 16)
Held = structure("Held", buffer=c.c_bool, mesh=ptr, placements=P(Placement), nplacements=u32)


class HeldLayout:
    """[(component, name, (mesh text, ranks or None, words) or None, buffer)]: a mesh of its own for each tensor unless
    `meshes` is given."""

    def __init__(self, lib, tensors, shape=(64, 64), meshes=None):
        self.lib, self.p, made, words = lib, P(StoreLayout)(), {} if meshes is None else meshes, []
        e, object_, tags, s = Error(), Buf(), P(u32)(), Shape(len(shape), (u64 * 16)(*shape))
        b = ptr(lib.store_layout_builder_new(DEFAULT))
        try:
            for i, (component, name, held, buffer) in enumerate(tensors):
                h = Held(buffer=buffer)
                if held:
                    key = held[:2] if meshes is not None else i
                    if key not in made:
                        made[key] = ptr()
                        ranks = held[1] and (u32 * len(held[1]))(*held[1])
                        assert lib.tensor_mesh_parse(held[0].encode(), ranks, u32(len(held[1] or ())),
                                                     c.byref(made[key]), None) == 0
                    p = P(Placements)()
                    assert lib.tensor_placements_parse(held[2].encode(), c.byref(p), None) == 0
                    words.append(p)
                    h.mesh, h.placements, h.nplacements = made[key], p.contents.at, p.contents.n
                r = lib.store_layout_builder_add_held(b, component, name, c.c_size_t(len(name)), 12, c.byref(s), u32(i),
                                                      c.byref(h), c.byref(e))
                if r < 0:
                    raise Refused(r, e.text.decode())
            r = lib.store_layout_builder_finish(b, c.byref(self.p), c.byref(object_), c.byref(tags), c.byref(e))
            if r < 0:
                raise Refused(r, e.text.decode())
        finally:
            lib.store_layout_builder_free(b)
            for p in words:
                c.CDLL(None).free(p)
            for m in made.values() if meshes is None else []:
                lib.tensor_mesh_free(m)
        self.object = c.string_at(object_.data, object_.len)
        lib.base_buf_release(c.byref(object_))
        c.CDLL(None).free(tags)
        self.m = self.p.contents.m

    def held(self, component, name):
        """(mesh text, ranks, words, buffer) or None, as the library tells it"""
        t, mesh, p, e, text = self.lib.store_layout_find(self.p, component, name,
                                                         c.c_size_t(len(name))), ptr(), P(Placements)(), Error(), Buf()
        r = self.lib.store_layout_mesh(self.p, u32(t), c.byref(mesh), c.byref(e))
        buffer = bool(self.m.tensors[t].flags & 1)
        if r < 0:
            assert r == -errno.ENOENT and self.lib.store_layout_placements(self.p, u32(t), c.byref(p), c.byref(e)) == r
            return None, buffer
        assert self.lib.store_layout_placements(self.p, u32(t), c.byref(p), c.byref(e)) == 0, e.text
        self.lib.tensor_mesh_print(mesh, c.byref(text))
        self.lib.base_buf_append(c.byref(text), b"|", c.c_size_t(1))
        self.lib.tensor_placements_print(p.contents.at, p.contents.n, c.byref(text))
        words = c.string_at(text.data, text.len).decode().split("|")
        row = self.m.tensors[t]
        ranks = [self.lib.tensor_mesh_rank_at(mesh, u32(i)) for i in range(self.m.meshes[row.mesh - 1].nranks)]
        self.lib.base_buf_release(c.byref(text))
        self.lib.tensor_mesh_free(mesh)
        c.CDLL(None).free(p)
        return (words[0], ranks, words[1]), buffer

    def close(self):
        self.lib.store_layout_free(self.p)


MESHES = [("dp=2,tp=2", None), ("dp=2,tp=2", (0, 1, 2, 3)), ("dp=2,tp=2", (4, 5, 6, 7)), ("dp=2,tp=2", (0, 2, 1, 3)),
          ("fsdp=4", None), ("dp=4,tp=1", None),
          ("pp=2,dp=2,tp=2", None), ("tp=2,dp=2", None)]
WORDS = ["R", "S(0)", "S(1)", "SS(0,2)", "SS(0,4)", "IS(0,2)", "RS(0;1,3)", "RS(0;3,1)", "RS(0,1;1,3)", "RS(0;1,3,0)"]


def random_held(rng):
    if rng.random() < 0.2:
        return None
    mesh = rng.choice(MESHES)
    return mesh + (",".join(rng.choice(WORDS) for _ in mesh[0].split(",")),)


def test_who_holds_what_is_a_function_of_the_set(lib):
    lib.tensor_mesh_rank_at.restype = u32
    rng = random.Random(4)
    for _ in range(40):
        tensors = [(rng.choice([b"model", b"optimizer"]), b"t%d" % i, random_held(rng), rng.random() < 0.2)
                   for i in range(rng.randint(1, 60))]
        one = HeldLayout(lib, tensors)
        rng.shuffle(tensors)
        shared = {}
        # equal meshes by one pointer, where the first had one for each tensor
        two = HeldLayout(lib, tensors, meshes=shared)
        assert one.object == two.object
        for component, name, held, buffer in tensors:
            count = int(np.prod([int(w.split("=")[1]) for w in held[0].split(",")])) if held else 0
            assert two.held(component, name) == (held and (held[0], list(held[1] or range(count)), held[2]), buffer)
        meshes = [(m.ndims, [m.dim_sizes[d] for d in range(m.ndims)], [m.dim_names[d] for d in range(m.ndims)],
                   m.ranks[:m.nranks])
                  for m in (two.m.meshes[i] for i in range(two.m.nmeshes))]
        words = [two.m.placements[i] for i in range(two.m.nplacements)]
        assert meshes == sorted(meshes) and words == sorted(set(words))  # in the order that docs/format/layout.md says
        assert len({repr(m) for m in meshes}) == len(meshes) == len({canonical(t[2]) for t in tensors if t[2]})
        used = [two.m.tensors[i] for i in range(len(tensors))]
        assert ({t.mesh for t in used} - {0} == set(range(1, len(meshes) + 1)) and
                {t.placement for t in used} - {0} == set(range(1, len(words) + 1)))
        one.close()
        two.close()
        for m in shared.values():
            lib.tensor_mesh_free(m)


def canonical(held):
    count = int(np.prod([int(w.split("=")[1]) for w in held[0].split(",")]))
    return held[0], tuple(held[1] or range(count))


def test_who_holds_what_is_refused(lib):
    for held, word in [(("dp=2,tp=2", None, "R"), "1 placement for a mesh of 2"), (("dp=2", None, "P"), "partial")]:
        with pytest.raises(Refused, match=word) as e:
            HeldLayout(lib, [(b"model", b"a", None, False), (b"model", b"w", held, False)])
        assert e.value.code == -errno.EINVAL and '"w"' in str(e.value)
    with pytest.raises(Refused, match="4096 meshes") as e:
        HeldLayout(lib, [(b"model", b"t%d" % i, ("dp=1", (i,), "R"), False) for i in range(4097)])
    assert e.value.code == -errno.E2BIG


def test_many_tensors_of_few_meshes(lib):
    """8,192 ranks, three meshes, 1,000 tensors: a hundred kilobytes, and no time."""
    ranks = tuple(range(8192))
    three = [("dp=64,tp=128", ranks), ("dp=64,tp=128", ranks[::-1]), ("pp=8,dp=8,tp=128", ranks)]
    tensors = [(b"model", b"layer.%d.weight" % i, three[i % 3] + (("R,S(0)", "S(0),S(1)", "R,R,S(0)")[i % 3],), False)
               for i in range(1000)]
    shared = {}
    HeldLayout(lib, tensors[:3], meshes=shared).close()
    start = time.process_time()
    l = HeldLayout(lib, tensors, meshes=shared)
    took = time.process_time() - start
    print(f"\nlayout of 1,000 tensors over 8,192 ranks: {len(l.object)} bytes, {took * 1e3:.1f} ms")
    assert l.m.nmeshes == 3 and 3 * 32768 < len(l.object) < 3 * 32768 + 100 * 1000
    assert took < 0.5  # a comparison of 8,192 ranks for each would add seconds
    l.close()
    for m in shared.values():
        lib.tensor_mesh_free(m)


# ---- rows ----

def random_boxes(rng, shape):
    if not shape or 0 in shape or rng.random() < 0.5:
        return None
    boxes = []
    for _ in range(rng.randint(1, 3)):
        box = []
        for n in shape:
            size = rng.randint(1, n)
            box.append((rng.randint(0, n - size), size))
        boxes.append(box)
    return None if boxes == [[(0, n) for n in shape]] else boxes


def random_pieces(rng, lengths, npacks):
    """Places of a writer: mostly one after another in a run, sometimes somewhere else."""
    out, at = [], None
    for raw in lengths:
        if raw <= 64:
            out.append(P_(raw, rng.randbytes(raw), rng.getrandbits(60)))
            continue
        codec = rng.choice([0, ENCODED])
        stored = raw if codec == 0 else rng.randint(blocks(raw), raw - 1)
        if at is None or rng.random() < 0.3:
            at = [rng.randrange(npacks), 4096 * rng.randint(1, 1 << 30), 0]
            at[2] = at[1] + (1 << 30)
        at[1] = align(at[1], 4096 if codec == 0 and stored >= 65536 else 64)
        out.append(P_(raw, tuple(at), rng.getrandbits(60), stored, codec))
        at = [at[0], at[1] + stored, at[2] + blocks(raw) * (12 if codec else 8)]
    return out


def random_rows(rng, layout, npacks):
    rows = []
    for t, (_, _, _, shape) in enumerate(layout.tensors):
        if rng.random() < 0.85:
            boxes = random_boxes(rng, shape)
            rows.append((t, boxes, random_pieces(rng, layout.piece_bytes(t, boxes), npacks)))
    return rows


def plain(row):
    return row[0], row[1], [(p.digest, p.xxh, p.place, p.raw, p.stored, p.codec) for p in row[2]], row_digest(row[2])


def test_chunks_come_back(lib, scale):
    rng = random.Random(3)
    for _ in range(scale(60, 400)):
        layout = Layout(lib, random_layout(rng, rng.randint(1, 10)))
        rows = random_rows(rng, layout, 3)
        if rows:
            assert chunk_decode(lib, layout, chunk_bytes(rows), 3) == [plain(r) for r in rows]
        layout.close()


class Written:
    """A part written by the library into a pack of a store of its own."""

    def __init__(self, lib, path, layout, rows, npacks=3):
        self.lib, self.layout = lib, layout
        self.api = Api(lib, path)
        self.s = c.cast(self.api.p, P(Store)).contents
        name = ATTEMPT + b"-0-meta"
        w = ptr()
        assert lib.pack_writer_open(ptr(self.s.storage), self.s.info.id, name, c.byref(w)) == 0
        b, e = ptr(lib.store_part_builder_new(layout.p, w, u32(npacks))), Error()
        try:
            for tensor, boxes, pieces in rows:
                array = (Piece * max(len(pieces), 1))(*[p.struct() for p in pieces])
                box_array = table(type(make_box([])), [make_box(x) for x in boxes]) if boxes else None
                r = lib.store_part_add_row(b, u32(tensor), box_array, u32(len(boxes or [])), array, u64(len(pieces)),
                                           c.byref(e))
                if r < 0:
                    raise Refused(r, e.text.decode())
            self.names = [b"00000000000000aa-0-0-p%d" % i for i in range(npacks)] + [name]
            self.part = Part(rank=0, world=1, host=b"h", layout=layout.p.contents.digest, npacks=npacks + 1,
                             packs=table(PackUse, [PackUse(n, 2**46 if n != name else 0, 0) for n in self.names]))
            self.ref = Ref()
            r = lib.store_part_finish(b, c.byref(self.part), c.byref(self.ref), c.byref(e))
            assert r == 0, e.text
            self.chunks = [Chunk.from_buffer_copy(self.part.chunks[i]) for i in range(self.part.nchunks)]
        except Refused:
            lib.pack_abandon(w)
            self.api.close()
            raise
        finally:
            lib.store_part_builder_free(b)
        assert lib.pack_seal(w, None) == 0
        self.part.chunks = table(Chunk, self.chunks)
        self.pack = next((self.api.path / "packs").glob("*/*.pack")).read_bytes()
        self.array = table(c.c_char_p, self.names)

    def chunk(self, i):
        """The object's bytes: chunks are encoded where that gains."""
        ref, pack, e, out = self.chunks[i].ref, ptr(), Error(), ptr()
        name = self.names[ref.pack]
        assert self.lib.pack_open(ptr(self.s.storage), self.s.info.id, name, u64(0), c.byref(pack),
                                        c.byref(e)) == 0, e.text
        assert self.lib.pack_object_load(pack,
                                          c.byref(Ref(ref.digest, ref.offset, ref.checks, ref.raw_len, ref.stored_len,
                                                      ref.codec, ref.kind, ref.pack)), u64(1 << 30), c.byref(out),
                                          c.byref(e)) == 0, e.text
        self.lib.pack_close(pack)
        return c.string_at(out, ref.raw_len)

    def row(self, tensor):
        row, e = Row(), Error()
        r = self.lib.store_part_read_row_cached(None, self.api.p, self.layout.p, c.byref(self.part), self.array,
                                                u32(len(self.names)), u32(tensor), c.byref(row), c.byref(e))
        if r < 0:
            raise Refused(r, e.text.decode())
        out = read_row(self.layout, row)
        self.lib.store_row_release(c.byref(row))
        return out

    def rows(self):
        out, e = [], Error()
        callback = c.CFUNCTYPE(c.c_int, ptr, P(Row))(lambda _, row: out.append(read_row(self.layout, row.contents)) or
                                                     0)
        for i in range(len(self.chunks)):
            r = self.lib.store_part_read_chunk(self.api.p, self.layout.p, c.byref(self.part), self.array,
                                               u32(len(self.names)), u32(i), callback, None, c.byref(e))
            if r < 0:
                raise Refused(r, e.text.decode())
        return out


def test_builder_writes_what_the_page_says(lib, tmp_path, scale):
    rng = random.Random(4)
    for n in range(scale(6, 30)):
        layout = Layout(lib, random_layout(rng, rng.randint(1, 12)))
        rows = random_rows(rng, layout, 3)
        w = Written(lib, tmp_path / str(n), layout, rows)
        assert b"".join(w.chunk(i) for i in range(len(w.chunks))) == (chunk_bytes(rows) if rows else b"")
        assert w.rows() == [plain(r) for r in rows]
        for r in rows:
            assert w.row(r[0]) == plain(r)
        for t in set(range(len(layout.tensors))) - {r[0] for r in rows}:
            with pytest.raises(Refused, match="ENODATA"):
                w.row(t)
        w.api.close()
        layout.close()


def test_chunks_are_cut(lib, tmp_path):
    """Several chunks: each tensor's row is in the one whose range holds it; a chunk is no longer than a row or the
    target."""
    rng = random.Random(5)
    layout = Layout(lib, [("model", b"%04d" % i, 11, (2048, 2048)) for i in range(400)])
    rows = [(t, None, random_pieces(rng, layout.piece_bytes(t, None), 3)) for t in range(0, 400, 2)]
    w = Written(lib, tmp_path / "s", layout, rows)
    assert len(w.chunks) > 3 and all(len(w.chunk(i)) < (256 << 10) + (64 << 10) for i in range(len(w.chunks)))
    assert w.rows() == [plain(r) for r in rows]
    for t in (0, 2, 200, 398):
        assert w.row(t) == plain(rows[t // 2])
    for t in (1, 399):
        with pytest.raises(Refused, match="ENODATA"):
            w.row(t)
    w.part.layout.bytes[0] ^= 1
    with pytest.raises(Refused, match="another layout"):
        w.row(0)
    w.part.layout.bytes[0] ^= 1
    w.part.chunks[0].nrows -= 1
    with pytest.raises(Refused, match="not those"):
        w.row(0)
    w.api.close()
    layout.close()


def test_builder_refuses(lib, tmp_path):
    layout = Layout(lib, [("model", b"a", 12, (600, 700)), ("model", b"b", 12, (4,))])
    lengths = layout.piece_bytes(0, None)
    good = [P_(n, (0, 4096 * 1024 * (i + 1), 1 << 40), i) for i, n in enumerate(lengths)]
    small = P_(16, b"x" * 16, 1)
    bad = [
        [(0, None, good[:-1])], [(0, None, good + good[:1])], [(0, None, [])], [(1, None, [small]), (0, None, good)],
        [(0, None, good), (0, None, good)],
        [(2, None, [small])], [(1, None, [P_(16, (0, 4096, 8192), 1)])], [(1, None, [P_(15, b"x" * 15, 1)])],
        [(0, [[(0, 600), (1, 700)]], good)],
        [(0, [[(0, 0), (0, 700)]], good)], [(0, None, [P_(lengths[0], (0, 4097, 1 << 40), 1)] + good[1:])],
        [(0, None, [P_(lengths[0], (0, 4096, 4096), 1)] + good[1:])],
        [(0, None, [P_(lengths[0], (0, 4096, 1 << 40), 1, codec=ENCODED)] + good[1:])],
        [(0, None, [P_(lengths[0], (0, 2**46, 2**46 + 2**30), 1)] + good[1:])],
    ]
    for n, rows in enumerate(bad):
        with pytest.raises(Refused):
            Written(lib, tmp_path / str(n), layout, rows)
    Written(lib, tmp_path / "good", layout, [(0, None, good), (1, None, [small])]).api.close()
    layout.close()


# ---- tables that lie ----

@pytest.fixture(scope="module")
def sample(lib):
    layout = Layout(lib, [("model", b"a", 12, (600, 700)), ("model", b"b", 12, (4,)), ("model", b"c", 11, (40, 50)),
                          ("model", b"d", 2, ())])
    rng = random.Random(6)
    boxes = [[(0, 10), (0, 50)], [(20, 20), (5, 10)]]
    rows = [(0, None, random_pieces(rng, layout.piece_bytes(0, None), 3)), (1, None, [P_(16, b"0123456789abcdef", 5)]),
            (2, boxes, random_pieces(rng, layout.piece_bytes(2, boxes), 3)), (3, None, [P_(1, b"x", 6)])]
    return layout, rows, chunk_bytes(rows)


def put(data, at, form, value):
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form):]


def test_versions_and_features(lib, sample):
    layout, rows, data = sample
    assert chunk_decode(lib, layout, data, 3) == [plain(r) for r in rows]
    for at, form, value, code in [(8, "<H", 2, EVERSION), (8, "<H", 0, EFORMAT), (12, "<I", 1, EVERSION),
                                  (12, "<I", 1 << 31, EVERSION), (0, "<B", 0, EFORMAT)]:
        with pytest.raises(Refused) as e:
            chunk_decode(lib, layout, put(data, at, form, value), 3)
        assert e.value.code == code


def test_every_field_is_checked(lib, sample):
    """Each field of head, rows, runs, each piece's lengths and codec, each box, the inline bytes: any other value is
    refused, or it says truly something else (XXH3-128 and a place are the writer's word)."""
    layout, rows, data = sample
    nrows, nruns, npieces = struct.unpack_from("<IIQ", data, 16)
    runs_at = 64 + nrows * 64
    pieces_at = runs_at + nruns * 24
    boxes_at = pieces_at + npieces * 64
    fields = [(i, "<I") for i in range(16, 64, 4)] + [(64 + r * 64 + i, "<I") for r in range(nrows)
                                                      for i in range(0, 64, 4)]
    fields += ([(runs_at + r * 24 + 4, "<I") for r in range(nruns)] +
               [(pieces_at + p * 64 + i, f) for p in range(npieces)
                for i, f in ((0, "<I"), (48, "<I"), (52, "<I"), (56, "<H"), (58, "<H"), (60, "<I"))])
    fields += ([(at, "<Q") for at in range(boxes_at, boxes_at + 4 * 2 * 8, 8)] +
               [(at, "<B") for at in range(boxes_at + 64, len(data))])
    accepted = 0
    for at, form in fields:
        size = struct.calcsize(form)
        old = struct.unpack_from(form, data, at)[0]
        for value in {0, 1, old + 1, old - 1, old ^ 0x80, 2**(8 * size) - 1, 2**(8 * size - 1)}:
            value %= 2**(8 * size)
            if value == old:
                continue
            try:
                out = chunk_decode(lib, layout, put(data, at, form, value), 3)
            except Refused as e:
                assert e.code in (EFORMAT, EVERSION)
                continue
            # A stored length may be another one where nothing follows in its run; a box may be another with equal
            # pieces.
            assert out != [plain(r) for r in rows]
            assert boxes_at <= at < boxes_at + 64 or pieces_at <= at < boxes_at and (at - pieces_at) % 64 in (48, 56), (
                (at, form, value))
            accepted += 1
    assert accepted < len(fields)


def test_runs_that_lie(lib, sample):
    layout, rows, data = sample
    nrows, nruns, npieces = struct.unpack_from("<IIQ", data, 16)
    runs_at = 64 + nrows * 64
    for r in range(nruns):
        pack, n, offset, checks = struct.unpack_from("<IIQQ", data, runs_at + r * 24)
        wrong = [(3, n, offset, checks), (pack, 0, offset, checks), (pack, n, 2**64 - 4096, checks),
                 (pack, n, 2**46, 2**46 + 2**30), (pack, n, offset, 2**64 - 1), (pack, n, offset + 1, checks),
                 (pack, n, 0, checks)] if pack < 3 else [(0, n, 4096, 8192), (pack, n, offset + 1, 0),
                                                         (pack, n, offset, 1), (pack, n, 2**64 - 1, 0)]
        for w in wrong:
            if w == (pack, n, offset, checks):
                continue
            with pytest.raises(Refused):
                chunk_decode(lib, layout,
                             data[:runs_at + r * 24] + struct.pack("<IIQQ", *w) + data[runs_at + r * 24 + 24:], 3)


def test_truncated_and_extended(lib, sample):
    layout, rows, data = sample
    for n in list(range(0, 200)) + list(range(200, len(data), 37)):
        with pytest.raises(Refused):
            chunk_decode(lib, layout, data[:n], 3)
    for more in (b"\0", bytes(64)):
        with pytest.raises(Refused):
            chunk_decode(lib, layout, data + more, 3)
    with pytest.raises(Refused):
        chunk_decode(lib, layout, data, 2)
    with pytest.raises(Refused):
        chunk_decode(lib, layout, chunk_bytes([rows[1], rows[0]]), 3)
    with pytest.raises(Refused):
        # the whole tensor as a box
        chunk_decode(lib, layout, chunk_bytes([(0, [[(0, 600), (0, 700)]], rows[0][2])]), 3)
    with pytest.raises(Refused):
        chunk_decode(lib, layout, chunk_bytes([]), 3)


def test_inline_bytes_have_their_digest(lib, sample):
    layout, rows, _ = sample
    p = P_(16, b"0123456789abcdef", 5)
    p.data = p.place = b"0123456789abcdeF"
    with pytest.raises(Refused):
        chunk_decode(lib, layout, chunk_bytes([(1, None, [p])]), 3)


def test_counts_that_would_be_gigabytes(lib, sample):
    layout, _, data = sample
    for at, form in ((16, "<I"), (20, "<I"), (24, "<Q"), (40, "<Q"), (48, "<Q")):
        for value in (2**31, 2**32 - 1) + ((2**63, 2**64 - 1, 2**58, 2**60) if form == "<Q" else ()):
            with pytest.raises(Refused):
                chunk_decode(lib, layout, put(data, at, form, value), 3)


def test_a_million_pieces(lib):
    """One row of a tensor of 1 TiB: what decoding costs (recorded, not judged)."""
    n = 1 << 20
    layout = Layout(lib, [("model", b"a", 2, (n << 20,))])
    pieces = np.zeros((n, 64), np.uint8)
    pieces[:, :8] = np.arange(n, dtype="<u8").view(np.uint8).reshape(n, 8)
    pieces[:, 48:52] = pieces[:, 52:56] = np.frombuffer(struct.pack("<I", 1 << 20), np.uint8)
    pieces[:, 60:] = 255
    d = hashlib.sha256(b"\2" + struct.pack("<Q", n) + np.ascontiguousarray(pieces[:, :32]).tobytes()).digest()
    data = (b"VCKPTCHK" + struct.pack("<HHIIIQIIQQQ", 1, 0, 0, 1, 1, n, 0, 0, 0, 0, 0) +
            struct.pack("<IIIIQII", 0, 1, 0, 1, n, 0, 0) + d
            + struct.pack("<IIQQ", 0, n, 4096, 1 << 41) + pieces.tobytes())
    ch, e = ptr(), Error()
    start = time.time()
    assert lib.store_chunk_decode(data, c.c_size_t(len(data)), layout.p, u32(1), c.byref(ch), c.byref(e)) == 0, e.text
    middle = time.time()
    row = Row()
    assert lib.store_chunk_row(ch, u32(0), c.byref(row)) == 0
    print(f"\n1,048,576 pieces: checked in {middle - start:.3f} s, handed out in {time.time() - middle:.3f} s, "
          f"{len(data)} bytes")
    assert (row.npieces == n and row.pieces[n - 1].ref.offset == 4096 + (n - 1 << 20) and
            row.pieces[n - 1].ref.checks == (1 << 41) + (n - 1) * 512)
    lib.store_row_release(c.byref(row))
    lib.store_chunk_free(ch)
    layout.close()
