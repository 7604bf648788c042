# SPDX-License-Identifier: Apache-2.0
"""A tensor that several writers hold in boxes reads as one: any sharding, any range, through the library, the commands
and the mount; and boxes that do not add up to the tensor are refused by name, never filled up."""
import ctypes as c
import errno
import json
import os
import random
import resource
import subprocess
import time

import numpy as np
import pytest

import tensorlib as tl
from protolib import (CHUNK, EFORMAT, HEADER, LAYOUT, PART, Announcement, Buf, Chunk, Error, Layout, P, P_, PackUse,
                      Params, Part, Piece, PieceIter,
                      Proto, ProtoRef, Ref, ViewHeader, chunk_bytes, make_box, manifest_make, ptr, table, tree, u8, u32,
                      u64)
from storelib import COMMIT, Api, Store as StoreStruct
from test_save_load import Failed, Store, api  # noqa: F401 (api is a fixture)

ATTEMPT = b"0123456789abcdef-1"
PIECE = 1
DAMAGED = -errno.EBADMSG
KINDS = {"u1": (2, "U8"), "u2": (3, "U16"), "f4": (12, "F32"), "i8": (9, "I64")}
SMALL = Params(256, 1024, 64)


@pytest.fixture(scope="module")
def proto(lib):
    return Proto(lib)


@pytest.fixture(scope="module")
def shapes(lib):
    return tl.load(c.CDLL(lib._name))


class T:
    """A tensor, and which boxes each rank stores of it: {rank: None (all of it) or [[(offset, size), ...], ...]}.
    recorded: (mesh, placements), in words, if the layout says who holds it."""
    component = "model"

    def __init__(self, name, kind, shape, held, seed=0, recorded=()):
        items = int(np.prod(shape, dtype=int))
        self.array = np.frombuffer(np.random.default_rng(seed).bytes(items * np.dtype(kind).itemsize),
                                   kind).reshape(shape)
        self.name, self.kind, self.shape, self.held, self.recorded = name, kind, tuple(shape), held, recorded

    @property
    def bytes(self):
        return self.array.tobytes()


def whole(shape):
    return [(0, n) for n in shape]


def ref(r, pack):
    return ProtoRef(digest=r.digest, offset=r.offset, checks=r.checks, raw_len=r.raw_len, stored_len=r.stored_len,
                    pack=pack, codec=r.codec, kind=r.kind)


