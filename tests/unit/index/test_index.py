# SPDX-License-Identifier: Apache-2.0
"""The index: what was put is found, what is damaged is noticed when it is opened, and nothing done to its file hurts
this process."""
import ctypes
import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import threading
import time

import pytest

from proclib import open_files

ID = bytes(range(16))
DAMAGED = -errno.EBADMSG
READ_ONLY, ANEW, BRIEFLY = 1, 2, 4


class Digest(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 32)]


class Place(ctypes.Structure):
    _fields_ = [("digest", Digest), ("offset", ctypes.c_uint64), ("checks", ctypes.c_uint64),
                ("raw_len", ctypes.c_uint64),
                ("stored_len", ctypes.c_uint64), ("codec", ctypes.c_uint16), ("kind", ctypes.c_uint8),
                ("pack", ctypes.c_char * 128),
                ("run", ctypes.c_char * 129), ("own", ctypes.c_bool), ("entry", ctypes.c_uint64), ("manifest", Digest)]


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
        all[n] = Place(digest("piece", first + n), 4096 * n, 99 + n, 1000 + n, 900 + n, 0x201, 1,
                       b"%016x-0-0-model%d" % (commit, n % packs))
    return all


class Index:
    def __init__(self, lib, path, id=ID, max_bytes=0, flags=0):
        self.lib, self.handle, self.flags = lib, ctypes.c_void_p(), flags
        err = Error()
        rc = lib.index_open(-1, os.fsencode(path), id, ctypes.c_uint64(max_bytes), flags, ctypes.byref(self.handle),
                            ctypes.byref(err))
        if rc != 0:
            assert err.code == rc and err.text
            raise OSError(-rc, err.text.decode())

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if not failed and not self.flags & READ_ONLY:
            assert self.lib.index_publish(self.handle) == 0
        self.lib.index_close(self.handle)

    def add(self, commit, places, run=b"run"):
        manifest = digest("commit", commit)
        return self.lib.index_add_commit(self.handle, run, ctypes.c_uint64(commit), ctypes.byref(manifest), places,
                                         ctypes.c_uint64(len(places)))

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


def check(lib, path, id=ID):
    try:
        with Index(lib, path, id, flags=READ_ONLY):
            return 0
    except OSError as e:
        return -e.errno


def right(found, commit, n, place):
    return (bytes(found.digest.bytes) == bytes(digest("piece", n).bytes) and found.entry == commit and
            found.run == b"run"
            and bytes(found.manifest.bytes) == bytes(digest("commit", commit).bytes)
            and all(getattr(found, f) == getattr(place, f)
                    for f in ("offset", "checks", "raw_len", "stored_len", "codec", "kind", "pack")))


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
        assert check(lib, path) == 0  # beside an open one
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
        # larger than the bound: known only
        assert index.add(99, places_of(99, 20000)) == 0 and index.knows(99) and not index.find(0)
        assert index.find(40 * 700)
    assert os.path.getsize(path / "index.mdb") <= 2 * bound
    assert check(lib, path) == 0


def test_many_places_in_batches(lib, tmp_path):
    path, all = tmp_path / "index", places_of(1, 30000)
    with Index(lib, path) as index:
        assert index.add(1, all) == 0
        assert right(index.find(29999), 1, 29999, all[29999]) and right(index.find(0), 1, 0, all[0])
        assert index.stat().bytes / 30000 < 220
    assert check(lib, path) == 0


def test_full_map_evicts(lib, tmp_path):
    """A file that other bounds have filled: the update makes room or fails cleanly."""
    path = tmp_path / "index"
    with Index(lib, path, max_bytes=64 << 20) as index:
        for commit in range(1, 5):
            assert index.add(commit, places_of(commit, 5000, first=commit * 5000)) == 0
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
    with Index(lib, path, other, flags=ANEW) as index:
        assert index.find(0) is None
    assert check(lib, path, other) == 0 and check(lib, path) == DAMAGED


