# SPDX-License-Identifier: Apache-2.0
"""Loads with exchange=: ranks read each stored byte once, on one host and on several. What each has is compared with
what was saved; what was read, with what there is. A rank that is refused, fails, leaves or dies ends the load at all,
soon, with its sentence, and the next load works. Ranks of several hosts are ranks that take themselves for such."""
import datetime
import gc
import pathlib
import os
import re
import signal
import threading
import time
import weakref

import pytest
import torch

from test_meeting import ranks

import vckpt
from vckpt import exchange, exchange_group, load_handle, loads

PIN = {"pin": "no"}
SHAPE = (1024, 640)                 # 2.5 MiB: several pieces


def whole(number=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "store/run"
    vckpt.save(path, {"model": {"w": whole(), "v": whole(1), "tied": whole(2)}, "n": 3}, step=1, **PIN)
    vckpt.close()
    return path


def state():
    return {"model": {"w": torch.zeros(SHAPE), "v": torch.zeros(SHAPE), "tied": torch.zeros(SHAPE)}}


def right(found):
    return all(torch.equal(found["model"][name], whole(number)) for number, name in enumerate(("w", "v", "tied")))


def rank_of():
    import torch.distributed as dist
    return dist.get_rank()


def apart(hosts, function, *arguments):
    """As function(*arguments), at ranks on these hosts: a letter each."""
    real, exchange.host = exchange.host, lambda: hosts[rank_of()]
    try:
        return function(*arguments)
    finally:
        exchange.host = real


def _loads(path, mode):
    """Replicated, cut by rows, of another type, twice under one memory at some ranks only."""
    rank, found = rank_of(), []
    to = state()
    found.append((vckpt.load(path, to, exchange=mode), right(to)))
    rows = vckpt.Shard(torch.zeros(512, 640), shape=SHAPE, mesh="dp=2", placements="S(0)")
    double = torch.zeros(SHAPE, dtype=torch.float64)
    shared = torch.zeros(SHAPE)
    to = {"model": {"w": rows, "v": double, "tied": shared}}
    found.append((vckpt.load(f"{path}/1", to, exchange=mode),
                  torch.equal(rows.tensor, whole()[rank * 512:][:512]) and torch.equal(double, whole(1).double())
                  and torch.equal(shared, whole(2))))
    vckpt.save(f"{path}/../tied", {"model": {"a": whole(), "b": whole(), "c": whole(1)}}, step=1, **PIN)
    vckpt.close()
    one = torch.zeros(SHAPE)
    to = {"a": one, "b": one if rank == 0 else torch.zeros(SHAPE), "c": torch.zeros(SHAPE)}
    handle = vckpt.async_load(f"{path}/../tied", {"model": to}, exchange=mode)
    found.append((handle.wait(120), all(torch.equal(to[name], whole(int(name == "c"))) for name in "abc")))
    return [(*one.exchange, one.bytes_read, good) if one.exchange else (None, one.bytes_read, good)
            for one, good in found]


@pytest.mark.parametrize("mode, hosts", [("always", "aa"), ("always", "ab"), ("auto", "aa"), ("auto", "ab"),
                                         pytest.param("never", "ab", marks=pytest.mark.full)])
def test_what_is_shared(pool2, run, mode, hosts):
    one, two = pool2(apart, hosts, _loads, str(run), mode)
    assert all(answer[-1] for answer in one + two)
    size = whole().numel() * 4
    if mode == "never":
        assert all(answer[0] is None and answer[1] > size for answer in one + two)
        return
    assert all(answer[1] == 2 for answer in one + two), one
    assert [answer[0] for answer in one] == [answer[0] for answer in two]
    if mode == "always":
        assert all(answer[0] == "always" for answer in one + two)
        for number, stored in enumerate((3, 3, 3)):      # of the tied ones rank 0 reads one a second time
            read = one[number][-2] + two[number][-2]
            assert size * stored * 0.6 < read < size * stored * 1.1, (number, read / size)
        assert one[0][2] == two[0][3] and one[0][3] == two[0][2] and one[0][2] + two[0][2] == 3 * size == one[0][4]
    else:
        assert all(answer[5] for answer in one + two)


def _refused(path, at):
    """Each in turn: what rank 1 asks for cannot be; then what both ask for."""
    said = []
    for wrong in ({"verify": "no"}, {"exchange": "some"}, {"state": {"model": {"x": torch.zeros(1)}}},
                  {"path": path.rpartition("/")[0] + "/none/1"} if at else {"threads": -1},
                  {"exchange": "auto"}, {"on_damage": "skip"}):
        arguments = {"path": path + ("/1" if at else ""), "state": state(), "exchange": "always", "meet_timeout": 120.0}
        arguments.update(wrong if rank_of() == 1 else {})
        begin = time.monotonic()
        try:
            vckpt.load(arguments.pop("path"), arguments.pop("state"), **arguments)
            said.append("nothing")
        except (vckpt.Error, TypeError) as error:
            said.append(str(error))
        assert time.monotonic() - begin < 100
        to = state()
        said.append(vckpt.load(path, to, exchange="always").exchange.ranks == 2 and right(to))
    return said


@pytest.mark.parametrize("at", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_rank_that_is_refused(pool2, run, at):
    one, two = pool2(_refused, str(run), at)
    assert all(good is True for good in one[1::2] + two[1::2]), (one, two)
    words = ("verify='no': expected one of", "exchange='some': expected one of", "does not fit the state",
             "none" if at else "threads=-1", "different exchange=", "")
    for mine, theirs, word in zip(one[::2], two[::2], words):
        assert "nothing" not in (mine, theirs) and word in mine and word in theirs, (mine, theirs)


def _damaged(path):
    to = state()
    try:
        vckpt.load(path, to, exchange="always")
        return "nothing", "", False
    except vckpt.Damaged as error:
        said = str(error)
    name = re.search(r"model/(\w+)", said)[1]
    others = {"model": {one: tensor for one, tensor in state()["model"].items() if one != name}}
    found = vckpt.load(path, others, strict=False, exchange="always")
    numbers = {"w": 0, "v": 1, "tied": 2}
    good = all(torch.equal(tensor, whole(numbers[one])) for one, tensor in others["model"].items())
    return name, found.exchange.chosen, good


@pytest.mark.parametrize("hosts", [pytest.param("aa", marks=pytest.mark.full), "ab"])
def test_a_damaged_piece_is_everyone_s(pool2, run, hosts):
    """Whoever reads it."""
    pack = max((path for path in run.parent.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    one, two = pool2(apart, hosts, _damaged, str(run))
    assert one == two and one[0] in ("w", "v", "tied") and one[1:] == ("always", True), (one, two)


def _leaves(path):
    """Rank 1 is interrupted when its part of the load is ready; then a child of each asks for a load."""
    import torch.distributed as dist
    said, real = "", loads._Load.run

    def interrupted(load, rows):
        raise KeyboardInterrupt
    if rank_of() == 1:
        loads._Load.run = interrupted
    try:
        vckpt.load(path, state(), exchange="always")
    except (KeyboardInterrupt, vckpt.Error) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        loads._Load.run = real
    child = os.fork()
    if child == 0:
        try:
            vckpt.load(f"{path}/1", state(), exchange="always")
        except vckpt.Forked:
            os._exit(7)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    to = state()
    return said, status, vckpt.load(path, to, exchange="always").exchange.chosen == "always" and right(to)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_rank_that_leaves(pool2, run, hosts):
    (one, *others), (two, *theirs) = pool2(apart, hosts, _leaves, str(run))
    assert others == theirs == [7, True]
    assert two.startswith("KeyboardInterrupt") and "rank 1" in one and "KeyboardInterrupt" in one, (one, two)


@pytest.mark.full
def test_a_rank_that_dies(tmp_path, run):
    """The others do not wait for their time-outs, which are minutes."""
    first, second = ranks(2, tmp_path, """
import os, signal, time
import torch
from vckpt import loads
if rank == 1:
    loads._Load.run = lambda load, rows: os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
to = {"model": {name: torch.zeros(1024, 640) for name in ("w", "v", "tied")}}
said(vckpt.load, run + "/1", to, exchange="always")
print("soon" if time.monotonic() - begin < 100 else "late", flush=True)
os._exit(0)
""", dies=1)
    assert first[0][-1] == "soon" and "rank 1 is dead" in first[0][0], first


def _on_three(path):
    """Replicated, then overlapping rows. (what each found, bytes read, right?) of both, the links of the loads, and to
    how many ranks the first one sent each bucket that it had read."""
    to, links, sent = state(), [], set()
    with pytest.MonkeyPatch.context() as patch:
        real = exchange_group.Transport.route

        def route(*bucket):
            of, to = real(*bucket)
            sent.update([] if of is not None or not to else [len(to)])
            return of, to
        patch.setattr(exchange_group.Transport, "route", route)
        found = vckpt.load(path, to, exchange="always")
    good = right(to)
    links.append(sorted(exchange_group.known()))
    at = rank_of() * 300
    rows = vckpt.Shard(torch.zeros(424, 640), shape=SHAPE, boxes=[((at, 0), (424, 640))])
    cut = vckpt.load(f"{path}/1", {"model": {"w": rows}}, strict=False, exchange="always")
    links.append(sorted(exchange_group.known()))
    return [(*found.exchange, found.bytes_read, good),
            (*cut.exchange, cut.bytes_read, torch.equal(rows.tensor, whole()[at:at + 424]))], links, sent


@pytest.mark.parametrize("hosts", ["abc", "abb"])
def test_three_ranks_on_several_hosts(pool3, run, hosts):
    """Where two are on one host, what both want goes there once, and from one to the other."""
    answers = pool3(apart, hosts, _on_three, str(run))
    size = whole().numel() * 4
    for number, stored in enumerate((3 * size, size)):
        found = [answer[0][number] for answer in answers]
        assert all(one[0] == "always" and one[1] == 3 and one[-1] is True for one in found), found
        assert sum(one[-2] for one in found) < 1.05 * stored + 65536 * 3 * number, found    # blocks at cuts: twice
    assert len({str(links) for _, links, _ in answers}) == 1
    assert [sent for *_, sent in answers] == ([{2}, {2}, {2}] if hosts == "abc" else [{1}, {2}, {2}])
    assert answers[0][1][0] == answers[0][1][1] and len(answers[0][1][0]) == 1, "one load uses what the last one made"


def _dies(path):
    if rank_of() == 1:
        exchange_group.Transport.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(vckpt.Aborted) as raised:
        vckpt.load(f"{path}/1", state(), exchange="always")
    return str(raised.value)


def test_a_rank_of_another_host_that_dies(pool3, run):
    """No sentence is that of a time-out, which is minutes: a wait ends when the connection does."""
    one, two, three = pool3.ask(apart, "abc", _dies, str(run))
    assert two[1][0] == "died" and one[0] and one == three, (one, two, three)
    assert re.search("run/1: rank [02]: rank 1 is dead, or has left: [^[][^.]+$", one[1].replace("127.0.0.1", "")), one


def _closes(token):
    """Rank 1 closes its connections, then rank 0, which cannot reach rank 1. What each rank's wait ends with."""
    import torch.distributed as dist
    rank, store = dist.get_rank(), dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    link, byte = exchange_group.Link(token, store, rank, 3, 60000), torch.zeros(1, dtype=torch.uint8)
    said = ""
    if rank != 1:
        try:
            link.group.recv([byte], 1 if rank == 0 else 0, 1).wait(datetime.timedelta(seconds=5))
        except RuntimeError as error:
            said = str(error)
    link.close()
    if rank == 2:
        store.set(f"{token}/over", "")
    store.get(f"{token}/over")          # until then no rank lets go of its link, which closes everything, too
    return said


def test_a_rank_beside_a_dead_one_closes_its_other_connections(pool3, seed):
    """Else those that wait for it, and its own threads, wait until they time out, and are still written to."""
    said = pool3(_closes, f"closes-{seed}")
    assert said[0] and said[2] and "Timed out" not in said[2], said


def failing(path, **more):
    """What a load raises: (class, sentence)."""
    try:
        vckpt.load(path, state(), exchange="always", **more)
    except vckpt.Error as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def works(path):
    to = state()
    return vckpt.load(path, to, exchange="always").exchange.chosen == "always" and right(to)


def until_told(transport):
    """Until another rank has given up."""
    while not transport.link.store.check(["why"]):
        time.sleep(0.01)


def _hangs(path, patch):
    """Only rank 0 can lose its patience."""
    if rank_of() == 1:
        patch.setattr(exchange_group.Transport, "finish", lambda transport, *_: until_told(transport))
    else:
        patch.setattr(exchange, "TIMEOUT_MS", 300)
    return failing(path)


def _cancels(path, patch):
    """Rank 1, while it waits for a bucket of rank 0."""
    ready, finish = threading.Event(), exchange_group.Transport.finish
    if rank_of() == 0:
        patch.setattr(exchange_group.Transport, "finish", lambda *bucket: (until_told(bucket[0]), finish(*bucket)))
        return failing(path)
    patch.setattr(exchange_group.Transport, "finish", lambda *bucket: (ready.set(), finish(*bucket)))
    handle = vckpt.async_load(path, state(), exchange="always")
    assert ready.wait(60)
    handle.cancel()
    with pytest.raises(vckpt.Aborted) as raised:
        handle.wait()
    return "Aborted", str(raised.value)


def _interrupted_again(path, patch):
    """Rank 1, while it tells rank 0 that it was cancelled. Rank 0 says what a wait for rank 1 ended with."""
    said, finish, tell = [], exchange_group.Transport.finish, exchange_group.Link.report

    def waits(transport, *bucket):
        try:
            nothing = torch.zeros(1, dtype=torch.uint8)
            transport.link.group.recv([nothing], 1, exchange_group.CLOSING - 1).wait(datetime.timedelta(seconds=5))
        except RuntimeError as error:
            said.append("timed out" if "Timed out" in str(error) else "closed")
        finish(transport, *bucket)

    def interrupted(link, told, patience):
        if "cancelled" in told[1]:
            raise KeyboardInterrupt
        return tell(link, told, patience)
    if rank_of() == 1:
        patch.setattr(exchange_group.Link, "report", interrupted)
        return _cancels(path, patch)
    patch.setattr(exchange_group.Transport, "finish", waits)
    return failing(path)[0], said[0]


def _has_no_thread(path, patch):
    """Rank 1, for a load that reads in a thread of its own."""
    if rank_of() == 0:
        patch.setattr(exchange, "TIMEOUT_MS", 5000)
        return failing(path)

    def refused(_):
        raise RuntimeError("can't start new thread")
    patch.setattr(load_handle._Reading, "start", refused)
    with pytest.raises(RuntimeError) as raised:
        vckpt.async_load(path, state(), exchange="always")
    return type(raised.value).__name__, str(raised.value)


def _does_not_connect(path, patch):
    if rank_of() == 1:
        def refused(*_):
            raise RuntimeError("no such interface")
        patch.setattr(torch.distributed, "ProcessGroupGloo", refused)
    patch.setattr(exchange, "TIMEOUT_MS", 300)
    exchange_group._links.forget()
    return failing(path)


def _one_after_another(path):
    found = [works(path)]
    for function in _hangs, _cancels, _interrupted_again, _has_no_thread, _does_not_connect:
        with pytest.MonkeyPatch.context() as patch:
            found.append(function(f"{path}/1", patch))
        found.append(works(path))
    return found


def test_ranks_of_several_hosts_that_give_up(pool2, run):
    """A rank that does nothing, one that is interrupted, one without a network; and the next load works."""
    one, two = pool2(apart, "ab", _one_after_another, str(run))
    assert one[::2] == two[::2] == [True] * 6
    (hung, hangs), (other, cancelled), again, (without, threadless), (lonely, alone) = one[1::2]
    (lazy, hanged), (left, own), (_, own_again), _, (refused, unconnected) = two[1::2]
    assert hung == lazy == "Timeout" and hangs == hanged and "rank 1 did nothing for 300 ms" in hangs, (hangs, hanged)
    assert other == left == "Aborted" and "rank 1: " in cancelled and "the load was cancelled" in cancelled, cancelled
    assert "the load was cancelled" in own and "the load was cancelled" in own_again
    assert again == ("Aborted", "closed"), again
    assert without == "Aborted" and "rank 1: RuntimeError: can't start new thread" in threadless, threadless
    assert "rank 0 cannot connect to all others" in alone and lonely == refused == "Error", (lonely, alone)
    assert "rank 1 cannot connect to all others by gloo: no such interface" in unconnected, unconnected


class Other(torch.distributed.ProcessGroup):
    """A backend that moves nothing on the CPU, as NCCL's."""


def _again(path, folder):
    """Two loads at the same time; another default group, whose backend moves nothing; and one of gloo."""
    import torch.distributed as dist
    go, real, rank, world = threading.Event(), loads._Load.run, dist.get_rank(), dist.get_world_size()
    first, second, good = state(), state(), works(path)
    loads._Load.run = lambda load, rows: (go.wait(60), real(load, rows))
    handles = [vckpt.async_load(path, to, exchange="always") for to in (first, second)]
    busy = len(exchange_group.known())
    go.set()
    good = good and all(handle.wait(120).exchange.chosen == "always" for handle in handles)
    loads._Load.run, links = real, weakref.WeakSet(exchange_group._links.all.values())
    dist.destroy_process_group()
    if "other" not in dist.Backend.backend_list:
        dist.Backend.register_backend("other", lambda store, rank, size, timeout: Other(rank, size), devices=["cpu"])
    for backend in "other", "gloo":
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=world)
        good = good and works(path)
        if backend == "other":
            dist.destroy_process_group()
    gc.collect()
    left = len(links)                   # at the latest once there is another group: a mesh may hold the one before
    return good and right(first) and right(second), busy, left


def test_links_live_as_long_as_the_process_group(pool2, run):
    """The last group stays the ranks', for the tests that follow: so its store is in their folder."""
    if not pool2.ranks:
        pool2.start()
    assert pool2(apart, "ab", _again, str(run), pool2.folder) == [(True, 2, 0)] * 2
    other = pathlib.Path(pool2.folder, "other")
    assert not other.exists(), "something holds the store of a group that is destroyed"


def _by_dcp(path):
    import warnings

    import torch.distributed.checkpoint as dcp

    from vckpt.dcp import StorageReader
    warnings.simplefilter("ignore")
    to, reader = state(), StorageReader(f"{path}/1", exchange="always")
    dcp.load(to, storage_reader=reader)
    again, wrong = state(), StorageReader(f"{path}/1", exchange="always")
    if rank_of() == 1:
        wrong.wanted = lambda *_: (_ for _ in ()).throw(ValueError("refused here"))
    try:
        dcp.load(again, storage_reader=wrong)
        said = "nothing"
    except dcp.api.CheckpointException as error:
        said = str(error)
    last = StorageReader(f"{path}/1", exchange="auto")
    dcp.load(again, storage_reader=last)
    return right(to) and right(again), tuple(reader.exchanged), reader.bytes_read, said, last.exchanged.why


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_storage_reader(pool2, run, hosts):
    one, two = pool2(apart, hosts, _by_dcp, str(run))
    size = whole().numel() * 4
    assert one[0] and two[0] and one[1][0] == two[1][0] == "always" and one[1][1] == 2
    assert one[2] + two[2] < 3.3 * size and one[4] and one[4] == two[4]
    assert "refused here" in one[3] and "rank 1: ValueError: refused here" in two[3] + one[3], (one[3], two[3])


def test_one_process(run):
    to = state()
    found = vckpt.load(run, to, exchange="auto")
    assert right(to) and found.exchange is None
    with pytest.raises(vckpt.InvalidArgument, match="exchange='always' needs a process group of several ranks"):
        vckpt.load(run, to, exchange="always")
    with pytest.raises(vckpt.InvalidArgument, match="exchange='all': expected one of never, always, auto"):
        vckpt.load(run, to, exchange="all")
