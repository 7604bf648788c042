# SPDX-License-Identifier: Apache-2.0
"""Loads with a communicator: the error of one rank is the error of all, with its sentence: damage, other arguments, a
rank that gives up, stops, dies or sends something else. Nobody hangs."""
import ctypes as c
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from commlib import ABORT, GATHER, PythonRank, fresh_name, good, together
from exchangelib import ALWAYS, AUTO, NEVER, Ranks
from loadlib import REHASH, SKIP_DAMAGED, Opened
from saverlib import Failed, api, store  # noqa: F401 (fixtures)
from test_api_load import noise, save
from test_exchange import weights, whole

EDAMAGED, EABORTED, EINVAL, EPROTO = -74, -125, -22, -71
KINDS = pytest.mark.parametrize("kind", ["shared", "functions"])


@pytest.fixture
def arrays(api, store, rng):  # noqa: F811
    found = {"model/raw": noise(rng, (1200, 1000)), "model/encoded": weights(rng, (1000, 1500)),
             "model/bias": noise(rng, (301,))}
    save(api, store, found)
    return found


def failed(out):
    """[(code, sentence)] of all ranks, none of which has succeeded."""
    assert all(isinstance(e, Failed) for e in out), out
    return [(e.code, e.text) for e in out]


def damaged_copy(store, name, array):
    """Another store of the same steps, in which a bit of every 64 KiB of that tensor is another one."""
    copy = pathlib.Path(f"{store}-{name}")
    shutil.copytree(store, copy)
    for pack in copy.glob("packs/*/*-model.pack"):
        data, at = bytearray(pack.read_bytes()), 0
        stored = array.tobytes()
        for first in range(0, len(stored) - 64, 65536):
            at = data.find(stored[first:first + 64])
            if at >= 0:
                data[at] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    return copy


MORE = [pytest.param(kind, mode, marks=pytest.mark.full) for kind in ("shared", "functions") for mode in (NEVER, AUTO)]


@pytest.mark.parametrize("kind,mode", [("shared", ALWAYS), ("functions", ALWAYS), *MORE])
def test_damage_at_one_rank_is_told_to_all(api, store, arrays, kind, mode):  # noqa: F811
    copy = damaged_copy(store, "damaged", arrays["model/raw"])
    with Ranks(api, 3, kind) as ranks:
        told = failed(ranks.run(store, whole(arrays, {}), mode, r1={"store": copy}))
        assert [code for code, _ in told] == [EDAMAGED] * 3
        assert told[0][1] == told[2][1] == f"rank 1: {told[1][1]}"
        assert told[1][1].startswith("run/0: tensor model/raw: piece ") and "do not match" in told[1][1]
        out = {}                                    # and the communicator works on
        good(ranks.run(store, whole(arrays, out), mode))
        assert all(out[rank][name].tobytes() == a.tobytes() for rank in range(3) for name, a in arrays.items())


@KINDS
def test_damage_in_a_probe_leaves_the_communicator_whole(api, store, rng, kind):  # noqa: F811
    """Buckets were read for the probe, and are never passed on: their memory serves the next load."""
    arrays = {"model/raw": noise(rng, (1100, 1000))}
    save(api, store, arrays)
    copy = damaged_copy(store, "damaged", arrays["model/raw"])
    with Ranks(api, 2, kind) as ranks:
        for _ in range(2):
            told = failed(ranks.run(store, whole(arrays, {}), AUTO, r1={"store": copy}))
            assert [code for code, _ in told] == [EDAMAGED] * 2, told
        out = {}
        good(ranks.run(store, whole(arrays, out), AUTO))
        assert all(out[rank]["model/raw"].tobytes() == arrays["model/raw"].tobytes() for rank in range(2))


class SlowRank(PythonRank):
    def finish(self, arg, told, request, timeout_ms):
        time.sleep(.1)
        return super().finish(arg, told, request, timeout_ms)


