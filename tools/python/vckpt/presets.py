# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose frameworks flatten the state and cut it without regard to tensors: Megatron's distributed optimizer,
DeepSpeed's ZeRO-1, 2 and 3, FSDP1. A preset looks at the framework's own bookkeeping and says, for each parameter,
which items of it this rank has and where; that is a SplitOptimizer, for a state in the optimizer's place.

What is saved of it is what is saved of a torch optimizer: state and groups by the names of parameters, each tensor of
the parameter's whole shape. So a step goes on under any of these, under FSDP2 and on one process alike. The fp32 copies
of weights that such frameworks train (the masters) are state as well, `master`.

Nothing of a framework is imported: what is looked at has had these names since Megatron-Core 0.6 and DeepSpeed 0.9."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _lib, meshes
from .shard import Shard
from .tensors import process_group

if TYPE_CHECKING:
    import torch

MASTER, STEP = "master", "step"
HAS_MASTERS = "vckpt.masters"       # beside "state" and "param_groups": a preset put the MASTERs into the state
WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Part(NamedTuple):
    """What this rank has of one parameter."""
    name: str
    shape: tuple[int, ...]              # of the whole parameter
    placements: str | None              # of what is flattened, in the words of docs/layouts.md
    same_dims: str | None               # mesh dimensions along which ranks hold the same
    flat: tuple[int, int]               # the items that this rank has
    group: int                          # of the optimizer
    holder: torch.Tensor | None         # of the inner optimizer: its state has these items ...
    at: int                             # ... from this one on; None: this rank has none

    @staticmethod
    def plain(name: str, shape: Iterable[int], flat: tuple[int, int], group: int, holder: torch.Tensor | None,
              at: int) -> Part:
        """The part of a parameter that nothing but the flattening cuts."""
        found = flat[0] < flat[1]
        return Part(name, tuple(shape), None, None, flat if found else (0, 0), group, holder if found else None,
                    at if found else 0)

    def shard(self, items: torch.Tensor, mesh: Any) -> Shard:
        return Shard(items, shape=self.shape, mesh=mesh, placements=self.placements, flat=self.flat,
                     same_dims=self.same_dims)


