# SPDX-License-Identifier: Apache-2.0
"""Lists, attempts and the collector through ctypes: mirrors of the structs of proto/message.h and core/store/*.h."""
import ctypes as c
import errno
import os
import pathlib
import shutil
import tempfile

NONE = 2**64 - 1
LAUNCH, COMMIT, ABORT, REMOVE, SNAPSHOT = 1, 2, 3, 4, 5
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


class Commit(c.Structure):
    _fields_ = [("step", c.c_uint64), ("attempt", c.c_char_p), ("time_ns", c.c_int64), ("replaces", c.c_uint64), ("manifest", Digest),
                ("tensors", c.c_uint64), ("bytes", c.c_uint64), ("new_bytes", c.c_uint64),
                ("attributes", c.POINTER(Attribute)), ("nattributes", c.c_size_t), ("extra", c.c_void_p), ("extra_len", c.c_size_t)]


class Live(c.Structure):
    _fields_ = [("entry", c.c_uint64), ("commit", Commit)]


class Entry(c.Structure):
    _fields_ = [("kind", c.c_int), ("time_ns", c.c_int64), ("host", c.c_char_p), ("commit", Commit), ("launch", c.c_char_p),
                ("newest_step", c.c_uint64), ("attempt", c.c_char_p), ("reason", c.c_char_p), ("rank", c.c_uint32), ("removes", c.c_uint64),
                ("live", c.POINTER(Live)), ("nlive", c.c_size_t), ("nentries_hint", c.c_uint64), ("arena", c.c_void_p)]


class ListStep(c.Structure):
    _fields_ = [("step", c.c_uint64), ("entry", c.c_uint64), ("commit", Commit)]


class Info(c.Structure):  # struct proto_store
    _fields_ = [("version", c.c_uint32), ("id", c.c_uint8 * 16), ("seed", c.c_uint64), ("min_bytes", c.c_uint64), ("target_bytes", c.c_uint64),
                ("row_bytes", c.c_uint64), ("reserve_bytes", c.c_uint64), ("arena", c.c_void_p)]


class Store(c.Structure):
    _fields_ = [("storage", c.c_void_p), ("info", Info), ("path", c.c_char * 4096), ("packs", c.c_void_p)]


class LaunchInfo(c.Structure):
    _fields_ = [("launch", c.c_char * 17), ("host", c.c_char * 256), ("run", c.c_char * 129), ("state", c.c_int), ("file", c.c_char * 512),
                ("number", c.c_uint64)]


class AttemptOptions(c.Structure):
    _fields_ = [("run", c.c_char_p), ("step", c.c_uint64), ("replace", c.c_bool)]


Report = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_char_p, c.c_uint64, c.c_char_p)
Check = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)
ListFunc = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)


class GcOptions(c.Structure):
    _fields_ = [("dry_run", c.c_bool), ("grace_s", c.c_uint64), ("heartbeat_s", c.c_uint64), ("report", Report), ("arg", c.c_void_p)]


class GcResult(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("aborted", "marked", "deleted", "deleted_bytes", "waiting", "waiting_bytes")]


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(f"{errno.errorcode.get(-code, code)}: {text}")
        self.code, self.text = code, text


def prototypes(lib):
    for name in ("store_list_at", "store_list_find", "store_list_latest"):
        getattr(lib, name).restype = c.POINTER(ListStep)
    for name in ("store_list_next", "store_list_damaged", "store_list_count", "store_attempt_step", "store_record_max"):
        getattr(lib, name).restype = c.c_uint64
    lib.store_list_put.restype = c.c_int64
    lib.store_list_entry_live.restype = c.c_bool
    lib.store_list_newest_launch.restype = lib.store_attempt_name.restype = lib.store_hostname.restype = c.c_char_p
    return lib


