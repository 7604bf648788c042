# SPDX-License-Identifier: Apache-2.0
"""A read fills all of the caller's memory, or is an error: it never leaves there what somebody else has read before.
Where pieces lie is checked when a tensor is opened; here what was opened is changed behind its back, so that pieces no
longer have each byte once."""
import ctypes as c

import numpy as np
import pytest

from commlib import Comm, fresh_name, together
from exchangelib import ALWAYS
from protolib import EFORMAT, P, Box, Digest, Grid, Params, Row, ptr, structure, u32, u64
from tensorlib import Boxes
from test_load_boxes import Step, T, api, cache, opened, proto  # noqa: F401 (fixtures)
from test_save_load import Failed, call

LOAD_OBJECT = structure("LoadObject", refs=u32, step=ptr, label=c.c_char_p, blob=c.c_bool, bytes=u64, digest=Digest,
                        grid=Grid, whole=Box, stride=u64 * 16, fragment_bytes=u64, max_piece=u64, row=Row, boxes=ptr)
LOAD_FILL = structure("LoadFill", step=ptr, threads=u32, flags=u32, boxes=ptr, nboxes=c.c_size_t, boxes_room=c.c_size_t,
                      zeros=ptr, nzeros=c.c_size_t, zeros_room=c.c_size_t, device_bytes=u64, device=ptr, objects=ptr,
                      nobjects=u32, needs=ptr, nneeds=c.c_size_t, needs_room=c.c_size_t, tasks=ptr, ntasks=c.c_size_t,
                      tasks_room=c.c_size_t, packs=ptr, npacks=u32, past_cache=c.c_bool, wanted=u64)

# Fragments of 200 bytes are gathered box by box, in tiles of 64 x 200; those of kilobytes come one after another.
SHORT = T("short", "u1", (300, 400), {0: None})
BOXES = T("boxes", "u1", (300, 400), {0: [[(0, 131), (0, 400)]], 1: [[(131, 169), (0, 400)]]})
LONG = T("long", "u1", (20000,), {0: [[(0, 9001)]], 1: [[(9001, 10999)]]})


@pytest.fixture
def inside(proto, opened, tmp_path):  # noqa: F811
    """inside(tensor): the tensor, opened, and its struct."""
    Step(proto, tmp_path / "s", [SHORT, BOXES, LONG], 2, Params(8192, 16384, 64))
    step, made = opened(), []

    def open_tensor(t):
        o = step.tensor("model", t.name)
        made.append(o)
        return o, LOAD_OBJECT.from_address(o.handle.value)
    yield open_tensor
    for o in made:
        o.close()


def second_box(struct):
    """Offset and size, in the first dimension, of the box that comes second."""
    boxes = Boxes.from_address(struct.boxes)
    pairs = c.cast(c.addressof(boxes.pairs.contents) + 16 * boxes.ndim, P(u64))
    assert boxes.n == 2
    return pairs


def test_as_it_was_opened(inside, cache):  # noqa: F811
    for t in (SHORT, BOXES, LONG):
        o, struct = inside(t)
        assert struct.label.decode() == f"tensor model/{t.name}" and struct.bytes == len(t.bytes) == o.bytes
        assert tuple(struct.grid.shape.dim[:len(t.shape)]) == t.shape and struct.row.npieces == len(o.pieces())
        assert bool(struct.boxes) == (t is not SHORT) and (struct.fragment_bytes >= 2048) == (t is LONG)
        assert o.read(cache) == t.bytes


def refused(o, cache, t, *ranges):  # noqa: F811
    """Ranges of bytes, and boxes, of which something is in no piece or in two."""
    for r in ranges:
        with pytest.raises(Failed, match=f"r/1: tensor model/{t.name}: .* not each in exactly one of its pieces") as e:
            if isinstance(r, list):
                o.read_box(cache, r, np.zeros([n for _, n in r], t.array.dtype))
            else:
                o.read(cache, *r)
        assert e.value.code == EFORMAT


