# SPDX-License-Identifier: Apache-2.0
"""What a save leaves in the page cache: nothing by default, where the filesystem can write past it; all with
keep_cached."""
import ctypes
import mmap
import os

import numpy
import pytest
from safetensors.numpy import save_file

import vckpt as package

MiB = 1 << 20


def resident(path):
    """The share of a file's bytes that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.path.getsize(path)
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        held = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(mapped)
        try:
            assert libc.mincore(ctypes.byref(anchor), ctypes.c_size_t(size), held) == 0, ctypes.get_errno()
        finally:
            del anchor
    return sum(page & 1 for page in held) / pages


def packs(store):
    """The share of the large packs, the least first."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(store / "packs") for name in names]
    return sorted(resident(path) for path in found if os.path.getsize(path) > 8 * MiB)


@pytest.fixture
def array():
    return numpy.random.default_rng(1).integers(0, 256, 32 * MiB, dtype="u1")


def all_kept(make, tmp_path):
    """Does the page cache hold all that make(store) wrote into one of three stores? The kernel takes pages back where
    memory is short."""
    for number in range(3):
        make(tmp_path / f"kept{number}")
        if packs(tmp_path / f"kept{number}")[0] > 0.99:
            return True
    return False


def goes_past(store):
    """Was it written past the cache, which depends on the filesystem?"""
    return packs(store)[0] < 0.3


def test_import(vckpt, tmp_path, array):
    save_file({"w": array}, tmp_path / "model.safetensors")

    def make(store, *words):
        vckpt("init", store)
        vckpt("import", store, "a/1", tmp_path / "model.safetensors", *words)
    assert all_kept(lambda store: make(store, "--keep-cached"), tmp_path)
    make(tmp_path / "past")
    if not goes_past(tmp_path / "past"):
        pytest.skip("this filesystem cannot write past the page cache")


def test_save(tmp_path, array):
    try:
        def make(store, **options):
            package.save(store / "run", {"w": array}, rank=0, world=1, **options)
        assert all_kept(lambda store: make(store, keep_cached=True), tmp_path)
        make(tmp_path / "past", keep_cached=False)
        read = numpy.zeros_like(array)
        package.load(tmp_path / "kept0/run", {"w": read}, rank=0, world=1)
        assert numpy.array_equal(read, array)
    finally:
        package.close()
    if not goes_past(tmp_path / "past"):
        pytest.skip("this filesystem cannot write past the page cache")
