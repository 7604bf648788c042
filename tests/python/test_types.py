# SPDX-License-Identifier: Apache-2.0
"""The package has types: every public name says what it takes and gives, the marker py.typed is installed beside it,
and a checker that knows nothing else finds right what is right in a program, and wrong what is wrong. That the package
itself passes mypy --strict is tests/lint's."""
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import typing
import venv

import pytest

import vckpt
from vckpt import saver, signatures

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tools/python/vckpt"

SPECIAL = {"__init__", "__call__", "__getitem__", "__contains__", "__enter__", "__exit__", "__bool__", "__iter__",
           "__len__", "__repr__", "__getattr__"}
# of Handle: the parts of a save, by the package
INSIDE = {"tensors", "blob", "common", "alike", "submit", "give_up"}


def functions():
    for name in vckpt.__all__:
        found = getattr(vckpt, name)
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found):
            for inner, member in vars(found).items():
                member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                own = inspect.isfunction(member) and member.__module__.startswith("vckpt.")
                if (own and (inner in SPECIAL or not inner.startswith("_")) and
                    not (found is vckpt.Handle and (inner in INSIDE or inner == "__init__"))):
                    yield f"{name}.{inner}", member


def test_every_public_name_has_types():
    seen, wrong = set(), []
    for name, function in functions():
        seen.add(name)
        hints = typing.get_type_hints(function)         # and every word of them means something
        missing = [one for one in inspect.signature(function).parameters if one not in ("self", "cls") and
                   one not in hints]
        wrong += ([f"{name}: {', '.join([*missing, *['what it returns'] * ('return' not in hints)])}"] if missing or
                  "return" not in hints else [])
    assert not wrong, wrong
    assert {"save", "async_save", "init", "steps", "latest", "close", "on_sigterm", "Saver.__init__", "load",
            "Loaded.blob", "Saver.async_save", "Handle.committed", "Handle.progress",
            "open", "Step.read", "Step.values", "Step.keys", "Step.__iter__", "Step.__len__", "Step.__repr__",
            "Step.get", "LazyTensor.__getitem__", "LazyTensor.torch", "Shard.__init__",
            "Record.__getitem__", "Mesh.size", "Stopping.__call__", "Error.__init__"} <= seen


def test_every_public_name_is_there():
    assert len(set(vckpt.__all__)) == len(vckpt.__all__) and all(hasattr(vckpt, name) for name in vckpt.__all__)
    named = {name for name, found in vars(vckpt).items() if not name.startswith("_") and
             getattr(found, "__module__", "").startswith("vckpt.")}
    assert named <= set(vckpt.__all__), named - set(vckpt.__all__)


def test_arguments_that_are_handed_on_are_those_that_are_taken():
    """save(**arguments) and Saver.async_save(**arguments) are typed by a list; the functions by their parameters."""
    taken = inspect.signature(vckpt.async_save).parameters
    listed = {name for name in taken if taken[name].kind == inspect.Parameter.KEYWORD_ONLY}
    assert set(signatures.Options.__annotations__) == set(saver.OPTIONS)
    assert set(signatures.Call.__annotations__) == listed | set(saver.OPTIONS)
    begun = inspect.signature(saver._start).parameters
    assert set(signatures.Save.__annotations__) == set(begun) - {"one", "state", "found"}
    hints = typing.get_type_hints(vckpt.async_save)
    assert {name: hints[name] for name in listed} == {name: typing.get_type_hints(signatures.Call)[name]
                                                      for name in listed}


def test_what_is_installed_is_what_there_is():
    """Every module, and py.typed, which a checker looks for."""
    listed = re.findall(r"'vckpt/([\w.]+)'", (ROOT / "tools/python/meson.build").read_text())
    assert sorted(listed) == sorted([*(path.name for path in PACKAGE.glob("*.py")), "py.typed"])
    assert (PACKAGE / "py.typed").read_bytes() == b""


