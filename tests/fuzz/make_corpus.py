#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpora of the record and chunk targets: make_corpus.py BUILD_DIRECTORY. Deterministic."""
import ctypes
import pathlib
import random
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "unit"))

from protolib import P_, SNAPSHOT, Layout, Live, Proto, chunk_bytes, commit, entry, field, parse, samples, unparse  # noqa: E402
from test_layout_part import random_pieces  # noqa: E402


def write(target, name, data):
    path = HERE / "corpus" / target
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)


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


def main(build):
    proto = Proto(ctypes.CDLL(str(pathlib.Path(build) / "tests" / "libvckpt_internal.so")))
    bodies = samples(proto)
    for target, names in (("entry", ["launch", "commit", "abort", "remove", "snapshot"]), ("manifest", ["two-ranks"]),
                          ("layout", ["five"]), ("part", ["one", "compared"]),
                          ("announcement", ["rank-0", "rank-1", "compared", "commons"]), ("stats", ["one", "least"])):
        for name, body in zip(names, bodies[target], strict=True):
            write(target, name, body)
    later = [(n, k, v + field(90, b"later") if n == 7 else v) for n, k, v in parse(bodies["entry"][1])]
    write("entry", "commit-of-a-later-version", unparse(later))
    m = proto.decode("entry", unparse(later))
    write("entry", "snapshot-of-a-later-version",
          proto.encode("entry", entry(SNAPSHOT, live=[Live(2, commit(3)), Live(4, m.commit)])))
    write("layout", "empty", Layout(proto.lib, []).object)
    write("layout", "scalars", Layout(proto.lib, [("model", b"a%d" % i, 13, ()) for i in range(3)]).object)
    chunks(proto.lib)


if __name__ == "__main__":
    main(sys.argv[1])
