# SPDX-License-Identifier: Apache-2.0
"""Saving: `save`, `async_save`, `Saver`, and under them one native saver for each process, store, run and rank.

The native saver lives until its last user closes it, or the process ends: `save` and `async_save` are users for good (until
`close`), each Saver and each StorageWriter is one until its own close. All of them count saves together, so a second call
never starts a new launch that would abort a save still under way. Opening and closing is done by all ranks alike, and in
the same order: a launch id is made at each opening and goes over the process group.

A child after a fork has none of the threads: what was opened before the fork refuses there, and touches nothing."""
import atexit
import ctypes
import errno
import math
import numbers
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_void_p

from . import _lib, state as states
from ._lib import Error, Forked, InvalidArgument, NotAStore

SLICE_MS = 250              # of a wait, so that Ctrl-C is heard
_natives = {}               # (store, run, rank) -> Native
_key_locks = {}
_lock = threading.Lock()    # protects the two above
_stores = {}                # directories that were found to be stores


# ---- paths ----

def is_store(path):
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


def split(path):
    """(store, run, step or None) of STORE/RUN or STORE/RUN/STEP: the store is the nearest parent that is one."""
    given = os.fspath(path)
    full = os.path.abspath(given)
    store, rest = os.path.dirname(full), [os.path.basename(full)]
    while not is_store(store):
        if store == os.path.dirname(store):
            if is_store(full):
                raise InvalidArgument(errno.EINVAL, f"{given} is a store: name a run in it, {os.path.join(given, 'RUN')}")
            raise NotAStore(_lib.ENOSTORE, f"{given}: no parent directory is a store (make one with `vckpt init` or vckpt.init)")
        rest.insert(0, os.path.basename(store))
        store = os.path.dirname(store)
    if len(rest) == 1:
        return store, rest[0], None
    step = rest[1]
    found = re.fullmatch(r"(?:step-)?([0-9]{1,20})", step)
    if len(rest) > 2 or not (found or step == "latest"):
        raise InvalidArgument(errno.EINVAL, f"{given}: in the store {store} expected RUN or RUN/STEP, found {'/'.join(rest)}")
    return store, rest[0], int(found[1]) if found else "latest"


def init(path):
    """Makes an empty store. vckpt.StoreExists (a FileExistsError): it is one."""
    _lib.store_init(os.fspath(path))


def steps(path):
    """The numbers of the steps of STORE/RUN, ascending; none where there is no such run."""
    store, run, _ = split(path)
    numbers, count = ctypes.POINTER(ctypes.c_uint64)(), ctypes.c_size_t()
    try:
        _lib.call("vckpt_run_steps", os.fsencode(store), run.encode(), byref(numbers), byref(count))
    except FileNotFoundError:
        return []
    result = [numbers[i] for i in range(count.value)]
    ctypes.CDLL(None).free(ctypes.cast(numbers, c_void_p))
    return result


# ---- a save under way ----

