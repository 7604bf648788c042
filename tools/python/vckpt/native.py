# SPDX-License-Identifier: Apache-2.0
"""A saver of the library: one rank's of a run, its options, and those of its saves."""
from __future__ import annotations

import ctypes
import errno
import math
import numbers
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from ctypes import byref, c_char_p, c_void_p
from typing import Any

from . import _lib, paths
from ._lib import EFORKED, Error, Forked, invalid
from .handle import Handle
from .signatures import Attributes, Path
from .state import Memory
from .tensors import torch_module

Key = tuple[str, str, int]      # store, run, rank

WATCH_S = 0.004             # how often it is looked whether a save is staged, at first

OPTIONS = {"heartbeat": 20.0, "start_timeout": 60.0, "deadline": 0.0, "ring_bytes": 0, "pin": "auto",
           "check_replicas": "sample", "threads": 0, "low_priority": False, "use_bases": True, "keep_cached": False,
           "meet_timeout": 600.0, "warn_free": True, "keep": None}
KEEP = ("last", "every", "within", "daily", "weekly", "best", "step", "if")     # rules of docs/prune.md
SEVERAL = (list, tuple, range, set, frozenset)
NUMBERS: list[tuple[str, Any, int, str]] = [
    ("meet_timeout", numbers.Real, 0, "seconds"), ("heartbeat", numbers.Real, 0, "seconds"),
    ("start_timeout", numbers.Real, 0, "seconds"), ("deadline", numbers.Real, 0, "seconds"),
    ("ring_bytes", numbers.Integral, 0, "a whole number of bytes"), ("threads", numbers.Integral, 0, "a whole number")]


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given (not None), checked."""
    unknown = [name for name in given if name not in OPTIONS]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}: expected one of {', '.join(OPTIONS)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    if isinstance(chosen.get("pin"), bool):
        chosen["pin"] = "yes" if chosen["pin"] else "no"
    if isinstance(chosen.get("check_replicas"), bool):
        chosen["check_replicas"] = "full" if chosen["check_replicas"] else "off"
    for name, words in (("pin", _lib.PIN), ("check_replicas", _lib.REPLICAS)):
        if name in chosen and chosen[name] not in words:
            raise invalid(f"{name}={chosen[name]!r}: expected one of {', '.join(words)}")
    for name, kind, least, wanted in NUMBERS:
        value = chosen.get(name, least)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < 1 << 63:
            raise invalid(f"{name}={value!r}: expected {wanted}")
    free = chosen.get("warn_free", True)
    if not isinstance(free, bool) and not (isinstance(free, int) and 0 < free < 1 << 63):
        raise invalid(f"warn_free={free!r}: expected True, False or a number of bytes")
    if "keep" in chosen:
        _keep(chosen["keep"])
    return chosen


def _keep(rules: Any) -> list[bytes]:
    """{"last": 3, "best": "2:loss:min", "if": "..."} as the library has rules; several of a kind are a list. Steps
    are one rule, however many."""
    found: list[str] = []
    for name, value in rules.items() if isinstance(rules, Mapping) else ():
        if name not in KEEP:
            raise invalid(f"keep: there is no rule {name!r}: expected one of {', '.join(KEEP)}")
        values = [str(one) for one in (value if isinstance(value, SEVERAL) else [value])]
        if name == "step" and values:
            values = [",".join(values)]
        found += [f"keep-{name}={one}" for one in values]
    if not found:
        raise invalid(f"keep={rules!r}: expected a mapping of rules, such as {{'last': 3, 'every': 1000}}")
    return [_lib.text(rule, "keep") for rule in found]


def _saver_options(key: Key, rank: int, world: int, launch_id: str | None, chosen: Mapping[str, Any]
                   ) -> _lib.SaverOptions:
    o = _lib.SaverOptions(size=ctypes.sizeof(_lib.SaverOptions), rank=rank, world=world)
    o.store, o.run = os.fsencode(key[0]), _lib.text(key[1], "run")
    o.launch_id = _lib.text(launch_id, "launch_id") if launch_id is not None else None
    o.heartbeat_ms, o.start_ms, o.deadline_ms = (       # rounded up, because 0 has a meaning of its own
        min(math.ceil(chosen[name] * 1000), 2**63 - 1) for name in ("heartbeat", "start_timeout", "deadline"))
    o.ring_bytes, o.threads = chosen["ring_bytes"], chosen["threads"]
    o.pin, o.check_replicas = _lib.PIN[chosen["pin"]], _lib.REPLICAS[chosen["check_replicas"]]
    o.flags = ((_lib.LOW_PRIORITY if chosen["low_priority"] else 0) | (0 if chosen["use_bases"] else _lib.NO_BASES)
               | (_lib.KEEP_CACHED if chosen["keep_cached"] else 0))
    free = chosen["warn_free"]
    o.warn_free = (0 if free else _lib.NONE) if isinstance(free, bool) else free
    keep = _keep(chosen["keep"]) if chosen["keep"] is not None else []
    o.keep, o.nkeep = (c_char_p * max(len(keep), 1))(*keep), len(keep)
    return o


def refuse(key: Key, rank: int, world: int, options: Mapping[str, Any]) -> None:
    """Raises what the library refuses of a saver's options. It looks at them before it opens the store, so this can be
    asked before there is one: of a file, which it does not open."""
    o = _saver_options((os.devnull, *key[1:]), rank, world, None, {**OPTIONS, **options})
    try:
        _lib.call("vckpt_saver_open", byref(o), byref(c_void_p()))
    except Error as error:
        if error.errno != errno.ENOTDIR:
            raise


class Native:
    """One rank's saver of the library. `lock`: begin to submit of one save, and `memory`, belong to one thread at a
    time."""

    def __init__(self, key: Key, rank: int, world: int, launch_id: str | None, options: dict[str, Any]) -> None:
        self.key, self.rank, self.world, self.launch_id = key, rank, world, launch_id
        self.options = {**OPTIONS, **options}
        self.store, self.run, _ = key
        self.lock, self.memory, self.pid = threading.RLock(), Memory(), os.getpid()
        self.users, self.lasting, self.open = 0, False, True
        self._staging: list[Handle] = []
        self._watcher: threading.Thread | None = None
        self._watching, self._wake = threading.Lock(), threading.Event()
        # saves of the library, which are freed before the saver whatever the collector's order
        self.live: set[int | None] = set()
        o = _saver_options(key, rank, world, launch_id, self.options)
        pointer = c_void_p()
        _lib.call("vckpt_saver_open", byref(o), byref(pointer))
        self._pointer = pointer.value

    def check_options(self, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            if self.options[name] != value:
                path = f"{self.store}/{self.run}"
                raise invalid(f"{path} is open with {name}={self.options[name]!r}, not {value!r}: close it first, on "
                              f"all ranks: vckpt.close({path!r})")

    def check_process(self) -> None:
        if self.pid != os.getpid():
            raise Forked(EFORKED, f"the saver of {self.store}/{self.run} belongs to process {self.pid}: its child "
                                  f"{os.getpid()} cannot use it; open one in the child after the fork")

    def begin(self, *, step: int | None = None, attributes: Attributes | None = None,
              base: Path | Iterable[Path] | None = None, replace: bool = False) -> Handle:
        """All ranks call this with the same step. The caller holds `lock` until submit or give_up."""
        self.check_process()
        if not self.open:
            raise Error(errno.ESHUTDOWN, f"the saver of {self.store}/{self.run} is closed")
        if step is None and self.world > 1:
            raise invalid(f"{self.store}/{self.run}: {self.world} ranks save together, so a save needs step=: the "
                          "trainer's count of iterations, the same on all ranks")
        number = _lib.NONE if step is None else _lib.whole(step, "step", 0, 2**44 - 1, "0 to 2**44 - 1")
        refused = None
        try:
            o = self._save_options(number, attributes, base, replace)
        except BaseException as error:      # ranks that have not refused it would wait for this rank's part
            refused, o = error, _lib.SaveOptions(size=ctypes.sizeof(_lib.SaveOptions), step=number)
        pointer = c_void_p()
        _lib.call("vckpt_save_begin", self._pointer, byref(o), byref(pointer))
        handle = Handle(self, pointer.value, step, replace)
        if refused is not None:
            handle.give_up(refused)
            raise refused
        return handle

    def free(self, pointer: int | None, reason: bytes | None = None) -> None:
        """reason: why it was not submitted, for the other ranks."""
        try:
            self.live.remove(pointer)
        except KeyError:
            return
        if self.pid != os.getpid():
            return
        if reason is None:
            _lib.lib().vckpt_save_free(pointer)
        else:
            _lib.lib().vckpt_save_give_up(pointer, reason)

    def ended(self, error: Exception) -> Exception:
        """The error of a save, as this rank raises it: of its own class, and with several ranks an Aborted as well."""
        if self.world == 1 or isinstance(error, (Forked, _lib.Timeout, _lib.Undecided)):
            return error
        return _lib.aborted(error)

    def _save_options(self, step: int, attributes: Attributes | None, base: Path | Iterable[Path] | None,
                      replace: bool) -> _lib.SaveOptions:
        o = _lib.SaveOptions(size=ctypes.sizeof(_lib.SaveOptions), step=step, stream=_stream())
        pairs = [(_lib.text(key, "attribute"), _attribute(key, value)) for key, value in (attributes or {}).items()]
        o.attributes = (_lib.Attribute * max(len(pairs), 1))(*(_lib.Attribute(*pair) for pair in pairs))
        o.nattributes = len(pairs)
        bases = [base_name(one, self.store) for one in _several(base)]
        o.bases, o.nbases = (c_char_p * max(len(bases), 1))(*bases), len(bases)
        o.flags = _lib.REPLACE if replace else 0
        return o

    # A thread drops what handles keep for staging once staging is over, whether or not the caller asks.

    def started(self, handle: Handle) -> None:
        with self._watching:
            self._staging.append(handle)
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="vckpt staging", daemon=True)
                try:
                    watcher.start()
                    self._watcher = watcher
                except RuntimeError:        # the interpreter ends: close lets go of them
                    pass

    def _watch(self) -> None:
        pause = WATCH_S
        while not self._wake.wait(pause):
            with self._watching:
                before, self._staging = self._staging, [handle for handle in self._staging
                                                        if not handle._ended_staging()]
                pause = WATCH_S if len(self._staging) < len(before) else min(pause * 1.5, 25 * WATCH_S)
                del before
                if not self._staging:
                    self._watcher = None
                    return

    def _end_watching(self) -> None:
        self._wake.set()
        watcher = self._watcher
        if watcher is not None:
            watcher.join()
        for handle in self._staging:
            handle._refs = []
        self._staging, self._watcher = [], None

    def close(self) -> None:
        """Waits until every save is decided. Raises the error of a failed save that no caller has seen."""
        self.check_process()
        self.open = False
        try:
            _lib.call("vckpt_saver_close", self._pointer)
        finally:
            self._end_watching()
            self.memory = Memory()

    def __del__(self) -> None:
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer and self.pid == os.getpid() and not sys.is_finalizing():
            for save in list(self.live):
                self.free(save)
            _lib.lib().vckpt_saver_free(pointer)


def _attribute(key: str, value: object) -> bytes:
    if not isinstance(value, (str, numbers.Real)):
        hint = ": give its item()" if hasattr(value, "item") else ""
        raise invalid(f"attribute {key!r}: expected a string or a number, not {type(value).__name__}{hint}")
    return _lib.text(str(value), "attribute")


def _several(base: Path | Iterable[Path] | None) -> list[Path]:
    if base is None:
        return []
    return list(base) if not isinstance(base, str) and isinstance(base, Iterable) else [base]


def base_name(base: Path, store: str) -> bytes:
    """RUN/STEP as the library takes it, also from a path into the store."""
    if not isinstance(base, (str, os.PathLike)):
        raise invalid(f"base {base!r}: expected RUN/STEP")
    text = os.fspath(base)
    full = os.path.abspath(text)
    if full.startswith(store + os.sep):
        text = os.path.relpath(full, store)
    run, _, last = text.rpartition("/")
    step = paths.step_of(last)
    return _lib.text(text if step is None else f"{run or paths.DEFAULT_RUN}/{step}", "base")


def _stream() -> int | None:
    torch = torch_module()
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream().cuda_stream or None
