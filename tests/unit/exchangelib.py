# SPDX-License-Identifier: Apache-2.0
"""Loads of several ranks with a communicator, through vckpt.h: ranks are threads."""
import ctypes as c
import os
import pathlib

from commlib import Board, PythonRank, fresh_name, together
from loadlib import Opened

AUTO, NEVER, ALWAYS = range(3)


class Ranks:
    """`size` ranks, each with a communicator over one of the transports. A context."""

    def __init__(self, api, size, kind="shared", timeout_ms=60000):
        self.api, self.size, self.kind, self.timeout_ms = api, size, kind, timeout_ms
        self.name, self.board, self.comms = fresh_name(), Board(size), [None] * size
        self.python = [PythonRank(self.board, rank) for rank in range(size)]

    def __enter__(self):
        out = together(self.size, self.make)
        for rank, e in enumerate(out):
            if isinstance(e, Exception):
                raise AssertionError(f"rank {rank}: {e}") from e
        return self

    def make(self, rank):
        comm = c.c_void_p()
        if self.kind == "shared":
            self.api.call("vckpt_comm_shared", self.name.encode(), rank, self.size, self.timeout_ms, c.byref(comm))
        else:
            self.api.call("vckpt_comm_functions", c.byref(self.python[rank].functions), rank, self.size,
                          self.timeout_ms, c.byref(comm))
        self.comms[rank] = comm

    def __exit__(self, *_):
        for comm in self.comms:
            self.api.lib.vckpt_comm_free(comm)
        assert not pathlib.Path(f"/dev/shm/vckpt-{os.geteuid()}-{self.name}").exists()

    def run(self, store, declare, exchange=ALWAYS, flags=0, threads=2, after=lambda rank, load: None, **one):
        """Each rank loads what declare(rank, load) declares: what after(rank, load) returns, or the exception. `one`:
        {rank: {argument: value}} where a rank differs, as r1=dict(...)."""
        def work(rank):
            o = {"exchange": exchange, "flags": flags, "threads": threads, "store": store, "step": 2**64 - 1,
                 **one.get(f"r{rank}", {})}
            with Opened(self.api, o["store"], o["step"]) as step:
                with step.load(rank, o["threads"], o["flags"], self.size, self.comms[rank], o["exchange"]) as load:
                    declare(rank, load)
                    load.start()
                    load.wait(120000)
                    return after(rank, load)
        return together(self.size, work)