class Handle:
    """A save under way. Any thread may ask."""

    def __init__(self, native, pointer, step, replace=False):
        self._native, self._pointer, self._refs, self._replace = native, pointer, [], replace
        native.live.add(pointer)
        self._step, self._submitted, self._called_ns, self._told = step, False, 0, False

    # -- the parts of a save; by one thread --

    def tensors(self, rows):
        """rows: an array of struct vckpt_tensor, one after another, as 64-bit words."""
        if len(rows):
            _lib.call("vckpt_save_tensors", self._at(), rows.ctypes.data, len(rows))

    def blob(self, name, data, per_rank=False):
        try:
            data = bytes(memoryview(data))
        except TypeError:
            raise InvalidArgument(errno.EINVAL, f"blob {name!r}: expected bytes, not {type(data).__name__}") from None
        _lib.call("vckpt_save_blob", self._at(), _lib.text(name, "blob"), int(per_rank), data, len(data))

    def submit(self, refs=()):
        """refs: what has to live until it is staged."""
        self._refs = list(refs)
        self._native.started(self)
        _lib.call("vckpt_save_submit", self._at())
        self._submitted = True

    def give_up(self, error):
        """Of a save that was not submitted: the other ranks learn why."""
        if not self._submitted:
            pointer, self._pointer = self._pointer, None
            if pointer:
                self._native.free(pointer, _why(error))

    # -- asking --

    @property
    def step(self):
        """Its number; None before that is known."""
        return self._step

    @property
    def state(self):
        return _lib.STATES[self._progress().state]

    @property
    def done(self):
        """It is committed, or it failed."""
        return self.state in ("committed", "failed")

    @property
    def progress(self):
        """Of what this rank stores: bytes in all, staged, done."""
        found = self._progress()
        return {"bytes_total": found.bytes_total, "bytes_staged": found.bytes_staged, "bytes_done": found.bytes_done}

    def staged(self, timeout=None):
        """Waits until the tensors are the caller's again. Raises vckpt.Timeout, or what the save failed with."""
        self._wait("vckpt_save_wait_staged", timeout)
        self._refs = []

    def committed(self, timeout=None):
        """Waits until the step is visible and durable; its number. Raises vckpt.Timeout, or what the save failed with."""
        found = _lib.Committed()
        self._wait("vckpt_save_wait_committed", timeout, byref(found))
        self._refs, self._step = [], found.step
        return found.step

    @property
    def timings(self):
        """What this rank did: phases (start and end in ns since the epoch, ns that threads were busy, bytes), bytes by fate, plan."""
        found = _lib.Timings()
        self._check(_lib.lib().vckpt_save_timings(self._at(), byref(found)))
        result = {name: getattr(found, name) for name, _ in _lib.Timings._fields_[1:]}
        result["call_ns"] = self._called_ns
        result["phases"] = {phase.name.decode(): {field: getattr(phase, field) for field, _ in _lib.Phase._fields_[1:]}
                            for phase in found.phase if phase.name}
        return result

    # -- inside --

    def _at(self):
        self._native.check_process()
        if not self._pointer:
            raise _lib.Aborted(_lib.EABORTED, "the save was given up before it was submitted")
        return self._pointer

    def _progress(self):
        found = _lib.Progress()
        self._check(_lib.lib().vckpt_save_progress(self._at(), byref(found)))
        return found

    def _check(self, result):
        if result < 0:
            raise _lib.error(result, "")

    def _wait(self, function, timeout, *results):
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_MS if end is None else max(0, min(SLICE_MS, int((end - time.monotonic()) * 1000 + 0.5)))
            try:
                return _lib.call(function, self._at(), left, *results)
            except _lib.Timeout as error:
                if end is not None and time.monotonic() >= end:
                    hint = f": `vckpt ls {self._native.store} --incoming` says for which ranks it waits" if self._native.world > 1 and results else ""
                    raise _lib.Timeout(error.errno, f"{error}{hint}") from None
            except Error as error:
                self._refs, self._told = [], True
                if isinstance(error, _lib.StepExists) and not self._replace:
                    raise _lib.StepExists(error.errno, f"{error}: replace=True replaces it") from None
                raise

    def _ended_staging(self):
        """Lets go of what was kept for staging, where that is over."""
        if self._refs and self._pointer and self._submitted and self._progress().state not in (0, 1, 2):
            self._refs = []
        return not self._refs

    def _free(self):
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._native.free(pointer)

    def __del__(self):
        if not sys.is_finalizing():
            self._free()


# ---- the native saver ----

OPTIONS = {"heartbeat": 20.0, "start_timeout": 60.0, "deadline": 0.0, "ring_bytes": 0, "pin": "auto", "check_replicas": "sample", "threads": 0,
           "low_priority": False, "use_bases": True, "plan_cache": None}
NUMBERS = [("heartbeat", numbers.Real, 0, "seconds"), ("start_timeout", numbers.Real, 0, "seconds"), ("deadline", numbers.Real, 0, "seconds"),
           ("ring_bytes", numbers.Integral, 0, "a whole number of bytes"), ("threads", numbers.Integral, 0, "a whole number")]


