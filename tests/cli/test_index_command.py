# SPDX-License-Identifier: Apache-2.0
"""What a writer of the index leaves when it dies."""
import fcntl
import os
import subprocess

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
    vckpt(command, store, timeout=30)           # it would wait a minute for the lock
    assert left.exists()
    os.close(fd)
    vckpt(command, store)
    assert not left.exists()
