# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a collection at each call by which it changes a store with a long list, and two collections at once: the
list is sound, the steps are the same, and the next collection leaves what one that was not stopped leaves."""
import shutil
import subprocess

import pytest

from storelib import fresh
from test_commands import Commands
from test_list_head import RUN, aged


@pytest.fixture(scope="module")
def base(lib, vckpt, build, tmp_path_factory):
    c = Commands.__new__(Commands)
    c.vckpt, c.build, c.dir, c.base, c.source = vckpt, build, None, tmp_path_factory.mktemp("gc") / "base", None
    with fresh(lib) as api:
        aged(api)
        shutil.copytree(api.path, c.base)
    c.want = c.steps(c.base)
    c.damage = damage(vckpt, c.base)        # of its saves, which are no real ones
    return c


def damage(vckpt, store):
    """Without unfinished files, which every kill may leave."""
    return {d["file"] for d in vckpt.json("verify", store, "--paranoid", check=False)["damage"]
            if "unfinished" not in d["what"]}


def left(store):
    """{name: is it one of several names of a file}"""
    return {p.name: p.stat().st_nlink > 1 for p in (store / "runs" / RUN).iterdir() if p.is_file()}


def same(base, store):
    assert base.steps(store) == base.want
    assert damage(base.vckpt, store) == base.damage


def test_a_collection_is_killed_at_each_call(base, tmp_path, scale, rng):
    words = ["gc", "STORE", "--grace", "0", "-q"]
    whole, store = tmp_path / "whole", tmp_path / "store"
    shutil.copytree(base.base, whole)
    done = base.run(whole, [w.replace("STORE", str(whole)) for w in words], f"list={tmp_path}/calls")
    assert done.returncode == 0, done
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) > 700 and any("head." in call for call in calls)
    first = next(i for i, call in enumerate(calls, 1) if "head." in call)
    at = {*range(first, first + 6), len(calls) - 1, len(calls),
          *rng.sample(range(1, len(calls) + 1), scale(3, 200))}
    for n in sorted(at):
        shutil.copytree(base.base, store)
        assert base.run(store, [w.replace("STORE", str(store)) for w in words], f"do=kill,at={n}").returncode == -9
        same(base, store)
        base.vckpt("gc", store, "--grace", "0", "-q")
        same(base, store)
        assert left(store) == left(whole)
        shutil.rmtree(store)


def test_two_collections_at_once(base, tmp_path, scale):
    for i in range(scale(3, 30)):
        store = tmp_path / f"store{i}"
        shutil.copytree(base.base, store)
        words = [base.vckpt.path, "gc", store, "--grace", "0", "-q"]
        both = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        said = [p.communicate()[1] for p in both]
        assert all(p.returncode == 0 or "run vckpt gc again" in text for p, text in zip(both, said)), said
        same(base, store)
        shutil.rmtree(store)
