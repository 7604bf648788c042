# SPDX-License-Identifier: Apache-2.0
"""How ranks come to a launch, and what is said where some do not come: `if rank == 0: save(…)` ends with an error at
the ranks that wait, and the next save works. Three gloo ranks as processes of their own; the meeting itself with ranks
that are threads."""
import os
import signal
import random
import re
import time

import pytest
import torch.distributed as dist

from gloo_pool import programs

import vckpt
from vckpt import meeting

START = """
import atexit, os, sys, time
import numpy as np, torch.distributed as dist, vckpt
from vckpt import meeting
rank, world, run = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {run!r}
dist.init_process_group("gloo", init_method="file://{rendezvous}", rank=rank, world_size=world)
OPTIONS = dict(pin="no", meet_timeout=3.0)
state = {{"m": {{"w": np.arange(6.0)}}}}

def said(function, *arguments, **more):
    begun = time.monotonic()
    try:
        found = repr(function(*arguments, **more))
    except Exception as error:
        found = f"{{type(error).__name__}}: {{error}}"
    print(f"{{time.monotonic() - begun:.1f}} {{found}}", flush=True)
"""


def ranks(world, tmp_path, script, dies=None):
    """[(lines of stdout, stderr)] of each rank. dies: one that is killed."""
    text = START.format(run=str(tmp_path / "store/run"), rendezvous=tmp_path / "rendezvous") + script
    done = programs(text, *({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)))
    for rank, (status, _, err) in enumerate(done):
        assert status == (-signal.SIGKILL if rank == dies else 0), err
    return [(out.splitlines(), err) for _, out, err in done]


def test_ranks_that_do_not_come(tmp_path):
    found = ranks(3, tmp_path, """
meeting.WARN_S, come = 1.0, 1
wait = meeting.Meeting.wait

def together(held, launch_id):      # however late one is: its time begins when `come` ranks are there
    while int(held.read(held.key("waiting")) or 0) < come:
        time.sleep(0.01)
    held.begun = time.monotonic()
    return wait(held, launch_id)
meeting.Meeting.wait = together
if rank == 0:
    said(vckpt.save, run, state, step=1, **OPTIONS)
dist.barrier()
come = 2
if rank != 0:
    said(vckpt.Saver, run, **OPTIONS)
dist.barrier()
come, OPTIONS["meet_timeout"] = 1, 60.0
said(vckpt.save, run, state, step=2, **{**OPTIONS, "threads": -1 if rank == 1 else 1})
said(vckpt.save, run, state, step=3, **OPTIONS)
said(vckpt.save, run, state, step=4)
""")
    (first, told), (second, second_told), (third, third_told) = found
    assert re.search(r"Timeout: .*ranks 1-2 of 3 did not come within \d+ s", first[0]), first
    assert 2.9 < float(first[0].split()[0]) < 30, first
    assert re.search(r"rank 0 has waited \d+ s for ranks 1-2 of 3", told) and "not of `if rank == 0:`" in told, told
    for lines in second, third:                         # the first that gives up says it for both
        assert re.search(r"Timeout: .*rank 0 of 3 did not come within \d+ s", lines[0]), lines
    assert second[0].split(" ", 1)[1] == third[0].split(" ", 1)[1]
    # the lowest that is there speaks, of all that are not
    assert re.search(r"rank 1 has waited \d+ s for rank 0 of 3", second_told), (second_told, third_told)
    assert "has waited" not in third_told, third_told
    # an option that one rank alone has wrong: one class of error at all
    for lines in first[1:], second[1:], third[1:]:
        assert "InvalidArgument: " in lines[0] and "threads=-1: expected a whole number" in lines[0], lines
        assert [line.split()[1] for line in lines[1:]] == ["3", "4"], lines
    assert vckpt.steps(tmp_path / "store/run") == [3, 4]


# ---- the meeting by itself ----

@pytest.fixture
def meet(threads):
    """meet(store, world, run, calls): calls is {rank: function(meeting)}; what each gives, or raises."""
    def run_all(store, world, run, calls, timeout=20.0):
        def one(rank):
            return calls[rank](meeting.Meeting(store, rank, world, run, "/s/run", timeout))
        return threads(dict.fromkeys(calls, one), limit_s=60)
    return run_all


def launch(rank):
    return lambda held: held.launch(f"id of {rank}" if rank == 0 else None)


def fail(held):
    held.fail(vckpt.InvalidArgument(22, "it cannot be"))


def until_wait(held, ranks):
    """Returns when so many wait in the meeting that `held` comes to."""
    while int(held.read(held.key("waiting")) or 0) < ranks:
        time.sleep(0.005)


def everybody(meet, store, world, run):
    found = meet(store, world, run, {rank: launch(rank) for rank in range(world)})
    assert set(found.values()) == {"id of 0"}, found


def test_meetings_follow_each_other(meet):
    store = dist.HashStore()
    for _ in range(20):
        everybody(meet, store, 4, "a")
        everybody(meet, store, 4, "b")


