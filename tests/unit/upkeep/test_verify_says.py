# SPDX-License-Identifier: Apache-2.0
"""verify sees records that lie of each other while every checksum is right (forgelib)."""
import ctypes as c
import json
import struct

import numpy
import pytest
from safetensors.numpy import save_file

from forgelib import CHUNK, HEADER, LAYOUT, Forge, Message


def model(path, flip=None):
    rng = numpy.random.default_rng(5)
    data = {name: rng.standard_normal((50, 300)).astype("f4") for name in ("v", "w")}
    data["small"] = numpy.arange(7, dtype="f4")
    if flip:
        data[flip].view("u4").reshape(-1)[3] ^= 1 << 9
    save_file(data, path)
    return path


@pytest.fixture
def step(vckpt, store, tmp_path):
    vckpt("import", store, "run", model(tmp_path / "model.safetensors"), "-q", "--set", "loss=2.5")
    return store


def told(vckpt, store, *target):
    done = vckpt.json("verify", store, *target, check=False)
    return [(d.get("step"), d.get("tensor"), d["what"]) for d in done["damage"]]


def test_a_forge_that_changes_nothing(vckpt, lib, step, tmp_path):
    """What the other tests see is what they forged, not how."""
    before = vckpt("cat", step, "run/0/model.safetensors", text=False).stdout
    Forge(lib, step, "run").done(tmp_path / "scratch")
    assert told(vckpt, step) == [] and vckpt("verify", step, "run").returncode == 0
    assert vckpt("cat", step, "run/0/model.safetensors", text=False).stdout == before


# ---- both hashes of a piece ----

def xxh(lib, seed, data):
    out = c.create_string_buffer(16)
    lib.base_xxh128_of(c.c_uint64(seed), data, c.c_size_t(len(data)), out)
    return out.raw


def replace_xxh(lib, forge, wrong, right):
    """What the part says of the bytes `wrong` is said of the bytes `right`, as if memory had been flipped between the
    two hashes."""
    seed = int.from_bytes(Message(forge.record_body(forge.store / "vckpt.store", 1, None)).get(4), "little")
    chunk = forge.object(CHUNK)
    at = chunk.index(xxh(lib, seed, wrong))
    chunk[at:at + 16] = xxh(lib, seed, right)


@pytest.fixture
def deceived(vckpt, lib, store, tmp_path):
    """A step whose data was flipped before its SHA-256 was made, and after its XXH3-128. (The tensor has one piece.)"""
    from safetensors.numpy import load_file
    right, flipped = model(tmp_path / "right.safetensors"), model(tmp_path / "flipped.safetensors", flip="w")
    vckpt("import", store, "run", flipped, "-q")
    forge = Forge(lib, store, "run")
    replace_xxh(lib, forge, *(load_file(p)["w"].tobytes() for p in (flipped, right)))
    forge.done(tmp_path / "scratch")
    return store, right, flipped


@pytest.mark.parametrize("target", [[], ["run"], ["run/0"]])
def test_hashes_that_disagree_are_told(vckpt, deceived, target):
    store, _, _ = deceived
    done = vckpt("verify", store, *target, check=False)
    assert done.returncode == 3 and "XXH3-128" in done.stdout and "model/w" in done.stdout, done.stdout
    assert [t[:2] for t in told(vckpt, store, *target)] == [(0, "w")]


def test_hashes_that_disagree_are_no_base(vckpt, deceived):
    """Once verify has seen it, the right data is stored as it is."""
    store, right, flipped = deceived
    assert vckpt("verify", store, check=False).returncode == 3
    done = vckpt.json("import", store, "run", right)
    assert done["pieces_new"] >= 1
    assert vckpt("cat", store, "run/1/right.safetensors", text=False).stdout == right.read_bytes()
    assert vckpt("cat", store, "run/0/flipped.safetensors", text=False).stdout == flipped.read_bytes()
    assert [t[:2] for t in told(vckpt, store)] == [(0, "w")]    # the new step is sound
    assert vckpt("verify", store, "run/1").returncode == 0
    assert vckpt.json("import", store, "run", right)["pieces_new"] == 0   # and a base


