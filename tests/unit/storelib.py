# SPDX-License-Identifier: Apache-2.0
"""Lists, attempts and the collector through ctypes: mirrors of the structs of proto/message.h and core/step,
core/commit and core/upkeep."""
import contextlib
import ctypes as c
import errno
import hashlib
import os
import pathlib
import random
import shutil
import socket
import tempfile

NONE = 2**64 - 1
LAUNCH, COMMIT, ABORT, REMOVE, SNAPSHOT, ACCEPT, COLLECTED = 1, 2, 3, 4, 5, 6, 7
UNDECIDED, COMMITTED, ABORTED = 0, 1, 2
DEAD, ALIVE, UNKNOWN = 0, 1, 2
DAMAGED, EABORTED, EBUSY = -errno.EBADMSG, -errno.ECANCELED, -errno.EBUSY
ENTRY_RECORD = 2


class Digest(c.Structure):
    _fields_ = [("bytes", c.c_uint8 * 32)]


def digest(byte):
    return Digest((c.c_uint8 * 32)(*([byte % 256, byte // 256 % 256] + [7] * 30)))


class Error(c.Structure):
    _fields_ = [("code", c.c_int), ("text", c.c_char * 1000)]


class Buf(c.Structure):
    _fields_ = [("data", c.c_void_p), ("len", c.c_size_t), ("size", c.c_size_t), ("error", c.c_int)]


class Attribute(c.Structure):
    _fields_ = [("key", c.c_char_p), ("value", c.c_char_p)]


class StepFacts(c.Structure):
    _fields_ = [("entry", c.c_uint64), ("pinned", c.c_bool), ("reason", c.c_char_p), ("pinned_ns", c.c_int64),
                ("pinned_by", c.c_char_p), ("tags", c.POINTER(c.c_char_p)), ("ntags", c.c_size_t),
                ("attributes", c.POINTER(Attribute)), ("nattributes", c.c_size_t)]


class Policy(c.Structure):
    _fields_ = [("rules", c.POINTER(c.c_char_p)), ("nrules", c.c_size_t), ("time_ns", c.c_int64), ("host", c.c_char_p)]


class Facts(c.Structure):
    _fields_ = [("there", c.c_bool), ("steps", c.POINTER(StepFacts)), ("nsteps", c.c_size_t), ("policed", c.c_bool),
                ("policy", Policy)]


class Commit(c.Structure):
    _fields_ = [("step", c.c_uint64), ("attempt", c.c_char_p), ("time_ns", c.c_int64), ("replaces", c.c_uint64),
                ("manifest", Digest),
                ("tensors", c.c_uint64), ("bytes", c.c_uint64), ("new_bytes", c.c_uint64),
                ("attributes", c.POINTER(Attribute)), ("nattributes", c.c_size_t), ("extra", c.c_void_p),
                ("extra_len", c.c_size_t), ("facts", c.POINTER(StepFacts))]


class Live(c.Structure):
    _fields_ = [("entry", c.c_uint64), ("commit", Commit)]


class Entry(c.Structure):
    _fields_ = [("kind", c.c_int), ("version", c.c_uint32), ("time_ns", c.c_int64), ("host", c.c_char_p),
                ("run", c.c_char_p),
                ("number", c.c_uint64), ("before", Digest), ("self", Digest), ("commit", Commit),
                ("launch", c.c_char_p),
                ("newest_step", c.c_uint64), ("nonce", c.c_uint8 * 16), ("list_2", c.c_bool), ("from_", c.c_uint64),
                ("nth", c.c_uint64), ("ids", c.c_void_p), ("nids", c.c_size_t), ("attempt", c.c_char_p),
                ("reason", c.c_char_p), ("rank", c.c_uint32),
                ("removes", c.c_uint64), ("live", c.POINTER(Live)), ("nlive", c.c_size_t), ("from_digest", Digest),
                ("gone", c.POINTER(c.c_uint64)), ("ngone", c.c_size_t), ("older", c.c_uint64),
                ("newest_launch", c.c_uint64), ("accepts", c.POINTER(c.c_uint64)),
                ("naccepts", c.c_size_t), ("facts", Facts), ("arena", c.c_void_p)]


class ListStep(c.Structure):
    _fields_ = [("step", c.c_uint64), ("entry", c.c_uint64), ("commit", Commit)]


class GridParams(c.Structure):
    _fields_ = [("min_bytes", c.c_uint64), ("target_bytes", c.c_uint64), ("row_bytes", c.c_uint64),
                ("small_bytes", c.c_uint64)]


class Info(c.Structure):  # struct proto_store
    _anonymous_ = ["grid"]
    _fields_ = [("version", c.c_uint32), ("id", c.c_uint8 * 16), ("seed", c.c_uint64), ("grid", GridParams),
                ("reserve_bytes", c.c_uint64), ("list_2", c.c_bool), ("list_3", c.c_bool),
                ("list_4", c.c_bool), ("arena", c.c_void_p)]


class Store(c.Structure):
    _fields_ = [("storage", c.c_void_p), ("info", Info), ("path", c.c_char * 4096), ("packs", c.c_void_p)]


class LaunchInfo(c.Structure):
    _fields_ = [("launch", c.c_char * 17), ("host", c.c_char * 256), ("run", c.c_char * 129), ("state", c.c_int),
                ("file", c.c_char * 512),
                ("number", c.c_uint64)]


class Save(c.Structure):
    _fields_ = [("step", c.c_uint64), ("replace", c.c_bool), ("mesh", Digest), ("commons", c.c_void_p),
                ("facts", c.POINTER(StepFacts)), ("keep_facts", c.c_bool),
                ("thinned", c.POINTER(c.c_char_p)), ("nthinned", c.c_uint32), ("world", c.c_uint32),
                ("count", c.c_uint64), ("time_ns", c.c_int64), ("list", c.c_void_p)]


Report = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_char_p, c.c_uint64, c.c_char_p)
Progress = c.CFUNCTYPE(None, c.c_void_p, c.c_uint64, c.c_uint64)
Check = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)
ListFunc = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)


class GcOptions(c.Structure):
    _fields_ = [("dry_run", c.c_bool), ("grace_s", c.c_uint64), ("heartbeat_s", c.c_uint64), ("report", Report),
                ("arg", c.c_void_p), ("progress", Progress),
                ("plan", c.c_void_p)]


class GcReason(c.Structure):
    _fields_ = [("what", c.c_char_p), ("why", c.c_char * 80), ("files", c.c_uint64), ("bytes", c.c_uint64),
                ("due_ns", c.c_int64)]


class GcResult(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("aborted", "marked", "marked_bytes", "deleted", "deleted_bytes", "waiting",
                                          "waiting_bytes", "entries", "entries_bytes")] + [
        ("reasons", GcReason * 16), ("nreasons", c.c_uint)]


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(f"{errno.errorcode.get(-code, code)}: {text}")
        self.code, self.text = code, text


def prototypes(lib):
    for name in ("commit_list_at", "commit_list_find", "commit_list_latest"):
        getattr(lib, name).restype = c.POINTER(ListStep)
    for name in ("commit_list_next", "commit_list_first", "commit_list_head", "commit_list_damaged",
                 "commit_list_count", "commit_attempt_step", "store_record_max"):
        getattr(lib, name).restype = c.c_uint64
    lib.commit_list_put.restype = c.c_int64
    for name in ("commit_list_entry_live", "commit_list_mark_keeps", "commit_list_snapshot_whole"):
        getattr(lib, name).restype = c.c_bool
    lib.commit_attempt_name.restype = lib.store_hostname.restype = c.c_char_p
    return lib


def scratch():
    """A directory where fsync is cheap, if there is one."""
    return pathlib.Path(tempfile.mkdtemp(prefix="vckpt-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK)
                                         else None))


def alone(entry):
    """A snapshot or a launch entry that goes on from no other, if nothing else is said of it."""
    if entry.kind in (LAUNCH, SNAPSHOT) and not entry.list_2:
        entry.list_2, entry.older, entry.newest_launch = True, NONE, NONE
        if entry.kind == LAUNCH:
            entry.nth, entry.from_ = 1, NONE


class Api:
    """One open store. Handles are void pointers; calls that fail raise Failed with the sentence."""

    def __init__(self, lib, path, init=True, flags=0):
        self.lib, self.path, self.err = prototypes(lib), pathlib.Path(path), Error()
        if init:
            self.call(lib.store_init, os.fsencode(path), c.c_uint64(1 << 16))
        self.p = c.POINTER(Store)()
        self.call(lib.store_open, os.fsencode(path), flags, c.byref(self.p))
        self.id = bytes(self.p.contents.info.id)

    def close(self):
        self.lib.store_close(self.p)

    def call(self, function, *args):
        self.err = err = Error()    # of this call alone: threads share an Api
        r = function(*args, c.byref(err))
        if r < 0:
            raise Failed(r, err.text.decode())
        return r

    def list(self, run, whole=False):
        return List(self, run, whole)

    def entry(self, kind, **fields):
        e = Entry(kind=kind, time_ns=1, host=b"h")
        for name, value in fields.items():
            setattr(e.commit if kind == COMMIT else e, name, value)
        return e

    def commit_entry(self, attempt, step, replaces=NONE, mark=0, attributes=()):
        e = self.entry(COMMIT, step=step, attempt=attempt.encode(), replaces=replaces, manifest=digest(mark), tensors=1,
                       bytes=mark)
        if attributes:
            e.commit.attributes = (Attribute * len(attributes))(*[Attribute(k.encode(), v.encode())
                                                                  for k, v in attributes])
            e.commit.nattributes = len(attributes)
        return e

    def entry_path(self, run, n):
        return self.path / "runs" / run / f"{n:012d}"

    def entry_body(self, run, n):
        """The body of an entry, as its first copy says."""
        file = self.entry_path(run, n).read_bytes()
        return file[48:48 + int.from_bytes(file[12:16], "little")]

    def put_raw(self, run, n, entry, before=None):
        """Puts an entry under a number, no questions asked, with the place that it stands at."""
        alone(entry)
        self.put_raw_as_it_is(run, n, entry, before)

    def put_raw_as_it_is(self, run, n, entry, before=None):
        body = Buf()
        entry.run, entry.number = run.encode(), n
        entry.before = Digest(
            (c.c_uint8 * 32)(*(before or (hashlib.sha256(self.entry_body(run, n - 1)).digest() if n else bytes(32)))))
        assert self.lib.proto_entry_encode(c.byref(entry), c.byref(body)) == 0
        self.put_body(run, n, c.string_at(body.data, body.len))
        self.lib.base_buf_release(c.byref(body))

    def put_body(self, run, n, body):
        r = self.lib.store_record_put(c.c_void_p(self.p.contents.storage), f"runs/{run}/{n:012d}".encode(),
                                      ENTRY_RECORD,
                                      (c.c_uint8 * 16)(*self.id), body, c.c_size_t(len(body)))
        assert r == 0, r

    def remove_step(self, run, step):
        self.call(self.lib.commit_step_remove, self.p, run.encode(), c.c_uint64(step), None)

    def launches(self):
        infos, n = c.POINTER(LaunchInfo)(), c.c_size_t()
        self.call(self.lib.commit_launches, self.p, c.byref(infos), c.byref(n))
        return [(i.launch.decode(), i.host.decode(), i.run.decode(), i.state, i.number) for i in infos[:n.value]]

    def gc(self, grace=0, dry=False, heartbeat=0):
        """Returns (result, reports), or raises with .reports."""
        seen = []
        report = Report(
            lambda arg, what, name, size, detail: seen.append((what.decode(), os.fsdecode(name), detail.decode())))
        self.gc_progress = []
        progress = Progress(lambda arg, done, total: self.gc_progress.append((done, total)))
        o, result = GcOptions(dry, grace, heartbeat, report, None, progress), GcResult()
        try:
            self.call(self.lib.upkeep_gc, self.p, c.byref(o), c.byref(result))
        except Failed as e:
            e.reports = seen
            raise
        return result, seen


class List:
    def __init__(self, api, run, whole=False):
        self.api, self.lib, self.run, self.p = api, api.lib, run, c.c_void_p()
        api.call(self.lib.commit_list_open, api.p, run.encode(), c.c_bool(whole), c.byref(self.p))

    def close(self):
        self.lib.commit_list_close(self.p)
        self.p = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def refresh(self):
        return self.api.call(self.lib.commit_list_refresh, self.p)

    next = property(lambda self: self.lib.commit_list_next(self.p))
    damaged = property(lambda self: self.lib.commit_list_damaged(self.p))

    def steps(self):
        """{step: (entry, attempt, first bytes of the digest)}"""
        count = self.lib.commit_list_count(self.p)
        at = [self.lib.commit_list_at(self.p, c.c_size_t(i)).contents for i in range(count)]
        assert [s.step for s in at] == sorted({s.step for s in at})
        return {s.step: (s.entry, s.commit.attempt.decode(), s.commit.bytes) for s in at}

    def attempt(self, name):
        reason, entry = c.c_char_p(), c.c_uint64()
        return self.lib.commit_list_attempt(self.p, name.encode(), c.byref(reason), c.byref(entry)), entry.value

    def put(self, entry, check=None):
        """check(list) returns 0 or a negative errno."""
        function = Check((lambda arg, l: check(self)) if check else 0)
        return self.api.call(self.lib.commit_list_put, self.p, c.byref(entry), function, None)


# ---- tiny saves: one tensor of a hundred bytes, its piece in a pack of the attempt's own or in one of an earlier
# commit ----

class Ref(c.Structure):  # struct pack_object_ref
    _fields_ = [("digest", Digest), ("offset", c.c_uint64), ("checks", c.c_uint64), ("raw_len", c.c_uint64),
                ("stored_len", c.c_uint64),
                ("codec", c.c_uint16), ("kind", c.c_uint8), ("pack", c.c_uint32)]


class ProtoRef(c.Structure):
    _fields_ = [("digest", Digest), ("offset", c.c_uint64), ("checks", c.c_uint64), ("raw_len", c.c_uint64),
                ("stored_len", c.c_uint64),
                ("pack", c.c_uint32), ("codec", c.c_uint16), ("kind", c.c_uint8)]


class PackUse(c.Structure):
    _fields_ = [("pack", c.c_char_p), ("size", c.c_uint64), ("live_bytes", c.c_uint64)]


class Chunk(c.Structure):
    _fields_ = [("first", c.c_uint32), ("last", c.c_uint32), ("rows", c.c_uint32), ("ref", ProtoRef)]


class Part(c.Structure):
    _fields_ = [("rank", c.c_uint32), ("world", c.c_uint32), ("host", c.c_char_p), ("layout", Digest),
                ("packs", c.POINTER(PackUse)),
                ("npacks", c.c_uint32), ("chunks", c.POINTER(Chunk)), ("nchunks", c.c_uint32), ("blobs", c.c_void_p),
                ("nblobs", c.c_uint32),
                ("timings", c.c_void_p), ("ntimings", c.c_uint32), ("samples", c.c_void_p), ("nsamples", c.c_uint32),
                ("arena", c.c_void_p)]


class Announcement(c.Structure):
    _fields_ = [("run", c.c_char_p), ("attempt", c.c_char_p), ("step", c.c_uint64), ("rank", c.c_uint32),
                ("world", c.c_uint32),
                ("host", c.c_char_p), ("layout", Digest), ("stores_layout", c.c_bool), ("layout_ref", ProtoRef),
                ("headers", c.c_void_p),
                ("nheaders", c.c_uint32), ("part", ProtoRef), ("packs", c.POINTER(PackUse)), ("npacks", c.c_uint32),
                ("tensors", c.c_uint64),
                ("bytes", c.c_uint64), ("new_bytes", c.c_uint64), ("attributes", c.POINTER(Attribute)),
                ("nattributes", c.c_size_t),
                ("replicas", c.c_void_p), ("nreplicas", c.c_uint32), ("commons", c.c_void_p), ("ncommons", c.c_uint32),
                ("arena", c.c_void_p)]


class Piece(c.Structure):
    _fields_ = [("ref", Ref), ("xxh", c.c_uint8 * 16), ("inline_bytes", c.c_void_p), ("base", c.c_uint32)]


class Shape(c.Structure):
    _fields_ = [("ndim", c.c_uint32), ("dim", c.c_uint64 * 16)]


def proto_ref(ref):
    return ProtoRef(ref.digest, ref.offset, ref.checks, ref.raw_len, ref.stored_len, ref.pack, ref.codec, ref.kind)


class Attempt:
    """A save by a writer alone, in steps that a test can stop at."""

    def __init__(self, api, run, step=NONE, replace=False, **more):
        self.api, self.lib, self.run, self.p = api, api.lib, run, c.c_void_p()
        self.options = Save(step, replace, **more)      # which may point to what lives as long as the attempt
        api.call(self.lib.commit_attempt_begin_alone, api.p, run.encode(), c.byref(self.options), c.byref(self.p))
        self.name, self.step = self.lib.commit_attempt_name(self.p).decode(), self.lib.commit_attempt_step(self.p)
        self.own, self.piece, self.keep, self.base_pack, self.xxh = [], None, [], None, (c.c_uint8 * 16)()

    def folder(self):
        return self.api.path / "incoming" / self.run / self.name

    def base(self, run, entry, manifest):
        return self.api.call(self.lib.commit_attempt_base, self.p, run.encode(), c.c_uint64(entry), c.byref(manifest))

    def pack_name(self, kind):
        name = c.create_string_buffer(128)
        assert self.lib.pack_name_make(self.name.encode(), c.c_uint32(0), kind.encode(), name) == 0
        return name.value

    def writer(self, kind):
        w, name = c.c_void_p(), c.create_string_buffer(128)
        r = self.lib.commit_attempt_pack_open(self.p, kind.encode(), name, c.byref(w))
        if r < 0:
            raise Failed(r, f"open {kind}")
        return name.value, w

    def seal(self, name, w):
        size = c.c_uint64()
        r = self.lib.commit_attempt_pack_seal(self.p, w, c.byref(size))
        if r < 0:
            raise Failed(r, f"seal {name}")
        self.own.append((name, size.value))

    def write(self, data):
        """Its own pack "model" with one piece."""
        name, w = self.writer("model")
        ref = Ref()
        assert self.lib.pack_append_raw(w, 1, data, c.c_uint64(len(data)), c.byref(ref)) == 0
        self.seal(name, w)
        self.piece, self.base_pack, self.xxh = ref, None, (c.c_uint8 * 16)()
        self.lib.base_xxh128_of(c.c_uint64(self.api.p.contents.info.seed), data, c.c_size_t(len(data)),
                                c.byref(self.xxh))

    def reuse(self, saved):
        """The piece of a commit that was named as base."""
        self.piece, self.base_pack, self.xxh = saved.piece, saved.piece_pack, saved.xxh

    def layout(self):
        self.lib.store_layout_builder_new.restype = c.c_void_p
        b = c.c_void_p(self.lib.store_layout_builder_new(GridParams(128 << 10, 1 << 20, 256, 32 << 10)))
        shape = Shape(1, (c.c_uint64 * 16)(self.piece.raw_len))
        self.api.call(self.lib.store_layout_builder_add, b, b"model", b"w", c.c_size_t(1), 2, c.byref(shape),
                      c.c_uint32(0))
        l, object_, tags = c.c_void_p(), Buf(), c.c_void_p()
        self.api.call(self.lib.store_layout_builder_finish, b, c.byref(l), c.byref(object_), c.byref(tags))
        self.lib.store_layout_builder_free(b)
        return l, object_

    def part(self):
        """The pack "meta" with layout and part; returns the announcement."""
        l, object_ = self.layout()
        meta, w = self.writer("meta")
        layout_ref, part_ref = Ref(), Ref()
        assert self.lib.pack_append_raw(w, 3, c.c_void_p(object_.data), c.c_uint64(object_.len),
                                              c.byref(layout_ref)) == 0
        packs = [(name, size) for name, size in self.own] + ([self.base_pack] if self.base_pack else []) + [(meta, 0)]
        self.lib.store_part_builder_new.restype = c.c_void_p
        b = c.c_void_p(self.lib.store_part_builder_new(l, w, c.c_uint32(len(packs) - 1)))
        piece = Piece(ref=self.piece, xxh=self.xxh, base=2**32 - 1)
        piece.ref.pack = [name for name, _ in packs].index(self.base_pack[0] if self.base_pack
                                                           else self.pack_name("model"))
        self.api.call(self.lib.store_part_add_row, b, c.c_uint32(0), None, c.c_uint32(0), c.byref(piece), c.c_uint64(1))
        assert self.lib.pack_extent_end(w) == 0
        table = (PackUse * len(packs))(*[PackUse(name, size, self.piece.stored_len if i == piece.ref.pack else 0)
                                         for i, (name, size) in enumerate(packs)])
        part = Part(rank=0, world=1, host=socket.gethostname().encode()[:255], layout=layout_ref.digest, packs=table,
                    npacks=len(packs))
        self.api.call(self.lib.store_part_finish, b, c.byref(part), c.byref(part_ref))
        self.seal(meta, w)
        live = layout_ref.stored_len + part_ref.stored_len + sum(chunk.ref.stored_len
                                                                 for chunk in part.chunks[:part.nchunks])
        self.lib.store_part_builder_free(b)
        self.lib.store_layout_free(l)
        self.lib.base_buf_release(c.byref(object_))
        layout_ref.pack = part_ref.pack = len(packs) - 1
        table[len(packs) - 1] = PackUse(meta, self.own[-1][1], live)
        self.keep = [table]
        return Announcement(layout=layout_ref.digest, stores_layout=True, layout_ref=proto_ref(layout_ref),
                            part=proto_ref(part_ref),
                            packs=table, npacks=len(packs), tensors=1, bytes=self.piece.raw_len,
                            new_bytes=sum(size for _, size in self.own))

    def commit(self, announcement=None):
        """Returns the entry's number. Afterwards packs() names what the step needs."""
        announcement = announcement or self.part()
        entry = c.c_uint64()
        self.api.call(self.lib.commit_attempt_commit, self.p, c.byref(announcement), c.byref(entry))
        self.entry = entry.value
        self.piece_pack = self.base_pack or (self.pack_name("model"), dict(self.own)[self.pack_name("model")])
        self.packs = {name.decode() for name, _ in self.own} | {self.piece_pack[0].decode()}
        with self.api.list(self.run) as l:
            step = self.lib.commit_list_find(l.p, c.c_uint64(self.step)).contents
            self.manifest = Digest.from_buffer_copy(step.commit.manifest)
        return self.entry

    def abort(self, reason="test"):
        """What became of it: (code, sentence, entry)."""
        entry, err = c.c_uint64(NONE), Error()
        r = self.lib.commit_attempt_abort(self.p, reason.encode(), c.byref(entry), c.byref(err))
        return r, err.text.decode(), entry.value

    def free(self):
        self.lib.commit_attempt_free(self.p)
        self.p = None


def save(api, run, step=NONE, data=None, base=None, replace=False):
    """A whole tiny save; returns the finished Attempt."""
    a = Attempt(api, run, step, replace)
    try:
        if base:
            a.base(base.run, base.entry, base.manifest)
            a.reuse(base)
        else:
            a.write(data or random.randbytes(100))
        a.commit()
    finally:
        a.free()
    return a


def packs_of(api):
    return {p.name[:-5] for p in (api.path / "packs").glob("*/*.pack")}


def open_all(api, saved):
    """Reads the step's piece as a reader would; True if every byte is there."""
    pack, out = c.c_void_p(), c.create_string_buffer(saved.piece.raw_len)
    name, _ = saved.piece_pack
    path = c.create_string_buffer(512)
    assert api.lib.pack_path(name, path) == 0
    api.call(api.lib.pack_open, c.c_void_p(api.p.contents.storage), (c.c_uint8 * 16)(*api.id), name,
             c.c_uint64(0), c.byref(pack))
    r = api.lib.pack_object_read(pack, c.byref(saved.piece), out, c.byref(api.err))
    api.lib.pack_close(pack)
    return r == 0


# ---- records of others: marks made older, heartbeats of another host ----

class Record(c.Structure):
    _fields_ = [("kind", c.c_int), ("body", c.c_void_p), ("len", c.c_size_t)]


class Trash(c.Structure):
    _fields_ = [("name", c.c_char_p), ("time_ns", c.c_int64), ("heartbeats", c.c_void_p), ("nheartbeats", c.c_uint32),
                ("arena", c.c_void_p)]


class Rank(c.Structure):
    _fields_ = [("rank", c.c_uint32), ("pid", c.c_uint64), ("start_time", c.c_uint64)]


class Heartbeat(c.Structure):
    _fields_ = [("launch", c.c_char_p), ("host", c.c_char_p), ("run", c.c_char_p), ("boot_id", c.c_char_p),
                ("number", c.c_uint64),
                ("time_ns", c.c_int64), ("ranks", c.POINTER(Rank)), ("nranks", c.c_uint32), ("nonce", c.c_uint8 * 16),
                ("period_ms", c.c_uint32), ("arena", c.c_void_p)]


HEARTBEAT_RECORD, TRASH_RECORD = 7, 8


def put_record(api, name, kind, encode, message):
    body = Buf()
    assert encode(c.byref(message), c.byref(body)) == 0
    r = api.lib.store_record_put(c.c_void_p(api.p.contents.storage), name.encode(), kind, (c.c_uint8 * 16)(*api.id),
                                 c.c_void_p(body.data),
                                 c.c_size_t(body.len))
    api.lib.base_buf_release(c.byref(body))
    assert r == 0, r


def age_marks(api):
    """As if every mark had been made long ago."""
    for path in sorted((api.path / "trash").glob("*")):
        record, m, name = Record(), Trash(), f"trash/{path.name}"
        r = api.lib.store_record_get(c.c_void_p(api.p.contents.storage), name.encode(), TRASH_RECORD,
                                     (c.c_uint8 * 16)(*api.id),
                                     c.byref(record), None, None)
        assert r == 0, r
        assert api.lib.proto_trash_decode(c.c_void_p(record.body), c.c_size_t(record.len), c.byref(m)) == 0
        api.lib.store_record_release(c.byref(record))
        path.unlink()
        m.time_ns = 1
        put_record(api, name, TRASH_RECORD, api.lib.proto_trash_encode, m)
        api.lib.proto_trash_release(c.byref(m))


def put_heartbeat(api, launch, run, number, host="elsewhere", nonce=bytes(16), period_ms=0):
    m = Heartbeat(launch=launch.encode(), host=host.encode(), run=run.encode(),
                  boot_id=b"00000000-0000-0000-0000-000000000000", number=number,
                  time_ns=1, ranks=(Rank * 1)(Rank(0, 1, 1)), nranks=1, nonce=(c.c_uint8 * 16)(*nonce),
                  period_ms=period_ms)
    put_record(api, f"hosts/{launch}.{host}.{number}", HEARTBEAT_RECORD, api.lib.proto_heartbeat_encode, m)


@contextlib.contextmanager
def fresh(lib):
    """An empty store of its own, while it is needed."""
    path = scratch()
    shutil.rmtree(path)
    api = Api(lib, path)
    yield api
    api.close()
    shutil.rmtree(path)
