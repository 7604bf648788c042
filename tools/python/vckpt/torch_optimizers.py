# SPDX-License-Identifier: Apache-2.0
"""Optimizers: their state by the names of their parameters, as torch's get_optimizer_state_dict gives it. That function
is never called: of an optimizer that has no state yet it makes a step (pytorch#164929), which counts, runs hooks, and
changes weights. So the state is the optimizer's own state_dict(), and the names are found here; only FSDP1, which alone
can take apart its flattened parameters, is asked for them (FSDP.optim_state_dict, which makes no step).

Names. Where one module of the state has all parameters, its names count. Otherwise each parameter is named by its place
in the state: the path of a module before its own name, the path of a tensor that is a parameter by itself; so an
optimizer over `actor` and `critic` is named as that of torch.nn.ModuleDict({"actor": …, "critic": …}) would be. A dict
with tensors over the parameters' own memory (a module's state_dict()) names them as the module would. A parameter given
as a vckpt.Shard lends its layout to the state that is kept for it.

ZeroRedundancyOptimizer has the state of each parameter at one rank, which alone keeps it, under its name.

What was found is a View: with it the next answer comes from the optimizer's own dicts, as long as everything that it
follows from is as it was. A view holds no reference to the optimizer or a module."""
from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from . import presets
from .shard import Refused, Shard, Where
from .torch_modules import COMPILED, Names, Views, identical, is_torchs, module_view, parameter_names
from .values_text import KeyPath

Found: TypeAlias = "tuple[Names, list[Source] | None, torch.nn.Module | None, dict[int, Shard]]"

ONE_MODULE = ("parameters that FSDP1 has flattened are named by one module only: give one module that has all of this "
              "optimizer's")
HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


# ---- names ----

class Source:
    """A module or a tensor of the state that gave names."""

    __slots__ = ("path", "object", "view")

    def __init__(self, path: KeyPath, found: Any, views: Views) -> None:
        self.path, self.object = path, weakref.ref(found)
        self.view = module_view(found, views)[0] if isinstance(found, torch.nn.Module) else None

    def holds(self, state: Mapping[str, Any], views: Views) -> bool:
        """Is the object still there, and is it what it was?"""
        found = self.object()
        at = state
        for key in self.path:
            try:
                at = at[key]
            except (KeyError, IndexError, TypeError):
                return False
        if found is None or at is not found:
            return False
        return self.view is None or (self.view.tensors is not None and module_view(found, views)[0] is self.view)


def holders(state: Mapping[str, Any]) -> tuple[list[tuple[KeyPath, torch.nn.Module]], list[tuple[KeyPath, Any]],
                                               list[tuple[KeyPath, dict[Any, Any]]]]:
    """[(path, module)] of a state, [(path, tensor or Shard of one)], and [(path, dict)], wherever they are in dicts,
    lists and tuples; outer ones first."""
    modules: list[tuple[KeyPath, torch.nn.Module]] = []
    tensors: list[tuple[KeyPath, Any]] = []
    dicts: list[tuple[KeyPath, dict[Any, Any]]] = []
    open_: list[tuple[KeyPath, Any]] = [((), state)]
    seen: set[int] = set()
    for path, value in open_:
        if isinstance(value, torch.nn.Module):
            modules.append((path, value))
        elif isinstance(tensor_in(value), torch.Tensor):
            tensors.append((path, value))
        # perhaps a cycle, which is refused elsewhere
        elif isinstance(value, (dict, list, tuple)) and id(value) in seen:
            continue
        elif isinstance(value, dict):
            seen.add(id(value))
            dicts.append((path, value))
            open_ += [((*path, key), item) for key, item in value.items()]
        elif type(value) in (list, tuple):
            seen.add(id(value))
            open_ += [((*path, number), item) for number, item in enumerate(value)]
    return modules, tensors, dicts


def tensor_in(value: Any) -> Any:
    return value.tensor if type(value) is Shard else value


