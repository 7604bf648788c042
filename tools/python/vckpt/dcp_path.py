# SPDX-License-Identifier: Apache-2.0
"""What a path given to vckpt.dcp names (docs/dcp.md): a store, a run, a step. `resolve` looks at the file system only
through the function that it is given, so that the rules can be read, and tried, as a table.

  1  The path is a store: run `default` of it; a save makes the next step.
  2  Some folder above it is a store (the nearest counts): what stands below names run and step: RUN, RUN/STEP, or STEP
     alone of the run `default`. STEP is a number, or one of the words below followed by one.
  3  The last part is such a STEP, and the folder above it is absent or empty: that folder becomes a store, run
     `default`.
  4  Any other path becomes a store of its own, run `default`; a save makes the next step.

A folder that is there already, be it empty, makes the one above it not empty: so a temporary directory never turns its
parent into a store. Once a store has been made by rule 3 or 4, rules 1 and 2 say the same of the same path. Ranks
resolve alike only after the coordinator has made the store: it tells the others what it found."""
from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import _lib, paths
from .paths import OWN, RUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from .signatures import Path as PathLike

STORE_FILE = "vckpt.store"
DEFAULT_RUN = "default"
STORE, ABSENT, EMPTY, OTHER = "store", "absent", "empty", "other"
STEP = re.compile(r"(?:(?:step|global_step|iter|epoch|checkpoint|ckpt)[-_=.]?)?([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True)
class Target:
    store: str
    run: str = DEFAULT_RUN
    step: int | None = None        # None: the next one (a save), the newest one (a read)
    init: bool = False      # the store has to be made first


def kind_of(path: str) -> str:
    """What stands at a path: STORE, ABSENT, EMPTY (a folder) or OTHER."""
    if os.path.isfile(os.path.join(path, STORE_FILE)):
        return STORE
    try:
        with os.scandir(path) as entries:
            return OTHER if next(entries, None) else EMPTY
    except FileNotFoundError:
        return ABSENT
    except OSError:
        return OTHER


def step_of(part: str) -> int | None:
    """The number that a last part names, or None."""
    match = STEP.fullmatch(part)
    return int(match[1]) if match else None


def refuse(path: str, sentence: str) -> _lib.InvalidArgument:
    return _lib.InvalidArgument(errno.EINVAL, f"{path}: {sentence}")


def local(path: PathLike) -> str:
    """An absolute path, as a string. URLs are refused."""
    text = os.fspath(path)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text or "\0" in text:
        raise refuse(repr(text), "a path is a text without NUL that is not empty")
    if "://" in text:
        raise refuse(text, "this is a URL: give a path of a mounted file system")
    return os.path.abspath(text)


def inside(path: str, store: str, parts: list[str], reading: bool) -> Target:
    """Rule 2."""
    run, step = (DEFAULT_RUN, step_of(parts[0])) if len(parts) == 1 else (parts[0], step_of(parts[-1]))
    if len(parts) == 1 and step is None:
        run = parts[0]
    if len(parts) > 2 or (len(parts) == 2 and step is None and not (reading and parts[1] == "latest")):
        raise refuse(path, f"in the store {store} expected RUN, RUN/STEP or STEP, found {'/'.join(parts)}: a STEP is "
                           "a number, alone or "
                     "after step, global_step, iter, epoch, checkpoint or ckpt")
    if run in OWN or not RUN.fullmatch(run):
        what = "is a folder of the store itself" if run in OWN else "cannot be the name of a run"
        raise refuse(path, f"in the store {store}, {run!r} {what}")
    return Target(store, run, step)


def resolve(path: PathLike, kind: Callable[[str], str] = kind_of, reading: bool = False) -> Target:
    """The Target of a path. For a read, nobody looks whether it exists."""
    path = local(path)
    if kind(path) == STORE:
        return Target(path)
    above, last = os.path.split(path)
    parts = [last]
    while True:
        if kind(above) == STORE:
            return inside(path, above, parts, reading)
        up, part = os.path.split(above)
        if up == above:
            break
        above, parts = up, [part, *parts]
    step, parent = step_of(os.path.basename(path)), os.path.dirname(path)
    if step is not None and parent != path and kind(parent) in (ABSENT, EMPTY):
        return Target(parent, step=step, init=True)
    return Target(path, init=True)


def make(target: Target) -> None:
    """Makes the store of a target where there is none, and the folders above it. Whoever comes second finds it made."""
    if kind_of(target.store) != STORE:
        paths.make(target.store)
