# SPDX-License-Identifier: Apache-2.0
"""From a state (any nesting of dicts, lists, tensors and plain values under component names) to what the library takes:
tensors by dotted name, and for each component one document of values (`<component>.json`, docs/format/values.md) in
which a reference stands for each tensor, so that the whole state can be built again.

A walk goes through dicts, lists and tuples. Modules, optimizers and objects with state_dict() give their state dict;
what is kept for each rank by itself (`rng_state`, `per_rank`) becomes a PerRank; and a subtree of nothing but tensors,
which is most of any state, becomes a Subtree. A memo of the last save has all Subtrees with their names and their text,
and the entry of every tensor: a save of the same structure compares keys and what the tensors look like now, and makes
nothing anew. What does not compare equal is made as if there were no memo.

Whose document stands for a rank: that of the lowest rank which is in the save's mesh and in the meshes of all tensors
of the component that this rank holds a part of (its *home*). A rank that is its own home gives its document; of several
the lowest counts. All but rank 0 give it under their rank too, where it is not lost (pipeline stages whose trees
differ), and for a rank whose home is another one than 0 a Record("vckpt.SameAs") says whose it has. A rank with values
of its own gives its whole tree under its rank; in the common one a Record("vckpt.PerRank") stands in their place. What
a rank does not give has to be what its home gives: commons.py."""
from __future__ import annotations

import collections
import errno
import fnmatch
import hashlib
import io
import random
import re
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import _lib, advice, commons, components, meshes, values
from .records import Record
from .shard import NUMPY_DTYPES, STALE, Layout, NumpyEntry, Refused, Shard, ShardEntry, said
from .values_text import Block

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from .meshes import SaveMesh
    from .shard import Entry
    from .torch_modules import Views
    from .values_text import KeyPath, Node

Skeleton: TypeAlias = "tuple[Any, list[Any], list[Skeleton | None] | None]"      # type, keys, children

PER_RANK = Record("vckpt.PerRank", {})
SAME_AS = "vckpt.SameAs"
DICTS = (dict, collections.OrderedDict)


def torch_module() -> Any:
    """torch, where the program has imported it."""
    return sys.modules.get("torch")


def torch_state() -> Any:
    from . import torch_state as module
    return module


def current_device() -> int | None:
    """The number of the current CUDA device, of a program that uses CUDA."""
    torch = torch_module()
    return (torch.cuda.current_device() if torch is not None and torch.cuda.is_available()
            and torch.cuda.is_initialized() else None)


def is_tensor(value: object) -> bool:
    if isinstance(value, (np.ndarray, Shard)):
        return True
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def dotted(path: KeyPath) -> str:
    """The name of a tensor: the keys below its component; a component that is a tensor is called as itself."""
    return ".".join(str(key) for key in path[1:]) if len(path) > 1 else path[0]


# ---- random numbers ----

