# SPDX-License-Identifier: Apache-2.0
"""Programs that know nothing of vckpt, on a mounted step."""
import ctypes
import hashlib
import json
import os
import subprocess

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from .conftest import NUMPY, Mount, write_safetensors


@pytest.fixture(scope="module")
def mounted(program, sample_store, tmp_path_factory):
    m = Mount(program, sample_store, tmp_path_factory.mktemp("programs") / "mnt")
    yield m
    m.end()


@pytest.fixture(scope="module")
def step(mounted):
    return mounted / "a" / "step-00000001"


def npy(step, source):
    """(true name, tensor, mounted file) of every tensor."""
    listed = json.loads((step / "manifest.json").read_text())["tensors"]
    assert len(listed) == len(source.tensors)
    return [(t["name"], source.tensors[t["name"]], step / t["file"]) for t in listed]


def run(*words, **more):
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True, timeout=120,
                          **more).stdout


def test_the_tree(mounted):
    assert sorted(os.listdir(mounted.point)) == [".vckpt", "a", "b"]
    assert sorted(os.listdir(mounted / "a")) == ["latest", "step-00000001", "step-00000002", "step-00000003"]
    assert os.readlink(mounted / "a" / "latest") == "step-00000003"
    assert os.path.samefile(mounted / "b" / "latest", mounted / "b" / "step-00000007")
    assert sorted(os.listdir(mounted / ".vckpt")) == ["slow", "stats", "version"]
    for name in ["", "a/", "a/step-00000001/", "a/step-00000001/model/"]:
        for missing in ["nothing", "step-1", "step-000000001", "step-00000009", "model.npy", "..."]:
            assert not os.path.lexists(f"{mounted.point}/{name}{missing}")


@pytest.mark.parametrize("mode", [None, "r"])
def test_numpy_load(step, source, mode):
    for name, tensor, file in npy(step, source):
        assert file.stat().st_size == 4096 + len(tensor.data)
        if mode and not tensor.data:
            continue  # numpy cannot map nothing
        array = np.load(file, mmap_mode=mode)
        assert array.tobytes() == tensor.data, name
        assert array.shape == tensor.shape
        if tensor.dtype in NUMPY:
            assert array.dtype == NUMPY[tensor.dtype]


def test_safetensors_file_is_the_source(step, source):
    assert (step / "model.safetensors").read_bytes() == source.safetensors
    subprocess.run(["cmp", step / "model.safetensors", source.path / "model.safetensors"], check=True)


def test_safe_open(step, source):
    torch = pytest.importorskip("torch")
    with safe_open(step / "model.safetensors", "pt") as f:
        assert set(f.keys()) == set(source.tensors)
        for name, tensor in source.tensors.items():
            got = f.get_tensor(name)
            assert tuple(got.shape) == tensor.shape
            assert (got.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == tensor.data if got.numel()
                    else not tensor.data)
        whole = source.tensors["layer.0.attention.weight"].array()
        part = f.get_slice("layer.0.attention.weight")
        assert np.array_equal(part[100:307].numpy().view(np.uint32), whole[100:307].view(np.uint32))
        assert np.array_equal(part[:, 17:99].numpy().view(np.uint32), whole[:, 17:99].view(np.uint32))


def test_load_file(mount, store, vckpt, source, tmp_path):
    """safetensors.numpy.load_file knows no bf16 and f8: a file without them."""
    known = {name: t for name, t in source.tensors.items() if t.dtype in NUMPY}
    write_safetensors(tmp_path / "known/model.safetensors", known)
    vckpt("import", store, "a/1", tmp_path / "known/model.safetensors")
    got = load_file(mount(store) / "a" / "latest" / "model.safetensors")
    assert set(got) == set(known)
    for name, tensor in known.items():
        assert got[name].tobytes() == tensor.data and got[name].shape == tensor.shape


