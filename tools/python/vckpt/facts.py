# SPDX-License-Identifier: Apache-2.0
"""The facts of a step after its save: pins, tags, attributes. Every call names a step by its path, STORE/RUN/STEP,
STORE/RUN/latest or STORE/RUN/TAG, or is given an open Step: then it fails if another one has its number by now. All
give whether anything has changed, and what others have said meanwhile stays said."""
from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping

from . import _lib, native, paths
from .signatures import Path
from .step import Step, _commit


def set_attributes(step: Path | Step, attributes: Mapping[str, str | float | None]) -> bool:
    """Adds attributes to a step, or gives those that it has other values; the save's own values are kept beneath. None:
    what was set later is unset again."""
    rows = [_lib.Attribute(_lib.text(key, "attribute"), None if value is None else native._attribute(key, value))
            for key, value in attributes.items()]
    return _change(step, attributes=(_lib.Attribute * max(len(rows), 1))(*rows), nattributes=len(rows))


def pin(step: Path | Step, reason: str | None = None) -> bool:
    """No one removes the step, or replaces it, until it is unpinned."""
    return _change(step, pin=1, reason=None if reason is None else _lib.text(reason, "reason"))


def unpin(step: Path | Step) -> bool:
    return _change(step, pin=-1)


def tag(step: Path | Step, *tags: str) -> bool:
    """Names the step, for STORE/RUN/TAG: another step of the run that has one of these loses it, in the same moment."""
    for one in tags:
        if isinstance(one, str) and paths.step_of(one) is not None:
            raise _lib.invalid(f"\"{one}\" cannot be a tag: where a STEP is expected, it means another step")
    return _change(step, tags=_texts(tags), ntags=len(tags))


def untag(step: Path | Step, *tags: str) -> bool:
    """Tags that the step does not have do not matter."""
    return _change(step, untags=_texts(tags), nuntags=len(tags))


def _texts(tags: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    words = [_lib.text(one, "tag") for one in tags]
    return (ctypes.c_char_p * max(len(words), 1))(*words)


def _change(step: Path | Step, **members: object) -> bool:
    change = _lib.FactsChange(size=ctypes.sizeof(_lib.FactsChange), **members)
    if isinstance(step, Step):
        store, run, number = step.store, step.run, step.number
        change.commit = ctypes.pointer(_commit(*step.commit))
    else:
        store, run, number = _named(step)
    return _lib.call("vckpt_facts_change", os.fsencode(store), run.encode(), number, ctypes.byref(change)) == 0


def _named(path: Path) -> tuple[str, str, int]:
    store, run, step = paths.split(path)
    if step is None:
        raise _lib.invalid(f"{os.fspath(path)}: which step? Give STORE/RUN/STEP, STORE/RUN/latest or STORE/RUN/TAG")
    number = paths.latest(path) if step == "latest" else paths.number(store, run, step)
    if number is None:
        raise _lib.NotFound(2, f"{os.fspath(path)}: the run has no step")
    return store, run, number
