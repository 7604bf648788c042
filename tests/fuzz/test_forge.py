# SPDX-License-Identifier: Apache-2.0
"""Stores with all checksums right and wrong intentions (forge.py), read in every way (forge_look.py)."""
import pickle
import subprocess
import sys

import pytest

import forge
import forge_bytes
import reader
from forge_many import HERE, SHAPES, Batch, cases, make_bases, summary


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


# ---- every way of reading ----

@pytest.mark.timeout(3000)
def test_forged_stores(build, bases, tmp_path, scale, seed):
    """The default ones are the same every time; those of --full come from VCKPT_SEED."""
    count = scale(6, 50)
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
