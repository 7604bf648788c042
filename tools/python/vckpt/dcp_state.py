# SPDX-License-Identifier: Apache-2.0
"""What a step keeps of a DCP state besides its tensors (docs/dcp.md): under which component and name each key's tensor
stands, and the readable document `.dcp/metadata.json`. No pickle anywhere; the document is checked when it is read.

Every rank names tensors by itself, from the keys and paths of its own state: the same on all ranks, since a key's name
depends on nothing else but where two keys would meet."""
from __future__ import annotations

import dataclasses
import errno
import io
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from . import _lib, values
from .records import Record
from .state import PER_RANK
from .torch_state import DTYPES

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from .step import Step
    from .values_text import KeyPath

Place = tuple[str, str]     # component, name

DOCUMENT = ".dcp/metadata.json"
BYTES = ".dcp/bytes.{}"            # the byte entries of one rank, one after another; INDEX says where each of them lies
INDEX = ".dcp/bytes.{}.json"
VERSION = 1
COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
TAKEN = {"ranks", "mesh", "blobs", "meta", "incoming", "latest", "manifest.json"}
FORMATS = {torch.contiguous_format: "contiguous", torch.channels_last: "channels_last",
           torch.preserve_format: "preserve"}
# Item types that the store has no word for are kept as unsigned integers of their size; the document has the true one.
STAND_INS = ({1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64} if hasattr(torch, "uint16")
             else {1: torch.uint8})


class BadDocument(ValueError):
    """`.dcp/metadata.json` of a step is not what a StorageWriter writes."""


# ---- names ----

def valid_component(text: str) -> bool:
    return bool(COMPONENT.fullmatch(text)) and text not in TAKEN and not text.endswith((".safetensors", ".npy"))


def split(key: str, path: KeyPath) -> Place:
    """(component, name) of one key, looked at alone."""
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
    """{key: path} of a rank's whole state, as far as its planner tells the paths. `keys` are always in it."""
    said: Any = getattr(planner, "mappings", None) or getattr(plan, "planner_data", None)
    paths: dict[str, KeyPath] = {}
    if isinstance(said, dict):
        paths = {key: tuple(path) for key, path in said.items() if isinstance(path, (tuple, list))}
    for key in keys:
        paths.setdefault(key, (key,))
    return paths


def kept_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The type that a tensor of `dtype` is kept as, or None."""
    return dtype if dtype in DTYPES else STAND_INS.get(torch._utils._element_size(dtype))


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
    return isinstance(data, dict) and all(
        key in keys and isinstance(path, tuple) and all(type(part) in (str, int) for part in path) for key,
                                          path in data.items())


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
            entries[key]["path"] = list(data[key])
    result = {"vckpt.dcp": VERSION, "torch": torch.__version__.split("+")[0], "paths": plain, "keys": entries}
    if data is not None and not plain:
        result["planner_data"] = json.loads(values.encode(data, path=("planner_data",)))
    return json.dumps(result, indent=1).encode()


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
    """Where a key's tensor stands, and its true type."""
    component: str
    name: str
    dtype: torch.dtype


def check(condition: bool, key: str, what: str) -> None:
    if not condition:
        raise BadDocument(f"key {key!r}: {what}")


def read_tensor(key: str, entry: dict[str, Any]) -> tuple[Kept, torch_metadata.TensorStorageMetadata]:
    shape: Any = entry.get("shape")
    name = entry.get("dtype")
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    check(isinstance(dtype, torch.dtype), key, f"torch {torch.__version__} has no dtype {name!r}")
    check(isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape), key,
          f"its shape is {shape!r}, not a list of whole numbers")
    check(isinstance(entry.get("component"), str) and isinstance(entry.get("name"), str), key,
          "it has no component and name of a tensor")
    layout = getattr(torch, str(entry.get("layout", "strided")), None)
    form = {name: form for form, name in FORMATS.items()}.get(entry.get("memory_format", "contiguous"))
    check(isinstance(layout, torch.layout) and form is not None, key, "its layout or memory format is unknown")
    properties = torch_metadata.TensorProperties(dtype=dtype, layout=layout,
                                                 requires_grad=entry.get("requires_grad") is True,
                                                 memory_format=form, pin_memory=entry.get("pin_memory") is True)
    return Kept(entry["component"], entry["name"], dtype), whole(properties, shape)


