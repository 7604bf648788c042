# SPDX-License-Identifier: Apache-2.0
"""vckpt mend: what it says, what it does, and that the store goes on afterwards. Entries and other records; packs:
test_mend_packs.py."""
import ctypes
import json
import pathlib
import resource
import shutil
import threading

import numpy
import pytest
from safetensors.numpy import save_file

import storelow
from forgelib import ENTRY, MANIFEST, Forge
from protolib import parse
from ranklib import api  # noqa: F401
from storelib import REMOVE, Api, Attempt, Digest, put_heartbeat, save
from test_incoming import close, left_behind, opened
from test_list import accept
from test_schema import check, manual


def tree(store):
    """Every file and its bytes."""
    return {p.relative_to(store): p.read_bytes() for p in store.rglob("*") if p.is_file() and
            "index" not in p.relative_to(store).parts}


def mend(vckpt, store, *words, code=0):
    done = vckpt("mend", store, "--json", *words, check=False)
    assert done.returncode == code, done
    out = json.loads(done.stdout)
    check(out, manual()["mend"])
    return out


def lines(out, what):
    return [line for line in out["lines"] if line["what"] == what]


def spoil(path, at=None):
    data = bytearray(path.read_bytes())
    for i in range(len(data)) if at is None else at:
        data[i] ^= 0x5a
    path.chmod(0o600)
    path.write_bytes(data)


def entry(store, n, run="run"):
    return store / "runs" / run / f"{n:012d}"


def steps(vckpt, store, run="run"):
    return [s["step"] for s in vckpt.json("ls", store, run)["steps"]]


@pytest.fixture
def made(vckpt, store, tmp_path):
    """Three steps, entries 0 to 2. Returns (store, function that saves another one)."""
    rng = numpy.random.default_rng(3)
    source = tmp_path / "s.safetensors"

    def another(*words, store=store):
        save_file({"w": rng.integers(0, 1 << 16, (300, 300), dtype="u2")}, source)
        return vckpt.json("import", store, "run", source, *words)["step"]
    for _ in range(3):
        another("--set", "loss=1.5")
    return store, another


def goes_on(vckpt, store, another):
    """Verified, saved to, collected, and verified again."""
    assert vckpt.json("verify", store)["faults"] == 0
    before = steps(vckpt, store)
    another()
    vckpt("gc", store, "--grace", "0")
    assert vckpt.json("verify", store)["faults"] == 0
    assert len(steps(vckpt, store)) == len(before) + 1


def test_a_sound_store(vckpt, made):
    store, _ = made
    before = tree(store)
    out = mend(vckpt, store)
    assert (out["found"], out["done"], out["lost"], out["left"], out["lines"]) == (0, 0, 0, 0, [])
    assert vckpt("mend", store).stdout == "sound: nothing to mend\n" and tree(store) == before
    assert vckpt("mend", store, "x", check=False).returncode == 2


@pytest.mark.parametrize("copy", [0, 1])
def test_one_copy_of_an_entry(vckpt, made, copy):
    store, another = made
    good = entry(store, 1).read_bytes()
    spoil(entry(store, 1), range(copy * 4096 + 60, copy * 4096 + 70))
    before = tree(store)
    out = mend(vckpt, store, "-n")
    assert out["dry_run"] and (out["found"], out["done"], out["left"]) == (1, 1, 0) and tree(store) == before
    out = mend(vckpt, store)
    assert lines(out, "mend")[0]["text"] == "written again from its good copy" and entry(store, 1).read_bytes() == good
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("how", ["both copies", "missing", "empty", "of another number"])
@pytest.mark.parametrize("n", [0, 1])
def test_a_lost_entry_is_accepted_and_its_step_comes_back(vckpt, made, how, n):
    """Its manifest and its measures tell which commit it was."""
    store, another = made
    want = vckpt.json("info", store, f"run/{n}")
    if how == "both copies":
        spoil(entry(store, n))
    elif how == "of another number":
        entry(store, n).write_bytes(entry(store, 2).read_bytes())
    else:
        entry(store, n).unlink()
        how == "empty" and entry(store, n).touch()
    assert vckpt("import", store, "run", store, check=False).returncode != 0
    assert vckpt("gc", store, check=False).returncode == 3
    assert vckpt("ls", store, "run", check=False).stderr.count("entry skipped") == 1
    before = tree(store)
    out = mend(vckpt, store, "--dry-run")
    assert tree(store) == before and len(lines(out, "accept")) == 1
    out = mend(vckpt, store)
    assert [line["file"] for line in lines(out, "accept")] == [f"runs/run/{n:012d}"]
    assert steps(vckpt, store) == [0, 1, 2] and (out["lost"], out["left"]) == (0, 0)
    have = vckpt.json("info", store, f"run/{n}")
    assert {k: have[k] for k in ("tensors", "bytes", "attributes",
                                 "packs")} == {k: want[k] for k in ("tensors", "bytes", "attributes", "packs")}
    assert mend(vckpt, store)["found"] == 0
    assert [vckpt(*words).stderr
            for words in (("ls", store, "run"), ("info", store, "run/2"), ("verify", store))] == [""] * 3
    goes_on(vckpt, store, another)


