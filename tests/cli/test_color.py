# SPDX-License-Identifier: Apache-2.0
"""Colours: on a terminal, unless somebody does not want them; elsewhere only when asked for."""
import re

import numpy as np
import pytest

from terminal import on_terminal

RED, END = "\033[31m", "\033[m"


@pytest.fixture
def damaged(vckpt, store, tmp_path):
    """A store with one byte of one tensor changed."""
    np.save(tmp_path / "w.npy", np.arange(40000, dtype="f4"))
    vckpt("import", store, "run/1", tmp_path / "w.npy")
    [pack] = store.glob("packs/*/*-model.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 0x55
    pack.write_bytes(data)
    return store


def verify(vckpt, store, *more, **env):
    return on_terminal(vckpt, "verify", store, "--no-notes", *more, check=False, **env)


def test_damage_is_red(vckpt, damaged):
    text = verify(vckpt, damaged)
    assert f"{RED}damage:{END} packs/" in text and f"read: {RED}1 fault{END}\n" in text, text
    text = on_terminal(vckpt, "mend", "-n", damaged, check=False)
    assert f"{RED}found{END}   packs/" in text and f"{RED}lost{END}    run/step-00000001 tensor model/w" in text, text
    assert "1 fault found; " in text


@pytest.mark.parametrize("env, more", [({"NO_COLOR": "1"}, []), ({"TERM": "dumb"}, []), ({"TERM": ""}, []),
                                       ({}, ["--color=never"]), ({}, ["--color", "never"])])
def test_no_colours(vckpt, damaged, env, more):
    text = verify(vckpt, damaged, *more, **env)
    assert "damage: packs/" in text and "\033[" not in text.replace("\033[K", ""), text


def test_colours_without_a_terminal(vckpt, damaged):
    piped = vckpt("verify", damaged, "--no-notes", check=False).stdout
    assert "\033" not in piped
    asked = vckpt("verify", damaged, "--no-notes", "--color=always", check=False,
                  env={"NO_COLOR": "1", "TERM": "dumb"}).stdout
    assert f"{RED}damage:{END}" in asked and re.sub(r"\033\[[0-9;]*m", "", asked) == piped
    assert "\033" not in vckpt("verify", damaged, "--no-notes", "--json", "--color=always", check=False).stdout


def test_another_word_is_refused(vckpt, store):
    done = vckpt("verify", store, "--color=blue", check=False)
    assert done.returncode == 2 and "--color is auto, always or never" in done.stderr
