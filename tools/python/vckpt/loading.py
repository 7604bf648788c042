# SPDX-License-Identifier: Apache-2.0
"""A step back into a job: `load`, the counterpart of `save`.

A load has two halves. Planning walks through the state as a save would, beside the documents of the step, and notes
what to do for each tensor, optimizer and object. What the step lacks and what the state lacks is found here, so that
such an error leaves the state as it was. The second half makes the tensors of optimizers, objects and values; reads
those and the tensors of the state in one load of the library (loading_tensors.py); and with all that has arrived fills
modules and optimizers, then other objects (a loader may look at either), each in the order of the state. The random
number generators come last, because making objects may use random numbers.

`async_load` plans in the call, reads in a thread of its own, and does the rest where it is waited for, since objects
and generators belong to the caller's thread."""
from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import itertools
import operator
import sys
import types as classes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from . import _lib, components, exchange, gaps, meeting, meshes, opening, saver, state as states, values, walk
from .arrays import numpy_dtype
from .claims import Claim, settle
from .exchange import Mode
from .lazy import Stored
from .load_handle import Loaded, LoadHandle, Started
from .loading_tensors import Destination, Fill, Work, assign, convertible, cuda_device, destination, refusal
from .loads import Damage, Direct, How, OnDamage, Verify, Watch, chosen
from .presets import SplitOptimizer
from .records import Record
from .rng import RngState, set_rng_state
from .shard import Shard
from .signatures import Path, State
from .step import Step
from .tensors import dotted, is_tensor, shown as _shown, torch_module, torch_state, uncollected
from .values_text import KeyPath, path_text

if TYPE_CHECKING:
    import torch

    from .torch_modules import ModuleView, Views

Give = Callable[[], Any]        # gives what a place of the state has after the load

ABSENT = Record("vckpt.Absent", {})     # in the place of a part that the step does not have
KNOWN = ("vckpt.", "torch.Generator")   # records without a class
SHOWN = 10                              # names in a sentence


def load(path: Path | Step, state: State, *, strict: bool = True, missing_ok: bool = False, mesh: Any = None,
         types: Iterable[type] | Mapping[str, type] = (), rank: int | None = None, world: int | None = None,
         meet_timeout: float = 600.0, threads: int = 0, verify: Verify = "checks", on_damage: OnDamage = "raise",
         direct: Direct = "auto", exchange: Mode = "never") -> Loaded | None:
    """Fills `state`, which is what a save is given, in place from a step. How many ranks saved it, and in which layout,
    does not matter.

    Modules, tensors, arrays and Shards are filled: each rank reads the boxes that it holds, and converts them where its
    dtype is another than the step's, as torch's load_state_dict does. Modules with hooks or a way of loading of their
    own are loaded by load_state_dict(), and are in the result's `called`. Optimizers get state and groups by the names
    of their parameters; none makes a step for it. Objects get what was saved of them by load_state_dict(). All other
    values are in the result's `values`.

    path        STORE/RUN or STORE/RUN/latest: the newest step; STORE/RUN/STEP; or an open Step: the same commit, even
                if it was replaced since
    strict      what the state has and the step lacks, and tensors that a component of the step has and the state lacks,
                are one error, and nothing is filled; components that only the step has are none, nor is what another
                rank of the process group has. False: what both have is filled, and the result has the two lists
    missing_ok  None where the run has no step, or where there is no store yet, instead of an error
    mesh        as for the save: of Shards that have none
    types       classes that come back as themselves, as for Step.values: dataclasses, enums, named tuples. Where they
                are in the state of optimizers, objects or modules they have to be given
    rank, world where there is no process group, or for a load by one rank of it; each rank opens what it finds by
                itself then: where several do, give all of them the Step of one (its pickle opens the same commit)
    meet_timeout    seconds in which all ranks of the process group have to come
    threads     that read; 0: as many as there are processors that this process may use, divided by the ranks of the
                node, where the launcher says how many those are
    verify      "checks": of each block that is read; "full": the SHA-256 of whole pieces is compared as well
    direct      "yes": what the page cache lacks is read past it, where the file system can; "no": all through it;
                "auto": past it for 1 GiB and more, if no other rank of the node loads beside this one
    on_damage   "raise": damaged data are an error. "skip": the parts of tensors that cannot be read are listed in the
                result's `damaged`, and the rest is filled. What tensors have there is undefined: give it values
    exchange    "always": what several ranks want is read by one of them, which passes it on. "auto": where a short
                measurement says that this is quicker. All ranks of the process group make the call then, with the same
                step; it succeeds at all ranks or fails at all. "never": each rank reads what it needs

    A load is a call of all ranks of the process group, unless rank= and world= are given. They agree on one commit of
    the step through the group's store: if one cannot open it, all raise. Beyond that a load without exchange= sends
    nothing, so a rank that fails later raises alone, and no other waits for it. Generators (vckpt.rng_state()) are set
    back where as many ranks load as saved; else a line on standard error says that they were left as they are, and the
    result's `rng` is False."""
    started = _started(path, state, strict, missing_ok, mesh, types, rank, world, meet_timeout, threads, verify,
                       on_damage, direct, exchange)
    if started is None:
        return None
    with started:
        started.read()
        return started.finished()


