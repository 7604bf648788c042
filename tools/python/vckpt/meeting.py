# SPDX-License-Identifier: Apache-2.0
"""How the ranks of torch's process group agree on one launch id, or on one step: through the group's store, not by a
collective, so that a rank which waits can say for which ranks, and does not wait for ever.

Each attempt at a meeting of a run has a number, the same for all ranks, kept in the store:

    RUN/at              the number of the meeting that is held; a rank that has seen a verdict adds one
    RUN/N/rank.R        rank R has come, and to which path
    RUN/N/waiting       how many ranks have come and wait
    RUN/N/said.TEXT     how many ranks say this (its digest), where it is compared what ranks say
    RUN/N/failed        the error of a rank that could not make the call: its path or its options are wrong
    RUN/N/verdict       a launch id (a step), by rank 0, once all wait; or an error, by the rank that gives up first

A meeting to which all came shows that all have left the one before, whose keys go then. Loads add keys to theirs
(exchange.py, gaps.py).

The verdict is set once (compare_set) and holds for every rank: where one gives up, all that wait raise the same error,
and the next call of each comes to the next meeting. Ranks that come later raise the error of a rank that failed before
it waited, too, so that all go on from there alike."""
from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _lib
from .tensors import process_group

if TYPE_CHECKING:
    import torch

Verdict = dict[str, Any]
Distributed: TypeAlias = Any           # the module torch.distributed

WARN_S, AGAIN_S = 5.0, 60.0     # the first line about ranks that have not come, and how often it is said again
LOOKED_AT = 64                  # lower ranks: if one of them has come, that one warns
NAMED = 8                       # ranges of ranks in a sentence
OF_RANK = ("rank", "said", "has")                                       # keys of a meeting
OF_ALL = ("waiting", "failed", "verdict", "gathers", "all")
ALL = "is a call of all ranks (not of `if rank == 0:`)"
SAVES = "the first save of a run, and each Saver,"
LOADS = "vckpt.load without rank= and world="


def check_own(dist: Distributed, path: str) -> None:
    """Refuses a child of a fork: its messages to the store would go over its parent's connection, and break what the
    parent sends next."""
    if _of_parent is not None and dist.group.WORLD is _of_parent:
        raise _lib.Forked(_lib.EFORKED, f"{path}: the process group belongs to the process that forked this one "
                                        f"({os.getpid()}): give rank=0, world=1 to load by itself, or call "
                                        "torch.distributed.init_process_group in the child")


_of_parent: Any = None


def _after_fork() -> None:
    global _of_parent
    dist = process_group()
    if dist is not None:
        _of_parent = dist.group.WORLD


os.register_at_fork(after_in_child=_after_fork)


def agree(dist: Distributed, launch_id: str, run: str, path: str, timeout: float, call: str = SAVES) -> str:
    """Rank 0's launch id, at all ranks of the default process group. call: what all ranks have to call."""
    held = meeting(dist, run, path, timeout, call)
    return held.launch(launch_id) if held else broadcast(dist, launch_id, path, call)


def compare(dist: Distributed, said: str, run: str, path: str, timeout: float,
            call: str) -> tuple[str, bool, Meeting | None]:
    """(What rank 0 says, whether all ranks said the same, the meeting). Without a store no rank knows what the others
    said: True, None."""
    held = meeting(dist, run, path, timeout, call)
    if held is None:
        return broadcast(dist, said, path, call), True, None
    verdict = held.held(said, compare=True)
    return str(verdict["launch"]), bool(verdict["alike"]), held


def meeting(dist: Distributed, run: str, path: str, timeout: float, call: str = SAVES) -> Meeting | None:
    """A meeting, or None where the process group has no store (MPI)."""
    store = store_of(dist)
    name = run if call == SAVES else call           # loads have meetings of their own, one after another of any run
    return None if store is None else Meeting(store, dist.get_rank(), dist.get_world_size(), name, path, timeout, call)


def store_of(dist: Distributed) -> Any:
    """The store of the default process group, or None."""
    return None if dist.get_backend() == "fake" else dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]


def fail(dist: Distributed, error: BaseException, run: str, path: str, call: str = SAVES) -> None:
    """Reports this rank's error to the others, which may wait in a meeting."""
    held = meeting(dist, run, path, 0, call)
    if held:
        try:
            held.fail(error)
        except RuntimeError as late:
            print(f"vckpt: {path}: an error could not be reported to the other ranks: {late}", file=sys.stderr,
                  flush=True)


