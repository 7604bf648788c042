# SPDX-License-Identifier: Apache-2.0
"""The digest that people see of a tensor binds dtype, shape and bytes (docs/format/part.md, which stands here once
more)."""
import hashlib
import pathlib
import shutil
import struct

import numpy
import pytest
from safetensors.numpy import save_file

DTYPES = {"u1": 2, "u2": 3, "u4": 4, "u8": 5, "i1": 6, "i2": 7, "i4": 8, "i8": 9, "f2": 10, "f4": 12, "f8": 13}
GOLDEN = pathlib.Path(__file__).parents[1] / "golden/v1/store.tar.xz"


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def u64(*numbers):
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def piece(data):
    blocks = [data[i:i + 16384] for i in range(0, len(data), 16384)]
    return sha(b"\1", u64(len(data)), *[sha(b"\0", b) for b in blocks])


def shown(array):
    """Of a tensor that the grid does not cut."""
    row = sha(b"\2", u64(1), piece(array.tobytes()))
    return sha(b"\4", u64(DTYPES[array.dtype.str[1:]], array.ndim, *array.shape), row).hex()


def test_the_same_bytes_read_otherwise(vckpt, store, tmp_path):
    rng = numpy.random.default_rng(3)
    data = rng.standard_normal(6000).astype("f4")
    arrays = {"f4": data, "i4": data.view("i4"), "u4": data.view("u4"), "f8": data.view("f8"), "bytes": data.view("u1"),
              "square": data.reshape(60, 100),
              "tall": data.reshape(100, 60), "column": data.reshape(-1, 1), "row": data.reshape(1, -1),
              "tiny": data[:4], "scalar": numpy.array(data[0]),
              "one": data[:1], "none": data[:0], "nothing": data[:0].reshape(0, 7), "none_i4": data[:0].view("i4")}
    save_file(arrays, tmp_path / "model.safetensors")
    vckpt("import", store, "run", tmp_path / "model.safetensors", "-q")
    found = {name: vckpt.json("info", store, f"run/0/model/{name}")["digest"] for name in arrays}
    assert len(set(found.values())) == len(arrays), found
    assert found == {name: shown(array) for name, array in arrays.items()}


@pytest.mark.parametrize("step,uncut", [("a/0", 2), ("b/7", 0)])
def test_digests_of_an_old_store(vckpt, tmp_path, step, uncut):
    """They are made when they are shown: of a format-1 store the same, and the same as in the store that its steps are
    brought to."""
    shutil.unpack_archive(GOLDEN, tmp_path)
    old, found, checked, same = tmp_path / "store", {}, 0, 0
    new = tmp_path / "new"
    vckpt("init", new)
    vckpt("export", old, step, tmp_path / "out")
    vckpt("import", new, "run", tmp_path / "out", "-q")
    vckpt("export", old, step, tmp_path / "npy", "--format", "npy")
    for path in sorted((tmp_path / "npy").rglob("*.npy")):
        name = path.relative_to(tmp_path / "npy").as_posix()[:-len(".npy")]
        tensor = vckpt.json("info", old, f"{step}/{name}", check=False)
        again = vckpt.json("info", new, f"run/{step[2:]}/{name}", check=False)
        same += (alike := tensor["pieces"] == again["pieces"])     # what their grids cut alike
        assert not alike or tensor["digest"] == again["digest"]
        found.setdefault(tensor["digest"], []).append(name)
        array = numpy.load(path)
        if (tensor["pieces"] == 1 and array.dtype.str[1:] in DTYPES and array.flags.c_contiguous and
            tensor["dtype"] == array.dtype.name.replace("float", "f")):
            assert tensor["digest"] == shown(array), name
            checked += 1
    assert found and checked >= uncut and same, (found, checked, same)
