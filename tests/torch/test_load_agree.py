# SPDX-License-Identifier: Apache-2.0
"""All ranks of a load have one commit of a step, or none has any: whatever is saved, replaced, removed or collected
after rank 0 has opened the step and before the others do."""
import contextlib
import os
import pathlib
import pickle
import subprocess
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

import vckpt
from vckpt.dcp import StorageReader, StorageWriter
from vckpt.step import Step

PIN = {"pin": "no"}
ALONE = {"rank": 0, "world": 1, **PIN}


def rank_of():
    import torch.distributed as dist
    return dist.get_rank()


def state(value=0.0):
    return {"model": {"w": torch.full((64,), value)}, "n": int(value)}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "store/run"
    vckpt.save(path, state(1.0), step=10, **PIN)
    vckpt.close()
    return str(path)


@contextlib.contextmanager
def between(run, then):
    """Rank 0 opens its step first; then comes `then`; then rank 1 opens one."""
    opened, init = pathlib.Path(f"{run}.opened"), Step.__init__

    def first(self, *arguments, **more):
        init(self, *arguments, **more)
        opened.touch()

    def second(self, *arguments, **more):
        Step.__init__ = init
        end = time.monotonic() + 60
        while not opened.exists() and time.monotonic() < end:
            time.sleep(0.01)
        then(run)
        init(self, *arguments, **more)
    Step.__init__ = second if rank_of() == 1 else first
    try:
        yield
    finally:
        Step.__init__ = init


def saved(run, step, value, **more):
    vckpt.save(run, state(value), step=step, **ALONE, **more)
    vckpt.close()


def command(*words):
    subprocess.run([os.path.join(os.environ["VCKPT_BUILD"], "tools/vckpt/vckpt"), *words], check=True,
                   capture_output=True)


def replaced(run):
    saved(run, 10, 2.0, replace=True)


def newer(run):
    saved(run, 20, 2.0)


def removed(run):
    command("rm", os.path.dirname(run), "run/10")


def collected(run):
    replaced(run)
    command("gc", "-q", "--grace", "0", os.path.dirname(run))
    command("gc", "-q", "--grace", "0", os.path.dirname(run))


def moved(run):
    """The tag, to a newer step; and the step that had it is removed."""
    newer(run)
    vckpt.tag(f"{run}/20", "best")
    removed(run)


def untagged(run):
    vckpt.untag(f"{run}/10", "best")


def _loaded(run, path, then, how):
    to = state()
    load = how.pop("load", "load")
    with between(run, globals()[then]):
        try:
            found = getattr(vckpt, load)(path, to, meet_timeout=60.0, **how)
            found = found.wait(60) if load == "async_load" else found
        except vckpt.Error as error:
            return type(error).__name__, str(error), set(to["model"]["w"].tolist())
    return found.step, found.values["n"], set(to["model"]["w"].tolist())


@pytest.mark.parametrize("path, then", [("", "newer"), ("/latest", "replaced"), ("/10", "replaced"),
                                        ("/10", "removed")])
@pytest.mark.parametrize("how", [{}, {"load": "async_load"}, {"exchange": "always"}], ids=str)
def test_every_rank_loads_what_rank_0_opened(pool2, run, path, then, how):
    assert pool2(_loaded, run, run + path, then, how) == [(10, 1, {1.0})] * 2


@pytest.mark.parametrize("then", ["moved", "untagged"])
def test_every_rank_loads_what_had_the_tag_for_rank_0(pool2, run, then):
    vckpt.tag(f"{run}/10", "best")
    assert pool2(_loaded, run, run + "/best", then, {}) == [(10, 1, {1.0})] * 2


def test_a_commit_that_is_gone_is_refused_by_all(pool2, run):
    found = pool2(_loaded, run, run + "/10", "collected", {})
    for kind, said, values in found:
        assert kind in ("Aborted", "Error") and "run/10 was removed or replaced" in said and values == {0.0}, found


