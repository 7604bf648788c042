# SPDX-License-Identifier: Apache-2.0
"""Mapped pages touched from many threads at random while others read from end to end: no wrong byte, no thread
left waiting."""
import json
import os
import subprocess

import numpy as np
import pytest

from .conftest import Tensor, weights, write_safetensors


@pytest.fixture(scope="module")
def big(vckpt, request, tmp_path_factory):
    """A store with a file that is many times the size of the cache below, and the same file."""
    folder, rng = tmp_path_factory.mktemp("big"), np.random.default_rng(3)
    size = (256 if request.config.getoption("--full") else 48) << 20
    source = folder / "big/model.safetensors"
    write_safetensors(source, {"w0": Tensor("BF16", (size // 4096, 1024), weights(rng, size // 4)),
                               "w1": Tensor("U8", (size // 2,), rng.bytes(size // 2))})
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", source)
    return folder / "store", source


@pytest.mark.parametrize("tier", ["cached", pytest.param("auto", marks=pytest.mark.full)])
def test_64_threads_fault_pages_while_16_read(mount, big, build, scale, record_property, tier):
    store, same = big
    m = mount(store, "cache=16M", f"tier={tier}")
    path = m / "a" / "latest" / "model.safetensors"
    seconds = int(os.environ.get("VCKPT_READERS_SECONDS", scale(3, 60)))
    ran = subprocess.run([build / "tests/mount_readers", path, same, "64", "16", str(seconds)], capture_output=True,
                         text=True, timeout=seconds + 180)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    read = sorted(told["bytes"])
    for name, value in [("MB/s, the slowest reader", read[0] / seconds / 1e6),
                        ("MB/s, the median", read[len(read) // 2] / seconds / 1e6),
                        ("pages, the slowest thread", min(told["pages"])),
                        ("ms, the longest read", told["bytes_longest_ms"]),
                        ("ms, the longest fault", told["pages_longest_ms"])]:
        record_property(name, value)
        print(f"{name}: {value:.1f}")
    pages = sorted(told["pages"])
    assert pages[0] > pages[len(pages) // 2] / 10 and read[0] >= read[len(read) // 2] / 4, told   # none starves
    assert max(told["bytes_longest_ms"], told["pages_longest_ms"]) < 20_000, told
    assert m.stats()["vckpt_decoded_bytes_total"] > 2 * same.stat().st_size           # the cache did not hold it