class Step:
    """Saves a step of several ranks with the store's own functions, one rank after another."""

    def __init__(self, proto, path, tensors, world, params=SMALL, stages=None, step=1, attempt=ATTEMPT, forge=None,
                 header=False):
        """stages: [(ranks, tensors)], one layout each; by default one of all. forge(rank, rows, layout): a chunk's
        bytes, or None for an honest one."""
        self.lib, self.proto, self.attempt, self.step = proto.lib, proto, attempt, step
        self.api = Api(proto.lib, path, init=not (path / "vckpt.store").exists())
        self.s, self.world, self.forge = c.cast(self.api.p, P(StoreStruct)).contents, world, forge
        self.announcements = []
        try:
            for ranks, some in stages or [(range(world), tensors)]:
                p = params[min(ranks)] if isinstance(params, dict) else params
                layout = Layout(self.lib, [(t.component, t.name.encode(), KINDS[t.kind][0], t.shape, *t.recorded)
                                           for t in some], p)
                ordered = [some[i] for i in layout.order]
                for rank in ranks:
                    self.rank(rank, layout, ordered, rank == min(ranks), header)
                layout.close()
            self.announcements.sort(key=lambda a: a.rank)
            self.commit(tensors)
        finally:
            self.api.close()

    def writer(self, rank, kind):
        w, name = ptr(), self.attempt + b"-%d-%s" % (rank, kind)
        assert self.lib.pack_writer_open(ptr(self.s.storage), self.s.info.id, name, c.byref(w)) == 0
        return name, w

    def append(self, w, kind, data, r):
        assert self.lib.pack_append_raw(w, kind, data, u64(len(data)), c.byref(r)) == 0

    def cut(self, grid, array, pairs):
        """The stored bytes of the pieces of a box."""
        it, out, box, n = PieceIter(), [], make_box(pairs), array.ndim
        zero, stride = (u64 * 16)(), (u64 * 16)(*array.strides)
        self.lib.tensor_piece_first(c.byref(it), c.byref(grid), c.byref(box))
        while not it.done:
            data = c.create_string_buffer(int(np.prod(it.piece.size[:n], dtype=int)) * array.itemsize)
            if len(data):
                self.lib.tensor_piece_gather(c.byref(grid), c.byref(it.piece), None, data, ptr(array.ctypes.data), zero,
                                             stride)
            out.append(data.raw)
            self.lib.tensor_piece_next(c.byref(it))
        return out

    def piece(self, data, r):
        p = P_(len(data), data if len(data) <= 64 else (0, r.offset, r.checks), 1)
        p.digest, x = tree(data), (u8 * 16)()
        self.lib.base_xxh128_of(u64(self.s.info.seed), data, c.c_size_t(len(data)), x)
        p.xxh = bytes(x)
        return p

    def rows(self, rank, layout, tensors):
        """Writes the pack of pieces; [(tensor, boxes or None, pieces)]."""
        name, w = self.writer(rank, b"model")
        rows, size = [], u64()
        for i, t in enumerate(tensors):
            if rank in t.held:
                boxes = t.held[rank]
                datas = [d for box in boxes or [whole(t.shape)] for d in self.cut(layout.grid(i), t.array, box)]
                refs = [Ref() for _ in datas]
                for d, r in zip(datas, refs):
                    if len(d) > 64:
                        self.append(w, PIECE, d, r)
                rows.append((i, boxes, datas, refs))
        assert self.lib.pack_seal(w, c.byref(size)) == 0
        self.live, self.raw = (sum(len(d) for _, _, datas, _ in rows for d in datas if len(d) > least)
                               for least in (64, 0))
        return name, size.value, [(i, boxes, [self.piece(d, r) for d, r in zip(datas, refs)])
                                  for i, boxes, datas, refs in rows]

    def honest(self, w, layout, rows, part, part_ref):
        e, b = Error(), ptr(self.lib.store_part_builder_new(layout.p, w, u32(1)))
        for tensor, boxes, pieces in rows:
            array = (Piece * len(pieces))(*[p.struct() for p in pieces])
            r = self.lib.store_part_add_row(b, u32(tensor), table(type(make_box([])), [make_box(x) for x in boxes])
                                            if boxes else None, u32(len(boxes or [])),
                                            array, u64(len(pieces)), c.byref(e))
            assert r == 0, e.text
        assert self.lib.store_part_finish(b, c.byref(part), c.byref(part_ref), c.byref(e)) == 0, e.text
        assert self.lib.pack_extent_end(w) == 0
        self.lib.store_part_builder_free(b)

    def forged(self, w, rows, chunk, part, part_ref):
        r = Ref()
        self.append(w, CHUNK, chunk, r)
        assert self.lib.pack_extent_end(w) == 0
        part.chunks, part.nchunks = table(Chunk, [Chunk(rows[0][0], rows[-1][0], len(rows), ref(r, 1))]), 1
        self.append(w, PART, self.proto.encode("part", part), part_ref)

    def rank(self, rank, layout, tensors, first, header):
        model, model_size, rows = self.rows(rank, layout, tensors)
        meta, w = self.writer(rank, b"meta")
        layout_ref, header_ref, part_ref, size = Ref(), Ref(), Ref(), u64()
        if first:
            self.append(w, LAYOUT, layout.object, layout_ref)
        if first and header:
            text, data_bytes = self.header(tensors)
            self.append(w, HEADER, text, header_ref)
        part = Part(rank=rank, world=self.world, host=b"h", layout=layout.p.contents.digest, npacks=2,
                    packs=table(PackUse, [PackUse(model, model_size, self.live), PackUse(meta, 0, 0)]))
        chunk = self.forge(rank, rows, layout) if self.forge else None
        if chunk:
            self.forged(w, rows, chunk, part, part_ref)
        else:
            self.honest(w, layout, rows, part, part_ref)
        assert self.lib.pack_seal(w, c.byref(size)) == 0
        a = Announcement(run=b"r", attempt=self.attempt, step=self.step, rank=rank, world=self.world, host=b"h",
                         layout=part.layout, stores_layout=first,
                         part=ref(part_ref, 1), npacks=2,
                         packs=table(PackUse, [PackUse(model, model_size, self.live), PackUse(meta, size, size)]),
                         tensors=len(tensors),
                         bytes=self.raw, new_bytes=model_size + size.value)
        if first:
            a.layout_ref = ref(layout_ref, 1)
        if first and header:
            a.headers, a.nheaders = table(ViewHeader,
                                          [ViewHeader(b"model", b"safetensors", ref(header_ref, 1), data_bytes)]), 1
        self.announcements.append(a)

    def header(self, tensors):
        head, at = {}, 0
        for t in tensors:
            head[t.name] = {"dtype": KINDS[t.kind][1], "shape": list(t.shape),
                            "data_offsets": [at, at + t.array.nbytes]}
            at += t.array.nbytes
        text = json.dumps(head).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        return len(text).to_bytes(8, "little") + text, at

    def commit(self, tensors):
        code, body, digest = manifest_make(self.lib, self.announcements)
        assert code == 0, body
        b = Buf(c.cast(c.create_string_buffer(body, len(body)), ptr), len(body), len(body), 0)
        self.api.call(self.lib.store_manifest_put, self.api.p, b"r", c.byref(b), digest)
        entry = self.api.entry(COMMIT, step=self.step, attempt=self.attempt, replaces=2**64 - 1, tensors=len(tensors),
                               bytes=sum(a.bytes for a in self.announcements),
                               new_bytes=sum(a.new_bytes for a in self.announcements))
        c.memmove(entry.commit.manifest.bytes, digest, 32)
        with self.api.list("r") as entries:
            entries.put(entry)