def _options(given):
    """Those that were given (not None), checked."""
    unknown = [name for name in given if name not in OPTIONS]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; there are {', '.join(OPTIONS)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    if isinstance(chosen.get("pin"), bool):
        chosen["pin"] = "yes" if chosen["pin"] else "no"
    if isinstance(chosen.get("check_replicas"), bool):
        chosen["check_replicas"] = "full" if chosen["check_replicas"] else "off"
    for name, words in (("pin", _lib.PIN), ("check_replicas", _lib.REPLICAS)):
        if name in chosen and chosen[name] not in words:
            raise InvalidArgument(errno.EINVAL, f"{name}={chosen[name]!r}: one of {', '.join(words)}")
    for name, kind, least, words in NUMBERS:
        value = chosen.get(name, least)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < 1 << 63:
            raise InvalidArgument(errno.EINVAL, f"{name}={value!r}: expected {words}")
    return chosen


class Native:
    """One rank's saver of the library. `lock`: begin to submit of one save, and `memory`, belong to one thread at a time."""

    def __init__(self, key, rank, world, launch_id, options):
        self.key, self.rank, self.world, self.launch_id = key, rank, world, launch_id
        self.options = {**OPTIONS, **options}
        self.store, self.run, _ = key
        self.lock, self.memory, self.pid = threading.RLock(), states.Memory(), os.getpid()
        self.users, self.lasting, self.open, self._staging = 0, False, True, []
        self.live = set()           # saves of the library, which are freed before the saver whatever the collector's order
        o = _lib.SaverOptions(size=ctypes.sizeof(_lib.SaverOptions), rank=rank, world=world)
        o.store, o.run = os.fsencode(self.store), _lib.text(self.run, "run")
        o.launch_id = _lib.text(launch_id, "launch_id") if launch_id is not None else None
        chosen = self.options
        o.heartbeat_ms, o.start_ms, o.deadline_ms = (_milliseconds(chosen[name]) for name in ("heartbeat", "start_timeout", "deadline"))
        o.ring_bytes, o.threads = chosen["ring_bytes"], chosen["threads"]
        o.pin, o.check_replicas = _lib.PIN[chosen["pin"]], _lib.REPLICAS[chosen["check_replicas"]]
        o.flags = (_lib.LOW_PRIORITY if chosen["low_priority"] else 0) | (0 if chosen["use_bases"] else _lib.NO_BASES)
        if chosen["plan_cache"] is not None:
            o.plan_cache = b"" if chosen["plan_cache"] is False else os.fsencode(os.fspath(chosen["plan_cache"]))
        pointer = c_void_p()
        _lib.call("vckpt_saver_open", byref(o), byref(pointer))
        self._pointer = pointer.value

    def check_options(self, chosen):
        for name, value in chosen.items():
            if self.options[name] != value:
                raise InvalidArgument(errno.EINVAL, f"{self.store}/{self.run} is open with {name}={self.options[name]!r}, not {value!r}: close it first")

    def check_process(self):
        if self.pid != os.getpid():
            raise Forked(errno.EPERM, f"the saver of {self.store}/{self.run} belongs to process {self.pid}: a child cannot use it")

    def begin(self, *, step=None, attributes=None, base=None, replace=False):
        """A save's number; all ranks call this in the same order. The caller holds `lock` until submit or give_up."""
        self.check_process()
        if not self.open:
            raise Error(errno.ESHUTDOWN, f"the saver of {self.store}/{self.run} is closed")
        try:
            o = self._save_options(step, attributes, base, replace)
        except BaseException as error:
            self._skip(error)
            raise
        pointer = c_void_p()
        _lib.call("vckpt_save_begin", self._pointer, byref(o), byref(pointer))
        self._staging = [handle for handle in self._staging if not handle._ended_staging()]
        return Handle(self, pointer.value, step, replace)

    def free(self, pointer, reason=None):
        """reason: why it was not submitted."""
        try:
            self.live.remove(pointer)
        except KeyError:
            return
        if self.pid != os.getpid():
            return
        if reason is None:
            _lib._loaded.vckpt_save_free(pointer)
        else:
            _lib._loaded.vckpt_save_give_up(pointer, reason)

    def _save_options(self, step, attributes, base, replace):
        o = _lib.SaveOptions(size=ctypes.sizeof(_lib.SaveOptions))
        o.step = _lib.NONE if step is None else _step(step)
        pairs = [(_lib.text(key, "attribute"), _attribute(key, value)) for key, value in (attributes or {}).items()]
        o.attributes, o.nattributes = (_lib.Attribute * max(len(pairs), 1))(*pairs), len(pairs)
        bases = [base_name(one, self.store) for one in _several(base)]
        o.bases, o.nbases = (c_char_p * max(len(bases), 1))(*bases), len(bases)
        o.stream = _stream()
        o.flags = _lib.REPLACE if replace else 0
        return o

    def _skip(self, error):
        """A save that is refused here uses its number all the same: other ranks may not have refused it, and would meet this
        rank's next one in it."""
        pointer, o = c_void_p(), _lib.SaveOptions(size=ctypes.sizeof(_lib.SaveOptions), step=_lib.NONE)
        _lib.call("vckpt_save_begin", self._pointer, byref(o), byref(pointer))
        self.live.add(pointer.value)
        self.free(pointer.value, _why(error))

    def started(self, handle):
        self._staging.append(handle)

    def close(self):
        """Waits until every save is decided. Raises the error of a save that nobody was told."""
        self.check_process()
        self.open = False
        try:
            _lib.call("vckpt_saver_close", self._pointer)
        finally:
            for handle in self._staging:
                handle._refs = []
            self._staging, self.memory = [], states.Memory()

    def __del__(self):
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer and self.pid == os.getpid() and not sys.is_finalizing():
            for save in list(self.live):
                self.free(save)
            _lib._loaded.vckpt_saver_free(pointer)


def _milliseconds(seconds):
    """0 has a meaning of its own: what is more is at least 1."""
    return min(math.ceil(seconds * 1000), 2**63 - 1)


def _why(error):
    """What other ranks are told of it."""
    return f"{type(error).__name__}: {error}".replace("\0", "?").encode("utf-8", "replace")[:800]


def _step(step):
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < _lib.NONE:
        raise InvalidArgument(errno.EINVAL, f"step {step!r}: expected a whole number from 0")
    return step.__index__()


def _attribute(key, value):
    if not isinstance(value, (str, numbers.Real)):
        hint = ": give its item()" if hasattr(value, "item") else ""
        raise InvalidArgument(errno.EINVAL, f"attribute {key!r}: expected a string or a number, not {type(value).__name__}{hint}")
    return _lib.text(str(value), "attribute")


def _several(base):
    if base is None:
        return []
    return [base] if isinstance(base, str) or not hasattr(base, "__iter__") else list(base)


def base_name(base, store):
    """RUN/STEP as the library takes it, also from a path into the store."""
    if not isinstance(base, (str, os.PathLike)):
        raise InvalidArgument(errno.EINVAL, f"base {base!r}: expected RUN/STEP")
    text = os.fspath(base)
    full = os.path.abspath(text)
    if full.startswith(store + os.sep):
        text = os.path.relpath(full, store)
    return _lib.text(re.sub(r"/step-0*([0-9])", r"/\1", text), "base")


def _stream():
    torch = states.torch_module()
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream().cuda_stream or None


def _group():
    """(rank, world) of torch's default process group, or None; does not import torch."""
    if states.torch_module() is None or "torch.distributed" not in sys.modules:
        return None
    return states.torch_state().group_rank()


def _who(rank, world, launch_id):
    """(rank, world, launch id or None to make one)."""
    if (rank is None) != (world is None):
        raise InvalidArgument(errno.EINVAL, "rank= and world= belong together")
    group = _group()
    if rank is None:
        rank, world = group or (0, 1)
    if launch_id is None and world > 1 and group != (rank, world):
        raise InvalidArgument(errno.EINVAL, f"rank {rank} of {world} without a process group: give launch_id=, a text that all ranks share and "
                              "that is new at every start (random bytes that rank 0 sends to all)")
    return rank, world, launch_id


def native(store, run, *, rank=None, world=None, launch_id=None, user=True, **options):
    """The saver of this process for a run, opened at the first call. user: counts as a user, and is given back with release();
    else it stays for good. All ranks make the first call together."""
    store, chosen = os.path.realpath(store), _options(options)
    if rank is None:
        with _lock:
            own = [n for (s, r, _), n in _natives.items() if (s, r) == (store, run)]
        if len(own) > 1:
            raise InvalidArgument(errno.EINVAL, f"{store}/{run} is open for ranks {', '.join(str(n.rank) for n in own)} in this process: give rank=")
        if own and _group() in (None, (own[0].rank, own[0].world)):
            rank, world, launch_id = own[0].rank, own[0].world, launch_id or ""
    rank, world, launch_id = _who(rank, world, launch_id)
    key = store, run, rank
    with _lock:
        lock = _key_locks.setdefault(key, threading.RLock())
    with lock:
        found = _natives.get(key)
        if found is None:
            if launch_id is None:
                launch_id = secrets.token_hex(16)
                if world > 1:
                    launch_id = states.torch_state().broadcast(launch_id)
            found = Native(key, rank, world, launch_id, chosen)
            with _lock:
                _natives[key] = found
        found.check_process()
        if found.world != world:
            raise InvalidArgument(errno.EINVAL, f"{store}/{run} is open with {found.world} ranks, not {world}: close it first")
        found.check_options(chosen)
        if user:
            found.users += 1
        else:
            found.lasting = True
        return found


def release(one):
    """Gives a user's share back; the last one closes."""
    one.check_process()
    with _key_locks[one.key]:
        one.users -= 1
        if one.users <= 0 and not one.lasting:
            _close(one)


def _close(one):
    with _lock:
        if _natives.get(one.key) is one:
            del _natives[one.key]
    one.close()


def close(path=None):
    """Closes what `save`, `async_save` and everything else have open of STORE/RUN (None: of all runs) in this process, after
    every save is decided. The next save opens it again. All ranks do it alike."""
    wanted = None if path is None else split(path)[:2]
    with _lock:
        found = [n for n in _natives.values() if wanted is None or (n.store, n.run) == (os.path.realpath(wanted[0]), wanted[1])]
    error = None
    for one in found:
        try:
            _close(one)
        except Error as failed:
            error = error or failed
    if error:
        raise error


def _after_fork():
    """In the child: locks that another thread may have held."""
    global _lock
    _lock = threading.Lock()
    _key_locks.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit():
    for one in list(_natives.values()):
        if one.pid == os.getpid():
            try:
                _close(one)
            except Error as error:
                print(f"vckpt: {error}", file=sys.stderr)


# ---- what users call ----

def _start(one, state, *, mesh=None, step=None, attributes=None, base=None, per_rank=(), replace=False, blobs=None):
    begun = time.perf_counter_ns()
    with one.lock:
        handle = one.begin(step=step, attributes=attributes, base=base, replace=replace)
        try:
            found = states.collect(state, mesh=mesh, rank=one.rank, world=one.world, per_rank=per_rank, memory=one.memory)
            rows = states.rows_of(found)
            for name, per, data in found.blobs + [(name, False, data) for name, data in (blobs or {}).items()]:
                handle.blob(name, data, per)
            handle.tensors(rows)
            _on_device(found.device, handle, found.refs)
        except BaseException as error:
            handle.give_up(error)
            raise
    handle._called_ns = time.perf_counter_ns() - begun
    return handle


def _on_device(device, handle, refs):
    if device is None:
        return handle.submit(refs)
    torch = states.torch_module()
    if device.index is not None and device.index != torch.cuda.current_device():
        raise InvalidArgument(errno.EINVAL, f"the tensors are on {device}, the current device is cuda:{torch.cuda.current_device()}: "
                              "call torch.cuda.set_device first")
    torch.cuda.current_stream()                 # makes the context current in this thread
    return handle.submit(refs)


def _place(path, step):
    """(store, run, step)."""
    store, run, named = split(path)
    if named == "latest":
        raise InvalidArgument(errno.EINVAL, f"{path}: latest is what is read, a save needs a number or none")
    if named is not None and step is not None and named != step:
        raise InvalidArgument(errno.EINVAL, f"{path}: the path says step {named}, step= says {step}")
    return store, run, named if step is None else step


def async_save(path, state, *, mesh=None, step=None, attributes=None, base=None, per_rank=(), replace=False, blobs=None, rank=None,
               world=None, launch_id=None, **options):
    """Starts a save of `state` and returns a Handle at once. Until `handle.staged()` the caller leaves the tensors alone.

    path        STORE/RUN or STORE/RUN/STEP
    state       {component: tensors, values, modules, optimizers, nested at will}
    mesh        of the tensors that have none: they are replicated over it (None: over all ranks)
    step        None: the next one
    attributes  {"loss": 2.31}: the same on all ranks
    base        "RUN/STEP", or several: steps besides the run's newest whose data may be reused
    per_rank    patterns over dotted paths ("dataloader", "trainer.cache.*"): kept by each rank for itself
    replace     a step of that number is replaced, atomically; else it is refused
    blobs       {name: bytes}: files of the step ("config.json")
    rank, world, launch_id   where there is no torch process group (MPI, tests)
    options     of the saver, at the first save: heartbeat, start_timeout, deadline (s), ring_bytes, pin, check_replicas ("sample",
                "full", "off"), threads, low_priority, use_bases, plan_cache (a directory; False: in memory only)"""
    store, run, step = _place(path, step)
    one = native(store, run, rank=rank, world=world, launch_id=launch_id, user=False, **options)
    return _start(one, state, mesh=mesh, step=step, attributes=attributes, base=base, per_rank=per_rank, replace=replace, blobs=blobs)


def save(path, state, **arguments):
    """Saves `state` and returns the step's number when it is visible and durable. Arguments: those of async_save."""
    return async_save(path, state, **arguments).committed()


class Saver:
    """Saves of one run; one for a whole training. Opened by all ranks together. `mesh`, `per_rank` and `base` here are the defaults of its
    saves; rank, world, launch_id and options as for async_save."""

    def __init__(self, path, *, mesh=None, per_rank=(), base=None, rank=None, world=None, launch_id=None, **options):
        self.store, self.run, step = split(path)
        if step is not None:
            raise InvalidArgument(errno.EINVAL, f"{path}: a Saver is of a run; the step is given to its saves")
        self._defaults = {"mesh": mesh, "per_rank": per_rank, "base": base}
        self._handles = []
        self._native = native(self.store, self.run, rank=rank, world=world, launch_id=launch_id, **options)

    rank = property(lambda self: self._native.rank)
    world = property(lambda self: self._native.world)

    def async_save(self, state, **arguments):
        """Handle. Arguments: mesh, step, attributes, base, per_rank, replace, blobs, as for vckpt.async_save."""
        if self._native is None:
            raise Error(errno.ESHUTDOWN, f"the saver of {self.store}/{self.run} is closed")
        handle = _start(self._native, state, **{**self._defaults, **arguments})
        self._handles = [one for one in self._handles if not one.done] + [handle]
        return handle

    def save(self, state, **arguments):
        """The step's number, when it is visible and durable."""
        return self.async_save(state, **arguments).committed()

    def close(self):
        """Waits until its saves are decided. Raises the error of one that failed and that nobody was told. Idempotent."""
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

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.close()
        except Error:
            if kind is None:
                raise
