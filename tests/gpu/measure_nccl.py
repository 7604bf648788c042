# SPDX-License-Identifier: Apache-2.0
"""NCCL as tests/gpu/run asks it: a communicator of one rank, made anew and split from the program's; two ranks on one
device, where NCCL lets them. NCCL refuses a device that two ranks of one host have; ranks that say that they are on
different hosts (NCCL_HOSTID) go over sockets, which no job does that has two devices."""
import contextlib
import ctypes as c
import os
import subprocess
import sys
import tempfile
import time
import uuid

import numpy

from commlib import Comm, internal, together
from commrank import Head, arrays_of, exchange
from gpulib import Gpu
from loadlib import Opened
from measurelib import BUILD, note, row
from saverlib import DEVICE, Vckpt

STANDIN = "VCKPT_LIBCUDA" in os.environ
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
ALWAYS, SEED, BUCKETS = 2, 5, 200


class Nccl(Comm):
    def __init__(self, lib, base=None, parent=None, timeout_ms=15000):
        self.lib, self.p = lib, c.c_void_p()
        self.call(*(("comm_nccl_new", base.p) if base else ("comm_nccl_split", c.c_void_p(parent))), timeout_ms,
                  c.byref(self.p))
        head = c.cast(self.p, c.POINTER(Head))[0]
        self.rank, self.size = head.rank, head.size


def one(lib):
    gpu, base = Gpu(), Comm(lib, 0, 1, f"one-{uuid.uuid4().hex}")
    begin = time.perf_counter()
    comm = Nccl(lib, base)
    row("a communicator of one rank is made in", time.perf_counter() - begin, "s")
    assert comm.gather(b"alone") == [b"alone"]
    comm.free()
    base.free()
    gpu.close()


def split(lib):
    """From the communicator of torch's process group, of one rank."""
    try:
        import torch
    except ImportError:
        return print("@note torch is not installed: nothing is split from its process group")
    import torch.distributed as dist
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1,
                                device_id=torch.device("cuda:0"))
        begin = time.perf_counter()
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        row("torch's first all_reduce, of one rank", time.perf_counter() - begin, "s")
        group = dist.group.WORLD._get_backend(torch.device("cuda"))
        begin = time.perf_counter()
        comm = Nccl(lib, parent=group._comm_ptr())
        row("a communicator is split from torch's in", time.perf_counter() - begin, "s")
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.gather(b"split") == [b"split"]
        comm.free()
        dist.destroy_process_group()
    return None


def rank(lib, number, name, store):
    """One of two: passes of all kinds, their rate, a load. Gives its figures."""
    gpu, api = Gpu(), Vckpt(BUILD)
    base = Comm(lib, number, 2, name, timeout_ms=60000)
    begin = time.perf_counter()
    comm = Nccl(lib, base)
    made = time.perf_counter() - begin
    exchange(comm, SEED, 40)
    comm.gather(b"")
    begin, flying, nbytes = time.perf_counter(), [], 2 << 20
    for i in range(BUCKETS):
        flying.append(comm.start(i % 2, [1 - i % 2], nbytes, bytes(nbytes) if i % 2 == number else None))
        while len(flying) > 6:
            comm.finish(flying.pop(0))
    while flying:
        comm.finish(flying.pop(0))
    comm.gather(b"")
    rate = BUCKETS * nbytes / 1e9 / (time.perf_counter() - begin)
    comm.free()
    base.free()
    over, base = c.c_void_p(), c.c_void_p()
    api.call("vckpt_comm_shared", f"{name}-load".encode(), number, 2, 60000, c.byref(base))
    api.call("vckpt_comm_nccl", base, 60000, c.byref(over))
    arrays = arrays_of(SEED)
    out = {key: gpu.array(numpy.zeros_like(array)) for key, array in arrays.items()}
    with Opened(api, store) as step, step.load(number, 2, 0, 2, over, ALWAYS) as load:
        for key, array in out.items():
            load.tensor(key, array, flags=DEVICE)
        load.start()
        load.wait(60000)
        read = load.progress().bytes_read
    for key, array in out.items():
        host = gpu.pinned(array.nbytes)
        gpu.to_host(None, host, array.ctypes.data, array.nbytes)
        gpu.synchronize()
        assert host.tobytes() == arrays[key].tobytes(), key
        gpu.unpin(host)
    api.lib.vckpt_comm_free(over)
    api.lib.vckpt_comm_free(base)
    return made, rate, read


