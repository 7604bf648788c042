# SPDX-License-Identifier: Apache-2.0
"""Mounts that show one form of the tensors (-o views=), and what says how to read types that numpy lacks."""
import json
import os
import subprocess

import numpy as np
import pytest

STEP = "a/step-00000001"
BOTH = ["npy", "safetensors"]
LACKING = {"embed.weight": "ml_dtypes.bfloat16", "layer.0.mlp.weight": "ml_dtypes.bfloat16",
           "f8": "ml_dtypes.float8_e4m3fn"}


def files(folder):
    return {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}


def inodes(folder):
    return {name: path.stat().st_ino for name, path in files(folder).items()}


@pytest.fixture
def complex_store(vckpt, store, tmp_path, source):
    """A component all of whose tensors a .safetensors holds, and one with a tensor that none can."""
    np.save(tmp_path / "c.npy", np.arange(4, dtype="c16"))
    np.save(tmp_path / "x.npy", np.arange(5, dtype="f4"))
    vckpt("import", store, STEP.replace("step-0000000", ""), source.path, "--component", "other", tmp_path / "c.npy",
          tmp_path / "x.npy")
    return store


@pytest.mark.parametrize("view", BOTH)
def test_one_form_alone(mount, complex_store, source, view):
    whole, m = mount(complex_store), mount(complex_store, f"views={view}")
    everything, shown = files(whole / STEP), files(m / STEP)
    assert len([n for n in everything if n.endswith(".npy")]) == len(source.tensors) + 2
    if view == "npy":
        wanted = {n for n in everything if not n.endswith(".safetensors")}
    else:
        wanted = {n for n in everything if not n.endswith(".npy")} | {"other/c.npy"}
    assert set(shown) == wanted and set(source.blobs) < wanted
    assert sorted(os.listdir(m / STEP)) == sorted({n.split("/")[0] for n in wanted})
    for name in set(everything) - wanted:
        with pytest.raises(FileNotFoundError):
            os.lstat(m / STEP / name)
    for name in wanted - {"manifest.json"}:
        assert shown[name].read_bytes() == everything[name].read_bytes(), name
    assert inodes(m / STEP) == {n: i for n, i in inodes(whole / STEP).items() if n in wanted}
    sizes = sum(p.stat().st_size for p in shown.values())
    assert int(subprocess.run(["du", "-sb", m / STEP], capture_output=True, text=True,
                              check=True).stdout.split()[0]) == sizes


def test_the_manifest_names_what_is_shown(mount, complex_store):
    told = {view: json.loads((mount(complex_store, f"views={view}") / STEP / "manifest.json").read_text())
            for view in BOTH}
    assert {t["file"].rpartition(".")[2] for t in told["npy"]["tensors"]} == {"npy"}
    assert {t["file"] for t in told["safetensors"]["tensors"]} == {"model.safetensors", "other.safetensors",
                                                                   "other/c.npy"}
    assert all(c["safetensors"] is None for c in told["npy"]["components"])
    assert told["npy"]["blobs"] == told["safetensors"]["blobs"]
    key = lambda t: (t["component"], t["name"])
    first, second = (sorted(({**t, "file": None} for t in told[view]["tensors"]), key=key) for view in BOTH)
    assert first == second


@pytest.mark.parametrize("options", [["views=npy,safetensors"], ["views=safetensors,uid=0,npy"],
                                     ["views=npy\\,safetensors"], ["noatime"]])
def test_both_forms(mount, sample_store, options):
    step = mount(sample_store, *options) / STEP
    assert (step / "model.safetensors").exists() and (step / "model" / "scalar.npy").exists()


def test_the_last_word_counts(mount, sample_store):
    step = mount(sample_store, "views=npy,views=safetensors") / STEP
    assert (step / "model.safetensors").exists() and not (step / "model").exists()


@pytest.mark.parametrize("option,words", [("views=all", ["option views=all: give npy, safetensors or both"]),
                                          ("views=", ["option views=: give npy, safetensors or both"]),
                                          ("views=npy,pickle", ["'pickle'"]),
                                          ("views=NPY", ["views=NPY: give npy, safetensors"])])
