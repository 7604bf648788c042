# SPDX-License-Identifier: Apache-2.0
"""Loads through vckpt.h: whatever a rank holds of the tensors of a step arrives, and no byte beside it is touched;
what only one side has, what is damaged and what is wrong is named."""
import ctypes as c
import errno
import os
import pathlib
import random
import re
import threading

import numpy as np
import pytest

from loadlib import NOT_STRICT, REHASH, SKIP_DAMAGED, LoadOptions, LoadProgress, Opened, described, strided
from saverlib import ALONE, Failed, api, bounded, store  # noqa: F401 (fixtures)
from test_saver_layouts import Tensor as Held

EDAMAGED, EABORTED, EFORKED, EINVAL = -errno.EBADMSG, -errno.ECANCELED, -errno.ECHILD, -errno.EINVAL


def save(api, store, arrays):
    """A step of one rank. {name: array}"""
    saver = api.saver(store, "run")
    saver.save(arrays).committed()
    saver.close()
    saver.free()


def refused(code, pattern, work, *args, **fields):
    with pytest.raises(Failed) as e:
        work(*args, **fields)
    assert e.value.code == code and re.search(pattern, e.value.text), str(e.value)


def noise(rng, shape, dtype="float32"):
    return np.frombuffer(rng.randbytes(int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize),
                         dtype).reshape(shape).copy()


# ---- whatever a rank holds ----

