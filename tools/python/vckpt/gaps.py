# SPDX-License-Identifier: Apache-2.0
"""What a step has and the state of this rank lacks: a gap, or what another rank of the process group has. A step that
one process saved goes into the stages of a pipeline, each of which has some of its layers.

Each rank says through the group's store, once a load, which names it has, as bits in the step's order, and goes on.
Only ranks that lack some read what the others said: the first of them gathers it for all. The keys are beside those of
the meeting at which the ranks agreed on the step (opening.py, meeting.py), so that each load has its own.

    has.R      what rank R has, or why its load failed
    gathers    how many ranks lack something; the first gathers
    all        what all ranks have together, or the first failure"""
from __future__ import annotations

import errno
import json
import time
from typing import Any

from . import _lib, meeting
from .meeting import Meeting

Names = dict[str, list[str]]                # of what a component, or an optimizer, has in the step
Held = dict[str, set[str]]                  # which of them this rank has

ASKED = "what other ranks of the process group have is asked for where a state lacks some of the step"


class Gaps:
    """One load of one rank."""

    def __init__(self, held: Meeting, path: str, timeout: float) -> None:
        self.held, self.path, self.timeout, self.rank, self.world = held, path, timeout, held.rank, held.world
        self.store, self.key, self.said = held.store, held.key, False

    def say(self, names: Names, held: Held) -> None:
        bits = {label: "".join("1" if name in held[label] else "0" for name in all_) for label, all_ in names.items()}
        self.set({label: format(int(text or "0", 2), "x") for label, text in bits.items()})

    def fail(self, error: BaseException) -> None:
        """Reports that this rank's load failed before it said what it has."""
        if not self.said:
            self.set(self.failure(error))

    def failure(self, error: BaseException) -> dict[str, str]:
        return {"failed": f"rank {self.rank}: {type(error).__name__}: {error}"}

    def set(self, what: dict[str, str]) -> None:
        self.said = True
        self.store.set(self.key(f"has.{self.rank}"), json.dumps(what))

    def held_by_any(self, names: Names) -> Held:
        """Which of the names some rank has."""
        if self.store.add(self.key("gathers"), 1) == 1:
            try:
                together = self.gathered()
            except BaseException as error:
                self.store.set(self.key("all"), json.dumps(self.failure(error)))
                raise
            self.store.set(self.key("all"), json.dumps(together))
        self.wait(["all"])
        found = json.loads(self.store.get(self.key("all")))
        if "failed" in found:
            raise meeting.error_of(found.get("errno", _lib.EABORTED), f"{self.path}: {found['failed']}")
        bits = {label: format(int(found.get(label, "0"), 16), "b").zfill(len(all_)) for label, all_ in names.items()}
        return {label: {name for name, bit in zip(all_, bits[label]) if bit == "1"} for label, all_ in names.items()}

    def gathered(self) -> dict[str, Any]:
        keys = [f"has.{rank}" for rank in range(self.world)]
        try:
            self.wait(keys)
        except _lib.Timeout as error:
            return {"failed": error.text.partition(": ")[2], "errno": errno.ETIMEDOUT}
        together: dict[str, int] = {}
        for key in keys:
            said: dict[str, str] = json.loads(self.store.get(self.key(key)))
            if "failed" in said:
                return said
            for label, bits in said.items():
                together[label] = together.get(label, 0) | int(bits, 16)
        return {label: format(bits, "x") for label, bits in together.items()}

    def wait(self, keys: list[str]) -> None:
        until, pause = time.monotonic() + self.timeout, 0.002
        while not self.store.check([self.key(key) for key in keys]):
            if time.monotonic() >= until:
                raise _lib.Timeout(errno.ETIMEDOUT, f"{self.path}: {self.held.late('has')} did not make the same load "
                                                    f"within {self.timeout:.0f} s: {ASKED} (give rank= and world= to "
                                                    "load by one rank alone)")
            time.sleep(pause)
            pause = min(pause * 1.5, max(0.05, self.world / 16384))
