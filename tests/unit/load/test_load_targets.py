# SPDX-License-Identifier: Apache-2.0
"""Loads into slices, other names, dtypes and sizes against numpy's slices and casts."""
import ctypes as c
import errno
import pathlib
import random
import re

import numpy as np
import pytest

from loadlib import CONVERT, RESIZE, SKIP_DAMAGED, ZERO, Opened, Target, described, strided, target
from saverlib import Failed, api, store  # noqa: F401 (fixtures)

EINVAL = -errno.EINVAL
KINDS = ["float32", "float64", "float16", "int32", "int64", "uint8", "bool"]


def save(api, store, arrays):  # noqa: F811
    saver = api.saver(store, "run")
    saver.save(arrays).committed()
    saver.close()
    saver.free()


def refused(pattern, work, *args, code=EINVAL):
    with pytest.raises(Failed) as e:
        work(*args)
    assert e.value.code == code and re.search(pattern, e.value.text), str(e.value)


def items(rng, shape, kind):
    """Numbers that every kind can tell apart, but for bool."""
    some = np.frombuffer(rng.randbytes(int(np.prod(shape, dtype=int))), "u1").reshape(shape)
    return np.asarray(some % 101).astype(kind)


def cast(array, kind):
    return array != 0 if kind == "bool" else array.astype(kind)


# ---- merged and split ----

def test_a_merged_tensor_loads_into_three_and_three_into_one(api, store, seed):  # noqa: F811
    rng = random.Random(seed)
    qkv, parts = items(rng, (96, 40), "float32"), [items(rng, (32, 40), "float32") for _ in range(3)]
    save(api, store, {"model/qkv": qkv, **{f"model/{n}": a for n, a in zip("qkv", parts)}})
    out, merged = [np.empty((32, 40), "f4") for _ in range(3)], np.empty((96, 40), "f4")
    with Opened(api, store) as step, step.load() as load:
        load.targets(*[target(described(f"mine/{n}", a), "model/qkv", [(32 * i, 32), (0, 40)])
                       for i, (n, a) in enumerate(zip("qkv", out))])
        load.targets(*[target(described("mine/all", merged), f"model/{n}", at=(32 * i, 0))
                       for i, n in enumerate("qkv")])
        load.expect("model")
        load.run()
    for i in range(3):
        assert (out[i] == qkv[32 * i:32 * i + 32]).all() and (merged[32 * i:32 * i + 32] == parts[i]).all()


def test_under_a_mesh_each_rank_gets_its_rows_of_each(api, store, seed):  # noqa: F811
    """Three stored weights become one; rank r of tp=2 holds the r-th half of each of its thirds."""
    rng, mesh = random.Random(seed), api.mesh("tp=2")
    parts = [items(rng, (32, 10), "float32") for _ in range(3)]
    save(api, store, {f"model/{n}": a for n, a in zip("qkv", parts)})
    with Opened(api, store) as step:
        for rank in range(2):
            mine = np.empty((48, 10), "f4")
            to = described("mine/qkv", mine, shape=(96, 10), mesh=mesh, placements="IS(0,3)")
            with step.load(rank) as load:
                load.targets(*[target(to, f"model/{n}", at=(32 * i, 0)) for i, n in enumerate("qkv")])
                load.run()
            assert (mine == np.concatenate([p[16 * rank:16 * rank + 16] for p in parts])).all()
    api.lib.vckpt_mesh_free(mesh)


def test_one_expert_of_a_stack(api, store, seed):  # noqa: F811
    rng = random.Random(seed)
    stack, alone = items(rng, (4, 6, 5), "int32"), items(rng, (6, 5), "int32")
    save(api, store, {"model/stack": stack, "model/alone": alone})
    out, back = np.empty((6, 5), "i4"), np.full((4, 6, 5), -7, "i4")
    with Opened(api, store) as step, step.load() as load:
        load.targets(target(described("x/e", out), "model/stack", [(2, 1), (0, 6), (0, 5)]),
                     target(described("x/s", back), "model/alone", at=(1, 0, 0)))
        refused(r"slice \(1,6,5\) of what the step has as i32 \(4,6,5\) .* into i32 \(6,4\)", load.targets,
                target(described("x/e", np.empty((6, 4), "i4")), "model/stack", [(2, 1), (0, 6), (0, 5)]))
        load.run()
    assert (out == stack[2]).all()
    assert (back[1] == alone).all() and (back[[0, 2, 3]] == -7).all()


# ---- random slices, dtypes, sizes ----

