# SPDX-License-Identifier: Apache-2.0
"""numpy with ml_dtypes: its arrays are saved, and what a step has in bf16 and f8 comes back in its types, whole, by
`out=`, by load and as what a rank keeps by itself."""
import ml_dtypes
import numpy as np
import pytest

import vckpt

NAMES = {"bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3fn", "float8_e5m2": "f8_e5m2", "float8_e4m3fnuz": "f8_e4m3fnuz",
         "float8_e5m2fnuz": "f8_e5m2fnuz",
         "float8_e8m0fnu": "f8_e8m0fnu"}
ALONE = {"rank": 0, "world": 1}


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


def arrays():
    values = np.array([[1.0, 2.0, 0.5], [4.0, 0.25, 8.0]])
    return {name: values.astype(getattr(ml_dtypes, name)) for name in NAMES}


def test_there_and_back(run):
    kept = arrays()
    vckpt.save(run, {"m": kept, "own": {"q": kept["bfloat16"]}}, per_rank="own", pin="no", **ALONE)
    with vckpt.Step(run, "numpy") as step:
        assert {info.name: info.dtype for info in step.tensors() if info.component == "m"} == NAMES
        for name, array in kept.items():
            out = np.zeros_like(array)
            assert step.read("m", name, out=out) is out
            raw = np.zeros(array.shape, f"V{array.itemsize}")
            filled = step.read("m", name, out=raw).view(array.dtype)
            for found in step["m", name].numpy(), out, step.values("m")[name], filled:
                assert found.dtype == array.dtype and np.array_equal(found.astype("f4"), array.astype("f4")), name
        own = step.values("own", rank=0)["q"]
        assert own.dtype == ml_dtypes.bfloat16 and np.array_equal(own, kept["bfloat16"])
        # of the same size, and of another type
        with pytest.raises(vckpt.InvalidArgument, match="expected f8_e4m3fn of shape"):
            step.read("m", "float8_e4m3fn", out=np.zeros((2, 3), ml_dtypes.float8_e5m2))


def test_load_and_convert(run):
    kept = arrays()
    vckpt.save(run, {"m": kept}, pin="no", **ALONE)
    same, wide = {name: np.zeros_like(array) for name, array in kept.items()}, {name: np.zeros((2, 3), "f4")
                                                                                for name in kept}
    for to in same, wide:
        vckpt.load(run, {"m": to}, **ALONE)
        assert all(np.array_equal(to[name].astype("f4"), array.astype("f4")) for name, array in kept.items())
    vckpt.save(run, {"m": wide}, pin="no", **ALONE)
    del same["float8_e8m0fnu"], kept["float8_e8m0fnu"]          # powers of two alone: nothing is converted to it
    vckpt.load(run, {"m": same}, strict=False, **ALONE)
    assert all(np.array_equal(same[name], array) for name, array in kept.items())
