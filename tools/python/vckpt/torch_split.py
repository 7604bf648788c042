# SPDX-License-Identifier: Apache-2.0
"""The way back into a SplitOptimizer (presets.py): which tensors of a step go where in its flat state. What the
optimizer does not have yet is made beside it, and given to it when all has arrived."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .presets import HAS_MASTERS, MASTER, STEP, Part, SplitOptimizer, is_flat, without_masters
from .shard import Shard
from .torch_optimizers import Compared, checked
from .torch_state import TORCH_DTYPES
from .values_text import KeyPath


def fits(groups: list[Any], order: list[list[str]]) -> bool:
    """Was no parameter of one group in another, whose options it would get?"""
    place = {name: number for number, group in enumerate(groups) for name in group["params"]}
    return all(place.get(name, number) == number for number, names in enumerate(order) for name in names)


class Restored(Compared):
    """options: of the saved groups, without the names of their parameters; more: what was saved beside state and
    groups."""

    def __init__(self, split: SplitOptimizer, path: KeyPath, trees: list[Any]) -> None:
        self.split = split
        order = [[part.name for part in split.parts if part.group == number]
                 for number in range(len(split.optimizer.param_groups))]
        trees = checked(trees, order, path)
        if not split.master:
            trees = [without_masters(tree) for tree in trees]
        self.saved: dict[str, dict[str, Any]] = {}
        for tree in reversed(trees):
            self.saved.update(tree["state"])
        found = [tree["param_groups"] for tree in trees]
        super().__init__(trees, next((one for one in found if fits(one, order)), found[0]), order, "")
        self.options = [{key: value for key, value in group.items() if key != "params"} for group in self.groups]
        self.more = {key: value for key, value in trees[0].items() if key not in ("state", "param_groups", HAS_MASTERS)}
        self.made: dict[int, dict[str, Any]] = {}       # {id of a holder: {key: tensor}}
        self.later: list[tuple[Part, str, Callable[[], Any]]] = []
        self.asked: set[tuple[str, str]] = set()

    def kept(self) -> Iterator[tuple[Part, str, Any]]:
        """(part, key, what was saved there)"""
        for part in self.split.parts:
            for key, saved in self.saved.get(part.name, {}).items():
                self.asked.add((part.name, key))
                yield part, key, saved

    def is_flat(self, part: Part, key: str, shape: tuple[int, ...]) -> bool:
        return key != STEP and shape == part.shape

    def shard(self, part: Part, key: str, dtype: int) -> Shard:
        """Where the items of a tensor go that are this rank's. dtype: of the step, for what is new."""
        holder = part.holder
        assert holder is not None
        flat = holder if key == MASTER and self.split.master else self.split.optimizer.state.get(holder, {}).get(key)
        if not is_flat(flat, holder):
            flat = None
        kind = self.split.dtype(holder, TORCH_DTYPES[dtype], flat)
        if flat is None or flat.dtype != kind:
            new = self.made.setdefault(id(holder), {})
            if key not in new:
                new[key] = torch.zeros_like(holder, requires_grad=False, dtype=kind)
            flat = new[key]
        return part.shard(self.split.items(part, flat), self.split.mesh)

    def plain(self, part: Part, key: str, give: Callable[[], Any]) -> None:
        """Notes a value that is the same for all items: a count of steps."""
        self.later.append((part, key, give))

    def lacking(self) -> list[tuple[str, str]]:
        """[(parameter, key)] of state that is there now and was not saved, of parameters that were."""
        found, missing = [], set(self.missing)
        for part in self.split.parts:
            if part.holder is None or part.name in missing:
                continue
            live = [key for key, value in self.split.optimizer.state.get(part.holder, {}).items()
                    if is_flat(value, part.holder)] + [MASTER] * self.split.master
            found += [(part.name, key) for key in live if (part.name, key) not in self.asked]
        return found

    def take(self, groups: list[Any], more: dict[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {key: dict(made) for key, made in self.made.items()}
        steps = {}
        for part, key, give in self.later:
            value = give()
            if key == STEP:
                steps[part.group] = value
            if part.holder is not None:
                state.setdefault(id(part.holder), {})[key] = value
        self.split.take(state, groups, steps, more)
