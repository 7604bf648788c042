# SPDX-License-Identifier: Apache-2.0
"""How much of a machine a saver takes: its ring grows with what is saved, waits are told, the ranks of a node share
memory and processors."""
import ctypes
import json
import os
import re
import subprocess
import sys

import numpy
import pytest

from saverlib import api, ranks, store  # noqa: F401

MIB, GIB = 1 << 20, 1 << 30
VARIABLES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def saved(saver, nbytes, **options):
    """The timings of a save of so many bytes, and what was saved."""
    data = numpy.random.default_rng(nbytes).integers(0, 256, nbytes, "u1")
    save = saver.save({"model/w": data}, **options)
    save.committed()
    t = save.timings()
    save.free()
    return t, data


def phase(t, name):
    return {p.name.decode(): p for p in t.phase}[name]


# ---- the ring ----

def test_a_first_save_that_is_small_does_not_hold_later_ones_back(api, store):
    saver = api.saver(store, "run", ring=0)
    assert saved(saver, MIB)[0].ring_waits == 0
    for _ in range(2):
        t, data = saved(saver, 150 * MIB)
        assert t.ring_waits == 0 and phase(t, "room").busy_ns == 0
    saver.free()
    assert api.read(store, "run")["model/w"].tobytes() == data.tobytes()


