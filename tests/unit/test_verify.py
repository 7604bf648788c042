# SPDX-License-Identifier: Apache-2.0
"""What verify sees beyond single files: lists whose snapshots lie, packs that are not what manifests say."""
import ctypes as c
import json
import struct

import pytest

from protolib import Entry
from storelib import Buf


@pytest.fixture
def long_run(vckpt, store, tmp_path):
    """A run whose list has a snapshot at 64."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}).encode()
    source = tmp_path / "s.safetensors"
    source.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(100)))
    for step in range(66):
        vckpt("import", store, "run", source, "--no-index", "-q", "--step", step)
    return store


def test_a_snapshot_that_lies(vckpt, lib, long_run):
    assert vckpt.json("verify", long_run)["faults"] == 0
    path = long_run / "runs/run/000000000064"
    entry, body, file = Entry(kind=5, time_ns=1, host=b"h"), Buf(), Buf()
    assert lib.proto_entry_encode(c.byref(entry), c.byref(body)) == 0
    copy = path.read_bytes()
    store_id = (long_run / "vckpt.store").read_bytes()[48:].split(b"\x1a\x10", 1)[1][:16]     # field 3: 16 bytes
    assert lib.store_record_encode(2, store_id, c.c_void_p(body.data), c.c_size_t(body.len), c.byref(file)) == 0
    path.write_bytes(c.string_at(file.data, file.len))
    assert len(vckpt.json("ls", long_run, "run")["steps"]) == 2
    damage = vckpt.json("verify", long_run, check=False)["damage"]
    assert any(d["file"] == "runs/run/000000000064" and "snapshot" in d["what"] for d in damage), damage
    path.write_bytes(copy)
    assert vckpt.json("verify", long_run)["faults"] == 0


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