def scratch():
    """A directory where fsync is cheap, if there is one."""
    return pathlib.Path(tempfile.mkdtemp(prefix="vckpt-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


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
        self.err = Error()
        r = function(*args, c.byref(self.err))
        if r < 0:
            raise Failed(r, self.err.text.decode())
        return r

    def list(self, run, whole=False):
        return List(self, run, whole)

    def entry(self, kind, **fields):
        e = Entry(kind=kind, time_ns=1, host=b"h")
        for name, value in fields.items():
            setattr(e.commit if kind == COMMIT else e, name, value)
        return e

    def commit_entry(self, attempt, step, replaces=NONE, mark=0, attributes=()):
        e = self.entry(COMMIT, step=step, attempt=attempt.encode(), replaces=replaces, manifest=digest(mark), tensors=1, bytes=mark)
        if attributes:
            e.commit.attributes = (Attribute * len(attributes))(*[Attribute(k.encode(), v.encode()) for k, v in attributes])
            e.commit.nattributes = len(attributes)
        return e

    def entry_path(self, run, n):
        return self.path / "runs" / run / f"{n:012d}"

    def put_raw(self, run, n, entry):
        """Puts an entry under a number, no questions asked."""
        body = Buf()
        assert self.lib.proto_entry_encode(c.byref(entry), c.byref(body)) == 0
        r = self.lib.store_record_put(c.c_void_p(self.p.contents.storage), f"runs/{run}/{n:012d}".encode(), ENTRY_RECORD,
                                      (c.c_uint8 * 16)(*self.id), c.c_void_p(body.data), c.c_size_t(body.len))
        self.lib.base_buf_release(c.byref(body))
        assert r == 0, r

    def remove_step(self, run, step):
        self.call(self.lib.store_step_remove, self.p, run.encode(), c.c_uint64(step))

    def launches(self):
        infos, n = c.POINTER(LaunchInfo)(), c.c_size_t()
        self.call(self.lib.store_launches, self.p, c.byref(infos), c.byref(n))
        return [(i.launch.decode(), i.host.decode(), i.run.decode(), i.state, i.number) for i in infos[:n.value]]

    def gc(self, grace=0, dry=False, heartbeat=0):
        """Returns (result, reports), or raises with .reports."""
        seen = []
        report = Report(lambda arg, what, name, size, detail: seen.append((what.decode(), os.fsdecode(name), detail.decode())))
        o, result = GcOptions(dry, grace, heartbeat, report, None), GcResult()
        try:
            self.call(self.lib.store_gc, self.p, c.byref(o), c.byref(result))
        except Failed as e:
            e.reports = seen
            raise
        return result, seen


class List:
    def __init__(self, api, run, whole=False):
        self.api, self.lib, self.run, self.p = api, api.lib, run, c.c_void_p()
        api.call(self.lib.store_list_open, api.p, run.encode(), c.c_bool(whole), c.byref(self.p))

    def close(self):
        self.lib.store_list_close(self.p)
        self.p = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def refresh(self):
        return self.api.call(self.lib.store_list_refresh, self.p)

    next = property(lambda self: self.lib.store_list_next(self.p))
    damaged = property(lambda self: self.lib.store_list_damaged(self.p))

    def steps(self):
        """{step: (entry, attempt, first bytes of the digest)}"""
        at = [self.lib.store_list_at(self.p, c.c_size_t(i)).contents for i in range(self.lib.store_list_count(self.p))]
        assert [s.step for s in at] == sorted({s.step for s in at})
        return {s.step: (s.entry, s.commit.attempt.decode(), s.commit.bytes) for s in at}

    def attempt(self, name):
        reason, entry = c.c_char_p(), c.c_uint64()
        return self.lib.store_list_attempt(self.p, name.encode(), c.byref(reason), c.byref(entry)), entry.value

    def put(self, entry, check=None):
        """check(list) returns 0 or a negative errno."""
        function = Check((lambda arg, l: check(self)) if check else 0)
        return self.api.call(self.lib.store_list_put, self.p, c.byref(entry), function, None)
