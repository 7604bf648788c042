# SPDX-License-Identifier: Apache-2.0
"""Damaged stores through the commands: right bytes or an error, the fault named, verify finds it, the rest readable."""
import os
import random
import shutil
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file


def content(store):
    return sorted(p for p in store.rglob("*") if p.is_file() and "index" not in p.relative_to(store).parts)


@pytest.fixture(scope="module")
def made(vckpt, tmp_path_factory):
    """A store of three steps in two runs, shared and encoded pieces, blobs; and what export must give."""
    tmp = tmp_path_factory.mktemp("made")
    source, store = tmp / "source", tmp / "store"
    (source / "sub").mkdir(parents=True)
    rng = numpy.random.default_rng(11)
    base = {"noise": rng.integers(0, 1 << 16, (500, 600), dtype="u2"),
            "w": (rng.standard_normal((300, 500)) * 0.02).astype("f4"), "tiny": numpy.arange(5.0)}
    (source / "config.json").write_text("{}" * 3000)
    (source / "sub" / "x").write_bytes(rng.bytes(50_000))
    vckpt("init", store, "--no-reserve")
    save_file(base, source / "model.safetensors")
    vckpt("import", store, "a", source, "--set", "loss=1")
    base["w"] = base["w"] * 2
    save_file(base, source / "model.safetensors")
    vckpt("import", store, "a", source)
    vckpt("import", store, "b", source / "model.safetensors")
    want = {}
    for target in ["a/0", "a/1", "b/0"]:
        out = tmp / "out"
        vckpt("export", store, target, out)
        want[target] = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        shutil.rmtree(out)
    return store, want


