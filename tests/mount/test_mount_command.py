# SPDX-License-Identifier: Apache-2.0
"""vckpt mount and vckpt umount: the program is found, its options reach it, and only what is ours is ended."""
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import sys
import threading

import pytest

import vckpt as package
from vckpt import paths

from .conftest import daemons, mount_of, wait_until
from .test_options import call, one, place, root     # noqa: F401 (fixtures)


@pytest.fixture
def point(tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    yield point
    while mount_of(point) and subprocess.run(["umount", "-l", point], capture_output=True, timeout=120).returncode == 0:
        pass


def test_a_path_in_a_mount_is_no_store(vckpt, one, point, tmp_path):
    """The package says where the store is."""
    vckpt("mount", one, point)
    (tmp_path / "link").symlink_to(point)
    for path, inside in (("mnt", ""), ("mnt/a", "/a"), ("mnt/a/latest", "/a/step-00000001"), ("link/a/9", "/a/9"),
                         ("mnt/a/latest/model.safetensors", "/a/step-00000001"), ("mnt/b", "/b")):
        for resolve in paths.resolve, package.open, package.steps, lambda path: package.save(path, {"w": 1}):
            with pytest.raises(package.NotAStore) as e:
                resolve(tmp_path / path)
            text = str(e.value.args[1])
            assert text.startswith(f"{tmp_path / path} is in {point}, where the store {one} is mounted: ")
            assert text.endswith(f": {one}{inside}"), text
    vckpt("umount", point)
    assert paths.resolve(tmp_path / "mnt/a").init


def test_mount_and_umount(vckpt, one, point, tmp_path, monkeypatch):
    assert vckpt("mount", one, point, "-o", "uid=7", "-oumask=077,refresh=2").stdout == ""
    kind, source, _ = mount_of(point)
    assert (kind, source) == ("fuse.vckpt", str(one))
    status = os.stat(point / "a/latest/model.safetensors")
    assert (status.st_uid, status.st_mode & 0o777) == (7, 0o600)
    monkeypatch.chdir(tmp_path)
    assert vckpt("umount", "mnt/").stdout == f"{point} is unmounted\n"
    assert not mount_of(point) and wait_until(lambda: not daemons(point))
    vckpt("mount", "mnt", env={"VCKPT_STORE": str(one)})
    assert vckpt.json("umount", point) == {"mountpoint": str(point)} and not mount_of(point)


def test_in_the_foreground(vckpt, one, point):
    with subprocess.Popen([vckpt.path, "mount", "-f", str(one), str(point)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as child:
        try:
            assert wait_until(lambda: (point / "a/latest").exists())
            assert child.poll() is None
            vckpt("umount", point)
            assert child.wait(120) == 0
        finally:
            child.kill()  # or the test would wait for it, whatever failed


def test_busy_for_a_moment(vckpt, one, point):
    """By no process, such as while another one's df is under way: here another mount is inside. It is waited for."""
    vckpt("mount", one, point)
    subprocess.run(["mount", "-t", "tmpfs", "none", point / "a"], check=True)
    end = threading.Timer(0.5, subprocess.run, [["umount", point / "a"]])
    end.start()
    vckpt("umount", point)
    end.join()
    assert not mount_of(point)


def test_errors_of_mount(vckpt, one, point, tmp_path):
    done = vckpt("mount", one, point, "-o", "nonsense", check=False)
    assert (done.returncode, done.stderr) == (1, "mount.vckpt: unknown option 'nonsense' (-s ignores those)\n")
    done = vckpt("mount", one, tmp_path / "none", check=False)
    assert (done.returncode, done.stderr) == (32,
                                              f"mount.vckpt: mount point {tmp_path}/none: No such file or directory\n")
    done = vckpt("mount", tmp_path / "none", point, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"vckpt mount: {tmp_path}/none: ")
    assert vckpt("mount", one, check=False).stderr.startswith("vckpt mount: MOUNTPOINT is missing (see vckpt mount "
                                                              "--help)\nusage: ")
    assert vckpt("mount", one, point, "--fake",
                 "-v").stdout.startswith(f"mount.vckpt: {one} could be mounted on {point}")
    assert not mount_of(point)
    assert "mount.vckpt(8)" in vckpt("mount", "--help").stdout


@pytest.mark.parametrize("where", ["beside", "sbin", "build", "path"])
def test_where_the_program_is_found(vckpt, tmp_path, where):
    """The program beside vckpt counts before that in PATH."""
    there = {"beside": "bin", "sbin": "sbin", "build": "fs", "path": "path"}
    own = tmp_path / ("tools/vckpt" if where == "build" else "bin") / "vckpt"
    own.parent.mkdir(parents=True)
    shutil.copy(vckpt.path, own)
    (tmp_path / "mnt").mkdir()
    call(own, "init", tmp_path / "store")
    for name in {"path", there[where]}:
        (tmp_path / name).mkdir(exist_ok=True)
        program = tmp_path / name / "mount.vckpt"
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    done = call(own, "mount", "-f", tmp_path / "store", tmp_path / "mnt", "-o", "a,b", "-o", "c=d",
                env={"PATH": f"{tmp_path}/path:/bin"})
    assert done.stdout == f"{there[where]} --foreground -o a,b -o c=d -- {tmp_path}/store {tmp_path}/mnt\n", done.stderr


@pytest.mark.skipif(any(os.path.exists(f"/{d}/mount.vckpt") for d in ("sbin", "usr/sbin")),
                    reason="mount.vckpt is installed on this machine")
def test_a_program_that_is_not_there(vckpt, tmp_path):
    shutil.copy(vckpt.path, tmp_path / "vckpt")
    call(tmp_path / "vckpt", "init", tmp_path / "store")
    done = call(tmp_path / "vckpt", "mount", tmp_path / "store", tmp_path, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "vckpt mount: mount.vckpt is not there: neither beside vckpt nor in "
                                              "PATH, /sbin or /usr/sbin\n")


@root
def test_what_is_no_vckpt_mount(vckpt, one, point, tmp_path):
    said = lambda path: vckpt("umount", path, check=False).stderr
    assert said(point) == f"vckpt umount: {point}: nothing is mounted there\n"
    assert said(point / "none") == f"vckpt umount: mount point {point}/none: No such file or directory\n"
    assert said("/proc") == "vckpt umount: /proc: not a vckpt mount: proc (proc) is mounted there\n"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], check=True)
    assert vckpt("umount", point, check=False).returncode == 1 and mount_of(point)[0] == "tmpfs"
    subprocess.run(["umount", point], check=True)
    vckpt("mount", one, point)
    assert said(point / "a") == f"vckpt umount: {point}/a: not a mount point; it is in the vckpt mount {point}\n"
    assert mount_of(point)
    (tmp_path / "link").symlink_to(point)
    assert vckpt("umount", tmp_path / "link").stdout == f"{point} is unmounted\n"


@root
@pytest.mark.parametrize("how", ["file", "cwd", "map"])
def test_a_mount_in_use(vckpt, one, point, how):
    vckpt("mount", one, point)
    file = point / "a/latest/model.safetensors"
    command = {"file": ["sh", "-c", f"exec 3<{file}; echo; read x"], "cwd": ["sh", "-c", f"cd {point}; echo; read x"],
               "map": [sys.executable, "-c", f"import mmap; f=open('{file}'); m=mmap.mmap(f.fileno(), 0, "
                       f"prot=mmap.PROT_READ); f.close(); print(flush=True); input()"]}[how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout.readline() == "\n"
        done = vckpt("umount", point, check=False)
        assert done.returncode == 1 and mount_of(point)
        name = pathlib.Path(f"/proc/{user.pid}/comm").read_text().strip()
        assert (done.stderr.startswith(f"vckpt umount: {point} is in use by {name} ({user.pid}): ") and
                "--lazy" in done.stderr)
        vckpt("umount", "--lazy", point)
        assert not mount_of(point)
        user.communicate("\n")
    assert wait_until(lambda: not daemons(point))


@root
def test_many_users_of_a_mount(vckpt, one, point):
    vckpt("mount", one, point)
    users = [subprocess.Popen(["cat"], cwd=point, stdin=subprocess.PIPE) for _ in range(5)]
    said = vckpt("umount", point, check=False).stderr
    for user in users:
        user.communicate()
    assert said.count("cat (") == 3 and " and 2 more: " in said
    vckpt("umount", point)


def test_a_dead_mount(vckpt, one, point):
    vckpt("mount", one, point)
    for pid in daemons(point):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not daemons(point))
    assert vckpt("umount", point).stdout == f"{point} is unmounted\n" and not mount_of(point)


def test_a_dead_mount_is_no_store(vckpt, one, point):
    """With VCKPT_STORE the mount point alone is named, and is taken over where its daemon died."""
    vckpt("mount", one, point)
    for pid in daemons(point):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not daemons(point))
    vckpt("mount", point, env={"VCKPT_STORE": str(one)})
    assert ("a" in os.listdir(point) and vckpt("umount", point).stdout == f"{point} is unmounted\n" and
            not mount_of(point))


