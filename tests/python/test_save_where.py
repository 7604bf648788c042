# SPDX-License-Identifier: Apache-2.0
"""Where a save goes and for whom: stores that it makes, by however many processes at once; processes that a launcher
calls one of several; and what of the caller's is kept alive, and for how long."""
import contextlib
import errno
import gc
import os
import shutil
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest

import vckpt
from vckpt import meeting, paths, saver as savers

OPTIONS = {"pin": "no"}
STATE = {"m": {"w": np.arange(6.0)}}

START = """
import os, sys, time
import numpy as np, vckpt
OPTIONS = {{"pin": "no"}}
STATE = {{"m": {{"w": np.arange(6.0)}}}}
while {begin!r} > time.time():
    pass
"""


def processes(script, environments, begin=0.0):
    """[(exit status, stdout, stderr)] of one process for each environment, which begin together."""
    text, running = START.format(begin=begin) + script, []
    for environment in environments:
        environment = {**os.environ, **environment}
        if environment.get("VCKPT_PRELOAD"):
            environment["LD_PRELOAD"] = environment["VCKPT_PRELOAD"]
        running.append(subprocess.Popen([sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True))
    try:
        return [(*process.communicate(timeout=120), process.returncode)[::-1] for process in running]
    finally:
        for process in running:
            process.kill()


# ---- errors of the storage that mean something else elsewhere ----

@pytest.mark.parametrize("answer, told", [(errno.ETIMEDOUT, errno.EIO), (errno.EPERM, errno.EPERM)])
def test_an_error_of_the_storage_is_no_more_than_that(build, tmp_path, answer, told):
    """ETIMEDOUT of a network file system does not mean that the save is still under way: waiting ends. EPERM (an
    immutable directory) does not mean a forked child."""
    store, environment = tmp_path / "store", {}
    environment["VCKPT_PRELOAD"] = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    environment["VCKPT_INTERPOSE"] = f"root={store.resolve()},path=packs/,calls=fsync,do=fail,errno={answer},at=1"
    script = f"""
path = {str(store / "run")!r}
handle = vckpt.async_save(path, STATE, **OPTIONS)
for wait in handle.committed, handle.committed, lambda: handle.committed(timeout=60):
    try:
        print(wait())
    except vckpt.Error as error:
        print(type(error).__name__, error.errno)
print(handle.state, vckpt.save(path, STATE))
"""
    [(status, _, said)] = processes(script, [environment])
    assert (status, said) == (0, f"Error {told}\n" * 3 + "failed 1\n")


# ---- stores ----

def test_a_home_that_no_shell_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: vckpt.save("~/store/run", STATE, **OPTIONS), lambda: vckpt.init("~/store"),
                 lambda: vckpt.init("~/store", exist_ok=True)):
        with pytest.raises(vckpt.InvalidArgument, match=r"Python does not expand ~.*give os.path.expanduser\('~/store"):
            call()
    assert not list(tmp_path.iterdir())
    (tmp_path / "~").mkdir()
    vckpt.init("~/store")
    assert (tmp_path / "~/store/vckpt.store").exists()


