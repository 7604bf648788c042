# SPDX-License-Identifier: Apache-2.0
"""The two processes of a mount: the keeper, which has privileges and reads nothing of the store, and the server, which
reads and has none. Each of them ends in every way."""
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from proclib import open_files, statuses

from .conftest import Mount, Tensor, daemons, keeper_of, mount_of, wait_until, weights, write_safetensors

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# What the server tries, and what it gets. Anything else would be a way out.
SECCOMP, LANDLOCK = errno.EPERM, errno.EACCES
FORBIDDEN = {
    "read a file outside the store": LANDLOCK, "list a directory outside the store": LANDLOCK,
    "write a file of the store": LANDLOCK, "make a file in the store": LANDLOCK,
    "open the keeper's memory": LANDLOCK,
    "make a directory": SECCOMP, "remove a file": SECCOMP, "rename a file": SECCOMP, "link a file": SECCOMP,
    "make a link": SECCOMP, "cut a file": SECCOMP, "change a mode": SECCOMP, "change an owner": SECCOMP,
    "change times": SECCOMP, "change an attribute": SECCOMP,
    "run a program": SECCOMP, "start a process": SECCOMP, "signal the keeper": SECCOMP,
    "signal a thread of the keeper": SECCOMP, "trace the keeper": SECCOMP, "read the keeper's memory": SECCOMP,
    "take a capability": SECCOMP,
    "mount": SECCOMP, "unmount": SECCOMP, "make a namespace": SECCOMP, "use the network": SECCOMP,
    "use netlink": SECCOMP, "make an io_uring": SECCOMP, "use the calls of x32": errno.ENOSYS,
}


def dead(point):
    """Nobody answers there. (ECONNABORTED: this moment.)"""
    try:
        os.listdir(point)
    except OSError as e:
        assert e.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        return e.errno == errno.ENOTCONN
    return False


@pytest.fixture
def encoded(store, vckpt, tmp_path):
    """A store with one step of bf16 weights, which are stored encoded."""
    rng = np.random.default_rng(5)
    write_safetensors(tmp_path / "m/model.safetensors", {"w": Tensor("BF16", (512, 512), weights(rng, 512 * 512))})
    vckpt("import", store, "a/1", tmp_path / "m/model.safetensors")
    return store


@root
def test_a_decoder_can_do_nothing_but_decode(encoded, program, build, tmp_path, monkeypatch):
    """The forbidden, tried from the place where a piece is decoded."""
    said, point = tmp_path / "said", tmp_path / "mnt"
    monkeypatch.setenv("VCKPT_FORBIDDEN", str(said))
    monkeypatch.setenv("VCKPT_FORBIDDEN_STORE", str(encoded))
    monkeypatch.setenv("VCKPT_FORBIDDEN_MOUNT", str(point))
    monkeypatch.setenv("LD_PRELOAD", str(build / "tests/libforbidden.so"))
    monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    m = Mount(program, encoded, point)
    monkeypatch.delenv("LD_PRELOAD")
    try:
        features = {k.split('name="')[1].split('"')[0]: v for k, v in m.stats().items()
                    if k.startswith("vckpt_feature")}
        if not features["landlock"] or not features["seccomp"]:
            pytest.skip("this kernel has no Landlock or no seccomp")
        assert (point / "a" / "latest" / "model.safetensors").read_bytes()
        lines = said.read_text().rstrip("\0").splitlines()
        assert lines.pop() == "done 0"
        got = {name: int(number) for name, _, number in (line.rpartition(" ") for line in lines)}
        want = {name: number for name, number in FORBIDDEN.items() if name in got or "x32" not in name}
        assert {name: errno.errorcode.get(number, number) for name, number in got.items()} == \
            {name: errno.errorcode[number] for name, number in want.items()}
    finally:
        m.end()


@root
def test_no_thread_of_the_server_has_privileges(encoded, mount):
    m = mount(encoded)
    (m / "a" / "latest" / "model.safetensors").read_bytes()
    threads = statuses(m.server)
    assert len(threads) > 2
    for lines in threads.values():
        assert lines["NoNewPrivs"] == "1" and lines["Seccomp"] == "2"
        assert int(lines["CapEff"], 16) == int(lines["CapPrm"], 16) == 1 << 2  # dac_read_search


@root
def test_the_keeper_keeps_what_unmounting_needs(encoded, mount):
    m = mount(encoded)
    lines = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{m.keeper}/status").read_text().splitlines()
                 if ":\t" in line)
    assert int(lines["CapEff"], 16) == 1 << 21 | 1 << 5 | 1 << 2 and lines["NoNewPrivs"] == "1"
    names = open_files(m.keeper)
    assert "/dev/fuse" not in names and not any(name.startswith(str(encoded)) for name in names)


def test_a_server_that_dies_leaves_a_dead_mount(encoded, mount, tmp_path):
    """And says so. Nobody writes into the empty directory below; the next mount takes the place."""
    m = mount(encoded, log=tmp_path / "log")
    os.kill(m.server, signal.SIGKILL)
    assert wait_until(lambda: not m.pids)
    assert wait_until(lambda: dead(m.point)) and mount_of(m.point)
    assert "was ended by signal 9; the mount stays, dead" in (tmp_path / "log").read_text()
    again = mount(encoded, point=m.point)
    assert (again / "a" / "latest" / "model.safetensors").read_bytes()


def test_a_keeper_that_dies_takes_the_server_along(encoded, mount):
    m = mount(encoded)
    os.kill(m.keeper, signal.SIGKILL)
    assert wait_until(lambda: not m.pids)
    assert wait_until(lambda: dead(m.point)) and mount_of(m.point)


