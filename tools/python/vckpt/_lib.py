# SPDX-License-Identifier: Apache-2.0
"""libvckpt by ctypes: the structs of core/api/vckpt.h exactly, and its errors as exceptions.

The library is loaded at the first call: from VCKPT_LIBRARY (a file), else from the package's own directory (an
installed package), else from the build directory that VCKPT_BUILD names, else from a build folder of the checkout that
this file is in, else from where the system's loader finds it (libvckpt0, `meson install`). Every function here may
be called from any thread; ctypes lets go of the interpreter's lock meanwhile."""
from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import os
import threading
from collections.abc import Iterable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

NONE = 2**64 - 1
EDAMAGED, EFORMAT, EVERSION, ENOSTORE, EABORTED, EUNDECIDED, ETIMEDOUT, EFORKED = 74, 71, 93, 124, 125, 115, 110, 10
PIN = {"auto": 0, "no": 1, "yes": 2, "allocate": 3}
REPLICAS = {"sample": 0, "full": 1, "off": 2}
LOW_PRIORITY, NO_BASES, KEEP_CACHED = 1, 2, 4
DEVICE, BUFFER, BOXES, ALONE = 1, 2, 4, 8
REPLACE = 1
DIFF_VALUES = 1
REHASH, SKIP_DAMAGED, DIRECT, CACHED = 1, 2, 8, 16
STATES = ("open", "queued", "staging", "staged", "announced", "committed", "failed")
PHASES = 9
SYSTEM = "libvckpt.so.0"

