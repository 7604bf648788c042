# SPDX-License-Identifier: Apache-2.0
"""vckpt rm: one step, several, a range, a run; what is asked, and what is left when something fails."""
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from terminal import open_terminal, written

STEPS = [0, 5, 10, 12, 20]


@pytest.fixture(scope="module")
def template(vckpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm")
    vckpt("init", folder / "store")
    np.save(folder / "w.npy", np.arange(1000, dtype="f4"))
    for target in [*(f"a/{step}" for step in STEPS), "b/1", "b/2"]:
        vckpt("import", folder / "store", target, folder / "w.npy", "-q")
    return folder / "store"


@pytest.fixture
def store(template, tmp_path):
    """A store with the steps STEPS of run a, and 1 and 2 of run b."""
    shutil.copytree(template, tmp_path / "store")
    np.save(tmp_path / "new.npy", np.arange(1, 1001, dtype="f4"))
    return tmp_path / "store"


def on_terminal(vckpt, answer, *words):
    """The command with a terminal as standard input and error, on which `answer` is typed: exit code, what it wrote."""
    ours, theirs = open_terminal()
    os.write(ours, answer)
    done = subprocess.run([vckpt.path, *map(str, words)], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs,
                          timeout=60)
    os.close(theirs)
    said = written(ours)
    os.close(ours)
    return done.returncode, done.stdout.decode(), said.replace("\r\n", "\n")


@pytest.mark.parametrize("words, rest", [
    (["a/5"], [0, 10, 12, 20]),
    (["a/step-00000005"], [0, 10, 12, 20]),
    (["a/5", "a/12", "a/5"], [0, 10, 20]),
    (["a/5..12"], [0, 20]),
    (["a/1..11", "a/10..19"], [0, 20]),
    (["a/step-00000005..step-00000010"], [0, 12, 20]),
    (["a/12.."], [0, 5, 10]),
    (["a/..5"], [10, 12, 20]),
    (["a/5..5"], [0, 10, 12, 20]),
    (["a/latest", "--yes"], [0, 5, 10, 12]),
    (["a/20", "a/latest", "-y"], [0, 5, 10, 12]),
    (["a", "--yes"], []),
    (["a", "--yes", "--keep-last", "2"], [12, 20]),
    (["a", "--yes", "--keep-last", "9"], STEPS),
    (["a", "--yes", "--keep-every", "10"], [0, 10, 20]),
    (["a", "--yes", "--keep-every", "5", "--keep-last", "1"], [0, 5, 10, 20]),
    (["a/..12", "--keep-last", "2"], [12, 20]),
    (["a/5", "a/6", "--missing-ok"], [0, 10, 12, 20]),
    (["a/6..9", "nothing/3", "--missing-ok"], STEPS),
])
def test_what_is_removed(vckpt, store, left, words, rest):
    """A dry run says the same and changes nothing."""
    would = vckpt.json("rm", store, *words, "--dry-run")
    assert left() == STEPS and would["dry_run"]
    done = vckpt.json("rm", store, *words)
    assert [s["step"] for s in done["removed"]] == sorted(set(STEPS) - set(rest)) and not done["failed"]
    assert done["removed"] == would["removed"] and left() == rest and left("b") == [1, 2]
    assert vckpt("verify", store).returncode == 0


def test_the_step_that_was_saved_last_stays(vckpt, store, left):
    """A job went back, and saves below the numbers that it left behind."""
    vckpt("import", store, "a/7", store.parent / "new.npy")
    for words, goes, warns in ((["a", "--keep-last", "1"], [0, 5, 10, 12], True),
                               (["a/..10", "--keep-last", "2", "--keep-every", "5"], [], True),
                               (["a/..8", "--keep-every", "5"], [7], False), (["a/7"], [7], False)):
        done = vckpt("rm", store, *words, "--yes", "--dry-run", "--json")
        assert [s["step"] for s in json.loads(done.stdout)["removed"]] == goes
        assert ("run a: step 7 was saved last, but steps up to 20 are there: --keep-last counts by number, and keeps "
                f"step 7 as well (vckpt rm {store} a/8.. removes" in done.stderr) == warns, done.stderr
    assert not vckpt("rm", store, "b", "--keep-last", "1", "-y").stderr
    vckpt("rm", store, "a/8..")
    assert left() == [0, 5, 7]


def test_what_is_said(vckpt, store):
    assert vckpt("rm", store, "a/5", "-n").stdout.startswith(
        "a/step-00000005 would be removed, 3.9 KiB logical\n1 of 1 step would be removed; nothing was changed\n"
        "vckpt gc could then give ")
    said = vckpt("rm", store, "b/2", "a/5").stdout
    assert said == ("a/step-00000005 removed, 3.9 KiB logical\nb/step-00000002 removed, 3.9 KiB logical\n"
                           f"vckpt gc {store} gives the space back: it marks what nothing else needs, and a later "
                           "one deletes it after 24 h (--grace 0: at once)\n")
    assert vckpt("rm", store, "a/5", "--missing-ok").stdout == "nothing to remove\n"
    assert vckpt("rm", store, "a/0", "-q").stdout == ""
    marked = vckpt("gc", store).stdout
    assert "files marked" in marked and "deleted, 0 B" in marked
    assert "0 files deleted" not in vckpt("gc", store, "--grace", "0").stdout


@pytest.mark.parametrize("words, sentence", [
    (["a/5", "a/6"], "a has no step 6 (vckpt ls {store} a lists them)"),
    (["a/5", "c/1"], "there is no run c (vckpt ls {store} lists the runs)"),
    (["a/5", "a/6..9"], "a has no step from 6 to 9 (vckpt ls {store} a lists them)"),
    (["a/5", "c", "--yes"], "there is no run c (vckpt ls {store} lists the runs)"),
    (["a/5", "c", "--yes", "--missing-ok"], "there is no run c (vckpt ls {store} lists the runs)"),
    (["a", "5", "--yes", "--missing-ok"], "there is no run 5 (vckpt ls {store} lists the runs); a step is RUN/STEP"),
    (["a/5", "c/latest", "--yes"], "there is no run c (vckpt ls {store} lists the runs)"),
])
def test_all_must_be_there(vckpt, store, left, words, sentence):
    done = vckpt("rm", store, *words, check=False)
    assert (done.returncode, done.stderr) == (1, f"vckpt rm: {sentence.format(store=store)}\n")
    assert left() == STEPS


NO_STEP = "is not a step: a number, alone or after step, global_step, iter, epoch, checkpoint or ckpt, latest or a tag"


@pytest.mark.parametrize("words, sentence", [
    (["a/5", "a/"], "a/: the step is missing: give RUN/STEP, or RUN for all its steps"),
    (["a/5", "a/.."], "a/..: a range has a first step, a last one, or both"),
    (["a/12..5"], "a/12..5: the first step is above the last one"),
    (["a/5..latest"], "a/5..latest: the ends of a range are numbers"),
    (["a/latest..5"], "a/latest..5: the ends of a range are numbers"),
    (["a/5..6/model"], "a/5..6/model: the ends of a range are numbers"),
    (["a/5/model"], "a/5/model: only whole steps can be removed: RUN/STEP"),
    (["a/x..5"], "a/x..5: the ends of a range are numbers"),
    (["a/5...7"], f'".7" {NO_STEP}'),
    (["a/5", "--keep-last", "1"], "--keep-last and --keep-every are for a whole RUN or a range of its steps"),
    (["a", "--keep-last", "0"], "--keep-last 0: give a number from 1 on"),
    (["a", "--keep-every", "-1"], "--keep-every -1: give a number from 1 on"),
    (["a", "--keep-every", "1x"], "--keep-every 1x: give a number from 1 on"),
])
def test_what_is_refused(vckpt, store, left, words, sentence):
    done = vckpt("rm", store, *words, check=False)
    assert (done.returncode, done.stderr) == (2, f"vckpt rm: {sentence} (see vckpt rm --help)\n")
    assert left() == STEPS


def test_help_removes_nothing(vckpt, store, left):
    assert vckpt("rm", store, "a", "--yes", "--help").stdout.startswith("usage: vckpt rm ") and left() == STEPS


@pytest.mark.parametrize("words, sentence", [
    (["a/latest"], "a/latest is step 20, 3.9 KiB logical"),
    (["a"], "run a: 5 steps from 0 to 20, 20 KiB logical"),
    (["b/1", "a", "--keep-last", "3"], "run a: 2 steps from 0 to 5, 7.8 KiB logical"),
    (["a", "--keep-last", "4"], "run a: 1 step, 0, 3.9 KiB logical"),
])
def test_a_question(vckpt, store, left, words, sentence):
    done = vckpt("rm", store, *words, check=False, input="y\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr == f"vckpt rm: {sentence}: there is no terminal to ask on: give --yes to remove it (see vckpt "
            f"rm --help)\n")
    for answer in (b"\n", b"n\n", b"\x04"):
        code, out, said = on_terminal(vckpt, answer, "rm", store, *words)
        assert (code == 1 and out == "" and f"{sentence}\nRemove them? [y/N] " in said and
                "nothing was removed\n" in said)
    assert left() == STEPS and left("b") == [1, 2]
    code, out, said = on_terminal(vckpt, b"y\n", "rm", store, *words)
    assert code == 0 and "removed" in out and f"{sentence}\nRemove them? [y/N] " in said
    assert left() != STEPS


@pytest.mark.parametrize("options, sentence", [([], "a: step 20 was removed or replaced by another writer just now"),
                                               (["--missing-ok"], "")])
def test_a_step_replaced_during_the_question_stays(vckpt, store, left, options, sentence):
    """What was shown is removed, not what stands under its number by then."""
    ours, theirs = open_terminal()
    rm = subprocess.Popen([vckpt.path, "rm", store, "a", *options], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    said = b""
    while not said.endswith(b"[y/N] "):
        said += os.read(ours, 4096)
    vckpt("import", store, "a/20", store.parent / "new.npy", "--replace", "-q")
    os.write(ours, b"y\n")
    out = rm.communicate(timeout=60)[0].decode()
    said = written(ours)
    os.close(ours)
    assert rm.returncode == (1 if sentence else 0) and sentence in said and left() == [20], said
    assert out.count(" removed, ") == 4


def test_a_run_without_steps_is_there(vckpt, store):
    """The second of two alike is no error with --missing-ok, for the run is known."""
    vckpt("rm", store, "b", "--yes")
    assert vckpt("rm", store, "b", "--yes", "--missing-ok").stdout == "nothing to remove\n"
    assert "b has no step (" in vckpt("rm", store, "b", "--yes", check=False).stderr


def test_no_question_where_there_is_nothing_to_ask(vckpt, store, left):
    assert on_terminal(vckpt, b"", "rm", store, "a/5", "a/10..12")[0] == 0
    assert vckpt("rm", store, "a", "--keep-last", "2").stdout == "nothing to remove\n" and left() == [0, 20]
    assert vckpt("rm", store, "a/latest", "--dry-run").stdout.startswith("a/step-00000020 would be removed")


def test_a_part_that_fails(vckpt, store, left):
    """A run whose list is damaged is left as it is; the other's steps are removed, and named."""
    entry = store / "runs/b/000000000000"
    entry.write_bytes(b"x" * entry.stat().st_size)
    done = vckpt("rm", store, "a/5", "b/2", "a/10", check=False)
    assert done.returncode == 3 and left() == [0, 12, 20]
    assert done.stdout.startswith("a/step-00000005 removed, 3.9 KiB logical\n"
                                  "a/step-00000010 removed, 3.9 KiB logical\n")
    lines = done.stderr.splitlines()
    assert lines[-1] == "vckpt rm: 2 of 3 steps were removed" and lines[-2].startswith("vckpt rm: run b: 1 "), (
        done.stderr)
    done = vckpt("rm", store, "a/12", "b/2", "--json", check=False)
    assert '"step": 12' in done.stdout and done.returncode == 3


# ---- what it frees ----

def on_disk(store):
    return sum(p.stat().st_size for p in (store / "packs").rglob("*.pack"))


def records(store):
    return sum(p.stat().st_size for name in ("runs/*/manifests/*", "stats/**/*") for p in store.glob(name) if
               p.is_file())


def test_what_is_freed(vckpt, tmp_path):
    """Not what the steps hold, but what no other step of any run needs; gc then gives back just that."""
    store, rng = tmp_path / "frees", np.random.default_rng(1)
    vckpt("init", store)
    for name, seed in (("a", 1), ("b", 2)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal(100_000 * seed).astype("f4"))
    for step, file in (("r/1", "a"), ("r/2", "a"), ("q/1", "a"), ("q/2", "b")):
        vckpt("import", store, step, tmp_path / f"{file}.npy", "-q")
    before, info = on_disk(store), vckpt.json("info", store)
    assert (info["disk_bytes"], info["needed_bytes"], info["steps"], info["runs"]) == (before, before, 4, 2)
    assert info["logical_bytes"] == sum(s["bytes"] for run in "rq" for s in vckpt.json("ls", store, run)["steps"])

    said = vckpt("rm", store, "r/1", "-n").stdout           # whose tensor r/2 and q/1 have, too
    assert "step-00000001 would be removed, 391 KiB logical\n" in said
    assert re.search(r"vckpt gc could then give [4-9].\d KiB back\n$", said)
    freed = vckpt.json("rm", store, "r/1..2", "q", "-n")["freed_bytes"]
    assert freed == before + records(store)
    freed = vckpt.json("rm", store, "q/2", "r/2", "-n")["freed_bytes"]
    assert 600_000 < freed < before
    assert vckpt.json("rm", store, "q/2", "r/2")["freed_bytes"] is None
    info = vckpt.json("info", store)
    packs = before - info["needed_bytes"]
    assert info["disk_bytes"] == before and info["spare_bytes"] == freed > packs
    assert " are needed by no step: of removed steps (vckpt gc" in vckpt("info", store).stdout
    assert vckpt.json("gc", store, "--grace", "0")["deleted_bytes"] == freed
    assert on_disk(store) == before - packs == vckpt.json("info", store)["disk_bytes"]
    assert "the rest" not in vckpt("info", store).stdout
    vckpt("verify", store)


def test_what_is_freed_is_not_known(vckpt, store):
    """A removal reads no manifest, be it of other steps of the store or of what goes."""
    for manifest in store.glob("runs/*/manifests/*"):
        manifest.write_bytes(b"x" * manifest.stat().st_size)
    would = vckpt("rm", store, "a/5", "-n")
    assert "what the removal frees is not known: " in would.stderr and "give" not in would.stdout
    done = vckpt("rm", store, "a/5")
    assert done.stderr == "" and "gives the space back" in done.stdout
    assert vckpt("info", store, check=False).returncode == 3
