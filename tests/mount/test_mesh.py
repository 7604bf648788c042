# SPDX-License-Identifier: Apache-2.0
"""<step>/mesh/<mesh>/rank-NNNNN in a mount: what a rank of any mesh holds, read by plain programs. The bytes of all
kinds of shards: tests/property/test_mesh_views.py."""
import errno
import json
import os
import random
import shutil
import stat
import subprocess
import threading

import numpy as np
import pytest
import safetensors

import meshlib
from meshlib import Tensor
from saverlib import Vckpt

from .conftest import mount_of, wait_until

STEP = "run/step-00000000"
KEPT = 1024             # FS_MESHES_KEPT


@pytest.fixture(scope="module")
def saved(build, tmp_path_factory):
    """Four ranks of dp=2,tp=2, and two more of a mesh of their own."""
    rng, api = random.Random(5), Vckpt(build)
    array = lambda kind, *shape: np.frombuffer(rng.randbytes(int(np.prod(shape)) * np.dtype(kind).itemsize),
                                               kind).reshape(shape)
    mesh = [("dp", 2), ("tp", 2)]
    tensors = [Tensor("model/column", array("f4", 640, 400), mesh, (("SS", 0, 2), ("S", 0))),
               Tensor("model/row", array("f2", 300, 1052), mesh, (("S", 0), ("S", 1))),
               Tensor("model/qkv", array("i4", 24, 1000), mesh, (("R",), ("IS", 0, 3))),
               Tensor("model/norm", array("f4", 7), mesh, (("R",), ("R",))),
               Tensor("model/uneven", array("u1", 9, 3), mesh, (("R",), ("S", 0))),
               Tensor("model/scalar", array("f8"), mesh, (("R",), ("R",))),
               Tensor("optimizer/row", array("f4", 300, 52), mesh, (("S", 0), ("S", 1))),
               Tensor("optimizer/stage", array("i8", 10), [("pp", 2)], (("S", 0),), first_rank=4)]
    store = api.store(tmp_path_factory.mktemp("saved") / "store")
    meshlib.save(api, store, tensors, 6)
    return store, tensors


def check_rank(folder, wanted):
    """By safetensors' own reader, which maps the file."""
    assert sorted(os.listdir(folder)) == ["model.safetensors", "optimizer.safetensors"]
    for component in ("model", "optimizer"):
        with safetensors.safe_open(folder / f"{component}.safetensors", "numpy") as f:
            meshlib.same({name: f.get_tensor(name) for name in f.keys()}, wanted, component)


@pytest.mark.parametrize("asked", [[("dp", 2), ("tp", 2)], [("tp", 4)], [("tp", 2), ("pp", 5)], [("ep", 1)]])
def test_every_rank_of_a_mesh(mount, saved, asked):
    store, tensors = saved
    folder = mount(store) / STEP / "mesh" / meshlib.text(asked)
    ranks = meshlib.expected(tensors, asked)
    names = [f"rank-{rank:05}" for rank in range(len(ranks))]
    assert sorted(os.listdir(folder)) == ["manifest.json", *names]
    for name, wanted in zip(names, ranks):
        check_rank(folder / name, wanted)
        whole = (folder / name / "model.safetensors").read_bytes()
        assert len(whole) == (folder / name / "model.safetensors").stat().st_size
        meshlib.same(meshlib.parse(whole), wanted, "model")
    told = json.loads((folder / "manifest.json").read_text())
    assert told["ranks"] == len(ranks) and len(told["tensors"]) == len(tensors) and told["left_out"] == []