@pytest.fixture
def cache(api):  # noqa: F811
    made = c.c_void_p(api.load_cache_new(64 << 20))
    yield made
    api.load_cache_free(made)


@pytest.fixture
def opened(api, tmp_path):  # noqa: F811
    """Opens a step that stands in tmp_path/s."""
    made = []

    def open_step(step=1):
        store = Store(api, tmp_path / "s")
        s = store.open("r", step)
        made.extend([s, store])
        return s
    yield open_step
    for m in made:
        m.close()


def check(step, tensors, cache, rng, ranges=12):
    assert {name for _, name in step.tensors()} == {t.name for t in tensors}
    for t in tensors:
        o, want = step.tensor("model", t.name), t.bytes
        assert o.bytes == len(want)
        try:
            assert sum(p.raw_len for p in o.pieces()) == len(want)
            assert o.read(cache) == want, (t.name, t.shape, t.held)
            for _ in range(ranges if want else 0):
                a = rng.randrange(len(want))
                n = rng.choice([1, rng.randint(1, 9), rng.randint(1, len(want)), len(want)])
                assert o.read(cache, a, min(n, len(want) - a)) == want[a:a + n], (t.name, t.shape, t.held, a, n)
            for _ in range(ranges // 2 if want else 0):
                check_box(o, t, cache, rng)
        finally:
            o.close()


def check_box(o, t, cache, rng):
    """A box, into an array that has other items between those of the box: these stay."""
    box = []
    for n in t.shape:
        a = rng.randrange(n)
        box.append((a, rng.choice([n - a, rng.randint(1, n - a), 1])))
    room = np.full([2 * n for _, n in box], 0x5b, t.array.dtype)
    want = room.copy()
    want[tuple(slice(None, None, 2) for _ in box)] = t.array[tuple(slice(a, a + n) for a, n in box)]
    o.read_box(cache, box, room[(*[slice(None, None, 2) for _ in box], ...)])
    assert room.tobytes() == want.tobytes(), (t.name, t.shape, t.held, box)


# ---- shardings ----

def random_words(rng, shape, mesh):
    words = []
    for size in mesh:
        d = rng.randrange(max(len(shape), 1))
        n = shape[d] if shape else 0
        even = [k for k in (1, 2, 3) if n and n % k == 0 and n // k % size == 0]
        choices = ["R"] + ([f"S({d})", f"S({d})", f"SS({d},2)"] if shape
                           else []) + ([f"IS({d},{rng.choice(even)})"] * 2 if even else [])
        words.append(rng.choice(choices))
    if shape and rng.random() < 0.25:
        i = rng.randrange(len(mesh))
        units = [rng.randint(0, 3) for _ in range(mesh[i])]
        units[0] += 1
        d = rng.randint(1, len(shape))
        words[i] = f"RS({','.join(map(str, range(d)))};{','.join(map(str, units))})"
    return ",".join(words)


def tidy(shape, held, rng):
    """{rank: what a row may say}: no empty boxes, all of it as None; and of replicas a few leave theirs out."""
    out, seen = {}, set()
    for rank, boxes in held.items():
        boxes = [b for b in boxes if all(n for _, n in b)]
        if seen and boxes and all(tuple(b) in seen for b in boxes) and rng.random() < 0.3:
            continue
        seen |= {tuple(b) for b in boxes}
        if boxes:
            rng.shuffle(boxes)
            out[rank] = None if boxes == [whole(shape)] else boxes
    if not out:
        out = {0: None} if rng.random() < 0.5 else {}  # an empty tensor
    return out


def sharded(lib, rng, shape, mesh):
    """Boxes by placement words, or flat ranges of all items."""
    world = int(np.prod(mesh))
    dims = [(f"d{i}", n) for i, n in enumerate(mesh)]
    m = tl.OwnedMesh(lib, dims)
    for _ in range(20):
        try:
            if rng.random() < 0.2 and int(np.prod(shape, dtype=int)):
                s = tl.OwnedSharding(lib, shape, m, ",".join("R" for _ in mesh))
                items = int(np.prod(shape, dtype=int))
                cuts = sorted(rng.randint(0, items) for _ in range(world - 1))
                shards = [s.shard(r, flat=ab) for r, ab in enumerate(zip([0, *cuts], [*cuts, items]))]
            else:
                s = tl.OwnedSharding(lib, shape, m, random_words(rng, shape, mesh))
                shards = [s.shard(r) for r in range(world)]
        except tl.Failed:
            continue
        held = {r: [list(zip(o, n)) for o, n, *_ in tl.shard_boxes(lib, x)] for r, x in enumerate(shards)}
        return tidy(shape, held, rng)
    return {0: None}


def random_shape(rng):
    if rng.random() < 0.15:
        return rng.choice([(), (0,), (3, 0), (1,), (1, 1, 1)])
    n = rng.randint(1, 4)
    return tuple(rng.choice([1, 2, 3, 4, 6, 8, 12, 24, rng.randint(1, [3000, 90, 24, 12][n - 1]),
                             [4096, 96, 24, 12][n - 1]]) for _ in range(n))


def random_tensors(lib, rng, n, mesh):
    shapes_ = [random_shape(rng) for _ in range(n)]
    return [T(f"t{i}", rng.choice(list(KINDS)), s, sharded(lib, rng, s, mesh), i) for i, s in enumerate(shapes_)]


@pytest.mark.parametrize("seed", range(6))
def test_any_sharding_any_range(proto, shapes, opened, tmp_path, cache, seed, scale):
    rng = random.Random(seed)
    mesh = [(2,), (2, 2), (3, 2), (2, 2, 2), (5,), (4, 2)][seed]
    tensors = random_tensors(shapes, rng, scale(40, 500), mesh)
    params = rng.choice([SMALL, Params(64, 256, 16), Params(512, 4096, 128), Params(256, 1024, 64, 48),
                         Params(512, 4096, 8, 64)])
    Step(proto, tmp_path / "s", tensors, int(np.prod(mesh)), params)
    assert any(b and len(b) > 1 for t in tensors for b in t.held.values())
    check(opened(), tensors, cache, rng)


def test_a_box_that_is_not_inside(proto, opened, tmp_path, cache):
    t = T("t", "f4", (60, 60), {0: None})
    Step(proto, tmp_path / "s", [t], 1)
    o = opened().tensor("model", "t")
    try:
        for box in ([(0, 61), (0, 1)], [(60, 1), (0, 1)], [(2**64 - 1, 2), (0, 1)]):
            with pytest.raises(Failed, match="not inside") as e:
                o.read_box(cache, box, np.zeros((1, 1), "f4"))
            assert e.value.code == -errno.EINVAL
        o.read_box(cache, [(5, 0), (0, 60)], np.zeros((0, 60), "f4"))
    finally:
        o.close()


def test_boxes_that_no_mesh_makes(proto, opened, tmp_path, cache):
    """Five boxes that no line parts; one box a writer twice; and thin ones beside thick ones."""
    rng = random.Random(3)
    pinwheel = [[(0, 40), (0, 20)], [(0, 20), (20, 40)], [(20, 40), (40, 20)], [(40, 20), (0, 40)],
                [(20, 20), (20, 20)]]
    thin = [[(0, 60), (0, 1)], [(0, 1), (1, 599)], [(1, 59), (1, 599)]]
    tensors = [T("pin", "f4", (60, 60), {0: pinwheel[:2], 1: pinwheel[2:] + pinwheel[:1]}),
               T("twice", "u2", (60, 60), {1: [whole((60, 60))] * 2, 2: [whole((60, 60))] * 2}),
               T("thin", "u1", (60, 600), {2: thin[:1], 0: thin[1:]})]
    Step(proto, tmp_path / "s", tensors, 3)
    check(opened(), tensors, cache, rng, 100)


def test_long_runs_and_long_pieces(proto, opened, tmp_path, cache):
    """Fragments that are handed out where they lie in the cache, and pieces of several segments."""
    rng = random.Random(4)
    flat = [[(0, 1_000_003)], [(1_000_003, 2_000_000)], [(3_000_003, 1_194_301)]]
    rows = [[(0, 300), (0, 4100)], [(300, 212), (0, 4100)]]
    tensors = [T("flat", "u1", (4_194_304,), {r: [b] for r, b in enumerate(flat)}),
               T("rows", "u2", (512, 4100), {r: [b] for r, b in enumerate(rows)})]
    Step(proto, tmp_path / "s", tensors, 3, Params(1 << 20, 4 << 20, 512))
    check(opened(), tensors, cache, rng, 40)


def test_a_cache_that_is_too_small(api, proto, shapes, opened, tmp_path):  # noqa: F811
    rng = random.Random(5)
    tensors = random_tensors(shapes, rng, 20, (2, 2))
    Step(proto, tmp_path / "s", tensors, 4)
    small = c.c_void_p(api.load_cache_new(8192))
    check(opened(), tensors, small, rng)
    api.load_cache_free(small)


# ---- layouts of pipeline stages ----

def test_stages_have_layouts_of_their_own(proto, shapes, opened, tmp_path, cache):
    """Two stages and a tensor that both have: from both, or from the one that wrote it, whichever layout stands
    first."""
    rng = random.Random(6)
    halves = [[(0, 30), (0, 50)], [(30, 30), (0, 50)]]
    a = [T(f"a{i}", "f4", s, sharded(shapes, rng, s, (2,))) for i, s in enumerate([(60, 50), (7, 9, 11), ()])]
    b = [T(f"b{i}", "u2", s, {r + 2: x for r, x in sharded(shapes, rng, s, (2,)).items()})
         for i, s in enumerate([(64, 64), (300,)])]
    tied = [T("tied0", "f4", (60, 50), {0: halves[:1], 3: halves[1:]}),
            T("tied1", "f4", (60, 50), {2: halves[:1], 3: halves[1:]}),
            T("tied2", "f4", (60, 50), {0: halves[:1], 1: halves[1:], 2: halves[:1], 3: halves[1:]}),
            T("tied3", "f4", (60, 50), {1: None, 2: None}),
            T("tied4", "f4", (60, 50), {3: None})]
    Step(proto, tmp_path / "s", a + b + tied, 4, stages=[([0, 1], a + tied), ([2, 3], tied + b)])
    check(opened(), a + b + tied, cache, rng)


@pytest.mark.parametrize("other", [Params(512, 1024, 64), Params(256, 1024, 64, 256)], ids=["M", "S"])
def test_stages_that_cut_differently_are_refused(proto, opened, tmp_path, other):
    t = [T("w", "f4", (60, 50), {0: [[(0, 30), (0, 50)]], 1: [[(30, 30), (0, 50)]]})]
    Step(proto, tmp_path / "s", t, 2, {0: SMALL, 1: other}, stages=[([0], t), ([1], t)])
    with pytest.raises(Failed, match="two layouts disagree about tensor w") as e:
        opened()
    assert e.value.code == EFORMAT


# ---- identity ----

def test_what_is_cut_like_the_whole_is_the_whole(proto, opened, tmp_path, cache):
    """Same digest and pieces as a single writer's; other cuts have digests of their own, which tell the boxes."""
    shape, lines = (128, 64), {"rows": [[(0, 64), (0, 64)], [(64, 64), (0, 64)]],
                               "columns": [[(0, 128), (0, 32)], [(0, 128), (32, 32)]],
                               "uneven": [[(0, 61), (0, 64)], [(61, 67), (0, 64)]]}
    tensors = [T("whole", "f4", shape, {1: None}, 9)] + [T(n, "f4", shape, {0: b[1:], 1: b[:1]}, 9)
                                                         for n, b in lines.items()]
    plain = T("p", "u1", (2, 128), {0: [[(0, 1), (0, 128)]], 1: [[(1, 1), (0, 128)]]})
    square = np.frombuffer(plain.bytes, "u1").reshape(2, 128)
    other = T("q", "u1", (2, 128), {0: [[(0, 2), (0, 64)]], 1: [[(0, 2), (64, 64)]]})
    other.array = np.ascontiguousarray(np.hstack([square[0].reshape(2, 64), square[1].reshape(2, 64)]))
    Step(proto, tmp_path / "s", tensors + [plain, other], 2)
    s, found = opened(), {}
    for t in tensors + [plain, other]:
        o = s.tensor("model", t.name)
        found[t.name] = o.digest(), [bytes(p.digest) for p in o.pieces()]
        assert o.read(cache) == t.bytes
        o.close()
    assert found["whole"] == found["rows"] == found["columns"] and len(found["whole"][1]) > 4
    assert found["uneven"][0] != found["whole"][0]
    assert sorted(found["p"][1]) == sorted(found["q"][1]) and found["p"][0] != found["q"][0]


def test_an_empty_tensor_needs_no_row(proto, opened, tmp_path, cache):
    tensors = [T("none", "f4", (3, 0), {}), T("row", "f4", (3, 0), {1: None}), T("x", "u1", (5,), {0: None})]
    Step(proto, tmp_path / "s", tensors, 2)
    s = opened()
    check(s, tensors, cache, random.Random(1))
    digests = [s.tensor("model", n).digest() for n in ("none", "row")]
    assert digests[0] == digests[1]


# ---- what is not read ----

def spoil(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def pack(store, rank, kind):
    return next((store / "packs").glob(f"*/{ATTEMPT.decode()}-{rank}-{kind}.pack"))


def test_only_parts_that_may_have_it_are_read(proto, opened, tmp_path, cache):
    """Rank 2 and 3 have nothing of `a`: their rows may rot. A replica's row, too: rank 1 is asked for `b` before it."""
    halves = [[(0, 30), (0, 50)], [(30, 30), (0, 50)]]
    tensors = [T("a", "f4", (60, 50), {0: halves[:1], 1: halves[1:]}),
               T("b", "f4", (60, 50), {2: halves[:1], 3: halves[1:]})]
    Step(proto, tmp_path / "s", tensors, 4)
    s = opened()
    data = pack(tmp_path / "s", 3, "meta").read_bytes()
    spoil(pack(tmp_path / "s", 3, "meta"), data.index(b"VCKPTCHK") + 70)
    o = s.tensor("model", "a")
    assert o.read(cache) == tensors[0].bytes
    with pytest.raises(Failed) as e:
        s.tensor("model", "b")
    assert (e.value.code == DAMAGED and
            all(x in e.value.text for x in ("r/1", "tensor model/b", "rank 3", "-3-meta", "offset"))), e.value.text
    o.close()


def test_damage_is_told_by_its_place(proto, opened, tmp_path, cache):
    halves = [[(0, 33), (0, 50)], [(33, 27), (0, 50)]]
    t = T("w", "f4", (60, 50), {0: halves[:1], 1: halves[1:]})
    Step(proto, tmp_path / "s", [t], 2)
    spoil(pack(tmp_path / "s", 1, "model"), 4096 + 500)
    o, good = opened().tensor("model", "w"), 33 * 50 * 4
    assert o.read(cache, 0, good) == t.bytes[:good]
    with pytest.raises(Failed) as e:
        o.read(cache)
    assert (e.value.code == DAMAGED and
            all(x in e.value.text for x in ("r/1", "tensor model/w", "offset 4", f"{ATTEMPT.decode()}-1-model"))), (
        e.value.text)
    o.close()


def test_many_writers(proto, opened, tmp_path, cache):
    """More than one thread reads rows and packs: what is found, and which fault is told, does not depend on them."""
    world, strips = 40, [[(3 * i, 3), (0, 50)] for i in range(40)]
    tensors = [T("a", "f4", (120, 50), {i: [box] for i, box in enumerate(strips)}), T("b", "f4", (60, 50), {8: None}),
               T("c", "f4", (120, 50), {i: [box] for i, box in enumerate(reversed(strips))})]
    Step(proto, tmp_path / "s", tensors, world)
    check(opened(), tensors, cache, random.Random(1))
    for rank in (31, 9, 38):
        meta = pack(tmp_path / "s", rank, "meta")
        spoil(meta, meta.read_bytes().index(b"VCKPTCHK") + 70)
    s = opened()
    for name in "ac":
        with pytest.raises(Failed) as e:
            s.tensor("model", name)
        assert e.value.code == DAMAGED and "part of rank 9:" in e.value.text, e.value.text
    o = s.tensor("model", "b")  # rank 9 is asked together with rank 8, which has all of it
    assert o.read(cache) == tensors[1].bytes
    o.close()


def test_damage_in_packs_of_many_writers(proto, opened, tmp_path, cache):
    strips = [[(3 * i, 3), (0, 50)] for i in range(40)]
    t = T("w", "f4", (120, 50), {i: [box] for i, box in enumerate(strips)})
    Step(proto, tmp_path / "s", [t], 40)
    for rank in (31, 7, 38):
        spoil(pack(tmp_path / "s", rank, "model"), 4096 + 500)
    o = opened().tensor("model", "w")
    with pytest.raises(Failed) as e:
        o.read(cache)
    assert e.value.code == DAMAGED and f"{ATTEMPT.decode()}-7-model" in e.value.text, e.value.text
    for rank, (rows, _) in enumerate(strips):  # the others are there, each read again and again
        at, n = rows[0] * 50 * 4, rows[1] * 50 * 4
        if rank in (31, 7, 38):
            with pytest.raises(Failed):
                o.read(cache, at, n)
        else:
            assert o.read(cache, at, n) == t.bytes[at:at + n]
    o.close()


def test_few_descriptors(api, proto, opened, tmp_path):  # noqa: F811
    """Packs that are not in use are kept open for a while, and closed where descriptors run out, whatever needs one."""
    strips = [[(3 * i, 3), (0, 50)] for i in range(40)]
    t = T("w", "f4", (120, 50), {i: [box] for i, box in enumerate(strips)})
    Step(proto, tmp_path / "s", [t], 40)
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    step = opened()

    def open_another():
        """A step, when unused packs have all descriptors that are left."""
        taken, cache = [], api.load_cache_new(1 << 20)
        o = step.tensor("model", "w")
        assert o.read(cache) == t.bytes
        o.close()
        api.load_cache_free(c.c_void_p(cache))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(0))
            step.store.open("r", 1).close()
        finally:
            for fd in taken:
                os.close(fd)

    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limits[1]))
    try:
        for tries in (2, 1, 0):
            try:
                return open_another()
            except Failed:      # the packs were unused for long, and closed before
                if not tries:
                    raise
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- hostile parts ----

