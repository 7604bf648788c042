# SPDX-License-Identifier: Apache-2.0
"""Copies out of device memory against the stand-in driver, which counts every promise that was not kept; and the
stand-in itself: each wrong order that it is there to find is made on purpose, and found."""
import ctypes
import functools
import itertools
import os
import random
import subprocess
import sys
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gatherlib import Gather
from standinlib import standin
from test_gather import views
from test_ring import ALLOCATE, AUTO, LOCKED, NO, PAGE, PAGEABLE, PINNED, YES, Error, Ring

EPERM, ENOENT, EIO, ENOMEM, EFAULT, EEXIST, EINVAL, ENODEV = 1, 2, 5, 12, 14, 17, 22, 19


@pytest.fixture(scope="module")
def driver(build):
    """Set up, as by a program that has device memory."""
    driver = standin(build)
    assert driver.lib.cuInit(0) == 0
    return driver


@pytest.fixture
def cuda(driver, lib):
    """A fresh context, current; afterwards nothing was done wrong and nothing is left but what the test made."""
    driver.reset()
    driver.context()
    device = Device(lib)
    yield device
    device.close()
    assert driver.faults() == device.faults and driver.held() == device.held and driver.depth() == 0
    driver.reset()


class Device:
    """core/device/cuda.h, with what is to be freed in the end."""

    def __init__(self, lib):
        self.lib, self.err, self.open, self.faults, self.held, self.pin = lib, Error(), [], {}, {}, AUTO

    def check(self, rc):
        if rc < 0:
            raise OSError(-rc, self.err.text.decode())
        return rc

    def made(self, kind, *args):
        p = ctypes.c_void_p()
        self.check(getattr(self.lib, f"device_{kind}_new")(*args, ctypes.byref(p), ctypes.byref(self.err)))
        self.open.append((kind, p))
        return p

    def fence(self, *streams, at=None):
        """Of the memory at `at`, a list of addresses; or of the thread's context. Its places are in self.places."""
        fence, n = self.made("fence"), max(1, len(streams))
        try:
            self.places = [self.place(fence, one) for one in at or [None]]
            self.check(self.lib.device_fence_set(fence, (ctypes.c_void_p * n)(*streams), ctypes.c_size_t(n),
                                                 ctypes.byref(self.err)))
        except OSError:
            self.lib.device_fence_free(self.open.pop()[1])
            raise
        return fence

    def place(self, fence, address):
        place = ctypes.c_uint()
        self.check(self.lib.device_fence_context(fence, ctypes.c_void_p(address), ctypes.byref(place),
                                               ctypes.byref(self.err)))
        return place.value

    def stream(self, fence, place=0):
        return self.made("stream", fence, place, self.pin)

    def event(self, stream):
        return self.made("event", stream)

    def wait_fence(self, stream, fence):
        self.check(self.lib.device_stream_wait(stream, fence, ctypes.byref(self.err)))

    def gather(self, stream, to, g):
        self.check(self.lib.device_stream_gather(stream, ctypes.c_void_p(to), ctypes.byref(g), ctypes.byref(self.err)))

    def scatter(self, stream, start, g):
        self.check(self.lib.device_stream_scatter(stream, ctypes.c_void_p(start), ctypes.byref(g),
                                                  ctypes.byref(self.err)))

    def copy(self, stream, to, start, nbytes):
        g = Gather(start, 1, 1)
        g.size[0], g.stride[0] = nbytes, 1
        self.gather(stream, to, g)

    def set(self, event):
        self.check(self.lib.device_event_set(event, ctypes.byref(self.err)))

    def wait(self, event):
        self.check(self.lib.device_event_wait(event, ctypes.byref(self.err)))

    def done(self, stream):
        event = self.event(stream)
        self.set(event)
        self.wait(event)

    def close(self):
        for kind, p in reversed(self.open):
            getattr(self.lib, f"device_{kind}_free")(p)
        self.open = []


def noise(n, seed=1):
    return random.Random(seed).randbytes(n)


N = 1 << 16


# ---- the promises ----

@pytest.mark.parametrize("default_stream", [True, False])
def test_a_copy_sees_what_the_callers_stream_wrote_before_the_fence(cuda, driver, default_stream):
    source, new = driver.memory(noise(N)), noise(N, 2)
    out = ctypes.create_string_buffer(N)
    own = None if default_stream else driver.stream()
    driver.write(own, source, new, 20_000)
    fence = cuda.fence(own)
    stream = cuda.stream(fence)
    cuda.wait_fence(stream, fence)
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.done(stream)
    assert out.raw == new
    cuda.held = {} if default_stream else {"streams": 1}


def test_without_the_fence_old_bytes_come_and_it_is_counted(cuda, driver):
    """The wrong order on purpose: what the test above would look like if the wait were forgotten."""
    old, new = noise(N), noise(N, 2)
    source, out = driver.memory(old), ctypes.create_string_buffer(N)
    driver.write(None, source, new, 50_000)
    fence = cuda.fence()
    stream = cuda.stream(fence)
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.done(stream)
    assert out.raw == old
    cuda.faults = {"premature": 1}


