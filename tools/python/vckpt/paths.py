# SPDX-License-Identifier: Apache-2.0
"""Stores, and what a path names: STORE/RUN or STORE/RUN/STEP, the store being the nearest parent that is one.

A save makes the store where no parent is one, at the place where the path says that it is: STORE/RUN, or STORE/RUN/STEP
where the last part is a number. All ranks may do so at once, on one file system: one makes it, the others wait until it
is there. A path that was resolved before the store was made is resolved to the same afterwards."""
from __future__ import annotations

import errno
import os
import re
import time
from typing import Any

from . import _lib
from ._lib import Error, InvalidArgument, NotAStore
from .signatures import Path

STEP = re.compile(r"(?:step-)?([0-9]{1,20})", re.ASCII)
RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
# a store's own
OWN = {"packs", "runs", "incoming", "hosts", "trash", "damaged", "stats", "index", "reserve", "vckpt.store"}
TEMPORARY = r".*\.tmp\.[0-9a-f]{16}"    # what stands there for a moment, until it has its name
PATIENCE = 10.0                         # seconds, with a store that another process is making
LOOK = 0.25                             # seconds between two looks for a new step
_stores: dict[str, bool] = {}                            # directories that were found to be stores


def is_store(path: str) -> bool:
    if path in _stores:
        return True
    try:
        _lib.call("vckpt_store_check", os.fsencode(path))
    except NotAStore:
        return False
    except Error as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    _stores[path] = True
    return True


def split(path: Path, making: bool = False) -> tuple[str, str, Any]:
    """(store, run, step or None) of STORE/RUN or STORE/RUN/STEP: the store is the nearest parent that is one; making:
    or that becomes one by `make`."""
    given = os.fspath(path)
    full = os.path.abspath(given)
    store, rest = os.path.dirname(full), [os.path.basename(full)]
    while not is_store(store):
        if store == os.path.dirname(store):
            if is_store(full):
                raise InvalidArgument(errno.EINVAL, f"{given} is a store: name a run in it, "
                                                    f"{os.path.join(given, 'RUN')}")
            if making:
                return _to_be_made(given, full)
            raise NotAStore(_lib.ENOSTORE, f"{given}: no parent directory is a store (make one with `vckpt init` or "
                                           "vckpt.init)")
        rest.insert(0, os.path.basename(store))
        store = os.path.dirname(store)
    if len(rest) == 1:
        return store, rest[0], None
    step = rest[1]
    found = STEP.fullmatch(step)
    if len(rest) > 2 or not (found or step == "latest"):
        raise InvalidArgument(errno.EINVAL, f"{given}: in the store {store} expected RUN or RUN/STEP, found "
                                            f"{'/'.join(rest)}")
    return store, rest[0], int(found[1]) if found else "latest"


def _home_refused(given: str) -> None:
    """A shell expands ~, Python does not: a store in a directory of that name is not what was meant."""
    first = given.split(os.sep)[0]
    if first.startswith("~") and not os.path.isdir(first):
        raise InvalidArgument(errno.EINVAL, f"{given}: Python does not expand {first}, and there is no directory of "
                                            f"that name here: give os.path.expanduser({given!r})")


def _to_be_made(given: str, full: str) -> tuple[str, str, Any]:
    _home_refused(given)
    above, last = os.path.split(full)
    found, step = STEP.fullmatch(last), None
    if found or last == "latest":
        above, last, step = *os.path.split(above), int(found[1]) if found else "latest"
    if not RUN.fullmatch(last):
        raise InvalidArgument(errno.EINVAL, f"{given}: no parent directory is a store, and {last!r} cannot be the "
                                            "name of a run: "
                              "give STORE/RUN or STORE/RUN/STEP")
    return above, last, step


def init(path: Path, exist_ok: bool = False) -> None:
    """Makes an empty store, and the directories above it. vckpt.StoreExists (a FileExistsError): it is one; not with
    exist_ok, with which any number of processes may call this at once."""
    _home_refused(os.fspath(path))
    path = os.path.abspath(os.fspath(path))
    if exist_ok:
        return make(path)
    if not is_store(path):
        _make_parents(path)
    _lib.store_init(path)


def make(store: str) -> None:
    """Makes a store where there is none (any more), and the directories above it. Whoever comes second finds it
    made."""
    _stores.pop(store, None)
    if is_store(store):
        return
    _make_parents(store)
    end = time.monotonic() + PATIENCE
    while not is_store(store):
        try:
            _lib.store_init(store)
        except _lib.StoreExists:
            return
        except Error as error:
            # an empty directory in which another process is making the store just now looks like one that is not empty
            if error.errno != errno.ENOTEMPTY:
                raise
            if time.monotonic() >= end or not half_made(store):
                raise type(error)(error.errno, f"{store} is neither a store nor empty, so no store is made there: "
                                               "name a store, an empty directory, or one that does not exist") from None
            time.sleep(0.05)


def _make_parents(path: str) -> None:
    """Not where they would lie in a store: the library refuses that, but they would be there."""
    above = os.path.dirname(os.path.realpath(path))
    while not os.path.exists(os.path.join(above, "vckpt.store")) and above != os.path.dirname(above):
        above = os.path.dirname(above)
    if os.path.exists(os.path.join(above, "vckpt.store")):
        raise InvalidArgument(errno.EINVAL, f"{path} lies in the store {above}; nothing was made: choose a directory "
                                            "outside of that store")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except OSError as error:
        raise Error(error.errno or errno.EIO, f"{path}: the directories above it cannot be made: {error.filename}: "
                                              f"{error.strerror}") from None


def half_made(path: str) -> bool:
    """Nothing stands there but what a store that is being made has."""
    try:
        return all(name in OWN or name.startswith(".") or re.fullmatch(TEMPORARY, name) for name in os.listdir(path))
    except OSError:
        return False


def steps(path: Path) -> list[int]:
    """The numbers of the steps of STORE/RUN, ascending; none where there is no such run."""
    store, run, _ = split(path)
    try:
        return _lib.numbers("vckpt_run_steps", os.fsencode(store), run.encode())
    except FileNotFoundError:
        return []


def latest(path: Path) -> int | None:
    """The number of the newest step of STORE/RUN; None where it has none."""
    found = steps(path)
    return found[-1] if found else None


def wait(path: Path, after: int | None = None, timeout: float | None = None) -> int:
    """Waits until STORE/RUN has a step above the number `after` (None: any step), and gives the highest. vckpt.Timeout,
    a TimeoutError: there was none for `timeout` seconds (None: for ever; 0: looks once). The store has to be there, the
    run need not. A step that is saved again under its number is not noticed."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        found = latest(path)
        if found is not None and (after is None or found > after):
            return found
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            what = "no step" if after is None else f"no step above {after}"
            raise _lib.Timeout(errno.ETIMEDOUT, f"{os.fspath(path)} has {what} after {timeout:g} s: call again, or "
                                                "give a longer timeout")
        time.sleep(LOOK if left is None else min(left, LOOK))
