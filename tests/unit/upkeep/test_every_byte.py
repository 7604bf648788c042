# SPDX-License-Identifier: Apache-2.0
"""A bit of every byte of a small store is flipped in turn: reads give the right bytes or an error, and verify finds
each."""
import subprocess

import numpy
from safetensors.numpy import save_file


def test_every_byte(vckpt, build, tmp_path, scale):
    store, source = tmp_path / "store", tmp_path / "source"
    source.mkdir()
    rng = numpy.random.default_rng(1)
    save_file({"w": (rng.standard_normal((20, 33)) * 0.02).astype("f4"), "b": rng.integers(0, 9, 5),
               "e": numpy.zeros((0, 3))}, source / "model.safetensors")
    (source / "config.json").write_text("{}" * 40)
    vckpt("init", store, "--no-reserve")
    vckpt("import", store, "run", source, "--set", "loss=1", "--no-index")
    size = sum(p.stat().st_size for p in store.rglob("*") if p.is_file() and "index" not in p.parts)
    print("bytes", size)
    assert size <= 40 << 10
    done = subprocess.run([build / "tests/every_byte", store, str(scale(17, 1)), "0"], capture_output=True, text=True)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "wrong 0, unseen 0" in done.stdout
    vckpt("verify", store)
