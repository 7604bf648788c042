# SPDX-License-Identifier: Apache-2.0
"""vckpt find: which steps an expression holds for, with an index, without one, and with one that is damaged."""
import json
import os
import shutil
import subprocess

import numpy as np
import pytest

import vckpt as package
from factslib import change
from storelib import Api


def state(step):
    """Two layouts; the tensor `same` has the same bytes in all steps."""
    model = {"layers.0.weight": np.full((4, 6), step, "f4"), "layers.0.bias": np.full(6, step, "f8"),
             "same": np.arange(4, dtype="i4")}
    if step % 2:
        model["extra"] = np.full((2, 2, 3), step, "f2")
    return {"model": model, **({"optimizer": {"moment": np.full(3, step, "f4")}} if step < 5 else {})}


@pytest.fixture(scope="module")
def full(vckpt, tmp_path_factory):
    """Two runs of 40 steps."""
    store = tmp_path_factory.mktemp("find") / "store"
    package.init(store)
    for run in "a", "b":
        with package.Saver(store / run, pin="no") as saver:
            for step in range(40):
                saver.async_save(state(step), step=step, attributes={"loss": 4 - step / 10}).committed()
    return store


@pytest.fixture
def steps(vckpt):
    def steps(store, expression, *more, **options):
        done = vckpt("find", store, expression, "--json", *more, **options)
        return sorted((row["run"], row["step"]) for row in json.loads(done.stdout)["steps"])
    return steps


BOTH = {run: [(run, step) for step in range(40)] for run in "ab"}
EVEN, ODD = ([(run, step) for run in "ab" for step in range(first, 40, 2)] for first in (0, 1))
CASES = [
    ("loss < 0.2", [("a", 39), ("b", 39)]), ("run == a and step <= 3", [("a", n) for n in range(4)]),
    ("tensor ~ layers.*", BOTH["a"] + BOTH["b"]), ("tensor == extra", ODD), ("not tensor == extra", EVEN),
    ("tensor ~ 'layers.*.weight' and dtype == f32", BOTH["a"] + BOTH["b"]),
    ("tensor ~ 'layers.*.weight' and dtype == float64", []),                        # each is there, of two tensors
    ("dtype == float64 and step < 2 and tensor ~ '*.weight' or run == a and step == 7", [("a", 7)]),
    ("(tensor == x or tensor == extra) and shape == [2, 2, 3] and step < 3", [("a", 1), ("b", 1)]),
    ("shape == [4,6] and step == 2", [("a", 2), ("b", 2)]), ("shape ~ '2,*' and step < 2", [("a", 1), ("b", 1)]),
    ("component == optimizer and run == b", [("b", n) for n in range(5)]),
    ("not component == optimizer and step < 6", [("a", 5), ("b", 5)]),
    ("tensor ~ layers* and tensor !~ '*.bias' and dtype == f64", []),
    ("has tensor and step == 1", [("a", 1), ("b", 1)]),
    ("not (tensor == extra and dtype == f32) and step == 1", [("a", 1), ("b", 1)]),
]


@pytest.mark.parametrize("expression, found", CASES)
def test_questions(steps, full, expression, found):
    assert steps(full, expression) == sorted(found)
    assert steps(full, expression, "--no-index") == sorted(found)


# ---- random expressions, and a model of what the page says ----

TENSOR_LEAVES = {
    "tensor == extra": lambda t: t[1] == "extra", "tensor ~ layers*": lambda t: t[1].startswith("layers"),
    "tensor !~ '*.bias'": lambda t: not t[1].endswith(".bias"), "dtype == f32": lambda t: t[2].dtype == "f4",
    "dtype != float32": lambda t: t[2].dtype != "f4", "shape == [6]": lambda t: t[2].shape == (6,),
    "component == optimizer": lambda t: t[0] == "optimizer", "has tensor": lambda t: True,
}
STEP_LEAVES = {"step < 4": lambda step: step < 4, "loss < 1": lambda step: 4 - step / 10 < 1,
               "has nothing": lambda step: False, "run ~ ?": lambda step: True}


