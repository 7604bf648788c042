# SPDX-License-Identifier: Apache-2.0
"""Whose tensors a step gives: by what is installed or asked for, not by what was imported before."""
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

import vckpt
from vckpt import arrays

HAS_TORCH = sys.modules.get("torch", "") is not None and importlib.util.find_spec("torch") is not None


@pytest.fixture
def run(tmp_path):
    vckpt.save(tmp_path / "store/run", {"m": {"w": np.arange(4.0)}}, rank=0, world=1, pin="no")
    vckpt.close()
    return str(tmp_path / "store/run")


def test_what_was_imported_does_not_matter(run):
    """In a program of its own that imports torch after, or not at all; tests/torch imports it before."""
    read = f"s = vckpt.Step({run!r}); print(type(s.read('m', 'w')).__module__.split('.')[0], 'torch' in sys.modules)"
    blocked = "import sys; sys.modules['torch'] = None; import vckpt"
    wanted = "torch True" if HAS_TORCH else "numpy False"
    programs = {f"import sys, vckpt; {read}": wanted,
                f"import sys, vckpt; s = vckpt.Step({run!r}, 'numpy'); print(type(s.read('m', 'w')).__module__, "
                f"'torch' in sys.modules)": "numpy False",
                f"import sys, vckpt; vckpt.Step({run!r}); print('none', 'torch' in sys.modules)": "none False",
                f"{blocked}; print(type(vckpt.Step({run!r}).read('m', 'w')).__module__)": "numpy"}
    environment = dict(os.environ)
    if environment.get("VCKPT_PRELOAD"):
        environment["LD_PRELOAD"] = environment["VCKPT_PRELOAD"]
    for program, said in programs.items():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment,
                              cwd=run.rpartition("/")[0])
        assert done.stdout.strip() == said, (program, done.stdout, done.stderr)


def test_a_folder_called_torch_is_none(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    importlib.invalidate_caches()
    assert arrays.installed.__wrapped__() == "numpy"


def test_bytes_where_ml_dtypes_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    names = {name: arrays.numpy_dtype.__wrapped__(number).str for number, name in enumerate(arrays._lib.DTYPES) if name}
    assert names["bf16"] == "|V2" and {names[name] for name in names if name.startswith(("f8", "f4"))} == {"|V1"}
    assert names["f32"] == "<f4" and names["bool"] == "|b1" and names["c128"] == "<c16"
    bits = np.array([0x3f80, 0xc000], "<u2").view("V2")          # as docs/python.md says
    assert (bits.view("<u2").astype("<u4") << 16).view("<f4").tolist() == [1.0, -2.0]
