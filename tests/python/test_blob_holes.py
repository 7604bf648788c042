# SPDX-License-Identifier: Apache-2.0
"""A blob whose length is a lie, or whose bytes are holes of a sparse file: who takes it into memory looks first, and
who streams it needs no memory for it."""
import contextlib
import ctypes
import errno
import os
import pathlib
import re
import struct
import subprocess
import tracemalloc

import numpy as np
import pytest

import storelow
import vckpt as package
from forgelib import Forge, Message
from vckpt import arrays

MIB, TIB = 1 << 20, 1 << 40


def grow(rows, at, size):
    """A pack table's row `at` says that the pack has `size` bytes."""
    rows = bytearray(rows)
    struct.pack_into("<Q", rows, 32 * at + 16, size)
    return bytes(rows)


def lengthen(lib, store, length, zeros, scratch):
    """The one blob of run/1 becomes `length` bytes long, nearly all of them holes; `zeros`: the numbers of the blocks
    whose checks say that they are zeros."""
    forge = Forge(lib, store, "run")
    blob = Message(forge.part.get(9))
    ref = bytearray(blob.get(4))
    number, = struct.unpack_from("<I", ref, 64)
    name = forge.pack.replace("-meta", "-blobs")
    path = next(store.rglob(f"{name}.pack"))
    old, checks = path.stat().st_size, 4096 + length
    size = checks + 8 * (length // storelow.BLOCK) + 4096
    struct.pack_into("<QQQQIHB", ref, 32, 4096, checks, length, length, number, 0, 2)
    blob.set(3, length)
    blob.set(4, bytes(ref))
    forge.part.set(9, blob.encode())
    for message, field in (forge.part, 7), (forge.manifest, 13):
        packs = Message(message.get(field))
        rows = packs.get(3)
        at = next(i for i in range(len(rows) // 32) if struct.unpack_from("<Q", rows, 32 * i + 16)[0] == old)
        packs.set(3, grow(rows, at, size))
        message.set(field, packs.encode())
    forge.manifest.set(16, forge.manifest.get(16) + size - old)
    forge.commit.set(8, forge.commit.get(8) + size - old)
    os.chmod(path, 0o644)
    with open(path, "r+b") as file, contextlib.suppress(OSError):
        os.truncate(file.fileno(), size)
        digest, block = storelow.Digest.from_buffer_copy(ref[:32]), bytes(storelow.BLOCK)
        lib.base_block_check.restype = ctypes.c_uint64
        for number in zeros:
            check = lib.base_block_check(ctypes.byref(digest), ctypes.c_uint64(number), block,
                                         ctypes.c_size_t(len(block)))
            os.pwrite(file.fileno(), struct.pack("<Q", check), checks + 8 * number)
        if zeros:
            os.pwrite(file.fileno(), bytes(100_352), 4096)      # over what was stored
    if path.stat().st_size != size:
        pytest.skip(f"the file system takes no file of {size} bytes")
    forge.done(scratch)


@pytest.fixture
def lying(vckpt, lib, store, tmp_path):
    def make(length, zeros=()):
        source = tmp_path / "source"
        source.mkdir()
        (source / "big").write_bytes(np.random.default_rng(1).bytes(100_000))
        np.save(tmp_path / "w.npy", np.arange(5, dtype="f4"))
        vckpt("import", store, "run/1", tmp_path / "w.npy", source, "--no-index")
        lengthen(lib, store, length, zeros, tmp_path / "scratch")
        return store
    return make


@pytest.mark.parametrize("length", [128 * MIB, TIB])
def test_nothing_is_taken_for_bytes_that_are_not_there(lying, length):
    store = lying(length)
    with package.open(f"{store}/run/1") as step:
        assert [(b.name, b.bytes) for b in step.blobs()] == [("big", length)]
        tracemalloc.start()
        try:
            with pytest.raises(package.Damaged, match="blob big: pack .*-blobs, object at offset 4096, block 0"):
                step.blob("big")
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()


def test_cat_of_bytes_that_are_not_there(vckpt, lying):
    store = lying(TIB)
    done = vckpt("cat", store, "run/1/big", check=False, timeout=60)
    assert done.returncode > 0 and "blob big" in done.stderr and len(done.stdout) <= 64 * MIB, done.stderr


def test_a_blob_of_zeros_that_are_not_stored(vckpt, lying):
    """All its checks are right: it is streamed."""
    length = 512 * MIB
    store = lying(length, range(length // storelow.BLOCK))
    with subprocess.Popen([vckpt.path, "cat", store, "run/1/big"], stdout=subprocess.PIPE,
                          preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})) as child:
        found = resident = 0
        while part := child.stdout.read(4 * MIB):
            assert part.count(0) == len(part)
            found += len(part)
            # not ru_maxrss, which counts what the process was forked from
            status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
            resident = max([resident, *(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)])
    assert (child.returncode, found) == (0, length)
    if "asan" not in os.environ.get("VCKPT_PRELOAD", ""):
        assert 0 < resident < length // 1024 // 2


def test_more_than_the_memory(lying):
    """Both ends are there: it is refused for its length."""
    with open("/proc/meminfo") as file:
        if int(re.search(r"MemTotal:\s+(\d+)", file.read())[1]) << 10 > TIB:
            pytest.skip("this machine has a terabyte of memory")
    store = lying(TIB, (0, TIB // storelow.BLOCK - 1))
    with package.open(f"{store}/run/1") as step:
        with pytest.raises(package.Error, match=f"run/1: blob big: it has {TIB} bytes, and this process could take "
                                                "[0-9]+ now: read it with vckpt cat") as caught:
            step.blob("big")
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.skipif("asan" in os.environ.get("VCKPT_PRELOAD", ""), reason="the sanitizer ends such a process")
def test_an_array_that_numpy_cannot_make():
    for shape in ((1 << 62, 1 << 62), (1 << 46, 1 << 10)):
        with pytest.raises(package.Error, match="^tensor model/w: it has [0-9]+ bytes, and there is no memory for"):
            arrays.empty(shape, 12, "tensor model/w")
    assert arrays.empty((), 12, "").shape == () and arrays.empty((2, 0), 12, "").shape == (2, 0)