@root
@pytest.mark.skipif(not os.path.exists("/etc/mtab"), reason="there is no /etc/mtab: fusermount3 cannot unmount")
def test_a_normal_user_and_his_mount(vckpt, place):
    shutil.copy(vckpt.path, place / "vckpt")
    user = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
    done = call(place / "vckpt", "mount", place / "store", place / "mnt", **user)
    assert done.returncode == 0 and mount_of(place / "mnt"), done.stderr
    words = ["sh", "-c", 'cd "$0" && echo && exec cat', place / "mnt"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **user) as holder:
        holder.stdout.readline()
        done = call(place / "vckpt", "umount", place / "mnt", **user)
        assert (done.returncode == 1 and done.stderr.startswith(f"vckpt umount: {place}/mnt is in use by ") and
                f" ({holder.pid}): " in done.stderr), done.stderr
        holder.communicate()
    done = call(place / "vckpt", "umount", place / "mnt", **user)
    assert (done.returncode, done.stdout) == (0, f"{place}/mnt is unmounted\n"), done.stderr
    call(place / "mount.vckpt", place / "store", place / "mnt")
    done = call(place / "vckpt", "umount", "--lazy", place / "mnt", **user)
    assert (done.returncode, done.stderr) == (1, f"vckpt umount: {place}/mnt: fusermount3 cannot unmount it: it is in "
                                              f"use, or another user mounted it\n")
    assert wait_until(lambda: call(place / "vckpt", "umount", place / "mnt").returncode == 0 or
                      not mount_of(place / "mnt"))
