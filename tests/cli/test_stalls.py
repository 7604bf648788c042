# SPDX-License-Identifier: Apache-2.0
"""vckpt stalls: who was slow at what, told from what the ranks measured; and whose measures are missing."""
import ctypes as c
import json
import pathlib
import threading
import time

import pytest

import saverlib
from protolib import PackUse, Proto, Stats, Timing, manifest_make, sample_announcement, table
from ranklib import PIECE, Launch
from storelib import COMMIT, NONE, fresh
from storelib import Digest as StoreDigest

T0 = 1_700_000_000_000_000_000
MS = 1_000_000
SAVE, STALL = "megatron.checkpoint.save", "megatron.checkpoint.exposed_save"    # as docs/report.md names spans
PHASES = [b"plan", b"copy", b"digest", b"encode", b"write", b"seal", b"wait", b"commit"]


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def span(phase):
    """The name of the span of a phase."""
    shared = {b"write": "megatron.checkpoint.save.io_write", b"commit": "megatron.checkpoint.save.finalize"}
    return shared.get(phase) or f"vckpt.checkpoint.save.{phase.decode()}"


def ranks_save(api, run, world, timings=()):
    """A step of `world` ranks, whose parts hold these timings: (step, entry, attempt)."""
    launches, id_ = {}, f"{run}{time.monotonic_ns()}"
    opening = [threading.Thread(target=lambda r=r: launches.__setitem__(r, Launch(api, run, id_, r, world)))
               for r in range(world)]
    for t in opening:
        t.start()
    for t in opening:
        t.join()
    saves = [launches[r].begin() for r in range(world)]
    for s in saves:
        s.timings = list(timings)
        s.write(bytes([s.launch.rank]) * PIECE)
        s.announce()
    entries = {s.wait() for s in saves}
    assert len(entries) == 1
    out = saves[0].step, entries.pop(), saves[0].name
    for s in saves:
        s.free()
    for launch in launches.values():
        launch.close()
    return out


def times(offset, copy_ms, wait_ms=5):
    """Phases one after another from `offset` on; copy takes copy_ms, the others a millisecond. (timings, staged,
    announced, committed)"""
    out, at, marks = [], T0 + offset, {}
    for name in PHASES:
        took = {b"copy": copy_ms, b"wait": wait_ms}.get(name, 1) * MS
        out.append(Timing(name, took * 2, 1000, at, at + took))
        marks[name] = (at, at + took)
        at += took
    return out, marks[b"copy"][1], marks[b"wait"][0], at


