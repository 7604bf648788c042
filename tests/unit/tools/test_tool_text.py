# SPDX-License-Identifier: Apache-2.0
"""What the command makes of sizes, ages, the time left, and rows: as functions, so that no clock and no terminal
matters."""
import ctypes
import errno
import json
import os
import re
import subprocess
import sys

import pytest

from terminal import open_terminal, written


@pytest.fixture(scope="module")
def text(build):
    lib = ctypes.CDLL(str(build / "tests" / "libtool_text.so"))
    lib.tool_table_new.restype = ctypes.c_void_p

    def call(name, *values, size=200):
        out = ctypes.create_string_buffer(size)
        getattr(lib, name)(*values, out)
        return out.value.decode()
    call.lib = lib
    return call


@pytest.mark.parametrize("count, want", [
    (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (10187, "9.9 KiB"),
    (10189, "10 KiB"), (1023 * 1024 + 511, "1023 KiB"),
    (1023 * 1024 + 512, "1.0 MiB"), (91 << 20, "91 MiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB"),
    (2 ** 64 - 1, "16 EiB")])
def test_bytes(text, count, want):
    assert text("tool_format_bytes", ctypes.c_uint64(count)) == want


@pytest.mark.parametrize("seconds, want", [
    (0, "0 s ago"), (1, "1 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7199, "119 min ago"), (7200, "2 h ago"),
    (3 * 3600, "3 h ago"), (172799, "47 h ago"),
    (172800, "2 days ago"), (729 * 86400, "729 days ago"), (730 * 86400, "730 days ago"), (731 * 86400, "2 years ago"),
    (-300, "in 5 min"), (-1, "in 1 s")])
def test_age(text, seconds, want):
    now = 1_800_000_000_000_000_000
    assert text("tool_format_age", ctypes.c_int64(now - seconds * 10 ** 9), ctypes.c_int64(now)) == want


@pytest.mark.parametrize("seconds, want", [
    (0.1, "about 5 s left"), (7.4, "about 5 s left"), (7.6, "about 10 s left"), (57, "about 55 s left"),
    (58, "about 1 min left"), (180, "about 3 min left"),
    (99 * 60, "about 99 min left"), (130 * 60, "about 2 h 10 min left"), (47.5 * 3600, "about 47 h 30 min left"),
    (72 * 3600, "about 3 days left"),
    (1e300, "about 694444 days left")])
def test_time_left(text, seconds, want):
    assert text("tool_format_left", ctypes.c_double(seconds)) == want


# ---- tables ----

class Column(ctypes.Structure):
    _fields_ = [("head", ctypes.c_char_p), ("key", ctypes.c_char_p), ("as_", ctypes.c_int), ("right", ctypes.c_bool),
                ("shorten", ctypes.c_bool), ("more", ctypes.c_bool), ("style", ctypes.c_int),
                ("style_if", ctypes.c_char_p)]


AS_NUMBER, AS_BYTES, AS_STEP = range(3)


def table(text, tmp_path, columns, rows, bare=False, width=0, more=False, exact=False):
    """columns: (name, right, shorten, more of Column's fields)"""
    lib = text.lib
    libc = ctypes.CDLL(None)
    libc.fopen.restype = lib.json_loads.restype = ctypes.c_void_p
    heads = (Column * len(columns))(*[Column(name.encode(), name.encode(), right=right, shorten=shorten, **fields)
                                      for name, right, shorten, *rest in columns for fields in [dict(*rest)]])
    t = ctypes.c_void_p(lib.tool_table_new(heads, len(columns), ctypes.c_bool(more), ctypes.c_bool(exact)))
    for row in rows:
        cells = row if isinstance(row, dict) else dict(zip([column[0] for column in columns], row))
        lib.tool_table_add(t, ctypes.c_void_p(lib.json_loads(json.dumps(cells).encode(), 0, None)))
    to = ctypes.c_void_p(libc.fopen(str(tmp_path / "out").encode(), b"w"))
    assert lib.tool_table_print(t, to, ctypes.c_bool(bare), width) == 0
    libc.fclose(to)
    lib.tool_table_free(t)
    return (tmp_path / "out").read_text()


COLUMNS = [("NAME", False, True), ("SIZE", True, False), ("SHAPE", False, False)]


def test_table(text, tmp_path):
    rows = [("a", "1 B", "[]"), ("größer", "10 KiB", "[4, 4]"), ("tab\there\n", "2 B", "[1]")]
    assert table(text, tmp_path, COLUMNS, rows).splitlines() == [
        f"{'NAME':15}    SIZE  SHAPE", f"{'a':15}     1 B  []", f"{'größer':15}  10 KiB  [4, 4]",
        "tab\\x09here\\x0a     2 B  [1]"]
    assert table(text, tmp_path, COLUMNS, rows,
                 bare=True) == "a\t1 B\t[]\ngrößer\t10 KiB\t[4, 4]\ntab\\x09here\\x0a\t2 B\t[1]\n"
    assert table(text, tmp_path, COLUMNS, [("a", -1, "x")], bare=True) == f"a\t{2 ** 64 - 1}\tx\n"
    assert table(text, tmp_path, COLUMNS, []) == "NAME  SIZE  SHAPE\n"


def test_values_of_rows(text, tmp_path):
    columns = [("step", False, False, {"as_": AS_STEP}), ("bytes", True, False, {"as_": AS_BYTES}),
               ("shape", False, False), ("attributes", False, False), ("digest", False, False, {"more": True})]
    rows = [{"step": 7, "bytes": 1536, "shape": [4, -1], "attributes": {"a": "1", "b": "x\n"}, "digest": "d"},
            {"bytes": None, "shape": [], "attributes": {}}]
    assert table(text, tmp_path, columns, rows, bare=True) == (
        f"step-00000007\t1.5 KiB\t[4, {2 ** 64 - 1}]\ta=1  b=x\\x0a\n-\t-\t[]\t\n")
    assert table(text, tmp_path, columns, rows, bare=True, more=True, exact=True).splitlines()[0].split("\t")[1:] == [
        "1536", f"[4, {2 ** 64 - 1}]", "a=1  b=x\\x0a", "d"]


def test_styles_of_columns_and_rows(text, tmp_path):
    RUN, GOOD = 3, 2
    columns = [("run", False, False, {"style": RUN}), ("step", True, False, {"style": GOOD, "style_if": b"latest"})]
    rows = [{"run": "a", "step": 1}, {"run": "b", "step": 22, "latest": True}]
    text.lib.tool_color_set(b"always")
    try:
        assert table(text, tmp_path, columns, rows).splitlines() == [
            "run  step", "\x1b[1;34ma\x1b[m       1", "\x1b[1;34mb\x1b[m      \x1b[32m22\x1b[m"]
        assert table(text, tmp_path, columns, rows, bare=True) == "a\t1\nb\t22\n"
    finally:
        text.lib.tool_color_set(b"auto")


def test_a_row_for_which_there_was_no_memory_is_an_error(text):
    t = ctypes.c_void_p(text.lib.tool_table_new((Column * 1)(Column(b"a", b"a")), 1, False, False))
    text.lib.tool_table_add(t, None)
    assert text.lib.tool_table_print(t, None, False, 0) == -errno.ENOMEM
    text.lib.tool_table_free(t)
    text.lib.tool_table_add(None, None)
    assert text.lib.tool_table_print(None, None, False, 0) == -errno.ENOMEM


def test_long_names_are_shortened_in_the_middle(text, tmp_path):
    long = "encoder.layer." + "é" * 60 + ".weight"
    rows = [(long, "1 B", "[4]"), ("short", "1 B", "[4]")]
    assert long in table(text, tmp_path, COLUMNS, rows)                         # no terminal
    assert long in table(text, tmp_path, COLUMNS, rows, width=200)              # it fits
    lines = table(text, tmp_path, COLUMNS, rows, width=40).splitlines()
    assert lines[0] == "NAME" + 23 * " " + "  SIZE  SHAPE" and len(lines[0]) == 40
    assert lines[1] == "encoder.laye...ééééé.weight   1 B  [4]" and lines[2].startswith("short ")
    lines = table(text, tmp_path, COLUMNS, rows, width=10).splitlines()         # never below 16
    assert lines[1].startswith("encoder...weight  ")


# ---- the bar, drawn by a process whose standard error is a terminal ----

BAR = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
bar = ctypes.create_string_buffer(200)                  # struct tool_progress, and more
lib.tool_progress_start(bar, ctypes.c_bool(sys.argv[2] == "quiet"), b"import")
start = int.from_bytes(bar.raw[16:24], sys.byteorder)   # start_ns
bar[10] = sys.argv[2] == "counts"
for ms, done in ((500, 50), (1000, 100), (1050, 105), (2000, 200), (3000, 300)):
    lib.tool_progress_at(bar, ctypes.c_int64(start + ms * 10**6), ctypes.c_uint64(done << 20),
                         ctypes.c_uint64(18300 << 20))
lib.tool_progress_end(bar)
"""


def drawn(build, columns, *more, term="xterm", piped=False):
    """What stands on the terminal, one entry for each time that the line is written anew."""
    ours, theirs = open_terminal(columns)
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"TERM": term}
    if "VCKPT_PRELOAD" in env:                          # the sanitizers' run time
        env["LD_PRELOAD"] = env["VCKPT_PRELOAD"]
    try:
        done = subprocess.run([sys.executable, "-c", BAR, str(build / "tests" / "libtool_text.so"),
                               *(more or ["loud"])], env=env,
                              stderr=subprocess.PIPE if piped else theirs)
    finally:
        os.close(theirs)
    told = written(ours)
    os.close(ours)
    assert done.returncode == 0 and not done.stderr, (done, told)
    return told.split("\r")[1:]


def test_progress(build):
    lines = drawn(build, 100)
    assert [re.sub(r" \[[#.]*\] +", " ", line) for line in lines] == [
        "import 1%  100 MiB of 18 GiB, 100 MiB/s, about 3 min left\033[K",
        "import 1%  200 MiB of 18 GiB, 100 MiB/s, about 3 min left\033[K",
        "import 2%  300 MiB of 18 GiB, 100 MiB/s, about 3 min left\033[K", "\033[K"]
    assert all(len(line) < 100 + len("\033[K") and "[..." in line for line in lines[:-1])
    lines = drawn(build, 45)
    assert "[" not in lines[0].replace("\033[K", "") and all(len(line) < 45 + len("\033[K") for line in lines)


def test_progress_of_things(build):
    lines = drawn(build, 100, "counts")
    assert re.sub(r" \[[#.]*\] +", " ",
                  lines[0]) == f"import 1%  {100 << 20} of {18300 << 20}, {100 << 20}/s, about 3 min left\033[K", lines


def test_no_progress_without_a_terminal(build):
    assert drawn(build, 80, "quiet") == drawn(build, 80, term="dumb") == drawn(build, 80, piped=True) == []