def test_init_again(tmp_path):
    store = tmp_path / "far/below/store"
    vckpt.init(store)                                   # with the directories above it
    vckpt.init(store, exist_ok=True)
    with pytest.raises(vckpt.StoreExists):
        vckpt.init(store)
    vckpt.init(tmp_path / "other/one", exist_ok=True)
    assert all(paths.is_store(str(one)) for one in (store, tmp_path / "other/one"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for more in {}, {"exist_ok": True}:
        with pytest.raises(vckpt.Error, match="(not|nor) empty"):
            vckpt.init(tmp_path / "full", **more)
    with pytest.raises(vckpt.Error, match="notes.txt"):
        vckpt.init(tmp_path / "full/notes.txt/below/store", exist_ok=True)
    assert os.listdir(tmp_path / "full") == ["notes.txt"]


def test_no_store_is_made_in_a_store(tmp_path, monkeypatch):
    """Its gc and verify would find the files. One that is there already, as it was made before, is a store of its
    own."""
    monkeypatch.chdir(tmp_path)
    vckpt.init("store")
    (tmp_path / "link").symlink_to("store")
    before = sorted((tmp_path / "store").rglob("*"))
    for path in ["store/inner", "store/a/b", "new/../store/inner", "link/inner"]:
        for more in {}, {"exist_ok": True}:
            with pytest.raises(vckpt.InvalidArgument, match=f"is in the store {tmp_path}/store; nothing was made"):
                vckpt.init(path, **more)
    assert sorted((tmp_path / "store").rglob("*")) == before and sorted(os.listdir()) == ["link", "store"]
    vckpt.init("inner")
    os.rename("inner", "store/inner")
    vckpt.init("store/inner", exist_ok=True)
    with pytest.raises(vckpt.StoreExists):
        vckpt.init("store/inner")


def test_a_store_that_was_deleted_is_made_again(tmp_path):
    """In one process, as in a notebook."""
    for _ in range(2):
        assert vckpt.save(tmp_path / "store/run", STATE, **OPTIONS) == 0
        vckpt.close()
        shutil.rmtree(tmp_path / "store")
    vckpt.init(tmp_path / "store", exist_ok=True)
    assert (tmp_path / "store/vckpt.store").exists()


@pytest.mark.parametrize("name, run, number",
                         [("a/run", "run", 0), ("a/run/7", "run", 7), ("a/b/c/run/step-00000012", "run", 12)])
def test_a_save_makes_the_store(tmp_path, name, run, number):
    assert vckpt.save(tmp_path / name, STATE, **OPTIONS) == number
    vckpt.close()
    store = tmp_path / name.partition("/run")[0]
    assert vckpt.steps(store / run) == [number] and (store / "vckpt.store").exists()
    # the same path means the same again
    assert vckpt.save(tmp_path / name, STATE, replace=True, **OPTIONS) >= number
    assert {entry.name for entry in (store / "runs").iterdir()} == {run}
    vckpt.close()


def test_a_saver_makes_the_store_and_a_read_does_not(tmp_path):
    with pytest.raises(vckpt.NotAStore):
        vckpt.steps(tmp_path / "store/run")
    with pytest.raises(vckpt.NotAStore):
        vckpt.close(tmp_path / "store/run")
    assert not (tmp_path / "store").exists()
    with vckpt.Saver(tmp_path / "store/run", **OPTIONS) as saver:
        assert vckpt.steps(tmp_path / "store/run") == [] and saver.save(STATE) == 0


def test_no_store_is_made_where_the_call_cannot_be(tmp_path):
    (tmp_path / "full/checkpoints").mkdir(parents=True)
    (tmp_path / "full/model.pt").write_text("mine")
    with pytest.raises(vckpt.Error, match="full is neither a store nor empty, so no store is made there") as error:
        vckpt.save(tmp_path / "full", STATE)
    assert not isinstance(error.value,
                          vckpt.NotAStore) and sorted(os.listdir(tmp_path / "full")) == ["checkpoints", "model.pt"]
    for path, arguments in [("new/latest", {}), ("new/a b", {}), ("new/run", {"pin": "maybe"}),
                            ("new/run/3", {"step": 4})]:
        with pytest.raises(vckpt.InvalidArgument):
            vckpt.save(tmp_path / path, STATE, **arguments)
    with pytest.raises(vckpt.InvalidArgument):
        vckpt.Saver(tmp_path / "new/run/3")
    assert not (tmp_path / "new").exists()


def test_processes_that_make_one_store(tmp_path):
    """Each saves a run of its own, as soon as it can."""
    script = (f'print(vckpt.save({str(tmp_path / "deep/store")!r} + "/run" + os.environ["ME"], STATE, rank=0, world=1, '
              '**OPTIONS))')
    found = processes(script, [{"ME": str(i)} for i in range(4)], time.time() + 2.5)
    assert all(status == 0 and out == "0\n" for status, err, out in found), found
    assert sorted(entry.name for entry in (tmp_path / "deep/store/runs").iterdir()) == [f"run{i}" for i in range(4)]


# ---- one of several ----

LAUNCHERS = {
    "torchrun": ({"WORLD_SIZE": "2", "RANK": "{}"}, "WORLD_SIZE=2 and RANK={}"),
    "Slurm": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "{}"}, "SLURM_NTASKS=2 and SLURM_PROCID={}"),
    "OpenMPI": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{}"},
                "OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK={}"),
}
NONE = {name: "" for names in meeting.LAUNCHERS for name in names}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_of_several_without_a_process_group(tmp_path, launcher):
    """Each would save a world of one, steps 0 and 1."""
    variables, said = LAUNCHERS[launcher]
    script = f"""
run = {str(tmp_path / "store/run")!r}
for call in (lambda: vckpt.save(run, STATE, **OPTIONS), lambda: vckpt.Saver(run),
             lambda: vckpt.save(run, STATE, launch_id="x")):
    try:
        print(call())
    except ValueError as error:
        print(error)
"""
    found = processes(script, [{**NONE, **{name: value.format(rank) for name, value in variables.items()}}
                               for rank in range(2)])
    for rank, (status, err, out) in enumerate(found):
        lines = out.splitlines()
        assert status == 0 and len(lines) == 3, (err, out)
        assert all(line.startswith(said.format(rank)) and "init_process_group first" in line and
                   "launch_id=" in line and
                   "rank=0, world=1" in line for line in lines), lines
    assert not (tmp_path / "store").exists()


