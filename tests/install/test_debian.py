# SPDX-License-Identifier: Apache-2.0
"""The releases of Debian that vckpt supports, each in a system of its own (debootstrap) that has nothing but Debian's
packages and its own Python: what the README and docs/install.md have for it."""
import os
import shutil
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file

from debianlib import ROOT, check_possible, inside, minimal_system

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
# One folder of each kind that needs neither torch nor minutes.
TESTS = "tests/golden tests/cli/test_cat_mesh.py tests/mount/test_views.py tests/mount/test_passthrough.py"
USE = """
import numpy, vckpt
assert vckpt.save("/store/run", {"model": {"w": numpy.arange(12.0)}}) == 0
assert (vckpt.Step("/store/run").read("model", "w") == numpy.arange(12.0)).all()
"""


@pytest.fixture(params=["bookworm", "trixie"])
def system(request, tmp_path):
    """With this checkout, as it is, in /vckpt, and a model in /model."""
    check_possible()
    root = tmp_path / "root"
    minimal_system(root, request.param)
    (root / "vckpt").mkdir()
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                           capture_output=True, check=True).stdout
    packed = subprocess.run(["tar", "-c", "--null", "--ignore-failed-read", "-T", "-"], cwd=ROOT, input=names,
                            capture_output=True, check=True)        # a file may be deleted that git has
    subprocess.run(["tar", "-x", "-C", root / "vckpt", "--no-same-owner"], input=packed.stdout, check=True)
    (root / "model").mkdir()
    save_file({"w": numpy.arange(300000.0)}, root / "model/model.safetensors")
    yield root
    shutil.rmtree(root)


def test_a_bare_system(system):
    """The quickstart, tests, and a wheel that works in an environment of Debian's own Python, in this order."""
    said = inside(system, "cd /vckpt; tools/quickstart /model; umount .vckpt/mnt", timeout=1800)
    assert "equal, byte for byte" in said or not os.path.exists("/dev/fuse")
    assert "WARNING" not in said                        # of a tool that the next release will not have
    said = inside(system, f"cd /vckpt; tools/test --debian -- -q -n 2 {TESTS}", timeout=1800)
    assert " passed" in said and " failed" not in said
    inside(system, "cd /vckpt; tools/wheel -Csetup-args=-Doptimization=0; python3 -m venv /env; "
                   "/env/bin/pip install --quiet build/wheel/vckpt-*.whl", timeout=1800)
    inside(system, f"cat > /use.py <<'END'\n{USE}\nEND\n/env/bin/python /use.py; /env/bin/vckpt verify /store")
