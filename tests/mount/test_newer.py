# SPDX-License-Identifier: Apache-2.0
"""What a newer vckpt wrote, through the mount: the step or run that it hides answers EIO and is named in the log; all
else is shown."""
import ctypes
import errno
import os

import numpy as np
import pytest

from forgelib import Forge

from .conftest import Mount, Tensor, wait_until, write_safetensors


@pytest.fixture
def newer(program, vckpt, build, tmp_path):
    """A step whose layout has a word that nobody knows, between two that are read; and a run whose list has one."""
    lib = ctypes.CDLL(str(build / "tests" / "libvckpt_internal.so"))
    store = tmp_path / "store"
    vckpt("init", store)
    for run, step in [("a", 1), ("a", 2), ("b", 1)]:
        write_safetensors(tmp_path / "m.safetensors",
                          {"w": Tensor("F32", (300, 100), np.full(30000, step, "f4").tobytes())})
        vckpt("import", store, f"{run}/{step}", tmp_path / "m.safetensors", "--no-index")
        if (run, step) == ("a", 1):
            continue
        forge = Forge(lib, store, run)
        if run == "a":
            forge.part.set(2, b"shiny_2")
            forge.done(tmp_path / "scratch")
        else:
            forge.entry.set(2, b"shiny_2")
            forge.put_record(forge.entry_path, 2, forge.entry.encode())
    write_safetensors(tmp_path / "m.safetensors", {"w": Tensor("F32", (300, 100), np.full(30000, 3, "f4").tobytes())})
    vckpt("import", store, "a/3", tmp_path / "m.safetensors", "--no-index")
    m = Mount(program, store, tmp_path / "mnt", log=tmp_path / "log")
    m.log = tmp_path / "log"
    yield m
    m.end()


def test_the_rest_is_shown(newer):
    point = newer.point
    assert {"step-00000001", "step-00000002", "step-00000003"} <= set(os.listdir(point / "a"))
    for step in (1, 3):
        assert np.all(np.load(point / f"a/step-{step:08d}/model/w.npy") == step)
    with pytest.raises(OSError) as e:
        os.listdir(point / "a/step-00000002")
    assert e.value.errno == errno.EIO
    with pytest.raises(OSError) as e:
        os.listdir(point / "b")
    assert e.value.errno in (errno.EIO, errno.ENOENT)
    assert np.all(np.load(point / "a/latest/model/w.npy") == 3)
    assert wait_until(lambda: newer.log.read_text().count('"shiny_2"') >= 2), newer.log.read_text()
