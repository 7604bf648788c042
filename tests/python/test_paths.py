# SPDX-License-Identifier: Apache-2.0
"""What a path names, for vckpt.save as for vckpt.dcp: the rules as a table, over file systems that are written down."""
import importlib
import os
import pathlib
import threading

import numpy as np
import pytest

import vckpt
from vckpt import paths
from vckpt.paths import ABSENT, EMPTY, OTHER, STORE, Target, resolve


def world(**kinds):
    """{path: kind}; what stands above something that is there is a folder with something in it."""
    def kind(path):
        if path in kinds:
            return kinds[path]
        return OTHER if path == "/" or any(k.startswith(path + "/") and kinds[k] != ABSENT for k in kinds) else ABSENT
    return kind


STORES, FULL = {"/data/ckpt": STORE}, {"/data": OTHER}
RULES = [
    # there          path                              names
    ({},             "/data/run",                      Target("/data", "run", init=True)),
    ({},             "/data/run/7",                    Target("/data", "run", 7, init=True)),
    ({},             "/data/run/latest",               Target("/data", "run", "latest", init=True)),
    ({},             "/data/ckpt/step-100",            Target("/data", "ckpt", 100, init=True)),
    ({"/data": EMPTY}, "/data/run/7",                  Target("/data/run", step=7, init=True)),
    ({"/data": EMPTY}, "/data/run",                    Target("/data/run", init=True)),
    ({"/data": EMPTY}, "/data/7",                      Target("/data", step=7, init=True)),
    (FULL,           "/data/ckpt",                     Target("/data/ckpt", init=True)),
    (FULL,           "/data/ckpt/llama",               Target("/data/ckpt", "llama", init=True)),
    (FULL,           "/data/ckpt/llama/7",             Target("/data/ckpt", "llama", 7, init=True)),
    (FULL,           "/data/ckpt/step-100",            Target("/data/ckpt", step=100, init=True)),
    (FULL,           "/data/ckpt/100",                 Target("/data/ckpt", step=100, init=True)),
    (FULL,           "/data/ckpt/global_step100",      Target("/data/ckpt", step=100, init=True)),
    (FULL,           "/data/ckpt/iter_0000100",        Target("/data/ckpt", step=100, init=True)),
    (FULL,           "/data/ckpt/epoch=3",             Target("/data/ckpt", step=3, init=True)),
    (FULL,           "/data/ckpt/checkpoint-500",      Target("/data/ckpt", step=500, init=True)),
    (FULL,           "/data/ckpt/ckpt.0",              Target("/data/ckpt", step=0, init=True)),
    (FULL,           "/data/ckpt/ckpt-000010",         Target("/data/ckpt", step=10, init=True)),
    (FULL,           "/data/ckpt/steps-100",           Target("/data/ckpt", "steps-100", init=True)),
    (FULL,           "/data/ckpt/step-100-bad",        Target("/data/ckpt", "step-100-bad", init=True)),
    (FULL,           "/data/ckpt/9999999999999999999", Target("/data/ckpt", "9999999999999999999", init=True)),
    ({"/data/ckpt": OTHER}, "/data/ckpt/step-100",     Target("/data/ckpt/step-100", init=True)),
    ({"/data/ckpt": OTHER}, "/data/ckpt/final",        Target("/data/ckpt/final", init=True)),
    ({"/data/ckpt": EMPTY}, "/data/ckpt/step-100",     Target("/data/ckpt", step=100, init=True)),
    ({"/data/ckpt": EMPTY}, "/data/ckpt",              Target("/data/ckpt", init=True)),
    # inside a store
    (STORES,         "/data/ckpt",                     Target("/data/ckpt")),
    (STORES,         "/data/ckpt/",                    Target("/data/ckpt")),
    (STORES,         "/data/ckpt/step-100",            Target("/data/ckpt", step=100)),
    (STORES,         "/data/ckpt/00000100",            Target("/data/ckpt", step=100)),
    (STORES,         "/data/ckpt/latest",              Target("/data/ckpt", step="latest")),
    (STORES,         "/data/ckpt/llama",               Target("/data/ckpt", "llama")),
    (STORES,         "/data/ckpt/llama/7",             Target("/data/ckpt", "llama", 7)),
    (STORES,         "/data/ckpt/llama/ckpt-7",        Target("/data/ckpt", "llama", 7)),
    (STORES,         "/data/ckpt/llama/step-00000007", Target("/data/ckpt", "llama", 7)),
    (STORES,         "/data/ckpt/llama/latest",        Target("/data/ckpt", "llama", "latest")),
    (STORES,         "/data/ckpt/llama/best",          Target("/data/ckpt", "llama", "best")),      # a tag, for reads
    (STORES,         "/data/ckpt/best",                Target("/data/ckpt", "best")),
    (STORES,         "/data/ckpt/llama/../llama/./7",  Target("/data/ckpt", "llama", 7)),
    ({**STORES, "/data/ckpt/inner": STORE}, "/data/ckpt/inner/5", Target("/data/ckpt/inner", step=5)),     # the nearest
    ({**STORES, "/data/ckpt/step-1": STORE}, "/data/ckpt/step-1", Target("/data/ckpt/step-1")),
    # a run that is there keeps its name
    ({**STORES, "/data/ckpt/runs/ckpt-10": OTHER}, "/data/ckpt/ckpt-10", Target("/data/ckpt", "ckpt-10")),
    ({**STORES, "/data/ckpt/runs/ckpt-10": OTHER}, "/data/ckpt/ckpt-10/5", Target("/data/ckpt", "ckpt-10", 5)),
    ({**STORES, "/data/ckpt/runs/ckpt-10": OTHER}, "/data/ckpt/ckpt-20", Target("/data/ckpt", step=20)),
    ({**STORES, "/data/ckpt/runs/default": OTHER}, "/data/ckpt", Target("/data/ckpt")),
    # temporary directories: they are there already, so their parents are not empty
    ({"/tmp/tmp12345678": EMPTY}, "/tmp/tmp12345678",  Target("/tmp/tmp12345678", init=True)),
    ({"/tmp/12345678": EMPTY}, "/tmp/12345678",        Target("/tmp/12345678", init=True)),
    ({"/tmp/ckpt123": EMPTY}, "/tmp/ckpt123",          Target("/tmp/ckpt123", init=True)),
    ({"/tmp/tmp123": EMPTY}, "/tmp/tmp123/step-5",     Target("/tmp/tmp123", step=5, init=True)),
    # made beforehand
    ({"/data/ckpt/step-100": EMPTY}, "/data/ckpt/step-100", Target("/data/ckpt/step-100", init=True)),
    ({"/data/ckpt/step-100": OTHER}, "/data/ckpt/step-100", Target("/data/ckpt/step-100", init=True)),
    # the top
    ({},             "/100",                           Target("/100", init=True)),
    ({},             "/ckpt/step-5",                   Target("/ckpt", step=5, init=True)),
]


