# SPDX-License-Identifier: Apache-2.0
"""Notes of damage: what verify found rotten is stored anew by the next save, and forgotten when it is right again."""
import os
import pathlib
import shutil
import stat
import subprocess
import tempfile

import numpy
import pytest
from safetensors.numpy import load_file, save_file


@pytest.fixture
def frozen(vckpt, store, tmp_path):
    """Two steps; `frozen` is the same in both, so step 1 refers to step 0's pack. Returns (store, source)."""
    rng = numpy.random.default_rng(5)
    tensors = {"frozen": rng.integers(0, 1 << 16, (700, 700), dtype="u2"),
               "w": rng.integers(0, 1 << 16, (300, 300), dtype="u2")}
    source = tmp_path / "model.safetensors"
    for step in range(2):
        tensors["w"] = tensors["w"] + 1
        save_file(tensors, source)
        vckpt("import", store, "run", source, "-q")
    tensors["w"] = tensors["w"] + 1
    save_file(tensors, source)
    assert vckpt.json("verify", store)["faults"] == 0 and not (store / "damaged").exists()
    return store, source


def big_pack(store):
    return max(store.rglob("*-model.pack"), key=lambda p: p.stat().st_size)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def notes(store):
    return sorted(p.name for p in (store / "damaged").glob("*")) if (store / "damaged").exists() else []


@pytest.mark.parametrize("noted", [True, False])
def test_a_rotten_tensor_is_stored_anew(vckpt, frozen, tmp_path, noted):
    store, source = frozen
    pack = big_pack(store)
    flip(pack, pack.stat().st_size // 2)
    assert vckpt("verify", store, *([] if noted else ["--no-notes"]), check=False).returncode == 3
    assert notes(store) == ([pack.stem] if noted else [])
    vckpt("import", store, "run", source, "-q")
    done = vckpt("verify", store, "run/2", check=False)
    if not noted:
        assert done.returncode == 3          # as it was: the new step refers to what is rotten
        return
    assert done.returncode == 0, done.stdout
    vckpt("export", store, "run/2", tmp_path / "out")
    want, have = load_file(source), load_file(tmp_path / "out" / "model.safetensors")
    assert all((want[k] == have[k]).all() for k in want)
    new = vckpt.json("import", store, "run", source)
    assert new["piece_bytes_new"] == 0       # and the save after that shares the good copy


def test_only_what_is_noted_is_stored_anew(vckpt, frozen):
    store, source = frozen
    pack = big_pack(store)
    flip(pack, 4096 + 10)
    vckpt("verify", store, check=False)
    new = vckpt.json("import", store, "run", source)["piece_bytes_new"]
    assert 0 < new < pack.stat().st_size * 3 // 4, new


def test_a_bad_footer_notes_no_object(vckpt, frozen):
    store, source = frozen
    pack = big_pack(store)
    flip(pack, pack.stat().st_size - 200)
    found = vckpt.json("verify", store, check=False)
    assert found["faults"] == 1 and all("tensor" not in d for d in found["damage"]), found
    assert notes(store) == [pack.stem]
    assert vckpt.json("import", store, "run", source)["piece_bytes_new"] < pack.stat().st_size // 2


def test_a_note_goes_with_the_damage(vckpt, frozen):
    store, _ = frozen
    pack = big_pack(store)
    flip(pack, 5000)
    vckpt("verify", store, check=False)
    before = (store / "damaged" / pack.stem).read_bytes()
    vckpt("verify", store, check=False)
    assert (store / "damaged" / pack.stem).read_bytes() == before
    flip(pack, 5000)
    assert vckpt.json("verify", store)["faults"] == 0
    assert notes(store) == []


def test_verify_of_a_step_adds_and_never_forgets(vckpt, frozen):
    store, _ = frozen
    pack = big_pack(store)
    small = min(store.rglob("*-model.pack"), key=lambda p: p.stat().st_size)
    flip(pack, 5000)
    vckpt("verify", store, "run/0", check=False)
    assert notes(store) == [pack.stem]
    flip(pack, 5000)
    flip(small, 5000)
    vckpt("verify", store, "run/1", check=False)
    assert notes(store) == sorted([pack.stem, small.stem])


def test_a_missing_pack_and_the_collector(vckpt, frozen):
    store, source = frozen
    pack = big_pack(store)
    flip(pack, 5000)
    vckpt("verify", store, check=False)
    for step in (0, 1):
        vckpt("rm", store, f"run/{step}")
    vckpt("gc", store, "--grace", "0")
    assert not pack.exists() and notes(store) == []
    vckpt("import", store, "run", source, "-q")
    assert vckpt.json("verify", store)["faults"] == 0


@pytest.mark.parametrize("how", ["flipped", "empty", "of another pack"])
def test_a_note_that_cannot_be_read_names_its_whole_pack(vckpt, frozen, how):
    store, source = frozen
    pack = big_pack(store)
    flip(pack, 5000)
    vckpt("verify", store, check=False)
    flip(pack, 5000)
    note = store / "damaged" / pack.stem
    if how == "of another pack":
        note.rename(note.with_name(min(store.rglob("*-model.pack"), key=lambda p: p.stat().st_size).stem))
        note = store / "damaged" / notes(store)[0]
    else:
        note.write_bytes(b"" if how == "empty" else note.read_bytes()[:-1] + b"\x55")
    assert vckpt.json("import", store, "run", source)["piece_bytes_new"] > 0
    vckpt("verify", store, check=False)
    assert notes(store) == []


def test_foreign_files_beside_notes_do_no_harm(vckpt, frozen):
    store, source = frozen
    (store / "damaged").mkdir()
    (store / "damaged" / "x").write_text("x")
    (store / "damaged" / "0123456789abcdef-0-0-model").symlink_to("/etc/passwd")
    found = {d["file"] for d in vckpt.json("verify", store, check=False)["damage"]}
    assert found == {"damaged/x", "damaged/0123456789abcdef-0-0-model"}
    assert "damaged/x" in vckpt("gc", store, "-v").stdout
    vckpt("import", store, "run", source, "-q")


def test_a_store_that_is_not_ours_to_write_to(vckpt, frozen):
    store, _ = frozen
    pack = big_pack(store)
    flip(pack, 5000)
    if os.geteuid() == 0:
        done = vckpt("verify", store, "--no-notes", check=False)
    else:
        mode = stat.S_IMODE(store.stat().st_mode)
        store.chmod(0o555)
        done = vckpt("verify", store, check=False)
        store.chmod(mode)
    assert done.returncode == 3 and notes(store) == []


def test_a_pack_that_this_user_may_not_read_is_not_noted(vckpt, frozen):
    """Others can read it, and their saves go on to share what it has. A note that is there already stays."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv, to become another user")
    place = pathlib.Path(tempfile.mkdtemp())                    # which the other user may enter
    os.chmod(place, 0o755)
    store = place / "store"
    shutil.copytree(frozen[0], store)
    subprocess.run(["chmod", "-R", "a+rwX", store], check=True)
    pack = big_pack(store)
    os.chmod(pack, 0o600)
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", vckpt.path, "verify", store]
    for target in [], ["run/0"]:
        done = subprocess.run([*other, *target], capture_output=True, text=True, timeout=60)
        assert "Permission denied" in done.stdout and done.returncode == 3, done
        assert notes(store) == []
    flip(pack, pack.stat().st_size // 2)
    vckpt("verify", store, check=False)
    subprocess.run(other, capture_output=True, timeout=60)
    assert notes(store) == [pack.stem]
    shutil.rmtree(place)