def test_a_fence_before_the_write_does_not_cover_it(cuda, driver):
    """Counted even when the bytes happen to be there in time."""
    source, out = driver.memory(N), ctypes.create_string_buffer(N)
    fence = cuda.fence()
    driver.write(None, source, noise(N))
    stream = cuda.stream(fence)
    cuda.wait_fence(stream, fence)
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.done(stream)
    cuda.faults = {"premature": 1}


def test_what_the_host_waited_for_needs_no_fence(cuda, driver):
    source, out, data = driver.memory(N), ctypes.create_string_buffer(N), noise(N)
    driver.write(None, source, data, 5000)
    assert driver.synchronize(None) == 0
    stream = cuda.stream(cuda.fence())
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.done(stream)
    assert out.raw == data


def test_an_event_covers_the_copies_before_it_and_only_those(cuda, driver):
    source, out = driver.memory(noise(2 * N)), ctypes.create_string_buffer(2 * N)
    at = ctypes.addressof(out)
    stream = cuda.stream(cuda.fence())
    event = cuda.event(stream)
    for _ in range(3):                                                        # an event is used again
        cuda.copy(stream, at, source, N)
        cuda.set(event)
        cuda.copy(stream, at + N, source + N, N)
        cuda.wait(event)
        assert not driver.busy(at, N) and driver.busy(at + N, N)
        assert out.raw[:N] == noise(2 * N)[:N]
        cuda.done(stream)
        assert not driver.busy(at, 2 * N) and out.raw == noise(2 * N)


def test_memory_used_again_before_its_event_is_counted(cuda, driver):
    """The wrong order on purpose: a slot that goes back to the ring too early."""
    source, out = driver.memory(noise(N)), ctypes.create_string_buffer(N)
    stream = cuda.stream(cuda.fence())
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.copy(stream, ctypes.addressof(out) + N - 1, source, 1)
    cuda.done(stream)
    cuda.faults = {"reused": 1}


def test_rows_between_rows_are_not_used_again(cuda, driver):
    """Copies with a pitch may interleave, as long as no row meets another."""
    source, out = driver.memory(noise(1 << 12)), ctypes.create_string_buffer(1 << 12)
    stream = cuda.stream(cuda.fence())
    g = Gather(source, 4, 3)
    g.size[:3], g.stride[:3] = [40, 3, 2], [96, 16, 8]
    cuda.gather(stream, ctypes.addressof(out), g)
    assert driver.count("copies") == 1                    # all of it: the gaps are smaller than what a short row costs
    cuda.done(stream)


@pytest.mark.parametrize("late", [False, True])
def test_memory_written_while_a_copy_fills_it_is_counted(cuda, driver, late):
    """The wrong order on purpose: before the copy is executed, and after, when the host can not know that yet."""
    source, out = driver.memory(noise(N)), ctypes.create_string_buffer(N)
    driver.write(None, driver.memory(1), b"x", 20_000 if not late else 0)
    fence = cuda.fence()
    stream = cuda.stream(fence)
    event = cuda.event(stream)
    cuda.wait_fence(stream, fence)
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.set(event)
    if late:
        while out.raw != noise(N):
            time.sleep(0.001)
        time.sleep(0.05)
    out[5] = bytes([out.raw[5] ^ 1])
    cuda.wait(event)
    cuda.faults = {"touched": 1}


def test_a_stream_waits_for_its_copies_when_it_is_freed(cuda, driver):
    source, out = driver.memory(noise(N)), ctypes.create_string_buffer(N)
    driver.write(None, driver.memory(1), b"x", 20_000)
    fence = cuda.fence()
    stream = cuda.stream(fence)
    cuda.wait_fence(stream, fence)
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.close()
    assert out.raw == noise(N) and not driver.busy(ctypes.addressof(out), N)


def test_a_fence_may_be_freed_while_streams_wait_for_it(cuda, driver, lib):
    source, out, data = driver.memory(N), ctypes.create_string_buffer(N), noise(N)
    driver.write(None, source, data, 20_000)
    fence = cuda.fence()
    stream = cuda.stream(fence)
    cuda.wait_fence(stream, fence)
    cuda.open.pop(0)
    lib.device_fence_free(fence)
    cuda.copy(stream, ctypes.addressof(out), source, N)
    cuda.done(stream)
    assert out.raw == data


# ---- threads and contexts ----

def test_another_thread_without_a_context_copies(cuda, driver):
    """As the saver does: the fence is the caller's, all else belongs to a thread that never saw a context."""
    source, out, data, wrong = driver.memory(N), ctypes.create_string_buffer(N), noise(N), []
    driver.write(None, source, data, 10_000)
    fence = cuda.fence()

    def work():
        try:
            stream = cuda.stream(fence)
            cuda.wait_fence(stream, fence)
            cuda.copy(stream, ctypes.addressof(out), source, N)
            cuda.done(stream)
            wrong.append(driver.depth())
            cuda.close()
        except OSError as e:
            wrong.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert wrong == [0] and out.raw == data


def test_threads_with_other_contexts_current_keep_them(cuda, driver, lib):
    fence = cuda.fence()
    other = driver.context()
    current = ctypes.c_void_p()
    stream = cuda.stream(fence)
    cuda.wait_fence(stream, fence)
    cuda.done(stream)
    cuda.close()
    driver.lib.cuCtxGetCurrent(ctypes.byref(current))
    assert current.value == other and driver.depth() == 0


