# SPDX-License-Identifier: Apache-2.0
"""Ranks that load together share what they read: each stored byte that several ranks want is read by one of them, and
passed on (docs/load.md, "Exchange"): through shared memory where all ranks of the process group are on one host, else
over the network: over NCCL where the ranks fill CUDA tensors and the process group has NCCL, else over gloo
(exchange_group.py), which carries what is small in both cases.

The ranks meet before each such load through the process group's store (meeting.py). That is no collective: what an
earlier load left undone does no harm, a rank that comes late is named, and a rank whose call is refused before it can
come reports that to the others, which raise its sentence. At the meeting each rank says on which host it is, which step
it loads, and in how many loads of the library: all ranks take part in as many as the one that needs most. From then on
the communicator of the library makes all succeed or all fail.

Where a rank's torch was built without gloo, nothing is exchanged between hosts, and the ranks of each host share among
themselves."""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _lib, exchange_group, meeting
from .step import Step
from .tensors import process_group

if TYPE_CHECKING:
    import torch

Mode = Literal["never", "always", "auto"]

MODES: dict[str, int] = {"auto": 0, "never": 1, "always": 2}
STEPS = "steps, or commits of one that was replaced just now,"
CALL = "a load with exchange="      # also the name of the meetings, whatever is loaded
TIMEOUT_MS = 300_000            # for a rank that lives and does nothing; one that dies is noticed at once


class Exchanged(NamedTuple):
    """What a load with exchange= did."""
    chosen: str                 # "always" or "never": what "auto" came to
    ranks: int                  # that took part
    bytes_sent: int             # that this rank read for others
    bytes_got: int              # that it got from others
    bytes_shared: int           # of all ranks: what several wanted, once
    why: str                    # a sentence
    over: str = ""              # what carried it: shared memory, gloo, NCCL; "" where no rank was met


def check(mode: str) -> None:
    if mode not in MODES:
        raise _lib.invalid(f"exchange={mode!r}: expected one of never, always, auto")


class Shared:
    """The ranks that share, for one call that loads. As a context it frees the communicator."""

    def __init__(self, path: str, mode: str, pointer: c_void_p | None, loads: int, found: Exchanged,
                 transport: exchange_group.Transport | None = None) -> None:
        """pointer: None where this rank is alone. transport: what the communicator calls, or the one below it."""
        self.path, self.mode, self.pointer, self.loads, self.found, self.done = path, mode, pointer, loads, found, 0
        self.transport = transport

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """After an error the other ranks have its sentence, and none waits. Of a function that failed the library knows
        only that it did, so the sentence comes from the transport."""
        (pointer, self.pointer), (transport, self.transport) = (self.pointer, None), (self.transport, None)
        failure = transport.failure if transport else None
        if pointer and (transport is None or pointer is not transport.pointer):
            _lib.lib().vckpt_comm_free(pointer)
        if transport:
            transport.free()
        if failure is not None and isinstance(error, _lib.Error):
            raise _lib.error(*failure, self.path) from error

    def abort(self, error: BaseException) -> None:
        if self.pointer:
            _lib.lib().vckpt_comm_abort(self.pointer, f"{type(error).__name__}: {error}".encode()[:800])

    def options(self, options: _lib.LoadOptions) -> None:
        """Sets the options of one load of the library."""
        if self.pointer and self.done < self.loads:
            options.comm, options.exchange = self.pointer, MODES[self.mode]

    def add(self, load: c_void_p) -> None:
        """Adds what a load did that is over."""
        self.done += 1
        if not self.pointer:
            return
        found = _lib.LoadExchange(size=ctypes.sizeof(_lib.LoadExchange))
        if _lib.lib().vckpt_load_exchanged(load, byref(found)) < 0 or not found.ranks:
            return
        words = {number: word for word, number in MODES.items()}
        before = self.found
        # of several loads, one that shared counts
        says = before.chosen != "always" or found.chosen == MODES["always"]
        self.found = Exchanged(words.get(found.chosen, "never") if says else before.chosen, found.ranks,
                               before.bytes_sent + found.bytes_sent, before.bytes_got + found.bytes_got,
                               before.bytes_shared + found.bytes_shared,
                               (found.why or b"").decode("utf-8", "replace") if says else before.why, before.over)


class _Meeting(meeting.Meeting):
    """A meeting at which each rank says something."""

    said: dict[str, Any]

    def arrive(self) -> None:
        self.store.set(self.key(f"said.{self.rank}"), json.dumps(self.said))
        super().arrive()

    def all_said(self) -> list[dict[str, Any]]:
        """After launch: all ranks have come to this meeting."""
        return [json.loads(self.store.get(self.key(f"said.{rank}"))) for rank in range(self.world)]


def _held(path: str, timeout: float, said: dict[str, Any]) -> _Meeting:
    dist = sys.modules["torch.distributed"]
    meeting.check_own(dist, path)
    store = meeting.store_of(dist)
    if store is None:
        raise _lib.invalid(f"{path}: exchange= needs a process group with a store, by which ranks agree, which "
                           f"{dist.get_backend()} has not: leave it out")
    found = _Meeting(store, dist.get_rank(), dist.get_world_size(), CALL, path, timeout, CALL)
    found.said = said
    return found


