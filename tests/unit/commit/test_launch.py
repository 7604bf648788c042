# SPDX-License-Identifier: Apache-2.0
"""A job's ranks: launches, begin, announcements, who commits, who gives up, and what every rank is told."""
import ctypes as c
import errno
import os
import random
import re
import resource
import shutil
import threading
import time

import pytest

from ranklib import ETIMEDOUT, PIECE, api, Launch, Meddler, Ranks, incoming, launch_name     # noqa: F401 (fixtures)
from storelib import (ABORTED, ALIVE, EABORTED, HEARTBEAT_RECORD, NONE, UNDECIDED, Attempt, Failed, Heartbeat, Record,
                      packs_of,
                      put_heartbeat, save)


def visible(api, run="r"):
    with api.list(run) as l:
        return l.steps()


def failure(code, function, *args, **named):
    with pytest.raises(Failed) as e:
        function(*args, **named)
    assert e.value.code == code, e.value
    return e.value.text


def together(*functions):
    """Calls in threads; their results or errors, in order."""
    out = [None] * len(functions)

    def run(i, f):
        try:
            out[i] = f()
        except Failed as e:
            out[i] = e
    threads = [threading.Thread(target=run, args=(i, f)) for i, f in enumerate(functions)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def job(api, world, id_="job", run="r", **options):
    """All ranks of a job in this process."""
    launches = together(*[lambda r=r: Launch(api, run, id_, r, world, **options) for r in range(world)])
    assert all(isinstance(l, Launch) for l in launches), launches
    return launches


def close(launches, *attempts):
    for a in attempts:
        a.free()
    for l in launches:
        l.close()


def pack_path(api, name):
    path = c.create_string_buffer(512)
    assert api.lib.pack_path(name, path) == 0
    return api.path / path.value.decode()


def begin_all(launches, **how):
    attempts = [l.begin(**how) for l in launches]
    for a in attempts:
        a.write(random.randbytes(PIECE))
    return attempts


# ---- launches ----

def test_options(api):
    assert "launch id" in failure(-errno.EINVAL, Launch, api, "r", None, 0,
                                  2) and "launch id" in failure(-errno.EINVAL, Launch, api, "r", "", 1, 2)
    for rank, world in ((0, 0), (1, 1), (7, 3)):
        assert f"rank {rank}" in failure(-errno.EINVAL, Launch, api, "r", "x", rank, world)
    failure(-errno.EINVAL, Launch, api, "a/b", "x", 0, 1)
    failure(-errno.EINVAL, Launch, api, "r", "x", 0, 1, heartbeat_ms=10)
    assert not list((api.path / "hosts").glob("*"))


def test_names(api):
    l = Launch(api, "r", "some id", 0, 1)
    assert l.name == launch_name("some id") and re.fullmatch(r"[0-9a-f]{16}", l.name)
    assert [p.name for p in (api.path / "hosts").iterdir()] == [f"{l.name}.{api.lib.store_hostname().decode()}.r0.0"]
    assert [x[:4] for x in api.launches()] == [(l.name, api.lib.store_hostname().decode() + ".r0", "r", ALIVE)]
    with api.list("r", whole=True) as known:
        assert known.next == 1
    a, b = l.begin(), l.begin()
    assert (a.name, a.step, b.name, b.step) == (f"{l.name}-0", 0, f"{l.name}-1", 1)
    close([l], a, b)
    assert not list((api.path / "hosts").glob("*"))
    anonymous = [Launch(api, "r", None, 0, 1) for _ in range(2)]
    assert len({x.name for x in anonymous}) == 2
    close(anonymous)


def test_a_used_id_is_refused(api):
    close(job(api, 2))
    assert "used before" in failure(-errno.EEXIST, Launch, api, "r", "job", 0, 2)
    with api.list("r") as l:  # far behind the newest snapshot
        for i in range(200):
            l.put(api.entry(1, launch=f"{i:016x}".encode(), newest_step=NONE))
    assert "used before" in failure(-errno.EEXIST, Launch, api, "r", "job", 0, 2)
    close(job(api, 2, run="other"))  # of another run: new there


def undecided(api, id_, world=2):
    """What a job leaves that ends in the middle of a save: rank 1 alone has announced. The name of its attempt."""
    old = job(api, world, id_)
    a = begin_all(old, step=3)
    a[1].announce()
    name = a[0].name
    close(old)      # before its attempts are freed: nobody decides
    return name


def state(api, attempt):
    with api.list("r", whole=True) as l:
        return l.attempt(attempt)[0]


@pytest.mark.parametrize("behind", [0, 200])
def test_a_used_id_is_refused_at_all_ranks(api, behind):
    """Also where the old entry lies far behind the newest snapshot: rank 0 says so in the list. Nobody takes over the
    old save."""
    attempt = undecided(api, "job")
    with api.list("r") as l:
        for i in range(behind):
            l.put(api.entry(3, attempt=f"{i:016x}-0".encode(), reason=b"x"))
    end = None
    for _ in range(2):
        started = time.monotonic()
        answers = together(*[lambda r=r: Launch(api, "r", "job", r, 2) for r in range(2)])
        assert time.monotonic() - started < 30      # not the 60 s that a rank waits for another one
        assert all(isinstance(e, Failed) and e.code == -errno.EEXIST and "used before" in e.text
                   for e in answers), answers
        with api.list("r", whole=True) as l:
            end = end or l.next
            assert l.next == end, "said once"
    assert state(api, attempt) == UNDECIDED and visible(api) == {} and not list((api.path / "hosts").glob("*"))
    alone = failure(-errno.EEXIST, Launch, api, "r", "job", 1, 2)      # rank 0 is not there at all
    assert "used before" in alone
    new = job(api, 2, "new")
    assert state(api, attempt) == ABORTED
    assert [x[0] for x in together(*[lambda l=l: l.save(3) for l in new])] == [3, 3]
    close(new)


def launch_nonce(api, run="r"):
    """That of the first heartbeat of rank 0 that is there."""
    for _ in range(10):
        for path in (api.path / "hosts").glob("*.r0.*"):
            m, record = Heartbeat(), Record()
            r = api.lib.store_record_get(c.c_void_p(api.p.contents.storage), f"hosts/{path.name}".encode(),
                                         HEARTBEAT_RECORD, (c.c_uint8 * 16)(*api.id),
                                         c.byref(record), None, None)
            if r == 0:
                assert api.lib.proto_heartbeat_decode(c.c_void_p(record.body), c.c_size_t(record.len), c.byref(m)) == 0
                nonce = bytes(m.nonce)
                api.lib.proto_heartbeat_release(c.byref(m))
                api.lib.store_record_release(c.byref(record))
                return nonce
    raise AssertionError("no heartbeat of a rank 0")


def test_the_launch_entry_and_rank_0_show_one_nonce(api):
    ls = job(api, 2) + [Launch(api, "s", "job", 0, 1)]
    entry = {run: (api.path / "runs" / run / f"{0:012}").read_bytes() for run in "rs"}
    first = launch_nonce(api)
    assert first != bytes(16) and sum(first in e for e in entry.values()) == 1
    close(ls)


@pytest.mark.parametrize("moves,nonce,follows", [(True, "its own", True), (True, "another", False),
                                                 (True, "none", False), (False, "its own", False)])
def test_a_rank_0_of_another_host(api, moves, nonce, follows):
    """It is followed where it shows the nonce of the launch entry, and is seen to move."""
    l = Launch(api, "r", "job", 0, 2)
    own = launch_nonce(api)
    l.close()
    shown = {"its own": own, "another": random.randbytes(16), "none": bytes(16)}[nonce]
    name = launch_name("job")
    put_heartbeat(api, name, "r", 7, "elsewhere.r0", shown)
    over = threading.Event()

    def beat():
        for n in range(8, 100):
            if over.wait(0.25):
                break
            put_heartbeat(api, name, "r", n, "elsewhere.r0", shown)
            (api.path / "hosts" / f"{name}.elsewhere.r0.{n - 1}").unlink()
    t = threading.Thread(target=beat)
    if moves:
        t.start()
    started = time.monotonic()
    try:
        if follows:
            Launch(api, "r", "job", 1, 2, heartbeat_ms=4000).close()
        else:
            text = failure(-errno.EEXIST, Launch, api, "r", "job", 1, 2, heartbeat_ms=1500)
            assert "used before" in text and ("elsewhere" in text) == (not moves)
        assert time.monotonic() - started < 30      # not the 60 s that a rank waits for another one
    finally:
        over.set()
        if moves:
            t.join()
    for path in (api.path / "hosts").glob("*"):
        path.unlink()


def test_two_processes_that_are_one_rank(api):
    """Two jobs that live at once under one id: the second one's ranks find the rank 0 of the first, and themselves."""
    ls = job(api, 2, heartbeat_ms=400)
    while list((api.path / "hosts").glob("*.0")):       # whose name would be taken
        time.sleep(0.01)
    for rank in (0, 1):
        assert "used before" in failure(-errno.EEXIST, Launch, api, "r", "job", rank, 2)
    assert [x[0] for x in together(*[lambda l=l: l.save(1) for l in ls])] == [1, 1]
    close(ls)


def test_rank_0_is_awaited(api):
    text = failure(ETIMEDOUT, Launch, api, "r", "job", 1, 2, start_ms=300)
    assert "rank 0" in text and launch_name("job") in text
    late = together(lambda: Launch(api, "r", "job", 1, 2), lambda: (time.sleep(0.3), Launch(api, "r", "job", 0, 2))[1])
    close(late)


def test_a_rank_that_opens_late_finds_its_launch(api):
    """Also when a snapshot, or several, stand after the launch entry."""
    for behind in (70, 300):
        first = Launch(api, "r", f"job {behind}", 0, 2)
        with api.list("r") as l:
            for i in range(behind):
                l.put(api.entry(3, attempt=f"{i:016x}-{behind}".encode(), reason=b"x"))
        second = Launch(api, "r", f"job {behind}", 1, 2, start_ms=300)
        a = begin_all([first, second])
        for x in a:
            x.announce()
        assert len({x.step for x in a}) == 1 and a[0].wait() == a[1].wait()
        close([first, second], *a)


def test_one_id_for_two_runs(api):
    """Names of packs are the store's: those of another run are never taken, and never deleted."""
    one, two = Launch(api, "r", "job", 0, 1), Launch(api, "s", "job", 0, 1)
    assert one.name == launch_name("job", "r") != two.name == launch_name("job", "s")
    first = one.save()[0]
    there = packs_of(api)
    assert len(there) == 2 and two.save()[0] == first == 0
    assert there < packs_of(api) and len(packs_of(api)) == 4
    close([one, two])


def test_a_rank_that_is_there_already(api):
    """Two processes of one rank: the second one's heartbeat is refused, and the first one's stays."""
    l = Launch(api, "r", "job", 0, 2)
    there = [p.read_bytes() for p in (api.path / "hosts").iterdir()]
    assert "rank 0" in failure(-errno.EEXIST, Launch, api, "r", "job", 0, 2)
    assert [p.read_bytes() for p in (api.path / "hosts").iterdir()] == there
    l.close()
    m = Meddler(api)
    m.answer["put"] = lambda args: -errno.EIO if c.string_at(args[1]).startswith(b"hosts/") else None
    failure(-errno.EIO, Launch, api, "r", "again", 0, 1)
    m.end()


@pytest.mark.parametrize("lands", [True, False])
def test_a_heartbeat_that_cannot_be_started(api, lands):
    """What landed is taken away, what another process put under that name stays."""
    m, name = Meddler(api), f"{launch_name('job')}.{api.lib.store_hostname().decode()}.r0"

    def put(args):
        if not c.string_at(args[1]).startswith(b"hosts/"):
            return None
        if lands:
            m.old.contents.put(args[0], c.string_at(args[1]), c.string_at(args[2], args[3]), args[3])
        else:
            put_heartbeat(api, launch_name("job"), "r", 0, name[17:])
        return -errno.EIO
    m.answer["put"] = put
    if not lands:   # the other one's own put is not meddled with
        m.answer["put"] = (lambda args: m.answer.pop("put") and put(args) if c.string_at(args[1]).startswith(b"hosts/")
                           else None)
    failure(-errno.EIO, Launch, api, "r", "job", 0, 1)
    m.end()
    assert [p.name for p in (api.path / "hosts").iterdir()] == ([] if lands else [name + ".0"])
    for path in (api.path / "hosts").glob("*"):
        path.unlink()


def test_only_the_first_beat_is_durable(api):
    m = Meddler(api)
    l = Launch(api, "r", "job", 0, 1, heartbeat_ms=400)
    deadline = time.monotonic() + 120
    while m.count.get("put_fleeting", 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    puts = m.count.get("put", 0)
    l.close()
    m.end()
    assert m.count["put_fleeting"] >= 3 and puts == 2   # its own first one, and the launch entry


@pytest.mark.parametrize("when", ["before", "meanwhile", "not sealed", "given up"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_pack_of_somebody_else_stays(api, when, alone):
    """Whatever made it: what this attempt has not made itself it leaves where it is."""
    l = None if alone else Launch(api, "r", "x", 0, 1)
    a = Attempt(api, "r", step=1) if alone else l.begin(step=1)
    taken = pack_path(api, a.pack_name("model"))
    taken.parent.mkdir(parents=True, exist_ok=True)
    if when == "before":
        taken.write_bytes(b"another's")
        failure(-errno.EEXIST, a.writer, "model")
    else:
        name, w = a.writer("model")
        taken.write_bytes(b"another's")
        if when == "meanwhile":
            failure(-errno.EEXIST, a.seal, name, w)
        elif when == "given up":
            api.lib.pack_abandon(w)
            a.seal(*a.writer("meta"))   # whose writer may lie where the other one lay
            assert len(packs_of(api)) == 2
    a.abort("its pack is taken")
    if when == "not sealed":
        api.lib.pack_abandon(w)
    assert taken.read_bytes() == b"another's" and len(packs_of(api)) == 1
    a.free()
    taken.unlink()
    if l:
        close([l])


# ---- saves ----

def test_one_rank(api):
    l = Launch(api, "r", "x", 0, 1)
    assert [l.save()[0] for _ in range(3)] == [0, 1, 2] and sorted(visible(api)) == [0, 1, 2]
    assert not list((api.path / "incoming").rglob("begin"))
    close([l])


def test_ranks_say_which_step_they_mean(api):
    ls = job(api, 2)
    for l in ls:
        text = failure(-errno.EINVAL, l.begin, step=NONE)
        assert "2 ranks" in text and "number of its step" in text
        assert "2^44-1" in failure(-errno.EINVAL, l.begin, step=1 << 44)
    assert not incoming(api)
    most = (1 << 44) - 1
    a = begin_all(ls, step=most)
    assert {x.name for x in a} == {f"{ls[0].name}-{most}"}
    close(ls, *a)


def test_one_rank_counts_on(api):
    """From the newest step at its start; a step that was named and came to nothing does not count, a number that was
    given out does."""
    save(api, "r", step=10)
    l = Launch(api, "r", "job", 0, 1)
    save(api, "r", step=40)
    assert l.save()[0] == 11 and l.save(30)[0] == 30 and l.save()[0] == 31 and l.save(20)[0] == 20
    a = l.begin(step=35)
    a.abort("not wanted")
    b = l.begin()
    b.abort("not wanted")
    assert (b.step, l.save()[0]) == (32, 33)
    close([l], a, b)


def tries(launch, step, n):
    return f"{launch.name}-{(n << 44) + step}"


def test_a_failed_step_is_tried_again(api):
    """By all ranks, each of which was told; every try has a name of its own."""
    ls = job(api, 2)
    for n in range(3):
        a = begin_all(ls, step=5)
        assert {x.name for x in a} == {tries(ls[0], 5, n)}
        a[1].announce()
        a[0].abort(f"no {n}")
        assert f"no {n}" in failure(EABORTED, a[1].wait)
        for x in a:
            x.free()
    assert [x[0] for x in together(*[lambda l=l: l.save(5) for l in ls])] == [5, 5]
    assert [x[0] for x in together(*[lambda l=l: l.save(5, replace=True) for l in ls])] == [5, 5]
    assert visible(api)[5][1] == tries(ls[0], 5, 4)
    close(ls)


def test_who_comes_late_is_told_once(api):
    """The others have ended the try, maybe a moment ago: who took the next one at once would wait there for nobody."""
    ls = job(api, 2)
    for n in range(2):
        a = ls[0].begin(step=5)
        a.abort(f"no {n}")
        a.free()
    assert "no 1" in failure(EABORTED, ls[1].begin, step=5)
    a = begin_all(ls, step=5)
    assert {x.name for x in a} == {tries(ls[0], 5, 2)}
    for x in a:
        x.announce()
    assert len(set(together(*[x.wait for x in a]))) == 1
    close(ls, *a)


def out_of_phase(api, world, steps, **options):
    """Each rank saves its steps, one after another. {rank: [(step, entry or error)]}"""
    ls = job(api, world, **options)

    def rank(l):
        out = []
        for step in steps[l.rank]:
            step, replace = step if isinstance(step, tuple) else (step, False)
            try:
                out.append(l.save(step, replace))
            except Failed as e:
                out.append((step, e))
        return out
    answers = together(*[lambda l=l: rank(l) for l in ls])
    close(ls)
    return dict(enumerate(answers))


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_leaves_a_step_out(api, who):
    """The others are told who; all meet at the next step, and none is of two."""
    started = time.monotonic()
    answers = out_of_phase(api, 3, [[20] if rank == who else [10, 20] for rank in range(3)])
    assert time.monotonic() - started < 20      # not a time-out: 20 s at least
    for rank, got in answers.items():
        assert got[-1] == (20, visible(api)[20][0]), answers
        if rank != who:
            assert got[0][1].code == EABORTED and f"rank {who} on" in got[0][1].text and "step 20" in got[0][1].text, (
                answers)
    assert sorted(visible(api)) == [20]


def test_all_that_commit_leave_a_step_out(api):
    """Those that wait in it never look who is missing: who has gone on ends it."""
    world = 16
    answers = out_of_phase(api, world, [[10, 20] if rank % 2 else [20] for rank in range(world)])
    for rank, got in answers.items():
        assert got[-1][1] == visible(api)[20][0], answers
        if rank % 2:
            assert got[0][1].code == EABORTED and "gone on to step 20" in got[0][1].text, answers
    assert sorted(visible(api)) == [20]


def test_a_step_that_is_called_twice(api):
    """The second call is a try in which nobody else is."""
    answers = out_of_phase(api, 2, [[10, 20], [10, (10, True), 20]])
    assert [step for step, entry in answers[0] if not isinstance(entry, Failed)] == [10, 20]
    (_, one), (_, again), (_, two) = answers[1]
    assert (one, two) == tuple(entry for _, entry in answers[0])
    assert again.code == EABORTED and "rank 0 on" in again.text and "step 20" in again.text
    assert visible(api)[10][0] == one


def test_a_rank_that_is_a_step_behind(api):
    """It fails where it is behind, and catches up while the others wait."""
    answers = out_of_phase(api, 2, [[1, 2, 3], [0, 1, 2, 3]])
    assert answers[1][0][1].code == EABORTED and "rank 0 on" in answers[1][0][1].text
    assert answers[1][1:] == answers[0] and sorted(visible(api)) == [1, 2, 3]


def test_a_file_that_is_no_announcement_says_nothing_of_a_rank(api):
    """Rank 1 is only late: its number with more behind it is not its part of another step."""
    ls = job(api, 2)
    folder = api.path / "incoming/r" / f"{ls[0].name}-20"
    folder.mkdir(parents=True)
    for name in ("part.1x", "part.01", "part.-18446744073709551615"):
        (folder / name).write_bytes(b"")
    def late():
        time.sleep(2.5)
        return ls[1].save(10)
    answers = together(lambda: ls[0].save(10), late)
    assert answers == [(10, visible(api)[10][0])] * 2, answers
    close(ls)
    shutil.rmtree(folder)


def test_ranks_that_never_save_the_same_step(api):
    """Each save but the last ends within a bounded time, for somebody has always gone on; nothing is committed."""
    ls = job(api, 2, deadline_ms=4000)
    def rank(l):
        out = []
        for step in range(l.rank, 8, 2):
            try:
                out.append(l.save(step))
            except Failed as e:
                out.append(e.code)
        return out
    started = time.monotonic()
    assert together(*[lambda l=l: rank(l) for l in ls]) == [[EABORTED] * 4] * 2
    assert time.monotonic() - started < 40 and visible(api) == {}
    close(ls)


def test_an_import_keeps_its_hands_off(api):
    ls = job(api, 2)
    failure(-errno.EBUSY, Attempt, api, "r")
    alone = Attempt(api, "r", step=7)
    alone.write(b"x" * 100)
    assert [r[0] for r in together(*[lambda l=l: l.save() for l in ls])] == [0, 0]
    alone.commit()
    alone.free()
    assert sorted(visible(api)) == [0, 7]
    close(ls)


def test_several_under_way(api):
    ls = job(api, 3)
    first, second = begin_all(ls), begin_all(ls)
    for a in second:
        a.announce()
    waiting = [threading.Thread(target=a.wait) for a in second]
    for t in waiting:
        t.start()
    for t in waiting:
        t.join()
    assert sorted(visible(api)) == [1]
    for a in first[:2]:
        a.announce()
    failure(ETIMEDOUT, first[1].wait, 50)
    assert "not announced: rank 2" in failure(ETIMEDOUT, first[0].wait, 50)
    first[2].announce()
    assert together(*[a.wait for a in first]) == [visible(api)[0][0]] * 3
    close(ls, *first, *second)


def test_a_step_that_exists(api):
    old = save(api, "r", step=3)
    ls = job(api, 2)
    answers = together(*[lambda l=l: l.save(3) for l in ls])
    assert {x.code for x in answers} <= {-errno.EEXIST, EABORTED} and all("has a step 3 already" in x.text
                                                                          for x in answers), answers
    assert visible(api)[3][0] == old.entry
    (step, entry), other = together(*[lambda l=l: l.save(3, replace=True) for l in ls])
    assert (step, entry) == other == (3, visible(api)[3][0]) and entry != old.entry
    close(ls)


def test_replaced_by_another_meanwhile(api):
    """What the first to come saw is what is replaced; whoever came between keeps it."""
    save(api, "r", step=3)
    ls = job(api, 2)
    a = ls[0].begin(step=3, replace=True)
    between = save(api, "r", step=3, replace=True)
    attempts = [a, ls[1].begin(step=3, replace=True)]
    for x in attempts:
        x.write(random.randbytes(PIECE))
        x.announce()
    answers = together(*[x.wait for x in attempts])
    assert {x.code for x in answers} == {-errno.EEXIST, EABORTED} and all("step 3 already" in x.text for x in answers)
    assert visible(api)[3][0] == between.entry
    close(ls, *attempts)


@pytest.mark.parametrize("one,two,words", [
    ({"mesh": 1}, {"mesh": 2}, ("this rank's mesh differs from that of rank 0 on",)),
    ({"replace": True}, {}, ("rank 0 on", "asked to replace an existing step, this rank did not")),
])
def test_who_said_what(api, one, two, words):
    ls = job(api, 2)
    a = ls[0].begin(**one)
    a.write(random.randbytes(PIECE))
    a.announce()
    text = failure(-errno.EINVAL, ls[1].begin, **two)
    host = api.lib.store_hostname().decode()
    assert text in failure(EABORTED, a.wait) or all(w in text for w in words)
    for said in (text, failure(EABORTED, a.wait)):
        assert f"rank 1 on {host}: " in said and all(w in said for w in words), said
    assert not packs_of(api) and visible(api) == {}
    close(ls, a)


def test_another_world(api):
    ls = job(api, 2)
    stranger = Launch(api, "r", "job", 2, 3)
    a = ls[0].begin()
    text = failure(-errno.EINVAL, stranger.begin)
    assert "world size 3" in text and "with 2" in text and "rank 2" in text
    a.free()
    close([*ls, stranger])


def test_a_rank_that_fails(api):
    ls = job(api, 4)
    attempts = begin_all(ls)
    for a in attempts[:3]:
        a.announce()
    started = time.monotonic()
    answers = together(*[a.wait for a in attempts[:3]],
                       lambda: (time.sleep(0.2), attempts[3].abort("the GPU fell off the bus")))
    assert time.monotonic() - started < 15  # not a heartbeat of 20 s
    for e in answers[:3]:
        assert (e.code == EABORTED and f"rank 3 on {api.lib.store_hostname().decode()}: the GPU fell "
                f"off the bus" in e.text)
    with api.list("r", whole=True) as l:
        assert l.attempt(attempts[0].name)[0] == ABORTED
    assert not packs_of(api)
    close(ls, *attempts)
    again = job(api, 4, "again")
    assert [x[0] for x in together(*[lambda l=l: l.save() for l in again])] == [0] * 4
    close(again)


def test_freed_without_an_announcement(api):
    ls = job(api, 2)
    a, b = begin_all(ls)
    a.announce()
    b.free()
    assert "rank 1" in failure(EABORTED, a.wait)
    a.free()
    close(ls)


def test_ranks_that_overlap(api):
    ls = job(api, 2)
    attempts = begin_all(ls)
    for a in attempts:
        a.announce(first=0)
    answers = together(*[a.wait for a in attempts])
    assert all('tensor "w"' in e.text and "rank" in e.text for e in answers) and visible(api) == {}
    close(ls, *attempts)


def test_a_base_where_nothing_can_be_read(api):
    """Its number is not looked for among thousands, each of which may take a time-out of the storage."""
    saved = save(api, "old")
    l = Launch(api, "r", "x", 0, 1)
    a = l.begin(step=1)
    m = Meddler(api)
    m.answer["read_whole"] = lambda args: -errno.ETIMEDOUT if b"/base." in c.string_at(args[1]) else None
    failure(-errno.ETIMEDOUT, a.base, "old", saved.entry, saved.manifest)
    assert m.count["read_whole"] < 5
    m.end()
    a.abort("no base")
    a.free()
    a = l.begin(step=2)
    assert a.base("old", saved.entry, saved.manifest) == 0
    a.abort("enough")
    a.free()
    close([l])


def test_bases_of_several_ranks(api):
    one, two = save(api, "old"), save(api, "old")
    ls = job(api, 3)
    attempts = [l.begin() for l in ls]
    for i, a in enumerate(attempts):
        for base in [(one, two), (two, one), (one, two)][i]:
            a.base("old", base.entry, base.manifest)
    assert sorted(p.name for p in attempts[0].folder().iterdir()) == ["base.0", "base.1", "begin"]
    api.remove_step("old", 1)
    late = ls[0].begin()
    failure(-errno.ESTALE, late.base, "old", two.entry, two.manifest)
    result, _ = api.gc(grace=3600, dry=True)
    assert result.aborted == 0
    close(ls, *attempts, late)


def test_a_newer_launch_ends_the_older(api):
    old = job(api, 2, "old")
    a = begin_all(old)
    a[0].announce()
    new = job(api, 2, "new")
    assert "newer launch" in failure(EABORTED, a[0].wait)
    a[1].announce()
    assert "newer launch" in failure(EABORTED, a[1].wait)
    assert "newer launch" in failure(EABORTED, old[0].begin)
    assert [x[0] for x in together(*[lambda l=l: l.save() for l in new])] == [0, 0]
    assert {v[1][:16] for v in visible(api).values()} == {new[0].name}
    close(old + new, *a)


# ---- those that do not come ----

def test_a_rank_that_never_comes(api):
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, start_ms=600) for r in range(2)])
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    started = time.monotonic()
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and "rank 2: it did not come within 0.6 s" in e.text
    assert 0.4 < time.monotonic() - started < 30
    close(ls, *attempts)


def test_a_heartbeat_elsewhere_that_stops(api):
    ls = together(*[lambda r=r: Launch(api, "r", "job", r, 3, heartbeat_ms=800) for r in range(2)])
    put_heartbeat(api, ls[0].name, "r", 5, "elsewhere.r2")
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    for e in together(*[a.wait for a in attempts]):
        assert e.code == EABORTED and "rank 2 on elsewhere: its heartbeat stood still for 0.8 s" in e.text
    close(ls, *attempts)
    (api.path / "hosts" / f"{ls[0].name}.elsewhere.r2.5").unlink()


def test_beats_that_are_slow_for_all_hold_nothing_against_anybody(api):
    """A storage that has too much to do: the observer's own beats tell it."""
    ls = job(api, 2, heartbeat_ms=800)
    m = Meddler(api)
    m.answer["put_fleeting"] = lambda args: time.sleep(2)
    time.sleep(0.5)     # a beat of each is under way
    attempts = begin_all(ls, step=1)
    attempts[0].announce()
    late = threading.Thread(target=lambda: (time.sleep(3), attempts[1].announce()))
    late.start()
    entry = attempts[0].wait()
    late.join()
    assert attempts[1].wait() == entry == visible(api)[1][0]
    m.end()
    close(ls, *attempts)


def test_what_is_under_way_is_listed(api):
    ls = job(api, 3)
    a = begin_all(ls)
    a[1].announce()
    begun, world, announced, missing, since, state = incoming(api)[a[0].name]
    assert (begun, world, announced, missing, state) == (True, 3, [1], [0, 2],
                                                         ALIVE) and abs(since / 1e9 - time.time()) < 60
    alone = Attempt(api, "other", step=1)
    assert incoming(api)[alone.name] == (True, 1, [], [0], 0, ALIVE)
    alone.free()
    close(ls, *a)


# ---- a child ----

def test_a_child_is_refused(api):
    l = Launch(api, "r", "x", 0, 1)
    a = l.begin()
    a.write(random.randbytes(PIECE))
    before = {p for p in api.path.rglob("*") if p.is_file()}
    pid = os.fork()
    if pid == 0:
        try:
            ok = "process" in failure(-errno.ECHILD, l.begin) and failure(-errno.ECHILD, a.base, "r", 0, a.piece.digest)
            failure(-errno.ECHILD, a.announce)
            a.abort("child")
            a.free()
            l.close()
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    after = {p for p in api.path.rglob("*") if p.is_file()}
    assert before <= after
    for p in after - before:
        assert p.name.endswith("meta.pack"), p  # the announcement's pack, made before the refusal
        p.unlink()
    a.announce()
    a.wait()
    close([l], a)


# ---- storage that fails, storage calls counted ----

@pytest.mark.parametrize("alone", [True, False])
def test_eio_of_the_lists_directory_is_undecided(api, alone):
    """Never `failed`: what stands in the list may be lost, or may be what happened. And nothing is deleted."""
    other = Launch(api, "r", "x", 0, 1)
    a = Attempt(api, "r", step=1) if alone else other.begin(step=1)
    a.write(random.randbytes(PIECE))
    announcement = a.part()
    if not alone:
        api.call(api.lib.commit_attempt_announce, a.p, c.byref(announcement))
    with api.list("r") as l:
        l.put(api.entry(3, attempt=b"0123456789abcdef-0", reason=b"x"))  # something new to make durable
    m = Meddler(api)
    m.answer["sync_dir"] = lambda args: -errno.EIO if c.string_at(args[1]) == b"runs/r" else None
    with pytest.raises(Failed) as e:
        a.commit(announcement) if alone else a.wait(300)
    assert e.value.code == -errno.EINPROGRESS and m.count["sync_dir"]
    a.abort("gives up")
    assert len(packs_of(api)) == 2
    m.end()
    with api.list("r", whole=True) as l:
        assert l.attempt(a.name)[0] == UNDECIDED
    if not alone:   # the storage answers for everything again: the list decides
        a.abort("gives up")
        with api.list("r", whole=True) as l:
            assert l.attempt(a.name)[0] == ABORTED
    a.free()
    other.close()


def test_a_storage_that_times_out(api):
    """A network file system answers ETIMEDOUT. A wait whose own time is over answers the same, and its caller waits
    again: so the storage's error is told as undecided."""
    l = Launch(api, "r", "x", 0, 1, start_ms=500)
    a = l.begin()
    a.write(random.randbytes(PIECE))
    a.announce()
    m = Meddler(api)
    for call in "size", "read_whole", "file_open", "put", "sync_dir":
        m.answer[call] = lambda args: -errno.ETIMEDOUT
    for timeout in 60000, 0:        # before it has failed for long, and after
        failure(-errno.EINPROGRESS, a.wait, timeout)
    m.end()
    assert a.wait() is not None
    a.free()
    close([l])


def test_an_announcement_that_lands_and_fails(api):
    """Nobody is told `failed` for a save that is then committed: the list decides first."""
    ls = job(api, 2)
    a, b = begin_all(ls)
    a.announce()
    announcement, m = b.part(), Meddler(api)

    def land_and_fail(args):
        if c.string_at(args[1]).endswith(b"/part.1"):
            m.old.contents.put_passing(args[0], c.string_at(args[1]), c.string_at(args[2], args[3]), args[3])
            return -errno.EIO
    m.answer["put_passing"] = land_and_fail
    with pytest.raises(Failed) as e:
        api.call(api.lib.commit_attempt_announce, b.p, c.byref(announcement))
    m.end()
    assert e.value.code == -errno.EIO and "rank 1" in e.value.text
    for x in (a, b):
        assert "rank 1" in failure(EABORTED, x.wait)
    assert visible(api) == {} and not packs_of(api)
    close(ls, a, b)


def test_a_begin_that_fails_with_its_abort(api):
    """Without this rank's part nobody commits: it is told what failed, and not that the save is undecided. The abort is
    written later."""
    ls = job(api, 2)
    a = ls[0].begin(step=3)
    m = Meddler(api)
    m.answer["read_whole"] = lambda args: -errno.EIO if c.string_at(args[1]).endswith(b"/begin") else None
    m.answer["put"] = lambda args: -errno.ENOTCONN if c.string_at(args[1]).startswith(b"runs/r/0") else None
    text = failure(-errno.EIO, ls[1].begin, step=3)
    assert "/begin: " in text and "is written to the run's list once" in text
    assert state(api, a.name) == UNDECIDED
    m.end()
    assert ls[1].begin(step=4).step == 4 and state(api, a.name) == ABORTED
    assert "/begin: " in failure(EABORTED, lambda: (a.write(random.randbytes(PIECE)), a.announce(), a.wait()))
    close(ls, a)


@pytest.mark.parametrize("world", [8, 64])
def test_requests_do_not_grow_with_the_square(api, world):
    ls = job(api, world)
    m, started = Meddler(api), time.monotonic()
    attempts = begin_all(ls)
    for a in attempts:
        a.announce()
    prepared, before = sum(m.count.values()), time.monotonic() - started
    m.count.clear()
    started = time.monotonic()
    assert len(set(together(*[a.wait for a in attempts]))) == 1
    took = time.monotonic() - started
    m.end()
    waited = {k: v / world for k, v in m.count.items() if v}
    print(f"\n{world} ranks: {prepared / world:.1f} calls a rank before the wait, {sum(waited.values()):.1f} in it "
          f"({took:.2f} s): {waited}")
    assert prepared / world < 45 + before   # a beat every 5 s, of less than five calls
    assert sum(waited.values()) < 30 + 12 * took  # a poll is 100 ms in the end
    close(ls, *attempts)


# ---- the order of processes ----

def saves(api, rank, world, steps):
    l = Launch(api, "r", "job", rank, world)
    out = [l.save() for _ in range(steps)]
    l.close()
    return out


def test_four_processes_save_ten_steps(api):
    ranks = Ranks(api, 4, saves, 4, 10)
    results = ranks.results()
    ranks.end()
    with api.list("r") as l:
        want = [(s, e[0]) for s, e in sorted(l.steps().items())]
    assert len(want) == 10 and all(result == ("ok", want) for _, result in results.values())
    assert not list((api.path / "hosts").glob("*")) and not list((api.path / "incoming").rglob("part.*"))
    result, _ = api.gc()
    assert result.deleted == 0 and len(packs_of(api)) == 10 * 4 * 2


def lives_without_descriptors(lib, pid, start):
    """In a process that has none left; then in one that has."""
    lib.commit_process_lives.restype = c.c_bool
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        os._exit(lib.commit_process_lives(c.c_uint64(pid), c.c_uint64(start)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lib.commit_process_lives(c.c_uint64(pid),
            c.c_uint64(start))


def test_who_cannot_look_calls_nobody_dead(lib):
    start = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert lives_without_descriptors(lib, os.getpid(), start) == (1, True)
    assert lives_without_descriptors(lib, gone, start) == (1, False)
    # another one has its number by now
    assert not lib.commit_process_lives(c.c_uint64(os.getpid()), c.c_uint64(start + 1))
    assert lib.commit_process_lives(c.c_uint64(os.getpid()), c.c_uint64(0))
