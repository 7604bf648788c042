# SPDX-License-Identifier: Apache-2.0
"""`tmp_path` and `tmp_path_factory` in memory, where there is enough: for the tests of a folder whose conftest.py has
`from memorylib import tmp_path_factory`. Their stores are many and small, and no test asks what a disk does: to write
them to one takes a tenth of the processors' time, and waits for it besides."""
import contextlib
import os
import pathlib
import shutil
import tempfile
import time

import pytest

MEMORY = "/dev/shm"
ENOUGH_BYTES = 4 << 30      # a container's has 64 MiB, as a rule


def in_memory():
    if not os.access(MEMORY, os.W_OK):
        return False
    there = os.statvfs(MEMORY)
    return there.f_bavail * there.f_frsize >= ENOUGH_BYTES


@pytest.fixture(scope="session")
def tmp_path_factory(request, tmp_path_factory):
    """What passed tests leave goes at once, what failed ones leave stays in /dev/shm/vckpt-tests-* for a day."""
    if not in_memory():
        yield tmp_path_factory
        return
    for old in pathlib.Path(MEMORY).glob("vckpt-tests-*"):
        with contextlib.suppress(FileNotFoundError):
            if old.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(old, ignore_errors=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="vckpt-tests-", dir=MEMORY))
    yield pytest.TempPathFactory(folder / "all", 3, "failed", request.config.trace.get("tmpdir"), _ispytest=True)
    if not request.session.testsfailed:
        shutil.rmtree(folder, ignore_errors=True)
