# SPDX-License-Identifier: Apache-2.0
"""A mount that others pass on: file handles, as an NFS server keeps them; an NFS server; autofs."""
import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess

import pytest

from .conftest import mount_of, small_source, wait_until

AT_FDCWD = -100
root = pytest.mark.skipif(os.geteuid() != 0, reason="not root")


def libc_call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    r = getattr(libc, name)(*arguments)
    if r < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return r


def handle_of(path):
    """What open_by_handle_at takes: its length (128 at first), a type, and the handle."""
    handle, number = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 8 + 128), ctypes.c_int()
    libc_call("name_to_handle_at", AT_FDCWD, os.fsencode(path), handle, ctypes.byref(number), 0)
    return handle


@contextlib.contextmanager
def opened(m, handle, flags=os.O_RDONLY):
    point = os.open(m.point, os.O_RDONLY)
    try:
        fd = libc_call("open_by_handle_at", point, handle, flags)
    finally:
        os.close(point)
    try:
        yield fd
    finally:
        os.close(fd)


def end(process):
    """Ends a daemon that others may be waiting for, whatever it does."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def forget_names():
    """The kernel keeps no name and no node that nobody uses."""
    with open("/proc/sys/vm/drop_caches", "w") as f:
        f.write("2")


@root
@pytest.mark.parametrize("tier", ["cached", "passthrough"])
def test_file_handles(mount, sample_store, source, tier):
    m = mount(sample_store, f"tier={tier}")
    step = m / "a" / "step-00000001"
    names = ["model.safetensors", "config.json", "model/embed.weight.npy", "1_Pooling/config.json"]
    want = {name: (step / name).read_bytes() for name in names}
    handles = {name: handle_of(step / name) for name in [*names, "model"]}
    forget_names()
    for name in names:
        with opened(m, handles[name]) as fd:
            assert os.pread(fd, len(want[name]) + 1, 0) == want[name]
    with opened(m, handles["model"], os.O_RDONLY | os.O_DIRECTORY) as fd:
        assert set(os.listdir(fd)) == set(os.listdir(step / "model"))
    assert want["model.safetensors"] == source.safetensors


@root
def test_handles_of_what_went(mount, store, vckpt, tmp_path):
    """A removed step's: its bytes, or ESTALE; those of an earlier mount: ESTALE. Never another file."""
    for step in [1, 2]:
        vckpt("import", store, f"a/{step}", small_source(tmp_path / "w/model.safetensors", step))
    m = mount(store)
    gone, stays = (handle_of(m / "a" / f"step-0000000{step}" / "model.safetensors") for step in [1, 2])
    was = (m / "a" / "step-00000001" / "model.safetensors").read_bytes()
    vckpt("rm", store, "a/1")
    assert wait_until(lambda: not (m / "a" / "step-00000001").exists())
    forget_names()
    for words in [[], ["gc", store, "--grace", "0"]]:
        if words:
            vckpt(*words)
            forget_names()
        try:
            with opened(m, gone) as fd:
                assert os.pread(fd, len(was) + 1, 0) == was
        except OSError as e:
            assert e.errno == errno.ESTALE
    with opened(m, stays) as fd:
        assert os.pread(fd, 10, 0)
    m.umount()
    again = mount(store, "views=npy", point=m.point)
    with pytest.raises(OSError) as e, opened(again, stays):
        pass
    assert e.value.errno == errno.ESTALE


# ---- an NFS server; it needs no NFS of the kernel, on either side ----

GANESHA = """
NFS_CORE_PARAM {{ NFS_Port = {port}; MNT_Port = {mountd}; NLM_Port = {nlm}; Rquota_Port = {quota};
    Enable_NLM = false; Enable_RQUOTA = false; Protocols = 4; Bind_addr = 127.0.0.1;
    mount_path_pseudo = true; Plugins_Dir = /usr/lib/x86_64-linux-gnu/ganesha; }}
NFSv4 {{ Graceless = true; RecoveryRoot = {folder}; }}
EXPORT {{ Export_Id = 7; Path = {path}; Pseudo = /ckpt; Access_Type = RO; Squash = No_Root_Squash; SecType = sys;
    Protocols = 4; Transports = TCP; Filesystem_Id = 7.7; FSAL {{ Name = VFS; }} }}
LOG {{ Default_Log_Level = EVENT; }}
"""


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@root
@pytest.mark.skipif(not (shutil.which("ganesha.nfsd") and shutil.which("nfs-cat")),
                    reason="nfs-ganesha-vfs and libnfs-utils are not installed")
def test_nfs(mount, sample_store, source, tmp_path):
    m = mount(sample_store)
    port, *others = free_ports(4)
    config = tmp_path / "ganesha.conf"
    config.write_text(GANESHA.format(port=port, mountd=others[0], nlm=others[1], quota=others[2], folder=tmp_path,
                                     path=m.point))
    server = subprocess.Popen(["ganesha.nfsd", "-F", "-f", config, "-L", tmp_path / "log", "-p", tmp_path / "pid"])
    try:
        def ask(name):
            url = f"nfs://127.0.0.1/ckpt/a/step-00000001/{name}?version=4&nfsport={port}"
            return subprocess.run(["nfs-cat", url], capture_output=True, timeout=60)

        assert wait_until(lambda: ask("config.json").returncode == 0, step=0.3), (tmp_path / "log").read_text()[-3000:]
        assert ask("config.json").stdout == source.blobs["config.json"]
        for _ in range(2):
            assert hashlib.sha256(ask("model.safetensors").stdout).digest() == \
                hashlib.sha256(source.safetensors).digest()
            forget_names()
    finally:
        end(server)


# ---- autofs ----

@root
@pytest.mark.skipif(not shutil.which("automount"), reason="autofs is not installed")
def test_autofs(installed, sample_store, source, tmp_path):
    point = tmp_path / "auto"
    (tmp_path / "map").write_text(f"ckpt -fstype=vckpt,ro,allow_other :{sample_store}\n")
    (tmp_path / "master").write_text(f"{point} {tmp_path}/map --timeout=2\n")
    with open(tmp_path / "out", "wb") as out:
        # those of its own group see the directories as they are
        daemon = subprocess.Popen(["automount", "-f", "-p", tmp_path / "pid", tmp_path / "master"], stdout=out,
                                  stderr=out, start_new_session=True)
    try:
        def read():         # in a process of its own, which can be ended whatever it waits for
            file = point / "ckpt" / "a" / "latest" / "config.json"
            return subprocess.run(["cat", file], capture_output=True, check=True, timeout=120).stdout

        assert wait_until(lambda: mount_of(point) is not None), (tmp_path / "out").read_text()
        assert read() == source.blobs["config.json"]                            # who looks mounts it
        assert mount_of(point / "ckpt")[0] == "fuse.vckpt"
        assert wait_until(lambda: mount_of(point / "ckpt") is None, step=0.5)     # and it goes when nobody does
        assert read() == source.blobs["config.json"]
    finally:
        end(daemon)
        for path in [point / "ckpt", point]:
            subprocess.run(["umount", "-l", path], capture_output=True)
