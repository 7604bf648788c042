# SPDX-License-Identifier: Apache-2.0
"""core/base: digests against hashlib, checks against the xxhash package, sentences, buffers, threads."""
import ctypes
import errno
import hashlib
import mmap
import pathlib
import random
import re
import threading
import unicodedata

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

BLOCK = 16384


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1000)]


class Buf(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_size_t), ("size", ctypes.c_size_t), ("error", ctypes.c_int)]

    def bytes(self):
        return ctypes.string_at(self.data, self.len) if self.len else b""


def tree(data):
    """The digest of an object by its definition."""
    leaves = [hashlib.sha256(b"\0" + data[i:i + BLOCK]).digest() for i in range(0, len(data), BLOCK)]
    return hashlib.sha256(b"\1" + len(data).to_bytes(8, "little") + b"".join(leaves)).digest()


def digest_of(lib, data):
    out = ctypes.create_string_buffer(32)
    lib.base_digest_of(data, ctypes.c_size_t(len(data)), out)
    return out.raw


@pytest.fixture(scope="module")
def hasher(lib):
    lib.base_hasher_new.restype = ctypes.c_void_p
    h = ctypes.c_void_p(lib.base_hasher_new())
    assert h
    yield h
    lib.base_hasher_free(h)


def hashed(lib, h, chunks):
    out = ctypes.create_string_buffer(32)
    for chunk in chunks:
        lib.base_hasher_update(h, chunk, ctypes.c_size_t(len(chunk)))
    lib.base_hasher_final(h, out)
    return out.raw


LENGTHS = [0, 1, 2, 55, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 5 * BLOCK + 77, 64 * BLOCK]


@pytest.mark.parametrize("length", LENGTHS)
def test_digest_is_the_tree(lib, hasher, length):
    data = random.Random(length).randbytes(length)
    assert digest_of(lib, data) == tree(data)
    out = ctypes.create_string_buffer(32)
    lib.base_sha256(data, ctypes.c_size_t(length), out)
    assert out.raw == hashlib.sha256(data).digest()
    assert hashed(lib, hasher, [data]) == tree(data)


METHODS = {"libcrypto": 0, "SHA instructions": 1, "AVX2": 2, "AVX-512": 3}


@pytest.fixture(params=["quickest", *METHODS])
def method(lib, request):
    """Each way to hash several messages that this processor has, and what is chosen among them."""
    which = METHODS.get(request.param, -1)
    if lib.base_sha256_select(which) == -errno.ENOTSUP:
        pytest.skip(f"this processor has no {request.param}")
    yield which
    lib.base_sha256_select(-1)


def many(lib, first, data, length, n):
    """n messages of that length; data: a buffer that has them one after another, or its address."""
    room = ctypes.create_string_buffer(data, len(data) + 1) if isinstance(data, bytes) else None
    data = ctypes.addressof(room) if room else data
    at = (ctypes.c_void_p * max(n, 1))(*[data + length * i for i in range(n)])
    out = ctypes.create_string_buffer(b"\xa5" * (32 * n + 1), 32 * n + 1)
    lib.base_sha256_many(ctypes.c_uint8(first), at, ctypes.c_size_t(length), ctypes.c_size_t(n), out)
    assert out.raw[32 * n] == 0xa5
    return [out.raw[32 * i:32 * i + 32] for i in range(n)]


def each(first, data, length, n):
    return [hashlib.sha256(bytes([first]) + data[length * i:length * i + length]).digest() for i in range(n)]


def test_many_messages_at_once(lib, method, rng):
    """Every length of up to three blocks and padding, what is around multiples of a block, and every number of
    messages."""
    data = rng.randbytes(35 * 1025)
    for length in [*range(201), *range(250, 262), *range(1015, 1026)]:
        for n in [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 35] if length % 64 in (54, 55, 62, 63) else [2, 18]:
            assert many(lib, length & 255, data, length, n) == each(length & 255, data, length, n), (length, n)
    for n in range(36):
        assert many(lib, 1, data, 1000, n) == each(1, data, 1000, n), n
    data = rng.randbytes(21 * (BLOCK + 1))
    for length in (BLOCK - 1, BLOCK, BLOCK + 1):
        assert many(lib, 0, data, length, 21) == each(0, data, length, 21)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, 3000), n=st.integers(0, 40), first=st.integers(0, 255), offset=st.integers(0, 64),
       seed=st.integers(0, 2 ** 32))
def test_many_random_messages(lib, method, length, n, first, offset, seed):
    data = random.Random(seed).randbytes(offset + length * n + 1)
    room = ctypes.create_string_buffer(data, len(data))
    assert many(lib, first, ctypes.addressof(room) + offset, length, n) == each(
        first, data[offset:], length, n)


