#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads by several ranks: against torch DCP on the same state, what resharding reads, and what ranks of a host save
when they read for each other.

    tests/bench/run --only load_ranks [--gib 2] [--repeat 5]        (a python with torch, a build with -Dtests=enabled)
    tests/bench/run --only exchange                                 (of these, only the ranks that read for each other)

Each measurement but those of resharding is a job of its own: processes that meet over gloo, each with its share of the
processors. All begin a load at a barrier, and the slowest one's time counts. Systems take turns, in another order each
round, and the first round of each is not counted: then what was loaded is compared with what was saved. Destinations
are resident, and the page cache has the stores. State: bf16 tensors of 4096 x 4096 and a few small ones, without
optimizers; of --gib for DCP, and at most LIMIT_GIB for each of the 4 ranks that read for each other.

The slow store is the same one, with a library preloaded that lets reads of packs wait (slow_reads.c): all ranks
together get SLOW bytes a second. It also counts what they read.
"""
import contextlib
import datetime
import json
import mmap
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIDE = 4096
LIMIT_GIB, LIMIT_RESHARDED_GIB = 2, 0.5
SLOW = 200_000_000
MODES = ["never", "always", "auto"]
PATIENCE_S = 1800


# ---- one rank ----

class Rank:
    """What both kinds of jobs need. o: the job, as `job` wrote it."""

    def __init__(self, o):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.o = torch, dist, o
        self.rank, self.world, self.dir = int(os.environ["RANK"]), o["world"], pathlib.Path(o["dir"])
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.world))
        dist.init_process_group("gloo", store=self.store(), rank=self.rank, world_size=self.world,
                                timeout=datetime.timedelta(minutes=10))
        self.shapes = {}
        for layer in range(max(1, round(o["gib"] * 1024 ** 3 / (SIDE * SIDE * 2)))):
            self.shapes[f"layers.{layer}.weight"] = (SIDE, SIDE)
            self.shapes[f"layers.{layer}.norm"] = (SIDE,)
        self.bytes = sum(2 * self.torch.Size(shape).numel() for shape in self.shapes.values())

    def store(self):
        """The one that torchrun makes, too: a server at rank 0. Its port is one that is free, and a file tells it."""
        told = self.dir / "port"
        if self.rank == 0:
            store = self.dist.TCPStore("127.0.0.1", 0, self.world, is_master=True, wait_for_workers=False)
            (self.dir / "port.new").write_text(str(store.port))
            (self.dir / "port.new").rename(told)
            return store
        while not told.exists():        # a rank that has failed ends the job
            time.sleep(0.01)
        return self.dist.TCPStore("127.0.0.1", int(told.read_text()), self.world, is_master=False)

    def values(self, number, shape):
        """The whole tensor, the same at all ranks."""
        torch, generator = self.torch, self.torch.Generator().manual_seed(number)
        if self.o["kind"] == "gaussian":
            return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        bits = torch.empty(shape, dtype=torch.int16)
        return bits.random_(-1 << 15, 1 << 15, generator=generator).view(torch.bfloat16)    # all 16 bits

    def part(self, whole, dim):
        """This rank's; dim None: all. Vectors are always cut by rows."""
        if dim is None or self.world == 1:
            return whole
        return whole.chunk(self.world, min(dim, whole.ndim - 1))[self.rank].contiguous()

    def tensor(self, local, dim):
        if dim is None or self.world == 1:
            return local
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        if not hasattr(self, "mesh"):
            self.mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("fsdp",))
        return DTensor.from_local(local, self.mesh, [Shard(min(dim, local.ndim - 1))], run_check=False)

    def saved(self, dim):
        return {name: self.tensor(self.part(self.values(number, shape), dim), dim)
                for number, (name, shape) in enumerate(self.shapes.items())}

    def destination(self, dim):
        """Resident, and none of what was saved."""
        ones = self.torch.ones((), dtype=self.torch.bfloat16)
        return {name: self.tensor(self.torch.ones_like(self.part(ones.expand(shape), dim)).contiguous(), dim)
                for name, shape in self.shapes.items()}

    def local(self, tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def check(self, state, dim, who):
        """And makes the destination as it was."""
        bits = self.torch.int16
        for number, (name, tensor) in enumerate(state.items()):
            found, expected = self.local(tensor), self.part(self.values(number, self.shapes[name]), dim)
            if not self.torch.equal(found.view(bits), expected.view(bits)):
                raise SystemExit(f"{who}: {name} is not what was saved")
            found.fill_(1)

    def timed(self, act):
        self.dist.barrier()
        begin = time.perf_counter()
        found = act()
        return time.perf_counter() - begin, found

    def clear(self, *names):
        self.dist.barrier()
        for name in names if self.rank == 0 else ():
            shutil.rmtree(self.dir / name)
        self.dist.barrier()


# what was saved, what is loaded: the dimension that is cut, None: replicated
CASES = {"same layout": (0, 0), "resharded": (0, 1), "replicated": (None, None)}


def dcp_job(rank):
    import torch.distributed.checkpoint as dcp

    import vckpt
    out = {}
    for case in rank.o["cases"]:
        came, goes = CASES[case]
        run, folder = rank.dir / "store" / case.replace(" ", "-"), rank.dir / "dcp"
        state = rank.saved(came)
        vckpt.save(run, {"model": state}, step=1)
        dcp.save(state, checkpoint_id=folder)
        vckpt.close()
        state = rank.destination(goes)
        systems = {"ours": lambda run=run, state=state: vckpt.load(run, {"model": state}),
                   "dcp": lambda folder=folder, state=state: dcp.load(state, checkpoint_id=folder)}
        out[case] = {name: [] for name in systems}
        for name, load in systems.items():
            load()
            rank.check(state, goes, f"{name}, {case}")
        for turn in range(rank.o["repeat"]):
            for name in sorted(systems, reverse=turn % 2 == 1):
                out[case][name].append(rank.timed(systems[name])[0])
        rank.clear("dcp")
    return out


class Control:
    """What slow_reads.c maps: of one rank, for all."""

    def __init__(self, path):
        with open(path, "r+b") as f:
            self.memory = mmap.mmap(f.fileno(), 0)

    def slow(self, rate):
        self.memory[:8] = struct.pack("<Q", rate)

    def start(self):
        self.memory[16:24] = bytes(8)

    def read(self):
        return struct.unpack("<Q", self.memory[16:24])[0]


def exchange_job(rank):
    import vckpt
    control, run = Control(os.environ["VCKPT_SLOW_READS"]), rank.dir / "store/run"
    vckpt.save(run, {"model": rank.saved(None)}, step=1)
    vckpt.close()
    state = rank.destination(None)

    def load(mode):
        return vckpt.load(run / "1", {"model": state}, exchange=mode)

    def measured(mode):
        """(seconds, bytes that all ranks read of packs, what was chosen, why)"""
        rank.dist.barrier()
        if rank.rank == 0:
            control.start()
        spent, found = rank.timed(lambda: load(mode))
        rank.dist.barrier()
        said = found.exchange
        return spent, control.read(), said.chosen if said else "never", said.why if said else ""

    for mode in MODES:
        load(mode)
        rank.check(state, None, f"exchange={mode}")
    out = {"bytes": rank.bytes}
    for store, rate in (("page cache", 0), ("slow store", SLOW)):
        control.slow(rate)
        rank.dist.barrier()
        out[store] = {mode: [] for mode in MODES}
        for turn in range(rank.o["repeat"]):
            for i in range(len(MODES)):
                mode = MODES[(turn + i) % len(MODES)]
                out[store][mode].append(measured(mode))
    return out


def rank_main(o):
    sys.path.insert(0, str(ROOT / "tools/python"))
    rank = Rank(o)
    found = {"dcp": dcp_job, "exchange": exchange_job}[o["job"]](rank)
    (rank.dir / f"result.{rank.rank}").write_text(json.dumps(found))
    rank.dist.barrier()
    rank.dist.destroy_process_group()


# ---- jobs ----

@contextlib.contextmanager
def processes(commands):
    """(process, file with what it says), until the end of the context."""
    started = []
    try:
        for command, env in commands:
            text = tempfile.TemporaryFile("w+")
            started.append((subprocess.Popen(command, env=env, stdout=text, stderr=text), text))
        yield started
    finally:
        for process, text in started:
            process.kill()
            process.wait()
            text.close()


def job(bench, world, preload=None, **o):
    """What each rank found."""
    work = pathlib.Path(tempfile.mkdtemp(prefix="load-ranks-", dir=bench.dir))
    try:
        bench.vckpt("init", work / "store", "-q")
        (work / "control").write_bytes(bytes(4096))
        env = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "PYTHONWARNINGS": "ignore",
               "VCKPT_LIBRARY": str(bench.build / "core/api/libvckpt.so"),
               "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world)),
               **({"LD_PRELOAD": str(preload), "VCKPT_SLOW_READS": str(work / "control")} if preload else {})}
        said = json.dumps({"world": world, "dir": str(work), "repeat": bench.o.repeat, **o})
        with processes([([sys.executable, __file__, said], {**env, "RANK": str(r), "LOCAL_RANK": str(r)})
                        for r in range(world)]) as ranks:
            end = time.monotonic() + PATIENCE_S
            while any(process.poll() is None for process, _ in ranks):
                if any(process.poll() for process, _ in ranks) or time.monotonic() > end:
                    time.sleep(1)       # the others may say something, too
                    break
                time.sleep(0.1)
            if any(process.poll() != 0 for process, _ in ranks):
                raise SystemExit("\n".join(f"rank {number}, status {process.poll()}: {tail(text)}"
                                           for number, (process, text) in enumerate(ranks)))
        return [json.loads((work / f"result.{r}").read_text()) for r in range(world)]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def tail(text):
    text.seek(0)
    return text.read()[-2000:]