def test_names(mount, saved, tmp_path):
    """`mesh` itself is not listed, and lists the meshes of the step alone; rank-N is a link to the padded name."""
    step = mount(saved[0], log=tmp_path / "log") / STEP
    mesh = step / "mesh"
    assert "mesh" not in os.listdir(step) and sorted(os.listdir(mesh)) == ["dp=2,tp=2", "pp=2"]
    assert not [p for p in step.rglob("*") if "rank-" in str(p)]
    one = mesh / "tp=4"
    assert os.readlink(one / "rank-2") == "rank-00002" and stat.S_ISLNK(os.lstat(one / "rank-2").st_mode)
    assert os.lstat(one / "rank-2").st_size == len("rank-00002")
    assert (one / "rank-2" / "model.safetensors").samefile(one / "rank-00002" / "model.safetensors")
    for path in (mesh, mesh / "dp=2,tp=2", mesh / "dp=2,tp=2" / "rank-00000"):
        s, again = os.lstat(path), os.stat(path / ".")
        assert stat.S_ISDIR(s.st_mode) and s.st_ino == again.st_ino and s.st_mtime == step.stat().st_mtime
        assert stat.S_IMODE(s.st_mode) == stat.S_IMODE(step.stat().st_mode)
        found = {e.name: e for e in os.scandir(path)}
        assert {e.inode() for e in found.values()} == {os.lstat(e.path).st_ino for e in found.values()}
        assert all(e.is_dir() == os.path.isdir(e.path) for e in found.values())
    assert os.path.samefile(one / "rank-00002" / ".." / "..", mesh) and os.path.samefile(mesh / "..", step)
    with pytest.raises(OSError) as e:
        open(one / "rank-00000" / "model.safetensors", "wb")
    assert e.value.errno == errno.EROFS


@pytest.mark.parametrize("name,words", [
    ("tp=5", "tensor model/qkv: placement IS(0,3)"), ("tp", "tp"), ("tp=0", "size 0"),
    ("tp=02", "shown only as 'tp=2'"),
    ("a=300,b=300", "90000 ranks: at most 65536")])
def test_what_is_no_mesh(mount, saved, tmp_path, name, words):
    """ENOENT, and the log says why."""
    log = tmp_path / "log"
    m = mount(saved[0], log=log)
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            os.stat(m / STEP / "mesh" / name)
    lines = wait_until(lambda: log.read_text().splitlines())
    assert all(f"{STEP}/mesh/{name}: " in line and words in line for line in lines), lines
    assert 1 <= m.stats()["vckpt_mesh_refusals_total"] <= 3     # a kernel short of memory may ask again


def test_other_names_that_are_none(mount, saved):
    mesh = mount(saved[0]) / STEP / "mesh"
    for path in ("tp=2/rank-2", "tp=2/rank-00002", "tp=2/rank-01", "tp=2/rank-000000", "tp=2/rank-", "tp=2/model",
                 "tp=2/rank-0/config.safetensors", "tp=2/rank-0/model", "tp=2/rank-0/manifest.json",
                 "tp=2/rank-99999999999", "tp=2/model.safetensors"):
        with pytest.raises(FileNotFoundError):
            os.lstat(mesh / path)
    for path in ("tp=2/manifest.json/x", "tp=2/rank-0/model.safetensors/x"):
        with pytest.raises(NotADirectoryError):
            os.lstat(mesh / path)
    assert mesh.is_dir() and (mesh / "tp=2" / "rank-00001").is_dir()


def test_many_ranks(mount, saved):
    """A list of 65,536 ranks asks nothing of each of them."""
    m = mount(saved[0])
    mesh = m / STEP / "mesh" / "a=256,b=256"
    assert len(os.listdir(mesh)) == 65537
    assert m.count("lookup") < 1000
    rank = mesh / "rank-65535" / "model.safetensors"
    with safetensors.safe_open(rank, "numpy") as f:
        assert set(f.keys()) == {"column", "row", "qkv", "norm", "uneven", "scalar"}
    assert m.stats()["vckpt_meshes_looked_up_total"] < 1000


def test_made_up_names_stay_bounded(mount, saved, scale):
    """Each name of a mesh that is looked up is known to the kernel, and so to the daemon. Beyond KEPT the kernel drops
    those that nobody uses; what is in use stays what it was."""
    m = mount(saved[0])
    mesh, n = m / STEP / "mesh", scale(3000, 100_000)
    file = open(mesh / "tp=2" / "rank-00001" / "model.safetensors", "rb")
    held = os.open(mesh / "tp=4", os.O_DIRECTORY)
    try:
        want = file.read()
        before, first = m.stats()["vckpt_resident_bytes"], os.stat(mesh / "x=1" / "rank-00000")
        for i in range(n):
            os.stat(mesh / f"x={i % 60_000 + 1}{',y=1' * (i // 60_000)}")
            assert not os.path.exists(mesh / f"not-a-mesh-{i}")
        # the thread that follows the store tells the kernel; so until it has
        assert wait_until(lambda: m.stats()["vckpt_meshes"] <= KEPT + 100), m.stats()["vckpt_meshes"]
        stats = m.stats()
        assert stats["vckpt_meshes_looked_up_total"] >= n + 2
        assert stats["vckpt_meshes_dropped_total"] > 0  # not all of them: a kernel forgets by itself, too
        assert stats["vckpt_mesh_refusals_total"] >= n
        assert stats["vckpt_resident_bytes"] < before + (64 << 20)
        again = os.stat(mesh / "x=1" / "rank-00000")    # it was forgotten, and means the same
        assert (again.st_ino, again.st_mtime) == (first.st_ino, first.st_mtime)
        file.seek(0)
        assert file.read() == want
        assert os.listdir(held) and os.stat("rank-00003", dir_fd=held).st_ino == os.stat(
            mesh / "tp=4" / "rank-00003").st_ino
        assert (mesh / "tp=2" / "rank-00001" / "model.safetensors").read_bytes() == want
    finally:
        file.close()
        os.close(held)


