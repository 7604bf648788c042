# SPDX-License-Identifier: Apache-2.0
"""Forged steps whose boxes have as many items as the tensor, but some twice and others not at all; and every rank's
boxes have bytes of their own, so that what is read tells whose box it came from. Whoever decides whether boxes cover a
tensor agrees with an array of counts: the commit's check, opening a tensor, a load of a part of it, ranks that share
what they read. What is read is what a look at the boxes says, whichever way it is read."""
import ctypes as c

import numpy as np
import pytest
from safetensors.numpy import save_file

import coverlib
from commlib import together
from exchangelib import ALWAYS, Ranks
from forgelib import LAYOUT, Forge, Message
from loadlib import Load, described, target
from protolib import EFORMAT, Params
from saverlib import Failed as LoadFailed, Vckpt
from test_api_step import Failed as StepFailed, Opened, v  # noqa: F401 (v is a fixture)
from test_load_boxes import SMALL, Step, T, api, cache, check_box, opened, proto, whole  # noqa: F401 (fixtures)
from test_save_load import Failed, Store, call

WORLD = 4
PARAMS = [SMALL, Params(16, 32, 8), Params(64, 128, 64), Params(1, 2, 1), Params(512, 512, 256),
          Params(256, 1024, 64, 48), Params(1, 2, 1, 1), Params(512, 512, 8, 16)]


class Own(T):
    """Items have their own number, and in a rank's box that of the rank as well."""

    def __init__(self, name, shape, held):
        super().__init__(name, "u2", shape, held)
        self.numbers = np.arange(self.array.size, dtype="u2").reshape(shape)
        assert self.array.size < 4096
        self.array = self.numbers

    def of(self, rank):
        return self.numbers + np.uint16(4096 * (rank + 1))


class Forged(Step):
    def rows(self, rank, layout, tensors):
        for t in tensors:
            t.array = np.ascontiguousarray(t.of(rank))
        return super().rows(rank, layout, tensors)


def slices(box):
    return tuple(slice(o, o + n) for o, n in box)


def meets(a, b):
    return all(x < y + m and y < x + n for (x, n), (y, m) in zip(a, b))


def said(t, window):
    """What the boxes say of a window, or None: some item is in none of them, or in several. Of equal boxes the lowest
    rank's counts; and where the lowest rank that has something of it has all of the tensor, nobody else is asked."""
    values, counts, seen = np.zeros(t.shape, "u2"), np.zeros(t.shape, int), set()
    for rank in sorted(t.held):
        boxes = [box for box in t.held[rank] or [whole(t.shape)] if meets(box, window)]
        if boxes and not seen and t.held[rank] is None:
            return t.of(rank)[slices(window)]
        for box in boxes:
            if tuple(box) not in seen:
                counts[slices(box)] += 1
                values[slices(box)] = t.of(rank)[slices(box)]
            seen.add(tuple(box))
    return values[slices(window)] if (counts[slices(window)] == 1).all() else None


def forged(rng, name):
    """A tensor whose boxes are a cover or nearly one, some of them held by several ranks."""
    shape = coverlib.some_shape(rng, (1, 2, 2, 3, 3))
    boxes = coverlib.cover(rng, shape, rng.randint(2, 7))
    if rng.random() < .85:
        boxes = coverlib.near(rng, shape, boxes)
    held = {}
    for box in boxes:
        for rank in rng.sample(range(WORLD), rng.choice([1, 1, 1, 2])):
            held.setdefault(rank, []).append(list(zip(*box)))
    return Own(name, shape, {rank: None if b == [whole(shape)] else b for rank, b in held.items()})


def windows(rng, t, n):
    yield whole(t.shape)
    for _ in range(n):
        yield [(a := rng.randrange(m), rng.randint(1, m - a)) for m in t.shape]


def check_open(s, t, cache, rng):  # noqa: F811
    """All ways of the mount: ranges and boxes, out of the cache."""
    want = said(t, whole(t.shape))
    if want is None:
        with pytest.raises(Failed, match=f"tensor model/{t.name}: ") as e:
            s.tensor("model", t.name)
        assert e.value.code == EFORMAT
        return False
    o, t.array = s.tensor("model", t.name), np.ascontiguousarray(want)
    assert o.read(cache) == t.bytes, (t.shape, t.held)
    for _ in range(6):
        a = rng.randrange(len(t.bytes))
        n = rng.randint(1, len(t.bytes) - a)
        assert o.read(cache, a, n) == t.bytes[a:a + n], (t.shape, t.held, a, n)
        check_box(o, t, cache, rng)
    o.close()
    return True


def check_load(step, t, rng):
    """The boxes that are wanted decide, and no others. Returns how many loads were refused."""
    bad = 0
    for window in windows(rng, t, 5):
        want, out = said(t, window), np.full([n for _, n in window], 7, "u2")
        if want is not None:
            step.read(step.find(t.name), window, out)
            assert (out == want).all(), (t.shape, t.held, window)
            continue
        with pytest.raises(StepFailed, match=f"tensor model/{t.name}: ") as e:
            step.read(step.find(t.name), window, out)
        assert e.value.code == EFORMAT
        bad += 1
    return bad


@pytest.mark.parametrize("part", range(3))
def test_what_is_read_of_near_covers(v, proto, opened, tmp_path, cache, rng, part, scale):  # noqa: F811
    tensors = [forged(rng, f"t{i}") for i in range(scale(60, 600))]
    Forged(proto, tmp_path / "s", tensors, WORLD, rng.choice(PARAMS))
    s = opened()
    good = sum(check_open(s, t, cache, rng) for t in tensors)
    with Opened(v, tmp_path / "s") as step:
        bad = sum(check_load(step, t, rng) for t in tensors)
    assert good > len(tensors) // 6 and len(tensors) - good > len(tensors) // 6 and bad > len(tensors) // 3


