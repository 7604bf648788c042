# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/pack from a clean clone, and tests/gpu/run of what it made in a minimal Debian that has Python and nothing
else, with the stand-ins for the driver and NCCL: nothing is missing there."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

from debianlib import check_possible, minimal_system, release

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_command_on_a_bare_machine(tmp_path):
    check_possible()
    root, clone = tmp_path / "root", tmp_path / "clone"
    minimal_system(root, release(), "python3")
    version = subprocess.run(["chroot", root, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                             capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    python = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python], check=True)     # as Debian's is

    def pack(**more):
        return subprocess.run([python / "bin/python", clone / "tests/gpu/pack", "--python", version, root / "pack"],
                              text=True, capture_output=True, env={**os.environ, **more})
    assert "No matching distribution found" in pack(PIP_NO_INDEX="1", PIP_FIND_LINKS="").stderr
    done = pack()                                       # what the first one left is not in its way
    assert done.returncode == 0, done.stdout + done.stderr
    inside = 'mount -t proc proc "$0/proc" && mount -t tmpfs shm "$0/dev/shm" && ' \
        'exec chroot "$0" /pack/tests/gpu/run --standin --small --out /out'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", inside, root], text=True, capture_output=True, timeout=900,
                          env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "a shared load reads, of what there is " in done.stdout         # no row is cut
    steps = {one["step"]: one for one in json.loads((root / "out/gpu.json").read_text())["steps"]}
    assert [name for name, one in steps.items() if one["state"] == "passed"] == [
        "tests", "saves", "strided", "nccl", "sanitizer"]
    assert all("torch" in " ".join(steps[name]["notes"]) for name in ("loop", "loads", "capture", "expandable",
                                                                       "threads"))
    assert steps["tests"]["rows"][0]["value"] >= 20
