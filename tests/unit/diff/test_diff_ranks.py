# SPDX-License-Identifier: Apache-2.0
"""vckpt diff of steps of several ranks: what rows say side by side is what opened tensors say, also where a stranger
made them: boxes that overlap or are missing, copies that differ, rows where a rank should have none."""
import copy
import ctypes
import json
import pathlib

import pytest

from protolib import chunk_bytes
from test_load_boxes import (Step, T, cache, opened, proto, random_shape, shapes, sharded,  # noqa: F401 (fixtures)
                             whole)
from test_save_load import Failed, api  # noqa: F401 (api is a fixture)

WORLD = 4


class Copies(Step):
    """Ranks in t.copies have other bytes of it."""

    def rows(self, rank, layout, tensors):
        mine = [copy.copy(t) for t in tensors]
        for t in mine:
            t.array = t.copies.get(rank, t.array)
        return super().rows(rank, layout, mine)


def changed(array, rng):
    array = array.copy()
    if array.size:
        array.reshape(-1)[rng.randrange(array.size)] += 1
    return array


def kinds(shapes, rng):  # noqa: F811
    """(shape, held, recorded, ranks whose copy may differ)."""
    strips, n = {r: [[(2 * r, 2), (0, 40)]] for r in range(WORLD)}, rng.randint(1, 90)
    made = [((8, 40), strips, ("dp=4", "S(0)"), ()),
            ((n, 5), {0: None, 2: None}, ("dp=4", "R"), (2,)),                  # the lowest rank's counts
            ((2, n), {0: [[(0, 1), (0, n)]], 1: [[(1, 1), (0, n)]], 3: [[(0, 1), (0, n)]]}, ("dp=4", "S(0)"), (3,)),
            ((2, n), {0: [[(0, 1), (0, n)]], 1: [[(1, 1), (0, n)]], 2: [[(0, 1), (0, n)]]}, (), (2,))]
    for _ in range(3):
        shape = random_shape(rng)
        made.append((shape, sharded(shapes, rng, shape, (WORLD,)), (), ()))
    return rng.sample(made, 4)


def tensors(shapes, rng):  # noqa: F811
    """Those of A and of B."""
    a = []
    for k, (shape, held, recorded, may) in enumerate(kinds(shapes, rng)):
        for i in range(5):
            t = T(f"{i}.{k}", "u2", shape, held, rng.randrange(1 << 30), recorded)
            t.copies, t.may = {r: changed(t.array, rng) for r in may if rng.random() < 0.5}, may
            a.append(t)
    b = [copy.copy(t) for t in a]
    for t in b:
        what = rng.random()
        if what < 0.3:
            t.array = changed(t.array, rng)
        elif what < 0.6:
            t.copies = {r: changed(x, rng) for r, x in t.copies.items() if rng.random() < 0.5}
        elif what < 0.7:
            t.held = {r: boxes for r, boxes in t.held.items() if r not in t.may}
        elif what < 0.8:
            t.held = {r: boxes and boxes[::-1] for r, boxes in t.held.items()}
    return a, b


def forge(a, b, rng):
    """A rank says nothing, or too much, or what is another's: of a tensor on one side, or of several like it on both,
    which are equal."""
    i, both = rng.randrange(len(a)), rng.random() < 0.5
    shape, held, lie = a[i].shape, dict(a[i].held), rng.choice(["nothing", "more", "another's"])
    rank, other = rng.choice(sorted(held) or [0]), rng.randrange(WORLD)
    if lie == "nothing":
        held.pop(rank, None)
    elif lie == "another's" and rank in held:
        held[other] = held.pop(rank)
    elif all(shape):
        some = [(0, 1), *whole(shape)[1:]]
        held[other] = None if rng.random() < 0.5 or not shape or some == whole(shape) else [some]
    if both:
        for t, u in zip(a, b):
            if t.name[2:] == a[i].name[2:]:
                t.held, u.held, u.array, u.copies = held, held, t.array, t.copies
    else:
        rng.choice([a, b])[i].held = held


def expected(a, b, cache, names):  # noqa: F811
    """What opened tensors say: the names of those that differ, and of those that cannot be opened, sorted."""
    different, bad = set(), []
    for name in sorted(names):
        try:
            objects = [s.tensor("model", name) for s in (a, b)]
        except Failed:
            bad.append(name)
            continue
        if objects[0].read(cache) != objects[1].read(cache):
            different.add(name)
        for o in objects:
            o.close()
    return different, bad


