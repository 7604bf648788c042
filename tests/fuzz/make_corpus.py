#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpora of what a store's own files are: make_corpus.py BUILD_DIRECTORY [FOLDER]. Deterministic."""
import ctypes
import hashlib
import pathlib
import random
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "unit"), str(HERE.parent / "unit/step")]

from protolib import (ATTEMPT, COLLECTED, FACTS, NONE, P_, SNAPSHOT, Base, Begin, Buf, Heartbeat, Layout, Live, Params,  # noqa: E402
                      Proto, Range, Damage, chunk_bytes, commit, digest, entry, facts, field, parse, samples,
                      step_facts, table, unparse)
from test_layout_part import random_pieces  # noqa: E402


OUT = HERE / "corpus"
STORE, BEGIN, BASE, PART, HEARTBEAT, NOTE = 1, 4, 5, 6, 7, 10                  # kinds of records
LAUNCH = b"0123456789abcdef"
PACK = LAUNCH + b"-0-0-model"
AT_56 = 128                                                                    # and 2: 56 entries before
LATER = ("accept", "launch-with-word", "snapshot-with-word", "no-blobs", "blobs", "facts", "policy", "no-policy",
         "facts-and-policy", "commit-with-facts", "snapshot-with-facts", "remove-with-reason")      # than format 1
STATS_ENTRY = 23                                                              # field of a record of measures


def write(target, name, data):
    path = OUT / target
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)


def of_format_1(target, body):
    """The same body as it stood in format 1, whose entries have no run, number, digest before and nonce, and whose
    measures do not name the commit's entry."""
    fields = [(1, 0, 1)] + parse(body)[1:]
    if target == "stats":
        fields = [f for f in fields if f[0] != STATS_ENTRY]
    if target == "entry":
        launch, nonce = 6, 3
        fields = [(n, k, unparse([f for f in parse(v) if f[0] != nonce]) if n == launch else v)
                  for n, k, v in fields if n < 11]
    return unparse(fields)


def chunks(lib):
    rng = random.Random(1)
    layout = Layout(lib, [("model", b"a", 12, (600, 700)), ("model", b"b", 12, (4,)), ("model", b"c", 11, (40, 50)),
                          ("model", b"d", 2, ()), ("model", b"e", 12, (0, 3))])
    boxes = [[(0, 10), (0, 50)], [(20, 20), (5, 10)]]
    whole = [(0, None, random_pieces(rng, layout.piece_bytes(0, None), 3))]
    small = [(1, None, [P_(16, b"0123456789abcdef", 5)]), (3, None, [P_(1, b"x", 6)]), (4, None, [P_(0, b"", 7)])]
    boxed = [(2, boxes, random_pieces(rng, layout.piece_bytes(2, boxes), 3))]
    for name, rows in (("whole", whole), ("inline", small), ("boxes", boxed),
                       ("all", whole + small[:1] + boxed + small[1:])):
        write("part_chunk", name, struct.pack("<I", len(layout.object)) + layout.object + chunk_bytes(rows))


def record(kind, body, version=1):
    """The single form of its file, in the store whose id is 0, 1, 2, ..."""
    head = b"VCKPTREC" + struct.pack("<HHI", version, kind, len(body))
    return head + hashlib.sha256(head + bytes(range(16)) + body).digest() + body


def files(*named):
    """What fuzz_incoming takes: (kind, name, bytes)."""
    return b"".join(struct.pack("<BB", kind, len(name)) + name + struct.pack("<H", len(data)) + data
                    for kind, name, data in named)


