#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast a processor reorders permuted items (core/device/gather.c), as a save does with device memory that is not in
its own order.

    tests/bench/reorder.py [--build DIR] [--rounds 30]                 wants python and numpy: a table

2 MiB of each kind, as a worker has them before it (memory that was just written), against memcpy of as many bytes; the
best of the rounds, GB/s of bytes reordered, one thread. No device is needed: what comes over the bus first is not
measured here."""
import argparse
import ctypes
import os
import pathlib
import sys
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))

from gatherlib import Gather  # noqa: E402

KINDS = [("matrix transposed", (1024, 0), (1, 0)), ("channels_last", (8, 0, 32, 32), (0, 3, 1, 2)),
         ("four dimensions reversed", (16, 32, 32, 0), (3, 2, 1, 0))]
BYTES = 2 << 20


def rate(call, rounds):
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return BYTES / min(times) / 1e9


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default=os.environ.get("VCKPT_BUILD", str(ROOT / "build")))
    p.add_argument("--rounds", type=int, default=30)
    o = p.parse_args()
    lib = ctypes.CDLL(str(pathlib.Path(o.build) / "tests/libvckpt_internal.so"))
    out, whole = numpy.zeros(BYTES, "u1"), numpy.random.default_rng(1).integers(0, 256, BYTES, "u1")
    print(f"memcpy {rate(lambda: ctypes.memmove(out.ctypes.data, whole.ctypes.data, BYTES), o.rounds):.1f} GB/s")
    for words, shape, order in KINDS:
        for item in (1, 2, 4, 8):
            rest = BYTES // item // int(numpy.prod([n for n in shape if n]))
            view = whole.view(f"V{item}").reshape([n or rest for n in shape]).transpose(order)
            g = Gather.of(view)
            found = rate(lambda g=g: lib.device_gather_host(ctypes.c_void_p(out.ctypes.data), ctypes.byref(g)),
                         o.rounds)
            assert out.tobytes() == numpy.ascontiguousarray(view).tobytes()
            print(f"{words}, {item} byte{'s' * (item > 1)} an item: {found:.1f} GB/s")


if __name__ == "__main__":
    main()