def put_stats(api, run, saved, rank, world, offset=0, copy_ms=2, host=None, timings=None, **more):
    step, entry, attempt = saved
    t, staged, announced, committed = times(offset, copy_ms)
    t = t if timings is None else timings
    m = Stats(run=run.encode(), attempt=attempt.encode(), step=step, rank=rank, world=world,
              host=host or b"node-%d" % (rank // 2), timings=table(Timing, t),
              ntimings=len(t), submitted_ns=T0 + offset, staged_ns=staged, committed_ns=committed, bytes_held=1000,
              bytes_staged=400, bytes_unchanged=100,
              bytes_deduplicated=50, bytes_encoded=250, bytes_written=200, pieces=4, pieces_new=2, plan_cached=rank % 3,
              ring_waits=rank)
    for k, v in more.items():
        setattr(m, k, v)
    api.call(api.lib.commit_stats_put, api.p, c.byref(m), c.c_uint64(entry))


def named(rows, name):
    return [r for r in rows if r["name"] == name][0]


def test_a_phase_that_comes_in_pieces_is_as_long_as_its_work(api, vckpt):
    """Blobs are sealed first, packs last: what lies between was no sealing."""
    timings, *_ = times(0, 9)
    timings[PHASES.index(b"seal")] = Timing(b"seal", 2 * MS, 0, T0, T0 + 40 * MS)
    put_stats(api, "r", ranks_save(api, "r", 1), 0, 1, copy_ms=9, timings=timings)
    slowest = vckpt.json("stalls", api.path, "r/0")["slowest"]
    assert [(s["phase"], s["phase_ns"]) for s in slowest["staged"] + slowest["announced"]] == [("copy", 9 * MS)] * 2


def test_who_was_slow(api, vckpt):
    saved = ranks_save(api, "r", 4)
    for rank, copy in enumerate((2, 9, 3, 4)):
        put_stats(api, "r", saved, rank, 4, rank * MS, copy)
    out = vckpt.json("stalls", api.path, "r/0")
    assert (out["run"], out["step"], out["world"], out["missing"], out["partial"],
            out["damaged"]) == ("r", 0, 4, [], [], 0)
    staged = named(out["milestones"], "staged")
    assert staged == {"name": "staged", "ranks": 4, "median_ns": 4_500_000, "max_ns": 10 * MS, "min_ns": 3 * MS,
                      "rank": 1, "host": "node-0"}
    assert [m["name"] for m in out["milestones"]] == ["staged", "announced", "committed"]
    assert named(out["milestones"], "announced")["max_ns"] == (1 + 9 + 4) * MS
    assert [p["name"].encode() for p in out["phases"]] == PHASES
    copy = named(out["phases"], "copy")
    # busy: two threads
    assert (copy["median_ns"], copy["max_ns"], copy["min_ns"], copy["rank"],
            copy["host"]) == (7 * MS, 18 * MS, 4 * MS, 1, "node-0")
    slowest = out["slowest"]["staged"]
    assert [(s["rank"], s["ns"]) for s in slowest] == [(1, 10 * MS), (3, 5 * MS), (2, 4 * MS), (0, 3 * MS)]
    assert (slowest[0]["phase"], slowest[0]["phase_ns"]) == ("copy", 9 * MS)
    assert out["bytes"] == {"held": 4000, "staged": 1600, "unchanged": 400, "deduplicated": 200, "again": 0,
                            "no_base": 0,
                            "encoded": 1000, "written": 800}
    assert out["bytes_per_s"]["staged"] == 1600 * 100 and out["bytes_per_s"]["written"] == int(800 / 0.014)
    assert [r["stall_ns"] for r in out["ranks"]] == [3 * MS, 10 * MS, 4 * MS, 5 * MS]
    assert [r["plan"] for r in out["ranks"]] == ["made", "memory", "disk",
                                                 "made"] and out["ranks"][3]["ring_waits"] == 3
    text = vckpt("stalls", api.path, "r/latest").stdout
    assert "no timings" not in text and "only what" not in text
    assert "rank 1 on node-0: 9.00 ms in copy" in text
    row = [line.split() for line in text.splitlines() if line.split()[:1] == ["staged"]][0]
    assert row == ["staged", "4.50", "ms", "10.0", "ms", "7.00", "ms", "4", "1", "node-0"]


def test_whose_timings_are_missing(api, vckpt):
    """Ranks without measures are told by their parts, which end with the part; those without either are named."""
    saved = ranks_save(api, "r", 5,
                       [Timing(b"read", 7 * MS, 10), Timing(b"copy", 3 * MS, 20, T0 + 5 * MS, T0 + 8 * MS)])
    for rank in (0, 3):
        put_stats(api, "r", saved, rank, 5)
    out = vckpt.json("stalls", api.path, "r/0")
    assert (out["missing"], out["partial"]) == ([], [1, 2, 4])
    assert [r["timings"] for r in out["ranks"]] == ["stats", "part", "part", "stats", "part"]
    one = out["ranks"][1]
    assert one["stall_ns"] is None and one["submitted_ns"] is None and "bytes" not in one
    assert [(p["name"], p["busy_ns"], p["start_ns"]) for p in one["phases"]] == [("read", 7 * MS, None),
                                                                                 ("copy", 3 * MS, T0 + 5 * MS)]
    assert named(out["phases"], "read")["ranks"] == 3 and named(out["phases"], "copy")["ranks"] == 5
    assert named(out["milestones"], "staged")["ranks"] == 2
    assert ("only what their parts say (phases up to the part) of 3 of 5 "
            "ranks: 1-2, 4" in vckpt("stalls", api.path, "r/0").stdout)
    saved = ranks_save(api, "bare", 3)
    put_stats(api, "bare", saved, 1, 3)
    out = vckpt.json("stalls", api.path, "bare/0")
    assert (out["missing"], out["partial"]) == ([0, 2], []) and [r["timings"]
                                                                 for r in out["ranks"]] == ["none", "stats", "none"]
    assert "no timings of 2 of 3 ranks: 0, 2" in vckpt("stalls", api.path, "bare/0").stdout


def test_nothing_was_measured(api, vckpt):
    ranks_save(api, "r", 2)
    out = vckpt.json("stalls", api.path, "r/0")
    assert (out["missing"], out["milestones"], out["phases"],
            out["slowest"]) == ([0, 1], [], [], {"staged": [], "announced": []})
    assert out["bytes_per_s"] == {"held": None, "staged": None, "written": None}
    assert "no timings of 2 of 2 ranks: 0-1" in vckpt("stalls", api.path, "r/0").stdout
    vckpt("stalls", api.path, "r/0", "--trace", api.path.parent / "trace.json")
    assert [e for e in json.loads((api.path.parent / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"] == []
    (api.path.parent / "trace.json").unlink()


def test_clocks_that_are_wrong(api, vckpt):
    """A clock that was set back: no duration is made up, nothing is negative."""
    saved = ranks_save(api, "r", 2)
    put_stats(api, "r", saved, 0, 2)
    put_stats(api, "r", saved, 1, 2, staged_ns=T0 - 5, committed_ns=1,
              timings=[Timing(b"copy", 2**64 - 1, 2**64 - 1, T0 + 9, T0 + 3), Timing(b"x", 5, 5, 0, 7)])
    out = vckpt.json("stalls", api.path, "r/0")
    assert out["ranks"][1]["stall_ns"] is None and named(out["milestones"], "staged")["ranks"] == 1
    assert named(out["phases"], "copy")["max_ns"] == 2**63 - 1
    trace = pathlib.Path(str(api.path) + ".trace")
    vckpt("stalls", api.path, "r/0", "--trace", trace)
    assert all(e["dur"] >= 0 and e["pid"] == 0 for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X")
    trace.unlink()


def test_the_timeline(api, vckpt, tmp_path):
    saved = ranks_save(api, "r", 3, [Timing(b"copy", 3 * MS, 20, T0 + 5 * MS, T0 + 8 * MS)])
    marks = {}
    for rank, copy in ((0, 4), (2, 7)):
        put_stats(api, "r", saved, rank, 3, (rank + 1) * MS, copy, host=b'no"de\xc3\xa4')
        marks[rank] = times((rank + 1) * MS, copy)
    trace = tmp_path / "trace.json"
    said = vckpt("stalls", api.path, "r/0", "--trace", trace)
    assert "last to be staged" in said.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[0] == 'rank 0 (no"de\u00e4)' and names[1].startswith("rank 1 (") and set(names) == {0, 1, 2}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    for rank in (0, 2):
        submitted, committed = rank * 1000, rank * 1000 + (marks[rank][3] - T0 - (rank + 1) * MS) / 1000
        mine = [e for e in spans if e["pid"] == rank]
        assert {e["name"] for e in mine} == {*map(span, PHASES), SAVE, STALL}
        for e in mine:
            assert submitted <= e["ts"] and e["ts"] + e["dur"] <= committed + 1e-6, e
            thread = threads[rank, e["tid"]]
            assert e["name"] == span(thread.encode()) if e["tid"] else thread == "save"
        save, stall = ([e for e in mine if e["name"] == n][0] for n in (SAVE, STALL))
        assert (save["ts"], save["ts"] + save["dur"],
                stall["dur"]) == (submitted, committed, (marks[rank][1] - T0) / 1000 - (rank + 1) * 1000)
    part = [e for e in spans if e["pid"] == 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in part] == [(span(b"copy"), 4000, 3000)]  # since rank 0's submit
    assert spans[0]["args"] == {} and [e["args"] for e in spans
                                       if e["name"] == span(b"digest")][0] == {"busy_ns": 2 * MS, "bytes": 1000}


def test_a_timeline_that_cannot_be_written(api, vckpt, tmp_path):
    ranks_save(api, "r", 1)
    done = vckpt("stalls", api.path, "r/0", "--trace", tmp_path / "no" / "trace", check=False)
    assert done.returncode == 1 and "No such file" in done.stderr
    saved = ranks_save(api, "r", 1)
    put_stats(api, "r", saved, 0, 1)
    done = vckpt("stalls", api.path, "r/latest", "--trace", "/dev/full", check=False)
    assert done.returncode == 1 and "/dev/full cannot be written" in done.stderr


def test_damaged_measures(api, vckpt):
    saved = ranks_save(api, "r", 2)
    put_stats(api, "r", saved, 0, 2)
    put_stats(api, "r", saved, 1, 2)
    path = api.path / f"stats/r/0.{saved[1]}/1"
    path.write_bytes(path.read_bytes()[:-3])
    done = vckpt("stalls", api.path, "r/0", "--json", check=False)
    out = json.loads(done.stdout)
    assert done.returncode == 3 and (out["damaged"], out["missing"]) == (1, [1])
    assert "1 file of measures or parts cannot be read" in vckpt("stalls", api.path, "r/0", check=False).stdout


def test_measures_of_another_attempt_are_not_believed(api, vckpt):
    step, entry, attempt = ranks_save(api, "r", 2)
    put_stats(api, "r", (step, entry, "0123456789abcdef-0"), 0, 2)
    put_stats(api, "r", (step, entry, attempt), 1, 2)
    assert vckpt.json("stalls", api.path, "r/0")["missing"] == [0]


def test_a_real_save(build, vckpt, tmp_path):
    """Four ranks: every one's measures are kept, and its phases lie between submit and commit."""
    numpy = pytest.importorskip("numpy")
    lib, store = saverlib.Vckpt(build), tmp_path / "store"
    lib.store(store)
    data = [numpy.random.default_rng(r).standard_normal((512, 600)).astype("f4") for r in range(4)]

    def rank(r, saver):
        steps = []
        for _ in range(2):
            save = saver.save({f"model/w{r}": (data[r], {"flags": saverlib.ALONE})})
            steps.append(save.committed())
            save.free()
        return steps
    assert saverlib.ranks(lib, store, "r", 4, rank) == [[0, 1]] * 4
    for step, new in ((0, True), (1, False)):
        trace = tmp_path / "trace"
        out = vckpt.json("stalls", store, f"r/{step}", "--trace", trace)
        assert (out["missing"], out["partial"], out["damaged"]) == ([], [], 0)
        assert (out["bytes"]["held"] == 4 * data[0].nbytes and
                out["bytes"]["unchanged"] == (0 if new else 4 * data[0].nbytes))
        assert (out["bytes"]["written"] > 4 * data[0].nbytes * 0.8) == new
        assert {"copy", "digest", "seal", "wait"} <= {p["name"] for p in out["phases"]}
        assert [m["ranks"] for m in out["milestones"]] == [4, 4, 4]
        for r in out["ranks"]:
            assert (r["submitted_ns"] < r["staged_ns"] <= r["committed_ns"] and
                    r["submitted_ns"] < r["announced_ns"] <= r["committed_ns"])
        spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
        whole = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == SAVE}
        assert set(whole) == set(range(4)) and min(a for a, _ in whole.values()) == 0
        for e in spans:
            a, b = whole[e["pid"]]
            assert a - 1e-3 <= e["ts"] and e["ts"] + e["dur"] <= b + 1e-3, e


def test_an_import(vckpt, store, tmp_path):
    """One rank, whose part has timings: partial, and a table."""
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "a.npy", numpy.zeros(100_000, "f4"))
    vckpt("import", store, "r", tmp_path / "a.npy")
    out = vckpt.json("stalls", store, "r/0")
    assert out["partial"] == [0] and named(out["phases"], "digest")["ranks"] == 1


@pytest.mark.parametrize("args,code", [((), 2), (("r",), 2), (("r/0/model",), 2), (("r/7",), 1), (("x/0",), 1),
                                       (("r/0", "more"), 2), (("r/0", "--trace"), 2)])
def test_usage(api, vckpt, args, code):
    ranks_save(api, "r", 1)
    done = vckpt("stalls", api.path, *args, check=False)
    assert done.returncode == code and done.stderr.startswith("vckpt stalls: ")


def test_many_phases_and_names_that_play_tricks(api, vckpt):
    saved = ranks_save(api, "r", 1)
    put_stats(api, "r", saved, 0, 1, host=b"\x1b[31mred", timings=[Timing(b"phase %d" % i, i, i) for i in range(200)] +
              [Timing(b"copy", 1, 1), Timing(b"copy", 2, 2)])
    done = vckpt("stalls", api.path, "r/0")
    assert ("\x1b" not in done.stdout and "\\x1b[31mred" in done.stdout and
            "144 timings are of phases beyond the first 64 names" in done.stdout)
    out = vckpt.json("stalls", api.path, "r/0")
    assert len(out["phases"]) == 57 and named(out["phases"], "copy")["max_ns"] == 3


def test_8192_ranks(api, vckpt, scale, tmp_path):
    """Reading grows with the ranks, not with their square."""
    proto = Proto(api.lib)

    def commit(run, world):
        """A step whose manifest names parts that nobody reads."""
        attempt = b"00000000000000aa-0"
        parts = []
        for r in range(world):
            a = sample_announcement(r, world, r == 0, run=run.encode(), attempt=attempt, step=3)
            a.packs, a.npacks = table(PackUse, [PackUse(attempt + b"-%d-meta" % r, 1 << 20, 64)]), 1
            a.part.pack = a.layout_ref.pack = 0
            if r == 0:
                a.headers[0].ref.pack = 0
            parts.append(a)
        code, body, hex_ = manifest_make(proto.lib, parts)
        assert code == 0, body
        assert api.lib.store_record_put(c.c_void_p(api.p.contents.storage),
                                        f"runs/{run}/manifests/{hex_.hex()}".encode(), 3,
                                        (c.c_uint8 * 16)(*api.id), body, c.c_size_t(len(body))) == 0
        with api.list(run) as l:
            return 3, l.put(api.entry(COMMIT, step=3, attempt=attempt, replaces=NONE,
                                      manifest=StoreDigest.from_buffer_copy(hex_))), attempt.decode()

    def measure(run, world):
        saved = commit(run, world)
        for r in range(world):
            put_stats(api, run, saved, r, world, copy_ms=2 + r % 7)
        took = []
        for _ in range(3):  # the best: other tests have the processors, too
            start = time.monotonic()
            out = vckpt.json("stalls", api.path, f"{run}/3", "--trace", tmp_path / "trace")
            took.append(time.monotonic() - start)
        assert out["missing"] == [] and out["world"] == world and named(out["milestones"], "staged")["max_ns"] == 9 * MS
        return min(took)
    small, large = scale((256, 1024), (1024, 8192))
    a, b = measure("small", small), measure("large", large)
    print(f"\n{small} ranks {a:.2f} s, {large} ranks {b:.2f} s")
    assert b < 3 * (a + 0.05) * large / small
