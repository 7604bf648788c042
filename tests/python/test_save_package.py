# SPDX-License-Identifier: Apache-2.0
"""save, async_save, Saver and Step without torch: one rank, and ranks that are threads with a launch id of their
own."""
import errno
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest

import vckpt
from vckpt import _lib
from vckpt import saver as savers

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    yield tmp_path / "store/run"
    try:
        vckpt.close(tmp_path / "store/run")
    except vckpt.Error as error:
        print("close:", error)


# ---- one rank ----

KINDS = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]


def arrays():
    rng = np.random.default_rng(1)
    found = {f"kind.{kind}": rng.integers(0, 2 if kind == "?" else 100, (5, 3)).astype(kind) for kind in KINDS}
    base = rng.random((40, 60))
    found.update(t=base.T, cut=base[3:30:4, ::7], back=base[::-1, ::-1], wide=np.broadcast_to(base[0], (4, 60)),
                 scalar=np.array(2.5),
                 none=np.zeros((3, 0, 2)), big=base.astype(">f8"), large=rng.random((700, 900)).astype("f4"))
    found["odd name/%\t.é"] = base[:2]
    return found


def test_arrays_come_back(run):
    wanted = arrays()
    assert vckpt.save(run, {"model": wanted, "one": wanted["large"]}, **OPTIONS) == 0
    with vckpt.Step(run, framework="numpy") as step:
        assert {t.name: t.shape for t in step.tensors()
                if t.component == "model"} == {name: array.shape for name, array in wanted.items()}
        for name, array in wanted.items():
            found = step["model", name].numpy()
            assert found.dtype == array.dtype.newbyteorder("=") and found.shape == array.shape
            assert np.array_equal(found, array), name
        assert np.array_equal(step["one"], wanted["large"])
        tree = step.values("model")
        assert list(tree) == list(wanted) and all(np.array_equal(tree[name], wanted[name]) for name in wanted)


ONES = np.ones(2)


@pytest.mark.parametrize("state, arguments, wanted", [
    ({"w": ONES, "b": ONES}, {}, [("model", "b"), ("model", "w")]),
    ({"layers.0.w": ONES, "b": ONES}, {}, [("model", "b"), ("model", "layers.0.w")]),
    ({"layers.0.w": ONES}, {}, [("model", "layers.0.w")]),
    ({"ema": ONES}, {}, [("ema", "ema")]),
    ({"temperature": ONES, "w": ONES, "lr": 0.1}, {}, [("temperature", "temperature"), ("w", "w")]),
    ({"w": ONES, "b": ONES, "queue": ONES}, {"per_rank": "queue"}, [("b", "b"), ("w", "w")]),
    ({"model": {"w": ONES}, "ema": ONES}, {}, [("ema", "ema"), ("model", "w")])])
def test_a_state_dict_by_itself_is_the_component_model(run, state, arguments, wanted):
    vckpt.save(run, state, **arguments, **OPTIONS)
    with vckpt.Step(run, framework="numpy") as step:
        assert sorted((info.component, info.name) for info in step.tensors()) == wanted
        if {component for component, _ in wanted} == {"model"}:
            assert list(step.values("model")) == list(state) and all(np.array_equal(step[name], state[name])
                                                                     for name in state)


def test_a_state_dict_that_other_things_were_put_into_is_refused(run):
    with pytest.raises(vckpt.Refused, match=r'state\["layers.0.w"\]: a tensor with a dot in its name belongs to a '
                       r'state dict: give that dict as one '
                                            r'component: \{"model": state_dict, ...\}'):
        vckpt.save(run, {"layers.0.w": ONES, "epoch": 3}, **OPTIONS)
    assert vckpt.steps(run) == []


