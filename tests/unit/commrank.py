# SPDX-License-Identifier: Apache-2.0
"""What one rank of a communicator does in tests, whatever carries it: all ranks call a scenario with the same other
arguments, as processes or as threads. Run as a program it is one rank of an MPI job (test_comm_mpi.py)."""
import ctypes as c
import os
import pathlib
import random
import signal
import sys
import time

from commlib import ECANCELED, EPROTO, ETIMEDOUT, PASS_BYTES, ROOMS, Comm, Failed, internal


MPI_INIT, ALWAYS = 1, 2


def noise(seed, number, nbytes):
    return random.Random(f"{seed} {number}").randbytes(min(nbytes, 1000)).ljust(nbytes, b"\x5a")


def exchange(comm, seed, count):
    """Gathers and passes of many kinds; the ranks differ in how many passes they have on their way."""
    same, own, flying = random.Random(f"{seed} exchange"), random.Random(f"{seed} exchange {comm.rank}"), []

    def finish():
        p, data = flying.pop(0)
        assert comm.finish(p) == (data if p.owner != comm.rank else None), f"bucket {p.number} of rank {p.owner}"

    for number in range(count):
        owner = same.randrange(comm.size)
        others = [rank for rank in range(comm.size) if rank != owner]
        ranks = others if same.random() < 0.5 else sorted(same.sample(others, same.randint(1, len(others))))
        nbytes = PASS_BYTES if number % 16 == 0 else same.choice((1, 8, 4096, same.randint(1, 1 << 18)))
        data = noise(seed, number, nbytes)
        p = comm.start(owner, ranks, nbytes, data if owner == comm.rank else None)
        if comm.rank in (owner, *ranks):
            flying.append((p, data))
        while len(flying) > own.randint(0, ROOMS - 1):
            finish()
        if number % 20 == 19 or number == count - 1:
            while flying:
                finish()
            lens = [same.choice((0, 1, 100, 70000)) for _ in range(comm.size)]
            strings = [noise(seed, -1 - rank, lens[rank]) for rank in range(comm.size)]
            assert comm.gather(strings[comm.rank]) == strings


def fails(comm, codes, text, *calls):
    """The first call that fails, and every later one, fails so. Of several calls the first ones may work."""
    for call in (*calls, lambda: comm.gather(b""), lambda: comm.gather(b"")):
        try:
            call()
        except Failed as error:
            assert -error.code in codes and text in error.text, error
            failed = True
    assert failed


def order(comm, seed):
    """A rank that is at something else: all are told."""
    fails(comm, (EPROTO, ECANCELED), "out of step",
          lambda: comm.gather(b"", what=b"plans" if comm.rank == 1 else b"sizes"))


def gives_up(comm, seed):
    """Rank 1 gives up; the others are in the middle of a pass. All are told why."""
    if comm.rank == 1:
        comm.abort("no such\tfile")
    fails(comm, (ECANCELED,), "no such?file" if comm.rank == 1 else "rank 1 gave up: no such?file",
          lambda: comm.finish(comm.start(1, [rank for rank in range(comm.size) if rank != 1], 1000)))


def silent(comm, seed, wait):
    """Rank 1 does nothing until wait() returns, and the others, which need it, do not hang."""
    if comm.rank == 1:
        wait()
    else:
        fails(comm, (ETIMEDOUT, ECANCELED), "the other ranks did nothing for",
              lambda: comm.finish(comm.start(1, [rank for rank in range(comm.size) if rank != 1], 100)))


# ---- a rank of an MPI job ----

class Head(c.Structure):
    _fields_ = [("ops", c.c_void_p), ("rank", c.c_uint32), ("size", c.c_uint32), ("timeout_ms", c.c_uint32)]


class Mpi(Comm):
    def __init__(self, lib, own=None, init=True):
        """own: the address of an MPI_Comm."""
        self.lib, self.p = lib, c.c_void_p()
        self.call("comm_mpi_new", own, c.c_bool(init), 60000, c.byref(self.p))
        self.head = c.cast(self.p, c.POINTER(Head))[0]
        self.rank, self.size = self.head.rank, self.head.size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


