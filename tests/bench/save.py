#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saving from the ranks of a job, against memcpy, write and SHA-256 of the same bytes, and against torch DCP on the
same state and disk.

    tests/bench/run --only save [--gib 2]              (a python with torch)
    tests/bench/save.py --dir DIR --world 2 --state sharded --kind gaussian      one measurement by itself: JSON

Each measurement is a job of its own: `world` processes that meet over gloo. In each round every system saves once, in
turn; the first two rounds warm up and are not counted. State: bf16 weights and two f32 moments of them in tensors of
4096 x 4096 and a few small ones. Two states with different contents alternate, so each save is of new data; then saves
of unchanged data, and of data of which a tenth changed.
"""
import argparse
import datetime
import errno
import hashlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIDE = 4096
ROUNDS, WARM = 8, 2
MIB, PAGE = 1 << 20, 4096


# ---- one rank ----

class Rank:
    def __init__(self, o):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.o, self.rank = torch, dist, o, o.rank
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // o.world))
        if o.world > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(o.port))
            dist.init_process_group("gloo", rank=o.rank, world_size=o.world, timeout=datetime.timedelta(minutes=10))
        self.threads = max(1, len(os.sched_getaffinity(0)) // o.world)
        self.states = [self.state(seed) for seed in (1, 2)]
        self.bytes = sum(t.numel() * t.element_size() for t in self.local(self.states[0]))
        self.staged_bytes = self.bytes if o.state == "sharded" else self.bytes // o.world
        self.room = self.resident(self.staged_bytes), self.resident(self.staged_bytes)

    def resident(self, size):
        """From a page on, for O_DIRECT."""
        memory = self.torch.ones(size + PAGE, dtype=self.torch.uint8)
        begin = -memory.data_ptr() % PAGE
        return memory[begin:begin + size]

    def values(self, shape, dtype, generator):
        torch = self.torch
        if self.o.kind == "gaussian":
            return (torch.randn(shape, generator=generator) * 0.02).to(dtype)
        items = torch.empty(shape, dtype=dtype)
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        items.view(bits).random_(generator=generator)
        return items

    def tensor(self, shape, dtype, generator):
        """Whole on every rank, or this rank's rows of it as a DTensor."""
        if self.o.world == 1 or self.o.state == "replicated":
            return self.values(shape, dtype, generator)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        if not hasattr(self, "mesh"):
            self.mesh = init_device_mesh("cpu", (self.o.world,), mesh_dim_names=("dp",))
        rows = (shape[0] // self.o.world, *shape[1:])
        return DTensor.from_local(self.values(rows, dtype, generator), self.mesh, [Shard(0)], run_check=False)

    def state(self, seed):
        torch = self.torch
        shared = self.o.world == 1 or self.o.state == "replicated"
        generator = torch.Generator().manual_seed(seed if shared else seed * 1000 + self.rank)
        layers = max(1, round(self.o.gib * 1024 * MIB / (SIDE * SIDE * 10)))
        state = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for layer in range(layers):
            for part, dtype in (("model", torch.bfloat16), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)):
                state[part][f"layers.{layer}.weight"] = self.tensor((SIDE, SIDE), dtype, generator)
                state[part][f"layers.{layer}.norm"] = self.tensor((SIDE,), dtype, generator)
        return state

    def local(self, state):
        return [t.to_local() if hasattr(t, "to_local") else t for part in state.values() for t in part.values()]

    def barrier(self):
        if self.o.world > 1:
            self.dist.barrier()

    # ---- what is measured against ----

    def memcpy(self):
        to, come = self.room
        step = -(-len(to) // self.threads)

        def part(i):
            to[i * step:(i + 1) * step].copy_(come[i * step:(i + 1) * step])
        before = self.torch.get_num_threads()
        self.torch.set_num_threads(1)
        threads = [threading.Thread(target=part, args=(i,)) for i in range(self.threads)]
        begin = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        spent = time.perf_counter() - begin
        self.torch.set_num_threads(before)
        return spent

    def write(self, flags):
        """Seconds; None where the file system does not take the flags."""
        path = os.path.join(self.o.dir, f"plain.{self.rank}")
        view = memoryview(self.room[1].numpy())
        self.barrier()
        begin = time.perf_counter()
        at, end = 0, len(view) // PAGE * PAGE
        try:
            with open(path, "wb", buffering=0, opener=lambda name, how: os.open(name, how | flags, 0o600)) as f:
                while at < end:
                    at += f.write(view[at:min(at + 8 * MIB, end)])
                os.fsync(f.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None
        finally:
            spent = time.perf_counter() - begin
            pathlib.Path(path).unlink(missing_ok=True)
        return spent

    def sha256(self):
        view = memoryview(self.room[1].numpy())
        step = -(-len(view) // self.threads)
        threads = [threading.Thread(target=lambda i=i: hashlib.sha256(view[i * step:(i + 1) * step]))
                   for i in range(self.threads)]
        begin = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return time.perf_counter() - begin

    # ---- saves ----

    def vckpt(self, saver, state):
        self.barrier()
        begin = time.perf_counter()
        self.step = getattr(self, "step", -1) + 1      # ranks of a job say which step they save
        handle = saver.async_save(state, step=self.step)
        called = time.perf_counter()
        handle.staged()
        staged = time.perf_counter()
        handle.committed()
        end = time.perf_counter()
        t = handle.timings
        return {"call": called - begin, "stall": staged - begin, "whole": end - begin, "written": t["bytes_written"],
                "plan_ns": t["plan_ns"],
                "pieces_new": t["pieces_new"], "phases": {name: p["busy_ns"] / 1e9 for name, p in t["phases"].items()}}

    def dcp(self, state, number):
        import torch.distributed.checkpoint as dcp
        path = os.path.join(self.o.dir, "dcp", str(number % 2))
        self.barrier()
        begin = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=path)
        stall = time.perf_counter() - begin
        future.result()
        return {"stall": stall, "whole": time.perf_counter() - begin}

    def loop(self, seconds=None, until=None):
        """Rounds a second of a compute loop on this rank's cores, for so long or until something is done (8 s at most:
        on cores that are always busy a save of low priority takes its time)."""
        torch = self.torch
        a, b = torch.randn(512, 512), torch.randn(512, 512)
        begin, rounds = time.perf_counter(), 0
        while time.perf_counter() - begin < (seconds or 8) and not (until and until()):
            for _ in range(4):
                a @ b
            rounds += 4
        return rounds / (time.perf_counter() - begin)

    def slowdown(self, saver, number):
        """Of the loop while a save persists: (alone, beside vckpt, beside DCP), in rounds a second."""
        import torch.distributed.checkpoint as dcp
        alone = self.loop(seconds=1)
        self.step = getattr(self, "step", -1) + 1
        handle = saver.async_save(self.states[number % 2], step=self.step)
        handle.staged()
        ours = self.loop(until=lambda: handle.done)
        handle.committed()
        future = dcp.async_save(self.states[number % 2], checkpoint_id=os.path.join(self.o.dir, "dcp", str(number % 2)))
        theirs = self.loop(until=future.done)
        future.result()
        return alone, ours, theirs

    def change_a_tenth(self, state):
        """A tenth of all bytes, in whole rows of the first tensors."""
        left = self.bytes // 10
        for t in self.local(state):
            if t.ndim == 2 and left > 0:
                bits = t.view(self.torch.int16 if t.element_size() == 2 else self.torch.int32)
                rows = min(t.shape[0], max(1, left // (t.shape[1] * t.element_size())))
                bits[:rows].add_(1)
                left -= rows * t.shape[1] * t.element_size()

    def run(self):
        sys.path.insert(0, str(ROOT / "tools/python"))
        import vckpt
        out = {"bytes": self.bytes, "staged_bytes": self.staged_bytes, "rounds": [], "unchanged": [], "tenth": [],
               "slowdown": []}
        with vckpt.Saver(os.path.join(self.o.dir, "store", "run")) as saver:
            for number in range(ROUNDS + WARM):
                row = {"memcpy": self.memcpy(), "ours": self.vckpt(saver, self.states[number % 2])}
                row["write"], row["direct"] = self.write(0), self.write(os.O_DIRECT)
                self.barrier()
                row["sha256"] = self.sha256()
                row["dcp"] = self.dcp(self.states[number % 2], number)
                out["rounds"].append(row)
            for number in range(ROUNDS + WARM):
                out["unchanged"].append({"memcpy": self.memcpy(), "ours": self.vckpt(saver, self.states[1])})
            for number in range(ROUNDS):
                self.change_a_tenth(self.states[1])
                out["tenth"].append({"ours": self.vckpt(saver, self.states[1])})
        if self.o.world == 1:  # by the option that is there for it
            with vckpt.Saver(os.path.join(self.o.dir, "store", "beside"), low_priority=True) as saver:
                out["slowdown"] = [self.slowdown(saver, number) for number in range(ROUNDS)][WARM:]
        out["rounds"] = out["rounds"][WARM:]
        out["unchanged"] = out["unchanged"][WARM:]
        return out


def rank_main(o):
    result = Rank(o).run()
    pathlib.Path(o.result).write_text(json.dumps(result))


# ---- jobs ----

def job(build, where, world, state, kind, gib):
    """Results of all ranks."""
    work = pathlib.Path(tempfile.mkdtemp(prefix="save-", dir=where))
    try:
        subprocess.run([build / "tools/vckpt/vckpt", "init", work / "store", "-q"], check=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {**os.environ, "VCKPT_LIBRARY": str(build / "core/api/libvckpt.so"),
               "OMP_NUM_THREADS": str(max(1, os.cpu_count() // world))}
        ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(r), "--world", str(world), "--state", state,
                                   "--kind", kind, "--gib",
                                   str(gib), "--dir", str(work), "--build", str(build), "--port", str(port), "--result",
                                   str(work / f"result.{r}")],
                                  env=env, stderr=subprocess.PIPE, text=True) for r in range(world)]
        ends = [(r.communicate(timeout=1800)[1], r.returncode) for r in ranks]
        if any(code for _, code in ends):
            raise SystemExit("\n".join(text[-2000:] for text, code in ends if code))
        return [json.loads((work / f"result.{r}").read_text()) for r in range(world)]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def slowest(results, part, *path):
    """By round, that of the slowest rank."""
    def get(row):
        for key in path:
            row = row[key]
        return row
    return [max(get(r[part][i]) for r in results) for i in range(len(results[0][part]))]


def rows_of(bench, name, results, kind):
    total, staged = sum(r["staged_bytes"] for r in results), max(r["staged_bytes"] for r in results)
    memcpy, dcp = slowest(results, "rounds", "memcpy"), slowest(results, "rounds", "dcp", "stall")
    stall, whole = slowest(results, "rounds", "ours", "stall"), slowest(results, "rounds", "ours", "whole")
    bench.row(f"stall, {name}", f"larger of 1.15 x memcpy of {staged >> 20} MiB and a quarter of dcp.async_save's",
              [s * 1e3 for s in stall],
              [max(1.15 * m, d / 4) * 1e3 for m, d in zip(memcpy, dcp)], 1, "ms", higher=False)
    bench.row(f"stall, {name}, against memcpy alone", f"memcpy of {staged >> 20} MiB", [s * 1e3 for s in stall],
              [m * 1e3 for m in memcpy], None, "ms",
              higher=False)
    bench.row(f"stall, {name}, against DCP alone", "dcp.async_save", [s * 1e3 for s in stall], [d * 1e3 for d in dcp],
              None, "ms", higher=False)
    written, hashed = slowest(results, "rounds", "write"), slowest(results, "rounds", "sha256")
    bench.row(f"whole save, new data, {name}", "slower of write + fsync and SHA-256", [total / MIB / w for w in whole],
              [total / MIB / max(w, h) for w, h in zip(written, hashed)], 0.8 if kind == "random" else 0.4)
    if results[0]["rounds"][0]["direct"]:
        direct = slowest(results, "rounds", "direct")
        bench.row(f"whole save, new data, {name}, against O_DIRECT",
                  "slower of write past the page cache + fsync and SHA-256",
                  [total / MIB / w for w in whole], [total / MIB / max(d, h) for d, h in zip(direct, hashed)], None)
    bench.row(f"whole save, new data, {name}, against DCP", "dcp.async_save until done",
              [total / MIB / w for w in whole],
              [total / MIB / d for d in slowest(results, "rounds", "dcp", "whole")], None)
    same, copy = slowest(results, "unchanged", "ours", "whole"), slowest(results, "unchanged", "memcpy")
    bench.row(f"whole save, nothing changed, {name}", "memcpy", [total / MIB / w for w in same],
              [total / MIB / c for c in copy], 0.5)
    bench.figure(f"new pieces, nothing changed, {name}", max(slowest(results, "unchanged", "ours", "pieces_new")),
                 "pieces", 0)
    tenth = slowest(results, "tenth", "ours", "whole")
    expected = 0.1 * statistics.median(whole) + statistics.median(same)
    bench.row(f"whole save, a tenth changed, {name}", "0.1 x new + unchanged", [t * 1e3 for t in tenth],
              [expected * 1e3] * len(tenth), 1.25, "ms",
              higher=False)
    pairs = results[0]["slowdown"]
    if pairs:
        bench.row(f"compute loop beside a save of low priority, {name}", "the same beside DCP's",
                  [o / a for a, o, _ in pairs], [t / a for a, _, t in pairs], 1.0,
                  "of its speed alone")


def call_of_1000(build, where, repeat):
    """Milliseconds of the Python call with 1,000 DTensors, third save and later; and of planning."""
    script = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist, vckpt
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
dist.init_process_group("gloo", rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, Replicate
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
state = {"model": {f"layers.{i:03}.w": DTensor.from_local(torch.randn(64, 64), mesh, [Replicate(), Shard(0)],
                                                          run_check=False) for i in range(1000)}}
out = []
with vckpt.Saver(sys.argv[2]) as saver:
    for i in range(int(sys.argv[4])):
        for t in state["model"].values():
            t.to_local().add_(1)
        begin = time.perf_counter()
        handle = saver.async_save(state)
        spent = time.perf_counter() - begin
        handle.committed()
        out.append((spent, handle.timings["plan_ns"] / 1e9))
print(json.dumps(out))
dist.destroy_process_group()
"""
    work = pathlib.Path(tempfile.mkdtemp(prefix="call-", dir=where))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        subprocess.run([build / "tools/vckpt/vckpt", "init", work / "store", "-q"], check=True)
        done = subprocess.run([sys.executable, "-c", script, str(ROOT / "tools/python"), str(work / "store/run"),
                               str(port), str(repeat + WARM)],
                              env={**os.environ, "VCKPT_LIBRARY": str(build / "core/api/libvckpt.so")},
                              capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return json.loads(done.stdout)[WARM:]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def restarts(build, where, repeat, sharded):
    """Milliseconds that each of `repeat` new processes plans 1,000 tensors, from nothing: rank 0 of a mesh fsdp=2,tp=2,
    or one rank with all of it. The step is left undecided: the other ranks are not there."""
    script = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import numpy, saverlib
api, store, sharded = saverlib.Vckpt(sys.argv[2]), sys.argv[3], sys.argv[4] == "sharded"
mesh = api.mesh("fsdp=2,tp=2") if sharded else None
saver = api.saver(store, f"run{os.getpid()}", world=4 if sharded else 1, mesh=mesh, ring=0,
                  launch=str(os.getpid()) if sharded else None)
weights = [(f"{c}/layers.{i:02}.{n}.weight", s) for c in ("model", "optimizer") for i in range(50) for n, s in [
    (f"attention.w{k}", numpy.ones((64, 64), "f4")) for k in "kqvo"] + [
    (f"feed_forward.w{k}", numpy.ones((96, 64), "f4")) for k in "123"] + [
    (f"{k}_norm", numpy.ones(64, "f4")) for k in ("attention", "ffn", "q")]]
kinds = {"o": "S(0),S(1)", "2": "S(0),S(1)", "m": "S(0),R"}
save = saver.begin()
for name, whole in weights:
    words = kinds.get(name.split(".")[-2][-1], "S(0),S(0)") if sharded else None
    rows = 2 if words == "S(0),R" else 4 if words == "S(0),S(0)" else 2
    cut = (rows, 2 if words == "S(0),S(1)" else 1) if sharded else (1, 1)
    local = whole[:whole.shape[0] // cut[0]]
    if whole.ndim > 1:
        local = numpy.ascontiguousarray(local[:, :whole.shape[1] // cut[1]])
    save.tensor(name, local, shape=whole.shape, placements=words, mesh=mesh)
save.submit()
save.staged()
t = save.timings()
print(json.dumps([len(weights), t.plan_cached, t.plan_ns]), flush=True)
os._exit(0)
"""
    work = pathlib.Path(tempfile.mkdtemp(prefix="restart-", dir=where))
    try:
        subprocess.run([build / "tools/vckpt/vckpt", "init", work / "store", "-q"], check=True)
        found = []
        for _ in range(repeat):
            done = subprocess.run([sys.executable, "-c", script, str(ROOT / "tests/unit"), str(build),
                                   str(work / "store"),
                                   "sharded" if sharded else "whole"], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found.append(json.loads(done.stdout))
        assert [f[:2] for f in found] == [[1000, 0]] * repeat, found
        return [ns / 1e6 for _, _, ns in found]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def frozen(build, where):
    """Bytes of 20 steps of which 60 % are frozen: (vckpt's store, DCP's directories)."""
    import torch
    import torch.distributed.checkpoint as dcp
    sys.path.insert(0, str(ROOT / "tools/python"))
    os.environ["VCKPT_LIBRARY"] = str(build / "core/api/libvckpt.so")
    import vckpt
    work = pathlib.Path(tempfile.mkdtemp(prefix="frozen-", dir=where))
    try:
        vckpt.init(work / "store")
        state = {"model": {f"layers.{i}": torch.empty(1024, 1024).view(torch.int32).random_().view(torch.float32)
                           for i in range(10)}}
        with vckpt.Saver(work / "store/run") as saver:
            for step in range(20):
                for i in range(6, 10):
                    state["model"][f"layers.{i}"].view(torch.int32).random_()
                saver.save(state)
                dcp.save(state, checkpoint_id=work / "dcp" / str(step), no_dist=True)

        def size(path):
            return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())
        return size(work / "store"), size(work / "dcp")
    finally:
        shutil.rmtree(work, ignore_errors=True)


# name: rows of the weights of a layer, (rows, columns, how TP cuts it): column-parallel cuts dimension 0, row-parallel
# dimension 1
def layer(hidden, inner, kv, vocab):
    return {"wq": (hidden, hidden, 0), "wk": (kv, hidden, 0), "wv": (kv, hidden, 0), "wo": (hidden, hidden, 1),
            "w1": (inner, hidden, 0),
            "w2": (hidden, inner, 1), "w3": (inner, hidden, 0), "embedding": (vocab, hidden, 0)}


MODELS = {"Llama-3 8B": layer(4096, 14336, 1024, 128256), "Llama-2 7B": layer(4096, 11008, 4096, 32000),
          "Qwen2.5 7B": layer(3584, 18944, 512, 152064),
          "GPT-2": {"c_attn": (768, 2304, 1), "attn.c_proj": (768, 768, 0), "c_fc": (768, 3072, 1),
                    "mlp.c_proj": (3072, 768, 0),
                    "wte": (50257, 768, 0), "wpe": (1024, 768, 0)}}


def relayout(build, where, model):
    """Piece bytes of one layer (and the embedding) under TP=8, and those that TP=2 x FSDP=4 and then the whole add."""
    import numpy
    sys.path.insert(0, str(ROOT / "tests/unit"))
    import saverlib
    api, rng = saverlib.Vckpt(str(build)), numpy.random.default_rng(5)
    work = pathlib.Path(tempfile.mkdtemp(prefix="relayout-", dir=where))
    try:
        store = api.store(work / "store")
        weights = {name: (rng.integers(0, 2**16, (rows, columns), "u2"), cut)
                   for name, (rows, columns, cut) in MODELS[model].items()}

        def work_of(mesh_text, words):
            def one(rank, saver):
                mesh = api.mesh(mesh_text, [fsdp * 2 + tp for tp in range(2) for fsdp in range(4)]
                                if "fsdp" in mesh_text else None)
                save = saver.begin()
                for name, (w, cut) in weights.items():
                    local = local_of(w, cut, mesh_text, rank)
                    save.tensor(f"model/{name}", local, shape=w.shape, mesh=mesh, placements=words(cut),
                                check_local=True)
                save.submit()
                save.committed(600000)
                t = save.timings()
                save.free()
                return t.bytes_held - t.bytes_unchanged - t.bytes_deduplicated
            return one

        def local_of(w, cut, mesh_text, rank):
            def rows(a, dim, p, i):
                n = -(-a.shape[dim] // p)
                return a[i * n:(i + 1) * n] if dim == 0 else a[:, i * n:(i + 1) * n]
            if mesh_text == "tp=8":
                return rows(w, cut, 8, rank)
            if mesh_text == "all=1":
                return w
            # tensor parallelism first, then FSDP on dimension 0
            return rows(rows(w, cut, 2, rank % 2), 0, 4, rank // 2)
        layouts = [("tp=8", 8, lambda cut: f"S({cut})"), ("tp=2,fsdp=4", 8, lambda cut: f"S({cut}),S(0)"),
                   ("all=1", 1, lambda cut: "R")]
        added = []
        for text, world, words in layouts:
            found = saverlib.ranks(api, store, "run", world, work_of(text, words), launch=text, threads=1)
            wrong = [f for f in found if isinstance(f, Exception)]
            if wrong:
                raise wrong[0]
            added.append(sum(found))
        return added
    finally:
        shutil.rmtree(work, ignore_errors=True)


def rows(bench):
    build, where = bench.build, bench.dir
    for world, state in ((1, "whole"), (2, "sharded"), (2, "replicated")):
        for kind in ("random", "gaussian"):
            name = f"{world} rank{'s' if world > 1 else ''}{'' if world == 1 else ', ' + state}, {kind}"
            rows_of(bench, name, job(build, where, world, state if world > 1 else "sharded", kind, bench.o.gib), kind)
    calls = call_of_1000(build, where, ROUNDS)
    bench.figure("the Python call, 1,000 DTensors", statistics.median(c for c, _ in calls) * 1e3, "ms", 10)
    bench.figure("planning, 1,000 tensors, from memory", statistics.median(p for _, p in calls) * 1e3, "ms", 1)
    for name, sharded in (("1 rank", False), ("1 of 4 ranks, fsdp=2,tp=2", True)):
        plans = restarts(build, where, 2 * ROUNDS, sharded)
        bench.figure(f"a restarted job plans 1,000 tensors, {name}", statistics.median(plans), "ms", 1)
        bench.notes[f"the same, {name}, the fastest"] = f"{min(plans):.2f} ms"
    ours, theirs = frozen(build, where)
    bench.row("bytes of 20 steps, 60 % frozen", "DCP's directories", [ours / MIB], [theirs / MIB], 0.45, "MiB",
              higher=False)
    for model in MODELS:
        first, second, third = relayout(build, where, model)
        bar = None if model == "GPT-2" else 0.1
        bench.figure(f"{model}: piece bytes that TP=2 x FSDP=4 adds to TP=8", 100 * second / first, "%", bar)
        bench.figure(f"{model}: piece bytes that the whole adds to both", 100 * third / first, "%", bar)
    bench.skip("stall on a GPU", "no CUDA device")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--state", default="sharded", choices=["sharded", "replicated"])
    parser.add_argument("--kind", default="random", choices=["random", "gaussian"])
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--port", type=int)
    parser.add_argument("--result")
    o = parser.parse_args()
    if o.rank is not None:
        return rank_main(o)
    results = job(o.build.resolve(), o.dir, o.world, o.state, o.kind, o.gib)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
