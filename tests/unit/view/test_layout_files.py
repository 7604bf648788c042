# SPDX-License-Identifier: Apache-2.0
"""Layout files: which line counts for a tensor, and every error with file and line."""
import ctypes as C
import errno
import fnmatch
import itertools
import random
import re

import pytest

from test_tree import Error, Shape


class Info(C.Structure):
    _fields_ = [("component", C.c_char_p), ("name", C.c_char_p), ("name_len", C.c_uint32), ("dtype", C.c_int),
                ("shape", Shape), ("bytes", C.c_uint64)]


class Line(C.Structure):
    _fields_ = [("file", C.c_char_p), ("number", C.c_uint32), ("pattern", C.c_char_p), ("component", C.c_bool),
                ("saved", C.c_bool), ("ncuts", C.c_uint32), ("cuts", C.c_void_p)]


class Layouts:
    def __init__(self, lib, text, name="file"):
        self.lib, self.p, err = lib, C.c_void_p(), Error()
        raw = text if isinstance(text, bytes) else text.encode()
        code = lib.view_layouts_parse(name.encode(), raw, C.c_size_t(len(raw)), C.byref(self.p), C.byref(err))
        self.code, self.error = code, err.text.decode(errors="replace")
        assert (code == 0) == (not self.error)
        lib.view_layouts_find.restype = C.c_int64
        lib.view_layouts_line.restype = C.POINTER(Line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.code:
            self.lib.view_layouts_free(self.p)

    def find(self, name, ndim=2):
        """The number of the line in its file; None."""
        component, name = name.split("/", 1)
        raw = name.encode()
        info = Info(component.encode(), raw, len(raw), 12, Shape(ndim, (C.c_uint64 * 16)(*[8] * ndim)), 0)
        i = self.lib.view_layouts_find(self.p, C.byref(info))
        assert i >= 0 or i == -errno.ENOENT
        return self.lib.view_layouts_line(self.p, C.c_uint32(i)).contents.number if i >= 0 else None


def test_the_first_line_that_fits_counts(lib):
    with Layouts(lib, """
# a comment
*.q_proj.weight   tp=S(0) dp=R      # column
*.o_proj.*	tp=S(1)
optimizer/*       saved
*.[qk]_proj.*  R
embed?            ep=SS(0,2)

*norm*  dp=IS(0,3)\r
""") as l:
        assert not l.error
        assert l.find("model/a.q_proj.weight") == 3 and l.find("optimizer/a.q_proj.weight") == 3
        assert l.find("model/a.o_proj.weight") == 4 and l.find("optimizer/a.o_proj.bias", 1) == 5
        assert l.find("model/a.o_proj.bias", 1) is None, "S(1) of one dimension does not count"
        assert l.find("model/a.k_proj.x") == 6 and l.find("model/a.q_proj.weight", 0) == 6
        assert l.find("model/embedx") == 7 and l.find("model/embed") is None and l.find("model/embedxy") is None
        assert l.find("model/prenorm1") == 9 and l.find("model/norm", 0) is None and l.find("state/x") is None


def test_presets(lib):
    names = {"llama": {"model.layers.3.self_attn.q_proj.weight": 2, "model.layers.3.self_attn.q_proj.bias": 2,
                       "model.layers.3.mlp.down_proj.weight": 7, "model.norm.weight": None, "lm_head.weight": 9,
                       "model.layers.3.self_attn.qkv_proj.weight": None, "layers.0.attention.wo.weight": 11},
             "mixtral": {"model.layers.0.block_sparse_moe.experts.7.w2.weight": 5,
                         "model.layers.0.block_sparse_moe.gate.weight": None,
                         "model.layers.0.mlp.experts.gate_up_proj": 2},
             "deepseek": {"model.layers.0.self_attn.kv_b_proj.weight": 3,
                          "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": 5,
                          "model.layers.0.mlp.experts.9.gate_proj.weight": 9, "layers.0.attn.wkv_b.weight": 14,
                          "layers.0.ffn.experts.9.w2.weight": 18, "head.weight": 20}}
    for preset, found in names.items():
        with Layouts(lib, f"*.extra R\npreset {preset}\n* R") as l:
            assert not l.error
            for name, number in found.items():
                assert l.find("model/" + name) == (number or 3), name
            assert l.find("model/x.extra") == 1


@pytest.mark.parametrize("text,where,words", [
    ("a b", 1, "DIMENSION=PLACEMENT such as tp=S(0), R, or saved, not 'b'"), ("\n\na", 3, "no placement for 'a'"),
    ("a tp=S(0) tp=R", 1, "two placements for 'tp'"), ("a tp=X", 1, "X"), ("a 2=R", 1, "\"2\" is not a name"),
    ("a tp=", 1, ""), ("a =R", 1, "not a name"), ("a tp=S(0),R", 1, "one placement for each dimension"),
    ("a tp=RS(0;1,2)", 1, "rectangles"), ("a tp=P", 1, "rectangles"), ("a[b tp=R", 1, "a set without its ] in 'a[b'"),
    ("a tp=R saved", 1, "not 'saved'"), ("a R R", 1, "not 'R'"), ("preset", 1, "one name of a preset"),
    ("preset gpt", 1, "there is no preset 'gpt'"), ("preset llama x", 1, "one name"),
    ("# ok\n" + "a" * 1001 + " R", 2, "more than 1000 bytes"), ("* R\n" * 10001, 10001, "more than 10000 lines"),
    ("a " + " ".join(f"d{i}=R" for i in range(18)), 1, "more words"), ("a tp=SS(0,0)", 1, ""),
    ("a " + "x" * 65 + "=R", 1, "longer than 64")])
def test_what_is_wrong(lib, text, where, words):
    with Layouts(lib, text, "some/file") as l:
        assert l.code in (-errno.EINVAL, -errno.E2BIG)
        assert l.error.startswith(f"some/file:{where}: ") and words in l.error, l.error


def test_what_is_no_text(lib):
    for raw, words in ((b"a\0b R", "NUL"), (b"#" * ((1 << 20) + 1), "at most 1048576 bytes")):
        with Layouts(lib, raw) as l:
            assert l.code < 0 and words in l.error
    for raw in (b"", b"\n", b"#", b" \t ", b"\xff\xfe R"):
        with Layouts(lib, raw) as l:
            assert not l.error
    rng = random.Random(1)
    for _ in range(300):
        raw = bytes(rng.choice(b"ab*?[]!-=RS(01), \n#/\xffpreset llama") for _ in range(rng.randint(0, 60)))
        with Layouts(lib, raw) as l:
            assert l.error.startswith("file:") or not l.error
            if not l.error:
                l.find("model/abba")


def test_patterns_are_those_of_fnmatch(lib, scale):
    """Against Python's, which has no ^ for !."""
    rng = random.Random(2)
    names = ["".join(n) for k in range(4) for n in itertools.product("ab-", repeat=k)]
    for _ in range(scale(300, 20_000)):
        pattern = "".join(rng.choice(["a", "b", "-", "*", "*", "?", "[ab]", "[!a]", "[a-b]", "[]a]", "[!]b]", "[a-]"])
                          for _ in range(rng.randint(1, 6)))
        wanted = re.compile(fnmatch.translate(pattern))
        with Layouts(lib, pattern + " R") as l:
            assert not l.error, pattern
            for name in rng.sample(names, 12):
                assert (l.find("m/" + name) == 1) == bool(wanted.match(name)), (pattern, name)


def test_a_pattern_takes_no_time(lib):
    """What costs other matchers a lifetime."""
    with Layouts(lib, "*a" * 400 + "b R") as l:
        assert l.find("model/" + "a" * 4000) is None
