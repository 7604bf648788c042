# SPDX-License-Identifier: Apache-2.0
"""What `vckpt ls` prints for people: order, sizes, ages, totals; on a terminal and into a pipe."""
import importlib.util
import io
import json
import re

import numpy as np
import pytest

from terminal import on_terminal


def fields(line):
    return re.split(r" {2,}", line.strip())


def safetensors(path, tensors):
    """{name: (dtype word of safetensors, shape, bytes)} as a file."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def filled(vckpt, store, tmp_path):
    """Runs a (three steps, of other sizes and attributes each) and b (one)."""
    for step, (items, loss) in enumerate([(3000, "10.5"), (1000, "9.25"), (2000, None)]):
        np.save(tmp_path / "w.npy", np.arange(step, items + step, dtype="f4"))
        vckpt("import", store, f"a/{step}", tmp_path / "w.npy", *(["--set", f"loss={loss}"] if loss else []), "--set",
              f"tag=t{step}")
    vckpt("import", store, "b", tmp_path / "w.npy")
    return store


def steps(vckpt, store, *more):
    return [line.split("\t")[0] for line in vckpt("ls", store, "a", "-H", *more).stdout.splitlines()]


def test_runs(vckpt, filled):
    head, a, b, total = vckpt("ls", filled).stdout.splitlines()
    assert fields(head) == ["RUN", "STEPS", "LATEST", "AGE", "SIZE", "ADDED"]
    assert fields(a)[:3] == ["a", "3", "step-00000002"] and fields(b)[:3] == ["b", "1", "step-00000000"]
    assert re.fullmatch(r"\d+ (s|min) ago", fields(a)[3]) and fields(a)[4] == "23 KiB"
    added = vckpt.json("ls", filled)["runs"]
    assert ([r["bytes"] for r in added] == [24000, 8000] and
            added[0]["time"] == vckpt.json("ls", filled, "a")["steps"][-1]["time"])
    assert re.fullmatch(r"total: 2 runs, 4 steps, 31 KiB logical; saving them added \d+ KiB "
                        r"\(vckpt info STORE: size on disk\)", total)
    assert vckpt("ls", filled, "--sort", "size", "-H").stdout[0] == "b" and vckpt("ls", filled, "--sort", "name", "-r",
                                                                                  "-H").stdout[0] == "b"


def test_steps(vckpt, filled):
    head, *rows, total = vckpt("ls", filled, "a").stdout.splitlines()
    assert fields(head) == ["STEP", "AGE", "TENSORS", "SIZE", "ADDED", "ATTRIBUTES"]
    assert [fields(row)[0] for row in rows] == ["step-00000000", "step-00000001", "step-00000002"]
    assert [fields(row)[2:4] for row in rows] == [["1", "12 KiB"], ["1", "3.9 KiB"], ["1", "7.8 KiB"]]
    assert [fields(row)[5:] for row in rows] == [["loss=10.5", "tag=t0"], ["loss=9.25", "tag=t1"], ["tag=t2"]]
    assert total.startswith("total: 3 steps, 23 KiB logical; ")
    assert vckpt("ls", filled, "b").stdout.splitlines()[-1].startswith("total: 1 step, ")
    assert vckpt.json("ls", filled, "a")["steps"][0]["attempt"] in vckpt("ls", "-l", filled, "a").stdout


def test_for_scripts(vckpt, filled):
    told = vckpt.json("ls", filled, "a")["steps"]
    lines = vckpt("ls", filled, "a", "-H", "--bytes", "--time").stdout.splitlines()
    assert [line.split("\t")[:5] for line in lines] == [[f"step-{s['step']:08}", s["time"], str(s["tensors"]),
                                                         str(s["bytes"]), str(s["new_bytes"])] for s in told]
    assert (vckpt("ls", filled, "a", "-q").stdout.splitlines()[0].startswith("STEP") and
            "total" not in vckpt("ls", filled, "a", "-q").stdout)


def test_order(vckpt, filled):
    def numbers(*more):
        return [int(step[5:]) for step in steps(vckpt, filled, *more)]
    assert numbers() == numbers("--sort", "step") == numbers("--sort", "name") == numbers("--sort", "time") == [0, 1, 2]
    assert numbers("--reverse") == numbers("-r", "--sort", "tag") == [2, 1, 0]
    assert numbers("--sort", "size") == [1, 2, 0] and numbers("--sort", "size", "-r") == [0, 2, 1]
    assert numbers("--sort", "loss") == [1, 0, 2]                 # 9.25 before 10.5; without one last
    assert [s["step"] for s in vckpt.json("ls", filled, "a", "--sort", "loss")["steps"]] == [1, 0, 2]
    for target, what in [(["a"], "steps are sorted by name, step, time, size, or an attribute that one of them has"),
                         ([], "runs are sorted by name, step, time, size"),
                         (["a/1"], "components and files are sorted by name, size"),
                         (["a/1/model"], "tensors are sorted by name, size")]:
        done = vckpt("ls", filled, *target, "--sort", "nothing", check=False)
        assert (done.returncode, done.stdout) == (2, "") and f"--sort nothing: {what} (see" in done.stderr, done


def test_a_step_and_its_tensors(vckpt, store, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    safetensors(source / "model.safetensors",
                {"a.bias": ("F32", [3], b"\0" * 12), "b.weight": ("BF16", [40, 50], bytes(range(250)) * 16),
                 "c.weight": ("BF16", [2], b"\0\1\2\3")})
    (source / "config.json").write_text("{}")
    vckpt("import", store, "r", source)
    assert [fields(line) for line in vckpt("ls", store, "r/0").stdout.splitlines()] == [
        ["NAME", "SIZE", "TENSORS"], ["model/", "3.9 KiB", "3"], ["config.json", "2 B", "-"],
        ["total: 1 component with 3 tensors, 1 file, 3.9 KiB"]]
    assert [fields(line) for line in vckpt("ls", store, "r/0/model", "--sort", "size").stdout.splitlines()] == [
        ["NAME", "DTYPE", "SHAPE", "SIZE"], ["c.weight", "bf16", "[2]", "4 B"], ["a.bias", "f32", "[3]", "12 B"],
        ["b.weight", "bf16", "[40, 50]", "3.9 KiB"],
        ["total: 3 tensors, 3.9 KiB"]]
    for word in ("-v", "-l", "--long"):
        lines = vckpt("ls", word, store, "r/0").stdout.splitlines()
        assert fields(lines[0]) == ["NAME", "SIZE", "TENSORS", "STORED", "PIECES", "CODECS",
                                    "DTYPES"] and fields(lines[1])[-1] == "bf16 2, f32 1"
        assert (lines[-1] == "bf16: numpy shows |V2; numpy.load(f).view(ml_dtypes.bfloat16) (python3 -m pip install "
                "ml_dtypes)")
        assert vckpt("ls", word, store, "r/0/model").stdout.splitlines()[-1] == lines[-1]
    [component] = vckpt.json("ls", "-l", store, "r/0")["components"]
    assert component["dtypes"] == {"bf16": 2, "f32": 1} and component["pieces"] == 3 and component["stored_bytes"] > 0
    assert [t["pieces"] for t in vckpt.json("ls", "-l", store, "r/0/model")["tensors"]] == [1, 1, 1]


BF16 = "bf16: numpy shows |V2; numpy.load(f).view(ml_dtypes.bfloat16) (python3 -m pip install ml_dtypes)"


def test_what_numpy_lacks(vckpt, store, tmp_path):
    """info says it of a step and of a tensor, and it is so: what numpy shows are the bytes of the right type."""
    values = np.array([1.0, -2.5, 0.0, 3.140625], dtype="f4")
    upper = (values.view("<u4") >> 16).astype("<u2")                     # exact in bf16
    safetensors(tmp_path / "m.safetensors",
                {"w": ("BF16", [2, 2], upper.tobytes()), "e": ("F8_E5M2", [1], b"\x3c"), "f": ("F32", [1], b"\0" * 4)})
    vckpt("import", store, "r", tmp_path / "m.safetensors")
    said = vckpt("info", store, "r/0").stdout
    assert "  types        bf16 1, f32 1, f8_e5m2 1\n" in said and f"  numpy        {BF16}\n" in said
    assert ("  numpy        f8_e5m2: numpy shows |V1; numpy.load(f).view(ml_dtypes.float8_e5m2) "
            "(python3 -m pip install ml_dtypes)\n") in said
    assert (f"  numpy        {BF16}\n" in vckpt("info", store, "r/0/model/w").stdout and
            "numpy" not in vckpt("info", store, "r/0/model/f").stdout)
    assert vckpt.json("info", store, "r/0")["dtypes"] == {"bf16": 1, "f32": 1, "f8_e5m2": 1}
    loaded = np.load(io.BytesIO(vckpt("cat", store, "r/0/model/w", text=False).stdout))
    assert loaded.dtype.str == "|V2" and loaded.shape == (2, 2)
    assert ((loaded.view("<u2").astype("<u4") << 16).view("f4").ravel() == values).all()
    if importlib.util.find_spec("ml_dtypes"):           # not needed: what it does stands above
        import ml_dtypes
        assert (loaded.view(ml_dtypes.bfloat16).astype("f4").ravel() == values).all()


def test_on_a_terminal(vckpt, store, tmp_path):
    name = "encoder." + "x" * 100 + ".weight"
    safetensors(tmp_path / "m.safetensors", {name: ("F32", [4], b"\0" * 16)})
    for step in (1, 2):
        vckpt("import", store, f"long-run/{step}", tmp_path / "m.safetensors")
    text = on_terminal(vckpt, "ls", store, "long-run/1/model", columns=60)
    row = text.splitlines()[1]
    assert len(row) == 60 and re.match(r"encoder\.x+\.\.\.x+\.weight  f32 ", row)
    assert name in on_terminal(vckpt, "ls", store, "long-run/1/model", columns=60, COLUMNS="200")
    assert name in vckpt("ls", store, "long-run/1/model", env={"COLUMNS": "60", "TERM": "xterm"}).stdout
    text = on_terminal(vckpt, "ls", store)
    assert "\033[1;34mlong-run\033[m  " in text and "\033[32mstep-00000002\033[m  " in text
    text = on_terminal(vckpt, "ls", store, "long-run")
    assert "\033[32mstep-00000002\033[m  " in text and "\nstep-00000001  " in text
