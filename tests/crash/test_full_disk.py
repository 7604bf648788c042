# SPDX-License-Identifier: Apache-2.0
"""A full disk, a read-only one, no permission: a clear error, old steps intact, the space usable again."""
import os
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 24 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path]).returncode:
        pytest.skip("needs root and a tmpfs mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def make(path, mib, seed=0):
    save_file({"w": numpy.random.default_rng(seed).integers(0, 256, (mib, 1 << 20), dtype="u1")}, path)


def test_import_into_a_full_disk(vckpt, small, tmp_path):
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 8, 1)
    make(tmp_path / "b.safetensors", 30, 2)
    make(tmp_path / "c.safetensors", 8, 3)
    vckpt("import", store, "run", tmp_path / "a.safetensors")
    done = vckpt("import", store, "run", tmp_path / "b.safetensors", check=False)
    assert done.returncode == 1 and "No space left" in done.stderr or "full" in done.stderr, done.stderr
    assert [s["step"] for s in vckpt.json("ls", store, "run")["steps"]] == [0]
    vckpt("verify", store)
    vckpt("import", store, "run", tmp_path / "c.safetensors")       # what was written is given back
    vckpt("verify", store)


def test_rm_and_gc_on_a_disk_without_a_byte(vckpt, small, tmp_path):
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 8, 1)
    vckpt("import", store, "run", tmp_path / "a.safetensors")
    with open(small / "filler", "wb", buffering=0) as f:
        try:
            while True:
                f.write(b"x" * 4096)
        except OSError:
            pass
    assert vckpt("import", store, "run", tmp_path / "a.safetensors", check=False).returncode == 1
    vckpt("verify", store)
    vckpt("rm", store, "run/0")
    vckpt("gc", store, "--grace", "0")
    assert os.statvfs(small).f_bavail * 4096 > 7 << 20
    vckpt("verify", store)


def test_an_index_on_a_full_disk(vckpt, small, tmp_path):
    """Wherever the room ends: LMDB says EIO of a write that is cut."""
    store, cache = tmp_path / "store", {"XDG_CACHE_HOME": str(small)}
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 24)
    vckpt("import", store, "run", tmp_path / "a.safetensors", "--no-index")
    (store / "index").write_text("")                        # so the index is made in the cache
    said, free = set(), 4
    while "done" not in said:
        with open(small / "filler", "wb") as f:
            f.truncate()
            room = os.statvfs(small).f_bavail * 4096
            os.posix_fallocate(f.fileno(), 0, room - free * 1024)
        done = vckpt("index", store, "--rebuild", check=False, env=cache)
        assert done.returncode == 0 or done.stderr.endswith(": No space left on device\n"), (free, done.stderr)
        said.add("done" if done.returncode == 0 else done.stderr.split(": ")[-2].split()[-1])
        free += 8
        assert free < 1000 and not list(small.glob("vckpt/*/*.new"))
    assert said >= {"opened", "written"}, said


def test_read_only(vckpt, small, tmp_path):
    store = small / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 2)
    vckpt("import", store, "run", tmp_path / "a.safetensors")
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    vckpt("verify", store)
    vckpt("cat", store, "run/0/model/w", text=False)
    done = vckpt("import", store, "run", tmp_path / "a.safetensors", check=False)
    assert done.returncode == 1 and "ead-only" in done.stderr
    assert vckpt("rm", store, "run/0", check=False).returncode == 1
    vckpt("gc", store, "--dry-run")


def test_no_permission(vckpt, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become nobody")
    store = tmp_path / "store"
    vckpt("init", store)
    make(tmp_path / "a.safetensors", 2)
    vckpt("import", store, "run", tmp_path / "a.safetensors")
    os.chmod(tmp_path, 0o755)
    pack_dir = store / "packs"
    for p in [pack_dir, *pack_dir.rglob("*")]:
        os.chmod(p, 0o700 if p.is_dir() else 0o600)

    def nobody(*args):
        return subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", vckpt.path,
                               *map(str, args)], capture_output=True, text=True)
    probe = nobody("--version")
    if probe.returncode:
        pytest.skip("the build folder is not readable for others")
    done = nobody("ls", store)
    if "ermission" not in done.stderr:                 # parents of tmp_path may be closed to others
        assert done.returncode == 0
        done = nobody("cat", store, "run/0/model/w")
    assert done.returncode == 1 and "ermission" in done.stderr
