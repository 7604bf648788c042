# SPDX-License-Identifier: Apache-2.0
"""A call that reads or changes a run, and others that go on at any point of it: hundreds of entries pass, and a
collection deletes what the call has not read yet. What the call says is so before or after that, nothing is taken for
damage, and no step is lost."""
import ctypes as c
import os
import pathlib
import shutil

import pytest

from crashlib import verify
from ranklib import Meddler
from storelib import EABORTED, LAUNCH, NONE, Api, Attempt, Failed, save, scratch
from test_list_head import RUN, aged, fake, live_of, sound
from test_list_snapshots import Newest

ORDER = ["packs", "manifests", "runs"]              # a name comes after what it needs
NAMED = ("put", "remove", "list", "list_dirs", "size", "read_whole", "file_open", "sync_dir", "writer_open")
UNCOUNTED = ("file_close", "writer_abandon", "stat")


def files(path):
    return {p.relative_to(path) for p in path.rglob("*") if p.is_file() and p.parent.name != "hosts"}


def turn_of(name):
    return ORDER.index("manifests" if "manifests" in name.parts else name.parts[0]), name


class Passing:
    """A store before, and what came to pass: others put entries, saved a step, and collected."""

    def __init__(self, lib, dir_, entries, removes):
        self.dir, self.old, self.new, self.number = dir_, dir_ / "old", dir_ / "new", 0
        api = Api(lib, self.old)
        aged(api, saves=(3, 40, 120, 190), n=200)
        api.gc()                                            # the list has a head already
        with api.list(RUN) as l:
            fake(l, range(20_000, 20_250))
            self.next = l.next
        self.before = live_of(api)
        api.close()
        shutil.copytree(self.old, self.new)
        api = Api(lib, self.new, init=False)
        if removes:
            api.remove_step(RUN, 40)
        for first in (30_000, 40_000):
            with api.list(RUN) as l:
                fake(l, range(first, first + entries // 4))
            if first == 30_000:
                save(api, RUN, 500)
        assert api.gc()[0].entries
        self.after = live_of(api)
        api.close()
        self.more = sorted(files(self.new) - files(self.old), key=turn_of)
        self.less = files(self.old) - files(self.new)
        self.other = [name for name in files(self.old) & files(self.new) if
                      (self.old / name).read_bytes() != (self.new / name).read_bytes()]

    def copy(self):
        self.number += 1
        path = self.dir / str(self.number)
        shutil.copytree(self.old, path, copy_function=os.link)
        return path

    def comes(self, path):
        """False: an entry was put already, which the others would have read."""
        if (path / f"runs/{RUN}/{self.next:012}").exists():
            return False
        for name in self.more:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(self.new / name, path / name)
        for name in self.other:
            os.link(self.new / name, path / "exchanged")
            (path / "exchanged").rename(path / name)
        for name in self.less:
            (path / name).unlink(missing_ok=True)
        return True


@pytest.fixture(scope="module", params=[
    pytest.param((1800, False), id="beyond"),
    pytest.param((1800, True), id="beyond, one removed", marks=pytest.mark.full),
    pytest.param((60, True), id="within", marks=pytest.mark.full)])
def passing(lib, request):
    """The new head is beyond the end that the call has found first, or within."""
    path = scratch()
    yield Passing(lib, path, *request.param)
    shutil.rmtree(path)


class Turn:
    """The store is another one from the k-th call of its storage on. 0: never."""

    def __init__(self, passing, api, at):
        self.passing, self.path, self.at, self.calls, self.came = passing, api.path, at, [], False
        self.m = Meddler(api)
        self.answer, self.m.called = self.m.called, self.called

    def called(self, name, inner, args):
        with self.m.lock:
            if name not in UNCOUNTED:
                file = pathlib.Path(os.fsdecode(c.string_at(args[1]))) if name in NAMED else pathlib.Path()
                self.calls.append((name, file if name.startswith("list") else file.parent))
                if len(self.calls) == self.at:
                    self.came = self.passing.comes(self.path)
        return self.answer(name, inner, args)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.m.end()


def shown(l):
    l.know("all") if isinstance(l, Newest) else None
    assert l.damaged == 0
    return {step: entry for step, (entry, *_) in l.steps().items()}


def known(l, passing):
    now = {step: entry for step, entry in shown(l).items() if step < 20_000}   # one of these may be there for an entry
    assert now in (passing.before, passing.after), f"missing {passing.before.items() - now.items()}, " \
        f"more {now.items() - passing.after.items()}, next {l.next}, first {getattr(l, 'first', None)}"


# ---- what is called ----

def opens(kind):
    def call(api, passing):
        with kind(api) as l:
            known(l, passing)
            l.refresh()
            known(l, passing)
    return lambda api: None, call


def held(kind, what):
    """A list that is open before."""
    def call(l, passing):
        with l:
            what(l)
            known(l, passing)
    return kind, call


def saves(step, replace):
    def call(api, passing):
        a = Attempt(api, RUN, step, replace)
        try:
            a.write(b"y" * 100)
            a.commit()
            return {step: a.entry}
        except Failed as e:
            # the collection did not see its folder
            assert e.code == EABORTED and "collected entries of the list that it had not read" in e.text, e
        finally:
            a.free()
    return lambda api: None, call


def removes(api, passing):
    api.remove_step(RUN, 120)
    return {120: None}


def collects(api, passing):
    try:
        api.gc()
    except Failed as e:
        assert verify(api) == []        # it may have deleted packs by then
        assert "run vckpt gc again" in e.text or "try again" in e.text, e


def verifies(api, passing):
    assert verify(api) == []


def plain(api):
    return api.list(RUN)


def whole(api):
    return api.list(RUN, True)


def newest(api):
    return Newest(api, RUN)


def launches(l):
    l.put(l.api.entry(LAUNCH, launch=b"%016x" % 99, newest_step=NONE))


CALLS = {
    "opens the list": opens(plain), "opens it whole": opens(whole), "opens it for the newest": opens(newest),
    "refreshes": held(plain, lambda l: l.refresh()), "refreshes the whole": held(whole, lambda l: l.refresh()),
    "refreshes the newest": held(newest, lambda l: l.refresh()), "learns all": held(newest, lambda l: l.know("all")),
    "launches": held(newest, launches), "launches, knowing all": held(whole, launches),
    "saves": saves(600, False), "replaces": saves(3, True), "removes": (lambda api: None, removes),
    "collects": (lambda api: None, collects), "verifies": (lambda api: None, verifies)}


@pytest.mark.parametrize("name", CALLS)
def test_others_go_on_at_any_call(lib, passing, scale, rng, name):
    before, call = CALLS[name]

    def one(at):
        api = Api(lib, passing.copy(), init=False)
        try:
            opened = before(api)
            with Turn(passing, api, at) as turn:
                own = call(opened or api, passing) or {}
            if turn.came:
                sound(api, {step: n for step, n in {**passing.after, **own}.items() if n is not None})
                assert verify(api) == []
            return turn.calls
        finally:
            api.close()
            shutil.rmtree(api.path)
    calls = one(0)
    # some of the first of each kind, and a few
    first = {kind: i for i, kind in reversed([*enumerate(calls, 1)]) if kind[0] not in ("size", "read_whole")}
    first, others = [*first.values()], [*range(1, len(calls) + 1)]
    wrong = []
    for at in sorted({*rng.sample(first, min(len(first), scale(6, 400))),
                      *rng.sample(others, min(len(others), scale(1, 400)))}):
        try:
            one(at)
        except (AssertionError, Failed) as e:
            wrong.append(f"call {at}, {calls[at - 1]}: {type(e).__name__}: {str(e)[:300]}")
    assert not wrong, f"{len(wrong)} of {len(calls)}:\n" + "\n".join(wrong[:30])
