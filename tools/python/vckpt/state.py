# SPDX-License-Identifier: Apache-2.0
"""From a state (any nesting of dicts, lists, tensors and plain values under component names) to what the library takes:
tensors by dotted name, and for each component one document of values (`<component>.json`, docs/format/values.md) in
which each tensor is a reference, so that the whole state can be built again.

A walk goes through dicts, lists and tuples. Modules, optimizers and objects with state_dict() give their state dict;
what is kept for each rank by itself (`rng_state`, `per_rank`) becomes a PerRank; and a subtree of nothing but tensors,
which is most of any state, becomes a Subtree. A memo of the last save has all Subtrees with their names and their text,
and the entry of every tensor: a save of the same structure compares keys and what the tensors look like now, and makes
nothing anew. What does not compare equal is made as if there were no memo.

A rank's document is that of its *home*: the lowest rank which is in the save's mesh and in the meshes of all tensors of
the component that this rank holds a part of. A rank that is its own home gives its document; of several the lowest
counts. All but rank 0 give it under their rank too, where it is not lost (pipeline stages whose trees differ), and a
rank whose home is not 0 gives a Record("vckpt.SameAs") that names its home. A rank with values of its own gives its
whole tree under its rank; the common one has a Record("vckpt.PerRank") in their place. What a rank does not give has to
equal what its home gives: commons.py."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _lib, advice, commons, components, meshes, values
from .entries import file_name, make_entry, rank_tensor
from .meshes import SaveMesh
from .records import Record
from .shard import STALE, Entry, Refused, Shard
from .tensors import current_device, dotted, is_tensor
from .values_text import KeyPath
from .walk import DICTS, PerRank, Skeleton, Subtree, Walk

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .torch_modules import Views

PER_RANK = Record("vckpt.PerRank", {})
SAME_AS = "vckpt.SameAs"


def parameter_names(optimizer: Any, state: Mapping[str, Any]) -> list[str]:
    """The names under which a save of `state` keeps the state of an optimizer's parameters, in the order of its groups.
    Changes nothing. state: {"model": model}, with all modules (and loose parameters) that the optimizer trains."""
    from . import torch_optimizers
    return torch_optimizers.ordered_names(optimizer, state)


# ---- the whole ----

class Memo:
    """What the last save of a component found."""

    def __init__(self) -> None:
        self.subtrees: dict[KeyPath, Subtree] = {}
        self.names: list[str] = []
        self.entries: list[Entry] = []
        self.rows: NDArray[np.uint64] | None = None
        self.text: bytes | None = None
        self.buffers: frozenset[str] = frozenset()
        self.statistics: frozenset[str] = frozenset()
        self.mixed: Collection[KeyPath] = frozenset()
        self.own, self.everyone = False, False
        self.home: int | None = None                        # None: this rank holds nothing of it
        self.tensor_commons: list[commons.Row] = []
        self.value_commons: list[commons.Row] = []
        self.document: bytes | None = None                  # the text that value_commons were made from


class Memory:
    """Memos by component, what they all depend on, and what is known of modules and optimizers (torch_modules.py,
    torch_optimizers.py)."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.memos: dict[str, Memo] = {}
        self.views: Views = weakref.WeakKeyDictionary()


