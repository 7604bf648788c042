# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job that are not of one version (docs/format/versions.md): the older one ends the attempt by name, and
nobody waits."""
import ctypes as c

import pytest

from protolib import field
from ranklib import api  # noqa: F401
from storelib import EABORTED, Failed
from test_launch import begin_all, close, failure, job

BEGIN, ANNOUNCEMENT = 4, 6
WORD = b"shiny_2"


def put_newer(api, name, kind):
    path = api.path / name
    if path.exists():
        path.unlink()
    body = field(1, 2) + field(2, WORD)
    r = api.lib.store_record_put(c.c_void_p(api.p.contents.storage), name.encode(), kind, (c.c_uint8 * 16)(*api.id),
                                 body, c.c_size_t(len(body)))
    assert r == 0, r


def test_a_newer_announcement_ends_the_attempt(api):
    """Whoever would commit says so; nobody waits for it to become readable."""
    ls = job(api, 2)
    a, b = begin_all(ls)
    b.announce()
    put_newer(api, f"incoming/r/{a.name}/part.1", ANNOUNCEMENT)
    a.announce()
    for text in (failure(EABORTED, a.wait), failure(EABORTED, b.wait)):
        assert "newer vckpt" in text and '"shiny_2"' in text and "rank 1" in text, text
    close(ls, a, b)
    api.gc()


def test_a_newer_begin_ends_the_attempt(api):
    ls = job(api, 2)
    a = ls[0].begin(step=3)
    a.write(bytes(100))
    a.announce()
    put_newer(api, f"incoming/r/{a.name}/begin", BEGIN)
    with pytest.raises(Failed) as e:
        ls[1].begin(step=3)
    assert "newer vckpt" in e.value.text and '"shiny_2"' in e.value.text
    assert '"shiny_2"' in failure(EABORTED, a.wait)
    close(ls, a)
    api.gc()
