# SPDX-License-Identifier: Apache-2.0
"""What a load gives, and a load that has begun. `Started` has what is left of it: to read, in whatever thread, and then
to finish, in the caller's. `LoadHandle` is what async_load gives: it reads in a thread of its own.

That thread writes into the caller's tensors, and holds them meanwhile. It ends by itself when the handle is gone or the
program's main thread has ended: nothing can ask for the result then."""
from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from . import _lib
from .exchange import Exchanged, Shared
from .loads import Damage, Watch, cancelled
from .step import Commit, Step


class Loaded(NamedTuple):
    """What `load` found."""
    path: str                       # STORE/RUN/STEP
    run: str
    step: int                       # its number
    attributes: dict[str, str]
    # {component: its plain values, among them tensors and objects that were filled}
    values: dict[str, Any]
    missing: list[str]              # what the state has and the step lacks; empty unless strict=False
    unexpected: list[str]           # tensors that the step has and the state's component lacks; likewise
    rng: bool                       # the random number generators were set back
    damaged: list[Damage]           # what could not be read; empty unless on_damage="skip"
    bytes_read: int                 # of the store's packs by this rank, checks included
    called: list[str]               # modules that load_state_dict() filled; all others were filled in place
    shared: list[tuple[str, str]]   # names that are one tensor in the state, and differed; empty unless strict=False
    exchange: Exchanged | None = None       # what exchange= did; None without it
    commit: Commit | None = None            # which commit of the step it was

    def blob(self, name: str, rank: int | None = None) -> bytes:
        """The bytes of a file of the step, as Step.blob gives them."""
        with Step(os.path.dirname(self.path), "numpy", self.commit) as step:
            return step.blob(name, rank)


class LoadProgress(TypedDict):
    bytes_total: int            # of this rank's tensors in the step
    bytes_done: int             # of those that are in memory


class Started:
    """As a context it closes the step. size: bytes that are going to be filled; shared: the ranks that read for each
    other."""

    def __init__(self, step: Step, watch: Watch, size: int, read: Callable[[], None],
                 finish: Callable[[int], Loaded], shared: Shared | None) -> None:
        self.step, self.watch, self.size, self._read, self._finish = step, watch, size, read, finish
        self.shared = shared

    def read(self) -> None:
        if self.shared is None:
            self._read()
            return
        with self.shared:
            try:
                self._read()
            except BaseException as error:
                self.shared.abort(error)
                raise

    def refuse(self, error: BaseException) -> None:
        """Instead of read: reports the error to the other ranks, which have begun."""
        if self.shared is not None:
            with self.shared:
                self.shared.abort(error)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        """Drops the state as well."""
        del self._read, self._finish
        self.step.close()

    def finished(self) -> Loaded:
        """What the load gives, once everything has been read."""
        found = self._finish(self.watch.read)
        return found._replace(exchange=self.shared.found) if self.shared else found


class _Reading(threading.Thread):
    """The thread of a LoadHandle. error: what the reading ended with."""

    def __init__(self, started: Started) -> None:
        super().__init__(name="vckpt load")
        self.started = started
        main = threading.main_thread()
        started.watch.main = main if main.is_alive() else None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self.started.read()
        except BaseException as error:      # wait() raises it
            self.error = error
        self.over.set()


class LoadHandle:
    """A load under way. Any thread may ask. A handle that is dropped cancels its load."""

    def __init__(self, started: Started | None) -> None:
        """None: there is no step, and nothing to be read."""
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._started = started
        self._found: Loaded | None = None
        self._error: BaseException | None = None
        self._reading = None if started is None else _Reading(started)
        if self._reading and started:
            try:
                self._reading.start()
            except RuntimeError as error:       # no thread is to be had, or the program ends
                with started:
                    started.refuse(error)
                raise

    def __del__(self) -> None:
        started: Started | None = getattr(self, "_started", None)
        if started is not None:
            started.watch.cancelled = True

    @property
    def step(self) -> int | None:
        """The number of the step; None where there is none (missing_ok)."""
        return self._started.step.number if self._started else None

    @property
    def done(self) -> bool:
        """All has been read, or the load has failed: wait() does not wait any more."""
        self._check_process()
        return self._reading is None or self._reading.over.is_set()

    @property
    def progress(self) -> LoadProgress:
        self._check_process()
        if not self._started:
            return {"bytes_total": 0, "bytes_done": 0}
        return {"bytes_total": self._started.size, "bytes_done": min(self._started.watch.placed, self._started.size)}

    def wait(self, timeout: float | None = None) -> Loaded | None:
        """Waits until all has been read, fills what is left, and gives what load gives. Raises vckpt.Timeout after
        `timeout` seconds (the load goes on), or what the load failed with. Called again it gives the same."""
        self._check_process()
        if self._reading and not self._reading.over.wait(timeout):
            raise _lib.Timeout(errno.ETIMEDOUT, f"the load of step {self.step} has not ended after {timeout:g} s: wait "
                                                "again, or cancel it")
        with self._lock:
            if self._error is None and self._found is None and self._reading and self._started:
                self._finish(self._reading, self._started)
            if self._error is not None:
                raise self._error
            return self._found

    def cancel(self) -> None:
        """Ends the load, and returns when its threads have ended: nothing is written any more. The tensors of the state
        hold anything then, and wait() raises vckpt.Aborted. Of a load that was waited for it does nothing."""
        self._check_process()
        if self._started is None or self._reading is None:
            return
        self._started.watch.cancelled = True
        self._reading.over.wait()
        with self._lock:
            if self._found is None and self._error is None:
                with self._started:
                    self._error = self._reading.error or cancelled()

    def _finish(self, reading: _Reading, started: Started) -> None:
        with started:
            try:
                if reading.error is not None:
                    raise reading.error
                self._found = started.finished()
            except BaseException as error:
                self._error = error

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise _lib.Forked(_lib.EFORKED, f"the load was begun by process {self._pid}: its child {os.getpid()} has "
                                            "no threads that read; begin a load in the child")
