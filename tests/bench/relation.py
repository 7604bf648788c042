#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which pieces a rank needs of one stored tensor, and where they lie, from the stored form of parts: cost by the number
of pieces that are stored and by what the rank needs.

    tests/bench/relation.py --build DIR [--repeat 9] [--dir DIR]

Every repeat opens the store anew and begins with the part's object (its bytes are in the page cache); beside it the
same with the row read whole. No piece is read.
"""
import argparse
import ctypes
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "property"), str(ROOT / "tests" / "unit")]
import protolib  # noqa: E402
import storelib  # noqa: E402
import tensorlib as tl  # noqa: E402

PIECES = [10 ** 3, 10 ** 4, 10 ** 5, 10 ** 6]
COLUMNS, BF16, NEED = 4096, 11, 64
PHASES = ["part", "row", "relation", "places"]


def rows_of(pieces):
    """Rows of a bf16 tensor of 4,096 columns whose tiles are 1024 x 512: 8 pieces of 1 MiB a tile row, the last one a
    row short."""
    return pieces // 8 * 1024 - 1


class Source:
    """A store with one tensor, by the parts of one or many ranks."""

    def __init__(self, bench, pieces, ranks):
        self.lib, self.c, self.ranks = bench.lib, bench.c, ranks
        self.shape = (rows_of(pieces), COLUMNS)
        self.layout = protolib.Layout(bench.lib, [("model", b"weight", BF16, self.shape)])
        self.path = bench.dir / f"{pieces}-{ranks}"
        api = storelib.Api(bench.lib, self.path)
        self.sharding = tl.OwnedSharding(bench.lib, self.shape, tl.OwnedMesh(bench.lib, [("dp", ranks)]), "S(0)", 2)
        self.parts = (protolib.Ref * ranks)()
        for rank in range(ranks):
            (box,) = [tl.Box.of(*b[:2]) for b in tl.shard_boxes(bench.lib, self.sharding.shard(rank))]
            err = tl.Error()
            tl.check(self.c.relation_part_make(api.p, self.layout.p, rank, ranks, ctypes.byref(box),
                                               ctypes.byref(self.parts, rank * ctypes.sizeof(protolib.Ref)),
                                               ctypes.byref(err)), err)
        api.close()

    def target(self, ranks):
        """What the rank in the middle wants when so many share the rows."""
        sharding = tl.OwnedSharding(self.lib, self.shape, tl.OwnedMesh(self.lib, [("dp", ranks)]), "S(0)", 2)
        return sharding.shard(ranks // 2)

    def holders(self, shard):
        held = (ctypes.c_uint8 * self.ranks)()
        assert self.c.relation_holders(ctypes.byref(self.sharding.c), ctypes.byref(shard), held) == 0
        return [rank for rank in range(self.ranks) if held[rank]]

    def ask(self, shard, ranks, ranged):
        """(microseconds by phase, (lines, bytes, sum of places))"""
        api = storelib.Api(self.lib, self.path, init=False, flags=1)
        us, found, err = (ctypes.c_double * 4)(), (ctypes.c_uint64 * 3)(), tl.Error()
        array = (ctypes.c_uint32 * len(ranks))(*ranks)
        tl.check(self.c.relation_run(api.p, self.layout.p, self.parts, array, len(ranks), ctypes.byref(shard),
                                     ctypes.c_bool(ranged), us, found,
                                     ctypes.byref(err)), err)
        api.close()
        return list(us), tuple(found)

    def close(self):
        self.layout.close()
        shutil.rmtree(self.path)


class Measure:
    def __init__(self, build, where):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="relation-", dir=where))
        library = pathlib.Path(build).resolve() / "tests" / "libvckpt_internal.so"
        self.lib = tl.load(protolib.Proto(ctypes.CDLL(str(library))).lib)
        out = self.dir / "relation.so"
        subprocess.run(["cc", "-std=gnu17", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{ROOT}",
                        "-o", out,
                        ROOT / "tests" / "bench" / "relation.c", library, f"-Wl,-rpath,{library.parent}"], check=True)
        self.c = ctypes.CDLL(str(out))

    def one(self, source, shard, ranks, repeat):
        """[total us by range], [total us with whole rows], median of each phase by range, (lines, bytes)"""
        ranged, whole, found = [], [], None
        for i in range(repeat + 1):                     # the first is not counted
            for which, out in ((True, ranged), (False, whole)):
                us, got = source.ask(shard, ranks, which)
                out.append(us)
                assert found in (None, got), "the two ways differ"
                found = got
        phases = [statistics.median(us[i] for us in ranged[1:]) for i in range(4)]
        return [sum(us) for us in ranged[1:]], [sum(us) for us in whole[1:]], phases, found

    def close(self):
        shutil.rmtree(self.dir, ignore_errors=True)


def say(bench, name, reference, result):
    ranged, whole, phases, (lines, size, _) = result
    bench.row(f"{name}: {lines} lines, {size >> 20} MiB", reference, ranged, whole, None, unit="us", higher=False)
    bench.notes[f"{name}, by phase"] = ", ".join(f"{p} {us:.0f} us" for p, us in zip(PHASES, phases))
    print(f"    {bench.notes[f'{name}, by phase']}", flush=True)


def rows(bench):
    """Adds its rows to a Bench of tests/bench/run (row, notes, o.repeat, build, dir)."""
    repeat = max(9, bench.o.repeat)
    measure = Measure(bench.build, bench.dir)
    try:
        for pieces in PIECES:
            source = Source(measure, pieces, 1)
            for name, ranks in ((f"{NEED} pieces' worth", max(2, pieces // NEED)), ("1/64 of it", 64)):
                say(bench, f"reshard relation of {pieces:,} stored pieces for a rank that needs {name}",
                    "the row read whole",
                    measure.one(source, source.target(ranks), [0], repeat))
            source.close()
        source = Source(measure, PIECES[-1], 1024)
        for name, ranks in ((f"{NEED} pieces' worth", PIECES[-1] // NEED), ("1/64 of it", 64)):
            shard = source.target(ranks)
            held = source.holders(shard)
            say(bench, f"the same of {PIECES[-1]:,} stored by 1,024 ranks, {name}, {len(held)} parts read",
                "their rows read whole",
                measure.one(source, shard, held, repeat))
        source.close()
    finally:
        measure.close()


class Alone:
    """What rows() needs of a Bench."""

    def __init__(self, options):
        self.o, self.build, self.dir, self.notes = options, options.build, options.dir, {}

    def row(self, name, reference, values, references, bar, unit, higher):
        a, b = statistics.median(values), statistics.median(references)
        print(f"{name}: {a:.0f} {unit} (from {min(values):.0f} to {max(values):.0f}); {reference}: {b:.0f} {unit}",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default=os.environ.get("VCKPT_BUILD", "build"))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--dir")
    rows(Alone(parser.parse_args()))


if __name__ == "__main__":
    main()
