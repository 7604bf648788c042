# SPDX-License-Identifier: Apache-2.0
"""torch's tensors as the library takes them. Imported only where torch is.

Layouts are those of docs/torch.md, which has the trap, too: fully_shard calls what it cuts after tensor parallelism
`_StridedShard`, and where that is uneven the label says another layout than the data has. The data follows the order of
cutting, so for uneven sizes the entry says that: `S(0),S(0)` over the mesh with its dimensions in that order."""
from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _lib, meshes
from .meshes import NamedRanks, Ranks, SaveMesh
from .shard import NUMPY_DTYPES, STALE, Entry, Layout, Refused, Where, check_items
from .values_text import KeyPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {getattr(torch, name): _lib.DTYPES.index(word)
          for name, word in (*NUMPY_DTYPES.items(), ("float4_e2m1fn_x2", "f4_e2m1fn_x2")) if hasattr(torch, name)}
TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}
ADVICE = {"ShardedTensor": "give DTensors (FSDP2, or FSDP1 with a device_mesh), or vckpt.Shard with boxes"}


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_dtensor(value: object) -> bool:
    """Is it a DTensor of torch, or built like one, as veScale's? (torch's class is not imported for this.)"""
    if type(value) in PLAIN_TYPES:
        return False
    spec = getattr(value, "_spec", None) if isinstance(value, torch.Tensor) else None
    return hasattr(value, "_local_tensor") and hasattr(spec, "placements") and hasattr(spec, "mesh")