HALVES = [[(0, 30), (0, 50)], [(30, 30), (0, 50)]]


@pytest.mark.parametrize("held, words", [
    ({0: HALVES[:1]}, "no rank stored box [30:60, 0:50]"),
    ({0: HALVES[:1], 1: [[(31, 29), (0, 50)]]}, "no rank stored box [30:31, 0:50]"),
    ({0: HALVES[:1], 1: [[(30, 30), (0, 49)]], 2: HALVES[:1]}, "no rank stored box [30:60, 49:50]"),
    ({0: HALVES[:1], 1: HALVES[1:], 2: [[(29, 2), (7, 1)]]}, "overlap"),
    ({0: HALVES[:1], 1: HALVES[1:] + [[(59, 1), (0, 50)]]}, "overlap"),
    ({0: HALVES[:1], 2: None}, "overlap"),
    ({}, "no part has a row of it"),
])
def test_boxes_that_do_not_add_up(proto, opened, tmp_path, held, words):
    good = T("x", "u1", (7,), {1: None})
    Step(proto, tmp_path / "s", [T("w", "f4", (60, 50), held), good], 3)
    s = opened()
    with pytest.raises(Failed) as e:
        s.tensor("model", "w")
    assert e.value.code == EFORMAT and words in e.value.text and "r/1: tensor model/w" in e.value.text, e.value.text
    if words == "overlap":
        assert f"rank {2 if 2 in held else 1}" in e.value.text
    s.tensor("model", "x").close()


