# SPDX-License-Identifier: Apache-2.0
"""Envelopes: whole or refused; two copies serve when one is hurt."""

import ctypes as C
import errno

import pytest
from hypothesis import given, settings, strategies as st

import random
import storelow as low

STORE, ENTRY, MANIFEST = 1, 2, 3
ID = low.STORE_ID


@pytest.fixture(scope="module")
def rec(lib):
    return low.bind(lib)


def encode(lib, kind, body, store_id=ID):
    b = low.Buf()
    r = lib.store_record_encode(kind, store_id, body, len(body), C.byref(b))
    data = C.string_at(b.data, b.len) if r == 0 else None
    lib.base_buf_release(C.byref(b))
    low.check(r)
    return data


def decode(lib, kind, file, store_id=ID):
    r, whole = low.Record(), C.c_bool()
    low.check(lib.store_record_decode(kind, store_id, file, len(file), C.byref(r), C.byref(whole)))
    assert r.kind == kind
    body = C.string_at(r.body, r.len)
    lib.store_record_release(C.byref(r))
    return body, whole.value


def fails(code, *args):
    with pytest.raises(OSError) as e:
        decode(*args)
    assert e.value.errno == code


@settings(max_examples=60, deadline=None)
@given(kind=st.integers(1, 9), body=st.binary(max_size=9000))
def test_round_trip(rec, kind, body):
    file = encode(rec, kind, body)
    assert decode(rec, kind, file) == (body, True)
    if kind in (STORE, ENTRY):
        assert len(file) % 8192 == 0 and file[: len(file) // 2] == file[len(file) // 2:]
    else:
        assert len(file) == 48 + len(body)


def test_every_flip_of_a_single_record_is_refused(rec):
    file = encode(rec, MANIFEST, b"hello world" * 3)
    for i in range(len(file)):
        for bit in range(8):
            bad = bytearray(file)
            bad[i] ^= 1 << bit
            fails(errno.EBADMSG, rec, MANIFEST, bytes(bad))
    for n in range(len(file)):
        fails(errno.EBADMSG, rec, MANIFEST, file[:n])
    fails(errno.EBADMSG, rec, MANIFEST, file + b"\0")


def test_every_flip_of_a_double_record_is_seen_and_survived(rec):
    body = random.randbytes(50)
    file = encode(rec, ENTRY, body)
    assert len(file) == 8192
    for i in range(len(file)):
        bad = bytearray(file)
        bad[i] ^= 1 << i % 8
        assert decode(rec, ENTRY, bytes(bad)) == (body, False), i
    for i in range(0, 98):
        bad = bytearray(file)
        bad[i] ^= 1
        bad[4096 + 97 - i] ^= 1
        fails(errno.EBADMSG, rec, ENTRY, bytes(bad))
    assert decode(rec, ENTRY, file[:4096]) == (body, False)
    fails(errno.EBADMSG, rec, ENTRY, file[:97])
    fails(errno.EBADMSG, rec, ENTRY, b"")


def test_another_store_another_kind_a_newer_version(rec):
    file = encode(rec, MANIFEST, b"x")
    fails(errno.EBADMSG, rec, MANIFEST, file, bytes(16))
    fails(errno.EPROTO, rec, 4, file)
    import hashlib
    head = file[:8] + (2).to_bytes(2, "little") + file[10:16]
    newer = head + hashlib.sha256(head + ID + b"x").digest() + b"x"
    fails(low.BASE_EVERSION, rec, MANIFEST, newer)


def test_layout_is_as_documented(rec):
    import hashlib
    head = b"VCKPTREC" + (1).to_bytes(2, "little") + (MANIFEST).to_bytes(2, "little") + (3).to_bytes(4, "little")
    assert encode(rec, MANIFEST, b"abc") == head + hashlib.sha256(head + ID + b"abc").digest() + b"abc"
    one = encode(rec, STORE, b"abc", None)
    head = head[:10] + (STORE).to_bytes(2, "little") + head[12:]
    assert one == (head + hashlib.sha256(head + bytes(16) + b"abc").digest() + b"abc").ljust(4096, b"\0") * 2


def test_maxima(rec):
    for kind in range(1, 10):
        assert rec.store_record_max(kind) > 0
    most = rec.store_record_max(4)
    encode(rec, 4, bytes(most))
    with pytest.raises(OSError) as e:
        encode(rec, 4, bytes(most + 1))
    assert e.value.errno == errno.E2BIG


def test_put_and_get(rec, tmp_path):
    with low.Storage(rec, tmp_path / "s", low.CREATE) as s:
        assert rec.store_record_put(s.s, b"runs/a/000000000000", ENTRY, ID, b"body", 4) == low.MINE
        assert rec.store_record_put(s.s, b"runs/a/000000000000", ENTRY, ID, b"other", 5) == low.OTHER
        r, err, whole = low.Record(), low.Error(), C.c_bool()
        assert rec.store_record_get(s.s, b"runs/a/000000000000", ENTRY, ID, C.byref(r), C.byref(whole),
                                    C.byref(err)) == 0
        assert C.string_at(r.body, r.len) == b"body" and whole.value
        rec.store_record_release(C.byref(r))
        assert rec.store_record_get(s.s, b"runs/a/000000000001", ENTRY, ID, C.byref(r), None,
                                    C.byref(err)) == -errno.ENOENT
        assert b"runs/a/000000000001" in err.text