# Names by number, as docs/format/layout.md has them; index 0 is none.
DTYPES = (None, "bool", "u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "c64",
          "c128", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0fnu", "f4_e2m1fn_x2")
ITEM_BYTES = (0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1, 1, 1)


class Error(OSError):
    """An error of the store or the saver: `errno`, and one sentence that names the thing at fault."""

    errno: int

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class InvalidArgument(Error, ValueError):
    """An impossible name, shape, placement, number or option."""


def invalid(text: str) -> InvalidArgument:
    return InvalidArgument(errno.EINVAL, text)


class StepExists(Error, FileExistsError):
    """The step exists already: replace=True replaces it. Also raised for other things that may exist only once: a
    tensor of a save, a launch id."""


class StoreExists(Error, FileExistsError):
    """The directory is a store already."""


class NotFound(Error, FileNotFoundError):
    """No such run, step, tensor or blob."""


class Damaged(Error):
    """Stored bytes do not match their check or digest."""


class FormatError(Error):
    """A record breaks its format, or a step's boxes do not cover a tensor."""


class VersionError(Error):
    """Made by a newer version of vckpt."""


class NotAStore(Error):
    """The directory is not a store."""


class Aborted(Error):
    """The save was given up, by this rank or another: the sentence says by which and why."""


class Undecided(Error):
    """The store failed this rank after it had announced its part: the step may still become visible, by another rank.
    The next launch of the run decides."""


class Timeout(Error, TimeoutError):
    """There was no decision within the time-out: ask again."""


class Forked(Error, ChildProcessError):
    """This process is a child of the one that opened the saver."""


# class of an error -> the class that is Aborted, too
_aborted: dict[type[BaseException], type[Aborted]] = {Error: Aborted}
_aborting = threading.Lock()


def remade(kind: type[Error], code: int, text: str) -> Error:
    """For pickle: an error whose class takes other arguments."""
    error = kind.__new__(kind, code, text)
    Error.__init__(error, code, text)
    return error


def aborted(error: BaseException) -> Aborted:
    """The error that ended a save for all its ranks, at the rank where it happened: an Aborted as at the others, and of
    its own class (StepExists, TypeError) as well, with its errno and sentence."""
    if isinstance(error, Aborted):
        return error
    kind = next((kind for kind in type(error).__mro__ if kind in KINDS), Error)
    text = str(error) if kind is not Error or isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return _aborted_as(kind, error.errno if isinstance(error, Error) else EABORTED, text)


def _aborted_as(kind: type[BaseException], code: int, text: str) -> Aborted:
    with _aborting:
        if kind not in _aborted:
            bases = (kind, Aborted) if issubclass(kind, Error) else (Aborted, kind)
            made: Any = type(kind.__name__, bases, {
                "__module__": Aborted.__module__, "__doc__": kind.__doc__, "__init__": Error.__init__,
                "__reduce__": lambda self: (_aborted_as, (kind, self.errno, self.text))})
            _aborted[kind] = made
    return _aborted[kind](code, text)


CLASSES = {errno.EINVAL: InvalidArgument, errno.EOVERFLOW: InvalidArgument, errno.ENAMETOOLONG: InvalidArgument,
           errno.EEXIST: StepExists, errno.ENOENT: NotFound, EDAMAGED: Damaged, EFORMAT: FormatError,
           EVERSION: VersionError, ENOSTORE: NotAStore, EABORTED: Aborted, EUNDECIDED: Undecided, ETIMEDOUT: Timeout,
           EFORKED: Forked}


# classes that the error of an aborted save may have besides Aborted
KINDS = {*CLASSES.values(), StoreExists, TypeError, ValueError} - {Aborted, Timeout, Undecided}


class ErrorText(Structure):
    _fields_ = [("code", c_int), ("text", c_char * 1000)]


class SaverOptions(Structure):
    _fields_ = [("size", c_size_t), ("store", c_char_p), ("run", c_char_p), ("launch_id", c_char_p), ("rank", c_uint32),
                ("world", c_uint32), ("mesh", c_void_p), ("heartbeat_ms", c_uint64), ("start_ms", c_uint64),
                ("deadline_ms", c_uint64), ("ring_bytes", c_uint64), ("pin", c_int), ("check_replicas", c_int),
                ("threads", c_uint32), ("flags", c_uint32), ("warn_free", c_uint64), ("keep", POINTER(c_char_p)),
                ("nkeep", c_size_t)]


class Tensor(Structure):
    _fields_ = [("component", c_char_p), ("name", c_char_p), ("shape", c_void_p), ("mesh", c_void_p),
                ("placements", c_char_p), ("flat", c_void_p), ("boxes", c_void_p), ("same_dims", c_char_p),
                ("data", c_void_p), ("strides", c_void_p), ("local_shape", c_void_p), ("ndim", c_uint32),
                ("local_ndim", c_uint32), ("dtype", c_uint32), ("flags", c_uint32), ("nboxes", c_uint32),
                ("reserved", c_uint32)]


TENSOR_BYTES = ctypes.sizeof(Tensor)
DATA_WORD = Tensor.data.offset // 8


class Attribute(Structure):
    _fields_ = [("key", c_char_p), ("value", c_char_p)]


class SaveOptions(Structure):
    _fields_ = [("size", c_size_t), ("step", c_uint64), ("attributes", POINTER(Attribute)), ("nattributes", c_size_t),
                ("bases", POINTER(c_char_p)), ("nbases", c_size_t), ("stream", c_void_p), ("flags", c_uint32),
                ("reserved", c_uint32)]


class Found(Structure):
    _fields_ = [("run", c_char_p), ("step", c_uint64)]


class Committed(Structure):
    _fields_ = [("step", c_uint64), ("entry", c_uint64)]


class Progress(Structure):
    _fields_ = [("size", c_size_t), ("state", c_uint32), ("error", c_int32), ("bytes_total", c_uint64),
                ("bytes_staged", c_uint64), ("bytes_done", c_uint64)]


class Phase(Structure):
    _fields_ = [("name", c_char_p), ("start_ns", c_uint64), ("end_ns", c_uint64), ("busy_ns", c_uint64),
                ("bytes", c_uint64)]


class Timings(Structure):
    _fields_ = [("size", c_size_t), ("phase", Phase * PHASES), *((name, c_uint64) for name in (
        "submitted_ns", "staged_ns", "committed_ns", "bytes_held", "bytes_staged", "bytes_unchanged",
        "bytes_deduplicated", "bytes_encoded", "bytes_written", "pieces", "pieces_new", "plan_ns")),
        *((name, c_uint32) for name in ("plan_cached", "plan_hits", "plan_misses", "ring_waits")),
        ("bytes_again", c_uint64), ("bytes_no_base", c_uint64)]


class TensorInfo(Structure):
    _fields_ = [("component", c_char_p), ("name", c_void_p), ("name_len", c_uint32), ("dtype", c_uint32),
                ("ndim", c_uint32), ("shape", POINTER(c_uint64)), ("bytes", c_uint64)]


class BlobInfo(Structure):
    _fields_ = [("name", c_char_p), ("bytes", c_uint64), ("per_rank", c_uint32), ("rank", c_uint32)]


class DiffOptions(Structure):
    _fields_ = [("size", c_size_t), ("component", c_char_p), ("flags", c_uint32), ("reserved", c_uint32)]


class DiffRow(Structure):
    _fields_ = [("component", c_char_p), ("name", c_void_p), ("name_len", c_uint32), ("change", c_uint32),
                ("rank", c_int64), ("a", c_int64), ("b", c_int64),
                *((name, c_uint64) for name in ("changed", "nan_a", "nan_b", "inf_a", "inf_b")),
                *((name, c_double) for name in ("max", "rms", "relative"))]


class Commit(Structure):
    _fields_ = [("step", c_uint64), ("entry", c_uint64), ("manifest", c_uint8 * 32)]


class FactsChange(Structure):
    _fields_ = [("size", c_size_t), ("pin", c_int32), ("reserved", c_uint32), ("reason", c_char_p),
                ("tags", POINTER(c_char_p)), ("ntags", c_size_t), ("untags", POINTER(c_char_p)), ("nuntags", c_size_t),
                ("attributes", POINTER(Attribute)), ("nattributes", c_size_t), ("commit", POINTER(Commit))]


class Facts(Structure):
    _fields_ = [("size", c_size_t), ("pinned", c_uint32), ("reserved", c_uint32), ("reason", c_char_p),
                ("pinned_ns", c_int64), ("pinned_by", c_char_p), ("tags", POINTER(c_char_p)), ("ntags", c_size_t)]


class Tag(Structure):
    _fields_ = [("tag", c_char_p), ("step", c_uint64)]


class LoadOptions(Structure):
    _fields_ = [("size", c_size_t), ("rank", c_uint32), ("threads", c_uint32), ("flags", c_uint32),
                ("world", c_uint32), ("comm", c_void_p), ("exchange", c_uint32), ("reserved", c_uint32)]


class LoadExchange(Structure):
    _fields_ = [("size", c_size_t), ("chosen", c_uint32), ("ranks", c_uint32), ("bytes_sent", c_uint64),
                ("bytes_got", c_uint64), ("bytes_shared", c_uint64), ("bytes_wanted", c_uint64), ("why", c_char_p)]


class CommPass(Structure):
    _fields_ = [("number", c_uint64), ("len", c_uint64), ("bytes", c_void_p), ("ranks", POINTER(c_uint32)),
                ("nranks", c_uint32), ("owner", c_uint32)]


class CommFunctions(Structure):
    GATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_uint64), c_void_p, c_uint32)
    START = CFUNCTYPE(c_int, c_void_p, POINTER(CommPass), POINTER(c_void_p))
    FINISH = CFUNCTYPE(c_int, c_void_p, POINTER(CommPass), c_void_p, c_uint32)
    ABORT, FREE = CFUNCTYPE(None, c_void_p, c_char_p), CFUNCTYPE(None, c_void_p)
    _fields_ = [("size", c_size_t), ("arg", c_void_p), ("gather", GATHER), ("start", START), ("finish", FINISH),
                ("abort", ABORT), ("free", FREE)]


