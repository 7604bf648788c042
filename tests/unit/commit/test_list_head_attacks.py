# SPDX-License-Identifier: Apache-2.0
"""Lists with collected entries, as an enemy would have them."""
import ctypes as c
import shutil

import pytest

from storelib import ABORT, LAUNCH, NONE, REMOVE, Api, Failed, fresh, save
from test_list import accept, ruin
from test_list_head import RUN, aged, chain, entries, fake, faults, head_chain, live_of, marks, sound
from test_list_snapshots import EVERY, commits


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


def aborts(l, until):
    while l.next < until:
        l.put(l.api.entry(ABORT, attempt=b"%016x-0" % l.next, reason=b"x"))


@pytest.mark.parametrize("removal", ["stays", "is accepted", "comes after"])
def test_a_head_before_an_accepted_entry(api, removal):
    """What went away in a stretch with an accepted entry is not known: that is no lie of the snapshot before it."""
    head = 3 * EVERY
    with api.list(RUN) as l:
        aborts(l, head - 10)
        n = l.put(api.commit_entry(f"{77:016x}-0", 5, NONE, 5))
        aborts(l, head + 5)
        if removal != "comes after":
            removed = l.put(api.entry(REMOVE, removes=n))
        aborts(l, head + 20)
        bad = removed if removal == "is accepted" else l.next - 2
        if removal == "comes after":
            removed = l.put(api.entry(REMOVE, removes=n))
        aborts(l, head + 30)
    ruin(api, RUN, bad)
    with api.list(RUN, True) as l:
        accept(l, bad)
        aborts(l, head + 4 * EVERY - 20)        # so that the head may be there, and no further
        live = live_of(api)
    api.gc()
    sound(api, live)
    with api.list(RUN, True) as l:
        aborts(l, head + 6 * EVERY)
    assert api.gc()[0].entries
    sound(api, live)


def test_launches_of_which_none_may_go(api):
    """A list that no vckpt makes: each launch goes on from the one before, so all entries before the head stay."""
    for n in range(EVERY):
        e = api.entry(LAUNCH, launch=b"%016x" % (n + 1), newest_step=NONE, list_2=True, nth=n + 1,
                      from_=n - 1 if n else NONE)
        api.put_raw_as_it_is(RUN, n, e)
    with api.list(RUN) as l:
        assert l.damaged == 0
        aborts(l, 5 * EVERY - 10)
    api.gc()
    sound(api, {})


def test_a_backup_of_hard_links_does_not_keep_entries(api, tmp_path):
    """`cp -al`, rsnapshot: each entry has a second name elsewhere."""
    aged(api)
    live = live_of(api)
    shutil.copytree(api.path, api.path.with_name(api.path.name + "-links"), copy_function=__import__("os").link)
    try:
        assert api.gc()[0].entries > 600
        sound(api, live)
    finally:
        shutil.rmtree(api.path.with_name(api.path.name + "-links"))


def test_mend_brings_a_snapshot_of_the_chain_from_a_copy(api, vckpt, tmp_path):
    """Its digest is known from the one that goes on from it."""
    live, head, found = head_chain(api)
    copy = tmp_path / "copy"
    shutil.copytree(api.path, copy)
    for n in found[1:]:
        ruin(api, RUN, n)
    vckpt("mend", api.path, "--from", copy, check=False)
    assert faults(vckpt, api) == {}
    with api.list(RUN, True) as l:
        assert not l.lib.store_list_skipped(l.p, c.c_uint64(found[1]))
    sound(api, live)
