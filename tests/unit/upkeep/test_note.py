# SPDX-License-Identifier: Apache-2.0
"""Notes of damage on a storage that fails: nothing that a note names is forgotten because the note could not be read
for a moment."""
import ctypes as c
import errno
import shutil

import pytest

from ranklib import Meddler
from storelib import Api, Failed, scratch

PACK = "0123456789abcdef-7-3-model"


class Range(c.Structure):
    _fields_ = [("offset", c.c_uint64), ("len", c.c_uint64)]


class Ref(c.Structure):
    _fields_ = [("digest", c.c_uint8 * 32), ("offset", c.c_uint64), ("checks", c.c_uint64), ("raw_len", c.c_uint64),
                ("stored_len", c.c_uint64),
                ("codec", c.c_uint16), ("kind", c.c_uint8), ("pack", c.c_uint32)]


class Notes(c.Structure):
    _fields_ = [("all", c.c_void_p), ("n", c.c_size_t), ("unknown", c.c_bool)]


@pytest.fixture
def api(lib):
    path = scratch()
    shutil.rmtree(path)
    api = Api(lib, path)
    lib.commit_notes_name.restype = c.c_bool
    yield api
    api.close()
    shutil.rmtree(path)


def put(api, *ranges, all_=False):
    array = (Range * (len(ranges) + 1))(*ranges)
    api.call(api.lib.commit_note_put, api.p, PACK.encode(), array, c.c_size_t(len(ranges)), c.c_bool(all_))


def named(api, *offsets):
    """Which of these objects of 100 bytes a save would not refer to."""
    notes = Notes()
    assert api.lib.commit_notes_read(api.p, c.byref(notes)) == 0
    try:
        refs = [Ref(offset=at, checks=1 << 30, raw_len=100, stored_len=100) for at in offsets]
        return [ref.offset for ref in refs if api.lib.commit_notes_name(c.byref(notes), PACK.encode(), c.byref(ref))]
    finally:
        api.lib.commit_notes_release(c.byref(notes))


def test_ranges_are_added(api):
    put(api, (1000, 100))
    put(api, (5000, 100))
    assert named(api, 0, 1000, 1050, 3000, 5000) == [1000, 1050, 5000]
    put(api, (3000, 1), all_=True)
    assert named(api, 1000, 3000, 5000) == [3000]
    put(api, all_=True)
    assert named(api, 1000, 3000, 5000) == []


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_note_that_cannot_be_read_is_not_replaced(api, error):
    put(api, (1000, 100))
    m = Meddler(api)
    try:
        m.answer["read_whole"] = lambda args: -error
        with pytest.raises(Failed) as e:
            put(api, (5000, 100))
        assert e.value.code == -error and "damaged/" + PACK in e.value.text
        assert named(api, 0, 1000, 5000) == [0, 1000, 5000]     # it stands for its whole pack meanwhile
    finally:
        m.end()
    assert named(api, 0, 1000, 5000) == [1000]
    put(api, (5000, 100))
    assert named(api, 0, 1000, 5000) == [1000, 5000]


def test_a_damaged_note_is_one_of_the_whole_pack(api):
    put(api, (1000, 100))
    file = api.path / "damaged" / PACK
    file.chmod(0o600)
    file.write_bytes(b"rot" + file.read_bytes()[3:])
    put(api, (5000, 100))
    assert named(api, 0, 1000, 5000) == [0, 1000, 5000]
    put(api, (5000, 100), all_=True)
    assert named(api, 0, 1000, 5000) == [5000]
