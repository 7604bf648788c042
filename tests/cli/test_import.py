# SPDX-License-Identifier: Apache-2.0
"""vckpt import: what it takes, what it leaves out, what it refuses; and that everything comes back equal."""
import fcntl
import io
import json
import os
import pathlib
import random
import resource
import signal
import struct
import subprocess
import time

import numpy
import pytest
from safetensors.numpy import load_file, save_file


def tensors(seed, names=("a", "b.c", "d/e"), shape=(40, 30)):
    rng = numpy.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype("f4") for name in names}


def blob_names(vckpt, store, target):
    return {b["name"] for b in vckpt.json("ls", store, target)["blobs"]}


def tensor_names(vckpt, store, target):
    return {t["name"] for t in vckpt.json("ls", store, target)["tensors"]}


def cat(vckpt, store, path, *more):
    return vckpt("cat", store, path, *more, text=False).stdout


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    return path


def test_one_file_comes_back_byte_for_byte(vckpt, store, source):
    save_file(tensors(1), source / "model.safetensors", metadata={"format": "np", "note": "ä"})
    vckpt("import", store, "run", source / "model.safetensors")
    assert cat(vckpt, store, "run/0/model.safetensors") == (source / "model.safetensors").read_bytes()
    assert numpy.array_equal(numpy.load(io.BytesIO(cat(vckpt, store, "run/latest/model/b.c"))), tensors(1)["b.c"])
    assert cat(vckpt, store, "run/0/model/d%2Fe.npy", "--raw") == tensors(1)["d/e"].tobytes()


def test_directory_with_a_single_model_file(vckpt, store, source):
    save_file(tensors(1), source / "model.safetensors")
    save_file(tensors(2, ["other"]), source / "adapter.safetensors")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / ".gitattributes").write_text("x")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    (source / ".hidden").write_text("h")
    (source / "100%25.txt").write_text("p")
    vckpt("import", store, "run", source)
    assert tensor_names(vckpt, store, "run/0/model") == set(tensors(1))
    assert tensor_names(vckpt, store, "run/0/adapter") == {"other"}
    assert blob_names(vckpt, store, "run/0") == {"1_Pooling/config.json", ".gitattributes", ".hidden", "100%.txt"}
    assert cat(vckpt, store, "run/0/adapter.safetensors") == (source / "adapter.safetensors").read_bytes()


def test_directory_with_an_index(vckpt, store, source):
    parts = [tensors(i, [f"t{i}"]) for i in range(3)]
    for i, part in enumerate(parts):
        save_file(part, source / f"model-{i}.safetensors", metadata={"format": "pt", f"k{i}": str(i)})
    save_file(tensors(9, ["stray"]), source / "stray.safetensors")
    index = {"metadata": {}, "weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(3)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    vckpt("import", store, "run", source)
    assert tensor_names(vckpt, store, "run/0/model") == {"t0", "t1", "t2"}
    assert tensor_names(vckpt, store, "run/0/stray") == {"stray"}
    assert blob_names(vckpt, store, "run/0") == {"model.safetensors.index.json"}
    whole = source / "whole"
    whole.write_bytes(cat(vckpt, store, "run/0/mesh/all=1/rank-0/model.safetensors"))
    loaded = load_file(whole)
    assert all(numpy.array_equal(loaded[f"t{i}"], parts[i][f"t{i}"]) for i in range(3))


@pytest.mark.parametrize("weight_map, sentence", [
    ({"t0": "../outside.safetensors"}, "t0"), ({"t0": "/etc/passwd"}, "t0"), ({"t0": 3}, "t0"),
    ({"gone": "model-0.safetensors"}, "gone"), ({"t0": "missing.safetensors"}, "t0")])
def test_an_index_that_lies(vckpt, store, source, weight_map, sentence):
    save_file(tensors(0, ["t0"]), source / "model-0.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_directory_without_model_file_takes_all(vckpt, store, source):
    for i in range(2):
        save_file(tensors(i, [f"t{i}"]), source / f"x{i}.safetensors")
    vckpt("import", store, "run", source)
    assert tensor_names(vckpt, store, "run/0/model") == {"t0", "t1"}


def test_links(vckpt, store, source, tmp_path):
    """Inside: followed, by whatever chain. To nothing, to a directory, round in a circle, to a device, and a pipe: left
    out by name."""
    (source / "below").mkdir()
    save_file(tensors(1), source / "below" / "weights")
    (source / "hop").symlink_to(source / "below" / "weights")
    (source / "model.safetensors").symlink_to("hop")
    for name, target in {"gone": tmp_path / "nowhere", "dir": tmp_path, "inside": "below", "loop": "pool",
                         "pool": "loop", "zero": "/dev/zero"}.items():
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe")
    done = vckpt("import", store, "run", source)
    left = [line for line in done.stderr.splitlines() if "left out" in line]
    assert sorted(line.split(f"{source}/")[1].split(":")[0] for line in left) == [
        "dir", "gone", "inside", "loop", "pipe", "pool", "zero"] and len(left) == len(done.stderr.splitlines())
    assert tensor_names(vckpt, store, "run/0/model") == set(tensors(1))
    assert blob_names(vckpt, store, "run/0") == {"below/weights", "hop"}


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "manifest.json", "config.json",
                                  "sub/tokenizer.json", "shard-00000-model-00001-of-00001.safetensors", ".metadata",
                                  "x.bin"])
