# SPDX-License-Identifier: Apache-2.0
"""The mechanical part of HACKING.md's style for C. No clang-format does it: the best settings found for version 23, of
40 options tried one by one, change 4.2 % of the lines without a limit of columns and 7.7 % with one of 120. The sources
align comments by hand, put short fields on one line, and break long lines by meaning. test_text.py has tabs and blanks,
test_shape.py the columns."""
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["core", "proto", "index", "fs", "tools", "tests", "docs"]
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
NESTED = r"\((?:[^()\n]|\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\))*\)"
HEAD = rf"^\t+(?:\}} )?(?:else )?(?:if|for|while) {NESTED}"
ELSE = r"^\t+(?:\} )?else "

RULES = {
    # or the whole function stands on one line
    "the brace of a function stands on a line of its own": r"^[A-Za-z_][^=;{}\n]*\) *\{ *$",
    "the brace of a statement stands on its line": r"^\t+(?:if|for|while|switch|do|else)\b[^{};]*\n\t+\{ *$",
    "else stands beside the brace before it": r"^\t+\} *\n\t+else\b",
    "a keyword is followed by a blank": r"\b(?:if|for|while|switch|return)\(",
    "a body stands on a line of its own": rf"{HEAD} +[^{{\s\\][^\n]*;|{HEAD} \{{[^\n]*;[^\n]*\}}|{ELSE}[^{{i\n][^\n]*;",
    "the star of a pointer stands at its name": r"\b(?:char|void|int|bool|struct \w+)\* *\w",
    "nothing stands between a statement and its semicolon": r"[^\s;(] +;",
    "a comma is followed by a blank": r",[^\s\"'x]",
    "no blank stands in the braces around named fields": r"\{ +\.[a-z]",
    "a return code is called r, and no pointer or struct is": r"\brc\b|\bstruct \w+ \**r\b|\b(?:char|void|bool) \**r\b",
}


def sources():
    """(path, text without comments and the content of strings)."""
    def blank(found):
        text = found[0]
        return re.sub(r"[^\n]", " ", text) if text.startswith("/") else text[0] + "x" * (len(text) - 2) + text[-1]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.[ch]")):
            yield path, COMMENT_OR_STRING.sub(blank, path.read_text())


SOURCES = list(sources())


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    wrong = [f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found[0].strip()[:80]}"
             for path, text in SOURCES for found in re.finditer(RULES[rule], text, re.M)]
    assert not wrong, "\n".join(wrong)


def test_nothing_waits_by_the_wall_clock():
    """It may be set back by a day during any wait. core/base/clock.h has the clocks, and their test looks at both. A
    condition that is waited for with pthread_cond_timedwait has the monotonic clock as its attribute."""
    wall = re.compile(r"CLOCK_REALTIME|CLOCK_TAI|pthread_timedjoin_np|sem_timedwait|pthread_\w+_timed(?:rd|wr)?lock|"
                      r"\btimer_create|\bgettimeofday")
    own = {ROOT / "core/base/clock.h", ROOT / "tests/unit/containers.c"}
    wrong = [f"{path.relative_to(ROOT)}: {found}" for path, text in SOURCES if path not in own
             for found in wall.findall(text)]
    assert not wrong, "\n".join(wrong)
