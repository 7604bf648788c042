# SPDX-License-Identifier: Apache-2.0
"""Stores, and what a path names, wherever the package takes one: a store, a run in it, a step of that. `resolve` looks
at the file system only through the function that it is given, so that the rules can be read, and tried, as a table.

  1  The nearest store on the path counts, the path itself among them. The part below it is RUN, RUN/STEP or, of the
     run `default`, STEP; no part below it is the run `default`.
  2  Without a store, the path says where one is made. STEP at its end is taken off: what is left is STORE/RUN if the
     folder of RUN is absent, too, else it is STORE, if that is absent or empty, with the run `default`.
  3  Else the whole path becomes a store of its own, with the run `default`.

So a folder that is there becomes a store only if it is empty and the path, or what is left of it without STEP. STEP is
a number, or one of the words below followed by one; a run of such a name that is there keeps it. Behind a RUN in a
store it may also be `latest` or, where it is none of these, a tag, both of which can be read. A path means the same
before and after its store is made, in every process: a store that was absent appears whole."""
from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import _lib
from ._lib import Error, NotAStore, invalid
from .signatures import Path

WORD = "(?:(?:step|global_step|iter|epoch|checkpoint|ckpt)[-_=.]?)?"
STEP = re.compile(WORD + "([0-9]{1,18})", re.ASCII)
RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
TAG = re.compile(r"(?!step-)[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)     # one slash: pathlib takes the other away
NUMBERED = re.compile(r"(.*?)[0-9]+(\.[A-Za-z]+)?", re.ASCII)      # model-10, ckpt_10.pt
DEFAULT_RUN = "default"
STORE, ABSENT, EMPTY, OTHER = "store", "absent", "empty", "other"
# a store's own
OWN = {"packs", "runs", "incoming", "hosts", "trash", "damaged", "stats", "index", "reserve", "vckpt.store"}
TEMPORARY = r".*\.tmp\.[0-9a-f]{16}"    # a file or folder until it gets its name
PATIENCE = 10.0                         # seconds, with a store that another process is making
LOOK = 0.25                             # seconds between two looks for a new step
_said: set[tuple[str, str]] = set()
_stores: dict[str, bool] = {}                            # directories that were found to be stores


@dataclass(frozen=True)
class Target:
    store: str
    run: str = DEFAULT_RUN
    step: int | str | None = None       # None: the next one (a save), the newest one (a read); or "latest", or a tag
    init: bool = False                  # the store has to be made first


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


def kind_of(path: str) -> str:
    """What is at a path: STORE, ABSENT, EMPTY (a folder, or a store that is being made in one) or OTHER."""
    if is_store(path):
        return STORE
    try:
        names = os.listdir(path)
        if os.path.lexists(os.path.join(path, "vckpt.store")):      # since the look above; first of all in a store
            return STORE
        return EMPTY if all(re.fullmatch(TEMPORARY, name) for name in names) else OTHER
    except FileNotFoundError:
        return ABSENT
    except OSError:
        return OTHER


def local(path: Path) -> str:
    """A path as text. Refuses what cannot be one."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"a path was expected first, not {type(path).__name__}: vckpt.save(path, state) and "
                        "vckpt.load(path, state) take the path first, unlike torch.save(obj, path)")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise invalid(f"{text!r}: a path is a text without NUL that is not empty")
    remote = REMOTE.match(text)
    if remote and ("://" in text[:remote.end() + 1] or not os.path.isdir(f"{remote[1]}:")):
        raise invalid(f"{text}: this is a URL, and vckpt has no storage for {remote[1]}://: give a directory of a "
                      "mounted file system")
    return text


def split(path: Path, making: bool = False) -> tuple[str, str, int | str | None]:
    """(store, run, step) that a path names. making: also where no store is there yet."""
    target = resolve(path)
    if target.init and not making:
        raise no_store(path, target.store)
    return target.store, target.run, target.step


def no_store(path: Path, store: str) -> NotAStore:
    """The error where there should be a store."""
    file, given = file_above(store), os.fsdecode(path)
    if file is not None:
        return NotAStore(_lib.ENOSTORE, f"{given}: {file} is a file, not a store: what torch.save wrote comes in by "
                                        "vckpt.save(path, torch.load(file)): docs/from-torch-save.md")
    return NotAStore(_lib.ENOSTORE, f"{given}: no parent directory is a store (make one with `vckpt init` or "
                                    "vckpt.init)")


def file_above(path: str) -> str | None:
    """The file, no directory, that is at a path or above it."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return None if os.path.isdir(path) else path


def step_of(part: str) -> int | Literal["latest"] | None:
    """What a last part names, or None."""
    found = STEP.fullmatch(part)
    return int(found[1]) if found else "latest" if part == "latest" else None


def resolve(path: Path, kind: Callable[[str], str] = kind_of) -> Target:
    """The Target of a path, whether or not the step exists."""
    given = local(path)
    store = full = os.path.abspath(given)
    parts: list[str] = []
    kind = functools.cache(kind)        # looked at once: another rank may make the store meanwhile
    while kind(store) != STORE:
        above, part = os.path.split(store)
        if above == store:
            return _outside(given, full, kind)
        store, parts = above, [part, *parts]
    return _inside(given, store, parts, kind)


def _inside(given: str, store: str, parts: list[str], kind: Callable[[str], str]) -> Target:
    """The target by rule 1."""
    def has(*runs: str) -> bool:
        return any(kind(os.path.join(store, "runs", run)) != ABSENT for run in runs)

    if not parts:
        # of a save without collectives each rank has a run
        if kind(os.path.join(store, "runs")) == OTHER and not has(DEFAULT_RUN, f"{DEFAULT_RUN}.rank-00000"):
            raise invalid(f"{given} is a store: name a run in it, {os.path.join(given, 'RUN')} (it has runs, and none "
                          f"of them is {DEFAULT_RUN})")
        return Target(store)
    step: int | str | None = step_of(parts[-1])
    if len(parts) == 2 and step is None and TAG.fullmatch(parts[1]):
        step = parts[1]
    if len(parts) == 1 and (step is None or has(parts[0])):
        step, run = None, parts[0]
    else:
        run = parts[0] if len(parts) == 2 else DEFAULT_RUN
    if len(parts) > 2 or (len(parts) == 2 and step is None):
        raise invalid(f"{given}: in the store {store} expected RUN, RUN/STEP or STEP, found {'/'.join(parts)}: a STEP "
                      "is latest or a number, alone or after step, global_step, iter, epoch, checkpoint or ckpt, or, "
                      "of a RUN, a tag")
    if run in OWN or not RUN.fullmatch(run):
        what = "is a folder of the store itself" if run in OWN else "cannot be the name of a run"
        raise invalid(f"{given}: in the store {store}, {run!r} {what}")
    return Target(store, run, step)


def _outside(given: str, full: str, kind: Callable[[str], str]) -> Target:
    """The target by rules 2 and 3."""
    _home_refused(given)
    _mount_refused(given, full)
    here = "/" if os.path.isabs(given) else os.getcwd()

    def may(folder: str, *kinds: str) -> bool:
        """Is it of these kinds, and neither the working directory nor above it?"""
        return folder != "/" and not (here + os.sep).startswith(folder + os.sep) and kind(folder) in kinds

    step, left = step_of(os.path.basename(full)), full
    if step is not None:
        left = os.path.dirname(full)
    store, run = os.path.split(left)
    if may(store, ABSENT):
        if not RUN.fullmatch(run):
            raise invalid(f"{given}: no parent directory is a store, and {run!r} cannot be the name of a run: give "
                          "STORE/RUN or STORE/RUN/STEP")
        return Target(store, run, step, init=True)
    if step is not None and may(left, ABSENT, EMPTY) and kind(full) != EMPTY:
        return Target(left, step=step, init=True)
    return Target(full, init=True)


def _home_refused(given: str) -> None:
    """Refuses a ~, which a shell expands and Python does not: a directory of that name is not what was meant."""
    first = given.split(os.sep)[0]
    if first.startswith("~") and not os.path.isdir(first):
        raise invalid(f"{given}: Python does not expand {first}, and there is no directory of that name here: give "
                      f"os.path.expanduser({given!r})")


def _mount_refused(given: str, full: str) -> None:
    """Refuses a path in a mount, which shows the files of a store that is elsewhere."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.partition(" - ") for line in file if " - fuse.vckpt " in line]
    except OSError:
        return
    real = os.path.realpath(full) if lines else full
    for place, _, what in lines:
        point, store = (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
                        for text in (place.split()[4], what.split()[1]))
        if real == point or real.startswith(point + os.sep):
            inside = os.path.join(store, *real[len(point):].strip(os.sep).split(os.sep)[:2])
            raise NotAStore(_lib.ENOSTORE, f"{given} is in {point}, where the store {store} is mounted: its files can "
                                           "be read there; what names a store, a run or a step here is a path into "
                                           f"the store itself: {inside.rstrip(os.sep)}")


def init(path: Path, exist_ok: bool = False) -> None:
    """Makes an empty store, and the directories above it. vckpt.StoreExists (a FileExistsError): it is one; not with
    exist_ok, with which any number of processes may call this at once."""
    given = local(path)
    _home_refused(given)
    path = os.path.abspath(given)
    if exist_ok:
        return make(path)
    if not is_store(path):
        _make_parents(path)
    _lib.store_init(path)


def make(store: str) -> None:
    """Makes a store where there is none (any more), and the directories above it. It is no error if another process
    was faster."""
    _stores.pop(store, None)
    if is_store(store):
        return
    _make_parents(store)
    if not os.path.lexists(store):
        _make_whole(store)
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
            if time.monotonic() >= end or kind_of(store) == OTHER:
                raise type(error)(error.errno, f"{store} is neither a store nor empty, so no store is made there: "
                                               "name a store, an empty directory, or one that does not exist") from None
            time.sleep(0.05)


def _make_whole(store: str) -> None:
    """Makes a store that no other process sees half made, or as an empty folder."""
    made = f"{store}.tmp.{secrets.token_hex(8)}"
    try:
        _lib.store_init(made)
        os.rename(made, store)                          # onto one that another process has made: an error
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not os.path.lexists(store):
            raise
        return
    above = os.open(os.path.dirname(store), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def begin(store: str, run: str, first: bool = True) -> None:
    """Makes the store of a run before that is written. first: this rank prints what may not have been meant."""
    made = not os.path.exists(os.path.join(store, "vckpt.store"))
    make(store)
    above, name = os.path.split(store)
    if first and made and run == DEFAULT_RUN and (step_of(name) is not None or _store_beside(above, name)):
        print(f"vckpt: {store} is a store of its own, which shares no data with others: if it was meant to be a run or "
              f"a step, `vckpt init {above}/NAME`, and save to {above}/NAME/{name}", file=sys.stderr)
    if first and not os.path.exists(os.path.join(store, "runs", run)):
        other = _numbered_alike(store, run)
        if other is not None and (store, other) not in _said:
            _said.add((store, other))
            print(f"vckpt: {store}: run {run!r} beside {other!r}, which has one step: if the number counts steps, save "
                  "to one run, and give it as step=", file=sys.stderr)


def _store_beside(above: str, name: str) -> bool:
    """Is there another store in the folder? Of thousands of names only some are looked at."""
    try:
        with os.scandir(above) as entries:
            return any(os.path.exists(os.path.join(one.path, "vckpt.store"))
                       for one in itertools.islice(entries, 1000) if one.name != name)
    except OSError:
        return False


def _numbered_alike(store: str, run: str) -> str | None:
    """A run with one step whose name has another number at its end, or before an extension."""
    stem = NUMBERED.fullmatch(run)
    try:
        others = [name for name in os.listdir(os.path.join(store, "runs")) if stem and name != run
                  and (one := NUMBERED.fullmatch(name)) and one.groups() == stem.groups()]
    except OSError:
        return None
    return next((name for name in sorted(others)[-3:] if len(steps(os.path.join(store, name))) == 1), None)


def _make_parents(path: str) -> None:
    """Makes the directories above a path, but none in a store: the library refuses a store there, and they would stay
    behind."""
    above = os.path.dirname(os.path.realpath(path))
    while not os.path.exists(os.path.join(above, "vckpt.store")) and above != os.path.dirname(above):
        above = os.path.dirname(above)
    if os.path.exists(os.path.join(above, "vckpt.store")):
        raise invalid(f"{path} is in the store {above}; nothing was made: choose a directory outside of that store")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except OSError as error:
        raise Error(error.errno or errno.EIO, f"{path}: the directories above it cannot be made: {error.filename}: "
                                              f"{error.strerror}") from None


def steps(path: Path) -> list[int]:
    """The numbers of the steps of STORE/RUN, ascending; none where there is no such run."""
    store, run, _ = split(path)
    try:
        return _lib.numbers("vckpt_run_steps", os.fsencode(store), run.encode())
    except FileNotFoundError:
        return []


def latest(path: Path) -> int | None:
    """The number of the newest step of STORE/RUN; None where it has none. It costs the same however many there are."""
    store, run, _ = split(path)
    found = ctypes.c_uint64()
    try:
        _lib.call("vckpt_run_latest", os.fsencode(store), run.encode(), ctypes.byref(found))
    except FileNotFoundError:
        return None
    return found.value


def find(store: Path, expression: str, limit: int | None = None) -> list[str]:
    """The steps of all runs of a store that an expression holds for (docs/expressions.md), as STORE/RUN/STEP, newest
    first, at most `limit`. InvalidArgument says in which column the expression is wrong."""
    path = os.fspath(store)
    if "\0" in expression or (limit is not None and limit < 1):
        raise invalid("an expression has no NUL, and a limit is 1 or more")
    return [f"{path}/{run}/{step}" for run, step in _lib.found(path, expression, limit or 0)]


def tags(path: Path) -> dict[str, int]:
    """{tag: number of the step that has it} of STORE/RUN, sorted by tag; none where there is no such run."""
    store, run, _ = split(path)
    return _tags(store, run)


def _tags(store: str, run: str) -> dict[str, int]:
    found, count = ctypes.POINTER(_lib.Tag)(), ctypes.c_size_t()
    try:
        _lib.call("vckpt_run_tags", os.fsencode(store), run.encode(), ctypes.byref(found), ctypes.byref(count))
    except FileNotFoundError:
        return {}
    try:
        return {one.tag.decode(): one.step for one in found[:count.value]}
    finally:
        _lib.free(found)


def saved(path: Path, step: int | str | None) -> int | None:
    """The number that a save's path names."""
    if isinstance(step, str):
        what = "latest" if step == "latest" else f"expected RUN, RUN/STEP or STEP: {step}, as a tag,"
        raise invalid(f"{os.fsdecode(path)}: {what} can be read, not saved: give a number")
    return step


def number(store: str, run: str, step: int | str | None) -> int | None:
    """The number of the step that is named; None: the newest. A tag is looked up now. NotFound: no step has it."""
    if step is None or step == "latest":
        return None
    if isinstance(step, int):
        return step
    there = _tags(store, run)
    if step not in there:
        others = ", ".join([*there][:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        raise _lib.NotFound(errno.ENOENT, f"run {run} of {store} has no step or tag {step}" +
                            (f"; its tags: {others}" if there else ", and no tags at all"))
    return there[step]


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
