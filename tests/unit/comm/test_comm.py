# SPDX-License-Identifier: Apache-2.0
"""Communicators: gathers and passes arrive, over shared memory and by functions in Python; a rank that dies, leaves,
gives up, does not come or makes other calls is an error of all, and no call hangs."""
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from commlib import (E2BIG, ECANCELED, EINVAL, EPROTO, ETIMEDOUT, PASS_BYTES, ROOMS, Board, Comm, Failed, PythonRank,
                     fresh_name, good, internal, together)


@pytest.fixture(scope="module")
def lib(build):
    return internal(build)


class Makers:
    """Ranks that are threads, over one of the transports."""

    def __init__(self, lib, kind, size, **options):
        self.lib, self.kind, self.size, self.options = lib, kind, size, options
        self.name, self.board = fresh_name(), Board(size)
        self.python = [PythonRank(self.board, rank) for rank in range(size)]

    def make(self, rank):
        if self.kind == "shared":
            return Comm(self.lib, rank, self.size, self.name, **self.options)
        return Comm(self.lib, rank, self.size, functions=self.python[rank].functions, **self.options)

    def run(self, work):
        """work(comm) at each rank; what is made is freed when all are done."""
        made = [None] * self.size

        def one(rank):
            made[rank] = self.make(rank)
            return work(made[rank])
        out = together(self.size, one)
        for comm in made:
            if comm:
                comm.free()
        if self.kind == "shared":
            assert not pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{self.name}").exists()
        else:
            assert [p.freed for p in self.python] == [1] * self.size
        return out


KINDS = pytest.mark.parametrize("kind", ["shared", "functions"])


@KINDS
def test_gathers(lib, kind, seed):
    for size in (1, 2, 3):
        rng = random.Random(seed)
        rounds = [[rng.randbytes(rng.choice((0, 0, 1, 7, 1000, 65536, 65537, 200000))) for _ in range(size)]
                  for _ in range(6)] + [[b""] * size]
        out = good(Makers(lib, kind, size).run(lambda comm, r=rounds: [comm.gather(one[comm.rank]) for one in r]))
        assert out == [rounds] * size


def schedule(rng, size, n):
    """[(owner, ranks that want it, bytes)]"""
    out = []
    for _ in range(n):
        owner = rng.randrange(size)
        others = [i for i in range(size) if i != owner]
        ranks = sorted(rng.sample(others, rng.randint(1, len(others))))
        out.append((owner, ranks, rng.randbytes(rng.choice((1, 100, 5000, 70000) if rng.random() < .9
                                                           else (PASS_BYTES,)))))
    return out


@KINDS
def test_passes(lib, kind, seed):
    """Some are in flight at once, at each rank another number; gathers come in between."""
    for size in (2, 4):
        plan = schedule(random.Random(seed + size), size, 60)

        def work(comm, plan=plan):
            rng, flying, got = random.Random(comm.rank), [], []
            for i, (owner, ranks, data) in enumerate(plan):
                own = sum(p.owner == comm.rank for p in flying)
                while flying and (own >= ROOMS or len(flying) > 12 or rng.random() < .3):
                    p = flying.pop(0)
                    own -= p.owner == comm.rank
                    got.append(comm.finish(p))
                flying.append(comm.start(owner, ranks, len(data), data if owner == comm.rank else None))
                if i % 20 == 19:
                    got += [comm.finish(p) for p in flying]
                    flying.clear()
                    comm.gather(b"x" * comm.rank)
            return got + [comm.finish(p) for p in flying]
        out = good(Makers(lib, kind, size).run(work))
        for rank in range(size):
            assert out[rank] == [data if rank in ranks else None for _, ranks, data in plan]


@KINDS
def test_a_gather_comes_after_all_passes(lib, kind):
    def work(comm):
        p = comm.start(0, [1], 3, b"abc" if comm.rank == 0 else None)
        with pytest.raises(Failed, match="1 passes are not finished"):
            comm.gather(b"")
        return comm.finish(p), comm.gather(b"x")
    assert good(Makers(lib, kind, 2).run(work)) == [(None, [b"x", b"x"]), (b"abc", [b"x", b"x"])]


def test_rooms_are_bounded(lib):
    def work(comm):
        rooms = [comm.room() for _ in range(ROOMS)]
        assert comm.room() == -11
        comm.lib.comm_room_free(comm.p, rooms[3])
        assert bool(comm.room())
    for kind in ("shared", "functions"):
        good(Makers(lib, kind, 1).run(work))


WRONG = [(0, [1], 0), (0, [1], PASS_BYTES + 1), (5, [1], 9), (0, [0], 9), (0, [2], 9), (0, [], 9), (0, [1, 1], 9)]