def broadcast(dist: Distributed, launch_id: str, path: str, call: str = SAVES) -> str:
    """Where there is no store: no rank knows which one is missing, and the wait ends only with the group."""
    late = threading.Timer(WARN_S, print, [f"vckpt: {path}: rank {dist.get_rank()} waits for ranks that have not made "
                                           f"the same call: {call} {ALL}"], {"file": sys.stderr, "flush": True})
    late.daemon = True
    late.start()
    try:
        box = [launch_id]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    finally:
        late.cancel()


class Meeting:
    """One rank's part. `store` is a torch.distributed.Store."""

    def __init__(self, store: torch.distributed.Store, rank: int, world: int, run: str, path: str, timeout: float,
                 call: str = SAVES) -> None:
        self.store, self.rank, self.world, self.path, self.timeout, self.call = store, rank, world, path, timeout, call
        self.base = f"vckpt/{hashlib.sha256(run.encode('utf-8', 'backslashreplace')).hexdigest()[:16]}"
        self.number, self.begun, self.pause, self.compare = 0, time.monotonic(), 0.002, False

    # -- the store --

    def key(self, name: str) -> str:
        return f"{self.base}/{self.number}/{name}"

    def read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def decide(self, **verdict: object) -> Verdict:
        """The verdict: this one, or one that was there before."""
        return _verdict(self.store.compare_set(self.key("verdict"), "", json.dumps(verdict)))

    def move_on(self) -> None:
        self.store.compare_set(f"{self.base}/at", str(self.number) if self.number else "", str(self.number + 1))

    # -- the meeting --

    def come(self) -> Verdict | None:
        """Joins the meeting that is held, unless this rank was there before. Gives the verdict where there is one
        already: that of the last meeting, if a rank failed there before this one came."""
        while True:
            self.number = int(self.read(f"{self.base}/at") or 0)
            if self.number > 0:
                self.number -= 1
                last = _verdict(self.store.get(self.key("verdict")))
                if "failed" in last and not self.here():
                    self.arrive()
                    return last
                self.number += 1
            if self.read(self.key("verdict")) is None:
                if not self.here():
                    self.arrive()
                    return None
                failed = self.read(self.key("failed"))          # it comes again, after its own failure
                self.decide(error=json.loads(failed) if failed else [_lib.EABORTED, f"rank {self.rank} came and went"],
                            failed=True)
            self.move_on()

    def here(self) -> bool:
        return self.read(self.key(f"rank.{self.rank}")) is not None

    def arrive(self) -> None:
        self.store.set(self.key(f"rank.{self.rank}"), json.dumps(self.path))

    def launch(self, launch_id: str) -> str:
        """Rank 0's launch id."""
        return str(self.held(launch_id)["launch"])

    def held(self, launch_id: str, compare: bool = False) -> Verdict:
        """The verdict, where it is no error. compare: it has `alike`, whether all ranks gave this launch id."""
        self.compare = compare
        try:
            verdict = self.come()
            if verdict is None:
                if compare:
                    self.store.add(self.key(_said(launch_id)), 1)
                self.store.add(self.key("waiting"), 1)
                failed = self.read(self.key("failed"))
                verdict = self.wait(launch_id) if failed is None else self.decide(error=json.loads(failed), failed=True)
        except RuntimeError as error:
            raise _lib.Error(errno.ECONNRESET, f"{self.path}: the process group's store, by which ranks agree on a "
                             f"launch, does not answer: {error}") from error
        except BaseException as error:
            self.decide(error=[_lib.EABORTED, f"rank {self.rank} was interrupted while it waited for the others: "
                                              f"{type(error).__name__}"])
            self.move_on()
            raise
        self.move_on()
        if "error" in verdict:
            raise error_of(verdict["error"][0], f"{self.path}: {verdict['error'][1]}")
        self.clear(launch_id)
        return verdict

    def clear(self, launch_id: str) -> None:
        """Deletes what this rank, or rank 0 for all, left in the meeting before."""
        if self.compare:
            self.store.delete_key(self.key(_said(launch_id)))           # rank 0 has counted
        if self.number > 0:
            for name in (*(f"{name}.{self.rank}" for name in OF_RANK), *(OF_ALL if self.rank == 0 else ())):
                self.store.delete_key(f"{self.base}/{self.number - 1}/{name}")

    def wait(self, launch_id: str) -> Verdict:
        warn, warned = self.begun + WARN_S, False
        while True:
            if self.rank == 0 and int(self.read(self.key("waiting")) or 0) >= self.world:
                alike = {"alike": int(self.read(self.key(_said(launch_id))) or 0) == self.world} if self.compare else {}
                return self.decide(launch=launch_id, **alike)
            found = self.read(self.key("verdict"))
            if found is not None:
                return _verdict(found)
            now = time.monotonic()
            if now >= self.begun + self.timeout:
                return self.decide(error=[_lib.ETIMEDOUT, f"{self.late() or 'ranks'} did not come within "
                                          f"{now - self.begun:.0f} s{self.elsewhere()}: {self.call} {ALL}; "
                                          "meet_timeout= says how long they are waited for"])
            if now >= warn:
                warn, warned = now + AGAIN_S, self.warn(now, warned)
            time.sleep(min(self.pause, max(self.begun + self.timeout - now, 0)))
            self.pause = min(self.pause * 1.5, max(0.05, self.world / 16384))

    def fail(self, error: BaseException) -> None:
        """Reports to the others that this rank cannot come, and why."""
        if not isinstance(error, Exception):            # Ctrl-C
            error = _lib.Aborted(_lib.EABORTED, type(error).__name__)
        why = [getattr(error, "errno", None) or _lib.EABORTED, f"rank {self.rank}: {type(error).__name__}: {error}"]
        while self.come() is not None:
            pass
        self.store.set(self.key("failed"), json.dumps(why))
        if int(self.read(self.key("waiting")) or 0) > 0:
            self.decide(error=why, failed=True)
            self.move_on()

    # -- late ranks --

    def elsewhere(self) -> str:
        """Names a rank that gave another path, which is no error where file systems are mounted at different places."""
        for rank in range(min(self.world, LOOKED_AT)):
            found = self.read(self.key(f"rank.{rank}"))
            if found is not None and json.loads(found) != self.path:
                return f" (rank {rank} opens {json.loads(found)})"
        return ""

    def late(self, word: str = "rank") -> str:
        """"ranks 1-3 of 8" of those that have not set this key, or "" where all have."""
        ranks = [rank for rank in range(self.world) if not self.store.check([self.key(f"{word}.{rank}")])]
        return f"rank{'s' * (len(ranks) != 1)} {ranges(ranks)} of {self.world}" if ranks else ""

    def warn(self, now: float, warned: bool) -> bool:
        """Has this rank warned? The lowest that has come does."""
        lower = range(min(self.rank, LOOKED_AT))
        if not warned and any(self.store.check([self.key(f"rank.{rank}")]) for rank in lower):
            return False
        late = self.late()
        if late:
            print(f"vckpt: {self.path}: rank {self.rank} has waited {now - self.begun:.0f} s for {late} to make the "
                  f"same call{self.elsewhere()}: {self.call} {ALL}; in {self.begun + self.timeout - now:.0f} s this "
                  "becomes an error", file=sys.stderr, flush=True)
        return warned or bool(late)


