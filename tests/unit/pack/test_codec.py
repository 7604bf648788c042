# SPDX-License-Identifier: Apache-2.0
"""The codec gives back every bit, on every path, and survives whatever is stored."""

import ctypes as C
import errno
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import storelow as low

WORDS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def codec(lib):
    low.bind(lib)
    yield lib
    lib.transform_select(-1)


def round_trip(lib, word_bytes, data):
    word, stored, lens = low.encode(lib, word_bytes, data)
    assert lib.pack_codec_valid(word)
    assert low.decode(lib, word, stored, lens, len(data)) == data
    if word:
        assert (len(stored) + 4 * len(lens)) * 100 < len(data) * 97
    return word, stored, lens


def weights(word_bytes, n, seed=1):
    x = np.random.default_rng(seed).normal(0, 0.02, n // word_bytes + 1)
    if word_bytes == 2:
        u = x.astype("<f4").view("<u4")
        return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype("<u2").tobytes()[:n]
    return {1: (x * 100).astype("i1"), 4: x.astype("<f4"), 8: x.astype("<f8")}[word_bytes].tobytes()[:n]


def test_all_bf16_patterns(codec):
    patterns = np.arange(65536, dtype="<u2")
    for data in (patterns, np.sort(patterns.view("<i2")), np.repeat(patterns, 2)):
        round_trip(codec, 2, data.tobytes())


@pytest.mark.parametrize("word_bytes", WORDS)
def test_all_implementations_give_the_same_bytes(codec, word_bytes):
    for n in (1, 7, 8, 9, 63, 64, 255, 256, 257, 2047, 4096, 8191, 16383, 16384, 16385, 40000):
        data = weights(word_bytes, n)
        results = []
        for which in (0, 1, 2):
            codec.transform_select(which)
            results.append(round_trip(codec, word_bytes, data))
        word, stored, lens = results[0]
        assert results[0] == results[1] == results[2], n
        for which in (0, 1, 2): # each decodes what another wrote
            codec.transform_select(which)
            assert low.decode(codec, word, stored, lens, n) == data
        codec.transform_select(-1)


@pytest.mark.parametrize("word_bytes", WORDS)
def test_bit_planes_of_every_length(codec, word_bytes):
    """Each variant's planes are the portable one's, and each gives the words back: all 65,536 of two bytes, too."""
    words = np.random.default_rng(3).permutation(65536).astype("<u2").tobytes()
    blocks = [words[:n] for n in [*range(2100), *range(16300, 16384)]]
    blocks += [words[at : at + 16384] for at in range(0, 131072, 16384)]
    for data in blocks:
        planes = set()
        for which in (0, 1, 2):
            codec.transform_select(which)
            out, back = (C.create_string_buffer(b"\xa5" * (len(data) + 64)) for _ in range(2))
            codec.transform_bitplane_encode(word_bytes, data, C.c_size_t(len(data)), out, C.create_string_buffer(16384))
            planes.add(out.raw)
            codec.transform_bitplane_decode(word_bytes, out, C.c_size_t(len(data)), back, C.create_string_buffer(16384))
            assert back.raw[: len(data)] == data and back.raw[len(data) : -1] == b"\xa5" * 64, (which, len(data))
        assert len(planes) == 1, len(data)
    codec.transform_select(-1)


@settings(max_examples=150, deadline=None)
@given(word_bytes=st.sampled_from(WORDS), n=st.integers(0, 3 * low.BLOCK), kind=st.integers(0, 4),
       seed=st.integers(0, 2**32))
def test_random_lengths(codec, word_bytes, n, kind, seed):
    r = np.random.default_rng(seed)
    data = [lambda: weights(word_bytes, n, seed), lambda: r.bytes(n), lambda: bytes(n),
            lambda: (b"abcdefg " * (n // 8 + 1))[:n],
            lambda: r.bytes(n // 2) + bytes(n - n // 2)][kind]()
    round_trip(codec, word_bytes, data)


def test_a_mixed_object_keeps_its_noisy_blocks_raw(codec):
    data = b"".join(random.randbytes(low.BLOCK) if i % 4 == 3 else weights(2, low.BLOCK, i) for i in range(16))
    word, stored, lens = round_trip(codec, 2, data)
    assert word == 1 | 2 << 8
    assert [i for i, n in enumerate(lens) if n & low.RAW] == [3, 7, 11, 15]


def test_noise_stays_raw(codec):
    for n in (0, 1, 100, low.BLOCK, 1 << 20):
        assert low.encode(codec, 2, random.randbytes(n))[0] == 0


def test_the_first_look_is_not_the_last(codec):
    """A tail too short to gain, and a noisy middle, hide nothing."""
    short = weights(2, low.BLOCK + 16)
    assert low.encode(codec, 2, short)[0] and len(round_trip(codec, 2, short)[1]) < len(short) / 1.2
    noise, rows = random.randbytes(low.BLOCK), bytes(2 * low.BLOCK)
    assert low.encode(codec, 2, rows + noise + rows)[0]
    assert low.encode(codec, 2, rows + 6 * noise)[0]


def test_ratio_of_weights(codec):
    data = weights(2, 1 << 20)
    word, stored, lens = round_trip(codec, 2, data)
    assert codec.pack_codec_name(word) == b"lz4+bitplane16"
    assert len(data) / len(stored) > 1.30


def test_words_that_nobody_writes_are_refused(codec):
    valid = [w for w in range(65536) if codec.pack_codec_valid(w)]
    assert valid == [0] + [1 | t << 8 for t in range(5)]
    for word in (2, 0x0100, 0x0501, 0xFFFF):
        assert low.decode_block(codec, word, bytes(10), 10, 100)[0] == -errno.EBADMSG


def test_hostile_blocks(codec):
    rng = random.Random(5)
    word, stored, lens = low.encode(codec, 2, weights(2, low.BLOCK))
    first = stored[: lens[0]]
    for i in range(3000):
        block = bytearray(first if i % 2 else rng.randbytes(rng.randrange(1, 300)))
        for _ in range(rng.randrange(1, 4)):
            block[rng.randrange(len(block))] = rng.randrange(256)
        raw_len = rng.choice([1, 15, 100, low.BLOCK - 1, low.BLOCK])
        length = len(block) | (low.RAW if rng.random() < 0.1 else 0)
        if length & low.RAW:
            length = rng.choice([length, raw_len | low.RAW]) if len(block) >= raw_len else length
        r, _ = low.decode_block(codec, rng.choice([0x001, 0x101, 0x201, 0x301, 0x401]), bytes(block), length, raw_len)
        assert r in (0, -errno.EBADMSG)
    for length, raw_len in ((0, 5), (5, 5), (9, 5), (low.RAW, 5), (4 | low.RAW, 5), (10, 0), (10, low.BLOCK + 1)):
        assert low.decode_block(codec, 0x201, bytes(16), length, raw_len)[0] == -errno.EBADMSG
