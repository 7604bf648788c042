# SPDX-License-Identifier: Apache-2.0
"""core/base/array.h and table.h: growing, finding, and what a failing allocation leaves."""
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif("asan" in os.environ.get("VCKPT_PRELOAD", "") + os.environ.get("LD_PRELOAD", ""),
                    reason="the sanitizer has an allocator of its own")
def test_against_the_plainest_way(build, seed):
    done = subprocess.run([build / "tests/containers", str(seed), "80000"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sound\n", "")


def test_hashes_are_seeded_anew_in_every_process(build):
    """Names cannot be chosen that fall into one slot."""
    library = str(build / "tests/libvckpt_internal.so")
    show = f"import ctypes; print(ctypes.CDLL({library!r}).base_table_hash(b'abc', ctypes.c_size_t(3)))"
    env = dict(os.environ)
    if "VCKPT_PRELOAD" in env:
        env["LD_PRELOAD"] = env["VCKPT_PRELOAD"]
    said = {subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, env=env).stdout
            for _ in range(3)}
    assert len(said) > 1
