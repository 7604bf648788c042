# SPDX-License-Identifier: Apache-2.0
"""Which step a load opens, the same at all ranks of a process group.

The step's number is not enough: between the looks of two ranks a newer step may appear, or the step may be replaced or
removed. So the ranks agree on the commit (step.Commit): the entry in the run's list, and the digest of the manifest,
which names all data. Each rank opens what it finds, and they meet (meeting.py). Mostly all have found the same, and go
on. Otherwise the ranks that found another commit than rank 0 open rank 0's, even if it is replaced or removed by then,
and they meet again: all have it now, or one that cannot open it says why to all. So a load has one meeting, and a
second one only where something happened in between. Whether the ranks share what they read (exchange.py), for which
they meet once more, is compared here, too. All loads of a group meet in one place, whatever they load, so that ranks
that name different runs, or an impossible path, learn of it at once."""
from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Iterator
from typing import Literal

from . import _lib, meeting, paths
from .exchange import Mode
from .meeting import Meeting
from .signatures import Path
from .step import Commit, Step
from .tensors import torch_module


def opened(path: Path | Step, group: bool, mode: Mode, missing_ok: bool,
           timeout: float) -> tuple[Step | None, Meeting | None]:
    """(The step, which the caller closes, the meeting at which all ranks agreed on it). path: an open Step means its
    commit. None: there is no step, and missing_ok; no meeting, for there is no group or it has no store."""
    if not group:
        return _Where(path).look(missing_ok), None
    meeting.check_own(sys.modules["torch.distributed"], _shown(path))
    with _reporting(_shown(path)):
        where = _Where(path)
    return _agreed(where, mode, missing_ok, timeout)


def refuse(path: Path | Step, error: BaseException) -> None:
    """Reports to the other ranks, which come to the meeting of this load, that this one does not."""
    _report(_shown(path), error)


def _shown(path: Path | Step) -> str:
    return f"{path.store}/{path.run}/{path.number}" if isinstance(path, Step) else str(path)


class _Where:
    """What a caller gave to load, resolved."""

    def __init__(self, path: Path | Step) -> None:
        self.given, self.commit, self.number, self.tag = _shown(path), None, None, None
        if isinstance(path, Step):
            self.store, self.run, self.commit = path.store, path.run, path.commit
        else:
            self.store, self.run, step = paths.split(path, making=True)
            self.number = step if isinstance(step, int) else None
            self.tag = step if isinstance(step, str) and step != "latest" else None
        self.place = f"{self.store}/{self.run}"

    def look(self, missing_ok: bool) -> Step | None:
        if self.commit is not None:
            return self.open(self.commit)
        number = self.number
        if not paths.is_store(self.store):
            if missing_ok and number is None and paths.file_above(self.store) is None:
                return None
            raise paths.no_store(self.given, self.store)
        if number is None and self.tag is None:
            return self.newest(missing_ok)
        return Step(f"{self.place}/{self.tag or number}", _framework())

    def newest(self, missing_ok: bool) -> Step | None:
        """Opens the newest step in one look: the list that says which step it is says which commit, too."""
        newest = f"{self.place}/latest"                     # STORE/RUN alone may be a step of the run `default`
        try:
            return Step(newest, _framework())
        except _lib.NotFound:
            if paths.latest(newest) is not None:            # so what is missing belongs to the step, or that is new
                return Step(newest, _framework())
        if missing_ok:
            return None
        raise _lib.NotFound(errno.ENOENT, f"run {self.run} of {self.store} has no step (missing_ok=True gives None "
                                          "instead)")

    def open(self, commit: Commit) -> Step:
        asked = self.number if self.commit is None else self.commit.step
        if asked not in (None, commit.step):
            raise _lib.invalid(f"{self.place}: this rank is to load step {asked}, rank 0 loads step {commit.step}: all "
                               "ranks of the process group load the same step; a rank that loads by itself gives rank= "
                               "and world=")
        return Step(f"{self.place}/{commit.step}", _framework(), commit)


def _framework() -> Literal["numpy", "torch"]:
    return "numpy" if torch_module() is None else "torch"


def _agreed(where: _Where, mode: Mode, missing_ok: bool, timeout: float) -> tuple[Step | None, Meeting | None]:
    dist = sys.modules["torch.distributed"]
    first, step, error = dist.get_rank() == 0, None, None
    with _reporting(where.place):
        try:
            step = where.look(missing_ok)
        except (_lib.NotFound, _lib.NotAStore) as missing:
            if first:
                raise
            error = missing                     # rank 0 may have found it a moment before or after
    try:
        while True:
            mine = json.dumps([mode, where.run, step and step.commit])
            first_s, alike, held = meeting.compare(dist, mine, where.run, where.place, timeout, meeting.LOADS)
            if first_s != mine:
                before, step = step, None
                if before is not None:
                    before.close()
                with _reporting(where.place):
                    *theirs, commit = json.loads(first_s)
                    for what, given, own in zip(("exchange=", "runs"), theirs, (mode, where.run)):
                        if given != own:
                            raise _lib.invalid(f"{where.place}: ranks load together with different {what}: rank 0 with "
                                               f"{given}, rank {dist.get_rank()} with {own}")
                    step = where.open(Commit(*commit)) if commit else None
            if alike:
                break
    except BaseException:
        if step is not None:
            step.close()
        raise
    if step is None and error is not None and not missing_ok:
        raise error
    return step, held


@contextlib.contextmanager
def _reporting(place: str) -> Iterator[None]:
    """Reports an error to the other ranks."""
    try:
        yield
    except BaseException as error:
        _report(place, error)
        raise


def _report(place: str, error: BaseException) -> None:
    with contextlib.suppress(_lib.Error):
        meeting.check_own(sys.modules["torch.distributed"], place)
        meeting.fail(sys.modules["torch.distributed"], error, "", place, meeting.LOADS)