def incoming(proto, bodies):
    begin = proto.encode("begin", Begin(run=b"run-1", attempt=ATTEMPT, step=3, world=4, rank=1, host=b"h", time_ns=5,
                                        bases=table(Base, [Base(b"run-1", 3, digest(4))]), nbases=1))
    beat = proto.encode("heartbeat", Heartbeat(launch=LAUNCH, host=b"h", run=b"run-1", number=3))
    folder = b"incoming/run-1/" + ATTEMPT + b"/"
    beats = [(HEARTBEAT, b"hosts/" + LAUNCH + name, data)
             for name, data in ((b".h.2", beat), (b".h.3", beat), (b".h.r1.0", bodies["heartbeat"][0]), (b".g.1", b""))]
    save = [(BEGIN, folder + b"begin", begin), (BASE, folder + b"base.0", bodies["base"][0]),
            (PART, folder + b"part.0", bodies["announcement"][0]), (PART, folder + b"part.2", b""),
            (PART, folder + b"part.7", b""), (PART, folder + b"part.03", b"")]
    note = [(NOTE, b"damaged/" + pack, proto.encode("damage", Damage(pack=pack, ranges=table(Range, ranges),
                                                                     nranges=len(ranges))))
            for pack, ranges in ((PACK, [Range(0, 4096), Range(5000, 1)]), (LAUNCH + b"-1-0-meta", [Range(0, 0)]))]
    write("incoming", "heartbeats", files(*beats))
    write("incoming", "a-save", files(*beats, *save))
    write("incoming", "not-begun", files(*save[1:]))
    write("incoming", "other-names", files((BEGIN, b"incoming/run-2/" + ATTEMPT + b"/begin", begin),
                                           (BEGIN, b"incoming/run 1/x/begin", begin), (0, b"hosts/x", b"")))
    write("incoming", "notes", files(*note) + struct.pack("<QQ", 4500, 600))
    write("incoming", "notes-damaged", files((0, b"damaged/" + PACK, b"no record"), note[1]) + struct.pack("<QQ", 1, 1))
    write("incoming", "a-newer-note", files((0, b"damaged/" + PACK, record(NOTE, b"x", version=2))) + bytes(16))
    write("incoming", "no-note", struct.pack("<QQ", 2**63 - 1, 0))


