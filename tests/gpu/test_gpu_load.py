# SPDX-License-Identifier: Apache-2.0
"""Loads into a real device's memory: the same as tests/unit/load/test_load_device.py asks of the stand-in, as far as a
real driver can be asked. Skipped, with the reason, where there is no device; with VCKPT_LIBCUDA naming the stand-in
they run on that."""
import ctypes as c

import numpy

from loadlib import CONVERT, RESIZE, ZERO, Opened, described, target
from saverlib import DEVICE, api, store  # noqa: F401 (fixtures)


def save(api, store, arrays):  # noqa: F811
    saver = api.saver(store, "run")
    saver.save(arrays).committed()
    saver.close()
    saver.free()


def filled(gpu, shape, kind="float32"):
    return gpu.array(numpy.full(shape, 7, kind))


def fetched(gpu, array):
    """The same in host memory; row-major in the device's."""
    host, stream = gpu.pinned(array.nbytes), gpu.stream()
    gpu.to_host(stream, host, array.ctypes.data, array.nbytes)
    gpu.synchronize(stream)
    gpu.unpin(host)
    return host.view(array.dtype).reshape(array.shape)


def into(name, array):
    return described(name, array, flags=DEVICE)


VIEWS = {"plain": lambda a: a, "transposed": lambda a: a.T, "permuted": lambda a: a.transpose(1, 2, 0),
         "every_second": lambda a: a[::2, 1::3], "columns": lambda a: a[:, :, 3:11], "rows": lambda a: a[4:20],
         "line": lambda a: a[3, 2]}


def test_every_view_arrives_and_nothing_beside_it_changes(gpu, api, store, rng):  # noqa: F811
    shape = (24, 20, 16)
    arrays = {n: rng.standard_normal(f(numpy.empty(shape)).shape).astype("f4") for n, f in VIEWS.items()}
    large = rng.integers(0, 2**32, (3000, 2500), "u4")
    save(api, store, {**{f"model/{n}": a for n, a in arrays.items()}, "model/large": large})
    wholes, there = {n: filled(gpu, shape) for n in VIEWS}, filled(gpu, (2500, 3000), "uint32")
    with Opened(api, store) as step, step.load(threads=4) as load:
        load.tensors(*[into(f"model/{n}", VIEWS[n](whole)) for n, whole in wholes.items()],
                     into("model/large", there.T))
        load.run()
    for n, whole in wholes.items():
        want = numpy.full(shape, 7, "f4")
        VIEWS[n](want)[...] = arrays[n]
        assert fetched(gpu, whole).tobytes() == want.tobytes(), n
    assert (fetched(gpu, there) == large.T).all()


def test_converted_cut_and_zeroed(gpu, api, store, rng):  # noqa: F811
    a = rng.standard_normal((700, 900)).astype("f4")
    save(api, store, {"model/a": a})
    half, padded = filled(gpu, (900, 700), "float16"), filled(gpu, (800, 900), "float64")
    with Opened(api, store) as step, step.load() as load:
        load.targets(target(into("model/a", half.T), flags=CONVERT),
                     target(into("model/a", padded), flags=CONVERT | RESIZE | ZERO))
        load.run()
    assert (fetched(gpu, half) == a.T.astype("f2")).all()
    found = fetched(gpu, padded)
    assert (found[:700] == a).all() and (found[700:] == 0).all()


def test_the_programs_work_on_the_memory_comes_first(gpu, api, store, rng):  # noqa: F811
    a = rng.standard_normal((500, 600)).astype("f4")
    save(api, store, {"model/a": a})
    own, out = gpu.stream(), filled(gpu, a.shape)
    gpu.write_later(own, out, numpy.full_like(a, 3), 0.05)
    with Opened(api, store) as step, step.load() as load:
        load.stream(own.value)
        load.tensors(into("model/a", out))
        load.run()
    gpu.synchronize(own)
    assert fetched(gpu, out).tobytes() == a.tobytes()


def test_another_context(gpu, api, store, rng):  # noqa: F811
    """Memory of a context that the thread does not have."""
    a = rng.standard_normal((500, 600)).astype("f4")
    save(api, store, {"model/a": a})
    out = filled(gpu, a.shape)
    other = gpu.new_context()
    with Opened(api, store) as step, step.load() as load:
        load.tensors(into("model/a", out))
        load.run()
    gpu.current()
    assert fetched(gpu, out).tobytes() == a.tobytes()
    gpu.call("cuCtxDestroy_v2", c.c_void_p(other.value))
