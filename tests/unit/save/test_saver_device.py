# SPDX-License-Identifier: Apache-2.0
"""The saver over device memory, against the stand-in driver: what comes back, in which order its calls stand, what is
held at the end, and every call of the driver failing in turn. The training program's part (kernels, streams, contexts)
is played through standinlib.

Arrays of device memory are numpy's: the stand-in's memory is the host's. A real driver is met in tests/gpu."""
import ctypes
import errno
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy
import pytest

from saverlib import BUFFER, DEVICE, Failed, Vckpt, api, ranks, store  # noqa: F401
from standinlib import standin
from test_ring import ALLOCATE, AUTO, NO, YES

MIB = 1 << 20
PINS = pytest.mark.parametrize("pin", [AUTO, NO, YES], ids=["auto", "no", "yes"])
WORLDS = pytest.mark.parametrize("world", [1, 2])


@pytest.fixture(scope="module")
def driver(build):
    """Set up, as by a program that has device memory."""
    driver = standin(build)
    assert driver.lib.cuInit(0) == 0
    return driver


@pytest.fixture
def rng():
    return numpy.random.default_rng(5)


class Cuda:
    """Faults that a test makes on purpose, and what it holds itself in the end."""

    def __init__(self, driver):
        self.driver, self.faults, self.held = driver, {}, {}

    def array(self, data):
        """The same in device memory, row-major."""
        data = numpy.ascontiguousarray(data)
        p = self.driver.memory(data.tobytes() or b"x")
        return numpy.frombuffer((ctypes.c_ubyte * data.nbytes).from_address(p), data.dtype).reshape(data.shape)

    def stream(self, nonblocking=False):
        self.held["streams"] = self.held.get("streams", 0) + 1
        return self.driver.stream(nonblocking)

    def write(self, stream, array, data, delay_us=0):
        """A kernel."""
        assert data.nbytes == array.nbytes and array.flags.c_contiguous
        self.driver.write(stream, array.ctypes.data, data.tobytes(), delay_us)


@pytest.fixture
def cuda(driver):
    driver.reset()
    driver.context()
    c = Cuda(driver)
    yield c
    assert driver.faults() == c.faults and driver.held() == c.held and driver.depth() == 0
    driver.reset()


def on(array, **fields):
    return array, {**fields, "flags": fields.get("flags", 0) | DEVICE}


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def finished(save):
    """Committed, or the error; the handle is freed."""
    try:
        return save.committed()
    finally:
        save.free()


# ---- what comes back ----

def sources(cuda, rng):
    """Device and host memory, in every shape of strides."""
    base = cuda.array(rng.standard_normal((24, 20, 16)).astype("f4"))
    big = cuda.array(rng.integers(0, 2**32, (700, 900), "u4"))
    device = {
        "model/plain": base, "model/transposed": base.T, "model/every_second": base[::2, 1::3],
        "model/backwards": base[::-1, :, ::-1],
        "model/broadcast": numpy.broadcast_to(base[0, 0], (50, 16)), "model/scalar": cuda.array(numpy.array(2.5)),
        "model/empty": numpy.zeros((0, 7), "i2"), "model/one": cuda.array(numpy.array([True])),
        "model/columns": big[:, 17:830],
        "model/large": cuda.array(rng.integers(0, 2**32, (1500, 1700), "u4")),
        "model/many_dims": base.reshape((2,) * 7 + (60,)),
        "optimizer/diagonal": numpy.lib.stride_tricks.as_strided(big, (700,), (3604,)),
        "optimizer/rows": big[100:650:3]}
    host = {"model/host": rng.standard_normal((300, 40)), "optimizer/host": rng.integers(0, 99, (999, 555))[::2, ::-3],
            "a/host": numpy.arange(5)}
    return device, host


