# SPDX-License-Identifier: Apache-2.0
"""vckpt du, against a count of files; what it and `rm -n` say that a removal frees is what the collector deletes."""
import collections
import os
import shutil
import struct

import numpy as np
import pytest

from forgelib import Forge, Message


def size_of(store, *patterns):
    return sum(p.stat().st_size for pattern in patterns for p in store.glob(pattern) if p.is_file())


def count(vckpt, store):
    """{(run, step): {file: size}} of every visible step, by its own record and the directories alone."""
    sizes = {p.stem: p.stat().st_size for p in (store / "packs").rglob("*.pack")}
    steps = {}
    for run in (r["run"] for r in vckpt.json("ls", store)["runs"]):
        for step in vckpt.json("ls", store, run)["steps"]:
            info = vckpt.json("info", store, f"{run}/{step['step']}")
            files = {pack["pack"]: sizes[pack["pack"]] for pack in info["packs"]}
            path = store / "runs" / run / "manifests" / info["manifest"]
            files[path] = path.stat().st_size
            for path in (store / "stats" / run / f"{step['step']}.{info['entry']}").glob("*"):
                files[path] = path.stat().st_size
            steps[run, step["step"]] = files
    return steps


def bytes_of(of, others):
    """(stored, shared, unique) of the first steps beside the others."""
    mine = {name: size for files in of for name, size in files.items()}
    theirs = {name for files in others for name in files}
    unique = sum(size for name, size in mine.items() if name not in theirs)
    return sum(mine.values()), sum(mine.values()) - unique, unique


def said(row):
    return row["stored_bytes"], row["shared_bytes"], row["unique_bytes"]


class History:
    """Saves of files of which parts stay the same, in two runs: so their packs are shared, within and across runs."""

    def __init__(self, vckpt, folder, rng):
        self.vckpt, self.store, self.rng = vckpt, folder / "store", rng
        self.files = [folder / f"{name}.npy" for name in "abc"]
        vckpt("init", self.store)
        for number, path in enumerate(self.files):
            np.save(path, np.random.default_rng(number).standard_normal(60_000).astype("f4"))

    def change(self):
        path = self.rng.choice(self.files)
        data = np.load(path)
        at = self.rng.randrange(len(data) - 9000)
        data[at:at + 9000] += 1
        np.save(path, data)

    def act(self):
        self.change()
        some = self.rng.sample(self.files, self.rng.randint(1, 3))
        target = f"{self.rng.choice('pq')}/{self.rng.randrange(9)}"
        words = [word for i, path in enumerate(some) for word in ("--component", f"c{i}" if i else "model", path)]
        self.vckpt("import", self.store, target, *words, "--replace", "-q")
        if self.rng.random() < 0.25:
            run = self.rng.choice(self.steps())
            self.vckpt("rm", self.store, run)

    def steps(self):
        return [f"{run['run']}/{step['step']}" for run in self.vckpt.json("ls", self.store)["runs"] for step in
                self.vckpt.json("ls", self.store, run["run"])["steps"]]


@pytest.mark.parametrize("number", range(2))
def test_freed_is_what_is_deleted(vckpt, tmp_path, rng, number, scale):
    history = History(vckpt, tmp_path, rng)
    store = history.store
    for _ in range(scale(3, 12)):
        for _ in range(5):
            history.act()
        spare = vckpt.json("du", store)["spare_bytes"]
        assert vckpt.json("info", store)["spare_bytes"] == spare
        would = vckpt.json("gc", store, "-n", "--grace", "0")
        assert would["deleted_bytes"] == spare == vckpt.json("gc", store, "--grace", "0")["deleted_bytes"]
        assert vckpt.json("du", store)["spare_bytes"] == 0
        assert (vckpt.json("du", store)["stored_bytes"] ==
                size_of(store, "packs/**/*.pack", "runs/*/manifests/*", "stats/**/*"))

        every = history.steps()
        some = rng.sample(every, rng.randint(1, len(every)))
        freed = vckpt.json("du", store, *(w for step in some for w in ("--freed", step)))["freed"]
        assert freed["steps"] == len(some)
        assert vckpt.json("rm", store, *some, "-n")["freed_bytes"] == freed["bytes"]
        vckpt("rm", store, *some, "-q")
        assert vckpt.json("info", store)["spare_bytes"] == freed["bytes"]
        assert vckpt.json("gc", store, "--grace", "0")["deleted_bytes"] == freed["bytes"] > 0
        assert vckpt("verify", store).returncode == 0