@KINDS
def test_wrong_arguments(lib, kind):
    def work(comm, wrong):
        with pytest.raises(Failed) as e:
            comm.start(*wrong)
        return e.value.code
    for wrong in WRONG:
        codes = good(Makers(lib, kind, 2).run(lambda comm, wrong=wrong: work(comm, wrong)))
        assert -EINVAL in codes and set(codes) <= {-EINVAL, -ECANCELED}, (wrong, codes)
    functions = PythonRank(Board(1), 0).functions if kind == "functions" else None
    with pytest.raises(Failed, match="no rank 3 among 3"):
        Comm(lib, 3, 3, fresh_name(), functions)
    with pytest.raises(Failed, match="a communicator has 1 to 65536 ranks"):
        Comm(lib, 0, 0, fresh_name(), functions)


def test_names(lib):
    for name in ("", "a/b", "a b", "x" * 101):
        with pytest.raises(Failed, match="cannot be the name"):
            Comm(lib, 0, 1, name)


@KINDS
def test_too_long_is_no_end(lib, kind):
    """All ranks are told alike, and go on."""
    def work(comm):
        with pytest.raises(Failed, match="more than 100 bytes") as e:
            comm.gather(b"x" * 60, most=100)
        return e.value.code, comm.gather(b"y", most=100)
    assert good(Makers(lib, kind, 2).run(work)) == [(-E2BIG, [b"y", b"y"])] * 2


@KINDS
def test_out_of_step(lib, kind):
    def work(comm):
        with pytest.raises(Failed) as e:
            comm.gather(b"x", what=b"a vote" if comm.rank else b"a plan")
        with pytest.raises(Failed) as again:
            comm.gather(b"x")
        assert again.value.text == e.value.text
        return e.value.code, e.value.text
    out = good(Makers(lib, kind, 2).run(work))
    assert -EPROTO in [code for code, _ in out] and {code for code, _ in out} <= {-EPROTO, -ECANCELED}
    for code, text in out:
        assert "out of step" in text or kind == "functions" and code == -ECANCELED


@KINDS
def test_one_gives_up(lib, kind):
    def work(comm):
        if comm.rank == 1:
            comm.abort("it has no memory")
        with pytest.raises(Failed) as e:
            comm.gather(b"there")
        return e.value.code, e.value.text
    out = good(Makers(lib, kind, 3).run(work))
    assert out[1] == (-ECANCELED, "it has no memory")
    for code, text in (out[0], out[2]):
        assert code == -ECANCELED and (kind == "functions" or text == "rank 1 gave up: it has no memory")


@KINDS
def test_one_does_not_come(lib, kind):
    """A time-out that is told at the others; the late rank is told as well."""
    def work(comm):
        if comm.rank == 0:
            return "silent"
        with pytest.raises(Failed) as e:
            comm.finish(comm.start(0, [1], 10)) if comm.rank == 1 else comm.gather(b"")
        return e.value.code, e.value.text
    out = good(Makers(lib, kind, 2, timeout_ms=300).run(work))
    assert out[1][0] == -ETIMEDOUT and (kind == "functions" or out[1][1] == "rank 0 did nothing for 300 ms")


def test_one_leaves(lib):
    makers = Makers(lib, "shared", 2)

    def work(rank):
        comm = makers.make(rank)
        if rank == 1:
            comm.free()
            return None
        with pytest.raises(Failed) as e:
            comm.gather(b"")
        comm.free()
        return e.value.text
    assert good(together(2, work))[0] == "rank 1 has left"


def test_meeting_fails_with_names(lib):
    with pytest.raises(Failed, match=r"2 of 3 ranks have not come to .* within 200 ms: rank 0, 2") as e:
        Comm(lib, 1, 3, fresh_name(), timeout_ms=200)
    assert e.value.code == -ETIMEDOUT
    name = fresh_name()
    out = together(2, lambda rank: Comm(lib, rank, 2 + rank, name, timeout_ms=500))
    assert any("was started with" in str(e) for e in out) and all(isinstance(e, Failed) for e in out)


def test_a_folder_of_others_is_refused(lib):
    name = fresh_name()
    folder = pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{name}")
    folder.mkdir()
    try:
        folder.chmod(0o755)
        with pytest.raises(Failed, match="mode 0700"):
            Comm(lib, 0, 1, name)
    finally:
        folder.rmdir()


def test_one_name_again_and_again(lib):
    """Some ranks are ahead of others, whose old files are still there."""
    name = fresh_name()

    def work(rank):
        out = []
        for i in range(12):
            comm = Comm(lib, rank, 3, name)
            out.append(comm.gather(bytes([i, rank])))
            comm.free()
        return out
    assert good(together(3, work)) == [[[bytes([i, rank]) for rank in range(3)] for i in range(12)]] * 3


