# SPDX-License-Identifier: Apache-2.0
"""vckpt repack and vckpt gc --repack-below: a step is the same before and after, in packs of one writer, and what
nothing needs any more goes."""
import pathlib
import shutil
import struct
import subprocess

import numpy as np
import placelib
import pytest
import xxhash
from safetensors.numpy import save_file

from saverlib import Vckpt
from test_copy import fill, job, tree

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
NOW = ["--grace", "0", "--heartbeat", "0"]


@pytest.fixture
def api(build):
    return Vckpt(build)


def shown(vckpt, store, step, out):
    """What a step shows: its export, sums, and some of its ranks' files."""
    files = tree(vckpt, store, step, out)
    shutil.rmtree(out)
    return files


def uncut(files):
    """Without the digests of tensors, which depend on how ranks cut them."""
    tensors = [{k: v for k, v in t.items() if k != "digest"} for t in files["manifest.json"]["tensors"]]
    return files | {"manifest.json": files["manifest.json"] | {"tensors": tensors}}


def whole(path, number):
    """Which ranks' parts have rows; those of rank 0 have to be whole. By tests/golden/reader.py."""
    step = placelib.Step(path, "run", number)
    for key, boxes in step.parts[0].rows.items():
        assert list(boxes) == [step.look[key].grid.whole] or len(step.parts[1].rows), key
    return [n for n, part in enumerate(step.parts) if part.rows]


def packs(store):
    return {p.name: p.stat().st_size for p in store.glob("packs/*/*.pack")}


def collect(vckpt, store, *words):
    for _ in range(2):
        vckpt("gc", store, *NOW, "-q", *words)


@pytest.fixture(scope="module")
def thirds(vckpt, tmp_path_factory):
    """run/0 has three tensors of 400 KB; run/1 and run/2 go on with one of them, and run/1 of other/ with another. Then
    run/0 is gone: of its pack two thirds live, of which run/1 and run/2 need one."""
    folder = tmp_path_factory.mktemp("thirds")
    rng = np.random.default_rng(8)
    t = {name: rng.integers(0, 1 << 32, (100, 1000), dtype="u4") for name in "abcdef"}
    vckpt("init", folder / "store", "--no-reserve")
    for run, names in ("run", "abc"), ("run", "ad"), ("run", "ae"), ("other", "bf"), ("run", "f"):
        save_file({name: t[name] for name in names}, folder / "m.safetensors")
        (folder / "m.json").write_text(names)
        vckpt("import", folder / "store", run, folder / "m.safetensors", "-q", "--set", f"names={names}")
    vckpt("rm", folder / "store", "run/0", "-q")
    return folder / "store"


@pytest.fixture
def some(thirds, store):
    shutil.rmtree(store)
    shutil.copytree(thirds, store)
    return store


STEPS = ["run/1", "run/2", "other/0", "run/3"]


@pytest.mark.parametrize("shape", [(512, 512), (400, 300)], ids=["cut along the grid", "cut elsewhere"])
def test_what_ranks_saved_is_the_same(vckpt, api, store, tmp_path, rng, shape):
    data, along = fill(rng), shape == (512, 512)
    data["m.layer"] = np.resize(data["m.layer"], shape) + np.arange(shape[1], dtype="f4")
    job(api, store, data)
    vckpt("pin", store, "run/0", "--reason", "ours")
    vckpt("tag", store, "run/0", "best")
    cats = ["mesh/dp=2,tp=2/manifest.json", "mesh/dp=2,tp=2/rank-00003/model.safetensors",
            "mesh/tp=4/rank-00001/model.safetensors", "ranks/00003/loader", "ranks/00002/big"]

    def all_of():
        row = vckpt.json("ls", store, "run")["steps"][0]
        row = {k: v for k, v in row.items() if k not in ("entry", "new_bytes", "manifest", "attempt")}
        files = shown(vckpt, store, "run/0", tmp_path / "out")
        return (files if along else uncut(files), row,
                [vckpt("cat", store, f"run/0/{path}", text=False).stdout for path in cats])
    want, many = all_of(), packs(store)
    assert whole(store, 0) == [0, 1, 2, 3]
    done = vckpt.json("repack", store, "run/best")
    (step,) = done["steps"]
    assert step["repacked"] and step["packs"] == 6 < step["packs_before"] == len(many) and not done["failed"]
    assert all_of() == want and whole(store, 0) == [0]
    assert vckpt.json("verify", store, "--paranoid")["faults"] == 0
    collect(vckpt, store)
    left = packs(store)
    assert sorted(name.split("-", 2)[-1] for name in left) == [         # optimizer's pieces are among model's
        "0-blobs.pack", "0-meta.pack", "0-model.pack", "0-state.pack", "1-blobs.pack", "1-meta.pack"]
    assert not set(left) & set(many) and all_of() == want and vckpt.json("verify", store)["faults"] == 0
    done = vckpt.json("repack", store, "run/0")                 # again: nothing to do
    assert [s["repacked"] for s in done["steps"]] == [False] and packs(store) == left
    job(api, store, data, step=1, launch="next")                # it is a base as any: what ranks cut as the grid does
    assert (vckpt.json("ls", store, "run")["steps"][1]["new_bytes"] < 100000) == along


