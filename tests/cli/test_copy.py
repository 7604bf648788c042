# SPDX-License-Identifier: Apache-2.0
"""vckpt copy: what arrives is what was there, byte for byte, and only what the other store lacked was read."""
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from saverlib import ALONE, Vckpt, ranks


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