@PINS
def test_every_source_comes_back(cuda, driver, api, store, rng, pin):
    device, host = sources(cuda, rng)
    saver = api.saver(store, "run", pin=pin)
    save = saver.save({**{n: on(a) for n, a in device.items()}, **host})
    save.staged()
    assert driver.count("copies") and driver.count("copies_2d")
    assert driver.count("pageable") == (driver.count("copies") + driver.count("copies_2d") if pin == NO else 0)
    assert driver.count("registrations") == (pin != NO)
    assert finished(save) == 0
    saver.free()
    same(api.read(store, "run"), {**device, **host})


@WORLDS
def test_ranks_with_contexts_of_their_own(cuda, driver, api, store, rng, world):
    """Rows sharded, a replicated tensor compared by samples, a buffer that differs, host tensors among them; kernels
    still at work."""
    whole = rng.integers(0, 2**32, (2 * 700, 800), "u4")
    shared = rng.standard_normal((900, 1000))

    def work(rank, saver):
        driver.context()
        mine, replica, steps = cuda.array(numpy.zeros((1400 // world, 800),
                                                      "u4")), cuda.array(numpy.zeros((900, 1000))), []
        for step in range(3):
            cuda.write(None, mine, numpy.split(whole + step, world)[rank], 20_000)
            cuda.write(None, replica, shared * (step + 1), 5_000)
            save = saver.save({"model/w": on(mine, shape=whole.shape, placements="S(0)", check_local=False),
                               "model/shared": on(replica),
                               "model/count": on(cuda.array(numpy.full(9, rank)), flags=BUFFER),
                               "model/host": shared[0]})
            save.staged()
            cuda.write(None, mine, numpy.full_like(mine, 7))
            cuda.write(None, replica, numpy.full_like(replica, rank))
            steps.append(finished(save))
        return steps
    assert ranks(api, store, "run", world, work) == [[0, 1, 2]] * world
    for step in range(3):
        same(api.read(store, "run", step), {"model/w": whole + numpy.uint32(step), "model/shared": shared * (step + 1),
                                            "model/count": numpy.full(9, 0), "model/host": shared[0]})


def test_replicas_on_devices_that_differ_are_refused(cuda, driver, api, store, rng):
    shared = rng.standard_normal((500, 100))

    def work(rank, saver):
        driver.context()
        return finished(saver.save({"model/w": on(cuda.array(shared + rank))}))
    done = ranks(api, store, "run", 2, work)
    assert all(isinstance(e, Failed) and "model/w" in e.text for e in done), done


@PINS
def test_a_small_ring_and_several_saves_under_way(cuda, driver, api, store, rng, pin):
    """The caller waits for staged only, and overwrites the sources on its own stream right after."""
    own = cuda.stream()
    arrays = [cuda.array(numpy.zeros((1100, 1024), "u4")) for _ in range(3)]
    saver, saves, wanted = api.saver(store, "run", ring=9 * MIB, pin=pin, threads=3), [], []
    for step in range(4):
        data = [rng.integers(0, 2**32, a.shape, "u4") for a in arrays]
        for array, new in zip(arrays, data):
            cuda.write(own, array, new, 3000)
        saves.append(saver.save({f"model/{i}": on(a) for i, a in enumerate(arrays)}, stream=own))
        saves[-1].staged()
        for array in arrays:
            cuda.write(own, array, numpy.full_like(array, step))
        wanted.append({f"model/{i}": d for i, d in enumerate(data)})
    assert saves[-1].committed() == 3 and sum(s.timings().ring_waits for s in saves) > 0
    for step, save in enumerate(saves):
        assert save.committed(0) == step
        save.free()
        same(api.read(store, "run", step), wanted[step])
    saver.free()


def test_saves_that_nobody_waits_for(cuda, api, store, rng):
    own, saves, wanted = cuda.stream(), [], []
    saver = api.saver(store, "run", ring=10 * MIB)
    for step in range(5):
        array, new = cuda.array(numpy.zeros((900, 900))), rng.standard_normal((900, 900))
        cuda.write(own, array, new, 10_000)
        saves.append(saver.save({"model/w": on(array.T), "model/h": new[:5]}, stream=own))
        wanted.append({"model/w": new.T, "model/h": new[:5]})
    saver.close()
    assert [finished(s) for s in saves] == list(range(5))
    saver.free()
    for step in range(5):
        same(api.read(store, "run", step), wanted[step])


@pytest.mark.parametrize("turned", [lambda a: a.T, lambda a: a.reshape(8, 64, 32, 32).transpose(0, 3, 1, 2),
                                    lambda a: a.reshape(64, 8, 32, 32).transpose(1, 2, 3, 0)[:, ::-1]],
                         ids=["transposed", "channels_last", "any"])
@pytest.mark.parametrize("pin", [AUTO, NO], ids=["auto", "no"])
def test_a_permuted_tensor_of_2_mib_takes_few_calls(cuda, driver, api, store, rng, turned, pin):
    """Its 2 MiB came in 2,304 calls, item by item."""
    array = turned(cuda.array(rng.integers(0, 2**32, (1024, 512), "u4")))
    saver = api.saver(store, "run", pin=pin, threads=1)
    save = saver.save({"model/w": on(array)})
    save.staged()
    copies = [driver.count(what) for what in ("copies", "copies_2d", "copies_3d", "bytes")]
    assert sum(copies[:3]) <= 4 and copies[3] == 2 * MIB and driver.count("calls") < 60, (copies, driver.count("calls"))
    assert finished(save) == 0
    saver.free()
    same(api.read(store, "run"), {"model/w": numpy.ascontiguousarray(array)})


def test_large_permuted_tensors_under_way_side_by_side(cuda, driver, api, store, rng):
    """Larger than the ring and than what they are turned in; kernels write them behind the fence, and overwrite them
    once they are staged."""
    own, wanted, saves = cuda.stream(), [], []
    arrays = {"model/t": cuda.array(numpy.zeros((1300, 2100), "u4")),
              "model/c": cuda.array(numpy.zeros((40, 50, 60, 33), "u2"))}
    views = {"model/t": lambda a: a.T, "model/c": lambda a: a.transpose(0, 3, 1, 2)}
    saver = api.saver(store, "run", ring=10 * MIB, threads=3)
    for step in range(3):
        wanted.append({})
        for name, array in arrays.items():
            data = rng.integers(0, 2**16, array.shape).astype(array.dtype)
            cuda.write(own, array, data, 3000)
            wanted[step][name] = numpy.ascontiguousarray(views[name](data))
        saves.append(saver.save({n: on(views[n](a)) for n, a in arrays.items()}, stream=own))
        saves[-1].staged()
        for array in arrays.values():
            cuda.write(own, array, numpy.full_like(array, 9))
    assert [finished(s) for s in saves] == [0, 1, 2]
    saver.free()
    for step in range(3):
        same(api.read(store, "run", step), wanted[step])
    assert driver.count("copies") + driver.count("copies_2d") + driver.count("copies_3d") < 150


# ---- contexts, the ring's registration ----

def test_a_saver_meets_several_contexts(cuda, driver, api, store, rng):
    """One after another and under way side by side: a thread's stream is made anew in the context of the fence."""
    contexts, saves, wanted = [driver.context() for _ in range(3)], [], []
    saver = api.saver(store, "run", threads=1)
    for step in range(7):
        driver.set(contexts[step % 3])
        array, new = cuda.array(numpy.zeros((300, 300))), rng.standard_normal((300, 300))
        cuda.write(None, array, new, 5000)
        saves.append(saver.save({"model/w": on(array)}))
        wanted.append(new)
    driver.set(None)
    assert [finished(s) for s in saves] == list(range(7))
    saver.free()
    for step in range(7):
        same(api.read(store, "run", step), {"model/w": wanted[step]})


def test_a_ring_of_host_tensors_is_pinned_when_device_memory_comes(cuda, driver, api, store, rng):
    array = rng.standard_normal((500, 500))
    saver = api.saver(store, "run")
    # no driver where there is no device memory
    assert finished(saver.save({"model/w": array})) == 0 and driver.count("calls") == 0
    for step in (1, 2):
        assert finished(saver.save({"model/w": on(cuda.array(array + step))})) == step
        assert driver.count("registrations") == 1 and driver.count("pageable") == 0
    assert finished(saver.save({"model/w": array})) == 3
    saver.free()
    same(api.read(store, "run", 2), {"model/w": array + 2})


def test_no_context_is_told_at_submit(cuda, driver, api, store, rng):
    """Only where the memory has none either: it is host memory here."""
    array = rng.standard_normal((50, 50))
    saver = api.saver(store, "run")
    save = saver.begin()
    save.tensor("model/w", *on(array)[:1], flags=DEVICE)
    driver.set(None)
    with pytest.raises(Failed, match="tensor model/w: the CUDA driver does not know the memory .*no CUDA context"):
        save.submit()
    save.free()
    saver.free()


def test_a_fresh_thread_without_a_context(cuda, driver, api, store, rng):
    """torch binds no context in a new thread as long as that works on device 0: the memory says whose it is."""
    arrays = {"model/a": cuda.array(rng.standard_normal((500, 300))),
              "model/t": cuda.array(rng.standard_normal((70, 90))).T}
    saver, found, wanted = api.saver(store, "run"), [], {n: numpy.ascontiguousarray(a).copy()
                                                         for n, a in arrays.items()}
    cuda.write(None, arrays["model/a"], wanted["model/a"] + 1, 20_000)

    def work():
        try:
            found.extend((finished(saver.save({n: on(a) for n, a in arrays.items()})), driver.depth(), current(driver)))
        except Failed as e:
            found.append(e)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0, 0, None]
    saver.free()
    same(api.read(store, "run"), {**wanted, "model/a": wanted["model/a"] + 1})


