# SPDX-License-Identifier: Apache-2.0
"""Records, layouts, parts and manifests through ctypes: mirrors of proto/message.h and core/step/{layout,part}.h,
core/commit/check/cover.h, and a small protobuf writer of its own, so that bodies can be made that the library never
makes."""
import ctypes as c
import errno
import hashlib
import struct

from storelow import Buf, Digest, Error, Ref

NONE = 2**64 - 1
EFORMAT, EVERSION = -errno.EPROTO, -errno.EPROTONOSUPPORT
LAUNCH, COMMIT, ABORT, REMOVE, SNAPSHOT, ACCEPT, COLLECTED, FACTS = 1, 2, 3, 4, 5, 6, 7, 8
VERSION = 2
BLOB, LAYOUT, PART, CHUNK, HEADER = 2, 3, 4, 5, 6
INLINE = 2**32 - 1
ATTEMPT = b"0123456789abcdef-7"
u8, u16, u32, u64, i64, text, ptr = c.c_uint8, c.c_uint16, c.c_uint32, c.c_uint64, c.c_int64, c.c_char_p, c.c_void_p
P = c.POINTER


def structure(class_, /, **fields):
    """The members of a `grid` are members of the structure, too."""
    return type(class_, (c.Structure,), {"_anonymous_": [n for n in fields if fields[n] is Params],
                                         "_fields_": list(fields.items())})


class Params(c.Structure):
    _fields_ = [("min_bytes", u64), ("target_bytes", u64), ("row_bytes", u64), ("small_bytes", u64)]


