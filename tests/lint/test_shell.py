# SPDX-License-Identifier: Apache-2.0
"""shellcheck finds nothing in the scripts. Where it is wrong, the line says why."""
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def scripts():
    """By their first line; and what they source, and the completion."""
    found = [ROOT / "tools/packages", ROOT / "tools/vckpt/complete/vckpt.bash"]
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


def test_sources_that_scripts_name_are_there():
    """Braces and stars too. A path with a variable in it is left out."""
    words = {word for path in scripts()
             for word in re.findall(r"(?<![\w/.$}-])(?:core|fs|index|proto|tests|tools)/[\w./{},*-]*\.(?:[ch]|py)\b",
                                    path.read_text())}
    assert len(words) > 10
    expanded = subprocess.run(["bash", "-c", "printf '%s\\n' " + " ".join(sorted(words))], cwd=ROOT, check=True,
                              capture_output=True, text=True).stdout.split()
    assert [path for path in expanded if not (ROOT / path).is_file()] == []