def test_many_readers_and_one_writer(lib, tmp_path):
    """Readers keep what they opened, whatever writers do meanwhile; a writer waits for the one before, and goes on from
    what that published."""
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    with Index(lib, path, flags=READ_ONLY) as reader, Index(lib, path, flags=READ_ONLY) as same:
        first, done = Index(lib, path), []

        def second():
            with Index(lib, path) as index:
                done.append(index.find(25).entry)
                assert index.add(3, places_of(3, 10, first=30)) == 0
        thread = threading.Thread(target=second)
        thread.start()
        assert first.add(2, places_of(2, 10, first=20)) == 0
        with Index(lib, path, flags=READ_ONLY) as index:  # not published yet
            assert index.find(0) and not index.find(25)
        time.sleep(0.05)
        assert not done
        with first:
            pass
        thread.join()
        assert done == [2]
        assert reader.find(0).entry == same.find(0).entry == 1 and not reader.find(25) and not same.find(35)
        assert first.lib.index_publish(reader.handle) == -errno.EROFS
    with Index(lib, path, flags=READ_ONLY) as index:
        assert [index.find(n).entry for n in (0, 25, 35)] == [1, 2, 3]


def test_what_is_not_published_is_gone(lib, tmp_path):
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    index = Index(lib, path)
    assert index.add(2, places_of(2, 10, first=20)) == 0 and os.path.exists(path / "index.mdb.new")
    lib.index_close(index.handle)
    assert os.listdir(path) == ["index.mdb"]
    with Index(lib, path, flags=READ_ONLY) as index:
        assert index.find(0) and not index.find(25) and index.stat().commits == 1


def test_what_was_put_in_its_place_is_not_published(lib, tmp_path):
    """A file of this user that takes the name of the one a writer made is neither sealed nor becomes the index."""
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    for how in ("replaced", "gone"):
        index = Index(lib, path)
        assert index.add(2, places_of(2, 10, first=20)) == 0
        (tmp_path / "mine").write_bytes(b"mine")
        if how == "replaced":
            os.rename(tmp_path / "mine", path / "index.mdb.new")
        else:
            os.unlink(path / "index.mdb.new")
        assert lib.index_publish(index.handle) == -errno.ESTALE
        assert how == "gone" or (path / "index.mdb.new").read_bytes() == b"mine"
        lib.index_close(index.handle)
        with Index(lib, path, flags=READ_ONLY) as index:
            assert index.find(0) and not index.find(25)


def test_the_file_that_was_checked_is_the_one_that_is_read(lib, tmp_path):
    """Another file takes its name while it is being checked: pages without a seal, which nobody may read."""
    path, other = tmp_path / "index", tmp_path / "other"
    with Index(lib, other) as index:
        assert index.add(7, places_of(7, 10, first=900000)) == 0
    unsealed = (other / "index.mdb").read_bytes()[:-24]
    with Index(lib, path) as index:
        assert index.add(1, places_of(1, 30000)) == 0
    for n in range(8):
        os.link(path / "index.mdb", tmp_path / "kept")
        (tmp_path / "unsealed").write_bytes(unsealed)
        opened = []

        def read():
            try:
                opened.append(Index(lib, path, flags=READ_ONLY))
            except OSError as e:
                assert e.errno == errno.EBADMSG
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.0005 * n)
        os.rename(tmp_path / "unsealed", path / "index.mdb")
        thread.join()
        for index in opened:
            assert index.find(29999) and not index.find(900000)
            lib.index_close(index.handle)
        os.rename(tmp_path / "kept", path / "index.mdb")
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


CHILD = ("import ctypes, sys; import test_index as t\n"
         "lib = ctypes.CDLL(sys.argv[1])\n"
         "with t.Index(lib, sys.argv[2], max_bytes=32 << 20) as i:\n"
         "    assert i.add(int(sys.argv[3]), t.places_of(int(sys.argv[3]), int(sys.argv[4]), first=10)) == 0\n"
         "    print('added', flush=True)\n")