def test_a_link_out_of_the_source_is_refused(vckpt, store, source, tmp_path, name):
    """Whatever it would be taken for, and by a chain whose first link stays inside."""
    (source / "sub").mkdir()
    save_file(tensors(1), tmp_path / "secret")
    (source / "hop").symlink_to("../secret")
    for target in ["../" * name.count("/") + "hop", tmp_path / "secret"]:
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(target)
        done = vckpt("import", store, "run", source, check=False)
        assert done.returncode == 1 and "leads out of the directory" in done.stderr and "--follow" in done.stderr
        assert str(tmp_path / "secret") in done.stderr and len(done.stderr.splitlines()) == 1
        assert f"{source}/{name}" in done.stderr or f"{source}/hop" in done.stderr
        (source / "hop").unlink(missing_ok=True)
    assert vckpt.json("ls", store)["runs"] == []


def test_links_out_of_the_source_on_demand(vckpt, store, source, tmp_path):
    save_file(tensors(1), tmp_path / "weights")
    (source / "model.safetensors").symlink_to(tmp_path / "weights")
    (source / "config.json").symlink_to("/etc/hostname")
    vckpt("import", store, "run", "--follow", source)
    assert tensor_names(vckpt, store, "run/0/model") == set(tensors(1))
    assert blob_names(vckpt, store, "run/0") == {"config.json"}
    vckpt("import", store, "file", source / "model.safetensors")    # which the user names: no need to ask
    link = tmp_path / "link"
    link.symlink_to(source)
    assert vckpt("import", store, "linked", link, check=False).returncode == 1


@pytest.mark.parametrize("through", ["", "a link to it"])
def test_a_snapshot_of_a_hugging_face_cache(vckpt, store, tmp_path, through):
    """Its files are links to blobs of the same repository; to those of another one they lead out."""
    repository = tmp_path / "hub/models--you--tiny"
    snapshot = repository / "snapshots/0123abcd"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir(parents=True)
    save_file(tensors(1), repository / "blobs/aa")
    (repository / "blobs/bb").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
    (snapshot / "1_Pooling/config.json").symlink_to("../../../blobs/bb")
    source = tmp_path / "link" if through else snapshot
    if through:
        source.symlink_to(snapshot)
    vckpt("import", store, "run", source)
    assert tensor_names(vckpt, store, "run/0/model") == set(tensors(1))
    assert blob_names(vckpt, store, "run/0") == {"1_Pooling/config.json"}
    other = tmp_path / "hub/models--you--tiny2/blobs"
    other.mkdir(parents=True)
    (other / "cc").write_text("theirs")
    (snapshot / "config.json").symlink_to("../../../models--you--tiny2/blobs/cc")
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and "snapshots/0123abcd/config.json" in done.stderr.replace(
        str(source), str(snapshot)) and str(other / "cc") in done.stderr