def async_load(path: Path | Step, state: State, *, strict: bool = True, missing_ok: bool = False, mesh: Any = None,
               types: Iterable[type] | Mapping[str, type] = (), rank: int | None = None, world: int | None = None,
               meet_timeout: float = 600.0, threads: int = 0, verify: Verify = "checks", on_damage: OnDamage = "raise",
               direct: Direct = "auto", exchange: Mode = "never") -> LoadHandle:
    """As load, but it returns when the ranks have agreed on the step, all that has to fit fits, and the reading has
    begun. The handle's wait() fills what is left, optimizers, objects and generators, and gives what load gives. Until
    then the tensors of the state hold anything, and nothing of it may be used or changed."""
    return LoadHandle(_started(path, state, strict, missing_ok, mesh, types, rank, world, meet_timeout, threads, verify,
                               on_damage, direct, exchange))


def _started(path: Path | Step, state: State, strict: bool, missing_ok: bool, mesh: Any,
             types: Iterable[type] | Mapping[str, type], rank: int | None, world: int | None, meet_timeout: float,
             threads: int, verify: Verify, on_damage: OnDamage, direct: Direct, mode: Mode) -> Started | None:
    """A load up to where reading begins. None: there is no step."""
    rank, world, group = _place(rank, world)
    watch = Watch()
    try:
        how = chosen(threads, verify, on_damage, direct)._replace(world=world, watch=watch)
        exchange.check(mode)
        if mode == "always" and not group:
            raise _lib.invalid("exchange='always' needs a process group of several ranks, and no rank= or world=")
    except BaseException as error:
        if group:
            opening.refuse(path, error)
        raise
    step, held = opening.opened(path, group, mode, missing_ok, meet_timeout)
    if step is None:
        return None
    together = group and mode != "never"
    at = f"{step.store}/{step.run}/{step.number}"
    others = gaps.Gaps(held, at, meet_timeout) if held else None
    try:
        with uncollected():
            plan = _Plan(step, at, components.named(state, (), is_tensor), rank, world, mesh,
                         types if isinstance(types, Mapping) else tuple(types))
            if not others:
                plan.begin(strict)
        if others:
            plan.look_for(others)
            with uncollected():
                plan.begin(strict)
    except BaseException as error:
        if others:
            others.fail(error)
        if together:
            exchange.refuse(at, error)
        step.close()
        raise
    try:
        shared = (exchange.meet(step, mode, plan.work.loads, meet_timeout, plan.work.device) if together else None)
    except BaseException:
        step.close()
        raise
    return Started(step, watch, plan.size(), lambda: plan.read(how._replace(shared=shared)), plan.finish, shared)


def _place(rank: int | None, world: int | None) -> tuple[int, int, bool]:
    """(rank, world, whether they are those of a process group)."""
    if (rank is None) != (world is None):
        raise _lib.invalid("rank= and world= belong together: give both or neither")
    if rank is not None and world is not None:
        return rank, world, False
    group = saver._group()
    if group is None:
        meeting.check_alone("loads", "rank= and world=")
    return *(group or (0, 1)), group is not None and group[1] > 1


# ---- parts of a saved tree ----

def _is_nothing(saved: object) -> bool:
    return isinstance(saved, Record) and saved.type_name in ("vckpt.Absent", "vckpt.PerRank")


def _is_others(saved: object) -> bool:
    return isinstance(saved, Record) and saved.type_name == "vckpt.PerRank"


