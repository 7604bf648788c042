# SPDX-License-Identifier: Apache-2.0
"""Pins, tags and attributes that are set later, through the package."""
import errno
import pickle

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
    assert e.value.errno == errno.EPERM
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