class SplitOptimizer:
    """An optimizer of which this rank has parts, as a preset found them. In a state it takes the optimizer's place. The
    presets make it; so may a program whose own optimizer cuts in this way.

    optimizer   with `state` ({tensor: {key: value}}) and `param_groups`
    parts       of all parameters, in the same order at all ranks
    mesh        of the ranks that share the parameters; None: the save's
    master      the tensors that hold state are fp32 copies of the weights, and part of it"""

    def __init__(self, optimizer: Any, parts: Iterable[Part], mesh: Any = None, master: bool = False) -> None:
        self.optimizer, self.parts, self.mesh, self.master = optimizer, list(parts), mesh, master

    def state_dict(self) -> dict[str, Any]:
        """What a save keeps. A count of steps is kept for each parameter, as torch's optimizers do, also where the
        optimizer has one for a whole group."""
        state = {part.name: self.of(part) for part in self.parts}
        groups = [{**{key: value for key, value in group.items() if key not in ("params", STEP)},
                   "params": [part.name for part in self.parts if part.group == number]}
                  for number, group in enumerate(self.optimizer.param_groups)]
        return {"state": {name: found for name, found in state.items() if found}, "param_groups": groups,
                **({HAS_MASTERS: True} if self.master else {})}

    def of(self, part: Part) -> dict[str, Any]:
        """The state of one parameter: Shards, and values that are the same at all ranks. Where this rank has nothing of
        the parameter: empty Shards, for the keys of another parameter."""
        holder = part.holder
        if holder is None:                  # that of another parameter, of the same group if there is one
            others = (one for one in self.parts if one.holder is not None)
            other = min(others, key=lambda one: one.group != part.group, default=part)
            if (holder := other.holder) is None:
                return {}
        kept, group = self.optimizer.state.get(holder, {}), self.optimizer.param_groups[part.group]
        found = {key: part.shard(self.items(part, value), self.mesh) if is_flat(value, holder) else value
                 for key, value in kept.items()}
        if kept and STEP in {**group, **kept}:
            found[STEP] = as_tensor(kept.get(STEP, group.get(STEP)))
        if self.master:
            found[MASTER] = part.shard(self.items(part, holder), self.mesh)
        return found

    def items(self, part: Part, flat: torch.Tensor) -> torch.Tensor:
        count = part.flat[1] - part.flat[0] if part.holder is not None else 0
        return flat.detach().view(-1)[part.at:part.at + count]

    def dtype(self, holder: torch.Tensor, saved: torch.dtype, live: torch.Tensor | None) -> torch.dtype:
        """Of a flat tensor that a load fills. live: the one that the optimizer has. These frameworks' kernels want the
        dtypes that they chose, so what was saved is converted to those."""
        if live is not None:
            return live.dtype
        return holder.dtype if saved.is_floating_point and saved.itemsize > 1 else saved

    @staticmethod
    def options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a saved group that the optimizer's group has."""
        return {key: value for key, value in saved.items()
                if (key in group or key == "initial_lr") and key not in ("params", "param_names", STEP)}

    def take(self, state: Mapping[int, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]],
             steps: Mapping[int, Any], more: Mapping[str, Any]) -> None:
        """What a load has made: the state of each holder, by its id; the groups that were saved; the count of steps of
        each group, by its number; and what was saved beside state and groups. Options that the optimizer's groups do
        not have are left out."""
        for group, saved in zip(self.optimizer.param_groups, groups):
            group.update(self.options(group, saved))
        for number, step in steps.items():
            if self.steps_by_group(number):
                self.optimizer.param_groups[number][STEP] = int(step)
        for part in self.parts:
            found = dict(state.get(id(part.holder), {})) if part.holder is not None else {}
            if not found or part.holder is None:
                continue
            live, step = self.optimizer.state.setdefault(part.holder, {}), found.pop(STEP, None)
            live.update(found)
            if step is not None and not self.steps_by_group(part.group):
                counts = hasattr(live[STEP], "numel") if STEP in live else is_of(self.optimizer, "torch")
                live[STEP] = as_tensor(step) if counts else int(step)

    def steps_by_group(self, number: int) -> bool:
        """Does the optimizer count steps by group? Before the first step only its class shows it."""
        if any(STEP in state for state in self.optimizer.state.values()):
            return False
        return STEP in self.optimizer.param_groups[number] or is_of(self.optimizer, "apex", "transformer_engine")


def without_masters(tree: dict[str, Any]) -> dict[str, Any]:
    """What was saved of an optimizer, without the masters that a preset put there: to an optimizer that trains the
    weights themselves they are no state. What an optimizer calls by that name itself stays."""
    if not tree.get(HAS_MASTERS):
        return tree
    return {**tree, "state": {name: {key: value for key, value in kept.items() if key != MASTER}
                              if type(kept) is dict else kept for name, kept in tree["state"].items()}}


def is_of(thing: Any, *packages: str) -> bool:
    return type(thing).__module__.partition(".")[0] in packages


def as_tensor(value: Any) -> torch.Tensor:
    import torch
    found = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    return found.float().cpu().reshape(())


def is_flat(value: Any, holder: torch.Tensor) -> bool:
    """Has it one item for each item of the holder, or is it a value of all?"""
    return hasattr(value, "numel") and value.ndim > 0 and value.numel() == holder.numel()


# ---- names ----

def names_in(model: Any) -> dict[Any, str]:
    """{parameter: its name as a state dict of the module has it} of a module, of several, or of {name: parameter}."""
    if isinstance(model, Mapping):
        return {parameter: name for name, parameter in model.items()}
    modules = model if isinstance(model, (list, tuple)) else [model]
    return {parameter: clean(name) for module in modules for name, parameter in module.named_parameters()}