def expected_files(step, source):
    files = {"model.safetensors": source.safetensors, **source.blobs,
             "manifest.json": (step / "manifest.json").read_bytes()}
    for _, tensor, file in npy(step, source):
        files[str(file.relative_to(step))] = tensor.data
    return files


def compare(folder, step, source):
    files = expected_files(step, source)
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == set(files)
    for name, data in files.items():
        got = (folder / name).read_bytes()
        assert (got[4096:] if name.startswith("model/") else got) == data, name


def test_cp(step, source, tmp_path):
    run("cp", "-r", step, tmp_path / "copy")
    compare(tmp_path / "copy", step, source)
    for path, _, files in os.walk(tmp_path / "copy"):
        for name in [".", *files]:      # the copy is its owner's, who can change and remove it
            assert os.stat(os.path.join(path, name)).st_mode & 0o200
    run("cp", "-r", "--sparse=always", step, tmp_path / "sparse")
    compare(tmp_path / "sparse", step, source)


def test_tar(step, source, tmp_path):
    run("tar", "-cf", tmp_path / "all.tar", "-C", step, ".")
    (tmp_path / "out").mkdir()
    run("tar", "-xf", tmp_path / "all.tar", "-C", tmp_path / "out")
    compare(tmp_path / "out", step, source)


def test_rsync_twice(step, source, tmp_path):
    run("rsync", "-ac", f"{step}/", tmp_path / "copy")
    compare(tmp_path / "copy", step, source)
    again = run("rsync", "-aci", f"{step}/", tmp_path / "copy")
    assert again == "", again


def test_find_and_du(mounted, step, source):
    files = expected_files(step, source)
    names = run("find", step, "-type", "f", "-printf", "%P\\0").split("\0")[:-1]
    assert sorted(names) == sorted(files)
    bytes_apparent = int(run("du", "-sb", step).split()[0])
    data = sum(4096 + len(d) if n.startswith("model/") else len(d) for n, d in files.items())
    assert bytes_apparent == data
    blocks = sum((4096 + len(d) if n.startswith("model/") else len(d)) + 511 >> 9 for n, d in files.items())
    assert int(run("du", "-s", "--block-size=512", step).split()[0]) == blocks
    run("find", mounted.point, "-ls")


def test_fts(mounted):
    """fts(3) without stat, as chmod -R and others walk, believes a directory's number of links if there is one."""
    libc = ctypes.CDLL(None)
    libc.fts_open.restype = libc.fts_read.restype = ctypes.c_void_p
    nostat_physical = 0x8 | 0x10
    roots = (ctypes.c_char_p * 2)(os.fsencode(mounted.point), None)
    walk, found = libc.fts_open(roots, nostat_physical, None), set()
    while entry := libc.fts_read(ctypes.c_void_p(walk)):
        found.add(ctypes.c_char_p.from_address(entry + 48).value.decode())      # fts_path
    libc.fts_close(ctypes.c_void_p(walk))
    names = {os.path.join(path, name) for path, dirs, files in os.walk(mounted.point) for name in [*dirs, *files]}
    assert found == names | {str(mounted.point)}


def test_find_a_second_time_asks_for_nothing_but_opendir(mounted, step):
    run("find", step, "-ls")
    before = mounted.stats()
    run("find", step, "-ls")
    after = mounted.stats()
    for op in ["readdir", "readdirplus", "lookup", "getattr"]:
        key = f'vckpt_requests_total{{op="{op}"}}'
        assert after[key] - before[key] <= 8, (op, after[key] - before[key])  # what leads to the step may be asked


def test_sha256sum(step, source):
    want = hashlib.sha256(source.safetensors).hexdigest()
    assert run("sha256sum", step / "model.safetensors").split()[0] == want
    assert run("sha256sum", step / "vocab.bin").split()[0] == hashlib.sha256(source.blobs["vocab.bin"]).hexdigest()


