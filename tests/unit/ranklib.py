# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job through ctypes (core/commit/launch/launch.h): tiny saves in which each rank stores its hundred bytes
of one tensor."""
import ctypes as c
import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import threading
import time

import pytest

from protolib import Box, Timing
from storelib import (LAUNCH, NONE, Announcement, Api, Attempt, Buf, Digest, Entry, Failed, GridParams, PackUse, Part,
                      Piece, Ref, Save, Shape, proto_ref, scratch)
from storelow import Ops, StorageHead

PIECE = 100
ETIMEDOUT = -errno.ETIMEDOUT


class LaunchOptions(c.Structure):
    _fields_ = [("run", c.c_char_p), ("id", c.c_char_p), ("rank", c.c_uint32), ("world", c.c_uint32),
                ("heartbeat_ms", c.c_uint64),
                ("start_ms", c.c_uint64), ("deadline_ms", c.c_uint64)]


class Begin(c.Structure):  # struct proto_begin
    _fields_ = [("run", c.c_char_p), ("attempt", c.c_char_p), ("step", c.c_uint64), ("world", c.c_uint32),
                ("alone", c.c_bool),
                ("position", c.c_uint64), ("mesh", Digest), ("bases", c.c_void_p), ("nbases", c.c_uint32),
                ("replace", c.c_bool),
                ("replaces", c.c_uint64), ("rank", c.c_uint32), ("host", c.c_char_p), ("time_ns", c.c_int64),
                ("commons", c.c_void_p), ("ncommons", c.c_uint32),
                ("arena", c.c_void_p)]


class Incoming(c.Structure):
    _fields_ = [("run", c.c_char * 129), ("attempt", c.c_char * 48), ("begun", c.c_bool), ("begin", Begin),
                ("announced", c.POINTER(c.c_uint32)),
                ("nannounced", c.c_uint32), ("missing", c.POINTER(c.c_uint32)), ("nmissing", c.c_uint32),
                ("since_ns", c.c_int64), ("state", c.c_int)]


@pytest.fixture
def api(lib, vckpt):
    """An empty store; what a test leaves in it must verify."""
    path = scratch()
    shutil.rmtree(path)
    api = Api(lib, path)
    api.launched = []
    yield api
    for launch in api.launched:     # of a test that failed: its heartbeats would outlive the store
        if launch.p:
            launch.close()
    verified = vckpt("verify", path, check=False)
    api.close()
    shutil.rmtree(path)
    assert verified.returncode == 0, verified.stdout


def launch_name(id_, run="r"):
    return hashlib.sha256(run.encode() + b"\0" + id_.encode()).hexdigest()[:16]


def incoming(api):
    """{attempt: (begun, world, announced, missing, since_ns, state)}"""
    all_, n = c.POINTER(Incoming)(), c.c_size_t()
    api.call(api.lib.commit_incoming_read, api.p, c.byref(all_), c.byref(n))
    out = {i.attempt.decode(): (i.begun, i.begin.world, i.announced[:i.nannounced], i.missing[:i.nmissing], i.since_ns,
                                i.state)
           for i in all_[:n.value]}
    api.lib.commit_incoming_free(all_, n)
    return out


class Launch:
    def __init__(self, api, run, id_, rank, world, heartbeat_ms=0, start_ms=0, deadline_ms=0):
        self.api, self.lib, self.run, self.rank, self.world, self.p = api, api.lib, run, rank, world, c.c_void_p()
        self.lib.commit_launch_name.restype = c.c_char_p
        options = LaunchOptions(run.encode(), id_.encode() if id_ is not None else None, rank, world, heartbeat_ms,
                                start_ms,
                                deadline_ms)
        api.call(self.lib.commit_launch_open, api.p, c.byref(options), c.byref(self.p))
        self.name = self.lib.commit_launch_name(self.p).decode()
        self.next_step = 0 if world == 1 else self.after_the_newest()
        getattr(api, "launched", []).append(self)

    def close(self):
        self.lib.commit_launch_close(self.p)
        self.p = None

    def after_the_newest(self):
        """As this launch's entry saw it: the same on all its ranks."""
        with self.api.list(self.run) as l:
            number = l.next
        while number > 0:
            number -= 1
            body, entry = self.api.entry_body(self.run, number), Entry()
            assert self.lib.proto_entry_decode(body, c.c_size_t(len(body)), c.byref(entry)) == 0
            kind, step = entry.kind, entry.newest_step
            self.lib.proto_entry_release(c.byref(entry))
            if kind == LAUNCH:
                return 0 if step == NONE else step + 1
        raise AssertionError("no launch entry")

    def begin(self, step=None, replace=False, mesh=0):
        """step: of several ranks by default the count of calls, as a trainer has it."""
        if step is None:
            step = NONE if self.world == 1 else self.next_step
        if step < 1 << 44:
            self.next_step = step + 1
        return RankAttempt(self, step, replace, mesh)

    def save(self, step=None, replace=False, data=None, timeout=60000):
        a = self.begin(step, replace)
        try:
            a.write(data or random.randbytes(PIECE))
            a.announce()
            return a.step, a.wait(timeout)
        finally:
            a.free()