def test_steps_that_nothing_proves(vckpt, made):
    """Two manifests and one lost entry: either may be the one, and neither is shown."""
    store, another = made
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    another(store=copy)
    for p in {*copy.rglob("*.pack"), *copy.glob("runs/*/manifests/*")}:
        to = store / p.relative_to(copy)
        if not to.exists():
            to.parent.mkdir(exist_ok=True)
            shutil.copy(p, to)
    spoil(entry(store, 1))
    out = mend(vckpt, store, code=3)
    assert {(line["run"], line["step"]) for line in lines(out, "lost")} == {("run", 1), ("run", 3)}
    assert "may have been committed" in lines(out, "lost")[0]["text"]
    assert steps(vckpt, store) == [0, 2]
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("rival", [False, True])
def test_killed_behind_the_acceptance(vckpt, lib, made, rival):
    """The lost entries decide nothing any more, and their steps are not committed anew yet: the collector leaves them
    alone, and mending goes on."""
    store, another = made
    if rival:  # a third manifest for two lost entries: which of them were committed cannot be known
        shutil.copytree(store, store.parent / "copy")
        another(store=store.parent / "copy")
        for p in {*(store.parent / "copy").rglob("*.pack"), *(store.parent / "copy").glob("runs/*/manifests/*")}:
            (store / p.relative_to(store.parent / "copy")).parent.mkdir(exist_ok=True)
            shutil.copy(p, store / p.relative_to(store.parent / "copy"))
    for n in (0, 1):
        spoil(entry(store, n))
    if (store / "stats").exists():
        shutil.rmtree(store / "stats")
    api = Api(lib, store, init=False)
    with api.list("run", True) as run:
        accept(run, 0, 1)
    api.close()
    before = tree(store)
    assert steps(vckpt, store) == [2] and vckpt.json("verify", store, check=False)["faults"] == (3 if rival else 2)
    refused = vckpt("gc", store, "--grace", "0", check=False)
    assert (refused.returncode == 3 and "accepted as damaged" in refused.stdout + refused.stderr and
            tree(store) == before)
    out = mend(vckpt, store, code=3 if rival else 0)
    assert {line["step"] for line in lines(out, "lost")} == ({0, 1, 3} if rival else set())
    assert steps(vckpt, store) == ([2] if rival else [0, 1, 2])
    assert mend(vckpt, store)["found"] == 0
    goes_on(vckpt, store, another)


def test_a_lost_commit_that_was_replaced(vckpt, made):
    """Entry 3 replaces entry 1, which is lost: it counts no more, and is committed anew; the old content stays away."""
    store, another = made
    another("--step", "1", "--replace")
    want = vckpt.json("info", store, "run/1")["packs"]
    spoil(entry(store, 1))
    assert steps(vckpt, store) == [0, 2]
    out = mend(vckpt, store)
    assert "was replaced later" in lines(out, "accept")[0]["text"]
    assert vckpt.json("info", store, "run/1")["packs"] == want
    goes_on(vckpt, store, another)


def test_a_removed_step_stays_removed(vckpt, made):
    store, another = made
    vckpt("rm", store, "run/1")
    spoil(entry(store, 1))
    out = mend(vckpt, store)
    assert "was removed later" in lines(out, "accept")[0]["text"] and steps(vckpt, store) == [0, 2]
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("collected", [False, True])
def test_a_lost_removal(vckpt, made, collected):
    """The step shows again; where the collector has been there is nothing to show, and it is removed again."""
    store, another = made
    vckpt("rm", store, "run/1")
    if collected:
        vckpt("gc", store, "--grace", "0")
    spoil(entry(store, 3))
    mend(vckpt, store)
    assert steps(vckpt, store) == ([0, 2] if collected else [0, 1, 2])
    goes_on(vckpt, store, another)


