#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forges stores: forge.py STORE OUT --seed N writes a copy of STORE in which a few fields lie, --show says which.

A stranger who makes a store can compute every SHA-256 and XXH3. So here a whole store is taken apart into the fields of
its records (docs/format/), and put together again: each structure is first *settled*, which gives it the digests,
places, sizes and numbers that follow from what was built before it; then some of its fields are changed; then it is
encoded, and what covers it follows. So every digest, check, size and reference is right, and only what the records say
of each other is not. Order: the store's record, pieces, layouts, chunks, view headers, parts, manifests, lists, all
other records, and at last heads, footers and tails of packs.

A number alone (the seed) chooses the structures, the fields and the lies, so a store with its seed is repeatable. It
also chooses which tables are stored encoded (layouts, chunks, parts, view headers): none, half of them, or all. How
those are stored, and what blobs hold, lies too (forge_bytes.py). What is not done here: entries of a list far behind
its end. Tests of the list have those. forge_many.py makes and reads many.
"""
import argparse
import copy
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import uuid

HERE = pathlib.Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent / "unit"), str(HERE.parent / "golden")]

import xxhash  # noqa: E402

import reader  # noqa: E402
from forge_bytes import CODECS, Bytes, Stored, encoded  # noqa: E402
from forgelib import CHUNK, HEADER, LAYOUT, PART, Message  # noqa: E402
from reader import BLOCK, KINDS, NONE, blocks_of, row_digest, sha, tree, up  # noqa: E402

OFTEN = {"claims", "layout", "chunk", "header", "part", "manifest", "entry", "snapshot", "stored", "bytes"}
REF = ("32s4QIHBB", ["digest", "offset", "checks", "raw", "stored", "pack", "codec", "kind", "zero"])
TABLES = {
    ("Snapshot", "live"): ("QQQQ32sQQQ8sQII", ["entry", "step", "time", "replaces", "manifest", "tensors", "bytes",
                                               "new_bytes", "launch", "count", "offset", "length"]),
    ("Snapshot", "gone"): ("Q", ["entry"]), ("Launch", "ids"): ("8s", ["launch"]),
    ("Accept", "numbers"): ("Q", ["number"]), ("Packs", "attempts"): ("8sQ", ["launch", "count"]),
    ("Packs", "packs"): ("IIIIQQ", ["attempt", "rank", "class", "zero", "size", "live"]),
    ("ViewHeader", "ref"): REF, ("Blob", "ref"): REF, ("Announcement", "layout_ref"): REF,
    ("Announcement", "part"): REF, ("Manifest", "layouts"): REF,
    ("Mesh", "dim_sizes"): ("I", ["size"]), ("Mesh", "ranks"): ("I", ["rank"]),
    ("Layout", "tensors"): ("IIIIBBHIII", ["component", "name", "length", "dim", "dtype", "ndim", "flags", "mesh",
                                           "placement", "zero"]),
    ("Layout", "dims"): ("Q", ["dim"]),
    ("Part", "chunks"): ("4I" + REF[0], ["first", "last", "rows", "zero", *REF[1]]),
    ("Part", "samples"): ("I16s16s", ["tensor", "group", "hash"]), ("Common", "digests"): ("16s", ["digest"]),
    ("Announcement", "replicas"): ("16s16s", ["group", "digest"]),
    ("Manifest", "ranks"): ("6I" + REF[0], ["rank", "layout", "host", "first", "count", "zero", *REF[1]]),
    ("Manifest", "map"): ("I", ["pack"]), ("BlobName", "ranks"): ("II", ["first", "count"]),
    ("Heartbeat", "ranks"): ("IIQQ", ["rank", "zero", "pid", "start"]),
    ("Damage", "ranges"): ("QQ", ["offset", "length"]),
}
CHUNK_TABLES = {
    "head": ("8sHHIIIQIIQQQ", ["magic", "version", "zero", "features", "rows", "extents", "pieces", "bases", "zero2",
                               "pairs", "inline", "zero3"]),
    "rows": ("IIIIQII32s", ["tensor", "flags", "boxes", "extents", "pieces", "bases", "zero", "digest"]),
    "extents": ("IIQQ", ["pack", "pieces", "offset", "checks"]),
    "pieces": ("32s16sIIHHI", ["digest", "xxh", "stored", "raw", "codec", "flags", "base"]),
    "boxes": ("QQ", ["offset", "size"])}
EVIL = [b"\x1b[31mred", b"\xc2\x9b2J", b"\xc2\x85", b"\n", b"\r", b"\x7f", b"\xe2\x80\xae", b"/", b"..",
        b"/../../x", b"//", b"/" + b"d/" * 40 + b"f", b"%", b"%2F", b"\\", b"'\"", b" ", b".npy",
        b".safetensors", b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"x" * 300, b"y" * 70000]
WHOLE = [b"", b".", b"..", b"/", b"/etc/passwd", b"../../vckpt.store", b"latest", b"ranks", b"mesh", b"manifest.json",
         b".vckpt", b"__metadata__", b"model", b"model.safetensors", b"-q", b"meta", b"safetensors", b"a", b"0", b"R",
         b"S(0)", b"S(1)", b"IS(0,2)", b"SS(0,2)", b"RS(0;1,2)", b"S(0),S(0)", b"R,S(0)"]


# ---- lies of one value ----

def lie_int(rng, value, bits, near):
    """Another number of at most so many bits."""
    k = rng.randrange(1, bits + 1)
    found = [0, 1, (1 << k) - 1, 1 << (k - 1), value + 1, value - 1, value ^ 1 << rng.randrange(bits), 2 * value,
             (1 << bits) - 1, (1 << bits - 1) - 1, value + (1 << rng.randrange(bits)), *near[:6], *near[:6]]
    found = [n & (1 << bits) - 1 for n in found]
    return rng.choice([n for n in found if n != value] or [value ^ 1])


def lie_bytes(rng, value, near):
    found = [bytes(len(value)), b"\xff" * len(value), *near[:6], *near[:6]]
    if value:
        at = rng.randrange(len(value))
        found.append(value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1:])
    return rng.choice([b for b in found if b != value] or [b"\1" * len(value)])


def lie_text(rng, value, near):
    """Mostly what keeps a place in an order: the text, and something behind it."""
    way = rng.random()
    if way < .5:
        return value + rng.choice(EVIL)
    if way < .6:
        return value[:1] + rng.choice(EVIL) + value[1:]
    return rng.choice([t for t in [*WHOLE, *near, value[:-1], value * 2] if t != value])


def show(value):
    if isinstance(value, (bytes, bytearray)):
        return f"{bytes(value[:40])!r}{f'... of {len(value)} bytes' if len(value) > 40 else ''}"
    return str(value)


# ---- what structures are made of ----

class Rows:
    """A table of rows of fixed width. targets: the objects that the rows refer to, where they do."""

    def __init__(self, form, names, data, targets=()):
        self.form, self.names, self.tail, self.targets = "<" + form, names, b"", list(targets)
        size = struct.calcsize(self.form)
        whole = len(data) // size * size
        self.rows = [list(row) for row in struct.iter_unpack(self.form, data[:whole])]
        self.tail = data[whole:]
        self.bits = [8 * {"Q": 8, "I": 4, "H": 2, "B": 1}.get(c, 0)
                     for n, c in re.findall(r"(\d*)([a-zA-Z])", form) for _ in range(1 if c == "s" else int(n or 1))]

    def __getitem__(self, key):
        row, name = key
        return self.rows[row][self.names.index(name)]

    def __setitem__(self, key, value):
        row, name = key
        self.rows[row][self.names.index(name)] = value

    def encode(self):
        return b"".join(struct.pack(self.form, *map(self.fitting, self.bits, row)) for row in self.rows) + self.tail

    @staticmethod
    def fitting(bits, value):
        """What was echoed from a wider field loses its upper bits."""
        return value & (1 << bits) - 1 if bits and not 0 <= value < 1 << bits else value

    def settle(self):
        """References follow their objects."""
        for number, target in enumerate(self.targets):
            if target:
                for name in ("digest", "offset", "checks", "raw", "stored", "codec"):
                    self[number, name] = getattr(target, name)

    def echo(self, said):
        if len(self.rows) <= 500:
            for row in self.rows:
                row[:] = [said.get((name, value), value) for name, value in zip(self.names, row)]

    def lie(self, rng, what, said):
        if not self.rows or rng.random() < .15:
            return self.lie_of_table(rng, what)
        r, c = rng.randrange(len(self.rows)), rng.randrange(len(self.names))
        name, old = f"{what}[{r}].{self.names[c]}", self.rows[r][c]
        others = [row[c] for row in self.rows if row[c] != old]
        if others and rng.random() < .25:
            other = next(row for row in rng.sample(self.rows, len(self.rows)) if row[c] != old)
            self.rows[r][c], other[c] = other[c], old
            return f"{name}: {show(old)} exchanged with {show(self.rows[r][c])} of row {self.rows.index(other)}"
        near = rng.sample(others, min(3, len(others)))
        if self.bits[c]:
            near += [v for v in self.rows[r] if isinstance(v, int)]
            new = lie_int(rng, old, self.bits[c], near)
        else:
            new = lie_bytes(rng, old, near)
        self.rows[r][c] = new
        if self.names[c] != "version" and rng.random() < .3:
            said[self.names[c], old] = new
            name += " and wherever it is said again"
        return f"{name}: {show(old)} -> {show(new)}"

    def lie_of_table(self, rng, what):
        way = rng.choice(["drop", "repeat", "swap", "zeros", "part of a row"])
        if not self.rows or way in ("zeros", "part of a row"):
            size = struct.calcsize(self.form)
            self.tail += bytes(size) if way == "zeros" else b"\1" * rng.randrange(1, size + 1)
            return f"{what}: {len(self.tail)} bytes more at its end"
        r = rng.randrange(len(self.rows))
        if way == "swap" and len(self.rows) > 1:
            s = rng.randrange(len(self.rows))
            self.rows[r], self.rows[s] = self.rows[s], self.rows[r]
            return f"{what}: rows {r} and {s} exchanged"
        if way == "drop":
            del self.rows[r]
            return f"{what}: row {r} left out"
        self.rows.insert(r, list(self.rows[r]))
        return f"{what}: row {r} stands twice"


class Body(Message):
    """A message of proto/vckpt.proto, with the messages and tables in it taken apart too."""

    def __init__(self, kind, data=b""):
        super().__init__(data)
        self.kind, self.more = kind, b""
        self.fields = [[n, wire, self.opened(n, value)] for n, wire, value in self.fields]

    def opened(self, number, value):
        name, kind, _ = reader.SCHEMA[self.kind].get(number, ("", "bytes", False))
        if kind in reader.SCHEMA:
            return Body(kind, value)
        if (self.kind, name) in TABLES:
            return Rows(*TABLES[self.kind, name], value)
        return int.from_bytes(value, "little") if kind == "fixed64" else value

    def number(self, name):
        return next(n for n, (field, _, _) in reader.SCHEMA[self.kind].items() if field == name)

    def __getitem__(self, name):
        number, (_, kind, many) = self.number(name), reader.SCHEMA[self.kind][self.number(name)]
        if many:
            return self.all(number)
        default = 0 if kind in reader.WIRE else None if kind in reader.SCHEMA else b""
        return self.get(number, default)

    def __setitem__(self, name, value):
        number = self.number(name)
        for field in self.fields:
            if field[0] == number:
                field[2] = value
                return
        self.fields.append([number, reader.WIRE.get(reader.SCHEMA[self.kind][number][1], 2), value])
        self.fields.sort(key=lambda f: f[0])

    def all(self, number):
        return [v for n, _, v in self.fields if n == number]

    def table(self, name):
        """The table of that name; an empty one is made."""
        if not isinstance(self[name], Rows):
            self[name] = Rows(*TABLES[self.kind, name], b"")
        return self[name]

    def encode(self):
        out = bytearray()
        for number, wire, value in self.fields:
            value = value.encode() if isinstance(value, (Rows, Body)) else value
            if value in (0, b""):                                               # a default is left out
                if not (value == b"" and reader.SCHEMA[self.kind].get(number, ("", "", False))[2]):
                    continue
            out += self.put(number << 3 | wire)
            if wire == 0:
                out += self.put(value & (1 << 64) - 1)
            elif wire == 2:
                out += self.put(len(value)) + value
            else:
                out += value if isinstance(value, bytes) else struct.pack("<Q", value)
        return bytes(out) + self.more

    def settle(self):
        for _, _, value in self.fields:
            if isinstance(value, (Rows, Body)):
                value.settle()

    def echo(self, said):
        for field in self.fields:
            if isinstance(field[2], (Rows, Body)):
                field[2].echo(said)
            else:
                name = reader.SCHEMA[self.kind].get(field[0], ("",))[0]
                field[2] = said.get((name, field[2]), field[2])

    def lie(self, rng, what, said):
        """Of some field, or of an absent one, or of the message itself."""
        if rng.random() < .1:
            return self.lie_of_fields(rng, what)
        number = rng.choice(list(reader.SCHEMA[self.kind]))
        if not any(f[0] == number for f in self.fields) and rng.random() < .7 and self.fields:
            number = rng.choice(self.fields)[0]
        name, kind, many = reader.SCHEMA[self.kind].get(number, (f"field {number}", "bytes", False))
        places = [f for f in self.fields if f[0] == number]
        name = f"{what}.{name}"
        if not places:
            return self.lie_of_absent(rng, name, number, kind)
        i = rng.randrange(len(places))
        field, old = places[i], places[i][2]
        name += f"[{i}]" if many else ""
        if many and rng.random() < .25:
            return self.lie_of_many(rng, name, field, places)
        if isinstance(old, (Rows, Body)):
            return old.lie(rng, name, said)
        near = [f[2] for f in self.fields if type(f[2]) is type(old) and f[2] != old]
        if isinstance(old, int):
            new = lie_int(rng, old, {"uint32": 32, "bool": 8}.get(kind, 64), rng.sample(near, min(4, len(near))))
        else:
            new = (lie_text if kind == "string" else lie_bytes)(rng, old, near)
        field[2] = new
        if not name.endswith("version") and rng.random() < .3:
            said[name.split(".")[-1].split("[")[0], old] = new
            name += " and wherever it is said again"
        return f"{name}: {show(old)} -> {show(new)}"

    def lie_of_absent(self, rng, name, number, kind):
        value = (rng.choice([1, 2, 7, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]) if kind in reader.WIRE else
                 Body(kind) if kind in reader.SCHEMA else rng.choice(WHOLE[1:]) if kind == "string" else
                 bytes(rng.choice([1, 8, 16, 32, 72, 88])))
        self.fields.append([number, reader.WIRE.get(kind, 2), value])
        return f"{name}: made, {value.kind if isinstance(value, Body) else show(value)}"

    def lie_of_many(self, rng, name, field, places):
        at, other = self.fields.index(field), self.fields.index(rng.choice(places))
        if rng.random() < .3:
            del self.fields[at]
            return f"{name}: left out"
        if rng.random() < .5:
            self.fields.insert(at, copy.deepcopy(field))
            return f"{name}: stands twice"
        self.fields[at], self.fields[other] = self.fields[other], self.fields[at]
        return f"{name}: exchanged with another one"

    def lie_of_fields(self, rng, what):
        if rng.random() < .1:
            one = rng.choice([b"\xc2\x3e\0", b"\xc0\x3e\1", bytes(2), b"\x12\0", b"\x4a\0", b"\x5a\0"])
            self.more = one * rng.choice([1000, 100000, 4000000 // len(one)])
            return f"{what}: {len(self.more)} bytes of fields {one!r} behind it"
        number, wire = rng.choice([(50, 0), (50, 2), (50, 1), (1000, 2), (1 << 28, 0)])
        if rng.random() < .5 or not self.fields:
            self.fields.append([number, wire, {0: 1, 1: bytes(8), 2: b"unknown" * rng.choice([1, 100])}[wire]])
            return f"{what}: an unknown field {number}"
        i = rng.randrange(len(self.fields))
        name = reader.SCHEMA[self.kind].get(self.fields[i][0], ("?",))[0]
        if rng.random() < .5:
            del self.fields[i]
            return f"{what}.{name}: left out"
        self.fields.insert(i, copy.deepcopy(self.fields[i]))
        return f"{what}.{name}: stands twice"


class Layout(Body):
    def lie(self, rng, what, said):
        if self["names"] and rng.random() < .2:
            return self.rename(rng, what)
        return super().lie(rng, what, said)

    def rename(self, rng, what):
        """Another name for a tensor, with all offsets right. (The order may suffer.)"""
        table, names, at = self.table("tensors"), [], 0
        for i in range(len(table.rows)):
            names.append(self["names"][at:at + table[i, "length"]])
            at += table[i, "length"]
        i = rng.randrange(len(names))
        old, names[i] = names[i], lie_text(rng, names[i], rng.sample(names, min(3, len(names))))[:65535]
        told, at = f"{what}: tensor {show(old)} is named {show(names[i])}", 0
        for i, name in enumerate(names):
            table[i, "name"], table[i, "length"], at = at, len(name), at + len(name)
        self["names"] = b"".join(names)
        return told


class Chunk:
    """An object of kind 5 (docs/format/part.md). owners: of each piece the object, None: inline."""

    def __init__(self, data):
        self.head = Rows(*CHUNK_TABLES["head"], data[:64])
        at, self.owners = 64, []
        counts = {"rows": "rows", "extents": "extents", "pieces": "pieces", "boxes": "pairs"}
        for name, count in counts.items():
            form, names = CHUNK_TABLES[name]
            size = struct.calcsize("<" + form) * self.head[0, count]
            setattr(self, name, Rows(form, names, data[at:at + size]))
            at += size
        self.inline = data[at:]

    def link(self, find):
        """find(pack, offset): the object there."""
        piece = 0
        for pack, count, offset, _ in self.extents.rows:
            for _ in range(count):
                codec, stored = self.pieces[piece, "codec"], self.pieces[piece, "stored"]
                if pack != NONE:
                    offset = up(offset, 4096 if not codec and stored >= 65536 else 64)
                self.owners.append(None if pack == NONE else find(pack, offset))
                offset, piece = offset + stored, piece + 1

    def settle(self):
        first = 0
        for i, owner in enumerate(self.owners):
            if owner:
                for name in ("digest", "stored", "raw", "codec"):
                    self.pieces[i, name] = getattr(owner, name)
        for i in range(len(self.extents.rows)):
            if self.owners[first]:
                self.extents[i, "offset"], self.extents[i, "checks"] = (self.owners[first].offset,
                                                                        self.owners[first].checks)
            first += self.extents[i, "pieces"]
        self.sums()

    def sums(self):
        """Digests of the rows, from those of their pieces."""
        at = 0
        for i in range(len(self.rows.rows)):
            count = min(self.rows[i, "pieces"], len(self.pieces.rows))
            self.rows[i, "digest"] = row_digest([p[0] for p in self.pieces.rows[at:at + count]])
            at += count

    def count(self):
        for name, count in [("rows", "rows"), ("extents", "extents"), ("pieces", "pieces"), ("boxes", "pairs")]:
            self.head[0, count] = len(getattr(self, name).rows)
        self.head[0, "inline"] = len(self.inline)

    def echo(self, said):
        for name in ("rows", "extents", "pieces"):
            getattr(self, name).echo(said)

    def lie(self, rng, what, said):
        name = rng.choice(["head", "rows", "rows", "extents", "extents", "pieces", "pieces", "boxes", "inline"])
        if name == "boxes" and not self.boxes.rows:
            name = "rows"
        if name == "inline":
            old, self.inline = self.inline, lie_bytes(rng, self.inline, [self.inline[:-1], self.inline + b"\0"])
            self.inline_digests()
            told = f"{what}.inline: {len(old)} bytes -> {len(self.inline)}"
        else:
            told = getattr(self, name).lie(rng, f"{what}.{name}", said)
        if name not in ("rows", "head"):
            self.sums()
        if name != "head":
            self.count()
        return told

    def inline_digests(self):
        at = 0
        for i, owner in enumerate(self.owners[:len(self.pieces.rows)]):
            if owner is None:
                raw = self.pieces[i, "raw"]
                self.pieces[i, "digest"], at = tree(self.inline[at:at + raw]), at + raw

    def encode(self):
        return (self.head.encode() + self.rows.encode() + self.extents.encode() + self.pieces.encode() +
                self.boxes.encode() + self.inline)


class Header:
    """An object of kind 6 (docs/format/header.md): u64, JSON."""

    def __init__(self, data):
        self.length, self.text = len(data) - 8, data[8:]

    def settle(self):
        pass

    def echo(self, said):
        pass

    def lie(self, rng, what, said):
        made = json.loads(self.text)
        tensors = [k for k in made if k != "__metadata__"]
        way = rng.choice(["length", "cut", "offsets", "offsets", "shape", "dtype", "name", "drop", "exchange", "other"])
        if way == "length":
            old, self.length = self.length, lie_int(rng, self.length, 64, [])
            return f"{what}.length: {old} -> {self.length}"
        if way == "cut":
            self.text = self.text[:rng.randrange(len(self.text))]
            self.length = len(self.text)
            return f"{what}: cut to {self.length} bytes"
        name, other = rng.choice(tensors), rng.choice(tensors)
        t, told = made[name], f"{what}[{name!r}].{way}"
        if way in ("offsets", "shape"):
            numbers = t["data_offsets" if way == "offsets" else "shape"]
            if numbers:
                i = rng.randrange(len(numbers))
                old, numbers[i] = numbers[i], lie_int(rng, numbers[i], 64, made[other]["data_offsets"])
                told += f": {old} -> {numbers[i]}"
            else:
                numbers.append(1)
        elif way == "dtype":
            t["dtype"] = rng.choice(["F64", "BF16", "U8", "F4", "F8_E8M0", "", "X", "f32", 7])
        elif way == "name":
            made = {(lie_text(rng, k.encode(), []).decode("utf-8", "replace") if k == name else k): v
                    for k, v in made.items()}
        elif way == "drop":
            del made[name]
        elif way == "exchange":
            made[name], made[other] = made[other], made[name]
        else:
            what_else = [None, [], {}, 1, "x", {"a": {}}, {"a": "\x1b"}]
            made[rng.choice(["__metadata__", "more", name])] = rng.choice(what_else)
        self.text = json.dumps(made).encode().ljust(len(self.text))
        self.length = len(self.text)
        return told

    def encode(self):
        return struct.pack("<Q", self.length) + self.text


class Paths:
    """An object of kind 6 that says under which names files are shown (docs/format/header.md)."""

    def __init__(self, data):
        self.paths, self.end = data.removesuffix(b"\0").split(b"\0"), b"\0"

    def settle(self):
        pass

    def echo(self, said):
        pass

    def lie(self, rng, what, said):
        self.paths = self.paths or [b""]
        i, j = rng.randrange(len(self.paths)), rng.randrange(len(self.paths))
        way = rng.choice(["name", "odd", "odd", "below", "drop", "twice", "exchange", "end", "more"])
        odd = [b"", b"/x", b"../x", b"ranks/x", b"mesh", b"manifest.json", b"a//x", b"a.safetensors/x", b"config.json",
               b"unet", b"\x1b[2Jx", b"\xff", b"x" * 70000, b"d/" * 100 + b"x"]
        if way == "name":
            self.paths[i] = lie_text(rng, self.paths[i], [])
        elif way == "odd":
            self.paths[i] = rng.choice(odd) + b".safetensors"
        elif way == "below":
            self.paths[i] = self.paths[j] + b"/x.safetensors"
        elif way == "drop":
            del self.paths[i]
        elif way == "twice":
            self.paths[i] = self.paths[j]
        elif way == "exchange":
            self.paths[i], self.paths[j] = self.paths[j], self.paths[i]
        elif way == "end":
            self.end = rng.choice([b"", b"\0\0", b"\0x"])
        else:
            self.paths += [b"%d.safetensors" % n for n in range(rng.choice([1, 5000]))]
        return f"{what}.{way}: {b' '.join(self.paths)[:200]!r}"

    def encode(self):
        return b"\0".join(self.paths) + self.end


class Object:
    """What a pack holds; `tree` of what is taken apart, and the codec word with which that is stored."""

    def __init__(self, digest, offset, checks, raw, stored, codec, kind, data, lengths):
        self.digest, self.offset, self.checks, self.raw, self.stored, self.codec, self.kind = (
            digest, offset, checks, raw, stored, codec, kind)
        self.data, self.lengths, self.tree, self.opens, self.word = data, lengths, None, False, 0
        self.was = raw, stored

    def whole(self):
        out, at = [], 0
        for i, length in enumerate(self.lengths):
            size = length & 0x7fffffff
            out.append(reader.decode_block(self.data[at:at + size], min(BLOCK, self.raw - BLOCK * i), length >> 31,
                                           self.codec))
            at += size
        return b"".join(out) if self.codec else self.data

    def encode(self):
        """From the tree."""
        self.store(self.tree.encode(), self.word)

    def store(self, data, codec):
        """It holds these bytes, encoded where that makes them fewer."""
        found = encoded(data, codec) if codec else None
        self.data, self.lengths = found or (data, [])
        self.codec, self.raw, self.stored, self.digest = codec if found else 0, len(data), len(self.data), tree(data)

    def sums(self):
        """The checks of its blocks, and their lengths."""
        seed, at, out = struct.unpack_from("<Q", self.digest)[0], 0, []
        count = min(blocks_of(self.raw), 1 << 16)
        for i in range(count):
            size = self.lengths[i] & 0x7fffffff if i < len(self.lengths) else BLOCK
            out.append(xxhash.xxh3_64_intdigest(self.data[at:at + size], (seed + i) % 2**64))
            at += size
        lengths = (self.lengths + [1 << 31] * count)[:count] if self.codec else []
        return struct.pack(f"<{count}Q{len(lengths)}I", *out, *lengths)


class Pack:
    HEAD = ("8sHHI16sH128s3926s", ["magic", "version", "zero", "features", "store", "length", "name", "zeros"])
    FOOT = ("32s4QHB13s", ["digest", "offset", "checks", "raw", "stored", "codec", "kind", "zero"])
    TAIL = ("8s4Q32s48s", ["magic", "offset", "length", "count", "size", "digest", "zeros"])

    def __init__(self, name, data):
        self.name, self.head, self.objects = name, Rows(*self.HEAD, data[:4088]), []
        at, length = struct.unpack_from("<QQ", data, len(data) - 120)
        self.foot, self.tail = Rows(*self.FOOT, data[at:at + length]), Rows(*self.TAIL, data[-128:-8])
        end = checks_end = None
        for digest, offset, checks, raw, stored, codec, kind, _ in self.foot.rows:
            count = blocks_of(raw)
            lengths = list(struct.unpack_from(f"<{count}I", data, checks + 8 * count)) if codec else []
            made = Object(digest, offset, checks, raw, stored, codec, kind, data[offset:offset + stored], lengths)
            made.opens = end is None or checks != checks_end or kind == PART
            self.objects.append(made)
            end, checks_end = offset + stored, checks + count * (12 if codec else 8)

    def at(self, offset):
        return next((o for o in self.objects if o.offset == offset), None)

    def place(self):
        """Gives every object its place; returns the pack's bytes up to the footer."""
        out, extents = bytearray(4096), []
        for made in self.objects:
            if made.opens or not extents:
                extents.append([])
            extents[-1].append(made)
        for extent in extents:
            for made in extent:
                out += bytes(up(len(out), 4096 if not made.codec and made.stored >= 65536 else 64) - len(out))
                made.offset = len(out)
                out += made.data
            out += bytes(up(len(out), 8) - len(out))
            for made in extent:
                made.checks = len(out)
                out += made.sums()
        self.size = up(len(out), 64) + 80 * len(self.objects) + 128
        return bytes(out).ljust(up(len(out), 64), b"\0")

    def encode(self, store_id, lies):
        """lies: a function that may change a structure of that name."""
        body = self.place()
        self.head[0, "store"] = store_id
        self.foot.rows = [[o.digest, o.offset, o.checks, o.raw, o.stored, o.codec, o.kind, b""] for o in self.objects]
        lies("footer", self.foot)
        foot = self.foot.encode()
        self.tail.rows[0][1:6] = [len(body), len(foot), len(self.objects), len(body) + len(foot) + 128, sha(foot)]
        lies("tail", self.tail)
        lies("head", self.head)
        head, tail = self.head.encode()[:4088].ljust(4088, b"\0"), self.tail.encode()[:120].ljust(120, b"\0")
        return (head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + body[4096:] + foot + tail +
                struct.pack("<Q", xxhash.xxh3_64_intdigest(tail)))


