# SPDX-License-Identifier: Apache-2.0
"""The same bytes under all conditions: in each tier, in tiers that change while readers are open, with little memory,
in a small control group, beside another mount of the same store."""
import contextlib
import errno
import mmap
import os
import pathlib
import threading

import numpy as np
import pytest

from .conftest import Mount, Tensor, small_source, wait_until, weights, write_safetensors

MiB = 1 << 20
SMALL = (192 if os.environ.get("VCKPT_PRELOAD") else 64) * MiB      # the sanitizers take 60 for themselves
GROUPS = pathlib.Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def truth(vckpt, tmp_path_factory):
    """A store, and what each file of its step holds."""
    folder, rng = tmp_path_factory.mktemp("conditions"), np.random.default_rng(11)
    source = folder / "source"
    source.mkdir()
    tensors = {"raw": Tensor("U8", (12 * MiB + 3,), rng.bytes(12 * MiB + 3)),
               "w": Tensor("BF16", (2048, 3001), weights(rng, 2048 * 3001)),
               "wide": Tensor("BF16", (16, 300_000), weights(rng, 16 * 300_000)),
               "small": Tensor("F32", (10, 10), rng.bytes(400))}
    whole = write_safetensors(source / "model.safetensors", tensors)
    (source / "blob.bin").write_bytes(rng.bytes(7 * MiB + 77))
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", source)
    files = {"model.safetensors": (0, whole), "blob.bin": (0, (source / "blob.bin").read_bytes())}
    files |= {f"model/{name}.npy": (-len(t.data), t.data) for name, t in tensors.items()}
    return folder / "store", files


def bytes_of(path, fd, want, rng):
    """Every way of reading one open file: all of it, pieces at random, mapped, sendfile."""
    start, data = want
    size = os.fstat(fd).st_size
    start = start + size if start < 0 else 0
    assert size == start + len(data), path
    read = bytearray()
    while piece := os.pread(fd, MiB + 11, len(read)):
        read += piece
    assert read[start:] == data, path
    for _ in range(60):
        at, n = int(rng.integers(len(data))), int(rng.integers(1, 300_000))
        assert os.pread(fd, n, start + at) == data[at:at + n], path
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        for _ in range(60):
            at, n = int(rng.integers(len(data))), int(rng.integers(1, 30_000))
            assert mapped[start + at:start + at + n] == data[at:at + n], path
    out = os.memfd_create("out")
    try:
        done = 0
        while done < size:
            done += os.sendfile(out, fd, done, size - done)
        assert os.pread(out, size, start) == data, path
    finally:
        os.close(out)


def read_all(step, files, seed, wrong):
    rng = np.random.default_rng(seed)
    try:
        for name in rng.permutation(list(files)):
            fd = os.open(step / name, os.O_RDONLY)
            try:
                bytes_of(step / name, fd, files[name], rng)
            finally:
                os.close(fd)
    except (AssertionError, OSError) as e:
        wrong.append(e)


@contextlib.contextmanager
def small_group(limit, tmp_path, program):
    """A program that is mount.vckpt in a control group with that much memory; and how often the group's processes
    were killed for it."""
    for parent, most, events in [(GROUPS / "memory", "memory.limit_in_bytes", "memory.oom_control"),
                                 (GROUPS, "memory.max", "memory.events")]:
        group = parent / f"vckpt-{os.getpid()}-{tmp_path.name}"
        try:
            group.mkdir()
            (group / most).write_text(str(limit))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        starter = tmp_path / "start"
        starter.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs && exec {program} "$@"\n')
        starter.chmod(0o755)

        def killed(path=group / events):
            return dict(line.split() for line in path.read_text().splitlines()).get("oom_kill", "0") != "0"

        try:
            yield starter, killed
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    pytest.skip("no control group can be made here")


@pytest.fixture(params=["cached", "passthrough", "auto", "little memory", "two mounts", "a small group",
                        "a small group and a large cache"])
def mounts(request, mount, truth, program, tmp_path):
    """The mounts to read, and what must hold at the end."""
    store = truth[0]
    kind = request.param
    if "group" in kind:
        with small_group(SMALL, tmp_path, program) as (starter, killed):
            m = Mount(starter, store, tmp_path / "small", *(["cache=1G"] if "large" in kind else []))
            server = m.server
            try:
                yield [m]
                assert not killed() and m.server == server
            finally:
                m.end()
    elif kind == "two mounts":
        yield [mount(store), mount(store, "tier=passthrough")]
    else:
        yield [mount(store, "cache=24M" if kind == "little memory" else f"tier={kind}")]