PROCESS = """
    import os, sys
    from commlib import Comm, Failed, internal
    build, name, rank, size, die = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    comm = Comm(internal(build), rank, size, name)
    assert comm.gather(bytes([rank])) == [bytes([i]) for i in range(size)]
    data = bytes(range(256)) * 4000
    flying = [comm.start(i % size, [k for k in range(size) if k != i % size], len(data),
                         data if i % size == rank else None) for i in range(2 * size)]
    assert all(comm.finish(p) in (None, data) for p in flying)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        if die == "pass":
            comm.finish(comm.start(0, [i for i in range(1, size)], 9, b"123456789" if rank == 0 else None))
        else:
            comm.gather(b"")
        print("done")
    except Failed as e:
        print(e.text)
"""


@pytest.mark.parametrize("where", ["gather", "pass"])
def test_a_process_is_killed(build, where):
    """Also one that nobody has waited for yet: a zombie is dead."""
    name, size = fresh_name(), 3
    ranks = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(PROCESS), str(build), name, str(rank), str(size),
                               where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
             for rank in range(size)]
    try:
        for p in ranks:
            assert p.stdout.readline() == "ready\n"
        ranks[0].send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)
        for p in ranks[1:]:
            said, _ = p.communicate("go\n", timeout=100)
            assert f"rank 0 is dead (process {ranks[0].pid})" in said
    finally:
        for p in ranks:
            p.kill()
            p.wait()
            p.stdout.close()
            p.stdin.close()


def meet_and_die(build, name, rank, size):
    """The process of a rank that is killed while it waits for others."""
    script = ("import sys, commlib, pathlib; "
              "commlib.Comm(commlib.internal(pathlib.Path(sys.argv[1])), *map(int, sys.argv[3:]), sys.argv[2])")
    running = subprocess.Popen([sys.executable, "-c", script, str(build), name, str(rank), str(size)])
    seat = pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{name}/{rank}")
    while not seat.exists():
        assert running.poll() is None
    running.kill()
    running.wait()
    assert seat.exists()
    return seat.parent


def test_a_rank_that_dies_while_ranks_meet(lib, build):
    """Those that wait for it take its file away, and the folder."""
    name = fresh_name()
    folder = meet_and_die(build, name, 1, 3)
    for error in together(2, lambda i: Comm(lib, 2 * i, 3, name, timeout_ms=600)):
        assert isinstance(error, Failed) and error.code == -ETIMEDOUT and ": rank 1" in error.text
    assert not folder.exists()


def leave(text, name="0"):
    """A folder with a rank's file that no one holds; None: an empty folder."""
    folder = pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{fresh_name()}")
    folder.mkdir(0o700)
    if text is not None:
        (folder / name).write_text(text)
    return folder


def test_a_file_that_was_taken_for_a_leftover(lib):
    """A rank that waits shows its file again."""
    name = fresh_name()
    seat = pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{name}/0")

    def meet(rank):
        if rank == 1:
            while not seat.exists():
                pass
            seat.unlink()
        Comm(lib, rank, 2, name, timeout_ms=20_000).free()
    assert together(2, meet) == [None] * 2
    assert not seat.parent.exists()


@pytest.mark.parametrize("other", ["data", "0.tmp", "1.0123456789abcdeg", ".0", "-1"])
def test_what_is_no_file_of_a_rank_stays(build, other):
    """A user may have a folder of such a name."""
    folder = leave("mine", other)
    (folder / "0").touch()
    try:
        meet_and_die(build, fresh_name(), 0, 2)         # whose process meets for the first time
        assert [f.name for f in folder.iterdir()] == [other]
    finally:
        shutil.rmtree(folder)


def test_ranks_that_all_died_while_they_met(lib, build):
    """The next meeting of a process takes away what they left, at whatever point they were killed and in whatever pid
    namespace, and nothing of those that live."""
    left = [meet_and_die(build, fresh_name(), 0, 2), leave(None), leave(""), leave(f"{os.getpid()} 1 3 77 5 held\n")]
    old = leave(f"{os.getpid()} 1 3 77 5\n")    # of an older vckpt, which holds no lock, in another pid namespace
    living = fresh_name()
    waiting = subprocess.Popen([sys.executable, "-c", textwrap.dedent(f"""
        import sys, commlib, pathlib
        commlib.Comm(commlib.internal(pathlib.Path({str(build)!r})), 0, 2, {living!r})
    """)])
    try:
        seat = pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{living}/0")
        while not seat.exists():
            assert waiting.poll() is None
        meet_and_die(build, living + "x", 0, 2)         # whose process meets for the first time
        assert not [folder for folder in left if folder.exists()] and seat.exists() and old.exists()
        Comm(lib, 1, 2, living).free()
        assert waiting.wait(60) == 0
    finally:
        waiting.kill()
        waiting.wait()
        shutil.rmtree(old)
    subprocess.run([sys.executable, "-c", textwrap.dedent(f"""
        import commlib, pathlib
        commlib.Comm(commlib.internal(pathlib.Path({str(build)!r})), 0, 1, {living!r}).free()
    """)], check=True)
    assert not pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{living}x").exists()
