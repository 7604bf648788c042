# SPDX-License-Identifier: Apache-2.0
"""Memory of a state into which several tensors of a step go: tied weights, an object whose `best` is its `current`
until the first comparison. Their bytes in the step decide. Equal tensors are filled once. Of different ones, those of
objects get memory of their own, which load_state_dict() is given, also where they share a parameter's memory. Two
different ones remain only where the state itself makes them one (a model that ties what the step has apart)."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .lazy import Stored
from .loading_tensors import Destination, Fill
from .step import Step
from .tensors import shown
from .values_text import KeyPath

COMPARED_BYTES = 16 << 20       # of each of two tensors at once


class Claim(NamedTuple):
    to: Destination
    path: KeyPath
    name: str                       # in the step
    stored: Stored
    fills: bool = True              # False: it is handed to the module, which copies it there
    move: Callable[[], Any] | None = None       # an object's: makes memory of its own for it

    def fill(self) -> Fill:
        return Fill(self.to, self.name, self.stored)


def settle(step: Step, claims: Iterable[Claim]) -> tuple[list[Fill], list[Callable[[], Any]], list[tuple[str, str]]]:
    """(What is filled, what gets memory of its own, [names of two that differ and remain])."""
    claims = list(claims)
    places = [one.to.place() if one.to.items else number for number, one in enumerate(claims)]
    if len(set(places)) == len(places):                         # most often
        return [one.fill() for one in claims if one.fills], [], []
    fills: list[Fill] = []
    moves: list[Callable[[], Any]] = []
    differ: list[tuple[str, str]] = []
    together: dict[object, list[Claim]] = {}            # claims of the same memory
    for one, place in zip(claims, places):
        together.setdefault(place, []).append(one)
    for same in together.values():
        if len(same) == 1:
            fills += [same[0].fill()] if same[0].fills else []
            continue
        kinds = _by_value(step, same)
        if len(kinds) > 1 or not all(one.move for one in same):
            moves += [one.move for one in same if one.move]
            kinds = [rest for kind in kinds if (rest := [one for one in kind if not one.move])]
        if len(kinds) > 1:
            differ.append((shown(kinds[0][0].path), shown(kinds[-1][0].path)))
        fills += [one.fill() for one in kinds[-1] if one.fills][:1] if kinds else []
    return fills, moves, differ


def _by_value(step: Step, claims: list[Claim]) -> list[list[Claim]]:
    """Claims with equal bytes together, in the order of the state by the last of each."""
    kinds: list[list[Claim]] = []
    for one in claims:
        kind = next((kind for kind in kinds if _equal(step, kind[0], one)), [])
        kinds = [other for other in kinds if other is not kind] + [[*kind, one]]
    return kinds


def _equal(step: Step, a: Claim, b: Claim) -> bool:
    """Would both put the same bytes there? Equal tensors have different digests where ranks cut them differently, or
    where their shapes differ: then their items are compared."""
    if a.to.cut() != b.to.cut():
        return False
    if a.stored is b.stored:
        return True
    one, other = step[a.path[0], a.name], step[b.path[0], b.name]
    if one.digest() == other.digest():
        return True
    if one.dtype != other.dtype or one.nbytes != other.nbytes:
        return False
    if one.shape != other.shape or not one.shape:
        return _bytes(one[...]) == _bytes(other[...])
    rows = max(1, COMPARED_BYTES * one.shape[0] // max(one.nbytes, 1))
    return all(_bytes(one[at:at + rows]) == _bytes(other[at:at + rows]) for at in range(0, one.shape[0], rows))


def _bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()
