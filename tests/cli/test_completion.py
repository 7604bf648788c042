# SPDX-License-Identifier: Apache-2.0
"""tools/completions/vckpt.bash: what bash offers behind a line as it is typed so far."""
import os
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools/completions/vckpt.bash"
SHELL = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_vckpt
printf '%s\\n' "${COMPREPLY[@]}"
"""

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")


@pytest.fixture(scope="module")
def stores(vckpt, tmp_path_factory):
    """A store `one` with the runs llama (steps 5 and 100) and tuned (step 0), and `two` with the run other (step 1)."""
    folder = tmp_path_factory.mktemp("completion")
    np.save(folder / "w.npy", np.arange(1000, dtype="f4"))
    for target in ["one/llama/5", "one/llama/100", "one/tuned/0", "two/other/1"]:
        store, _, step = target.partition("/")
        if not (folder / store).exists():
            vckpt("init", folder / store)
        vckpt("import", folder / store, step, folder / "w.npy", "--set", 'step="step": 77', "-q")
    return folder


@pytest.fixture
def offered(vckpt, stores):
    def offered(*words, store=None):
        env = {k: v for k, v in os.environ.items() if k != "VCKPT_STORE"} | ({"VCKPT_STORE": str(stores / store)}
                                                                             if store else {})
        done = subprocess.run(["bash", "--norc", "--noprofile", "-c", SHELL, "bash", str(SCRIPT), vckpt.path, *words],
                              cwd=stores, env=env, capture_output=True,
                              text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return sorted(done.stdout.split())
    return offered


def test_it_is_bound_to_the_command(stores):
    done = subprocess.run(["bash", "--norc", "--noprofile", "-c", 'source "$1" && complete -p vckpt', "bash",
                           str(SCRIPT)], capture_output=True, text=True)
    assert done.stdout == "complete -o default -F _vckpt vckpt\n" and done.stderr == ""


def test_commands(vckpt, offered):
    all_ = set(re.findall(r"^  (\w+) ", vckpt("--help").stdout, re.M)) | {"help", "version"}
    assert set(offered("")) == set(offered("help", "")) == all_
    assert offered("im") == ["import"] and offered("la") == ["layout"] and offered("xyz") == []


def test_options(vckpt, offered):
    """All that the help of a command lists, and no other's."""
    for command in offered(""):
        if command not in ("help", "version"):
            usage, _, rest = vckpt(command, "--help").stdout.partition("\n\n")
            lines = [usage, *re.findall(r"^  -.*", rest, re.M)]
            assert set(offered(command, "--")) == set(re.findall(r"--[a-z][a-z-]*", "\n".join(lines))) | {"--help",
                    "--quiet", "--verbose"}
    assert offered("rm", "--k") == ["--keep-every", "--keep-last"]
    assert "--grace" not in offered("rm", "one", "--") and "--grace" in offered("gc", "one", "--")


@pytest.mark.parametrize("words, wrong", [
    (["export", "STORE", "llama/5", "OUT", "-q", "--format"], "--format {}: give safetensors, npy or both"),
    (["ls", "STORE", "llama", "--sort"], "--sort {}: steps are sorted by"),
    (["ls", "STORE", "--color"], "--color is auto, always or never"),
    (["import", "STORE", "new", "--dtype"], "--dtype {}: it is for .npy files"),
    (["layout", "--shape", "4", "--mesh", "x=2", "--place", "R", "--dtype"], "--dtype {}: there is no such type"),
    (["reshard", "--shape", "4", "--from-mesh", "x=2", "--from-place", "R", "--to-mesh", "x=2", "--to-place", "R",
      "--dtype"], "--dtype {}: there is no such type"),
])
def test_values_of_options(vckpt, offered, stores, tmp_path, words, wrong):
    """Each that is offered is one that the command takes."""
    values = offered(*words, "")
    words = [{"STORE": stores / "one", "OUT": tmp_path / "out"}.get(word, word) for word in words]
    after = []
    if words[0] == "import":
        np.save(tmp_path / "v1.npy", np.arange(8, dtype="u1").view("V1"))
        np.save(tmp_path / "v2.npy", np.arange(8, dtype="u2").view("V2"))
    for value in values:
        if words[0] == "import":
            after = [tmp_path / ("v2.npy" if value == "bf16" else "v1.npy"), "--replace", "--step", 1]
            words[1] = tmp_path / "store"
            vckpt("init", words[1], "--exist-ok", "-q")
        vckpt(*words, value, *after, *(["--replace"] if words[0] == "export" else []))
    refused = vckpt(*words, "nonsense", *after, check=False)
    assert refused.returncode == 2 and wrong.format("nonsense") in refused.stderr
    assert all(offered(*words, value[:2]) == [v for v in values if v.startswith(value[:2])] for value in values)
    assert len(values) > 2


def test_all_types_are_offered(vckpt, offered):
    listed = vckpt("layout", "--dtype", "nonsense", "--shape", "4", "--mesh", "x=2", "--place", "R",
                   check=False).stderr.partition("there are ")[2].partition(" (see")[0]
    assert offered("layout", "--dtype", "") == sorted(word.split(" ")[0] for word in listed.split(", "))
    listed = vckpt("import", "--dtype", "nonsense", check=False).stderr.partition("which are ")[2].partition(" (see")[0]
    assert offered("import", "--dtype", "") == sorted(re.findall(r"\w+\d\w*", listed))


def test_presets_of_layout_files(vckpt, offered):
    values = offered("layout", "--check", "")
    assert values == offered("cat", "one", "--layouts", "") == ["deepseek", "llama", "mixtral"]
    assert all(vckpt("layout", "--check", value).stdout.startswith(f"{value}: ") for value in values)


@pytest.mark.parametrize("words, found", [
    (["info", "one", ""], ["llama/", "tuned/"]),
    (["info", "one", "l"], ["llama/"]),
    (["info", "one", "llama/"], ["llama/100", "llama/5", "llama/latest"]),
    (["info", "one", "llama/1"], ["llama/100"]),
    (["info", "--packs", "one", "tuned/"], ["tuned/0", "tuned/latest"]),
    (["abort", "two", ""], ["other"]),
    (["abort", "--reason", "text", "two", "o"], ["other"]),
    (["rm", "one", "llama/5", "tuned/"], ["tuned/0", "tuned/latest"]),
    (["rm", "one", "tuned"], ["tuned", "tuned/"]),
    (["ls", "one", ""], ["llama", "llama/", "tuned", "tuned/"]),
    (["ls", "one", "nothing/"], ["nothing/latest"]),
    (["info", "nowhere", ""], []),
    (["info", ""], []),                              # a store: bash completes file names
    (["import", "one", "llama/5", ""], []),
    (["import", "one", "llama", "--set", ""], []),
    (["mend", "one", "--from", ""], []),
    (["layout", "--mesh", ""], []),
    (["nonsense", ""], []),
])
def test_runs_and_steps(offered, words, found):
    assert offered(*words) == found


def test_the_store_of_the_variable(offered):
    assert offered("info", "", store="one") == ["llama/", "tuned/"]
    assert offered("rm", "llama/5", "tuned/", store="one") == ["tuned/0", "tuned/latest"]
    assert offered("export", "tuned/0", "", store="one") == []
    assert offered("info", "two", "", store="one") == ["other/"]
    assert offered("import", "tu", store="one") == ["tuned", "tuned/"]
