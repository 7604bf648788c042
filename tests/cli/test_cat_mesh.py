# SPDX-License-Identifier: Apache-2.0
"""vckpt cat of what a rank of a mesh holds."""
import json
import random

import numpy as np
import pytest

import meshlib
from meshlib import Tensor
from saverlib import Vckpt


@pytest.fixture(scope="module")
def saved(build, tmp_path_factory):
    """Four ranks of dp=2,tp=2: FSDP over tensor parallelism, merged weights, and an optimizer's state."""
    rng, api = random.Random(5), Vckpt(build)
    array = lambda kind, *shape: np.frombuffer(rng.randbytes(int(np.prod(shape)) * np.dtype(kind).itemsize),
                                               kind).reshape(shape)
    mesh = [("dp", 2), ("tp", 2)]
    tensors = [Tensor("model/column", array("f4", 64, 40), mesh, (("SS", 0, 2), ("S", 0))),
               Tensor("model/row", array("f2", 30, 52), mesh, (("S", 0), ("S", 1))),
               Tensor("model/qkv", array("u2", 24, 10), mesh, (("R",), ("IS", 0, 3))),
               Tensor("model/norm", array("f4", 7), mesh, (("R",), ("R",))),
               Tensor("optimizer/row", array("f4", 30, 52), mesh, (("S", 0), ("S", 1)))]
    store = api.store(tmp_path_factory.mktemp("saved") / "store")
    meshlib.save(api, store, tensors, 4)
    return store, tensors


@pytest.mark.parametrize("asked", [[("dp", 2), ("tp", 2)], [("tp", 4)], [("tp", 1), ("ep", 2)]])
def test_cat_a_rank(vckpt, saved, asked):
    store, tensors = saved
    for rank, wanted in enumerate(meshlib.expected(tensors, asked)):
        for component in ("model", "optimizer"):
            name = rng_name = f"mesh/{meshlib.text(asked)}/rank-{rank:05}/{component}.safetensors"
            if rank % 2:
                rng_name = name.replace("rank-0000", "rank-")
            raw = vckpt("cat", store, f"run/0/{rng_name}", text=False).stdout
            meshlib.same(meshlib.parse(raw), wanted, component)
            if not rank:
                assert vckpt("cat", store, f"run/0/{name}", "--raw", text=False).stdout == raw


def test_cat_the_manifest_of_a_mesh(vckpt, saved):
    store, tensors = saved
    told = json.loads(vckpt("cat", store, "run/0/mesh/dp=4,tp=2/manifest.json").stdout)
    assert {f"{t['component']}/{t['name']}": t["placements"] for t in told["tensors"]} == {
        "model/column": "S(0),S(0)", "model/row": "S(0),S(1)", "model/qkv": "R,IS(0,3)", "model/norm": "R,R",
        "optimizer/row": "S(0),S(1)"}
    assert {t["name"]: t["order"] for t in told["tensors"] if "order" in t} == {"column": ["tp", "dp"]}
    assert told["mesh"] == [["dp", 4], ["tp", 2]] and told["ranks"] == 8 and told["left_out"] == []
    for mesh, placements in (("dp=2,tp=2", "SS(0,2),S(0)"), ("tp=4,dp=2", "S(0),S(0)")):
        other = json.loads(vckpt("cat", store, f"run/0/mesh/{mesh}/manifest.json").stdout)
        assert {(t["placements"], t.get("order")) for t in other["tensors"] if t["name"] == "column"} == {
            (placements, None)}


def test_rows_that_do_not_divide(vckpt, build, tmp_path):
    """As fully_shard over tensor parallelism cuts 13 rows, and a save says it: tp first. Each rank shows what it held,
    and other meshes are cut in that order, whatever the order of their names."""
    api, array = Vckpt(build), np.arange(26, dtype="f4").reshape(13, 2)
    store = api.store(tmp_path / "store")
    meshlib.save(api, store, [Tensor("model/t", array, [("tp", 2), ("dp", 2)], (("S", 0), ("S", 0)),
                                     ranks=[0, 2, 1, 3])], 4)

    def rows(mesh, rank):
        raw = vckpt("cat", store, f"run/0/mesh/{mesh}/rank-{rank}/model.safetensors", text=False).stdout
        return (meshlib.parse(raw)["t"][:, 0] / 2).astype(int).tolist()
    assert rows("dp=2,tp=2", 1) == [7, 8, 9] and rows("dp=2,tp=2", 2) == [4, 5, 6]
    assert rows("tp=2,dp=2", 1) == [4, 5, 6]                # tp 0, dp 1
    assert rows("dp=3,tp=2", 5) == [11, 12] and rows("dp=3,tp=2", 4) == [6]
    assert rows("dp=2", 0) == [0, 1, 2, 3, 4, 5, 6] and rows("ep=2", 1) == list(range(13))


@pytest.mark.parametrize("path,words", [
    ("mesh", "no file mesh"), ("mesh/", "under a mesh"), ("mesh/tp=2", "under a mesh"),
    ("mesh/tp=2/rank-2/model.safetensors", "rank-00000 to rank-00001"), ("mesh/tp=2/rank-0", "not a file of a mesh"),
    ("mesh/tp=2/rank-0/config.safetensors", "not a file of a rank"),
    ("mesh/tp=2/rank-0/model", "not a file of a rank"),
    ("mesh/tp=2/rank-0/model.safetensors/x", "under a mesh"), ("mesh/tp=x/manifest.json", "tp=x"),
    ("mesh/tp=5/manifest.json", "tensor model/qkv: placement IS(0,3)")])
def test_paths_that_are_none(vckpt, saved, path, words):
    done = vckpt("cat", saved[0], f"run/0/{path}", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
    assert done.stdout == ""