def test_a_rank_reads_nothing_that_it_does_not_want(api, store, rng):  # noqa: F811
    """Not shared after a probe that had some of a piece: the rest is read by those that want it. Of each piece rank 0
    wants the first half, rank 2 the second, rank 1 both; in their copies of the store the other half is damaged."""
    half, n, out, copies = 32768, 64, {}, {}
    array = noise(rng, (2 * half * n,))
    save(api, store, {"model/raw": array})
    for rank, other in ((0, half), (2, 0)):
        copies[f"r{rank}"] = {"store": f"{store}-{rank}"}
        shutil.copytree(store, f"{store}-{rank}")
        for pack in pathlib.Path(f"{store}-{rank}").glob("packs/*/*-model.pack"):
            data, at = bytearray(pack.read_bytes()), 0
            for i in range(n):
                at = data.index(array[2 * i * half + other:][:16].tobytes(), at)
                for block in range(0, 4 * half, 16384):
                    data[at + block] ^= 1
            pack.chmod(0o644)
            pack.write_bytes(data)
    boxes = [[[(2 * i * half + at, size)] for i in range(n)] for at, size in ((0, half), (0, 2 * half), (half, half))]

    def declare(rank, load):
        out[rank] = np.zeros(sum(b[0][1] for b in boxes[rank]), "f4")
        load.tensor("model/raw", out[rank], shape=array.shape, boxes=boxes[rank])
    ranks = Ranks(api, 3, "functions")
    ranks.python = [SlowRank(ranks.board, rank) for rank in range(3)]
    with ranks:
        found = good(ranks.run(store, declare, AUTO, **copies,
                               after=lambda rank, load: (load.exchanged(), load.progress())))
    for rank, (x, p) in enumerate(found):
        assert (x.chosen, p.bytes_placed, p.pieces) == (NEVER, p.bytes_wanted, n), x.why
        assert p.bytes_read < 1.02 * p.bytes_wanted
        assert out[rank].tobytes() == b"".join(array[o:o + size].tobytes() for (o, size), in boxes[rank])


@pytest.mark.parametrize("kind,flags", [("shared", SKIP_DAMAGED), ("functions", SKIP_DAMAGED | REHASH)])
def test_what_an_owner_could_not_read_is_listed_at_all(api, store, arrays, kind, flags):  # noqa: F811
    copy, out = damaged_copy(store, "damaged", arrays["model/raw"]), {}
    with Ranks(api, 3, kind) as ranks:
        lost = good(ranks.run(store, whole(arrays, out), flags=flags, after=lambda rank, load: load.lost(),
                              r1={"store": copy}))
    boxes = [sorted(box for name, box, *_ in one) for one in lost]
    assert boxes[0] and boxes[0] == boxes[1] == boxes[2]
    for rank in range(3):
        for name, _, code, why in lost[rank]:
            assert (name, code) == ("model/raw", EDAMAGED) and "do not match" in why
            assert why.startswith("run/0: tensor" if rank == 1 else "rank 1: run/0: tensor")
        got, want = out[rank]["model/raw"].copy(), arrays["model/raw"].copy()
        for box in boxes[0]:
            at = tuple(slice(o, o + n) for o, n in box)
            got[at] = want[at] = 0
        assert got.tobytes() == want.tobytes()
        assert out[rank]["model/encoded"].tobytes() == arrays["model/encoded"].tobytes()


@KINDS
def test_ranks_that_ask_for_different_things_are_told_so(api, store, arrays, kind, tmp_path):  # noqa: F811
    save(api, store, arrays)
    other = api.store(tmp_path / "other")
    save(api, other, arrays)
    cases = [({"store": other}, "^rank 2 loads from another store than rank 0 does$"),
             ({"step": 0}, "^rank 2 loads step run/0, rank 0 step run/1: all ranks"),
             ({"exchange": NEVER}, '^the exchange of rank 2 is "never", that of rank 0 "always": all ranks of a load'),
             ({"flags": SKIP_DAMAGED}, "^the flags of rank 2 say: no check of SHA-256, damage is skipped; those of")]
    with Ranks(api, 3, kind) as ranks:
        for differs, sentence in cases:
            told = failed(ranks.run(store, whole(arrays, {}), r2=differs))
            assert len(set(told)) == 1 and told[0][0] == EINVAL
            assert re.search(sentence, told[0][1]), told[0][1]