@pytest.mark.parametrize("there, path, want", RULES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_path_names(there, path, want):
    assert resolve(path, world(**there)) == want
    assert resolve(pathlib.Path(path), world(**there)) == want
    assert resolve(os.fsencode(path), world(**there)) == want


@pytest.mark.parametrize("there, path, want", [rule for rule in RULES if rule[2].init],
                         ids=lambda value: value if isinstance(value, str) else "")
def test_once_the_store_is_made_the_path_names_the_same(there, path, want):
    after = resolve(path, world(**{**there, want.store: STORE}))
    if want.store != path or want.step is not None:
        assert (after.store, after.run, after.step, after.init) == (want.store, want.run, want.step, False)


@pytest.mark.parametrize("there, path, want", [rule for rule in RULES if rule[2].init],
                         ids=lambda value: value if isinstance(value, str) else "")
def test_the_path_names_the_same_while_another_rank_makes_the_store(there, path, want):
    """After whichever look."""
    before, after = world(**there), world(**{**there, want.store: STORE})
    for number in range(12):
        looks = iter(range(100))
        found = resolve(path, lambda one: (before if next(looks) < number else after)(one))
        if want.store != path or want.step is not None:
            assert (found.store, found.run, found.step) == (want.store, want.run, want.step), number


@pytest.mark.parametrize("path, words", [
    ("/data/ckpt/llama/7/model", "expected RUN, RUN/STEP or STEP"),
    ("/data/ckpt/llama/step-x", "expected RUN, RUN/STEP or STEP"), ("/data/ckpt/llama/.x", "of a RUN, a tag$"),
    ("/data/ckpt/packs", "folder of the store"), ("/data/ckpt/runs/5", "folder of the store"),
    ("/data/ckpt/-x", "name of a run"), ("/none/-x", "no parent directory is a store, and '-x' cannot be the name"),
    ("/none/step-١٢", "cannot be the name of a run"), ("/data/ckpt/step-١٢", "cannot be the name of a run"),
    ("/data/ckpt/.hidden/5", "name of a run"), ("/data/ckpt/" + "x" * 129, "name of a run"),
    ("s3://bucket/step-5", "URL.*no storage for s3://"), (pathlib.Path("gs://bucket/x"), "no storage for gs://"),
    ("FILE:///data/x", "no storage for FILE://"), ("", "without NUL that is not empty"),
    ("/data/\0", "without NUL that is not empty")], ids=str)
def test_what_is_refused(path, words):
    with pytest.raises(ValueError, match=words):
        resolve(path, world(**STORES))


def test_a_store_with_other_runs_is_no_run():
    with pytest.raises(ValueError, match="/data/ckpt is a store: name a run in it, /data/ckpt/RUN"):
        resolve("/data/ckpt", world(**STORES, **{"/data/ckpt/runs/llama": OTHER}))


def test_urls_are_refused_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/x"
    for call in (lambda: vckpt.init(url), lambda: vckpt.init(url, exist_ok=True), lambda: vckpt.save(url, {"w": 1}),
                 lambda: vckpt.Saver(url), lambda: vckpt.load(url, {}), lambda: vckpt.open(url),
                 lambda: vckpt.steps(url), lambda: vckpt.latest(url), lambda: vckpt.wait(url, timeout=0),
                 lambda: vckpt.close(url)):
        with pytest.raises(vckpt.InvalidArgument, match="s3://bucket/x: this is a URL"):
            call()
    assert not list(tmp_path.iterdir())
    (tmp_path / "s3:").mkdir()                          # a folder is one, whatever it is called
    assert resolve("s3:/bucket/run") == Target(str(tmp_path / "s3:/bucket"), "run", init=True)


def test_arguments_in_the_order_of_torch_save(tmp_path):
    for call in vckpt.save, vckpt.load, vckpt.async_save, vckpt.async_load:
        with pytest.raises(TypeError, match=r"not dict: vckpt.save\(path, state\) .*unlike torch.save"):
            call({"w": 1}, str(tmp_path / "store/run"))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_for_each_number(tmp_path, monkeypatch, capfd):
    """As a loop over torch.save has them: steps of one run, with that name or another one for STEP."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    state = {"m": {"w": np.arange(3.0)}}
    for step in 10, 20:
        assert vckpt.save(f"out/ckpt-{step:06d}", state, pin="no") == step
    assert vckpt.steps("out/default") == [10, 20] and os.listdir("out/runs") == ["default"]
    for path in "out/ckpt-000010", "out/10", "out/step-10", "out/default/ckpt_10":
        assert vckpt.load(path, {"m": {"w": np.zeros(3)}}).step == 10
        with vckpt.open(path) as step:
            assert step.number == 10
    assert vckpt.latest("out") == 20 and vckpt.load("out/latest", {}).step == 20
    # the folder that nobody named stays what it is
    assert vckpt.save("zz1", state, pin="no") == 0 and (tmp_path / "zz1/vckpt.store").exists()
    assert vckpt.load("zz1", {"m": {"w": np.zeros(3)}}).step == 0
    said = capfd.readouterr().err                       # once, since another store is beside it
    assert said.startswith(f"vckpt: {tmp_path}/zz1 is a store of its own") and said.count("\n") == 1, said
    # names that are none of STEP's words
    for name in "out/model-10", "out/model-20", "out/model-30":
        vckpt.save(name, state, pin="no")
    said = capfd.readouterr().err
    assert "run 'model-20' beside 'model-10', which has one step" in said and "give it as step=" in said
    for name in "out/seed1", "out/seed1", "out/seed2":
        vckpt.save(name, state, pin="no")
    vckpt.close()
    assert "seed" not in capfd.readouterr().err
    (tmp_path / "full/logs").mkdir(parents=True)
    vckpt.save("full/step-7", state, pin="no")
    vckpt.close()
    assert f"{tmp_path}/full/step-7 is a store of its own, which shares no data" in capfd.readouterr().err
    assert vckpt.load("full/step-7", {"m": {"w": np.zeros(3)}}).step == 0


@pytest.mark.parametrize("first, second", [("model-10", "model-20"), ("ckpt_10.pt", "ckpt_20.pt"), ("llama", "qwen")])
def test_stores_beside_each_other_are_said(tmp_path, capfd, first, second):
    """In a folder that was there, each path is a store: what was meant as runs of one store shares no data."""
    (tmp_path / "out").mkdir()
    for name in first, second, second:
        vckpt.save(tmp_path / "out" / name, {"m": {"w": np.arange(3.0)}}, replace=True, step=0)
    vckpt.close()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"vckpt: {tmp_path}/out/{second} is a store of its own, which"), said
    assert said[0].endswith(f"`vckpt init {tmp_path}/out/NAME`, and save to {tmp_path}/out/NAME/{second}")


@pytest.mark.parametrize("path", ["last.pt", "last.pt/run", "last.pt/run/10"])
@pytest.mark.parametrize("missing_ok", [False, True])
def test_a_file_in_place_of_a_store(tmp_path, monkeypatch, path, missing_ok):
    """A script that was changed finds the file of torch.save: it does not begin anew."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pt").write_bytes(b"PK")
    with pytest.raises(vckpt.NotAStore) as error:
        vckpt.load(path, {"m": {"w": np.zeros(3)}}, missing_ok=missing_ok)
    assert str(error.value).startswith(f"{path}: {tmp_path}/last.pt is a file, not a store: "), error.value