class Job:
    """What ranks tell each other beside MPI: each says in a file of `folder` that it is done with a part."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size = pathlib.Path(folder), rank, size

    def say(self, part, text="done"):
        file = self.folder / f"{part}.{self.rank}"
        file.with_suffix(".new" + file.suffix).write_text(text)
        file.with_suffix(".new" + file.suffix).rename(file)

    def meet(self, part, ranks=None):
        until = time.monotonic() + 120
        while not all((self.folder / f"{part}.{rank}").exists() for rank in ranks or range(self.size)):
            assert time.monotonic() < until, part
            time.sleep(0.01)


class Program:
    """A program with an MPI of its own, loaded by its name, as mpi4py does it."""

    def __init__(self, kind, level):
        self.open = kind == "openmpi"
        self.lib = c.CDLL("libmpi.so.40" if self.open else "libmpich.so.12", mode=os.RTLD_LOCAL)
        self.handle = c.c_void_p if self.open else c.c_int
        assert self.lib.MPI_Init_thread(None, None, level, c.byref(c.c_int())) == 0

    def known(self, name, number):
        return c.c_void_p(c.addressof(c.c_char.in_dll(self.lib, name))) if self.open else c.c_int(number)

    def reversed(self):
        """An MPI_Comm of all ranks, in the opposite order."""
        world, rank, comm = self.known("ompi_mpi_comm_world", 0x44000000), c.c_int(), self.handle()
        assert self.lib.MPI_Comm_rank(world, c.byref(rank)) == 0
        assert self.lib.MPI_Comm_split(world, 0, -rank.value, c.byref(comm)) == 0
        return rank.value, comm

    def finalize(self):
        assert self.lib.MPI_Finalize() == 0


def part_exchange(lib, folder, seed):
    with Mpi(lib) as comm:
        exchange(comm, seed, 40)
    with Mpi(lib, init=False) as comm:                                    # another, of the same MPI
        assert comm.gather(bytes([comm.rank])) == [bytes([rank]) for rank in range(comm.size)]
    Job(folder, comm.rank, comm.size).say("exchange")


def part_faults(lib, folder, seed):
    """Ranks leave together: a launcher ends the others when one leaves without MPI_Finalize."""
    for one in (order, gives_up) * 8:        # a communicator hears nothing of those before it
        with Mpi(lib) as comm:
            one(comm, seed)
        Job(folder, comm.rank, comm.size).say(one.__name__)
    job = Job(folder, comm.rank, comm.size)
    with Mpi(lib) as comm:
        comm.head.timeout_ms = 1500
        silent(comm, seed, lambda: job.meet("silent", [rank for rank in range(comm.size) if rank != 1]))
        job.say("silent")
    job.meet("silent")
    os._exit(0)


def part_program(lib, folder, seed, kind, level):
    program = Program(kind, int(level))
    rank, own = program.reversed()
    with Mpi(lib, c.byref(own), init=False) as comm:
        assert comm.rank == comm.size - 1 - rank
        exchange(comm, seed, 20)
    with Mpi(lib, init=False):                                            # that is freed too late
        program.finalize()
    for init in (False, True):
        try:
            Mpi(lib, init=init)
        except Failed as error:
            assert "finalised already" in error.text
        else:
            raise AssertionError("MPI was finalised, and used")
    Job(folder, rank, comm.size).say("program")


def part_sentence(lib, folder, seed, init, kind="", level=""):
    """What is said where there can be no communicator."""
    if kind:
        Program(kind, int(level))
    try:
        Mpi(lib, init=init == "init")
    except Failed as error:
        Job(folder, os.getpid(), 0).say("sentence", f"{-error.code} {error.text}")
    os._exit(0)


def part_dies(lib, folder, seed):
    comm = Mpi(lib)
    job = Job(folder, comm.rank, comm.size)
    job.say("lives")
    job.meet("lives")
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.gather(b"")


def arrays_of(seed):
    """What the step has that part_load loads."""
    import numpy as np
    generator = np.random.default_rng(seed)
    return {"model/wide": generator.standard_normal((700, 1100)).astype("f4"),
            "model/bias": generator.standard_normal(33).astype("f4")}


def part_load(lib, folder, seed, build, store):
    """Replicas through vckpt.h: each stored byte is read by one rank."""
    import numpy as np

    from loadlib import Opened
    from saverlib import Vckpt
    api, comm, arrays = Vckpt(pathlib.Path(build)), c.c_void_p(), arrays_of(seed)
    try:
        api.call("vckpt_comm_mpi", None, 2, 0, c.byref(comm))
    except Exception as error:
        assert "0x2 is not in VCKPT_MPI_INIT" in str(error), error
    api.call("vckpt_comm_mpi", None, MPI_INIT, 60000, c.byref(comm))
    head = c.cast(c.cast(comm, c.POINTER(c.c_void_p))[0], c.POINTER(Head))[0]
    got = {name: np.zeros_like(array) for name, array in arrays.items()}
    with Opened(api, store) as step, step.load(head.rank, 2, 0, head.size, comm, ALWAYS) as load:
        for name, array in got.items():
            load.tensor(name, array)
        load.start()
        load.wait(120000)
        read = load.progress().bytes_read
    assert all(got[name].tobytes() == array.tobytes() for name, array in arrays.items())
    job = Job(folder, head.rank, head.size)
    api.lib.vckpt_comm_free(comm)
    job.say("load", str(read))


if __name__ == "__main__":
    globals()[f"part_{sys.argv[4]}"](internal(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[5:])
