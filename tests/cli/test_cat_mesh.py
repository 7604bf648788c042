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
        "model/column": "SS(0,2),S(0)", "model/row": "S(0),S(1)", "model/qkv": "R,IS(0,3)", "model/norm": "R,R",
        "optimizer/row": "S(0),S(1)"}
    assert told["mesh"] == [["dp", 4], ["tp", 2]] and told["ranks"] == 8 and told["left_out"] == []
    other = json.loads(vckpt("cat", store, "run/0/mesh/tp=4,dp=2/manifest.json").stdout)
    assert {t["placements"] for t in other["tensors"] if t["name"] == "column"} == {"S(0),SS(0,1)"}


@pytest.mark.parametrize("path,words", [
    ("mesh", "no file mesh"), ("mesh/", "under a mesh"), ("mesh/tp=2", "under a mesh"),
    ("mesh/tp=2/rank-2/model.safetensors", "rank-00000 to rank-00001"), ("mesh/tp=2/rank-0", "no file of a mesh"),
    ("mesh/tp=2/rank-0/config.safetensors", "no file of a rank"), ("mesh/tp=2/rank-0/model", "no file of a rank"),
    ("mesh/tp=2/rank-0/model.safetensors/x", "under a mesh"), ("mesh/tp=x/manifest.json", "tp=x"),
    ("mesh/tp=5/manifest.json", "tensor model/qkv: placement IS(0,3)")])
def test_paths_that_are_none(vckpt, saved, path, words):
    done = vckpt("cat", saved[0], f"run/0/{path}", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
    assert done.stdout == ""
