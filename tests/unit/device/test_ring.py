# SPDX-License-Identifier: Apache-2.0
"""The staging ring against a model that knows only its promises, its kinds of memory, and what is free."""
import ctypes
import os
import random
import resource
import subprocess
import sys
import threading

import pytest

PAGE = os.sysconf("SC_PAGESIZE")
AUTO, NO, YES, ALLOCATE = range(4)
PAGEABLE, LOCKED, PINNED = range(3)


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1000)]


class Ring:
    def __init__(self, lib, nbytes, pin=NO, fence=None):
        self.lib, self.p, err = lib, ctypes.c_void_p(), Error()
        lib.device_ring_take.restype = ctypes.c_void_p
        lib.device_ring_bytes.restype = lib.device_ring_used.restype = ctypes.c_uint64
        self.rc = lib.device_ring_new(ctypes.c_uint64(nbytes), pin, fence, ctypes.byref(self.p), ctypes.byref(err))
        self.error = err.text.decode()

    def take(self, nbytes):
        return self.lib.device_ring_take(self.p, ctypes.c_uint64(nbytes))

    def give(self, slot):
        return self.lib.device_ring_give(self.p, ctypes.c_void_p(slot))

    def register(self, fence):
        return self.lib.device_ring_register(self.p, fence)

    used = property(lambda self: self.lib.device_ring_used(self.p))
    bytes = property(lambda self: self.lib.device_ring_bytes(self.p))
    memory = property(lambda self: self.lib.device_ring_memory(self.p))

    def __enter__(self):
        assert self.rc == 0, self.error
        return self

    def __exit__(self, *_):
        self.lib.device_ring_free(self.p)


def test_slots_follow_one_another_from_page_to_page(lib):
    with Ring(lib, 10 * PAGE - 1) as r:
        assert r.bytes == 10 * PAGE and r.used == 0 and r.memory == PAGEABLE
        a, b, c = r.take(1), r.take(PAGE + 1), r.take(0)
        assert a % PAGE == 0 and b == a + PAGE and c == b + 2 * PAGE and r.used == 4 * PAGE
        ctypes.memset(b, 7, PAGE + 1)
        assert r.take(7 * PAGE) is None and r.take(6 * PAGE) == c + PAGE and r.take(1) is None
        assert r.take((1 << 64) - 1) is None and r.take(11 * PAGE) is None


def test_room_is_reused_in_order_only(lib):
    with Ring(lib, 4 * PAGE) as r:
        slots = [r.take(PAGE) for _ in range(4)]
        assert [r.give(slots[i]) for i in (2, 1, 3)] == [0, 0, 0]
        assert r.used == 4 * PAGE and r.take(1) is None
        assert r.give(slots[0]) == 0 and r.used == 0
        assert r.take(4 * PAGE) == slots[0]


def test_a_slot_that_does_not_fit_at_the_end_begins_at_the_start(lib):
    with Ring(lib, 10 * PAGE) as r:
        a, b = r.take(5 * PAGE), r.take(3 * PAGE)
        assert r.give(a) == 0 and r.used == 3 * PAGE
        c = r.take(4 * PAGE)
        assert c == a and r.used == 9 * PAGE, "two pages at the end are skipped"
        assert r.take(2 * PAGE) is None and r.take(PAGE) == a + 4 * PAGE
        assert r.give(b) == 0 and r.used == 5 * PAGE, "and come back with what lies before them"
        assert r.take(5 * PAGE) == b


def test_an_empty_ring_has_room_for_a_slot_of_its_own_size(lib):
    with Ring(lib, 10 * PAGE) as r:
        for n in range(1, 11):
            slot = r.take(n * PAGE)
            assert r.give(slot) == 0
            whole = r.take(10 * PAGE)
            assert whole and r.give(whole) == 0


def test_what_is_no_taken_slot_is_refused(lib):
    with Ring(lib, 10 * PAGE) as r:
        a, b = r.take(3 * PAGE), r.take(PAGE)
        for wrong in (a + 1, a + PAGE, a - PAGE, a + 4 * PAGE, a + 10 * PAGE, a + 100 * PAGE, None, 8,
                      (1 << 64) - PAGE):
            assert r.give(wrong) == -22, wrong
        assert r.give(b) == 0 and r.give(b) == -22, "given twice, while it still waits"
        assert r.give(a) == 0 and r.give(a) == -22 and r.give(b) == -22, "given twice, and free"
        assert r.used == 0


