# SPDX-License-Identifier: Apache-2.0
"""NCCL as a transport, over the stand-ins for NCCL and for the driver: ranks are threads. The stand-in counts calls
that come too early, that do not match, or that name memory or a context that is none; every failure is an error of all
ranks, nothing hangs, and nothing is left."""
import ctypes as c
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import commrank
from commlib import ECANCELED, ETIMEDOUT, Comm, Failed, fresh_name, good, internal, together
from exchangelib import Ranks
from saverlib import api, store  # noqa: F401 (fixtures)
from standinlib import standin
from test_api_load import save
from test_exchange import whole

FAULTS = ("early", "order", "memory", "context", "dead")
ECONNRESET, EINVAL, EIO, ENOENT = 104, 22, 5, 2
REMOTE_ERROR, SYSTEM_ERROR = 6, 2


class Standins:
    def __init__(self, build):
        os.environ["VCKPT_LIBNCCL"] = str(build / "tests/standin/libnccl.so.2")
        self.cuda, self.nccl = standin(build), c.CDLL(os.environ["VCKPT_LIBNCCL"])
        self.nccl.standin_nccl_count.restype, self.nccl.standin_nccl_join.restype = c.c_uint64, c.c_void_p
        self.lib = internal(build)

    def count(self, what):
        return self.nccl.standin_nccl_count(what.encode())

    def hang(self, function):
        self.nccl.standin_nccl_hang(function.encode())

    def until_closed(self):
        """Calls that were left alone have returned."""
        until = time.monotonic() + 60
        while self.count("comms"):
            assert time.monotonic() < until
            time.sleep(0.01)

    def left(self):
        return {what: n for what in (*FAULTS, "comms") if (n := self.count(what))} | self.cuda.faults() | \
            self.cuda.held()

    def reset(self):
        self.hang("")
        self.nccl.standin_nccl_reset()
        self.cuda.reset()


@pytest.fixture(scope="module")
def standins(build):
    return Standins(build)


@pytest.fixture
def nccl(standins):
    standins.reset()
    yield standins
    standins.reset()


class Nccl(Comm):
    """base: a communicator for strings; or parent: the program's ncclComm_t."""

    def __init__(self, lib, base=None, parent=None, timeout_ms=60000):
        self.lib, self.p = lib, c.c_void_p()
        if base:
            self.call("comm_nccl_new", base.p, timeout_ms, c.byref(self.p))
        else:
            self.call("comm_nccl_split", parent, timeout_ms, c.byref(self.p))
        self.head = c.cast(self.p, c.POINTER(commrank.Head))[0]
        self.rank, self.size = self.head.rank, self.head.size


class Job:
    """Ranks that are threads, each with a context of its own. kind: own, split, nonblocking (the parent is)."""

    def __init__(self, nccl, kind="own", size=3, timeout_ms=60000):
        self.nccl, self.kind, self.size, self.timeout_ms = nccl, kind, size, timeout_ms
        self.name, self.parents = fresh_name(), {}

    def parent(self, rank):
        comm = self.nccl.nccl.standin_nccl_join(self.name.encode(), self.size, rank, int(self.kind != "nonblocking"))
        self.parents[rank] = c.c_void_p(comm)
        return self.parents[rank]

    def run(self, work):
        """work(comm) of each rank: what it returned or raised; with kind "own" work(comm, base)."""
        def one(rank):
            self.nccl.cuda.context()
            base = Comm(self.nccl.lib, rank, self.size, self.name) if self.kind == "own" else None
            try:
                comm = Nccl(self.nccl.lib, base, None if base else self.parent(rank), self.timeout_ms)
            except Failed:
                if base:
                    assert base.gather(bytes([rank])) == [bytes([i]) for i in range(self.size)], "base is broken"
                    base.free()
                raise
            try:
                self.nccl.cuda.set(None)                                  # as in a load's thread
                return work(comm)
            finally:
                comm.free()
                if base:
                    base.free()
        out = together(self.size, one)
        for parent in self.parents.values():
            self.nccl.nccl.ncclCommDestroy(parent)
        return out