class Claims(Rows):
    """What is said of the pieces of a pack wherever they are spoken of."""

    def __init__(self, pack):
        super().__init__("32sQHB", ["digest", "raw", "codec", "kind"], b"")
        self.pack, self.rows = pack, [[o.digest, o.raw, o.codec, o.kind] for o in pack.objects]

    def lie_of_table(self, rng, what):
        """Two objects change places."""
        objects = self.pack.objects
        if not self.rows:
            return f"{what}: nothing, it is empty"
        a, b = rng.randrange(len(objects)), rng.randrange(len(objects))
        objects[a].data, objects[b].data = objects[b].data, objects[a].data
        objects[a].lengths, objects[b].lengths = objects[b].lengths, objects[a].lengths
        objects[a].stored, objects[b].stored = objects[b].stored, objects[a].stored
        return f"{what}: objects {a} and {b} have each other's bytes"

    def done(self):
        for made, row in zip(self.pack.objects, self.rows):
            made.digest, made.raw, made.codec, made.kind = row


class List:
    """The entries of a run, for lies of their order."""

    def __init__(self, entries):
        self.entries = entries

    def settle(self):
        pass

    def echo(self, said):
        pass

    def lie(self, rng, what, said):
        e = self.entries
        a, b = rng.randrange(len(e)), rng.randrange(len(e))
        way = rng.choice(["drop", "twice", "exchange"])
        if way == "drop":
            del e[a]
            return f"{what}: entry {a} left out"
        if way == "twice":
            e.insert(b, copy.copy(e[a]))
            return f"{what}: entry {a} stands at {b} too"
        e[a], e[b] = e[b], e[a]
        return f"{what}: entries {a} and {b} exchanged"


