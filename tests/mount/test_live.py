# SPDX-License-Identifier: Apache-2.0
"""Steps that come, go and are replaced while the store is mounted."""
import contextlib
import ctypes
import os
import subprocess
import threading
import time

import pytest

from proclib import open_files

from .conftest import small_source, wait_until

SECOND = 1.0


@pytest.fixture
def live(mount, store, vckpt, tmp_path):
    vckpt("import", store, "a/1", small_source(tmp_path / "1/model.safetensors", 1))
    return mount(store)


def steps(m, run="a"):
    return sorted(n for n in os.listdir(m / run) if n.startswith("step-"))


def test_new_steps_and_latest_appear_within_a_second(live, store, vckpt, tmp_path):
    assert os.readlink(live / "a" / "latest") == "step-00000001"
    took = []
    for number in (2, 3, 10):
        path = live / "a" / f"step-{number:08}"
        assert not path.exists()  # and is not remembered as missing
        source = small_source(tmp_path / f"{number}/model.safetensors", number)
        vckpt("import", store, f"a/{number}", source)
        start = time.monotonic()
        assert wait_until(path.exists), "the step does not appear"
        assert wait_until(lambda: os.readlink(live / "a" / "latest") == path.name)
        assert wait_until(lambda: path.name in steps(live))
        took.append(time.monotonic() - start)
        assert (live / "a" / "latest" / "model.safetensors").read_bytes() == source.read_bytes()
    assert min(took) < SECOND, took


def test_a_new_run_appears(live, store, vckpt, tmp_path):
    assert not (live / "b").exists()
    vckpt("import", store, "b/5", small_source(tmp_path / "b/model.safetensors", 5))
    assert wait_until((live / "b").exists)
    assert wait_until(lambda: "b" in os.listdir(live.point))
    vckpt("import", store, "b/6", small_source(tmp_path / "b6/model.safetensors", 6))
    assert wait_until((live / "b" / "step-00000006").exists)


class Events:
    """Counts what inotify says of a directory."""

    ACCESS, CREATE, MOVED_TO = 0x1, 0x100, 0x80

    def __init__(self, path, kinds):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self.fd >= 0 and self.libc.inotify_add_watch(self.fd, os.fsencode(path), kinds) >= 0
        self.count = 0

    def look(self):
        """After each step, since equal events that follow each other are one."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 1 << 16)
            self.count += 1


def test_a_name_that_is_not_there_costs_one_look(mount, store, vckpt, tmp_path):
    """Whatever the store has: no look-up reads the directory of all runs. A run that comes is found all the same."""
    vckpt("import", store, "a/1", small_source(tmp_path / "1/model.safetensors", 1))
    for number in range(300):
        (store / "runs" / f"run-{number}").mkdir()
    m = mount(store)
    assert (m / "a").is_dir() and not (m / "run-7").exists()        # without a step
    reads = Events(store / "runs", Events.ACCESS)
    try:
        for number in range(100):
            assert not (m / f"nothing-{number % 10}").exists()
            reads.look()
        assert reads.count < 10         # of the thread that keeps up
        assert not (m / "b").exists()
        vckpt("import", store, "b/5", small_source(tmp_path / "b/model.safetensors", 5))
        assert (m / "b" / "step-00000005").is_dir()
    finally:
        os.close(reads.fd)
    os.symlink(store / "runs" / "b", store / "runs" / "c")
    (store / "runs" / "file").write_text("")
    assert not (m / "c").exists() and not (m / "file").exists()
    assert len(os.listdir(m.point)) == len(set(os.listdir(m.point)))


def test_what_to_watch_for_new_steps(live, store, vckpt, tmp_path):
    """inotify on a mount hears nothing; on the run's list in a local store it does, as docs/mount.md says."""
    mounted = Events(live / "a", 0xfff)                     # IN_ALL_EVENTS
    stored = Events(store / "runs" / "a", Events.CREATE | Events.MOVED_TO)
    runs = Events(store / "runs", Events.CREATE | Events.MOVED_TO)
    try:
        vckpt("import", store, "a/2", small_source(tmp_path / "2/model.safetensors", 2))
        stored.look()
        runs.look()
        assert stored.count == 1 and runs.count == 0
        assert wait_until(lambda: os.readlink(live / "a" / "latest") == "step-00000002")
        vckpt("import", store, "b/1", small_source(tmp_path / "2/model.safetensors", 2))
        runs.look()
        assert runs.count == 1
        mounted.look()
        assert mounted.count == 0
    finally:
        for events in (mounted, stored, runs):
            os.close(events.fd)


def test_without_a_watch_the_list_is_polled(mount, store, vckpt, tmp_path):
    vckpt("import", store, "a/1", small_source(tmp_path / "1/model.safetensors", 1))
    m = mount(store, "refresh=0.1")
    assert steps(m) == ["step-00000001"]
    vckpt("import", store, "a/2", small_source(tmp_path / "2/model.safetensors", 2))
    assert wait_until(lambda: steps(m) == ["step-00000001", "step-00000002"])