def test_the_whole_of_the_lowest_rank_counts(proto, opened, tmp_path, cache):
    t = T("w", "f4", (60, 50), {0: None, 2: HALVES[:1]})
    Step(proto, tmp_path / "s", [t], 3)
    check(opened(), [t], cache, random.Random(1))


def patched(pairs=None, nboxes=None):
    """Rank 1's row with other numbers in its boxes, or another count of them; everything else is right, its digests
    too."""
    def forge(rank, rows, layout):
        if rank != 1:
            return None
        data = bytearray(chunk_bytes(rows))
        if nboxes is not None:
            data[64 + 8:64 + 12] = nboxes.to_bytes(4, "little")
        if pairs:
            old = b"".join(n.to_bytes(8, "little") for pair in rows[0][1][0] for n in pair)
            at = data.rindex(old)
            data[at:at + len(old)] = b"".join((n % 2**64).to_bytes(8, "little") for pair in pairs for n in pair)
        return bytes(data)
    return forge


@pytest.mark.parametrize("forge", [
    patched(pairs=[(31, 30), (0, 50)]), patched(pairs=[(30, 31), (0, 50)]), patched(pairs=[(2**64 - 30, 30), (0, 50)]),
    patched(pairs=[(30, 30), (1, 50)]),
    patched(pairs=[(30, 0), (0, 50)]), patched(pairs=[(30, 30), (0, 0)]), patched(pairs=[(30, 2**64 - 1), (0, 50)]),
    patched(pairs=[(30, 30), (2**63, 2**63)]),
    patched(nboxes=0), patched(nboxes=2), patched(nboxes=2**32 - 1),
])
def test_rows_that_lie(proto, opened, tmp_path, forge):
    Step(proto, tmp_path / "s", [T("w", "f4", (60, 50), {0: HALVES[:1], 1: HALVES[1:]})], 2, forge=forge)
    s = opened()
    with pytest.raises(Failed) as e:
        s.tensor("model", "w")
    assert e.value.code == EFORMAT and "r/1: tensor model/w" in e.value.text, e.value.text


