# SPDX-License-Identifier: Apache-2.0
"""Values of numpy and torch that are no tensors: scalars, dtypes, sizes, devices, placements, meshes.

`describe` turns one into (tag, content, members), all plain; `restore` does the reverse. Describing imports nothing: an
object of a library can occur only where the library is in sys.modules. Restoring imports numpy or torch, by names that
are written here; where one is missing, or lacks the thing (a dtype of a later version, a device of another build),
Missing is raised and the value comes back as a Record. Names that are read are looked up in tables or checked against a
class, never called."""
from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from .records import Mesh

Described = tuple[str, Any, dict[str, Any]]     # tag, content, members

NUMPY_SCALARS = frozenset(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
                           "float32", "float64", "complex64", "complex128", "str", "bytes"])
NUMPY_TIME = re.compile(r"(datetime64|timedelta64)(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUmMV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,5})?")

PLACEMENT_MODULES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
PLACEMENTS: dict[str, dict[str, type]] = {"Replicate": {}, "Shard": {"dim": int},
                                          "_StridedShard": {"dim": int, "split_factor": int},
                                          "Partial": {"reduce_op": str}}
# Placements of libraries over torch, known by their class's name: kept as records.
PLACEMENT_LIKE = {"InterleavedShard": ("dim", "interleaved_size"), "RaggedShard": ("dims", "local_units")}


class Missing(Exception):
    """The library that a value belongs to is not installed here, or does not know it."""


# ---- out ----

def describe(value: Any) -> Described | None:
    """(tag, content, members), or None. ValueError: a kind that is known, and cannot be kept."""
    cls = type(value)
    module = cls.__module__ or ""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic):
        return _describe_scalar(numpy, value)
    if numpy and isinstance(value, numpy.dtype):
        return "$numpy.dtype", _dtype_text(numpy, value), {}
    if numpy and cls is type and issubclass(value, numpy.generic) and value.__module__ == "numpy":
        return _describe_scalar_type(numpy, value)
    torch = sys.modules.get("torch")
    if torch and (module == "torch" or module.startswith("torch.")):
        return _describe_torch(torch, cls, module, value)
    return None


def _describe_scalar(numpy: Any, value: Any) -> Described:
    kind = value.dtype.kind
    if kind in "mM":
        return "$numpy", int(value.view("int64")), {"dtype": value.dtype.name}
    name = {"U": "str", "S": "bytes"}.get(kind, value.dtype.name)
    if name not in NUMPY_SCALARS or type(value).__module__ != "numpy":
        raise ValueError(f"a numpy {value.dtype.name} cannot be kept")
    plain = {"b": bool, "i": int, "u": int, "f": float, "c": complex, "U": str, "S": bytes}[kind]
    return "$numpy", plain(value), {"dtype": name}


def _describe_scalar_type(numpy: Any, value: Any) -> Described:
    name = {"str_": "str", "bytes_": "bytes"}.get(value.__name__) or numpy.dtype(value).name
    if name not in NUMPY_SCALARS:
        raise ValueError(f"the type numpy.{value.__name__} cannot be kept")
    return "$numpy.type", name, {}


def _dtype_text(numpy: Any, value: Any) -> str:
    """"float32" for what has its place on this machine, else numpy's own "<U3", ">f4", "<M8[ns]"."""
    if value.name in NUMPY_SCALARS and value.kind in "biufc" and value == numpy.dtype(value.name):
        return str(value.name)
    if value.fields is None and value.subdtype is None and NUMPY_DTYPE.fullmatch(value.str):
        return str(value.str)
    raise ValueError(f"the numpy dtype {value} cannot be kept")


def _describe_torch(torch: Any, cls: type, module: str, value: Any) -> Described | None:
    if cls in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        return f"$torch.{cls.__name__}", str(value).removeprefix("torch."), {}
    if cls is torch.Size:
        return "$torch.Size", [int(size) for size in value], {}
    if cls.__name__ == "DeviceMesh":
        return describe_mesh(Mesh.from_torch(value))
    if module in PLACEMENT_MODULES and cls.__name__ in PLACEMENTS:
        fields = {name: getattr(value, name) for name in PLACEMENTS[cls.__name__]}
        for name, kind in PLACEMENTS[cls.__name__].items():
            if type(fields[name]) is not kind:
                raise ValueError(f"a placement whose {name} is a {type(fields[name]).__name__} cannot be kept")
        return "$placement", cls.__name__, fields
    return None


def describe_mesh(mesh: Mesh) -> Described:
    def lists(part: Any) -> Any:
        return [lists(item) for item in part] if isinstance(part, tuple) else part
    names = {} if mesh.mesh_dim_names is None else {"names": list(mesh.mesh_dim_names)}
    return "$mesh", lists(mesh.mesh), {"device": mesh.device_type, **names}


