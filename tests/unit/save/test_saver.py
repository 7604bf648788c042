# SPDX-License-Identifier: Apache-2.0
"""The saver through vckpt.h, ranks as threads: what comes back, from whatever source; order, back-pressure, states,
refusals, reopening."""
import errno
import itertools
import multiprocessing
import resource

import numpy
import pytest

from proclib import open_files
from saverlib import ALONE, BUFFER, Failed, api, bounded, ranks, store  # noqa: F401

QUEUED = 1  # enum vckpt_state


@pytest.fixture
def rng():
    return numpy.random.default_rng(7)


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == numpy.ascontiguousarray(array).tobytes(), name


def raised(results):
    return [r for r in results if isinstance(r, Exception)]


# ---- one rank ----

def sources(rng):
    base = rng.standard_normal((64, 48, 40)).astype("f4")
    big = rng.integers(0, 2**32, (900, 1100), "u4")
    misaligned = numpy.frombuffer(rng.bytes(8 * 777 + 3), "u1")[3:].view("f8")
    return {
        "model/plain": base, "model/transposed": base.T, "model/every_second": base[::2, 1::3],
        "model/backwards": base[::-1, :, ::-1],
        "model/broadcast": numpy.broadcast_to(base[0, 0], (500, 40)), "model/scalar": numpy.array(2.5),
        "model/empty": numpy.zeros((0, 7), "i2"),
        "model/one": numpy.array([True]), "model/misaligned": misaligned, "model/columns": big[:, 17:930],
        "model/fortran": numpy.asfortranarray(big),
        "model/complex": (base + 1j * base[::-1]).astype("c16"), "model/many_dims": base.reshape((2,) * 12 + (30,)),
        "model/size_one": base.reshape(64, 1, 48, 1, 40)[::2, :, ::-1],
        "optimizer/diagonal": numpy.lib.stride_tricks.as_strided(big, (900,), (4404,)),
        "optimizer/overlapping": numpy.lib.stride_tricks.sliding_window_view(base[0, 0], 7)}


def test_every_source_comes_back(api, store, rng):
    tensors = sources(rng)
    saver = api.saver(store, "run")
    save = saver.save(tensors, blobs=[("config.json", False, b"{}"), ("rng", True, b"\0" * 300), ("empty", False, b"")])
    assert save.committed() == 0
    save.free()
    saver.free()
    same(api.read(store, "run"), tensors)


def test_data_is_the_callers_after_staged(api, store, rng):
    saver = api.saver(store, "run", threads=1)
    for step in range(4):
        array = rng.integers(0, 2**32, (2048, 1024), "u4")
        before = array.copy()
        save = saver.save({"model/w": array})
        save.staged()
        array[:] = 0
        assert save.committed() == step
        save.free()
        same(api.read(store, "run", step), {"model/w": before})
    saver.free()


def test_saves_under_way_are_decided_in_order(api, store, rng):
    arrays = [rng.integers(0, 2**32, (1024, 2048), "u4") for _ in range(6)]
    saver = api.saver(store, "run")
    saves = [saver.save({"model/w": a}) for a in arrays]
    assert saves[5].committed() == 5  # a blocking wait among asynchronous ones
    assert [s.committed(0) for s in saves] == list(range(6))
    for step, (save, array) in enumerate(zip(saves, arrays)):
        save.free()
        same(api.read(store, "run", step), {"model/w": array})
    saver.free()


def test_a_small_ring_holds_the_caller_back_and_nothing_else(api, store, rng):
    tensors = {f"model/{i}": rng.integers(0, 2**32, (3000, 2048), "u4") for i in range(6)}
    saver = api.saver(store, "run", ring=24 << 20)
    for _ in range(2):
        save = saver.save(tensors)
        save.staged()
        save.committed()
        waits = save.timings().ring_waits
        save.free()
        for array in tensors.values():
            array += 1
    assert waits > 0
    saver.free()
    same(api.read(store, "run"), {n: a - 1 for n, a in tensors.items()})