def test_several_entries_and_runs(vckpt, made, tmp_path):
    store, another = made
    vckpt("import", store, "other", tmp_path / "s.safetensors", "-q")
    for n in (0, 2):
        spoil(entry(store, n))
    spoil(entry(store, 0, "other"), range(50, 60))
    spoil(store / "vckpt.store", range(4096 + 50, 4096 + 60))
    out = mend(vckpt, store)
    assert (out["found"], out["left"]) == (4, 0) and steps(vckpt,
                                                           store) == [0, 1, 2] and steps(vckpt, store, "other") == [0]
    goes_on(vckpt, store, another)


def test_before_a_snapshot(vckpt, api):  # noqa: F811
    """What the snapshot tells needs no other proof."""
    for n in range(66):
        save(api, "r")
    spoil(entry(api.path, 7, "r"))
    out = mend(vckpt, api.path)
    assert "a snapshot after it" in lines(out, "accept")[0]["text"] and out["lost"] == 0
    assert len(steps(vckpt, api.path, "r")) == 66
    save(api, "r")
    api.gc(grace=0)


def test_a_damaged_snapshot(vckpt, api):  # noqa: F811
    for n in range(66):
        save(api, "r")
    spoil(entry(api.path, 64, "r"))
    assert mend(vckpt, api.path)["left"] == 0
    assert len(steps(vckpt, api.path, "r")) == 66
    save(api, "r")
    api.gc(grace=0)
    assert len(steps(vckpt, api.path, "r")) == 67


def test_entries_from_a_copy_of_the_store(vckpt, made, tmp_path):
    """The one after it says that it is the right one; the last one is known by the manifest that is here."""
    store, another = made
    good = tree(store)
    shutil.copytree(store, tmp_path / "copy")
    for n in range(3):
        spoil(entry(store, n))
    out = mend(vckpt, store, "--from", tmp_path / "copy")
    assert len(lines(out, "mend")) == 3 and not lines(out, "accept")
    now = tree(store)
    assert all(now[p] == good[p] for p in good if p.parts[0] == "runs")
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("copy", [False, True])
def test_a_lost_end(vckpt, made, tmp_path, copy):
    """Nothing of the list misses its last entries; their manifests do."""
    store, another = made
    good = tree(store)
    copy and shutil.copytree(store, tmp_path / "copy")
    for n in (1, 2):
        entry(store, n).unlink()
    assert steps(vckpt, store) == [0]
    out = mend(vckpt, store, *(["--from", tmp_path / "copy"] if copy else []))
    assert steps(vckpt, store) == [0, 1, 2] and out["lost"] == 0
    assert not copy or all(tree(store)[p] == good[p] for p in good if p.parts[0] == "runs")
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("measured", [False, True])
def test_the_collector_keeps_what_a_lost_end_needs(vckpt, made, measured):
    """A list from an old backup, manifests and packs newer: nothing is deleted until the steps are back."""
    store, another = made
    for n in (1, 2):
        entry(store, n).unlink()
    if not measured and (store / "stats").exists():
        shutil.rmtree(store / "stats")
    before = tree(store)
    refused = vckpt("gc", store, "--grace", "0", check=False)
    assert refused.returncode == 3 and "nothing was deleted" in refused.stderr and tree(store) == before
    mend(vckpt, store)
    assert steps(vckpt, store) == [0, 1, 2]
    goes_on(vckpt, store, another)


def test_a_lost_end_that_was_a_failure(vckpt, made):
    """The attempt deleted its packs, and the entry that says why is gone: it is said again."""
    store, another = made
    entry(store, 2).unlink()
    packs = {p for p in store.rglob("*.pack")}
    shown = {q["pack"] for step in (0, 1) for q in vckpt.json("info", store, f"run/{step}", "--packs")["packs"]}
    for p in packs:
        if p.stem not in shown:
            p.unlink()
    mend(vckpt, store, code=3)
    assert steps(vckpt, store) == [0, 1]
    goes_on(vckpt, store, another)