def _below(saved: Any, key: Any) -> Any:
    """What is under a key. Nothing is known of what other ranks keep for themselves."""
    if type(saved) is dict:
        return saved.get(key, ABSENT)
    if _is_nothing(saved):
        return saved
    fields = saved if isinstance(saved, dict) else _fields(saved) if isinstance(key, str) else None
    if fields is not None:
        return fields.get(key, ABSENT)
    return saved[key] if isinstance(saved, (list, tuple)) and key < len(saved) else ABSENT


def _is_reference(saved: object) -> TypeGuard[Record]:
    return type(saved) is Record and saved._tag == "$tensor"


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _fields(saved: Any) -> Mapping[str, Any] | None:
    """{name: part} of an object that values are read as (a record, or one of the classes of `types`), or None."""
    if isinstance(saved, Record):
        return dict(saved)
    if _is_named_tuple(saved):
        named: dict[str, Any] = saved._asdict()
        return named
    if isinstance(saved, (classes.SimpleNamespace, argparse.Namespace)):
        return vars(saved)
    if dataclasses.is_dataclass(saved) and not isinstance(saved, type):
        return {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved)
                if hasattr(saved, field.name)}
    return None


def _items(saved: Any) -> Iterable[tuple[Any, Any]]:
    if type(saved) in values.SCALARS:
        return ()
    fields = _fields(saved)
    if fields is not None:
        return fields.items()
    if isinstance(saved, Mapping):
        return saved.items()
    return enumerate(saved) if isinstance(saved, (list, tuple, collections.deque)) else ()


def _names(saved: Any, found: set[str] | None = None) -> set[str]:
    """The names of the tensors that a tree refers to."""
    found = set() if found is None else found
    if _is_reference(saved):
        found.add(saved["name"])
    else:
        for _, part in _items(saved):
            _names(part, found)
    return found


def _refers(saved: Any) -> bool:
    """Is there a tensor in the tree?"""
    return _is_reference(saved) or any(_refers(part) for _, part in _items(saved))


def _with_parts(saved: Any, make: Callable[[Any, Any], Any]) -> Any:
    """A container like this one of make(key, part) for each part."""
    if isinstance(saved, Record):
        return Record(saved.type_name, {key: make(key, part) for key, part in saved.items()}, saved.tag)
    if isinstance(saved, dict):
        result = copy.copy(saved)
        result.update((key, make(key, part)) for key, part in saved.items())
        return result
    fields = _fields(saved)
    if fields is not None:
        made = {key: make(key, part) for key, part in fields.items()}
        if _is_named_tuple(saved):
            return type(saved)(**made)
        result = copy.copy(saved)
        for key, part in made.items():
            object.__setattr__(result, key, part)       # frozen ones, too
        return result
    parts = [make(number, part) for number, part in enumerate(saved)]
    return collections.deque(parts, saved.maxlen) if isinstance(saved, collections.deque) else type(saved)(parts)


def _fillable(value: object) -> bool:
    """Is there something in it that a load changes in place?"""
    if is_tensor(value):
        return True
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_fillable, value.values() if isinstance(value, Mapping) else value))
    return (type(value) is RngState or _is_generator(value) or isinstance(value, SplitOptimizer)
            or callable(getattr(value, "load_state_dict", None)))


def _is_generator(value: object) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Generator)


def _same(value: Any) -> Any:
    return value


def _filling(path: KeyPath, call: Callable[[], Any]) -> Any:
    """What the caller's own code gives. What that raises says nothing of the state, so the path is added."""
    try:
        return call()
    except Exception as error:
        walk.noted(error, path, "filled")
        raise


