# SPDX-License-Identifier: Apache-2.0
"""What a pickle of a plain value may name (docs/dcp.md has the list): containers, numbers, texts and bytes of Python,
scalars and arrays of numpy, and of torch tensors, types, sizes, devices and layouts.

Every function here takes the machine and what the pickle gives (a state before the arguments), and builds the value by
itself. It takes the forms that Python, numpy and torch write, and no others: each argument is of exactly one type, and
each size is compared with the bytes that are there. What is copied is charged."""
from __future__ import annotations

import collections
import io
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .pickles_machine import Call, Known, Machine, Name, Refused, shown, unknown

DTYPE = re.compile(r"[biufcSU][0-9]{1,9}")
OTHER_DTYPES = {"O": "object", "M": "datetime64", "m": "timedelta64", "V": "void"}
DEVICE = re.compile(r"[a-z]{1,30}")
MAX_DIMS = 64


class Storage(NamedTuple):
    """The bytes of one or several tensors."""
    dtype: Any                          # None: it is not theirs
    data: Any                           # a tensor of bytes


def want(condition: bool) -> None:
    """Raises what the machine turns into its own sentence."""
    if not condition:
        raise ValueError


def naturals(numbers: object) -> bool:
    return isinstance(numbers, tuple) and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)


# ---- Python's own ----

def _encode(machine: Machine, text: Any, codec: Any) -> bytes:
    """Protocol 2 has no bytes, but a text with a letter for each."""
    want(type(text) is str and codec in ("latin1", "latin-1"))
    machine.charge(len(text))
    return bytes(text.encode("latin1"))


def _bytearray(machine: Machine, data: Any = b"", *codec: Any) -> bytearray:
    if codec:
        data = _encode(machine, data, *codec)
    want(type(data) is bytes)
    machine.charge(len(data))
    return bytearray(data)


def _of_keys(kind: Callable[[Any], Any]) -> Call:
    def made(machine: Machine, items: Any) -> Any:
        want(type(items) is list)
        machine.charge(len(items))
        machine.check_keys(items)
        return kind(items)
    return made


def _complex(machine: Machine, real: Any, imaginary: Any) -> complex:
    want(type(real) is float and type(imaginary) is float)
    return complex(real, imaginary)


def _of_three(kind: Callable[..., Any], *types: type) -> Call:
    def made(machine: Machine, *numbers: Any) -> Any:
        want(len(numbers) == 3 and all(type(number) in types for number in numbers))
        return kind(*numbers)
    return made


def _counter(machine: Machine, counts: Any) -> collections.Counter[Any]:
    want(type(counts) is dict)
    machine.charge(len(counts))
    made: collections.Counter[Any] = collections.Counter()
    dict.update(made, counts)
    return made