class RngState:
    """The states of this rank's random number generators when rng_state() was called."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states


def rng_state() -> RngState:
    """The states of Python's, numpy's and torch's generators (of CUDA that of the current device, and beside it those
    of all devices where the process sees several), to be put into the state that is saved. Kept for each rank by
    itself."""
    generator: Any = np.random.get_state()
    kind, keys, position, has_gauss, gauss = generator
    states = {"python": random.getstate(),
              "numpy": {"kind": str(kind), "keys": keys.astype("<u4").tobytes(), "position": int(position),
                        "has_gauss": int(has_gauss), "gauss": float(gauss)}}
    torch = torch_module()
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state().cpu().numpy().tobytes()
            if torch.cuda.device_count() > 1:
                states["cuda_devices"] = {"current": torch.cuda.current_device(),
                                          "states": [state.cpu().numpy().tobytes()
                                                     for state in torch.cuda.get_rng_state_all()]}
    return RngState(states)


def set_rng_state(state: Any, generator: Any = None) -> None:
    """Sets the generators back: what rng_state() gave, or what Step.values gives for it. generator: a torch.Generator,
    set to what Step.values gives for one that stood in the state."""
    if generator is not None:
        import torch
        generator.set_state(torch.frombuffer(bytearray(state["state"]), dtype=torch.uint8))
        return
    states = state.states if isinstance(state, RngState) else state
    random.setstate(states["python"])
    kept = states["numpy"]
    np.random.set_state((kept["kind"], np.frombuffer(kept["keys"], "<u4").astype(np.uint32), kept["position"],
                         kept["has_gauss"], kept["gauss"]))
    if "torch" in states:
        import torch
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
        if "cuda" in states and torch.cuda.is_available():
            kept = states.get("cuda_devices")
            if (kept and len(kept["states"]) == torch.cuda.device_count()
                    and kept["current"] == torch.cuda.current_device()):
                torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(state), dtype=torch.uint8)
                                              for state in kept["states"]])
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))


def parameter_names(optimizer: Any, state: Mapping[str, Any]) -> list[str]:
    """By which names a save of `state` keeps the state of an optimizer's parameters, in the order of its groups;
    changes nothing of it. state: {"model": model}, with all modules (and loose parameters) that the optimizer is
    over."""
    from . import torch_optimizers
    return torch_optimizers.ordered_names(optimizer, state)


# ---- the walk ----

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
    """Is it so built? Leaves go into `tensors` unseen: their entries look at them."""
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
            if skeleton is None or not paths or any(self.chosen(one[:n]) for one in paths
                                                    for n in range(len(path) + 1, len(one) + 1)):
                self.mixed.add(path)
                return None
            known, self.fresh = Subtree(value, skeleton, paths), True
        self.subtrees[path] = known
        self.names += known.names
        self.paths += known.paths
        self.tensors += tensors
        return known

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
        if torch is not None and isinstance(value, torch.nn.Module):
            from .torch_modules import module_state
            tensors, buffers = module_state(value, self.memory.views)
            self.buffers |= {dotted((*path, name)) for name in buffers}
            return tensors
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            from .torch_optimizers import optimizer_state
            return optimizer_state(value, self.state, self.memory.views, path, self.is_own)
        if torch is not None and isinstance(value, torch.Generator):
            return Record("torch.Generator",
                          {"device": str(value.device), "state": value.get_state().cpu().numpy().tobytes()})
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            return self.plain(value.state_dict(), path)
        return value


def noted(error: Exception, path: KeyPath) -> Exception:
    """An error of the caller's own state_dict() says nothing of the state."""
    if not isinstance(error, Refused) and hasattr(error, "add_note"):
        error.add_note(f"while vckpt took {values.path_text(path)}")
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


# ---- entries ----

def make_entry(component: str, name: str, path: KeyPath, tensor: Any, mesh: SaveMesh | None, rank: int,
               flags: int = 0) -> Entry:
    """mesh: (names, ranks, native) of the save, or None."""
    if isinstance(tensor, Shard):
        return ShardEntry(said(tensor), shard_entry(component, name, path, tensor, mesh, rank, flags))
    if isinstance(tensor, np.ndarray):
        if type(tensor) is not np.ndarray:
            raise Refused(path, f"an array of the class {type(tensor).__name__} cannot be kept as it is: "
                                f"{advice.of_array(tensor)}")
        return NumpyEntry(component, name, path, tensor, plain_layout(tensor.shape, mesh), flags).at(rank)
    entry: Entry
    adapter = torch_state()
    if adapter.DTensor is not None and isinstance(tensor, adapter.DTensor):
        entry = adapter.DTensorEntry(component, name, path, tensor, mesh, rank, flags)
    else:
        entry = adapter.TorchEntry(component, name, path, tensor, plain_layout(tuple(tensor.shape), mesh),
                                   flags).at(rank)
    return entry


def plain_layout(shape: Sequence[int], mesh: SaveMesh | None) -> Layout:
    return Layout(shape, mesh[2] if mesh else None)


def shard_entry(component: str, name: str, path: KeyPath, shard: Shard, mesh: SaveMesh | None, rank: int,
                flags: int) -> Entry:
    tensor = shard.tensor
    if not is_tensor(tensor) or hasattr(tensor, "_spec"):
        raise Refused(path,
                      f"a Shard holds a torch tensor or a numpy array of this rank, not a {type(tensor).__name__}")
    words, same = shard.placements, shard.same_dims
    shape = shard.shape if shard.shape is not None else tuple(tensor.shape)
    if words is not None and not isinstance(words, str):
        words = torch_state().placement_words(words, path, len(shape))
    native = mesh[2] if mesh and not shard.alone else None
    own = meshes.given(shard.mesh, "Shard: mesh")
    if own is not None:
        names, ranks = own
        whole = (mesh[:2] if mesh else meshes.array_of(torch_state().root_of(shard.mesh))
                 if type(shard.mesh).__name__ == "DeviceMesh" else None)
        if whole is not None and set(whole[1].reshape(-1)) != set(ranks.reshape(-1)):
            found = meshes.within(whole, (names, ranks))
            if found is not None:                       # a slice: the same along the dimensions that it leaves out
                names, ranks, before = found
                words = words and ",".join(["R"] * before + [words])
                if shard.flat is not None or shard.boxes is not None:
                    same = ",".join(names[:before] + ([same] if same else [])) or None
        native = meshes.named(names, ranks)
    flags |= (_lib.BUFFER if shard.buffer else 0) | (_lib.ALONE if shard.alone else 0)
    layout = Layout(shape, native, words, shard.flat, shard.boxes, same)
    if isinstance(tensor, np.ndarray):
        return NumpyEntry(component, name, path, tensor, layout, flags).at(rank)
    entry: Entry = torch_state().TorchEntry(component, name, path, tensor, layout, flags).at(rank)
    return entry


