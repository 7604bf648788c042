# SPDX-License-Identifier: Apache-2.0
"""Two stores are used for long, and are what a model of them says (upkeeplib.py).

Random histories: imports and saves, also in the place of steps; tags, pins, attributes that are set later, policies;
removals, prune with every rule, thinning; copies and syncs into the other store, where strangers' steps are; the
collector. Some commands are killed at any call that changes the store: then each step is as it was before, or as it was
to be. Every few commands all is compared: the bytes by the package, export and cat, the rows of ls, find and log, what
is said of steps, policies; and both stores are verified. What prune -n and du --freed say is what the collector
deletes, to the byte."""
import contextlib
import json
import os
import random
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save

import factslib
import vckpt as package
from storelib import Api
from test_retain import CONDITIONS
from upkeeplib import Step, World

KINDS = {"prune": 3, "thin": 2, "keep": 5, "say": 5, "policy": 1, "remove": 1, "freed": 1, "copy": 3, "sync": 3,
         "collect": 1, "repack": 1}
NUMBERS = ["1", "1.5", "2.25", "-3", "nan", "7e1"]
# What find is asked, and which steps the model says.
QUESTIONS = {**{text: lambda run, n, s, holds=holds: holds({"step": n, "attributes": s.attributes, "tags": s.tags,
                                                            "pinned": s.pin is not None})
                for text, (_, holds) in CONDITIONS.items()},
             "component == optimizer": lambda run, n, s: s.has("optimizer"),
             "not tensor == m or run == s": lambda run, n, s: not s.has("optimizer") or run == "s",
             "tensor == tiny and dtype == f64": lambda run, n, s: s.tensors["model/tiny"].dtype == "f8",
             "has tag and not pinned": lambda run, n, s: s.tags and s.pin is None}


