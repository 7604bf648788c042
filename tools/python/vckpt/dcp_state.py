# SPDX-License-Identifier: Apache-2.0
"""What a step keeps of a DCP state besides its tensors (docs/dcp.md): the component and the name of each key's tensor,
and the readable document `.dcp/metadata.json`. No pickle anywhere; the document is checked when it is read.

Every rank names tensors by itself, from the keys and paths of its own state. The names are the same on all ranks, since
a key's name depends on nothing else, except where two keys would get the same one."""
from __future__ import annotations

import dataclasses
import io
import json
import pickle
import re
import reprlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from . import _lib, values
from .records import Record
from .state import PER_RANK
from .step import Step
from .torch_state import DTYPES
from .values_text import KeyPath

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

Place = tuple[str, str]     # component, name

DOCUMENT = ".dcp/metadata.json"
BYTES = ".dcp/bytes.{}"            # the byte entries of one rank, one after another; INDEX has the place of each
INDEX = ".dcp/bytes.{}.json"
VERSION = 1
VALUES = b'"$vckpt"'                # in every document of values (docs/format/values.md), and in few other files
DOCUMENT_MAX_BYTES = 256 << 20      # of DOCUMENT; and of all INDEX together
PATH_MAX_PARTS = 100                # of a key
MAX_DIMS = 16                       # of a tensor of a store (core/tensor/box.h)
LISTS_MAX = 1_000_000               # places of lists that hold nothing, by the paths of all keys
GROUP_VALUES_MAX = 4_000_000        # of the groups of an optimizer, once for each parameter
COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
TAKEN = {"ranks", "mesh", "blobs", "meta", "incoming", "latest", "manifest.json"}
FORMATS = {torch.contiguous_format: "contiguous", torch.channels_last: "channels_last",
           torch.preserve_format: "preserve"}