# ---- what is kept under a rank ----

def file_name(name: str) -> str:
    """A tensor's name as one part of a path (docs/format/names.md)."""
    escaped = re.sub(r"[/%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", name)
    escaped = re.sub(r"^\.", "%2E", escaped)
    if len(escaped.encode()) <= 250:
        return escaped
    cut = escaped.encode()[:180].decode("utf-8", "ignore")
    return re.sub(r"%.?$", "", cut) + "%~" + hashlib.sha256(name.encode()).hexdigest()[:32]


def npy_bytes(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=(1, 0), allow_pickle=False)
    return out.getvalue()


def rank_tensor(value: Any, path: KeyPath) -> tuple[str, bytes]:
    """(dtype's name, bytes of a .npy file) of a tensor that this rank keeps by itself."""
    if isinstance(value, Shard):
        raise Refused(path, "a Shard is part of a tensor of all ranks: it cannot be kept by one rank alone")
    if isinstance(value, np.ndarray):
        word = NUMPY_DTYPES.get(value.dtype.name)
        if word is None or value.dtype.fields:
            raise Refused(path, f"a numpy array of dtype {value.dtype} cannot be kept: {advice.of_array(value)}")
        array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return word, npy_bytes(array if array.dtype.isbuiltin == 1 else array.view(f"V{array.itemsize}"))
    adapter = torch_state()
    if adapter.DTensor is not None and isinstance(value, adapter.DTensor):
        raise Refused(path, "a DTensor is a tensor of all ranks: it cannot be kept by one rank alone")
    word, array = adapter.to_numpy_bytes(value, path)
    numpy_word = next((name for name, ours in NUMPY_DTYPES.items() if ours == word
                       and hasattr(np, name + "_" * (name == "bool"))), None)
    return word, npy_bytes(array.view(np.dtype(numpy_word)) if numpy_word else array)


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
        raise _lib.InvalidArgument(errno.EINVAL, f"a state is a dict of components, not a {type(state).__name__}: "
                                   "{\"model\": model, \"optimizer\": optimizer}")
    patterns = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
    state = components.named(state, patterns, is_tensor)
    placed = meshes.given(mesh)
    if placed and world is not None and placed[1].size and placed[1].max() >= world:
        raise _lib.InvalidArgument(errno.EINVAL, f"mesh= has rank {placed[1].max()}, and this job has world size "
                                                 f"{world}: give a mesh of ranks from 0 to {world - 1}")
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
            commons.declare_none(result.commons, commons.group_name(commons.COMPONENTS, lowest))
    return result


def remembered(component: str, value: Any, memory: Memory, state: Mapping[str, Any], patterns: tuple[str, ...],
               place: tuple[SaveMesh | None, int, int, Collected]) -> None:
    """A component into the result and into the memory."""
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
    """Components of which this rank has nothing. Where other ranks than the lowest stand for its documents, it is in a
    stage that has no part of them, and keeps the nothing under its rank; else the home has nothing either."""
    for walk, tree, text, memo, after in result.empty:
        if staged:
            result.blobs.append((f"{walk.component}.json", True, text))
        else:
            add_commons(walk, tree, text, memo, after, home, result)


class Stale(Exception):
    """Something that is no tensor stands where the memo has one."""


