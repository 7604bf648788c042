# SPDX-License-Identifier: Apache-2.0
"""A save under way, as its caller has it."""
from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable
from ctypes import byref, sizeof
from typing import TYPE_CHECKING, Any

from . import _lib, commons
from ._lib import Error, invalid
from .signatures import Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .native import Native

SLICE_MS = 250              # of a wait, so that Ctrl-C is heard


def _why(error: BaseException) -> bytes:
    """The sentence for the other ranks."""
    said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    return f"{type(error).__name__}: {said}".replace("\0", "?").encode("utf-8", "replace")[:800]


class Handle:
    """A save under way. Any thread may ask."""

    def __init__(self, native: Native, pointer: int | None, step: int | None, replace: bool = False) -> None:
        self._native, self._pointer, self._replace = native, pointer, replace
        self._refs: list[object] = []
        native.live.add(pointer)
        self._step, self._submitted, self._called_ns, self._raised = step, False, 0, False

    # -- the parts of a save; by one thread --

    def tensors(self, rows: NDArray[np.uint64]) -> None:
        """rows: an array of struct vckpt_tensor, one after another, as 64-bit words."""
        if len(rows):
            _lib.call("vckpt_save_tensors", self._at(), rows.ctypes.data, len(rows))

    def blob(self, name: str, data: Any, per_rank: bool = False) -> None:
        try:
            data = bytes(memoryview(data))
        except TypeError:
            raise invalid(f"blob {name!r}: expected bytes, not {type(data).__name__}") from None
        _lib.call("vckpt_save_blob", self._at(), _lib.text(name, "blob"), int(per_rank), data, len(data))

    def common(self, group: str, name: str, data: Any) -> None:
        """A value (bytes) that all ranks which declare anything in `group` have to hold alike: the save is refused
        where they do not. Nothing of it is stored but a digest."""
        self.alike([(group, name, data)])

    def alike(self, rows: Iterable[commons.Row]) -> None:
        """[(group, name, bytes)]: as common."""
        at = self._at()
        for group, name, data in rows:
            data = data if type(data) is bytes else bytes(memoryview(data))
            _lib.call("vckpt_save_common", at, _lib.text(group, "group"), _lib.text(name, "value"), data, len(data))

    def submit(self, refs: Iterable[object] = ()) -> None:
        """refs: what has to live until it is staged."""
        self._refs = list(refs)
        try:
            _lib.call("vckpt_save_submit", self._at())
        except BaseException:
            self._refs = []
            raise
        self._submitted = True
        self._native.started(self)

    def give_up(self, error: BaseException) -> None:
        """Gives up a save that was not submitted; the other ranks learn why."""
        if not self._submitted:
            self._refs = []
            self._free(_why(error))

    # -- asking --

    @property
    def step(self) -> int | None:
        """Its number; None before that is known."""
        return self._step

    @property
    def state(self) -> str:
        return _lib.STATES[self._progress().state]

    @property
    def done(self) -> bool:
        """The save is committed, or it failed."""
        return self.state in ("committed", "failed")

    @property
    def progress(self) -> Progress:
        """Bytes of what this rank stores: in all, staged, done."""
        found = self._progress()
        return {"bytes_total": found.bytes_total, "bytes_staged": found.bytes_staged, "bytes_done": found.bytes_done}

    def staged(self, timeout: float | None = None) -> None:
        """Waits until the tensors are the caller's again. Raises vckpt.Timeout, or what the save failed with."""
        self._wait("vckpt_save_wait_staged", timeout)
        self._refs = []

    def committed(self, timeout: float | None = None) -> int:
        """Waits until the step is visible and durable; its number. Raises vckpt.Timeout, or what the save failed
        with."""
        found = _lib.Committed()
        self._wait("vckpt_save_wait_committed", timeout, byref(found))
        self._refs, self._step = [], int(found.step)
        return self._step

    @property
    def timings(self) -> dict[str, Any]:
        """What this rank did: phases (start and end in ns since the epoch, ns that threads were busy, bytes), bytes by
        fate, plan."""
        found = _lib.Timings(size=sizeof(_lib.Timings))
        self._check(_lib.lib().vckpt_save_timings(self._at(), byref(found)))
        result = {name: getattr(found, name) for name, *_ in _lib.Timings._fields_[2:]}
        result["call_ns"] = self._called_ns
        result["phases"] = {phase.name.decode(): {field: getattr(phase, field) for field, *_ in _lib.Phase._fields_[1:]}
                            for phase in found.phase if phase.name}
        return result

    # -- inside --

    def _at(self) -> int:
        self._native.check_process()
        if not self._pointer:
            raise _lib.Aborted(_lib.EABORTED, "the save was given up before it was submitted")
        return self._pointer

    def _progress(self) -> _lib.Progress:
        found = _lib.Progress(sizeof(_lib.Progress))
        self._check(_lib.lib().vckpt_save_progress(self._at(), byref(found)))
        return found

    def _check(self, result: int) -> None:
        if result < 0:
            raise _lib.error(result, "")

    def _wait(self, function: str, timeout: float | None, *results: Any) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_MS if end is None else max(0, min(SLICE_MS, int((end - time.monotonic()) * 1000 + 0.5)))
            try:
                return _lib.call(function, self._at(), left, *results)
            except _lib.Timeout as error:
                if end is not None and time.monotonic() >= end:
                    hint = (f": `vckpt ls {shlex.quote(self._native.store)} --incoming` says for which ranks it waits"
                            if self._native.world > 1 and results else "")
                    raise _lib.Timeout(error.errno, f"{error}{hint}") from None
            except Error as error:
                self._refs, self._raised = [], True
                if isinstance(error, _lib.StepExists) and not self._replace:
                    error = _lib.StepExists(error.errno, f"{error}: replace=True replaces it")
                raise self._native.ended(error) from None

    def _ended_staging(self) -> bool:
        """Drops the references that were kept for staging, once staging is over."""
        if self._refs and self._pointer and self._submitted and self._progress().state not in (0, 1, 2):
            self._refs = []
        return not self._refs

    def _free(self, reason: bytes | None = None) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._native.free(pointer, reason)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._free()