def committed(t):
    """Whether a commit takes it: equal boxes with equal bytes, and the others disjoint. Replicas here differ."""
    boxes = [(rank, tuple(box)) for rank, held in t.held.items() for box in held or [whole(t.shape)]]
    owner = {}
    return (all(owner.setdefault(box, rank) == rank for rank, box in boxes) and
            (coverlib.paint(t.shape, [tuple(zip(*box)) for box in owner]) == 1).all())


def test_the_check_of_a_commit(api, proto, tmp_path, rng, scale):  # noqa: F811
    """A step a tensor, since the first one that is wrong ends it."""
    told = {True: 0, False: 0}
    for i in range(scale(20, 600)):
        t, n = forged(rng, "w"), c.c_uint64()
        Forged(proto, tmp_path / f"{i}", [t], WORLD, rng.choice(PARAMS))
        store = Store(api, tmp_path / f"{i}")
        s, good = store.open("r", 1), committed(t)
        check = (api.check_manifest_cover, store.handle, c.c_void_p(api.load_step_manifest(s.handle)), c.byref(n))
        if good:
            assert call(*check) == 0 and n.value == 1, (t.shape, t.held)
        else:
            with pytest.raises(Failed, match='tensor "w"') as e:
                call(*check)
            assert e.value.code == EFORMAT, (t.shape, t.held)
        told[good] += 1
        s.close()
        store.close()
    assert min(told.values()) > 0, told


# ---- ranks that share ----

class Run(Opened):
    """As loadlib has it, of run "r"."""

    def __init__(self, api, path):  # noqa: F811
        self.api, self.p = api, c.c_void_p()
        api.call("vckpt_step_open", str(path).encode(), b"r", c.c_uint64(1), c.byref(self.p))

    def __exit__(self, *_):
        self.api.lib.vckpt_step_close(self.p)


def shared(ranks, path, wants):
    """What each rank got of its windows, [(tensor, window)]; or the exception."""
    def work(rank):
        out = [np.full([n for _, n in window], 7, "u2") for _, window in wants[rank]]
        with Run(ranks.api, path) as step, Load(step, rank, 2, 0, len(wants), ranks.comms[rank], ALWAYS) as load:
            load.targets(*[target(described(f"mine/{i}", o), f"model/{t.name}", window)
                           for i, (o, (t, window)) in enumerate(zip(out, wants[rank]))])
            load.run()
        return out
    return together(len(wants), work)


def test_ranks_that_share_near_covers(build, proto, tmp_path, rng, scale):  # noqa: F811
    """The windows of all ranks are right, or the load is an error at each of them."""
    vckpt, told = Vckpt(build), {True: 0, False: 0}
    tensors = [forged(rng, f"t{i}") for i in range(30)]
    Forged(proto, tmp_path / "s", tensors, WORLD, rng.choice(PARAMS))
    fine = [(t, w) for t in tensors for w in windows(rng, t, 4) if said(t, w) is not None]
    broken = [(t, w) for t in tensors for w in windows(rng, t, 4) if said(t, w) is None]
    for n in range(scale(8, 100)):
        wants = [rng.sample(fine, min(len(fine), 12)) for _ in range(3)]
        good = n > 0 if n < 2 else rng.random() < .6        # of both some, whatever the seed
        if not good:
            wants[rng.randrange(3)].append(rng.choice(broken))
        with Ranks(vckpt, 3, "functions") as ranks:
            out = shared(ranks, tmp_path / "s", wants)
        for rank, got in enumerate(out):
            if not good:
                assert isinstance(got, LoadFailed) and got.code == EFORMAT and "tensor model/t" in got.text, got
                continue
            assert isinstance(got, list), got
            for array, (t, window) in zip(got, wants[rank]):
                assert (array == said(t, window)).all(), (t.shape, t.held, window)
        told[good] += 1
    assert min(told.values()) > 0, told


# ---- grids ----

@pytest.mark.parametrize("field, value", [(3, (1 << 20) + 1), (4, 1 << 62), (5, (1 << 19) + 1),
                                         (12, (128 << 10) + 1), (12, 0)])
def test_a_grid_that_the_format_does_not_have(v, lib, vckpt, store, tmp_path, field, value):  # noqa: F811
    """No step of such a layout is opened, whoever opens it."""
    save_file({"w": np.arange(60000, dtype="f4").reshape(200, 300)}, tmp_path / "w.safetensors")
    vckpt("import", store, "r/1", tmp_path / "w.safetensors", "-q", "--no-index")
    forge = Forge(lib, store, "r")
    layout = Message(bytes(forge.object(LAYOUT)))
    assert [layout.get(n) for n in (3, 4, 5, 12)] == [128 << 10, 1 << 20, 256, 32 << 10]
    layout.set(field, value)
    next(item for item in forge.objects if item[0] == LAYOUT)[1] = bytearray(layout.encode())
    forge.done(tmp_path / "scratch")
    for command in (["cat", store, "r/1/model/w.npy"], ["export", store, "r/1", tmp_path / "out"],
                    ["info", store, "r/1"], ["verify", store]):
        done = vckpt(*command, check=False)
        assert done.returncode in (1, 3) and "layout" in done.stdout + done.stderr, (command, done)
    with pytest.raises(StepFailed) as e:
        Opened(v, store, "r", 1)
    assert e.value.code == EFORMAT, e.value.text
