# SPDX-License-Identifier: Apache-2.0
"""Plain Python values as tagged JSON, and back (docs/format/values.md).

    text = encode(state, tensor=keep, is_tensor=lambda value: isinstance(value, torch.Tensor))
    state = decode(text, types=[Config, Phase], tensor=fetch)

JSON's own values are written as such; everything else is an object with one name that begins with "$", its tag. The
same value gives the same bytes. Nothing is imported or called by a name that is read: a class is used only where the
caller gave it in `types`, matched by `module.qualname`; otherwise the object comes back as a vckpt.Record, which saves
as the same bytes.

Tensors are the caller's: where `is_tensor(value)` says so, `tensor(path, value)` is called and gives the name under
which the tensor is kept, or (name, members) with plain members to keep beside it; decode calls `tensor(path, name,
members)`. A path is a tuple of keys, indices and Attr (fields of records).

What is not kept: identity (an object met twice comes back as two equal ones; a cycle is refused), the bits of a NaN,
attributes set on containers. What cannot be kept is refused by its path: TypeError for its kind, ValueError for its
content. Functions here have no state; any thread may call them."""
from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import functools
import inspect
import io
import pathlib
import types as _types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from . import advice, values_foreign, values_read
from .records import Mesh, Record
from .values_text import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_PLAIN,
    Attr,
    KeyPath,
    Node,
    array,
    container,
    mapping,
    path_text,
    quote,
    refusal,
    render,
)

Keep: TypeAlias = "Callable[[KeyPath, Any], str | tuple[str, dict[str, Any]]]"

__all__ = ["Attr", "MAX_BYTES", "MAX_DEPTH", "Mesh", "Record", "decode", "encode", "path_text"]

VERSION = 1
decode = values_read.decode
PATHS: dict[type, dict[str, str]] = {
    pathlib.PosixPath: {}, pathlib.WindowsPath: {}, pathlib.PurePosixPath: {"pure": "posix"},
    pathlib.PureWindowsPath: {"pure": "windows"}}
FACTORIES = values_read.FACTORIES


def encode(value: Any, *, tensor: Keep | None = None, is_tensor: Callable[[object], bool] | None = None,
           path: KeyPath = (), seen: Callable[[KeyPath, str], None] | None = None) -> bytes:
    """The document, as bytes. `path` is where the value is in the state: hooks and errors see it. seen is called
    with (path, name) for each object of a class that decode has to be given."""
    if (tensor is None) != (is_tensor is None):
        raise TypeError("tensor= and is_tensor= belong together")
    encoder = _Encoder(tensor, is_tensor, seen)
    try:
        node = encoder.node(value, tuple(path))
    except RecursionError:
        raise refusal(path, "nested too deeply for what is left of the stack") from None
    text = (render(mapping([("$vckpt", str(VERSION)), ("value", node)], hug=True)) + "\n").encode()
    if len(text) > MAX_BYTES:
        raise refusal(path, f"{len(text)} bytes of values, at most {MAX_BYTES} are kept: large data belongs in tensors")
    return text


def _float_text(value: float) -> str:
    if value - value == 0:
        return repr(value)
    return '{"$float": "%s"}' % ("nan" if value != value else "inf" if value > 0 else "-inf")


def _int_text(value: int) -> str:
    return str(value) if -MAX_PLAIN <= value <= MAX_PLAIN else f'{{"$int": "{hex(value)}"}}'


def _str_text(value: str) -> str:
    if not value.isascii():
        value.encode()              # UnicodeEncodeError for half of a surrogate pair
    return quote(value)


SCALARS: dict[type, Callable[[Any], str]] = {type(None): lambda _: "null", bool: lambda value: "true" if value
                                             else "false", int: _int_text, float: _float_text, str: _str_text}


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _a(noun: str) -> str:
    return ("an " if noun[:1].lower() in "aeiou" else "a ") + noun