def place_of(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same memory, also where they have no items."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage()._cdata, local.storage_offset(), local.dtype, local.shape, local.stride()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return id(tensor)


class ByMemory:
    """Which parameter a tensor is, or shares its memory with."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.by_id = {id(parameter): id(parameter) for parameter in parameters}
        self.by_place: dict[object, int | None] = {}
        for parameter in parameters:
            place = place_of(parameter)
            self.by_place[place] = None if place in self.by_place else id(parameter)     # two share it: neither

    def __call__(self, value: Any) -> int | None:
        tensor = tensor_in(value)
        return self.by_id.get(id(tensor)) or self.by_place.get(place_of(tensor))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def find_names(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], views: Views, path: Where) -> Found:
    """({id of a parameter: its names}, [Source] or None, the module that has them all or None, {id of a parameter: its
    Shard})."""
    wanted = {id(parameter) for parameter in parameters_of(optimizer)}
    modules, tensors, dicts = holders(state)
    known = [(where, module, parameter_names(module)) for where, module in modules]
    for where, module, names in known:
        if wanted <= names.keys():
            return names, [Source(where, module, views)], module, {}
    which = ByMemory(parameters_of(optimizer))
    for where, items in dicts:
        names, shards = named_in(items, which)
        if wanted <= names.keys() and where:
            return names, None, None, shards
    found, sources = {}, []
    known.sort(key=lambda one: (-len(wanted & one[2].keys()), list(map(str, one[0]))))       # the same at all ranks
    for where, module, names in known:
        new = {key: [".".join(map(str, (*where, name))) for name in names[key]] for key in names.keys() & wanted
               if key not in found}
        found.update(new)
        if new:
            sources.append(Source(where, module, views))
    shards, lasting = {}, True
    for where, value in tensors:
        key = which(value)
        if key is not None and key not in found:
            found[key] = [".".join(map(str, where))]
            if type(value) is Shard:
                shards[key] = value
            lasting = lasting and id(value) == key
            if lasting:
                sources.append(Source(where, value, views))
    check_names(optimizer, found, path)
    return found, sources if lasting else None, None, shards


def named_in(items: dict[Any, Any], which: ByMemory) -> tuple[Names, dict[int, Shard]]:
    """({id of a parameter: its names}, {id of a parameter: its Shard}) of a dict with tensors."""
    names, shards = {}, {}
    for key, value in items.items():
        parameter = which(value) if isinstance(tensor_in(value), torch.Tensor) else None
        if parameter is not None and parameter not in names:
            names[parameter] = [str(key)]
            if type(value) is Shard:
                shards[parameter] = value
    return names, shards


def check_names(optimizer: torch.optim.Optimizer, names: Names, path: Where) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise Refused(path, f"its parameter {place} of group {number}, of shape {list(parameter.shape)}, is in "
                              "no module of the state and is no tensor of it: add the optimizer's module to the state, "
                              "or a dict with these very tensors (their names come from there)")
    seen: dict[str, int] = {}
    for key, given in names.items():
        for name in given:
            if seen.setdefault(name, key) != key:
                raise Refused(path, f'two of its parameters would be called "{name}": rename a key of the state')


# ---- state ----

def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Does the optimizer keep the state of each parameter at one rank only?"""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def refuse_odd(optimizer: torch.optim.Optimizer, path: Where) -> None:
    known = {id(parameter) for parameter in parameters_of(optimizer)}
    for key in optimizer.state:
        if isinstance(key, torch.Tensor) and id(key) not in known:
            raise Refused(path, f"it has state of a parameter of shape {list(key.shape)} that is in none of its "
                                "groups: delete that from its `state`")


def own_state(optimizer: torch.optim.Optimizer, path: Where) -> tuple[dict[str, Any], dict[str, Any]]:
    """(The optimizer's own state_dict(), what it has beside "state" and "param_groups": a loss scale, a hook's
    values.)"""
    taken = optimizer.state_dict()
    if (not isinstance(taken, dict) or not isinstance(taken.get("state"), dict)
            or not isinstance(taken.get("param_groups"), list)):
        raise Refused(path, f'the state_dict() of {type(optimizer).__name__} has no "state" and "param_groups", so the '
                            "parameters' names cannot be put into it: put its state_dict() into the state instead of "
                            "the optimizer")
    return taken, {key: value for key, value in taken.items() if key not in ("state", "param_groups")}


def named(optimizer: torch.optim.Optimizer, names: Names, path: Where) -> dict[str, Any]:
    """The optimizer's own state_dict(), by names."""
    taken, more = own_state(optimizer, path)
    order = [names[id(parameter)] for parameter in parameters_of(optimizer)]
    result = {"state": {}, "param_groups": [], **more}
    for key, value in taken["state"].items():
        result["state"][order[key][0] if type(key) is int and key < len(order) else key] = value
    for group in taken["param_groups"]:
        result["param_groups"].append({**group,
                                       "params": [name for number in group["params"] for name in order[number]]})
    return result


def of_zero(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The part of the state that this rank has, with the groups of all ranks. They are the outer optimizer's groups,
    because schedulers set lr and the like there."""
    alone = Shard(torch.empty(0), alone=True)
    state = {names[id(parameter)][0] if isinstance(parameter, torch.Tensor) else parameter: as_shard(values, alone)
             for parameter, values in (optimizer.optim.state if hasattr(optimizer, "optim") else {}).items()}
    groups = [{**group, "params": [name for parameter in group["params"] for name in names[id(parameter)]]}
              for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def as_shard(value: Any, shard: Shard) -> Any:
    """The state of a parameter, with the tensors of the parameter's shape wrapped in a Shard like the parameter. If one
    rank alone has the parameter, all its tensors are wrapped."""
    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (shard.alone or value.shape == shard.tensor.shape):
            return value
        return Shard(value, alone=True) if shard.alone else shard._of(value)
    return mapped(value, wrapped)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """function(value), and of dicts, lists and tuples the same with function(part) for all that is in them."""
    kind = type(value)
    if kind is dict:
        return {key: mapped(item, function) for key, item in value.items()}
    return kind(mapped(item, function) for item in value) if kind in (list, tuple) else function(value)


def flattened_in(found: Found, path: Where) -> torch.nn.Module | None:
    """The module that has all parameters of an optimizer, if any part of the modules that have some is under FSDP1."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    modules: list[Any] = [source.object() for source in found[1] or () if source.view is not None and kind is not None]
    if not any(isinstance(part, kind) for module in modules for part in module.modules()):
        return None
    if found[2] is None:
        raise Refused(path, ONE_MODULE)
    return found[2]


def of_flattened(module: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Where) -> dict[str, Any]:
    """What get_optimizer_state_dict does of an optimizer of such a module, without the step."""
    import warnings

    from torch.distributed import fsdp
    kind = fsdp.FullyShardedDataParallel
    root = next(part for part in module.modules() if isinstance(part, kind))
    group = root.process_group
    hybrid = isinstance(group, tuple) or "HYBRID" in root.sharding_strategy.name
    own, more = own_state(optimizer, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with kind.state_dict_type(module, fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(),
                                  fsdp.ShardedOptimStateDictConfig()):
            taken = kind.optim_state_dict(module, optimizer, {key: own[key] for key in ("state", "param_groups")},
                                          group=None if hybrid else group)
    clean = {key.replace("_orig_mod.", "") if isinstance(key, str) else key: value
             for key, value in taken["state"].items()}
    groups = [{**group, "params": [name.replace("_orig_mod.", "") for name in group["params"]]}
              for group in taken["param_groups"]]
    return {"state": clean, "param_groups": groups, **more}


class View:
    """How the answer follows from the optimizer's own dicts: `order` has (parameter or key, name, keys) of the state,
    `groups` (keys, parameters, names)."""

    __slots__ = ("kind", "hooks", "order", "groups", "sources")

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names, sources: list[Source],
                 taken: dict[str, Any]) -> None:
        self.kind, self.hooks, self.sources = type(optimizer), hooks_of(optimizer), sources
        by_name = {names[id(parameter)][0]: parameter for parameter in parameters_of(optimizer)}
        self.order = [(by_name.get(name, name), name, list(state)) for name, state in taken["state"].items()]
        self.groups = [(list(given), list(group["params"]), list(given["params"]))
                       for given, group in zip(taken["param_groups"], optimizer.param_groups)]

    def answer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """The answer, made from the dicts; None if they are not as they were."""
        if (type(optimizer) is not self.kind or not identical(hooks_of(optimizer), self.hooks)
                or len(optimizer.state) != len(self.order) or len(optimizer.param_groups) != len(self.groups)):
            return None
        result: dict[str, Any] = {"state": {}, "param_groups": []}
        for key, name, keys in self.order:
            state = optimizer.state.get(key)
            if state is None or list(state) != keys:
                return None
            result["state"][name] = dict(state)
        for (keys, parameters, names), group in zip(self.groups, optimizer.param_groups):
            if (len(keys) != len(group) or not identical(group["params"], parameters)
                    or any(key not in group for key in keys)):
                return None
            result["param_groups"].append({key: names if key == "params" else group[key] for key in keys})
        return result


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [hook for name in HOOKS for hook in (getattr(optimizer, name, None) or {}).values()]


def equal(a: Any, b: Any) -> bool:
    """Have two answers the same kinds of values and the same tensors?"""
    from .torch_modules import memory_of
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and memory_of(a) == memory_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b or repr(a) == repr(b)


def optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], views: Views, path: KeyPath,
                    own: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """{"state": {name: …}, "param_groups": […]}; nothing of the optimizer is changed. state: what is saved, its modules
    among it. own is called where the ranks have different ones by design."""
    if is_zero(optimizer):
        own()
        return of_zero(optimizer, find_names(optimizer, state, views, path)[0])
    view: View | None = views.get(optimizer)
    if view is not None and all(source.holds(state, views) for source in view.sources):
        known = view.answer(optimizer)
        if known is not None:
            return known
    views.pop(optimizer, None)
    refuse_odd(optimizer, path)
    found = find_names(optimizer, state, views, path)
    module = flattened_in(found, path)
    if module is not None:
        return of_flattened(module, optimizer, path)
    names, sources, _, shards = found
    taken = named(optimizer, names, path)
    if any(shard.alone for shard in shards.values()):
        own()
    for key, shard in shards.items():
        name = names[key][0]
        if name in taken["state"]:
            taken["state"][name] = as_shard(taken["state"][name], shard)
    # its answer follows from the dicts
    plain = is_torchs(optimizer.state_dict) and all(map(is_torchs, hooks_of(optimizer)))
    if sources is not None and plain and all(isinstance(value, dict) for value in taken["state"].values()):
        view = View(optimizer, names, sources, taken)
        known = view.answer(optimizer)
        if known is not None and equal(taken, known):
            views[optimizer] = view
            return known
    return taken


def ordered_names(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    """The names of an optimizer's parameters, in the order of its groups."""
    refuse_odd(optimizer, "the optimizer")
    names = find_names(optimizer, state, weakref.WeakKeyDictionary(), "the optimizer")[0]
    return [name for parameter in parameters_of(optimizer) for name in names[id(parameter)]]


# ---- the way back ----

def flattened_module(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], views: Views,
                     path: KeyPath) -> torch.nn.Module | None:
    """The module whose parameters the optimizer has, if FSDP1 has flattened any of them."""
    if sys.modules.get("torch.distributed.fsdp") is None or is_zero(optimizer):
        return None
    return flattened_in(find_names(optimizer, state, views, path), path)


def checked(trees: list[Any], order: list[list[str]], path: KeyPath) -> list[Any]:
    """Trees of optimizers. order: names by group, for what DCP has flattened."""
    names = {name for group in order for name in group}
    trees = [by_parameter(tree) for tree in trees]
    if not all(map(is_optimizer, trees)):
        raise Refused(path, 'what the step has there is no optimizer, which would be a dict with "state" and '
                            '"param_groups": leave it out of the state to load the rest, or give what was saved there')
    return [decompiled(regrouped(tree, order), names) for tree in trees]


def is_optimizer(tree: Any) -> bool:
    """Is it what was saved of one? Its groups may be by parameter, as DCP keeps them."""
    if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
        return False
    groups = tree.get("param_groups")
    if isinstance(groups, dict):
        return all(isinstance(options, dict) for options in groups.values())
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), (list, tuple))
        and all(isinstance(name, (str, int)) for name in group["params"]) for group in groups)


