# SPDX-License-Identifier: Apache-2.0
"""core/base/array.h and table.h: growing, finding, and what a failing allocation leaves."""
import ctypes
import os
import subprocess
import sys

import pytest

import storelow


@pytest.mark.skipif("asan" in os.environ.get("VCKPT_PRELOAD", "") + os.environ.get("LD_PRELOAD", ""),
                    reason="the sanitizer has an allocator of its own")
def test_against_the_plainest_way(build, seed):
    done = subprocess.run([build / "tests/containers", str(seed), "80000"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sound\n", "")


def test_hashes_are_seeded_anew_in_every_process(build):
    """Names cannot be chosen that fall into one slot."""
    library = str(build / "tests/libvckpt_internal.so")
    show = (f"import ctypes; lib = ctypes.CDLL({library!r}); print(lib.base_table_hash(b'abc', ctypes.c_size_t(3)), "
            "lib.load_cache_hash(bytes(96), b'pack', ctypes.c_uint64(0)))")
    env = dict(os.environ)
    if "VCKPT_PRELOAD" in env:
        env["LD_PRELOAD"] = env["VCKPT_PRELOAD"]
    said = {subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, env=env).stdout
            for _ in range(3)}
    assert len({line.split()[0] for line in said}) > 1 and len({line.split()[1] for line in said}) > 1


def test_places_that_claim_one_digest_are_spread(lib):
    """The cache's table: records say which digest is where, so whoever writes them could choose their slot."""
    def hashes(change):
        ref = storelow.Ref()
        found = []
        for number in range(4000):
            change(ref, number)
            found.append(lib.load_cache_hash(ctypes.byref(ref), b"pack", ctypes.c_uint64(0)) & 1023)
        return found

    def digest_above(ref, number):
        ref.digest.bytes[8:16] = number.to_bytes(8, "little")

    changes = [digest_above, lambda ref, n: setattr(ref, "offset", n << 12), lambda ref, n: setattr(ref, "checks", n),
               lambda ref, n: setattr(ref, "raw_len", n)]
    for change in changes:
        found = hashes(change)
        assert max(map(found.count, set(found))) < 30       # 4 on average
