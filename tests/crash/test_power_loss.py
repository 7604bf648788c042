# SPDX-License-Identifier: Apache-2.0
"""Power losses: the calls of four ranks' saves are recorded once; for each point at which the power may go, and each
choice of what was not synced, no state shows a step whose bytes are missing, and none has lost a step that a rank was
told."""
import shutil
import tempfile

import pytest

from crashlib import DRIVERS, LIMIT_S, WORLD, Bench, steps, verify
from powerlib import MARK, NAMES, SYNC, SYNC_DIR, Disk, Files, choices, durable, read_log, state


@pytest.fixture(scope="module", params=DRIVERS)
def bench(lib, build, request):
    b = Bench(lib, build, request.param)
    yield b
    b.close()


def record(bench, saves, **options):
    """The log of a launch, and what the store was before it."""
    path = bench.copy()
    log = path.parent / f"{path.name}.log"
    before = Files(path)
    out, _ = bench.job(path, "recorded", saves=saves, log=log, **options)
    assert all(len(o.saved) == saves and not o.failed for o in out.values()), out
    events = read_log(log)
    files, dirs = state(before, events, lambda i: True)
    now = Files(path)
    assert files == now.files and dirs == now.dirs    # the log is all that happened
    shutil.rmtree(path)
    return before, events


def promised(events, cut):
    """Steps that some rank was told before the cut."""
    return {int(e.path.split()[2]) for e in events[:cut] if e.kind == MARK and e.path.split()[1] == "saved"}


class Judge:
    def __init__(self, bench, before, events):
        self.bench, self.before, self.events, self.seen, self.shown = bench, before, events, {}, 0
        self.disk = Disk(tempfile.mkdtemp(prefix="power", dir=bench.dir))

    def look(self, kept, cut, told):
        files, dirs = state(self.before, self.events, kept.__contains__)
        key = hash((frozenset(files.items()), frozenset(dirs)))
        if key not in self.seen:
            self.disk.become(files, dirs)
            self.seen[key] = self.shows(cut, kept)
        shown = self.seen[key]
        assert told <= shown, (cut, told, shown,
                               [self.events[i] for i in range(cut) if i not in kept and self.events[i].kind in NAMES])

    def shows(self, cut, kept):
        """Steps that this state shows, each of them whole."""
        api = self.bench.open(self.disk.path)
        try:
            now = steps(api)
            hurt = [d for d in verify(api) if d[2] is not None]
            assert not hurt, (cut, hurt, sorted(set(range(cut)) - kept), self.events[cut - 3:cut])
            self.shown += len(now)
            return set(now)
        finally:
            api.close()


def goes_on(judge, path, told):
    """The next launch works on what is left, and every step is whole."""
    judge.disk.copy(path)
    out, _ = judge.bench.job(path, "after the loss")
    assert all(len(o.saved) == 1 and not o.failed for o in out.values()), out
    api = judge.bench.open(path)
    try:
        assert told < set(steps(api)) and not [d for d in verify(api) if d[2] is not None]
    finally:
        api.close()
        shutil.rmtree(path)


def test_no_state_shows_what_is_not_there(bench, scale, rng):
    before, events = record(bench, scale(1, 3))
    keeps, judge, states, started = durable(events), Judge(bench, before, events), 0, 0
    # between two syncs nothing becomes durable: what is lost there is lost at the next one, too
    cuts = [i for i in range(len(events) + 1) if i == len(events) or events[i].kind in (SYNC, SYNC_DIR, MARK)]
    if scale(True, False):
        cuts = sorted(rng.sample(cuts, min(40, len(cuts))) + [len(events)])
    for cut in cuts:
        told = promised(events, cut) | {0}
        for kept in choices(events, keeps, cut, rng, scale(6, 200)):
            judge.look(kept, cut, told)
            states += 1
        if rng.random() < scale(6, 100) / len(cuts):
            goes_on(judge, bench.dir / f"went{cut}", told)
            started += 1
    print(f"{len(events)} events, {len(cuts)} cuts, {states} choices, {len(judge.seen)} states, {judge.shown} steps "
          f"looked at, {started} launches")
    assert len(judge.seen) > len(cuts) and judge.shown > len(judge.seen)