def by_parameter(found: Any) -> Any:
    """A state that get_state_dict has flattened, with a level for each parameter again; its groups stay by
    parameter."""
    flat = "state.", "param_groups."
    if type(found) is not dict or not found or not all(isinstance(key, str) and key.startswith(flat) for key in found):
        return found
    made: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for key, value in found.items():
        kind, _, rest = key.partition(".")
        name, _, option = rest.rpartition(".")
        made[kind].setdefault(name, {})[option] = value
    return made


def decompiled(tree: Any, known: set[str]) -> Any:
    """Names that were saved with what torch.compile puts into them, as earlier versions left them inside of other
    wrappers, where the optimizer knows them without."""
    def name(one: Any) -> Any:
        plain = one.replace(COMPILED, "") if isinstance(one, str) else one
        return plain if one not in known and plain in known else one
    groups = [{**group, "params": [name(one) for one in group["params"]]} for group in tree["param_groups"]]
    return {**tree, "state": {name(key): value for key, value in tree["state"].items()}, "param_groups": groups}


def regrouped(tree: Any, order: list[list[str]]) -> Any:
    """DCP keeps a flattened optimizer's options for each parameter: in groups as this optimizer has them, where all of
    one group have the same."""
    options = tree["param_groups"]
    if not isinstance(options, dict):
        return tree
    groups: list[dict[str, Any]] = []
    for names in order:
        made: list[dict[str, Any]] = []
        for name in names:
            mine = options.get(name, made[0] if made else {})
            group = next((one for one in made if all(one.get(key) == value for key, value in mine.items()
                                                     if key != "params")), None)
            if group is None:
                made.append(group := {**mine, "params": []})
            if name in options:
                group["params"].append(name)
        groups += made
    if groups:
        mine = {name for names in order for name in names}
        groups[0]["params"] += [name for name in options if name not in mine]
    return {**tree, "param_groups": groups}


