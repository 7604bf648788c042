# SPDX-License-Identifier: Apache-2.0
"""-o layouts=: shards by a layout file, of a model that was imported whole."""
import json
import subprocess

import numpy as np
import pytest
import safetensors

from .conftest import Tensor, wait_until, write_safetensors

STEP = "a/step-00000001/mesh"
LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def model(vckpt, tmp_path_factory):
    """A small Llama with merged gates, and its arrays."""
    folder = tmp_path_factory.mktemp("llama")
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(shape).astype("f4") for name, shape in {
        "model.embed_tokens.weight": (33, 16), LAYER + "self_attn.q_proj.weight": (16, 16),
        LAYER + "self_attn.q_proj.bias": (16,), LAYER + "self_attn.o_proj.weight": (16, 16),
        LAYER + "self_attn.o_proj.bias": (16,), LAYER + "self_attn.qkv.weight": (48, 16),
        LAYER + "mlp.gate_up_proj.weight": (80, 16), LAYER + "mlp.down_proj.weight": (16, 40),
        "model.norm.weight": (16,)}.items()}
    write_safetensors(folder / "model.safetensors", {n: Tensor("F32", a.shape, a.tobytes()) for n, a in arrays.items()})
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", folder / "model.safetensors")
    return folder / "store", arrays


def shards(arrays, p, i, merged):
    """What the llama preset gives rank i of tp=p; merged: the qkv weight is cut, too."""
    rows = lambda a, k=1: np.concatenate([part[len(part) // p * i:len(part) // p * (i + 1)] for part in np.split(a, k)])
    out = {}
    for name, a in arrays.items():
        if "embed" in name:
            c = -(-len(a) // p)
            a = a[c * i:c * (i + 1)]
        elif "q_proj" in name:
            a = rows(a)
        elif "gate_up" in name:
            a = rows(a, 2)
        elif "qkv" in name and merged:
            a = rows(a, 3)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            a = rows(a.T).T
        out[name] = a
    return out


def check(folder, wanted):
    with safetensors.safe_open(folder / "model.safetensors", "numpy") as f:
        assert set(f.keys()) == set(wanted)
        for name, a in wanted.items():
            assert f.get_tensor(name).shape == a.shape and (f.get_tensor(name) == a).all(), name


@pytest.mark.parametrize("p", [1, 2, 8])
def test_a_preset(mount, model, p):
    m = mount(model[0], "layouts=llama")
    for i in range(p):
        check(m / STEP / f"tp={p}" / f"rank-{i}", shards(model[1], p, i, merged=False))
    told = json.loads((m / STEP / f"tp={p}" / "manifest.json").read_text())
    lines = {t["name"]: (t["placements"], t.get("line")) for t in told["tensors"]}
    assert lines["model.norm.weight"] == ("R", None)
    assert lines[LAYER + "mlp.gate_up_proj.weight"] == ("IS(0,2)", "llama:4")
    assert 'vckpt_feature{name="layouts",why="llama"} 1' in (m / ".vckpt" / "stats").read_text()


def test_a_file(mount, model, tmp_path, vckpt):
    file = tmp_path / "mine.layout"
    file.write_text("# merged q, k and v of as many heads\n*.qkv.weight  tp=IS(0,3)\npreset llama\n")
    m = mount(model[0], f"layouts={file}")
    for i in range(2):
        check(m / STEP / "dp=3,tp=2" / f"rank-{2 + i}", shards(model[1], 2, i, merged=True))
        raw = (m / STEP / "tp=2" / f"rank-{i}" / "model.safetensors").read_bytes()
        assert vckpt("cat", model[0], f"a/1/mesh/tp=2/rank-{i}/model.safetensors", "--layouts", file,
                     text=False).stdout == raw


@pytest.mark.parametrize("line,path,first", [
    ("tp=S(0) dp=S(0)", "dp=2,tp=2", "tp"), ("dp=S(0) tp=S(0)", "dp=2,tp=2", "dp"),
    ("tp=S(0) dp=S(0)", "tp=2,dp=2", "tp")])
def test_a_line_says_the_order(mount, model, tmp_path, line, path, first):
    """Of 33 rows, which do not divide: what the dimension that the line names first leaves is cut by the other."""
    (tmp_path / "f").write_text(f"*embed* {line}\n")
    folder = mount(model[0], f"layouts={tmp_path / 'f'}") / STEP / path
    a, names = model[1]["model.embed_tokens.weight"], [word[:2] for word in path.split(",")]
    for rank in range(4):
        at = dict(zip(names, divmod(rank, 2)))
        rows = a[:17] if at.pop(first) == 0 else a[17:]
        rows = rows[:-(-len(rows) // 2)] if at.popitem()[1] == 0 else rows[-(-len(rows) // 2):]
        with safetensors.safe_open(folder / f"rank-{rank}" / "model.safetensors", "numpy") as f:
            assert (f.get_tensor("model.embed_tokens.weight") == rows).all()
    told = {t["name"]: t.get("order") for t in json.loads((folder / "manifest.json").read_text())["tensors"]}
    assert told.pop("model.embed_tokens.weight") == (None if path.startswith(first) else ["tp", "dp"])
    assert not any(told.values())


def test_saved_is_what_the_step_says(mount, model, tmp_path):
    (tmp_path / "f").write_text("*q_proj* saved\n* tp=S(0)\n")
    m = mount(model[0], f"layouts={tmp_path / 'f'}")
    told = json.loads((m / STEP / "tp=2" / "manifest.json").read_text())["tensors"]
    assert {t["placements"]: t.get("recorded", True) for t in told} == {"R": False, "S(0)": True}


def test_what_does_not_fit_names_the_line(mount, model, tmp_path):
    (tmp_path / "f").write_text("\n*.gate_up_proj.* tp=IS(0,3)\n")
    m = mount(model[0], f"layouts={tmp_path / 'f'}", log=tmp_path / "log")
    assert not (m / STEP / "tp=2").exists()
    assert wait_until(lambda: f"gate_up_proj.weight: {tmp_path / 'f'}:2: placement IS(0,3)" in
                      (tmp_path / "log").read_text(), 60), (tmp_path / "log").read_text()
    assert (m / STEP / "ep=2").is_dir()


@pytest.mark.parametrize("text,words", [("a tp=Q", ":1: "), ("\npreset x", ":2: there is no preset 'x'")])
@pytest.mark.parametrize("more", [[], ["--fake"]])
def test_a_file_that_is_wrong(program, model, tmp_path, text, words, more):
    (tmp_path / "p").mkdir()
    (tmp_path / "f").write_text(text)
    done = subprocess.run([program, *more, model[0], tmp_path / "p", "-o", f"layouts={tmp_path / 'f'}"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"{tmp_path / 'f'}{words}" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("value,words", [
    ("none", "none cannot be read"), ("/", "not a regular file"), ("", "needs a value")])
def test_no_file(program, model, tmp_path, value, words):
    (tmp_path / "p").mkdir()
    done = subprocess.run([program, model[0], tmp_path / "p", "-o", f"layouts={value}"], capture_output=True, text=True,
                          timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
