# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a step's tensors lie, by tests/golden/reader.py, which is written from docs/format/ alone; and how
many of them a reader that wants some items has to read, and may read."""
import itertools

import numpy as np

import reader

HEAD_BYTES = 4096       # of a pack: read when it is opened
PAGE_BYTES = 4096       # BURST_PAGE of core/load/fill/burst.c: less between two wanted things may be read with them


class Store(reader.Store):
    def referred(self, ref, packs):
        """Pieces are not read: their places are asked for."""
        return (packs[ref.pack][0], ref) if ref.kind == reader.PIECE else super().referred(ref, packs)


class Part(reader.Part):
    def row(self, data, tensor, flags, nboxes, nruns, npieces, nbases, zero, digest):
        """self.rows: {tensor: {box: [(piece, its place, or its bytes where they are inline)]}}"""
        boxes = ([tuple(reader.pairs(self.take(data, "box", f"<{2 * len(tensor.shape)}Q"))) for _ in range(nboxes)] or
                 [tensor.grid.whole])
        cut = [(box, piece) for box in boxes for piece in tensor.grid.pieces(box)]
        listed = [self.take(data, "piece", "<32s16sIIHHI") for _ in range(npieces)]
        places = []
        for _ in range(nruns):
            places += self.run(data, tensor, listed, len(places))
        row = self.rows[tensor.key] = {}
        for (box, piece), place in zip(cut, places, strict=True):
            row.setdefault(box, []).append((piece, place))


class Step(reader.Step):
    """A step's tables and parts, and nothing of its data."""

    def __init__(self, path, run, number):
        self.store = Store(path)
        self.store.open()
        _, self.commit = reader.List(self.store, run).read().visible[number]
        self.run, self.what = run, f"{run}/{number}"
        _, self.m = self.store.record(f"runs/{run}/manifests/{self.commit['manifest'].hex()}", 3)
        self.tables()
        self.lines()
        self.lay_out()
        self.parts = [Part(self.store, line, self.layouts[line["layout"]], self.layout_refs[line["layout"]].digest,
                           self.store.referred(line["ref"], self.packs)) for line in self.ranks]
        assert not self.store.faults and not self.store.newer, (self.store.faults, self.store.newer)
        self.objects = {}

    def pieces(self, name):
        """[(piece, its object, None: inline)] of a tensor: of boxes that several ranks stored, the lowest rank's."""
        key, boxes = tuple(name.split("/", 1)), {}
        for part in self.parts:
            for box, pieces in part.rows.get(key, {}).items():
                boxes.setdefault(box, pieces)
        return [(piece, None if isinstance(place, bytes) else self.object(*place))
                for pieces in boxes.values() for piece, place in pieces]

    def metadata(self, ranks):
        """The packs of metadata of these ranks in which nothing lies that every reader needs."""
        kept = {self.packs[ref.pack][0] for ref in self.layout_refs}
        return {path for line in self.ranks if line["rank"] in ranks
                for path in [self.packs[line["ref"].pack][0]] if path not in kept}

    def object(self, pack, ref):
        key = pack, ref.offset
        if key not in self.objects:
            self.objects[key] = Object(self.store, pack, ref)
        assert self.objects[key].ref.digest == ref.digest
        return self.objects[key]


class Object:
    def __init__(self, store, pack, ref):
        self.pack, self.ref, self.blocks = pack, ref, reader.blocks_of(ref.raw)
        lengths = np.full(self.blocks, reader.BLOCK, np.int64)
        lengths[-1] = ref.raw - reader.BLOCK * (self.blocks - 1)
        if ref.codec:
            data = store.pack(pack)
            lengths = np.frombuffer(data, "<u4", self.blocks, ref.checks + 8 * self.blocks) & 0x7fffffff
        self.ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
        assert self.ends[-1] == ref.stored

    def needed(self, first, end):
        """Stored bytes of the blocks [first, end), and what is said of them: checks, and lengths where encoded."""
        return self.ends[end] - self.ends[first], (end - first) * (12 if self.ref.codec else 8)

    def checks(self, first, end):
        """What is read to check these blocks: of a raw object what is said of them, of an encoded one all."""
        first, n, item = (0, self.blocks, 12) if self.ref.codec else (first, end - first, 8)
        return self.ref.checks + item * first, item * n


def wanted_blocks(grid, piece, wanted):
    """Which blocks of a piece have an item that is wanted. wanted: of the whole tensor, a bool for each item."""
    if piece:
        along = reader.between(*piece[grid.k], grid.e[grid.k])
        cells = [(*piece[:grid.k], part, *piece[grid.k + 1:]) for part in along]
        wanted = np.concatenate([wanted[tuple(slice(o, o + n) for o, n in cell)].reshape(-1) for cell in cells])
    wanted = wanted.reshape(-1)
    items = reader.BLOCK // grid.item
    padded = np.zeros((-(-len(wanted) // items), items), bool)
    padded.reshape(-1)[:len(wanted)] = wanted
    return padded.any(1)


def runs(blocks):
    """[(first, end)] of neighbouring blocks that are wanted."""
    return np.flatnonzero(np.diff(np.concatenate([[0], blocks.astype("i1"), [0]]))).reshape(-1, 2).tolist()


class Account:
    """What one load has to read of a step: wanted, {tensor: a bool for each item}. whole: of a piece all or nothing."""

    def __init__(self, step, wanted, whole=False):
        blocks = {}
        for name, mask in wanted.items():
            if not mask.any():
                continue
            grid = step.look[tuple(name.split("/", 1))].grid
            for piece, stored in step.pieces(name):
                found = wanted_blocks(grid, piece, mask)
                if stored and found.any():
                    blocks[stored] = blocks.get(stored, False) | (found | whole)
        self.stored = self.checks = self.bound = self.objects = self.encoded = self.partial = 0
        self.packs = len({o.pack for o in blocks})
        for o, found in blocks.items():
            self.add(o, runs(found))
            self.partial += not found.all()
        self.bound += gaps([(o, run) for o, found in blocks.items() for run in runs(found)])

    def add(self, o, wanted):
        """bound: what lies between, where that is worth a request, is a quarter of what is wanted; see gaps, too."""
        tables = set()
        for first, end in wanted:
            stored, checks = o.needed(first, end)
            self.stored += stored
            self.checks += checks
            self.bound += stored + stored // 4
            tables.add(o.checks(first, end))
        self.bound += sum(length + -(at + length) % PAGE_BYTES for at, length in tables)   # the rest of their page, too
        self.objects += 1
        self.encoded += o.ref.codec != 0


def gaps(wanted):
    """Bytes between the runs of blocks that are wanted, between their checks, and between a run and its checks, where
    they are less than a page: these may be read at once."""
    found = 0
    data = sorted((o.pack, o.ref.offset + o.ends[first], o.ends[end] - o.ends[first]) for o, (first, end) in wanted)
    tables = sorted({(o.pack, *o.checks(first, end)) for o, (first, end) in wanted})
    near = [((o.pack, o.ref.offset + o.ends[first], o.ends[end] - o.ends[first]), (o.pack, *o.checks(first, end)))
            for o, (first, end) in wanted]
    for a, b in [*itertools.pairwise(data), *itertools.pairwise(tables), *near]:
        gap = b[1] - a[1] - a[2]
        found += gap if a[0] == b[0] and 0 < gap < PAGE_BYTES else 0
    return found
