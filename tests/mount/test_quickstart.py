# SPDX-License-Identifier: Apache-2.0
"""tools/quickstart after its first run: what is mounted by then may be a mount of other options, as README's tour
leaves one if it is not ended."""
import os
import pathlib
import shutil
import subprocess
import sys

import numpy
import pytest
from safetensors.numpy import save_file

from .conftest import Mount

TOP = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(build, tmp_path):
    """The script in a clone that is built: neither packages nor a build nor a network are needed."""
    folder = tmp_path / "a clone"
    for part in "tools/vckpt", "fs":
        (folder / "build/release" / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build/release" / part).symlink_to(pathlib.Path(build, part).resolve())
    (folder / "build/release/build.ninja").touch()
    (folder / "build/python").symlink_to(sys.prefix)
    (folder / "tools").mkdir()
    shutil.copy(TOP / "tools/quickstart", folder / "tools")
    (folder / "tools/packages").write_text("PACKAGES_BUILD= PACKAGES_START=\npackages_install() { :; }\n")
    (folder / "bin").mkdir()
    (folder / "bin/ninja").write_text("#!/bin/sh\n")
    (folder / "bin/ninja").chmod(0o755)
    save_file({"a": numpy.arange(6, dtype=numpy.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("view, lacks", [("safetensors", ".npy"), ("npy", ".safetensors")])
@pytest.mark.parametrize("name", ["model", "a model of 50%"])
def test_a_mount_of_one_view(clone, vckpt, program, view, lacks, name):
    (clone / "model.safetensors").rename(clone / f"{name}.safetensors")
    vckpt("init", clone / ".vckpt/store")
    m = Mount(program, clone / ".vckpt/store", clone / ".vckpt/mnt", f"views={view}")
    try:
        done = subprocess.run([clone / "tools/quickstart", f"{name}.safetensors"], cwd=clone, text=True,
                              capture_output=True, timeout=300,
                              env={**os.environ, "PYTHONPATH": "", "PATH": f"{clone}/bin:{os.environ['PATH']}"})
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"skipped: what is mounted there shows no {lacks} files (views={view})" in done.stdout
        assert ("a.npy: float32 (6,)" in done.stdout) == (view == "npy")
        assert (f"{name.replace('%', '%25')}.safetensors: equal, byte for byte" in done.stdout) == (
            view == "safetensors")
    finally:
        m.end()


def test_without_a_network(clone, vckpt, program):
    """It names what can be done without the model, and reads a given one without numpy."""
    python = clone / "build/python"
    python.unlink()
    (python / "bin").mkdir(parents=True)
    lacks = 'case "$*" in *"import numpy"* | *gt_all*) exit 1; esac'
    for name, script in {"python": f'{lacks}; exec {sys.executable} -I -S "$@"',
                         "pip": "echo no network >&2; exit 1"}.items():
        (python / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (python / "bin" / name).chmod(0o755)

    def start(*words):
        return subprocess.run([clone / "tools/quickstart", *words], cwd=clone, text=True, capture_output=True,
                              timeout=300, env={**os.environ, "PYTHONPATH": "",
                                                "PATH": f"{clone}/bin:{os.environ['PATH']}"})
    done = start()
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "tools/quickstart: pip could not fetch the model. Without a network give a model that is here, a directory in "
        "Hugging Face layout or .safetensors files: tools/quickstart MODEL")
    try:
        done = start("model.safetensors")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "skipped: numpy is not installed in build/python" in done.stdout
        assert "equal, byte for byte" in done.stdout
    finally:
        subprocess.run([vckpt.path, "umount", clone / ".vckpt/mnt"], check=False)
