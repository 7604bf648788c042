# SPDX-License-Identifier: Apache-2.0
"""Readers that come while a file is put together get what is there from there, and what is not is decoded for them. A
loader makes that begin."""
import contextlib
import errno
import json
import mmap
import os
import struct
import subprocess
import threading

import numpy as np
import pytest

from proclib import open_files
from test_load_direct import cached, forget, reads_past_cache

from .conftest import Tensor, wait_until, weights, write_safetensors
from .test_passthrough import closed, passes, read

MiB = 1 << 20
READ = "vckpt_assemblies_read_bytes_total"


class SlowStore:
    """What tests/bench/slow_reads.c maps: how fast packs are read, and how much of them was."""

    def __init__(self, path):
        path.write_bytes(bytes(4096))
        with open(path, "r+b") as f:
            self.memory = mmap.mmap(f.fileno(), 0)

    def rate(self, bytes_per_s):
        self.memory[:8] = struct.pack("<Q", bytes_per_s)

    def start(self):
        self.memory[16:24] = bytes(8)

    def bytes_read(self):
        return struct.unpack("<Q", self.memory[16:24])[0]


@pytest.fixture(scope="module")
def large(vckpt, tmp_path_factory):
    """A store whose one step has a file of 70 MiB with tensors of all sizes, and a blob of 40 MiB."""
    folder, rng = tmp_path_factory.mktemp("assembly"), np.random.default_rng(5)
    source = folder / "source"
    source.mkdir()
    tensors = {"a": Tensor("U8", (1, 40 * MiB + 5), rng.bytes(40 * MiB + 5)),
               "b": Tensor("BF16", (2048, 3001), weights(rng, 2048 * 3001)),
               "c": Tensor("F32", (), rng.bytes(4)), "d": Tensor("F32", (0, 7), b"")}
    tensors |= {f"e{i}": Tensor("U8", (MiB + i,), rng.bytes(MiB + i)) for i in range(18)}
    whole = write_safetensors(source / "model.safetensors", tensors)
    blob = rng.bytes(40 * MiB + 77)
    (source / "blob.bin").write_bytes(blob)
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", source)
    return folder / "store", whole, blob


@pytest.fixture
def slow(mount, build, tmp_path, monkeypatch):
    """Mounts of a store whose speed can be set, deaf to a lack of memory that is other tests'."""
    store, processors = SlowStore(tmp_path / "slow"), os.sched_getaffinity(0)

    def make(path, *options, **more):
        with monkeypatch.context() as patch:
            patch.setenv("VCKPT_SLOW_READS", str(tmp_path / "slow"))
            patch.setenv("VCKPT_PRESSURE", str(tmp_path / "short"))
            patch.setenv("LD_PRELOAD", f"{build}/tests/libslow_reads.so {build}/tests/libpressure.so")
            patch.setenv("ASAN_OPTIONS",
                         os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
            os.sched_setaffinity(0, sorted(processors)[:2])     # what is filled at once grows with them (file_fill.c)
            try:
                m = mount(path, "tier=auto", *options, **more)
            finally:
                os.sched_setaffinity(0, processors)
        if not passes(m):
            pytest.skip("no passthrough here")
        return m
    return make, store


def memory_is_given_back(m):
    """What is counted as given up goes a moment later."""
    return wait_until(lambda: not any(d.startswith("/memfd:vckpt") for d in open_files(m.server)))


def being_assembled(m, file, store, rate):
    """Its second open begins that; the store is slow from then on. A descriptor of before the end."""
    read(file)
    assert closed(m)
    store.rate(rate)
    store.start()
    os.close(os.open(file, os.O_RDONLY))
    assert wait_until(lambda: m.stats()["vckpt_assembled_files"] == 1)
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)      # what the first reader left with the kernel
    assert m.stats()["vckpt_assemblies_total"] == 0
    return fd


@pytest.mark.parametrize("name", ["model.safetensors", "blob.bin"])
def test_a_reader_gets_what_is_there_already(slow, large, name):
    make, store = slow
    m = make(large[0])
    file, want = m / "a" / "latest" / name, large[2] if name == "blob.bin" else large[1]
    fd = being_assembled(m, file, store, 20 * MiB)
    half = len(want) // 2
    assert wait_until(lambda: store.bytes_read() > half + 16 * MiB, step=0.001)     # so it has more than half
    store.rate(MiB)                                                                 # and no more for a while
    first = b"".join(os.pread(fd, MiB, at) for at in range(0, half, MiB))
    assert m.stats()["vckpt_assemblies_total"] == 0
    assert m.stats()[READ] >= half - 4 * MiB            # each of its threads may still be at one, which two reads meet
    assert first == want[:len(first)]
    store.rate(0)
    assert wait_until(lambda: m.stats()["vckpt_assemblies_total"] == 1)
    assert store.bytes_read() < 1.2 * len(want)
    # descriptors that are open, and those opened as long as one is, go on being served from there
    before = store.bytes_read()
    for _ in range(2):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert read(file) == want
    assert store.bytes_read() - before < 100_000            # a file's header is read when it is opened
    assert m.stats()["vckpt_passthrough_opens_total"] == 0
    os.close(fd)
    assert closed(m)
    assert read(file) == want and m.stats()["vckpt_passthrough_opens_total"] == 1


