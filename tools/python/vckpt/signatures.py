# SPDX-License-Identifier: Apache-2.0
"""The types of what users call, for checkers and editors. Tensors and arrays of any library are Any: none is imported for this."""
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Union

if sys.version_info >= (3, 11):
    from typing import Unpack
else:                           # checkers know it from typing_extensions; at run time nothing needs it
    try:
        from typing_extensions import Unpack
    except ImportError:
        Unpack = Union[Any, None]

Path = Union[str, "os.PathLike[str]"]
State = Mapping[str, Any]       # {component: tensors, values, modules, optimizers, nested at will}
Box = Union[Sequence[slice], tuple[Sequence[int], Sequence[int]]]


class Options(TypedDict, total=False):
    """Of a saver, given at the first call of a run (docs/python.md)."""
    heartbeat: float
    start_timeout: float
    meet_timeout: float
    deadline: float
    ring_bytes: int
    pin: Union[bool, Literal["auto", "no", "yes"]]
    check_replicas: Union[bool, Literal["sample", "full", "off"]]
    threads: int
    low_priority: bool
    use_bases: bool


class Save(TypedDict, total=False):
    """Of a save of a Saver."""
    mesh: Any
    step: Union[int, None]
    attributes: Union[Mapping[str, Union[str, float]], None]
    base: Union[Path, Iterable[Path], None]
    per_rank: Union[str, Iterable[str]]
    replace: bool
    blobs: Union[Mapping[str, Any], None]


class Call(Save, Options, total=False):
    """Of vckpt.save and vckpt.async_save."""
    rank: Union[int, None]
    world: Union[int, None]
    launch_id: Union[str, None]


class Progress(TypedDict):
    bytes_total: int
    bytes_staged: int
    bytes_done: int


__all__ = ["Box", "Call", "Options", "Path", "Progress", "Save", "State", "Unpack"]