# ---- the whole store ----

OTHERS = [(r"stats/[^/]+/\d+\.\d+/\d+", 9), (r"hosts/[^/]+", 7), (r"trash/[^/]+", 8), (r"damaged/[^/]+", 10),
          (r"incoming/[^/]+/[^/]+/begin", 4), (r"incoming/[^/]+/[^/]+/base\.\d+", 5),
          (r"incoming/[^/]+/[^/]+/part\.\d+", 6)]


def pids_here():
    """boot_id of a heartbeat of this machine (docs/format/incoming.md)."""
    words = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    return str(uuid.UUID(bytes=sha(" ".join(words).encode())[:16])).encode()


class Entry:
    """links: of a commit its manifest; of the rows of a snapshot theirs."""

    def __init__(self, body, links):
        self.body, self.links = body, links


class Store:
    """A store taken apart. build() may be called once."""

    def __init__(self, path, runs=None):
        self.path = pathlib.Path(path)
        self.head = Body("Store", self.record("vckpt.store", 1, bytes(16)))
        self.id = self.head["id"]
        self.names = sorted(p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file())
        self.packs = {pathlib.Path(n).stem: Pack(pathlib.Path(n).stem, (self.path / n).read_bytes())
                      for n in self.names if n.startswith("packs/")}
        self.lists, self.manifests, self.others, self.held = {}, {}, {}, {}
        for name in self.names:
            self.take(name, runs)
        for (run, _), m in sorted(self.manifests.items()):
            self.link_manifest(m)
        self.link_lists()
        if runs:
            used = {n for m in self.manifests.values() for n in self.names_of(m["packs"])}
            self.packs = {n: p for n, p in self.packs.items() if n in used}
        self.unfinished()

    def record(self, name, kind, store_id):
        found = reader.record_copy((self.path / name).read_bytes(), 0, store_id)
        assert found and found[0] == kind, name
        return found[2]

    def take(self, name, runs):
        parts = name.split("/")
        if runs and parts[0] in ("runs", "stats", "incoming") and parts[1] not in runs:
            return
        if parts[0] == "runs" and parts[2] == "manifests":
            self.manifests[parts[1], parts[3]] = Body("Manifest", self.record(name, 3, self.id))
        elif parts[0] == "runs":
            self.lists.setdefault(parts[1], []).append(Entry(Body("Entry", self.record(name, 2, self.id)), None))
        for pattern, kind in OTHERS:
            if re.fullmatch(pattern, name):
                self.others[name] = kind, Body(KINDS[kind][0], self.record(name, kind, self.id))

    @staticmethod
    def names_of(packs):
        """Names of the packs of a table."""
        attempts, classes = packs.table("attempts"), packs["classes"]
        return [f"{attempts[a, 'launch'].hex()}-{attempts[a, 'count']}-{rank}-{classes[c].decode()}"
                for a, rank, c, _, _, _ in packs.table("packs").rows]

    def find(self, names, pack, offset):
        return self.packs[names[pack]].at(offset)

    def link(self, rows, names):
        pack, offset = rows.names.index("pack"), rows.names.index("offset")
        rows.targets = [self.find(names, row[pack], row[offset]) if names else None for row in rows.rows]
        return rows.targets

    def link_manifest(self, m):
        names = self.names_of(m["packs"])
        for made in self.link(m.table("layouts"), names):
            made.tree = made.tree or Layout("Layout", made.whole())
        for header in m["headers"]:
            made, = self.link(header["ref"], names)
            kind = Paths if header["view"] == b"files" else Header
            made.tree = made.tree or kind(made.whole())
        for i, made in enumerate(self.link(m.table("ranks"), names)):
            if not made.tree:
                made.tree = Body("Part", made.whole())
                self.link_part(made.tree)
                made.tree.held_more, made.tree.packs_more = 0, {}       # bytes, by what blobs hold now
                made.tree.layout = m.table("layouts").targets[m.table("ranks")[i, "layout"]]

    def link_part(self, part):
        names = self.names_of(part["packs"])
        for made in self.link(part.table("chunks"), names):
            made.tree = Chunk(made.whole())
            made.tree.link(lambda pack, offset: self.find(names, pack, offset))
        found = {}
        for blob in part["blobs"]:
            made, = self.link(blob["ref"], names if blob["len"] else None)
            if made:
                found[blob["name"]] = self.held.setdefault(id(made), Bytes(made, blob["name"]))
        for name, held in found.items():
            held.index = found.get(name + b".json") if name.startswith(b".dcp/bytes.") else None

    def link_lists(self):
        for run, entries in self.lists.items():
            for e in entries:
                found = []
                if e.body["commit"]:
                    found = [e.body["commit"]["manifest"]]
                if e.body["snapshot"]:
                    live = e.body["snapshot"].table("live")
                    found = [live[i, "manifest"] for i in range(len(live.rows))]
                e.links = [self.manifests.get((run, digest.hex())) for digest in found]

    def unfinished(self):
        """An attempt that is under way at the end of each run's list, and what lies around in a store that is used:
        made of what the run's last step has."""
        for run, entries in self.lists.items():
            last = next((e for e in reversed(entries) if e.body["commit"] and e.links[0]), None)
            if not last:
                continue
            m, launch = last.links[0], hashlib.sha256(run.encode()).hexdigest()[:16]
            attempt = f"{launch}-0"
            common = {"version": self.head["version"], "run": run.encode(), "attempt": attempt.encode(),
                      "step": m["step"] + 1, "world": m["world"]}
            begin, base = Body("Begin"), Body("BaseRecord")
            alone = m["world"] == 1
            self.fill(begin, **common, **({"alone": 1, "position": len(entries)} if alone else
                                          {"host": b"h", "time_ns": 2}))
            commit = Body("Base")
            self.fill(commit, run=run.encode(), entry=last.body["number"])
            commit.links = m
            base["version"], base["commit"] = self.head["version"], commit
            self.others[f"incoming/{run}/{attempt}/begin"] = 4, begin
            self.others[f"incoming/{run}/{attempt}/base.0"] = 5, base
            for rank, made in enumerate(m.table("ranks").targets):
                self.others[f"incoming/{run}/{attempt}/part.{rank}"] = 6, self.announcement(common, m, rank, made)
            self.around(run, launch, common, m)

    @staticmethod
    def fill(body, **fields):
        for name, value in fields.items():
            body[name] = value
        return body

    def announcement(self, common, m, rank, part):
        a = self.fill(Body("Announcement"), **common, rank=rank, host=part.tree["host"], layout=part.tree["layout"],
                      tensors=m["tensors"], bytes=m["bytes"], new_bytes=1, packs=copy.deepcopy(part.tree["packs"]))
        names = self.names_of(a["packs"])
        for i, name in enumerate(names):
            a["packs"].table("packs")[i, "size"] = 1
        home = next(n for n, p in self.packs.items() if part in p.objects)
        for name, made in [("layout_ref", part.tree.layout), ("part", part)]:
            if made in self.packs[home].objects and home in names:
                rows = a.table(name)
                rows.rows, rows.targets = [[b"", 0, 0, 0, 0, names.index(home), 0, made.kind, 0]], [made]
        a.layout_of = part.tree
        return a

    def around(self, run, launch, common, m):
        """A heartbeat of a dead process, a mark, a note of damage, measures."""
        pack, version = self.names_of(m["packs"])[0], common["version"]
        beat = self.fill(Body("Heartbeat"), version=version, launch=launch.encode(), host=b"h", run=run.encode(),
                         boot_id=pids_here(), number=3)
        beat.table("ranks").rows = [[0, 0, 1 << 22, 7]]                     # more than any process has
        self.others[f"hosts/{launch}.h.3"] = 7, beat
        place = f"packs/{hashlib.sha256(pack.encode()).hexdigest()[:2]}/{pack}.pack"
        self.others[f"trash/{pack}"] = 8, self.fill(Body("Trash"), version=version, name=place.encode(), time_ns=2,
                                                    heartbeats=f"{launch}.h.3".encode())
        note = self.fill(Body("Damage"), version=version, pack=pack.encode())
        note.table("ranges").rows = [[4096, 1], [5000, 7]]
        self.others[f"damaged/{pack}"] = 10, note

    # ---- putting it together ----

    def build(self, out, seed=None, lies=0, share=0):
        """Writes the store into `out`, which must not exist; returns what it lies about, in words. share: of the tables
        that are stored encoded."""
        self.out, self.told, self.said, self.rng = pathlib.Path(out), [], {}, random.Random(f"forge {seed}")
        words = random.Random(f"encoded {seed}")
        for _, made, _ in self.meta_objects():
            made.word = words.choice(CODECS) if words.random() < share else 0
        self.chosen = self.choose(lies)
        self.out.mkdir()
        self.structure("store", self.head)
        self.id = self.head["id"] if len(self.head["id"]) == 16 else self.id
        self.put("vckpt.store", 1, self.head.encode(), True)
        self.make_packs()
        self.make_manifests()
        for run, entries in sorted(self.lists.items()):
            self.make_list(run, entries)
        self.make_others()
        for number, (name, pack) in enumerate(sorted(self.packs.items())):
            data = pack.encode(self.id, lambda what, made: self.structure(f"{what} of pack {number}", made))
            self.write(f"packs/{hashlib.sha256(name.encode()).hexdigest()[:2]}/{name}.pack", data)
        (self.out / "runs").mkdir(exist_ok=True)
        return self.told

    def choose(self, lies):
        """Which structures lie, and how often: {name: times}. Kinds are drawn before names; what steps need that are
        shown is drawn more often than what is left of others, and data more often than what stands around it."""
        kinds, live = {}, self.shown()
        for name, pack in self.structures():
            if pack is None or pack in live or self.rng.random() < .05:
                kinds.setdefault(name.split(" ")[0], []).append(name)
        drawn = [kind for kind in sorted(kinds) for _ in range(8 if kind in OFTEN else 1)]
        found = {}
        for _ in range(lies):
            name = self.rng.choice(kinds[self.rng.choice(drawn)])
            found[name] = found.get(name, 0) + 1
        return found

    def shown(self):
        """Names of packs that visible steps need."""
        found = set()
        for entries in self.lists.values():
            steps = {}
            for e in entries:
                if e.body["commit"]:
                    steps[e.body["commit"]["step"]] = e
                if e.body["remove"]:
                    gone = e.body["remove"]["entry"] - 1
                    steps = {k: v for k, v in steps.items() if v.body["number"] != gone}
            for e in steps.values():
                found |= set(self.names_of(e.links[0]["packs"])) if e.links[0] else set()
        return found

    def meta_objects(self):
        """(name, object, pack) of what is taken apart, in the order in which it can be built."""
        for kind, word in [(LAYOUT, "layout"), (CHUNK, "chunk"), (HEADER, "header"), (PART, "part")]:
            found = [(o, n) for n, p in sorted(self.packs.items()) for o in p.objects if o.tree and o.kind == kind]
            yield from ((f"{word} {i}", o, n) for i, (o, n) in enumerate(found))

    def structures(self):
        """(name, pack in which it lies)."""
        yield "store", None
        for number, (name, pack) in enumerate(sorted(self.packs.items())):
            if not name.endswith("-meta"):
                yield f"claims of pack {number}", name
                yield f"stored pack {number}", name
            yield from ((f"{what} of pack {number}", name) for what in ("head", "footer", "tail"))
        yield from ((name, pack) for name, _, pack in self.meta_objects())
        yield from ((f"stored {name}", pack) for name, made, pack in self.meta_objects() if made.word)
        yield from ((f"bytes {i}", pack) for i, (_, pack) in enumerate(self.blobs()))
        for run, entries in sorted(self.lists.items()):
            yield f"list {run}", None
            yield from ((f"{'snapshot' if e.body['snapshot'] else 'entry'} {run}/{i}", None)
                        for i, e in enumerate(entries))
        for i, (_, m) in enumerate(sorted(self.manifests.items())):
            yield f"manifest {i}", next(iter(self.names_of(m["packs"])), None)
        for name, (kind, _) in sorted(self.others.items()):
            yield f"{KINDS[kind][0]} {name}", None

    def structure(self, name, made):
        """Settles it, and lets it lie where it was chosen."""
        made.settle()
        if self.said:
            made.echo(self.said)
        for _ in range(self.chosen.get(name, 0)):
            self.told.append(made.lie(self.rng, name, self.said))

    def blobs(self):
        """(what it holds, pack)"""
        return [(self.held[id(o)], name) for name, pack in sorted(self.packs.items()) for o in pack.objects
                if id(o) in self.held]

    def make_blobs(self):
        """Byte entries before the documents that say where they lie."""
        found = [(f"bytes {i}", held) for i, (held, _) in enumerate(self.blobs())]
        for name, held in sorted(found, key=lambda one: one[1].index is None):
            self.structure(name, held)
        for _, held in found:
            held.done()

    def make_packs(self):
        self.make_blobs()
        for number, (name, pack) in enumerate(sorted(self.packs.items())):
            if not name.endswith("-meta"):
                self.structure(f"stored pack {number}", Stored(pack.objects))
                claims = Claims(pack)
                self.structure(f"claims of pack {number}", claims)
                claims.done()
                pack.place()
        objects = list(self.meta_objects())
        for name, made, _ in objects:
            if made.kind != PART:
                self.make_table(name, made)
        metas = [p for n, p in sorted(self.packs.items()) if n.endswith("-meta")]
        for pack in metas:
            pack.place()
        for name, made, _ in objects:
            if made.kind == PART:
                self.settle_part(made.tree)
                self.make_table(name, made)
        for pack in metas:
            pack.place()

    def make_table(self, name, made):
        self.structure(name, made.tree)
        made.encode()
        self.structure(f"stored {name}", Stored([made]))

    def sizes(self, packs):
        for i, name in enumerate(self.names_of(packs)):
            row = packs.table("packs")
            if row[i, "size"] and name in self.packs:
                row[i, "size"] = self.packs[name].size
                yield i, name, row

    def settle_part(self, part):
        part["layout"] = part.layout.digest
        for _ in self.sizes(part["packs"]):
            pass
        found = {}
        for blob in part["blobs"]:
            for made in filter(None, blob["ref"].targets):
                part.held_more += made.raw - made.was[0]
                blob["len"], found[id(made)] = made.raw, made
        names = self.names_of(part["packs"])
        for made in found.values():
            name = next(n for n in names if made in self.packs[n].objects)
            part.packs_more[name] = part.packs_more.get(name, 0) + made.stored - made.was[1]
            part["packs"].table("packs")[names.index(name), "live"] += made.stored - made.was[1]

    def make_manifests(self):
        self.digests = {}
        for number, ((run, _), m) in enumerate(sorted(self.manifests.items())):
            own = 0
            for i, name, row in self.sizes(m["packs"]):
                if name.endswith("-meta"):      # small blobs are in it, too
                    row[i, "live"] = sum(o.stored for o in self.packs[name].objects)
                else:
                    row[i, "live"] += sum(part.tree.packs_more.get(name, 0) for part in m.table("ranks").targets)
                own += row[i, "size"] if name.startswith(m["attempt"].decode() + "-") else 0
            m["new_bytes"], m.new = own, own
            m.held = sum(part.tree.held_more for part in m.table("ranks").targets)
            m["bytes"] += m.held
            self.sort_layouts(m)
            self.structure(f"manifest {number}", m)
            body = m.encode()
            self.digests[id(m)] = tree(body)
            self.put(f"runs/{run}/manifests/{tree(body).hex()}", 3, body)

    @staticmethod
    def sort_layouts(m):
        table = m.table("layouts")
        table.settle()
        order = sorted(range(len(table.rows)), key=lambda i: table[i, "digest"])
        table.rows, table.targets = [table.rows[i] for i in order], [table.targets[i] for i in order]
        for i in range(len(m.table("ranks").rows)):
            m.table("ranks")[i, "layout"] = order.index(m.table("ranks")[i, "layout"])
        for header in m["headers"]:
            header["layout"] = order.index(header["layout"])

    def make_list(self, run, entries):
        names = {id(e): f"{'snapshot' if e.body['snapshot'] else 'entry'} {run}/{i}" for i, e in enumerate(entries)}
        self.structure(f"list {run}", List(entries))
        digests = [bytes(32)]
        for number, e in enumerate(entries):
            if e.body["version"] > 1:
                e.body["number"], e.body["before"] = number, digests[-1]
            self.settle_entry(e)
            start = self.goes_on(e.body, digests)
            self.structure(names.get(id(e), ""), e.body)
            self.goes_on(e.body, digests, start)
            body = e.body.encode()
            self.put(f"runs/{run}/{number:012d}", 2, body, True)
            digests.append(sha(body))

    @staticmethod
    def goes_on(body, digests, known=0):
        """The digest of the snapshot that this one goes on from, if that is another one than is known."""
        snapshot = body["snapshot"]
        start = snapshot["from"] if isinstance(snapshot, Body) else 0
        if start != known and 0 < start < len(digests) - 1:
            snapshot["from_digest"] = digests[start + 1]
        return start

    def settle_entry(self, e):
        for i, m in enumerate(e.links):
            if m is None:
                continue
            if e.body["commit"]:
                e.body["commit"]["manifest"], e.body["commit"]["new_bytes"] = self.digests[id(m)], m.new
                e.body["commit"]["bytes"] += m.held
            else:
                live = e.body["snapshot"].table("live")
                live[i, "manifest"], live[i, "new_bytes"] = self.digests[id(m)], m.new
                live[i, "bytes"] += m.held

    def make_others(self):
        for name, (kind, body) in sorted(self.others.items()):
            if kind == 5 and hasattr(body["commit"], "links"):
                body["commit"]["manifest"] = self.digests[id(body["commit"].links)]
            if kind == 6 and hasattr(body, "layout_of"):
                body["layout"] = body.layout_of.layout.digest
                for _ in self.sizes(body["packs"]):
                    pass
            self.structure(f"{KINDS[kind][0]} {name}", body)
            self.put(name, kind, body.encode())

    def put(self, name, kind, body, double=False):
        head = struct.pack("<8sHHI", b"VCKPTREC", 1, kind, len(body))
        data = head + sha(head, bytes(16) if kind == 1 else self.id, body) + body
        self.write(name, reader.Store.double(data[:48], body) if double else data)

    def write(self, name, data):
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# ---- stores to begin with ----

