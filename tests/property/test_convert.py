# SPDX-License-Identifier: Apache-2.0
"""core/tensor/convert.h: every pair of types against numpy and ml_dtypes, and, where these round twice, against exact
arithmetic: all codes of small types, random bits, ties, edges of the range."""
import ctypes
import fractions

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

INTEGERS = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
FLOATS = [*SMALL, "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
NAMES = [*INTEGERS, "float16", "bfloat16", "float32", "float64", *COMPLEX, "float8_e4m3fn", "float8_e5m2",
         "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]   # number i + 1
EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 448, 464, 464.1, 480, -465, 240, 248, 247.9, 57344, 61440,
         61439, 65504, 65519, 65520, 3.4e38, 3.402823669e38, 1e308, -1e308, 2**-14, 2**-24, 2**-25, 2**-149,
         2**-25 * 1.0001, 2**-150,
         2**-133, 2**-134, 2**-9, 2**-10, 2**-17, 2**-18, 1e-320, 127.5, 128.5, 2.5, 3.5, 255, 256, -128.9]

# bits of the mantissa, exponent of the smallest normal number, the largest number
RANGES = {"float16": (10, -14, 65504), "bfloat16": (7, -126, 255 * 2 ** 120), "float8_e4m3fn": (3, -6, 448),
          "float8_e5m2": (2, -14, 57344), "float8_e4m3fnuz": (3, -7, 240), "float8_e5m2fnuz": (2, -15, 57344)}


def dtype(name):
    return np.dtype(getattr(ml_dtypes, name)) if name not in dir(np) and name != "bool" else np.dtype(name)


@pytest.fixture(scope="module")
def convert(lib):
    lib.tensor_convert_possible.restype = ctypes.c_bool
    lib.tensor_convert.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    number = {name: i + 1 for i, name in enumerate(NAMES)}

    def work(array, to, shift=0):
        """The items, read and written `shift` bytes from where they would be aligned."""
        size, name = dtype(to).itemsize, array.dtype.name
        there, out = np.empty(array.nbytes + 8, "u1"), np.full(len(array) * size + 16, 0xa5, "u1")
        there[shift:shift + array.nbytes] = array.view("u1")
        assert lib.tensor_convert_possible(number[name], number[to])
        lib.tensor_convert(number[name], number[to], there.ctypes.data + shift, out.ctypes.data + shift, len(array))
        end = shift + len(array) * size
        assert (out[:shift] == 0xa5).all() and (out[end:] == 0xa5).all()
        return out[shift:end].copy().view(dtype(to))
    work.number = number
    work.possible = lib.tensor_convert_possible
    return work


def values(name, rng, n):
    """All codes of a small type; else random bits, random numbers of every size, and edges."""
    t = dtype(name)
    if name == "bool":
        return np.array([False, True])
    if t.itemsize <= 2:
        return np.arange(1 << 8 * t.itemsize, dtype=f"u{t.itemsize}").view(t)
    random = np.frombuffer(rng.bytes(n * t.itemsize), t)
    if name in INTEGERS:
        near = [(1 << i) + d for i in range(0, 8 * t.itemsize) for d in (-1, 0, 1, 1 << max(0, i - 12))]
        return np.concatenate([random, random >> rng.integers(0, 8 * t.itemsize, n).astype(t),
                               np.array(near, "O").astype("u8").astype(t)])
    with np.errstate(over="ignore"):
        spread = (rng.standard_normal(n) * 2.0 ** rng.integers(-30, 20, n)).astype(t)
        ties = (rng.integers(1, 4096, n) * 2.0 ** rng.integers(-40, 12, n)).astype(t)
        return np.concatenate([random, spread, ties, -ties, np.array(EDGES).astype(t)])


def same(found, wanted):
    """Equal bits, but any NaN for a NaN."""
    unsigned = f"u{found.dtype.itemsize}"
    with np.errstate(invalid="ignore"):
        nan = np.isnan(wanted.astype("f8")) if wanted.dtype.kind in "fV" else np.zeros(len(wanted), bool)
        bad = (found.view(unsigned) != wanted.view(unsigned)) & ~nan
        if nan.any():
            bad |= nan & ~np.isnan(found.astype("f8"))
    return not bad.any()


def rounded(exact, to):
    """By exact arithmetic; None: more than the largest number."""
    mantissa, least, most = RANGES[to]
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < fractions.Fraction(2) ** exponent
    quantum = fractions.Fraction(2) ** (max(exponent, least) - mantissa)
    number = round(exact / quantum) * quantum                   # ties to even
    return None if abs(number) > most else float(number)


@pytest.mark.parametrize("to", [*FLOATS, *INTEGERS])
def test_floats(convert, seed, scale, to):
    rng = np.random.default_rng(seed)
    for name in FLOATS:
        x = values(name, rng, scale(3000, 200000))
        if to in INTEGERS:
            with np.errstate(invalid="ignore"):
                wide = x.astype("f8")
            if to == "bool":
                assert (convert(x, to) == (wide != 0)).all()
                continue
            low, high = float(np.iinfo(to).min), float(np.iinfo(to).max)
            wanted = [0 if v != v else int(np.iinfo(to).min) if v <= low else int(np.iinfo(to).max) if v >= high
                      else int(v) for v in wide.tolist()]
            assert convert(x, to).tolist() == wanted, name
            continue
        if name == "float64" and to in SMALL and to != "float16":
            continue                                            # ml_dtypes rounds these twice: below
        with np.errstate(over="ignore", invalid="ignore"):
            assert same(convert(x, to), x.astype(dtype(to))), name
        assert same(convert(x[:1000], to, 3), convert(x[:1000], to)), name


@pytest.mark.parametrize("to", SMALL)
def test_doubles_and_integers_are_rounded_once(convert, seed, scale, to):
    """Numbers beside a tie that a float, or a double, cannot tell from the tie."""
    rng = np.random.default_rng(seed)
    tops = rng.integers(2 ** 12, 2 ** 13, scale(60, 600))
    doubles = [float(top) * 2.0 ** shift * (1 + d * 2.0 ** -52) for top in tops.tolist()
               for shift in (-20, -12, -8, -4) for d in (-1, 0, 1)]
    found = convert(np.array(doubles), to).astype("f8").tolist()
    for value, got in zip(doubles, found):
        want = rounded(fractions.Fraction(value), to)
        assert got == want if want is not None else not np.isfinite(got), (value, got, want)
    for kind in ("int64", "uint64"):
        ints = [s * ((t << i) + d) for t in tops[:20].tolist() for i in (0, 1, 45, 49) for d in (-1, 0, 1)
                for s in ((1, -1) if kind == "int64" else (1,))]
        for value, got in zip(ints, convert(np.array(ints, kind), to).astype("f8").tolist()):
            want = rounded(fractions.Fraction(value), to)
            assert got == want if want is not None else not np.isfinite(got), (value, got, want)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(convert, seed, scale, name):
    rng = np.random.default_rng(seed)
    x = values(name, rng, scale(3000, 200000))
    for to in [*INTEGERS, "float32", "float64"]:
        assert same(convert(x, to, 1), x.astype(to)), to
    for to in SMALL:
        if dtype(name).itemsize < 4:                            # exact as a float
            with np.errstate(over="ignore"):
                assert same(convert(x, to), x.astype("f4").astype(dtype(to))), to


def test_nan_keeps_sign_and_bits(convert):
    nan = np.array([0x7fc12345, 0xff812345, 0x7f800001], "u4").view("f4")
    assert convert(nan, "float16").view("u2").tolist() == [0x7e09, 0xfe09, 0x7e00]
    assert convert(nan, "bfloat16").view("u2").tolist() == [0x7fc1, 0xffc1, 0x7fc0]
    assert convert(nan, "float8_e5m2").view("u1").tolist() == [0x7e, 0xfe, 0x7e]
    for name in ("float16", "bfloat16"):
        there = convert(nan, name)
        assert (np.signbit(convert(there, "float32")) == np.signbit(nan)).all()


def test_parts_of_complex_numbers_and_powers_of_two(convert, seed):
    x = values("float64", np.random.default_rng(seed), 1000)[:2000].copy().view("c16")
    with np.errstate(over="ignore", invalid="ignore"):
        assert same(convert(x, "complex64").view("f4"), x.astype("c8").view("f4"))
        y = x.astype("c8")
    assert same(convert(y, "complex128").view("f8"), y.astype("c16").view("f8"))
    scales = np.arange(256, dtype="u1").view(ml_dtypes.float8_e8m0fnu)
    for to in ("float32", "float64", "bfloat16"):
        wanted = [np.nan if i == 255 else 2.0 ** (i - 127) for i in range(256)]
        assert same(convert(scales, to), np.array(wanted).astype(dtype(to)))


def test_what_cannot_be_converted(convert):
    number, possible = convert.number, convert.possible
    whole = set(INTEGERS) | set(FLOATS)
    for a in NAMES:
        for b in NAMES:
            want = a == b or (a in whole | {"float8_e8m0fnu"} and b in whole) or (a in COMPLEX and b in COMPLEX)
            assert possible(number[a], number[b]) == want, (a, b)
    assert not possible(0, 12) and not possible(12, 22)


def test_the_state_of_the_thread_has_no_effect(convert):
    """A program may round otherwise, or flush subnormals; that stays as it was."""
    libm = ctypes.CDLL("libm.so.6")
    up = 0x800                                                  # FE_UPWARD on x86
    x = np.array([1.0000001, 1e-40, 2 ** -149, 1 / 3], "f4")
    wanted = {to: convert(x, to).tobytes() for to in ("bfloat16", "float16", "float64", "float8_e5m2")}
    before = libm.fegetround()
    if libm.fesetround(up) != 0 or libm.fegetround() != up:
        libm.fesetround(before)
        pytest.skip("this processor has no such rounding mode")
    try:
        found = {to: convert(x, to).tobytes() for to in wanted}
        after = libm.fegetround()
    finally:
        libm.fesetround(before)
    assert found == wanted and after == up
