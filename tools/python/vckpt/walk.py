# SPDX-License-Identifier: Apache-2.0
"""The walk through one component of a state (state.py says to what end): dicts, lists and tuples, state dicts in the
place of objects, a PerRank for what a rank keeps by itself, and a Subtree for what has nothing but tensors in it."""
from __future__ import annotations

import collections
import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from . import values
from .records import Record
from .rng import RngState
from .shard import Refused
from .tensors import dotted, is_tensor, torch_module
from .values_text import Block, KeyPath, Node

if TYPE_CHECKING:
    from .state import Memo, Memory

Skeleton: TypeAlias = "tuple[Any, list[Any], list[Skeleton | None] | None]"      # type, keys, children

DICTS = (dict, collections.OrderedDict)


class PerRank:
    __slots__ = ("value", "path")

    def __init__(self, value: Any, path: KeyPath) -> None:
        self.value, self.path = value, path


class Subtree:
    """Containers with nothing but tensors in them. `skeleton`: their kinds and keys; `node`: their text."""

    __slots__ = ("value", "skeleton", "names", "paths", "node")

    def __init__(self, value: Any, skeleton: Skeleton, paths: list[KeyPath]) -> None:
        self.value, self.skeleton, self.paths = value, skeleton, paths
        self.node: Node | None = None
        self.names = [dotted(path) for path in paths]


def skeleton_of(value: Any, path: KeyPath, paths: list[KeyPath], tensors: list[Any]) -> Skeleton | None:
    """(kind, keys, children or None where all are tensors); None where anything else is in it. `paths` and `tensors`
    grow."""
    kind: Any = type(value)
    if kind in DICTS:
        keys, items = list(value), list(value.values())
        if not all(type(key) is str for key in keys):
            return None
    elif kind in (list, tuple):
        keys, items = list(range(len(value))), value
    else:
        return None
    children, leaves = [], True
    for key, item in zip(keys, items):
        child = None
        if is_tensor(item):
            paths.append((*path, key))
            tensors.append(item)
        else:
            leaves, child = False, skeleton_of(item, (*path, key), paths, tensors)
            if child is None:
                return None
        children.append(child)
    return kind, keys, None if leaves else children


def matches(value: Any, skeleton: Skeleton, tensors: list[Any]) -> bool:
    """Is it built so? Leaves go into `tensors` unchecked: their entries check them."""
    kind, keys, children = skeleton
    if type(value) is not kind:
        return False
    if kind in DICTS:
        if list(value) != keys:
            return False
        items = value.values()
    else:
        if len(value) != len(keys):
            return False
        items = value
    if children is None:
        tensors.extend(items)
        return True
    for item, child in zip(items, children):
        if child is None:
            tensors.append(item)
        elif not matches(item, child, tensors):
            return False
    return True


