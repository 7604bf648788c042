# SPDX-License-Identifier: Apache-2.0
"""Stores with all checksums right and wrong intentions (forge.py), read in every way (forge_look.py)."""
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest

import forge
import forge_bytes
import reader
from forge_many import CHAINED, HERE, SHAPES, Batch, cases, make_bases, summary


@pytest.fixture(scope="module")
def bases(vckpt, tmp_path_factory):
    return make_bases(vckpt.path, tmp_path_factory.mktemp("forge"))


@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_store_that_lies_about_nothing(vckpt, bases, tmp_path, shape, share):
    """It was taken apart and put together, its tables raw or encoded: both readers find it sound, and its tensors are
    what they were."""
    if shape not in bases:
        pytest.skip("torch is not installed")
    out, base = tmp_path / "out", bases[shape]
    assert forge.forge(base["path"], out, 0, base["runs"], share) == []
    stored = [o.codec for pack in forge.Store(out).packs.values() for o in pack.objects if o.kind > reader.BLOB]
    assert any(stored) == bool(share)
    assert reader.read(out)[1].faults == []
    assert vckpt("verify", out, "--no-notes", check=False).stdout.rstrip().endswith("sound")
    run = base["runs"][-1]
    step = vckpt.json("ls", out, run)["steps"][-1]["step"]
    both = [vckpt("cat", store, f"{run}/{step}/model.safetensors", text=False, check=False)
            for store in (out, base["path"])]
    assert both[0].stdout == both[1].stdout and both[0].returncode == both[1].returncode


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "hosts" not in p.parts}


