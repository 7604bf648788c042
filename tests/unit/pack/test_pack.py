# SPDX-License-Identifier: Apache-2.0
"""Packs: every object comes back, and no byte of a pack can change unseen."""

import ctypes as C
import errno
import hashlib
import os
import random
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import storelow as low

BLOCK = low.BLOCK


@pytest.fixture
def storage(lib, tmp_path):
    with low.Storage(lib, tmp_path / "s", low.CREATE) as s:
        yield s


def pack_file(storage, name=low.PACK):
    return f"packs/{hashlib.sha256(name.encode()).hexdigest()[:2]}/{name}.pack"


def weights(n, seed=0):
    x = np.random.default_rng(seed).normal(0, 0.02, n // 2 + 1).astype("<f4").view("<u4")
    return (x >> 16).astype("<u2").tobytes()[:n]


def check_all(storage, refs):
    with low.Pack(storage) as p:
        for ref, data in refs:
            assert p.read(ref) == data and p.load(ref) == data
        footer = p.footer()
        assert [(bytes(f.digest.bytes), f.offset, f.checks, f.raw_len, f.stored_len, f.codec, f.kind)
                for f in footer] == \
            [(bytes(r.digest.bytes), r.offset, r.checks, r.raw_len, r.stored_len, r.codec, r.kind) for r, _ in refs]
        assert p.verify() == []


def test_round_trip(storage):
    w = low.PackWriter(storage)
    for i, n in enumerate((0, 1, 63, 64, 65, 5000, BLOCK, BLOCK + 1, 65535, 65536, 65537, 200_000, 1 << 20,
                           (3 << 20) + 17, 0)):
        w.append(random.randbytes(n))
        w.append(weights(n, i))
        w.append_raw(random.randbytes(n % 7000))
        if i % 3 == 2:
            w.run_end()
            w.run_end() # an empty one is none
    size = w.seal()
    assert size == storage.size(pack_file(storage))
    check_all(storage, w.refs)
    raw_large = [r for r, _ in w.refs if r.codec == 0 and r.raw_len >= 65536]
    assert raw_large and all(r.offset % 4096 == 0 for r in raw_large)
    assert all(r.offset % 64 == 0 for r, _ in w.refs) and any(r.codec == 0x201 for r, _ in w.refs)


def test_empty_pack_and_empty_objects(storage):
    assert low.PackWriter(storage).seal() == 4096 + 128
    check_all(storage, [])
    storage.remove(pack_file(storage))
    w = low.PackWriter(storage)
    # 120: an empty object of a new run lies where the old one could go on
    for n in (0, 0, 120, None, 0, None, 0, 0, 3, None, None, 0):
        w.run_end() if n is None else w.append(bytes(range(n)))
    w.seal()
    check_all(storage, w.refs)


def test_runs_end_at_64_mib(lib, storage):
    w = low.PackWriter(storage)
    data = random.randbytes(1 << 20) * 30
    for _ in range(3):
        w.append_raw(data)
    w.append_raw(random.randbytes(1 << 20) * 70)
    w.append_raw(b"tail")
    w.seal()
    check_all(storage, w.refs)
    offsets = [r.offset for r, _ in w.refs]
    assert w.refs[0][0].checks < offsets[2] < w.refs[2][0].checks < offsets[3]
    assert w.refs[1][0].checks == w.refs[0][0].checks + lib.pack_object_checks_bytes(0, 30 << 20)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.sampled_from("wrsaE")), max_size=12), st.integers(0, 1 << 30))
