# SPDX-License-Identifier: Apache-2.0
"""Mounts for tests: made by `mount`, taken down whatever happens."""
import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import numpy as np
import pytest


# Of all mounts here: one of mount.vckpt's tiers. The default run takes none, --full one after the other.
TIER = os.environ.get("VCKPT_MOUNT_TIER", "")


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    if os.path.exists("/dev/fuse"):
        return
    for item in items:
        if here in pathlib.Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason="there is no /dev/fuse"))


def unescape(text):
    return text.encode().decode("unicode_escape")


def mount_of(path):
    """The newest line of mountinfo for `path`, or None: (type, source, options)."""
    found = None
    for line in open("/proc/self/mountinfo"):
        left, right = line.split(" - ", 1)
        if unescape(left.split()[4]) == str(path):
            kind, source, _ = right.split(" ", 2)
            found = kind, unescape(source), left.split()[5]
    return found


def daemons(path):
    """Process ids of the mount.vckpt that were given this mount point."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\0")
                if words and b"mount.vckpt" in words[0] and os.fsencode(path) in words:
                    found.append(int(entry))
    return found


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as f:
        return int(f.read().rpartition(")")[2].split()[1])


def keeper_of(path):
    """The process that mounted there: of the two that were given this mount point, the one that started the other."""
    pids = daemons(path)
    (keeper,) = {parent for pid in pids if (parent := parent_of(pid)) in pids}
    return keeper


def wait_until(condition, seconds=120.0, step=0.01):
    """What the condition gives once it holds, or in the end. The time only ends what would wait for ever."""
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if result or time.monotonic() > end:
            return result
        time.sleep(step)


class Mount:
    """A mounted store."""

    def __init__(self, program, store, point, *options, log=None, check=True):
        self.store, self.point = pathlib.Path(store), pathlib.Path(point)
        # on a dead mount mkdir fails, but for the second that the kernel remembers its root
        if not mount_of(self.point):
            self.point.mkdir(exist_ok=True)
        words = [*options]
        if TIER and not any(word.startswith("tier=") for word in words):
            words.append(f"tier={TIER}")
        if log:
            words.append(f"log={log}")
        command = [str(program), str(store), str(point)]
        if words:
            command += ["-o", ",".join(words)]
        self.result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if check and self.result.returncode != 0:
            raise AssertionError(f"{command}: exit {self.result.returncode}: {self.result.stderr}")

    def __truediv__(self, name):
        return self.point / name

    @property
    def pids(self):
        return daemons(self.point)

    @property
    def keeper(self):
        return keeper_of(self.point)

    @property
    def server(self):
        (pid,) = set(self.pids) - {self.keeper}
        return pid

    def stats(self):
        values = {}
        for line in (self.point / ".vckpt" / "stats").read_text().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values

    def count(self, op):
        return self.stats()[f'vckpt_requests_total{{op="{op}"}}']

    def kill(self):
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not self.pids)

    def umount(self):
        subprocess.run(["umount", str(self.point)], check=True, timeout=120)
        assert wait_until(lambda: not self.pids), "the daemon outlives its mount"

    def end(self):
        """Whatever state it is in."""
        for _ in range(8):
            if not mount_of(self.point) or mount_of(self.point)[0] != "fuse.vckpt":
                break
            subprocess.run(["umount", "-l", str(self.point)], capture_output=True, timeout=120)
        if not wait_until(lambda: not self.pids, 2):  # something may still map a file of it
            self.kill()


@pytest.fixture(scope="session")
def program(build):
    return build / "fs" / "mount.vckpt"


@pytest.fixture
def mount(program, tmp_path):
    made = []

    def make(store, *options, point=None, **more):
        point = point or tmp_path / f"mnt{len(made)}"
        m = Mount(program, store, point, *options, **more)
        made.append(m)
        return m

    yield make
    for m in reversed(made):
        m.end()


@pytest.fixture
def installed(program):
    """mount.vckpt where mount(8) looks for it: one test at a time, so that none takes it away from another."""
    place = pathlib.Path("/sbin/mount.vckpt")
    with open(pathlib.Path(tempfile.gettempdir()) / "vckpt-test-installed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.lexists(place):
            if place.resolve() != program.resolve():
                pytest.skip("another /sbin/mount.vckpt is installed")
            yield place
            return
        place.symlink_to(program.resolve())
        yield place
        place.unlink()


# ---- content ----

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
         "I8": np.int8, "U8": np.uint8,
         "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_}
ITEM = {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8} | {name: np.dtype(t).itemsize for name, t in NUMPY.items()}


class Tensor:
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, tuple(shape), data
        assert len(data) == ITEM[dtype] * int(np.prod(shape, dtype=np.int64))

    def array(self):
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)


def write_safetensors(path, tensors, metadata=None):
    """Plain writing of the format, without the library; returns the file's bytes."""
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + b"".join(t.data for t in tensors.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(whole)
    return whole


def weights(rng, n):
    """n bf16 numbers as of real weights: Gaussian, sigma 0.02."""
    f = (rng.standard_normal(n) * 0.02).astype(np.float32)
    return (f.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def make_tensors(seed=0):
    rng = np.random.default_rng(seed)
    make = lambda dtype, shape: Tensor(dtype, shape, rng.bytes(ITEM[dtype] * int(np.prod(shape, dtype=np.int64))))
    tensors = {
        "embed.weight": Tensor("BF16", (2048, 512), weights(rng, 2048 * 512)),
        "layer.0.attention.weight": make("F32", (513, 301)),
        "layer.0.mlp.weight": make("BF16", (1024, 1024)),
        "layer.0.norm.weight": Tensor("F32", (512,), np.ones(512, np.float32).tobytes()),
        "layer.0.bias": make("F16", (77,)),
        "conv.weight": make("F32", (64, 32, 3, 3)),
        "scalar": make("F32", ()),
        "empty": make("F32", (0, 4)),
        "ids": Tensor("I64", (1, 512), np.arange(512).tobytes()),
        "zeros": Tensor("F32", (700, 700), bytes(4 * 700 * 700)),
        "tiny": make("U8", (3,)),
        "f8": make("F8_E4M3", (300, 100)),
        "a/b": make("I32", (5, 7)),
        "..": make("I8", (9,)),
        ".hidden%41": make("U16", (11,)),
        "n" * 300: make("U32", (13,)),
        "tab\there": make("F64", (6, 5)),
        "größe": Tensor("BOOL", (4,), bytes([1, 0, 1, 1])),
    }
    return tensors


class Source:
    """A model directory and what a mount of it must show."""

    def __init__(self, path, seed=0):
        self.path = path
        path.mkdir(parents=True)
        self.tensors = make_tensors(seed)
        self.safetensors = write_safetensors(path / "model.safetensors", self.tensors,
                                             {"format": "pt", "seed": str(seed)})
        self.blobs = {"config.json": b'{"hidden_size": 512}\n', "1_Pooling/config.json": b"{}", "empty.txt": b"",
                      "vocab.bin": np.random.default_rng(seed + 1).bytes(3_000_001)}
        for name, data in self.blobs.items():
            file = path / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return Source(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="session")
def sample_store(vckpt, source, tmp_path_factory):
    """A store with run `a` (steps 1, 2 and 3, the last with other weights) and run `b` (step 7). Tests do not change
    it."""
    folder = tmp_path_factory.mktemp("store")
    path = folder / "store"
    other = Source(folder / "other", seed=5)
    vckpt("init", path)
    vckpt("import", path, "a/1", source.path, "--set", "loss=2.31")
    vckpt("import", path, "a/2", source.path)
    vckpt("import", path, "a/3", other.path)
    vckpt("import", path, "b/7", source.path)
    return path


def small_source(path, seed=0, n=1000):
    """One small file, for tests of steps that come and go."""
    rng = np.random.default_rng(seed)
    write_safetensors(path, {"w": Tensor("F32", (n,), rng.bytes(4 * n))})
    return path
