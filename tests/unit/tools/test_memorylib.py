# SPDX-License-Identifier: Apache-2.0
"""Runs that fail again and again do not fill the memory."""
import os
import time

import memorylib


def test_old_folders_are_removed(tmp_path):
    now = time.time()
    for name, age in ("a", 1), ("b", 2), ("used", 100000), ("c", 3), ("d", 90000):
        (tmp_path / f"vckpt-tests-{name}/all").mkdir(parents=True)
        os.utime(tmp_path / f"vckpt-tests-{name}", (now - age, now - age))
    (tmp_path / "other").mkdir()
    for kept, left in (5, "abc"), (2, "ab"), (1, "a"):
        with memorylib.locked(tmp_path / "vckpt-tests-used"):
            memorylib.remove_old(tmp_path, kept)
        assert {p.name for p in tmp_path.iterdir()} == {*(f"vckpt-tests-{name}" for name in left), "vckpt-tests-used",
                                                         "other"}