def lists(proto, bodies):
    """What fuzz_list takes: (flags, body), behind so many entries that decide nothing."""
    launch, commit_, abort, remove, snapshot, accept, launch_2, snapshot_2 = bodies["entry"][:8]
    skipped, as_it_is, writer, newest, fill = 1, 2, 4, 8, 8
    many, word = writer | 15 << 4, 64

    def bodies_of(*entries):
        return [proto.encode("entry", e) for e in entries]

    def goes_on(start, *gone, older=NONE, steps=(), launch_=NONE):
        live = [Live(n, commit(step, b"%s-%d" % (LAUNCH, n))) for n, step in steps]
        return entry(SNAPSHOT, list_2=True, number=2**60, from_=start, from_digest=digest(9),
                     gone=table(ctypes.c_uint64, gone), ngone=len(gone), older=older, newest_launch=launch_,
                     live=live, nlive=len(live))
    first, = bodies_of(entry(SNAPSHOT, list_2=True, number=2**60, older=NONE, newest_launch=NONE,
                            live=[Live(2, commit(3)), Live(4, commit(9, LAUNCH + b"-1"))]))
    double, = bodies_of(entry(SNAPSHOT, list_2=True, number=2**60, older=NONE, newest_launch=NONE,
                              live=[Live(2, commit(9)), Live(4, commit(9, LAUNCH + b"-1"))]))

    def collected(number):
        return proto.encode("entry", entry(COLLECTED, number=number or 1 << 20, before=digest(3)))
    def said(*rows, rules=None):
        return proto.encode("entry", entry(FACTS, number=2**60, facts=facts(*rows, rules=rules)))
    some = [said(step_facts(i, [b"best", b"t%d" % i][:1 + i % 2], i % 3 == 0, loss=str(i))) for i in range(6)]
    facts_ = [(writer, launch), (many, commit_), *[(writer, body) for body in some], (writer, said(rules=[b"x"])),
              (writer | 3 << 4, remove)]
    up_to_192 = [(fill, first), *[(0, remove)] * 63]            # `first` is entry 128
    history = [(writer, launch), (many, commit_), (many, commit_), (writer | 3 << 4, remove)]
    for name, before, all_entries in [
        ("one-save", 0, [(0, launch), (0, commit_)]), ("removed", 1, [(0, launch), (0, commit_), (0, remove)]),
        ("aborted", 0, [(0, launch), (0, abort), (0, commit_)]),
        ("twice", 0, [(0, launch), (0, commit_), (0, commit_)]),
        ("snapshot", AT_56 + 6, [(0, snapshot), (0, launch), (0, commit_)]),
        ("later-snapshot", AT_56 + 2, [(0, launch)] * 8),
        ("accepted", 11, [(as_it_is, b"damaged"), (0, launch), (0, accept), (0, commit_)]),
        ("gap", 3, [(0, launch), (skipped, commit_)]), ("another-run", 0, [(as_it_is, launch), (0, commit_)]),
        ("writers", 0, history * 8), ("writers-with-word", word, history * 8),
        ("writers-of-newest", word, [(flags | newest, body) for flags, body in history * 6]),
        ("writers-behind-many", word, [(fill, remove), (fill, remove), *history * 3]),
        ("removed-late", word, history + [(writer | newest | 9 << 4, remove), (many, launch)] * 8),
        ("word", word, [(0, launch_2), (0, commit_), (0, snapshot_2)]),
        ("chain", word | AT_56 + 8, up_to_192 + [(0, *bodies_of(goes_on(128, 2, older=9, steps=((150, 700),)))),
                                                 (0, commit_), (0, launch_2)]),
        ("two-of-one-step", word | AT_56 + 8, [(fill, double), *up_to_192[1:],
                                               (0, *bodies_of(goes_on(128, older=9, steps=((150, 700),))))]),
        ("from-before", word | AT_56 + 7, [(0, first), *[(0, body) for body in bodies_of(goes_on(63), goes_on(2))]]),
        ("collected", word | AT_56 + 8, [*up_to_192, (0, commit_), *[(0, collected(n)) for n in (5, 0, 130)],
                                         (0, commit_)]),
        ("collected-twice", word, [*history * 3, (0, collected(0)), *history * 3, (0, collected(70)),
                                   (0, collected(3))]),
        ("facts", word, facts_ * 4), ("facts-of-newest", word, [(flags | newest, body) for flags, body in facts_ * 5]),
        ("facts-of-none", word, [(0, commit_), *[(0, body) for body in some], (0, said(step_facts(2**59, [b"a"])))]),
        ("facts-without-word", 0, facts_ + [(0, some[1])]),
        ("gone-that-was-not-there", word | AT_56 + 7, [(0, first), (0, *bodies_of(goes_on(63, 7, 11, 62, older=3)))]),
    ]:
        write("list", name, bytes([before]) + b"".join(struct.pack("<BH", flags, len(body)) + body
                                                       for flags, body in all_entries))


def header(lib, layout, component):
    """The safetensors header of a component, and how many bytes of data it promises."""
    b, size = Buf(), ctypes.c_uint64()
    assert lib.view_safetensors_make(layout.p, ctypes.c_uint32(component), None, ctypes.c_uint32(0), ctypes.byref(b),
                                     ctypes.byref(size)) == 0
    made = ctypes.string_at(b.data, b.len)
    lib.base_buf_release(ctypes.byref(b))
    return made, size.value


def view_headers(lib):
    layout = Layout(lib, [("model", b"a", 12, (60, 70)), ("model", b"b", 12, (4,)), ("model", b"c", 11, ()),
                          ("model", b"c32", 15, (3,)), ("optimizer", b"f4", 21, (3, 8)),
                          ("optimizer", b"e", 1, (0, 3))])
    front = struct.pack("<I", len(layout.object)) + layout.object
    for component, name in enumerate((b"model", b"optimizer")):
        made, size = header(lib, layout, component)
        made = struct.pack("<Q", len(made.rstrip(b" ")) - 8) + made[8:].rstrip(b" ")
        write("view_header", name.decode(), front + struct.pack("<BQ", component, size) + made)
        write("view_header", name.decode() + "-of-other-data", front + struct.pack("<BQ", component, size + 1) + made)
        write("view_header", name.decode() + "-of-the-other", front + struct.pack("<BQ", 1 - component, size) + made)