class LoadProgress(Structure):
    _fields_ = [("size", c_size_t), *((name, c_uint64) for name in (
        "bytes_wanted", "bytes_placed", "bytes_read", "pieces", "open_ns", "plan_ns", "read_ns")),
        ("threads", c_uint32), ("over", c_uint32)]


class LoadLost(Structure):
    _fields_ = [("component", c_char_p), ("name", c_char_p), ("box", POINTER(c_uint64)), ("ndim", c_uint32),
                ("code", c_int32), ("why", c_char_p)]


P, E = c_void_p, POINTER(ErrorText)
# those that the package calls: (result, arguments)
FUNCTIONS = {
    "vckpt_version": (c_char_p, []),
    "vckpt_mesh_new": (c_int, [c_char_p, P, c_uint32, POINTER(P), E]),
    "vckpt_mesh_free": (None, [P]),
    "vckpt_mesh_size": (c_int, [P, c_char_p, POINTER(c_uint32), E]),
    "vckpt_mesh_coordinate": (c_int, [P, c_uint32, POINTER(c_uint32), E]),
    "vckpt_mesh_rank": (c_int, [P, POINTER(c_uint32), POINTER(c_uint32), E]),
    "vckpt_mesh_group": (c_int, [P, c_char_p, c_uint32, POINTER(c_uint32), E]),
    "vckpt_mesh_neighbour": (c_int, [P, c_char_p, c_uint32, c_int64, c_int, POINTER(c_uint32), E]),
    "vckpt_store_init": (c_int, [c_char_p, E]),
    "vckpt_store_check": (c_int, [c_char_p, E]),
    "vckpt_run_steps": (c_int, [c_char_p, c_char_p, POINTER(POINTER(c_uint64)), POINTER(c_size_t), E]),
    "vckpt_find": (c_int, [c_char_p, c_char_p, c_uint64, POINTER(POINTER(Found)), POINTER(c_size_t), E]),
    "vckpt_saver_open": (c_int, [POINTER(SaverOptions), POINTER(P), E]),
    "vckpt_saver_close": (c_int, [P, E]),
    "vckpt_saver_free": (None, [P]),
    "vckpt_save_begin": (c_int, [P, POINTER(SaveOptions), POINTER(P), E]),
    "vckpt_save_tensors": (c_int, [P, P, c_size_t, E]),
    "vckpt_save_blob": (c_int, [P, c_char_p, c_int, P, c_size_t, E]),
    "vckpt_save_common": (c_int, [P, c_char_p, c_char_p, P, c_size_t, E]),
    "vckpt_save_submit": (c_int, [P, E]),
    "vckpt_save_wait_staged": (c_int, [P, c_int64, E]),
    "vckpt_save_wait_committed": (c_int, [P, c_int64, POINTER(Committed), E]),
    "vckpt_save_free": (None, [P]),
    "vckpt_save_give_up": (None, [P, c_char_p]),
    "vckpt_save_progress": (c_int, [P, POINTER(Progress)]),
    "vckpt_save_timings": (c_int, [P, POINTER(Timings)]),
    "vckpt_step_open": (c_int, [c_char_p, c_char_p, c_uint64, POINTER(P), E]),
    "vckpt_step_open_commit": (c_int, [c_char_p, c_char_p, POINTER(Commit), POINTER(P), E]),
    "vckpt_step_commit": (None, [P, POINTER(Commit)]),
    "vckpt_step_close": (None, [P]),
    "vckpt_step_number": (c_uint64, [P]),
    "vckpt_step_thinned": (c_char_p, [P, c_uint32]),
    "vckpt_step_world": (c_uint32, [P]),
    "vckpt_step_attributes": (c_size_t, [P, POINTER(POINTER(Attribute))]),
    "vckpt_step_facts": (c_int, [P, POINTER(Facts)]),
    "vckpt_facts_change": (c_int, [c_char_p, c_char_p, c_uint64, POINTER(FactsChange), E]),
    "vckpt_run_tags": (c_int, [c_char_p, c_char_p, POINTER(POINTER(Tag)), POINTER(c_size_t), E]),
    "vckpt_step_tensor_count": (c_uint32, [P]),
    "vckpt_step_tensor": (c_int, [P, c_uint32, POINTER(TensorInfo)]),
    "vckpt_step_tensors": (c_int, [P, c_uint32, c_uint32, P]),
    "vckpt_step_find": (c_int64, [P, c_char_p, c_char_p]),
    "vckpt_step_read": (c_int, [P, c_uint32, P, P, P, E]),
    "vckpt_step_digest": (c_int, [P, c_uint32, P, E]),
    "vckpt_step_blob_find": (c_int, [P, c_char_p, c_int64, POINTER(BlobInfo), E]),
    "vckpt_step_blob_get": (c_int, [P, c_char_p, c_int64, P, E]),
    "vckpt_step_blob_rank": (c_int, [P, c_char_p, c_uint32, POINTER(c_uint32), E]),
    "vckpt_step_blob_count": (c_int64, [P, E]),
    "vckpt_step_blob": (c_int, [P, c_uint32, POINTER(BlobInfo)]),
    "vckpt_run_latest": (c_int, [c_char_p, c_char_p, POINTER(c_uint64), E]),
    "vckpt_diff_steps": (c_int, [P, P, POINTER(DiffOptions), POINTER(P), E]),
    "vckpt_diff_count": (c_size_t, [P]),
    "vckpt_diff_row": (c_int, [P, c_size_t, POINTER(DiffRow)]),
    "vckpt_diff_free": (None, [P]),
    "vckpt_load_begin": (c_int, [P, POINTER(LoadOptions), POINTER(P), E]),
    "vckpt_load_tensors": (c_int, [P, P, c_size_t, E]),
    "vckpt_convert": (c_int, [c_uint32, c_uint32, P, P, c_size_t, E]),
    "vckpt_load_stream": (c_int, [P, P, E]),
    "vckpt_load_start": (c_int, [P, E]),
    "vckpt_load_wait": (c_int, [P, c_int64, E]),
    "vckpt_load_progress": (c_int, [P, POINTER(LoadProgress)]),
    "vckpt_load_lost_count": (c_size_t, [P]),
    "vckpt_load_lost": (c_int, [P, c_size_t, POINTER(LoadLost)]),
    "vckpt_load_exchanged": (c_int, [P, POINTER(LoadExchange)]),
    "vckpt_load_free": (None, [P]),
    "vckpt_comm_shared": (c_int, [c_char_p, c_uint32, c_uint32, c_uint32, POINTER(P), E]),
    "vckpt_comm_functions": (c_int, [P, c_uint32, c_uint32, c_uint32, POINTER(P), E]),
    "vckpt_comm_nccl": (c_int, [P, c_uint32, POINTER(P), E]),
    "vckpt_comm_abort": (None, [P, c_char_p]),
    "vckpt_comm_free": (None, [P]),
}

