# SPDX-License-Identifier: Apache-2.0
"""Lies of a forged store (forge.py) that lie in bytes: how objects are encoded, what blobs hold, and the byte entries
of torch's distributed checkpoint (docs/dcp.md), of which some would run something if anybody unpickled them.

What a pickle here runs makes the file CANARY in the working folder, and nothing else. It must never appear."""
import copy
import ctypes
import functools
import io
import json
import os
import pickle
import pickletools
import struct
import zipfile

import numpy

from reader import BLOCK

CANARY = "vckpt-canary"
CODECS = [0x001, 0x101]                 # of what is stored here: no transform, planes of single bytes
WORDS = [0, 0x001, 0x101, 0x201, 0x301, 0x401, 2, 0x100, 0x501, 0xffff]
BLOCKS = [b"", b"\0", b"\xf0" + b"\xff" * 200, b"\x1fa\1\0" + b"\xff" * 60 + b"\0\x10a", b"\x10a\0\0", b"\x10a\xff\xff",
          b"\x1fa\1\0" + b"\xff" * 254, b"\xf0\0", b"\x0f\1\0\0"]        # LZ4: too long, from nowhere, without an end
ODD = [None, True, -1, 0, 3, 2**31, 2**63, 10**300, 1.5, "", "x", "\x1b[31m", "\ud800", "$tensor", "float32", "int64",
       "sparse_coo", "bits8", "__class__", "../../x", ".dcp/bytes.0", [], {}, [[]], [{}], {"a": 1}, {"$tuple": [1]},
       ["a"] * 50, [2**62] * 3, [0] * 17, [0, 2**40], ["a", 2**40], [-1], ["x"] * 101, [1, 2], [0, 0]]


# ---- how an object is stored ----

@functools.cache
def lz4():
    return ctypes.CDLL("liblz4.so.1")


def planes(data):
    """A block as the planes of its single bytes (docs/format/codec.md)."""
    words = len(data) // 8 * 8
    bits = numpy.unpackbits(numpy.frombuffer(data, "u1", words), bitorder="little").reshape(words, 8)
    return numpy.packbits(bits.T, axis=1, bitorder="little").tobytes() + data[words:]


