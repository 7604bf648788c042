# SPDX-License-Identifier: Apache-2.0
"""A flipped bit anywhere in a store: through the mount every file gives the right bytes or EIO, and the daemon
stays."""
import ctypes
import errno
import hashlib
import json
import os
import random
import re
import shutil
import struct

import numpy as np
import pytest

import storelow
from forgelib import CHUNK, Forge

from .conftest import Mount, Tensor, wait_until, weights, write_safetensors


@pytest.fixture(scope="module")
def small(program, vckpt, tmp_path_factory):
    """A store with all kinds of files, and what a mount of it shows."""
    folder = tmp_path_factory.mktemp("damage")
    source = folder / "source"
    source.mkdir()
    rng = np.random.default_rng(1)
    write_safetensors(source / "model.safetensors", {
        "raw": Tensor("U8", (300_000,), rng.bytes(300_000)), "w": Tensor("BF16", (400, 300), weights(rng, 120_000)),
        "small": Tensor("F32", (10, 10), rng.bytes(400)), "tiny": Tensor("I64", (), bytes(8))})
    (source / "config.json").write_text("{}")
    (source / "blob.bin").write_bytes(rng.bytes(50_000))
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", source, "--set", "note=first")
    with open(source / "blob.bin", "ab") as f:
        f.write(b"more")
    vckpt("import", folder / "store", "a/2", source)
    vckpt("import", folder / "store", "b/1", source)
    m = Mount(program, folder / "store", folder / "mnt")
    try:
        truth, errors = snapshot(m.point)
    finally:
        m.end()
    assert not errors and len(truth) == 3 * 8
    return folder, truth


def snapshot(point):
    """{path: bytes} of all files, {path: error} of what failed."""
    found, errors = {}, {}

    def failed(e, path=None):
        errors[os.path.relpath(path or e.filename, point)] = e.errno

    for path, dirs, files in os.walk(point, onerror=failed):
        if ".vckpt" in dirs:
            dirs.remove(".vckpt")
        for name in files:
            full = os.path.join(path, name)
            try:
                os.listxattr(full)
                with open(full, "rb") as f:
                    found[os.path.relpath(full, point)] = f.read()
            except OSError as e:
                failed(e, full)
    return found, errors


def known_digests(truth, data):
    """manifest.json says of a tensor that cannot be read that its digest is null, with spaces up to its length."""
    return re.sub(rb'"digest": null {62}', lambda found: (truth or b"")[found.start():found.end()], data)


def look(program, folder, truth, what):
    m = Mount(program, folder / "store", folder / "mnt", log=folder / "log", check=False)
    try:
        if m.result.returncode != 0:
            assert m.result.returncode == 32 and len(m.result.stderr) > 20, (what, m.result)
            return "refused"
        found, errors = snapshot(m.point)
        for path, data in found.items():
            assert known_digests(truth.get(path), data) == truth.get(path), (what, path)
        assert set(errors.values()) <= {errno.EIO}, (what, errors)
        assert m.pids, f"{what}: the daemon died"
        if errors:
            assert wait_until(lambda: (folder / "log").stat().st_size > 0), f"{what}: nothing in the log"
        return "errors" if errors else "whole" if set(found) == set(truth) else "less"
    finally:
        m.end()


def files_of(store):
    return sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_size and
                  "index" not in p.relative_to(store).parts)


