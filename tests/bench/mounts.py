# SPDX-License-Identifier: Apache-2.0
"""Rows of the mount as programs use it: loaders, many readers at once, what a save left, other tools' mounts, and what
each way of reading makes the mount decode. Called by tests/bench/run."""
import contextlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import threading
import time

MIB = 1 << 20
PASSED = b"passthrough"

# Each prints the seconds of what stands between the two clocks: its imports are not measured.
NUMPY_LOAD = """
import glob, os, sys, time, numpy
paths = sorted(glob.glob(os.path.join(sys.argv[1], "*.npy")))
assert paths
start = time.perf_counter()
for path in paths:
    numpy.load(path).reshape(-1).view("i8").sum()
print(time.perf_counter() - start)
"""
# For each line, a path: seconds, and those of the processors. A copy of every tensor is what goes to a device.
LOAD_FILE = """
import sys, time, torch
from safetensors.torch import load_file
for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    for tensor in load_file(line.rstrip()).values():
        tensor.clone()
    tensor = None                                       # and the file is closed
    print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
"""
ONE_TENSOR = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], framework="np") as f:
    assert f.get_tensor(sys.argv[2]).nbytes == int(sys.argv[3])
"""


def usable(b, name):
    if os.geteuid() == 0 and os.path.exists("/dev/fuse"):
        return True
    b.skip(name, "needs root and /dev/fuse")
    return False


def seconds_of(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout or 0)


def values_of(mnt):
    lines = (mnt / ".vckpt/stats").read_text().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def imported(b, source):
    """A store with the file as its only step, and where to mount it."""
    store = b.store("store")
    b.vckpt("import", store, "run", source, "-q")
    return store, b.dir / "mnt"


def local_copy(b):
    """The step's tensors as local .npy files."""
    plain = b.dir / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    b.vckpt("export", b.dir / "store", "run/latest", plain, "--format", "npy", "-q")
    return plain


def cached(b, store):
    for p in (store / "packs").rglob("*.pack"):
        b.read_file(p)


def loaders(b, name, source):
    """numpy.load of all tensors, with nothing read before, and once more."""
    if not usable(b, f"loaders, {name}"):
        return
    store, mnt, plain = *imported(b, source), local_copy(b)
    cached(b, store)
    first, second, reference = [], [], []
    seconds_of(NUMPY_LOAD, plain / "model")
    for _ in range(b.o.repeat):
        reference.append(seconds_of(NUMPY_LOAD, plain / "model"))
        with b.mounted([b.mount_path, "-f", store, mnt], mnt):
            path = mnt / "run/latest/model"
            first.append(seconds_of(NUMPY_LOAD, path))
            second.append(seconds_of(NUMPY_LOAD, path))
    same = "the same call on local files"
    bar = 1.5 if name.startswith("random") else None
    b.row(f"numpy.load and a sum, first, {name}", same, first, reference, bar, unit="s", higher=False)
    b.row(f"numpy.load and a sum, second, {name}", same, second, reference, None, unit="s", higher=False)
    shutil.rmtree(plain, ignore_errors=True)


def forget(paths):
    """Their pages leave the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Loader:
    """A process that loads files, each time as if it were the first: its imports are done."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", LOAD_FILE], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def load(self, path, server=None):
        """Seconds, and those of the processors, the server's included."""
        before = cpu_of(server)
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        wall, cpu = map(float, self.process.stdout.readline().split())
        return wall, cpu + cpu_of(server) - before


def cpu_of(pid):
    if pid is None:
        return 0
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_of(mnt):
    return int((mnt / ".vckpt/stats").read_text().partition(',pid="')[2].partition('"')[0])


def in_memory(path):
    """Waits until the kernel reads it by itself. False: it does not, here."""
    end = time.monotonic() + 30
    while os.getxattr(path, "user.vckpt.serving") != PASSED:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    time.sleep(0.5)                                     # pages of before are dropped, and memory is taken for the next
    return True


