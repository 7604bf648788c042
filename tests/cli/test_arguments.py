# SPDX-License-Identifier: Apache-2.0
"""Commands and their positional arguments: which there are, what they take, and a store that VCKPT_STORE names."""
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="module")
def help_of(vckpt):
    """{command: its --help}, as `vckpt --help` lists them."""
    names = re.findall(r"^  (\w+) ", vckpt("--help").stdout, re.M)
    assert len(names) > 15
    return {name: vckpt(name, "--help").stdout for name in names}


@pytest.fixture
def here(vckpt, two_steps, tmp_path, monkeypatch):
    """The working directory: a store `store` with run/1 and run/2, the file w.npy of which they are, an empty store
    `elsewhere` and an empty mnt."""
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mnt").mkdir()
    vckpt("init", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- what the command says of itself ----

def test_called_by_mount_8(vckpt):
    """For -t fuse.vckpt, and to remount, mount(8) runs the type as a command: STORE DIR -o OPTIONS."""
    for options in ("rw,dev,suid", "ro,noremount", "remounts", ""):
        done = vckpt("/srv/a\nb", "/mnt/c", "-o", options, check=False)
        assert (done.returncode, done.stderr) == (2, 'vckpt: mount the store /srv/a\\x0ab on /mnt/c with "mount -t '
                                                  'vckpt STORE DIR" (not fuse.vckpt) or "vckpt mount STORE DIR"\n')
    for options in ("remount", "ro,remount,dev,suid", "dev,remount"):
        done = vckpt("/srv/a", "/mnt/c", "-o", options, check=False)
        assert (done.returncode, done.stderr) == (2, "vckpt: a mounted store cannot be remounted; unmount /mnt/c and "
                                                  "mount it again (new steps appear without that)\n")


def test_help_groups_the_commands(vckpt, help_of):
    said = vckpt("--help").stdout
    for title in ["write:", "read:", "look after a store:", "think about layouts, without a store:"]:
        assert f"\n\n{title}\n  " in said
    for name, text in help_of.items():
        assert text.startswith(f"usage: vckpt {name} ") and len(re.findall(rf"^  {name} +\w", said, re.M)) == 1
        assert vckpt("help", name).stdout == text
    assert vckpt("help").stdout == vckpt("-h").stdout == said
    assert "-o OPTION,..." in help_of["mount"] and "views=safetensors" in help_of["mount"]


def test_version(vckpt):
    said = {vckpt(word).stdout for word in ("version", "--version", "-V")}
    assert len(said) == 1 and re.fullmatch(r"vckpt \d+\.\d+\.\d+\n", said.pop())


@pytest.mark.parametrize("typed, meant", [("lst", "ls"), ("exprot", "export"), ("verfy", "verify"),
                                          ("imports", "import"), ("Layout", "layout")])
def test_a_command_that_is_almost_right(vckpt, typed, meant):
    for words in [(typed,), ("help", typed)]:
        done = vckpt(*words, check=False)
        assert (done.returncode, done.stderr) == (2, f'vckpt: there is no command "{typed}"; did you mean {meant}? '
                                                  f'(see vckpt --help)\n')


@pytest.mark.parametrize("typed", ["", "x", "xy", "something", "e" * 31, "e" * 32, "e" * 5000])
def test_a_command_like_no_other(vckpt, typed):
    assert vckpt(typed, check=False).stderr == f'vckpt: there is no command "{typed}" (see vckpt --help)\n'


# ---- the store that VCKPT_STORE names ----

# What stands after STORE: of each command that takes one, but for init.
AFTER_STORE = {
    "import": ["new/7", "w.npy"], "ls": ["run"], "info": ["run/1"], "cat": ["run/1/manifest.json"],
    "show": ["run/1/model/w"], "diff": ["run/1", "run"], "export": ["run/1", "out"], "verify": ["run"], "mend": [],
    "rm": ["run/1"], "du": ["run/1", "--packs"], "copy": ["run/1", "--to", "elsewhere"],
    "prune": ["run", "--keep-last", "1", "-n"], "policy": ["run"], "sync": ["run", "--to", "elsewhere"], "gc": [],
    "abort": ["run"], "index": [], "stalls": ["run/1"], "mount": ["mnt", "--fake"], "log": ["run"],
    "metrics": ["-o", "m.prom"], "report": ["run", "--html", "-"], "find": ["step >= 0"], "wait": ["run/1"],
    "set": ["run/1", "a=b"], "tag": ["run/1", "best"], "pin": ["run/1"], "unpin": ["run/1"], "repack": ["run/1"],
}
NO_STORE = {"umount", "mesh", "layout", "reshard"}


def test_the_lists_above_name_all_commands(help_of):
    takes = {name for name, text in help_of.items() if text.split()[3] == "STORE"}
    assert takes == {*AFTER_STORE, "init"} and set(help_of) - takes == NO_STORE


def plain(text):
    """Without what differs from one call to the next."""
    return re.sub(r"[0-9a-f]{16,}|[\d.]+ (ns|us|ms|s|B|kB)\b|\d{4}-\d\d-\d\dT[\d:]+Z|\s+", " ", text)


@pytest.mark.parametrize("command", AFTER_STORE)
def test_the_store_may_be_left_out(vckpt, here, command):
    """The same is done and said as if it had been given."""
    words, results = AFTER_STORE[command], []
    shutil.copytree("store", "copy")
    for env, store in [({}, ["store"]), ({"VCKPT_STORE": "store"}, [])]:
        done = vckpt(command, *store, *words, check=False, env=env)
        shutil.rmtree("out", ignore_errors=True)
        results.append((done.returncode, plain(done.stdout),
                        plain(done.stderr.replace(" (store store, from VCKPT_STORE)", ""))))
        shutil.rmtree("store")
        shutil.rmtree("elsewhere")
        vckpt("init", "elsewhere")
        shutil.copytree("copy", "store")
    assert results[0] == results[1]
    assert results[0][0] == 0 or command == "abort" and "no save under way" in results[0][2], results


@pytest.mark.parametrize("command", AFTER_STORE)
def test_a_store_that_is_given_counts(vckpt, here, command):
    done = vckpt(command, "store", *AFTER_STORE[command], check=False, env={"VCKPT_STORE": "/nonexistent"})
    assert done.returncode == 0 or command == "abort" and "no save under way" in done.stderr
    assert "VCKPT_STORE" not in done.stderr


@pytest.mark.parametrize("command", AFTER_STORE)
@pytest.mark.parametrize("what", ["nonexistent", "empty"])
def test_a_variable_that_names_no_store(vckpt, here, command, what):
    (here / "empty").mkdir()
    done = vckpt(command, *AFTER_STORE[command], check=False, env={"VCKPT_STORE": what})
    failed = 2 if command == "diff" else 1
    assert done.returncode == failed and done.stderr.endswith(" (VCKPT_STORE names this store)\n"), done.stderr
    assert done.stderr.count("\n") == 1 and f"{here}/{what}" in done.stderr


def test_a_store_from_the_variable_is_named_once(vckpt, here):
    """By the sentence itself, or else after it; a path that only begins as the store's does is another one."""
    (here / "x").mkdir()
    for store in ["store", "store/", here / "store"]:
        for words, once in [(["info", "run/7"], True), (["rm", "x", "--yes"], True), (["abort", "run"], False),
                            (["export", "run/1", here / "store-2/in/none"], False)]:
            said = vckpt(*words, check=False, env={"VCKPT_STORE": str(store)}).stderr
            assert said.endswith(" (VCKPT_STORE names this store)\n" if once
                                 else f" (store {store}, from VCKPT_STORE)\n"), said
            assert len(re.findall(rf"{here}/store(?![-\w])", said)) == (once or store == here / "store"), said


@pytest.mark.parametrize("command", AFTER_STORE)
def test_no_store_at_all(vckpt, here, help_of, command):
    """An empty variable is none."""
    usage = help_of[command].split("\n")[0]
    for env in [{}, {"VCKPT_STORE": ""}]:
        done = vckpt(command, check=False, env=env)
        assert (done.returncode, done.stderr) == (
            2, f"vckpt {command}: STORE is missing, and VCKPT_STORE is not set (see vckpt {command} --help)\n{usage}\n")


def test_init_takes_an_argument_for_the_store(vckpt, here):
    vckpt("init", "new", env={"VCKPT_STORE": "store"})
    vckpt("init", env={"VCKPT_STORE": "other"})
    assert vckpt.json("ls", "new") == vckpt.json("ls", "other") == {"runs": []}
    done = vckpt("init", check=False, env={"VCKPT_STORE": "store"})
    assert done.returncode == 1 and done.stderr.startswith("vckpt init: store is a vckpt store already ")
    assert done.stderr.endswith(" (VCKPT_STORE names this store)\n") and done.stderr.count("store ") == 2


def test_an_argument_that_is_no_store_is_never_taken_for_one(vckpt, here):
    """Above all, the store of the variable is not collected or mended where another one was meant."""
    env, before = {"VCKPT_STORE": "store"}, sorted((here / "store").rglob("*"))
    for command in ("gc", "mend", "index"):
        for given in ("typo", "/no/store", ""):
            done = vckpt(command, given, check=False, env=env)
            assert done.returncode == 2 and done.stderr.startswith(
                f'vckpt {command}: "{given}" is one argument too many; the first one, "{given}", is not a store (store '
                f'store, from VCKPT_STORE) '), done.stderr
    for command in ("ls", "verify"):
        done = vckpt(command, "/no/store", check=False, env=env)
        assert done.returncode == 2 and done.stderr.startswith(f'vckpt {command}: "/no/store" is not a store, and does '
                                                               f'not begin with a run\'s name: ')
    assert sorted((here / "store").rglob("*")) == before


def test_a_directory_as_source_and_a_store_as_from(vckpt, here):
    env = {"VCKPT_STORE": "store"}
    (here / "in").mkdir()
    save_file({"w": np.load("w.npy")}, "in/model.safetensors")
    (here / "in/config.json").write_text("{}")
    vckpt("import", "dir/1", "in", env=env)
    vckpt("import", "in", "in", env=env)                        # the first is the run
    assert {r["run"] for r in vckpt.json("ls", "store")["runs"]} == {"run", "dir", "in"}
    shutil.copytree("store", "store2")
    assert vckpt("mend", "--from", "store2", env=env).stdout == "sound: nothing to mend\n"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"),
                    reason="a directory that may not be looked into is made by root, with setpriv")
