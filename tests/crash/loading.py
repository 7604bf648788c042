# SPDX-License-Identifier: Apache-2.0
"""Loads again and again under libinterpose.so, with one of its calls on the store spoiled each time.

    loading.py BUILD STORE KIND SEED CASES MEMORY

MEMORY is what interpose.c maps. KIND: package (vckpt.load and a step's lazy reads, in Python) or exchange (two ranks
that pass on what they read). A line of JSON for each load: [number of the call, null or what was raised]. Wrong bytes,
and a load after a spoiled one that does not work, end the program with an AssertionError."""
import ctypes as c
import json
import random
import sys

import numpy as np

import vckpt
from commlib import fresh_name, together
from exchangelib import ALWAYS
from faults import Faults
from loadlib import Opened
from saverlib import Failed, Vckpt


def tensors(seed):
    """A raw one, an encoded one, one that several blocks cover, a small one."""
    rng = np.random.default_rng(seed)
    return {"raw": rng.random((300, 70)), "encoded": rng.integers(0, 3, (1 << 19,), np.int32),
            "tiles": rng.random((700, 300), np.float32), "bias": rng.random(5)}


def package(store, want):
    def once():
        into = {name: np.zeros_like(array) for name, array in want.items()}
        found = vckpt.load(f"{store}/run/1", {"model": into, "epoch": None})
        assert found.values["epoch"] == 7 and found.blob("note") == b"n" * 40000
        assert all(np.array_equal(into[name], want[name]) for name in want)
        with vckpt.open(f"{store}/run") as step:
            assert step.number == 1 and np.array_equal(step["model/tiles"][100:200, 5:9], want["tiles"][100:200, 5:9])
    return once


def exchange(store, want, api):
    def work(rank, name):
        comm = c.c_void_p()
        api.call("vckpt_comm_shared", name.encode(), rank, 2, 20000, c.byref(comm))
        try:
            with Opened(api, store, 1) as step, step.load(rank, 1, 0, 2, comm, ALWAYS) as load:
                arrays = {name: np.zeros_like(array) for name, array in want.items()}
                for name, array in arrays.items():
                    load.tensor(f"model/{name}", array)
                load.start()
                load.wait(60000)
                assert all(np.array_equal(arrays[name], want[name]) for name in want), rank
        finally:
            api.lib.vckpt_comm_free(comm)       # a rank that could not open its step leaves: the other hears of it

    def once():
        name = fresh_name()
        out = together(2, lambda rank: work(rank, name))
        errors = [e for e in out if isinstance(e, Exception)]
        for e in errors:
            if not isinstance(e, Failed):
                raise e
        assert len(errors) in (0, 2), out           # all ranks or none
        if errors:
            raise errors[0]
    return once


def main(build, store, kind, seed, cases, memory):
    want, faults, rng = tensors(int(seed)), Faults(memory), random.Random(seed)
    once = package(store, want) if kind == "package" else exchange(store, want, Vckpt(build))
    once()
    faults.at(0)
    once()
    calls = faults.calls()
    assert calls > 20
    for at in sorted(rng.sample(range(1, calls + 1), min(calls, int(cases)))):
        faults.at(at)
        try:
            once()
            raised = None
        except (vckpt.Error, Failed) as error:
            raised = f"{type(error).__name__}: {error}"
        faults.at(0)
        print(json.dumps([at, raised]), flush=True)
        if raised:
            once()


if __name__ == "__main__":
    main(*sys.argv[1:])