class Compared:
    """What ranks saved of an optimizer, beside one that is to have it. names: of the saved parameters; missing,
    unexpected: of them; wrong: a sentence, or None."""

    def __init__(self, trees: list[Any], groups: list[Any], order: list[list[str]], numbered: str) -> None:
        """groups: those of a tree that count; order: names of the optimizer's parameters by group; numbered: what to do
        where the step has numbers in the place of names."""
        self.trees, self.groups, self.order = trees, groups, order
        self.known = {name for tree in trees for group in _by_group(tree["param_groups"]) for name in group}
        saved, mine = _by_group(groups), dict.fromkeys(name for group in order for name in group)
        self.names = sorted(map(str, self.known))       # the same at all ranks, whatever groups they have
        self.missing = [name for name in mine if name not in self.known]
        self.unexpected = [str(name) for group in saved for name in group if name not in mine]
        self.wrong = None
        if any(type(name) is int for name in self.known):
            self.missing, self.unexpected = [], []
            self.wrong = f"its parameters have numbers in the step, not names, for its state_dict() was saved{numbered}"
        elif len(saved) != len(order):
            self.wrong = f"it has {len(saved)} groups of parameters in the step and {len(order)} in the state"
        elif any((set(names) & self.known) - self.saved_in_group(number) for number, names in enumerate(order)):
            self.wrong = "its groups have other parameters in the step than in the state"

    def saved_in_group(self, number: int) -> set[Any]:
        """Names of the parameters that a rank had in its group of that number."""
        return {name for tree in self.trees for names in _by_group(tree["param_groups"][number:number + 1])
                for name in names}


