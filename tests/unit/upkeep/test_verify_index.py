# SPDX-License-Identifier: Apache-2.0
"""Faults by place (core/upkeep/verify_index.c): the right ones, without a look at all of them; and verify with many."""
import collections
import ctypes as c
import json
import random

import numpy
import pytest
from safetensors.numpy import save_file

FOUND = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_size_t)


class Index(c.Structure):
    _fields_ = [("places", c.c_void_p), ("n", c.c_size_t), ("looked", c.c_uint64)]


def add(lib, x, file, offset, length, number):
    assert lib.verify_index_add(c.byref(x), file, c.c_uint64(offset), c.c_uint64(length), c.c_size_t(number)) == 0


def found(lib, x, file, begin, end):
    out = []
    f = FOUND(lambda _, number: out.append(number) or 0)
    assert lib.verify_index_range(c.byref(x), file, c.c_uint64(begin), c.c_uint64(end), f, None) == 0
    return sorted(out)


@pytest.mark.parametrize("seed", range(3))
def test_the_right_ones(lib, seed):
    rng, x, all_ = random.Random(seed), Index(), []
    for number in range(300):
        file, offset = rng.choice([b"a", b"b"]), rng.randrange(1000)
        all_.append((file, offset, rng.choice([0, 1, 1, 7, 500])))
        add(lib, x, *all_[-1], number)
        for _ in range(5):
            file, begin, length = rng.choice([b"a", b"b", b"c"]), rng.randrange(1100), rng.randrange(50)
            want = [i for i, (f, o, n) in enumerate(all_) if n and f == file and o < begin + length and begin < o + n]
            assert found(lib, x, file, begin, begin + length) == want, (begin, length, all_)
        out = []
        assert lib.verify_index_whole(c.byref(x), b"a", FOUND(lambda _, n: out.append(n) or 0), None) == 0
        assert sorted(out) == [i for i, (f, _, n) in enumerate(all_) if f == b"a" and n == 0]
    assert lib.verify_index_whole(c.byref(x), b"a", FOUND(lambda _, n: 7), None) == 7
    lib.verify_index_release(c.byref(x))


def test_few_are_looked_at(lib):
    """Also where whole files are at fault, and one fault is long and comes last: 300 for each question, of 20,000."""
    x, n = Index(), 20000
    for i in range(n):
        add(lib, x, b"f%d" % (i % 3), i * 64, 60, i)
    add(lib, x, b"f0", 0, 0, n)
    add(lib, x, b"f0", n * 64, 1 << 40, n + 1)
    for i in range(0, n, 10):
        assert found(lib, x, b"f%d" % (i % 3), i * 64, i * 64 + 64) == [i]
    assert x.looked < n // 10 * 300, x.looked
    lib.verify_index_release(c.byref(x))


def test_each_fault_with_its_tensors(vckpt, store, tmp_path):
    """2,000 pieces, each with a fault of its own, in a pack that two steps share: each is told of its tensor, in
    both."""
    n, rng = 2000, numpy.random.default_rng(1)
    save_file({f"t{i:04}": rng.integers(0, 1 << 62, 16, "i8") for i in range(n)}, tmp_path / "x.safetensors")
    for step in range(2):
        vckpt("import", store, f"r/{step}", tmp_path / "x.safetensors", "-q")
    for pack in store.rglob("*-model.pack"):
        data = bytearray(pack.read_bytes())
        at = 4096
        while at < len(data) * 6 // 10:
            data[at] ^= 1
            at += 60
        pack.chmod(0o600)
        pack.write_bytes(data)
    damage = json.loads(vckpt("verify", store, "--json", check=False).stdout)["damage"]
    told = collections.Counter((d["file"], d["offset"]) for d in damage)
    assert len(told) > n // 2 and set(told.values()) == {2}
    assert {d["step"] for d in damage} == {0, 1} and len({d["tensor"] for d in damage}) == len(told)
    one = json.loads(vckpt("verify", store, "r/1", "--json", "--no-notes", check=False).stdout)
    assert {d["tensor"] for d in one["damage"]} == {d["tensor"] for d in damage}
    (note,) = (store / "damaged").iterdir()
    assert f"/{note.name}.pack" in damage[0]["file"]
