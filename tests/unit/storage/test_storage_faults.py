# SPDX-License-Identifier: Apache-2.0
"""The POSIX storage on a medium that fails: an error of fsync is not forgotten, and no error makes it say more than it
knows."""
import errno
import os
import subprocess
import sys

import pytest

import storelow as low

# Calls of the storage, each answered by its errno; with LD_PRELOAD, so in a process of its own.
PROGRAM = """
import ctypes, sys
import storelow as low
with low.Storage(ctypes.CDLL(sys.argv[1], use_errno=True), sys.argv[2], int(sys.argv[3])) as s:
    for line in sys.argv[4:]:
        try:
            print(eval(line) or 0)
        except OSError as e:
            print(-e.errno)
"""


class Faulty:
    def __init__(self, build, path, flags):
        self.build, self.path, self.flags, self.list = build, path, flags, path.parent / "calls"

    def __call__(self, words, *lines):
        """What the lines answered, and the calls of the kernel that counted."""
        self.list.unlink(missing_ok=True)
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {self.build}/tests/libinterpose.so".strip()
        env = dict(os.environ, LD_PRELOAD=preload,
                   ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0",
                   VCKPT_INTERPOSE=f"root={self.path},list={self.list},{words}")
        done = subprocess.run([sys.executable, "-c", PROGRAM, self.build / "tests/libvckpt_internal.so", self.path,
                               str(self.flags), *lines],
                              env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [int(line) for line in done.stdout.split()], self.list.read_text().splitlines()


@pytest.fixture(params=[0, low.NAMED_TEMPS], ids=["unnamed", "named"])
def faulty(lib, build, tmp_path, request):
    with low.Storage(lib, tmp_path / "s", low.CREATE | request.param) as s:
        s.put("d/f", b"old")
    return Faulty(build, tmp_path / "s", request.param)


CHANGES = ['s.put("d/{}", b"new")', 's.put("d/f", b"old")', 's.replace("d/f", b"new")', 's.file("d/{}", [b"new"])',
           's.file_over("d/f", b"new")',
           's.sync_dir("d")']


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_directory_whose_fsync_failed_is_not_believed(faulty, change, error):
    """The kernel tells of it once. The names count as durable only with a change of the same directory that was made
    after it."""
    counted = "calls=fsync+openat+unlinkat"
    answers, calls = faulty(counted, change.format("one"))
    assert answers == [0]
    at = len(calls) - calls[::-1].index("fsync d")      # the last: those of unnamed files come before it
    answers, calls = faulty(f"{counted},do=fail,errno={error},at={at}", change.format("two"), *['s.sync_dir("d")'] * 2)
    assert answers == [-error, 0, 0], calls
    assert [call.split(".tmp")[0] for call in calls[-4:]] == ["openat d/touch", "unlinkat d/touch", "fsync d",
                                                              "fsync d"], calls
    answers, calls = faulty(f"{counted},do=fail,errno={error},at={at},last={at + 1}", change.format("three"),
                            *['s.sync_dir("d")'] * 3)
    assert answers == [-error, -error, 0, 0], calls


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_directory_whose_fsync_knew_nothing_is_not_believed(faulty, change, error):
    """It answered 0, but the file system takes no change any more: a journal that is given up has lost what nobody can
    name."""
    answers, calls = faulty("calls=fsync+fremovexattr", change.format("one"))
    assert answers == [0] and calls[-2:] == ["fsync d", "fremovexattr d"], calls
    at = len(calls)
    answers, calls = faulty(f"calls=fsync+fremovexattr,do=fail,errno={error},at={at}", change.format("two"),
                            *['s.sync_dir("d")'] * 2)
    assert answers == [-error, 0, 0] and calls[at:] == ["fsync d", "fremovexattr d"] * 2, calls


def test_a_file_system_without_attributes_says_nothing(faulty):
    answers, _ = faulty(f"calls=fremovexattr,do=fail,errno={errno.EOPNOTSUPP},at=1,last=100", 's.put("d/new", b"new")')
    assert answers == [0]
