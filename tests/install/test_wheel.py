# SPDX-License-Identifier: Apache-2.0
"""tools/wheel: the wheel brings the libraries that it uses. Optimization is off here: it takes most of the time."""
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy
import pytest

pytestmark = pytest.mark.full
ROOT = pathlib.Path(__file__).resolve().parents[2]
BROUGHT = ["libcrypto", "libfuse3", "libjansson", "liblmdb", "liblz4", "libprotobuf-c", "libxxhash"]
USE = """
import pathlib, sys, numpy, vckpt
assert sys.prefix in vckpt.__file__
assert vckpt.save(sys.argv[1], {"model": {"w": numpy.arange(12.0)}}) == 0
assert (vckpt.Step(sys.argv[1]).read("model", "w") == numpy.arange(12.0)).all()
maps = pathlib.Path("/proc/self/maps").read_text()
print(*sorted({line.split("/")[-1].partition("-")[0] for line in maps.splitlines() if "vckpt.libs/" in line}))
"""


def plain_environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VCKPT_", "LD_", "PYTHON", "ASAN_", "UBSAN_"))}
    return {**env, "LD_LIBRARY_PATH": ""}


def built():
    """By Debian's own Python, where it is there: the oldest pip."""
    env = plain_environment()
    if subprocess.run(["/usr/bin/python3", "-c", "import ensurepip"], capture_output=True).returncode == 0:
        env["PATH"] = f"/usr/bin:{env['PATH']}"
    done = subprocess.run([ROOT / "tools/wheel", "-Csetup-args=-Doptimization=0"], env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return ROOT / done.stdout.splitlines()[-1]


def installed(wheel, where):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True)
    done = subprocess.run([sys.executable, "-m", "pip", "--python", where / "bin/python", "install", "--quiet",
                           "--no-index", "--no-deps", wheel],
                          env=plain_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return where / "bin/python"


def check_contents(wheel):
    assert "-py3-none-manylinux_2_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for library in BROUGHT:
        assert [name for name in names if name.startswith(f"vckpt.libs/{library}-")], library
    notices = {name.split("/")[-1] for name in names if "dist-info/licenses/" in name}
    assert {"LICENSE", "libfuse3-3", "liblmdb0", "liblz4-1"} <= notices


def check_package(python, path):
    # numpy of the tests: nothing is fetched
    env = {**plain_environment(), "PYTHONPATH": str(pathlib.Path(numpy.__file__).parents[1])}
    done = subprocess.run([python, "-c", USE, path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= {"libcrypto", "liblmdb", "liblz4", "libprotobuf", "libxxhash"}


def check_command(path):
    done = subprocess.run([path, "--version"], env={**plain_environment(), "LD_DEBUG": "libs"}, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"{path.name} "), done.stderr[-1000:]
    assert "vckpt.libs/libcrypto-" in done.stderr


def test_the_wheel_brings_its_libraries(tmp_path):
    """One test: it builds in a folder of the checkout, which two at once would spoil."""
    wheel = built()
    check_contents(wheel)
    python = installed(wheel, tmp_path / "env")
    check_package(python, tmp_path / "store/run")
    check_command(python.parent / "vckpt")
    check_command(python.parent / "mount.vckpt")
