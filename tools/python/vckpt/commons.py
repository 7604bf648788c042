# SPDX-License-Identifier: Apache-2.0
"""What has to be equal at several ranks, as (group, name, bytes) for vckpt_save_common. What a rank does not store
itself a reader gets from another rank, so the two must be equal. If they differ the save is refused, and the error
names the path.

The group says which ranks are compared: all ranks with the same home (state.py) declare the same groups.

    components of the state (...)   the components, but for those that are wholly per rank or have tensors of some ranks
                                    only
    COMPONENT               its plain values by path; of a PerRank only that it is there
    tensors of COMPONENT    the names of its tensors, so that one that a rank lacks is refused before data is written;
                            not of tensors that some ranks only have, or hold parts of as they like (flat ranges, boxes,
                            alone)
    blob NAME               a file that several ranks give
    attributes

A rank that has nothing in a group declares a row that says so; else what another rank has in it would be compared with
nothing. Where the lowest rank R of a group is not 0 (a pipeline's stage), all these names but the last end in " of
rank R".

Values are declared one by one, but of a component at most LIMIT: beyond, those of one parent are declared together.
Tensors are declared by the beginnings of their names, at most BUCKETS. What a component declares is kept while its
document stays as it is."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

from . import values
from .values_text import KeyPath, path_text

Row = tuple[str, str, bytes]        # group, name, bytes
Named: TypeAlias = "tuple[Callable[[KeyPath, Any], str], Callable[[object], bool]]"

LIMIT = 1000
COMPONENTS = 'components of the state (a dict of nothing but tensors is one component, "model")'       # a group's name
BUCKETS = 64
NONE = "~"              # behind all other names, so a sentence names one of those


# ---- plain values ----

def value_bytes(value: Any, path: KeyPath, named: Named) -> bytes:
    """Equal for equal values. named: (path, tensor) -> the name of a tensor in an object, and is_tensor."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return kind.__name__.encode() + b":" + hashlib.sha256(value).digest()
    scalar = values.SCALARS.get(kind)
    return scalar(value).encode() if scalar else values.encode(value, tensor=named[0], is_tensor=named[1], path=path)


def bounded(found: dict[KeyPath, bytes], limit: int = LIMIT) -> dict[KeyPath, bytes]:
    """{path: bytes} with at most `limit` paths: paths of one parent are joined, the deepest first."""
    depth = max(map(len, found), default=0)
    while len(found) > limit and depth > 1:
        depth -= 1
        together: dict[KeyPath, list[tuple[KeyPath, bytes]]] = {}
        for path, data in found.items():
            together.setdefault(path[:depth], []).append((path[depth:], data))
        found = {}
        for path, parts in together.items():
            whole = hashlib.sha256()
            for rest, data in sorted((path_text(rest), data) for rest, data in parts):
                whole.update(b"%d %d " % (len(rest.encode()), len(data)) + rest.encode() + data)
            found[path] = parts[0][1] if len(parts) == 1 and not parts[0][0] else whole.digest()
    return found


def rows(group: str, found: dict[KeyPath, bytes]) -> list[Row]:
    """[(group, name, bytes)], each name once."""
    together: dict[str, bytes] = {}
    for path, data in found.items():
        name = path_text(path)
        together[name] = hashlib.sha256(together[name] + data).digest() if name in together else data
    return [(group, name, data) for name, data in together.items()]


def none_of(group: str) -> Row:
    """The row that says "nothing", of a group that has no other."""
    return group, NONE, b""


# ---- names of tensors ----

def buckets(names: list[str]) -> dict[str, list[str]]:
    """{beginning of names: names}: at most BUCKETS, with the longest possible beginnings."""
    result, depth = {"*": names}, 1
    while True:
        longer: dict[str, list[str]] = {}
        for name in names:
            parts = name.split(".")
            longer.setdefault(".".join(parts[:depth]) + (".*" if len(parts) > depth else ""), []).append(name)
        if len(longer) > BUCKETS or longer.keys() == result.keys():
            return result
        result, depth = longer, depth + 1


def tensor_rows(group: str, names: list[str]) -> list[Row]:
    return [(group, f"the tensors {start}",
             hashlib.sha256("\0".join(sorted(some)).encode("utf-8", "backslashreplace")).digest())
            for start, some in buckets(names).items()] if names else []


# ---- groups ----

def group_name(words: str, home: int) -> str:
    """At most 255 bytes of UTF-8."""
    text = words.encode("utf-8", "backslashreplace")
    if len(text) > 200:
        text = text[:160].decode("utf-8", "ignore").encode() + b"~" + hashlib.sha256(text).hexdigest()[:32].encode()
    return text.decode() + (f" of rank {home}" if home else "")
