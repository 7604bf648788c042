# SPDX-License-Identifier: Apache-2.0
"""vckpt diff and show on stores that were put together by hand: other grids, long pieces, boxes, digests that lie."""
import json

import numpy as np
import pytest

from protolib import Params
from test_load_boxes import SMALL, Step, T, proto  # noqa: F401 (proto is a fixture)

LONG = Params(4 << 20, 4 << 20, 256)


def diff(vckpt, store, *args):
    done = vckpt("diff", store, "r/1", "r/2", "--json", *args, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)["differences"]


def tensors(held, change=False, shape=(130, 90)):
    t = T("w", "f4", shape, held, seed=3)
    t.array = np.random.default_rng(3).standard_normal(t.shape).astype("f4")
    if change:
        t.array[120, 80] += 4
    return [t]


@pytest.mark.parametrize("params", [SMALL, LONG], ids=["small", "long"])
def test_other_grids(vckpt, proto, tmp_path, params):  # noqa: F811
    """Pieces of 1 KiB, or of more than what is compared at once, against those of another grid."""
    store, shape = tmp_path / "s", (130, 90) if params is SMALL else (1300, 900)
    store.mkdir()
    vckpt("init", store)
    Step(proto, store, tensors({0: None}, shape=shape), 1, params=Params(128 << 10, 1 << 20, 256), step=1)
    Step(proto, store, tensors({0: None}, shape=shape), 1, params=params, step=2, attempt=b"0123456789abcdef-2")
    assert diff(vckpt, store) == [] == diff(vckpt, store, "--values")
    Step(proto, store, tensors({0: None}, True, shape), 1, params=params, step=3, attempt=b"0123456789abcdef-3")
    for a in "r/1", "r/2":
        done = vckpt("diff", store, a, "r/3", "--json", "--values", check=False)
        (found,) = json.loads(done.stdout)["differences"]
        assert found["changed"] == 1 and found["max"] == pytest.approx(4, rel=1e-6)
    w = tensors({}, shape=shape)[0].array
    shown, = vckpt.json("show", store, "r/2/model/w")["tensors"]
    assert shown["values"] == w.size and shown["max"] == w.max() and shown["mean"] == pytest.approx(
        w.mean(dtype="f8"), rel=1e-9)


class Lying(Step):
    """Its digests are wrong from byte 8 on: the checks of blocks, which go by what is before, hold."""

    def piece(self, data, r):
        p = super().piece(data, r)
        if len(data) > 64:              # shorter ones are in the row, and compared there
            p.digest = bytes(p.digest[:20]) + bytes([p.digest[20] ^ 1]) + bytes(p.digest[21:])
        return p


def test_digests_that_lie(vckpt, proto, tmp_path):  # noqa: F811
    """Equal bytes under other digests: different, as the digests say, until bytes are read."""
    store = tmp_path / "s"
    store.mkdir()
    vckpt("init", store)
    Step(proto, store, tensors({0: None}), 1, step=1)
    Lying(proto, store, tensors({0: None}), 1, step=2, attempt=b"0123456789abcdef-2")
    assert [d["change"] for d in diff(vckpt, store)] == ["changed"]
    done = vckpt("diff", store, "r/1", "r/2", "--values", check=False)
    assert done.returncode == 3 and "and the same bytes: one of the two digests is wrong" in done.stderr
    assert "r/1: tensor model/w: piece 0 " in done.stderr and not done.stdout
    assert vckpt("verify", store, "--no-notes", check=False).returncode == 3