@KINDS
def test_a_rank_that_gives_up_before(api, store, arrays, kind):  # noqa: F811
    """Its load is freed without a start, since a name is missing."""
    def declare(rank, load):
        whole(arrays, {})(rank, load)
        if rank == 1:
            load.tensor("model/other", np.zeros(3, "f4"))
    with Ranks(api, 3, kind) as ranks:
        told = failed(ranks.run(store, declare))
        assert told[1][0] == EINVAL and "model/other" in told[1][1]
        assert [code for code, _ in told] == [EABORTED, EINVAL, EABORTED]
        if kind == "shared":
            assert told[0][1] == told[2][1] == "rank 1 gave up: it gave up its load before this had begun"
        assert all(code == EABORTED for code, _ in failed(ranks.run(store, whole(arrays, {}))))


def test_a_rank_that_tells_why_it_gives_up(api, store, arrays):  # noqa: F811
    def declare(rank, load):
        if rank == 0:
            api.lib.vckpt_comm_abort(ranks.comms[0], b"its data loader has failed")
        whole(arrays, {})(rank, load)
    with Ranks(api, 2) as ranks:
        told = failed(ranks.run(store, declare))
    assert told[0][1] == "its data loader has failed" and told[1][1] == "rank 0 gave up: its data loader has failed"


def test_a_rank_that_waits_and_gives_up(api, store, arrays):  # noqa: F811
    """From another thread, while its load waits for a rank that does not come."""
    with Ranks(api, 2) as ranks, Opened(api, store) as step, step.load(0, 1, 0, 2, ranks.comms[0], ALWAYS) as load:
        whole(arrays, {})(0, load)
        load.start()
        with pytest.raises(Failed, match="ETIMEDOUT"):
            load.wait(300)
        api.lib.vckpt_comm_abort(ranks.comms[0], b"its data loader has failed")
        with pytest.raises(Failed, match="its data loader has failed"):
            load.wait(30000)


def test_a_load_that_is_over_is_no_wait_that_is_not(api, store, arrays):  # noqa: F811
    """A rank does nothing for the communicator's time-out. A program that waits again as long as the answer is
    ETIMEDOUT would wait for ever."""
    with Ranks(api, 2, timeout_ms=300) as ranks, Opened(api, store) as step, \
            step.load(0, 1, 0, 2, ranks.comms[0], ALWAYS) as load:
        whole(arrays, {})(0, load)
        load.start()
        for _ in range(3):
            with pytest.raises(Failed, match="did nothing for 300 ms") as e:
                load.wait(60000)
            assert e.value.code == EABORTED


@KINDS
def test_one_rank_is_stopped(api, store, arrays, kind):  # noqa: F811
    def declare(rank, load):
        whole(arrays, {})(rank, load)
        if rank == 1:
            load.stop()
    with Ranks(api, 2, kind) as ranks:
        told = failed(ranks.run(store, declare))
    assert [code for code, _ in told] == [EABORTED] * 2 and told[1][1] == "the load was stopped"