def test_whole_pieces_are_shared(vckpt, api, store, rng):
    """By steps that are named together; and what was cut anew is equal to what ranks have saved."""
    data = fill(rng)
    job(api, store, data)
    data["m.zeros"][5] = 1
    job(api, store, data, step=1, launch="next")
    job(api, store, data, step=2, launch="last")
    first, second = vckpt.json("repack", store, "run/0", "run/1")["steps"]
    assert first["bytes"] > 400000 and second["bytes"] < first["bytes"] / 2, (first, second)
    assert whole(store, 0) == whole(store, 1) == [0] and whole(store, 2) != [0]
    assert vckpt("diff", store, "run/1", "run/2", check=False).returncode == 0
    done = vckpt.json("diff", store, "run/0", "run/2", "--values", check=False)
    assert [(d["component"], d["name"]) for d in done["differences"]] == [("model", "zeros")], done
    collect(vckpt, store)
    assert vckpt.json("verify", store)["faults"] == 0


@pytest.mark.parametrize("lies", [False, True], ids=["damaged", "a lie"])
def test_a_wrong_piece_is_not_cut_anew(vckpt, api, store, rng, lies):
    """Neither one that its check refutes, nor one whose check is that of its bytes, and whose digest is another's."""
    data = fill(rng)
    data["m.layer"] = np.frombuffer(rng.randbytes(data["m.layer"].nbytes), "f4").reshape(data["m.layer"].shape)
    job(api, store, data)
    o = next(o for _, o in placelib.Step(store, "run", 0).pieces("model/layer") if o.pack.endswith("-1-model"))
    (path,) = store.glob(f"packs/*/{o.pack}.pack")
    good = path.read_bytes()
    bad, seed = bytearray(good), struct.unpack_from("<Q", o.ref.digest)[0]
    bad[o.ref.offset] ^= 1
    assert o.ref.codec == 0
    if lies:
        block = bytes(bad[o.ref.offset:o.ref.offset + min(o.ref.raw, 16384)])
        struct.pack_into("<Q", bad, o.ref.checks, xxhash.xxh3_64_intdigest(block, seed))
        path.write_bytes(bad)
        vckpt("cat", store, "run/0/model.safetensors", text=False)      # readers do not see it
    path.write_bytes(bad)
    before, entry = packs(store), vckpt.json("ls", store, "run")["steps"][0]["entry"]
    done = vckpt("repack", store, "run/0", check=False)
    assert done.returncode == 3 and "run/0: tensor model/layer" in done.stderr and done.stderr.count("\n") == 1, done
    assert packs(store) == before and vckpt.json("ls", store, "run")["steps"][0]["entry"] == entry
    path.write_bytes(good)
    vckpt("repack", store, "run/0")


