# SPDX-License-Identifier: Apache-2.0
"""The words for placements: written and read again, and everything that is not one refused by name."""
import ctypes
import errno
import itertools
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shard_oracle as oracle
import tensorlib as tl

KINDS = ("R", "S", "SS", "IS", "RS", "P")
NUMBER = st.integers(0, 2**64 - 1) | st.integers(0, 20)
SPLIT = st.integers(1, 2**64 - 1) | st.integers(1, 20)
DIM = st.integers(0, 15)
PLACEMENT = st.one_of(st.just(("R",)), st.just(("P",)), st.tuples(st.just("S"), DIM),
                      st.tuples(st.just("SS"), DIM, SPLIT),
                      st.tuples(st.just("IS"), DIM, SPLIT),
                      st.tuples(st.just("RS"), st.integers(0, 16), st.lists(NUMBER, min_size=1, max_size=40).map(tuple)
                                .filter(lambda units: sum(units) < 2**64)))
PLACEMENTS = st.lists(PLACEMENT, min_size=1, max_size=16)


class Words:
    def __init__(self, lib):
        self.lib = tl.load(lib)

    def parse(self, text):
        """The tuples of shard_oracle.py; a str or bytes without NUL."""
        found, err = ctypes.POINTER(tl.Placements)(), tl.Error()
        r = self.lib.tensor_placements_parse(text.encode() if isinstance(text, str) else text, ctypes.byref(found),
                                             ctypes.byref(err))
        if r < 0:
            assert err.code == r and err.text, "an error without a sentence"
            assert not found
            raise tl.Failed(r, err.text.decode(errors="replace"))
        try:
            return [self.one(p) for p in found.contents.at[:found.contents.n]]
        finally:
            self.lib.free(found)

    @staticmethod
    def one(p):
        kind = KINDS[p.kind]
        if kind == "RS":
            ends = [0, *p.ends[:p.nends]]
            return kind, p.dim, tuple(b - a for a, b in itertools.pairwise(ends))
        return {"R": (kind,), "P": (kind,), "S": (kind, p.dim)}.get(kind, (kind, p.dim, p.split))

    def print(self, text):
        """The canonical words of what a text says."""
        found, b = ctypes.POINTER(tl.Placements)(), tl.Buf()
        assert self.lib.tensor_placements_parse(text.encode(), ctypes.byref(found), None) == 0
        self.lib.tensor_placements_print(found.contents.at, found.contents.n, ctypes.byref(b))
        assert b.error == 0
        printed = ctypes.string_at(b.data, b.len).decode()
        self.lib.base_buf_release(ctypes.byref(b))
        self.lib.free(found)
        return printed


@pytest.fixture(scope="module")
def words(lib):
    return Words(lib)


def setting(n):
    return settings(max_examples=n, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                    print_blob=True)


def test_examples(words):
    assert words.parse("R,S(0)") == [("R",), ("S", 0)]
    assert words.parse("SS(1,4),IS(2,3),P") == [("SS", 1, 4), ("IS", 2, 3), ("P",)]
    assert words.parse("RS(0,1;3,0,1)") == [("RS", 2, (3, 0, 1))]
    assert words.parse("RS(;0,1)") == [("RS", 0, (0, 1))]
    assert words.parse(" R , S( 0 ) , RS( 0 , 1 ; 2 , 3 ) , RS( ; 1 ) ") == [("R",), ("S", 0), ("RS", 2, (2, 3)),
                                                                             ("RS", 0, (1,))]
    assert words.parse("S(007)") == [("S", 7)]
    assert words.print(" RS( 0 , 1 ; 02 , 3 ),P") == "RS(0,1;2,3),P"


def test_what_is_printed_is_read_again(words, scale):
    @setting(scale(150, 800))
    @given(PLACEMENTS, st.randoms(use_true_random=False))
    def run(placements, rng):
        text = oracle.words(placements)
        assert words.parse(text) == placements
        assert words.print(text) == text
        spaced = "".join(rng.choice(("", " ", "   ")) + c if c in ",;()"
                         else c + (rng.choice(("", " ")) if c in ",;()" else "") for c in text)
        assert words.parse(spaced + rng.choice(("", "  "))) == placements
        assert words.print(spaced) == text

    run()


