# SPDX-License-Identifier: Apache-2.0
"""Any read at any offset of any file gives the bytes that the source has there."""
import errno
import json
import mmap
import os
import random

import numpy as np
import pytest

from .conftest import Mount


@pytest.fixture(scope="module")
def truth(program, sample_store, source, tmp_path_factory):
    # small: pieces come and go
    m = Mount(program, sample_store, tmp_path_factory.mktemp("reference") / "mnt", "cache=8M")
    try:
        step = m / "a" / "step-00000002"
        files = {step / "model.safetensors": source.safetensors} | {step / name: data
                                                                    for name, data in source.blobs.items()}
        for t in json.loads((step / "manifest.json").read_text())["tensors"]:
            data = source.tensors[t["name"]].data
            with open(step / t["file"], "rb") as f:
                head = f.read(4096)
            assert head[:6] == b"\x93NUMPY"
            files[step / t["file"]] = head + data
        yield files
    finally:
        m.end()


def drop(path):
    """Out of the kernel's cache, so that the next read is a request."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def ranges(rng, size, n):
    edges = [0, 1, 4095, 4096, 4097, 16384, 65536, 131072, 1 << 20, size // 2, size - 1, size, size + 1]
    for _ in range(n):
        start = max(0, rng.choice(edges)) if rng.random() < 0.3 else rng.randrange(size + 2)
        length = (rng.choice([1, 2, 511, 4096, 10_000, 131072, 1 << 20, 3 << 20]) if rng.random() < 0.5
                  else rng.randrange(1, 70_000))
        yield start, length


@pytest.mark.parametrize("seed", range(4))
def test_pread(truth, scale, seed):
    rng = random.Random(seed)
    for path, data in truth.items():
        fd = os.open(path, os.O_RDONLY)
        try:
            for start, length in ranges(rng, len(data), scale(12, 2000)):
                if rng.random() < 0.3:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if rng.random() < 0.3:
                    os.posix_fadvise(fd, 0, 0,
                                     rng.choice([os.POSIX_FADV_RANDOM, os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_NORMAL]))
                assert os.pread(fd, length, start) == data[start:start + length], (path, start, length)
        finally:
            os.close(fd)


def test_other_ways_to_read(truth, tmp_path):
    rng = random.Random(9)
    for path, data in truth.items():
        drop(path)
        fd = os.open(path, os.O_RDONLY)
        out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            sent = 0
            while sent < len(data) and (n := os.sendfile(out, fd, sent, len(data) - sent)):
                sent += n
            assert os.pread(out, len(data) + 1, 0) == data
            os.ftruncate(out, 0)
            if data:
                start = rng.randrange(len(data))
                try:
                    n = os.copy_file_range(fd, out, min(100_000, len(data) - start), start, 0)
                    assert os.pread(out, n, 0) == data[start:start + n] and n > 0
                except OSError as e:
                    assert e.errno == errno.EXDEV  # newer kernels: not between filesystems of different types
                with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m:
                    for a, b in ranges(rng, len(data), 10):
                        assert m[a:a + b] == data[a:a + b]
                buffers = [bytearray(3), bytearray(5000), bytearray(1)]
                n = os.preadv(fd, buffers, start)
                assert b"".join(buffers)[:n] == data[start:start + 5004] and n == len(data[start:start + 5004])
            assert os.lseek(fd, 0, os.SEEK_END) == len(data)
        finally:
            os.close(fd)
            os.close(out)


def test_o_direct(truth):
    for path, data in truth.items():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 4 << 20) as buffer:
                for start in range(0, len(data) + 1, 3 << 20):
                    n = os.preadv(fd, [buffer], start)
                    assert buffer[:n] == data[start:start + (4 << 20)], (path, start)
        finally:
            os.close(fd)


def test_a_step_that_was_closed_comes_back_with_the_same_nodes(mount, sample_store):
    m = mount(sample_store, "steps=1")  # one byte: only what is in use stays open
    fds, before = [], {}
    for number in (1, 2, 3):
        path = m / "a" / f"step-{number:08}" / "config.json"
        before[path] = os.stat(path).st_ino
        fds.append(os.open(path, os.O_RDONLY))
    for fd, path in zip(fds, before):
        assert os.fstat(fd).st_ino == before[path]
        assert os.pread(fd, 100, 0) == path.read_bytes()
        os.close(fd)
    for path, ino in before.items():
        assert os.stat(path).st_ino == ino
        assert len(os.listdir(path.parent)) > 4
    assert m.stats()["vckpt_steps_evicted_total"] > 0


def test_many_processes_list_and_read(truth):
    """Look-ups and reads of one directory from several processes at a time."""
    children = []
    for seed in range(6):
        pid = os.fork()
        if pid == 0:
            try:
                rng = random.Random(seed)
                paths = list(truth)
                for _ in range(60):
                    path = rng.choice(paths)
                    os.listdir(path.parent)
                    with open(path, "rb") as f:
                        start = rng.randrange(len(truth[path]) + 1)
                        f.seek(start)
                        if f.read(5000) != truth[path][start:start + 5000]:
                            os._exit(1)
                os._exit(0)
            except BaseException:
                os._exit(2)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6


def test_sizes_are_true(truth):
    for path, data in truth.items():
        assert os.stat(path).st_size == len(data)
        assert np.fromfile(path, np.uint8).tobytes() == data
