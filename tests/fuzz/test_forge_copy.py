# SPDX-License-Identifier: Apache-2.0
"""Stores with all checksums right and wrong intentions (forge.py) as the source of a copy, and as what is copied to:
what arrives is what reading the source gives, or there is an error, and the other store stays sound. (A field that this
vckpt does not know comes along in a layout; --paranoid names it.)"""
import json
import resource
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import forge
from forge_many import CHAINED, GOLDEN, SHAPES

ENDS = {0, 1, 3, 4, 5}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{shape: (path, runs)} of the golden stores."""
    folder = tmp_path_factory.mktemp("forge")
    for name, archive in ("golden", GOLDEN), ("chained", CHAINED):
        shutil.unpack_archive(archive, folder)
        (folder / "store").rename(folder / name)
    return {shape: (folder / store, runs) for shape, (store, runs) in SHAPES.items() if (folder / store).exists()}


def steps(vckpt, store):
    found = vckpt("ls", store, "--json", check=False)
    runs = [r["run"] for r in json.loads(found.stdout)["runs"]] if found.returncode == 0 else []
    return {f"{run}/{s['step']}" for run in runs for s in vckpt.json("ls", store, run)["steps"]}


def files(vckpt, store, step, out):
    """None: it cannot be read."""
    done = vckpt("export", store, step, out, "-q", check=False)
    found = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "manifest.json"}
    shutil.rmtree(out, ignore_errors=True)
    return found if done.returncode == 0 else None


@pytest.mark.parametrize("shape", ["files", "ranks", pytest.param("snapshot", marks=pytest.mark.full),
                                   pytest.param("chains", marks=pytest.mark.full)])
def test_a_forged_source(vckpt, bases, tmp_path, scale, seed, shape):
    (path, runs), copied = bases[shape], 0
    for n in range(scale(3, 300)):
        number = seed % 10**6 + n
        forged = forge.forge(path, tmp_path / "from", number, runs)
        vckpt("init", tmp_path / "to", "--no-reserve")
        done = vckpt("copy", tmp_path / "from", *runs, "--to", tmp_path / "to", check=False)
        assert done.returncode in ENDS and (done.returncode == 0 or "vckpt copy: " in done.stderr), (
            number, forged, done)
        assert vckpt("verify", tmp_path / "to", "--paranoid", check=False).returncode in (0, 4), (number, forged, done)
        for step in steps(vckpt, tmp_path / "to"):
            here = files(vckpt, tmp_path / "from", step, tmp_path / "a")
            there = files(vckpt, tmp_path / "to", step, tmp_path / "b")
            assert there is not None and (here is None or here == there), (number, forged, step)
            copied += 1
        for name in "from", "to":
            shutil.rmtree(tmp_path / name)
    assert copied or scale(0, 1) == 0


@pytest.mark.parametrize("shape", ["files", "ranks"])
def test_a_forged_target(vckpt, bases, tmp_path, scale, seed, shape):
    """A sound source, into a run of a store that claims to have its pieces."""
    path, runs = bases[shape]
    wanted = {step: files(vckpt, path, step, tmp_path / "a") for step in steps(vckpt, path)
              if step.split("/")[0] in runs}
    vckpt("init", tmp_path / "from", "--no-reserve")            # of another id
    vckpt("copy", path, *runs, "--to", tmp_path / "from")
    for n in range(scale(3, 300)):
        number = seed % 10**6 + n
        forged = forge.forge(path, tmp_path / "to", number, runs)
        for run in runs:
            done = vckpt("copy", tmp_path / "from", run, "--to", tmp_path / "to", "--as", f"{run}.new", check=False)
            assert done.returncode in ENDS, (number, forged, done)
        for step in steps(vckpt, tmp_path / "to"):
            if ".new/" in step:
                got = files(vckpt, tmp_path / "to", step, tmp_path / "b")
                assert got == wanted[step.replace(".new/", "/")], (number, forged, step)
        shutil.rmtree(tmp_path / "to")


def cpu_s():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


@pytest.mark.full
def test_digests_that_begin_alike(vckpt, tmp_path):
    """Digests of a source are what its maker wrote, until the bytes are there: many with the same beginning cost no
    more than others."""
    random, took = np.random.default_rng(1), {}
    save_file({f"t{i}": random.integers(0, 255, 1000, dtype="u1") for i in range(20000)}, tmp_path / "m.safetensors")
    vckpt("init", tmp_path / "sound", "--no-reserve")
    vckpt("import", tmp_path / "sound", "r/1", tmp_path / "m.safetensors", "-q", "--no-index")
    store = forge.Store(tmp_path / "sound")
    for pack in store.packs.values():
        for made in pack.objects:
            if made.kind == 1:
                made.digest = bytes(4) + made.digest[4:]
    store.build(tmp_path / "forged", 1, 0)
    for name, code in ("sound", 0), ("forged", 3):
        vckpt("init", tmp_path / f"to.{name}", "--no-reserve")
        before = cpu_s()
        done = vckpt("copy", tmp_path / name, "--to", tmp_path / f"to.{name}", "-q", check=False)
        took[name] = cpu_s() - before
        assert done.returncode == code and (code == 0 or "another digest" in done.stderr), done
    assert took["forged"] < took["sound"] + .1, took