def test_a_copy_that_went_another_way(vckpt, made, tmp_path):
    """Its third entry is of another history: it is not taken."""
    store, another = made
    shutil.copytree(store, tmp_path / "copy")
    save_file({"w": numpy.arange(50000.0)}, tmp_path / "x.safetensors")
    vckpt("import", tmp_path / "copy", "run", tmp_path / "x.safetensors", "-q")
    another()
    spoil(entry(store, 3))
    out = mend(vckpt, store, "--from", tmp_path / "copy")
    assert lines(out, "accept") and steps(vckpt, store) == [0, 1, 2, 3]
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("kind", ["removal", "step"])
def test_a_copy_that_somebody_changed(vckpt, lib, made, tmp_path, kind, lost):
    """It has this store's id, and its entries follow on those that are here. Of a sound list it takes nothing away, and
    of one that lost its end nothing but that; false steps it does not add."""
    store, another = made
    want = {n: vckpt.json("info", store, f"run/{n}")["packs"] for n in range(3)}
    named = {n: manifest(vckpt, store, n).name for n in range(3)}
    shutil.copytree(store, tmp_path / "copy")
    for n in range(3 - lost, 3):
        entry(tmp_path / "copy", n).unlink()
    api = Api(lib, tmp_path / "copy", init=False)
    false = api.entry(REMOVE, removes=0)
    if kind == "step":
        false = api.commit_entry("00000000000000aa-0", 99)
        false.commit.manifest = Digest((ctypes.c_uint8 * 32)(*bytes.fromhex(named[0])))
    api.put_raw("run", 3 - lost, false)
    if lost:  # then the true ones
        for n in range(3 - lost, 3):
            true = api.commit_entry(attempt(store, n), n)
            true.commit.manifest = Digest((ctypes.c_uint8 * 32)(*bytes.fromhex(named[n])))
            api.put_raw("run", n + 1, true)
    api.close()
    for n in range(3 - lost, 3):
        entry(store, n).unlink()
    before = tree(store)
    mend(vckpt, store, "--from", tmp_path / "copy")
    assert steps(vckpt, store) == [0, 1, 2] and (lost or tree(store) == before)
    assert {n: vckpt.json("info", store, f"run/{n}")["packs"] for n in range(3)} == want
    goes_on(vckpt, store, another)


def attempt(store, n):
    """As its commit entry says."""
    file = entry(store, n).read_bytes()
    commit = next(v for number, _, v in parse(file[48:48 + int.from_bytes(file[12:16], "little")]) if number == 7)
    return next(v for number, _, v in parse(commit) if number == 2).decode()


def manifest(vckpt, store, step=1):
    return store / "runs/run/manifests" / vckpt.json("info", store, f"run/{step}")["manifest"]


def test_a_manifest_whose_envelope_is_damaged(vckpt, made):
    store, another = made
    path = manifest(vckpt, store)
    good = path.read_bytes()
    spoil(path, range(20, 30))
    mend(vckpt, store)
    assert path.read_bytes() == good
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_manifest_from_another_store(vckpt, made, tmp_path, how):
    store, another = made
    shutil.copytree(store, tmp_path / "copy")
    path = manifest(vckpt, store)
    good = path.read_bytes()
    spoil(path) if how == "damaged" else path.unlink()
    out = mend(vckpt, store, code=3)
    (lost,) = lines(out, "lost")
    assert (lost["run"], lost["step"]) == ("run", 1) and out["left"] == 1
    assert steps(vckpt, store) == [0, 1, 2]         # it stays, as vckpt rm would have it gone
    mend(vckpt, store, "--from", tmp_path / "copy")
    assert path.read_bytes() == good
    goes_on(vckpt, store, another)


def test_a_manifest_that_is_lost_can_be_removed(vckpt, made):
    store, another = made
    manifest(vckpt, store).unlink()
    mend(vckpt, store, code=3)
    vckpt("rm", store, "run/1")
    mend(vckpt, store)
    goes_on(vckpt, store, another)


def test_a_manifest_from_announcements(vckpt, api):  # noqa: F811
    """They lie there still where the committer was killed before it deleted them."""
    launches = opened(api, "r", "one", 2)
    close(launches, left_behind(launches)[1])
    (path,) = (api.path / "runs/r/manifests").iterdir()
    good = path.read_bytes()
    path.unlink()
    out = mend(vckpt, api.path)
    assert "announcements" in lines(out, "mend")[0]["text"] and path.read_bytes() == good


