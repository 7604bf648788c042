# SPDX-License-Identifier: Apache-2.0
"""What verify --paranoid says of a store that a stranger made, with all checksums right (forgelib), and verify does
not: what is not known, not finished or not a plain file, and what reading gives."""
import ctypes as c
import hashlib

import pytest

from forgelib import ENTRY, LAYOUT, Forge, Message
from storelib import ABORT, Api
from test_load_boxes import Step, T, opened, proto  # noqa: F401 (fixtures)
from test_save_load import Failed, api, call  # noqa: F401 (api is a fixture)
from test_verify_lies import TARGETS, footer_kind, forged, told
from test_verify_says import add, step, view  # noqa: F401 (step is a fixture)

# ---- what an honest store is ----

@pytest.mark.parametrize("target", TARGETS)
def test_an_honest_store_is_sound(vckpt, lib, step, tmp_path, target):  # noqa: F811
    """And nothing is written into it."""
    forged(lib, step, tmp_path, lambda f: None)
    before = sorted((p, p.stat().st_mtime_ns) for p in step.rglob("*"))
    out = vckpt.json("verify", step, *target, "--paranoid")
    plain = vckpt.json("verify", step, *target)
    assert out["faults"] == 0 and not out["newer"] and out["bytes"] > plain["bytes"] + 240_000
    assert before == sorted((p, p.stat().st_mtime_ns) for p in step.rglob("*"))


def test_several_writers_in_boxes(vckpt, lib, proto, tmp_path):  # noqa: F811
    """Tensors that many ranks hold in boxes, along the lines of the grid and not, read whole."""
    tensors = [T("a", "f4", (60, 50), {r: [[(10 * r, 10), (0, 50)]] for r in range(6)}, 1, ("dp=6", "S(0)")),
               T("b", "u1", (7, 11, 13), {0: [[(0, 7), (0, 5), (0, 13)]], 3: [[(0, 7), (5, 6), (0, 13)]]}, 2),
               T("c", "i8", (), {2: None}, 3), T("d", "f4", (0, 3), {1: None}, 4), T("e", "f4", (4000,), {1: None}, 5)]
    Step(proto, tmp_path / "s", tensors, 6, header=True)
    out = vckpt.json("verify", tmp_path / "s", "--paranoid", check=False)
    assert [d["what"] for d in out["damage"] + out["newer"]] == []


# ---- what only --paranoid says ----

def field(name, number=77):
    return lambda f: getattr(f, name).set(number, 5)


def layout_field(f):
    layout = Message(bytes(f.object(LAYOUT)))
    layout.set(77, 5)
    f.object(LAYOUT)[:] = layout.encode()


def in_header(f):
    h = Message(f.manifest.get(9))
    h.set(77, b"x")
    f.manifest.set(9, h.encode())


NOT_KNOWN = "it has a field that this vckpt does not know and did not check: field 77 of "


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("lie,file,sentence", [
    (field("entry"), "runs/run/0000", NOT_KNOWN + "Entry"),
    (field("commit"), "runs/run/0000", NOT_KNOWN + "Commit"),
    (field("manifest"), "/manifests/", NOT_KNOWN + "Manifest"),
    (in_header, "/manifests/", NOT_KNOWN + "ViewHeader"),
    (field("part"), "/manifests/", "a part of the step: " + NOT_KNOWN + "Part"),
    (layout_field, "/manifests/", "a layout of the step: " + NOT_KNOWN + "Layout"),
    (view(2, b"zip"), "/manifests/", "it has a header of model for the view 'zip', which this vckpt does not know"),
])
def test_what_is_not_known(vckpt, lib, step, tmp_path, lie, file, sentence, target):  # noqa: F811
    """It may be a newer vckpt's, and is told as that; other readers pass over it."""
    forged(lib, step, tmp_path, lie)
    assert told(vckpt, step, *target) == (0, [])
    code, lines = told(vckpt, step, *target, "--paranoid")
    assert code == 4 and [k for k, _, _ in lines] == ["newer"] * len(lines), lines
    assert any(file in f and sentence in w for _, f, w in lines), lines


def test_what_is_not_known_hides_no_lie(vckpt, lib, step, tmp_path):  # noqa: F811
    def lie(f):
        layout_field(f)
        add(f.manifest, 14)
        add(f.commit, 6)
    forged(lib, step, tmp_path, lie)
    code, lines = told(vckpt, step, "--paranoid")
    assert code == 3 and any("it says 4 tensors" in w for _, _, w in lines) and any(k == "newer" for k, *_ in lines)


def link(store):
    (store / "packs/elsewhere").symlink_to("/etc")
    return "packs/elsewhere", "not a file that vckpt makes"


def unfinished(store):
    (store / "runs/run/000000000009.tmp.0123456789abcdef").write_bytes(b"x")
    return "000000000009.tmp.0123456789abcdef", "an unfinished file"