def rows(*all_rows):
    """What fuzz_index takes: (table, flags, key, value)."""
    return b"\1" + b"".join(struct.pack("<BBB", kind, flags, len(key)) + key + struct.pack("<B", len(value)) + value
                            for kind, flags, key, value in all_rows)


def index():
    """A commit, a place in it, and the names of its packs, as index/index_internal.h has them; and lies about them."""
    meta, commits, numbers, packs, places, shadows = range(6)
    number, one, two = struct.pack(">Q", 1), bytes(32), b"\2" * 32
    held = [(commits, 0, one, struct.pack("<QB", 1, 0)), (numbers, 0, number, one + struct.pack("<QQ", 7, 1) + b"run"),
            (packs, 0, number + bytes(4), PACK),
            (places, 0, two, struct.pack("<QQQQQIHBB", 1, 4096, 8192, 64, 64, 0, 0, 1, 0))]
    write("index", "a-commit", rows(*held))
    write("index", "full", rows((*held[0][:1], 2, *held[0][2:]), *held[1:], *[(places, 0, bytes([i]) * 32, b"")
                                                                              for i in range(30)]))
    write("index", "no-pack", rows(*held[:2], held[3]))
    write("index", "no-text", rows(*held[:2], (packs, 0, number + bytes(4), b"\0" + PACK), held[3]))
    write("index", "no-commit", rows(held[0], *held[2:]))
    write("index", "shadows", rows(*held, (shadows, 0, struct.pack(">QQ", 2, 1), b""),
                                   (shadows, 0, struct.pack(">QQ", 1, 1), b"")))
    write("index", "no-envelope", rows(*[(kind, 1, key, value) for kind, _, key, value in held]))
    write("index", "next", rows((meta, 0, b"next", struct.pack("<Q", 2**64 - 1)), *held))
    write("index", "pages", b"\0" + b"\0\0\0\0")
    write("index", "pages-of-zeros", b"\0" + b"\0\x10\0\x40" + bytes(64))
    write("index", "pages-cut", b"\2" + b"\0\x20\0\0")


class Step:
    """What fuzz_step_reads takes: records that describe a step (made_step.h)."""

    WHOLE, SPLIT, MESH, LISTED = range(4)
    LAYOUT, CHUNK, PART, HEADER, MANIFEST, ENTRY = range(6)
    U8, BF16, F32 = 1, 10, 11                                                  # dtypes, less 1

    def __init__(self, ranks=1, layouts=0, flags=0, grid=(0, 0, 0), shift=0, small=0):
        self.records = [(0, struct.pack("<BBBHHHBB", ranks - 1, layouts, flags, *grid, shift, small))]

    def tensor(self, name, dtype, shape, how=WHOLE, arg=0, content=0, layouts=1, component=0):
        self.records.append((1, struct.pack("<8B", layouts, component, name, dtype, len(shape), how, arg, content)
                             + struct.pack(f"<{len(shape)}H", *shape)))
        return self

    def box(self, tensor, rank, *numbers):
        return self.add(2, struct.pack(f"<BB{len(numbers)}H", tensor, rank, *numbers))

    def blob(self, name, size, rank=0, per_rank=0, content=0):
        return self.add(3, struct.pack("<BBBHB", rank, per_rank, name, size, content))

    def swap(self, rank, a, b):
        return self.add(4, struct.pack("<BHH", rank, a, b))

    def lie(self, what, number, offset, gone, come=b""):
        return self.add(5, struct.pack("<BBHBB", what, number, offset & 0xffff, offset >> 16, gone) + come)

    def damage(self, pack, offset, change):
        return self.add(6, struct.pack("<BHBB", pack, offset & 0xffff, offset >> 16, change))

    def add(self, kind, data):
        self.records.append((kind, data))
        return self

    def put(self, name):
        write("step_reads", name, b"".join(struct.pack("<BB", kind, len(data)) + data for kind, data in self.records))