def test_a_store_that_forgets_an_fsync_is_found_out(bench, rng):
    """The test's own test: without the fsyncs of files, or of directories, some state shows a step whose bytes are
    gone, or loses one that was told."""
    before, events = record(bench, 1)
    for missing in (lambda e: e.kind == SYNC, lambda e: e.kind == SYNC_DIR and e.path.startswith("packs/"),
                    lambda e: e.kind == SYNC_DIR and e.path == "runs/r"):
        less = [e for e in events if not missing(e)]
        keeps, judge, found = durable(less), Judge(bench, before, less), False
        for cut in range(len(less), 0, -1):
            for kept in choices(less, keeps, cut, rng, 0):
                try:
                    judge.look(kept, cut, promised(less, cut) | {0})
                except AssertionError:
                    found = True
                    break
            if found:
                break
        assert found


def test_a_launch_that_dies_and_the_next(bench, scale, rng):
    """Power losses in the second launch, on a store in which the first was killed half way."""
    path = bench.copy()
    calls = bench.calls()[0]
    out, _ = bench.job(path, "killed", inject={0: f"do=killall,at={rng.randrange(len(calls) // 3, len(calls))}"})
    base, log = Files(path), path.parent / f"{path.name}.second.log"
    out, _ = bench.job(path, "second", log=log)
    assert all(o.saved for o in out.values()) and len(out) == WORLD, out
    events = read_log(log)
    keeps, judge = durable(events), Judge(bench, base, events)
    cuts = [i for i in range(len(events) + 1) if i == len(events) or events[i].kind in (SYNC, SYNC_DIR, MARK)]
    for cut in sorted(rng.sample(cuts, min(scale(15, len(cuts)), len(cuts)))):
        for kept in choices(events, keeps, cut, rng, scale(4, 200)):
            judge.look(kept, cut, promised(events, cut) | {0})
    print(f"{len(events)} events, {len(judge.seen)} states")


def given_up(bench, path, word, words=""):
    """Four ranks save while the file system gives up its journal (EROFS from then on, also from fsync), where `word`
    says so for rank 0; then the power goes. The steps that were told, and those that are there, each of them whole."""
    log, aborted = path.parent / f"{path.name}.log", path.parent / f"{path.name}.aborted"
    before = Files(path)
    inject = {rank: f"aborted={aborted}{words}" + f",do=abort,{word}" * (rank == 0) for rank in range(WORLD)}
    out, _ = bench.job(path, "given up", saves=2, log=log, inject=inject, start_ms=1000, timeout=LIMIT_S)
    assert all(not o.killed for o in out.values()), out
    if not aborted.exists():    # the saves had fewer calls this time
        assert all(len(o.saved) == 2 for o in out.values()), out
        return None
    events = read_log(log)
    keeps, judge = durable(events), Judge(bench, before, events)
    judge.disk.become(*state(before, events, lambda i: keeps[i] is not None))
    shown = judge.shows(len(events), set())
    shutil.rmtree(judge.disk.path.parent)
    return promised(events, len(events)) | {0}, shown


def test_a_journal_that_is_given_up(bench, scale, rng):
    """What was not synced by then never will be: an fsync that answers EROFS has made nothing durable."""
    number, seen = len(bench.calls()[0]), []
    words = [f"at={n}" for n in rng.sample(range(number // 4, number * 7 // 4), scale(8, number))]

    def one(path, word):
        outcome = given_up(bench, path, word)
        if outcome:
            told, shown = outcome
            assert told <= shown, (told, shown)
            seen.append(len(told))
    bench.each([*words, f"at={number}", "path=runs/r/000000000003,calls=linkat,when=after,at=1"], one)
    print(f"{len(seen)} times, {sum(seen) - len(seen)} saves told")
    assert len(seen) > len(words) / 2 and sum(seen) > len(seen)


def test_a_store_that_believes_erofs_is_found_out(bench):
    """The test's own test: a rank is told of a step whose entry is not synced, unless another one was so fast as to do
    it."""
    for _ in range(20):
        told, shown = given_up(bench, bench.copy(), "path=runs/r/000000000003,calls=linkat,when=after,at=1",
                               ",believe=1")
        if told > shown:
            return
    raise AssertionError("no save was lost")
