# SPDX-License-Identifier: Apache-2.0
"""The low half of the store (storage, codec, records, packs) through ctypes."""

import ctypes as C
import errno
import os

BLOCK = 16384
RAW = 0x80000000
CREATE, READ_ONLY, NAMED_TEMPS = 8, 1, 2
MINE, OTHER = 0, 1
BASE_EVERSION = errno.EPROTONOSUPPORT
P = C.c_void_p
STORE_ID = bytes(range(16))
PACK = "0123456789abcdef-7-3-model"


class Entry(C.Structure):
    _fields_ = [("name", C.c_char_p), ("size", C.c_uint64), ("temporary", C.c_bool), ("foreign", C.c_bool),
                ("names", C.c_uint64), ("device", C.c_uint64), ("number", C.c_uint64)]


LISTED = C.CFUNCTYPE(C.c_int, P, C.POINTER(Entry))
CHECK = C.CFUNCTYPE(C.c_int, P, C.c_char_p)


class Medium(C.Structure):
    _fields_ = [(n, C.c_uint64) for n in ("block_bytes", "blocks", "blocks_free", "blocks_available", "files",
                                          "files_free")] + [("local", C.c_bool)]


class Owner(C.Structure):
    _fields_ = [("uid", C.c_uint32), ("gid", C.c_uint32), ("mode", C.c_uint32), ("kind", C.c_uint32),
                ("fixed", C.c_bool), ("ctime_ns", C.c_int64),
                ("device", C.c_uint64), ("number", C.c_uint64)]


def _f(*args):
    return C.CFUNCTYPE(C.c_int, *args)


class Ops(C.Structure):
    _fields_ = [
        ("put", _f(P, C.c_char_p, C.c_char_p, C.c_size_t)),
        ("read_whole", _f(P, C.c_char_p, C.c_size_t, C.POINTER(P), C.POINTER(C.c_size_t))),
        ("size", _f(P, C.c_char_p, C.POINTER(C.c_uint64))),
        ("list", _f(P, C.c_char_p, LISTED, P)),
        ("list_dirs", _f(P, C.c_char_p, LISTED, P)),
        ("remove", _f(P, C.c_char_p)),
        ("remove_dir", _f(P, C.c_char_p)),
        ("sync_dir", _f(P, C.c_char_p)),
        ("file_open", _f(P, C.c_char_p, C.POINTER(P), C.POINTER(C.c_uint64))),
        ("file_read", _f(P, C.c_uint64, P, C.c_size_t)),
        ("file_close", C.CFUNCTYPE(None, P)),
        ("writer_open", _f(P, C.c_char_p, C.POINTER(P))),
        ("writer_append", _f(P, C.c_char_p, C.c_size_t)),
        ("writer_seal", _f(P)),
        ("writer_abandon", C.CFUNCTYPE(None, P)),
        ("stat", _f(P, C.POINTER(Medium))),
        ("owner", _f(P, C.c_char_p, C.POINTER(Owner))),
        ("watch", _f(P, C.POINTER(C.c_char_p), C.c_size_t, C.POINTER(C.c_int))),
        ("close", C.CFUNCTYPE(None, P)),
        ("replace", _f(P, C.c_char_p, C.c_char_p, C.c_size_t)),
        ("writer_reopen", _f(P, C.c_char_p, C.POINTER(P))),
        ("writer_seal_over", _f(P, CHECK, P)),
        ("put_fleeting", _f(P, C.c_char_p, C.c_char_p, C.c_size_t)),
        ("file_readv", _f(P, C.c_uint64, P, C.c_uint)),
        ("file_read_past", _f(P, C.c_uint64, C.c_size_t, P, P)),
        ("denied", _f(P, C.c_char_p, C.POINTER(Owner))),
        ("put_passing", _f(P, C.c_char_p, C.c_char_p, C.c_size_t)),
        ("file_gone", C.CFUNCTYPE(C.c_bool, P)),
        ("writer_append_lent", _f(P, P, C.c_size_t, P)),
        ("writer_keep", C.CFUNCTYPE(None, P)),
        ("replace_by_name", C.CFUNCTYPE(C.c_int, P, C.c_char_p, C.c_char_p)),
        ("take", C.CFUNCTYPE(C.c_int, P, C.c_char_p, C.c_char_p, P, C.c_size_t)),
    ]


BACK = C.CFUNCTYPE(None, P)


class Lent(C.Structure):
    """Memory that is lent to writers, from a page on; `returned`: how often its last user said so."""
    _fields_ = [("users", C.c_uint), ("back", BACK)]

    def __init__(self, data):
        super().__init__(1, BACK(self._returned))
        self.room = C.create_string_buffer(len(data) + 4096)
        self.at = C.addressof(self.room) + -C.addressof(self.room) % 4096
        C.memmove(self.at, data, len(data))
        self.returned = 0

    def _returned(self, _):
        self.returned += 1