def test_a_forged_row_that_is_right_is_read(proto, opened, tmp_path, cache):
    """So the refusals above are not the forger's."""
    t = T("w", "f4", (60, 50), {0: HALVES[:1], 1: HALVES[1:]})
    Step(proto, tmp_path / "s", [t], 2, forge=patched())
    check(opened(), [t], cache, random.Random(1))


# ---- commands and mount ----

@pytest.fixture(scope="module")
def sample(proto, shapes, tmp_path_factory):
    """A store with one step of four ranks, its tensors, and their bytes in the .safetensors."""
    path, rng = tmp_path_factory.mktemp("sample") / "s", random.Random(11)
    mesh = (2, 2)
    tensors = [T(f"layer.{i}", k, s, sharded(shapes, rng, s, mesh), i) for i, (k, s) in enumerate(
        [("f4", (120, 77)), ("u2", (512, 130)), ("u1", (5000,)), ("i8", (9, 10, 11)), ("f4", ()), ("u2", (0, 4)),
         ("u1", (64, 64)), ("f4", (3, 3, 3, 3))])]
    tensors.append(T("big", "f4", (700, 1100),
                     {0: [[(0, 333), (0, 1100)]], 1: [[(333, 367), (0, 500)]], 2: [[(333, 367), (500, 600)]]}, 99))
    Step(proto, path, tensors, 4, Params(16 << 10, 64 << 10, 512), header=True)
    return path, tensors


