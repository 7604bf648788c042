# SPDX-License-Identifier: Apache-2.0
"""core/tensor through ctypes: the structs of its headers, and meshes, shardings and shards as Python values.

load(lib) must be called once for each CDLL (it sets restypes). Errors become `Failed(code, text)`."""
import ctypes
import errno

MAX_DIMS = 16
U32x16 = ctypes.c_uint32 * MAX_DIMS
U64x16 = ctypes.c_uint64 * MAX_DIMS
EOPNOTSUPP, ELIMIT = errno.EOPNOTSUPP, errno.E2BIG


class Failed(Exception):
    def __init__(self, code, text=""):
        super().__init__(f"{errno.errorcode.get(-code, code)}: {text}")
        self.code, self.text = code, text


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1000)]


class Buf(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_size_t), ("size", ctypes.c_size_t), ("error", ctypes.c_int)]


class Shape(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_uint32), ("dim", U64x16)]

    @classmethod
    def of(cls, dims):
        s = cls()
        s.ndim = len(dims)
        for d, n in enumerate(dims[:MAX_DIMS]):
            s.dim[d] = n
        return s

    def tuple(self):
        return tuple(self.dim[:self.ndim])


class Box(ctypes.Structure):
    _fields_ = [("offset", U64x16), ("size", U64x16)]

    @classmethod
    def of(cls, offset, size):
        b = cls()
        for d, (o, n) in enumerate(zip(offset, size)):
            b.offset[d], b.size[d] = o, n
        return b

    def pair(self, n):
        return tuple(self.offset[:n]), tuple(self.size[:n])


class GridParams(ctypes.Structure):
    _fields_ = [("m", ctypes.c_uint64), ("t", ctypes.c_uint64), ("r", ctypes.c_uint64), ("s", ctypes.c_uint64)]


class Grid(ctypes.Structure):
    _fields_ = [("shape", Shape), ("item_bytes", ctypes.c_uint), ("params", GridParams), ("edge", U64x16),
                ("k", ctypes.c_uint), ("only_k", ctypes.c_bool)]


class Mesh(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_uint32), ("size", U32x16), ("name", (ctypes.c_char * 65) * MAX_DIMS),
                ("count", ctypes.c_uint32), ("ranks", ctypes.POINTER(ctypes.c_uint32)),
                ("order", ctypes.POINTER(ctypes.c_uint32))]


class Hosts(ctypes.Structure):
    _fields_ = [("devices", ctypes.c_uint32), ("host", ctypes.POINTER(ctypes.c_uint32)),
                ("device", ctypes.POINTER(ctypes.c_uint32)), ("n", ctypes.c_uint32)]


class Placement(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("dim", ctypes.c_uint32), ("split", ctypes.c_uint64),
                ("ends", ctypes.POINTER(ctypes.c_uint64)), ("nends", ctypes.c_uint32)]


class Placements(ctypes.Structure):
    _fields_ = [("n", ctypes.c_uint32), ("at", Placement * MAX_DIMS)]


class Sharding(ctypes.Structure):
    _fields_ = [("shape", Shape), ("item_bytes", ctypes.c_uint), ("mesh", ctypes.POINTER(Mesh)),
                ("placement", ctypes.POINTER(Placement))]


class Flat(ctypes.Structure):
    _fields_ = [("from_", ctypes.c_uint64), ("to", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class Cut(ctypes.Structure):
    _fields_ = [("dim", ctypes.c_uint32), ("stretch", ctypes.c_uint64), ("stride", ctypes.c_uint64),
                ("start", ctypes.c_uint64),
                ("full", ctypes.c_uint64), ("tail_start", ctypes.c_uint64), ("tail", ctypes.c_uint64)]


class Shard(ctypes.Structure):
    _fields_ = [("shape", Shape), ("absent", ctypes.c_bool), ("local_shape", Shape), ("ncuts", ctypes.c_uint32),
                ("cut", Cut * MAX_DIMS), ("inner", Shape), ("from_", ctypes.c_uint64), ("to", ctypes.c_uint64)]


class ShardBox(ctypes.Structure):
    _fields_ = [("box", Box), ("local_offset", ctypes.c_uint64), ("local_stride", U64x16)]


class ShardIter(ctypes.Structure):
    _fields_ = [("shard", ctypes.c_void_p), ("done", ctypes.c_bool), ("at", ShardBox), ("window", Box), ("slab", Box),
                ("local", Box), ("next", ctypes.c_uint64)]


class PieceIter(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_void_p), ("box", Box), ("piece", Box), ("done", ctypes.c_bool),
                ("number", ctypes.c_uint64)]


class Boxes(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_uint32), ("n", ctypes.c_size_t), ("room", ctypes.c_size_t),
                ("pairs", ctypes.POINTER(ctypes.c_uint64))]