def first_minute(b, name, source):
    """load_file of the whole model and a copy of every tensor: the loads of an evaluation, one after another."""
    if not usable(b, f"load_file, {name}"):
        return
    try:
        import torch  # noqa: F401
    except ImportError:
        return b.skip(f"load_file, {name}", "needs a python with torch")
    store, mnt = imported(b, source)
    path, loader = mnt / "run/latest/model.safetensors", Loader()
    bars = {"cold": 1.15, "first": 2.5, "second, tier=cached": 1.15, "first through passthrough": 1.1, "later": 0.9}
    got = {what: ([], []) for what in bars}

    def add(what, local, ours):
        got[what][0].append(ours)
        got[what][1].append(local)
    loader.load(source)
    for _ in range(b.o.repeat):
        forget([source])
        local = loader.load(source)
        forget(p for p in store.rglob("*") if p.is_file())
        with b.mounted([b.mount_path, "-f", store, mnt], mnt):
            add("cold", local, loader.load(path, server_of(mnt)))
        cached(b, store)
        b.read_file(source)
        with b.mounted([b.mount_path, "-f", "-o", "tier=cached", store, mnt], mnt):
            loader.load(path)
            add("second, tier=cached", loader.load(source), loader.load(path, server_of(mnt)))
        with b.mounted([b.mount_path, "-f", store, mnt], mnt):
            add("first", loader.load(source), loader.load(path, server_of(mnt)))
            if in_memory(path):
                for what in ("first through passthrough", "later"):
                    add(what, loader.load(source), loader.load(path, server_of(mnt)))
    loader.process.stdin.close()
    loader.process.wait()
    for what, (ours, theirs) in got.items():
        if not ours:
            b.skip(f"load_file and a copy, {what}, {name}", "the kernel has no passthrough, or no memory")
            continue
        for k, kind in enumerate(["", ", processors"]):
            b.row(f"load_file and a copy, {what}, {name}{kind}", "the same call on the local file",
                  [v[k] for v in ours], [v[k] for v in theirs], bars[what] if k == 0 else None, unit="s", higher=False)


def at_once(paths, act):
    """MB/s of 16 threads, each with one of the paths."""
    paths = [paths[i % len(paths)] for i in range(16)]
    threads = [threading.Thread(target=act, args=(path,)) for path in paths]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(path.stat().st_size for path in paths) / (time.perf_counter() - start) / 1e6


def parallel(b, name, source):
    """16 readers of 16 files, and of one, once these were read before."""
    if not usable(b, f"16 readers, {name}"):
        return
    store, mnt, plain = *imported(b, source), local_copy(b)
    names = sorted(os.listdir(plain / "model"))[:16]
    with b.mounted([b.mount_path, "-f", store, mnt], mnt):
        files = [mnt / "run/latest/model" / n for n in names]
        whole = mnt / "run/latest/model.safetensors"
        end = time.monotonic() + 60
        while any(os.getxattr(path, "user.vckpt.serving") != PASSED for path in [*files, whole]):
            if time.monotonic() > end:
                return b.skip(f"16 readers, {name}", "the kernel has no passthrough (Linux 6.9), or no memory")
            for path in [*files, whole]:
                b.read_file(path)
        got = {"16 files": ([], []), "one file": ([], [])}
        for _ in range(b.o.repeat):
            for kind, ours, theirs in [("16 files", files, [plain / "model" / n for n in names]),
                                       ("one file", [whole], [source])]:
                got[kind][0].append(at_once(ours, b.read_file))
                got[kind][1].append(at_once(theirs, b.read_file))
        for kind, (ours, theirs) in got.items():
            b.row(f"16 readers of {kind}, later, {name}", "the same files on the local filesystem", ours, theirs, 0.9)
    shutil.rmtree(plain, ignore_errors=True)


