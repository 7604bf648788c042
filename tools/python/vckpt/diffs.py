# SPDX-License-Identifier: Apache-2.0
"""What is different between two open steps, as the library finds it (vckpt.h, "differences")."""
from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, NamedTuple

from . import _lib

if TYPE_CHECKING:
    from .step import BlobInfo, Step, TensorInfo

CHANGES = ("added", "removed", "retyped", "reshaped", "changed")


class Values(NamedTuple):
    """How the values of a tensor changed, from A to B. The parts of a complex number are two values."""
    changed: int            # values whose bits differ
    max: float              # of |B - A|, where both are finite, as below
    rms: float              # of B - A over all values of the tensor
    relative: float         # the norm of B - A by that of A, in pieces that differ; may be inf
    nan: tuple[int, int]    # values of A and of B that are NaN, in pieces that differ
    inf: tuple[int, int]    # that are infinite


class Difference(NamedTuple):
    """A tensor or a file that is different. a, b: what each step has of it, None: nothing."""
    change: str             # added, removed, retyped, reshaped, changed
    component: str | None   # None: a file (blob)
    name: str
    a: TensorInfo | BlobInfo | None
    b: TensorInfo | BlobInfo | None
    values: Values | None   # of a tensor that changed, if they were asked for


def differences(a: Step, b: Step, component: str | None, values: bool) -> list[Difference]:
    options = _lib.DiffOptions(ctypes.sizeof(_lib.DiffOptions), None if component is None else _lib.text(
        component, "component"), _lib.DIFF_VALUES if values else 0)
    pointer, row, found = c_void_p(), _lib.DiffRow(), []
    _lib.call("vckpt_diff_steps", a._at(), b._at(), byref(options), byref(pointer))
    try:
        for number in range(_lib.lib().vckpt_diff_count(pointer)):
            _lib.lib().vckpt_diff_row(pointer, number, byref(row))
            found.append(_difference(a, b, row, values))
    finally:
        _lib.lib().vckpt_diff_free(pointer)
    return found


def _difference(a: Step, b: Step, row: _lib.DiffRow, values: bool) -> Difference:
    change, tensor = CHANGES[row.change], row.component is not None
    sides = [None if number < 0 else step._described(number) if tensor else step._blob_described(number)
             for step, number in ((a, row.a), (b, row.b))]
    measured = Values(row.changed, row.max, row.rms, row.relative, (row.nan_a, row.nan_b), (row.inf_a, row.inf_b))
    return Difference(change, row.component.decode() if tensor else None,
                      ctypes.string_at(row.name, row.name_len).decode(), sides[0], sides[1],
                      measured if values and tensor and change == "changed" else None)