def dcp_rows(bench):
    for world, cases in ((1, ["same layout"]), (2, list(CASES))):
        for kind in ("random", "gaussian"):
            found = job(bench, world, job="dcp", kind=kind, gib=bench.o.gib, cases=cases)
            for case in cases:
                ours, dcp = ([max(times) for times in zip(*(rank[case][who] for rank in found))]
                             for who in ("ours", "dcp"))
                bench.row(f"load, {world} rank{'s' * (world > 1)}, {case}, {kind} bf16", "dcp.load of the same state",
                          ours, dcp, 0.5, unit="s", higher=False)


def exchange_rows(bench, preload):
    ranks = 4
    found = job(bench, ranks, preload, job="exchange", kind="random", gib=min(bench.o.gib, LIMIT_GIB))
    size = found[0]["bytes"]
    loads = {(store, mode): [(max(one[0] for one in together), *together[0][1:])
                             for together in zip(*(rank[store][mode] for rank in found))]
             for store in ("page cache", "slow store") for mode in MODES}
    if not all(one[1] > size for one in loads["slow store", "never"]):
        raise SystemExit("the preloaded library did not see the reads of packs")
    for store in ("page cache", "slow store"):
        bench.row(f"replicated load by {ranks} ranks, exchange=always, {store}: read in total", "bytes of one copy",
                  [one[1] / 1e6 for one in loads[store, "always"]], [size / 1e6] * bench.o.repeat, 1.05, unit="MB",
                  higher=False)
    bench.row(f"replicated load by {ranks} ranks, exchange=always, slow store", f"one copy at {SLOW / 1e6:.0f} MB/s",
              [one[0] for one in loads["slow store", "always"]], [size / SLOW] * bench.o.repeat, 1.25, unit="s",
              higher=False)
    for store in ("slow store", "page cache"):
        times = {mode: [one[0] for one in loads[store, mode]] for mode in MODES}
        better = min(("never", "always"), key=lambda mode: statistics.median(times[mode]))
        bench.row(f"replicated load by {ranks} ranks, exchange=auto, {store}", f"exchange={better}, the better one",
                  times["auto"], times[better], 1.1, unit="s", higher=False)
        chose = [one[2] for one in loads[store, "auto"]]
        bench.notes[f"exchange, {store}"] = {
            "median seconds": {mode: statistics.median(times[mode]) for mode in MODES},
            "auto chose": {mode: chose.count(mode) for mode in MODES[:2]}, "why": loads[store, "auto"][-1][3]}
        print(f"    {bench.notes[f'exchange, {store}']}", flush=True)