class Collected:
    """What one rank gives to a save: `rows` (an array of struct vckpt_tensor as words), `blobs` ((name, per rank,
    bytes)), `commons` ((group, name, bytes), what other ranks have to have, too), `refs` (what must live until it is
    staged), `device` (of CUDA tensors, or None)."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.uint64]] = []
        self.blobs: list[tuple[str, bool, bytes]] = []
        self.commons: list[commons.Row] = []
        self.refs: list[object] = []
        self.device: torch.device | None = None
        # components of which this rank, which is not their home, has nothing: (walk, tree, text, memo, after)
        self.empty: list[tuple[Walk, Any, bytes, Memo, Memo]] = []


def collect(state: Mapping[str, Any], *, mesh: Any = None, rank: int = 0, world: int | None = None,
            per_rank: str | Iterable[str] = (), memory: Memory | None = None) -> Collected:
    """state: {component: anything}, or one state dict."""
    if not isinstance(state, Mapping):
        raise _lib.invalid(f"a state is a dict of components, found {type(state).__name__}: {{\"model\": model, "
                           "\"optimizer\": optimizer}")
    patterns = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
    state = components.named(state, patterns, is_tensor)
    placed = meshes.given(mesh)
    if placed and world is not None and placed[1].size and placed[1].max() >= world:
        raise _lib.invalid(f"mesh= has rank {placed[1].max()}, and this job has world size {world}: give a mesh of "
                           f"ranks from 0 to {world - 1}")
    whole = (*placed, meshes.named(*placed)) if placed else None
    world = rank + 1 if world is None else world
    memory = memory if memory is not None else Memory()
    key = whole[2] if whole else None, rank, world, patterns, current_device()
    if memory.key != key:
        memory.key, memory.memos = key, {}
    memory.memos = {name: memory.memos[name] for name in state if name in memory.memos}
    result, lowest = Collected(), whole[2].lowest if whole else 0
    failed = None
    for component, value in state.items():
        try:
            remembered(component, value, memory, state, patterns, (whole, rank, world, result))
        except Exception as error:                  # the others first: Walk.taken
            memory.memos.pop(component, None)
            failed = failed or error
    if failed:
        raise failed
    if world > 1:
        of_nothing(result, any(memo.home not in (None, lowest) for memo in memory.memos.values()), lowest)
        if rank in members_of(whole, world) and (rank == lowest or not any(map(len, result.rows))):
            group = commons.group_name(commons.COMPONENTS, lowest)
            if not any(row[0] == group for row in result.commons):
                result.commons.append(commons.none_of(group))
    return result


def remembered(component: str, value: Any, memory: Memory, state: Mapping[str, Any], patterns: tuple[str, ...],
               place: tuple[SaveMesh | None, int, int, Collected]) -> None:
    """Puts a component into the result and into the memory."""
    components.check(component, value, is_tensor)
    memo = memory.memos.get(component) or Memo()
    try:
        memory.memos[component] = one(Walk(component, memo, memory, state, patterns), value, *place)
    except Stale:
        memory.memos[component] = one(Walk(component, Memo(), memory, state, patterns), value, *place)
    except RecursionError:
        at = advice.cycle(value, (component,))
        raise Refused(at or (component,),
                      "a part of itself: a cycle cannot be kept" if at else "nested too deeply") from None


def of_nothing(result: Collected, staged: bool, home: int) -> None:
    """Components of which this rank has nothing. staged: some home is not the lowest rank, so this rank is in a stage
    that has no part of them, and keeps the nothing under its rank; else the home has nothing either."""
    for walk, tree, text, memo, after in result.empty:
        if staged:
            result.blobs.append((f"{walk.component}.json", True, text))
        else:
            add_commons(walk, tree, text, memo, after, home, result)


class Stale(Exception):
    """Something that is no tensor is where the memo has one."""


def one(walk: Walk, value: Any, whole: SaveMesh | None, rank: int, world: int, result: Collected) -> Memo:
    """Puts a component's tensors, documents and commons into `result`. Gives the memo for the next save."""
    component, memo = walk.component, walk.memo
    tree = walk.walk(value, walk.root)
    if walk.failed:
        raise walk.failed
    reused = type(tree) is Subtree and not walk.fresh and memo.text is not None
    text = memo.text if reused else None
    if not reused and type(tree) is not PerRank:
        text = common_document(tree, walk)
    after = Memo()
    after.statistics = memo.statistics if memo.names == walk.names else statistics(walk)
    walk.buffers |= after.statistics
    after.subtrees, after.names, after.mixed = walk.subtrees, walk.names, walk.mixed
    after.buffers = frozenset(walk.buffers)
    after.text = text if type(tree) is Subtree else None
    fill_rows(walk, after, whole, rank, world, result)
    lowest = whole[2].lowest if whole else 0
    home = lowest if after.home is None else after.home
    if text is not None:
        if world > 1:
            result.commons += after.tensor_commons
            nothing = tree is None or (type(tree) in (*DICTS, list, tuple) and not tree)
            if rank == home or not nothing:
                add_commons(walk, tree, text, memo, after, home, result)
            elif after.home is not None:
                result.empty.append((walk, tree, text, memo, after))
        if rank == home:
            result.blobs.append((f"{component}.json", False, text))
    if walk.per_rank:
        result.blobs.append((f"{component}.json", True, rank_document(tree, walk, result)))
    elif rank == home and rank != 0 and text is not None:
        result.blobs.append((f"{component}.json", True, text))
    elif home != 0 and after.home is not None:
        result.blobs.append((f"{component}.json", True, values.encode(Record(SAME_AS, {"rank": home}))))
    if rank == home:
        advice.name_classes(walk.classes)
    return after


