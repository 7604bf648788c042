# SPDX-License-Identifier: Apache-2.0
"""vckpt ls --incoming: saves under way, who is missing, for how long, and whether anybody is still at it."""
import contextlib
import os
import threading
import time

from ranklib import PIECE, Launch, Ranks, api  # noqa: F401
from storelib import Attempt, put_heartbeat
from test_schema import check, manual


def opened(api, run, id_, world, heartbeat_ms=0):  # noqa: F811
    out = [None] * world
    threads = [threading.Thread(target=lambda r=r: out.__setitem__(r, Launch(api, run, id_, r, world, heartbeat_ms)))
               for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def write(attempt):
    attempt.write(bytes([attempt.launch.rank % 256]) * PIECE)
    attempt.announce()
    return attempt


def incoming(vckpt, api, *run):  # noqa: F811
    out = vckpt.json("ls", api.path, "--incoming", *run)
    check(out, manual()["ls STORE --incoming"])
    return out["incoming"]


def close(launches, attempts):
    for a in attempts:
        a.free()
    for launch in launches:
        launch.close()


def left_behind(launches):
    """A save of theirs commits, and its folder in incoming/ stays, as where the committer was killed before it deleted
    it. Returns (folder, attempts)."""
    attempts = [launch.begin() for launch in launches]
    for a in attempts:
        write(a)
    folder = launches[0].api.path / "incoming/r" / attempts[0].name
    kept = {p.name: p.read_bytes() for p in folder.iterdir()}
    for a in attempts:
        a.wait()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    return folder, attempts


SELDOM_MS = 3600_000


@contextlib.contextmanager
def elsewhere(api, launch):  # noqa: F811
    """Rank 0 of the launch beats on another host. Its own heartbeats are to be far apart: SELDOM_MS."""
    for p in (api.path / "hosts").iterdir():
        p.unlink()
    put_heartbeat(api, launch.name, "r", 0)
    yield
    (api.path / "hosts" / f"{launch.name}.elsewhere.0").unlink()


def test_nothing_is_under_way(api, vckpt):  # noqa: F811
    assert incoming(vckpt, api) == [] and vckpt("ls", api.path, "--incoming").stdout == ""
    done = vckpt("ls", api.path, "--incoming", "r/0", check=False)
    assert done.returncode == 2 and "without a step" in done.stderr


def test_who_is_missing(api, vckpt):  # noqa: F811
    launches = opened(api, "llama", "one", 12)
    attempts = [launch.begin() for launch in launches]
    for r in (0, 2, 3, 9):
        write(attempts[r])
    one, = incoming(vckpt, api)
    assert one["missing"] == [1, 4, 5, 6, 7, 8, 10, 11] and (one["announced"], one["world"], one["step"]) == (4, 12, 0)
    assert (one["run"], one["attempt"], one["state"], one["decided"], one["left_over"], one["replace"],
            one["import"]) == (
        "llama", attempts[0].name, "alive", None, False, False, False)
    assert 0 <= one["age_s"] < 60 and one["since"].startswith("2") and one["host"] == api.lib.store_hostname().decode()
    line, = vckpt("ls", api.path, "--incoming").stdout.splitlines()
    assert (line.startswith("llama/step-00000000  4 of 12 ranks announced, missing 1, 4-8, 10-11  for ") and
            "  alive  attempt " in line)
    for r in set(range(12)) - {0, 2, 3, 9}:
        write(attempts[r])
    assert incoming(vckpt, api)[0]["missing"] == []
    assert "12 of 12 ranks announced  for" in vckpt("ls", api.path, "--incoming").stdout
    for a in attempts:
        a.wait()
    close(launches, attempts)
    assert incoming(vckpt, api) == []


def test_several_runs_and_replacing(api, vckpt):  # noqa: F811
    launches = opened(api, "a", "one", 2)
    attempts = [launch.begin(step=7) for launch in launches]
    for a in attempts:
        write(a)
    for a in attempts:
        a.wait()
    again = [launch.begin(step=7, replace=True) for launch in launches]
    write(again[0])
    alone = Attempt(api, "b", 3)
    found = incoming(vckpt, api)
    assert [(i["run"], i["step"], i["replace"], i["import"]) for i in found] == [("a", 7, True, False),
                                                                                 ("b", 3, False, True)]
    assert (found[1]["since"], found[1]["age_s"], found[1]["host"], found[1]["world"]) == (None, None, None, 1)
    assert ("a/step-00000007 (replacing)  1 of 2 ranks announced, "
            "missing 1" in vckpt("ls", api.path, "--incoming").stdout)
    assert [i["run"] for i in incoming(vckpt, api, "b")] == ["b"] and incoming(vckpt, api, "c") == []
    write(again[1])
    for a in again:
        a.wait()
    alone.abort()
    alone.free()
    close(launches, attempts + again)


def die(api, rank):  # noqa: F811
    launch = Launch(api, "r", "dead", rank, 3)
    a = launch.begin()
    if rank < 2:
        write(a)
    api.say("here")
    api.hear()


def test_what_the_dead_left_behind(api, vckpt):  # noqa: F811
    with Ranks(api, 3, die) as ranks:
        ranks.said(range(3), "here")
        one, = incoming(vckpt, api)
        assert (one["state"], one["left_over"], one["missing"]) == ("alive", False, [2])
        for r in range(3):
            ranks.kill(r)
    one, = incoming(vckpt, api)
    assert (one["state"], one["decided"], one["left_over"], one["missing"]) == ("dead", None, True, [2])
    assert "left over (dead)" in vckpt("ls", api.path, "--incoming").stdout
    vckpt("gc", api.path)
    assert incoming(vckpt, api) == []


def test_a_folder_that_the_list_has_decided(api, vckpt):  # noqa: F811
    """The committer was killed before it deleted the folder, or could not: it means nothing any more."""
    launches = opened(api, "r", "one", 2)
    folder, attempts = left_behind(launches)
    close([], attempts)
    one, = incoming(vckpt, api)
    assert (one["state"], one["decided"], one["left_over"]) == ("alive", "committed", True)
    assert "committed; left over (alive)" in vckpt("ls", api.path, "--incoming").stdout
    (folder / "begin").unlink()
    one, = incoming(vckpt, api)
    assert (one["step"], one["world"], one["missing"], one["import"], one["announced"]) == (None, None, None, None, 2)
    assert "r  not begun" in vckpt("ls", api.path, "--incoming").stdout
    close(launches, [])


def test_another_hosts_writer_is_unknown(api, vckpt):  # noqa: F811
    launches = opened(api, "r", "one", 2, heartbeat_ms=SELDOM_MS)
    attempts = [launch.begin() for launch in launches]
    with elsewhere(api, launches[0]):
        assert incoming(vckpt, api)[0]["state"] == "unknown"
    close(launches, attempts)


def test_thousands_of_ranks(api, vckpt, scale):  # noqa: F811
    """Announcements are counted by their names alone, and ranges keep the line short."""
    world = scale(1024, 8192)
    launch = Launch(api, "r", "many", 0, world)
    a = launch.begin()
    folder = api.path / "incoming/r" / a.name
    for r in range(0, world, 3):
        (folder / f"part.{r}").write_bytes(b"")
    start = time.monotonic()
    one, = incoming(vckpt, api)
    assert one["missing"] == [r for r in range(world) if r % 3] and one["announced"] == len(range(0, world, 3))
    line = vckpt("ls", api.path, "--incoming").stdout
    assert "missing 1-2, 4-5, 7-8" in line and " more  for " in line and len(line) < 400
    print(f"\n{world} ranks: {time.monotonic() - start:.2f} s")
    for p in folder.glob("part.*"):
        os.unlink(p)
    a.free()
    launch.close()
