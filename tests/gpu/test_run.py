# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/run: a step that fails, hangs or dies takes no other with it, and the result says which. The whole command
runs, with the stand-ins, in tests/install/test_gpu_pack.py."""
import importlib.machinery
import importlib.util
import json
import pathlib
import sys
import time

import pytest

RUN = pathlib.Path(__file__).resolve().parent / "run"

STEP = """
import os, subprocess, sys, time
print('@row {"what": "a figure", "value": 2.5, "unit": "GB/s", "against": "another", "reference": 5.0}', flush=True)
word = sys.argv[1]
if word == "fails":
    raise SystemExit("the reason")
if word == "dies":
    os.abort()
if word == "hangs":
    subprocess.Popen(["sleep", "600"], stdout=sys.stdout)
    time.sleep(600)
if word == "skips":
    print("@skip no device")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(steps): what the command's main gives and the results by step."""
    loader = importlib.machinery.SourceFileLoader("gpu_run", str(RUN))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
    loader.exec_module(module)
    pack = tmp_path / "pack"
    for folder in ("lib", "wheels", "tests/gpu", "build/tools/vckpt"):
        (pack / folder).mkdir(parents=True)
    (pack / "pack.json").write_text("{}")
    (pack / "build/tools/vckpt/vckpt").touch()
    (pack / "tests/gpu/measure.py").write_text(STEP)
    monkeypatch.setattr(module.Machine, "facts", lambda _: {"device": "none"})

    def call(steps, *arguments):
        monkeypatch.setattr(module, "STEPS", steps)
        monkeypatch.setattr(sys, "argv", ["run", str(pack), "--out", str(tmp_path / "out"), "--dir", str(tmp_path),
                                          *arguments])
        status = module.main()
        found = json.loads((tmp_path / "out/gpu.json").read_text())["steps"]
        return status, {one["step"]: one for one in found}
    return call


def test_each_step_by_itself(run, capsys):
    begin = time.monotonic()
    status, steps = run([("fails", 60, None), ("dies", 60, None), ("hangs", 2, None), ("skips", 60, None),
                         ("works", 60, None)])
    assert status == 1 and time.monotonic() - begin < 100
    assert {name: one["state"] for name, one in steps.items()} == {
        "fails": "FAILED", "dies": "FAILED", "hangs": "FAILED", "skips": "skipped", "works": "passed"}
    assert all(one["rows"][0]["value"] == 2.5 for one in steps.values())
    assert "the reason" in steps["fails"]["notes"] and "did not end within 2 s" in steps["hangs"]["notes"]
    assert "0.50 of another (5)" in capsys.readouterr().out


def test_the_time_of_all(run):
    status, steps = run([("works", 60, None), ("fails", 60, None)], "--seconds", "4", "--only", "works")
    assert status == 1 and steps["works"]["state"] == "not run" and "4 s were over" in steps["works"]["notes"]
    status, steps = run([("works", 60, None), ("fails", 60, None)], "--only", "works")
    assert status == 0 and list(steps) == ["works"]
    with pytest.raises(SystemExit, match="no such step: none"):
        run([("works", 60, None)], "--only", "none")
