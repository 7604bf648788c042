# SPDX-License-Identifier: Apache-2.0
"""The POSIX storage: a name stands for a whole, durable file or for nothing, whoever wins and whoever is killed."""

import contextlib
import ctypes as C
import errno
import multiprocessing
import os
import random
import select
import signal
import subprocess
import threading
import time

import pytest

import storelow as low
from proclib import tasks

FLAGS = [0, low.NAMED_TEMPS]
fork = multiprocessing.get_context("fork")


@pytest.fixture(params=FLAGS, ids=["unnamed", "named"])
def storage(lib, tmp_path, request):
    with low.Storage(lib, tmp_path / "s", low.CREATE | request.param) as s:
        s.flags = request.param
        yield s


def fails(code, f, *args):
    with pytest.raises(OSError) as e:
        f(*args)
    assert e.value.errno == code


def test_put(storage):
    assert storage.put("runs/a/000000000000", b"one") == low.MINE
    assert storage.put("runs/a/000000000000", b"one") == low.MINE
    assert storage.put("runs/a/000000000000", b"two") == low.OTHER
    assert storage.put("runs/a/000000000000", b"on") == low.OTHER
    assert storage.put("runs/a/000000000000", b"") == low.OTHER
    assert storage.put("runs/a/1", b"") == low.MINE
    assert storage.read("runs/a/000000000000") == b"one" and storage.read("runs/a/1") == b""
    big = random.randbytes(3 << 20)
    assert storage.put("big", big) == low.MINE and storage.put("big", big) == low.MINE and storage.read("big") == big
    assert storage.put("big", big[:-1] + bytes([big[-1] ^ 1])) == low.OTHER
    assert [e[0] for e in storage.list()] == ["big", "runs/a/000000000000", "runs/a/1"]
    mask = os.umask(0o022)
    os.umask(mask)
    assert os.stat(os.path.join(storage.path, "big")).st_mode & 0o777 == 0o644 & ~mask


def test_read_and_remove(storage):
    storage.put("a/b", b"12345")
    assert storage.size("a/b") == 5
    fails(errno.EFBIG, storage.read, "a/b", 4)
    fails(errno.ENOENT, storage.read, "a/c")
    fails(errno.ENOENT, storage.size, "z/b")
    fails(errno.EISDIR, storage.read, "a")
    f, n = low.P(), C.c_uint64()
    assert storage.ops.file_open(storage.s, b"a/b", C.byref(f), C.byref(n)) == 0 and n.value == 5
    out = C.create_string_buffer(8)
    assert storage.ops.file_read(f, 1, out, 4) == 0 and out.raw[:4] == b"2345"
    for offset, size in ((1, 5), (5, 1), (2**63 - 1, 8), (2**64 - 1, 2)):
        assert storage.ops.file_read(f, offset, out, size) == -errno.ENODATA
    storage.ops.file_close(f)
    storage.remove("a/b")
    fails(errno.ENOENT, storage.remove, "a/b")
    assert storage.ops.remove_dir(storage.s, b"a") == 0
    assert storage.put("a/b", b"again") == low.MINE


def test_a_file_that_has_no_name_any_more_is_gone(storage):
    """So is one that says nothing of itself, as a stale one of a network file system."""
    def opened():
        f, n = low.P(), C.c_uint64()
        assert storage.ops.file_open(storage.s, b"a/b", C.byref(f), C.byref(n)) == 0
        return f
    storage.put("a/b", b"12345")
    f = opened()
    (fd,) = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.realpath(f"/proc/self/fd/{fd}")
             == os.path.realpath(os.path.join(storage.path, "a/b"))]
    assert not storage.ops.file_gone(f)
    kept = os.dup(fd)
    os.close(fd)
    assert storage.ops.file_gone(f)
    os.dup2(kept, fd)
    os.close(kept)
    assert not storage.ops.file_gone(f)
    storage.remove("a/b")
    assert storage.ops.file_gone(f)
    storage.ops.file_close(f)


