# SPDX-License-Identifier: Apache-2.0
"""Weights come back under the names that they came in with, whole or in parts, at the top and in folders; a folder of
which something is missing is refused by the name of what is missing."""
import json
import os
import struct

import numpy
import pytest
from safetensors.numpy import load_file, save_file

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4400216\n"


def tensors(seed, names=("a", "b"), shape=(40, 30)):
    rng = numpy.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype("f4") for name in names}


def files(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def put(path, what, **metadata):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(what, dict) and all(isinstance(v, numpy.ndarray) for v in what.values()):
        save_file(what, path, metadata=metadata or {"format": "pt"})
    else:
        path.write_bytes(what if isinstance(what, bytes) else json.dumps(what).encode())


def parts(folder, total, name="model", tail="", index=None, seed=0):
    """NAME-0000N-of-0000TOTAL, one tensor each, and their index."""
    weight_map = {}
    for i in range(1, total + 1):
        file = f"{name}-{i:05}-of-{total:05}{tail}.safetensors"
        put(folder / file, tensors(seed + i, [f"t{i}"]))
        weight_map[f"t{i}"] = file
    if index:
        put(folder / index, {"metadata": {"total_size": 4800 * total}, "weight_map": weight_map})


def components(vckpt, store, step="run/0"):
    listed = json.loads(vckpt("cat", store, f"{step}/manifest.json").stdout)
    return {c["name"]: c["tensors"] for c in listed["components"]}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    return path


def adapter(d):
    put(d / "adapter_model.safetensors", tensors(1, ["base_model.model.q.lora_A.weight"]), format="pt")
    put(d / "adapter_config.json", {"peft_type": "LORA"})
    return {"model": 1}


def pipeline(d):
    put(d / "model_index.json", {"_class_name": "P"})
    put(d / "unet/diffusion_pytorch_model.safetensors", tensors(1))
    put(d / "unet/diffusion_pytorch_model.fp16.safetensors", tensors(2))
    put(d / "unet/config.json", {})
    put(d / "text_encoder/model.safetensors", tensors(3))
    put(d / "text_encoder/model.fp16.safetensors", tensors(4))
    parts(d / "transformer", 2, "diffusion_pytorch_model", index="diffusion_pytorch_model.safetensors.index.json")
    put(d / "vae/decoder/diffusion_pytorch_model.safetensors", tensors(5))
    return {"unet": 2, "unet.fp16": 2, "text_encoder": 2, "text_encoder.fp16": 2, "transformer": 2,
            "vae.decoder": 2}


def sentence_transformer(d):
    put(d / "model.safetensors", tensors(1))
    put(d / "2_Dense/model.safetensors", tensors(2))
    put(d / "1_Pooling/config.json", {})
    return {"model": 2, "2_Dense": 2}


def variants(d):
    put(d / "model.safetensors", tensors(1))
    put(d / "model.fp16.safetensors", tensors(2))
    parts(d, 2, "model.bf16", index="model.safetensors.index.bf16.json")
    put(d / "onnx/model.onnx", b"onnx")
    return {"model": 2, "model.fp16": 2, "model.bf16": 2}


def variants_of_old(d):
    parts(d, 2, "diffusion_pytorch_model", ".fp16", "diffusion_pytorch_model.safetensors.index.fp16.json")
    parts(d, 2, "diffusion_pytorch_model", index="diffusion_pytorch_model.safetensors.index.json", seed=5)
    return {"model": 2, "model.fp16": 2}


def sharded(d):
    parts(d, 3, index="model.safetensors.index.json")
    put(d / "config.json", {"a": 1})
    return {"model": 3}


def mistral(d):
    parts(d, 2, index="model.safetensors.index.json")
    put(d / "consolidated.safetensors", {**tensors(1, ["t1"]), **tensors(2, ["t2"])})
    return {"model": 2, "consolidated": 2}


def without_index(d):
    parts(d, 3, "pytorch_model")
    return {"model": 3}


def from_zero(d):
    for i in range(2):
        put(d / f"weights-{i:02}-of-02.safetensors", tensors(i, [f"t{i}"]))
    return {"model": 2}


def trainer(d):
    put(d / "config.json", {})
    for step in (500, 1000):
        put(d / f"checkpoint-{step}/model.safetensors", tensors(step))
        put(d / f"checkpoint-{step}/trainer_state.json", {})
    return {"checkpoint-500": 2, "checkpoint-1000": 2}


def odd_names(d):
    put(d / "model.safetensors", tensors(1))
    put(d / "ranks/x.safetensors", tensors(2))
    put(d / "é 1/%/.w.safetensors", tensors(3))
    put(d / ("n" * 100) / "x.safetensors", tensors(4))
    put(d / "model/x.safetensors", tensors(5))
    put(d / "a.b/x.safetensors", tensors(6))
    put(d / "a/b/x.safetensors", tensors(7))
    return {"model": 2, "ranks_2": 2, "__ 1__.w".replace(" ", "_"): 2, "n" * 60: 2, "model_2": 2, "a.b": 2, "a.b_2": 2}


FOLDERS = [adapter, pipeline, sentence_transformer, variants, variants_of_old, sharded, mistral, without_index,
           from_zero, trainer]


def test_cat_takes_a_file_by_its_true_name(vckpt, store, source):
    """As `ls` lists it, or as the mount shows it."""
    put(source / "model.safetensors", tensors(1, ["50%"]))
    put(source / "50%" / "a%2Fb", b"percent")
    put(source / "50%.txt", b"true")
    vckpt("import", store, "run", source)
    assert "50%.txt" in vckpt("ls", store, "run/0").stdout
    for name in ("50%.txt", "50%25.txt"):
        assert vckpt("cat", store, f"run/0/{name}", text=False).stdout == b"true"
    for name in ("50%/a%2Fb", "50%25/a%252Fb"):
        assert vckpt("cat", store, f"run/0/{name}").stdout == "percent"
    assert vckpt("cat", store, "run/0/51%.txt", check=False).returncode == 1


@pytest.mark.parametrize("make, form", [*((make, "safetensors") for make in FOLDERS), (pipeline, "npy,safetensors")])
def test_names_come_back(vckpt, store, source, tmp_path, make, form):
    """Byte for byte; and the export, with its manifest.json and without it, is the same step again."""
    want = make(source)
    vckpt("import", store, "run", source)
    assert components(vckpt, store) == want

    def weights(out):
        return {n: raw for n, raw in files(out).items() if n != "manifest.json" and not n.endswith(".npy")}
    name, raw = max(files(source).items())
    assert vckpt("cat", store, f"run/0/{name}", text=False).stdout == raw
    out = tmp_path / "out"
    vckpt("export", store, "run/0", out, "--format", form)
    assert weights(out) == files(source)
    again = vckpt.json("import", store, "again/0", out)
    assert again["pieces_new"] == 0 and components(vckpt, store, "again/0") == want
    if form == "safetensors":
        (out / "manifest.json").unlink()
        assert vckpt.json("import", store, "again/1", out)["pieces_new"] == 0
        vckpt("export", store, "again/1", tmp_path / "1")
        assert weights(tmp_path / "1") == files(source)
    vckpt("export", store, "again/0", tmp_path / "0")
    assert weights(tmp_path / "0") == files(source)
    assert vckpt("verify", store, "--paranoid").returncode == 0


def test_odd_names(vckpt, store, source):
    want = odd_names(source)
    vckpt("import", store, "run", source)
    listed = json.loads(vckpt("cat", store, "run/0/manifest.json").stdout)["components"]
    assert sorted(c["tensors"] for c in listed) == [2] * len(want) and len({c["name"] for c in listed}) == len(want)
    assert vckpt("cat", store, "run/0/model/x.safetensors", text=False).stdout == (
        source / "model/x.safetensors").read_bytes()


def test_a_name_that_is_not_utf8(vckpt, store, source):
    adapter(source)
    (source / os.fsdecode(b"a\xff")).mkdir()
    (source / os.fsdecode(b"a\xff") / "notes.txt").write_text("x")
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and done.stderr.endswith("/a?/notes.txt: its name is not UTF-8\n"), done.stderr


def test_what_manifest_json_says(vckpt, store, source, tmp_path):
    pipeline(source)
    vckpt("import", store, "run", source)
    vckpt("export", store, "run/0", tmp_path / "out")
    listed = json.loads((tmp_path / "out/manifest.json").read_text())
    of = {c["name"]: c for c in listed["components"]}
    assert of["unet"]["safetensors"] == "unet/diffusion_pytorch_model.safetensors"
    several = [f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert of["transformer"]["safetensors"] is None and of["transformer"]["files"] == several
    assert [t["file"] for t in listed["tensors"] if t["component"] == "transformer"] == several
    for t in listed["tensors"]:
        assert t["name"] in load_file(tmp_path / "out" / t["file"])


def test_pieces_are_shared_between_folders(vckpt, store, source):
    same = tensors(1, shape=(400, 300))
    put(source / "unet/diffusion_pytorch_model.safetensors", same)
    vckpt("import", store, "run", source)
    put(source / "ema/diffusion_pytorch_model.safetensors", same)
    put(source / "model.safetensors", same, other="header")
    assert vckpt.json("import", store, "run", source)["pieces_new"] == 0


@pytest.mark.parametrize("gone", [1, 3, 6])
@pytest.mark.parametrize("kind", ["no index", "index", "variant", "folder", "pytorch_model", "named"])
def test_a_missing_part_is_named(vckpt, store, source, gone, kind):
    folder = source / "unet" if kind == "folder" else source
    name = {"variant": "model.fp16", "pytorch_model": "pytorch_model", "folder": "diffusion_pytorch_model"}.get(
        kind, "model")
    parts(folder, 6, name, index="model.safetensors.index.json" if kind == "index" else None)
    put(source / "config.json", {})
    missing = folder / f"{name}-{gone:05}-of-00006.safetensors"
    missing.unlink()
    sources = sorted(folder.glob("*.safetensors")) if kind == "named" else [source]
    done = vckpt("import", store, "run", *sources, check=False)
    assert done.returncode == 1 and missing.name in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert vckpt.json("ls", store)["runs"] == []


def test_a_missing_part_of_pickles_that_are_kept(vckpt, store, source):
    put(source / "model.safetensors", tensors(1))
    for i in (1, 3):
        put(source / f"pytorch_model-0000{i}-of-00003.bin", b"\x80\x02}.")
    vckpt("import", store, "run", source)
    done = vckpt("import", store, "run", source, "--keep-pickles", check=False)
    assert done.returncode == 1 and "pytorch_model-00002-of-00003.bin: it is missing" in done.stderr


def test_parts_of_ranks(vckpt, store, source):
    """Of shard-RANK-model-N-of-M each N is there at some rank."""
    for rank, n in [(1, 1), (2, 3)]:
        put(source / f"shard-0000{rank}-model-0000{n}-of-00003.safetensors", tensors(n, [f"t{n}"]))
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and "-model-00002-of-00003.safetensors: it is missing" in done.stderr
    put(source / "shard-00001-model-00002-of-00003.safetensors", tensors(2, ["t2"]))
    vckpt("import", store, "run", source)


@pytest.mark.parametrize("change, sentence", [
    (lambda m: m.update(gone="model-00001-of-00002.safetensors"), "tensor gone is not in model-00001-of-00002"),
    (lambda m: m.pop("t1"), "it names other parts of the same name and not model-00001-of-00002.safetensors"),
    (lambda m: m.update(t1="model-00002-of-00002.safetensors"), "not model-00001-of-00002.safetensors"),
    (lambda m: m.update(x="other.safetensors"), "tensor x is in other.safetensors, which is not there"),
])
def test_an_index_that_names_less_or_more(vckpt, store, source, change, sentence):
    parts(source, 2, index="model.safetensors.index.json")
    index = source / "model.safetensors.index.json"
    m = json.loads(index.read_text())
    change(m["weight_map"])
    put(index, m)
    done = vckpt("import", store, "run", source, check=False)
    assert (done.returncode == 1 and sentence in done.stderr and index.name in done.stderr and
            done.stderr.count("\n") == 1), done.stderr


@pytest.mark.parametrize("change, sentence", [
    ({}, None),
    ({"gone": "model-00001-of-00003.safetensors"}, "tensor gone is not in model-00001-of-00003.safetensors"),
    ({"t2": None}, None),
    ({"t2": "model-00001-of-00003.safetensors"}, "tensor t2 is not in model-00001-of-00003.safetensors"),
    ({"b": None}, "it does not name tensor b, which is in model-00003-of-00003.safetensors"),
    ({"x": "other.safetensors"}, "tensor x is in other.safetensors, which is not there"),
])
@pytest.mark.parametrize("name", ["a.safetensors.index.json", "z.safetensors.index.json",
                                  "model.safetensors.index.fp16.json"])
def test_an_index_of_files_that_another_has(vckpt, store, source, name, change, sentence):
    """Each index of a folder is compared with the files that it names, whichever has them."""
    parts(source, 3, index="model.safetensors.index.json")
    put(source / "model-00003-of-00003.safetensors", tensors(3, ["t3", "b"]))
    full = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    full["b"] = "model-00003-of-00003.safetensors"
    put(source / "model.safetensors.index.json", {"weight_map": full})
    put(source / name, {"weight_map": {k: v for k, v in {**full, **change}.items() if v}})
    done = vckpt("import", store, "run", source, check=False)
    if sentence:
        assert done.returncode == 1 and done.stderr == f"vckpt import: {source}/{name}: {done.stderr.split(': ', 2)[2]}"
        assert sentence in done.stderr and done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0, done.stderr
        assert sum(components(vckpt, store).values()) == 4
        assert (source / name).read_text() == vckpt("cat", store, f"run/0/{name}").stdout


def test_two_indices_that_share_a_file(vckpt, store, source):
    parts(source, 3, index="model.safetensors.index.json")
    m = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    put(source / "x.safetensors", tensors(9, ["x"]))
    put(source / "other.safetensors.index.json", {"weight_map": {"t3": m["t3"], "x": "x.safetensors"}})
    vckpt("import", store, "run", source)
    assert components(vckpt, store) == {"model": 3, "other": 1}


@pytest.mark.parametrize("old, new", [("model-", "./model-"), ("model-", "././model-"), ("model", "v1..2/../model"),
                                      ("model", "../source/model"), ("model-", "/model-")])
def test_paths_that_an_index_names(vckpt, store, source, old, new):
    """A path may begin with `./`; one that may lead out of the folder is refused."""
    parts(source, 2, index="model.safetensors.index.json")
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{old}', f'"{new}'))
    done = vckpt("import", store, "run", source, check=False)
    if new.startswith("./"):
        assert done.returncode == 0, done.stderr
        assert components(vckpt, store) == {"model": 2}
        assert vckpt("cat", store, f"run/0/{index.name}").stdout == index.read_text()
    else:
        assert done.returncode == 1 and "is not said to be in a .safetensors file of this directory" in done.stderr


def test_a_name_with_two_dots_in_an_index(vckpt, store, source):
    put(source / "v1..2.safetensors", tensors(1, ["a"]))
    put(source / "model.safetensors.index.json", {"weight_map": {"a": "v1..2.safetensors"}})
    vckpt("import", store, "run", source)
    assert components(vckpt, store) == {"model": 1}


def test_two_models_at_the_top(vckpt, store, source):
    """Without a model.safetensors all files at the top are one component; what to do where they are not is said."""
    names = ["xl_base_1.0", "xl_base_1.0_0.9vae"]
    for i, name in enumerate(names):
        put(source / f"{name}.safetensors", tensors(i, ["a"]))
    done = vckpt("import", store, "run", source, check=False)
    assert (done.returncode == 1 and all(f"{source}/{name}.safetensors" in done.stderr for name in names) and
            done.stderr.endswith("they differ: import files that are models of their own each after a "
                                 "--component NAME\n"))
    vckpt("import", store, "run", *[w for name in names for w in ("--component", name, source / f"{name}.safetensors")])
    assert components(vckpt, store) == dict.fromkeys(names, 1)
    for name in names:
        shown = vckpt("cat", store, f"run/0/{name}.safetensors", text=False).stdout
        assert shown == (source / f"{name}.safetensors").read_bytes()


@pytest.mark.parametrize("raw", [b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}',
                                 b'{"weight_map": {"a": 1}}', LFS])
def test_an_index_that_is_none(vckpt, store, source, raw):
    put(source / "unet/model-00001-of-00001.safetensors", tensors(1))
    put(source / "unet/model.safetensors.index.json", raw)
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and f"{source}/unet/model.safetensors.index.json: " in done.stderr


def test_a_file_without_tensors(vckpt, store, source, tmp_path):
    """No component can show it, so it is kept as any other file."""
    empty = struct.pack("<Q", 34) + b'{"__metadata__": {"format": "pt"}}'
    put(source / "model.safetensors", tensors(1))
    put(source / "lora/adapter.safetensors", empty)
    put(source / "unet/part-00001-of-00002.safetensors", tensors(2, ["a"]))
    put(source / "unet/part-00002-of-00002.safetensors", empty)
    vckpt("import", store, "run/0", source)
    vckpt("export", store, "run/0", tmp_path / "out")
    found = files(tmp_path / "out")
    assert found.pop("manifest.json") and found == files(source)
    vckpt("import", store, "run/1", tmp_path / "out")
    assert vckpt("verify", store, "--paranoid").returncode == 0


def test_more_models_than_components(vckpt, store, source):
    one = struct.pack("<Q", 52) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'[:52] + b"x"
    for number in range(4097):
        put(source / f"{number // 60}/{number}.safetensors", one)
    done = vckpt("import", store, "run/0", source, check=False)
    assert done.returncode == 1 and f"{source}: it has more models than the 4096 components" in done.stderr


def test_an_index_that_names_fewer_tensors(vckpt, store, source):
    put(source / "model-00001-of-00001.safetensors", tensors(1))
    put(source / "model.safetensors.index.json", {"weight_map": {"a": "model-00001-of-00001.safetensors"}})
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and "it does not name tensor b, which is in model-00001-of-00001" in done.stderr


def test_a_whole_file_beside_parts(vckpt, store, source):
    """The component is what transformers reads; the parts are there, too, and named."""
    parts(source, 2, index="model.safetensors.index.json")
    put(source / "model.safetensors", tensors(9, ["whole"]))
    done = vckpt("import", store, "run", source)
    assert ("model.safetensors.index.json: readers take model.safetensors beside it and not this one, which is kept as "
            "component model-parts") in done.stderr
    assert components(vckpt, store) == {"model": 1, "model-parts": 2}
    for name, raw in files(source).items():
        assert vckpt("cat", store, f"run/0/{name}", text=False).stdout == raw, name


def test_an_index_that_was_left_over(vckpt, store, source):
    parts(source, 2, index="model.safetensors.index.json")
    for part in source.glob("model-*"):
        part.unlink()
    put(source / "model.safetensors", tensors(1))
    done = vckpt("import", store, "run", source)
    assert "none of the files that it names is there" in done.stderr and components(vckpt, store) == {"model": 2}


def test_names_that_two_components_would_have(vckpt, store, tmp_path):
    """Then each is shown by its own name, as ever."""
    for name in ("student", "teacher"):
        put(tmp_path / name / "model.safetensors", tensors(len(name), [name]))
    done = vckpt("import", store, "run", "--component", "student", tmp_path / "student", "--component", "teacher",
                 tmp_path / "teacher")
    assert "component student will be shown as student.safetensors" in done.stderr
    for name in ("student", "teacher"):
        assert vckpt("cat", store, f"run/0/{name}.safetensors", text=False).stdout == (
            tmp_path / name / "model.safetensors").read_bytes()
    put(tmp_path / "teacher" / "unet/x.safetensors", tensors(3))
    vckpt("import", store, "run", "--component", "teacher", tmp_path / "teacher")
    assert set(components(vckpt, store, "run/1")) == {"teacher", "teacher.unet"}


def test_a_folder_of_data_stays_files(vckpt, store, source):
    put(source / "model.safetensors", tensors(1))
    for i in range(70):
        put(source / f"latents/{i}.safetensors", tensors(i, ["x"], (2,)))
    vckpt("import", store, "run", source)
    assert components(vckpt, store) == {"model": 2}
    assert vckpt("cat", store, "run/0/latents/3.safetensors", text=False).stdout == (
        source / "latents/3.safetensors").read_bytes()


def test_an_export_that_was_edited(vckpt, store, source, tmp_path):
    sharded(source)
    vckpt("import", store, "run", source, "--set", "loss=2")
    out = tmp_path / "out"
    vckpt("export", store, "run/0", out)
    put(out / "config.json", {"a": 1, "torch_dtype": "bfloat16"})
    put(out / "notes.md", b"new")
    done = vckpt.json("import", store, "run", out)
    assert done["pieces_new"] == 0 and done["attributes"] == {"loss": "2"}
    assert "bfloat16" in vckpt("cat", store, "run/1/config.json").stdout
    put(out / "model-00002-of-00003.safetensors", tensors(77, ["t2"], (3, 3)))
    done = vckpt("import", store, "run", out, check=False)
    assert done.returncode == 1 and "remove " in done.stderr and "manifest.json" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    (out / "manifest.json").unlink()
    vckpt("import", store, "run", out)


@pytest.mark.parametrize("name", ["model.safetensors", "unet/diffusion_pytorch_model.safetensors", "x.npy",
                                  "model-00001-of-00001.safetensors"])
def test_a_git_lfs_pointer(vckpt, store, source, name):
    put(source / name, LFS)
    put(source / "config.json", {})
    done = vckpt("import", store, "run", source / name if name == "x.npy" else source, check=False)
    assert done.returncode == 1 and done.stderr == (
        f"vckpt import: {source}/{name}: a Git LFS pointer in place of the file: run git lfs pull in its repository\n")


@pytest.mark.parametrize("name", ["model.safetensors", "x.npy"])
def test_a_pickle_under_another_name(vckpt, store, source, name):
    put(source / name, b"PK\3\4" + bytes(1000))
    done = vckpt("import", store, "run", source / name if name == "x.npy" else source, check=False)
    assert done.returncode == 1 and f"{source}/{name}: vckpt opens no pickled file" in done.stderr


def test_one_file_of_a_checkpoint(vckpt, store, source):
    """Where a directory is what an import takes, the error names that."""
    for name in ".metadata", "__0_0.distcp", "manifest.json", "model.safetensors.index.json":
        put(source / name, b"PK\3\4" + bytes(100))
        done = vckpt("import", store, "run", source / name, check=False)
        assert done.returncode == 1 and done.stderr == (
            f"vckpt import: {source}/{name}: one file of a checkpoint: give the directory that it is in\n")


def test_a_git_lfs_pointer_beside_weights(vckpt, store, source):
    put(source / "model.safetensors", tensors(1))
    put(source / "pytorch_model.bin", LFS)
    done = vckpt("import", store, "run", source)
    assert f"{source}/pytorch_model.bin: a Git LFS pointer in place of the file; kept as it is" in done.stderr
    put(source / "x.distcp", b"")
    put(source / ".metadata", LFS)
    assert ".metadata: a Git LFS pointer" in vckpt("import", store, "run", source, check=False).stderr


def test_hidden_files(vckpt, store, source, tmp_path):
    put(source / "model.safetensors", tensors(1))
    for name in [".gitattributes", ".cache/huggingface/.gitignore", ".cache/.%", "..x", "sub/.y", ".vckpt-export.x"]:
        put(source / name, name.encode())
    put(source / ".git/config", b"[core]")
    put(source / "sub/.git", b"gitdir: ../..")
    done = vckpt("import", store, "run", source)
    assert done.stderr.count("a repository's own; left out") == 2 and f"{source}/.git: " in done.stderr
    vckpt("export", store, "run/0", tmp_path / "out")
    got, want = files(tmp_path / "out"), files(source)
    del got["manifest.json"], want[".git/config"], want["sub/.git"]
    want["%2Evckpt-export.x"] = want.pop(".vckpt-export.x")
    want[".cache/.%25"] = want.pop(".cache/.%")
    assert got == want
    (tmp_path / "out/manifest.json").unlink()
    vckpt("import", store, "run", tmp_path / "out")
    assert vckpt.json("ls", store, "run/1")["blobs"] == vckpt.json("ls", store, "run/0")["blobs"]


def test_one_component_exported(vckpt, store, source, tmp_path):
    pipeline(source)
    sharded(source)
    vckpt("import", store, "run", source)
    for component, want in {
            "unet": ["unet/config.json", "unet/diffusion_pytorch_model.safetensors"],
            "transformer": [f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)] + [
                "transformer/diffusion_pytorch_model.safetensors.index.json"],
            "model": [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"],
            "vae.decoder": ["vae/decoder/diffusion_pytorch_model.safetensors"]}.items():
        out = tmp_path / component
        vckpt("export", store, f"run/0/{component}", out)
        got = files(out)
        listed = json.loads(got.pop("manifest.json"))
        assert got == {n: (source / n).read_bytes() for n in want}
        assert [c["name"] for c in listed["components"]] == [component]
        assert {t["component"] for t in listed["tensors"]} == {component} and len(listed["blobs"]) == sum(
            not n.endswith(".safetensors") for n in want)
        assert vckpt.json("import", store, component, out)["pieces_new"] == 0
        assert set(components(vckpt, store, f"{component}/0")) == {component}
    vckpt("export", store, "run/0/unet", tmp_path / "npy", "--format", "npy")
    assert set(files(tmp_path / "npy")) == {"unet/a.npy", "unet/b.npy", "unet/config.json", "manifest.json"}
    done = vckpt("export", store, "run/0/nothing", tmp_path / "x", check=False)
    assert done.returncode == 1 and "run/0 has no component nothing" in done.stderr and not (tmp_path / "x").exists()


@pytest.mark.parametrize("name, raw, sentence", [
    ("x.pt", b"\x80\x02.", 'pickled file; Python takes its state over: vckpt.save("STORE/RUN", torch.load('),
    ("x.ckpt", b"PK\3\4", "torch.load("), ("x.h5", b"\x89HDF", "torch's distributed checkpoint (DCP)")])
def test_a_file_that_is_no_source(vckpt, store, source, name, raw, sentence):
    put(source / name, raw)
    done = vckpt("import", store, "run", source / name, check=False)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count(";") + done.stderr.count(":") < 6


def test_a_store_is_no_source(vckpt, store, source):
    put(source / "model.safetensors", tensors(1))
    vckpt("import", store, "minilm", source)
    for path, words in [(store / "runs/minilm", "a part of the store"), (store / "runs", "a part of the store"),
                        (store, "it is the store")]:
        done = vckpt("import", store, "run", path, check=False)
        assert done.returncode == 1 and f"{path}: {words} {store}; export the step that you mean" in done.stderr


def test_a_folder_without_weights(vckpt, store, source):
    put(source / "config.json", {})
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and done.stderr == (
        f"vckpt import: no tensors: {source} has no .safetensors file with tensors, and is neither a DCP checkpoint "
        "(.metadata) nor an exported step (manifest.json)\n")


def test_a_broken_file_in_a_folder(vckpt, store, source):
    put(source / "model.safetensors", tensors(1))
    put(source / "unet/x.safetensors", struct.pack("<Q", 1 << 40) + b"{}")
    done = vckpt("import", store, "run", source, check=False)
    assert done.returncode == 1 and f"{source}/unet/x.safetensors" in done.stderr


def test_files_that_are_sources_themselves(vckpt, store, source, tmp_path):
    """They come back by their own names, as a folder's do; --component names the file, too."""
    adapter(source)
    file = source / "adapter_model.safetensors"
    vckpt("import", store, "run", file)
    assert components(vckpt, store) == {"model": 1}
    vckpt("export", store, "run/0", tmp_path / "out")
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == file.read_bytes()
    assert vckpt.json("import", store, "again/0", tmp_path / "out")["pieces_new"] == 0
    assert vckpt("cat", store, "again/0/adapter_model.safetensors", text=False).stdout == file.read_bytes()

    vckpt("import", store, "run", "--component", "lora", file)
    assert vckpt("cat", store, "run/1/lora.safetensors", text=False).stdout == file.read_bytes()
    vckpt("import", store, "run", "--component", "model", file)
    assert vckpt("cat", store, "run/latest/model.safetensors", text=False).stdout == file.read_bytes()
    parts(source, 2)
    done = vckpt("import", store, "run", *sorted(source.glob("*.safetensors")))
    assert not done.stderr and components(vckpt, store, "run/3") == {"model": 3}
    for path in source.glob("*.safetensors"):
        assert vckpt("cat", store, f"run/3/{path.name}", text=False).stdout == path.read_bytes()


def test_two_files_of_one_name(vckpt, store, tmp_path):
    """As sources of one component; none of the two can have the name."""
    for i in range(2):
        put(tmp_path / f"{i}/x.safetensors", tensors(i, [f"t{i}"]))
    done = vckpt("import", store, "run", tmp_path / "0/x.safetensors", tmp_path / "1/x.safetensors")
    assert done.stderr.count("component model will be shown as model.safetensors") == 1
    assert vckpt("cat", store, "run/0/model.safetensors", text=False).returncode == 0
    done = vckpt("import", store, "run", "--component", "a", tmp_path / "0/x.safetensors", "--component", "b",
                 tmp_path / "1/x.safetensors")
    assert not done.stderr
    for i, name in enumerate("ab"):
        assert vckpt("cat", store, f"run/1/{name}.safetensors", text=False).stdout == (
            tmp_path / f"{i}/x.safetensors").read_bytes()


def test_a_source_without_tensors(vckpt, store, source):
    empty = struct.pack("<Q", 34) + b'{"__metadata__": {"format": "pt"}}'
    put(source / "empty.safetensors", empty)
    put(source / "x.safetensors", tensors(1))
    done = vckpt("import", store, "run", source / "empty.safetensors", check=False)
    assert done.returncode == 1 and done.stderr == (
        f"vckpt import: {source}/empty.safetensors: it has no tensors, and no other SOURCE has any\n")
    vckpt("import", store, "run", source / "empty.safetensors", source / "x.safetensors")
    assert vckpt("cat", store, "run/0/empty.safetensors", text=False).stdout == empty


ESCAPES = ["%2Fx", "%25", "a%2Fb", "%2E%2E", "%2e", "%00", "%0A", "..%2F..%2Fx", "%2Erc", "\x01", "%~0"]


@pytest.mark.parametrize("folder", ["", "sub/", "%2E%2E/", "%2F/", ".%/"])
def test_names_that_are_escapes(vckpt, store, source, tmp_path, folder):
    """A name that the escape makes comes back as it was; any other has its own escape from then on. None leaves the
    folder or meets another."""
    for i, name in enumerate(ESCAPES):
        put(source / f"{folder}{name}.safetensors", tensors(i, [f"t{i}"]))
        put(source / f"{folder}{name}.txt", name.encode())
    (source / f"{folder}%0A.safetensors").unlink()
    put(source / f"{folder}\n.safetensors", tensors(7, ["t7"]))
    done = vckpt("import", store, "run", source)
    outs = []
    for i, with_manifest in enumerate([True, True, False]):
        out = tmp_path / "out" / str(i)
        out.parent.mkdir(exist_ok=True)
        vckpt("export", store, f"run/{i}", out)
        assert sorted(p.name for p in out.parent.iterdir()) == [str(n) for n in range(i + 1)]
        found = files(out)
        assert found.pop("manifest.json")
        outs.append(found)
        if not with_manifest:
            (out / "manifest.json").unlink()
        assert vckpt.json("import", store, f"run/{i + 1}", out)["pieces_new"] == 0
    assert outs[0] == outs[1] == outs[2] and sorted(outs[0].values()) == sorted(files(source).values()), done.stderr
    kept = {n for n in files(source) if n in outs[0]}
    if folder in ("", "sub/"):
        assert {f"{folder}{n}.{end}" for n in ("%25", "%0A") for end in ("safetensors", "txt") if (
            n, end) != ("%0A", "safetensors")} <= kept
    assert vckpt("verify", store, "--paranoid").returncode == 0
