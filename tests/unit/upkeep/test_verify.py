# SPDX-License-Identifier: Apache-2.0
"""What verify sees beyond single files: lists whose snapshots lie, packs that are not what manifests say."""
import ctypes as c
import hashlib
import json
import shutil
import struct

import numpy
import pytest
from safetensors.numpy import save_file

from forgelib import Forge, Message
from protolib import Entry
from storelib import Buf, alone
from storelow import Digest


@pytest.fixture(scope="module")
def made(vckpt, tmp_path_factory):
    """The store of long_run, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    vckpt("init", folder / "store")
    header = json.dumps({"w": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}).encode()
    source = folder / "s.safetensors"
    source.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(100)))
    for step in range(66):
        vckpt("import", folder / "store", "run", source, "--no-index", "-q", "--step", step)
    return folder / "store"


@pytest.fixture
def long_run(made, tmp_path):
    """A run whose list has a snapshot at 64."""
    return shutil.copytree(made, tmp_path / "store")


def test_a_snapshot_that_lies(vckpt, lib, long_run):
    assert vckpt.json("verify", long_run)["faults"] == 0
    path = long_run / "runs/run/000000000064"
    last = (long_run / "runs/run/000000000063").read_bytes()
    before = hashlib.sha256(last[48:48 + int.from_bytes(last[12:16], "little")]).digest()
    entry, body, file = Entry(kind=5, time_ns=1, host=b"h", run=b"run", number=64,
                              before=Digest((c.c_uint8 * 32)(*before))), Buf(), Buf()
    alone(entry)
    assert lib.proto_entry_encode(c.byref(entry), c.byref(body)) == 0
    copy = path.read_bytes()
    store_id = (long_run / "vckpt.store").read_bytes()[48:].split(b"\x1a\x10", 1)[1][:16]     # field 3: 16 bytes
    assert lib.store_record_encode(2, store_id, c.c_void_p(body.data), c.c_size_t(body.len), c.byref(file)) == 0
    path.write_bytes(c.string_at(file.data, file.len))
    assert len(vckpt.json("ls", long_run, "run")["steps"]) == 1    # entry 65 was written after another one
    damage = vckpt.json("verify", long_run, check=False)["damage"]
    assert ([d["file"] for d in damage] == ["runs/run/000000000065"] and
            "entry 64 as that entry is here" in damage[0]["what"]), damage
    tail = {p: p.read_bytes() for p in (long_run / "runs/run/000000000065", long_run / "runs/run/000000000066")}
    for p in tail:
        p.unlink()
    damage = vckpt.json("verify", long_run, check=False)["damage"]
    assert any(d["file"] == "runs/run/000000000064" and "snapshot" in d["what"] for d in damage), damage
    path.write_bytes(copy)
    for p, data in tail.items():
        p.write_bytes(data)
    assert vckpt.json("verify", long_run)["faults"] == 0


@pytest.mark.parametrize("at", [16, 64, 72, 80, 96])    # time, tensors, bytes, new bytes, count of the attempt
def test_a_snapshot_that_says_other_things_of_a_step(vckpt, lib, long_run, at):
    """The same steps, with the same manifests: what else their entries say counts, too."""
    path, forge = long_run / "runs/run/000000000064", Forge(lib, long_run, "run")
    for n in (65, 66):
        (long_run / f"runs/run/{n:012}").unlink()
    snapshot = Message(forge.record_body(path, 2, forge.id))
    live = Message(snapshot.get(10))
    rows = bytearray(live.get(1))
    rows[5 * 112 + at] ^= 1
    live.set(1, bytes(rows))
    snapshot.set(10, live.encode())
    forge.put_record(path, 2, snapshot.encode())
    damage = vckpt.json("verify", long_run, check=False)["damage"]
    assert any(d["file"] == "runs/run/000000000064" and "other steps than readers from the start" in d["what"]
               for d in damage), damage


def test_a_pack_that_is_longer_than_its_manifest_says(vckpt, long_run):
    pack = next((long_run / "packs").rglob("*-meta.pack"))
    data = pack.read_bytes()
    pack.write_bytes(data + bytes(64))
    done = vckpt("verify", long_run, check=False)
    assert done.returncode == 3 and pack.name in done.stdout
    pack.unlink()
    done = vckpt("verify", long_run, check=False)
    assert done.returncode == 3 and "missing" in done.stdout and "run/step-" in done.stdout


def test_foreign_files_are_told(vckpt, store):
    (store / "packs" / "zz").mkdir(parents=True)
    (store / "packs" / "zz" / "x.pack").write_bytes(b"x")
    (store / "notes.txt").write_text("x")
    (store / "link").symlink_to("/etc/passwd")
    damage = {d["file"] for d in vckpt.json("verify", store, check=False)["damage"]}
    assert damage == {"packs/zz/x.pack", "notes.txt", "link"}


# ---- objects that are hashed together ----

def objects_of(pack):
    """(digest, offset, checks, bytes) of the raw objects that the footer lists."""
    data = pack.read_bytes()
    at, length = struct.unpack_from("<QQ", data, len(data) - 120)
    return [(d, offset, checks, raw) for d, offset, checks, raw, _, codec, *_ in
            struct.iter_unpack("<32s4QHB13s", data[at:at + length]) if codec == 0]


def replace_byte(lib, pack, one, at):
    """Another byte, with which its block has the right check: that it is another one is known by the digest alone."""
    digest, offset, checks, raw = one
    data = bytearray(pack.read_bytes())
    data[offset + at] ^= 1
    block = at // 16384
    stored = bytes(data[offset + block * 16384:offset + min(raw, (block + 1) * 16384)])
    lib.base_block_check.restype = c.c_uint64
    check = lib.base_block_check(c.byref(Digest.from_buffer_copy(digest)), c.c_uint64(block), stored,
                                 c.c_size_t(len(stored)))
    struct.pack_into("<Q", data, checks + 8 * block, check)
    pack.chmod(0o644)
    pack.write_bytes(data)


@pytest.mark.parametrize("target", [[], ["run/0"]], ids=["store", "step"])
def test_each_object_by_its_own_digest(vckpt, lib, store, tmp_path, rng, target):
    """However many are hashed at once, and of whatever lengths: those are named that are damaged, and no others."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = [1, 16384, 1 << 20, 32768, 100, 16385, 300_000] + [rng.randrange(1, 60_000) for _ in range(130)]
    save_file({f"t{i}": numpy.frombuffer(rng.randbytes(n), "u1") for i, n in enumerate(sizes)},
              folder / "model.safetensors")
    (folder / "tokenizer.bin").write_bytes(rng.randbytes(3_500_000))
    vckpt("import", store, "run", folder, "-q", "--no-index")
    assert vckpt.json("verify", store, *target)["faults"] == 0
    bad = {}
    for pack in [*store.rglob("*-model.pack"), *store.rglob("*-blobs.pack")]:
        objects = objects_of(pack)
        for one in {objects[0], objects[-1], *rng.sample(objects, min(9, len(objects)))}:
            replace_byte(lib, pack, one, rng.randrange(one[3]))
            bad[pack.name, one[1]] = one
    assert len(bad) > 9 and any(one[3] > 1 << 20 for one in bad.values())
    damage = vckpt.json("verify", store, *target, "--no-notes", check=False)["damage"]
    assert {(d["file"].split("/")[-1], d["offset"]) for d in damage} == set(bad), (damage, bad)
    assert all("digest" in d["what"] for d in damage), damage


