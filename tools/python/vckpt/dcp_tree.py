# SPDX-License-Identifier: Apache-2.0
"""Components of a step that a StorageWriter saved, as trees, for vckpt.load: what Step.values gives of a step of
vckpt.save. DCP pickles values: they are read by torch's own reader without classes (weights_only), so nothing that a
step holds is run. A value that needs classes stands there as vckpt.Record("vckpt.Pickled"): dcp.load reads it."""
from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from . import dcp, dcp_state
from .records import Record

if TYPE_CHECKING:
    from .step import Step

FLAT = "state.", "param_groups."        # keys of an optimizer's state that get_state_dict has flattened


def tree_of(step: Step, component: str) -> Any:
    """None: DCP has not saved the step, or nothing of that name."""
    blobs = {blob.name: blob.bytes for blob in step.blobs() if blob.rank is None}
    if dcp_state.DOCUMENT not in blobs:
        return None
    metadata, kept = dcp_state.parse(step.blob(dcp_state.DOCUMENT))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    places = dcp._places(step, blobs)
    root: dict[Any, Any] = {}
    for key in metadata.state_dict_metadata:
        path = tuple(paths.get(key, (key,)))
        if key in kept:
            if kept[key].component == component:
                put(root, path[1:] if path[0] == component and len(path) > 1 else (kept[key].name,),
                    Record("tensor", {"name": kept[key].name}, "$tensor"))
        elif path[0] == component and key in places:
            put(root, path[1:], value_of(step, key, places[key]))
    if not root:
        return None
    return optimizers(lists(root.get((), root)))


def put(root: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        root = root.setdefault(part, {})
    root[path[-1] if path else ()] = value


def lists(found: Any) -> Any:
    """Dicts whose keys are the numbers from 0 on were lists."""
    if type(found) is not dict:
        return found
    made = {key: lists(value) for key, value in found.items()}
    return [made[number] for number in range(len(made))] if made and set(made) == set(range(len(made))) else made


def value_of(step: Step, key: str, place: tuple[str, int, int]) -> Any:
    blob, offset, length = place
    try:
        return torch.load(io.BytesIO(step.blob(blob)[offset:offset + length]), weights_only=True)
    except Exception:                   # whatever its reader says of what it does not take
        return Record("vckpt.Pickled", {"key": key})


def optimizers(found: Any) -> Any:
    """A flattened state with a level for each parameter again; its groups stay by parameter (`regrouped`)."""
    if type(found) is not dict or not found or not all(isinstance(key, str) and key.startswith(FLAT) for key in found):
        return found
    made: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for key, value in found.items():
        kind, _, rest = key.partition(".")
        name, _, option = rest.rpartition(".")
        made[kind].setdefault(name, {})[option] = value
    return made
