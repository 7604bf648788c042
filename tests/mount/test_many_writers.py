# SPDX-License-Identifier: Apache-2.0
"""A step of many writers that is read tensor by tensor: each pack is opened once, or twice, and a piece costs little
more than one read of its pack, however many packs there are. Calls are counted, never timed."""
import collections
import ctypes as c
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from faults import Faults
from protolib import Params, Proto
from storelib import scratch
from test_load_boxes import Step, T, safetensors_data

from .conftest import Mount, Tensor, weights, write_safetensors

WRITERS, TENSORS = 200, 24


@pytest.fixture(scope="module")
def written(lib):
    """A store with one step; each writer has a strip of each tensor, in one piece. Its tensors."""
    path = pathlib.Path(os.path.realpath(scratch())) / "s"
    tensors = [T(f"layer.{i:02}", "f4", (WRITERS, 400), {w: [[(w, 1), (0, 400)]] for w in range(WRITERS)}, i)
               for i in range(TENSORS)]
    Step(Proto(c.CDLL(lib._name)), path, tensors, WRITERS, Params(4 << 10, 16 << 10, 512), header=True)
    yield path, tensors
    shutil.rmtree(path.parent)


def few(opens, reads, seconds, opens_each=2, reads_each=1):
    """reads_each: of a piece. Besides, of each writer two heads, its part, what that says of tensors, and checks. A
    reader that was kept waiting for a second finds the packs closed, so it may open each once more for every second
    that it took; one that opens them for each tensor does so 24 times."""
    assert 2 * WRITERS <= opens <= (opens_each + int(seconds)) * 2 * WRITERS, (opens, seconds)
    assert reads <= WRITERS * (reads_each * TENSORS + 8), reads / WRITERS


class Calls:
    """What a process under interpose.c asked of the packs."""

    def __init__(self, build, store, file):
        self.store, self.file = store, file
        self.preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()

    def env(self, words):
        return {"VCKPT_INTERPOSE": f"root={self.store},reads=1,path=.pack,{words}", "LD_PRELOAD": self.preload,
                "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0"}

    def run(self, *words, limit=None):
        self.file.unlink(missing_ok=True)
        began = time.monotonic()
        done = subprocess.run(words, stdout=subprocess.PIPE, env=os.environ | self.env(f"list={self.file}"),
                              timeout=120, preexec_fn=limit)
        assert done.returncode == 0
        called = collections.Counter(line.split(" ")[0] for line in self.file.read_text().splitlines())
        return (done.stdout, called["open"] + called["openat2"], called["pread"] + called["preadv"],
                time.monotonic() - began)


@pytest.fixture
def calls(build, written, tmp_path):
    return Calls(build, written[0], tmp_path / "calls")


def limited(soft, hard=None):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return limit


def test_export(build, written, calls, tmp_path):
    """Whatever the soft limit is: a command of vckpt takes what the hard one allows."""
    store, tensors = written
    _, *counts = calls.run(build / "tools/vckpt/vckpt", "export", store, "r/1", tmp_path / "out", "--format", "npy",
                           "-q", limit=limited(100))
    for t in tensors:
        assert (tmp_path / "out" / "model" / f"{t.name}.npy").read_bytes().endswith(t.bytes)
    few(*counts)


READ = """
import sys, vckpt
with vckpt.open(sys.argv[1], framework="numpy") as step:
    for name in step:
        sys.stdout.buffer.write(step[name][...].tobytes())
"""


def test_step(written, calls):
    """A load of its own for each tensor, which reads the checks with each."""
    store, tensors = written
    out, *counts = calls.run(sys.executable, "-c", READ, store / "r" / "1", limit=limited(2000))
    assert out == safetensors_data(tensors)
    few(*counts, reads_each=2)


@pytest.fixture
def counted(build, program, tmp_path, monkeypatch):
    """counted(store, kind, option...): a mount of it, and Faults, which counts calls of these kinds. It is started with
    few descriptors, and takes what the hard limit allows. One thread answers and one puts a file together, for threads
    that come at once may each open a pack, or read the checks that they share."""
    starter, made = tmp_path / "start", []
    cpu = min(os.sched_getaffinity(0))
    starter.write_text(f'#!/bin/sh\nulimit -Sn 100 && exec taskset -c {cpu} {program} "$@"\n')
    starter.chmod(0o755)

    def make(store, kind, *options):
        faults = Faults(tmp_path / kind)
        with monkeypatch.context() as patch:
            for name, value in Calls(build, store, None).env(f"memory={tmp_path / kind},calls={kind}").items():
                patch.setenv(name, value)
            made.append(Mount(starter, store, tmp_path / f"mnt{len(made)}", "max_threads=1", *options))
        return made[-1], faults

    yield make
    for m in made:
        m.end()


@pytest.mark.parametrize("tier", ["cached", "auto"])
def test_mount(written, counted, tier):
    store, tensors = written
    counts, began = [], time.monotonic()
    for kind in ("open+openat2", "pread+preadv"):
        m, faults = counted(store, kind, f"tier={tier}")
        for t in tensors:
            assert (m / "r" / "latest" / "model" / f"{t.name}.npy").read_bytes().endswith(t.bytes)
        counts.append(faults.calls())
        m.umount()
    few(*counts, time.monotonic() - began)


@pytest.mark.parametrize("tier", ["cached", "passthrough"])
@pytest.mark.parametrize("kind", ["raw", "lz4"])
def test_large_pieces_through_the_mount(vckpt, store, counted, tmp_path, kind, tier):
    """Checks of many are one read, whether pieces are decoded as they are asked for or the whole file at once. A blob
    is one piece, of which 1 MiB at a time is read."""
    mib, rng = 48, np.random.default_rng(3)
    data = rng.bytes(mib << 20) if kind == "raw" else weights(rng, mib << 19)
    source = tmp_path / "source"
    whole = {"model.safetensors": write_safetensors(source / "model.safetensors", {
        "w": Tensor("BF16", (mib << 7, 4096), data)}), "blob.bin": data}
    (source / "blob.bin").write_bytes(data)
    vckpt("import", store, "r/1", source)
    pieces = {"model.safetensors": vckpt.json("info", store, "r/1/model/w")["pieces"], "blob.bin": mib}
    m, faults = counted(store.resolve(), "pread+preadv", f"tier={tier}")
    for name in whole:
        before = faults.calls()
        assert (m / "r" / "latest" / name).read_bytes() == whole[name]
        calls = faults.calls() - before
        assert pieces[name] >= mib and calls <= 1.05 * pieces[name] + 5, (calls, pieces[name])


def test_few_descriptors(written, calls):
    """With room for a fraction of the packs each is opened once for each tensor, and nothing of it is read again."""
    store, tensors = written
    out, *counts = calls.run(sys.executable, "-c", READ, store / "r" / "1", limit=limited(256, 256))
    assert out == safetensors_data(tensors)
    few(*counts, opens_each=TENSORS, reads_each=2)