def test_a_name_more_of_a_file_in_the_place_of_another(storage):
    """Also where both are names of one file already: rename(2) leaves both names then."""
    for name in ("a/1", "a/2", "b/3"):
        storage.put(name, name.encode())
    for name in ("a/1", "b/3", "a/1", "a/2", "a/4"):
        storage.replace_by_name(name, "a/2")
    assert storage.names() == dict.fromkeys(("a/1", "a/2", "a/4", "b/3"), 4)
    assert {storage.read(name) for name in storage.names()} == {b"a/2"}
    assert storage.put("a/1", b"a/1") == low.OTHER
    storage.remove("a/2")
    assert storage.names() == dict.fromkeys(("a/1", "a/4", "b/3"), 3)
    fails(errno.ENOENT, storage.replace_by_name, "a/1", "a/2")
    fails(errno.ENOENT, storage.replace_by_name, "c/1", "a/1")
    fails(errno.EINVAL, storage.replace_by_name, "a/1.tmp." + "0" * 16, "a/1")
    os.mkdir(f"{storage.path}/a/d")
    fails(errno.EISDIR, storage.replace_by_name, "a/d", "a/1")
    assert storage.read("a/1") == b"a/2" and sorted(os.listdir(f"{storage.path}/a")) == ["1", "4", "d"]


def test_a_file_that_is_taken(storage):
    """It has the other name and beginning. What has two names, or is not there, is left as it is."""
    storage.put("a/1", b"0123456789")
    storage.take("b/c/2", "a/1", b"xyz")
    assert storage.names() == {"b/c/2": 1} and storage.read("b/c/2") == b"xyz3456789"
    fails(errno.ENOENT, storage.take, "a/1", "a/2", b"")
    for name in "a/1.tmp." + "0" * 16, "../1", "":
        fails(errno.EINVAL, storage.take, name, "b/c/2", b"")
    fails(errno.EINVAL, storage.take, "a/1", "../1", b"")
    storage.replace_by_name("b/c/3", "b/c/2")
    fails(errno.EPERM, storage.take, "a/1", "b/c/3", b"no")
    assert storage.names() == dict.fromkeys(("b/c/2", "b/c/3"), 2) and storage.read("b/c/2") == b"xyz3456789"


def test_names(lib, storage):
    for name in ("a", "a/b", "A-z_0.=", "..a", "a..", "x" * 255, "a/" * 255 + "a"):
        assert lib.storage_name_valid(name.encode()), name
    bad = ("", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a b", "a\\b", "\xe9", "a\n", "x" * 256,
           "a/" * 256 + "a")
    for name in bad:
        assert not lib.storage_name_valid(name.encode()), name
        with pytest.raises(OSError):
            storage.put(name, b"x")
    fails(errno.EINVAL, storage.put, "a.tmp.0123456789abcdef", b"x")
    assert storage.list() == []


def test_links_are_not_followed(storage, tmp_path):
    storage.put("d/f", b"inside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f").write_bytes(b"outside")
    root = storage.path
    os.symlink(tmp_path / "out", root + "/link")
    os.symlink("d", root + "/near")
    os.symlink(tmp_path / "out" / "f", root + "/d/lf")
    os.mkfifo(root + "/fifo")
    for name in ("link/f", "near/f", "d/lf"):
        with pytest.raises(OSError) as e:
            storage.read(name)
        assert e.value.errno == (errno.ELOOP if name == "d/lf" else errno.ENOTDIR)
        size = C.c_uint64()
        assert storage.ops.size(storage.s, name.encode(), C.byref(size)) == -e.value.errno
        with pytest.raises(OSError):
            storage.put(name, b"x")
    fails(errno.ENXIO, storage.read, "fifo") # and does not hang
    assert (tmp_path / "out" / "f").read_bytes() == b"outside"
    assert {e[0] for e in storage.list() if e[3]} == {"link", "near", "d/lf", "fifo"}
    with pytest.raises(OSError):
        storage.remove("link/f")
    storage.remove("link")


def test_listing_marks_what_is_strange(storage):
    storage.put("a/b/c", b"12")
    root = storage.path
    open(root + "/a/x.tmp.0123456789abcdef", "w").close()
    open(root + "/a/x.tmp.0123456789abcdeg", "w").close()
    open(root + "/a/strange name", "w").close()
    os.mkdir(root + "/a/bad dir")
    open(root + "/a/bad dir/deep", "w").close()
    assert storage.list("a") == [("a/b/c", 2, False, False), ("a/bad dir", 0, False, True),
                                 ("a/strange name", 0, False, True),
                                 ("a/x.tmp.0123456789abcdef", 0, True, False),
                                 ("a/x.tmp.0123456789abcdeg", 0, False, False)]
    assert [(e[0], e[3]) for e in storage.list_dirs("a")] == [
        ("a/b", False), ("a/bad dir", True), ("a/strange name", True), ("a/x.tmp.0123456789abcdef", True),
        ("a/x.tmp.0123456789abcdeg", True)]
    assert storage.list("nothing") == [] and storage.list_dirs("nothing") == []
    stop = low.LISTED(lambda _, e: 7)
    assert storage.ops.list(storage.s, b"a", stop, None) == 7