@pytest.mark.parametrize("forged", [False, True])
def test_rows_say_what_opened_tensors_say(vckpt, proto, shapes, opened, cache, tmp_path, rng, scale,  # noqa: F811
                                          forged):
    store = tmp_path / "s"
    vckpt("init", store)
    for n in range(1, scale(24, 600), 2):
        a, b = tensors(shapes, rng)
        if forged:
            forge(a, b, rng)
        for step, some in (n, a), (n + 1, b):
            Copies(proto, store, some, WORLD, step=step, attempt=b"0123456789abcdef-%d" % step)
        different, bad = expected(opened(n), opened(n + 1), cache, {t.name for t in a})
        done = vckpt("diff", store, f"r/{n}", f"r/{n + 1}", "--json", check=False)
        if bad:
            assert forged and done.returncode in (2, 3) and not done.stdout
            assert f"tensor model/{bad[0]}: " in done.stderr
        else:
            assert done.returncode == (1 if different else 0), done.stderr
            assert {d["name"] for d in json.loads(done.stdout)["differences"]} == different


def test_reads_do_not_grow_with_tensors(vckpt, proto, tmp_path):  # noqa: F811
    """Each chunk of both steps is read once for all of its tensors, and once more for the first of those alike."""
    reads = []
    for n in (40, 600):
        store = tmp_path / str(n)
        store.mkdir()
        vckpt("init", store)
        for step in (1, 2):
            made = [T(f"{i}", "u2", (8, 40), {r: [[(2 * r, 2), (0, 40)]] for r in range(WORLD)}, i + (step == 2),
                      ("dp=4", "S(0)")) for i in range(n)]
            Step(proto, store, made, WORLD, step=step, attempt=b"0123456789abcdef-%d" % step)
        before = reads_made()
        done = vckpt("diff", store, "r/1", "r/2", "--stat", check=False)
        reads.append(reads_made() - before)
        assert done.returncode == 1
        assert done.stdout.split("model")[1].split()[:3] == [str(n), "0", str(n)], done.stdout
    assert reads[1] < 1.5 * reads[0], reads


def test_classes_do_not_grow_with_ranks(lib, vckpt, proto, opened, tmp_path):  # noqa: F811
    """Each rank has all of each tensor, and each tensor a shape of its own: so each row makes a class."""
    store, n, world = tmp_path / "s", 40, 40
    a = [T(f"{i}", "u2", (i + 1,), dict.fromkeys(range(world)), i) for i in range(n)]
    vckpt("init", store)
    for step, some in (1, a), (2, one_changed(a, 7, 3)):
        Step(proto, store, some, world, step=step, attempt=b"0123456789abcdef-%d" % step)
    k = ctypes.c_void_p()
    assert lib.load_alike_new(opened(1).handle, opened(2).handle, None, ctypes.byref(k)) == 0 and k
    assert n < lib.load_alike_classes(k) <= 3 * n + 1024 < n * world
    classes, equal, pieces = set(), ctypes.c_bool(), ctypes.c_uint64()
    for i in range(n):
        classes.add(lib.load_alike_class(k, i, ctypes.byref(equal), ctypes.byref(pieces)))
        assert equal.value == (i != [t.name for t in sorted(a, key=lambda t: t.name)].index("7"))
        assert pieces.value == world
    lib.load_alike_free(k)
    assert len(classes) == n
    done = vckpt("diff", store, "r/1", "r/2", "--json", check=False)
    assert [d["name"] for d in json.loads(done.stdout)["differences"]] == ["7"]


def reads_made():
    """Calls of this process and of all whose end it has waited for."""
    return int(pathlib.Path("/proc/self/io").read_text().split("syscr: ")[1].split()[0])


STRIPS = {r: [[(2 * r, 2), (0, 40)]] for r in range(WORLD)}
SHARDED = "dp=4", "S(0)"


def alike(n, held=STRIPS, recorded=SHARDED, shape=(8, 40)):
    return [T(f"{i}", "u2", shape, held, i, recorded) for i in range(n)]


def one_changed(tensors, i, row):
    tensors = [copy.copy(t) for t in tensors]
    tensors[i].array = tensors[i].array.copy()
    tensors[i].array[row] += 1
    return tensors