def test_the_tables_are_a_count_of_files(vckpt, tmp_path, rng):
    history = History(vckpt, tmp_path, rng)
    for _ in range(8):
        history.act()
    store = history.store
    for run in "pq":
        vckpt("import", store, f"{run}/20", history.files[0], "-q")
    steps = count(vckpt, store)
    du = vckpt.json("du", store)
    assert du["stored_bytes"] == bytes_of(steps.values(), [])[0]
    assert any(row["shared_bytes"] for row in du["runs"])
    for row in du["runs"]:
        run = row["run"]
        mine, others = ([f for (r, _), f in steps.items() if (r == run) == own] for own in (True, False))
        assert said(row) == bytes_of(mine, others) and row["steps"] == len(mine)
        table = vckpt.json("du", store, run)
        assert said(table) == said(row) and table["logical_bytes"] == row["logical_bytes"] == sum(
            s["bytes"] for s in vckpt.json("ls", store, run)["steps"])
        for step in table["steps"]:
            name = run, step["step"]
            assert said(step) == bytes_of([steps[name]], [f for n, f in steps.items() if n != name])
            assert said(step)[2] == vckpt.json("rm", store, f"{run}/{step['step']}", "-n")["freed_bytes"]
            one = vckpt.json("du", store, f"{run}/{step['step']}")
            assert said(one) == said(step) and one["used_bytes"] == step["used_bytes"] <= step["stored_bytes"]
            for key in ("logical_bytes", "stored_bytes", "shared_bytes", "unique_bytes", "used_bytes"):
                assert sum(part[key] for part in one["components"]) == one[key]
            listed = vckpt.json("ls", store, f"{run}/{step['step']}")
            assert {(part["component"], part["logical_bytes"], part["tensors"]) for part in one["components"] if
                    "tensors" in part} == {(c["component"], c["bytes"], c["tensors"]) for c in listed["components"]}


def test_packs_and_tensors(vckpt, tmp_path, rng):
    history = History(vckpt, tmp_path, rng)
    for _ in range(6):
        history.act()
    store, uses = history.store, collections.defaultdict(list)
    for step in history.steps():
        for pack in vckpt.json("info", store, step)["packs"]:
            uses[pack["pack"]].append((pack["live_bytes"], pack["bytes"], step))
    for of in (None, "p", *history.steps()):
        rows = vckpt.json("du", store, *[of] * (of is not None), "--packs")["packs"]
        assert [row["dead_bytes"] for row in rows] == sorted((row["dead_bytes"] for row in rows), reverse=True)
        assert {row["pack"]: (row["live_bytes"], row["bytes"], row["steps"]) for row in rows} == {
            pack: (max(u[0] for u in used), used[0][1], len(used)) for pack, used in uses.items()
            if of is None or any(u[2] == of or u[2].split("/")[0] == of for u in used)}
    step = history.steps()[0]
    every = vckpt.json("ls", store, f"{step}/model", "--long")["tensors"]
    shown = vckpt.json("du", store, step, "--tensors", "9")["tensors"]
    assert ([(t["bytes"], t["stored_bytes"]) for t in shown if t["component"] == "model"] ==
            sorted(((t["bytes"], t["stored_bytes"]) for t in every), reverse=True))
    assert len(vckpt.json("du", store, step.split("/")[0], "--tensors", "1")["tensors"]) == 1