KINDS = pytest.mark.parametrize("kind", ["own", "split", "nonblocking"])


@KINDS
def test_gathers_and_passes(nccl, kind, seed):
    good(Job(nccl, kind).run(lambda comm: commrank.exchange(comm, seed, 40)))
    assert nccl.left() == {}


@pytest.mark.parametrize("size", [1, 2])
def test_few_ranks(nccl, size, seed):
    good(Job(nccl, size=size).run(lambda comm: commrank.exchange(comm, seed, 10) if size > 1 else comm.gather(b"x")))
    assert nccl.left() == {}


@KINDS
def test_ranks_out_of_step(nccl, kind, seed):
    good(Job(nccl, kind).run(lambda comm: commrank.order(comm, seed)))
    assert nccl.left() == {}


def test_one_gives_up(nccl, seed):
    good(Job(nccl).run(lambda comm: commrank.gives_up(comm, seed)))
    assert nccl.left() == {}


def silent(comm, seed):
    comm.head.timeout_ms = 700
    commrank.silent(comm, seed, lambda: None)


@KINDS
def test_one_does_nothing(nccl, kind, seed):
    """The others' kernels wait for it on the device; after the time-out they are aborted."""
    good(Job(nccl, kind).run(lambda comm: silent(comm, seed)))
    assert nccl.left() == {}


@pytest.mark.parametrize("kind, function, nth, code, errno", [
    ("own", "ncclBroadcast", 5, SYSTEM_ERROR, EIO), ("own", "ncclSend", 3, SYSTEM_ERROR, EIO),
    ("own", "ncclRecv", 2, 5, EINVAL), ("own", "ncclGroupEnd", 3, 3, EIO),
    ("own", "ncclAsync", 40, REMOTE_ERROR, ECONNRESET), ("own", "cuEventRecord", 4, 700, 14),
    ("own", "cuEventCreate", 6, 2, 12), ("own", "cuMemHostAlloc", 5, 2, 12), ("own", "ncclGroupStart", 2, 3, EIO),
    ("split", "ncclGroupEnd", 1, 3, EIO), ("split", "ncclAsync", 40, REMOTE_ERROR, ECONNRESET)])
def test_a_call_fails(nccl, kind, function, nth, code, errno, seed):
    """At one rank: the others are told, or find out by the time-out."""
    all_there = threading.Barrier(3)

    def work(comm):
        if kind == "split":
            comm.head.timeout_ms = 3000
        if comm.rank == 0:
            nccl.cuda.fail(function, nth, code)
        all_there.wait(60)
        try:
            commrank.exchange(comm, seed, 60)
        except Failed as error:
            return -error.code
        return 0
    out = good(Job(nccl, kind).run(work))
    assert set(out) <= {errno, ECANCELED, ETIMEDOUT} and (errno in out or kind == "split"), out
    assert nccl.left() == {}


@pytest.mark.parametrize("function, code, text", [
    ("ncclGetUniqueId", SYSTEM_ERROR, "rank 0: ncclGetUniqueId: unhandled system error"),
    ("ncclCommInitRankConfig", 5, "ncclCommInitRankConfig: invalid usage"),
    ("ncclAsync", REMOTE_ERROR, "ncclCommInitRankConfig: remote process exited"),
    ("cuStreamCreate", 2, "cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY"),
    ("cuMemHostAlloc", 2, "pinned memory for NCCL: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")])
def test_no_communicator_is_everyones_error(nccl, function, code, text):
    """And the communicator for strings goes on."""
    job = Job(nccl, timeout_ms=2000)
    nccl.cuda.fail(function, 1, code)
    out = job.run(lambda comm: None)
    assert all(isinstance(error, Failed) for error in out), out
    assert all("rank " in error.text for error in out) and any(text in error.text for error in out), out
    assert nccl.left() == {}


def test_a_hanging_abort_is_left_alone(nccl, seed):
    """Its memory stays, since the device may write to it."""
    nccl.hang("ncclCommAbort")
    good(Job(nccl).run(lambda comm: silent(comm, seed)))
    assert nccl.left().get("comms") and nccl.left().get("allocations")
    nccl.hang("")
    nccl.until_closed()