def _modes(run, calls):
    path, options = calls[rank_of()]
    try:
        return vckpt.load(path and run + path, state(), meet_timeout=60.0, **options).exchange.over
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("other, words", [(("/10", {"exchange": "never"}), "different exchange="),
                                          (("/latest", {"exchange": "always"}), "shared memory"),
                                          (("b/1", {"exchange": "always"}), "different runs"),
                                          ((None, {"exchange": "always"}), "a path was expected"),
                                          (("/10", {"exchange": ["always"]}), "unhashable"),
                                          (("/10", {"exchange": "always", "threads": "2"}), "threads='2'")], ids=str)
def test_ranks_that_call_in_another_way(pool2, run, other, words):
    """All hear at once of a mode that differs, and of an argument that is wrong."""
    saved(run + "b", 1, 3.0)
    for calls in ([("/10", {"exchange": "always"}), other], [other, ("/10", {"exchange": "always"})]):
        assert all(words in said for said in pool2(_modes, run, calls))


def _keys(run, mode):
    import torch.distributed as dist

    from vckpt import meeting
    store, many = meeting.store_of(dist), []
    for _ in range(5):
        for _ in range(2):
            vckpt.load(run, state(), exchange=mode)
        dist.barrier()
        many.append(store.num_keys())
        dist.barrier()
    return many[-1] - many[1]


@pytest.mark.parametrize("mode", ["never", "always"])
def test_loads_leave_nothing_in_the_groups_store(pool2, run, mode):
    assert max(pool2(_keys, run, mode)) <= 2            # a barrier's own


def _arguments(run, other):
    """Paths that cannot be meant together."""
    try:
        vckpt.load(run if rank_of() == 0 else other, state(), meet_timeout=60.0)
        return "nothing"
    except vckpt.Error as error:
        return str(error)


def test_ranks_that_name_different_steps(pool2, run, tmp_path):
    saved(run, 20, 2.0)
    for said in pool2(_arguments, run + "/10", run + "/20"):
        assert "step 10" in said and "step 20" in said
    saved(tmp_path / "other/run", 10, 3.0)
    for said in pool2(_arguments, run + "/10", str(tmp_path / "other/run/10")):
        assert "another commit" in said and "other" in said
    for said in pool2(_arguments, run + "/10", str(tmp_path / "none/run/10")):
        assert "none" in said, said


# ---- torch's distributed checkpoint ----

def _dcp(run, path, then):
    to = state()
    with between(run, globals()[then]):
        try:
            dcp.load({"model": to["model"]}, storage_reader=StorageReader(path))
        except dcp.api.CheckpointException as error:
            return str(error), set(to["model"]["w"].tolist())
    return "", set(to["model"]["w"].tolist())


def again(run):
    dcp.save({"model": state(2.0)["model"]}, storage_writer=StorageWriter(run + "/10"), no_dist=True)
    vckpt.close()


@pytest.mark.parametrize("path, then", [("", "newer"), ("/10", "again")])
def test_dcp_refuses_at_all_ranks(pool2, run, path, then):
    for said, values in pool2(_dcp, run, run + path, then):
        assert "ranks opened different steps" in said and values == {0.0}, said


# ---- steps that are handed on ----

def test_a_pickled_step_is_the_same_commit(run):
    with vckpt.open(run) as step:
        sent, commit = pickle.dumps(step), step.commit
        found = vckpt.load(run, state(), rank=0, world=1)
        replaced(run)
        with pickle.loads(sent) as same:
            assert same.commit == commit and same["model/w"].torch().tolist() == [1.0] * 64
        to = state()
        assert vckpt.load(step, to, rank=1, world=2).values["n"] == 1 and to["model"]["w"].tolist() == [1.0] * 64
        assert step["model/w"].torch()[0] == 1.0                # it is the caller's, and stays open
    assert found.commit == commit
    with vckpt.open(run) as now:
        assert now.commit != commit and now.commit.entry > commit.entry
    collected(run)
    with pytest.raises(vckpt.Error, match="run/10 was removed or replaced"):
        pickle.loads(sent)