class ShardList(ctypes.Structure):
    _fields_ = [("boxes", ctypes.c_void_p), ("done", ctypes.c_bool), ("at", ShardBox), ("i", ctypes.c_size_t),
                ("next", ctypes.c_uint64)]


class Cover(ctypes.Structure):
    _fields_ = [("box", Box), ("a", ctypes.c_size_t), ("b", ctypes.c_size_t)]


class PieceWindow(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_void_p), ("box", Box), ("window", Box), ("done", ctypes.c_bool),
                ("number", ctypes.c_uint64),
                ("piece", Box), ("part", Box)]


class Line(ctypes.Structure):
    _fields_ = [("box", ctypes.c_size_t), ("piece", ctypes.c_uint64), ("piece_box", Box), ("part", Box),
                ("local_offset", ctypes.c_uint64), ("local_stride", U64x16)]


LINE_FUNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Line))
FOUND_FUNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
HOLDER_FUNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32))


class Span(ctypes.Structure):
    _fields_ = [("from_", ctypes.c_uint64), ("to", ctypes.c_uint64)]


class SaveTensor(ctypes.Structure):
    _fields_ = [("component", ctypes.c_char_p), ("name", ctypes.c_char_p), ("name_len", ctypes.c_uint32),
                ("dtype", ctypes.c_int), ("sharding", Sharding), ("flat", ctypes.POINTER(Flat)),
                ("boxes", ctypes.POINTER(Boxes)), ("same_dims", ctypes.c_uint32), ("buffer", ctypes.c_bool),
                ("device", ctypes.c_bool), ("context", ctypes.c_uint), ("local", Shape),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("data", ctypes.c_void_p)]


class PlanBox(ctypes.Structure):
    _fields_ = [("tensor", ctypes.c_uint32), ("at", ShardBox), ("pieces", ctypes.c_uint64)]


class Plan(ctypes.Structure):
    _fields_ = [("boxes", ctypes.POINTER(PlanBox)), ("nboxes", ctypes.c_uint64), ("pieces", ctypes.c_uint64),
                ("bytes", ctypes.c_uint64), ("shared_bytes", ctypes.c_uint64), ("held_bytes", ctypes.c_uint64)]


def load(lib):
    u32, u64, p = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    for kind, names in ((u64,
                         ("tensor_piece_count", "tensor_piece_find", "tensor_shard_box_count", "tensor_shard_items")),
                        (u32, ("tensor_mesh_rank_at", "tensor_mesh_group_size", "tensor_sharding_replicated")),
                        (ctypes.c_int64, ("tensor_mesh_group_position",))):
        for name in names:
            if hasattr(lib, name):
                getattr(lib, name).restype = kind
    lib.tensor_mesh_neighbour.argtypes = [p, u32, u32, ctypes.c_int64, ctypes.c_bool, p]
    lib.tensor_mesh_free.argtypes = [p]
    lib.free = ctypes.CDLL(None).free
    lib.free.argtypes = [p]
    return lib


def make_plan(lib, array, n, params, rank):
    plan, err = Plan(), Error()
    check(lib.save_plan_make(array, ctypes.c_uint32(n), GridParams(*params), ctypes.c_uint32(rank), ctypes.byref(plan),
                             ctypes.byref(err)), err)
    return plan


def check(r, err):
    if r < 0:
        raise Failed(r, err.text.decode(errors="replace"))
    return r