def test_what_cannot_be_looked_at_is_named(vckpt, here):
    os.chmod(here, 0o755)
    (here / "closed").mkdir(mode=0o700)
    os.chown(here / "closed", 12345, 12345)
    done = subprocess.run(["setpriv", "--bounding-set=-dac_override,-dac_read_search", vckpt.path, "ls",
                           "closed/store"], capture_output=True, text=True,
                          env={**os.environ, "VCKPT_STORE": "store"})
    assert done.returncode == 1 and f"{here}/closed/store" in done.stderr and "Permission denied" in done.stderr


# ---- too few, too many ----

@pytest.mark.parametrize("words, sentence", [
    (["cat", "store"], "RUN/STEP/PATH is missing"),
    (["import", "store"], "RUN[/STEP] is missing"),
    (["import", "store", "run"], "SOURCE is missing"),
    (["export", "store", "run/1"], "DEST is missing"),
    (["export", "run/1", "out"], "run/1 is not a store: STORE comes first, unless VCKPT_STORE names it"),
    (["cat", "run/1/model/w"], "run/1/model/w is not a store: STORE comes first, unless VCKPT_STORE names it"),
    (["import", "run", "w.npy"], "run is not a store: STORE comes first, unless VCKPT_STORE names it"),
    (["import", "run", "./w.npy"], "run is not a store: STORE comes first, unless VCKPT_STORE names it"),
    (["import", "store", "w.npy"], "RUN is expected where w.npy is given, which is a file or directory: is RUN missing "
     "before it?"),
    (["init", ""], "an empty argument is given where STORE is expected"),
    (["gc", ""], "an empty argument is given where STORE is expected"),
    (["ls", "store", ""], "an empty argument is given where RUN[/STEP[/COMPONENT]] is expected"),
    (["info", "store", ""], "an empty argument is given where RUN/STEP[/COMPONENT/TENSOR] is expected"),
    (["import", "store", "", "w.npy"], "an empty argument is given where RUN[/STEP] is expected"),
    (["rm", "store", ""], "an empty argument is given where RUN[/STEP] is expected"),
    (["export", "store", "run/1", ""], "an empty argument is given where DEST is expected"),
    (["info", "store", "run", "1"], '"1" is one argument too many'),
    (["gc", "store", "store"], '"store" is one argument too many'),
    (["ls", "store", "run/1", "run/2"], '"run/2" is one argument too many'),
])
def test_the_argument_at_fault_is_named(vckpt, here, help_of, words, sentence):
    done = vckpt(*words, check=False)
    usage = help_of[words[0]].split("\n")[0]
    assert (done.returncode, done.stderr) == (2,
                                              f"vckpt {words[0]}: {sentence} (see vckpt {words[0]} --help)\n{usage}\n")


