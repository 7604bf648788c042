# SPDX-License-Identifier: Apache-2.0
"""vckpt show, against numpy: every dtype, and values that are no ordinary numbers."""
import io
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from terminal import on_terminal
from test_diff import CODECS, FLOATS, INTS, NARROW, safetensors

QUANTILES = [0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999]


def word_of(dtype):
    return CODECS.get(dtype.name) or f"{'FUI'['fui'.index(dtype.kind)]}{8 * dtype.itemsize}"


def shown(vckpt, store, path):
    found, = vckpt.json("show", store, path)["tensors"]
    return found


def put(vckpt, store, arrays, path, target="run/1"):
    safetensors(path, {name: (word_of(a.dtype), list(a.shape), a.tobytes()) for name, a in arrays.items()})
    vckpt("import", store, target, path, "-q")


def compare(got, a, within=0.0):
    """within: how far quantiles may be cut towards zero, of their size."""
    with np.errstate(invalid="ignore"):
        values = np.asarray(a).astype("f8").reshape(-1)
    finite = np.sort(values[np.isfinite(values)])
    assert got["values"] == values.size and got["zeros"] == (values == 0).sum() and got["nan"] == np.isnan(values).sum()
    assert got["inf_positive"] == np.isposinf(values).sum() and got["inf_negative"] == np.isneginf(values).sum()
    if not finite.size:
        assert got["min"] is got["max"] is got["mean"] is got["std"] is None
        assert got["quantiles"] == {} and got["histogram"] == []
        return
    if np.asarray(a).dtype.kind in "iu":
        assert (got["min"], got["max"]) == (int(a.min()), int(a.max()))
    else:
        assert (got["min"], got["max"]) == (finite[0], finite[-1])
    assert got["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * np.abs(finite).max(initial=0))
    assert got["std"] == pytest.approx(finite.std(), rel=1e-9, abs=1e-300)
    assert got["quantiles_exact"] == (within == 0)
    for q in QUANTILES:
        at, want = got["quantiles"][f"{q:g}"], finite[max(0, math.ceil(finite.size * q - 1e-9) - 1)]
        assert abs(want) * (1 - within) <= abs(at) <= abs(want) and at * want >= 0, (q, at, want)
    counts = [b["values"] for b in got["histogram"]]
    assert len(counts) == 20 and sum(counts) == finite.size
    assert got["histogram"][0]["from"] == finite[0] and got["histogram"][-1]["to"] == finite[-1]
    if not within:
        width = finite[-1] / 20 - finite[0] / 20
        bins = np.minimum(((finite - finite[0]) / width).astype(int), 19) if width else np.zeros(finite.size, int)
        assert counts == np.bincount(bins, minlength=20).tolist()


def test_every_dtype(vckpt, store, tmp_path):
    rng, arrays = np.random.default_rng(4), {}
    for word in FLOATS + NARROW + INTS:
        dtype = np.dtype(getattr(ml_dtypes, word, word))
        small = np.frombuffer(rng.bytes(3001 * dtype.itemsize), dtype) if dtype.kind in "iu" else \
            rng.standard_normal(3001).astype(dtype)
        arrays[word] = np.resize(small, (3, 1000)).copy()
        if dtype.kind not in "iu":
            arrays[word][0, :3] = np.nan, 0, -0.0
            if word != "float8_e4m3fn":
                arrays[word][1, :3] = np.inf, -np.inf, np.inf
    put(vckpt, store, arrays, tmp_path / "a.safetensors")
    for word, a in arrays.items():
        got = shown(vckpt, store, f"run/1/model/{word}")
        assert (got["shape"], got["name"], got["component"]) == ([3, 1000], word, "model")
        if word in ("int64", "uint64"):             # beyond 2^53: quantiles are those of the nearest doubles
            assert not got["quantiles_exact"]
            assert got["max"] == (int(a.max()) if word == "int64" else pytest.approx(float(a.max()), rel=1e-15))
            continue
        compare(got, a)


def test_odd_values(vckpt, store, tmp_path):
    tiny = np.float32(1e-45)
    arrays = {"none": np.zeros((0, 3), "f4"), "scalar": np.array(-2.5, "f4"), "nan": np.full(5, np.nan, "f4"),
              "inf": np.array([np.inf, -np.inf]), "zeros": np.array([0.0, -0.0, 0.0], "f4"),
              "denormal": np.array([tiny, -tiny, 3 * tiny, 0], "f4"), "one": np.array([7], "i4"),
              "far": np.array([1e15, 1e15 + 1, 1e15 + 2]), "huge": np.array([1.7e308, -1.7e308, 1.0]),
              "top": np.array([2**63 - 1, -2**63, 5], "i8"), "bool": np.array([True, False, True])}
    save_file(arrays, tmp_path / "a.safetensors")
    vckpt("import", store, "run/1", tmp_path / "a.safetensors", "-q")
    found = {t["name"]: t for t in vckpt.json("show", store, "run/1/model/*")["tensors"]}
    assert set(found) == set(arrays)
    for name in "none", "scalar", "nan", "inf", "zeros", "denormal", "one", "far":
        compare(found[name], arrays[name])
    assert found["none"]["values"] == 0 and found["zeros"]["zeros"] == 3
    assert str(found["zeros"]["min"]) == "0.0"
    assert (found["top"]["min"], found["top"]["max"]) == (-2**63, 2**63 - 1)
    assert (found["bool"]["min"], found["bool"]["max"], found["bool"]["zeros"]) == (0, 1, 1)
    assert (found["huge"]["min"], found["huge"]["max"]) == (-1.7e308, 1.7e308)
    assert [b["values"] for b in found["huge"]["histogram"]] == [1] + [0] * 9 + [1] + [0] * 8 + [1]
    for name in arrays:                             # the same as text, for people
        assert vckpt("show", store, f"run/1/model/{name}").stdout.count("\n") >= 5


@pytest.mark.parametrize("n", [999, 300_000], ids=["kept", "counted"])
def test_a_range_that_no_double_holds(vckpt, store, tmp_path, n):
    """max - min is infinite: mean, deviation, limits and bars are right in spite of that."""
    top = np.finfo("f8").max
    a = np.linspace(-1, 1, n) * top
    a[:n // 3] = -top                               # in blocks, each with another mean
    a[-n // 3:] = top
    put(vckpt, store, {"w": a}, tmp_path / "a.safetensors")
    got = shown(vckpt, store, "run/1/model/w")
    assert (got["min"], got["max"]) == (-top, top)
    small = a / top                                 # the same, of a range that one holds
    assert got["mean"] / top == pytest.approx(small.mean(), abs=1e-12)
    assert got["std"] / top == pytest.approx(small.std(), rel=1e-9)
    bars, width = got["histogram"], 0.1
    counts = np.bincount(np.minimum((small + 1) / width, 19).astype(int), minlength=20)
    assert [b["values"] for b in bars] == pytest.approx(counts.tolist(), abs=0 if n < 1000 else n // 500)
    assert sum(b["values"] for b in bars) == n
    assert [b["from"] / top for b in bars] == pytest.approx([-1 + width * i for i in range(20)])
    assert [b["to"] for b in bars] == [b["from"] for b in bars[1:]] + [top]
    lines = vckpt("show", store, "run/1/model/w").stdout.splitlines()[-20:]
    assert [int(line.split()[1]) for line in lines] == [b["values"] for b in bars]
    assert not any("inf" in line or "nan" in line for line in lines)


@pytest.mark.parametrize("word,codes,values", [
    ("F4", bytes([0x21, 0xf0, 0x7a]), [.5, 1, 0, -6, -1, 6]), ("F8_E8M0", bytes([127, 128, 255]), [1, 2, math.nan]),
    ("C64", np.array([1 + 2j, -3j], "c8").tobytes(), [1, 2, 0, -3])])
def test_items_of_two_values(vckpt, store, tmp_path, word, codes, values):
    items = len(codes) // 8 if word == "C64" else 2 * len(codes) if word == "F4" else len(codes)
    safetensors(tmp_path / "x.safetensors", {"w": (word, [items], codes)})
    vckpt("import", store, "run/1", tmp_path / "x.safetensors", "-q")
    compare(shown(vckpt, store, "run/1/model/w"), np.array(values))


def test_more_values_than_are_kept(vckpt, store, tmp_path):
    """Counters: exact for 16-bit integers and narrow floats, else cut towards zero by at most 2^-10."""
    rng = np.random.default_rng(9)
    normal = rng.standard_normal((700, 500)) * np.exp(rng.uniform(-30, 30, (700, 500)))
    arrays = {"f4": normal.astype("f4"), "f8": normal, "f2": rng.standard_normal((700, 500)).astype("f2"),
              "i2": rng.integers(-32768, 32768, (700, 500)).astype("i2"),
              "u2": rng.integers(0, 65536, 350_000).astype("u2"), "u1": rng.integers(0, 256, 400_000).astype("u1"),
              "i4": rng.integers(-10**9, 10**9, (700, 500)).astype("i4"), "bf": normal.astype(ml_dtypes.bfloat16)}
    put(vckpt, store, arrays, tmp_path / "a.safetensors")
    for name, a in arrays.items():
        compare(shown(vckpt, store, f"run/1/model/{name}"), a, 2**-10 if name in ("f4", "f8", "i4") else 0)


def test_where_it_is(vckpt, store, tmp_path):
    w = np.random.default_rng(1).standard_normal((900, 800)).astype("f4")
    put(vckpt, store, {"w": w, "tiny": w[0, :4]}, tmp_path / "a.safetensors")
    got, info = shown(vckpt, store, "run/1/model/w"), vckpt.json("info", store, "run/1/model/w")
    for key in "digest", "pieces", "bytes", "stored_bytes", "tile", "dtype", "step", "run":
        assert got[key] == info[key], key
    pack, = got["packs"]
    assert [p for p in store.glob("packs/*/*") if p.stem == pack]
    assert shown(vckpt, store, "run/1/model/tiny")["packs"] == [] and "mesh" not in got
    text = vckpt("show", store, "run/1/model/w.npy").stdout
    assert text.startswith("run/step-00000001/model/w\n") and pack in text and "cut towards zero" in text


def test_several_and_patterns(vckpt, store, tmp_path):
    for step in 1, 2:
        put(vckpt, store, {f"layer.{i}.{part}": np.arange(3.0) for i in range(3) for part in ("w", "b")} | {
            "odd[1]": np.arange(2.0)}, tmp_path / "a.safetensors", f"run/{step}")

    def names(*args):
        return [(t["step"], t["name"]) for t in vckpt.json("show", store, *args)["tensors"]]
    assert names("run/1/model/layer.?.w") == [(1, f"layer.{i}.w") for i in range(3)]
    assert names("run/2/model/layer.0.w", "run/1/mod*1.b", "run/1/model/layer.2.b") == [
        (2, "layer.0.w"), (1, "layer.1.b"), (1, "layer.2.b")]
    assert names("run/latest/model/odd[1]") == [(2, "odd[1]")]         # a name before it is a pattern
    text = vckpt("show", store, "run/1/model/layer.?.w").stdout
    assert text.count("\n\nrun/step-00000001/") == 2 and "\\x0a" not in text
    for args, code, said in ((["run/1/model/nix*"], 1, "run/1 has no tensor model/nix*"), ([], 2, "is missing"),
                             (["run/1"], 2, "name a tensor"), (["run/7/model/w"], 1, "no step 7")):
        done = vckpt("show", store, *args, check=False)
        assert done.returncode == code and said in done.stderr, done.stderr


def test_damage_names_the_pack(vckpt, store, tmp_path):
    put(vckpt, store, {"w": np.random.default_rng(1).standard_normal(50_000)}, tmp_path / "a.safetensors")
    pack, = [p for p in store.glob("packs/*/*") if "model" in p.name]
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[8192] ^= 255
    pack.write_bytes(data)
    done = vckpt("show", store, "run/1/model/w", check=False)
    assert done.returncode == 3 and pack.stem in done.stderr and "model/w" in done.stderr


@pytest.mark.parametrize("locale,blocks", [("C.UTF-8", True), ("C", False)])
def test_the_histogram_fits_the_terminal(vckpt, store, tmp_path, locale, blocks):
    put(vckpt, store, {"w": np.random.default_rng(1).standard_normal(50_000)}, tmp_path / "a.safetensors")
    for width in 60, 100:
        out = on_terminal(vckpt, "show", store, "run/1/model/w", columns=width, LC_ALL=locale)
        bars = [line for line in io.StringIO(out) if ("█" if blocks else "#") in line]
        assert bars and max(len(line.rstrip("\r\n")) for line in bars) <= width
        assert ("█" in out) == blocks and ("#" in out) != blocks
