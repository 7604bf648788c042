# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/run measures with torch: a training loop beside saves, and loads of a model and its optimizer."""
import mmap
import os
import shutil
import statistics
import threading
import time

from measurelib import SMALL, folder, median, note, row, skip, timed


def device_of(torch):
    """The device, or the CPU in a trial; None: this step cannot be done."""
    if torch.cuda.is_available() and "VCKPT_LIBCUDA" not in os.environ:
        return "cuda"
    if SMALL:
        note("torch has no device here: a trial on the CPU")
        return "cpu"
    skip("torch finds no CUDA device")
    return None


def with_torch():
    try:
        import torch
    except ImportError:
        skip("torch is not installed")
        return None, None
    return torch, device_of(torch)


def loop():
    """A training loop without saves, and with one each ten steps, which is staged before the optimizer's step."""
    torch, device = with_torch()
    if not device:
        return
    import vckpt
    width, layers = (256, 4) if SMALL else (4096, 16)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, run = torch.randn(64 if SMALL else 4096, width, device=device), folder(memory=True) / "store/run"
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    size = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    note(f"state of {size >> 20} MiB (model and AdamW); the stall is in the step")

    def step(handle=None):
        sync()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        if handle:
            handle.staged()
        optimizer.step()
        sync()
        return time.perf_counter() - begin
    for _ in range(5):
        step()
    alone = [step() for _ in range(20)]
    row("step without a save", statistics.median(alone) * 1e3, "ms")
    times, called = {"first save": [], "beside staging": [], "while it is persisted": []}, []
    for number in range(4):
        begin = time.perf_counter()
        handle = vckpt.async_save(run, {"model": model, "optim": optimizer}, step=number)
        called.append(time.perf_counter() - begin)
        times["beside staging" if number else "first save"].append(step(handle))
        while not handle.done:
            times["while it is persisted"].append(step())
    vckpt.close()
    row("async_save keeps its caller, the first", called[0] * 1e3, "ms")
    row("async_save keeps its caller, later ones", statistics.median(called[1:]) * 1e3, "ms")
    for name, found in times.items():
        if found:
            row(f"step: {name} ({len(found)})", statistics.median(found) * 1e3, "ms", "alone",
                statistics.median(alone) * 1e3)
            row(f"  the longest: {name}", max(found) * 1e3, "ms")


def loads():
    """A model and AdamW into memory of the device: from the page cache, and from the disk."""
    torch, device = with_torch()
    if not device:
        return
    import torch.distributed.checkpoint as dcp

    import vckpt
    width, layers = (256, 4) if SMALL else (4096, 10)
    where, sync = folder(), torch.cuda.synchronize if device == "cuda" else lambda: None

    def state(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        return model, optimizer

    def tensors(model, optimizer):
        found = {f"model.{name}": t.detach() for name, t in model.state_dict().items()}
        for number, one in optimizer.state_dict()["state"].items():
            found.update({f"optim.{number}.{key}": t for key, t in one.items()})
        return found
    one, other = state(1), state(2)
    size = sum(t.numel() * t.element_size() for t in tensors(*one).values())
    wanted = {name: t.double().sum().item() for name, t in tensors(*one).items()}
    note(f"{size >> 20} MiB; store on {os.environ['VCKPT_GPU_WORK']}")
    vckpt.save(where / "store/run", {"model": one[0], "optim": one[1]}, step=1)
    vckpt.close()
    ways = {"vckpt.load": lambda: vckpt.load(where / "store/run/1", {"model": other[0], "optim": other[1]}),
            "vckpt.load, direct": lambda: vckpt.load(where / "store/run/1", {"model": other[0], "optim": other[1]},
                                                     direct="yes")}
    try:
        from safetensors.torch import load_file, save_file
        save_file({name: t.contiguous() for name, t in tensors(*one).items()}, where / "one.safetensors")
        ways["safetensors.torch.load_file"] = lambda: load_file(where / "one.safetensors", device=device)

        def filled():
            mine = tensors(*other)
            for name, t in load_file(where / "one.safetensors", device=device).items():
                mine[name].copy_(t)
        ways["load_file, and copied into the state"] = filled
    except ImportError:
        note("safetensors is not installed")
    if size < shutil.disk_usage(where).free / 3:
        dcp.save(tensors(*one), checkpoint_id=where / "dcp", no_dist=True)
        ways["dcp.load"] = lambda: dcp.load(tensors(*other), checkpoint_id=where / "dcp", no_dist=True)
    reference = 0
    if device == "cuda":
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        reference = host.numel() / 1e9 / median(lambda: (there.copy_(host, non_blocking=True), sync()), 5)
        row("pinned host memory to the device, one copy", reference, "GB/s")
        del host, there
    cached(where)
    for threads in (16, 4, 1):
        way = {"model": other[0], "optim": other[1]}
        row(f"vckpt.load, page cache, {threads} threads", size / 1e9 / min(
            timed(vckpt.load, where / "store/run/1", way, threads=threads) for _ in range(2)), "GB/s", "HtoD",
            reference)
    disk = 0
    for hot in (True, False):
        for name, way in ways.items():
            if hot and name.endswith("direct"):
                continue
            seconds = []
            for _ in range(3 if hot else 1):
                (cached if hot else dropped)(where)
                with torch.no_grad():
                    for t in tensors(*other).values():
                        t.zero_()
                sync()
                seconds.append(timed(lambda: (way(), sync())))
            row(f"{name}, {'page cache' if hot else 'disk'}", size / 1e9 / min(seconds), "GB/s",
                *(("HtoD", reference) if hot else ("plain reads", disk)))
            if name != "safetensors.torch.load_file":
                bad = [key for key, t in tensors(*other).items() if t.double().sum().item() != wanted[key]]
                assert not bad, f"{name}: {bad[:5]} differ"
        if hot:
            dropped(where)
            disk = plain_reads(where)
            row("the store's files, plain reads past the page cache, 16 threads", disk, "GB/s")


def plain_reads(where):
    """GB/s of all packs with O_DIRECT."""
    parts = [(path, at) for path in where.rglob("store/packs/**/*") if path.is_file()
             for at in range(0, path.stat().st_size, 4 << 20)]
    lock, got = threading.Lock(), []

    def work():
        room = mmap.mmap(-1, 4 << 20)
        while True:
            with lock:
                if not parts:
                    return
                path, at = parts.pop()
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            got.append(os.preadv(file, [room], at))
            os.close(file)
    threads = [threading.Thread(target=work) for _ in range(16)]

    def run():
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    seconds = timed(run)
    return sum(got) / 1e9 / seconds


def cached(where):
    """All files are in the page cache."""
    for path in where.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def dropped(where):
    """Nothing of the files is in the page cache."""
    os.sync()
    for path in where.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