def current(driver):
    context = ctypes.c_void_p()
    assert driver.lib.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def test_mapped_memory_is_of_its_devices_primary_context(cuda, driver, api, store, rng):
    """As of expandable segments: the driver knows no context of it."""
    driver.devices(2)
    driver.set(None)
    data, wanted = {}, {}
    for device in (0, 1):
        array = rng.standard_normal((100, 200 + device))
        p = driver.lib.standin_memory_on(device, ctypes.c_size_t(array.nbytes))
        ctypes.memmove(p, array.tobytes(), array.nbytes)
        data[f"model/{device}"] = numpy.frombuffer((ctypes.c_ubyte * array.nbytes).from_address(p),
                                                   array.dtype).reshape(array.shape)
        wanted[f"model/{device}"] = array
    saver = api.saver(store, "run")
    for step in range(2):
        assert finished(saver.save({n: on(a) for n, a in data.items()})) == step
    saver.free()
    while driver.count("primaries"):  # the fence goes with the save, a moment after it is told
        time.sleep(0.001)
    same(api.read(store, "run"), wanted)


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_several_devices_in_one_save(cuda, driver, api, store, rng, threads):
    """Each waits for its own default stream and for the stream that is named, whatever device that is of."""
    driver.devices(3)
    contexts = [ctypes.c_void_p() for _ in range(3)]
    for device, context in enumerate(contexts):
        assert driver.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    saver, arrays = api.saver(store, "run", threads=threads, ring=12 * MIB), {}
    for device, context in enumerate(contexts):
        driver.set(context.value)
        arrays[f"model/w{device}"] = cuda.array(numpy.zeros((900, 900)))
        arrays[f"model/t{device}"] = cuda.array(numpy.zeros((64, 500), "u2"))
    own = cuda.stream()  # of the last one
    for step in range(4):
        wanted = {}
        for name, array in arrays.items():
            driver.set(contexts[int(name[-1])].value)
            wanted[name] = rng.integers(0, 2**16, array.shape).astype(array.dtype)
            cuda.write(own if name[-1] == "2" else None, array, wanted[name], 10_000)
        driver.set([contexts[0].value, None][step % 2])
        save = saver.save({n: on(a if "w" in n else a.reshape(500, 64)) for n, a in arrays.items()}, stream=own)
        save.staged()
        for name, array in arrays.items():
            driver.set(contexts[int(name[-1])].value)
            cuda.write(own if name[-1] == "2" else None, array, numpy.full_like(array, 7))
        assert finished(save) == step
        same(api.read(store, "run", step), {n: a if "w" in n else a.reshape(500, 64) for n, a in wanted.items()})
    driver.set(None)
    saver.free()
    cuda.held["primaries"] = 3