def test_dd_at_odd_offsets(step, source, tmp_path):
    data = source.safetensors
    for skip, count, block in [(0, 1, 1), (1, 4097, 1), (4095, 3, 4099), (7, 5, 131071), (3, 2, 1048577),
                               (1, 1, len(data) - 1)]:
        run("dd", f"if={step}/model.safetensors", f"of={tmp_path}/out", f"bs={block}", f"skip={skip}", f"count={count}",
            "status=none")
        assert (tmp_path / "out").read_bytes() == data[skip * block:(skip + count) * block]
    run("dd", f"if={step}/model.safetensors", f"of={tmp_path}/out", "bs=1M", "iflag=direct", "status=none")
    assert (tmp_path / "out").read_bytes() == data


def test_attributes_of_files(mounted, step, sample_store, source):
    owner = os.stat(sample_store)
    for path, _, files in os.walk(step):
        for name in [".", *files]:
            s = os.stat(os.path.join(path, name))
            assert (s.st_uid, s.st_gid) == (owner.st_uid, owner.st_gid)
            assert s.st_mode & 0o7777 == owner.st_mode & (0o755 if name == "." else 0o644)
            assert s.st_nlink == 1          # of a directory: how many are in it is not counted
            assert s.st_blksize == 1 << 20
            assert s.st_mtime_ns == s.st_ctime_ns == os.stat(step).st_mtime_ns
    assert os.statvfs(step).f_blocks * os.statvfs(step).f_frsize == os.statvfs(sample_store).f_blocks * os.statvfs(
        sample_store).f_frsize


def test_inode_numbers_are_unique_and_survive_a_remount(mounted, mount, sample_store):
    def numbers(point):
        return {os.path.relpath(os.path.join(p, n), point): os.lstat(os.path.join(p, n)).st_ino
                for p, dirs, files in os.walk(point) for n in [*dirs, *files] if n != ".vckpt"}
    first, second = numbers(mounted.point), numbers(mount(sample_store).point)
    assert first == second
    assert len(set(first.values())) == len(first)
    assert not {0, 1} & set(first.values())


def test_reading_a_directory_agrees_with_looking_up(step):
    for path, dirs, files in os.walk(step):
        with os.scandir(path) as entries:
            for e in entries:
                assert e.inode() == os.lstat(e.path).st_ino


def test_xattrs(mounted, step, source):
    for name, tensor, file in npy(step, source):
        names = os.listxattr(file)
        assert names and all(n.startswith("user.vckpt.") for n in names)
        values = {n.removeprefix("user.vckpt."): os.getxattr(file, n).decode() for n in names}
        assert values["name"] == name
        assert os.getxattr(file, "user.vckpt.serving") in (b"cached", b"passthrough")
        assert "serving" not in values      # it changes with what was read: a backup would see a change
        assert {"dtype", "shape", "digest", "stored_bytes", "codec"} <= set(values)
    assert os.getxattr(step, "user.vckpt.attr.loss") == b"2.31"
    for missing in ["user.other", "user.vckpt.none", "security.capability"]:
        with pytest.raises(OSError):
            os.getxattr(step / "config.json", missing)


def test_nothing_can_be_written(step):
    for flags in [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC]:
        with pytest.raises(OSError):
            os.open(step / "config.json", flags)
    for change in [lambda: os.mkdir(step / "x"), lambda: os.unlink(step / "config.json"),
                   lambda: os.rename(step, step.parent / "y"),
                   lambda: os.chmod(step, 0o777), lambda: os.utime(step), lambda: (step / "new").write_text("x")]:
        with pytest.raises(OSError):
            change()


def test_version_stats_and_slow(mounted):
    assert (mounted / ".vckpt" / "version").read_text().startswith("vckpt ")
    text = (mounted / ".vckpt" / "stats").read_text()
    for line in text.splitlines():
        assert line.startswith(("# HELP vckpt_", "# TYPE vckpt_", "vckpt_")), line
    assert 'tier="' in text and "vckpt_feature{" in text
    stats = mounted.stats()
    assert stats["vckpt_resident_bytes"] > 0
    (mounted / ".vckpt" / "slow").read_text()