FORMS = {word: form for form, word in FORMATS.items()}
TYPES = {word: kind for word, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
LAYOUTS = {word: layout for word, layout in vars(torch).items() if isinstance(layout, torch.layout)}
# Item types that the store has no word for are kept as unsigned integers of their size; the document has the true one.
STAND_INS = ({1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64} if hasattr(torch, "uint16")
             else {1: torch.uint8})
TWOFOLD = object()                  # in the place of two values of one key


class BadDocument(_lib.FormatError, ValueError):
    """`.dcp/metadata.json` of a step is not what a StorageWriter writes, or another document of it."""

    def __init__(self, text: str) -> None:
        super().__init__(_lib.EFORMAT, text)

    def __reduce__(self) -> Any:
        return BadDocument, (self.text,)


# ---- names ----

def valid_component(text: str) -> bool:
    return bool(COMPONENT.fullmatch(text)) and text not in TAKEN and not text.endswith((".safetensors", ".npy"))


def split(key: str, path: KeyPath) -> Place:
    """(component, name) of a key, without regard to other keys."""
    if len(path) > 1 and isinstance(path[0], str) and valid_component(path[0]):
        name = ".".join(map(str, path[1:]))
        if name:
            return path[0], name
    return "model", key


def names(paths: Mapping[str, KeyPath]) -> dict[str, Place]:
    """{key: (component, name)} of {key: path}. If several keys would get the same place, those that are not part of a
    component of their own are kept by their whole key, in a component that no other key uses."""
    result = {key: split(key, path) for key, path in paths.items()}
    holders: dict[Place, list[str]] = {}
    for key, place in result.items():
        holders.setdefault(place, []).append(key)
    meeting = [key for keys in holders.values() if len(keys) > 1 for key in keys if result[key] == ("model", key)]
    spare = "keys"
    while any(component == spare for component, _ in result.values()):
        spare += "_"
    result.update({key: (spare, key) for key in meeting})
    return result


def paths_of(planner: SavePlanner, plan: SavePlan, keys: Iterable[str]) -> dict[str, KeyPath]:
    """{key: path} of a rank's whole state, as far as its planner has paths. `keys` are always in it."""
    said: Any = getattr(planner, "mappings", None) or getattr(plan, "planner_data", None)
    paths: dict[str, KeyPath] = {}
    if isinstance(said, dict):
        paths = {key: tuple(path) for key, path in said.items() if isinstance(path, (tuple, list))}
    for key in keys:
        paths.setdefault(key, (key,))
    return paths


def kept_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The type that a tensor of `dtype` is kept as, or None."""
    return dtype if dtype in DTYPES else STAND_INS.get(dtype.itemsize)


# ---- out ----

def tensor_entry(place: Place, metadata: torch_metadata.TensorStorageMetadata) -> dict[str, Any]:
    """`metadata`: properties (a TensorProperties) and size."""
    p = metadata.properties
    properties = {"requires_grad": bool(p.requires_grad), "pin_memory": bool(p.pin_memory),
                  "layout": str(p.layout).removeprefix("torch."),
                  "memory_format": FORMATS.get(p.memory_format, "contiguous")}
    usual = {"requires_grad": False, "pin_memory": False, "layout": "strided", "memory_format": "contiguous"}
    entry: dict[str, Any] = {"component": place[0], "name": place[1], "dtype": str(p.dtype).removeprefix("torch."),
                             "shape": list(metadata.size)}
    entry.update({key: value for key, value in properties.items() if value != usual[key]})
    return entry


def plain_paths(data: object, keys: Container[str]) -> bool:
    return isinstance(data, dict) and all(key in keys and isinstance(path, tuple) and {*map(type, path)} <= {str, int}
                                          for key, path in data.items())


def document(metadata: torch_metadata.Metadata) -> bytes:
    """The bytes of `.dcp/metadata.json` of a whole state: DCP's Metadata, or what `from_plans` makes."""
    keys = metadata.state_dict_metadata
    data: Any = metadata.planner_data
    plain = plain_paths(data, keys)
    places = names({key: data[key] if plain and key in data else (key,) for key in keys})
    entries: dict[str, dict[str, Any]] = {}
    for key in sorted(keys):
        value = keys[key]
        tensor = isinstance(value, torch_metadata.TensorStorageMetadata)
        entries[key] = tensor_entry(places[key], value) if tensor else {"bytes": True}
        if plain and key in data:
            if len(data[key]) > PATH_MAX_PARTS:
                raise _lib.invalid(f"{key[:300]}: it is in {len(data[key])} containers, at most {PATH_MAX_PARTS} can "
                                   "be read again")
            entries[key]["path"] = list(data[key])
    result = {"vckpt.dcp": VERSION, "torch": torch.__version__.split("+")[0], "paths": plain, "keys": entries}
    if data is not None and not plain:
        result["planner_data"] = json.loads(values.encode(data, path=("planner_data",)))
    text = json.dumps(result, indent=1).encode()
    if len(text) > DOCUMENT_MAX_BYTES:
        raise _lib.invalid(f"what the state's {len(keys):,} keys need in {DOCUMENT} are {len(text):,} bytes, at most "
                           f"{DOCUMENT_MAX_BYTES:,} can be read again: save it in several parts")
    return text


def from_plans(plans: list[SavePlan]) -> torch_metadata.Metadata:
    """Metadata as the default planner makes it, of complete plans."""
    keys: dict[str, Any] = {}
    data: dict[str, KeyPath] = {}
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is None:
                keys[item.index.fqn] = torch_metadata.BytesStorageMetadata()
                continue
            known = keys.setdefault(item.index.fqn, torch_metadata.TensorStorageMetadata(
                properties=item.tensor_data.properties, size=item.tensor_data.size, chunks=[]))
            known.chunks.append(item.tensor_data.chunk)
        if isinstance(plan.planner_data, dict):
            data.update(plan.planner_data)
        elif plan.planner_data is not None:
            return torch_metadata.Metadata(keys, planner_data=plan.planner_data)
    return torch_metadata.Metadata(keys, planner_data=data or None)


# ---- in ----

@dataclasses.dataclass(frozen=True)
class Kept:
    """The place of a key's tensor, and its true type and shape."""
    component: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def check(condition: bool, key: str, what: str, found: object = None) -> None:
    """Refuses a key unless the condition holds. what: with {} for what was found, which may be of any size."""
    if not condition:
        raise BadDocument(f"key {key[:300]!r}: {what.format(reprlib.repr(found))}")


def word_of(table: Mapping[str, Any], word: object) -> Any:
    """The value in the table of a text of the document, or None."""
    return table.get(word) if isinstance(word, str) else None


def read_tensor(key: str, entry: dict[str, Any]) -> tuple[Kept, torch_metadata.TensorStorageMetadata]:
    shape: Any = entry.get("shape")
    dtype = word_of(TYPES, entry.get("dtype"))
    check(dtype is not None and kept_dtype(dtype) is not None, key,
          f"torch {torch.__version__} has no dtype {{}} that a store keeps", entry.get("dtype"))
    check(isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape), key,
          "its shape is {}, not a list of whole numbers", shape)
    check(len(shape) <= MAX_DIMS, key, f"it has {len(shape)} dimensions, at most {MAX_DIMS} are possible")
    check(isinstance(entry.get("component"), str) and isinstance(entry.get("name"), str), key,
          "it has no component and name of a tensor")
    layout = word_of(LAYOUTS, entry.get("layout", "strided"))
    check(layout is not None, key, "torch has no layout {}", entry.get("layout"))
    form = word_of(FORMS, entry.get("memory_format", "contiguous"))
    check(form is not None, key, "its memory format is {}, expected " + ", ".join(FORMS), entry.get("memory_format"))
    properties = torch_metadata.TensorProperties(dtype=dtype, layout=layout,
                                                 requires_grad=entry.get("requires_grad") is True,
                                                 memory_format=form, pin_memory=entry.get("pin_memory") is True)
    return Kept(entry["component"], entry["name"], dtype, tuple(shape)), whole(properties, shape)


