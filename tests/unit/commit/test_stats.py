# SPDX-License-Identifier: Apache-2.0
"""Measures of a save: put, read back, believed only where they say what their name says, collected with their step."""
import ctypes as c
import errno
import shutil
import threading

import pytest

from protolib import P, Stats, sample_stats, u32, u64
from storelib import Api, Failed, save, scratch

HOUR = 3600
EEXIST = -errno.EEXIST


class Name(c.Structure):
    _fields_ = [("run", c.c_char * 129), ("step", u64), ("entry", u64), ("rank", u32)]


@pytest.fixture
def api(lib, vckpt):
    path = scratch()
    shutil.rmtree(path)
    api = Api(lib, path)
    yield api
    api.close()
    shutil.rmtree(path)


def put(api, entry, m=None, **more):
    m = m or sample_stats(**more)
    api.call(api.lib.commit_stats_put, api.p, c.byref(m), u64(entry))


def read(api, run, step, entry):
    """({rank: copies of numbers}, damaged)"""
    all_, n, damaged = P(Stats)(), u32(), u32()
    api.call(api.lib.commit_stats_read, api.p, run.encode(), u64(step), u64(entry), c.byref(all_), c.byref(n),
             c.byref(damaged))
    out = [(m.rank, m.host, m.committed_ns - m.submitted_ns, [(t.phase, t.ns) for t in m.timings[:m.ntimings]])
           for m in all_[:n.value]]
    api.lib.commit_stats_free(all_, n)
    return out, damaged.value


def names(api):
    return sorted(str(p.relative_to(api.path)) for p in (api.path / "stats").rglob("*")
                  if p.is_file()) if (api.path / "stats").exists() else []


def deleted(reports):
    return {name for kind, name, _ in reports if kind == "delete"}