def test_equal_is_equal(words, lib, scale):
    """What counts for a kind is compared, and nothing else."""
    def struct(p, keep):
        c = tl.Placement(kind=KINDS.index(p[0]), dim=p[1] if len(p) > 1 else 9, split=p[2] if p[0] in ("SS", "IS")
                         else 77)
        if p[0] == "RS":
            keep.append((ctypes.c_uint64 * len(p[2]))(*itertools.accumulate(p[2])))
            c.ends, c.nends = keep[-1], len(p[2])
        return c

    lib.tensor_placement_equal.restype = ctypes.c_bool

    @setting(scale(150, 800))
    @given(st.lists(
        st.one_of(PLACEMENT,
                  st.sampled_from([("S", 0), ("SS", 0, 2), ("IS", 0, 2), ("SS", 0, 3), ("RS", 1, (1, 2)),
                                   ("RS", 1, (1, 3)),
                                  ("RS", 1, (1, 2, 0)), ("RS", 0, (1, 2)), ("S", 1)])), min_size=2, max_size=2))
    def run(pair):
        keep = []
        for p in pair:
            for q in pair:
                assert lib.tensor_placement_equal(ctypes.byref(struct(p, keep)),
                                                  ctypes.byref(struct(q, keep))) == (p == q)

    run()


# A text, and what of it the sentence must repeat.
BAD = [("", None), (" ", None), (",", None), ("R,", None), (",R", None), ("R,,R", None), ("X", "X"), ("r", "r"),
       ("s(0)", "s(0)"), ("R,Q(1)", "Q(1)"),
       ("R()", "R()"), ("R(0)", "R(0)"), ("P(sum)", "P(sum)"), ("RR", "RR"), ("R R", "R R"), ("S", "S"), ("S()", "S()"),
       ("S(", "S("),
       ("S(0", "S(0"), ("S 0", "S 0"), ("S(0))", "S(0))"), ("S(0)x", "S(0)x"), ("S(0)S(1)", "S(0)S(1)"),
       ("S(-1)", "S(-1)"), ("S(+1)", "S(+1)"),
       ("S(a)", "S(a)"), ("S(0,2)", "S(0,2)"), ("S(16)", "S(16)"), ("S(4294967296)", "S(4294967296)"),
       ("S(18446744073709551616)", "S(18446744073709551616)"),
       ("S(0x1)", "S(0x1)"), ("S(1.0)", "S(1.0)"), ("S(1 2)", "S(1 2)"), ("S[0]", "S[0]"), ("SS(0)", "SS(0)"),
       ("SS(0,)", "SS(0,)"), ("SS(,2)", "SS(,2)"),
       ("SS(0,0)", "SS(0,0)"), ("SS(0,2,3)", "SS(0,2,3)"), ("SS(16,2)", "SS(16,2)"), ("SS(0;2)", "SS(0;2)"),
       ("SS(0,18446744073709551616)", "SS(0,18446744073709551616)"), ("IS(0)", "IS(0)"), ("IS(0,0)", "IS(0,0)"),
       ("IS(0,2", "IS(0,2"),
       ("RS", "RS"), ("RS()", "RS()"), ("RS(;)", "RS(;)"), ("RS(0)", "RS(0)"), ("RS(0;)", "RS(0;)"),
       ("RS(0,1)", "RS(0,1)"), ("RS(1;1)", "RS(1;1)"),
       ("RS(1,0;1)", "RS(1,0;1)"), ("RS(0,0;1)", "RS(0,0;1)"), ("RS(0,2;1)", "RS(0,2;1)"), ("RS(0;1,)", "RS(0;1,)"),
       ("RS(0;,1)", "RS(0;,1)"),
       ("RS(0,;1)", "RS(0,;1)"), ("RS(,0;1)", "RS(,0;1)"), ("RS(0;1;2)", "RS(0;1;2)"), ("RS(0;-1)", "RS(0;-1)"),
       ("RS(0;1", "RS(0;1"), ("RS(0 1;1)", "RS(0 1;1)"),
       ("RS(0;18446744073709551616)", "RS(0;18446744073709551616)"), ("R,S(0),IS(1,2", "IS(1,2"),
       ("R,S(0,RS(0;1)", "S(0,RS(0;1)"), ("R\t,R", "R?"),
       ("R\n", "R"), ("Ｓ(0)", "Ｓ(0)"), ("S(٣)", "S(٣)"), ("RSS(0,1)", "RSS(0,1)"), ("Replicate", "Replicate"),
       ("RS(" + ",".join(map(str, range(17))) + ";1)", "RS(0,1,2")]