def _default(machine: Machine, factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is None:
        return collections.defaultdict(None)
    want(type(factory) is Name)
    if factory.text not in FACTORIES:
        raise unknown(f"a collections.defaultdict of {shown(factory.text)}")
    return collections.defaultdict(FACTORIES[factory.text])


def _deque(machine: Machine, items: Any = (), length: Any = None) -> collections.deque[Any]:
    want(type(items) in (tuple, list) and not items and (length is None or naturals((length,))))
    return collections.deque(maxlen=length)


def _path(kind: Callable[..., Any]) -> Call:
    def path(machine: Machine, *parts: Any) -> Any:
        want(all(type(part) is str for part in parts))
        machine.charge(sum(map(len, parts)))
        return kind(*parts)
    return path


def _bytes_io(machine: Machine, state: Any) -> io.BytesIO:
    data, at, attributes = state
    want(type(data) is bytes and naturals((at,)) and at <= len(data) and attributes is None)
    machine.charge(len(data))
    made = io.BytesIO(data)
    made.seek(at)
    return made


# ---- numpy's ----

def _dtype(machine: Machine, state: Any, text: Any, align: Any, copy: Any) -> Any:
    want(type(text) is str and align is False and copy is True and type(state) is tuple and len(state) >= 8)
    if text[:1] in OTHER_DTYPES or len(state) > 8:
        raise unknown(_other_dtype(text, state))
    version, order, *parts, size, alignment, flags = state
    want(DTYPE.fullmatch(text) is not None)
    want(version == 3 and order in ("<", ">", "|", "="))
    want(parts == [None] * 3 and all(type(number) is int for number in (size, alignment, flags)))
    return np.dtype(order + text)


def _other_dtype(text: str, state: tuple[Any, ...]) -> str:
    """What numpy calls a dtype that is not read here, with the unit of a time and the fields of a struct."""
    word, inner, fields = OTHER_DTYPES.get(text[:1]), state[2], state[3]
    if fields is not None:
        return f"a structured numpy.dtype (fields {shown(', '.join(fields))})"
    if inner is not None:
        return "a numpy.dtype of sub-arrays"
    if word in ("datetime64", "timedelta64"):
        unit, count = state[8][1][:2]
        return f"the numpy.dtype {word}[{'' if count == 1 else int(count)}{shown(unit.decode())}]"
    return f"the numpy.dtype {word}" if word else f"the numpy.dtype {shown(text)} with metadata"


def _items(machine: Machine, data: Any, dtype: Any, shape: Any, fortran: bool) -> Any:
    """An array with memory of its own."""
    want(type(data) in (bytes, bytearray) and isinstance(dtype, np.dtype) and naturals(shape) and len(shape) <= 32)
    want(dtype.itemsize > 0 and math.prod(shape) * dtype.itemsize == len(data))
    machine.charge(len(data))
    if not data:
        return np.empty(shape, dtype)
    if dtype.kind == "U":                                           # numpy looks only when an item is taken
        want(bool((np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder)) <= sys.maxunicode).all()))
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if fortran else "C")


def _scalar(machine: Machine, dtype: Any, data: Any) -> Any:
    if isinstance(dtype, np.dtype) and not dtype.itemsize and data == b"":
        return dtype.type()                                     # numpy.str_("")
    return _items(machine, data, dtype, (1,), False)[0]


def _array(machine: Machine, state: Any, kind: Any, shape: Any, letter: Any) -> Any:
    want(type(kind) is Name and kind.text == "numpy.ndarray" and shape == (0,) and letter == b"b")
    version, shape, dtype, fortran, data = state
    want(version == 1 and type(fortran) is bool)
    return _items(machine, data, dtype, shape, fortran)