def test_one_that_fails_before_the_others_come(meet):
    """It is told to each that comes later, once; then all come together again."""
    store = dist.HashStore()
    assert meet(store, 3, "a", {1: fail})[1] is None
    found = meet(store, 3, "a", {0: launch(0), 2: launch(2)})
    assert all(isinstance(error, vckpt.InvalidArgument) and isinstance(error, vckpt.Aborted) and
               "rank 1: InvalidArgument: it cannot be" in str(error) for error in found.values()), found
    everybody(meet, store, 3, "a")


def test_one_that_fails_and_is_ahead(meet):
    """It comes again before anybody else has come at all: they are told what it met all the same, and then meet it."""
    store = dist.HashStore()
    meet(store, 3, "a", {1: fail})
    told = {}

    def twice(rank):
        def both(held):
            try:
                launch(rank)(held)
            except vckpt.Error as error:
                told[rank] = error
            return launch(rank)(meeting.Meeting(store, rank, 3, "a", "/s/run", 20.0))
        return both
    found = meet(store, 3, "a", {0: twice(0), 1: launch(1), 2: twice(2)})
    assert set(found.values()) == {"id of 0"} and set(told) == {0, 2}, (found, told)
    assert all(isinstance(error, vckpt.InvalidArgument) and "rank 1: " in str(error) for error in told.values())


def test_one_that_fails_while_the_others_wait(meet):
    store = dist.HashStore()

    def late(held):
        until_wait(held, 2)
        fail(held)
    found = meet(store, 3, "a", {0: launch(0), 1: late, 2: launch(2)})
    assert all(isinstance(found[rank], vckpt.InvalidArgument) and isinstance(found[rank], vckpt.Aborted) and
               "rank 1: " in str(found[rank]) for rank in (0, 2)), found
    everybody(meet, store, 3, "a")


def test_all_fail_and_come_again(meet):
    store = dist.HashStore()
    for _ in range(3):
        meet(store, 3, "a", {rank: fail for rank in range(3)})
    everybody(meet, store, 3, "a")


def test_one_that_is_interrupted(meet):
    store = dist.HashStore()

    def interrupted(held):
        def wait(_):
            until_wait(held, 3)
            raise KeyboardInterrupt
        held.wait = wait
        return held.launch(None)
    found = meet(store, 4, "a", {0: launch(0), 1: interrupted, 2: launch(2)})        # rank 3 is not there yet
    assert type(found[1]) is KeyboardInterrupt, found
    assert all(type(found[rank]) is vckpt.Aborted and "rank 1 was interrupted" in str(found[rank])
               for rank in (0, 2)), found
    everybody(meet, store, 4, "a")


def test_a_rank_that_names_another_path(meet):
    """A temporary directory for each rank, say. It is no error in itself: file systems are mounted where one likes."""
    store = dist.HashStore()

    def other(held):
        held.path = "/other/run"
        return held.launch(None)

    def together(call):
        def impatient(held):
            wait = held.wait

            def begin(launch_id):
                until_wait(held, 2)
                held.timeout = 0
                return wait(launch_id)
            held.wait = begin
            return call(held)
        return impatient
    found = meet(store, 3, "a", {0: together(launch(0)), 1: together(other)})
    assert all(type(error) is vckpt.Timeout for error in found.values()), found
    assert "rank 2 of 3 did not come" in str(found[0]) and ("(rank 1 opens /other/run)" in str(found[0]) or
                                                            "(rank 0 opens /s/run)" in str(found[0]))
    assert set(meet(store, 2, "b", {0: launch(0), 1: other}).values()) == {"id of 0"}


@pytest.mark.parametrize("seed", range(4))
def test_any_order(seed, meet):
    """Ranks that come, fail, or stay away. Those that wait in one meeting hear the same; in the end all meet."""
    pick, store = random.Random(seed), dist.HashStore()
    for _ in range(6):
        chosen = {rank: pick.choice(["come", "come", "fail", "away"]) for rank in range(4)}
        calls = {rank: {"come": launch(rank), "fail": fail}[what] for rank, what in chosen.items() if what != "away"}
        found = meet(store, 4, "a", calls, timeout=0.4)
        for rank, what in chosen.items():
            if what == "come" and set(chosen.values()) != {"come"}:
                assert isinstance(found[rank], vckpt.Error), (chosen, found)
    for _ in range(4):                                  # what single ranks had still to be told
        found = meet(store, 4, "a", {rank: launch(rank) for rank in range(4)}, timeout=5)
        if set(found.values()) == {"id of 0"}:
            return
        assert all(isinstance(error, vckpt.Error) for error in found.values()), found
    raise AssertionError(found)


def test_ranges():
    assert meeting.ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10" and meeting.ranges([]) == ""
    assert meeting.ranges(range(0, 40, 2)).endswith("12, 14 and 12 more ranges")
