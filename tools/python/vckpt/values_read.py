# SPDX-License-Identifier: Apache-2.0
"""Reading tagged JSON (docs/format/values.md): the other half of values.py.

What is read may be hostile: every tag checks the kind of its content and the names of its members, depth and size are
bounded before anything recurses or is allocated, and each complaint is a ValueError with the path. Classes are those
that the caller gave; no name that is read reaches an import, an attribute or a call."""
from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import dataclasses
import datetime
import enum
import io
import pathlib
import re
import types as _types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from . import values_foreign
from .records import Record
from .values_text import MAX_DEPTH, MAX_PLAIN, SURROGATE, Attr, KeyPath, Odd, Pairs, parse, refusal

Types: TypeAlias = "Iterable[type] | Mapping[str, type]"
Fetch: TypeAlias = "Callable[[KeyPath, str, dict[str, Any]], Any]"

VERSION = 1
BYTES_IO = "io.BytesIO"
HEX = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
TYPE_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
FACTORIES = {"dict": dict, "list": list, "set": set, "tuple": tuple, "int": int, "float": float, "str": str,
             "bool": bool, "bytes": bytes, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter,
             "deque": collections.deque}


def decode(data: Any, *, types: Types = (), tensor: Fetch | None = None, path: KeyPath = ()) -> Any:
    """The value of a document. `types`: classes (dataclasses, enums, named tuples, placements) that come back as
    themselves, or a dict from the names that they had to what they are now. Without `tensor` a reference comes back as
    a Record."""
    decoder = _Decoder(_by_name(types), tensor)
    document = parse(data)
    if type(document) is not Pairs or "$vckpt" not in dict(document):
        raise ValueError('values: not a document of values (no "$vckpt")')
    members = dict(document)
    version = members["$vckpt"]
    if type(version) is not int or version != VERSION:
        shown = version if type(version) is int else "of no known form"
        raise ValueError(f"values: version {shown}, this reader knows {VERSION}")
    if len(document) != 2 or members.keys() != {"$vckpt", "value"}:
        raise ValueError('values: a document has the members "$vckpt" and "value"')
    try:
        return decoder.value(members["value"], tuple(path), 0)
    except RecursionError:
        raise ValueError("values: nested too deeply for what is left of the stack") from None


def _by_name(types: Types) -> dict[str, type]:
    if isinstance(types, type) or not isinstance(types, Iterable):
        raise TypeError(f"types= takes a list of classes, not {types!r}")
    given = types if isinstance(types, Mapping) else list(types)
    pairs = (list(given.items()) if isinstance(given, Mapping)
             else [(f"{c.__module__}.{c.__qualname__}", c) for c in given if isinstance(c, type)])
    if len(pairs) != len(given):
        raise TypeError("types= takes classes")
    known: dict[str, type] = {}
    for name, cls in pairs:
        if not isinstance(cls, type) or _kind(cls) is None:
            raise TypeError(f"types=: {cls!r} is neither a dataclass nor an enum nor a named tuple")
        if known.setdefault(name, cls) is not cls:
            raise ValueError(f"types=: two classes are called {name}: give one of them")
    return known


def _kind(cls: type) -> str | None:
    if issubclass(cls, enum.Enum):
        return "enum"
    if cls.__name__ in values_foreign.PLACEMENT_LIKE:
        return "placement"
    if issubclass(cls, tuple):
        return "namedtuple" if isinstance(getattr(cls, "_fields", None), tuple) else None
    return "dataclass" if dataclasses.is_dataclass(cls) else None


def _is_plain_reference(node: Any) -> bool:
    """Is it a tensor by a name that needs no further look? Most of what there is are such."""
    if type(node) is not Pairs or len(node) != 1:
        return False
    tag, name = node[0]
    return tag == "$tensor" and type(name) is str and name.isascii() and name != ""