class RankAttempt(Attempt):
    """One rank's share, in steps that a test can stop at."""

    def __init__(self, launch, step, replace, mesh):
        self.api, self.lib, self.launch, self.run, self.p = launch.api, launch.lib, launch, launch.run, c.c_void_p()
        save = Save(step, replace, Digest((c.c_uint8 * 32)(*([mesh] * 32))))
        self.api.call(self.lib.commit_attempt_begin, launch.p, c.byref(save), c.byref(self.p))
        self.name, self.step = self.lib.commit_attempt_name(self.p).decode(), self.lib.commit_attempt_step(self.p)
        self.own, self.piece, self.keep, self.base_pack, self.timings = [], None, [], None, []

    def pack_name(self, kind):
        name = c.create_string_buffer(128)
        assert self.lib.pack_name_make(self.name.encode(), c.c_uint32(self.launch.rank), kind.encode(), name) == 0
        return name.value

    def layout(self):
        self.lib.store_layout_builder_new.restype = c.c_void_p
        b = c.c_void_p(self.lib.store_layout_builder_new(GridParams(128 << 10, 1 << 20, 256, 32 << 10)))
        shape = Shape(1, (c.c_uint64 * 16)(PIECE * self.launch.world))
        self.api.call(self.lib.store_layout_builder_add, b, b"model", b"w", c.c_size_t(1), 2, c.byref(shape),
                      c.c_uint32(0))
        l, object_, tags = c.c_void_p(), Buf(), c.c_void_p()
        self.api.call(self.lib.store_layout_builder_finish, b, c.byref(l), c.byref(object_), c.byref(tags))
        self.lib.store_layout_builder_free(b)
        return l, object_

    def part(self, first=None):
        """The pack "meta" with the part, rank 0's also with the layout; first: where the box begins that this rank says
        it stores."""
        rank, world = self.launch.rank, self.launch.world
        l, object_ = self.layout()
        meta, w = self.writer("meta")
        layout_ref, part_ref = Ref(), Ref()
        if rank == 0:
            assert self.lib.pack_append_raw(w, 3, c.c_void_p(object_.data), c.c_uint64(object_.len),
                                                  c.byref(layout_ref)) == 0
        packs = [(name, size) for name, size in self.own] + ([self.base_pack] if self.base_pack else []) + [(meta, 0)]
        self.lib.store_part_builder_new.restype = c.c_void_p
        b = c.c_void_p(self.lib.store_part_builder_new(l, w, c.c_uint32(len(packs) - 1)))
        piece = Piece(ref=self.piece, xxh=self.xxh, base=2**32 - 1)
        piece.ref.pack = 0
        box = Box()
        box.offset[0], box.size[0] = rank * PIECE if first is None else first, PIECE
        whole = world == 1 and first is None
        self.api.call(self.lib.store_part_add_row, b, c.c_uint32(0), None if whole else c.byref(box),
                      c.c_uint32(0 if whole else 1), c.byref(piece),
                      c.c_uint64(1))
        assert self.lib.pack_extent_end(w) == 0
        table = (PackUse * len(packs))(*[PackUse(name, size, self.piece.stored_len if i == 0 else 0)
                                         for i, (name, size) in enumerate(packs)])
        digest = Digest()
        self.lib.base_digest_of(c.c_void_p(object_.data), c.c_size_t(object_.len), c.byref(digest))
        part = Part(rank=rank, world=world, host=self.lib.store_hostname(), layout=digest, packs=table,
                    npacks=len(packs))
        timings = (Timing * len(self.timings))(*self.timings)
        part.timings, part.ntimings = c.cast(timings, c.c_void_p), len(timings)
        self.api.call(self.lib.store_part_finish, b, c.byref(part), c.byref(part_ref))
        self.seal(meta, w)
        live = (part_ref.stored_len + sum(chunk.ref.stored_len for chunk in part.chunks[:part.nchunks]) +
                (layout_ref.stored_len if rank == 0 else 0))
        self.lib.store_part_builder_free(b)
        self.lib.store_layout_free(l)
        self.lib.base_buf_release(c.byref(object_))
        layout_ref.pack = part_ref.pack = len(packs) - 1
        table[len(packs) - 1] = PackUse(meta, self.own[-1][1], live)
        self.keep = [table]
        a = Announcement(layout=digest, stores_layout=rank == 0, part=proto_ref(part_ref), packs=table,
                         npacks=len(packs), tensors=1, bytes=PIECE,
                         new_bytes=sum(size for _, size in self.own))
        if rank == 0:
            a.layout_ref = proto_ref(layout_ref)
        return a

    def announce(self, first=None):
        self.api.call(self.lib.commit_attempt_announce, self.p, c.byref(self.part(first)))

    def wait(self, timeout=60000):
        entry = c.c_uint64()
        self.api.call(self.lib.commit_attempt_wait, self.p, c.c_int64(timeout), c.byref(entry))
        return entry.value


