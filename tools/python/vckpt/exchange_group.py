# SPDX-License-Identifier: Apache-2.0
"""What carries an exchange between hosts: all ranks of torch's default process group, over a gloo group of vckpt's own
(a **link**). A `Transport` is one communicator over a link, made by vckpt_comm_functions (core/api/vckpt.h).

Why a link of its own, also where the default group is one of gloo: a load runs in threads of its own, and its messages
must not meet the program's; and gloo closes all connections of a group when one wait times out, so a load that fails
would break the program's group. It is made from the default group's store, not by dist.new_group: that is a collective
which threads of the program may be in as well, and it counts the program's groups. The default group may be one of
NCCL: buckets are in host memory.

A link lives at most as long as the default group. A group keeps the store that it was made from, and where a program
destroys its groups and makes them again, it would find the store of the old ones with what they wrote. So a link is
dropped together with the default group. Until then it serves one load after another: it has threads and a connection to
each rank. Loads that run at the same time have a link each. The ranks agree on the link of a load at their meeting
(exchange.py); a link that is not whole at all ranks is closed.

All messages are sends and receives, none is a collective. So an error names a rank; a receiver waits for its sender
alone; no thread of gloo lets go of a tensor later, which aborts a process that ends; and where the owners of buckets
share the work, broadcasts would send as much.

    gather   in rounds: after each a rank has the strings of twice as many ranks, those that follow it
    pass     the owner sends to all that want the bucket on its own host, and to one on each other host: another one
             for each bucket. In `finish` that one sends it to the others of its host. They receive it once they have
             finished the buckets before it, so no ranks wait for each other in a circle

Failure: the first rank that sees something wrong writes a sentence into the store, and closes all of its connections.
That wakes the others, and its own threads that wait. They read the sentence, close theirs, and raise it. A rank that is
killed closes its connections, too, but writes nothing: so a rank that finds a connection closed gives the others time
to say more, and then names the other end."""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import errno
import json
import math
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _lib, meeting

if TYPE_CHECKING:
    import torch

    Works = list[tuple[int, Any]]       # (the other rank, torch's Work)

NAME = "vckpt/exchange"         # of what is in the store
GRACE_S = 1.0                   # for another rank to say why it closed its connections
STORE_S = 5.0                   # for the store, which may be gone with the rank that has it
BUCKETS = 1 << 20               # tags of buckets are below, those of gathers above
CLOSING = (1 << 31) - 1         # the tag of no message
ROUTES = 1024                   # lists of ranks that are remembered

Failure = tuple[int, str]       # an errno and a sentence


class Lost(Exception):
    """A send or a receive that failed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Link:
    """A gloo group over the ranks of the default one."""

    def __init__(self, token: str, store: torch.distributed.Store, rank: int, world: int, timeout_ms: int) -> None:
        """All ranks make it at the same time, with the same token. Connects to all of them."""
        dist = sys.modules["torch.distributed"]
        self.token, self.rank, self.world = token, rank, world
        self.busy, self.whole, self.lock = True, True, threading.Lock()
        self.store = dist.PrefixStore(f"{NAME}/{token}", store)
        self.group: Any = dist.ProcessGroupGloo(self.store, rank, world, datetime.timedelta(milliseconds=timeout_ms))

    def report(self, failure: Failure, patience: float) -> Failure:
        """Gives the first failure that any rank reported: this one where there was none within `patience` seconds."""
        found: list[Failure] = []

        def ask() -> None:
            until = time.monotonic() + patience
            try:
                while time.monotonic() < until and not self.store.check(["why"]):
                    time.sleep(0.005)
                first = json.loads(self.store.compare_set("why", "", json.dumps(failure)))
                found.append((int(first[0]), str(first[1])))
            except (RuntimeError, ValueError):          # the store does not answer
                return
        thread = threading.Thread(target=ask, name="vckpt exchange", daemon=True)
        try:
            thread.start()
            thread.join(patience + STORE_S)
        except RuntimeError:                            # the program ends, and starts no threads
            pass
        return found[0] if found else failure

    def leave(self, failure: Failure, patience: float) -> Failure:
        """As report. Closes the connections also where this is interrupted, so that no rank waits after a second
        Ctrl-C."""
        try:
            return self.report(failure, patience)
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connections: each thread that waits for a message, here or at other ranks, gets an error. gloo's
        own abort and shutdown do nothing, but a wait that times out closes all connections of the group. A wait for a
        dead rank fails at once and closes nothing, so this waits for each of the others. Afterwards nothing is written
        to the memory of messages, whichever thread closes."""
        with self.lock:
            if not self.whole:
                return
            self.whole = False
            byte = sys.modules["torch"].empty(1, dtype=sys.modules["torch"].uint8)
            for other in range(1, self.world):
                with contextlib.suppress(RuntimeError):
                    self.group.recv([byte], (self.rank + other) % self.world,
                                    CLOSING).wait(datetime.timedelta(milliseconds=1))


# ---- which link ----

