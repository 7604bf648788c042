#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a save of device memory keeps its caller, against the pinned device-to-host bandwidth of the same run.

    tests/bench/run --only gpu [--gib 2]
    tests/bench/gpu.py [--gib 2] [--dir DIR] [--build DIR] by itself, wants libcuda.so.1, python and numpy: JSON

One rank; f32 tensors of 64 MiB, random, two sets that alternate, so that every save is of new data. In each round: the
same bytes by one copy into page-locked memory (the reference), then a save: from submit to staged, and until committed.
The first two rounds warm up."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/unit"), str(ROOT / "tests/gpu")]

from gpulib import Gpu, Unavailable  # noqa: E402
from saverlib import DEVICE, Vckpt  # noqa: E402

ROUNDS, WARM = 8, 2
MIB = 1 << 20
TENSOR = (4096, 4096)
TENSOR_BYTES = 64 * MIB


def bandwidth(gpu, stream, host, sets):
    """Seconds for all tensors of a set, one after another, into page-locked memory."""
    gpu.synchronize(stream)
    begin = time.perf_counter()
    for i, array in enumerate(sets):
        gpu.to_host(stream, host[i * TENSOR_BYTES:][:TENSOR_BYTES], array.ctypes.data, TENSOR_BYTES)
    gpu.synchronize(stream)
    return time.perf_counter() - begin


def save(saver, stream, tensors):
    made = saver.begin(stream=stream)
    for i, array in enumerate(tensors):
        made.tensor(f"model/layers.{i}.weight", array, flags=DEVICE)
    begin = time.perf_counter()
    made.submit()
    submitted = time.perf_counter()
    made.staged()
    staged = time.perf_counter()
    made.committed(600000)
    whole = time.perf_counter() - begin
    made.free()
    return {"submit": submitted - begin, "stall": staged - begin, "whole": whole}


def measure(build, where, gib):
    """{device, bytes, rounds: [{reference, submit, stall, whole}]}; Unavailable where there is no device."""
    gpu, api = Gpu(), Vckpt(build)
    count = max(1, round(gib * 1024 * MIB / TENSOR_BYTES))
    work, rng, rounds = pathlib.Path(tempfile.mkdtemp(prefix="gpu-", dir=where)), numpy.random.default_rng(3), []
    host = gpu.pinned(count * TENSOR_BYTES)
    try:
        sets = [[gpu.array(rng.integers(0, 2**32, TENSOR, "u4")).view("f4") for _ in range(count)] for _ in range(2)]
        stream, saver = gpu.stream(), api.saver(api.store(work / "store"), "run", ring=0, threads=0)
        for number in range(ROUNDS + WARM):
            row = {"reference": bandwidth(gpu, stream, host, sets[number % 2]), **save(saver, stream, sets[number % 2])}
            rounds.append(row)
            if number % 2 and number > 2:  # the disk stays small
                subprocess.run([pathlib.Path(build) / "tools/vckpt/vckpt", "rm", work / "store", f"run/{number - 2}",
                                "-q"], check=False,
                               capture_output=True)
        saver.free()
        return {"device": gpu.name, "bytes": count * TENSOR_BYTES, "rounds": rounds[WARM:]}
    finally:
        gpu.close()
        gpu.unpin(host)
        shutil.rmtree(work, ignore_errors=True)


def rows(bench):
    """For tests/bench/run."""
    try:
        m = measure(bench.build, bench.dir, bench.o.gib)
    except Unavailable as e:
        return bench.skip("stall on a GPU", str(e))
    bench.notes["gpu"] = m["device"]
    rates = {key: [m["bytes"] / MIB / r[key] for r in m["rounds"]] for key in ("reference", "stall", "whole")}
    bench.row(f"stall, {m['bytes'] >> 20} MiB on {m['device']}", "pinned device-to-host copy", rates["stall"],
              rates["reference"], 0.9)
    bench.row(f"whole save, new data, {m['device']}", "pinned device-to-host copy", rates["whole"], rates["reference"],
              None)
    bench.figure(f"submit, {m['device']}", statistics.median(r["submit"] for r in m["rounds"]) * 1e3, "ms", 1)
    return None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gib", type=float, default=2)
    p.add_argument("--dir")
    p.add_argument("--build", default=os.environ.get("VCKPT_BUILD", str(ROOT / "build")))
    o = p.parse_args()
    try:
        m = measure(o.build, o.dir, o.gib)
    except Unavailable as e:
        raise SystemExit(f"skipped: {e}") from e
    m["ratio"] = statistics.median(r["reference"] / r["stall"] for r in m["rounds"])
    m["stall_gbps"] = m["bytes"] / 1e9 / statistics.median(r["stall"] for r in m["rounds"])
    m["reference_gbps"] = m["bytes"] / 1e9 / statistics.median(r["reference"] for r in m["rounds"])
    print(json.dumps(m, indent=1))


if __name__ == "__main__":
    main()
