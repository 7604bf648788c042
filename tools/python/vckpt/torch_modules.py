# SPDX-License-Identifier: Apache-2.0
"""Modules: what torch's own state-dict functions give for them, so that FSDP, DDP and their like are taken as torch
takes them, and the names of their parameters, which optimizers' state goes by (torch_optimizers.py).

Those functions take a tenth of a second for a thousand parameters, at every save. Mostly they give the very tensors
that stand in the module, under other names. Where that was so the last time (every tensor of the state dict is the
memory of one in the module), and everything that it was made from is still the same object (submodules and their
classes, parameters, buffers, hooks, names), the answer is taken from the module itself. Anything else asks torch again;
so does a module whose state dict is made by code besides torch's (its own state_dict(), a hook), because that may give
something else each time. A view holds no reference to the module that it is of."""
from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

Views: TypeAlias = "weakref.WeakKeyDictionary[Any, Any]"       # of modules and optimizers
Names = dict[int, list[str]]    # id of a parameter: its names

WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def identical(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def memory_of(tensor: torch.Tensor) -> object:
    """What makes two tensors the same memory, seen the same way. All tensors without items have the address 0: of two
    sharded ones that have none on this rank the whole shape tells which is which."""
    local = getattr(tensor, "_local_tensor", tensor)
    spec = getattr(tensor, "_spec", None)
    try:
        return (local.data_ptr(), local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg(),
                spec and (spec.mesh, spec.placements, tensor.shape, tensor.stride()))
    except (RuntimeError, ValueError):      # a tensor without memory of its own
        return id(tensor)


def is_torchs(function: Any) -> bool:
    """It is code of torch itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


def set_module_state(module: torch.nn.Module, tensors: dict[str, Any]) -> None:
    """Hands a state dict to a module whose own was no view of its memory; names are those that module_state gives."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    set_model_state_dict(module, tensors, options=StateDictOptions(strict=False))


# ---- modules ----

def is_plain(module: torch.nn.Module) -> bool:
    """Nobody but torch takes part in its state dict."""
    return all(is_torchs(getattr(part, name)) for part in module.modules() for name in METHODS) and all(
        is_torchs(hook) for part in module.modules() for name in HOOKS for hook in part.__dict__.get(name, {}).values())


def signature(module: torch.nn.Module) -> list[object]:
    """All objects that a module's state dict is made from."""
    found: list[object] = []
    for part in module.modules():
        own = part.__dict__
        found.append(type(part))
        for name in ("_parameters", "_buffers", "_modules"):
            slots = own[name]
            found.append(name)
            found += slots
            found += slots.values()
        found += own["_non_persistent_buffers_set"]
        for name in HOOKS:
            found.append(name)
            found += own.get(name, {}).values()
        found += [own.get(name) for name in METHODS]
    return found


class ModuleView:
    __slots__ = ("signature", "tensors", "buffers")

    def __init__(self, module: torch.nn.Module, taken: dict[str, Any], buffers: set[str]) -> None:
        """`tensors` is None where the state dict is not simply the module's own tensors."""
        self.signature: list[object] | None = signature(module)
        self.tensors: dict[str, Any] | None = None
        self.buffers = buffers
        own = {memory_of(t): t for part in module.modules() for slots in (part._parameters, part._buffers)
               for t in slots.values() if t is not None}
        if is_plain(module) and all(isinstance(value, torch.Tensor)
                                    and memory_of(value) in own for value in taken.values()):
            self.tensors = {name: own[memory_of(value)] for name, value in taken.items()}
        else:
            self.signature = None       # never asked, and what others put into the module may refer to it


def module_view(module: torch.nn.Module, views: Views) -> tuple[ModuleView, dict[str, Any]]:
    """The view of a module as it is now."""
    view = views.get(module)
    if view is None or view.tensors is None or not identical(signature(module), view.signature):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        taken = dict(get_model_state_dict(module))
        view = views[module] = ModuleView(module, taken, buffer_names(module))
        return view, taken if view.tensors is None else view.tensors
    return view, view.tensors


def module_state(module: torch.nn.Module, views: Views) -> tuple[dict[str, Any], set[str]]:
    """(state dict, names of its buffers)."""
    view, tensors = module_view(module, views)
    return tensors, view.buffers


def names_of(module: torch.nn.Module, name: str) -> list[str]:
    """The names that torch's state dicts have for the parameter or buffer that named_parameters() calls `name`: one, or
    of a flattened parameter (FSDP1) those of its parts."""
    try:
        from torch.distributed.checkpoint.state_dict import _get_fqns
        return sorted(_get_fqns(module, name))
    except (ImportError, AttributeError, RuntimeError):
        return [".".join(part for part in name.split(".") if part not in WRAPPERS)]


def buffer_names(module: torch.nn.Module) -> set[str]:
    """Names, as the state dict has them, of what is no parameter: statistics that may differ between replicas."""
    return {fqn for name, _ in module.named_buffers(remove_duplicate=False) for fqn in names_of(module, name)}


def parameter_names(module: torch.nn.Module) -> Names:
    """{id of a parameter: its names}"""
    return {id(parameter): names_of(module, name) for name, parameter in module.named_parameters()}
