# SPDX-License-Identifier: Apache-2.0
"""The index: what was put is found, what is damaged is noticed by the check, and nothing done to its file hurts this process."""
import ctypes
import errno
import os
import random
import shutil
import subprocess
import sys

import pytest

ID = bytes(range(16))
DAMAGED = -errno.EBADMSG
READ_ONLY = 1


class Digest(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 32)]


class Place(ctypes.Structure):
    _fields_ = [("digest", Digest), ("offset", ctypes.c_uint64), ("checks", ctypes.c_uint64), ("raw_len", ctypes.c_uint64),
                ("stored_len", ctypes.c_uint64), ("codec", ctypes.c_uint16), ("kind", ctypes.c_uint8), ("pack", ctypes.c_char * 128),
                ("run", ctypes.c_char * 129), ("entry", ctypes.c_uint64), ("manifest", Digest)]


class Stats(ctypes.Structure):
    _fields_ = [("commits", ctypes.c_uint64), ("places", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1000)]


def digest(*what):
    return Digest((ctypes.c_uint8 * 32)(*random.Random(repr(what)).randbytes(32)))


def places_of(commit, count, first=0, packs=3):
    """`count` places whose digests and contents follow from their numbers; only the pack names tell the commit."""
    all = (Place * count)()
    for n in range(count):
        all[n] = Place(digest("piece", first + n), 4096 * n, 99 + n, 1000 + n, 900 + n, 0x201, 1, b"%016x-0-0-model%d" % (commit, n % packs))
    return all