# ---- beside a stream capture ----

GLOBAL, THREAD_LOCAL, RELAXED = range(3)


def begin_capture(driver, stream, mode):
    assert driver.lib.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), mode) == 0


def end_capture(driver, stream):
    return driver.lib.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(ctypes.c_void_p()))


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("pin", [AUTO, YES], ids=["auto", "yes"])
def test_a_save_beside_a_capture(cuda, driver, api, store, rng, mode, pin):
    """Of the first save, which registers and allocates, to the last; the thread that captures submits, too, and gets
    its mode back."""
    side, own = cuda.stream(nonblocking=True), cuda.stream(nonblocking=True)
    arrays = {"model/w": cuda.array(numpy.zeros((900, 1100))), "model/t": cuda.array(numpy.zeros((700, 300)))}
    begin_capture(driver, side, mode)
    saver = api.saver(store, "run", pin=pin)
    for step in range(3):
        wanted = {n: rng.standard_normal(a.shape) for n, a in arrays.items()}
        for name, array in arrays.items():
            cuda.write(own, array, wanted[name], 5000)
        cuda.write(side, arrays["model/w"], wanted["model/w"] * 0)  # the graph's: not done
        assert finished(saver.save({"model/w": on(arrays["model/w"]), "model/t": on(arrays["model/t"].T)},
                                   stream=own)) == step
        same(api.read(store, "run", step),
             {"model/w": wanted["model/w"], "model/t": numpy.ascontiguousarray(wanted["model/t"].T)})
    saver.free()
    was = ctypes.c_int(GLOBAL)
    assert driver.lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(was)) == 0 and was.value == GLOBAL
    assert end_capture(driver, side) == 0


