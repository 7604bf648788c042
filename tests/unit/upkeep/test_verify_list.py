# SPDX-License-Identifier: Apache-2.0
"""Entries that are not what was written there, through the commands: verify names them, no removed step comes back,
nobody writes on."""
import ctypes as c
import json
import shutil

import numpy
import pytest

from protolib import sample_stats
from saverlib import Vckpt
from storelib import Api, Attempt
from storelow import Digest

REMOVED = 2


@pytest.fixture(scope="module")
def made(vckpt, build, tmp_path_factory):
    """Runs `r` and `other`: entry 0 the launch, 1 to 5 the steps 0 to 4 with measures, 6 removes step 2, 7 is step 5.
    And a store that is `r` as it was at entry 4, gone on from there in another way: its entries 4 to 6 are of another
    past."""
    api, path = Vckpt(build), tmp_path_factory.mktemp("made") / "store"
    api.store(path)
    for run in ("r", "other"):
        saver = api.saver(path, run)
        for step in range(5):
            save_one(saver, run, step)
            if step == 2 and run == "r":
                shutil.copytree(path, path.with_name("past"))
        vckpt("rm", path, f"{run}/{REMOVED}")
        save_one(saver, run, 5)
        saver.free()
    saver = api.saver(path.with_name("past"), "r")      # entry 4: a launch
    for step in (3, 4):
        save_one(saver, "past", step)
    saver.free()
    assert vckpt.json("verify", path)["faults"] == 0 == vckpt.json("verify", path.with_name("past"))["faults"]
    return path


def save_one(saver, run, step):
    save = saver.save({"model/w": numpy.full(2000, sum(run.encode()) + step, "i8")}, step=step)
    save.committed()
    save.free()


@pytest.fixture
def store(made, tmp_path):
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def entry(store, n, run="r"):
    return store / "runs" / run / f"{n:012d}"


def swap(store, past, a, b):
    a, b = entry(store, a), entry(store, b)
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


def copied(store, past, source, to, run="r"):
    shutil.copy(entry(store, source, run), entry(store, to))


def of_the_past(store, past, n):
    shutil.copy(entry(past, n), entry(store, n))


def lost(store, past, *numbers):
    for n in numbers:
        entry(store, n).unlink()


def visible(vckpt, store, run="r"):
    return [s["step"] for s in vckpt.json("ls", store, run)["steps"]]


@pytest.mark.parametrize("tamper,damaged,left", [
    ((swap, 3, 5), {3: "it is entry 5", 5: "it is entry 3"}, [0, 1, 3, 5]),
    ((swap, 1, 2), {1: "it is entry 2", 2: "it is entry 1"}, [3, 4, 5]),
    ((copied, 6, 4), {4: "it is entry 6"}, [0, 1, 4, 5]),
    ((copied, 6, 7), {7: "it is entry 6"}, [0, 1, 3, 4]),
    ((copied, 3, 6), {6: "it is entry 3"}, None),       # the removal itself is gone
    ((copied, 4, 4, "other"), {4: "it is an entry of run other"}, [0, 1, 4, 5]),
    ((copied, 7, 7, "other"), {7: "it is an entry of run other"}, [0, 1, 3, 4]),
    ((of_the_past, 5), {5: "it does not follow entry 4 as that entry is here"}, [0, 1, 3, 5]),
    ((of_the_past, 4), {5: "it does not follow entry 4 as that entry is here"}, None),
    ((lost, 4), {4: "it is missing, though later entries exist"}, [0, 1, 4, 5]),
    ((lost, 1, 2, 3), {n: "it is missing, though later entries exist" for n in (1, 2, 3)}, [3, 4, 5]),
    ((lost, 0), {0: "it is missing, though later entries exist"}, [0, 1, 3, 4, 5]),
])
def test_entries_that_do_not_belong(vckpt, store, made, tamper, damaged, left):
    how, *args = tamper
    how(store, made.with_name("past"), *args)
    for target in ([], ["r"]):
        done = vckpt.json("verify", store, *target, check=False)
        told = {d["file"]: d["what"] for d in done["damage"] if d["file"].startswith("runs/r/0")}
        assert set(told) == {f"runs/r/{n:012d}" for n in damaged}, done
        for n, why in damaged.items():
            assert told[f"runs/r/{n:012d}"].startswith(why), told
    assert vckpt("verify", store, check=False).returncode == 3
    assert vckpt("verify", store, "other").returncode == 0
    if left is not None:
        assert visible(vckpt, store) == left
        assert REMOVED in left or vckpt("cat", store, f"r/{REMOVED}/model/w.npy", check=False,
                                        text=False).returncode == 1
    nobody_writes(vckpt, store)