class _Links:
    """The links of the default process group, by their tokens. Protected by the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.group: weakref.ref[Any] | None = None      # the default one
        self.all: dict[str, Link] = {}

    def of(self, group: object) -> dict[str, Link]:
        with self.lock:
            if self.group is None or self.group() is not group:
                self.all, self.group = {}, weakref.ref(group, self.forget)
            return self.all

    def free(self, link: Link) -> None:
        with self.lock:
            link.busy = False
            if not link.whole:
                self.all.pop(link.token, None)

    def forget(self, group: weakref.ref[Any] | None = None) -> None:
        with self.lock:
            if group is None or group is self.group:
                self.all, self.group = {}, None


_links = _Links()
atexit.register(_links.forget)          # while the interpreter is whole


def _after_fork() -> None:
    """A child has none of a group's threads: to free the group would wait for them."""
    links, _links.lock = _links.all, threading.RLock()
    for link in links.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(link))
    _links.forget()


os.register_at_fork(after_in_child=_after_fork)


def known() -> dict[str, bool] | None:
    """What a rank says at a meeting: {token of a link: whether it is in use}; None where torch was built without
    gloo."""
    dist = sys.modules["torch.distributed"]
    if not dist.is_gloo_available():
        return None
    with _links.lock:
        return {token: link.busy for token, link in _links.of(dist.group.WORLD).items() if link.whole}


def taken(held: meeting.Meeting, said: Sequence[dict[str, bool]], token: str, timeout_ms: int) -> Link:
    """A link for one load, after the meeting: one that all ranks said is free, else a new one of this token."""
    with _links.lock:
        links = _links.of(sys.modules["torch.distributed"].group.WORLD)
        for gone in [one for one in links if not all(one in rank for rank in said)]:
            del links[gone]                     # it broke at some rank
        free = sorted(one for one in links if not any(rank[one] for rank in said))
        if free:
            links[free[0]].busy = True
            return links[free[0]]
    try:
        link = Link(token, held.store, held.rank, held.world, timeout_ms)
    except RuntimeError as error:
        raise _lib.Error(errno.ECONNREFUSED, f"{held.path}: the ranks of exchange= are on several hosts, and rank "
                                             f"{held.rank} cannot connect to all others by gloo: {_said(error)}: "
                                             "GLOO_SOCKET_IFNAME names the network interface that it takes") from error
    with _links.lock:
        links[token] = link
    return link


# ---- one communicator ----

class _Flying(NamedTuple):
    """A bucket on its way."""
    data: torch.Tensor
    works: Works
    after: list[int]                    # ranks that get it from this one once it has come


