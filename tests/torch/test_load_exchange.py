# SPDX-License-Identifier: Apache-2.0
"""Loads with exchange=: ranks of one host read each stored byte once. What each has is compared with what was saved;
what was read, with what there is. A rank that is refused, fails, leaves or dies ends the load at all, soon, with its
sentence, and the next load works."""
import os
import re
import time

import pytest
import torch

from test_meeting import ranks

import vckpt
from vckpt import loads

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


@pytest.mark.parametrize("mode", ["always", "auto", pytest.param("never", marks=pytest.mark.full)])
def test_what_is_shared(pool2, run, mode):
    one, two = pool2(_loads, str(run), mode)
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


def test_a_damaged_piece_is_everyone_s(pool2, run):
    """Whoever reads it."""
    pack = max((path for path in run.parent.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    one, two = pool2(_damaged, str(run))
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


def test_a_rank_that_leaves(pool2, run):
    (one, *others), (two, *theirs) = pool2(_leaves, str(run))
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


def test_a_storage_reader(pool2, run):
    one, two = pool2(_by_dcp, str(run))
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
