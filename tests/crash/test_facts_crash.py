# SPDX-License-Identifier: Apache-2.0
"""A pin, a tag and an attribute that are put together: killed at each call by which that changes the store, or with a
call that fails. The facts of the steps are as before or as asked for, the whole of it; a call that says so is right;
and again it does its work."""
import errno
import os
import shutil
import subprocess
import sys

import numpy
import pytest

import vckpt as package

from faults import count_calls

WORK = """
import ctypes, sys, vckpt
from vckpt import _lib
def texts(*all):
    return (ctypes.c_char_p * len(all))(*all)
change = _lib.FactsChange(size=ctypes.sizeof(_lib.FactsChange), pin=1, reason=b"paper", tags=texts(b"best"), ntags=1,
                          attributes=(_lib.Attribute * 1)((b"loss", b"2")), nattributes=1)
try:
    _lib.call("vckpt_facts_change", sys.argv[1].encode(), b"run", 2, ctypes.byref(change))
except vckpt.Undecided:
    sys.exit(5)
except vckpt.Error as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""
UNDECIDED = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    store = tmp_path_factory.mktemp("facts") / "base"
    package.init(store)
    for step in (1, 2):
        package.save(store / "run", {"model": {"w": numpy.arange(10) + step}}, step=step)
    package.close()
    package.tag(store / "run/1", "best")
    return store


def run(build, store, words):
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={store},{words}", LD_PRELOAD=preload,
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    return subprocess.run([sys.executable, "-c", WORK, str(store)], capture_output=True, text=True, env=env)


def said(store):
    found = {}
    for step in (1, 2):
        with package.open(store / f"run/{step}") as one:
            found[step] = (one.pin_reason, one.tags, one.attributes)
    return found


BEFORE = {1: ("", ["best"], {}), 2: ("", [], {})}
AFTER = {1: ("", [], {}), 2: ("paper", ["best"], {"loss": "2"})}


def test_each_call(build, vckpt, base, tmp_path, scale, rng):
    writes, reads = (count_calls(lambda words, store=shutil.copytree(base, tmp_path / f"calls{reads}"):
                                 run(build, store, words), tmp_path / "list", reads) for reads in (False, True))
    assert writes >= 3 and said(tmp_path / "callsFalse") == AFTER
    cases = [f"do=kill,at={n}{when}" for n in range(2, writes) for when in ("", ",when=after")]
    cases = ["do=kill,at=1", f"do=kill,at={writes},when=after"] + rng.sample(cases, min(scale(2, 10**6), len(cases)))
    fails = [f"do=fail,errno={errno.EIO},at={n}" for n in range(1, writes + 1)]
    fails += [f"reads=1,do=fail,errno={errno.EIO},at={n}{last}" for n in range(1, reads + 1)
              for last in ("", ",last=1000000")]
    cases += rng.sample(fails, min(scale(1, 60), len(fails)))
    outcomes = set()
    for i, words in enumerate(cases):
        store = shutil.copytree(base, tmp_path / str(i))
        done = run(build, store, words)
        now = said(store)
        assert now in (BEFORE, AFTER), (words, done)
        assert done.returncode in (0, 1, UNDECIDED, -9), (words, done)
        if done.returncode in (0, 1):
            assert now == (AFTER if done.returncode == 0 else BEFORE), (words, done)
            assert done.returncode == 0 or done.stderr.strip()
        outcomes.add((done.returncode, now == AFTER))
        assert run(build, store, "reads=0").returncode == 0 and said(store) == AFTER, words
        assert vckpt.json("verify", store)["faults"] == 0
        shutil.rmtree(store)
    assert {(-9, False), (-9, True)} <= outcomes, outcomes


def test_an_unset_whose_answer_is_lost(build, vckpt, base, tmp_path):
    """It is put, and making that durable fails once: the list says that it is done."""
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    vckpt("set", shutil.copytree(base, tmp_path / "set"), "run/2", "loss=2")
    for n in range(1, 4):
        store = shutil.copytree(tmp_path / "set", tmp_path / str(n))
        env = dict(os.environ, VCKPT_INTERPOSE=f"root={store}/runs/run,calls=fsync,do=fail,errno={errno.EIO},at={n}",
                   LD_PRELOAD=preload,
                   ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
        done = subprocess.run([vckpt.path, "set", store, "run/2", "--unset", "loss"], capture_output=True, text=True,
                              env=env)
        assert done.returncode in (0, 1), done
        assert said(store)[2] == ("", [], {} if done.returncode == 0 else {"loss": "2"}), done