class _Decoder:
    def __init__(self, types: dict[str, type], tensor: Fetch | None) -> None:
        self.types, self.tensor = types, tensor

    def value(self, node: Any, path: KeyPath, depth: int) -> Any:
        kind = type(node)
        if node is None or kind is bool or kind is int or kind is float:
            return node
        if kind is str:
            return self.text(node, path)
        if depth >= MAX_DEPTH:
            raise refusal(path, f"nested more than {MAX_DEPTH} deep")
        if kind is list:
            return self.items(node, path, depth)
        if kind is Pairs and len(node) == 1 and node[0][0] == "$tensor":        # most of what there is
            return self.reference(node[0][1], {}, path, depth)
        if kind is Odd:
            raise refusal(path, f"the number {node.text} is not in the form that a writer gives it")
        members = dict(node)
        self.text("".join(members), path)
        if len(members) < len(node):
            twice = collections.Counter(name for name, _ in node).most_common(1)[0][0]
            raise refusal(path, f"the name {twice[:60]!r} is given twice")
        tags = [name for name in members if name.startswith("$")]
        if tags:
            return self.tagged(tags, members, path, depth)
        if self.tensor is not None or depth + 1 >= MAX_DEPTH:
            return {name: self.value(item, (*path, name), depth + 1) for name, item in members.items()}
        return {name: Record("tensor", {"name": item[0][1]}, "$tensor") if _is_plain_reference(item)
                else self.value(item, (*path, name), depth + 1) for name, item in members.items()}

    def text(self, text: str, path: KeyPath) -> str:
        if not text.isascii() and SURROGATE.search(text):
            raise refusal(path, "a string that is not Unicode text (half of a surrogate pair)")
        return text

    def items(self, node: Any, path: KeyPath, depth: int) -> list[Any]:
        if type(node) is not list:
            raise refusal(path, "expected a list")
        return [self.value(item, (*path, number), depth + 1) for number, item in enumerate(node)]

    def tagged(self, tags: list[str], members: dict[str, Any], path: KeyPath, depth: int) -> Any:
        tag = tags[0]
        if len(tags) > 1:
            raise refusal(path, f"two tags, {tag[:40]!r} and {tags[1][:40]!r}")
        content = members.pop(tag)
        if tag == "$tensor":
            return self.reference(content, members, path, depth)
        if tag in values_foreign.RESTORE:
            return self.foreign(tag, content, members, path, depth)
        if tag not in TAGS:
            raise refusal(path, f"the unknown tag {tag[:40]!r}: written by a later version?")
        handler, needed, optional = TAGS[tag]
        self.check_members(tag, members, needed, optional, path)
        try:
            return handler(self, content, path, depth, **members)
        except _Malformed as error:
            raise refusal(path, f"{tag}: {error}") from None

    def check_members(self, tag: str, members: dict[str, Any], needed: set[str], optional: set[str],
                      path: KeyPath) -> None:
        wrong = needed - members.keys() or members.keys() - needed - optional
        if wrong:
            name = min(wrong)
            raise refusal(path, f"{tag}: the member {name[:40]!r} is {'missing' if name in needed else 'unknown'}")

    def foreign(self, tag: str, content: Any, members: dict[str, Any], path: KeyPath, depth: int) -> Any:
        function, needed, optional = values_foreign.RESTORE[tag]
        self.check_members(tag, members, needed, optional, path)
        content = self.value(content, path, depth + 1)
        members = {name: self.value(item, path, depth + 1) for name, item in members.items()}
        try:
            return function(content, **members)
        except values_foreign.Missing:
            return Record(tag[1:], {"value": content, **members}, tag)
        except ValueError as error:
            raise refusal(path, f"{tag}: {error}") from None

    def reference(self, name: Any, members: dict[str, Any], path: KeyPath, depth: int) -> Any:
        if type(name) is not str or not self.text(name, path) or "name" in members:
            raise refusal(path, "$tensor: the name of a tensor is a string")
        if members:
            members = {key: self.value(item, path, depth + 1) for key, item in members.items()}
        return (self.tensor(path, name, members) if self.tensor
                else Record("tensor", {"name": name, **members}, "$tensor"))

    # -- containers --

    def pairs(self, content: Any, path: KeyPath, depth: int) -> list[tuple[Any, Any]]:
        """[[key, value], ...] as a list of tuples, no key twice."""
        _want(type(content) is list, "expected a list of pairs")
        found: list[tuple[Any, Any]] = []
        seen: set[Any] = set()
        for pair in content:
            if type(pair) is not list or len(pair) != 2:
                raise _Malformed("an entry is not a pair")
            key = self.key(pair[0], path, depth, seen)
            found.append((key, self.value(pair[1], (*path, key), depth + 1)))
        return found

    def key(self, node: Any, path: KeyPath, depth: int, seen: set[Any]) -> Any:
        key = self.value(node, path, depth + 1)
        try:
            if key in seen:
                raise _Malformed("a key is given twice")
            seen.add(key)
        except (TypeError, ValueError):
            raise _Malformed(f"a {type(key).__name__} that cannot be a key") from None
        return key

    def elements(self, content: Any, path: KeyPath, depth: int) -> set[Any]:
        _want(type(content) is list, "expected a list")
        seen: set[Any] = set()
        for item in content:
            self.key(item, path, depth, seen)
        return seen

    def defaultdict(self, content: Any, path: KeyPath, depth: int, factory: Any) -> collections.defaultdict[Any, Any]:
        _want(factory is None or (type(factory) is str and factory in FACTORIES), "unknown factory")
        return collections.defaultdict(None if factory is None else FACTORIES[factory],
                                       self.pairs(content, path, depth))

    def counter(self, content: Any, path: KeyPath, depth: int) -> collections.Counter[Any]:
        counter: collections.Counter[Any] = collections.Counter()
        for key, count in self.pairs(content, path, depth):
            dict.__setitem__(counter, key, count)
        return counter

    def deque(self, content: Any, path: KeyPath, depth: int, maxlen: Any = None) -> collections.deque[Any]:
        items = self.items(content, path, depth)
        _want(maxlen is None or (type(maxlen) is int and len(items) <= maxlen), "maxlen is smaller than the deque")
        return collections.deque(items, maxlen)

    # -- leaves --

    def large(self, content: Any, path: KeyPath, depth: int) -> int:
        _want(type(content) is str and HEX.fullmatch(content), "not a hexadecimal number")
        value = int(content, 16)
        _want(abs(value) > MAX_PLAIN, "a number that is written plainly")
        return value

    def special(self, content: Any, path: KeyPath, depth: int) -> float:
        _want(content in ("nan", "inf", "-inf"), "not one of nan, inf, -inf")
        return float(content)

    def bytes(self, content: Any, path: KeyPath, depth: int) -> bytes:
        _want(type(content) is str, "not a string")
        try:
            value = base64.b64decode(content, validate=True)
        except ValueError:
            raise _Malformed("not base64") from None
        _want(base64.b64encode(value).decode() == content, "not base64 as it is written")
        return value

    def complex(self, content: Any, path: KeyPath, depth: int) -> complex:
        parts = self.items(content, path, depth)
        _want([*map(type, parts)] == [float] * 2, "not two floats")
        return complex(*parts)

    def integers(self, content: Any, path: KeyPath, depth: int) -> list[int]:
        numbers = self.items(content, path, depth)
        _want([*map(type, numbers)] == [int] * 3, "not three integers")
        return numbers

    def range(self, content: Any, path: KeyPath, depth: int) -> range:
        numbers = self.integers(content, path, depth)
        _want(numbers[2] != 0, "step 0")
        return range(*numbers)

    def slice(self, content: Any, path: KeyPath, depth: int) -> slice:
        parts = self.items(content, path, depth)
        _want(len(parts) == 3, "not three values")
        return slice(*parts)

    def timedelta(self, content: Any, path: KeyPath, depth: int) -> datetime.timedelta:
        numbers = self.integers(content, path, depth)
        try:
            return datetime.timedelta(*numbers)
        except OverflowError:
            raise _Malformed("out of range") from None

    def moment(self, kind: Any, content: Any) -> Any:
        try:
            value = kind.fromisoformat(content)
        except (TypeError, ValueError):
            raise _Malformed("not a time in ISO form") from None
        _want(value.isoformat() == content, "not a time as it is written")
        return value

    def path(self, content: Any, path: KeyPath, depth: int, pure: Any = None) -> pathlib.PurePath:
        _want(type(content) is str and pure in (None, "posix", "windows"), "not a path")
        self.text(content, path)
        kinds: dict[str | None, type[pathlib.PurePath]] = {None: pathlib.Path, "posix": pathlib.PurePosixPath,
                                                           "windows": pathlib.PureWindowsPath}
        return kinds[pure](content)

    # -- objects of classes --

    def type_name(self, content: Any, path: KeyPath) -> str:
        if type(content) is not str or not TYPE_NAME.fullmatch(self.text(content, path)):
            raise _Malformed("the name of a class is malformed")
        return content

    def record(self, content: Any, path: KeyPath, depth: int, fields: Any) -> Any:
        type_name = self.type_name(content, path)
        _want(type(fields) is Pairs, "fields are an object")
        values = {}
        for name, node in fields:
            if self.text(name, path) in values or name.startswith("$"):
                raise _Malformed(f"the field {name[:40]!r} is given twice or is a tag")
            values[name] = self.value(node, (*path, Attr(name)), depth + 1)
        if type_name in self.types:
            return _build(self.types[type_name], type_name, values, path)
        if type_name in ("types.SimpleNamespace", "argparse.Namespace"):
            made = _types.SimpleNamespace() if type_name.startswith("types") else argparse.Namespace()
            vars(made).update(values)       # not setattr: no name means anything to the class
            return made
        if type_name == BYTES_IO:
            return self.bytes_io(values)
        return Record(type_name, values)

    def bytes_io(self, values: dict[str, Any]) -> io.BytesIO:
        data: Any = values.get("data")
        position: Any = values.get("position")
        _want(values.keys() == {"data", "position"} and type(data) is bytes and type(position) is int
              and 0 <= position < 1 << 62, "a BytesIO has data and a position")
        made = io.BytesIO(data)
        made.seek(position)
        return made

    def enum(self, content: Any, path: KeyPath, depth: int, name: Any, value: Any) -> Any:
        type_name = self.type_name(content, path)
        _want(name is None or type(name) is str, "the name of a member is a string")
        fields = {"name": self.value(name, path, depth), "value": self.value(value, path, depth + 1)}
        cls = self.types.get(type_name)
        if cls is None:
            return Record(type_name, fields, "$enum")
        return _member(cls, type_name, fields, path)