def test_a_ring_that_no_band_fits_into_is_refused(api, store):
    saver = api.saver(store, "run", ring=4096)
    save = saver.save({"model/w": numpy.zeros((2048, 2048))})
    with pytest.raises(Failed, match="ring of 4096 bytes is too small"):
        save.staged()
    with pytest.raises(Failed, match="too small"):
        save.committed()
    save.free()
    saver.close()  # its error was told
    saver.free()


def timed(saver, tensors):
    """What a save of them took, once it is committed."""
    save = saver.save(tensors)
    save.committed()
    t = save.timings()
    save.free()
    return t


def test_row_major_strides_are_like_none(api, store):
    saver, array = api.saver(store, "run"), numpy.ones((500, 64), "f4")
    for given, step in itertools.product((False, True), range(2)):
        assert timed(saver, {"model/a": (array, {"strides": given})}).plan_cached == (given or step)
    assert timed(saver, {"model/a": (numpy.ones((500, 65), "f4")[:, :64], {})}).plan_cached == 0
    saver.close()
    saver.free()


def test_equal_meshes_are_one(api, store):
    """Each save makes its own: what they say counts."""
    saver, array = api.saver(store, "run"), numpy.ones((64, 64), "f4")
    names = "a", "a", "b", "a", "b"
    cached = [timed(saver, {"model/w": (array, {"mesh": api.mesh(f"{name}=1"), "placements": "S(0)"})}).plan_cached
              for name in names]
    assert cached == [0, 1, 0, 1, 1]
    saver.close()
    saver.free()


def test_unchanged_data_is_not_written_again(api, store, rng):
    tensors = {f"model/{i}": rng.integers(0, 2**32, (1024, 1024), "u4") for i in range(4)}
    saver = api.saver(store, "run")
    for step in range(3):
        t = timed(saver, tensors)
        if step:
            assert (t.pieces_new == 0 and t.bytes_unchanged == 4 << 22 and t.bytes_written < 100000 and
                    t.plan_cached == 1)
    tensors["model/2"][5, 5] ^= 1
    save = saver.save(tensors)
    save.committed()
    assert save.timings().pieces_new == 1
    save.free()
    saver.free()
    same(api.read(store, "run"), tensors)