def test_what_is_not_there_is_decoded(slow, large):
    """No read waits for it."""
    make, store = slow
    m = make(large[0])
    file, want = m / "a" / "latest" / "model.safetensors", large[1]
    fd = being_assembled(m, file, store, 5 * MiB)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    rng = np.random.default_rng(2)
    for _ in range(20):
        at = int(rng.integers(len(want) * 3 // 4, len(want) - 4096))
        assert os.pread(fd, 4096, at) == want[at:at + 4096]
    assert m.stats()["vckpt_assemblies_total"] == 0 and m.stats()[READ] == 0
    store.rate(0)
    os.close(fd)
    assert wait_until(lambda: m.stats()["vckpt_assemblies_total"] == 1)


def test_many_readers_of_a_file_that_is_put_together(slow, large):
    make, store = slow
    m = make(large[0])
    file, want = m / "a" / "latest" / "model.safetensors", large[1]
    fd, wrong = being_assembled(m, file, store, 150 * MiB), []

    def reader(seed):
        rng, room = np.random.default_rng(seed), len(want) if seed % 2 else 30 * MiB    # some only where it is already
        while m.stats()["vckpt_assemblies_total"] == 0:
            at, n = int(rng.integers(room)), int(rng.integers(1, 3 * MiB))
            if os.pread(fd, n, at) != want[at:at + n]:
                wrong.append((at, n))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
    assert wait_until(lambda: store.bytes_read() > 40 * MiB, step=0.001)
    store.rate(10 * MiB)
    for t in threads:
        t.start()
    assert wait_until(lambda: m.stats()[READ] > 20 * MiB)
    store.rate(0)
    for t in threads:
        t.join()
    os.close(fd)
    assert not wrong


def test_a_damaged_file_is_put_together_as_far_as_it_is_sound(slow, large, tmp_path):
    """And then it is not put together: its readers get an error for what is damaged, and the memory is given back."""
    make, control = slow
    store, want = tmp_path / "store", large[1]
    subprocess.run(["cp", "-r", large[0], store], check=True)
    bad = len(want) - 5 * MiB
    for pack in store.glob("packs/*/*.pack"):
        if (at := pack.read_bytes().find(want[bad:bad + 64])) >= 0:
            with open(pack, "r+b") as f:
                f.seek(at)
                f.write(bytes([want[bad] ^ 1]))
            break
    else:
        pytest.fail("where is it?")
    m = make(store, log=tmp_path / "log")
    file = m / "a" / "latest" / "model.safetensors"
    fd = os.open(file, os.O_RDONLY)
    done = 0
    while done < bad - 2 * MiB:
        done += len(os.pread(fd, MiB, done))
    os.close(fd)
    assert closed(m)
    control.rate(100 * MiB)
    control.start()
    os.close(os.open(file, os.O_RDONLY))
    assert wait_until(lambda: m.stats()["vckpt_assembled_files"] == 1)
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert wait_until(lambda: control.bytes_read() > 40 * MiB, step=0.001)
    control.rate(MiB)
    for at in range(0, 16 * MiB, MiB):
        assert os.pread(fd, MiB, at) == want[at:at + MiB]
    assert m.stats()[READ] > 0 and m.stats()["vckpt_assemblies_failed_total"] == 0
    control.rate(0)
    for at in range(16 * MiB, bad - 2 * MiB, MiB):
        assert os.pread(fd, MiB, at) == want[at:at + MiB]
    with pytest.raises(OSError) as e:
        os.pread(fd, 4096, bad)
    assert e.value.errno == errno.EIO
    assert wait_until(lambda: m.stats()["vckpt_assemblies_failed_total"] == 1)
    assert m.stats()["vckpt_assembled_bytes"] == 0
    assert memory_is_given_back(m)
    os.close(fd)


# ---- loaders ----

EARLY, GIVEN_UP = "vckpt_assemblies_early_total", "vckpt_assemblies_given_up_total"


def copied(data, begin, end):
    """A copy that touches the bytes in their order: the C library copies what is larger than the processor's cache from
    several pages at once, which the mount takes for a loader that takes tensors in an order of its own."""
    return b"".join(data[at:min(at + 65536, end)] for at in range(begin, end, 65536))


@contextlib.contextmanager
def opened_by_a_loader(file):
    """As torch does for safetensors: the header by one mapping, the tensors by another. Gives one tensor by its name,
    copied, as to a device; or its first bytes, without what the kernel reads ahead: that may wait for what is put
    together, and the file is open until then."""
    first = os.open(file, os.O_RDONLY)
    with mmap.mmap(first, 0, prot=mmap.PROT_READ) as head:
        n = int.from_bytes(head[:8], "little")
        places = {name: at["data_offsets"] for name, at in json.loads(head[8:8 + n]).items()}
        second = os.open(file, os.O_RDONLY)
        data = mmap.mmap(second, 0, prot=mmap.PROT_READ)
    os.close(first)

    def tensor(name, most=None):
        begin, end = (8 + n + at for at in places[name])
        data.madvise(mmap.MADV_RANDOM if most else mmap.MADV_NORMAL)
        return copied(data, begin, begin + most if most else end)
    try:
        yield tensor, list(places)
    finally:
        data.close()
        os.close(second)


def alone(m):
    return wait_until(lambda: m.stats()['vckpt_open_files{tier="cached"}'] == 0)


@pytest.mark.parametrize("order", ["of the file", "back", "any"])
def test_a_loader_has_the_file_put_together(slow, large, order, rng):
    make, _ = slow
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    with opened_by_a_loader(file) as (tensor, file_order):
        names = file_order
        if order != "of the file":
            names = names[::-1] if order == "back" else rng.sample(names, len(names))
        found = {name: tensor(name) for name in names}
        assert wait_until(lambda: m.stats()[EARLY] == 1)
    assert large[1].endswith(b"".join(found[name] for name in file_order))
    assert wait_until(lambda: m.stats()["vckpt_assemblies_total"] == 1) and alone(m)
    assert m.stats()["vckpt_decoded_bytes_total"] <= len(large[1]) + 16 * MiB
    # what the kernel kept of it goes before the next one opens it
    assert wait_until(lambda: m.stats()["vckpt_assemblies_pages_dropped_total"] == 1)
    with opened_by_a_loader(file) as (tensor, names):
        assert b"".join(tensor(name) for name in names) == large[1][-len(b"".join(found.values())):]
        assert m.stats()["vckpt_passthrough_opens_total"] == 2


def test_who_is_no_loader(slow, large):
    """A copy, mapped or not; one tensor; the header; many readers of a few bytes of one tensor."""
    make, store = slow
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    with opened_by_a_loader(file):
        pass
    assert alone(m)
    store.start()
    with opened_by_a_loader(file) as (tensor, _):
        assert large[1].count(tensor("e11")) == 1
    assert store.bytes_read() < 16 * MiB
    assert alone(m)
    with opened_by_a_loader(file) as (tensor, _):
        assert len(tensor("a")) == 40 * MiB + 5
    assert alone(m)
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
        for at in range(0, 40 * MiB, 3 * MiB):
            assert data[at:at + 10] == large[1][at:at + 10]
    assert alone(m) and m.stats()[EARLY] == 0
    m.umount()
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    assert read(file) == large[1] and alone(m)
    m.umount()
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
        assert copied(data, 0, len(data)) == large[1]
    assert m.stats()[EARLY] == 0 and m.stats()["vckpt_assembled_files"] == 0


def test_a_loader_that_goes_early(slow, large):
    """What it began is given up, with its memory."""
    make, store = slow
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    with opened_by_a_loader(file) as (tensor, names):
        assert len(tensor("e17", 9)) == 9
        store.rate(MiB)                                                 # a minute, for all of it
        assert len(tensor("b", 9)) == 9 and wait_until(lambda: m.stats()[EARLY] == 1)
    assert alone(m)
    store.rate(0)
    assert wait_until(lambda: m.stats()[GIVEN_UP] == 1)
    stats = m.stats()
    assert stats["vckpt_assembled_bytes"] == stats["vckpt_assemblies_failed_total"] == 0
    assert memory_is_given_back(m)
    assert read(file) == large[1]                                       # and nothing is lost by it
    with opened_by_a_loader(file) as (tensor, names):
        assert large[1].endswith(b"".join(tensor(name) for name in names))


def test_a_loader_reads_what_was_put_together_ahead_of_it(slow, large):
    make, store = slow
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    with opened_by_a_loader(file) as (tensor, _):
        tensor("e17")
        store.rate(40 * MiB)
        store.start()
        tensor("b")
        assert wait_until(lambda: store.bytes_read() > 64 * MiB, step=0.001)            # so it has more than "a"
        store.rate(MiB)                                                                 # and no more for a while
        assert large[1].count(tensor("a")) == 1
        assert m.stats()["vckpt_assemblies_total"] == 0 and m.stats()[READ] > 30 * MiB
        store.rate(0)


def test_a_loader_that_has_read_what_is_before_gets_the_rest_first(slow, large):
    """It is put together from the tensor on that the loader is at, and its beginning comes last."""
    make, store = slow
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"
    with opened_by_a_loader(file) as (tensor, _):
        assert large[1].count(tensor("a")) == 1
        store.rate(40 * MiB)
        store.start()
        tensor("b")
        assert wait_until(lambda: m.stats()[EARLY] == 1)
        assert wait_until(lambda: store.bytes_read() > 56 * MiB, step=0.001)    # 17 for "b", and all from "b" on
        store.rate(MiB)
        before = store.bytes_read()
        assert large[1].endswith(b"".join(tensor(f"e{i}") for i in range(18)))
        assert store.bytes_read() - before < 8 * MiB                            # of 19
        store.rate(0)
    assert wait_until(lambda: m.stats()["vckpt_assemblies_total"] == 1) and alone(m)
    assert read(file) == large[1] and m.stats()["vckpt_passthrough_opens_total"] == 1


def test_the_end_of_a_file_waits_for_no_huge_pages(slow, large, tmp_path):
    """Where the kernel is slow to make them, they are made once the file is complete and the server has no readers."""
    make, store = slow
    (tmp_path / "short.huge").touch()
    m = make(large[0])
    file = m / "a" / "latest" / "model.safetensors"

    def memory():
        return [d for d in open_files(m.server) if d.startswith("/memfd:vckpt")]
    with opened_by_a_loader(file) as (tensor, names):
        tensor("e17", 9)                                                # far from "b", so another tensor for sure
        tensor("b", 9)
        assert wait_until(lambda: m.stats()["vckpt_assemblies_total"] == 1)
        assert large[1].endswith(b"".join(tensor(name) for name in names))
    assert alone(m) and memory()
    assert read(file) == large[1] and m.stats()["vckpt_passthrough_opens_total"] == 1
    assert memory()
    (tmp_path / "short.huge").unlink()
    assert wait_until(lambda: not memory() or m.stats()["vckpt_assembled_reserve_bytes"])


def test_what_is_put_together_takes_no_room_in_the_page_cache(mount, large, tmp_path):
    """It is in memory itself."""
    packs = [p for p in large[0].glob("packs/*/*.pack") if p.stat().st_size > 32 * MiB]
    for p in packs:
        forget(p)
    if not all(reads_past_cache(p) and cached(p) <= p.stat().st_size // 4 for p in packs):
        pytest.skip("here nothing is read past the page cache: no cachestat, no O_DIRECT, or the cache keeps the file")
    m = mount(large[0], "tier=passthrough")
    if not passes(m):
        pytest.skip("no passthrough here")
    for p in packs:
        forget(p)
    assert read(m / "a" / "latest" / "model.safetensors") == large[1]
    assert m.stats()["vckpt_passthrough_opens_total"] == 1
    assert sum(map(cached, packs)) < len(large[1]) // 2


def test_memory_for_the_next_file_is_at_hand(slow, large, tmp_path):
    """As much as the last one had, within a quarter of the bound; it goes when memory is short."""
    make, _ = slow
    size, meminfo = len(large[1]), tmp_path / "short.meminfo"
    meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 9 kB\nMemAvailable: 1048576 kB\n")
    for cache, want in [("1G", size), ("456M", 50 * MiB), ("331M", 75 * MiB - size)]:
        m = make(large[0], f"cache={cache}")
        file = m / "a" / "latest" / "model.safetensors"
        assert m.stats()["vckpt_assembled_reserve_bytes"] == 0
        for _ in range(2):
            read(file)
            assert closed(m)
        assert wait_until(lambda m=m: m.stats()["vckpt_assembled_files"] == 1)
        assert wait_until(lambda m=m, want=want: m.stats()["vckpt_assembled_reserve_bytes"] == want), m.stats()
        if cache == "1G":
            for _ in range(2):
                assert read(m / "a" / "latest" / "blob.bin") == large[2] and closed(m)
            assert wait_until(lambda m=m: m.stats()["vckpt_assembled_files"] == 2)
            assert wait_until(lambda m=m: m.stats()["vckpt_assembled_reserve_bytes"] == len(large[2]))
            meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 9 kB\nMemAvailable: 9 kB\n")
            (tmp_path / "short").touch()
            assert wait_until(lambda m=m: m.stats()["vckpt_assembled_reserve_bytes"] == 0)
            (tmp_path / "short").unlink()
            meminfo.unlink()
            assert memory_is_given_back(m)
        m.umount()
