# SPDX-License-Identifier: Apache-2.0
"""Saving: `save`, `async_save`, `Saver`, and under them one native saver for each process, store, run and rank.

The native saver lives until its last user closes it, or the process ends: `save` and `async_save` use it until `close`,
each Saver and each StorageWriter until its own close. All of them share one launch, so a second call never starts a new
launch that would abort a save still under way. All ranks open and close together, and in the same order: each opening
makes a launch id, and the ranks agree on it through the process group.

A child after a fork has none of the threads: what was opened before the fork refuses there, and touches nothing."""
from __future__ import annotations

import atexit
import errno
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import _lib, commons, meeting, paths, state as states
from ._lib import Error, invalid
from .handle import Handle as Handle
from .native import OPTIONS as OPTIONS, Key, Native as Native, _attribute, _options as _options, refuse
from .paths import init as init, latest as latest, split as split, steps as steps  # for users of this module
from .signatures import Attributes, Call, Options, Path, Save, State, Unpack
from .tensors import process_group, torch_module, uncollected

if TYPE_CHECKING:
    import torch

_natives: dict[Key, Native] = {}               # (store, run, rank) -> Native
_key_locks: dict[Key, threading.RLock] = {}
_lock = threading.Lock()    # protects the two above


def _group() -> tuple[int, int] | None:
    """(rank, world) of torch's default process group, or None; does not import torch."""
    dist = process_group()
    return None if dist is None else (dist.get_rank(), dist.get_world_size())


