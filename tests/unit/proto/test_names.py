# SPDX-License-Identifier: Apache-2.0
"""The escape of true names into file names (docs/format/names.md): reversible, injective, legal, short enough."""
import ctypes
import hashlib
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

FILE_BYTES = 256
awkward = st.text(st.sampled_from(list("/%.~\x01\x1f\x7f aé€😀2FfNPY")), min_size=1, max_size=400)
anything = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=300)
names = st.one_of(awkward, anything)


@pytest.fixture(scope="module")
def escape(lib):
    def call(name, suffix=b".npy"):
        raw = name.encode() if isinstance(name, str) else name
        out = ctypes.create_string_buffer(FILE_BYTES)
        lib.view_name_escape(raw, ctypes.c_size_t(len(raw)), suffix, out)
        return out.value
    return call


@pytest.fixture(scope="module")
def element(lib):
    def call(name):
        raw = name.encode() if isinstance(name, str) else name
        out = ctypes.create_string_buffer(FILE_BYTES)
        lib.view_name_escape_element(raw, ctypes.c_size_t(len(raw)), out)
        return out.value
    return call


@pytest.fixture(scope="module")
def unescape(lib):
    libc = ctypes.CDLL(None)

    def call(file):
        text, length = ctypes.c_void_p(), ctypes.c_size_t()
        code = lib.view_name_unescape(file, ctypes.c_size_t(len(file)), ctypes.byref(text), ctypes.byref(length))
        if code < 0:
            return code
        value = ctypes.string_at(text, length.value)
        assert ctypes.string_at(text.value + length.value, 1) == b"\0"
        libc.free(text)
        return value
    return call


def expected(name, suffix):
    """The rule once more, written another way."""
    def one(index, char):
        if char in "/%\x7f" or char < " " or (char == "." and index == 0):
            return b"%%%02X" % ord(char)
        return char.encode()
    parts = [one(i, c) for i, c in enumerate(name)]
    plain = b"".join(parts) + suffix
    if len(plain) <= 255:
        return plain
    kept = b""
    for part in parts:
        if len(kept) + len(part) > 180:
            break
        kept += part
    return kept + b"%~" + hashlib.sha256(name.encode()).hexdigest()[:32].encode() + suffix


@settings(max_examples=400, deadline=None)
@given(name=names, suffix=st.sampled_from([b".npy", b""]))
@example(name="x" * 251, suffix=b".npy")
@example(name="x" * 252, suffix=b".npy")
@example(name="x" * 255, suffix=b"")
@example(name="x" * 256, suffix=b"")
@example(name="x" * 179 + "é" + "y" * 200, suffix=b"")
@example(name="x" * 178 + "/" + "y" * 200, suffix=b"")
@example(name="..", suffix=b"")
@example(name=".", suffix=b"")
def test_escape(escape, unescape, name, suffix):
    file = escape(name, suffix)
    assert file == expected(name, suffix)
    assert 0 < len(file) <= 255 and b"/" not in file and file not in (b".", b"..") and not file.startswith(b".")
    assert not re.search(rb"[\x00-\x1f\x7f]", file)
    file.decode()  # cut on character boundaries
    bare = file[: len(file) - len(suffix)]
    if b"%~" in bare:
        assert unescape(bare) == -36  # -ENAMETOOLONG: to be looked up
    else:
        assert unescape(bare) == name.encode()


@settings(max_examples=300, deadline=None)
@given(st.lists(names, min_size=2, max_size=20, unique=True))
def test_injective(escape, element, some):
    assert len({escape(n) for n in some}) == len(some) == len({element(n) for n in some})


@pytest.mark.parametrize("name, file", [
    (".cache", ".cache"), ("..x", "..x"), (".100%", ".100%25"), (".gitignore", ".gitignore"), (".", "%2E"),
    ("..", "%2E."), (".git", "%2Egit"), (".Git", "%2EGit"), (".vckpt", "%2Evckpt"), (".vckpt-x", "%2Evckpt-x"),
    ("." + "x" * 254, "." + "x" * 254), ("a", "a")])
def test_elements_that_begin_with_a_dot(element, escape, unescape, name, file):
    assert element(name) == file.encode()
    if len(name) > 200:
        return
    assert unescape(element(name)) == unescape(escape(name, b"")) == name.encode()
    assert element(name + "x" * 300) == escape(name + "x" * 300, b"")


def test_long_names_that_agree_at_first(escape):
    files = {escape("layer." * 60 + str(i)) for i in range(1000)}
    assert len(files) == 1000 and all(len(f) == 180 + 2 + 32 + 4 for f in files)


@settings(max_examples=400, deadline=None)
@given(st.binary(min_size=1, max_size=255))
@example(b"%2f")
@example(b"%41")
@example(b"%00")
@example(b"a%2E")
@example(b".a")
@example(b"%")
@example(b"%2")
@example(b"%~")
@example(b"%~" + b"0" * 33)
@example(b"a/b")
def test_unescape_takes_only_what_escape_makes(escape, element, unescape, file):
    name = unescape(file)
    if isinstance(name, bytes):
        assert file in (escape(name, b""), element(name))
    else:
        assert name == -22 or (name == -36 and file[-34:-32] == b"%~")


def test_unescape_limits(unescape):
    assert unescape(b"") == -22
    assert unescape(b"x" * 256) == -22
