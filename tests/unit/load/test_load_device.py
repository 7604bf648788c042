# SPDX-License-Identifier: Apache-2.0
"""Loads into device memory, against the stand-in driver: what arrives and what stays untouched, in which order the
copies stand behind the program's work, each call of the driver failing in turn, and what is held at the end.

Arrays of device memory are numpy's: the stand-in's memory is the host's."""
import errno
import itertools
import random

import numpy as np
import pytest

from commlib import good
from exchangelib import ALWAYS, NEVER, Ranks
from loadlib import CONVERT, RESIZE, ZERO, Opened, described, target
from saverlib import DEVICE, Failed, api, store  # noqa: F401 (fixtures)
from test_saver_device import GLOBAL, begin_capture, cuda, driver, end_capture  # noqa: F401 (fixtures)
COPIES = ("copies", "copies_2d", "copies_3d")


def save(api, store, arrays):  # noqa: F811
    saver = api.saver(store, "run")
    saver.save(arrays).committed()
    saver.close()
    saver.free()


def noise(rng, shape, kind="float32"):
    return np.frombuffer(rng.randbytes(int(np.prod(shape, dtype=int)) * np.dtype(kind).itemsize),
                         kind).reshape(shape).copy()


def on_device(cuda, shape, kind="float32"):  # noqa: F811
    return cuda.array(np.full(shape, 7, kind))


def into(name, array, **fields):
    return described(name, array, flags=DEVICE, strides=array.ndim > 0, **fields)


def run(step, *tensors, targets=(), streams=(), threads=2, flags=0):
    with step.load(threads=threads, flags=flags) as load:
        for stream in streams:
            load.stream(stream)
        load.tensors(*tensors)
        load.targets(*targets)
        load.run()
        p = load.progress()
        assert p.bytes_placed == p.bytes_wanted
        return p


# ---- what arrives ----

VIEWS = {
    "plain": lambda a: a, "transposed": lambda a: a.T, "permuted": lambda a: a.transpose(1, 2, 0),
    "every_second": lambda a: a[::2, 1::3], "columns": lambda a: a[:, :, 3:11], "rows": lambda a: a[4:20],
    "line": lambda a: a[3, 2], "scattered": lambda a: a[::3, ::2, ::5], "one": lambda a: a[1:2, 2:3, 3:4],
    "empty": lambda a: a[:0]}


@pytest.mark.parametrize("threads", [1, 3])
def test_every_view_arrives_and_nothing_beside_it_changes(cuda, driver, api, store, seed, threads):  # noqa: F811
    rng, wholes, wanted, tensors = random.Random(seed), {}, {}, []
    arrays = {f"model/{n}": noise(rng, f(np.empty((24, 20, 16))).shape) for n, f in VIEWS.items()}
    arrays["model/scalar"], arrays["a/host"] = noise(rng, ()), noise(rng, (99, 7))
    save(api, store, arrays)
    for n, f in VIEWS.items():
        wholes[n], wanted[n] = on_device(cuda, (24, 20, 16)), np.full((24, 20, 16), 7, "f4")
        f(wanted[n])[...] = arrays[f"model/{n}"]
        tensors.append(into(f"model/{n}", f(wholes[n])))
    scalar, host = on_device(cuda, (1,)).reshape(()), np.empty((99, 7), "f4")
    with Opened(api, store) as step:
        run(step, *tensors, into("model/scalar", scalar), described("a/host", host), threads=threads)
    assert scalar.tobytes() == arrays["model/scalar"].tobytes() and host.tobytes() == arrays["a/host"].tobytes()
    for n, whole in wholes.items():
        assert whole.tobytes() == wanted[n].tobytes(), n
    assert driver.count("copies") and driver.count("copies_2d") and driver.count("pageable") == 0


def test_slots_are_used_again_and_memory_is_bounded(cuda, driver, api, store, seed):  # noqa: F811
    """Many times what the staging memory holds; large tensors, and many that share a slot."""
    rng = random.Random(seed)
    arrays = {f"model/{i:04}": noise(rng, (rng.randint(1, 50),)) for i in range(300)}
    arrays["model/large"] = noise(rng, (5000, 1100))
    save(api, store, arrays)
    out = {name: on_device(cuda, a.shape) for name, a in arrays.items()}
    out["model/large"] = on_device(cuda, (1100, 5000)).T
    with Opened(api, store) as step:
        run(step, *[into(name, a) for name, a in out.items()])
    for name, a in out.items():
        assert a.tobytes() == arrays[name].tobytes(), name
    assert driver.count("copies") < 600


