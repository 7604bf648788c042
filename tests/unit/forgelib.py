# SPDX-License-Identifier: Apache-2.0
"""Lies with all checksums right: the last step of a run is taken apart, changed, and put together again, so that every
digest, check and size is what it has to be and only what the records say of each other is not."""
import contextlib
import ctypes as c
import struct

import storelow

ENTRY, MANIFEST = 2, 3
LAYOUT, PART, CHUNK, HEADER = 3, 4, 5, 6


class Message:
    """A protobuf message: fields in order, each (number, value); a value is an int or bytes."""

    def __init__(self, data=b""):
        self.fields, at = [], 0
        while at < len(data):
            key, at = self.varint(data, at)
            if key & 7 == 0:
                value, at = self.varint(data, at)
            elif key & 7 == 1:
                value, at = data[at:at + 8], at + 8
            else:
                assert key & 7 == 2, key
                size, at = self.varint(data, at)
                value, at = data[at:at + size], at + size
            self.fields.append((key >> 3, key & 7, value))

    @staticmethod
    def varint(data, at):
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                return value, at

    @staticmethod
    def put(value):
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def encode(self):
        out = b""
        for number, wire, value in sorted(self.fields, key=lambda f: f[0]):
            if value == 0 and wire == 0 or value == b"" and wire == 2:
                continue
            out += self.put(number << 3 | wire) + (self.put(value) if wire == 0 else self.put(len(value)) + value
                                                   if wire == 2 else value)
        return out

    def get(self, number, default=0):
        return next((v for n, _, v in self.fields if n == number), default)

    def all(self, number):
        return [v for n, _, v in self.fields if n == number]

    def set(self, number, *values):
        self.fields = [f for f in self.fields if f[0] != number] + [(number, 0 if isinstance(v, int) else 2, v)
                                                                    for v in values]


def ref_bytes(ref, pack):
    return bytes(ref.digest.bytes) + struct.pack("<QQQQIHBB", ref.offset, ref.checks, ref.raw_len, ref.stored_len, pack,
                                                 ref.codec, ref.kind, 0)


class Forge:
    """The last step of a run that one rank saved. `objects`: [kind, bytes] of its `meta` pack, in order; `part`,
    `manifest`, `entry`, `commit`: messages. Live and new bytes and the pack's size follow what was changed, unless
    `keep_sums` says no."""

    def __init__(self, lib, store, run):
        self.lib, self.store, self.run = storelow.bind(lib), store, run
        self.id = self.record_body(store / "vckpt.store", 1, None)
        self.id = Message(self.id).get(3)
        self.entry_path = sorted(p for p in (store / "runs" / run).iterdir() if p.name.isdigit())[-1]
        self.entry = Message(self.record_body(self.entry_path, ENTRY, self.id))
        self.commit = Message(self.entry.get(7))
        self.manifest_path = store / "runs" / run / "manifests" / self.commit.get(5).hex()
        self.manifest = Message(self.record_body(self.manifest_path, MANIFEST, self.id))
        self.pack = f"{self.manifest.get(4).decode()}-0-meta"
        self.pack_path = next(store.rglob(self.pack + ".pack"))
        with self.storage(store) as storage, storelow.Pack(storage, self.pack, self.id) as pack:
            self.refs = pack.footer()
            self.objects = [[ref.kind, bytearray(pack.load(ref))] for ref in self.refs]
        self.part = Message(bytes(self.object(PART)))
        self.keep_sums = False

    def storage(self, path):
        return (contextlib.closing(storelow.Storage(self.lib, path)) if not hasattr(storelow.Storage, "__enter__")
                else storelow.Storage(self.lib, path))

    def object(self, kind, number=0):
        return [data for k, data in self.objects if k == kind][number]

    def record_body(self, path, kind, store_id):
        data, record, whole = path.read_bytes(), storelow.Record(), c.c_bool()
        assert self.lib.store_record_decode(kind, store_id, data, len(data), c.byref(record), c.byref(whole)) == 0
        body = c.string_at(record.body, record.len)
        self.lib.store_record_release(c.byref(record))
        return body

    def put_record(self, path, kind, body):
        file = storelow.Buf()
        assert self.lib.store_record_encode(kind, self.id, body, len(body), c.byref(file)) == 0
        path.write_bytes(c.string_at(file.data, file.len))
        self.lib.base_buf_release(c.byref(file))

    def append(self, w, data, kind):
        w.append_raw(data, kind)

    def write_pack(self, scratch):
        """Returns (references, size) of the objects as they are now."""
        path = scratch / self.pack_path.relative_to(self.store)
        path.unlink(missing_ok=True)
        with self.storage(scratch) as storage:
            w = storelow.PackWriter(storage, self.pack, self.id)
            for kind, data in self.objects:
                self.append(w, bytes(data), kind)
            w.run_end()
            size = w.seal()
            return [ref for ref, _ in w.refs], size, path

    def place_chunks(self, refs):
        """The part's references, and its layout."""
        rows, number = bytearray(self.part.get(8, b"")), 0
        for (kind, _), ref in zip(self.objects, refs):
            if kind == CHUNK:
                at = 88 * number + 16
                rows[at:at + 72] = ref_bytes(ref, struct.unpack_from("<I", rows, at + 64)[0])
                number += 1
            elif kind == LAYOUT:
                self.part.set(6, bytes(ref.digest.bytes))
        if rows:
            self.part.set(8, bytes(rows))
        index = next(i for i, (kind, _) in enumerate(self.objects) if kind == PART)
        self.objects[index][1] = bytearray(self.part.encode())

    def place_manifest(self, refs, size):
        m, headers = self.manifest, iter(self.manifest.all(9))
        ranks = bytearray(m.get(11))
        meta, made = struct.unpack_from("<I", ranks, 24 + 64)[0], []
        for (kind, _), ref in zip(self.objects, refs):
            if kind == LAYOUT:
                m.set(8, ref_bytes(ref, meta))
            elif kind == PART:
                ranks[24:96] = ref_bytes(ref, meta)
            elif kind == HEADER:
                h = Message(next(headers))
                h.set(3, ref_bytes(ref, meta))
                made.append(h.encode())
        m.set(9, *made)
        m.set(11, bytes(ranks))
        packs = Message(m.get(13))
        rows = bytearray(packs.get(3))
        old = struct.unpack_from("<Q", rows, 32 * meta + 16)[0]
        struct.pack_into("<Q", rows, 32 * meta + 16, size)
        if not self.keep_sums:
            struct.pack_into("<Q", rows, 32 * meta + 24, sum(ref.stored_len for ref in refs))
            m.set(16, m.get(16) + size - old)
            self.commit.set(8, self.commit.get(8) + size - old)
        packs.set(3, bytes(rows))
        m.set(13, packs.encode())

    def done(self, scratch):
        """Puts everything in its place."""
        scratch.mkdir(exist_ok=True)
        for _ in range(2):      # a part of another length moves the checks of the extent, of which it tells
            refs, _, _ = self.write_pack(scratch)
            self.place_chunks(refs)
        refs, size, path = self.write_pack(scratch)
        self.place_manifest(refs, size)
        self.pack_path.unlink()
        self.pack_path.write_bytes(path.read_bytes())
        body = self.manifest.encode()
        digest = bytes(storelow.digest(self.lib, body).bytes)
        self.manifest_path.unlink()
        self.put_record(self.manifest_path.with_name(digest.hex()), MANIFEST, body)
        self.commit.set(5, digest)
        self.entry.set(7, self.commit.encode())
        self.put_record(self.entry_path, ENTRY, self.entry.encode())
