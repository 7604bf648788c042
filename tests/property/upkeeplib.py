# SPDX-License-Identifier: Apache-2.0
"""A model of two stores: what is in each step, its facts, where it came from, and what each command makes of
that (docs/prune.md, docs/copy.md, docs/format/list.md "Facts"). It knows nothing of files but for names and bytes."""
import copy
import dataclasses
import itertools
import time

import test_retain

COUNT = itertools.count(1)
LATEST = {"highest", "newest", "last"}
THINS = "optimizer"


@dataclasses.dataclass
class Step:
    tensors: dict                           # {"component/name": array}
    own: dict                               # attributes of the save
    files: dict = None                      # {name: bytes} as they were imported; None: it was saved by the package
    blobs: dict = None                      # None: not looked at yet
    time: int = None                        # both None: to be taken from the list
    entry: int = None
    version: int = dataclasses.field(default_factory=COUNT.__next__)       # of the manifest
    origin: tuple = None                    # of a copy: (run, version) in the other store
    rewritten: bool = False
    thinned: bool = False
    pin: str = None                         # the reason
    tags: frozenset = frozenset()
    set: dict = dataclasses.field(default_factory=dict)

    @property
    def said(self):
        return self.pin, tuple(sorted(self.tags)), self.set

    @property
    def attributes(self):
        return {**self.own, **self.set}

    def put(self, key, value):
        """An attribute that is set later. What the save says by itself is not said again."""
        if key in self.set or self.own.get(key) != value:
            self.set = {**self.set, key: value}

    def has(self, component):
        return any(name.startswith(component + "/") for name in self.tensors)

    def same(self, other):
        return (self.own == other.own and self.blobs == other.blobs and self.tensors.keys() == other.tensors.keys()
                and all(a.dtype == other.tensors[n].dtype and a.tobytes() == other.tensors[n].tobytes()
                        for n, a in self.tensors.items()))


@dataclasses.dataclass
class Run:
    steps: dict = dataclasses.field(default_factory=dict)
    rules: list = dataclasses.field(default_factory=list)
    rules_set: int = 0                      # when


