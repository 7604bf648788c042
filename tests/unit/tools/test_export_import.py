# SPDX-License-Identifier: Apache-2.0
"""What vckpt export writes, vckpt import takes back: the same step, whatever its names, types, components and blobs.
And a manifest.json that lies."""
import ctypes as c
import json
import os
import random
import re
import shutil
import struct

import numpy as np
import pytest

from test_tree import SAFETENSORS, Error, Saver, Tree, checked

FORMS = ["safetensors", "npy", "npy,safetensors"]
WIDTH = {**dict.fromkeys((1, 2, 6, 16, 17, 18, 19, 20, 21), 1), **dict.fromkeys((3, 7, 10, 11), 2), 4: 4, 8: 4, 12: 4,
         5: 8, 9: 8, 13: 8, 14: 8, 15: 16}
SHAPES = [(), (0,), (1,), (7,), (2, 0, 5), (4, 6), (1,) * 16, (33, 130), (3, 2, 2, 2)]
PARTS = ["a", "layer.0.weight", "..", ".", ".hidden", ".git", "100%", "%2F", "%41", "tab\tnew\nline", "\x7f",
         'q"uote\\', " ", "grö日本", "a.npy", "x.safetensors",
         "model", "ranks", "00003", "mesh", "manifest.json", "model.safetensors", "__metadata__", ".dcp", "-rf",
         "é" * 130, "n" * 240]
COMPONENTS = ["model", "optimizer", "ema.v2-x", "_"]


@pytest.fixture
def opened(lib, tmp_path):
    """A store, opened by the library; its path."""
    path, err, s = tmp_path / "s", Error(), c.c_void_p()
    checked(lib.store_init(str(path).encode(), c.c_uint64(0), c.byref(err)), err)
    checked(lib.store_open(str(path).encode(), c.c_uint(0), c.byref(s), c.byref(err)), err)
    yield s, path
    lib.store_close(s)


def make_name(rng):
    """Also longer than a file's name can be."""
    return (rng.choice(["", "", "", "/"]) +
            rng.choice(["/", "//", ".", ""]).join(rng.choices(PARTS, k=rng.randint(1, 4))) + rng.choice(["", "", "/"]))


def random_step(rng, saver):
    tensors = {(rng.choice(COMPONENTS), make_name(rng)) for _ in range(rng.randint(0, 25))}
    for code, (component, name) in zip(rng.sample(range(1, 22), 21) * 2, sorted(tensors)):
        shape = rng.choice(SHAPES)
        saver.tensor(component, name, code, shape, rng.randbytes(WIDTH[code] * int(np.prod(shape))))
    for per_rank in (False, True):
        for name in sorted({make_name(rng) for _ in range(rng.randint(0, 8))}):
            saver.blob(name, rng.randbytes(rng.choice([0, 1, 5000])), per_rank)
    used = sorted({component for component, _ in tensors})
    saver.commit(list(enumerate(used)) if rng.random() < .5 else [])


def everything(lib, store, run):
    """Of a step: attributes, components, tensors and blobs, with digests; and its files but manifest.json."""
    t = Tree(lib, store, run, 1)
    told, files = json.loads(t.whole("manifest.json")), t.files()
    for x in told["tensors"] + told["blobs"]:
        x["digest"] = t.attributes(files[x["file"]])["digest"]
    heads = {path: t.whole(path) for path, n in files.items() if t.node(n).kind == SAFETENSORS}
    t.close()
    return [told[k] for k in ("attributes", "components", "tensors", "blobs")], heads


@pytest.mark.parametrize("form", FORMS)
def test_random_steps_come_back(lib, vckpt, opened, scale, tmp_path, form, seed):
    store, path = opened
    for i in range(scale(10, 200)):
        rng, run = random.Random(seed + i), f"r{i}"
        attributes = [(k, make_name(rng)) for k in rng.sample(["loss", "a.b-c", "_x", "note"], rng.randint(0, 4))]
        saver = Saver(lib, store, run.encode(), 1, attributes)
        random_step(rng, saver)
        vckpt("export", path, f"{run}/1", tmp_path / run, "--format", form, "-q")
        vckpt("import", path, f"{run}back/1", tmp_path / run, "-q")
        wanted, heads = everything(lib, store, run.encode())
        got, got_heads = everything(lib, store, f"{run}back".encode())
        assert got == wanted and got_heads == heads
        assert got[0] == dict(attributes)
        shutil.rmtree(tmp_path / run)


