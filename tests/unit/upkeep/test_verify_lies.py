# SPDX-License-Identifier: Apache-2.0
"""Lies with all checksums right (forgelib) that verify sees in rows and in footers: pieces that lie where the layout
does not put them, and objects of another kind than a step says."""
import ctypes as c
import hashlib
import json
import struct

import pytest

from forgelib import LAYOUT, Forge, Message
from test_load_boxes import Step, T, proto  # noqa: F401 (a fixture)
from test_verify_says import step  # noqa: F401 (a fixture)

TARGETS = [], ["run"], ["run/0"]


def told(vckpt, store, *args):
    """The exit code and what is said, as (kind of line, file, sentence)."""
    done = vckpt("verify", store, *args, "--json", check=False)
    out = json.loads(done.stdout)
    return done.returncode, [(kind, d["file"], d["what"]) for kind in ("damage", "newer") for d in out[kind]]


def forged(lib, store, tmp_path, lie):
    forge = Forge(lib, store, "run")
    lie(forge)
    forge.done(tmp_path / "scratch")


# ---- rows ----

def recorded(words, rank_dims=b"dp", size=2):
    """Says that the first tensor is held so."""
    def lie(f):
        layout = Message(bytes(f.object(LAYOUT)))
        mesh = Message()
        mesh.set(1, rank_dims)
        mesh.set(2, struct.pack("<I", size))
        mesh.set(3, struct.pack(f"<{size}I", *range(size)))
        layout.set(10, mesh.encode())
        layout.set(11, words)
        rows = bytearray(layout.get(7))
        struct.pack_into("<II", rows, 20, 1, 1)
        layout.set(7, bytes(rows))
        f.object(LAYOUT)[:] = layout.encode()
    return lie


@pytest.mark.parametrize("lie,sentence", [
    (recorded(b"S(0)"), "rank 0 stored box [0:7] of tensor 'small', which is not what the layout gives this rank"),
    (recorded(b"S(5)"), "its layout shards tensor 'small' in a way that is not possible"),
    (recorded(b"IS(0,3)"), "its layout shards tensor 'small' in a way that is not possible"),
])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_and_shards(vckpt, lib, step, tmp_path, lie, sentence, target):  # noqa: F811
    forged(lib, step, tmp_path, lie)
    code, lines = told(vckpt, step, *target)
    assert code == 3 and any(k == "damage" and "/manifests/" in f and sentence in w for k, f, w in lines), lines


def test_a_replica_is_what_the_layout_gives(vckpt, lib, step, tmp_path):  # noqa: F811
    forged(lib, step, tmp_path, recorded(b"R"))
    assert told(vckpt, step) == (0, [])


@pytest.mark.parametrize("rank,boxes", [(1, [[(4, 6), (0, 50)]]), (1, [[(10, 5), (0, 50)]]), (1, None),
                                        (7, [[(5, 5), (0, 50)]]), (12, [[(5, 5), (0, 50)]])])
def test_rows_of_other_ranks(vckpt, proto, tmp_path, rank, boxes):  # noqa: F811
    """Readers see some of these rows, and never those of a rank that is not in the mesh."""
    held = {r: [[(5 * r, 5), (0, 50)]] for r in range(12)}
    held[rank] = boxes
    Step(proto, tmp_path / "s", [T("w", "f4", (60, 50), held, 0, ("dp=12", "S(0)"))], 13)
    code, lines = told(vckpt, tmp_path / "s")
    assert code == 3 and any(f"rank {rank} stored box" in w and "not what the layout gives" in w
                             for _, _, w in lines), lines


# ---- footers ----

def footer_kind(lib, path, number, kind):
    """Another kind in a pack's footer, and its checks made good."""
    data = bytearray(path.read_bytes())
    offset, length = struct.unpack_from("<QQ", data, len(data) - 120)
    data[offset + 80 * number + 66] = kind
    data[-88:-56] = hashlib.sha256(data[offset:offset + length]).digest()
    lib.base_xxh64_of.restype = c.c_uint64
    data[-8:] = struct.pack("<Q", lib.base_xxh64_of(c.c_uint64(0), bytes(data[-128:-8]), c.c_size_t(120)))
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("pack,number,kind,sentence", [
    ("model", 0, 2, "the footer says that this object is a blob, and in a step it is a piece"),
    ("meta", 0, 5, "the footer says that this object is a chunk, and in a step it is a layout"),
])
def test_kinds_in_footers(vckpt, lib, step, pack, number, kind, sentence):  # noqa: F811
    path = next(step.rglob(f"*-{pack}.pack"))
    footer_kind(lib, path, number, kind)
    code, lines = told(vckpt, step, "--no-notes")
    assert code == 3 and any(f.endswith(path.name) and sentence in w for _, f, w in lines), lines
