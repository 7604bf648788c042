# SPDX-License-Identifier: Apache-2.0
"""The text of tagged JSON, both ways, and the paths that errors name. It knows JSON, nothing of the tags.

Out: a node is either a str (a text on one line) or a Block (a container that does not fit one). Nodes are built from
the inside outwards, so each text is laid out once. In: `parse` gives JSON's own values, but objects as `Pairs`, so that
a name given twice is seen, and numbers that no writer writes as `Odd`: the walk through the tree knows the path and
reports them."""
from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

KeyPath = tuple[Any, ...]       # where a value is: keys, indices, Attr for fields of records
Node: TypeAlias = "str | Block"
Entries: TypeAlias = "list[tuple[str, Node]]"

WIDTH = 100                     # columns of a container that stays on one line, indentation not counted
MAX_BYTES = 64 << 20            # of a whole document
MAX_DEPTH = 100                 # of values in values
MAX_PLAIN = (1 << 53) - 1       # integers up to here are written as numbers: every JSON reader has them exactly
JSON_DEPTH = 4 * MAX_DEPTH + 8  # one value takes up to four levels: {"$dict": [[key, value]]}

quote = json.encoder.encode_basestring
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(r"\\.", re.S)
DEEPER = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - set(DEEPER))


class Attr(str):
    """A field of a record in a path, where a str is a key of a dict."""

    __slots__ = ()


def path_text(path: KeyPath, root: str = "state") -> str:
    """state["optimizer"][0].lr"""
    def one(key: object) -> str:
        if type(key) is Attr:
            return "." + key
        if type(key) is str:
            return f"[{quote(key if len(key) <= 200 else key[:200] + '...')}]"
        if type(key) is int:
            return f"[{key}]" if abs(key) < 1 << 64 else f"[{hex(key)[:60]}]"
        if key is None or type(key) in (bool, float):
            return f"[{key!r}]"
        return f"[{repr(key)[:60]}]" if type(key) is bytes else f"[a {type(key).__name__}]"
    return (root + "".join(map(one, path))).encode("utf-8", "backslashreplace").decode()


def refusal(path: KeyPath, sentence: str, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"{path_text(path)}: {sentence}")


# ---- out ----

class Block:
    """`open`, entries (what is before the node on its line, the node), `close`. `hug`: the last entry goes on the
    same line and is not indented once more. `kept`: of a node that goes into more than one document, its text by
    indentation."""

    __slots__ = ("open", "close", "entries", "hug", "kept")

    def __init__(self, open: str, close: str, entries: Entries, hug: bool) -> None:
        self.open, self.close, self.entries, self.hug = open, close, entries, hug
        self.kept: dict[int, str] | None = None


def container(open: str, close: str, entries: Entries, hug: bool = False) -> Node:
    length = 2
    for prefix, node in entries:
        if type(node) is not str:
            length = WIDTH + 1
            break
        length += len(prefix) + len(node) + 2
    if length > WIDTH and (length > WIDTH + 2 or entries):
        return Block(open, close, entries, hug and all(type(node) is str for _, node in entries[:-1]))
    return open + ", ".join(f"{prefix}{node}" for prefix, node in entries) + close


def array(nodes: Iterable[Node], hug: bool = False) -> Node:
    return container("[", "]", [("", node) for node in nodes], hug)


def mapping(pairs: Iterable[tuple[str, Node]], hug: bool = False) -> Node:
    """An object; `pairs` are of (name, node)."""
    return container("{", "}", [(quote(name) + ": ", node) for name, node in pairs], hug)


def render(node: Node) -> str:
    lines = _Lines()
    lines.add(node, 0)
    return "".join(lines.out)


class _Lines:
    def __init__(self) -> None:
        self.out: list[str] = []

    def add(self, node: Node, indent: int) -> None:
        if isinstance(node, str):
            self.out.append(node)
        elif node.kept is not None:
            if indent not in node.kept:
                lines, kept, node.kept = _Lines(), node.kept, None
                lines.add(node, indent)
                kept[indent], node.kept = "".join(lines.out), kept
            self.out.append(node.kept[indent])
        elif node.hug:
            self.out.append(node.open + "".join(f"{prefix}{text}, " for prefix, text in node.entries[:-1]))
            self.out.append(node.entries[-1][0])
            self.add(node.entries[-1][1], indent)
            self.out.append(node.close)
        else:
            self.out.append(node.open)
            texts = [item for _, item in node.entries if isinstance(item, str)]
            if node.open == "[" and len(texts) == len(node.entries):
                self.fill(texts, indent + 2)
            else:
                for number, (prefix, item) in enumerate(node.entries):
                    self.out.append(f"{',' if number else ''}\n{' ' * (indent + 2)}{prefix}")
                    self.add(item, indent + 2)
            self.out.append(f"\n{' ' * indent}{node.close}")

    def fill(self, texts: list[str], indent: int) -> None:
        """Puts as many texts on a line as fit."""
        line: list[str] = []
        length, before = 0, ""
        for text in texts:
            if line and length + len(text) > WIDTH:
                self.out.append(f"{before}\n{' ' * indent}{', '.join(line)}")
                line, length, before = [], 0, ","
            line.append(text)
            length += len(text) + 2
        self.out.append(f"{before}\n{' ' * indent}{', '.join(line)}")


# ---- in ----

class Pairs(list[tuple[str, Any]]):
    """An object: its names and values in order."""


class Odd:
    """A number that no writer writes: its text."""

    def __init__(self, text: str) -> None:
        self.text = text if len(text) <= 40 else text[:40] + "..."


def _integer(text: str) -> int | Odd:
    return int(text) if len(text) <= 17 and abs(int(text)) <= MAX_PLAIN else Odd(text)


def _number(text: str) -> float | Odd:
    value = float(text)
    return value if value - value == 0 else Odd(text)


def _check_depth(text: str) -> None:
    """Refuses deep nesting before json's scanner recurses into it."""
    if text.count("[") + text.count("{") <= JSON_DEPTH:
        return
    outside = "".join(ESCAPED.sub("", text).split('"')[::2]) if "\\" in text else "".join(text.split('"')[::2])
    brackets = outside.encode().translate(None, NO_BRACKETS)
    if max(itertools.accumulate(map(DEEPER.__getitem__, brackets)), default=0) > JSON_DEPTH:
        raise ValueError(f"values: nested more than {MAX_DEPTH} deep")


def parse(data: Any) -> Any:
    if len(data) > MAX_BYTES:
        raise ValueError(f"values: {len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"values: not UTF-8 at byte {error.start}") from None
    _check_depth(text)
    try:
        return json.loads(text, object_pairs_hook=Pairs, parse_int=_integer, parse_float=_number, parse_constant=Odd)
    except json.JSONDecodeError as error:
        raise ValueError(f"values: not JSON: {error}") from None
    except RecursionError:
        raise ValueError("values: nested too deeply for what is left of the stack") from None