class _Malformed(Exception):
    """The content of a tag is not what the tag asks for. The caller, which knows tag and path, reports it."""


def _want(condition: object, what: str) -> None:
    if not condition:
        raise _Malformed(what)


def _member(cls: Any, type_name: str, fields: dict[str, Any], path: KeyPath) -> Any:
    """The member is found by its name, because values may be renumbered (enum.auto). Flags that have no single name are
    found by value."""
    if _kind(cls) != "enum":
        raise refusal(path, f"{type_name} was saved as an enum, but the class that was given for it is not an enum")
    name, value = fields["name"], fields["value"]
    if name is not None and name in cls.__members__:
        return cls.__members__[name]
    if issubclass(cls, enum.Flag) and type(value) is int and (name is None or "|" in name):
        with contextlib.suppress(ValueError):
            found = cls(value)
            # if the value differs, bits were dropped that the class has no member for; Python 3.11.2 drops such bits,
            # other versions refuse them
            if value < 0 or getattr(found, "value", found) == value:
                return found
    raise refusal(path, f"{type_name} has no member {str(name)[:60]}")


def _build(cls: Any, type_name: str, values: dict[str, Any], path: KeyPath) -> Any:
    """An object of a class that the caller gave. Dataclasses are filled, not initialised: neither __init__ nor
    __post_init__ runs, and the fields are what they were. Fields that are new in the class get their defaults."""
    kind = _kind(cls)
    if kind == "enum":
        raise refusal(path, f"{type_name} was not saved as an enum, but the class that was given for it is an enum")
    try:
        if kind == "placement":
            return cls(**values)
        if kind == "namedtuple":
            known, defaults = cls._fields, dict(cls._field_defaults)
        else:
            known = [field.name for field in dataclasses.fields(cls)]
            defaults = {field.name: field.default for field in dataclasses.fields(cls)
                        if field.default is not dataclasses.MISSING}
            defaults.update((field.name, field.default_factory()) for field in dataclasses.fields(cls)
                            if field.default_factory is not dataclasses.MISSING and field.name not in values)
        for name in values:
            if name not in known:
                raise refusal((*path, Attr(name)), f"{type_name} has no such field")
        filled = {**defaults, **values}
        for name in known:
            if name not in filled:
                raise refusal((*path, Attr(name)), f"the field is missing, and {type_name} has no default for it")
        if kind == "namedtuple":
            return tuple.__new__(cls, [filled[name] for name in known])
        made = object.__new__(cls)
        for name in known:
            object.__setattr__(made, name, filled[name])
        return made
    except (TypeError, AttributeError) as error:
        raise refusal(path, f"{type_name} cannot be made from its fields: {error}") from None