class Restored(Compared):
    """What goes into an optimizer from the trees that ranks saved of it: one, or several where each rank has a part (a
    pipeline's stage, experts, ZeroRedundancyOptimizer). Not through torch's set_optimizer_state_dict: of an optimizer
    that has no state yet it makes a step first (pytorch#164929)."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], views: Views, path: KeyPath,
                 trees: list[Any]) -> None:
        refuse_odd(optimizer, path)
        names, _, _, self.shards = find_names(optimizer, state, views, path)
        order = [[names[id(parameter)][0] for parameter in group["params"]] for group in optimizer.param_groups]
        self.optimizer, trees = optimizer, checked(trees, order, path)
        found = [tree["param_groups"] for tree in trees]
        super().__init__(trees, next((one for one in found if _by_group(one) == order), found[0]), order,
                         ": give that to load as well, and what comes back in `values` to load_state_dict()")
        lacking = sorted({key for group in self.groups for key in options_lacking(optimizer, group)})
        if lacking and not self.wrong:
            self.wrong = (f"an optimizer of another kind was saved: its groups have no {', '.join(lacking)}; give one "
                          "of the kind that was saved, or leave it out of the state (where its class is your own and "
                          "has a new option, fill that in by __setstate__)")

    def made(self, built: Callable[..., Any]) -> dict[str, Any]:
        """What the optimizer's load_state_dict() gets. built: (part of a tree, the parameter that it is of or None) ->
        the part with its tensors."""
        kept, state, groups, parameters, missing = {}, {}, [], parameters_of(self.optimizer), set(self.missing)
        for tree in self.trees:
            kept.update(presets.without_masters(tree)["state"])
        for number, (name, parameter) in enumerate(zip([name for group in self.order for name in group], parameters)):
            if name in kept:
                state[number] = built(kept[name], self.shards.get(id(parameter), parameter))
            elif name in missing and self.optimizer.state.get(parameter):       # stays as it is
                state[number] = self.optimizer.state[parameter]
        # keys of the program's own
        state.update((key, built(value)) for key, value in kept.items() if key not in self.known)
        place = 0
        # param_names: the optimizer's own stay, as its parameters do
        for names, saved in zip(self.order, self.groups):
            groups.append({**{key: built(value) for key, value in saved.items()
                              if key not in ("params", "param_names")},
                           "params": list(range(place, place + len(names)))})
            place += len(names)
        more = {key: built(value) for key, value in self.trees[0].items()
                if key not in ("state", "param_groups", presets.HAS_MASTERS)}
        return {**more, "state": state, "param_groups": groups}


class Held:
    """Around a value of a parameter's state that torch's load_state_dict would take for a list, and make anew from its
    items: a text becomes "<generator object …>", a deque loses its maxlen, a named tuple is an error."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def held(value: Any) -> Any:
    return Held(value) if not isinstance(value, torch.Tensor) and isinstance(value, Iterable) else value