@pytest.fixture
def damaged(made, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(made[0], store)
    return store, made[1]


def read_all(vckpt, store, want, out):
    """Exports everything; returns the number of errors, and fails on wrong bytes."""
    errors = 0
    for target, files in want.items():
        done = vckpt("export", store, target, out, check=False)
        assert done.returncode in (0, 1, 3), done.stderr
        if done.returncode:
            assert done.stderr.strip()
            errors += 1
            continue
        assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == files, target
        shutil.rmtree(out)
    return errors


def test_flips(vckpt, damaged, tmp_path, scale, rng):
    store, want = damaged
    files = content(store)
    errors = 0
    for i in range(scale(30, 300)):
        path = files[i % len(files)]
        at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        with open(path, "r+b") as f:
            f.seek(at)
            old = f.read(1)[0]
            f.seek(at)
            f.write(bytes([old ^ bit]))
        errors += read_all(vckpt, store, want, tmp_path / "out")
        done = vckpt("verify", store, check=False)
        assert done.returncode == 3, f"{path} byte {at}: verify says {done.returncode}\n{done.stdout}{done.stderr}"
        assert path.name in done.stdout + done.stderr, f"{path} byte {at}: not named in\n{done.stdout}{done.stderr}"
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(bytes([old]))
    print("errors", errors)
    assert errors
    vckpt("verify", store)


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "foreign", "swapped", "garbage", "longer"])
def test_a_bad_pack(vckpt, damaged, made, tmp_path, how):
    store, want = damaged
    packs = sorted(store.rglob("*-model.pack"), key=lambda p: -p.stat().st_size)
    pack = packs[0]
    data = pack.read_bytes()
    if how == "missing":
        pack.unlink()
    elif how == "swapped":
        pack.write_bytes(packs[1].read_bytes())
    elif how == "foreign":
        other = tmp_path / "other"
        vckpt("init", other)
        vckpt("export", made[0], "a/0", tmp_path / "src")
        vckpt("import", other, "a", tmp_path / "src")
        pack.write_bytes(max(other.rglob("*-model.pack"), key=lambda p: p.stat().st_size).read_bytes())
    else:
        pack.write_bytes({"empty": b"", "truncated": data[:len(data) // 2], "garbage": random.randbytes(len(data)),
                          "longer": data + b"\0" * 4096}[how])
    errors = read_all(vckpt, store, want, tmp_path / "out")
    assert errors or how == "longer"
    done = vckpt("verify", store, check=False)
    assert done.returncode == 3 and pack.name in done.stdout
    assert "a/step-00000000" in done.stdout or how == "longer"
    assert vckpt("ls", store, "a").returncode == 0
    vckpt("cat", store, "a/0/config.json")                  # of another pack


def test_damage_names_pack_tensor_and_every_step(vckpt, damaged):
    store, want = damaged
    info = vckpt.json("info", store, "b/0/model/noise")
    pack = max(store.rglob("*-model.pack"), key=lambda p: p.stat().st_size)
    data = pack.read_bytes()
    at = data.find(want["b/0"][next(p for p in want["b/0"] if p.name == "model.safetensors")][-1000:-900])
    if at < 0:
        at = 4096 + 40_000
    with open(pack, "r+b") as f:
        f.seek(at)
        f.write(bytes([data[at] ^ 1]))
    damage = vckpt.json("verify", store, check=False)["damage"]
    touched = {(d["run"], d["step"]) for d in damage if "tensor" in d}
    assert info["digest"] and len(touched) >= 1
    assert all(d["file"].endswith(pack.name) and d["length"] > 0 for d in damage)
    assert any(d["offset"] <= at < d["offset"] + d["length"] for d in damage)
    tensor = next(d["tensor"] for d in damage if "tensor" in d)
    done = vckpt("cat", store, f"{sorted(touched)[0][0]}/{sorted(touched)[0][1]}/model/{tensor}", check=False,
                 text=False)
    assert done.returncode in (1, 3) and pack.stem.encode() in done.stderr


@pytest.mark.parametrize("how", ["deleted", "truncated", "random", "other", "empty", "directory"])
def test_a_bad_index_is_rebuilt(vckpt, damaged, made, tmp_path, how):
    store, want = damaged
    data = store / "index" / "index.mdb"
    assert data.exists()
    if how == "deleted":
        shutil.rmtree(store / "index")
    elif how == "truncated":
        os.truncate(data, data.stat().st_size // 2 & ~4095)
    elif how == "random":
        data.write_bytes(random.randbytes(data.stat().st_size))
    elif how == "empty":
        data.write_bytes(b"")
    elif how == "directory":
        data.unlink()
        data.mkdir()
    else:
        other = tmp_path / "other"
        vckpt("init", other)
        vckpt("export", made[0], "a/0", tmp_path / "src")
        vckpt("import", other, "a", tmp_path / "src")
        data.write_bytes((other / "index" / "index.mdb").read_bytes())
    vckpt("export", store, "a/1", tmp_path / "again")
    vckpt("import", store, "c", tmp_path / "again")
    if how != "directory":
        assert vckpt.json("import", store, "c", tmp_path / "again")["piece_bytes_new"] == 0
    assert read_all(vckpt, store, want, tmp_path / "out") == 0
    vckpt("verify", store)


def test_entries_with_both_copies_bad(vckpt, damaged, tmp_path):
    store, want = damaged
    entry = store / "runs" / "a" / f"{0:012}"
    entry.write_bytes(random.randbytes(entry.stat().st_size))
    steps = [s["step"] for s in vckpt.json("ls", store, "a")["steps"]]
    assert steps == [1]
    done = vckpt("ls", store, "a")
    assert entry.name in done.stderr
    vckpt("cat", store, "a/1/config.json")
    assert vckpt("verify", store, check=False).returncode == 3
    vckpt("export", store, "b/0", tmp_path / "src")
    done = vckpt("import", store, "a", tmp_path / "src", check=False)
    assert done.returncode != 0 and "a" in done.stderr
    done = vckpt("gc", store, "--grace", "0", check=False)
    assert done.returncode != 0
    vckpt("import", store, "b", tmp_path / "src")            # the other run is not touched by it


def test_a_newer_format_is_refused_by_name(vckpt, lib, damaged):
    """A store record of version 3: made with the library's own envelope, so that only the version is new."""
    import ctypes
    store, _ = damaged
    path = store / "vckpt.store"
    record = path.read_bytes()
    body_len = int.from_bytes(record[12:16], "little")
    body = bytearray(record[48:48 + body_len])
    assert body[0] == 0x08 and body[1] == 2                  # field 1, version
    body[1] = 3

    class Buf(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_size_t), ("size", ctypes.c_size_t),
                    ("error", ctypes.c_int)]
    b = Buf()
    assert lib.store_record_encode(1, None, bytes(body), ctypes.c_size_t(len(body)), ctypes.byref(b)) == 0
    path.write_bytes(ctypes.string_at(b.data, b.len))
    for args in [("ls", store), ("verify", store), ("gc", store), ("import", store, "a", __file__)]:
        done = vckpt(*args, check=False)
        assert done.returncode == 1 and ("newer" in done.stderr or "version" in done.stderr or "import" == args[0]), (
            done.stderr)


def test_verify_one_step(vckpt, damaged):
    store, _ = damaged
    assert vckpt.json("verify", store, "a/1")["faults"] == 0
    own = [p for p in content(store) if p.name.endswith("-model.pack")]
    smallest = min(own, key=lambda p: p.stat().st_size)
    data = bytearray(smallest.read_bytes())
    data[5000] ^= 0x10
    smallest.write_bytes(data)
    results = {t: vckpt("verify", store, t, check=False).returncode for t in ["a/0", "a/1", "b/0"]}
    assert 3 in results.values() and 0 in results.values(), results
    assert subprocess.run([vckpt.path, "verify", str(store), "a/9"], capture_output=True).returncode == 1


@pytest.mark.parametrize("how", ["directory", "pipe", "link"])
def test_an_entry_that_is_no_file(vckpt, damaged, how):
    """Damage like any other: the run is named, the other runs are read."""
    store, want = damaged
    entry = store / "runs" / "a" / f"{1:012}"
    entry.unlink()
    {"directory": entry.mkdir, "pipe": lambda: os.mkfifo(entry), "link": lambda: entry.symlink_to("/etc/passwd")}[how]()
    assert {r["run"] for r in vckpt.json("ls", store)["runs"]} == {"a", "b"}
    assert [s["step"] for s in vckpt.json("ls", store, "a")["steps"]] == [0]
    done = vckpt("verify", store, check=False, timeout=60)
    assert done.returncode == 3 and entry.name in done.stdout
    assert vckpt("gc", store, "--grace", "0", check=False).returncode in (1, 3)
    vckpt("cat", store, "b/0/model.safetensors", text=False)


@pytest.mark.parametrize("what,said", [("directory", "it is a directory, where a file should be"),
                                       ("link", "it is a link, where a file should be")])
@pytest.mark.parametrize("which", ["packs", "manifests"])
def test_what_is_no_file_is_damage(vckpt, damaged, tmp_path, which, what, said):
    """Not an error that a directory gives who opens it."""
    store, _ = damaged
    path = next(p for p in content(store) if which in p.parts and p.name.endswith("" if which == "manifests"
                                                                                  else "-blobs.pack"))
    path.rename(tmp_path / "aside")
    path.mkdir() if what == "directory" else path.symlink_to(tmp_path / "aside")
    done = [vckpt("cat", store, f"{target}/config.json", check=False) for target in ("a/0", "a/1", "b/0")]
    wrong = [one.stderr for one in done if said in one.stderr and path.name in one.stderr]
    assert wrong and all(one.returncode != 0 for one in done if said in one.stderr), done
    found = vckpt("verify", store, check=False)
    assert found.returncode == 3 and path.name in found.stdout + found.stderr, found