def test_reading_boxes(run):
    array = np.arange(600 * 700, dtype="f4").reshape(600, 700)
    vckpt.save(run, {"m": {"w": array}}, step=5, attributes={"loss": 2.31, "note": "é"}, blobs={"config.json": b"{}"},
               **OPTIONS)
    with vckpt.Step(run / "5", framework="numpy") as step:
        assert np.array_equal(step.read("m", "w", (slice(100, 300), slice(5, 9))), array[100:300, 5:9])
        assert np.array_equal(step.read("m", "w", ((0, 690), (600, 10))), array[:, 690:])
        out = np.zeros((700, 600), "f4").T
        assert step.read("m", "w", out=out) is out and np.array_equal(out, array)
        back = np.zeros((3, 3), "f4")[::-1, ::-1]
        assert np.array_equal(step.read("m", "w", (slice(0, 3), slice(0, 3)), out=back), array[:3, :3])
        for bad in (np.zeros((600, 700), "f8"), np.zeros((600, 1), "f4"), "x"):
            with pytest.raises(ValueError):
                step.read("m", "w", out=bad)
        for box in [(slice(0, 601), slice(0, 1)), ((0, 0), (601, 1)), ((599, 0), (2, 1))][1:]:
            with pytest.raises(vckpt.Error):
                step.read("m", "w", box)
        with pytest.raises(KeyError):
            step["nothing"]
        with pytest.raises(FileNotFoundError):
            step.read("m", "nothing")
        assert step.attributes == {"loss": "2.31", "note": "é"} and step.blob("config.json") == b"{}"
        assert "w" in step and "m/w" in step and ("m", "w") in step and "x" not in step
    with pytest.raises(vckpt.Error, match="is closed"):
        step.read("m", "w")


def test_a_step_is_a_mapping_of_its_tensors(run):
    state = {"model": {"w": np.arange(6.0).reshape(2, 3), "a/b": ONES}, "ema": {"w": ONES}, "lr": 0.1}
    vckpt.save(run, state, step=7, attributes={"loss": 2.5}, blobs={"config.json": b"{}"}, **OPTIONS)
    with vckpt.Step(run, framework="numpy") as step:
        assert len(step) == 3 and sorted(step) == sorted(step.keys()) == ["ema/w", "model/a/b", "model/w"]
        assert (all(name in step and np.array_equal(array, step[name]) for name, array in dict(step).items()) and
                len(dict(step)) == 3)
        assert np.array_equal(step["a/b"], ONES) and np.array_equal(step["model/w"], state["model"]["w"])
        assert "model" not in step and 3 not in step and ("ema", "w") in step and "" not in step
        with pytest.raises(KeyError, match=r"model is a component, not a tensor: step.values\('model'\) gives it"):
            step["model"]
        with pytest.raises(KeyError, match=r"w is in .* and .*: give step\[COMPONENT, NAME\]"):
            step["w"]
        for wrong in ("x", 3, ("model", "x")):
            with pytest.raises(KeyError):
                step[wrong]
        assert repr(step) == f"<vckpt.Step {run}/7: ema (1 tensor, 16 B), model (2 tensors, 64 B), 4 files, loss=2.5>"
    assert repr(step) == f"<vckpt.Step {run}/7: ema (1 tensor, 16 B), model (2 tensors, 64 B), 4 files, closed>"
    vckpt.save(run, {}, step=8)
    with vckpt.Step(run) as step:
        assert not list(step) and len(step) == 0 and step and repr(step) == f"<vckpt.Step {run}/8: empty>"


def test_latest(run, tmp_path):
    assert vckpt.latest(run) is None
    for number in (5, 12, 7):
        vckpt.save(run, {}, step=number, **OPTIONS)
    with vckpt.Step(run) as step:
        assert vckpt.latest(run) == step.number == vckpt.steps(run)[-1]
    with pytest.raises(vckpt.NotAStore):
        vckpt.latest(tmp_path / "none/run")


def test_wait(run, tmp_path):
    vckpt.save(run, {}, step=5, **OPTIONS)
    assert vckpt.wait(run) == vckpt.wait(run, after=4, timeout=0) == 5
    began = time.monotonic()
    for path, after, said in ((run, 5, "no step above 5"), (run, 12, "no step above 12"),
                              (f"{run}-2", None, "no step")):
        with pytest.raises(vckpt.Timeout, match=f"has {said} after 0.3 s: call again"):
            vckpt.wait(path, after=after, timeout=0.3)
    assert time.monotonic() - began >= 0.9
    with pytest.raises(vckpt.NotAStore):
        vckpt.wait(tmp_path / "none/run", timeout=60)


def test_wait_gives_a_step_that_another_process_saves_meanwhile(run):
    vckpt.save(run, {}, step=5, **OPTIONS)
    other = subprocess.Popen([sys.executable, "-c", "import sys, time, vckpt; time.sleep(0.6); "
                              "vckpt.save(sys.argv[1], {}, step=6); print(time.time())", run], stdout=subprocess.PIPE,
                             text=True)
    assert vckpt.wait(run, after=5, timeout=60) == 6
    seen = time.time()
    assert seen - float(other.communicate()[0]) < 5           # not after a time-out of a minute