def take_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads by the optimizer's load_state_dict(), so that its hooks run; each value as it was saved. For a class with a
    load_state_dict() of its own only tensors are kept so: where it puts the rest is not known."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        with dtypes_kept():
            optimizer.load_state_dict(state)
        return
    with dtypes_kept():
        optimizer.load_state_dict({**state, "state": mapped(state["state"], held)})
    for key, value in optimizer.state.items():
        optimizer.state[key] = mapped(value, lambda part: part.value if type(part) is Held else part)


_casting = threading.RLock()


@contextlib.contextmanager
def dtypes_kept() -> Iterator[None]:
    """While an optimizer of this thread loads its state, tensors keep their dtype. torch's Optimizer.load_state_dict
    casts floating ones, and under floating parameters all others too, to the parameter's dtype: fp32 moments and
    counters under bf16 parameters would not be what was saved. The rule is replaced where torch has it, because an
    optimizer may get there in a load_state_dict() of its own, or by way of one that it wraps."""
    name, owner = "_process_value_according_to_param_policy", threading.get_ident()
    where: list[Any] = []                   # the groups, and {number of a parameter: its group}
    torchs = getattr(torch.optim.Optimizer, name, None)
    if torchs is None:                      # torch before 2.0
        yield
        return

    def kept(param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list[dict[Any, Any]],
             key: Any = None) -> Any:
        if threading.get_ident() != owner:
            return torchs(param, value, param_id, param_groups, key)
        if key != "step":
            return value.to(device=param.device)
        if not where or where[0] is not param_groups:
            where[:] = [param_groups, {one: group for group in reversed(param_groups) for one in group["params"]}]
        group = where[1].get(param_id, {})
        on_host = not (group.get("capturable") or group.get("fused"))
        return value if on_host else value.to(device=param.device)
    with _casting:
        setattr(torch.optim.Optimizer, name, staticmethod(kept))
        try:
            yield
        finally:
            setattr(torch.optim.Optimizer, name, staticmethod(torchs))


def options_lacking(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> list[str]:
    """Options that a saved group does not have, and that the optimizer's class does not fill in. torch's do so for
    options that newer versions added."""
    if is_zero(optimizer):
        optimizer = optimizer.optim
    probe, group = object.__new__(type(optimizer)), {**saved, "params": []}
    try:
        probe.__setstate__({"state": {}, "param_groups": [group], "defaults": dict(optimizer.defaults)})
    # a class of one's own, which needs more of itself than that: it says so when it is filled
    except Exception:
        return []
    # torch adds to the defaults, but not to the groups, of an optimizer whose state was loaded or copied before
    return [key for key in optimizer.defaults if key not in group
            and all(key in live for live in optimizer.param_groups)]


def _by_group(groups: list[dict[str, Any]]) -> list[list[Any]]:
    return [list(group["params"]) for group in groups]