def child(lib, path, commit, count):
    env = {**os.environ, **({"LD_PRELOAD": os.environ["VCKPT_PRELOAD"]} if "VCKPT_PRELOAD" in os.environ else {})}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(lib._name), str(path), str(commit), str(count)], env=env,
                            stdout=subprocess.PIPE)


def test_reader_beside_another_process(lib, build, tmp_path):
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    with Index(lib, path, flags=READ_ONLY) as index:
        writer = child(lib, path, 2, 40000)
        assert writer.communicate()[0] and writer.returncode == 0
        assert index.find(0).entry == 1 and index.find(40009) is None
    with Index(lib, path, flags=READ_ONLY) as index:
        assert index.find(0).entry == 1 and index.find(40009).entry == 2


def test_a_writer_that_dies(lib, build, tmp_path, scale):
    """Killed at any moment it leaves the index before it or the one that it made, sound, and the next writer goes on
    from there."""
    path, rng, stood = tmp_path / "index", random.Random(3), set()
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    for n in range(scale(4, 20)):
        commit = 2 + n
        writer = child(lib, path, commit, 3000)
        writer.stdout.readline()
        time.sleep(rng.random() * 0.02)
        writer.kill()
        writer.wait()
        assert check(lib, path) == 0
        with Index(lib, path, flags=READ_ONLY) as index:
            assert index.find(0).entry == 1 and index.knows(commit) == (index.find(2000) is not None and
                                                                        index.find(2000).entry == commit)
            stood.add(index.knows(commit))
    with Index(lib, path) as index:
        assert index.add(77, places_of(77, 10, first=90000)) == 0
    assert os.listdir(path) == ["index.mdb"] and stood


def test_links_are_refused(lib, tmp_path):
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    os.rename(path / "index.mdb", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path / "index.mdb")
    os.symlink(tmp_path / "elsewhere", path / "index.mdb.new")
    before = (tmp_path / "elsewhere").read_bytes()
    assert check(lib, path) == DAMAGED
    with pytest.raises(OSError):
        Index(lib, path)
    with Index(lib, path, flags=ANEW) as index:
        assert index.find(0) is None and index.add(2, places_of(2, 10)) == 0
    assert (check(lib, path) == 0 and not os.path.islink(path / "index.mdb") and
            (tmp_path / "elsewhere").read_bytes() == before)


# ---- damage ----

@pytest.fixture(scope="module")
def sound(lib, tmp_path_factory):
    """A small index with several commits, free pages and two levels, and what it answers."""
    path = tmp_path_factory.mktemp("sound") / "index"
    with Index(lib, path, max_bytes=4 << 20) as index:
        for commit in range(1, 7):
            assert index.add(commit, places_of(commit, 120, first=commit * 60)) == 0
        assert index.remove(3) == 0
        answers = {n: bytes(found) if (found := index.find(n)) else None for n in range(60, 600, 4)}
        assert sum(a is not None for a in answers.values()) > 80
    assert check(lib, path) == 0
    return path, answers


def damaged_copy(lib, sound, tmp_path):
    """A copy, sealed as the file that it is."""
    path = tmp_path / "index"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    with open(path / "index.mdb", "w+b") as f:
        f.write((sound[0] / "index.mdb").read_bytes()[:-24])
        f.flush()
        assert lib.index_seal(f.fileno()) == 0
    return path


def sound_and_right(lib, path, answers):
    """True: it opens, every answer is right, and it can be written. False: it is refused as damaged, and can be made
    anew."""
    rc = check(lib, path)
    assert rc in (0, DAMAGED), rc
    if rc != 0:
        with pytest.raises(OSError) as e:
            Index(lib, path)
        assert e.value.errno == errno.EBADMSG
    with Index(lib, path, max_bytes=4 << 20, flags=ANEW if rc else 0) as index:
        for n, want in answers.items():
            found = index.find(n)
            assert (bytes(found) if found else None) == (None if rc else want)
        assert index.add(77, places_of(77, 100, first=10000)) == 0
        assert index.find(10050).entry == 77
    assert check(lib, path) == 0
    return rc == 0


