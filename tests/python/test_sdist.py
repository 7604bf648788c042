# SPDX-License-Identifier: Apache-2.0
"""`pip install .` of what git has committed, by way of an sdist, into an environment of its own; a step saved with
it."""
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = """
import numpy, pathlib, sys, vckpt
store = pathlib.Path(sys.argv[1])
vckpt.init(store)
assert vckpt.save(store / "run", {"model": {"w": numpy.arange(6)}}, pin="no") == 0
assert vckpt.open(store / "run")["w"].numpy().tolist() == [0, 1, 2, 3, 4, 5]
assert "torch" not in sys.modules and (pathlib.Path(vckpt.__file__).parent / "py.typed").exists()
print(vckpt.__file__)
"""


@pytest.mark.full
def test_sdist_and_wheel(tmp_path, monkeypatch):
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("an sdist is made from a git checkout")
    monkeypatch.delenv("PYTHONPATH")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, "build", "numpy"], check=True)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run([python, "-m", "build", "--sdist", "--outdir", tmp_path / "dist", clone], check=True,
                   capture_output=True)
    (sdist,) = (tmp_path / "dist").glob("vckpt-*.tar.gz")
    subprocess.run([python, "-m", "pip", "install", *quiet, sdist], check=True)
    done = subprocess.run([python, "-c", SCRIPT, tmp_path / "store"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout
