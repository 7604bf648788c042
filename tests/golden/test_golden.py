# SPDX-License-Identifier: Apache-2.0
"""Every store that any version since 1 wrote is read: the steps listed, every file equal, everything verified."""
import errno
import hashlib
import json
import pathlib
import shutil

import pytest

import vckpt as package

HERE = pathlib.Path(__file__).parent
PRESENT = "v2"            # with any words that follow: what is written, too
VERSIONS = sorted(p.name for p in HERE.glob("v*") if p.is_dir())


def unpack(version, where):
    shutil.unpack_archive(HERE / version / "store.tar.xz", where)
    return where / "store"


def test_there_are_golden_stores():
    assert "v1" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_store_is_read(vckpt, tmp_path, version):
    expected = json.loads((HERE / version / "expected.json").read_text())
    store = unpack(version, tmp_path)
    listed = {f"{r['run']}/{s['step']}": s for r in vckpt.json("ls", store)["runs"]
              for s in vckpt.json("ls", store, r["run"])["steps"]}
    assert set(listed) == set(expected)
    for i, (name, want) in enumerate(expected.items()):
        assert {k: listed[name][k] for k in ["manifest", "time"]} == {k: want[k] for k in ["manifest", "time"]}
        with package.open(store / name) as step:
            assert step.attributes == want["attributes"]
        if "facts" in want:
            with package.open(store / name) as step:
                assert want["facts"] == {"pinned": step.pinned, "reason": step.pin_reason, "tags": step.tags}
                assert list(step.thinned) == want.get("thinned", [])
        if i % 8 and name.startswith("c/"):
            continue
        out = tmp_path / f"out{i}"
        vckpt("export", store, name, out, "--format", "npy")
        assert json.loads((out / "manifest.json").read_text())["manifest"] == want["manifest"]
        (out / "manifest.json").unlink()        # its text may say more with time
        assert {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*")
                if p.is_file()} == want["files"]
    assert vckpt.json("verify", store)["faults"] == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_blobs_by_name(tmp_path, version):
    """As in the list of all, whether the manifest says which ranks have them or not."""
    store, n = unpack(version, tmp_path), 0
    for name in json.loads((HERE / version / "expected.json").read_text()):
        with package.open(store / name, "numpy") as step:
            for blob in (blobs := step.blobs()):
                n += 1
                assert len(step.blob(blob.name, blob.rank)) == step._blob_bytes(blob.name, blob.rank) == blob.bytes
                assert list(step._blob_ranks(blob.name)) == [b.rank for b in blobs if b.name == blob.name
                                                             and b.rank is not None]
            assert step._blob_bytes("not there", None) is step._blob_bytes("not there", 0) is None
            assert list(step._blob_ranks("not there")) == []
    assert n > 2


def contents(store):
    return {p.relative_to(store): p.read_bytes() for p in store.rglob("*") if p.is_file() and "index" not in p.parts}


@pytest.mark.parametrize("version", [v for v in VERSIONS if not v.startswith(PRESENT)])
def test_a_store_of_an_older_format_is_only_read(vckpt, tmp_path, version):
    """Every writer is refused by one sentence, and what it does not do is told."""
    store, source = unpack(version, tmp_path), tmp_path / "source"
    vckpt("export", store, "b/7", source)
    before = contents(store)
    for command in (["import", store, "a", source], ["rm", store, "a/0"], ["gc", store]):
        done = vckpt(*command, check=False)
        assert done.returncode == 1 and not done.stdout
        assert f"{store}: this store is of format {version[1:]}, " in done.stderr and "vckpt init" in done.stderr, (
            done.stderr)
    assert vckpt("init", store, check=False).returncode == 1
    with pytest.raises(OSError, match=f"this store is of format {version[1:]}, ") as e:
        package.Saver(f"{store}/a", rank=0, world=1)
    assert e.value.errno == errno.EROFS
    with package.Step(f"{store}/b/7") as step:
        assert step.number == 7
    vckpt("gc", store, "--dry-run")
    assert contents(store) == before
    vckpt("init", tmp_path / "new")
    vckpt("export", store, "a/0", tmp_path / "out")
    vckpt("import", tmp_path / "new", "a/0", tmp_path / "out")
    assert vckpt.json("verify", tmp_path / "new")["faults"] == 0


@pytest.mark.parametrize("version", [v for v in VERSIONS if v.startswith(PRESENT)])
def test_a_golden_store_goes_on(vckpt, tmp_path, version):
    """It is not only read: a save, a removal and a collection work in it."""
    store = unpack(version, tmp_path)
    vckpt("export", store, "a/0", tmp_path / "out")
    vckpt("import", store, "a", tmp_path / "out")
    assert vckpt.json("import", store, "a", tmp_path / "out")["piece_bytes_new"] == 0
    vckpt("rm", store, "a/0")
    vckpt("gc", store, "--grace", "0")
    assert vckpt.json("verify", store)["faults"] == 0
