# SPDX-License-Identifier: Apache-2.0
"""Components of a step that a StorageWriter saved, as trees, for vckpt.load: what Step.values gives of a step of
vckpt.save. DCP pickles values: they are read as data (pickles.py), so nothing that a step holds is run. A value that is
not plain is a vckpt.Record("vckpt.Pickled"): dcp.load reads it, by StorageReader(..., allow_pickle=True)."""
from __future__ import annotations

from typing import Any

from . import dcp_state, pickles
from .records import Record
from .step import Step


def tree_of(step: Step, component: str) -> Any:
    """None where DCP has not saved the step, or nothing of that name."""
    blobs = {blob.name: blob.bytes for blob in step.blobs() if blob.rank is None}
    if dcp_state.DOCUMENT not in blobs:
        return None
    metadata, kept = dcp_state.read_document(step, blobs)
    paths = paths_of(metadata)
    entries = Entries(step, dcp_state.read_places(step, blobs))
    root = Node()
    for key in metadata.state_dict_metadata:
        path = paths.get(key, (key,))
        if key in kept:
            if kept[key].component == component:
                put(root, path[1:] if path[0] == component and len(path) > 1 else (kept[key].name,),
                    Record("tensor", {"name": kept[key].name}, "$tensor"))
        elif path[0] == component and key in entries.places:
            put(root, path[1:], entries.value(key))
    if not root:
        return None
    return lists(root.get((), root))


class Node(dict[Any, Any]):
    """A container by the paths of what is in it: whatever a value holds is left as it is."""


def paths_of(metadata: Any) -> dict[str, Any]:
    """{key: path}, where the planner had paths."""
    data = metadata.planner_data
    plain = dcp_state.plain_paths(data, metadata.state_dict_metadata) and all(map(dcp_state.is_path, data.values()))
    return data if plain else {}


def put(root: Node, path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        root = root.setdefault(part, Node())
        if type(root) is not Node:
            raise dcp_state.BadDocument(f"{dcp_state.DOCUMENT}: a key is within the value of another one, at "
                                        f"{list(path)!s:.300}")
    root[path[-1] if path else ()] = value


def lists(found: Any) -> Any:
    """The tree with lists in the place of dicts whose keys are the numbers from 0 on."""
    if type(found) is not Node:
        return found
    made = {key: lists(value) for key, value in found.items()}
    return [made[number] for number in range(len(made))] if made and set(made) == set(range(len(made))) else made


class Entries:
    """The byte entries of a step. places: {key: (blob, offset, length)}"""

    def __init__(self, step: Step, places: dict[str, tuple[str, int, int]]) -> None:
        self.step, self.places = step, places
        self.last: tuple[str, bytes] = "", b""          # entries of a rank follow each other

    def value(self, key: str) -> Any:
        blob, offset, length = self.places[key]
        if self.last[0] != blob:
            self.last = blob, self.step.blob(blob)
        try:
            return pickles.tree(self.last[1][offset:offset + length])
        except pickles.Refused:
            return Record("vckpt.Pickled", {"key": key})