def whole(properties: torch_metadata.TensorProperties, shape: Sequence[int]) -> torch_metadata.TensorStorageMetadata:
    """As one chunk: any box of a tensor can be read, whoever wrote it."""
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
        raise BadDocument(f"it has version {document_.get('vckpt.dcp')!r}, this vckpt reads version {VERSION}")
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
            check(isinstance(entry["path"], list) and all(type(p) in (str, int) for p in entry["path"]), key,
                  "its path is not a list of texts and whole numbers")
            paths[key] = tuple(entry["path"])
    data = paths if document_.get("paths") else None
    if "planner_data" in document_:
        data = values.decode(json.dumps(document_["planner_data"]).encode())
    return torch_metadata.Metadata(state_dict_metadata=keys, planner_data=data), kept


# ---- values of a step that DCP did not save ----

def is_tensor(saved: object) -> bool:
    return isinstance(saved, Record) and saved.tag == "$tensor"


def is_leaf(saved: object) -> bool:
    """Does DCP keep the value whole? It takes dicts apart, and lists in which there are tensors or dicts, at whatever
    depth of further lists."""
    if isinstance(saved, list):
        return not any(is_tensor(item) or isinstance(item, dict)
                       or (isinstance(item, list) and not is_leaf(item)) for item in saved)
    return not isinstance(saved, dict)


def leaves(saved: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    """[(path, value)] of a component's tree, without tensors and without what each rank has by itself."""
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
    return [((component, f"param_groups.{name}.{key}"), value) for group in groups for name in group["params"] for key,
            value in group.items()
            if key != "params" and not is_tensor(value)]


def plain_values(step: Step) -> dict[str, tuple[KeyPath, Any]]:
    """{key: (path, value)} of the components' trees: first those of the common tree, then from the ranks' own trees (a
    pipeline's stages) those that it lacks."""
    found: dict[str, tuple[KeyPath, Any]] = {}
    for component in sorted({blob.name.removesuffix(".json") for blob in step.blobs() if blob.rank is None
                             and valid_document(blob.name)}):
        common = step.values(component, tensors=False)
        trees = [common] if has_own(common) else [common,
                                                  *(step.values(component, rank, tensors=False)
                                                    for rank in step.ranks(component))]
        for tree in trees:
            for path, value in leaves(tree, (component,)) + by_parameter(tree, component):
                words = list(map(str, path))
                first, kept = found.setdefault(".".join(words), (path, value))
                # keys may contain dots, so two paths can give the same key
                if list(map(str, first)) != words and kept != value:
                    found[".".join(words)] = first, Twofold()
    return found


class Twofold:
    """Stands for two values of one key."""


def valid_document(name: str) -> bool:
    return name.endswith(".json") and valid_component(name.removesuffix(".json"))


def has_own(saved: object) -> bool:
    """Is there a part that each rank has by itself? Then the tree of one rank says nothing about another rank."""
    parts = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, (list, tuple)) else ()
    return saved == PER_RANK or any(map(has_own, parts))


def saved_bytes(key: str, value: object) -> bytes:
    """A value in the form in which DCP keeps it and loads it."""
    if isinstance(value, Twofold):
        raise _lib.InvalidArgument(errno.EINVAL, f"{key}: two values of the step have this key, because their own "
                                                 "keys contain dots: read them with vckpt.Step.values")
    if has_tensor(value):
        raise _lib.InvalidArgument(errno.EINVAL, f"{key}: the value has tensors in a {type(value).__name__}, which "
                                                 "DCP does not take apart: read it with vckpt.Step.values")
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def has_tensor(saved: object) -> bool:
    parts = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, (list, tuple)) else ()
    return is_tensor(saved) or any(map(has_tensor, parts))


def parse_index(text: bytes, size: int) -> dict[str, tuple[int, int]]:
    """{key: (offset, length)} of the byte entries of one rank, which has `size` bytes of them."""
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"it is no JSON: {error}") from None
    if not isinstance(index, dict):
        raise BadDocument("it is not an object")
    for key, place in index.items():
        check(isinstance(place, list) and len(place) == 2 and all(type(n) is int and n >= 0 for n in place) and
              sum(place) <= size, key, f"its place is {place!r}, not an offset and a length within {size} bytes")
    return {key: tuple(place) for key, place in index.items()}
