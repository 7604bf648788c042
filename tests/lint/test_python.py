# SPDX-License-Identifier: Apache-2.0
"""ruff and mypy --strict find nothing in the Python sources; pyproject.toml has their settings. Neither looks at torch,
so they say the same where it is not installed."""
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tools/python/vckpt"


def check(module, *arguments):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (tests/requirements.txt)")
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff():
    check("ruff", "check", "--output-format", "concise", "tools", "docs", "tests", "tests/bench/run",
          "tests/golden/make")


def test_mypy():
    """Strictly: every function of the package says what it takes and gives, and means it."""
    check("mypy")


def test_what_is_ignored_says_why():
    """Of every rule that a line is spared from: which, and why."""
    wrong = []
    for path in PACKAGE.glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.search(r"#\s*(noqa|type:\s*ignore)(.*)", line)
            if found and not re.match(r"(: [A-Z0-9, ]+|\[[\w, -]+\])\s+[(#] ?\w", found[2]):
                wrong.append(f"{path.name}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)
