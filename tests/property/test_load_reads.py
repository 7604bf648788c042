# SPDX-License-Identifier: Apache-2.0
"""What a load of a small training state reads: of a transformer's weights and the two moments of AdamW, saved under one
layout and loaded under another. Needed are the stored blocks that hold what a rank wants (placelib.py); read is at most
1.05 times as much where a rank wants more than a task's bytes, 1.3 times in small loads; and neighbours share a
request."""
import itertools
import pathlib

import numpy as np
import pytest

from loadlib import REHASH, Opened
from placelib import HEAD_BYTES, Account, Step
from saverlib import Failed, api, ranks, store  # noqa: F401 (fixtures)
from test_verify import objects_of, replace_byte

LAYOUTS = [("whole", 1), ("fsdp", 2), ("fsdp", 8), ("tp", 2), ("tp", 3), ("tp", 8)]
TASK_BYTES = 4 << 20    # FILL_TASK_BYTES of core/load/fill/fill_work.h
IO = pathlib.Path("/proc/self/io")


def transformer(hidden, layers, vocabulary):
    yield "embed", (vocabulary, hidden)
    yield "pos", (2 * hidden, hidden)
    for i in range(layers):
        for name in ("q", "k", "v", "o"):
            yield f"{i}.{name}", (hidden, hidden)
        yield f"{i}.up", (4 * hidden, hidden)
        yield f"{i}.down", (hidden, 4 * hidden)
        for name in ("qb", "ob", "upb", "downb", "norm1", "norm2"):
            yield f"{i}.{name}", (4 * hidden if name == "upb" else hidden,)


def adamw(rng, dtype, *sizes):
    """bf16 (as u2) is stored encoded, u4 noise raw."""
    def items(shape):
        if dtype == "u4":
            return rng.integers(1 << 32, size=shape, dtype="u4")
        return ((.02 * rng.standard_normal(shape, "f4")).view("u4") >> 16).astype("u2")
    return {f"{component}{name}": items(shape) for name, shape in transformer(*sizes)
            for component in ("model/", "optimizer/m.", "optimizer/v.")}


def placement(layout, name, shape):
    if layout == "fsdp":
        return "S(0)"
    if layout == "whole" or len(shape) == 1:
        return "R"
    return "S(1)" if name.endswith((".o", ".down")) else "S(0)"