RIGHT = """
import pathlib
from typing import Optional
import vckpt
from vckpt import dcp

vckpt.init(pathlib.Path("/ckpt"), exist_ok=True)
number: int = vckpt.save("/ckpt/run", {"model": {"w": [1.0]}}, step=3, attributes={"loss": 0.5}, per_rank="rng",
                         deadline=600.0)
with vckpt.on_sigterm() as stopping, vckpt.Saver("/ckpt/run", check_replicas="full", threads=2) as saver:
    handle: vckpt.Handle = saver.async_save({"model": {}}, step=4, mesh="dp=2", blobs={"config.json": b"{}"})
    handle.staged(timeout=1.5)
    done: bool = handle.done or stopping(4)
    bytes_done: int = handle.progress["bytes_done"]
with vckpt.open("/ckpt/run/latest", framework="numpy") as step:
    names: list[str] = [info.name for info in step.tensors()] + [blob.name for blob in step.blobs()]
    part = step.read("model", "w", box=(slice(0, 2), slice(None)))
try:
    handle.committed()
except vckpt.Error as error:
    code: int = error.errno
    text: str = error.text
shard = vckpt.Shard(part, shape=(4, 4), flat=(0, 8), same_dims=["dp"])
steps: list[int] = vckpt.steps("/ckpt/run")
newest: Optional[int] = vckpt.latest("/ckpt/run")
found = vckpt.load("/ckpt/run", {"model": {}}, missing_ok=True, strict=False, mesh="dp=2")
first: int = found.step + 1 if found else 1
lacking: list[str] = found.missing if found and not found.rng else []
version: str = vckpt.__version__
whole = step.values("model", types={"train.Config": dict}, tensors=False)
writer = dcp.StorageWriter("/ckpt/dcp", overwrite=False, attributes={"loss": "0.5"}, bases=["run/3"], deadline=60.0,
                           pin="no")
reader = vckpt.dcp.StorageReader(pathlib.Path("/ckpt/dcp"))
mesh: tuple[int, ...] = vckpt.Mesh("cpu", [[0, 1], [2, 3]], ["dp", "tp"]).ranks
record: str = vckpt.Record("train.Config", {"lr": 0.1}).type_name
tensors: dict[str, vckpt.LazyTensor] = dict(step)
shapes: dict[str, tuple[int, ...]] = {key.upper(): tensor.shape for key, tensor in step.items()}
keys: list[str] = step.keys() + [key for key in step][:len(step)]
"""
WRONG = [
    'vckpt.save("/ckpt/run", {}, steps=3)', 'vckpt.save("/ckpt/run", {}, step="3")',
    'vckpt.Saver("/ckpt/run", pin="maybe")',
    'vckpt.Saver("/ckpt/run", step=3)', 'vckpt.Saver("/ckpt/run").save({}, deadline=3)', "vckpt.save(3, {})",
    'vckpt.steps("/ckpt/run").upper()',
    'vckpt.Step("/ckpt/run", framework="jax")', 'vckpt.open("/ckpt/run", framework="jax")',
    'vckpt.no_such_name("/ckpt")', 'vckpt.on_sigterm()("3")',
    'vckpt.dcp.StorageWriter("/ckpt/dcp", thread_cuont=1)', 'vckpt.dcp.StorageReader(3)', 'vckpt.Mesh("cpu", 3)',
    'vckpt.Record("a", 1)',
    'vckpt.latest("/ckpt/run") + 1', "vckpt.__version__()", 'vckpt.load("/ckpt/run", {}).step',
    'vckpt.load("/ckpt/run", {}, step=3)',
]


def test_a_checker(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed (tests/requirements.txt)")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text("import vckpt\n" + "".join(line + "\n" for line in WRONG))
    # Installed, as pip does it: where py.typed were missing, the checker would take nothing from it.
    venv.create(tmp_path / "env", symlinks=True)
    site = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
    shutil.copytree(PACKAGE, site / "vckpt", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--python-executable",
                           tmp_path / "env/bin/python",
                           "--config-file=", f"--cache-dir={tmp_path}/cache", "right.py", "wrong.py"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert not re.search(r"^right\.py", done.stdout, re.M) and not done.stderr, done.stdout + done.stderr
    found = {int(line) for line in re.findall(r"^wrong\.py:(\d+): error", done.stdout, re.M)}
    assert found == set(range(2, 2 + len(WRONG))), done.stdout


@pytest.mark.parametrize("version", ["3.10", "now"])
def test_it_is_imported_without_typing_extensions(version):
    """Python 3.10 has no Unpack, and nothing says that typing_extensions are installed there."""
    program = ("import sys, numpy; sys.modules['typing_extensions'] = None\n" + "sys.version_info = (3, 10, 0, "
               "'final', 0)\n" * (version == "3.10") +
               "import vckpt, typing; print(typing.get_type_hints(vckpt.async_save)['step'])")
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
                          capture_output=True, text=True)
    assert done.returncode == 0 and "int" in done.stdout, done.stderr
