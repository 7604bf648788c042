# SPDX-License-Identifier: Apache-2.0
"""Sizes of files, headers and functions: reported always, refused at the limit, so that drift is seen."""
import json
import pathlib
import re
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


def tags(kinds, paths):
    if not shutil.which("ctags"):
        pytest.skip("ctags is not installed (universal-ctags)")
    command = ["ctags", "--output-format=json", "--fields=+ne", f"--kinds-C={kinds}", "-f", "-", *map(str, paths)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def test_functions_stay_under_100_lines():
    sizes = {f"{pathlib.Path(tag['path']).relative_to(ROOT)}:{tag['name']}": tag["end"] - tag["line"] + 1
             for tag in tags("f", files("*.c")) if "end" in tag}
    assert len(sizes) > 300
    print("functions over 60 lines:", {k: v for k, v in sorted(sizes.items(), key=lambda kv: -kv[1]) if v > 60})
    assert not {k: v for k, v in sizes.items() if v > 100}


def test_lines_stay_within_120_columns():
    """A tab counts as eight."""
    sources = files("*.[ch]") + sorted((ROOT / "tests").rglob("*.[ch]"))
    wrong = [f"{path.relative_to(ROOT)}:{number}" for path in sources
             for number, line in enumerate(path.read_text().splitlines(), 1) if len(line.expandtabs(8)) > 120]
    assert not wrong, "\n".join(wrong)


def test_what_a_header_declares_is_defined_and_used():
    """Used outside the file that defines it, be it by a test of the interface."""
    words = {path: set(re.findall(r"\w+", path.read_text(errors="replace")))
             for path in files("*.[ch]") + [p for e in ("py", "c", "h") for p in (ROOT / "tests").rglob(f"*.{e}")]}
    where = {}
    for tag in tags("f", files("*.c")):
        where.setdefault(tag["name"], set()).add(pathlib.Path(tag["path"]))
    pasted = re.compile(r"transform_bitplane\d+_|proto_announcement_(decode|release)$")  # by macros, or from Python
    wrong = []
    for tag in tags("p", files("*.h")):
        name, header = tag["name"], pathlib.Path(tag["path"])
        if name not in where and not pasted.match(name):
            wrong.append(f"{header.relative_to(ROOT)}: {name} is defined nowhere")
        own = where.get(name, set()) | {header}
        if not pasted.match(name) and not any(name in found for path, found in words.items() if path not in own):
            wrong.append(f"{header.relative_to(ROOT)}: {name} has no user")
    assert not wrong, "\n".join(wrong)


def test_every_source_names_its_licence():
    tests = [p for ending in ("py", "c", "h") for p in sorted((ROOT / "tests").rglob(f"*.{ending}"))]
    wrong = [str(p.relative_to(ROOT)) for p in files("*.[ch]") + tests
             if p.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in p.read_text()[:200]]
    assert not wrong, wrong