def one(walk: Walk, value: Any, whole: SaveMesh | None, rank: int, world: int, result: Collected) -> Memo:
    """A component: its tensors, documents and commons into `result`; the memo for the next save."""
    component, memo = walk.component, walk.memo
    tree = walk.walk(value, walk.root)
    if walk.failed:
        raise walk.failed
    reused = type(tree) is Subtree and not walk.fresh and memo.text is not None
    text = memo.text if reused else None
    if not reused and type(tree) is not PerRank:
        text = common_document(tree, walk)
    after = Memo()
    walk.buffers |= memo.statistics if memo.names == walk.names else statistics(walk)
    after.subtrees, after.names, after.mixed = walk.subtrees, walk.names, walk.mixed
    after.buffers = frozenset(walk.buffers)
    after.statistics = memo.statistics if memo.names == walk.names else statistics(walk)
    after.text = text if type(tree) is Subtree else None
    fill_rows(walk, after, whole, rank, world, result)
    lowest = whole[2].lowest if whole else 0
    home = lowest if after.home is None else after.home
    if text is not None:
        if world > 1:
            result.commons += after.tensor_commons
            if rank == home or not is_nothing(tree):
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
    return after


def statistics(walk: Walk) -> frozenset[str]:
    """Names that BatchNorm's statistics have in a module's state dict. They differ between replicas that did not share
    them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(walk.names, walk.tensors) if ".running_" in "." + name
              and is_tensor(tensor) and
              hasattr(tensor, "shape")}
    stems = [name.removesuffix("running_mean") for name, shape in shapes.items() if name.endswith("running_mean") and
             len(shape) == 1 and shapes.get(name.removesuffix("running_mean") + "running_var") == shape]
    return frozenset(stem + last for stem in stems for last in ("running_mean", "running_var", "num_batches_tracked"))


def add_commons(walk: Walk, tree: Any, text: bytes, memo: Memo, after: Memo, home: int, result: Collected) -> None:
    """What this rank and its home have to hold alike of a component."""
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


def is_nothing(tree: Any) -> bool:
    return tree is None or (type(tree) in (*DICTS, list, tuple) and not tree)


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
    """The text of the tree; tensors outside of Subtrees are found here, wherever in it they stand."""
    known = {path for subtree in walk.subtrees.values() if subtree.node is None for path in subtree.paths}

    def reference(path: KeyPath, value: Any) -> str:
        if type(value) is PerRank:
            raise AssertionError("given as a Record")
        if path not in known:
            walk.names.append(dotted(path))
            walk.paths.append(path)
            walk.tensors.append(value)
        return dotted(path)
    return values.encode(without_rank(tree), tensor=reference, is_tensor=is_tensor, path=walk.root)


def without_rank(tree: Any) -> Any:
    kind = type(tree)
    if kind is PerRank:
        return PER_RANK
    if kind in DICTS:
        return kind((key, without_rank(item)) for key, item in tree.items())
    return kind(without_rank(item) for item in tree) if kind in (list, tuple) else tree


def rank_document(tree: Any, walk: Walk, result: Collected) -> bytes:
    """The whole tree of this rank; its own tensors become blobs."""
    own = []

    def open_(tree: Any) -> Any:
        kind = type(tree)
        if kind is PerRank:
            own.append(tree.path)
            return tree.value
        if kind in DICTS:
            return kind((key, open_(item)) for key, item in tree.items())
        return kind(open_(item) for item in tree) if kind in (list, tuple) else tree

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
    blobs: set[str] = set()
    return values.encode(open_(tree), tensor=reference, is_tensor=is_tensor, path=walk.root)


def fill_rows(walk: Walk, after: Memo, whole: SaveMesh | None, rank: int, world: int, result: Collected) -> None:
    """Entries for the tensors, old ones where they still say what is."""
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
        if after.home is not None:
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
    """Ranks hold parts of it as they like: one that holds none need not name it."""
    return type(tensor) is Shard and (tensor.alone or tensor.flat is not None or tensor.boxes is not None)


def members_of(whole: SaveMesh | None, world: int) -> Collection[int]:
    return whole[2].members if whole else range(world)


def of_all(entries: list[Entry], whole: SaveMesh | None, world: int) -> set[_lib.Mesh | None]:
    """The meshes that have all ranks of the save's; None, which is that one, among them."""
    everyone = members_of(whole, world)
    return {None,
            *(mesh for mesh in {entry.mesh for entry in entries} if mesh is not None
              and mesh.members.issuperset(everyone))}


def home_of(walk: Walk, entries: list[Entry], whole: SaveMesh | None, rank: int, world: int) -> int | None:
    """The rank whose document stands for this one's. None: this one is in no mesh of it, and holds nothing."""
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


__all__ = ["Collected", "Memory", "RngState", "collect", "rng_state", "rows_of", "set_rng_state"]
