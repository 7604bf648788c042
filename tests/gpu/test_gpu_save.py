# SPDX-License-Identifier: Apache-2.0
"""Saves of a real device's memory: the same as tests/unit/save/test_saver_device.py asks of the stand-in, as far as a
real driver can be asked. Skipped, with the reason, where there is no device; with VCKPT_LIBCUDA naming the stand-in
they run on that."""
import ctypes
import threading

import numpy
import pytest

from saverlib import DEVICE, Failed, api, ranks, store  # noqa: F401

AUTO, NO, YES = range(3)
MIB = 1 << 20
PINS = pytest.mark.parametrize("pin", [AUTO, NO, YES], ids=["auto", "no", "yes"])


def on(array):
    return array, {"flags": DEVICE}


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].tobytes() == array.tobytes(), name


def finished(save):
    try:
        return save.committed()
    finally:
        save.free()


VIEWS = {"plain": lambda a: a, "transposed": lambda a: a.T, "every_second": lambda a: a[::2, 1::3],
         "backwards": lambda a: a[::-1, :, ::-1],
         "broadcast": lambda a: numpy.broadcast_to(a[0, 0], (50, a.shape[2])), "columns": lambda a: a[:, :, 3:11],
         "scalar": lambda a: a[1, 2, 3],
         "rows": lambda a: a[4:20], "empty": lambda a: a[:0]}


@PINS
def test_every_view_comes_back(gpu, api, store, rng, pin):
    base = rng.standard_normal((24, 20, 16)).astype("f4")
    large = rng.integers(0, 2**32, (6 * MIB + 5,), "u4")
    there = gpu.array(base)
    views = {f"model/{n}": numpy.asarray(f(base)) for n, f in VIEWS.items()}
    saver = api.saver(store, "run", pin=pin)
    tensors = {f"model/{n}": on(f(there) if n != "scalar" else gpu.array(numpy.array(base[1, 2, 3])))
               for n, f in VIEWS.items()}
    save = saver.save({**tensors, "model/large": on(gpu.array(large)), "a/host": base})
    save.staged()
    assert finished(save) == 0
    saver.free()
    same(api.read(store, "run"), {**views, "model/large": large, "a/host": base})


@PINS
def test_late_work_several_saves_and_a_small_ring(gpu, api, store, rng, pin):
    """What the caller's stream has still to do is in the step; what it does right after staged is not."""
    own = gpu.stream()
    arrays = [gpu.array(numpy.zeros((1100, 1024), "u4")) for _ in range(3)]
    saver, saves, wanted = api.saver(store, "run", ring=9 * MIB, pin=pin), [], []
    for step in range(4):
        data = [rng.integers(0, 2**32, a.shape, "u4") for a in arrays]
        for array, new in zip(arrays, data):
            gpu.write_later(own, array, new, 0.05)
        saves.append(saver.save({f"model/{i}": on(a) for i, a in enumerate(arrays)}, stream=own))
        saves[-1].staged()
        for array in arrays:
            gpu.write_later(own, array, numpy.full(array.shape, step, "u4"))
        wanted.append({f"model/{i}": d for i, d in enumerate(data)})
    for step, save in enumerate(saves):
        assert finished(save) == step
        same(api.read(store, "run", step), wanted[step])
    saver.free()


@PINS
def test_permuted_tensors_come_back(gpu, api, store, rng, pin):
    """By what the host reorders, in one part and in several."""
    base, large = rng.integers(0, 2**16, (64, 48, 10, 33), "u2"), rng.integers(0, 2**32, (1900, 1300), "u4")
    there, large_there = gpu.array(base), gpu.array(large)
    orders = [(3, 2, 1, 0), (0, 3, 1, 2), (2, 0, 3, 1), (1, 0, 2, 3)]
    saver = api.saver(store, "run", pin=pin)
    save = saver.save({**{f"model/{i}": on(there.transpose(o)) for i, o in enumerate(orders)},
                       "model/large": on(large_there.T),
                       "model/columns": on(large_there[:, ::3].T)})
    assert finished(save) == 0
    saver.free()
    same(api.read(store, "run"),
         {**{f"model/{i}": numpy.ascontiguousarray(base.transpose(o)) for i, o in enumerate(orders)},
          "model/large": numpy.ascontiguousarray(large.T), "model/columns": numpy.ascontiguousarray(large[:, ::3].T)})


