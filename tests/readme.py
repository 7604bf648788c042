#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A fenced block of a page, as a reader would type it.

    tests/readme.py "A first tour"              # of README.md, the first block under that heading
    tests/readme.py "A first tour" docs/x.md"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def block(heading, page="README.md", language=""):
    text = (ROOT / page).read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n.*?^```{language}\n(.*?)^```$", text, re.M | re.S)
    if not found:
        raise SystemExit(f"{page}: no block under a heading \"{heading}\"")
    return found[1]


if __name__ == "__main__":
    print(block(*sys.argv[1:]), end="")
