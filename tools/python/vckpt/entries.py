# SPDX-License-Identifier: Apache-2.0
"""The description of one tensor for the library: an entry, made once and used again while the tensor looks the same;
and the file of a tensor that a rank keeps by itself."""
from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _lib, advice, meshes
from .meshes import SaveMesh
from .shard import NUMPY_DTYPES, Entry, Layout, NumpyEntry, Refused, Shard, ShardEntry, said
from .tensors import is_tensor, torch_state
from .values_text import KeyPath

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    if adapter.is_dtensor(tensor):
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
        words = ",".join(torch_state().word(placement, path, len(shape)) for placement in words)
    native = mesh[2] if mesh and not shard.alone else None
    own = meshes.given(shard.mesh, "Shard: mesh")
    if own is not None:
        whole = (mesh[:2] if mesh else meshes.array_of(torch_state().root_of(shard.mesh))
                 if type(shard.mesh).__name__ == "DeviceMesh" else None)
        names, ranks, before = meshes.placed(whole, own)        # a slice: the same along the dimensions that it lacks
        words = words and ",".join(["R"] * before + [words])
        if before and (shard.flat is not None or shard.boxes is not None):
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
    if adapter.is_dtensor(value):
        raise Refused(path, "a DTensor is a tensor of all ranks: it cannot be kept by one rank alone")
    word, array = adapter.to_numpy_bytes(value, path)
    numpy_word = next((name for name, ours in NUMPY_DTYPES.items() if ours == word
                       and hasattr(np, name + "_" * (name == "bool"))), None)
    return word, npy_bytes(array.view(np.dtype(numpy_word)) if numpy_word else array)