# tag: handler(decoder, content, path, depth, **members), members that must be there, members that may be
TAGS: dict[str, tuple[Callable[..., Any], set[str], set[str]]] = {
    "$int": (_Decoder.large, set(), set()),
    "$float": (_Decoder.special, set(), set()),
    "$complex": (_Decoder.complex, set(), set()),
    "$bytes": (_Decoder.bytes, set(), set()),
    "$bytearray": (lambda self, *rest: bytearray(self.bytes(*rest)), set(), set()),
    "$tuple": (lambda self, content, path, depth: tuple(self.items(content, path, depth)), set(), set()),
    "$set": (_Decoder.elements, set(), set()),
    "$frozenset": (lambda self, *rest: frozenset(self.elements(*rest)), set(), set()),
    "$dict": (lambda self, *rest: dict(self.pairs(*rest)), set(), set()),
    "$ordereddict": (lambda self, *rest: collections.OrderedDict(self.pairs(*rest)), set(), set()),
    "$defaultdict": (_Decoder.defaultdict, {"factory"}, set()),
    "$counter": (_Decoder.counter, set(), set()),
    "$deque": (_Decoder.deque, set(), {"maxlen"}),
    "$range": (_Decoder.range, set(), set()),
    "$slice": (_Decoder.slice, set(), set()),
    "$datetime": (lambda self, content, *_: self.moment(datetime.datetime, content), set(), set()),
    "$date": (lambda self, content, *_: self.moment(datetime.date, content), set(), set()),
    "$time": (lambda self, content, *_: self.moment(datetime.time, content), set(), set()),
    "$timedelta": (_Decoder.timedelta, set(), set()),
    "$path": (_Decoder.path, set(), {"pure"}),
    "$record": (_Decoder.record, {"fields"}, set()),
    "$enum": (_Decoder.enum, {"name", "value"}, set()),
}