def beside_the_index(store):
    (store / "index").mkdir(exist_ok=True)
    (store / "index/notes.txt").write_text("x")
    return "index/notes.txt", "not a file that vckpt makes"


def index_link(store):
    (store / "index").mkdir(exist_ok=True)
    (store / "index/index.mdb.new").symlink_to("/etc/passwd")
    return "index/index.mdb.new", "not a file that vckpt makes"


def heartbeat(store):
    (store / "hosts").mkdir(exist_ok=True)
    (store / "hosts/0123456789abcdef.h.3").write_bytes(b"nothing")
    return "hosts/0123456789abcdef.h.3", "hosts/0123456789abcdef.h.3"


@pytest.mark.parametrize("make", [link, unfinished, beside_the_index, index_link, heartbeat])
def test_what_lies_in_the_tree(vckpt, step, make):  # noqa: F811
    name, sentence = make(step)
    if make is not link:
        assert told(vckpt, step) == (0, [])     # may be honest
    code, lines = told(vckpt, step, "--paranoid")
    assert code == 3 and any(f.endswith(name) and sentence in w + f for _, f, w in lines), lines


def test_the_footer_is_not_believed(vckpt, lib, step):  # noqa: F811
    """Each object is read twice: by the footer and by the step's reference, and then by the files."""
    plain, all_of_it = (vckpt.json("verify", step, "--no-notes", *level) for level in ([], ["--paranoid"]))
    assert all_of_it["objects"] >= plain["objects"] + 5


def test_a_snapshot_that_is_not_the_newest(vckpt, lib, step):  # noqa: F811
    """Readers start there if the newer ones cannot be read."""
    forge, store = Forge(lib, step, "run"), Api(lib, step, init=False)
    with store.list("run") as entries:
        for n in range(130):
            entries.put(store.entry(ABORT, attempt=b"00000000000000aa-%d" % n, reason=b"x"))
    store.close()
    assert told(vckpt, step, "--paranoid") == (0, [])
    snapshot = Message(forge.record_body(step / "runs/run/000000000064", ENTRY, forge.id))
    live = Message(snapshot.get(10))
    rows = bytearray(live.get(1))
    rows[16] ^= 1       # the time of the step
    live.set(1, bytes(rows))
    snapshot.set(10, live.encode())
    body = snapshot.encode()
    forge.put_record(step / "runs/run/000000000064", ENTRY, body)
    for path in sorted((step / "runs/run").glob("0*"))[65:]:     # each names the one before
        entry = Message(forge.record_body(path, ENTRY, forge.id))
        entry.set(13, hashlib.sha256(body).digest())
        body = entry.encode()
        forge.put_record(path, ENTRY, body)
    assert told(vckpt, step) == (0, [])
    code, lines = told(vckpt, step, "--paranoid")
    assert code == 3 and [f for _, f, _ in lines] == ["runs/run/000000000064"], lines
    assert "see other steps than readers from the start" in lines[0][2]


def test_what_packs_of_a_class_hold(vckpt, lib, step):  # noqa: F811
    """Also of objects that no step refers to."""
    path = next(step.rglob("*-model.pack"))
    footer_kind(lib, path, 1, 3)
    code, lines = told(vckpt, step, "--paranoid")
    assert code == 3 and any("of a kind that packs of this class do not hold" in w for _, _, w in lines), lines


# ---- reading and cutting again ----

READ = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_size_t, c.c_void_p, c.c_void_p)


@pytest.mark.parametrize("tensor", [
    T("a", "f4", (60, 50), {r: [[(10 * r, 10), (0, 50)]] for r in range(6)}, 1),
    T("a", "u2", (90, 7, 5), {0: [[(0, 90), (0, 3), (0, 5)]], 1: [[(0, 90), (3, 4), (0, 5)]]}, 1),
    T("a", "i8", (3000,), {0: None}, 2), T("a", "f4", (33, 257), {0: None}, 3), T("a", "i8", (), {0: None}, 4),
], ids=lambda t: f"{t.shape}-{len(t.held)}")
def test_reading_is_proved(api, proto, opened, tmp_path, rng, tensor):  # noqa: F811
    """Right bytes pass; with any one byte changed, or two runs exchanged, they do not."""
    Step(proto, tmp_path / "s", [tensor], 6)
    o, data, asked = opened().tensor("model", "a"), bytearray(tensor.bytes), []

    @READ
    def read(_, offset, n, out, __):
        asked.append((offset, n))
        c.memmove(out, bytes(data[offset:offset + n]), n)
        return 0
    try:
        call(api.load_object_prove, o.handle, read, None)
        assert sum(n for _, n in asked) == len(data) and {a for off, n in asked for a in range(off, off + n)} == set(
            range(len(data)))
        for _ in range(20):
            at = rng.randrange(len(data))
            data[at] ^= 1
            with pytest.raises(Failed, match="do not have its digest"):
                call(api.load_object_prove, o.handle, read, None)
            data[at] ^= 1
    finally:
        o.close()
