# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of ranks that have nothing under way (core/commit/launch/launch_idle.c): how many there are, who goes on
beating quickly, and for how long an observer waits."""
import ctypes as c
import errno
import re
import threading
import time

import pytest

from ranklib import ETIMEDOUT, Launch, Meddler, api, launch_name  # noqa: F401 (fixture)
from storelib import EABORTED, HEARTBEAT_RECORD, Api, Heartbeat, Record, put_heartbeat
from test_launch import begin_all, close, job, together

EVERY_MS, LONGEST_MS = 100, 1200        # of heartbeat_ms=400
HOUR = 3600


def heartbeats(api):
    """{rank: (number, period_ms)}, which a launch shows. A file that moves on meanwhile is looked for once more."""
    out, moved = {}, True
    while moved:
        moved = set()
        for path in sorted((api.path / "hosts").glob("*.r*.*")):
            rank = int(re.search(r"\.r(\d+)\.\d+$", path.name)[1])
            m, record = Heartbeat(), Record()
            r = api.lib.store_record_get(c.c_void_p(api.p.contents.storage), f"hosts/{path.name}".encode(),
                                         HEARTBEAT_RECORD, (c.c_uint8 * 16)(*api.id), c.byref(record), None, None)
            if r < 0:
                moved.add(rank)
                continue
            assert api.lib.proto_heartbeat_decode(c.c_void_p(record.body), c.c_size_t(record.len), c.byref(m)) == 0
            out[rank] = max(out.get(rank, (0, 0)), (m.number, m.period_ms))
            api.lib.proto_heartbeat_release(c.byref(m))
            api.lib.store_record_release(c.byref(record))
        moved -= set(out)
    return out


def until(true, seconds=120):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


def slow(api, ranks, least=EVERY_MS + 1):
    shown = heartbeats(api)
    return all(shown[rank][1] >= least for rank in ranks)


def idle_beats(lib, every_ms, idle_ms, until_ms):
    """How many beats a rank makes from `idle_ms` on."""
    lib.commit_heartbeat_period_ms.restype = c.c_uint64
    now = count = 0
    while now < until_ms:
        count += now >= idle_ms
        now += lib.commit_heartbeat_period_ms(c.c_uint64(every_ms), c.c_uint64(now))
    return count


def test_what_8192_idle_savers_cost(lib):
    """A beat is two operations, a put and a removal. All but rank 0 slow down."""
    first, later = (8192 * 2 * idle_beats(lib, 5000, *span) / (span[1] - span[0]) * 1000
                    for span in ((0, 10000), (HOUR * 1000, 2 * HOUR * 1000)))
    assert first == pytest.approx(3277, 0.01) and later == pytest.approx(273, 0.01)
    assert idle_beats(lib, 5000, 1, 60000) == 4     # in the first minute, of 12
    longest = [lib.commit_heartbeat_period_ms(c.c_uint64(5000), c.c_uint64(ms)) for ms in range(0, 200000, 1000)]
    assert longest == sorted(longest) and longest[9] == 5000 and longest[10] == 10000 and longest[-1] == 60000


def test_idle_savers_beat_seldom(api):
    """Counted: all but rank 0 make a put and a removal in twelve times the usual period, and look once for the others
    that may commit."""
    world = 12
    ls = job(api, world, heartbeat_ms=4 * EVERY_MS)
    m = Meddler(api)
    until(lambda: slow(api, range(1, world), LONGEST_MS))
    looks = m.count.pop("list", 0)
    before, started = heartbeats(api), time.monotonic()
    time.sleep(LONGEST_MS / 1000)
    until(lambda: heartbeats(api)[0][0] > before[0][0])
    after, took = heartbeats(api), time.monotonic() - started
    m.end()
    assert "list" not in m.count and looks <= 4 * world
    assert all(after[rank][0] - before[rank][0] <= took * 1000 / LONGEST_MS + 1 for rank in range(1, world))
    assert after[0][1] == EVERY_MS and set(after) == set(range(world))
    close(ls)


def test_a_save_wakes_the_heartbeat(api):
    """The beat after `begin` comes at once and states the usual period, as do all until the save is over."""
    ls = job(api, 2, heartbeat_ms=6000)     # every 1.5 s, and after 3 s every 3 s or more
    until(lambda: slow(api, [1], 3000))
    number = heartbeats(api)[1][0]
    attempts, started = begin_all(ls, step=1), time.monotonic()
    until(lambda: heartbeats(api)[1][0] > number)
    assert time.monotonic() - started < 2 and heartbeats(api)[1][1] == 1500
    for a in attempts:
        a.announce()
    assert len({a.wait() for a in attempts}) == 1
    close(ls, *attempts)


def test_a_rank_with_an_abort_to_write_is_not_idle(api):
    """It tries at every beat, or stands still so that the others see that; nothing else of it is under way."""
    ls = job(api, 2, heartbeat_ms=4 * EVERY_MS)
    m = Meddler(api)
    m.answer["put"] = lambda args: -errno.EIO if c.string_at(args[1]).startswith(b"runs/") else None
    a = ls[1].begin(step=1)
    a.free()
    start = heartbeats(api)[1][0]
    until(lambda: heartbeats(api)[1][0] > start + 8)
    assert heartbeats(api)[1][1] == EVERY_MS
    m.end()
    until(lambda: slow(api, [1]))   # the abort is written
    close(ls)


# ---- observers ----

@pytest.mark.parametrize("period_ms,limit_s", [(0, "0.8"), (200, "0.8"), (1600, "2.2")])
def test_an_idle_rank_is_missed_after_what_it_states(api, period_ms, limit_s):
    """Its file is read before it is given up: one that states no period has the time-out."""
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, heartbeat_ms=800) for r in range(2)])
    put_heartbeat(api, ls[0].name, "r", 5, "elsewhere.r2", period_ms=period_ms)
    attempts = begin_all(ls)
    started = time.monotonic()
    for a in attempts:
        a.announce()
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and f"rank 2 on elsewhere: its heartbeat stood still for {limit_s} s" in e.text
    assert time.monotonic() - started >= float(limit_s) - 0.1
    close(ls, *attempts)
    (api.path / "hosts" / f"{ls[0].name}.elsewhere.r2.5").unlink()


def test_no_warning_names_an_idle_rank_that_stands_still(api, capfd):
    """The start time-out ends before what it states: whether it lives is not known then."""
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, heartbeat_ms=800, start_ms=2000) for r in range(2)])
    put_heartbeat(api, ls[0].name, "r", 5, "elsewhere.r2", period_ms=1600)
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and "rank 2 on elsewhere: its heartbeat stood still for 2.2 s" in e.text
    assert "waiting for" not in capfd.readouterr().err
    close(ls, *attempts)
    (api.path / "hosts" / f"{ls[0].name}.elsewhere.r2.5").unlink()


def test_a_heartbeat_that_cannot_be_read_for_a_while_may_be_an_idle_ranks(api):
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, heartbeat_ms=800) for r in range(2)])
    put_heartbeat(api, ls[0].name, "r", 5, "elsewhere.r2")
    m = Meddler(api)
    m.answer["read_whole"] = lambda args: -errno.EIO if b"elsewhere" in c.string_at(args[1]) else None
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    for e in together(*[lambda a=a: a.wait(1500) for a in attempts]):
        assert e.code == ETIMEDOUT and "undecided so far" in e.text
    m.end()
    put_heartbeat(api, ls[0].name, "r", 6, "elsewhere.r2")
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and "rank 2 on elsewhere: its heartbeat stood still for 0.8 s" in e.text
    close(ls, *attempts)
    for path in (api.path / "hosts").glob("*.r2.*"):
        path.unlink()


@pytest.mark.parametrize("leader", ["knows periods", "knows none", "is not there"])
def test_older_ranks_that_may_commit_see_quick_beats(api, leader):
    """They would give an idle rank up after the time-out."""
    m, looks = Meddler(api), []

    def look(args):
        if threading.current_thread().name.startswith("Dummy"):     # a heartbeat's own: not one that starts a launch
            looks.append(c.string_at(args[1]))
    m.answer["list"] = look
    if leader != "is not there":    # as the first look finds it
        put_heartbeat(api, launch_name("job"), "r", 5, "elsewhere.r2", period_ms=5000 if leader == "knows periods"
                      else 0)
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, heartbeat_ms=4 * EVERY_MS) for r in range(2)])
    until(lambda: looks)
    if leader == "knows periods":
        until(lambda: slow(api, [1]))
    else:
        number = heartbeats(api)[1][0]
        until(lambda: heartbeats(api)[1][0] > number + 8)
        assert heartbeats(api)[1][1] == EVERY_MS
    m.end()
    # where a rank has not come it is looked for when the time has doubled
    assert set(looks) == {b"hosts"} and (len(looks) == 1 or leader == "is not there" and len(looks) < 8)
    close(ls)
    for path in (api.path / "hosts").glob("*.r2.*"):
        path.unlink()


def test_a_collection_waits_for_one_rank_of_a_launch(api, lib):
    """An idle rank of another host may stand still for longer than the time-out; by rank 0 the launch lives."""
    name, over = f"{7:016x}", threading.Event()
    put_heartbeat(api, name, "r", 3, "elsewhere.r1", period_ms=60000)
    put_heartbeat(api, name, "r", 0, "elsewhere.r0")

    def beat():
        mine, n = Api(lib, api.path, init=False), 0
        while not over.wait(0.2):
            n += 1
            put_heartbeat(mine, name, "r", n, "elsewhere.r0")
            (api.path / f"hosts/{name}.elsewhere.r0.{n - 1}").unlink()
        mine.close()
    thread = threading.Thread(target=beat)
    thread.start()
    started = time.monotonic()
    api.gc(grace=HOUR, heartbeat=60)
    assert time.monotonic() - started < 30
    assert (api.path / f"hosts/{name}.elsewhere.r1.3").exists()
    over.set()
    thread.join()
    api.gc(grace=HOUR, heartbeat=1)
    assert not list((api.path / "hosts").iterdir())