def test_few_calls_where_the_order_is_another(cuda, driver, api, store, seed):  # noqa: F811
    """The host puts the items into the destination's order, so a dense one takes a copy for each piece."""
    rng = random.Random(seed)
    a = noise(rng, (64, 32, 128))
    save(api, store, {"model/w": a})
    for order in itertools.permutations(range(3)):
        there = on_device(cuda, [a.shape[d] for d in order])
        before = sum(driver.count(what) for what in COPIES)
        with Opened(api, store) as step:
            pieces = run(step, into("model/w", there.transpose(np.argsort(order))), threads=1).pieces
        assert there.tobytes() == a.transpose(order).tobytes()
        assert sum(driver.count(what) for what in COPIES) - before <= pieces, order


def test_converted_cut_and_zeroed(cuda, api, store, seed):  # noqa: F811
    rng = random.Random(seed)
    a = np.arange(700 * 900, dtype="f4").reshape(700, 900)
    qkv = noise(rng, (96, 40), "int16")
    save(api, store, {"model/a": a, "model/qkv": qkv})
    double, padded = on_device(cuda, (900, 700), "float64"), on_device(cuda, (800, 900), "int32")
    parts = [on_device(cuda, (32, 40), "int16") for _ in range(3)]
    with Opened(api, store) as step:
        run(step, targets=[
            target(into("model/a", double.T), flags=CONVERT),
            target(into("model/a", padded), flags=CONVERT | RESIZE | ZERO),
            *[target(into("x/y", p), "model/qkv", [(32 * i, 32), (0, 40)]) for i, p in enumerate(parts)]])
    assert (double.T == a).all() and (padded[:700] == a).all() and (padded[700:] == 0).all()
    assert all((p == qkv[32 * i:32 * i + 32]).all() for i, p in enumerate(parts))


def test_zeros_are_there_before_what_is_loaded(cuda, driver, api, store, seed):  # noqa: F811
    """Of three targets into one tensor each zeroes what the others load, and copies go by several streams."""
    rng = random.Random(seed)
    parts = {f"model/{n}": noise(rng, (400, 1500), "int32") for n in "qkv"}
    save(api, store, parts)
    driver.lib.standin_delay(5_000, seed)
    merged = on_device(cuda, (1300, 1500), "int32")
    with Opened(api, store) as step:
        run(step, threads=4, targets=[
            target(into("x/y", merged), name, [(0, 400), (0, 1500)], at=(400 * i, 0), flags=ZERO)
            for i, name in enumerate(parts)])
    assert (merged == np.concatenate([*parts.values(), np.zeros((100, 1500), "int32")])).all()


def test_two_contexts_and_memory_of_none(cuda, driver, api, store, seed):  # noqa: F811
    rng = random.Random(seed)
    a, b, c = (noise(rng, (300, 500)) for _ in range(3))
    save(api, store, {"model/a": a, "model/b": b, "model/c": c})
    here = on_device(cuda, a.shape)
    driver.context()
    there = on_device(cuda, b.shape)
    driver.set(None)
    mapped = on_device(cuda, c.shape)
    with Opened(api, store) as step:
        run(step, into("model/a", here), into("model/b", there), into("model/c", mapped))
    assert here.tobytes() == a.tobytes() and there.tobytes() == b.tobytes() and mapped.tobytes() == c.tobytes()


# ---- order ----

def test_the_programs_work_on_the_memory_comes_first(cuda, driver, api, store, seed):  # noqa: F811
    """Kernels that still write the destinations, on the default stream and on others."""
    a = noise(random.Random(seed), (200, 100))
    save(api, store, {"model/a": a, "model/b": a})
    own, out = cuda.stream(nonblocking=True), [on_device(cuda, a.shape) for _ in range(2)]
    cuda.write(own, out[0], np.full_like(a, 3), 30_000)
    cuda.write(None, out[1], np.full_like(a, 4), 30_000)
    with Opened(api, store) as step:
        run(step, into("model/a", out[0]), into("model/b", out[1]), streams=(own, None))
    assert all(o.tobytes() == a.tobytes() for o in out)


def test_a_stream_that_nobody_names_is_not_waited_for(cuda, driver, api, store, seed):  # noqa: F811
    """The wrong order on purpose: the stand-in counts it."""
    a = noise(random.Random(seed), (200, 100))
    save(api, store, {"model/a": a})
    own, out = cuda.stream(nonblocking=True), on_device(cuda, a.shape)
    cuda.write(own, out, np.full_like(a, 3), 30_000)
    with Opened(api, store) as step:
        run(step, into("model/a", out))
    driver.synchronize(own)
    assert driver.faults().get("premature")
    cuda.faults = driver.faults()


