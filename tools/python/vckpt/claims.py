# SPDX-License-Identifier: Apache-2.0
"""Memory of a state into which several tensors of a step go: tied weights, an object whose `best` is its `current`
until the first comparison. Their bytes in the step decide. Equal tensors are filled once. Of different ones, those of
objects get memory of their own, which load_state_dict() is given, also where they share a parameter's memory. Two
different ones remain only where the state itself makes them one (a model that ties what the step has apart). The same
holds of contiguous tensors that overlap in part (a flat one and its views): the bytes that they share are compared."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .lazy import LazyTensor, Stored
from .loading_tensors import Destination, Fill, apart, touching
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


def settle(step: Step, claims: Iterable[Claim]) -> tuple[list[Fill], list[Callable[[], Any]],
                                                         dict[tuple[str, str], str]]:
    """(What is filled, what gets memory of its own, {names of two that differ and remain: what they are})."""
    claims = list(claims)
    places = [one.to.place() if one.to.items else number for number, one in enumerate(claims)]
    partly = list(_partly(claims, places))
    if len(set(places)) == len(places) and not partly:          # most often
        return [one.fill() for one in claims if one.fills], [], {}
    fills: list[Fill] = []
    moves: list[Callable[[], Any]] = []
    differ: dict[tuple[str, str], str] = {}
    own = set()                                                 # places whose claims all get memory of their own
    groups = _together(claims, places)
    for first, second in partly:
        if places[first] in own or places[second] in own or _agree(step, claims[first], claims[second]):
            continue
        movable = [place for place in (places[first], places[second]) if all(one.move for one in groups[place])]
        own.update(movable[:1])
        if not movable:
            differ[shown(claims[first].path), shown(claims[second].path)] = "share memory"
    for place, same in groups.items():
        if place in own:
            moves += [one.move for one in same if one.move]
            continue
        if len(same) == 1:
            fills += [same[0].fill()] if same[0].fills else []
            continue
        kinds = _by_value(step, same)
        if len(kinds) > 1 or not all(one.move for one in same):
            moves += [one.move for one in same if one.move]
            kinds = [rest for kind in kinds if (rest := [one for one in kind if not one.move])]
        if len(kinds) > 1:
            differ[shown(kinds[0][0].path), shown(kinds[-1][0].path)] = "are one tensor"
        fills += [one.fill() for one in kinds[-1] if one.fills][:1] if kinds else []
    return fills, moves, differ


def _partly(claims: list[Claim], places: list[object]) -> Iterator[tuple[int, int]]:
    """Contiguous ones that share memory, not as the same items; each pair in the order of claims."""
    held = [number for number, one in enumerate(claims) if one.to.items and one.to.contiguous]
    extents = [claims[number].to.extent() for number in held]
    for near in () if apart(extents) else touching(extents):
        for at, one in enumerate(near):
            for other in near[at + 1:]:
                if extents[other][0] >= extents[one][1]:
                    break
                if places[held[other]] != places[held[one]]:
                    yield min(held[one], held[other]), max(held[one], held[other])


def _agree(step: Step, a: Claim, b: Claim) -> bool:
    """Have both the same bytes in the step where they overlap? Tensors of which the state has a part, or in another
    dtype than the step, are not compared."""
    if any(one.to.cut() is not None or one.to.dtype != one.stored[1] for one in (a, b)):
        return True
    one, other = step[a.path[0], a.name], step[b.path[0], b.name]
    (begin, end), (its_begin, its_end) = a.to.extent(), b.to.extent()
    both = range(max(begin, its_begin), min(end, its_end), COMPARED_BYTES)
    return all(_some(one, at - begin, min(COMPARED_BYTES, both.stop - at)) ==
               _some(other, at - its_begin, min(COMPARED_BYTES, both.stop - at)) for at in both)


def _some(tensor: LazyTensor, begin: int, count: int) -> bytes:
    """Some bytes of a tensor as they follow one another."""
    if not tensor.shape:
        return _bytes(tensor[...])[begin:begin + count]
    row = tensor.nbytes // tensor.shape[0]
    first = begin // row
    return _bytes(tensor[first:-(-(begin + count) // row)])[begin - first * row:][:count]


def _together(claims: Iterable[Claim], places: Iterable[object]) -> dict[object, list[Claim]]:
    """Claims of the same memory."""
    found: dict[object, list[Claim]] = {}
    for one, place in zip(claims, places):
        found.setdefault(place, []).append(one)
    return found


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
