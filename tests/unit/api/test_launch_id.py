# SPDX-License-Identifier: Apache-2.0
"""vckpt_launch_id: all ranks of a communicator get one id, and none gets one where a rank does not."""
import ctypes as c
import os
import pathlib
import re
import threading

import numpy as np
import pytest

from commlib import GATHER, together
from exchangelib import Ranks
from loadlib import Opened
from saverlib import Failed, api, ranks, store  # noqa: F401 (fixtures)

EBUSY, EFORKED, EABORTED, EPROTO = -16, -10, -125, -71
BYTES = 33
ROOT = pathlib.Path(__file__).resolve().parents[3]


def agree(api, comm):  # noqa: F811
    out = c.create_string_buffer(b"?" * BYTES, BYTES)
    api.call("vckpt_launch_id", comm, out)
    return out.value.decode()


def failed(out):
    assert all(isinstance(e, Failed) for e in out), out
    return [(e.code, e.text) for e in out]


def test_the_size_is_the_headers():
    assert f"#define VCKPT_LAUNCH_ID_BYTES {BYTES}u" in (ROOT / "core/api/vckpt.h").read_text()


@pytest.mark.parametrize("kind, size", [("shared", 3), ("functions", 2), ("shared", 1)])
def test_all_ranks_get_the_same_new_id(api, kind, size):  # noqa: F811
    with Ranks(api, size, kind) as all_ranks:
        ids = [together(size, lambda rank: agree(api, all_ranks.comms[rank])) for _ in range(2)]
    for one in ids:
        assert len(set(one)) == 1 and re.fullmatch("[0-9a-f]{32}", one[0]), one
    assert ids[0][0] != ids[1][0]


def test_it_is_the_launch_of_savers_and_the_communicator_serves_loads(api, store):  # noqa: F811
    weight = np.arange(8, dtype="f4")
    with Ranks(api, 2) as both:
        [launch, other] = together(2, lambda rank: agree(api, both.comms[rank]))
        assert launch == other

        def save(rank, saver):
            one = saver.save({"model/w": weight})
            assert one.committed() == 0
            one.free()
        assert ranks(api, store, "run", 2, save, launch=launch) == [None] * 2
        out = [np.zeros_like(weight) for _ in range(2)]
        assert both.run(store, lambda rank, load: load.tensor("model/w", out[rank])) == [None] * 2
        assert all(np.array_equal(one, weight) for one in out)
        [again, _] = together(2, lambda rank: agree(api, both.comms[rank]))
        assert again != launch


def test_a_rank_that_gives_up_ends_it_for_all(api):  # noqa: F811
    with Ranks(api, 3) as three:
        def work(rank):
            if rank == 1:
                return api.lib.vckpt_comm_abort(three.comms[1], b"its disk is full")
            return agree(api, three.comms[rank])
        out = together(3, work)
        assert failed([out[0], out[2]]) == [(EABORTED, "rank 1 gave up: its disk is full")] * 2


def test_a_rank_that_loads_meanwhile_is_out_of_step(api, store):  # noqa: F811
    saver = api.saver(store, "run")
    saver.save({"model/w": np.ones(3)}).committed()
    saver.free()
    with Ranks(api, 2) as both, Opened(api, store) as step:
        def work(rank):
            if rank == 0:
                return agree(api, both.comms[0])
            with step.load(1, 1, 0, 2, both.comms[1], 2) as load:
                load.tensor("model/w", np.ones(3))
                load.run()
            return None
        for _, text in failed(together(2, work)):
            assert "out of step" in text and "the same calls in the same order" in text


@pytest.mark.parametrize("wrong", [b"G" * 32, b"\0" * 32])
def test_what_a_transport_delivers_is_checked(api, wrong):  # noqa: F811
    """And the other ranks do not go on with an id that one of them lacks."""
    both = Ranks(api, 2, "functions", timeout_ms=60000)
    honest, calls = both.python[1].gather, []

    def gather(arg, mine, lens, out, timeout_ms):
        r = honest(arg, mine, lens, out, timeout_ms)
        calls.append(lens[:2])
        if len(calls) == 2:                     # the lengths are first
            c.memmove(out, wrong, len(wrong))
        return r
    both.python[1].functions.gather = GATHER(gather)
    with both:
        out = together(2, lambda rank: agree(api, both.comms[rank]))
        assert calls == [[24, 24], [32, 0]]
        assert out[1].code == EPROTO and "is not its part of a launch id" in out[1].text
        both.board.why = None
        with pytest.raises(Failed, match="did not get the same launch id"):
            agree(api, both.comms[1])


def test_handles_that_cannot_be(api):  # noqa: F811
    out = c.create_string_buffer(BYTES)
    with pytest.raises(Failed, match="no communicator is given"):
        api.call("vckpt_launch_id", None, out)
    both, begun = Ranks(api, 2, "functions"), threading.Event()
    honest = both.python[0].gather
    both.python[0].functions.gather = GATHER(lambda *arguments: begun.set() or honest(*arguments))
    with both:
        with pytest.raises(Failed, match="no place for a launch id"):
            api.call("vckpt_launch_id", both.comms[0], None)
        waits = threading.Thread(target=agree, args=(api, both.comms[0]))
        waits.start()
        assert begun.wait(120)
        with pytest.raises(Failed, match="in use by another load, call or communicator") as busy:
            agree(api, both.comms[0])
        assert busy.value.code == EBUSY
        agree(api, both.comms[1])
        waits.join()
        pid = os.fork()
        if pid == 0:
            try:
                agree(api, both.comms[0])
            except Failed as e:
                os._exit(0 if e.code == EFORKED and "fork" in e.text else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
