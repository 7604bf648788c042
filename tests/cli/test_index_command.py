# SPDX-License-Identifier: Apache-2.0
"""Writers of the index at the same time, what one leaves when it dies, and users who have no place for an index."""
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import tempfile

import numpy
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def left(vckpt, build, store, tmp_path):
    """A store whose index is up to date, and the file of a writer that was killed since."""
    save_file({"w": numpy.arange(30000.0)}, tmp_path / "m.safetensors")
    vckpt("import", store, "run", tmp_path / "m.safetensors")
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, LD_PRELOAD=preload, VCKPT_INTERPOSE=f"root={store},calls=fsync,path=index/,do=kill,at=1",
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    assert subprocess.run([vckpt.path, "index", store, "--rebuild"], env=env, capture_output=True).returncode == -9
    assert (store / "index/index.mdb.new").stat().st_size > 1000
    return store / "index/index.mdb.new"


@pytest.mark.parametrize("command", ["index", "gc"])
def test_what_a_dead_writer_left_is_removed(vckpt, store, left, command):
    made = left.with_suffix("").read_bytes()
    if command == "gc":
        vckpt("gc", store, "--dry-run")
        assert left.exists()
    vckpt(command, store)
    assert not left.exists() and left.with_suffix("").read_bytes() == made


@pytest.mark.parametrize("command", ["index", "gc"])
def test_what_a_writer_at_work_has_stays(vckpt, store, left, command):
    fd = os.open(left.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    vckpt(command, store, timeout=50)           # it would wait a minute for the lock
    assert left.exists()
    os.close(fd)
    vckpt(command, store)
    assert not left.exists()


def test_a_writer_takes_in_what_is_committed_meanwhile(vckpt, build, store, tmp_path):
    """Who commits while another process writes the index leaves the commit to that one, which looks again before it
    publishes."""
    for name, factor in ("a", 1), ("b", 2):
        save_file({"w": factor * numpy.arange(30000.0)}, tmp_path / f"{name}.safetensors")
    vckpt("import", store, "a", tmp_path / "a.safetensors")
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, LD_PRELOAD=preload, VCKPT_INTERPOSE=f"root={store},reads=1,path=manifests,do=stop,at=1",
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    writer = subprocess.Popen([vckpt.path, "index", store, "--rebuild", "--json"], env=env, stdout=subprocess.PIPE)
    try:
        assert os.WIFSTOPPED(os.waitpid(writer.pid, os.WUNTRACED)[1])       # it has read which commits there are
        vckpt("import", store, "b", tmp_path / "b.safetensors")
        assert (store / "index/index.mdb.new").exists()
        writer.send_signal(signal.SIGCONT)
        assert json.loads(writer.communicate(timeout=60)[0])["commits"] == 2
    finally:
        writer.kill()
    assert vckpt.json("import", store, "c", tmp_path / "b.safetensors")["pieces_new"] == 0


def test_without_proc(own_mounts, vckpt, store, tmp_path):
    """LMDB gets the file that was checked through /proc: there is no index then, and all else works."""
    if "asan" in os.environ.get("VCKPT_PRELOAD", ""):
        pytest.skip("AddressSanitizer needs /proc")
    save_file({"w": numpy.arange(30000.0)}, tmp_path / "m.safetensors")

    def run(*words):
        return subprocess.run([*own_mounts, "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"', vckpt.path,
                               *words], capture_output=True, text=True)
    done = run("index", store)
    assert (done.returncode, done.stderr) == (1, f"vckpt index: the index {store}/index cannot be opened without "
                                              f"/proc/self/fd\n")
    assert os.listdir(store / "index") == []
    done = run("import", store, "a", tmp_path / "m.safetensors")
    assert done.returncode == 0 and "the index could not be brought up to date (the step is whole;" in done.stderr
    vckpt("index", store)
    done = run("import", store, "a", tmp_path / "m.safetensors", "-q")      # one that is there cannot be read either
    assert (done.returncode, done.stderr) == (0, "")
    assert run("verify", store).returncode == 0 and len(vckpt.json("ls", store, "a")["steps"]) == 2


# ---- users without HOME ----

NOBODY = 65534


@pytest.fixture
def others(own_mounts, vckpt):
    """A store of root's that everybody may write, but for its index; and run(home, command...) as a user without HOME,
    whose home directory is `home` by /etc/passwd, in a mount namespace."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as name:
        yield from in_folder(own_mounts, vckpt, pathlib.Path(name))


def in_folder(own_mounts, vckpt, folder):
    os.chmod(folder, 0o755)
    save_file({"w": numpy.arange(30000.0)}, folder / "m.safetensors")
    os.chmod(folder / "m.safetensors", 0o644)
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "a", folder / "m.safetensors")
    for path in [folder / "store", *(folder / "store").rglob("*")]:
        if "index" not in path.parts:
            os.chmod(path, 0o777 if path.is_dir() else 0o666)

    def run(home, *args):
        (folder / "passwd").write_text(f"somebody:x:{NOBODY}:{NOBODY}::{home}:/bin/sh\n" if home
                                       else "root:x:0:0::/root:/bin/sh\n")
        env = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        return subprocess.run([*own_mounts, "sh", "-c", 'mount --bind "$0" /etc/passwd && exec "$@"',
                               folder / "passwd", *become,
                               vckpt.path, *map(str, args)], capture_output=True, text=True, env=env)
    if run("/", "--version").returncode:
        pytest.skip("the build folder is not readable for others")
    yield folder, run


@pytest.mark.parametrize("home", ["/nonexistent", "/", ""])
def test_a_user_without_a_home_needs_no_index(others, home):
    folder, run = others
    store = folder / "store"
    for words in [("import", store, "b", folder / "m.safetensors", "-q"), ("rm", store, "b/0", "-q"),
                  ("gc", store, "-q"), ("verify", store, "-q")]:
        done = run(home, *words)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), words
    assert "place for an index" in run(home, "import", store, "c", folder / "m.safetensors", "-v").stderr
    done = run(home, "index", store)
    assert (done.returncode, done.stderr) == (
        1, f"vckpt index: there is no place for an index of {store}: set XDG_CACHE_HOME or HOME (all else works "
        f"without an index)\n")


def test_a_home_that_the_system_knows(others):
    folder, run = others
    (folder / "home").mkdir()
    os.chown(folder / "home", NOBODY, NOBODY)
    done = run(folder / "home", "import", folder / "store", "b", folder / "m.safetensors", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    [index] = (folder / "home/.cache/vckpt").glob("*/index.mdb")
    assert index.stat().st_uid == NOBODY