def test_a_stream_that_is_captured_is_refused(cuda, driver, api, store, rng):
    """At submit, by a sentence; the capture is whole, and the same save works after it."""
    own = cuda.stream(nonblocking=True)
    array = cuda.array(rng.standard_normal((50, 70)))
    saver = api.saver(store, "run")
    save = saver.begin(stream=own)
    save.tensor("model/w", *on(array)[:1], flags=DEVICE)
    begin_capture(driver, own, GLOBAL)
    for _ in range(2):
        with pytest.raises(Failed, match="being captured into a CUDA graph.*call again when the capture "
                           "has ended") as e:
            save.submit()
        assert e.value.code == -errno.EBUSY
    assert end_capture(driver, own) == 0
    save.submit()
    assert finished(save) == 0
    saver.free()
    same(api.read(store, "run"), {"model/w": array})


def test_the_default_stream_beside_a_capture_of_a_blocking_stream(cuda, driver, api, store, rng):
    """It may not be used then: that capture would be lost."""
    blocking, own, array = cuda.stream(), cuda.stream(nonblocking=True), cuda.array(rng.standard_normal((50, 70)))
    saver = api.saver(store, "run")
    begin_capture(driver, blocking, THREAD_LOCAL)
    with pytest.raises(Failed, match="default stream cannot be used while another stream .* captured"):
        saver.save({"model/w": on(array)})
    assert finished(saver.save({"model/w": on(array)}, stream=own)) >= 0
    assert end_capture(driver, blocking) == 0
    assert finished(saver.save({"model/w": on(array)})) >= 0
    saver.free()


def test_a_call_that_breaks_a_capture_is_counted(cuda, driver):
    """The wrong order on purpose: what registering would do if the thread's mode were not relaxed for it."""
    side, host = cuda.stream(nonblocking=True), ctypes.create_string_buffer(1 << 16)
    begin_capture(driver, side, GLOBAL)
    assert driver.lib.cuMemHostRegister_v2(host, ctypes.c_size_t(1 << 16), 1) == 900
    assert end_capture(driver, side) == 901
    cuda.faults = {"captured": 1}