# ---- bytes that resharding reads ----

# mesh and, in turn of the tensors, placements; None: equal ranges of the flattened tensor
RESHARDED = {"rows to columns, 4 ranks": (("tp=4", ["S(0)"]), ("tp=4", ["S(1)"])),
             "TP 2 to 4": (("tp=2", ["S(0)", "S(1)"]), ("tp=4", ["S(0)", "S(1)"])),
             "FSDP 4 to 3": (("fsdp=4", ["S(0)"]), ("fsdp=3", ["S(0)"])),
             "ZeRO flat to TP=4": (("dp=4", [None]), ("tp=4", ["S(0)", "S(1)"]))}


class Sharding:
    def __init__(self, mesh, words):
        self.mesh, self.words, self.world = mesh, words, int(mesh.split("=")[1])

    def layout(self, number, items, rank):
        """(placements, flat) of a tensor."""
        words = self.words[number % len(self.words)]
        ends = [items * r // self.world for r in (rank, rank + 1)]
        return (words, None) if words else ("R", (*ends, 0))

    def part(self, number, whole, rank):
        words, flat = self.layout(number, whole.size, rank)
        if flat:
            return whole.reshape(-1)[flat[0]:flat[1]]
        step = -(-whole.shape[int(words[2])] // self.world)
        here = slice(rank * step, (rank + 1) * step)
        return whole[here] if words == "S(0)" else whole[:, here]


def resharded(bench, name, weights):
    """(bytes that all ranks read of packs, bytes that they want), rank after rank by one process. Saved by C's
    interface, in threads."""
    import numpy
    import saverlib
    import vckpt
    came, goes = (Sharding(*words) for words in RESHARDED[name])
    api = saverlib.Vckpt(str(bench.build))
    store = bench.store("resharded")

    def save_part(rank, saver):
        save, mesh = saver.begin(), api.mesh(came.mesh)
        for number, (tensor, whole) in enumerate(weights.items()):
            words, flat = came.layout(number, whole.size, rank)
            save.tensor(f"model/{tensor}", numpy.ascontiguousarray(came.part(number, whole, rank)), shape=whole.shape,
                        mesh=mesh, placements=words, flat=flat)
        save.submit()
        save.committed(600_000)
        save.free()
    saved = saverlib.ranks(api, store, "run", came.world, save_part, ring=0, threads=1)
    wrong = [one for one in saved if one is not None]
    if wrong:
        raise wrong[0]
    read = wanted = 0
    for rank in range(goes.world):
        parts = {tensor: goes.part(number, whole, rank) for number, (tensor, whole) in enumerate(weights.items())}
        state = {tensor: vckpt.Shard(numpy.ones(parts[tensor].shape, "u2"), shape=whole.shape, mesh=goes.mesh,
                                     placements=goes.layout(number, whole.size, rank)[0])
                 for number, (tensor, whole) in enumerate(weights.items())}
        read += vckpt.load(store / "run", {"model": state}, rank=rank, world=goes.world).bytes_read
        wanted += sum(part.nbytes for part in parts.values())
        for tensor, part in parts.items():
            if not numpy.array_equal(state[tensor].tensor, part):
                raise SystemExit(f"{name}: {tensor} of rank {rank} is not what was saved")
    shutil.rmtree(store)
    return read, wanted


def resharded_rows(bench):
    import numpy
    rng = numpy.random.default_rng(7)
    weights = {f"layers.{i}.weight": rng.integers(0, 1 << 16, (SIDE, SIDE), "u2")
               for i in range(max(2, round(min(bench.o.gib, LIMIT_RESHARDED_GIB) * 1024 / 32)))}
    for name in RESHARDED:
        read, wanted = resharded(bench, name, weights)
        bench.row(f"load, resharded, {name}: read in total", "bytes that the ranks want", [read / 1e6], [wanted / 1e6],
                  1.05, unit="MB", higher=False)


def rows(bench, exchange_only=False):
    sys.path[:0] = [str(ROOT / "tools/python"), str(ROOT / "tests/unit")]
    os.environ["VCKPT_LIBRARY"] = str(bench.build / "core/api/libvckpt.so")
    slow, internal = bench.build / "tests/libslow_reads.so", bench.build / "tests/libvckpt_internal.so"
    programs = "needs a build with the tests' programs (-Dtests=enabled)"
    if exchange_only:
        pass
    elif internal.exists():
        resharded_rows(bench)
    else:
        bench.skip("load, resharded: read in total", programs)
    try:
        import torch.distributed.tensor  # noqa: F401
    except ImportError as error:
        return bench.skip("load by several ranks", f"needs a python with torch ({error.name} is missing)")
    if not exchange_only:
        dcp_rows(bench)
    if not slow.exists():
        return bench.skip("replicated load by 4 ranks", programs)
    exchange_rows(bench, slow)


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))
