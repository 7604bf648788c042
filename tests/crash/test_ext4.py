# SPDX-License-Identifier: Apache-2.0
"""A real ext4, on a loop device, that gives up its journal while two ranks save: after an error (`errors=remount-ro`;
fsync answers EROFS then), because it is shut down (EIO), or because the device does not take it (fsync may answer 0
then). What was not in the journal by then is gone at the next mount: no save that a rank was told "saved" may be, and
the store goes on."""
import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import time

import pytest

from crashlib import DRIVERS, LIMIT_S, UNDECIDED, Bench, Job, goes_on, sound, steps
import storelow as low

SHUTDOWN = 0x8004587D   # EXT4_IOC_SHUTDOWN; its argument: 0 writes everything first, 1 the journal, 2 nothing
START_MS = 1500         # a rank asks for so long what became of its save
WORLD = 2


@pytest.fixture(scope="module", params=DRIVERS)
def bench(lib, build, request):
    b = Bench(lib, build, request.param)
    yield b
    b.close()


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{words[0]}: {(done.stderr or done.stdout).strip()}"


class Ext4:
    """An image that holds a copy of the bench's store. It lies in a tmpfs, where its journal takes room only as it is
    written."""

    def __init__(self, bench):
        self.under, self.at = bench.dir / "under", bench.dir / "ext4"
        self.image, self.filler = self.under / "ext4.img", self.under / "filler"
        self.under.mkdir(exist_ok=True)
        self.at.mkdir(exist_ok=True)
        self.store = self.at / "store"

    def make(self, bench):
        if os.geteuid() != 0:
            pytest.skip("needs root, to mount an ext4 image on a loop device")
        if not shutil.which("mkfs.ext4"):
            pytest.skip("needs mkfs.ext4")
        wrong = command("mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", self.under)
        if wrong:
            pytest.skip(f"a tmpfs cannot be mounted here ({wrong})")
        with open(self.image, "wb") as f:
            f.truncate(64 << 20)
        wrong = command("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_journal_init=1", self.image) or self.mount()
        if wrong:
            pytest.skip(f"an ext4 image cannot be mounted on a loop device here ({wrong})")
        shutil.copytree(bench.base, self.store)
        os.sync()

    def mount(self):
        return command("mount", "-t", "ext4", "-o", "loop,errors=remount-ro", self.image, self.at)

    def again(self):
        """As after a restart of the machine: what the journal holds, and nothing else."""
        wrong = "mounted"
        for _ in range(300):
            wrong = wrong and command("umount", self.at)
            if not wrong and not self.looped():
                break
            time.sleep(0.1)
        self.filler.unlink(missing_ok=True)
        assert not wrong and not self.looped() and not self.mount(), wrong

    def looped(self):
        """Who made a mount namespace meanwhile keeps the old mount, with the journal that is gone, and a new one would
        be the same."""
        return subprocess.run(["losetup", "-j", self.image], capture_output=True, text=True, check=True).stdout

    def close(self):
        for at in (self.at, self.under):
            if os.path.ismount(at):
                command("umount", "-l", at)

    def fill(self):
        """The tmpfs is full: what the image has no room for yet cannot be written, the next of the journal first of
        all."""
        with open(self.filler, "wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
            while True:
                f.write(bytes(1 << 16))

    def break_journal(self, how):
        if how == "an error":
            device = pathlib.Path(subprocess.run(["findmnt", "-no", "SOURCE", self.at], capture_output=True, text=True,
                                                 check=True).stdout.strip()).name
            pathlib.Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test of vckpt")
            return
        fd = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(fd)


@pytest.fixture
def ext4(bench):
    e = Ext4(bench)
    try:
        e.make(bench)
        yield e
    finally:
        e.close()


def shown(bench, ext4):
    api = bench.open(ext4.store)
    try:
        return sound(api, {0: steps(api)[0]})
    finally:
        api.close()


def entry_not_synced(bench, ext4, how, words=""):
    """Rank 1 stops when its part is there, rank 0 between the commit entry's name and the fsync of the list; the
    journal goes; both wake up. Returns what was told, and what is left of it."""
    stops = {0: "path=runs/r/000000000003,do=stop,when=after,calls=linkat,at=1",
             1: "path=part.1,do=stop,when=after,calls=linkat,at=1"}
    job = Job(bench.build, ext4.store, "stopped", world=WORLD, driver=bench.driver,
              inject={r: f"{stop}{words}" for r, stop in stops.items()},
              start_ms=START_MS)
    try:
        end = time.monotonic() + LIMIT_S
        while job.state(0) != "T" or job.state(1) != "T":
            assert time.monotonic() < end and "X" not in (job.state(0), job.state(1)), [job.text(r) for r in (0, 1)]
            time.sleep(0.01)
        ext4.break_journal(how)
        for rank in stops:
            job.signal(rank, signal.SIGCONT)
        out = job.wait(timeout=LIMIT_S)
    finally:
        job.close()
    ext4.again()
    return {step for o in out.values() for step, _ in o.saved}, shown(bench, ext4), out


def entry_lost(bench, ext4, how, words=""):
    """The same, until the entry is lost indeed: the kernel may write its journal of its own accord while the ranks
    stand still (once in 25 rounds or so)."""
    for _ in range(6):
        told, now, out = entry_not_synced(bench, ext4, how, words)
        if set(now) == {0}:
            return told, now, out
        assert told <= set(now) == {0, 1}, (told, now, out)
        ext4.close()
        ext4.make(bench)
    pytest.fail("six times in a row the entry was in the journal before it was asked for")


@pytest.mark.parametrize("how", ["an error", 2], ids=["an error", "shut down"])
def test_an_entry_that_was_not_synced(bench, ext4, how):
    told, now, out = entry_lost(bench, ext4, how)
    assert not told and all(o.failed[0][0] == UNDECIDED for o in out.values()), out
    goes_on(bench, ext4.store, now)


def test_a_store_that_believes_erofs_is_found_out(bench, ext4):
    """The test's own test."""
    told, now, out = entry_lost(bench, ext4, "an error", ",believe=1")
    assert told == {1}, (now, out)


def test_an_fsync_that_answers_0(lib, ext4):
    """The journal cannot be written, and whoever waited for it was told. The next fsync knows nothing of it."""
    with low.Storage(lib, ext4.store, 0) as s:
        ext4.fill()
        (ext4.store / "runs/r/lost").touch()
        fd = os.open(ext4.at, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(fd)
        os.close(fd)
        for _ in range(2):
            with pytest.raises(OSError) as e:
                s.sync_dir("runs/r")
            assert e.value.errno in (errno.EROFS, errno.EIO)
    ext4.again()
    assert not (ext4.store / "runs/r/lost").exists()


@pytest.mark.parametrize("how", ["an error", 0, 1, 2],
                         ids=["an error", "all written", "journal written", "nothing written"])
def test_at_any_moment(bench, ext4, scale, how, rng):
    lost = 0
    for i in range(scale(2, 20)):
        before = shown(bench, ext4)
        job = Job(bench.build, ext4.store, f"launch {i}", saves=200, world=WORLD, driver=bench.driver, inject={},
                  start_ms=START_MS)
        try:
            while not job.text(1).count("saved"):
                assert job.state(1) != "X", job.text(1)
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
            ext4.break_journal(how)
            out = job.wait(timeout=LIMIT_S)
        finally:
            job.close()
        ext4.again()
        now = shown(bench, ext4)
        told = {step for o in out.values() for step, _ in o.saved}
        assert set(before) | told <= set(now), (sorted(set(before) | told), sorted(now))
        assert told and len(told) < 200, "it was over before the journal was given up"
        lost += all(o.failed for o in out.values())
        goes_on(bench, ext4.store, now, f"after {i}")
    assert lost
