# SPDX-License-Identifier: Apache-2.0
"""Ranks that load at the same time share what they read: every byte is right at every rank, each stored byte is read
once, and an error of one is an error of all."""
import pathlib

import numpy as np
import pytest

from commlib import good
from exchangelib import ALWAYS, Ranks
from loadlib import REHASH
from saverlib import api, store  # noqa: F401 (fixtures)
from test_api_load import noise, save

KINDS = pytest.mark.parametrize("kind", ["shared", "functions"])


def weights(rng, shape):
    """Values whose bytes encode."""
    generator = np.random.default_rng(rng.getrandbits(64))
    return ((generator.standard_normal(shape, "f4") * .02).view("u4") >> 16).astype("u2")


@pytest.fixture
def step(api, store, rng):  # noqa: F811
    """Tensors of many pieces, of one, of a few bytes, of zeros; raw and encoded."""
    arrays = {"model/raw": noise(rng, (900, 2100)), "model/encoded": weights(rng, (2000, 1500)),
              "model/bias": noise(rng, (301,)), "model/scalar": noise(rng, ()),
              "model/some": weights(rng, (70, 40, 33)), "model/zeros": np.zeros((1500, 1000), "f4"),
              "optimizer/none": noise(rng, (0, 3))}
    save(api, store, arrays)
    return arrays


def whole(arrays, out):
    """A declare() for replicas."""
    def declare(rank, load):
        out[rank] = {name: np.full_like(a, 7) for name, a in arrays.items()}
        for name, array in out[rank].items():
            load.tensor(name, array)
    return declare


def stored_bytes(store):
    """All objects of the model's packs."""
    return sum(p.stat().st_size for p in pathlib.Path(store).glob("packs/*/*-model.pack"))


def reads():
    """System calls of this process that read."""
    return int(next(line for line in pathlib.Path("/proc/self/io").read_text().splitlines() if line.startswith("syscr"))
               .split()[1])


def test_owners_read_neighbours_at_once(api, store, rng):  # noqa: F811
    """Small tensors that follow each other in a pack are not read one by one."""
    arrays = {f"model/{i:03}": noise(rng, (80, 80)) for i in range(300)}
    save(api, store, arrays)
    out = [None] * 2
    with Ranks(api, 2, "functions") as ranks:
        before = reads()
        good(ranks.run(store, whole(arrays, out)))
        assert reads() - before < 150
    for name, array in arrays.items():
        assert out[0][name].tobytes() == out[1][name].tobytes() == array.tobytes()


@KINDS
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_read_once(api, store, step, kind, size):  # noqa: F811
    out = [None] * size
    with Ranks(api, size, kind) as ranks:
        for flags in (0, REHASH):
            found = good(ranks.run(store, whole(step, out), flags=flags,
                                   after=lambda rank, load: (load.progress(), load.exchanged())))
            for rank in range(size):
                for name, array in step.items():
                    assert out[rank][name].tobytes() == array.tobytes(), (rank, name)
            progress, exchanged = zip(*found)
            assert sum(p.bytes_read for p in progress) <= 1.05 * stored_bytes(store)
            assert all(p.bytes_placed == p.bytes_wanted and p.over for p in progress)
            read = [p.bytes_read for p in progress]
            assert max(read) - min(read) < 3 << 20
            for x in exchanged:
                assert (x.chosen, x.ranks) == (ALWAYS, size) and x.why.startswith(b"shared, as the caller asked")
                assert x.bytes_wanted == size * x.bytes_shared
                assert x.bytes_sent + x.bytes_got == x.bytes_shared
