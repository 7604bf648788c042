# SPDX-License-Identifier: Apache-2.0
"""What a restored state has in the place of things that are not built anew: a `Record` for an object whose class was
not given, a `Mesh` for a device mesh. Both are plain, immutable values: they compare by content, can be copied,
pickled, hashed and saved again, which gives the same bytes. Neither imports anything. Only questions to a Mesh
(coordinate, rank, group and the like) use the library, and only Mesh.to_torch makes process groups."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from . import _lib

Nested: TypeAlias = "int | tuple[Nested, ...]"     # ranks
Dims: TypeAlias = int | str | Sequence[int | str]     # one dimension of a mesh by number or name, or several


class _Unchanging:
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed")


class Record(_Unchanging, Mapping[str, Any]):
    """The fields of an object, under the name of its class: `record.lr`, `record["lr"]`, `dict(record)`.

    `type_name` is the class's `module.qualname`. A field that is called like a method (`keys`, `type_name`) is reached
    by `record["keys"]` only. `tag` says which tag of docs/format/values.md it was read from."""

    __slots__ = ("_type_name", "_fields", "_tag")
    _type_name: str
    _fields: dict[str, Any]
    _tag: str

    def __init__(self, type_name: str, fields: Mapping[str, Any], tag: str = "$record") -> None:
        _set_type_name(self, type_name)         # past __setattr__
        _set_fields(self, dict(fields))
        _set_tag(self, tag)

    @property
    def type_name(self) -> str:
        return self._type_name

    @property
    def tag(self) -> str:
        return self._tag

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name not in Record.__slots__ and name in self._fields:
            return self._fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self._fields if isinstance(name, str))]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (self._type_name, self._tag, self._fields) == (other._type_name, other._tag, other._fields)

    def __hash__(self) -> int:
        try:
            return hash((self._type_name, self._tag, frozenset(self._fields.items())))
        except (TypeError, ValueError):     # a list in it: a key of a dict can come back as a record all the same
            return hash((self._type_name, self._tag, frozenset(self._fields)))

    def __reduce__(self) -> tuple[type[Record], tuple[str, dict[str, Any], str]]:
        return Record, (self._type_name, self._fields, self._tag)

    def __repr__(self) -> str:
        return f"Record({self._type_name}: {', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"


_set_type_name, _set_fields, _set_tag = (vars(Record)[name].__set__ for name in Record.__slots__)


class Mesh(_Unchanging):
    """A device mesh as it was: device type, ranks (nested, outermost dimension first) and names of the dimensions.
    Its methods take dimensions by name ("tp"), by number, or several of them ("dp,tp" or ["dp", "tp"]); ranks are those
    of the job. It communicates with no one.

    Equal to a torch DeviceMesh of the same content when it is on the left (`mesh == device_mesh`); torch's own
    comparison, with the DeviceMesh on the left, knows its own class only."""

    __slots__ = ("device_type", "mesh", "mesh_dim_names", "shape")
    device_type: str
    mesh: Nested
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]

    def __init__(self, device_type: str, mesh: Sequence[Any], mesh_dim_names: Sequence[str] | None = None) -> None:
        if type(device_type) is not str or not device_type:
            raise ValueError("the device type of a mesh must be a name")
        nested, shape = _rectangular(mesh)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        if names is not None and (len(names) != len(shape) or not all(type(name) is str for name in names)):
            raise ValueError(f"a mesh of {len(shape)} dimensions needs {len(shape)} names (str), not {names!r}")
        for name, value in zip(Mesh.__slots__, (device_type, nested, names, shape)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_torch(cls, mesh: Any) -> Mesh:
        return cls(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)

    @classmethod
    def from_words(cls, words: str, ranks: Sequence[int] | None = None, device_type: str = "cpu") -> Mesh:
        """Mesh.from_words("dp=2,tp=4"): outermost first, over `ranks` in row-major order (None: 0, 1, ...)."""
        from . import meshes
        mesh = meshes.native(words, None if ranks is None else tuple(ranks))
        return cls(device_type, _nested(mesh.ranks, mesh.sizes), mesh.names)

    def to_torch(self) -> Any:
        """A torch DeviceMesh. All ranks of the process group must call it: it makes the groups of the dimensions."""
        from torch.distributed.device_mesh import DeviceMesh
        return DeviceMesh(self.device_type, self.mesh, mesh_dim_names=self.mesh_dim_names)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks in row-major order."""
        flat: list[Any] = [self.mesh]
        for _ in self.shape:
            flat = [item for part in flat for item in part]
        return tuple(flat)

    def size(self, dim: Dims | None = None) -> int:
        """The size of a dimension, of the group along several, or of the whole mesh (None)."""
        size = 1
        for d in range(self.ndim) if dim is None else self._dims(dim):
            size *= self.shape[d]
        return size

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank is. NotFound: it is not in the mesh."""
        return self._native().coordinate(rank)

    def rank(self, coordinate: Sequence[int]) -> int:
        """Which rank is there."""
        return self._native().rank(coordinate)

    def group(self, dims: Dims, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` in no dimension but these, itself among them, in the order of the mesh."""
        return self._native().group(self._words(dims), rank)

    def sub(self, dims: Dims, rank: int) -> Mesh:
        """That group as a mesh of these dimensions, which are in the order of this one. As torch's mesh["tp"] is at
        `rank`."""
        numbers = sorted(self._dims(dims))
        names = None if self.mesh_dim_names is None else [self.mesh_dim_names[d] for d in numbers]
        return Mesh(self.device_type, _nested(self.group(dims, rank), [self.shape[d] for d in numbers]), names)

    def neighbour(self, dim: int | str, rank: int, distance: int = 1, *, wrap: bool = False) -> int | None:
        """The rank that is `distance` further along one dimension, all else equal; below 0: back. wrap: the dimension
        is a ring. None: the mesh ends before."""
        return self._native().neighbour(self._words(dim), rank, distance, wrap)

    def _dims(self, dims: Dims) -> list[int]:
        """Numbers of the dimensions that a caller names."""
        names = self.mesh_dim_names or ()
        if isinstance(dims, str):
            dims = [dims] if dims in names else [name.strip() for name in dims.split(",")]
        numbers = [names.index(dim) if isinstance(dim, str) and dim in names else dim
                   for dim in ([dims] if isinstance(dims, int) else dims)]
        whole = [dim if isinstance(dim, str) or not 0 <= dim + self.ndim < 2 * self.ndim else dim % self.ndim
                 for dim in numbers]
        for dim in whole:
            if isinstance(dim, str) or not 0 <= dim < self.ndim or whole.count(dim) > 1:
                from . import _lib
                raise _lib.invalid(f"{self!r}: dimension {dim!r} "
                                   "is " + ("given twice" if whole.count(dim) > 1 else "not one of its own"))
        return [dim for dim in whole if not isinstance(dim, str)]

    def _words(self, dims: Dims) -> str:
        return ",".join(f"d{d}" for d in self._dims(dims))

    def _native(self) -> _lib.Mesh:
        """The library's mesh, with dimensions d0, d1, ...: torch's names may be any text."""
        from . import meshes
        return meshes.native(",".join(f"d{d}={size}" for d, size in enumerate(self.shape)), self.ranks)

    def _content(self) -> tuple[str, Nested, tuple[str, ...] | None]:
        return self.device_type, self.mesh, self.mesh_dim_names

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ == "DeviceMesh" and type(other).__module__.startswith("torch."):
            other = Mesh.from_torch(other)
        return self._content() == other._content() if isinstance(other, Mesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __reduce__(self) -> tuple[type[Mesh], tuple[str, Nested, tuple[str, ...] | None]]:
        return Mesh, (self.device_type, self.mesh, self.mesh_dim_names)

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", {self.mesh_dim_names!r}"
        return f"Mesh({self.device_type!r}, {self.mesh!r}{names})"


def _nested(ranks: Sequence[int], shape: Sequence[int]) -> list[Any]:
    """Ranks in row-major order as nested lists."""
    nested: list[Any] = list(ranks)
    for size in reversed(shape[1:]):
        nested = [nested[i:i + size] for i in range(0, len(nested), size)]
    return nested


def _rectangular(mesh: object) -> tuple[Nested, tuple[int, ...]]:
    """Nested lists of ranks as nested tuples, and their shape."""
    def walk(part: object, depth: int) -> tuple[Nested, tuple[int, ...]]:
        if type(part) is int:
            if not 0 <= part < 1 << 32:
                raise ValueError(f"a rank of a mesh is a whole number from 0 to 2**32 - 1, not {part}")
            return part, ()
        if not isinstance(part, (list, tuple)) or depth == 16:
            raise ValueError("a mesh is made of nested lists of ranks, at most 16 deep")
        walked = [walk(item, depth + 1) for item in part]
        shapes = {shape for _, shape in walked}
        if len(shapes) > 1:
            raise ValueError("the lists of a mesh differ in length")
        return tuple(item for item, _ in walked), (len(walked), *(shapes.pop() if shapes else ()))
    return walk(mesh, 0)
