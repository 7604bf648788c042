# SPDX-License-Identifier: Apache-2.0
"""Files that the kernel reads by itself: the same bytes, without the server, whoever opens and closes them when."""
import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import signal
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

from .conftest import Mount, Tensor, wait_until, weights, write_safetensors

MiB = 1 << 20


def serving(path):
    return os.getxattr(path, "user.vckpt.serving").decode()


def served(m):
    """Bytes of steps' files that the server gave to the kernel."""
    return m.stats()["vckpt_read_bytes_total"]


def closed(m):
    """The kernel tells of a close when it has the time: until then the next open is one beside another."""
    return wait_until(lambda: m.stats()['vckpt_open_files{tier="cached"}'] == 0)


def passes(m):
    """Does the mount hand files to the kernel here? Said once it works."""
    lines = [line for line in (m / ".vckpt" / "stats").read_text().splitlines()
             if line.startswith('vckpt_feature{name="passthrough"')]
    return lines and lines[0].endswith(" 1")


def read(path, piece=MiB):
    found = []
    with open(path, "rb", buffering=0) as f:
        while data := f.read(piece):
            found.append(data)
    return b"".join(found)


@pytest.fixture(scope="module")
def large(vckpt, tmp_path_factory):
    """A store with one step of some MiB of raw and encoded tensors, and the bytes of its file."""
    folder = tmp_path_factory.mktemp("passthrough")
    source, rng = folder / "source", np.random.default_rng(3)
    source.mkdir()
    tensors = {f"raw{i}": Tensor("U8", (3 * MiB + i,), rng.bytes(3 * MiB + i)) for i in range(3)}
    tensors |= {f"w{i}": Tensor("BF16", (1024, 1000 + i), weights(rng, 1024 * (1000 + i))) for i in range(3)}
    tensors["small"] = Tensor("F32", (10, 10), rng.bytes(400))
    whole = write_safetensors(source / "model.safetensors", tensors)
    (source / "blob.bin").write_bytes(rng.bytes(5 * MiB + 77))
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", source)
    return folder / "store", whole, tensors, (source / "blob.bin").read_bytes()