def test_a_split_that_nobody_joins(nccl):
    job = Job(nccl, "split", size=2)

    def one(rank):
        nccl.cuda.context()
        parent = job.parent(rank)
        if rank == 0:
            with pytest.raises(Failed, match="ncclCommSplit did not return within 500 ms") as e:
                Nccl(nccl.lib, parent=parent, timeout_ms=500)
            nccl.nccl.ncclCommAbort(parent)                               # the thread that is left ends
            return -e.value.code
        return 0
    assert good(together(2, one)) == [ETIMEDOUT, 0]
    nccl.nccl.ncclCommDestroy(job.parents[1])
    nccl.until_closed()


class Loads(Ranks):
    """Ranks whose communicator is NCCL's over one of shared memory."""

    def __init__(self, nccl, api, size):  # noqa: F811
        super().__init__(api, size)
        self.nccl, self.bases = nccl, [None] * size

    def make(self, rank):
        self.nccl.cuda.context()
        super().make(rank)
        self.bases[rank], comm = self.comms[rank], c.c_void_p()
        self.api.call("vckpt_comm_nccl", self.bases[rank], self.timeout_ms, c.byref(comm))
        self.comms[rank] = comm
        with pytest.raises(Exception, match="in use by another load, call or communicator"):
            self.api.call("vckpt_comm_nccl", self.bases[rank], self.timeout_ms, c.byref(c.c_void_p()))

    def __exit__(self, *args):
        super().__exit__(*args)
        for base in self.bases:
            self.api.lib.vckpt_comm_free(base)


def test_a_load(nccl, api, store, seed):  # noqa: F811
    """Through vckpt.h, twice; each stored byte is read by one rank."""
    arrays, out = commrank.arrays_of(seed), [None] * 3
    save(api, store, arrays)
    with Loads(nccl, api, 3) as ranks:
        for _ in range(2):
            read = good(ranks.run(store, whole(arrays, out), after=lambda rank, load: load.progress().bytes_read))
            assert all(got[name].tobytes() == array.tobytes() for got in out for name, array in arrays.items())
            assert all(read) and sum(read) < 1.1 * sum(array.nbytes for array in arrays.values())
    assert nccl.left() == {}


PROGRAM = """
    import ctypes as c, sys
    from commlib import Comm, Failed, fresh_name, internal
    lib = internal(sys.argv[1])
    cuda = c.CDLL(sys.argv[1] + "/tests/standin/libcuda.so.1")
    cuda.standin_context_new.restype = c.c_void_p
    cuda.standin_context_set(c.c_void_p(cuda.standin_context_new()))
    base, made = Comm(lib, 0, 1, fresh_name()), c.c_void_p()
    try:
        base.call("comm_nccl_new", base.p, 1000, c.byref(made))
    except Failed as e:
        print(-e.code, e.text)
"""


@pytest.mark.parametrize("env, text", [
    ({"VCKPT_LIBNCCL": "/no/libnccl.so.2"}, "rank 0: no NCCL: /no/libnccl.so.2: cannot open shared object file"),
    ({"VCKPT_LIBNCCL": "{build}/tests/standin/libnccl_old.so"},
     "libnccl_old.so has no ncclGetErrorString: NCCL 2.14 or later is needed"),
    ({"VCKPT_LIBCUDA": "/no/libcuda.so.1"}, "rank 0: no CUDA driver: /no/libcuda.so.1"),
])
def test_what_is_missing_is_told(build, env, text):
    given = {"VCKPT_LIBCUDA": "{build}/tests/standin/libcuda.so.1", "VCKPT_LIBNCCL":
             "{build}/tests/standin/libnccl.so.2"} | env
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM), str(build)], text=True, timeout=120,
                          env=dict(os.environ, **{name: word.format(build=build) for name, word in given.items()}),
                          capture_output=True)
    assert done.stdout.startswith(f"{ENOENT} ") and text in done.stdout, done