def packed(data):
    out = ctypes.create_string_buffer(len(data) + len(data) // 255 + 16)
    size = lz4().LZ4_compress_default(data, out, len(data), len(out))
    return out.raw[:size]


def encoded(data, codec):
    """(stored bytes, the blocks' lengths), or None where they are not fewer."""
    out, lengths = [], []
    for at in range(0, len(data), BLOCK):
        block = data[at:at + BLOCK]
        made = packed(planes(block) if codec >> 8 else block)
        small = len(made) < len(block)
        out.append(made if small else block)
        lengths.append(len(made) if small else len(block) | 1 << 31)
    out = b"".join(out)
    return (out, lengths) if len(out) < len(data) else None


class Stored:
    """Stored bytes of objects and the lengths of their blocks. The checks fit whatever they are."""

    def __init__(self, objects):
        self.objects = objects

    def settle(self):
        pass

    def echo(self, said):
        pass

    def lie(self, rng, what, said):
        if not self.objects:
            return f"{what}: nothing, it is empty"
        o = rng.choice([o for o in self.objects if o.lengths] or self.objects)
        way = rng.choice(["bit", "block", "length", "lengths", "word", "raw", "end"])
        if way == "word":
            old, o.codec = o.codec, rng.choice(WORDS)
            return f"{what}.codec: {old:#x} -> {o.codec:#x}"
        if way == "raw":
            old, o.raw = o.raw, max(1, rng.choice([o.raw - 1, o.raw + 1, 2 * o.raw, o.raw + BLOCK, o.raw // 2]))
            return f"{what}.raw: {old} -> {o.raw}"
        if way == "end" or not o.lengths:
            o.data = o.data[:-1] if rng.random() < .5 and len(o.data) > 1 else o.data + b"\0" * rng.choice([1, 20000])
            old, o.stored = o.stored, len(o.data)
            return f"{what}.stored: {old} -> {o.stored} bytes"
        return self.lie_of_block(rng, what, way, o)

    @staticmethod
    def lie_of_block(rng, what, way, o):
        i = rng.randrange(len(o.lengths))
        at, size = sum(n & 0x7fffffff for n in o.lengths[:i]), o.lengths[i] & 0x7fffffff
        if way == "bit":
            j = at + rng.randrange(size or 1)
            o.data = o.data[:j] + bytes([o.data[j] ^ 1 << rng.randrange(8)]) + o.data[j + 1:] if j < len(o.data) else (
                o.data)
            return f"{what}: another bit in byte {j}, in block {i}"
        if way == "block":
            block = rng.choice(BLOCKS)
            o.data, o.lengths[i] = o.data[:at] + block + o.data[at + size:], len(block)
            o.stored = len(o.data)
            return f"{what}: block {i} is {block[:20]!r}"
        if way == "lengths" and len(o.lengths) > 1:
            j = rng.randrange(len(o.lengths))
            o.lengths[i], o.lengths[j] = o.lengths[j], o.lengths[i]
            return f"{what}: lengths of blocks {i} and {j} exchanged"
        old = o.lengths[i]
        o.lengths[i] = rng.choice([old ^ 1 << 31, old + 1, max(0, old - 1), 0, 0x7fffffff, 0xffffffff, 1 << 31, BLOCK,
                                   BLOCK | 1 << 31])
        return f"{what}.length of block {i}: {old:#x} -> {o.lengths[i]:#x}"


# ---- what blobs hold ----

class Bytes:
    """A blob's bytes. index: of a file of byte entries the Bytes of the document that says where each of them lies."""

    def __init__(self, made, name):
        self.made, self.name, self.data, self.index = made, name, made.whole(), None
        self.codec, self.old = made.codec, self.data

    def settle(self):
        pass

    def echo(self, said):
        pass

    def lie(self, rng, what, said):
        what = f"{what} ({self.name.decode('utf-8', 'replace')})"
        if self.index:
            try:
                return self.lie_of_entry(rng, what)
            except (ValueError, TypeError, AttributeError):
                pass                            # an index that lies already
        if self.name.endswith(b".json"):
            return f"{what}: {self.lie_of_document(rng)}"
        self.data = flipped(rng, self.data)
        return f"{what}: some bits are others"

    def lie_of_document(self, rng):
        try:
            document = json.loads(self.data)
        except ValueError:
            document = None
        if document is None or rng.random() < .1:
            self.data = flipped(rng, self.data) if rng.random() < .5 else self.data[:rng.randrange(len(self.data)) + 1]
            return "text that is no JSON"
        made, told = lie_of_json(rng, document)
        self.data = json.dumps(made, indent=1).encode()
        return told

    def lie_of_entry(self, rng, what):
        """The document's places follow."""
        places = json.loads(self.index.data)
        keys = sorted(places, key=lambda k: places[k])
        entries = {k: self.data[places[k][0]:sum(places[k])] for k in keys}
        key = rng.choice(keys)
        entries[key], told = lie_of_entry(rng, entries[key], [e for k, e in entries.items() if k != key])
        at, self.data = 0, b"".join(entries.values())
        for k in keys:
            places[k], at = [at, len(entries[k])], at + len(entries[k])
        self.index.data = json.dumps(places, indent=1).encode()
        return f"{what}[{key!r}]: {told}"

    def done(self):
        """The object has what it holds now, in as many bytes as that takes."""
        if self.data != self.old:
            self.data = self.data or b"\0"
            self.made.store(self.data, self.codec & 0x1ff if self.codec else 0)


def flipped(rng, data):
    out = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def places_in(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, part in items:
        yield from places_in(part, (*path, key))


def at_place(node, path):
    for part in path:
        node = node[part]
    return node


def lie_of_json(rng, document):
    """(another document, in words)"""
    made, places = copy.deepcopy(document), list(places_in(document))
    path = rng.choice(places[1:] or places)
    where = "/".join(map(str, path))
    if not path:
        return rng.choice(ODD), "it is something else"
    parent, old = at_place(made, path[:-1]), at_place(document, path)
    way = rng.choice(["odd", "odd", "near", "near", "drop", "name", "other"])
    if way == "near" and type(old) is int:
        parent[path[-1]] = rng.choice([0, 1, old + 1, old - 1, 2 * old, old + 8, 1 << 31, 1 << 40, 1 << 62])
    elif way == "drop":
        del parent[path[-1]]
        return made, f"{where}: left out"
    elif way == "name" and isinstance(parent, dict):
        name = rng.choice([*map(str, parent), *[w for w in ODD if isinstance(w, str)], path[-1] + "x"])
        parent[name] = parent.pop(path[-1])
        return made, f"{where}: is named {name!r}"
    elif way == "other":
        parent[path[-1]] = copy.deepcopy(at_place(document, rng.choice(places)))
    else:
        parent[path[-1]] = rng.choice(ODD)
    return made, f"{where}: {old!r:.60} -> {parent[path[-1]]!r:.60}"


# ---- byte entries: archives of torch.save, and pickles ----

class Trap:
    """Pickled as a call, which makes the canary."""

    def __init__(self, function, *args):
        self.called = function, args

    def __reduce__(self):
        return self.called


TOUCH = f"open({CANARY!r}, 'w')"


def traps():
    yield lambda: Trap(open, CANARY, "w")
    yield lambda: Trap(os.system, f"echo > {CANARY}")
    yield lambda: Trap(eval, TOUCH)
    yield lambda: Trap(exec, TOUCH)
    yield lambda: Trap(os.mkdir, CANARY)
    yield lambda: Trap(pickle.loads, pickle.dumps(Trap(open, CANARY, "w")))
    yield lambda: Trap(functools.reduce, eval, [TOUCH, {}])
    yield lambda: Trap(map, eval, [TOUCH])
    yield lambda: Trap(functools.partial, open, CANARY, "w")


NESTED = [lambda t: t, lambda t: [1, t], lambda t: {"step": t, "lr": .1}, lambda t: (t,), lambda t: [{"a": [(t,)]}],
          lambda t: {"exp_avg": [0.5, 1], "state": (1, t)}]
STREAMS = [f"c{m}\n{n}\n".encode() + b"(X" + struct.pack("<I", len(a)) + a.encode() + end
           for m, n, a in [("os", "system", f"echo > {CANARY}"), ("builtins", "eval", TOUCH), ("os", "mkdir", CANARY),
                           ("posix", "mkdir", CANARY), ("__builtin__", "eval", TOUCH)]
           for end in (b"tR", b"t\x81", b"tb", b"tR0", b"t\x92")]
STREAMS += [b"(X" + struct.pack("<I", len(TOUCH)) + TOUCH.encode() + b"ibuiltins\neval\n",
            b"(cbuiltins\neval\nX" + struct.pack("<I", len(TOUCH)) + TOUCH.encode() + b"o", b"\x82\1", b"Pmodel\n",
            b"\x97", b"\x98", b"2", b"0", b"1", b"(", b"t", b"R", b"b", b"s", b"u", b"e", b"a", b"\x81", b"\x90", b"Q"]
NAMES = [(b"os", b"system"), (b"builtins", b"eval"), (b"builtins", b"getattr"), (b"builtins", b"open"),
         (b"io", b"open"), (b"collections", b"OrderedDict"), (b"collections", b"defaultdict"),
         (b"torch._utils", b"_rebuild_parameter"), (b"torch._utils", b"_rebuild_tensor_v2"),
         (b"torch", b"FloatStorage"), (b"torch", b"device"), (b"torch.storage", b"_load_from_bytes"),
         (b"torch", b"load"), (b"numpy._core.multiarray", b"_reconstruct"), (b"numpy", b"dtype"),
         (b"numpy", b"ndarray"), (b"_codecs", b"encode"), (b"copyreg", b"_reconstructor"), (b"vckpt.dcp", b"_received"),
         (b"torch", b"Size"), (b"builtins", b"bytearray"), (b"builtins", b"set")]
EMPTY, STOP = b"\x80\2", b"."


def trap(rng):
    return pickle.dumps(rng.choice(NESTED)(rng.choice(list(traps()))()), rng.choice([2, 3, 4, 5]))


def members_of(data):
    """[[name, bytes]] of an archive; None: it is none."""
    if not data.startswith(b"PK"):
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            return [[info.filename, found.read(info)] for info in found.infolist()]
    except Exception:                           # of several lies one may have broken it
        return None


def archive(members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as made:
        for name, data in members:
            made.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def lie_of_entry(rng, data, others):
    """(other bytes, in words)"""
    way, members = rng.random(), members_of(data)
    if way < .1:
        return flipped(rng, data), "some bits are others"
    if way < .15 and others:
        return rng.choice(others), "the bytes of another entry"
    if way < .2:
        return data[:rng.randrange(len(data)) + 1], "cut short"
    if members is None:
        made, told = lie_of_pickle(rng, data)
        return made, told
    if way < .35:
        return lie_of_archive(rng, members)
    head = next((m for m in members if m[0].endswith("/data.pkl")), None)
    if head is None:
        return flipped(rng, data), "some bits are others"
    head[1], told = lie_of_pickle(rng, head[1])
    return archive(members), told


def lie_of_archive(rng, members):
    """A member has another name, other bytes or another length, stands twice, or is gone."""
    i, j = rng.randrange(len(members)), rng.randrange(len(members))
    way = rng.choice(["drop", "twice", "exchange", "cut", "more", "name"])
    name = members[i][0]
    if way == "drop":
        del members[i]
    elif way == "twice":
        members.append([name, members[j][1]])
    elif way == "exchange":
        members[i][1], members[j][1] = members[j][1], members[i][1]
    elif way == "name":
        members[i][0] = rng.choice([members[j][0], f"../../{CANARY}", "/x", "data.pkl", f"{name}x", "a/b/data.pkl"])
    else:
        members[i][1] = members[i][1][:-1] if way == "cut" else members[i][1] + bytes(8)
    return archive(members), f"archive: {way} of {name} (and {members[min(j, len(members) - 1)][0] if members else ''})"


def lie_of_pickle(rng, data):
    way = rng.random()
    if way < .25:
        return trap(rng), "a pickle that runs something"
    try:
        steps = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    except ValueError:
        return flipped(rng, data), "some bits of the pickle are others"
    ops = [data[a:b] for a, b in zip(steps, steps[1:])]
    i = rng.randrange(1, len(ops)) if len(ops) > 1 else 0
    if way < .5:
        stream = rng.choice(STREAMS)
        ops.insert(i, stream)
        told = f"{stream[:40]!r} before operation {i}"
    elif way < .65:
        told = named(rng, ops)
    else:
        told = lie_of_operation(rng, ops, i)
    return b"".join(op for op in ops if op[:1] != b"\x95"), f"pickle: {told}"       # frames would tell a length


def named(rng, ops):
    """What the pickle names is another thing."""
    at = [i for i, op in enumerate(ops) if op[:1] in b"c\x8c"]
    if not at:
        ops.insert(1, b"c" + b"\n".join(NAMES[0]) + b"\n")
        return "a name at its beginning"
    i, (module, name) = rng.choice(at), rng.choice(NAMES)
    old = ops[i]
    if old[:1] == b"c":
        ops[i] = b"c" + module + b"\n" + name + b"\n"
    else:
        text = rng.choice([module, name])
        ops[i] = b"\x8c" + bytes([len(text)]) + text
    return f"{old[:60]!r} -> {ops[i]!r}"


def lie_of_operation(rng, ops, i):
    j, old = rng.randrange(len(ops)), ops[i]
    way = rng.choice(["drop", "twice", "exchange", "number", "number", "many"])
    if way == "drop":
        del ops[i]
    elif way == "twice":
        ops.insert(i, old)
    elif way == "many":
        ops[i:i + 1] = [old] * rng.choice([10, 1000, 30000])
    elif way == "exchange":
        ops[i], ops[j] = ops[j], ops[i]
    else:
        numbers = [k for k, op in enumerate(ops) if op[:1] in b"KMJ"]
        if numbers:
            i = rng.choice(numbers)
            old, n = ops[i], rng.choice([0, 1, -1, 2, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 20])
            ops[i] = b"J" + struct.pack("<i", n)
            return f"operation {i}: {old!r} -> {n}"
        ops[i] = flipped(rng, old)
    return f"{way} of operation {i}, {old[:40]!r}"