def test_a_load_without_a_store_names_what_was_given(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for path in "out/ckpt-10", "full", "full/ckpt-10", "a/run":
        with pytest.raises(vckpt.NotAStore) as error:
            vckpt.load(path, {"m": {"w": np.zeros(3)}})
        assert str(error.value).startswith(f"{path}: no parent directory is a store"), error.value
        with pytest.raises(vckpt.NotAStore, match=f"^{path}: no parent directory is a store"):
            importlib.import_module("vckpt.dcp").StorageReader(path).read_metadata()


@pytest.mark.parametrize("names", [("ckpt_10.pt", "ckpt_20.pt"), ("model-10", "model-20")])
def test_runs_that_differ_in_a_number_are_said(tmp_path, capfd, names):
    for name in names:
        vckpt.save(tmp_path / "out" / name, {"m": {"w": np.arange(3.0)}}, pin="no")
    vckpt.close()
    assert f"run '{names[1]}' beside '{names[0]}', which has one step" in capfd.readouterr().err


@pytest.mark.parametrize("name", sorted(paths.OWN - {"vckpt.store"}))
def test_a_folder_of_another_program_is_no_store_that_is_being_made(tmp_path, name):
    """TensorBoard writes to `runs`."""
    (tmp_path / "out" / name / "Nov26").mkdir(parents=True)
    assert paths.kind_of(str(tmp_path / "out")) == OTHER
    assert resolve(tmp_path / "out/ckpt-10") == Target(str(tmp_path / "out/ckpt-10"), init=True)


def test_relative_paths_are_those_of_the_working_directory(tmp_path, monkeypatch):
    """Which never becomes a store itself."""
    monkeypatch.chdir(tmp_path)
    assert resolve("run/step-3") == Target(str(tmp_path / "run"), step=3, init=True)
    assert resolve("store/run/3") == Target(str(tmp_path / "store"), "run", 3, init=True)
    assert resolve("step-3") == Target(str(tmp_path / "step-3"), init=True)
    assert resolve("run") == Target(str(tmp_path / "run"), init=True)


def test_the_real_file_system(tmp_path):
    kind = paths.kind_of
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert [kind(str(tmp_path / n)) for n in ("absent", "empty", "file", ".")] == [ABSENT, EMPTY, OTHER, OTHER]
    assert kind(str(tmp_path / "file" / "below")) == OTHER
    (tmp_path / "empty" / f"vckpt.store.tmp.{'a' * 16}").write_text("x")        # a store that is being made
    assert kind(str(tmp_path / "empty")) == EMPTY
    vckpt.init(tmp_path / "store")
    assert kind(str(tmp_path / "store")) == STORE


def test_a_store_is_made_once_by_however_many(tmp_path):
    for round_ in range(10):
        store, failed = str(tmp_path / f"a{round_}" / "b" / "store"), []

        def make():
            try:
                found = resolve(f"{store}/run")
                assert (found.store, found.run) == (store, "run")
                paths.make(store)
            except Exception as error:
                failed.append(error)
        threads = [threading.Thread(target=make) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failed and paths.kind_of(store) == STORE
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="neither a store nor empty"):
        paths.make(str(tmp_path / "full"))