def whole(properties: torch_metadata.TensorProperties, shape: Sequence[int]) -> torch_metadata.TensorStorageMetadata:
    """As one chunk: any box of a tensor can be read, in whatever boxes it was written."""
    chunk = torch_metadata.ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape))
    return torch_metadata.TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=[chunk])


def parse(text: bytes) -> tuple[torch_metadata.Metadata, dict[str, Kept]]:
    """(Metadata, {key: Kept}) of a document."""
    try:
        document_ = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"it is no JSON: {error}") from None
    if not isinstance(document_, dict) or not isinstance(document_.get("keys"), dict):
        raise BadDocument('it has no object "keys"')
    if document_.get("vckpt.dcp") != VERSION:
        found = reprlib.repr(document_.get("vckpt.dcp"))
        raise BadDocument(f"it has version {found}, this vckpt reads version {VERSION}")
    keys: dict[str, Any] = {}
    kept: dict[str, Kept] = {}
    paths: dict[str, KeyPath] = {}
    for key, entry in document_["keys"].items():
        check(isinstance(entry, dict), key, "its entry is not an object")
        if entry.get("bytes") is True:
            keys[key] = torch_metadata.BytesStorageMetadata()
        else:
            kept[key], keys[key] = read_tensor(key, entry)
        if "path" in entry:
            path = entry["path"]
            check(isinstance(path, list) and is_path(path), key,
                  f"its path is {{}}, not a list of 1 to {PATH_MAX_PARTS} texts and whole numbers", path)
            paths[key] = tuple(path)
    check_lists(paths)
    data = paths if document_.get("paths") else None
    if "planner_data" in document_:
        try:
            data = values.decode(json.dumps(document_["planner_data"]).encode())
        except (ValueError, RecursionError) as error:
            raise BadDocument(f"planner_data: {error}") from None
    return torch_metadata.Metadata(state_dict_metadata=keys, planner_data=data), kept


def is_path(parts: Sequence[Any]) -> bool:
    return 0 < len(parts) <= PATH_MAX_PARTS and all(type(part) is str or (type(part) is int and part >= 0)
                                                    for part in parts)


def check_lists(paths: Mapping[str, KeyPath]) -> None:
    """Refuses numbers in paths of which a planner would make lists that are far longer than what is in them."""
    root: dict[Any, Any] = {}
    places = 0
    for path in paths.values():
        at = root if any(type(part) is int for part in path) else {}
        for part in path:
            if type(part) is int and part >= at.get(None, 0):           # None: how long the list is so far
                places += part + 1 - at.get(None, 0)
                at[None] = part + 1
            at = at.setdefault(part, {})
    if places > LISTS_MAX + 16 * len(paths):
        raise BadDocument(f"the paths of its {len(paths):,} keys make lists of {places:,} places")


def read_document(step: Step, blobs: Mapping[str, int]) -> tuple[torch_metadata.Metadata, dict[str, Kept]]:
    """`parse` of a step's document; blobs: {name: bytes}."""
    if blobs[DOCUMENT] > DOCUMENT_MAX_BYTES:
        raise BadDocument(f"{DOCUMENT}: it has {blobs[DOCUMENT]:,} bytes, at most {DOCUMENT_MAX_BYTES:,} are read")
    try:
        return parse(step.blob(DOCUMENT))
    except BadDocument as error:
        raise BadDocument(f"{DOCUMENT}: {error}") from None


def read_places(step: Step, blobs: Mapping[str, int]) -> dict[str, tuple[str, int, int]]:
    """{key: (name of the blob, offset, length)} of the byte entries of all ranks."""
    found: dict[str, tuple[str, int, int]] = {}
    prefix, suffix = INDEX.split("{}")
    names = [name for name in sorted(blobs) if name.startswith(prefix) and name.endswith(suffix)
             and name.removesuffix(suffix) in blobs]
    size = sum(blobs[name] for name in names)
    if size > DOCUMENT_MAX_BYTES:
        raise BadDocument(f"{INDEX.format('*')}: they have {size:,} bytes, at most {DOCUMENT_MAX_BYTES:,} are read")
    for name in names:
        data = name.removesuffix(suffix)
        try:
            places = parse_index(step.blob(name), blobs[data])
        except BadDocument as error:
            raise BadDocument(f"{name}: {error}") from None
        for key, (offset, length) in places.items():
            found.setdefault(key, (data, offset, length))
    return found