def _who(rank: int | None, world: int | None, launch_id: str | None) -> tuple[int, int, str | None]:
    """(rank, world, launch id or None to make one)."""
    if (rank is None) != (world is None):
        raise invalid("rank= and world= belong together: give both or neither")
    group = _group()
    if rank is None or world is None:
        if group is None:
            meeting.check_alone()
        rank, world = group or (0, 1)
    if launch_id is None and world > 1 and group != (rank, world):
        raise invalid(f"rank {rank} of {world} without a process group: give launch_id=, a text that all ranks share "
                      "and that is new at every start (random bytes that rank 0 sends to all)")
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
            raise invalid(f"{store}/{run} is open for ranks {', '.join(str(n.rank) for n in own)} in this process: "
                          "give rank=")
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
            raise invalid(f"{path} is open with {found.world} ranks, not {world}: close it first: "
                          f"vckpt.close({path!r})")
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
        if not paths.is_store(store):
            refuse(key, rank, world, chosen)
        paths.begin(store, run, rank == 0)
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
    The next save opens it again. All ranks call it together. What was open before a fork is the parent's: a child
    that names such a run gets Forked."""
    wanted = None if path is None else split(path)[:2]
    with _lock:
        found = [n for n in _natives.values() if (n.pid == os.getpid() if wanted is None
                 else (n.store, n.run) == (os.path.realpath(wanted[0]), wanted[1]))]
    error = None
    for one in found:
        try:
            _close(one)
        except Error as failed:
            error = error or failed
    if error:
        raise error


def _after_fork() -> None:
    """Makes new locks in the child: another thread may have held the old ones."""
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
           per_rank: str | Iterable[str] = (), replace: bool = False, blobs: Mapping[str, Any] | None = None,
           found: states.Collected | None = None) -> Handle:
    """found: what the state is, where it was looked at before."""
    begun = time.perf_counter_ns()
    with one.lock:
        handle = None
        try:
            handle = one.begin(step=step, attributes=attributes, base=base, replace=replace)
            with uncollected():
                found = found or states.collect(state, mesh=mesh, rank=one.rank, world=one.world, per_rank=per_rank,
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
    """Ranks may give files of their own; a file that several give has to be equal."""
    return [(commons.group_name(f"blob {name}", 0), "its bytes", data) for name, data in files]


def _attributes_alike(attributes: Attributes | None) -> list[commons.Row]:
    pairs = [("attributes", _lib.text(key, "attribute").decode(), _attribute(key, value))
             for key, value in (attributes or {}).items()]
    return pairs or [("attributes", "none", b"")]


def _on_device(device: torch.device | None, handle: Handle, refs: list[object]) -> None:
    if device is None:
        return handle.submit(refs)
    torch = torch_module()
    if device.index is not None and device.index != torch.cuda.current_device():
        raise invalid(f"the tensors are on {device}, the current device is cuda:{torch.cuda.current_device()}: call "
                      "torch.cuda.set_device first")
    torch.cuda.current_stream()                 # makes the context current in this thread
    return handle.submit(refs)


def _place(path: Path, step: int | None) -> tuple[str, str, int | None]:
    """(store, run, step)."""
    store, run, what = split(path, making=True)
    named = paths.saved(path, what)
    if named is not None and step is not None and named != step:
        raise invalid(f"{path}: the path says step {named}, step= says {step}")
    return store, run, named if step is None else step


def async_save(path: Path, state: State, *, mesh: Any = None, step: int | None = None,
               attributes: Mapping[str, str | float] | None = None,
               base: Path | Iterable[Path] | None = None, per_rank: str | Iterable[str] = (), replace: bool = False,
               blobs: Mapping[str, Any] | None = None, rank: int | None = None, world: int | None = None,
               launch_id: str | None = None, **options: Unpack[Options]) -> Handle:
    """Starts a save of `state` and returns a Handle at once. Until `handle.staged()` the caller leaves the tensors
    alone.

    path        STORE/RUN or STORE/RUN/STEP (docs/python.md, "What a path names")
    state       {component: tensors, values, modules, optimizers, nested at will}; a state dict by itself is the
                component `model`
    mesh        of the tensors that have none: they are replicated over it (None: over all ranks)
    step        the trainer's count of iterations, the same on all ranks; one process alone may leave it out: the next
                one
    attributes  {"loss": 2.31}: the same on all ranks
    base        "RUN/STEP", or several: further steps whose data may be reused
    per_rank    patterns over dotted paths ("dataloader", "trainer.cache.*"): kept by each rank for itself
    replace     a step of that number is replaced, atomically; else it is refused
    blobs       {name: bytes}: files of the step ("config.json")
    rank, world, launch_id   where there is no torch process group (MPI, tests)
    options     of the saver, at the first save: heartbeat, start_timeout, deadline (s), ring_bytes, pin, check_replicas
                ("sample", "full", "off"), threads, low_priority, use_bases, keep, keep_cached,
                warn_free"""
    store, run, step = _place(path, step)
    found = None
    if not paths.is_store(store) and _who(rank, world, launch_id)[1] == 1:      # no store for what is refused
        with uncollected():
            found = states.collect(state, mesh=mesh, rank=0, world=1, per_rank=per_rank)
    one = native(store, run, rank=rank, world=world, launch_id=launch_id, user=False, **options)
    return _start(one, state, mesh=mesh, step=step, attributes=attributes, base=base, per_rank=per_rank,
                  replace=replace, blobs=blobs, found=found)


def save(path: Path, state: State, **arguments: Unpack[Call]) -> int:
    """Saves `state` and returns the step's number when it is visible and durable. Arguments: those of async_save."""
    return async_save(path, state, **arguments).committed()


class Saver:
    """Saves of one run; one for a whole training. Opened by all ranks together. `mesh`, `per_rank` and `base` here are
    the defaults of its saves; rank, world, launch_id and options as for async_save."""

    def __init__(self, path: Path, *, mesh: Any = None, per_rank: str | Iterable[str] = (),
                 base: Path | Iterable[Path] | None = None, rank: int | None = None, world: int | None = None,
                 launch_id: str | None = None, **options: Unpack[Options]) -> None:
        self.store, self.run, step = split(path, making=True)
        if step is not None:
            raise invalid(f"{path}: a Saver saves a run, not one step: give STORE/RUN, and step= to its saves")
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
            raised = handle._raised
            try:
                handle.committed()
            except Error as failed:
                error = error if raised else error or failed
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