def digest(byte):
    return Digest((u8 * 32)(*([byte % 256, byte // 256 % 256] + [7] * 30)))


Attribute = structure("Attribute", key=text, value=text)
Info = structure("Info", version=u32, id=u8 * 16, seed=u64, grid=Params, reserve_bytes=u64, list_2=c.c_bool,
                 list_3=c.c_bool, list_4=c.c_bool, arena=ptr)
StepFacts = structure("StepFacts", entry=u64, pinned=c.c_bool, reason=text, pinned_ns=i64, pinned_by=text, tags=P(text),
                      ntags=c.c_size_t, attributes=P(Attribute), nattributes=c.c_size_t)
Policy = structure("Policy", rules=P(text), nrules=c.c_size_t, time_ns=i64, host=text)
Facts = structure("Facts", there=c.c_bool, steps=P(StepFacts), nsteps=c.c_size_t, policed=c.c_bool, policy=Policy)
Commit = structure("Commit", step=u64, attempt=text, time_ns=i64, replaces=u64, manifest=Digest, tensors=u64, bytes=u64,
                   new_bytes=u64,
                   attributes=P(Attribute), nattributes=c.c_size_t, extra=ptr, extra_len=c.c_size_t,
                   facts=P(StepFacts))
Live = structure("Live", entry=u64, commit=Commit)
Entry = structure("Entry", kind=c.c_int, version=u32, time_ns=i64, host=text, run=text, number=u64, before=Digest,
                  self=Digest, commit=Commit,
                  launch=text, newest_step=u64, nonce=u8 * 16, list_2=c.c_bool, from_=u64, nth=u64, ids=ptr,
                  nids=c.c_size_t, attempt=text, reason=text, rank=u32, removes=u64, live=P(Live), nlive=c.c_size_t,
                  from_digest=Digest, gone=P(u64), ngone=c.c_size_t, older=u64, newest_launch=u64, accepts=P(u64),
                  naccepts=c.c_size_t, facts=Facts, arena=ptr)
ProtoRef = structure("ProtoRef", digest=Digest, offset=u64, checks=u64, raw_len=u64, stored_len=u64, pack=u32,
                     codec=u16, kind=u8)
LayoutTensor = structure("LayoutTensor", component=u32, name_offset=u32, name_len=u32, first_dim=u32, dtype=u8, ndim=u8,
                         flags=u16, mesh=u32,
                         placement=u32, reserved=u32)
Mesh = structure("Mesh", dim_names=P(text), dim_sizes=P(u32), ndims=u32, ranks=P(u32), nranks=u32)
ProtoLayout = structure("ProtoLayout", grid=Params, components=P(text),
                        ncomponents=u32,
                        tensors=P(LayoutTensor), ntensors=u32, names=ptr, names_len=u64, dims=P(u64), ndims=u64,
                        meshes=P(Mesh), nmeshes=u32,
                        placements=P(text), nplacements=u32, arena=ptr)
Chunk = structure("Chunk", first_tensor=u32, last_tensor=u32, nrows=u32, ref=ProtoRef)
Blob = structure("Blob", name=text, per_rank=c.c_bool, len=u64, ref=ProtoRef)
PackUse = structure("PackUse", pack=text, size=u64, live_bytes=u64)
Timing = structure("Timing", phase=text, ns=u64, bytes=u64, start_ns=u64, end_ns=u64)
Sample = structure("Sample", tensor=u32, group=u8 * 16, hash=u8 * 16)
Replica = structure("Replica", group=u8 * 16, digest=u8 * 16)
Part = structure("Part", rank=u32, world=u32, host=text, layout=Digest, packs=P(PackUse), npacks=u32, chunks=P(Chunk),
                 nchunks=u32,
                 blobs=P(Blob), nblobs=u32, timings=P(Timing), ntimings=u32, samples=P(Sample), nsamples=u32,
                 arena=ptr)
Common = structure("Common", group=text, digest=Digest, names=P(text), digests=text, nnames=u32)
ViewHeader = structure("ViewHeader", component=text, view=text, ref=ProtoRef, data_bytes=u64, layout=u32)
Announcement = structure("Announcement", run=text, attempt=text, step=u64, rank=u32, world=u32, host=text,
                         layout=Digest,
                         stores_layout=c.c_bool, layout_ref=ProtoRef, headers=P(ViewHeader), nheaders=u32,
                         part=ProtoRef, packs=P(PackUse),
                         npacks=u32, tensors=u64, bytes=u64, new_bytes=u64, attributes=P(Attribute),
                         nattributes=c.c_size_t,
                         replicas=P(Replica), nreplicas=u32, commons=P(Common), ncommons=u32, arena=ptr)
ManifestLayout = structure("ManifestLayout", digest=Digest, ref=ProtoRef)
ManifestRank = structure("ManifestRank", rank=u32, layout=u32, host=u32, first_map=u32, npacks=u32, part=ProtoRef)
RankRange = structure("RankRange", first=u32, n=u32)
BlobName = structure("BlobName", name=text, per_rank=c.c_bool, ranges=P(RankRange), nranges=u32)
Manifest = structure("Manifest", run=text, attempt=text, step=u64, world=u32, attributes=P(Attribute),
                     nattributes=c.c_size_t,
                     layouts=P(ManifestLayout), nlayouts=u32, headers=P(ViewHeader), nheaders=u32, hosts=P(text),
                     nhosts=u32,
                     ranks=P(ManifestRank), nranks=u32, map=P(u32), nmap=u32, packs=P(PackUse), npacks=u32, tensors=u64,
                     bytes=u64, new_bytes=u64, names_blobs=c.c_bool, blobs=P(BlobName), nblobs=u32,
                     thinned=P(c.c_char_p), nthinned=u32, arena=ptr)
Base = structure("Base", run=text, entry=u64, manifest=Digest)
BaseRecord = structure("BaseRecord", base=Base, arena=ptr)
Begin = structure("Begin", run=text, attempt=text, step=u64, world=u32, alone=c.c_bool, position=u64, mesh=Digest,
                  bases=P(Base), nbases=u32,
                  replace=c.c_bool, replaces=u64, rank=u32, host=text, time_ns=i64, commons=P(Common), ncommons=u32,
                  arena=ptr)
Alive = structure("Alive", rank=u32, pid=u64, start_time=u64)
Heartbeat = structure("Heartbeat", launch=text, host=text, run=text, boot_id=text, number=u64, time_ns=i64,
                      ranks=P(Alive), nranks=u32,
                      nonce=u8 * 16, period_ms=u32, arena=ptr)
Trash = structure("Trash", name=text, time_ns=i64, heartbeats=P(text), nheartbeats=u32, arena=ptr)
Stats = structure("Stats", run=text, attempt=text, step=u64, rank=u32, world=u32, host=text, timings=P(Timing),
                  ntimings=u32, submitted_ns=u64,
                  staged_ns=u64, committed_ns=u64, bytes_held=u64, bytes_staged=u64, bytes_unchanged=u64,
                  bytes_deduplicated=u64,
                  bytes_encoded=u64, bytes_written=u64, pieces=u64, pieces_new=u64, plan_cached=u32, ring_waits=u64,
                  entry=u64, version=u32,
                  arena=ptr)
Range = structure("Range", offset=u64, len=u64)
Damage = structure("Damage", pack=text, ranges=P(Range), nranges=u32, arena=ptr)
RECORDS = {"store": Info, "entry": Entry, "layout": ProtoLayout, "part": Part, "announcement": Announcement,
           "manifest": Manifest,
           "begin": Begin, "base": BaseRecord, "heartbeat": Heartbeat, "trash": Trash, "stats": Stats, "damage": Damage}

Shape = structure("Shape", ndim=u32, dim=u64 * 16)
Box = structure("Box", offset=u64 * 16, size=u64 * 16)
Grid = structure("Grid", shape=Shape, item_bytes=c.c_uint, params=Params, edge=u64 * 16, k=c.c_uint, only_k=c.c_bool)
PieceIter = structure("PieceIter", grid=P(Grid), box=Box, piece=Box, done=c.c_bool, number=u64)
StoreLayout = structure("StoreLayout", m=ProtoLayout, digest=Digest)
Piece = structure("Piece", ref=Ref, xxh=u8 * 16, inline_bytes=P(u8), base=u32)
Row = structure("Row", tensor=u32, boxes=P(Box), nboxes=u32, whole=c.c_bool, pieces=P(Piece), npieces=u64,
                digest=Digest, memory=ptr)
CoverBox = structure("CoverBox", pairs=P(u64), rank=u32, digest=Digest)
DEFAULT = Params(128 << 10, 1 << 20, 512)


def table(kind, values):
    """An array that stays alive with the structure that it is put into."""
    return (kind * len(values))(*values) if values else None


class Proto:
    """encode(name, struct) -> bytes; decode(name, bytes) -> struct (release it), or a negative number."""

    def __init__(self, lib):
        self.lib = lib = c.CDLL(lib._name)  # a handle of its own: prototypes belong to the handle
        for name in ("proto_run_valid", "proto_component_valid", "proto_attribute_key_valid"):
            getattr(lib, name).restype = c.c_bool
        lib.store_layout_builder_new.restype = lib.store_part_builder_new.restype = ptr
        lib.store_layout_builder_new.argtypes = [Params]
        lib.store_layout_find.restype = lib.store_chunk_find.restype = i64
        lib.store_chunk_rows.restype = u32
        lib.tensor_piece_count.restype = lib.tensor_box_items.restype = u64

    def encode(self, name, m):
        b = Buf()
        r = getattr(self.lib, f"proto_{name}_encode")(c.byref(m), c.byref(b))
        data = c.string_at(b.data, b.len) if b.len else b""
        self.lib.base_buf_release(c.byref(b))
        return r if r < 0 else data

    def decode(self, name, data):
        m = RECORDS[name]()
        r = getattr(self.lib, f"proto_{name}_decode")(data, c.c_size_t(len(data)), c.byref(m))
        return r if r < 0 else m

    def release(self, name, m):
        getattr(self.lib, f"proto_{name}_release")(c.byref(m))

    def again(self, name, data):
        """Decodes and encodes; a negative number if it does not decode."""
        m = self.decode(name, data)
        if isinstance(m, int):
            return m
        out = self.encode(name, m)
        self.release(name, m)
        return out


# ---- protobuf by hand ----

def varint(n):
    out = b""
    while n >= 0x80:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def field(number, value):
    """An integer as a varint, bytes as a length-delimited field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def parse(data):
    """[(number, wire type, value)] of one level."""
    at, out = 0, []

    def take():
        nonlocal at
        n = shift = 0
        while True:
            byte = data[at]
            at += 1
            n |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return n
    while at < len(data):
        tag = take()
        kind = tag & 7
        if kind == 0:
            value = take()
        else:
            size = {1: 8, 5: 4}.get(kind) or take()
            value = data[at:at + size]
            at += size
        out.append((tag >> 3, kind, value))
    return out


def unparse(fields):
    out = b""
    for number, kind, value in fields:
        out += varint(number << 3 | kind) + (varint(value) if kind == 0
                                             else (varint(len(value)) if kind == 2 else b"") + value)
    return out


# ---- samples, one of each record ----

def ref(kind, pack=0, offset=4096, raw=1000, mark=1):
    return ProtoRef(digest=digest(mark), offset=offset, checks=offset + (raw + 7) // 8 * 8, raw_len=raw, stored_len=raw,
                    pack=pack, codec=0, kind=kind)


def attributes(**values):
    return table(Attribute, [Attribute(k.encode(), v.encode()) for k, v in sorted(values.items())]), len(values)


def commit(step=5, attempt=ATTEMPT, replaces=NONE, mark=1, **values):
    a, n = attributes(**values)
    return Commit(step=step, attempt=attempt, time_ns=-3, replaces=replaces, manifest=digest(mark), tensors=7,
                  bytes=1 << 40, new_bytes=9,
                  attributes=a, nattributes=n)


def entry(kind, **more):
    e = Entry(kind=kind, time_ns=1_700_000_000_000_000_000, host=b"node-1", run=b"run-1", number=11,
              before=digest(kind))
    if kind == LAUNCH:
        e.nonce = id16(kind)
        e.launch, e.newest_step = b"0123456789abcdef", more.pop("newest_step", NONE)
    if kind == COMMIT:
        e.commit = more.pop("commit", None) or commit(loss="2.31", note="a\u00e4")
    if kind == ABORT:
        e.attempt, e.reason, e.rank = ATTEMPT, "no space: \u20ac".encode(), 3
    if kind == REMOVE:
        e.removes = 0
    if kind == SNAPSHOT:
        live = more.pop("live", None) or [Live(2, commit(3, loss="1")),
                                          Live(7, commit(4, b"ffffffffffffffff-18446744073709551615", 2)),
                                          Live(9, commit(8))]
        e.live, e.nlive = table(Live, live), len(live)
    if kind == ACCEPT:
        numbers = more.pop("numbers", (0, 7, 10))
        e.accepts, e.naccepts = table(u64, numbers), len(numbers)
    for k, v in more.items():
        setattr(e, k, v)
    return e


def going_on(kind, **more):
    """A launch entry or a snapshot with the word list-2, that goes on from another."""
    if kind == LAUNCH:
        ids = more.pop("ids", (b"ffffffffffffffff",))
        rows = table(c.c_char * 17, [(c.c_char * 17)(*i) for i in ids])
        more = {"nth": 6, "from_": 4, "ids": c.cast(rows, ptr), "nids": len(ids), **more}
    else:
        gone = more.pop("gone", (2, 7))
        more = {"number": 192, "live": [Live(129, commit(3, loss="1")), Live(150, commit(8))], "from_": 128,
                "from_digest": digest(9), "gone": table(u64, gone), "ngone": len(gone), "older": 9,
                "newest_launch": 130, **more}
    return entry(kind, list_2=True, **more)


def step_facts(entry=NONE, tags=(), pinned=False, reason=None, ns=0, by=None, **values):
    a, n = attributes(**values)
    return StepFacts(entry=entry, pinned=pinned, reason=reason, pinned_ns=ns, pinned_by=by, tags=table(text, tags),
                     ntags=len(tags), attributes=a, nattributes=n)


def facts(*steps, rules=None):
    policy = Policy(table(text, rules), len(rules), 5, b"node-2") if rules is not None else Policy()
    return Facts(there=True, steps=table(StepFacts, steps), nsteps=len(steps), policed=rules is not None, policy=policy)


def facts_entries():
    """With the word list-4: of kind 8, a commit and snapshots."""
    some = (step_facts(2, [b"best", b"x.1"], True, b"paper", 7, b"node-9", loss="2", note="\u00fc"), step_facts(5))
    one = commit(loss="1")
    one.facts = c.pointer(step_facts(tags=[b"best"], pinned=True))
    return [entry(FACTS, facts=facts(*some)), entry(FACTS, facts=facts(rules=[b"keep-last=3", b"keep-best=2:loss"])),
            entry(FACTS, facts=facts(rules=[])), entry(FACTS, facts=facts(*some, rules=[b"keep-last=1"])),
            entry(COMMIT, commit=one), going_on(SNAPSHOT, facts=facts(step_facts(129, note="later"), rules=[b"x"])),
            entry(REMOVE, reason=b"pruned: keep-last=3")]


def sample_layout():
    names = [b"a.bias", b"a.weight", b"b/..", "\u00fc".encode(), b"step"]
    shapes = [(8,), (8, 4), (0, 5), (2, 3, 4), ()]
    component = [0, 0, 0, 0, 1]
    tensors, at, dim = [], 0, 0
    for n, s, k in zip(names, shapes, component):
        tensors.append(LayoutTensor(k, at, len(n), dim, 12, len(s), 0, 1 if k == 0 else 0, 1 if k == 0 else 0))
        at, dim = at + len(n), dim + len(s)
    joined = b"".join(names)
    dims = [d for s in shapes for d in s]
    mesh = Mesh(table(text, [b"dp", b"tp"]), table(u32, [2, 2]), 2, table(u32, [0, 1, 2, 3]), 4)
    m = ProtoLayout(min_bytes=128 << 10, target_bytes=1 << 20, row_bytes=256, small_bytes=32 << 10,
                    components=table(text, [b"model", b"optimizer"]), ncomponents=2,
                    tensors=table(LayoutTensor, tensors), ntensors=5,
                    names=c.cast(c.create_string_buffer(joined, len(joined)), ptr),
                    names_len=len(joined), dims=table(u64, dims), ndims=len(dims), meshes=table(Mesh, [mesh]),
                    nmeshes=1,
                    placements=table(text, [b"R,S(0)"]), nplacements=1)
    return m


def packs(*names, size=1 << 20):
    return table(PackUse, [PackUse(n, size, 4096 + i) for i, n in enumerate(names)]), len(names)


def sample_part():
    p, n = packs(ATTEMPT + b"-0-model", ATTEMPT + b"-0-meta", b"ffffffffffffffff-0-0-model")
    p[1].size = 0
    chunks = [Chunk(0, 3, 2, ref(CHUNK, 1, 8192)), Chunk(4, 4, 1, ref(CHUNK, 1, 16384))]
    blobs = [Blob(b"config.json", False, 1000, ref(BLOB)), Blob(b"empty", False, 0, ProtoRef(digest=digest(3))),
             Blob(b"rng", True, 64, ref(BLOB, 2, raw=64))]
    return Part(rank=0, world=2, host=b"h", layout=digest(9), packs=p, npacks=n, chunks=table(Chunk, chunks), nchunks=2,
                blobs=table(Blob, blobs), nblobs=3, timings=table(Timing, [Timing(b"read", 5, 6)]), ntimings=1)


def id16(byte):
    return (u8 * 16)(byte, *([5] * 15))


def sample_part_compared():
    """With times of day, and samples of what replicas hold."""
    m = sample_part()
    m.timings = table(Timing, [Timing(b"copy", 5, 6, 1_700_000_000_000_000_000, 1_700_000_000_000_000_009),
                               Timing(b"digest", 7, 8)])
    m.ntimings = 2
    m.samples = table(Sample, [Sample(0, id16(1), id16(9)), Sample(0, id16(2), id16(9)), Sample(3, id16(1), id16(8))])
    m.nsamples = 3
    return m


def sample_stats(rank=1, **more):
    at = 1_700_000_000_000_000_000
    m = Stats(run=b"run-1", attempt=ATTEMPT, step=12, rank=rank, world=4, host=b"host-0",
              timings=table(Timing, [Timing(b"plan", 1, 0), Timing(b"copy", 2, 3, at, at + 5)]), ntimings=2,
              submitted_ns=at, staged_ns=at + 5,
              committed_ns=at + 70, bytes_held=1000, bytes_staged=500, bytes_unchanged=200, bytes_deduplicated=100,
              bytes_encoded=150, bytes_written=120,
              pieces=4, pieces_new=2, plan_cached=2, ring_waits=2**63, entry=9, version=VERSION)
    for k, v in more.items():
        setattr(m, k, v)
    return m


def sample_announcement(rank=0, world=2, stores=True, layout=9, **more):
    p, n = packs(*sorted([ATTEMPT + b"-%d-model" % rank, ATTEMPT + b"-%d-meta" % rank, b"ffffffffffffffff-0-0-model"]))
    meta = [i for i in range(n) if p[i].pack.endswith(b"meta")][0]
    a, na = attributes(loss="2.31")
    m = Announcement(run=b"run-1", attempt=ATTEMPT, step=12, rank=rank, world=world, host=b"host-%d" % (rank // 8),
                     layout=digest(layout),
                     stores_layout=stores, part=ref(PART, meta, 65536, mark=rank + 100), packs=p, npacks=n, tensors=5,
                     bytes=1000, new_bytes=10,
                     attributes=a, nattributes=na)
    if stores:
        m.layout_ref = ref(LAYOUT, meta, mark=layout)
        m.headers = table(ViewHeader, [ViewHeader(b"model", b"safetensors", ref(HEADER, meta, 32768, mark=55), 12345)])
        m.nheaders = 1
    for k, v in more.items():
        setattr(m, k, v)
    return m


def manifest_make(lib, announcements):
    """(0, body, digest) or (code, sentence, None)."""
    b, d, e = Buf(), Digest(), Error()
    array = (P(Announcement) * len(announcements))(*[c.pointer(a) for a in announcements])
    r = lib.store_manifest_make(array, u32(len(announcements)), c.byref(b), c.byref(d), c.byref(e))
    data = c.string_at(b.data, b.len) if b.len else b""
    lib.base_buf_release(c.byref(b))
    return (r, e.text.decode(), None) if r < 0 else (0, data, bytes(d.bytes))


def commons():
    """Of one group the values by name, of the other none."""
    return table(Common, [Common(b"a", digest(5), table(text, [b"x", b"y"]), b"0123456789abcdef" * 2, 2),
                          Common(b"b", digest(6), None, None, 0)])


def samples(proto):
    """name -> [bodies]"""
    hb = Heartbeat(launch=b"0123456789abcdef", host=b"h", run=b"r", boot_id=b"01234567-89ab-cdef-0123-456789abcdef",
                   number=9, time_ns=-1,
                   ranks=table(Alive, [Alive(0, 1, 2), Alive(5, 6, 7)]), nranks=2, nonce=id16(8))
    slow = Heartbeat(launch=b"0123456789abcdef", host=b"h", run=b"r", number=2**64 - 1, period_ms=600000)
    begin = Begin(run=b"r", attempt=ATTEMPT, step=2**63 - 1, world=1, alone=True, position=4, mesh=digest(1),
                  bases=table(Base, [Base(b"other", 0, digest(2))]), nbases=1)
    out = {
        "store": [Info(version=VERSION, id=(u8 * 16)(*range(16)), seed=2**63 + 5, min_bytes=131072,
                       target_bytes=1 << 20, row_bytes=256, small_bytes=32 << 10, reserve_bytes=0, list_2=True)],
        "entry": [*(entry(k) for k in (LAUNCH, COMMIT, ABORT, REMOVE, SNAPSHOT, ACCEPT)),
                  going_on(LAUNCH), going_on(SNAPSHOT), *facts_entries()],
        "layout": [sample_layout()], "part": [sample_part(), sample_part_compared()],
        "announcement": [sample_announcement(0), sample_announcement(1, stores=False),
                         sample_announcement(0,
                                             replicas=table(Replica,
                                                            [Replica(id16(1), id16(3)), Replica(id16(2), id16(3))]),
                                             nreplicas=2),
                         sample_announcement(0, commons=commons(), ncommons=2)],
        "begin": [begin, Begin(run=b"r", attempt=ATTEMPT, step=3, world=2, rank=1, host=b"h", time_ns=1,
                               commons=commons(), ncommons=2)], "base": [BaseRecord(Base(b"r", 3, digest(4)))],
        "heartbeat": [hb, slow],
        "trash": [Trash(name=b"packs/00/x.pack", time_ns=5, heartbeats=table(text, [b"hosts/a", b"hosts/b"]),
                        nheartbeats=2)],
        "damage": [Damage(pack=b"0123456789abcdef-0-0-model", ranges=table(Range, [Range(0, 4096), Range(5000, 1)]),
                          nranges=2),
                   Damage(pack=b"x", ranges=table(Range, [Range(0, 0)]), nranges=1)],
        "stats": [sample_stats(), Stats(run=b"r", attempt=ATTEMPT, step=0, rank=0, world=1, host=b"h")],
    }
    bodies = {name: [proto.encode(name, m) for m in ms] for name, ms in out.items()}
    made = manifest_make(proto.lib, [sample_announcement(0), sample_announcement(1, stores=False)])[1]
    named = [with_blobs(proto, made, *names) for names in ([], [(b"a.json", False, (1, 1)), (b"a.json", True, (0, 2))])]
    bodies["manifest"] = [made, *named]
    return bodies


def with_blobs(proto, body, *names):
    """The manifest with names of blobs: (name, per rank, (first rank, how many), ...); a negative number."""
    m = proto.decode("manifest", body)
    rows = [BlobName(name, own, table(RankRange, [RankRange(*r) for r in ranges]), len(ranges))
            for name, own, *ranges in names]
    m.names_blobs, m.blobs, m.nblobs = True, table(BlobName, rows), len(rows)
    made = proto.encode("manifest", m)
    proto.release("manifest", m)
    return made


# ---- layouts and chunks ----

DTYPES = {1: 1, 2: 1, 6: 1, 10: 2, 11: 2, 12: 4, 13: 8, 15: 16}  # number -> bytes


class Refused(Exception):
    def __init__(self, code, sentence):
        super().__init__(f"{errno.errorcode.get(-code, code)}: {sentence}")
        self.code = code


class LayoutHeld(c.Structure):
    _fields_ = [("buffer", c.c_bool), ("mesh", ptr), ("placements", ptr), ("nplacements", u32)]


class Layout:
    """Built from [(component, name, dtype, shape)] or [(..., mesh, placements)] in words; object: its bytes; order[i]:
    which of them sorted tensor i is."""

    def __init__(self, lib, tensors, params=DEFAULT):
        self.lib, self.p = lib, P(StoreLayout)()
        e, object_, tags = Error(), Buf(), P(u32)()
        b = ptr(lib.store_layout_builder_new(params))
        try:
            for i, (component, name, dtype, shape, *held) in enumerate(tensors):
                s = Shape(len(shape), (u64 * 16)(*shape[:16]))
                r = lib.store_layout_builder_add_held(b, component.encode(), name, c.c_size_t(len(name)), dtype,
                                                      c.byref(s), u32(i), self.held(*held) if held else None,
                                                      c.byref(e))
                if r < 0:
                    raise Refused(r, e.text.decode())
            r = lib.store_layout_builder_finish(b, c.byref(self.p), c.byref(object_), c.byref(tags), c.byref(e))
            if r < 0:
                raise Refused(r, e.text.decode())
        finally:
            lib.store_layout_builder_free(b)
            self.forget()
        self.object = c.string_at(object_.data, object_.len)
        lib.base_buf_release(c.byref(object_))
        self.order = [tags[i] for i in range(len(tensors))]
        self.tensors = [tensors[i] for i in self.order]
        self.digest = bytes(self.p.contents.digest.bytes)
        c.CDLL(None).free(tags)

    def close(self):
        self.lib.store_layout_free(self.p)

    meshes, words = (), ()

    def held(self, mesh, placements):
        """What store_layout_builder_add_held takes."""
        m, words = ptr(), ptr()
        assert self.lib.tensor_mesh_parse(mesh.encode(), None, u32(0), c.byref(m), None) == 0
        self.meshes = (*self.meshes, m)
        assert self.lib.tensor_placements_parse(placements.encode(), c.byref(words), None) == 0
        self.words = (*self.words, words)
        return c.byref(LayoutHeld(False, m, words.value + 8, u32.from_address(words.value).value))

    def forget(self):
        for m in self.meshes:
            self.lib.tensor_mesh_free(m)
        for words in self.words:
            c.CDLL(None).free(words)

    def grid(self, tensor):
        g = Grid()
        self.lib.store_layout_grid(self.p, u32(tensor), c.byref(g))
        return g

    def piece_bytes(self, tensor, boxes):
        """Raw lengths of the pieces of the boxes; None: whole."""
        g, it, out = self.grid(tensor), PieceIter(), []
        shape = self.tensors[tensor][3]
        for box in boxes or [[(0, n) for n in shape]]:
            b = make_box(box)
            self.lib.tensor_piece_first(c.byref(it), c.byref(g), c.byref(b))
            while not it.done:
                out.append(self.lib.tensor_box_items(c.byref(g.shape), c.byref(it.piece)) * g.item_bytes)
                self.lib.tensor_piece_next(c.byref(it))
        return out


def make_box(pairs):
    b = Box()
    for d, (offset, size) in enumerate(pairs):
        b.offset[d], b.size[d] = offset, size
    return b


def align(n, to):
    return (n + to - 1) // to * to


def blocks(n):
    return (n + 16383) // 16384


def tree(data):
    leaves = b"".join(hashlib.sha256(b"\0" + data[i:i + 16384]).digest() for i in range(0, len(data), 16384))
    return hashlib.sha256(b"\1" + struct.pack("<Q", len(data)) + leaves).digest()


class P_:
    """A piece: `place` = (pack, offset, checks), or bytes that stand in the row."""

    def __init__(self, raw, place, mark, stored=None, codec=0):
        self.raw, self.place, self.codec, self.stored = raw, place, codec, raw if stored is None else stored
        self.data = place if isinstance(place, bytes) else None
        self.digest = tree(place) if self.data is not None else bytes(digest(mark).bytes)
        self.xxh = struct.pack("<QQ", mark, ~mark & NONE)

    def follows(self, last):
        if (self.data is None) != (last.data is None):
            return False
        if self.data is not None:
            return True
        at = align(last.place[1] + last.stored, 4096 if self.codec == 0 and self.stored >= 65536 else 64)
        return self.place == (last.place[0], at, last.place[2] + blocks(last.raw) * (12 if last.codec else 8))

    def struct(self):
        p = Piece(base=INLINE, xxh=(u8 * 16)(*self.xxh))
        p.ref = Ref(digest=Digest((u8 * 32)(*self.digest)), raw_len=self.raw, stored_len=self.stored, codec=self.codec,
                    kind=1, pack=INLINE)
        if self.data is None:
            p.ref.pack, p.ref.offset, p.ref.checks = self.place
        else:
            p.inline_bytes = c.cast(c.create_string_buffer(self.data, max(len(self.data), 1)), P(u8))
        return p

    def bytes(self):
        return self.digest + self.xxh + struct.pack("<IIHHI", self.stored, self.raw, self.codec, 0, INLINE)


def row_digest(pieces):
    return hashlib.sha256(b"\2" + struct.pack("<Q", len(pieces)) + b"".join(p.digest for p in pieces)).digest()


def chunk_bytes(rows):
    """docs/format/part.md in Python: rows = [(tensor, boxes or None, [P_])]."""
    head_rows = runs = pieces = boxes = inlined = b""
    nruns = npairs = 0
    for tensor, row_boxes, row_pieces in rows:
        cut = ([i for i in range(len(row_pieces)) if i == 0 or not row_pieces[i].follows(row_pieces[i - 1])] +
               [len(row_pieces)])
        for a, b in zip(cut, cut[1:]):
            first = row_pieces[a]
            if first.data is None:
                runs += struct.pack("<IIQQ", first.place[0], b - a, first.place[1], first.place[2])
            else:
                runs += struct.pack("<IIQQ", INLINE, b - a, len(inlined), 0)
                inlined += b"".join(p.data for p in row_pieces[a:b])
        nruns += len(cut) - 1
        for box in row_boxes or []:
            boxes += b"".join(struct.pack("<QQ", *pair) for pair in box)
            npairs += len(box)
        head_rows += struct.pack("<IIIIQII", tensor, 0 if row_boxes else 1, len(row_boxes or []), len(cut) - 1,
                                 len(row_pieces), 0, 0) + row_digest(row_pieces)
        pieces += b"".join(p.bytes() for p in row_pieces)
    head = b"VCKPTCHK" + struct.pack("<HHIIIQIIQQQ", 1, 0, 0, len(rows), nruns, len(pieces) // 64, 0, 0, npairs,
                                     len(inlined), 0)
    return head + head_rows + runs + pieces + boxes + inlined


def chunk_decode(lib, layout, data, npacks):
    """[(tensor, boxes or None, [(digest, xxh, place or bytes, raw, stored, codec)])]; Refused."""
    ch, e, out = ptr(), Error(), []
    r = lib.store_chunk_decode(data, c.c_size_t(len(data)), layout.p, u32(npacks), c.byref(ch), c.byref(e))
    if r < 0:
        raise Refused(r, e.text.decode())
    for i in range(lib.store_chunk_rows(ch)):
        row = Row()
        assert lib.store_chunk_row(ch, u32(i), c.byref(row)) == 0
        assert lib.store_chunk_find(ch, u32(row.tensor)) == i
        out.append(read_row(layout, row))
        lib.store_row_release(c.byref(row))
    lib.store_chunk_free(ch)
    return out


def read_row(layout, row):
    ndim = len(layout.tensors[row.tensor][3])
    boxes = [[(row.boxes[i].offset[d], row.boxes[i].size[d]) for d in range(ndim)] for i in range(row.nboxes)]
    pieces = []
    for i in range(row.npieces):
        p = row.pieces[i]
        place = (p.ref.pack, p.ref.offset,
                 p.ref.checks) if p.ref.pack != INLINE else c.string_at(p.inline_bytes, p.ref.raw_len)
        pieces.append((bytes(p.ref.digest.bytes), bytes(p.xxh), place, p.ref.raw_len, p.ref.stored_len, p.ref.codec))
    return row.tensor, None if row.whole else boxes, pieces, bytes(row.digest.bytes)