def test_other_words_are_refused(program, sample_store, tmp_path, option, words):
    (tmp_path / "p").mkdir()
    done = subprocess.run([program, sample_store, tmp_path / "p", "-o", option], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and all(w in done.stderr for w in words), done.stderr


def test_stats_say_which_forms(mount, sample_store):
    text = (mount(sample_store, "views=npy") / ".vckpt" / "stats").read_text()
    assert 'vckpt_feature{name="npy",why="shown"} 1' in text
    assert 'vckpt_feature{name="safetensors",why="left out, as asked"} 0' in text


def test_a_copy_of_one_form_has_each_tensor_once(mount, sample_store, tmp_path):
    """What docs/mount.md says of copies."""
    step = mount(sample_store, "views=safetensors") / STEP
    subprocess.run(["cp", "-r", step, tmp_path / "copy"], check=True, timeout=60)
    assert not list((tmp_path / "copy").rglob("*.npy"))
    whole = mount(sample_store) / STEP
    subprocess.run(["rsync", "-a", "--exclude=/*/*.npy", f"{whole}/", tmp_path / "rsync"], check=True, timeout=60)
    assert set(files(tmp_path / "rsync")) == set(files(tmp_path / "copy"))


def test_types_that_numpy_lacks(mount, sample_store, source):
    step = mount(sample_store) / STEP
    for t in json.loads((step / "manifest.json").read_text())["tensors"]:
        names = os.listxattr(step / t["file"])
        if t["name"] not in LACKING:
            assert "user.vckpt.numpy" not in names
            continue
        assert "user.vckpt.numpy" in names
        said = os.getxattr(step / t["file"], "user.vckpt.numpy").decode()
        assert said == f"numpy.load(f).view({LACKING[t['name']]})"
        assert {"ml_dtypes.bfloat16": "bf16", "ml_dtypes.float8_e4m3fn": "f8_e4m3fn"}[LACKING[t["name"]]] == t["dtype"]
        assert np.load(step / t["file"]).dtype.kind == "V"


# ---- and back ----

def step_of(step):
    """What an import has to bring back: attributes, components, tensors and blobs, with digests."""
    told = json.loads((step / "manifest.json").read_text())
    for x in told["tensors"] + told["blobs"]:
        x["digest"] = os.getxattr(step / x["file"], "user.vckpt.digest").decode()
    return {k: told[k] for k in ("attributes", "components", "tensors", "blobs")}


def copy_of(step, tmp_path):
    subprocess.run(["cp", "-r", step, tmp_path / "copy"], check=True, timeout=60)
    return tmp_path / "copy"


@pytest.mark.parametrize("views", ["npy,safetensors", *BOTH])
@pytest.mark.parametrize("how", ["copied", "in place"])
def test_a_step_of_a_mount_is_imported(vckpt, mount, complex_store, tmp_path, views, how):
    m, whole = mount(complex_store, f"views={views}"), mount(complex_store)
    vckpt("import", complex_store, "b/2", copy_of(m / STEP, tmp_path) if how == "copied" else m / STEP)
    wanted, got = step_of(whole / STEP), step_of(whole / "b" / "step-00000002")
    assert got == wanted
    if views != "npy":      # the imported file's own header came along
        for name in ("model.safetensors", "other.safetensors"):
            assert (whole / "b" / "step-00000002" / name).read_bytes() == (whole / STEP / name).read_bytes()
    assert vckpt.json("import", complex_store, "c", m / "b" / "step-00000002")["piece_bytes_new"] == 0


def test_a_copy_whose_forms_disagree(vckpt, mount, sample_store, store, tmp_path):
    copy = copy_of(mount(sample_store) / STEP, tmp_path)
    file = copy / "model" / "layer.0.mlp.weight.npy"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    done = vckpt("import", store, "a", copy, check=False)
    assert (done.returncode == 1 and "tensor layer.0.mlp.weight is in" in done.stderr and
            "they differ" in done.stderr)
    assert vckpt.json("ls", store)["runs"] == []
