# SPDX-License-Identifier: Apache-2.0
"""Callers that get a signal while the server works for them, or waits: they go at once, and nothing is left behind."""
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from .conftest import Mount, Tensor, wait_until, weights, write_safetensors

# Ended by SIGINT as cp and cat are. A program with a handler of its own waits for pages on, as on any filesystem.
READER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("reads", flush=True)
fd = os.open(sys.argv[1], os.O_RDONLY)
os.pread(fd, 4096, 1 << 20)
"""


@pytest.fixture
def store_of_two(store, vckpt, tmp_path):
    """`w` is encoded, `raw` is not."""
    rng = np.random.default_rng(5)
    write_safetensors(tmp_path / "m/model.safetensors", {
        "w": Tensor("BF16", (1024, 1024), weights(rng, 1024 * 1024)),
        "raw": Tensor("BF16", (1024, 1024), rng.bytes(2 << 20))})
    vckpt("import", store, "a/1", tmp_path / "m/model.safetensors")
    return store


@pytest.fixture(params=["tables", "blocks"])
def looping(store_of_two, program, build, tmp_path, monkeypatch, request):
    """A mount whose decoder never ends: with tables, the kernel waits for an answer; with blocks, for pages."""
    monkeypatch.setenv("VCKPT_LOOPING", "1" if request.param == "tables" else "16384")
    monkeypatch.setenv("LD_PRELOAD", str(build / "tests/liblooping.so"))
    monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    m = Mount(program, store_of_two, tmp_path / "mnt")
    monkeypatch.delenv("LD_PRELOAD")
    yield m, request.param
    m.end()


def sleeps(pid):
    """It waits for something: for what it reads, once it has said that it does."""
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] in "SD"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_readers_of_what_never_comes_can_be_ended(looping, number, pytestconfig):
    """Whoever waits for an answer gets it from the thread that reads the interrupt; the decoder loops on. More readers
    than the mount has threads: those that wait for the same step give their threads back."""
    m, what = looping
    if number == signal.SIGINT and what == "tables" and not pytestconfig.getoption("--full"):
        pytest.skip("only with --full")
    file = m / "a" / "step-00000001" / "model" / "w.npy"
    for _ in range(2):
        readers = [subprocess.Popen([sys.executable, "-c", READER, str(file)], stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, text=True) for _ in range(6)]
        try:
            for reader in readers:
                assert reader.stdout.readline() == "reads\n"
            assert wait_until(lambda readers=readers: all(sleeps(reader.pid) for reader in readers))
            with contextlib.suppress(subprocess.TimeoutExpired):
                readers[0].wait(0.2)
            assert all(reader.poll() is None for reader in readers)
            for reader in readers:
                os.kill(reader.pid, number)
            for reader in readers:
                assert reader.wait(120) != 0
        finally:
            for reader in readers:
                reader.kill()
    if what == "blocks":
        assert np.load(file.parent / "raw.npy").shape == (1024, 1024)
    else:
        assert m.stats()["vckpt_interrupted_total"] > 0


def test_signals_do_not_show(store_of_two, mount):
    """A program may get signals all the time, as those of Go do, and expects EINTR from no file. Nothing fails, no
    answer is given twice, and what is read is right."""
    m = mount(store_of_two, "cache=1M")
    file = m / "a" / "step-00000001" / "model.safetensors"
    want, end = file.read_bytes(), time.monotonic() + 2
    wrong, rounds = [], []

    def read(seed):
        rng = np.random.default_rng(seed)
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            while time.monotonic() < end or len(rounds) <= 20:
                at, n = int(rng.integers(len(want))), int(rng.integers(1, 200_000))
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if os.pread(fd, n, at) != want[at:at + n]:
                    wrong.append((at, n))
                os.listdir(m / "a" / "latest" / "model")
                os.listxattr(file)
                os.statvfs(m.point)
                os.path.exists(m / "a" / f"step-{seed}")
                rounds.append(seed)
        except OSError as e:
            wrong.append(e)
        os.close(fd)

    old = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            for t in threads:
                with contextlib.suppress(ProcessLookupError):
                    signal.pthread_kill(t.ident, signal.SIGALRM)
            time.sleep(0.0005)
        for t in threads:
            t.join()
    finally:
        signal.signal(signal.SIGALRM, old)
    assert not wrong
    assert file.read_bytes() == want and m.stats()["vckpt_interrupted_total"] == 0