def after_a_save(b, name, source):
    """The first read of a step that was saved with keep_cached, and of a file that was just written."""
    if not usable(b, f"first read after a save, {name}"):
        return
    mnt, plain, size = b.dir / "mnt", b.dir / "plain.safetensors", source.stat().st_size
    ours, theirs = [], []
    for _ in range(b.o.repeat):
        store = b.store("store")
        b.read_file(source)
        with b.mounted([b.mount_path, "-f", store, mnt], mnt):
            b.vckpt("import", store, "run", source, "-q", "--keep-cached")
            start = time.perf_counter()
            b.read_file(mnt / "run/step-00000000/model.safetensors")
            ours.append(size / (time.perf_counter() - start) / 1e6)
        with open(source, "rb") as f, open(plain, "wb", buffering=0) as out:
            while piece := f.read(8 * MIB):
                out.write(piece)
            os.fsync(out.fileno())
        start = time.perf_counter()
        b.read_file(plain)
        theirs.append(size / (time.perf_counter() - start) / 1e6)
        plain.unlink()
    b.row(f"first read after a save, keep_cached, {name}", "a plain file just written and synced", ours, theirs,
          0.5 if name.startswith("random") else None)


@contextlib.contextmanager
def mount_of(b, tool, source, repo, mnt):
    """The file in a mount of restic or borg; the backup is made once."""
    if not repo.exists():
        if tool == "restic":
            subprocess.run(["restic", "-q", "-r", repo, "init"], check=True, capture_output=True)
            subprocess.run(["restic", "-q", "-r", repo, "backup", source], check=True, capture_output=True)
        else:
            subprocess.run(["borg", "init", "-e", "none", repo], check=True, capture_output=True)
            subprocess.run(["borg", "create", f"{repo}::a", source], check=True, capture_output=True)
    if tool == "restic":
        command, inside = ["restic", "-q", "-r", repo, "mount", mnt], f"snapshots/latest{source}"
    else:
        command, inside = ["borg", "mount", "-f", f"{repo}::a", mnt], str(source).lstrip("/")
    with b.mounted(command, mnt):
        yield mnt / inside


def other_mounts(b, name, source):
    if not usable(b, f"read against other mounts, {name}"):
        return
    os.environ.update(RESTIC_PASSWORD="x", BORG_PASSPHRASE="", BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK="yes",
                      BORG_BASE_DIR=str(b.dir / "borgbase"))
    store, mnt = imported(b, source)
    cached(b, store)
    for tool in ["restic", "borg"]:
        repo = b.dir / f"{tool}-read"
        ours, theirs = [], []
        if not shutil.which(tool):
            b.skip(f"first read against {tool} mount, {name}", f"{tool} is not installed")
            continue
        for _ in range(min(b.o.repeat, 3)):
            try:
                with mount_of(b, tool, source, repo, mnt) as path:
                    start = time.perf_counter()
                    assert b.read_file(path) == source.stat().st_size
                    theirs.append(time.perf_counter() - start)
            except (SystemExit, OSError) as e:
                b.skip(f"first read against {tool} mount, {name}", str(e))
                break
            with b.mounted([b.mount_path, "-f", store, mnt], mnt):
                start = time.perf_counter()
                b.read_file(mnt / "run/latest/model.safetensors")
                ours.append(time.perf_counter() - start)
        if theirs:
            b.row(f"first read against {tool} mount, {name}", f"{tool} mount", ours, theirs, 0.2, unit="s",
                  higher=False)
        shutil.rmtree(repo, ignore_errors=True)


