# SPDX-License-Identifier: Apache-2.0
"""A disk that fails while a pack is being written: past the page cache where the file system can do that, through it
elsewhere."""
import ctypes as c
import errno
import mmap
import os
import subprocess

import numpy
import pytest

from faults import past_the_cache

STARTED = 4     # write-backs of 16 MiB, before the first is waited for
WRITES = 6      # of 4 MiB, then the rest


def numbers(path, mib):
    numpy.save(path, numpy.random.default_rng(1).integers(0, 2**32, (mib // 4, 1 << 20), "u4"))
    return path


@pytest.fixture
def through_the_cache(tmp_path):
    """A file system that takes no O_DIRECT from us."""
    path = tmp_path / "tmpfs"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", path],
                                           capture_output=True).returncode:
        pytest.skip("needs root and a tmpfs mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def cached_pages(path):
    """Of each page of the file: is it in the page cache?"""
    libc, size = c.CDLL(None, use_errno=True), path.stat().st_size
    libc.mmap.restype = c.c_void_p
    libc.mmap.argtypes = [c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_int, c.c_long]
    there = (c.c_ubyte * -(-size // mmap.PAGESIZE))()
    fd = os.open(path, os.O_RDONLY)
    at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    assert at != c.c_void_p(-1).value
    assert libc.mincore(c.c_void_p(at), c.c_size_t(size), there) == 0, os.strerror(c.get_errno())
    libc.munmap(c.c_void_p(at), c.c_size_t(size))
    return [page & 1 for page in there]


def imported(build, vckpt, store, source, words):
    vckpt("init", store)
    env = dict(os.environ, LD_PRELOAD=str(build / "tests/libinterpose.so"),
               VCKPT_INTERPOSE=f"root={store.resolve()},{words}")
    done = subprocess.run([build / "tools/vckpt/vckpt", "import", store, "run", source, "-q"], env=env,
                          capture_output=True, text=True)
    assert vckpt("verify", store, check=False).returncode == 0
    return done


def test_an_error_that_the_wait_takes_is_told(build, vckpt, tmp_path, through_the_cache):
    """Each call by itself: what only starts the writing may fail, a wait may not."""
    outcomes, waits = [], 2
    source = numbers(tmp_path / "w.npy", 96)
    while len(outcomes) <= waits + STARTED:
        store = through_the_cache / "store"
        done = imported(build, vckpt, store, source, f"calls=sync_file_range,do=fail,errno=5,at={len(outcomes) + 1}")
        outcomes.append(done.returncode)
        assert done.returncode == 0 or os.strerror(5) in done.stderr, done
        subprocess.run(["rm", "-r", store], check=True)
    assert not any(outcomes[:STARTED - 1]) and any(outcomes), outcomes


@pytest.mark.parametrize("at", range(1, WRITES + 2))
@pytest.mark.parametrize("error, words", [(errno.EIO, os.strerror(errno.EIO)), (errno.ENOSPC, "is full")],
                         ids=["EIO", "ENOSPC"])
def test_a_write_of_the_thread_that_fails_is_told(build, vckpt, tmp_path, at, error, words):
    source = numbers(tmp_path / "w.npy", 4 * WRITES)
    done = imported(build, vckpt, tmp_path / "store", source, f"calls=pwrite,path=packs,do=fail,errno={error},at={at}")
    assert done.returncode == 1 and words in done.stderr, done
    assert vckpt.json("ls", tmp_path / "store")["runs"] == []


@pytest.mark.parametrize("at", range(1, WRITES + 2))
def test_a_short_write_is_finished(build, vckpt, tmp_path, at):
    """The rest of a direct write begins where no direct write may: it goes through the cache."""
    source = numbers(tmp_path / "w.npy", 4 * WRITES)
    done = imported(build, vckpt, tmp_path / "store", source, f"calls=pwrite,path=packs,do=short,at={at}")
    assert done.returncode == 0, done
    done = vckpt("cat", tmp_path / "store", "run/0/model/w.npy", text=False)
    assert done.stdout.endswith(numpy.load(source).tobytes())


def test_a_file_system_that_promised_too_much(build, vckpt, tmp_path):
    """O_DIRECT is taken, and the first write with it refused."""
    if not past_the_cache(tmp_path):
        pytest.skip("no O_DIRECT here")
    source = numbers(tmp_path / "w.npy", 4 * WRITES)
    done = imported(build, vckpt, tmp_path / "store", source,
                    f"calls=pwrite,path=packs,do=fail,errno={errno.EINVAL},at=1")
    assert done.returncode == 0, done


def test_a_pack_leaves_the_page_cache_alone(vckpt, tmp_path):
    if not past_the_cache(tmp_path):
        pytest.skip("no O_DIRECT here")
    vckpt("init", tmp_path / "store")
    vckpt("import", tmp_path / "store", "run", numbers(tmp_path / "w.npy", 4 * WRITES))
    pack = max((tmp_path / "store" / "packs").rglob("*.pack"), key=lambda p: p.stat().st_size)
    # not by a read that does not wait (RWF_NOWAIT): that may read ahead, and find what it has read
    assert sum(cached_pages(pack)) * mmap.PAGESIZE < 1 << 20