def test_a_stream_that_is_captured_is_refused(cuda, driver, api, store, seed):  # noqa: F811
    a = noise(random.Random(seed), (20, 10))
    save(api, store, {"model/a": a})
    own, out = cuda.stream(nonblocking=True), on_device(cuda, a.shape)
    with Opened(api, store) as step, step.load() as load:
        load.stream(own)
        load.tensors(into("model/a", out))
        begin_capture(driver, own, GLOBAL)
        with pytest.raises(Failed, match="being captured into a CUDA graph") as e:
            load.start()
        assert e.value.code == -errno.EBUSY and end_capture(driver, own) == 0
        load.run()
    assert out.tobytes() == a.tobytes()


# ---- errors, stops ----

FAILS = [("cuMemcpyHtoDAsync", 1), ("cuMemcpy2DAsync", 1), ("cuMemcpy2DAsync", 3), ("cuEventCreate", 2),
         ("cuEventCreate", 4), ("cuEventRecord", 1), ("cuEventRecord", 3), ("cuEventSynchronize", 1),
         ("cuStreamCreate", 1), ("cuStreamWaitEvent", 1), ("cuPointerGetAttributes", 1), ("cuCtxPushCurrent", 4),
         ("copy", 1), ("copy", 5)]


@pytest.mark.parametrize("function, nth", FAILS, ids=[f"{f}-{n}" for f, n in FAILS])
def test_an_error_of_the_driver_fails_the_load(cuda, driver, api, store, seed, function, nth):  # noqa: F811
    """By name; and with damage to be skipped as well, for it is none."""
    rng = random.Random(seed)
    arrays = {"model/a": noise(rng, (2000, 900)), "model/b": noise(rng, (40, 30))}
    save(api, store, arrays)
    out = {"model/a": on_device(cuda, (2000, 1000))[:, :900], "model/b": on_device(cuda, (40, 30))}
    with Opened(api, store) as step, step.load(flags=rng.choice((0, 2))) as load:
        load.tensors(*[into(name, a) for name, a in out.items()])
        driver.fail(function, nth, 700)
        with pytest.raises(Failed, match="CUDA_ERROR_ILLEGAL_ADDRESS") as e:
            load.run()
        if function.startswith(("cuMemcpy", "copy", "cuEventS")):
            assert "run/0: tensor model/" in e.value.text, e.value.text
        assert load.lost() == [] and e.value.code == -errno.EFAULT


@pytest.mark.parametrize("mode", [ALWAYS, NEVER])
def test_an_error_of_the_last_copy_at_one_rank_is_told_to_all(cuda, driver, api, store, seed, mode):  # noqa: F811
    """It is known only when the copies are waited for, after everything has been read."""
    rng = random.Random(seed)
    arrays = {"model/a": noise(rng, (200, 900)), "model/b": noise(rng, (40, 30))}
    save(api, store, arrays)
    out = [{name: on_device(cuda, a.shape) for name, a in arrays.items()} for _ in range(2)]

    def declare(rank, load):
        load.tensors(*[into(name, a) for name, a in out[rank].items()])
    with Ranks(api, 2) as ranks:
        for nth in (1, 2):
            driver.fail("cuEventSynchronize", nth, 700)
            told = ranks.run(store, declare, mode)
            assert all(isinstance(e, Failed) and e.code == -errno.EFAULT for e in told), told
            assert told[0].text == f"rank 1: {told[1].text}" or told[1].text == f"rank 0: {told[0].text}"
        good(ranks.run(store, declare, mode))
    assert all(one[name].tobytes() == a.tobytes() for one in out for name, a in arrays.items())


def test_a_load_that_is_stopped_or_freed(cuda, driver, api, store, seed):  # noqa: F811
    """What is still under way has arrived, or never will, when the memory is the caller's again."""
    a = noise(random.Random(seed), (3000, 700))
    save(api, store, {"model/a": a})
    with Opened(api, store) as step:
        for stop in (True, False):
            out = on_device(cuda, a.shape)
            with step.load() as load:
                load.tensors(into("model/a", out))
                load.start()
                if stop:
                    load.stop()
                    try:
                        load.wait()
                    except Failed as e:
                        assert e.code == -errno.ECANCELED
            assert not driver.busy(out.ctypes.data, out.nbytes)
            out[...] = 1
            assert (out == 1).all()