def test_one_of_several_that_saves_by_itself(tmp_path, monkeypatch):
    for name, value in {**NONE, "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "store/run"
    assert vckpt.save(run, STATE, rank=0, world=1, **OPTIONS) == 0
    assert vckpt.save(run, STATE) == 1                  # it is open
    vckpt.close(run)
    with pytest.raises(vckpt.InvalidArgument, match="WORLD_SIZE=2"):
        vckpt.save(run, STATE)


@pytest.mark.parametrize("variables", [
    {}, {"WORLD_SIZE": "1", "RANK": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, {"SLURM_NTASKS": "8"},
    {"WORLD_SIZE": "many"},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}], ids=str)
def test_one_alone(monkeypatch, variables):
    for name, value in {**NONE, **variables}.items():
        monkeypatch.setenv(name, value)
    meeting.check_alone()


# ---- what is kept alive ----

def gone(references, seconds=20.0):
    """Whether all that they refer to goes; nothing is asked of the save."""
    end = time.monotonic() + seconds
    while any(reference() is not None for reference in references):
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
        gc.collect()
    return True


@pytest.fixture
def saver(tmp_path):
    with vckpt.Saver(tmp_path / "store/run", **OPTIONS) as saver:
        yield saver


def state_and_references(**more):
    state = {"m": {"a": np.arange(200000.0), "b": np.ones((300, 40))[::2, ::3], "c": np.ones(3)[::-1], **more}}
    return state, [weakref.ref(array) for array in state["m"].values() if isinstance(array, np.ndarray)]


def test_tensors_are_let_go_of_when_they_are_staged(saver):
    handles, references = [], []
    for _ in range(3):
        state, some = state_and_references()
        handles.append(saver.async_save(state))
        references += some
    del state
    assert gone(references)
    assert all(handle._refs == [] for handle in handles)
    assert [handle.committed() for handle in handles] == [0, 1, 2]
    assert saver._native._staging == [] and saver._native._watcher is None


def test_tensors_are_let_go_of_when_the_save_fails(saver):
    state, references = state_and_references()
    handle = saver.async_save(state, base="run/99")
    del state
    assert gone(references)
    with pytest.raises(FileNotFoundError):
        handle.committed()


def test_tensors_are_let_go_of_when_the_submit_is_refused(saver):
    """With the handle in hand still: as where a value of a state is declared twice."""
    state, references = state_and_references()
    native, memory = saver._native, savers.states.Memory()
    with native.lock:
        handle = native.begin(step=1)
        found = savers.states.collect(state, rank=0, world=1, memory=memory)
        handle.tensors(savers.states.rows_of(found))
        handle.alike([("group", "name", b"1"), ("group", "name", b"2")])
        with pytest.raises(vckpt.StepExists, match="name"):
            handle.submit(found.refs)
        assert handle._refs == []
        del state, found, memory
        assert gone(references)
        handle.give_up(ValueError("declared twice"))
    assert saver.save(STATE, step=2) == 2


def test_tensors_are_let_go_of_when_the_state_is_refused(saver):
    state, references = state_and_references(bad=lambda: 0)
    for arguments in {}, {"attributes": {"loss": None}}, {"mesh": "dp=7"}:
        with pytest.raises((TypeError, ValueError)):
            saver.async_save(state, **arguments)
    del state
    assert gone(references)
    assert saver.save(STATE) == 0


def test_handles_that_nobody_keeps(saver):
    """They are for staging only; then nothing of them is left, the library's save neither."""
    references = [weakref.ref(savers._start(saver._native, STATE)) for _ in range(3)]
    assert gone(references) and saver._native.live == set()


@pytest.mark.parametrize("name", ["runs", "runs/r", "packs", "incoming", "hosts"])
def test_no_directory_where_one_should_be(tmp_path, name):
    """Every call ends, and names it."""
    place = tmp_path / "store" / name
    vckpt.save(tmp_path / "store/r", STATE, step=1, **OPTIONS)
    vckpt.close()
    place.rename(tmp_path / "aside")
    place.symlink_to(tmp_path / "aside")
    sentence = f"{place} is a symbolic link, where a directory should be"
    with pytest.raises(OSError, match=sentence):
        vckpt.save(tmp_path / "store/r", STATE, step=2, **OPTIONS)
        vckpt.close()
    with contextlib.suppress(vckpt.Error):
        vckpt.close()
    for read in (lambda: vckpt.load(tmp_path / "store/r", {"m": {"w": np.zeros(6)}}),
                 lambda: vckpt.open(tmp_path / "store/r/1").read("m", "w"), lambda: vckpt.steps(tmp_path / "store/r")):
        try:
            read()
        except OSError as e:
            assert sentence in str(e)
        else:
            assert name in ("incoming", "hosts", "packs")


@pytest.mark.parametrize("state", [{"w": object()}, {"w": lambda: 1}, {"a name/": np.zeros(3)}, [1]],
                         ids=["object", "function", "name", "list"])
def test_nothing_is_made_for_a_state_that_is_refused(tmp_path, state):
    """Nor changed: an empty folder stays one."""
    with pytest.raises((TypeError, ValueError)):
        vckpt.save(tmp_path / "new/run", state, step=1)
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    with pytest.raises((TypeError, ValueError)):
        vckpt.save(tmp_path / "empty", state, step=1)
    assert not list((tmp_path / "empty").iterdir())
    assert vckpt.save(tmp_path / "new/run", {"m": {"w": np.ones(3)}}, step=1) == 1
    vckpt.close()
