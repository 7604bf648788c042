# SPDX-License-Identifier: Apache-2.0
"""codespell finds no word that is written wrong. words.txt has those that it takes for wrong ones: names, mdoc's
macros, and errors that a test makes on purpose."""
import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["core", "proto", "index", "fs", "tools", "tests", "docs", ".ci"]
WORDS = pathlib.Path(__file__).with_name("words.txt")


def test_spelling():
    if importlib.util.find_spec("codespell_lib") is None:
        pytest.skip("codespell is not installed (tests/requirements.txt)")
    top = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("*.build"), *ROOT.glob("*.toml"),
                                                    ROOT / "meson_options.txt"]]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", "--ignore-words", str(WORDS), "--skip",
                           "*/corpus/*,*/golden/v*,*/__pycache__/*,*.so",
                           "--check-hidden", *top, *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
