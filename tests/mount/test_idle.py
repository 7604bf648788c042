# SPDX-License-Identifier: Apache-2.0
"""A mount that nobody asks anything sleeps: none of its threads wakes up, and it still sees what comes."""
import os
import time

import pytest

from proclib import statuses

from .conftest import mount_of, small_source, wait_until


def stalled():
    """Microseconds that tasks of this machine have waited for memory."""
    try:
        with open("/proc/pressure/memory") as f:
            return int(f.readline().rpartition("=")[2])
    except OSError:
        return 0


def switches(m):
    """How often each thread of the mount's processes has left the processor, and what it is called."""
    found = {}
    for pid in m.pids:
        for thread, lines in statuses(pid).items():
            found[thread, lines["Name"]] = (int(lines["voluntary_ctxt_switches"]) +
                                            int(lines["nonvoluntary_ctxt_switches"]))
    return found


def settled(m, seconds=0.5):
    """What the first requests caused is done."""
    end = time.monotonic() + 10
    before = switches(m)
    while time.monotonic() < end:
        time.sleep(seconds)
        now = switches(m)
        if now == before:
            return now
        before = now
    return before


@pytest.fixture
def used(mount, store, vckpt, tmp_path):
    """A mount that was read, with two runs in use."""
    for run in ["a", "b"]:
        vckpt("import", store, f"{run}/1", small_source(tmp_path / "w/model.safetensors", 1))
    m = mount(store)
    for run in ["a", "b"]:
        for _ in range(3):
            (m / run / "latest" / "model.safetensors").read_bytes()
    return m


def test_an_idle_mount_never_wakes_up(used, scale):
    if 'vckpt_feature{name="watch",why="inotify' not in (used / ".vckpt" / "stats").read_text():
        pytest.skip("this is no local filesystem")
    for _ in range(3):      # a timer of the mount fires each time; what the kernel asks for by itself does not
        before, waited = settled(used, 1.5), stalled()      # packs are closed a second after their last use
        time.sleep(scale(7, 30))    # longer than any interval of the mount
        after = switches(used)
        # The kernel tells who asked that memory is short, and all in a group when one of them asks no more.
        if stalled() != waited or "PYTEST_XDIST_WORKER" in os.environ:
            for counts in (before, after):
                assert len([counts.pop(key) for key in list(counts) if key[1] == "vckpt-pressure"]) == 1
        assert len(before) >= 4 and mount_of(used.point)
        if after == before:
            break
    stats = (used / ".vckpt" / "stats").read_text() if after != before else ""
    assert after == before, ({thread: after.get(thread, 0) - n for thread, n in before.items()
                              if after.get(thread) != n}, used.server, stats)


def test_a_sleeping_mount_sees_what_comes(used, store, vckpt, tmp_path):
    settled(used)
    vckpt("import", store, "a/2", small_source(tmp_path / "w/model.safetensors", 2))
    assert wait_until(lambda: os.readlink(used / "a" / "latest") == "step-00000002")
    vckpt("import", store, "c/1", small_source(tmp_path / "w/model.safetensors", 3))
    assert wait_until(lambda: "c" in os.listdir(used.point))


def test_who_asks_a_mount_that_was_told_nothing_has_it_look(used, store, vckpt, tmp_path):
    """A filesystem may lose events. The first who asks 5 s after the last look has the lists read, once."""
    settled(used)
    looks = used.stats()["vckpt_refreshes_total"]
    time.sleep(5.2)
    began = time.monotonic()
    os.listdir(used.point)
    assert wait_until(lambda: used.stats()["vckpt_refreshes_total"] >= looks + 2)       # of both runs
    looks = used.stats()["vckpt_refreshes_total"]
    for _ in range(20):
        os.listdir(used.point)
    time.sleep(0.3)
    assert used.stats()["vckpt_refreshes_total"] <= looks + 2 * int((time.monotonic() - began) / 5)