class StorageHead(C.Structure):
    _fields_ = [("ops", C.POINTER(Ops)), ("relieve", C.c_void_p), ("relieve_arg", C.c_void_p),
                ("write_wait_ns", C.c_uint64)]


class Error(C.Structure):
    _fields_ = [("code", C.c_int), ("text", C.c_char * 1000)]


class Digest(C.Structure):
    _fields_ = [("bytes", C.c_uint8 * 32)]


class Ref(C.Structure):
    _fields_ = [("digest", Digest), ("offset", C.c_uint64), ("checks", C.c_uint64), ("raw_len", C.c_uint64),
                ("stored_len", C.c_uint64),
                ("codec", C.c_uint16), ("kind", C.c_uint8), ("pack", C.c_uint32)]


class Footer(C.Structure):
    _fields_ = [("objects", C.POINTER(Ref)), ("count", C.c_uint64)]


class Record(C.Structure):
    _fields_ = [("kind", C.c_int), ("body", P), ("len", C.c_size_t)]


class Buf(C.Structure):
    _fields_ = [("data", P), ("len", C.c_size_t), ("size", C.c_size_t), ("error", C.c_int)]


class PackName(C.Structure):
    _fields_ = [("attempt", C.c_char * 48), ("rank", C.c_uint32), ("class_", C.c_char * 72)]


DAMAGE = C.CFUNCTYPE(None, P, C.c_uint64, C.c_uint64, C.POINTER(Ref), C.c_char_p)


class VerifyCalls(C.Structure):
    _fields_ = [("damage", DAMAGE), ("progress", P), ("object", P), ("arg", P), ("seed", C.c_uint64)]


_libc = C.CDLL(None)
_libc.free.argtypes = [P]


class StorageError(OSError):
    pass


def check(r, text=""):
    if r < 0:
        raise StorageError(-r, text or os.strerror(-r))
    return r


def bind(lib):
    """Declares the functions used here; returns lib."""
    u16, u32, u64, size, s = C.c_uint16, C.c_uint32, C.c_uint64, C.c_size_t, C.c_char_p
    for name, result, args in [
        ("storage_open_posix", C.c_int, [s, C.c_uint, C.POINTER(P), C.POINTER(Error)]),
        ("storage_name_valid", C.c_bool, [s]),
        ("pack_codec_valid", C.c_bool, [u16]),
        ("pack_codec_name", s, [u16]),
        ("pack_codec_encode", u16, [C.c_uint, P, size, P, P, C.POINTER(u64), P]),
        ("pack_codec_decode_block", C.c_int, [u16, P, u32, P, size, P]),
        ("transform_select", C.c_int, [C.c_int]),
        ("base_digest_of", None, [P, size, C.POINTER(Digest)]),
        ("base_block_check", u64, [C.POINTER(Digest), u64, P, size]),
        ("base_xxh64_of", u64, [u64, s, size]),
        ("store_record_max", u64, [C.c_int]),
        ("store_record_encode", C.c_int, [C.c_int, s, s, size, C.POINTER(Buf)]),
        ("store_record_decode", C.c_int, [C.c_int, s, s, size, C.POINTER(Record), C.POINTER(C.c_bool)]),
        ("store_record_put", C.c_int, [P, s, C.c_int, s, s, size]),
        ("store_record_get", C.c_int, [P, s, C.c_int, s, C.POINTER(Record), C.POINTER(C.c_bool), C.POINTER(Error)]),
        ("store_record_release", None, [C.POINTER(Record)]),
        ("base_buf_release", None, [C.POINTER(Buf)]),
        ("pack_object_align", u64, [u16, u64]),
        ("pack_object_checks_bytes", u64, [u16, u64]),
        ("pack_path", C.c_int, [s, P]),
        ("pack_name_make", C.c_int, [s, u32, s, P]),
        ("pack_name_parse", C.c_int, [s, C.POINTER(PackName)]),
        ("pack_writer_open", C.c_int, [P, s, s, C.POINTER(P)]),
        ("pack_append", C.c_int, [P, C.POINTER(Digest), C.c_int, u16, P, u64, u64, P, P, C.POINTER(Ref)]),
        ("pack_append_raw", C.c_int, [P, C.c_int, s, u64, C.POINTER(Ref)]),
        ("pack_stream_begin", C.c_int, [P, C.POINTER(Digest), C.c_int, u64]),
        ("pack_stream_add", C.c_int, [P, s, size]),
        ("pack_stream_end", C.c_int, [P, C.POINTER(Ref)]),
        ("pack_extent_end", C.c_int, [P]),
        ("pack_writer_size", u64, [P]),
        ("pack_seal", C.c_int, [P, C.POINTER(u64)]),
        ("pack_abandon", None, [P]),
        ("pack_open", C.c_int, [P, s, s, u64, C.POINTER(P), C.POINTER(Error)]),
        ("pack_close", None, [P]),
        ("pack_size", u64, [P]),
        ("pack_object_read_blocks", C.c_int, [P, C.POINTER(Ref), u64, u64, P, C.POINTER(Error)]),
        ("pack_object_read", C.c_int, [P, C.POINTER(Ref), P, C.POINTER(Error)]),
        ("pack_object_load", C.c_int, [P, C.POINTER(Ref), u64, C.POINTER(P), C.POINTER(Error)]),
        ("pack_footer_read", C.c_int, [P, C.POINTER(Footer), C.POINTER(Error)]),
        ("pack_footer_free", None, [C.POINTER(Footer)]),
        ("pack_verify", C.c_int, [P, C.POINTER(VerifyCalls)]),
    ]:
        f = getattr(lib, name)
        f.restype, f.argtypes = result, args
    return lib


