# SPDX-License-Identifier: Apache-2.0
"""What to do about a value that cannot be kept, as the end of a sentence that names it; and where a state is a part of
itself. Nothing is imported: an object of a library can occur only where the library is in sys.modules."""
from __future__ import annotations

import decimal
import fractions
import io
import random
import sys
import types
import uuid
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

from .values_text import KeyPath, path_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = (bool, int, float, complex, str, bytes, bytearray, dict, list, tuple, set, frozenset)
LEAVE_OUT = "leave it out, the program sets it again when it restarts"
PLAIN = "leave it out, or give the same as plain values"
# the first that fits counts
ADVICE: list[tuple[Any, str]] = [
    (type, "give its name"),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType), LEAVE_OUT),
    (random.Random, "give its getstate(), with per_rank= where ranks differ"),
    ((decimal.Decimal, fractions.Fraction, uuid.UUID), "give its str()"),
    (io.BytesIO, "give one that is open, and no subclass of it"),
    (memoryview, "give bytes() of it"),
    *((kind, f"give {kind.__name__}() of it") for kind in KINDS),
    (Mapping, "give dict() of it"),
    (Iterator, "give how far it is, as a number"),
    ((KeysView, ValuesView, ItemsView, Sequence), "give list() of it"),
    (BaseException, PLAIN),
]
OF_LIBRARIES = [
    (f"{__package__}.lazy", "LazyTensor", "give its numpy() or its torch()"),
    ("numpy.random", "Generator", "give its bit_generator.state, with per_rank= where ranks differ"),
    ("numpy.random", "RandomState", "give its get_state(legacy=False), with per_rank= where ranks differ"),
    ("numpy", "generic", "give it as another dtype"),
    ("torch.utils.data", "DataLoader", "it has no state of its own: give epoch and position of its sampler, or use "
                                       "torchdata's StatefulDataLoader, with per_rank="),
]
BY_MODULE = {"functools": LEAVE_OUT, "builtins": PLAIN}
OTHERWISE = "give what it holds as plain values, or a state_dict() that does"


def of_library(value: object) -> str | None:
    """What to do about an object of a library. None is imported for it."""
    kinds = ((getattr(sys.modules.get(module), name, None), what) for module, name, what in OF_LIBRARIES)
    return next((what for kind, what in kinds if kind and isinstance(value, kind)), None)


def of_value(value: object) -> str:
    """": give …", the end of a sentence."""
    found = of_library(value) or next((what for kind, what in ADVICE if isinstance(value, kind)), None)
    return f": {found or BY_MODULE.get(type(value).__module__, OTHERWISE)}"


def of_array(array: NDArray[Any]) -> str:
    """What to do about a numpy array of a dtype or class that is not kept."""
    numpy = sys.modules["numpy"]
    if isinstance(array, numpy.ma.MaskedArray):
        return "give its data and its mask"
    if type(array) is not numpy.ndarray:
        return "give numpy.asarray() of it"
    if array.dtype.fields:
        return "give its fields, one by one"
    if array.dtype.kind in "mM":
        return "give view('int64') of it, and the dtype beside it"
    return "give it as another dtype" if array.dtype.kind in "fc" else "give its tolist()"


_named: set[str] = set()                # classes


def name_classes(found: Mapping[str, KeyPath]) -> None:
    """Prints a line for each class, once: a restart has to be given it. found: {name: where it was met first}."""
    for name in found.keys() - _named:
        _named.add(name)
        print(f"vckpt: {path_text(found[name])} is a {name}, which goes back to where it was only with "
              f"vckpt.load(..., types=[{name.rpartition('.')[2]}])", file=sys.stderr, flush=True)


def cycle(root: object, path: KeyPath) -> KeyPath | None:
    """The path at which a state is one of its own parents again, or None. Goes through dicts, lists and tuples."""
    open_, stack = set(), [(root, path, False)]
    while stack:
        value, at, leave = stack.pop()
        if leave:
            open_.discard(id(value))
            continue
        if not isinstance(value, (dict, list, tuple)):
            continue
        if id(value) in open_:
            return at
        open_.add(id(value))
        stack.append((value, at, True))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        stack += [(item, (*at, key), False) for key, item in items]
    return None
