# SPDX-License-Identifier: Apache-2.0
"""vckpt copy: what arrives is what was there, byte for byte, and only what the other store lacked was read."""
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

import storelow
from saverlib import ALONE, Vckpt, ranks

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def api(build):
    return Vckpt(build)


@pytest.fixture
def other(vckpt, tmp_path):
    path = tmp_path / "other"
    vckpt("init", path)
    return path


def tree(vckpt, store, step, out):
    """{path: bytes} of an export; of its manifest.json what a copy keeps."""
    vckpt("export", store, step, out)
    files = {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    for key in "attempt", "manifest":
        del manifest[key]
    del manifest["totals"]["new_bytes"]
    return files | {"manifest.json": manifest}


def same(vckpt, a, b, step, tmp_path, as_step=None):
    """Both stores show the same files, and sums, under every mesh that was saved."""
    one = tree(vckpt, a, step, tmp_path / "tree-a")
    two = tree(vckpt, b, as_step or step, tmp_path / "tree-b")
    two["manifest.json"]["run"] = one["manifest.json"]["run"]
    assert one == two
    for folder in "tree-a", "tree-b":
        for path in sorted((tmp_path / folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / folder).rmdir()
    vckpt("verify", b)


def fill(rng, scale=1.0):
    normal = np.random.default_rng(rng.getrandbits(64)).standard_normal
    return {"m.layer": (normal((400, 300)) * scale).astype("f4"), "m.small": np.arange(7, dtype="i4"),
            "m.scalar": np.full((), scale), "m.none": np.zeros((0, 3), "f2"),
            "m.zeros": np.zeros(100000, "f4")}


def test_an_import_arrives_as_it_is(vckpt, store, other, tmp_path, rng):
    source = tmp_path / "src"
    (source / "sub").mkdir(parents=True)
    save_file(fill(rng), source / "model-00001-of-00002.safetensors", metadata={"format": "pt", "k": "v"})
    save_file({"b": np.ones(3000, "f8")}, source / "model-00002-of-00002.safetensors")
    (source / "config.json").write_text('{"a": 1}')
    (source / "sub" / "empty").write_bytes(b"")
    (source / "sub" / "long").write_bytes(rng.randbytes(3 << 20))
    vckpt("import", store, "run/7", source, "--set", "loss=2.5", "--set", "name=\u00fc")
    done = vckpt.json("copy", store, "run/7", "--to", other)
    assert (done["copied"], done["equal"], done["failed"]) == (1, 0, 0)
    same(vckpt, store, other, "run/7", tmp_path)
    assert vckpt.json("info", other, "run/7")["attributes"] == {"loss": "2.5", "name": "\u00fc"}
    again = vckpt.json("copy", store, "run/7", "--to", other)
    assert (again["copied"], again["equal"], again["read_bytes"]) == (0, 1, 0)


def job(api, path, data, world=4, step=0, launch="job"):
    """Ranks on dp=2,tp=2; two stages with layouts of their own; blobs of ranks; a tensor in raw boxes."""
    def one(rank, saver):
        mesh = api.mesh("dp=2,tp=2")
        pair = api.mesh("tp=2", [2, 3] if rank >= 2 else [0, 1])
        half = data["m.layer"].shape[1] // 2
        column = rank % 2
        tensors = {
            "model/layer": (np.ascontiguousarray(data["m.layer"][:, column * half:(column + 1) * half]),
                            {"shape": data["m.layer"].shape, "mesh": mesh, "placements": "R,S(1)"}),
            "model/zeros": (data["m.zeros"], {"mesh": mesh, "placements": "R,R"}),
            f"optimizer/stage{rank // 2}": (np.ascontiguousarray(np.array_split(data["m.layer"], 2)[column]),
                                            {"shape": data["m.layer"].shape, "mesh": pair, "placements": "S(0)"}),
            f"state/of{rank}": (data["m.layer"][rank:rank + 1].copy(), {"flags": ALONE}),
        }
        blobs = [("loader", True, bytes([rank]) * (100 + rank)), ("big", True, bytes([rank]) * (2 << 20))]
        if rank == 0:
            blobs.append(("note.txt", False, b"of all"))
        save = saver.save(tensors, blobs=blobs, step=step, attributes={"loss": "1.5"})
        save.committed()
        save.free()
    out = ranks(api, path, "run", world, one, launch=launch)
    assert out == [None] * world, out


def test_what_ranks_saved_arrives_with_its_meshes(vckpt, api, store, other, tmp_path, rng):
    data = fill(rng)
    job(api, store, data)
    vckpt("copy", store, "--to", other)
    same(vckpt, store, other, "run/0", tmp_path)
    for path in ("mesh/dp=2,tp=2/manifest.json", "mesh/dp=2,tp=2/rank-00003/model.safetensors",
                 "mesh/tp=4/rank-00001/model.safetensors", "ranks/00003/loader"):
        assert vckpt("cat", store, f"run/0/{path}", text=False).stdout == \
            vckpt("cat", other, f"run/0/{path}", text=False).stdout, path
    assert vckpt("verify", "--paranoid", other).returncode == 0


def model(path, tensors, changed=0):
    """Files of 100 tensors of 64 KiB, of which the first few are changed."""
    save_file({f"t{i:03}": tensors[i] + (i < changed) for i in range(len(tensors))}, path)


@pytest.fixture(scope="module")
def made(vckpt, tmp_path_factory):
    """A store with run/0 and run/1, which differ in one of 100 tensors, and run/2, which is as run/0; and its data."""
    folder = tmp_path_factory.mktemp("made")
    tensors = np.random.default_rng(3).standard_normal((100, 128, 128)).astype("f4")
    vckpt("init", folder / "store", "--no-reserve")
    for step in range(3):
        model(folder / "m.safetensors", tensors, step == 1)
        vckpt("import", folder / "store", f"run/{step}", folder / "m.safetensors", "-q")
    return folder / "store", tensors


@pytest.fixture
def steps(made, store):
    shutil.rmtree(store)
    shutil.copytree(made[0], store)
    return made[1]


def packs(store, kind):
    return sorted(store.glob(f"packs/*/*-{kind}.pack"), key=lambda p: -p.stat().st_size)


def spoil(pack, at=4096 + 1000, byte=b"\xa5"):
    """Bytes of its first objects."""
    data = bytearray(pack.read_bytes())
    data[at:at + 4096] = byte * 4096
    pack.write_bytes(data)


def test_what_is_there_is_not_read(vckpt, store, other, steps, tmp_path):
    """Of a step that the other store has but for 1 %, that is read and the records: all else could as well be gone."""
    size = vckpt.json("info", store, "run/1")["bytes"]
    assert vckpt.json("copy", store, "run/0", "--to", other)["read_bytes"] > size * 0.5
    expected = {step: tree(vckpt, store, f"run/{step}", tmp_path / f"want{step}") for step in (1, 2)}
    spoil(packs(store, "model")[0])
    done = vckpt.json("copy", store, "run", "--to", other)
    assert [s["outcome"] for s in done["steps"]] == ["equal", "copied", "copied"]
    records = sum(p.stat().st_size for p in packs(store, "meta")[:1]) + 10000   # of one step, and the list
    assert 0 < done["steps"][1]["read_bytes"] + records <= 0.015 * size and done["steps"][2]["read_bytes"] == 0
    for step, files in expected.items():
        assert tree(vckpt, other, f"run/{step}", tmp_path / f"got{step}") == files
    vckpt("verify", other)


def test_a_base_of_someone_else_is_hashed(vckpt, store, other, steps, tmp_path):
    """Without an index of one's own the other store's bytes are read, not the source's; and where they are not what its
    records say, the source's are."""
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    vckpt("copy", store, "run/0", "--to", other)
    shutil.rmtree(other / "index")
    assert vckpt.json("copy", store, "run/1", "--to", other, env=env)["steps"][0]["pieces_new"] < 10
    shutil.rmtree(other / "index")
    vckpt("rm", other, "run/1")
    spoil(packs(other, "model")[0])
    done = vckpt.json("copy", store, "run/2", "--to", other, env=env)["steps"][0]
    assert done["pieces_new"] > 0
    assert tree(vckpt, store, "run/2", tmp_path / "a") == tree(vckpt, other, "run/2", tmp_path / "b")


def test_a_step_that_differs(vckpt, store, other, steps, tmp_path):
    model(tmp_path / "x.safetensors", steps[:50], 3)
    vckpt("import", other, "run/1", tmp_path / "x.safetensors", "-q")
    done = vckpt("copy", store, "run", "--to", other, check=False)
    assert done.returncode == 1 and "run/1: " in done.stderr and "--replace" in done.stderr
    assert [s["step"] for s in vckpt.json("ls", other, "run")["steps"]] == [0, 1, 2]
    assert vckpt.json("info", other, "run/1")["tensors"] == 50
    vckpt("copy", store, "run/1", "--to", other, "--replace")
    same(vckpt, store, other, "run/1", tmp_path)


def test_an_equal_step_of_another_writer(vckpt, store, other, steps, tmp_path):
    model(tmp_path / "m.safetensors", steps, 1)
    vckpt("import", other, "run/1", tmp_path / "m.safetensors", "-q")
    entry = vckpt.json("info", other, "run/1")["entry"]
    done = vckpt.json("copy", store, "run/1", "--to", other)
    assert (done["equal"], done["read_bytes"]) == (1, 0) and vckpt.json("info", other, "run/1")["entry"] == entry
    assert vckpt.json("copy", store, "run/latest", "--to", other, "--as", "new.name")["copied"] == 1
    same(vckpt, store, other, "run/2", tmp_path, as_step="new.name/2")


def test_damage_ends_a_step_and_no_other(vckpt, store, other, steps, tmp_path):
    pack = packs(store, "model")[0]                             # of run/0, and what others have of it
    model(tmp_path / "y.safetensors", steps * 2)
    vckpt("import", store, "run/3", tmp_path / "y.safetensors", "-q")
    spoil(pack)
    done = vckpt("copy", store, "--to", other, "--json", check=False)
    found = json.loads(done.stdout)
    outcomes = [s["outcome"] for s in found["steps"]]
    assert done.returncode == 3 and sorted(set(outcomes)) == ["copied", "failed"] and outcomes[3] == "copied"
    assert "run/0" in done.stderr and "tensor model/t000" in done.stderr and "pack " in done.stderr
    same(vckpt, store, other, "run/3", tmp_path)
    meta = packs(store, "meta")[0]
    meta.write_bytes(meta.read_bytes()[:-5000])
    assert vckpt("copy", store, "--to", other, check=False).returncode == 3
    vckpt("verify", other)


@pytest.mark.parametrize("words, code, text", [
    (["store", "run/1"], 2, "--to STORE2 is missing"),
    (["store", "run/1", "--to", "nowhere"], 1, "vckpt init nowhere makes a store there"),
    (["store", "run/1", "--to", "."], 1, "vckpt init . makes a store there"),
    (["store", "run/9", "--to", "other"], 1, "run has no step 9"),
    (["store", "none", "--to", "other"], 1, "there is no run none"),
    (["store", "run/1", "--to", "store"], 1, "are the same store"),
    (["store", "run/1", "--to", "other", "--to-tar", "x"], 2, "one of them at once"),
    (["store", "run/1/model", "--to", "other"], 2, "only whole steps"),
    (["store", "run", "x", "--to", "other", "--as", "y"], 2, "--as is for one RUN"),
    (["store", "run", "--to", "other", "--as", "a/b"], 2, "a run's name is"),
    (["store", "run", "--to", "other", "--limit-rate", "5000"], 2, "with a unit"),
    (["store", "run", "--to", "other", "--limit-rate", "3K"], 2, "4K at least"),
    (["store", "run", "--to", "other", "--limit-rate", "99999999999999999G"], 2, "4K at least"),
    (["store", "run", "--to", "other", "--threads", "0"], 2, "--threads"),
])
def test_errors(vckpt, two_steps, tmp_path, monkeypatch, words, code, text):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    vckpt("init", "other")
    done = vckpt("copy", *words, check=False)
    assert done.returncode == code and text in done.stderr and not done.stdout, done
    assert vckpt.json("ls", "other")["runs"] == []


@pytest.mark.parametrize("words", [["copy"], ["sync"], ["sync", "--delete"]])
def test_a_store_that_cp_has_copied(vckpt, two_steps, tmp_path, words):
    """Both go on by themselves, under one id: neither is taken for the other's mirror."""
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    one, two = tmp_path / "store", tmp_path / "two"
    shutil.copytree(one, two)
    vckpt("rm", one, "run/1")
    vckpt("import", two, "run/3", tmp_path / "w.npy")
    vckpt("prune", two, "run", "--keep-last", "2", "-y")
    for a, b, steps in (one, two, [2, 3]), (two, one, [2]):
        done = vckpt(words[0], a, "--to", b, *words[1:], check=False)
        assert done.returncode == 1 and "one is a copy of the other's files" in done.stderr, done
        assert [s["step"] for s in vckpt.json("ls", b, "run")["steps"]] == steps
    for path in one, two:
        vckpt("gc", path, "--grace", "0")
        vckpt("verify", path)


def test_a_rate(vckpt, store, other, tmp_path, rng):
    """The first bytes come at once, others after the time that those before take."""
    save_file({name: np.frombuffer(rng.randbytes(50000), "u1") for name in "abc"}, tmp_path / "m.safetensors")
    vckpt("import", store, "run/0", tmp_path / "m.safetensors")
    begin = time.monotonic()
    vckpt("copy", store, "--to", other, "--limit-rate", "100K")
    assert time.monotonic() - begin > 0.9


def test_two_copies_at_once(vckpt, store, other, steps, tmp_path):
    both = [subprocess.Popen([vckpt.path, "copy", store, "--to", other, "--json"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    for step in range(3):
        assert {json.loads(out)["steps"][step]["entry"] for out, _ in said} == {
            vckpt.json("info", other, f"run/{step}")["entry"]}
        same(vckpt, store, other, f"run/{step}", tmp_path)
    assert vckpt.json("ls", other, "--incoming")["incoming"] == []


def test_a_thinned_step(vckpt, store, other, tmp_path):
    """The copy knows what it has lost, also after another copy, and by way of a tar."""
    source, data = tmp_path / "src", np.random.default_rng(1).standard_normal((3, 50, 50)).astype("f4")
    source.mkdir()
    for step in range(2):
        for i, component in enumerate(["ema", "model", "optimizer"]):
            save_file({"w": data[i] + step}, source / f"{component}.safetensors")
        vckpt("import", store, f"run/{step}", source, "-q")
    for component in "optimizer", "ema":
        vckpt("prune", store, "run", "--thin", component, "--older-than", "0s", "-y", "-q")
    third = tmp_path / "third"
    vckpt("init", third)
    vckpt("copy", store, "run", "--to", other, "-q")
    vckpt("copy", other, "run", "--to-tar", tmp_path / "run.tar", "-q")
    vckpt("copy", third, "--from-tar", tmp_path / "run.tar", "-q")
    for path in store, other, third:
        for component in "optimizer", "ema":
            done = vckpt("cat", path, f"run/0/{component}/w", check=False)
            assert done.returncode == 1 and f"component '{component}' of run/0 was thinned" in done.stderr, done
        vckpt("cat", path, "run/1/optimizer/w", "--raw", text=False)
    same(vckpt, store, third, "run/0", tmp_path)


def shown(vckpt, store, step):
    """manifest.json without what is new in a copy: it has the digests of all tensors and blobs."""
    found = json.loads(vckpt("cat", store, f"{step}/manifest.json").stdout)
    return {k: v for k, v in found.items() if k not in ("attempt", "manifest", "totals")}


@pytest.mark.parametrize("version", ["v1", "v2", "v2-grid-2", "v2-list-2", "v2-list-3"])
def test_stores_of_older_formats(vckpt, other, tmp_path, version, scale):
    """They are read, and what they have keeps its digests; into one of format 1 nothing is copied."""
    shutil.unpack_archive(GOLDEN / version / "store.tar.xz", tmp_path)
    old, names = tmp_path / "store", []
    for run in vckpt.json("ls", old)["runs"]:
        steps = [s["step"] for s in vckpt.json("ls", old, run["run"])["steps"]]
        names += [f"{run['run']}/{step}" for step in steps[-scale(2, len(steps)):]]
    vckpt("copy", old, *names, "--to", other)
    assert names and [shown(vckpt, old, name) for name in names] == [shown(vckpt, other, name) for name in names]
    vckpt("verify", other)
    done = vckpt("copy", other, names[0], "--to", old, "--as", "x", check=False)
    assert (done.returncode, "of format 1" in done.stderr) == ((1, True) if version == "v1" else (0, False)), done
    same(vckpt, old, other, names[0], tmp_path)


@pytest.mark.parametrize("what", ["format", "word"])
@pytest.mark.parametrize("of", ["source", "target"])
@pytest.mark.parametrize("command", ["copy", "sync"])
def test_a_store_of_a_newer_vckpt(vckpt, lib, two_steps, tmp_path, what, of, command):
    """Of a later format, or with a word that this vckpt does not know: nothing of it is changed."""
    source, target = shutil.copytree(two_steps / "store", tmp_path / "from"), tmp_path / "to"
    vckpt("init", target)
    path = (source if of == "source" else target) / "vckpt.store"
    record, buf, last = path.read_bytes(), storelow.Buf(), b"\x12\x06list-4"
    body = record[48:48 + int.from_bytes(record[12:16], "little")]
    body = b"\x08\x03" + body[2:] if what == "format" else body.replace(last, last + b"\x12\x06word-9")
    assert storelow.bind(lib).store_record_encode(1, None, body, len(body), ctypes.byref(buf)) == 0
    path.write_bytes(ctypes.string_at(buf.data, buf.len))
    lib.base_buf_release(ctypes.byref(buf))
    before = {p: p.read_bytes() for p in target.rglob("*") if p.is_file()}
    done = vckpt(command, source, "--to", target, check=False)
    assert done.returncode == 1 and str(path.parent) in done.stderr, done
    assert ("newer" if what == "format" else "word-9") in done.stderr, done
    assert before == {p: p.read_bytes() for p in target.rglob("*") if p.is_file()}


def test_a_source_on_a_read_only_medium(vckpt, two_steps, other, tmp_path):
    source = shutil.copytree(two_steps / "store", tmp_path / "from")
    mount = ["unshare", "--mount", "sh", "-c",
             'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"', source]
    if os.geteuid() != 0 or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    for words in ["copy", "--to", other], ["sync", "--to", other], ["copy", "--to-tar", tmp_path / "a.tar"]:
        done = subprocess.run([*mount, vckpt.path, words[0], source, *words[1:], "-q"], capture_output=True,
                              text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done
    vckpt("init", tmp_path / "third")
    vckpt("copy", "--from-tar", tmp_path / "a.tar", tmp_path / "third")
    for step in vckpt.json("ls", source, "run")["steps"]:
        same(vckpt, source, other, f"run/{step['step']}", tmp_path)
        same(vckpt, source, tmp_path / "third", f"run/{step['step']}", tmp_path)