def box(layout, world, rank, name, shape):
    place, found = placement(layout, name, shape), [slice(0, n) for n in shape]
    if place != "R":
        d = int(place[2])
        size = -(-shape[d] // world)
        found[d] = slice(min(size * rank, shape[d]), min(size * (rank + 1), shape[d]))
    return tuple(found)


def save(api, store, run, state, layout, world):  # noqa: F811
    mesh = api.mesh(f"x={world}")

    def work(rank, saver):
        held = {name: (np.ascontiguousarray(a[box(layout, world, rank, name, a.shape)]),
                       {"shape": a.shape, "placements": placement(layout, name, a.shape), "mesh": mesh})
                for name, a in state.items()}
        saved = saver.save(held, step=0)
        saved.committed()
        saved.free()
    assert ranks(api, store, run, world, work, launch=run) == [None] * world


def requests():
    return int(IO.read_text().split("syscr: ")[1].split()[0])


class Loaded:
    """A load by one rank, twice: the second one finds packs and tables opened."""

    def __init__(self, api, step, state, layout, world, rank, flags=0):  # noqa: F811
        mesh, self.masks = api.mesh(f"x={world}"), {}
        for _ in range(2):
            with step.load(rank, threads=1, flags=flags) as load:
                arrays = {}
                for name, a in state.items():
                    arrays[name] = np.zeros_like(a[box(layout, world, rank, name, a.shape)], order="C")
                    load.tensor(name, arrays[name], shape=a.shape, placements=placement(layout, name, a.shape),
                                mesh=mesh)
                before = requests()
                load.run()
                self.requests = requests() - before
                self.progress = load.progress()
        for name, a in state.items():
            at = box(layout, world, rank, name, a.shape)
            assert np.array_equal(arrays[name], a[at])
            self.masks[name] = np.zeros(a.shape, bool)
            self.masks[name][at] = True


@pytest.mark.skipif(not IO.exists(), reason="the kernel does not count what a process reads")
@pytest.mark.parametrize("dtype, sizes, each", [("u4", (64, 1, 1024), 5), ("u2", (64, 1, 1024), 5),
                                                ("u4", (256, 2, 4096), 40)])
def test_what_is_read_is_what_is_needed(api, store, rng, scale, dtype, sizes, each):  # noqa: F811
    """each: so many requests for each pack of which something is wanted, on average."""
    state = adamw(np.random.default_rng(rng.getrandbits(64)), dtype, *sizes)
    asked = packs = 0
    for saved, loaded in scale([(("whole", 1), ("tp", 8)), (("fsdp", 8), ("whole", 1)), (("tp", 3), ("fsdp", 2))],
                               list(itertools.permutations(LAYOUTS, 2))):
        run = f"{saved[0]}{saved[1]}"
        if not (pathlib.Path(store) / "runs" / run).exists():
            save(api, store, run, state, *saved)
        places = Step(store, run, 0)
        with Opened(api, store, run=run) as step:
            for rank in (0, loaded[1] - 1):
                done = Loaded(api, step, state, *loaded, rank)
                account, read = Account(places, done.masks), done.progress.bytes_read
                most = 1.05 if done.progress.bytes_wanted > TASK_BYTES else 1.3
                assert account.stored <= read <= most * account.stored, (saved, loaded, rank, read, account.stored)
                assert read <= account.bound + account.packs * HEAD_BYTES
                asked, packs = asked + done.requests, packs + account.packs
    print(f"{asked} requests of {packs} packs")
    assert asked <= each * packs


@pytest.mark.skipif(not IO.exists(), reason="the kernel does not count what a process reads")
@pytest.mark.parametrize("dtype, layout, most", [("u4", ("whole", 1), 1), ("u2", ("whole", 1), 1),
                                                 ("u4", ("tp", 3), 2)])
def test_pieces_that_are_hashed_are_read_together(api, lib, store, rng, dtype, layout, most):  # noqa: F811
    """A load that compares SHA-256 asks for whole pieces, and for no more of them at a time. One that is wrong, with
    checks that are right, is named."""
    state = adamw(np.random.default_rng(rng.getrandbits(64)), dtype, 64, 1, 1024)
    save(api, store, "run", state, "whole", 1)
    with Opened(api, store, run="run") as step:
        plain, hashed = (Loaded(api, step, state, *layout, 0, flags).requests for flags in (0, REHASH))
        assert hashed <= most * plain + 2, (plain, hashed)
    pack = next(pathlib.Path(store).rglob("*-model.pack"))
    for one in objects_of(pack)[-1:]:           # of bf16 all are encoded
        at = rng.randrange(one[3])
        replace_byte(lib, pack, one, at)
        with Opened(api, store, run="run") as step, \
                pytest.raises(Failed, match="piece [0-9]+: .*: its bytes are not those of its digest"):
            Loaded(api, step, state, "whole", 1, 0, REHASH)
        replace_byte(lib, pack, one, at)


@pytest.mark.skipif(not IO.exists(), reason="the kernel does not count what a process reads")
def test_one_tensor_after_another(api, store, rng):  # noqa: F811
    """Reads of whole tensors, as through a mount: none reads what lies between it and its checks."""
    generator = np.random.default_rng(rng.getrandbits(64))
    state = {f"model/{i}": generator.integers(1 << 32, size=64, dtype="u4") for i in range(300)}
    save(api, store, "run", state, "whole", 1)
    before = int(IO.read_text().split()[1])
    read = api.read(store, "run")
    more = int(IO.read_text().split()[1]) - before
    assert all(np.array_equal(read[name], a) for name, a in state.items())
    assert more < 300 << 10         # 75 KiB of data, the step's tables, a page at the end