def safetensors_data(tensors):
    return b"".join(t.bytes for t in sorted(tensors, key=lambda t: t.name))


def test_commands(vckpt, sample, tmp_path):
    path, tensors = sample
    out = tmp_path / "out"
    vckpt("verify", path)
    vckpt("verify", path, "r/1")
    vckpt("export", path, "r/1", out)
    vckpt("export", path, "r/1", tmp_path / "npy", "--format", "npy")
    for t in tensors:
        for file in (vckpt("cat", path, f"r/1/model/{t.name}.npy", text=False).stdout,
                     (tmp_path / "npy" / "model" / f"{t.name}.npy").read_bytes()):
            assert file[4096:] == t.bytes and file.startswith(b"\x93NUMPY")
    got = np.load(tmp_path / "npy" / "model" / "layer.1.npy")
    assert got.dtype == np.dtype("u2") and got.shape == (512, 130) and got.tobytes() == tensors[1].bytes
    whole_file = (out / "model.safetensors").read_bytes()
    assert whole_file == vckpt("cat", path, "r/1/model.safetensors",
                               text=False).stdout and whole_file.endswith(safetensors_data(tensors))
    told = vckpt.json("info", path, "r/1")
    assert told["tensors"] == len(tensors) and told["bytes"] == sum(t.array.nbytes for t in tensors)
    assert vckpt.json("info", path, "r/1/model/big")["shape"] == [700, 1100]


