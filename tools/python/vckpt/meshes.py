# SPDX-License-Identifier: Apache-2.0
"""Meshes as the library has them, from what callers give: words, torch's DeviceMesh, a stored Mesh; and the place of a
mesh of some dimensions in the mesh of the whole save.

The rule for a tensor on a slice of a mesh (`mesh["tp"]` of dp,tp: each data-parallel replica has a device mesh of its
own) is that of a plain tensor: over the dimensions of the save's mesh that its own mesh leaves out it is replicated.
Pure functions of names and ranks; what they make is kept for ever, for a program has few meshes."""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import _lib

if TYPE_CHECKING:
    from numpy.typing import NDArray

Ranks: TypeAlias = "NDArray[np.int64]"
NamedRanks: TypeAlias = "tuple[list[str], Ranks]"
SaveMesh: TypeAlias = "tuple[list[str], Ranks, _lib.Mesh]"

_native: dict[tuple[str, tuple[int, ...] | None], _lib.Mesh] = {}        # (words, ranks) -> _lib.Mesh


def native(words: str, ranks: Iterable[int] | None = None) -> _lib.Mesh:
    key = words, None if ranks is None else tuple(ranks)
    if key not in _native:
        _native[key] = _lib.Mesh(words, ranks)
    return _native[key]


def named(names: Iterable[str], ranks: Ranks) -> _lib.Mesh:
    """The mesh of these dimension names and this array of ranks."""
    ranks = np.asarray(ranks)
    words = ",".join(f"{name}={size}" for name, size in zip(names, ranks.shape))
    return native(words, tuple(int(r) for r in ranks.reshape(-1)))


def dimension_names(mesh_names: Iterable[object] | None, ndim: int) -> list[str]:
    """Names that the library takes: torch's, with what it does not allow as `_`; d0, d1 ... where there are none."""
    names = ([re.sub(r"[^A-Za-z0-9_]", "_", str(name)) for name in mesh_names] if mesh_names
             else [f"d{i}" for i in range(ndim)])
    names = [name if re.match(r"[A-Za-z_]", name) else "d" + name for name in names]
    return [name if names.index(name) == i else f"{name}_{i}" for i, name in enumerate(names)]


def array_of(mesh: Any) -> NamedRanks:
    """(names, ranks as an array) of a DeviceMesh or of anything with `mesh` and `mesh_dim_names`."""
    ranks = mesh.mesh
    ranks = np.array(ranks.tolist() if hasattr(ranks, "tolist") else ranks, dtype=np.int64)
    return dimension_names(mesh.mesh_dim_names, ranks.ndim), ranks


def given(mesh: Any, what: str = "mesh") -> NamedRanks | None:
    """(names, array) of what a caller may give as a mesh; None stays None."""
    if mesh is None:
        return None
    if isinstance(mesh, str):
        mesh = native(mesh)
    elif isinstance(mesh, (tuple, list)) and len(mesh) == 2 and isinstance(mesh[0], str):
        mesh = native(mesh[0], mesh[1])
    if isinstance(mesh, _lib.Mesh):
        return list(mesh.names), np.array(mesh.ranks, dtype=np.int64).reshape(mesh.sizes)
    if hasattr(mesh, "mesh") and hasattr(mesh, "mesh_dim_names"):
        return array_of(mesh)
    raise _lib.invalid(f"{what}: expected a DeviceMesh, 'dp=2,tp=4' or ('dp=2,tp=4', ranks), not {type(mesh).__name__}")


def within(whole: NamedRanks, part: NamedRanks) -> tuple[list[str], Ranks, int] | None:
    """`part` (names, ranks; a group of `whole` along some of its dimensions, in whatever order or flattening) repeated
    over the others: (names, ranks, how many dimensions come before those of part), or None where it is no such
    group."""
    names, ranks = whole
    part_names, part_ranks = part
    place = {int(rank): at for at, rank in np.ndenumerate(ranks)}
    flat = [int(rank) for rank in part_ranks.reshape(-1)]
    if not flat or any(rank not in place for rank in flat):
        return None
    at = np.array([place[rank] for rank in flat]).reshape(len(flat), ranks.ndim)
    varies = [d for d in range(ranks.ndim) if (at[:, d] != at[0, d]).any()]
    rest = [d for d in range(ranks.ndim) if d not in varies]
    if int(np.prod([ranks.shape[d] for d in varies], dtype=np.int64)) != len(flat):
        return None
    groups = ranks.transpose(rest + varies)                       # [others..., the group's own order]
    index: tuple[Any, ...] = (Ellipsis, *(at[:, d] for d in varies))
    full = groups[index] if varies else groups[..., None]
    rest = [d for d in rest if ranks.shape[d] > 1]
    full = full.reshape([ranks.shape[d] for d in rest] + list(part_ranks.shape))
    return dimension_names([names[d] for d in rest] + list(part_names), full.ndim), full, len(rest)


def placed(whole: NamedRanks | None, part: NamedRanks) -> tuple[list[str], Ranks, int]:
    """`within` a whole that has other ranks, too; else `part` as it is."""
    found = within(whole, part) if whole is not None and {*whole[1].flat} != {*part[1].flat} else None
    return found or (*part, 0)