class World:
    """{store: {run: Run}}. Each method is a command: it returns the exit code, and changes nothing if that says so."""

    def __init__(self, stores):
        self.stores = {store: {} for store in stores}

    def clone(self):
        other = World(())
        other.stores = {store: {run: dataclasses.replace(r, steps={n: copy.copy(s) for n, s in r.steps.items()})
                                for run, r in runs.items()} for store, runs in self.stores.items()}
        return other

    @staticmethod
    def step(step):
        return copy.copy(step)

    def steps(self, store, run):
        return self.stores[store][run].steps if run in self.stores[store] else {}

    # ---- steps ----

    def save(self, store, run, number, step, job):
        r = self.stores[store].setdefault(run, Run())
        if number in r.steps and r.steps[number].pin is not None:
            return 1
        step.entry, step.time = 10**9 + next(COUNT), time.time_ns()
        r.steps[number] = step
        rows = self.rows(store, run)
        kept = test_retain.model(r.rules, rows, time.time_ns()) if job and r.rules else None
        for row, why in zip(rows, kept or ()):
            if not any(why):
                del r.steps[row["step"]]
        step.entry = step.time = None
        return 0

    def remove(self, store, run, numbers):
        steps = self.steps(store, run)
        if any(n not in steps or steps[n].pin is not None for n in numbers):
            return 1
        for n in numbers:
            del steps[n]
        return 0

    def rows(self, store, run):
        return [{"step": n, "entry": s.entry, "time": s.time, "rewritten": s.rewritten, "pinned": s.pin is not None,
                 "tags": s.tags, "attributes": s.attributes} for n, s in sorted(self.steps(store, run).items())]

    def plan(self, store, run, rules, thin):
        """{step: ("stays", "goes" or "thinned", {why it stays})}; None: an error."""
        steps, rows = self.steps(store, run), self.rows(store, run)
        found = test_retain.model(rules, rows, time.time_ns())
        if found is None:
            return None
        plan = {}
        for row, (by, always) in zip(rows, found):
            s = steps[row["step"]]
            goes = rules and not by and not always
            thins = thin and not goes and not always & LATEST and s.pin is None and s.has(THINS)
            plan[row["step"]] = "goes" if goes else "thinned" if thins else "stays", {rules[i] for i in by} | always
        return plan

    def prune(self, store, runs, rules, thin):
        """(exit code, {(run, step): what plan() says})"""
        plans = {run: self.plan(store, run, rules or self.stores[store][run].rules, thin) for run in runs}
        all_ = [s for run in runs for s in self.steps(store, run).values()]
        named = {int(n) for rule in rules if rule.startswith("keep-step=") for n in rule.partition("=")[2].split(",")}
        if any(steps and named - steps.keys() for steps in (self.steps(store, run) for run in runs)):
            return 1, {}
        if None in plans.values() or (thin and not any(s.thinned or s.has(THINS) for s in all_)):
            return 1, {}
        for run, plan in plans.items():
            steps = self.steps(store, run)
            for n, (what, _) in plan.items():
                if what == "goes":
                    del steps[n]
                elif what == "thinned":
                    s = steps[n] = dataclasses.replace(steps[n], version=next(COUNT), entry=None, origin=None,
                                                       rewritten=True, thinned=True)
                    s.tensors = {k: a for k, a in s.tensors.items() if not k.startswith(THINS + "/")}
                    if s.files is not None:
                        s.files = {k: b for k, b in s.files.items() if k != THINS + ".safetensors"}
        return 0, {(run, n): row for run, plan in plans.items() for n, row in plan.items()}

    def repack(self, store, run, number):
        steps = self.steps(store, run)
        steps[number] = dataclasses.replace(steps[number], version=next(COUNT), entry=None, origin=None, rewritten=True)
        return 0

    # ---- the facts of steps ----

    def tag(self, store, run, number, tags):
        steps = self.steps(store, run)
        for s in steps.values():
            s.tags -= tags
        steps[number].tags |= tags
        return 0

    def policy(self, store, run, rules):
        r = self.stores[store][run]
        r.rules, r.rules_set = rules, next(COUNT)
        return 0

    # ---- another store ----

    def written(self, store, run, number, step, from_):
        """A copy of a step, with all its facts."""
        steps = self.stores[store].setdefault(run, Run()).steps
        steps.pop(number, None)
        steps[number] = dataclasses.replace(step, version=next(COUNT), entry=None, origin=(from_, step.version),
                                            rewritten=False, tags=frozenset(), set=dict(step.set))
        if step.tags:
            self.tag(store, run, number, step.tags)

    def follow(self, store, run, number, step, mirror):
        s = self.steps(store, run)[number]
        s.pin = step.pin if s.pin is None else s.pin
        if mirror:
            s.tags, s.set = s.tags & step.tags, {k: v for k, v in s.set.items() if k in step.set}
        for key, value in step.set.items():
            s.put(key, value)
        if step.tags - s.tags:
            self.tag(store, run, number, step.tags - s.tags)

    def copied(self, a, b, run, number, replace):
        """One step. 1: it is refused."""
        step, there = self.steps(a, run)[number], self.steps(b, run).get(number)
        if there and (there.origin == (run, step.version) or there.same(step)):
            self.follow(b, run, number, step, False)
            return 0
        if there and (not replace or there.pin is not None):
            return 1
        self.written(b, run, number, step, run)
        return 0

    def copy_policy(self, a, b, run):
        here, there = self.stores[a][run], self.stores[b].setdefault(run, Run())
        if (here.rules and (not there.rules or there.rules_set < here.rules_set) and
                all(s.origin and s.origin[0] == run for s in there.steps.values())):
            self.policy(b, run, here.rules)

    def copy(self, a, b, run, number, replace):
        numbers = sorted(self.steps(a, run)) if number is None else [number]
        code = max([self.copied(a, b, run, n, replace) for n in numbers], default=0)
        if number is None:
            self.copy_policy(a, b, run)
        return code

    def sync(self, a, b, replace, delete):
        code = 0
        for run in self.stores[a]:
            here = self.steps(a, run)
            for n, step in sorted(here.items()):
                there = self.steps(b, run).get(n)
                if not there or not (there.origin == (run, step.version) or            # or it was written anew there
                                     (there.rewritten and there.time == step.time)):
                    ours = there and there.origin and there.origin[0] == run
                    code = max(code, self.copied(a, b, run, n, replace or bool(ours)))
            there = self.steps(b, run)
            for n, step in sorted(here.items()):
                if n in there and there[n].origin and there[n].origin[0] == run:
                    self.follow(b, run, n, step, True)
            self.copy_policy(a, b, run)
            gone = [n for n, s in there.items() if s.origin and s.origin[0] == run and n not in here]
            if delete and gone and not here:
                code = 1
            for n in gone if delete and here else ():
                if there[n].pin is None:
                    del there[n]
        return code