def test_a_stream_fits_fences_of_its_context_only(cuda, driver, lib):
    lib.device_stream_fits.restype = ctypes.c_bool
    first, second = cuda.fence(), cuda.fence()
    stream = cuda.stream(first)
    driver.context()
    third = cuda.fence()
    assert lib.device_stream_fits(stream, first, 0) and lib.device_stream_fits(stream, second, 0)
    assert not lib.device_stream_fits(stream, third, 0)
    cuda.wait_fence(stream, third)                                              # events may be of another context


def test_a_thread_without_a_context_makes_no_fence(cuda, driver, lib):
    driver.set(None)
    for at in (None, [0x1234000]):
        with pytest.raises(OSError, match="does not know the memory at .*no CUDA context") as e:
            cuda.fence(at=at)
        assert e.value.errno == EINVAL


def test_a_call_under_the_wrong_context_is_counted(cuda, driver):
    """The wrong order on purpose: the driver called without the fence's context being pushed."""
    own = driver.stream()
    driver.context()
    assert driver.synchronize(own) == 201
    driver.set(None)
    assert driver.synchronize(own) == 201
    cuda.faults, cuda.held = {"context": 2}, {"streams": 1}


def test_an_event_is_asked_without_waiting(cuda, driver, lib):
    """Inside and outside of the calls that another library makes on the stream."""
    stream = cuda.stream(cuda.fence())
    event = cuda.event(stream)
    handle = ctypes.c_void_p(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("device_stream_handle", lib))(stream))
    done = functools.partial(lib.device_event_done, event, ctypes.byref(cuda.err))
    released = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait())
    cuda.check(lib.device_stream_enter(stream, ctypes.byref(cuda.err)))
    assert driver.lib.cuLaunchHostFunc(handle, wait, None) == 0 and driver.depth() == 1
    lib.device_stream_leave(stream)
    cuda.set(event)
    assert cuda.check(done()) == 0
    released.set()
    cuda.wait(event)
    assert cuda.check(done()) == 1
    driver.fail("cuEventQuery", 1, 700)
    with pytest.raises(OSError, match="cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda.check(done())


def test_use_after_destroy_is_counted(cuda, driver):
    own, event = driver.stream(), ctypes.c_void_p()
    assert driver.lib.cuEventCreate(ctypes.byref(event), 3) == 0
    assert driver.lib.cuEventDestroy_v2(event) == 0 and driver.lib.cuStreamDestroy_v2(ctypes.c_void_p(own)) == 0
    assert driver.lib.cuEventSynchronize(event) == 400 and driver.synchronize(own) == 400
    assert driver.synchronize(12345) == 400
    cuda.faults = {"destroyed": 2, "foreign": 1}


def test_frees_are_silent_when_the_context_is_gone(cuda, driver, lib):
    context = driver.context()
    fence = cuda.fence()
    stream = cuda.stream(fence)
    cuda.event(stream)
    r = Ring(lib, PAGE, YES, fence)
    assert r.rc == 0
    driver.lib.standin_context_destroy(ctypes.c_void_p(context))
    with pytest.raises(OSError, match="CUDA_ERROR_CONTEXT_IS_DESTROYED") as e:
        cuda.wait_fence(stream, fence)
    assert e.value.errno == ENODEV
    cuda.close()
    lib.device_ring_free(r.p)
    cuda.held = {"streams": 1, "events": 2, "registrations": 1}                  # the context takes them with it


# ---- shapes ----

def copied(cuda, driver, view):
    """What a device gather makes of a view; on the device there is only what lies between its first byte and its
    last."""
    low, high = getattr(np.lib, "array_utils", np).byte_bounds(view) if view.size else (0, 0)
    device = driver.memory(ctypes.string_at(low, high - low) or b"x")
    g = Gather.of(view)
    g.from_ = device + g.from_ - low if view.size else device
    nbytes = view.size * view.itemsize
    out = ctypes.create_string_buffer(nbytes + 1)
    stream = cuda.stream(cuda.fence())
    cuda.gather(stream, ctypes.addressof(out), g)
    cuda.done(stream)
    cuda.close()
    return out.raw[:nbytes]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(views().filter(lambda v: v.size < 4000))
def test_any_view_of_device_memory(cuda, driver, view):
    driver.lib.standin_delay(0, 1)
    assert copied(cuda, driver, view) == np.ascontiguousarray(view).tobytes()


# ---- the reverse ----

def there(driver, nbytes):
    """So many bytes of device memory, as numpy's."""
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(driver.memory(nbytes)), np.uint8)


def box(view):
    g = Gather(view.ctypes.data, view.itemsize, view.ndim)
    for d in range(view.ndim):
        g.size[d], g.stride[d] = view.shape[d], view.strides[d]
    return g


@pytest.mark.parametrize("cut", [
    lambda a: a, lambda a: a[1:3], lambda a: a[:, 1:3], lambda a: a[:, 1:3, 2:5], lambda a: a[::2, ::2, ::2],
    lambda a: a.transpose(2, 0, 1), lambda a: a[1, 2, 3, ...], lambda a: a[:0], lambda a: a[:, 2, ::3]])