@pytest.mark.parametrize("text,says", BAD, ids=[repr(t)[:40] for t, _ in BAD])
def test_bad_words_are_refused_by_name(words, text, says):
    with pytest.raises(tl.Failed) as e:
        words.parse(text)
    assert e.value.code == -errno.EINVAL and "placement" in e.value.text
    if says:
        assert f'"{says}' in e.value.text, e.value.text


@pytest.mark.parametrize("text,says", [(f"RS(0;{2**63},{2**63})",) * 2,
                                       (f"R,RS(0,1;1,0,{2**64 - 1},0),P", f"RS(0,1;1,0,{2**64 - 1},0)"),
                                       (f"RS(;{2**64 - 1},0,1)",) * 2])
def test_units_that_sum_to_more_than_64_bits(words, text, says):
    with pytest.raises(tl.Failed, match="units") as e:
        words.parse(text)
    assert e.value.code == -errno.EOVERFLOW and f'"{says}"' in e.value.text
    assert words.parse(f"RS(0;{2**63},{2**63 - 1},0)") == [("RS", 1, (2**63, 2**63 - 1, 0))]


def test_sixteen_words_and_no_more(words):
    assert len(words.parse(",".join(["S(15)"] * 16))) == 16
    for text in (",".join(["R"] * 17), ",".join(["R"] * 100000)):
        with pytest.raises(tl.Failed) as e:
            words.parse(text)
        assert e.value.code == -tl.ELIMIT and "16" in e.value.text


def test_any_bytes_are_refused_or_mean_something(words, scale):
    """What is accepted is the words that it prints; nothing else is looked at, and nothing dies."""
    alphabet = st.sampled_from([b"R", b"S", b"P", b"I", b"(", b")", b",", b";", b" ", b"0", b"1", b"16", b"\xff",
                                b"18446744073709551615"])

    @setting(scale(500, 4000))
    @given(st.binary(max_size=40).map(lambda b: b.replace(b"\0", b"")) | st.lists(alphabet, max_size=16).map(b"".join))
    def run(text):
        try:
            found = words.parse(text)
        except tl.Failed as e:
            assert e.code in (-errno.EINVAL, -errno.EOVERFLOW, -tl.ELIMIT)
            return
        assert oracle.words(found).encode().replace(b" ", b"") == canonical(text)

    def canonical(text):
        text = text.replace(b" ", b"")
        out, digits = b"", b""
        for c in text.decode() + "\0":
            if c.isdigit():
                digits += c.encode()
                continue
            if digits:
                out += str(int(digits)).encode()
                digits = b""
            out += b"" if c == "\0" else c.encode()
        return out

    run()


def test_one_byte_changed(words, scale):
    """Good words with a byte removed, changed or put in: refused, or read as what they say now."""
    rng = random.Random(1)
    good = "R,S(1),SS(0,4),IS(2,3),RS(0,1;3,0,1),RS(;0,1),P"
    for _ in range(scale(1000, 10000)):
        i, c = rng.randrange(len(good)), rng.choice("RSPI(),; 0129x")
        text = good[:i] + rng.choice(("", c, c + good[i])) + good[i + 1:]
        try:
            found = words.parse(text)
        except tl.Failed as e:
            assert e.code == -errno.EINVAL and '"' in e.text
            continue
        assert words.parse(oracle.words(found)) == found


def test_a_mebibyte_of_units(words):
    units = tuple(i % 10 for i in range(520_000))
    text = oracle.word(("RS", 1, units))
    assert len(text) > 1 << 20 - 1
    started = time.process_time()
    assert words.parse(text) == [("RS", 1, units)]
    assert words.print(text) == text
    for bad in (text[:-1], text[:-1] + "x)", text + "x", text[:-1] + ",99999999999999999999)",
                "RS(0;" + "," * (1 << 20), "S(" * (1 << 19),
                "(" * (1 << 20), " " * (1 << 20), "9" * (1 << 20), "S(" + "9" * (1 << 20) + ")"):
        with pytest.raises(tl.Failed) as e:
            words.parse(bad)
        assert e.value.code == -errno.EINVAL and len(e.value.text) < 300
    assert words.parse("S(" + "0" * (1 << 20) + "3" + " " * (1 << 20) + ")") == [("S", 3)]
    assert time.process_time() - started < 10