def statistics(walk: Walk) -> frozenset[str]:
    """Names that BatchNorm's statistics have in a module's state dict. They differ between replicas that did not share
    them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(walk.names, walk.tensors) if ".running_" in "." + name
              and is_tensor(tensor) and hasattr(tensor, "shape")}
    stems = [name.removesuffix("running_mean") for name, shape in shapes.items() if name.endswith("running_mean")
             and len(shape) == 1 and shapes.get(name.removesuffix("running_mean") + "running_var") == shape]
    return frozenset(stem + last for stem in stems for last in ("running_mean", "running_var", "num_batches_tracked"))


def add_commons(walk: Walk, tree: Any, text: bytes, memo: Memo, after: Memo, home: int, result: Collected) -> None:
    """What has to be equal at this rank and its home of a component."""
    if memo.document is not None and memo.home == after.home and (memo.document is text or memo.document == text):
        after.value_commons = memo.value_commons
    else:
        found: dict[KeyPath, bytes] = {}
        leaves(tree, walk.root, (lambda path, _: dotted(path), is_tensor), found)
        group = commons.group_name(walk.component, home)
        after.value_commons = commons.rows(group, commons.bounded(found)) or [commons.none_of(group)]
    after.document = text
    result.commons += after.value_commons
    if after.everyone:
        result.commons.append((commons.group_name(commons.COMPONENTS, home), values.path_text(walk.root), b""))


def leaves(tree: Any, path: KeyPath, named: commons.Named, found: dict[KeyPath, bytes]) -> None:
    """The plain values of a walked tree, by path; tensors are left out, and what is PerRank."""
    kind = type(tree)
    if kind is PerRank:
        found[path] = b"per rank"
    elif kind in DICTS and tree:
        for key, item in tree.items():
            leaves(item, (*path, key), named, found)
    elif kind in (list, tuple) and any(type(item) not in values.SCALARS for item in tree):
        for number, item in enumerate(tree):
            leaves(item, (*path, number), named, found)
    elif kind is Subtree:
        empty_parts(tree.skeleton, path, found)
    elif not is_tensor(tree):
        found[path] = commons.value_bytes(tree, path, named)


def empty_parts(skeleton: Skeleton, path: KeyPath, found: dict[KeyPath, bytes]) -> None:
    """A Subtree has tensors, and may have empty containers beside them."""
    kind, keys, children = skeleton
    if not keys:
        found[path] = values.encode(kind(), path=path)
    for key, child in zip(keys, children or ()):
        if child is not None:
            empty_parts(child, (*path, key), found)


def common_document(tree: Any, walk: Walk) -> bytes:
    """The text of the tree. Tensors outside of Subtrees are found here, wherever in it they are."""
    known = {path for subtree in walk.subtrees.values() if subtree.node is None for path in subtree.paths}

    def reference(path: KeyPath, value: Any) -> str:
        if path not in known:
            walk.names.append(dotted(path))
            walk.paths.append(path)
            walk.tensors.append(value)
        return dotted(path)
    return values.encode(opened(tree, lambda _: PER_RANK), tensor=reference, is_tensor=is_tensor, path=walk.root,
                         seen=walk.saw)


def opened(tree: Any, replace: Callable[[PerRank], Any]) -> Any:
    """The tree with replace(part) for each PerRank."""
    kind = type(tree)
    if kind is PerRank:
        return replace(tree)
    if kind in DICTS:
        return kind((key, opened(item, replace)) for key, item in tree.items())
    return kind(opened(item, replace) for item in tree) if kind in (list, tuple) else tree


def rank_document(tree: Any, walk: Walk, result: Collected) -> bytes:
    """The whole tree of this rank; its own tensors become blobs."""
    own: list[KeyPath] = []
    blobs: set[str] = set()

    def open_(part: PerRank) -> Any:
        own.append(part.path)
        return part.value

    def reference(path: KeyPath, value: Any) -> str | tuple[str, dict[str, Any]]:
        if not any(path[:len(begin)] == begin for begin in own):
            return dotted(path)
        word, data = rank_tensor(value, path)
        blob = f"{file_name(walk.component)}/{file_name(dotted(path))}.npy"
        if blob in blobs:
            raise Refused(path, f"two tensors of this rank are called {dotted(path)!r}: rename a key")
        blobs.add(blob)
        result.blobs.append((blob, True, data))
        return dotted(path), {"blob": blob, "dtype": word}
    return values.encode(opened(tree, open_), tensor=reference, is_tensor=is_tensor, path=walk.root, seen=walk.saw)


def fill_rows(walk: Walk, after: Memo, whole: SaveMesh | None, rank: int, world: int, result: Collected) -> None:
    """Makes entries for the tensors, or takes old ones that still hold."""
    memo = walk.memo
    same = memo.names == walk.names and memo.buffers == after.buffers and memo.own == walk.own
    after.own = walk.own
    old: Sequence[Entry | None] = memo.entries
    if not same:
        check_names(walk)
        known = dict(zip(memo.names, memo.entries)) if memo.buffers == after.buffers else {}
        old = [known.get(name) for name in walk.names]
    entries: list[Entry] = []
    pointers: list[int] = []
    refs, changed = result.refs, not same
    for number, tensor in enumerate(walk.tensors):
        entry = old[number]
        address = entry.address(tensor, refs) if entry is not None else STALE
        if entry is None or address is STALE:
            if not is_tensor(tensor):
                raise Stale
            name, path = walk.names[number], walk.paths[number]
            flags = _lib.BUFFER if name in walk.buffers else 0
            entry = make_entry(walk.component, name, path, tensor, whole, rank, flags)
            changed, address = True, entry.address(tensor, refs)
        entries.append(entry)
        if not entry.absent:
            assert address is not None          # the entry was made for this very tensor
            pointers.append(address)
    after.entries = entries
    if changed or memo.rows is None:
        joined = b"".join(e.row for e in entries if not e.absent)
        made = after.rows = np.frombuffer(joined, np.uint64).reshape(-1, _lib.TENSOR_BYTES // 8)
        wide = of_all(entries, whole, world)
        after.home, after.everyone = home_of(walk, entries, whole, rank, world), False
        shared = [name for name, tensor, entry in zip(walk.names, walk.tensors, entries) if not loose(tensor)
                  and entry.mesh in wide]
        after.everyone = len(shared) == len(entries) and not walk.own
        if after.home is not None and world > 1:
            group = commons.group_name(f"tensors of {walk.component}", after.home)
            after.tensor_commons = commons.tensor_rows(group, shared) or [commons.none_of(group)]
    else:
        made = after.rows = memo.rows
        after.home, after.everyone, after.tensor_commons = memo.home, memo.everyone, memo.tensor_commons
    rows = made.copy()
    rows[:, _lib.DATA_WORD] = pointers
    result.rows.append(rows)
    result.refs.append((walk.tensors, entries))
    device = next((e.device for e in entries if e.device is not None), None)
    result.device = result.device or device


def loose(tensor: object) -> bool:
    """Do ranks hold parts of it as they like? Then a rank that holds none need not name it."""
    return type(tensor) is Shard and (tensor.alone or tensor.flat is not None or tensor.boxes is not None)


def members_of(whole: SaveMesh | None, world: int) -> Collection[int]:
    return whole[2].members if whole else range(world)


def of_all(entries: list[Entry], whole: SaveMesh | None, world: int) -> set[_lib.Mesh | None]:
    """The meshes that have all ranks of the save's; None, which is that one, among them."""
    everyone = members_of(whole, world)
    return {None, *(mesh for mesh in {entry.mesh for entry in entries} if mesh is not None
                    and mesh.members.issuperset(everyone))}