def test_bytes_go_to_any_box_of_device_memory(cuda, driver, cut):
    whole = there(driver, 4 * 6 * 8 * 4).view(np.int32).reshape(4, 6, 8)
    whole[...] = -1
    view, want = cut(whole), np.full((4, 6, 8), -1, np.int32)
    items = np.arange(view.size, dtype=np.int32).reshape(view.shape)
    cut(want)[...] = items
    stream = cuda.stream(cuda.fence())
    cuda.scatter(stream, items.ctypes.data, box(view))
    cuda.done(stream)
    assert whole.tobytes() == want.tobytes()


def test_source_changed_too_early_is_counted(cuda, driver):
    """The wrong order on purpose: memory is changed before its copy to the device was waited for."""
    data, out = np.arange(1000, dtype=np.uint8), there(driver, 1000)
    stream = cuda.stream(cuda.fence())
    cuda.scatter(stream, data.ctypes.data, box(out))
    assert driver.busy(data.ctypes.data, 1)
    data[5] += 1
    cuda.done(stream)
    assert driver.faults() == {"touched": driver.count("touched")} and driver.count("touched")
    cuda.faults = driver.faults()


def test_source_filled_by_a_copy_that_nobody_waited_for_is_counted(cuda, driver):
    room, source, out = np.zeros(1000, np.uint8), driver.memory(noise(1000)), there(driver, 1000)
    fence = cuda.fence()
    first, second = cuda.stream(fence), cuda.stream(fence)
    cuda.copy(first, room.ctypes.data, source, 1000)
    cuda.scatter(second, room.ctypes.data, box(out))
    cuda.done(first)
    cuda.done(second)
    assert driver.count("reused") == 1
    cuda.faults = driver.faults()


A = np.arange(4 * 6 * 8, dtype=np.int32).reshape(4, 6, 8)
B = np.arange(6 * 4 * 2000, dtype=np.int32).reshape(6, 4, 2000)
ROWS = np.arange(1 << 16, dtype=np.int32).reshape(64, 1024)


@pytest.mark.parametrize("view, calls", [
    (A, "1"), (A[1:3], "1"), (A[:, 1:3], "2"), (A[0].T, "1"), (A[::-1], "1"), (A[::2, ::2, ::2], "2"),
    (A[:, :, ::-1], "1"),
    (np.broadcast_to(A[0, 0], (5, 8)), "1"), (A[:0], ""), (A[1, 2, 3, ...], "1"), (A.transpose(2, 0, 1)[::-1], "1"),
    (B, "1"), (B[:, :, 100:900], "2"), (B[:, 1:3, 100:900], "3"), (B.transpose(1, 0, 2), "2222"),
    (B[::2, ::2, ::2], "3"),
    (B.transpose(2, 0, 1)[:, ::-1], "1"), (ROWS[:, ::16], "2"), (ROWS[:, ::4], "1"), (ROWS[::5], "2"),
    (ROWS[:, :3].T, "2")])
def test_few_calls(cuda, driver, view, calls):
    """1, 2, 3: a call that copies in so many dimensions."""
    assert copied(cuda, driver, view) == np.ascontiguousarray(view).tobytes()
    made = "1" * driver.count("copies") + "2" * driver.count("copies_2d") + "3" * driver.count("copies_3d")
    assert made == calls
    assert driver.count("bytes") <= 4 * view.size * view.itemsize


@pytest.mark.parametrize("shape", [(512, 1024), (8, 64, 1024), (4, 8, 128, 128), (16, 4, 32, 16, 16)])
def test_every_permutation_of_2_mib_takes_few_calls(cuda, driver, shape):
    """One where items are reordered; rows of 64 bytes and more may be copied straight, by some calls more."""
    driver.lib.standin_delay(0, 1)
    whole = np.random.default_rng(3).integers(0, 2**32, shape, np.uint32)
    for order in itertools.permutations(range(len(shape))):
        before = {what: driver.count(what) for what in ("copies", "copies_2d", "copies_3d", "calls")}
        view = whole.transpose(order)
        assert copied(cuda, driver, view) == np.ascontiguousarray(view).tobytes(), order
        made = {what: driver.count(what) - n for what, n in before.items()}
        copies = made["copies"] + made["copies_2d"] + made["copies_3d"]
        row = np.prod(
            [1, *shape[len(order) - next((i for i, d in enumerate(reversed(order)) if d != len(order) - 1 - i),
                                         len(order)):]]) * 4
        assert copies <= (1 if row < 64 else 64) and made["calls"] - copies < 60, (order, made)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.permutations(range(4)), st.tuples(*[st.sampled_from([3, 17, 40, 96, 130])] * 4),
       st.sampled_from([1, 2, 4, 8, 16, 3]),
       st.tuples(*[st.sampled_from([1, 1, 1, -1, 2])] * 4))