def test_same_tensor_twice(vckpt, store, source):
    save_file(tensors(1, ["x", "y"]), source / "a.safetensors")
    save_file(tensors(1, ["x"]), source / "b.safetensors")
    vckpt("import", store, "run", source)
    assert tensor_names(vckpt, store, "run/0/model") == {"x", "y"}
    save_file(tensors(2, ["x"]), source / "b.safetensors")
    done = vckpt("import", store, "run", source, check=False)
    assert (done.returncode == 1 and "tensor x" in done.stderr and "a.safetensors" in done.stderr and
            "b.safetensors" in done.stderr)


def test_components_and_npy(vckpt, store, source):
    save_file(tensors(1), source / "m.safetensors")
    numpy.save(source / "exp%2Favg.npy", tensors(3)["a"])
    numpy.save(source / "step.npy", numpy.int64(7))
    vckpt("import", store, "run/5", source / "m.safetensors", "--component", "optimizer", source / "exp%2Favg.npy",
          source / "step.npy")
    listed = {c["component"]: c["tensors"] for c in vckpt.json("ls", store, "run/5")["components"]}
    assert listed == {"model": 3, "optimizer": 2}
    assert tensor_names(vckpt, store, "run/5/optimizer") == {"exp/avg", "step"}
    assert numpy.load(io.BytesIO(cat(vckpt, store, "run/5/optimizer/step"))) == 7
    for bad in ["ranks", "x.safetensors", "a/b", ".x", "x.npy", ""]:
        assert vckpt("import", store, "run", "--component", bad, source / "m.safetensors", check=False).returncode == 2


def test_pickles(vckpt, store, source):
    save_file(tensors(1), source / "model.safetensors")
    (source / "training_args.bin").write_bytes(b"PK\3\4junk")
    (source / "old.pt").write_bytes(b"\x80\x02junk")
    (source / "vocab.bin").write_bytes(b"plain bytes")
    done = vckpt("import", store, "run", source)
    assert "training_args.bin" in done.stderr and "old.pt" in done.stderr and "vocab" not in done.stderr
    assert blob_names(vckpt, store, "run/0") == {"vocab.bin"}
    left = vckpt.json("import", store, "run", source)["pickles_left_out"]
    assert {pathlib.Path(p).name for p in left} == {"training_args.bin", "old.pt"}
    vckpt("import", store, "run", source, "--keep-pickles")
    assert blob_names(vckpt, store, "run/2") == {"vocab.bin", "training_args.bin", "old.pt"}
    (source / "model.safetensors").unlink()
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and "pickle" in done.stderr and "vckpt.save(" in done.stderr


def test_steps(vckpt, store, source):
    save_file(tensors(1), source / "m.safetensors")
    m = source / "m.safetensors"
    top = 2**63 - 1
    assert vckpt.json("import", store, "r", m)["step"] == 0
    assert vckpt.json("import", store, "r/7", m)["step"] == 7
    assert vckpt.json("import", store, "r", m)["step"] == 8
    assert vckpt.json("import", store, "r", m, "--step", 3)["step"] == 3
    assert vckpt.json("ls", store, "r/latest")["step"] == 8
    done = vckpt("import", store, "r/7", m, check=False)
    assert done.returncode == 1 and "7" in done.stderr and "replace" in done.stderr
    save_file(tensors(2), m)
    assert vckpt.json("import", store, "r/7", m, "--replace")["step"] == 7
    assert cat(vckpt, store, "r/7/model/a", "--raw") == tensors(2)["a"].tobytes()
    assert cat(vckpt, store, "r/3/model/a", "--raw") == tensors(1)["a"].tobytes()
    assert vckpt.json("import", store, "s", m, "--step", top)["step"] == top
    for bad in ["r/x", "r/-1", f"r/{2**63}", "r/" + "9" * 40, "../r", ".r", "r r", "r/1/model", "a" * 129]:
        assert vckpt("import", store, bad, m, check=False).returncode == 2, bad
    assert [s["step"] for s in vckpt.json("ls", store, "r")["steps"]] == [0, 3, 7, 8]
    vckpt("verify", store)