def kept(store):
    return {p.relative_to(store): p.read_bytes() for folder in ("runs", "packs") for p in (store / folder).rglob("*")
            if p.is_file()}


def nobody_writes(vckpt, store):
    before, source = kept(store), store.parent / "w.npy"
    numpy.save(source, numpy.arange(5))
    for command in (["import", store, "r", source], ["rm", store, "r/0"], ["rm", store, "r/5"],
                    ["gc", store, "--grace", "0"]):
        done = vckpt(*command, check=False)
        assert done.returncode in (1, 3), (command, done)
        assert any("run r" in line and "damaged" in line or "has no step" in line
                   for line in done.stderr.splitlines()), (command, done.stderr)
    assert kept(store) == before


# ---- the last entries: what else tells of them ----

def faults(vckpt, store, *target):
    done = vckpt("verify", store, *target, "--json", check=False)
    damage = json.loads(done.stdout)["damage"]
    assert done.returncode == (3 if damage else 0)
    told = {}
    for d in damage:
        told.setdefault(d["file"], []).append(d["what"])
    return {file: "; ".join(sorted(what)) for file, what in told.items()}


@pytest.mark.parametrize("target", [[], ["r"]])
def test_measures_tell_of_a_lost_end(vckpt, store, target):
    lost(store, None, 7)
    for manifest in (store / "runs/r/manifests").iterdir():
        if manifest.name not in {s["manifest"] for s in vckpt.json("ls", store, "r")["steps"]}:
            manifest.unlink()
    assert faults(vckpt, store, *target) == {"stats/r/5.7/0": "it names entry 7 of run r, but the list has only 7 "
                                             "entries: entries at its end are lost"}


@pytest.mark.parametrize("target", [[], ["r"]])
def test_a_manifest_tells_of_a_lost_end(vckpt, store, target):
    manifest = vckpt.json("ls", store, "r")["steps"][-1]["manifest"]
    lost(store, None, 7)
    shutil.rmtree(store / "stats")
    told = faults(vckpt, store, *target)
    assert (set(told) == {f"runs/r/manifests/{manifest}"} and
            "has neither a commit nor an abort of its attempt" in told[f"runs/r/manifests/{manifest}"])
    assert "from 7 on" in told[f"runs/r/manifests/{manifest}"]


def test_a_list_that_is_lost_as_a_whole(vckpt, store):
    lost(store, None, *range(8))
    told = faults(vckpt, store)
    assert (len([f for f in told if f.startswith("runs/r/manifests/")]) == 6 and
            len([f for f in told if f.startswith("stats/r/")]) >= 5), told


def test_a_removal_at_the_end_leaves_no_trace(vckpt, store):
    """What a lost end cannot show (docs/format/list.md): verify says that all it sees is sound, and it is."""
    lost(store, None, 6, 7)
    shutil.rmtree(store / "stats/r/5.7")
    (store / "runs/r/manifests" / vckpt.json("ls", store.parent / "store", "other")["steps"][-1]["manifest"]).unlink(
        missing_ok=True)
    told = faults(vckpt, store)
    assert len(told) == 1 and list(told)[0].startswith("runs/r/manifests/")
    (store / list(told)[0]).unlink()
    assert faults(vckpt, store) == {} and REMOVED in visible(vckpt, store)