def test_any_history_keeps_slots_apart_and_bytes_whole(lib, scale):
    """Slots never overlap, hold what was written, and a refusal is due: in order, nothing that large is free."""
    for seed in range(scale(20, 200)):
        pick = random.Random(seed)
        pages = pick.choice([1, 2, 7, 16, 61])
        with Ring(lib, pages * PAGE) as r:
            order, live, sizes, base = [], {}, {}, r.take(0)
            assert r.give(base) == 0
            for step in range(300):
                if live and pick.random() < 0.48:
                    slot = pick.choice(list(live))
                    n, mark = live.pop(slot)
                    assert ctypes.string_at(slot, n * PAGE) == mark * (n * PAGE)
                    assert r.give(slot) == 0
                    while order and order[0] not in live:
                        order.pop(0)
                else:
                    n = pick.randint(1, pages)
                    slot = r.take(n * PAGE)
                    if slot is None:
                        assert order, "an empty ring refuses nothing"
                        tail = (order[0] - base) // PAGE
                        last = order[-1]
                        head = (last - base) // PAGE + sizes[last]
                        if head > tail:
                            assert n > pages - head and n > tail
                        else:
                            assert n > tail - head
                        continue
                    if not order:
                        sizes.clear()
                    assert (slot - base) % PAGE == 0 and base <= slot and slot + n * PAGE <= base + pages * PAGE
                    for other, (m, _) in live.items():
                        assert slot + n * PAGE <= other or other + m * PAGE <= slot
                    mark = bytes([step % 251])
                    ctypes.memset(slot, mark[0], n * PAGE)
                    live[slot] = (n, mark)
                    sizes[slot] = n
                    order.append(slot)
                assert r.used >= sum(n for n, _ in live.values()) * PAGE
                assert bool(r.used) == bool(live)


def test_threads_share_it(lib):
    with Ring(lib, 64 * PAGE) as r:
        wrong = []

        def work(mark):
            pick = random.Random(mark)
            for _ in range(2000):
                n = pick.randint(1, 9) * PAGE
                slot = r.take(n)
                if slot:
                    ctypes.memset(slot, mark, n)
                    if ctypes.string_at(slot, n) != bytes([mark]) * n or r.give(slot) != 0:
                        wrong.append(mark)

        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not wrong and r.used == 0


def test_it_is_resident_at_once_and_gone_at_the_end(lib):
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * PAGE

    size = 96 << 20
    before = resident()
    with Ring(lib, size):
        assert resident() - before > size * 0.95
    assert resident() - before < size * 0.2


@pytest.mark.parametrize("nbytes", [0, (1 << 64) - 1, 1 << 63, 1 << 55])
def test_sizes_that_can_not_be(lib, nbytes):
    r = Ring(lib, nbytes)
    assert r.rc in (-22, -12) and "staging ring" in r.error and not r.p.value


LIMITED = """
import ctypes, resource, sys
from test_ring import *
lib = ctypes.CDLL(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (PAGE, PAGE))
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
with Ring(lib, 64 * PAGE, AUTO) as r:
    assert r.memory == PAGEABLE, r.memory
r = Ring(lib, 64 * PAGE, YES)
assert r.rc in (-1, -12) and "RLIMIT_MEMLOCK is %d" % PAGE in r.error, (r.rc, r.error)
"""


@pytest.mark.skipif("VCKPT_PRELOAD" in os.environ, reason="the sanitizers' mlock does nothing")
def test_what_may_not_be_locked_is_pageable_or_refused(build):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(build / "tests" / "libvckpt_internal.so")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_may_be_locked_is(lib):
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY and soft < 64 * PAGE:
        pytest.skip(f"RLIMIT_MEMLOCK is {soft}")
    for pin in (AUTO, YES):
        with Ring(lib, 16 * PAGE, pin) as r:
            assert r.memory == LOCKED
    with Ring(lib, 16 * PAGE, NO) as r:
        assert r.memory == PAGEABLE


def test_a_child_does_not_get_it(lib):
    """A fork copies nothing of it, so the parent's next writes cost no copies."""
    with Ring(lib, 4 * PAGE) as r:
        slot = r.take(1)
        child = os.fork()
        if child == 0:
            inside = False
            for line in open("/proc/self/maps"):
                low, high = (int(v, 16) for v in line.split()[0].split("-"))
                inside |= low <= slot < high
            os._exit(inside)
        assert os.waitpid(child, 0)[1] == 0