def test_many_messages_between_pages_that_cannot_be_read(lib, method, rng):
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    data = rng.randbytes(2 * page)
    memory[page:3 * page] = data
    for at in (start, start + 3 * page):
        assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    for length in (64, 128, 191, 256, 510):
        n = min(2 * page // length, 37)
        for skip in (0, 2 * page - n * length):  # from the first byte, and to the last
            assert many(lib, 0, start + page + skip, length, n) == each(0, data[skip:], length, n)
    for at in (start, start + 3 * page):
        libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)


class Object(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char_p), ("len", ctypes.c_size_t), ("digest", ctypes.c_uint8 * 32)]


def test_digest_by_each_method(lib, method, hasher, rng):
    """Of objects with any number of leaves, in memory, in pieces that begin and end anywhere, and several at once."""
    lengths = [leaves * BLOCK + more for leaves in (1, 2, 3, 15, 16, 17, 33, 40) for more in (-1, 0, 1, 777)]
    for length in lengths:
        data = rng.randbytes(length)
        cuts = sorted(rng.choices(range(length + 1), k=rng.randrange(4)))
        assert digest_of(lib, data) == tree(data)
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, length])]
        assert hashed(lib, hasher, chunks) == tree(data), cuts
    lengths += [0, 0, 1, 100, BLOCK, BLOCK]
    for n in (0, 1, 2, 3, 7, 30):
        data = [rng.randbytes(length) for length in rng.choices(lengths, k=n)]
        objects = (Object * max(n, 1))(*[Object(d, len(d)) for d in data])
        lib.base_digests_of(objects, ctypes.c_size_t(n))
        assert [bytes(o.digest) for o in objects[:n]] == [tree(d) for d in data], [len(d) for d in data]


class Method(ctypes.Structure):
    Blocks = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _fields_ = [("width", ctypes.c_uint), ("blocks", Blocks), ("has", ctypes.c_void_p)]


def test_a_method_that_hashes_wrongly_is_found(lib):
    calls = []
    lib.base_sha256_method_ns.restype = ctypes.c_uint64
    for width in (2, 16):
        wrong = Method(width, Method.Blocks(lambda state, at, blocks: calls.append(blocks)))
        assert lib.base_sha256_method_ns(ctypes.byref(wrong)) == 0
    assert calls
    assert lib.base_sha256_method_ns(ctypes.byref(Method(1, Method.Blocks()))) > 0  # libcrypto


def test_hasher_takes_chunks_of_any_size(lib, hasher):
    rng = random.Random(3)
    for _ in range(60):
        chunks = [
            rng.randbytes(rng.choice([0, 1, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, rng.randrange(50000)]))
                  for _ in range(rng.randrange(8))]
        assert hashed(lib, hasher, chunks) == tree(b"".join(chunks))


def test_hasher_reset_forgets(lib, hasher):
    lib.base_hasher_update(hasher, b"x" * (BLOCK + 5), ctypes.c_size_t(BLOCK + 5))
    lib.base_hasher_reset(hasher)
    assert hashed(lib, hasher, [b"abc"]) == tree(b"abc")
    lib.base_hasher_free(None)


def test_the_page_tells_the_truth(lib):
    """Each row of the table in docs/format/objects.md: fixed values that stand in every store."""
    lib.base_block_check.restype = ctypes.c_uint64
    page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "format" / "objects.md"
    rows = {row[1].strip(): re.findall("`([0-9a-f]+)`", row[2] + row[3])
            for row in (line.split("|") for line in page.read_text().splitlines()) if len(row) == 5 and "`" in row[2]}
    objects = {"0 bytes": b"", "`abc`": b"abc", "16384 bytes of 0": bytes(16384), "16385 bytes of 0": bytes(16385),
               "32769 bytes, byte *i* = *i* mod 251": bytes(i % 251 for i in range(32769))}
    assert set(objects) <= set(rows)
    for name, data in objects.items():
        digest, text = digest_of(lib, data), ctypes.create_string_buffer(65)
        lib.base_digest_hex(digest, text)
        blocks = [data[i:i + BLOCK] for i in range(0, len(data), BLOCK)]
        checks = [lib.base_block_check(digest, ctypes.c_uint64(i), b, ctypes.c_size_t(len(b)))
                  for i, b in enumerate(blocks)]
        assert [text.value.decode()] + [f"{c:016x}" for c in checks] == rows[name], name


def test_parse_takes_lower_case_hex_only(lib):
    out = ctypes.create_string_buffer(32)
    def parse(text):
        return lib.base_digest_parse(text, ctypes.c_size_t(len(text)), out)
    good = bytes(range(1, 256, 8)).hex()
    assert parse(good.encode()) == 0 and out.raw == bytes.fromhex(good)
    for bad in [good[:-1], good + "0", good.upper(), "g" + good[1:], " " + good[1:], "", good[:-1] + "\0"]:
        assert parse(bad.encode()) == -errno.EINVAL, bad