def error_of(code: int, text: str) -> _lib.Error:
    """The error of a rank, as every rank raises it."""
    error = _lib.error(code, text)
    return error if isinstance(error, _lib.Timeout) else _lib.aborted(error)


def _said(text: str) -> str:
    return f"said.{hashlib.sha256(text.encode()).hexdigest()}"


def _verdict(text: str | bytes) -> Verdict:
    found: Verdict = json.loads(text)
    return found


def ranges(ranks: Iterable[int]) -> str:
    """1-3, 7"""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join(text[:NAMED]) + (f" and {len(text) - NAMED} more ranges" if len(text) > NAMED else "")


# ---- a process of several, without a process group ----

LAUNCHERS = [("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("SLURM_NTASKS", "SLURM_PROCID"),
             ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"),
             ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")]


def launched() -> tuple[str, str, str, str] | None:
    """The variables by which a launcher says that this process is one of several, or None. The first that is set
    counts."""
    for world, rank in LAUNCHERS:
        found, mine = os.environ.get(world, ""), os.environ.get(rank, "")
        if found.isdecimal() and (mine.isdecimal() or world == "WORLD_SIZE"):
            return (world, found, rank, mine) if int(found) > 1 else None
    return None


NEW_LAUNCH = "rank=, world= and launch_id= (a text that all ranks share and that is new at every start)"


def check_alone(does: str = "saves", give: str = NEW_LAUNCH) -> None:
    """Where there is no process group: refuses a process that a launcher says is one of several, each of which would
    save steps of its own."""
    found = launched()
    if found:
        world, many, rank, mine = found
        raise _lib.invalid(f"{world}={many}{f' and {rank}={mine}' if mine else ''} in the environment say that this "
                           f"process is one of {many}, but there is no process group of torch: call "
                           f"torch.distributed.init_process_group first, or give {give}; where this process {does} by "
                           "itself, give rank=0, world=1")