def test_below(vckpt, some, tmp_path):
    want = {step: shown(vckpt, some, step, tmp_path / "out") for step in STEPS}
    before = packs(some)
    none = vckpt.json("gc", some, "-n", "--repack-below", "50%")["repack"]
    assert (none["packs"], none["steps"]) == (0, []), none             # of its largest user a third, of all two
    would = vckpt.json("gc", some, "-n", "--repack-below", "70")["repack"]
    assert (would["packs"], would["live_bytes"]) == (1, 800000) and 1200000 < would["bytes"] < 1250000
    assert {f"{s['run']}/{s['step']}" for s in would["steps"]} == {"run/1", "run/2", "other/0"}
    assert packs(some) == before
    done = vckpt.json("gc", some, "--repack-below", "70%")
    by = {f"{s['run']}/{s['step']}": s for s in done["repack"]["steps"]}
    assert sum(s["bytes"] for s in by.values()) == 800000 + sum(s["bytes"] for s in by.values() if s["bytes"] < 4000)
    assert by["run/1"]["bytes"] >= 400000 > by["run/2"]["bytes"]       # written once
    assert not done["repack"]["failed"] and not done["repack"]["kept"]
    collect(vckpt, some)
    dead = [n for n, size in before.items() if size > 1200000]
    assert len(dead) == 1 and dead[0] not in packs(some)
    assert {step: shown(vckpt, some, step, tmp_path / "out") for step in STEPS} == want
    assert vckpt.json("verify", some, "--paranoid")["faults"] == 0
    again = vckpt.json("gc", some, "--repack-below", "100%", *NOW)["repack"]
    assert again["steps"] == [] and again["packs"] == 0, again
    rows = vckpt.json("du", some, "--packs")["packs"]
    assert all(p["dead_bytes"] < 16384 for p in rows), rows             # heads, alignment, footers


@pytest.mark.parametrize("words, said", [
    (["gc", "--repack-below", "0"], "give a share"), (["gc", "--repack-below", "101%"], "give a share"),
    (["gc", "--repack-below", "50%%"], "give a share"), (["repack", "run"], "give a whole step"),
    (["repack", "run/1/model"], "give a whole step"), (["repack"], "")])
def test_refused(vckpt, some, words, said):
    done = vckpt(words[0], some, *words[1:], check=False)
    assert done.returncode == 2 and said in done.stderr, done


def test_not_there(vckpt, some):
    for step in "run/0", "run/77", "none/0":
        done = vckpt("repack", some, "run/1", step, check=False)
        assert done.returncode == 1 and "no step" in done.stderr or "no run" in done.stderr, done
        assert done.stdout == ""


@pytest.mark.parametrize("version, said", [
    ("v1", "format 1"), ("v2-list-3", "made by an older vckpt: its steps cannot be repacked")])
def test_older_stores(vckpt, tmp_path, version, said):
    shutil.unpack_archive(GOLDEN / version / "store.tar.xz", tmp_path)
    store = next(p.parent for p in tmp_path.rglob("vckpt.store"))
    run = vckpt.json("ls", store)["runs"][0]["run"]
    for words in ["repack", store, f"{run}/latest"], ["gc", store, "--repack-below", "50%"]:
        done = vckpt(*words, check=False)
        assert done.returncode == 1 and said in done.stderr, done


def test_every_kind_of_step(vckpt, tmp_path, scale, rng):
    """Of the newest golden store."""
    shutil.unpack_archive(GOLDEN / "v2-list-4" / "store.tar.xz", tmp_path)
    store = next(p.parent for p in tmp_path.rglob("vckpt.store"))
    steps = [f"{run['run']}/{s['step']}" for run in vckpt.json("ls", store)["runs"]
             for s in vckpt.json("ls", store, run["run"])["steps"]]
    steps = rng.sample(steps, min(len(steps), scale(5, 1000)))
    want = {step: uncut(shown(vckpt, store, step, tmp_path / "out")) for step in steps}
    done = vckpt.json("repack", store, *steps)
    assert len(done["steps"]) == len(steps) > 1 and not done["kept"]
    collect(vckpt, store)
    assert {step: uncut(shown(vckpt, store, step, tmp_path / "out")) for step in steps} == want
    assert vckpt.json("verify", store, "--paranoid")["faults"] == 0


