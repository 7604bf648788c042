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
PUBLIC_HEADER = ROOT / "core/api/vckpt.h"


def files(pattern):
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob(pattern))


def test_files_stay_under_1000_lines():
    inside = [p for p in files("*.[ch]") if p != PUBLIC_HEADER]
    long = {str(p.relative_to(ROOT)): n for p in inside if (n := len(p.read_text().splitlines())) > 500}
    print("files over 500 lines:", long)
    assert not {p: n for p, n in long.items() if n > 1000}


def test_headers_stay_under_200_lines():
    """But the public one, which is as long as its reader needs: a limit squeezes out explanations."""
    inside = [p for p in files("*.h") if p != PUBLIC_HEADER]
    assert not {str(p.relative_to(ROOT)): n for p in inside if (n := len(p.read_text().splitlines())) > 200}


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


def test_what_a_header_declares_is_defined():
    where = {tag["name"] for tag in tags("f", files("*.c"))}
    pasted = re.compile(r"proto_\w+_(encode|decode|release)$|"                                    # by macros
                        r"(LIST|TAILQ)_(HEAD|ENTRY)$")                                         # of <sys/queue.h>
    assert not [f"{pathlib.Path(tag['path']).relative_to(ROOT)}: {tag['name']}" for tag in tags("p", files("*.h"))
                if tag["name"] not in where and not pasted.match(tag["name"])]


# What no other file of the product calls, and why it is there all the same. The header says so too.
FOR_TESTS = {
    "store_record_decode": "a fuzz target and the tests of damage give it the bytes of a file",
    "transform_select": "the tests compare the implementations for each processor",
    "base_sha256_select": "the tests compare the methods of each processor",
    "base_sha256_method_ns": "the tests give it a method that hashes wrongly",
    "load_cache_hash": "the tests give it references that somebody chose",
    "tool_progress_at": "the tests give the time",
    "view_layouts_parse": "the tests give it the text of a file",
    "diff_measure_select": "the tests compare the vectors of this processor with those of every one",
    "saver_room_size": "the tests give the memory of the machine",
    "saver_same_patience": "the tests are patient, or not at all",
}
PUBLIC = re.compile(r"vckpt_|main$")                                        # called from outside


def test_what_a_file_shows_to_others_is_used_by_them(build):
    """By another object file of the product: a use in a test is none."""
    outputs = [step["output"] for step in json.loads((build / "compile_commands.json").read_text())]
    objects = [build / o for o in outputs if not o.startswith("tests/") and "pb-c" not in o]
    assert len(objects) > 100
    shown, used = {}, {}
    out = subprocess.run(["nm", "-A", *objects], capture_output=True, text=True, check=True).stdout
    for path, kind, name in re.findall(r"^(.*?):\S* +([A-Za-z]) (\S+)$", out, re.M):
        if kind in "TDBRC":
            shown[name] = path
        elif kind == "U":
            used.setdefault(name, set()).add(path)
    alone = {name for name, path in shown.items() if not used.get(name, set()) - {path} and not PUBLIC.match(name)
             and not name.startswith("__")}
    allowed = FOR_TESTS.keys()
    assert not alone - allowed, "no other file uses it: delete it, or make it static"
    assert not sorted(allowed - alone), "it has a user now: it needs no leave any more"


def test_every_source_names_its_licence():
    tests = [p for ending in ("py", "c", "h") for p in sorted((ROOT / "tests").rglob(f"*.{ending}"))]
    wrong = [str(p.relative_to(ROOT)) for p in files("*.[ch]") + tests
             if p.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in p.read_text()[:200]]
    assert not wrong, wrong
