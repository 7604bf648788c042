# SPDX-License-Identifier: Apache-2.0
"""Whose word a save takes for what is stored: its own; a neighbour's only after a look at the bytes."""
import ctypes as c
import hashlib
import random
import struct

import numpy as np
import pytest

import storelow
from forgelib import CHUNK, PART, Forge, Message
from test_save_load import Store, Tensor, api, cache, check_all, make, places  # noqa: F401 (fixtures)

NAMES = [("model", f"t{i}") for i in range(4)]


def forget(lib):
    """As another process, which wrote none of this."""
    for i in range(256):
        lib.save_trust_add(random.Random(i).randbytes(32))


def noise(seed):
    """One piece each, of three blocks, raw."""
    rng = np.random.default_rng(seed)
    return {key: Tensor.random(rng, "f32", (9000,)) for key in NAMES}


class Claim:
    """The last step of a run, which will claim to hold other bytes than it does, of the same lengths."""

    def __init__(self, lib, store, run, what):
        self.lib, self.store, self.what = lib, store, what
        self.forge = Forge(lib, store.path, run)
        about = Message(self.forge.record_body(store.path / "vckpt.store", 1, None))
        self.seed = int.from_bytes(about.get(4), "little")
        self.digests, self.hashes = {}, {}

    def digest(self, data):
        return bytes(storelow.digest(self.lib, data).bytes)

    def hash(self, data):
        out = c.create_string_buffer(16)
        self.lib.base_xxh128_of(c.c_uint64(self.seed), data, c.c_size_t(len(data)), out)
        return out.raw

    def add(self, stored, claimed, pack, offset, checks):
        """Checks are made with the digest: those of the stored bytes have to fit the claimed one."""
        self.hashes[self.hash(stored)] = self.hash(claimed)
        if self.what == "XXH3-128":
            return
        self.digests[self.digest(stored)] = self.digest(claimed)
        with open(next(self.store.path.rglob(f"{pack}.pack")), "r+b") as f:
            f.seek(offset)
            assert f.read(len(stored)) == stored
            f.seek(checks)
            digest = storelow.digest(self.lib, claimed)
            for i in range(0, len(stored), 16384):
                block = stored[i:i + 16384]
                f.write(struct.pack("<Q", self.lib.base_block_check(digest, i // 16384, block, len(block))))

    def rows(self, data):
        rows, extents, count = struct.unpack_from("<IIQ", data, 16)
        piece = 64 + 64 * rows + 24 * extents
        for row in range(64, 64 + 64 * rows, 64):
            n, digests = struct.unpack_from("<Q", data, row + 16)[0], b""
            for at in range(piece, piece + 64 * n, 64):
                data[at:at + 32] = self.digests.get(bytes(data[at:at + 32]), bytes(data[at:at + 32]))
                data[at + 32:at + 48] = self.hashes.get(bytes(data[at + 32:at + 48]), bytes(data[at + 32:at + 48]))
                digests += data[at:at + 32]
            data[row + 32:row + 64] = hashlib.sha256(b"\2" + struct.pack("<Q", n) + digests).digest()
            piece += 64 * n

    def made(self, scratch):
        for kind, data in self.forge.objects:
            if kind == CHUNK:
                self.rows(data)
            if kind == PART:
                for old, new in self.digests.items():
                    data[:] = data.replace(old, new)
                self.forge.part = Message(bytes(data))
        self.forge.done(scratch)


def forged(lib, store, run, true, what, scratch):
    """Saves noise that claims to be `true`."""
    stored = noise(99)
    store.save(run, stored, step=0)
    claim = Claim(lib, store, run, what)
    for key, [(_, _, pack, offset, checks, _)] in places(store, run, 0).items():
        claim.add(stored[key].data, true[key].data, pack.decode(), offset, checks)
    claim.made(scratch)


@pytest.mark.parametrize("what", ["digest", "XXH3-128"])
@pytest.mark.parametrize("run", ["the same run", "another, by the index"])
def test_a_neighbour_that_claims_to_have_it(make, api, lib, cache, tmp_path, run, what):  # noqa: F811
    """The true bytes come back, and the next save shares them."""
    store, true = make(), noise(1)
    forged(lib, store, "evil", true, what, tmp_path / "scratch")
    again = Store(api, store.path)
    if run != "the same run":
        assert again.update_index(rebuild=True).places >= len(true)
    mine = "evil" if run == "the same run" else "mine"
    first = again.save(mine, true, step=1, no_index=False)
    check_all(again, mine, 1, true, {}, cache)
    assert (first.pieces_new, first.pieces_reused, first.pieces_believed) == (len(true), 0, 0)
    assert first.pieces_refuted == (len(true) if what == "digest" else 0)
    second = again.save(mine, true, step=2, no_index=False)
    assert (second.pieces_new, second.pieces_believed, second.pieces_compared) == (0, len(true), 0)
    check_all(again, mine, 2, true, {}, cache)
    again.close()


@pytest.mark.parametrize("size", [5000, (17 << 20) + 5])
def test_a_neighbours_blob(make, api, lib, cache, tmp_path, size):  # noqa: F811
    store, rng = make(), np.random.default_rng(3)
    stored, true = rng.bytes(size), rng.bytes(size)
    store.save("evil", {}, {("tokenizer", False): stored}, step=0)
    claim = Claim(lib, store, "evil", "digest")
    offset, checks = struct.unpack_from("<QQ", Message(claim.forge.part.get(9)).get(4), 32)
    claim.add(stored, true, next(store.path.rglob("*-blobs.pack")).stem, offset, checks)
    claim.made(tmp_path / "scratch")
    again = Store(api, store.path)
    again.update_index(rebuild=True)
    first = again.save("mine", {}, {("tokenizer", False): true}, step=0, no_index=False)
    check_all(again, "mine", 0, {}, {("tokenizer", False): true}, cache)
    assert first.pieces_refuted == 1
    again.close()


def test_an_honest_neighbour_is_looked_at_once(make, lib, cache):  # noqa: F811
    """What another process saved is compared, and shared; what this one says of it is believed from then on."""
    store, true = make(), noise(4)
    blobs = {("config", False): b"{}" * 5000}
    store.save("theirs", true, blobs, step=0)
    forget(lib)
    store.update_index()
    first = store.save("mine", true, blobs, step=0, no_index=False)
    assert (first.pieces_new, first.pieces_reused, first.piece_bytes_new) == (0, len(true), 0)
    assert (first.pieces_believed, first.pieces_compared, first.pieces_refuted) == (0, len(true) + 1, 0)
    assert first.index_behind   # what was compared is to be remembered
    check_all(store, "mine", 0, true, blobs, cache)
    store.update_index()
    second = store.save("mine", true, blobs, step=1, no_index=False)
    assert (second.pieces_new, second.pieces_believed, second.pieces_compared) == (0, len(true), 0)
    forget(lib)                 # the index knows it all the same
    third = store.save("more", true, blobs, step=0, no_index=False)
    assert (third.pieces_new, third.pieces_compared, third.index_behind) == (0, 0, False)
    forget(lib)
    store.update_index(rebuild=True)
    fourth = store.save("else", true, blobs, step=0, no_index=False)
    assert (fourth.pieces_new, fourth.pieces_compared) == (0, len(true) + 1)