# ---- in: content and members are plain values; ValueError where they are not what the tag asks for ----

def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise Missing from None


def _text(content: Any, pattern: re.Pattern[str], what: str) -> str:
    if type(content) is not str or not pattern.fullmatch(content):
        raise ValueError(f"{what} is malformed")
    return content


def restore_scalar(content: Any, dtype: Any) -> Any:
    if type(dtype) is not str or not (dtype in NUMPY_SCALARS or NUMPY_TIME.fullmatch(dtype)):
        raise ValueError("the dtype of a numpy scalar is malformed")
    time = NUMPY_TIME.fullmatch(dtype)
    kind = int if time else {"bool": bool, "str": str, "bytes": bytes}.get(dtype)
    kind = kind or (int if "int" in dtype else float if dtype.startswith("float") else complex)
    if type(content) is not kind:
        raise ValueError(f"a numpy {dtype} is written as {kind.__name__}")
    numpy = _import("numpy")
    try:
        if time:
            return numpy.int64(content).view(dtype)
        with numpy.errstate(over="ignore"):
            value = numpy.dtype(dtype).type(content)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"a numpy {dtype}: {error}") from None
    if (kind is int and int(value) != content) or (kind in (float, complex) and kind(value) != content == content):
        raise ValueError(f"{content} is not a {dtype}")
    return value


def restore_dtype(content: Any) -> Any:
    if type(content) is not str or content not in NUMPY_SCALARS - {"str", "bytes"}:
        _text(content, NUMPY_DTYPE, "a numpy dtype")
    try:
        return _import("numpy").dtype(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a numpy dtype: {error}") from None


def restore_scalar_type(content: Any) -> Any:
    if type(content) is not str or content not in NUMPY_SCALARS:
        raise ValueError("a numpy type is malformed")
    return _import("numpy").dtype(content).type


def _torch_name(kind: str) -> Callable[[Any], Any]:
    """Restores an attribute of torch, if it is of that kind."""
    def restore(content: Any) -> Any:
        _text(content, NAME, f"a torch.{kind}")
        torch = _import("torch")
        value = getattr(torch, content, None)
        if not isinstance(value, getattr(torch, kind)):
            raise Missing
        return value
    return restore


def restore_size(content: Any) -> Any:
    if type(content) is not list or not all(type(size) is int and abs(size) < 1 << 63 for size in content):
        raise ValueError("a torch.Size is a list of integers")
    return _import("torch").Size(content)


def restore_device(content: Any) -> Any:
    _text(content, DEVICE, "a torch.device")
    torch = _import("torch")
    try:
        value = torch.device(content)
    except RuntimeError:
        raise Missing from None
    if str(value) != content:
        raise Missing
    return value


def restore_placement(content: Any, **fields: Any) -> Any:
    wanted = PLACEMENTS.get(content) if type(content) is str else None
    if wanted is None:
        raise ValueError("an unknown placement")
    if fields.keys() != wanted.keys() or any(type(fields[name]) is not kind for name, kind in wanted.items()):
        raise ValueError(f"the fields of a {content} are {', '.join(wanted) or 'none'}")
    if any(kind is int and abs(fields[name]) >= 1 << 31 for name, kind in wanted.items()):
        raise ValueError(f"a {content} out of range")
    for name in PLACEMENT_MODULES:
        try:
            module = __import__(name, fromlist=["Shard"])
            return getattr(module, content)(**fields)
        except (ImportError, AttributeError):
            continue
    raise Missing


def restore_mesh(content: Any, device: Any, names: Any = None) -> Mesh:
    if names is not None and type(names) is not list:
        raise ValueError("the names of a mesh are a list")
    return Mesh(device, content, names)


# tag: function, members that must be there, members that may be
RESTORE: dict[str, tuple[Callable[..., Any], set[str], set[str]]] = {
    "$numpy": (restore_scalar, {"dtype"}, set()),
    "$numpy.dtype": (restore_dtype, set(), set()),
    "$numpy.type": (restore_scalar_type, set(), set()),
    "$torch.dtype": (_torch_name("dtype"), set(), set()),
    "$torch.layout": (_torch_name("layout"), set(), set()),
    "$torch.memory_format": (_torch_name("memory_format"), set(), set()),
    "$torch.Size": (restore_size, set(), set()),
    "$torch.device": (restore_device, set(), set()),
    "$placement": (restore_placement, set(), {"dim", "split_factor", "reduce_op"}),
    "$mesh": (restore_mesh, {"device"}, {"names"}),
}