def test_a_damaged_piece(vckpt, some, tmp_path):
    pack = next(p for p in some.glob("packs/*/*.pack") if p.stat().st_size > 1200000)
    with open(pack, "r+b") as f:
        f.seek(5000)
        f.write(b"\xff\xfe\xfd\xfc")
    entries = {s["step"]: s["entry"] for s in vckpt.json("ls", some, "run")["steps"]}
    done = vckpt("repack", some, "run/1", "run/3", check=False)
    assert done.returncode == 3 and "run/1" in done.stderr and "run/step-00000003 repacked" in done.stdout, done
    now = {s["step"]: s["entry"] for s in vckpt.json("ls", some, "run")["steps"]}
    assert now[1] == entries[1] and now[2] == entries[2] and now[3] > entries[3]
    done = vckpt("gc", some, "--repack-below", "70%", "--json", check=False)
    assert done.returncode == 3 and '"marked"' in done.stdout, done


def test_a_job_at_work_keeps_its_base(vckpt, api, some):
    saver = api.saver(str(some), "run", launch="alive")
    try:
        for step, text in ("run/3", "go on from this step"), ("run/2", ""):
            done = vckpt("repack", some, step, check=False)
            assert (done.returncode, text in done.stdout) == (1 if text else 0, True), done
            assert not text or "a writer is at work" in done.stdout, done
    finally:
        saver.close()
    vckpt("repack", some, "run/3")


def test_a_reader_goes_on(vckpt, some, tmp_path):
    """Its packs are open, the step is replaced, and they are deleted."""
    import vckpt as package
    want = vckpt("cat", some, "run/1/m.safetensors", text=False).stdout
    with package.open(f"{some}/run/1") as step:
        first = np.array(step["a"])
        vckpt("gc", some, "--repack-below", "100%", "-q")
        assert (np.array(step["d"]) != 0).any() and (np.array(step["a"]) == first).all()
    collect(vckpt, some)
    assert vckpt("cat", some, "run/1/m.safetensors", text=False).stdout == want


def test_two_at_once(vckpt, some, tmp_path):
    want = {step: shown(vckpt, some, step, tmp_path / "out") for step in STEPS}
    words = [vckpt.path, "gc", str(some), "--repack-below", "100%", "--json"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for p in both:
        out, said = p.communicate(timeout=120)
        assert p.returncode == 0, (out, said)
    collect(vckpt, some, "--repack-below", "100%")
    assert {step: shown(vckpt, some, step, tmp_path / "out") for step in STEPS} == want
    assert vckpt.json("verify", some, "--paranoid")["faults"] == 0
    assert sum(packs(some).values()) < 6 * 400000 + 200000


def test_thinned_and_pinned(vckpt, store, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    for step in range(2):
        for component in "model", "optimizer":
            save_file({"w": np.full(1000, step)}, source / f"{component}.safetensors")
        (source / "note").write_text("x" * 100)
        vckpt("import", store, f"a/{step}", source, "-q")
    vckpt("prune", store, "a", "--keep-last", "2", "--thin", "optimizer", "--older-than", "0s", "-y", "-q")
    vckpt("pin", store, "a/0")
    want = shown(vckpt, store, "a/0", tmp_path / "out")
    vckpt("repack", store, "a/0", "a/1")
    assert shown(vckpt, store, "a/0", tmp_path / "out") == want and "note" in want
    done = vckpt("cat", store, "a/0/optimizer/w", check=False)
    assert "component 'optimizer' of a/0 was thinned" in done.stderr
    assert vckpt.json("ls", store, "a")["steps"][0]["pinned"]["reason"] == ""
    collect(vckpt, store)
    assert vckpt.json("verify", store, "--paranoid")["faults"] == 0


def test_long_blobs_and_equal_pieces(vckpt, store, tmp_path, rng):
    """A blob that is streamed; one object for what several tensors and ranks have alike."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "long").write_bytes(rng.randbytes(40 << 20))
    (tmp_path / "src" / "empty").write_bytes(b"")
    w = np.random.default_rng(2).standard_normal((1000, 500)).astype("f4")
    save_file({"x": w, "y": w, "z": np.zeros(10**6, "f4")}, tmp_path / "src" / "model.safetensors")
    vckpt("import", store, "a/5", tmp_path / "src", "-q")
    want, size = shown(vckpt, store, "a/5", tmp_path / "out"), sum(packs(store).values())
    vckpt("repack", store, "a/5", "-q")
    collect(vckpt, store)
    assert shown(vckpt, store, "a/5", tmp_path / "out") == want
    assert abs(sum(packs(store).values()) - size) < 16384 and vckpt.json("verify", store)["faults"] == 0