def test_what_never_shrinks_is_hardly_tried_and_what_begins_to_is_found(api, store, rng):
    """One piece of 16 is tried at each save; once one gets smaller, the next save tries all."""
    random = rng.integers(0, 2**32, (8 << 20) // 4, "u4")
    saver, encoded = api.saver(store, "run"), []

    def save(array):
        t = timed(saver, {"model/w": array.view("f4"), "model/one": array[:5000]})
        assert api.read(store, "run")["model/w"].tobytes() == array.tobytes()
        return t.bytes_encoded // (128 << 10)
    assert [save(random + i) for i in range(3)] == [0, 0, 0]
    for i in range(4):                      # each value 4 times: it shrinks
        encoded.append(save(numpy.repeat(random[:len(random) // 4] + i, 4)))
    saver.free()
    assert encoded == [4, 64, 64, 64]


def test_equal_pieces_are_hashed_once(api, store, rng):
    """Bytes that repeat their first eight are found by comparing them; one that differs in its last byte is another."""
    n = 300_000
    forms = {"zeros": numpy.zeros(n), "ones": numpy.ones(n), "more": numpy.ones(n), "minus": numpy.full(n, -1.5),
             "nan": numpy.full(n, numpy.nan), "short": numpy.zeros(2048), "shorter": numpy.zeros(2047),
             "pairs": numpy.tile(numpy.array([1, 2], "f4"), n), "threes": numpy.tile(numpy.arange(3.0), n // 3),
             "last": numpy.zeros(n), "first": numpy.zeros(n), "bool": numpy.ones(9 * n, "?"),
             "odd": numpy.tile(numpy.arange(8, dtype="u1"), n)[:-3]}
    for i in range(40):                     # enough for each worker to meet both, in any order
        forms[f"part{i:02}"] = numpy.zeros(8192 if i % 8 else 16384)
        forms[f"part{i:02}"].view("u1")[-1] = i % 3
    forms["last"].view("u1")[-1] = 1
    forms["first"].view("u1")[0] = 1
    tensors = {f"model/{name}": array for name, array in forms.items()}
    saver = api.saver(store, "run")
    for step in range(3):
        t = timed(saver, tensors)
        assert step == 0 or t.pieces_new == 0
        assert step or t.bytes_deduplicated > 15 << 20
        same(api.read(store, "run"), tensors)
        if step == 1:                       # what a worker remembers is of the save before
            saver.free()
            saver = api.saver(store, "run")
    tensors = {name: -array if array.dtype.kind == "f" else array for name, array in tensors.items()}
    saver.save(tensors).committed()
    saver.save({"other/zeros": numpy.zeros(n)}).committed()
    saver.free()
    same(api.read(store, "run", 3), tensors)


@pytest.mark.parametrize("shape", [(1500, 1100), (3, 700, 900), (2_000_003,), (70000, 3)])
def test_what_is_cut_while_it_is_copied_is_recognised_otherwise(api, store, rng, shape):
    """Rows that lie together are cut and hashed on their way into the ring, others out of it: to the same pieces, with
    the same hashes."""
    array = rng.integers(0, 2**16, shape, "u2")
    apart = numpy.empty((*shape, 2), "u2")[..., 0]
    apart[:] = array
    saver = api.saver(store, "run")
    for number, form in enumerate([array, apart, numpy.asfortranarray(array), array[:]]):
        save = saver.save({"model/w": form})
        save.committed()
        t = save.timings()
        assert number == 0 or t.pieces_new == 0 and t.bytes_unchanged == array.nbytes, (number, t.pieces_new)
        save.free()
    saver.free()
    same(api.read(store, "run"), {"model/w": array})


def test_a_base_of_another_run(api, store, rng):
    tensors = {"model/w": rng.integers(0, 2**32, (1024, 1024), "u4")}
    saver = api.saver(store, "pretrained")
    saver.save(tensors).committed()
    saver.free()
    saver = api.saver(store, "tuned")
    save = saver.save(tensors, bases=["pretrained/0"])
    save.committed()
    assert save.timings().pieces_new == 0
    save.free()
    save = saver.save(tensors, bases=["pretrained/7"])
    with pytest.raises(Failed, match="base pretrained/7: there is no such step"):
        save.committed()
    save.free()
    saver.free()


def test_boxes_and_flat_ranges(api, store, rng):
    whole = rng.integers(0, 2**32, (300, 500), "u4")

    def work(rank, saver):
        mesh = api.mesh("dp=4")
        pad = 37504  # 4 buckets of 37,504 hold 150,000 items and 16 of padding
        flat = numpy.concatenate([whole.reshape(-1), numpy.zeros(16, "u4")])[rank * pad:(rank + 1) * pad]
        rows = [75 * rank, 75]
        parts = [[rows, [0, 200]], [rows, [200, 300]]]
        boxed = numpy.concatenate([whole[75 * rank:75 * rank + 75, :200].reshape(-1),
                                   whole[75 * rank:75 * rank + 75, 200:].reshape(-1)])
        save = saver.begin()
        save.tensor("model/flat", flat.copy(), shape=whole.shape, mesh=mesh,
                    flat=[rank * pad, (rank + 1) * pad, 4 * pad])
        save.tensor("model/boxed", boxed, shape=whole.shape, boxes=parts)
        for part in parts:  # one box a call: more boxes of the same tensor
            (r, n), (k, m) = part
            save.tensor("model/apart", numpy.ascontiguousarray(whole[r:r + n, k:k + m]).reshape(-1), shape=whole.shape,
                        boxes=[part])
        save.submit()
        step = save.committed()
        save.free()
        return step
    assert ranks(api, store, "run", 4, work) == [0] * 4
    same(api.read(store, "run"), {"model/flat": whole, "model/boxed": whole, "model/apart": whole})


# ---- several ranks ----

def test_shards_of_strided_sources(api, store, rng):
    whole = rng.standard_normal((512, 384))

    def work(rank, saver):
        mesh = api.mesh("dp=2,tp=3")
        tp = rank % 3
        columns = whole[:, tp * 128:(tp + 1) * 128]  # strided
        save = saver.save({
            "model/w": (columns, {"shape": whole.shape, "mesh": mesh, "placements": "R,S(1)"}),
            "model/wt": (numpy.asfortranarray(columns), {"shape": whole.shape, "mesh": mesh, "placements": "R,S(1)"}),
            "model/plain": whole[::-1], "model/bias": whole[0], "model/uneven": (whole[rank * 86:(rank + 1) * 86], {
                "shape": whole.shape, "mesh": api.mesh("all=6"), "placements": "S(0)"})})
        step, t = save.committed(), save.timings()
        save.free()
        return step, t.bytes_held, sum(p.bytes for p in t.phase if p.name == b"copy")
    done = ranks(api, store, "run", 6, work)
    assert not raised(done), done
    same(api.read(store, "run"), {"model/w": whole, "model/wt": whole, "model/plain": whole[::-1],
                                  "model/bias": whole[0], "model/uneven": whole})
    # 4 matrices over 6 ranks, within a piece
    assert max(staged for _, _, staged in done) < whole.nbytes * 0.9 + (2 << 20)


def test_replicas_that_differ_are_named(api, store, rng):
    whole = rng.standard_normal((1024, 700))

    def work(rank, saver):
        mine = whole.copy()
        if rank == 2:
            mine[:] += 1
        save = saver.save({"model/good": whole, "model/stats": (mine[0], {"flags": BUFFER}), "model/w": mine})
        try:
            return save.committed()
        finally:
            save.free()
    done = ranks(api, store, "run", 4, work)
    assert len(raised(done)) == 4
    for e in done:
        assert "model/w" in e.text and "rank 2" in e.text and "model/good" not in e.text, e.text
    assert ranks(api, store, "run", 4, work, launch="off", check=2) == [0] * 4


def test_who_said_what(api, store, rng):
    w = rng.standard_normal((256, 256))

    def work(fields):
        def one(rank, saver):
            save = saver.begin(**fields.get("begin", lambda r: {})(rank))
            save.tensor("model/w", *fields.get("tensor", lambda r: (w,))(rank))
            save.submit()
            try:
                return save.committed()
            finally:
                save.free()
        return one
    steps = ranks(api, store, "run", 2, work({"begin": lambda r: {"step": 5 + r}}), launch="steps", start_ms=2000,
                  heartbeat_ms=2000)
    assert "step 5" in steps[0].text and "rank 1" in steps[0].text and "part of step 6" in steps[0].text, steps
    assert "step 6" in steps[1].text and "rank 0" in steps[1].text, steps    # it has closed its saver
    shapes = ranks(api, store, "run", 3, work({"tensor": lambda r: (w[:128 + (r == 1)],)}), launch="shapes")
    assert all('"model/w" is not the same on all ranks: of ranks 0, 2 it is f64 [128, 256], of ranks 1 it is f64 '
               '[129, 256]' in e.text
               for e in shapes), shapes
    dtypes = ranks(api, store, "run", 2, work({"tensor": lambda r: (w.astype("f4") if r else w,)}), launch="dtypes")
    assert all('"model/w" is not the same on all ranks: of ranks 0 it is f64 [256, 256], of ranks 1 it is f32 '
               '[256, 256]' in e.text
               for e in dtypes), dtypes
    unchecked = ranks(api, store, "run", 2, work({"tensor": lambda r: (w[:128 + r],)}), launch="unchecked", check=2)
    assert all("of ranks 0 it is f64 [128, 256], of ranks 1 it is f64 [129, 256]" in e.text for e in unchecked), (
        unchecked)
    assert ranks(api, store, "run", 2, work({}), launch="fine") == [0, 0]


def test_a_plain_tensor_that_is_not_replicated_is_refused_with_advice(api, store, rng):
    def work(rank, saver):
        save = saver.save({"model/w": (numpy.full((2048, 1024), rank, "f8"), {})})
        try:
            return save.committed()
        finally:
            save.free()
    done = ranks(api, store, "run", 2, work, check=2)  # not compared: either rank's half would do
    assert done == [0, 0]
    done = ranks(api, store, "run", 2, work, launch="again")
    assert all("model/w" in e.text and "mesh" in e.text for e in done), done


@pytest.mark.parametrize("shape", [(2048, 1024), (3,)])
def test_groups_that_agree_only_among_themselves(api, store, rng, shape):
    """Each pair says that it holds the whole tensor: the commit compares what the pairs stored, whatever was
    sampled."""
    def work(differ):
        def one(rank, saver):
            group = [0, 1] if rank < 2 else [2, 3]
            array = numpy.full(shape, group[0] if differ else 7, "f8")
            return saver.save({"model/w": (array, {"mesh": api.mesh("dp=2", group), "placements": "R"})}).committed()
        return one
    assert ranks(api, store, "run", 4, work(False), launch="the same") == [0] * 4
    done = ranks(api, store, "run", 4, work(True), launch="different")
    assert all('tensor "w": ranks 0 and 2 stored different bytes' in e.text and "ranks 2, 3 as R over dp=2" in e.text
               for e in done), done


def test_a_step_that_exists(api, store, rng):
    w, x = rng.standard_normal((2, 64, 64))

    def work(rank, saver):
        out = []
        for array, fields in ((w, {}), (x, {}), (x, {"replace": True})):
            save = saver.save({"model/w": array}, step=3, **fields)
            try:
                out.append(save.committed())
            except Failed as e:
                out.append(e.code)
            save.free()
        return out
    for first, again, replaced in ranks(api, store, "run", 2, work):
        # or what the other rank said first
        assert first == replaced == 3 and again in (-errno.EEXIST, -errno.ECANCELED)
    same(api.read(store, "run", 3), {"model/w": x})


def test_a_save_that_is_not_submitted_uses_its_number(api, store, rng):
    w = rng.standard_normal((64, 64))

    def work(rank, saver):
        given_up = saver.begin()
        given_up.tensor("model/w", w)
        given_up.free()
        save = saver.save({"model/w": w})
        step = save.committed()
        save.free()
        return step
    done = ranks(api, store, "run", 2, work)
    assert not raised(done) and done[0] == done[1], done


# ---- refusals ----

REFUSED = [
    ("no/name", dict(name="model/"), "no name for a tensor"),
    ("component", dict(name="a b/w"), "no name for a component"),
    ("used", dict(name="ranks/w"), "component"), ("dtype", dict(dtype=99), "dtype 99"),
    ("placement", dict(placements="X"), "X"),
    ("partial", dict(placements="P"), "artial"), ("words", dict(placements="R,R"), "placement"),
    ("local", dict(shape=(8, 9)), "the local tensor is"), ("box", dict(boxes=[[[0, 9], [0, 8]]], shape=(8, 8)), "box"),
    ("flat", dict(flat=[5, 3, 0]), "flat"), ("alone", dict(flags=ALONE, placements="R"), "alone"),
    ("flags", dict(flags=64), "flags"),
]


@pytest.mark.parametrize("fields,text", [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_when_declared(api, store, fields, text):
    saver = api.saver(store, "run")
    save = saver.begin()
    array, fields = numpy.ones((8, 8)), dict(fields)
    with pytest.raises(Failed, match=text):
        save.tensor(fields.pop("name", "model/w"), array, **fields)
    save.tensor("model/w", array)
    with pytest.raises(Failed, match="model/w: it is given twice"):
        save.tensor("model/w", array)
    with pytest.raises(Failed, match="given twice"):
        save.blob("x", 0, b"1")
        save.blob("x", 0, b"2")
    save.submit()
    with pytest.raises(Failed, match="submitted"):
        save.tensor("model/x", array)
    assert save.committed() == 0
    save.free()
    saver.free()
    same(api.read(store, "run"), {"model/w": array})


def test_null_data_is_refused(api, store):
    saver = api.saver(store, "run")
    save = saver.begin()
    array = numpy.zeros((0,))
    with pytest.raises(Failed, match="null pointer"):
        save.tensor("model/w", array, shape=(4,), check_local=False)
    save.free()
    saver.free()


@pytest.mark.parametrize("rank,world,launch,text",
                         [(0, 0, None, "world of 0"), (2, 2, "x", "no rank 2"), (0, 2, None, "needs a launch id")])
def test_worlds_that_cannot_be(api, store, rank, world, launch, text):
    with pytest.raises(Failed, match=text):
        api.saver(store, "run", rank=rank, world=world, launch=launch)


def test_names_of_every_kind(api, store):
    names = ["a/b", "%", ".", "..", "ü" * 40, "x" * 60000, "tab\there", " ", "a\\b", "-rf"]
    saver = api.saver(store, "run")
    wanted = {f"model/{n}": numpy.full(3, i) for i, n in enumerate(names)}
    save = saver.save(wanted)
    assert save.committed() == 0
    save.free()
    saver.free()
    same(api.read(store, "run"), wanted)


# ---- life ----

def test_close_drains_and_may_be_called_again(api, store, rng):
    saver = api.saver(store, "run")
    saves = [saver.save({"model/w": rng.standard_normal((512, 512))}) for _ in range(3)]
    saver.close()
    assert [s.committed(0) for s in saves] == [0, 1, 2]
    saver.close()
    with pytest.raises(Failed, match="is closed"):
        saver.begin()
    for s in saves:
        s.free()
    saver.free()
    saver = api.saver(store, "run")
    save = saver.save({"model/w": numpy.ones(3)})
    assert save.committed() == 3
    save.free()
    saver.free()


def test_close_tells_of_a_failure_that_nobody_was_told(api, store):
    saver = api.saver(store, "run")
    saver.save({"model/w": numpy.ones(3)}, step=1).committed()
    saver.save({"model/w": numpy.ones(3)}, step=1).free()
    with pytest.raises(Failed, match="step 1"):
        saver.close()
    saver.free()


def child_of(api, saver, save, queue):
    out = []
    for f in (saver.begin, save.submit, save.staged, save.committed, saver.close):
        try:
            f()
            out.append(0)
        except Failed as e:
            out.append(e.code)
    save.free()
    saver.free()
    queue.put(out)


def test_a_child_after_a_fork_is_refused(api, store):
    saver = api.saver(store, "run")
    save = saver.begin()
    save.tensor("model/w", numpy.ones(3))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=child_of, args=(api, saver, save, queue))
    child.start()
    assert queue.get(timeout=120) == [-errno.ECHILD] * 5
    child.join(120)
    assert child.exitcode == 0
    save.submit()
    assert save.committed() == 0
    save.free()
    saver.free()


def test_memory_and_descriptors_are_flat(api, store, rng, scale):
    tensors = {f"model/{i}": rng.integers(0, 2**32, (64, 64), "u4") for i in range(20)}
    saver = api.saver(store, "run", ring=1 << 20)

    def used():
        """Packs that were read within the last second are still open."""
        files = [path for path in open_files() if not path.endswith(".pack")]
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize(), len(files)
    count = scale(200, 1000)
    for step in range(count):
        tensors["model/3"][step % 64] ^= 1
        save = saver.save(tensors, step=step % 7, replace=True)
        save.committed()
        save.free()
        if step == count * 3 // 4:
            before = used()
    after = used()
    saver.free()
    assert after[0] - before[0] < 4 << 20 and after[1] - before[1] < 5, (before, after)    # in 50 saves or more


def test_submit_waits_for_nothing(api, store, rng):
    """An open save holds those behind it back: nothing of them is prepared, staged or written before it goes, and yet
    their submit returns."""
    data = rng.standard_normal((256, 1024))
    saver = api.saver(store, "run")
    first, behind = saver.begin(), [saver.begin() for _ in range(3)]
    for save in behind:
        save.tensor("model/w", data)
        bounded(60, save.submit)
    for save in behind:
        with pytest.raises(Failed) as e:
            save.staged(100)
        assert e.value.code == -errno.ETIMEDOUT
        found = save.progress()
        assert (found.state, found.bytes_staged, found.bytes_done) == (QUEUED, 0, 0)
    first.free()
    steps = [save.committed() for save in behind]
    assert steps == list(range(steps[0], steps[0] + 3))
    for x in (*behind, saver):
        x.free()


@pytest.mark.full
def test_a_million_tensors(api, tmp_path):
    path = api.store(tmp_path / "store")
    saver = api.saver(path, "run")
    array = numpy.arange(4.0)
    save = saver.begin()
    for i in range(1_000_000):
        save.tensor(f"model/{i:07}", array)
        save.keep.clear()
    save.submit()
    assert save.committed(600000) == 0
    save.free()
    saver.free()
