# SPDX-License-Identifier: Apache-2.0
"""vckpt.async_load: it reads in a thread of its own, what belongs to the caller's thread is done by wait(), and
whatever ends it ends the writing into the caller's memory."""
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import vckpt
from vckpt import loads

ALONE = {"rank": 0, "world": 1}
PATIENCE = 120


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


class Kept:
    def __init__(self, value):
        self.value, self.thread = value, None

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value, self.thread = state["value"], threading.current_thread()


class Gate:
    """Holds loads of the library back, in whatever thread, before they look at what has come."""

    def __init__(self, monkeypatch):
        self.open, self.reached, self.threads = threading.Event(), threading.Event(), []
        over = loads._Load.over

        def held(load):
            self.threads.append(threading.current_thread())
            self.reached.set()
            if not self.open.wait(0.01):
                load.watch.check()              # the library's load may be over by now
                return False
            return over(load)
        monkeypatch.setattr(loads._Load, "over", held)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def test_it_reads_meanwhile(run, gate):
    w = np.arange(5000.0)
    vckpt.save(run, {"m": {"w": w, "half": w}, "object": Kept(3), "plan": {"n": 1}}, step=7, attributes={"loss": 1},
               **ALONE)
    to, one = {"w": np.zeros(5000), "half": np.zeros(5000, "f4")}, Kept(0)
    handle = vckpt.async_load(run, {"m": to, "object": one, "plan": {"n": 0}}, **ALONE)
    assert gate.reached.wait(PATIENCE) and not handle.done and handle.step == 7
    assert handle.progress["bytes_total"] == 80_000 and one.thread is None
    with pytest.raises(vckpt.Timeout, match="the load of step 7 has not ended after 0.01 s: wait again, or cancel it"):
        handle.wait(0.01)
    gate.open.set()
    found = handle.wait(PATIENCE)
    assert handle.done and handle.progress == {"bytes_total": 80_000, "bytes_done": 80_000}
    assert found.step == 7 and found.attributes == {"loss": "1"} and found.values == {"plan": {"n": 1}}
    assert found.bytes_read > 1000 and found is handle.wait()
    assert np.array_equal(to["w"], w) and np.array_equal(to["half"], w.astype("f4")) and one.value == 3
    assert one.thread is threading.current_thread() and one.thread not in gate.threads
    handle.cancel()                             # too late to matter
    assert handle.wait() is found
    assert vckpt.load(run, {"m": to}, **ALONE).bytes_read == found.bytes_read


def test_what_does_not_fit_is_said_by_the_call(run, tmp_path):
    vckpt.save(run, {"m": {"w": np.ones(3)}}, **ALONE)
    with pytest.raises(vckpt.InvalidArgument, match="the step lacks m/v"):
        vckpt.async_load(run, {"m": {"w": np.ones(3), "v": np.ones(3)}}, **ALONE)
    handle = vckpt.async_load(tmp_path / "store/other", {}, missing_ok=True, **ALONE)
    assert handle.done and handle.step is None and handle.wait() is None
    assert handle.progress == {"bytes_total": 0, "bytes_done": 0}
    handle.cancel()


def test_cancelled(run, gate):
    w = np.arange(5000.0)
    vckpt.save(run, {"m": {"w": w}, "object": Kept(3)}, **ALONE)
    one, to = Kept(0), np.zeros(5000)
    handle = vckpt.async_load(run, {"m": {"w": to}, "object": one}, **ALONE)
    assert gate.reached.wait(PATIENCE)
    handle.cancel()                             # while the gate is closed
    assert handle.done
    gate.threads[0].join(PATIENCE)
    assert not gate.threads[0].is_alive()
    for _ in range(2):
        with pytest.raises(vckpt.Aborted, match="the load was cancelled: tensors of the state hold anything"):
            handle.wait()
    assert one.value == 0
    gate.open.set()
    assert vckpt.load(run, {"m": {"w": to}, "object": one}, **ALONE) and np.array_equal(to, w) and one.value == 3


def test_a_handle_that_is_dropped(run, gate):
    vckpt.save(run, {"m": {"w": np.ones(5000)}}, **ALONE)
    handle = vckpt.async_load(run, {"m": {"w": np.zeros(5000)}}, **ALONE)
    assert gate.reached.wait(PATIENCE)
    del handle
    gc.collect()
    gate.threads[0].join(PATIENCE)              # the gate is closed: only cancelling ends it
    assert not gate.threads[0].is_alive()


def test_an_error_is_everyone_s_that_waits(run):
    class Refuses(Kept):
        def load_state_dict(self, state):
            raise KeyError("mine")
    vckpt.save(run, {"m": {"w": np.ones(3)}, "object": Kept(3)}, **ALONE)
    handle = vckpt.async_load(run, {"m": {"w": np.zeros(3)}, "object": Refuses(0)}, **ALONE)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            handle.wait(PATIENCE)


def test_in_a_child(run, monkeypatch):
    """The child has none of the threads: it says so; a load of its own works. The library has no threads at the fork,
    so that what they may hold in its child is no question of this test."""
    vckpt.save(run, {"m": {"w": np.ones(5000)}}, **ALONE)
    vckpt.close()
    to, opened, real = np.zeros(5000), threading.Event(), loads._Load.run
    monkeypatch.setattr(loads._Load, "run", lambda load, rows: (opened.wait(PATIENCE), real(load, rows)))
    handle = vckpt.async_load(run, {"m": {"w": to}}, **ALONE)
    child = os.fork()
    if child == 0:
        opened.set()
        said = 0
        for ask in handle.wait, handle.cancel, lambda: handle.done, lambda: handle.progress:
            try:
                ask()
            except vckpt.Forked as error:
                said += "begin a load in the child" in str(error)
        own = np.zeros(5000)
        good = vckpt.load(run, {"m": {"w": own}}, **ALONE) is not None and own.all() and said == 4
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    opened.set()
    assert handle.wait(PATIENCE) and to.all()


def test_the_end_of_the_program(run):
    """Its load ends with it, though it would never have ended by itself."""
    vckpt.save(run, {"m": {"w": np.ones(5000)}}, **ALONE)
    program = """
import sys, threading, time
import numpy as np
import vckpt
from vckpt import loads
reached = threading.Event()
def over(load):
    reached.set()
    load.watch.check()
    time.sleep(0.01)
    return False
loads._Load.over = over
handle = vckpt.async_load(sys.argv[1], {"m": {"w": np.zeros(5000)}}, rank=0, world=1)
reached.wait()
print("end", flush=True)
"""
    environment = dict(os.environ)
    if environment.get("VCKPT_PRELOAD"):
        environment["LD_PRELOAD"] = environment["VCKPT_PRELOAD"]
    done = subprocess.run([sys.executable, "-c", program, run], capture_output=True, text=True, timeout=PATIENCE,
                          env=environment)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