def test_pieces_that_are_not_there(inside, cache):  # noqa: F811
    o, struct = inside(SHORT)
    struct.whole.size[0] = 192               # what lies behind is in no piece any more
    good = 192 * 400
    assert o.read(cache, 0, good) == SHORT.bytes[:good]
    refused(o, cache, SHORT, (good, 200), (0, good + 4), (good - 3, 200), [(0, 300), (0, 50)], [(200, 1), (7, 1)])
    struct.whole.size[0] = 300
    assert o.read(cache) == SHORT.bytes


@pytest.mark.parametrize("box, row", [((131, 168), 299), ((132, 168), 131), ((130, 170), 130)])
def test_boxes_with_a_gap_or_an_overlap(inside, cache, box, row):  # noqa: F811
    o, struct = inside(BOXES)
    pairs = second_box(struct)
    assert (pairs[0], pairs[1]) == (131, 169)
    pairs[0], pairs[1] = box
    refused(o, cache, BOXES, (0, 120000), (row * 400, 400), [(0, 300), (3, 5)], [(row, 1), (0, 50)])
    assert o.read(cache, 0, 130 * 400) == BOXES.bytes[:130 * 400]
    pairs[0], pairs[1] = 131, 169
    assert o.read(cache) == BOXES.bytes


def test_fragments_that_are_not_there(inside, cache):  # noqa: F811
    o, struct = inside(LONG)
    pairs = second_box(struct)
    pairs[0], pairs[1] = 9500, 10500
    assert o.read(cache, 0, 9001) == LONG.bytes[:9001]
    refused(o, cache, LONG, (0, 20000), (9001, 1), (9200, 5000), [(9000, 700)])
    pairs[0], pairs[1] = 9001, 10999
    assert o.read(cache) == LONG.bytes


def test_a_fragment_ends_in_its_piece(inside, cache):  # noqa: F811
    """No byte behind the end of a piece's buffer is handed out."""
    o, struct = inside(LONG)
    last = struct.row.pieces[struct.row.npieces - 1]
    last.ref.raw_len -= 1
    refused(o, cache, LONG, (0, 20000), (19999, 1))
    last.ref.raw_len += 1
    assert o.read(cache) == LONG.bytes


def fill(api, struct, more, comm=None):  # noqa: F811
    """Loads all of the first tensor. `more`: so many bytes it believes that it wants besides."""
    out, box, strides = np.zeros((300, 400), "u1"), (u64 * 32)(), (u64 * 16)(400, 1)
    box[16], box[17] = 300, 400
    f, x = ptr(api.load_fill_new(ptr(struct.step), u32(1), u32(0))), ptr()
    try:
        call(api.load_fill_add, f, u32(0), box, ptr(out.ctypes.data), strides)
        mirror = LOAD_FILL.from_address(f.value)
        assert mirror.wanted == out.nbytes and mirror.nboxes == 1
        mirror.wanted += more
        if comm:
            x = ptr(api.load_exchange_new(f, comm.p, c.c_int(ALWAYS)))
        call(*((api.load_exchange_run, x) if comm else (api.load_fill_run, f)))
    finally:
        api.load_exchange_free(x)
        api.load_fill_free(f)
    assert out.tobytes() == BOXES.bytes
    return True


def test_a_load_counts_what_it_placed(api, inside):  # noqa: F811
    """It does not say that it is good before all that was wanted has come."""
    api.load_fill_new.restype = api.load_exchange_new.restype = ptr
    _, struct = inside(BOXES)
    assert fill(api, struct, 0)
    for more in (4, -4):
        with pytest.raises(Failed, match=f"r/1: the load placed 120000 bytes, and {120000 + more} were wanted") as e:
            fill(api, struct, more)
        assert e.value.code == EFORMAT


def test_what_one_rank_lacks_is_an_error_of_all(api, inside):  # noqa: F811
    api.load_fill_new.restype = api.load_exchange_new.restype = ptr
    _, struct = inside(BOXES)
    for lacks in (None, 0, 2):
        name = fresh_name()

        def work(rank):
            comm = Comm(api, rank, 3, name)
            try:
                return fill(api, struct, 4 if rank == lacks else 0, comm)
            finally:
                comm.free()
        for result in together(3, work):
            assert result is True if lacks is None else (
                result.code == EFORMAT and "placed 120000 bytes, and 120004 were wanted" in result.text), result
