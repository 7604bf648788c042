# SPDX-License-Identifier: Apache-2.0
"""Saves of many writers: calls of the storage are counted, never timed, and grow with the writers, not with their
square.

tests/bench/writers.c plays the ranks; where it says what is played. Ranks of two layouts and more share tensors."""
import ctypes as c
import json
import os
import shutil
import subprocess

import pytest

from ranklib import Failed, Launch, Meddler, api, scratch  # noqa: F401
from storelib import put_heartbeat

FEW, MANY = 64, 256


def played(build, vckpt, world, mode, layouts=1):
    store = scratch()
    shutil.rmtree(store)
    vckpt("init", store, "-q")
    words = [os.path.join(build, "tests/bench_writers"), store, str(world), mode, "0", str(layouts), "still"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verified = vckpt("verify", store, check=False)
    assert verified.returncode == 0, verified.stdout
    shutil.rmtree(store)
    return json.loads(done.stdout)


def calls(counts):
    # appends go through a buffer
    return sum(n for kind, n in counts.items() if kind not in ("listed", "writer_append", "bytes_read"))


@pytest.fixture(scope="module")
def save_of_few_and_of_many(build, vckpt):
    return [played(build, vckpt, world, "last") for world in (FEW, MANY)]


@pytest.mark.parametrize("phase,each",
                         [("launch", 30), ("prepare", 8), ("incoming", 2), ("commit", 9), ("others", 5), ("open", 0)])
def test_calls_of_each_phase_grow_with_the_writers(save_of_few_and_of_many, phase, each):
    """But for opening the step: that asks no writer."""
    few, many = (save[phase] for save in save_of_few_and_of_many)
    assert calls(many) <= calls(few) * MANY / FEW * 1.3 + 50, (few, many)
    # each rank lists the launch's heartbeats once when it opens, names only: a living rank 0, nobody else that is this
    # rank
    if phase == "launch":
        assert many["listed"] <= MANY * MANY + 50, many
    else:
        assert many["listed"] <= few["listed"] * MANY / FEW * 1.3 + 50, (few, many)
    assert calls(many) <= each * MANY + 50, (few, many)


def test_a_base_is_looked_up_by_its_own_line(save_of_few_and_of_many):
    few, many = save_of_few_and_of_many
    assert few["base_found"] == many["base_found"] == 16
    assert calls(many["base"]) <= calls(few["base"]) <= 16, (few["base"], many["base"])


def test_a_blob_is_found_without_the_other_ranks(save_of_few_and_of_many):
    """The document of all ranks and a rank's own need the heads of two parts (one is in a pack that is open)."""
    few, many = (save["blobs"] for save in save_of_few_and_of_many)
    assert few["file_open"] == many["file_open"] == 1 and calls(few) == calls(many) <= 6, (few, many)
    assert many["bytes_read"] <= few["bytes_read"] + 64 < 20_000, (few, many)


def test_manifest_and_announcements_grow_with_the_writers(save_of_few_and_of_many):
    few, many = save_of_few_and_of_many
    for what in ("manifest_bytes", "announcements_bytes", "open_bytes"):
        # of memory a sanitizer's heap says 0
        assert many[what] <= few[what] * MANY / FEW * 1.3, (what, few[what], many[what])
    assert many["announcements_bytes"] / MANY < 6000


def test_rank_0_reads_announcements_as_they_come(build, vckpt):
    """In vain it asks for a few a poll: that counts polls, at most one a millisecond, and not ranks times ranks."""
    many = played(build, vckpt, MANY, "first")
    assert calls(many["prepare_and_commit"]) <= 25 * MANY + 16 * 1000 * many["save_s"]


@pytest.mark.parametrize("layouts", [1, 2, 7])
def test_a_tensor_of_several_layouts_counts_once(build, vckpt, layouts):
    done = played(build, vckpt, 16, "last", layouts)
    assert done["tensors"] == done["listed_tensors"] == 16 + layouts


# ---- heartbeats ----

def test_a_heartbeat_of_another_host_is_known_by_its_name(api):
    """Who commits reads the files of its own host's ranks alone: a launch of 8,192 ranks is listed, not read."""
    launches = [Launch(api, "r", "job", 0, 40)]
    for rank in range(2, 40):
        put_heartbeat(api, launches[0].name, "r", 5, f"elsewhere.r{rank}")
    a = launches[0].begin()
    a.write(b"x" * 100)
    a.announce()
    m, read = Meddler(api), []
    m.answer["read_whole"] = lambda args: read.append(c.string_at(args[1]))
    with pytest.raises(Failed) as e:
        a.wait(300)
    m.end()
    assert "not announced" in e.value.text
    own = [name for name in read if name.startswith(b"hosts/")]
    assert m.count["list"] == 1 and len(own) == 1 and own[0].startswith(f"hosts/{launches[0].name}.".encode()), (
        (m.count, own))
    a.free()
    launches[0].close()
    for rank in range(2, 40):
        (api.path / "hosts" / f"{launches[0].name}.elsewhere.r{rank}.5").unlink()


def test_heartbeats_that_move_while_they_are_looked_at(api):
    """A listing of launches reads each file once, and those again that gave way meanwhile; not all of them."""
    for i in range(50):
        put_heartbeat(api, f"{i:016x}", "r", 1, "elsewhere")
    moved = []

    def first_is_gone(args):
        if not moved:
            moved.append((api.path / "hosts" / f"{0:016x}.elsewhere.1").unlink())
            put_heartbeat(api, f"{0:016x}", "r", 2, "elsewhere")
    m = Meddler(api)
    m.answer["read_whole"] = first_is_gone
    found = api.launches()
    m.end()
    assert len(found) == 50 and m.count["list"] == 2 and m.count["read_whole"] == 51, m.count