def random_target(rng, name, stored):
    """(a target, what keeps its memory, what it must hold afterwards)"""
    to = rng.choice(KINDS)
    take = [(o := rng.randint(0, n), rng.randint(0, n - o)) for n in stored.shape]
    piece = stored[tuple(slice(o, o + n) for o, n in take)]
    flags = CONVERT * (to != stored.dtype.name) | rng.choice((0, 0, RESIZE, RESIZE | ZERO, ZERO))
    if flags & RESIZE:
        shape = [max(0, n + rng.randint(-2, 3)) for n in piece.shape]
        at = [rng.randint(0, n) for n in shape]
    else:
        at = [rng.randint(0, 2) for _ in piece.shape]
        shape = [a + n + rng.randint(0, 2) for a, n in zip(at, piece.shape)]
    base, array = strided(rng, shape, to)
    want = base.copy()
    view = np.ndarray(array.shape, array.dtype, want.reshape(-1).view("u1"),
                      array.ctypes.data - base.ctypes.data if array.size else 0, array.strides)
    if flags & ZERO:
        view[...] = 0
    fits = tuple(slice(0, min(n, room - a)) for n, room, a in zip(piece.shape, shape, at))
    view[tuple(slice(a, a + s.stop) for a, s in zip(at, fits))] = cast(piece[fits], to)
    one = target(described("any/thing", array, strides=array.ndim > 0), name, take, at, flags)
    return one, (base, array), want


@pytest.mark.parametrize("seed", range(4))
def test_any_slice_of_any_tensor(api, store, seed, scale):  # noqa: F811
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 5))) for _ in range(12)] + [(700, 500), (3, 90000)]
    arrays = {f"model/{i}": items(rng, shape, rng.choice(KINDS)) for i, shape in enumerate(shapes)}
    save(api, store, arrays)
    with Opened(api, store) as step, step.load(threads=rng.randint(1, 3)) as load:
        made = [random_target(rng, *rng.choice(list(arrays.items()))) for _ in range(scale(60, 600))]
        load.targets(*[one for one, _, _ in made])
        load.run()
    for one, (base, _), want in made:
        assert base.tobytes() == want.tobytes(), (one.name, one.flags)


def test_bfloat16_and_its_relatives(api, store, seed):  # noqa: F811
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(seed)
    stored = rng.standard_normal((300, 700)).astype("f4")
    save(api, store, {"model/w": stored})
    out = np.empty((700, 300), ml_dtypes.bfloat16).T
    small = np.empty((300, 700), ml_dtypes.float8_e4m3fn)
    with Opened(api, store) as step, step.load() as load:
        load.targets(target(described("model/w", out, dtype=11), flags=CONVERT),
                     target(described("model/w", small, dtype=16), flags=CONVERT))
        load.run()
        assert load.progress().bytes_placed == load.progress().bytes_wanted == 2 * stored.nbytes
    assert (out == stored.astype(ml_dtypes.bfloat16)).all()
    assert (small.view("u1") == stored.astype(ml_dtypes.float8_e4m3fn).view("u1")).all()


# ---- padded vocabularies ----