def together(mode: str) -> bool:
    """Is this process one of several ranks that meet?"""
    dist = process_group()
    return mode != "never" and dist is not None and bool(dist.get_world_size() > 1)


def refuse(path: str, error: BaseException) -> None:
    """Reports to the other ranks, which come to the meeting of this load or are there, that this one does not."""
    meeting.fail(sys.modules["torch.distributed"], error, "", path, CALL)


def meet(opened: Step, mode: Mode, loads: int, timeout: float, device: torch.device | None = None) -> Shared:
    """opened: the same commit at all ranks, else all refuse. loads: how many loads of the library this rank needs.
    device: of CUDA, whose memory they fill; None: none, or several."""
    path = f"{opened.store}/{opened.run}/{opened.number}"
    step = f"{opened.run}/{opened.number} (entry {opened.commit.entry}, manifest {opened.commit.manifest[:16]})"
    held = _held(path, timeout, {"host": host(), "loads": loads, "mode": mode, "step": step,
                                 "links": exchange_group.known(), "nccl": device is not None and _has_nccl()})
    token = held.launch(secrets.token_hex(8))
    said = held.all_said()
    for key, word in (("mode", "exchange="), ("step", STEPS)):
        different = next((rank for rank, one in enumerate(said) if one[key] != said[0][key]), None)
        if different is not None:
            raise _lib.invalid(f"{path}: ranks load together with different {word}: rank 0 with {said[0][key]}, rank "
                               f"{different} with {said[different][key]}")
    hosts = [str(one["host"]) for one in said]
    if len(set(hosts)) > 1 and all(one["links"] is not None for one in said):
        link = exchange_group.taken(held, [one["links"] for one in said], token, TIMEOUT_MS)
        transport = exchange_group.Transport(link, hosts, TIMEOUT_MS)
        pointer = None
        if device is not None and all(one["nccl"] for one in said):
            pointer = _over_nccl(path, transport, device)
        return _shared(path, mode, pointer or transport.pointer, said, "NCCL" if pointer else "gloo", transport)
    return _within_host(path, mode, token, said, held.rank)


def _within_host(path: str, mode: Mode, token: str, said: list[dict[str, Any]], rank: int) -> Shared:
    host = said[rank]["host"]
    here = [other for other, one in enumerate(said) if one["host"] == host]
    if len(here) == 1:
        return Shared(path, mode, None, 0, Exchanged("never", 1, 0, 0, 0, "no other rank is on this host, and torch "
                                                                          "was built without gloo"))
    name = f"{token}.{hashlib.sha256(host.encode()).hexdigest()[:16]}"
    pointer = c_void_p()
    _lib.call("vckpt_comm_shared", name.encode(), here.index(rank), len(here), TIMEOUT_MS, byref(pointer))
    return _shared(path, mode, pointer, [said[other] for other in here], "shared memory")


def _has_nccl() -> bool:
    """Has the default process group NCCL, for CUDA?"""
    return "nccl" in str(sys.modules["torch.distributed"].get_backend_config())


def _over_nccl(path: str, transport: exchange_group.Transport, device: torch.device) -> c_void_p | None:
    """A communicator of NCCL over that of gloo, which still carries what is small, and notices when a rank is dead. It
    is a new one: that of the process group may be in use by another thread, and exists only after its first collective.
    None where some rank cannot make it: all ranks learn of that, and go on with gloo."""
    pointer = c_void_p()
    try:
        with _current(device):
            _lib.call("vckpt_comm_nccl", transport.pointer, TIMEOUT_MS, byref(pointer))
    except _lib.Error as error:
        if transport.failure is not None:               # gloo's is broken, too
            transport.free()
            raise
        if transport.rank == 0:
            print(f"vckpt: {path}: exchange= goes over gloo, not NCCL: {error}", file=sys.stderr, flush=True)
        return None
    except BaseException as error:
        _lib.lib().vckpt_comm_abort(transport.pointer, type(error).__name__.encode())
        transport.free()
        raise
    return pointer


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Within, the device's context is this thread's, also where the thread has not used CUDA yet."""
    cuda = sys.modules["torch"].cuda
    with cuda.device(device):
        cuda.mem_get_info(device)
        yield


def _shared(path: str, mode: Mode, pointer: c_void_p, said: list[dict[str, Any]], over: str,
            transport: exchange_group.Transport | None = None) -> Shared:
    return Shared(path, mode, pointer, max(one["loads"] for one in said),
                  Exchanged("never", len(said), 0, 0, 0, "nothing was loaded", over), transport)


def host() -> str:
    """Equal where ranks have the same memory, and see each other's processes."""
    found = [str(os.geteuid())]
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            found.append(file.read().strip())
        for path in ("/dev/shm", "/proc/self/ns/pid"):
            status = os.stat(path)
            found.append(f"{status.st_dev}.{status.st_ino}")
    except OSError:
        found.append(secrets.token_hex(8))      # unknown: alone
    return "/".join(found)
