# SPDX-License-Identifier: Apache-2.0
"""shellcheck finds nothing in the scripts. Where it is wrong, the line says why."""
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def scripts():
    """By their first line; and what they source, and the completion."""
    found = [ROOT / "tools/packages", ROOT / "tools/completions/vckpt.bash"]
    for folder in (".ci", "tools", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in ("", ".sh") and "corpus" not in path.parts:
                first = path.open("rb").readline()
                if first.startswith(b"#!") and first.rstrip().endswith((b"sh", b"bash")):
                    found.append(path)
    return sorted(found)


def test_scripts_are_found():
    assert {"run", "test", "quickstart", "wheel", "deb", "after-install"} <= {path.name for path in scripts()}


def test_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "--external-sources", "--severity=style", *map(str, scripts())], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
