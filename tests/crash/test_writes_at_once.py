# SPDX-License-Identifier: Apache-2.0
"""A pack of many buffers on a disk that takes its time: as many writes at once as it gains from. Writes are counted;
that some take longer is the preloaded library's."""
import errno
import json
import os
import re
import subprocess
import sys

import pytest

from faults import Faults, past_the_cache
from storelib import scratch

BUFFER = 4 << 20
SHORT_US, LONG_US = 5_000, 150_000      # the long one is far more than what else a write takes, on a busy machine, too
# Appends buffers that each begin with their number. After `middle` of them says how many writes were under way at once;
# in the end that since then, and all that was answered. `lent`: of each buffer the middle is lent, and comes back.
PROGRAM = """
import ctypes, json, sys, storelow
from faults import Faults

path, library, memory, count, middle, end, lends = sys.argv[1:]
lib, faults, answers, most, w = ctypes.CDLL(library), Faults(memory), [], [], storelow.P()
lent = storelow.Lent(b"lent" * (1 << 18))
with storelow.Storage(lib, path) as s:
    assert s.ops.writer_open(s.s, b"packs/00/p.pack", ctypes.byref(w)) == 0
    for number in range(int(count)):
        if number == int(middle):
            most.append(faults.most())
        bytes_ = number.to_bytes(8, "little") + bytes(%d)
        if lends:
            first, last = bytes_[:1 << 20], bytes_[3 << 20:]
            answers.append(s.ops.writer_append(w, first, len(first)) or
                           s.ops.writer_append_lent(w, lent.at, 1 << 20, ctypes.byref(lent)) or
                           s.ops.writer_append_lent(w, lent.at, 1 << 20, ctypes.byref(lent)) or
                           s.ops.writer_append(w, last, len(last)))
        else:
            answers.append(s.ops.writer_append(w, bytes_, len(bytes_)))
        if answers[-1]:
            break
    if end == "seal":
        answers.append(s.ops.writer_seal(w))
    else:
        s.ops.writer_abandon(w)
    assert (lent.users, lent.returned) == (1, 0), (lent.users, lent.returned)
    most.append(faults.most())
    waited = ctypes.cast(s.s, ctypes.POINTER(storelow.StorageHead)).contents.write_wait_ns
print(json.dumps({"answers": answers, "most": most, "waited": waited}))
""" % (BUFFER - 8)


@pytest.fixture
def write(lib, build, tmp_path):
    """Writes a pack on tmpfs, or in that folder; what the program says, and the folder."""
    folders = []

    def one(words, count=48, middle=0, end="seal", folder=None, lent=False):
        folder = folder or scratch()
        folders.append(folder)
        library = build / "tests/libvckpt_internal.so"
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
        env = dict(os.environ, LD_PRELOAD=preload, VCKPT_INTERPOSE=f"root={folder.resolve()},calls=pwrite,path=packs,"
                   f"memory={tmp_path / 'memory'},{words}",
                   ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
        Faults(tmp_path / "memory").at(0)
        if "at=" in words:
            Faults(tmp_path / "memory").at(int(words.rpartition("at=")[2]))
        done = subprocess.run([sys.executable, "-c", PROGRAM, folder, library, tmp_path / "memory", str(count),
                               str(middle), end, "lent" if lent else ""], env=env, stdout=subprocess.PIPE, text=True,
                              timeout=120, check=True)
        return json.loads(done.stdout), folder
    yield one
    for folder in folders:
        subprocess.run(["rm", "-rf", folder], check=True)


def numbers(path):
    """What the buffers of the pack begin with."""
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        assert size % BUFFER == 0
        return [int.from_bytes(os.pread(f.fileno(), 8, at), "little") for at in range(0, size, BUFFER)]


def test_a_disk_that_takes_many_gets_many(write):
    told, folder = write(f"wait={LONG_US}", count=16)
    assert not any(told["answers"]) and told["most"][-1] >= 3, told
    assert numbers(folder / "packs/00/p.pack") == list(range(16))
    assert told["waited"] >= 5 * LONG_US * 1000, told


def test_a_disk_that_takes_one_at_a_time_gets_one(write):
    """Two are tried, and given up."""
    told, folder = write(f"wait={LONG_US},turns=1", count=16, middle=15)
    assert not any(told["answers"]) and told["most"] == [2, 1], told
    assert numbers(folder / "packs/00/p.pack") == list(range(16))


def test_past_the_page_cache(write, tmp_path):
    """Blocks are allocated ahead, and cut in the end."""
    told, folder = write(f"wait={SHORT_US}", count=40, folder=tmp_path)
    assert not any(told["answers"]), told
    pack = folder / "packs/00/p.pack"
    assert numbers(pack) == list(range(40))
    assert abs(pack.stat().st_blocks * 512 - 40 * BUFFER) < 1 << 20


@pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", [1, 11, 23])
def test_one_of_many_fails(write, error, at, lent):
    """The error is told, by an append and by the seal, or by the seal alone; there is no file."""
    told, folder = write(f"wait={SHORT_US},do=fail,errno={error},at={at}", count=23, lent=lent)
    assert told["answers"][-1] == -error and set(told["answers"][:-2]) <= {0}, told
    assert not list(folder.rglob("*.pack*"))


@pytest.mark.parametrize("words", ["do=short,at=1", "do=short,at=23", f"do=fail,errno={errno.EINVAL},at=1",
                                   f"do=fail,errno={errno.EFAULT},at=2", f"do=fail,errno={errno.EINTR},at=3"])
@pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])
def test_one_of_many_is_short_or_made_again(write, words, lent, tmp_path):
    if re.search(f"errno=({errno.EINVAL}|{errno.EFAULT}),", words) and not past_the_cache(tmp_path):
        pytest.skip("no O_DIRECT here")
    told, folder = write(f"wait={SHORT_US},{words}", count=32, folder=tmp_path, lent=lent)
    assert not any(told["answers"]), told
    assert numbers(folder / "packs/00/p.pack") == list(range(32))
    bytes_ = (folder / "packs/00/p.pack").read_bytes()
    assert not lent or all(bytes_[at + (1 << 20):at + (3 << 20)] == b"lent" * (1 << 19)
                           for at in range(0, len(bytes_), BUFFER))


@pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])
def test_giving_up_leaves_nothing(write, lent):
    told, folder = write(f"wait={SHORT_US}", count=40, end="abandon", lent=lent)
    assert not any(told["answers"]) and not list(folder.rglob("*.pack*")), told