def test_the_version_is_that_of_the_project(tmp_path):
    wanted = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())[1]
    assert vckpt.__version__ == vckpt.version() == wanted
    done = subprocess.run([sys.executable, "-c", "import vckpt; print(hasattr(vckpt, '__version__')); "
                           "vckpt.__version__"], capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "tools/python"),
                               "VCKPT_LIBRARY": str(tmp_path / "none.so")})
    assert done.stdout == "False\n" and "AttributeError: libvckpt.so is not found" in done.stderr, done.stderr


def test_paths(run, tmp_path):
    state = {"m": {"w": np.ones(3)}}
    store = run.parent
    assert vckpt.save(run / "3", state, **OPTIONS) == 3
    assert vckpt.save(f"{run}/step-00000007", state) == 7
    assert vckpt.save(os.path.relpath(run), state) == 8
    assert vckpt.steps(run) == [3, 7, 8] and vckpt.steps(store / "other") == []
    assert vckpt.Step(run / "latest").number == 8 and vckpt.Step(run / "step-00000003").number == 3
    for path, kind, said in [(store, ValueError, "is a store: name a run"),
                             (tmp_path / "no/-run", ValueError, "no parent directory is a store, and '-run' cannot be"),
                             (run / "a/b", ValueError, "expected RUN, RUN/STEP or STEP"),
                             (run / "x", ValueError, "expected RUN, RUN/STEP or STEP"),
                             (run / "latest", ValueError, "latest can be read, not saved"),
                             (store / "-bad run", vckpt.Error, "-bad run")]:
        with pytest.raises(kind, match=said):
            vckpt.save(path, state)
    with pytest.raises(ValueError, match="the path says step 3, step= says 4"):
        vckpt.save(run / "3", state, step=4)
    with pytest.raises(ValueError, match="a Saver saves a run, not one step"):
        vckpt.Saver(run / "3")
    with pytest.raises(FileNotFoundError):
        vckpt.Step(run / "99")
    with pytest.raises(vckpt.NotAStore, match="no parent directory is a store"):
        vckpt.Step(tmp_path / "no/run")                           # only a save makes one
    inner = tmp_path / "store/run-of-its-own"                     # the nearest parent counts
    vckpt.init(tmp_path / "other")
    (tmp_path / "other").rename(inner)
    assert savers.split(inner / "r/4")[0] == str(inner)


def test_existing_steps(run):
    first, second = {"m": {"w": np.ones(3)}}, {"m": {"w": np.zeros(3)}}
    assert vckpt.save(run, first, step=4, **OPTIONS) == 4
    with pytest.raises(vckpt.StepExists, match="run has a step 4 already") as e:
        vckpt.save(run, second, step=4)
    assert isinstance(e.value, FileExistsError)
    assert e.value.args[1] == "run has a step 4 already, and replace was not asked for: replace=True replaces it"
    with pytest.raises(vckpt.StoreExists, match="is a vckpt store already") as e:
        vckpt.init(run.parent)
    assert isinstance(e.value, FileExistsError) and not isinstance(e.value, vckpt.StepExists)
    assert np.array_equal(vckpt.Step(run / "4", "numpy")["w"], np.ones(3))
    assert vckpt.save(run, second, step=4, replace=True) == 4
    assert np.array_equal(vckpt.Step(run / "4", "numpy")["w"], np.zeros(3))
    assert vckpt.save(run, first) == 5


def test_staged_data_is_the_callers(run):
    """CPU memory too: what is changed after staged() does not reach the file."""
    arrays = [np.full((500, 400), float(i)) for i in range(8)]
    with vckpt.Saver(run, **OPTIONS) as saver:
        for turn in range(3):
            for i, array in enumerate(arrays):
                array[:] = 10 * turn + i
            handle = saver.async_save({"m": dict(enumerate(arrays))})
            handle.staged(timeout=60)
            for array in arrays:
                array[:] = np.nan
    for turn in range(3):
        with vckpt.Step(run / str(turn), "numpy") as step:
            for i in range(8):
                assert (step["m", str(i)].numpy() == 10 * turn + i).all()