def test_flipped_bits(program, small, scale):
    folder, truth = small
    rng = random.Random(11)
    files = files_of(folder / "store")
    results = {}
    for i in range(scale(25, 1000)):
        path = files[i % len(files)]
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        original = path.read_bytes()
        mode = path.stat().st_mode
        os.chmod(path, 0o644)
        try:
            path.write_bytes(data)
            result = look(program, folder, truth, f"{path.relative_to(folder)} at {at}")
        finally:
            path.write_bytes(original)
            os.chmod(path, mode)
        results[result] = results.get(result, 0) + 1
    print(results)
    assert results.get("errors"), "no flip was seen: the test flips nothing that counts"
    assert look(program, folder, truth, "nothing flipped") == "whole"


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "foreign", "longer", "directory", "link"])
def test_packs(program, small, how):
    folder, truth = small
    packs = sorted((folder / "store" / "packs").rglob("*.pack"))
    for path in packs[:3]:
        aside = folder / "aside"
        shutil.copy2(path, aside)
        data = path.read_bytes()
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "link":
            path.symlink_to(aside)
        elif how != "missing":
            path.write_bytes({"empty": b"", "truncated": data[:len(data) // 2], "foreign": packs[-1].read_bytes(),
                              "longer": data + b"\0"}[how])
        try:
            look(program, folder, truth, f"{path.name} {how}")
        finally:
            if how == "directory":
                path.rmdir()
            path.unlink(missing_ok=True)
            shutil.copy2(aside, path)


@pytest.mark.parametrize("how", ["gone", "random", "empty"])
def test_the_index_does_not_matter(program, small, how):
    folder, truth = small
    index = folder / "store" / "index"
    aside = folder / "index-aside"
    if index.exists():
        shutil.copytree(index, aside)
        shutil.rmtree(index)
    if how != "gone":
        index.mkdir()
        for name in ("index.mdb", "index.mdb.new"):
            (index / name).write_bytes(b"" if how == "empty" else random.randbytes(65536))
    try:
        assert look(program, folder, truth, f"index {how}") == "whole"
    finally:
        shutil.rmtree(index, ignore_errors=True)
        if aside.exists():
            aside.rename(index)


def test_a_pack_truncated_under_the_mount(program, small):
    folder, truth = small
    m = Mount(program, folder / "store", folder / "mnt", "cache=1M")
    packs = sorted((folder / "store" / "packs").rglob("*.pack"), key=lambda p: p.stat().st_size)
    kept = packs[-1].read_bytes()
    try:
        assert snapshot(m.point)[0] == truth
        os.chmod(packs[-1], 0o644)
        os.truncate(packs[-1], 8192)
        for path in truth:
            fd = os.open(m.point / path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        found, errors = snapshot(m.point)
        assert all(truth[p] == d for p, d in found.items())
        assert set(errors.values()) <= {errno.EIO}
        assert m.pids
    finally:
        m.end()
        packs[-1].write_bytes(kept)


@pytest.mark.parametrize("names", [("long", "short"), ("short", "long")])
def test_a_piece_that_claims_the_digest_of_another(program, vckpt, build, tmp_path, names):
    """Of another length. Whichever is read first: both files have the bytes of their places, and no others."""
    rng, store = np.random.default_rng(3), tmp_path / "store"
    data = {name: rng.bytes({"long": 60_000, "short": 40_000}[name]) for name in names}
    write_safetensors(tmp_path / "m.safetensors", {n: Tensor("U8", (len(d),), d) for n, d in data.items()})
    vckpt("init", store)
    vckpt("import", store, "a/1", tmp_path / "m.safetensors", "--no-index")
    lib = ctypes.CDLL(str(build / "tests" / "libvckpt_internal.so"))
    lib.base_block_check.restype = ctypes.c_uint64
    forge = Forge(lib, store, "a")
    name = forge.pack.replace("-meta", "-model")
    with forge.storage(store) as storage, storelow.Pack(storage, name, forge.id) as pack:
        refs = {ref.raw_len: ref for ref in pack.footer()}
        digest = {n: bytes(ref.digest.bytes) for n, ref in refs.items()}
    with open(next(store.rglob(f"{name}.pack")), "r+b") as f:       # the checks of its blocks, under the other digest
        for k, at in enumerate(range(0, 40_000, storelow.BLOCK)):
            block = data["short"][at:at + storelow.BLOCK]
            check = lib.base_block_check(ctypes.byref(refs[60_000].digest), ctypes.c_uint64(k), block,
                                         ctypes.c_size_t(len(block)))
            f.seek(refs[40_000].checks + 8 * k)
            f.write(struct.pack("<Q", check))
    short, long = ([d, hashlib.sha256(b"\2" + struct.pack("<Q", 1) + d).digest()]     # of the piece, of the tensor
                   for d in (digest[40_000], digest[60_000]))
    changed = 0
    for number, (kind, body) in enumerate(forge.objects):
        if kind == CHUNK:
            for old, new in zip(short, long):
                changed += body.count(old)
                body = body.replace(old, new)
            forge.objects[number][1] = body
    assert changed == 2
    forge.done(tmp_path / "scratch")
    m = Mount(program, store, tmp_path / "mnt", log=tmp_path / "log")
    try:
        for name in names:
            with open(m.point / "a" / "step-00000001" / "model" / f"{name}.npy", "rb") as f:
                assert f.read()[-len(data[name]):] == data[name], name
    finally:
        m.end()


def test_manifest_json_beside_damage(program, vckpt, build, tmp_path):
    """A tensor whose row is damaged has no digest there; all else is there, and the length is what a listing says."""
    store = tmp_path / "store"
    write_safetensors(tmp_path / "m.safetensors", {"x": Tensor("U8", (3,), b"abc")})
    vckpt("init", store)
    vckpt("import", store, "a/1", tmp_path / "m.safetensors")
    forge = Forge(ctypes.CDLL(str(build / "tests" / "libvckpt_internal.so")), store, "a")
    for number, (kind, body) in enumerate(forge.objects):
        if kind == CHUNK:
            forge.objects[number][1] = bytes(8) + body[8:]      # in place of its magic number
    forge.done(tmp_path / "scratch")
    m = Mount(program, store, tmp_path / "mnt", log=tmp_path / "log")
    try:
        path = m.point / "a/step-00000001/manifest.json"
        text = path.read_text()
        assert len(text) == path.stat().st_size and vckpt("cat", store, "a/1/manifest.json").stdout == text
        assert [(t["name"], t["digest"]) for t in json.loads(text)["tensors"]] == [("x", None)]
    finally:
        m.end()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_run_that_is_no_directory(program, vckpt, small, tmp_path, kind):
    """It cannot be read, which the log says; other runs are as they were."""
    store = tmp_path / "s/store"
    shutil.copytree(small[0] / "store", store)
    (store / "runs/a").rename(tmp_path / "aside")
    if kind == "link":
        (store / "runs/a").symlink_to(tmp_path / "aside")
    else:
        (store / "runs/a").write_text("a file")
    m = Mount(program, store, tmp_path / "mnt")
    try:
        with pytest.raises(OSError) as e:
            os.listdir(m.point / "a")
        assert e.value.errno == errno.ENOTDIR
        assert "b" in os.listdir(m.point) and os.listdir(m.point / "b/latest")
    finally:
        m.end()
