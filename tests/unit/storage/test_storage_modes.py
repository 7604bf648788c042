# SPDX-License-Identifier: Apache-2.0
"""Modes of what the POSIX storage makes: where the group of the store's directory may write in it, that directory
decides, whoever writes and whatever the umask is."""

import ctypes as C
import errno
import multiprocessing
import os
import stat
import struct

import pytest

import storelow as low

OWNER, MEMBER, STRANGER, GROUP = 20001, 20002, 20003, 20100   # none has a name
fork = multiprocessing.get_context("fork")


@pytest.fixture(params=[0o022, 0o077], ids=["022", "077"])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def open_for(folder):
    """Other users come to this folder."""
    for path in [folder, *folder.parents][:-1]:
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o001:
            os.chmod(path, path.stat().st_mode | 0o011)


@pytest.fixture
def root(tmp_path):
    """root(mode) makes a directory of OWNER and GROUP, or of this user and its group where that is not root's to do."""
    def make(mode):
        path = tmp_path / "s"
        path.mkdir()
        if os.geteuid() == 0:
            os.chown(path, OWNER, GROUP)
        os.chmod(path, mode)
        return path
    open_for(tmp_path)
    return make


def fill(storage):
    """A file in each of the ways to make one."""
    storage.put("vckpt.store", b"1")
    storage.put("runs/a/0", b"2")
    assert storage.ops.put_fleeting(storage.s, b"hosts/x.0", b"3", 1) == low.MINE
    storage.replace("damaged/p", b"4")
    storage.file("packs/0a/p.pack", [b"5" * (5 << 20)])
    storage.file_over("packs/0a/p.pack", b"6")
    storage.file_over("packs/0b/q.pack", b"7")


def modes(root):
    """(of directories, of files), and every group."""
    below = list(root.rglob("*"))
    found = [{stat.S_IMODE(p.stat().st_mode) for p in below if p.is_dir() == dirs} for dirs in (True, False)]
    return *found, {p.stat().st_gid for p in below}


@pytest.mark.parametrize("flags", [0, low.NAMED_TEMPS], ids=["unnamed", "named"])
@pytest.mark.parametrize("mode, directory, file", [
    (0o2775, 0o2775, 0o664), (0o2770, 0o2770, 0o660), (0o0775, 0o0775, 0o664), (0o3770, 0o3770, 0o660),
    (0o0777, 0o0777, 0o666)])
def test_the_root_decides(lib, root, umask, mode, directory, file, flags):
    path = root(mode)
    group = path.stat().st_gid
    with low.Storage(lib, path, low.CREATE | flags) as s:
        os.chmod(path, 0o700)           # it was looked at before
        fill(s)
    assert modes(path) == ({directory}, {file}, {group})
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o2755])
def test_a_root_that_is_nobody_elses(lib, root, umask, mode):
    path = root(mode)
    with low.Storage(lib, path, low.CREATE) as s:
        fill(s)
    assert modes(path)[:2] == ({(0o755 | mode & 0o2000) & ~umask}, {0o644 & ~umask})


def test_a_new_root(lib, tmp_path, umask):
    with low.Storage(lib, tmp_path / "s", low.CREATE) as s:
        fill(s)
    assert modes(tmp_path / "s")[:2] == ({0o755 & ~umask}, {0o644 & ~umask})
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o755 & ~umask