def test_sigterm_to_the_server_unmounts(encoded, mount):
    m = mount(encoded)
    os.kill(m.server, signal.SIGTERM)
    assert wait_until(lambda: not m.pids)
    assert not mount_of(m.point) and os.listdir(m.point) == []


@root
def test_a_mount_above_ours_is_left_alone(encoded, mount, tmp_path):
    """Whoever mounts something over a mount keeps it when the mount below is told to end."""
    m = mount(encoded, log=tmp_path / "log")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    subprocess.run(["mount", "--bind", tmp_path / "other", m.point], check=True)
    try:
        os.kill(m.keeper, signal.SIGTERM)
        assert wait_until(lambda: not m.pids)
        assert (m.point / "file").read_text() == "x"
        assert "another mount is on top of this one, which stays, dead" in (tmp_path / "log").read_text()
    finally:
        subprocess.run(["umount", m.point], check=True)


def test_a_store_that_cannot_be_opened_is_never_mounted(encoded, program, tmp_path):
    (encoded / "vckpt.store").write_bytes(b"no store")
    m = Mount(program, encoded, tmp_path / "mnt", check=False)
    assert m.result.returncode == 32 and "vckpt.store" in m.result.stderr
    assert not mount_of(m.point) and not m.pids


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM])
def test_other_signals_end_nothing(encoded, mount, number):
    """A scheduler may send them to all processes of a job."""
    m = mount(encoded)
    for pid in m.pids:
        os.kill(pid, number)
    wait_until(lambda: len(m.pids) < 2, 0.2)
    assert len(m.pids) == 2 and (m / "a" / "latest" / "model.safetensors").read_bytes()


@root
def test_what_cannot_be_mounted_is_refused_at_once(encoded, program, tmp_path):
    """The server waits for the mount then: it took 7 s until it was ended by force. At best, because other tests have
    the processors, too."""
    point, took = tmp_path / "mnt", []
    point.mkdir()
    while len(took) < 3 and min(took, default=7) > 6:
        began = time.monotonic()
        refused = subprocess.run([program, encoded, point, "-o", "context=foo"], capture_output=True, text=True,
                                 timeout=60)
        assert refused.returncode == 32 and "cannot mount on" in refused.stderr
        assert wait_until(lambda: not daemons(point))
        took.append(time.monotonic() - began)
    assert min(took) < 6, took


def test_started_by_who_ignores_its_children(encoded, program, tmp_path):
    """The kernel tells no child's end then, unless it is asked to again."""
    point = tmp_path / "mnt"
    point.mkdir()
    subprocess.run([program, encoded, point], timeout=60, check=True,
                   preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    try:
        subprocess.run(["umount", point], check=True, timeout=120)
        assert wait_until(lambda: not daemons(point))
    finally:
        for pid in daemons(point):
            os.kill(pid, signal.SIGKILL)


def test_nohup(encoded, program, mount, tmp_path):
    m = mount(encoded, point=tmp_path / "plain")
    os.kill(m.keeper, signal.SIGHUP)
    assert wait_until(lambda: not mount_of(m.point))
    point = tmp_path / "mnt"
    point.mkdir()
    subprocess.run(["nohup", program, encoded, point], timeout=60, check=True, stdin=subprocess.DEVNULL,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        os.kill(keeper_of(point), signal.SIGHUP)
        assert not wait_until(lambda: not mount_of(point), 0.2)
    finally:
        subprocess.run(["umount", point], check=True, timeout=120)
        assert wait_until(lambda: not daemons(point))


def test_a_dead_mount_stays_until_another_takes_its_place(encoded, mount, program, tmp_path):
    """Not for a try, nor for a store that cannot be opened."""
    m = mount(encoded)
    m.kill()
    assert wait_until(lambda: dead(m.point))
    subprocess.run([program, encoded, m.point, "-f", "--fake"], timeout=60, check=True)
    assert dead(m.point)
    (tmp_path / "none").mkdir()
    refused = subprocess.run([program, tmp_path / "none", m.point], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 32 and "is not a vckpt store" in refused.stderr
    assert dead(m.point) and mount_of(m.point)
    mount(encoded, point=m.point)
    assert (m / "a" / "latest" / "model.safetensors").read_bytes()


def test_a_dead_mount_in_the_store_is_told_as_that(encoded, mount, program, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    m = mount(encoded, point=other / "mnt")
    m.kill()
    assert wait_until(lambda: dead(m.point))
    shutil.copytree(encoded, other, dirs_exist_ok=True)
    refused = subprocess.run([program, other, m.point], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 32 and f"the mount point {m.point} is inside the store {other}" in refused.stderr


def test_a_mount_that_was_moved_is_unmounted_where_it_is(encoded, mount, tmp_path):
    (tmp_path / "before").mkdir()
    m = mount(encoded, point=tmp_path / "before" / "mnt")
    keeper = m.keeper
    (tmp_path / "before").rename(tmp_path / "after")
    os.kill(keeper, signal.SIGTERM)
    assert wait_until(lambda: not m.pids)
    assert not mount_of(tmp_path / "after" / "mnt") and os.listdir(tmp_path / "after" / "mnt") == []


def test_a_stopped_server_is_ended_by_force(encoded, mount):
    """SIGTERM to the keeper of a server that cannot answer: the mount goes before it, and it goes within seconds."""
    m = mount(encoded)
    os.kill(m.server, signal.SIGSTOP)
    os.kill(m.keeper, signal.SIGTERM)
    assert wait_until(lambda: not mount_of(m.point)) and m.pids
    assert wait_until(lambda: not m.pids)


def test_stats_name_the_server(encoded, mount):
    m = mount(encoded)
    line = next(x for x in (m / ".vckpt" / "stats").read_text().splitlines() if x.startswith("vckpt_info{"))
    assert f'pid="{m.server}"' in line