def steps(lib):
    cells = (512, 4096, 64)                                                    # so that small tensors have many pieces
    few = Step(flags=1, grid=(1024, 8192, 512)).tensor(1, Step.F32, (30, 40)).tensor(2, Step.BF16, ())
    few.tensor(3, Step.U8, (0, 3)).tensor(4, Step.U8, (7,), component=1)
    few.blob(1, 100).blob(2, 0).blob(4, 9, per_rank=1).put("few")
    small = Step(ranks=3, grid=(2048, 8192, 64), small=3).tensor(1, Step.F32, (33, 57), Step.SPLIT, 0)
    small.tensor(2, Step.BF16, (301, 41)).put("small-tiles")
    encoded = Step(grid=(4096, 32768, 512)).tensor(1, Step.F32, (60, 90), content=5)
    encoded.tensor(2, Step.BF16, (160, 150), content=6).put("encoded")

    def shards(*more):
        step = Step(ranks=4, flags=3, grid=cells)
        for name, arg in enumerate((0, 1, 4, 9, 2, 13, 16, 48)):
            step.tensor(name, Step.BF16, (16, 36), Step.MESH, arg, content=name % 3)
        for kind, data in more:
            step.add(kind, data)
        return step
    shards().put("mesh")
    split = Step(ranks=3, grid=cells).tensor(1, Step.F32, (40, 30), Step.SPLIT, 0)
    split.tensor(2, Step.U8, (5, 6, 70), Step.SPLIT, 0x22).put("split")
    boxes = Step(ranks=2, grid=(100, 200, 20)).tensor(1, Step.U8, (20, 30), Step.LISTED)
    boxes.box(0, 0, 0, 11, 0, 30).box(0, 1, 11, 9, 0, 7).box(0, 0, 11, 9, 7, 23).box(0, 1, 0, 11, 0, 30).put("boxes")
    Step(ranks=2, grid=cells).tensor(1, Step.U8, (9,), Step.LISTED).box(0, 0, 0, 5).box(0, 1, 4, 5).put("overlap")
    Step(ranks=2, grid=cells).tensor(1, Step.U8, (9,), Step.LISTED).box(0, 0, 0, 5).box(0, 1, 6, 3).put("gap")
    two = Step(ranks=4, layouts=0b1100, flags=1, grid=cells).tensor(1, Step.F32, (8, 20), Step.WHOLE, 3, layouts=3)
    two.tensor(2, Step.BF16, (64, 9), Step.MESH).tensor(3, Step.U8, (300,), Step.SPLIT, layouts=2).put("two-layouts")
    Step(ranks=2, layouts=2, grid=cells).tensor(1, Step.U8, (200,), Step.SPLIT, layouts=3).put("tied-in-shares")
    long = Step(flags=4, grid=(1, 66, 33)).tensor(1, Step.U8, (60000,), Step.SPLIT, 0xf0, content=3)
    long.tensor(2, Step.U8, (30,)).put("long-row-of-boxes")
    pieces = Step(flags=4, grid=(1, 16, 8)).tensor(1, Step.U8, (65000,), content=0)
    pieces.put("long-row-of-pieces")
    pieces.lie(Step.CHUNK, 0, 64 + 64 + 24 + 64 * 4000, 1, b"x").put("long-row-lies")
    for name, content in (("long-row-of-extents", 0), ("long-row-encoded", 6), ("long-row-of-one-piece", 3)):
        one = Step(ranks=2, flags=4, grid=(72, 128, 36)).tensor(1, Step.F32, (3100, 21), content=content)
        one.tensor(2, Step.BF16, (90, 7), Step.SPLIT).put(name)
    Step(grid=cells).tensor(1, Step.BF16, (64, 64)).swap(0, 0, 1).swap(0, 2, 3).put("swapped")
    Step(grid=cells).tensor(1, Step.BF16, (64, 64)).tensor(2, Step.BF16, (64, 64)).damage(0, 4100, 1).put("damaged")
    Step(grid=cells).tensor(1, Step.BF16, (64, 64)).damage(1, 9, 4).put("damaged-head")
    for name, offset, come in (("shape", 54, b"\x20\0\0\0\0\0\0\0\x80\0"), ("dtype", 32, b"\x0a"), ("name", 50, b"T"),
                               ("grid", 11, b"\2"), ("flags", 34, b"\1")):
        one = Step(grid=cells).tensor(1, Step.BF16, (64, 64), content=1)
        one.lie(Step.LAYOUT, 0, offset, len(come), come).put(f"lie-layout-{name}")
    held = Layout(lib, [("c0", b"t1", 11, (16, 36), "a=2", "S(0)")], Params(*cells)).object.index(b"S(0)")
    one = Step(ranks=2, grid=cells).tensor(1, Step.BF16, (16, 36), Step.MESH)
    one.lie(Step.LAYOUT, 0, held + 2, 1, b"1").put("lie-layout-mesh")
    for name, what, number, offset, gone, come in (
            ("extent", Step.CHUNK, 0, 64 + 64 * 8 + 8, 2, b"\0\x20"), ("row", Step.CHUNK, 1, 64 + 8, 1, b"\2"),
            ("box", Step.CHUNK, 2, 400, 1, b"\1"), ("piece", Step.CHUNK, 0, 64 + 64 * 8 + 24 * 8 + 9, 1, b"\1"),
            ("part", Step.PART, 1, 6, 1, b"\0"), ("header", Step.HEADER, 0, 40, 1, b"7"),
            ("manifest", Step.MANIFEST, 0, 40, 1, b"\1"), ("entry", Step.ENTRY, 0, 30, 1, b"\1")):
        shards((5, struct.pack("<BBHBB", what, number, offset, 0, gone) + come)).put(f"lie-{name}")