@pytest.fixture
def calm(build, tmp_path):
    """Programs that start in it hear that memory is short while there is a file `short`, and not when it is short for
    other tests, which would take their files out of memory."""
    @contextlib.contextmanager
    def preloaded():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VCKPT_PRESSURE", str(tmp_path / "short"))
            patch.setenv("LD_PRELOAD", str(build / "tests/libpressure.so"))
            patch.setenv("ASAN_OPTIONS",
                         os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
            yield
    return preloaded


@pytest.fixture
def passing(mount, large, calm):
    """Mounts that store; skips where the kernel or the user lacks the right."""
    def make(*options, store=large[0], **more):
        with calm():
            m = mount(store, *options, **more)
        if not passes(m):
            if os.geteuid() == 0 and os.uname().release.split(".")[:2] >= ["6", "9"]:
                pytest.fail((m / ".vckpt" / "stats").read_text())
            pytest.skip("no passthrough here")
        return m
    return make


def test_what_is_read_once_is_not_assembled(passing, large):
    m = passing("tier=auto")
    step = m / "a" / "latest"
    assert read(step / "model.safetensors") == large[1]
    for name in os.listdir(step / "model"):
        read(step / "model" / name)
    read(step / "blob.bin")
    stats = m.stats()
    assert stats["vckpt_assemblies_total"] == stats["vckpt_assembled_bytes"] == 0
    assert stats["vckpt_passthrough_opens_total"] == 0
    with open(step / "model.safetensors", "rb") as f:                   # once more, but of no file half
        f.read(100)
    assert serving(step / "blob.bin") == "cached"


def test_what_is_opened_again_is_read_by_the_kernel(passing, large):
    m = passing("tier=auto")
    step = m / "a" / "latest"
    for name, want in [("model.safetensors", large[1]), ("blob.bin", large[3])]:
        file = step / name
        assert serving(file) == "cached" and read(file) == want and serving(file) == "cached" and closed(m)
        fd = os.open(file, os.O_RDONLY)
        assert serving(file) == "passthrough"
        before = served(m)
        assert os.read(fd, len(want) + 1) == want and os.pread(fd, 10, len(want) - 4) == want[-4:]
        assert os.pread(fd, 10, len(want)) == b""
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == want
        out = os.memfd_create("out")
        assert os.sendfile(out, fd, 0, len(want)) == len(want) and os.pread(out, len(want), 0) == want
        assert served(m) == before
        assert m.stats()['vckpt_open_files{tier="passthrough"}'] == 1
        os.close(out)
        os.close(fd)
        assert wait_until(lambda: m.stats()['vckpt_open_files{tier="passthrough"}'] == 0)
    assert m.stats()["vckpt_assembled_bytes"] == len(large[1]) + len(large[3])


def test_half_of_a_file_is_enough_and_less_is_not(passing, large):
    m = passing("tier=auto", "readahead=0")
    file = m / "a" / "latest" / "blob.bin"
    with open(file, "rb", buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        f.read(MiB)
    assert closed(m)
    with open(file, "rb", buffering=0) as f:
        assert serving(file) == "cached"
        f.seek(2 * MiB)
        while f.read(MiB):
            pass
    assert closed(m)
    with open(file, "rb"):
        assert serving(file) == "passthrough"


def test_all_kinds_of_files(passing, large):
    """tier=passthrough: each file when it is opened, also the small ones and those below mesh/."""
    m = passing("tier=passthrough")
    step = m / "a" / "latest"
    assert read(step / "model.safetensors") == large[1] and read(step / "blob.bin") == large[3]
    for name, t in large[2].items():
        file = step / "model" / f"{name}.npy"
        data = read(file)
        assert data[-len(t.data):] == t.data and len(data) == 4096 + len(t.data) == os.stat(file).st_size
        assert serving(file) == "passthrough"
    assert read(step / "manifest.json").startswith(b"{") and serving(step / "manifest.json") == "passthrough"
    shards = [read(step / "mesh" / "tp=2" / f"rank-{rank}" / "model.safetensors") for rank in range(2)]
    again = [read(step / "mesh" / "tp=2" / f"rank-{rank}" / "model.safetensors") for rank in range(2)]
    assert shards == again and len(shards[0]) > MiB
    assert served(m) == 0 and m.stats()["vckpt_assemblies_failed_total"] == 0


def test_a_shard_is_the_same_in_both_tiers(passing, large, mount):
    a, b = passing("tier=passthrough"), mount(large[0], "tier=cached")
    for rank in range(3):
        name = f"a/latest/mesh/tp=3/rank-{rank}/model.safetensors"
        assert read(a / name) == read(b / name)


def test_readers_outlive_the_server(passing, large):
    m = passing("tier=passthrough")
    file = m / "a" / "latest" / "model.safetensors"
    fd = os.open(file, os.O_RDONLY)
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.kill(m.server, signal.SIGKILL)
    assert wait_until(lambda: not m.pids)
    assert os.pread(fd, len(large[1]), 0) == large[1] and mapped[:] == large[1]
    with pytest.raises(OSError) as e:
        os.open(file, os.O_RDONLY)
    assert e.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    mapped.close()
    os.close(fd)


def test_readers_of_a_removed_step_go_on(passing, large, vckpt, tmp_path, program):
    store = tmp_path / "store"
    subprocess.run(["cp", "-r", large[0], store], check=True)
    vckpt("import", store, "a/2", large[0].parent / "source", "--set", "x=y")
    m = Mount(program, store, tmp_path / "mnt", "tier=passthrough")
    try:
        if not passes(m):
            pytest.skip("no passthrough here")
        step, other = m / "a" / "step-00000001", m / "a" / "step-00000002"
        for file in (step / "blob.bin", step / "mesh" / "tp=2" / "rank-0" / "model.safetensors", other / "blob.bin"):
            read(file)
        in_memory = lambda: m.stats()["vckpt_assembled_bytes"]
        with open(step / "model.safetensors", "rb") as f:
            vckpt("rm", store, "a/1", "--yes")
            assert wait_until(lambda: os.listdir(m / "a") == ["latest", "step-00000002"])
            assert wait_until(lambda: in_memory() == len(large[1]) + len(large[3])), in_memory()
            assert f.read() == large[1]
        assert wait_until(lambda: in_memory() == len(large[3])), in_memory()
    finally:
        m.end()


def test_open_by_others_all_the_time(passing, large, scale):
    """The kernel refuses (EIO) a file that is opened in both ways at once: nobody ever gets that, whatever comes and
    goes, and with less memory than the files take, so that they are dropped while others are opened."""
    files = [f"model/{name}.npy" for name in large[2]] + ["model.safetensors", "blob.bin"]
    m = passing("tier=auto", "cache=270M")                              # 14 MiB of whole files
    step = m / "a" / "step-00000001"
    want = {name: read(step / name) for name in files}
    assert want["model.safetensors"] == large[1]
    end, wrong, opened = time.monotonic() + scale(2, 8), [], [0] * 6

    def reader(seed):
        rng = np.random.default_rng(seed)
        try:
            while time.monotonic() < end or opened[seed] <= 10:
                name = files[rng.integers(len(files))]
                with open(step / name, "rb", buffering=0) as f:
                    opened[seed] += 1
                    for _ in range(int(rng.integers(1, 4))):
                        at = int(rng.integers(len(want[name])))
                        if os.pread(f.fileno(), 200_000, at) != want[name][at:at + 200_000]:
                            wrong.append((name, at))
                    if rng.integers(3) == 0 and read(step / name) != want[name]:
                        wrong.append(name)
                    if rng.integers(4) == 0:
                        with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                            if mapped[-4096:] != want[name][-4096:]:
                                wrong.append(("mapped", name))
        except OSError as e:
            wrong.append(e)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(len(opened))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stats = m.stats()
    assert not wrong
    assert stats["vckpt_passthrough_opens_total"] > 10 and stats["vckpt_assemblies_dropped_total"] > 0
    assert stats["vckpt_assembled_bytes"] <= stats["vckpt_assembled_max_bytes"] == 14 * MiB
    assert wait_until(lambda: m.stats()['vckpt_open_files{tier="passthrough"}'] ==
                      m.stats()['vckpt_open_files{tier="cached"}'] == 0)


def test_a_descriptor_that_stays_keeps_others_with_the_server(passing, large):
    m = passing("tier=auto")
    file = m / "a" / "latest" / "model.safetensors"
    with open(file, "rb") as f:
        assert f.read() == large[1]
        for _ in range(3):
            with open(file, "rb") as g:
                assert g.read() == large[1]
        assert m.stats()["vckpt_passthrough_opens_total"] == 0
    assert closed(m)
    with open(file, "rb") as f:
        assert f.read() == large[1] and m.stats()["vckpt_passthrough_opens_total"] == 1


def test_damage_is_an_error_where_it_is_and_nowhere_else(passing, large, tmp_path, program):
    store = tmp_path / "store"
    subprocess.run(["cp", "-r", large[0], store], check=True)
    (pack,) = [p for p in store.glob("packs/*/*.pack") if p.stat().st_size > 10 * MiB and "model" in p.name]
    at = pack.read_bytes().index(large[2]["raw1"].data[:64]) + MiB
    with open(pack, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))
    m = Mount(program, store, tmp_path / "mnt", "tier=passthrough", log=tmp_path / "log")
    try:
        if not passes(m):
            pytest.skip("no passthrough here")
        step = m / "a" / "latest"
        for _ in range(2):
            fd = os.open(step / "model.safetensors", os.O_RDONLY)
            bad = large[1].index(large[2]["raw1"].data[:64]) + MiB
            with pytest.raises(OSError) as e:
                os.pread(fd, 4096, bad)
            assert e.value.errno == errno.EIO
            assert os.pread(fd, 4096, bad - MiB // 2) == large[1][bad - MiB // 2:bad - MiB // 2 + 4096]
            os.close(fd)
        assert serving(step / "model.safetensors") == "cached"
        assert m.stats()["vckpt_assemblies_failed_total"] == 1
        assert read(step / "model" / "raw0.npy")[4096:] == large[2]["raw0"].data
        assert serving(step / "model" / "raw0.npy") == "passthrough"
    finally:
        m.end()


@contextlib.contextmanager
def group_of_version_2(program, tmp_path):
    """A program that is mount.vckpt in a control group of its own, without limits."""
    for parent in map(pathlib.Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")):
        group = parent / f"vckpt-{os.getpid()}"
        if not (parent / "cgroup.controllers").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            break
        starter = tmp_path / "start"
        starter.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs && exec {program} "$@"\n')
        starter.chmod(0o755)
        yield starter
        assert wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
        return
    pytest.skip("no control group of version 2 can be made here")


@pytest.mark.parametrize("where", ["machine", "control group"])
def test_memory_is_given_back_when_it_is_short(large, program, tmp_path, calm, where):
    """Files that nobody has open, and decoded pieces; what is open stays, and stays right. Whoever waits for memory
    while the machine has plenty is at a limit of its own."""
    meminfo = tmp_path / "short.meminfo"
    meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 9 kB\nMemAvailable: 1048576 kB\n")
    with contextlib.ExitStack() as stack:
        if where == "control group":
            program = stack.enter_context(group_of_version_2(program, tmp_path))
        with calm():
            m = Mount(program, large[0], tmp_path / "mnt", "tier=passthrough")
        stack.callback(m.end)
        if not passes(m):
            pytest.skip("no passthrough here")
        lines = (m / ".vckpt" / "stats").read_text().splitlines()
        feature = next(line for line in lines if line.startswith('vckpt_feature{name="memory_pressure"'))
        if f" the {where}" not in feature:
            assert where == "machine" or not os.path.exists("/proc/pressure/memory")
            pytest.skip("no PSI here")
        step = m / "a" / "latest"
        with open(step / "blob.bin", "rb") as f:
            assert read(step / "model.safetensors") == large[1] and read(step / "mesh/tp=2/rank-0/model.safetensors")
            stats = m.stats()
            assert stats["vckpt_assembled_files"] == 3 and stats["vckpt_cache_bytes"] > 0
            (tmp_path / "short").write_text("group" if where == "control group" else "")
            if where == "machine":
                time.sleep(0.5)
                assert m.stats()["vckpt_assembled_files"] == 3 and m.stats()["vckpt_memory_given_back_total"] == 0
                meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 9 kB\nMemAvailable: 200000 kB\n")
            assert wait_until(lambda: m.stats()["vckpt_assembled_files"] == 1)
            assert wait_until(lambda: m.stats()["vckpt_cache_bytes"] == 0)
            (tmp_path / "short").unlink()
            assert m.stats()["vckpt_memory_given_back_total"] > 0
            assert f.read() == large[3] and read(step / "model.safetensors") == large[1]
            assert m.stats()["vckpt_assembled_files"] == 1              # for a while


@pytest.mark.parametrize(("options", "why"), [(["tier=cached"], "tier=cached was asked for"),
                                              (["cache=1M"], "cache= leaves no memory for whole files")])
def test_it_is_off_where_that_was_asked_for(mount, large, options, why):
    m = mount(large[0], *options)
    file = m / "a" / "latest" / "model.safetensors"
    for _ in range(3):
        assert read(file) == large[1]
    assert serving(file) == "cached"
    assert why in (m / ".vckpt" / "stats").read_text()


def test_a_bad_tier_is_refused(program, large, tmp_path):
    refused = subprocess.run([program, large[0], tmp_path, "-o", "tier=fast"], capture_output=True, text=True,
                             timeout=60)
    assert refused.returncode == 1 and "option tier=fast: it is auto, cached or passthrough" in refused.stderr


def test_with_the_keeper_stopped_files_are_served(passing, large):
    """Nothing can be assembled without it; nothing hangs for longer than it is waited for, and no bytes are wrong."""
    m = passing("tier=auto")
    file = m / "a" / "latest" / "model.safetensors"
    keeper = m.keeper
    os.kill(keeper, signal.SIGSTOP)
    try:
        for _ in range(3):
            assert read(file) == large[1] and closed(m)
        assert serving(file) == "cached"
        assert "the keeper did not answer" in (m / ".vckpt" / "stats").read_text()
    finally:
        os.kill(keeper, signal.SIGCONT)
    for name in ["model.safetensors", "blob.bin", "model/raw0.npy"]:    # nor is anything put together in vain
        for _ in range(3):
            assert read(file.parent / name) and serving(file.parent / name) == "cached" and closed(m)
    assert m.stats()["vckpt_assemblies_failed_total"] <= 1 and not passes(m)


def test_a_late_keeper_spoils_no_file(passing, large):
    """It is told to drop one file, for room, and asked for another one, and answers neither in time: what it does
    later may not be counted on."""
    m = passing("tier=passthrough", f"cache={256 * MiB + len(large[1]) + MiB}")
    step, keeper = m / "a" / "latest", m.keeper
    assert read(step / "model.safetensors") == large[1] and serving(step / "model.safetensors") == "passthrough"
    os.kill(keeper, signal.SIGSTOP)
    try:
        assert read(step / "blob.bin") == large[3]
    finally:
        os.kill(keeper, signal.SIGCONT)
    for _ in range(3):
        assert read(step / "model.safetensors") == large[1] and read(step / "blob.bin") == large[3]


def test_unmounting_while_a_file_is_assembled(mount, vckpt, tmp_path):
    rng = np.random.default_rng(1)
    vckpt("init", tmp_path / "store")
    write_safetensors(tmp_path / "m/model.safetensors", {"w": Tensor("U8", (100 * MiB,), rng.bytes(100 * MiB))})
    vckpt("import", tmp_path / "store", "a/1", tmp_path / "m/model.safetensors")
    m = mount(tmp_path / "store", "tier=auto")
    file = m / "a" / "latest" / "model.safetensors"
    want = (tmp_path / "m/model.safetensors").read_bytes()
    assert read(file) == want and closed(m)
    os.close(os.open(file, os.O_RDONLY))                                # too large for now: a thread does it, now
    m.umount()
    if passes(again := mount(tmp_path / "store", "tier=auto")):
        file = again / "a" / "latest" / "model.safetensors"
        for _ in range(2):
            assert read(file) == want and closed(again)
        assert wait_until(lambda: serving(file) == "passthrough") and closed(again)
        assert read(file) == want and again.stats()["vckpt_passthrough_opens_total"] == 1


# ---- the keeper's half, asked by somebody who has taken the server over ----

OPEN, CLOSE, MEMORY = range(3)
REFUSED = "refused"


class Broker:
    """A keeper's half by itself, for one request."""

    def __init__(self, build):
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([build / "tests" / "keeper_broker", str(theirs.fileno())],
                                            pass_fds=[theirs.fileno()])
        self.ours.settimeout(10)

    def ask(self, op, number=0, fds=(), data=None):
        with self.ours:
            socket.send_fds(self.ours, [data or struct.pack("Ii", op, number)], fds)
            answer = self.ours.recv(100)
        assert self.process.wait(120) == 0
        return struct.unpack("i4xQ", answer) if answer else REFUSED


@pytest.fixture
def broker(build):
    return lambda *words, **more: Broker(build).ask(*words, **more)


ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed(flags=0):
    memory = os.memfd_create("m", os.MFD_ALLOW_SEALING | flags)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, ALL_SEALS)
    return memory


def test_the_keeper_makes_backing_files_of_sealed_memory_only(broker, tmp_path):
    """A backing file is read with the keeper's rights: none is made of what the server could only name."""
    (tmp_path / "file").write_text("secret")
    fuse, memory, cut = os.open("/dev/fuse", os.O_RDWR), sealed(), os.memfd_create("m", os.MFD_ALLOW_SEALING)
    bad = [os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path / "file", os.O_PATH),
           os.open("/etc/shadow", os.O_PATH), os.open(tmp_path, os.O_RDONLY), cut]
    for fd in bad:
        assert broker(OPEN, fds=[fuse, fd]) == REFUSED
    fcntl.fcntl(cut, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
    assert broker(OPEN, fds=[fuse, cut]) == REFUSED                      # it could be cut
    assert broker(OPEN, fds=[fuse, memory])[0] in (-errno.EPERM, -errno.ENOTTY)  # asked for: this one is not mounted
    assert broker(OPEN, fds=[bad[0], memory]) == broker(OPEN, fds=[memory, memory]) == REFUSED
    assert broker(OPEN, fds=[fuse]) == broker(OPEN) == broker(CLOSE, 1) == broker(7) == REFUSED
    assert broker(CLOSE, 1, [bad[0]]) == broker(OPEN, data=b"x" * 100, fds=[fuse] * 5) == REFUSED
    for fd in [fuse, memory, *bad]:
        os.close(fd)


def test_the_keeper_waits_for_nobody(build, mount, large):
    """What it is handed may be a file of the mount, whose server does not answer. (To start a process then would close
    that file in it, and wait.)"""
    m = mount(large[0])
    brokers = [Broker(build) for _ in range(6)]
    fds = [os.open(m.point, os.O_PATH), os.open(m / ".vckpt" / "version", os.O_RDONLY)]
    memory, server = sealed(), m.server
    os.kill(server, signal.SIGSTOP)
    try:
        for i, fd in enumerate(fds):
            for j, words in enumerate([(OPEN, 0, [fd, memory]), (OPEN, 0, [fd, fd]), (CLOSE, 1, [fd])]):
                socket.send_fds(brokers[3 * i + j].ours, [struct.pack("Ii", *words[:2])], words[2])
                assert brokers[3 * i + j].ours.recv(100) == b""
    finally:
        os.kill(server, signal.SIGCONT)
        for fd in [*fds, memory]:
            os.close(fd)
        for b in brokers:
            b.ours.close()
    assert [b.process.wait(120) for b in brokers] == [0] * 6


def test_the_keeper_takes_no_memory_of_hugetlbfs(broker):
    try:
        memory = sealed(os.MFD_HUGETLB)
    except OSError as e:
        pytest.skip(f"no huge pages: {e}")
    fuse = os.open("/dev/fuse", os.O_RDWR)
    assert broker(OPEN, fds=[fuse, memory]) == REFUSED
    os.close(fuse)
    os.close(memory)


def test_the_keeper_tells_free_memory(broker):
    result, memory = broker(MEMORY)
    assert result == 0 and memory > 10 * MiB


@pytest.fixture(scope="module")
def many(vckpt, request, tmp_path_factory):
    """A store with thousands of small tensors; how many."""
    folder, n = tmp_path_factory.mktemp("many"), 5000 if request.config.getoption("--full") else 1000
    write_safetensors(folder / "many/model.safetensors",
                      {f"t{i:05}": Tensor("I64", (512,), i.to_bytes(8, "little") * 512) for i in range(n)})
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", folder / "many/model.safetensors")
    return folder / "store", n


def test_thousands_of_files_beside_one_that_stands_in_memory(mount, many, calm):
    """Each gets a file in memory; all stay right, also those that are opened while others are kept open; and the mount
    ends at once."""
    with calm():
        m = mount(many[0], "tier=passthrough")
    if not passes(m):
        pytest.skip("no passthrough here")
    folder, kept = m / "a" / "latest" / "model", []
    try:
        for i in range(many[1]):
            fd = os.open(folder / f"t{i:05}.npy", os.O_RDONLY)
            assert os.pread(fd, 16, 4096) == i.to_bytes(8, "little") * 2
            if i % 10:
                os.close(fd)
            else:
                kept.append((fd, i))
        for fd, i in kept:
            assert os.pread(fd, 8, 4096 + 4088) == i.to_bytes(8, "little")
        assert wait_until(lambda: m.stats()['vckpt_open_files{tier="passthrough"}'] == len(kept))
        assert m.stats()["vckpt_assembled_files"] == many[1]
    finally:
        for fd, _ in kept:
            os.close(fd)
    start = time.monotonic()
    m.umount()
    assert time.monotonic() - start < 10


def use(m, file):
    """One reader of all of it, alone."""
    data = read(file)
    assert closed(m) and wait_until(lambda: m.stats()['vckpt_open_files{tier="passthrough"}'] == 0)
    return data


def test_more_files_than_memory_again_and_again(passing, large, scale):
    """Each of them is put together once at most: a file that had to go does not come back for one use of it."""
    m = passing("tier=auto", "cache=270M")                              # 14 MiB of whole files
    step = m / "a" / "step-00000001"
    files = [step / "model" / f"{name}.npy" for name in large[2] if name != "small"] + [step / "blob.bin"]
    assert sum(os.stat(file).st_size for file in files) > 18 * MiB
    want = [use(m, file) for file in files]
    rounds = scale(12, 100)
    for _ in range(rounds):
        assert [use(m, file) for file in files] == want
    stats = m.stats()
    assert stats["vckpt_assembled_files"] >= 3 and stats["vckpt_assemblies_total"] <= len(files)
    assert stats["vckpt_passthrough_opens_total"] >= 3 * rounds


def test_what_is_read_now_takes_the_place_of_what_was(passing, large):
    m = passing("tier=auto", "cache=270M")
    step = m / "a" / "step-00000001"
    old, new = [step / "model" / f"raw{i}.npy" for i in range(3)], step / "blob.bin"
    for _ in range(5):
        for file in old:
            use(m, file)
    assert m.stats()["vckpt_assembled_files"] == 3
    for file in [*old, step / "model" / "w0.npy", step / "model" / "w1.npy"] * 2:
        use(m, file)
    assert use(m, new) == large[3] and serving(new) == "cached"
    assert use(m, new) == large[3] and serving(new) == "passthrough"


def test_a_file_pays_for_itself_before_another_has_its_place(passing, large, tmp_path, vckpt):
    """A file that was put together and not read since stays where another one was used a few times."""
    rng, store = np.random.default_rng(8), tmp_path / "store"
    vckpt("init", store)
    for name in "ab":
        write_safetensors(tmp_path / name / "model.safetensors", {"w": Tensor("U8", (20 * MiB,), rng.bytes(20 * MiB))})
        vckpt("import", store, f"{name}/1", tmp_path / name / "model.safetensors")
    m = passing("tier=auto", "cache=286M", store=store)                 # one of them
    a, b = (m / name / "latest" / "model.safetensors" for name in "ab")
    for _ in range(2):
        use(m, a)
    assert wait_until(lambda: serving(a) == "passthrough")              # it has served nobody yet
    for _ in range(3):
        use(m, b)
    assert wait_until(lambda: m.stats()["vckpt_assemblies_refused_total"] >= 2)
    assert serving(a) == "passthrough" and m.stats()["vckpt_assemblies_dropped_total"] == 0
    use(m, b)                                                           # and nobody else comes for it
    assert wait_until(lambda: serving(b) == "passthrough") and serving(a) == "cached"
    use(m, b)
    for _ in range(2):                                                  # once replaced: twice since, and b has paid
        assert m.stats()["vckpt_assemblies_total"] == 2
        use(m, a)
    assert wait_until(lambda: serving(a) == "passthrough") and m.stats()["vckpt_assemblies_total"] == 3