def test_places_that_are_ones_own(lib, tmp_path):
    """They stay so where another commit takes over the very object, and not where it names another place for it."""
    path, own = tmp_path / "index", places_of(1, 10)
    for place in own:
        place.own = True
    def has_own(index, commit):
        lib.index_has_own.restype = ctypes.c_bool
        return lib.index_has_own(index.handle, ctypes.byref(digest("commit", commit)))
    with Index(lib, path) as index:
        assert index.add(1, own) == 0 and has_own(index, 1)
        assert index.add(2, places_of(1, 5)) == 0 and not has_own(index, 2)
        assert index.add(3, places_of(3, 2)) == 0 and not has_own(index, 3) and not has_own(index, 4)
        assert [(index.find(n).entry, index.find(n).own) for n in (0, 1, 2, 4, 5, 9)] == [
            (3, False), (3, False), (2, True), (2, True), (1, True), (1, True)]
        assert index.remove(3) == 0 and not index.knows(2) and index.find(0) is None
        assert index.add(1, places_of(1, 10)) == 0      # again, by a process that does not know whose it is
        assert has_own(index, 1) and all(index.find(n).own and index.find(n).entry == 1 for n in range(10))


def test_bit_flips(lib, sound, tmp_path, scale):
    """Every one is noticed, in the seal too."""
    size, rng = os.path.getsize(sound[0] / "index.mdb"), random.Random(5)
    places = [size - 24 + n for n in range(24)]
    for n in range(scale(40, 600)):
        # the start of pages, where structure lies, as often as anywhere else
        places.append(rng.randrange(size) if n % 2 else rng.randrange(size // 4096) * 4096 + rng.randrange(160))
    for at in places:
        path = damaged_copy(lib, sound, tmp_path)
        with open(path / "index.mdb", "r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1 << rng.randrange(8)]))
        assert not sound_and_right(lib, path, sound[1]), at
    assert sound_and_right(lib, damaged_copy(lib, sound, tmp_path), sound[1])


def test_overwritten_ranges(lib, sound, tmp_path, scale):
    size, rng = os.path.getsize(sound[0] / "index.mdb"), random.Random(6)
    for n in range(scale(15, 100)):
        path = damaged_copy(lib, sound, tmp_path)
        before = (path / "index.mdb").read_bytes()
        with open(path / "index.mdb", "r+b") as f:
            f.seek(rng.randrange(size))
            f.write(rng.choice([rng.randbytes, bytes, lambda k: b"\xff" * k])(rng.choice([4, 64, 4096])))
        same = (path / "index.mdb").read_bytes() == before
        assert sound_and_right(lib, path, sound[1]) == same


def test_pages_moved(lib, sound, tmp_path, scale):
    """Whole pages that are sound in themselves, at the wrong place or of an older time."""
    size, rng = os.path.getsize(sound[0] / "index.mdb"), random.Random(7)
    for n in range(scale(15, 100)):
        path = damaged_copy(lib, sound, tmp_path)
        before = (path / "index.mdb").read_bytes()
        with open(path / "index.mdb", "r+b") as f:
            f.seek(rng.randrange(size // 4096) * 4096)
            page = f.read(4096)
            f.seek(rng.randrange(size // 4096) * 4096)
            f.write(page)
        same = (path / "index.mdb").read_bytes() == before
        assert sound_and_right(lib, path, sound[1]) == same


def test_cut_and_grown(lib, sound, tmp_path):
    data = (sound[0] / "index.mdb").read_bytes()
    for end in [*range(0, len(data), 4096), 1, 23, 24, 100, 4097, len(data) - 24, len(data) - 1]:
        path = damaged_copy(lib, sound, tmp_path)
        os.truncate(path / "index.mdb", end)
        assert not sound_and_right(lib, path, sound[1]), end
    for more in (b"\0", data[-24:], data):
        path = damaged_copy(lib, sound, tmp_path)
        (path / "index.mdb").write_bytes(data + more)
        # two whole ones after another are damaged, too: the length in the seal is that of one
        assert not sound_and_right(lib, path, sound[1])


def test_random_bytes(lib, tmp_path):
    path, rng = tmp_path / "index", random.Random(8)
    path.mkdir()
    for size in (1, 4095, 4096, 8192, 65536, 1 << 20):
        (path / "index.mdb").write_bytes(rng.randbytes(size))
        assert check(lib, path) == DAMAGED
        with pytest.raises(OSError):
            Index(lib, path)


def test_not_a_file(lib, tmp_path):
    """Neither hangs nor is followed; a directory of this name is left alone, and there is no index then."""
    path = tmp_path / "index"
    path.mkdir()
    os.mkfifo(path / "index.mdb")
    assert check(lib, path) == DAMAGED
    with Index(lib, path, flags=ANEW) as index:
        assert index.add(1, places_of(1, 10)) == 0
    assert check(lib, path) == 0
    os.unlink(path / "index.mdb")
    (path / "index.mdb").mkdir()
    assert check(lib, path) == DAMAGED
    index = Index(lib, path, flags=ANEW)
    assert index.lib.index_publish(index.handle) == -errno.EISDIR
    lib.index_close(index.handle)
    assert os.listdir(path) == ["index.mdb"]


def test_files_beside_it(lib, sound, tmp_path):
    """What a writer that died and a version of vckpt before seals left is removed; what somebody else left is not
    touched."""
    for content in (b"", bytes(100), random.Random(9).randbytes(8192), b"\xff" * 100000):
        path = damaged_copy(lib, sound, tmp_path)
        for name in ("data.mdb", "lock.mdb", "index.mdb.new", "kept"):
            (path / name).write_bytes(content)
        assert sound_and_right(lib, path, sound[1])
        assert sorted(os.listdir(path)) == ["index.mdb", "kept"] and (path / "kept").read_bytes() == content


def test_a_file_that_was_copied_is_not_believed(lib, sound, tmp_path):
    """Whoever forges an index can compute its check, and LMDB would follow its pages; but not for a file that is not
    made yet."""
    path = damaged_copy(lib, sound, tmp_path)
    os.rename(path / "index.mdb", path / "index.mdb.moved")
    os.rename(path / "index.mdb.moved", path / "index.mdb")
    assert check(lib, path) == 0
    shutil.copy2(path / "index.mdb", path / "copy")
    os.rename(path / "copy", path / "index.mdb")
    assert not sound_and_right(lib, path, sound[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_index_is_not_believed(lib, sound, tmp_path):
    path = damaged_copy(lib, sound, tmp_path)
    os.chown(path / "index.mdb", 1234, -1)
    assert not sound_and_right(lib, path, sound[1])


def test_without_a_seal(lib, sound, tmp_path):
    path = damaged_copy(lib, sound, tmp_path)
    os.truncate(path / "index.mdb", os.path.getsize(path / "index.mdb") - 24)
    assert not sound_and_right(lib, path, sound[1])


def test_deleted_and_made_again(lib, sound, tmp_path):
    path = damaged_copy(lib, sound, tmp_path)
    os.unlink(path / "index.mdb")
    assert check(lib, path) == -errno.ENOENT
    with Index(lib, path) as index:
        assert index.find(60) is None and index.add(1, places_of(1, 10)) == 0
    assert check(lib, path) == 0


def test_a_reader_waits_for_nobody(lib, tmp_path):
    """A directory lock that nobody gives back: readers do without it."""
    path = tmp_path / "index"
    with Index(lib, path) as index:
        index.add(1, places_of(1, 10))
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    start = time.monotonic()
    assert check(lib, path) == 0
    assert time.monotonic() - start < 20
    with pytest.raises(OSError) as e:
        Index(lib, path, flags=BRIEFLY)
    assert e.value.errno == errno.EBUSY and 0.9 < time.monotonic() - start < 60
    os.close(fd)
