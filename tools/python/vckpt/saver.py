# SPDX-License-Identifier: Apache-2.0
"""Saving: `save`, `async_save`, `Saver`, and under them one native saver for each process, store, run and rank.

The native saver lives until its last user closes it, or the process ends: `save` and `async_save` are users for good
(until `close`), each Saver and each StorageWriter is one until its own close. All of them share one launch, so a second
call never starts a new launch that would abort a save still under way. All ranks open and close together, and in the
same order: each opening makes a launch id, and the ranks agree on it through the process group.

A child after a fork has none of the threads: what was opened before the fork refuses there, and touches nothing."""
from __future__ import annotations

import atexit
import ctypes
import errno
import math
import numbers
import os
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from ctypes import byref, c_char_p, c_void_p
from typing import TYPE_CHECKING, Any

from . import _lib, commons, meeting, paths, state as states
from ._lib import EFORKED, Error, Forked, InvalidArgument
from .paths import init as init, latest as latest, split as split, steps as steps  # for those who have the saver
from .signatures import Call, Options, Path, Progress, Save, State, Unpack

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from .signatures import Attributes

Key = tuple[str, str, int]      # store, run, rank

SLICE_MS = 250              # of a wait, so that Ctrl-C is heard
WATCH_S = 0.004             # how often it is looked whether a save is staged, at first
_natives: dict[Key, Native] = {}               # (store, run, rank) -> Native
_key_locks: dict[Key, threading.RLock] = {}
_lock = threading.Lock()    # protects the two above

# ---- a save under way ----

