# SPDX-License-Identifier: Apache-2.0
"""vckpt diff: every kind of difference, against numpy; what it reads, and what it refuses."""
import json
import math
import pathlib
import shutil
import struct
import subprocess

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/v1/store.tar.xz"
FLOATS = ["float16", "float32", "float64"]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
CODECS = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def put(vckpt, store, target, tensors, path, *more):
    """Imports {name: array}, as component model unless `more` says otherwise."""
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    vckpt("import", store, target, *more, path, "-q")


def diff(vckpt, store, *args, code=1):
    done = vckpt("diff", store, *args, "--json", check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def changes(found):
    return {(d["change"], d.get("component"), d["name"]) for d in found["differences"]}


@pytest.fixture
def two(vckpt, store, tmp_path, rng):
    """run/1 and run/2, which differ in every way that tensors can."""
    normal = np.random.default_rng(rng.randrange(1 << 30)).standard_normal
    same, w = normal((20, 30)).astype("f4"), normal((40, 50)).astype("f4")
    other = w.copy()
    other[3, 4] += 1
    put(vckpt, store, "run/1", {"same": same, "w": w, "gone": same, "typed": same, "shaped": same, "none": same[:0]},
        tmp_path / "a/model.safetensors")
    put(vckpt, store, "run/2", {"same": same, "w": other, "new": same, "typed": same.astype("f8"),
                                "shaped": same.reshape(30, 20), "none": same[:0]}, tmp_path / "b/model.safetensors")
    return store


def test_every_kind_of_difference(vckpt, two):
    found = diff(vckpt, two, "run/1", "run/2")
    assert found["a"] == "run/1" and found["b"] == "run/2" and not found["equal"]
    assert changes(found) == {("changed", "model", "w"), ("removed", "model", "gone"), ("added", "model", "new"),
                              ("retyped", "model", "typed"), ("reshaped", "model", "shaped")}
    by_name = {d["name"]: d for d in found["differences"]}
    assert list(by_name) == sorted(by_name)
    assert by_name["typed"] == {"change": "retyped", "blob": False, "component": "model", "name": "typed",
                                "dtype_a": "f32", "shape_a": [20, 30], "bytes_a": 2400,
                                "dtype_b": "f64", "shape_b": [20, 30], "bytes_b": 4800}
    assert by_name["shaped"]["shape_b"] == [30, 20] and "bytes_a" not in by_name["new"]
    assert "bytes_b" not in by_name["gone"] and "changed" not in by_name["w"]
    assert found["components"] == [{"component": "model", "all": 7, "equal": 2, "added": 1, "removed": 1,
                                    "retyped": 1, "reshaped": 1, "changed": 1}]
    back = diff(vckpt, two, "run/2", "run/1")
    assert {(c, n) for c, _, n in changes(back)} == {("changed", "w"), ("added", "gone"), ("removed", "new"),
                                                     ("retyped", "typed"), ("reshaped", "shaped")}


def test_what_people_see(vckpt, two):
    lines = vckpt("diff", two, "run/1", "run/2", check=False).stdout.splitlines()
    assert lines[0].split("  ")[0] == "CHANGE" and len(lines) == 7
    assert ["retyped", "model", "typed", "-", "f32", "[20,", "30]", "f64", "[20,", "30]"] in [x.split() for x in lines]
    assert lines[-1] == "7 tensors: 2 equal, 1 added, 1 removed, 1 retyped, 1 reshaped, 1 changed"
    stat = [line.split() for line in vckpt("diff", two, "run/1", "run/2", "--stat", check=False).stdout.splitlines()]
    assert stat == [["COMPONENT", "ALL", "EQUAL", "CHANGED", "ADDED", "REMOVED", "RETYPED", "RESHAPED"],
                    ["model", "7", "2", "1", "1", "1", "1", "1"], ["total", "7", "2", "1", "1", "1", "1", "1"]]
    assert vckpt("diff", two, "run/1", "run/1").stdout == "run/1 and run/1 are equal\n6 tensors: 6 equal\n"
    for target, code in (("run/1", 0), ("run/2", 1)):
        done = vckpt("diff", two, "run/1", target, "-q", check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_exit_codes_and_arguments(vckpt, two, tmp_path):
    def fails(code, text, *args, **more):
        done = vckpt("diff", *args, check=False, **more)
        assert done.returncode == code and text in done.stderr and not done.stdout, (done.returncode, done.stderr)
    fails(2, "there is no run nix", two, "run/1", "nix")
    fails(2, "run has no step 9", two, "run/9", "run/1")
    fails(2, "neither side has a component nix", two, "run/1", "run/2", "--component", "nix")
    fails(2, "is missing", two, "run/1")
    fails(2, "names a part of a step", two, "run/1", "run/2/model/w")
    fails(2, "--stat only counts", two, "run/1", "run/2", "--stat", "--values")
    fails(2, "nothing_here", two, "run/1", "./nothing_here")
    fails(2, "is not a vckpt store", two, "run/1", "run/2", "--other", tmp_path)
    with open("/dev/full", "w") as full:                    # an answer that no one gets is no "equal"
        done = subprocess.run([vckpt.path, "diff", two, "run/1", "run/1"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"standard output" in done.stderr
    # runs mean their latest steps, and the store may be left out
    env = {"VCKPT_STORE": str(two)}
    assert vckpt("diff", "run/2", "run", env=env).stdout.startswith("run/2 and run/2 are equal")
    assert vckpt("diff", "run/1", "run/step-2", "-q", env=env, check=False).returncode == 1


def test_components_and_files(vckpt, store, tmp_path):
    w = {"w": np.arange(6.0)}
    for step, config in ((1, "{}"), (2, '{"a": 1}')):
        source = tmp_path / f"s{step}"
        (source / "unet").mkdir(parents=True)
        save_file(w, source / "model.safetensors")
        save_file({"w": np.arange(6.0) * step}, source / "unet/model.safetensors")
        (source / "config.json").write_text(config)
        (source / f"only{step}.txt").write_text("x")
        vckpt("import", store, f"run/{step}", source, "-q")
    put(vckpt, store, "run/3", w, tmp_path / "c/model.safetensors", "--component", "optimizer")
    found = diff(vckpt, store, "run/1", "run/2")
    assert changes(found) == {("changed", "unet", "w"), ("changed", None, "config.json"),
                              ("removed", None, "only1.txt"), ("added", None, "only2.txt")}
    assert found["blobs"] == {"all": 3, "equal": 0, "changed": 1, "added": 1, "removed": 1, "retyped": 0, "reshaped": 0}
    assert [d["blob"] for d in found["differences"]] == [False, True, True, True]
    assert changes(diff(vckpt, store, "run/1", "run/2", "--component", "unet")) == {("changed", "unet", "w")}
    assert diff(vckpt, store, "run/1", "run/2", "--component", "model", code=0)["equal"]
    # a component that one side lacks
    found = diff(vckpt, store, "run/1", "run/3")
    assert {("removed", "model", "w"), ("removed", "unet", "w"), ("added", "optimizer", "w")} <= changes(found)
    assert changes(diff(vckpt, store, "run/1", "run/3", "--component", "optimizer")) == {("added", "optimizer", "w")}


def test_another_store(vckpt, two, tmp_path):
    other = tmp_path / "other"
    vckpt("init", other)
    vckpt("export", two, "run/1", tmp_path / "out", "-q")
    vckpt("import", other, "here/7", tmp_path / "out", "-q")
    assert diff(vckpt, two, "run/1", "here/7", "--other", other, code=0)["equal"]
    assert diff(vckpt, two, "run/2", "here", "--other", other)["b"] == "here/7"


# ---- values ----

def only_values(row):
    return {k: row[k] for k in ("changed", "max", "rms", "relative", "nan_a", "nan_b", "inf_a", "inf_b")}


def values_of(vckpt, store, a="run/1", b="run/2", name="w"):
    found = diff(vckpt, store, a, b, "--values")
    return next(only_values(d) for d in found["differences"] if d["name"] == name)


def expected(a, b, full=None):
    """By numpy. full: how many values the tensor has."""
    changed = np.count_nonzero((np.atleast_1d(a).view(f"u{a.itemsize}") != np.atleast_1d(b).view(f"u{b.itemsize}")))
    if a.dtype.kind in "iu":
        distance = np.array([float(abs(int(y) - int(x))) for x, y in zip(a.flat, b.flat)])
        x, y = a.astype("f8"), b.astype("f8")
    else:
        x, y = np.atleast_1d(a).astype("f8"), np.atleast_1d(b).astype("f8")
        with np.errstate(invalid="ignore"):
            distance = np.abs(y - x)
    both = (np.isfinite(x) & np.isfinite(y)).reshape(-1)
    distance, norm = distance.reshape(-1)[both], np.linalg.norm(x.reshape(-1)[both])
    count = (full or x.size) - np.count_nonzero(~both)
    return {"changed": changed, "max": distance.max(initial=0), "rms": math.sqrt((distance ** 2).sum() / max(count, 1)),
            "relative": np.linalg.norm(distance) / norm if norm else None, "nan_a": np.isnan(x).sum(),
            "nan_b": np.isnan(y).sum(), "inf_a": np.isinf(x).sum(), "inf_b": np.isinf(y).sum()}


def safetensors(path, tensors):
    """{name: (word, shape, bytes)}, also of types that the package cannot write."""
    header, data = {}, b""
    for name, (word, shape, content) in tensors.items():
        header[name] = {"dtype": word, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_values_of_every_dtype(vckpt, store, tmp_path, scale):
    rng, arrays = np.random.default_rng(7), {}
    for word in FLOATS + NARROW + INTS:
        dtype = np.dtype(getattr(ml_dtypes, word, word))
        n = scale(1003, 20011)
        if dtype.kind in "iu":
            a = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype).copy()
            b = np.where(rng.random(n) < .3, np.frombuffer(rng.bytes(n * dtype.itemsize), dtype), a)
        else:
            a = rng.standard_normal(n).astype(dtype)
            b = np.where(rng.random(n) < .3, (rng.standard_normal(n) * 3).astype(dtype), a)
            a[5], b[6], b[8] = np.nan, np.nan, -0.0
            a[8] = 0.0
            if word not in ("float8_e4m3fn",):
                a[10], b[10], b[11] = np.inf, -np.inf, np.inf
        arrays[word] = a, b
    for i in (0, 1):
        safetensors(tmp_path / f"{i}.safetensors", {
            word: (CODECS.get(word) or f"{'FUI'['fui'.index(p[0].dtype.kind)]}{8 * p[0].itemsize}", list(p[0].shape),
                   p[i].tobytes()) for word, p in arrays.items()})
        vckpt("import", store, f"run/{i + 1}", tmp_path / f"{i}.safetensors", "-q")
    found = diff(vckpt, store, "run/1", "run/2", "--values")["differences"]
    assert {d["name"] for d in found} == set(arrays)
    for d in found:
        want = expected(*arrays[d["name"]])
        assert only_values(d) == pytest.approx(want, rel=1e-12), d["name"]
    order = [(d["nan_b"] > d["nan_a"] or d["inf_b"] > d["inf_a"], d["relative"]) for d in found]
    assert order == sorted(order, reverse=True)


def test_values_of_long_pieces(vckpt, store, tmp_path):
    """Of some 240 KiB, which are read in two parts."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((1960, 2000), "f4") for _ in range(2))
    put(vckpt, store, "run/1", {"w": a}, tmp_path / "a.safetensors")
    put(vckpt, store, "run/2", {"w": b}, tmp_path / "a.safetensors")
    assert values_of(vckpt, store) == pytest.approx(expected(a, b), rel=1e-12)


@pytest.mark.parametrize("word,codes,values", [
    ("F4", bytes([0x21, 0xf0, 0x7a]), [.5, 1, 0, -6, -1, 6]), ("F8_E8M0", bytes([127, 128, 255]), [1, 2, math.nan]),
    ("C64", np.array([1 + 2j, -3j], "c8").tobytes(), [1, 2, -0.0, -3]), ("BOOL", b"\0\1\1", [0, 1, 1])])
def test_values_of_odd_dtypes(vckpt, store, tmp_path, word, codes, values):
    """f4 and complex items hold two values each."""
    items = len(codes) // {"C64": 8}.get(word, 1)
    zero = {"F8_E8M0": bytes([127]) * 3}.get(word, bytes(len(codes)))
    start = {"F8_E8M0": 1.0}.get(word, 0.0)
    for step, data in ((1, zero), (2, codes)):
        safetensors(tmp_path / "x.safetensors", {"w": (word, [2 * items if word == "F4" else items], data)})
        vckpt("import", store, f"run/{step}", tmp_path / "x.safetensors", "-q")
    finite = [v for v in values if not math.isnan(v)]
    got = values_of(vckpt, store)
    assert got["max"] == max(abs(v - start) for v in finite)
    assert got["rms"] == pytest.approx(math.sqrt(sum((v - start) ** 2 for v in finite) / len(finite)))
    assert got["nan_b"] == len(values) - len(finite)
    assert got["changed"] == sum(math.isnan(v) or v != start or math.copysign(1, v) < 0 for v in values)


def test_integers_that_no_double_holds(vckpt, store, tmp_path):
    for kind in "i8", "u8":
        top = np.iinfo(kind).max
        a, b = np.array([top, top, 0], kind), np.array([top - 1, np.iinfo(kind).min, 0], kind)
        put(vckpt, store, f"{kind}/1", {"w": a}, tmp_path / "a.safetensors")
        put(vckpt, store, f"{kind}/2", {"w": b}, tmp_path / "a.safetensors")
        got = values_of(vckpt, store, f"{kind}/1", f"{kind}/2")
        assert got["changed"] == 2 and got["max"] == 2.0 ** 64
        put(vckpt, store, f"{kind}/3", {"w": np.array([top - 1, top, 0], kind)}, tmp_path / "a.safetensors")
        assert values_of(vckpt, store, f"{kind}/1", f"{kind}/3")["max"] == 1


def packs_of(store, component):
    return [p for p in store.glob("packs/*/*") if component in p.name]


def test_one_value_of_a_tensor_of_many_tiles(vckpt, store, tmp_path):
    """Only its piece is read: those of all others are spoiled. Without --values none is read: there is no pack."""
    a = np.random.default_rng(1).standard_normal((1500, 1100)).astype("f4")
    b = a.copy()
    b[1400, 1000] = 9
    put(vckpt, store, "run/1", {"w": a}, tmp_path / "a.safetensors")
    put(vckpt, store, "run/2", {"w": b}, tmp_path / "a.safetensors")
    want = expected(a, b)
    got = values_of(vckpt, store)
    assert got["changed"] == 1 and got["max"] == pytest.approx(float(9 - np.float64(a[1400, 1000])), rel=1e-12)
    assert got["rms"] == pytest.approx(want["rms"], rel=1e-12)
    assert got["relative"] > want["relative"]               # of the piece that differs, not of the whole tensor
    small, large = sorted(packs_of(store, "model"), key=lambda p: p.stat().st_size)
    data = bytearray(large.read_bytes())
    data[4096:len(data) // 8] = bytes(len(data) // 8 - 4096)     # the first pieces; the changed one is further behind
    large.chmod(0o644)
    large.write_bytes(data)
    assert vckpt("cat", store, "run/1/model/w", check=False).returncode == 3
    assert values_of(vckpt, store) == got
    data[len(data) // 8:] = bytes(len(data) - len(data) // 8)
    large.write_bytes(data)
    done = vckpt("diff", store, "run/1", "run/2", "--values", check=False)
    assert done.returncode == 3 and large.stem in done.stderr and "model/w" in done.stderr
    for pack in (small, large):
        pack.unlink()
    assert changes(diff(vckpt, store, "run/1", "run/2")) == {("changed", "model", "w")}
    assert diff(vckpt, store, "run/1", "run/1", "--values", code=0)["equal"]


def test_renamed_tensors(vckpt, store, tmp_path):
    w = np.arange(50.0)
    put(vckpt, store, "run/1", {"old.w": w}, tmp_path / "a.safetensors")
    put(vckpt, store, "run/2", {"new.w": w}, tmp_path / "a.safetensors")
    assert changes(diff(vckpt, store, "run/1", "run/2")) == {("removed", "model", "old.w"), ("added", "model", "new.w")}


def test_names_are_escaped(vckpt, store, tmp_path):
    bad = "a\x1b[31m\u202eb"
    put(vckpt, store, "run/1", {bad: np.arange(3.0)}, tmp_path / "a.safetensors")
    put(vckpt, store, "run/2", {bad: np.arange(4.0)}, tmp_path / "a.safetensors")
    out = vckpt("diff", store, "run/1", "run/2", check=False).stdout
    assert "\x1b" not in out and "\u202e" not in out and "\\x1b" in out
    assert diff(vckpt, store, "run/1", "run/2")["differences"][0]["name"] == bad


# ---- files ----

def test_a_directory_or_a_file(vckpt, store, tmp_path):
    rng = np.random.default_rng(2)
    tensors = {"a": rng.standard_normal((700, 900)).astype("f4"), "b": rng.standard_normal(3).astype("f2"),
               "scalar": np.array(2.5), "none": np.zeros((0, 4), "f4"), "i": np.arange(9)}
    source = tmp_path / "hf"
    source.mkdir()
    save_file({k: tensors[k] for k in ("a", "b")}, source / "model-00001-of-00002.safetensors")
    save_file({k: tensors[k] for k in ("scalar", "none", "i")}, source / "model-00002-of-00002.safetensors")
    (source / "config.json").write_text("{}")
    vckpt("import", store, "run/1", source, "-q")
    assert diff(vckpt, store, "run/1", source, code=0)["equal"]
    said = vckpt("diff", store, "run/1", source, "--values").stdout.splitlines()
    assert said[-1] == "5 tensors: 5 equal; 1 file: 1 equal"
    single = tmp_path / "single.safetensors"
    other = {**tensors, "a": tensors["a"] * np.float32(1.5), "scalar": np.array(-1.0)}
    save_file(other, single)
    found = diff(vckpt, store, "run/1", single, "--values", "--component", "model")
    assert changes(found) == {("changed", "model", "a"), ("changed", "model", "scalar")}
    for d in found["differences"]:
        assert only_values(d) == pytest.approx(expected(tensors[d["name"]], other[d["name"]]), rel=1e-9)
    assert [d["name"] for d in found["differences"]] == ["scalar", "a"]
    (source / "config.json").write_text("[]")
    assert changes(diff(vckpt, store, "run/1", source)) == {("changed", None, "config.json")}
    # a path is what begins as one, or is no run
    (tmp_path / "run").mkdir()
    single.write_bytes(single.read_bytes()[:-5])
    done = vckpt("diff", store, "run/1", single, check=False)
    assert done.returncode == 2 and str(single) in done.stderr
    for target, code in (("hf", 1), ("run", 0)):            # "run": the run, not the directory beside it
        done = subprocess.run([vckpt.path, "diff", store, "run/1", target, "-q"], cwd=tmp_path)
        assert done.returncode == code


# ---- stores of strangers ----

def test_digests_of_a_store_are_believed(vckpt, store, tmp_path):
    """As docs/security.md says: bytes that are not those of their digest are not noticed while no one reads them."""
    put(vckpt, store, "run/1", {"w": np.arange(4000.0)}, tmp_path / "a.safetensors")
    other = tmp_path / "other"
    shutil.copytree(store, other)
    for pack in packs_of(other, "model"):
        pack.chmod(0o644)
        pack.write_bytes(bytes(pack.stat().st_size))
    assert diff(vckpt, store, "run/1", "run/1", "--other", other, "--values", code=0)["equal"]
    assert vckpt("verify", other, "--no-notes", check=False).returncode == 3


@pytest.mark.parametrize("step,values", [("a/0", []), ("b/7", ["--values"])])
def test_old_and_new_grids(vckpt, store, tmp_path, step, values):
    """A store of format 1 cuts by an older rule: equal tensors have other pieces, and their bytes are compared."""
    shutil.unpack_archive(GOLDEN, tmp_path / "old")
    old = tmp_path / "old/store"
    vckpt("export", old, step, tmp_path / "out", "-q")
    vckpt("import", store, "run/1", tmp_path / "out", "-q")
    name = vckpt.json("ls", store, "run/1")["components"][0]["component"]
    tensor = vckpt.json("ls", store, f"run/1/{name}")["tensors"][0]["name"]
    found = diff(vckpt, old, step, "run/1", "--other", store, *values, code=0)
    assert found["equal"] and found["components"] and tensor