def _from_buffer(machine: Machine, data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """An array as protocol 5 has it."""
    want(order in ("C", "F"))
    return _items(machine, data, dtype, shape, order == "F")


# ---- torch's ----

def _size(machine: Machine, sizes: Any) -> Any:
    want(naturals(sizes))
    machine.charge(len(sizes))
    return torch.Size(sizes)


def _device(machine: Machine, kind: Any, *index: Any) -> Any:
    want(type(kind) is str and DEVICE.fullmatch(kind) is not None and len(index) <= 1 and naturals(index))
    return torch.device(kind, *index)


def _check_place(storage: Storage, dtype: Any, offset: Any, size: Any, stride: Any) -> int:
    """Refuses items outside the storage. Gives how many bytes the tensor by itself would have beyond the storage's."""
    want(naturals((offset,)) and naturals(size) and naturals(stride))
    want(len(size) == len(stride) and len(size) <= MAX_DIMS and math.prod(max(n, 1) for n in size) < 1 << 63)
    if 0 in size:
        return 0
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    have = storage.data.numel()
    want((last + 1) * dtype.itemsize <= have)
    return int(max(0, math.prod(size) * dtype.itemsize - have))


def _tensor(machine: Any, storage: Any, dtype: Any, rest: Sequence[Any]) -> Any:
    """rest: offset, size, stride, requires_grad, hooks, and metadata or nothing."""
    offset, size, stride, grad, hooks, *more = rest
    metadata = more[0] if more and more[0] is not None else {}
    want(type(storage) is Storage and isinstance(dtype, torch.dtype) and type(grad) is bool and len(more) <= 1)
    want(_no_hooks(hooks) and type(metadata) is dict and metadata.keys() <= {"conj", "neg"})
    machine.spread(_check_place(storage, dtype, offset, size, stride))
    made = torch.empty(0, dtype=dtype, device=storage.data.device)
    made.set_(storage.data.untyped_storage(), 0 if 0 in size else offset, size, stride)
    if metadata.get("conj") is True:
        made = made.conj()
    if metadata.get("neg") is True:
        made = torch._neg_view(made)
    return made.requires_grad_(grad)


def _no_hooks(hooks: object) -> bool:
    return hooks is None or (type(hooks) is collections.OrderedDict and not hooks)


def _tensor_v2(machine: Any, storage: Any, *rest: Any) -> Any:
    want(type(storage) is Storage)
    return _tensor(machine, storage, storage.dtype, rest)


def _tensor_v3(machine: Any, storage: Any, *rest: Any) -> Any:
    """The dtype comes after offset, size, stride, requires_grad and hooks."""
    return _tensor(machine, storage, rest[5], rest[:5] + rest[6:])


def _parameter(machine: Machine, data: Any, grad: Any, hooks: Any) -> Any:
    want(type(data) is torch.Tensor and type(grad) is bool and _no_hooks(hooks))
    return torch.nn.Parameter(data, grad)


# ---- the tables ----

STORAGES = {"torch.storage.UntypedStorage": None, "torch.FloatStorage": torch.float32,
            "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16,
            "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
            "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
            "torch.BoolStorage": torch.bool, "torch.ComplexFloatStorage": torch.complex64,
            "torch.ComplexDoubleStorage": torch.complex128}
FACTORIES: dict[str, Callable[[], Any]] = {
    "builtins.dict": dict, "builtins.list": list, "builtins.set": set, "builtins.tuple": tuple, "builtins.int": int,
    "builtins.float": float, "builtins.str": str, "builtins.bool": bool, "builtins.bytes": bytes,
    "builtins.complex": complex, "builtins.frozenset": frozenset, "builtins.bytearray": bytearray,
    "collections.OrderedDict": collections.OrderedDict, "collections.Counter": collections.Counter,
    "collections.deque": collections.deque}
LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
CALLS: dict[str, Call] = {
    "_codecs.encode": _encode, "builtins.bytes": lambda _: b"", "builtins.bytearray": _bytearray,
    "builtins.set": _of_keys(set), "builtins.frozenset": _of_keys(frozenset), "builtins.complex": _complex,
    "builtins.range": _of_three(range, int), "builtins.slice": _of_three(slice, int, type(None)),
    "collections.OrderedDict": lambda _: collections.OrderedDict(), "collections.Counter": _counter,
    "collections.defaultdict": _default, "collections.deque": _deque, "pathlib.PosixPath": _path(pathlib.Path),
    "pathlib._local.PosixPath": _path(pathlib.Path), "pathlib.PurePosixPath": _path(pathlib.PurePosixPath),
    "pathlib._local.PurePosixPath": _path(pathlib.PurePosixPath), "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer, "torch.Size": _size, "torch.device": _device,
    "torch.serialization._get_layout": lambda _, word: LAYOUTS[word], "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3, "torch._utils._rebuild_parameter": _parameter}
STATES: dict[str, Call] = {"numpy.dtype": _dtype, "numpy._core.multiarray._reconstruct": _array,
                            "_io.BytesIO": _bytes_io}
KNOWN = Known({f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
              CALLS, STATES, frozenset({*STORAGES, *FACTORIES, "numpy.ndarray"}),
              (np.generic, torch.dtype, torch.device, torch.layout))


# ---- what comes out ----

LEAVES = {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, io.BytesIO, type(pathlib.Path()),
          pathlib.PurePosixPath, np.ndarray, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.layout,
          torch.Size}
ITEMS = {list, tuple, set, frozenset, collections.deque}
PAIRS = {dict, collections.OrderedDict, collections.Counter, collections.defaultdict}


def check(value: Any) -> None:
    """Refuses a value with parts of other types, whatever the tables above let in: a storage without a tensor, a class
    by itself, something that waits for its state."""
    rest, seen = [value], set()
    while rest:
        part = rest.pop()
        kind = type(part)
        if kind in LEAVES or isinstance(part, (np.generic, np.dtype)) or id(part) in seen:
            continue
        if kind not in ITEMS and kind not in PAIRS:
            what = f"the class {shown(part.text)}" if kind is Name else "an object that is not complete"
            raise Refused(f"{what} is where only a value can be")
        seen.add(id(part))
        rest.extend(part)
        if kind in PAIRS:
            rest.extend(part.values())
