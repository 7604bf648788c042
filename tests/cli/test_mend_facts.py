# SPDX-License-Identifier: Apache-2.0
"""`vckpt mend` of lists that have facts of steps (docs/format/list.md): what was said of a step stays said."""
import shutil

import pytest

from factslib import all_said, change, policy, policy_put
from storelib import Api
from test_mend import entry, goes_on, made, manifest, mend, spoil, steps  # noqa: F401


@pytest.fixture
def run(lib, made):  # noqa: F811
    """The store's list, to say something in it."""
    api = Api(lib, made[0], init=False)
    with api.list("run") as l:
        yield l
    api.close()


def now(l):
    """{step: its facts}, and the policy, as others read it."""
    with l.api.list("run", True) as whole:
        assert whole.damaged == 0
        return all_said(whole), policy(whole)


def test_a_step_that_is_committed_anew_keeps_its_facts(vckpt, made, run):  # noqa: F811
    """But for a tag that another step has taken since."""
    store, another = made
    change(run, 1, pin=1, reason="paper", tags=["best", "sent"], set={"loss": "2"})
    change(run, 0, tags=["best"])
    spoil(entry(store, 1))
    mend(vckpt, store)
    assert steps(vckpt, store) == [0, 1, 2]
    assert now(run) == ({0: (None, ("best",), {}), 1: ("paper", ("sent",), {"loss": "2"})}, None)
    goes_on(vckpt, store, another)


def test_a_lost_entry_of_facts(vckpt, made, run, tmp_path):  # noqa: F811
    """It is accepted as damaged, or comes back from a copy."""
    store, another = made
    change(run, 1, pin=1)
    change(run, 1, tags=["best"])
    shutil.copytree(store, tmp_path / "copy")
    spoil(entry(store, 3))
    shutil.copytree(store, tmp_path / "lost")
    mend(vckpt, store)
    assert now(run)[0] == {1: ("", ("best",), {})}      # the next entry says all of the step
    goes_on(vckpt, store, another)
    mend(vckpt, tmp_path / "lost", "--from", tmp_path / "copy")
    assert entry(tmp_path / "lost", 3).read_bytes() == entry(tmp_path / "copy", 3).read_bytes()


@pytest.mark.parametrize("what", ["a pin", "no pin", "a policy"])
def test_a_lost_end_from_a_copy(vckpt, made, run, tmp_path, what):  # noqa: F811
    """A copy that strangers may have changed unpins nothing, and says of no steps that they go."""
    store, another = made
    change(run, 1, pin=1, reason="mine")
    if what == "a policy":
        policy_put(run, "keep-last=1")
    else:
        change(run, 0 if what == "a pin" else 1, pin=1 if what == "a pin" else -1)
    another()
    shutil.copytree(store, tmp_path / "copy")
    for n in (4, 5):
        entry(store, n).unlink()
    mend(vckpt, store, "--from", tmp_path / "copy")
    assert steps(vckpt, store) == [0, 1, 2, 3]
    assert now(run) == ({0: ("", (), {}), 1: ("mine", (), {})} if what == "a pin" else {1: ("mine", (), {})}, None)
    goes_on(vckpt, store, another)


def test_a_pinned_step_that_is_gone(vckpt, made, run):  # noqa: F811
    """Its removal was lost, and its manifest is deleted: a pin does not bring it back."""
    store, another = made
    change(run, 1, pin=1)
    change(run, 1, pin=-1)
    vckpt("rm", store, "run/1")
    manifest(vckpt, store, 1).unlink() if 1 in steps(vckpt, store) else None
    for p in (store / "runs/run/manifests").iterdir():
        if p.name not in {vckpt.json("info", store, f"run/{n}")["manifest"] for n in (0, 2)}:
            p.unlink()
    another()
    for n in (4, 5):
        spoil(entry(store, n))
    mend(vckpt, store)
    assert steps(vckpt, store) == [0, 2, 3] and now(run) == ({}, None)
    goes_on(vckpt, store, another)