def test_damage_is_an_error_of_the_file(vckpt, mount, saved, tmp_path):
    """One flipped byte in the packs of the model: the shards that need it give EIO, all others their bytes."""
    store = shutil.copytree(saved[0], tmp_path / "store")
    packs = sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_size > 100_000)
    data = bytearray(packs[0].read_bytes())
    data[len(data) // 2] ^= 1
    packs[0].chmod(0o644)
    packs[0].write_bytes(data)
    m = mount(store, log=tmp_path / "log")
    wanted, failed = meshlib.expected(saved[1], [("tp", 4)]), 0
    for rank, tensors in enumerate(wanted):
        try:
            raw = (m / STEP / "mesh" / "tp=4" / f"rank-{rank:05}" / "model.safetensors").read_bytes()
        except OSError as e:
            assert e.errno == errno.EIO
            failed += 1
            continue
        meshlib.same(meshlib.parse(raw), tensors, "model")
    assert 0 < failed and m.pids
    assert wait_until(lambda: "damage" in (tmp_path / "log").read_text() or "check" in (tmp_path / "log").read_text(),
                      60), (tmp_path / "log").read_text()
    check = meshlib.parse((m / STEP / "mesh" / "tp=4" / "rank-00000" / "optimizer.safetensors").read_bytes())
    meshlib.same(check, wanted[0], "optimizer")


def test_a_step_that_goes(vckpt, mount, saved, tmp_path):
    store = shutil.copytree(saved[0], tmp_path / "store")
    m = mount(store)
    folder = m / STEP / "mesh" / "tp=2" / "rank-00000"
    file = open(folder / "model.safetensors", "rb")
    want = (folder / "model.safetensors").read_bytes()
    held = os.open(folder, os.O_DIRECTORY)
    try:
        vckpt("rm", store, "run/0")
        assert wait_until(lambda: not os.path.exists(m / STEP))
        assert file.read() == want      # its packs are there still
        try:    # the step may be open in the daemon still
            again = os.open("model.safetensors", os.O_RDONLY, dir_fd=held)
        except OSError as e:
            assert e.errno in (errno.ESTALE, errno.ENOENT)
        else:
            with open(again, "rb") as f:
                assert f.read() == want
        with pytest.raises(FileNotFoundError):
            os.stat(folder)
    finally:
        os.close(held)
        file.close()


def test_unmounted_while_names_are_looked_up(mount, saved):
    """An unmount waits for nobody, and whoever looks up gets an error or an answer."""
    m = mount(saved[0])
    mesh, codes, stop = m / STEP / "mesh", set(), threading.Event()

    def look(first):
        i = first
        while not stop.is_set():
            i += 2
            try:
                os.stat(mesh / f"x={i % 60_000 + 1}" / "rank-0" / "model.safetensors")
                os.listdir(mesh / f"x={i % 60_000 + 1}" / "rank-00000")
            except OSError as e:
                codes.add(e.errno)
                if not mount_of(m.point):
                    return
    threads = [threading.Thread(target=look, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    try:
        assert wait_until(lambda: m.stats()["vckpt_meshes_looked_up_total"] > 100)
        subprocess.run(["umount", "-l", m.point], check=True, timeout=60)
        for t in threads:
            t.join(60)
            assert not t.is_alive()
    finally:
        stop.set()
    assert codes <= {errno.ENOENT, errno.ECONNABORTED, errno.ENODEV, errno.ENOTCONN, errno.ENOTDIR}, codes
    assert wait_until(lambda: not m.pids), "the daemon outlives its mount"