def torch_rank(number, folder):
    """One of two whose process group has NCCL alone: what vckpt.load(exchange="always") does between hosts."""
    import torch
    import torch.distributed as dist

    import vckpt
    from vckpt import exchange as meeting
    meeting.host = lambda: f"host{number}"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    torch.manual_seed(number)
    state = {"model": {f"{i}": torch.randn(4096, 2048, device="cuda") for i in range(8)}}
    for t in state["model"].values():
        dist.broadcast(t, 0)
    want = {name: t.clone() for name, t in state["model"].items()}
    vckpt.save(f"{folder}/store/run", state, step=1)
    found = []
    for _ in range(2):
        for t in state["model"].values():
            t.zero_()
        begin = time.perf_counter()
        loaded = vckpt.load(f"{folder}/store/run/1", state, exchange="always")
        found.append(time.perf_counter() - begin)
        assert all(torch.equal(t, want[name]) for name, t in state["model"].items())
    size = sum(t.numel() * 4 for t in want.values())
    print(loaded.exchange)
    assert loaded.exchange.over == "NCCL", loaded.exchange
    vckpt.close()
    dist.destroy_process_group()
    return max(found), size / 1e9 / min(found), loaded.bytes_read / size


def two():
    """Two ranks that are threads, as the stand-in has them."""
    with stored() as (store, name, arrays):
        figures = together(2, lambda number: rank(internal(BUILD), number, name, store))
        for found in figures:
            if isinstance(found, Exception):
                raise found
        said(arrays, "two ranks of the stand-in", figures)


def two_processes(words, env):
    with stored() as (store, name, arrays):
        found = processes("rank", env, name, store)
        if refused(words, found):
            return False
        said(arrays, words, found)
        return True


def two_of_torch(words, env):
    with tempfile.TemporaryDirectory(dir=os.environ["VCKPT_GPU_MEMORY"]) as folder:
        found = processes("torch", env, folder)
        if refused(words, found):
            return False
        row(f"{words}: the first load", max(one[0] for one in found), "s")
        row(f"{words}: a load", min(one[1] for one in found), "GB/s")
        row(f"{words}: both read, of what there is", sum(one[2] for one in found), "")
        return True


def refused(words, found):
    refusals = [each for each in found if isinstance(each, str)]
    if refusals:
        note(f"{words}: refused: {refusals[0]}")
    return bool(refusals)


@contextlib.contextmanager
def stored():
    """(a store with a step, a name, what is in it)"""
    api, arrays = Vckpt(BUILD), arrays_of(SEED)
    with tempfile.TemporaryDirectory(dir=os.environ["VCKPT_GPU_MEMORY"]) as folder:
        store = api.store(f"{folder}/store")
        saver = api.saver(store, "run", ring=0)
        saver.save(arrays).committed()
        saver.close()
        saver.free()
        yield store, f"two-{uuid.uuid4().hex}", arrays


def processes(part, env, *arguments):
    """The figures of each of two ranks, or why it has none."""
    ranks = [subprocess.Popen([sys.executable, __file__, part, str(number), *arguments], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, **{key: word.format(number) for key, word in env.items()}})
             for number in range(2)]
    found = []
    for each in ranks:
        try:
            text = each.communicate(timeout=25)[0]
        except subprocess.TimeoutExpired:
            each.kill()
            text = each.communicate()[0] + "\ndid not end within 25 s"
        print(text)
        figures = [line for line in text.splitlines() if line.startswith("@figures ")]
        why = [line for line in text.splitlines() if "NCCL WARN" in line or "Error" in line or "did not" in line]
        reason = " | ".join(why[-2:])[-400:] or text[-300:]
        found.append(tuple(map(float, figures[0].split()[1:])) if figures else reason)
    return found


def said(arrays, words, figures):
    row(f"{words}: a communicator is made in", max(one[0] for one in figures), "s")
    row(f"{words}: buckets of 2 MiB", min(one[1] for one in figures), "GB/s")
    row(f"{words}: a shared load reads, of what there is", sum(one[2] for one in figures)
        / sum(array.nbytes for array in arrays.values()), "")


def alone(part, env, seconds=25):
    """A part in a process of its own, whose rows are this one's. Was it well?"""
    try:
        done = subprocess.run([sys.executable, __file__, part], env={**os.environ, **env}, text=True, timeout=seconds,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        text, good = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as late:
        text, good = (late.stdout or b"").decode("utf-8", "replace") + f"\nnot over in {seconds} s", False
    print(text, flush=True)
    if not good:
        note(f"{part}, {env}: {text[-300:]}")
    return good


def nccl():
    """Each part is tried, whatever became of the others. NCCL may refuse two ranks on one device: a note says so."""
    debug = {} if STANDIN else {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    good = alone("one", debug)
    if STANDIN:
        two()
    else:
        apart = {**debug, **LOOPBACK, "NCCL_HOSTID": "host{}"}
        two_processes("two ranks on one device", {**debug, **LOOPBACK})
        if two_processes("as of two hosts", apart):
            good = two_of_torch("vckpt.load, as of two hosts", apart) and good
        good = alone("split", {**debug, **LOOPBACK}) and good
    assert good


if __name__ == "__main__":
    word, *rest = sys.argv[1:]
    if word == "rank":
        print("@figures", *rank(internal(BUILD), int(rest[0]), *rest[1:]), flush=True)
    elif word == "torch":
        print("@figures", *torch_rank(int(rest[0]), rest[1]), flush=True)
    else:
        {"one": one, "split": split}[word](internal(BUILD))