def test_a_ring_in_use_grows_when_it_is_empty(api, store):
    """The large saves are declared while the small one is under way."""
    small, large = numpy.arange(MIB), numpy.random.default_rng(1).integers(0, 256, (4, 150 * MIB // 4), "u1")
    saver = api.saver(store, "run", ring=0)
    saves = [saver.save({"model/w": a}) for a in (small, large, large[:2], small)]
    assert saves[-1].committed() == 3
    for step, (save, want) in enumerate(zip(saves, (small, large, large[:2], small))):
        save.free()
        assert api.read(store, "run", step)["model/w"].tobytes() == want.tobytes()
    assert saved(saver, 150 * MIB)[0].ring_waits == 0
    saver.free()


def test_samples_have_room_behind_bands_that_wait_to_be_written(api, store):
    """The ring has room for one band, which the pack writes from there only once more has come; what is sampled of
    replicas comes behind it."""
    data = numpy.random.default_rng(2).integers(0, 256, (4096, 1024), "u1")

    def work(rank, saver):
        save = saver.save({"model/w": data})
        try:
            return save.committed()
        finally:
            save.free()
    assert ranks(api, store, "run", 2, work, ring=2 * MIB) == [0, 0]
    assert api.read(store, "run")["model/w"].tobytes() == data.tobytes()


def test_a_ring_of_a_given_size_stays(api, store):
    saver = api.saver(store, "run", ring=16 * MIB)
    saved(saver, MIB)
    assert saved(saver, 100 * MIB)[0].ring_waits > 0
    saver.free()


START = """
import os, resource, sys, time
import numpy
from saverlib import Failed, Vckpt
MIB = 1 << 20
api = Vckpt(sys.argv[1])
store = api.store(sys.argv[2])
data = numpy.random.default_rng(1).integers(0, 256, int(os.environ.get("MIBS", 200)) * MIB, "u1")


def save(saver, nbytes):
    save = saver.save({"model/w": data[:nbytes]})
    save.committed()
    t = save.timings()
    save.free()
    return t
"""


def run(build, tmp_path, script, **env):
    if "VCKPT_PRELOAD" in os.environ:
        env.setdefault("LD_PRELOAD", os.environ["VCKPT_PRELOAD"])
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", START + script, build, tmp_path / "store"], capture_output=True,
                          text=True, timeout=120,
                          env={**clean, **env})
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.skipif("VCKPT_PRELOAD" in os.environ, reason="the sanitizers reserve more addresses than the limit leaves")
def test_memory_that_is_not_to_be_had_leaves_the_ring_as_it_is(build, tmp_path):
    """And a later save tries again."""
    run(build, tmp_path, '''
saver = api.saver(store, "run", ring=0, pin=1)
save(saver, MIB)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * MIB, resource.RLIM_INFINITY))
assert save(saver, 190 * MIB).ring_waits > 0
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert save(saver, 190 * MIB).ring_waits == 0
saver.free()
found = api.read(store, "run")
assert found["model/w"].tobytes() == data[:190 * MIB].tobytes()
''')


def test_a_save_that_waited_is_told_once(build, tmp_path):
    """The workers digest slowly enough: one of them, 200 MiB through a ring of 12."""
    done = run(build, tmp_path, '''
saver = api.saver(store, "run", ring=12 * MIB, threads=1)
t = save(saver, 200 * MIB)
room = t.phase[1]
assert t.ring_waits and room.name == b"room" and room.busy_ns > 100_000_000, room.busy_ns
data ^= 1
assert save(saver, 200 * MIB).ring_waits
saver.free()
''')
    told = [line for line in done.stderr.splitlines() if "waited" in line]
    assert len(told) == 1 and re.search(r"run run step 0: copying its 200 MiB waited \d+\.\d s for room in the staging "
                                        r"ring of 12 MiB, and writing \d+\.\d s for the disk: "
                                        r"ring_bytes of 20\d MiB would hold all of it \(said once\)$",
                                        told[0]), done.stderr


def test_a_wait_is_shown_by_stalls(api, store, vckpt):
    saver = api.saver(store, "run", ring=12 * MIB, threads=1)
    t, _ = saved(saver, 100 * MIB)
    saver.free()
    found = json.loads(vckpt("stalls", store, "run/0", "--json").stdout)
    times = {p["name"]: p["max_ns"] for p in found["phases"]}
    assert times["room"] == phase(t, "room").busy_ns > 0
    assert times["disk"] > 0        # of `write` and `seal`


@pytest.mark.parametrize("needed, have, memory, ranks, want", [
    (MIB, 0, 100 * GIB, 1, 64 * MIB), (GIB, 0, 100 * GIB, 1, GIB + 32 * MIB), (90 * GIB, 0, 100 * GIB, 1, 50 * GIB),
    (90 * GIB, 0, 100 * GIB, 8, 25 * GIB // 4),
    (GIB, 0, 100 * GIB, 8, GIB + 32 * MIB), (GIB, 0, 64 * MIB, 8, 64 * MIB),
    (GIB, 64 * MIB, 100 * GIB, 1, GIB + 32 * MIB), (GIB, 2 * GIB, 100 * GIB, 1, 2 * GIB),
    (90 * GIB, 50 * GIB, 50 * GIB, 1, 50 * GIB),
    (90 * GIB, 40 * GIB, 42 * GIB, 1, 40 * GIB), (90 * GIB, 40 * GIB, 60 * GIB, 1, 50 * GIB),
    (90 * GIB, 6 * GIB, 90 * GIB, 8, 6 * GIB),
    (90 * GIB, 50 * GIB, 20 * GIB, 1, 50 * GIB), (1 << 62, 0, (1 << 64) - 1, 1, (1 << 62) + 32 * MIB),
    (GIB, 0, 0, 0, 64 * MIB)])
def test_sizes(lib, needed, have, memory, ranks, want):
    lib.saver_room_size.restype = ctypes.c_uint64
    assert lib.saver_room_size(*map(ctypes.c_uint64, (needed, have, memory)), ranks) == want


# ---- the ranks of a node ----

@pytest.fixture
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("env, world, want", [
    ({}, 64, 0), ({}, 1, 1), ({"LOCAL_WORLD_SIZE": "8"}, 64, 8), ({"LOCAL_WORLD_SIZE": "8"}, 1, 1),
    ({"LOCAL_WORLD_SIZE": "8"}, 4, 4),
    ({"SLURM_NTASKS_PER_NODE": "4"}, 64, 4), ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 64, 0),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 64, 2), ({"MPI_LOCALNRANKS": "16"}, 64, 16),
    ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1", "MPI_LOCALNRANKS": "3"}, 64, 8),
    ({"LOCAL_WORLD_SIZE": "words", "MPI_LOCALNRANKS": "3"}, 64, 3),
    ({"LOCAL_WORLD_SIZE": "0"}, 64, 0), ({"LOCAL_WORLD_SIZE": "-3"}, 64, 0), ({"LOCAL_WORLD_SIZE": ""}, 64, 0)])
