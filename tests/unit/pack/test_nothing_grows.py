# SPDX-License-Identifier: Apache-2.0
"""Bytes that no codec makes smaller are stored as they are, whatever their dtype. What a pack has besides is counted: a
head and a tail, for each object an entry and the checks of its blocks, and no holes worth a word, though a raw object
of 64 KiB and more begins at a multiple of 4096 and a small tensor comes before each large one."""
import pathlib

import numpy as np
import pytest

from saverlib import api, store  # noqa: F401 (fixtures)

ITEM = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 2, 12: 4, 13: 8, 14: 8, 15: 16, 16: 1, 17: 1,
        18: 1, 19: 1, 20: 1, 21: 1}     # bytes of an item, by dtype
HEAD, TAIL, ENTRY, CHECK, BLOCK, PAGE = 4096, 128, 80, 8, 16 << 10, 4096


def saved(api, store, tensors):  # noqa: F811
    """Sizes of the packs of the model and of the tables, pieces, bytes that were encoded."""
    saver = api.saver(store, "run")
    try:
        save = saver.save(tensors)
        save.committed()
        t = save.timings()
        save.free()
        saver.close()
    finally:
        saver.free()
    sizes = {p.stem.rsplit("-", 1)[1]: p.stat().st_size for p in pathlib.Path(store).glob("packs/*/*.pack")}
    return sizes["model"], sizes["meta"], t.pieces, t.bytes_encoded


@pytest.mark.parametrize("dtype", ITEM)
def test_noise_of_any_dtype(api, store, rng, dtype):  # noqa: F811
    item, tensors, blocks, small = ITEM[dtype], {}, 0, 0
    noise = np.random.default_rng(rng.getrandbits(64))
    for i in range(12):
        for name, shape in ((f"model/{i}.a_bias", (384 // item,)), (f"model/{i}.weight", (768, 768 // item))):
            items = np.frombuffer(noise.bytes(item * np.prod(shape)), f"V{item}").reshape(shape)
            tensors[name] = items, {"dtype": dtype}
            blocks += -(-items.nbytes // BLOCK)
            small += 64 if len(shape) == 1 else 0
    raw = sum(items.nbytes for items, _ in tensors.values())
    model, tables, pieces, encoded = saved(api, store, tensors)
    assert encoded == 0
    assert raw < model <= raw + HEAD + TAIL + pieces * ENTRY + blocks * CHECK + small + PAGE
    assert model + tables < 1.0065 * raw                  # of pieces of 36 KiB


def test_what_gains_little_is_stored_raw(api, store, rng):  # noqa: F811
    """Bytes of which a twentieth of a block repeats: a block or two get smaller, the object by less than 3 %."""
    noise = bytearray(rng.randbytes(1 << 20))
    noise[1 << 18:(1 << 18) + 800] = bytes(800)
    model, _, pieces, encoded = saved(api, store, {"model/w": (np.frombuffer(bytes(noise), "u1"), {"dtype": 6})})
    assert encoded == 0 and model <= len(noise) + HEAD + TAIL + pieces * ENTRY + 64 * CHECK + PAGE
