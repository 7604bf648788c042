# SPDX-License-Identifier: Apache-2.0
"""The types of what users call, for checkers and editors. Tensors and arrays of any library are Any: none is imported
for this."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack
else:                           # Python 3.10: at run time nothing needs it
    class Unpack:
        def __class_getitem__(cls, options):
            return options

Path = str | os.PathLike[str]
State = Mapping[str, Any]       # {component: tensors, values, modules, optimizers, nested at will}
Attributes = Mapping[str, str | float]
Box = Sequence[slice] | tuple[Sequence[int], Sequence[int]]


class Options(TypedDict, total=False):
    """Options of a saver, given at the first call of a run (docs/python.md)."""
    heartbeat: float
    start_timeout: float
    meet_timeout: float
    deadline: float
    ring_bytes: int
    pin: bool | Literal["auto", "no", "yes"]
    check_replicas: bool | Literal["sample", "full", "off"]
    threads: int
    low_priority: bool
    use_bases: bool
    keep_cached: bool
    warn_free: bool | int
    keep: Mapping[str, Any] | None


class Save(TypedDict, total=False):
    """Arguments of a save of a Saver."""
    mesh: Any
    step: int | None
    attributes: Attributes | None
    base: Path | Iterable[Path] | None
    per_rank: str | Iterable[str]
    replace: bool
    blobs: Mapping[str, Any] | None


class Call(Save, Options, total=False):
    """Arguments of vckpt.save and vckpt.async_save."""
    rank: int | None
    world: int | None
    launch_id: str | None


class Progress(TypedDict):
    bytes_total: int
    bytes_staged: int
    bytes_done: int


__all__ = ["Box", "Call", "Options", "Path", "Progress", "Save", "State", "Unpack"]
