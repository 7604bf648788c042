# SPDX-License-Identifier: Apache-2.0
"""Modules and optimizers: what torch's own state-dict functions give for them, so that optimizer state is named by
parameter and FSDP, DDP and their like are taken as torch takes them.

Those functions take a tenth of a second for a thousand parameters, at every save. Mostly they give the very tensors that
stand in the module, under other names. Where that was so the last time (every tensor of the state dict is the memory of one in the
module; an optimizer's state is what its own dicts say), and everything that it was made from is still the same object
(submodules and their classes, parameters, buffers, hooks, names, groups), the answer is taken from the module itself. Anything
else asks torch again. A view holds no reference to the module or optimizer that it is of."""
import operator
import weakref

import torch

from .shard import Refused

WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
OPTIMIZER_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def identical(these, those):
    return len(these) == len(those) and all(map(operator.is_, these, those))


def memory_of(tensor):
    """What makes two tensors the same memory, seen the same way."""
    local = getattr(tensor, "_local_tensor", tensor)
    spec = getattr(tensor, "_spec", None)
    try:
        return local.data_ptr(), local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg(), spec and (spec.mesh, spec.placements)
    except RuntimeError:                    # a tensor without memory of its own
        return id(tensor)


# ---- modules ----

def signature(module):
    """All objects that a module's state dict is made from."""
    found = []
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
    return found


class ModuleView:
    __slots__ = ("signature", "tensors", "buffers")

    def __init__(self, module, taken, buffers):
        """`tensors` is None where the state dict is not simply the module's own tensors."""
        self.signature, self.buffers, self.tensors = signature(module), buffers, None
        own = {memory_of(t): t for part in module.modules() for slots in (part._parameters, part._buffers)
               for t in slots.values() if t is not None}
        if all(isinstance(value, torch.Tensor) and memory_of(value) in own for value in taken.values()):
            self.tensors = {name: own[memory_of(value)] for name, value in taken.items()}


def module_view(module, views):
    """The view of a module as it is now."""
    view = views.get(module)
    if view is None or view.tensors is None or not identical(signature(module), view.signature):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        taken = dict(get_model_state_dict(module))
        view = views[module] = ModuleView(module, taken, buffer_names(module))
        return view, taken if view.tensors is None else view.tensors
    return view, view.tensors


def module_state(module, views):
    """(state dict, names of its buffers)."""
    view, tensors = module_view(module, views)
    return tensors, view.buffers


def buffer_names(module):
    """Names, as the state dict has them, of what is no parameter: statistics that may differ between replicas."""
    try:
        from torch.distributed.checkpoint.state_dict import _get_fqns
        return {fqn for name, _ in module.named_buffers(remove_duplicate=False) for fqn in _get_fqns(module, name)}
    except (ImportError, AttributeError, RuntimeError):
        return {".".join(part for part in name.split(".") if part not in WRAPPERS) for name, _ in module.named_buffers()}


# ---- optimizers ----

class OptimizerView:
    """How torch's answer follows from the optimizer's own dicts: `order` has (parameter, name, keys) of the state, `groups` (keys,
    parameters, names)."""

    __slots__ = ("kind", "hooks", "order", "groups", "module")

    def __init__(self, optimizer, module, taken):
        self.kind, self.hooks, self.module = type(optimizer), hooks_of(optimizer), weakref.ref(module)
        names = [name for group in taken["param_groups"] for name in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_name = dict(zip(names, parameters)) if len(names) == len(parameters) else {}
        self.order = [(by_name.get(name), name, list(state)) for name, state in taken["state"].items()]
        self.groups = [(list(given), list(group["params"]), list(given["params"]))
                       for given, group in zip(taken["param_groups"], optimizer.param_groups)]

    def state(self, optimizer):
        """The answer from the dicts, or None where they are not as they were."""
        if (type(optimizer) is not self.kind or not identical(hooks_of(optimizer), self.hooks) or
                len(optimizer.state) != len(self.order) or len(optimizer.param_groups) != len(self.groups)):
            return None
        result = {"state": {}, "param_groups": []}
        for parameter, name, keys in self.order:
            state = optimizer.state.get(parameter)
            if state is None or list(state) != keys:
                return None
            result["state"][name] = dict(state)
        for (keys, parameters, names), group in zip(self.groups, optimizer.param_groups):
            if len(keys) != len(group) or not identical(group["params"], parameters) or any(key not in group for key in keys):
                return None
            result["param_groups"].append({key: names if key == "params" else group[key] for key in keys})
        return result


def hooks_of(optimizer):
    return [hook for name in OPTIMIZER_HOOKS for hook in (getattr(optimizer, name, None) or {}).values()]


def equal(a, b):
    """Of torch's answer and ours: the same kinds, the same tensors."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and memory_of(a) == memory_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b or repr(a) == repr(b)


def optimizer_state(optimizer, modules, views, path):
    """Named by parameter. modules: all that stand in the state."""
    view = views.get(optimizer)
    if view is not None:
        module = view.module()
        if module is not None and any(one is module for one in modules) and module_view(module, views)[0].tensors is not None:
            found = view.state(optimizer)
            if found is not None:
                return found
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if own <= {id(p) for p in module.parameters()}:
            taken = dict(get_optimizer_state_dict(module, optimizer))
            views.pop(optimizer, None)
            if set(taken) == {"state", "param_groups"}:
                view = OptimizerView(optimizer, module, taken)
                found = view.state(optimizer)
                if found is not None and equal(taken, found):
                    views[optimizer] = view
                    return found
            return taken
    raise Refused(path, "the state has no module with all parameters of this optimizer: give the module too (its parameters name "
                        "the optimizer's state), or what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns")