def test_random_packs(storage, parts, seed):
    rng = np.random.default_rng(seed)
    w = low.PackWriter(storage)
    for n, kind in parts:
        if kind == "E":
            w.run_end()
        elif kind == "a":
            w.append_raw(rng.bytes(n))
        elif kind == "s":
            stream(w, rng.bytes(n), rng)
        else:
            w.append(weights(n, n) if kind == "w" else rng.bytes(n))
    w.seal()
    check_all(storage, w.refs)
    with low.Pack(storage) as p:
        for ref, data in w.refs:
            blocks = -(-len(data) // BLOCK)
            for first in range(blocks):
                for n in range(1, blocks - first + 1):
                    assert p.read(ref, first, n) == data[first * BLOCK:(first + n) * BLOCK]
    storage.remove(pack_file(storage))


def stream(w, data, rng, announced=None):
    d, ref = low.digest(w.lib, announced if announced is not None else data), low.Ref()
    low.check(w.lib.pack_stream_begin(w.w, C.byref(d), 2, len(announced if announced is not None else data)))
    at = 0
    while at < len(data):
        n = int(rng.integers(1, 20_000))
        low.check(w.lib.pack_stream_add(w.w, data[at:at + n], len(data[at:at + n])))
        at += n
    low.check(w.lib.pack_stream_end(w.w, C.byref(ref)))
    w.refs.append((ref, data))


def test_a_stream_must_be_what_it_said(storage):
    rng = np.random.default_rng(1)
    for data, announced in ((b"x" * 50_000, b"y" * 50_000), (b"x" * 10, b"x" * 11), (b"x" * 11, b"x" * 10)):
        w = low.PackWriter(storage)
        with pytest.raises(OSError) as e:
            stream(w, data, rng, announced)
        assert e.value.errno == errno.EBADMSG
        with pytest.raises(OSError): # the error sticks: there will be no pack
            w.seal()
        assert storage.list() == []


def test_large_ranges(storage):
    w = low.PackWriter(storage)
    data = weights(5 << 20) + random.randbytes(1 << 20)
    encoded, raw = w.append(data), w.append_raw(random.randbytes((5 << 20) + 1) * 16)
    w.seal()
    assert encoded.codec == 0x201
    with low.Pack(storage) as p:
        for first, n in ((0, None), (1, 1), (63, 2), (100, 150), (383, 1), (60, 300)):
            assert p.read(encoded, first, n) == data[first * BLOCK:][: n * BLOCK if n else None]
        data = w.refs[1][1]
        for first, n in ((0, None), (4095, 2), (5000, 121), (1, 4096), (4097, 70)):
            assert p.read(raw, first, n) == data[first * BLOCK:][: n * BLOCK if n else None]
        assert p.load(raw) == data


def test_append_refuses_what_cannot_be(storage):
    lib, w = storage.lib, low.PackWriter(storage)
    d, ref, data = low.digest(storage.lib, b"x" * 100), low.Ref(), b"x" * 100
    one = (C.c_uint32 * 1)(50)
    c = (C.c_uint64 * 1)()
    for kind, codec, stored_len, raw_len, lens in ((0, 0, 100, 100, None), (7, 0, 100, 100, None),
                                                   (1, 0, 99, 100, None), (1, 0x501, 50, 100, one),
                                                   (1, 0x201, 50, 100, None), (1, 0x201, 49, 100, one),
                                                   (1, 0x201, 50, 50, one)):
        assert lib.pack_append(w.w, C.byref(d), kind, codec, data, stored_len, raw_len, c, lens,
                                     C.byref(ref)) == -errno.EINVAL
    assert lib.pack_append(w.w, C.byref(d), 1, 0, data, (1 << 46) + 1, (1 << 46) + 1, c, None,
                                 C.byref(ref)) == -errno.E2BIG
    w.append(b"still works")
    w.seal()
    check_all(storage, w.refs)


def small_pack(storage):
    """Under 16 KiB, with every kind of part: encoded blocks and a raw one among them, padding, two runs."""
    w = low.PackWriter(storage)
    w.append(b"a" * 100 + b"b")
    w.append(bytes(BLOCK) + bytes(range(256)) * 4, 1)
    w.run_end()
    w.append_raw(random.randbytes(777))
    w.append(b"", kind=2)
    w.append(b"abcdefgh" * 500 + random.randbytes(50), 2)
    noise = random.randbytes(300)
    w.append(bytes(BLOCK) + noise, 4) # its second block does not compress
    w.seal()
    check_all(storage, w.refs)
    return w.refs


def damaged_everywhere(storage, refs, positions, flip):
    """Flips each position in turn: every read gives the right bytes or EBADMSG, and verify tells."""
    path = os.path.join(storage.path, pack_file(storage))
    clean = open(path, "rb").read()
    counts = [0, 0]
    with open(path, "r+b", buffering=0) as f:
        for at in positions if positions is not None else range(len(clean)):
            f.seek(at)
            f.write(bytes([clean[at] ^ flip(at)]))
            try:
                with low.Pack(storage) as p:
                    for ref, data in refs:
                        try:
                            assert p.read(ref) == data, at
                            counts[0] += 1
                        except low.StorageError as e:
                            assert e.errno == errno.EBADMSG, at
                            counts[1] += 1
                    found = p.verify()
                    assert found, f"a flip at {at} went unseen"
                    assert any(offset <= at < offset + max(size, 1) for offset, size, _, _ in found) or at >= 4096, at
            except low.StorageError as e:
                assert e.errno == errno.EBADMSG and at < 4096, at
            finally:
                f.seek(at)
                f.write(clean[at:at + 1])
    return counts


def test_every_flipped_byte_is_seen(storage):
    refs = small_pack(storage)
    size = storage.size(pack_file(storage))
    assert size < 16384
    right, refused = damaged_everywhere(storage, refs, None, lambda at: 1 << at % 8)
    assert right > 0 and refused > 0
    with low.Pack(storage) as p:
        assert p.verify() == []


def test_flips_in_a_larger_pack(storage):
    w = low.PackWriter(storage)
    for i in range(3):
        w.append(weights(300_000 + i, i))
        w.append_raw(random.randbytes(100_000))
    w.seal()
    rng = random.Random(1)
    size = storage.size(pack_file(storage))
    damaged_everywhere(storage, w.refs, [rng.randrange(size) for _ in range(150)], lambda at: rng.randrange(1, 256))


def test_damage_names_its_place_and_object(storage):
    w = low.PackWriter(storage)
    first, second = w.append_raw(random.randbytes(40_000)), w.append(weights(100_000))
    w.seal()
    path = os.path.join(storage.path, pack_file(storage))
    with open(path, "r+b") as f:
        f.seek(second.offset + 5)
        f.write(b"\x00\x01\x02\x03\x04\x05")
    with low.Pack(storage) as p:
        assert p.read(first) == w.refs[0][1]
        with pytest.raises(OSError) as e:
            p.read(second)
        assert low.PACK in e.value.strerror and str(second.offset) in e.value.strerror and "block 0" in e.value.strerror
        assert p.read(second, 1, 1) == w.refs[1][1][BLOCK:2 * BLOCK]
        (offset, size, owner, what), = p.verify()
        assert owner == second.offset and offset == second.offset and size < BLOCK and what


def test_files_that_are_no_pack(lib, storage, tmp_path):
    refs = small_pack(storage)
    path = os.path.join(storage.path, pack_file(storage))
    clean = open(path, "rb").read()

    def refused(data):
        with open(path, "wb") as f:
            f.write(data)
        try:
            with low.Pack(storage) as p:
                with pytest.raises(OSError) as e:
                    p.footer()
                assert e.value.errno == errno.EBADMSG and low.PACK in e.value.strerror
                assert len(p.verify()) == 1
                for ref, good in refs:
                    try:
                        assert p.read(ref) == good
                    except low.StorageError as e:
                        assert e.errno == errno.EBADMSG
        except low.StorageError as e:
            assert e.errno == errno.EBADMSG and low.PACK in e.strerror
    for n in (0, 1, 7, 4095, 4096, 4223, 4224, 4300, len(clean) // 2, len(clean) - 128, len(clean) - 1):
        refused(clean[:n])
    refused(clean + b"\0")
    refused(random.randbytes(10_000))
    refused(bytes(10_000))
    open(path, "wb").write(clean)
    with pytest.raises(OSError) as e:
        low.Pack(storage, store_id=bytes(16))
    assert e.value.errno == errno.EBADMSG and "another store" in e.value.strerror
    other = "0123456789abcdef-8-3-model"
    os.makedirs(os.path.dirname(os.path.join(storage.path, pack_file(storage, other))), exist_ok=True)
    shutil.copy(path, os.path.join(storage.path, pack_file(storage, other)))
    with pytest.raises(OSError) as e:
        low.Pack(storage, other)
    assert e.value.errno == errno.EBADMSG and "another pack" in e.value.strerror
    with pytest.raises(OSError) as e:
        low.Pack(storage, "0123456789abcdef-9-3-model")
    assert e.value.errno == errno.ENOENT and "missing" in e.value.strerror


def test_a_pack_that_shrinks_under_its_reader(storage):
    refs = small_pack(storage)
    with low.Pack(storage) as p:
        os.truncate(os.path.join(storage.path, pack_file(storage)), 4300)
        results = []
        for ref, data in refs:
            try:
                results.append(p.read(ref) == data)
            except low.StorageError as e:
                assert e.errno == errno.EBADMSG
                results.append(None)
        assert None in results and False not in results
        assert p.verify()


def unknown(ref):
    """A codec or kind of a later version: whoever follows a reference has verified it, so it is no damage."""
    return ref.kind > 6 or ref.codec not in (0, 1, 0x101, 0x201, 0x301, 0x401)


def test_references_that_lie(storage):
    w = low.PackWriter(storage)
    data = weights(100_000)
    good, other = w.append(data), w.append_raw(random.randbytes(50_000))
    w.seal()
    rng = random.Random(2)
    with low.Pack(storage) as p:
        for _ in range(3000):
            ref = low.Ref.from_buffer_copy(rng.choice([good, other]))
            for _ in range(rng.randrange(1, 3)):
                field = rng.choice(["offset", "checks", "raw_len", "stored_len", "codec", "kind", "digest"])
                if field == "digest":
                    ref.digest.bytes[rng.randrange(8)] ^= 1
                else:
                    setattr(ref, field,
                            rng.choice([0, 1, 64, 4096, 2**16, 2**46, 2**63, 2**64 - 64, 2**64 - 1,
                                        getattr(other, field), getattr(ref, field) + 64]))
            if ref.raw_len > 1 << 20:
                out = C.create_string_buffer(BLOCK) # a sane reader of one block
                r = storage.lib.pack_object_read_blocks(p.p, C.byref(ref), 0, 1, out, None)
                assert r == (-errno.EPROTONOSUPPORT if unknown(ref) else -errno.EBADMSG)
                continue
            try:
                got = p.read(ref)
                # The codec is not under the blocks' checks: it is believed because the reference's owner is hashed
                # (docs/format/objects.md).
                assert ref.codec not in (good.codec, other.codec) or got in (data[:len(got)], w.refs[1][1][:len(got)])
            except low.StorageError as e:
                assert e.errno == (errno.EPROTONOSUPPORT if unknown(ref) else errno.EBADMSG)
        blocks = 7
        out = C.create_string_buffer(BLOCK)
        for first, n in ((blocks, 1), (0, blocks + 1), (2**64 - 1, 2), (1, 2**64 - 1)):
            assert storage.lib.pack_object_read_blocks(p.p, C.byref(good), first, n, out, None) == -errno.EINVAL
        with pytest.raises(OSError) as e:
            p.load(good, 99_999)
        assert e.value.errno == errno.EFBIG


def test_load_hashes_again(storage):
    """Checks that hold do not make an object of the wrong digest pass (only the first 8 bytes seed them)."""
    w = low.PackWriter(storage)
    ref = w.append(weights(30_000))
    w.seal()
    liar = low.Ref.from_buffer_copy(ref)
    liar.digest.bytes[20] ^= 1
    with low.Pack(storage) as p:
        assert p.read(liar) == w.refs[0][1]
        with pytest.raises(OSError) as e:
            p.load(liar)
        assert e.value.errno == errno.EBADMSG


def test_layout_is_as_documented(storage):
    w = low.PackWriter(storage)
    data = b"hello"
    ref = w.append_raw(data)
    w.seal()
    le = lambda n, size: n.to_bytes(size, "little")
    leaf = hashlib.sha256(b"\0" + data).digest()
    digest = hashlib.sha256(b"\1" + le(5, 8) + leaf).digest()
    assert bytes(ref.digest.bytes) == digest and (ref.offset, ref.checks) == (4096, 4104)
    file = storage.read(pack_file(storage))
    x = lambda b, seed=0: le(storage.lib.base_xxh64_of(seed, b, len(b)), 8)
    name = low.PACK.encode()
    head = b"VCKPTPAK" + le(1, 2) + le(0, 2) + le(0, 4) + low.STORE_ID + le(len(name), 2) + name
    head = head.ljust(4088, b"\0")
    body = data + bytes(3) + x(data, int.from_bytes(digest[:8], "little")) + bytes(48)
    entry = digest + le(4096, 8) + le(4104, 8) + le(5, 8) + le(5, 8) + le(0, 2) + le(2, 1) + bytes(13)
    tail = (b"VCKPTEND" + le(4160, 8) + le(80, 8) + le(1, 8) + le(4160 + 80 + 128, 8) +
            hashlib.sha256(entry).digest()).ljust(120, b"\0")
    assert file == head + x(head) + body + entry + tail + x(tail)


def test_names(lib):
    low.bind(lib)
    out, parsed = C.create_string_buffer(512), low.PackName()
    assert lib.pack_name_make(b"0123456789abcdef-7", 3, b"model", out) == 0 and out.value == low.PACK.encode()
    assert lib.pack_name_parse(b"0123456789abcdef-0-4294967295-a-b.c_d", C.byref(parsed)) == 0
    assert (parsed.attempt, parsed.rank, parsed.class_) == (b"0123456789abcdef-0", 4294967295, b"a-b.c_d")
    assert lib.pack_path(low.PACK.encode(), out) == 0
    assert out.value.decode() == pack_file(None)
    for bad in ("", "x", "0123456789abcdef", "0123456789abcdef-1", "0123456789abcdef-1-2", "0123456789abcdef-1-2-",
                "0123456789abcdef-01-2-a",
                "0123456789abcdef-1-02-a", "0123456789ABCDEF-1-2-a", "0123456789abcdef-1-4294967296-a",
                "0123456789abcdef-18446744073709551616-2-a",
                "0123456789abcdef-1-2-a/b", "0123456789abcdef-1-2-..", "0123456789abcdef-1-2-" + "a" * 72,
                "0123456789abcdef-+1-2-a"):
        assert lib.pack_path(bad.encode(), out) == -errno.EINVAL, bad
    assert lib.pack_path(b"0123456789abcdef-1-2-" + b"a" * 200, out) == -errno.ENAMETOOLONG
    assert lib.pack_name_make(b"0123456789abcdef-7", 3, b"a/b", out) == -errno.EINVAL
    assert lib.pack_name_make(b"0123456789abcdef-7-1", 3, b"a", out) == -errno.EINVAL


@pytest.mark.parametrize("encoded", [False, True])
def test_kept_checks_are_those_of_the_pack(storage, encoded):
    """Objects in any order, and all blocks of some, though checks are kept between the reads."""
    w, rng = low.PackWriter(storage), random.Random(5)
    for i in range(80):
        n = rng.choice([BLOCK, 3 * BLOCK, 20 * BLOCK, 70_001])
        w.append(weights(n, i) if encoded else rng.randbytes(n))
    w.seal()
    with low.Pack(storage) as p:
        for ref, data in [*w.refs, *rng.sample(w.refs, 80)]:
            assert p.read(ref) == data
            first = rng.randrange(-(-len(data) // BLOCK))
            n = rng.randint(1, -(-len(data) // BLOCK) - first)
            assert p.read(ref, first, n) == data[first * BLOCK:(first + n) * BLOCK]


def test_checks_that_were_read_wrong_are_read_again(storage, tmp_path):
    """Whoever reads after an error reads all of it anew."""
    w = low.PackWriter(storage)
    for i in range(8):
        w.append(random.randbytes(20 * BLOCK))
    w.seal()
    file, at = tmp_path / "s" / pack_file(storage), w.refs[5][0].checks + 9
    good = file.read_bytes()
    file.chmod(0o600)

    def write(byte):
        with open(file, "r+b") as f:
            f.seek(at)
            f.write(bytes([byte]))
    write(good[at] ^ 1)
    with low.Pack(storage) as p:
        for ref, data in w.refs[:5]:
            assert p.read(ref) == data
        write(good[at])
        with pytest.raises(Exception, match="do not match their check"):
            p.read(w.refs[5][0])        # its checks were kept before
        assert p.read(w.refs[5][0]) == w.refs[5][1]


def test_checks_are_read_where_what_follows_them_is_not_there(storage, tmp_path):
    """The rest of their page is read with them; an object does not depend on it."""
    w = low.PackWriter(storage)
    for _ in range(8):
        w.append(random.randbytes(20 * BLOCK))
    w.seal()
    ref, data = w.refs[3]
    file = tmp_path / "s" / pack_file(storage)
    file.chmod(0o600)
    with low.Pack(storage) as p:
        os.truncate(file, ref.checks + 8 * 20)
        assert p.read(ref) == data
        with pytest.raises(Exception, match="shorter than it was"):
            p.read(w.refs[4][0])
