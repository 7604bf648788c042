# SPDX-License-Identifier: Apache-2.0
"""Communicators through ctypes: core/comm/comm.h by the library that shows every symbol, ranks as threads or
processes, and a transport that is written in Python."""
import ctypes as c
import os
import threading
import uuid

u8, u32, u64, ptr = c.c_uint8, c.c_uint32, c.c_uint64, c.c_void_p
PASS_BYTES, ROOMS = (2 << 20) + 4096, 8
ECANCELED, ETIMEDOUT, EPROTO, E2BIG, EINVAL = 125, 110, 71, 7, 22


class Error(c.Structure):
    _fields_ = [("code", c.c_int), ("text", c.c_char * 1000)]


class Pass(c.Structure):
    _fields_ = [("number", u64), ("len", u64), ("bytes", c.POINTER(u8)), ("ranks", c.POINTER(u32)),
                ("nranks", u32), ("owner", u32), ("request", ptr), ("word", u64 * 2)]


class Gathered(c.Structure):
    _fields_ = [("len", c.POINTER(u64)), ("bytes", c.POINTER(c.POINTER(u8)))]


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


# ---- functions of the caller's ----

GATHER = c.CFUNCTYPE(c.c_int, ptr, ptr, c.POINTER(u64), ptr, u32)
START = c.CFUNCTYPE(c.c_int, ptr, c.POINTER(Pass), c.POINTER(ptr))
FINISH = c.CFUNCTYPE(c.c_int, ptr, c.POINTER(Pass), ptr, u32)
ABORT = c.CFUNCTYPE(None, ptr, c.c_char_p)
FREE = c.CFUNCTYPE(None, ptr)


class Functions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("arg", ptr), ("gather", GATHER), ("start", START), ("finish", FINISH),
                ("abort", ABORT), ("free", FREE)]


class Board:
    """Where ranks that are threads leave their bytes for each other, and check that all make the same calls."""

    def __init__(self, size):
        self.size, self.changed, self.gathers, self.passes, self.log = size, threading.Condition(), {}, {}, {}
        self.why = None

    def same(self, call, what):
        """All ranks say the same of a call."""
        if self.log.setdefault(call, what) != what:
            self.why = f"{call}: {what}, not {self.log[call]}"
            self.changed.notify_all()

    def until(self, ready, timeout_ms):
        with self.changed:
            done = self.changed.wait_for(lambda: self.why or ready(), timeout_ms / 1000)
            return -ECANCELED if self.why else 0 if done else -ETIMEDOUT


class PythonRank:
    """A rank's functions over a board."""

    def __init__(self, board, rank):
        self.board, self.rank, self.freed, self.ngathers = board, rank, 0, 0
        self.functions = Functions(c.sizeof(Functions), None, GATHER(self.gather), START(self.start),
                                   FINISH(self.finish), ABORT(self.abort), FREE(self.free))

    def gather(self, _, mine, lens, out, timeout_ms):
        b, n = self.board, self.ngathers
        self.ngathers += 1
        lens = lens[:b.size]
        with b.changed:
            b.same(("gather", n), lens)
            b.gathers.setdefault(n, {})[self.rank] = c.string_at(mine, lens[self.rank])
            b.changed.notify_all()
        r = b.until(lambda: len(b.gathers[n]) == b.size, timeout_ms)
        if r == 0:
            c.memmove(out, b"".join(b.gathers[n][i] for i in range(b.size)), sum(lens))
        return r

    def start(self, _, told, request):
        p, b = told[0], self.board
        with b.changed:
            b.same(("pass", p.number), (p.owner, p.len, p.ranks[:p.nranks]))
            wants = self.rank == p.owner or self.rank in p.ranks[:p.nranks]
            if bool(p.bytes) != wants:
                b.why = "memory at the wrong rank"
            if self.rank == p.owner:
                b.passes[p.number] = c.string_at(p.bytes, p.len)
                b.changed.notify_all()
        request[0] = p.number + 1
        return 0

    def finish(self, _, told, request, timeout_ms):
        p, b = told[0], self.board
        if request != p.number + 1:
            return -EINVAL
        if self.rank == p.owner:
            return 0
        r = b.until(lambda: p.number in b.passes, timeout_ms)
        if r == 0:
            c.memmove(p.bytes, b.passes[p.number], p.len)
        return r

    def abort(self, _, why):
        with self.board.changed:
            self.board.why = self.board.why or why.decode()
            self.board.changed.notify_all()

    def free(self, _):
        self.freed += 1


# ---- a communicator of core/comm ----

class Comm:
    def __init__(self, lib, rank, size, name=None, functions=None, timeout_ms=60000):
        self.lib, self.rank, self.size, self.p, self.keep = lib, rank, size, ptr(), functions
        if functions:
            self.call("comm_functions_new", c.byref(functions), rank, size, timeout_ms, c.byref(self.p))
        else:
            self.call("comm_shared_new", name.encode(), rank, size, timeout_ms, c.byref(self.p))

    def call(self, name, *args):
        err = Error()
        r = getattr(self.lib, name)(*args, c.byref(err))
        if r < 0:
            assert err.code == r and err.text, (name, r, err.code, err.text)
            raise Failed(r, err.text.decode())
        return r

    def gather(self, mine, what=b"a test", most=1 << 30):
        g = Gathered()
        self.call("comm_gather", self.p, what, c.create_string_buffer(mine, len(mine)), u64(len(mine)), u64(most),
                  c.byref(g))
        out = [c.string_at(g.bytes[i], g.len[i]) for i in range(self.size)]
        self.lib.comm_gathered_release(c.byref(g))
        return out

    def room(self):
        at = c.POINTER(u8)()
        r = self.lib.comm_room(self.p, c.byref(at))
        return at if r == 0 else r

    def start(self, owner, ranks, length, data=None):
        """data: the owner's; what it is given is handed on."""
        p = Pass(owner=owner, nranks=len(ranks), ranks=(u32 * max(1, len(ranks)))(*ranks), len=length)
        if data is not None:
            p.bytes = self.room()
            c.memmove(p.bytes, data, length)
        self.call("comm_pass_start", self.p, c.byref(p))
        return p

    def finish(self, p):
        """What came, at a rank that wants it."""
        self.call("comm_pass_finish", self.p, c.byref(p))
        if p.owner == self.rank or self.rank not in p.ranks[:p.nranks]:
            return None
        got = c.string_at(p.bytes, p.len)
        self.lib.comm_pass_done(self.p, c.byref(p))
        return got

    def abort(self, why):
        self.lib.comm_abort(self.p, why.encode())

    def free(self):
        self.lib.comm_free(self.p)
        self.p = ptr()


def internal(build):
    lib = c.CDLL(os.path.join(build, "tests/libvckpt_internal.so"))
    lib.comm_abort.restype = lib.comm_free.restype = lib.comm_pass_done.restype = None
    return lib


def fresh_name():
    return f"test-{uuid.uuid4().hex}"


def together(size, work, timeout=120):
    """work(rank) in a thread each: what each returned, or the exception that it raised."""
    out = [None] * size

    def one(rank):
        try:
            out[rank] = work(rank)
        except Exception as e:
            out[rank] = e
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout)
    assert not [t for t in threads if t.is_alive()], f"{out}: a rank hangs"
    return out


def good(results):
    """Those of together, none of them an exception."""
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise AssertionError(f"rank {rank}: {result}; all: {results}") from result
    return results
