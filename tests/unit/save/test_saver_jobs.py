# SPDX-License-Identifier: Apache-2.0
"""The saver among others: ranks that do not say the same, one that is refused what others are not, imports into its
run, several runs, odd paths."""
import errno
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy
import pytest

from saverlib import ALONE, BUFFER, Failed, Vckpt, api, ranks, store  # noqa: F401


def saved(save):
    try:
        return save.committed()
    except Failed as e:
        return e
    finally:
        save.free()


def refused(done, *words):
    assert all(isinstance(e, Failed) and all(w in e.text for w in ("rank 0 on ", *words)) for e in done), done


# ---- ranks that do not say the same ----

WHOLE = numpy.arange(512 * 700.0).reshape(512, 700)


def on_meshes(api, meshes, words, cut, differ=0):
    """Each rank holds cut(rank) of a matrix, by what it thinks the mesh is; the last one's differs."""
    def work(rank, saver):
        last = rank == len(meshes) - 1
        fields = {"shape": WHOLE.shape, "mesh": api.mesh(*meshes[rank]), "placements": words[rank]}
        return saved(saver.save({"model/w": (cut(rank) + differ * last, fields)}))
    return work


@pytest.mark.parametrize("differ", [0, 1])
def test_another_order_of_ranks(api, store, differ):
    """The boxes cover the tensor, but ranks 1 and 3 do not agree on who holds the same."""
    meshes = [("dp=2,tp=2", [0, 1, 2, 3])] * 3 + [("dp=2,tp=2", [0, 2, 1, 3])]
    work = on_meshes(api, meshes, ["R,S(1)"] * 4, lambda r: WHOLE[:, r % 2 * 350:][:, :350], differ)
    refused(ranks(api, store, "run", 4, work), "model/w", "rank 1 on host", "same mesh")


def test_another_placement(api, store):
    work = on_meshes(api, [("dp=2",)] * 2, ["S(0)", "R"], lambda r: WHOLE if r else WHOLE[:256])
    refused(ranks(api, store, "run", 2, work), "model/w", "rank 1 on host")


def test_a_buffer_for_some(api, store):
    def work(rank, saver):
        return saved(saver.save({"model/x": (WHOLE[0], {"flags": BUFFER * rank})}))
    refused(ranks(api, store, "run", 2, work), "model/x", "rank 0 on host")


def test_replicas_of_one_rank_are_none(api, store):
    """A mesh dimension of size one, and a mesh of one rank: nobody is asked for."""
    def work(rank, saver):
        own = {"shape": (4, 700), "mesh": api.mesh("pp=1,dp=1", [rank])}
        return saved(saver.save({f"model/{rank}": (WHOLE[:4], own), "model/w": (WHOLE[256 * rank:256 * rank + 256], {
            "shape": WHOLE.shape, "mesh": api.mesh("dp=2,tp=1"), "placements": "S(0),R"})}))
    assert ranks(api, store, "run", 2, work) == [0, 0]


def test_attributes_that_differ(api, store):
    def work(rank, saver):
        return saved(saver.save({"model/w": WHOLE}, attributes={"loss": str(rank)}))
    refused(ranks(api, store, "run", 2, work), "ranks 0 and 1 give the step different attributes")


def test_one_tensor_of_two_ranks_alone(api, store):
    def work(rank, saver):
        return saved(saver.save({"model/w": (WHOLE + rank, {"flags": ALONE})}))
    refused(ranks(api, store, "run", 2, work), "ranks 0 and 1 stored different bytes")


def test_all_is_compared_through_a_small_ring(api, store):
    big = numpy.random.default_rng(3).standard_normal((2000, 1024))

    def work(rank, saver):
        mine = big.copy()
        mine[-1, -1] += rank * saver.off
        return saved(saver.save({"model/w": mine}))

    def one(off):
        def job(rank, saver):
            saver.off = off
            return work(rank, saver)
        return job
    assert ranks(api, store, "run", 2, one(0), check=1, ring=8 << 20) == [0, 0]
    refused(ranks(api, store, "run", 2, one(1), check=1, ring=8 << 20, launch="another"), "model/w",
            "differs between rank 0")


def test_ranks_out_of_phase_compare_the_same_block(api, store):
    """Rank 1 leaves a step out, and has begun one save less from then on. All blocks of the tensor are different."""
    def work(rank, saver):
        saves = [saver.save({"model/w": WHOLE}, step=step) for step in range(rank, 4)]
        return [saved(s) for s in saves][1 - rank:]
    assert ranks(api, store, "run", 2, work) == [[1, 2, 3], [1, 2, 3]]


# ---- one is refused what the others are not ----

REFUSED = {"base": {"bases": ["no step"]}, "step": {"step": 2**63}, "attribute": {"attributes": {"": "x"}}}


@pytest.mark.parametrize("what", REFUSED)
def test_a_begin_that_is_refused_uses_its_number(api, store, what):
    """Else the other ranks' first save and this one's second would make one step."""
    def work(rank, saver):
        out, saves = [], []
        for i in range(3):
            part = numpy.full((300, 1000), float(i))
            fields = {"shape": (600, 1000), "mesh": api.mesh("dp=2"), "placements": "S(0)"}
            try:
                saves.append(saver.save({"model/w": (part, fields)}, **(REFUSED[what] if rank and not i else {})))
            except Failed as e:
                out.append(e)
        return out + [saved(s) for s in saves]
    first, second = ranks(api, store, "run", 2, work)
    assert isinstance(first[0], Failed) and isinstance(second[0], Failed) and first[1:] == second[1:], (first, second)
    for i, step in enumerate(first[1:], 1):
        assert (api.read(store, "run", step)["model/w"] == i).all()