def differences(vckpt, proto, store, a, b, *words, stages=lambda some: None):  # noqa: F811
    """What diff says of steps of these tensors: its exit code, and the names, or what it printed of an error."""
    vckpt("init", store)
    for step, some in (1, a), (2, b):
        Step(proto, store, some, WORLD, step=step, attempt=b"0123456789abcdef-%d" % step, stages=stages(some))
    done = vckpt("diff", store, "r/1", "r/2", "--json", *words, check=False)
    return done.returncode, done.stderr or {d["name"] for d in json.loads(done.stdout)["differences"]}


@pytest.mark.parametrize("lie, sides, said", [
    ("shape", 2, "no rank stored box"), ("placement", 2, "is not what the layout gives this rank"),
    ("place", 1, "overlap"), ("place", 2, "overlap"), ("rank", 2, "overlap"), ("fewer", 2, "no rank stored box"),
    ("fewer", 1, "no rank stored box"), ("none", 2, "no part has a row of it")])
def test_one_of_many_alike_is_wrong(vckpt, proto, tmp_path, lie, sides, said):  # noqa: F811
    """It has the boxes of the others, or their shape, and cannot be opened: an error, though its rows are equal."""
    halves = {0: [[(0, 4), (0, 40)]], 1: [[(4, 4), (0, 40)]]}
    a = alike(5, halves, ()) if lie in ("shape", "place", "rank") else alike(5)
    b = [copy.copy(t) for t in a]
    for t in (a[3], b[3])[2 - sides:]:
        if lie == "shape":
            wrong = T("3", "u2", (9, 40), halves, 3)
        elif lie == "placement":
            wrong = T("3", "u2", (8, 40), STRIPS, 3, ("dp=4", "S(1)"))
        else:
            held = {"place": {**halves, 1: [[(3, 4), (0, 40)]]}, "rank": {0: halves[0], 2: [[(3, 4), (0, 40)]]},
                    "fewer": {r: STRIPS[r] for r in (0, 1, 3)}, "none": {}}[lie]
            wrong = T("3", "u2", (8, 40), held, 3, t.recorded)
        t.__dict__.update(wrong.__dict__)
    code, told = differences(vckpt, proto, tmp_path / "s", a, b)
    assert code in (2, 3) and "tensor model/3: " in told and said in told, told


@pytest.mark.parametrize("sides", [(1,), (2,), (1, 2)])
def test_a_rank_whose_rows_cannot_be_read(vckpt, proto, tmp_path, sides):  # noqa: F811
    """Its tensor is not taken for one like those that it has nothing of."""
    halves = {0: [[(0, 4), (0, 40)]], 1: [[(4, 4), (0, 40)]]}
    a = [*alike(3, halves, ()), T("3", "u2", (8, 40), {**halves, 3: [[(4, 4), (0, 40)]]}, 3)]
    vckpt("init", tmp_path / "s")
    for step in 1, 2:
        Step(proto, tmp_path / "s", a, WORLD, step=step, attempt=b"0123456789abcdef-%d" % step,
             forge=lambda rank, rows, _: chunk_bytes(rows + rows) if rank == 3 and step in sides else None)
    done = vckpt("diff", tmp_path / "s", "r/1", "r/2", check=False)
    assert done.returncode == 2 and done.stderr.startswith(
        f"vckpt diff: r/{sides[0]}: tensor model/3: part of rank 3: rows of a part cannot be read"), done


def test_rows_of_one_component(vckpt, proto, tmp_path):  # noqa: F811
    """With --component chunks that have none of it are not read; ranks 0 to 2 have others' rows in theirs, too."""
    a = alike(9)
    for i, t in enumerate(a):
        t.component = ("a", "model", "z")[i // 3]
        if t.component != "model":
            t.held, t.recorded = {r: None for r in ((0, 1) if i < 3 else (0, 2))}, ()
    for rank in range(WORLD):
        b = one_changed(a, 4, 2 * rank)
        assert differences(vckpt, proto, tmp_path / f"{rank}", a, b, "--component", "model") == (1, {"4"})
        assert differences(vckpt, proto, tmp_path / f"{rank}a", a, b, "--component", "a") == (0, set())


def test_rows_of_several_layouts(vckpt, proto, tmp_path):  # noqa: F811
    """Ranks of another layout have the rest of a tensor: those of the first one are not enough."""
    a = [*alike(3, STRIPS, ()), T("more", "u2", (4, 4), {2: None}, 9)]
    for row in 0, 7:
        assert differences(vckpt, proto, tmp_path / f"{row}", a, one_changed(a, 1, row),
                           stages=lambda some: [([0, 1], some[:3]), ([2, 3], some)]) == (1, {"1"})