def test_temporaries_live_until_staged(run):
    """Arrays that the caller lets go of at once, and copies that the package made."""
    handle = vckpt.async_save(run, {"m": {str(i): np.full(100000, i)[::-1] for i in range(20)}}, **OPTIONS)
    junk = [np.full(100000, -1) for _ in range(20)]
    handle.staged()
    assert handle._refs == [] and len(junk) == 20
    with vckpt.Step(f"{run}/{handle.committed()}", "numpy") as step:
        assert all((step["m", str(i)].numpy() == i).all() for i in range(20))


def test_a_handle(run):
    with vckpt.Saver(run, **OPTIONS) as saver:
        handle = saver.async_save({"m": {"w": np.ones((1000, 1000))}}, attributes={"loss": 1})
        number = handle.committed(timeout=60)
        assert handle.step == number == 0 and handle.done and handle.state == "committed"
        timings = handle.timings
        assert {"plan", "copy", "digest", "commit"} <= set(timings["phases"]) and timings["bytes_held"] == 8000000
        assert 0 < timings["submitted_ns"] <= timings["staged_ns"] <= timings["committed_ns"] and timings["call_ns"] > 0
        assert 8000000 <= handle.progress["bytes_done"] <= handle.progress["bytes_total"] < 8001000
        again = saver.async_save({"m": {"w": np.ones((1000, 1000))}})
        again.committed()
        assert again.timings["bytes_unchanged"] > 0 and again.timings["plan_cached"] == 1
    assert handle.committed() == 0                        # also after close
    with pytest.raises(vckpt.Error, match="is closed"):
        saver.save({})
    saver.close()


def test_time_outs(run, threads):
    """A save of two ranks of which one does not come."""
    launch = uuid.uuid4().hex

    def rank(number):
        saver = vckpt.Saver(run, rank=number, world=2, launch_id=launch, **OPTIONS)
        if number == 0:
            with pytest.raises(ValueError, match="2 ranks save together, so a save needs step="):
                saver.async_save({"m": {"w": np.ones(3)}})
            handle = saver.async_save({"m": {"w": np.ones(3)}}, step=0)
            handle.staged(timeout=120)
            with pytest.raises(TimeoutError):
                handle.committed(timeout=0.3)
            with pytest.raises(vckpt.Timeout):
                handle.committed(timeout=0)
            assert not handle.done
            gate.set()
        else:
            gate.wait(60)
            handle = saver.async_save({"m": {"w": np.ones(3)}}, step=0)
        number = handle.committed()
        saver.close()
        return number
    gate = threading.Event()
    assert threads({0: rank, 1: rank}) == {0: 0, 1: 0}


WRONG = [
    ({"blobs": {"config.json": "text"}}, "blob 'config.json': expected bytes, not str"),
    ({"blobs": {"config.json": 3}}, "expected bytes, not int"),
    ({"base": 17}, "base 17: expected RUN/STEP"),
    ({"attributes": {"loss": np.ones(1)}}, "attribute 'loss': .* not ndarray: give its item"),
    ({"attributes": {"loss": None}}, "attribute 'loss': .* not NoneType$"),
    ({"mesh": "dp=2,tp=4"}, "mesh= has rank 7, and this job has world size 1"),
    ({"ring_bytes": "1G"}, "ring_bytes='1G': expected a whole number of bytes"),
    ({"threads": -1}, "threads=-1: expected a whole number"),
    ({"threads": True}, "threads=True: expected"),
    ({"heartbeat": "3"}, "heartbeat='3': expected seconds"),
    ({"start_timeout": float("nan")}, "start_timeout=nan: expected seconds"),
    ({"deadline": -1}, "deadline=-1: expected seconds"),
]


@pytest.mark.parametrize("arguments, sentence", WRONG, ids=[sentence[:24] for _, sentence in WRONG])
def test_an_argument_that_cannot_be_is_named(run, arguments, sentence):
    with pytest.raises(vckpt.InvalidArgument, match=sentence):
        vckpt.save(run, {"m": np.arange(4)}, **{**OPTIONS, **arguments})
    vckpt.save(run, {"m": np.arange(4)}, attributes={"loss": np.float32(2.5), "n": np.int64(3)}, **OPTIONS)
    with vckpt.Step(run) as step:
        assert step.attributes == {"loss": "2.5", "n": "3"}