class Memory:
    """One entry of a rank: a strided place, and how it has to look after the load."""

    def __init__(self, rng, tensor, indices, fields):
        padded = np.append(tensor.items, tensor.items[:1] if tensor.items.size else np.zeros(1, tensor.items.dtype))
        self.base, self.array = strided(rng, indices.shape, tensor.items.dtype)
        self.want = self.base.copy()
        shift = (self.array.ctypes.data - self.base.ctypes.data) if indices.size else 0
        view = np.lib.stride_tricks.as_strided(self.want.reshape(-1)[shift // self.base.itemsize:], indices.shape,
                                               self.array.strides)
        view[indices >= 0] = padded[indices][indices >= 0]
        self.tensor, self.fields = tensor, fields

    def describe(self):
        return described(self.tensor.name, self.array, shape=self.tensor.shape, dtype=self.tensor.dtype,
                         strides=self.array.ndim > 0, **self.fields)


@pytest.mark.parametrize("seed", range(6))
def test_any_holding_of_any_tensor(api, store, seed, scale):  # noqa: F811
    """Saved whole, loaded as ranks of any world hold it: placements of all kinds, flat ranges, boxes, all of it."""
    rng = random.Random(seed)
    tensors = [Held(rng, i, i == 0) for i in range(scale(12, 100))]
    saver = api.saver(store, "run")
    one = saver.begin()
    for t in tensors:
        one.tensor(t.name, t.items.reshape(t.shape).copy(), shape=t.shape, dtype=t.dtype)
    one.submit()
    one.committed()
    saver.close()
    saver.free()
    kinds = set()
    with Opened(api, store) as step:
        for world in (1, rng.randint(2, 8)):
            for t in tensors:
                t.hold(api, rng, world)
                kinds.add(t.holding)
            for rank in range(world):
                mine = [Memory(rng, t, np.asarray(indices), fields) for t in tensors
                        for indices, fields in t.parts[rank]]
                with step.load(rank, threads=rng.randint(0, 3), flags=rng.choice((0, REHASH))) as load:
                    load.tensors(*[m.describe() for m in mine])
                    load.run()
                    p = load.progress()
                    assert p.over and p.bytes_placed == p.bytes_wanted and load.lost() == []
                    assert p.bytes_wanted == sum(int(np.sum(np.asarray(i) >= 0)) * t.items.itemsize
                                                 for t in tensors for i, _ in t.parts[rank])
                for m in mine:
                    assert m.base.tobytes() == m.want.tobytes(), (rank, m.tensor.shape, m.fields)
    assert {"placements", "flat", "boxes"} <= kinds


@pytest.fixture
def three(api, store, rng):  # noqa: F811
    """A step of three tensors: of several pieces, of one, and without items."""
    arrays = {"model/w": noise(rng, (2000, 600)), "model/b": noise(rng, (600,)), "optimizer/none": noise(rng, (0, 3))}
    save(api, store, arrays)
    with Opened(api, store) as step:
        step.arrays, step.store = arrays, pathlib.Path(store)
        yield step


@pytest.fixture
def rng(seed):
    return random.Random(seed)


def places(step, names=None):
    return {name: np.full_like(step.arrays[name], 7) for name in names or step.arrays}


def same(step, out):
    return all(out[name].tobytes() == step.arrays[name].tobytes() for name in out)


def test_a_load_and_what_it_tells(three):
    out = places(three)
    with three.load() as load:
        for name, array in out.items():
            load.tensor(name, array)
        assert bytes(load.progress()) == bytes(LoadProgress(c.sizeof(LoadProgress)))
        load.expect("model")
        load.expect("optimizer")
        load.start()
        load.wait(-1)
        p = load.progress()
        assert (p.over, p.bytes_wanted, p.bytes_placed) == (1, 4802400, 4802400)
        assert p.pieces >= 5 and p.bytes_read >= 4802400 and p.threads >= 1 and p.open_ns and p.plan_ns and p.read_ns
        load.wait(0)
        load.stop()                                     # too late to change anything
        load.wait(0)
        assert load.names("missing") == load.names("unexpected") == load.lost() == []
    assert same(three, out)


def test_a_tensor_twice_and_by_another_rank(three, api):  # noqa: F811
    """Whole, and the columns of rank 1 of 2; a rank that is not in the mesh has nothing."""
    mesh, whole, half = api.mesh("tp=2"), np.empty((2000, 600), "f4"), np.empty((2000, 300), "f4")
    with three.load(1) as load:
        load.tensor("model/w", whole)
        load.tensor("model/w", half, shape=(2000, 600), mesh=mesh, placements="S(1)", local_shape=(2000, 300))
        load.run()
        both = load.progress()
    with three.load() as load:
        load.tensor("model/w", whole.copy())
        load.run()
        p = load.progress()
    assert both.bytes_placed == 1.5 * p.bytes_placed
    assert both.pieces == p.pieces and both.bytes_read < 1.1 * p.bytes_read     # each is read once
    w = three.arrays["model/w"]
    assert whole.tobytes() == w.tobytes() and half.tobytes() == w[:, 300:].tobytes()
    with three.load(2) as load:
        load.tensor("model/w", np.empty(0, "f4"), shape=(2000, 600), mesh=mesh, placements="S(1)")
        load.run()
        assert load.progress().bytes_wanted == 0
    with three.load() as load:                          # nothing at all is wanted
        load.run()
    api.lib.vckpt_mesh_free(mesh)


def test_one_piece_that_is_wanted_many_times(api, store):  # noqa: F811
    """Zeros: all pieces are one object. Several threads copy it, and it is read a few times only."""
    save(api, store, {"model/w": np.zeros(160 << 20, "u1")})
    out = np.full(160 << 20, 7, "u1")
    with Opened(api, store) as step, step.load(threads=2) as load:
        load.tensor("model/w", out)
        load.run()
        p = load.progress()
    assert p.threads == 2 and p.bytes_placed == len(out) and p.bytes_read < len(out) // 32
    assert not out.any()


def test_without_a_mesh(three):
    """Flat ranges of the whole tensor, and one rank alone."""
    flat, alone = np.full(1000, 7, "f4"), np.empty((600,), "f4")
    with three.load(5) as load:
        load.tensor("model/w", flat, shape=(2000, 600), flat=(1199500, 1200500, 1200600))
        load.tensor("model/b", alone, flags=ALONE)
        load.run()
    assert flat[:500].tobytes() == three.arrays["model/w"].reshape(-1)[-500:].tobytes() and (flat[500:] == 7).all()
    assert alone.tobytes() == three.arrays["model/b"].tobytes()


def test_two_loads_side_by_side(three):
    outs, failed = [places(three) for _ in range(4)], []

    def one(out):
        try:
            with three.load() as load:
                for name, array in out.items():
                    load.tensor(name, array)
                load.run()
        except Failed as e:
            failed.append(e)
    threads = [threading.Thread(target=one, args=(out,)) for out in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and all(same(three, out) for out in outs)


# ---- names ----

def test_missing_and_unexpected_names(three):
    out = places(three, ["model/w"])
    with three.load() as load:
        load.tensor("model/w", out["model/w"])
        for name in ("model/y", "model/x", "model/y"):
            load.tensor(name, np.empty(3, "f4"))
        load.expect("model")
        load.expect("nobody")
        refused(EINVAL, r"^run/0: it lacks 2 tensors that are to be loaded: model/x, model/y; it has 1 tensor that is "
                r"not to be loaded: model/b$", load.start)
        assert load.names("missing") == ["model/x", "model/y"] and load.names("unexpected") == ["model/b"]
        refused(EINVAL, "vckpt_load_start comes first", load.wait)
        load.tensor("model/b", np.empty(600, "f4"))     # nothing has begun
        refused(EINVAL, r"^run/0: it lacks 2 tensors that are to be loaded: model/x, model/y$", load.start)
        for i in range(30):
            load.tensor(f"model/z{i:02}", np.empty(3, "f4"))
        refused(EINVAL, r"lacks 32 tensors .* model/y, model/z00.* model/z07 and 22 more$", load.start)
        load.tensor("other/" + "n" * 900, np.empty(3, "f4"))
        refused(EINVAL, r"lacks 33 tensors", load.start)
    with three.load() as load:                          # the list is that of the last start, whatever comes after it
        table = c.POINTER(c.c_char_p)()
        load.tensor("model/y", np.empty(3, "f4"))
        assert load.names("missing") == []
        refused(EINVAL, "lacks 1 tensor ", load.start)
        assert three.api.lib.vckpt_load_missing(load.p, c.byref(table)) == 1
        load.tensors(*[described(f"model/x{i}", out["model/w"][0, :3]) for i in range(200)])
        assert load.names("missing") == ["model/y"] and table[0] == b"model/y"
        refused(EINVAL, "lacks 201 tensors ", load.start)
    with three.load(flags=NOT_STRICT) as load:
        load.tensor("model/w", out["model/w"])
        load.tensor("model/x", np.empty(3, "f4"))
        load.expect("model")
        load.expect("optimizer")
        load.run()
        assert load.names("missing") == ["model/x"] and load.names("unexpected") == ["model/b", "optimizer/none"]
    assert same(three, out)


def test_after_an_error_a_load_holds_what_it_held(three):
    out, bad = places(three), np.full(5, 7, "f4")
    with three.load() as load:
        load.tensor("model/w", out["model/w"])
        refused(EINVAL, "model/b", load.tensors, described("model/x", bad), described("model/b", out["model/b"]),
                described("model/b", bad))
        load.expect("model")
        refused(EINVAL, "^run/0: it has 1 tensor that is not to be loaded: model/b$", load.start)
        assert load.names("missing") == []
        load.tensor("model/b", out["model/b"])
        load.run()
    assert same(three, {name: out[name] for name in ("model/w", "model/b")})


# ---- damage ----

def damage(step, name, item):
    """Flips a bit of that item where it is stored. Where the pack is."""
    data = step.arrays[name].reshape(-1)[item:item + 16].tobytes()
    [(pack, at)] = [(p, at) for p in step.store.glob("packs/*/*.pack") if (at := p.read_bytes().find(data)) >= 0]
    stored = bytearray(pack.read_bytes())
    stored[at] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(stored)
    return pack, lambda: (stored.__setitem__(at, stored[at] ^ 1), pack.write_bytes(stored))


def slices(box):
    return tuple(slice(a, a + n) for a, n in box)


def test_damage_is_named_or_skipped(three, api):  # noqa: F811
    item = 700000
    pack, mend = damage(three, "model/w", item)
    sentence = (rf"^run/0: tensor model/w: piece \d+: pack {re.escape(pack.stem)}, object at offset \d+, block \d+: "
                r"the stored bytes do not match")
    out = places(three)
    with three.load() as load:
        for name, array in out.items():
            load.tensor(name, array)
        load.start()
        for _ in range(2):                              # whoever asks gets the same
            refused(EDAMAGED, sentence, load.wait)
    mesh, out, half = api.mesh("dp=2"), places(three), np.full((1000, 600), 7, "f4")
    with three.load(1, flags=SKIP_DAMAGED) as load:
        for name, array in out.items():
            load.tensor(name, array)
        load.tensor("model/w", half, shape=(2000, 600), mesh=mesh, placements="S(0)")
        load.run()
        lost = sorted(load.lost(), key=lambda one: one[1][0][1], reverse=True)
    assert lost and all(name == "model/w" and code == EDAMAGED and re.search(sentence, why)
                        for name, _, code, why in lost)
    whole = lost[0][1]
    inside = np.zeros((2000, 600), bool)
    inside[slices(whole)] = True
    assert inside.reshape(-1)[item] and inside.sum() * 4 <= 1 << 20     # one piece
    upper = [(max(whole[0][0], 1000), sum(whole[0]) - max(whole[0][0], 1000)), whole[1]]
    assert [box for _, box, _, _ in lost] == [whole] + [upper] * (upper[0][1] > 0)
    w = three.arrays["model/w"]
    assert (out["model/w"].view("u4") == w.view("u4"))[~inside].all()
    assert (half.view("u4") == w[1000:].view("u4"))[~inside[1000:]].all()
    assert same(three, {"model/b": out["model/b"]})
    mend()
    with three.load(flags=SKIP_DAMAGED) as load:
        load.tensor("model/w", out["model/w"])
        load.run()
        assert load.lost() == []
    assert same(three, {"model/w": out["model/w"]})
    api.lib.vckpt_mesh_free(mesh)


def test_of_several_damaged_pieces_the_first_is_named(api, store, rng):  # noqa: F811
    """Whichever thread comes to its piece first."""
    a = noise(rng, (64, 1 << 16))
    save(api, store, {"model/w": a})
    [pack] = [p for p in pathlib.Path(store).glob("packs/*/*.pack") if p.stat().st_size > a.nbytes]
    whole = pack.read_bytes()
    stored, out = bytearray(whole), np.empty_like(a)
    places = [whole.find(a[row, 5:12].tobytes()) for row in (15, 16, 32, 48)]    # 4 MiB from each other, and neighbours
    assert min(places) > 0
    for at in places:
        stored[at] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(stored)
    named = set()
    with Opened(api, store) as step:
        for _ in range(40):
            with step.load(threads=8) as load:
                load.tensor("model/w", out)
                load.start()
                with pytest.raises(Failed) as e:
                    load.wait()
                named.add(int(re.search(r"object at offset (\d+)", e.value.text)[1]))
    assert len(named) == 1 and 0 <= min(places) - named.pop() < 1 << 20
    pack.write_bytes(whole)


def test_a_pack_that_is_gone(three):
    packs = list(three.store.glob("packs/*/*.pack"))
    for pack in packs:
        pack.rename(three.store.parent / pack.name)
    out = places(three)
    with three.load() as load:
        for name, array in out.items():
            load.tensor(name, array)
        load.start()
        refused(-errno.ENOENT, r"^run/0: tensor model/\w: .*pack", load.wait)
    with three.load(flags=SKIP_DAMAGED) as load:
        for name, array in out.items():
            load.tensor(name, array)
        load.run()
        lost = load.lost()
        assert load.progress().bytes_placed == 0
    assert {name for name, *_ in lost} == {"model/w", "model/b"}
    assert sum(int(np.prod([n for _, n in box])) for _, box, _, _ in lost) == 2000 * 600 + 600
    for pack in packs:
        (three.store.parent / pack.name).rename(pack)


# ---- stop, wait, fork ----

def test_a_stop_before_the_start(three):
    out = places(three)
    with three.load() as load:
        load.tensor("model/w", out["model/w"])
        load.stop()
        load.start()
        refused(EABORTED, "stopped", load.wait)
        assert load.progress().over
    with three.load() as load:                          # the step is none the worse
        load.tensor("model/w", out["model/w"])
        load.run()
    assert same(three, {"model/w": out["model/w"]})


def test_stops_and_time_outs(three):
    """Each comes too late now and then, but not every time."""
    aborted = late = 0
    for i in range(200):
        with three.load(threads=1) as load:
            out = places(three, ["model/w"])
            load.tensor("model/w", out["model/w"])
            load.start()
            try:
                load.wait(i % 2)
            except Failed as e:
                assert e.code == -errno.ETIMEDOUT
                late += 1
            load.stop()
            end = bounded(60, lambda load=load: load.wait(-1))
            assert end is None and same(three, out) or end.code == EABORTED
            aborted += end is not None
        if aborted and late:
            return
    raise AssertionError((aborted, late))


def test_a_load_that_is_freed_while_it_reads(three):
    for threads in range(1, 4):
        out = places(three, ["model/w"])
        with three.load(threads=threads) as load:
            load.tensor("model/w", out["model/w"])
            load.start()
        out["model/w"][...] = 3                         # the caller's again
        assert (out["model/w"] == 3).all()
    three.api.lib.vckpt_load_free(None)


def test_a_child_after_a_fork_is_refused(three):
    out = places(three, ["model/w"])
    with three.load() as load:
        load.tensor("model/w", out["model/w"])
        pid = os.fork()
        if pid == 0:
            codes = []
            for work in (load.start, load.wait, lambda: load.expect("model"),
                         lambda: load.tensor("model/w", out["model/w"]), three.load):
                try:
                    work()
                except Failed as e:
                    codes.append(e.code if "fork" in e.text else 0)
            codes.append(load.lib.vckpt_load_progress(load.p, c.byref(LoadProgress(c.sizeof(LoadProgress)))))
            load.stop()
            load.lib.vckpt_load_free(load.p)
            os._exit(0 if codes == [EFORKED] * 6 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        load.run()
    assert same(three, out)


# ---- what is wrong ----

def test_what_is_wrong_is_refused_by_name(three, api):  # noqa: F811
    mesh, b, w = api.mesh("dp=2"), np.empty(600, "f4"), np.empty((2000, 600), "f4")
    with three.load() as load:
        def wrong(pattern, name, array, **fields):
            refused(EINVAL, f"^run/0: tensor {name}: {pattern}", load.tensor, name, array, **fields)
        wrong(r"the step has it as f32 \(600\), and it is to be loaded as f32 \(5\)", "model/b", np.empty(5, "f4"))
        wrong(r"the step has it as f32 \(600\), and it is to be loaded as f64 \(600\)", "model/b", np.empty(600, "f8"))
        wrong(r"the step has it as f32 \(2000,600\), and it is to be loaded as f32 \(\)", "model/w", np.empty((), "f4"))
        wrong("its data is a null pointer", "model/b", b, data=False)
        wrong("its dtype 99 is not known", "model/b", b, dtype=99)
        wrong("flags of the tensor are 0x200", "model/b", b, flags=1 << 9)
        wrong("placements are given, but no mesh", "model/b", b, placements="R")
        wrong(r"the local tensor is \(600\), but rank 0 holds \(300\) of it", "model/b", b, mesh=mesh,
              placements="S(0)", local_shape=(600,))
        wrong(".*dimension", "model/b", b, mesh=mesh, placements="S(1)")
        wrong("boxes exclude placements", "model/b", b, boxes=[[(0, 600)]], mesh=mesh, placements="R")
        wrong(".*box", "model/b", b, boxes=[[(1, 600)]])
        wrong(".*overlap", "model/b", b, boxes=[[(0, 300)], [(299, 301)]])
        wrong("one rank alone", "model/b", b, mesh=mesh, flags=ALONE)
        wrong(".*flat|.*range|.*past", "model/b", b, flat=(0, 900, 0))
        wrong(r"the stride in dimension 0 is negative \(-4\)", "model/b", b, strides=(-4,))
        wrong("with a stride of 2 bytes in dimension 0 items would overlap", "model/b", b, strides=(2,))
        wrong("with a stride of 0 bytes in dimension 0", "model/w", w, strides=(0, 4))
        wrong("2 strides for a local tensor of 1 dimension", "model/b", np.empty((2, 300), "f4"), shape=(600,),
              strides=(1200, 4))
        nameless = described("model/b", b)
        nameless.name = None
        refused(EINVAL, "needs a component and a name", load.tensors, nameless)
        load.run()                                      # nothing was declared
        assert load.progress().bytes_wanted == 0
        for work in (load.start, lambda: load.expect("model"), lambda: load.tensor("model/b", b)):
            refused(EINVAL, "has begun to read", work)
    api.lib.vckpt_mesh_free(mesh)


SIZE = c.sizeof(LoadOptions)


def test_wrong_handles_and_options(three, api):  # noqa: F811
    p, lib = c.c_void_p(), api.lib
    for pattern, options in (("size", LoadOptions(8, 0, 0, 0, 0)), ("flags", LoadOptions(SIZE, 0, 0, 32, 0)),
                             ("300 threads", LoadOptions(SIZE, 0, 300, 0, 0))):
        refused(EINVAL, pattern, api.call, "vckpt_load_begin", three.p, c.byref(options), c.byref(p))
    refused(EINVAL, "no step", api.call, "vckpt_load_begin", None, None, c.byref(p))
    refused(EINVAL, "no place", api.call, "vckpt_load_begin", three.p, None, None)
    refused(EINVAL, "no load", api.call, "vckpt_load_tensors", None, None, c.c_size_t(0))
    refused(EINVAL, "no load", api.call, "vckpt_load_start", None)
    refused(EINVAL, "no load", api.call, "vckpt_load_expect", None, b"model")
    refused(EINVAL, "no load", api.call, "vckpt_load_wait", None, c.c_int64(0))
    assert lib.vckpt_load_progress(None, c.byref(LoadProgress())) == EINVAL
    lib.vckpt_load_stop(None)
    with three.load() as load:
        assert lib.vckpt_load_progress(load.p, c.byref(LoadProgress())) == EINVAL          # no size
        assert lib.vckpt_load_progress(load.p, None) == lib.vckpt_load_lost(load.p, c.c_size_t(0), None) == EINVAL
        refused(EINVAL, "no tensors", api.call, "vckpt_load_tensors", load.p, None, c.c_size_t(1))
        refused(EINVAL, "no component", api.call, "vckpt_load_expect", load.p, None)
    api.call("vckpt_load_begin", three.p, None, c.byref(p))            # no options: rank 0
    api.call("vckpt_load_start", p)
    api.call("vckpt_load_wait", p, c.c_int64(-1))
    lib.vckpt_load_free(p)


@pytest.mark.parametrize("env, world, ranks", [({}, 8, 1), ({"LOCAL_WORLD_SIZE": "2"}, 8, 2),
                                               ({"LOCAL_WORLD_SIZE": "2"}, 0, 1),
                                               ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1000"}, 4096, 1000)])
def test_ranks_of_a_node_share_its_processors(api, store, env, world, ranks, monkeypatch):  # noqa: F811
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    cpus, out = len(os.sched_getaffinity(0)), np.zeros(8 << 20, "u8")
    save(api, store, {"model/w": np.arange(8 << 20, dtype="u8")})
    with Opened(api, store) as step, step.load(threads=0, world=world) as load:
        load.tensor("model/w", out)
        load.run()
        assert load.progress().threads == min(max(cpus // ranks, 1), 16)        # 16 tasks of 4 MiB
