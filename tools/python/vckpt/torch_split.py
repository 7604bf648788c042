# SPDX-License-Identifier: Apache-2.0
"""The way back into a SplitOptimizer (presets.py): which tensors of a step go where in its flat state. What the
optimizer does not have yet is made beside it, and given to it when all has arrived."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .presets import HAS_MASTERS, MASTER, STEP, Part, SplitOptimizer, is_flat, without_masters
from .torch_optimizers import checked
from .torch_state import TORCH_DTYPES

if TYPE_CHECKING:
    from .shard import Shard
    from .values_text import KeyPath


class Restored:
    """names: of the saved parameters; missing, unexpected: of them; wrong: a sentence, or None; groups: those that were
    saved, without the names of their parameters; more: what was saved beside state and groups."""

    def __init__(self, split: SplitOptimizer, trees: list[Any], path: KeyPath) -> None:
        self.split = split
        self.by_group = [[part.name for part in split.parts if part.group == number]
                         for number in range(len(split.optimizer.param_groups))]
        trees = checked(trees, self.by_group, path)
        if not split.master:
            trees = [without_masters(tree) for tree in trees]
        self.saved: dict[str, dict[str, Any]] = {}
        for tree in reversed(trees):
            self.saved.update(tree["state"])
        found = [tree["param_groups"] for tree in trees]
        saved = next((one for one in found if self.fits(one)), found[0])
        known = {name for one in found for group in one for name in group["params"]}
        mine = {part.name for part in split.parts}
        self.names = sorted(map(str, known))            # the same at all ranks, whatever groups they have
        self.missing = [part.name for part in split.parts if part.name not in known]
        self.unexpected = [name for group in saved for name in group["params"] if name not in mine]
        self.wrong = None if self.fits(saved) else "its groups have other parameters in the step than in the state"
        if any(type(name) is int for name in known):
            self.missing, self.unexpected = [], []
            self.wrong = "its parameters have numbers in the step, not names, for its state_dict() was saved"
        elif len(saved) != len(self.by_group):
            self.wrong = f"it has {len(saved)} groups of parameters in the step and {len(self.by_group)} in the state"
        self.groups = [{key: value for key, value in group.items() if key != "params"} for group in saved]
        self.more = {key: value for key, value in trees[0].items() if key not in ("state", "param_groups", HAS_MASTERS)}
        self.made: dict[int, dict[str, Any]] = {}       # {id of a holder: {key: tensor}}
        self.later: list[tuple[Part, str, Callable[[], Any]]] = []
        self.asked: set[tuple[str, str]] = set()

    def fits(self, groups: list[Any]) -> bool:
        """No parameter of one group was in another: it would get that one's options."""
        place = {name: number for number, group in enumerate(groups) for name in group["params"]}
        return all(place.get(name, number) == number for number, names in enumerate(self.by_group) for name in names)

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
        """What is the same for all items: a count of steps."""
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
