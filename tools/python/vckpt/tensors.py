# SPDX-License-Identifier: Apache-2.0
"""What is a tensor in a state, what it is called, and torch, where the program has imported it: the package never
imports it by itself."""
from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .shard import Shard
from .values_text import KeyPath


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection of cycles within: it goes through all that was made, again and again, a third of the time that a
    walk through many tensors takes, and finds nothing, because a walk makes no cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def torch_module() -> Any:
    """torch, where the program has imported it."""
    return sys.modules.get("torch")


def process_group() -> Any:
    """The module torch.distributed, where torch has a default process group, or None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


@functools.cache
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
    return ".".join(map(str, path[1:])) if len(path) > 1 else path[0]


def shown(path: KeyPath) -> str:
    """A tensor, or what else is there, in a sentence."""
    return path[0] if len(path) == 1 else f"{path[0]}/{dotted(path)}"
