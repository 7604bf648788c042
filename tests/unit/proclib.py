# SPDX-License-Identifier: Apache-2.0
"""The threads and the open files of a process. Those of earlier tests may still come and go: a test compares which are
new, or names its own files, and never compares numbers of them."""
import contextlib
import os


def tasks(pid="self"):
    """The ids of its threads. The kernel shows one a moment longer than it can be joined."""
    return set(map(int, os.listdir(f"/proc/{pid}/task")))


def open_files(pid="self"):
    """The name of what each descriptor is of."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def statuses(pid):
    """Of each thread that has not ended meanwhile, /proc/*/status: {id: {field: text}}."""
    found = {}
    for task in tasks(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/task/{task}/status") as f:
                found[task] = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
    return found
