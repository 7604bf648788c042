# SPDX-License-Identifier: Apache-2.0
"""Modules: what torch's own state-dict functions give for them, so that FSDP, DDP and the like are taken as torch takes
them, and the names of their parameters, under which optimizers' state is kept (torch_optimizers.py).

Those functions take a tenth of a second for a thousand parameters, at every save. Mostly they give the very tensors of
the module, under other names. Where that was so the last time (every tensor of the state dict is the memory of one in
the module), and everything that it was made from is still the same object (submodules and their classes, parameters,
buffers, hooks, names), the answer is taken from the module itself. Otherwise torch is asked again; also for a module
whose state dict is made by code besides torch's (its own state_dict(), a hook), because that may give something else
each time. A view holds no reference to its module.

On the way back a module's memory is filled in place, which is what load_state_dict() would do, unless code besides
torch's takes part in loading (`loading`), or torch's own that does more than to copy: observers, lazy modules."""
from __future__ import annotations

import collections
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from . import presets

Views: TypeAlias = "weakref.WeakKeyDictionary[Any, Any]"       # of modules and optimizers
Names = dict[int, list[str]]    # id of a parameter: its names

HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
# classes whose parts torch's state dicts have under other names, and where they are, if they were imported
RENAMING = (("torch.nn.parallel", "DistributedDataParallel"), ("torch.distributed.fsdp", "FullyShardedDataParallel"),
            ("torch._dynamo.eval_frame", "OptimizedModule"))
COMPILED = "_orig_mod."
PREFIXES = ("_checkpoint_wrapped_module.", COMPILED)    # which nothing is called by
# of torch, and no more than copies to where the module has it
COPIES = ("torch.nn.modules.", "torch.distributed.")


