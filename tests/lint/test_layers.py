# SPDX-License-Identifier: Apache-2.0
"""Every #include goes down: a folder includes only itself and what is above it in LAYERS, and each foreign library has
one user (docs/design.md, "Layers"). What a folder shows to others begins with a word that no other folder has."""
import json
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS = ["core/base", "core/tensor", "proto", "core/query", "index", "core/storage", "core/pack", "core/step",
          "core/commit/list", "core/commit/incoming", "core/commit/notes", "core/commit/check", "core/commit/launch",
          "core/commit/attempt", "core/upkeep", "core/device", "core/comm", "core/save/plan", "core/save/write",
          "core/save/saver", "core/load/open", "core/load/read", "core/load/fill", "core/load/exchange",
          "core/load/loader", "core/find", "core/copy", "core/diff", "core/view", "core/foreign", "core/api", "fs",
          "tools"]
APART = [{"proto", "index"}]  # these do not include each other
SOLE = {
    r"protobuf-c/|proto/vckpt\.pb-c\.h": {"proto"},
    r"lmdb\.h": {"index"},
    r"fuse": {"fs"},
    r"lz4": {"core/pack"},
    r"xxhash\.h|openssl/": {"core/base"},
    r"jansson\.h": {"tools"},
    r"dlfcn\.h": {"core/device", "core/comm"},  # libcuda.so.1 and transports are loaded at run time
    r"cuda": set(),                     # and its headers are used by nobody
}
# How the functions begin that the rooms of core/commit show: a name says where it is from.
NAMES = {
    "list": r"(commit_)?list_|commit_(error_passes|runs|runs_free|step_remove|equal)$",
    "incoming": r"commit_(heartbeat|incoming|files|folders?)_|commit_(launches|process_lives|attempt_name_valid)$",
    "notes": r"commit_(notes?|stats)_",
    "check": r"check_",
    "launch": r"(commit_)?launch_",
    "attempt": r"(commit_)?attempt_",
}
DECLARED = re.compile(r"^(?!typedef|static|struct \w+ \{)[a-z][\w ]*[ *](\w+)\(", re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def layer_of(path):
    text = path.relative_to(ROOT).as_posix()
    return next((layer for layer in LAYERS if text.startswith(layer + "/")), None)


def sources():
    found = [p for layer in LAYERS for p in (ROOT / layer).rglob("*.[ch]")]
    assert len(found) > 50
    return sorted(found)


def includes():
    for path in sources():
        for kind, name in INCLUDE.findall(path.read_text()):
            yield path, kind, name


def test_no_include_goes_up():
    wrong = []
    for path, kind, name in includes():
        if kind != '"' or name.endswith("vckpt.pb-c.h"):                  # made by the build
            continue
        own, other = layer_of(path), layer_of(ROOT / name)
        if other is None or not (ROOT / name).is_file():
            wrong.append(f"{path.relative_to(ROOT)}: {name} is not written from the root")
        elif LAYERS.index(other) > LAYERS.index(own) or {own, other} in APART:
            wrong.append(f"{path.relative_to(ROOT)}: {own} must not include {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pattern", SOLE)
def test_a_foreign_library_has_one_user(pattern):
    users = {layer_of(path) for path, kind, name in includes()
             if re.match(pattern, name) and not (ROOT / name).is_file()}
    assert users == SOLE[pattern] or users and users <= SOLE[pattern], f"{pattern}: {users}"


def test_internal_headers_stay_inside():
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, kind, name in includes()
             if name.endswith("_internal.h") and layer_of(ROOT / name) != layer_of(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", NAMES)
def test_names_say_their_room(room):
    names = [name for path in (ROOT / "core/commit" / room).glob("*.h") for name in DECLARED.findall(path.read_text())]
    assert len(names) > 5
    assert not [name for name in names if not re.match(NAMES[room], name)]


# The first word of the names that other folders may use, so that a name shows its room. The rooms of core/commit,
# core/load and core/save share one, but for the loader; among themselves they may use shorter names.
WORDS = {"core/base": "base", "core/tensor": "tensor", "proto": "proto", "core/query": "query", "index": "index",
         "core/storage": "storage", "core/pack": "pack", "core/step": "store", "core/commit": "commit",
         "core/commit/check": "check", "core/upkeep": "upkeep", "core/device": "device", "core/comm": "comm",
         "core/save": "save", "core/load": "load", "core/load/loader": "loader", "core/find": "find",
         "core/copy": "copy", "core/diff": "diff", "core/view": "view",
         "core/foreign": "foreign", "core/api": "vckpt"}


def word_of(path):
    folder = layer_of(path)
    while folder and folder not in WORDS:
        folder = folder.rpartition("/")[0]
    return WORDS.get(folder)


def test_a_name_shows_its_room():
    """Functions and types of each header that another folder includes; constants of proto/limits.h are everybody's."""
    assert len(set(WORDS.values())) == len(WORDS)
    if not shutil.which("ctags"):
        pytest.skip("ctags is not installed (universal-ctags)")
    shown = {name for path, kind, name in includes()
             if kind == '"' and name.split("/")[:-1][:2] != list(path.relative_to(ROOT).parts[:-1][:2])}
    shown = sorted(name for name in shown if (ROOT / name).is_file() and word_of(ROOT / name))
    assert len(shown) > 50
    out = subprocess.run(["ctags", "--output-format=json", "--kinds-C=pstg", "-f", "-", *shown], cwd=ROOT,
                         capture_output=True, text=True, check=True).stdout
    declared = [tag for tag in map(json.loads, out.splitlines())
                if "scope" not in tag and not re.match(r"__anon|(LIST|TAILQ)_", tag["name"])]
    wrong = [f"{tag['path']}: {tag['name']}" for tag in declared
             if not re.match(rf"{word_of(ROOT / tag['path'])}(_|$)", tag["name"])]
    assert len(declared) > 500 and not wrong, "\n".join(wrong)
