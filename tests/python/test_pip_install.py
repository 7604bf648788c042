# SPDX-License-Identifier: Apache-2.0
"""`pip install .` at the top of the repository: builds the library, installs the package and the commands, and the
package saves and reads without torch."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full
ROOT = pathlib.Path(__file__).resolve().parents[2]

USE = """
import pathlib, sys, numpy, vckpt
store = sys.argv[1]
assert "site-packages" in vckpt.__file__, vckpt.__file__
assert (pathlib.Path(vckpt.__file__).parent / "py.typed").exists()
vckpt.init(store)
state = {"model": {"w": numpy.arange(12.0).reshape(3, 4), "epoch": 7}, "rng": vckpt.rng_state()}
assert vckpt.save(store + "/run", state, attributes={"loss": 0.5}) == 0
step = vckpt.open(store + "/run")
assert numpy.array_equal(step["model/w"], state["model"]["w"])
assert "torch" not in sys.modules
print("saved", vckpt.version())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    where = tmp_path_factory.mktemp("pip")
    clone = where / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(where / "env")], check=True)
    python = where / "env/bin/python"
    env = {name: value for name, value in os.environ.items()
           if name not in ("LD_PRELOAD", "VCKPT_LIBRARY", "VCKPT_BUILD", "PYTHONPATH")}
    done = subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "."], cwd=clone,
                          env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return python, env


def test_the_installed_package_saves_and_reads(installed, tmp_path):
    python, env = installed
    done = subprocess.run([python, "-c", USE, str(tmp_path / "store")], cwd=tmp_path, env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout.startswith("saved "), done.stdout + done.stderr


@pytest.mark.parametrize("command", ["vckpt", "mount.vckpt"])
def test_the_commands_are_beside_its_python(installed, command):
    python, env = installed
    done = subprocess.run([python.parent / command, "--version"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and re.fullmatch(rf"{command} \d+\.\d+\.\d+\n", done.stdout), done.stdout + done.stderr
    assert list(python.parents[1].glob(f"share/man/man[18]/{command}.[18]"))


def test_its_library_shows_nothing_but_the_interface(installed):
    python, env = installed
    library = next(python.parents[1].rglob("libvckpt*.so*"))
    names = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True,
                           check=True).stdout.split("\n")
    shown = {line.split()[-1].partition("@")[0] for line in names if line}
    assert "vckpt_save_begin" in shown and all(name.lower().startswith("vckpt_") for name in shown), sorted(shown)[:20]