def repeated_model(b):
    """10 GiB: one large tensor of a repeated MiB, which the store holds in few bytes, between tensors of 1 MiB."""
    path, piece = b.model("ten"), os.urandom(MIB)
    large = 10 << 30
    header = {"before": {"dtype": "U8", "shape": [MIB], "data_offsets": [0, MIB]},
              "large": {"dtype": "U8", "shape": [large // 4096, 4096], "data_offsets": [MIB, MIB + large]},
              "wanted": {"dtype": "U8", "shape": [MIB], "data_offsets": [MIB + large, 2 * MIB + large]},
              "after": {"dtype": "U8", "shape": [64 * MIB], "data_offsets": [2 * MIB + large, 66 * MIB + large]}}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + os.urandom(MIB))
        for _ in range(large // MIB):
            f.write(piece)
        f.write(os.urandom(65 * MIB))
    return path


def decoded(b):
    """What the mount decodes and puts together for what is asked, in each way of reading, of a file of 10 GiB."""
    if not usable(b, "bytes decoded"):
        return
    source = repeated_model(b)
    store, mnt = imported(b, source)
    source.unlink()
    inside = "run/latest/model.safetensors"

    def random_slices(path):
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        for i in range(100):
            os.pread(fd, 4096, (i * 2654435761 * 4096) % (size - 4096))
        os.close(fd)

    def run(*words):
        return lambda path: subprocess.run([*words, path], check=True, stdout=subprocess.DEVNULL)
    ways = [("head -c 100 of a file of 10 GiB", 100, 128 << 10, run("head", "-c", "100")),
            ("head -c 100 of a tensor of 10 GiB", 100, 128 << 10,
             lambda path: run("head", "-c", "100")(path.parent / "model/large.npy")),
            ("safe_open and a tensor of 1 MiB of 10 GiB", MIB, 4 * MIB,
             lambda path: seconds_of(ONE_TENSOR, path, "wanted", MIB)),
            ("100 slices of 4 KiB at random places", 100 * 4096, None, random_slices),
            ("a tensor of 64 MiB, all of it", 64 * MIB, None,
             lambda path: b.read_file(path.parent / "model/after.npy")),
            ("all of the file, mapped", (10 << 30) + 66 * MIB, None, b.scan_mmap)]
    for what, asked, bar, act in ways:
        with b.mounted([b.mount_path, "-f", store, mnt], mnt):
            before = values_of(mnt)
            act(mnt / inside)
            after = values_of(mnt)
        made = sum(after[name] - before[name] for name in ["vckpt_decoded_bytes_total", "vckpt_assemblies_bytes_total"])
        b.figure(f"decoded and put together for {what}", made / MIB, "MiB", bar and bar / MIB)
        b.notes[f"{what}: decoded bytes for each byte asked"] = made / asked


def names(b, count=100_000):
    """find over one directory with that many tensors, and ls -l of it."""
    if not usable(b, f"{count:,} names"):
        return
    store, source, real, mnt = b.store("store"), b.dir / "many.safetensors", b.dir / "real", b.dir / "mnt"
    header = {f"layer.{i}.weight": {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}
              for i in range(count)}
    text = json.dumps(header).encode()
    source.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * count))
    b.vckpt("import", store, "run", source, "-q")
    shutil.rmtree(real, ignore_errors=True)
    real.mkdir()
    for i in range(count):
        (real / f"layer.{i}.weight.npy").write_bytes(b"x" * 4100)
    for words in [["find"], ["ls", "-l"]]:
        def walk(path, words=words):
            with open("/dev/null", "wb") as null:
                subprocess.run([*words, path], stdout=null, check=True)
        got = {"first": ([], []), "second": ([], [])}
        for _ in range(b.o.repeat):
            subprocess.run("sync; echo 2 > /proc/sys/vm/drop_caches", shell=True, check=False)
            for kind in got:
                start = time.perf_counter()
                walk(real)
                got[kind][1].append(1 / (time.perf_counter() - start))
            with b.mounted([b.mount_path, "-f", store, mnt], mnt):
                step = mnt / "run/step-00000000/model"
                for kind in got:
                    start = time.perf_counter()
                    walk(f"{step}/")
                    got[kind][0].append(1 / (time.perf_counter() - start))
        for kind, bar in [("first", 0.5), ("second", 0.9)]:
            what = "dentries dropped" if kind == "first" else "a second time"
            b.row(f"{' '.join(words)} of {count:,} tensors, {kind}", f"{count:,} real files, {what}", *got[kind], bar,
                  unit="walks/s")
    shutil.rmtree(real, ignore_errors=True)


def rows(b):
    for name, model in [("random bf16", b.random_model), ("gaussian bf16", b.gaussian_model)]:
        source = pathlib.Path(model())
        first_minute(b, name, source)
        loaders(b, name, source)
        parallel(b, name, source)
        after_a_save(b, name, source)
    other_mounts(b, "random bf16", b.random_model())
    decoded(b)
    names(b)