def local_shape(local: torch.Tensor, spec: Any, shape: Sequence[int], rank: int) -> Sequence[int]:
    """The shape of what a rank has, as the library says it: a RaggedShard's has one dimension in torch, and here rows
    of the dimensions that it leaves (docs/layouts.md)."""
    ragged = next((p for p in spec.placements if type(p).__name__ == "RaggedShard"), None)
    if ragged is None or local.ndim != 1 or not local.is_contiguous():
        return tuple(local.shape)
    _, ranks = meshes.array_of(spec.mesh)
    rest = list(shape[len(ragged.dims):])
    for placement, size, at in zip(spec.placements, ranks.shape, np.argwhere(ranks == rank)[0]):
        dim = placement.dim % len(shape) - len(ragged.dims) if hasattr(placement, "dim") else -1
        if dim >= 0:
            chunk = -(-rest[dim] // size)
            rest[dim] = max(min(rest[dim] - chunk * int(at), chunk), 0)
    items = math.prod(rest)
    return (local.numel() // items, *rest) if items and local.numel() % items == 0 else tuple(local.shape)


def check_plain(tensor: torch.Tensor, path: Where) -> None:
    """Refuses what is not memory of items of a kept type."""
    if type(tensor) not in PLAIN_TYPES and (tensor.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl):
        name = type(tensor).__name__
        raise Refused(path, f"a tensor of the class {name} cannot be kept as it is: "
                            f"{ADVICE.get(name, 'give its parts as plain tensors')}")
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise Refused(path, "a parameter of a lazy module has no shape yet: call the module once before the save")
    if tensor.device.type == "meta":
        raise Refused(path, "a tensor on the meta device has no data: save after it was made (to_empty, "
                            "reset_parameters), or leave it out")
    if tensor.is_quantized or tensor.layout != torch.strided or tensor.is_nested:
        kind = ("quantized" if tensor.is_quantized else "nested" if tensor.is_nested
                else str(tensor.layout).removeprefix("torch."))
        raise Refused(path, f"a {kind} tensor cannot be kept: give its parts")
    if tensor.dtype not in DTYPES:
        raise Refused(path, f"a tensor of dtype {tensor.dtype} cannot be kept: give it as another dtype")


def is_memory(tensor: torch.Tensor) -> bool:
    """Does check_plain let it pass? (Its device may be any.)"""
    return (type(tensor) in PLAIN_TYPES and tensor.dtype in DTYPES and tensor.layout is torch.strided
            and not tensor.is_nested)


def settled(local: torch.Tensor) -> torch.Tensor:
    """The tensor, once a pending collective has given it."""
    wait = getattr(local, "trigger_wait", None) or getattr(local, "wait", None)
    return local if type(local) in PLAIN_TYPES or wait is None else wait()


_warned: set[torch.device] = set()         # devices of which a line was printed


def background(device: torch.device) -> bool:
    """Is memory of the device copied while training goes on? Yes for the CPU, and for the current CUDA device, whose
    stream the save begins behind. Tensors on other devices are copied to the host at the call, behind their current
    streams."""
    return device.type == "cpu" or (device.type == "cuda" and device.index in (None, torch.cuda.current_device()))


def warn(device: torch.device) -> None:
    if device.type == "cuda" and device not in _warned:
        _warned.add(device)
        print(f"vckpt: tensors on {device} are copied at the call, not in the background, because "
              f"cuda:{torch.cuda.current_device()} is the current device: "
              f"torch.cuda.set_device({device.index}) first if they are most of the state", file=sys.stderr)


class TorchEntry(Entry):
    """A tensor in memory: of its own, or the local one of a DTensor."""

    __slots__ = ("type", "dtype", "shape", "stride", "place", "copy", "conjugate", "negative", "flattened")

    def __init__(self, component: str, name: str, path: Where, tensor: torch.Tensor, layout: Layout,
                 flags: int, local: Sequence[int] | None = None) -> None:
        """local: its shape as the library says it, if that is another."""
        check_plain(tensor, path)
        self.look(tensor)
        self.flattened = layout.flat is not None or layout.boxes is not None
        behind = background(tensor.device)
        self.device = tensor.device if behind and tensor.device.type == "cuda" else None
        if not behind:
            warn(tensor.device)
        self.copy = (self.conjugate or self.negative or not behind or (self.flattened and not tensor.is_contiguous())
                     or (not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0))
        check_items(layout, tensor.numel(), path)
        strides = None
        if not self.copy and not tensor.is_contiguous():
            strides = [n * tensor.element_size() for n in tensor.stride()]
        flags |= _lib.DEVICE if self.device else 0
        self.fill(component, name, layout, DTYPES[tensor.dtype], None if self.flattened else local or tensor.shape,
                  strides, flags)

    def look(self, tensor: torch.Tensor) -> None:
        self.type, self.dtype, self.shape = type(tensor), tensor.dtype, tensor.shape
        self.stride, self.place = tensor.stride(), tensor.device
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()

    def address(self, tensor: Any, refs: list[object]) -> int | None:
        if (type(tensor) is not self.type or tensor.dtype is not self.dtype or tensor.shape != self.shape
                or tensor.stride() != self.stride or tensor.device != self.place
                or tensor.is_conj() is not self.conjugate or tensor.is_neg() is not self.negative):
            return STALE
        if self.copy:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            if self.device is None and tensor.device.type != "cpu":
                tensor = tensor.cpu()
            tensor = tensor.contiguous()
            refs.append(tensor)
        return int(tensor.data_ptr())


class DTensorEntry(TorchEntry):
    __slots__ = ("spec", "whole", "outer")

    def __init__(self, component: str, name: str, path: KeyPath, tensor: Any, save_mesh: SaveMesh | None, rank: int,
                 flags: int) -> None:
        self.outer, self.spec, self.whole = type(tensor), tensor._spec, tensor.shape
        layout = layout_of(tensor._spec, tuple(tensor.shape), save_mesh, path)
        if layout.mesh is not None and rank not in layout.mesh.members:
            self.fill(component, name, layout, DTYPES.get(tensor.dtype, 0), None, None)
            self.look(tensor._local_tensor)
            self.absent, self.device, self.copy = True, None, False
            return
        local = settled(tensor._local_tensor)
        super().__init__(component, name, path, local, layout, flags,
                         local_shape(local, self.spec, tuple(tensor.shape), rank))

    def address(self, tensor: Any, refs: list[object]) -> int | None:
        if type(tensor) is not self.outer or tensor.shape != self.whole:
            return STALE
        local = tensor._local_tensor
        if (tensor._spec is self.spec and not self.copy and type(local) is self.type and local.shape == self.shape
                and local.stride() == self.stride and local.dtype is self.dtype and local.device == self.place
                and not local.is_conj() and not local.is_neg()):
            return int(local.data_ptr())             # the common case, in as few calls as can be
        if tensor._spec is not self.spec:
            if tensor._spec != self.spec or tensor._spec.mesh is not self.spec.mesh:
                return STALE
            self.spec = tensor._spec
        if type(local) is not self.type:
            local = settled(local)
            refs.append(local)
        return super().address(local, refs)


# ---- placements ----

def word(placement: Any, path: KeyPath, ndim: int) -> str:
    """A placement as docs/layouts.md writes it."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return "R"
    if kind in ("Shard", "_StridedShard", "InterleavedShard"):
        dim = placement.dim + (ndim if placement.dim < 0 else 0)
        if kind == "Shard":
            return f"S({dim})"
        if kind == "_StridedShard":
            return f"SS({dim},{placement.split_factor})"
        return f"IS({dim},{placement.interleaved_size})"
    if kind == "RaggedShard":
        return f"RS({','.join(map(str, placement.dims))};{','.join(map(str, placement.local_units))})"
    if "Partial" in kind:
        raise Refused(path, f"{placement} is a sum that is still pending: reduce it first (redistribute to Replicate "
                            "or Shard)")
    raise Refused(path, f"the placement {placement} is unknown: give Replicate or Shard placements, or a vckpt.Shard "
                        "with boxes")


def cut_order(placements: Sequence[Any], sizes: Sequence[int]) -> dict[int, list[int]] | None:
    """For each tensor dimension the mesh dimensions in the order in which they cut it, by the split factors: each is
    the product of the sizes that cut before it and come behind it. None where no order gives them."""
    orders: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if type(placement).__name__ not in ("Shard", "_StridedShard"):
            continue
        order, before = orders.setdefault(placement.dim, []), 1
        split = getattr(placement, "split_factor", 1)
        for at in range(len(order) + 1):
            if before == split:
                order.insert(at, mesh_dim)
                break
            before *= sizes[order[at]] if at < len(order) else 1
        else:
            return None
    return orders


def merged(orders: dict[int, list[int]], ndim: int) -> list[int]:
    """The mesh dimensions in an order that has each of the chains in it, else as they were."""
    follows = {b: a for chain in orders.values() for a, b in itertools.pairwise(chain)}
    result, left = [], list(range(ndim))
    while left:
        result.append(next(d for d in left if follows.get(d) is None or follows[d] in result))
        left.remove(result[-1])
    return result


def ordered(spec: Any, shape: tuple[int, ...], path: KeyPath) -> tuple[list[str], Ranks, list[str]]:
    """(names, ranks, words) of a DTensor's own mesh."""
    names, ranks = meshes.array_of(spec.mesh)
    words = [word(p, path, len(shape)) for p in spec.placements]
    strided = [p for p, n in zip(spec.placements, ranks.shape) if n > 1 and type(p).__name__ == "_StridedShard"]
    orders = None
    if strided:
        even = all(shape[p.dim] % p.split_factor == 0 for p in strided)
        if not even and getattr(spec, "use_strided_shard_as_shard_order", True) is not False:
            orders = cut_order(spec.placements, ranks.shape)
            if orders is None:
                raise Refused(path, f"no order of cutting gives the placements {spec.placements} on "
                                    f"{dict(zip(names, ranks.shape))}")
    elif getattr(spec, "shard_order", None):
        orders = {entry.tensor_dim: list(entry.mesh_dims) for entry in spec.shard_order}
    if orders is None or all(chain == sorted(chain) for chain in orders.values()):
        return names, ranks, words
    words = ["S(" + w[3:].split(",")[0] + ")" if w.startswith("SS(") else w for w in words]
    order = merged(orders, ranks.ndim)
    return [names[d] for d in order], ranks.transpose(order), [words[d] for d in order]


def root_of(mesh: Any) -> Any:
    for find in ("_get_root_mesh", "get_root_mesh"):
        if hasattr(mesh, find):
            return getattr(mesh, find)()
    try:
        from torch.distributed.device_mesh import _mesh_resources
        return _mesh_resources.get_root_mesh(mesh)
    except (ImportError, AttributeError):
        return mesh


# what layout_of was asked -> (the meshes asked of, which must live on; native mesh; words)
_layouts: dict[Any, tuple[Any, _lib.Mesh, str]] = {}


def layout_of(spec: Any, shape: tuple[int, ...], save_mesh: SaveMesh | None, path: KeyPath) -> Layout:
    """save_mesh: (names, ranks, native) of the save's mesh; None: all ranks, in the shape of the mesh that this one is
    a slice of. torch computes the ranks of a mesh anew at each look, in a fraction of a millisecond, so answers are
    kept."""
    strided = any(type(p).__name__ == "_StridedShard" for p in spec.placements)
    key = (id(spec.mesh), spec.placements, getattr(spec, "shard_order", None),
           getattr(spec, "use_strided_shard_as_shard_order", None),
           shape if strided else len(shape), save_mesh and save_mesh[2])
    if key not in _layouts:
        _layouts[key] = spec.mesh, *find_layout(spec, shape, save_mesh, path)
    return Layout(shape, *_layouts[key][1:])


def find_layout(spec: Any, shape: tuple[int, ...], save_mesh: SaveMesh | None, path: KeyPath) -> tuple[_lib.Mesh, str]:
    names, ranks, words = ordered(spec, shape, path)
    whole: NamedRanks | None = save_mesh[:2] if save_mesh else None
    if whole is None:
        root = root_of(spec.mesh)
        whole = meshes.array_of(root) if root is not None and root is not spec.mesh else None
    names, ranks, before = meshes.placed(whole, (names, ranks))
    return meshes.named(names, ranks), ",".join(["R"] * before + words)


def to_numpy_bytes(tensor: torch.Tensor, path: KeyPath) -> tuple[str, NDArray[Any]]:
    """(word of the dtype, contiguous numpy array of its bytes with the tensor's shape) of a tensor on any device."""
    check_plain(tensor, path)
    number = DTYPES[tensor.dtype]
    held = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = _lib.ITEM_BYTES[number]
    flat = held.reshape(-1).view(torch.uint8).numpy() if held.numel() else np.empty(0, np.uint8)
    return _lib.DTYPES[number] or "", flat.view(f"V{size}").reshape(tuple(held.shape))


def empty(like: torch.Tensor, number: int) -> torch.Tensor:
    """A tensor without values that is cut and placed as `like` is, of the dtype with that number."""
    return torch.empty_like(like.detach(), dtype=TORCH_DTYPES[number], requires_grad=False)


def from_numpy(array: NDArray[Any], number: int) -> torch.Tensor:
    """A tensor over the memory of `array` (bytes of the dtype with that number)."""
    shape = array.shape
    if array.size == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[number])
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(TORCH_DTYPES[number]).reshape(shape)
