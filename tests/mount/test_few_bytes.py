# SPDX-License-Identifier: Apache-2.0
"""A few bytes of a large tensor: what is decoded for them, and that they are right."""
import os
import subprocess

import numpy as np
import pytest

from .conftest import Tensor, weights, write_safetensors

KiB, MiB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def wide(vckpt, tmp_path_factory):
    """Tensors whose rows pass through many pieces, stored raw and encoded; and a blob of 4 MiB."""
    folder, rng = tmp_path_factory.mktemp("few"), np.random.default_rng(2)
    tensors = {"raw": Tensor("BF16", (2048, 4096), rng.bytes(16 * MiB)),
               "w": Tensor("BF16", (2048, 4096), weights(rng, 2048 * 4096))}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "blob.bin").write_bytes(rng.bytes(4 * MiB))
    (folder / "source").mkdir()
    for name in ["model.safetensors", "blob.bin"]:
        (folder / name).rename(folder / "source" / name)
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a/1", folder / "source")
    return folder / "store", {f"model/{name}.npy": t.data for name, t in tensors.items()} | {
        "blob.bin": (folder / "source" / "blob.bin").read_bytes()}


def decoded(m):
    return m.stats()["vckpt_decoded_bytes_total"]


@pytest.mark.parametrize("name", ["model/raw.npy", "model/w.npy", "blob.bin"])
def test_head_decodes_what_it_reads(wide, mount, name):
    m = mount(wide[0], "tier=cached")
    head = subprocess.run(["head", "-c", "5000", m / "a" / "latest" / name], capture_output=True, check=True).stdout
    data = head if name == "blob.bin" else head[4096:]
    assert len(head) == 5000 and data == wide[1][name][:len(data)]
    assert 0 < decoded(m) <= 256 * KiB


def test_a_hundred_bytes_decode_at_most_128_kib(wide, mount):
    m = mount(wide[0], "tier=cached")
    for name in ["model/raw.npy", "model/w.npy", "blob.bin"]:
        before = decoded(m)
        subprocess.run(["head", "-c", "100", m / "a" / "latest" / name], stdout=subprocess.DEVNULL, check=True)
        assert decoded(m) - before <= 128 * KiB, name


@pytest.mark.parametrize("name", ["model/raw.npy", "model/w.npy", "blob.bin"])
def test_who_comes_again_gets_whole_pieces_and_right_bytes(wide, mount, rng, name):
    """Pages at random, each asked for by itself: at first blocks, then pieces, which are kept."""
    m = mount(wide[0], "tier=cached", "readahead=0")
    data, at = wide[1][name], 0 if name == "blob.bin" else 4096
    fd = os.open(m / "a" / "latest" / name, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for _ in range(400):
        offset, n = rng.randrange(len(data) - 9000), rng.randrange(1, 9000)
        assert os.pread(fd, n, at + offset) == data[offset:offset + n]
    before = decoded(m)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(200):
        offset = rng.randrange(len(data) - 100)
        assert os.pread(fd, 100, at + offset) == data[offset:offset + 100]
    assert decoded(m) - before < 2 * MiB
    os.close(fd)


def test_a_read_from_end_to_end_decodes_each_piece_once(wide, mount):
    m = mount(wide[0], "tier=cached")
    for name in ["model/raw.npy", "model/w.npy", "blob.bin"]:
        before, whole = m.stats(), (m / "a" / "latest" / name).read_bytes()
        after = m.stats()
        assert whole[-len(wide[1][name]):] == wide[1][name]
        assert after["vckpt_decoded_bytes_total"] - before["vckpt_decoded_bytes_total"] <= 1.1 * len(whole)


def test_what_many_pieces_share_is_decoded_once(vckpt, mount, tmp_path, store):
    """The same MiB again and again, of which the store has one piece, or a few."""
    again = np.random.default_rng(4).bytes(MiB) * 64
    write_safetensors(tmp_path / "same/model.safetensors", {"w": Tensor("U8", (16384, 4096), again)})
    vckpt("import", store, "a/1", tmp_path / "same/model.safetensors")
    m = mount(store, "tier=cached")
    assert (m / "a" / "latest" / "model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()
    assert decoded(m) < 16 * MiB