class OwnedMesh:
    """A mesh made by the library; freed with this object."""

    def __init__(self, lib, dims, ranks=None):
        """dims: [("dp", 2), ...] or "dp=2,tp=4"."""
        self.lib, self.pointer, err = lib, ctypes.POINTER(Mesh)(), Error()
        array = None if ranks is None else (ctypes.c_uint32 * max(len(ranks), 1))(*ranks)
        count = ctypes.c_uint32(0 if ranks is None else len(ranks))
        if isinstance(dims, str):
            r = lib.tensor_mesh_parse(dims.encode(), array, count, ctypes.byref(self.pointer), ctypes.byref(err))
        else:
            names = (ctypes.c_char_p * max(len(dims), 1))(*[n.encode() for n, _ in dims])
            sizes = (ctypes.c_uint32 * max(len(dims), 1))(*[n for _, n in dims])
            r = lib.tensor_mesh_new(ctypes.c_uint32(len(dims)), names, sizes, array, count, ctypes.byref(self.pointer),
                                    ctypes.byref(err))
        check(r, err)

    @classmethod
    def adopt(cls, lib, pointer):
        """A mesh that a function of the library returned (POINTER(Mesh)); from now on freed with this object."""
        mesh = cls.__new__(cls)
        mesh.lib, mesh.pointer = lib, pointer
        return mesh

    @property
    def c(self):
        return self.pointer.contents

    @property
    def dims(self):
        """[("dp", 2), ...]"""
        c = self.c
        return [(c.name[d].value.decode(), c.size[d]) for d in range(c.ndim)]

    @property
    def ranks(self):
        """By position."""
        c = self.c
        return c.ranks[:c.count] if c.ranks else list(range(c.count))

    def __del__(self):
        if getattr(self, "pointer", None):
            self.lib.tensor_mesh_free(self.pointer)


class OwnedSharding:
    """Shape, mesh and placement words, checked; keeps what it points to."""

    def __init__(self, lib, shape, mesh, words, item_bytes=4):
        self.lib, self.mesh, err = lib, mesh, Error()
        self.placements = ctypes.POINTER(Placements)()
        check(lib.tensor_placements_parse(words.encode(), ctypes.byref(self.placements), ctypes.byref(err)), err)
        self.c = Sharding(Shape.of(shape), item_bytes, mesh.pointer,
                          ctypes.cast(self.placements.contents.at, ctypes.POINTER(Placement)))
        if len(shape) > MAX_DIMS:
            self.c.shape.ndim = len(shape)
        check(lib.tensor_sharding_check(ctypes.byref(self.c), ctypes.c_uint(self.placements.contents.n),
                                        ctypes.byref(err)), err)

    def shard(self, rank, flat=None):
        """flat: (from, to) or (from, to, len)."""
        s, err = Shard(), Error()
        f = None if flat is None else Flat(flat[0], flat[1], flat[2] if len(flat) > 2 else 0)
        check(self.lib.tensor_shard_of(ctypes.byref(self.c), ctypes.c_uint32(rank), ctypes.byref(f) if f is not None
                                       else None,
                                       ctypes.byref(s), ctypes.byref(err)), err)
        return s

    def __del__(self):
        if getattr(self, "placements", None):
            self.lib.free(self.placements)


def shard_boxes(lib, shard, window=None):
    """[((offset...), (size...), local_offset, (local_stride...)), ...] in the order of the buffer."""
    it, n, found = ShardIter(), shard.shape.ndim, []
    w = None if window is None else Box.of(*window)
    lib.tensor_shard_first(ctypes.byref(it), ctypes.byref(shard), ctypes.byref(w) if w is not None else None)
    while not it.done:
        offset, size = it.at.box.pair(n)
        found.append((offset, size, it.at.local_offset, tuple(it.at.local_stride[:n])))
        lib.tensor_shard_next(ctypes.byref(it))
    return found


def random_boxes(rng, shape, whole=False):
    """Some random disjoint boxes of the tensor, some of them empty, in any order: it is halved again and again, and
    some parts are left out (not with `whole`)."""
    found = [((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randrange(7) if shape else 0):
        offset, size = found.pop(rng.randrange(len(found)))
        d = rng.randrange(len(shape))
        n = rng.randint(0, size[d])
        found += [(offset, (*size[:d], n, *size[d + 1:])),
                  ((*offset[:d], offset[d] + n, *offset[d + 1:]), (*size[:d], size[d] - n, *size[d + 1:]))]
    rng.shuffle(found)
    return found if whole else found[:rng.randint(1, len(found))]