class Storage:
    """A storage in a directory; methods raise OSError with the errno that the library gave."""

    def __init__(self, lib, path, flags=0):
        self.lib, self.path = bind(lib), str(path)
        self.s, err = P(), Error()
        check(lib.storage_open_posix(os.fsencode(self.path), flags, C.byref(self.s), C.byref(err)),
              err.text.decode())
        self.ops = C.cast(self.s, C.POINTER(StorageHead)).contents.ops.contents

    def close(self):
        if self.s:
            self.ops.close(self.s)
        self.s = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def put(self, name, data):
        return check(self.ops.put(self.s, name.encode(), data, len(data)))

    def replace(self, name, data):
        check(self.ops.replace(self.s, name.encode(), data, len(data)))

    def replace_by_name(self, name, of):
        check(self.ops.replace_by_name(self.s, name.encode(), of.encode()))

    def take(self, name, of, data):
        check(self.ops.take(self.s, name.encode(), of.encode(), data, len(data)))

    def names(self, name=""):
        """How many each file has, by a listing."""
        found = {}

        @LISTED
        def add(_, e):
            found[os.fsdecode(e.contents.name)] = e.contents.names
            return 0

        check(self.ops.list(self.s, name.encode(), add, None))
        return found

    def sync_dir(self, name):
        check(self.ops.sync_dir(self.s, name.encode()))

    def read(self, name, most=1 << 30):
        p, n = P(), C.c_size_t()
        check(self.ops.read_whole(self.s, name.encode(), most, C.byref(p), C.byref(n)))
        data = C.string_at(p, n.value)
        _libc.free(p)
        return data

    def size(self, name):
        n = C.c_uint64()
        check(self.ops.size(self.s, name.encode(), C.byref(n)))
        return n.value

    def _list(self, f, name):
        found = []

        @LISTED
        def add(_, e):
            e = e.contents
            found.append((os.fsdecode(e.name), e.size, e.temporary, e.foreign))
            return 0

        check(f(self.s, name.encode(), add, None))
        return sorted(found)

    def list(self, name=""):
        return self._list(self.ops.list, name)

    def list_dirs(self, name=""):
        return self._list(self.ops.list_dirs, name)

    def remove(self, name):
        check(self.ops.remove(self.s, name.encode()))

    def file(self, name, data, seal=True):
        """Writes a pack-like file in the given parts."""
        w = P()
        check(self.ops.writer_open(self.s, name.encode(), C.byref(w)))
        for part in data:
            r = self.ops.writer_append(w, part, len(part))
            if r < 0:
                self.ops.writer_abandon(w)
                check(r)
        if seal:
            check(self.ops.writer_seal(w))
        else:
            self.ops.writer_abandon(w)

    def file_over(self, name, data):
        """The same, in the place of what has that name."""
        w = P()
        check(self.ops.writer_reopen(self.s, name.encode(), C.byref(w)))
        check(self.ops.writer_append(w, data, len(data)))
        check(self.ops.writer_seal_over(w, CHECK(lambda _, name: 0), None))