NOWHERE = """
import sys
import numpy
from saverlib import *
api = Vckpt(sys.argv[1])
saver = api.saver(api.store(sys.argv[2]), "run")
try:
    saver.save({"model/w": (numpy.ones(9), {"flags": DEVICE})})
except Failed as e:
    assert "no CUDA driver" in e.text, e
else:
    raise SystemExit("saved without a driver")
save = saver.save({"model/w": numpy.ones(9)})
save.committed()
save.free()
saver.free()
"""


def test_a_machine_without_a_driver(build, tmp_path):
    env = {**os.environ, "VCKPT_LIBCUDA": str(tmp_path / "nowhere.so")}
    if "VCKPT_PRELOAD" in os.environ:
        env["LD_PRELOAD"] = os.environ["VCKPT_PRELOAD"]
    done = subprocess.run([sys.executable, "-c", NOWHERE, str(build), str(tmp_path / "store")], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- wrong orders, made on purpose: they are found, whatever bytes chance to be there in time ----

def test_the_wrong_stream_is_found(cuda, driver, api, store, rng):
    """The caller names a stream that the kernel is not on."""
    array, own = cuda.array(numpy.zeros((200, 200))), cuda.stream()
    saver = api.saver(store, "run")
    cuda.write(own, array, rng.standard_normal((200, 200)), 200_000)
    assert finished(saver.save({"model/w": on(array)})) == 0
    saver.free()
    cuda.faults = {"premature": driver.count("premature")}
    assert cuda.faults["premature"] > 0


def test_a_saver_that_forgets_the_fence_is_found(cuda, driver, api, store, rng):
    array = cuda.array(numpy.zeros((200, 200)))
    saver = api.saver(store, "run")
    driver.forget("cuStreamWaitEvent")
    cuda.write(None, array, rng.standard_normal((200, 200)), 200_000)
    assert finished(saver.save({"model/w": on(array)})) == 0
    saver.free()
    cuda.faults = {"premature": driver.count("premature")}
    assert cuda.faults["premature"] > 0


@pytest.mark.skipif("VCKPT_PRELOAD" in os.environ,
                    reason="the sanitizer ends the process where a copy fills a slot that was given back")
def test_a_saver_that_does_not_wait_for_its_copies_is_found(cuda, driver, api, store, rng):
    """Slots go back before their bytes arrived: what is stored is wrong, or slots are filled twice at one time."""
    arrays = {f"model/{i}": cuda.array(rng.integers(0, 2**32, (1100, 1024), "u4")) for i in range(4)}
    driver.lib.standin_delay(30_000, ctypes.c_uint64(3))
    driver.forget("cuEventSynchronize")
    saver = api.saver(store, "run", ring=9 * MIB)
    assert finished(saver.save({n: on(a) for n, a in arrays.items()})) == 0
    saver.free()
    assert driver.count("reused") > 0
    cuda.faults = driver.faults()
    shutil.rmtree(store)            # it may be damaged
    api.store(store)


# ---- calls that fail ----

def test_calls_that_fail_at_submit(cuda, driver, api, store, rng):
    array = cuda.array(rng.standard_normal((50, 50)))
    saver = api.saver(store, "run")
    for step, function in enumerate(("cuPointerGetAttributes", "cuThreadExchangeStreamCaptureMode",
                                     "cuStreamIsCapturing", "cuCtxPushCurrent", "cuEventCreate",
                                     "cuEventRecord")):
        driver.fail(function, 1, 2)
        with pytest.raises(Failed, match=f"{function}.*CUDA_ERROR_OUT_OF_MEMORY"):
            saver.save({"model/w": on(array)})
    assert finished(saver.save({"model/w": on(array)})) >= 0
    saver.close()
    saver.free()
    same(api.read(store, "run"), {"model/w": array})


WORKERS = [("cuStreamCreate", 1), ("cuStreamCreate", 2), ("cuEventCreate", 2), ("cuEventCreate", 3),
           ("cuStreamWaitEvent", 1),
           ("cuMemcpyDtoHAsync", 1), ("cuMemcpyDtoHAsync", 3), ("cuMemcpy2DAsync", 1), ("cuMemHostAlloc", 1),
           ("cuEventRecord", 2),
           ("cuEventRecord", 4), ("cuEventSynchronize", 1), ("cuEventSynchronize", 3), ("cuCtxPushCurrent", 1),
           ("cuCtxPushCurrent", 4), ("cuCtxPushCurrent", 6), ("cuCtxPushCurrent", 9)]


def outcome(save):
    """The step, or what both waits say."""
    try:
        made = save()
    except Failed as e:
        return e
    try:
        made.staged()
        return made.committed()
    except Failed as e:
        with pytest.raises(Failed) as again:
            made.committed()
        assert again.value.text == e.text and made.progress().error == e.code
        return e
    finally:
        made.free()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("function,nth", WORKERS, ids=[f"{f}-{n}" for f, n in WORKERS])
def test_calls_that_fail_at_work(cuda, driver, api, store, rng, world, function, nth):
    """The handle says which, the others' attempt is aborted with the same words, and as many saves as would fill the
    ring work afterwards."""
    data = [rng.integers(0, 2**32, (1100, 1024), "u4") for _ in range(3)]
    driver.fail(function, nth, 2)  # of whichever rank it is

    def work(rank, saver):
        driver.context()
        arrays = [cuda.array(d) for d in data]
        tensors = {"model/a": on(arrays[0]), "model/b": on(arrays[1]), "model/t": on(arrays[2][:, :400:2]),
                   "model/h": data[0][:9]}
        return [outcome(lambda: saver.save(tensors)) for _ in range(3)]
    done = ranks(api, store, "run", world, work, ring=10 * MIB, pin=YES)
    if function == "cuCtxPushCurrent" and nth > 1 and all(d == [0, 1, 2] for d in done):
        return      # the call was one that gives something back, where threads were slow: that fails no save
    first = [d[0] for d in done]
    assert all(isinstance(e, Failed) for e in first) and all(d[1:] == [1, 2] or d[1:] == [0, 1] for d in done), done
    words = {"cuMemcpyDtoHAsync": "tensor model/[abt]: copy from device memory",
             "cuMemcpy2DAsync": "tensor model/[abt]: copy from device memory",
             "cuEventSynchronize": "copies from device memory"}.get(function, function)
    told = [e for e in first if re.search(f"{words}.*: CUDA_ERROR_OUT_OF_MEMORY", e.text)]
    assert told and all(e in told or e.code in (-125, -71) for e in first), first
    same(api.read(store, "run"), {"model/a": data[0], "model/b": data[1],
                                  "model/t": numpy.ascontiguousarray(data[2][:, :400:2]), "model/h": data[0][:9]})


PINNING = ("cuMemHostRegister", "cuMemHostAlloc")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("refused", [1, 2])
@pytest.mark.parametrize("pin", [AUTO, YES, ALLOCATE], ids=["auto", "yes", "allocate"])
def test_memory_that_can_not_be_pinned(cuda, driver, api, store, rng, capfd, late, refused, pin):
    """Another way first; then refused where pin=yes; otherwise the ring is what it can be, and one sentence says
    why."""
    array = cuda.array(rng.standard_normal((300, 300)))
    saver = api.saver(store, "run", pin=pin)
    if late:
        assert finished(saver.save({"model/w": array})) == 0
    for function in (PINNING[::-1] if pin == ALLOCATE else PINNING)[:refused]:
        driver.fail(function, 1, 800)
    if late and pin != ALLOCATE:  # asked of the ring that there is, and again of the one in its place
        driver.fail("cuMemHostRegister", 1, 800)
    save = saver.save({"model/w": on(array)})
    if pin == YES and refused == 2:
        with pytest.raises(Failed, match="staging ring.*cuMemHostRegister: .*; cuMemHostAlloc: "):
            save.staged()
        save.free()
    else:
        finished(save)
        assert (driver.count("pageable") > 0) == (refused == 2)
        assert (driver.count("registrations") + driver.count("allocations") > 0) == (refused == 1)
    for _ in range(2):
        finished(saver.save({"model/w": on(array)}))
    saver.free()
    same(api.read(store, "run"), {"model/w": array})
    told = [line for line in capfd.readouterr().err.splitlines() if "is not pinned" in line]
    assert len(told) == (pin != YES and refused == 2), told
    assert all("run run: the staging ring of 12 MiB is not pinned" in line and all(f in line for f in PINNING)
               for line in told)


@pytest.mark.parametrize("pin, slow, told", [(AUTO, 300_000, 1), (AUTO, 0, 0), (ALLOCATE, 300_000, 0)],
                         ids=["slow", "quick", "allocate"])
def test_registering_that_takes_long_is_told(cuda, driver, api, store, rng, capfd, pin, slow, told):
    array = cuda.array(rng.standard_normal((300, 300)))
    saver = api.saver(store, "run", pin=pin)
    driver.slow("cuMemHostRegister", slow)
    for _ in range(2):
        finished(saver.save({"model/w": on(array)}))
    assert driver.count("allocations") == (pin == ALLOCATE) and driver.count("pageable") == 0
    saver.free()
    lines = [line for line in capfd.readouterr().err.splitlines() if "took" in line]
    found = [float(re.search(r'took ([0-9.]+) s; pin="allocate"', line)[1]) for line in lines]
    assert len(found) == told and all(seconds >= slow / 1e6 for seconds in found), lines


def test_a_copy_that_breaks_its_context(cuda, driver, api, store, rng):
    """No call into it works any more: the save is told why, and host tensors, and other contexts, are saved on."""
    data = rng.integers(0, 2**32, (1500, 1024), "u4")
    array = cuda.array(data)
    saver = api.saver(store, "run", ring=8 * MIB)
    driver.fail("copy", 1, 700)
    save = saver.save({"model/w": on(array)})
    with pytest.raises(Failed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        save.staged()
    with pytest.raises(Failed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        finished(save)
    assert finished(saver.save({"model/w": data})) >= 0
    driver.context()
    assert finished(saver.save({"model/w": on(cuda.array(data + 1))})) >= 0
    saver.free()
    same(api.read(store, "run"), {"model/w": data + numpy.uint32(1)})


def test_memory_that_is_no_device_memory(cuda, driver, api, store, rng):
    array = rng.standard_normal((300, 300))
    saver = api.saver(store, "run")
    save = saver.save({"model/w": on(array)})
    with pytest.raises(Failed, match="tensor model/w: copy from device memory: CUDA_ERROR_INVALID_VALUE"):
        finished(save)
    finished(saver.save({"model/w": array}))
    saver.free()
    cuda.faults = {"foreign": driver.count("foreign")}
    assert cuda.faults["foreign"] > 0
    same(api.read(store, "run"), {"model/w": array})


def test_a_context_that_goes_before_its_saver(cuda, driver, api, store, rng):
    context, array = driver.context(), cuda.array(rng.standard_normal((300, 300)))
    saver = api.saver(store, "run", threads=1)
    finished(saver.save({"model/w": on(array)}))
    while driver.count("events") > 1:  # the fence goes with the save, a moment after it is told
        time.sleep(0.001)
    driver.lib.standin_context_destroy(ctypes.c_void_p(context))
    saver.free()
    cuda.held = {"streams": 1, "events": 1, "registrations": 1}  # they went with it


def test_the_tests_for_real_devices_run_on_the_stand_in(build):
    """So that they are not met for the first time by a device. Those of the folder that need none run anyway."""
    env = {**os.environ, "VCKPT_LIBCUDA": str(build / "tests/standin/libcuda.so.1"), "VCKPT_BUILD": str(build)}
    if "VCKPT_PRELOAD" in os.environ:
        env["LD_PRELOAD"] = os.environ["VCKPT_PRELOAD"]
    tests = str(pathlib.Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-m", "pytest", "-c", f"{tests}/pytest.ini", f"--rootdir={tests}", "-q",
                           "-rs", "-p", "no:cacheprovider",
                           f"{tests}/gpu/test_gpu_save.py", f"{tests}/gpu/test_gpu_load.py"], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:]
