# SPDX-License-Identifier: Apache-2.0
"""Tags as links beside `latest`: they appear, move and go while the store is mounted; and what was said of a step after
its save, in the attributes of its directory."""
import errno
import os
import shutil
import stat
import subprocess

import pytest

from .conftest import small_source, wait_until
from .test_live import Events

STEPS = (1, 5, 10)


@pytest.fixture
def tagged(store, vckpt, tmp_path):
    for step in STEPS:
        vckpt("import", store, f"a/{step}", small_source(tmp_path / f"{step}/model.safetensors", step), "-q",
              "--set", f"loss={step}", "--set", "kind=base")
    vckpt("tag", store, "a/5", "best", "sent", "-q")
    return store


def names(m):
    return sorted(n for n in os.listdir(m / "a") if not n.startswith("step-"))


def links(m):
    return {n: os.readlink(m / "a" / n) for n in names(m)}


def attributes(path):
    """{}: one of them went between the two calls."""
    try:
        return {n.removeprefix("user.vckpt."): os.getxattr(path, n).decode() for n in os.listxattr(path)}
    except OSError as error:
        assert error.errno == errno.ENODATA
        return {}


def test_tags_are_links(mount, tagged):
    m = mount(tagged)
    assert links(m) == {"best": "step-00000005", "latest": "step-00000010", "sent": "step-00000005"}
    here = os.lstat(m / "a/best")
    assert stat.S_ISLNK(here.st_mode) and here.st_size == len("step-00000005") and here.st_nlink == 1
    assert here.st_ino == os.lstat(m / "a/sent").st_ino != os.stat(m / "a/best").st_ino
    assert os.path.samefile(m / "a/best", m / "a/step-00000005")
    with os.scandir(m / "a") as found:
        assert {e.name for e in found if e.is_symlink()} == {"best", "latest", "sent"}
    assert (m / "a/best/model.safetensors").read_bytes() == (m / "a/step-00000005/model.safetensors").read_bytes()
    assert os.listxattr(m / "a/best", follow_symlinks=False) == []
    for f in (lambda: os.listdir(m / "a/best/model.safetensors"), lambda: os.rmdir(m / "a/best"),
              lambda: os.symlink("step-00000001", m / "a/new"), lambda: os.unlink(m / "a/best")):
        with pytest.raises(OSError) as e:
            f()
        assert e.value.errno in (errno.ENOTDIR, errno.EROFS)
    copy = m.point.parent / "copy"
    subprocess.run(["cp", "-a", "--reflink=never", m / "a", copy], check=True)
    assert {n: os.readlink(copy / n) for n in ("best", "sent", "latest")} == links(m)
    shutil.rmtree(copy)


def test_tags_appear_move_and_go(mount, tagged, vckpt, tmp_path):
    """Looked at by name before they were there, so that no failed look may be kept."""
    m = mount(tagged)
    assert not os.path.lexists(m / "a/new") and os.readlink(m / "a/best") == "step-00000005"
    vckpt("tag", tagged, "a/1", "new", "-q")
    assert wait_until(lambda: os.path.lexists(m / "a/new")) and os.readlink(m / "a/new") == "step-00000001"
    assert "new" in names(m)
    for step in (10, 1, 5):
        vckpt("tag", tagged, f"a/{step}", "best", "-q")
        assert wait_until(lambda step=step: os.readlink(m / "a/best") == f"step-{step:08}")
        assert os.path.samefile(m / "a/best", m / f"a/step-{step:08}")
    fd = os.open(m / "a/best/model.safetensors", os.O_RDONLY)       # of step 5, whatever the link says later
    want = (m / "a/step-00000005/model.safetensors").read_bytes()
    vckpt("tag", tagged, "a/1", "best", "-q")
    assert wait_until(lambda: os.readlink(m / "a/best") == "step-00000001")
    assert os.read(fd, len(want)) == want
    os.close(fd)
    vckpt("tag", tagged, "a", "-d", "sent", "-q")
    assert wait_until(lambda: not os.path.lexists(m / "a/sent")) and names(m) == ["best", "latest", "new"]
    vckpt("rm", tagged, "a/1")                                      # its tags go with it
    assert wait_until(lambda: names(m) == ["latest"]) and not os.path.lexists(m / "a/best")
    vckpt("import", tagged, "a/5", small_source(tmp_path / "other/model.safetensors", 99), "--replace", "-q")
    vckpt("tag", tagged, "a/5", "again", "-q")
    assert wait_until(lambda: os.path.lexists(m / "a/again"))
    assert wait_until(lambda: (m / "a/again/model.safetensors").read_bytes() ==
                      (tmp_path / "other/model.safetensors").read_bytes())


def test_a_name_that_is_no_tag_reads_nothing(mount, tagged, vckpt):
    """Asked for a thousand times: the list that is in memory answers, and none of them opens a file of the run."""
    m = mount(tagged)
    assert os.path.lexists(m / "a/best")
    opens = Events(tagged / "runs/a", 0x20)     # IN_OPEN
    for i in range(1000):
        assert not os.path.lexists(m / f"a/no-{i % 7}") and os.readlink(m / "a/best") == "step-00000005"
    opens.look()
    before = opens.count
    assert before < 20          # a mount looks for new entries now and then
    vckpt("tag", tagged, "a/1", "new", "-q")
    assert wait_until(lambda: os.path.lexists(m / "a/new"))
    opens.look()
    assert opens.count > before     # as the test would see it


def test_what_was_said_later_is_in_the_attributes(mount, tagged, vckpt):
    """Of a step's directory. Its files stay as they are: manifest.json has what was saved."""
    m = mount(tagged)
    step = m / "a/step-00000005"
    before, manifest = attributes(step), (step / "manifest.json").read_bytes()
    assert before["attr.loss"] == "5" and before["tags"] == "best,sent" and "pinned" not in before
    vckpt("set", tagged, "a/5", "loss=0.5", "accuracy=0.9", "-q")
    vckpt("pin", tagged, "a/5", "--reason", "best so far", "-q")
    assert wait_until(lambda: attributes(step).get("pinned") == "best so far")
    assert attributes(step) == {**before, "attr.loss": "0.5", "attr.accuracy": "0.9", "pinned": "best so far"}
    assert attributes(m / "a/best") == attributes(step) and (step / "manifest.json").read_bytes() == manifest
    vckpt("unpin", tagged, "a/5", "-q")
    vckpt("set", tagged, "a/5", "--unset", "loss", "--unset", "accuracy", "-q")
    assert wait_until(lambda: attributes(step) == before)
