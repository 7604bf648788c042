# SPDX-License-Identifier: Apache-2.0
"""Facts of steps through vckpt.h: what a program in C may give, wrong or right."""
import ctypes as c
import errno

import numpy
import pytest

import vckpt
from vckpt import _lib


@pytest.fixture
def store(tmp_path):
    vckpt.init(tmp_path / "store")
    vckpt.save(tmp_path / "store/run", {"model": {"w": numpy.arange(4)}}, step=5, attributes={"a": "1"})
    vckpt.close()
    return str(tmp_path / "store").encode()


def change(store, run=b"run", step=5, size=None, **members):
    x = _lib.FactsChange(size=c.sizeof(_lib.FactsChange) if size is None else size, **members)
    return _lib.call("vckpt_facts_change", store, run, step, c.byref(x))


def texts(*all):
    return (c.c_char_p * len(all))(*all)


@pytest.mark.parametrize("members, sentence", [
    ({"size": 8}, "struct vckpt_facts_change has"), ({"reserved": 1}, "`reserved` of struct vckpt_facts_change"),
    ({"pin": 2}, "pin is 2"), ({"tags": texts(None), "ntags": 1}, "no tag is given"),
    ({"tags": None, "ntags": 1}, "no tag is given"), ({"untags": texts(None), "nuntags": 1}, "no tag is given"),
    ({"attributes": (_lib.Attribute * 1)(), "nattributes": 1}, "no attribute's key is given"),
    ({"run": b"../x"}, "cannot be the name of a run"), ({"run": None}, "NULL cannot be"),
    ({"pin": 1, "reason": b"\xff"}, "is not UTF-8")])
def test_what_is_wrong_is_named(store, members, sentence):
    with pytest.raises(vckpt.InvalidArgument, match=sentence):
        change(store, **members)
    with pytest.raises(vckpt.InvalidArgument, match="no change of facts is given"):
        _lib.call("vckpt_facts_change", store, b"run", 5, None)


def test_all_at_once(store):
    assert change(store, pin=1, reason=b"r", tags=texts(b"z", b"b"), ntags=2,
                  attributes=(_lib.Attribute * 1)((b"k", b"v")), nattributes=1) == 0
    assert change(store, pin=1, tags=texts(b"z"), ntags=1) == 1
    with vckpt.open(f"{store.decode()}/run") as step:
        assert (step.pinned, step.pin_reason, step.tags) == (True, "r", ["b", "z"])
        assert step.attributes == {"a": "1", "k": "v"}
        wrong = _lib.Facts(size=1)
        assert _lib.lib().vckpt_step_facts(step._at(), c.byref(wrong)) == -errno.EINVAL
        found = step._facts()
        assert found.pinned_by.decode() and found.pinned_ns > 10**18 and found.reserved == 0
    with pytest.raises(vckpt.NotFound, match="has no step 6"):
        change(store, step=6, pin=1)
    with pytest.raises(vckpt.NotFound, match="has no run none"):
        _lib.call("vckpt_run_tags", store, b"none", c.byref(c.POINTER(_lib.Tag)()), c.byref(c.c_size_t()))
    with pytest.raises(vckpt.InvalidArgument, match="no place for the tags"):
        _lib.call("vckpt_run_tags", store, b"run", None, None)


def test_a_step_that_is_replaced_meanwhile(store):
    with vckpt.open(f"{store.decode()}/run") as step:
        one = _lib.Commit(*step.commit[:2], (c.c_uint8 * 32)(*bytes.fromhex(step.commit.manifest)))
        assert change(store, pin=1, commit=c.pointer(one)) == 0
        other = _lib.Commit(5, 77)
        with pytest.raises(vckpt.Error, match="was removed or replaced") as e:
            change(store, pin=-1, commit=c.pointer(other))
        assert e.value.errno == errno.ESTALE