class Walk:
    """One component of one save."""

    def __init__(self, component: str, memo: Memo, memory: Memory, state: Mapping[str, Any],
                 patterns: tuple[str, ...]) -> None:
        self.memo, self.memory, self.state, self.patterns = memo, memory, state, patterns
        self.component, self.root, self.fresh = component, (component,), False
        self.names: list[str] = []
        self.paths: list[KeyPath] = []
        self.tensors: list[Any] = []
        self.buffers: set[str] = set()
        self.subtrees: dict[KeyPath, Subtree] = {}
        self.mixed: set[KeyPath] = set()
        self.per_rank = False
        self.failed: Exception | None = None
        self.own = False            # its tree is another at each rank by design
        self.handed: set[KeyPath] = set()       # what a load hands to code: objects, optimizers, modules
        self.classes: dict[str, KeyPath] = {}   # of what is handed so, and comes back only by types=: {name: where}

    def walk(self, value: Any, path: KeyPath) -> Any:
        """The value with state dicts for objects, PerRank and Subtree in place."""
        if type(value) is RngState or self.chosen(path):
            self.per_rank = True
            return PerRank(self.opened(value, path), path)
        value = self.taken(value, path)
        kind = type(value)
        if kind not in DICTS and kind not in (list, tuple):
            return value
        found = self.pure(value, path)
        if found is not None:
            return found
        if kind in (list, tuple):
            return kind(self.walk(item, (*path, number)) for number, item in enumerate(value))
        return kind((key, self.walk(item, (*path, key))) for key, item in value.items())

    def opened(self, value: Any, path: KeyPath) -> Any:
        """A value of this rank alone, with state dicts for objects all through it."""
        value = self.taken(value.states if type(value) is RngState else value, path)
        if type(value) in DICTS:
            return type(value)((key, self.opened(item, (*path, key))) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.opened(item, (*path, number)) for number, item in enumerate(value))
        return value

    def pure(self, value: Any, path: KeyPath) -> Subtree | None:
        known = self.memo.subtrees.get(path)
        tensors: list[Any] = []
        if known is None or not matches(value, known.skeleton, tensors):
            if path in self.memo.mixed and known is None:       # it was not the last time: parts of it may be
                self.mixed.add(path)
                return None
            paths: list[KeyPath] = []
            tensors = []
            skeleton = skeleton_of(value, path, paths, tensors)
            if skeleton is None or not paths or (self.patterns and any(
                    self.chosen(one[:n]) for one in paths for n in range(len(path) + 1, len(one) + 1))):
                self.mixed.add(path)
                return None
            known, self.fresh = Subtree(value, skeleton, paths), True
        self.subtrees[path] = known
        self.names += known.names
        self.paths += known.paths
        self.tensors += tensors
        return known

    def saw(self, path: KeyPath, name: str) -> None:
        if any(path[:n] in self.handed for n in range(1, len(path))):
            self.classes.setdefault(name, path)

    def is_own(self) -> None:
        self.own = True

    def chosen(self, path: KeyPath) -> bool:
        if not self.patterns:
            return False
        text = ".".join(str(key) for key in path)
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in self.patterns)

    def taken(self, value: Any, path: KeyPath) -> Any:
        """As plain; what that raises is kept for the end of the walk: what comes later may be a state dict that all
        ranks gather together (FSDP1's is), and they would wait for this one."""
        try:
            return self.plain(value, path)
        except RecursionError:
            raise
        except Exception as error:
            self.failed = self.failed or noted(error, path)
            return None

    def plain(self, value: Any, path: KeyPath) -> Any:
        """The state dict of a module, an optimizer, or whatever has one."""
        if type(value) in (dict, list, tuple, str, int, float) or is_tensor(value) or isinstance(value, Mapping):
            return value
        torch = torch_module()
        self.handed.add(path)
        if torch is not None and isinstance(value, torch.nn.Module):
            from .torch_modules import module_view
            view, tensors = module_view(value, self.memory.views)
            self.buffers |= {dotted((*path, name)) for name in view.buffers}
            return tensors
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            from .torch_optimizers import optimizer_state
            return optimizer_state(value, self.state, self.memory.views, path, self.is_own)
        if torch is not None and isinstance(value, torch.Generator):
            return Record("torch.Generator",
                          {"device": str(value.device), "state": value.get_state().cpu().numpy().tobytes()})
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            return self.plain(value.state_dict(), path)
        self.handed.discard(path)
        return value


def noted(error: Exception, path: KeyPath, did: str = "took") -> Exception:
    """Adds the path to an error of the caller's own state_dict() or load_state_dict(), which does not have it."""
    if not isinstance(error, Refused) and hasattr(error, "add_note"):
        error.add_note(f"while vckpt {did} {values.path_text(path)}")
    return error


def _subtree_node(encoder: values._Encoder, subtree: Subtree, path: KeyPath) -> Node:
    """The text of a Subtree: made once, then taken from it."""
    if subtree.node is None:
        node = subtree.node = values.PLAIN[type(subtree.value)](encoder, subtree.value, path)
        subtree.value = None
        if isinstance(node, Block):
            node.kept = {}
        return node
    encoder.count(64 * len(subtree.names), path)
    return subtree.node


values.PLAIN[Subtree] = _subtree_node
