# SPDX-License-Identifier: Apache-2.0
"""Loads that read past the page cache: the same bytes, the same errors, and nothing of the data left in the cache."""
import ctypes as c
import errno
import mmap
import os
import pathlib
import tempfile

import numpy as np
import pytest
from _pytest.tmpdir import tmp_path_factory  # noqa: F401 (O_DIRECT is for disks)

from loadlib import CACHED, DIRECT, REHASH, SKIP_DAMAGED, Opened, described
from saverlib import Failed, api, store  # noqa: F401 (fixtures)

MIB = 1 << 20
libc = c.CDLL(None, use_errno=True)


def save(api, store, arrays):
    saver = api.saver(store, "run")
    saver.save(arrays).committed()
    saver.close()
    saver.free()


def data_packs(store):
    return [p for p in pathlib.Path(store).glob("packs/*/*.pack") if p.stat().st_size > MIB]


def forget(path):
    """Takes the file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached(path):
    """Bytes of the file that are in the page cache. By mmap and mincore."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    pages = (c.c_ubyte * ((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE))()
    libc.mmap.restype = c.c_void_p
    at = libc.mmap(None, c.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, c.c_long(0))
    os.close(fd)
    assert at not in (None, c.c_void_p(-1).value)
    try:
        assert libc.mincore(c.c_void_p(at), c.c_size_t(size), pages) == 0, os.strerror(c.get_errno())
    finally:
        libc.munmap(c.c_void_p(at), c.c_size_t(size))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def reads_past_cache(path):
    """Whether the kernel has cachestat, and O_DIRECT works on this file."""
    pages, span = (c.c_uint64 * 5)(), (c.c_uint64 * 2)(0, 4096)
    fd = os.open(path, os.O_RDONLY)
    knows = libc.syscall(c.c_long(451), fd, span, pages, 0) == 0
    os.close(fd)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    room = mmap.mmap(-1, 4096)
    try:
        return knows and os.preadv(fd, [room], 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def arrays(rng):
    """Raw and encoded, large, small and empty ones; one whose rows are no multiple of anything."""
    return {"model/raw": np.frombuffer(rng.randbytes(6 * MIB), "u1").reshape(1024, -1).copy(),
            "model/odd": np.frombuffer(rng.randbytes(999 * 1501 * 2), "u2").reshape(999, 1501).copy(),
            "model/wide": np.frombuffer(rng.randbytes(3 * MIB), "u4").copy(),
            "model/even": (np.arange(MIB, dtype="f4") % 251).reshape(512, -1),
            "model/small": np.frombuffer(rng.randbytes(96), "u1").copy(),
            "model/none": np.zeros((0, 7), "f4")}


def loaded(api, store, arrays, flags, threads=2, turned=()):
    """What a load puts into memory of its own; of names in `turned` into a transposed place."""
    into = {}
    for name, array in arrays.items():
        room = np.zeros(array.shape[::-1] if name in turned else array.shape, array.dtype)
        into[name] = room.T if name in turned else room
    with Opened(api, store) as step, step.load(threads=threads, flags=flags) as load:
        load.tensors(*(described(name, array) for name, array in into.items()))
        load.start()
        load.wait()
        return into, load.progress()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("flags", [0, DIRECT, CACHED, DIRECT | REHASH], ids=["auto", "direct", "cached", "rehash"])
def test_every_way_brings_the_same_bytes(api, store, arrays, flags, threads):
    save(api, store, arrays)
    for forgotten in (True, False):
        for path in data_packs(store) if forgotten else ():
            forget(path)
        found, progress = loaded(api, store, arrays, flags, threads, turned={"model/odd"})
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, name)
        assert progress.threads <= 4 * threads


def test_what_is_read_past_the_cache_is_not_left_there(api, store, arrays):
    save(api, store, arrays)
    (pack,) = data_packs(store)
    forget(pack)
    if not reads_past_cache(pack) or cached(pack) > pack.stat().st_size // 2:
        pytest.skip("here nothing is read past the page cache: no cachestat, no O_DIRECT, or the cache keeps the file")
    forget(pack)
    loaded(api, store, arrays, DIRECT)
    assert cached(pack) < pack.stat().st_size // 2
    loaded(api, store, arrays, CACHED)
    assert cached(pack) > pack.stat().st_size // 2


def test_where_o_direct_does_not_work(api, arrays):
    """A file system of memory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        api.call("vckpt_store_init", f"{folder}/s".encode())
        save(api, f"{folder}/s", arrays)
        found, _ = loaded(api, f"{folder}/s", arrays, DIRECT)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, name)


@pytest.mark.parametrize("forgotten", [True, False])
def test_damage_is_named(api, store, arrays, forgotten):
    save(api, store, arrays)
    (pack,) = data_packs(store)
    at = pack.read_bytes().index(arrays["model/wide"][1000:1016].tobytes())
    flip(pack, at)
    if forgotten:
        forget(pack)
    with pytest.raises(Failed) as e:
        loaded(api, store, arrays, DIRECT)
    assert e.value.code == -errno.EBADMSG and "model/wide" in e.value.text and pack.stem in e.value.text, e.value.text
    found, _ = loaded(api, store, arrays, DIRECT | SKIP_DAMAGED)
    for name in arrays.keys() - {"model/wide"}:
        np.testing.assert_array_equal(found[name], arrays[name], name)
    flip(pack, at)                              # the store verifies at the end


def test_the_two_ways_exclude_each_other(api, store, arrays):
    save(api, store, {"model/small": arrays["model/small"]})
    with Opened(api, store) as step, pytest.raises(Failed, match="exclude each other"):
        step.load(flags=DIRECT | CACHED)