def test_a_seed_is_repeatable(bases, tmp_path):
    base, told = bases["ranks"], []
    for seed in range(1, 8):
        words = [forge.forge(base["path"], tmp_path / f"{seed}.{i}", seed, base["runs"]) for i in range(2)]
        assert words[0] == words[1] and words[0]
        assert contents(tmp_path / f"{seed}.0") == contents(tmp_path / f"{seed}.1")
        told += words[0]
    command = [HERE / "forge.py", base["path"], tmp_path / "out", "--seed", "7", "--runs", "d", "--show"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words[0] and contents(tmp_path / "out") == contents(tmp_path / "7.0")
    assert len(set(told)) > 5


def test_what_would_run(tmp_path, monkeypatch):
    """Each trap makes the canary where somebody unpickles it. So its absence says that nobody did."""
    monkeypatch.chdir(tmp_path)
    for make in forge_bytes.traps():
        data = pickle.dumps(make(), 4)
        assert not (tmp_path / forge_bytes.CANARY).exists()
        value = pickle.loads(data)
        if type(value).__name__ == "map":
            next(value)
        elif type(value).__name__ == "partial":
            value().close()
        made = tmp_path / forge_bytes.CANARY
        assert made.exists(), data
        made.rmdir() if made.is_dir() else made.unlink()


def test_blobs_that_lie(bases, tmp_path):
    """What a blob holds is another thing, and all that covers it follows: to the readers the store is sound."""
    if "dcp" not in bases:
        pytest.skip("torch is not installed")
    told, base = [], bases["dcp"]
    for seed in range(48):
        store = forge.Store(base["path"], base["runs"])
        store.choose = lambda lies: {f"bytes {seed % len(store.blobs())}": 1}
        told += store.build(tmp_path / f"{seed}", seed)
        assert seed % 7 or reader.read(tmp_path / f"{seed}")[1].faults == [], told[-1]
    assert any("runs something" in line for line in told) and any("metadata.json" in line for line in told)


# ---- lists alone ----

@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """The list of the golden store, without its packs: its folder, and the bodies."""
    where = tmp_path_factory.mktemp("list")
    shutil.unpack_archive(CHAINED, where / "whole")
    shutil.copytree(where / "whole/store/runs/long", where / "list/runs/long")
    shutil.copy(where / "whole/store/vckpt.store", where / "list")
    shutil.rmtree(where / "whole")
    store = reader.Store(where / "list")
    store.open()
    return store, [store.record(f"runs/long/{n:012}", 2, True)[0] for n in range(483)]


def chained(entries, out, number, change):
    """One entry of the list is changed; the digests of all that follow it are right."""
    store, bodies = entries
    shutil.copytree(store.path, out, copy_function=os.link)
    made, digests = forge.Store.__new__(forge.Store), [bytes(32), *map(reader.sha, bodies[:number])]
    made.out, made.id = out, store.id
    for n in range(number, len(bodies)):
        body = forge.Body("Entry", bodies[n])
        body["before"] = digests[-1]
        start = made.goes_on(body, digests)
        if n == number:
            change(body)
            made.goes_on(body, digests, start)
        data = body.encode()
        (out / f"runs/long/{n:012}").unlink()
        made.put(f"runs/long/{n:012}", 2, data, True)
        digests.append(reader.sha(data))
    return out


def snapshot(gone=None, live=None, **fields):
    def change(body):
        made = body["snapshot"]
        for name, value in fields.items():
            made[name.removesuffix("_")] = value
        if gone is not None:
            made.table("gone").rows = [[n] for n in gone]
        if live is not None:
            live(made.table("live").rows)
    return change


def launch(ids=None, **fields):
    def change(body):
        made = body["launch"]
        for name, value in fields.items():
            made[name.removesuffix("_")] = value
        if ids is not None:
            made.table("ids").rows = [[n] for n in ids]
    return change


def first_row(**fields):
    names = forge.TABLES["Snapshot", "live"][1]

    def change(rows):
        for name, value in fields.items():
            rows[0][names.index(name)] = value
    return change


ID = b"12345678"
LISTS = {
    "nothing": (448, lambda body: None),
    "from itself": (448, snapshot(from_=448)), "from one ahead": (448, snapshot(from_=470)),
    "from one far ahead": (448, snapshot(from_=2**64 - 1)), "from a commit": (448, snapshot(from_=383)),
    "from another": (448, snapshot(from_=192, gone=())), "from one of its chain": (448, snapshot(from_=256, gone=())),
    "from one between": (448, snapshot(from_=320, gone=())), "from none": (448, snapshot(from_=0)),
    "another digest": (448, snapshot(from_digest=bytes(32))), "half a digest": (448, snapshot(from_digest=bytes(16))),
    "gone what was not there": (448, snapshot(gone=(1, 2, 3))), "nothing gone": (448, snapshot(gone=())),
    "all gone": (448, snapshot(gone=range(384))), "gone what comes later": (448, snapshot(gone=(166, 400))),
    "gone without order": (448, snapshot(gone=(241, 166))), "gone far ahead": (448, snapshot(gone=(2**64 - 1,))),
    "older too small": (448, snapshot(older=7)), "no older": (448, snapshot(older=0)),
    "older too large": (448, snapshot(older=2**63)), "older beyond all": (448, snapshot(older=2**64 - 1)),
    "another launch": (448, snapshot(launch=3)), "a launch ahead": (448, snapshot(launch=460)),
    "a launch far ahead": (448, snapshot(launch=2**64 - 1)), "no launch": (448, snapshot(launch=0)),
    "a row from before": (448, snapshot(live=first_row(entry=5))), "a row of itself": (448, snapshot(live=lambda rows:
        rows[-1].__setitem__(0, 448))), "a row far ahead": (448, snapshot(live=lambda rows: rows[-1].__setitem__(
            0, 2**64 - 1))),
    "two rows of one step": (448, snapshot(live=first_row(step=440))),
    "a step of before": (448, snapshot(live=first_row(step=22))), "no rows": (448, snapshot(live=lambda rows:
        rows.clear())),
    "a middle one says less": (384, snapshot(live=lambda rows: rows.pop())),
    "the oldest says less": (256, snapshot(live=lambda rows: rows.pop())),
    "nth huge": (435, launch(nth=2**64 - 1)), "nth 0": (435, launch(nth=0)), "nth 1": (435, launch(nth=1)),
    "no ids": (435, launch(ids=())), "ids too many": (435, launch(ids=[ID] * 10)), "other ids": (435, launch(ids=[ID])),
    "a launch from itself": (435, launch(from_=436)), "a launch from a commit": (435, launch(from_=300)),
    "a launch from none": (435, launch(from_=0)), "a launch from far ahead": (435, launch(from_=2**64 - 1)),
    "an old launch from none": (242, launch(from_=0)), "an old launch of ids": (242, launch(ids=[ID] * 4)),
}


@pytest.mark.parametrize("lie", LISTS)
def test_lists_that_lie(vckpt, entries, tmp_path, lie):
    """All digests are right. Readers end, with steps that some entry committed or a sentence; verify finds the
    entry."""
    number, change = LISTS[lie]
    out = chained(entries, tmp_path / "out", number, change)
    listed = vckpt("ls", out, "long", "--json", check=False, timeout=60)
    assert listed.returncode in (0, 1), listed.stderr
    if listed.returncode == 0:
        steps = [s["step"] for s in json.loads(listed.stdout)["steps"]]
        assert len(set(steps)) == len(steps) and set(steps) <= {*range(250), 440, 1000}
    assert vckpt("info", out, "long/latest", check=False, timeout=60).returncode == 1     # it has no manifests
    done = vckpt("verify", out, "--paranoid", check=False, timeout=60)
    assert done.returncode == 3 and (f"{number:012}" in done.stdout) == (lie != "nothing"), done.stdout


# ---- every way of reading ----

@pytest.mark.timeout(3000)
def test_forged_stores(build, bases, tmp_path, scale, seed):
    """The default ones are the same every time; those of --full come from VCKPT_SEED."""
    count = scale(4, 50)
    first = scale(1, 1000 + seed % 100000 * 10000)
    batch = Batch(build, bases, tmp_path, count > 10)
    batch.run(cases(bases, first, count), 500 + 5 * count)
    assert len(batch.results) == count
    print("\n".join(summary(batch.results)))
    for r in batch.results:
        for note in r.get("notes", ()):
            print(f"note: {r['base']} {r['seed']} {r['told']}: {note}")
    wrong = batch.wrong()
    assert not wrong, f"{len(wrong)} findings\n" + "\n".join(wrong[:40])
