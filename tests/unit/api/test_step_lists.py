# SPDX-License-Identifier: Apache-2.0
"""What a step has, by component, and which step of a run is the newest: vckpt.h through ctypes."""
import ctypes as c
import errno

import numpy as np
import pytest

from loadlib import Opened
from saverlib import Failed, TensorInfo, api, store  # noqa: F401 (fixtures)
from vckpt._lib import BlobInfo


class ComponentInfo(c.Structure):
    _fields_ = [("name", c.c_char_p), ("first", c.c_uint32), ("count", c.c_uint32), ("bytes", c.c_uint64)]


def latest(api, store, run=b"run"):  # noqa: F811
    number = c.c_uint64(99)
    api.call("vckpt_run_latest", store.encode() if store else None, run, c.byref(number))
    return number.value


def components(step):
    lib, found = step.api.lib, {}
    for i in range(lib.vckpt_step_component_count(step.p)):
        one, names = ComponentInfo(), []
        assert lib.vckpt_step_component(step.p, i, c.byref(one)) == 0
        for t in range(one.first, one.first + one.count):
            info = TensorInfo()
            assert lib.vckpt_step_tensor(step.p, t, c.byref(info)) == 0 and info.component == one.name
            names.append(c.string_at(info.name, info.name_len).decode())
        found[one.name.decode()] = (names, one.bytes)
    assert lib.vckpt_step_component(step.p, len(found), c.byref(ComponentInfo())) == -errno.ENOENT
    return found


def blobs(step, component):
    lib, found, at = step.api.lib, [], 0
    lib.vckpt_step_next_blob.restype = c.c_int64
    while (at := lib.vckpt_step_next_blob(step.p, component, c.c_uint32(at), None)) >= 0:
        one = BlobInfo()
        assert lib.vckpt_step_blob(step.p, c.c_uint32(at), c.byref(one)) == 0
        found.append(one.name.decode())
        at += 1
    assert at == -errno.ENOENT
    return found


def test_what_is_in_a_step_by_component(api, store):  # noqa: F811
    arrays = {"model/b": np.ones(3, "f4"), "model/a": np.ones((2, 2), "f8"), "optimizer/m": np.ones(5, "u1")}
    saver = api.saver(store, "run")
    names = [("loader/0", False), ("loader/1", True), ("loader2/0", False), ("loader", False), ("readme", False)]
    for step in (3, 7):
        saver.save(arrays, blobs=[(name, per_rank, b"x") for name, per_rank in names], step=step).committed()
    saver.close()
    saver.free()
    assert latest(api, store) == 7
    with Opened(api, store, latest(api, store)) as step:
        assert components(step) == {"model": (["a", "b"], 44), "optimizer": (["m"], 5)}
        assert blobs(step, b"loader") == ["loader/0", "loader/1"] and blobs(step, b"model") == []
        assert blobs(step, None) == ["loader", "loader/0", "loader2/0", "readme", "loader/1"]
        out = np.zeros(3, "f4")
        with step.load() as load:
            load.tensor("model/b", out)
            api.call("vckpt_load_run", load.p)
        assert (out == 1).all()


def test_latest_says_what_is_missing(api, store):  # noqa: F811
    wrong = ((store, b"none", errno.ENOENT, "no run none"), (store, b"a b/", errno.EINVAL, "name"),
             (None, b"run", errno.EINVAL, "no path"), (store, None, errno.EINVAL, "NULL"))
    for path, run, code, words in wrong:
        with pytest.raises(Failed) as e:
            latest(api, path, run)
        assert e.value.code == -code and words in e.value.text
    with pytest.raises(Failed, match="no place"):
        api.call("vckpt_run_latest", store.encode(), b"run", None)