def test_the_bytes_are_the_same(mounts, truth, scale):
    """Readers come and go, so that files are opened again, alone and beside others."""
    wrong = []
    for round_ in range(scale(2, 6)):
        threads = [threading.Thread(target=read_all, args=(m / "a" / "latest", truth[1], 100 * round_ + i, wrong))
                   for i in range(2) for m in mounts]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not any(t.is_alive() for t in threads), "a read never ends"
        assert not wrong, wrong[0]


def test_a_step_that_goes_while_it_is_read(vckpt, truth, mount, tmp_path):
    """Both mounts of a store see it; who has the file open reads on, or is told, and never gets other bytes."""
    store = tmp_path / "store"
    vckpt("init", store)
    rng = np.random.default_rng(5)
    data = write_safetensors(tmp_path / "one/model.safetensors", {"w": Tensor("U8", (9 * MiB,), rng.bytes(9 * MiB))})
    vckpt("import", store, "a/1", tmp_path / "one/model.safetensors")
    both = [mount(store), mount(store, "tier=passthrough")]
    fds = [os.open(m / "a" / "step-00000001" / "model.safetensors", os.O_RDONLY) for m in both]
    try:
        assert all(os.pread(fd, MiB, 0) == data[:MiB] for fd in fds)
        vckpt("import", store, "a/1", small_source(tmp_path / "two/model.safetensors", 9), "--replace")
        vckpt("gc", store, "--grace", "0")
        for fd in fds:
            for at in range(0, len(data), MiB):
                try:
                    assert os.pread(fd, MiB, at) == data[at:at + MiB]
                except OSError as e:
                    assert e.errno == errno.ESTALE
        new = (tmp_path / "two/model.safetensors").read_bytes()
        for m in both:
            assert wait_until(lambda m=m: (m / "a" / "latest" / "model.safetensors").read_bytes() == new)
    finally:
        for fd in fds:
            os.close(fd)


def test_pages_at_random_in_a_small_group(vckpt, program, tmp_path, rng):
    """Of more data than the group has memory: the cache stays within what the group allows."""
    data = np.random.default_rng(6).bytes(2 * SMALL)
    write_safetensors(tmp_path / "big/model.safetensors", {"w": Tensor("U8", (len(data),), data)})
    vckpt("init", tmp_path / "store")
    vckpt("import", tmp_path / "store", "a/1", tmp_path / "big/model.safetensors")
    with small_group(SMALL, tmp_path, program) as (starter, killed):
        m = Mount(starter, tmp_path / "store", tmp_path / "p", "tier=cached")
        try:
            fd = os.open(m / "a" / "latest" / "model" / "w.npy", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(2000):
                at = rng.randrange(len(data) - 4096)
                assert os.pread(fd, 4096, 4096 + at) == data[at:at + 4096]
            os.close(fd)
            assert not killed()
        finally:
            m.end()


@pytest.mark.full
def test_many_tensors_in_a_small_group(vckpt, program, tmp_path, rng):
    """Of steps that are opened one after another, the mount keeps what the group allows."""
    count, steps = 20_000, 8
    vckpt("init", tmp_path / "store")
    for step in range(steps):
        write_safetensors(tmp_path / "model.safetensors", {f"model.layers.{i // 100}.block.{i % 100}.attention.weight":
                                                       Tensor("F32", (4,), rng.randbytes(16)) for i in range(count)})
        vckpt("import", tmp_path / "store", f"a/{step}", tmp_path / "model.safetensors", "--no-index")
    with small_group(SMALL, tmp_path, program) as (starter, killed):
        m = Mount(starter, tmp_path / "store", tmp_path / "p")
        try:
            for step in range(steps):
                found = os.listdir(m / "a" / f"step-{step:08}" / "model")
                assert len(found) == count and (m / "a" / f"step-{step:08}" / "model" / found[step]).stat().st_size
            latest = m / "a" / "latest" / "model.safetensors"
            assert latest.read_bytes() == (tmp_path / "model.safetensors").read_bytes()
            assert m.stats()["vckpt_steps_evicted_total"] >= steps - 2 and not killed()
        finally:
            m.end()
