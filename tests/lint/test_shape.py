# SPDX-License-Identifier: Apache-2.0
"""Sizes of files, headers and functions: reported always, refused at the limit, so that drift is seen."""
import json
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["core", "proto", "index", "fs", "tools"]


def files(pattern):
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob(pattern))


def test_files_stay_under_1000_lines():
    long = {str(p.relative_to(ROOT)): n for p in files("*.[ch]") if (n := len(p.read_text().splitlines())) > 500}
    print("files over 500 lines:", long)
    assert not {p: n for p, n in long.items() if n > 1000}


def test_headers_stay_under_200_lines():
    assert not {str(p.relative_to(ROOT)): n for p in files("*.h") if (n := len(p.read_text().splitlines())) > 200}


def test_functions_stay_under_100_lines():
    if not shutil.which("ctags"):
        pytest.skip("ctags is not installed (universal-ctags)")
    out = subprocess.run(["ctags", "--output-format=json", "--fields=+ne", "--kinds-C=f", "-f", "-", *map(str, files("*.c"))],
                         capture_output=True, text=True, check=True).stdout
    sizes = {}
    for line in out.splitlines():
        tag = json.loads(line)
        if "end" in tag:
            sizes[f"{pathlib.Path(tag['path']).relative_to(ROOT)}:{tag['name']}"] = tag["end"] - tag["line"] + 1
    assert len(sizes) > 300
    print("functions over 60 lines:", {k: v for k, v in sorted(sizes.items(), key=lambda kv: -kv[1]) if v > 60})
    assert not {k: v for k, v in sizes.items() if v > 100}


def test_every_source_names_its_licence():
    wrong = [str(p.relative_to(ROOT)) for p in files("*.[ch]") + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.c"))
             if p.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in "\n".join(p.read_text().splitlines()[:3])]
    assert not wrong, wrong