def test_attributes(vckpt, store, source):
    save_file(tensors(1), source / "m.safetensors")
    vckpt("import", store, "r", source / "m.safetensors", "--set", "loss=2.31", "--set", "note=a=b ä", "--set",
          "empty=")
    assert vckpt.json("ls", store, "r")["steps"][0]["attributes"] == {"loss": "2.31", "note": "a=b ä", "empty": ""}
    assert vckpt.json("info", store, "r/0")["attributes"]["loss"] == "2.31"
    assert "loss=2.31" in vckpt("ls", store, "r").stdout
    for bad in ["loss", "=x", "1a=x", "a b=x", "k" * 65 + "=x"]:
        assert vckpt("import", store, "r", "--set", bad, source / "m.safetensors", check=False).returncode == 2


def test_two_stores_give_the_same_digests(vckpt, tmp_path, source):
    save_file(tensors(1, shape=(700, 900)), source / "model.safetensors")
    (source / "config.json").write_text("{}" * 5000)
    found = []
    for i in range(2):
        store = tmp_path / f"s{i}"
        vckpt("init", store)
        vckpt("import", store, f"run{i}", source, "--threads", 1 + 2 * i)
        info = vckpt.json("info", store, f"run{i}/0/model/a")
        found.append((info["digest"], info["stored_bytes"], vckpt.json("info", store, f"run{i}/0")["stored_bytes"]))
    assert found[0] == found[1]


def test_nothing_is_stored_twice(vckpt, store, source):
    save_file(tensors(1, shape=(700, 900)), source / "model.safetensors")
    assert vckpt.json("import", store, "one", source)["piece_bytes_new"] > 0
    again = vckpt.json("import", store, "two", source)
    assert again["piece_bytes_new"] == 0 and again["bases"] == 1 and again["pieces_new"] == 0
    for index in ["delete", "garbage"]:
        for f in (store / "index").iterdir():
            f.unlink() if index == "delete" else f.write_bytes(random.randbytes(20000))
        # without an index it is stored again, or found after all: never an error
        vckpt("import", store, "three", source)
        assert vckpt.json("import", store, "four", source)["piece_bytes_new"] == 0
    vckpt("verify", store)