def clean(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def named(names: Mapping[Any, str], parameter: Any) -> str:
    if parameter not in names:
        raise _lib.invalid(f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not "
                           "have: give the module, or {name: parameter}, of all that it trains")
    return names[parameter]


def of(thing: Any, framework: str, *attributes: str) -> None:
    """Refuses a thing that lacks these attributes."""
    lacking = [name for name in attributes if not hasattr(thing, name)]
    if lacking:
        raise _lib.invalid(f"{type(thing).__name__} has no {', '.join(lacking)}: expected {framework}")


def place_in(group: Any) -> int:
    """This process's rank in a process group."""
    dist = process_group()
    return 0 if group is None or dist is None else int(dist.get_rank(group))


# ---- Megatron ----

def megatron(optimizer: Any, model: Any, mesh: Any = None, tp: str = "tp", master: bool = True) -> SplitOptimizer:
    """Megatron-Core's DistributedOptimizer (of a ChainedOptimizer give each of its chained_optimizers). All ranks of
    its data-parallel group call this together: they exchange which parameters are in which group.

    model   the model chunk, or a list of them, or {name: parameter}, as the model is saved
    mesh    of the stage, "dp=2,tp=4" (Megatron numbers tensor-parallel neighbours first, so tp comes last)
    tp      the mesh dimension along which tensor parallelism cuts; a name that the mesh lacks: nothing is cut
    master  fp32 weights are kept and loaded; False: they are left as they are (optimizer.reload_model_params() makes
            them from the weights)"""
    of(optimizer, "a DistributedOptimizer of Megatron-Core", "gbuf_ranges", "buffers", "model_param_group_index_map",
       "optimizer")
    names, placed = names_in(model), meshes.given(mesh)
    sizes = dict(zip(placed[0], placed[1].shape)) if placed else {}
    groups = shared_groups(optimizer, names)
    ranges = {parameter: found["param"] for buffer in optimizer.gbuf_ranges for buckets in buffer.values()
              for bucket in buckets for parameter, found in bucket["param_map"].items()}
    parts = []
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            name, here = named(names, parameter), ranges.get(parameter)
            shape, words, same = cut_by_megatron(parameter, sizes, tp)
            holder = None
            if here is not None:
                group, order = optimizer.model_param_group_index_map[parameter]
                holder = optimizer.optimizer.param_groups[group]["params"][order]
            parts.append(Part(name, shape, words, same, (0, 0) if here is None else (here.start, here.end),
                              groups[name], holder, 0))
    return SplitOptimizer(optimizer.optimizer, parts, mesh, master)


def cut_by_megatron(parameter: Any, sizes: Mapping[str, int], tp: str) -> tuple[tuple[int, ...], str | None,
                                                                               str | None]:
    """(whole shape, placements, same_dims) from the attributes that Megatron gives its parameters."""
    shape, many = list(parameter.shape), sizes.get(tp, 1)
    if many == 1:
        return tuple(shape), None, None
    if not getattr(parameter, "tensor_model_parallel", False):
        return tuple(shape), None, tp
    dim, stride = parameter.partition_dim, getattr(parameter, "partition_stride", 1)
    shape[dim] *= many
    cut = f"S({dim})" if stride == 1 else f"IS({dim},{stride})"
    return tuple(shape), ",".join(cut if name == tp else "R" for name in sizes), None


def shared_groups(optimizer: Any, names: Mapping[Any, str]) -> dict[str, int]:
    """{name: number of its group}: a rank knows those of which it has a part."""
    mine = {named(names, parameter): int(place[0])
            for parameter, place in optimizer.model_param_group_index_map.items()}
    dist, group = process_group(), getattr(optimizer, "data_parallel_group", None)
    if group is None or dist is None or dist.get_world_size(group) == 1:
        return mine
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return {name: number for one in found for name, number in one.items()}


# ---- DeepSpeed ----

def zero12(optimizer: Any, model: Any, mesh: Any = None, master: bool = True) -> SplitOptimizer:
    """DeepSpeed's DeepSpeedZeroOptimizer, stages 1 and 2 (engine.optimizer): each group of parameters is one flat
    buffer, of which a rank has an equal part. Arguments as for megatron."""
    of(optimizer, "a DeepSpeedZeroOptimizer of stage 1 or 2", "round_robin_bit16_groups",
       "single_partition_of_fp32_groups", "real_dp_process_group", "optimizer")
    names, parts = names_in(model), []
    for number, parameters in enumerate(optimizer.round_robin_bit16_groups):
        holder = optimizer.single_partition_of_fp32_groups[number]
        begin = place_in(optimizer.real_dp_process_group[number]) * holder.numel()
        end, at = begin + holder.numel(), 0
        for parameter in parameters:
            low, high = max(at, begin), min(at + parameter.numel(), end)
            parts.append(Part.plain(named(names, parameter), parameter.shape, (low - at, high - at), number, holder,
                                    low - begin))
            at += parameter.numel()
    return SplitOptimizer(optimizer.optimizer, parts, mesh, master)


def zero3(optimizer: Any, model: Any, mesh: Any = None, master: bool = True) -> SplitOptimizer:
    """DeepSpeed's DeepSpeedZeroOptimizer_Stage3: each parameter is cut into equal parts, the last of them padded.
    zero3_weights gives the model's."""
    of(optimizer, "a DeepSpeedZeroOptimizer_Stage3", "fp16_groups", "fp32_partitioned_groups_flat",
       "sub_group_to_group_id", "optimizer")
    names, parts, rank = names_in(model), [], place_in(getattr(optimizer, "dp_process_group", None))
    for number, parameters in enumerate(optimizer.fp16_groups):
        holder, at = optimizer.fp32_partitioned_groups_flat[number], 0
        for parameter in parameters:
            parts.append(Part.plain(named(names, parameter), parameter.ds_shape, zero3_range(parameter, rank),
                                    optimizer.sub_group_to_group_id[number], holder, at))
            at += parameter.ds_tensor.numel()
    return SplitOptimizer(optimizer.optimizer, parts, mesh, master)


def zero3_weights(model: Any, group: Any = None, mesh: Any = None) -> dict[str, Shard]:
    """{name: what this rank has of it} of a module whose parameters ZeRO-3 has cut. group: their process group; None:
    all ranks."""
    dist = process_group()
    found, rank = {}, place_in(group if group is not None or dist is None else dist.group.WORLD)
    for parameter, name in names_in(model).items():
        of(parameter, "a parameter that ZeRO-3 has cut", "ds_shape", "ds_numel", "ds_tensor")
        low, high = zero3_range(parameter, rank)
        found[name] = Shard(parameter.ds_tensor.detach().view(-1)[:high - low], shape=tuple(parameter.ds_shape),
                            mesh=mesh, flat=(low, high))
    return found


def zero3_range(parameter: Any, rank: int) -> tuple[int, int]:
    size, whole = int(parameter.ds_tensor.numel()), int(parameter.ds_numel)
    return min(rank * size, whole), min((rank + 1) * size, whole)


# ---- FSDP1 ----

class Flattened(SplitOptimizer):
    """FSDP1's: an optimizer of torch, which is given the dtypes that were saved, through its load_state_dict()."""

    def dtype(self, holder: torch.Tensor, saved: torch.dtype, live: torch.Tensor | None) -> torch.dtype:
        return saved

    def take(self, state: Mapping[int, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]],
             steps: Mapping[int, Any], more: Mapping[str, Any]) -> None:
        from .torch_optimizers import take_state
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        kept = {number: {**self.optimizer.state.get(parameter, {}), **state.get(id(parameter), {})}
                for number, parameter in enumerate(parameters)}
        numbers = iter(range(len(parameters)))
        made = [{**group, **self.options(group, saved), "params": [next(numbers) for _ in group["params"]]}
                for group, saved in zip(self.optimizer.param_groups, groups)]
        take_state(self.optimizer, {**more, "state": {number: found for number, found in kept.items() if found},
                                    "param_groups": made})


