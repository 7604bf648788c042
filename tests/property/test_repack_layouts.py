# SPDX-License-Identifier: Apache-2.0
"""A step that is written anew as one writer, whole: whatever ranks held of it, all reads of it are as before.

Steps and loads are those of test_load_layouts.py: random worlds save random tensors in every kind of holding, repack
cuts the step anew, and random other worlds load it. What is read for it is what is needed of the whole pieces."""
import collections
import random

import numpy as np

import reader
import test_load_layouts
from placelib import Step
from test_saver_layouts import read_back


HOW = {"attempt", "entry", "manifest", "new_bytes", "bytes", "logical_bytes", "pieces", "stored_bytes", "codecs",
       "packs", "shared_with_step_before"}


def shown(vckpt, store, step, meshes):
    """What the commands say of it, but for how its bytes are stored."""
    (row,) = (s for s in vckpt.json("ls", store, "run")["steps"] if f"run/{s['step']}" == step)
    said = [{key: value for key, value in found.items() if key not in HOW}
            for found in (row, vckpt.json("info", store, step))]
    for mesh in meshes:
        done = vckpt("cat", store, f"{step}/mesh/{mesh}/manifest.json", check=False)
        said.append((mesh, done.returncode, done.stdout, done.stderr))
    return said


def meshes_of(job):
    """Those that it was saved under, and another."""
    return sorted({fields["mesh"].text[5:].split(";")[0] for t in job.tensors for held in t.parts
                   for _, fields in held if "mesh" in fields} | {"dp=3,tp=2"})


def repack(vckpt, store, step):
    (done,) = vckpt.json("repack", store, step)["steps"]
    (again,) = vckpt.json("repack", store, step)["steps"]
    assert not again["repacked"] and again["entry"] == done["entry"]
    return done["repacked"]


def rows(path, number):
    """By rank: which tensors have a row; and whether all rows of rank 0 are whole."""
    step = Step(path, "run", number)
    whole = all(list(boxes) == [step.look[key].grid.whole] for key, boxes in step.parts[0].rows.items())
    return [set(part.rows) for part in step.parts], whole


def play(api, vckpt, path, seed, counts):
    rng = random.Random(seed)
    job, loads = test_load_layouts.Saved(api, api.store(path), rng), None
    try:
        job.make()
        number = job.steps - 1
        step = f"run/{number}"
        meshes = meshes_of(job)
        before, bytes_before = shown(vckpt, path, step, meshes), read_back(api, job.store, number)
        many = any(rows(path, number)[0][1:])
        assert repack(vckpt, path, step)
        assert (shown(vckpt, path, step, meshes), read_back(api, job.store, number)) == (before, bytes_before)
        faults, found = reader.read(path)[1].faults, rows(path, number)
        assert not faults, faults
        if many:
            assert found[1] and {"/".join(key) for key in found[0][0]} == {t.name for t in job.tensors}
            assert not any(found[0][1:])
            first = np.arange(job.world)[:, None] == 0          # rank 0 has all items, the others none
            job.held = {t.name: first & np.ones(max(1, len(t.items)), bool) for t in job.tensors}
        places = Step(path, "run", number)
        for _ in range(2):
            loads = test_load_layouts.Loads(job, places, counts)
            loads.load()
        assert vckpt.json("verify", path)["faults"] == 0
        counts.update(many=many)
    except Exception as e:
        lines = [line for layout in job.layout + ([loads.told()] if loads else []) for line in layout]
        lines.insert(0, f"play(api, vckpt, path, {seed}, Counter()) repeats it.")
        raise AssertionError("\n".join([*lines, f"{e}"])) from e


def test_any_step_is_cut_anew(build, vckpt, tmp_path, scale, rng):
    api, counts = test_load_layouts.Api(build), collections.Counter()
    for n in range(scale(4, 200)):
        play(api, vckpt, tmp_path / f"store{n}", rng.getrandbits(64), counts)
    print(dict(counts))
    assert counts["loads"] > 0 and scale(True, counts["many"] > 50)
