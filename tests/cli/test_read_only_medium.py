# SPDX-License-Identifier: Apache-2.0
"""A store that takes no change: every command that would write says so in one sentence, and those that read go on."""
import errno
import os
import shutil
import subprocess
import sys

import numpy
import pytest
from _pytest.tmpdir import tmp_path_factory  # noqa: F401 (chattr is for disks)
from safetensors.numpy import save_file

WRITING = [["import", "{}", "r/9", "{source}"], ["import", "{}", "r", "{source}"], ["import", "{}", "new", "{source}"],
           ["rm", "{}", "r/1"], ["gc", "{}"], ["gc", "{}", "--grace", "0"]]
READING = [["ls", "{}"], ["info", "{}", "r/1"], ["verify", "{}"], ["gc", "{}", "-n"], ["mend", "{}"],
           ["rm", "{}", "r/1", "-n"]]
SAVE = """
import sys, numpy, vckpt
try:
    vckpt.save(sys.argv[1] + "/r", {"m": {"w": numpy.zeros(3)}}, step=9, pin="no")
    vckpt.close()
except vckpt.Error as e:
    sys.exit(f"python: {e}")
"""


@pytest.fixture
def filled(vckpt, store, tmp_path):
    save_file({"w": numpy.zeros((300, 200), "f4")}, tmp_path / "w.safetensors")
    vckpt("import", store, "r/1", tmp_path / "w.safetensors", "-q")
    return store


def words(template, store, tmp_path):
    return [w.format(store, source=tmp_path / "w.safetensors") for w in template]


# squashfs and others answer EINVAL to the fsync of a directory
@pytest.mark.parametrize("fsync", [0, errno.EINVAL], ids=["fsync", "no fsync"])
def test_a_medium_that_is_mounted_read_only(vckpt, build, filled, tmp_path, fsync):
    mount = ["unshare", "--mount", "sh", "-c",
             'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"', filled]
    if os.geteuid() != 0 or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    env = {k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}
    if fsync:
        interpose = {"LD_PRELOAD": str(build / "tests/libinterpose.so"), "VCKPT_INTERPOSE":
                     f"root={filled},calls=fsync,at=1,last=1000000,do=fail,errno={fsync}"}
        mount[-2] = mount[-2].replace("exec", "exec env " + " ".join(f"'{k}={v}'" for k, v in interpose.items()))
        if env.get("VCKPT_PRELOAD"):
            pytest.skip("two libraries would be preloaded")
    sentence = f"{filled}: Read-only file system: the store can be read there, and not changed\n"
    for template in WRITING:
        done = subprocess.run([*mount, vckpt.path, *words(template, filled, tmp_path)], env=env, capture_output=True,
                              text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, f"vckpt {template[0]}: {sentence}"), template
    for template in READING:
        done = subprocess.run([*mount, vckpt.path, *words(template, filled, tmp_path)], env=env, capture_output=True,
                              text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), template
    done = subprocess.run([*mount, sys.executable, "-c", SAVE, filled], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"python: {sentence}"


@pytest.mark.parametrize("name", ["runs/r", "packs", "incoming/r", "hosts"])
def test_a_directory_that_is_protected(vckpt, filled, tmp_path, name):
    if not shutil.which("chattr") or subprocess.run(["chattr", "+i", filled / name], capture_output=True).returncode:
        pytest.skip("chattr does not work here")
    try:
        template = WRITING[3] if name == "runs/r" else WRITING[0]
        save_file({"w": numpy.ones((300, 200), "f4")}, tmp_path / "w.safetensors")
        done = vckpt(*words(template, filled, tmp_path), check=False)
        assert done.returncode == 1 and done.stderr.replace("tensor model/w: ", "") == (
            f"vckpt {template[0]}: {filled}/{name} is protected from changes (chattr +i or +a; lsattr -d shows it)\n")
    finally:
        subprocess.run(["chattr", "-i", filled / name], check=True)
    vckpt("verify", filled)