_loaded: ctypes.CDLL | None = None
_loading = threading.Lock()


def _built(path: str) -> float:
    """When the library was built, in seconds; 0: never. A build folder has links to it from its setup on."""
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0


def _sanitized(path: str) -> bool:
    """A library under a sanitizer ends a program that was not started with the sanitizer's own library."""
    options = os.path.join(path[:-len("core/api/libvckpt.so")], "meson-info/intro-buildoptions.json")
    with contextlib.suppress(OSError, ValueError), open(options, encoding="utf-8") as file:
        return any(option["name"] == "b_sanitize"
                   and option["value"] not in ("none", [], ["none"]) for option in json.load(file))
    return False


def candidates() -> list[str]:
    """Where the library may be, best first."""
    if os.environ.get("VCKPT_LIBRARY"):
        return [os.environ["VCKPT_LIBRARY"]]
    here = os.path.dirname(os.path.abspath(__file__))
    found = [os.path.join(here, "libvckpt.so")]
    if os.environ.get("VCKPT_BUILD"):
        found.append(os.path.join(os.environ["VCKPT_BUILD"], "core/api/libvckpt.so"))
    top = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    if os.path.exists(os.path.join(top, "core/api/vckpt.h")):
        built = glob.glob(os.path.join(top, "build*", "core/api/libvckpt.so"))
        built += glob.glob(os.path.join(top, "build", "*", "core/api/libvckpt.so"))
        built = [path for path in built if not _sanitized(path)]
        found += sorted(built, key=_built, reverse=True)
    return found


