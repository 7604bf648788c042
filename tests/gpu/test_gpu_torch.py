# SPDX-License-Identifier: Apache-2.0
"""vckpt.save and vckpt.load of what torch has on a real CUDA device. Skipped, with the reason, where there is none."""
import importlib
import os
import subprocess
import sys
import textwrap
import threading

import pytest


@pytest.fixture
def vckpt(torch, build, monkeypatch):
    """The package, not the command."""
    monkeypatch.setenv("VCKPT_LIBRARY", str(build / "core/api/libvckpt.so"))
    package = importlib.import_module("vckpt")
    yield package
    package.close()


@pytest.fixture
def run(tmp_path):
    return tmp_path / "store/run"


def loaded(vckpt, torch, path, **like):
    """What the step has, in memory of the device that is like these tensors."""
    found = {name: torch.full_like(t, 7) for name, t in like.items()}
    vckpt.load(path, {"model": found})
    return found


def test_a_side_stream(torch, vckpt, run):
    """What it has still to do is in the step; what it does right after staged is not."""
    side, want = torch.cuda.Stream(), []
    w = torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16)
    for step in range(3):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            w.normal_()
            want.append(w.float().clone())
            handle = vckpt.async_save(run, {"model": {"w": w.float(), "t": w.float().T, "cpu": torch.arange(9)}},
                                      step=step)
            handle.staged()
            w.zero_()
    handle.committed()
    for step in range(3):
        found = loaded(vckpt, torch, f"{run}/{step}", w=want[step], t=want[step].T, cpu=torch.arange(9))
        assert torch.equal(found["w"], want[step]) and torch.equal(found["t"], want[step].T)


def test_a_load_behind_a_side_stream(torch, vckpt, run):
    """The program's last work on the memory comes first, on whatever stream it is."""
    w, side = torch.randn(2000, 1500, device="cuda"), torch.cuda.Stream()
    vckpt.save(run, {"model": {"w": w}}, step=1)
    out = torch.empty_like(w)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        out.fill_(3)
        vckpt.load(f"{run}/1", {"model": {"w": out}})
        assert torch.equal(out, w)


def test_a_model_and_its_optimizer(torch, vckpt, run):
    """Strides, dtypes and AdamW's state of every parameter; in place where there is memory."""
    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 8, 1))
        model = model.to("cuda", memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=seed == 1)
        model(torch.randn(4, 3, 20, 20, device="cuda")).square().mean().backward()
        optimizer.step()
        return model, optimizer
    (model, optimizer), (other, others) = made(1), made(2)
    vckpt.save(run, {"model": model, "optim": optimizer}, step=1)
    places = [t.data_ptr() for t in other.state_dict().values()]
    vckpt.load(f"{run}/1", {"model": other, "optim": others})
    assert places == [t.data_ptr() for t in other.state_dict().values()]
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values()):
        assert torch.equal(a, b), name
    for a, b in zip(optimizer.state.values(), others.state.values()):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key].cpu(), b[key].cpu()) and b[key].dtype == a[key].dtype, key
    x = torch.randn(4, 3, 20, 20, device="cuda")
    other(x).square().mean().backward()
    others.step()


def test_a_load_of_another_dtype(torch, vckpt, run):
    w = torch.randn(700, 900, device="cuda")
    vckpt.save(run, {"model": {"w": w}}, step=1)
    found = loaded(vckpt, torch, f"{run}/1", w=torch.zeros(700, 900, device="cuda", dtype=torch.bfloat16))
    assert torch.equal(found["w"], w.bfloat16())


def test_a_fresh_thread_without_a_context(torch, vckpt, run):
    w, out, failed = torch.randn(800, 900, device="cuda"), torch.zeros(800, 900, device="cuda"), []

    def work():
        try:
            vckpt.save(run, {"model": {"w": w, "t": w.T}}, step=1)
            vckpt.load(f"{run}/1", {"model": {"w": out, "t": torch.empty_like(w.T)}})
        except Exception as error:
            failed.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and torch.equal(out, w)


