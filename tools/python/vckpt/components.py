# SPDX-License-Identifier: Apache-2.0
"""The components of a state. `save(run, {"model": model, "lr": 0.1})` names them; `save(run, model.state_dict())` does
not: that is the state dict of one thing, and becomes the component `model`.

A state dict is what Module.state_dict() returned (torch marks it with `_metadata`), whatever it holds, or any dict of
nothing but tensors, with two names or more, or with a dot in its only name. One tensor under a name without dots is a
component by itself, and so is each tensor beside other things: {"temperature": tensor, "lr": 0.1}. With a dot in its
name it is refused there: that is a state dict with other things put into it, which would become a component for each
parameter."""
from __future__ import annotations

import collections
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import _lib
from .shard import Refused

ALONE = "model"         # the component that a state dict by itself becomes
DICTS = (dict, collections.OrderedDict)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def named(state: Mapping[str, Any], patterns: tuple[str, ...],
          is_tensor: Callable[[object], bool]) -> Mapping[str, Any]:
    """{component: value} of the state that a save was given. patterns: per_rank's, over the names of components."""
    if getattr(state, "_metadata", None) is not None or _is_flat(state, patterns, is_tensor):
        return {ALONE: state if type(state) in DICTS else dict(state)}
    return state


def _is_flat(state: Mapping[str, Any], patterns: tuple[str, ...], is_tensor: Callable[[object], bool]) -> bool:
    if not state or not all(isinstance(name, str) and is_tensor(value) for name, value in state.items()):
        return False
    # the caller names components
    if any(fnmatch.fnmatchcase(name, pattern) for name in state for pattern in patterns):
        return False
    return len(state) > 1 or "." in next(iter(state))


def check(name: str, value: Any, is_tensor: Callable[[object], bool]) -> None:
    """Refuses a name that no component can have."""
    if not NAME.fullmatch(_lib.text(name, "component").decode()):
        raise Refused((name,), "cannot be the name of a component: expected [A-Za-z0-9_][A-Za-z0-9._-]*, at most 64 "
                               "bytes")
    if "." in name and is_tensor(value):
        raise Refused((name,), "a tensor with a dot in its name belongs to a state dict: give that dict as one "
                               "component: {\"model\": state_dict, ...}")