def one_step(lib, store, run=b"r"):
    saver = Saver(lib, store, run, 1, [("loss", "2.5"), ("note", "ä")])
    saver.tensor("model", "w", 11, (3, 2), bytes(range(12)))
    saver.tensor("model", "a/b", 16, (5,), b"12345")
    saver.tensor("model", "n", 12, (2,), bytes(8))
    saver.tensor("optimizer", "w", 15, (1,), bytes(16))
    saver.blob("config.json", b"{}")
    saver.blob("dir/.x", b"x")
    saver.blob("rng", b"rank 0", per_rank=True)
    saver.commit([])


@pytest.fixture
def exported(lib, vckpt, opened, tmp_path):
    """A small step exported in both forms: the store, the directory, and a function that imports what it has become."""
    store, path = opened
    one_step(lib, store)
    vckpt("export", path, "r/1", tmp_path / "d", "--format", "npy,safetensors")

    def again(*more, check=True):
        return vckpt("import", path, "back/1", tmp_path / "d", "--replace", *more, check=check)
    return path, tmp_path / "d", again


def told(vckpt, path, step="back/1"):
    return json.loads(vckpt("cat", path, f"{step}/manifest.json").stdout)


def test_a_step_without_tensors(lib, vckpt, opened, tmp_path):
    store, path = opened
    saver = Saver(lib, store, b"r", 1, [("k", "v")])
    saver.blob("a/b", b"x")
    saver.commit([])
    vckpt("export", path, "r/1", tmp_path / "d")
    vckpt("import", path, "back/1", tmp_path / "d")
    assert everything(lib, store, b"back") == everything(lib, store, b"r")


def test_one_form_of_each_tensor_is_enough(vckpt, exported):
    """And both are compared."""
    path, d, again = exported
    (d / "model.safetensors").unlink()
    (d / "optimizer" / "w.npy").rename(d / "optimizer" / "w")
    assert "tensors[3], w of component optimizer, is in no file" in again(check=False).stderr
    (d / "optimizer" / "w").rename(d / "optimizer" / "w.npy")
    again()
    assert {t["dtype"] for t in told(vckpt, path)["tensors"]} == {"bf16", "f8_e4m3fn", "f32", "c128"}


