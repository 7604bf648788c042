# SPDX-License-Identifier: Apache-2.0
"""What a path given to vckpt.dcp names: the rules as a table, over file systems that are written down."""
import os
import pathlib

import pytest

pytest.importorskip("torch", reason="torch is not installed")
from vckpt import dcp_path
from vckpt.dcp_path import ABSENT, EMPTY, OTHER, STORE, Target, resolve


def world(**kinds):
    """{path: kind}; what stands above something that is there is a folder with something in it."""
    def kind(path):
        if path in kinds:
            return kinds[path]
        return OTHER if path == "/" or any(k.startswith(path + "/") and kinds[k] != ABSENT for k in kinds) else ABSENT
    return kind


STORES = {"/data/ckpt": STORE}
RULES = [
    # there          path                              names
    ({},             "/data/ckpt/step-100",            Target("/data/ckpt", step=100, init=True)),
    ({"/data/ckpt": EMPTY}, "/data/ckpt/step-100",     Target("/data/ckpt", step=100, init=True)),
    ({"/data/ckpt": OTHER}, "/data/ckpt/step-100",     Target("/data/ckpt/step-100", init=True)),
    (STORES,         "/data/ckpt/step-100",            Target("/data/ckpt", step=100)),
    (STORES,         "/data/ckpt/00000100",            Target("/data/ckpt", step=100)),
    ({},             "/data/ckpt/100",                 Target("/data/ckpt", step=100, init=True)),
    ({},             "/data/ckpt/global_step100",      Target("/data/ckpt", step=100, init=True)),
    ({},             "/data/ckpt/iter_0000100",        Target("/data/ckpt", step=100, init=True)),
    ({},             "/data/ckpt/epoch=3",             Target("/data/ckpt", step=3, init=True)),
    ({},             "/data/ckpt/checkpoint-500",      Target("/data/ckpt", step=500, init=True)),
    ({},             "/data/ckpt/ckpt.0",              Target("/data/ckpt", step=0, init=True)),
    ({},             "/data/ckpt/final",               Target("/data/ckpt/final", init=True)),
    ({},             "/data/ckpt/steps-100",           Target("/data/ckpt/steps-100", init=True)),
    ({},             "/data/ckpt/step-100-bad",        Target("/data/ckpt/step-100-bad", init=True)),
    ({},             "/data/ckpt/step--100",           Target("/data/ckpt/step--100", init=True)),
    # digits, but not ours
    ({},             "/data/ckpt/step-١٢",             Target("/data/ckpt/step-١٢", init=True)),
    ({},             "/data/ckpt/9999999999999999999", Target("/data/ckpt/9999999999999999999", init=True)),
    # inside a store
    (STORES,         "/data/ckpt",                     Target("/data/ckpt")),
    (STORES,         "/data/ckpt/",                    Target("/data/ckpt")),
    (STORES,         "/data/ckpt/llama",               Target("/data/ckpt", "llama")),
    (STORES,         "/data/ckpt/llama/7",             Target("/data/ckpt", "llama", 7)),
    (STORES,         "/data/ckpt/llama/step-00000007", Target("/data/ckpt", "llama", 7)),
    (STORES,         "/data/ckpt/llama/../llama/./7",  Target("/data/ckpt", "llama", 7)),
    ({**STORES, "/data/ckpt/inner": STORE}, "/data/ckpt/inner/5", Target("/data/ckpt/inner", step=5)),     # the nearest
    ({**STORES, "/data/ckpt/step-1": STORE}, "/data/ckpt/step-1", Target("/data/ckpt/step-1")),
    # temporary directories: they are there already, so their parents are not empty
    ({"/tmp/tmp12345678": EMPTY}, "/tmp/tmp12345678",  Target("/tmp/tmp12345678", init=True)),
    ({"/tmp/12345678": EMPTY}, "/tmp/12345678",        Target("/tmp/12345678", init=True)),
    ({"/tmp/ckpt123": EMPTY}, "/tmp/ckpt123",          Target("/tmp/ckpt123", init=True)),
    ({"/tmp/tmp123": EMPTY}, "/tmp/tmp123/step-5",     Target("/tmp/tmp123", step=5, init=True)),
    ({"/tmp": EMPTY}, "/tmp/tmpabc",                   Target("/tmp/tmpabc", init=True)),
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
    assert (after.store, after.run, after.step, after.init) == (want.store, want.run, want.step, False)


@pytest.mark.parametrize("path, words", [
    ("/data/ckpt/llama/7/model", "expected RUN, RUN/STEP or STEP"),
    ("/data/ckpt/llama/best", "expected RUN, RUN/STEP or STEP"),
    ("/data/ckpt/llama/latest", "expected RUN, RUN/STEP or STEP"),
    ("/data/ckpt/packs", "folder of the store"), ("/data/ckpt/runs/5", "folder of the store"),
    ("/data/ckpt/-x", "name of a run"),
    ("/data/ckpt/.hidden/5", "name of a run"), ("/data/ckpt/" + "x" * 129, "name of a run"),
    ("s3://bucket/step-5", "URL"), ("", "without NUL that is not empty"),
    ("/data/\0", "without NUL that is not empty")])
def test_what_is_refused(path, words):
    with pytest.raises(ValueError, match=words):
        resolve(path, world(**STORES))


def test_latest_is_read_and_never_written():
    assert resolve("/data/ckpt/llama/latest", world(**STORES), reading=True) == Target("/data/ckpt", "llama")


def test_relative_paths_are_those_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("run/step-3") == Target(str(tmp_path / "run"), step=3, init=True)
    # an empty working directory is as good as another
    assert resolve("step-3") == Target(str(tmp_path), step=3, init=True)


def test_the_real_file_system(tmp_path):
    kind = dcp_path.kind_of
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert [kind(tmp_path / n) for n in ("absent", "empty", "file", ".")] == [ABSENT, EMPTY, OTHER, OTHER]
    assert kind(tmp_path / "file" / "below") == OTHER
    (tmp_path / "empty" / "vckpt.store").write_text("x")
    assert kind(tmp_path / "empty") == STORE


def test_a_store_is_made_once_by_however_many(tmp_path, build, monkeypatch):
    import threading
    monkeypatch.setenv("VCKPT_BUILD", str(build))
    for round_ in range(10):
        target, failed = Target(str(tmp_path / f"a{round_}" / "b" / "store"), init=True), []

        def make():
            try:
                dcp_path.make(target)
            except Exception as error:
                failed.append(error)
        threads = [threading.Thread(target=make) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failed and dcp_path.kind_of(target.store) == STORE
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="neither a store nor empty"):
        dcp_path.make(Target(str(tmp_path / "full")))