def encode(lib, word_bytes, data):
    """(codec word, stored bytes, stored length words)"""
    bind(lib)
    n = -(-len(data) // BLOCK)
    out, lens, stored = C.create_string_buffer(len(data) + 1), (C.c_uint32 * (n + 1))(), C.c_uint64()
    scratch = C.create_string_buffer(3 * BLOCK + 1024)
    out[len(data)] = b"\x5a"
    word = lib.pack_codec_encode(word_bytes, data, len(data), out, lens, C.byref(stored), scratch)
    assert out.raw[len(data):len(data) + 1] == b"\x5a", "wrote past its room"
    if word == 0:
        return 0, data, None
    return word, out.raw[: stored.value], list(lens[:n])


def decode_block(lib, word, stored, length, raw_len):
    """(result, bytes), with a fence behind the bytes."""
    out = C.create_string_buffer(b"\xa5" * (raw_len + 64), raw_len + 64)
    scratch = C.create_string_buffer(3 * BLOCK + 1024)
    r = lib.pack_codec_decode_block(word, stored, length, out, raw_len, scratch)
    assert out.raw[raw_len:] == b"\xa5" * 64, "wrote past the block"
    return r, out.raw[:raw_len]


def decode(lib, word, stored, lens, raw_len):
    if word == 0:
        return stored
    at, done = 0, b""
    for i, length in enumerate(lens):
        n = length & ~RAW
        r, block = decode_block(lib, word, stored[at:at + n], length, min(BLOCK, raw_len - i * BLOCK))
        check(r)
        at += n
        done += block
    assert at == len(stored)
    return done


def digest(lib, data):
    d = Digest()
    lib.base_digest_of(data, len(data), C.byref(d))
    return d


def checks(lib, d, stored, lens, raw_len):
    n = -(-raw_len // BLOCK)
    out, at = (C.c_uint64 * (n + 1))(), 0
    for i in range(n):
        size = lens[i] & ~RAW if lens else min(BLOCK, raw_len - i * BLOCK)
        out[i] = lib.base_block_check(C.byref(d), i, stored[at:at + size], size)
        at += size
    return out


class PackWriter:
    def __init__(self, storage, name=PACK, store_id=STORE_ID):
        self.lib, self.w, self.refs = storage.lib, P(), []
        check(self.lib.pack_writer_open(storage.s, store_id, name.encode(), C.byref(self.w)))

    def append(self, data, word_bytes=2, kind=1):
        word, stored, lens = encode(self.lib, word_bytes, data)
        d, ref = digest(self.lib, data), Ref()
        self.refs.append((ref, data))
        table = (C.c_uint32 * len(lens))(*lens) if lens else None
        check(self.lib.pack_append(self.w, C.byref(d), kind, word, stored, len(stored), len(data),
                                         checks(self.lib, d, stored, lens, len(data)), table, C.byref(ref)))
        return ref

    def append_raw(self, data, kind=2):
        ref = Ref()
        self.refs.append((ref, data))
        check(self.lib.pack_append_raw(self.w, kind, data, len(data), C.byref(ref)))
        return ref

    def run_end(self):
        check(self.lib.pack_extent_end(self.w))

    def seal(self):
        size, w = C.c_uint64(), self.w
        self.w = None
        check(self.lib.pack_seal(w, C.byref(size)))
        return size.value


class Pack:
    def __init__(self, storage, name=PACK, store_id=STORE_ID):
        self.lib, self.p, err = storage.lib, P(), Error()
        check(self.lib.pack_open(storage.s, store_id, name.encode(), 0, C.byref(self.p), C.byref(err)),
              err.text.decode())

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.lib.pack_close(self.p)

    def read(self, ref, first=0, n=None):
        n = -(-ref.raw_len // BLOCK) - first if n is None else n
        size = min(ref.raw_len, (first + n) * BLOCK) - first * BLOCK
        out, err = C.create_string_buffer(b"\xa5" * (size + 16), size + 16), Error()
        r = self.lib.pack_object_read_blocks(self.p, C.byref(ref), first, n, out, C.byref(err))
        assert out.raw[size:] == b"\xa5" * 16, "wrote past the object"
        check(r, err.text.decode())
        return out.raw[:size]

    def load(self, ref, most=1 << 40):
        p, err = P(), Error()
        check(self.lib.pack_object_load(self.p, C.byref(ref), most, C.byref(p), C.byref(err)), err.text.decode())
        data = C.string_at(p, ref.raw_len)
        _libc.free(p)
        return data

    def footer(self):
        f, err = Footer(), Error()
        check(self.lib.pack_footer_read(self.p, C.byref(f), C.byref(err)), err.text.decode())
        refs = [Ref.from_buffer_copy(f.objects[i]) for i in range(f.count)]
        self.lib.pack_footer_free(C.byref(f))
        return refs

    def verify(self):
        found = []
        callback = DAMAGE(
            lambda _, offset, size, ref, what: found.append((offset, size, ref.contents.offset if ref else None,
                                                             what.decode())))
        check(self.lib.pack_verify(self.p, C.byref(VerifyCalls(damage=callback))))
        return found
