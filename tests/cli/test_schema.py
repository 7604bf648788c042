# SPDX-License-Identifier: Apache-2.0
"""What the commands print with --json is what vckpt(1) says, key by key and type by type."""
import json
import pathlib
import re

import numpy
import pytest
from safetensors.numpy import save_file

MANUAL = pathlib.Path(__file__).resolve().parents[2] / "docs/man/vckpt.1"
TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None),
         "number": float}


def parse(tokens):
    """A schema of the manual: {"key"?: schema, ...}, {*: schema}, [schema], a type, or several of these between |."""
    choices = [parse_one(tokens)]
    while tokens and tokens[0] == "|":
        tokens.pop(0)
        choices.append(parse_one(tokens))
    return choices[0] if len(choices) == 1 else tuple(choices)


def parse_one(tokens):
    token = tokens.pop(0)
    if token == "{":
        fields = {}
        while tokens[0] != "}":
            if tokens[0] == ",":
                tokens.pop(0)
            key = tokens.pop(0)
            optional = tokens[0] == "?"
            if optional:
                tokens.pop(0)
            assert tokens.pop(0) == ":"
            fields[(key if key == "*" else json.loads(key), optional)] = parse(tokens)
        tokens.pop(0)
        return fields
    if token == "[":
        inner = parse(tokens)
        assert tokens.pop(0) == "]"
        return [inner]
    return TYPES[token]


def manual():
    """{"ls STORE RUN": schema, ...}"""
    found = {}
    text = MANUAL.read_text().split(".Sh JSON OUTPUT")[1].split(".Sh ")[0]
    for head, body in re.findall(r"^\.Cm (.*?) ?:\n\.Bd -literal\n(.*?)^\.Ed", text, re.M | re.S):
        tokens = re.findall(r'"[^"]*"|[a-z]+|[{}\[\]:,?|*]', body)
        found[head.replace(" Ar ", " ")] = parse(tokens)
        assert not tokens, head
    return found


def check(value, schema, where="$"):
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for (key, optional), inner in schema.items():
            if key == "*":
                for k, v in value.items():
                    check(v, inner, f"{where}.{k}")
                return
            assert optional or key in value, f"{where}.{key} is missing"
            if key in value:
                check(value[key], inner, f"{where}.{key}")
        extra = set(value) - {key for key, _ in schema}
        assert not extra, f"{where}: {extra} are not in the manual"
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for i, v in enumerate(value):
            check(v, schema[0], f"{where}[{i}]")
    elif isinstance(schema, tuple):
        kinds = [{dict: dict, list: list}.get(type(choice), choice) for choice in schema]
        assert type(value) in kinds, f"{where}: {value!r}"
        check(value, schema[kinds.index(type(value))], where)
    else:
        assert type(value) is schema, f"{where}: {value!r}"