class History:
    def __init__(self, vckpt, lib, folder, rng):
        self.vckpt, self.lib, self.folder, self.rng, self.count = vckpt, lib, folder, rng, 0
        self.world, self.fates, self.killed, self.kinds = World("ab"), {}, 0, []
        self.arrays = [np.random.default_rng(rng.getrandbits(32)).standard_normal((60, 250)).astype("f4")
                       for _ in range(3)]
        for store in "ab":
            vckpt("init", folder / store, "--no-reserve", "-q")

    # ---- a command ----

    def run(self, words, store, kill):
        env = {k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}
        if kill:
            env |= {"VCKPT_INTERPOSE": f"root={self.folder / store},do=kill,at={kill}",
                    "LD_PRELOAD": f"{env.get('VCKPT_PRELOAD', '')} {self.preload}".strip(),
                    "ASAN_OPTIONS": env.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0"}
        return subprocess.run([self.vckpt.path, *map(str, words)], capture_output=True, text=True, env=env, timeout=240)

    def kill(self):
        """At which call that changes the store; 0: at none."""
        return self.rng.choice([0, 0, int(2 ** self.rng.uniform(0, 6.5))])

    def do(self, words, store, code, new, atomic=True, kill=True):
        """Runs a command that changes `store`, as the model did in `new`, or kills it."""
        kill = self.kill() if kill else 0
        done = self.run(words, store, kill)
        self.said = f"{' '.join(map(str, words))}: {done.returncode}, expected {code}; kill {kill}\n{done.stderr}"
        if done.returncode == -9 and kill:
            self.killed += 1
            self.between(new, atomic)
        else:
            assert done.returncode == code, self.said
            wrong = self.take(new)
            assert wrong is None, (self.said, wrong)

    # ---- what is there ----

    def look(self, store, run):
        """({step: (entry, time, what is said)}, rules)"""
        with contextlib.closing(Api(self.lib, self.folder / store, init=False)) as api, api.list(run) as l:
            times = {}
            for i in range(self.lib.commit_list_count(l.p)):
                s = self.lib.commit_list_at(l.p, i).contents
                times[s.step] = s.commit.time_ns
            return ({n: (entry, times[n], factslib.said(l, entry)) for n, (entry, *_) in l.steps().items()},
                    factslib.policy(l) or [])

    def looks(self):
        return {(store, run): self.look(store, run) for store in "ab" for run in "rs"}

    def differs(self, world, seen):
        """The first thing that is not as the model says."""
        for (store, run), (steps, rules) in seen.items():
            want, known = world.steps(store, run), self.fates.get((store, run), {})
            if set(steps) != set(want):
                return f"{store}/{run}: {sorted(steps)}, expected {sorted(want)}"
            if rules != (world.stores[store][run].rules if run in world.stores[store] else []):
                return f"{store}/{run}: rules {rules}"
            for n, (entry, at, said) in steps.items():
                s = want[n]
                if s.entry != entry if s.entry is not None else entry in known:
                    return f"{store}/{run}/{n}: entry {entry}, expected {s.entry}"
                if s.time not in (None, at) or said != s.said:
                    return f"{store}/{run}/{n}: {at}, {said}, expected {s.time}, {s.said}"
        return None

    def take(self, world, seen=None):
        """The model's world is the one that is there: entries and times of new steps are known from now on."""
        seen = seen or self.looks()
        wrong = self.differs(world, seen)
        if wrong:
            return wrong
        self.world = world
        for (store, run), (steps, _) in seen.items():
            fates, there = self.fates.setdefault((store, run), {}), {entry: n for n, (entry, *_) in steps.items()}
            for entry, (n, fate) in fates.items():
                if not fate and entry not in there:
                    fates[entry] = n, "replaced" if n in steps else "removed"
            for n, (entry, at, _) in steps.items():
                fates.setdefault(entry, (n, ""))
                s = world.steps(store, run)[n]
                s.entry, s.time = entry, at
                if s.blobs is None:
                    s.blobs = self.blobs(store, run, n)
        return None

    def between(self, new, atomic):
        """A command was killed: each step is as before, or as it was to be; one entry is there or it is not."""
        old, seen = self.world, self.looks()
        if self.differs(old, seen) is None or self.differs(new, seen) is None:
            assert self.take(new if self.differs(old, seen) else old, seen) is None
            return
        assert not atomic, (self.said, self.differs(old, seen), self.differs(new, seen))
        mixed = new.clone()
        for (store, run), (steps, rules) in seen.items():
            was, to_be = old.steps(store, run), new.steps(store, run)
            if run not in mixed.stores[store]:
                assert not steps
                continue
            now = mixed.stores[store][run].steps
            now.clear()
            for n in {*was, *to_be} - set(steps):
                assert n not in was or n not in to_be, (self.said, store, run, n)
            for n, (entry, _, said) in steps.items():
                either = [w[n] for w in (was, to_be) if n in w]
                assert either, (self.said, store, run, n)
                s = now[n] = World.step(was[n] if n in was and was[n].entry == entry else to_be[n])
                tags = [set(e.tags) for e in either]
                assert set.intersection(*tags) <= set(said[1]) <= set.union(*tags), (self.said, store, run, n, said)
                assert said[0] in [e.pin for e in either] and said[2] in [e.set for e in either], (self.said, said)
                s.pin, s.tags, s.set = said[0], frozenset(said[1]), dict(said[2])
            if rules != new.stores[store][run].rules:
                before = old.stores[store].get(run)
                mixed.stores[store][run].rules = before.rules if before else []
                mixed.stores[store][run].rules_set = before.rules_set if before else 0
        wrong = self.take(mixed, seen)
        assert wrong is None, (self.said, wrong)

    # ---- commands ----

    def act(self):
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        self.kinds.append(kind)
        getattr(self, kind)()

    def some_run(self, store=None):
        """(store, run) that has steps, or None"""
        found = [(s, run) for s in store or "aab" for run, r in self.world.stores[s].items() if r.steps]
        return self.rng.choice(found) if found else None

    def some_step(self):
        found = self.some_run()
        return found and (*found, self.rng.choice(sorted(self.world.steps(*found))))

    def content(self):
        self.count += 1
        w, m = (self.rng.choice(self.arrays) for _ in range(2))
        if self.rng.random() < .3:                  # one that is like no other
            w = w + np.float32(self.count)
        parts = {"model": {"w": w, "tiny": np.full(3, self.count, self.rng.choice(["f4", "f8"]))}}
        if self.rng.random() < .8:
            parts["optimizer"] = {"m": m}
        own = {key: self.rng.choice(NUMBERS) for key in ("loss", "score") if self.rng.random() < .6}
        return parts, own

    def keep(self):
        """An import or a save."""
        store, run, n = self.rng.choice("aaab"), self.rng.choice("rrs"), self.rng.randrange(8)
        (parts, own), new = self.content(), self.world.clone()
        tensors = {f"{c}/{name}": a for c, part in parts.items() for name, a in part.items()}
        if self.rng.random() < .3:
            code = new.save(store, run, n, Step(tensors, own), True)
            with contextlib.suppress(package.Error) if code else contextlib.nullcontext():
                package.save(self.folder / store / run, parts, step=n, attributes=own, replace=True, pin="no")
            package.close()
            wrong = self.take(new)
            assert wrong is None, (code, wrong)
            return
        files = {f"{c}.safetensors": save(part) for c, part in parts.items()}
        files["config.json"] = json.dumps({"n": self.rng.randrange(3)}).encode()
        source = self.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        for name, data in files.items():
            (source / name).write_bytes(data)
        code = new.save(store, run, n, Step(tensors, own, files, {"config.json": files["config.json"]}), False)
        self.do(["import", self.folder / store, f"{run}/{n}", source, "-q", "--replace",
                 *(w for k, v in own.items() for w in ("--set", f"{k}={v}"))], store, code, new)

    def say(self):
        """pin, unpin, tag, set"""
        found = self.some_step()
        if not found:
            return
        new, (store, run, n) = self.world.clone(), found
        step, words = new.steps(store, run)[n], []
        kind = self.rng.choice(["pin", "unpin", "unpin", "tag", "tag", "untag", "set", "set", "unset"])
        if kind == "pin":
            reason = self.rng.choice([None, "why", "for \x1b the paper"])
            words, step.pin = ["--reason", reason] if reason else [], reason or step.pin or ""
        elif kind == "unpin":
            step.pin = None
        elif kind == "tag":
            words = self.rng.sample(["best", "sent", "x"], self.rng.randint(1, 2))
            new.tag(store, run, n, frozenset(words))
        elif kind == "untag":
            if not step.tags:
                return
            words = [self.rng.choice(sorted(step.tags))]
            step.tags, kind = step.tags - {*words}, "tag"
            words.append("-d")
        elif kind == "set":
            chosen = {key: self.rng.choice(NUMBERS) for key in self.rng.sample(["loss", "score", "x"], 2)}
            for key, value in chosen.items():
                step.put(key, value)
            words = [f"{k}={v}" for k, v in chosen.items()]
        elif step.set:
            key, kind = self.rng.choice(sorted(step.set)), "set"
            step.set, words = {k: v for k, v in step.set.items() if k != key}, ["--unset", key]
        else:
            return
        self.do([kind, self.folder / store, f"{run}/{n}", *words, "-q"], store, 0, new)

    def rules(self):
        there = sorted({n for runs in self.world.stores.values() for run in runs.values() for n in run.steps})
        named = there if there and self.rng.random() < .8 else range(8)
        one = {"keep-last": lambda: self.rng.randint(1, 4), "keep-every": lambda: self.rng.randint(2, 4),
               "keep-within": lambda: self.rng.choice(["7d", "2w"]), "keep-daily": lambda: self.rng.randint(1, 2),
               "keep-weekly": lambda: 1, "keep-if": lambda: self.rng.choice(sorted(CONDITIONS)),
               "keep-best": lambda: f"{self.rng.randint(1, 3)}:{self.rng.choice(['loss', 'score:max', 'loss:min'])}",
               "keep-step": lambda: ",".join(map(str, self.rng.sample(named, min(2, len(named)))))}
        weights = [4 - 3 * (word == "keep-within") for word in one]
        return list(dict.fromkeys(f"{w}={one[w]()}" for w in self.rng.choices(list(one), weights,
                                                                             k=self.rng.randint(1, 3))))

    @staticmethod
    def as_words(rules):
        return [w for rule in rules for w in ("--" + rule.partition("=")[0], rule.partition("=")[2])]

    def policy(self):
        store, run = self.some_run() or (None, None)
        if not store:
            return
        new, rules = self.world.clone(), self.rng.choice([[], self.rules()])
        if rules == new.stores[store][run].rules:
            return
        new.policy(store, run, rules)
        self.do(["policy", self.folder / store, run, "set" if rules else "clear", *self.as_words(rules), "-q"], store,
                0, new)

    def thin(self):
        self.prune(True)

    def prune(self, thin=False):
        """What is said first is what the model says, and what the collector then frees."""
        store, run = self.some_run() or (None, None)
        if not store:
            return
        rules = self.rules() if self.rng.random() < (.3 if thin else .8) else []
        runs = [run] if self.rng.random() < .7 else [r for r, x in self.world.stores[store].items()]
        if not rules and not any(self.world.stores[store][r].rules for r in runs) and not thin:
            return
        new = self.world.clone()
        code, plan = new.prune(store, runs, rules, thin)
        words = ["prune", self.folder / store, *runs[:len(runs) == 1], *self.as_words(rules),
                 *(["--thin", "optimizer", "--older-than", "0s"] if thin else [])]
        if len(runs) == 1 and self.rng.random() < .5 or len(runs) > 1 and self.rng.random() < .5:
            self.do([*words, "--yes", "-q"], store, code, new, atomic=False)
            return
        self.collected(store)
        would = self.run([*words, "-n", "--json"], store, 0)
        assert would.returncode == code, (words, code, would)
        if code:
            return
        would = json.loads(would.stdout)
        assert {(s["run"], s["step"]): (s["plan"], set(s["kept_by"])) for s in would["steps"]} == plan, words
        self.do([*words, "--yes", "-q"], store, code, new, kill=False)
        assert self.collected(store) == (would["freed_bytes"] or 0), words

    def numbers(self, store, run):
        free = [n for n, s in self.world.steps(store, run).items() if s.pin is None]
        return self.rng.sample(free, self.rng.randint(1, min(3, len(free)))) if free else []

    def remove(self):
        found = self.some_run()
        if not found:
            return
        store, run = found
        numbers = self.rng.sample(sorted(self.world.steps(store, run)), 1)
        new = self.world.clone()
        code = new.remove(store, run, numbers)
        self.do(["rm", self.folder / store, *(f"{run}/{n}" for n in numbers), "-y", "-q"], store, code, new)

    def freed(self):
        found = self.some_run()
        if not found or not (numbers := self.numbers(*found)):
            return
        store, run = found
        self.collected(store)
        steps = [f"{run}/{n}" for n in numbers]
        said = self.vckpt.json("du", self.folder / store, *(w for s in steps for w in ("--freed", s)))["freed"]
        new = self.world.clone()
        code = new.remove(store, run, numbers)
        self.do(["rm", self.folder / store, *steps, "-y", "-q"], store, code, new, kill=False)
        assert self.collected(store) == said["bytes"] > 0

    def repack(self):
        found = self.some_step()
        if not found or self.vckpt("help", "repack", check=False).returncode:       # a vckpt without this command
            return
        new, (store, run, n) = self.world.clone(), found
        new.repack(*found)
        kill = self.kill()
        done = self.run(["repack", self.folder / store, f"{run}/{n}", "--json"], store, kill)
        self.said = f"repack {found}: {done}; kill {kill}"
        if done.returncode == -9 and kill:
            self.killed += 1
            self.between(new, True)
            return
        assert done.returncode == 0, self.said
        repacked = json.loads(done.stdout)["steps"][0]["repacked"]      # else it is in such packs already
        wrong = self.take(new if repacked else self.world.clone())
        assert wrong is None, (self.said, wrong)

    def collect(self):
        store = self.rng.choice("ab")
        self.do(["gc", self.folder / store, "--grace", "0", "-q"], store, 0, self.world.clone())

    def disk(self, store):
        return sum(p.stat().st_size for pattern in ("packs/*/*", "runs/*/manifests/*", "stats/**/*")
                   for p in (self.folder / store).glob(pattern) if p.is_file())

    def collected(self, store):
        """Bytes that go, until there is nothing more to free."""
        before = self.disk(store)
        for _ in range(2):
            self.vckpt("gc", self.folder / store, "--grace", "0", "--heartbeat", "0", "-q")
        assert self.vckpt.json("du", self.folder / store)["spare_bytes"] == 0
        wrong = self.take(self.world.clone())
        assert wrong is None, wrong
        return before - self.disk(store)

    def copy(self):
        a, b = self.rng.choice(["ab", "ab", "ba"])
        found = self.some_run(a)
        if not found:
            return
        run, new = found[1], self.world.clone()
        number = self.rng.choice([None, self.rng.choice(sorted(new.steps(a, run)))])
        replace = self.rng.random() < .5
        code = new.copy(a, b, run, number, replace)
        self.do(["copy", self.folder / a, run if number is None else f"{run}/{number}", "--to", self.folder / b, "-q",
                 *(["--replace"] if replace else [])], b, code, new, atomic=False)

    def sync(self):
        new, (replace, delete) = self.world.clone(), (self.rng.random() < p for p in (.4, .6))
        code = new.sync("a", "b", replace, delete)
        self.do(["sync", self.folder / "a", "--to", self.folder / "b", "-q", *(["--replace"] if replace else []),
                 *(["--delete"] if delete else [])], "b", code, new, atomic=False)

    # ---- comparing ----

    def blobs(self, store, run, n):
        with package.open(self.folder / store / run / str(n), "numpy") as step:
            return {b.name: step.blob(b.name) for b in step.blobs()}

    def check(self):
        for store in "ab":
            for run, r in self.world.stores[store].items():
                self.check_rows(store, run, r.steps)
                for n, s in r.steps.items():
                    self.check_bytes(store, run, n, s)
            self.check_find(store)
            done = self.vckpt("verify", self.folder / store, "--no-notes",
                              *(["--paranoid"] if self.rng.random() < .2 else []), check=False)
            assert done.returncode == 0, (self.said, done)
        found = self.some_step()
        if found:
            self.check_files(*found)

    def check_rows(self, store, run, steps):
        rows = {s["step"]: s for s in self.vckpt.json("ls", self.folder / store, run)["steps"]} if steps else {}
        assert rows.keys() == steps.keys()
        for n, s in steps.items():
            said = rows[n].get("pinned", {}).get("reason"), tuple(rows[n].get("tags", ()))
            assert (rows[n]["entry"], rows[n]["attributes"], *said) == (s.entry, s.attributes, *s.said[:2]), (run, n)
        if not self.fates.get((store, run)):
            return
        log = self.vckpt.json("log", self.folder / store, run)
        saved = {row["entry"]: row for row in log["log"] if row["what"] == "saved"}
        for entry, (n, fate) in self.fates[store, run].items():
            row = saved[entry]
            assert (row["step"], row["visible"]) == (n, not fate) and (not fate or f"{fate}_by" in row), (row, fate)
            if not fate:
                assert row["attributes"] == steps[n].attributes and tuple(row.get("tags", ())) == steps[n].said[1]

    def check_bytes(self, store, run, n, s):
        with package.open(self.folder / store / run / str(n), "numpy") as step:
            assert set(step.keys()) == set(s.tensors), (store, run, n, step.keys())
            for name, a in s.tensors.items():
                found = step.read(*name.split("/"))
                assert found.dtype == a.dtype and found.tobytes() == a.tobytes(), (store, run, n, name)
            assert step.thinned == (("optimizer",) if s.thinned else ())
        assert self.blobs(store, run, n) == s.blobs, (store, run, n)

    def check_find(self, store):
        text = self.rng.choice(sorted(QUESTIONS))
        found = {(row["run"], row["step"]) for row in self.vckpt.json("find", self.folder / store, text)["steps"]}
        assert found == {(run, n) for run, r in self.world.stores[store].items() for n, s in r.steps.items()
                         if QUESTIONS[text](run, n, s)}, text

    def check_files(self, store, run, n):
        out, s = self.folder / "out", self.world.steps(store, run)[n]
        self.vckpt("export", self.folder / store, f"{run}/{n}", out, "-q")
        files = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        del files["manifest.json"]
        shutil.rmtree(out)
        if s.files is not None:
            assert files == s.files, (store, run, n)
        name = self.rng.choice(sorted(s.tensors))
        data = self.vckpt("cat", self.folder / store, f"{run}/{n}/{name}", "--raw", text=False).stdout
        assert data == s.tensors[name].tobytes(), (store, run, n, name)
        if s.thinned:
            done = self.vckpt("cat", self.folder / store, f"{run}/{n}/optimizer/m", check=False)
            assert done.returncode == 1 and "was thinned" in done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(2))
def test_both_stores_are_as_the_model_says(vckpt, lib, build, tmp_path, rng, scale, part):
    """Two tests, for two processors."""
    killed, kinds = 0, set()
    for number in range(scale(1, 20)):
        seed = rng.getrandbits(64)
        folder = tmp_path / str(number)
        folder.mkdir()
        history = History(vckpt, lib, folder, random.Random(seed))
        history.preload = build / "tests/libinterpose.so"
        for _ in range(4):
            history.keep()
        for _ in range(scale(5, 12)):
            for _ in range(5):
                history.act()
            history.check()
        for store in "ab":
            history.collected(store)
        history.check()
        killed, kinds = killed + history.killed, kinds | set(history.kinds)
        shutil.rmtree(folder)
    print("killed", killed, sorted(kinds))
    assert len(kinds) > 5 and killed >= scale(0, 20)        # of one history none may have been
