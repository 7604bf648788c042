# SPDX-License-Identifier: Apache-2.0
"""What the command says when something is wrong sends people the right way."""
import os
import pwd
import re
import shutil
import subprocess

import numpy as np
import pytest


@pytest.fixture
def filled(two_steps, tmp_path):
    """A store with runs/1 and runs/2 of one tensor, and the file that it came from, in the directory of both."""
    return shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True) / "store"


# ---- a store that one may not write to ----

OWNER = 12345       # has no name


@pytest.fixture
def foreign(vckpt, filled):
    """Runs the command as one who may read the store of another user, and not write to it."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("a store of another user is made by root, with setpriv")
    for path in [filled, *filled.rglob("*")]:
        os.chown(path, OWNER, OWNER)

    def run(*args):
        return subprocess.run(["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", vckpt.path,
                               *map(str, args)], capture_output=True, text=True)
    return run


@pytest.mark.parametrize("command", ["import", "rm", "gc"])
def test_a_store_of_somebody_else(vckpt, filled, foreign, tmp_path, command):
    if command == "gc":
        vckpt("rm", filled, "run/1")        # something to mark
    before = sorted(filled.rglob("*"))
    done = foreign(command, filled, *{"import": ["new/1", tmp_path / "w.npy"], "rm": ["run/1"], "gc": []}[command])
    assert (done.returncode, done.stderr) == (1, f"vckpt {command}: you may not write to the store {filled} (it "
                                              f"belongs to user {OWNER})\n")
    assert sorted(filled.rglob("*")) == before and foreign("ls", filled).returncode == 0


def test_a_store_of_somebody_with_a_name(filled, foreign):
    os.chown(filled, 1, 1)
    assert f"(it belongs to {pwd.getpwuid(1).pw_name})" in foreign("rm", filled, "run/1").stderr


def test_a_file_in_a_store_of_ones_own(filled, foreign):
    """It is not the store that denies it, so the file is named."""
    os.chown(filled, 0, 0)
    assert (foreign("rm", filled, "run/1").stderr.startswith("vckpt rm: runs/run/") and
            "Permission denied" in foreign("rm", filled, "run/1").stderr)


# ---- what is not there ----

@pytest.mark.parametrize("words", [
    ("rm", "nosuch/1"), ("rm", "nosuch/latest"), ("rm", "nosuch/1..2"), ("rm", "nosuch", "--yes"), ("info", "nosuch/1"),
    ("info", "nosuch/latest"), ("ls", "nosuch"), ("ls", "nosuch/1"), ("cat", "nosuch/1/model/w.npy"),
    ("export", "nosuch/1", "out"), ("verify", "nosuch"), ("verify", "nosuch/1"), ("stalls", "nosuch/1"),
    ("report", "nosuch", "--html", "-"), ("abort", "nosuch"),
    ("abort", "nosuch", "aaaaaaaaaaaaaaaa-1-0")], ids=" ".join)
def test_there_is_no_such_run(vckpt, filled, words):
    done = vckpt(words[0], filled, *words[1:], check=False)
    assert (done.returncode, done.stderr) == (
        1, f"vckpt {words[0]}: there is no run nosuch (vckpt ls {filled} lists the runs)\n")


@pytest.mark.parametrize("words", [("rm", "run/7"), ("info", "run/7"), ("ls", "run/7"), ("cat", "run/7/model/w.npy"),
                                   ("export", "run/7", "out"), ("verify", "run/7"), ("stalls", "run/7")], ids=" ".join)
def test_there_is_no_such_step(vckpt, filled, words):
    done = vckpt(words[0], filled, *words[1:], check=False)
    assert (done.returncode, done.stderr) == (
        1, f"vckpt {words[0]}: run has no step 7 (vckpt ls {filled} run lists them)\n")
    vckpt("rm", filled, "run/1..2")
    done = vckpt(words[0], filled, *words[1:], check=False)
    assert done.stderr == f"vckpt {words[0]}: run has no step (vckpt ls {filled} lists the runs)\n"


# ---- arguments that are missing, or in another order ----

SWAPPED = [("info", "run/1"), ("rm", "run/1"), ("cat", "run/1/model/w"), ("stalls", "run/1"), ("ls", "run"),
           ("verify", "run/1"), ("abort", "run"),
           ("report", "run", "--html", "-"), ("export", "run/1", "out"), ("import", "run/3", "w.npy")]


@pytest.mark.parametrize("command, target, more", [(c, t, more) for c, t, *more in SWAPPED])
@pytest.mark.parametrize("absolute", [False, True])
def test_swapped_arguments(vckpt, filled, tmp_path, monkeypatch, command, target, more, absolute):
    monkeypatch.chdir(tmp_path)
    store = filled if absolute else filled.name
    done = vckpt(command, target, store, *more, check=False)
    assert (done.returncode, done.stderr) == (2, f"vckpt {command}: {target} is not a store, and {store} is: give "
                                              f"STORE first (see vckpt {command} --help)\n")
    assert len(vckpt.json("ls", filled, "run")["steps"]) == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("ls", "run"), ("ls", "run/1"), ("info", "run/1"), ("rm", "run/1"),
                                   ("rm", "run/1", "-n"), ("verify", "run/1"), ("stalls", "run/1"),
                                   ("cat", "run/1/model/w.npy"), ("export", "run/1", "out"),
                                   ("import", "other", "w.npy")], ids=" ".join)
@pytest.mark.parametrize("absolute", [False, True])
def test_the_path_that_python_takes(vckpt, filled, tmp_path, monkeypatch, words, absolute):
    """STORE/RUN/STEP."""
    monkeypatch.chdir(tmp_path)
    store = filled if absolute else filled.name
    done = vckpt(words[0], f"{store}/{words[1]}", *words[2:], check=False)
    said = f"{store}/{words[1]} is in the store {store}: give the two apart: {store} {words[1]}"
    assert done.returncode in (1, 2) and done.stderr.startswith(f"vckpt {words[0]}: {said}"), done.stderr
    assert len(vckpt.json("ls", filled, "run")["steps"]) == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("gc",), ("mend",), ("index",), ("mount", "mnt"), ("mount", "mnt", "--fake")],
                         ids=" ".join)
@pytest.mark.parametrize("inside", ["run", "run/1", "runs/run", "packs"])
def test_a_command_for_the_whole_store(vckpt, filled, tmp_path, words, inside):
    (tmp_path / "mnt").mkdir()
    more = [tmp_path / word if word == "mnt" else word for word in words[1:]]
    done = vckpt(words[0], filled / inside, *more, check=False)
    assert (done.returncode, done.stderr) == (1, f"vckpt {words[0]}: {filled}/{inside} is in the store {filled}: give "
                                              f"that, for the command is for a whole store\n")


def test_the_folder_of_a_run_in_the_store(vckpt, filled):
    done = vckpt("ls", filled / "runs/run", check=False)
    assert done.stderr == f"vckpt ls: {filled}/runs/run is in the store {filled}: give the two apart: {filled} run\n"


@pytest.mark.parametrize("given", ["./in", "w.npy", "in/w.npy", "."])
def test_a_source_is_not_taken_for_a_run(vckpt, filled, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    shutil.copy("w.npy", "in/w.npy")
    for more in [["w.npy"], []]:
        done = vckpt("import", filled, given, *more, check=False)
        assert done.returncode == 2 and done.stderr.startswith(
            f"vckpt import: RUN is expected where {given} is given, which is a file or directory: is RUN missing "
            f"before it?"), done.stderr
    assert set(os.listdir(filled / "runs")) == {"run"}
    vckpt("import", filled, "in", "in/w.npy")                   # a run may be called as a directory here is
    vckpt("import", filled, "other.npy", "in/w.npy")


def test_a_run_is_not_taken_for_a_store(vckpt, filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hint = ": if {0} is a run, give STORE before it"
    for command, target in [("ls", "run"), ("ls", "run/1"), ("verify", "run/1")]:
        assert vckpt(command, target, check=False).stderr.endswith(f"No such file or directory{hint.format(target)}\n")
        assert vckpt(command, target, env={"VCKPT_STORE": filled}).stdout
    # none of them is a run, or takes one
    for command, target in [("ls", "./run"), ("gc", "run"), ("index", "run"), ("mend", "run")]:
        assert "give STORE" not in vckpt(command, target, check=False).stderr
    (tmp_path / "plain").mkdir()
    assert hint.format("plain") in vckpt("ls", "plain", check=False).stderr


def test_an_import_says_how_a_store_is_made(vckpt, tmp_path, monkeypatch):
    """Other commands need one that holds something already."""
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", np.arange(10))
    (tmp_path / "my dir").mkdir()
    (tmp_path / "file").write_text("")
    for store, word in [("none", "none"), ("my dir", "'my dir'")]:
        said = vckpt("import", store, "run", "w.npy", check=False).stderr
        assert (said.startswith(f"vckpt import: {tmp_path}/{store}") and
                said.endswith(f" (vckpt init {word} makes a store there)\n")), said
    for words in [("import", "file", "run", "w.npy"), ("gc", "none"), ("rm", "none", "run/1")]:
        assert "vckpt init" not in vckpt(*words, check=False).stderr


def test_what_cannot_be_a_run_is_shown_as_it_was_typed(vckpt, filled):
    for given in ["/x/1", "+x"]:
        assert (f'vckpt info: "{given}" does not begin with a run\'s name: '
                f'[A-Za-z0-9_]' in vckpt("info", filled, given, check=False).stderr)
    assert "run names have at most 128 bytes" in vckpt("info", filled, "x" * 200, check=False).stderr


# ---- damage ----

def damaged(store, how):
    """One pack of tensors, with a byte changed, cut in two, or gone; its name."""
    [pack] = store.glob("packs/*/*-model.pack")
    data = bytearray(pack.read_bytes())
    if how == "gone":
        pack.unlink()
    else:
        data[len(data) // 2] ^= 0x55
        pack.write_bytes(data if how == "byte" else data[:len(data) // 2] if how == "half" else data[:50])
    return pack.stem


@pytest.mark.parametrize("how", ["byte", "half", "head", "gone"])
def test_a_pack_is_named_once_in_a_line(vckpt, filled, tmp_path, how):
    pack, said = damaged(filled, how), ""
    for command in [("verify", filled), ("mend", "-n", filled), ("cat", filled, "run/1/model/w"),
                    ("export", filled, "run/1", tmp_path / "out")]:
        done = vckpt(*command, check=False, text=False)
        said += (done.stdout if command[0] != "cat" else b"").decode() + done.stderr.decode()
    lines = [line for line in said.splitlines() if pack in line]
    assert len(lines) >= 4 and all(line.count(pack) == 1 for line in lines), said
    assert all(line.count("at offset") <= 1 for line in lines), said


# ---- what a command says of itself ----

def test_stalls_of_an_import(vckpt, filled):
    """No rank saved it, so nothing of it is missing."""
    said = vckpt("stalls", filled, "run/1").stdout.splitlines()
    assert (said[0].startswith("run/step-00000001, 1 rank") and said[1] == "imported by one process: no rank waited, "
            "and only the time in each phase is known")
    assert said[2] == "" and said[3].split() == ["busy", "in", "median", "longest", "spread", "ranks", "rank", "on",
                                                 "host"], said
    assert {line.split()[0] for line in said[4:]} == {"digest", "encode", "write", "read"}


def test_gc_says_what_a_later_one_does(vckpt, filled):
    vckpt("rm", filled, "run/1")
    vckpt("rm", filled, "run/2")
    later = r": a later vckpt gc deletes (?:it|them), after 24 h; --grace 0: now\n"
    said = [vckpt("gc", filled).stdout.split("\n")[-2] + "\n" for _ in range(2)]
    assert re.fullmatch(r"0 files deleted, 0 B; \d+ files? marked" + later, said[0]), said
    assert re.fullmatch(r"0 files deleted, 0 B; \d+ files?, [\d.]+ (?:Ki)?B, marked before" + later, said[1]), said
    for grace, words in [("90m", "90 min"), ("45", "45 s"), ("2d", "48 h")]:
        assert vckpt("gc", "-n", filled, "--grace", grace).stdout.endswith(f"marked before: a later vckpt gc deletes "
                                                                           f"them, after {words}; --grace 0: now\n")
    assert re.search(r"^\d+ files? deleted, [\d.]+ (?:Ki)?B\n$", vckpt("gc", filled, "--grace", "0").stdout, re.M)
    assert vckpt("gc", filled).stdout == "0 files deleted, 0 B\n"


def test_help_says_what_quiet_does(vckpt):
    for command in re.findall(r"^  (\w+) ", vckpt("--help").stdout, re.M):
        assert "print nothing;" not in vckpt(command, "--help").stdout, command
    for command in ("import", "gc"):
        assert "print nothing but errors;" in vckpt(command, "--help").stdout
        done = vckpt(command, "-q", "/nonexistent", *["run", "/nonexistent"][:2 if command == "import" else 0],
                     check=False)
        assert done.returncode == 1 and done.stderr


# ---- commands to be typed ----

@pytest.mark.parametrize("name, word", [("plain-1.0_x@y", "{}/plain-1.0_x@y"), ("größe", "{}/größe"),
                                        ("my store", "'{}/my store'"), ("it's $HOME;`x`", "'{}/it'\\''s $HOME;`x`'"),
                                        ("~*", "'{}/~*'")])
def test_commands_can_be_typed_as_they_stand(vckpt, tmp_path, name, word):
    """A shell takes the path for one word, and what it runs is the command that was meant."""
    store, word = tmp_path / name, word.format(tmp_path)
    np.save(tmp_path / "w.npy", np.arange(10))
    assert vckpt("init", store).stdout.endswith(f"; next: vckpt import {word} RUN SOURCE\n")
    vckpt("import", store, "a/1", tmp_path / "w.npy")
    said = [(f"vckpt ls {word} a", vckpt("info", store, "a/2", check=False).stderr),
            (f"vckpt ls {word}", vckpt("info", store, "b/latest", check=False).stderr),
            (f"vckpt ls {word} a", vckpt("rm", store, "a/2", check=False).stderr),
            (f"vckpt ls {word} a", vckpt("rm", store, "a/2..3", check=False).stderr),
            (f"vckpt ls {word}", vckpt("rm", store, "b", check=False).stderr),
            (f"vckpt ls {word}", vckpt("rm", store, "b/latest", check=False).stderr),
            (f"vckpt gc {word}", vckpt("rm", store, "a/1").stdout)]
    for command, text in said:
        assert re.search(rf"(^|\(){re.escape(command)} (lists|gives)", text, re.M), text
        subprocess.run(["bash", "-c", command.replace("vckpt", '"$0"', 1), vckpt.path], check=True,
                       stdout=subprocess.PIPE)