@pytest.mark.parametrize("name,file", [("w", "w.npy"), ("a/b", "a%2Fb.npy")])
def test_forms_that_disagree(exported, name, file):
    path, d, again = exported
    with open(d / "model" / file, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\xff")
    done = again(check=False)
    assert (done.returncode == 1 and f"tensor {name} is in" in done.stderr and file in done.stderr and
            "model.safetensors, and they differ" in done.stderr)


def test_attributes_may_be_set_anew(vckpt, exported):
    path, d, again = exported
    again("--set", "loss=1", "--set", "more=2")
    assert told(vckpt, path)["attributes"] == {"loss": "1", "note": "ä", "more": "2"}


def test_a_step_comes_back_with_its_number(vckpt, exported):
    """Unless another one is given, or it is taken, or two sources disagree."""
    path, d, again = exported
    info = json.loads((d / "manifest.json").read_text())
    (d / "manifest.json").write_text(json.dumps({**info, "step": 1000}))
    assert vckpt.json("import", path, "own", d)["step"] == 1000
    said = vckpt("import", path, "own", d)
    assert "own/1000 is there already: the step gets the next number" in said.stderr and "step-00001001" in said.stdout
    assert vckpt.json("import", path, "own", d, "--step", "3")["step"] == 3
    assert vckpt.json("import", path, "own/ckpt-7", d)["step"] == 7
    assert vckpt.json("import", path, "own", d, "--replace")["step"] == 1000
    assert [step["step"] for step in vckpt.json("ls", path, "own")["steps"]] == [3, 7, 1000, 1001]
    for wrong in "x", -1, None, 2**70:
        (d / "manifest.json").write_text(json.dumps({**info, "step": wrong}))
        done = vckpt("import", path, "wrong", d, check=False)
        assert done.returncode in (0, 1) and (done.returncode or "step-0000000" in done.stdout), done


def test_the_component_is_the_steps_own(exported, vckpt):
    path, d, _ = exported
    done = vckpt("import", path, "x", "--component", "other", d, check=False)
    assert done.returncode == 1 and "leave out --component other" in done.stderr


def test_other_files_become_blobs(vckpt, exported):
    path, d, again = exported
    (d / "dir" / "more").mkdir()
    (d / "dir" / "more" / "notes.npy").write_bytes(b"no tensor")
    (d / "README").write_text("r")
    (d / "adapter.safetensors").write_bytes((d / "model.safetensors").read_bytes())
    (d / "model.safetensors.index.json").write_text("not read")
    again()
    assert {b["name"] for b in told(vckpt, path)["blobs"]} == {"config.json", "dir/.x", "rng", "dir/more/notes.npy",
                                                               "README", "adapter.safetensors",
                                                               "model.safetensors.index.json"}


def test_files_of_ranks(vckpt, exported):
    """An import is rank 0: what is another rank's own is kept under its path, and said."""
    path, d, again = exported
    (d / "ranks" / "00003").mkdir()
    (d / "ranks" / "00003" / "rng").write_bytes(b"rank 3")
    m = json.loads((d / "manifest.json").read_text())
    m["blobs"].append({"file": "ranks/00003/rng", "name": "rng", "rank": 3, "bytes": 6})
    (d / "manifest.json").write_text(json.dumps(m))
    done = again()
    assert "files of single ranks (1) are kept" in done.stderr
    blobs = {(b["name"], b.get("rank")): b["file"] for b in told(vckpt, path)["blobs"]}
    assert blobs[("rng", 0)] == "ranks/00000/rng" and ("ranks/00003/rng", None) in blobs
    assert vckpt("cat", path, "back/1/" + blobs[("ranks/00003/rng", None)]).stdout == "rank 3"


def change(path, value):
    """A change of one field: "tensors.0.dtype"."""
    def apply(m):
        *way, last = path.split(".")
        for part in way:
            m = m[int(part) if part.isdigit() else part]
        last = int(last) if last.isdigit() else last
        if value is None:
            del m[last]
        else:
            m[last] = value
    return apply


def twice(listed):
    return lambda m: m[listed].append(dict(m[listed][0]))


# tensors: 0 model a/b, 1 model n, 2 model w, 3 optimizer w; blobs: 0 config.json, 1 dir/%2Ex, 2 ranks/00000/rng
LIES = {
    "tensor missing": (change("tensors.2", None), "model/w.npy: .*manifest.json does not name it"),
    "tensor too many": (lambda m: m["tensors"].append({**m["tensors"][0], "name": "c", "file": "model/c.npy"}),
                        r"tensors\[4\], c of component model, is in no file"),
    "no tensors": (change("tensors", None), "tensors is missing"),
    "tensors is an object": (change("tensors", {}), "tensors is missing or not a list"),
    "a tensor is a string": (change("tensors.1", "n"), r"tensors\[1\] is not an object"),
    "other dtype of bf16": (change("tensors.2.dtype", "f16"),
                            r"model/w.npy: .*'\|V2'.* not f16 \(tensors\[2\] of .*manifest.json\)"),
    "other dtype of f8": (change("tensors.0.dtype", "f8_e5m2"),
                          r"tensors\[0\].dtype of a/b is f8_e5m2, and .*model.safetensors holds f8_e4m3fn"),
    "other dtype": (change("tensors.1.dtype", "i32"), r"tensors\[1\].dtype of n is i32, and .*n.npy holds f32"),
    "no dtype": (change("tensors.1.dtype", None), r"tensors\[1\].dtype is missing"),
    "unknown dtype": (change("tensors.1.dtype", "f12"), r"tensors\[1\].dtype is not a dtype: 'f12'"),
    "other shape": (change("tensors.1.shape", [1, 2]), r"tensors\[1\].shape of n is \[1, 2\], and .*n.npy holds \[2\]"),
    "shape of strings": (change("tensors.1.shape", ["2"]), r"tensors\[1\].shape is missing or not a possible number"),
    "negative shape": (change("tensors.1.shape", [-2]), r"tensors\[1\].shape"),
    "fractional shape": (change("tensors.1.shape", [2.0]), r"tensors\[1\].shape"),
    "17 dimensions": (change("tensors.1.shape", [1] * 17), r"tensors\[1\].shape is not a list of at most 16"),
    "overflow": (change("tensors.1.shape", [2**62, 2**62]), r"tensors\[1\].shape overflows"),
    "component unknown": (change("tensors.1.component", "other"),
                          r"tensors\[1\].component is not one of the components: 'other'"),
    "component that leaves": (change("components.0.name", "../x"),
                              r"components\[0\].name cannot be the name of a component: '../x'"),
    "component with a slash": (change("components.0.name", "a/b"),
                               r"components\[0\].name cannot be the name of a component"),
    "component of the tree": (change("components.0.name", "ranks"),
                              r"components\[0\].name cannot be the name of a component"),
    "component twice": (twice("components"), r"components\[2\].name is given twice: 'model'"),
    "tensor twice": (twice("tensors"), r"tensors\[4\].file is given twice"),
    "name empty": (change("tensors.1.name", ""), r"tensors\[1\].name is not a name"),
    "name too long": (change("tensors.1.name", "n" * 65536), r"tensors\[1\].name is not a name"),
    "name of another file": (change("tensors.1.name", "../../etc/passwd"),
                             r"tensors\[1\].file is not where this tensor belongs: 'model/n.npy'"),
    "file outside": (change("tensors.1.file", "../../etc/passwd"),
                     r"tensors\[1\].file is not where this tensor belongs: '../../etc/passwd'"),
    "absolute file": (change("tensors.1.file", "/etc/passwd"), r"tensors\[1\].file is not where"),
    "file with dots": (change("tensors.1.file", "model/../model/n.npy"), r"tensors\[1\].file is not where"),
    "blob outside": (change("blobs.0.file", "../secret"), r"blobs\[0\].file is not in the directory: ../secret"),
    "absolute blob": (change("blobs.0.file", "/etc/passwd"), r"blobs\[0\].file is not in the directory: /etc/passwd"),
    "blob that is a tensor": (change("blobs.0.file", "model/n.npy"), r"blobs\[0\].file is given twice: 'model/n.npy'"),
    "blob that is the manifest": (change("blobs.0.file", "manifest.json"), r"blobs\[0\].file is not in the directory"),
    "blob that is a component": (change("blobs.0.file", "optimizer.safetensors"),
                                 r"blobs\[0\].file is given twice: 'optimizer.safetensors'"),
    "blob twice": (twice("blobs"), r"blobs\[3\].file is given twice"),
    "blobs of one name": (change("blobs.1.name", "config.json"), "two sources have a file config.json"),
    "blob without a name": (change("blobs.0.name", None), r"blobs\[0\].name is missing"),
    "blob's rank": (change("blobs.2.rank", -1), r"blobs\[2\].rank"),
    "blob's rank too large": (change("blobs.2.rank", 2**32), r"blobs\[2\].rank"),
    "attributes that are a list": (change("attributes", []), "attributes is missing or not an object"),
    "attribute that is not a string": (change("attributes.loss", 2.5), "attributes: 'loss'"),
    "attribute that is no key": (change("attributes.a b", "x"), "attributes: 'a b'"),
    "attribute too long": (change("attributes.x", "v" * 5000), "attribute x"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(vckpt, exported, lie):
    path, d, again = exported
    (d.parent / "secret").write_text("{}")
    m = json.loads((d / "manifest.json").read_text())
    how, sentence = LIES[lie]
    how(m)
    (d / "manifest.json").write_text(json.dumps(m))
    done = again(check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and re.search(sentence, done.stderr), done.stderr
    assert "manifest.json" in done.stderr or "two sources" in done.stderr or "attribute x" in done.stderr
    assert "back" not in {r["run"] for r in vckpt.json("ls", path)["runs"]}


@pytest.mark.parametrize("text,sentence", [
    (lambda t: t[:300], "not JSON"), (lambda t: t + "x", "not JSON"),
    (lambda t: t.replace('"config.json"', '"c\\ud800"'), "not JSON"),
    (lambda t: t.replace('"config.json"', '"c\\u0000"'), "not JSON"),
    (lambda t: t.replace('"step"', '"run"'), "not JSON"),
    (lambda t: '{"run": ' + "[" * 100_000, "not JSON"),
    (lambda t: t.replace('"bytes": 2', '"bytes": 99999999999999999999'), "not JSON"),
], ids=["cut", "more", "surrogate", "NUL", "twice", "nested", "number"])
def test_a_manifest_that_is_no_json(exported, text, sentence):
    path, d, again = exported
    (d / "manifest.json").write_text(text((d / "manifest.json").read_text()))
    done = again(check=False)
    assert (done.returncode == 1 and done.stderr.count("\n") == 1 and "manifest.json: line " in done.stderr and
            sentence in done.stderr), done.stderr


def test_a_huge_manifest(exported):
    path, d, again = exported
    os.truncate(d / "manifest.json", 250 << 20)
    done = again(check=False)
    assert done.returncode == 1 and "manifest.json: larger than 209715200 bytes" in done.stderr


@pytest.mark.parametrize("text", ["{}", "[]", '{"run": 1}', "", "no JSON", '{"name": "a web page", "components": []}',
                                  '"run"', "{\"x\": 1, \"run\""])
def test_a_manifest_of_another_program(vckpt, exported, text):
    """It is a file like any other."""
    path, d, _ = exported
    shutil.rmtree(d / "model")
    shutil.rmtree(d / "optimizer")
    (d / "manifest.json").write_text(text)
    if text == '{"run": 1}':
        (d / "manifest.json").write_text('{"run": 1, "runs": []}')
    vckpt("import", path, "x/1", d)
    assert "manifest.json" in {b["name"] for b in told(vckpt, path, "x/1")["blobs"]}


def test_a_flipped_manifest_never_crashes(vckpt, exported, scale, rng):
    path, d, again = exported
    good = (d / "manifest.json").read_bytes()
    for _ in range(scale(30, 150)):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] = rng.choice(b'"[]{},:0-9.e\\u%/ \0\xff' + rng.randbytes(4))
        (d / "manifest.json").write_bytes(raw)
        done = vckpt("import", path, "flipped", d, "-q", check=False)
        assert done.returncode in (0, 1) and (done.returncode == 0 or done.stderr.count("\n") == 1), (bytes(raw), done)


# ---- single files ----

def npy(path, descr, shape, data):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    path.write_bytes(b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text + data)
    return path


def test_dtype_of_a_file(vckpt, store_path, tmp_path):
    """A .npy of |V2 or |V1 by itself: asked for by name, never guessed."""
    w, x, n = npy(tmp_path / "w.npy", "|V2", (3,), b"abcdef"), npy(tmp_path / "x.npy", "<V1", (4,),
                                                                   b"abcd"), npy(tmp_path / "n.npy", "<f4", (1,),
                                                                                 bytes(4))
    for file, names in ((w, "bf16 (--dtype DTYPE before the file)"),
                        (x, "f8_e4m3fn, f8_e5m2, f8_e4m3fnuz, f8_e5m2fnuz, f8_e8m0fnu, f4_e2m1fn_x2 (--dtype")):
        done = vckpt("import", store_path, "r", file, check=False)
        assert (done.returncode == 1 and done.stderr.count("\n") == 1 and str(file) in done.stderr and
                names in done.stderr), done.stderr
    vckpt("import", store_path, "r/1", "--dtype", "bf16", w, n, "--component", "other", "--dtype", "f8_e5m2", x)
    assert {t["name"]: (t["dtype"], t["shape"]) for t in told(vckpt, store_path, "r/1")["tensors"]} == {
        "w": ("bf16", [3]), "n": ("f32", [1]), "x": ("f8_e5m2", [4])}
    assert vckpt("cat", store_path, "r/1/model/w", "--raw").stdout == "abcdef"
    done = vckpt("import", store_path, "r", "--dtype", "bf16", x, check=False)
    assert done.returncode == 1 and "'<V1'" in done.stderr and "not bf16" in done.stderr
    for bad in ("f32", "bfloat", "", "c64"):
        done = vckpt("import", store_path, "r", "--dtype", bad, w, check=False)
        assert done.returncode == 2 and f"--dtype {bad}" in done.stderr and "f8_e8m0fnu" in done.stderr


@pytest.fixture
def store_path(vckpt, tmp_path):
    vckpt("init", tmp_path / "store")
    return tmp_path / "store"