# ---- values of a step that DCP did not save ----

def is_tensor(saved: object) -> bool:
    return isinstance(saved, Record) and saved.tag == "$tensor"


def is_leaf(saved: object) -> bool:
    """Does DCP keep the value whole? It takes apart dicts, and lists with tensors or dicts in them, at whatever depth
    of further lists."""
    if isinstance(saved, list):
        return not any(is_tensor(item) or isinstance(item, dict)
                       or (isinstance(item, list) and not is_leaf(item)) for item in saved)
    return not isinstance(saved, dict)


def leaves(saved: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    """[(path, value)] of a component's tree, without tensors and without what each rank keeps for itself."""
    if is_tensor(saved) or saved == PER_RANK:
        return []
    if is_leaf(saved):
        return [(path, saved)]
    items = [(str(key), item) for key, item in saved.items()] if isinstance(saved, dict) else enumerate(saved)
    return [leaf for key, item in items for leaf in leaves(item, (*path, key))]


def by_parameter(saved: Any, component: str) -> list[tuple[KeyPath, Any]]:
    """[(path, value)] of an optimizer's groups, as get_optimizer_state_dict flattens them: for each parameter the
    values of its group."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict)
                                               and isinstance(group.get("params"), list) for group in groups):
        return []
    count = sum(len(group) * len(group["params"]) for group in groups)
    if count > GROUP_VALUES_MAX:
        raise BadDocument(f"{component}: its groups have {count:,} values, once for each parameter; at most "
                          f"{GROUP_VALUES_MAX:,} are read")
    return [((component, f"param_groups.{name}.{key}"), value) for group in groups for name in group["params"]
            for key, value in group.items() if key != "params" and not is_tensor(value)]


def plain_values(step: Step) -> dict[str, tuple[KeyPath, Any]]:
    """{key: (path, value)} of the components' trees: first those of the common tree, then from the ranks' own trees (a
    pipeline's stages) those that it lacks."""
    found: dict[str, tuple[KeyPath, Any]] = {}
    for component in sorted({blob.name.removesuffix(".json") for blob in step.blobs() if blob.rank is None
                             and blob.name.endswith(".json") and valid_component(blob.name.removesuffix(".json"))}):
        if VALUES not in step.blob(f"{component}.json"):
            continue                    # a file beside the step (config.json), no component's values
        try:
            common = step.values(component, tensors=False)
            # where each rank has parts by itself, the tree of one says nothing about another
            others = () if has(common, lambda part: part == PER_RANK) else step.ranks(component)
            trees = [common, *(step.values(component, rank, tensors=False) for rank in others)]
        except ValueError as error:
            if isinstance(error, _lib.Error):
                raise
            raise BadDocument(f"{component}.json: {error}") from None
        for tree in trees:
            for path, value in leaves(tree, (component,)) + by_parameter(tree, component):
                words = list(map(str, path))
                first, kept = found.setdefault(".".join(words), (path, value))
                # keys may contain dots, so two paths can give the same key
                if list(map(str, first)) != words and kept != value:
                    found[".".join(words)] = first, TWOFOLD
    return found


def saved_bytes(key: str, value: object) -> bytes:
    """A value in the form in which DCP keeps it and loads it."""
    if value is TWOFOLD:
        raise _lib.invalid(f"{key}: two values of the step have this key, because their own keys contain dots: read "
                           "them with vckpt.Step.values")
    if has(value, is_tensor):
        raise _lib.invalid(f"{key}: the value has tensors in a {type(value).__name__}, which DCP does not take apart: "
                           "read it with vckpt.Step.values")
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError) as error:
        raise _lib.invalid(f"{key}: torch.save does not take the value: {error}") from None
    return data.getvalue()


def has(saved: object, what: Callable[[object], bool]) -> bool:
    """Does it fit, or any part of it?"""
    parts = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, (list, tuple)) else ()
    return what(saved) or any(has(part, what) for part in parts)


def parse_index(text: bytes, size: int) -> dict[str, tuple[int, int]]:
    """{key: (offset, length)} of the byte entries of one rank, which has `size` bytes of them."""
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"it is no JSON: {error}") from None
    if not isinstance(index, dict):
        raise BadDocument("it is not an object")
    for key, place in index.items():
        check(isinstance(place, list) and len(place) == 2 and all(type(n) is int and n >= 0 for n in place)
              and sum(place) <= size, key, f"its place is {{}}, not an offset and a length within {size} bytes", place)
    end = 0
    for key, (offset, length) in sorted(index.items(), key=lambda item: item[1]):
        check(not length or offset >= end, key, "its place {} overlaps that of another key", [offset, length])
        end = max(end, offset + length)
    return {key: tuple(place) for key, place in index.items()}