def test_large_boxes_are_reordered_in_parts(cuda, driver, order, shape, item, steps):
    """More than the memory to reorder them in, cut wherever that is best."""
    driver.lib.standin_delay(20, 1)
    shape, grow = list(shape), 0
    while np.prod(shape) * item > 64 << 20:     # more is more of the same, and several copies of it have to fit
        shape[int(np.argmax(shape))] //= 2
    while np.prod(shape) * item < 5 << 20:
        shape[grow % 4] *= 2
        grow += 1
    raw = np.random.default_rng(7).integers(0, 256, int(np.prod(shape)) * item, np.uint8)
    view = raw.view(f"V{item}").reshape(shape).transpose(order)[tuple(slice(None, None, s) for s in steps)]
    before = sum(driver.count(what) for what in ("copies", "copies_2d", "copies_3d"))
    assert copied(cuda, driver, view) == np.ascontiguousarray(view).tobytes()
    assert (sum(driver.count(what) for what in ("copies", "copies_2d", "copies_3d")) - before <= 4 +
            40 * view.nbytes // (1 << 20))
    driver.reset(20)
    driver.context()


WINDOWS = np.lib.stride_tricks.as_strided(np.arange(4096, dtype=np.int16), (1000, 16), (6, 2))


@pytest.mark.parametrize("view", [
    WINDOWS, WINDOWS.T, WINDOWS[::-1].T, np.broadcast_to(np.arange(3000, dtype=np.int32)[:, None], (3000, 100)),
    np.broadcast_to(np.arange(3000, dtype=np.int32)[::-1], (50, 3000)).T, np.broadcast_to(np.int64(7), (40, 30, 20)),
    np.broadcast_to(np.int8(7), (1,)), np.zeros((5, 0, 7), np.int8).T, np.arange(9)[4:5],
    np.arange(9, dtype=np.int8)[::-1],
    np.lib.stride_tricks.as_strided(np.arange(5000, dtype=np.int8), (70, 60), (71, 1))[:, ::2].T,
    np.lib.stride_tricks.as_strided(np.arange(5000, dtype=np.int64), (7, 7), (8, 8))],
    ids=lambda v: f"{v.shape}-{v.strides}")
def test_overlapping_repeated_empty_and_single_items(cuda, driver, view):
    assert copied(cuda, driver, view) == np.ascontiguousarray(view).tobytes()
    assert sum(driver.count(what) for what in ("copies", "copies_2d", "copies_3d")) <= 2
    assert driver.count("bytes") <= 4 * view.size * view.itemsize


@pytest.mark.parametrize("pin, pageable", [(AUTO, 0), (NO, 1), (YES, 0)])
def test_memory_to_reorder_in_is_pinned_where_it_may_be(cuda, driver, pin, pageable):
    cuda.pin = pin
    source, out = driver.memory(ROWS.tobytes()), ctypes.create_string_buffer(ROWS.nbytes)
    stream = cuda.stream(cuda.fence())
    g = Gather.of(ROWS.T)
    g.from_ = source
    cuda.gather(stream, ctypes.addressof(out), g)
    cuda.done(stream)
    assert out.raw == ROWS.T.tobytes() and (driver.count("pageable"),
                                            driver.count("allocations")) == (pageable, not pageable)


def test_memory_to_reorder_in_that_is_refused(cuda, driver):
    source, out = driver.memory(ROWS.tobytes()), ctypes.create_string_buffer(ROWS.nbytes)
    fence, g = cuda.fence(), Gather.of(ROWS.T)
    g.from_ = source
    for cuda.pin in (YES, AUTO):
        stream = cuda.stream(fence)
        driver.fail("cuMemHostAlloc", 1, 2)
        if cuda.pin == YES:
            with pytest.raises(OSError, match="cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
                cuda.gather(stream, ctypes.addressof(out), g)
            assert driver.count("allocations") == driver.count("copies") == 0
        else:
            cuda.gather(stream, ctypes.addressof(out), g)
            cuda.done(stream)
            assert out.raw == ROWS.T.tobytes() and driver.count("pageable") == 1


@pytest.mark.parametrize("function", ["cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuEventSynchronize",
                                      "cuMemcpyDtoHAsync", "cuMemcpy2DAsync"])
def test_a_reorder_that_fails_leaves_nothing(cuda, driver, function):
    """The nth call of a long one: the stream is freed, nothing is written to the destination afterwards, and another
    one works."""
    cuda.pin = YES
    big = np.random.default_rng(1).integers(0, 2**32, (1500, 1100), np.uint32)
    want = (big[:, :900] if function == "cuMemcpy2DAsync" else big).T
    source, g = driver.memory(big.tobytes()), Gather.of(want)
    g.from_, fence, failed = source, cuda.fence(), 0
    for nth in range(1, 6):
        out = ctypes.create_string_buffer(big.nbytes)
        stream = cuda.stream(fence)
        event = cuda.event(stream)
        driver.fail(function, nth, 2)
        try:
            cuda.gather(stream, ctypes.addressof(out), g)
            cuda.set(event)
            cuda.wait(event)
        except OSError as e:
            assert e.errno == ENOMEM
            failed += 1
            before = out.raw
            for _ in range(2):                                                # the event, the stream
                kind, p = cuda.open.pop()
                getattr(cuda.lib, f"device_{kind}_free")(p)
            assert out.raw == before
            continue
        assert out.raw[:want.nbytes] == want.tobytes()
        driver.reset()
        driver.context()
        cuda.open = []
        break
    else:
        pytest.fail("never got that far")
    assert failed >= 1


def test_an_event_covers_the_reorders_before_it(cuda, driver):
    """Many small ones share one wait, and those after the event are not done by it."""
    whole = np.random.default_rng(1).integers(0, 2**32, (100, 30, 50), np.uint32)
    source, out = driver.memory(whole.tobytes()), ctypes.create_string_buffer(2 * whole.nbytes)
    stream = cuda.stream(cuda.fence())
    event = cuda.event(stream)
    for part in range(2):
        for i in range(100):
            g = Gather.of(whole[i].T)
            g.from_ = source + i * whole[i].nbytes
            cuda.gather(stream, ctypes.addressof(out) + part * whole.nbytes + i * whole[i].nbytes, g)
        if part == 0:
            cuda.set(event)
    waits = driver.count("calls")
    cuda.wait(event)
    assert driver.count("calls") - waits <= 6
    assert out.raw[:whole.nbytes] == whole.transpose(0, 2, 1).tobytes() != out.raw[whole.nbytes:]
    cuda.done(stream)
    assert out.raw[whole.nbytes:] == whole.transpose(0, 2, 1).tobytes() and driver.count("copies") == 200


def test_a_pitch_beyond_the_drivers_limit_is_copied_row_by_row(cuda, driver, lib):
    """Device memory is virtual here: two rows 3 GiB apart."""
    far = 3 << 30
    source = driver.memory(far + 64)
    ctypes.memmove(source, b"first row", 9)
    ctypes.memmove(source + far, b"other row", 9)
    out = ctypes.create_string_buffer(18)
    g = Gather(source, 9, 1)
    g.size[0], g.stride[0] = 2, far
    stream = cuda.stream(cuda.fence())
    cuda.gather(stream, ctypes.addressof(out), g)
    cuda.done(stream)
    assert out.raw == b"first rowother row" and (driver.count("copies"), driver.count("copies_2d")) == (2, 0)


# ---- the ring ----

def test_a_pinned_ring_is_registered_for_as_long_as_it_lives(cuda, driver, lib):
    for pin in (AUTO, YES):
        with Ring(lib, 8 * PAGE, pin, cuda.fence()) as r:
            assert r.memory == PINNED and driver.count("registrations") == 1
            stream = cuda.stream(cuda.fence())
            cuda.copy(stream, r.take(PAGE), driver.memory(PAGE), PAGE)
            cuda.done(stream)
            cuda.close()
            assert driver.count("pageable") == 0 and driver.held() == {"registrations": 1}
            driver.set(None)                                                  # freed by whatever thread it is
            thread = threading.Thread(target=lib.device_ring_free, args=(r.p,))
            thread.start()
            thread.join()
            r.p = None
        assert not driver.count("registrations")
        driver.context()
    with Ring(lib, 8 * PAGE, NO, cuda.fence()) as r:
        assert r.memory == PAGEABLE and not driver.count("registrations")


@pytest.mark.parametrize("pin, memory", [(AUTO, PINNED), (YES, PINNED), (NO, PAGEABLE), (ALLOCATE, None)])
def test_a_ring_is_made_and_registered_by_a_thread_without_a_context(cuda, driver, lib, pin, memory):
    """As the saver does: at once, or when it meets device memory for the first time, slots of it being taken."""
    fence, found = cuda.fence(), []

    def work():
        with Ring(lib, 8 * PAGE, pin, fence) as r:
            found.append(r.memory)
        with Ring(lib, 8 * PAGE, pin) as r:
            slot, before = r.take(PAGE), r.memory
            found.extend((r.register(fence), r.register(fence), r.memory, before == PINNED, r.give(slot),
                          driver.depth()))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if pin == ALLOCATE:
        assert found[:3] == [PINNED, 1, 1] and found[3] in (PAGEABLE, LOCKED) and found[4:] == [False, 0, 0]
    else:
        assert found == [memory, 0, 0, memory, False, 0, 0]


@pytest.mark.parametrize("pin, calls", [(AUTO, ("cuMemHostRegister", "cuMemHostAlloc")),
                                        (YES, ("cuMemHostRegister", "cuMemHostAlloc")),
                                        (ALLOCATE, ("cuMemHostAlloc", "cuMemHostRegister"))],
                         ids=["auto", "yes", "allocate"])
def test_memory_that_can_not_be_pinned_the_first_way_is_the_second(cuda, driver, lib, pin, calls):
    """Registered or allocated; where neither works it is what it can be, or an error with both sentences."""
    fence, held = cuda.fence(), {"cuMemHostRegister": "registrations", "cuMemHostAlloc": "allocations"}
    lib.device_ring_why.restype = ctypes.c_char_p
    for refused in range(3):
        for function in calls[:refused]:
            driver.fail(function, 1, 800)
        r = Ring(lib, 8 * PAGE, pin, fence)
        both = f"{calls[0]}: the CUDA driver answers 800; {calls[1]}: the CUDA driver answers 800"
        if refused == 2 and pin == YES:
            assert r.rc == -EPERM and r.error == both
            continue
        with r:
            assert r.memory == PINNED if refused < 2 else r.memory in (PAGEABLE, LOCKED)
            assert [driver.count(held[c]) for c in calls] == [refused == 0, refused == 1]
            assert lib.device_ring_why(r.p).decode() == (both if refused == 2 else "") and r.register(fence) == 0
            slot = r.take(3 * PAGE)
            stream = cuda.stream(fence)
            cuda.copy(stream, slot, driver.memory(noise(3 * PAGE)), 3 * PAGE)
            cuda.done(stream)
            assert (ctypes.string_at(slot, 3 * PAGE) == noise(3 * PAGE) and
                    driver.count("pageable") == (refused == 2) and r.give(slot) == 0)
        assert not driver.count("registrations") and not driver.count("allocations")


def test_a_ring_that_is_in_use_is_registered_or_a_new_one_is_wanted(cuda, driver, lib):
    fence = cuda.fence()
    lib.device_ring_why.restype = ctypes.c_char_p
    for pin in (AUTO, YES):
        with Ring(lib, 8 * PAGE, pin) as r:
            driver.fail("cuMemHostRegister", 1, 2)
            assert r.register(fence) == 1 and r.register(fence) == 1, "asked once"
            assert r.memory in (PAGEABLE,
                                LOCKED) and lib.device_ring_why(r.p) == b"cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"
    with Ring(lib, 8 * PAGE, ALLOCATE) as r:
        assert r.register(fence) == 1 and not driver.count("registrations") and lib.device_ring_why(r.p) == b""
    with Ring(lib, 8 * PAGE, NO) as r:
        assert r.register(fence) == 0 and r.memory == PAGEABLE


def test_a_context_that_can_not_be_entered_pins_nothing(cuda, driver, lib):
    fence = cuda.fence()
    for nth in (1, 1):
        driver.fail("cuCtxPushCurrent", nth, 2)
    driver.fail("cuCtxPushCurrent", 2, 2)
    r = Ring(lib, 8 * PAGE, YES, fence)
    assert r.rc == -ENOMEM and r.error.startswith("cuCtxPushCurrent: CUDA_ERROR_OUT_OF_MEMORY")


def test_a_ring_of_copies_in_order_under_random_delays(cuda, driver, lib, scale):
    """A small saver: kernels write, fences, two streams, slots given back as their events are done; nothing is
    early."""
    for seed in range(scale(3, 30)):
        pick = random.Random(seed)
        driver.lib.standin_delay(400, ctypes.c_uint64(seed + 1))
        with Ring(lib, 24 * PAGE, YES, cuda.fence()) as r:
            sources = [driver.memory(8 * PAGE) for _ in range(4)]
            fence = cuda.fence()
            events = [(cuda.event(stream), stream) for stream in (cuda.stream(fence), cuda.stream(fence))
                      for _ in range(8)]
            under_way = []

            def finish():
                source, slot, want, event = under_way.pop(0)
                cuda.wait(event[0])
                assert ctypes.string_at(slot, len(want)) == want and r.give(slot) == 0
                events.append(event)

            for _ in range(60):
                source = pick.choice(sources)
                while any(u[0] == source for u in under_way):                 # not staged: the caller may not write
                    finish()
                data = pick.randbytes(pick.randint(1, 8 * PAGE))
                driver.write(None, source, data, pick.randint(0, 500))
                fence = cuda.fence()
                while not events or (slot := r.take(len(data))) is None:
                    finish()
                event, stream = events.pop(pick.randrange(len(events)))
                cuda.wait_fence(stream, fence)
                cuda.copy(stream, slot, source, len(data))
                cuda.set(event)
                under_way.append((source, slot, data, (event, stream)))
            while under_way:
                finish()
            assert r.used == 0 and driver.faults() == {}
            cuda.close()


# ---- errors ----

@pytest.mark.parametrize("function, call", [
    ("cuCtxGetCurrent", "fence"), ("cuThreadExchangeStreamCaptureMode", "fence"), ("cuStreamIsCapturing", "fence"),
    ("cuEventCreate", "fence"),
    ("cuPointerGetAttributes", "fence at"), ("cuDevicePrimaryCtxRetain", "fence mapped"),
    ("cuThreadExchangeStreamCaptureMode", "copy"), ("cuEventRecord", "fence"), ("cuCtxPushCurrent", "stream"),
    ("cuStreamCreate", "stream"), ("cuCtxPushCurrent", "event"), ("cuEventCreate", "event"),
    ("cuCtxPushCurrent", "wait_fence"),
    ("cuStreamWaitEvent", "wait_fence"), ("cuCtxPushCurrent", "copy"), ("cuMemcpyDtoHAsync", "copy"),
    ("cuCtxPushCurrent", "set"), ("cuEventRecord", "set"), ("cuCtxPushCurrent", "wait"),
    ("cuEventSynchronize", "wait")])
def test_every_call_of_the_driver_may_fail(cuda, driver, function, call):
    """Its name and the driver's word for it are in the sentence, nothing leaks, and the next call works."""
    fence = cuda.fence()
    stream = cuda.stream(fence)
    event = cuda.event(stream)
    out, source = ctypes.create_string_buffer(8), driver.memory(b"12345678")
    mapped = driver.lib.standin_memory_on(0, 8)
    calls = {"fence": cuda.fence, "fence at": lambda: cuda.fence(at=[source]),
             "fence mapped": lambda: cuda.fence(at=[mapped]), "stream": lambda: cuda.stream(fence),
             "event": lambda: cuda.event(stream),
             "wait_fence": lambda: cuda.wait_fence(stream, fence), "set": lambda: cuda.set(event),
             "wait": lambda: cuda.wait(event),
             "copy": lambda: cuda.copy(stream, ctypes.addressof(out), source, 8)}
    before = driver.held()
    driver.fail(function, 1, 2)
    with pytest.raises(OSError, match="CUDA_ERROR_OUT_OF_MEMORY") as e:
        calls[call]()
    assert e.value.errno == ENOMEM and driver.held() == before and driver.depth() == 0
    calls[call]()
    cuda.done(stream)


def test_a_copy_that_fails_on_the_device_is_told_by_its_event(cuda, driver):
    source, out = driver.memory(8), ctypes.create_string_buffer(8)
    driver.write(None, source, b"12345678", 50_000)                          # nothing fails before all was given
    fence = cuda.fence()
    stream = cuda.stream(fence)
    event = cuda.event(stream)
    cuda.wait_fence(stream, fence)
    driver.fail("copy", 1, 700)
    cuda.copy(stream, ctypes.addressof(out), source, 8)
    cuda.set(event)
    with pytest.raises(OSError, match="copies from device memory: CUDA_ERROR_ILLEGAL_ADDRESS") as e:
        cuda.wait(event)
    assert e.value.errno == EFAULT
    with pytest.raises(OSError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda.copy(stream, ctypes.addressof(out), source, 8)


def test_host_memory_as_a_source_is_refused(cuda, driver):
    wrong, out = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    stream = cuda.stream(cuda.fence())
    with pytest.raises(OSError, match="copy from device memory: CUDA_ERROR_INVALID_VALUE") as e:
        cuda.copy(stream, ctypes.addressof(out), ctypes.addressof(wrong), 8)
    assert e.value.errno == EINVAL
    cuda.faults = {"foreign": 1}


@pytest.mark.parametrize("code, errno, word", [
    (1, EINVAL, "CUDA_ERROR_INVALID_VALUE"), (3, ENODEV, "CUDA_ERROR_NOT_INITIALIZED"),
    (712, EEXIST, "ALREADY_REGISTERED"),
    (719, EIO, "answers 719"), (999, EIO, "cuStreamCreate: the CUDA driver answers 999")])
def test_words_for_errors(cuda, driver, code, errno, word):
    fence = cuda.fence()
    driver.fail("cuStreamCreate", 1, code)
    with pytest.raises(OSError, match=word) as e:
        cuda.stream(fence)
    assert e.value.errno == errno


def test_null_is_freed_silently(lib):
    for kind in ("fence", "registration", "stream", "event", "ring"):
        getattr(lib, f"device_{kind}_free")(None)


LOAD = """
import ctypes, os, sys
from test_ring import *
lib, err = ctypes.CDLL(sys.argv[1]), Error()
def load():
    return lib.device_cuda_load(ctypes.byref(err)), err.text.decode()
"""


def run(build, code, **env):
    if "VCKPT_PRELOAD" in os.environ:                                            # the sanitizers' run time
        env["LD_PRELOAD"] = os.environ["VCKPT_PRELOAD"]
    done = subprocess.run([sys.executable, "-c", LOAD + code, str(build / "tests" / "libvckpt_internal.so")],
                          capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr


def test_no_driver(build, tmp_path):
    run(build, """
rc, text = load()
assert rc == -2 and text.startswith("no CUDA driver: ") and "nowhere.so" in text, (rc, text)
p = ctypes.c_void_p()
assert lib.device_fence_new(ctypes.byref(p), ctypes.byref(err)) == -2 and b"no CUDA driver" in err.text
""", VCKPT_LIBCUDA=str(tmp_path / "nowhere.so"))


def test_a_library_that_is_no_driver(build):
    run(build, """
rc, text = load()
assert rc == -2 and "has no cuInit" in text, (rc, text)
""", VCKPT_LIBCUDA=str(build / "tests" / "libvckpt_internal.so"))


def test_no_device_then_one_and_none_in_a_child(build):
    """The library is found by its name, too."""
    where = build / "tests" / "standin"
    run(build, """
cuda = ctypes.CDLL("libcuda.so.1")
cuda.standin_devices(-1)
rc, text = load()
assert rc == -2 and "cannot be used: cuInit: CUDA_ERROR_NO_DEVICE" in text, (rc, text)
cuda.standin_devices(0)
rc, text = load()
assert rc == -2 and "knows no device" in text, (rc, text)
cuda.standin_devices(1)
assert load()[0] == 0 and load()[0] == 0
child = os.fork()
if child == 0:
    p = ctypes.c_void_p()
    assert lib.device_fence_new(ctypes.byref(p), ctypes.byref(err)) == 0
    rc = lib.device_fence_context(p, None, ctypes.byref(ctypes.c_uint()), ctypes.byref(err))
    os._exit(0 if rc == -19 and b"CUDA_ERROR_NOT_INITIALIZED" in err.text else 1)
assert os.waitpid(child, 0)[1] == 0
""", VCKPT_LIBCUDA="", LD_LIBRARY_PATH=str(where))