def test_a_save_under_way_tells_of_a_lost_end(vckpt, lib, store):
    """An import had read the list further than it goes now, or named a base beyond its end."""
    api = Api(lib, store, init=False)
    newest = vckpt.json("ls", store, "r")["steps"][-1]
    attempt = Attempt(api, "other", 50)
    attempt.base("r", newest["entry"], Digest((c.c_uint8 * 32)(*bytes.fromhex(newest["manifest"]))))
    second = Attempt(api, "r", 50)
    assert faults(vckpt, store) == {}
    lost(store, None, 7)
    shutil.rmtree(store / "stats/r/5.7")
    (store / "runs/r/manifests" / newest["manifest"]).unlink()
    assert faults(vckpt, store) == {
        f"incoming/other/{attempt.name}": "it names entry 7 of run r, but the list has only 7 entries: entries at its "
        "end are lost",
        f"incoming/r/{second.name}/begin": "its writer had read 8 entries of run r, but the list has only 7: entries "
        "at its end are lost"}
    attempt.free()
    second.free()
    api.close()


# ---- the collector where the end is lost ----

def in_all(store):
    return {p.relative_to(store): p.read_bytes() for p in store.rglob("*") if p.is_file() and
            "index" not in p.relative_to(store).parts}


def nothing_collected(vckpt, store, file):
    before = in_all(store)
    for words in ((), ("--grace", "0"), ("--dry-run",)):
        done = vckpt("gc", store, *words, check=False)
        assert (done.returncode == 3 and "run r: " in done.stderr and file in done.stderr and
                "vckpt mend" in done.stderr), done
    assert in_all(store) == before


def collected(vckpt, store, steps):
    """The steps are whole; and gc does its work again."""
    vckpt("rm", store, f"r/{steps[-1]}")
    before = len(in_all(store))
    vckpt("gc", store, "--grace", "0")
    assert len(in_all(store)) < before and visible(vckpt, store) == steps[:-1] and faults(vckpt, store) == {}


@pytest.mark.parametrize("left", ["measures", "a manifest", "both", "both, and somebody went on"])
def test_the_packs_of_a_lost_commit_stay(vckpt, store, left):
    """Else its step could never come back. mend commits it anew."""
    manifest = store / "runs/r/manifests" / vckpt.json("ls", store, "r")["steps"][-1]["manifest"]
    lost(store, None, 7)
    if left == "measures":
        manifest.rename(store.parent / "manifest")
    if left == "a manifest":
        shutil.rmtree(store / "stats/r")
    if left.startswith("both, and"):
        numpy.save(store.parent / "w.npy", numpy.arange(5))
        vckpt("import", store, "r/9", store.parent / "w.npy")
    nothing_collected(vckpt, store, f"runs/r/manifests/{manifest.name}" if left == "a manifest" else "stats/r/5.7/0")
    if left == "measures":
        (store.parent / "manifest").rename(manifest)
    vckpt("mend", store)
    steps = visible(vckpt, store)
    assert steps == [0, 1, 3, 4, 5] + [9] * left.startswith("both, and")
    collected(vckpt, store, steps)


def test_a_lost_commit_that_does_not_come_back(vckpt, store):
    """Without its manifest mend says which step is lost, and the collector goes on without it."""
    manifest = vckpt.json("ls", store, "r")["steps"][-1]["manifest"]
    lost(store, None, 7)
    (store / "runs/r/manifests" / manifest).unlink()
    done = vckpt("mend", store, check=False)
    assert done.returncode == 3 and "lost    r/step-00000005" in done.stdout, done
    collected(vckpt, store, [0, 1, 3, 4])


@pytest.mark.parametrize("kept", [True, False])
def test_a_launch_in_the_place_of_a_lost_commit(vckpt, build, store, kept):
    """It aborts the attempt, by what the list says; measures say that it was committed before."""
    newest = vckpt.json("ls", store, "r")["steps"][-1]
    lost(store, None, 7)
    saver = Vckpt(build).saver(store, "r")
    save_one(saver, "r", 6)
    saver.free()
    kept or (store / "runs/r/manifests" / newest["manifest"]).unlink()
    nothing_collected(vckpt, store, "stats/r/5.7/0")
    done = vckpt("mend", store, check=False)
    assert done.returncode == 3 * (not kept) and ("lost    r/step-00000005" in done.stdout) != kept, done
    collected(vckpt, store, [0, 1, 3, 4] + [5] * kept + [6])