def test_writer(storage):
    parts = ([random.randbytes(n) for n in (0, 1, 5000, 200_000, 3, 1 << 20, (2 << 20) + 1, 127 << 10, 999)] +
             [b"z" * 60_000] * 30)
    storage.file("packs/00/p.pack", parts)
    assert storage.read("packs/00/p.pack") == b"".join(parts)
    fails(errno.EEXIST, storage.file, "packs/00/p.pack", [b"x"])
    storage.file("packs/00/q.pack", parts, seal=False)
    assert [e[0] for e in storage.list()] == ["packs/00/p.pack"]
    w = low.P()
    assert storage.ops.writer_open(storage.s, b"packs/00/r.pack", C.byref(w)) == 0
    storage.put("packs/00/r.pack", b"was here first")
    assert storage.ops.writer_append(w, b"x", 1) == 0
    assert storage.ops.writer_seal(w) == -errno.EEXIST
    assert storage.read("packs/00/r.pack") == b"was here first"
    assert [e[0] for e in storage.list()] == ["packs/00/p.pack", "packs/00/r.pack"]


@pytest.mark.parametrize("seal", [True, False], ids=["seal", "abandon"])
def test_lent_bytes_are_the_same_as_copied_ones(storage, seal):
    """At places where they need not be copied, and at all others; over several buffers, and two memories by turns."""
    data, w = [random.randbytes(1 << 20) * 6 for _ in range(2)], low.P()
    lent = [low.Lent(d) for d in data]
    parts = [(random.choice((0, 0, 4096, 512, 1, random.randrange(5 << 20))),
              random.choice((1 << 20, 3 << 20, 6 << 20, 32 << 10, 128 << 10, 138_240, 1, random.randrange(1 << 20))),
              random.choice((0, 1, None))) for _ in range(40)]
    parts = [(at, min(n, (6 << 20) - at), which) for at, n, which in parts]
    wanted = bytearray()
    assert storage.ops.writer_open(storage.s, b"packs/00/p.pack", C.byref(w)) == 0
    for at, n, which in parts:
        if which is None:
            pad = bytes(-len(wanted) % 4096) + data[0][at:at + n]
            assert storage.ops.writer_append(w, pad, len(pad)) == 0
            wanted += pad
        else:
            assert storage.ops.writer_append_lent(w, lent[which].at + at, n, C.byref(lent[which])) == 0
            wanted += data[which][at:at + n]
    if seal:
        assert storage.ops.writer_seal(w) == 0
        assert storage.read("packs/00/p.pack") == wanted
    else:
        storage.ops.writer_abandon(w)
    assert [(one.users, one.returned) for one in lent] == [(1, 0), (1, 0)]


def test_what_was_lent_comes_back(storage):
    """When it is written; when it is to be kept; and the last user says so."""
    data, w = random.randbytes(1 << 20) * 5, low.P()
    lent = low.Lent(data)
    assert storage.ops.writer_open(storage.s, b"packs/00/p.pack", C.byref(w)) == 0
    assert storage.ops.writer_append_lent(w, lent.at, 1 << 20, C.byref(lent)) == 0 and lent.users == 2
    storage.ops.writer_keep(w)
    assert (lent.users, lent.returned) == (1, 0)
    C.memmove(lent.at, bytes(1 << 20), 1 << 20)
    assert storage.ops.writer_append_lent(w, lent.at + (1 << 20), 3 << 20, C.byref(lent)) == 0
    end = time.monotonic() + 20
    while lent.users > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert (lent.users, lent.returned) == (1, 0) # a whole buffer is written though nothing more comes
    assert storage.ops.writer_append_lent(w, lent.at + (4 << 20), 1 << 20, C.byref(lent)) == 0
    lent.users -= 1
    assert storage.ops.writer_seal(w) == 0 and (lent.users, lent.returned) == (0, 1)
    assert storage.read("packs/00/p.pack") == data