@pytest.fixture(scope="module")
def outputs(vckpt, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("schema")
    source, store = tmp / "source", tmp / "store"
    source.mkdir()
    rng = numpy.random.default_rng(1)
    save_file({"w": rng.standard_normal((600, 300)).astype("f4"), "b": rng.standard_normal(9).astype("f8")},
              source / "model.safetensors")
    (source / "config.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"\x80\x02.\x00\x00")
    out = {"init": vckpt.json("init", store)}
    vckpt("import", store, "a", source, "-q")
    out["import"] = vckpt.json("import", store, "a", source, "--set", "loss=1.5")
    out["tag with a name"] = vckpt.json("tag", store, "a/1", "best", "new")
    out["pin"] = vckpt.json("pin", store, "a/best", "a/0", "--reason", "first two")
    out["unpin"] = vckpt.json("unpin", store, "a/0")
    out["set"] = vckpt.json("set", store, "a/1", "loss=1.25", "accuracy=0.5")
    out["tag"] = vckpt.json("tag", store)
    out["ls STORE"] = vckpt.json("ls", store)
    out["ls STORE RUN"] = vckpt.json("ls", store, "a")
    out["ls STORE RUN/STEP"] = vckpt.json("ls", store, "a/latest")
    out["ls STORE RUN/STEP/COMPONENT"] = vckpt.json("ls", store, "a/1/model")
    out["ls STORE RUN/STEP --long"] = vckpt.json("ls", store, "a/latest", "--long")
    out["ls STORE RUN/STEP/COMPONENT --long"] = vckpt.json("ls", store, "a/1/model", "--long")
    out["info STORE"] = vckpt.json("info", store)
    out["info STORE RUN/STEP"] = vckpt.json("info", store, "a/1", "--packs")
    out["info STORE RUN/STEP/COMPONENT/TENSOR"] = vckpt.json("info", store, "a/1/model/w")
    out["du STORE"] = vckpt.json("du", store, "--packs", "--freed", "a/0")
    out["du STORE RUN"] = vckpt.json("du", store, "a", "--tensors", "1")
    out["du STORE RUN/STEP"] = vckpt.json("du", store, "a/1", "--packs")
    out["log"] = vckpt.json("log", store, "a")
    out["show"] = vckpt.json("show", store, "a/1/model/*")
    vckpt("import", store, "b", source / "model.safetensors", "-q")
    save_file({"w": numpy.ones((600, 300), "f4"), "b": numpy.ones(3)}, source / "model.safetensors")
    vckpt("import", store, "b", source, "-q")
    differ = vckpt("diff", store, "a/1", "b/1", "--values", "--json", check=False)
    out["diff"], out["diff --stat"] = json.loads(differ.stdout), vckpt.json("diff", store, "b", "b/1", "--stat")
    out["diff of blobs"] = json.loads(vckpt("diff", store, "b/0", "b/1", "--json", check=False).stdout)
    out["find"] = vckpt.json("find", store, "has tensor")
    out["wait"] = json.loads(vckpt("wait", store, "a/1", "--json", "--exec", "true").stdout)
    out["stalls"] = vckpt.json("stalls", store, "a/1")
    out["ls STORE --incoming"] = vckpt.json("ls", store, "--incoming")
    out["export"] = vckpt.json("export", store, "a/1", tmp / "out")
    out["index"] = vckpt.json("index", store)
    out["mesh"] = vckpt.json("mesh", "--mesh", "pp=2,dp=2,tp=2", "--no-wrap")
    tensor = ("--shape", "6,4", "--dtype", "f32")
    out["layout"] = vckpt.json("layout", *tensor, "--mesh", "dp=2,tp=2", "--place", "R,S(0)", "--rank", "3")
    out["outside"] = vckpt.json("layout", *tensor, "--mesh", "dp=2,tp=2", "--place", "R,S(0)", "--rank", "4")
    out["reshard"] = vckpt.json("reshard", *tensor, "--from-mesh", "dp=2", "--from-place", "S(0)", "--to-mesh", "tp=3",
                                "--to-place", "S(1)")
    vckpt("init", tmp / "other")
    out["copy"] = vckpt.json("copy", store, "--to", tmp / "other")
    out["policy"] = vckpt.json("policy", store, "a", "set", "--keep-last", "2")
    out["prune"] = vckpt.json("prune", store, "--dry-run")
    vckpt("init", tmp / "third")
    out["sync"] = vckpt.json("sync", store, "--to", tmp / "third")
    out["rm"] = vckpt.json("rm", store, "a/0")
    out["gc"] = vckpt.json("gc", store, "--dry-run", "--repack-below", "99%")
    out["repack"] = vckpt.json("repack", tmp / "third", "b/0")
    pack = max((store / "packs").rglob("*.pack"), key=lambda p: p.stat().st_size)
    with open(pack, "r+b") as f:
        f.seek(5000)
        f.write(b"\xff\xfe\xfd")
    out["verify"] = json.loads(vckpt("verify", store, "--json", check=False).stdout)
    return out


def test_the_manual_has_a_schema_for_every_command():
    assert len(manual()) == 37


# these have tests of their own
@pytest.mark.parametrize("name", [n for n in manual() if n not in ("abort", "mend", "umount")])
def test_output_is_what_the_manual_says(outputs, name):
    check(outputs[name], manual()[name])


def test_long_output_too(outputs):
    for name in ("ls STORE RUN/STEP", "ls STORE RUN/STEP/COMPONENT"):
        check(outputs[f"{name} --long"], manual()[name])


def test_every_difference_too(outputs):
    for name in "diff --stat", "diff of blobs":
        check(outputs[name], manual()["diff"])
    assert "differences" not in outputs["diff --stat"] and outputs["diff --stat"]["equal"]
    assert any(d["blob"] for d in outputs["diff of blobs"]["differences"])
    assert any("rms" in d for d in outputs["diff"]["differences"])


@pytest.mark.parametrize("name", ["pin", "unpin", "tag with a name"])
def test_what_is_said_of_steps_too(outputs, name):
    check(outputs[name], manual()["set"])
    assert all(row["changed"] for row in outputs[name]["changes"])


def test_a_rank_outside_the_mesh_too(outputs):
    check(outputs["outside"], manual()["layout"])
    assert (outputs["outside"]["ranks"][0]["coordinate"] is None and outputs["layout"]["ranks"][0]["coordinate"] ==
            [1, 1])


def test_values(outputs):
    assert outputs["import"]["pickles_left_out"] and outputs["import"]["attributes"] == {"loss": "1.5"}
    assert outputs["import"]["step"] == 1 and outputs["import"]["piece_bytes_new"] == 0
    assert outputs["info STORE RUN/STEP"]["shared_with_step_before"]["tensors"] == 2
    step, tensors = outputs["ls STORE RUN/STEP --long"], outputs["ls STORE RUN/STEP/COMPONENT --long"]["tensors"]
    digests = {one["name"]: one["digest"] for one in tensors}
    assert digests["w"] == outputs["info STORE RUN/STEP/COMPONENT/TENSOR"]["digest"] and len(digests["b"]) == 64
    assert all(len(blob["digest"]) == 64 for blob in step["blobs"])
    assert outputs["verify"]["faults"] > 0 and outputs["verify"]["damage"][0]["step"] == 1