def test_all_ranks_come_back_in_order(api):
    assert read(api, "run-1", 12, 7) == ([], 0)
    for rank in (3, 0, 10, 2):
        put(api, 7, rank=rank, world=11, host=b"host-%d" % (rank // 2))
    put(api, 8, rank=1)  # the same step, saved again
    assert names(api) == sorted([f"stats/run-1/12.7/{r}" for r in (0, 2, 3, 10)] + ["stats/run-1/12.8/1"])
    found, damaged = read(api, "run-1", 12, 7)
    assert [r for r, *_ in found] == [0, 2, 3, 10] and damaged == 0
    assert found[2] == (3, b"host-1", 70, [(b"plan", 1), (b"copy", 2)])
    assert [r for r, *_ in read(api, "run-1", 12, 8)[0]] == [1]


def test_put_twice(api):
    put(api, 7, rank=3)
    put(api, 7, rank=3)  # an earlier try of unknown outcome
    with pytest.raises(Failed) as e:
        put(api, 7, rank=3, pieces=99)
    assert e.value.code == EEXIST and "stats/run-1/12.7/3" in e.value.text
    with pytest.raises(Failed) as e:
        put(api, 7, rank=9)  # of a world of 4
    assert e.value.code == -errno.EPROTO


def test_what_lies_is_left_out_and_counted(api, vckpt):
    for rank in range(4):
        put(api, 7, rank=rank)
    at = api.path / "stats/run-1/12.7"
    for rank, change in ((0, None), (2, 60)):
        whole = (at / str(rank)).read_bytes()
        (at / str(rank)).unlink()
        if change:
            (at / str(rank)).write_bytes(whole[:change] + bytes([whole[change] ^ 1]) + whole[change + 1:])
        else:
            (at / "12").write_bytes(whole)  # says that it is rank 0's
    (at / "notes").write_text("of a person")
    found, damaged = read(api, "run-1", 12, 7)
    assert ([r for r, *_ in found], damaged) == ([1, 3], 2)


@pytest.mark.parametrize("name,good", [
    ("stats/run-1/12.7/3", True), ("stats/r/0.0/0", True),
    ("stats/r/9223372036854775807.18446744073709551614/4294967295", True),
    ("stats/r/9223372036854775808.0/0", False), ("stats/r/0.18446744073709551615/0", False),
    ("stats/r/0.99999999999999999999/0", False),
    ("stats/r/0.0/4294967296", False), ("stats/r/00.0/0", False), ("stats/r/0.01/0", False), ("stats/r/0.0/00", False),
    ("stats/r/0.0/", False),
    ("stats/r/0.0/0/0", False), ("stats/r/0/0", False), ("stats/r/.0/0", False), ("stats/.r/0.0/0", False),
    ("stats/r/0.0/0x", False),
    ("stats/" + "r" * 129 + "/0.0/0", False), ("stats/", False), ("stats/r", False), ("runs/r/0.0/0", False),
    ("stats/r/-1.0/0", False),
])
def test_names(lib, name, good):
    lib.commit_stats_name_parse.restype = c.c_bool
    n = Name()
    assert lib.commit_stats_name_parse(name.encode(), c.byref(n)) == good
    if good:
        assert f"stats/{n.run.decode()}/{n.step}.{n.entry}/{n.rank}" == name


def measured(api, saved, ranks=1):
    """Measures as the ranks of a save put them after its commit."""
    for rank in range(ranks):
        m = sample_stats(rank, run=saved.run.encode(), step=saved.step, attempt=saved.name.encode(),
                         world=max(ranks, 1))
        put(api, saved.entry, m)
    return f"stats/{saved.run}/{saved.step}.{saved.entry}"


def test_measures_go_with_their_step(api, vckpt):
    first, second = save(api, "r"), save(api, "r")
    old, new = measured(api, first, 3), measured(api, second, 2)
    result, reports = api.gc(grace=HOUR)
    assert reports == [] and result.deleted == 0 and len(names(api)) == 5
    api.remove_step("r", first.step)
    dry, reports = api.gc(grace=HOUR, dry=True)
    assert deleted(reports) == {old} and dry.deleted == 1 and len(names(api)) == 5
    sizes = sum((api.path / n).stat().st_size for n in names(api) if n.startswith(old))
    result, reports = api.gc(grace=HOUR)
    assert deleted(reports) == {old} and (result.deleted, result.deleted_bytes) == (1, sizes)
    assert names(api) == [f"{new}/0", f"{new}/1"] and not (api.path / old).exists()
    assert read(api, "r", second.step, second.entry)[0]
    vckpt("verify", api.path)
    measured(api, first, 3)  # of ranks that were slow to say so
    assert deleted(api.gc(grace=HOUR)[1]) == {old}


def test_measures_of_a_step_that_was_replaced(api):
    first = save(api, "r", step=5)
    second = save(api, "r", step=5, replace=True)
    old, new = measured(api, first), measured(api, second)
    assert deleted(api.gc(grace=HOUR)[1]) == {old} and names(api) == [f"{new}/0"]


def test_strays_are_told_and_left_alone(api, vckpt):
    saved = save(api, "r")
    measured(api, saved)
    good = (api.path / f"stats/r/0.{saved.entry}/0").read_bytes()
    strays = [f"stats/r/0.{saved.entry}/x", "stats/note", f"stats/r/0.{saved.entry}/1/2", "stats/r/5"]
    traces = [f"stats/r/1.{saved.entry}/0", f"stats/r/0.{saved.entry + 1}/0", "stats/other/0.0/0"]
    for name in strays + traces:
        (api.path / name).parent.mkdir(parents=True, exist_ok=True)
        (api.path / name).write_bytes(good)
    with pytest.raises(Failed) as e: # what they are of may have been an entry
        api.gc(grace=0)
    assert {name for kind, name, _ in e.value.reports if kind == "damage"} == set(traces)
    for name in traces:
        (api.path / name).unlink()
    result, reports = api.gc(grace=0)
    assert {name for kind, name, _ in reports if kind == "damage"} == set(strays) and result.deleted == 0
    assert names(api) == sorted(strays + [f"stats/r/0.{saved.entry}/0"])
    assert vckpt("verify", api.path, check=False).returncode == 3


def test_verify_reads_measures(api, vckpt):
    saved = save(api, "r")
    name = measured(api, saved, 2)
    vckpt("verify", api.path)
    path = api.path / name / "1"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    done = vckpt("verify", api.path, check=False)
    assert done.returncode == 3 and f"{name}/1" in done.stdout


def test_measures_of_a_live_step_stay_whatever_goes_on(api):
    """Collections beside saves and removals: a visible step keeps its measures."""
    kept = [save(api, "r") for _ in range(3)]
    for s in kept:
        measured(api, s, 2)
    stop = threading.Event()
    failed = []

    def collect():
        other = Api(api.lib, api.path, init=False)
        while not stop.is_set():
            try:
                other.gc(grace=HOUR)
            except Failed as e:
                failed.append(e)
        other.close()
    thread = threading.Thread(target=collect)
    thread.start()
    for i in range(6):
        s = save(api, "r")
        measured(api, s, 2)
        if i % 2:
            api.remove_step("r", s.step)
        else:
            kept.append(s)
    stop.set()
    thread.join()
    api.gc(grace=HOUR)
    assert not failed
    assert ({n.rsplit("/", 1)[0] for n in names(api)} == {f"stats/r/{s.step}.{s.entry}" for s in kept} and
            len(names(api)) == 2 * len(kept))
