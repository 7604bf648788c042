# SPDX-License-Identifier: Apache-2.0
"""Many names and many steps."""
import os
import subprocess
import time

import numpy as np

from .conftest import Tensor, small_source, write_safetensors


def many(path, n):
    rng = np.random.default_rng(0)
    data = rng.bytes(16 * n)
    write_safetensors(path,
                      {f"layers.{i // 100}.block.{i % 100}.weight": Tensor("F32", (2, 2), data[16 * i:16 * i + 16])
                       for i in range(n)})
    return path


def test_a_directory_of_many_tensors(mount, store, vckpt, tmp_path, scale):
    n = scale(10_000, 100_000)
    vckpt("import", store, "a/1", many(tmp_path / "many/model.safetensors", n))
    m = mount(store)
    folder = m / "a" / "latest" / "model"
    for _ in range(2):
        with os.scandir(folder) as entries:
            inodes = {e.name: e.inode() for e in entries}
        assert len(inodes) == n and len(set(inodes.values())) == n
    start = time.monotonic()
    out = subprocess.run(["find", f"{folder}/", "-ls"], check=True, capture_output=True, text=True).stdout
    first = time.monotonic() - start
    # the kernel may drop its cached listing, or names, when memory is short or another test drops its caches
    for _ in range(5):
        before = m.stats()
        start = time.monotonic()
        assert subprocess.run(["find", f"{folder}/", "-ls"], check=True, capture_output=True, text=True).stdout == out
        second = time.monotonic() - start
        after = m.stats()
        asked = {op: after[f'vckpt_requests_total{{op="{op}"}}'] - before[f'vckpt_requests_total{{op="{op}"}}']
                 for op in ("readdirplus", "lookup")}
        if not asked["readdirplus"] and asked["lookup"] <= 8:
            break
    print(f"find -ls of {n}: {first * 1000:.0f} ms, then {second * 1000:.0f} ms")
    assert out.count("\n") == n + 1
    assert asked["lookup"] <= 8
    assert not asked["readdirplus"]
    # a directory read in parts, from anywhere
    names = sorted(inodes)
    for i in range(0, n, n // 50):
        assert os.stat(folder / names[i]).st_ino == inodes[names[i]]
        assert (folder / names[i]).stat().st_size == 4096 + 16
    assert (m / "a" / "latest" / "model.safetensors").read_bytes() == (tmp_path / "many/model.safetensors").read_bytes()


def test_many_steps(mount, store, vckpt, tmp_path, scale):
    n = scale(70, 1000)  # past a snapshot of the list
    for i in range(n):
        vckpt("import", store, f"a/{i}", small_source(tmp_path / "s/model.safetensors", i % 7))
    m = mount(store)
    want = sorted([f"step-{i:08}" for i in range(n)] + ["latest"])
    assert sorted(os.listdir(m / "a")) == want
    assert m.stats()["vckpt_steps_opened_total"] == 0, "listing a run opens no step"
    assert len(subprocess.run(["ls", "-l", m / "a"], check=True, capture_output=True,
                              text=True).stdout.splitlines()) == n + 2
    assert m.stats()["vckpt_steps_opened_total"] == 0
    assert m.stats()["vckpt_resident_bytes"] < 64 << 20