@pytest.mark.parametrize("words", [["init", "{}"], ["ls", "{}"], ["ls", "store", "{}"], ["gc", "{}"],
                                   ["mount", "{}", "mnt"], ["import", "store", "run", "{}"],
                                   ["export", "store", "run/1", "{}"]], ids=str)
@pytest.mark.parametrize("url", ["s3://bucket/x", "s3:/bucket/x", "s3:/b"])
def test_urls_are_refused(vckpt, here, words, url):
    """With one slash, too, as pathlib writes them, unless there is such a folder."""
    before = sorted(os.listdir())
    sentence = f"{url}: this is a URL, and vckpt has no storage for s3://: give a directory of a mounted file system"
    done = vckpt(*[word.format(url) for word in words], check=False)
    assert (done.returncode, done.stderr) == (2, f"vckpt {words[0]}: {sentence} (see vckpt {words[0]} --help)\n")
    assert sentence in vckpt("ls", check=False, env={"VCKPT_STORE": url}).stderr
    assert sorted(os.listdir()) == before
    os.mkdir("s3:")
    done = vckpt(*[word.format(url) for word in words], check=False)
    assert ("this is a URL" in done.stderr) == ("://" in url)
    shutil.rmtree("s3:")


def test_names_of_steps(vckpt, here):
    """By any of the words; alone, a step of the run `default`, unless a run has that name."""
    for number in 7, 10:
        vckpt("import", "store", f"step-{number}", "w.npy")
    assert [step["step"] for step in vckpt.json("ls", "store", "default")["steps"]] == [7, 10]
    for name in "default/10", "default/ckpt-000010", "10", "global_step10", "epoch=10", "latest", "default/iter_10":
        assert vckpt.json("info", "store", name)["step"] == 10, name
    vckpt("import", "store", "ckpt-7/3", "w.npy")
    assert vckpt.json("info", "store", "ckpt-7")["run"] == "ckpt-7"
    assert "there is no run 10" in vckpt("rm", "store", "10", "--yes", check=False).stderr
    assert len(vckpt.json("ls", "store", "default")["steps"]) == 2


@pytest.mark.parametrize("words, sentence", [
    (["export", "store", "run", "out"], "run is not a step: RUN/STEP, or RUN/STEP/COMPONENT"),
    (["stalls", "store", "run"], "run is not a step: RUN/STEP"),
    (["verify", "store", "run/1/model"], "run/1/model is not a run or a step: give RUN or RUN/STEP"),
    (["cat", "store", "run/1"], "run/1 is not a file of a step: give RUN/STEP/PATH, where PATH is as the mount "
     "shows it"),
    (["import", "store", "run/latest", "w.npy"], "run/latest is not RUN or RUN/STEP, where STEP is a number"),
])
def test_a_target_of_another_kind(vckpt, here, words, sentence):
    done = vckpt(*words, check=False)
    assert (done.returncode, done.stderr) == (2, f"vckpt {words[0]}: {sentence} (see vckpt {words[0]} --help)\n")
