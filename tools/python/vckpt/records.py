# SPDX-License-Identifier: Apache-2.0
"""What stands in a restored state for things that are not built anew: `Record` for an object whose class was not given,
`Mesh` for a device mesh. Both are plain, immutable values: they compare by content, can be copied, pickled,
hashed and saved again, which gives the same bytes. Neither imports anything; only Mesh.to_torch, called by name, makes
process groups."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Nested: TypeAlias = "int | tuple[Nested, ...]"     # ranks


class Record(Mapping[str, Any]):
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

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Record cannot be changed")

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Record cannot be changed")

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


class Mesh:
    """A device mesh as it was: device type, ranks (nested, outermost dimension first) and names of the dimensions.

    Equal to a torch DeviceMesh of the same content when it stands on the left (`mesh == device_mesh`); torch's own
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

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Mesh cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Mesh cannot be changed")

    @classmethod
    def from_torch(cls, mesh: Any) -> Mesh:
        return cls(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)

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

    def size(self, dim: int | None = None) -> int:
        return len(self.ranks) if dim is None else self.shape[dim]

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
