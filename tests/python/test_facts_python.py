# SPDX-License-Identifier: Apache-2.0
"""Pins, tags and attributes that are set later, through the package."""
import errno
import os
import pickle
import subprocess

import numpy
import pytest

import vckpt


@pytest.fixture
def run(tmp_path):
    """STORE/RUN with steps 1 to 3."""
    path = tmp_path / "store/run"
    vckpt.init(tmp_path / "store")
    for step in (1, 2, 3):
        vckpt.save(path, {"model": {"w": numpy.arange(10) + step}}, step=step, attributes={"loss": step, "a": "x"})
    vckpt.close()
    return path


def test_attributes_that_are_set_later(run):
    assert vckpt.set_attributes(run / "2", {"eval": 0.5, "loss": "1.9"})
    assert not vckpt.set_attributes(run / "2", {"eval": 0.5, "a": "x"})
    with vckpt.open(run / "2") as step:
        assert step.attributes == {"a": "x", "eval": "0.5", "loss": "1.9"}
        assert vckpt.set_attributes(step, {"loss": None})
        assert step.attributes["loss"] == "1.9"             # as it was when it was opened
        again = pickle.loads(pickle.dumps(step))            # which opens the commit
        assert again.attributes == {"a": "x", "eval": "0.5", "loss": "2"}
        again.close()
    with pytest.raises(FileNotFoundError, match="loss was not set later at step 2: it is the save's own"):
        vckpt.set_attributes(run / "2", {"loss": None})
    with vckpt.open(run / "1") as step:
        assert step.attributes == {"a": "x", "loss": "1"}
        assert (step.pinned, step.pin_reason, step.tags) == (False, "", [])


def test_pins(run):
    assert vckpt.pin(run / "latest", "paper") and not vckpt.pin(run / "3")
    with vckpt.open(run / "3") as step:
        assert (step.pinned, step.pin_reason) == (True, "paper")
    with pytest.raises(vckpt.Error, match=r"run/3 is pinned \(paper\), so it is not replaced \(vckpt unpin run/3") as e:
        vckpt.save(run, {"model": {"w": numpy.arange(10)}}, step=3, replace=True)
    vckpt.close()
    assert e.value.errno == errno.EADV
    assert vckpt.unpin(run / "3") and not vckpt.unpin(run / "3")
    vckpt.save(run, {"model": {"w": numpy.arange(10)}}, step=3, replace=True)
    vckpt.close()
    with vckpt.open(run / "3") as step:
        assert not step.pinned and step["w"][0] == 0


def test_tags(run):
    assert vckpt.tags(run) == {} == vckpt.tags(run.parent / "none")
    assert vckpt.tag(run / "1", "best", "b") and vckpt.tag(run / "3", "best")
    assert vckpt.tags(run) == {"b": 1, "best": 3} and list(vckpt.tags(run)) == ["b", "best"]
    with vckpt.open(run) as step:
        assert step.tags == ["best"]
    assert vckpt.untag(run / "1", "b", "none") and not vckpt.untag(run / "1", "b") and vckpt.tags(run) == {"best": 3}
    with pytest.raises(vckpt.InvalidArgument, match="\"latest\" cannot be a tag"):
        vckpt.tag(run / "1", "latest")
    for name in ("7", "epoch3", "step-4"):
        with pytest.raises(vckpt.InvalidArgument, match="it means another step"):
            vckpt.tag(run / "1", name)


def test_a_tag_is_a_step(run):
    """Of a path that is read; behind RUN only, and after numbers and `latest`."""
    vckpt.tag(run / "2", "best", "tag.2")
    with vckpt.open(run / "best") as step, vckpt.open(run / "tag.2", commit=step.commit) as again:
        assert step.number == again.number == 2 and step["w"][0] == 2
    found = vckpt.load(run / "best", {"model": {"w": numpy.zeros(10, int)}})
    assert found.step == 2
    assert vckpt.set_attributes(run / "best", {"eval": 1}) and vckpt.pin(run / "tag.2")
    assert vckpt.open(run / "2").attributes["eval"] == "1"
    vckpt.tag(run / "3", "best")
    assert vckpt.open(run / "best").number == 3 and vckpt.open(run / "tag.2").pinned
    for f in (vckpt.open, lambda path: vckpt.load(path, {}, missing_ok=True), vckpt.pin):
        with pytest.raises(vckpt.NotFound, match="has no step or tag none; its tags: best, tag.2"):
            f(run / "none")
    with pytest.raises(vckpt.NotFound, match="has no step or tag best, and no tags at all"):
        vckpt.open(run.parent / "other/best")
    with pytest.raises(vckpt.InvalidArgument, match="best, as a tag, can be read, not saved: give a number"):
        vckpt.save(run / "best", {"model": {"w": numpy.arange(10)}})
    with pytest.raises(vckpt.InvalidArgument, match="a Saver saves a run, not one step"):
        vckpt.Saver(run / "best")


def test_a_step_whose_tag_moves_while_it_is_opened(run, monkeypatch):
    """The step that had the tag is removed before it is opened: then the one that has it now."""
    vckpt.tag(run / "2", "best")
    number = vckpt.paths.number

    def moves(store, name, step):
        found = number(store, name, step)
        monkeypatch.setattr(vckpt.paths, "number", number)
        vckpt.tag(run / "3", "best")
        subprocess.run([f"{os.environ['VCKPT_BUILD']}/tools/vckpt/vckpt", "rm", "-q", run.parent, "run/2"], check=True)
        return found
    monkeypatch.setattr(vckpt.paths, "number", moves)
    assert vckpt.open(run / "best").number == 3


def test_what_is_refused(run):
    with pytest.raises(vckpt.InvalidArgument, match="which step"):
        vckpt.pin(run)
    with pytest.raises(vckpt.NotFound, match="run has no step 9"):
        vckpt.pin(run / "9")
    with pytest.raises(vckpt.InvalidArgument, match="expected a string or a number, not list"):
        vckpt.set_attributes(run / "1", {"a": []})
    with vckpt.open(run / "1") as step:
        vckpt.save(run, {"model": {"w": numpy.arange(10)}}, step=1, replace=True)
        vckpt.close()
        with pytest.raises(vckpt.Error, match="step 1 was removed or replaced by another writer") as e:
            vckpt.pin(step)
        assert e.value.errno == errno.ESTALE
    assert not vckpt.open(run / "1").pinned
