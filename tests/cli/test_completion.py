# SPDX-License-Identifier: Apache-2.0
"""tools/vckpt/complete: what shells offer behind a line as it is typed so far, and what they make of it."""
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "tools/vckpt/complete"
SCRIPT = SCRIPTS / "vckpt.bash"
SHELL = """
source "$1"
shift
printf -v COMP_LINE '%q ' "${@:1:$#-1}"
COMP_LINE+=${!#} COMP_POINT=${#COMP_LINE}
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
_vckpt "$1"
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
            options = offered(command, "--")
            assert len(set(options)) == len(options)        # those of the usage line are described below it, too
            assert set(options) == set(re.findall(r"--[a-z][a-z-]*", "\n".join(lines))) | {"--help",
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
    (["cat", "one", "llama/5"], ["llama/5/"]),
    (["cat", "one", "llama/5/"], ["llama/5/config.json", "llama/5/manifest.json", "llama/5/model.safetensors",
                                  "llama/5/model/"][1:]),
    (["cat", "one", "llama/latest/model/"], ["llama/latest/model/w.npy"]),
    (["ls", "one", "tuned/0/"], ["tuned/0/model"]),
    (["export", "one", "llama/5", "out", "--format=s"], ["safetensors"]),
    (["info", "nowhere", ""], []),
    (["info", ""], []),                              # a store: bash completes file names
    (["import", "one", "llama/5", ""], []),
    (["import", "one", "llama", "--set", ""], []),
    (["mend", "one", "--from", ""], []),
    (["layout", "--mesh", ""], []),
    (["policy", "one", "llama", ""], ["clear", "set", "show"]),
    (["policy", "one", "llama", "s"], ["set", "show"]),
    (["prune", "one", "llama", "--thin", ""], ["model"]),
    (["prune", "one", "llama", "--keep-best", ""], []),     # bash begins a word behind a colon
    (["prune", "one", "llama", "--keep-best", "2:"], ["step"]),
    (["prune", "one", "--keep-best", "2:s"], ["step"]),
    (["prune", "one", "nothing", "--keep-best", "2:"], []),
    (["policy", "one", "tuned", "set", "--keep-best=12:"], ["step"]),
    (["policy", "one", "tuned", "set", "--keep-best", "12:x"], []),
    (["policy", "one", "tuned", "set", "--keep-best", "12:step:"], ["max", "min"]),
    (["policy", "one", "tuned", "set", "--keep-best", "12:step:mi"], ["min"]),
    (["nonsense", ""], []),
])
def test_runs_and_steps(offered, words, found):
    assert offered(*words) == found


def test_attributes_of_a_rule(vckpt, stores, tmp_path):
    """Of all steps, also those that were set later, each once."""
    shutil.copytree(stores / "one", tmp_path / "s")
    vckpt("set", tmp_path / "s", "llama/5", "eval=1", "-q")

    def of(*words):
        return vckpt("complete", "--shell", "zsh", "vckpt", *words).stdout.split("\0")[:-1]
    assert sorted(of("prune", tmp_path / "s", "llama", "--keep-best", "2:")) == ["2:eval", "2:step"]
    assert sorted(of("prune", tmp_path / "s", "--keep-best", "2:")) == ["2:eval", "2:step"]
    assert of("policy", tmp_path / "s", "tuned", "set", "--keep-best=3:") == ["--keep-best=3:step"]
    assert of("policy", tmp_path / "s", "tuned", "set", "--keep-best", "3:step:m") == ["3:step:min", "3:step:max"]


def test_the_store_of_the_variable(offered):
    assert offered("info", "", store="one") == ["llama/", "tuned/"]
    assert offered("rm", "llama/5", "tuned/", store="one") == ["tuned/0", "tuned/latest"]
    assert offered("export", "tuned/0", "", store="one") == []
    assert offered("info", "two", "", store="one") == ["other/"]
    assert offered("import", "tu", store="one") == ["tuned", "tuned/"]


# ---- in real shells ----

EVIL = ["a b", "a:c=d", "$(touch hit)", "`touch hit`;touch hit", "q'\"\\", "new\nline", "tab\tbed", "\x1b[31mred",
        "~x", "*", "-rf", "#c", "!!", "é"]


@pytest.fixture(scope="module")
def evil(vckpt, tmp_path_factory):
    """A store whose step run/1 has tensors of such names, and a program `vckpt` that completes as ours, and else writes
    its arguments to the file `args`."""
    from safetensors.numpy import save_file
    folder = tmp_path_factory.mktemp("evil")
    save_file({name: np.zeros(1, "f4") for name in EVIL}, folder / "m.safetensors")
    vckpt("init", folder / "s")
    vckpt("import", folder / "s", "run", folder / "m.safetensors", "--step", "1", "-q")
    (folder / "bin").mkdir()
    (folder / "bin/vckpt").write_text(f"""#!{sys.executable}
import json, os, sys
if sys.argv[1:2] == ["complete"]:
    os.execv({vckpt.path!r}, sys.argv)
with open("args.new", "w") as file:
    json.dump(sys.argv[1:], file)