def test_bits_of_an_acl_are_not_the_groups(lib, root):
    """The mode of a directory with an ACL shows what any user of the list may: here another user, and the group not."""
    path = root(0o755)
    entries = [(0x01, 7, 2**32 - 1), (0x02, 7, STRANGER), (0x04, 5, 2**32 - 1), (0x10, 7, 2**32 - 1),
               (0x20, 5, 2**32 - 1)]
    try:
        os.setxattr(path, "system.posix_acl_access",
                    struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries))
    except OSError as e:
        pytest.skip(f"no ACL here: {e}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o775
    before = os.umask(0o022)
    with low.Storage(lib, path, low.CREATE) as s:
        fill(s)
    os.umask(before)
    assert modes(path)[:2] == ({0o755}, {0o644})


# ---- several users ----

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")


def _as_user(work, user, groups, umask, say):
    os.setgroups(groups)
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.umask(umask)
    try:
        say.send(work())
    except BaseException as e:
        say.send(e)


def as_users(*calls):
    """Runs (user, groups, umask, work) each in a process, all at once: what each work() gave, or raised."""
    running = []
    for user, groups, umask, work in calls:
        here, there = fork.Pipe()
        process = fork.Process(target=_as_user, args=(work, user, groups, umask, there))
        process.start()
        running.append((process, here))
    given = [here.recv() if here.poll(60) else TimeoutError() for _, here in running]
    for process, _ in running:
        process.join(60)
    return given


@needs_root
def test_users_make_the_same_directories_at_once(lib, root):
    """Nobody finds a directory that is not open to the group yet."""
    path = root(0o2770)

    def work(n):
        def puts():
            with low.Storage(lib, path) as s:
                gate.wait(60)
                return [s.put(f"runs/{turn}/{n}", b"x") for turn in range(40)]
        return puts

    gate = fork.Barrier(4)
    given = as_users(*[((OWNER, MEMBER)[n % 2], [GROUP], 0o077, work(n)) for n in range(4)])
    assert given == [[low.MINE] * 40] * 4
    assert modes(path) == ({0o2770}, {0o660}, {GROUP})
    assert not list(path.glob("directory*"))


@needs_root
def test_without_the_right_to_write_in_the_root(lib, root):
    """A directory is made in its place then; and the storage knows where a user was refused what."""
    path = root(0o2775)
    (path / "runs").mkdir()
    os.chmod(path / "runs", 0o777)

    def work():
        told = []
        with low.Storage(lib, path) as s:
            s.put("runs/a/0", b"x")
            for name in ("hosts/x", "runs/a/0/y", "packs/0a/p"):
                with pytest.raises(OSError) as e:
                    s.put(name, b"x")
                dir_, owner = C.create_string_buffer(512), low.Owner()
                told.append((e.value.errno, s.ops.denied(s.s, dir_, C.byref(owner)), dir_.value, owner.uid))
        return told

    assert as_users((STRANGER, [], 0o077, work)) == [[
        (errno.EACCES, 0, b"", OWNER), (errno.ENOTDIR, 0, b"runs/a/0", STRANGER), (errno.EACCES, 0, b"", OWNER)]]
    assert (path / "runs/a").stat().st_mode & 0o777 == 0o775 and (path / "runs/a/0").stat().st_uid == STRANGER


@needs_root
def test_where_a_user_was_refused(lib, root):
    path = root(0o2775)
    with low.Storage(lib, path) as s:
        s.put("packs/0a/p", b"x")
        s.put("runs/a/0", b"x")
    os.chmod(path / "packs/0a", 0o2755)
    os.chmod(path / "runs/a", 0o2700)

    def work():
        told = []
        with low.Storage(lib, path) as s:
            dir_, owner = C.create_string_buffer(512), low.Owner()
            assert s.ops.denied(s.s, dir_, C.byref(owner)) == -errno.ENOENT
            for call in (lambda: s.remove("packs/0a/p"), lambda: s.put("runs/a/b/c", b"x"), lambda: s.list(""),
                         lambda: s.file("packs/0a/q", [b"x"]), lambda: s.replace("runs/a/0", b"x")):
                with pytest.raises(OSError, match="Permission denied"):
                    call()
                assert s.ops.denied(s.s, dir_, C.byref(owner)) == 0
                told.append((dir_.value.decode(), owner.mode))
        return told

    inside, private = ("packs/0a", 0o2755), ("runs/a", 0o2700)
    assert as_users((MEMBER, [GROUP], 0o022, work)) == [[inside, private, private, inside, private]]


def test_a_directory_without_a_place_is_not_listed(lib, root):
    path = root(0o2775)
    (path / "directory.tmp.0123456789abcdef").mkdir(mode=0)
    with low.Storage(lib, path) as s:
        s.put("runs/a/0", b"x")
        assert [e[0] for e in s.list()] == ["runs/a/0"]
        assert [(e[0], e[2]) for e in s.list_dirs()] == [("directory.tmp.0123456789abcdef", True), ("runs", False)]
