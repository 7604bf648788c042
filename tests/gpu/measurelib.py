# SPDX-License-Identifier: Apache-2.0
"""What the steps of tests/gpu/run share: the rows and notes that they print, times, folders."""
import json
import os
import pathlib
import statistics
import tempfile
import time

import numpy

SMALL = bool(os.environ.get("VCKPT_GPU_SMALL"))
MIB, GIB = (1 << 20, 1 << 30) if not SMALL else (1 << 14, 1 << 24)
BUILD = pathlib.Path(os.environ["VCKPT_BUILD"])


def row(what, value, unit, against=None, reference=None):
    found = {"what": what, "value": value, "unit": unit}
    if reference:
        found.update(against=against, reference=reference)
    print("@row", json.dumps(found), flush=True)


def note(text):
    print("@note", " ".join(str(text).split())[:1000], flush=True)


def skip(text):
    print("@skip", text, flush=True)


def timed(work, *arguments, **options):
    begin = time.perf_counter()
    work(*arguments, **options)
    return time.perf_counter() - begin


def median(work, rounds=3, warm=1):
    return statistics.median([timed(work) for _ in range(rounds + warm)][warm:])


def folder(memory=False):
    return pathlib.Path(tempfile.mkdtemp(dir=os.environ["VCKPT_GPU_MEMORY" if memory else "VCKPT_GPU_WORK"]))


def noise(nbytes):
    return numpy.random.default_rng(3).integers(0, 2**64, nbytes // 8, "u8").view("u1")