def test_one_rank_cannot_plan(api, store, arrays):  # noqa: F811
    """The tables of its copy of the store are damaged."""
    copy = pathlib.Path(f"{store}-copy")
    shutil.copytree(store, copy)
    with Ranks(api, 2) as ranks, Opened(api, store) as good_step, Opened(api, copy) as bad_step:
        for pack in copy.glob("packs/*/*-meta.pack"):
            pack.chmod(0o644)
            with open(pack, "r+b") as f:
                f.seek(4096)
                f.write(bytes(pack.stat().st_size - 4096 - 128))

        def work(rank):
            with (bad_step if rank else good_step).load(rank, 1, 0, 2, ranks.comms[rank], ALWAYS) as load:
                whole(arrays, {})(rank, load)
                load.run()
        told = failed(together(2, work))
    assert told[0][0] == told[1][0] and told[0][1] == f"rank 1: {told[1][1]}"


def test_one_communicator_serves_one_load(api, store, arrays):  # noqa: F811
    with Ranks(api, 1) as ranks, Opened(api, store) as step:
        for _ in range(2):                          # the second load begins when the first is over
            with step.load(0, 1, 0, 1, ranks.comms[0], ALWAYS) as load:
                load.tensor("model/bias", np.zeros(301, "f4"))
                load.run()
                x = load.exchanged()
                assert (x.chosen, x.ranks, x.bytes_got) == (NEVER, 1, 0)
                assert x.why == b"not shared: no two ranks want the same bytes"


def test_wrong_options(api, store, arrays):  # noqa: F811
    with Opened(api, store) as step:
        with pytest.raises(Failed, match="exchange of the load is 3"):
            step.load(0, 1, 0, 1, None, 3)
        load = step.load(0, 1, 0, 1, None, ALWAYS)  # without a communicator it has no effect
        load.tensor("model/bias", np.zeros(301, "f4"))
        load.run()
        assert load.exchanged().ranks == 0
        assert api.lib.vckpt_load_exchanged(load.p, c.byref((c.c_uint64 * 8)(5))) == EINVAL
        load.__exit__()
    comm = c.c_void_p()
    with pytest.raises(Failed, match="struct vckpt_comm_functions has 56 bytes"):
        api.call("vckpt_comm_functions", c.byref((c.c_uint64 * 8)(5)), 0, 1, 0, c.byref(comm))
    with pytest.raises(Failed, match="no name"):
        api.call("vckpt_comm_shared", None, 0, 1, 0, c.byref(comm))


# ---- what a wrong peer sends ----

class WrongRank(PythonRank):
    """Changes some of what it gets: of a gather, or of a bucket."""

    def __init__(self, board, rank, rng, which):
        super().__init__(board, rank)
        self.rng, self.which, self.changed = rng, which, 0

    def change(self, at, n, skip=0):
        if n <= skip or self.rng.random() < .3:
            return
        self.changed += 1
        for _ in range(self.rng.choice((1, 1, 4))):
            i = self.rng.randrange(skip, n)
            byte = c.c_uint8.from_address(at + i)
            byte.value = self.rng.choice((byte.value ^ 1 << self.rng.randrange(8), 0, 255, self.rng.randrange(256)))

    def gather(self, arg, mine, lens, out, timeout_ms):
        r = super().gather(arg, mine, lens, out, timeout_ms)
        if r == 0 and self.which == "gather":
            self.change(out, sum(lens[:self.board.size]))
        return r

    def finish(self, arg, told, request, timeout_ms):
        r = super().finish(arg, told, request, timeout_ms)
        if r == 0 and self.which == "bucket" and self.rank != told[0].owner:
            self.change(c.cast(told[0].bytes, c.c_void_p).value, told[0].len)
        return r


@pytest.mark.parametrize("which", ["gather", "bucket"])
def test_forged_messages(api, store, arrays, which, rng, scale):  # noqa: F811
    """No crash, no hang; and bytes are right if the load says so."""
    ended = {True: 0, False: 0}
    for _ in range(scale(12, 200)):
        ranks = Ranks(api, 2, "functions", 1000)
        ranks.python[0] = WrongRank(ranks.board, 0, random.Random(rng.getrandbits(32)), which)
        out = {}
        with ranks:
            told = ranks.run(store, whole(arrays, out), threads=1, flags=rng.choice((0, REHASH, SKIP_DAMAGED)))
        done = not isinstance(told[0], Exception)
        ended[done] += 1
        if done:
            assert all(out[0][name].tobytes() == a.tobytes() for name, a in arrays.items())
    assert ended[False]


