# SPDX-License-Identifier: Apache-2.0
"""vckpt layout --check: what a layout file gives to the tensors of a step."""
import os

import numpy as np
import pytest


@pytest.fixture
def step(vckpt, store, tmp_path):
    for name, shape in {"l.0.q_proj.weight": (8, 4), "l.0.o_proj.weight": (4, 8), "l.0.o_proj.bias": (4,),
                        "norm": (4,)}.items():
        np.save(tmp_path / f"{name}.npy", np.zeros(shape, "f4"))
    vckpt("import", store, "a/1", "--component", "model", *tmp_path.glob("*.npy"))
    return store


def test_what_each_tensor_gets(vckpt, step, tmp_path):
    file = tmp_path / "f"
    file.write_text("# mine\n*.o_proj.bias saved\n*.none R\npreset llama\n")
    for done in (vckpt("layout", step, "a/1", "--check", file),
                 vckpt("layout", "--check", file, "a/latest", env={"VCKPT_STORE": str(step)})):
        lines = [line.split("  ") for line in done.stdout.splitlines()]
        got = {words[0]: [w.strip() for w in words[1:] if w.strip()] for words in lines if len(words) > 1}
        assert got == {"tensor": ["shape", "dtype", "placements", "line"],
                       "model/l.0.o_proj.bias": ["[4]", "f32", "saved", f"{file}:2"],
                       "model/l.0.o_proj.weight": ["[4, 8]", "f32", "tp=S(1)", "llama:3"],
                       "model/l.0.q_proj.weight": ["[8, 4]", "f32", "tp=S(0)", "llama:2"],
                       "model/norm": ["[4]", "f32", "R", "-"]}, done.stdout
        assert done.stdout.splitlines()[-1] == f"{file}:3: no tensor has '*.none'"


def test_control_characters_do_not_reach_the_terminal(vckpt, step, tmp_path):
    (tmp_path / "f").write_bytes(b"\x1b]0;title\x07]* R\n")
    done = vckpt("layout", step, "a/1", "--check", tmp_path / "f")
    assert done.stdout.splitlines()[-1].endswith(r"no tensor has '\x1b]0;title\x07]*'"), done.stdout


@pytest.mark.parametrize("name,shown", [(b"lat\xe9in", r"lat\xe9in:1"), (b"c\x1bx", r"c\x1bx:1"),
                                        (99 * b"./" + b"x\xc3\xa9", 99 * "./" + r"x\xc3:1")])
def test_a_file_of_any_name(vckpt, step, tmp_path, monkeypatch, name, shown):
    """Also one that is not UTF-8, or that has more than 200 bytes and is cut within a character."""
    monkeypatch.chdir(tmp_path)
    with open(name, "wb") as f:
        f.write(b"norm R\n")
    lines = vckpt("layout", step, "a/1", "--check", os.fsdecode(name)).stdout.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("model/norm ")] == [shown]


def test_a_file_alone(vckpt, tmp_path):
    (tmp_path / "f").write_text("a R\n")
    assert vckpt("layout", "--check", tmp_path / "f").stdout == f"{tmp_path / 'f'}: 1 line\n"
    assert vckpt("layout", "--check", "llama").stdout == "llama: 14 lines\n"
    (tmp_path / "f").write_text("a R\n* tp=S\n")
    done = vckpt("layout", "--check", tmp_path / "f", check=False)
    assert done.returncode == 1 and f"{tmp_path / 'f'}:2: " in done.stderr and not done.stdout


@pytest.mark.parametrize("words,said", [
    (["--check", "llama", "--mesh", "tp=2"], "excludes"), (["--check", "llama", "--json"], "no --json"),
    (["STORE", "--check", "llama"], "give STORE and RUN/STEP, or neither"), (["STORE"], "belong to --check"),
    (["STORE", "a", "--check", "llama"], "give RUN/STEP"), (["STORE", "a/1/x", "--check", "llama"], "give RUN/STEP")])
def test_usage(vckpt, step, words, said):
    done = vckpt("layout", *[str(step) if w == "STORE" else w for w in words], check=False)
    assert done.returncode == 2 and said in done.stderr and not done.stdout, done.stderr