def test_an_older_manifest_from_announcements(vckpt, api):  # noqa: F811
    """One of a version that did not say which ranks have which blobs."""
    launches = opened(api, "r", "one", 2)
    close(launches, left_behind(launches)[1])
    lib = ctypes.CDLL(api.lib._name)     # it declares arguments of its own
    forge = Forge(lib, api.path, "r")
    assert forge.manifest.all(17)
    forge.manifest.set(17)
    body = forge.manifest.encode()
    digest = bytes(storelow.digest(lib, body).bytes)
    forge.manifest_path.unlink()
    forge.commit.set(5, digest)
    forge.entry.set(7, forge.commit.encode())
    forge.put_record(forge.entry_path, ENTRY, forge.entry.encode())
    path = forge.manifest_path.with_name(digest.hex())
    forge.put_record(path, MANIFEST, body)
    good = path.read_bytes()
    path.unlink()
    out = mend(vckpt, api.path)
    assert "announcements" in lines(out, "mend")[0]["text"] and path.read_bytes() == good


def test_what_is_made_again_where_it_is_needed(vckpt, made):
    """Marks, notes, the reserve, measures, what a dead writer left."""
    store, another = made
    vckpt("rm", store, "run/0")
    vckpt("gc", store)
    marks = list((store / "trash").iterdir())
    spoil(marks[0])
    spoil(store / "reserve", range(5, 6))
    stats = store / "stats/run/1.1/0"
    stats.parent.mkdir(parents=True)
    stats.write_bytes(b"x" * 100)
    name = next((store / "packs").rglob("*.pack")).stem
    (store / "damaged").mkdir(exist_ok=True)
    (store / "damaged" / name).write_bytes(b"x")
    folder = store / "incoming/run/0123456789abcdef-0"
    folder.mkdir(parents=True)
    (folder / "begin").write_bytes(b"x")
    before = tree(store)
    out = mend(vckpt, store, "-n")
    assert tree(store) == before and out["found"] == 5
    out = mend(vckpt, store)
    assert (out["left"] == 0 and not folder.exists() and not stats.exists() and
            (store / "reserve").read_bytes() == bytes(1 << 20))
    assert vckpt.json("verify", store)["faults"] == 0
    assert any(b"(vckpt mend on" in p.read_bytes() for p in (store / "runs/run").iterdir() if p.is_file())
    goes_on(vckpt, store, another)


def test_foreign_files_are_left(vckpt, made):
    store, _ = made
    (store / "packs" / "notes.txt").write_text("mine")
    out = mend(vckpt, store, code=3)
    assert ([line["file"] for line in lines(out, "left")] == ["packs/notes.txt"] and
            (store / "packs" / "notes.txt").exists())


def test_a_store_that_is_a_file_system_of_its_own(vckpt, made):
    """Its root has the folder of fsck, with what fsck found; `lost+found` elsewhere is a file that no vckpt makes."""
    store, another = made
    (store / "lost+found").mkdir()
    (store / "lost+found" / "#12").write_bytes(b"found")
    assert vckpt.json("verify", store)["faults"] == 0 and mend(vckpt, store)["found"] == 0
    goes_on(vckpt, store, another)
    assert vckpt("gc", store).stderr == "" and (store / "lost+found" / "#12").exists()
    (store / "packs" / "lost+found").mkdir()
    (store / "packs" / "lost+found" / "#13").write_bytes(b"mine")
    assert vckpt("verify", store, check=False).returncode == 3


def test_refused_while_a_writer_lives(vckpt, api):  # noqa: F811
    save(api, "r")
    a = Attempt(api, "r", 5)
    spoil(entry(api.path, 0, "r"), range(50, 60))
    before = tree(api.path)
    for words in ([], ["-n"]):
        done = vckpt("mend", api.path, *words, check=False)
        assert done.returncode == 1 and "mend refused: host" in done.stderr and "is saving run" in done.stderr, done
    assert {p: b for p, b in tree(api.path).items() if p.parts[0] != "hosts"} == {p: b for p, b in before.items()
                                                                                  if p.parts[0] != "hosts"}
    a.free()
    mend(vckpt, api.path)