def test_a_state_inside_itself_is_refused_by_name(run):
    state = {"m": np.arange(4), "trainer": {}}
    state["trainer"]["self"] = state
    with pytest.raises(vckpt.Refused, match='state."trainer"'):
        vckpt.save(run, state, **OPTIONS)


def test_a_wait_that_times_out_says_where_to_look(tmp_path, threads):
    vckpt.init(tmp_path / "my store")
    run = tmp_path / "my store/run"

    def one(rank):
        with vckpt.Saver(run, rank=rank, world=2, launch_id=launch, **OPTIONS) as saver:
            handle = None if rank else saver.async_save({"m": np.arange(4)}, step=0)
            if rank == 0:
                with pytest.raises(vckpt.Timeout, match=f"`vckpt ls '{tmp_path}/my store' --incoming`"):
                    handle.committed(timeout=0.1)
            turn.wait()
            return (handle or saver.async_save({"m": np.arange(4)}, step=0)).committed()
    launch, turn = uuid.uuid4().hex, threading.Barrier(2)
    assert threads({0: one, 1: one}) == {0: 0, 1: 0}


# ---- ranks ----

def test_a_deadline_for_ranks_that_do_not_save(run, threads):
    """What `if rank == 0: save` comes to: without a deadline it is a wait for ever. The save after it is one of
    both."""
    def one(rank):
        with vckpt.Saver(run, rank=rank, world=2, launch_id=launch, deadline=0.5, **OPTIONS) as saver:
            opened.wait()
            if rank == 0:
                with pytest.raises(vckpt.Aborted, match="rank 1 on .*: it has not announced its part 0.5 s "
                                   "after rank 0 on .*, which is the deadline; its heartbeat moved [0-9.]+ s ago"):
                    saver.save({"m": np.arange(4)}, step=0)
            turn.wait()
            if rank == 1:
                with pytest.raises(vckpt.Aborted, match="rank 1 on .*: it has not announced"):
                    saver.save({"m": np.arange(4)}, step=0)
            return saver.save({"m": np.arange(4)}, step=1)
    launch, opened, turn = uuid.uuid4().hex, threading.Barrier(2), threading.Barrier(2)
    numbers = threads({0: one, 1: one})
    assert numbers[0] == numbers[1] == vckpt.steps(run)[0], numbers


def test_shards_of_ranks(run, threads):
    """Boxes, flat ranges, placements, one rank's own: of three ranks."""
    full, launch, world = np.arange(60.0).reshape(10, 6), uuid.uuid4().hex, 3
    cuts = [0, 4, 4, 10]

    def rank(r):
        rows = full[cuts[r]:cuts[r + 1]]
        flat = full.reshape(-1)[r * 20:(r + 1) * 20]
        padded = np.arange(7.0)[r * 3:min((r + 1) * 3, 7)]
        boxes = [((0, 2 * r), (10, 2))] if r < 2 else [((0, 4), (5, 2)), ((5, 4), (5, 2))]
        held = np.concatenate([full[o[0]:o[0] + n[0], o[1]:o[1] + n[1]].reshape(-1) for o, n in boxes])
        state = {"m": {
            "rows": vckpt.Shard(rows, shape=(10, 6), boxes=[((cuts[r], 0), (len(rows), 6))] if len(rows) else []),
            "boxes": vckpt.Shard(held, shape=(10, 6), boxes=boxes),
            "flat": vckpt.Shard(flat, shape=(10, 6), flat=(r * 20, (r + 1) * 20)),
            "padded": vckpt.Shard(padded, shape=(7,), flat=(r * 3, min((r + 1) * 3, 7), 9), mesh="dp=3"),
            "placed": vckpt.Shard(full[:, 2 * r:2 * r + 2], shape=(10, 6), mesh="tp=3", placements="S(1)"),
            "sub": vckpt.Shard(full[5 * r:5 * r + 5], shape=(10, 6), mesh=("x=2", [0, 1]), placements="S(0)") if r < 2
            else
            vckpt.Shard(full[:0], shape=(10, 6), mesh=("x=2", [0, 1]), placements="S(0)"),
            "all": full, f"own.{r}": vckpt.Shard(np.full(2, r), alone=True),
            "buffer": vckpt.Shard(np.full(3, float(r)), buffer=True),
        }, "log": {"rank": r, "history": [np.ones(r)]}}
        with vckpt.Saver(run, rank=r, world=world, launch_id=launch, per_rank=("log",), **OPTIONS) as saver:
            return saver.save(state, step=3), saver.save(state, step=4)
    assert threads(dict.fromkeys(range(world), rank)) == dict.fromkeys(range(world), (3, 4))
    for number in 3, 4:
        with vckpt.Step(run / str(number), "numpy") as step:
            for name in ("rows", "boxes", "flat", "placed", "sub", "all"):
                assert np.array_equal(step["m", name], full), name
            assert np.array_equal(step["padded"], np.arange(7.0)) and (step["buffer"].numpy() == 0).all()
            for r in range(world):
                assert (step[f"own.{r}"].numpy() == r).all()
                log = step.values("log", rank=r)
                assert log["rank"] == r and log["history"][0].tolist() == [1] * r