def tensors_file(path, tensors):
    """A .safetensors of {name: (dtype, shape, bytes)}."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def make(vckpt, folder):
    """Three stores, made by the program `vckpt`: `wide`, steps that share pieces of a large tensor, one under
    another component; `many`, a step of 2,000 small tensors, whose part has several chunks; `named`, steps whose
    tensors are in parts and in folders, so that headers say under which names."""
    rng, file = random.Random(1), folder / "model.safetensors"

    def run(*words):
        subprocess.run([vckpt, *map(str, words)], check=True, stdout=subprocess.DEVNULL)

    def normal(count):
        return b"".join(struct.pack("<f", rng.gauss(0, .02))[2:] for _ in range(count))
    large = bytearray(rng.randbytes(300 * 1000 * 4))
    tensors = {"large": ("F32", [300, 1000], large), "bf16": ("BF16", [64, 500], normal(32000)),
               "small": ("U8", [60], bytes(60))}
    for store in ("wide", "many", "named"):
        run("init", folder / store, "--no-reserve")
    for step in range(3):
        large[0:8] = struct.pack("<Q", step)
        tensors["small"] = "U8", [60], bytes([step]) * 60
        tensors_file(file, tensors)
        run("import", folder / "wide", f"r/{step}", file, "-q", "--set", f"loss={step}")
    run("import", folder / "wide", "r/3", "--component", "optimizer", file, "-q", "--set", "note=\u00e4")
    tensors_file(file, {f"layer.{i:04}": ("U8", [8 + i % 90], rng.randbytes(8 + i % 90)) for i in range(2000)})
    run("import", folder / "many", "m/0", file, "-q", "--no-index")
    file.unlink()
    source = folder / "named.source"
    (source / "unet").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "unet/config.json").write_text("{}")
    for step in range(2):
        for name, part in (("a-00001-of-00002", "x"), ("a-00002-of-00002", "y"), ("unet/unet", "x"), ("lora.v1", "z")):
            tensors_file(source / f"{name}.safetensors", {part: ("F32", [60], rng.randbytes(240)),
                                                          part + "2": ("U8", [step + 1], bytes(step + 1))})
        run("import", folder / "named", f"n/{step}", source, "-q")
    shutil.rmtree(source)


def forge(source, out, seed, runs=None, share=None):
    """Writes a forged copy of the store; returns what is wrong with it, in words. Seed 0 lies about nothing. share: of
    the tables that are stored encoded; the seed chooses, if it is not given."""
    rng = random.Random(f"how many {seed}")
    lies = rng.choice([1, 1, 1, 2, 3]) if seed else 0
    if share is None:
        share = rng.choice([0, 0, .5, 1]) if seed else 0
    return Store(source, runs).build(out, seed, lies, share)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, help="must not exist")
    parser.add_argument("--seed", type=int, default=1, help="0: no lie")
    parser.add_argument("--runs", nargs="*", help="only these runs of the store")
    parser.add_argument("--show", action="store_true", help="say what the store lies about")
    parser.add_argument("--force", action="store_true", help="OUT may exist and is replaced")
    words = parser.parse_args()
    if words.force:
        shutil.rmtree(words.out, ignore_errors=True)
    told = forge(words.store, words.out, words.seed, words.runs)
    if words.show:
        print("\n".join(told))


if __name__ == "__main__":
    main()