class Index:
    def __init__(self, lib, path, id=ID, max_bytes=0, flags=0):
        self.lib, self.handle = lib, ctypes.c_void_p()
        err = Error()
        rc = lib.index_open(os.fsencode(path), id, ctypes.c_uint64(max_bytes), flags, ctypes.byref(self.handle), ctypes.byref(err))
        if rc != 0:
            assert err.code == rc and err.text
            raise OSError(-rc, err.text.decode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.index_close(self.handle)

    def add(self, commit, places, run=b"run"):
        manifest = digest("commit", commit)
        return self.lib.index_add_commit(self.handle, run, ctypes.c_uint64(commit), ctypes.byref(manifest), places, ctypes.c_uint64(len(places)))

    def remove(self, commit):
        return self.lib.index_remove_commit(self.handle, ctypes.byref(digest("commit", commit)))

    def knows(self, commit):
        self.lib.index_has_commit.restype = ctypes.c_bool
        return self.lib.index_has_commit(self.handle, ctypes.byref(digest("commit", commit)))

    def find(self, n):
        found = Place()
        rc = self.lib.index_find(self.handle, ctypes.byref(digest("piece", n)), ctypes.byref(found))
        assert rc in (0, -errno.ENOENT)
        return found if rc == 0 else None

    def stat(self):
        s = Stats()
        assert self.lib.index_stat(self.handle, ctypes.byref(s)) == 0
        return s


def check(lib, path, id=ID, timeout_ms=20000):
    return lib.index_check(os.fsencode(path), id, timeout_ms)


def right(found, commit, n, place):
    return (bytes(found.digest.bytes) == bytes(digest("piece", n).bytes) and found.entry == commit and found.run == b"run"
            and bytes(found.manifest.bytes) == bytes(digest("commit", commit).bytes)
            and all(getattr(found, f) == getattr(place, f) for f in ("offset", "checks", "raw_len", "stored_len", "codec", "kind", "pack")))


def test_round_trip(lib, tmp_path):
    path = tmp_path / "index"
    assert check(lib, path) == -errno.ENOENT
    a, b = places_of(1, 500), places_of(2, 300, first=400)
    with Index(lib, path) as index:
        assert not index.knows(1) and index.find(0) is None
        assert index.add(1, a) == 0 and index.add(2, b) == 0
        assert index.knows(1) and index.knows(2) and not index.knows(3)
    assert check(lib, path) == 0
    with Index(lib, path, flags=READ_ONLY) as index:
        for n in range(700):
            commit, all, i = (1, a, n) if n < 400 else (2, b, n - 400)
            assert right(index.find(n), commit, n, all[i])
        assert index.find(700) is None
        s = index.stat()
        assert (s.commits, s.places) == (2, 700) and 0 < s.bytes < 1 << 20
        assert index.add(3, a) == -errno.EROFS and index.remove(1) == -errno.EROFS
        assert check(lib, path) == 0  # beside an open environment
        assert right(index.find(3), 1, 3, a[3])


def test_remove(lib, tmp_path):
    with Index(lib, tmp_path / "index") as index:
        assert index.remove(1) == -errno.ENOENT
        assert index.add(1, places_of(1, 50)) == 0 and index.add(2, places_of(2, 50, first=25)) == 0
        assert index.remove(2) == 0 and not index.knows(2)
        assert index.find(10) and not index.find(30) and not index.find(60)
        assert not index.knows(1)  # the removed one had taken places over from it: it is to be added again
        assert index.add(1, places_of(1, 50)) == 0
        assert all(index.find(n).entry == 1 for n in range(50))
        assert index.stat().commits == 1 and index.knows(1)


def test_add_again_is_a_use(lib, tmp_path):
    """Eviction takes the commit that was added the longest ago; adding it again counts."""
    with Index(lib, tmp_path / "index", max_bytes=1 << 20) as index:
        assert index.add(1, places_of(1, 1000, first=0)) == 0
        assert index.add(2, places_of(2, 1000, first=1000)) == 0
        assert index.add(1, places_of(1, 1000, first=0)) == 0
        commit = 3
        while index.find(1000):
            assert index.add(commit, places_of(commit, 1000, first=commit * 1000)) == 0
            commit += 1
            assert commit < 20
        assert index.knows(2) and index.find(0)


def test_eviction_keeps_the_bound(lib, tmp_path):
    path, bound = tmp_path / "index", 1 << 20
    with Index(lib, path, max_bytes=bound) as index:
        for commit in range(1, 41):
            assert index.add(commit, places_of(commit, 700, first=commit * 700)) == 0
            assert index.stat().bytes <= bound
            assert all(index.find(commit * 700 + n).entry == commit for n in (0, 350, 699))
        assert index.find(700) is None and index.knows(1)  # evicted, but known
        assert index.add(99, places_of(99, 20000)) == 0 and index.knows(99) and not index.find(0)  # larger than the bound: known only
        assert index.find(40 * 700)
    assert os.path.getsize(path / "data.mdb") <= 2 * bound
    assert check(lib, path) == 0


def test_many_places_in_batches(lib, tmp_path):
    path, all = tmp_path / "index", places_of(1, 70000)
    with Index(lib, path) as index:
        assert index.add(1, all) == 0
        assert right(index.find(69999), 1, 69999, all[69999]) and right(index.find(0), 1, 0, all[0])
        assert index.stat().bytes / 70000 < 220
    assert check(lib, path) == 0


def test_full_map_evicts(lib, tmp_path):
    """A file that other bounds have filled: the update makes room or fails cleanly."""
    path = tmp_path / "index"
    with Index(lib, path, max_bytes=64 << 20) as index:
        for commit in range(1, 5):
            assert index.add(commit, places_of(commit, 20000, first=commit * 20000)) == 0
    with Index(lib, path, max_bytes=256 << 10) as index:
        assert index.add(9, places_of(9, 300, first=900000)) == 0
        assert index.find(900000).entry == 9 and index.stat().bytes < 1 << 20
    assert check(lib, path) == 0


def test_of_another_store(lib, tmp_path):
    path, other = tmp_path / "index", bytes(16)
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    assert check(lib, path, other) == DAMAGED
    for flags in (0, READ_ONLY):
        with pytest.raises(OSError) as e:
            Index(lib, path, other, flags=flags)
        assert e.value.errno == errno.EBADMSG
    assert check(lib, path) == 0


def test_once_a_process(lib, tmp_path):
    with Index(lib, tmp_path / "index"):
        with pytest.raises(OSError) as e:
            Index(lib, tmp_path / "index", flags=READ_ONLY)
        assert e.value.errno == errno.EBUSY
    with Index(lib, tmp_path / "index"):
        pass


def test_reader_sees_another_process_write(lib, build, tmp_path):
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    with Index(lib, path, flags=READ_ONLY) as index:
        code = ("import ctypes, sys, test_index as t\n"
                "with t.Index(ctypes.CDLL(sys.argv[1]), sys.argv[2], max_bytes=32 << 20) as i: assert i.add(2, t.places_of(2, 40000, first=10)) == 0")
        subprocess.run([sys.executable, "-c", code, str(lib._name), str(path)], check=True,
                       env={**os.environ, **({"LD_PRELOAD": os.environ["VCKPT_PRELOAD"]} if "VCKPT_PRELOAD" in os.environ else {})})
        assert index.find(0).entry == 1 and index.find(40009).entry == 2


def test_links_are_refused(lib, tmp_path):
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    os.rename(path / "data.mdb", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path / "data.mdb")
    before = (tmp_path / "elsewhere").read_bytes()
    assert check(lib, path) == DAMAGED
    with pytest.raises(OSError):
        Index(lib, path)
    lib.index_delete(os.fsencode(path))
    assert not os.path.lexists(path / "data.mdb") and (tmp_path / "elsewhere").read_bytes() == before


# ---- damage ----

@pytest.fixture(scope="module")
def sound(lib, tmp_path_factory):
    """A small index with several commits, free pages and two levels, and what it answers."""
    path = tmp_path_factory.mktemp("sound") / "index"
    with Index(lib, path, max_bytes=4 << 20) as index:
        for commit in range(1, 7):
            assert index.add(commit, places_of(commit, 120, first=commit * 60)) == 0
        def ask():
            return {n: bytes(found) if (found := index.find(n)) else None for n in range(60, 600, 4)}
        # LMDB goes back to the snapshot before the last one when the newer of its two descriptions is damaged: its answers are old hints
        before = ask()
        assert index.remove(3) == 0
        after = ask()
        assert sum(a is not None for a in after.values()) > 80
        answers = {n: {before[n], after[n], None} for n in after}
    assert check(lib, path) == 0
    return path, answers


def damaged_copy(sound, tmp_path):
    path = tmp_path / "index"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    shutil.copyfile(sound[0] / "data.mdb", path / "data.mdb")
    return path


def sound_and_right(lib, path, answers):
    """True: the check says sound, and then every answer is right or none, and the index can be written. False: it says damaged."""
    rc = check(lib, path)
    assert rc in (0, DAMAGED), rc
    if rc != 0:
        return False
    with Index(lib, path, max_bytes=4 << 20) as index:
        for n, want in answers.items():
            found = index.find(n)
            assert (bytes(found) if found else None) in want
        assert index.add(77, places_of(77, 100, first=10000)) == 0
        assert index.find(10050).entry == 77
    assert check(lib, path) == 0
    return True


def test_bit_flips(lib, sound, tmp_path, scale):
    size, rng, verdicts = os.path.getsize(sound[0] / "data.mdb"), random.Random(5), []
    for n in range(scale(40, 600)):
        path = damaged_copy(sound, tmp_path)
        # the start of pages, where structure lies, as often as anywhere else
        at = rng.randrange(size) if n % 2 else rng.randrange(size // 4096) * 4096 + rng.randrange(160)
        with open(path / "data.mdb", "r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1 << rng.randrange(8)]))
        verdicts.append(sound_and_right(lib, path, sound[1]))
    assert verdicts.count(False) > len(verdicts) // 10  # most pages of this file are free; it does notice, and slack may stay unseen
    assert verdicts.count(True) > 5


def test_overwritten_ranges(lib, sound, tmp_path, scale):
    size, rng = os.path.getsize(sound[0] / "data.mdb"), random.Random(6)
    for n in range(scale(15, 100)):
        path = damaged_copy(sound, tmp_path)
        with open(path / "data.mdb", "r+b") as f:
            f.seek(rng.randrange(size))
            f.write(rng.choice([rng.randbytes, bytes, lambda k: b"\xff" * k])(rng.choice([4, 64, 4096])))
        sound_and_right(lib, path, sound[1])


def test_pages_moved(lib, sound, tmp_path, scale):
    """Whole pages that are sound in themselves, at the wrong place or of an older time."""
    size, rng = os.path.getsize(sound[0] / "data.mdb"), random.Random(7)
    for n in range(scale(15, 100)):
        path = damaged_copy(sound, tmp_path)
        with open(path / "data.mdb", "r+b") as f:
            f.seek(rng.randrange(size // 4096) * 4096)
            page = f.read(4096)
            f.seek(rng.randrange(size // 4096) * 4096)
            f.write(page)
        sound_and_right(lib, path, sound[1])


def test_truncated(lib, sound, tmp_path):
    size = os.path.getsize(sound[0] / "data.mdb")
    said = {}
    for end in list(range(0, size + 1, 4096)) + [1, 100, 4097, size - 1]:
        path = damaged_copy(sound, tmp_path)
        os.truncate(path / "data.mdb", end)
        said[end] = sound_and_right(lib, path, sound[1])
    assert said[size] and not any(said[end] for end in said if end < size // 2)


def test_random_bytes(lib, tmp_path):
    path, rng = tmp_path / "index", random.Random(8)
    path.mkdir()
    for size in (1, 4095, 4096, 8192, 65536, 1 << 20):
        (path / "data.mdb").write_bytes(rng.randbytes(size))
        assert check(lib, path) == DAMAGED
        with pytest.raises(OSError):
            Index(lib, path, flags=READ_ONLY)


def test_lock_file_damaged(lib, sound, tmp_path):
    for content in (b"", bytes(100), random.Random(9).randbytes(8192), b"\xff" * 100000):
        path = damaged_copy(sound, tmp_path)
        (path / "lock.mdb").write_bytes(content)
        assert sound_and_right(lib, path, sound[1])


def test_deleted_and_made_again(lib, sound, tmp_path):
    path = damaged_copy(sound, tmp_path)
    (path / "kept").write_text("mine")
    lib.index_delete(os.fsencode(path))
    assert os.listdir(path) == ["kept"] and check(lib, path) == -errno.ENOENT
    lib.index_delete(os.fsencode(tmp_path / "none"))
    with Index(lib, path) as index:
        assert index.find(60) is None and index.add(1, places_of(1, 10)) == 0
    assert check(lib, path) == 0


def test_a_check_that_hangs_ends(lib, tmp_path):
    """A directory lock that nobody gives back: the check answers within its time-out."""
    import fcntl
    import time
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    start = time.monotonic()
    assert check(lib, path, timeout_ms=300) == DAMAGED
    assert time.monotonic() - start < 3
    os.close(fd)
    assert check(lib, path) == 0