os.rename("args.new", "args")
""")
    (folder / "bin/vckpt").chmod(0o755)
    return folder


STARTS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"], "fish": ["fish", "--no-config"]}
SOURCES = {"bash": "source {}/vckpt.bash", "fish": "source {}/vckpt.fish",
           "zsh": "fpath=({} $fpath); autoload -Uz compinit; compinit -u -D; compdef _vckpt vckpt"}


class Terminal:
    """A shell in a terminal."""
    def __init__(self, shell, folder):
        self.folder = folder
        env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "xterm", "PS1": "% ",
               "LC_ALL": "C.UTF-8", "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "")}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(STARTS[shell][0], STARTS[shell], env)
        self.run(SOURCES[shell].format(SCRIPTS))

    def run(self, line):
        """Types it, and waits until the shell has done it; the arguments of vckpt, or None."""
        for name in "args", "done":
            (self.folder / name).unlink(missing_ok=True)
        os.write(self.fd, line.encode() + b"\n")
        os.write(self.fd, b"touch done\n")
        end = time.monotonic() + 120
        while not (self.folder / "done").exists():
            assert time.monotonic() < end
            if select.select([self.fd], [], [], 0.02)[0]:
                os.read(self.fd, 65536)
        args = self.folder / "args"
        return json.loads(args.read_text()) if args.exists() else None

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture(params=STARTS)
def terminal(request, evil):
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    terminal = Terminal(request.param, evil)
    terminal.shell = request.param
    yield terminal
    terminal.close()


def test_a_shell_completes(terminal):
    assert terminal.run("vckpt in\t") == ["index"] or terminal.run("vckpt inf\t") == ["info"]
    assert terminal.run("vckpt info s r\t1") == ["info", "s", "run/1"]
    assert terminal.run("vckpt ls s run/1/\t") == ["ls", "s", "run/1/model"]
    assert terminal.run("vckpt export s run/1 out --form\tsafe\t")[-2:] == ["--format", "safetensors"]


def test_names_stay_words(terminal, evil):
    """What is completed is one word, with the very bytes of the name; nothing of it is run."""
    for name in EVIL:
        file = re.sub(r"[\x00-\x1f\x7f/%]", lambda found: f"%{ord(found[0]):02X}", name)
        typed = {"a b": "a\\ ", "a:c=d": "a:c", "q'\"\\": "q", "-rf": "-r", "!!": "\\!", "é": "é", "~x": "\\~",
                 "*": "\\*", "#c": "\\#"}.get(name, {"$": "\\$", "`": "\\`", "\x1b": "%1B"}.get(name[0], file[:3]))
        args = terminal.run(f"vckpt cat s run/1/model/{typed}\t")
        if terminal.shell == "fish" and name == "*":    # it takes a word with a wildcard for one that it expands
            continue
        if args != ["cat", "s", f"run/1/model/{file}.npy"]:     # fish took the line as typed, once in hundreds
            args = terminal.run(f"vckpt cat s run/1/model/{typed}\t")
        assert args == ["cat", "s", f"run/1/model/{file}.npy"], name
    assert not (evil / "hit").exists()


def test_open_quotation_marks(terminal, evil):
    """What is in them already stays, and they are closed."""
    for typed in "'run/1/model/$", '"run/1/model/\\$', "run/1/model/'$", 'run/1/model/"\\$', "'run/1'/model/'$":
        assert terminal.run(f"vckpt cat s {typed}\t") == ["cat", "s", "run/1/model/$(touch hit).npy"], typed
    assert terminal.run("vckpt cat s 'run/1/model/a b\t") == ["cat", "s", "run/1/model/a b.npy"]
    assert terminal.run("vckpt cat s 'run/1/model/q\t") == ["cat", "s", "run/1/model/q'\"\\.npy"]
    assert not (evil / "hit").exists()


def test_nothing_that_a_terminal_obeys(vckpt, tmp_path):
    """Names of tensors with controls of any kind: bash gets them in octal digits, fish does not get them at all."""
    from safetensors.numpy import save_file
    names = ["plain", "csi\u009b2J", "turned\u202etxt", "esc\x1b[2J", "\u00e9"]
    save_file({name: np.zeros(1, "f4") for name in names}, tmp_path / "m.safetensors")
    vckpt("init", tmp_path / "s")
    vckpt("import", tmp_path / "s", "run", tmp_path / "m.safetensors", "--step", "1", "-q")
    word = f"{tmp_path}/s", "run/1/model/"
    bash = vckpt("complete", "--shell", "bash", ":=", f"vckpt show {' '.join(word)}").stdout.split("\0")[:-1]
    assert not re.search("[\0-\x1f\x7f-\x9f\u202a-\u202e]", "".join(bash))
    quoted = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(bash)}"], capture_output=True, text=True).stdout
    assert sorted(quoted.split("\0")[:-1]) == sorted(f"run/1/model/{name}" for name in names)
    fish = vckpt("complete", "--shell", "fish", "vckpt", "show", *word).stdout.split("\n")[:-1]
    assert sorted(fish) == ["run/1/model/plain", "run/1/model/\u00e9"]
