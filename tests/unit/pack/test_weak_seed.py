# SPDX-License-Identifier: Apache-2.0
"""Seeds under which XXH3-128 cannot see that one bit moved: they exist, `init` draws no such seed, and a store that has
one believes nothing by it. Bool and integer pieces are never believed by it."""
import ctypes as c
import os
import random
import shutil
import struct
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file

from storelib import Buf, Info

MASK, MIB, STORE_RECORD = 2**64 - 1, 1 << 20, 1
# The constant secret of XXH3, as its specification has it.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
WORDS = struct.unpack("<24Q", SECRET)


def secret(seed):
    return struct.pack("<24Q", *[(w - seed if i % 2 else w + seed) & MASK for i, w in enumerate(WORDS)])


def key(seed, stripe, lane):
    """Of a stripe (0 to 15), or of the last 64 bytes (16)."""
    at = 8 * (stripe + lane) if stripe < 16 else 121 + 8 * lane
    return int.from_bytes(secret(seed)[at:at + 8], "little")


def halves(k):
    return k & 0xffffffff, k >> 32


def alike(even, odd, rng):
    """A seed that makes the high halves (rarely more) of word `even` and word `odd` the same."""
    middle = (WORDS[odd] - WORDS[even]) // 2 & MASK
    while True:
        seed = middle + rng.randrange(-2**20, 2**20) & MASK
        a, b = halves(WORDS[even] + seed & MASK), halves(WORDS[odd] - seed & MASK)
        if a[1] == b[1] and a[0] != b[0]:
            return seed


def alike_last(lane, stripe, rng):
    """A seed that makes the high halves of a stripe's key and of the last stripe's key in that lane the same. Bits 40
    to 63 of one word are bits 32 to 55 of another, eight at a time from below; the last eight come by chance."""
    word, sign = 15 + lane, -1 if (15 + lane) % 2 else 1
    other = stripe + lane
    assert (other - word) % 2 == 0, "equal parity: the seed is added to both, or taken from both"
    while True:
        seed = rng.randrange(2**40)
        for bit in (40, 48, 56):
            want = (WORDS[other] + sign * seed & MASK) >> bit - 8 & 255
            have = (WORDS[word] + sign * seed & MASK) >> bit & 255
            seed = seed + (sign * (want - have) << bit) & MASK
        if halves(key(seed, 16, lane))[1] == halves(key(seed, stripe, lane))[1]:
            return seed


@pytest.fixture(scope="module")
def api(lib):
    lib.base_xxh128_seed_weak.restype = c.c_bool

    def xxh(seed, data):
        out = c.create_string_buffer(16)
        lib.base_xxh128_of(c.c_uint64(seed), data, c.c_size_t(len(data)), out)
        return out.raw
    lib.xxh, lib.weak = xxh, lambda seed: lib.base_xxh128_seed_weak(c.c_uint64(seed))
    return lib


def mask(block, stripe, lane, byte):
    """1 MiB of False, and one True."""
    data = numpy.zeros(MIB, "u1")
    at = 1024 * block + 64 * stripe + 8 * lane if stripe < 16 else MIB - 64 + 8 * lane
    data[at + byte] = 1
    return data


def pairs(rng):
    """(seed, lane, stripe, another one) of which the high halves of both keys are the same."""
    for _ in range(20):
        lane, a = rng.randrange(8), rng.randrange(16)
        b = rng.choice([s for s in range(16) if (s - a) % 2])
        even, odd = (a + lane, b + lane) if (a + lane) % 2 == 0 else (b + lane, a + lane)
        yield alike(even, odd, rng), lane, a, b
    for lane, stripe in [(0, 3), (3, 8), (7, 12)]:
        yield alike_last(lane, stripe + (15 - stripe) % 2, rng), lane, stripe + (15 - stripe) % 2, 16


def unseen(seed, lane, a, b):
    """The bytes of the low half in which a moved bit changes nothing: where both keys have the bit, or neither has."""
    return [i for i in range(4) if not (key(seed, a, lane) ^ key(seed, b, lane)) >> 8 * i & 1]


def test_a_moved_bit_is_not_seen_under_a_weak_seed(api):
    rng, found = random.Random(7), 0
    for seed, lane, a, b in pairs(rng):
        assert api.weak(seed), hex(seed)
        block = 1023 if b == 16 else rng.randrange(1023)
        for byte in range(4):
            one, two = api.xxh(seed,
                               mask(block, a, lane, byte)[:].tobytes()), api.xxh(seed,
                                                                                 mask(block, b, lane, byte).tobytes())
            assert (one == two) == (byte in unseen(seed, lane, a, b)), (hex(seed), lane, a, b, byte)
            found += one == two
    assert found > 20, "the test shows nothing"