def test_ranks_that_disagree(run, threads):
    launch = uuid.uuid4().hex

    def rank(r):
        with vckpt.Saver(run, rank=r, world=2, launch_id=launch, **OPTIONS) as saver:
            return saver.save({"m": {"w": np.ones(3 + r)}}, step=1)
    for found in threads({0: rank, 1: rank}).values():
        assert isinstance(found, vckpt.Error) and "w" in str(found), found
    assert vckpt.steps(run) == []


def test_what_one_rank_is_refused_uses_its_number(run, threads):
    """The loss is known on rank 0 only. Else its first save and the other's second would make one step."""
    launch = uuid.uuid4().hex

    def rank(r):
        out, handles = [], []
        with vckpt.Saver(run, rank=r, world=2, launch_id=launch, **OPTIONS) as saver:
            for i in range(3):
                half = vckpt.Shard(np.full((300, 1000), float(i)), shape=(600, 1000),
                                   boxes=[((300 * r, 0), (300, 1000))])
                try:
                    handles.append(saver.async_save({"m": {"w": half}}, step=i, attributes=None if r == 0 or
                                                    i else {"loss": None}))
                except ValueError as error:
                    out.append(error)
            for handle in handles:
                try:
                    out.append(handle.committed())
                except vckpt.Error as error:
                    out.append(error)
        return out
    found = threads({0: rank, 1: rank})
    first, second = found[0], found[1]
    assert isinstance(first[0], vckpt.Aborted) and "rank 1" in str(first[0]) and isinstance(second[0], ValueError), (
        (first, second))
    assert first[1:] == second[1:] and len(first) == 3
    for i, number in enumerate(first[1:], 1):
        with vckpt.Step(run / str(number), "numpy") as step:
            assert (step["m", "w"].numpy() == i).all()


def test_who_must_say_the_launch(run):
    with pytest.raises(ValueError, match="give launch_id="):
        vckpt.save(run, {}, rank=0, world=2)
    with pytest.raises(ValueError, match="belong together"):
        vckpt.save(run, {}, rank=0)
    with pytest.raises(TypeError, match="unknown option 'pni'"):
        vckpt.save(run, {}, pni="no")
    with pytest.raises(ValueError, match="one of auto, no, yes"):
        vckpt.save(run, {}, pin="maybe")


# ---- one saver for a process ----

def test_everybody_shares_one_saver(run):
    state = {"m": {"w": np.random.default_rng(0).random((2000, 1000))}}
    first = vckpt.async_save(run, state, **OPTIONS)
    with vckpt.Saver(run) as one, vckpt.Saver(run) as two:
        handles = [one.async_save(state), two.async_save(state), vckpt.async_save(run, state)]
        assert two.save(state) == 4
        assert one._native is two._native
    assert [h.committed() for h in [first, *handles]] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="is open with check_replicas='sample', not 'full': close it first, on all "
                       "ranks: vckpt.close"):
        vckpt.save(run, state, check_replicas="full")
    vckpt.close(run)
    assert vckpt.save(run, state, check_replicas="full", pin="no") == 5


def test_a_saver_opens_again(run):
    for number in range(3):
        with vckpt.Saver(run, **OPTIONS) as saver:
            assert saver.save({"m": {"w": np.full(3, number)}}) == number
            native = saver._native
        assert not native.open and native.key not in savers._natives
    assert vckpt.steps(run) == [0, 1, 2]