def main(build):
    proto = Proto(ctypes.CDLL(str(pathlib.Path(build) / "tests" / "libvckpt_internal.so")))
    bodies = samples(proto)
    for target, names in (("begin", ["alone", "commons"]), ("base", ["one"]), ("heartbeat", ["two-ranks", "idle"]),
                          ("trash", ["two-heartbeats"]), ("damage", ["two-ranges", "all"]), ("store", ["one"]),
                          ("entry", ["launch", "commit", "abort", "remove", "snapshot", "accept", "launch-with-word",
                                     "snapshot-with-word", "facts", "policy", "no-policy", "facts-and-policy",
                                     "commit-with-facts", "snapshot-with-facts", "remove-with-reason"]),
                          ("manifest", ["two-ranks", "no-blobs", "blobs"]), ("layout", ["five"]),
                          ("part", ["one", "compared"]),
                          ("announcement", ["rank-0", "rank-1", "compared", "commons"]), ("stats", ["one", "least"])):
        for name, body in zip(names, bodies[target], strict=True):
            write(target, name, body)
            if target in ("entry", "manifest", "layout", "part", "announcement", "stats") and name not in LATER:
                write(target, f"{name}-of-format-1", of_format_1(target, body))
    later = [(n, k, v + field(90, b"later") if n == 7 else v) for n, k, v in parse(bodies["entry"][1])]
    write("entry", "commit-of-a-later-version", unparse(later))
    write("entry", "collected", proto.encode("entry", entry(COLLECTED, number=64, before=digest(3))))
    m = proto.decode("entry", unparse(later))
    write("entry", "snapshot-of-a-later-version",
          proto.encode("entry", entry(SNAPSHOT, live=[Live(2, commit(3)), Live(4, m.commit)])))
    write("layout", "empty", Layout(proto.lib, []).object)
    write("layout", "scalars", Layout(proto.lib, [("model", b"a%d" % i, 13, ()) for i in range(3)]).object)
    chunks(proto.lib)
    incoming(proto, bodies)
    lists(proto, bodies)
    view_headers(proto.lib)
    index()
    steps(proto.lib)
    for kind in (0, HEARTBEAT, NOTE, NOTE + 1):
        write("record", f"kind-{kind}-empty", bytes([kind]) + record(kind, b""))


if __name__ == "__main__":
    OUT = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else OUT
    main(sys.argv[1])