# ---- beside others ----

def test_an_import_into_the_run(api, store, vckpt, tmp_path):
    """It takes a number; the trainer's save of that number is refused, the next one is not."""
    numpy.save(tmp_path / "w.npy", WHOLE)
    saver = api.saver(store, "run")
    assert saved(saver.save({"model/w": WHOLE})) == 0
    vckpt("import", store, "run/1", tmp_path / "w.npy")
    done = vckpt("import", store, "run", tmp_path / "w.npy", check=False)
    assert done.returncode and "run" in done.stderr       # without a number while somebody trains
    taken = saved(saver.save({"model/w": WHOLE}))
    assert taken.code == -errno.EEXIST and "step 1" in taken.text
    assert saved(saver.save({"model/w": WHOLE})) == 2
    saver.free()


def test_two_runs_of_one_process(api, store):
    savers = [api.saver(store, run) for run in ("a", "b")]
    saves = [savers[i % 2].save({"model/w": WHOLE + i}) for i in range(6)]
    assert [saved(s) for s in saves] == [0, 0, 1, 1, 2, 2]
    for s in savers:
        s.free()
    for i in range(6):
        assert (api.read(store, "ab"[i % 2], i // 2)["model/w"] == WHOLE + i).all()


def test_a_path_with_everything_in_it(api, tmp_path):
    path = api.store(tmp_path / "a\nb \"%s\" \xff é")
    saver = api.saver(path, "run")
    assert saved(saver.save({"model/w": WHOLE})) == 0
    saver.free()
    assert (api.read(path, "run")["model/w"] == WHOLE).all()


def test_plans_are_counted(api, store):
    """Hits and misses of this saver so far, and how long planning took: what another save changes costs one plan."""
    seen = []
    for _ in range(2):
        saver = api.saver(store, "run")
        for shape in (64, 64, 128, 64):
            save = saver.save({f"model/{i:03}": WHOLE[:shape] for i in range(50)})
            assert save.committed() >= 0
            t = save.timings()
            assert 0 < t.plan_ns < 10**10
            seen.append((t.plan_cached, t.plan_hits, t.plan_misses))
            save.free()
        saver.free()
    assert seen == [(0, 0, 1), (1, 1, 1), (0, 1, 2), (1, 2, 2)] * 2


# ---- memory that is gone ----

FREED = """
import ctypes as c, sys
import numpy
from saverlib import Vckpt
api, libc = Vckpt({build!r}), c.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c.c_void_p, [c.c_size_t], [c.c_void_p]
at = libc.malloc(1 << 20)
array = numpy.ctypeslib.as_array((c.c_uint32 * (1 << 18)).from_address(at))
array[:] = 7
saver = api.saver({store!r}, "run")
save = saver.begin()
save.tensor("model/w", array)
if {early}:
    libc.free(at)
save.submit()
save.staged()
if not {early}:
    libc.free(at)
print("saved", save.committed())
save.free()
saver.free()
"""


@pytest.mark.parametrize("early", [False, True])
def test_freed_before_it_is_staged(api, store, build, early):
    """AddressSanitizer sees it; what is freed after it was staged nobody touches."""
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True,
                          text=True).stdout.strip() if shutil.which("gcc") else ""
    if not os.path.isabs(asan):
        pytest.skip("no libasan.so")
    code = FREED.format(build=str(build), store=store, early=early)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, LD_PRELOAD=asan, ASAN_OPTIONS="detect_leaks=0:verify_asan_link_order=0"))
    if early:
        assert done.returncode and "heap-use-after-free" in done.stderr, done
    else:
        assert done.returncode == 0 and done.stdout == "saved 0\n", done


# ---- who waits ----

def test_a_save_that_waits_is_shown(api, store, vckpt):
    """Who is missing, while it is missing; whose measures are missing, afterwards."""
    shown, come = [], threading.Event()

    def work(rank, saver):
        if rank == 2:
            come.wait(120)
        save = saver.save({"model/w": WHOLE})
        if rank == 0:
            for _ in range(200):
                shown.append(vckpt("ls", "--incoming", store).stdout)
                if "2 of 3" in shown[-1]:
                    break
            come.set()
        return saved(save)
    assert ranks(api, store, "run", 3, work) == [0] * 3
    assert "run/step-00000000  2 of 3 ranks announced, missing 2" in shown[-1], shown[-1]
    assert vckpt("ls", "--incoming", store).stdout.strip() == ""
    (folder,) = (pathlib.Path(store) / "stats/run").iterdir()
    (folder / "1").unlink()
    assert "1 of 3 ranks: 1" in vckpt("stalls", store, "run/0").stdout


def test_why_a_save_was_given_up(api, store):
    """Before submit: the others are told, and the next save is theirs and its own."""
    def work(rank, saver):
        first = saver.begin()
        first.tensor("model/w", numpy.ones(4))
        if rank == 1:
            first.give_up("a function cannot be kept: state[\"hook\"]")
        else:
            first.submit()
            with pytest.raises(Failed, match=r"rank 1 on .*gave it up.*a function cannot be kept: state\[\"hook\"\]"):
                first.committed()
            first.free()
        save = saver.save({"model/w": numpy.ones(4)}, step=9)
        step = save.committed()
        save.free()
        return step
    assert ranks(api, store, "run", 3, work) == [9, 9, 9]