def test_an_inline_piece_too(vckpt, lib, step, tmp_path):
    forge = Forge(lib, step, "run")
    replace_xxh(lib, forge, numpy.arange(7, dtype="f4").tobytes(), bytes(28))
    forge.done(tmp_path / "scratch")
    assert any("XXH3-128" in what for _, _, what in told(vckpt, step))


# ---- what fields say of each other ----

def add(message, number, more=1):
    message.set(number, message.get(number) + more)


def both(number):
    def lie(f):
        add(f.manifest, number)
        add(f.commit, {14: 6, 15: 7, 16: 8}[number])
    return lie


def attribute(value, *where):
    def lie(f):
        for name in where:
            m = getattr(f, name)
            key = 7 if name == "manifest" else 9
            pair = Message(m.get(key))
            pair.set(2, value)
            m.set(key, pair.encode())
    return lie


def table(message, number, name, at, value):
    """A number of the row of the pack that ends in `name`, in a pack table."""
    packs = Message(message.get(number))
    rows, classes = bytearray(packs.get(3)), packs.all(2)
    row = next(i for i in range(len(rows) // 32) if classes[struct.unpack_from("<I", rows, 32 * i + 8)[0]] == name)
    old = struct.unpack_from("<Q", rows, 32 * row + at)[0]
    struct.pack_into("<Q", rows, 32 * row + at, old + value)
    packs.set(3, bytes(rows))
    message.set(number, packs.encode())


def header(old, new):
    def lie(f):
        data = f.object(HEADER)
        assert old in data and len(old) == len(new)
        data[:] = data.replace(old, new)
    return lie


def view(number, value):
    def lie(f):
        h = Message(f.manifest.get(9))
        h.set(number, value if isinstance(value, bytes) else h.get(number) + value)
        f.manifest.set(9, h.encode())
    return lie


def last_tensor_left_out(f):
    data = f.object(HEADER)
    tensors = json.loads(bytes(data[8:]))
    name = max((n for n in tensors if n != "__metadata__"), key=lambda n: tensors[n]["data_offsets"])
    begin, end = tensors.pop(name)["data_offsets"]
    data[8:] = json.dumps(tensors).encode().ljust(len(data) - 8)
    view(4, begin - end)(f)


def grown(number, by):
    """A table of the layout that is longer than its tensors need."""
    def lie(f):
        layout = Message(bytes(f.object(LAYOUT)))
        layout.set(number, layout.get(number) + by)
        f.object(LAYOUT)[:] = layout.encode()
    return lie


def blob_names(*names):
    """Field 17 of a manifest: (name, per_rank, first rank, how many)."""
    found, all_names = [], Message(b"")
    for name, per_rank, first, count in names:
        one = Message(b"")
        one.set(1, name)
        if per_rank:
            one.set(2, 1)
        one.fields.append((3, 2, struct.pack("<II", first, count)))
        found.append(one.encode())
    all_names.set(1, *found)
    return all_names.encode()


MANIFEST, ENTRY = "runs/run/manifests/", "runs/run/0000"


@pytest.mark.parametrize("lie,file,sentence", [
    (both(14), MANIFEST, "it says 4 tensors, and its layouts have 3"),
    (lambda f: add(f.manifest, 14), MANIFEST, "it says 4 tensors, and its layouts have 3"),
    (lambda f: add(f.commit, 6), ENTRY, "it says 4 tensors of step 0, its manifest 3"),
    (both(15), MANIFEST, "it says 120029 bytes, and its parts have 120028"),
    (lambda f: add(f.commit, 7), ENTRY, "it says 120029 bytes of step 0, its manifest 120028"),
    (both(16), MANIFEST, "new bytes, and its attempt's packs have"),
    (lambda f: add(f.commit, 8), ENTRY, "new bytes of step 0, its manifest"),
    (attribute(b"2.4", "commit"), ENTRY, "it says other attributes of step 0 than its manifest"),
    (attribute(b"2.4", "manifest"), ENTRY, "it says other attributes of step 0 than its manifest"),
    (lambda f: f.commit.set(9), ENTRY, "it says other attributes of step 0 than its manifest"),
    (lambda f: f.manifest.set(5, 3), MANIFEST, "has another run, step or attempt than the commit entry that names it"),
    (lambda f: f.manifest.set(4, b"00000000000000aa-0"), MANIFEST,
     "has another run, step or attempt than the commit entry that names it"),
    (lambda f: f.manifest.set(10, b"elsewhere"), MANIFEST, "the part of rank 0 says host"),
    (lambda f: f.part.set(5, b"elsewhere"), MANIFEST, "the part of rank 0 says host elsewhere, the manifest"),
    (lambda f: add(f.part, 4), MANIFEST, "the part of rank 0 says a world of 2 ranks, the manifest one of 1"),
    (lambda f: table(f.part, 7, b"model", 16, 8), MANIFEST, "the part of rank 0 says that pack"),
    (lambda f: table(f.part, 7, b"model", 24, -1), MANIFEST, "bytes of pack"),
    (lambda f: table(f.manifest, 13, b"model", 24, -1), MANIFEST, "are live, and its parts reach"),
    (lambda f: (setattr(f, "keep_sums", True), table(f.manifest, 13, b"meta", 24, -1)), MANIFEST,
     "are live, and its parts reach"),
    (lambda f: f.manifest.set(17, blob_names((b"x.json", False, 0, 1))), MANIFEST,
     "the ranks that it lists for blob x.json are not those whose parts have it"),
    (lambda f: f.part.set(11, struct.pack("<I", 3) + bytes(32)), MANIFEST,
     "the part of rank 0 has a sample of tensor 3, and its layout has 3"),
    (header(b'"F32","shape":[7]', b'"I32","shape":[7]'), MANIFEST,
     "the header of model.safetensors says that tensor 'small' is i32, the layout f32"),
    (header(b"[50,300]", b"[300,50]"), MANIFEST, "the header of model.safetensors gives tensor"),
    (header(b'"small"', b'"smell"'), MANIFEST, "the header of model.safetensors names tensor 'smell', which the layout "
     "does not have"),
    (view(4, 8), MANIFEST, "and 8 bytes follow its data"),
    (view(1, b"other"), MANIFEST, "it has a header of other.safetensors, and the layout has no such component"),
    (last_tensor_left_out, MANIFEST, "the header of model.safetensors names 2 tensors, and 3 of the layout "
     "belong there"),
    (grown(8, b"x"), MANIFEST, "a layout cannot be read"),
    (grown(9, struct.pack("<Q", 3)), MANIFEST, "a layout cannot be read"),
])
def test_records_that_disagree(vckpt, lib, step, tmp_path, lie, file, sentence):
    forge = Forge(lib, step, "run")
    lie(forge)
    forge.done(tmp_path / "scratch")
    for target in ([], ["run"], ["run/0"]):
        done = vckpt("verify", step, *target, check=False)
        assert done.returncode == 3
        damage = vckpt.json("verify", step, *target, check=False)["damage"]
        assert any(file in d["file"] and sentence in d["what"] for d in damage), damage
        assert {d.get("step") for d in damage} == {0}, damage
    out = vckpt.json("mend", step, check=False)     # nothing but a lie is wrong: it is named, and left
    assert out["left"] and not out["done"] and {line["step"] for line in out["lines"] if line["what"] == "lost"} == {0}


def test_blobs_that_are_too_many_to_name(vckpt, lib, store, tmp_path):
    """Their manifest does not name them; one that says that there are none lies."""
    model(tmp_path / "model.safetensors")
    for i in range(1025):
        (tmp_path / f"{i}.txt").touch()
    vckpt("import", store, "run", tmp_path, "-q")
    forge = Forge(lib, store, "run")
    assert not forge.manifest.all(17) and told(vckpt, store) == []
    forge.manifest.encode = lambda: Message.encode(forge.manifest) + b"\x8a\x01\0"      # field 17, and empty
    forge.done(tmp_path / "scratch")
    assert "more than a manifest can list" in told(vckpt, store)[0][2]