@pytest.mark.parametrize("rows, flags", [(70, RESIZE), (70, RESIZE | ZERO), (50, RESIZE), (64, RESIZE | ZERO)])
def test_a_padded_vocabulary(api, store, seed, rows, flags):  # noqa: F811
    """64 stored rows; ranks of tp=2 hold halves of more or fewer."""
    rng, mesh = random.Random(seed), api.mesh("tp=2")
    stored = items(rng, (64, 12), "float32")
    save(api, store, {"model/embed": stored})
    want = np.full((rows, 12), 0 if flags & ZERO else 7, "f4")
    want[:min(rows, 64)] = stored[:rows]
    with Opened(api, store) as step:
        for rank in range(2):
            mine = np.full((rows // 2, 12), 7, "f4")
            to = described("model/embed", mine, shape=(rows, 12), mesh=mesh, placements="S(0)")
            with step.load(rank) as load:
                if rows != 64:
                    refused(rf"the step has it as f32 \(64,12\), and it is to be loaded as f32 \({rows},12\)",
                            load.targets, target(to))
                load.targets(target(to, flags=flags))
                load.run()
            assert (mine == want[rank * rows // 2:(rank + 1) * rows // 2]).all()
    api.lib.vckpt_mesh_free(mesh)


# ---- names ----

def test_renamed_tensors(api, store, seed):  # noqa: F811
    rng = random.Random(seed)
    names = ["model/a.w", "model/a.block.w", "model/_orig_mod.b", "optimizer/a.w", "model/long", "model/by"]
    arrays = {name: items(rng, (i + 2,), "float32") for i, name in enumerate(names)}
    save(api, store, arrays)
    mine = {"model/_orig_mod.a.w": "model/a.w", "model/a._orig_mod.block._orig_mod.w": "model/a.block.w",
            "model/b": "model/_orig_mod.b", "optimizer/a.w": "optimizer/a.w", "model/long": "model/long",
            "model/mine": "model/by"}
    out = {name: np.full_like(arrays[there], -1) for name, there in mine.items()}
    with Opened(api, store) as step, step.load() as load:
        load.rename_by(lambda component, name: {"mine": "by"}.get(name))
        load.rename(("model", "_orig_mod.", ""), (None, "_orig_mod.", "", 1))
        load.rename(("model", "b", "_orig_mod.b"), ("model", "a", "never"))
        for name, array in out.items():
            load.tensor(name, array)
        load.expect("model")
        load.expect("optimizer")
        load.run()
        assert load.names("missing") == load.names("unexpected") == []
    for name, there in mine.items():
        assert (out[name] == arrays[there]).all(), name


def test_missing_names_are_told_as_both_sides_have_them(api, store, seed):  # noqa: F811
    save(api, store, {"model/a": np.ones(3, "f4"), "model/b": np.ones(3, "f4")})
    x = np.empty(3, "f4")
    with Opened(api, store) as step, step.load() as load:
        load.rename((None, "m.", "s."))
        load.tensor("model/m.c", x)
        load.tensor("model/d", x)
        load.targets(target(described("model/m.a", x), "model/a"), target(described("model/m.x", x), "model/m.y"))
        load.expect("model")
        refused(r"^run/0: it lacks 3 tensors that are to be loaded: model/d, model/m.c \(s.c in the step\), model/m.y; "
                r"it has 1 tensor that is not to be loaded: model/b$", load.start)
        assert load.names("missing") == ["model/d", "model/m.c", "model/m.y"]
        assert load.names("unexpected") == ["model/b"]


def test_renamings_that_fail(api, store, seed):  # noqa: F811
    save(api, store, {"model/a": np.ones(3, "f4")})
    x = np.empty(3, "f4")
    with Opened(api, store) as step, step.load() as load:
        refused("rule 1 of a renaming: it needs both", load.rename, (None, "x", "a"), (None, None, "b"))
        refused("rule 0 of a renaming: `from` is empty", load.rename, (None, "", "b", 1))
        refused("rule 0 of a renaming: flags of the rule are 0x2", load.rename, (None, "x", "b", 2))
        refused("no rules", api.call, "vckpt_load_rename", load.p, None, c.c_size_t(1))
        refused("tensor model/x: .*lacks|lacks 1 tensor that is to be loaded: model/x$",
                lambda: (load.tensor("model/x", x), load.start()))      # no rule of the call that failed counts
        load.rename((None, "w", "a" * 60000, 1))
        refused("model/wwwww.*: its name becomes longer than 65535 bytes", load.tensor, "model/wwwww", x)
        load.rename_by(lambda component, name: -errno.EPERM)
        refused(r"tensor model/a: the function that renames answers -1 \(", load.tensor, "model/a", x,
                code=-errno.EPERM)


# ---- destinations that overlap ----

def view(rng, memory, kind):
    """A random view of the memory, and the bytes that it has."""
    size = np.dtype(kind).itemsize
    shape = rng.choice(((4, 10, 24), (12, 5, 8), (30, 1, 12), tuple(rng.randint(1, 8) for _ in range(3))))
    first = rng.choice((0, 1, size, 300))
    whole = memory[first:first + int(np.prod(shape)) * size].view(kind).reshape(shape)
    parts = []
    for n in shape:
        a, b = sorted(rng.sample(range(n + 1), 2))
        parts.append(slice(a, b, rng.choice((1, 1, 1, 2, 3))))
    some = whole[tuple(parts)].transpose(rng.sample(range(3), 3))
    starts = some.ctypes.data - memory.ctypes.data + sum(
        np.arange(n).reshape([-1 if d == k else 1 for k in range(3)]) * some.strides[d]
        for d, n in enumerate(some.shape))
    return some, {int(s) + i for s in np.asarray(starts).reshape(-1) for i in range(size)}


def test_destinations_that_overlap_are_named(api, store, seed, scale):  # noqa: F811
    """Random views of one memory, two at a time: refused just where they share a byte."""
    rng, memory, kinds = random.Random(seed), np.zeros(8192, "u1"), ("float32", "uint8", "float64", "int16")
    save(api, store, {f"model/{kind}": np.ones((30, 30, 30), kind) for kind in kinds})
    met = apart = 0
    with Opened(api, store) as step:
        for _ in range(scale(300, 20000)):
            two = [view(rng, memory, rng.choice(kinds)) for _ in range(2)]
            with step.load(threads=1) as load:
                load.targets(*[target(described("a/b", array), f"model/{array.dtype.name}",
                                      [(0, n) for n in array.shape]) for array, _ in two])
                if two[0][1] & two[1][1]:
                    met += 1
                    refused(r"^run/0: the destinations of tensor model/\w+ and of tensor model/\w+ overlap", load.start)
                else:
                    apart += 1
                    load.start()
    assert met > 9 and apart > 9, (met, apart)


def test_columns_of_one_matrix_do_not_overlap(api, store):  # noqa: F811
    """Shards that interleave, and many columns; then one too many."""
    w = np.arange(300 * 64, dtype="f4").reshape(300, 64)
    save(api, store, {"model/w": w, "model/x": w})
    out = np.zeros((300, 64), "f4")
    with Opened(api, store) as step, step.load() as load:
        load.targets(*[target(described("m/c", out[:, i:i + 1]), "model/w", [(0, 300), (i, 1)]) for i in range(64)])
        load.run()
        assert (out == w).all()
    with Opened(api, store) as step, step.load() as load:
        load.targets(*[target(described("m/c", out[:, i:i + 1]), "model/w", [(0, 300), (i, 1)]) for i in range(64)])
        load.targets(target(described("m/d", out[299, 63:]), "model/x", [(0, 1), (0, 1)]))
        refused("tensor model/w and of tensor model/x overlap", load.start)


# ---- what is wrong ----

def test_wrong_targets_are_named(api, store, seed):  # noqa: F811
    save(api, store, {"model/w": items(random.Random(seed), (6, 5), "float32"),
                      "model/c": np.ones(3, "c8"), "model/s": np.ones((), "f4")})
    w, c3 = np.empty((6, 5), "f4"), np.empty(3, "f4")
    whole = described("model/w", w)
    with Opened(api, store) as step, step.load() as load:
        for pattern, one in [
                (r"^run/0: tensor model/w: the step has it as f32 \(6,5\), and it is to be loaded as f64 \(6,5\)",
                 target(described("model/w", w.astype("f8")))),
                (r"tensor model/c: c64 cannot be converted to f32", target(described("model/c", c3), flags=CONVERT)),
                (r"the slice has 3 dimensions, and the stored tensor 2", target(whole, take=[(0, 1)] * 3)),
                (r"the slice has 5 items from 2 on in dimension 0 of the stored tensor, which has 6",
                 target(whole, take=[(2, 5), (0, 5)])),
                (r"the slice has 2 items from 18446744073709551615 on", target(whole, take=[(2**64 - 1, 2), (0, 5)])),
                (r"begin at 7 in dimension 0 of the destination, which has 6", target(whole, at=(7, 0))),
                (r"slice \(6,5\) of what the step has as f32 \(6,5\) is to be loaded into f32 \(6,5\) at \(1,0\)",
                 target(whole, at=(1, 0))),
                (r"slice \(2,5\) of .* into f32 \(6,5\) at \(0,0\)", target(whole, take=[(2, 2), (0, 5)])),
                (r"f32 \(6,5\), and it is to be loaded as f32 \(1,6,5\)",
                 target(described("model/w", w.reshape(1, 6, 5)), flags=RESIZE)),
                (r"flags of the target are 0x8", target(whole, flags=8)),
                (r"struct vckpt_target has", Target(8)), (r"no destination", Target(c.sizeof(Target)))]:
            refused(pattern, load.targets, one)
        refused("no targets", api.call, "vckpt_load_targets", load.p, None, c.c_size_t(1))
        load.targets(target(described("x/y", w), "model/nothing"))
        refused(r"lacks 1 tensor that is to be loaded: model/nothing", load.start)


def test_damage_of_a_target_is_told_in_the_stored_tensor(api, store, seed):  # noqa: F811
    stored = np.frombuffer(random.Random(seed).randbytes(2400000), "u4").reshape(2000, 300)
    save(api, store, {"model/w": stored})
    data = stored[1000].tobytes()
    [(pack, at)] = [(p, at) for p in pathlib.Path(store).glob("packs/*/*.pack")
                    if (at := p.read_bytes().find(data[:64])) >= 0]
    whole = bytearray(pack.read_bytes())
    whole[at] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(whole)
    out = np.full((900, 300), 7, "i8")
    with Opened(api, store) as step, step.load(flags=SKIP_DAMAGED) as load:
        load.targets(target(described("x/y", out), "model/w", [(600, 900), (0, 300)], flags=CONVERT))
        load.run()
        [(name, box, _, _)] = load.lost()
    assert name == "model/w" and box[0][0] <= 1000 < sum(box[0])
    arrived = np.ones(900, bool)
    arrived[max(0, box[0][0] - 600):sum(box[0]) - 600] = False
    assert (out[arrived] == stored[600:1500][arrived]).all() and arrived.any()
    whole[at] ^= 1
    pack.write_bytes(whole)
