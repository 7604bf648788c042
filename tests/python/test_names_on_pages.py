# SPDX-License-Identifier: Apache-2.0
"""What the pages say of the package is there: every name of `vckpt` and `vckpt.dcp` in their Python, and in the words
between backquotes; and of savers, handles, steps and what a load gives every attribute."""
import ast
import inspect
import pathlib
import re

import pytest

import vckpt

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# The names that pages give to objects of a class.
CLASSES = {"saver": vckpt.Saver, "handle": vckpt.Handle, "found": vckpt.Loaded, "step": vckpt.Step,
           "opened": vckpt.Step, "stopping": vckpt.Stopping}
# Names in documents and of spans in traces, not of the package.
RECORDS = {"vckpt.PerRank", "vckpt.SameAs", "vckpt.checkpoint.save"}


def dcp_names():
    """Without an import, which needs torch."""
    tree = ast.parse((ROOT / "tools/python/vckpt/dcp.py").read_text())
    return next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and
                node.targets[0].id == "__all__")


def is_there(name):
    """Of vckpt.NAME or vckpt.dcp.NAME."""
    first, *rest = name.split(".")[1:]
    if first == "dcp":
        return not rest or rest[0] in dcp_names()
    return hasattr(vckpt, first) and (not rest or hasattr(getattr(vckpt, first), rest[0]))


def attributes(cls):
    """What an object of a class has, what its methods set included."""
    return set(dir(cls)) | set(re.findall(r"\bself\.(\w+)\b", inspect.getsource(cls)))


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def wrong_in(code):
    """Names of a block that are nowhere."""
    tree, wrong = ast.parse(code), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"vckpt(\.\w+)+", name) and not is_there(name):
                wrong.append(name)
            if (isinstance(node.value, ast.Name) and node.value.id in CLASSES and
                node.attr not in attributes(CLASSES[node.value.id])):
                wrong.append(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vckpt":
            wrong += [f"{node.module}.{alias.name}" for alias in node.names
                      if not is_there(f"{node.module}.{alias.name}")]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_a_page_are_there(page):
    text = page.read_text()
    wrong = [name for code in blocks(text) for name in wrong_in(code)]
    between = re.findall(r"`(vckpt\.[A-Za-z]\w*(?:\.[A-Za-z]\w*)?)", re.sub(r"```.*?```", "", text, flags=re.S))
    files = r"vckpt\.(h|map|pc|c|store|service|toml|1|5|so)\b"
    wrong += [name for name in between if not re.match(files, name) and name not in RECORDS and not is_there(name)]
    assert not wrong, wrong


def test_what_is_not_there_is_found():
    found = wrong_in("import vckpt\nvckpt.no_such(1)\nvckpt.dcp.Nothing\nvckpt.save\nsaver.asynchronous\n"
                     "handle.staged()\nfound.values\nstep.number\nfrom vckpt.dcp import StorageReader, Other")
    assert set(found) == {"vckpt.dcp.Other", "vckpt.no_such", "vckpt.dcp.Nothing", "saver.asynchronous"}
