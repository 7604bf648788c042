# SPDX-License-Identifier: Apache-2.0
"""The command line, mount(8), mount points, users, and how a mount ends."""
import ctypes
import fcntl
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import time

import pytest

from proclib import open_files

from .conftest import Mount, daemons, keeper_of, mount_of, small_source, wait_until

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def one(store, vckpt, tmp_path):
    vckpt("import", store, "a/1", small_source(tmp_path / "s/model.safetensors"))
    return store


def call(program, *words, **more):
    return subprocess.run([str(program), *map(str, words)], capture_output=True, text=True, timeout=60, **more)


# ---- parsing ----

def test_help_and_version(program):
    assert call(program, "--help").stdout.startswith("usage: mount.vckpt")
    assert call(program, "-V").stdout.startswith("mount.vckpt ")
    for option in ("-V", "-h"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([program, option], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 2 and "standard output" in done.stderr


@pytest.mark.parametrize("words", [
    [], ["S"], ["S", "D", "E"], ["-x", "S", "D"], ["--what", "S", "D"], ["S", "D", "-o"], ["S", "D", "-o", "nonsense"],
    ["S", "D", "-o", "nonsense=1"],
    ["S", "D", "-o", "uid=x"], ["S", "D", "-o", "uid=-1"], ["S", "D", "-o", "umask=9"], ["S", "D", "-o", "umask=7777"],
    ["S", "D", "-o", "cache=1Q"],
    ["S", "D", "-o", "cache="], ["S", "D", "-o", "cache=99999999T"], ["S", "D", "-o", "refresh=0"],
    ["S", "D", "-o", "refresh=nan"], ["S", "D", "-o", "log="],
    ["S", "D", "-o", "views="], ["S", "D", "-o", "views"], ["S", "D", "-o", "npy"],
    ["S", "D", "-o", "remount"], ["S", "D", "-o", "uid"], ["", "D"],
])
def test_usage_errors(program, tmp_path, words):
    done = call(program, *words, cwd=tmp_path)
    assert done.returncode == 1, done
    assert done.stderr.startswith("mount.vckpt: ") and done.stderr.count("\n") == 1


IGNORED = ("rw,ro,_netdev,nofail,user,users,noauto,auto,x-systemd.automount,x-gvfs-show,comment=text,defaults,exec,"
           "noexec,suid,dev,noatime,relatime,,default_permissions")


def test_options_that_change_nothing(one, mount):
    m = mount(one, IGNORED)
    assert (m / "a" / "latest").exists()
    kind, source, options = mount_of(m.point)
    assert kind == "fuse.vckpt" and source == str(one)
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(options.split(","))


def test_order_as_mount8_passes_them(program, one, tmp_path, mount):
    (tmp_path / "p").mkdir()
    for flags in (["-n", "-v"], ["-s", "-n", "-o", "rw,whatever=1"], ["-t", "vckpt", "-o", "rw"], ["-ot=1", "-s"]):
        done = call(program, one, tmp_path / "p", *flags)
        assert done.returncode == 0, done.stderr
        assert mount_of(tmp_path / "p")
        subprocess.run(["umount", tmp_path / "p"], check=True)


def test_f_before_is_foreground_and_after_is_fake(program, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    assert call(program, one, point, "-f", "-v").returncode == 0
    assert call(program, "--fake", one, point).returncode == 0
    assert not mount_of(point)
    assert call(program, tmp_path, point, "-f").returncode == 32  # no store
    for flags in (["-f", one, point], [one, point, "--foreground"]):
        child = subprocess.Popen([program, *flags])
        try:
            assert wait_until(lambda: mount_of(point) and (point / "a").exists())
            assert child.poll() is None
            child.send_signal(signal.SIGTERM)
            assert child.wait(120) == 0
        finally:
            child.kill()
        assert not mount_of(point)


@pytest.mark.parametrize("how", ["signal", "umount"])
def test_an_end_before_the_first_answer_is_one_like_any_other(program, one, tmp_path, how):
    point = tmp_path / "p"
    point.mkdir()
    umount = ctypes.CDLL(None, use_errno=True).umount2
    for _ in range(20):
        child = subprocess.Popen([program, "-f", one, point], stderr=subprocess.PIPE, text=True)
        try:
            if how == "signal":
                assert wait_until(lambda: mount_of(point), step=0)
                child.send_signal(signal.SIGTERM)
            else:
                assert wait_until(lambda: umount(os.fsencode(point), 0) == 0, step=0)
            said = child.communicate(timeout=120)[1]
            assert child.returncode == 0 and "mount.vckpt:" not in said, said
        finally:
            child.kill()
        assert not mount_of(point)


def test_systemd_is_told_when_it_works(program, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        child = subprocess.Popen([program, "-f", one, point],
                                 env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")})
        try:
            assert listener.recv(100) == b"READY=1"
            assert (point / "a" / "latest").exists()
        finally:
            child.terminate()
            assert child.wait(120) == 0


@root
def test_another_mount_namespace(own_mounts, program, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    other = subprocess.Popen([*own_mounts, "sleep", "60"])
    try:
        assert wait_until(lambda: os.readlink(f"/proc/{other.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"))
        assert call(program, one, point, "-N", other.pid).returncode == 0
        assert not mount_of(point)
        assert str(point) in pathlib.Path(f"/proc/{other.pid}/mountinfo").read_text()
        subprocess.run(["nsenter", f"--mount=/proc/{other.pid}/ns/mnt", "umount", point], check=True)
        assert wait_until(lambda: not daemons(point))
        assert call(program, one, point, "-N", "/none").returncode == 32
    finally:
        other.kill()
        other.wait()
        for pid in daemons(point):
            os.kill(pid, signal.SIGTERM)


# ---- mount(8) ----

@root
def test_mount_t_vckpt(installed, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    try:
        subprocess.run(["mount", "-t", "vckpt", one, point, "-o", "noatime,views=npy,safetensors,uid=12,_netdev"],
                       check=True, timeout=60)
        assert os.stat(point / "a" / "latest").st_uid == 12
        assert ((point / "a" / "latest" / "model.safetensors").exists() and
                (point / "a" / "latest" / "model" / "w.npy").exists())
        assert mount_of(point)[0] == "fuse.vckpt"
        subprocess.run(["mount", "-f", "-t", "vckpt", one, tmp_path / "q"], timeout=60, capture_output=True)
        assert subprocess.run(["mount", "-t", "vckpt", one, point], capture_output=True, timeout=60).returncode == 32
        assert subprocess.run(["mount", "-t", "vckpt", one, point, "-o", "wrong=1"], capture_output=True,
                              timeout=60).returncode == 1
    finally:
        subprocess.run(["umount", point], check=True)
    assert wait_until(lambda: not daemons(point))


@root
def test_a_line_of_fstab(installed, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    (tmp_path / "fstab").write_text(f"{one} {point} vckpt ro,allow_other,nofail,_netdev,x-systemd.automount 0 0\n")
    subprocess.run(["mount", "-a", "-O", "_netdev", "-T", tmp_path / "fstab"], check=True, timeout=60)
    try:
        subprocess.run(["mount", "-a", "-T", tmp_path / "fstab"], check=True, timeout=60)      # it is mounted already
        assert (point / "a" / "latest" / "model.safetensors").stat().st_size > 0
        assert "allow_other" in open("/proc/self/mountinfo").read().split(str(point), 1)[1].split("\n")[0]
    finally:
        subprocess.run(["umount", point], check=True)


def test_systemd_units(program, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    examples = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples"
    for name, as_name in (("mnt-checkpoints.mount", "mnt-checkpoints.mount"),
                          ("vckpt-mount@.service", "vckpt-mount@mnt-x.service")):
        text = (examples / name).read_text()
        (tmp_path / as_name).write_text(text.replace("ExecStart=mount.vckpt", f"ExecStart={program}"))
        done = subprocess.run(["systemd-analyze", "verify", tmp_path / as_name], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr


# ---- the log ----

def test_a_log_that_nobody_reads(program, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    (tmp_path / "nostore").mkdir()
    os.mkfifo(tmp_path / "log")
    done = call(program, one, point, "-o", f"log={tmp_path}/log")
    assert done.returncode == 1 and f"{tmp_path}/log is a named pipe without a reader" in done.stderr
    with open(os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK), closefd=True) as log:
        assert call(program, tmp_path / "nostore", point, "-o", f"log={tmp_path}/log").returncode == 32
        assert "nostore is not a vckpt store" in log.read()


@pytest.mark.parametrize("flags", [[], ["-f"]])
def test_an_error_before_the_mount_is_told_beside_the_log_too(program, tmp_path, flags):
    for name in ("nostore", "p"):
        (tmp_path / name).mkdir()
    done = call(program, *flags, tmp_path / "nostore", tmp_path / "p", "-o", f"log={tmp_path}/log")
    assert done.returncode == 32 and done.stderr.count("\n") == 1 and "is not a vckpt store" in done.stderr
    assert (tmp_path / "log").read_text().count("is not a vckpt store") == 1


# ---- mount points ----

def test_errors_are_told_by_the_parent(program, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "nostore").mkdir()
    for words, word in (([tmp_path / "none", point], "none"), ([tmp_path / "nostore", point], "nostore"),
                        ([one, tmp_path / "none"], "none"),
                        ([one, tmp_path / "file"], "file"), ([tmp_path / "file", point], "file"),
                        ([one, point, "-o", "log=/none/log"], "/none/log")):
        done = call(program, *words)
        assert done.returncode in (1, 32) and word in done.stderr and done.stderr.count("\n") == 1, done
    assert not daemons(point) and not mount_of(point)


def test_overlap_is_refused(program, one, tmp_path):
    inside = one / "inside"
    inside.mkdir()
    link = tmp_path / "link"
    link.symlink_to(one)
    for store, point in ((one, inside), (one, one), (one, tmp_path), (one, one.parent), (link, inside), (one, link),
                         (one, link / "inside"), (one, "/")):
        done = call(program, store, point)
        assert done.returncode == 32 and "inside" in done.stderr, (store, point, done)


@root
def test_overlap_through_bind_mounts_is_refused(program, one, tmp_path):
    (one / "packs" / "inside").mkdir(parents=True)
    for bound, store, point in ((one, one, "."), (one, one, "packs/inside"), (one / "packs", one, "inside"),
                                (one.parent, one, "."), (one, None, "packs/inside")):
        at = tmp_path.parent / f"{tmp_path.name}-bind"
        at.mkdir()
        subprocess.run(["mount", "--bind", bound, at], check=True)
        try:
            done = call(program, store or at, at / point)
            assert done.returncode == 32, (bound, point, done)
            assert "inside" in done.stderr or "mounted there already" in done.stderr
        finally:
            subprocess.run(["umount", at], check=True)
            at.rmdir()


# A root directory that is no mount point: mountinfo does not have the mount that it is in.
CHROOT = """
cd "$1"
for dir in usr lib lib64 bin sbin proc; do
    [ ! -e "/$dir" ] || { mkdir "$dir" && mount --bind "/$dir" "$dir" || exit 10; }
done
chroot . sh -c '! grep " / / " /proc/self/mountinfo' || exit 11
mkdir bind store/packs/inside other other/store
chroot . sh -c 'mount --bind /store/packs /bind; ./mount.vckpt --fake /store /bind/inside; echo $?; umount /bind
                mount --bind /other /bind; ./mount.vckpt --fake /store /bind/store; echo $?'
"""


@root
def test_overlap_in_a_chroot_is_refused(own_mounts, program, one, tmp_path):
    place = tmp_path / "root"
    place.mkdir()
    shutil.copytree(one, place / "store")
    shutil.copy(program, place / "mount.vckpt")
    done = call(*own_mounts, "sh", "-c", CHROOT, "sh", place)
    assert (done.returncode, done.stdout) == (0, "32\n0\n"), done
    assert done.stderr == "mount.vckpt: the mount point /bind/inside is inside the store /store\n"


def test_an_occupied_mount_point_is_refused(program, one, mount):
    m = mount(one)
    done = call(program, one, m.point)
    assert done.returncode == 32 and "already" in done.stderr
    assert (m / "a" / "latest").exists() and len(m.pids) == 2


@root
def test_another_filesystem_is_left_alone(program, one, tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], check=True)
    try:
        done = call(program, one, point)
        assert done.returncode == 32 and "tmpfs" in done.stderr
        assert mount_of(point)[0] == "tmpfs"
    finally:
        subprocess.run(["umount", point], check=True)


def test_what_a_dead_daemon_left_is_taken_over(one, mount):
    m = mount(one)
    m.kill()

    def dead():
        try:
            os.statvfs(m.point)
        except OSError as e:
            return e.errno == 107  # ENOTCONN

    assert wait_until(dead)
    assert mount_of(m.point)
    again = mount(one, point=m.point)
    assert (again / "a" / "latest" / "model.safetensors").stat().st_size > 0
    again.kill()
    with open(mount(one, point=m.point) / "a" / "latest" / "model.safetensors", "rb") as f:
        assert f.read(8)


# ---- ends ----

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it(one, mount, number):
    m = mount(one)
    os.kill(m.keeper, number)
    assert wait_until(lambda: not m.pids)
    assert not mount_of(m.point) and os.listdir(m.point) == []


def test_sigterm_with_an_open_file(one, mount):
    m = mount(one)
    with open(m / "a" / "latest" / "model.safetensors", "rb", buffering=0) as f:
        f.read(1)
        os.kill(m.keeper, signal.SIGTERM)
        assert wait_until(lambda: not m.pids)
        assert not mount_of(m.point)
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            f.read(100)
        except OSError as e:
            assert e.errno in (107, 103, 5)


def test_umount_ends_it(one, mount):
    m = mount(one)
    m.umount()
    assert not mount_of(m.point)


def test_umount_is_refused_while_a_file_is_open(one, mount):
    m = mount(one)
    with open(m / "a" / "latest" / "model.safetensors", "rb"):
        assert subprocess.run(["umount", m.point], capture_output=True).returncode == 32
        assert (m / "a").exists()
    m.umount()


def test_nothing_of_the_terminal_is_kept(one, mount):
    """A daemon that held its parent's output would block whoever waits for the end of it; subprocess.run did return."""
    m = mount(one)
    for pid in m.pids:
        assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)} == {"/dev/null"}
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) == os.getpgid(pid) == pid


def test_nothing_that_the_caller_has_open_is_kept(program, one, tmp_path):
    """A pipe whose end somebody waits for, a lock, and a number that is above the limit of the moment."""
    read, write = os.pipe()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    high = fcntl.fcntl(write, fcntl.F_DUPFD, 900)
    point = tmp_path / "mnt"
    point.mkdir()
    try:
        done = subprocess.run([str(program), str(one), str(point)], pass_fds=[write, lock, high], timeout=60)
        assert done.returncode == 0 and daemons(point)
        for fd in (write, lock, high):
            os.close(fd)
        os.set_blocking(read, False)
        assert os.read(read, 1) == b""
        with open(tmp_path / "lock") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = {name for pid in daemons(point) for name in open_files(pid)}
        assert str(tmp_path / "lock") not in kept
    finally:
        os.close(read)
        subprocess.run(["umount", str(point)], timeout=120)
        assert wait_until(lambda: not daemons(point))


def test_without_standard_files(program, one, tmp_path):
    """No file of the daemon gets number 0, 1 or 2, which it gives to /dev/null later."""
    point = tmp_path / "mnt"
    point.mkdir()
    try:
        done = subprocess.run(["sh", "-c", 'exec "$0" "$1" "$2" <&- >&- 2>&-', str(program), str(one), str(point)],
                              timeout=60)
        assert done.returncode == 0
        assert (point / "a" / "latest" / "model.safetensors").read_bytes()
        for pid in daemons(point):
            assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)} == {"/dev/null"}
    finally:
        subprocess.run(["umount", str(point)], timeout=120)
        assert wait_until(lambda: not daemons(point))


# ---- options ----

@root
def test_uid_gid_umask(one, mount):
    m, never = mount(one, "uid=1234,gid=4321,umask=027"), mount(one, "uid=1234,gid=4321,umask=0227")
    for path, mode in (("", 0o750), ("a", 0o750), ("a/step-00000001/model.safetensors", 0o640)):
        s = os.stat(m / path)
        assert (s.st_uid, s.st_gid, s.st_mode & 0o7777) == (1234, 4321, mode)
        assert os.stat(never / path).st_mode & 0o7777 == mode & ~0o200


def test_modes_are_those_of_the_store(one, mount):
    os.chmod(one, 0o750)
    m = mount(one)
    assert os.stat(m.point).st_mode & 0o7777 == 0o750
    assert os.stat(m / "a" / "latest" / "model.safetensors").st_mode & 0o7777 == 0o640


@root
def test_what_a_user_copies_is_his(place, program):
    """cp gives a copy the modes that it sees, and chmod and rm need the owner's bit to write in directories."""
    m, user = Mount(program, place / "store", place / "mnt", "allow_other"), 1234
    (place / "his").mkdir()
    os.chown(place / "his", user, user)
    try:
        for words in (["cp", "-r", m / "a" / "step-00000001", place / "his" / "copy"],
                      ["sh", "-c", 'echo x >> "$0/manifest.json"', place / "his" / "copy"],
                      ["rm", "-r", place / "his" / "copy"]):
            done = subprocess.run(words, user=user, group=user, extra_groups=[], capture_output=True, text=True,
                                  stdin=subprocess.DEVNULL, timeout=60)
            assert done.returncode == 0, done.stderr
        for words in (["touch", m / "a" / "new"], ["rm", "-rf", m / "a" / "step-00000001"]):
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert done.returncode == 1 and "Read-only file system" in done.stderr
    finally:
        m.end()


@root
def test_a_private_run_is_private_in_a_mount_for_all(place, program, vckpt, tmp_path):
    """Owner, group and mode are those of the run's directory, and nobody reads who could not enter packs/."""
    store, user, third = place / "store", 1234, 4321
    vckpt("import", store, "b/1", tmp_path / "s/model.safetensors")
    os.chown(store / "runs/b", user, user)
    os.chmod(store / "runs/b", 0o700)
    m = Mount(program, store, place / "mnt", "allow_other", "refresh=0.1")

    def reads(run, uid):
        done = subprocess.run(["cat", m / run / "step-00000001/model.safetensors"], user=uid, group=uid,
                              extra_groups=[], capture_output=True, timeout=60)
        assert done.returncode == 0 or b"Permission denied" in done.stderr
        return done.returncode == 0
    try:
        assert reads("a", third) and reads("b", 0) and reads("b", user) and not reads("b", third)
        for name, mode in (("b", 0o700), ("b/step-00000001", 0o700), ("b/step-00000001/model.safetensors", 0o600)):
            s = os.stat(m / name)
            assert (s.st_uid, s.st_gid, s.st_mode & 0o7777) == (user, user, mode)
        os.chmod(store / "packs", 0o700)
        assert wait_until(lambda: os.stat(m / "a").st_mode & 0o7777 == 0o700)
        assert reads("a", 0) and not reads("a", third)
    finally:
        m.end()


def test_noxattr(one, mount):
    m = mount(one, "noxattr")
    for _ in range(2):
        with pytest.raises(OSError) as e:
            os.getxattr(m / "a" / "latest" / "model.safetensors", "user.vckpt.serving")
        assert e.value.errno == 95
    assert m.count("getxattr") <= 1


def test_fsname_subtype_and_log(one, mount, tmp_path):
    m = mount(one, "fsname=some\\,name", "subtype=vckpt", log=tmp_path / "log")
    assert mount_of(m.point)[1] == "some,name"
    assert (tmp_path / "log").exists()


def test_stats_say_what_is_off(one, mount):
    m, features, end = mount(one), {}, time.monotonic() + 30
    while "watch" not in features and time.monotonic() < end:      # a thread of its own says it, once it watches
        features = {k.split('name="')[1].split('"')[0]: v for k, v in m.stats().items()
                    if k.startswith("vckpt_feature")}
    assert "passthrough" in features and "interrupts" in features      # tests/mount/test_passthrough.py
    assert features["readdirplus"] == features["parallel_dirops"] == 1
    assert {"readahead", "watch", "landlock", "seccomp", "no_new_privs", "capabilities_dropped"} <= set(features)


# ---- users ----

@pytest.fixture
def place(one, program):
    """A directory that a plain user may enter, with a store, the program, and a mount point of his."""
    if not shutil.which("fusermount3"):
        pytest.skip("fusermount3 is not installed")
    user = pwd.getpwnam("nobody")
    place = pathlib.Path("/tmp") / f"vckpt-user-{os.getpid()}"
    place.mkdir(mode=0o755)
    with open("/dev/fuse", "rb") as device:
        fcntl.flock(device, fcntl.LOCK_EX)  # another process that runs such a test would take the mode back
        mode = os.fstat(device.fileno()).st_mode & 0o7777
        os.chmod("/dev/fuse", 0o666)  # as udev leaves it
        try:
            shutil.copytree(one, place / "store")
            shutil.copy(program, place / "mount.vckpt")
            (place / "mnt").mkdir()
            os.chown(place / "mnt", user.pw_uid, user.pw_gid)
            yield place
        finally:
            os.chmod("/dev/fuse", mode)
            subprocess.run(["umount", "-l", place / "mnt"], capture_output=True)
            shutil.rmtree(place)


@root
@pytest.mark.skipif(not os.path.exists("/etc/mtab"), reason="there is no /etc/mtab: fusermount3 cannot unmount")
def test_a_normal_user(place, tmp_path):
    user = pwd.getpwnam("nobody")
    for ending in ("SIGTERM", "fusermount3"):
        done = call(place / "mount.vckpt", place / "store", place / "mnt", user="nobody", group=user.pw_gid,
                    extra_groups=[])
        assert done.returncode == 0, done.stderr
        assert mount_of(place / "mnt")
        pid = keeper_of(place / "mnt")
        look = lambda *w: subprocess.run(w, user="nobody", group=user.pw_gid, extra_groups=[], capture_output=True,
                                         timeout=60)
        got = look("cat", place / "mnt" / "a" / "latest" / "model.safetensors")
        assert got.stdout == (tmp_path / "s/model.safetensors").read_bytes(), got.stderr
        stats = look("cat", place / "mnt" / ".vckpt" / "stats").stdout.decode()
        assert 'name="readahead",why="128 KiB' in stats and "only root may raise it" in stats
        if ending == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        else:
            assert look("fusermount3", "-u", place / "mnt").returncode == 0
        assert wait_until(lambda: not daemons(place / "mnt") and not mount_of(place / "mnt"))
    refused = call(place / "mount.vckpt", place / "store", place / "mnt", "-o", "allow_other", user="nobody",
                   group=user.pw_gid, extra_groups=[])
    if refused.returncode == 0:  # user_allow_other is set on this machine
        subprocess.run(["umount", place / "mnt"], check=True)
    else:
        assert refused.returncode == 32 and "allow_other" in refused.stderr
    # what its dead daemon leaves is taken over through fusermount3
    for _ in range(2):
        done = call(place / "mount.vckpt", place / "store", place / "mnt", user="nobody", group=user.pw_gid,
                    extra_groups=[])
        assert done.returncode == 0, done.stderr
        os.kill(keeper_of(place / "mnt"), signal.SIGKILL)
        assert wait_until(lambda: not daemons(place / "mnt"))


# /etc with what programs need of it, without mtab, for a mount namespace of its own
NO_MTAB = """
mkdir "$1/etc"
for file in passwd group nsswitch.conf fuse.conf ld.so.cache; do [ ! -e "/etc/$file" ] || cp "/etc/$file" "$1/etc"; done
mount --bind "$1/etc" /etc
user() { setpriv --reuid nobody --regid nogroup --clear-groups "$@"; }
user "$1/mount.vckpt" "$1/store" "$1/mnt" || exit 10
user test -e "$1/mnt/a/latest" || exit 11
! user fusermount3 -u "$1/mnt" 2>/dev/null || exit 12
echo daemon; read answer                                # it is killed meanwhile
! user "$1/mount.vckpt" "$1/store" "$1/mnt" || exit 13
ln -s /proc/self/mounts /etc/mtab                       # as the sentence says
user "$1/mount.vckpt" "$1/store" "$1/mnt" || exit 14
user fusermount3 -u "$1/mnt" || exit 15
! grep -q "$1/mnt" /proc/self/mountinfo || exit 16
"""


@root
def test_a_normal_user_without_mtab(own_mounts, place):
    """Containers may lack /etc/mtab: who mounts is told that nobody but root can end it, and what to do."""
    child = subprocess.Popen([*own_mounts, "bash", "-c", NO_MTAB, "bash", place], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "daemon\n", child.communicate()
    for pid in daemons(place / "mnt"):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not daemons(place / "mnt"))
    said = child.communicate("\n", timeout=60)[1]
    assert child.returncode == 0, said
    how = ("there is no /etc/mtab, without which fusermount3 cannot unmount, also when the daemon ends; as root, once: "
           "ln -s /proc/self/mounts /etc/mtab\n")
    assert (f"{place}/mnt: {how}" in said and f"{place}/mnt: left behind by a dead vckpt daemon, and cannot be "
            f"detached: {how}" in said)