@pytest.mark.parametrize("length", [0, 1, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 4096, BLOCK, BLOCK + 1, 1 << 20])
def test_xxh3_equals_the_package(lib, length):
    data = random.Random(length).randbytes(length)
    lib.base_xxh64_of.restype = lib.base_block_check.restype = ctypes.c_uint64
    out = ctypes.create_string_buffer(16)
    for seed in [0, 1, 0x9E3779B97F4A7C15, 2 ** 64 - 1]:
        assert lib.base_xxh64_of(ctypes.c_uint64(seed), data,
                                 ctypes.c_size_t(length)) == xxhash.xxh3_64_intdigest(data, seed)
        lib.base_xxh128_of(ctypes.c_uint64(seed), data, ctypes.c_size_t(length), out)
        assert out.raw == xxhash.xxh3_128_digest(data, seed)
    digest = b"\xff" * 7 + b"\xff" + bytes(24)
    for i in [0, 1, 2, 2 ** 40]:
        seed = (int.from_bytes(digest[:8], "little") + i) % 2 ** 64
        got = lib.base_block_check(digest, ctypes.c_uint64(i), data, ctypes.c_size_t(length))
        assert got == xxhash.xxh3_64_intdigest(data, seed)


def test_digests_in_many_threads(lib):
    """A thread's contexts are its own, and go with it."""
    data = [random.Random(i).randbytes(40000 + i) for i in range(8)]
    want, wrong = [tree(d) for d in data], []

    def work(n):
        for _ in range(10):
            for d, w in zip(data, want):
                if digest_of(lib, d) != w:
                    wrong.append(n)

    for _ in range(4):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert not wrong


def test_random_bytes_differ(lib):
    a, b = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    lib.base_random(a, ctypes.c_size_t(64))
    lib.base_random(b, ctypes.c_size_t(64))
    assert a.raw != b.raw and a.raw != bytes(64)


def test_error_sentences(lib):
    err = Error()
    assert lib.base_error_set(ctypes.byref(err), -errno.EINVAL, b"tensor %s: bad\nname", b"a\tb") == -errno.EINVAL
    assert err.code == -errno.EINVAL and err.text == b"tensor a?b: bad?name"
    assert lib.base_error_prefix(ctypes.byref(err), -errno.EIO, b"file %d", 7) == -errno.EINVAL
    assert err.text == b"file 7: tensor a?b: bad?name"
    assert lib.base_error_set(None, -errno.EIO, b"x") == -errno.EIO
    assert lib.base_error_prefix(None, -errno.EIO, b"x") == -errno.EIO
    fresh = Error()
    assert lib.base_error_prefix(ctypes.byref(fresh), -errno.ENOENT, b"packs/ab") == -errno.ENOENT
    assert fresh.code == -errno.ENOENT and fresh.text == b"packs/ab: No such file or directory"


def test_error_text_is_cut_between_characters(lib):
    err = Error()
    for pad in range(4):
        name = b"x" * pad + "é€𝄞".encode() * 300
        lib.base_error_set(ctypes.byref(err), -errno.EINVAL, b"%s", name)
        text = err.text.decode()  # raises when a character was split
        assert 990 < len(err.text) < 1000 and name.startswith(text.encode())
        lib.base_error_prefix(ctypes.byref(err), -errno.EINVAL, b"file")
        assert err.text.decode().startswith("file: ")


def test_error_names_are_known(lib):
    lib.base_error_name.restype = ctypes.c_char_p
    names = {lib.base_error_name(-code)
             for code in (errno.EBADMSG, errno.EPROTO, errno.EPROTONOSUPPORT, errno.EMEDIUMTYPE,
                          errno.ECANCELED, errno.EBUSY, errno.E2BIG)}
    assert len(names) == 7
    assert lib.base_error_name(-errno.ENOSPC) == b"No space left on device"
    assert lib.base_error_name(-99999) == b"unknown error"


def test_buffer_grows(lib):
    b, want = Buf(), b""
    rng = random.Random(1)
    for i in range(300):
        chunk = rng.randbytes(rng.randrange(200))
        lib.base_buf_append(ctypes.byref(b), chunk, ctypes.c_size_t(len(chunk)))
        lib.base_buf_append_zero(ctypes.byref(b), ctypes.c_size_t(3))
        lib.base_buf_append_text(ctypes.byref(b), b"text")
        lib.base_buf_printf(ctypes.byref(b), b"%d-%s", i, b"y" * i)
        want += chunk + bytes(3) + b"text" + b"%d-%s" % (i, b"y" * i)
    assert b.error == 0 and b.bytes() == want and b.size < 2 * len(want)
    lib.base_buf_release(ctypes.byref(b))
    assert (b.data, b.len, b.size, b.error) == (None, 0, 0, 0)
    lib.base_buf_release(None)


