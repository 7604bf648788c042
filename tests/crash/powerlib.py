# SPDX-License-Identifier: Apache-2.0
"""What a disk may hold after a power loss, from the log that tests/crash/interpose_log.c kept.

The model: bytes written to a file are durable once an fsync of it was made after the write; a name (of a link, a
directory, a rename; that a name is gone) once an fsync of the directory that holds it was made after it. A file's fsync
does not keep its name. Whatever is not durable may be there or not, each thing by itself: so a file may have its name
and none of its bytes, or every other page of them. Writes are cut at 4 KiB for that.
"""
import hashlib
import os
import pathlib
import shutil
import struct

CREATE, WRITE, SYNC, SYNC_DIR, LINK, UNLINK, RMDIR, MKDIR, RENAME, TRUNCATE, SYNC_ALL, MARK = range(1, 13)
HEAD = struct.Struct("<IIQQIIIi")
PAGE = 4096
NAMES = {LINK, UNLINK, RMDIR, MKDIR, RENAME}


class Event:
    __slots__ = ("kind", "ino", "offset", "path", "to", "data", "pid")

    def __init__(self, kind, ino, offset, path, to, data, pid):
        self.kind, self.ino, self.offset, self.path, self.to, self.data, self.pid = (
            kind, ino, offset, path, to, data, pid)

    def __repr__(self):
        return f"{self.kind} {self.ino} {self.offset} {self.path} {len(self.data)}"


def read_log(file, root=""):
    """Events with paths below the store. Pages of a write are events of their own."""
    raw, at, out = pathlib.Path(file).read_bytes(), 0, []
    while at < len(raw):
        size, kind, ino, offset, path, to, data, pid = HEAD.unpack_from(raw, at)
        body = raw[at + HEAD.size:at + size]
        assert HEAD.size + path + to + data == size
        name, other, data = body[:path].decode(), body[path:path + to].decode(), body[path + to:]
        at += size
        if kind != WRITE:
            out.append(Event(kind, ino, offset, name, other, b"", pid))
        while kind == WRITE and data:
            n = PAGE - offset % PAGE
            out.append(Event(WRITE, ino, offset, name, "", data[:n], pid))
            data, offset = data[n:], offset + n
    return out


def parent(path):
    return path.rpartition("/")[0]


class Files:
    """A directory tree in memory: {path: bytes}, and directories. inodes: {path: number}, where files that are there
    may be written."""

    def __init__(self, root, inodes=False):
        root = pathlib.Path(root)
        self.inodes = {str(p.relative_to(root)): p.stat().st_ino for p in root.rglob("*") if inodes and p.is_file()}
        self.files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        self.dirs = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir()} | {""}


def durable(events):
    """For each event the number of the one that makes it durable, or None."""
    keeps, open_ = [None] * len(events), {}
    for i, e in enumerate(events):
        if e.kind in (WRITE, TRUNCATE):
            open_.setdefault(("ino", e.ino), []).append(i)
        elif e.kind in NAMES:
            open_.setdefault(("dir", parent(e.path)), []).append(i)
            if e.kind == RENAME and parent(e.to) != parent(e.path):
                open_.setdefault(("dir", parent(e.to)), []).append(i)
        elif e.kind in (SYNC, SYNC_DIR):
            for j in open_.pop(("ino", e.ino) if e.kind == SYNC else ("dir", e.path), []):
                keeps[j] = i
        elif e.kind == SYNC_ALL:
            for all_ in open_.values():
                for j in all_:
                    keeps[j] = i
            open_.clear()
    return keeps


def state(base, events, keep):
    """{path: bytes}, {directory} after the events whose numbers keep() wants, in order, on top of what was durable
    before."""
    files, dirs, inodes = dict(base.files), set(base.dirs), {}
    for path, ino in base.inodes.items():
        files[path] = inodes.setdefault(ino, bytearray(files[path]))

    def present(path):
        return parent(path) in dirs
    for i, e in enumerate(events):
        if e.kind == CREATE:
            inodes[e.ino] = bytearray()
            continue
        if e.kind not in NAMES and e.kind not in (WRITE, TRUNCATE) or not keep(i):
            continue
        if e.kind == WRITE and e.ino in inodes:
            f = inodes[e.ino]
            f.extend(bytes(max(0, e.offset + len(e.data) - len(f))))
            f[e.offset:e.offset + len(e.data)] = e.data
        elif e.kind == TRUNCATE and e.ino in inodes:
            f = inodes[e.ino]
            f[e.offset:] = bytes(max(0, e.offset - len(f)))
        elif e.kind == LINK and present(e.path):
            files[e.path] = inodes[e.ino]
        elif e.kind == MKDIR and present(e.path):
            dirs.add(e.path)
        elif e.kind == UNLINK:
            files.pop(e.path, None)
        elif e.kind == RENAME and e.path in files and present(e.to):
            files[e.to] = files.pop(e.path)
        elif e.kind == RMDIR and e.path in dirs:
            for f in [f for f in files if f.startswith(e.path + "/")]:
                del files[f]
            dirs -= {d for d in dirs if d == e.path or d.startswith(e.path + "/")}
    return {path: bytes(f) for path, f in files.items()}, dirs


def choices(events, keeps, cut, rng, count):
    """Sets of events that are kept, for a power loss before event `cut`."""
    done = {i for i in range(cut) if events[i].kind in NAMES | {WRITE, TRUNCATE}}
    sure = {i for i in done if keeps[i] is not None and keeps[i] < cut}
    loose = sorted(done - sure)
    yield sure
    if not loose:
        return
    yield done
    for i in loose:
        yield done - {i}
        yield sure | {i}
    for _ in range(count if len(loose) > 1 else 0):
        yield sure | {i for i in loose if rng.random() < 0.5}


class Disk:
    """A directory that is made to hold one state after the other, by what differs; files come as links out of a
    pool."""

    def __init__(self, path):
        self.path, self.pool = pathlib.Path(path) / "disk", pathlib.Path(path) / "pool"
        self.path.mkdir(parents=True)
        self.pool.mkdir()
        self.files, self.dirs, self.known = {}, {""}, {}

    def _pooled(self, data):
        key = hashlib.blake2b(data, digest_size=16).hexdigest()
        if key not in self.known:
            (self.pool / key).write_bytes(data)
            self.known[key] = True
        return key

    def become(self, files, dirs):
        """Returns a key of the state."""
        now = {path: self._pooled(data) for path, data in files.items()}
        for path, key in self.files.items():
            if now.get(path) != key:
                os.unlink(self.path / path)
        for d in sorted(self.dirs - dirs, reverse=True):
            os.rmdir(self.path / d)
        for d in sorted(dirs - self.dirs):
            os.mkdir(self.path / d)
        for path, key in now.items():
            if self.files.get(path) != key:
                os.link(self.pool / key, self.path / path)
        self.files, self.dirs = now, set(dirs)

    def copy(self, to):
        shutil.copytree(self.path, to)
