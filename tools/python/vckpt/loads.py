# SPDX-License-Identifier: Apache-2.0
"""One load of the library: many tensors of a step in one go, each block of the step read once.

The library's threads write into the memory of the tensors until the load is freed, which waits for them. So however
the call ends (an error, Ctrl-C, a signal's handler, `cancel` in another thread), the load is freed before that memory
is."""
from __future__ import annotations

import bisect
import ctypes
import errno
import numbers
import threading
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from . import _lib
from .exchange import Shared
from .shard import Entry, Layout, PlainBox
from .step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

Described: TypeAlias = "tuple[_lib.Tensor, list[Any]]"      # a tensor for the library, and what it points to
Verify = Literal["checks", "full"]
OnDamage = Literal["raise", "skip"]
Direct = Literal["auto", "yes", "no"]

MAX_THREADS = 256
SLICE_MS = 100              # of a wait, so that Ctrl-C is heard


class Extents:
    """Ranges of addresses that do not overlap."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []         # ascending

    def overlap(self, begin: int, end: int) -> bool:
        at = bisect.bisect_left(self.ranges, (end, 0))
        return at > 0 and self.ranges[at - 1][1] > begin

    def add(self, begin: int, end: int) -> None:
        bisect.insort(self.ranges, (begin, end))


class Watch:
    """The progress of one call that loads, which may be several loads of the library, and whether it is to end. Any
    thread may read it, and set `cancelled`."""

    def __init__(self) -> None:
        self.cancelled = False
        self.main: threading.Thread | None = None       # the load ends when that has ended
        self.before = self.now = (0, 0)     # (bytes placed, bytes read): by loads that are over, by the one that runs

    def look(self, progress: _lib.LoadProgress) -> None:
        """Takes the progress between two slices of a wait, and at the end."""
        self.now = int(progress.bytes_placed), int(progress.bytes_read)
        if not progress.over:
            self.check()

    def check(self) -> None:
        if self.cancelled or (self.main is not None and not self.main.is_alive()):
            raise cancelled()

    def ended(self) -> None:
        self.before, self.now = (self.placed, self.read), (0, 0)

    @property
    def placed(self) -> int:
        return self.before[0] + self.now[0]

    @property
    def read(self) -> int:
        return self.before[1] + self.now[1]


def cancelled() -> _lib.Aborted:
    return _lib.Aborted(_lib.EABORTED, "the load was cancelled: tensors of the state hold anything")


class How(NamedTuple):
    """What the caller of a load chose."""
    threads: int
    flags: int
    world: int = 1              # ranks that load at the same time
    watch: Watch | None = None
    shared: Shared | None = None        # ranks that read for each other
    streams: tuple[int, ...] = ()       # of CUDA, on which device memory is ready; none: the default ones


class Damage(NamedTuple):
    """A part of a tensor that a load could not read."""
    name: str                   # COMPONENT/NAME
    box: PlainBox               # (offsets, sizes) in the whole tensor
    reason: str


DEFAULT = How(0, 0)


def chosen(threads: int, verify: Verify, on_damage: OnDamage, direct: Direct = "auto") -> How:
    """The options of a load, checked."""
    if isinstance(threads, bool) or not isinstance(threads, numbers.Integral) or not 0 <= threads <= MAX_THREADS:
        raise _lib.invalid(f"threads={threads!r}: expected a whole number from 0 to {MAX_THREADS}")
    for name, value, words in (("verify", verify, ("checks", "full")), ("on_damage", on_damage, ("raise", "skip")),
                               ("direct", direct, ("auto", "yes", "no"))):
        if value not in words:
            raise _lib.invalid(f"{name}={value!r}: expected one of {', '.join(words)}")
    return How(int(threads), (_lib.REHASH if verify == "full" else 0)
               | (_lib.SKIP_DAMAGED if on_damage == "skip" else 0)
               | {"auto": 0, "yes": _lib.DIRECT, "no": _lib.CACHED}[direct])


def described(component: str, name: str, dtype: int, shape: Sequence[int], address: int,
              box: PlainBox | None = None, strides: Sequence[int] | None = None) -> Described:
    """A whole tensor of the step, or the box of it, into memory with these strides in bytes (None: contiguous)."""
    layout = Layout(shape, boxes=None if box is None else [box])
    entry = Entry().fill(component, name, layout, dtype, None if strides is None else shape, strides)
    row = _lib.Tensor.from_buffer_copy(entry.row)
    row.data = address
    return row, [entry]


def rows(tensors: Sequence[Described] | NDArray[np.uint64]) -> ctypes.Array[_lib.Tensor]:
    """Tensors as the library takes them; those of a table of words share its memory."""
    if isinstance(tensors, np.ndarray):
        return (_lib.Tensor * len(tensors)).from_buffer(tensors.data)
    return (_lib.Tensor * len(tensors))(*(row for row, _ in tensors))


def read(step: Step, rank: int, tensors: ctypes.Array[_lib.Tensor], how: How) -> list[Damage]:
    """Reads all of these tensors. Gives what did not arrive, where damage is no error."""
    if not tensors and not (how.shared and how.shared.pointer):
        return []
    if how.watch:
        how.watch.check()
    load = _Load(step, rank, how)
    try:
        load.run(tensors)
        return load.damaged() if how.flags & _lib.SKIP_DAMAGED else []
    except BaseException as error:
        if how.shared:
            how.shared.abort(error)         # before the load is freed, which would say less to the others
        raise
    finally:
        load.free()


class _Load:
    """A load of the library, which is always freed before its step is closed."""

    def __init__(self, step: Step, rank: int, how: How) -> None:
        self.step, self.watch, self.shared, self.streams = step, how.watch, how.shared, how.streams
        self.pointer = c_void_p()           # filled by the library, so that it is never lost in between
        options = _lib.LoadOptions(size=ctypes.sizeof(_lib.LoadOptions), rank=rank, threads=how.threads,
                                   flags=how.flags, world=how.world)
        if self.shared:
            self.shared.options(options)
        _lib.call("vckpt_load_begin", step._at(), byref(options), byref(self.pointer))

    def free(self) -> None:
        pointer, self.pointer = self.pointer, c_void_p()
        _lib.lib().vckpt_load_free(pointer)

    def __del__(self) -> None:
        if self.pointer and _lib._loaded is not None:
            self.free()

    def run(self, rows: ctypes.Array[_lib.Tensor]) -> None:
        _lib.call("vckpt_load_tensors", self.pointer, rows, len(rows))
        for stream in self.streams:
            _lib.call("vckpt_load_stream", self.pointer, stream)
        _lib.call("vckpt_load_start", self.pointer)
        while not self.over():
            pass
        if self.shared:
            self.shared.add(self.pointer)
        if self.watch:
            self.watch.ended()

    def over(self) -> bool:
        """Waits for a while: is the load over? Raises its error, or that it is to end."""
        try:
            _lib.call("vckpt_load_wait", self.pointer, SLICE_MS)
        except _lib.Timeout:
            if not self.progress().over:
                return False
            _lib.call("vckpt_load_wait", self.pointer, -1)      # the storage, too, may say that it timed out
        self.progress()
        return True

    def progress(self) -> _lib.LoadProgress:
        found = _lib.LoadProgress(ctypes.sizeof(_lib.LoadProgress))
        _lib.lib().vckpt_load_progress(self.pointer, byref(found))
        if self.watch:
            self.watch.look(found)
        return found

    def damaged(self) -> list[Damage]:
        found, lost = [], _lib.LoadLost()
        for number in range(_lib.lib().vckpt_load_lost_count(self.pointer)):
            if _lib.lib().vckpt_load_lost(self.pointer, number, byref(lost)) < 0:
                raise _lib.Error(errno.EIO, f"step {self.step.run}/{self.step.number}: lost part {number} cannot be "
                                            "described")
            words = lost.box[:2 * lost.ndim]
            found.append(Damage(f"{lost.component.decode()}/{lost.name.decode()}",
                                (tuple(words[0::2]), tuple(words[1::2])), lost.why.decode("utf-8", "replace")))
        return found