def test_what_the_launcher_says(lib, no_variables, env, world, want):
    for name, value in env.items():
        no_variables.setenv(name, value)
    assert lib.base_machine_node_ranks(world) == want


def test_threads_are_the_processors_shared(lib):
    cpus = lib.base_cpu_count()
    assert ([lib.saver_node_threads(0, n) for n in (0, 1, cpus, 100 * cpus)] == [cpus, cpus, 1, 1] and
            lib.saver_node_threads(5, 8) == 5)


COUNT = '''
from proclib import tasks


def settled(want):
    end = time.monotonic() + 60
    while len(tasks() - before) != want and time.monotonic() < end:
        time.sleep(0.01)
    assert len(tasks() - before) == want, len(tasks() - before)
'''


@pytest.fixture
def many_cpus(build, tmp_path):
    """A library that pretends to 8 processors, and no control groups."""
    source = tmp_path / "cpus.c"
    source.write_text("""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
int sched_getaffinity(pid_t p, size_t n, cpu_set_t *s) { (void)p; memset(s, 0, n); memset(s, 0xff, 1); return 0; }
FILE *fopen64(const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, "fopen64");
    return strncmp(path, "/sys/fs/cgroup", 14) == 0 ? NULL : real(path, mode);
}
FILE *fopen(const char *path, const char *mode) { return fopen64(path, mode); }
""")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "cpus.so", source], check=True)
    return str(tmp_path / "cpus.so")


def counted(build, tmp_path, many_cpus, script, **env):
    preload = " ".join([os.environ.get("VCKPT_PRELOAD", ""), many_cpus]).strip()
    return run(build, tmp_path, COUNT + script, LD_PRELOAD=preload, MIBS="5", **env)


@pytest.mark.parametrize("env, workers",
                         [({}, 8), ({"LOCAL_WORLD_SIZE": "4"}, 8), ({"LOCAL_WORLD_SIZE": "4", "W": "64"}, 2),
                          ({"MPI_LOCALNRANKS": "8", "W": "64"}, 1)])
def test_workers_are_divided_by_what_the_launcher_says(build, tmp_path, many_cpus, env, workers):
    """A world of one has the machine; heartbeat and persister are a thread each."""
    counted(build, tmp_path, many_cpus, '''
before = tasks()
saver = api.saver(store, "run", rank=0, world=int(os.environ.get("W", 1)), launch="l", ring=0, threads=0)
settled(2 + %d)
saver.free()
''' % workers, **{k: v for k, v in env.items()})


def test_workers_are_divided_by_the_ranks_that_show_this_machine(build, tmp_path, many_cpus):
    """Four ranks of this machine: each begins with 8 workers and keeps 2 of them."""
    counted(build, tmp_path, many_cpus, '''
import threading
before, savers = tasks(), [None] * 4
def open_one(rank):
    savers[rank] = api.saver(store, "run", rank=rank, world=4, launch="l", ring=0, threads=0)
openers = [threading.Thread(target=open_one, args=(r,)) for r in range(4)]
[t.start() for t in openers]
[t.join() for t in openers]
settled(4 * (2 + 8))
saves = [s.save({"model/w": data[:1000]}, step=1) for s in savers]
for s in saves:
    s.committed()
    s.free()
settled(4 * (2 + 2))
saves = [s.save({"model/w": data[:5 * MIB]}, step=2) for s in savers]
assert [s.committed() for s in saves] == [2] * 4
for s in saves:
    s.free()
for s in savers:
    s.free()
''')


def test_threads_that_are_given_stay(build, tmp_path, many_cpus):
    counted(build, tmp_path, many_cpus, '''
before = tasks()
saver = api.saver(store, "run", rank=0, world=64, launch="l", ring=0, threads=5)
settled(2 + 5)
saver.free()
''', LOCAL_WORLD_SIZE="8")