def identical(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def memory_of(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same memory, seen the same way. All tensors without items have the address 0:
    two sharded ones that have none on this rank differ in the whole shape."""
    local = getattr(tensor, "_local_tensor", tensor)
    spec = getattr(tensor, "_spec", None)
    try:
        return (local.data_ptr(), local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg(),
                spec and (spec.mesh, spec.placements, tensor.shape, tensor.stride()))
    except (RuntimeError, ValueError):      # a tensor without memory of its own
        return id(tensor)


def is_torchs(function: Any, within: str | tuple[str, ...] = "torch.") -> bool:
    """Is it code of torch itself?"""
    while isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__module__', None)}.".startswith(within)


# ---- modules ----

def is_plain(parts: Sequence[torch.nn.Module]) -> bool:
    """Only torch's code takes part in the state dict of a module with these parts."""
    return (all(is_torchs(getattr(kind, name)) for kind in set(map(type, parts)) for name in METHODS)
            and all(is_torchs(part.__dict__[name]) for part in parts for name in METHODS if name in part.__dict__)
            and all(is_torchs(hook) for part in parts for name in HOOKS
                    for hook in part.__dict__.get(name, {}).values()))


def keeps_names(parts: Iterable[torch.nn.Module]) -> bool:
    """Do torch's state dicts have all parts under the names that the module itself has for them, but for PREFIXES?"""
    known = tuple(getattr(sys.modules[name], kind) for name, kind in RENAMING if hasattr(sys.modules.get(name), kind))
    return not any(isinstance(part, known) or "_fqn_modifiers" in part.__dict__ or hasattr(type(part), "_fqn_modifiers")
                   for part in parts)


def own_state(module: torch.nn.Module) -> dict[str, Any] | None:
    """What torch's functions give of a module, where that is its own tensors under its own names. None: only those
    functions know."""
    parts = list(module.modules())
    if not is_plain(parts) or not keeps_names(parts):
        return None
    found = module.state_dict(keep_vars=True)
    own = {id(one) for part in parts for kept in (part._parameters, part._buffers) for one in kept.values()}
    if not found or not own.issuperset(map(id, found.values())):
        return None
    return None if any(prefix in name for name in found for prefix in PREFIXES) else found


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


def asked_state(module: torch.nn.Module) -> dict[str, Any]:
    """What torch's functions give of a module. They call its state_dict() and rename what wrappers hold; to import them
    takes a second and hundreds of modules, so where nothing is renamed state_dict() is called without them."""
    found: dict[str, Any]
    if keeps_names(module.modules()):
        found = module.state_dict()
        if not any(prefix in name for name in found for prefix in PREFIXES):
            return found
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    found = get_model_state_dict(module)
    return found


class ModuleView:
    __slots__ = ("signature", "tensors", "buffers", "names", "metadata")

    def __init__(self, module: torch.nn.Module, taken: dict[str, Any], names: dict[str, str], metadata: Any,
                 is_own: bool) -> None:
        """`tensors` is None where the state dict is not simply the module's own tensors. names: {name: torch's}, where
        they differ; metadata: versions of the module's parts, which torch hands to the code that loads them; is_own: it
        is known that they are the module's own."""
        self.names, self.metadata = names, metadata
        self.signature: list[object] | None = signature(module)
        self.tensors: dict[str, Any] | None = None
        self.buffers = buffer_names(module)
        if is_own:
            self.tensors = taken
            return
        own = {memory_of(t): t for part in module.modules() for slots in (part._parameters, part._buffers)
               for t in slots.values() if t is not None}
        if is_plain(list(module.modules())) and all(isinstance(value, torch.Tensor)
                                    and memory_of(value) in own for value in taken.values()):
            self.tensors = {name: own[memory_of(value)] for name, value in taken.items()}
        else:
            self.signature = None       # never asked, and what others put into the module may refer to it


def module_view(module: torch.nn.Module, views: Views) -> tuple[ModuleView, dict[str, Any]]:
    """(The view of a module as it is now, its state dict)."""
    view = views.get(module)
    if view is None or view.tensors is None or not identical(signature(module), view.signature):
        own = own_state(module)
        found = asked_state(module) if own is None else own
        names = {name.replace(COMPILED, ""): name for name in found}
        taken = {name: found[torchs] for name, torchs in names.items()}
        view = views[module] = ModuleView(module, taken,
                                          {name: torchs for name, torchs in names.items() if name != torchs},
                                          getattr(found, "_metadata", None), own is not None)
        return view, taken if view.tensors is None else view.tensors
    return view, view.tensors


def names_of(module: torch.nn.Module, name: str) -> list[str]:
    """The names that torch's state dicts have for the parameter or buffer that named_parameters() calls `name`: one, or
    of a flattened parameter (FSDP1) those of its parts. Without what torch.compile puts before them, which torch leaves
    there inside of other wrappers."""
    try:
        from torch.distributed.checkpoint.state_dict import _get_fqns
        return sorted(fqn.replace(COMPILED, "") for fqn in _get_fqns(module, name))
    except (ImportError, AttributeError, RuntimeError):
        return [presets.clean(name)]


def namer(module: torch.nn.Module) -> Callable[[str], list[str]]:
    """names_of(module, ...), quicker for many names."""
    if not keeps_names(module.modules()):
        return functools.partial(names_of, module)
    return lambda name: [functools.reduce(lambda left, prefix: left.replace(prefix, ""), PREFIXES, name)]


def buffer_names(module: torch.nn.Module) -> set[str]:
    """Names, as the state dict has them, of what is no parameter: statistics that may differ between replicas."""
    names = namer(module)
    return {fqn for name, _ in module.named_buffers(remove_duplicate=False) for fqn in names(name)}


def parameter_names(module: torch.nn.Module) -> Names:
    """{id of a parameter: its names}"""
    names = namer(module)
    return {id(parameter): names(name) for name, parameter in module.named_parameters()}


# ---- the way back ----

def is_lazy(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def loading(module: torch.nn.Module) -> tuple[tuple[str, ...], bool]:
    """(Beginnings of the names of all that load_state_dict() has to load from memory of its own, whether
    load_state_dict() does anything else besides copies). The first are parts with a hook before the load, or with a way
    of loading of their own, which may rename, convert or leave out what they are given, or give themselves another
    shape; the second a hook after the load, extra state."""
    own = [] if is_torchs(module.load_state_dict, COPIES) else [""]
    runs, copies = False, functools.cache(lambda function: is_torchs(function, COPIES))
    names = namer(module)
    for path, part in module.named_modules(remove_duplicate=False):
        slots, kind = part.__dict__, type(part)
        loads, extra = (slots.get(name) or getattr(kind, name) for name in ("_load_from_state_dict", "set_extra_state"))
        before, after = (slots.get(f"_load_state_dict_{when}_hooks", {}).values() for when in ("pre", "post"))
        if not all(map(copies, (loads, *before))) or any(map(is_lazy, (*part._parameters.values(),
                                                                       *part._buffers.values()))):
            own += [f"{name}." for name in names(path)] if path else [""]
        runs = runs or not all(map(copies, (extra, *after)))
    return tuple(dict.fromkeys(own)), runs


def set_module_state(module: torch.nn.Module, tensors: dict[str, Any], view: ModuleView) -> tuple[list[str], list[str]]:
    """Hands a module what module_state would give of it, as load_state_dict does. (Names that it missed, names that it
    did not know.)"""
    given = collections.OrderedDict((view.names.get(name, name), value) for name, value in tensors.items())
    if view.metadata is not None:
        given._metadata = view.metadata         # type: ignore[attr-defined]  # as torch puts it there
    if not keeps_names(module.modules()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        found = set_model_state_dict(module, given, options=StateDictOptions(strict=False))
    else:
        taken = inspect.signature(module.load_state_dict).parameters.values()
        strict = any(one.name == "strict" or one.kind is one.VAR_KEYWORD for one in taken)
        found = module.load_state_dict(given, **({"strict": False} if strict else {}))
    names = {torchs: name for name, torchs in view.names.items()}
    missing, unexpected = ([names.get(name, name) for name in getattr(found, kind, ())]
                           for kind in ("missing_keys", "unexpected_keys"))
    return missing, unexpected
