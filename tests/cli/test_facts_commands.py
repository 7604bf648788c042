# SPDX-License-Identifier: Apache-2.0
"""vckpt set, pin, unpin, tag, and RUN/TAG wherever a step is expected."""
import errno
import json
import os
import shutil
import subprocess

import numpy as np
import pytest

STEPS = [0, 5, 10]


@pytest.fixture(scope="module")
def template(vckpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    vckpt("init", folder / "store")
    for step in STEPS:
        np.save(folder / "w.npy", np.arange(step, step + 1000, dtype="f4"))
        vckpt("import", folder / "store", f"a/{step}", folder / "w.npy", "-q", "--set", f"loss={step}.5")
    vckpt("import", folder / "store", "b/1", folder / "w.npy", "-q")
    return folder / "store"


@pytest.fixture
def store(template, tmp_path):
    """A store with the steps STEPS of run a, and 1 of run b."""
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


def entries(store, run="a"):
    return len(list((store / "runs" / run).iterdir()))


def step(vckpt, store, number, run="a"):
    return next(s for s in vckpt.json("ls", store, run)["steps"] if s["step"] == number)


def test_every_change_says_what_it_did(vckpt, store):
    """And one that changes nothing says that, and puts nothing."""
    for words, said, puts in [
            (["pin", "a/10", "--reason", "best so far"], "a/10: pinned (best so far)", 1),
            (["pin", "a/10"], "a/10: it is pinned already; nothing was changed", 0),
            (["pin", "a/10", "--reason", "better"], "a/10: pinned (better)", 1),
            (["unpin", "a/10"], "a/10: unpinned", 1),
            (["unpin", "a/step-00000010"], "a/10: it is not pinned; nothing was changed", 0),
            (["tag", "a/latest", "best", "sent"], "a/10: tagged best, sent", 1),
            (["tag", "a/10", "sent"], "a/10: it has this already; nothing was changed", 0),
            (["tag", "a/5", "best", "x"], "a/5: tagged best (was 10), x", 1),
            (["tag", "a/5", "--delete", "sent"], "a/5: it has no such tag; nothing was changed", 0),
            (["tag", "a/5", "-d", "x"], "a/5: no longer x", 1),
            (["tag", "a", "-d", "sent", "best"], "a/10: no longer sent\na/5: no longer best", 2),
            (["set", "a/5", "accuracy=0.5", "loss=1"], "a/5: accuracy=0.5, loss=1", 1),
            (["set", "a/5", "accuracy=0.5"], "a/5: it has these attributes already; nothing was changed", 0),
            (["set", "a/5", "--unset", "accuracy", "note=a=b "], "a/5: unset accuracy, note=a=b ", 1),
            (["set", "a/5", "--unset", "loss"], "a/5: unset loss", 1),
            (["set", "a/5", "note="], "a/5: note=", 1)]:
        before = entries(store)
        done = vckpt(words[0], store, *words[1:])
        assert (done.stdout, done.stderr) == (f"{said}\n", ""), words
        assert entries(store) == before + puts, words
    assert step(vckpt, store, 5)["attributes"] == {"loss": "5.5", "note": ""}


def test_a_tag_that_several_give_at_once(vckpt, store):
    """Each moves it: it is at one step in the end, and what else is given meanwhile stays."""
    numbers = [*STEPS, *STEPS]
    jobs = [subprocess.Popen([vckpt.path, "tag", store, f"a/{n}", "best", f"of-{i}"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for i, n in enumerate(numbers)]
    said = [p.communicate(timeout=120) for p in jobs]
    assert [p.returncode for p in jobs] == [0] * len(jobs), said
    tags = {s["step"]: set(s.get("tags", [])) for s in vckpt.json("ls", store, "a")["steps"]}
    assert sum("best" in names for names in tags.values()) == 1
    assert {n: names - {"best"} for n, names in tags.items()} == {
        n: {f"of-{i}" for i, m in enumerate(numbers) if m == n} for n in STEPS}
    at = next(n for n, names in tags.items() if "best" in names)
    assert vckpt.json("info", store, "a/best")["step"] == at
    last = [line for out, _ in said for line in out.splitlines() if line.startswith(f"a/{at}: tagged best")]
    assert last, said


def test_several_steps(vckpt, store):
    """All are found before the first is changed; of several runs, too."""
    before = entries(store)
    done = vckpt("pin", store, "a/0", "b/1", "a/7", check=False)
    assert done.returncode == 1 and "a has no step 7" in done.stderr and entries(store) == before
    out = vckpt.json("pin", store, "a/0", "b/1", "a/5", "a/0", "--reason", "kept")["changes"]
    assert [(c["run"], c["step"], c["changed"], c["pinned"]["reason"]) for c in out] == [
        ("a", 0, True, "kept"), ("b", 1, True, "kept"), ("a", 5, True, "kept"), ("a", 0, False, "kept")]
    assert vckpt("unpin", store, "a/0", "b/1", "-q").stdout == ""
    assert [s["step"] for s in vckpt.json("ls", store, "a")["steps"] if "pinned" in s] == [5]


@pytest.mark.parametrize("words, code, sentence", [
    (["tag", "a/5", "latest"], 2, '"latest" cannot be a tag: where a STEP is expected, it means another step'),
    (["tag", "a/5", "7"], 2, '"7" cannot be a tag: where a STEP is expected, it means another step'),
    (["tag", "a/5", "epoch3"], 2, '"epoch3" cannot be a tag: where a STEP is expected, it means another step'),
    (["tag", "a/5", "step-00000007"], 2, "means another step"),
    (["tag", "a/5", "v1..v2"], 2, '"v1..v2" cannot be a tag: where a STEP is expected, it means a range'),
    (["tag", "a/5", "step-x"], 2, '"step-x" cannot be a tag: it is [A-Za-z0-9_][A-Za-z0-9._-]{0,63}'),
    (["tag", "a/5", ".x"], 2, '".x" cannot be a tag'), (["tag", "a/5", "x/y"], 2, '"x/y" cannot be a tag'),
    (["tag", "a/5", "x" * 65], 2, "cannot be a tag"), (["tag", "a", "x"], 2, "a is not a step: RUN/STEP"),
    (["tag", "a", "-d"], 2, "--delete: give RUN or RUN/STEP, and the NAME"),
    (["tag", "a", "-d", "x"], 1, "a has no step or tag x, and no tags at all (vckpt ls "),
    (["tag", "a/5", "-d", "x" * 70], 0, ""), (["tag", "a", "-d", "x" * 70], 2, "cannot be a tag"),
    (["tag", "c"], 1, "there is no run c"), (["tag", "a/7", "x"], 1, "a has no step 7"),
    (["set", "a/5"], 2, "which attribute? Give KEY=VALUE or --unset KEY"),
    (["set", "a/5", "x"], 2, "x: give KEY=VALUE"), (["set", "a/5", "1x=2"], 2, "1x=2: a key is [A-Za-z_]"),
    (["set", "a/5", "x=1", "x=2"], 2, "x=2: a key is [A-Za-z_][A-Za-z0-9_.-]{0,63}, given once"),
    (["set", "a/5", "x=1", "--unset", "x"], 2, "x=1: a key is"),
    (["set", "a/5", "--unset", "-"], 2, "--unset -: a key"),
    (["set", "a/5", "--unset", "x", "--unset", "x"], 2, "--unset x: the key is given twice"),
    (["set", "a/5", "x=" + "y" * 70000], 2, "the value of x has more than"),
    (["set", "a/5", "--unset", "loss"], 1, "loss was not set later at step 5: it is the save's own"),
    (["set", "a/5", "--unset", "zz"], 1, "zz was not set later at step 5"),
    (["pin", "a/5", "--reason", "r" * 1025], 2, "the reason has more than 1024 bytes"),
    (["pin", "a"], 2, "a is not a step: RUN/STEP"), (["pin", "a/5/model"], 2, "a/5/model is not a step: RUN/STEP"),
    (["unpin", "c/1"], 1, "there is no run c"),
])
def test_what_is_refused(vckpt, store, words, code, sentence):
    before = entries(store)
    done = vckpt(words[0], store, *words[1:], check=False)
    assert done.returncode == code and sentence in done.stderr, done
    assert entries(store) == before


def test_a_store_of_an_earlier_vckpt(vckpt, tmp_path, request):
    """It takes no such entries; a sentence says why."""
    golden = request.path.parents[1] / "golden/v2-list-3/store.tar.xz"
    subprocess.run(["tar", "-xJf", golden, "-C", tmp_path], check=True)
    store = next(p.parent for p in tmp_path.rglob("vckpt.store"))
    run = next(r["run"] for r in vckpt.json("ls", store)["runs"])
    before = entries(store, run)
    for words in (["pin", f"{run}/latest"], ["tag", f"{run}/latest", "x"], ["set", f"{run}/latest", "x=1"]):
        done = vckpt(words[0], store, *words[1:], check=False)
        assert done.returncode == 1 and "an earlier vckpt made this store" in done.stderr, done
    assert entries(store, run) == before and vckpt("tag", store).stdout == "RUN  TAG  STEP  ATTRIBUTES\n"


# ---- where a step is expected ----

def test_a_tag_is_a_step(vckpt, store, tmp_path):
    """For everything that reads, files in the step and what is below a mesh included."""
    vckpt("tag", store, "a/5", "best", "best.2", "-q")
    assert vckpt.json("ls", store, "a/best")["step"] == vckpt.json("info", store, "a/best.2")["step"] == 5
    for words in (["cat", "a/{}/model/w.npy"], ["cat", "a/{}/mesh/dp=2/rank-0/model.safetensors"], ["ls", "a/{}/model"],
                  ["info", "a/{}/model/w"], ["stalls", "a/{}"], ["verify", "a/{}"], ["du", "a/{}"],
                  ["show", "a/{}/model/w"], ["diff", "a/{}", "a/5"], ["wait", "a/{}"],
                  ["du", "--freed", "a/{}"], ["export", "a/{}", "OUT"]):
        by = {}
        for name in ("best", "5", "step-00000005"):
            given = [str(tmp_path / f"out-{name}") if w == "OUT" else w.format(name) for w in words]
            by[name] = subprocess.run([vckpt.path, words[0], store, *given[1:]], capture_output=True, check=True).stdout
        if words[-1] != "OUT":
            assert by["best"] == by["5"] == by["step-00000005"], words
    assert (tmp_path / "out-best/manifest.json").read_bytes() == (tmp_path / "out-5/manifest.json").read_bytes()
    vckpt("init", tmp_path / "other")
    vckpt("copy", store, "a/best", "--to", tmp_path / "other", "-q")
    assert [s["step"] for s in vckpt.json("ls", tmp_path / "other", "a")["steps"]] == [5]
    vckpt("tag", store, "a/10", "best", "-q")
    assert vckpt.json("show", store, "a/best.2/model/w", "a/best/model/w")["tensors"][1]["max"] == 1009
    assert vckpt.json("ls", store, "a/best")["step"] == 10 and vckpt.json("ls", store, "a/best.2")["step"] == 5


def test_a_tag_that_is_not_there(vckpt, store, tmp_path):
    vckpt("tag", store, "a/5", *(f"t{i}" for i in range(8)), "-q")
    vckpt("init", tmp_path / "other")
    more = {"rm": ["--yes"], "copy": ["--to", tmp_path / "other"]}
    for command in ("ls", "info", "stalls", "verify", "rm", "copy"):
        done = vckpt(command, store, "a/t9", *more.get(command, []), check=False)
        assert (done.returncode, done.stderr) == (1, f"vckpt {command}: a has no step or tag t9; its tags: t0, t1, t2, "
                                                  f"t3, t4 and 3 more (vckpt tag {store} a lists them)\n")
    assert "there is no run c" in vckpt("ls", store, "c/best", check=False).stderr
    for words in (["import", store, "a/best", store / "x"], ["import", store, "a", store / "x", "--step", "best"]):
        assert vckpt(*words, check=False).returncode == 2


def test_lists_of_tags(vckpt, store):
    for target, *names in (("a/5", "best", "old"), ("a/10", "sent"), ("b/1", "best")):
        vckpt("tag", store, target, *names, "-q")

    def tags(*words):
        return [(t["run"], t["tag"], t["step"]) for t in vckpt.json("tag", store, *words)["tags"]]
    assert tags() == [("a", "best", 5), ("a", "old", 5), ("a", "sent", 10), ("b", "best", 1)]
    assert tags("a") == tags()[:3] and tags("a/latest") == tags("a/sent") == [("a", "sent", 10)] and tags("a/0") == []
    vckpt("set", store, "a/sent", "score=7", "-q")
    assert vckpt("tag", store, "a").stdout.splitlines()[-1].split() == ["a", "sent", "step-00000010", "loss=10.5",
                                                                         "score=7"]


# ---- what commands show ----

def test_ls_and_info_show_what_is_said(vckpt, store):
    assert "NOTE" not in vckpt("ls", store, "a").stdout
    vckpt("pin", store, "a/5", "--reason", "the\tbest\x1b[31m", "-q")
    vckpt("tag", store, "a/5", "best", "z", "-q")
    vckpt("set", store, "a/5", "loss=100", "accuracy=0.25", "-q")
    vckpt("set", store, "a/0", "accuracy=0.5", "-q")
    rows = vckpt("ls", store, "a").stdout.splitlines()
    assert rows[0].endswith("NOTE") and rows[2].endswith(r"best, z; pinned: the\x09best\x1b[31m"), rows
    assert "accuracy=0.25  loss=100" in rows[2]
    bare = vckpt("ls", store, "a", "-H").stdout.splitlines()
    assert [len(row.split("\t")) for row in bare] == [7] * 3 and bare[0].endswith("\t-")
    for by, order in (("loss", [0, 10, 5]), ("accuracy", [5, 0, 10])):
        assert [s["step"] for s in vckpt.json("ls", store, "a", "--sort", by)["steps"]] == order
    for out in (step(vckpt, store, 5), vckpt.json("ls", store, "a/5"), vckpt.json("info", store, "a/5")):
        assert out["attributes"] == {"loss": "100", "accuracy": "0.25"} and out["tags"] == ["best", "z"]
        assert out["pinned"]["reason"] == "the\tbest\x1b[31m" and out["pinned"]["host"]
    assert r"note: best, z; pinned: the\x09best" in vckpt("ls", store, "a/5").stdout
    shown = vckpt("info", store, "a/5").stdout
    assert all(text in shown for text in ("  tag          best\n", "  attribute    loss=100\n",
                                          r": the\x09best\x1b[31m"))
    vckpt("unpin", store, "a/5", "-q")
    assert "pinned" not in vckpt.json("info", store, "a/5")


# ---- rm ----

def steps(vckpt, store):
    return [s["step"] for s in vckpt.json("ls", store, "a")["steps"]]


def test_a_pinned_step_stays(vckpt, store):
    """And nothing else that is named with it goes; the two options that keep steps keep it, too."""
    vckpt("pin", store, "a/5", "--reason", "why", "-q")
    vckpt("tag", store, "a/5", "best", "-q")
    said = "vckpt rm: a/5 is pinned (why), so it is not removed (vckpt unpin a/5)\n"
    for words in (["a/5"], ["a/0", "a/5"], ["a/best", "--yes"], ["a/0..7"], ["a", "--yes"], ["a/5", "--missing-ok"],
                  ["a/5", "--dry-run"]):
        done = vckpt("rm", store, *words, check=False)
        assert (done.returncode, done.stderr) == (1, said), words
    assert steps(vckpt, store) == STEPS
    vckpt("rm", store, "a", "--keep-last", "1", "--yes")
    assert steps(vckpt, store) == [5, 10]
    vckpt("unpin", store, "a/5", "-q")
    vckpt("rm", store, "a/5")
    assert steps(vckpt, store) == [10]


def test_a_tag_goes_with_its_step(vckpt, store):
    """No tag is in the way of a removal, but each is named."""
    vckpt("tag", store, "a/5", "best", "x", "-q")
    vckpt("tag", store, "a/0", "y", "-q")
    done = vckpt("rm", store, "a/best", check=False)
    assert (done.returncode, done.stderr) == (2, "vckpt rm: a/best is step 5, 3.9 KiB logical; its tags: best, x: "
                                              "there is no terminal to ask on: give --yes to remove it (see vckpt rm "
                                              "--help)\n")
    said = vckpt("rm", store, "a", check=False).stderr
    assert "run a: 3 steps from 0 to 10, 12 KiB logical; their tags: y, best, x: " in said
    assert vckpt("rm", store, "a/..7", "-n").stdout.startswith(
        "a/step-00000000 would be removed, 3.9 KiB logical; its tags: y\na/step-00000005 would be removed, 3.9 KiB "
        "logical; its tags: best, x\n")
    out = vckpt.json("rm", store, "a/best", "a/10", "--yes")
    assert [(r["step"], r["tags"]) for r in out["removed"]] == [(5, ["best", "x"]), (10, [])]
    assert [t["tag"] for t in vckpt.json("tag", store)["tags"]] == ["y"]
    assert vckpt("rm", store, "a/best", "--yes", "--missing-ok").stdout == "nothing to remove\n"


# ---- a storage that fails ----

def test_a_storage_that_fails(vckpt, build, store, tmp_path):
    """What the command says holds: it is done, it is not, or that is undecided, and where to look."""
    def hurt(words, at):
        path = tmp_path / "hurt"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(store, path)
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
        env = dict(os.environ, LD_PRELOAD=preload, VCKPT_INTERPOSE=f"root={path},reads=1,{words}at={at}")
        done = subprocess.run([vckpt.path, "tag", path, "a/5", "best"], env=env, capture_output=True, text=True)
        return done, [(t["tag"], t["step"]) for t in json.loads(vckpt("tag", path, "--json").stdout)["tags"]]

    calls = tmp_path / "calls"
    assert hurt(f"list={calls},", 0)[0].returncode == 0
    put = next(i for i, line in enumerate(calls.read_text().splitlines(), 1) if line.startswith("linkat"))
    for at, code in [(1, 1), (put, 5)]:
        done, tags = hurt(f"do=fail,errno={errno.EIO},last=1000000,", at)
        assert done.returncode == code and "\nvckpt tag: " in f"\n{done.stderr}" and tags == [], done
        if code == 5:
            assert "undecided" in done.stderr and f"look with vckpt ls {tmp_path}/hurt a/5" in done.stderr, done


@pytest.mark.parametrize("command, error", [
    (["set", "a/5", "x=1"], errno.EDQUOT), (["pin", "a/5"], errno.EACCES), (["unpin", "a/0"], errno.ENOSPC),
    (["tag", "a/5", "t"], errno.ENOSPC), (["policy", "a", "set", "--keep-last", "2"], errno.ENOSPC),
    (["rm", "a/5"], errno.ENOSPC), (["prune", "a", "--keep-last", "1", "-y"], errno.EDQUOT)])
def test_a_directory_that_cannot_be_synced(vckpt, build, store, tmp_path, error, command):
    """The entry has its name: readers see it, so the command does not call it failed."""
    vckpt("pin", store, "a/0")

    def hurt(words):
        path = tmp_path / "hurt"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(store, path)
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
        env = dict(os.environ, LD_PRELOAD=preload, VCKPT_INTERPOSE=f"root={path},{words}")
        before = set(os.listdir(path / "runs/a"))
        done = subprocess.run([vckpt.path, command[0], path, *command[1:]], env=env, capture_output=True, text=True)
        return done, set(os.listdir(path / "runs/a")) != before

    calls = tmp_path / "calls"
    assert hurt(f"list={calls},at=0")[0].returncode == 0
    put = next(i for i, line in enumerate(calls.read_text().splitlines(), 1) if line.startswith("linkat"))
    fault = f"do=fail,errno={error},at={put + 1},last="
    done, landed = hurt(f"{fault}1000000")
    assert (done.returncode, landed, "undecided" in done.stderr) == (5, True, True), done
    done, landed = hurt(f"{fault}{put + 1}")                # the next sync answers
    assert (done.returncode, landed, f"vckpt {command[0]}: " in done.stderr) == (0, True, False), done
    assert "nothing was changed" not in done.stdout
    done, landed = hurt(f"do=fail,errno={error},at={put},last=1000000")
    assert (done.returncode, landed) == (1, False) and "undecided" not in done.stderr, done