def _load(paths: list[str]) -> ctypes.CDLL:
    """Loads the first that is whole: a build that was stopped or had no room leaves a part of a library."""
    wrong = []
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError as failed:
            wrong.append(str(failed))
    raise Error(errno.ENOEXEC, f"{'; '.join(wrong)}: build it again (ninja -C, or `python3 -m pip install .`), or "
                               "name another file in VCKPT_LIBRARY")


def _load_of_system(tried: list[str]) -> ctypes.CDLL:
    if not os.environ.get("VCKPT_LIBRARY"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(SYSTEM)
    raise Error(errno.ENOENT, f"libvckpt.so is not found (looked at {', '.join(tried)}): install the package with "
                "`python3 -m pip install .`, or name the file in VCKPT_LIBRARY")


def lib() -> ctypes.CDLL:
    """The library, loaded once."""
    global _loaded
    if _loaded is not None:
        return _loaded
    with _loading:
        if _loaded is None:
            tried = candidates()
            there = [path for path in tried if os.path.exists(path)]
            loaded = _load(there) if there else _load_of_system(tried)
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(loaded, name, None)
                if function is None:        # an older library: a call of it fails
                    continue
                function.restype, function.argtypes = result, arguments
            _loaded = loaded
    return _loaded


def error(code: int, text: str, where: str | None = None) -> Error:
    """The exception for a negative errno and its sentence."""
    code = abs(code)
    if not text:
        text = os.strerror(code)
    return CLASSES.get(code, Error)(code, f"{where}: {text}" if where else text)


def call(name: str, *arguments: Any) -> int:
    """Calls a function whose last argument is the error. Gives its result, or raises."""
    err = ErrorText()
    result: int = getattr(lib(), name)(*arguments, byref(err))
    if result < 0:
        raise error(result, err.text.decode("utf-8", "replace"))
    return result


def text(value: Any, what: str) -> bytes:
    """A str as the library takes it: UTF-8, NUL-terminated."""
    if not isinstance(value, str):
        raise invalid(f"{what} must be a string, not {type(value).__name__}")
    if "\0" in value:
        raise invalid(f"{what} {value!r} has a NUL in it")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise invalid(f"{what} {value!r} has no UTF-8 form") from None


def whole(number: Any, what: str, least: int, most: int, words: str) -> int:
    if isinstance(number, bool) or not hasattr(number, "__index__") or not least <= number.__index__() <= most:
        raise invalid(f"{what} {number!r}: expected a whole number from {words}")
    return int(number.__index__())


def u32(number: Any, what: str) -> int:
    """A number as the library takes it: ctypes would cut off what does not fit."""
    return whole(number, what, 0, 2**32 - 1, "0 to 2**32 - 1")


def i64(number: Any, what: str) -> int:
    """The same with a sign."""
    return whole(number, what, -2**63, 2**63 - 1, "-2**63 to 2**63 - 1")


def u64s(numbers: Sequence[int]) -> ctypes.Array[c_uint64]:
    return (c_uint64 * max(len(numbers), 1))(*numbers)


def i64s(numbers: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * max(len(numbers), 1))(*numbers)


def numbers(name: str, *arguments: Any, each: int = 1) -> list[int]:
    """The array of 64-bit numbers that a function has allocated: `each` of them for every one that it counts."""
    found, count = POINTER(c_uint64)(), c_size_t()
    call(name, *arguments, byref(found), byref(count))
    result = found[:count.value * each]
    free(found)
    return result


def free(found: Any) -> None:
    """What a function has allocated."""
    ctypes.CDLL(None).free(ctypes.cast(found, c_void_p))


def found(store: str, expression: str, limit: int) -> list[tuple[str, int]]:
    """(run, step) of vckpt_find."""
    steps, count = POINTER(Found)(), c_size_t()
    call("vckpt_find", os.fsencode(store), expression.encode(), limit, byref(steps), byref(count))
    result = [(one.run.decode(), one.step) for one in steps[:count.value]]
    ctypes.CDLL(None).free(ctypes.cast(steps, c_void_p))
    return result


def store_init(path: str) -> None:
    """Makes an empty store, or raises StoreExists."""
    try:
        call("vckpt_store_init", os.fsencode(path))
    except StepExists as error:
        raise StoreExists(error.errno, error.text) from None


class Mesh:
    """A mesh of ranks: "dp=2,tp=4", outermost first, over `ranks` in row-major order (None: 0, 1, ...). Immutable."""

    def __init__(self, words: str, ranks: Iterable[int] | None = None) -> None:
        self.words = words
        try:
            self.names = tuple(part.split("=")[0].strip() for part in words.split(","))
            self.sizes = tuple(int(part.split("=")[1]) for part in words.split(","))
        except (IndexError, ValueError, AttributeError):
            raise invalid(f"mesh {words!r}: expected names and sizes such as 'dp=2,tp=4'") from None
        total = 1
        for size in self.sizes:
            total *= size
        self.ranks = tuple(range(total)) if ranks is None else tuple(int(r) for r in ranks)
        self.members = frozenset(self.ranks)
        self.lowest = min(self.ranks, default=0)
        array = (c_uint32 * max(len(self.ranks), 1))(*self.ranks)
        pointer = c_void_p()
        call("vckpt_mesh_new", text(words, "mesh"), array, len(self.ranks), byref(pointer))
        self.pointer = pointer.value

    def coordinate(self, rank: int) -> tuple[int, ...]:
        found = (c_uint32 * len(self.sizes))()
        call("vckpt_mesh_coordinate", self.pointer, u32(rank, "rank"), found)
        return tuple(found)

    def rank(self, coordinate: Sequence[int]) -> int:
        if len(coordinate) != len(self.sizes):
            raise invalid(f"coordinate {tuple(coordinate)!r}: expected {len(self.sizes)} numbers, one for each "
                          "dimension of the mesh")
        at = (c_uint32 * len(self.sizes))(*(u32(number, "coordinate") for number in coordinate))
        found = c_uint32()
        call("vckpt_mesh_rank", self.pointer, at, byref(found))
        return found.value

    def group(self, dims: str, rank: int) -> tuple[int, ...]:
        words, size = text(dims, "dimension"), c_uint32()
        call("vckpt_mesh_size", self.pointer, words, byref(size))
        found = (c_uint32 * size.value)()
        call("vckpt_mesh_group", self.pointer, words, u32(rank, "rank"), found)
        return tuple(found)

    def neighbour(self, dim: str, rank: int, distance: int, wrap: bool) -> int | None:
        found = c_uint32()
        there = call("vckpt_mesh_neighbour", self.pointer, text(dim, "dimension"), u32(rank, "rank"),
                     i64(distance, "distance"), int(wrap), byref(found))
        return found.value if there else None

    def __repr__(self) -> str:
        return f"vckpt.Mesh({self.words!r}, ranks={list(self.ranks)})"

    def __del__(self) -> None:
        pointer, self.pointer = getattr(self, "pointer", None), None
        if pointer and _loaded is not None:
            _loaded.vckpt_mesh_free(pointer)