class Transport:
    """A communicator and its functions; to be freed. failure: the first error that any rank saw, once a function has
    failed here."""

    def __init__(self, link: Link, hosts: Sequence[str], timeout_ms: int) -> None:
        """hosts: of all ranks."""
        self.link, self.rank, self.world = link, link.rank, link.world
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self.hosts = [numbers[host] for host in hosts]
        self.torch = sys.modules["torch"]
        self.flying: dict[int, _Flying] = {}
        self.routes: dict[bytes, dict[int, list[int]]] = {}
        self.gathers = 0
        self.failure: Failure | None = None
        kind = _lib.CommFunctions
        self.functions = kind(
            ctypes.sizeof(kind), None,
            kind.GATHER(lambda _, mine, lens, *rest: self._guarded(self.gather, mine, lens[:self.world], *rest)),
            kind.START(lambda _, bucket, __: self._guarded(self.start, bucket.contents)),
            kind.FINISH(lambda _, bucket, __, *rest: self._guarded(self.finish, bucket.contents.number, *rest)),
            kind.ABORT(self._abort), kind.FREE(self._free))
        self.pointer = c_void_p()
        try:
            _lib.call("vckpt_comm_functions", byref(self.functions), link.rank, link.world, timeout_ms,
                      byref(self.pointer))
        except BaseException:
            link.close()
            raise

    def free(self) -> None:
        """To be called once. Drops the link also where a traceback, or the cycle through the functions, keeps this."""
        _lib.lib().vckpt_comm_free(self.pointer)
        del self.functions, self.link

    # -- what the library calls: nothing is raised into it --

    def _abort(self, _: int, why: bytes) -> None:
        """A failure of a function has been reported already."""
        try:
            if self.link.whole:
                self.link.leave((_lib.EABORTED, f"rank {self.rank}: {why.decode('utf-8', 'replace')}"), 0)
        except BaseException:
            traceback.print_exc()

    def _free(self, _: int) -> None:
        """The link is another load's now, unless it broke."""
        self.flying.clear()
        _links.free(self.link)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> int:
        try:
            function(*arguments)
            return 0
        except BaseException as error:
            return -self._failed(error)

    def _failed(self, error: BaseException) -> int:
        """Its errno. Where this rank has closed the link, the cause is reported already."""
        try:
            if self.link.whole:
                code, patience = (error.code, GRACE_S) if isinstance(error, Lost) else (_lib.EABORTED, 0.0)
                text = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
                self.failure = self.link.leave((code, f"rank {self.rank}: {text}"),
                                               0 if code == _lib.ETIMEDOUT else patience)
            self.link.close()               # or waits until another thread has done so
            return _lib.EABORTED if self.failure is None else self.failure[0]
        except BaseException:
            traceback.print_exc()
            return _lib.EABORTED

    # -- messages --

    def memory(self, address: int, size: int) -> torch.Tensor:
        """The bytes there, as a tensor."""
        found: torch.Tensor = self.torch.frombuffer((ctypes.c_uint8 * size).from_address(address),
                                                    dtype=self.torch.uint8)
        return found

    def begin(self, what: Literal["send", "recv"], data: torch.Tensor, rank: int, tag: int) -> tuple[int, Any]:
        try:
            return rank, getattr(self.link.group, what)([data], rank, tag)
        except RuntimeError as error:
            raise _closed(rank, error) from error

    def wait(self, works: Works, until: float, timeout_ms: int) -> None:
        for rank, work in works:
            left_ms = max(1, math.ceil((until - time.monotonic()) * 1000))      # 0: the group's own time-out
            try:
                work.wait(datetime.timedelta(milliseconds=left_ms))
            except RuntimeError as error:
                if time.monotonic() < until - 0.001:
                    raise _closed(rank, error) from error
                raise Lost(_lib.ETIMEDOUT, f"rank {rank} did nothing for {timeout_ms} ms") from error

    # -- gathers --

    def gather(self, mine: int, lens: Sequence[int], ret_all: int, timeout_ms: int) -> None:
        until = time.monotonic() + timeout_ms / 1000
        at = list(accumulate(lens, initial=0))
        everything = self.memory(ret_all, at[-1])
        ctypes.memmove(ret_all + at[self.rank], mine, lens[self.rank])

        def parts(first: int, n: int) -> list[torch.Tensor]:
            """The strings of n ranks from that one on; after the last comes the first."""
            last = first + n
            cuts = [(first, min(last, self.world)), (0, max(last - self.world, 0))]
            return [everything[at[a]:at[b]] for a, b in cuts]
        have, tag = 1, BUCKETS + self.gathers % 4096 * 64
        self.gathers += 1
        while have < self.world:
            n, to, of = min(have, self.world - have), (self.rank - have) % self.world, (self.rank + have) % self.world
            works = [self.begin("recv", part, of, tag + k) for k, part in enumerate(parts(of, n)) if part.numel()]
            ours = enumerate(parts(self.rank, n))
            works += [self.begin("send", part, to, tag + k) for k, part in ours if part.numel()]
            self.wait(works, until, timeout_ms)
            have, tag = have + n, tag + 2

    # -- passes --

    def route(self, bucket: Any) -> tuple[int | None, list[int]]:
        """(The rank that sends the bucket to this one or None, the ranks to which this one sends it)."""
        owner, here = int(bucket.owner), self.hosts[self.rank]
        key = ctypes.string_at(bucket.ranks, 4 * bucket.nranks)
        hosts = self.routes.get(key)
        if hosts is None:
            if len(self.routes) >= ROUTES:
                self.routes.clear()
            hosts = self.routes[key] = {}
            for rank in bucket.ranks[:bucket.nranks]:
                hosts.setdefault(self.hosts[rank], []).append(rank)
        if self.rank == owner:
            firsts = [_first(ranks, bucket) for host, ranks in hosts.items() if host != here]
            return None, firsts + hosts.get(here, [])
        mine = hosts.get(here, [])
        if self.rank not in mine:
            return None, []
        first = owner if self.hosts[owner] == here else _first(mine, bucket)
        return (owner, [rank for rank in mine if rank != first]) if first == self.rank else (first, [])

    def start(self, bucket: Any) -> None:
        of, to = self.route(bucket)
        if of is None and not to:
            return
        data, tag = self.memory(bucket.bytes, bucket.len), bucket.number % BUCKETS
        works = ([self.begin("send", data, rank, tag) for rank in to] if of is None
                 else [self.begin("recv", data, of, tag)])
        self.flying[bucket.number] = _Flying(data, works, [] if of is None else to)

    def finish(self, number: int, timeout_ms: int) -> None:
        until = time.monotonic() + timeout_ms / 1000
        found = self.flying.pop(number)
        self.wait(found.works, until, timeout_ms)
        self.wait([self.begin("send", found.data, rank, number % BUCKETS) for rank in found.after], until, timeout_ms)


def _first(ranks: Sequence[int], bucket: Any) -> int:
    """The rank of a host that passes the bucket on to the others there."""
    return ranks[int(bucket.number) % len(ranks)]


def _said(error: Exception) -> str:
    """gloo's sentence without the place in its sources and the advice to look at the logs."""
    return re.sub(r"^\[[^]]*\] |\. This is typically .*$", "", str(error).split("\n")[0])


def _closed(rank: int, error: Exception) -> Lost:
    return Lost(_lib.EABORTED, f"rank {rank} is dead, or has left: {_said(error)}")