def test_close_drains(run):
    saver = vckpt.Saver(run, **OPTIONS)
    handles = [saver.async_save({"m": {"w": np.random.default_rng(i).random((1000, 1000))}}) for i in range(3)]
    saver.close()
    assert all(handle.done for handle in handles) and vckpt.steps(run) == [0, 1, 2]


SCRIPT = """
import sys, numpy as np, vckpt
handle = vckpt.async_save({run!r}, {{"m": {{"w": np.ones((1500, 1000))}}}}, pin="no")
{more}
"""


def _script(run, more=""):
    text = SCRIPT.format(run=str(run), more=more)
    environment = dict(os.environ)
    if environment.get("VCKPT_PRELOAD"):
        environment["LD_PRELOAD"] = environment["VCKPT_PRELOAD"]
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120)


def test_the_end_of_the_process_drains(run):
    done = _script(run)
    assert done.returncode == 0, done.stderr
    assert vckpt.steps(run) == [0]


def test_a_child_is_refused(run):
    done = _script(run, """
import os
handle.committed()
saver = vckpt.Saver(%r)
pid = os.fork()
if pid == 0:
    said = []
    for call in (lambda: vckpt.save(%r, {}), lambda: saver.save({}), lambda: handle.committed(), lambda: handle.timings,
                 lambda: vckpt.Saver(%r), saver.close):
        try:
            call()
        except vckpt.Forked as error:
            said.append(str(error))
    print(len(said), said[0])
    sys.exit(0)             # with everything that runs at exit
os.waitpid(pid, 0)
print(saver.save({"m": {"w": np.ones(3)}}))
saver.close()
""" % (str(run), str(run), str(run)))
    assert done.returncode == 0, done.stderr
    assert ("6 the saver of" in done.stdout and "cannot use it; open one in the child" in done.stdout and
            done.stdout.splitlines()[-1] == "1"), done.stdout
    assert vckpt.steps(run) == [0, 1]


def test_a_child_closes_its_own_runs(run):
    done = _script(run, """
import os
handle.committed()
other = %r
pid = os.fork()
if pid == 0:
    vckpt.close()                                           # nothing of its own yet
    handle = vckpt.async_save(other, {"m": {"w": np.ones(3)}}, step=5)
    try:
        vckpt.close(%r)
        raise SystemExit("the parent's run was closed")
    except vckpt.Forked:
        pass
    vckpt.close()
    assert handle.done and vckpt.steps(other) == [5]
    grandchild = os.fork()
    if grandchild == 0:
        vckpt.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 7
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
print(vckpt.save(%r, {"m": {"w": np.ones(3)}}))
vckpt.close()
""" % (str(run) + "-child", str(run), str(run)))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert vckpt.steps(run) == [0, 1]


def test_a_failed_save_is_told_once(run):
    """What nobody was told comes with close; what was told does not come again."""
    saver = vckpt.Saver(run, **OPTIONS)
    saver.save({"m": {"w": np.ones(3)}}, step=1)
    with pytest.raises((TypeError, ValueError), match=r'state\["m"\]'):
        saver.save({"m": {"w": lambda: 0}})
    assert saver.save({"m": {"w": np.ones(3)}}) == 2
    with pytest.raises(FileExistsError):
        saver.save({"m": {"w": np.ones(3)}}, step=1)
    saver.close()


@pytest.mark.parametrize("arguments, kind", [
    ({"state": {"m": lambda: 0}}, TypeError), ({"state": [1]}, ValueError), ({"attributes": {"loss": [1]}}, ValueError),
    ({"base": "x"}, ValueError),
    ({"base": "other/3"}, FileNotFoundError), ({"blobs": {"m.json": b"{}"}}, FileExistsError),
    ({"mesh": "dp=2"}, ValueError)])
def test_a_refused_save_takes_no_number(run, arguments, kind):
    """One rank saves, and numbers its steps by their order: what is refused before anything is written is no step."""
    state = {"m": {"w": np.ones(3)}}
    assert vckpt.save(run, state, **OPTIONS) == 0
    for _ in range(2):
        with pytest.raises(kind):
            vckpt.save(run, **{"state": state, **arguments})
    assert vckpt.save(run, state) == 1