def _in_words(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# ---- one load ----

class _Plan:
    """One rank's part of one load. A part is planned by a method that gives a function: its result is what is there
    afterwards. `claims`: memory of the state that is to be filled; `makes`: functions that make tensors, once nothing
    can refuse the load any more; `fills`: what is read then; `todo`, and then `objects`: functions to be called with
    all that has arrived, in order."""

    def __init__(self, step: Step, path: str, state: State, rank: int, world: int, mesh: Any,
                 types: tuple[type, ...] | Mapping[str, type]) -> None:
        self.step, self.path, self.state, self.rank, self.world, self.types = step, path, state, rank, world, types
        self.makes: list[Callable[[], None]] = []
        self.fills: list[Fill] = []
        self.claims: list[Claim] = []
        self.shared: list[tuple[str, str]] = []
        whole = meshes.given(mesh)
        self.mesh = (*whole, meshes.named(*whole)) if whole else None
        self.todo: list[Callable[[], object]] = []
        self.objects: list[Callable[[], object]] = []
        self.damaged: list[Damage] = []
        self.values: dict[str, Give] = {}
        self.rng: list[Any] = []
        self.trees: dict[tuple[str, int | None], Any] = {}
        self.views: Views = weakref.WeakKeyDictionary()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.of_step: gaps.Names = {}
        self.of_state: gaps.Held = {}
        self.lacked: dict[str, tuple[str, str]] = {}        # {as in `unexpected`: (of what, name)}
        self.wrong: list[str] = []
        self.called: list[str] = []
        self.classes: dict[str, KeyPath] = {}       # that code would have to be given, and types= lacks: {name: where}
        self.asked: set[str] = set()
        self.shapes, self.plain = False, False
        self.names: dict[str, list[str]] = {}
        self.tensors = step._tensors
        for component, of_component in itertools.groupby(self.tensors, operator.itemgetter(0)):
            self.names.setdefault(component, []).extend([name for _, name in of_component])
        for component, value in state.items():
            components.check(component, value, is_tensor)
            self.component(component, value)

    def look_for(self, others: gaps.Gaps) -> None:
        """Takes what another rank has from the gaps."""
        others.say(self.of_step, self.of_state)
        if self.lacked:
            held = others.held_by_any(self.of_step)
            self.unexpected = [said for said in self.unexpected
                               if self.lacked[said][1] not in held.get(self.lacked[said][0], ())]

    def has(self, label: str, names: list[str], held: Iterable[str]) -> None:
        """Notes which names of the step this rank has. label: as in the lists of what is missing."""
        self.of_step[label], self.of_state[label] = names, set(held)

    def lacks(self, label: str, said: str, names: Iterable[str]) -> None:
        """Notes what the state lacks."""
        new = {said.format(label, name): (label, name) for name in names}
        self.unexpected += new
        self.lacked |= new

    def begin(self, strict: bool) -> None:
        self.strict = strict
        fills, moves, differ = settle(self.step, self.claims)
        self.shared = list(differ)
        for pair, what in differ.items():
            said = f"{pair[0]} and {pair[1]} {what} in the state, and differ in the step"
            if strict:
                self.wrong.append(f"{said}: give each a tensor of its own (strict=False lets the last one count)")
            else:
                print(f"vckpt: {self.path}: {said}: the last one counts", file=sys.stderr, flush=True)
        self.check(strict)
        self.fills, self.claims = fills, []
        for make in moves + self.makes:
            make()
        self.makes = []
        self.work = Work(self.fills)

    def size(self) -> int:
        return sum(one.to.items * _lib.ITEM_BYTES[one.stored[1]] for one in self.fills)

    def read(self, how: How) -> None:
        self.damaged = self.work.read(self.step, self.rank, how)
        self.fills, self.work = [], Work([])

    def finish(self, bytes_read: int) -> Loaded:
        for do in self.todo + self.objects:
            do()
        found = {component: give() for component, give in self.values.items()}
        step = self.step
        return Loaded(self.path, step.run, step.number, step.attributes, found, self.missing, self.unexpected,
                      self.set_generators(), self.damaged, bytes_read, self.called, self.shared, commit=step.commit)

    def check(self, strict: bool, when: str = "") -> None:
        said = [f"the step lacks {_in_words(self.missing)}"] if self.missing and strict else []
        said += [f"the state lacks {_in_words(self.unexpected)}"] if self.unexpected and strict else []
        hint = " (strict=False takes what both have)" if said and not self.wrong else ""
        if self.classes:
            self.wrong.append(_in_words([f"{path_text(path)} is a {name}" for name, path in self.classes.items()])
                              + f": give types=[{', '.join(name.rpartition('.')[2] for name in self.classes)}]")
        said += [_in_words(self.wrong)] if self.wrong else []
        hint = (" (a tensor is filled in its own shape only: make it of the step's shape, or leave it out of the state "
                "and give strict=False)" if self.shapes else hint)
        if said:
            raise _lib.invalid(f"{self.path} does not fit the state: {'; '.join(said)}{when or hint}")

    def lack(self, path: KeyPath, saved: object = ABSENT) -> None:
        name = _shown(path)
        self.missing.append(f"{name} (kept for each of {self.step.world} ranks, this job has {self.world})"
                            if _is_others(saved) else name)

    def set_generators(self) -> bool:
        """Sets the random number generators, last of all."""
        if self.rng and self.step.world == self.world and not any(map(_is_nothing, self.rng)):
            for saved in self.rng:
                set_rng_state(saved)
            return True
        if self.rng and self.rank == 0:
            ranks = "1 rank" if self.step.world == 1 else f"{self.step.world} ranks"
            why = (f"{ranks} saved them, this job has {self.world}" if self.step.world != self.world
                   else "the step does not have them")
            print(f"vckpt: {self.path}: the random number generators were left as they are: {why}", file=sys.stderr,
                  flush=True)
        return False

    def made(self, component: str, saved: Any, like: Any = None) -> Give:
        """Gives, once, what `built` makes of a part of a tree before the tensors are read."""
        return self.later(lambda: self.built(component, saved, like))

    def later(self, make: Give) -> Give:
        results: list[Any] = []
        self.makes.append(lambda: results.append(make()))
        return results.pop              # nothing else holds it then

    # -- components and their trees --

    def component(self, component: str, value: Any) -> None:
        if component in self.step.thinned:
            self.missing.append(f"{component} (it was thinned: vckpt prune --thin dropped it after the save)")
            return
        saved = self.tree(component, self.rank if self.step.world == self.world else None)
        if saved is ABSENT and component not in self.names:
            self.missing.append(component)
            return
        self.asked, self.plain = set(), False
        give = self.visit(value, saved, (component,))
        if self.plain:
            self.values[component] = give
        if not self.step._of_ranks(component):      # else each rank has a part of its own by design
            names = self.names.get(component, [])
            self.has(component, names, self.asked)
            self.lacks(component, "{}/{}", [name for name in names if name not in self.asked])

    def tree(self, component: str, rank: int | None) -> Any:
        """A component's document as a rank has it (None: the common one)."""
        def there(whose: int | None) -> bool:
            return self.step._blob_bytes(f"{component}.json", whose) is not None
        if rank is not None and not there(rank):
            rank = None
        if (component, rank) not in self.trees:
            if rank is not None or there(None):
                found = self.step.values(component, rank, types=self.types, tensors=False)
            else:
                found = states.PER_RANK if self.step._of_ranks(component) else self.of_dcp(component)
            self.trees[component, rank] = found
        return self.trees[component, rank]

    def of_dcp(self, component: str) -> Any:
        """A component that a StorageWriter saved."""
        if torch_module() is None or self.step._blob_bytes(".dcp/metadata.json", None) is None:
            return ABSENT
        from . import dcp_tree
        found = dcp_tree.tree_of(self.step, component)
        return ABSENT if found is None else found

    def visit(self, value: Any, saved: Any, path: KeyPath) -> Give:
        if is_tensor(value):
            self.tensor(value, saved, path)
            return functools.partial(_same, value)
        torch = torch_module()
        if not _fillable(value):
            return self.plainly(saved, path)
        if isinstance(value, (Mapping, list, tuple)):
            return self.items(value, saved, path)
        if torch is not None and isinstance(value, torch.nn.Module):
            self.module(value, saved, path)
        elif torch is not None and isinstance(value, torch.optim.Optimizer):
            self.optimizer(value, saved, path)
        elif isinstance(value, SplitOptimizer):
            self.split(value, saved, path)
        elif type(value) is RngState:
            self.rng.append(ABSENT if saved is None else saved)
        elif _is_nothing(saved) or (saved is None and (_is_generator(value) or value.state_dict() is not None)):
            self.lack(path, saved)
        elif _is_generator(value):
            self.objects.append(lambda: set_rng_state(saved, generator=value))
        else:
            self.object(value, saved, path)
        return lambda: value

    def object(self, value: Any, saved: Any, path: KeyPath) -> None:
        self.want_classes(saved, path)
        give = self.merged(_filling(path, value.state_dict), saved, path)
        self.objects.append(lambda: _filling(path, lambda: value.load_state_dict(give())))

    def plainly(self, saved: Any, path: KeyPath) -> Give:
        """What the step has, its tensors whole: the state has nothing to be filled there."""
        self.plain = True
        self.asked |= _names(saved)
        if _is_others(saved):
            self.lack(path, saved)
        return (lambda: None) if _is_nothing(saved) else self.made(path[0], saved)

    def want_classes(self, saved: Any, path: KeyPath) -> None:
        """Notes the classes that types= lacks: code is never handed a Record in the place of an object of its own."""
        if isinstance(saved, Record) and saved.tag in ("$record", "$enum") and not saved.type_name.startswith(KNOWN):
            self.classes.setdefault(saved.type_name, path)
        if not _is_reference(saved):
            for key, part in _items(saved):
                self.want_classes(part, (*path, key))

    def items(self, value: Any, saved: Any, path: KeyPath) -> Give:
        if _is_named_tuple(value):
            made = {key: self.visit(item, _below(saved, key), (*path, key)) for key, item in value._asdict().items()}
            return lambda: type(value)(**{key: give() for key, give in made.items()})
        if isinstance(value, (list, tuple)):
            parts = [self.visit(item, _below(saved, number), (*path, number)) for number, item in enumerate(value)]
            rest = saved[len(value):] if isinstance(saved, (list, tuple)) and not _refers(saved[len(value):]) else ()
            self.plain = self.plain or bool(rest)
            return lambda: (list if isinstance(value, list) else tuple)([*(give() for give in parts), *rest])
        gives = {key: self.visit(item, part, (*path, key)) for key, item in value.items()
                 if (part := _below(saved, key)) is not ABSENT or _fillable(item)}
        more = ({key: item for key, item in saved.items() if key not in value and not _refers(item)}
                if isinstance(saved, dict) else {})
        self.plain = self.plain or bool(more)
        return lambda: {**{key: give() for key, give in gives.items()}, **more}

    def merged(self, current: Any, saved: Any, path: KeyPath, fill: bool = True) -> Give:
        """What was saved of an object, for its load_state_dict(): tensors that it has now are filled, and given back to
        it. fill=False: all are new, and only cut as those are."""
        if _is_reference(saved):
            self.asked.add(saved["name"])
        if _is_reference(saved) and is_tensor(current):
            to, found = self.destination(current, path), self.stored(path[0], saved)
            # of another dtype or shape (a counter that became a mean) it is not cut down to what the object has now
            if fill and found is not None and (to.dtype, to.shape) == found[1:3] and not to.refusal():
                if to.absent:
                    return lambda: current
                held = [current]

                def move() -> None:
                    held[0] = self.built(path[0], saved, current)
                self.claims.append(Claim(to, path, saved["name"], found, move=move))
                return lambda: held[0]
            return self.made(path[0], saved, current)
        if _is_reference(saved) or not _refers(saved):
            return self.made(path[0], saved)
        inner: dict[Any, Give] = {}
        _with_parts(saved, lambda key, part: inner.setdefault(key, self.merged(_below(current, key), part, (*path, key),
                                                                               fill)))
        return lambda: _with_parts(saved, lambda key, _: inner[key]())

    # -- tensors --

    def destination(self, value: Any, path: KeyPath) -> Destination:
        return destination(path, value, self.mesh, self.rank, self.world)

    def stored(self, component: str, saved: Any) -> Stored | None:
        """What is known of the tensor that a part of a tree refers to. None for one that a rank keeps by itself."""
        if not _is_reference(saved) or "blob" in saved:
            return None
        return self.tensors.get((component, saved["name"]))

    def tensor(self, value: Any, saved: Any, path: KeyPath) -> None:
        fields = saved._fields if _is_reference(saved) else {}
        name = fields["name"] if fields else dotted(path)
        self.asked.add(name)
        if "blob" in fields:
            self.take_own(value, saved, path)
            return
        found = self.tensors.get((path[0], name))
        if found is None:
            self.lack(path, saved)
            return
        to = destination(path, value, self.mesh, self.rank, self.world)
        now, why = (found[2], None) if to.absent else (to.shape, to.refusal())
        if self.fits(path[0], name, found[1], found[2], to.dtype, now, why) and not to.absent:
            self.claims.append(Claim(to, path, name, found))

    def fits(self, component: str, name: str, dtype: int, shape: Sequence[int], to: int, now: Sequence[int],
             why: str | None) -> bool:
        """Can a tensor of the step be loaded into that of the state, of dtype `to` and shape `now`? why: the tensor of
        the state cannot be filled."""
        said = None
        if tuple(shape) != tuple(now):
            self.shapes, said = True, f"has the shape {list(shape)} in the step and {list(now)} in the state"
        elif why:
            said = f"of the state {why}"
        elif dtype != to and not convertible(dtype, to):
            said = (f"is {_lib.DTYPES[dtype]} in the step and {_lib.DTYPES[to]} in the state, and the one cannot be "
                    "converted to the other")
        if said:
            self.wrong.append(f"{component}/{name} {said}")
        return said is None

    def take_own(self, value: Any, saved: Record, path: KeyPath) -> None:
        """Fills a tensor that this rank kept by itself."""
        found = self.step._rank_array(saved, self.rank)
        dtype, to = _lib.DTYPES.index(saved["dtype"]), self.destination(value, path).dtype
        if self.fits(path[0], dotted(path), dtype, found.shape, to, value.shape, refusal(value)):
            self.todo.append(lambda: assign(value, found, dtype, to))

    def built(self, component: str, saved: Any, like: Any = None) -> Any:
        """A part of a tree with tensors that are going to be filled: whole, or cut as the parameter `like` is whose
        shape they have (a Shard: as that says); arrays where it is one."""
        if not _is_reference(saved):
            if not _refers(saved):
                return saved
            return _with_parts(saved, lambda _, part: self.built(component, part, like))
        if "blob" in saved:
            return self.step._rank_tensor(saved, self.rank)
        name = saved["name"]
        stored = self.tensors.get((component, name))
        if stored is None:
            raise self.step._no_tensor(component, name)
        found = self.empty_like(like, *stored[1:3])
        if found is None:
            array = np.zeros(stored[2], numpy_dtype(stored[1]))
            self.fills.append(Fill(Destination(array, stored[1]), name, stored))
            return array if isinstance(like, np.ndarray) else self.step._of_framework(array, stored[1])
        to = self.destination(found, (component, name))
        if not to.absent:
            self.fills.append(Fill(to, name, stored))
        return found.tensor if type(found) is Shard else found

    def empty_like(self, like: Any, dtype: int, shape: tuple[int, ...] | None) -> Any:
        """A DTensor or Shard that is cut as `like` is, or a tensor on the same CUDA device, or None."""
        if type(like) is Shard and not like.alone and shape == (like.shape or tuple(like.tensor.shape)):
            return like._of(torch_state().empty(like.tensor, dtype))
        if hasattr(like, "_local_tensor") and shape == tuple(like.shape):
            return torch_state().empty(like, dtype)
        if shape and shape == tuple(getattr(like, "shape", ())) and cuda_device(like) is not None:
            return torch_state().empty(like, dtype)         # read into at once
        return None

    # -- modules and optimizers --

    def module(self, module: torch.nn.Module, saved: Any, path: KeyPath) -> None:
        """The state dict shares the module's memory, so filling that fills the module. What code besides torch's loads
        is read into memory of its own, and handed to the module as load_state_dict() would."""
        from . import torch_modules
        view, taken = torch_modules.module_view(module, self.views)
        own, runs = torch_modules.loading(module)
        gives: dict[str, Give] = {}
        known = set()
        handed = view.tensors is None or own or runs
        for key, value in taken.items():
            kept = _below(saved, key)
            if not handed and _is_reference(kept):
                self.tensor(value, kept, (*path, key))
                continue
            name = view.names.get(key, key)         # as earlier versions saved it
            if kept is ABSENT:
                kept = _below(saved, name)
            known |= {key, name}
            self.want_classes(kept, (*path, key))
            if key.startswith(own) and not _is_nothing(saved):
                if not _is_nothing(kept):
                    self.claim_of(value, kept, (*path, key))
                    gives[key] = self.merged(None if torch_modules.is_lazy(value) else value, kept, (*path, key), False)
            elif _is_nothing(kept) and not is_tensor(value):
                self.lack((*path, key), kept)
            elif key.rpartition(".")[2] == "_extra_state":
                gives[key] = self.merged(value, kept, (*path, key), False)
            elif is_tensor(value):
                self.tensor(value, kept, (*path, key))
                gives[key] = functools.partial(_same, value)
            else:
                gives[key] = self.merged(value, kept, (*path, key))
        for key in saved if own and isinstance(saved, dict) else ():
            if isinstance(key, str) and key.startswith(own) and key not in known:
                gives[key] = self.merged(None, saved[key], (*path, key), False)
        if handed:
            self.called.append(_shown(path))
            self.todo.append(functools.partial(self.hand, module, view, gives, path, own))

    def claim_of(self, value: Any, saved: Any, path: KeyPath) -> None:
        """Claims memory into which load_state_dict() may copy."""
        from .torch_modules import is_lazy
        found = self.stored(path[0], saved)
        if found is not None and is_tensor(value) and not is_lazy(value):
            to = self.destination(value, path)
            self.claims += [] if to.absent else [Claim(to, path, saved["name"], found, False)]

    def hand(self, module: torch.nn.Module, view: ModuleView, gives: dict[str, Give], path: KeyPath,
             own: tuple[str, ...]) -> None:
        """Fills by load_state_dict(). Only that can say what is missing of parts that rename what they are given."""
        from .torch_modules import set_module_state
        found = _filling(path, lambda: set_module_state(module, {key: give() for key, give in gives.items()}, view))
        for names, known in zip(found, (self.missing, self.unexpected)):
            known += [_shown((*path, name)) for name in names if name.startswith(own) and own]
        self.check(self.strict, " (found by its load_state_dict(), after the state was filled)")

    def optimizer(self, optimizer: torch.optim.Optimizer, saved: Any, path: KeyPath) -> None:
        from . import presets, torch_optimizers
        flattened = torch_optimizers.flattened_module(optimizer, self.state, self.views, path)
        if flattened is not None:
            self.split(presets.fsdp1(optimizer, flattened), saved, path)
            return
        found = self.restored(saved, path, functools.partial(torch_optimizers.Restored, optimizer, self.state,
                                                             self.views, path))
        if found:
            made = self.later(lambda: found.made(lambda part, like=None: self.built(path[0], part, like)))
            self.todo.append(lambda: _filling(path, lambda: torch_optimizers.take_state(optimizer, made())))

    def restored(self, saved: Any, path: KeyPath, restore: Callable[[list[Any]], Any]) -> Any:
        """What `restore` makes of what ranks saved of an optimizer: of one tree, or of several where each has a part.
        None: there is nothing. Their tensors are asked for."""
        kept = (saved, *(self.at(path, rank) for rank in (None, *self.step.ranks(path[0]))))
        trees = [tree for tree in {id(tree): tree for tree in kept}.values()
                 if tree is not None and not _is_nothing(tree)]
        if not trees:
            return self.lack(path, saved)
        for tree in trees:
            self.asked |= _names(tree)
            self.want_classes(tree, path)
        found, name = restore(trees), _shown(path)
        label = f"{name}, its parameter"
        self.missing += [f"{label} {one}" for one in found.missing]
        if not self.step._of_ranks(path[0]):        # as of components
            # names of its parameters, which a component with its tensors may be called as, too
            self.has(label, found.names, set(found.names).difference(found.unexpected))
            self.lacks(label, "{} {}", found.unexpected)
        self.wrong += [f"{name}: {found.wrong}"] if found.wrong else []
        return found

    def split(self, split: SplitOptimizer, saved: Any, path: KeyPath) -> None:
        """Its state is filled through Shards of what is there, or of what is made for it and put there at the end."""
        from . import torch_split
        found = self.restored(saved, path, functools.partial(torch_split.Restored, split, path))
        if not found or found.wrong:
            return
        for part, key, kept in found.kept():
            stored = self.stored(path[0], kept)
            if stored is None or not found.is_flat(part, key, stored[2]):
                found.plain(part, key, self.made(path[0], kept))
            elif part.holder is not None:
                self.tensor(found.shard(part, key, stored[1]), kept, (*path, "state", part.name, key))
        self.missing += [f"{_shown(path)}, {key} of its parameter {one}" for one, key in found.lacking()]
        groups, more = self.made(path[0], found.options), self.made(path[0], found.more)
        self.todo.append(lambda: _filling(path, lambda: found.take(groups(), more())))

    def at(self, path: KeyPath, rank: int | None) -> Any:
        """A part of the tree that a rank has."""
        saved = self.tree(path[0], rank)
        for key in path[1:]:
            saved = _below(saved, key)
        return saved
