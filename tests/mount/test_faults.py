# SPDX-License-Identifier: Apache-2.0
"""Mapped pages touched from many threads at random: no wrong byte, no thread left waiting."""
import mmap
import os
import random
import threading

import numpy as np

from .conftest import Tensor, weights, write_safetensors


def test_64_threads_fault_pages_at_random(mount, store, vckpt, tmp_path, scale):
    rng = np.random.default_rng(3)
    size = scale(24, 512) << 20
    tensors = {"w0": Tensor("BF16", (size // 4096, 1024), weights(rng, size // 4)),
               "w1": Tensor("U8", (size // 2,), rng.bytes(size // 2))}
    data = write_safetensors(tmp_path / "big.safetensors", tensors)
    vckpt("import", store, "a/1", tmp_path / "big.safetensors")
    path = mount(store, "cache=16M") / "a" / "latest" / "model.safetensors"
    fd = os.open(path, os.O_RDONLY)
    wrong, done = [], []

    def touch(seed, mapped):
        pick = random.Random(seed)
        for _ in range(scale(60, 400)):
            at = pick.randrange(len(data) - 64)
            if mapped[at:at + 64] != data[at:at + 64]:
                wrong.append(at)
                return
        done.append(seed)

    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        threads = [threading.Thread(target=touch, args=(seed, mapped), daemon=True) for seed in range(64)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not any(t.is_alive() for t in threads), "a fault never ends"
    os.close(fd)
    assert not wrong and len(done) == 64