def copied(store, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", store, copy], check=True)
    return copy


def given_away(store, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root gives files to another user, and reads them then")
    subprocess.run(["chown", "-R", "12345:12345", store], check=True)
    return store


@pytest.mark.parametrize("changed", [copied, given_away])
@pytest.mark.parametrize("indexed", [True, False])
def test_an_index_that_is_not_believed_is_made_anew(vckpt, store, source, tmp_path, monkeypatch, changed, indexed):
    """A store that was copied brings an index of another file, one of another user an index of another user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_file(tensors(1, shape=(700, 900)), source / "model.safetensors")
    vckpt("import", store, "one", source)
    store = changed(store, tmp_path)
    if indexed:
        assert vckpt.json("index", store)["commits"] == 1
        # in another user's store the own one is in the cache directory, and that user's is left alone
        assert (store / "index/index.mdb").stat().st_uid == (12345 if changed is given_away else os.geteuid())
    done = vckpt("import", store, "two", source, "--json")
    two = json.loads(done.stdout)
    assert done.stderr == "" and (two["pieces_new"] == 0) == indexed and (two["piece_bytes_new"] == 0) == indexed
    three = vckpt.json("import", store, "three", source)
    assert three["pieces_new"] == 0 and three["piece_bytes_new"] == 0
    vckpt("verify", store)


HEADER = {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def raw_file(path, header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(**change):
    return {"t": {**HEADER["t"], **change}}


BAD = {
    "header longer than the file": (HEADER, {"length": 1 << 20}, "header"),
    "header over 100 MB": (HEADER, {"length": 100_000_001},
                           "its header has 100000001 bytes; at most 100000000 are allowed"),
    "header length 2^64-1": (HEADER, {"length": 2**64 - 1}, "header"),
    "not JSON": (b"{nope}", {}, "JSON"),
    "an array": (b"[]", {}, ""),
    "nested": (b"[" * 200_000, {}, ""),
    "nested in a tensor": (b'{"t":' + b'{"a":' * 200_000, {}, ""),
    "backwards": (entry(data_offsets=[16, 0]), {}, "t"),
    "past the end": (entry(data_offsets=[0, 32], shape=[2, 4]), {}, "t"),
    "gap": ({**HEADER, "u": {"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}}, {"data": b"\0" * 24}, "u"),
    "gap at the end": (HEADER, {"data": b"\0" * 24}, ""),
    "overlap": ({**HEADER, "u": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}, {"data": b"\0" * 20}, ""),
    "shape and offsets differ": (entry(shape=[3, 2]), {}, "t"),
    "overflow": (entry(shape=[2**40, 2**40]), {}, "t"),
    "overflow with a zero": (entry(shape=[2**40, 2**40, 0]), {}, "t"),
    "negative": (entry(shape=[-2, -2]), {}, "t"),
    "number too large": (b'{"t":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,16]}}', {}, ""),
    "a float": (entry(shape=[2.0, 2]), {}, "t"),
    "17 dimensions": (entry(shape=[1] * 15 + [2, 2]), {}, "t"),
    "unknown dtype": (entry(dtype="F13"), {}, "F13"),
    "f6": (entry(dtype="F6_E2M3"), {}, "F6_E2M3"),
    "odd f4": (entry(dtype="F4", shape=[32, 1]), {}, "t"),
    "no dtype": ({"t": {"shape": [4], "data_offsets": [0, 16]}}, {}, "t"),
    "unknown key": (entry(more=1), {}, "t"),
    "twice": (
    b'{"t":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"t":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}}', {},
    "t"),
    "empty name": ({"": HEADER["t"]}, {}, "empty"),
    "NUL in a name": ({"a\0b": HEADER["t"]}, {}, ""),
    "broken UTF-8": (b'{"a\xff":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}', {}, ""),
    "lone surrogate": (b'{"a\\ud800":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}', {}, ""),
    "metadata that is not a string": ({**HEADER, "__metadata__": {"a": 1}}, {}, "metadata"),
    "too short": (b"", {"data": b"", "length": 0}, ""),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_lies(vckpt, store, source, name):
    header, more, sentence = BAD[name]
    path = source / "liar.safetensors"
    raw_file(path, header, **more)
    before = sorted(p for p in store.rglob("*") if p.is_file())
    done = vckpt("import", store, "run", path, check=False)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "liar.safetensors" in done.stderr and sentence in done.stderr, (
        done.stderr)
    assert sorted(p for p in store.rglob("*") if p.is_file()) == before
    assert vckpt.json("ls", store)["runs"] == []


def test_seven_bytes(vckpt, store, source):
    (source / "s.safetensors").write_bytes(b"1234567")
    assert vckpt("import", store, "run", source / "s.safetensors", check=False).returncode == 1


NAMES = ["a/b/c", "..", ".", ".hidden", "x/../../y", "%41", "%", "a%2Fb", "\x01\x1f\x7f\n", " ", "-rf", "n" * 300,
         "ü" * 200, "日本" * 90, "a.npy", "m" * 251, "m" * 252, "con", "~"]


def test_names_of_every_kind_come_back(vckpt, store, source, tmp_path):
    rng = numpy.random.default_rng(5)
    want = {name: rng.standard_normal(3).astype("f4") for name in NAMES}
    save_file(want, source / "model.safetensors")
    vckpt("import", store, "run", source)
    assert tensor_names(vckpt, store, "run/0/model") == set(NAMES)
    for form in ["safetensors", "npy"]:
        out = tmp_path / form
        vckpt("export", store, "run/0", out, "--format", form)
    assert (tmp_path / "safetensors/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    files = sorted((tmp_path / "npy/model").iterdir())
    assert len(files) == len(NAMES) and not (tmp_path / "y").exists()
    assert sorted(numpy.load(f).tobytes() for f in files) == sorted(v.tobytes() for v in want.values())
    short = [f for f in files if "%~" not in f.name]
    vckpt("import", store, "again", *short)
    again = tensor_names(vckpt, store, "again/0/model")
    assert again == {n for n in NAMES if len(n.encode()) < 252}


@pytest.mark.full
def test_a_hundred_thousand_names(vckpt, store, source, tmp_path):
    header, at = {}, 0
    for i in range(100_000):
        header[f"layer.{i}.weight"] = {"dtype": "U8", "shape": [4], "data_offsets": [at, at + 4]}
        at += 4
    data = numpy.arange(100_000, dtype="u4").tobytes()
    raw_file(source / "model.safetensors", header, data)
    vckpt("import", store, "run", source)
    assert len(tensor_names(vckpt, store, "run/0/model")) == 100_000
    assert cat(vckpt, store, "run/0/model.safetensors") == (source / "model.safetensors").read_bytes()
    assert cat(vckpt, store, "run/0/model/layer.77777.weight", "--raw") == struct.pack("<I", 77777)
    vckpt("verify", store)


def test_every_safetensors_dtype(vckpt, store, source, tmp_path):
    sizes = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
             "I16": 2, "U16": 2,
             "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8, "F4": 0.5}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for dtype, size in sizes.items():
        for shape in [[], [0, 3], [6], [300, 4]]:
            items = int(numpy.prod(shape))
            if dtype == "F4" and shape in ([], [0, 3]):
                continue
            header[f"{dtype}.{len(shape)}.{items}"] = {"dtype": dtype, "shape": shape,
                                                       "data_offsets": [at, at + int(items * size)]}
            at += int(items * size)
    raw_file(source / "model.safetensors", header, numpy.random.default_rng(3).bytes(at))
    vckpt("import", store, "run", source)
    assert cat(vckpt, store, "run/0/model.safetensors") == (source / "model.safetensors").read_bytes()
    vckpt("export", store, "run/0", tmp_path / "npy", "--format", "npy")
    bf16 = numpy.load(tmp_path / "npy/model/BF16.2.1200.npy")
    assert bf16.dtype == numpy.dtype("V2") and bf16.shape == (300, 4)


def test_a_source_that_is_no_source(vckpt, store, source, tmp_path):
    (source / "x.txt").write_text("x")
    os.mkfifo(source / "pipe.safetensors")
    for bad in [source / "x.txt", source / "missing.safetensors", source / "pipe.safetensors", source]:
        done = vckpt("import", store, "run", bad, check=False)
        assert done.returncode == 1 and len(done.stderr.splitlines()) >= 1, bad
    assert vckpt("import", tmp_path / "nothing", "run", source, check=False).returncode == 1


def test_stores_that_are_none(vckpt, tmp_path, source):
    save_file(tensors(1), source / "m.safetensors")
    done = vckpt("ls", tmp_path, check=False)
    assert done.returncode == 1 and "store" in done.stderr
    assert vckpt("init", source, check=False).returncode == 1     # not empty
    vckpt("init", tmp_path / "s")
    assert vckpt("init", tmp_path / "s", check=False).returncode == 1
    assert vckpt("ls", check=False).returncode == 2
    assert vckpt("ls", env={"VCKPT_STORE": str(tmp_path / "s")}).returncode == 0
    assert vckpt("ls", source, env={"VCKPT_STORE": str(tmp_path / "s")}, check=False).returncode == 2


def test_help_everywhere(vckpt):
    for command in ["", "init", "import", "ls", "info", "cat", "export", "verify", "rm", "gc", "index"]:
        done = vckpt(*([command] if command else []), "--help")
        assert "usage: vckpt" in done.stdout and done.stderr == ""
        assert max(map(len, done.stdout.splitlines())) <= 130
        if command:
            assert vckpt("help", command).stdout == done.stdout
    assert vckpt("nonsense", check=False).returncode == 2
    assert vckpt("ls", "--nonsense", check=False).returncode == 2


def test_a_terminal_is_not_spoken_to_by_what_is_stored(vckpt, store, source):
    name = "a\x1b[31m\u009bb\nc"
    save_file({name: tensors(1)["a"]}, source / "model.safetensors")
    (source / "x\x1by.txt").write_text("x")
    (source / "p\x1b.bin").write_bytes(b"\x80\x04N.")
    done = vckpt("import", store, "run", source, "--set", "k=v\x1b[2J\nw")
    shown = done.stdout + done.stderr
    for target in ["run", "run/0", "run/0/model"]:
        shown += vckpt("ls", store, target).stdout
    told = vckpt("cat", store, "run/0/manifest.json").stdout
    assert [t["name"] for t in json.loads(told)["tensors"]] == [name]
    shown += told + vckpt("info", store, "run/0").stdout + vckpt("info", store, "run/0/model/" + name).stdout
    assert not set(shown) & set(map(chr, [*range(10), *range(11, 32), 127, *range(128, 160)]))
    assert "a\\x1b[31m\\xc2\\x9bb\\x0ac" in shown and "k=v\\x1b[2J\\x0aw" in shown
    assert vckpt.json("ls", store, "run")["steps"][0]["attributes"] == {"k": "v\x1b[2J\nw"}
    vckpt("import", store, "other", source, "-q", "--set", "k=v\x7f\x7fw\x7f")
    told = vckpt("ls", store, "other", "--json").stdout
    assert "\x7f" not in told and json.loads(told)["steps"][0]["attributes"] == {"k": "v\x7f\x7fw\x7f"}
    assert tensor_names(vckpt, store, "run/0/model") == {name}


@pytest.mark.parametrize("threads", ["0", "-1", "x", "", "3x", "100000", "99999999999999999999"])
def test_threads_are_a_small_number(vckpt, store, source, threads):
    save_file(tensors(1), source / "model.safetensors")
    done = vckpt("import", store, "run", source, "--threads", threads, check=False)
    assert done.returncode == 2 and "--threads" in done.stderr


def test_more_files_than_descriptors(vckpt, store, source, build):
    for i in range(700):
        numpy.save(source / f"t{i}.npy", numpy.full(3, i, "i4"))
    (source / "dir").mkdir()
    save_file(tensors(1), source / "dir" / "model.safetensors")
    for i in range(700):
        (source / "dir" / f"f{i}").write_text(str(i))
    limited = 'ulimit -n 400; exec "$@"'
    done = subprocess.run(["bash", "-c", limited, "bash", build / "tools" / "vckpt" / "vckpt", "import", store, "run",
                           source / "dir",
                           *source.glob("*.npy")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert vckpt.json("info", store, "run/0")["blobs"] == 700
    assert cat(vckpt, store, "run/0/f699") == b"699"
    assert list(numpy.load(io.BytesIO(cat(vckpt, store, "run/0/model/t699")))) == [699] * 3


def test_options_that_meet_no_source(vckpt, store, source):
    """They may stand at the wrong place; so nothing is imported."""
    save_file(tensors(1), source / "m.safetensors")
    numpy.save(source / "typed.npy", tensors(3)["a"])
    numpy.save(source / "untyped.npy", numpy.arange(8, dtype="u2").view("V2"))
    m, typed, untyped = source / "m.safetensors", source / "typed.npy", source / "untyped.npy"
    unused = ("is for .npy files after it whose items have no type (|V1, |V2), and there is none: put it before such a "
              "file, or leave it out")
    for words, sentence in ((["--dtype", "bf16", m], f"--dtype bf16 {unused}"),
                            (["--dtype", "bf16", typed, m, source], f"--dtype bf16 {unused}"),
                            ([typed, "--dtype", "bf16"], f"--dtype bf16 {unused}"),
                            (["--dtype", "bf16", untyped, "--dtype", "f8_e5m2", typed], f"--dtype f8_e5m2 {unused}"),
                            (["--dtype", "f8_e5m2", "--dtype", "bf16", untyped], f"--dtype f8_e5m2 {unused}"),
                            ([m, "--component", "optimizer"], "--component optimizer comes after the last SOURCE: put "
                             "it before the SOURCEs that it is for")):
        done = vckpt("import", store, "run", *words, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "",
                                                               f"vckpt import: {sentence} (see vckpt import --help)\n")
    assert vckpt.json("ls", store) == {"runs": []}
    vckpt("import", store, "run", "--dtype", "bf16", typed, "--component", "other", untyped)
    vckpt("import", "--component", "other", "--dtype", "bf16", store, "run", m, untyped)
    assert [t["dtype"] for t in vckpt.json("ls", store, "run/0/other")["tensors"]] == ["bf16"]


def test_a_directory_of_npy_files(vckpt, store, source):
    """Its files are no tensors by themselves: the way that is named takes them."""
    folder = source / "my arrays"
    folder.mkdir()
    for name in ("b", "a"):
        numpy.save(folder / f"{name}.npy", tensors(1)["a"])
    (source / "config.json").write_text("{}")
    for given in (folder, source):
        done = vckpt("import", store, "run", given, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == ("vckpt import: no tensors: .npy files of a directory are not taken unless they are "
                               f"named (2 of them here): vckpt import STORE RUN '{folder}'/*.npy\n")
    command = done.stderr.split(": ")[-1].replace("vckpt import STORE RUN", '"$0" import "$1" run')
    subprocess.run(["bash", "-c", command, vckpt.path, store], check=True)
    assert tensor_names(vckpt, store, "run/0/model") == {"a", "b"}
    for file in folder.iterdir():
        file.unlink()
    done = vckpt("import", store, "run", source, check=False)
    assert done.stderr.startswith(f"vckpt import: no tensors: {source} has no .safetensors file with tensors, ")


def test_an_import_waits_for_no_other_that_writes_the_index(vckpt, store, source):
    """Whoever has the lock takes in what was imported meanwhile; what it missed, the next one takes in."""
    save_file(tensors(1), source / "a.safetensors")
    save_file(tensors(2), source / "b.safetensors")
    vckpt("import", store, "a", source / "a.safetensors")
    fd = os.open(store / "index", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    start = time.monotonic()
    done = vckpt("import", store, "b", source / "b.safetensors", "-v")
    assert time.monotonic() - start < 40 and done.stderr == ""
    assert vckpt("index", store, "--no-wait", "-q").stderr == ""
    os.close(fd)
    assert vckpt.json("index", store)["commits"] == 2


def test_an_index_that_is_up_to_date_stays_as_it_is(vckpt, store, source):
    save_file(tensors(1), source / "a.safetensors")
    vckpt("import", store, "a", source / "a.safetensors")
    index = store / "index" / "index.mdb"
    before, said = index.stat(), vckpt.json("index", store)
    after = index.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns) and said["commits"] == 1
    assert vckpt.json("index", store, "--rebuild") == said and index.stat().st_mtime_ns != before.st_mtime_ns
    vckpt("import", store, "b", source / "a.safetensors", "--no-index")
    assert vckpt.json("index", store)["commits"] == 2


def metadata_file(path, keys):
    """A safetensors file of one tensor, with a `__metadata__` of these keys."""
    header = json.dumps({"__metadata__": {key: "v" for key in keys},
                         path.stem: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2\3\4")


def test_much_metadata(vckpt, store, source):
    """Each key is looked up, not compared with all others; of two files of a component, too."""
    n = 100_000
    metadata_file(source / "model-00001-of-00002.safetensors", (f"k{i}" for i in range(n)))
    metadata_file(source / "model-00002-of-00002.safetensors", (f"k{i}" for i in range(n // 2, n + 5)))
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    vckpt("import", store, "run", "--component", "model", *sorted(source.iterdir()), "--no-index", timeout=120)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 15
    view = cat(vckpt, store, "run/0/model.safetensors")
    header = json.loads(view[8:8 + struct.unpack_from("<Q", view)[0]])
    assert set(header["__metadata__"]) - {"format"} == {f"k{i}" for i in range(n + 5)}


def test_an_import_without_a_number_takes_the_next_when_its_own_is_taken(vckpt, store, tmp_path):
    """It is held once it has begun, while another commits the step that it had chosen."""
    numpy.save(tmp_path / "large.npy", numpy.random.default_rng(1).standard_normal(3_000_000))
    numpy.save(tmp_path / "small.npy", numpy.zeros(10))
    first = subprocess.Popen([vckpt.path, "import", store, "r", tmp_path / "large.npy", "--threads", "1"],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while first.poll() is None and not list(store.glob("incoming/r/*/begin")):
        pass
    first.send_signal(signal.SIGSTOP)
    vckpt("import", store, "r/0", tmp_path / "small.npy")
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 0, said
    assert [s["step"] for s in vckpt.json("ls", store, "r")["steps"]] == [0, 1]
    assert not list(store.glob("incoming/*/*/begin")) and vckpt("verify", store).returncode == 0