def test_a_base_beyond_the_end(vckpt, lib, store):
    api = Api(lib, store, init=False)
    newest = vckpt.json("ls", store, "r")["steps"][-1]
    attempt = Attempt(api, "other", 50)
    attempt.base("r", newest["entry"], Digest((c.c_uint8 * 32)(*bytes.fromhex(newest["manifest"]))))
    lost(store, None, 7)
    shutil.rmtree(store / "stats/r/5.7")
    (store / "runs/r/manifests" / newest["manifest"]).unlink()
    done = vckpt("gc", store, check=False)
    assert done.returncode == 3 and f"incoming/other/{attempt.name}" in done.stderr, done
    attempt.free()
    api.close()


# ---- measures ----

def test_measures_swapped(vckpt, store):
    a, b = store / "stats/r/1.2/0", store / "stats/r/3.4/0"
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    says = "its content gives another run, step, entry or rank than its name"
    assert faults(vckpt, store) == {"stats/r/1.2/0": says, "stats/r/3.4/0": says}
    assert [vckpt.json("stalls", store, f"r/{n}", check=False)["ranks"][0]["timings"]
            for n in (0, 1, 3)] == ["stats", "part", "part"]


@pytest.mark.parametrize("to", ["stats/r/3.2/0", "stats/r/1.3/0", "stats/r/1.2/1", "stats/other/1.2/0"])
def test_measures_at_anothers_place(vckpt, store, to):
    (store / to).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(store / "stats/r/1.2/0", store / to)
    assert "its content gives another run, step, entry or rank than its name" in faults(vckpt, store)[to]


def test_measures_of_no_commit(vckpt, lib, store):
    """They say what their name says, but the list has another entry there."""
    api = Api(lib, store, init=False)
    for step, number in ((3, 2), (7, 6)):
        m = sample_stats(rank=0, run=b"r", step=step, world=1)
        api.call(api.lib.commit_stats_put, api.p, c.byref(m), c.c_uint64(number))
    api.close()
    assert faults(vckpt, store) == {f"stats/r/{s}.{n}/0": f"it names entry {n} as the commit of step {s}, but that "
                                    f"entry of the list is another one" for s, n in ((3, 2), (7, 6))}


def test_measures_of_another_attempt(vckpt, lib, store):
    api = Api(lib, store, init=False)
    (store / "stats/r/1.2/0").unlink()
    m = sample_stats(rank=0, run=b"r", step=1, world=1)
    api.call(api.lib.commit_stats_put, api.p, c.byref(m), c.c_uint64(2))
    api.close()
    assert faults(vckpt, store) == {"stats/r/1.2/0": "it gives another attempt than the commit entry that it "
                                    "belongs to"}


@pytest.mark.parametrize("more", [(), ("--paranoid",)])
@pytest.mark.parametrize("file,what", [
    ("r/999999999999", "it is entry 1"), ("r/000000000013", "it is entry 1"), ("r/0000000000001", "not a file that"),
    ("fresh/000000000003", "it is an entry of run r")])
def test_a_stray_file_behind_the_end(vckpt, store, file, what, more):
    """Readers never come to it."""
    to = store / "runs" / file
    to.parent.mkdir(exist_ok=True)
    shutil.copy(entry(store, 1), to)
    done = vckpt("verify", store, *more, check=False)
    assert done.returncode == 3 and f"runs/{file}: {what}" in done.stdout and "1 fault" in done.stdout, done


def test_an_entry_behind_a_gap_that_readers_do_not_see(vckpt, store):
    """It carries its own number, but those before it were lost, and no look behind the end meets it."""
    for n in (1, 2, 3, 5, 6, 7):
        entry(store, n).unlink()
    done = vckpt("verify", store, check=False)
    assert done.returncode == 3 and ("runs/r/000000000004: it is behind the end of the run's list: entry 3 before "
                                     "it is missing") in done.stdout
