# SPDX-License-Identifier: Apache-2.0
"""`tmp_path` and `tmp_path_factory` in memory, where there is enough: for the tests of a folder whose conftest.py has
`from memorylib import tmp_path_factory`. Their stores are many and small, and no test asks what a disk does: to write
them to one takes a tenth of the processors' time, and waits for it besides."""
import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import time

import pytest

MEMORY = "/dev/shm"
ENOUGH_BYTES = 4 << 30      # a container's has 64 MiB, as a rule
KEPT = 8                    # folders of runs that failed; each process of a run has one


def in_memory():
    if not os.access(MEMORY, os.W_OK):
        return False
    there = os.statvfs(MEMORY)
    return there.f_bavail * there.f_frsize >= ENOUGH_BYTES


@contextlib.contextmanager
def locked(folder):
    """Raises BlockingIOError if another process has it locked."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def remove_old(memory, kept=KEPT):
    """Removes folders of runs that have ended: those of a day ago, and all but the newest."""
    found = []
    for folder in pathlib.Path(memory).glob("vckpt-tests-*"):
        with contextlib.suppress(OSError), locked(folder):      # it is not another user's, or in use
            found.append((folder.stat().st_mtime, folder))
    for i, (changed, folder) in enumerate(sorted(found, reverse=True)):
        if i >= kept or changed < time.time() - 86400:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tmp_path_factory(request, tmp_path_factory):
    """What passed tests leave goes at once, what failed ones leave stays in /dev/shm/vckpt-tests-* for a day, or until
    later runs have failed."""
    if not in_memory():
        yield tmp_path_factory
        return
    remove_old(MEMORY)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="vckpt-tests-", dir=MEMORY))
    with locked(folder):
        yield pytest.TempPathFactory(folder / "all", 3, "failed", request.config.trace.get("tmpdir"), _ispytest=True)
    if not request.session.testsfailed:
        shutil.rmtree(folder, ignore_errors=True)
