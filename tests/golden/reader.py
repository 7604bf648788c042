#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a store by the pages alone: reader.py STORE.

Written from docs/format/ and proto/vckpt.proto, and from nothing else of this project: where this file and the code
differ, one of them or a page is wrong. It reads every file of the store, makes every digest, check and XXH3-128 anew,
puts every tensor and every shown file together, and prints what it found as JSON. It is strict: what a reader may pass
over and a writer never makes is told, too. Exit status: 0; 1 where anything is not as the pages say, one sentence for
each on standard error; 4 where a newer version wrote something, and nothing is wrong.
"""
import argparse
import functools
import hashlib
import itertools
import json
import math
import pathlib
import re
import struct
import sys

import numpy
import xxhash

VERSION, BLOCK, NONE = 2, 16384, 0xffffffff
WORDS = {"Store": ["grid-2", "list-2", "list-3", "list-4"], "Layout": ["grid-2"],
         "Entry": ["list-2", "list-3", "list-4"]}
PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto/vckpt.proto"
PIECE, BLOB, LAYOUT, PART, CHUNK, HEADER = range(1, 7)
KINDS = {1: ("Store", 1 << 16), 2: ("Entry", 64 << 20), 3: ("Manifest", 256 << 20), 4: ("Begin", 1 << 20),
         5: ("BaseRecord", 1 << 20),
         6: ("Announcement", 64 << 20), 7: ("Heartbeat", 1 << 20), 8: ("Trash", 1 << 20), 9: ("Stats", 16 << 20),
         10: ("Damage", 2 << 20), 11: ("Entry", 64 << 20)}
DTYPES = {1: ("bool", 1, "BOOL"), 2: ("u8", 1, "U8"), 3: ("u16", 2, "U16"), 4: ("u32", 4, "U32"), 5: ("u64", 8, "U64"),
          6: ("i8", 1, "I8"),
          7: ("i16", 2, "I16"), 8: ("i32", 4, "I32"), 9: ("i64", 8, "I64"), 10: ("f16", 2, "F16"),
          11: ("bf16", 2, "BF16"), 12: ("f32", 4, "F32"),
          13: ("f64", 8, "F64"), 14: ("c64", 8, "C64"), 15: ("c128", 16, None), 16: ("f8_e4m3fn", 1, "F8_E4M3"),
          17: ("f8_e5m2", 1, "F8_E5M2"),
          18: ("f8_e4m3fnuz", 1, "F8_E4M3FNUZ"), 19: ("f8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
          20: ("f8_e8m0fnu", 1, "F8_E8M0"),
          21: ("f4_e2m1fn_x2", 1, "F4")}
RUN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
LAUNCH = r"[0-9a-f]{16}"
NUMBER = r"(?:0|[1-9][0-9]*)"
ATTEMPT = rf"{LAUNCH}-{NUMBER}"
TAG = r"(?!latest$)(?!step-)(?![0-9]+$)[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"


class Bad(Exception):
    """Something is not as the pages say."""


class Newer(Exception):
    """A newer version wrote it."""


def need(holds, *what):
    if not holds:
        raise Bad(" ".join(map(str, what)))


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def u64(*numbers):
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def up(number, to):
    return -(-number // to) * to


def blocks_of(length):
    return -(-length // BLOCK)


def tree(data):
    """objects.md, Digest."""
    return sha(b"\1", u64(len(data)), *[sha(b"\0", data[i:i + BLOCK]) for i in range(0, len(data), BLOCK)])


def row_digest(digests):
    return sha(b"\2", u64(len(digests)), *digests)


def rows(data, form, what):
    need(len(data) % struct.calcsize(form) == 0, what, "is not a whole number of rows")
    return list(struct.iter_unpack(form, data))


def ascending(items, what):
    need(all(a < b for a, b in itertools.pairwise(items)), what, "is not sorted and unique")


# ---- messages.md ----

def schema():
    text, found = re.sub(r"//.*", "", PROTO.read_text()), {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.S):
        found[name] = {int(n): (field, kind, bool(many))
                       for many, kind, field, n in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body)}
    return found


SCHEMA = schema()
WIRE = {"uint32": 0, "uint64": 0, "bool": 0, "sint64": 0, "fixed64": 1}


def varint(data, at, strict=True):
    value = shift = 0
    while True:
        need(at < len(data) and shift < 70, "a number ends behind its message")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    need(value < 1 << 64, "a number has more than 64 bits")
    need(not strict or shift == 7 or byte, "a varint is padded")
    return value, at


def take(data, at, wire, strict=True):
    """The value of a field at `at`, and where it ends."""
    if wire == 0:
        return varint(data, at, strict)
    if wire == 2:
        length, at = varint(data, at, strict)
    else:
        need(wire in (1, 5), "a field is a group")
        length = 8 if wire == 1 else 4
    need(length <= len(data) - at, "a field ends behind its message")
    return data[at:at + length], at + length


def value_of(kind, value, name):
    if kind in ("uint32", "bool"):
        need(value < 1 << (32 if kind == "uint32" else 1), name, "is too large")
        return value
    if kind == "sint64":
        return value >> 1 ^ -(value & 1)
    if kind == "fixed64":
        return struct.unpack("<Q", value)[0]
    if kind == "string":
        return text(value, name)
    return decode(kind, value) if kind in SCHEMA else value


def text(data, name):
    try:
        found = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Bad(f"{name} is not UTF-8") from None
    need("\0" not in found, name, "holds a NUL")
    return found


def decode(message, data):
    """A dict of all fields, and under "unknown" the bytes of the fields that the schema lacks."""
    fields = SCHEMA[message]
    empty = {"string": "", "bytes": b""}
    found = {name: [] if many else None if kind in SCHEMA else empty.get(kind, 0)
             for name, kind, many in fields.values()}
    at, seen, found["unknown"] = 0, set(), b""
    while at < len(data):
        start = at
        tag, at = varint(data, at, False)
        number, wire = tag >> 3, tag & 7
        need(0 < number < 1 << 29, message, "has a field without a number")
        if number not in fields:
            _, at = take(data, at, wire, False)
            found["unknown"] += data[start:at]
            continue
        name, kind, many = fields[number]
        what = f"{message}.{name}"
        need(wire == WIRE.get(kind, 2) and at - start == (1 if number < 16 else 2), what,
             "is not written as its type is")
        value, at = take(data, at, wire)
        need(many or number not in seen, what, "stands twice")
        seen.add(number)
        value = value_of(kind, value, what)
        need(many or kind in SCHEMA or value, what, "is a default and not left out")
        found[name] = found[name] + [value] if many else value
    return found


def head(message, body, store_version, exact=False):
    """Version and words first: what a newer version wrote is not read further."""
    first = decode("Head", body)
    if first["version"] > VERSION:
        raise Newer(f"is of version {first['version']}")
    for word in first["features"]:
        if word not in WORDS.get(message, ()):
            raise Newer(f"needs the word {word}")
    ascending(first["features"], "the table of words")
    need(first["version"] >= 1, "says no version")
    need(first["version"] == store_version if exact else first["version"] <= store_version, "is of version",
         first["version"], "in a store of", store_version)
    return decode(message, body)


def attributes_of(listed):
    for a in listed:
        need(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", a["key"]) and len(a["value"].encode()) <= 4096,
             "an attribute breaks the rules:", a["key"])
    ascending([a["key"].encode() for a in listed], "the table of attributes")
    need(len(listed) <= 1024 and sum(len((a["key"] + a["value"]).encode()) for a in listed) <= 65536,
         "there are too many attributes")
    return {a["key"]: a["value"] for a in listed}


class Ref:
    """A reference of 72 bytes."""

    def __init__(self, data, kind, packs):
        need(len(data) == 72, "a reference is not of 72 bytes")
        self.digest, self.offset, self.checks, self.raw, self.stored, self.pack, self.codec, self.kind, zero = (
            struct.unpack("<32s4QIHBB", data))
        need(self.kind == kind and not zero, "a reference of kind", self.kind, "stands where one of", kind, "belongs")
        codec_known(self.codec)
        need(self.raw <= 1 << 46 and (self.stored < self.raw if self.codec else self.stored == self.raw),
             "a reference has wrong lengths")
        need(self.checks >= self.offset + self.stored and self.pack < len(packs), "a reference lies nowhere")
        size = packs[self.pack][1]
        need(not size or self.checks + blocks_of(self.raw) * (12 if self.codec else 8) <= size,
             "a reference ends behind its pack")


def codec_known(word):
    if word not in (0, 0x001, 0x101, 0x201, 0x301, 0x401):
        raise Newer(f"has the codec word {word:#x}")


def pack_table(table, sizes):
    """[(name, size, live bytes)]."""
    if table is None:
        return []
    attempts = [f"{launch.hex()}-{count}" for launch, count in rows(table["attempts"], "<8sQ", "a table of attempts")]
    found, uses = [], ([], [])
    for attempt, rank, cls, zero, size, live in rows(table["packs"], "<IIIIQQ", "a table of packs"):
        need(attempt < len(attempts) and cls < len(table["classes"]) and not zero,
             "a row of a pack table points nowhere")
        need(size or not sizes, "a pack of a manifest has no size")
        need(not size or live <= size, "a pack has more live bytes than bytes")
        uses[0].append(attempt)
        uses[1].append(cls)
        found.append((f"{attempts[attempt]}-{rank}-{table['classes'][cls]}", size, live))
    for used, all_of in zip(uses, (attempts, table["classes"])):
        need(list(dict.fromkeys(used)) == list(range(len(all_of))) and len(set(all_of)) == len(all_of),
             "a pack table is not in the order of first use")
    need(len({name for name, _, _ in found}) == len(found), "a pack stands twice in a table")
    return found


# ---- codec.md ----

def lz4_block(data, length):
    """The LZ4 block format; it must give exactly `length` bytes."""
    out, at = bytearray(), 0

    def more(count):
        nonlocal at
        last = 255 if count == 15 else 0
        while last == 255:
            last = data[at]
            count, at = count + last, at + 1
        return count

    try:
        while True:
            token = data[at]
            at += 1
            count = more(token >> 4)
            need(count <= len(data) - at, "an LZ4 block is cut short")
            out += data[at:at + count]
            at += count
            if at == len(data):
                break
            back, at = data[at] | data[at + 1] << 8, at + 2
            count = more(token & 15) + 4
            need(0 < back <= len(out) and len(out) + count <= length, "an LZ4 block copies from or to nowhere")
            start = len(out) - back
            out += (out[start:] * -(-count // back))[:count] if back < count else out[start:start + count]
    except IndexError:
        raise Bad("an LZ4 block is cut short") from None
    need(len(out) == length, "an LZ4 block has another length")
    return bytes(out)


def planes_back(data, width):
    words = len(data) // width // 8 * 8
    planes = numpy.frombuffer(data, "u1", words * width).reshape(8 * width, words // 8)
    bits = numpy.unpackbits(planes, axis=1, bitorder="little")
    return numpy.packbits(bits.T, axis=1, bitorder="little").tobytes() + data[words * width:]


def decode_block(stored, length, as_it_is, codec):
    if as_it_is:
        return stored
    data = lz4_block(stored, length)
    return planes_back(data, 1 << (codec >> 8) - 1) if codec >> 8 else data


# ---- grid.md ----

def parameters_of(message):
    """M, T, R, S; S is 0 where the word is not there."""
    M, T, R, S = (message[f"{name}_bytes"] for name in ("min", "target", "row", "small"))
    need(("grid-2" in message["features"]) == bool(S), "has the word grid-2 or its field, and not both")
    need(S <= M and 1 <= M <= T <= 4 << 20 and 1 <= R <= T // 2, "has parameters that no grid has")
    return M, T, R, S


def half(x, S):
    return (x + 1) // 2 if S or x % 2 == 0 else 1 << x.bit_length() - 1


def least(shape, item, M, S):
    return S if S and 0 not in shape and item * math.prod(shape) < 64 * M else M


@functools.cache
def tile(shape, item, M, T, R, S):
    M = least(shape, item, M, S)
    if not shape or 0 in shape:
        return tuple(max(s, 1) for s in shape), max(len(shape) - 1, 0)
    e, k = list(shape), len(shape) - 1
    while k > 0 and item * math.prod(shape[k:]) < 2 * R:
        k -= 1
    o = next((d for d in range(k + 1) if shape[d] > 1), k)

    def rowok(d):
        return d != k or o == k or item * e[k] * math.prod(shape[k + 1:]) >= 2 * R

    def cut(d, m):
        while e[d] > 1 and item * math.prod(e) >= 2 * M and rowok(d) and -(-shape[d] // half(e[d], S)) <= m:
            e[d] = half(e[d], S)
    if o == k:
        cut(k, 64)
    else:
        cut(o, 8)
        cut(k, 8)
        cut(o, 64)
    while item * math.prod(e) > T:
        d = next((d for d in range(k + 1) if e[d] % 2 == 0 and rowok(d)), None)
        d = next((d for d in range(len(e)) if e[d] > 1), None) if d is None else d
        if d is None:
            break
        e[d] = half(e[d], S)
    return tuple(e), k


def between(start, size, step):
    """The parts of [start, start + size) between neighbouring multiples of step."""
    end = start + size
    cuts = [start, *range((start // step + 1) * step, end, step), end]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


class Grid:
    def __init__(self, shape, item, parameters):
        self.shape, self.item = shape, item
        self.M = least(shape, item, parameters[0], parameters[3])
        self.e, self.k = tile(shape, item, *parameters)
        self.whole = tuple((0, s) for s in shape)

    def pieces(self, box):
        """Boxes of the pieces, in their numbered order."""
        if not box or any(size == 0 for _, size in box):
            return [box]
        k, found = self.k, []
        others = [d for d in range(len(box)) if d != k]
        for cell in itertools.product(*[between(*box[d], self.e[d]) for d in others]):
            r = self.item * math.prod(size for _, size in cell)
            w = self.e[k]
            while any(self.e[d] != self.shape[d] for d in others) and r * w < self.M and w < self.shape[k]:
                w *= 2
            found += [(*cell[:k], along, *cell[k:]) for along in between(*box[k], w)]
        return found

    def bytes_of(self, box):
        return self.item * math.prod(size for _, size in box)

    def put(self, array, box, data):
        """array: of the tensor's shape and one dimension more, the item's bytes."""
        if not box:
            array[...] = numpy.frombuffer(data, "u1")
            return
        at = 0
        for along in between(*box[self.k], self.e[self.k]) if data else []:
            cell = (*box[:self.k], along, *box[self.k + 1:])
            size = self.bytes_of(cell)
            shape = [s for _, s in cell] + [self.item]
            array[tuple(slice(o, o + s) for o, s in cell)] = numpy.frombuffer(data, "u1", size, at).reshape(shape)
            at += size
        need(at == len(data), "a piece is not of the grid's length")


# ---- names.md ----

def escape(name, suffix=b"", dot=False):
    units = [b"%%%02X" % b[0] if b in (b"/", b"%", b"\x7f") or b[0] < 32 or i == 0 and b == b"." and not dot else b
             for i, b in enumerate(c.encode() for c in name)]
    if len(b"".join(units)) + len(suffix) > 255 and dot:
        return escape(name, suffix)
    if len(b"".join(units)) + len(suffix) > 255:
        while len(b"".join(units)) > 180:
            units.pop()
        units += [b"%~", hashlib.sha256(name.encode()).hexdigest()[:32].encode()]
    return (b"".join(units) + suffix).decode()


def blob_path(name):
    parts, start = [], 0
    for at, c in enumerate(name):
        if c == "/" and at > start and at + 1 < len(name) and name[at + 1] != "/":
            parts.append(name[start:at])
            start = at + 1
    parts.append(name[start:])
    return "/".join(escape(part, dot=part not in (".", "..") and part.lower() != ".git"
                           and not part.startswith(".vckpt")) for part in parts)


def way_given(path):
    first = path[0].encode()
    return "".join(f"%{b:02X}" for b in first) + path[1:]


def blob_files(blobs, own):
    """{path: name} of a step's global blobs, `own` being the tree's files. Where two that gave way meet, neither is
    named here."""
    def above(path):
        return {path[:i] for i, c in enumerate(path) if c == "/"}

    paths = {name: blob_path(name) for name in blobs}
    needed = set().union(*map(above, own), *map(above, paths.values()))
    found = {}
    for name, path in paths.items():
        clash = path in own or above(path) & own or path in needed or path.split("/")[0] in ("ranks", "mesh")
        found[way_given(path) if clash else path] = name
    return found


# ---- record.md ----

def record_copy(data, at, store_id):
    """(kind, envelope's version, body) of the copy at `at`, or None: it does not hold."""
    if len(data) < at + 48 or data[at:at + 8] != b"VCKPTREC":
        return None
    version, kind, length = struct.unpack_from("<HHI", data, at + 8)
    body = data[at + 48:at + 48 + length]
    own = bytes(16) if kind == 1 else store_id
    return ((kind, version, body) if len(body) == length and data[at + 16:at + 48] == sha(data[at:at + 16], own, body)
            else None)


class Store:
    """All that is read; faults and newer things are gathered, sentence by sentence."""

    def __init__(self, path):
        self.path, self.id, self.version, self.seed = pathlib.Path(path), bytes(16), VERSION, 0
        self.list_2 = self.list_3 = self.list_4 = False
        self.faults, self.newer, self.heads, self.footers, self.objects = [], [], {}, {}, {}

    def guarded(self, what, function, *arguments):
        """The function's result, or None: then the fault is told."""
        try:
            return function(*arguments)
        except Newer as e:
            self.newer.append(f"{what}: {e}")
        except Bad as e:
            self.faults.append(f"{what}: {e}")
        except OSError as e:
            self.faults.append(f"{what}: {e.strerror}")
        return None

    def record(self, name, kind, double=False):
        """The body, as bytes and decoded."""
        data = (self.path / name).read_bytes()
        message, largest = KINDS[kind]
        found = record_copy(data, 0, self.id)
        if double and not (found and data == self.double(data, found[2])):
            if not found and len(data) % 8192 == 0:
                found = record_copy(data, len(data) // 2, self.id)
            if found:
                self.faults.append(f"{name}: one of its two copies, or what stands around them, is damaged")
        need(found, "the record does not hold")
        if found[1] != 1:
            raise Newer(f"its envelope is of version {found[1]}")
        need(found[0] == kind and len(found[2]) <= largest, "the record is of kind", found[0], "and", len(found[2]),
             "bytes")
        need(double or len(data) == 48 + len(found[2]), "the record does not fill its file")
        return found[2], head(message, found[2], self.version, exact=kind in (1, 2) and self.id != bytes(16))

    @staticmethod
    def double(data, body):
        half = up(48 + len(body), 4096)
        return (data[:48] + body).ljust(half, b"\0") * 2

    # ---- store.md ----

    def open(self):
        _, found = self.record("vckpt.store", 1, True)
        need(len(found["id"]) == 16 and found["reserve_bytes"] <= 1 << 30, "breaks the rules")
        self.id, self.seed, self.version = found["id"], found["seed"], found["version"]
        self.list_2, self.list_3, self.list_4 = (f"list-{n}" in found["features"] for n in (2, 3, 4))
        need(self.list_3 or not self.list_4, "it has the word list-4 and not list-3")
        parameters_of(found)
        reserve = self.path / "reserve"
        if reserve.exists():
            data = reserve.read_bytes()
            need(len(data) == found["reserve_bytes"] and not data.strip(b"\0"),
                 "reserve: it is not as many zeros as the store says")

    # ---- pack.md, objects.md ----

    def pack(self, name):
        """The pack's bytes; its head is looked at once."""
        if name in self.heads:
            return self.heads[name]
        xx = hashlib.sha256(name.encode()).hexdigest()[:2]
        data = (self.path / "packs" / xx / f"{name}.pack").read_bytes()
        h = data[:4096]
        need(h[:8] == b"VCKPTPAK" and len(h) == 4096, "pack", name, "has no head")
        need(struct.unpack_from("<Q", h, 4088)[0] == xxhash.xxh3_64_intdigest(h[:4088]), "the head of pack", name,
             "is damaged")
        version, zero, required, store, length = struct.unpack_from("<HHI16sH", h, 8)
        if version > 1 or required:
            raise Newer(f"pack {name}: it is of version {version} and requires {required:#x}")
        need(version == 1 and not zero and store == self.id, "pack", name, "is of another store")
        need(h[34:34 + length] == name.encode() and not h[34 + length:4088].strip(b"\0"), "pack", name,
             "bears another name")
        self.heads[name] = data
        return data

    def object(self, name, digest, offset, checks, raw, stored, codec, kind):
        """Its bytes, of which everything has been verified."""
        key = (name, digest, offset, checks, raw, stored, codec, kind)
        if key not in self.objects:
            self.objects[key] = self.read_object(*key)
        return self.objects[key]

    def read_object(self, name, digest, offset, checks, raw, stored, codec, kind):
        what, data = f"object {digest.hex()} in pack {name}:", self.pack(name)
        codec_known(codec)
        count = blocks_of(raw)
        need(offset >= 4096 and offset % (4096 if not codec and raw >= 65536 else 64) == 0 and checks % 4 == 0, what,
             "it stands at no object's place")
        need(offset + stored <= checks and checks + count * (12 if codec else 8) <= len(data), what,
             "it ends behind its pack")
        need(not codec or raw <= 64 << 20 and count <= stored < raw, what, "it is too long to be encoded")
        need(raw <= {PIECE: 1 << 46, BLOB: 1 << 46, HEADER: 100_000_008}.get(kind, 1 << 30), what, "it is too long")
        sums = struct.unpack_from(f"<{count}Q", data, checks)
        lengths = (struct.unpack_from(f"<{count}I", data, checks + 8 * count) if codec
                   else [min(BLOCK, raw - BLOCK * i) | 1 << 31 for i in range(count)])
        seed, at, out = struct.unpack_from("<Q", digest)[0], offset, []
        for i, (check, length) in enumerate(zip(sums, lengths)):
            whole, as_it_is, length = min(BLOCK, raw - BLOCK * i), length >> 31, length & 0x7fffffff
            need(length == whole if as_it_is else 1 <= length < whole, what, f"block {i} has an impossible length")
            block = data[at:at + length]
            need(xxhash.xxh3_64_intdigest(block, (seed + i) % 2**64) == check, what,
                 f"block {i} does not pass its check")
            out.append(decode_block(block, whole, as_it_is, codec))
            at += length
        need(at == offset + stored, what, "its blocks have another length than it")
        found = b"".join(out)
        need(tree(found) == digest, what, "its bytes have another digest")
        return found

    def whole_pack(self, name):
        """Each byte of the pack: head, objects, checks, padding, footer, tail."""
        data = self.pack(name)
        tail = data[-128:]
        need(len(data) >= 4224 and tail[:8] == b"VCKPTEND" and struct.unpack_from("<Q", tail, 120)[0] ==
             xxhash.xxh3_64_intdigest(tail[:120]), "has no tail")
        at, length, count, size, digest = struct.unpack_from("<4Q32s", tail, 8)
        need(size == len(data) == at + length + 128 and length == 80 * count and at >= 4096 and at % 64 == 0,
             "its tail has wrong lengths")
        footer = data[at:at + length]
        need(sha(footer) == digest and not tail[72:120].strip(b"\0"), "its footer is damaged")
        entries, used = list(struct.iter_unpack("<32s4QHB13s", footer)), [(0, 4096)]
        self.places(entries)
        for d, offset, checks, raw, stored, codec, kind, zero in entries:
            need(not zero.strip(b"\0"), "its footer is not zero where it must be")
            if not PIECE <= kind <= HEADER:
                raise Newer(f"pack {name} has an object of kind {kind}")
            self.object(name, d, offset, checks, raw, stored, codec, kind)
            used += [(offset, stored), (checks, blocks_of(raw) * (12 if codec else 8))]
        end = 0
        for offset, stored in sorted(used):
            need(offset >= end or not stored, "objects overlap at", offset)
            need(not data[end:offset].strip(b"\0"), "its padding is not zero before", offset)
            end = max(end, offset + stored)
        need(up(end, 64) == at and not data[end:at].strip(b"\0"), "its footer is not where it belongs")
        self.footers[name] = {(d, o, c, r, s, w, k) for d, o, c, r, s, w, k, _ in entries}

    @staticmethod
    def places(entries):
        """Each entry goes on with its run, or opens the next one."""
        start = end = run_checks = next_checks = 0
        for i, (_, offset, checks, raw, stored, codec, kind, _) in enumerate(entries):
            size, own = (4096 if not codec and stored >= 65536 else 64), blocks_of(raw) * (12 if codec else 8)
            if not (i and checks == next_checks and offset == up(end, size) and offset + stored <= run_checks):
                if i:
                    need(run_checks == up(end, 8), "the checks of a run are not behind its objects")
                need(offset == up(next_checks if i else 4096, size), "an object stands where none belongs:", offset)
                start, run_checks = offset, checks
            end, next_checks = offset + stored, checks + own
            need(offset == start or end - start <= 64 << 20, "a run is longer than 64 MiB")
        need(not entries or run_checks == up(end, 8), "the checks of a run are not behind its objects")

    def referred(self, ref, packs):
        name = packs[ref.pack][0]
        found = self.object(name, ref.digest, ref.offset, ref.checks, ref.raw, ref.stored, ref.codec, ref.kind)
        key = (ref.digest, ref.offset, ref.checks, ref.raw, ref.stored, ref.codec, ref.kind)
        need(name not in self.footers or key in self.footers[name], "object", ref.digest.hex(),
             "is not in the footer of", name)
        return found


# ---- list.md ----

EXCLUSIVE = {1: "launch", 2: "commit", 3: "abort", 4: "remove", 5: "snapshot", 6: "accept", 8: "facts"}


def without_lowest_bit(n):
    return n - (n & -n)


def state_of(s):
    """The facts of one step."""
    need(s["pinned"] or not (s["reason"] or s["pinned_ns"] or s["pinned_by"]), "what is not pinned has a reason")
    need(len(s["reason"].encode()) <= 1024 and len(s["pinned_by"].encode()) < 256, "a pin has texts that are too long")
    need(len(s["tags"]) <= 64 and all(re.fullmatch(TAG, t) for t in s["tags"]), "a tag breaks the rules")
    ascending([t.encode() for t in s["tags"]], "the table of tags")
    return {"pinned": bool(s["pinned"]), "reason": s["reason"], "pinned_ns": s["pinned_ns"],
            "pinned_by": s["pinned_by"], "tags": s["tags"], "attributes": attributes_of(s["attributes"])}


class Facts:
    """The facts of the commits of a run, and its policy."""

    def __init__(self):
        self.states, self.changed, self.policy = {}, {}, None

    def say(self, entry, state, number):
        for other, had in self.states.items():
            if other != entry and set(had["tags"]) & set(state["tags"]):
                self.states[other] = {**had, "tags": [t for t in had["tags"] if t not in state["tags"]]}
                self.changed[other] = number
        self.states[entry], self.changed[entry] = state, number

    def drop(self, entry):
        self.states.pop(entry, None)

    def take(self, said, number, visible):
        for entry, state in said["states"].items():
            if entry in visible:
                self.say(entry, state, number)
        if said["policy"] is not None:
            self.policy = said["policy"] if said["policy"]["rules"] else None

    def shown(self, visible, start=0):
        """As a snapshot that goes on from `start` says it."""
        return {e: s for e, s in sorted(self.states.items()) if e in visible and self.changed[e] > start and (
            s["pinned"] or s["tags"] or s["attributes"] or (start and e < start))}


class List:
    """The entries of one run, replayed."""

    def __init__(self, store, run):
        self.store, self.run = store, run
        self.folder = store.path / "runs" / run
        self.visible, self.entries, self.bodies, self.why, self.facts = {}, {}, {}, {}, Facts()
        self.commits, self.aborted, self.committed, self.launches, self.dead, self.snapshots = (
            {}, {}, set(), {}, set(), [])

    def read(self):
        numbers = [int(p.name) for p in self.folder.iterdir() if re.fullmatch(r"[0-9]{12,}", p.name) and
                   p.name == f"{int(p.name):012}"]
        self.end = max(numbers, default=-1) + 1
        for number in range(self.end):
            try:
                self.bodies[number], self.entries[number] = self.entry(number)
            except Bad as e:
                self.why[number] = str(e)
            except FileNotFoundError:
                self.why[number] = "it is missing, and a later one exists"
        self.take_collected()
        self.accepted = {n: i for i, e in reversed(self.entries.items()) if e["kind"] == 6 for n in e["numbers"]}
        for number in self.why.keys() - self.accepted.keys():
            self.fault(number, self.why[number])
        stays = self.find_start()
        self.skipped = {n for n in self.accepted.keys() | self.why.keys() if n >= self.start or n in stays}
        self.entries = {n: e for n, e in self.entries.items() if n not in self.skipped}
        self.replay()
        return self

    # ---- collected entries ----

    def take_collected(self):
        """They are no entries. The first says where the head is, that and the chain or the mark what is visible."""
        self.collected = {n: e for n, e in self.entries.items() if e["kind"] == 7}
        for n in self.collected:
            del self.entries[n], self.bodies[n]
        first = self.collected[min(self.collected)] if self.collected else None
        self.head, self.self = (first["number"], first["before"]) if first else (0, b"")
        for n, e in self.collected.items():
            if e["number"] > self.head or e["number"] == self.head and e["before"] != self.self:
                self.fault(n, "it names another head than the first collected record")
        self.mark = self.read_mark() if self.head else None

    def find_start(self):
        """Entry 0, or the head. Returns the numbers before it that a reader needs."""
        self.start, stays = 0, set()
        if not self.head or self.head + 1 >= self.end:
            chain = []
        else:
            number, chain = self.head, []
            while number and number in self.entries and self.entries[number]["kind"] == 5:
                chain.append(number)
                number = self.entries[number]["snapshot"]["from"]
            chain = [] if number or sha(self.bodies[self.head]) != self.self else chain
            if not chain and number:
                stays.add(number)
        if self.mark and chain and not self.accepted.keys() & set(chain):
            self.store.guarded(f"runs/{self.run}/head.{self.head:012}", self.check_mark, self.mark)
        if chain or self.mark:
            self.start = self.head
            return stays | set(chain)
        for number in self.collected:
            self.why[number] = "it was collected, and what is visible at the head is lost"
            self.fault(number, self.why[number])
        return stays

    def read_mark(self):
        """That of the head; None: it cannot be used."""
        name = f"runs/{self.run}/head.{self.head:012}"
        if not (self.store.path / name).exists():
            self.fault(self.head, "its mark is missing")
            return None
        return self.store.guarded(name, self.mark_record, name, self.head)

    def mark_record(self, name, head):
        _, e = self.store.record(name, 11, True)
        need(e["kind"] == 5 and e["features"][:1] == ["list-2"] and e["run"] == self.run and e["number"] == head and
             {n for n in EXCLUSIVE.values() if e[n] is not None} == {"snapshot"} and e["before"] == self.self and
             not e["time_ns"] and not e["host"], "it is no mark of this place")
        self.check_snapshot(e, head)
        need(not e["snapshot"]["from"], "a mark goes on from a snapshot")
        return e

    def check_mark(self, e):
        shown = self.shown(self.chain(self.head))
        need(e["steps"] == shown, "it says other steps than the snapshot that it marks")
        said = self.chain_facts(self.chain(self.head))
        need(e["said"]["states"] == said.shown({n for n, _ in shown.values()}) and e["said"]["policy"] == said.policy,
             "it says other facts than the snapshot that it marks")
        need(e["snapshot"]["launch"] == self.entries[self.head]["snapshot"]["launch"],
             "it is the mark of another snapshot")

    def check_collected(self, e, number):
        need(self.store.list_3 and not any(e[n] is not None for n in EXCLUSIVE.values()) and not e["time_ns"] and
             not e["host"], "it is no collected record")
        need(e["run"] == self.run and number < e["number"] and e["number"] % 64 == 0 and len(e["before"]) == 32,
             "it is a collected record that does not belong here")

    def begin(self):
        """The entry from which it is replayed. What is visible at the head its chain says, or else the mark."""
        start, chain = self.start, self.chain(self.start)
        if not start:
            return 0
        self.snapshots = [n for n in range(64, start + 1, 64) if self.chain(n)]
        self.visible = self.shown(chain) if chain else self.mark["steps"]
        if not chain and not any(n <= start for n in self.skipped):
            self.fault(start, "its chain cannot be used")
            self.skipped |= {start}
        if chain:
            self.facts = self.chain_facts(chain)
        else:
            self.facts.take(self.mark["said"], start, {n for n, _ in self.visible.values()})
        self.commits = {number: c for number, c in self.visible.values()}
        self.committed = {c["attempt"] for c in self.commits.values()}
        number, found = (self.entries[start] if chain else self.mark)["snapshot"]["launch"] - 1, []
        while number >= 0:
            e = self.entries.get(number)
            need(e and e["kind"] == 1, "entry", number, "is not a launch that later ones go on from")
            found[:0] = [*((name, None) for name in e["ids"]), (e["launch"]["launch"], number)]
            number = e["launch"]["from"] - 1
        self.launches, self.dead = dict(found), {name for name, _ in found[:-1]}
        return start + 1

    # ---- entries ----

    def fault(self, number, sentence):
        self.store.faults.append(f"runs/{self.run}/{number:012}: {sentence}")

    def entry(self, number):
        body, e = self.store.record(f"runs/{self.run}/{number:012}", 2, True)
        need(e["kind"], "it is of no kind")
        said = e["facts"] or (e["commit"] or e["snapshot"] or {}).get("facts")
        need(e["features"] == (["list-3"] if e["kind"] == 7 else
                               ["list-2"] * (self.store.list_2 and e["kind"] in (1, 5)) + ["list-4"] * bool(said)),
             "it and its store do not both have the word list-2, or it is of a kind that has none")
        need(self.store.list_4 or not said, "it has facts, and its store lacks the word list-4")
        if e["kind"] == 7:
            self.check_collected(e, number)
            return body, e
        if e["kind"] not in EXCLUSIVE:
            self.store.newer.append(f"runs/{self.run}/{number:012}: it is an entry of kind {e['kind']}")
            return body, e
        need({n for n in EXCLUSIVE.values() if e[n] is not None} == {EXCLUSIVE[e["kind"]]},
             "it has another message than its kind says")
        need(len(e["host"].encode()) < 256, "its host is too long")
        if self.store.version == 1:
            need(not e["run"] and not e["number"] and not e["before"] and e["kind"] != 6,
                 "it says what an entry of version 1 does not")
        else:
            need(e["run"] == self.run and e["number"] == number and len(e["before"]) == 32,
                 "it is not the entry of this place")
            before = self.before(number)
            need(number or e["before"] == bytes(32), "it says that there is one before the first")
            need(before is None or e["before"] == before, "it does not follow the entry before it")
        getattr(self, f"check_{EXCLUSIVE[e['kind']]}")(e, number)
        return body, e

    def before(self, number):
        """What an entry has to have as `before`; None: anything, after a collected one."""
        body, last = self.bodies.get(number - 1), self.entries.get(number - 1)
        return sha(body) if body is not None and last["kind"] != 7 else None

    def check_launch(self, e, number):
        nonce, launch = 16 if self.store.version > 1 else 0, e["launch"]
        need(re.fullmatch(LAUNCH, launch["launch"]) and len(launch["nonce"]) == nonce, "its launch breaks the rules")
        e["ids"] = [row.hex() for row, in rows(launch["ids"], "8s", "its table of launches")]
        nth, start, count = launch["nth"], launch["from"], len(e["ids"])
        if self.store.list_2:
            need(nth > count and start <= number and (start or count == nth - 1),
                 "it names another number of launches than its own number says")
        else:
            need(not (nth or start or count), "it names launches, and has not the word for it")

    def check_commit(self, e, number):
        c = e["commit"]
        need(c["step"] < 1 << 63 and re.fullmatch(ATTEMPT, c["attempt"]) and len(c["manifest"]) == 32 and
             c["replaces"] <= number, "its commit breaks the rules")
        attributes_of(c["attributes"])
        if c["facts"]:
            need(not c["facts"]["entry"], "a commit says facts of another one")
            e["said"], c["facts"] = state_of(c["facts"]), None      # snapshots have them elsewhere

    def check_abort(self, e, number):
        need(re.fullmatch(ATTEMPT, e["abort"]["attempt"]) and len(e["abort"]["reason"].encode()) <= 1024,
             "its abort breaks the rules")

    def check_remove(self, e, number):
        need(1 <= e["remove"]["entry"] <= number and len(e["remove"]["reason"].encode()) <= 1024,
             "it removes no entry before it")

    def check_facts(self, e, number):
        e["said"] = self.said_of(e["facts"], number)

    def said_of(self, facts, number):
        """{entry: state} and the policy; facts None: nothing."""
        steps, policy = (facts["steps"], facts["policy"]) if facts else ([], None)
        need(not facts or steps or policy, "its facts are none")
        ascending([s["entry"] for s in steps], "its table of facts")
        need(all(1 <= s["entry"] <= number for s in steps), "it says facts of no entry before it")
        if policy:
            need(len(policy["rules"]) <= 64 and all(1 <= len(r.encode()) <= 1024 for r in policy["rules"]) and
                 len(policy["host"].encode()) < 256, "its policy breaks the rules")
            policy = {k: policy[k] for k in ("rules", "time_ns", "host")}
        return {"states": {s["entry"] - 1: state_of(s) for s in steps}, "policy": policy}

    def check_accept(self, e, number):
        e["numbers"] = [n for n, in rows(e["accept"]["numbers"], "<Q", "its table")]
        need(1 <= len(e["numbers"]) <= 65536 and e["numbers"][-1] < number, "it accepts what it may not")
        ascending(e["numbers"], "its table")

    def check_snapshot(self, e, number):
        """e["steps"]: what is visible, as commits."""
        need(number and number % 64 == 0, "a snapshot has another number than 64 n")
        extra, at, e["steps"] = e["snapshot"]["extra"], 0, {}
        live = rows(e["snapshot"]["live"], "<QQqQ32sQQQ8sQII", "its table")
        need(len(live) <= 1 << 22, "it has too many rows")
        ascending([row[0] for row in live], "its table")
        self.check_from(e, e["snapshot"], number)
        e["said"] = self.said_of(e["snapshot"]["facts"], number)
        need(not e["said"]["policy"] or e["said"]["policy"]["rules"], "it has a policy without rules")
        need(not live or not e["snapshot"]["from"] or live[0][0] > e["snapshot"]["from"],
             "it has commits from before the snapshot that it goes on from")
        for entry, step, time, replaces, manifest, tensors, size, new, launch, count, offset, length in live:
            need(entry < number and step < 1 << 63 and step not in e["steps"] and offset == at and
                 offset + length <= len(extra), "a row of it breaks the rules")
            more = decode("Commit", extra[offset:offset + length])
            need(not any(v for k, v in more.items() if k not in ("attributes", "unknown")),
                 "a share of it has other fields than attributes")
            attributes_of(more["attributes"])
            at += length
            more.update(step=step, time_ns=time, replaces=replaces, manifest=manifest, tensors=tensors, bytes=size,
                        new_bytes=new, attempt=f"{launch.hex()}-{count}")
            e["steps"][step] = (entry, more)
        need(at == len(extra), "it has more in its shares than its rows say")

    def check_from(self, e, s, number):
        e["gone"] = [n for n, in rows(s["gone"], "<Q", "its table of what is gone")]
        need(self.store.list_2 or not (s["from"] or s["from_digest"] or s["gone"] or s["older"] or s["launch"]),
             "it goes on from another, and has not the word for it")
        n = number // 64
        while n and 64 * n != s["from"] or 64 * n == number:
            n = without_lowest_bit(n)
        need(64 * n == s["from"], "it goes on from", s["from"], "which its number does not lead to")
        need(len(s["from_digest"]) == (32 if n else 0), "it has no digest of the snapshot that it goes on from")
        need(s["from"] or not (s["gone"] or s["older"]),
             "it speaks of commits before the snapshot that it goes on from, and goes on from none")
        ascending(e["gone"], "its table of what is gone")
        need(not e["gone"] or e["gone"][-1] < s["from"], "what is gone was not there")
        need(s["older"] <= 1 << 63 and s["launch"] <= number, "its highest step or its launch is none")

    # ---- snapshots that go on from others, launches that name others ----

    def chain(self, number):
        """The numbers of the snapshots, the newest first; none: one of them cannot be used."""
        found, digest = [], None
        while number or not found:
            e = self.entries.get(number)
            if not e or e["kind"] != 5 or digest not in (None, sha(self.bodies[number])):
                return []
            found.append(number)
            number, digest = e["snapshot"]["from"], e["snapshot"]["from_digest"]
        return found

    def shown(self, chain):
        """{step: (entry, commit)} of what is visible at its first."""
        gone = {n for number in chain for n in self.entries[number]["gone"]}
        live = {entry: c for number in chain for entry, c in self.entries[number]["steps"].values()
                if entry not in gone}
        found = {c["step"]: (entry, c) for entry, c in live.items()}
        need(len(found) == len(live), "two commits of one step are visible by its chain")
        return found

    def chain_facts(self, chain):
        """What is said at its first: from the oldest on, each says what has changed."""
        found = Facts()
        for number in reversed(chain):
            e = self.entries[number]
            for entry in e["gone"]:
                found.drop(entry)
            found.policy = None
            found.take(e["said"], number, e["said"]["states"])
        return found

    def goes_on(self, number):
        """What a writer lets this one go on from, where nothing is skipped."""
        n = without_lowest_bit(number // 64) if self.store.list_2 else 0
        while n and 64 * n not in self.snapshots:
            n = without_lowest_bit(n)
        return 64 * n

    def check_made(self, number, e):
        """Each field, from what the entries before it say; the snapshots before it are right."""
        s, start = e["snapshot"], e["snapshot"]["from"]
        need(self.chain(number), "it goes on from what is not the snapshot that it says")
        need(start == self.goes_on(number), "it goes on from", start, "and not from", self.goes_on(number))
        entries = {entry: step for step, (entry, _) in self.visible.items()}
        before = {entry for entry, _ in self.shown(self.chain(start)).values()} if start else set()
        need(e["steps"] == {s: v for s, v in self.visible.items() if not start or v[0] > start},
             "the snapshot says other steps than the entries before it")
        need(e["gone"] == sorted(before - entries.keys()), "it says that other commits are gone")
        need(e["said"] == {"states": self.facts.shown(entries, start), "policy": self.facts.policy},
             "it says other facts than the entries before it")
        need(s["older"] == max((step + 1 for entry, step in entries.items() if entry < start), default=0),
             "it says another highest step from before")
        need(not self.store.list_2 or s["launch"] == self.newest_launch() + 1,
             "it says another newest launch")

    def check_launches(self, number, e):
        k = e["launch"]["nth"]
        need(k == len(self.launches) + 1, "it is launch", len(self.launches) + 1, "and says", k)
        start, names = without_lowest_bit(k), list(self.launches)
        need(e["launch"]["from"] == (self.launches[names[start - 1]] + 1 if start else 0) and
             e["ids"] == names[start:], "it names other launches than those before it")

    def newest_launch(self):
        return max((n for n in self.launches.values() if n is not None), default=-1)

    def all_launches(self, number):
        """The newest launch entry, and those that it goes on from, name all."""
        found, nth = [], None
        while number is not None:
            e = self.entries[number]
            need(e["kind"] == 1 and nth in (None, e["launch"]["nth"]), "launch entries do not fit")
            found[:0] = [*e["ids"], e["launch"]["launch"]]
            nth = e["launch"]["nth"] - 1 - len(e["ids"])
            number = e["launch"]["from"] - 1 if e["launch"]["from"] else None
        need(found == list(self.launches), "with those that it goes on from it names other launches than there are")

    # ---- replay ----

    def undecided(self, attempt):
        return attempt not in self.aborted and attempt not in self.committed and attempt.split("-")[0] not in self.dead

    def replay(self):
        unsure = False
        for number in range(self.begin(), self.end):
            e = self.entries.get(number)
            if e is None:
                unsure = True
            elif e["kind"] == 1:
                self.launch(number, e)
            elif e["kind"] == 2:
                self.commit(number, e["commit"])
            elif e["kind"] == 3:
                if self.undecided(e["abort"]["attempt"]):
                    self.aborted[e["abort"]["attempt"]] = e["abort"]["reason"]
            elif e["kind"] == 4:
                self.visible = {s: v for s, v in self.visible.items() if v[0] + 1 != e["remove"]["entry"]}
                self.facts.drop(e["remove"]["entry"] - 1)
            elif e["kind"] == 8:
                self.facts.take(e["said"], number, {n for n, _ in self.visible.values()})
            elif e["kind"] == 5:
                unsure = self.snapshot(number, e, unsure)
        if not self.skipped:
            if self.snapshots:
                self.guarded(self.snapshots[-1], self.again, self.snapshots[-1])
            if self.launches and self.store.list_2:
                self.guarded(self.newest_launch(), self.all_launches, self.newest_launch())

    def launch(self, number, e):
        launch = e["launch"]["launch"]
        if launch in self.launches:
            return
        if self.store.list_2 and not any(n < number for n in self.skipped):
            self.guarded(number, self.check_launches, number, e)
        self.dead |= set(self.launches)
        self.launches[launch] = number

    def snapshot(self, number, e, unsure):
        """Is what is visible unsure after it, too?"""
        chain, sure = self.chain(number), not any(n < number for n in self.skipped)
        shown = self.guarded(number, self.shown, chain) if chain else None
        if sure:
            self.guarded(number, self.check_made, number, e)
        elif not chain:
            self.check_accepted(number, e["snapshot"]["from"])
        self.snapshots.append(number)
        if shown is None:
            return unsure
        if unsure:
            self.visible, self.facts = shown, self.chain_facts(chain)
        elif not sure and shown != self.visible:
            self.fault(number, "the snapshot says other steps than the entries before it")
        self.committed |= {c["attempt"] for _, c in shown.values()}
        return False

    def check_accepted(self, number, start):
        """What cannot be used of its chain was not accepted as damaged when it was put."""
        while start in self.entries and self.entries[start]["kind"] == 5:
            start = self.entries[start]["snapshot"]["from"]
        if start and self.accepted.get(start, number) < number:
            self.fault(number, f"it goes on from snapshot {start}, which was accepted as damaged before")

    def guarded(self, number, function, *arguments):
        return self.store.guarded(f"runs/{self.run}/{number:012}", function, *arguments)

    def commit(self, number, c):
        now = self.visible.get(c["step"])
        if self.undecided(c["attempt"]) and c["replaces"] == (now[0] + 1 if now else 0):
            self.facts.drop(c["replaces"] - 1)
            self.visible[c["step"]] = (number, c)
            if "said" in self.entries[number]:
                self.facts.say(number, self.entries[number]["said"], number)
            self.committed.add(c["attempt"])
            self.commits[number] = c

    def again(self, start):
        """Who begins at the last snapshot sees the same; who reads it without its chain, the highest step."""
        e = self.entries[start]
        seen = self.after(start, self.shown(self.chain(start)))
        newest = max(self.after(start, e["steps"]), default=-1)
        need(seen == self.visible and (newest < e["snapshot"]["older"] or newest == max(seen)),
             "who begins here sees other steps")
        live = {n for n, _ in seen.values()}
        found = self.chain_facts(self.chain(start))
        for number in range(start + 1, self.end):
            e = self.entries[number]
            if number in self.commits and "said" in e:
                found.say(number, e["said"], number)
            if number in self.commits:
                found.drop(e["commit"]["replaces"] - 1)
            elif e["kind"] == 4:
                found.drop(e["remove"]["entry"] - 1)
            elif e["kind"] == 8:
                found.take(e["said"], number, e["said"]["states"])
        need(found.shown(live) == self.facts.shown(live) and found.policy == self.facts.policy,
             "who begins here knows other facts")

    def after(self, start, seen):
        seen = dict(seen)
        for number in range(start + 1, self.end):
            e = self.entries[number]
            if number in self.commits:
                seen[e["commit"]["step"]] = (number, e["commit"])
            if e["kind"] == 4:
                seen = {s: v for s, v in seen.items() if v[0] + 1 != e["remove"]["entry"]}
        return seen


# ---- layout.md ----

class Tensor:
    def __init__(self, component, name, dtype, shape, flags, parameters):
        self.component, self.name, self.dtype, self.shape, self.flags, self.parameters = (
            component, name, dtype, shape, flags, parameters)
        self.key, self.item = (component, name), DTYPES[dtype][1]
        need(len(shape) <= 16 and self.item * math.prod(s for s in shape if s) <= 1 << 62, "tensor", name,
             "is too large")
        self.grid = Grid(shape, self.item, parameters)
        self.bytes = self.item * math.prod(shape)

    def look(self):
        return self.dtype, self.shape, self.flags, self.parameters


class Layout:
    def __init__(self, body, version):
        m = head("Layout", body, version)
        parameters = parameters_of(m)
        for c in m["components"]:
            good = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", c) and not c.endswith((".safetensors", ".npy"))
            need(good and c not in "ranks mesh blobs meta incoming latest manifest.json".split(),
                 "a component has no name:", c)
        ascending([c.encode() for c in m["components"]], "the table of components")
        self.meshes(m)
        dims = [d for d, in rows(m["dims"], "<Q", "a table of extents")]
        self.tensors, at, first, component = [], 0, 0, -1
        for c, start, length, dim, dtype, ndim, flags, mesh, placement, zero in rows(m["tensors"], "<IIIIBBHIII",
                "a table of tensors"):
            need(c in (component, component + 1) and c < len(m["components"]) and start == at and dim == first and
                 not zero, "a row of a layout breaks the rules")
            need(length and start + length <= len(m["names"]) and dim + ndim <= len(dims),
                 "a row of a layout points nowhere")
            need(mesh <= len(m["meshes"]) and placement <= len(m["placements"]),
                 "a tensor has a mesh or a placement that is not there")
            if dtype not in DTYPES or flags & ~1:
                raise Newer(f"a tensor is of dtype {dtype} and has the flags {flags:#x}")
            shape = tuple(dims[dim:dim + ndim])
            self.tensors.append(Tensor(m["components"][c], text(m["names"][start:start + length], "a name"), dtype,
                                       shape, flags, parameters))
            at, first, component = at + length, first + ndim, c
        need(at == len(m["names"]) and first == len(dims) and component + 1 == len(m["components"]),
             "a layout has more than its tensors")
        ascending([(t.component.encode(), t.name.encode()) for t in self.tensors], "a table of tensors")

    def meshes(self, m):
        keys = []
        for mesh in m["meshes"]:
            sizes, ranks = [[n for n, in rows(mesh[f], "<I", "a mesh")] for f in ("dim_sizes", "ranks")]
            names = mesh["dim_names"]
            need(1 <= len(names) <= 16 and len(set(names)) == len(names) == len(sizes) and
                 all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", n) for n in names)
                 and all(sizes) and len(ranks) == math.prod(sizes) and all(r < 1 << 24 for r in ranks),
                 "a mesh breaks the rules")
            keys.append((len(names), sizes, [n.encode() for n in names], ranks))
        ascending(keys, "the table of meshes")
        ascending([p.encode() for p in m["placements"]], "the table of placements")
        used = [row[7:9] for row in rows(m["tensors"], "<IIIIBBHIII", "a table of tensors")]
        for which, table in enumerate((m["meshes"], m["placements"])):
            need({u[which] for u in used} - {0} == set(range(1, len(table) + 1)),
                 "a mesh or placement of a layout is not used")


# ---- part.md ----

class Row:
    """What one rank stored of a tensor: boxes, and the pieces of each as (box, digest, bytes)."""

    def __init__(self, rank, whole, boxes, digest, pieces):
        self.rank, self.whole, self.boxes, self.digest, self.pieces = rank, whole, boxes, digest, pieces


class Part:
    def __init__(self, store, line, layout, layout_digest, body):
        self.store, self.layout, self.rank = store, layout, line["rank"]
        m = self.message = head("Part", body, store.version)
        self.packs = pack_table(m["packs"], False)
        need((m["rank"], m["world"], m["host"], m["layout"]) ==
             (line["rank"], line["world"], line["host"], layout_digest), "it says another rank, world, host or layout")
        need([p[0] for p in self.packs] == [p[0] for p in line["packs"]], "its packs are not those of the manifest")
        need(all(size in (0, known) for (_, size, _), (_, known, _) in zip(self.packs, line["packs"])),
             "a pack has another size than in the manifest")
        self.sizes = [(name, known, 0) for name, known, _ in line["packs"]]
        self.reached, self.rows, self.chunks = {}, {}, {}
        last = -1
        for row in rows(m["chunks"], "<IIII72s", "its table of chunks"):
            need(last < row[0] <= row[1] < len(layout.tensors) and row[2] and not row[3],
                 "a row of its table of chunks breaks the rules")
            last = row[1]
            store.guarded(f"{line['what']}, chunk of tensors {row[0]} to {row[1]}", self.chunk, *row)
        self.blobs = {}
        order = [(b["per_rank"], b["name"].encode()) for b in m["blobs"]]
        ascending(order, "its table of blobs")
        slashes = [b["name"].count("/") for b in m["blobs"]]
        need(all(n < 64 for n in slashes) and sum(slashes) <= 4096 + 16 * len(slashes),
             "the names of its blobs have too many slashes")
        for b in m["blobs"]:
            store.guarded(f"{line['what']}, blob {b['name']}", self.blob, b)
        samples = rows(m["samples"], "<I16s16s", "its samples")
        ascending([s[:2] for s in samples], "its samples")
        need(all(s[0] < len(layout.tensors) for s in samples), "a sample is of no tensor")
        need(len(m["timings"]) <= 256 and all(1 <= len(t["phase"].encode()) <= 64 for t in m["timings"]),
             "its timings break the rules")

    def reach(self, ref):
        self.reached.setdefault(self.packs[ref.pack][0], {})[ref.digest, ref.offset] = ref.stored

    def blob(self, b):
        need(1 <= len(b["name"].encode()) <= 65535, "its name is too long or empty")
        if b["len"]:
            ref = Ref(b["ref"], BLOB, self.sizes)
            need(ref.raw == b["len"], "it has another length than its object")
            data = self.store.referred(ref, self.packs)
            self.reach(ref)
        else:
            need(b["ref"] == tree(b"") + bytes(40), "its reference is not that of no bytes")
            data = b""
        self.blobs[bool(b["per_rank"]), b["name"]] = data

    def chunk(self, first, last, count, _, ref):
        ref = Ref(ref, CHUNK, self.sizes)
        data = self.store.referred(ref, self.packs)
        self.reach(ref)
        magic, version, zero, required, nrows, nruns, npieces, nbases, zero2, npairs, ninline, zero3 = (
            struct.unpack_from("<8sHHIIIQIIQQQ", data))
        need(magic == b"VCKPTCHK", "it is no chunk")
        if version > 1 or required:
            raise Newer(f"it is of version {version} and requires {required:#x}")
        need(version == 1 and nrows == count and not (zero or nbases or zero2 or zero3), "its head breaks the rules")
        need(len(data) == 64 + 64 * nrows + 24 * nruns + 64 * npieces + 16 * npairs + ninline,
             "it is not as long as its tables")
        self.cursor = {"run": 64 + 64 * nrows}
        self.cursor["piece"] = self.cursor["run"] + 24 * nruns
        self.cursor["box"] = self.cursor["piece"] + 64 * npieces
        self.inline = self.cursor["inline"] = self.cursor["box"] + 16 * npairs
        ends = (self.cursor["piece"], self.cursor["box"], self.inline, len(data))
        tensors = []
        for at in range(64, 64 + 64 * nrows, 64):
            tensor, *row = struct.unpack_from("<IIIIQII32s", data, at)
            tensors.append(tensor)
            need(tensor < len(self.layout.tensors), "a row is of no tensor")
            self.row(data, self.layout.tensors[tensor], *row)
        ascending(tensors, "its rows")
        need((tensors[0], tensors[-1]) == (first, last), "it has other tensors than its line says")
        need((self.cursor["run"], self.cursor["piece"], self.cursor["box"], self.cursor["inline"]) == ends,
             "its tables have more than its rows")

    def take(self, data, table, form):
        at = self.cursor[table]
        self.cursor[table] += struct.calcsize(form)
        need(self.cursor[table] <= len(data), "its tables end behind it")
        return struct.unpack_from(form, data, at)

    def row(self, data, tensor, flags, nboxes, nruns, npieces, nbases, zero, digest):
        need(flags < 2 and bool(flags) == (not nboxes) and not nbases and not zero, "the row of", tensor.name,
             "breaks the rules")
        boxes = ([tuple(pairs(self.take(data, "box", f"<{2 * len(tensor.shape)}Q"))) for _ in range(nboxes)] or
                 [tensor.grid.whole])
        need(flags or all(s and o + s <= e for box in boxes for (o, s), e in zip(box, tensor.shape)), "a box of",
             tensor.name, "lies outside")
        need(flags or boxes != [tensor.grid.whole], "the row of", tensor.name, "is whole and does not say so")
        cut = [(box, piece) for box in boxes for piece in tensor.grid.pieces(box)]
        need(len(cut) == npieces, "the row of", tensor.name, "has other pieces than the grid")
        listed = [self.take(data, "piece", "<32s16sIIHHI") for _ in range(npieces)]
        need(row_digest([p[0] for p in listed]) == digest, "the row of", tensor.name,
             "has another digest than its pieces")
        bytes_of = []
        for _ in range(nruns):
            bytes_of += self.run(data, tensor, listed, len(bytes_of))
        need(len(bytes_of) == npieces, "the runs of", tensor.name, "have not all pieces")
        pieces = {}
        for (box, piece), entry, found in zip(cut, listed, bytes_of):
            need(tensor.grid.bytes_of(piece) == len(found) if piece else len(found) == tensor.item, "a piece of",
                 tensor.name, "has another length than in the grid")
            need(xxhash.xxh3_128_digest(found, self.store.seed) == entry[1],
                 f"the XXH3-128 of a piece of {tensor.name} is of other bytes")
            pieces.setdefault(box, []).append((piece, entry[0], found))
        need(len(pieces) == len(boxes), "boxes of", tensor.name, "overlap")
        self.rows[tensor.key] = Row(self.rank, bool(flags), boxes, digest, pieces)

    def run(self, data, tensor, listed, done):
        pack, count, offset, checks = self.take(data, "run", "<IIQQ")
        need(count and done + count <= len(listed), "a run of", tensor.name, "has no pieces, or too many")
        found = []
        for i, (digest, _, stored, raw, codec, flags, base) in enumerate(listed[done:done + count]):
            codec_known(codec)
            need(not flags and base == NONE and (stored < raw if codec else stored == raw), "a piece of", tensor.name,
                 "breaks the rules")
            need((pack == NONE) == (raw <= 64), "a piece of", tensor.name,
                 "is inline and too long, or not and too short")
            if pack == NONE:
                need(not codec and not checks and (i or offset == self.cursor["inline"] - self.inline), "a run of",
                     tensor.name, "is not inline as it should")
                found.append(self.take(data, "inline", f"<{raw}s")[0])
                need(tree(found[-1]) == digest, "an inline piece of", tensor.name, "has another digest")
                continue
            need(pack < len(self.packs), "a run of", tensor.name, "is in no pack")
            if i:
                offset = up(offset, 4096 if not codec and stored >= 65536 else 64)
            ref = Ref(struct.pack("<32s4QIHBB", digest, offset, checks, raw, stored, pack, codec, PIECE, 0), PIECE,
                      self.sizes)
            found.append(self.store.referred(ref, self.packs))
            self.reach(ref)
            offset, checks = offset + stored, checks + blocks_of(raw) * (12 if codec else 8)
        return found


def pairs(numbers):
    return zip(numbers[::2], numbers[1::2])


def overlap(a, b):
    return all(x < y + t and y < x + s for (x, s), (y, t) in zip(a, b))


def put_together(tensor, found):
    """(digest that is shown, its pieces, the bytes): of the rows of all ranks, by ascending rank."""
    whole = tensor.grid.whole
    boxes = {}
    for row in found:
        for box, pieces in row.pieces.items():
            need(box not in boxes or [p[1] for p in boxes[box]] == [p[1] for p in pieces],
                 "a box that several ranks hold has several digests")
            boxes.setdefault(box, pieces)
    if not tensor.bytes and not boxes:
        boxes = {whole: [(whole, tree(b""), b"")]}
    order = sorted(boxes)
    need(not any(overlap(a, b) for a, b in itertools.combinations(order, 2)), "boxes overlap")
    need(sum(tensor.grid.bytes_of(b) for b in order) == tensor.bytes, "boxes leave a gap")
    array = numpy.zeros([*tensor.shape, tensor.item], "u1")
    digests = {}
    for box in order:
        for piece, digest, data in boxes[box]:
            tensor.grid.put(array, piece, data)
            digests[piece] = digest
    cells = tensor.grid.pieces(whole)
    if digests.keys() == set(cells):
        last = row_digest([digests[c] for c in cells])
        need(not (found and found[0].whole) or found[0].digest == last, "its row has another digest")
    else:
        last = sha(b"\3", u64(len(order)), *[u64(*itertools.chain(*b)) for b in order],
                   row_digest([p[1] for b in order for p in boxes[b]]))
    shown = sha(b"\4", u64(tensor.dtype, len(tensor.shape), *tensor.shape), last)
    return shown, len(digests), array.tobytes()


# ---- header.md ----

def file_shape(tensor):
    return [*tensor.shape[:-1], 2 * tensor.shape[-1]] if DTYPES[tensor.dtype][2] == "F4" else list(tensor.shape)


def can_be_named(tensor):
    tag = DTYPES[tensor.dtype][2]
    return tag and tensor.name != "__metadata__" and (tag != "F4" or tensor.shape)


def quoted(name):
    return '"' + "".join("\\" + c if c in '"\\' else f"\\u{ord(c):04x}" if c < " " else c for c in name) + '"'


def made_header(tensors):
    order = sorted(tensors, key=lambda t: (t.bytes % 4096 != 0, -t.item, t.name.encode()))
    parts, at = ['"__metadata__":{"format":"pt"}'], 0
    for t in order:
        shape = ",".join(map(str, file_shape(t)))
        parts.append(
            f'{quoted(t.name)}:{{"dtype":"{DTYPES[t.dtype][2]}","shape":[{shape}],'
            f'"data_offsets":[{at},{at + t.bytes}]}}')
        at += t.bytes
    made = ("{" + ",".join(parts) + "}").encode()
    return (None if len(made) > 90_000_000 else u64(up(len(made) + 8, 4096) - 8) +
            made.ljust(up(len(made) + 8, 4096) - 8))


def header_order(header, tensors, data_bytes=None, some=False):
    """The names of the JSON by their places, which have to be those of the tensors, or of some of them."""
    need(len(header) >= 8 and struct.unpack_from("<Q", header)[0] == len(header) - 8,
         "a view header has another length than it says")
    found = json.loads(header[8:])
    found.pop("__metadata__", None)
    named = {t.name: t for t in tensors if can_be_named(t)}
    need(found.keys() <= named.keys() and (some or len(found) == len(named)),
         "a view header has other tensors than its layout")
    at, order = 0, sorted(found, key=lambda n: found[n]["data_offsets"])
    for name in order:
        t, says = named[name], found[name]
        need((says["dtype"], says["shape"]) == (DTYPES[t.dtype][2], file_shape(t)),
             "a view header says another dtype or shape of", name)
        need(says["data_offsets"] == [at, at + t.bytes], "a view header leaves a gap before", name)
        at += t.bytes
    need(data_bytes in (None, at), "a view header says that its file has", data_bytes, "bytes behind it")
    return order


# ---- manifest.md ----

class Step:
    def __init__(self, store, run, entry, commit):
        self.store, self.run, self.entry, self.commit = store, run, entry, commit
        self.what, self.tensors, self.blobs, self.rank_blobs, self.files = f"{run}/{commit['step']}", {}, {}, {}, {}
        name = commit["manifest"].hex()
        body, self.m = store.record(f"runs/{run}/manifests/{name}", 3)
        need(tree(body) == commit["manifest"], "the manifest has another digest than its name")
        self.tables()
        self.lines()
        self.lay_out()
        self.parts = []
        for line in self.ranks:
            part = store.guarded(line["what"], self.part, line)
            if part:
                self.parts.append(part)
        for key in sorted(self.look):
            store.guarded(f"{self.what}/{key[0]}/{key[1]}", self.tensor, key)
        self.read_blobs()
        self.headers()
        if len(self.parts) == self.m["world"]:
            self.sums()

    def tables(self):
        m, c = self.m, self.commit
        for field in ("step", "attempt", "tensors", "bytes", "new_bytes"):
            need(m[field] == c[field], "manifest and commit entry differ in", field)
        need(m["run"] == self.run and attributes_of(m["attributes"]) == attributes_of(c["attributes"]),
             "manifest and commit entry differ in run or attributes")
        need(1 <= m["world"] <= 1 << 24, "it has no ranks")
        self.packs = pack_table(m["packs"], True)
        ascending([p[0].encode() for p in self.packs], "the table of packs")
        ascending([h.encode() for h in m["hosts"]], "the table of hosts")
        self.layout_refs = [Ref(m["layouts"][i:i + 72], LAYOUT, self.packs) for i in range(0, len(m["layouts"]), 72)]
        ascending([r.digest for r in self.layout_refs], "the table of layouts")
        need(1 <= len(self.layout_refs) <= 65536, "it has no layouts, or too many")
        ascending([name.encode() for name in m["thinned"]], "the table of thinned components")
        need(len(m["thinned"]) <= 1024, "it has too many thinned components")

    def lines(self):
        m, self.ranks, first = self.m, [], 0
        numbers = [n for n, in rows(m["map"], "<I", "the map of packs")]
        for i, (rank, layout, host, start, count, zero,
                ref) in enumerate(rows(m["ranks"], "<6I72s", "the table of ranks")):
            need(rank == i and layout < len(self.layout_refs) and host < len(m["hosts"]) and start == first and
                 not zero, "the row of rank", i, "breaks the rules")
            first += count
            need(first <= len(numbers) and all(n < len(self.packs) for n in numbers[start:first]), "the packs of rank",
                 i, "are not in the table")
            self.ranks.append({"rank": rank, "world": m["world"], "layout": layout, "host": m["hosts"][host],
                               "ref": Ref(ref, PART, self.packs),
                               "packs": [self.packs[n] for n in numbers[start:first]],
                               "what": f"{self.what}, part of rank {rank}"})
        need(len(self.ranks) == m["world"] and first == len(numbers), "it has not a row for each rank")
        need({r["host"] for r in self.ranks} == set(m["hosts"]) and set(numbers) == set(range(len(self.packs))),
             "a host or pack is not used")

    def lay_out(self):
        self.layouts = [Layout(self.store.referred(r, self.packs), self.store.version) for r in self.layout_refs]
        self.look = {}
        for layout in self.layouts:
            for t in layout.tensors:
                need(self.look.setdefault(t.key, t).look() == t.look(), "tensor", t.name,
                     "looks otherwise in another layout")
        need({r["layout"] for r in self.ranks} == set(range(len(self.layouts))), "a layout is of no rank")
        need(not {component for component, _ in self.look} & set(self.m["thinned"]),
             "it has tensors of a component that it says was thinned")

    def part(self, line):
        return Part(self.store, line, self.layouts[line["layout"]], self.layout_refs[line["layout"]].digest,
                    self.store.referred(line["ref"], self.packs))

    def tensor(self, key):
        t = self.look[key]
        shown, pieces, data = put_together(t, [p.rows[key] for p in self.parts if key in p.rows])
        self.tensors[key] = {"dtype": DTYPES[t.dtype][0], "shape": list(t.shape), "digest": shown.hex(),
                             "pieces": pieces, "bytes": t.bytes,
                             "sha256": hashlib.sha256(data).hexdigest(), "data": data}

    def read_blobs(self):
        for part in self.parts:
            for (per_rank, name), data in part.blobs.items():
                if per_rank:
                    self.rank_blobs.setdefault(part.rank, {})[name] = data
                else:
                    self.blobs.setdefault(name, data)

    def headers(self):
        """The files that are shown of whole components, and the blobs'."""
        stored, parts, paths, order = {}, {}, {}, []
        for h in self.m["headers"]:
            need(h["layout"] < len(self.layouts) and len(h["view"].encode()) <= 64, "a view header is of no layout")
            order.append((h["component"].encode(), h["view"].encode(), h["layout"]))
            number = h["view"].removeprefix("safetensors.")
            if h["view"] == "files":
                data = self.store.referred(Ref(h["ref"], HEADER, self.packs), self.packs)
                need(data.endswith(b"\0"), "names of files end without a 0")
                paths[h["component"]] = data[:-1].decode().split("\0")
            elif h["view"] == "safetensors" or number.isdigit():
                data = self.store.referred(Ref(h["ref"], HEADER, self.packs), self.packs)
                tensors = [t for t in self.layouts[h["layout"]].tensors if t.component == h["component"]]
                header_order(data, tensors, h["data_bytes"], number.isdigit())
                if number.isdigit():
                    parts[h["component"], int(number)] = data
                else:
                    stored[h["component"], h["layout"]] = data
        ascending(order, "the table of view headers")
        own = {"manifest.json"}
        for component in sorted({c for c, _ in self.look}):
            tensors = [t for (c, _), t in self.look.items() if c == component]
            held = [i for i, layout in enumerate(self.layouts) if any(t.component == component for t in layout.tensors)]
            header = stored.get((component, held[0])) if len(held) == 1 else None
            header = header or made_header([t for t in tensors if can_be_named(t)])
            files = paths.get(component, [f"{component}.safetensors"])
            headers = [header] if len(files) == 1 else [parts[component, n] for n in range(len(files))]
            own |= {*map(blob_path, files), *(f"{component}/{escape(t.name, b'.npy')}" for t in tensors)}
            for path, header in zip(files, headers):
                names = [(component, n) for n in header_order(header, tensors, some=len(files) > 1)] if header else []
                if header and all(n in self.tensors for n in names):
                    self.files[blob_path(path)] = header + b"".join(self.tensors[n]["data"] for n in names)
        self.files.update((path, self.blobs[name]) for path, name in blob_files(self.blobs, own).items())

    def blob_names(self):
        """Which ranks have which blobs, where the manifest says it."""
        if self.m["blobs"] is None:
            return
        said, have = [], {}
        for part in self.parts:
            for per_rank, name in part.blobs:
                have.setdefault((per_rank, name.encode()), []).append(part.rank)
        for b in self.m["blobs"]["names"]:
            found = rows(b["ranks"], "<II", "the ranks of a blob")
            need(all(count and (i == 0 or first > sum(found[i - 1])) for i, (first, count) in enumerate(found)),
                 "the ranks of a blob are not in order")
            said.append(((bool(b["per_rank"]), b["name"].encode()),
                         [rank for first, count in found for rank in range(first, first + count)]))
        ascending([key for key, _ in said], "the names of blobs")
        need(dict(said) == {key: ranks if key[0] else ranks[:1] for key, ranks in have.items()} and len(said) <= 1024,
             "the manifest says that other ranks have blobs than their parts say")

    def sums(self):
        """The facts of all ranks together, made anew."""
        need(self.m["tensors"] == len(self.look), "the manifest says another number of tensors")
        held = sum(len(found) for p in self.parts for row in p.rows.values() for pieces in row.pieces.values()
                   for _, _, found in pieces)
        held += sum(len(data) for p in self.parts for data in p.blobs.values())
        need(self.m["bytes"] == held, "the manifest says", self.m["bytes"], "bytes, and its ranks have", held)
        attempt = self.commit["attempt"]
        need(self.m["new_bytes"] == sum(size for name, size, _ in self.packs if name.startswith(attempt + "-")),
             "the manifest says other new bytes")
        self.blob_names()
        live = {}
        for part, line in zip(self.parts, self.ranks):
            meta = self.packs[line["ref"].pack][0]      # the part stands in it
            own = {name: live for name, _, live in part.packs}
            reached = {name: sum(objects.values()) for name, objects in part.reached.items()}
            need(all(own[name] == reached.get(name, 0) for name in own if name != meta), "rank", part.rank,
                 "says other live bytes than its rows reach")
            for name, size in reached.items():
                live[name] = live.get(name, 0) + size
            for name, ref in [(self.packs[line["ref"].pack][0], line["ref"])]:
                live[name] = live.get(name, 0) + ref.stored
        for refs in (self.layout_refs, [Ref(h["ref"], HEADER, self.packs) for h in self.m["headers"]]):
            for ref in refs:
                live[self.packs[ref.pack][0]] = live.get(self.packs[ref.pack][0], 0) + ref.stored
        for name, _, says in self.packs:
            good = says >= live.get(name, 0) if name.endswith("-meta") else says == live.get(name, 0)
            need(good, "the manifest says", says, "live bytes of", name, "and its ranks reach", live.get(name, 0))

    def told(self):
        def blob(data):
            return {"bytes": len(data), "digest": tree(data).hex(), "sha256": hashlib.sha256(data).hexdigest()}

        c, components = self.commit, {}
        for (component, name), t in self.tensors.items():
            components.setdefault(component, {})[name] = {k: v for k, v in t.items() if k != "data"}
        return {"entry": self.entry, "attempt": c["attempt"], "time_ns": c["time_ns"], "manifest": c["manifest"].hex(),
                "world": self.m["world"],
                "tensors": self.m["tensors"], "bytes": self.m["bytes"], "new_bytes": self.m["new_bytes"],
                "attributes": attributes_of(c["attributes"]), "thinned": self.m["thinned"],
                "components": components, "blobs": {n: blob(d) for n, d in self.blobs.items()},
                "rank_blobs": {r: {n: blob(d) for n, d in found.items()} for r, found in self.rank_blobs.items()},
                "files": {path: hashlib.sha256(data).hexdigest() for path, data in self.files.items()}}


# ---- the other records ----

def check_stats(store, lists, name, m):
    run, step, entry, rank = re.fullmatch(rf"stats/({RUN})/({NUMBER})\.({NUMBER})/({NUMBER})", name).groups()
    need((m["run"], m["step"], m["rank"]) == (run, int(step), int(rank)) and m["rank"] < m["world"] <= 1 << 24,
         "it says another run, step or rank than its name")
    need(store.version == 1 or m["entry"] == int(entry), "it says another entry than its name")
    need(re.fullmatch(ATTEMPT, m["attempt"]) and len(m["host"].encode()) < 256, "it breaks the rules")
    need(len(m["timings"]) <= 256 and all(1 <= len(t["phase"].encode()) <= 64 for t in m["timings"]),
         "its timings break the rules")
    if run in lists and int(entry) not in lists[run].skipped and (
            int(entry) >= lists[run].head or int(entry) in lists[run].commits):
        c = lists[run].commits.get(int(entry))
        need(c and (c["step"], c["attempt"]) == (m["step"], m["attempt"]), "the list committed something else there")


def check_heartbeat(store, lists, name, m):
    launch, host, number = re.fullmatch(rf"hosts/({LAUNCH})\.(.*)\.({NUMBER})", name).groups()
    ranked = re.fullmatch(rf"(.*)\.r{NUMBER}", host)
    need((m["launch"], m["number"]) == (launch, int(number)), "it says another launch or number than its name")
    need(host == m["host"] or ranked and ranked[1] == m["host"][:52], "it says another host than its name")
    need(len(m["boot_id"]) <= 36 and len(m["nonce"]) in (0, 16) and m["period_ms"] <= 600000, "it breaks the rules")
    table = rows(m["ranks"], "<IIQQ", "its ranks")
    ascending([r[0] for r in table], "its ranks")
    need(all(not r[1] for r in table), "its ranks break the rules")


def check_damage(store, lists, name, m):
    need(m["pack"] == name.split("/")[1], "it names another pack than its name")
    table, end = rows(m["ranges"], "<QQ", "its table"), 0
    need(1 <= len(table) <= 65536, "it has no rows, or too many")
    for at, size in table if table != [(0, 0)] else []:
        need(size and at >= end, "its rows are empty, overlap or are not in order")
        end = at + size + 1


def check_trash(store, lists, name, m):
    target = m["name"]
    pack = target.startswith("packs/")
    mark = target.split("/")[-1].removesuffix(".pack") if pack else target.replace("/", "=") + "="
    if len(mark) > 200:
        mark = f"{mark[:64]}={hashlib.sha256(target.encode()).hexdigest()}"
    need(name == f"trash/{mark}", "it marks another file than its name says")


def commons(listed, names):
    ascending([c["group"].encode() for c in listed], "its commons")
    for c in listed:
        need(1 <= len(c["group"].encode()) <= 255 and len(c["digest"]) == 32, "a group of its commons breaks the rules")
        need(16 * len(c["names"]) == len(c["digests"]) and (names or not c["names"]),
             "a group of its commons has not a digest for each name")
        ascending([n.encode() for n in c["names"]], "names of its commons")


def check_incoming(store, lists, name, m):
    run, attempt, file = name.split("/")[1:]
    if file.startswith("base."):
        need(m["commit"] and len(m["commit"]["manifest"]) == 32, "it names no commit")
        return
    need((m["run"], m["attempt"]) == (run, attempt), "it says another run or attempt than its name")
    if file == "begin":
        need(len(m["mesh"]) in (0, 32) and len(m["bases"]) <= 4096 and 1 <= m["world"] <= 1 << 24,
             "it breaks the rules")
        need(m["alone"] or store.list_3 or not m["position"], "it is a job's, and says what list-3 is for")
        commons(m["commons"], True)
        return
    need(file == f"part.{m['rank']}" and m["rank"] < m["world"] and len(m["layout"]) == 32,
         "it says another rank than its name")
    packs = pack_table(m["packs"], False)
    store.referred(Ref(m["part"], PART, packs), packs)
    if m["layout_ref"]:
        store.referred(Ref(m["layout_ref"], LAYOUT, packs), packs)
    ascending([r[0] for r in rows(m["replicas"], "<16s16s", "its replicas")], "its replicas")
    commons(m["commons"], False)


OTHERS = [(rf"stats/{RUN}/{NUMBER}\.{NUMBER}/{NUMBER}", 9, check_stats),
          (rf"hosts/{LAUNCH}\.[A-Za-z0-9_.=-]+\.{NUMBER}", 7, check_heartbeat),
          (r"damaged/[A-Za-z0-9_.=-]+", 10, check_damage), (r"trash/[A-Za-z0-9_.=-]+", 8, check_trash),
          (rf"incoming/{RUN}/{ATTEMPT}/begin", 4, check_incoming),
          (rf"incoming/{RUN}/{ATTEMPT}/base\.{NUMBER}", 5, check_incoming),
          (rf"incoming/{RUN}/{ATTEMPT}/part\.{NUMBER}", 6, check_incoming)]


def other(store, lists, name, kind, check):
    try:
        _, m = store.record(name, kind)
    except FileNotFoundError:
        return None                                     # a writer was faster
    except Bad:
        if kind == 7 and not name.endswith(".0"):
            return None                                 # after a power loss it may be torn
        raise
    check(store, lists, name, m)
    return {"kind": KINDS[kind][0], "run": m.get("run", "")}


def manifest_of_no_step(store, name):
    body, _ = store.record(name, 3)
    need(tree(body).hex() == name.split("/")[-1], "it has another digest than its name")


def walk(store, lists, seen):
    """Every other file of the store."""
    found = {}
    for path in sorted(p for p in store.path.rglob("*") if not p.is_dir()):
        name = path.relative_to(store.path).as_posix()
        if (name in ("vckpt.store", "reserve") or name.startswith("index/") or
                re.search(r"\.tmp\.[0-9a-f]{16}$", name) or
                re.fullmatch(rf"runs/{RUN}/((head|collected)\.)?[0-9]{{12,}}", name)):
            continue
        pack = re.fullmatch(rf"packs/([0-9a-f]{{2}})/({ATTEMPT}-{NUMBER}-[A-Za-z0-9_.=-]{{1,71}})\.pack", name)
        if pack and hashlib.sha256(pack[2].encode()).hexdigest()[:2] == pack[1]:
            store.guarded(name, store.whole_pack, pack[2])
        elif re.fullmatch(rf"runs/{RUN}/manifests/[0-9a-f]{{64}}", name):
            store.guarded(name, manifest_of_no_step, store, name)
        else:
            form, kind, check = next((o for o in OTHERS if re.fullmatch(o[0], name)), (None, None, None))
            if kind is None:
                store.faults.append(f"{name}: no file of a store has this name")
                continue
            result = store.guarded(name, other, store, lists, name, kind, check)
            if result:
                found[name] = result
    return found


def read(path):
    """What is in the store, for JSON; and the store, which has the faults."""
    store = Store(path)
    store.guarded("vckpt.store", store.open)
    if store.faults or store.newer:
        return {}, store
    runs, lists = {}, {}
    for folder in sorted((store.path / "runs").iterdir()) if (store.path / "runs").exists() else []:
        if re.fullmatch(RUN, folder.name) and folder.is_dir():
            entries = store.guarded(f"runs/{folder.name}", List(store, folder.name).read)
            if entries:
                lists[folder.name] = entries
    others = walk(store, lists, runs)
    for run, entries in lists.items():
        steps = {}
        for step, (entry, commit) in sorted(entries.visible.items()):
            found = store.guarded(f"{run}/{step}", Step, store, run, entry, commit)
            if found:
                steps[step] = found.told()
        last = entries.bodies.get(entries.end - 1)
        runs[run] = {"entries": entries.end, "head": entries.head, "last": last and sha(last).hex(),
                     "snapshots": entries.snapshots,
                     "chains": {n: entries.chain(n) for n in entries.snapshots},
                     "launches": list(entries.launches),
                     "aborted": entries.aborted, "skipped": sorted(entries.skipped), "steps": steps,
                     "facts": {step: entries.facts.states[entry] for step, (entry, _) in sorted(entries.visible.items())
                               if entry in entries.facts.states}, "policy": entries.facts.policy}
    told = {"version": store.version, "id": store.id.hex(), "runs": runs, "others": others, "packs": len(store.footers),
            "faults": store.faults, "newer": store.newer}
    return told, store


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store")
    told, store = read(parser.parse_args().store)
    print(json.dumps(told, indent=1, ensure_ascii=False))
    for sentence in store.faults:
        print(sentence, file=sys.stderr)
    for sentence in store.newer:
        print(f"newer: {sentence}", file=sys.stderr)
    sys.exit(1 if store.faults else 4 if store.newer else 0)


if __name__ == "__main__":
    main()
