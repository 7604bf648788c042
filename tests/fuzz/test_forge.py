# SPDX-License-Identifier: Apache-2.0
"""Stores with all checksums right and wrong intentions (forge.py), read in every way (forge_look.py)."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import forge
import reader

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE.parent / "golden/v2/store.tar.xz"
SHAPES = {"files": ("golden", ["a", "b"]), "ranks": ("golden", ["d"]), "snapshot": ("golden", ["c"]),
          "wide": ("wide", ["r"]), "many": ("many", ["m"])}

# What is known and not mended yet: (what the forged store says or the finding has, why). Each is for one cause.
KNOWN = []


@pytest.fixture(scope="module")
def bases(vckpt, tmp_path_factory):
    """{shape: {name, path, runs}}. The golden store has most: files of many dtypes, encoded, inline and shared pieces,
    blobs, two ranks with boxes, flat ranges and replicas, a snapshot. It is the same everywhere, and so is what a seed
    makes of it; the others are made here."""
    folder = tmp_path_factory.mktemp("forge")
    shutil.unpack_archive(GOLDEN, folder)
    (folder / "store").rename(folder / "golden")
    forge.make(vckpt.path, folder)
    return {shape: {"name": shape, "path": str(folder / store), "runs": runs}
            for shape, (store, runs) in SHAPES.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_store_that_lies_about_nothing(vckpt, bases, tmp_path, shape):
    """It was taken apart and put together: both readers find it sound, and its tensors are what they were."""
    out, base = tmp_path / "out", bases[shape]
    assert forge.forge(base["path"], out, 0, base["runs"]) == []
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


# ---- every way of reading ----

def environment(build):
    words = dict(os.environ, VCKPT_BUILD=str(build))
    if words.get("VCKPT_PRELOAD"):
        words["LD_PRELOAD"] = words["VCKPT_PRELOAD"]
        # what malloc refuses is no fault; memory is bounded here, because addresses cannot be
        words["ASAN_OPTIONS"] = f"{words.get('ASAN_OPTIONS', '')}:allocator_may_return_null=1:hard_rss_limit_mb=3000"
    return words


class Batch:
    """Runs the cases of a plan in processes of forge_look.py: one after another, a new one after each that died."""

    def __init__(self, vckpt, build, bases, folder, full):
        np.save(folder / "x.npy", np.arange(100))
        (folder / "layout").write_text("* R\n")
        self.build, self.folder, self.results = build, folder, []
        mount = build / "fs/mount.vckpt" if os.path.exists("/dev/fuse") else ""
        self.plan = {"vckpt": vckpt.path, "mount": str(mount), "layout": str(folder / "layout"),
                     "array": str(folder / "x.npy"), "sanitized": bool(os.environ.get("VCKPT_PRELOAD")),
                     "thorough": full, "dcp": full and has_torch(),
                     "scratch": str(folder / "scratch"), "bases": bases}

    def run(self, cases, limit_s):
        cases = list(cases)
        while cases:
            plan = self.folder / "plan.json"
            plan.write_text(json.dumps({**self.plan, "cases": cases}))
            with open(self.folder / "stderr", "wb") as err:
                done = subprocess.run([sys.executable, HERE / "forge_look.py", plan], stdout=subprocess.PIPE,
                                      stderr=err, env=environment(self.build), timeout=limit_s)
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
            self.results += [line for line in lines if "found" in line]
            begun = [line for line in lines if "found" not in line]
            said = (self.folder / "stderr").read_text(errors="replace")
            if done.returncode == 0:
                self.clean(lines[-1], said)
                return
            assert begun, said
            self.results.append({**begun[-1], "told": [], "found": [f"the reading process ended: {done.returncode}: "
                                                                    f"{said[-4000:]}"]})
            cases = cases[len(begun):]

    def clean(self, last, said):
        if "runtime error:" in said or "Sanitizer" in said:
            last["found"].append(said[-4000:])

    def wrong(self):
        """What is found and not known, in words that repeat it."""
        found = []
        for r in self.results:
            for what in r["found"]:
                if not any(re.search(pattern, f"{r['told']} {what}") for pattern, _ in KNOWN):
                    base = self.plan["bases"][r["base"]]
                    found.append(f"{r['base']} {r['seed']}: tests/fuzz/forge.py {base['path']} OUT --runs "
                                 f"{' '.join(base['runs'])} --seed {r['seed']} --show\n  {r['told']}\n  {what}")
        return found


def has_torch():
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def cases(first, count):
    """Mostly of the shapes that have most and are small."""
    shapes = ["files", "ranks", "wide", "files", "ranks", "wide", "files", "ranks", "many", "snapshot"]
    return [[shapes[i % len(shapes)], first + i] for i in range(count)]


@pytest.mark.timeout(3000)
def test_forged_stores(vckpt, build, bases, tmp_path, scale, seed):
    """The default ones are the same every time; those of --full come from VCKPT_SEED."""
    count = scale(6, 1500)
    first = scale(1, 1000 + seed % 100000 * 10000)
    batch = Batch(vckpt, build, bases, tmp_path, count > 100)
    batch.run(cases(first, count), 500 + 5 * count)
    results = batch.results
    seconds = np.array([r["seconds"] for r in results if "seconds" in r]).sum(axis=0)
    print(f"{len(results)} stores, {sum(r.get('commands', 0) for r in results)} commands, "
          f"{sum(r.get('tensors', 0) for r in results)} tensors and blobs; seconds: {seconds.round(1)} (forging, "
          f"commands, mount, package); sound to verify: {sum(r.get('verified') == 0 for r in results)}")
    for r in results:
        for note in r.get("notes", ()):
            print(f"note: {r['base']} {r['seed']} {r['told']}: {note}")
    wrong = batch.wrong()
    assert not wrong, f"{len(wrong)} findings\n" + "\n".join(wrong[:40])