def fsdp1(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> SplitOptimizer:
    """The parameters that FullyShardedDataParallel has flattened, and others of the module. vckpt.load uses it by
    itself for an optimizer whose module is in the state."""
    numbers = {id(parameter): number for number, group in enumerate(optimizer.param_groups)
               for parameter in group["params"]}
    parts, flattened = [], set()
    for prefix, one in module.named_modules():
        flat = getattr(getattr(one, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        flattened.add(id(flat))
        originals = flat._params or [None] * len(flat._fqns)
        for fqn, shape, place, parameter in zip(flat._fqns, flat._shapes, flat._shard_param_infos, originals):
            holder = flat if id(flat) in numbers else parameter
            if holder is None or id(holder) not in numbers:
                continue
            flattened.add(id(holder))
            items = (place.intra_param_start_idx, place.intra_param_end_idx + 1) if place.in_shard else (0, 0)
            parts.append(Part.plain(clean(f"{prefix}.{fqn}" if prefix else fqn), shape, items, numbers[id(holder)],
                                    holder, place.offset_in_shard if holder is flat else 0))
    parts += [Part(name, tuple(parameter.shape), None, None, (0, parameter.numel()), numbers[id(parameter)], parameter,
                   0) for parameter, name in names_in(module).items() if id(parameter) in numbers
              and id(parameter) not in flattened]
    return Flattened(optimizer, parts)
