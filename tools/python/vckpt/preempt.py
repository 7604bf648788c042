# SPDX-License-Identifier: Apache-2.0
"""A job that is asked to end (SIGTERM, before it is killed) and ends with its last step saved: `on_sigterm`.

The signal comes to the ranks at different times, in the middle of a step, or to some ranks only. So the handler only
notes it, and the ranks agree: after each step every rank calls `stopping(step)`, and all get the same answer for the
same step. What each has noted is sent while the next step is computed (an all-reduce over a gloo group of its own,
not waited for until then), so the answer comes one step after the signal at the earliest and costs next to nothing.

    0   step k      rank 1 is signalled
    1   after k     rank 1 gives 1, the others 0; the answer is of the round before: False
    2   after k+1   the answer is of the round of k: True, at all ranks; they save step k+1 and leave their loops

A process by itself, or the ranks whose `agree` was given, have the answer at once."""
from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import meeting
from ._lib import invalid
from .saver import _group

if TYPE_CHECKING:
    import torch

FINISH_S = 5.0      # for the round of the last step


class Stopping:
    """What `on_sigterm` gives: to be called after each step, and a context that sets the signals' handlers back."""

    def __init__(self, signals: int | Iterable[int], agree: Callable[[bool], bool] | None) -> None:
        self._signals = tuple(signal.Signals(one) for one in ([signals] if isinstance(signals, int) else signals))
        self._agree, self._pid = agree, os.getpid()
        self._noted: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._round: _Round | None = None
        self._answer, self._closed = False, False
        if threading.current_thread() is not threading.main_thread():
            raise invalid("vckpt.on_sigterm: Python handles signals in the main thread: call it there")
        self._ring = _ring(agree)
        _listening.add(self)
        for one in self._signals:
            self._before[one] = signal.signal(one, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        """The signal may come more than once: from torchrun's agent, and from Slurm to every process."""
        if os.getpid() != self._pid:
            return self._child(number)
        if self._noted is None:
            self._noted = time.monotonic()
            os.write(2, f"vckpt: process {self._pid}: {signal.Signals(number).name}: the job ends after a step that "
                        "all ranks agree on\n".encode())

    def _child(self, number: int) -> None:
        """In a process forked since that has not come to `_forked`: the signal does what it did before."""
        self._restore()
        os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for one, handler in self._before.items():
            if signal.getsignal(one) == self._note:
                signal.signal(one, signal.SIG_DFL if handler is None else handler)

    @property
    def signalled(self) -> float | None:
        """Seconds since this process was signalled; None: it was not. Other ranks may say otherwise: do not act on it
        alone."""
        return None if self._noted is None else time.monotonic() - self._noted

    def __call__(self, step: int) -> bool:
        """After step number `step`, on all ranks: whether it is the last one."""
        if self._answer:
            return True
        mine = self._noted is not None
        if self._agree is not None:
            self._answer = bool(self._agree(mine))
        elif self._ring is None:
            self._answer = mine
        else:
            last, self._round = self._round, self._ring.give(mine, step)
            if last is not None:
                self._answer = last.answer()
        return self._answer

    def close(self) -> None:
        """Sets the handlers back, unless the job ends: the signal may come (again) while the last save is written.
        Idempotent."""
        done, self._closed = self._closed or self._answer or self._noted is not None, True
        if not done:
            self._restore()
        self._leave()

    def _leave(self) -> None:
        last, ring, self._round, self._ring = self._round, self._ring, None, None
        if ring is not None and (last is None or last.finish()):
            ring.destroy()

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None and not issubclass(kind, SystemExit):       # other ranks may not come to the last round
            self._round = self._ring = None
        self.close()


_listening: weakref.WeakSet[Stopping] = weakref.WeakSet()


def _forked() -> None:
    """In a child the signals do what they did before. A parent that ends it by one (Process.terminate, and
    multiprocessing when the program ends) would wait for ever, and the default needs no Python code, which a child in a
    long call would run late."""
    for stopping in list(_listening):
        stopping._restore()


os.register_at_fork(after_in_child=_forked)


def _at_exit() -> None:
    """Leaves the groups of those that were not closed: see _Ring.destroy."""
    for stopping in list(_listening):
        if stopping._pid == os.getpid():
            stopping._leave()


class _Ring:
    """All ranks of the process group, and a gloo group of their own."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.group = torch, torch.distributed.new_group(backend="gloo")
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)           # now: before what torch has registered

    def destroy(self) -> None:
        """Its threads end here. A thread of gloo lets go of a round's tensor at some time after the round, and needs
        the interpreter for it: where that is ending, Python ends the thread, and this aborts the process ("terminate
        called without an active exception")."""
        group, self.group = self.group, None
        # where the program has destroyed all groups, this was the last reference
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):
            self.torch.distributed.destroy_process_group(group)

    def give(self, mine: bool, step: int) -> _Round:
        box = self.torch.tensor([int(mine), step, -step], dtype=self.torch.int64)
        dist = self.torch.distributed
        return _Round(dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group, async_op=True), box, step)


class _Round:
    def __init__(self, work: torch.distributed.Work, box: torch.Tensor, step: int) -> None:
        self.work, self.box, self.step = work, box, step

    def answer(self) -> bool:
        self.work.wait()
        stop, highest, lowest = self.box.tolist()
        if highest != -lowest:
            raise invalid(f"vckpt.on_sigterm: this rank called stopping({self.step}), the ranks together called it for "
                          f"steps {-lowest} to {highest}: every rank has to call it after every step")
        return bool(stop)

    def finish(self) -> bool:
        """Waits for a round whose answer is not needed, so that its group is not destroyed meanwhile. False: it goes
        on."""
        try:
            self.work.wait(datetime.timedelta(seconds=FINISH_S))
        except RuntimeError:            # others have ended: the round has no answer, and none is needed
            return bool(self.work.is_completed())
        return True


def _ring(agree: Callable[[bool], bool] | None) -> _Ring | None:
    """The ring of all ranks. None: this process is alone, or agrees in another way."""
    found = _group()
    if agree is not None or (found and found[1] == 1):
        return None
    launched = meeting.launched() if found is None else None
    if launched:
        raise invalid(f"vckpt.on_sigterm: {launched[0]}={launched[1]} in the environment says that there are other "
                      "ranks, but there is no process group of torch: call torch.distributed.init_process_group first, "
                      "or give agree=")
    return None if found is None else _Ring(sys.modules["torch"])


def on_sigterm(signals: int | Iterable[int] = signal.SIGTERM, agree: Callable[[bool], bool] | None = None) -> Stopping:
    """Takes over SIGTERM (or `signals`, one or several): from now on it does not end the process. All ranks make this
    call together, in their main threads, where there is a torch process group.

        with vckpt.on_sigterm() as stopping, vckpt.Saver(run) as saver:
            while step < last:
                step = train(step)
                stop = stopping(step)                   # the same at all ranks
                if stop or step % 100 == 0:
                    handle = saver.async_save(state, step=step)
                if stop:
                    break                               # leaving `with Saver` waits until it is durable

    agree   where the ranks have no process group: a function of this rank's bool that gives whether any rank's is true
            (`lambda mine: comm.allreduce(mine, MPI.LOR)`)"""
    return Stopping(signals, agree)