class FailedRank(PythonRank):
    """What it gathers says that rank 1 has failed, with that code, wherever rank 1 greets."""

    def __init__(self, board, rank, code):
        super().__init__(board, rank)
        self.code = code

    def gather(self, arg, mine, lens, out, timeout_ms):
        r = super().gather(arg, mine, lens, out, timeout_ms)
        if r == 0 and c.string_at(out, 4) == b"VXG1":
            c.c_int32.from_address(out + lens[0] + 4).value = self.code
        return r


@pytest.mark.parametrize("mode", [NEVER, ALWAYS])
def test_no_code_of_a_rank_is_taken_for_success(api, store, arrays, mode):  # noqa: F811
    """-E2BIG is also what tells that there is too much to be shared."""
    for code in (-7, -12, -11, EABORTED):
        ranks = Ranks(api, 2, "functions")
        ranks.python = [FailedRank(ranks.board, rank, code) for rank in range(2)]
        with ranks:
            told = failed(ranks.run(store, whole(arrays, {}), mode))
        assert [r for r, _ in told] == [code] * 2, told


# ---- ranks that die ----

PROCESS = """
    import sys
    import numpy as np
    from exchangelib import ALWAYS
    from loadlib import Opened
    from saverlib import Failed, Vckpt
    import ctypes as c
    build, store, name, rank, size = *sys.argv[1:4], *map(int, sys.argv[4:])
    api, comm = Vckpt(build), c.c_void_p()
    api.call("vckpt_comm_shared", name.encode(), rank, size, 60000, c.byref(comm))
    with Opened(api, store) as step, step.load(rank, 1, 0, size, comm, ALWAYS) as load:
        for what, shape, dtype in (("raw", (1200, 1000), "f4"), ("encoded", (1000, 1500), "u2"), ("bias", 301, "f4")):
            load.tensor("model/" + what, np.zeros(shape, dtype))
        try:
            load.start()
            load.wait(100000)
            print("done")
        except Failed as e:
            print(e.text)
    api.lib.vckpt_comm_free(comm)
"""


@pytest.mark.parametrize("at", [1, 5])
def test_a_rank_is_killed(build, store, arrays, at):
    """When it has read nothing yet, and when the others have had buckets from it."""
    preload = " ".join([os.environ.get("VCKPT_PRELOAD", ""), str(build / "tests/libkill_read.so")]).strip()
    name, script = fresh_name(), textwrap.dedent(PROCESS)
    ranks = [subprocess.Popen([sys.executable, "-c", script, build, store, name, str(rank), "3"],
                              stdout=subprocess.PIPE, text=True,
                              env=dict(os.environ, LD_PRELOAD=preload, **({"KILL_READ": str(at)} if rank == 1 else {})))
             for rank in range(3)]
    try:
        said = [p.communicate(timeout=150)[0] for p in ranks]
        assert ranks[1].returncode == -9 and said[1] == ""
        for rank in (0, 2):
            assert f"rank 1 is dead (process {ranks[1].pid})" in said[rank], said
    finally:
        for p in ranks:
            p.kill()
            p.wait()


def test_a_rank_that_does_not_come(api, store, arrays):  # noqa: F811
    """It tells the others nothing, and they do not wait for ever."""
    ranks = Ranks(api, 2, "functions", 400)
    ranks.python[1].functions.gather = GATHER(lambda *_: EABORTED)
    ranks.python[1].functions.abort = ABORT()
    with ranks:
        told = failed(ranks.run(store, whole(arrays, {})))
    assert told[0] == (EABORTED, 'the caller\'s function "gather" failed: Connection timed out')
    assert told[1][0] == EABORTED