def test_buffer_error_sticks(lib):
    b = Buf()
    lib.base_buf_append_text(ctypes.byref(b), b"abc")
    lib.base_buf_extend.restype = ctypes.c_void_p
    assert lib.base_buf_extend(ctypes.byref(b), ctypes.c_size_t(2 ** 64 - 2)) is None
    assert b.error == -errno.ENOMEM
    lib.base_buf_append_text(ctypes.byref(b), b"def")
    assert b.bytes() == b"abc"
    lib.base_buf_steal_text.restype = ctypes.c_void_p
    assert lib.base_buf_steal_text(ctypes.byref(b)) is None
    assert b.error == 0 and b.len == 0


def test_buffer_text_is_stolen(lib):
    b = Buf()
    lib.base_buf_steal_text.restype = ctypes.c_void_p
    lib.base_buf_append_text(ctypes.byref(b), b"hello")
    text = lib.base_buf_steal_text(ctypes.byref(b))
    assert ctypes.string_at(text) == b"hello" and b.data is None
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    text = lib.base_buf_steal_text(ctypes.byref(b))
    assert ctypes.string_at(text) == b""
    ctypes.CDLL(None).free(ctypes.c_void_p(text))


def test_log_goes_to_the_sink(lib, capfd):
    seen = []
    sink = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)(lambda level, text: seen.append((level, text)))
    lib.base_log_set_sink(sink)
    lib.base_log_set_level(1)   # other modules' tests may have made it quieter
    try:
        lib.base_log(1, b"pack %s", b"a\nb")
        lib.base_log(2, b"not shown")
        lib.base_log_set_level(3)
        lib.base_log(3, b"shown")
    finally:
        lib.base_log_set_level(1)
        lib.base_log_set_sink(None)
    assert seen == [(1, b"pack a?b"), (3, b"shown")]
    program = ctypes.c_char_p(b"prog")
    lib.base_log_set_program(program)
    lib.base_log(0, b"to stderr %d", 5)
    lib.base_log_set_program(None)
    assert capfd.readouterr().err == "prog: to stderr 5\n"


JOB = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint)


@pytest.mark.parametrize("threads,queue", [(1, 1), (3, 2), (8, 100), (0, 5)])
def test_pool_runs_every_job_once(lib, threads, queue):
    lib.base_pool_new.restype = ctypes.c_void_p
    pool = ctypes.c_void_p(lib.base_pool_new(ctypes.c_uint(threads), ctypes.c_size_t(queue)))
    assert pool
    count = threads or lib.base_cpu_count()
    seen = []
    job = JOB(lambda arg, worker: seen.append((arg or 0, worker)))
    for i in range(500):
        lib.base_pool_run(pool, job, ctypes.c_void_p(i))
    lib.base_pool_wait(pool)
    assert sorted(a for a, _ in seen) == list(range(500)) and all(w < count for _, w in seen)
    if count == 1:
        assert [a for a, _ in seen] == list(range(500))
    for i in range(10):
        lib.base_pool_run(pool, job, ctypes.c_void_p(i))
    lib.base_pool_free(pool)  # runs what is queued
    assert len(seen) == 510
    lib.base_pool_free(None)


def unsafe(char):
    """By Unicode's own tables: controls, marks of direction, separators of lines and paragraphs."""
    return unicodedata.category(char) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(char) in (
        "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI") or char in "\u200e\u200f\u061c"


def test_what_a_terminal_might_obey_does_not_reach_it(lib, rng):
    err, chars = Error(), [chr(c) for c in (*range(1, 0x2100), *rng.sample(range(0x2100, 0x110000), 500))
                           if not 0xd800 <= c < 0xe000]
    for at in range(0, len(chars), 200):
        given = "".join(chars[at:at + 200])
        want = "".join("?" * len(c.encode()) if unsafe(c) else c for c in given)
        lib.base_error_set(ctypes.byref(err), -errno.EINVAL, b"%s", given.encode())
        assert err.text.decode() == want
    for given, want in ((b"a\x9b31mb", b"a?31mb"), (b"\xc2", b"?"), (b"\xe2\x80", b"??"),
                        (b"\xff\xc3\xa9", b"?\xc3\xa9"), (b"\xed\xa0\x80.", b"???."), (b"\xf4\x90\x80\x80", b"????")):
        lib.base_error_set(ctypes.byref(err), -errno.EINVAL, b"%s|", given)
        assert err.text == want + b"|"


def test_cpu_count_is_that_of_the_affinity_or_the_control_group(lib):
    import os
    lib.base_machine_cpus.restype = ctypes.c_uint64
    assert lib.base_cpu_count() == min(len(os.sched_getaffinity(0)), lib.base_machine_cpus(b""))