def home_of(walk: Walk, entries: list[Entry], whole: SaveMesh | None, rank: int, world: int) -> int | None:
    """The rank whose document is this one's. None: this one is in no mesh of the component, and holds nothing."""
    if walk.own or any(type(tensor) is Shard and tensor.alone for tensor in walk.tensors):
        return rank
    within, held = set(members_of(whole, world)), {entry.mesh.members for entry in entries if not entry.absent
                                                   and entry.mesh is not None}
    if rank not in within:
        if not held:
            return None
        within = set(next(iter(held)))
    for members in held:
        within &= members
    return min(within)


def check_names(walk: Walk) -> None:
    for name, path in zip(walk.names, walk.paths):
        if "\0" in name:
            raise Refused(path, "the name of a tensor must not contain a NUL: rename the key")
    if len(set(walk.names)) == len(walk.names):
        return
    seen: dict[str, KeyPath] = {}
    for name, path in zip(walk.names, walk.paths):
        if name in seen:
            raise Refused(path, f"is called {name!r}, as {values.path_text(seen[name])} is: names are the keys with "
                                "dots between them: rename a key")
        seen[name] = path


def rows_of(collected: Collected) -> NDArray[np.uint64]:
    """One contiguous array over all components."""
    parts = [rows for rows in collected.rows if len(rows)]
    return np.ascontiguousarray(np.concatenate(parts)) if parts else np.empty((0, _lib.TENSOR_BYTES // 8), np.uint64)