class _Encoder:
    """One document. `open` holds the containers that are being written, to find cycles; `length` is what there is so
    far."""

    def __init__(self, tensor: Keep | None, is_tensor: Callable[[object], bool] | None,
                 seen: Callable[[KeyPath, str], None] | None) -> None:
        self.tensor, self.is_tensor, self.seen = tensor, is_tensor, seen
        self.open: dict[int, KeyPath] = {}
        self.length, self.in_key = 0, 0

    def node(self, value: Any, path: KeyPath) -> Node:
        """The node of any value."""
        scalar = SCALARS.get(type(value))
        if scalar:
            try:
                text = scalar(value)
            except UnicodeEncodeError:
                said = f"the string {ascii(value)[:60]} is not Unicode text (half of a surrogate pair)"
                raise refusal(path, said) from None
            self.count(len(text), path)
            return text
        if id(value) in self.open:
            raise refusal(path, f"refers back to {path_text(self.open[id(value)])}: a cycle cannot be kept")
        if len(self.open) >= MAX_DEPTH:
            raise refusal(path, f"nested more than {MAX_DEPTH} deep")
        self.open[id(value)] = path
        try:
            self.count(2, path)
            handler = PLAIN.get(type(value))
            return handler(self, value, path) if handler else self.other(value, path)
        finally:
            del self.open[id(value)]

    def count(self, length: int, path: KeyPath) -> None:
        self.length += length
        if self.length > MAX_BYTES:
            raise refusal(path, f"more than {MAX_BYTES} bytes of values up to here: large data belongs in tensors")

    # -- containers --

    def items(self, values: Iterable[Any], path: KeyPath) -> Node:
        return array([self.node(value, (*path, number)) for number, value in enumerate(values)])

    def of_items(self, items: Iterable[tuple[str, Any]], path: KeyPath, kind: type[Attr] | None = None,
                 hug: bool = False) -> Node:
        entries = [(f"{self.node(name, path)}: ", self.node(value, (*path, kind(name) if kind else name)))
                   for name, value in items]
        return container("{", "}", entries, hug)

    def dict(self, value: dict[Any, Any], path: KeyPath) -> Node:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return self.of_items(value.items(), path)
        return self.pairs("$dict", value, path)

    def pairs(self, tag: str, value: Mapping[Any, Any], path: KeyPath, **members: Any) -> Node:
        entries: list[Node] = []
        texts: set[str] = set()
        for key, item in value.items():
            node = self.key(key, path, texts)
            entries.append(array([node, self.node(item, (*path, key))], hug=True))
        return self.tagged(tag, array(entries), path, members)

    def key(self, key: Any, path: KeyPath, texts: set[str]) -> Node:
        """A key of a dict or an element of a set: no tensors, and none that reads like another."""
        self.in_key += 1
        try:
            node = self.node(key, (*path, key))
        finally:
            self.in_key -= 1
        text = render(node)
        if text in texts and '"nan"' not in text:
            raise refusal(path, f"two keys that would both be read as {text[:60]}")
        texts.add(text)
        return node

    def set(self, value: Any, path: KeyPath) -> Node:
        texts: set[str] = set()
        kinds = {type(item) for item in value}
        ordered = sorted(value) if kinds in ({int}, {str}) else value
        nodes = [self.key(item, path, texts) for item in ordered]
        if ordered is value:
            nodes.sort(key=render)
        return self.tagged("$set" if type(value) is set else "$frozenset", array(nodes), path)

    def tagged(self, tag: str, node: Node, path: KeyPath, members: Mapping[str, Any] | None = None) -> Node:
        pairs = [(tag, node)] + [(name, self.node(value, path)) for name, value in (members or {}).items()]
        self.count(sum(len(name) + 4 for name, _ in pairs), path)
        return mapping(pairs, hug=len(pairs) == 1)

    def simple(self, tag: str, content: Any, path: KeyPath, **members: Any) -> Node:
        return self.tagged(tag, self.node(content, path), path, members)

    # -- leaves --

    def datetime(self, value: Any, path: KeyPath) -> Node:
        zone = getattr(value, "tzinfo", None)
        if (zone is not None and type(zone) is not datetime.timezone) or getattr(value, "fold", False):
            raise refusal(path, "a time in a named zone cannot be kept: use UTC or a fixed offset", TypeError)
        return self.simple("$" + type(value).__name__, value.isoformat(), path)

    def defaultdict(self, value: Any, path: KeyPath) -> Node:
        factory = value.default_factory
        name = next((name for name, known in FACTORIES.items() if known is factory), None)
        if name is None and factory is not None:
            raise refusal(path, f"a defaultdict of {getattr(factory, '__name__', 'a function')} cannot be kept: "
                          f"only of {', '.join(FACTORIES)}", TypeError)
        return self.pairs("$defaultdict", value, path, factory=name)

    def deque(self, value: Any, path: KeyPath) -> Node:
        return self.tagged("$deque", self.items(value, path), path,
                           {} if value.maxlen is None else {"maxlen": value.maxlen})

    def mesh(self, value: Mesh, path: KeyPath) -> Node:
        tag, content, members = values_foreign.describe_mesh(value)
        return self.simple(tag, content, path, **members)

    # -- everything that is not of a plain type --

    def other(self, value: Any, path: KeyPath) -> Node:
        if self.is_tensor is not None and self.is_tensor(value):
            return self.reference(value, path)
        try:
            described = values_foreign.describe(value)
        except ValueError as error:
            raise refusal(path, str(error) + advice.of_value(value), TypeError) from None
        if described:
            tag, content, members = described
            return self.simple(tag, content, path, **members)
        if isinstance(value, enum.Enum):
            self.saw(value, path)
            return self.simple("$enum", _type_name(type(value)), path, name=value.name, value=value.value)
        return self.fields_of(value, path)

    def saw(self, value: Any, path: KeyPath) -> None:
        if self.seen:
            self.seen(path, _type_name(type(value)))

    def fields_of(self, value: Any, path: KeyPath) -> Node:
        cls = type(value)
        like = values_foreign.PLACEMENT_LIKE.get(cls.__name__)
        if like and all(hasattr(value, name) for name in like):
            fields = {name: getattr(value, name) for name in like}
        elif (isinstance(value, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
              and len(cls._fields) == len(value)):
            fields = dict(zip(cls._fields, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = _dataclass_fields(value, path)
        elif cls in (argparse.Namespace, _types.SimpleNamespace):
            fields = vars(value)
        elif cls is io.BytesIO and not value.closed:
            return self.record(values_read.BYTES_IO, {"data": value.getvalue(), "position": value.tell()}, path)
        else:
            raise refusal(path, _what(value) + " cannot be kept" + advice.of_value(value), TypeError)
        if cls not in (argparse.Namespace, _types.SimpleNamespace):
            self.saw(value, path)
        return self.record(_type_name(cls), fields, path)

    def record(self, type_name: str, fields: Mapping[str, Any], path: KeyPath) -> Node:
        for name in fields:
            if type(name) is not str or name.startswith("$"):
                raise refusal(path, f"a field called {str(name)[:60]!r} cannot be kept")
        inner = self.of_items(fields.items(), path, Attr)
        self.count(24 + len(type_name), path)
        return mapping([("$record", self.node(type_name, path)), ("fields", inner)], hug=True)

    def again(self, value: Record, path: KeyPath) -> Node:
        """Writes a Record as what it was read from."""
        fields = dict(value.items())
        if value.tag == "$record":
            return self.record(value.type_name, fields, path)
        if value.tag == "$enum":
            return self.simple("$enum", value.type_name, path, **fields)
        content = fields.pop("name" if value.tag == "$tensor" else "value")
        if value.tag == "$tensor" and self.in_key:
            raise refusal(path, "a tensor in a key or a set cannot be kept", TypeError)
        return self.simple(value.tag, content, path, **fields)

    def reference(self, value: Any, path: KeyPath) -> Node:
        if self.in_key:
            raise refusal(path, f"{_what(value)} in a key or a set cannot be kept: give a list, or a dict with the "
                                "tensors as its values", TypeError)
        kept = self.tensor(path, value) if self.tensor is not None else ""
        if type(kept) is str and 0 < len(kept) < 64 and kept.isascii():      # nearly all of them, and on one line
            return f'{{"$tensor": {self.node(kept, path)}}}'
        name, members = kept if isinstance(kept, tuple) else (kept, {})
        if type(name) is not str or not name or {"name",
                                                 *(key for key in members if key.startswith("$"))} & members.keys():
            raise TypeError("tensor= gives a name, or a name and members (not called \"name\" or \"$...\")")
        return self.simple("$tensor", name, path, **members)


PLAIN: dict[type, Callable[[_Encoder, Any, KeyPath], Node]] = {
    list: _Encoder.items,
    tuple: lambda self, value, path: self.tagged("$tuple", self.items(value, path), path),
    dict: _Encoder.dict,
    set: _Encoder.set,
    frozenset: _Encoder.set,
    **dict.fromkeys((bytes, bytearray), lambda self, value, path: self.simple(
        f"${type(value).__name__}", base64.b64encode(value).decode(), path)),
    complex: lambda self, value, path: self.tagged("$complex", self.items([value.real, value.imag], path), path),
    **dict.fromkeys((range, slice), lambda self, value, path: self.tagged(
        f"${type(value).__name__}", self.items([value.start, value.stop, value.step], path), path)),
    collections.OrderedDict: lambda self, value, path: self.pairs("$ordereddict", value, path),
    collections.Counter: lambda self, value, path: self.pairs("$counter", value, path),
    collections.defaultdict: _Encoder.defaultdict,
    collections.deque: _Encoder.deque,
    **dict.fromkeys((datetime.datetime, datetime.date, datetime.time), _Encoder.datetime),
    datetime.timedelta: lambda self, value, path: self.tagged(
        "$timedelta", self.items([value.days, value.seconds, value.microseconds], path), path),
    Record: _Encoder.again,
    Mesh: _Encoder.mesh,
    **dict.fromkeys(PATHS, lambda self, value, path: self.simple("$path", value.as_posix(), path,
                                                                 **PATHS[type(value)])),
}


def _dataclass_fields(value: Any, path: KeyPath) -> dict[str, Any]:
    cls = type(value)
    if isinstance(value, (dict, list, tuple, set, frozenset, str, bytes, int, float, BaseException)):
        raise refusal(path, f"{_what(value)} cannot be kept: a dataclass over {cls.__mro__[-2].__name__}: give "
                            "dataclasses.asdict() of it", TypeError)
    fields = {}
    for field in dataclasses.fields(value):
        try:
            fields[field.name] = getattr(value, field.name)
        except AttributeError:
            raise refusal((*path, Attr(field.name)), "the field has no value") from None
    for name in getattr(value, "__dict__", {}):
        if name not in fields and not isinstance(inspect.getattr_static(cls, name, None), functools.cached_property):
            raise refusal((*path, Attr(name)), f"is not a field of {_type_name(cls)}, and would be lost")
    return fields


def _what(value: object) -> str:
    """"a function", "a Thread (threading.Thread)", for a sentence."""
    cls = type(value)
    if isinstance(value, type):
        return f"the class {_type_name(value)}"
    if cls.__module__ == "builtins":
        noun = "built-in function" if cls.__name__ == "builtin_function_or_method" else cls.__name__
        return _a(noun)
    plain = next((base.__name__ for base in cls.__mro__[1:] if base in SCALARS or base in PLAIN), None)
    return _a(cls.__name__) + f" ({_type_name(cls)}{', a kind of ' + plain if plain else ''})"