def test_a_save_that_waits_keeps_its_number(run):
    """A refused save between two that are accepted leaves their order as it is."""
    with vckpt.Saver(run, **OPTIONS) as saver:
        first = saver.async_save({"m": {"w": np.random.default_rng(1).random((1000, 1000))}})
        with pytest.raises(TypeError):
            saver.async_save({"m": lambda: 0})
        second = saver.async_save({"m": {"w": np.ones(3)}})
        assert (first.committed(), second.committed()) == (0, 1)


def test_handles_outlive_and_predecease_their_saver(run):
    """In whatever order they are let go of, also in a cycle that the collector takes apart as it likes."""
    import gc
    for turn in range(6):
        saver = vckpt.Saver(run, **OPTIONS)
        handles = [saver.async_save({"m": {"w": np.ones(10)}}) for _ in range(2)]
        saver.close()
        handles[0].cycle = [handles, saver]
        handles[0]._native.cycle = handles
        if turn % 2:
            del saver, handles
        else:
            assert handles[1].committed() == 2 * turn + 1
            del handles, saver
        gc.collect()


def test_numbers_of_many_tensors_are_quick(run):
    """The call itself, loosely (docs/python.md has the figures): the second save of 2,000 tensors."""
    arrays = {f"layer{i}.weight": np.zeros(4) for i in range(2000)}
    with vckpt.Saver(run, **OPTIONS) as saver:
        saver.save({"m": arrays})
        best = min(saver_call(saver, arrays) for _ in range(5))
    assert best < 0.25


def saver_call(saver, arrays):
    begun = time.thread_time()
    handle = saver.async_save({"m": arrays})
    took = time.thread_time() - begun
    handle.committed()
    return took


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout for _lib.py: `checkout(folder)` makes a build folder's place of the library."""
    from vckpt import _lib
    top = tmp_path / "vckpt"
    for folder in ("core/api", "tools/python/vckpt"):
        (top / folder).mkdir(parents=True)
    (top / "core/api/vckpt.h").touch()
    monkeypatch.setattr(_lib, "__file__", str(top / "tools/python/vckpt/_lib.py"))
    monkeypatch.setattr(_lib, "_loaded", None)
    monkeypatch.delenv("VCKPT_LIBRARY", raising=False)
    monkeypatch.delenv("VCKPT_BUILD", raising=False)

    def folder(name):
        path = top / "build" / name / "core/api/libvckpt.so"
        path.parent.mkdir(parents=True)
        return path
    return folder


def test_a_build_folder_without_a_whole_library(build, checkout):
    """Its links are there from `meson setup` on (quickstart builds the commands only); a build that ends early leaves a
    part, or nothing."""
    from vckpt import _lib
    whole, dangling, half, empty = map(checkout, ("whole", "release", "half", "empty"))
    dangling.symlink_to("libvckpt.so.0")
    library = (build / "core/api/libvckpt.so").read_bytes()
    half.write_bytes(library[:40])
    empty.touch()
    with pytest.raises(vckpt.Error, match="half/core/api/libvckpt.so: .*: build it again"):
        _lib.lib()
    whole.write_bytes(library)
    os.utime(whole, (1, 1))                             # the oldest
    assert _lib.lib()._name == str(whole)


def test_a_build_under_a_sanitizer_is_left_alone(checkout):
    """It would end the program: the sanitizer's own library has to come first. Who wants it names it (VCKPT_BUILD)."""
    from vckpt import _lib
    plain, sanitized = map(checkout, ("test", "sanitize"))
    for path, value in ((plain, []), (sanitized, ["address", "undefined"])):
        path.touch()
        (path.parents[2] / "meson-info").mkdir()
        (path.parents[2] / "meson-info/intro-buildoptions.json").write_text(
            json.dumps([{"name": "b_sanitize", "value": value}]))
    found = _lib.candidates()
    assert str(plain) in found and str(sanitized) not in found


def test_undecided():
    """A saver's error says by its class that the step may still become visible, and a pickle of it does, too."""
    error = _lib.error(-_lib.EUNDECIDED, "run a: step 1: undecided: Input/output error")
    assert (type(error) is vckpt.Undecided and error.errno == errno.EINPROGRESS and
            not isinstance(error, (vckpt.Aborted, vckpt.Timeout)))
    assert type(pickle.loads(pickle.dumps(error))) is vckpt.Undecided