class Handle:
    """A save under way. Any thread may ask."""

    def __init__(self, native: Native, pointer: int | None, step: int | None, replace: bool = False) -> None:
        self._native, self._pointer, self._replace = native, pointer, replace
        self._refs: list[object] = []
        native.live.add(pointer)
        self._step, self._submitted, self._called_ns, self._told = step, False, 0, False

    # -- the parts of a save; by one thread --

    def tensors(self, rows: NDArray[np.uint64]) -> None:
        """rows: an array of struct vckpt_tensor, one after another, as 64-bit words."""
        if len(rows):
            _lib.call("vckpt_save_tensors", self._at(), rows.ctypes.data, len(rows))

    def blob(self, name: str, data: Any, per_rank: bool = False) -> None:
        try:
            data = bytes(memoryview(data))
        except TypeError:
            raise InvalidArgument(errno.EINVAL, f"blob {name!r}: expected bytes, not {type(data).__name__}") from None
        _lib.call("vckpt_save_blob", self._at(), _lib.text(name, "blob"), int(per_rank), data, len(data))

    def common(self, group: str, name: str, data: Any) -> None:
        """A value (bytes) that all ranks which declare anything in `group` have to hold alike: the save is refused
        where they do not. Nothing of it is stored but a digest."""
        self.alike([(group, name, data)])

    def alike(self, rows: Iterable[commons.Row]) -> None:
        """[(group, name, bytes)]: as common."""
        at = self._at()
        for group, name, data in rows:
            data = data if type(data) is bytes else bytes(memoryview(data))
            _lib.call("vckpt_save_common", at, _lib.text(group, "group"), _lib.text(name, "value"), data, len(data))

    def submit(self, refs: Iterable[object] = ()) -> None:
        """refs: what has to live until it is staged."""
        self._refs = list(refs)
        try:
            _lib.call("vckpt_save_submit", self._at())
        except BaseException:
            self._refs = []
            raise
        self._submitted = True
        self._native.started(self)

    def give_up(self, error: BaseException) -> None:
        """Of a save that was not submitted: the other ranks learn why."""
        if not self._submitted:
            self._refs = []
            pointer, self._pointer = self._pointer, None
            if pointer:
                self._native.free(pointer, _why(error))

    # -- asking --

    @property
    def step(self) -> int | None:
        """Its number; None before that is known."""
        return self._step

    @property
    def state(self) -> str:
        return _lib.STATES[self._progress().state]

    @property
    def done(self) -> bool:
        """It is committed, or it failed."""
        return self.state in ("committed", "failed")

    @property
    def progress(self) -> Progress:
        """Of what this rank stores: bytes in all, staged, done."""
        found = self._progress()
        return {"bytes_total": found.bytes_total, "bytes_staged": found.bytes_staged, "bytes_done": found.bytes_done}

    def staged(self, timeout: float | None = None) -> None:
        """Waits until the tensors are the caller's again. Raises vckpt.Timeout, or what the save failed with."""
        self._wait("vckpt_save_wait_staged", timeout)
        self._refs = []

    def committed(self, timeout: float | None = None) -> int:
        """Waits until the step is visible and durable; its number. Raises vckpt.Timeout, or what the save failed
        with."""
        found = _lib.Committed()
        self._wait("vckpt_save_wait_committed", timeout, byref(found))
        self._refs, self._step = [], int(found.step)
        return self._step

    @property
    def timings(self) -> dict[str, Any]:
        """What this rank did: phases (start and end in ns since the epoch, ns that threads were busy, bytes), bytes by
        fate, plan."""
        found = _lib.Timings()
        self._check(_lib.lib().vckpt_save_timings(self._at(), byref(found)))
        result = {name: getattr(found, name) for name, *_ in _lib.Timings._fields_[1:]}
        result["call_ns"] = self._called_ns
        result["phases"] = {phase.name.decode(): {field: getattr(phase, field) for field, *_ in _lib.Phase._fields_[1:]}
                            for phase in found.phase if phase.name}
        return result

    # -- inside --

    def _at(self) -> int:
        self._native.check_process()
        if not self._pointer:
            raise _lib.Aborted(_lib.EABORTED, "the save was given up before it was submitted")
        return self._pointer

    def _progress(self) -> _lib.Progress:
        found = _lib.Progress()
        self._check(_lib.lib().vckpt_save_progress(self._at(), byref(found)))
        return found

    def _check(self, result: int) -> None:
        if result < 0:
            raise _lib.error(result, "")

    def _wait(self, function: str, timeout: float | None, *results: Any) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_MS if end is None else max(0, min(SLICE_MS, int((end - time.monotonic()) * 1000 + 0.5)))
            try:
                return _lib.call(function, self._at(), left, *results)
            except _lib.Timeout as error:
                if end is not None and time.monotonic() >= end:
                    hint = (f": `vckpt ls {shlex.quote(self._native.store)} --incoming` says for which ranks it waits"
                            if self._native.world > 1 and results else "")
                    raise _lib.Timeout(error.errno, f"{error}{hint}") from None
            except Error as error:
                self._refs, self._told = [], True
                if isinstance(error, _lib.StepExists) and not self._replace:
                    error = _lib.StepExists(error.errno, f"{error}: replace=True replaces it")
                raise self._native.ended(error) from None

    def _ended_staging(self) -> bool:
        """Drops the references that were kept for staging, once staging is over."""
        if self._refs and self._pointer and self._submitted and self._progress().state not in (0, 1, 2):
            self._refs = []
        return not self._refs

    def _free(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._native.free(pointer)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._free()


# ---- the native saver ----

OPTIONS = {"heartbeat": 20.0, "start_timeout": 60.0, "deadline": 0.0, "ring_bytes": 0, "pin": "auto",
           "check_replicas": "sample", "threads": 0, "low_priority": False, "use_bases": True, "meet_timeout": 600.0}
NUMBERS: list[tuple[str, Any, int, str]] = [
    ("meet_timeout", numbers.Real, 0, "seconds"), ("heartbeat", numbers.Real, 0, "seconds"),
    ("start_timeout", numbers.Real, 0, "seconds"), ("deadline", numbers.Real, 0, "seconds"),
    ("ring_bytes", numbers.Integral, 0, "a whole number of bytes"), ("threads", numbers.Integral, 0, "a whole number")]


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given (not None), checked."""
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
            raise InvalidArgument(errno.EINVAL, f"{name}={chosen[name]!r}: expected one of {', '.join(words)}")
    for name, kind, least, wanted in NUMBERS:
        value = chosen.get(name, least)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < 1 << 63:
            raise InvalidArgument(errno.EINVAL, f"{name}={value!r}: expected {wanted}")
    return chosen


class Native:
    """One rank's saver of the library. `lock`: begin to submit of one save, and `memory`, belong to one thread at a
    time."""

    def __init__(self, key: Key, rank: int, world: int, launch_id: str | None, options: dict[str, Any]) -> None:
        self.key, self.rank, self.world, self.launch_id = key, rank, world, launch_id
        self.options = {**OPTIONS, **options}
        self.store, self.run, _ = key
        self.lock, self.memory, self.pid = threading.RLock(), states.Memory(), os.getpid()
        self.users, self.lasting, self.open = 0, False, True
        self._staging: list[Handle] = []
        self._watcher: threading.Thread | None = None
        self._watching, self._wake = threading.Lock(), threading.Event()
        # saves of the library, which are freed before the saver whatever the collector's order
        self.live: set[int | None] = set()
        o = _lib.SaverOptions(size=ctypes.sizeof(_lib.SaverOptions), rank=rank, world=world)
        o.store, o.run = os.fsencode(self.store), _lib.text(self.run, "run")
        o.launch_id = _lib.text(launch_id, "launch_id") if launch_id is not None else None
        chosen = self.options
        o.heartbeat_ms, o.start_ms, o.deadline_ms = (_milliseconds(chosen[name])
                                                     for name in ("heartbeat", "start_timeout", "deadline"))
        o.ring_bytes, o.threads = chosen["ring_bytes"], chosen["threads"]
        o.pin, o.check_replicas = _lib.PIN[chosen["pin"]], _lib.REPLICAS[chosen["check_replicas"]]
        o.flags = (_lib.LOW_PRIORITY if chosen["low_priority"] else 0) | (0 if chosen["use_bases"] else _lib.NO_BASES)
        pointer = c_void_p()
        _lib.call("vckpt_saver_open", byref(o), byref(pointer))
        self._pointer = pointer.value

    def check_options(self, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            if self.options[name] != value:
                path = f"{self.store}/{self.run}"
                raise InvalidArgument(errno.EINVAL, f"{path} is open with {name}={self.options[name]!r}, not "
                                                    f"{value!r}: close it first, on all ranks: "
                                      f"vckpt.close({path!r})")

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
            raise InvalidArgument(errno.EINVAL, f"{self.store}/{self.run}: {self.world} ranks save together, so a "
                                                "save needs step=: the trainer's count of "
                                  "iterations, the same on all ranks")
        number = _lib.NONE if step is None else _step(step)
        try:
            o = self._save_options(number, attributes, base, replace)
        except BaseException as error:
            self._skip(number, error)
            raise
        pointer = c_void_p()
        _lib.call("vckpt_save_begin", self._pointer, byref(o), byref(pointer))
        return Handle(self, pointer.value, step, replace)

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
        """The error of a save, as this rank raises it: with several ranks it is an Aborted at each of them, besides its
        own class."""
        if self.world == 1 or isinstance(error, (Forked, _lib.Timeout, _lib.Undecided)):
            return error
        return _lib.aborted(error)

    def _save_options(self, step: int, attributes: Attributes | None, base: Path | Iterable[Path] | None,
                      replace: bool) -> _lib.SaveOptions:
        o = _lib.SaveOptions(size=ctypes.sizeof(_lib.SaveOptions))
        o.step = step
        pairs = [(_lib.text(key, "attribute"), _attribute(key, value)) for key, value in (attributes or {}).items()]
        o.attributes, o.nattributes = (_lib.Attribute * max(len(pairs),
                                                            1))(*(_lib.Attribute(*pair) for pair in pairs)), len(pairs)
        bases = [base_name(one, self.store) for one in _several(base)]
        o.bases, o.nbases = (c_char_p * max(len(bases), 1))(*bases), len(bases)
        o.stream = _stream()
        o.flags = _lib.REPLACE if replace else 0
        return o

    def _skip(self, step: int, error: BaseException) -> None:
        """Begins the save and gives it up: other ranks may not have refused it, and would wait for this rank's part."""
        pointer, o = c_void_p(), _lib.SaveOptions(size=ctypes.sizeof(_lib.SaveOptions), step=step)
        _lib.call("vckpt_save_begin", self._pointer, byref(o), byref(pointer))
        self.live.add(pointer.value)
        self.free(pointer.value, _why(error))

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
            self.memory = states.Memory()

    def __del__(self) -> None:
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer and self.pid == os.getpid() and not sys.is_finalizing():
            for save in list(self.live):
                self.free(save)
            _lib.lib().vckpt_saver_free(pointer)


def _milliseconds(seconds: float) -> int:
    """0 has a meaning of its own, so a time above 0 is at least 1 ms."""
    return min(math.ceil(seconds * 1000), 2**63 - 1)


def _why(error: BaseException) -> bytes:
    """What other ranks are told of it."""
    said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    return f"{type(error).__name__}: {said}".replace("\0", "?").encode("utf-8", "replace")[:800]


def _step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < 2**44:
        raise InvalidArgument(errno.EINVAL, f"step {step!r}: expected a whole number from 0 to 2**44 - 1")
    return int(step.__index__())


def _attribute(key: str, value: object) -> bytes:
    if not isinstance(value, (str, numbers.Real)):
        hint = ": give its item()" if hasattr(value, "item") else ""
        raise InvalidArgument(errno.EINVAL, f"attribute {key!r}: expected a string or a number, not "
                                            f"{type(value).__name__}{hint}")
    return _lib.text(str(value), "attribute")


def _several(base: Path | Iterable[Path] | None) -> list[Path]:
    if base is None:
        return []
    return list(base) if not isinstance(base, str) and isinstance(base, Iterable) else [base]


def base_name(base: Path, store: str) -> bytes:
    """RUN/STEP as the library takes it, also from a path into the store."""
    if not isinstance(base, (str, os.PathLike)):
        raise InvalidArgument(errno.EINVAL, f"base {base!r}: expected RUN/STEP")
    text = os.fspath(base)
    full = os.path.abspath(text)
    if full.startswith(store + os.sep):
        text = os.path.relpath(full, store)
    return _lib.text(re.sub(r"/step-0*([0-9])", r"/\1", text), "base")


def _stream() -> int | None:
    torch = states.torch_module()
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream().cuda_stream or None


def _group() -> tuple[int, int] | None:
    """(rank, world) of torch's default process group, or None; does not import torch."""
    if states.torch_module() is None or "torch.distributed" not in sys.modules:
        return None
    found: tuple[int, int] | None = states.torch_state().group_rank()
    return found


def _who(rank: int | None, world: int | None, launch_id: str | None) -> tuple[int, int, str | None]:
    """(rank, world, launch id or None to make one)."""
    if (rank is None) != (world is None):
        raise InvalidArgument(errno.EINVAL, "rank= and world= belong together: give both or neither")
    group = _group()
    if rank is None or world is None:
        if group is None:
            meeting.check_alone()
        rank, world = group or (0, 1)
    if launch_id is None and world > 1 and group != (rank, world):
        raise InvalidArgument(errno.EINVAL, f"rank {rank} of {world} without a process group: give launch_id=, a text "
                                            "that all ranks share and "
                              "that is new at every start (random bytes that rank 0 sends to all)")
    return rank, world, launch_id


def native(store: str, run: str, *, rank: int | None = None, world: int | None = None, launch_id: str | None = None,
           user: bool = True, **options: Any) -> Native:
    """The saver of this process for a run, opened at the first call, and the store made where there is none. user:
    counts as a user, and is given back with release(); else it stays for good. All ranks make the first call
    together."""
    store = os.path.realpath(store)
    if rank is None:
        with _lock:
            own = [n for (s, r, _), n in _natives.items() if (s, r) == (store, run)]
        if len(own) > 1:
            raise InvalidArgument(errno.EINVAL, f"{store}/{run} is open for ranks "
                                                f"{', '.join(str(n.rank) for n in own)} in this process: give rank=")
        if own and _group() in (None, (own[0].rank, own[0].world)):
            rank, world, launch_id = own[0].rank, own[0].world, launch_id or ""
    rank, world, launch_id = _who(rank, world, launch_id)
    key = store, run, rank
    with _lock:
        lock = _key_locks.setdefault(key, threading.RLock())
    with lock:
        found = _natives.get(key)
        if found is None:
            found = _open(key, rank, world, launch_id, options)
            with _lock:
                _natives[key] = found
        found.check_process()
        if found.world != world:
            path = f"{store}/{run}"
            raise InvalidArgument(errno.EINVAL, f"{path} is open with {found.world} ranks, not {world}: close it "
                                                f"first: vckpt.close({path!r})")
        found.check_options(_options(options))
        if user:
            found.users += 1
        else:
            found.lasting = True
        return found


def _open(key: Key, rank: int, world: int, launch_id: str | None, options: dict[str, Any]) -> Native:
    store, run, _ = key
    path, timeout = os.path.join(store, run), OPTIONS["meet_timeout"]
    dist = sys.modules["torch.distributed"] if launch_id is None and world > 1 else None
    try:
        chosen = _options(options)
        timeout = chosen.get("meet_timeout", timeout)
        paths.make(store)
    except Exception as error:
        if dist is not None:
            meeting.fail(dist, error, run, path)
            raise _lib.aborted(error) from error
        raise
    if launch_id is None:
        launch_id = secrets.token_hex(16)
        if dist is not None:
            launch_id = meeting.agree(dist, launch_id, run, path, timeout)
    return Native(key, rank, world, launch_id, chosen)


def release(one: Native) -> None:
    """Gives a user's share back; the last one closes."""
    one.check_process()
    with _key_locks[one.key]:
        one.users -= 1
        if one.users <= 0 and not one.lasting:
            _close(one)


def _close(one: Native) -> None:
    with _lock:
        if _natives.get(one.key) is one:
            del _natives[one.key]
    one.close()


def close(path: Path | None = None) -> None:
    """Waits until every save of STORE/RUN (None: of all runs) is decided, and closes what this process has open of it.
    The next save opens it again. All ranks call it together."""
    wanted = None if path is None else split(path)[:2]
    with _lock:
        found = [n for n in _natives.values() if wanted is None
                 or (n.store, n.run) == (os.path.realpath(wanted[0]), wanted[1])]
    error = None
    for one in found:
        try:
            _close(one)
        except Error as failed:
            error = error or failed
    if error:
        raise error


def _after_fork() -> None:
    """In the child: locks that another thread may have held."""
    global _lock
    _lock = threading.Lock()
    _key_locks.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    for one in list(_natives.values()):
        if one.pid == os.getpid():
            try:
                _close(one)
            except Error as error:
                print(f"vckpt: {error}", file=sys.stderr)


# ---- what users call ----

def _start(one: Native, state: State, *, mesh: Any = None, step: int | None = None,
           attributes: Attributes | None = None, base: Path | Iterable[Path] | None = None,
           per_rank: str | Iterable[str] = (), replace: bool = False, blobs: Mapping[str, Any] | None = None) -> Handle:
    begun = time.perf_counter_ns()
    with one.lock:
        handle = None
        try:
            handle = one.begin(step=step, attributes=attributes, base=base, replace=replace)
            found = states.collect(state, mesh=mesh, rank=one.rank, world=one.world, per_rank=per_rank,
                                   memory=one.memory)
            rows = states.rows_of(found)
            files = list((blobs or {}).items())
            for name, per, data in found.blobs + [(name, False, data) for name, data in files]:
                handle.blob(name, data, per)
            if one.world > 1:
                handle.alike(found.commons + _files_alike(files) + _attributes_alike(attributes))
            handle.tensors(rows)
            _on_device(found.device, handle, found.refs)
        except BaseException as error:
            if handle is not None:
                handle.give_up(error)
            if isinstance(error, Exception) and one.ended(error) is not error:
                raise one.ended(error) from error
            raise
    handle._called_ns = time.perf_counter_ns() - begun
    return handle


def _files_alike(files: Iterable[tuple[str, Any]]) -> list[commons.Row]:
    """Ranks may give files of their own; one that several give is one."""
    return [(commons.group_name(f"blob {name}", 0), "its bytes", data) for name, data in files]


def _attributes_alike(attributes: Attributes | None) -> list[commons.Row]:
    pairs = [("attributes", _lib.text(key, "attribute").decode(), _attribute(key, value)) for key,
             value in (attributes or {}).items()]
    return pairs or [("attributes", "none", b"")]


def _on_device(device: torch.device | None, handle: Handle, refs: list[object]) -> None:
    if device is None:
        return handle.submit(refs)
    torch = states.torch_module()
    if device.index is not None and device.index != torch.cuda.current_device():
        raise InvalidArgument(errno.EINVAL, f"the tensors are on {device}, the current device is "
                                            f"cuda:{torch.cuda.current_device()}: "
                              "call torch.cuda.set_device first")
    torch.cuda.current_stream()                 # makes the context current in this thread
    return handle.submit(refs)


def _place(path: Path, step: int | None) -> tuple[str, str, int | None]:
    """(store, run, step)."""
    store, run, named = split(path, making=True)
    if named == "latest":
        raise InvalidArgument(errno.EINVAL, f"{path}: latest can be read, not saved: give a number")
    if named is not None and step is not None and named != step:
        raise InvalidArgument(errno.EINVAL, f"{path}: the path says step {named}, step= says {step}")
    return store, run, named if step is None else step


def async_save(path: Path, state: State, *, mesh: Any = None, step: int | None = None,
               attributes: Mapping[str, str | float] | None = None,
               base: Path | Iterable[Path] | None = None, per_rank: str | Iterable[str] = (), replace: bool = False,
               blobs: Mapping[str, Any] | None = None, rank: int | None = None, world: int | None = None,
               launch_id: str | None = None, **options: Unpack[Options]) -> Handle:
    """Starts a save of `state` and returns a Handle at once. Until `handle.staged()` the caller leaves the tensors
    alone.

    path        STORE/RUN or STORE/RUN/STEP
    state       {component: tensors, values, modules, optimizers, nested at will}; a state dict by itself is the
                component `model`
    mesh        of the tensors that have none: they are replicated over it (None: over all ranks)
    step        the trainer's count of iterations, the same on all ranks; one process alone may leave it out: the next
                one
    attributes  {"loss": 2.31}: the same on all ranks
    base        "RUN/STEP", or several: steps besides the run's newest whose data may be reused
    per_rank    patterns over dotted paths ("dataloader", "trainer.cache.*"): kept by each rank for itself
    replace     a step of that number is replaced, atomically; else it is refused
    blobs       {name: bytes}: files of the step ("config.json")
    rank, world, launch_id   where there is no torch process group (MPI, tests)
    options     of the saver, at the first save: heartbeat, start_timeout, deadline (s), ring_bytes, pin, check_replicas
                 ("sample", "full", "off"), threads, low_priority, use_bases"""
    store, run, step = _place(path, step)
    one = native(store, run, rank=rank, world=world, launch_id=launch_id, user=False, **options)
    return _start(one, state, mesh=mesh, step=step, attributes=attributes, base=base, per_rank=per_rank,
                  replace=replace, blobs=blobs)


def save(path: Path, state: State, **arguments: Unpack[Call]) -> int:
    """Saves `state` and returns the step's number when it is visible and durable. Arguments: those of async_save."""
    return async_save(path, state, **arguments).committed()


class Saver:
    """Saves of one run; one for a whole training. Opened by all ranks together. `mesh`, `per_rank` and `base` here are
    the defaults of its saves; rank, world, launch_id and options as for async_save."""

    def __init__(self, path: Path, *, mesh: Any = None, per_rank: str | Iterable[str] = (),
                 base: Path | Iterable[Path] | None = None,
                 rank: int | None = None, world: int | None = None, launch_id: str | None = None,
                 **options: Unpack[Options]) -> None:
        self.store, self.run, step = split(path, making=True)
        if step is not None:
            raise InvalidArgument(errno.EINVAL, f"{path}: a Saver saves a run, not one step: give STORE/RUN, and "
                                                "step= to its saves")
        self._defaults = {"mesh": mesh, "per_rank": per_rank, "base": base}
        self._handles: list[Handle] = []
        self._native: Native | None = native(self.store, self.run, rank=rank, world=world, launch_id=launch_id,
                                             **options)

    def _open(self) -> Native:
        if self._native is None:
            raise Error(errno.ESHUTDOWN, f"the saver of {self.store}/{self.run} is closed")
        return self._native

    @property
    def rank(self) -> int:
        return self._open().rank

    @property
    def world(self) -> int:
        return self._open().world

    def async_save(self, state: State, **arguments: Unpack[Save]) -> Handle:
        """Handle. Arguments: mesh, step, attributes, base, per_rank, replace, blobs, as for vckpt.async_save."""
        handle = _start(self._open(), state, **{**self._defaults, **arguments})
        self._handles = [one for one in self._handles if not one.done] + [handle]
        return handle

    def save(self, state: State, **arguments: Unpack[Save]) -> int:
        """The step's number, when it is visible and durable."""
        return self.async_save(state, **arguments).committed()

    def close(self) -> None:
        """Waits until its saves are decided. Raises the error of a failed save that no caller has seen. Idempotent."""
        one, self._native = self._native, None
        if one is None:
            return
        error = None
        for handle in self._handles:
            told = handle._told
            try:
                handle.committed()
            except Error as failed:
                error = error if told else error or failed
        self._handles = []
        try:
            release(one)
        except Error as failed:
            error = error or failed
        if error:
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except Error:
            if kind is None:
                raise