def test_what_people_see(vckpt, two_steps, tmp_path):
    store = shutil.copytree(two_steps / "store", tmp_path / "store")
    lines = vckpt("du", store).stdout.splitlines()
    assert lines[0].split() == ["RUN", "STEPS", "SIZE", "STORED", "SHARED", "UNIQUE"]
    assert lines[1].split()[:2] == ["run", "2"] and lines[2].startswith("total: 2 steps, ")
    assert "no step needs" not in lines[2]
    by = [int(line.split("\t")[5]) for line in vckpt("du", store, "run", "-H", "--bytes", "-s",
                                                     "unique").stdout.splitlines()]
    assert by == sorted(by, reverse=True) and len(set(by)) == 2
    steps = [line.split("\t")[0] for line in vckpt("du", store, "run", "-H").stdout.splitlines()]
    assert steps == ["step-00000001", "step-00000002"]
    freed = vckpt.json("du", store, "--freed", "run")["freed"]
    assert "removing 2 steps together gives " in vckpt("du", store, "--freed", "run").stdout and freed["steps"] == 2
    for steps, n in ("run/1..2", 2), ("run/..9", 2), ("run/2..", 1), ("run/0..1", 1):
        freed = vckpt.json("du", store, "--freed", steps)["freed"]
        assert (freed["steps"], freed["bytes"]) == (n, vckpt.json("rm", store, steps, "-n")["freed_bytes"])
    assert vckpt.json("du", store, "--freed", "run/1..1", "--freed", "run/2..5")["freed"]["steps"] == 2
    vckpt("rm", store, "run/1")
    assert "no step needs" in vckpt("du", store).stdout


@pytest.mark.parametrize("words, code, sentence", [
    (["none"], 1, "there is no run none"), (["run/9"], 1, "run has no step 9"),
    (["run/1/model"], 2, "give RUN or RUN/STEP"), (["--tensors", "3"], 2, "--tensors: give a RUN"),
    (["run", "--tensors", "0"], 2, "--tensors 0: give a number from 1 on"),
    (["run", "-s", "age"], 2, "--sort age: give one of the columns here: STEP, SIZE, "),
    (["--freed", "run/9"], 1, "run has no step 9"), (["--freed", "run/1/model"], 2, "only whole steps"),
    (["--freed", "run/3..9"], 1, "run has no step from 3 to 9"), (["--freed", "none/1.."], 1, "there is no run none"),
    (["--freed", "run/2..1"], 2, "the first step is above the last one"),
    (["--freed", "run/latest..3"], 2, "the ends of a range are numbers"),
    (["--freed", "run/.."], 2, "a range has a first step, a last one, or both"),
])
def test_what_is_refused(vckpt, two_steps, words, code, sentence):
    done = vckpt("du", two_steps / "store", *words, check=False)
    assert done.returncode == code and sentence in done.stderr, done.stderr


def test_lies_about_sizes(vckpt, lib, two_steps, tmp_path):
    """Sizes are those of the files, and sums of what records say stop where numbers end."""
    store = shutil.copytree(two_steps / "store", tmp_path / "store")
    before = vckpt.json("du", store, "run")
    forge = Forge(lib, store, "run")
    packs = Message(forge.manifest.get(13))
    rows = bytearray(packs.get(3))
    forge.keep_sums = True
    meta = struct.unpack_from("<I", forge.manifest.get(11), 24 + 64)[0]     # keeps its size
    for at in (at for at in range(0, len(rows), 32) if at != 32 * meta):
        struct.pack_into("<QQ", rows, at + 16, 1 << 62, 1 << 62)
    packs.set(3, bytes(rows))
    forge.manifest.set(13, packs.encode())
    forge.commit.set(7, (1 << 63) - 1)
    forge.done(tmp_path / "scratch")
    after = vckpt.json("du", store, "run", "--packs")
    assert after["stored_bytes"] - before["stored_bytes"] < 10_000       # its records are other ones now
    for step in after["steps"]:
        assert 0 <= step["used_bytes"] <= step["stored_bytes"]
    assert all(0 < p["live_bytes"] <= p["bytes"] < 1 << 30 for p in after["packs"])
    assert vckpt.json("rm", store, "run", "-n", "-y")["freed_bytes"] == after["unique_bytes"]


def test_damage_is_named(vckpt, two_steps, tmp_path):
    store = shutil.copytree(two_steps / "store", tmp_path / "store")
    for path in (store / "runs/run/manifests").iterdir():
        os.truncate(path, 100)
    done = vckpt("du", store, check=False)
    assert done.returncode == 3 and "manifests/" in done.stderr
    for path in (store / "runs/run/manifests").iterdir():
        path.unlink()
    done = vckpt("du", store, check=False)
    assert done.returncode != 0 and "manifests/" in done.stderr, done.stderr