def test_another_hosts_heartbeat_that_moves(vckpt, api):  # noqa: F811
    save(api, "r")
    name = "0123456789abcdef"
    put_heartbeat(api, name, "r", 0)

    def move():
        put_heartbeat(api, name, "r", 1)
        (api.path / f"hosts/{name}.elsewhere.0").unlink()
    t = threading.Timer(1, move)
    t.start()
    done = vckpt("mend", api.path, check=False)
    t.join()
    assert done.returncode == 1 and "mend refused: host elsewhere is saving run" in done.stderr
    (api.path / f"hosts/{name}.elsewhere.1").unlink()


@pytest.mark.parametrize("how", ["renamed", "copied", "exchanged"])
def test_a_run_under_another_name_is_left(vckpt, made, tmp_path, how):
    """All of its entries are whole: nothing is decided of them, nothing of theirs is collected, and moving them back is
    all it takes."""
    store, another = made
    runs, aside = store / "runs", tmp_path / "aside"
    vckpt("import", store, "b", tmp_path / "s.safetensors", "-q")
    before = tree(store)
    if how == "copied":
        shutil.copytree(runs / "run", runs / "c")
    else:
        (runs / "run").rename(runs / "c")
    if how == "exchanged":
        (runs / "b").rename(runs / "run")
        (runs / "c").rename(runs / "b")
    there = tree(store)
    out = mend(vckpt, store, code=3)
    assert {k: v for k, v in tree(store).items() if k.parts[0] != "damaged"} == there and out["done"] == 0
    assert any("this is the list of run run under another name" in line["text"] for line in lines(out, "left"))
    assert vckpt("gc", store, "--grace", "0", check=False).returncode == 3 and tree(store) == there
    if how == "copied":
        shutil.rmtree(runs / "c")
    elif how == "renamed":
        (runs / "c").rename(runs / "run")
    else:
        (runs / "b").rename(aside)
        (runs / "run").rename(runs / "b")
        aside.rename(runs / "run")
    assert tree(store) == before and mend(vckpt, store)["found"] == 0
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("what", ["vckpt.store", "a pack"])
def test_files_of_another_store(vckpt, made, tmp_path, what):
    """Nothing is written again as of this store, which may be the one that is wrong."""
    store, another = made
    vckpt("init", tmp_path / "other")
    vckpt("import", tmp_path / "other", "run", tmp_path / "s.safetensors", "-q")
    good = tree(store)
    if what == "a pack":
        theirs = next((tmp_path / "other").rglob("*.pack"))
        to = store / theirs.relative_to(tmp_path / "other")
        to.parent.mkdir(exist_ok=True)
        shutil.copy(theirs, to)
    else:
        (store / "vckpt.store").chmod(0o600)
        (store / "vckpt.store").write_bytes((tmp_path / "other" / "vckpt.store").read_bytes())
    before = tree(store)
    done = vckpt("mend", store, check=False)
    assert done.returncode == 1 and "a pack of another store" in done.stderr
    assert {k: v for k, v in tree(store).items() if k.parts[0] != "damaged"} == before
    (to if what == "a pack" else store / "vckpt.store").unlink()
    (store / "vckpt.store").write_bytes(good[pathlib.Path("vckpt.store")])
    shutil.rmtree(store / "damaged", ignore_errors=True)
    assert mend(vckpt, store)["left"] == 0
    goes_on(vckpt, store, another)


@pytest.mark.parametrize("power", [12, 17])
def test_a_file_far_behind_the_end(vckpt, made, power):
    """All numbers before it are missing then: for readers that is one fault; to mend it is to accept them all."""
    store, another = made
    stray = entry(store, 3 + (1 << power))
    stray.touch()
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = vckpt("ls", store, "run")
    assert done.stdout.count("step-") == 3 and done.stderr.count(" skipped") == 2
    assert f"this entry and the {(1 << power) - 1} after it are missing" in done.stderr
    assert vckpt.json("verify", store, check=False)["faults"] == 2
    if power == 17:
        out = mend(vckpt, store, code=3)
        assert f"{1 << power} entries before it are missing" in lines(out, "left")[0]["text"] and out["done"] == 0
        stray.unlink()
    else:
        assert mend(vckpt, store)["left"] == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun < 40
    goes_on(vckpt, store, another)