def test_mount(build, sample, tmp_path):
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    path, tensors = sample
    point, rng = tmp_path / "mnt", random.Random(12)
    point.mkdir()
    subprocess.run([build / "fs" / "mount.vckpt", path, point], check=True, timeout=60)
    try:
        step = point / "r" / "step-00000001"
        for t in tensors:
            data = (step / "model" / f"{t.name}.npy").read_bytes()
            assert data[4096:] == t.bytes
            assert np.load(step / "model" / f"{t.name}.npy", mmap_mode="r" if t.array.size and
                           t.shape else None).tobytes() == t.bytes
            assert os.getxattr(step / "model" / f"{t.name}.npy", "user.vckpt.pieces").isdigit()
        want = safetensors_data(tensors)
        with open(step / "model.safetensors", "rb", buffering=0) as f:
            data = f.read()
            assert data.endswith(want)
            for _ in range(100):
                at, n = rng.randrange(len(data)), rng.choice([1, 77, 5000, 300_000])
                assert os.pread(f.fileno(), n, at) == data[at:at + n]
    finally:
        for _ in range(50):
            if subprocess.run(["umount", point], capture_output=True, timeout=120).returncode == 0:
                break
            time.sleep(0.1)


def test_verify_finds_what_load_refuses(proto, vckpt, tmp_path):
    Step(proto, tmp_path / "s", [T("w", "f4", (60, 50), {0: HALVES[:1]})], 2)
    done = vckpt("verify", tmp_path / "s", check=False)
    assert done.returncode == 3 and "no rank stored box [30:60, 0:50]" in done.stdout + done.stderr
    done = vckpt("cat", tmp_path / "s", "r/1/model/w.npy", check=False)
    assert done.returncode != 0 and "no rank stored box [30:60, 0:50]" in done.stderr