def test_low_halves_too(api):
    rng, found = random.Random(9), 0
    for _ in range(20):
        lane, a = rng.randrange(8), rng.randrange(15)
        even, odd = (a + lane, a + 1 + lane) if (a + lane) % 2 == 0 else (a + 1 + lane, a + lane)
        distance = WORDS[odd] - WORDS[even]
        if distance % 2:    # one half is never that of the other
            continue
        seed = (distance % 2**32 // 2 + (rng.randrange(2**32) << 32)) & MASK
        assert halves(key(seed, a, lane))[0] == halves(key(seed, a + 1, lane))[0] and api.weak(seed)
        for byte in range(4, 8):
            same = not (key(seed, a, lane) ^ key(seed, a + 1, lane)) >> 8 * byte & 1
            assert (api.xxh(seed, mask(3, a, lane, byte).tobytes()) ==
                    api.xxh(seed, mask(3, a + 1, lane, byte).tobytes())) == same
            found += same
    assert found > 10


def test_few_seeds_are_weak(api):
    """2^-21 of them: 200,000 random ones show none but once in ten runs."""
    rng = random.Random(1)
    seeds = [rng.randrange(2**64) for _ in range(200000)]
    assert sum(map(api.weak, seeds)) <= 2
    seed = seeds[0]
    for _ in range(300):    # and under another one a moved bit is seen
        lane, a, b = rng.randrange(8), rng.randrange(16), rng.randrange(16)
        if a != b:
            byte = rng.randrange(8)
            assert api.xxh(seed, mask(5, a, lane, byte).tobytes()) != api.xxh(seed, mask(5, b, lane, byte).tobytes())


def test_a_zero_or_a_power_of_two_is_weak(api):
    for half in (0, 1, 1 << 31):
        assert api.weak((half << 32) - (WORDS[4] & ~0xffffffff) & MASK)
        assert api.weak(half - WORDS[6] & MASK)


# ---- stores ----

def set_seed(lib, store, seed):
    """A store with that seed, as earlier versions may have made."""
    s, err, info, body, file = c.c_void_p(), c.create_string_buffer(1100), Info(), Buf(), Buf()
    lib.store_open.argtypes = lib.store_close.argtypes = None
    assert lib.store_open(os.fsencode(store), 0, c.byref(s), err) == 0
    from storelib import Store
    own = c.cast(s, c.POINTER(Store)).contents.info
    for name in ("version", "id", "min_bytes", "target_bytes", "row_bytes", "small_bytes", "reserve_bytes"):
        setattr(info, name, getattr(own, name))
    info.seed = seed
    lib.store_close(s)
    assert lib.proto_store_encode(c.byref(info), c.byref(body)) == 0
    assert lib.store_record_encode(STORE_RECORD, None, c.c_void_p(body.data), c.c_size_t(body.len), c.byref(file)) == 0
    (store / "vckpt.store").write_bytes(c.string_at(file.data, file.len))


def moved(seed, lane, a, b, dtype):
    byte = unseen(seed, lane, a, b)[0]
    return [mask(5, s, lane, byte).view(dtype) for s in (a, b)]


@pytest.fixture
def seed():
    """One with a bit that moves unseen, and where it does."""
    return next(p for p in pairs(random.Random(3)) if unseen(*p))


@pytest.mark.parametrize("dtype", ["u1", "?", "i4", "f4"])
def test_a_moved_bit_is_stored(vckpt, api, store, tmp_path, seed, dtype):
    """The second import must not be taken for the first."""
    set_seed(api, store, seed[0])
    one, two = moved(*seed, dtype)
    assert api.xxh(seed[0], one.tobytes()) == api.xxh(seed[0], two.tobytes()) and one.tobytes() != two.tobytes()
    for step, data in enumerate((one, two)):
        save_file({"mask": data}, tmp_path / f"{step}.safetensors")
        vckpt("import", store, "run", tmp_path / f"{step}.safetensors", "-q")
    for step in range(2):
        assert vckpt("cat", store, f"run/{step}/{step}.safetensors",
                     text=False).stdout == (tmp_path / f"{step}.safetensors").read_bytes()
    vckpt("verify", store)


GETRANDOM = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/random.h>
#include <unistd.h>
#include <sys/syscall.h>
ssize_t getrandom(void *p, size_t n, unsigned flags)
{
	static int calls;
	if (n == 8 && calls++ < 3) {
		unsigned long long seed = SEED;
		memcpy(p, &seed, 8);
		fprintf(stderr, "a weak seed\\n");
		return 8;
	}
	return syscall(SYS_getrandom, p, n, flags);
}
"""


def test_init_draws_again(vckpt, api, tmp_path, seed):
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    (tmp_path / "r.c").write_text(GETRANDOM.replace("SEED", f"{seed[0]}ull"))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "r.so", tmp_path / "r.c"], check=True)
    done = vckpt("init", tmp_path / "s", env={"LD_PRELOAD": str(tmp_path / "r.so")})
    if "a weak seed" not in done.stderr:
        pytest.skip("the sanitizer's own getrandom comes first")
    from storelib import Api
    opened = Api(api, tmp_path / "s", init=False)
    try:
        assert opened.p.contents.info.seed != seed[0] and not api.weak(opened.p.contents.info.seed)
    finally:
        opened.close()