def draw(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([*TENSOR_LEAVES, *TENSOR_LEAVES, *STEP_LEAVES])
    if rng.random() < 0.25:
        return ("not", draw(rng, depth - 1))
    return (rng.choice(["and", "or"]), *(draw(rng, depth - 1) for _ in range(rng.randrange(2, 5))))


def written(tree):
    if isinstance(tree, str):
        return tree
    if tree[0] == "not":
        return f"not ({written(tree[1])})"
    return f" {tree[0]} ".join(one if isinstance(one, str) else f"({written(one)})" for one in tree[1:])


def of_tensors(tree):
    return tree in TENSOR_LEAVES if isinstance(tree, str) else tree[0] != "not" and all(map(of_tensors, tree[1:]))


def one_holds(tree, tensor):
    if isinstance(tree, str):
        return TENSOR_LEAVES[tree](tensor)
    return (all if tree[0] == "and" else any)(one_holds(one, tensor) for one in tree[1:])


def holds(tree, step, tensors):
    if of_tensors(tree):
        return any(one_holds(tree, tensor) for tensor in tensors)
    if isinstance(tree, str):
        return STEP_LEAVES[tree](step)
    if tree[0] == "not":
        return not holds(tree[1], step, tensors)
    together = [one for one in tree[1:] if of_tensors(one)]
    rest = [holds(one, step, tensors) for one in tree[1:] if not of_tensors(one)]
    return (all if tree[0] == "and" else any)(rest + [holds((tree[0], *together), step, tensors)] * bool(together))


def test_random_questions(steps, full, rng, scale):
    tensors = [[(c, name, array) for c, part in state(step).items() for name, array in part.items()]
               for step in range(40)]
    for _ in range(scale(60, 2000)):
        tree = draw(rng, 3)
        wanted = [(run, step) for run in "ab" for step in range(40) if holds(tree, step, tensors[step])]
        assert steps(full, written(tree)) == wanted, written(tree)


def test_digests(vckpt, steps, full):
    rows = {t["name"]: t["digest"] for t in
            json.loads(vckpt("ls", full, "a/7/model", "-l", "--json").stdout)["tensors"]}
    for _ in range(2):                              # the index is made, and read
        assert steps(full, f"digest == {rows['extra']}") == [("a", 7), ("b", 7)]
        assert steps(full, f"digest == {rows['same'][:20].upper()}") == sorted(BOTH["a"] + BOTH["b"])
        assert steps(full, f"tensor == extra and digest == {rows['layers.0.weight']}") == []
        assert steps(full, f"digest != {rows['same']} and tensor == same") == []
    assert (full / "index/digests.mdb").exists()


def test_the_index_is_as_good_as_none(steps, full, tmp_path, rng):
    """Damaged, cut, foreign, empty or a directory: it costs time, and answers stay."""
    store = tmp_path / "store"
    shutil.copytree(full, store)
    steps(store, "tensor == extra")
    file = store / "index/steps.mdb"
    good = file.read_bytes()
    for case in range(12):
        bad = bytearray(good)
        for _ in range(3):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        file.write_bytes([bytes(bad), good[:rng.randrange(len(good))], b"", good][case % 4])    # good: of another file
        assert steps(store, "tensor == extra") == sorted(ODD)
        assert steps(store, "tensor == extra") == sorted(ODD)
    file.unlink()
    file.mkdir()
    assert steps(store, "tensor == extra") == sorted(ODD)


def test_it_is_used(vckpt, steps, full, build):
    """Once it is up to date no manifest is read, and nothing is written."""
    steps(full, "tensor == extra")
    env = dict(os.environ, LD_PRELOAD=f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip(),
               VCKPT_INTERPOSE=f"root={full},reads=1,path=manifests,do=kill,at=1",
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    before = os.stat(full / "index/steps.mdb").st_ino
    done = subprocess.run([vckpt.path, "find", full, "tensor == extra and step == 3", "-H"], env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert os.stat(full / "index/steps.mdb").st_ino == before
    assert subprocess.run([vckpt.path, "find", full, "tensor == extra", "--no-index"], env=env,
                          capture_output=True).returncode == -9


def test_steps_that_go_and_come(vckpt, steps, full, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(full, store)
    steps(store, "tensor == extra")
    vckpt("rm", store, "a/1", "b/3", "-q")
    package.save(store / "a", {"model": {"extra": np.zeros(3)}}, step=2, replace=True)
    package.save(store / "c", {"model": {"extra": np.zeros(3)}}, step=2)
    wanted = sorted(set(ODD) - {("a", 1), ("b", 3)} | {("a", 2), ("c", 2)})
    assert steps(store, "tensor == extra") == wanted
    package.close()
    vckpt("gc", store, "--grace", "0", "-q")
    assert steps(store, "tensor == extra") == wanted == steps(store, "tensor == extra", "--no-index")


def test_damage(vckpt, full, tmp_path):
    """A step whose manifest cannot be read hides no other, and an expression without tensors does not ask for it."""
    store = tmp_path / "store"
    shutil.copytree(full, store)
    step = json.loads(vckpt("ls", store, "a", "--json").stdout)["steps"][3]
    (store / "runs/a/manifests" / step["manifest"]).unlink()
    done = vckpt("find", store, "tensor == extra", "--json", check=False)
    assert done.returncode == 1 and "a/3" in done.stderr and len(json.loads(done.stdout)["steps"]) == len(ODD) - 1
    assert len(json.loads(vckpt("find", store, "loss > 0", "--json").stdout)["steps"]) == 80
    with pytest.raises(package.Error, match="a/3"):
        package.find(store, "tensor == extra")


def test_order_and_limit(vckpt, full):
    rows = [line.split("\t")[0] for line in vckpt("find", full, "step < 3", "-H").stdout.splitlines()]
    assert rows == ["b/2", "b/1", "b/0", "a/2", "a/1", "a/0"]
    assert [line.split("\t")[0] for line in vckpt("find", full, "step < 3", "-H", "-l", "2").stdout.splitlines()] == \
        rows[:2]
    assert package.find(full, "step < 3") == [f"{full}/{row}" for row in rows]
    assert package.find(full, "step < 3", limit=2) == [f"{full}/{row}" for row in rows[:2]]
    with package.open(package.find(full, "tensor == extra", limit=1)[0]) as step:
        assert "model/extra" in step


def test_facts(vckpt, lib, steps, full, tmp_path):
    """What was said of a step later is asked for, and shown."""
    store = tmp_path / "store"
    shutil.copytree(full, store)
    api = Api(lib, store, init=False)
    for run, what in ("a", {"step": 4, "tags": ["best"], "set": {"score": "0.5", "loss": "9"}}), ("b", {"step": 5,
                      "pin": 1, "reason": "keep"}):
        with api.list(run) as l:
            assert change(l, **what) == 0
    api.close()
    assert steps(store, "score > 0.4") == steps(store, "tag == best") == steps(store, "loss == 9") == [("a", 4)]
    assert steps(store, "pinned") == [("b", 5)]
    row = json.loads(vckpt("find", store, "tag == best", "--json").stdout)["steps"][0]
    assert row["tags"] == ["best"] and "pinned" not in row and row["attributes"] == {"loss": "9", "score": "0.5"}


@pytest.mark.parametrize("expression, said", [
    ("loss <", "column 7"), ("dtype == f31", "column 10"), ("shape == [2,x]", "a shape, such as"),
    ("digest == 12", "4 to 64 hexadecimal digits"), ("digest ~ 1234*", "4 to 64 hexadecimal"),
    ("x" * 5000, "4096 bytes"),
])
def test_wrong(vckpt, full, expression, said):
    done = vckpt("find", full, expression, check=False)
    assert done.returncode == 2 and said in done.stderr
    with pytest.raises(package.Error, match=said if "[" not in said else None):
        package.find(full, expression)


def test_notes(vckpt, full, store):
    done = vckpt("find", full, "los < 3 and tensor == extra")
    assert done.stdout == "" and done.stderr == "vckpt find: no step has an attribute los\n"
    assert vckpt("find", store, "loss < 3").stderr == ""
    assert vckpt("find", full, "step < 3", "--limit", "0", check=False).returncode == 2