def test_tensors_of_every_device(torch, vckpt, run):
    """In one state; where the machine has one device, the CPU's and that one's."""
    places = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    state = {place: torch.randn(500, 600, device=place) for place in [*places, "cpu"]}
    vckpt.save(run, {"model": {name.replace(":", ""): t for name, t in state.items()}}, step=1)
    found = loaded(vckpt, torch, f"{run}/1", **{name.replace(":", ""): t for name, t in state.items()})
    for name, t in state.items():
        assert torch.equal(found[name.replace(":", "")], t), name


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_beside_a_save_and_a_load(torch, vckpt, run, mode):
    """By another thread, whose first save registers a ring: the graph is whole."""
    x, w, out = torch.ones(500, 500, device="cuda"), torch.randn(900, 800, device="cuda"), []
    begun, over, failed = threading.Event(), threading.Event(), []

    def work():
        try:
            begun.wait(60)
            vckpt.save(run, {"model": {"w": w, "t": w.T}}, step=1)
            vckpt.load(f"{run}/1", {"model": {"w": there, "t": turned}})
        except Exception as error:
            failed.append(error)
        over.set()
    there, turned = torch.zeros_like(w), torch.zeros_like(w.T)
    thread = threading.Thread(target=work)
    thread.start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x * 2
        begun.set()
        assert over.wait(60)
        out.append(y + 1)
    thread.join()
    assert not failed
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[0], torch.full_like(x, 11))
    assert torch.equal(there, w) and torch.equal(turned, w.T)


def test_a_capture_of_the_saves_own_stream(torch, vckpt, run):
    """It is refused, and the capture goes on."""
    w = torch.randn(100, 100, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = w + 1
        with pytest.raises(vckpt.Error, match="captured into a CUDA graph"):
            vckpt.save(run, {"model": {"w": w}}, step=1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, w + 1)


def program(text, **environment):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("well\n"), done.stdout[-2000:] + done.stderr[-4000:]


def test_expandable_segments(torch, vckpt, run):
    """Memory that belongs to no context; freed right after the call."""
    program(f"""
        import torch, vckpt
        w, t = torch.randn(3000, 2000, device="cuda"), torch.randn(1500, 1700, device="cuda")
        assert any(one["is_expandable"] for one in torch.cuda.memory_snapshot()), "torch made other segments"
        want = [w.cpu(), t.cpu()]
        handle = vckpt.async_save({str(run)!r}, {{"model": {{"w": w, "t": t.T}}}}, step=1)
        del w, t
        torch.cuda.empty_cache()
        handle.committed()
        found = {{"w": torch.zeros(3000, 2000, device="cuda"), "t": torch.zeros(1500, 1700, device="cuda").T}}
        vckpt.load({str(run)!r} + "/1", {{"model": found}})
        assert torch.equal(found["w"].cpu(), want[0]) and torch.equal(found["t"].cpu(), want[1].T)
        vckpt.close()
        print("well")
    """, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:True")


def test_fsdp2_with_nccl_alone(torch, vckpt, run, tmp_path):
    """A process group without gloo: the launch id goes through its store."""
    program(f"""
        import torch, vckpt
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
        def made(seed):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 30)).cuda()
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.randn(8, 300, device="cuda")).sum().backward()
            optimizer.step()
            return model, optimizer
        (model, optimizer), (other, others) = made(1), made(2)
        vckpt.save({str(run)!r}, {{"model": model, "optim": optimizer}}, step=1)
        found = vckpt.load({str(run)!r}, {{"model": other, "optim": others}}, exchange="auto")
        for a, b in zip(model.parameters(), other.parameters()):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(optimizer.state.values(), others.state.values()):
            assert all(torch.equal(a[k].full_tensor() if hasattr(a[k], "full_tensor") else a[k],
                                   b[k].full_tensor() if hasattr(b[k], "full_tensor") else b[k]) for k in a)
        vckpt.close()
        dist.destroy_process_group()
        print("well")
    """)