def test_a_reader_stays_open_while_steps_arrive(live, store, vckpt, tmp_path):
    want = (tmp_path / "1/model.safetensors").read_bytes()
    stop, bad, reads = threading.Event(), [], []

    def read():
        with open(live / "a" / "step-00000001" / "model.safetensors", "rb", buffering=0) as f:
            while not stop.is_set():
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if os.pread(f.fileno(), len(want) + 1, 0) != want:
                    bad.append(1)
                reads.append(1)
                os.listdir(live / "a")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    try:
        for number in range(2, 8):
            before = len(reads)
            vckpt("import", store, f"a/{number}", small_source(tmp_path / f"{number}/model.safetensors", number))
            assert wait_until(lambda before=before: len(reads) > before + 4)
    finally:
        stop.set()
        for t in threads:
            t.join(120)
    assert not bad
    assert wait_until(lambda: len(steps(live)) == 7)


def test_removed_steps_vanish_and_open_files_go_on(live, store, vckpt, tmp_path):
    want = (tmp_path / "1/model.safetensors").read_bytes()
    vckpt("import", store, "a/2", small_source(tmp_path / "2/model.safetensors", 2))
    assert wait_until((live / "a" / "step-00000002").exists)
    path = live / "a" / "step-00000001" / "model.safetensors"
    with open(path, "rb", buffering=0) as f:
        assert os.pread(f.fileno(), 10, 0) == want[:10]
        vckpt("rm", store, "a/1")
        assert wait_until(lambda: not path.exists())
        assert wait_until(lambda: steps(live) == ["step-00000002"])
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            assert os.pread(f.fileno(), len(want), 0) == want
        except OSError as e:
            assert e.errno == 116  # ESTALE
        assert os.fstat(f.fileno()).st_size == len(want)
    vckpt("rm", store, "a/2")
    assert wait_until(lambda: not (live / "a").exists()), "a run without a visible step is not shown"
    assert wait_until(lambda: "a" not in os.listdir(live.point))


def test_a_step_that_comes_again_is_another_directory(live, store, vckpt, tmp_path):
    path = live / "a" / "step-00000001"
    old = os.stat(path).st_ino, os.stat(path / "model.safetensors").st_ino
    first = (tmp_path / "1/model.safetensors").read_bytes()
    with open(path / "model.safetensors", "rb", buffering=0) as f:
        vckpt("import", store, "a/9", small_source(tmp_path / "9/model.safetensors", 9))
        vckpt("rm", store, "a/1")
        source = small_source(tmp_path / "again/model.safetensors", 77, n=1500)
        vckpt("import", store, "a/1", source)
        assert wait_until(lambda: path.exists() and os.stat(path).st_ino != old[0])
        assert (path / "model.safetensors").read_bytes() == source.read_bytes()
        assert os.stat(path / "model.safetensors").st_ino != old[1]
        assert os.fstat(f.fileno()).st_ino == old[1]
        try:
            assert os.pread(f.fileno(), len(first) + 1, 0) == first
        except OSError as e:
            assert e.errno == 116


def test_two_directories_being_read_see_no_entry_twice(live, store, vckpt, tmp_path):
    for number in range(2, 6):
        vckpt("import", store, f"a/{number}", small_source(tmp_path / f"{number}/model.safetensors", number))
    assert wait_until(lambda: len(steps(live)) == 5)
    with os.scandir(live / "a") as entries:
        first = next(entries).name
        vckpt("rm", store, "a/2")
        names = [first, *(e.name for e in entries)]
    assert len(names) == len(set(names))
    assert {"latest", "step-00000001", "step-00000003", "step-00000004", "step-00000005"} <= set(names)


def test_an_empty_store_and_its_first_step(mount, store, vckpt, tmp_path):
    m = mount(store)
    assert os.listdir(m.point) == [".vckpt"]
    vckpt("import", store, "first", small_source(tmp_path / "s/model.safetensors"))
    assert wait_until((m / "first" / "latest" / "model.safetensors").exists)
    subprocess.run(["find", m.point, "-ls"], check=True, capture_output=True)


def packs(m):
    """What the server has open of the store's packs."""
    return [path for path in open_files(m.server) if path.startswith(f"{m.store}/packs/")]


def test_a_deleted_pack_is_closed(live, store, vckpt):
    """Though a file of it is open: df shows what a collection freed."""
    with open(live / "a" / "step-00000001" / "model.safetensors", "rb", buffering=0) as f:
        first = f.read(100)
        assert packs(live)
        vckpt("rm", store, "a/1")
        vckpt("gc", store, "--grace", "0")
        assert not list(store.glob("packs/*/*"))
        assert wait_until(lambda: not packs(live)), packs(live)
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with contextlib.suppress(OSError):          # its pieces may be in the cache
            assert os.pread(f.fileno(), 100, 0) == first