def test_a_fresh_thread_without_a_context(gpu, api, store, rng):
    data, found = rng.standard_normal((500, 300)), []
    array, saver = gpu.array(data), api.saver(store, "run")

    def work():
        try:
            found.append(finished(saver.save({"model/w": on(array)})))
        except Failed as e:
            found.append(e)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]
    saver.free()
    same(api.read(store, "run"), {"model/w": data})


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread_local", "relaxed"])
def test_a_save_beside_a_capture(gpu, api, store, rng, mode):
    """Its first, which registers the ring, included: the capture is whole. A save after the captured stream itself is
    refused."""
    data, graph = rng.standard_normal((700, 900)), ctypes.c_void_p()
    array, side, own = gpu.array(data), gpu.stream(), gpu.stream()
    saver = api.saver(store, "run")
    gpu.call("cuStreamBeginCapture_v2", side, mode)
    assert finished(saver.save({"model/w": on(array), "model/t": on(array.T)}, stream=own)) == 0
    with pytest.raises(Failed, match="captured into a CUDA graph"):
        saver.save({"model/w": on(array)}, stream=side)
    saver.free()
    gpu.call("cuStreamEndCapture", side, ctypes.byref(graph))
    same(api.read(store, "run"), {"model/w": data, "model/t": numpy.ascontiguousarray(data.T)})


def test_the_wrong_stream_gives_old_bytes(gpu, api, store, rng):
    """So the test above would see a fence that is forgotten."""
    old, new = rng.standard_normal((2, 200, 200))
    array, own = gpu.array(old), gpu.stream()
    saver = api.saver(store, "run")
    staged = threading.Event()
    gpu.write_later(own, array, new, wait=lambda: staged.wait(60) and None)
    save = saver.save({"model/w": on(array)}, stream=gpu.stream())
    save.staged()
    staged.set()
    assert finished(save) == 0
    saver.free()
    same(api.read(store, "run"), {"model/w": old})


def test_two_ranks_as_threads(gpu, api, store, rng):
    whole, shared, lock = rng.integers(0, 2**32, (1400, 800), "u4"), rng.standard_normal((900, 1000)), threading.Lock()

    def work(rank, saver):
        gpu.current()
        with lock:
            own, mine, replica = gpu.stream(), gpu.array(numpy.zeros((700, 800), "u4")), gpu.array(shared)
            gpu.write_later(own, mine, whole[rank * 700:][:700], 0.05)
        fields = {"shape": whole.shape, "placements": "S(0)", "check_local": False, "flags": DEVICE}
        return finished(saver.save({"model/w": (mine, fields), "model/shared": on(replica)}, stream=own))
    assert ranks(api, store, "run", 2, work) == [0, 0]
    same(api.read(store, "run"), {"model/w": whole, "model/shared": shared})


def test_several_contexts_and_a_ring_pinned_late(gpu, api, store, rng):
    data = rng.standard_normal((3, 300, 300))
    saver = api.saver(store, "run", threads=1)
    assert finished(saver.save({"model/w": data[0]})) == 0
    array = gpu.array(data[1])
    assert finished(saver.save({"model/w": on(array)})) == 1
    other = gpu.new_context()
    array = gpu.array(data[2])
    assert finished(saver.save({"model/w": on(array)})) == 2
    saver.free()
    gpu.call("cuMemFree_v2", gpu.memory.pop())
    gpu.call("cuCtxDestroy_v2", other)
    for step in range(3):
        same(api.read(store, "run", step), {"model/w": data[step]})


def test_an_address_that_is_none(gpu, api, store, rng):
    data = rng.standard_normal((300, 300))
    saver = api.saver(store, "run")
    with pytest.raises(Failed, match="tensor model/w: copy from device memory: CUDA_ERROR_"):
        finished(saver.save({"model/w": on(gpu.describe(4096, "f8", (300, 300)))}))
    finished(saver.save({"model/w": on(gpu.array(data))}))
    saver.free()
    same(api.read(store, "run"), {"model/w": data})