# ---- whom a fault touches ----

@pytest.fixture
def two_steps(vckpt, store, tmp_path):
    """Two steps that share a tensor of several pieces, and one tensor each of their own."""
    rng = numpy.random.default_rng(3)
    shared = rng.integers(0, 1 << 16, (2000, 1500), dtype="u2")
    for step in range(2):
        save_file({"shared": shared, "o" * 600 + "\u00fc" * 300: rng.integers(0, 1 << 16, (300, 300), dtype="u2")},
                  tmp_path / "s.safetensors")
        vckpt("import", store, "run", tmp_path / "s.safetensors", "-q")
    assert vckpt.json("verify", store)["faults"] == 0
    return store


def model_packs(store):
    return sorted(store.rglob("*-model.pack"), key=lambda p: -p.stat().st_size)


def touched(damage):
    return [(d["file"], d["offset"], d.get("step"), d.get("tensor")) for d in damage]


def test_one_line_for_each_fault_step_and_tensor(vckpt, two_steps):
    pack = model_packs(two_steps)[0]
    pack.unlink()
    for target in ([], ["run"], ["run/0"]):
        found = vckpt.json("verify", two_steps, *target, check=False)
        lines = touched(found["damage"])
        assert len(lines) == len(set(lines)), lines
        assert found["faults"] == 1
        told = {(step, tensor and tensor[:6]) for _, _, step, tensor in lines}
        # the second step's own tensor lies in its own pack
        assert told == {(0, None), (1, None), (0, "shared"), (1, "shared"), (0, "oooooo")}, told
    assert {"o" * 600 + "\u00fc" * 300, "shared"} == {d["tensor"] for d in found["damage"] if "tensor" in d}


def test_every_step_is_named_when_one_is_verified(vckpt, two_steps):
    pack = model_packs(two_steps)[0]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    for target in ([], ["run/0"], ["run/1"]):
        damage = vckpt.json("verify", two_steps, *target, check=False)["damage"]
        assert {(d["step"], d["tensor"]) for d in damage} == {(0, "shared"), (1, "shared")}, (target, damage)


def test_an_entry_that_is_missing(vckpt, long_run):
    (long_run / "runs/run/000000000030").unlink()
    done = vckpt("verify", long_run, check=False)
    assert done.returncode == 3 and "000000000030" in done.stdout
    for n in range(31, 34):
        (long_run / "runs/run" / f"{n:012}").unlink()
    done = vckpt("verify", long_run, check=False)
    assert done.returncode == 3 and "000000000030" in done.stdout