@pytest.mark.parametrize("seal", [True, False], ids=["seal", "abandon"])
@pytest.mark.parametrize("size", [0, 4095, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 12 << 20, (40 << 20) + 4097])
def test_writer_of_several_buffers(storage, size, seal):
    """Buffers of 4 MiB go out by a thread: none, the last one full, and more than there are."""
    data = random.randbytes(1 << 20) * (size // (1 << 20)) + random.randbytes(size % (1 << 20))
    before = tasks()
    storage.file("packs/00/p.pack", [data[at:at + (3 << 20)] for at in range(0, size, 3 << 20)], seal=seal)
    assert not seal or storage.read("packs/00/p.pack") == data
    assert [e[:2] for e in storage.list()] == [("packs/00/p.pack", size)][:seal]
    end = time.monotonic() + 120
    while tasks() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not tasks() - before


def test_create_refuses_what_is_not_empty(lib, tmp_path):
    (tmp_path / "f").write_text("x")
    fails(errno.ENOTEMPTY, low.Storage, lib, tmp_path, low.CREATE)
    fails(errno.ENOTDIR, low.Storage, lib, tmp_path / "f", 0)
    fails(errno.ENOENT, low.Storage, lib, tmp_path / "none", 0)
    fails(errno.ENOENT, low.Storage, lib, tmp_path / "none" / "deeper", low.CREATE)
    low.Storage(lib, tmp_path / "new", low.CREATE).close()
    low.Storage(lib, tmp_path / "new", low.CREATE).close() # still empty: the probe left nothing


def test_read_only(lib, storage):
    storage.put("a", b"x")
    with low.Storage(lib, storage.path, low.READ_ONLY) as s:
        assert s.read("a") == b"x"
        fails(errno.EROFS, s.put, "a", b"x")
        fails(errno.EROFS, s.remove, "a")
        fails(errno.EROFS, s.file, "b", [b"x"])
        assert s.ops.sync_dir(s.s, b"") == 0


def test_medium_owner_watch(storage):
    m, o = low.Medium(), low.Owner()
    assert storage.ops.stat(storage.s, C.byref(m)) == 0 and m.block_bytes > 0 and m.blocks >= m.blocks_free
    assert storage.ops.owner(storage.s, b"", C.byref(o)) == 0 and o.uid == os.getuid() and o.ctime_ns > 0
    storage.put("runs/a/0", b"x")
    os.chmod(f"{storage.path}/runs/a", 0o700)
    assert storage.ops.owner(storage.s, b"runs/a", C.byref(o)) == 0 and o.mode == 0o700
    assert storage.ops.owner(storage.s, b"runs/b", C.byref(o)) == -errno.ENOENT
    os.chmod(f"{storage.path}/runs/a", 0o755)
    fd, dirs = C.c_int(-1), (C.c_char_p * 2)(b"runs", b"runs/a")
    r = storage.ops.watch(storage.s, dirs, 2, C.byref(fd))
    if not m.local:
        assert r == -errno.EOPNOTSUPP
        return
    assert r == 0 and not select.select([fd.value], [], [], 0)[0]
    storage.put("runs/a/1", b"y")
    assert select.select([fd.value], [], [], 5)[0]
    os.close(fd.value)


def _race(lib, path, flags, name, data, gate, out):
    with low.Storage(lib, path, flags) as s:
        gate.wait()
        out.put((data, s.put(name, data)))


def test_of_eight_puts_at_once_one_wins(lib, storage):
    for turn in range(2):
        gate, out, name = fork.Barrier(8), fork.Queue(), f"runs/a{turn}/{turn:012}"
        work = [fork.Process(target=_race, args=(lib, storage.path, storage.flags, name, b"%d" % (i // 2) * 5000, gate,
                                                 out)) for i in range(8)]
        for w in work:
            w.start()
        answers = [out.get(timeout=120) for _ in work]
        for w in work:
            w.join()
        there = storage.read(name)
        assert sorted(a for _, a in answers) == [low.MINE] * 2 + [low.OTHER] * 6
        assert all((data == there) == (a == low.MINE) for data, a in answers)
    assert all(not e[2] for e in storage.list())


def _put_for_ever(lib, path, flags, size):
    with low.Storage(lib, path, flags) as s:
        for i in range(1 << 30):
            s.put(f"f{i}", b"%08d" % i * (size // 8))


def test_a_killed_put_leaves_nothing_under_the_name(lib, storage):
    rng, size = random.Random(3), 4 << 20
    for _ in range(8):
        w = fork.Process(target=_put_for_ever, args=(lib, storage.path, storage.flags, size))
        w.start()
        time.sleep(rng.uniform(0.01, 0.12))
        os.kill(w.pid, signal.SIGKILL)
        w.join()
        for name, n, temporary, foreign in storage.list():
            assert not foreign
            if not temporary:
                assert n == size and storage.read(name) == b"%08d" % int(name[1:]) * (size // 8)
            else:
                assert storage.flags & low.NAMED_TEMPS
            storage.remove(name)


def test_no_file_in_a_removed_directory(lib, storage):
    """-ENOENT on every filesystem: ext4 says EPERM where the file would have had no name."""
    storage.put("a/b", b"")
    folder = os.open(os.path.join(storage.path, "a"), os.O_RDONLY | os.O_DIRECTORY)
    storage.remove("a/b")
    os.rmdir(os.path.join(storage.path, "a"))
    temporary = C.create_string_buffer(1024)            # struct posix_temp
    found = lib.posix_temp_open(storage.s, folder, b"b", temporary)
    if found == 0:                                      # tmpfs makes it, and does not give it a name
        found = lib.posix_temp_publish(storage.s, folder, temporary, b"b")
    lib.posix_temp_drop(folder, temporary)
    os.close(folder)
    assert found == -errno.ENOENT


def test_a_removed_directory_is_made_anew(lib, storage):
    """As when the ranks of an aborted attempt still write while another one clears it away. A put tries a few times: so
    it is met by two removals at most, however slow the disk is."""
    storage.put("vckpt.store", b"keeps the root")
    # the number of puts at the last two removals
    stop, found, removed = threading.Event(), [], [-1, -1]

    def remove():
        folder = os.path.join(storage.path, "incoming/run/attempt")
        while not stop.is_set():
            if removed[0] < len(found):
                removed.append(len(found))
                del removed[0]
                with contextlib.suppress(OSError):
                    for name in os.listdir(folder):
                        os.unlink(os.path.join(folder, name))
                    os.removedirs(folder)
            time.sleep(random.random() / 50)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for i in range(500):
            found.append(storage.put(f"incoming/run/attempt/base.{i}", b"of a step"))
    finally:
        stop.set()
        remover.join()
    assert set(found) == {low.MINE}


def test_a_full_disk(lib, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
                                          capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        for flags in FLAGS:
            with low.Storage(lib, disk, flags) as s:
                assert s.put("old", b"old" * 1000) == low.MINE
                fails(errno.ENOSPC, s.put, "new", bytes(2 << 20))
                fails(errno.ENOSPC, s.file, "pack", [b"x" * 100_000] * 30)
                assert [e[0] for e in s.list()] == ["old"]
                assert s.put("new", bytes(800 << 10)) == low.MINE
                s.remove("new")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


SPREAD = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint32, C.c_void_p)


def spread(lib, n, seconds, fails=(), call="storage_spread"):
    """The result of asking for n things, each of which takes so long, and the threads that asked."""
    by = [0] * n

    def one(_, i, err):
        time.sleep(seconds) if seconds else None
        by[i] = threading.get_native_id()
        return -errno.EIO if i in fails else 0
    return lib[call](n, SPREAD(one), None, None), by


def test_what_waits_is_asked_for_at_once(lib):
    r, by = spread(lib, 64, 0.02)
    assert r == 0 and 0 not in by and 5 < len(set(by)) <= 16
    r, by = spread(lib, 12, 0.02)
    assert r == 0 and set(by) == {threading.get_native_id()}
    r, by = spread(lib, 64, 0.002, {5, 9, 60})
    assert r == -errno.EIO and 0 not in by[:6] and by[-1] == 0


def test_few_that_take_long_have_threads(lib):
    r, by = spread(lib, 4, 0.02, call="storage_spread_long")
    assert r == 0 and 0 not in by and len(set(by)) > 1
    assert spread(lib, 4, 0, {1, 2}, "storage_spread_long")[0] == -errno.EIO
    assert spread(lib, 1, 0, call="storage_spread_long") == (0, [threading.get_native_id()])


def test_what_computes_has_a_thread_for_each_processor(lib):
    """Here one. A process that has to wait for it cannot know: several tries."""
    data, processors, digest = bytes(1 << 20), os.sched_getaffinity(0), C.create_string_buffer(32)
    os.sched_setaffinity(0, [min(processors)])
    try:
        for _ in range(50):
            by = set()

            def one(_, i, err):
                lib.base_sha256(data, C.c_size_t(len(data)), digest)
                by.add(threading.get_native_id())
                return 0
            assert lib.storage_spread(32, SPREAD(one), None, None) == 0
            if by == {threading.get_native_id()}:
                return
    finally:
        os.sched_setaffinity(0, processors)
    pytest.fail("further threads were started each time")


def test_what_is_there_at_once_needs_no_thread(lib):
    """A process that loses its processor in the midst cannot know: several tries."""
    for _ in range(50):
        r, by = spread(lib, 63, 0)
        assert r == 0 and 0 not in by
        if set(by) == {threading.get_native_id()}:
            return
    pytest.fail("threads were started each time")