# ---- storage that answers as told ----

class Meddler:
    """Stands between a store and its storage: counts calls by name, and answers as told."""

    def __init__(self, api):
        self.count, self.answer, self.lock = {}, {}, threading.Lock()
        self.head = c.cast(api.p.contents.storage, c.POINTER(StorageHead)).contents
        self.old = c.pointer(self.head.ops.contents)  # a pointer of its own: the field itself would change with it
        self.ops = Ops()
        self.keep = []
        for name, kind in Ops._fields_:  # addresses stay addresses: a c_char_p would end at the first zero
            raw = c.CFUNCTYPE(kind._restype_, *[c.c_void_p if t is c.c_char_p else t for t in kind._argtypes_])
            inner = c.cast(getattr(self.old.contents, name), raw)
            self.keep.append(raw(lambda *args, name=name, inner=inner: self.called(name, inner, args)))
            setattr(self.ops, name, c.cast(self.keep[-1], kind))
        self.head.ops = c.pointer(self.ops)

    def called(self, name, inner, args):
        with self.lock:
            self.count[name] = self.count.get(name, 0) + 1
        told = self.answer.get(name, lambda args: None)(args)
        return told if told is not None else inner(*args)

    def fail_puts(self, lands):
        """Each put fails; `lands`: what it puts is there all the same."""
        def put(args):
            if lands:
                data = c.string_at(args[2], args[3])
                assert self.old.contents.put(args[0], c.string_at(args[1]), data, len(data)) == 0
            return -errno.EIO
        self.answer["put"] = put

    def share(self, shared=True):
        """What the storage says of its file system: that other hosts have it, too."""
        def stat(args):
            assert self.old.contents.stat(*args) == 0
            args[1].contents.local = not shared
            return 0
        self.answer["stat"] = stat

    def end(self):
        self.head.ops = self.old


IN_TIME = "the run's list could not be read or written in time"  # commit_attempt_abort's own reason


def commit_in_flight(m, run, lands):
    """No entry of the run can be put until the writer gives up for good. Then (lands) the commit that it sent last
    comes before its abort."""
    sent = []

    def put(args):
        path, data = c.string_at(args[1]), c.string_at(args[2], args[3])
        if not path.startswith(f"runs/{run}/0".encode()):
            return None
        if IN_TIME.encode() in data:
            if lands and sent:
                assert m.old.contents.put(args[0], *sent.pop()) == 0
            return None
        if b"the commit entry could not be written" not in data:
            sent.append((path, data, len(data)))
        return -errno.EIO
    m.answer["put"] = put


# ---- processes ----

FORK = multiprocessing.get_context("fork")


def rank_main(lib, path, rank, function, pipe, seed, args):
    random.seed(seed)   # a forked process would draw what all others draw
    api = Api(lib, path, init=False)
    api.say = lambda what: pipe.send(("said", time.monotonic(), what))
    api.hear = pipe.recv
    try:
        result = ("ok", function(api, rank, *args))
    except Failed as e:
        result = ("failed", (e.code, e.text))
    except BaseException as e:
        result = ("raised", repr(e))
    pipe.send((result[0], time.monotonic(), result[1]))
    os._exit(0)


class Ranks:
    """function(api, rank, *args) in a process for each rank. Each has a pipe of its own: a rank that is killed spoils
    nobody's."""

    def __init__(self, api, ranks, function, *args):
        self.pipes, self.processes = {}, {}
        for r in (range(ranks) if isinstance(ranks, int) else ranks):
            self.pipes[r], theirs = FORK.Pipe()
            self.processes[r] = FORK.Process(target=rank_main, args=(api.lib, str(api.path), r, function, theirs,
                                                                     random.getrandbits(64), args))
            self.processes[r].start()
            theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def hear(self, rank, timeout=60):
        """The next message of a rank: (kind, time, what)."""
        assert self.pipes[rank].poll(timeout), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def tell(self, ranks, what):
        for r in ranks:
            self.pipes[r].send(what)

    def said(self, ranks, what):
        for r in ranks:
            kind, _, heard = self.hear(r)
            assert (kind, heard) == ("said", what), (r, kind, heard)

    def results(self, ranks=None):
        """{rank: (time, (kind, value))}"""
        out = {}
        for r in self.processes if ranks is None else ranks:
            kind, when, value = self.hear(r)
            out[r] = (when, (kind, value))
        return out

    def signal(self, rank, number):
        os.kill(self.processes[rank].pid, number)
        return time.monotonic()

    def kill(self, rank):
        when = time.monotonic()
        self.processes[rank].kill()
        self.processes[rank].join()
        return when

    def end(self):
        for p in self.processes.values():
            p.kill()
            p.join()
