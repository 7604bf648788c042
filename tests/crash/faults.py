# SPDX-License-Identifier: Apache-2.0
"""Which calls interpose.c counts; and which it spoils, set while the process runs: the memory that its word
`memory=FILE` maps."""
import mmap
import os
import struct
import subprocess


def past_the_cache(path):
    """Are packs there written past the page cache?"""
    return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True,
                          check=True).stdout.strip() in ("ext2/ext3", "xfs")


def counting(build, store, file, words="reads=1"):
    """The environment in which a program writes its calls on files of the store into `file`."""
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    return dict(os.environ, LD_PRELOAD=preload, VCKPT_INTERPOSE=f"root={store},{words},list={file}",
                ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")


def count_calls(run, file, reads=False):
    """How many calls that change the store a command makes; `reads`: with those that do not. run(words) has it run to
    its end on a store of its own, and `file` is to have the calls meanwhile."""
    done = run("reads=1," * reads + f"list={file}")
    assert done.returncode == 0, done
    calls = len(file.read_text().splitlines())
    file.unlink()
    return calls


class Faults:
    def __init__(self, path):
        with open(path, "a+b") as f:
            f.truncate(4096)
            self.memory = mmap.mmap(f.fileno(), 0)

    def at(self, first, last=None):
        """From now on calls count from 1. 0: none is spoiled."""
        self.memory[:24] = struct.pack("<3Q", 0, first, first if last is None else last)

    def calls(self):
        return struct.unpack("<Q", self.memory[:8])[0]

    def most(self):
        """How many took longer at once (the word wait=US), since it was asked the last time."""
        most, = struct.unpack("<Q", self.memory[24:32])
        self.memory[24:32] = bytes(8)
        return most
